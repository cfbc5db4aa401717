//! A running QEMU: starting it, finding it again, ending it.

use crate::adopt::{AdoptError, Adopted, adopt};
use crate::command::Directory;
use crate::monitor::Monitor;
use crate::qmp::{Qmp, QmpError};
use command_fds::{CommandFdExt, FdMapping};
use rekindle_kernel::jail::Jail;
use rekindle_kernel::lockfile;
use rekindle_kernel::output::last_lines;
use rekindle_kernel::process::Process;
use rekindle_kernel::spawn::{detach, disown, without_credentials};
use rustix::fs::{Gid, Uid};
use serde::{Deserialize, Serialize};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// Time limit from a QEMU's start to its greeting. It usually takes 0.1 s; preallocation of RAM can take seconds.
pub const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Why a QEMU could not be started or reached.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    #[error("cannot start {}{}", path.display(), with_output(log))]
    Spawn {
        path: PathBuf,
        /// What the process has reported before it was QEMU.
        log: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot end QEMU (process {pid})")]
    Kill {
        pid: u32,
        #[source]
        source: io::Error,
    },
    #[error("{} ended while starting; its output:\n{}", path.display(), indented(log))]
    Ended { path: PathBuf, log: String },
    #[error("{} has not opened its QMP socket within {} s", path.display(), after.as_secs())]
    Silent { path: PathBuf, after: Duration },
    /// QEMU's answers are not as QMP specifies, or it does not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

impl VmmError {
    /// Returns whether QEMU gave no answer, as opposed to an error or its end.
    pub fn is_silence(&self) -> bool {
        match self {
            Self::Silent { .. } => true,
            Self::Qmp(e) => e.is_silence(),
            _ => false,
        }
    }
}

/// How long a QEMU that has ended may take to release its resources: the last thread may be stuck in the kernel.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval between attempts to connect to a QEMU that starts.
const CONNECT_INTERVAL: Duration = Duration::from_millis(1);
/// Number of lines of the log that an error shows.
const ERROR_LOG_LINES: usize = 20;

fn with_output(log: &str) -> String {
    if log.trim().is_empty() { String::new() } else { format!("; its output:\n{}", indented(log)) }
}

fn indented(log: &str) -> String {
    let lines: Vec<_> = log.lines().filter(|line| !line.trim().is_empty()).map(|line| format!("    {line}")).collect();
    if lines.is_empty() { "    (nothing)".into() } else { lines.join("\n") }
}

/// Returns QEMU's last messages: the end of its log, at most `lines` lines. A guest can make QEMU write a log of any
/// length.
pub fn log_tail(directory: &Directory, lines: usize) -> String {
    last_lines(&directory.log(), lines)
}

/// One QEMU process, as recorded in files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vmm {
    pub binary: PathBuf,
    pub pid: u32,
    /// Start time of the process, as in [`Process::started`].
    pub started: u64,
    /// The directory with the QEMU's sockets and log.
    pub directory: PathBuf,
    /// The QEMU's monitor if Rekindle did not start it; then `directory` has none of the sockets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub monitor: Option<Monitor>,
    /// The directory with the sockets of Rekindle's own monitors in a QEMU with a `monitor`, if it has some. A protector
    /// prefers them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct_monitors: Option<PathBuf>,
}

/// The user and the group that a process runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    pub user: Uid,
    pub group: Gid,
}

impl Vmm {
    /// Starts a QEMU in `directory`, which must exist and belong to this QEMU alone. `fds` get the given numbers in
    /// QEMU. Without a `jail`, QEMU runs as the calling user.
    ///
    /// On success: the process runs in a session of its own. Its sockets may not exist yet.
    ///
    /// # Errors
    /// [`VmmError::Spawn`] when the binary cannot be run, or `directory` not be written.
    pub fn spawn(
        binary: &Path,
        arguments: &[String],
        directory: &Directory,
        fds: Vec<(OwnedFd, RawFd)>,
        jail: Option<&Jail>,
    ) -> Result<Self, VmmError> {
        let failed = |source: io::Error| VmmError::Spawn {
            path: binary.to_owned(),
            log: log_tail(directory, ERROR_LOG_LINES),
            source,
        };
        let open_log = || OpenOptions::new().create(true).append(true).mode(0o600).open(directory.log());
        let mut command = Command::new(binary);
        command.args(arguments).stdout(open_log().map_err(failed)?).stderr(open_log().map_err(failed)?);
        let mappings = fds.into_iter().map(|(parent_fd, child_fd)| FdMapping { parent_fd, child_fd }).collect();
        command.fd_mappings(mappings).map_err(|e| failed(io::Error::other(e)))?;
        lockfile::hold(detach(without_credentials(&mut command)), &directory.lock()).map_err(failed)?;
        // Last: what comes before has paths of the host.
        jail.map_or(Ok(()), |jail| jail.apply(&mut command)).map_err(failed)?;
        let child = command.spawn().map_err(failed)?;
        let process = Process::of(child.id()).map_err(failed)?;
        disown(child);
        tracing::debug!(pid = process.pid, binary = %binary.display(), "QEMU started");
        Ok(Self {
            binary: binary.to_owned(),
            pid: process.pid,
            started: process.started,
            directory: directory.0.clone(),
            monitor: None,
            direct_monitors: None,
        })
    }

