//! The superblock, which identifies a store and its VM.

use super::codec::{Reader, Writer, shortened};
use super::{Flaw, Structure, VERSION, checksum};
use crate::types::Vm;
use uuid::Uuid;

const MAGIC: &[u8; 16] = b"REKINDLE STORE\n\0";
/// Bytes of the superblock's file.
pub const LEN: usize = 4096;

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
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(LEN);
        out.extend_from_slice(MAGIC);
        out.put_u32(VERSION);
        out.put_u32(0);
        out.extend_from_slice(self.id.as_bytes());
        out.extend_from_slice(self.vm.uuid.as_bytes());
        out.put_u64(self.created_us);
        // Names of VMs have at most 63 characters, but a name that QEMU reports may be longer.
        out.put_text(shortened(&self.vm.name, 1024));
        out.resize(LEN - 8, 0);
        let sum = checksum(&out);
        out.put_u64(sum);
        out
    }

    /// Decodes a superblock.
    ///
    /// # Errors
    /// The superblock is damaged or of a newer version.
    pub fn decode(bytes: &[u8]) -> Result<Self, Flaw> {
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
            Some(Self { id, vm: Vm { uuid, name }, created_us })
        };
        rest().ok_or_else(|| bad(24, "its content makes no sense"))
    }
}
