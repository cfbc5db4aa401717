//! The identity of a file at the moment when a QEMU read it, so that a later change is noticed.

use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Identity of a file at one moment. A change to the file, or another file of the same name, gives another identity.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FileIdentity {
    pub path: PathBuf,
    device: u64,
    inode: u64,
    bytes: u64,
    /// Nanoseconds since 1970.
    modified_ns: i128,
    changed_ns: i128,
}

impl FileIdentity {
    /// Returns the identity of the file at `path`; a symbolic link is followed.
    ///
    /// # Errors
    /// Errors of `stat(2)`: the file does not exist, or its directory may not be searched.
    pub fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        let ns = |seconds: i64, nanoseconds: i64| i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
        Ok(Self {
            path: path.to_owned(),
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified_ns: ns(metadata.mtime(), metadata.mtime_nsec()),
            changed_ns: ns(metadata.ctime(), metadata.ctime_nsec()),
        })
    }

    /// Returns whether the file is unchanged since this identity was read.
    pub fn is_unchanged(&self) -> bool {
        Self::of(&self.path).is_ok_and(|now| now == *self)
    }

    /// Returns whether both identities are of the same file, under any name and at any time.
    pub fn is_same_file(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }

    /// Returns the time of the file's last change, in ns since 1970. A second change within one clock tick of the
    /// file system leaves the identity unchanged: do not rely on an identity that is younger than that.
    pub fn changed_ns(&self) -> i128 {
        self.changed_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_and_another_file_are_detected() {
        let directory = tempfile::tempdir().unwrap();
        let (path, other) = (directory.path().join("a"), directory.path().join("b"));
        fs::write(&path, "one").unwrap();
        let identity = FileIdentity::of(&path).unwrap();
        assert!(identity.is_unchanged());
        fs::write(&other, "one").unwrap();
        assert!(!identity.is_same_file(&FileIdentity::of(&other).unwrap()));
        fs::write(&path, "other").unwrap();
        assert!(!identity.is_unchanged(), "another length");
        let identity = FileIdentity::of(&path).unwrap();
        fs::rename(&other, &path).unwrap();
        assert!(!identity.is_unchanged(), "another file");
        let identity = FileIdentity::of(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(!identity.is_unchanged() && FileIdentity::of(&path).is_err());
    }
}
