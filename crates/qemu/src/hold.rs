//! A guest's network output, held inside QEMU until it is released: *output commit* (Remus; Cully et al., NSDI 2008).
//!
//! For each network card there are three of QEMU's own packet filters:
//!
//! ```text
//! guest ──> now ──> held ──> gate ──> tap or user network
//!           sent since the     off: frames pass
//!           last stop          on:  frames are dropped
//! ```
//!
//! *cut*, while the guest is stopped: the frames of `now` move to `held`. *release*, once the guest's state at that
//! cut is safe: the gate opens, `held` is emptied, the gate closes. Frames that the guest sends in the meantime are
//! in `now` and stay there.
//!
//! `now` and `held` are `filter-buffer`s, which QEMU made for checkpoints. They cannot hold frames without limit: 71
//! minutes of guest time after they were last emptied, they release all frames by themselves. This is why the gate
//! exists, a `filter-redirector` to a null device. If no process opens the gate, these frames are lost, as in a
//! network, instead of sent. Each buffer holds at most 10000 frames and drops later ones. The filters belong to QEMU:
//! they survive the process that created them, and end with QEMU.

use crate::qmp::{Qmp, QmpError};
use serde::Deserialize;
use serde_json::{Value, json};

/// Longest interval of a `filter-buffer`, in µs.
const MAX_INTERVAL_US: u32 = u32::MAX;

const GATE: &str = "gate";
const HELD: &str = "held";
const NOW: &str = "now";
/// The filters of one card, in the order in which they are created: a frame from the guest passes the last one first.
const FILTERS: [&str; 3] = [GATE, HELD, NOW];

/// The network cards whose output is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputHold {
    nets: Vec<String>,
}

impl OutputHold {
    /// Starts to hold the guest's output on `nets`. Frames that are held already stay held.
    ///
    /// # Errors
    /// When QEMU rejects a filter: a card is served by the kernel (vhost), or has several queues. No filter is then
    /// left on that card.
    pub fn begin<'n>(qmp: &mut Qmp, nets: impl IntoIterator<Item = &'n str>) -> Result<Self, QmpError> {
        let existing = objects(qmp)?;
        let mut hold = Self { nets: Vec::new() };
        for net in nets {
            let has_all_filters = FILTERS.iter().all(|filter| existing.contains(&filter_id(filter, net)));
            if !has_all_filters {
                // The process that created or removed these filters has died: they held nothing reliably.
                remove_filters(qmp, net)?;
                if let Err(e) = create_filters(qmp, net) {
                    remove_filters(qmp, net)?;
                    return Err(e);
                }
            }
            close_gate(qmp, net)?;
            hold.nets.push(net.to_owned());
        }
        Ok(hold)
    }

    /// Returns the ids of the held networks.
    pub fn nets(&self) -> impl Iterator<Item = &str> {
        self.nets.iter().map(String::as_str)
    }

    /// Returns the hold that another process has started in this QEMU, if there is one.
    ///
    /// # Errors
    /// When QEMU does not answer or returns an error.
    pub fn find(qmp: &mut Qmp) -> Result<Option<Self>, QmpError> {
        let prefix = filter_id(GATE, "");
        let nets: Vec<_> =
            objects(qmp)?.iter().filter_map(|name| name.strip_prefix(&prefix).map(str::to_owned)).collect();
        Ok((!nets.is_empty()).then_some(Self { nets }))
    }

    /// Marks the guest's output until now for the next [`OutputHold::release`]. The guest must be stopped.
    ///
    /// # Errors
    /// When QEMU does not answer; the frames are then released one release later.
    pub fn cut(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        self.nets.iter().try_for_each(|net| empty_buffer(qmp, NOW, net))
    }

    /// Releases the guest's output until the last [`OutputHold::cut`].
    ///
    /// # Errors
    /// When QEMU does not answer; the frames are then still held, or released.
    pub fn release(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        self.nets.iter().try_for_each(|net| {
            open_gate(qmp, net)?;
            let emptied = empty_buffer(qmp, HELD, net);
            close_gate(qmp, net)?;
            emptied
        })
    }

    /// Releases all frames and stops holding.
    ///
    /// # Errors
    /// When QEMU does not answer; the caller can try again with a new [`OutputHold::find`].
    pub fn end(self, qmp: &mut Qmp) -> Result<(), QmpError> {
        self.nets.iter().try_for_each(|net| {
            open_gate(qmp, net)?;
            remove_filters(qmp, net)
        })
    }
}

/// Returns QEMU's id of a network's filter.
fn filter_id(filter: &str, net: &str) -> String {
    format!("rekindle-{filter}-{net}")
}

/// Returns the id of the null device to which a closed gate sends the frames.
fn null_device_id(net: &str) -> String {
    filter_id("nowhere", net)
}

/// Returns the names of the objects that were created at run time.
fn objects(qmp: &mut Qmp) -> Result<Vec<String>, QmpError> {
    #[derive(Deserialize)]
    struct Object {
        name: String,
    }
    let objects: Vec<Object> = qmp.execute("qom-list", json!({"path": "/objects"}))?;
    Ok(objects.into_iter().map(|object| object.name).collect())
}

fn create_filters(qmp: &mut Qmp, net: &str) -> Result<(), QmpError> {
    let null_device = json!({"id": null_device_id(net), "backend": {"type": "null", "data": {}}});
    qmp.execute::<Value>("chardev-add", null_device)?;
    // The gate starts open, until there is a buffer in front of it.
    let gate = json!({"qom-type": "filter-redirector", "id": filter_id(GATE, net), "netdev": net, "queue": "rx",
        "outdev": null_device_id(net), "status": "off"});
    qmp.execute::<Value>("object-add", gate)?;
    for buffer in [HELD, NOW] {
        let buffer = json!({"qom-type": "filter-buffer", "id": filter_id(buffer, net), "netdev": net, "queue": "rx",
            "interval": MAX_INTERVAL_US});
        qmp.execute::<Value>("object-add", buffer)?;
    }
    Ok(())
}

/// Removes the filters of a card that exist. QEMU releases the frames of a buffer that is removed.
fn remove_filters(qmp: &mut Qmp, net: &str) -> Result<(), QmpError> {
    for filter in FILTERS.iter().rev() {
        ignore_absence(qmp.execute("object-del", json!({"id": filter_id(filter, net)})))?;
    }
    ignore_absence(qmp.execute("chardev-remove", json!({"id": null_device_id(net)})))
}

/// Turns QEMU's refusal to remove something into success: it does not exist.
fn ignore_absence(removed: Result<Value, QmpError>) -> Result<(), QmpError> {
    match removed {
        Err(QmpError::Refused { .. }) => Ok(()),
        other => other.map(drop),
    }
}

/// Lets frames pass.
fn open_gate(qmp: &mut Qmp, net: &str) -> Result<(), QmpError> {
    set_status(qmp, GATE, net, "off")
}

fn close_gate(qmp: &mut Qmp, net: &str) -> Result<(), QmpError> {
    set_status(qmp, GATE, net, "on")
}

/// Empties a buffer: QEMU releases its frames when it is switched off.
fn empty_buffer(qmp: &mut Qmp, buffer: &str, net: &str) -> Result<(), QmpError> {
    let switched_off = set_status(qmp, buffer, net, "off");
    set_status(qmp, buffer, net, "on")?;
    switched_off
}

fn set_status(qmp: &mut Qmp, filter: &str, net: &str, status: &str) -> Result<(), QmpError> {
    let path = format!("/objects/{}", filter_id(filter, net));
    qmp.execute::<Value>("qom-set", json!({"path": path, "property": "status", "value": status})).map(drop)
}
