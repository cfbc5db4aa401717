//! A userfaultfd for the memory of another process.
//!
//! It must be made by that process itself. A process of another user may not call `userfaultfd(2)` unless
//! `vm.unprivileged_userfaultfd` is set, and a seccomp filter may forbid it; `ioctl` on an open `/dev/userfaultfd` is
//! allowed to every process that holds one. So a process that may open the device passes a descriptor of it (to QEMU
//! by QMP `getfd`), and the call is that `ioctl`.

use super::{Features, Mode, Userfault, UserfaultError};
use crate::descriptor;
use crate::inject::{Call, InjectError, Injector};
use crate::process::Process;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;

/// The device that creates userfaultfds for processes that may open it. Linux 6.1.
pub const DEVICE: &str = "/dev/userfaultfd";
/// How `/proc/PID/fd` shows one.
const LINK: &str = "anon_inode:[userfaultfd]";

/// Why no userfaultfd could be created in another process.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The process may not make one.
    #[error(
        "process {pid} may not make a userfaultfd (it runs as another user, and vm.unprivileged_userfaultfd is 0, or a \
         filter forbids it): hand it a descriptor of {DEVICE} first, or: sysctl -w vm.unprivileged_userfaultfd=1"
    )]
    Denied {
        /// The process.
        pid: u32,
        /// How it was refused.
        #[source]
        source: InjectError,
    },
    /// The call could not be made.
    #[error("cannot open a userfaultfd in process {pid}")]
    Inject {
        /// The process.
        pid: u32,
        /// Why.
        #[source]
        source: InjectError,
    },
    /// The descriptor could not be taken out of the process, or its table not be read.
    #[error("cannot take descriptors of process {pid}")]
    Take {
        /// The process.
        pid: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The handshake failed.
    #[error(transparent)]
    Userfault(#[from] UserfaultError),
}

/// A userfaultfd of another process: our duplicate, and its number there.
#[derive(Debug)]
pub struct Remote {
    /// Our duplicate.
    pub userfault: Userfault,
    /// Its number in the process's table; `None` once it was closed there.
    number: Option<RawFd>,
    injector: Injector,
}

impl Remote {
    /// Lets the process of `injector` make a userfaultfd, and agrees on `features`. With `device`, the number of a
    /// descriptor of [`DEVICE`] that the process has, it is made through that.
    ///
    /// # Errors
    /// [`RemoteError`]. Nothing is left in the process.
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
            (InjectError::Filtered { .. }, _) | (_, Some(libc::EPERM | libc::EACCES | libc::ENOSYS)) => {
                RemoteError::Denied { pid, source }
            }
            _ => RemoteError::Inject { pid, source },
        })?;
        let number = number as RawFd;
        let made = descriptor::take(injector.process(), number)
            .map_err(|source| RemoteError::Take { pid, source })
            .and_then(|fd| Ok(Userfault::shake_hands(fd, features)?));
        match made {
            Ok(userfault) => Ok(Self { userfault, number: Some(number), injector }),
            Err(e) => {
                close(injector, number)?;
                Err(e)
            }
        }
    }

    /// A duplicate of the userfaultfd that [`existing`] found.
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

    /// The process.
    #[must_use]
    pub fn process(&self) -> Process {
        self.injector.process()
    }

    /// Closes the process's own copy, so that everything ends with ours: all registered ranges and their protection go,
    /// and waiting threads continue. For missing pages that would destroy the guest; see [`super`].
    ///
    /// # Errors
    /// [`RemoteError::Inject`].
    pub fn keep_only_ours(&mut self) -> Result<(), RemoteError> {
        if let Some(number) = self.number {
            close(self.injector, number)?;
            self.number = None;
        }
        Ok(())
    }

    /// Closes both copies. What is still registered is released by that, once no child of ours that was just forked
    /// has a copy any more: to be sure, unregister it first.
    ///
    /// # Errors
    /// [`RemoteError::Inject`]. A process that has ended is no error.
    pub fn close(mut self) -> Result<(), RemoteError> {
        self.keep_only_ours()
    }
}

