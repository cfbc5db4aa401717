//! The memory of another process: its content, and which pages are populated.

use crate::process::Process;
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;
use rekindle_pages::{PAGE_SIZE, PageRuns};
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// Pieces per call of `process_vm_readv` (`UIO_MAXIOV` of `linux/uio.h`).
const IOV_MAX: usize = 1024;

/// `/proc/PID/pagemap`: bit 63 = in RAM, bit 62 = swapped out (`Documentation/admin-guide/mm/pagemap.rst`).
const POPULATED: u64 = 0b11 << 62;

/// Reads `buffer.len()` bytes at `address` of `process`.
///
/// # Errors
/// `PermissionDenied` without the right to trace the process (same user, or `CAP_SYS_PTRACE`); `UnexpectedEof` when
/// a part of the range is not mapped.
pub fn read(process: Process, address: u64, buffer: &mut [u8]) -> io::Result<()> {
    let pid = Pid::from_raw(i32::try_from(process.pid).map_err(io::Error::other)?);
    let mut bytes_read = 0;
    while bytes_read < buffer.len() {
        let unread = buffer.get_mut(bytes_read..).unwrap_or_default();
        let remote = RemoteIoVec { base: address as usize + bytes_read, len: unread.len() };
        match process_vm_readv(pid, &mut [IoSliceMut::new(unread)], &[remote]) {
            Ok(0) | Err(nix::Error::EFAULT) => return Err(unmapped(process, address + bytes_read as u64)),
            Ok(n) => bytes_read += n,
            Err(e) => return Err(failed(process, e)),
        }
    }
    Ok(())
}

/// Reads pieces of the memory of `process`, given as `(address, bytes)`, into `buffer` one after the other. `buffer`
/// must have exactly their total length. One system call reads about a thousand pieces.
///
/// # Errors
/// As for [`read`]; the error names the address that failed.
pub fn read_pieces(process: Process, pieces: &[(u64, usize)], mut buffer: &mut [u8]) -> io::Result<()> {
    let pid = Pid::from_raw(i32::try_from(process.pid).map_err(io::Error::other)?);
    if pieces.iter().map(|piece| piece.1).sum::<usize>() != buffer.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the buffer does not fit the pieces"));
    }
    for batch in pieces.chunks(IOV_MAX) {
        let remote: Vec<_> = batch.iter().map(|&(base, len)| RemoteIoVec { base: base as usize, len }).collect();
        let batch_bytes = batch.iter().map(|piece| piece.1).sum();
        let (mut batch_buffer, unfilled) = std::mem::take(&mut buffer).split_at_mut(batch_bytes);
        buffer = unfilled;
        let bytes_read = match process_vm_readv(pid, &mut [IoSliceMut::new(batch_buffer)], &remote) {
            Ok(bytes_read) => bytes_read,
            Err(nix::Error::EFAULT) => 0,
            Err(e) => return Err(failed(process, e)),
        };
        if bytes_read < batch_bytes {
            // Read again piece by piece, to find the address that failed. If the failure was temporary, this succeeds.
            for &(address, length) in batch {
                let (piece_buffer, after) = std::mem::take(&mut batch_buffer).split_at_mut(length);
                read(process, address, piece_buffer)?;
                batch_buffer = after;
            }
        }
    }
    Ok(())
}

/// Writes `bytes` at `address` of `process`.
///
/// # Errors
/// `PermissionDenied` without the right to trace the process; `UnexpectedEof` when a part of the range is not mapped or
/// not writable.
pub fn write(process: Process, address: u64, bytes: &[u8]) -> io::Result<()> {
    let pid = Pid::from_raw(i32::try_from(process.pid).map_err(io::Error::other)?);
    let mut bytes_written = 0;
    while bytes_written < bytes.len() {
        let unwritten = bytes.get(bytes_written..).unwrap_or_default();
        let remote = RemoteIoVec { base: address as usize + bytes_written, len: unwritten.len() };
        match process_vm_writev(pid, &[IoSlice::new(unwritten)], &[remote]) {
            Ok(0) | Err(nix::Error::EFAULT) => return Err(unmapped(process, address + bytes_written as u64)),
            Ok(n) => bytes_written += n,
            Err(e) => return Err(failed(process, e)),
        }
    }
    Ok(())
}

fn failed(process: Process, e: nix::Error) -> io::Error {
    let e = io::Error::from(e);
    io::Error::new(e.kind(), format!("memory of process {}: {e}", process.pid))
}

fn unmapped(process: Process, address: u64) -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, format!("process {} has nothing mapped at {address:#x}", process.pid))
}

