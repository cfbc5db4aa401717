//! Concurrent reads and writes of files (`io_uring`), with buffers that only the kernel can access meanwhile.
//!
//! An operation takes ownership of its [`Buffer`], and its completion returns the buffer. This makes the ring safe: the
//! caller cannot read, change or free memory that the kernel or a device still uses.

use crate::large::{HUGE, Large};
use io_uring::register::Restriction;
use io_uring::{IoUring, opcode, squeue, types};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// Alignment of a buffer in bytes: that of a page, which suffices for `O_DIRECT` on any device.
pub const ALIGNMENT: usize = 4096;

/// Bytes of each buffer of [`Buffer::pair`].
pub const HALF_HUGE_PAGE_BYTES: usize = HUGE / 2;

/// Page-aligned memory, fit for `O_DIRECT`.
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
    allocation: Allocation,
}

/// The allocation that contains a buffer.
enum Allocation {
    /// Memory of the buffer alone.
    Own(Layout),
    /// A half of a huge page. The page is unmapped when both halves are dropped.
    HalfPage { _page: Arc<Large> },
}

// SAFETY: only this value, or the operation that owns it, refers to the memory.
unsafe impl Send for Buffer {}
// SAFETY: as above; a shared reference gives shared access only.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates zeroed memory: `bytes` rounded up to whole pages, at least one.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
        let Ok(layout) = Layout::from_size_align(bytes, ALIGNMENT) else {
            handle_alloc_error(Layout::new::<u8>());
        };
        // SAFETY: the layout is not of size zero.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Self { start, len: bytes, allocation: Allocation::Own(layout) }
    }

    /// Allocates two zeroed buffers of [`HALF_HUGE_PAGE_BYTES`] bytes in one huge page, where the kernel has one. The
    /// kernel looks up such a buffer as one piece rather than as 256 pages, and describes it to a device as one piece.
    /// A device that accepts fewer than 256 pieces per request (loop: 128) gets the buffer in one request.
    #[must_use]
    pub fn pair() -> [Self; 2] {
        let mut page = Large::new();
        let starts = {
            let (first, second) = page.grow(HUGE).split_at_mut(HALF_HUGE_PAGE_BYTES);
            [NonNull::from(first).cast(), NonNull::from(second).cast()]
        };
        // From now on the page is accessed through the two buffers only, and is unmapped when both are dropped.
        let page = Arc::new(page);
        starts.map(|start| Self {
            start,
            len: HALF_HUGE_PAGE_BYTES,
            allocation: Allocation::HalfPage { _page: Arc::clone(&page) },
        })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Allocation::Own(layout) = self.allocation {
            // SAFETY: it was allocated with this layout, and nothing refers to it any more, since operations own their
            // buffers.
            unsafe { dealloc(self.start.as_ptr(), layout) }
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: initialised memory of that size, borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len())
    }
}

/// An operation on a file.
#[derive(Debug)]
pub enum Operation {
    /// Reads `len` bytes at `at` into the beginning of the buffer.
    Read {
        /// Offset in the file, in bytes.
        at: u64,
        /// Number of bytes; at most the length of the buffer is read.
        len: usize,
        /// The memory to read into.
        buffer: Buffer,
    },
    /// Writes the first `len` bytes of the buffer at `at`.
    Write {
        /// Offset in the file, in bytes.
        at: u64,
        /// Number of bytes; at most the length of the buffer is written.
        len: usize,
        /// The memory to write from.
        buffer: Buffer,
    },
    /// Makes content and length durable (`fdatasync`).
    Sync,
    /// Allocates or releases disk space (`fallocate`).
    Allocate {
        /// `FALLOC_FL_*`.
        mode: i32,
        /// Offset in the file, in bytes.
        at: u64,
        /// Number of bytes.
        len: u64,
    },
}

/// A completed operation.
#[derive(Debug)]
pub struct Completion {
    /// The token with which the operation was started.
    pub token: u64,
    /// The number of bytes read or written (0 for other operations), or the error.
    pub result: io::Result<usize>,
    /// The buffer of a read or a write.
    pub buffer: Option<Buffer>,
}

/// The resources that an operation keeps alive until it has completed.
struct OperationInFlight {
    token: u64,
    buffer: Option<Buffer>,
    _descriptor: HeldDescriptor,
}

