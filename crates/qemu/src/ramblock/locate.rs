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

/// Why the RAM blocks of a QEMU were not found.
#[derive(Debug, thiserror::Error)]
pub enum LocateError {
    /// QEMU does not answer, or returns an error.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// QEMU's memory cannot be read.
    #[error("cannot search process {pid} for QEMU's RAM blocks: run as root")]
    Memory {
        /// QEMU's process number.
        pid: u32,
        /// The error of reading `/proc` or the memory.
        #[source]
        source: io::Error,
    },
    /// No record of a block was found.
    #[error(
        "this QEMU does not report where its RAM block {id} is, and it was not found; use a newer QEMU (10 reports it)"
    )]
    NotFound {
        /// Name of the block.
        id: String,
    },
    /// The records do not show with certainty which word is the address.
    #[error(
        "this QEMU does not report where its RAM blocks are, and {candidates} places are possible where there must be one; \
         use a newer QEMU (10 reports them)"
    )]
    Uncertain {
        /// Number of words that could be the address.
        candidates: usize,
    },
    /// An address was found, but the block's whole length is not mapped at it.
    #[error(
        "RAM block {id} should be {bytes} bytes at {address:#x} of process {pid}, but that is not all mapped there"
    )]
    Unmapped {
        /// Name of the block.
        id: String,
        /// Length of the block in bytes.
        bytes: u64,
        /// Address in QEMU.
        address: u64,
        /// QEMU's process number.
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
        let found = with_addresses(qmp, process, blocks.clone());
        // If the numbers changed in the meantime, a found block may be wrong and a missing one may exist.
        let is_sound = list(qmp)? == blocks;
        match found {
            Ok(blocks) if is_sound => return Ok(blocks),
            Ok(_) if attempt == ATTEMPTS => return Err(LocateError::Uncertain { candidates: 0 }),
            Err(e) if attempt == ATTEMPTS => return Err(e),
            _ => attempt += 1,
        }
    }
}

