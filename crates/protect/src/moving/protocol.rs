//! The messages between the two hosts: one JSON object per line. `docs/move.md` has the sequence.
//!
//! The source host sends messages, and the destination host answers each with one line, except [`Message::State`].
//! [`VERSION`] covers messages and answers.

use crate::epochs;
use crate::recipe::Recipe;
use crate::restore::ClockOutcome;
use crate::restore::concurrent::SentState;
use crate::session::StoppedGuest;
use base64::Engine;
use base64::prelude::BASE64_STANDARD as BASE64;
use rekindle_pages::{PAGE_SIZE, PageRun};
use rekindle_store::StoreUrl;
use rekindle_vm::definition::Name;
use rekindle_vm::disks::Epochs;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Version of the protocol.
pub(super) const VERSION: u32 = 2;
/// Maximum length of a line in bytes.
pub(super) const MAX_LINE: usize = 4 << 20;

/// A message of the source host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Message {
    /// Announces a VM. Answered by [`Answer::Ready`] if the VM could run on the destination host.
    Hello(Box<Hello>),
    /// A checkpoint is in the store: start a destination QEMU. Answered by [`Answer::Prepared`].
    Prepare {},
    /// The guest is about to be stopped: read the data of its newest checkpoint that a load needs. Answered by
    /// [`Answer::NewestRead`].
    #[serde(rename = "look")]
    ReadNewest {},
    /// The guest is stopped, and its last checkpoint is being committed: load the guest, and wait for [`Message::Go`].
    /// Has no answer: the answer to [`Message::Go`] covers both.
    State(StoppedState),
    /// The guest is stopped, and its last checkpoint is committed: resume the guest. Answered by [`Answer::Running`] or
    /// [`Answer::Failed`].
    Go(Go),
    /// Queries a VM's status. Sent instead of [`Message::Hello`], and answered by [`Answer::Found`].
    Ask { version: u32, name: Name },
}

/// The description of a VM that is to be moved.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub version: u32,
    pub name: Name,
    pub recipe: Recipe,
    /// URL of the VM's store.
    pub store: StoreUrl,
    /// When the store was created, in µs since 1970, if it exists: both hosts must reach the same store by its URL.
    pub created_us: Option<u64>,
    /// Certificate, key and authority on the destination host, for a store on a server.
    pub identity: Option<[PathBuf; 3]>,
    /// A definition file on the destination host that replaces the recipe's.
    pub definition: Option<PathBuf>,
    /// Path of a QEMU on the destination host, to use instead of the definition's.
    pub qemu: Option<PathBuf>,
    /// The guest's network output is held until a checkpoint is committed. The destination host must hold it, too.
    #[serde(default)]
    pub hold_output: bool,
}

/// The changes from the previous checkpoint to the checkpoint that is being committed, as far as a load needs them.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StoppedState {
    pub checkpoint: u64,
    /// Length of the device state, in bytes.
    pub devices_bytes: usize,
    /// The byte ranges (start, end) in which the device state differs from the previous checkpoint's.
    pub devices_changed: Vec<(usize, usize)>,
    /// The content of the ranges `devices_changed`, in base64.
    pub devices: String,
    /// The epochs of the guest's disks.
    pub epochs: Epochs,
    /// The pages of [`Answer::NewestRead`] that have changed since.
    pub changed: Vec<PageRun>,
    /// The content of the pages `changed`, in that order, in base64.
    pub content: String,
}

/// Maximum length of a state before base64 encoding, in bytes. A larger state is read from the store.
const MAX_STATE: usize = 512 << 10;
/// Granularity in which device states are compared, in bytes.
const COMPARE_CHUNK: usize = 64;

