//! libvirt's daemon. It takes a monitor that closes for a crash, so it is stopped while a domain's QEMU is replaced. Its
//! guests run on, and it finds them again when it is started.
//!
//! | module | contents |
//! |---|---|
//! | this one | finds, stops and starts the daemon |
//! | `unit` | the same for a daemon that systemd runs |
//! | [`lock`] | which operation may stop the daemon, and when |

pub mod lock;
mod unit;

pub use unit::Unit;

use crate::status_file::StatusFileError;
use rekindle_kernel::libvirt_client::Connection;
use rekindle_kernel::process::Process;
use rekindle_kernel::spawn::{detach, disown};
use serde::{Deserialize, Serialize};
use std::error::Error;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The connection to the daemon of the system.
pub const SYSTEM_URI: &str = "qemu:///system";
/// Files with the process number of the daemon that runs QEMUs: of the modular one, and of the monolithic one.
const PID_FILES: [&str; 2] = ["/run/virtqemud.pid", "/run/libvirtd.pid"];
/// Names of these daemons.
const PROGRAMS: [&str; 2] = ["virtqemud", "libvirtd"];
/// How long the daemon may take to end, or to start and accept connections.
const TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// How to start libvirt's daemon again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonRecord {
    /// Number of the process that was stopped.
    pub pid: u32,
    /// Its start time.
    pub started: u64,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Environment variables.
    pub environment: Vec<(String, String)>,
    /// Working directory.
    pub directory: PathBuf,
    /// The file with the daemon's process number.
    pub pid_file: PathBuf,
    /// The service of systemd; `None`: the daemon is started by its command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<Unit>,
}

