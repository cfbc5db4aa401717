//! A file that names a process, by which a manager finds it.

use rekindle_vm::rundir::ignore_missing;
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
    // The directory may belong to another user, which could plant links to files of root.
    let metadata = match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        metadata => metadata?,
    };
    if !metadata.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".rekindle");
    ignore_missing(fs::remove_file(&temporary))?;
    let mut file = File::options().write(true).create_new(true).open(&temporary)?;
    fchown(&file, Some(Uid::from_raw(metadata.uid())), Some(Gid::from_raw(metadata.gid())))?;
    fchmod(&file, Mode::from_raw_mode(metadata.mode() & 0o777))?;
    writeln!(file, "{pid}")?;
    file.sync_data()?;
    fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

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

    #[test]
    fn a_planted_link_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let (path, victim) = (directory.path().join("vm.pid"), directory.path().join("victim"));
        fs::write(&victim, "untouched").unwrap();
        fs::write(&path, "6").unwrap();
        symlink(&victim, directory.path().join("vm.pid.rekindle")).unwrap();
        rewrite(&path, 7).unwrap();
        assert!(names(&path, 7));
        fs::remove_file(&path).unwrap();
        symlink(&victim, &path).unwrap();
        rewrite(&path, 8).unwrap_err();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
    }
}
