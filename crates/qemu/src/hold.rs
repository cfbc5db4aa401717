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
const LONGEST: u32 = u32::MAX;

/// The filters of one card, in the order in which they are created: a frame from the guest passes the last one first.
const KINDS: [&str; 3] = ["gate", "held", "now"];

fn id(kind: &str, net: &str) -> String {
    format!("rekindle-{kind}-{net}")
}

fn place(net: &str) -> String {
    id("nowhere", net)
}

/// The network cards whose output is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold {
    nets: Vec<String>,
}

impl Hold {
    /// Starts to hold the guest's output on `nets`. Frames that are held already stay held.
    ///
    /// # Errors
    /// When QEMU rejects a filter: a card is served by the kernel (vhost), or has several queues. No filter is then
    /// left on that card.
    pub fn begin<'n>(qmp: &mut Qmp, nets: impl IntoIterator<Item = &'n str>) -> Result<Self, QmpError> {
        let there = objects(qmp)?;
        let mut hold = Self { nets: Vec::new() };
        for net in nets {
            let whole = KINDS.iter().all(|kind| there.contains(&id(kind, net)));
            if !whole {
                // The process that created or removed these filters has died: they held nothing reliably.
                remove(qmp, net)?;
                if let Err(e) = make(qmp, net) {
                    remove(qmp, net)?;
                    return Err(e);
                }
            }
            set(qmp, "gate", net, true)?;
            hold.nets.push(net.to_owned());
        }
        Ok(hold)
    }

    /// Returns the ids of the held networks.
    pub fn nets(&self) -> impl Iterator<Item = &str> {
        self.nets.iter().map(String::as_str)
    }

    /// Returns the held networks of this QEMU, if there are any.
    ///
    /// # Errors
    /// When QEMU does not answer or returns an error.
    pub fn found(qmp: &mut Qmp) -> Result<Option<Self>, QmpError> {
        let begins = id("gate", "");
        let nets: Vec<_> =
            objects(qmp)?.iter().filter_map(|name| name.strip_prefix(&begins).map(str::to_owned)).collect();
        Ok((!nets.is_empty()).then_some(Self { nets }))
    }

    /// Marks the guest's output until now for the next [`Hold::release`]. The guest must be stopped.
    ///
    /// # Errors
    /// When QEMU does not answer; the frames are then released one release later.
    pub fn cut(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        self.nets.iter().try_for_each(|net| empty(qmp, "now", net))
    }

    /// Releases the guest's output until the last [`Hold::cut`].
    ///
    /// # Errors
    /// When QEMU does not answer; the frames are then still held, or released.
    pub fn release(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        self.nets.iter().try_for_each(|net| {
            set(qmp, "gate", net, false)?;
            let emptied = empty(qmp, "held", net);
            set(qmp, "gate", net, true)?;
            emptied
        })
    }

    /// Releases all frames and stops holding.
    ///
    /// # Errors
    /// When QEMU does not answer; the caller can try again with a new [`Hold::found`].
    pub fn end(self, qmp: &mut Qmp) -> Result<(), QmpError> {
        self.nets.iter().try_for_each(|net| {
            set(qmp, "gate", net, false)?;
            remove(qmp, net)
        })
    }
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

fn make(qmp: &mut Qmp, net: &str) -> Result<(), QmpError> {
    let nowhere = json!({"id": place(net), "backend": {"type": "null", "data": {}}});
    qmp.execute::<Value>("chardev-add", nowhere)?;
    let mut object = |kind: &str, more: Value| {
        let mut all = json!({"id": id(kind, net), "netdev": net, "queue": "rx"});
        if let (Some(all), Value::Object(more)) = (all.as_object_mut(), more) {
            all.extend(more);
        }
        qmp.execute::<Value>("object-add", all).map(drop)
    };
    // The gate starts open, until there is a buffer in front of it.
    object("gate", json!({"qom-type": "filter-redirector", "outdev": place(net), "status": "off"}))?;
    object("held", json!({"qom-type": "filter-buffer", "interval": LONGEST}))?;
    object("now", json!({"qom-type": "filter-buffer", "interval": LONGEST}))
}

/// Removes the filters of a card that exist. QEMU releases the frames of a buffer that is removed.
fn remove(qmp: &mut Qmp, net: &str) -> Result<(), QmpError> {
    for kind in KINDS.iter().rev() {
        absent_is_fine(qmp.execute("object-del", json!({"id": id(kind, net)})))?;
    }
    absent_is_fine(qmp.execute("chardev-remove", json!({"id": place(net)})))
}

fn absent_is_fine(done: Result<Value, QmpError>) -> Result<(), QmpError> {
    match done {
        Err(QmpError::Refused { .. }) => Ok(()),
        other => other.map(drop),
    }
}

fn set(qmp: &mut Qmp, kind: &str, net: &str, on: bool) -> Result<(), QmpError> {
    let path = format!("/objects/{}", id(kind, net));
    let value = if on { "on" } else { "off" };
    qmp.execute::<Value>("qom-set", json!({"path": path, "property": "status", "value": value})).map(drop)
}

/// Empties a buffer: QEMU releases its frames when it is switched off.
fn empty(qmp: &mut Qmp, kind: &str, net: &str) -> Result<(), QmpError> {
    let off = set(qmp, kind, net, false);
    set(qmp, kind, net, true)?;
    off
}
