//! `rekindle disk merge` and `serve` without guests: with a redo log that belongs to another image, and with a redo log
//! whose sealed epoch is damaged.

use crate::common::Lab;
use rekindle_disk::redo::directory::LogDirectory;
use rekindle_disk::redo::files::LocalFiles;
use rekindle_disk::redo::format::{EntryKind, PAGE_BYTES};
use rekindle_disk::redo::log::seal::SealRecord;
use rekindle_disk::redo::log::{Log, SpaceLimit};
use rekindle_kernel::durable_file::DurableFile;
use rekindle_kernel::uring::Buffer;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const BYTES: u64 = 64 << 10;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Creates an image of zeros and its redo log. Epoch 1 is sealed and has written ones to the second block.
fn image_with_log(lab: &Lab, name: &str) -> (PathBuf, PathBuf) {
    let (image, redo) = (lab.path(name), lab.path(&format!("{name}.redo")));
    fs::write(&image, vec![0; BYTES as usize]).unwrap();
    let mut log_dir = LogDirectory::create(LocalFiles::new(&redo, false), BYTES, Some(name.into())).unwrap();
    let mut log = Log::new(log_dir.state().disk, 1, 0, 0, u64::MAX);
    for epoch in [1, 2] {
        log.add_ready(log_dir.create_segment(epoch).unwrap());
    }
    let placed = log.allocate(PAGE_BYTES, PAGE_BYTES, EntryKind::Data, SpaceLimit::Enforced).unwrap();
    let mut entry = Buffer::new(2 * PAGE_BYTES as usize);
    entry[PAGE_BYTES as usize..].fill(1);
    let header = log.entry_header(&placed, &entry[PAGE_BYTES as usize..]);
    entry[..PAGE_BYTES as usize].copy_from_slice(&header);
    log.segment_file(1).unwrap().write_at(&entry, placed.offset).unwrap();
    log.complete_write(&placed);
    let epoch = log.mark().unwrap();
    for segment in log.segments_to_seal(epoch).unwrap() {
        assert_eq!(segment.make_durable(&redo).unwrap(), SealRecord::Written);
    }
    log_dir.record(|state| state.seal(epoch, &[1])).unwrap();
    (image, redo)
}

fn content(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.clone(), fs::read(&path).unwrap())).collect()
}

#[test]
fn the_log_of_another_image_is_neither_merged_nor_served() {
    let lab = Lab::without_root();
    let (a, redo) = image_with_log(&lab, "a.raw");
    let b = lab.path("b.raw");
    fs::write(&b, vec![7; BYTES as usize]).unwrap();
    let before = content(&redo);
    let socket = lab.path("b.sock");
    let merge = ["disk", "merge", text(&b), "--redo", text(&redo), "--buffered"];
    let serve = ["disk", "serve", text(&b), "--redo", text(&redo), "--socket", text(&socket), "--buffered"];
    for arguments in [&merge[..], &[&merge[..], &["--dry-run"]].concat(), &serve[..]] {
        let failed = lab.rekindle(arguments).status(1);
        failed.prints(&["a.raw, not of b.raw", "--image-renamed-from a.raw"]);
        assert_eq!(fs::read(&b).unwrap(), vec![7; BYTES as usize], "{arguments:?}");
        assert_eq!(content(&redo), before, "{arguments:?}");
    }
    lab.rekindle([&merge[..], &["--image-renamed-from", "c.raw"]].concat()).status(1);
    // A link to the image is a path of the same image, so its redo log is accepted.
    let folder = lab.path("folder");
    fs::create_dir(&folder).unwrap();
    let link = folder.join("disk");
    std::os::unix::fs::symlink(&a, &link).unwrap();
    lab.rekindle(["disk", "merge", text(&link), "--redo", text(&redo), "--dry-run"]).ok();
    // The image is renamed, as the option states.
    fs::rename(&a, &b).unwrap();
    lab.rekindle([&merge[..], &["--image-renamed-from", "a.raw"]].concat()).ok();
    assert_eq!(fs::read(&b).unwrap()[PAGE_BYTES as usize..2 * PAGE_BYTES as usize], [1; PAGE_BYTES as usize]);
    assert!(!redo.exists());
}

#[test]
fn a_damaged_sealed_epoch_is_not_merged_and_its_segment_is_named() {
    let lab = Lab::without_root();
    let (image, redo) = image_with_log(&lab, "disk.raw");
    let segment = redo.join("1.log");
    let mut bytes = fs::read(&segment).unwrap();
    bytes[2 * PAGE_BYTES as usize + 9] ^= 1;
    fs::write(&segment, bytes).unwrap();
    let before = content(&redo);
    for arguments in [&["disk", "merge", text(&image), "--buffered"][..], &["disk", "merge", text(&image), "--dry-run"]]
    {
        lab.rekindle(arguments).status(1).prints(&["1.log", "epoch 1", "byte 4096", "backup"]);
        assert_eq!(fs::read(&image).unwrap(), vec![0; BYTES as usize], "{arguments:?}");
        assert_eq!(content(&redo), before, "{arguments:?}");
    }
}
