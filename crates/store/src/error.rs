//! Errors of a store.

use crate::environment_file::EnvironmentFileError;
use crate::format::{Flaw, Structure};
use crate::keys::KeyError;
use crate::sealing::KeyId;
use crate::types::{KnownState, Owner, Vm};
use std::fmt;
use std::io;
use uuid::Uuid;

/// An error of a store. The field `store` is the store's directory or URL.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The directory has no superblock.
    #[error(
        "{store}: not a store of Rekindle; check the path, and that its file system is mounted; to create a store there: rekindle store \
         init {store}"
    )]
    NotAStore { store: String },
    /// The store was created, but no VM has used it yet.
    #[error("{store}: a new store, without a VM yet; fill it: rekindle protect NAME --store {store}")]
    Unused { store: String },
    /// The store to be created already exists.
    #[error("{store}: there is a store already{}; nothing was changed", OfVm(vm))]
    Exists {
        store: String,
        /// VM of the existing store, if it has one.
        vm: Option<Vm>,
    },
    /// The path is a file, or a component of the path is a file.
    #[error("{store}: not a directory; a store is a directory, or s3://BUCKET/PREFIX")]
    NotADirectory { store: String },
    /// Permission to read the directory or the superblock is missing.
    #[error(
        "{store}: permission denied; a store can be read only by the user that created it, since it holds guests' memory: run this as \
         that user (usually root)"
    )]
    Denied {
        store: String,
        #[source]
        source: io::Error,
    },
    /// The directory for a new store contains other files.
    #[error(
        "{store}: no store can be created here, since it contains `{found}`; name an empty directory, or one that does not exist"
    )]
    NotEmpty {
        store: String,
        /// Name of one of these files.
        found: String,
    },
    /// The store was written by a newer Rekindle.
    #[error("{store}/{file}: format version {found}, this Rekindle knows up to {known}; use a newer Rekindle")]
    Newer {
        store: String,
        file: String,
        found: u32,
        /// Newest version that this Rekindle knows.
        known: u32,
    },
    /// The store belongs to another VM.
    #[error("{store}: holds VM {} ({}), not {}; check the path and the VM", found.name, found.uuid, ExpectedVm(expected, name))]
    OtherVm {
        store: String,
        found: Vm,
        expected: Uuid,
        /// Name of the expected VM, if it is known.
        name: Option<String>,
    },
    /// The store is encrypted, and no key was given.
    #[error("{store}: the store is encrypted; give its key: --key-file FILE, or --key-command COMMAND")]
    Encrypted { store: String },
    /// A key was given, and the store is not encrypted. Its content may have been written without the key.
    #[error(
        "{store}: the store is not encrypted, but a key was given: it may have been exchanged, and its content may come from an attacker; check \
         the path; to encrypt, create a new store; to use this one without encryption, leave out --key-file and --key-command"
    )]
    NotEncrypted { store: String },
    /// None of the given keys is the one that a file is sealed with.
    #[error(
        "{store}/{file}: sealed with the key {key}, which is not among those that were given; add it to the key file (the \
         first key there is used to write, all of them to read)"
    )]
    UnknownKey { store: String, file: String, key: KeyId },
    /// The keys cannot be read.
    #[error(transparent)]
    Keys(#[from] KeyError),
    /// The variables of the object store cannot be read.
    #[error(transparent)]
    EnvironmentFile(#[from] EnvironmentFileError),
    /// The store has not reached the state that the caller requires.
    #[error(
        "{store}: at {found}, but {required} is required (--at-least-epoch, --at-least-checkpoint): use its newest copy"
    )]
    NotReached { store: String, found: KnownState, required: KnownState },
    /// The store is older than it is known to have been.
    #[error(
        "{store}: at {found}, but this host knows it at {known}: it was rolled back, or replaced by an old copy; use its newest \
         copy; or, if the old state is wanted, let this host forget what it knows: rekindle store forget NAME"
    )]
    RolledBack { store: String, found: KnownState, known: KnownState },
    /// This host knows another, encrypted store of the VM.
    #[error(
        "{store}: not the encrypted store that this host knows of the VM; check the path; if that store was abandoned on \
         purpose: rekindle store forget NAME"
    )]
    OtherStore { store: String },
    /// The store has another checkpoint of this number, or another owner of this epoch, than the one that is known.
    #[error(
        "{store}: not as this host knows it at {known}: it was rolled back, and written again; use its newest copy; or, if this \
         state is wanted: rekindle store forget NAME"
    )]
    OtherHistory { store: String, known: KnownState },
    /// A checksum or a length is wrong.
    #[error(
        "{store}/{file}: {structure} is damaged at byte {at}: {what}; see what is left: rekindle store verify {store}"
    )]
    Damaged {
        store: String,
        file: String,
        structure: Structure,
        /// Offset in the file, in bytes.
        at: u64,
        what: String,
    },
    /// A required file is missing.
    #[error("{store}/{file} is missing; {needed}; restore it from a copy of the store, or open an earlier checkpoint")]
    Missing {
        store: String,
        file: String,
        /// Why the file is required.
        needed: String,
    },
    /// No checkpoint was ever committed.
    #[error(
        "{store}: no checkpoint has been committed yet; protect the VM first: rekindle protect {vm} --store {store}"
    )]
    Empty { store: String, vm: String },
    /// The store does not keep the requested checkpoint.
    #[error("{store}: there is no checkpoint {asked}; available: {}", Numbers(have))]
    NoSuchCheckpoint {
        store: String,
        asked: u64,
        /// Numbers of all checkpoints that the store keeps.
        have: Vec<u64>,
    },
    /// Another owner has claimed the store.
    #[error("{store}: owner epoch {mine} is over: epoch {epoch} belongs to {owner}; this owner cannot commit any more")]
    Superseded {
        store: String,
        /// Epoch of the process that gets this error.
        mine: u64,
        /// Epoch of the newest owner.
        epoch: u64,
        owner: Owner,
    },
    /// The disk is full.
    #[error(
        "{}: the disk is full while {doing}; the store is unchanged; free some space and try again",
        FilePath(store, file)
    )]
    NoSpace {
        store: String,
        file: String,
        doing: &'static str,
        #[source]
        source: io::Error,
    },
    /// A system call failed.
    #[error("{}: {doing} failed", FilePath(store, file))]
    Io {
        store: String,
        /// Empty if the error is about the store's directory.
        file: String,
        doing: &'static str,
        #[source]
        source: io::Error,
    },
    /// A page is damaged.
    #[error(transparent)]
    Page(#[from] Box<BadPage>),
    /// The checkpoint does not have this page or this block.
    #[error("{store}: checkpoint {checkpoint} has no page {page} in block {block}")]
    NoSuchPage {
        store: String,
        checkpoint: u64,
        /// Name of the block, or its position in the block table.
        block: String,
        page: u64,
    },
    /// The block table is not valid for a VM.
    #[error("{store}: the RAM block table cannot be stored: {what}")]
    Blocks { store: String, what: String },
    /// A value is too large for a log entry.
    #[error("{store}: {what} has {len} bytes; at most {max} can be stored")]
    TooLarge { store: String, what: &'static str, len: u64, max: u64 },
    /// An earlier failure of the writer prevents the operation, e.g. it is unknown whether the newest log entry was
    /// written.
    #[error("{store}: closed after an earlier failure ({why}); open it again to continue from what is committed")]
    Closed {
        store: String,
        /// Description of the earlier failure.
        why: String,
    },
}

/// A damaged page.
#[derive(Debug, thiserror::Error)]
#[error("VM {vm}, checkpoint {checkpoint}, block {block}, page {page}: {what} ({store}/{file}, byte {at})")]
pub struct BadPage {
    pub store: String,
    pub vm: String,
    pub checkpoint: u64,
    pub block: String,
    /// Number of the page in its block.
    pub page: u64,
    pub file: String,
    /// Offset in the file, in bytes.
    pub at: u64,
    pub what: String,
}

pub type Result<T> = std::result::Result<T, StoreError>;

impl StoreError {
    /// Returns the kind of the error for programs. The names are stable.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NotAStore { .. } => "not-a-store",
            Self::Unused { .. } => "unused",
            Self::Exists { .. } => "exists",
            Self::NotADirectory { .. } => "not-a-directory",
            Self::Denied { .. } => "denied",
            Self::NotEmpty { .. } => "not-empty",
            Self::Newer { .. } => "newer",
            Self::OtherVm { .. } => "other-vm",
            Self::Encrypted { .. } => "encrypted",
            Self::NotEncrypted { .. } => "not-encrypted",
            Self::UnknownKey { .. } => "unknown-key",
            Self::Keys(_) => "keys",
            Self::EnvironmentFile(_) => "environment-file",
            Self::NotReached { .. } => "not-reached",
            Self::RolledBack { .. } => "rolled-back",
            Self::OtherStore { .. } => "other-store",
            Self::OtherHistory { .. } => "other-history",
            Self::Damaged { .. } => "damaged",
            Self::Missing { .. } => "missing",
            Self::Empty { .. } => "empty",
            Self::NoSuchCheckpoint { .. } => "no-such-checkpoint",
            Self::Superseded { .. } => "superseded",
            Self::NoSpace { .. } => "no-space",
            Self::Io { .. } => "io",
            Self::Page(_) => "page",
            Self::NoSuchPage { .. } => "no-such-page",
            Self::Blocks { .. } => "blocks",
            Self::TooLarge { .. } => "too-large",
            Self::Closed { .. } => "closed",
        }
    }

    /// Returns whether the error may disappear while the store stays unchanged, so that a retry may succeed.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::NoSpace { .. } | Self::Io { .. } | Self::Denied { .. } | Self::Closed { .. } => true,
            Self::Keys(e) => e.may_pass(),
            _ => false,
        }
    }

    /// Returns whether the store is missing or unused, so that no VM can have a checkpoint in it.
    #[must_use]
    pub fn is_no_store(&self) -> bool {
        matches!(self, Self::NotAStore { .. } | Self::Unused { .. })
    }

    /// Returns the new owner if the guest that began in epoch `run` must be stopped, because the new owner runs that
    /// guest now or has shut it down. Returns `None` for every other error, and also if the new owner leaves the guest
    /// alone, e.g. an administrator or another protector of the same guest.
    #[must_use]
    pub fn guest_is_over(&self, run: u64) -> Option<&Owner> {
        match self {
            Self::Superseded { owner, .. } => Some(owner).filter(|owner| owner.run > run),
            _ => None,
        }
    }

    /// Converts an error of the operating system for an operation on a file of a store.
    pub(crate) fn io(store: &str, file: &str, doing: &'static str, source: io::Error) -> Self {
        let (store, file) = (store.to_owned(), file.to_owned());
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NoSpace { store, file, doing, source },
            _ => Self::Io { store, file, doing, source },
        }
    }

    /// Converts a flaw of a structure in a file.
    pub(crate) fn flaw(store: &str, file: &str, flaw: Flaw) -> Self {
        let (store, file) = (store.to_owned(), file.to_owned());
        match flaw {
            Flaw::Newer { found, known } => Self::Newer { store, file, found, known },
            Flaw::UnknownKey { key } => Self::UnknownKey { store, file, key },
            Flaw::Bad { structure, at, what } => Self::Damaged { store, file, structure, at, what: what.into() },
        }
    }

    /// Returns whether a read has no result yet, and its caller must not wait.
    pub(crate) fn is_would_block(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::WouldBlock)
    }

    /// Returns whether the error is that a file was not found.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// Formats the path of a file of a store, or of the store's directory if `file` is empty.
struct FilePath<'a>(&'a str, &'a str);

impl fmt::Display for FilePath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            "" => f.write_str(self.0),
            file => write!(f, "{}/{file}", self.0),
        }
    }
}

struct OfVm<'a>(&'a Option<Vm>);

impl fmt::Display for OfVm<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(vm) => write!(f, ", of VM {} ({})", vm.name, vm.uuid),
            None => f.write_str(", without a VM yet"),
        }
    }
}

struct ExpectedVm<'a>(&'a Uuid, &'a Option<String>);

impl fmt::Display for ExpectedVm<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            Some(name) => write!(f, "VM {name} ({})", self.0),
            None => write!(f, "VM {}", self.0),
        }
    }
}

struct Numbers<'a>(&'a [u64]);

impl fmt::Display for Numbers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (n, number) in self.0.iter().enumerate() {
            write!(f, "{}{number}", if n == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}