    /// Waits until the QEMU greets on its QMP socket, at most for `timeout`.
    ///
    /// # Errors
    /// [`VmmError::Ended`] with QEMU's output, when it ends instead; [`VmmError::Silent`] when `timeout` has passed.
    pub fn connect(&self, timeout: Duration) -> Result<Qmp, VmmError> {
        if let Some(monitor) = &self.monitor {
            return Ok(monitor.connect(timeout)?);
        }
        let deadline = Instant::now() + timeout;
        loop {
            let remaining = deadline.saturating_duration_since(Instant::now());
            match Qmp::connect(&self.directory().qmp(), remaining.max(Duration::from_millis(1))) {
                Ok(qmp) => return Ok(qmp),
                Err(QmpError::Connect { .. } | QmpError::Closed { .. }) if self.process().is_alive() => {}
                Err(QmpError::Connect { .. } | QmpError::Closed { .. }) => {
                    let log = log_tail(&self.directory(), ERROR_LOG_LINES);
                    return Err(VmmError::Ended { path: self.binary.clone(), log });
                }
                Err(other) => return Err(other.into()),
            }
            if remaining.is_zero() {
                return Err(VmmError::Silent { path: self.binary.clone(), after: timeout });
            }
            thread::sleep(CONNECT_INTERVAL);
        }
    }

    /// Opens a connection for queries during an operation. A QEMU that Rekindle did not start may have only one
    /// socket.
    ///
    /// # Errors
    /// [`QmpError::NoGreeting`] when another client holds that socket.
    pub fn connect_watcher(&self, timeout: Duration) -> Result<Qmp, QmpError> {
        match self.sockets() {
            Ok(sockets) => Qmp::connect(&sockets.watch(), timeout),
            Err(monitor) => monitor.connect(timeout),
        }
    }

    /// Opens the protector's connection and inspects the QEMU.
    ///
    /// # Errors
    /// [`AdoptError`], also when the process cannot be identified for certain.
    pub fn adopt(&self, timeout: Duration) -> Result<(Adopted, Qmp), AdoptError> {
        let adopted = match self.sockets() {
            Ok(sockets) => adopt(&sockets.protect(), timeout),
            Err(monitor) => monitor.adopt(timeout),
        }?;
        match adopted.0.process() {
            process if self.monitor.is_some() || process == self.process() => Ok(adopted),
            // An attacker that controls a QEMU can let its socket lead to another one.
            other => Err(AdoptError::OtherQemu { expected: self.pid, found: other.pid }),
        }
    }

    /// Opens the protector's second connection, if the QEMU has a socket for it.
    ///
    /// # Errors
    /// [`QmpError`], as for [`Qmp::connect`].
    pub fn connect_for_saves(&self, timeout: Duration) -> Result<Option<Qmp>, QmpError> {
        match self.sockets() {
            Ok(sockets) => Qmp::connect(&sockets.save(), timeout).map(Some),
            Err(_) => Ok(None),
        }
    }

    /// Returns the same QEMU without Rekindle's own monitors in it, for commands that its manager must know of.
    pub fn through_its_manager(&self) -> Self {
        Self { direct_monitors: None, ..self.clone() }
    }

    /// Returns the directory of Rekindle's own sockets, or else the only monitor that there is.
    fn sockets(&self) -> Result<Directory, &Monitor> {
        match (&self.direct_monitors, &self.monitor) {
            (Some(directory), _) => Ok(Directory(directory.clone())),
            (None, Some(monitor)) => Err(monitor),
            (None, None) => Ok(self.directory()),
        }
    }

    /// Returns the process number and start time.
    pub fn process(&self) -> Process {
        Process { pid: self.pid, started: self.started }
    }

    /// Returns the user and the group of the process.
    ///
    /// # Errors
    /// When the QEMU has ended.
    pub fn owner(&self) -> io::Result<Owner> {
        let process = fs::metadata(Path::new("/proc").join(self.pid.to_string()))?;
        Ok(Owner { user: Uid::from_raw(process.uid()), group: Gid::from_raw(process.gid()) })
    }

    /// Returns the paths of the QEMU's sockets and files.
    pub fn directory(&self) -> Directory {
        Directory(self.directory.clone())
    }

    /// Returns whether the QEMU still runs.
    pub fn is_alive(&self) -> bool {
        self.process().is_alive()
    }

    /// If the QEMU has ended, waits until it has also released its taps, images and RAM: its last thread may end
    /// later than its first one. Returns immediately if the QEMU runs.
    ///
    /// # Errors
    /// When it cannot be watched, or still holds them after 10 s (a thread stuck in the kernel).
    pub fn wait_released(&self) -> io::Result<()> {
        if self.is_alive() || self.process().wait_end(END_TIMEOUT)? {
            return Ok(());
        }
        Err(io::Error::other(format!("QEMU (process {}) has ended, but a thread of it does not end", self.pid)))
    }

    /// Kills the QEMU and waits until it has ended, so that its RAM mapping, its locks and its taps are free.
    ///
    /// # Errors
    /// When it may not be killed, or has not ended after 10 s (a process stuck in the kernel).
    pub fn kill(&self) -> io::Result<()> {
        let process = self.process();
        process.kill()?;
        if process.wait_end(END_TIMEOUT)? {
            Ok(())
        } else {
            Err(io::Error::other(format!("QEMU (process {}) was killed but does not end", self.pid)))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn the_end_of_a_log_of_any_length_is_read() {
        let root = tempfile::tempdir().unwrap();
        let directory = Directory(root.path().to_owned());
        let mut log = OpenOptions::new().create(true).append(true).open(directory.log()).unwrap();
        // Longer than any memory.
        log.set_len(1 << 40).unwrap();
        log.write_all(b"\nqemu: one\nqemu: two\n").unwrap();
        assert_eq!(log_tail(&directory, 2), "qemu: one\nqemu: two");
    }
}
