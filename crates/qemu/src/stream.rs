//! QEMU's migration stream, as far as Rekindle writes and checks it. ([`crate::incoming`] reads a stream with all of
//! the RAM.)
//!
//! `xen-save-devices-state` writes a stream that holds every device and no RAM block:
//!
//! ```text
//! "QEVM" version=3 | section (FULL) per device ... | EOF
//! ```
//!
//! A guest that resumes with that stream alone would find its firmware, ACPI tables and video memory empty. Therefore
//! the blocks that are not shared (all except the main RAM) are put in front, as QEMU's own `ram` section in the form
//! that QEMU writes with the capability `x-ignore-shared`:
//!
//! ```text
//! "QEVM" version=3
//! START id "ram" instance=0 version=4 | total+MEM_SIZE, per block: name, used, address | EOS | FOOTER id
//! END   id | per page: offset+flags [, name], 4096 bytes or fill byte                  | EOS | FOOTER id
//! the devices ...
//! ```
//!
//! All numbers are big-endian (`docs/devel/migration/main.rst` and `migration/{savevm,ram}.c` of QEMU). The address
//! is only used for shared blocks, of which we list none. QEMU reads a stream while it arrives. Therefore the `ram`
//! section can be sent while the guest still runs, and later versions of its pages before the section ends.

use rekindle_pages::{PAGE_SIZE, Page};
use std::collections::BTreeMap;

/// Magic and version, with which every stream starts.
pub const HEADER: [u8; 8] = [b'Q', b'E', b'V', b'M', 0, 0, 0, 3];

pub(crate) const SECTION_START: u8 = 1;
pub(crate) const SECTION_PART: u8 = 2;
pub(crate) const SECTION_END: u8 = 3;
const SUBSECTION: u8 = 5;
const SECTION_DESCRIPTION: u8 = 6;
pub(crate) const SECTION_CONFIGURATION: u8 = 7;
pub(crate) const SECTION_FOOTER: u8 = 0x7e;
/// Section type that ends a stream, as its last byte.
pub const END_OF_STREAM: u8 = 0;
pub(crate) const RAM_VERSION: u32 = 4;
/// A description of the stream without content. QEMU expects one after [`END_OF_STREAM`] unless it was started with
/// `-machine suppress-vmdesc=on`, and ignores what it contains.
pub const EMPTY_DESCRIPTION: [u8; 5] = [SECTION_DESCRIPTION, 0, 0, 0, 0];
/// Section number of our `ram` section. QEMU numbers its sections upwards from 0; ours only has to differ.
const RAM_SECTION_ID: u32 = 0x7fff_0001;

pub(crate) const FLAG_ZERO: u64 = 0x02;
pub(crate) const FLAG_MEM_SIZE: u64 = 0x04;
pub(crate) const FLAG_PAGE: u64 = 0x08;
pub(crate) const FLAG_EOS: u64 = 0x10;
pub(crate) const FLAG_CONTINUE: u64 = 0x20;
pub(crate) const FLAGS: u64 = 0xfff;

/// Why a stream cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    #[error("the device state does not start as a QEMU stream of version 3")]
    Header,
    #[error("the device state is cut short: it has {len} bytes and no end mark")]
    CutShort {
        /// Length of the stream in bytes.
        len: usize,
    },
    #[error("the RAM section of the stream is odd at byte {at}: {what}")]
    Ram {
        /// Position in the stream, in bytes.
        at: usize,
        /// The unexpected part.
        what: &'static str,
    },
}

/// Checks that `stream` is complete, and returns the part after the header.
///
/// # Errors
/// [`StreamError::Header`] if it is not a QEMU stream, and [`StreamError::CutShort`] if it has no end mark.
pub fn check(stream: &[u8]) -> Result<&[u8], StreamError> {
    let body = stream.strip_prefix(&HEADER).ok_or(StreamError::Header)?;
    match body.last() {
        Some(&END_OF_STREAM) => Ok(body),
        _ => Err(StreamError::CutShort { len: stream.len() }),
    }
}

