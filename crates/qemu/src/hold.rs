//! What a guest sends, held inside QEMU until it is let out: *output commit* (Remus; Cully et al., NSDI 2008).
//!
//! By QEMU's own packet filters, three for each network card:
//!
//! ```text
//! guest ──> now ──> held ──> gate ──> tap or user network
//!           what it has sent   off: frames pass
//!           since its last     on:  they are dropped
//!           stop
//! ```
//!
//! *cut*, with the guest stopped: `now` is emptied into `held`. *release*, once what the guest was then is safe: the
//! gate opens, `held` is emptied, the gate closes. What the guest sends meanwhile is in `now`, and stays.
//!
//! `now` and `held` are `filter-buffer`s, which QEMU made for checkpoints, and which cannot wait for ever: 71 minutes
//! of the guest's time after they were last emptied they release all frames by themselves. Therefore the gate: a
//! `filter-redirector` to nowhere. If no process opens it, frames are lost then, as a network loses them, and not
//! sent. Each holds 10000 frames at most, and drops what comes after. They belong to QEMU: they survive the process
//! that created them, and end with QEMU.

use crate::qmp::{Qmp, QmpError};
use serde::Deserialize;
use serde_json::{Value, json};

/// The longest time that a `filter-buffer` can be given, in µs.
const LONGEST: u32 = u32::MAX;

/// The filters of one card, in the order in which they are made: a frame that the guest sends meets the last one first.
const KINDS: [&str; 3] = ["gate", "held", "now"];

fn id(kind: &str, net: &str) -> String {
    format!("rekindle-{kind}-{net}")
}

fn place(net: &str) -> String {
    id("nowhere", net)
}

/// What a guest sends on its cards, held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold {
    nets: Vec<String>,
}

impl Hold {
    /// Holds what the guest sends on `nets` from here on. Frames that are held already stay held.
    ///
    /// # Errors
    /// When QEMU refuses: a card is served by the kernel (vhost), or has several queues. Then it holds nothing more
    /// than before.
    pub fn begin<'n>(qmp: &mut Qmp, nets: impl IntoIterator<Item = &'n str>) -> Result<Self, QmpError> {
        let there = objects(qmp)?;
        let mut hold = Self { nets: Vec::new() };
        for net in nets {
            let whole = KINDS.iter().all(|kind| there.contains(&id(kind, net)));
            if !whole {
                // One that was being made or taken away when its maker died has been no promise.
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

    /// The cards.
    pub fn nets(&self) -> impl Iterator<Item = &str> {
        self.nets.iter().map(String::as_str)
    }

    /// What is held in this QEMU, if anything.
    ///
    /// # Errors
    /// When QEMU does not answer.
    pub fn found(qmp: &mut Qmp) -> Result<Option<Self>, QmpError> {
        let begins = id("gate", "");
        let nets: Vec<_> =
            objects(qmp)?.iter().filter_map(|name| name.strip_prefix(&begins).map(str::to_owned)).collect();
        Ok((!nets.is_empty()).then_some(Self { nets }))
    }

    /// The guest is stopped: what it has sent until now goes with the next [`Hold::release`].
    ///
    /// # Errors
    /// When QEMU does not answer; then it goes with the one after.
    pub fn cut(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        self.nets.iter().try_for_each(|net| empty(qmp, "now", net))
    }

    /// Lets out what the guest had sent until the last [`Hold::cut`].
    ///
    /// # Errors
    /// When QEMU does not answer; then it is held still, or out.
    pub fn release(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        self.nets.iter().try_for_each(|net| {
            set(qmp, "gate", net, false)?;
            let emptied = empty(qmp, "held", net);
            set(qmp, "gate", net, true)?;
            emptied
        })
    }

    /// Lets out all, and holds nothing more.
    ///
    /// # Errors
    /// When QEMU does not answer; it can be done again.
    pub fn end(self, qmp: &mut Qmp) -> Result<(), QmpError> {
        self.nets.iter().try_for_each(|net| {
            set(qmp, "gate", net, false)?;
            remove(qmp, net)
        })
    }
}

/// The names of the objects that were made at run time.
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
    // Open, until there is something before it that holds.
    object("gate", json!({"qom-type": "filter-redirector", "outdev": place(net), "status": "off"}))?;
    object("held", json!({"qom-type": "filter-buffer", "interval": LONGEST}))?;
    object("now", json!({"qom-type": "filter-buffer", "interval": LONGEST}))
}

/// Takes away what there is of a card's filters. A buffer that goes is emptied.
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

/// A buffer that is switched off passes on what it holds.
fn empty(qmp: &mut Qmp, kind: &str, net: &str) -> Result<(), QmpError> {
    let off = set(qmp, kind, net, false);
    set(qmp, kind, net, true)?;
    off
}
