//! The state of a stopped guest, as the source host sends it while its last checkpoint is being committed: the changes
//! from the previous checkpoint, as far as a load needs them.

use crate::epochs;
use crate::restore::concurrent::SentState;
use crate::session::StoppedGuest;
use base64::Engine;
use base64::prelude::BASE64_STANDARD as BASE64;
use rekindle_pages::{PAGE_SIZE, PageRun};
use rekindle_vm::disks::Epochs;
use serde::{Deserialize, Serialize};

/// Maximum length of a state before base64 encoding, in bytes. A larger state is read from the store.
const MAX_STATE_BYTES: usize = 512 << 10;
/// Granularity in which device states are compared, in bytes.
const COMPARED_CHUNK_BYTES: usize = 64;

/// The changes from the previous checkpoint to the checkpoint that is being committed.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StoppedState {
    pub checkpoint: u64,
    /// Length of the device state, in bytes.
    pub devices_bytes: usize,
    /// Where the device state differs from the previous checkpoint's.
    pub devices_changed: Vec<ByteRange>,
    /// The content of the ranges `devices_changed`, in base64.
    pub devices: String,
    /// The epochs of the guest's disks.
    pub epochs: Epochs,
    /// The pages of [`Answer::NewestRead`](super::protocol::Answer::NewestRead) that have changed since.
    pub changed: Vec<PageRun>,
    /// The content of the pages `changed`, in that order, in base64.
    pub content: String,
}

/// A range of bytes: its start, and the end behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ByteRange(usize, usize);

impl StoppedState {
    /// Encodes the state of a guest, with those of the `wanted` pages that have changed. `None`: it is too long for a
    /// line, or a page cannot be read.
    pub fn of(guest: &StoppedGuest<'_>, wanted: &[PageRun]) -> Option<Self> {
        let changed = guest.changed_pages(wanted).ok()?;
        let devices = BufferChanges::between(guest.devices_before, guest.devices);
        let fits = devices.content.len() + changed.content.len() <= MAX_STATE_BYTES;
        fits.then(|| Self {
            checkpoint: guest.number,
            devices_bytes: guest.devices.len(),
            devices_changed: devices.ranges,
            devices: BASE64.encode(devices.content),
            epochs: epochs::by_disk_id(guest.disks),
            changed: changed.pages,
            content: BASE64.encode(changed.content),
        })
    }

    /// Decodes the state. `None`: it is malformed. `previous_devices` is the previous device state.
    pub fn decode(self, previous_devices: &[u8]) -> Option<SentState> {
        let changes = BufferChanges { ranges: self.devices_changed, content: BASE64.decode(self.devices).ok()? };
        let devices = changes.apply_to(previous_devices, self.devices_bytes)?;
        let content = BASE64.decode(self.content).ok()?;
        let (contents, []) = content.as_chunks::<PAGE_SIZE>() else { return None };
        let page_count = self.changed.iter().map(PageRun::count).try_fold(0u64, u64::checked_add)?;
        if page_count != contents.len() as u64 {
            return None;
        }
        let page_ids = self.changed.iter().flat_map(PageRun::pages);
        let pages = page_ids.zip(contents).map(|(id, content)| (id, Box::new(*content))).collect();
        Some(SentState { number: self.checkpoint, devices, epochs: self.epochs, pages })
    }
}

/// The difference between two buffers.
#[derive(Debug, PartialEq, Eq)]
struct BufferChanges {
    /// The ranges of the newer buffer that differ, ascending.
    ranges: Vec<ByteRange>,
    /// The content of all ranges, one after the other.
    content: Vec<u8>,
}

impl BufferChanges {
    fn between(older: &[u8], newer: &[u8]) -> Self {
        let (mut ranges, mut content): (Vec<ByteRange>, _) = (Vec::new(), Vec::new());
        let mut older_chunks = older.chunks(COMPARED_CHUNK_BYTES);
        for (index, chunk) in newer.chunks(COMPARED_CHUNK_BYTES).enumerate() {
            if older_chunks.next() == Some(chunk) {
                continue;
            }
            let start = index * COMPARED_CHUNK_BYTES;
            let end = start + chunk.len();
            match ranges.last_mut() {
                Some(ByteRange(_, last_end)) if *last_end == start => *last_end = end,
                _ => ranges.push(ByteRange(start, end)),
            }
            content.extend_from_slice(chunk);
        }
        Self { ranges, content }
    }

