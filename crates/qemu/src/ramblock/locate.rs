//! Finds the RAM blocks of a QEMU that does not report their addresses (7.2).
//!
//! QEMU has a record of each block, `struct RAMBlock`. It holds the numbers that `info ramblock` prints: the block's
//! offset, used and total bytes, next to each other. Soon after them follows the block's name, and a little before
//! them is its address in QEMU. A record is found in QEMU's heap by those three numbers and the name.
//!
//! *Which* of the words before them is the address is not assumed. It is the one word that meets two conditions: in
//! every record it is an address at which the whole length of the block is mapped, and it agrees with `gpa2hva` for
//! every piece of RAM that the guest can see. If there is not exactly one such word, or if a block has no record or
//! two different ones, the result is an error, never a guess.

use super::{RamBlock, list};
use crate::qmp::{Qmp, QmpError};
use rekindle_kernel::maps::{self, Mapping};
use rekindle_kernel::memory;
use rekindle_kernel::process::Process;
use rekindle_pages::PAGE_SIZE;
use std::collections::BTreeSet;
use std::io;

/// Number of words before the three numbers that are checked.
const WORDS_BEFORE: usize = 8;
/// The name begins within this many bytes after the beginning of the three numbers.
const MAX_NAME_DISTANCE_BYTES: usize = 128;
/// Longest name of a block, as in QEMU.
const MAX_NAME_BYTES: usize = 256;
/// Bytes that are read at a time.
const CHUNK_BYTES: u64 = 1 << 20;
/// Overlap of two chunks, so that a record at the border is seen whole.
const OVERLAP_BYTES: u64 = 1024;
/// Mappings larger than this hold no records: they are RAM blocks, or the code cache.
const MAX_SEARCHED_MAPPING_BYTES: u64 = 256 << 20;
const _: () = assert!(8 * WORDS_BEFORE + MAX_NAME_DISTANCE_BYTES + MAX_NAME_BYTES < OVERLAP_BYTES as usize);

/// The words before the three numbers of a record. One of them is the block's address.
type PrecedingWords = [u64; WORDS_BEFORE];

/// Why the RAM blocks of a QEMU were not found.
#[derive(Debug, thiserror::Error)]
pub enum LocateError {
    /// QEMU does not answer, or returns an error.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error("cannot search process {pid} for QEMU's RAM blocks: run as root")]
    Memory {
        pid: u32,
        #[source]
        source: io::Error,
    },
    #[error(
        "this QEMU does not report where its RAM block {id} is, and it was not found; use a newer QEMU (10 reports it)"
    )]
    NotFound { id: String },
    #[error(
        "this QEMU does not report where its RAM blocks are, and {candidates} places are possible where there must be one; \
         use a newer QEMU (10 reports them)"
    )]
    Uncertain { candidates: usize },
    #[error(
        "RAM block {id} should be {bytes} bytes at {address:#x} of process {pid}, but that is not all mapped there"
    )]
    Unmapped {
        id: String,
        /// Length of the block in bytes.
        bytes: u64,
        address: u64,
        pid: u32,
    },
}

/// Returns the RAM blocks of a QEMU, each with its address.
///
/// # Errors
/// [`LocateError`]; a block that cannot be found with certainty is never left out.
pub fn locate(qmp: &mut Qmp, process: Process) -> Result<Vec<RamBlock>, LocateError> {
    /// A guest's firmware resizes blocks (ACPI tables) a few times while it boots, and QEMU's heap changes.
    const ATTEMPTS: usize = 5;
    let mut attempt = 1;
    loop {
        let blocks = list(qmp)?;
        let located = with_addresses(qmp, process, blocks.clone());
        // If the numbers changed in the meantime, a found block may be wrong and a missing one may exist.
        let is_unchanged = list(qmp)? == blocks;
        match located {
            Ok(located) if is_unchanged => return Ok(located),
            Ok(_) if attempt == ATTEMPTS => return Err(LocateError::Uncertain { candidates: 0 }),
            Err(e) if attempt == ATTEMPTS => return Err(e),
            _ => attempt += 1,
        }
    }
}

