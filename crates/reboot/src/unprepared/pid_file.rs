//! A file that names a process, by which a manager finds it.

use rustix::fs::{Gid, Mode, Uid, fchmod, fchown};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Returns whether the file names the process.
pub(crate) fn names(path: &Path, pid: u32) -> bool {
    fs::read_to_string(path).is_ok_and(|text| text.trim().parse() == Ok(pid))
}

/// Lets the file name the process `pid`. It keeps its owner and mode, and has the old or the new content at each moment.
/// A manager that has removed the file gets none.
///
/// # Errors
/// When the new file cannot be written.
pub(crate) fn rewrite(path: &Path, pid: u32) -> io::Result<()> {
    let metadata = match fs::metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        metadata => metadata?,
    };
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".rekindle");
    let mut file = File::create(&temporary)?;
    fchown(&file, Some(Uid::from_raw(metadata.uid())), Some(Gid::from_raw(metadata.gid())))?;
    fchmod(&file, Mode::from_raw_mode(metadata.mode()))?;
    writeln!(file, "{pid}")?;
    file.sync_data()?;
    fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_file_keeps_its_mode_and_is_not_made() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vm.pid");
        rewrite(&path, 7).unwrap();
        assert!(!path.exists());
        fs::write(&path, "6\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(names(&path, 6) && !names(&path, 7));
        rewrite(&path, 7).unwrap();
        assert!(names(&path, 7));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
