//! Flipped bits and missing files are reported or repaired. They never give wrong content.

use super::model::{Change, Model, check_image, content, image, open};
use crate::directory::StoreDirectory;
use crate::error::StoreError;
use crate::format::manifest::EntryId;
use crate::format::{Structure, names};
use crate::log::read_claim;
use rekindle_pages::{BlockId, PAGE_SIZE, PageNo};
use rekindle_testing::crash_disk::CrashDisk;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Returns change `n` of a fixed history. Changes overlap in their 14 pages, so that later ones replace records of
/// earlier ones. None of these pages is zero (kind 0).
fn change(n: u64) -> Change {
    let pages = (0..14u64).map(|i| (0usize, (n * 5 + i * (1 + n % 3)) % 30, 1 + (n + i) % 9)).collect();
    Change { blocks: vec![("ram", 30), ("bios", 3)], pages }
}

/// Returns a store with three checkpoints, moved pages and a base index, and its model.
fn store() -> (CrashDisk, Model) {
    let disk = CrashDisk::default();
    let mut model = Model { keep: 3, ..Model::default() };
    let mut engine = open(&disk, 3).unwrap();
    for n in 0..6 {
        model.commit(&mut engine, &change(n)).unwrap();
        engine.remove_obsolete_files();
        if n == 3 {
            engine.compact().unwrap();
            engine.settle().unwrap();
        }
    }
    model.commit(&mut engine, &change(6)).unwrap();
    engine.settle().unwrap();
    engine.remove_obsolete_files();
    drop(engine);
    model.check(&disk);
    (disk.copy(), model)
}

/// Reads everything in a store. Asserts that each page is correct, or that it or its checkpoint fails. Returns the
/// errors.
fn read_all(disk: &CrashDisk, model: &Model) -> Vec<StoreError> {
    let mut errors = Vec::new();
    let newest = image(disk, None);
    if let Ok(image) = &newest {
        assert_eq!(image.info().number, model.newest(), "another checkpoint is taken for the newest");
    }
    errors.extend(newest.err());
    for (number, expected) in &model.checkpoints {
        let image = match image(disk, Some(*number)) {
            Ok(image) => image,
            Err(e) => {
                errors.push(e);
                continue;
            }
        };
        match image.section(crate::format::entry::Section::Devices) {
            Ok(devices) => assert_eq!(devices, expected.devices),
            Err(e) => errors.push(e),
        }
        for (position, (block, pages)) in expected.blocks.iter().enumerate() {
            for page in 0..block.pages() {
                let mut found = [1; PAGE_SIZE];
                match image.read_page((BlockId(position), PageNo(page)), &mut found) {
                    Ok(()) => assert!(found == content(pages.get(&page).copied().unwrap_or(0)), "a wrong page"),
                    Err(e) => errors.push(e),
                }
            }
        }
    }
    errors
}

#[test]
fn a_flipped_bit_anywhere_is_named_or_does_no_harm() {
    let (disk, model) = store();
    let mut seen = BTreeSet::new();
    for name in disk.names() {
        let len = disk.content(&name).unwrap().len();
        // All of the beginning, where the structures are, and samples of the rest.
        let bytes = (0..len.min(400)).chain((400..len).step_by(61)).chain(len.saturating_sub(30)..len);
        for byte in bytes {
            let bad = disk.copy();
            bad.change(&name, |content| content[byte] ^= 1 << (byte % 8));
            for e in read_all(&bad, &model) {
                let text = e.to_string();
                assert!(text.contains(name.trim_start_matches("log/last-")), "{text} does not name {name}");
                match e {
                    StoreError::Damaged { structure, .. } => drop(seen.insert(structure.to_string())),
                    StoreError::Page(_) => drop(seen.insert("page".into())),
                    other => panic!("byte {byte} of {name}: {other}"),
                }
            }
            // For a sample of the bytes: the writer either continues with valid data or reports the damage.
            if byte % 7 == 0
                && let Err(e) = open(&bad, 3)
            {
                assert!(matches!(e, StoreError::Damaged { .. }), "byte {byte} of {name}: {e}");
            }
        }
    }
    let all = [
        Structure::Superblock,
        Structure::SegmentHeader,
        Structure::FrameDirectory,
        Structure::EntryHeader,
        Structure::EntryFooter,
        Structure::Manifest,
        Structure::Checkpoint,
        Structure::Devices,
    ];
    for structure in all.map(|structure| structure.to_string()) {
        assert!(seen.contains(&structure), "{structure} was never found to be damaged: {seen:?}");
    }
    assert!(seen.contains("page"));
}

