//! The `[[disk]]` sections.

use std::path::{Path, PathBuf};

use super::super::document::Section;
use super::super::files::{PathKind, is_qcow2, read_path};
use super::super::names::check_serial;
use super::super::units::{Bytes, Span};
use super::super::{Disk, DiskCache, DiskFormat};
use super::{UniqueValues, read_id, record_duplicate};

const FORMATS: &[(&str, DiskFormat)] = &[("raw", DiskFormat::Raw), ("qcow2", DiskFormat::Qcow2)];
const CACHES: &[(&str, DiskCache)] = &[
    ("writeback", DiskCache::Writeback),
    ("writethrough", DiskCache::Writethrough),
    ("none", DiskCache::None),
    ("directsync", DiskCache::Directsync),
    ("unsafe", DiskCache::Unsafe),
];

/// With a slower disk, requests of the guest's kernel time out.
const MIN_BYTES_PER_SECOND: u64 = 64 << 10;

/// Reads every disk, in order.
pub(super) fn read(top: &Section<'_>) -> Vec<Disk> {
    let mut ids = UniqueValues::new("give each disk its own id");
    let mut images = Vec::new();
    let sections = top.sections("disk");
    let disks = sections.iter().enumerate().map(|(index, section)| read_disk(section, index, &mut ids, &mut images));
    disks.collect()
}

fn read_disk(section: &Section<'_>, index: usize, ids: &mut UniqueValues, images: &mut Vec<UsedImage>) -> Disk {
    let id = read_id(section, index, ids);
    if !section.has("path") {
        section.record_missing("path", "write for example path = \"disk.img\"");
    }
    let path = read_path(section, "path", PathKind::Disk);
    let readonly = section.flag("readonly", false);
    let mut format = section.choice("format", FORMATS);
    if let Some(path) = &path {
        use_image(section, path, readonly, images);
        format = format.or_else(|| guess_format(section, path));
    }
    let cache = section.choice("cache", CACHES);
    let server = section.flag("server", can_be_served(format, cache));
    if server {
        check_can_be_served(section, format, cache);
    }
    Disk {
        id,
        path: path.unwrap_or_default(),
        format: format.unwrap_or(DiskFormat::Raw),
        readonly,
        // The server's knowledge of the guest's cache is worth more than a second copy in the host's cache.
        cache: cache.unwrap_or(if server { DiskCache::None } else { DiskCache::Writeback }),
        serial: section.checked("serial", check_serial).map(str::to_owned),
        server,
        redo: read_redo(section, server),
        attic_keep: read_attic_keep(section, server),
        bps: read_bytes_per_second(section),
        iops: section.number("iops", 1, u32::MAX),
    }
}

/// The image of a disk that was read before.
struct UsedImage {
    real_path: PathBuf,
    readonly: bool,
    /// Byte offset of the disk's `path`.
    offset: usize,
}

/// Records a mistake if another disk has the same image and one of both is writable.
fn use_image(section: &Section<'_>, path: &Path, readonly: bool, images: &mut Vec<UsedImage>) {
    let real_path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let offset = section.offset("path");
    let conflicts = |image: &&UsedImage| image.real_path == real_path && !(image.readonly && readonly);
    if let Some(first) = images.iter().find(conflicts) {
        let hint = "two writers destroy an image; give each disk its own file, or set readonly = true on both";
        record_duplicate(section, "path", &path.to_string_lossy(), offset, first.offset, hint);
    }
    images.push(UsedImage { real_path, readonly, offset });
}

fn read_redo(section: &Section<'_>, server: bool) -> Option<PathBuf> {
    let folder = read_path(section, "redo", PathKind::Folder)?;
    if !server {
        section.conflict("redo", "`redo` is for a disk that Rekindle's server has: QEMU writes no redo log");
    }
    Some(folder)
}

fn read_attic_keep(section: &Section<'_>, server: bool) -> Option<Span> {
    let keep = section.quantity("attic_keep")?;
    if !server {
        section.conflict("attic_keep", "`attic_keep` is for a disk that Rekindle's server has: QEMU retains no cache");
    }
    Some(keep)
}

fn read_bytes_per_second(section: &Section<'_>) -> Option<Bytes> {
    let bps: Bytes = section.quantity("bps")?;
    if bps.as_u64() < MIN_BYTES_PER_SECOND {
        section.reject("bps", "too slow for any guest; write at least \"64K\"");
        return None;
    }
    Some(bps)
}

/// Returns whether one of Rekindle's disk servers can serve such a disk.
fn can_be_served(format: Option<DiskFormat>, cache: Option<DiskCache>) -> bool {
    format != Some(DiskFormat::Qcow2) && cache.is_none_or(is_cache_of_server)
}

fn is_cache_of_server(cache: DiskCache) -> bool {
    matches!(cache, DiskCache::None | DiskCache::Writeback)
}

/// Records why a disk server cannot serve a disk, although the user wants it.
fn check_can_be_served(section: &Section<'_>, format: Option<DiskFormat>, cache: Option<DiskCache>) {
    if format == Some(DiskFormat::Qcow2) {
        let why = "`server = true` is for raw images; convert it (qemu-img convert -O raw), or leave `server` out";
        section.conflict("server", why);
    }
    if let Some(cache) = cache.filter(|cache| !is_cache_of_server(*cache)) {
        let cache = cache.as_str();
        section.conflict(
            "cache",
            format!(
                "`cache = \"{cache}\"` is QEMU's own; with `server = true` write \"none\" (O_DIRECT) or \"writeback\""
            ),
        );
    }
}

/// Determines the format by the file name's extension. The content may only contradict it, never decide: a guest
/// could write a qcow2 header to its raw disk, and make the next QEMU read a file of the host that the header names.
fn guess_format(section: &Section<'_>, path: &Path) -> Option<DiskFormat> {
    let is_named_qcow2 = path.extension().is_some_and(|extension| extension == "qcow2");
    let why = match (is_named_qcow2, is_qcow2(path)?) {
        (true, true) => return Some(DiskFormat::Qcow2),
        (false, false) => return Some(DiskFormat::Raw),
        (true, false) => "is called .qcow2, but is no qcow2 image; add format = \"raw\", or recreate the image",
        (false, true) => {
            "begins like a qcow2 image; add format = \"qcow2\" (or \"raw\", if the guest keeps one on its raw disk)"
        }
    };
    section.reject("path", why);
    None
}
