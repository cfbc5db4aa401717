//! Scheduling: running a few threads before all others for a short time.

use crate::process::Process;
use std::fs;
use std::io;

/// The priority of a thread over threads that have no rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rank {
    /// Before all others (`SCHED_RR`, priority 2): for a thread that computes for some milliseconds.
    First,
    /// Before all but the first rank (`SCHED_RR`, priority 1): for a thread that is about to be stopped.
    Second,
    /// Before threads without a rank (nice -19): for a thread that might compute without end, should it keep the rank.
    Third,
}

/// Nice value of the third rank. Not -20, which an owner might choose.
const THIRD_RANK_NICE: libc::c_int = -19;

/// The name that stands for the main thread of a process in [`PriorityBoost::threads_of`].
pub const MAIN: &str = "main";

/// The scheduling of a thread before the boost.
#[derive(Debug, Clone, Copy)]
struct OriginalScheduling {
    thread: libc::pid_t,
    policy: libc::c_int,
    nice: libc::c_int,
}

/// Threads that are scheduled before all others until this is dropped.
///
/// Threads and processes that a thread of another process creates meanwhile are scheduled normally
/// (`SCHED_RESET_ON_FORK`). If this process is killed meanwhile, the boosted threads keep their priority; [`normal`]
/// restores it.
#[derive(Debug, Default)]
pub struct PriorityBoost {
    before: Vec<OriginalScheduling>,
}

impl PriorityBoost {
    /// Gives this thread, and the threads that it creates meanwhile, the first rank.
    ///
    /// # Errors
    /// `PermissionDenied` without `CAP_SYS_NICE`.
    pub fn this_thread(&mut self) -> io::Result<()> {
        self.add(0, 0, Rank::First)
    }

    /// Boosts the threads of `process` for whose name `rank` returns a rank.
    ///
    /// # Errors
    /// `PermissionDenied` without `CAP_SYS_NICE`; `NotFound` if the process has ended.
    pub fn threads_of(&mut self, process: Process, rank: impl Fn(&str) -> Option<Rank>) -> io::Result<()> {
        for (thread, name) in threads(process)? {
            if let Some(rank) = rank(if thread.unsigned_abs() == process.pid { MAIN } else { &name }) {
                self.add(thread, libc::SCHED_RESET_ON_FORK, rank)?;
            }
        }
        Ok(())
    }

    fn add(&mut self, thread: libc::pid_t, flag: libc::c_int, rank: Rank) -> io::Result<()> {
        let before = OriginalScheduling { thread, policy: policy(thread)?, nice: nice(thread)? };
        // A thread that already has real-time priority keeps it.
        if before.policy & !libc::SCHED_RESET_ON_FORK != libc::SCHED_OTHER {
            return Ok(());
        }
        match rank {
            Rank::First => set_policy(thread, libc::SCHED_RR | flag, 2)?,
            Rank::Second => set_policy(thread, libc::SCHED_RR | flag, 1)?,
            Rank::Third => set_nice(thread, THIRD_RANK_NICE)?,
        }
        self.before.push(before);
        Ok(())
    }
}

impl Drop for PriorityBoost {
    fn drop(&mut self) {
        for OriginalScheduling { thread, policy, nice } in self.before.drain(..) {
            // A thread that has ended causes errors, which do not matter.
            let _ = set_policy(thread, policy, 0);
            let _ = set_nice(thread, nice);
        }
    }
}

/// Ends the rank of this thread, which another thread has created during its own [`PriorityBoost`]. Without effect on a
/// thread without a rank.
pub fn end_rank_of_this_thread() {
    if policy(0).is_ok_and(|policy| policy == libc::SCHED_RR) {
        let _ = set_policy(0, libc::SCHED_OTHER, 0);
    }
}

/// Restores normal scheduling, with the nice value of the main thread, for threads of `process` whose [`PriorityBoost`]
/// was never dropped.
///
/// # Errors
/// `NotFound` if the process has ended.
pub fn normal(process: Process) -> io::Result<()> {
    let main = nice(process.pid.cast_signed())?;
    for (thread, _) in threads(process)? {
        if policy(thread)? == libc::SCHED_RR | libc::SCHED_RESET_ON_FORK {
            set_policy(thread, libc::SCHED_OTHER, 0)?;
        }
        if nice(thread)? == THIRD_RANK_NICE {
            set_nice(thread, main)?;
        }
    }
    Ok(())
}

