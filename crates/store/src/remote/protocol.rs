//! Messages between client and server. `docs/store-format.md` has their sequence.

use crate::error::StoreError;
use crate::format::codec::{Reader, Writer};
use crate::format::entry::Section;
use crate::format::page::StoredPage;
use crate::types::{Block, CheckpointInfo, OnlyIf, Owner, Vm};
use crate::url::ImageName;
use rekindle_pages::{BlockId, PageId, PageNo};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

pub(crate) const VERSION: u32 = 3;
pub(crate) const MAX_PAGES_PER_REQUEST: usize = 1024;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $limit:expr, $doing:literal;)*) => {
        /// Type of a frame.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Kind { $($(#[$doc])* $name,)* }

        impl Kind {
            #[cfg(test)]
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            pub fn code(self) -> u8 {
                match self { $(Self::$name => $code,)* }
            }

            pub fn from_code(code: u8) -> Option<Self> {
                match code { $($code => Some(Self::$name),)* _ => None }
            }

            /// Returns the limit of the payload in bytes.
            pub fn limit(self) -> usize {
                match self { $(Self::$name => $limit,)* }
            }

            /// Returns the name of the operation for error messages.
            pub fn doing(self) -> &'static str {
                match self { $(Self::$name => $doing,)* }
            }
        }
    };
}

// Limits of payloads, in bytes.
const MAX_CONTROL: usize = 64 << 10;
const MAX_TABLE: usize = 4 << 20;
const MAX_PAGES: usize = (4 << 20) + (64 << 10);
const MAX_STATE: usize = 128 << 20;

kinds! {
    /// From client: greeting with the purpose of the connection. JSON.
    Hello = 1, MAX_CONTROL, "greeting";
    /// Begin a checkpoint with these RAM blocks. JSON.
    Begin = 2, MAX_TABLE, "beginning a checkpoint";
    /// Pages of the open checkpoint: number, directory, content. The server sends no answer.
    Pages = 3, MAX_PAGES, "sending pages";
    /// Commit the open checkpoint.
    Commit = 4, MAX_STATE, "committing a checkpoint";
    Abort = 5, 0, "aborting a checkpoint";
    Read = 6, MAX_CONTROL, "reading pages";
    /// Return the next most recently written pages from a position in their order on.
    Hot = 7, MAX_CONTROL, "requesting the order of pages";
    /// Return a section of a checkpoint.
    Section = 8, MAX_CONTROL, "reading a checkpoint";
    List = 9, MAX_CONTROL, "listing";
    Verify = 10, MAX_CONTROL, "verifying";
    /// Free all space that can be freed.
    Compact = 11, MAX_CONTROL, "compacting";
    /// Finish background work and write a base index.
    Settle = 12, MAX_CONTROL, "finishing";
    /// Set the number of checkpoints to keep and the checkpoint to hold. JSON.
    Keep = 13, MAX_CONTROL, "setting the checkpoints to keep";
    /// Return digests: for a writer, of consecutive pages of a block; for a reader, of any pages.
    Digests = 14, MAX_CONTROL, "requesting digests";
    /// From server: answer to the greeting. JSON.
    Welcome = 65, MAX_TABLE, "greeting";
    /// Error because of which the request failed. JSON.
    Failure = 66, MAX_CONTROL, "failing";
    /// Numbers of the blocks of the checkpoint that has started. JSON.
    BlockNumbers = 67, MAX_TABLE, "beginning a checkpoint";
    /// The checkpoint is committed. JSON.
    Committed = 68, MAX_CONTROL, "committing a checkpoint";
    Done = 69, MAX_CONTROL, "answering";
    /// Stored bytes of pages.
    Stored = 70, MAX_PAGES, "reading pages";
    /// The next pages in the order of the most recently written pages.
    Order = 71, MAX_CONTROL, "requesting the order of pages";
    Bytes = 72, MAX_STATE, "reading";
    /// Contents of a store. JSON.
    Listing = 73, MAX_TABLE, "listing";
    /// Result of a verification. JSON.
    Verified = 74, MAX_STATE, "verifying";
    /// The server is still working on the request. The answer follows.
    Busy = 75, 0, "working";
}

/// First message of a client.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub version: u32,
    pub name: ImageName,
    pub purpose: Purpose,
}

