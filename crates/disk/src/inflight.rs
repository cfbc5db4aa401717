//! The record of requests in progress, in memory that outlives this process (vhost-user, *Inflight I/O tracking*,
//! split rings).
//!
//! QEMU holds the memory, and passes it to the next server after a server was killed. Requests that were taken from
//! the available ring and are not in the used ring are done again, in the order in which they were taken. A request
//! that was done but not answered may be done twice. That has no effect, because its guest still waits for the
//! answer.
//!
//! ```text
//! queue  | features u64 | version u16 = 1 | descriptors u16 | last u16 | used index u16 |
//!        | descriptor 0: under way u8 | - [5] | next u16 | counter u64 | 1 | ...          a multiple of 64 bytes
//! ```

use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::sync::atomic::Ordering;
use vm_memory::mmap::MmapRegion;
use vm_memory::{AtomicAccess, Bytes, FileOffset, VolatileMemory};

const VERSION: u16 = 1;
/// Bytes of a queue's header, of each of its descriptors, and of the unit to which its record is rounded up.
const HEADER_BYTES: usize = 16;
const DESCRIPTOR_BYTES: usize = 16;
const ALIGNMENT: usize = 64;

/// Offsets in a queue's header.
mod header {
    pub const VERSION: usize = 8;
    pub const DESCRIPTORS: usize = 10;
    pub const LAST: usize = 12;
    pub const USED: usize = 14;
}

/// Offsets in a descriptor.
mod descriptor {
    pub const IN_PROGRESS: usize = 0;
    pub const NEXT: usize = 6;
    pub const COUNTER: usize = 8;
}

/// Far more requests than any queue has in its lifetime.
const MAX_COUNTER: u64 = u64::MAX / 2;

/// The record of the requests in progress of all queues.
#[derive(Debug)]
pub struct Inflight {
    region: MmapRegion,
    descriptors: u16,
    queues: u16,
    /// Number of each queue's newest request, which gives the order of requests.
    counters: Vec<u64>,
}

/// Returns the bytes that the record of one queue takes.
fn queue_bytes(descriptors: u16) -> usize {
    (HEADER_BYTES + usize::from(descriptors) * DESCRIPTOR_BYTES).next_multiple_of(ALIGNMENT)
}

impl Inflight {
    /// Creates an empty record, and the file for QEMU to hold.
    ///
    /// # Errors
    /// Errors of `memfd_create(2)` and `mmap(2)`; `InvalidData` if there is no queue.
    pub fn create(queues: u16, descriptors: u16) -> io::Result<(Self, File, u64)> {
        let bytes = (queue_bytes(descriptors) * usize::from(queues)) as u64;
        let file = File::from(memfd_create("rekindle-inflight", MemfdFlags::CLOEXEC)?);
        file.set_len(bytes)?;
        let record = Self::open(file.try_clone()?, 0, bytes, queues, descriptors)?;
        Ok((record, file, bytes))
    }

