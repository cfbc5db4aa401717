//! What the kernel reports of the confinement of a process.

use crate::process::Process;
use std::fs;
use std::io;

/// The rights of a process: of each thread, the least confined one counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rights {
    /// A seccomp filter checks the system calls of each thread.
    pub has_filter: bool,
    /// No thread can gain rights by starting a program.
    pub has_no_new_privs: bool,
    /// Effective and permitted capabilities of all threads, as bits.
    pub capabilities: u64,
    /// Number of threads.
    pub threads: usize,
    /// One of the threads has user 0 as its real, effective, saved or file system user.
    pub is_root: bool,
}

impl Rights {
    /// Reads the rights of `process`.
    ///
    /// # Errors
    /// `NotFound` if the process has ended.
    pub fn of(process: Process) -> io::Result<Self> {
        let mut rights = Self { has_filter: true, has_no_new_privs: true, capabilities: 0, threads: 0, is_root: false };
        for thread in fs::read_dir(format!("/proc/{}/task", process.pid))? {
            let path = thread?.path();
            match fs::read_to_string(path.join("status")) {
                Ok(status) => rights.add(&status),
                // The thread ended after it was listed.
                Err(_) if !path.exists() => {}
                Err(e) => return Err(e),
            }
        }
        if process.is_alive() { Ok(rights) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Adds a thread with this `/proc/PID/task/TID/status`.
    fn add(&mut self, status: &str) {
        /// `SECCOMP_MODE_FILTER` of `linux/seccomp.h`.
        const FILTER: &str = "2";
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let capabilities = |name| field(name).and_then(|bits| u64::from_str_radix(bits, 16).ok()).unwrap_or(u64::MAX);
        self.has_filter &= field("Seccomp:") == Some(FILTER);
        self.has_no_new_privs &= field("NoNewPrivs:") == Some("1");
        self.capabilities |= capabilities("CapEff:") | capabilities("CapPrm:");
        self.is_root |= field("Uid:").is_none_or(|users| users.split_whitespace().any(|user| user == "0"));
        self.threads += 1;
    }

    /// Describes what is not confined. `None` if all of it is.
    #[must_use]
    pub fn describe_missing(&self) -> Option<String> {
        let mut missing = Vec::new();
        if !self.has_filter {
            missing.push("no system call filter");
        }
        if self.capabilities != 0 {
            missing.push("capabilities");
        }
        if !self.has_no_new_privs {
            missing.push("may gain privileges");
        }
        (!missing.is_empty()).then(|| missing.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_confined_thread_counts() {
        let confined = "CapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n\
                        Uid:\t1000\t1000\t1000\t1000\n";
        let mut rights =
            Rights { has_filter: true, has_no_new_privs: true, capabilities: 0, threads: 0, is_root: false };
        rights.add(confined);
        assert_eq!(rights.describe_missing(), None);
        rights.add(&confined.replace("Seccomp:\t2", "Seccomp:\t0"));
        rights.add(&confined.replace("CapEff:\t0", "CapEff:\t1"));
        assert_eq!(rights.describe_missing().unwrap(), "no system call filter, capabilities");
        assert_eq!(rights.threads, 3);
        rights.add("");
        assert!(!rights.has_no_new_privs);
    }
}