    /// Returns the newer buffer, of `length` bytes. `None`: the changes are malformed.
    fn apply_to(&self, older: &[u8], length: usize) -> Option<Vec<u8>> {
        let mut content = self.content.as_slice();
        // A peer cannot make this host allocate more than the peer has sent.
        if length > older.len() + content.len() {
            return None;
        }
        let mut newer = older.to_vec();
        newer.resize(length, 0);
        for &ByteRange(start, end) in &self.ranges {
            let changed = content.split_off(..end.checked_sub(start)?)?;
            newer.get_mut(start..end)?.copy_from_slice(changed);
        }
        content.is_empty().then_some(newer)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use rekindle_pages::{BlockId, PageNo};
    use std::ops::Range;

    /// Returns a state with `changes` to the device state and with changed pages.
    fn state(devices_bytes: usize, changes: &BufferChanges, changed: &[PageRun], content: &[u8]) -> StoppedState {
        StoppedState {
            checkpoint: 9,
            devices_bytes,
            devices_changed: changes.ranges.clone(),
            devices: BASE64.encode(&changes.content),
            epochs: Epochs::new(),
            changed: changed.to_vec(),
            content: BASE64.encode(content),
        }
    }

    #[test]
    fn a_device_state_is_sent_as_its_changes() {
        let older: Vec<u8> = (0..1000u32).map(|n| (n % 251) as u8).collect();
        let mut newer = older.clone();
        newer[70] ^= 1;
        newer[130] ^= 1;
        newer[999] ^= 1;
        let longer = [&newer[..], &[7; 100]].concat();
        let shorter = newer[..500].to_vec();
        for (newer, max_sent_bytes) in [(older.clone(), 0), (newer.clone(), 256), (longer, 400), (shorter, 256)] {
            let changes = BufferChanges::between(&older, &newer);
            assert!(changes.content.len() <= max_sent_bytes, "{} bytes are sent", changes.content.len());
            let sent = state(newer.len(), &changes, &[], &[]).decode(&older).unwrap();
            assert_eq!(sent.devices, newer);
        }
        let all = BufferChanges::between(&[], &newer);
        assert_eq!(all, BufferChanges { ranges: vec![ByteRange(0, 1000)], content: newer });
    }

    #[test]
    fn ranges_are_pairs_on_the_wire() {
        assert_eq!(serde_json::to_string(&[ByteRange(64, 128)]).unwrap(), "[[64,128]]");
    }

    #[test]
    fn a_malformed_state_is_rejected() {
        let older = [0; 100];
        let one_range =
            |start, end, bytes| BufferChanges { ranges: vec![ByteRange(start, end)], content: vec![1; bytes] };
        let unchanged = BufferChanges { ranges: Vec::new(), content: Vec::new() };
        for (length, changes) in [
            (100, &one_range(90, 110, 20)),
            (100, &one_range(10, 5, 0)),
            (100, &one_range(0, 20, 19)),
            (100, &one_range(0, 20, 21)),
            (usize::MAX, &unchanged),
        ] {
            assert!(state(length, changes, &[], &[]).decode(&older).is_none(), "{length} bytes, {changes:?}");
        }
        let page = [5; PAGE_SIZE];
        let run = |pages: Range<u64>| PageRun::new(BlockId(1), PageNo(pages.start)..PageNo(pages.end));
        let sent = state(100, &unchanged, &[run(7..8)], &page).decode(&older).unwrap();
        assert_eq!(sent.pages, [((BlockId(1), PageNo(7)), Box::new(page))]);
        for (pages, content) in [(7..9, &page[..]), (7..8, &page[1..]), (7..7, &page), (0..u64::MAX, &page)] {
            assert!(state(100, &unchanged, &[run(pages.clone())], content).decode(&older).is_none(), "{pages:?}");
        }
    }
}