/// Reserves every huge page that the first `bytes` bytes of `file`, on hugetlbfs, can need.
///
/// The kernel reserves the pages when a file is first mapped shared. They stay reserved for the file, mapped or not,
/// until it is truncated or removed. A process that maps the file later and touches a page therefore always gets it.
///
/// # Errors
/// `OutOfMemory` when the pool, the mount or the control group (`hugetlb.SIZE.rsvd.max`) has too few huge pages; none
/// is reserved then.
pub fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    let length = usize::try_from(bytes).map_err(io::Error::other)?;
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory that is in use.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, file.as_raw_fd(), 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: exactly the mapping made above, to which there is no reference.
    if unsafe { libc::munmap(start, length) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The populated pages of a process. An unpopulated page of anonymous memory reads as zeros; skipping it is faster and
/// does not populate it.
#[derive(Debug)]
pub struct PageMap {
    file: File,
}

impl PageMap {
    /// Opens the page map of `process`.
    ///
    /// # Errors
    /// `PermissionDenied` for the process of another user.
    pub fn open(process: Process) -> io::Result<Self> {
        let path = format!("/proc/{}/pagemap", process.pid);
        let file = File::open(&path).map_err(|e| io::Error::new(e.kind(), format!("{path}: {e}")))?;
        Ok(Self { file })
    }

    /// Returns the runs of populated pages in `bytes` bytes at `address` (page-aligned), as byte offsets from
    /// `address`.
    ///
    /// # Errors
    /// Errors of reading the page map, e.g. when the process has ended.
    pub fn populated(&self, address: u64, bytes: u64) -> io::Result<PageRuns> {
        const PAGE: u64 = PAGE_SIZE as u64;
        const ENTRY_BYTES: usize = 8;
        const ENTRIES_PER_READ: u64 = 8192;
        let pages = bytes.div_ceil(PAGE);
        let mut runs = PageRuns::new();
        let mut buffer = vec![0u8; ENTRY_BYTES * pages.min(ENTRIES_PER_READ) as usize];
        for first_page in (0..pages).step_by(ENTRIES_PER_READ as usize) {
            let count = (pages - first_page).min(ENTRIES_PER_READ);
            let chunk = buffer.get_mut(..ENTRY_BYTES * count as usize).unwrap_or_default();
            self.file.read_exact_at(chunk, (address / PAGE + first_page) * ENTRY_BYTES as u64)?;
            for (page, entry) in (first_page..).zip(chunk.as_chunks::<ENTRY_BYTES>().0) {
                if u64::from_ne_bytes(*entry) & POPULATED != 0 {
                    runs.push(page * PAGE..(page + 1) * PAGE);
                }
            }
        }
        Ok(runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_memory_is_read_and_its_populated_pages_are_known() {
        let me = Process::current().unwrap();
        let pages = 64;
        let mut area = vec![0u8; (pages + 1) * PAGE_SIZE];
        let start = (area.as_ptr() as usize).next_multiple_of(PAGE_SIZE) - area.as_ptr() as usize;
        area[start + 5 * PAGE_SIZE] = 1;
        area[start + 6 * PAGE_SIZE] = 2;
        let address = (area.as_ptr() as usize + start) as u64;
        let runs = PageMap::open(me).unwrap().populated(address, (pages * PAGE_SIZE) as u64).unwrap();
        let at = 5 * PAGE_SIZE as u64;
        assert!(runs.iter().any(|run| run.contains(&at) && run.end >= at + 2 * PAGE_SIZE as u64), "{runs:?}");
        let mut copy = vec![0; 2 * PAGE_SIZE];
        read(me, address + at, &mut copy).unwrap();
        assert_eq!((copy[0], copy[PAGE_SIZE]), (1, 2));
    }

    #[test]
    fn many_pieces_are_read_in_their_order_and_one_that_is_not_there_is_named() {
        let me = Process::current().unwrap();
        let area: Vec<u8> = (0..5000u32).map(|n| n as u8).collect();
        let pieces: Vec<_> = (0..2500).rev().map(|n| (area.as_ptr() as u64 + 2 * n, 1)).collect();
        let mut copy = vec![0; 2500];
        read_pieces(me, &pieces, &mut copy).unwrap();
        assert!(copy.iter().zip((0..2500u32).rev()).all(|(&got, n)| got == (2 * n) as u8));
        let e = read_pieces(me, &[pieces[0], (0x1000, 1)], &mut [0; 2]).unwrap_err();
        assert!(e.to_string().contains("0x1000"), "{e}");
        assert!(read_pieces(me, &pieces, &mut [0; 3]).is_err());
    }

    #[test]
    fn memory_is_written() {
        let me = Process::current().unwrap();
        let area = std::sync::atomic::AtomicU32::new(1);
        write(me, area.as_ptr() as u64, &7u32.to_ne_bytes()).unwrap();
        assert_eq!(area.load(std::sync::atomic::Ordering::SeqCst), 7);
        assert!(write(me, 0x1000, &[0]).is_err());
    }

    #[test]
    fn an_unmapped_range_is_an_error() {
        let me = Process::current().unwrap();
        let e = read(me, 4096, &mut [0; 16]).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::UnexpectedEof);
        assert!(e.to_string().contains("0x1000"), "{e}");
    }
}