/// Returns the guest's address of its VM generation ID, from the section of the device `vmgenid`. `None` if there is
/// no such device, or if the firmware has not assigned an address yet.
pub fn generation_address(devices: &[u8]) -> Option<u64> {
    // Name with its length, instance, version; then follow the address and the section's end.
    const SECTION_BEGINNING: &[u8] = b"\x07vmgenid\0\0\0\0\0\0\0\x01";
    let mut addresses = devices.windows(SECTION_BEGINNING.len() + 9).filter_map(|section| {
        let (address, after) = section.strip_prefix(SECTION_BEGINNING)?.split_first_chunk::<8>()?;
        (after.first() == Some(&SECTION_FOOTER)).then(|| u64::from_le_bytes(*address))
    });
    addresses.next().filter(|address| *address != 0)
}

/// Writes the configuration section: the machine type, e.g. `pc-q35-10.0`. QEMU expects it after the header unless it
/// was started with `-global migration.send-configuration=off`.
pub fn configuration(out: &mut Vec<u8>, machine: &str) {
    let machine = machine.as_bytes().get(..machine.len().min(255)).unwrap_or_default();
    out.push(SECTION_CONFIGURATION);
    out.extend((machine.len() as u32).to_be_bytes());
    out.extend(machine);
}

/// Writes the configuration section for a QEMU with the capability `x-ignore-shared`. Such a QEMU rejects a section that
/// does not name this capability.
pub fn configuration_ignoring_shared(out: &mut Vec<u8>, machine: &str) {
    configuration(out, machine);
    out.push(SUBSECTION);
    put_name(out, "configuration/capabilities");
    // Version of the subsection, number of capabilities.
    out.extend([1u32, 1].map(u32::to_be_bytes).as_flattened());
    put_name(out, "x-ignore-shared");
}

/// Writer of the `ram` section with the blocks that are not shared.
#[derive(Debug, Default)]
pub struct RamSection {
    /// The last page's block: a page of the same block does not repeat its name.
    last_block: Option<String>,
}

impl RamSection {
    /// Writes the start of the section, with the blocks `(name, bytes in use)`. For a QEMU with `x-ignore-shared`.
    pub fn start<'a>(out: &mut Vec<u8>, blocks: impl Iterator<Item = (&'a str, u64)> + Clone) -> Self {
        Self::begin(out, blocks, TableForm::WithAddresses)
    }

    /// Writes the start of the section for a QEMU without capabilities: `blocks` must list all of its blocks.
    pub fn start_plain<'a>(out: &mut Vec<u8>, blocks: impl Iterator<Item = (&'a str, u64)> + Clone) -> Self {
        Self::begin(out, blocks, TableForm::Plain)
    }

    fn begin<'a>(out: &mut Vec<u8>, blocks: impl Iterator<Item = (&'a str, u64)> + Clone, form: TableForm) -> Self {
        out.push(SECTION_START);
        out.extend(RAM_SECTION_ID.to_be_bytes());
        put_name(out, "ram");
        out.extend(0u32.to_be_bytes());
        out.extend(RAM_VERSION.to_be_bytes());
        let total: u64 = blocks.clone().map(|(_, used)| used).sum();
        out.extend((total | FLAG_MEM_SIZE).to_be_bytes());
        for (name, used) in blocks {
            put_name(out, name);
            out.extend(used.to_be_bytes());
            if form == TableForm::WithAddresses {
                out.extend(0u64.to_be_bytes());
            }
        }
        out.extend(FLAG_EOS.to_be_bytes());
        put_footer(out);
        out.push(SECTION_END);
        out.extend(RAM_SECTION_ID.to_be_bytes());
        Self { last_block: None }
    }

    /// Writes one page of `block` at byte `offset`. A later version of the same page replaces an earlier one.
    pub fn page(&mut self, out: &mut Vec<u8>, block: &str, offset: u64, content: &Page) {
        // A page of zeroes is written as a flag and its fill byte.
        let is_zero = content.iter().all(|&byte| byte == 0);
        let kind = if is_zero { FLAG_ZERO } else { FLAG_PAGE };
        let is_same_block = self.last_block.as_deref() == Some(block);
        let flags = kind | if is_same_block { FLAG_CONTINUE } else { 0 };
        out.extend((offset | flags).to_be_bytes());
        if !is_same_block {
            put_name(out, block);
            self.last_block = Some(block.to_owned());
        }
        if is_zero {
            out.push(0);
        } else {
            out.extend(content);
        }
    }

    /// Writes the end of the section.
    pub fn end(self, out: &mut Vec<u8>) {
        out.extend(FLAG_EOS.to_be_bytes());
        put_footer(out);
    }
}

