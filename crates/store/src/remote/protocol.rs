//! What client and server say to each other. `docs/store-format.md` has the sequence.

use crate::error::StoreError;
use crate::format::codec::{Reader, Writer};
use crate::image::PageId;
use crate::types::{Block, CheckpointInfo, OnlyIf, Owner, Vm};
use crate::url::ImageName;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Version of the protocol.
pub(crate) const VERSION: u32 = 3;
/// Pages that one request may ask for.
pub(crate) const PAGES: usize = 1024;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $limit:expr, $doing:literal;)*) => {
        /// Type of a frame.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Kind { $($(#[$doc])* $name,)* }

        impl Kind {
            /// All of them.
            #[cfg(test)]
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Its number.
            pub fn code(self) -> u8 {
                match self { $(Self::$name => $code,)* }
            }

            /// That of a number.
            pub fn from_code(code: u8) -> Option<Self> {
                match code { $($code => Some(Self::$name),)* _ => None }
            }

            /// Bytes that its payload may have.
            pub fn limit(self) -> usize {
                match self { $(Self::$name => $limit,)* }
            }

            /// What is being done by it.
            pub fn doing(self) -> &'static str {
                match self { $(Self::$name => $doing,)* }
            }
        }
    };
}

const CONTROL: usize = 64 << 10;
const TABLE: usize = 4 << 20;
const SOME_PAGES: usize = (4 << 20) + (64 << 10);
const STATE: usize = 128 << 20;

kinds! {
    /// Client: who, what for. JSON.
    Hello = 1, CONTROL, "greeting";
    /// Begin a checkpoint. JSON.
    Begin = 2, TABLE, "beginning a checkpoint";
    /// Pages of it: how many, directory, content. No answer.
    Pages = 3, SOME_PAGES, "sending pages";
    /// Let it count.
    Commit = 4, STATE, "committing a checkpoint";
    /// Give it up.
    Abort = 5, 0, "giving a checkpoint up";
    /// Read pages.
    Read = 6, CONTROL, "reading pages";
    /// The pages written last, from a position on.
    Hot = 7, CONTROL, "asking for the order of pages";
    /// A section of a checkpoint.
    Section = 8, CONTROL, "reading a checkpoint";
    /// What there is.
    List = 9, CONTROL, "listing";
    /// Look at every byte.
    Verify = 10, CONTROL, "verifying";
    /// Free room.
    Compact = 11, CONTROL, "compacting";
    /// Finish what is done in the background.
    Settle = 12, CONTROL, "finishing";
    /// How many checkpoints are kept, and which one is held. JSON.
    Keep = 13, CONTROL, "setting what is kept";
    /// Digests: of the pages of a block that is written, of any pages that are read.
    Digests = 14, CONTROL, "asking for digests";
    /// Server: come in. JSON.
    Welcome = 65, TABLE, "greeting";
    /// It did not work. JSON.
    Failure = 66, CONTROL, "failing";
    /// Numbers of the blocks. JSON.
    Begun = 67, TABLE, "beginning a checkpoint";
    /// It counts. JSON.
    Committed = 68, CONTROL, "committing a checkpoint";
    /// Done.
    Done = 69, CONTROL, "answering";
    /// Stored pages.
    Stored = 70, SOME_PAGES, "reading pages";
    /// A part of an order of pages.
    Order = 71, CONTROL, "asking for the order of pages";
    /// Bytes.
    Bytes = 72, STATE, "reading";
    /// JSON.
    Listing = 73, TABLE, "listing";
    /// JSON.
    Verified = 74, STATE, "verifying";
    /// Still at work; to be passed over.
    Busy = 75, 0, "working";
}

/// The first word.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub version: u32,
    pub name: ImageName,
    pub purpose: Purpose,
}

/// What a connection is for.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Purpose {
    /// Write, as this owner; `create`: the store, if there is none.
    Write { vm: Vm, owner: Owner, only_if: Option<OnlyIf>, keep: u32, segment: u64, create: bool },
    /// Create a store that no VM uses yet.
    Init,
    /// Read a checkpoint; `unlooked`: its pages are looked for when the first is wanted.
    Read {
        vm: Option<Uuid>,
        at: Option<u64>,
        #[serde(default)]
        unlooked: bool,
    },
    /// List and verify.
    Look,
    /// Become the owner, and no more.
    Fence {
        vm: Vm,
        owner: Owner,
        #[serde(default)]
        only_if: Option<OnlyIf>,
    },
}

/// The answer to it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Welcome {
    /// Of the store.
    pub id: Uuid,
    pub vm: Vm,
    /// The owner epoch.
    pub epoch: u64,
    /// The newest checkpoint; 0 if there is none.
    pub newest: u64,
    /// The one that was opened.
    pub info: Option<CheckpointInfo>,
}

