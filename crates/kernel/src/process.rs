//! Identity, liveness and end of a process.
//!
//! A pid alone names whichever process has that number now. [`Process`] is the pid *and* the start time, so that a
//! record in a file can be compared with the process that has the number later. Signals are sent through a pidfd, so
//! that they cannot reach a process that has received the number in between.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs;
use std::io;
use std::time::{Duration, Instant};

/// A process of this machine, distinct from every later process of the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Process {
    /// The number of the process.
    pub pid: u32,
    /// Clock ticks after boot at which the process started (field 22 of `/proc/PID/stat`).
    pub started: u64,
}

/// Returns the id of this start of the host.
///
/// # Errors
/// `NotFound` if `/proc` is not mounted.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

impl Process {
    /// Returns the process that has this number now.
    ///
    /// # Errors
    /// `NotFound` if no process has this number.
    pub fn of(pid: u32) -> io::Result<Self> {
        let (_, started) = stat(pid)?;
        Ok(Self { pid, started })
    }

    /// Returns the calling process.
    ///
    /// # Errors
    /// `NotFound` if `/proc` is not mounted.
    pub fn current() -> io::Result<Self> {
        Self::of(std::process::id())
    }

    /// Returns whether this process still runs, rather than another one with its number. A zombie does not run. A process
    /// about which nothing can be found out, because no descriptor is free, counts as running: what belongs to it must not be
    /// removed.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        match stat(self.pid) {
            Ok((state, started)) => started == self.started && !matches!(state, b'Z' | b'X'),
            Err(e) => is_unknown(&e),
        }
    }

    /// Opens a pidfd of this process.
    ///
    /// # Errors
    /// `NotFound` if the process has ended, even if its number belongs to another process now.
    pub fn pidfd(&self) -> io::Result<OwnedFd> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw).ok_or_else(|| self.gone())?;
        let fd = pidfd_open(pid, PidfdFlags::empty())?;
        // Checked after the open: from then on the descriptor cannot refer to another process.
        match stat(self.pid) {
            Ok((_, started)) if started == self.started => Ok(fd),
            Err(e) if is_unknown(&e) => Err(e),
            _ => Err(self.gone()),
        }
    }

    /// Sends `SIGTERM`. A process that has ended already is no error.
    ///
    /// # Errors
    /// `PermissionDenied` if the process belongs to another user.
    pub fn terminate(&self) -> io::Result<()> {
        self.signal(Signal::TERM)
    }

    /// Sends `SIGKILL`. A process that has ended already is no error.
    ///
    /// # Errors
    /// `PermissionDenied` if the process belongs to another user.
    pub fn kill(&self) -> io::Result<()> {
        self.signal(Signal::KILL)
    }

    /// Sends `SIGSTOP`. The process continues after a `SIGCONT`.
    ///
    /// # Errors
    /// `PermissionDenied` if the process belongs to another user.
    pub fn stop(&self) -> io::Result<()> {
        self.signal(Signal::STOP)
    }

    /// Sends `SIGCONT`.
    ///
    /// # Errors
    /// `PermissionDenied` if the process belongs to another user.
    pub fn resume(&self) -> io::Result<()> {
        self.signal(Signal::CONT)
    }

    /// Stops the process and waits, at most for `timeout`, until none of its threads runs. Returns `false` if a thread
    /// still runs or the process has ended.
    ///
    /// # Errors
    /// As for [`Process::stop`].
    pub fn stop_fully(&self, timeout: Duration) -> io::Result<bool> {
        self.stop()?;
        let deadline = Instant::now() + timeout;
        loop {
            if !self.is_alive() {
                return Ok(false);
            }
            if self.is_stopped() {
                return Ok(true);
            }
            if Instant::now() > deadline {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns whether all threads of the process are stopped.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        let Ok(threads) = fs::read_dir(format!("/proc/{}/task", self.pid)) else { return false };
        let mut count = 0;
        for thread in threads.flatten() {
            let state = fs::read(thread.path().join("stat")).ok().and_then(|text| parse_stat(&text));
            match state {
                Some((b'T' | b't', _)) => count += 1,
                Some((b'Z' | b'X', _)) => {}
                // The thread ended after it was listed.
                None if !thread.path().exists() => {}
                _ => return false,
            }
        }
        count > 0
    }

    /// Returns the other processes of the session that this process leads: processes that it has started, and their
    /// children.
    ///
    /// # Errors
    /// `NotFound` if `/proc` is not mounted; an error if no descriptor is free.
    pub fn others_in_session(&self) -> io::Result<Vec<Self>> {
        let mut others = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            match session(pid).and_then(|leader| Ok((leader, Self::of(pid)?))) {
                Ok((leader, process)) if leader == Some(self.pid) && pid != self.pid => others.push(process),
                Err(e) if is_unknown(&e) => return Err(e),
                // Of another session, or it has just ended.
                _ => {}
            }
        }
        Ok(others)
    }

    fn gone(&self) -> io::Error {
        io::Error::new(io::ErrorKind::NotFound, format!("process {} has ended", self.pid))
    }

    /// Returns whether a seccomp filter checks the system calls of the process's first thread, whatever it denies.
    ///
    /// # Errors
    /// `NotFound` if the process has ended.
    pub fn has_syscall_filter(&self) -> io::Result<bool> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid))?;
        if !self.is_alive() {
            return Err(self.gone());
        }
        /// `SECCOMP_MODE_FILTER` of `linux/seccomp.h`.
        const FILTER: &str = "2";
        let mode = status.lines().find_map(|line| line.strip_prefix("Seccomp:"));
        Ok(mode.is_some_and(|mode| mode.trim() == FILTER))
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        match self.pidfd() {
            Ok(fd) => match pidfd_send_signal(fd, signal) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
                Err(e) => Err(e.into()),
            },
            Err(e) if is_gone(&e) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Waits until the process has ended with all of its threads, at most for `timeout`. Returns whether it has ended;
    /// a zombie has. From then on the process holds no resources. [`Process::is_alive`] only shows whether its first
    /// thread has ended.
    ///
    /// The process need not be a child.
    ///
    /// # Errors
    /// Errors of opening or polling a pidfd.
    pub fn wait_end(&self, timeout: Duration) -> io::Result<bool> {
        let fd = match self.pidfd() {
            Ok(fd) => fd,
            Err(e) if is_gone(&e) => return Ok(true),
            Err(e) => return Err(e),
        };
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let spec = rustix::time::Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut fds = [PollFd::new(&fd, PollFlags::IN)];
            match poll(&mut fds, Some(&spec)) {
                Ok(0) => return Ok(false),
                Ok(_) => return Ok(true),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// Returns whether the process of a pidfd has ended with all of its threads.
///
/// # Errors
/// Errors of polling the descriptor.
pub fn has_ended(pidfd: &OwnedFd) -> io::Result<bool> {
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&now)) {
        Ok(ready) => Ok(ready > 0),
        // It was not ready before the signal.
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

fn is_gone(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH)
}

/// Returns whether an error of reading `/proc` is about this process, so that the other one may run.
fn is_unknown(e: &io::Error) -> bool {
    let of_this_process = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EINTR, libc::EIO];
    e.raw_os_error().is_some_and(|errno| of_this_process.contains(&errno))
}

