//! The identity of a file at the moment when a QEMU read it, so that a later change is noticed.

use serde::{Deserialize, Serialize};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Identity of a file at one moment. A change to the file, or another file of the same name, gives another mark.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Mark {
    /// Path of the file.
    pub path: PathBuf,
    device: u64,
    inode: u64,
    bytes: u64,
    /// Nanoseconds since 1970.
    modified_ns: i128,
    changed_ns: i128,
}

impl Mark {
    /// Returns the mark of the file at `path`; a symbolic link is followed.
    ///
    /// # Errors
    /// Errors of `stat(2)`: the file does not exist, or its directory may not be searched.
    pub fn of(path: &Path) -> io::Result<Self> {
        let found: Metadata = fs::metadata(path)?;
        let ns = |seconds: i64, rest: i64| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
        Ok(Self {
            path: path.to_owned(),
            device: found.dev(),
            inode: found.ino(),
            bytes: found.len(),
            modified_ns: ns(found.mtime(), found.mtime_nsec()),
            changed_ns: ns(found.ctime(), found.ctime_nsec()),
        })
    }

    /// Returns whether the file is unchanged since the mark was made.
    #[must_use]
    pub fn holds(&self) -> bool {
        Self::of(&self.path).is_ok_and(|now| now == *self)
    }

    /// Returns whether both marks are of the same file, under any name.
    #[must_use]
    pub fn is_file_of(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }

    /// Returns the time of the file's last change, in ns since 1970. A second change within one clock tick of the
    /// file system leaves the mark unchanged: do not rely on a mark that is younger than that.
    #[must_use]
    pub fn changed_ns(&self) -> i128 {
        self.changed_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_and_another_file_are_seen_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let (path, other) = (directory.path().join("a"), directory.path().join("b"));
        fs::write(&path, "one").unwrap();
        let mark = Mark::of(&path).unwrap();
        assert!(mark.holds());
        fs::write(&other, "one").unwrap();
        assert!(!mark.is_file_of(&Mark::of(&other).unwrap()));
        fs::write(&path, "other").unwrap();
        assert!(!mark.holds(), "another length");
        let mark = Mark::of(&path).unwrap();
        fs::rename(&other, &path).unwrap();
        assert!(!mark.holds(), "another file");
        let mark = Mark::of(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(!mark.holds() && Mark::of(&path).is_err());
    }
}
