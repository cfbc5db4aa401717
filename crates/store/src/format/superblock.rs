//! The superblock, which identifies a store and its VM.

use super::codec::{Reader, Writer, shortened};
use super::{Flaw, SEALED_VERSION, Structure, VERSION, checksum};
use crate::sealing::{FileKey, SEAL_LEN, Seal, TAG_LEN};
use crate::types::Vm;
use std::io;
use uuid::Uuid;

const MAGIC: &[u8; 16] = b"REKINDLE STORE\n\0";
/// Bytes of the superblock's file.
pub const LEN: usize = 4096;
/// Offsets of the key's name, and of the tag that authenticates all before it, in an encrypted store.
const SEAL_AT: usize = TAG_AT - SEAL_LEN;
const TAG_AT: usize = LEN - 8 - TAG_LEN;

/// Content of the file `rekindle-store`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Unique ID of the store.
    pub id: Uuid,
    pub vm: Vm,
    /// Time when the store was created, in microseconds since 1970.
    pub created_us: u64,
}

impl Superblock {
    /// Encodes the superblock of a store that is encrypted if it has a `seal` and its key.
    ///
    /// # Errors
    /// The superblock cannot be authenticated.
    pub fn encode(&self, seal: Option<&(Seal, FileKey)>) -> io::Result<Vec<u8>> {
        let mut out = Vec::with_capacity(LEN);
        out.extend_from_slice(MAGIC);
        out.put_u32(if seal.is_some() { SEALED_VERSION } else { VERSION });
        out.put_u32(0);
        out.extend_from_slice(self.id.as_bytes());
        out.extend_from_slice(self.vm.uuid.as_bytes());
        out.put_u64(self.created_us);
        // Names of VMs have at most 63 characters, but a name that QEMU reports may be longer.
        out.put_text(shortened(&self.vm.name, 1024));
        if let Some((seal, key)) = seal {
            out.resize(SEAL_AT, 0);
            seal.encode(&mut out);
            let tag = key.seal(TAG_AT as u64, &out, &mut [])?;
            out.extend_from_slice(&tag);
        }
        out.resize(LEN - 8, 0);
        let sum = checksum(&out);
        out.put_u64(sum);
        Ok(out)
    }

    /// Decodes a superblock. For an encrypted store, returns also which key [`authenticate`] needs.
    ///
    /// # Errors
    /// The superblock is damaged or of a newer version.
    pub fn decode(bytes: &[u8]) -> Result<(Self, Option<Seal>), Flaw> {
        let bad = |at, what| Flaw::bad(Structure::Superblock, at, what);
        let short = || bad(bytes.len() as u64, "it is cut short");
        let mut reader = Reader::new(bytes);
        if reader.array().ok_or_else(short)? != *MAGIC {
            return Err(bad(0, "it has no magic number"));
        }
        let version = reader.u32().ok_or_else(short)?;
        let (content, sum) = bytes.get(..LEN).and_then(|all| all.split_last_chunk::<8>()).ok_or_else(short)?;
        if checksum(content) != u64::from_le_bytes(*sum) {
            return Err(bad(LEN as u64 - 8, "its checksum is wrong"));
        }
        Flaw::check_version(version)?;
        let mut rest = || {
            reader.u32()?;
            let id = Uuid::from_bytes(reader.array()?);
            let uuid = Uuid::from_bytes(reader.array()?);
            let created_us = reader.u64()?;
            let name = reader.text()?.to_owned();
            let seal = match version {
                SEALED_VERSION => Some(Seal::decode(*content.get(SEAL_AT..)?.first_chunk()?)),
                _ => None,
            };
            Some((Self { id, vm: Vm { uuid, name }, created_us }, seal))
        };
        rest().ok_or_else(|| bad(24, "its content makes no sense"))
    }
}

/// Checks that the superblock of an encrypted store was written with `key`.
///
/// # Errors
/// The superblock was changed.
pub fn authenticate(bytes: &[u8], key: &FileKey) -> Result<(), Flaw> {
    let content = bytes.get(..TAG_AT).unwrap_or_default();
    let mut tag = bytes.get(TAG_AT..TAG_AT + TAG_LEN).unwrap_or_default().to_vec();
    let authentic = key.open(TAG_AT as u64, content, &mut tag).map(|_| ());
    authentic.ok_or(Flaw::not_authentic(Structure::Superblock, TAG_AT as u64))
}
