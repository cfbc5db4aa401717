//! Checks of the files and folders that a definition names: they must exist and be of the right kind.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use super::Bytes;
use super::document::{Section, quoted};
use super::error::Problem;

/// First bytes of a qcow2 image.
const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";

/// `HUGETLBFS_MAGIC` of `linux/magic.h`.
const HUGETLBFS_MAGIC: rustix::fs::FsWord = 0x9584_58f6;

/// The required kind of a path.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PathKind {
    /// A readable regular file.
    File,
    /// A readable regular file or block device.
    Disk,
    /// A directory.
    Folder,
}

/// Returns the absolute path under `key`. Mistakes are recorded. A wrong path is returned too, so that it can be
/// compared with others.
pub(super) fn read_path(section: &Section<'_>, key: &'static str, wanted: PathKind) -> Option<PathBuf> {
    let text = section.text(key)?;
    if text.is_empty() {
        section.reject(key, "empty; write a path, or leave the key out if you want none");
        return None;
    }
    let path = section.document().resolve(text);
    match check_path(&path, wanted) {
        Ok(()) => {}
        Err(PathFlaw::Unfit(why)) => section.reject(key, why),
        Err(PathFlaw::Io(source)) => {
            let problem = Problem::File { key: section.path(key), value: quoted(text), path: path.clone(), source };
            section.document().record(section.offset(key), problem);
        }
    }
    Some(path)
}

/// Why a path cannot be used.
enum PathFlaw {
    /// It is missing, of the wrong kind, or not UTF-8. The text ends with what to do.
    Unfit(String),
    /// A system call failed.
    Io(io::Error),
}

fn check_path(path: &Path, wanted: PathKind) -> Result<(), PathFlaw> {
    let shown = path.display();
    if path.to_str().is_none() {
        return Err(PathFlaw::Unfit(format!("{shown} is not UTF-8; move the definition to a folder whose name is")));
    }
    let kind = match fs::metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let missing = if wanted == PathKind::Folder { "folder" } else { "file" };
            return Err(PathFlaw::Unfit(format!(
                "no {missing} {shown}; make it, or correct the path (a relative one starts from the definition's folder)"
            )));
        }
        Err(error) => return Err(PathFlaw::Io(error)),
    };
    let is_wanted = match wanted {
        PathKind::File => kind.is_file(),
        PathKind::Disk => kind.is_file() || kind.is_block_device(),
        PathKind::Folder => kind.is_dir(),
    };
    if !is_wanted {
        let (actual, hint) = match (kind.is_dir(), wanted) {
            (_, PathKind::Folder) => ("no folder", "name the folder itself"),
            (true, _) => ("a folder", "name a file in it"),
            (false, PathKind::Disk) => ("neither a file nor a block device", "name an image"),
            (false, PathKind::File) => ("not a regular file", "name one"),
        };
        return Err(PathFlaw::Unfit(format!("{shown} is {actual}; {hint}")));
    }
    if wanted == PathKind::Folder { Ok(()) } else { File::open(path).map(drop).map_err(PathFlaw::Io) }
}

/// Returns whether the image begins as qcow2 does; `None` if it cannot be read, which [`read_path`] has recorded.
pub(super) fn is_qcow2(path: &Path) -> Option<bool> {
    let kind = fs::metadata(path).ok()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return None;
    }
    let mut first_bytes = Vec::with_capacity(QCOW2_MAGIC.len());
    File::open(path).ok()?.take(QCOW2_MAGIC.len() as u64).read_to_end(&mut first_bytes).ok()?;
    Some(first_bytes == QCOW2_MAGIC)
}

/// Returns the page size of `dir`'s hugetlbfs; `None` if it is on another file system.
pub(super) fn huge_page_size(dir: &Path) -> Option<Bytes> {
    let fs = rustix::fs::statfs(dir).ok().filter(|fs| fs.f_type == HUGETLBFS_MAGIC)?;
    u64::try_from(fs.f_bsize).ok().map(Bytes::new)
}
