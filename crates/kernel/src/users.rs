//! Users of the host: which numbers are in use, and becoming another one.

use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Gid, Group, Uid, User, fork};
use rustix::io::Errno;
use std::fs;
use std::path::Path;

/// Ranges of numbers that users may give to programs in containers: subuid(5), subgid(5).
const SUBORDINATE: [&str; 2] = ["/etc/subuid", "/etc/subgid"];

/// Returns whether the host knows a user or a group with this number, or keeps it for containers. A directory service that
/// does not answer knows none.
#[must_use]
pub fn is_in_use(number: u32) -> bool {
    let is_known = matches!(User::from_uid(Uid::from_raw(number)), Ok(Some(_)))
        || matches!(Group::from_gid(Gid::from_raw(number)), Ok(Some(_)));
    is_known || SUBORDINATE.iter().any(|file| is_in_ranges(Path::new(file), number))
}

/// Searches the lines `NAME:FIRST:COUNT` of a file.
fn is_in_ranges(file: &Path, number: u32) -> bool {
    let text = fs::read_to_string(file).unwrap_or_default();
    let mut ranges = text.lines().filter_map(|line| {
        let mut fields = line.split(':').skip(1);
        Some((fields.next()?.trim().parse::<u64>().ok()?, fields.next()?.trim().parse::<u64>().ok()?))
    });
    ranges.any(|(first, count)| (first..first.saturating_add(count)).contains(&number.into()))
}

/// Returns whether this process can start processes as the user and group with this number. In containers, it may have no right to do so, and
/// some numbers do not exist.
#[must_use]
pub fn can_become(number: u32) -> bool {
    // SAFETY: the child makes system calls only.
    match unsafe { fork() } {
        Ok(ForkResult::Child) => {
            let status = i32::from(become_user(number, number, &[]).is_err());
            // SAFETY: the call does not return and takes no pointer.
            unsafe { libc::_exit(status) }
        }
        Ok(ForkResult::Parent { child }) => loop {
            match waitpid(child, None) {
                Err(nix::errno::Errno::EINTR) => {}
                // The status is unknown if this process ignores SIGCHLD. A wrong answer is an error later.
                Err(_) => return true,
                Ok(status) => return status == WaitStatus::Exited(child, 0),
            }
        },
        Err(_) => false,
    }
}

/// Makes the calling thread, which must be root, the given user. It loses its capabilities, unless the thread keeps them
/// (`PR_SET_KEEPCAPS`).
///
/// Makes system calls only, so that it can be used after a fork. The calls of the C library would change all threads of the
/// process, with locks; *needs:* a process with one thread.
///
/// # Errors
/// Errors of `setgroups(2)`, `setresgid(2)`, `setresuid(2)`. The groups may have changed.
pub(crate) fn become_user(user: u32, group: u32, groups: &[u32]) -> rustix::io::Result<()> {
    // SAFETY: `groups` has `len` numbers.
    unsafe {
        succeeded(libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()))?;
        succeeded(libc::syscall(libc::SYS_setresgid, group, group, group))?;
        succeeded(libc::syscall(libc::SYS_setresuid, user, user, user))
    }
}

/// Returns the error of a system call.
fn succeeded(result: libc::c_long) -> rustix::io::Result<()> {
    // SAFETY: the address of this thread's error number is valid.
    if result == 0 { Ok(()) } else { Err(Errno::from_raw_os_error(unsafe { *libc::__errno_location() })) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_users_groups_and_containers_are_in_use() {
        assert!(is_in_use(0));
        assert!(!is_in_use(2_147_000_000));
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "# comment\nweb:100000:65536\ndb:2100000000:10\nbad:x:y\n").unwrap();
        for (number, expected) in
            [(99_999, false), (100_000, true), (165_535, true), (165_536, false), (2_100_000_009, true)]
        {
            assert_eq!(is_in_ranges(file.path(), number), expected, "{number}");
        }
        assert!(!is_in_ranges(Path::new("/nonexistent"), 1));
    }
}
