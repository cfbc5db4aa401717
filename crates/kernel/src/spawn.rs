//! Starting child processes that outlive their starter, or that end with it.

use rustix::process::Signal;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// Disowned children that may still run.
static LEFT: Mutex<Vec<Child>> = Mutex::new(Vec::new());

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