/// The form of the block table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TableForm {
    /// As QEMU writes it with `x-ignore-shared`: an address follows each length.
    WithAddresses,
    /// As QEMU writes it without capabilities.
    Plain,
}

fn put_name(out: &mut Vec<u8>, name: &str) {
    // QEMU stores block names in 256 bytes, and their length in one byte.
    let name = name.as_bytes().get(..name.len().min(255)).unwrap_or_default();
    out.push(name.len() as u8);
    out.extend(name);
}

fn put_footer(out: &mut Vec<u8>) {
    out.push(SECTION_FOOTER);
    out.extend(RAM_SECTION_ID.to_be_bytes());
}

/// RAM blocks of a stream by name.
pub type StreamBlocks = BTreeMap<String, StreamBlock>;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StreamBlock {
    /// Bytes in use.
    pub used: u64,
    /// The non-zero pages by byte offset.
    pub pages: BTreeMap<u64, Vec<u8>>,
}

/// Returns the blocks in the `ram` section at the start of a stream. Reads what [`RamSection`] writes, and what QEMU
/// writes with `x-ignore-shared` (and without a configuration section).
///
/// # Errors
/// [`StreamError`] if the stream has another form or is cut short.
pub fn ram_blocks(stream: &[u8]) -> Result<StreamBlocks, StreamError> {
    let mut reader = RamReader { stream, position: 0, blocks: StreamBlocks::new(), current_block: String::new() };
    if reader.bytes(HEADER.len())? != HEADER {
        return Err(StreamError::Header);
    }
    loop {
        match reader.u8()? {
            SECTION_START => {
                reader.bytes(4)?;
                if reader.name()? != "ram" {
                    return Err(reader.unexpected("another section before it"));
                }
                reader.bytes(8)?;
            }
            SECTION_PART | SECTION_END => {
                reader.bytes(4)?;
            }
            _ => return Ok(reader.blocks),
        }
        reader.section_content()?;
        if reader.u8()? != SECTION_FOOTER {
            return Err(reader.unexpected("no footer"));
        }
        reader.bytes(4)?;
    }
}

/// A stream in memory, with the RAM blocks that were read from it so far.
struct RamReader<'a> {
    stream: &'a [u8],
    /// Number of bytes that were read.
    position: usize,
    blocks: StreamBlocks,
    /// Name of the last page's block.
    current_block: String,
}

impl<'a> RamReader<'a> {
    /// Reads the words of one section of RAM, up to its end mark.
    fn section_content(&mut self) -> Result<(), StreamError> {
        loop {
            let word = self.u64()?;
            let (offset, flags) = (word & !FLAGS, word & FLAGS);
            if flags & (FLAG_PAGE | FLAG_ZERO) != 0 && flags & FLAG_CONTINUE == 0 {
                self.current_block = self.name()?;
            }
            match flags & !FLAG_CONTINUE {
                FLAG_EOS => return Ok(()),
                FLAG_MEM_SIZE => self.block_table(offset)?,
                FLAG_PAGE => {
                    let content = self.bytes(PAGE_SIZE)?.to_vec();
                    self.put_page(offset, content)?;
                }
                FLAG_ZERO => {
                    let content = vec![self.u8()?; PAGE_SIZE];
                    self.put_page(offset, content)?;
                }
                _ => return Err(self.unexpected("flags that nothing here writes")),
            }
        }
    }

    /// Reads the table of blocks that have `total_bytes` together.
    fn block_table(&mut self, total_bytes: u64) -> Result<(), StreamError> {
        let mut remaining_bytes = total_bytes;
        while remaining_bytes > 0 {
            let name = self.name()?;
            let used = self.u64()?;
            // The block's address.
            self.u64()?;
            let too_large = self.unexpected("sizes do not add up");
            remaining_bytes = remaining_bytes.checked_sub(used).ok_or(too_large)?;
            self.blocks.insert(name, StreamBlock { used, pages: BTreeMap::new() });
        }
        Ok(())
    }

    fn put_page(&mut self, offset: u64, content: Vec<u8>) -> Result<(), StreamError> {
        let unknown_block = self.unexpected("a page of an unknown block");
        let block = self.blocks.get_mut(&self.current_block).ok_or(unknown_block)?;
        if content.iter().all(|&byte| byte == 0) {
            block.pages.remove(&offset);
        } else {
            block.pages.insert(offset, content);
        }
        Ok(())
    }