fn with_addresses(qmp: &mut Qmp, process: Process, mut blocks: Vec<RamBlock>) -> Result<Vec<RamBlock>, LocateError> {
    let pid = process.pid;
    let memory = |source| LocateError::Memory { pid, source };
    let maps = maps::of(process).map_err(memory)?;
    if blocks.iter().any(|block| block.address.is_none()) {
        let records = records(process, &maps, &blocks).map_err(memory)?;
        let seen = seen_by_guest(qmp)?;
        let mut possible = Vec::new();
        for word in 0..WORDS_BEFORE {
            if let Some(addresses) = addresses(&records, &blocks, &maps, word)?
                && seen.iter().all(|base| addresses.contains(base))
            {
                possible.push(addresses);
            }
        }
        // If the guest sees no piece of RAM, nothing proves which word is the address.
        match (possible.as_slice(), seen.is_empty()) {
            ([addresses], false) => {
                for (block, address) in blocks.iter_mut().zip(addresses) {
                    block.address = Some(*address);
                }
            }
            (_, true) => return Err(LocateError::Uncertain { candidates: 0 }),
            (several, false) => return Err(LocateError::Uncertain { candidates: several.len() }),
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

fn is_mapped(maps: &[Mapping], address: u64, bytes: u64) -> bool {
    let parts = maps::covering(maps, &(address..address.saturating_add(bytes)));
    address != 0
        && address.is_multiple_of(PAGE_SIZE as u64)
        && parts.is_some_and(|parts| parts.iter().all(|map| map.readable))
}

/// Number of words before the three numbers that are checked.
const WORDS_BEFORE: usize = 8;
/// The name begins within this many bytes after the beginning of the three numbers.
const NAME_WITHIN: usize = 128;
/// Longest name of a block, as in QEMU.
const NAME: usize = 256;
/// Bytes that are read at a time.
const CHUNK: u64 = 1 << 20;
/// Overlap of two pieces in bytes, so that a record at the border is seen whole.
const OVERLAP: u64 = 1024;
/// Mappings larger than this hold no records: they are RAM blocks, or the code cache.
const LARGEST: u64 = 256 << 20;
const _: () = assert!(8 * WORDS_BEFORE + NAME_WITHIN + NAME < OVERLAP as usize);

/// The words before the three numbers of a record.
type Before = [u64; WORDS_BEFORE];

/// Returns the records found for each block.
fn records(process: Process, maps: &[Mapping], blocks: &[RamBlock]) -> io::Result<Vec<BTreeSet<Before>>> {
    let mut found = vec![BTreeSet::new(); blocks.len()];
    let private = |map: &&Mapping| map.readable && map.writable && !map.executable && !map.shared && map.inode == 0;
    let (heap, others): (Vec<_>, Vec<_>) = maps.iter().filter(private).partition(|map| map.name == "[heap]");
    for map in heap.into_iter().chain(others) {
        let length = map.range.end - map.range.start;
        if length > LARGEST && map.name != "[heap]" {
            continue;
        }
        // The heap has all records, unless QEMU uses another allocator.
        if map.name != "[heap]" && found.iter().all(|records| !records.is_empty()) {
            break;
        }
        let mut at = map.range.start;
        let mut buffer = vec![0; (CHUNK + OVERLAP) as usize];
        while at < map.range.end {
            let some = (map.range.end - at).min(CHUNK + OVERLAP);
            let chunk = buffer.get_mut(..some as usize).unwrap_or_default();
            match memory::read(process, at, chunk) {
                Ok(()) => {}
                // QEMU released a part in the meantime: a heap shrinks and grows.
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                    for (page, address) in chunk.chunks_mut(PAGE_SIZE).zip((at..).step_by(PAGE_SIZE)) {
                        if memory::read(process, address, page).is_err() {
                            page.fill(0);
                        }
                    }
                }
                Err(e) => return Err(e),
            }
            in_chunk(chunk, blocks, &mut found);
            at += CHUNK;
        }
    }
    Ok(found)
}

fn in_chunk(chunk: &[u8], blocks: &[RamBlock], found: &mut [BTreeSet<Before>]) {
    let (words, _) = chunk.as_chunks::<8>();
    let word = |at: usize| words.get(at).map(|word| u64::from_le_bytes(*word));
    for at in WORDS_BEFORE..words.len() {
        let (Some(offset), Some(used), Some(total)) = (word(at), word(at + 1), word(at + 2)) else { return };
        for (block, found) in blocks.iter().zip(found.iter_mut()) {
            if (block.total, block.used, block.offset) != (total, used, offset) {
                continue;
            }
            let after = chunk.get(8 * at..).unwrap_or_default();
            let after = after.get(..(NAME_WITHIN + NAME).min(after.len())).unwrap_or_default();
            let named = after
                .windows(block.id.len() + 1)
                .take(NAME_WITHIN)
                .any(|text| text.split_last() == Some((&0, block.id.as_bytes())));
            if named {
                let before = std::array::from_fn(|n| word(at - WORDS_BEFORE + n).unwrap_or(0));
                found.insert(before);
            }
        }
    }
}

/// Returns the `word` of each block's record, if it can be the address in all of them.
fn addresses(
    records: &[BTreeSet<Before>],
    blocks: &[RamBlock],
    maps: &[Mapping],
    word: usize,
) -> Result<Option<Vec<u64>>, LocateError> {
    let mut addresses = Vec::new();
    for (records, block) in records.iter().zip(blocks) {
        if records.is_empty() {
            return Err(LocateError::NotFound { id: block.id.clone() });
        }
        let values: BTreeSet<_> = records.iter().filter_map(|before| before.get(word).copied()).collect();
        match values.first() {
            Some(&value) if values.len() == 1 && is_mapped(maps, value, block.total) => addresses.push(value),
            _ => return Ok(None),
        }
    }
    // Two blocks never have the same address.
    let different: BTreeSet<_> = addresses.iter().collect();
    Ok((different.len() == addresses.len()).then_some(addresses))
}

/// Returns the addresses in QEMU of the blocks that the guest can see: `info mtree -f` lists their pieces, and
/// `gpa2hva` gives the address of each.
fn seen_by_guest(qmp: &mut Qmp) -> Result<BTreeSet<u64>, LocateError> {
    let text = qmp.human("info mtree -f")?;
    let pieces: BTreeSet<_> = text.lines().filter_map(piece).collect();
    let mut bases = BTreeSet::new();
    for (address, offset) in pieces {
        // `None` if the guest has changed its memory map in the meantime.
        let host = host_address(qmp, address)?;
        bases.extend(host.and_then(|host| host.checked_sub(offset)));
    }
    Ok(bases)
}

/// Returns the address in QEMU of a guest address; `None` if there is no memory at it. A reply is for example
/// `Host virtual address for 0x1000 (pc.ram) is 0x7f0000001000`.
pub(crate) fn host_address(qmp: &mut Qmp, address: u64) -> Result<Option<u64>, QmpError> {
    let text = qmp.human(&format!("gpa2hva {address:#x}"))?;
    Ok(text.trim().rsplit_once(" is 0x").and_then(|(_, host)| u64::from_str_radix(host, 16).ok()))
}

/// Parses the guest address and the offset in the block from a line such as
/// `0000000000100000-000000000fffffff (prio 0, ram): ram @0000000000100000`.
fn piece(line: &str) -> Option<(u64, u64)> {
    let (range, rest) = line.trim().split_once(" (prio ")?;
    let (start, _) = range.split_once('-')?;
    let (kind, name) = rest.split_once("): ")?;
    if !matches!(kind.rsplit(' ').next(), Some("ram" | "rom")) {
        return None;
    }
    let hex = |word: &str| u64::from_str_radix(word, 16).ok();
    // Under KVM a remark may follow the name and offset.
    let offset = match name.split_once(" @") {
        Some((_, rest)) => hex(rest.split(' ').next()?)?,
        None => 0,
    };
    Some((hex(start)?, offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_the_memory_map() {
        let line = "  0000000000100000-000000000fffffff (prio 0, ram): ram @0000000000100000 KVM";
        assert_eq!(piece(line), Some((0x10_0000, 0x10_0000)));
        assert_eq!(piece("  00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram"), Some((0xfd00_0000, 0)));
        assert_eq!(piece("  00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem"), None);
        assert_eq!(piece(" Root memory region: system"), None);
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
        let mut put = |at: usize, words: &[u64], name: &str| {
            for (n, word) in words.iter().enumerate() {
                memory[at + 8 * n..at + 8 * n + 8].copy_from_slice(&word.to_le_bytes());
            }
            let at = at + 8 * words.len() + 4;
            memory[at..at + name.len()].copy_from_slice(name.as_bytes());
        };
        put(512, &[0x1_0000, 0, 0, page, 4 * page], "ram");
        put(1600, &[0x2_0000, 0, 4 * page, page, page], "vga");
        // The numbers alone are no record.
        put(2400, &[0x5_0000, 0, 0, page, 4 * page], "rom");
        let mut found = vec![BTreeSet::new(); 2];
        in_chunk(&memory, &blocks, &mut found);
        assert_eq!(found.iter().map(BTreeSet::len).collect::<Vec<_>>(), [1, 1]);
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
        assert_eq!(addresses(&found, &blocks, &maps, word).unwrap(), Some(vec![0x1_0000, 0x2_0000]));
        assert_eq!(addresses(&found, &blocks, &maps, word + 1).unwrap(), None);
        assert_eq!(addresses(&found, &blocks, &maps[..1], word).unwrap(), None, "not mapped");
        found[1] = BTreeSet::new();
        let e = addresses(&found, &blocks, &maps, word).unwrap_err();
        assert!(matches!(e, LocateError::NotFound { id } if id == "vga"));
    }
}
