//! What is in the files of a store, byte by byte: `docs/store-format.md` says why.
//!
//! Everything here is a pure function from and to bytes. No input makes it panic or allocate more than the input is
//! long, apart from what a limit names.

pub mod base;
pub mod codec;
pub mod entry;
pub mod manifest;
pub mod names;
pub mod page;
pub mod segment;
pub mod superblock;

use std::fmt;

/// Version of the format that is written, and the newest that is read.
pub const VERSION: u32 = 1;

/// What begins and ends at multiples of this is not torn together with its neighbours.
pub const ALIGNMENT: u64 = 4096;

/// A part of a store's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Structure {
    /// `rekindle-store`.
    Superblock,
    /// Beginning of a segment.
    SegmentHeader,
    /// Header and directory of a frame: which pages it holds.
    FrameDirectory,
    /// Beginning of a log entry: header and section table.
    EntryHeader,
    /// End of a log entry.
    EntryFooter,
    /// A claim of the owner epoch.
    Claim,
    /// The list of all that counts.
    Manifest,
    /// Number, time and RAM block table of a checkpoint.
    Checkpoint,
    /// How to build the VM again.
    Definition,
    /// What the protecting loop noted.
    Metadata,
    /// The device state.
    Devices,
    /// Beginning of a base index.
    BaseHeader,
    /// List of blocks, segments and checksums of a base index.
    BaseTrailer,
    /// A part of a base index.
    BasePart,
}

impl fmt::Display for Structure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Superblock => "the superblock",
            Self::SegmentHeader => "the segment header",
            Self::FrameDirectory => "a frame's page directory",
            Self::EntryHeader => "the log entry's header",
            Self::EntryFooter => "the log entry's footer",
            Self::Claim => "the owner's claim",
            Self::Manifest => "the manifest",
            Self::Checkpoint => "the checkpoint's RAM block table",
            Self::Definition => "the VM's definition",
            Self::Metadata => "the metadata",
            Self::Devices => "the device state",
            Self::BaseHeader => "the base index's header",
            Self::BaseTrailer => "the base index's list of segments",
            Self::BasePart => "a part of the base index",
        })
    }
}

/// Why bytes are not what they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    /// Of a newer version.
    Newer {
        /// That version.
        found: u32,
        /// The newest known one.
        known: u32,
    },
    /// Damaged.
    Bad {
        /// What.
        structure: Structure,
        /// At which byte of the file.
        at: u64,
        /// What is wrong.
        what: &'static str,
    },
}

impl Flaw {
    /// Something is damaged.
    pub(crate) fn bad(structure: Structure, at: u64, what: &'static str) -> Self {
        Self::Bad { structure, at, what }
    }

    /// Compare a version with the one that is known.
    pub(crate) fn check_version(found: u32) -> Result<(), Self> {
        if found > VERSION { Err(Self::Newer { found, known: VERSION }) } else { Ok(()) }
    }
}

/// The checksum of every structure.
#[must_use]
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}