/// The blocks of a checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct BeginBlocks {
    pub blocks: Vec<Block>,
}

/// Their numbers.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct BegunBlocks {
    pub numbers: Vec<u16>,
}

/// What is kept.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct KeepWhat {
    pub keep: Option<u32>,
    /// Set, or let go of.
    pub hold: Option<Option<u64>>,
}

/// An error.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub kind: String,
    pub text: String,
    pub superseded: Option<(u64, u64, Owner)>,
    pub no_such: Option<(u64, Vec<u64>)>,
    /// The VM of a store that exists already.
    #[serde(default)]
    pub vm: Option<Vm>,
}

impl Failure {
    /// That of an error here, with its cause.
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

    /// What went wrong with the line or in it.
    pub fn protocol(text: &str) -> Self {
        Self { kind: "protocol".into(), text: text.to_owned(), superseded: None, no_such: None, vm: None }
    }

    /// As an error here.
    pub fn into_error(self, store: &str) -> StoreError {
        let store = store.to_owned();
        if let Some((mine, epoch, owner)) = self.superseded {
            return StoreError::Superseded { store, mine, epoch, owner };
        }
        if let Some((asked, have)) = self.no_such {
            return StoreError::NoSuchCheckpoint { store, asked, have };
        }
        // What these advise needs the whole URL.
        match self.kind.as_str() {
            "not-a-store" => StoreError::NotAStore { store },
            "unused" => StoreError::Unused { store },
            "exists" => StoreError::Exists { store, vm: self.vm },
            _ => StoreError::Refused { store, kind: self.kind, text: self.text },
        }
    }
}

/// Pages as bytes: how many, then block and number of each.
pub(crate) fn encode_ids(ids: &[PageId]) -> Vec<u8> {
    let mut out = Vec::with_capacity(4 + 12 * ids.len());
    out.put_u32(ids.len() as u32);
    for (block, page) in ids {
        out.put_u32(*block as u32);
        out.put_u64(*page);
    }
    out
}

/// From bytes; `None` if they make no sense or are too many.
pub(crate) fn decode_ids(bytes: &[u8]) -> Option<Vec<PageId>> {
    let mut reader = Reader::new(bytes);
    let count = reader.count(12).filter(|count| *count <= PAGES)?;
    let ids = (0..count).map(|_| Some((reader.u32()? as usize, reader.u64()?))).collect::<Option<_>>()?;
    reader.rest().is_empty().then_some(ids)
}

/// Stored pages as bytes: digest and length of each, then their contents.
pub(crate) fn encode_stored(pages: &[(u64, Vec<u8>)]) -> Vec<u8> {
    let mut out = Vec::new();
    out.put_u32(pages.len() as u32);
    for (digest, stored) in pages {
        out.put_u64(*digest);
        out.put_u16(stored.len() as u16);
    }
    pages.iter().for_each(|(_, stored)| out.extend_from_slice(stored));
    out
}

/// From bytes; `None` if they make no sense.
pub(crate) fn decode_stored(bytes: &[u8]) -> Option<Vec<(u64, Vec<u8>)>> {
    let mut reader = Reader::new(bytes);
    let count = reader.count(10).filter(|count| *count <= PAGES)?;
    let heads = (0..count).map(|_| Some((reader.u64()?, reader.u16()?))).collect::<Option<Vec<_>>>()?;
    let pages = heads
        .into_iter()
        .map(|(digest, len)| Some((digest, reader.bytes(len.into())?.to_vec())))
        .collect::<Option<_>>()?;
    reader.rest().is_empty().then_some(pages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn types_have_numbers_of_their_own() {
        for kind in Kind::ALL {
            assert_eq!(Kind::from_code(kind.code()), Some(*kind));
            assert!(!kind.doing().is_empty());
        }
        assert_eq!(Kind::from_code(0), None);
    }

    proptest! {
        #[test]
        fn lists_come_back(ids in proptest::collection::vec((0usize..9, any::<u64>()), 0..40),
                           pages in proptest::collection::vec((any::<u64>(), proptest::collection::vec(any::<u8>(), 0..90)), 0..20)) {
            prop_assert_eq!(decode_ids(&encode_ids(&ids)), Some(ids));
            prop_assert_eq!(decode_stored(&encode_stored(&pages)), Some(pages));
        }

        #[test]
        fn no_bytes_make_them_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode_ids(&bytes);
            let _ = decode_stored(&bytes);
            let _ = serde_json::from_slice::<Hello>(&bytes);
        }
    }
}
