//! A userfaultfd for the memory of another process.
//!
//! The other process itself must create the userfaultfd. So one of its threads is stopped for a moment and made to
//! execute the system call: the *injected call* ([`crate::inject`]).
//!
//! A process of another user may not call `userfaultfd(2)` unless `vm.unprivileged_userfaultfd` is set, and a seccomp
//! filter may forbid the call. In contrast, every process that has an open descriptor of `/dev/userfaultfd` may use its
//! `ioctl`. So a process that may open the device passes a descriptor of it (to QEMU by QMP `getfd`), and that `ioctl`
//! is the injected call.

use super::{Features, Mode, Userfault, UserfaultError};
use crate::descriptor;
use crate::inject::{Call, InjectError, Injector};
use crate::process::Process;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;

pub use super::abi::DEVICE;

/// The target of a link in `/proc/PID/fd` that is a userfaultfd.
const USERFAULTFD_LINK: &str = "anon_inode:[userfaultfd]";

/// The reason why no userfaultfd could be created in another process.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The process may not create a userfaultfd.
    #[error(
        "process {pid} may not make a userfaultfd, and this command cannot open {DEVICE} for it: permit the user of this \
         command to read and write {DEVICE}, or run it as root; without this device (before Linux 6.1): sysctl -w \
         vm.unprivileged_userfaultfd=1"
    )]
    Denied {
        /// Number of the process.
        pid: u32,
        /// The error of the injected call.
        #[source]
        source: InjectError,
    },
    /// The call could not be injected, or failed.
    #[error("cannot open a userfaultfd in process {pid}")]
    Inject {
        /// Number of the process.
        pid: u32,
        /// The error of the injection.
        #[source]
        source: InjectError,
    },
    /// A descriptor could not be taken from the process, or its descriptor table could not be read.
    #[error("cannot take descriptors of process {pid}")]
    Take {
        /// Number of the process.
        pid: u32,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// The handshake with the kernel (`UFFDIO_API`, which agrees on features) failed.
    #[error(transparent)]
    Userfault(#[from] UserfaultError),
}

/// A userfaultfd of another process: our duplicate, and the descriptor number in that process.
#[derive(Debug)]
pub struct Remote {
    /// Our duplicate of the descriptor.
    pub userfault: Userfault,
    /// Descriptor number in the other process; `None` after it was closed in that process.
    number: Option<RawFd>,
    injector: Injector,
}

impl Remote {
    /// Makes the process of `injector` create a userfaultfd, and agrees on `features`. `device` is the number of a
    /// descriptor of [`DEVICE`] in that process; if given, the userfaultfd is created through it.
    ///
    /// # Errors
    /// [`RemoteError`]. The process keeps no descriptor then.
    pub fn open(injector: Injector, features: Features, device: Option<RawFd>) -> Result<Self, RemoteError> {
        let pid = injector.process().pid;
        let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
        let call = match device {
            None => Call::new("userfaultfd", libc::SYS_userfaultfd, [flags]),
            Some(device) => {
                let arguments = [device as u64, super::abi::NEW, flags];
                Call::new("ioctl(USERFAULTFD_IOC_NEW)", libc::SYS_ioctl, arguments)
            }
        };
        let number = injector.call(call).map_err(|source| match (&source, source.errno()) {
            // A seccomp filter may return ENOSYS instead of EPERM.
            (InjectError::Filtered { .. }, _) | (_, Some(libc::EPERM | libc::EACCES | libc::ENOSYS)) => {
                RemoteError::Denied { pid, source }
            }
            _ => RemoteError::Inject { pid, source },
        })?;
        let number = number as RawFd;
        let duplicate = descriptor::take(injector.process(), number)
            .map_err(|source| RemoteError::Take { pid, source })
            .and_then(|fd| Ok(Userfault::shake_hands(fd, features)?));
        match duplicate {
            Ok(userfault) => Ok(Self { userfault, number: Some(number), injector }),
            Err(e) => {
                close_in_process(injector, number)?;
                Err(e)
            }
        }
    }

    /// Takes a duplicate of a userfaultfd that [`existing`] has found.
    ///
    /// # Errors
    /// [`RemoteError::Take`].
    pub fn take(injector: Injector, existing: Existing) -> Result<Self, RemoteError> {
        let process = injector.process();
        let fd = descriptor::take(process, existing.number)
            .map_err(|source| RemoteError::Take { pid: process.pid, source })?;
        let userfault = Userfault::adopt(fd, existing.features);
        Ok(Self { userfault, number: Some(existing.number), injector })
    }

    /// Returns what is needed to close the other process's descriptor.
    #[must_use]
    pub fn registration(&self) -> Option<Registration> {
        Some(Registration { injector: self.injector, number: self.number? })
    }

    /// Returns the process whose memory it is.
    #[must_use]
    pub fn process(&self) -> Process {
        self.injector.process()
    }

    /// Closes the other process's descriptor, so that everything ends when ours is closed: all ranges are unregistered,
    /// their protection ends, and waiting threads continue. For missing pages that would destroy the guest's RAM
    /// ([`super`]).
    ///
    /// # Errors
    /// [`RemoteError::Inject`].
    pub fn keep_only_ours(&mut self) -> Result<(), RemoteError> {
        if let Some(number) = self.number {
            close_in_process(self.injector, number)?;
            self.number = None;
        }
        Ok(())
    }

    /// Closes both descriptors. Ranges that are still registered are released with the last copy; a child that was just
    /// forked may have one until its exec. To be sure, unregister the ranges first.
    ///
    /// # Errors
    /// [`RemoteError::Inject`]. A process that has ended is no error.
    pub fn close(mut self) -> Result<(), RemoteError> {
        self.keep_only_ours()
    }
}

/// The descriptor of a userfaultfd in the process whose memory it is.
#[derive(Debug, Clone, Copy)]
pub struct Registration {
    injector: Injector,
    number: RawFd,
}

impl Registration {
    /// Closes the descriptor. A process that has ended is no error.
    ///
    /// # Errors
    /// [`RemoteError::Inject`].
    pub fn close(self) -> Result<(), RemoteError> {
        close_in_process(self.injector, self.number)
    }
}

fn close_in_process(injector: Injector, number: RawFd) -> Result<(), RemoteError> {
    match injector.call(Call::new("close", libc::SYS_close, [number as u64])) {
        Ok(_) | Err(InjectError::Gone { .. }) => Ok(()),
        Err(source) => Err(RemoteError::Inject { pid: injector.process().pid, source }),
    }
}

/// A userfaultfd in another process's descriptor table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Existing {
    /// Descriptor number in that process.
    pub number: RawFd,
    /// The features agreed on; empty before the handshake.
    pub features: Features,
}