fn with_addresses(qmp: &mut Qmp, process: Process, mut blocks: Vec<RamBlock>) -> Result<Vec<RamBlock>, LocateError> {
    let pid = process.pid;
    let unreadable = |source| LocateError::Memory { pid, source };
    let maps = maps::of(process).map_err(unreadable)?;
    if blocks.iter().any(|block| block.address.is_none()) {
        let records = find_records(process, &maps, &blocks).map_err(unreadable)?;
        let addresses = certain_addresses(qmp, &records, &blocks, &maps)?;
        for (block, address) in blocks.iter_mut().zip(addresses) {
            block.address = Some(address);
        }
    }
    for block in &blocks {
        let address = block.address.unwrap_or(0);
        if !is_mapped(&maps, address, block.total) {
            return Err(LocateError::Unmapped { id: block.id.clone(), bytes: block.total, address, pid });
        }
    }
    Ok(blocks)
}

/// Returns the address of each block, if exactly one word of the records can be the address.
fn certain_addresses(
    qmp: &mut Qmp,
    records: &[BTreeSet<PrecedingWords>],
    blocks: &[RamBlock],
    maps: &[Mapping],
) -> Result<Vec<u64>, LocateError> {
    let seen_by_guest = addresses_seen_by_guest(qmp)?;
    let mut candidates = Vec::new();
    for word in 0..WORDS_BEFORE {
        if let Some(addresses) = possible_addresses(records, blocks, maps, word)?
            && seen_by_guest.iter().all(|address| addresses.contains(address))
        {
            candidates.push(addresses);
        }
    }
    // If the guest sees no piece of RAM, nothing proves which word is the address.
    if seen_by_guest.is_empty() {
        return Err(LocateError::Uncertain { candidates: 0 });
    }
    let count = candidates.len();
    match candidates.pop() {
        Some(addresses) if count == 1 => Ok(addresses),
        _ => Err(LocateError::Uncertain { candidates: count }),
    }
}

fn is_mapped(maps: &[Mapping], address: u64, bytes: u64) -> bool {
    let parts = maps::covering(maps, &(address..address.saturating_add(bytes)));
    address != 0
        && address.is_multiple_of(PAGE_SIZE as u64)
        && parts.is_some_and(|parts| parts.iter().all(|map| map.readable))
}

/// Searches QEMU's memory for the records of each block.
fn find_records(process: Process, maps: &[Mapping], blocks: &[RamBlock]) -> io::Result<Vec<BTreeSet<PrecedingWords>>> {
    let mut records = vec![BTreeSet::new(); blocks.len()];
    let is_private = |map: &&Mapping| map.readable && map.writable && !map.executable && !map.shared && map.inode == 0;
    let (heap, others): (Vec<_>, Vec<_>) = maps.iter().filter(is_private).partition(|map| map.name == "[heap]");
    for map in heap {
        search_mapping(process, map, blocks, &mut records)?;
    }
    for map in others {
        // The heap has all records, unless QEMU uses another allocator.
        if records.iter().all(|of_block| !of_block.is_empty()) {
            break;
        }
        if map.range.end - map.range.start <= MAX_SEARCHED_MAPPING_BYTES {
            search_mapping(process, map, blocks, &mut records)?;
        }
    }
    Ok(records)
}

fn search_mapping(
    process: Process,
    map: &Mapping,
    blocks: &[RamBlock],
    records: &mut [BTreeSet<PrecedingWords>],
) -> io::Result<()> {
    let mut buffer = vec![0; (CHUNK_BYTES + OVERLAP_BYTES) as usize];
    let mut address = map.range.start;
    while address < map.range.end {
        let length = (map.range.end - address).min(CHUNK_BYTES + OVERLAP_BYTES);
        let chunk = buffer.get_mut(..length as usize).unwrap_or_default();
        read_chunk(process, address, chunk)?;
        search_chunk(chunk, blocks, records);
        address += CHUNK_BYTES;
    }
    Ok(())
}

