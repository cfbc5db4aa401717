//! Log entries of an encrypted store: a header, then the whole entry ([`super::entry`]), sealed.
//!
//! ```text
//! header: magic, version, reserved, key id, salt; checksum | entry, encrypted | tag
//! ```

use super::codec::{Reader, Writer};
use super::{Flaw, SEALED_VERSION, Structure, checksum};
use crate::sealing::{FileKey, SEAL_LEN, Seal, TAG_LEN};
use std::io;

const MAGIC: &[u8; 8] = b"RKSEALED";
const HEADER_LEN: usize = 16 + SEAL_LEN + 8;
/// Bytes that sealing adds to an entry.
pub const OVERHEAD: u64 = (HEADER_LEN + TAG_LEN) as u64;

/// Seals an entry.
///
/// # Errors
/// The entry cannot be encrypted.
pub fn seal(seal: Seal, key: &FileKey, entry: &[u8]) -> io::Result<Vec<u8>> {
    let mut out = Vec::with_capacity(HEADER_LEN + entry.len() + TAG_LEN);
    out.extend_from_slice(MAGIC);
    out.put_u32(SEALED_VERSION);
    out.put_u32(0);
    seal.encode(&mut out);
    let sum = checksum(&out);
    out.put_u64(sum);
    out.extend_from_slice(entry);
    let (header, content) = out.split_at_mut(HEADER_LEN);
    let tag = key.seal(HEADER_LEN as u64, header, content)?;
    out.extend_from_slice(&tag);
    Ok(out)
}

/// Returns which key an entry is sealed with; `None` if it is not sealed.
///
/// # Errors
/// The header is damaged or of a newer version.
pub fn decode_header(bytes: &[u8]) -> Result<Option<Seal>, Flaw> {
    let bad = |at, what| Flaw::bad(Structure::EntryHeader, at, what);
    let short = || bad(bytes.len() as u64, "it is cut short");
    let mut reader = Reader::new(bytes);
    if reader.array().ok_or_else(short)? != *MAGIC {
        return Ok(None);
    }
    let (header, _) = bytes.split_at_checked(HEADER_LEN).ok_or_else(short)?;
    let (summed, sum) = header.split_last_chunk::<8>().ok_or_else(short)?;
    if checksum(summed) != u64::from_le_bytes(*sum) {
        return Err(bad(summed.len() as u64, "its checksum is wrong"));
    }
    Flaw::check_version(reader.u32().ok_or_else(short)?)?;
    reader.u32().ok_or_else(short)?;
    reader.array().map(Seal::decode).ok_or_else(short).map(Some)
}

/// Returns the entry in a sealed entry, whose header was checked.
///
/// # Errors
/// The entry was changed, or sealed for another place.
pub fn open(key: &FileKey, bytes: Vec<u8>) -> Result<Vec<u8>, Flaw> {
    let header = bytes.get(..HEADER_LEN).unwrap_or_default().to_vec();
    key.open_rest(HEADER_LEN as u64, &header, bytes, HEADER_LEN).ok_or(Flaw::not_authentic(Structure::Entry, 0))
}
