//! Files that another process writes: writing them back before that process has to wait for it.
//!
//! QEMU flushes its disks when it stops its guest. Whatever the host's page cache has of them then lengthens the pause.

use crate::descriptor;
use crate::process::Process;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fdatasync, fstat};
use std::fs;
use std::io;
use std::os::fd::RawFd;

/// Writes back the regular files and block devices that `process` has open for writing. Files that it opens or closes
/// meanwhile may be left out. Returns their number.
///
/// # Errors
/// `PermissionDenied` without the right to trace the process. A file that cannot be written back is left to the process,
/// which gets the error, too.
pub fn write_back(process: Process) -> io::Result<usize> {
    let mut count = 0;
    for entry in fs::read_dir(format!("/proc/{}/fd", process.pid))? {
        let Some(number) = entry?.file_name().to_str().and_then(|name| name.parse::<RawFd>().ok()) else { continue };
        let file = match descriptor::take(process, number) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return Err(e),
            Err(_) => continue,
        };
        let kind = fstat(&file).map(|stat| FileType::from_raw_mode(stat.st_mode));
        let is_disk = matches!(kind, Ok(FileType::RegularFile | FileType::BlockDevice));
        let is_written = fcntl_getfl(&file).is_ok_and(|flags| flags.intersects(OFlags::WRONLY | OFlags::RDWR));
        if is_disk && is_written && fdatasync(&file).is_ok() {
            count += 1;
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn files_that_are_open_for_writing_are_written_back() {
        let count = || write_back(Process::of(std::process::id()).unwrap()).unwrap();
        let before = count();
        let mut written = tempfile::NamedTempFile::new().unwrap();
        written.write_all(b"content").unwrap();
        let _read = fs::File::open(written.path()).unwrap();
        let (_pipe, _) = io::pipe().unwrap();
        assert_eq!(count(), before + 1);
    }
}