/// Purpose of a connection.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Purpose {
    /// Write checkpoints as `owner`. With `create`, create a missing store.
    Write { vm: Vm, owner: Owner, only_if: Option<OnlyIf>, keep: u32, segment: u64, create: bool },
    /// Create a store that no VM uses yet.
    Init,
    /// Read a checkpoint.
    Read(CheckpointRequest),
    /// List or verify a store.
    #[serde(rename = "look")]
    Inspect,
    /// Become the owner without writing checkpoints.
    Fence {
        vm: Vm,
        owner: Owner,
        #[serde(default)]
        only_if: Option<OnlyIf>,
    },
}

/// The checkpoint that a client reads.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct CheckpointRequest {
    /// Required VM of the store; `None` for any VM.
    pub vm: Option<Uuid>,
    /// Number of the checkpoint; `None` for the newest.
    pub at: Option<u64>,
    /// Build the index only when the first page is read.
    #[serde(default, rename = "unlooked")]
    pub lazy: bool,
}

/// Answer to a [`Hello`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Welcome {
    /// ID of the store, which seeds the digests of pages.
    pub id: Uuid,
    pub vm: Vm,
    pub epoch: u64,
    /// Number of the newest checkpoint; 0 if there is none.
    pub newest: u64,
    /// Description of the checkpoint that was opened for reading.
    pub info: Option<CheckpointInfo>,
}

/// The RAM blocks of a checkpoint that is to begin.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct BlockTable {
    pub blocks: Vec<Block>,
}

/// The numbers of a [`BlockTable`]'s blocks in the store's records, in the same order.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct BlockNumbers {
    pub numbers: Vec<u16>,
}

/// Which checkpoints the store keeps.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Retention {
    pub keep: Option<u32>,
    /// Checkpoint to hold. `Some(None)` releases the held checkpoint; `None` changes nothing.
    pub hold: Option<Option<u64>>,
}

/// An error that the server reports.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub kind: String,
    pub text: String,
    pub superseded: Option<(u64, u64, Owner)>,
    pub no_such: Option<(u64, Vec<u64>)>,
    /// The VM of an existing store.
    #[serde(default)]
    pub vm: Option<Vm>,
}

impl Failure {
    /// Converts an error and its cause.
    pub fn of(error: &StoreError) -> Self {
        let mut text = error.to_string();
        if let Some(cause) = std::error::Error::source(error) {
            text += &format!(": {cause}");
        }
        let superseded = match error {
            StoreError::Superseded { mine, epoch, owner, .. } => Some((*mine, *epoch, owner.clone())),
            _ => None,
        };
        let no_such = match error {
            StoreError::NoSuchCheckpoint { asked, have, .. } => Some((*asked, have.clone())),
            _ => None,
        };
        let vm = match error {
            StoreError::Exists { vm, .. } => vm.clone(),
            _ => None,
        };
        Self { kind: error.kind().to_owned(), text, superseded, no_such, vm }
    }

    /// Returns a protocol error.
    pub fn protocol(text: &str) -> Self {
        Self { kind: "protocol".into(), text: text.to_owned(), superseded: None, no_such: None, vm: None }
    }

    /// Converts the failure to an error of the client for the store at the URL `store`.
    pub fn into_error(self, store: &str) -> StoreError {
        let store = store.to_owned();
        if let Some((mine, epoch, owner)) = self.superseded {
            return StoreError::Superseded { store, mine, epoch, owner };
        }
        if let Some((asked, have)) = self.no_such {
            return StoreError::NoSuchCheckpoint { store, asked, have };
        }
        // The messages of these errors name the whole URL, which the server does not know.
        match self.kind.as_str() {
            "not-a-store" => StoreError::NotAStore { store },
            "unused" => StoreError::Unused { store },
            "exists" => StoreError::Exists { store, vm: self.vm },
            _ => StoreError::Refused { store, kind: self.kind, text: self.text },
        }
    }
}

/// Consecutive pages of a block whose digests a writer requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DigestRange {
    /// Number of the block.
    pub block: u16,
    /// First page.
    pub first: u64,
    pub count: u64,
}

