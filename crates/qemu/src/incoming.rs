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

/// Limit of RAM blocks in a stream.
const MOST_BLOCKS: usize = 4096;
/// Limit of the device state, in bytes.
pub(crate) const MOST_DEVICES: u64 = 64 << 20;

/// Why a stream cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum IncomingError {
    /// The stream is cut short, or it is not a QEMU stream.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// Reading from the source failed.
    #[error("the stream cannot be read")]
    Read(#[source] io::Error),
    /// The stream has a section, version or flag that this reader does not support.
    #[error(
        "the stream has {what} at byte {at}, which is not known here; save it with `migrate` to a file, no capability set"
    )]
    Unknown {
        /// The unsupported part.
        what: String,
        /// Position in the stream, in bytes.
        at: u64,
    },
    /// The device state exceeds the limit.
    #[error("the stream has more than {} MiB of device state", MOST_DEVICES >> 20)]
    TooLong,
}

/// A page of a stream: index of its block, page number in the block, content.
pub type IncomingPage<'a> = (usize, u64, &'a Page);

/// A stream while it is read.
#[derive(Debug)]
pub struct Incoming<R> {
    reader: R,
    at: u64,
    blocks: Vec<(String, u64)>,
    machine: Option<String>,
    /// Index of the last page's block.
    current: usize,
    /// Whether the current section is the last one of RAM.
    last: bool,
    /// A word that was read ahead.
    ahead: Option<u64>,
    done: bool,
    page: Page,
}

impl<R: Read> Incoming<R> {
    /// Reads the stream up to the end of the block table.
    ///
    /// # Errors
    /// [`IncomingError`] when it is not such a stream.
    pub fn open(reader: R) -> Result<Self, IncomingError> {
        let mut incoming = Self {
            reader,
            at: 0,
            blocks: Vec::new(),
            machine: None,
            current: 0,
            last: false,
            ahead: None,
            done: false,
            page: [0; PAGE_SIZE],
        };
        if incoming.array::<8>()? != HEADER {
            return Err(StreamError::Header.into());
        }
        let mut kind = incoming.u8()?;
        if kind == SECTION_CONFIGURATION {
            let len = u32::from_be_bytes(incoming.array()?);
            if len > 255 {
                return Err(incoming.unknown("a machine name of that length"));
            }
            incoming.machine = Some(incoming.text(len as usize)?);
            kind = incoming.u8()?;
        }
        if kind != SECTION_START {
            return Err(incoming.unknown(&format!("a section of type {kind} before the RAM")));
        }
        incoming.array::<4>()?;
        let name = incoming.name()?;
        if name != "ram" {
            return Err(incoming.unknown(&format!("a section `{name}` before the RAM")));
        }
        incoming.array::<4>()?;
        let version = u32::from_be_bytes(incoming.array()?);
        if version != RAM_VERSION {
            return Err(incoming.unknown(&format!("RAM of version {version}")));
        }
        incoming.table()?;
        Ok(incoming)
    }

    /// Returns the RAM blocks: name, and bytes in use.
    #[must_use]
    pub fn blocks(&self) -> &[(String, u64)] {
        &self.blocks
    }

    /// Returns the machine type, if the stream contains it.
    #[must_use]
    pub fn machine(&self) -> Option<&str> {
        self.machine.as_deref()
    }