#[test]
fn a_damaged_base_index_is_made_anew() {
    let (disk, model) = store();
    let bases: Vec<_> = disk.names().into_iter().filter(|name| name.starts_with(names::INDEX)).collect();
    assert!(!bases.is_empty());
    assert!(image(&disk, None).unwrap().has_base());
    for byte in [0, 9, 40, 79, 4096, 4200, 5000] {
        let bad = disk.copy();
        for base in &bases {
            let len = bad.content(base).unwrap().len();
            bad.change(base, |content| content[byte % len] ^= 4);
        }
        assert_eq!(read_all(&bad, &model).len(), 0, "byte {byte}");
        let mut engine = open(&bad, 3).unwrap();
        let mut model = model.clone();
        model.commit(&mut engine, &change(8)).unwrap();
        model.check(&bad);
    }
    for base in &bases {
        disk.remove(base).unwrap();
    }
    assert!(!image(&disk, None).unwrap().has_base());
    model.check(&disk);
}

#[test]
fn a_file_that_is_gone_is_named() {
    let (disk, model) = store();
    for name in disk.names() {
        let bad = disk.copy();
        bad.remove(&name).unwrap();
        let errors = read_all(&bad, &model);
        if name.starts_with(names::INDEX) || name.starts_with("log/last-") {
            assert_eq!(errors.len(), 0);
        } else if name == names::SUPERBLOCK {
            assert!(errors.iter().all(|e| matches!(e, StoreError::NotAStore { .. })));
            assert!(!errors.is_empty());
        } else {
            for e in &errors {
                assert!(matches!(e, StoreError::Missing { file, .. } if *file == name), "{name}: {e}");
            }
            // A missing file must be reported, except for claims and files that only the owner needs.
            let entry = name.strip_prefix("log/").and_then(names::parse_entry);
            let is_readable = |log_number| read_claim(&directory(&disk), EntryId::numbered(log_number)).is_ok();
            let claim = entry.is_some_and(is_readable);
            assert!(claim || !errors.is_empty(), "{name} is not missed");
        }
    }
}

fn directory(disk: &CrashDisk) -> StoreDirectory {
    StoreDirectory::open(Arc::new(disk.clone()), None).unwrap()
}

#[test]
fn what_cannot_be_opened_is_named() {
    let (disk, _) = store();
    // A newer version with a correct checksum.
    let newer = disk.copy();
    newer.change(names::SUPERBLOCK, |block| {
        block[16] = 3;
        let (content, sum) = block.split_last_chunk_mut::<8>().unwrap();
        *sum = crate::format::checksum(content).to_le_bytes();
    });
    let e = image(&newer, None).unwrap_err();
    assert!(matches!(e, StoreError::Newer { found: 3, known: 2, .. }), "{e}");
    // A store of another VM.
    let e = StoreDirectory::open(Arc::new(disk.copy()), Some(uuid::Uuid::from_u128(1))).unwrap_err();
    assert!(matches!(&e, StoreError::OtherVm { found, .. } if found.name == "web"), "{e}");
    // A checkpoint that the store does not keep.
    let e = image(&disk, Some(1)).unwrap_err();
    assert!(e.to_string().contains("available: 5, 6, 7"), "{e}");
    // A directory that is not a store.
    let other = CrashDisk::default();
    assert!(matches!(image(&other, None).unwrap_err(), StoreError::NotAStore { .. }));
    other.create_directory("").unwrap();
    drop(other.create("holiday.jpg").unwrap());
    let e = open(&other, 1).unwrap_err();
    assert!(matches!(&e, StoreError::NotEmpty { found, .. } if found == "holiday.jpg"), "{e}");
    // If the newest entry is damaged, an older checkpoint can still be opened by its number.
    let bad = CrashDisk::default();
    let mut model = Model { keep: 9, ..Model::default() };
    let mut engine = open(&bad, 9).unwrap();
    for n in 0..3 {
        model.commit(&mut engine, &change(n)).unwrap();
    }
    bad.change(&names::entry(engine.newest_entry()), |content| content[20] ^= 1);
    assert!(matches!(image(&bad, None).unwrap_err(), StoreError::Damaged { .. }));
    assert!(matches!(image(&bad, Some(3)).unwrap_err(), StoreError::Damaged { .. }));
    check_image(&image(&bad, Some(2)).unwrap(), 2, &model.checkpoints[&2]);
}
