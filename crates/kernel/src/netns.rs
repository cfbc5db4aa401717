//! Running code inside a network namespace.

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::thread;

/// Returns the path at which `ip netns` keeps the namespace called `name`.
#[must_use]
pub fn path(name: &str) -> PathBuf {
    PathBuf::from("/run/netns").join(name)
}

/// Returns whether a network namespace that `ip netns` makes in this process would not exist on the host: it is a mount, and those
/// of a systemd unit with a mount namespace of its own do not reach the host.
///
/// # Errors
/// Errors of `statx(2)`, and of reading `/proc/self/mountinfo`.
pub fn would_be_hidden() -> io::Result<bool> {
    // The directory may not exist yet.
    let mount = statx(CWD, "/run", AtFlags::empty(), StatxFlags::MNT_ID)?.stx_mnt_id;
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    Ok(is_slave(&mounts, mount))
}

/// Returns whether a mount receives the mounts of another namespace (`master:` in proc_pid_mountinfo(5)): the namespace was copied from that one.
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

/// A network namespace.
#[derive(Debug)]
pub struct Namespace(OwnedFd);

impl From<OwnedFd> for Namespace {
    /// `descriptor` is one of a namespace, such as that of `/proc/PID/ns/net`.
    fn from(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }
}

impl Namespace {
    /// Runs `work` on a thread of its own inside the namespace.
    ///
    /// The calling thread stays in its own namespace. Descriptors that `work` returns keep the namespace in which they
    /// were opened.
    ///
    /// # Errors
    /// `PermissionDenied` without `CAP_SYS_ADMIN`.
    pub fn run<T: Send + 'static>(self, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        let inside = move || -> io::Result<T> {
            move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(work())
        };
        thread::Builder::new()
            .name("netns".into())
            .spawn(inside)?
            .join()
            .map_err(|_| io::Error::other("the thread inside the network namespace panicked"))?
    }
}

/// Runs `work` inside the network namespace `name` (as made by `ip netns add`), as [`Namespace::run`] does.
///
/// # Errors
/// `NotFound` if the namespace does not exist; `PermissionDenied` without `CAP_SYS_ADMIN`. The error names the
/// namespace.
pub fn run_in<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let path = path(name);
    let named = |e: io::Error| io::Error::new(e.kind(), format!("network namespace {name} ({}): {e}", path.display()));
    let namespace = Namespace::from(OwnedFd::from(File::open(&path).map_err(named)?));
    namespace.run(work).map_err(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_of_a_copied_namespace_is_recognised() {
        let mounts = "22 1 0:20 / /proc rw shared:5 - proc proc rw\n\
                      30 1 0:25 / /run rw,nosuid shared:312 master:13 - tmpfs tmpfs rw\n\
                      31 1 0:26 / /run/master:1 rw shared:9 - tmpfs master:2 rw,master:3\n";
        assert_eq!([22, 30, 31, 99].map(|mount| is_slave(mounts, mount)), [false, true, false, false]);
        assert!(would_be_hidden().is_ok());
    }

    #[test]
    fn a_missing_namespace_is_named() {
        let e = run_in("rekindle-no-such-namespace", || ()).unwrap_err();
        assert!(e.to_string().contains("rekindle-no-such-namespace"), "{e}");
    }
}
