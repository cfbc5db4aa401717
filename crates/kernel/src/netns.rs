//! Running code inside a network namespace.

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::thread;

/// Returns the path at which `ip netns` keeps the namespace called `name`.
#[must_use]
pub fn path(name: &str) -> PathBuf {
    PathBuf::from("/run/netns").join(name)
}

/// Runs `work` on a thread of its own inside the network namespace `name` (as made by `ip netns add`).
///
/// The calling thread stays in its own namespace. Descriptors that `work` returns keep the namespace in which they were
/// opened.
///
/// # Errors
/// `NotFound` if the namespace does not exist; `PermissionDenied` without `CAP_SYS_ADMIN`. The error names the
/// namespace.
pub fn run_in<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let path = path(name);
    let named = |e: io::Error| io::Error::new(e.kind(), format!("network namespace {name} ({}): {e}", path.display()));
    let namespace = File::open(&path).map_err(named)?;
    thread::Builder::new()
        .name(format!("netns {name}"))
        .spawn(move || -> io::Result<T> {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(work())
        })?
        .join()
        .map_err(|_| io::Error::other("the thread inside the network namespace panicked"))?
        .map_err(named)
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
