//! userfaultfd: page faults of a process, handled by another one (userfaultfd(2), `mm/userfaultfd.rst`).
//!
//! A [`Userfault`] belongs to the memory of the process that made it. [`remote`] makes one inside another process and
//! gives us a duplicate of it. What a descriptor in the *other* process means for it when we are killed:
//!
//! | protection | a descriptor left there | none left there |
//! |---|---|---|
//! | asynchronous write protection | recording continues; no thread waits | ends |
//! | synchronous write protection | a writer waits for a new handler | ends, writers continue |
//! | missing pages | a reader waits for a new handler | a missing page reads as **zero** |

pub mod abi;
mod features;
pub mod remote;

pub use features::{Features, supported};

use abi::call;
use nix::errno::Errno;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::io;
use std::mem::size_of;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

bitflags::bitflags! {
    /// What a range is registered for.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Mode: u64 {
        /// Faults on pages that are not there.
        const MISSING = 1;
        /// Writes to pages that were write-protected.
        const WRITE_PROTECT = 2;
        /// Faults on pages that are in the page cache but not mapped.
        const MINOR = 4;
    }
}

/// Why something could not be done with a userfaultfd.
#[derive(Debug, thiserror::Error)]
pub enum UserfaultError {
    /// The kernel has not all that is needed.
    #[error("this kernel's userfaultfd does not support {}; Linux {}.{} or newer is needed", names(*missing), since.0, since.1)]
    Unsupported {
        /// What is missing.
        missing: Features,
        /// The first version of Linux with all of it.
        since: (u32, u32),
    },
    /// One may not be made.
    #[error(
        "no userfaultfd can be created: run as root, or: setfacl -m u:$USER:rw /dev/userfaultfd, or: sysctl -w \
         vm.unprivileged_userfaultfd=1"
    )]
    Denied {
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A range belongs to another userfaultfd already.
    #[error(
        "{:#x}..{:#x} is registered with another userfaultfd: QEMU's own (postcopy or a background snapshot is under way), \
         or one that another Rekindle left", range.start, range.end
    )]
    Busy {
        /// The range.
        range: Range<u64>,
    },
    /// A range cannot be registered that way.
    #[error(
        "{:#x}..{:#x} cannot be registered for {mode:?}: nothing is mapped there, or a file that is neither tmpfs nor \
         hugetlbfs", range.start, range.end
    )]
    Unfit {
        /// The range.
        range: Range<u64>,
        /// What for.
        mode: Mode,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The process whose memory it is has ended.
    #[error("the process whose memory it is has ended")]
    Gone,
    /// Another failure.
    #[error("userfaultfd: cannot {what} {:#x}..{:#x}", range.start, range.end)]
    Failed {
        /// What was tried.
        what: &'static str,
        /// Where.
        range: Range<u64>,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The descriptor failed.
    #[error("userfaultfd: cannot {what}")]
    Descriptor {
        /// What was tried.
        what: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

fn names(features: Features) -> String {
    features.iter_names().map(|(name, _)| name).collect::<Vec<_>>().join(", ")
}

/// How far filling came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filled {
    /// All of it.
    All,
    /// This many bytes; the page after them was there already.
    Exists(u64),
    /// This many bytes; the mappings are just changing: read the events, then try again.
    Changing(u64),
    /// This many bytes; the range after them is not registered (any more), or the process has ended.
    Gone(u64),
}

/// Something that happened in the memory of the process.
#[derive(Debug)]
pub enum Event {
    /// A thread waits for a page.
    Fault {
        /// Where, rounded down to a page unless [`Features::EXACT_ADDRESS`] was requested.
        address: u64,
        /// It wants to write.
        write: bool,
        /// The page is there, but write-protected.
        write_protected: bool,
        /// The page is in the page cache, but not mapped.
        minor: bool,
    },
    /// Pages are about to be given back (`MADV_DONTNEED`, `MADV_REMOVE`).
    Remove(Range<u64>),
    /// A range is about to be unmapped.
    Unmap(Range<u64>),
    /// A range was moved.
    Remap {
        /// From where.
        from: u64,
        /// To where.
        to: u64,
        /// Bytes.
        length: u64,
    },
    /// The process has forked; the descriptor is for the memory of the child.
    Fork(OwnedFd),
    /// Something this does not know.
    Unknown(u8),
}

/// A userfaultfd after its handshake.
#[derive(Debug)]
pub struct Userfault {
    fd: OwnedFd,
    features: Features,
}

impl Userfault {
    /// One for our own memory.
    ///
    /// # Errors
    /// [`UserfaultError::Denied`], [`UserfaultError::Unsupported`].
    pub fn own(features: Features) -> Result<Self, UserfaultError> {
        Self::shake_hands(features::open_own(0)?, features)
    }

    /// Agrees with the kernel on what `fd`, fresh from the kernel, does.
    ///
    /// # Errors
    /// [`UserfaultError::Unsupported`] with all that is missing.
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

    /// One whose handshake was done before, with these features.
    #[must_use]
    pub fn adopt(fd: OwnedFd, features: Features) -> Self {
        Self { fd, features }
    }

    /// What was agreed on.
    #[must_use]
    pub fn features(&self) -> Features {
        self.features
    }

    /// Registers the memory at `range` (whole pages) for `mode`.
    ///
    /// # Errors
    /// [`UserfaultError::Busy`], [`UserfaultError::Unfit`].
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

    /// Undoes [`Userfault::register`], and with it every write protection. Waiting threads continue.
    ///
    /// # Errors
    /// When the kernel refuses, e.g. because nothing is mapped there any more.
    pub fn unregister(&self, range: Range<u64>) -> Result<(), UserfaultError> {
        let mut raw = raw(&range);
        // SAFETY: one `struct uffdio_range` of asserted size.
        unsafe { call::unregister(self.fd.as_raw_fd(), &raw mut raw) }
            .map(drop)
            .map_err(|e| failed("unregister", range, e))
    }

    /// Lets threads that wait for a page of `range` try again.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn wake(&self, range: Range<u64>) -> Result<(), UserfaultError> {
        let mut raw = raw(&range);
        // SAFETY: one `struct uffdio_range` of asserted size.
        unsafe { call::wake(self.fd.as_raw_fd(), &raw mut raw) }.map(drop).map_err(|e| failed("wake", range, e))
    }

    /// Write-protects the pages of `range`, or allows writing (and wakes waiting writers).
    ///
    /// # Errors
    /// [`UserfaultError::Failed`], with `NotFound` when the range is not registered for it.
    pub fn write_protect(&self, range: Range<u64>, protect: bool) -> Result<(), UserfaultError> {
        let mode = if protect { abi::WRITEPROTECT_MODE_WP } else { 0 };
        let mut argument = abi::WriteProtect { range: raw(&range), mode };
        loop {
            // SAFETY: one `struct uffdio_writeprotect` of asserted size.
            match unsafe { call::writeprotect(self.fd.as_raw_fd(), &raw mut argument) } {
                Ok(_) => return Ok(()),
                // Mappings are changing; without events of ours that passes by itself.
                Err(Errno::EAGAIN) => std::thread::yield_now(),
                Err(e) => return Err(failed(if protect { "write-protect" } else { "allow writing to" }, range, e)),
            }
        }
    }

    /// Puts `pages` at `address` of the process, and wakes the threads that wait for them if `wake`.
    ///
    /// # Errors
    /// [`UserfaultError::Failed`]; outcomes that are not failures are in [`Filled`].
    pub fn copy(&self, address: u64, pages: &[u8], wake: bool) -> Result<Filled, UserfaultError> {
        self.copy_as(address, pages, if wake { 0 } else { abi::MODE_DONTWAKE })
    }

    /// As [`Userfault::copy`], and the pages are write-protected from their first moment on. The range must be
    /// registered for
    /// [`Mode::WRITE_PROTECT`], too.
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
            // SAFETY: one `struct uffdio_copy` of asserted size; the kernel reads `length` bytes at `src`, which are
            // all of `from`.
            let done = unsafe { call::copy(self.fd.as_raw_fd(), &raw mut copy) };
            (done, copy.copy)
        })
    }

    /// Puts pages of zeroes at `range`. Not for hugetlbfs.
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

    /// Maps the pages of `range` that are in the page cache ([`Mode::MINOR`]).
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

    /// Makes pages of `range` that are lost for good raise `SIGBUS` (under KVM: a machine check) when they are touched.
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

    /// Fills a range by a call that may come to an end half way.
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
                // Partly done: the next call returns the reason.
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

    /// The events that have come, without waiting. Poll the descriptor to wait.
    ///
    /// A fault is reported once: the caller must resolve it, or [`Userfault::wake`].
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
        // SAFETY: with this event the kernel has put a fresh descriptor into our table, whose number is in the low half
        // of the word and which nothing else knows.
        abi::EVENT_FORK => Event::Fork(unsafe { OwnedFd::from_raw_fd(word(1) as u32 as RawFd) }),
        other => Event::Unknown(other),
    }
}

#[cfg(test)]
mod tests;
