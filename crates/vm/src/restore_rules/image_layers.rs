//! The files that an image names: QEMU opens these as well.
//!
//! A guest can write anything to a raw disk, also the header of another format. A description that gives such a disk that
//! format would open what the header names. So the header counts, whatever format the description gives.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// How much of an image is read. A header is shorter, also with the name of a file.
const HEADER_BYTES: u64 = 1 << 20;
const QCOW2: &[u8] = b"QFI\xfb";
/// Headers of formats that can name files and that are not read here.
const OTHER_FORMATS: [&[u8]; 4] = [b"QED\0", b"KDMV", b"COWD", b"# Disk DescriptorFile"];
/// The incompatible feature of a file with the data.
const HAS_DATA_FILE: u64 = 1 << 2;
/// Positions in the header of a qcow2 image.
const VERSION: usize = 4;
const BACKING_NAME: usize = 8;
const BACKING_LENGTH: usize = 16;
const FEATURES: usize = 72;
/// Longest name in a header.
const MAX_NAME: u32 = 1023;

/// Returns the files that an image names in its header.
///
/// # Errors
/// A text: why the header cannot be used.
pub(crate) fn files_in_header(path: &Path) -> Result<Vec<PathBuf>, String> {
    let kind = match fs::metadata(path) {
        Ok(file) => file.file_type(),
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e.to_string()),
    };
    if !kind.is_file() && !kind.is_block_device() {
        return Ok(Vec::new());
    }
    let mut header = Vec::new();
    let read = File::open(path).and_then(|file| file.take(HEADER_BYTES).read_to_end(&mut header));
    read.map_err(|e| e.to_string())?;
    if OTHER_FORMATS.iter().any(|magic| header.starts_with(magic)) {
        return Err("an image in this format may name other files; convert it: qemu-img convert -O qcow2".into());
    }
    if !header.starts_with(QCOW2) {
        return Ok(Vec::new());
    }
    let damaged = || "the header of this qcow2 image is damaged".to_owned();
    if number(&header, VERSION).ok_or_else(damaged)? >= 3 {
        let features = long_number(&header, FEATURES).ok_or_else(damaged)?;
        if features & HAS_DATA_FILE != 0 {
            return Err("it keeps its data in another file, which a checkpoint may not use".into());
        }
    }
    let (start, length) = (long_number(&header, BACKING_NAME), number(&header, BACKING_LENGTH));
    let (start, length) = (start.ok_or_else(damaged)?, length.ok_or_else(damaged)?);
    if start == 0 {
        return Ok(Vec::new());
    }
    let start = usize::try_from(start).map_err(|_| damaged())?;
    let end = start.checked_add(length.min(MAX_NAME + 1) as usize).ok_or_else(damaged)?;
    let name = header.get(start..end).and_then(|name| str::from_utf8(name).ok()).ok_or_else(damaged)?;
    if length > MAX_NAME || name.split('/').next().is_some_and(|first| first.contains(':')) {
        return Err(format!("the image below it is no plain file: {name}"));
    }
    if name.is_empty() {
        return Ok(Vec::new());
    }
    let below = path.parent().unwrap_or(path).join(name);
    // With `..`, the name counts that the file has in the end.
    Ok(vec![fs::canonicalize(&below).unwrap_or(below)])
}

fn number(header: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(header.get(at..at + 4)?.try_into().ok()?))
}

fn long_number(header: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(header.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
pub(crate) mod tests {
    use super::*;

    /// Returns the header of a qcow2 image on the image `below`.
    pub(crate) fn qcow2(below: &str) -> Vec<u8> {
        let mut header = [QCOW2, &3_u32.to_be_bytes()].concat();
        header.extend(if below.is_empty() { 0_u64 } else { 104 }.to_be_bytes());
        header.extend((below.len() as u32).to_be_bytes());
        header.resize(104, 0);
        header.extend(below.as_bytes());
        header
    }

    #[test]
    fn headers_that_could_name_files_are_read_or_rejected() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let named = |header: &[u8]| {
            fs::write(file.path(), header).unwrap();
            files_in_header(file.path())
        };
        assert_eq!(named(b"").unwrap(), Vec::<PathBuf>::new());
        assert_eq!(named(&qcow2("/etc/shadow")).unwrap(), [PathBuf::from("/etc/shadow")]);
        let mut with_data_file = qcow2("");
        with_data_file[FEATURES + 7] = HAS_DATA_FILE as u8;
        for header in
            [b"KDMV".as_slice(), b"# Disk DescriptorFile\nRW 1 FLAT \"/etc/shadow\" 0", b"QFI\xfb", &with_data_file]
        {
            named(header).unwrap_err();
        }
        assert_eq!(files_in_header(Path::new("/dev/null")).unwrap(), Vec::<PathBuf>::new());
        assert_eq!(files_in_header(Path::new("/nonexistent")).unwrap(), Vec::<PathBuf>::new());
    }
}