/// Returns the userfaultfds in a process's descriptor table.
///
/// The features show the owner: QEMU itself (up to version 10) requests none of [`Features::WP_ASYNC`],
/// [`Features::EXACT_ADDRESS`], [`Features::EVENT_REMOVE`].
///
/// # Errors
/// [`RemoteError::Take`] when the table cannot be read.
pub fn existing(process: Process) -> Result<Vec<Existing>, RemoteError> {
    let pid = process.pid;
    let mut userfaultfds = Vec::new();
    for number in descriptors(pid)? {
        let link = fs::read_link(format!("/proc/{pid}/fd/{number}")).ok();
        if link.is_some_and(|link| link.as_os_str() == USERFAULTFD_LINK) {
            let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).unwrap_or_default();
            userfaultfds.push(Existing { number, features: agreed_features(&info) });
        }
    }
    check_alive(process)?;
    Ok(userfaultfds)
}

/// Parses the line `API: aa:AGREED FEATURES:KERNEL'S FEATURES` of `/proc/PID/fdinfo/FD`.
fn agreed_features(fdinfo: &str) -> Features {
    let bits = fdinfo.lines().find_map(|line| {
        // The second of the three fields: the features that were agreed on.
        let features = line.strip_prefix("API:")?.trim().split(':').nth(1)?;
        u64::from_str_radix(features, 16).ok()
    });
    Features::from_bits_truncate(bits.unwrap_or(0))
}

/// Returns the ranges of a process that any userfaultfd has registered for one of `modes`, ascending.
///
/// Reads `/proc/PID/smaps`, for which the kernel walks all page tables of the process: some 10 ms per GiB.
///
/// # Errors
/// `PermissionDenied` for the process of another user; `NotFound` if it has ended.
pub fn registered(process: Process, modes: Mode) -> io::Result<Vec<Range<u64>>> {
    let path = format!("/proc/{}/smaps", process.pid);
    let text = fs::read(&path).map_err(|e| io::Error::new(e.kind(), format!("{path}: {e}")))?;
    let text = String::from_utf8_lossy(&text);
    // The flags of smaps for ranges that a userfaultfd handles: proc_pid_smaps(5).
    let flag_of_mode = [(Mode::MISSING, "um"), (Mode::WRITE_PROTECT, "uw"), (Mode::MINOR, "ui")];
    // A mapping starts with the line of its range; one of the lines after that has its flags.
    let (mut mapping, mut registered) = (None, Vec::new());
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let has_flag = |flag: &str| flags.split_whitespace().any(|word| word == flag);
            if flag_of_mode.iter().any(|(mode, flag)| modes.contains(*mode) && has_flag(flag)) {
                registered.extend(mapping.take());
            }
        } else if let Some((start, end)) = line.split(' ').next().and_then(|range| range.split_once('-'))
            && let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16))
        {
            mapping = Some(start..end);
        }
    }
    Ok(registered)
}

/// Returns the number at which a process has [`DEVICE`] open.
///
/// # Errors
/// [`RemoteError::Take`] when the table cannot be read.
pub fn device_in(process: Process) -> Result<Option<RawFd>, RemoteError> {
    let pid = process.pid;
    let Ok(device) = fs::metadata(DEVICE) else { return Ok(None) };
    let is_device = |number: &RawFd| {
        fs::metadata(format!("/proc/{pid}/fd/{number}")).is_ok_and(|metadata| metadata.rdev() == device.rdev())
    };
    // All descriptors of the device have the same effect, so that it does not matter which of several is returned.
    let number = descriptors(pid)?.into_iter().rfind(is_device);
    check_alive(process)?;
    Ok(number)
}

/// Returns an error if a process has ended. What was read of it under `/proc` may then be of another process.
fn check_alive(process: Process) -> Result<(), RemoteError> {
    let ended = RemoteError::Take { pid: process.pid, source: io::ErrorKind::NotFound.into() };
    if process.is_alive() { Ok(()) } else { Err(ended) }
}

/// Returns the descriptor numbers of a process.
fn descriptors(pid: u32) -> Result<Vec<RawFd>, RemoteError> {
    let failed = |source| RemoteError::Take { pid, source };
    let mut numbers = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).map_err(failed)? {
        numbers.extend(entry.map_err(failed)?.file_name().to_str().and_then(|name| name.parse::<RawFd>().ok()));
    }
    Ok(numbers)
}
