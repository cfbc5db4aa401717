//! Reads a whole migration stream while it arrives: RAM blocks, pages, then the devices.
//!
//! ```text
//! "QEVM" version=3 | [configuration: machine] | ram START, PART..., END | devices ... EOF
//! ```
//!
//! QEMU writes this format to a file if no capability is set other than its usual ones (and with `suppress-vmdesc`),
//! and [`crate::stream`] writes it too. Anything else is an error that names it. Only one page is kept in memory and,
//! at the end, the devices.

use crate::stream::{END_OF_STREAM, HEADER, RAM_VERSION, StreamError};
use crate::stream::{FLAG_CONTINUE, FLAG_EOS, FLAG_MEM_SIZE, FLAG_PAGE, FLAG_ZERO, FLAGS};
use crate::stream::{SECTION_CONFIGURATION, SECTION_END, SECTION_FOOTER, SECTION_PART, SECTION_START};
use rekindle_pages::{PAGE_SIZE, Page};
use std::io::{self, Read};

/// Far more RAM blocks than a machine has. The limit is for streams of an untrusted QEMU.
const MAX_BLOCKS: usize = 4096;
pub(crate) const MAX_DEVICE_STATE_BYTES: u64 = 64 << 20;

/// Why a stream cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum IncomingError {
    /// The stream is cut short, or it is not a QEMU stream.
    #[error(transparent)]
    Stream(#[from] StreamError),
    #[error("the stream cannot be read")]
    Read(#[source] io::Error),
    #[error(
        "the stream has {what} at byte {at}, which is not known here; save it with `migrate` to a file, no capability set"
    )]
    Unknown {
        /// The unsupported part.
        what: String,
        /// Position in the stream, in bytes.
        at: u64,
    },
    #[error("the stream has more than {} MiB of device state", MAX_DEVICE_STATE_BYTES >> 20)]
    TooLong,
}

/// A page of a stream.
#[derive(Debug)]
pub struct IncomingPage<'a> {
    /// Index of the block in [`Incoming::blocks`].
    pub block: usize,
    /// Number of the page in its block.
    pub page: u64,
    pub content: &'a Page,
}

/// A stream while it is read.
#[derive(Debug)]
pub struct Incoming<R> {
    reader: R,
    /// Number of bytes that were read.
    position: u64,
    blocks: Vec<(String, u64)>,
    machine: Option<String>,
    /// Index of the last page's block.
    current_block: usize,
    is_last_ram_section: bool,
    /// A word of the RAM section that was read ahead.
    next_word: Option<u64>,
    /// Whether all sections of RAM were read.
    is_ram_complete: bool,
    page_content: Page,
}

impl<R: Read> Incoming<R> {
    /// Reads the stream up to the end of the block table.
    ///
    /// # Errors
    /// [`IncomingError`] when it is not such a stream.
    pub fn open(reader: R) -> Result<Self, IncomingError> {
        let mut incoming = Self {
            reader,
            position: 0,
            blocks: Vec::new(),
            machine: None,
            current_block: 0,
            is_last_ram_section: false,
            next_word: None,
            is_ram_complete: false,
            page_content: [0; PAGE_SIZE],
        };
        if incoming.array::<8>()? != HEADER {
            return Err(StreamError::Header.into());
        }
        let mut kind = incoming.u8()?;
        if kind == SECTION_CONFIGURATION {
            incoming.machine = Some(incoming.read_configuration()?);
            kind = incoming.u8()?;
        }
        if kind != SECTION_START {
            return Err(incoming.unknown(&format!("a section of type {kind} before the RAM")));
        }
        incoming.read_ram_start()?;
        incoming.read_block_table()?;
        Ok(incoming)
    }

    /// Returns the RAM blocks: name, and bytes in use.
    pub fn blocks(&self) -> &[(String, u64)] {
        &self.blocks
    }

    /// Returns the machine type, if the stream contains it.
    pub fn machine(&self) -> Option<&str> {
        self.machine.as_deref()
    }