/// The descriptor of an operation, kept open until the operation has completed.
enum HeldDescriptor {
    File { _file: Arc<File> },
    Other { _descriptor: Arc<OwnedFd> },
}

/// An `io_uring` and the operations in progress.
pub struct Ring {
    ring: IoUring,
    /// The operations in progress. The index is the `user_data` of the operation's entry in the kernel's queues.
    flights: Vec<Option<OperationInFlight>>,
    /// Indices of the empty elements of `flights`.
    free: Vec<usize>,
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ring({} under way)", self.under_way())
    }
}

/// A ring that no thread uses yet.
pub struct IdleRing {
    ring: IoUring,
    capacity: usize,
}

impl IdleRing {
    /// Makes a ring for at most `capacity` operations at a time, rounded up to a power of two. The kernel rejects all
    /// operations except those of [`Operation`], [`Ring::when_readable`] and [`Ring::cancel`]: a process that may use
    /// only this ring cannot open files or connections with it.
    ///
    /// Since Linux 6.1 the kernel processes completions only when the ring's thread waits for them, and does not
    /// interrupt it.
    ///
    /// # Errors
    /// `ENOSYS` or `EPERM` where `io_uring` is unavailable; other errors of `io_uring_setup(2)`.
    pub fn new(capacity: u32) -> io::Result<Self> {
        let capacity = capacity.next_power_of_two();
        let mut deferring = IoUring::builder();
        deferring.setup_r_disabled().setup_single_issuer().setup_defer_taskrun();
        let ring = deferring.build(capacity).or_else(|_| IoUring::builder().setup_r_disabled().build(capacity))?;
        let operations = [
            opcode::Read::CODE,
            opcode::Write::CODE,
            opcode::Fsync::CODE,
            opcode::Fallocate::CODE,
            opcode::PollAdd::CODE,
            opcode::AsyncCancel::CODE,
        ];
        let mut allowed = operations.map(Restriction::sqe_op);
        ring.submitter().register_restrictions(&mut allowed)?;
        Ok(Self { ring, capacity: capacity as usize })
    }

    /// Enables the ring for the calling thread.
    ///
    /// # Errors
    /// Errors of `io_uring_register(2)`.
    pub fn enable(self) -> io::Result<Ring> {
        let Self { ring, capacity } = self;
        ring.submitter().register_enable_rings()?;
        Ok(Ring { ring, flights: (0..capacity).map(|_| None).collect(), free: (0..capacity).rev().collect() })
    }
}

impl Ring {
    /// Makes and enables a ring: [`IdleRing::new`].
    ///
    /// # Errors
    /// As for [`IdleRing::new`].
    pub fn new(capacity: u32) -> io::Result<Self> {
        IdleRing::new(capacity)?.enable()
    }