    /// Opens the record of a previous server. The record may have any content, because QEMU passes it.
    ///
    /// # Errors
    /// `InvalidData` if the record was not created for these queues.
    pub fn open(file: File, offset: u64, bytes: u64, queues: u16, descriptors: u16) -> io::Result<Self> {
        let invalid =
            |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("the requests under way: {what}"));
        let needed = queue_bytes(descriptors) * usize::from(queues);
        // Access to a mapping past the end of the file would kill this process.
        let file_length = file.metadata().map_or(0, |metadata| metadata.len());
        let is_in_file = offset.checked_add(needed as u64).is_some_and(|end| end <= file_length);
        if bytes < needed as u64 || needed == 0 || !is_in_file {
            return Err(invalid("the memory is too small for the queues"));
        }
        let region = MmapRegion::from_file(FileOffset::new(file, offset), needed).map_err(io::Error::other)?;
        let mut record = Self { region, descriptors, queues, counters: Vec::new() };
        for queue in 0..queues {
            let start = record.queue_offset(queue);
            match record.load::<u16>(start + header::VERSION)? {
                0 => {
                    record.store(start + header::DESCRIPTORS, descriptors)?;
                    record.store(start + header::VERSION, VERSION)?;
                }
                VERSION if record.load::<u16>(start + header::DESCRIPTORS)? == descriptors => {}
                VERSION => return Err(invalid("they are of queues of another size")),
                _ => return Err(invalid("they are of another version")),
            }
            let counters = (0..descriptors).map(|head| record.counter(queue, head));
            let highest = counters.collect::<io::Result<Vec<_>>>()?.into_iter().max().unwrap_or(0);
            if highest > MAX_COUNTER {
                return Err(invalid("a counter has an impossible value"));
            }
            record.counters.push(highest);
        }
        Ok(record)
    }

    fn queue_offset(&self, queue: u16) -> usize {
        queue_bytes(self.descriptors) * usize::from(queue)
    }

    fn descriptor_offset(&self, queue: u16, head: u16) -> usize {
        self.queue_offset(queue) + HEADER_BYTES + usize::from(head) * DESCRIPTOR_BYTES
    }

    fn counter(&self, queue: u16, head: u16) -> io::Result<u64> {
        self.load(self.descriptor_offset(queue, head) + descriptor::COUNTER)
    }

    fn set_in_progress(&self, queue: u16, head: u16, is_in_progress: bool) -> io::Result<()> {
        self.store(self.descriptor_offset(queue, head) + descriptor::IN_PROGRESS, u8::from(is_in_progress))
    }

    /// Loads a value from the record. Loads and stores access the memory in program order: a killed process has
    /// completed the earlier ones.
    fn load<T: AtomicAccess>(&self, offset: usize) -> io::Result<T> {
        self.region.as_volatile_slice().load(offset, Ordering::SeqCst).map_err(io::Error::other)
    }

    fn store<T: AtomicAccess>(&self, offset: usize, value: T) -> io::Result<()> {
        self.region.as_volatile_slice().store(value, offset, Ordering::SeqCst).map_err(io::Error::other)
    }

    fn has_descriptor(&self, queue: u16, head: u16) -> bool {
        queue < self.queues && head < self.descriptors
    }

    /// Records that the chain at descriptor `head` was taken from the available ring. Ignores a queue or descriptor
    /// that is out of range.
    pub fn record_taken(&mut self, queue: u16, head: u16) -> io::Result<()> {
        if !self.has_descriptor(queue, head) {
            return Ok(());
        }
        let Some(counter) = self.counters.get_mut(usize::from(queue)) else { return Ok(()) };
        *counter += 1;
        let counter = *counter;
        self.store(self.descriptor_offset(queue, head) + descriptor::COUNTER, counter)?;
        self.set_in_progress(queue, head, true)
    }

    /// Records that the chain at descriptor `head` is about to be put into the used ring.
    pub fn record_answering(&mut self, queue: u16, head: u16) -> io::Result<()> {
        if !self.has_descriptor(queue, head) {
            return Ok(());
        }
        let last_offset = self.queue_offset(queue) + header::LAST;
        let last: u16 = self.load(last_offset)?;
        self.store(self.descriptor_offset(queue, head) + descriptor::NEXT, last)?;
        self.store(last_offset, head)
    }

    /// Records that the chain at descriptor `head` is in the used ring, whose index is now `used`.
    pub fn record_answered(&mut self, queue: u16, head: u16, used: u16) -> io::Result<()> {
        if !self.has_descriptor(queue, head) {
            return Ok(());
        }
        self.set_in_progress(queue, head, false)?;
        self.store(self.queue_offset(queue) + header::USED, used)
    }

    /// Returns the heads of the requests to do again, in order. `used`: the used ring's index in the guest's memory.
    pub fn unfinished_heads(&mut self, queue: u16, used: u16) -> io::Result<Vec<u16>> {
        if queue >= self.queues {
            return Ok(Vec::new());
        }
        let start = self.queue_offset(queue);
        // The previous server was killed after it answered a request, and before it recorded the answer.
        if self.load::<u16>(start + header::USED)? != used {
            let last: u16 = self.load(start + header::LAST)?;
            if last < self.descriptors {
                self.set_in_progress(queue, last, false)?;
            }
            self.store(start + header::USED, used)?;
        }
        let mut heads_by_counter = Vec::new();
        for head in 0..self.descriptors {
            if self.load::<u8>(self.descriptor_offset(queue, head) + descriptor::IN_PROGRESS)? == 1 {
                heads_by_counter.push((self.counter(queue, head)?, head));
            }
        }
        heads_by_counter.sort_unstable();
        Ok(heads_by_counter.into_iter().map(|(_, head)| head).collect())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn reopen(file: &File, bytes: u64) -> Inflight {
        Inflight::open(file.try_clone().unwrap(), 0, bytes, 2, 8).unwrap()
    }

    #[test]
    fn its_layout_is_that_of_the_protocol() {
        let (mut inflight, file, bytes) = Inflight::create(2, 8).unwrap();
        assert_eq!(bytes, 2 * 192);
        inflight.record_taken(1, 3).unwrap();
        let mut raw = vec![0; bytes as usize];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut raw, 0).unwrap();
        let queue = &raw[192..];
        assert_eq!((&queue[8..12], queue[16 + 3 * 16], queue[16 + 3 * 16 + 8]), (&[1, 0, 8, 0][..], 1, 1));
        assert!(Inflight::open(file.try_clone().unwrap(), 0, 100, 2, 8).is_err());
        assert!(Inflight::open(file, 0, bytes, 2, 4).is_err());
    }

    #[test]
    fn memory_with_invalid_content_is_rejected() {
        let (_, file, bytes) = Inflight::create(2, 8).unwrap();
        assert!(Inflight::create(0, 8).is_err());
        let open = |offset, bytes| Inflight::open(file.try_clone().unwrap(), offset, bytes, 2, 8);
        assert!(open(0, bytes).is_ok());
        // The record is longer than its file: an access would kill the process.
        file.set_len(100).unwrap();
        assert!(open(0, bytes).is_err());
        file.set_len(bytes).unwrap();
        assert!(open(4096, bytes).is_err() && open(u64::MAX - 4095, bytes).is_err());
        // The largest counter.
        std::os::unix::fs::FileExt::write_all_at(&file, &u64::MAX.to_ne_bytes(), 16 + 8).unwrap();
        assert!(open(0, bytes).is_err());
    }

    #[test]
    fn an_answered_request_is_not_done_again_even_if_that_was_not_recorded() {
        let (mut inflight, file, bytes) = Inflight::create(2, 8).unwrap();
        for head in [5, 2] {
            inflight.record_taken(0, head).unwrap();
        }
        inflight.record_answering(0, 5).unwrap();
        drop(inflight);
        // The server was killed before it wrote the used ring, or after that.
        assert_eq!(reopen(&file, bytes).unfinished_heads(0, 0).unwrap(), [5, 2]);
        assert_eq!(reopen(&file, bytes).unfinished_heads(0, 1).unwrap(), [2]);
        assert_eq!(reopen(&file, bytes).unfinished_heads(0, 1).unwrap(), [2]);
    }

    proptest! {
        #[test]
        fn after_a_kill_exactly_the_unanswered_requests_are_unfinished(
            steps in proptest::collection::vec((0..8u16, any::<bool>()), 0..60), kill_point in 0..4u8,
        ) {
            let (mut inflight, file, bytes) = Inflight::create(2, 8).unwrap();
            let (mut model, mut used): (Vec<u16>, u16) = (Vec::new(), 0);
            let count = steps.len();
            for (number, (head, is_take)) in steps.into_iter().enumerate() {
                if is_take && !model.contains(&head) {
                    inflight.record_taken(0, head).unwrap();
                    model.push(head);
                } else if let Some(position) = model.iter().position(|taken| *taken == head).filter(|_| !is_take) {
                    let is_last = number + 1 == count;
                    if is_last && kill_point == 0 {
                        break;
                    }
                    inflight.record_answering(0, head).unwrap();
                    if is_last && kill_point == 1 {
                        break;
                    }
                    used = used.wrapping_add(1);
                    model.remove(position);
                    if is_last && kill_point == 2 {
                        break;
                    }
                    inflight.record_answered(0, head, used).unwrap();
                }
            }
            drop(inflight);
            prop_assert_eq!(reopen(&file, bytes).unfinished_heads(0, used).unwrap(), model);
        }
    }
}