    /// Returns the next page, or `None` after the last one. A page that comes again replaces the earlier one.
    ///
    /// # Errors
    /// [`IncomingError`] when the stream is cut short, or has an unsupported part.
    pub fn next_page(&mut self) -> Result<Option<IncomingPage<'_>>, IncomingError> {
        while !self.is_ram_complete {
            let word = match self.next_word.take() {
                Some(word) => word,
                None => self.u64()?,
            };
            let (offset, flags) = (word & !FLAGS, word & FLAGS);
            match flags & !FLAG_CONTINUE {
                FLAG_EOS => self.end_section()?,
                kind @ (FLAG_PAGE | FLAG_ZERO) => {
                    if flags & FLAG_CONTINUE == 0 {
                        self.current_block = self.read_page_block()?;
                    }
                    self.page_content = if kind == FLAG_PAGE { self.array()? } else { [self.u8()?; PAGE_SIZE] };
                    let block_bytes = self.blocks.get(self.current_block).map_or(0, |(_, used)| *used);
                    if offset >= block_bytes {
                        return Err(self.unknown("a page beyond its block"));
                    }
                    let page = offset / PAGE_SIZE as u64;
                    return Ok(Some(IncomingPage { block: self.current_block, page, content: &self.page_content }));
                }
                _ => return Err(self.unknown(&format!("RAM with the flags {flags:#x}"))),
            }
        }
        Ok(None)
    }

    /// Returns the devices after all pages were read, as a stream of their own such as `xen-save-devices-state`
    /// writes.
    ///
    /// # Errors
    /// [`IncomingError`] when the stream is cut short, or the device state is too large.
    pub fn devices(mut self) -> Result<Vec<u8>, IncomingError> {
        while self.next_page()?.is_some() {}
        let mut devices = HEADER.to_vec();
        let mut unread = self.reader.take(MAX_DEVICE_STATE_BYTES + 1);
        unread.read_to_end(&mut devices).map_err(IncomingError::Read)?;
        if devices.len() as u64 > MAX_DEVICE_STATE_BYTES {
            return Err(IncomingError::TooLong);
        }
        if devices.len() == HEADER.len() || devices.last() != Some(&END_OF_STREAM) {
            let ram_bytes = usize::try_from(self.position).unwrap_or(usize::MAX);
            return Err(StreamError::CutShort { len: ram_bytes.saturating_add(devices.len() - HEADER.len()) }.into());
        }
        Ok(devices)
    }

    /// Returns the machine type, from the configuration section.
    fn read_configuration(&mut self) -> Result<String, IncomingError> {
        let length = self.u32()?;
        if length > 255 {
            return Err(self.unknown("a machine name of that length"));
        }
        self.text(length as usize)
    }

    /// Reads the start of the RAM section, up to its block table.
    fn read_ram_start(&mut self) -> Result<(), IncomingError> {
        // Section number.
        self.u32()?;
        let name = self.name()?;
        if name != "ram" {
            return Err(self.unknown(&format!("a section `{name}` before the RAM")));
        }
        // Instance.
        self.u32()?;
        let version = self.u32()?;
        if version == RAM_VERSION { Ok(()) } else { Err(self.unknown(&format!("RAM of version {version}"))) }
    }

    /// Reads the block table. With `x-ignore-shared` each block's length is followed by its address.
    fn read_block_table(&mut self) -> Result<(), IncomingError> {
        let word = self.u64()?;
        if word & FLAGS != FLAG_MEM_SIZE {
            return Err(self.unknown("RAM without a block table"));
        }
        let mut remaining_bytes = word & !FLAGS;
        let mut has_addresses = false;
        while remaining_bytes > 0 {
            // A name has at least one character, an address begins with a zero: the first block's address shows.
            let mut name_length = self.u8()?;
            if name_length == 0 && self.blocks.len() == 1 && !has_addresses {
                has_addresses = true;
                self.array::<7>()?;
                name_length = self.u8()?;
            }
            let name = self.text(name_length.into())?;
            let used = self.u64()?;
            if name.is_empty() || used == 0 || used > remaining_bytes || self.blocks.len() >= MAX_BLOCKS {
                return Err(self.unknown("a block table that makes no sense"));
            }
            remaining_bytes -= used;
            if has_addresses {
                self.u64()?;
            }
            self.blocks.push((name, used));
        }
        // With a single block the address is detected only now: the word after the table has flags, an address of a
        // page has none.
        let word = self.u64()?;
        let is_address = self.blocks.len() == 1 && word & FLAGS == 0;
        self.next_word = (!is_address).then_some(word);
        Ok(())
    }

    /// Reads the name of a page's block. Returns the block's index.
    fn read_page_block(&mut self) -> Result<usize, IncomingError> {
        let name = self.name()?;
        let index = self.blocks.iter().position(|(block, _)| *block == name);
        index.ok_or_else(|| self.unknown(&format!("a page of the block `{name}`, which it has not")))
    }

    /// Reads the end of a section of RAM, and the start of the next one if there is one.
    fn end_section(&mut self) -> Result<(), IncomingError> {
        if self.u8()? != SECTION_FOOTER {
            return Err(self.unknown("no footer after RAM"));
        }
        self.array::<4>()?;
        if self.is_last_ram_section {
            self.is_ram_complete = true;
            return Ok(());
        }
        match self.u8()? {
            SECTION_PART => {}
            SECTION_END => self.is_last_ram_section = true,
            kind => return Err(self.unknown(&format!("a section of type {kind} between those of the RAM"))),
        }
        self.array::<4>().map(drop)
    }

    fn unknown(&self, what: &str) -> IncomingError {
        IncomingError::Unknown { what: what.to_owned(), at: self.position }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], IncomingError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), IncomingError> {
        match self.reader.read_exact(bytes) {
            Ok(()) => {
                self.position += bytes.len() as u64;
                Ok(())
            }
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                Err(StreamError::CutShort { len: usize::try_from(self.position).unwrap_or(usize::MAX) }.into())
            }
            Err(e) => Err(IncomingError::Read(e)),
        }
    }

    fn u8(&mut self) -> Result<u8, IncomingError> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Result<u32, IncomingError> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, IncomingError> {
        self.array().map(u64::from_be_bytes)
    }

    fn name(&mut self) -> Result<String, IncomingError> {
        let length = self.u8()?;
        self.text(length.into())
    }

    fn text(&mut self, length: usize) -> Result<String, IncomingError> {
        let mut bytes = vec![0; length];
        self.fill(&mut bytes)?;
        String::from_utf8(bytes).map_err(|_| self.unknown("a name that is not text"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{self, RamSection};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// A byte of each page, by block index and page number.
    type Pages = BTreeMap<(usize, u64), u8>;

    const BLOCKS: [(&str, u64); 3] = [("ram", 16 * 4096), ("pc.bios", 3 * 4096), ("/rom@etc/acpi/tables", 4096)];

    /// Writes a stream of the first `blocks` of [`BLOCKS`] and of `pages` (block, page number, byte).
    fn stream(blocks: usize, shared: bool, machine: Option<&str>, pages: &[(usize, u64, u8)]) -> Vec<u8> {
        let mut out = HEADER.to_vec();
        if let Some(machine) = machine {
            stream::configuration(&mut out, machine);
        }
        let table = BLOCKS.iter().take(blocks).copied();
        let mut section =
            if shared { RamSection::start(&mut out, table) } else { RamSection::start_plain(&mut out, table) };
        for (block, page, byte) in pages {
            section.page(&mut out, BLOCKS[*block].0, page * 4096, &[*byte; PAGE_SIZE]);
        }
        section.end(&mut out);
        out.extend([4, 9, 9, END_OF_STREAM]);
        out
    }

    struct Content {
        blocks: Vec<(String, u64)>,
        pages: Pages,
        devices: Vec<u8>,
    }

    fn read(bytes: &[u8]) -> Result<Content, IncomingError> {
        let mut incoming = Incoming::open(bytes)?;
        let mut pages = Pages::new();
        while let Some(IncomingPage { block, page, content }) = incoming.next_page()? {
            pages.insert((block, page), content[7]);
        }
        Ok(Content { blocks: incoming.blocks().to_vec(), pages, devices: incoming.devices()? })
    }

    #[test]
    fn every_prefix_is_an_error() {
        let complete = stream(3, false, Some("pc-q35-7.2"), &[(0, 3, 7), (1, 2, 0)]);
        assert_eq!(Incoming::open(complete.as_slice()).unwrap().machine(), Some("pc-q35-7.2"));
        for length in 0..complete.len() {
            assert!(read(&complete[..length]).is_err(), "{length} of {}", complete.len());
        }
        read(&complete).unwrap();
    }

    #[test]
    fn an_unknown_part_is_named() {
        let valid = stream(3, false, None, &[(0, 3, 7)]);
        let error_with = |position: usize, byte: u8| {
            let mut damaged = valid.clone();
            damaged[position] = byte;
            read(&damaged).err().unwrap().to_string()
        };
        assert!(error_with(8, 2).contains("type 2 before"), "{}", error_with(8, 2));
        assert!(error_with(14, b'X').contains("`Xam`"));
        assert!(error_with(3, b'X').contains("QEMU stream"));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            pages in proptest::collection::vec((0usize..3, 0u64..16, any::<u8>()), 0..60),
            blocks in 1usize..=3, shared: bool, machine: bool,
        ) {
            let fits = |(block, page, _): &(usize, u64, u8)| *block < blocks && page * 4096 < BLOCKS[*block].1;
            let pages: Vec<_> = pages.into_iter().filter(fits).collect();
            let content = read(&stream(blocks, shared, machine.then_some("pc-q35-10.0"), &pages)).unwrap();
            let table: Vec<_> = BLOCKS.iter().take(blocks).map(|(name, used)| (name.to_string(), *used)).collect();
            prop_assert_eq!(content.blocks, table);
            let last_versions: Pages = pages.iter().map(|(block, page, byte)| ((*block, *page), *byte)).collect();
            prop_assert_eq!(content.pages, last_versions);
            prop_assert_eq!(&content.devices[HEADER.len()..], [4, 9, 9, 0]);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400), start in 0usize..300) {
            let mut mutated = stream(2, false, None, &[(0, 3, 7), (1, 2, 0)]);
            let end = (start + bytes.len()).min(mutated.len());
            mutated.splice(start.min(end)..end, bytes.clone());
            let _ = read(&mutated);
            let _ = read(&bytes);
        }
    }
}
