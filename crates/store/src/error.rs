//! What can go wrong with a store, each by its own name.

use crate::format::{Flaw, Structure};
use crate::types::{Owner, Vm};
use std::fmt;
use std::io;
use uuid::Uuid;

/// Why something with a store did not work. `store` is its directory or its URL.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// No superblock there.
    #[error(
        "{store}: not a store of Rekindle; check the path, and that its file system is mounted; to create a store there: rekindle store \
         init {store}"
    )]
    NotAStore {
        /// Where.
        store: String,
    },
    /// Created ahead, and no VM has used it yet.
    #[error("{store}: a new store, without a VM yet; fill it: rekindle protect NAME --store {store}")]
    Unused {
        /// Where.
        store: String,
    },
    /// To be created, and there already.
    #[error("{store}: there is a store already{}; nothing was changed", Of(vm))]
    Exists {
        /// Where.
        store: String,
        /// Its VM, if it has one.
        vm: Option<Vm>,
    },
    /// A file, or below one.
    #[error("{store}: not a directory; a store is a directory, or tls://HOST:PORT/NAME")]
    NotADirectory {
        /// Where.
        store: String,
    },
    /// The directory or the superblock may not be read.
    #[error(
        "{store}: permission denied; a store can be read only by the user that created it, since it holds guests' memory: run this as \
         that user (usually root)"
    )]
    Denied {
        /// Where.
        store: String,
        /// What the system reported.
        #[source]
        source: io::Error,
    },
    /// A directory that holds something else.
    #[error(
        "{store}: no store can be created here, since it contains `{found}`; name an empty directory, or one that does not exist"
    )]
    NotEmpty {
        /// Where.
        store: String,
        /// Something that is there.
        found: String,
    },
    /// Made by a newer Rekindle.
    #[error("{store}/{file}: format version {found}, this Rekindle knows up to {known}; use a newer Rekindle")]
    Newer {
        /// Where.
        store: String,
        /// The file.
        file: String,
        /// Its version.
        found: u32,
        /// The newest known one.
        known: u32,
    },
    /// It belongs to another VM.
    #[error("{store}: holds VM {} ({}), not {}; check the path and the VM", found.name, found.uuid, Wanted(expected, name))]
    OtherVm {
        /// Where.
        store: String,
        /// Whose it is.
        found: Vm,
        /// Whose it should be.
        expected: Uuid,
        /// That one's name, if it is known.
        name: Option<String>,
    },
    /// A checksum or a length is wrong.
    #[error(
        "{store}/{file}: {structure} is damaged at byte {at}: {what}; see what is left: rekindle store verify {store}"
    )]
    Damaged {
        /// Where.
        store: String,
        /// The file.
        file: String,
        /// What it is.
        structure: Structure,
        /// Where in the file.
        at: u64,
        /// What is wrong.
        what: String,
    },
    /// A file is gone that must be there.
    #[error("{store}/{file} is missing; {needed}; put it back from a copy of the store, or open an earlier checkpoint")]
    Missing {
        /// Where.
        store: String,
        /// The file.
        file: String,
        /// What needs it.
        needed: String,
    },
    /// No checkpoint was ever committed.
    #[error(
        "{store}: no checkpoint has been committed yet; protect the VM first: rekindle protect {vm} --store {store}"
    )]
    Empty {
        /// Where.
        store: String,
        /// The VM.
        vm: String,
    },
    /// A checkpoint that is not kept.
    #[error("{store}: checkpoint {asked} is not there; kept are {}", Numbers(have))]
    NoSuchCheckpoint {
        /// Where.
        store: String,
        /// The one asked for.
        asked: u64,
        /// Those that there are.
        have: Vec<u64>,
    },
    /// Another owner has taken over.
    #[error(
        "{store}: owner epoch {mine} is over: epoch {epoch} belongs to {owner}; nothing more of this owner can count"
    )]
    Superseded {
        /// Where.
        store: String,
        /// The epoch of whoever asks.
        mine: u64,
        /// The epoch that holds now.
        epoch: u64,
        /// Who has it, and since when.
        owner: Owner,
    },
    /// The disk is full.
    #[error("{}: the disk is full while {doing}; the store is as it was: make room, and go on", Spot(store, file))]
    NoSpace {
        /// Where.
        store: String,
        /// The file.
        file: String,
        /// What was under way.
        doing: &'static str,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// The system refuses.
    #[error("{}: {doing} failed", Spot(store, file))]
    Io {
        /// Where.
        store: String,
        /// The file, empty for the directory itself.
        file: String,
        /// What was under way.
        doing: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A page cannot be had as it was stored.
    #[error(transparent)]
    Page(#[from] Box<BadPage>),
    /// A page or block that the checkpoint does not have.
    #[error("{store}: checkpoint {checkpoint} has no page {page} in block {block}")]
    NoSuchPage {
        /// Where.
        store: String,
        /// The checkpoint.
        checkpoint: u64,
        /// The block: its name, or its number in the table.
        block: String,
        /// The page.
        page: u64,
    },
    /// A block table that no VM can have.
    #[error("{store}: the RAM block table cannot be stored: {what}")]
    Blocks {
        /// Where.
        store: String,
        /// Why.
        what: String,
    },
    /// More than fits into a log entry.
    #[error("{store}: {what} has {len} bytes; at most {max} can be stored")]
    TooLarge {
        /// Where.
        store: String,
        /// What.
        what: &'static str,
        /// Its length.
        len: u64,
        /// The limit.
        max: u64,
    },
    /// The writer failed earlier in a way that leaves open what counts.
    #[error("{store}: closed after an earlier failure ({why}); open it again to go on from what counts")]
    Closed {
        /// Where.
        store: String,
        /// That failure.
        why: String,
    },
    /// A store at the other end of a line cannot be reached.
    #[error("{store}: {doing} failed")]
    Line {
        /// Its URL.
        store: String,
        /// What was under way.
        doing: &'static str,
        /// Why.
        #[source]
        source: crate::remote::LineError,
    },
    /// The server refuses.
    #[error("{store}: the server says: {text}")]
    Refused {
        /// Its URL.
        store: String,
        /// The kind of error there, e.g. `no-space`.
        kind: String,
        /// Its words.
        text: String,
    },
}

/// A page that cannot be had as it was stored.
#[derive(Debug, thiserror::Error)]
#[error("VM {vm}, checkpoint {checkpoint}, block {block}, page {page}: {what} ({store}/{file}, byte {at})")]
pub struct BadPage {
    /// The store.
    pub store: String,
    /// The VM.
    pub vm: String,
    /// The checkpoint.
    pub checkpoint: u64,
    /// The RAM block.
    pub block: String,
    /// Number of the page in its block.
    pub page: u64,
    /// The file.
    pub file: String,
    /// Where in the file.
    pub at: u64,
    /// What is wrong.
    pub what: String,
}

/// Result of the store.
pub type Result<T> = std::result::Result<T, StoreError>;

impl StoreError {
    /// A word for the kind, stable for machines.
    #[must_use]
    pub fn kind(&self) -> &str {
        match self {
            Self::NotAStore { .. } => "not-a-store",
            Self::Unused { .. } => "unused",
            Self::Exists { .. } => "exists",
            Self::NotADirectory { .. } => "not-a-directory",
            Self::Denied { .. } => "denied",
            Self::NotEmpty { .. } => "not-empty",
            Self::Newer { .. } => "newer",
            Self::OtherVm { .. } => "other-vm",
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
            Self::Line { .. } => "line",
            Self::Refused { kind, .. } => kind,
        }
    }

    /// Whether the store may be well again later.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::NoSpace { .. } | Self::Io { .. } | Self::Denied { .. } | Self::Line { .. } | Self::Closed { .. }
        )
    }

    /// Whether no VM has a checkpoint there: there is no store, or one that was never used.
    #[must_use]
    pub fn is_no_store(&self) -> bool {
        matches!(self, Self::NotAStore { .. } | Self::Unused { .. })
    }

    /// Who runs the guest now, or has shut it down, where one that began with epoch `run` has to be stopped because of that. `None` if
    /// it is about something else: an administrator, or another protector of the same guest, may have taken the store over.
    #[must_use]
    pub fn guest_is_over(&self, run: u64) -> Option<&Owner> {
        match self {
            Self::Superseded { owner, .. } => Some(owner).filter(|owner| owner.run > run),
            _ => None,
        }
    }

    /// The system refused to do something with a file of a store.
    pub(crate) fn io(store: &str, file: &str, doing: &'static str, source: io::Error) -> Self {
        let (store, file) = (store.to_owned(), file.to_owned());
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NoSpace { store, file, doing, source },
            _ => Self::Io { store, file, doing, source },
        }
    }

    /// A structure of a file cannot be used.
    pub(crate) fn flaw(store: &str, file: &str, flaw: Flaw) -> Self {
        let (store, file) = (store.to_owned(), file.to_owned());
        match flaw {
            Flaw::Newer { found, known } => Self::Newer { store, file, found, known },
            Flaw::Bad { structure, at, what } => Self::Damaged { store, file, structure, at, what: what.into() },
        }
    }

    /// Whether a file was not there.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// A file of a store, or its directory where `file` is empty.
struct Spot<'a>(&'a str, &'a str);

impl fmt::Display for Spot<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            "" => f.write_str(self.0),
            file => write!(f, "{}/{file}", self.0),
        }
    }
}

struct Of<'a>(&'a Option<Vm>);

impl fmt::Display for Of<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(vm) => write!(f, ", of VM {} ({})", vm.name, vm.uuid),
            None => f.write_str(", without a VM yet"),
        }
    }
}

struct Wanted<'a>(&'a Uuid, &'a Option<String>);

impl fmt::Display for Wanted<'_> {
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
