//! Restricting files, TCP, signals and tracing with Landlock.

use super::system_calls::Calls;
use super::{Confinement, ConfinementError};
use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, Scope,
};
use std::path::PathBuf;

/// The newest version of Landlock whose limits are used: Linux 6.12.
const NEWEST_ABI: ABI = ABI::V6;

/// What may be done with a granted path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read a file or device, or all files in a directory and its subdirectories.
    Read,
    /// Read and write a file or device.
    WriteFile,
    /// Create, read, write and remove regular files, and remove sockets, in a directory and its subdirectories.
    Directory,
}

impl Access {
    pub(super) fn is_writing(self) -> bool {
        self != Self::Read
    }

    fn rights(self) -> BitFlags<AccessFs> {
        let write_file = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev;
        match self {
            Self::Read => AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::IoctlDev,
            Self::WriteFile => write_file,
            Self::Directory => write_file | AccessFs::ReadDir | AccessFs::MakeReg | AccessFs::RemoveFile,
        }
    }
}

/// A path that a confined process may use. A missing path grants nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// A file or directory; a symbolic link is followed.
    pub path: PathBuf,
    /// What may be done with it.
    pub access: Access,
}

impl Grant {
    /// Grants `access` to `path`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, access: Access) -> Self {
        Self { path: path.into(), access }
    }
}

/// Denies this thread everything but the granted files. What the kernel does not support is logged.
pub(super) fn restrict(confinement: &Confinement) -> Result<(), ConfinementError> {
    for missing in support().missing() {
        tracing::warn!("this kernel does not confine {missing}; see: rekindle doctor");
    }
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST_ABI))?
        .scope(Scope::from_all(NEWEST_ABI))?;
    let network = AccessNet::from_all(NEWEST_ABI);
    let denied = if confinement.calls.contains(Calls::NETWORK) { network & AccessNet::BindTcp } else { network };
    ruleset = ruleset.handle_access(denied)?;
    let mut created = ruleset.create()?;
    for Grant { path, access } in &confinement.files {
        let descriptor = match PathFd::new(path) {
            Ok(descriptor) => descriptor,
            Err(e) => {
                tracing::debug!("not granted: {e}");
                continue;
            }
        };
        let rights = access.rights();
        let rights = if path.is_dir() { rights } else { rights & AccessFs::from_file(NEWEST_ABI) };
        created = created.add_rule(PathBeneath::new(descriptor, rights))?;
    }
    created.restrict_self()?;
    Ok(())
}

/// The version of Landlock of this kernel; 0 if it has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Support(u32);

/// Returns what this kernel supports.
#[must_use]
pub fn support() -> Support {
    /// `LANDLOCK_CREATE_RULESET_VERSION` of `linux/landlock.h`.
    const VERSION: u32 = 1;
    let none = std::ptr::null::<u8>();
    // SAFETY: with this flag the call takes no attribute, and only returns a number.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, none, 0usize, VERSION) };
    Support(u32::try_from(version).unwrap_or(0))
}

impl Support {
    /// Returns the limits that this kernel does not have.
    #[must_use]
    pub fn missing(self) -> Vec<&'static str> {
        let limits = [
            (1, "files, and tracing of other processes (Landlock, Linux 5.13; also needs lsm=landlock)"),
            (3, "the truncation of files (Linux 6.2)"),
            (4, "TCP (Linux 6.7)"),
            (5, "control requests to devices (Linux 6.10)"),
            (6, "signals to other processes (Linux 6.12)"),
        ];
        limits.into_iter().filter(|(since, _)| self.0 < *since).map(|(_, limit)| limit).collect()
    }
}
