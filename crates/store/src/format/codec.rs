//! Encodes and decodes little-endian numbers. No input causes a panic.

/// Reads values from the front of a byte slice. Each method returns `None` if too few bytes are left.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// Returns the bytes that are left.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the next `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.bytes.split_at_checked(count)?;
        self.bytes = rest;
        Some(taken)
    }

    /// Returns the next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.bytes.split_first_chunk::<N>()?;
        self.bytes = rest;
        Some(*taken)
    }

    pub fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Returns the next text, whose length precedes it in two bytes.
    pub fn text(&mut self) -> Option<&'a str> {
        let len = self.u16()?;
        std::str::from_utf8(self.bytes(len.into())?).ok()
    }

    /// Returns the next count of items of at least `min_item_len` bytes each; `None` if fewer bytes are left than that.
    pub fn count(&mut self, min_item_len: usize) -> Option<usize> {
        let count = self.u32()? as usize;
        (count.checked_mul(min_item_len)? <= self.bytes.len()).then_some(count)
    }
}

/// Returns the longest beginning of a text that has at most `max_len` bytes.
#[must_use]
pub fn shortened(text: &str, max_len: usize) -> &str {
    let end = (0..=text.len().min(max_len)).rev().find(|&end| text.is_char_boundary(end));
    text.get(..end.unwrap_or(0)).unwrap_or_default()
}

/// Appends values in the encoding of [`Reader`].
pub trait Writer {
    fn put_u8(&mut self, value: u8);
    fn put_u16(&mut self, value: u16);
    fn put_u32(&mut self, value: u32);
    fn put_u64(&mut self, value: u64);
    /// Appends a text, shortened to 65535 bytes.
    fn put_text(&mut self, text: &str);
}

impl Writer for Vec<u8> {
    fn put_u8(&mut self, value: u8) {
        self.push(value);
    }

    fn put_u16(&mut self, value: u16) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_u32(&mut self, value: u32) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_u64(&mut self, value: u64) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_text(&mut self, text: &str) {
        let text = shortened(text, usize::from(u16::MAX));
        self.put_u16(text.len() as u16);
        self.extend_from_slice(text.as_bytes());
    }
}
