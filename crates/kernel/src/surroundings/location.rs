//! Namespaces, root directory and working directory of a process, held open by descriptors.

use super::EnvironmentError;
use super::action::{Action, Step};
use super::proc_file::ProcDirectory;
use rustix::fs::{Mode, OFlags};
use rustix::thread::LinkNameSpaceType as Kind;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

/// File in `/proc/PID/ns`, kind, and name. The mount namespace is last: after it, `/proc` may be missing.
const NAMESPACES: [(&str, Kind, &str); 6] = [
    ("ns/time", Kind::Time, "time"),
    ("ns/cgroup", Kind::ControlGroup, "cgroup"),
    ("ns/uts", Kind::HostNameAndNISDomainName, "UTS"),
    ("ns/ipc", Kind::InterProcessCommunication, "IPC"),
    ("ns/net", Kind::Network, "network"),
    ("ns/mnt", Kind::Mount, MOUNT),
];
const MOUNT: &str = "mount";

/// Namespaces in which a process can be created only by a process that is in them. (It could be done by a second fork;
/// but a process that has a PID namespace belongs to a container, whose manager expects it as its child.)
const REJECTED: [(&str, &str); 2] = [("ns/user", "user"), ("ns/pid", "PID")];

#[derive(Debug)]
pub(super) struct Namespace {
    pub kind: Kind,
    pub name: &'static str,
    pub file: Arc<OwnedFd>,
}

/// Where a process sees files, networks and other global resources.
#[derive(Debug)]
pub(super) struct Location {
    /// Those that differ from ours.
    pub namespaces: Vec<Namespace>,
    /// `None` if it is ours.
    root: Option<Arc<OwnedFd>>,
    working_directory: Arc<OwnedFd>,
}

impl Location {
    pub fn of(source: &ProcDirectory, this: &ProcDirectory) -> Result<Self, EnvironmentError> {
        for (file, kind) in REJECTED {
            if differs(source, this, file)? {
                return Err(EnvironmentError::OwnNamespace { pid: source.pid, kind });
            }
        }
        let mut namespaces = Vec::new();
        for (file, kind, name) in NAMESPACES {
            if differs(source, this, file)? {
                let opened = open(source, file, OFlags::RDONLY)?;
                namespaces.push(Namespace { kind, name, file: opened });
            }
        }
        // The same directory of another mount namespace is another mount.
        let has_own_root = namespaces.iter().any(|namespace| namespace.name == MOUNT) || differs(source, this, "root")?;
        let directory = |name| open(source, name, OFlags::PATH | OFlags::DIRECTORY);
        Ok(Self {
            root: has_own_root.then(|| directory("root")).transpose()?,
            working_directory: directory("cwd")?,
            namespaces,
        })
    }

    pub fn add_actions(&self, actions: &mut Vec<Action>) {
        for Namespace { kind, name, file } in &self.namespaces {
            let (kind, file) = (*kind, file.clone());
            let join = move || Ok(rustix::thread::move_into_link_name_space(file.as_fd(), Some(kind))?);
            actions.push(Action::new(Step::Namespace(name), join));
        }
        if let Some(root) = self.root.clone() {
            actions.push(Action::new(Step::Root, move || {
                rustix::process::fchdir(&root)?;
                Ok(rustix::process::chroot(c".")?)
            }));
        }
        let directory = self.working_directory.clone();
        actions.push(Action::new(Step::WorkingDirectory, move || Ok(rustix::process::fchdir(&directory)?)));
    }
}

/// Returns whether a magic link of both processes leads to different files. A kind of namespace that the kernel does
/// not have is the same.
fn differs(source: &ProcDirectory, this: &ProcDirectory, name: &str) -> Result<bool, EnvironmentError> {
    let identity = |directory: &ProcDirectory| match fs::metadata(directory.path(name)) {
        Ok(metadata) => Ok(Some((metadata.dev(), metadata.ino()))),
        Err(e) if e.kind() == io::ErrorKind::NotFound && directory.path("ns").exists() => Ok(None),
        Err(e) => Err(directory.error(name, e)),
    };
    Ok(identity(source)? != identity(this)?)
}

fn open(source: &ProcDirectory, name: &str, flags: OFlags) -> Result<Arc<OwnedFd>, EnvironmentError> {
    let file = rustix::fs::open(source.path(name), flags | OFlags::CLOEXEC, Mode::empty());
    Ok(Arc::new(file.map_err(|e| source.error(name, e.into()))?))
}
