//! Whether mounts of this process reach the host.

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use std::fs;
use std::io;
use std::path::Path;

/// Returns whether the host would not see what this process mounts in the directory `path`: its mount namespace was copied from the
/// host's, as for a systemd unit with `PrivateMounts=yes`, and receives the host's mounts only.
///
/// # Errors
/// Errors of `statx(2)`, and of reading `/proc/self/mountinfo`.
pub fn hides_mounts(path: &Path) -> io::Result<bool> {
    let mount = statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID)?.stx_mnt_id;
    Ok(is_slave(&fs::read_to_string("/proc/self/mountinfo")?, mount))
}

/// Returns whether a mount receives the mounts of another namespace: `master:` in proc_pid_mountinfo(5).
fn is_slave(mountinfo: &str, mount: u64) -> bool {
    let of_mount = mountinfo.lines().map(str::split_whitespace).find_map(|mut fields| {
        let is_wanted = fields.next()?.parse() == Ok(mount);
        is_wanted.then_some(fields)
    });
    // Optional fields follow the options, until a hyphen.
    of_mount.is_some_and(|fields| {
        fields.skip(5).take_while(|field| *field != "-").any(|field| field.starts_with("master:"))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use nix::sched::CloneFlags;
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};

    #[test]
    fn a_mount_of_a_copied_namespace_is_recognised() {
        let mounts = "22 1 0:20 / /proc rw shared:5 - proc proc rw\n\
                      30 1 0:25 / /run rw,nosuid shared:312 master:13 - tmpfs tmpfs rw\n\
                      31 1 0:26 / /run/master:1 rw shared:9 - tmpfs master:2 rw,master:3\n";
        assert_eq!([22, 30, 31, 99].map(|mount| is_slave(mounts, mount)), [false, true, false, false]);
    }

    #[test]
    fn a_process_with_a_copy_of_the_mounts_hides_its_own() {
        assert!(rustix::process::geteuid().is_root(), "this test needs root");
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        // SAFETY: the child uses nothing that another thread may have locked, and ends.
        match unsafe { nix::unistd::fork() }.unwrap() {
            nix::unistd::ForkResult::Child => {
                // SAFETY: the call does not return and takes no pointer.
                unsafe { libc::_exit(i32::from(!matches!(hidden_before_and_after_a_copy(path), Ok((false, true))))) }
            }
            nix::unistd::ForkResult::Parent { child } => {
                let status = nix::sys::wait::waitpid(child, None).unwrap();
                assert_eq!(status, nix::sys::wait::WaitStatus::Exited(child, 0));
            }
        }
    }

    /// Makes mounts in a namespace of its own, so that nothing is left.
    fn hidden_before_and_after_a_copy(path: &Path) -> io::Result<(bool, bool)> {
        nix::sched::unshare(CloneFlags::CLONE_NEWNS)?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        mount("none", path, "tmpfs", MountFlags::empty(), None)?;
        mount_change(path, MountPropagationFlags::SHARED)?;
        let before = hides_mounts(path)?;
        // A mount without a peer cannot receive its mounts: the namespace must outlive the copy.
        let _copied = fs::File::open("/proc/self/ns/mnt")?;
        nix::sched::unshare(CloneFlags::CLONE_NEWNS)?;
        mount_change(path, MountPropagationFlags::DOWNSTREAM)?;
        Ok((before, hides_mounts(path)?))
    }
}