impl DigestRange {
    pub fn encode(self) -> Vec<u8> {
        let mut out = Vec::new();
        out.put_u16(self.block);
        out.put_u64(self.first);
        out.put_u64(self.count);
        out
    }

    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        Some(Self { block: reader.u16()?, first: reader.u64()?, count: reader.u64()? })
    }
}

/// Codes of the sections that a client can read.
pub(crate) struct SectionCode;

impl SectionCode {
    /// Returns the code of a section; `None` if a client cannot read it.
    pub fn encode(section: Section) -> Option<u8> {
        match section {
            Section::Devices => Some(0),
            Section::Definition => Some(1),
            Section::Metadata => Some(2),
            Section::Claim | Section::Manifest | Section::Before | Section::Checkpoint => None,
        }
    }

    pub fn decode(bytes: &[u8]) -> Option<Section> {
        match bytes {
            [0] => Some(Section::Devices),
            [1] => Some(Section::Definition),
            [2] => Some(Section::Metadata),
            _ => None,
        }
    }
}

/// Encodes a list of pages: the count, then the block and page number of each.
pub(crate) fn encode_ids(ids: &[PageId]) -> Vec<u8> {
    let mut out = Vec::with_capacity(4 + 12 * ids.len());
    out.put_u32(ids.len() as u32);
    for (block, page) in ids {
        out.put_u32(block.0 as u32);
        out.put_u64(page.0);
    }
    out
}

/// Decodes a list of pages; `None` if the list is invalid or too long.
pub(crate) fn decode_ids(bytes: &[u8]) -> Option<Vec<PageId>> {
    let mut reader = Reader::new(bytes);
    let count = reader.count(12).filter(|count| *count <= MAX_PAGES_PER_REQUEST)?;
    let ids =
        (0..count).map(|_| Some((BlockId(reader.u32()? as usize), PageNo(reader.u64()?)))).collect::<Option<_>>()?;
    reader.rest().is_empty().then_some(ids)
}

/// Encodes stored pages: the count, the digest and length of each, then their contents.
pub(crate) fn encode_stored(pages: &[StoredPage]) -> Vec<u8> {
    let mut out = Vec::new();
    out.put_u32(pages.len() as u32);
    for page in pages {
        out.put_u64(page.digest);
        out.put_u16(page.bytes.len() as u16);
    }
    pages.iter().for_each(|page| out.extend_from_slice(&page.bytes));
    out
}

/// Decodes stored pages; `None` if the bytes are invalid.
pub(crate) fn decode_stored(bytes: &[u8]) -> Option<Vec<StoredPage>> {
    let mut reader = Reader::new(bytes);
    let count = reader.count(10).filter(|count| *count <= MAX_PAGES_PER_REQUEST)?;
    let digests_and_lengths = (0..count).map(|_| Some((reader.u64()?, reader.u16()?))).collect::<Option<Vec<_>>>()?;
    let pages = digests_and_lengths
        .into_iter()
        .map(|(digest, len)| Some(StoredPage { digest, bytes: reader.bytes(len.into())?.to_vec() }))
        .collect::<Option<_>>()?;
    reader.rest().is_empty().then_some(pages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_type_has_its_own_number() {
        for kind in Kind::ALL {
            assert_eq!(Kind::from_code(kind.code()), Some(*kind));
            assert!(!kind.doing().is_empty());
        }
        assert_eq!(Kind::from_code(0), None);
    }

    proptest! {
        #[test]
        fn lists_are_decoded_as_they_were_encoded(ids in proptest::collection::vec((0usize..9, any::<u64>()), 0..40),
                           pages in proptest::collection::vec((any::<u64>(), proptest::collection::vec(any::<u8>(), 0..90)), 0..20)) {
            let pages: Vec<_> = pages.into_iter().map(|(digest, bytes)| StoredPage { digest, bytes }).collect();
            let ids: Vec<_> = ids.into_iter().map(|(block, page)| (BlockId(block), PageNo(page))).collect();
            prop_assert_eq!(decode_ids(&encode_ids(&ids)), Some(ids));
            prop_assert_eq!(decode_stored(&encode_stored(&pages)), Some(pages));
        }

        #[test]
        fn no_input_causes_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode_ids(&bytes);
            let _ = decode_stored(&bytes);
            let _ = serde_json::from_slice::<Hello>(&bytes);
        }
    }
}
