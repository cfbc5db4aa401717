//! What the two hosts say to each other: one JSON object a line. `docs/move.md` has the sequence.
//!
//! The host of the guest asks, the other one answers each line with one. What neither knows is refused by its version.

use crate::epochs;
use crate::first::Run;
use crate::recipe::Recipe;
use crate::restore::Clock;
use crate::restore::ahead::Told;
use crate::session::Read;
use base64::Engine;
use base64::prelude::BASE64_STANDARD as BASE64;
use rekindle_store::StoreUrl;
use rekindle_store::types::PAGE_SIZE;
use rekindle_vm::definition::Name;
use rekindle_vm::disks::Epochs;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The version of this.
pub(super) const VERSION: u32 = 2;
/// Bytes of a line at most.
pub(super) const LONGEST: usize = 4 << 20;

/// What the guest's host says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Say {
    /// A VM that is to come. Answered by [`Answer::Ready`] if it could run there.
    Hello(Box<Hello>),
    /// A checkpoint of it is in the store: have a QEMU wait. Answered by [`Answer::Prepared`].
    Prepare {},
    /// Its guest is about to be stopped: have what a load needs of its newest checkpoint. Answered by [`Answer::Looked`].
    Look {},
    /// Its guest is stopped, and its last checkpoint is being committed: load it, and wait for [`Say::Go`]. Not answered: what comes of it
    /// is seen then.
    State(State),
    /// Its guest is stopped, and its last checkpoint in the store. Answered by [`Answer::Running`] or [`Answer::Failed`].
    Go(Go),
    /// Instead of a hello: what is to be seen of a VM. Answered by [`Answer::Found`].
    Ask {
        /// The version.
        version: u32,
        /// The VM.
        name: Name,
    },
}

/// A VM that is to come.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    /// The version.
    pub version: u32,
    /// The VM.
    pub name: Name,
    /// How to build it.
    pub recipe: Recipe,
    /// Where its checkpoints are.
    pub store: StoreUrl,
    /// When that store was made, if it is there already: both hosts have to mean the same one.
    pub created_us: Option<u64>,
    /// Certificate, key and authority there, for a store on a server.
    pub identity: Option<[PathBuf; 3]>,
    /// A file there that says how the VM is to be built there.
    pub definition: Option<PathBuf>,
    /// The QEMU there to use instead of the definition's.
    pub qemu: Option<PathBuf>,
    /// What it sends is held until a checkpoint counts, and is to be held there.
    #[serde(default)]
    pub hold_output: bool,
}

/// What a load needs of a checkpoint that is being committed, and has not had of the one before it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct State {
    /// Its number.
    pub checkpoint: u64,
    /// Bytes of the device state.
    pub devices_bytes: usize,
    /// Where it is not what it was before: from, to.
    pub devices_changed: Vec<(usize, usize)>,
    /// What it is there, in base64.
    pub devices: String,
    /// What its disks are.
    pub epochs: Epochs,
    /// Those of [`Answer::Looked`]'s pages that have changed.
    pub changed: Vec<Run>,
    /// Their content in that order, in base64.
    pub content: String,
}

/// Bytes of a state at most, before they are told in base64; a larger one is read out of the store.
const MOST: usize = 512 << 10;
/// Bytes of a device state that are compared, and told, together.
const TOGETHER: usize = 64;

impl State {
    /// As it was `read`; none if it is too much for a line, or cannot be had.
    pub(super) fn of(read: &Read<'_>, wanted: &[Run]) -> Option<Self> {
        let (changed, content) = read.changed(wanted).ok()?;
        let (devices_changed, devices) = difference(read.devices_before, read.devices);
        let fits = devices.len() + content.len() <= MOST;
        fits.then(|| Self {
            checkpoint: read.number,
            devices_bytes: read.devices.len(),
            devices_changed,
            devices: BASE64.encode(devices),
            epochs: epochs::named(read.disks),
            changed,
            content: BASE64.encode(content),
        })
    }

    /// Device state, which was `before`, and pages; none if they are not what they should be.
    pub(super) fn into_told(self, before: &[u8]) -> Option<Told> {
        let devices = BASE64.decode(self.devices).ok()?;
        let devices = applied(before, self.devices_bytes, &self.devices_changed, &devices)?;
        let content = BASE64.decode(self.content).ok()?;
        let (contents, []) = content.as_chunks::<PAGE_SIZE>() else { return None };
        let numbers = self.changed.iter().flat_map(Run::pages);
        let pages = numbers.zip(contents).map(|((block, page), content)| (block, page, Box::new(*content))).collect();
        let count = self.changed.iter().map(Run::count).try_fold(0u64, u64::checked_add)?;
        let whole = count == contents.len() as u64;
        whole.then_some(Told { number: self.checkpoint, devices, epochs: self.epochs, pages })
    }
}

/// Where `now` is not what was `before`, and what it is there.
fn difference(before: &[u8], now: &[u8]) -> (Vec<(usize, usize)>, Vec<u8>) {
    let (mut changed, mut content): (Vec<(usize, usize)>, _) = (Vec::new(), Vec::new());
    let mut was = before.chunks(TOGETHER);
    for (n, is) in now.chunks(TOGETHER).enumerate() {
        if was.next() == Some(is) {
            continue;
        }
        let (from, to) = (n * TOGETHER, n * TOGETHER + is.len());
        match changed.last_mut().filter(|(_, end)| *end == from) {
            Some((_, end)) => *end = to,
            None => changed.push((from, to)),
        }
        content.extend_from_slice(is);
    }
    (changed, content)
}

