//! Network namespaces as `ip netns` creates them, each with a file in `/run/netns`.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

const NAMESPACE_DIRECTORY: &str = "/run/netns";

/// Error of entering a network namespace.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetnsError {
    /// The name is not a file name.
    #[error("`{0}` is not the name of a network namespace; `ip netns list` shows them")]
    Name(String),
    /// The namespace's file is missing, or opening it is not permitted.
    #[error("{}: cannot open the network namespace; `ip netns list` shows them", path.display())]
    Open {
        /// Path of the namespace's file.
        path: PathBuf,
        #[allow(missing_docs)]
        source: io::Error,
    },
    /// The kernel did not permit entering it.
    #[error("{}: cannot enter the network namespace; run as root, or with CAP_SYS_ADMIN", path.display())]
    Enter {
        /// Path of the namespace's file.
        path: PathBuf,
        #[allow(missing_docs)]
        source: io::Error,
    },
}

/// Moves the calling thread, and no other thread, into a network namespace permanently.
pub(crate) fn enter(name: &str) -> Result<(), NetnsError> {
    if name.is_empty() || name.contains('/') || matches!(name, "." | "..") {
        return Err(NetnsError::Name(name.to_owned()));
    }
    let path = Path::new(NAMESPACE_DIRECTORY).join(name);
    let file = File::open(&path).map_err(|source| NetnsError::Open { path: path.clone(), source })?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .map_err(|errno| NetnsError::Enter { path, source: errno.into() })
}

/// Error of [`inside`].
#[derive(Debug)]
pub(crate) enum InsideError {
    Netns(NetnsError),
    /// The thread for it could not be started.
    Thread(io::Error),
}

/// Runs `work` inside a network namespace, on a separate thread. Without a name, runs it on the calling thread.
pub(crate) fn inside<T: Send>(name: Option<&str>, work: impl FnOnce() -> T + Send) -> Result<T, InsideError> {
    let Some(name) = name else { return Ok(work()) };
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .name(format!("in-{name}"))
            .spawn_scoped(scope, || enter(name).map(|()| work()))
            .map_err(InsideError::Thread)?;
        let result = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        result.map_err(InsideError::Netns)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_names() {
        for name in ["", ".", "..", "a/b", "/proc/1/ns/net"] {
            assert!(matches!(enter(name), Err(NetnsError::Name(_))), "{name}");
        }
        let error = enter("rekindle-no-such-namespace").unwrap_err();
        assert!(error.to_string().starts_with("/run/netns/rekindle-no-such-namespace: cannot open"), "{error}");
    }
}