/// Reads state letter and start time from `/proc/PID/stat`.
fn stat(pid: u32) -> io::Result<(u8, u64)> {
    let text = fs::read(format!("/proc/{pid}/stat"))?;
    parse_stat(&text).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat is odd")))
}

/// Returns the number of the process that leads the session of another process (field 6 of `/proc/PID/stat`).
fn session(pid: u32) -> io::Result<Option<u32>> {
    let text = fs::read(format!("/proc/{pid}/stat"))?;
    let parse = || {
        let end = text.iter().rposition(|&byte| byte == b')')?;
        std::str::from_utf8(text.get(end + 1..)?).ok()?.split_ascii_whitespace().nth(6 - 3)?.parse().ok()
    };
    Ok(parse())
}

/// Parses a line of `/proc/PID/stat`. The command (field 2) may contain spaces and brackets, so fields count from the
/// *last* `)`.
fn parse_stat(text: &[u8]) -> Option<(u8, u64)> {
    let end = text.iter().rposition(|&b| b == b')')?;
    let rest = std::str::from_utf8(text.get(end + 1..)?).ok()?;
    let mut fields = rest.split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    // `state` is field 3, so field 22 is the 18th after it.
    let started = fields.nth(18)?.parse().ok()?;
    Some((state, started))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn stat_with_brackets_in_the_command() {
        let mut line = b"42 (a) b (c) S 1".to_vec();
        for n in 0..17 {
            line.extend(format!(" {n}").bytes());
        }
        line.extend(b" 777 0 0");
        assert_eq!(parse_stat(&line), Some((b'S', 777)));
        assert_eq!(parse_stat(b"42 (x"), None);
    }

    #[test]
    fn a_killed_child_is_seen_to_end_and_is_no_longer_alive() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Process::of(child.id()).unwrap();
        assert!(process.is_alive());
        assert!(!process.wait_end(Duration::from_millis(1)).unwrap());
        process.kill().unwrap();
        assert!(process.wait_end(Duration::from_secs(10)).unwrap());
        assert!(!process.is_alive(), "a zombie is not alive");
        child.wait().unwrap();
        process.kill().unwrap();
        assert!(process.pidfd().is_err());
    }

    #[test]
    fn without_a_free_descriptor_a_process_does_not_count_as_ended() {
        let this = Process::current().unwrap();
        // SAFETY: the child reads a file and ends.
        match unsafe { nix::unistd::fork() }.unwrap() {
            nix::unistd::ForkResult::Child => {
                let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
                let limited = rustix::process::setrlimit(rustix::process::Resource::Nofile, none).is_ok();
                let is_right = limited && fs::read("/proc/self/stat").is_err() && this.is_alive();
                let is_error = this.wait_end(Duration::ZERO).is_err() && this.kill().is_err();
                // SAFETY: the call does not return and takes no pointer.
                unsafe { libc::_exit(i32::from(!(is_right && is_error))) }
            }
            nix::unistd::ForkResult::Parent { child } => {
                let status = nix::sys::wait::waitpid(child, None).unwrap();
                assert_eq!(status, nix::sys::wait::WaitStatus::Exited(child, 0));
            }
        }
    }

    #[test]
    fn the_processes_of_a_session_are_found_and_show_whether_they_are_stopped() {
        let mut command = Command::new("sh");
        crate::spawn::detach(command.args(["-c", "sleep 1000 & wait"]));
        let mut child = command.spawn().unwrap();
        let leader = Process::of(child.id()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        let member = loop {
            if let Some(member) = leader.others_in_session().unwrap().first() {
                break *member;
            }
            assert!(Instant::now() < deadline, "no process in its session");
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(member.stop_fully(Duration::from_secs(10)).unwrap() && !leader.is_stopped());
        assert!(member.is_stopped() && member.others_in_session().unwrap().is_empty());
        member.kill().unwrap();
        leader.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_whose_first_thread_alone_has_ended_has_not() {
        let run = "import ctypes, sys, threading; threading.Thread(target=sys.stdin.read).start(); ctypes.CDLL(None).pthread_exit(None)";
        let mut child = Command::new("python3").args(["-c", run]).stdin(std::process::Stdio::piped()).spawn().unwrap();
        let process = Process::of(child.id()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while process.is_alive() {
            assert!(Instant::now() < deadline, "its first thread does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!process.wait_end(Duration::from_millis(20)).unwrap());
        drop(child.stdin.take());
        assert!(process.wait_end(Duration::from_secs(10)).unwrap());
        child.wait().unwrap();
    }

    #[test]
    fn another_start_time_is_another_process() {
        let me = Process::current().unwrap();
        let other = Process { started: me.started + 1, ..me };
        assert!(me.is_alive());
        assert!(!other.is_alive());
        other.kill().unwrap();
        assert!(me.is_alive());
    }
}
