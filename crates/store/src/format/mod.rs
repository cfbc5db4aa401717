//! Formats of a store's files, byte by byte; `docs/store-format.md` explains them.
//!
//! All functions of this module are pure. No input causes a panic, or an allocation larger than the input, except where
//! a limit is stated.

pub mod base;
pub mod codec;
pub mod entry;
pub mod manifest;
pub mod names;
pub mod page;
pub mod sealed_entry;
pub mod segment;
pub mod superblock;

use crate::sealing::KeyId;
use std::fmt;

/// Version of the format of stores without encryption.
pub const VERSION: u32 = 1;

/// Version of the format of encrypted stores, and the newest that this Rekindle reads.
pub const SEALED_VERSION: u32 = 2;

/// Alignment of data that one crash must not damage together: an interrupted write does not damage adjacent data that
/// begins at another multiple of this size.
pub const ALIGNMENT: u64 = 4096;

/// A part of a store's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Structure {
    /// The file `rekindle-store`.
    Superblock,
    /// Beginning of a segment.
    SegmentHeader,
    /// Header and directory of a frame. The directory lists the frame's pages.
    FrameDirectory,
    /// A log entry of an encrypted store.
    Entry,
    /// Beginning of a log entry: header and section table.
    EntryHeader,
    /// End of a log entry.
    EntryFooter,
    /// A claim of the owner epoch.
    Claim,
    /// The list of all valid checkpoints and segments.
    Manifest,
    /// Number, time and RAM block table of a checkpoint.
    Checkpoint,
    /// JSON that describes how to rebuild the VM.
    Definition,
    /// JSON with notes of the protector.
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
            Self::Entry => "the log entry",
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

/// Defect of bytes that cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    /// The bytes are of a newer version.
    Newer {
        found: u32,
        /// Newest version that this Rekindle knows.
        known: u32,
    },
    /// The bytes are sealed with a key that was not given.
    UnknownKey { key: KeyId },
    /// The bytes are damaged.
    Bad {
        structure: Structure,
        /// Offset in the file, in bytes.
        at: u64,
        what: &'static str,
    },
}

impl Flaw {
    pub(crate) fn bad(structure: Structure, at: u64, what: &'static str) -> Self {
        Self::Bad { structure, at, what }
    }

    /// Returns the flaw of sealed bytes that were changed, or that were sealed for another place.
    pub(crate) fn not_authentic(structure: Structure, at: u64) -> Self {
        Self::bad(structure, at, "it was changed, or belongs to another place: its authentication fails")
    }

    /// Rejects versions newer than [`SEALED_VERSION`].
    pub(crate) fn check_version(found: u32) -> Result<(), Self> {
        if found > SEALED_VERSION { Err(Self::Newer { found, known: SEALED_VERSION }) } else { Ok(()) }
    }
}

#[must_use]
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}