/// Returns number and name of each thread.
fn threads(process: Process) -> io::Result<Vec<(libc::pid_t, String)>> {
    let mut threads = Vec::new();
    for entry in fs::read_dir(format!("/proc/{}/task", process.pid))? {
        let entry = entry?;
        let Some(thread) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // A thread may end meanwhile.
        let Ok(name) = fs::read_to_string(entry.path().join("comm")) else { continue };
        threads.push((thread, name.trim_end().to_owned()));
    }
    Ok(threads)
}

pub(crate) fn policy(thread: libc::pid_t) -> io::Result<libc::c_int> {
    // SAFETY: takes and returns numbers only.
    let policy = unsafe { libc::sched_getscheduler(thread) };
    if policy < 0 { Err(io::Error::last_os_error()) } else { Ok(policy) }
}

/// Returns the real-time priority; 0 for other policies.
pub(crate) fn priority(thread: libc::pid_t) -> io::Result<libc::c_int> {
    let mut parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel writes `parameters` during the call and keeps nothing of it.
    let read = unsafe { libc::sched_getparam(thread, &raw mut parameters) };
    if read < 0 { Err(io::Error::last_os_error()) } else { Ok(parameters.sched_priority) }
}

pub(crate) fn nice(thread: libc::pid_t) -> io::Result<libc::c_int> {
    // SAFETY: `__errno_location` points to this thread's errno, which always exists. It is cleared because -1 is a nice
    // value too, so that only errno shows an error.
    unsafe { *libc::__errno_location() = 0 };
    // SAFETY: takes and returns numbers only.
    let nice = unsafe { libc::getpriority(libc::PRIO_PROCESS, thread.unsigned_abs()) };
    match io::Error::last_os_error() {
        e if nice == -1 && e.raw_os_error() != Some(0) => Err(e),
        _ => Ok(nice),
    }
}

pub(crate) fn set_nice(thread: libc::pid_t, nice: libc::c_int) -> io::Result<()> {
    // SAFETY: takes and returns numbers only.
    let set = unsafe { libc::setpriority(libc::PRIO_PROCESS, thread.unsigned_abs(), nice) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

pub(crate) fn set_policy(thread: libc::pid_t, policy: libc::c_int, priority: libc::c_int) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: the kernel reads `parameters` during the call and keeps nothing of it.
    let set = unsafe { libc::sched_setscheduler(thread, policy, &raw const parameters) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    #[test]
    fn threads_are_first_for_a_while_and_what_a_killed_process_left_is_put_right() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        io::Write::write_all(child.stdin.as_mut().unwrap(), b"there?\n").unwrap();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        let process = Process::of(child.id()).unwrap();
        let tid = child.id().try_into().unwrap();
        let mut first = PriorityBoost::default();
        match first.threads_of(process, |name| (name == MAIN).then_some(Rank::First)) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => eprintln!("needs CAP_SYS_NICE: not run"),
            result => {
                result.unwrap();
                assert_eq!(policy(tid).unwrap(), libc::SCHED_RR | libc::SCHED_RESET_ON_FORK);
                drop(first);
                let before = (libc::SCHED_OTHER, nice(0).unwrap());
                assert_eq!((policy(tid).unwrap(), nice(tid).unwrap()), before);
                for rank in [Rank::First, Rank::Second] {
                    leave_behind(tid, rank);
                    assert_ne!(policy(tid).unwrap(), libc::SCHED_OTHER);
                    normal(process).unwrap();
                    assert_eq!((policy(tid).unwrap(), nice(tid).unwrap()), before);
                }
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }

    fn leave_behind(thread: libc::pid_t, rank: Rank) {
        let mut first = PriorityBoost::default();
        first.add(thread, libc::SCHED_RESET_ON_FORK, rank).unwrap();
        std::mem::forget(first);
    }

    #[test]
    fn a_thread_that_is_left_with_a_nice_value_gets_that_of_its_process() {
        let me = Process::current().unwrap();
        let main = nice(me.pid.cast_signed()).unwrap();
        let work = move || {
            let thread = rustix::thread::gettid().as_raw_pid();
            if set_nice(thread, THIRD_RANK_NICE).is_err() {
                eprintln!("needs CAP_SYS_NICE: not run");
                return;
            }
            set_nice(thread, main).unwrap();
            leave_behind(thread, Rank::Third);
            assert_eq!(nice(thread).unwrap(), THIRD_RANK_NICE);
            normal(me).unwrap();
            assert_eq!(nice(thread).unwrap(), main);
        };
        std::thread::spawn(work).join().unwrap();
    }
}
