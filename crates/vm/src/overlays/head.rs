//! Copies an overlay in the pause of a checkpoint: the head of its epoch.

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read};

/// Makes `to` a copy of `from`. Copies no holes: a new overlay consists of little else, although each write of
/// the guest makes it longer by a cluster.
pub(super) fn copy_data(from: &File, mut to: &File) -> io::Result<()> {
    let length = from.metadata()?.len();
    to.set_len(0)?;
    to.set_len(length)?;
    let mut copied_to = 0;
    while copied_to < length {
        let start = match seek(from, SeekFrom::Data(copied_to)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            // This file system does not report holes.
            Err(Errno::INVAL) => copied_to,
            Err(e) => return Err(e.into()),
        };
        let end = seek(from, SeekFrom::Hole(start)).unwrap_or(length);
        seek(from, SeekFrom::Start(start))?;
        seek(to, SeekFrom::Start(start))?;
        let mut data = from.take(end - start);
        if io::copy(&mut data, &mut to)? < end - start {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        copied_to = end;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn a_copy_has_the_data_and_the_holes() {
        let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        from.write_all_at(b"header", 0).unwrap();
        from.write_all_at(&[7; 4096], 16 << 20).unwrap();
        from.set_len((32 << 20) + 5).unwrap();
        copy_data(&from, &to).unwrap();
        let read = |mut file: &File| {
            let mut content = Vec::new();
            seek(file, SeekFrom::Start(0)).unwrap();
            file.read_to_end(&mut content).unwrap();
            content
        };
        assert!(read(&from) == read(&to));
        assert!(to.metadata().unwrap().blocks() * 512 < 1 << 20);
    }

    #[test]
    fn a_file_without_data_is_copied() {
        let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        copy_data(&from, &to).unwrap();
        from.set_len(8192).unwrap();
        copy_data(&from, &to).unwrap();
        assert_eq!(to.metadata().unwrap().len(), 8192);
    }
}
