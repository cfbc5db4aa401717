//! Checks of the files and folders that a definition names: they must exist and be of the right kind.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use super::Bytes;
use super::document::{Found, Section, quoted};
use super::error::Problem;

/// First bytes of a qcow2 image.
const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";

/// `HUGETLBFS_MAGIC` of `linux/magic.h`.
const HUGETLBFS_MAGIC: rustix::fs::FsWord = 0x9584_58f6;

/// The required kind of a path.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// A readable regular file.
    File,
    /// A readable regular file or block device.
    Disk,
    /// A directory.
    Folder,
}

/// Returns the absolute path under `key`. Mistakes are recorded. A wrong path is returned too, so that it can be
/// compared with others.
pub(super) fn path(section: &Section<'_>, key: &'static str, wanted: Wanted) -> Option<Found<PathBuf>> {
    let text = section.text(key)?;
    if text.value.is_empty() {
        section.invalid(key, quoted(""), text.at, "empty; write a path, or leave the key out if you want none");
        return None;
    }
    let path = section.document().resolve(text.value);
    match check(&path, wanted) {
        Ok(()) => {}
        Err(Unfit::Kind(why)) => section.invalid(key, quoted(text.value), text.at, why),
        Err(Unfit::Io(source)) => {
            let (key, value) = (section.path(key), quoted(text.value));
            section.document().note(text.at, Problem::File { key, value, path: path.clone(), source });
        }
    }
    Some(Found { value: path, at: text.at })
}

enum Unfit {
    Kind(String),
    Io(io::Error),
}

fn check(path: &Path, wanted: Wanted) -> Result<(), Unfit> {
    let shown = path.display();
    if path.to_str().is_none() {
        return Err(Unfit::Kind(format!("{shown} is not UTF-8; move the definition to a folder whose name is")));
    }
    let kind = match fs::metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let what = if wanted == Wanted::Folder { "folder" } else { "file" };
            return Err(Unfit::Kind(format!(
                "no {what} {shown}; make it, or correct the path (a relative one starts from the definition's folder)"
            )));
        }
        Err(error) => return Err(Unfit::Io(error)),
    };
    let fits = match wanted {
        Wanted::File => kind.is_file(),
        Wanted::Disk => kind.is_file() || kind.is_block_device(),
        Wanted::Folder => kind.is_dir(),
    };
    if !fits {
        let (is, hint) = match (kind.is_dir(), wanted) {
            (_, Wanted::Folder) => ("no folder", "name the folder itself"),
            (true, _) => ("a folder", "name a file in it"),
            (false, Wanted::Disk) => ("neither a file nor a block device", "name an image"),
            (false, Wanted::File) => ("not a regular file", "name one"),
        };
        return Err(Unfit::Kind(format!("{shown} is {is}; {hint}")));
    }
    if wanted == Wanted::Folder { Ok(()) } else { File::open(path).map(drop).map_err(Unfit::Io) }
}

/// Returns whether the image begins as qcow2 does; `None` if it cannot be read, which [`path`] has recorded.
pub(super) fn is_qcow2(path: &Path) -> Option<bool> {
    let kind = fs::metadata(path).ok()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return None;
    }
    let mut start = Vec::with_capacity(QCOW2_MAGIC.len());
    File::open(path).ok()?.take(QCOW2_MAGIC.len() as u64).read_to_end(&mut start).ok()?;
    Some(start == QCOW2_MAGIC)
}

/// Returns the page size of `dir`'s hugetlbfs; `None` if it is on another file system.
pub(super) fn huge_page(dir: &Path) -> Option<Bytes> {
    let fs = rustix::fs::statfs(dir).ok().filter(|fs| fs.f_type == HUGETLBFS_MAGIC)?;
    u64::try_from(fs.f_bsize).ok().map(Bytes::new)
}
