//! Starting this program again, and child processes that outlive their starter or end with it.

use rustix::process::Signal;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// Suffix that the kernel appends to the name of a program that was removed or replaced.
const DELETED_SUFFIX: &[u8] = b" (deleted)";
/// The link by which a process finds its own program, also after a removal.
const OWN_PROGRAM: &str = "/proc/self/exe";

/// Disowned children that may still run.
static LEFT: Mutex<Vec<Child>> = Mutex::new(Vec::new());

/// Returns a command that starts this program again: after an upgrade the installed program, after a removal the one that runs.
///
/// # Errors
/// When `/proc` does not show which program this is.
pub fn this_program() -> io::Result<Command> {
    let path = std::env::current_exe()?;
    Ok(installed_program(&path).map_or_else(
        || {
            let mut command = Command::new(OWN_PROGRAM);
            command.arg0(without_deleted_suffix(&path));
            command
        },
        Command::new,
    ))
}

/// Returns the program that is installed where the kernel reports the running one. `None` if there is none any more.
fn installed_program(running: &Path) -> Option<PathBuf> {
    // A program may have a name that ends like this.
    [running, without_deleted_suffix(running)].into_iter().find(|path| path.is_file()).map(Path::to_owned)
}

fn without_deleted_suffix(path: &Path) -> &Path {
    let bytes = path.as_os_str().as_bytes();
    bytes.strip_suffix(DELETED_SUFFIX).map_or(path, |name| Path::new(OsStr::from_bytes(name)))
}

/// Makes `command` start in a session of its own, without standard input. A closed terminal or an interrupt of the
/// starter does not reach it.
pub fn detach(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::null());
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; setsid is one, and the closure touches
    // no memory of the parent.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid().map_err(io::Error::from)?;
            Ok(())
        })
    }
}

/// Removes the credentials of object stores from the environment of `command`: for programs that a guest can attack.
pub fn without_credentials(command: &mut Command) -> &mut Command {
    const PREFIX: &[u8] = b"AWS_";
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(PREFIX)) {
        command.env_remove(name);
    }
    command
}

/// Disowns a child that keeps running. Children that have ended are reaped when the next one is disowned, so that a
/// process that starts many over months keeps few zombies.
pub fn disown(child: Child) {
    let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
    left.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
    left.push(child);
}

/// Makes the child end when the thread that starts it ends, for whatever reason.
pub fn die_with_starter(command: &mut Command) -> &mut Command {
    let starter = rustix::process::getpid();
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; prctl and getppid are, and the closure
    // touches no memory of the parent but a copied number.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).map_err(io::Error::from)?;
            // The starter may have ended before the call above.
            if rustix::process::getppid() == Some(starter) { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Process;
    use std::fs;
    use std::path::Path;
    use std::time::Duration;

    #[test]
    fn the_program_of_an_upgraded_process_is_the_installed_one() {
        let directory = tempfile::tempdir().unwrap();
        let (program, reported) = (directory.path().join("program"), directory.path().join("program (deleted)"));
        assert_eq!(installed_program(&reported), None, "the program was removed");
        fs::write(&program, "").unwrap();
        assert_eq!(installed_program(&program).as_ref(), Some(&program));
        assert_eq!(installed_program(&reported).as_ref(), Some(&program));
        fs::write(&reported, "").unwrap();
        assert_eq!(installed_program(&reported), Some(reported), "a program of that name");
    }

    #[test]
    fn a_detached_process_leads_its_own_session() {
        let mut child = detach(Command::new("sleep").arg("1000")).spawn().unwrap();
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let session: u32 = stat.rsplit(')').next().unwrap().split_whitespace().nth(3).unwrap().parse().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(session, child.id());
    }

    #[test]
    fn children_that_were_disowned_leave_no_zombies() {
        let start = || {
            let child = detach(&mut Command::new("true")).spawn().unwrap();
            let process = Process::of(child.id()).unwrap();
            disown(child);
            assert!(process.wait_end(Duration::from_secs(10)).unwrap());
            Path::new("/proc").join(process.pid.to_string())
        };
        let (first, second) = (start(), start());
        assert!(!first.exists() && second.exists(), "{first:?} is reaped, {second:?} is a zombie");
    }

    #[test]
    fn a_child_ends_with_the_thread_that_started_it() {
        let start = || die_with_starter(Command::new("sleep").arg("1000")).spawn().unwrap();
        let mut child = std::thread::spawn(start).join().unwrap();
        assert!(!child.wait().unwrap().success());
    }
}
