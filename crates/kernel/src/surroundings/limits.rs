//! Resource limits, the score by which the kernel chooses victims when memory runs out, and the I/O priority.

use super::EnvironmentError;
use super::action::{Action, Step};
use super::proc_file::ProcDirectory;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, Rlimit};
use std::io;

/// Each limit and its name in `/proc/PID/limits`.
const RESOURCES: [(&str, Resource); 16] = [
    ("Max cpu time", Resource::Cpu),
    ("Max file size", Resource::Fsize),
    ("Max data size", Resource::Data),
    ("Max stack size", Resource::Stack),
    ("Max core file size", Resource::Core),
    ("Max resident set", Resource::Rss),
    ("Max processes", Resource::Nproc),
    ("Max open files", Resource::Nofile),
    ("Max locked memory", Resource::Memlock),
    ("Max address space", Resource::As),
    ("Max file locks", Resource::Locks),
    ("Max pending signals", Resource::Sigpending),
    ("Max msgqueue size", Resource::Msgqueue),
    ("Max nice priority", Resource::Nice),
    ("Max realtime priority", Resource::Rtprio),
    ("Max realtime timeout", Resource::Rttime),
];

/// `ioprio_get(2)` and `ioprio_set(2)`: the number is that of a thread.
const IO_PRIORITY_OF_THREAD: libc::c_int = 1;
/// Bits of an I/O priority below its class.
const IO_CLASS_SHIFT: u32 = 13;

#[derive(Debug)]
struct Limit {
    name: &'static str,
    resource: Resource,
    value: Rlimit,
}

/// Limits of a process.
#[derive(Debug)]
pub(super) struct Limits {
    resources: Vec<Limit>,
    oom_score_adj: i32,
    io_priority: libc::c_int,
}

impl Limits {
    pub fn of(source: &ProcDirectory) -> Result<Self, EnvironmentError> {
        // Not by prlimit(2), which needs CAP_SYS_RESOURCE for the process of another user.
        let table = source.text("limits")?;
        let score = source.text("oom_score_adj")?;
        Ok(Self {
            resources: parse(&table).ok_or_else(|| source.invalid("limits", &table))?,
            oom_score_adj: score.trim().parse().map_err(|_| source.invalid("oom_score_adj", &score))?,
            io_priority: io_priority(source.pid).map_err(|e| source.error("io", e))?,
        })
    }

    pub fn add_actions(&self, actions: &mut Vec<Action>) {
        for &Limit { name, resource, value } in &self.resources {
            actions.push(Action::new(Step::Limit(name), move || Ok(rustix::process::setrlimit(resource, value)?)));
        }
        let score = self.oom_score_adj.to_string();
        actions.push(Action::new(Step::OomScore, move || {
            let flags = OFlags::WRONLY | OFlags::CLOEXEC;
            let file = rustix::fs::open(c"/proc/self/oom_score_adj", flags, Mode::empty())?;
            rustix::io::write(file, score.as_bytes())?;
            Ok(())
        }));
        let io_priority = self.io_priority;
        actions.push(Action::new(Step::IoPriority, move || set_own_io_priority(io_priority)));
    }
}

/// Parses lines like `Max open files            1024                 524288               files`.
fn parse(table: &str) -> Option<Vec<Limit>> {
    let bytes = |word: &str| if word == "unlimited" { Some(None) } else { word.parse().ok().map(Some) };
    let limit = |&(name, resource)| {
        let mut values = table.lines().find_map(|line| line.strip_prefix(name))?.split_ascii_whitespace();
        let value = Rlimit { current: bytes(values.next()?)?, maximum: bytes(values.next()?)? };
        Some(Limit { name, resource, value })
    };
    RESOURCES.iter().map(limit).collect()
}

/// Returns the I/O priority in the form that can be set again: the kernel returns a level for a thread without a
/// class, but does not accept one.
fn io_priority(thread: u32) -> io::Result<libc::c_int> {
    // SAFETY: takes and returns numbers only.
    let priority = unsafe { libc::syscall(libc::SYS_ioprio_get, IO_PRIORITY_OF_THREAD, thread) };
    match libc::c_int::try_from(priority) {
        Ok(priority) if priority >> IO_CLASS_SHIFT == 0 && priority >= 0 => Ok(0),
        Ok(priority) if priority >= 0 => Ok(priority),
        _ => Err(io::Error::last_os_error()),
    }
}

fn set_own_io_priority(priority: libc::c_int) -> io::Result<()> {
    // SAFETY: takes and returns numbers only. Thread 0 is the calling thread.
    let set = unsafe { libc::syscall(libc::SYS_ioprio_set, IO_PRIORITY_OF_THREAD, 0, priority) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limits_of_this_process_are_those_that_the_kernel_returns() {
        let limits = Limits::of(&ProcDirectory::this()).unwrap();
        assert_eq!(limits.resources.len(), RESOURCES.len());
        for Limit { name, resource, value } in limits.resources {
            assert_eq!(value, rustix::process::getrlimit(resource), "{name}");
        }
    }

    #[test]
    fn a_missing_limit_is_an_error() {
        assert!(parse("Max cpu time  unlimited  unlimited  seconds\n").is_none());
    }
}