fn close(injector: Injector, number: RawFd) -> Result<(), RemoteError> {
    match injector.call(Call::new("close", libc::SYS_close, [number as u64])) {
        Ok(_) | Err(InjectError::Gone { .. }) => Ok(()),
        Err(source) => Err(RemoteError::Inject { pid: injector.process().pid, source }),
    }
}

/// A userfaultfd in a process's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Existing {
    /// Its number there.
    pub number: RawFd,
    /// What was asked of it; empty before its handshake.
    pub features: Features,
}

/// The userfaultfds in a process's table.
///
/// The features show the owner: QEMU itself (up to 10) asks for none of [`Features::WP_ASYNC`],
/// [`Features::EXACT_ADDRESS`], [`Features::EVENT_REMOVE`].
///
/// # Errors
/// [`RemoteError::Take`] when the table cannot be read.
pub fn existing(process: Process) -> Result<Vec<Existing>, RemoteError> {
    let pid = process.pid;
    let mut found = Vec::new();
    each_descriptor(process, |number| {
        let link = fs::read_link(format!("/proc/{pid}/fd/{number}")).ok();
        if link.is_none_or(|link| link.as_os_str() != LINK) {
            return;
        }
        let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).unwrap_or_default();
        // "API: aa:FEATURES:OF THE KERNEL"
        let features = info.lines().find_map(|line| {
            let features = line.strip_prefix("API:")?.trim().split(':').nth(1)?;
            u64::from_str_radix(features, 16).ok()
        });
        found.push(Existing { number, features: Features::from_bits_truncate(features.unwrap_or(0)) });
    })?;
    Ok(found)
}

/// The ranges of a process that are registered for one of `modes`, with whichever userfaultfd, ascending.
///
/// Reads `/proc/PID/smaps`, for which the kernel walks all page tables of the process: some 10 ms per GiB.
///
/// # Errors
/// `PermissionDenied` for the process of another user; `NotFound` if it has ended.
pub fn registered(process: Process, modes: Mode) -> io::Result<Vec<Range<u64>>> {
    let path = format!("/proc/{}/smaps", process.pid);
    let text = fs::read(&path).map_err(|e| io::Error::new(e.kind(), format!("{path}: {e}")))?;
    let text = String::from_utf8_lossy(&text);
    let letters = [(Mode::MISSING, "um"), (Mode::WRITE_PROTECT, "uw"), (Mode::MINOR, "ui")];
    let (mut current, mut found) = (None, Vec::new());
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
            if letters.iter().any(|(mode, flag)| modes.contains(*mode) && has(flag)) {
                found.extend(current.take());
            }
        } else if let Some((start, end)) = line.split(' ').next().and_then(|range| range.split_once('-'))
            && let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16))
        {
            current = Some(start..end);
        }
    }
    Ok(found)
}

/// The number at which a process has [`DEVICE`] open, if it has.
///
/// # Errors
/// [`RemoteError::Take`] when the table cannot be read.
pub fn device_in(process: Process) -> Result<Option<RawFd>, RemoteError> {
    let pid = process.pid;
    let Ok(device) = fs::metadata(DEVICE) else { return Ok(None) };
    let mut found = None;
    each_descriptor(process, |number| {
        if fs::metadata(format!("/proc/{pid}/fd/{number}")).is_ok_and(|metadata| metadata.rdev() == device.rdev()) {
            found = Some(number);
        }
    })?;
    Ok(found)
}

fn each_descriptor(process: Process, mut each: impl FnMut(RawFd)) -> Result<(), RemoteError> {
    let pid = process.pid;
    let failed = |source| RemoteError::Take { pid, source };
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).map_err(failed)? {
        if let Some(number) = entry.map_err(failed)?.file_name().to_str().and_then(|name| name.parse().ok()) {
            each(number);
        }
    }
    if process.is_alive() { Ok(()) } else { Err(failed(io::ErrorKind::NotFound.into())) }
}
