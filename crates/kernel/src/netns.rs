//! Running code inside a network namespace.

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::thread;

/// Returns the path at which `ip netns` keeps the namespace called `name`.
#[must_use]
pub fn path(name: &str) -> PathBuf {
    PathBuf::from("/run/netns").join(name)
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
    fn a_missing_namespace_is_named() {
        let e = run_in("rekindle-no-such-namespace", || ()).unwrap_err();
        assert!(e.to_string().contains("rekindle-no-such-namespace"), "{e}");
    }
}
