//! Hints about the writing of files.

use rustix::fd::{AsFd, AsRawFd};
use std::io;

/// Let the kernel begin to write `len` bytes of a file from `offset` on to its disk, without waiting for it, so that a
/// later sync has less to do. It makes nothing durable.
///
/// # Errors
/// When the range makes no sense or the file system cannot (`EINVAL`, `ESPIPE`): harmless, since it is a hint.
pub fn start_writeback(file: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    let signed = |value: u64| i64::try_from(value).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    // SAFETY: the descriptor is open, because it is borrowed; the call takes no pointer.
    let done = unsafe {
        libc::sync_file_range(file.as_fd().as_raw_fd(), signed(offset)?, signed(len)?, libc::SYNC_FILE_RANGE_WRITE)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_file_takes_the_hint_and_a_pipe_does_not() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 8192]).unwrap();
        start_writeback(&file, 0, 8192).unwrap();
        let (_reader, writer) = io::pipe().unwrap();
        assert!(start_writeback(&writer, 0, 1).is_err());
        assert!(start_writeback(&file, u64::MAX, 1).is_err());
    }
}