/// Reads a chunk of QEMU's memory. Pages that QEMU has released in the meantime are read as zero: a heap shrinks and
/// grows.
fn read_chunk(process: Process, address: u64, chunk: &mut [u8]) -> io::Result<()> {
    match memory::read(process, address, chunk) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
            for (page, page_address) in chunk.chunks_mut(PAGE_SIZE).zip((address..).step_by(PAGE_SIZE)) {
                if memory::read(process, page_address, page).is_err() {
                    page.fill(0);
                }
            }
            Ok(())
        }
        result => result,
    }
}

/// Adds the records in a chunk to those of their blocks.
fn search_chunk(chunk: &[u8], blocks: &[RamBlock], records: &mut [BTreeSet<PrecedingWords>]) {
    let (words, _) = chunk.as_chunks::<8>();
    let word = |index: usize| words.get(index).map(|word| u64::from_le_bytes(*word));
    for index in WORDS_BEFORE..words.len() {
        let (Some(offset), Some(used), Some(total)) = (word(index), word(index + 1), word(index + 2)) else { return };
        for (block, block_records) in blocks.iter().zip(records.iter_mut()) {
            let has_numbers = (block.total, block.used, block.offset) == (total, used, offset);
            if has_numbers && is_name_near(chunk.get(8 * index..).unwrap_or_default(), &block.id) {
                let preceding = std::array::from_fn(|number| word(index - WORDS_BEFORE + number).unwrap_or(0));
                block_records.insert(preceding);
            }
        }
    }
}

/// Returns whether the name, with the zero byte that ends it, begins near the start of `bytes`.
fn is_name_near(bytes: &[u8], name: &str) -> bool {
    let near = bytes.get(..(MAX_NAME_DISTANCE_BYTES + MAX_NAME_BYTES).min(bytes.len())).unwrap_or_default();
    let mut candidates = near.windows(name.len() + 1).take(MAX_NAME_DISTANCE_BYTES);
    candidates.any(|candidate| candidate.split_last() == Some((&0, name.as_bytes())))
}

/// Returns the `word` of each block's record, if it can be the address in all of them.
fn possible_addresses(
    records: &[BTreeSet<PrecedingWords>],
    blocks: &[RamBlock],
    maps: &[Mapping],
    word: usize,
) -> Result<Option<Vec<u64>>, LocateError> {
    let mut addresses = Vec::new();
    for (block_records, block) in records.iter().zip(blocks) {
        if block_records.is_empty() {
            return Err(LocateError::NotFound { id: block.id.clone() });
        }
        let values: BTreeSet<_> = block_records.iter().filter_map(|words| words.get(word).copied()).collect();
        match values.first() {
            Some(&value) if values.len() == 1 && is_mapped(maps, value, block.total) => addresses.push(value),
            _ => return Ok(None),
        }
    }
    // Two blocks never have the same address.
    let are_distinct = addresses.iter().collect::<BTreeSet<_>>().len() == addresses.len();
    Ok(are_distinct.then_some(addresses))
}

/// Returns the addresses in QEMU of the blocks that the guest can see: `info mtree -f` lists their pieces, and
/// `gpa2hva` gives the address of each.
fn addresses_seen_by_guest(qmp: &mut Qmp) -> Result<BTreeSet<u64>, LocateError> {
    let text = qmp.human("info mtree -f")?;
    let pieces: BTreeSet<_> = text.lines().filter_map(Piece::parse).collect();
    let mut addresses = BTreeSet::new();
    for Piece { guest_address, offset } in pieces {
        // `None` if the guest has changed its memory map in the meantime.
        let piece_address = host_address(qmp, guest_address)?;
        addresses.extend(piece_address.and_then(|address| address.checked_sub(offset)));
    }
    Ok(addresses)
}