    /// Returns the next page, or `None` after the last one. A page that comes again replaces the earlier one.
    ///
    /// # Errors
    /// [`IncomingError`] when the stream is cut short, or has an unsupported part.
    pub fn next_page(&mut self) -> Result<Option<IncomingPage<'_>>, IncomingError> {
        while !self.done {
            let word = match self.ahead.take() {
                Some(word) => word,
                None => u64::from_be_bytes(self.array()?),
            };
            let (offset, flags) = (word & !FLAGS, word & FLAGS);
            match flags & !FLAG_CONTINUE {
                FLAG_EOS => self.end_section()?,
                kind @ (FLAG_PAGE | FLAG_ZERO) => {
                    if flags & FLAG_CONTINUE == 0 {
                        let name = self.name()?;
                        let position = self.blocks.iter().position(|(block, _)| *block == name);
                        let none = || self.unknown(&format!("a page of the block `{name}`, which it has not"));
                        self.current = position.ok_or_else(none)?;
                    }
                    if kind == FLAG_PAGE {
                        self.page = self.array()?;
                    } else {
                        self.page = [self.u8()?; PAGE_SIZE];
                    }
                    let used = self.blocks.get(self.current).map_or(0, |(_, used)| *used);
                    if offset >= used {
                        return Err(self.unknown("a page beyond its block"));
                    }
                    return Ok(Some((self.current, offset / PAGE_SIZE as u64, &self.page)));
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
        let mut rest = self.reader.take(MOST_DEVICES + 1);
        rest.read_to_end(&mut devices).map_err(IncomingError::Read)?;
        if devices.len() as u64 > MOST_DEVICES {
            return Err(IncomingError::TooLong);
        }
        if devices.len() == HEADER.len() || devices.last() != Some(&END_OF_STREAM) {
            let len = usize::try_from(self.at).unwrap_or(usize::MAX).saturating_add(devices.len() - HEADER.len());
            return Err(StreamError::CutShort { len }.into());
        }
        Ok(devices)
    }

    /// Reads the block table. With `x-ignore-shared` each block's length is followed by its address.
    fn table(&mut self) -> Result<(), IncomingError> {
        let word = u64::from_be_bytes(self.array()?);
        if word & FLAGS != FLAG_MEM_SIZE {
            return Err(self.unknown("RAM without a block table"));
        }
        let mut left = word & !FLAGS;
        let mut addresses = None;
        while left > 0 {
            // A name has at least one character, an address begins with a zero.
            let mut len = self.u8()?;
            if len == 0 && self.blocks.len() == 1 && addresses.is_none() {
                addresses = Some(true);
                self.array::<7>()?;
                len = self.u8()?;
            }
            let name = self.text(len.into())?;
            let used = u64::from_be_bytes(self.array()?);
            if name.is_empty() || used == 0 || used > left || self.blocks.len() >= MOST_BLOCKS {
                return Err(self.unknown("a block table that makes no sense"));
            }
            left -= used;
            if addresses == Some(true) {
                self.array::<8>()?;
            }
            self.blocks.push((name, used));
        }
        // With a single block the address is detected only now: the word after the table has flags, an address of a
        // page has none.
        let word = u64::from_be_bytes(self.array()?);
        if self.blocks.len() == 1 && word & FLAGS == 0 {
            return Ok(());
        }
        self.ahead = Some(word);
        Ok(())
    }

    fn end_section(&mut self) -> Result<(), IncomingError> {
        if self.u8()? != SECTION_FOOTER {
            return Err(self.unknown("no footer after RAM"));
        }
        self.array::<4>()?;
        if self.last {
            self.done = true;
            return Ok(());
        }
        match self.u8()? {
            SECTION_PART => {}
            SECTION_END => self.last = true,
            kind => return Err(self.unknown(&format!("a section of type {kind} between those of the RAM"))),
        }
        self.array::<4>().map(drop)
    }

    fn unknown(&self, what: &str) -> IncomingError {
        IncomingError::Unknown { what: what.to_owned(), at: self.at }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], IncomingError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), IncomingError> {
        match self.reader.read_exact(bytes) {
            Ok(()) => {
                self.at += bytes.len() as u64;
                Ok(())
            }
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                Err(StreamError::CutShort { len: usize::try_from(self.at).unwrap_or(usize::MAX) }.into())
            }
            Err(e) => Err(IncomingError::Read(e)),
        }
    }

    fn u8(&mut self) -> Result<u8, IncomingError> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn name(&mut self) -> Result<String, IncomingError> {
        let len = self.u8()?;
        self.text(len.into())
    }

