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
const HEADER: usize = 16;
const DESCRIPTOR: usize = 16;
const ALIGNMENT: usize = 64;

const AT_VERSION: usize = 8;
const AT_DESCRIPTORS: usize = 10;
const AT_LAST: usize = 12;
const AT_USED: usize = 14;
/// Offsets within a descriptor.
const AT_NEXT: usize = 6;
const AT_COUNTER: usize = 8;

/// Far more requests than any queue has in its lifetime.
const MOST_REQUESTS: u64 = u64::MAX / 2;

/// Returns the length of a file in bytes.
fn length(file: &File) -> io::Result<u64> {
    Ok(file.metadata()?.len())
}

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
    (HEADER + usize::from(descriptors) * DESCRIPTOR).next_multiple_of(ALIGNMENT)
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
        let made = Self::open(file.try_clone()?, 0, bytes, queues, descriptors)?;
        Ok((made, file, bytes))
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
        let is_there = offset.checked_add(needed as u64).is_some_and(|end| end <= length(&file).unwrap_or(0));
        if bytes < needed as u64 || needed == 0 || !is_there {
            return Err(invalid("the memory is too small for the queues"));
        }
        let region = MmapRegion::from_file(FileOffset::new(file, offset), needed).map_err(io::Error::other)?;
        let mut opened = Self { region, descriptors, queues, counters: vec![0; queues.into()] };
        for queue in 0..queues {
            let at = opened.base(queue);
            match opened.load::<u16>(at + AT_VERSION)? {
                0 => {
                    opened.store(at + AT_DESCRIPTORS, descriptors)?;
                    opened.store(at + AT_VERSION, VERSION)?;
                }
                VERSION if opened.load::<u16>(at + AT_DESCRIPTORS)? == descriptors => {}
                VERSION => return Err(invalid("they are of queues of another size")),
                _ => return Err(invalid("they are of another version")),
            }
            let counters = (0..descriptors).map(|head| opened.load::<u64>(opened.descriptor(queue, head) + AT_COUNTER));
            let highest = counters.collect::<io::Result<Vec<_>>>()?.into_iter().max().unwrap_or(0);
            if highest > MOST_REQUESTS {
                return Err(invalid("a counter has an impossible value"));
            }
            if let Some(counter) = opened.counters.get_mut(usize::from(queue)) {
                *counter = highest;
            }
        }
        Ok(opened)
    }

    fn base(&self, queue: u16) -> usize {
        queue_bytes(self.descriptors) * usize::from(queue)
    }

    fn descriptor(&self, queue: u16, head: u16) -> usize {
        self.base(queue) + HEADER + usize::from(head) * DESCRIPTOR
    }

    /// Loads a value from the record. Loads and stores access the memory in program order: a killed process has
    /// completed the earlier ones.
    fn load<T: AtomicAccess>(&self, at: usize) -> io::Result<T> {
        self.region.as_volatile_slice().load(at, Ordering::SeqCst).map_err(io::Error::other)
    }

    fn store<T: AtomicAccess>(&self, at: usize, value: T) -> io::Result<()> {
        self.region.as_volatile_slice().store(value, at, Ordering::SeqCst).map_err(io::Error::other)
    }

    fn knows(&self, queue: u16, head: u16) -> bool {
        queue < self.queues && head < self.descriptors
    }

    /// Records that the chain at descriptor `head` was taken from the available ring. Ignores a queue or descriptor
    /// that is out of range.
    pub fn taken(&mut self, queue: u16, head: u16) -> io::Result<()> {
        if !self.knows(queue, head) {
            return Ok(());
        }
        let Some(counter) = self.counters.get_mut(usize::from(queue)) else { return Ok(()) };
        *counter += 1;
        let (counter, at) = (*counter, self.descriptor(queue, head));
        self.store(at + AT_COUNTER, counter)?;
        self.store(at, 1u8)
    }

    /// Records that the chain at descriptor `head` is about to be put into the used ring.
    pub fn answering(&mut self, queue: u16, head: u16) -> io::Result<()> {
        if !self.knows(queue, head) {
            return Ok(());
        }
        let last: u16 = self.load(self.base(queue) + AT_LAST)?;
        self.store(self.descriptor(queue, head) + AT_NEXT, last)?;
        self.store(self.base(queue) + AT_LAST, head)
    }

    /// Records that the chain at descriptor `head` is in the used ring, whose index is now `used`.
    pub fn answered(&mut self, queue: u16, head: u16, used: u16) -> io::Result<()> {
        if !self.knows(queue, head) {
            return Ok(());
        }
        self.store(self.descriptor(queue, head), 0u8)?;
        self.store(self.base(queue) + AT_USED, used)
    }

    /// Returns the requests to do again, in order. `used`: the used ring's index in the guest's memory.
    pub fn unfinished(&mut self, queue: u16, used: u16) -> io::Result<Vec<u16>> {
        if queue >= self.queues {
            return Ok(Vec::new());
        }
        let base = self.base(queue);
        // The previous server was killed after it answered a request, and before it recorded the answer.
        if self.load::<u16>(base + AT_USED)? != used {
            let last: u16 = self.load(base + AT_LAST)?;
            if last < self.descriptors {
                self.store(self.descriptor(queue, last), 0u8)?;
            }
            self.store(base + AT_USED, used)?;
        }
        let mut found = Vec::new();
        for head in 0..self.descriptors {
            let at = self.descriptor(queue, head);
            if self.load::<u8>(at)? == 1 {
                found.push((self.load::<u64>(at + AT_COUNTER)?, head));
            }
        }
        found.sort_unstable();
        Ok(found.into_iter().map(|(_, head)| head).collect())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn again(file: &File, bytes: u64) -> Inflight {
        Inflight::open(file.try_clone().unwrap(), 0, bytes, 2, 8).unwrap()
    }

    #[test]
    fn its_layout_is_that_of_the_protocol() {
        let (mut inflight, file, bytes) = Inflight::create(2, 8).unwrap();
        assert_eq!(bytes, 2 * 192);
        inflight.taken(1, 3).unwrap();
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
            inflight.taken(0, head).unwrap();
        }
        inflight.answering(0, 5).unwrap();
        drop(inflight);
        // The server was killed before it wrote the used ring, or after that.
        assert_eq!(again(&file, bytes).unfinished(0, 0).unwrap(), [5, 2]);
        assert_eq!(again(&file, bytes).unfinished(0, 1).unwrap(), [2]);
        assert_eq!(again(&file, bytes).unfinished(0, 1).unwrap(), [2]);
    }

    proptest! {
        #[test]
        fn after_a_kill_exactly_the_unanswered_requests_are_unfinished(
            steps in proptest::collection::vec((0..8u16, any::<bool>()), 0..60), killed in 0..4u8,
        ) {
            let (mut inflight, file, bytes) = Inflight::create(2, 8).unwrap();
            let (mut model, mut used): (Vec<u16>, u16) = (Vec::new(), 0);
            let count = steps.len();
            for (n, (head, take)) in steps.into_iter().enumerate() {
                if take && !model.contains(&head) {
                    inflight.taken(0, head).unwrap();
                    model.push(head);
                } else if let Some(position) = model.iter().position(|of| *of == head).filter(|_| !take) {
                    let last = n + 1 == count;
                    if last && killed == 0 {
                        break;
                    }
                    inflight.answering(0, head).unwrap();
                    if last && killed == 1 {
                        break;
                    }
                    used = used.wrapping_add(1);
                    model.remove(position);
                    if last && killed == 2 {
                        break;
                    }
                    inflight.answered(0, head, used).unwrap();
                }
            }
            drop(inflight);
            prop_assert_eq!(again(&file, bytes).unfinished(0, used).unwrap(), model);
        }
    }
}