impl StoppedState {
    /// Encodes the state that was `read`. `None`: it is too long for a line, or a page cannot be read.
    pub(super) fn of(read: &StoppedGuest<'_>, wanted: &[PageRun]) -> Option<Self> {
        let (changed, content) = read.changed(wanted).ok()?;
        let (devices_changed, devices) = difference(read.devices_before, read.devices);
        let fits = devices.len() + content.len() <= MAX_STATE;
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

    /// Decodes the state. `None`: it is malformed. `before` is the previous device state.
    pub(super) fn decode(self, before: &[u8]) -> Option<SentState> {
        let devices = BASE64.decode(self.devices).ok()?;
        let devices = applied(before, self.devices_bytes, &self.devices_changed, &devices)?;
        let content = BASE64.decode(self.content).ok()?;
        let (contents, []) = content.as_chunks::<PAGE_SIZE>() else { return None };
        let numbers = self.changed.iter().flat_map(PageRun::pages);
        let pages = numbers.zip(contents).map(|((block, page), content)| (block, page, Box::new(*content))).collect();
        let count = self.changed.iter().map(PageRun::count).try_fold(0u64, u64::checked_add)?;
        let whole = count == contents.len() as u64;
        whole.then_some(SentState { number: self.checkpoint, devices, epochs: self.epochs, pages })
    }
}

/// Returns the ranges in which `now` differs from `before`, and their content in `now`.
fn difference(before: &[u8], now: &[u8]) -> (Vec<(usize, usize)>, Vec<u8>) {
    let (mut changed, mut content): (Vec<(usize, usize)>, _) = (Vec::new(), Vec::new());
    let mut was = before.chunks(COMPARE_CHUNK);
    for (n, is) in now.chunks(COMPARE_CHUNK).enumerate() {
        if was.next() == Some(is) {
            continue;
        }
        let (from, to) = (n * COMPARE_CHUNK, n * COMPARE_CHUNK + is.len());
        match changed.last_mut().filter(|(_, end)| *end == from) {
            Some((_, end)) => *end = to,
            None => changed.push((from, to)),
        }
        content.extend_from_slice(is);
    }
    (changed, content)
}

/// Applies changes to `before`. `None`: they are malformed. `bytes` is the length of the result.
fn applied(before: &[u8], bytes: usize, changed: &[(usize, usize)], mut content: &[u8]) -> Option<Vec<u8>> {
    // A peer cannot make this host allocate more than the peer has sent.
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

/// Content of [`Message::Go`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Go {
    /// The owner epoch that committed the guest's last checkpoint. Only the next owner after it may resume the guest.
    pub epoch: u64,
}

/// An answer of the destination host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Answer {
    /// The VM could run on the destination host.
    Ready { version: u32, host: String },
    /// The VM cannot run on the destination host, or the message is not acceptable. The destination host keeps nothing
    /// of the VM.
    Refused { why: String },
    /// A destination QEMU waits for the guest.
    Prepared {
        /// The checkpoint from whose recipe the QEMU was started.
        checkpoint: u64,
        pid: u32,
    },
    /// The data of the newest checkpoint that a load needs was read.
    #[serde(rename = "looked")]
    NewestRead {
        /// Number of the checkpoint that was read; none if it must be read again when the guest is stopped.
        checkpoint: Option<u64>,
        /// The pages that were read.
        pages: Vec<PageRun>,
    },
    /// The guest was resumed on the destination host.
    Running(Running),
    /// The guest was not resumed.
    Failed {
        why: String,
        /// The guest may have run for a moment. If false, the destination host has not run the guest and never will.
        #[serde(rename = "begun")]
        resumed: bool,
        /// The owner epoch of the destination host, if it has become the owner of the store.
        claimed: Option<u64>,
    },
    /// The status of a VM.
    Found {
        /// The VM's guest runs.
        runs: bool,
        /// The VM's status, as `rekindle ls` prints it; `absent` if the VM does not exist.
        status: String,
    },
}

/// Report of a guest that was resumed on the destination host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Running {
    /// Time from [`Message::Go`] to the guest's resume, in µs.
    pub us: u64,
    /// Time from the guest's resume until this answer was sent, in µs.
    pub since_us: u64,
    /// Pid of the destination QEMU.
    pub pid: u32,
    /// The prepared QEMU was used.
    pub prepared: bool,
    /// The guest was loaded while its last checkpoint was being committed.
    pub ahead: bool,
    /// Why the prepared QEMU was not used.
    pub unused: Option<String>,
    /// State of the guest's clock.
    pub clock: ClockOutcome,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use rekindle_pages::{BlockId, PageNo};
    use std::ops::Range;

    #[test]
    fn lines_are_as_documented() {
        let line = |message: &Message| serde_json::to_string(message).unwrap();
        assert_eq!(line(&Message::Prepare {}), r#"{"prepare":{}}"#);
        assert_eq!(line(&Message::Go(Go { epoch: 7 })), r#"{"go":{"epoch":7}}"#);
        let failed = Answer::Failed { why: "no room".into(), resumed: false, claimed: Some(8) };
        assert_eq!(
            serde_json::to_string(&failed).unwrap(),
            r#"{"failed":{"why":"no room","begun":false,"claimed":8}}"#
        );
        assert!(serde_json::from_str::<Message>(r#"{"jump":{}}"#).is_err());
    }

    fn state(devices: (usize, &[(usize, usize)], &[u8]), changed: &[PageRun], content: &[u8]) -> StoppedState {
        let (devices_bytes, devices_changed, bytes) = devices;
        StoppedState {
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
    fn a_device_state_is_sent_as_its_changes() {
        let before: Vec<u8> = (0..1000u32).map(|n| (n % 251) as u8).collect();
        let mut now = before.clone();
        now[70] ^= 1;
        now[130] ^= 1;
        now[999] ^= 1;
        let longer = [&now[..], &[7; 100]].concat();
        for (now, most) in [(before.clone(), 0), (now.clone(), 256), (longer, 400), (now[..500].to_vec(), 256)] {
            let (changed, content) = difference(&before, &now);
            assert!(content.len() <= most, "{} bytes are sent", content.len());
            let sent = state((now.len(), &changed, &content), &[], &[]).decode(&before).unwrap();
            assert_eq!(sent.devices, now);
        }
        let whole = difference(&[], &now);
        assert_eq!(whole, (vec![(0, 1000)], now));
    }

    #[test]
    fn a_malformed_state_is_rejected() {
        let before = [0; 100];
        let bad = [
            (100, &[(90, 110)][..], &[1; 20][..]),
            (100, &[(10, 5)], &[]),
            (100, &[(0, 20)], &[1; 19]),
            (100, &[(0, 20)], &[1; 21]),
            (usize::MAX, &[], &[]),
        ];
        for devices in bad {
            assert!(state(devices, &[], &[]).decode(&before).is_none(), "{devices:?}");
        }
        let page = [5; PAGE_SIZE];
        let good = (100, &[][..], &[][..]);
        let run = |pages: Range<u64>| PageRun::new(BlockId(1), PageNo(pages.start)..PageNo(pages.end));
        let sent = state(good, &[run(7..8)], &page).decode(&before).unwrap();
        assert_eq!(sent.pages, [(BlockId(1), PageNo(7), Box::new(page))]);
        for (pages, content) in [(7..9, &page[..]), (7..8, &page[1..]), (7..7, &page), (0..u64::MAX, &page)] {
            assert!(state(good, &[run(pages.clone())], content).decode(&before).is_none(), "{pages:?}");
        }
    }
}