    fn unexpected(&self, what: &'static str) -> StreamError {
        StreamError::Ram { at: self.position, what }
    }

    fn bytes(&mut self, count: usize) -> Result<&'a [u8], StreamError> {
        let bytes = self.stream.get(self.position..).and_then(|unread| unread.get(..count));
        let bytes = bytes.ok_or(StreamError::CutShort { len: self.stream.len() })?;
        self.position += count;
        Ok(bytes)
    }

    fn u8(&mut self) -> Result<u8, StreamError> {
        Ok(self.bytes(1)?.first().copied().unwrap_or_default())
    }

    fn u64(&mut self) -> Result<u64, StreamError> {
        let bytes = self.bytes(8)?;
        Ok(bytes.iter().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    fn name(&mut self) -> Result<String, StreamError> {
        let len = self.u8()?;
        Ok(String::from_utf8_lossy(self.bytes(len.into())?).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_address_of_the_generation_id_is_found_in_its_section() {
        let mut devices = b"\x04\0\0\0\x05\x07vmgenid\0\0\0\0\0\0\0\x01".to_vec();
        devices.extend(0x7ffd_f028u64.to_le_bytes());
        assert_eq!(generation_address(&devices), None, "cut short");
        devices.extend([SECTION_FOOTER, 0, 0, 0, 5, END_OF_STREAM]);
        assert_eq!(generation_address(&devices), Some(0x7ffd_f028));
        let address_start = devices.len() - 14;
        devices[address_start..address_start + 8].fill(0);
        assert_eq!(generation_address(&devices), None, "the firmware has not run yet");
        assert_eq!(generation_address(b"vmgenid"), None);
    }

    #[test]
    fn a_truncated_state_is_recognized() {
        let mut stream = HEADER.to_vec();
        stream.extend([4, 1, 2, 3, 0]);
        assert_eq!(check(&stream).unwrap(), [4, 1, 2, 3, 0]);
        assert_eq!(check(&stream[..12]), Err(StreamError::CutShort { len: 12 }));
        assert_eq!(check(&stream[..8]), Err(StreamError::CutShort { len: 8 }));
        assert_eq!(check(b"QEVM"), Err(StreamError::Header));
        assert_eq!(check(b""), Err(StreamError::Header));
    }

    #[test]
    fn every_prefix_of_a_section_is_an_error_and_never_a_panic() {
        let mut stream = HEADER.to_vec();
        let mut section = RamSection::start(&mut stream, [("pc.bios", 8192u64)].into_iter());
        section.page(&mut stream, "pc.bios", 4096, &[7; PAGE_SIZE]);
        section.end(&mut stream);
        stream.push(4);
        for length in 0..stream.len() - 1 {
            assert!(ram_blocks(&stream[..length]).is_err(), "{length}");
        }
        assert_eq!(ram_blocks(&stream).unwrap()["pc.bios"].pages[&4096], [7; PAGE_SIZE]);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(pages in proptest::collection::vec((0usize..3, 0u64..16, any::<u8>()), 0..40)) {
            let names = ["pc.bios", "0000:00:01.0/vga.vram", "/rom@etc/acpi/tables"];
            let mut stream = HEADER.to_vec();
            let mut section = RamSection::start(&mut stream, names.iter().map(|name| (*name, 16 * PAGE_SIZE as u64)));
            let mut written: BTreeMap<(usize, u64), u8> = BTreeMap::new();
            for &(block, page, byte) in &pages {
                section.page(&mut stream, names[block], page * PAGE_SIZE as u64, &[byte; PAGE_SIZE]);
                written.insert((block, page), byte);
            }
            section.end(&mut stream);
            stream.push(END_OF_STREAM);
            let blocks = ram_blocks(&stream).unwrap();
            for (index, name) in names.iter().enumerate() {
                let block = &blocks[*name];
                prop_assert_eq!(block.used, 16 * PAGE_SIZE as u64);
                for page in 0..16 {
                    let expected = written.get(&(index, page)).copied().unwrap_or(0);
                    let read = block.pages.get(&(page * PAGE_SIZE as u64)).map_or(0, |content| content[0]);
                    prop_assert_eq!(expected, read);
                }
            }
        }

        #[test]
        fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut stream = HEADER.to_vec();
            stream.extend(&bytes);
            let _ = ram_blocks(&stream);
        }
    }
}
