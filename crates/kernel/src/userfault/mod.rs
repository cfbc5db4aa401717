//! userfaultfd: page faults of a process, handled by another process (userfaultfd(2), `mm/userfaultfd.rst`).
//!
//! A [`Userfault`] belongs to the memory of the process that created it. [`remote`] creates one inside another process
//! and takes a duplicate of it. If our process is killed, the effect on the *other* process depends on whether that
//! process still has a descriptor:
//!
//! | protection | the other process has a descriptor | it has none |
//! |---|---|---|
//! | asynchronous write protection | recording continues; no thread waits | ends |
//! | synchronous write protection | a writer waits for a new handler | ends, writers continue |
//! | missing pages | a reader waits for a new handler | a missing page reads as **zero** |

pub mod abi;
mod features;
pub mod remote;

pub use features::{Features, open_device, supported};

use abi::call;
use nix::errno::Errno;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::fs::File;
use std::io;
use std::mem::size_of;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

bitflags::bitflags! {
    /// The kinds of faults that a range is registered for.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Mode: u64 {
        /// Faults on missing pages.
        const MISSING = 1;
        /// Writes to write-protected pages.
        const WRITE_PROTECT = 2;
        /// Faults on pages that are in the page cache but not mapped.
        const MINOR = 4;
    }
}