/// Why the daemon cannot be found, stopped or started.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    #[error(
        "libvirt's daemon does not run; finish an interrupted replacement first, if `rekindle status` lists one (rekindle \
         recover NAME); otherwise start the daemon"
    )]
    Absent,
    #[error(
        "libvirt's daemon (process {pid}) runs in {unit} of systemd, but is not the main process of {}; restart it as \
         that service", PROGRAMS.map(|program| format!("{program}.service")).join(" or ")
    )]
    OtherUnit { pid: u32, unit: String },
    #[error("a stop of {service} would also stop other services; stop them first: systemctl stop {units}")]
    OthersDepend { service: String, units: String },
    #[error("cannot inspect the service of libvirt's daemon: `{command}`")]
    Systemctl {
        command: String,
        #[source]
        source: io::Error,
    },
    #[error("libvirt's daemon cannot be stopped because it is busy with {jobs}; wait until that has ended, or end it")]
    Busy { jobs: String },
    #[error(
        "another operation (process {pid}) has stopped libvirt's daemon, or is about to; try again when it has ended"
    )]
    Locked { pid: String },
    #[error("{}", path.display())]
    Lock {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    StatusFile(#[from] StatusFileError),
    #[error("cannot stop libvirt's daemon: `{command}`")]
    NotStopped {
        command: String,
        #[source]
        source: io::Error,
    },
    #[error("libvirt's daemon (process {pid}) does not end")]
    Stays { pid: u32 },
    #[error("cannot start libvirt's daemon: `{command}`; start it by hand, then: rekindle recover")]
    NotStarted {
        command: String,
        #[source]
        source: io::Error,
    },
    #[error(
        "libvirt's daemon (process {pid}) was started, but does not accept connections: {problem}; see its log, then: \
         rekindle recover"
    )]
    NotReady { pid: u32, problem: String },
    #[error("{}", path.display())]
    Process {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl DaemonError {
    /// Returns whether the daemon may be stopped although it should run.
    #[must_use]
    pub fn leaves_it_stopped(&self) -> bool {
        matches!(self, Self::NotStopped { .. } | Self::Stays { .. } | Self::NotStarted { .. } | Self::NotReady { .. })
    }
}

/// Finds the daemon that runs.
///
/// # Errors
/// [`DaemonError::Absent`]; also if its service cannot be stopped alone.
pub fn find() -> Result<DaemonRecord, DaemonError> {
    let (pid_file, process) = PID_FILES
        .iter()
        .find_map(|path| Some((PathBuf::from(path), running(Path::new(path))?)))
        .ok_or(DaemonError::Absent)?;
    let directory = PathBuf::from(format!("/proc/{}", process.pid));
    let failed = |source| DaemonError::Process { path: directory.clone(), source };
    let unit = Unit::of(process, &PROGRAMS)?;
    if unit.is_none()
        && let Some(unit) = service_of(&fs::read_to_string(directory.join("cgroup")).map_err(failed)?)
    {
        return Err(DaemonError::OtherUnit { pid: process.pid, unit });
    }
    let words = |file: &str| fs::read(directory.join(file)).map(|text| zero_separated(&text)).map_err(failed);
    let variable = |word: String| word.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    Ok(DaemonRecord {
        pid: process.pid,
        started: process.started,
        command: words("cmdline")?,
        environment: words("environ")?.into_iter().filter_map(variable).collect(),
        directory: fs::read_link(directory.join("cwd")).map_err(failed)?,
        pid_file,
        unit,
    })
}

/// Returns the service of systemd in whose control group a process is, from its `/proc/PID/cgroup`.
fn service_of(cgroups: &str) -> Option<String> {
    let group = cgroups.lines().find_map(|line| line.split_once("::").or(line.split_once(":name=systemd:")))?.1;
    let name = group.rsplit('/').next()?;
    name.ends_with(".service").then(|| name.to_owned())
}

/// Stops the daemon: the recorded process, and one that was started since. Its clients fail to connect until it is
/// started again.
///
/// # Errors
/// [`DaemonError::NotStopped`]; [`DaemonError::Stays`]: the daemon may end later.
pub fn stop(daemon: &DaemonRecord) -> Result<(), DaemonError> {
    // The daemon gets one signal although it is stopped for several domains.
    static STOPPING: Mutex<()> = Mutex::new(());
    let _stopping = STOPPING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(unit) = &daemon.unit {
        unit.stop()?;
    }
    let recorded = Process { pid: daemon.pid, started: daemon.started };
    for process in [Some(recorded), running(&daemon.pid_file)].into_iter().flatten() {
        let failed = |source| DaemonError::Process { path: format!("/proc/{}", process.pid).into(), source };
        process.terminate().map_err(failed)?;
        if !process.wait_end(TIMEOUT).map_err(failed)? {
            return Err(DaemonError::Stays { pid: process.pid });
        }
    }
    Ok(())
}

/// Starts the daemon unless it runs, and waits until it accepts connections.
///
/// # Errors
/// [`DaemonError::NotStarted`]; [`DaemonError::NotReady`].
pub fn start_if_absent(daemon: &DaemonRecord) -> Result<(), DaemonError> {
    match (running(&daemon.pid_file), &daemon.unit) {
        (None, None) => start_process(daemon)?,
        (None, Some(unit)) => unit.start()?,
        // Another program has started the daemon, perhaps without what triggers it.
        (Some(_), Some(unit)) => {
            if let Err(e) = unit.start() {
                tracing::warn!("{e}: {}", e.source().map(ToString::to_string).unwrap_or_default());
            }
        }
        (Some(_), None) => {}
    }
    wait_until_it_accepts(daemon, Instant::now() + TIMEOUT)
}

fn start_process(daemon: &DaemonRecord) -> Result<(), DaemonError> {
    let failed = |source| DaemonError::NotStarted { command: daemon.command.join(" "), source };
    let [program, arguments @ ..] = daemon.command.as_slice() else {
        return Err(failed(io::Error::other("its command line was not recorded")));
    };
    let mut command = Command::new(program);
    command.args(arguments).env_clear().envs(daemon.environment.iter().cloned()).current_dir(&daemon.directory);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    disown(detach(&mut command).spawn().map_err(failed)?);
    Ok(())
}

/// Waits until the daemon has written its number and accepts connections.
fn wait_until_it_accepts(daemon: &DaemonRecord, deadline: Instant) -> Result<(), DaemonError> {
    let timed_out = || io::Error::from(io::ErrorKind::TimedOut);
    loop {
        let process = running(&daemon.pid_file);
        let problem = match process {
            Some(_) => match connect(deadline) {
                Ok(()) => return Ok(()),
                Err(problem) => problem,
            },
            None => String::new(),
        };
        if Instant::now() >= deadline {
            return Err(match process {
                Some(Process { pid, .. }) => DaemonError::NotReady { pid, problem },
                None => DaemonError::NotStarted { command: daemon.command.join(" "), source: timed_out() },
            });
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Connects to the daemon, and closes the connection again.
fn connect(deadline: Instant) -> Result<(), String> {
    let (sender, receiver) = channel();
    // A call of libvirt's has no time limit: its thread may stay blocked.
    let open = move || drop(sender.send(Connection::open(Some(SYSTEM_URI)).map(drop).map_err(|e| e.to_string())));
    thread::Builder::new().name("libvirt".into()).spawn(open).map_err(|e| e.to_string())?;
    let time_left = deadline.saturating_duration_since(Instant::now());
    receiver.recv_timeout(time_left).unwrap_or_else(|_| Err("it does not answer".into()))
}

/// Returns the daemon whose number is in `pid_file`, if it runs.
#[must_use]
pub fn running(pid_file: &Path) -> Option<Process> {
    let pid = fs::read_to_string(pid_file).ok()?.trim().parse().ok()?;
    let process = Process::of(pid).ok()?;
    let executable = fs::read_link(format!("/proc/{pid}/exe")).ok()?;
    // After an upgrade, the link ends in ` (deleted)`.
    let name = executable.file_name()?.to_str()?;
    (PROGRAMS.iter().any(|program| name.starts_with(program)) && process.is_alive()).then_some(process)
}

fn zero_separated(text: &[u8]) -> Vec<String> {
    let words = text.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_of_a_process_is_read_from_its_control_group() {
        let service = Some("libvirtd.service".to_owned());
        assert_eq!(service_of("0::/system.slice/libvirtd.service\n"), service);
        assert_eq!(service_of("4:memory:/x\n1:name=systemd:/system.slice/libvirtd.service\n"), service);
        assert_eq!(service_of("0::/user.slice/user-0.slice/session-3.scope\n"), None);
        assert_eq!(service_of("9:name=systemd:/\n0::/\n"), None);
    }
}