/// Returns the address in QEMU of a guest address; `None` if there is no memory at it. A reply is for example
/// `Host virtual address for 0x1000 (pc.ram) is 0x7f0000001000`.
pub(crate) fn host_address(qmp: &mut Qmp, address: u64) -> Result<Option<u64>, QmpError> {
    let text = qmp.human(&format!("gpa2hva {address:#x}"))?;
    Ok(text.trim().rsplit_once(" is 0x").and_then(|(_, address)| u64::from_str_radix(address, 16).ok()))
}

/// A part of a RAM block at which the guest sees it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Piece {
    guest_address: u64,
    /// Offset in the block.
    offset: u64,
}

impl Piece {
    /// Parses a line such as `0000000000100000-000000000fffffff (prio 0, ram): ram @0000000000100000`.
    fn parse(line: &str) -> Option<Self> {
        let (range, description) = line.trim().split_once(" (prio ")?;
        let (start, _) = range.split_once('-')?;
        let (kind, name) = description.split_once("): ")?;
        if !matches!(kind.rsplit(' ').next(), Some("ram" | "rom")) {
            return None;
        }
        let hex = |word: &str| u64::from_str_radix(word, 16).ok();
        // Under KVM a remark may follow the name and offset.
        let offset = match name.split_once(" @") {
            Some((_, offset_and_remark)) => hex(offset_and_remark.split(' ').next()?)?,
            None => 0,
        };
        Some(Self { guest_address: hex(start)?, offset })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_the_memory_map() {
        let piece = |guest_address, offset| Some(Piece { guest_address, offset });
        let line = "  0000000000100000-000000000fffffff (prio 0, ram): ram @0000000000100000 KVM";
        assert_eq!(Piece::parse(line), piece(0x10_0000, 0x10_0000));
        let line = "  00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram";
        assert_eq!(Piece::parse(line), piece(0xfd00_0000, 0));
        assert_eq!(Piece::parse("  00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem"), None);
        assert_eq!(Piece::parse(" Root memory region: system"), None);
    }

    #[test]
    fn records_are_found_by_numbers_and_name_and_a_guess_is_refused() {
        let page = PAGE_SIZE as u64;
        let block = |id: &str, offset, total| RamBlock {
            id: id.into(),
            used: page,
            total,
            page_size: page,
            offset,
            address: None,
        };
        let blocks = [block("ram", 0, 4 * page), block("vga", 4 * page, page)];
        let mut memory = vec![0u8; 4096];
        let mut put_record = |start: usize, words: &[u64], name: &str| {
            let mut record: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            record.extend([0; 4]);
            record.extend(name.as_bytes());
            memory[start..start + record.len()].copy_from_slice(&record);
        };
        put_record(512, &[0x1_0000, 0, 0, page, 4 * page], "ram");
        put_record(1600, &[0x2_0000, 0, 4 * page, page, page], "vga");
        // The numbers alone are no record.
        put_record(2400, &[0x5_0000, 0, 0, page, 4 * page], "rom");
        let mut records = vec![BTreeSet::new(); 2];
        search_chunk(&memory, &blocks, &mut records);
        assert_eq!(records.iter().map(BTreeSet::len).collect::<Vec<_>>(), [1, 1]);
        let mapping = |range| Mapping {
            range,
            readable: true,
            writable: true,
            executable: false,
            shared: false,
            offset: 0,
            inode: 0,
            name: String::new(),
        };
        let maps = [mapping(0x1_0000..0x1_4000), mapping(0x2_0000..0x2_1000)];
        let word = WORDS_BEFORE - 2;
        let addresses = possible_addresses(&records, &blocks, &maps, word).unwrap();
        assert_eq!(addresses, Some(vec![0x1_0000, 0x2_0000]));
        assert_eq!(possible_addresses(&records, &blocks, &maps, word + 1).unwrap(), None);
        assert_eq!(possible_addresses(&records, &blocks, &maps[..1], word).unwrap(), None, "not mapped");
        records[1] = BTreeSet::new();
        let e = possible_addresses(&records, &blocks, &maps, word).unwrap_err();
        assert!(matches!(e, LocateError::NotFound { id } if id == "vga"));
    }
}