    /// Returns the number of operations in progress.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.flights.len() - self.free.len()
    }

    /// Returns whether another operation can be started.
    #[must_use]
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Starts an operation, at the latest with the next [`Ring::wait`]. Its completion carries `token`.
    ///
    /// # Errors
    /// Returns the operation if there is no room for it.
    pub fn begin(&mut self, file: &Arc<File>, operation: Operation, token: u64) -> Result<(), Operation> {
        let Some(slot) = self.free.pop() else { return Err(operation) };
        let fd = types::Fd(file.as_raw_fd());
        let (entry, buffer) = match operation {
            Operation::Read { at, len, mut buffer } => {
                let len = len.min(buffer.len()) as u32;
                (opcode::Read::new(fd, buffer.as_mut_ptr(), len).offset(at).build(), Some(buffer))
            }
            Operation::Write { at, len, buffer } => {
                let len = len.min(buffer.len()) as u32;
                (opcode::Write::new(fd, buffer.as_ptr(), len).offset(at).build(), Some(buffer))
            }
            Operation::Sync => (opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(), None),
            Operation::Allocate { mode, at, len } => {
                (opcode::Fallocate::new(fd, len).offset(at).mode(mode).build(), None)
            }
        };
        let descriptor = HeldDescriptor::File { _file: file.clone() };
        self.push(slot, &entry, OperationInFlight { token, buffer, _descriptor: descriptor });
        Ok(())
    }

    /// Completes an operation `token`, once, when `descriptor` becomes readable.
    ///
    /// # Errors
    /// Returns the token if there is no room.
    pub fn when_readable(&mut self, descriptor: &Arc<OwnedFd>, token: u64) -> Result<(), u64> {
        let Some(slot) = self.free.pop() else { return Err(token) };
        let entry = opcode::PollAdd::new(types::Fd(descriptor.as_raw_fd()), libc::POLLIN as u32).build();
        let descriptor = HeldDescriptor::Other { _descriptor: descriptor.clone() };
        self.push(slot, &entry, OperationInFlight { token, buffer: None, _descriptor: descriptor });
        Ok(())
    }

    /// Cancels the operation `token` if it is still in progress. Its completion follows in either case.
    pub fn cancel(&mut self, token: u64) {
        let has_token =
            |flight: &Option<OperationInFlight>| flight.as_ref().is_some_and(|flight| flight.token == token);
        let Some(slot) = self.flights.iter().position(has_token) else { return };
        let entry = opcode::AsyncCancel::new(slot as u64).build().user_data(u64::MAX);
        // SAFETY: a cancellation has neither a buffer nor a descriptor.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            let _ = self.ring.submit();
        }
    }

    /// Queues the entry of an operation for submission, and keeps the operation's resources in `slot`.
    fn push(&mut self, slot: usize, entry: &squeue::Entry, flight: OperationInFlight) {
        let entry = entry.clone().user_data(slot as u64);
        if let Some(free_slot) = self.flights.get_mut(slot) {
            *free_slot = Some(flight);
        }
        // There are as many entries as flights, and the entries that wait for submission are fewer.
        //
        // SAFETY: the flight owns the buffer until its completion was seen, and holds the descriptor open. A flight
        // that has not completed when the ring is dropped leaks its buffer.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            let _ = self.ring.submit();
        }
    }

    /// Submits the started operations, and waits until one has completed or `timeout` has passed.
    ///
    /// # Errors
    /// Errors of `io_uring_enter(2)`, except interruptions, time-outs and a full completion queue.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let waited = match timeout {
            None => self.ring.submit_and_wait(1),
            Some(timeout) => {
                let timeout = types::Timespec::from(timeout);
                let arguments = types::SubmitArgs::new().timespec(&timeout);
                self.ring.submitter().submit_with_args(1, &arguments)
            }
        };
        match waited {
            Ok(_) => Ok(()),
            Err(e) if matches!(e.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN)) => {
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Submits the started operations, without waiting.
    ///
    /// # Errors
    /// Errors of `io_uring_enter(2)`, except interruptions and a full completion queue.
    pub fn submit(&mut self) -> io::Result<()> {
        match self.ring.submit() {
            Ok(_) => Ok(()),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Returns the operations that have completed since the last call.
    pub fn completions(&mut self) -> Vec<Completion> {
        let mut completed = Vec::new();
        for entry in self.ring.completion() {
            let slot = entry.user_data() as usize;
            // The completion of a cancellation has no slot.
            let Some(flight) = self.flights.get_mut(slot).and_then(Option::take) else { continue };
            self.free.push(slot);
            let result = match entry.result() {
                error if error < 0 => Err(io::Error::from_raw_os_error(-error)),
                bytes => Ok(bytes as usize),
            };
            completed.push(Completion { token: flight.token, result, buffer: flight.buffer });
        }
        completed
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel may still write into these buffers.
        for flight in self.flights.drain(..).flatten() {
            std::mem::forget(flight.buffer);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    /// Waits until `count` operations have completed, and returns them by token.
    fn wait_for(ring: &mut Ring, count: usize) -> Vec<Completion> {
        let mut completed = Vec::new();
        while completed.len() < count {
            ring.wait(None).unwrap();
            completed.extend(ring.completions());
        }
        completed.sort_by_key(|completion| completion.token);
        completed
    }

    #[test]
    fn what_is_written_is_read_and_every_operation_ends_once() {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let mut ring = Ring::new(8).unwrap();
        for n in 0..8u64 {
            let mut buffer = Buffer::new(4096);
            buffer.fill(n as u8 + 1);
            ring.begin(&file, Operation::Write { at: n * 4096, len: 4096, buffer }, n).unwrap();
        }
        assert!(!ring.has_room());
        let refused = ring.begin(&file, Operation::Sync, 9);
        assert!(matches!(refused, Err(Operation::Sync)));
        for write in wait_for(&mut ring, 8) {
            assert_eq!(write.result.unwrap(), 4096);
            assert_eq!(write.buffer.unwrap()[0], write.token as u8 + 1);
        }
        ring.begin(&file, Operation::Sync, 1).unwrap();
        ring.begin(&file, Operation::Read { at: 3 * 4096, len: 8192, buffer: Buffer::new(8192) }, 2).unwrap();
        let [sync, read] = wait_for(&mut ring, 2).try_into().unwrap();
        assert_eq!(sync.result.unwrap(), 0);
        let buffer = read.buffer.unwrap();
        assert_eq!((buffer[0], buffer[4095], buffer[4096], buffer[8191]), (4, 4, 5, 5));
        assert_eq!(ring.under_way(), 0);
        // A read after the end of the file.
        ring.begin(&file, Operation::Read { at: 1 << 20, len: 4096, buffer: Buffer::new(4096) }, 3).unwrap();
        assert_eq!(wait_for(&mut ring, 1).pop().unwrap().result.unwrap(), 0);
    }

    #[test]
    fn two_buffers_share_a_huge_page_and_not_a_byte() {
        let [mut first, mut second] = Buffer::pair();
        assert_eq!((first.len(), second.len()), (HALF_HUGE_PAGE_BYTES, HALF_HUGE_PAGE_BYTES));
        assert!(first.iter().chain(&*second).all(|byte| *byte == 0));
        assert!([&first, &second].iter().all(|half| (half.as_ptr() as usize).is_multiple_of(ALIGNMENT)));
        first.fill(1);
        second.fill(2);
        assert!(first.iter().all(|byte| *byte == 1));
        // Dropping one buffer keeps the other one valid.
        drop(first);
        assert!(second.iter().all(|byte| *byte == 2));
        let file = Arc::new(tempfile::tempfile().unwrap());
        let mut ring = Ring::new(2).unwrap();
        ring.begin(&file, Operation::Write { at: 0, len: HALF_HUGE_PAGE_BYTES, buffer: second }, 1).unwrap();
        let second = wait_for(&mut ring, 1).pop().unwrap().buffer.unwrap();
        ring.begin(
            &file,
            Operation::Read { at: 0, len: HALF_HUGE_PAGE_BYTES, buffer: Buffer::new(HALF_HUGE_PAGE_BYTES) },
            2,
        )
        .unwrap();
        assert!(*wait_for(&mut ring, 1).pop().unwrap().buffer.unwrap() == *second);
    }

    #[test]
    fn a_hole_is_punched_and_a_failure_is_reported() {
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(1 << 20).unwrap();
        let mut ring = Ring::new(4).unwrap();
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        ring.begin(&file, Operation::Allocate { mode, at: 0, len: 4096 }, 1).unwrap();
        assert!(wait_for(&mut ring, 1).pop().unwrap().result.is_ok());
        let unreadable = Arc::new(std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap());
        ring.begin(&unreadable, Operation::Read { at: 0, len: 1, buffer: Buffer::new(1) }, 2).unwrap();
        assert_eq!(wait_for(&mut ring, 1).pop().unwrap().result.unwrap_err().raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn a_wait_ends_by_its_timeout_or_when_the_descriptor_is_readable() {
        let mut ring = Ring::new(4).unwrap();
        ring.wait(Some(Duration::from_millis(1))).unwrap();
        assert!(ring.completions().is_empty());
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let theirs = Arc::new(OwnedFd::from(theirs));
        ring.when_readable(&theirs, 7).unwrap();
        ring.submit().unwrap();
        assert!(ring.completions().is_empty());
        ring.cancel(7);
        assert_eq!(wait_for(&mut ring, 1).pop().unwrap().result.unwrap_err().raw_os_error(), Some(libc::ECANCELED));
        assert_eq!(ring.under_way(), 0);
        ring.when_readable(&theirs, 7).unwrap();
        ours.write_all(b"x").unwrap();
        let [readable] = wait_for(&mut ring, 1).try_into().unwrap();
        assert_eq!(readable.token, 7);
        assert!(readable.result.is_ok());
    }
}