/// `bytes` that are what was `before`, but for what has `changed`; none if that cannot be.
fn applied(before: &[u8], bytes: usize, changed: &[(usize, usize)], mut content: &[u8]) -> Option<Vec<u8>> {
    // Nothing that is told is so long that it costs memory.
    if bytes > before.len() + content.len() {
        return None;
    }
    let mut now = before.to_vec();
    now.resize(bytes, 0);
    for &(from, to) in changed {
        let part = content.split_off(..to.checked_sub(from)?)?;
        now.get_mut(from..to)?.copy_from_slice(part);
    }
    content.is_empty().then_some(now)
}

/// Its guest is stopped.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Go {
    /// The store's owner epoch, in which its last checkpoint was committed. Only who becomes the owner after it may let the guest go on.
    pub epoch: u64,
}

/// What the other host answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Answer {
    /// The VM could run there.
    Ready {
        /// The version.
        version: u32,
        /// That host.
        host: String,
    },
    /// It cannot. Nothing of it is there, and nothing was done.
    Refused {
        /// Why.
        why: String,
    },
    /// A QEMU waits.
    Prepared {
        /// The checkpoint whose machine it has.
        checkpoint: u64,
        /// The QEMU.
        pid: u32,
    },
    /// What a load needs of its newest checkpoint is there.
    Looked {
        /// That checkpoint; none if it has to be read again when the guest is stopped.
        checkpoint: Option<u64>,
        /// The pages that are there.
        pages: Vec<Run>,
    },
    /// The guest runs there.
    Running(Running),
    /// It does not.
    Failed {
        /// Why.
        why: String,
        /// The guest may have run for a moment. If it has not, it never will.
        begun: bool,
        /// The owner epoch of that host, if it had become the owner of the store.
        claimed: Option<u64>,
    },
    /// What is to be seen of the VM.
    Found {
        /// Whether its guest runs.
        runs: bool,
        /// Its status, as `rekindle ls` says it; `absent` if there is none.
        status: String,
    },
}

/// The guest runs there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Running {
    /// From the word to the guest's running, in µs.
    pub us: u64,
    /// From then until this was said, in µs.
    pub since_us: u64,
    /// Its QEMU.
    pub pid: u32,
    /// Whether it went into the QEMU that had waited.
    pub prepared: bool,
    /// Whether it was loaded beside the commit of its last checkpoint.
    pub ahead: bool,
    /// Why that one was of no use.
    pub unused: Option<String>,
    /// What became of its clock.
    pub clock: Clock,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn lines_are_what_the_document_says() {
        let line = |say: &Say| serde_json::to_string(say).unwrap();
        assert_eq!(line(&Say::Prepare {}), r#"{"prepare":{}}"#);
        assert_eq!(line(&Say::Go(Go { epoch: 7 })), r#"{"go":{"epoch":7}}"#);
        let failed = Answer::Failed { why: "no room".into(), begun: false, claimed: Some(8) };
        assert_eq!(
            serde_json::to_string(&failed).unwrap(),
            r#"{"failed":{"why":"no room","begun":false,"claimed":8}}"#
        );
        assert!(serde_json::from_str::<Say>(r#"{"jump":{}}"#).is_err());
    }

    fn state(devices: (usize, &[(usize, usize)], &[u8]), changed: &[Run], content: &[u8]) -> State {
        let (devices_bytes, devices_changed, bytes) = devices;
        State {
            checkpoint: 9,
            devices_bytes,
            devices_changed: devices_changed.to_vec(),
            devices: BASE64.encode(bytes),
            epochs: Epochs::new(),
            changed: changed.to_vec(),
            content: BASE64.encode(content),
        }
    }

    #[test]
    fn a_device_state_is_told_by_what_has_changed() {
        let before: Vec<u8> = (0..1000u32).map(|n| (n % 251) as u8).collect();
        let mut now = before.clone();
        now[70] ^= 1;
        now[130] ^= 1;
        now[999] ^= 1;
        let longer = [&now[..], &[7; 100]].concat();
        for (now, most) in [(before.clone(), 0), (now.clone(), 256), (longer, 400), (now[..500].to_vec(), 256)] {
            let (changed, content) = difference(&before, &now);
            assert!(content.len() <= most, "{} bytes are told", content.len());
            let told = state((now.len(), &changed, &content), &[], &[]).into_told(&before).unwrap();
            assert_eq!(told.devices, now);
        }
        let whole = difference(&[], &now);
        assert_eq!(whole, (vec![(0, 1000)], now));
    }

    #[test]
    fn a_state_that_cannot_be_is_none() {
        let before = [0; 100];
        let bad = [
            (100, &[(90, 110)][..], &[1; 20][..]),
            (100, &[(10, 5)], &[]),
            (100, &[(0, 20)], &[1; 19]),
            (100, &[(0, 20)], &[1; 21]),
            (usize::MAX, &[], &[]),
        ];
        for devices in bad {
            assert!(state(devices, &[], &[]).into_told(&before).is_none(), "{devices:?}");
        }
        let page = [5; PAGE_SIZE];
        let good = (100, &[][..], &[][..]);
        let told = state(good, &[Run::new(1, 7..8)], &page).into_told(&before).unwrap();
        assert_eq!(told.pages, [(1, 7, Box::new(page))]);
        for (run, content) in [(7..9, &page[..]), (7..8, &page[1..]), (7..7, &page), (0..u64::MAX, &page)] {
            assert!(state(good, &[Run::new(1, run.clone())], content).into_told(&before).is_none(), "{run:?}");
        }
    }
}
