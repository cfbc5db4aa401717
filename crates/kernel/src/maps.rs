//! The mappings of a process: `/proc/PID/maps`.

use crate::process::Process;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::Path;

/// One mapping of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// The addresses, whole pages.
    pub range: Range<u64>,
    /// Whether the mapping permits reads.
    pub readable: bool,
    /// Whether the mapping permits writes.
    pub writable: bool,
    /// Whether the mapping permits execution.
    pub executable: bool,
    /// Whether writes are visible to other processes that map the same file.
    pub shared: bool,
    /// Byte of the file at the start of the mapping.
    pub offset: u64,
    /// Inode number of the file; 0 for anonymous memory.
    pub inode: u64,
    /// The file, a name in brackets (`[heap]`), or empty. The name of a file without a path (a memfd, a removed file)
    /// ends with ` (deleted)`.
    pub name: String,
}

impl Mapping {
    /// Opens the mapped file, even if it was renamed or removed. `None` for anonymous memory.
    ///
    /// # Errors
    /// `PermissionDenied` unless root.
    pub fn open(&self, process: Process) -> io::Result<Option<File>> {
        if self.inode == 0 {
            return Ok(None);
        }
        let Range { start, end } = self.range;
        let path = format!("/proc/{}/map_files/{start:x}-{end:x}", process.pid);
        let open = File::open(&path);
        open.map(Some).map_err(|e| io::Error::new(e.kind(), format!("{path} ({}): {e}", self.name)))
    }
}

/// Returns the mappings of a process in ascending order.
///
/// # Errors
/// `NotFound` if the process has ended; `PermissionDenied` for the process of another user.
pub fn of(process: Process) -> io::Result<Vec<Mapping>> {
    let path = format!("/proc/{}/maps", process.pid);
    let text = fs::read(&path).map_err(|e| io::Error::new(e.kind(), format!("{path}: {e}")))?;
    let text = String::from_utf8_lossy(&text);
    text.lines()
        .map(|line| parse(line).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("{path}: {line:?}"))))
        .collect()
}

/// Returns the addresses at which `process` has mapped the file at `path` from its first byte on, or `None`.
///
/// # Errors
/// `NotFound` if the process has ended or there is no such file; `PermissionDenied` for the process of another user.
pub fn range_of_file(process: Process, path: &Path) -> io::Result<Option<Range<u64>>> {
    let path = path.canonicalize()?;
    let mut mappings = of(process)?.into_iter();
    let mapping = mappings.find(|mapping| mapping.offset == 0 && Path::new(&mapping.name) == path);
    Ok(mapping.map(|mapping| mapping.range))
}

/// Parses `START-END PERM OFFSET MAJOR:MINOR INODE   NAME`, where a name may contain blanks.
fn parse(line: &str) -> Option<Mapping> {
    let hex = |word: &str| u64::from_str_radix(word, 16).ok();
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let flags = words.next()?.as_bytes();
    let offset = hex(words.next()?)?;
    let _device = words.next()?;
    let inode = words.next()?.parse().ok()?;
    let name = words.next().unwrap_or_default().trim_start().to_owned();
    let has = |at: usize, letter: u8| flags.get(at) == Some(&letter);
    Some(Mapping {
        range: hex(start)?..hex(end)?,
        readable: has(0, b'r'),
        writable: has(1, b'w'),
        executable: has(2, b'x'),
        shared: has(3, b's'),
        offset,
        inode,
        name,
    })
}

/// Returns the mappings that overlap `range`, if they cover all of it.
#[must_use]
pub fn covering<'a>(maps: &'a [Mapping], range: &Range<u64>) -> Option<Vec<&'a Mapping>> {
    let parts: Vec<_> = maps.iter().filter(|map| map.range.end > range.start && map.range.start < range.end).collect();
    let apart = parts.windows(2).any(|two| two.first().map(|a| a.range.end) != two.get(1).map(|b| b.range.start));
    let (first, last) = (parts.first()?, parts.last()?);
    (!apart && first.range.start <= range.start && last.range.end >= range.end).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_blanks_and_without() {
        let line = "7f00-7fff rw-s 00001000 00:1d 4242                     /dev/shm/a b (deleted)";
        let map = parse(line).unwrap();
        assert_eq!((map.range, map.offset, map.inode), (0x7f00..0x7fff, 0x1000, 4242));
        assert!(map.readable && map.writable && map.shared && !map.executable);
        assert_eq!(map.name, "/dev/shm/a b (deleted)");
        assert_eq!(parse("10-20 r-xp 00000000 00:00 0 ").unwrap().name, "");
        assert_eq!(parse("10-20"), None);
    }

    #[test]
    fn a_range_is_covered_by_neighbours_only() {
        let map = |range: Range<u64>| Mapping { range, ..parse("0-1 rw-p 0 0:0 0").unwrap() };
        let maps = [map(0x10..0x20), map(0x20..0x30), map(0x40..0x50)];
        assert_eq!(covering(&maps, &(0x18..0x28)).unwrap().len(), 2);
        assert_eq!(covering(&maps, &(0x28..0x48)), None);
        assert_eq!(covering(&maps, &(0x4f..0x51)), None);
        assert_eq!(covering(&maps, &(0x60..0x61)), None);
    }

    #[test]
    fn our_own_program_is_mapped_and_its_file_can_be_opened() {
        let me = Process::current().unwrap();
        let program = std::env::current_exe().unwrap();
        let maps = of(me).unwrap();
        let map = maps.iter().find(|map| map.executable && map.name == program.to_string_lossy()).unwrap();
        match map.open(me) {
            Ok(file) => assert_eq!(file.unwrap().metadata().unwrap().len(), program.metadata().unwrap().len()),
            Err(e) => assert_eq!(e.kind(), io::ErrorKind::PermissionDenied),
        }
    }
    #[test]
    fn a_mapped_file_is_found_by_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let bytes = 2 * rekindle_pages::PAGE_SIZE;
        let path = directory.path().join("two words");
        fs::write(&path, vec![0; bytes]).unwrap();
        let me = Process::current().unwrap();
        assert_eq!(range_of_file(me, &path).unwrap(), None);
        let file = File::open(&path).unwrap();
        let null = std::ptr::null_mut();
        let (protection, fd) = (libc::PROT_READ, std::os::fd::AsRawFd::as_raw_fd(&file));
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { libc::mmap(null, bytes, protection, libc::MAP_SHARED, fd, 0) } as u64;
        assert_eq!(range_of_file(me, &path).unwrap(), Some(start..start + bytes as u64));
        // SAFETY: the mapping made above, to which there is no reference.
        unsafe { libc::munmap(start as *mut _, bytes) };
    }
}