    fn text(&mut self, len: usize) -> Result<String, IncomingError> {
        let mut bytes = vec![0; len];
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

    type Pages = BTreeMap<(usize, u64), u8>;

    const BLOCKS: [(&str, u64); 3] = [("ram", 16 * 4096), ("pc.bios", 3 * 4096), ("/rom@etc/acpi/tables", 4096)];

    fn stream(blocks: usize, shared: bool, machine: Option<&str>, pages: &[(usize, u64, u8)]) -> Vec<u8> {
        let mut out = HEADER.to_vec();
        if let Some(machine) = machine {
            stream::configuration(&mut out, machine);
        }
        let list = BLOCKS.iter().take(blocks).copied();
        let mut section =
            if shared { RamSection::start(&mut out, list) } else { RamSection::start_plain(&mut out, list) };
        for (block, page, byte) in pages {
            section.page(&mut out, BLOCKS[*block].0, page * 4096, &[*byte; PAGE_SIZE]);
        }
        section.end(&mut out);
        out.extend([4, 9, 9, END_OF_STREAM]);
        out
    }

    /// Blocks, pages, device state.
    type Whole = (Vec<(String, u64)>, Pages, Vec<u8>);

    fn read(bytes: &[u8]) -> Result<Whole, IncomingError> {
        let mut incoming = Incoming::open(bytes)?;
        let mut pages = Pages::new();
        while let Some((block, page, content)) = incoming.next_page()? {
            pages.insert((block, page), content[7]);
        }
        Ok((incoming.blocks().to_vec(), pages, incoming.devices()?))
    }

    #[test]
    fn every_prefix_is_an_error() {
        let whole = stream(3, false, Some("pc-q35-7.2"), &[(0, 3, 7), (1, 2, 0)]);
        assert_eq!(Incoming::open(whole.as_slice()).unwrap().machine(), Some("pc-q35-7.2"));
        for len in 0..whole.len() {
            assert!(read(&whole[..len]).is_err(), "{len} of {}", whole.len());
        }
        read(&whole).unwrap();
    }

    #[test]
    fn what_is_not_known_is_named() {
        let whole = stream(3, false, None, &[(0, 3, 7)]);
        let with = |at: usize, byte: u8| {
            let mut bad = whole.clone();
            bad[at] = byte;
            read(&bad).unwrap_err().to_string()
        };
        assert!(with(8, 2).contains("type 2 before"), "{}", with(8, 2));
        assert!(with(14, b'X').contains("`Xam`"));
        assert!(with(3, b'X').contains("QEMU stream"));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            pages in proptest::collection::vec((0usize..3, 0u64..16, any::<u8>()), 0..60),
            blocks in 1usize..=3, shared: bool, machine: bool,
        ) {
            let fits = |(block, page, _): &(usize, u64, u8)| *block < blocks && page * 4096 < BLOCKS[*block].1;
            let pages: Vec<_> = pages.into_iter().filter(fits).collect();
            let bytes = stream(blocks, shared, machine.then_some("pc-q35-10.0"), &pages);
            let (table, found, devices) = read(&bytes).unwrap();
            let want: Vec<_> = BLOCKS.iter().take(blocks).map(|(name, used)| (name.to_string(), *used)).collect();
            prop_assert_eq!(table, want);
            let last: Pages = pages.iter().map(|(block, page, byte)| ((*block, *page), *byte)).collect();
            prop_assert_eq!(found, last);
            prop_assert_eq!(&devices[HEADER.len()..], [4, 9, 9, 0]);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400), at in 0usize..300) {
            let mut mutated = stream(2, false, None, &[(0, 3, 7), (1, 2, 0)]);
            let end = (at + bytes.len()).min(mutated.len());
            mutated.splice(at.min(end)..end, bytes.clone());
            let _ = read(&mutated);
            let _ = read(&bytes);
        }
    }
}