/// The reason why a userfaultfd operation failed.
#[derive(Debug, thiserror::Error)]
pub enum UserfaultError {
    /// The kernel does not have all required features.
    #[error("this kernel's userfaultfd does not support {}; Linux {}.{} or newer is needed", names(*missing), since.0, since.1)]
    Unsupported {
        /// The missing features.
        missing: Features,
        /// The first version of Linux that has all of them.
        since: (u32, u32),
    },
    /// This process may not create a userfaultfd.
    #[error(
        "no userfaultfd can be created: run as root, or: setfacl -m u:$USER:rw /dev/userfaultfd, or: sysctl -w \
         vm.unprivileged_userfaultfd=1"
    )]
    Denied {
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// Another userfaultfd has registered a part of the range.
    #[error(
        "{:#x}..{:#x} is registered with another userfaultfd: QEMU's own (postcopy or a background snapshot is under way), \
         or one that another Rekindle left", range.start, range.end
    )]
    Busy {
        /// The addresses of the rejected registration.
        range: Range<u64>,
    },
    /// The memory of the range does not support the registration.
    #[error(
        "{:#x}..{:#x} cannot be registered for {mode:?}: nothing is mapped there, or a file that is neither tmpfs nor \
         hugetlbfs", range.start, range.end
    )]
    Unfit {
        /// The addresses of the rejected registration.
        range: Range<u64>,
        /// The requested kinds of faults.
        mode: Mode,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// The process that owns the memory has ended.
    #[error("the process whose memory it is has ended")]
    Gone,
    /// Another operation on a range failed.
    #[error("userfaultfd: cannot {what} {:#x}..{:#x}", range.start, range.end)]
    Failed {
        /// The operation.
        what: &'static str,
        /// The addresses of the operation.
        range: Range<u64>,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// An operation on the descriptor itself failed.
    #[error("userfaultfd: cannot {what}")]
    Descriptor {
        /// The operation.
        what: &'static str,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
}

fn names(features: Features) -> String {
    features.iter_names().map(|(name, _)| name).collect::<Vec<_>>().join(", ")
}

/// The extent to which a range was filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filled {
    /// The whole range.
    All,
    /// This many bytes; the page after them was present already.
    Exists(u64),
    /// This many bytes; the mappings are being changed. Read the events, then try again.
    Changing(u64),
    /// This many bytes; the range after them is not or no longer registered, or the process has ended.
    Gone(u64),
}

/// An event in the memory of the process.
#[derive(Debug)]
pub enum Event {
    /// A thread waits for a page.
    Fault {
        /// The address, rounded down to a page unless [`Features::EXACT_ADDRESS`] was requested.
        address: u64,
        /// Whether the access is a write.
        write: bool,
        /// Whether the page is present but write-protected.
        write_protected: bool,
        /// Whether the page is in the page cache but not mapped.
        minor: bool,
    },
    /// Pages are about to be released (`MADV_DONTNEED`, `MADV_REMOVE`).
    Remove(Range<u64>),
    /// A range is about to be unmapped.
    Unmap(Range<u64>),
    /// A range was moved.
    Remap {
        /// The old address.
        from: u64,
        /// The new address.
        to: u64,
        /// Length in bytes.
        length: u64,
    },
    /// The process has forked; the descriptor is for the memory of the child.
    Fork(OwnedFd),
    /// An event of a kind that this crate does not know.
    Unknown(u8),
}

/// A userfaultfd after its handshake with the kernel.
#[derive(Debug)]
pub struct Userfault {
    fd: OwnedFd,
    features: Features,
}

impl Userfault {
    /// Creates a userfaultfd for this process's memory.
    ///
    /// # Errors
    /// [`UserfaultError::Denied`], [`UserfaultError::Unsupported`].
    pub fn own(features: Features) -> Result<Self, UserfaultError> {
        Self::shake_hands(features::open_own(0, None)?, features)
    }

    /// Like [`Userfault::own`], with the device that [`open_device`] has opened earlier.
    ///
    /// # Errors
    /// As for [`Userfault::own`].
    pub fn own_by(device: Option<&File>, features: Features) -> Result<Self, UserfaultError> {
        Self::shake_hands(features::open_own(0, device)?, features)
    }

    /// Agrees with the kernel on the features of `fd`, a new userfaultfd.
    ///
    /// # Errors
    /// [`UserfaultError::Unsupported`] with all missing features; [`UserfaultError::Descriptor`].
    pub fn shake_hands(fd: OwnedFd, features: Features) -> Result<Self, UserfaultError> {
        let mut api = abi::Api { api: abi::UFFD_API, features: features.bits(), ioctls: 0 };
        // SAFETY: the kernel reads and writes one `struct uffdio_api`, whose size is asserted, and which lives through
        // the call.
        match unsafe { call::api(fd.as_raw_fd(), &raw mut api) } {
            Ok(_) => Ok(Self { fd, features }),
            Err(e) => {
                let missing = features.difference(supported()?);
                if missing.is_empty() {
                    return Err(UserfaultError::Descriptor { what: "agree on its features", source: e.into() });
                }
                Err(UserfaultError::Unsupported { missing, since: missing.since() })
            }
        }
    }

    /// Wraps a userfaultfd whose handshake has been done, with these features.
    #[must_use]
    pub fn adopt(fd: OwnedFd, features: Features) -> Self {
        Self { fd, features }
    }

    /// Returns the features that were agreed on.
    #[must_use]
    pub fn features(&self) -> Features {
        self.features
    }

    /// Registers the memory at `range` (whole pages) for `mode`.
    ///
    /// # Errors
    /// [`UserfaultError::Busy`], [`UserfaultError::Unfit`], [`UserfaultError::Failed`].
    pub fn register(&self, range: Range<u64>, mode: Mode) -> Result<(), UserfaultError> {
        let mut register = abi::Register { range: raw(&range), mode: mode.bits(), ioctls: 0 };
        // SAFETY: one `struct uffdio_register` of asserted size; its addresses are of the process whose memory it is.
        match unsafe { call::register(self.fd.as_raw_fd(), &raw mut register) } {
            Ok(_) => Ok(()),
            Err(Errno::EBUSY) => Err(UserfaultError::Busy { range }),
            Err(Errno::EINVAL | Errno::ENOENT | Errno::EPERM) if range.is_empty() => Ok(()),
            Err(e @ (Errno::EINVAL | Errno::EPERM)) => Err(UserfaultError::Unfit { range, mode, source: e.into() }),
            Err(e) => Err(failed("register", range, e)),
        }
    }

    /// Undoes [`Userfault::register`], and with it all write protection of the range. Waiting threads continue.
    ///
    /// # Errors
    /// [`UserfaultError::Failed`], e.g. because the range is no longer mapped.
    pub fn unregister(&self, range: Range<u64>) -> Result<(), UserfaultError> {
        let mut raw = raw(&range);
        // SAFETY: one `struct uffdio_range` of asserted size.
        unsafe { call::unregister(self.fd.as_raw_fd(), &raw mut raw) }
            .map(drop)
            .map_err(|e| failed("unregister", range, e))
    }

    /// Makes threads that wait for a page of `range` retry their access.
    ///
    /// # Errors
    /// [`UserfaultError::Failed`].
    pub fn wake(&self, range: Range<u64>) -> Result<(), UserfaultError> {
        let mut raw = raw(&range);
        // SAFETY: one `struct uffdio_range` of asserted size.
        unsafe { call::wake(self.fd.as_raw_fd(), &raw mut raw) }.map(drop).map_err(|e| failed("wake", range, e))
    }

    /// Write-protects the pages of `range`, or permits writes and wakes waiting writers.
    ///
    /// # Errors
    /// [`UserfaultError::Failed`], with `NotFound` when the range is not registered for write protection.
    pub fn write_protect(&self, range: Range<u64>, protect: bool) -> Result<(), UserfaultError> {
        let mode = if protect { abi::WRITEPROTECT_MODE_WP } else { 0 };
        let mut argument = abi::WriteProtect { range: raw(&range), mode };
        loop {
            // SAFETY: one `struct uffdio_writeprotect` of asserted size.
            match unsafe { call::writeprotect(self.fd.as_raw_fd(), &raw mut argument) } {
                Ok(_) => return Ok(()),
                // The mappings are being changed, which ends without an action of ours unless events were requested.
                Err(Errno::EAGAIN) => std::thread::yield_now(),
                Err(e) => return Err(failed(if protect { "write-protect" } else { "allow writing to" }, range, e)),
            }
        }
    }

    /// Fills missing pages at `address` of the process with `pages`. If `wake`, wakes the threads that wait for them.
    ///
    /// # Errors
    /// [`UserfaultError::Failed`]; [`Filled`] reports outcomes that are not failures.
    pub fn copy(&self, address: u64, pages: &[u8], wake: bool) -> Result<Filled, UserfaultError> {
        self.copy_as(address, pages, if wake { 0 } else { abi::MODE_DONTWAKE })
    }

    /// Fills pages like [`Userfault::copy`], and write-protects them atomically with that. The range must also be
    /// registered for [`Mode::WRITE_PROTECT`].
    ///
    /// # Errors
    /// As for [`Userfault::copy`].
    pub fn copy_protected(&self, address: u64, pages: &[u8], wake: bool) -> Result<Filled, UserfaultError> {
        self.copy_as(address, pages, abi::COPY_MODE_WP | if wake { 0 } else { abi::MODE_DONTWAKE })
    }

    fn copy_as(&self, address: u64, pages: &[u8], mode: u64) -> Result<Filled, UserfaultError> {
        let range = address..address + pages.len() as u64;
        self.fill("fill", &range, |at, length| {
            let from = pages.get((at - address) as usize..).unwrap_or_default();
            let mut copy = abi::Copy_ { dst: at, src: from.as_ptr() as u64, len: length, mode, copy: 0 };
            // SAFETY: one `struct uffdio_copy` of asserted size; the kernel reads `length` bytes at `src`, which is the
            // length of `from`.
            let done = unsafe { call::copy(self.fd.as_raw_fd(), &raw mut copy) };
            (done, copy.copy)
        })
    }

    /// Fills missing pages of `range` with zeros. Not for hugetlbfs.
    ///
    /// # Errors
    /// As for [`Userfault::copy`].
    pub fn zero(&self, range: Range<u64>, wake: bool) -> Result<Filled, UserfaultError> {
        let mode = if wake { 0 } else { abi::MODE_DONTWAKE };
        self.fill("zero", &range, |start, len| {
            let mut fill = abi::Fill { range: abi::Range { start, len }, mode, done: 0 };
            // SAFETY: one `struct uffdio_zeropage` of asserted size.
            let done = unsafe { call::zeropage(self.fd.as_raw_fd(), &raw mut fill) };
            (done, fill.done)
        })
    }

    /// Maps pages of `range` that are in the page cache ([`Mode::MINOR`]).
    ///
    /// # Errors
    /// As for [`Userfault::copy`].
    pub fn resume(&self, range: Range<u64>, wake: bool) -> Result<Filled, UserfaultError> {
        let mode = if wake { 0 } else { abi::MODE_DONTWAKE };
        self.fill("map", &range, |start, len| {
            let mut fill = abi::Fill { range: abi::Range { start, len }, mode, done: 0 };
            // SAFETY: one `struct uffdio_continue` of asserted size.
            let done = unsafe { call::continue_(self.fd.as_raw_fd(), &raw mut fill) };
            (done, fill.done)
        })
    }

    /// Makes missing pages of `range` raise `SIGBUS` (under KVM: a machine check) on access, because their content is
    /// lost permanently.
    ///
    /// # Errors
    /// As for [`Userfault::copy`].
    pub fn poison(&self, range: Range<u64>) -> Result<Filled, UserfaultError> {
        self.fill("poison", &range, |start, len| {
            let mut fill = abi::Fill { range: abi::Range { start, len }, mode: 0, done: 0 };
            // SAFETY: one `struct uffdio_poison` of asserted size.
            let done = unsafe { call::poison(self.fd.as_raw_fd(), &raw mut fill) };
            (done, fill.done)
        })
    }

    /// Fills a range by a call that may fill only a part of it.
    fn fill(
        &self,
        what: &'static str,
        range: &Range<u64>,
        mut call: impl FnMut(u64, u64) -> (nix::Result<i32>, i64),
    ) -> Result<Filled, UserfaultError> {
        let mut at = range.start;
        while at < range.end {
            let (result, done) = call(at, range.end - at);
            if done > 0 {
                // A part was filled: the next call returns the reason for the end.
                at += done as u64;
                continue;
            }
            let so_far = at - range.start;
            match result {
                Ok(_) => return Ok(Filled::All),
                Err(Errno::EEXIST) => return Ok(Filled::Exists(so_far)),
                Err(Errno::EAGAIN) => return Ok(Filled::Changing(so_far)),
                Err(Errno::ENOENT | Errno::ESRCH) => return Ok(Filled::Gone(so_far)),
                Err(e) => return Err(failed(what, range.clone(), e)),
            }
        }
        Ok(Filled::All)
    }

    /// Returns the pending events, without waiting. Poll the descriptor to wait.
    ///
    /// A fault is reported once: the caller must resolve it, or call [`Userfault::wake`].
    ///
    /// # Errors
    /// [`UserfaultError::Gone`] when the process has ended; [`UserfaultError::Descriptor`].
    pub fn events(&self) -> Result<Vec<Event>, UserfaultError> {
        const SOME: usize = 64;
        let mut bytes = [0u8; SOME * size_of::<abi::Message>()];
        let length = loop {
            match rustix::io::read(&self.fd, &mut bytes) {
                Ok(0) => return Err(UserfaultError::Gone),
                Ok(length) => break length,
                Err(rustix::io::Errno::AGAIN) => return Ok(Vec::new()),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(UserfaultError::Descriptor { what: "read events", source: e.into() }),
            }
        };
        let (messages, _) = bytes.get(..length).unwrap_or_default().as_chunks::<{ size_of::<abi::Message>() }>();
        Ok(messages.iter().map(event).collect())
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn raw(range: &Range<u64>) -> abi::Range {
    abi::Range { start: range.start, len: range.end - range.start }
}

fn failed(what: &'static str, range: Range<u64>, e: Errno) -> UserfaultError {
    match e {
        Errno::ESRCH => UserfaultError::Gone,
        _ => UserfaultError::Failed { what, range, source: e.into() },
    }
}

fn event(message: &[u8; size_of::<abi::Message>()]) -> Event {
    let word = |n: usize| {
        let (words, _) = message.as_chunks::<8>();
        words.get(n).copied().map_or(0, u64::from_ne_bytes)
    };
    match message[0] {
        abi::EVENT_PAGEFAULT => Event::Fault {
            address: word(2),
            write: word(1) & abi::PAGEFAULT_WRITE != 0,
            write_protected: word(1) & abi::PAGEFAULT_WP != 0,
            minor: word(1) & abi::PAGEFAULT_MINOR != 0,
        },
        abi::EVENT_REMOVE => Event::Remove(word(1)..word(2)),
        abi::EVENT_UNMAP => Event::Unmap(word(1)..word(2)),
        abi::EVENT_REMAP => Event::Remap { from: word(1), to: word(2), length: word(3) },
        // SAFETY: with this event the kernel has put a new descriptor into our table. Its number is in the low half of
        // the word, and nothing else owns it.
        abi::EVENT_FORK => Event::Fork(unsafe { OwnedFd::from_raw_fd(word(1) as u32 as RawFd) }),
        other => Event::Unknown(other),
    }
}

#[cfg(test)]
mod tests;
