//! The `[[disk]]` sections.

use std::path::{Path, PathBuf};

use super::super::document::{Section, quoted};
use super::super::error::Problem;
use super::super::files::{self, Wanted};
use super::super::names::check_serial;
use super::super::units::{Bytes, Span};
use super::super::{Disk, DiskCache, DiskFormat};
use super::{Taken, id};

const FORMATS: &[(&str, DiskFormat)] = &[("raw", DiskFormat::Raw), ("qcow2", DiskFormat::Qcow2)];
const CACHES: &[(&str, DiskCache)] = &[
    ("writeback", DiskCache::Writeback),
    ("writethrough", DiskCache::Writethrough),
    ("none", DiskCache::None),
    ("directsync", DiskCache::Directsync),
    ("unsafe", DiskCache::Unsafe),
];

/// Smallest rate limit: with a slower disk, requests of the guest's kernel time out.
const LEAST_BPS: u64 = 64 << 10;

/// Reads every disk, in order.
pub(super) fn read(top: &Section<'_>) -> Vec<Disk> {
    let mut ids = Taken::new("give each disk its own id");
    let mut writers: Vec<(PathBuf, bool, usize)> = Vec::new();
    let disk = |(index, section): (usize, Section<'_>)| {
        let id = id(&section, index, &mut ids);
        if section.at("path").is_none() {
            section.missing("path", "write for example path = \"disk.img\"");
        }
        let path = files::path(&section, "path", Wanted::Disk);
        let readonly = section.flag("readonly", false);
        let mut format = section.choice("format", FORMATS).map(|found| found.value);
        if let Some(path) = &path {
            let real = path.value.canonicalize().unwrap_or_else(|_| path.value.clone());
            if let Some((.., first)) = writers.iter().find(|(other, ro, _)| *other == real && !(*ro && readonly)) {
                let (line, _) = section.document().position(*first);
                let value = quoted(&path.value.to_string_lossy());
                let hint = "two writers destroy an image; give each disk its own file, or set readonly = true on both";
                section.document().note(path.at, Problem::Duplicate { key: "disk.path".into(), value, line, hint });
            }
            writers.push((real, readonly, path.at));
            format = format.or_else(|| guess_format(&section, &path.value));
        }
        let cache = section.choice("cache", CACHES).map(|found| found.value);
        let server = section.flag("server", can_be_served(format, cache));
        if server {
            fits_server(&section, format, cache);
        }
        Disk {
            id,
            path: path.map(|found| found.value).unwrap_or_default(),
            format: format.unwrap_or(DiskFormat::Raw),
            readonly,
            // The server's knowledge of the guest's cache is worth more than a second copy in the host's cache.
            cache: cache.unwrap_or(if server { DiskCache::None } else { DiskCache::Writeback }),
            serial: section.checked("serial", check_serial).map(|found| found.value.to_owned()),
            server,
            redo: redo(&section, server),
            attic_keep: attic_keep(&section, server),
            bps: bytes_per_second(&section),
            iops: section.number("iops", 1, u32::MAX).map(|found| found.value),
        }
    };
    top.sections("disk").into_iter().enumerate().map(disk).collect()
}

fn redo(section: &Section<'_>, server: bool) -> Option<PathBuf> {
    let folder = files::path(section, "redo", Wanted::Folder)?;
    if !server {
        let why = "`redo` is for a disk that Rekindle's server has: QEMU writes no redo log";
        section.document().conflict(folder.at, why);
    }
    Some(folder.value)
}

fn attic_keep(section: &Section<'_>, server: bool) -> Option<Span> {
    let keep = section.quantity::<Span>("attic_keep")?;
    if !server {
        section
            .document()
            .conflict(keep.at, "`attic_keep` is for a disk that Rekindle's server has: QEMU retains no cache");
    }
    Some(keep.value)
}

fn bytes_per_second(section: &Section<'_>) -> Option<Bytes> {
    let bps = section.quantity::<Bytes>("bps")?;
    if bps.value.as_u64() < LEAST_BPS {
        section.invalid(
            "bps",
            quoted(&bps.value.to_string()),
            bps.at,
            "too slow for any guest; write at least \"64K\"",
        );
        return None;
    }
    Some(bps.value)
}

/// Returns whether one of Rekindle's disk servers can serve such a disk.
fn can_be_served(format: Option<DiskFormat>, cache: Option<DiskCache>) -> bool {
    format != Some(DiskFormat::Qcow2) && cache.is_none_or(served_with)
}

fn served_with(cache: DiskCache) -> bool {
    matches!(cache, DiskCache::None | DiskCache::Writeback)
}

/// Records why a disk server cannot serve a disk, although the user wants it.
fn fits_server(section: &Section<'_>, format: Option<DiskFormat>, cache: Option<DiskCache>) {
    let at = section.at("server").unwrap_or(section.at);
    if format == Some(DiskFormat::Qcow2) {
        let why = "`server = true` is for raw images; convert it (qemu-img convert -O raw), or leave `server` out";
        section.document().conflict(at, why);
    }
    if let Some(cache) = cache.filter(|cache| !served_with(*cache)) {
        let cache = cache.as_str();
        section.document().conflict(
            section.at("cache").unwrap_or(at),
            format!(
                "`cache = \"{cache}\"` is QEMU's own; with `server = true` write \"none\" (O_DIRECT) or \"writeback\""
            ),
        );
    }
}

/// Determines the format by the file name's extension. The content may only contradict it, never decide: a guest
/// could write a qcow2 header to its raw disk, and make the next QEMU read a file of the host that the header names.
fn guess_format(section: &Section<'_>, path: &Path) -> Option<DiskFormat> {
    let named = path.extension().is_some_and(|extension| extension == "qcow2");
    let is = files::is_qcow2(path)?;
    let why = match (named, is) {
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
