//! A small durable record in a file of two slots.
//!
//! Each change is written to the older slot, with a count and a checksum, so that a crash at any moment leaves one of
//! the two records. The redo log (`docs/disk-epochs.md`, Files) and the overlays of a disk keep their state like this.

use rekindle_kernel::durable_file::DurableFile;
use rekindle_kernel::uring::Buffer;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io;
use xxhash_rust::xxh3::xxh3_128;

/// Bytes of a slot: a page, as direct I/O needs it.
pub const SLOT_BYTES: u64 = 4096;
/// Bytes of the checksum at the end of a slot.
pub(crate) const CHECKSUM_BYTES: usize = 16;
/// Bytes of a slot around the JSON text: magic, count, length and checksum.
const OVERHEAD_BYTES: usize = 8 + 8 + 4 + CHECKSUM_BYTES;

/// What a slot can hold. Its JSON has the field `format`.
pub trait SlotRecord: Serialize + DeserializeOwned {
    const MAGIC: &'static [u8; 8];
    /// The newest format that this version can read.
    const FORMAT: u32;
}

/// A record, and its count: the newer of two slots has the higher count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counted<S> {
    pub count: u64,
    pub state: S,
}

/// The format field alone, to report the format of a newer version.
#[derive(Deserialize)]
struct Format {
    format: u32,
}

/// Returns whether the record fits into a slot.
pub fn fits_into_slot(state: &impl SlotRecord) -> bool {
    serde_json::to_vec(state).is_ok_and(|json| json.len() + OVERHEAD_BYTES <= SLOT_BYTES as usize)
}

/// Returns where in the file the slot of this count is.
#[must_use]
pub fn slot_offset(count: u64) -> u64 {
    count % 2 * SLOT_BYTES
}

/// Returns the content of a slot with this record.
///
/// # Errors
/// If it does not fit.
pub fn write_slot<S: SlotRecord>(state: &S, count: u64) -> io::Result<Buffer> {
    let json = serde_json::to_vec(state)?;
    let mut page = Buffer::new(SLOT_BYTES as usize);
    if json.len() + OVERHEAD_BYTES > page.len() {
        return Err(io::Error::other("it does not fit into its slot"));
    }
    let length = (json.len() as u32).to_le_bytes();
    let content = [&S::MAGIC[..], &count.to_le_bytes(), &length, &json].concat();
    page.iter_mut().zip(content).for_each(|(target, byte)| *target = byte);
    let (body, sum) = page.split_at_mut(SLOT_BYTES as usize - CHECKSUM_BYTES);
    sum.copy_from_slice(&xxh3_128(body).to_le_bytes());
    Ok(page)
}

/// Makes the newest record of a file durable, before anything is done that relies on it. `slots`: the content of the file;
/// `count`: of the newest record.
///
/// The process that wrote the record may have ended, or its sync may have failed, before the record was durable. After
/// a failed sync the next one may succeed without writing anything, so the record is written again.
///
/// # Errors
/// Errors of writing and syncing. Either of the two records is then the newest after a power failure, as before.
pub fn confirm_newest(file: &impl DurableFile, slots: &[u8], count: u64) -> io::Result<()> {
    let offset = slot_offset(count);
    let slot = slots.get(offset as usize..(offset + SLOT_BYTES) as usize).ok_or(io::ErrorKind::InvalidData)?;
    match file.write_at(slot, offset) {
        // Some file systems need space also for bytes that a file has already. A guest must be able to start then.
        Err(e) if e.kind() != io::ErrorKind::StorageFull => Err(e),
        _ => file.sync(),
    }
}

/// Returns the record in a slot, if the slot is valid.
pub(crate) fn read_slot<S: SlotRecord>(page: &[u8]) -> Option<Counted<S>> {
    let (count, json) = read_json::<S>(page)?;
    Some(Counted { count, state: serde_json::from_slice(json).ok()? })
}

/// Returns the count and the JSON text of a slot, if its checksum is valid.
fn read_json<S: SlotRecord>(page: &[u8]) -> Option<(u64, &[u8])> {
    let (body, sum) = page.get(..SLOT_BYTES as usize)?.split_at(SLOT_BYTES as usize - CHECKSUM_BYTES);
    let after_magic = body.strip_prefix(S::MAGIC)?;
    if xxh3_128(body).to_le_bytes() != sum {
        return None;
    }
    let (count, after_count) = after_magic.split_first_chunk::<8>()?;
    let (length, after_length) = after_count.split_first_chunk::<4>()?;
    let json = after_length.get(..u32::from_le_bytes(*length) as usize)?;
    Some((u64::from_le_bytes(*count), json))
}

/// Returns the newest valid record in a file of slots.
///
/// # Errors
/// The format, if a newer version wrote the newest slot. The older record must not be used then.
pub fn newest_slot<S: SlotRecord>(bytes: &[u8]) -> Result<Option<Counted<S>>, u32> {
    let slots = || bytes.chunks(SLOT_BYTES as usize);
    let formats =
        slots().filter_map(read_json::<S>).filter_map(|(_, json)| serde_json::from_slice::<Format>(json).ok());
    match formats.map(|Format { format }| format).max() {
        Some(format) if format > S::FORMAT => Err(format),
        _ => Ok(slots().filter_map(read_slot).max_by_key(|slot| slot.count)),
    }
}
