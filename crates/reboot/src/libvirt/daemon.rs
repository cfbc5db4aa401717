//! libvirt's daemon: it is stopped while a domain's QEMU is replaced, because it takes a monitor that closes for a
//! crash. Its guests run on, and it finds them again when it is started.

use super::DomainError;
use rekindle_kernel::process::Process;
use rekindle_kernel::spawn::{detach, disown};
use rekindle_vm::journal::DaemonRecord;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Files with the process number of the daemon that runs QEMUs: of the modular one, and of the monolithic one.
const PID_FILES: [&str; 2] = ["/run/virtqemud.pid", "/run/libvirtd.pid"];
/// Names of these daemons.
const PROGRAMS: [&str; 2] = ["virtqemud", "libvirtd"];
/// How long the daemon may take to end, or to start.
const TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Finds the daemon that runs.
///
/// # Errors
/// [`DomainError::NoDaemon`]; [`DomainError::Systemd`].
pub(super) fn find() -> Result<DaemonRecord, DomainError> {
    let (pid_file, process) = PID_FILES
        .iter()
        .find_map(|path| Some((PathBuf::from(path), running(Path::new(path))?)))
        .ok_or(DomainError::NoDaemon)?;
    let directory = PathBuf::from(format!("/proc/{}", process.pid));
    let failed = |source| DomainError::File { path: directory.clone(), source };
    let cgroups = fs::read_to_string(directory.join("cgroup")).map_err(failed)?;
    if PROGRAMS.iter().any(|program| cgroups.contains(&format!("{program}.service"))) {
        return Err(DomainError::Systemd { pid: process.pid });
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
    })
}

/// Stops the daemon: the recorded process, and one that was started since. Its clients fail to connect until it is
/// started again.
///
/// # Errors
/// [`DomainError::DaemonStays`]; the daemon may end later.
pub(super) fn stop(daemon: &DaemonRecord) -> Result<(), DomainError> {
    let recorded = Process { pid: daemon.pid, started: daemon.started };
    for process in [Some(recorded), running(&daemon.pid_file)].into_iter().flatten() {
        let failed = |source| DomainError::File { path: format!("/proc/{}", process.pid).into(), source };
        process.terminate().map_err(failed)?;
        if !process.wait_end(TIMEOUT).map_err(failed)? {
            return Err(DomainError::DaemonStays { pid: process.pid });
        }
    }
    Ok(())
}

/// Starts the daemon unless it runs, and waits until it does.
///
/// # Errors
/// [`DomainError::DaemonFailed`].
pub(super) fn start_if_absent(daemon: &DaemonRecord) -> Result<(), DomainError> {
    if running(&daemon.pid_file).is_some() {
        return Ok(());
    }
    let failed = |source| DomainError::DaemonFailed { command: daemon.command.join(" "), source };
    let [program, arguments @ ..] = daemon.command.as_slice() else {
        return Err(failed(io::Error::other("its command line was not recorded")));
    };
    let mut command = Command::new(program);
    command.args(arguments).env_clear().envs(daemon.environment.iter().cloned()).current_dir(&daemon.directory);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    disown(detach(&mut command).spawn().map_err(failed)?);
    let deadline = Instant::now() + TIMEOUT;
    while running(&daemon.pid_file).is_none() {
        if Instant::now() > deadline {
            return Err(failed(io::Error::from(io::ErrorKind::TimedOut)));
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Returns the daemon whose number is in `pid_file`, if it runs.
pub(super) fn running(pid_file: &Path) -> Option<Process> {
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
