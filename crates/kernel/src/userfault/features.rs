//! The features of userfaultfd, and the version of Linux that introduced each.

use super::{UserfaultError, abi};
use nix::errno::Errno;
use rustix::fd::OwnedFd;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

bitflags::bitflags! {
    /// `UFFD_FEATURE_*`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Features: u64 {
        /// Faults report whether write protection caused them. Linux 5.7.
        const PAGEFAULT_FLAG_WP = 1;
        /// Events for forks. Linux 4.11.
        const EVENT_FORK = 1 << 1;
        /// Events for moved mappings. Linux 4.11.
        const EVENT_REMAP = 1 << 2;
        /// Events for released pages. Linux 4.11.
        const EVENT_REMOVE = 1 << 3;
        /// Missing pages of hugetlbfs. Linux 4.11.
        const MISSING_HUGETLBFS = 1 << 4;
        /// Missing pages of shared memory. Linux 4.11.
        const MISSING_SHMEM = 1 << 5;
        /// Events for unmapping. Linux 4.11.
        const EVENT_UNMAP = 1 << 6;
        /// `SIGBUS` instead of an event. Linux 4.14.
        const SIGBUS = 1 << 7;
        /// Faults report their thread. Linux 4.14.
        const THREAD_ID = 1 << 8;
        /// Unmapped pages of hugetlbfs. Linux 5.13.
        const MINOR_HUGETLBFS = 1 << 9;
        /// Unmapped pages of shared memory. Linux 5.14.
        const MINOR_SHMEM = 1 << 10;
        /// Faults report the exact address. Linux 5.18.
        const EXACT_ADDRESS = 1 << 11;
        /// Write protection of hugetlbfs and shared memory. Linux 5.19.
        const WP_HUGETLBFS_SHMEM = 1 << 12;
        /// Write protection of pages that are not present. Linux 6.4.
        const WP_UNPOPULATED = 1 << 13;
        /// Marking pages as lost permanently. Linux 6.6.
        const POISON = 1 << 14;
        /// Write protection that the kernel itself removes and records. Linux 6.7.
        const WP_ASYNC = 1 << 15;
        /// Moving pages. Linux 6.8.
        const MOVE = 1 << 16;
    }
}

/// The version of Linux that introduced each feature.
const INTRODUCED_IN: [(Features, (u32, u32)); 17] = [
    (Features::MOVE, (6, 8)),
    (Features::WP_ASYNC, (6, 7)),
    (Features::POISON, (6, 6)),
    (Features::WP_UNPOPULATED, (6, 4)),
    (Features::WP_HUGETLBFS_SHMEM, (5, 19)),
    (Features::EXACT_ADDRESS, (5, 18)),
    (Features::MINOR_SHMEM, (5, 14)),
    (Features::MINOR_HUGETLBFS, (5, 13)),
    (Features::PAGEFAULT_FLAG_WP, (5, 7)),
    (Features::THREAD_ID, (4, 14)),
    (Features::SIGBUS, (4, 14)),
    (Features::EVENT_UNMAP, (4, 11)),
    (Features::MISSING_SHMEM, (4, 11)),
    (Features::MISSING_HUGETLBFS, (4, 11)),
    (Features::EVENT_REMOVE, (4, 11)),
    (Features::EVENT_REMAP, (4, 11)),
    (Features::EVENT_FORK, (4, 11)),
];

impl Features {
    /// Returns the first version of Linux that has all of these.
    #[must_use]
    pub fn since(self) -> (u32, u32) {
        let versions = INTRODUCED_IN.iter().filter(|(feature, _)| self.intersects(*feature)).map(|(_, since)| *since);
        versions.max().unwrap_or((4, 3))
    }
}

/// Returns the features of this kernel.
///
/// # Errors
/// [`UserfaultError::Denied`] when not even a userfaultfd for faults in user mode can be created.
pub fn supported() -> Result<Features, UserfaultError> {
    /// `UFFD_USER_MODE_ONLY`, which all users may request.
    const USER_MODE_ONLY: i32 = 1;
    let fd = open_own(USER_MODE_ONLY, None)?;
    let mut api = abi::Api { api: abi::UFFD_API, ..abi::Api::default() };
    // SAFETY: one `struct uffdio_api` of asserted size, which lives through the call.
    unsafe { abi::call::api(fd.as_raw_fd(), &raw mut api) }
        .map_err(|e| UserfaultError::Descriptor { what: "ask for its features", source: e.into() })?;
    Ok(Features::from_bits_truncate(api.features))
}

/// Opens [`DEVICE`](super::remote::DEVICE). A process that has it open can make a userfaultfd also as a user that cannot open it.
///
/// # Errors
/// Errors of `open(2)`.
pub fn open_device() -> io::Result<File> {
    File::options().read(true).write(true).open(abi::DEVICE)
}

/// Creates a userfaultfd for this process's memory, by the system call or, where that is not allowed, by the device: `device`, if this
/// process has it open.
pub(super) fn open_own(flags: i32, device: Option<&File>) -> Result<OwnedFd, UserfaultError> {
    let flags = flags | libc::O_CLOEXEC | libc::O_NONBLOCK;
    let denied = |source: io::Error| UserfaultError::Denied { source };
    // SAFETY: the call takes a number and touches no memory.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    let fd = match RawFd::try_from(fd) {
        Ok(fd) if fd >= 0 => fd,
        _ => {
            let system_call_error = io::Error::last_os_error();
            let opened = device.map_or_else(open_device, |device| device.try_clone());
            let device = opened.map_err(|_| denied(system_call_error))?;
            // SAFETY: the call takes a number and touches no memory.
            unsafe { abi::call::new(device.as_raw_fd(), flags) }.map_err(|e: Errno| denied(e.into()))?
        }
    };
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
