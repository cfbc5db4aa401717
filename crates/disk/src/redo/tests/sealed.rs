//! Damage to the segment of a sealed epoch: opening the log fails, and names the segment.
//!
//! An *epoch* is the time between two checkpoints, and a *segment* the file with its writes. An epoch is *sealed* when
//! its writes are durable and listed in the segment.

use super::model::{BYTES, ProtectedDisk, content, initial_image};
use crate::block::SECTOR;
use crate::redo::directory::LogDirectory;
use crate::redo::epoch_state::tests::{ranges, slot};
use crate::redo::epoch_state::{EpochRange, EpochState, FORMAT};
use crate::redo::format::{EntryKind, PAGE_BYTES};
use crate::redo::log::seal::CannotSeal;
use crate::redo::recover::{DiskVersion, open};
use crate::slots::newest_slot;
use rekindle_testing::crash_disk::CrashDisk;

/// A limit of the log that no test reaches.
const LIMIT: u64 = 1 << 30;

/// Returns a disk with three epochs. The first and the second are sealed, and have four writes each, of which the
/// second overwrites the first. The third epoch has one write.
fn model() -> ProtectedDisk {
    let mut model = ProtectedDisk::begin(CrashDisk::new(initial_image()));
    for _ in 0..2 {
        model.prepare().unwrap();
        for sector in [0, 0, 8] {
            model.write(sector, 8, EntryKind::Data);
        }
        model.write(20, 8, EntryKind::Hole);
        let epoch = model.mark();
        model.seal(epoch).unwrap();
    }
    model.write(4, 8, EntryKind::Data);
    model.end_writes();
    model.flush();
    model.prepare().unwrap();
    model
}

fn opened(model: &ProtectedDisk, version: DiskVersion) -> Result<(), String> {
    open(model.disk.clone(), BYTES, version, LIMIT).map(drop).map_err(|e| e.to_string())
}

fn length(model: &ProtectedDisk, name: &str) -> usize {
    let mut length = 0;
    model.disk.change(name, |bytes| length = bytes.len());
    length
}

/// Checks that opening the newest disk fails and names the segment and a remedy, and that an older checkpoint can
/// still be opened.
#[track_caller]
fn check_rejected(model: &ProtectedDisk, epoch: u64, context: &str) {
    let name = format!("{epoch}.log");
    for version in [DiskVersion::Newest, DiskVersion::Epoch { epoch: 2, disk: model.uuid }] {
        let error = opened(model, version).expect_err(context);
        assert!(error.contains(&name) && error.contains("restore"), "{context}: {error}");
    }
    let older = opened(model, DiskVersion::Epoch { epoch: 1, disk: model.uuid });
    assert_eq!(older.is_ok(), epoch == 2, "{context}: {older:?}");
}

#[test]
fn a_flipped_bit_in_a_sealed_epoch_is_an_error_and_not_older_data() {
    let page = PAGE_BYTES as usize;
    for epoch in [1, 2] {
        let name = format!("{epoch}.log");
        let model = model();
        // Head; header and data of the second entry; header of the last entry, which has no data; the seal record.
        for at in [20, 3 * page + 20, 4 * page + 7, 7 * page + 20, 8 * page + 20, 9 * page + 7] {
            model.disk.change(&name, |bytes| bytes[at] ^= 0x40);
            check_rejected(&model, epoch, &format!("{name}: byte {at}"));
            model.disk.change(&name, |bytes| bytes[at] ^= 0x40);
        }
        opened(&model, DiskVersion::Newest).unwrap();
    }
}

#[test]
fn a_truncated_segment_of_a_sealed_epoch_is_an_error() {
    for epoch in [1, 2] {
        let name = format!("{epoch}.log");
        let within_head = SECTOR as usize;
        for bytes_left in (0..length(&model(), &name)).step_by(PAGE_BYTES as usize).chain([within_head]) {
            let model = model();
            model.disk.change(&name, |bytes| bytes.truncate(bytes_left));
            check_rejected(&model, epoch, &format!("{name} of {bytes_left} bytes"));
            assert_eq!(length(&model, &name), bytes_left, "a damaged segment is kept");
        }
    }
}

#[test]
fn a_missing_segment_of_a_sealed_epoch_is_an_error() {
    for epoch in [1, 2] {
        let model = model();
        model.disk.remove(&format!("{epoch}.log")).unwrap();
        check_rejected(&model, epoch, "missing");
    }
}

#[test]
fn damage_to_an_unsealed_epoch_is_a_torn_write() {
    let model = model();
    model.disk.change("3.log", |bytes| bytes[PAGE_BYTES as usize + 20] ^= 1);
    opened(&model, DiskVersion::Newest).unwrap();
    model.disk.remove("3.log").unwrap();
    opened(&model, DiskVersion::Newest).unwrap();
}

#[test]
fn what_was_merged_or_discarded_may_be_missing() {
    let mut model = model();
    model.commit(1).unwrap();
    assert!(!model.disk.names().contains(&"1.log".into()));
    opened(&model, DiskVersion::Newest).unwrap();
    let mut model = self::model();
    model.reopen(DiskVersion::Epoch { epoch: 1, disk: model.uuid });
    model.prepare().unwrap();
    assert!(!model.disk.names().contains(&"2.log".into()));
    model.write(9, 1, EntryKind::Data);
    model.end_writes();
    model.reopen(DiskVersion::Newest);
}

#[test]
fn the_next_seal_covers_epochs_that_a_killed_server_left() {
    let mut model = ProtectedDisk::begin(CrashDisk::new(initial_image()));
    model.prepare().unwrap();
    model.write(0, 8, EntryKind::Data);
    model.end_writes();
    model.reopen(DiskVersion::Newest);
    model.prepare().unwrap();
    model.write(8, 8, EntryKind::Data);
    let epoch = model.mark();
    model.seal(epoch).unwrap();
    opened(&model, DiskVersion::Newest).unwrap();
    model.disk.change("1.log", |bytes| bytes[2 * PAGE_BYTES as usize] ^= 1);
    let error = opened(&model, DiskVersion::Newest).unwrap_err();
    assert!(error.contains("1.log"), "{error}");
}

#[test]
fn overwritten_entries_of_a_sealed_epoch_may_be_reclaimed() {
    let mut model = ProtectedDisk::begin(CrashDisk::new(initial_image()));
    model.log = Some(crate::redo::log::Log::new(model.uuid, 1, 0, 0, 48 << 10));
    model.prepare().unwrap();
    for _ in 0..4 {
        model.write(0, 8, EntryKind::Data);
    }
    let epoch = model.mark();
    model.seal(epoch).unwrap();
    let steps = model.disk.steps();
    model.flush();
    assert!(model.disk.steps() > steps, "no space was reclaimed");
    model.reopen(DiskVersion::Newest);
    let before = content(&model.disk, model.log.as_ref());
    model.reopen(DiskVersion::Epoch { epoch, disk: model.uuid });
    assert_eq!(content(&model.disk, model.log.as_ref()), before);
}

/// Returns a log of version 1: epoch 1 is sealed without a seal record, and the state has neither segments nor an
/// image.
fn log_of_format_1() -> ProtectedDisk {
    let mut model = ProtectedDisk::begin(CrashDisk::new(initial_image()));
    model.prepare().unwrap();
    model.write(0, 8, EntryKind::Data);
    let epoch = model.mark();
    model.flush();
    let json = format!(
        r#"{{"format":1,"disk":"{}","bytes":{BYTES},"sealed":{epoch},"floor":0,"merged":0,"dead":[]}}"#,
        model.uuid
    );
    model.disk.change("state", |bytes| *bytes = [slot(&json, 6), slot(&json, 5)].concat());
    model.guarantee.sealed.insert(epoch);
    model.reopen(DiskVersion::Newest);
    model
}

#[test]
fn a_log_of_format_1_is_read_and_the_next_seal_covers_its_segments() {
    let mut model = log_of_format_1();
    model.reopen(DiskVersion::Epoch { epoch: 1, disk: model.uuid });
    model.reopen(DiskVersion::Newest);
    // As in version 1, a damaged entry is mistaken for a torn one.
    model.disk.change("1.log", |bytes| bytes[PAGE_BYTES as usize + 20] ^= 1);
    opened(&model, DiskVersion::Newest).unwrap();
    model.disk.change("1.log", |bytes| bytes[PAGE_BYTES as usize + 20] ^= 1);
    model.prepare().unwrap();
    model.write(8, 8, EntryKind::Data);
    let epoch = model.mark();
    model.seal(epoch).unwrap();
    opened(&model, DiskVersion::Newest).unwrap();
    model.disk.change("1.log", |bytes| bytes[PAGE_BYTES as usize + 20] ^= 1);
    let error = opened(&model, DiskVersion::Newest).unwrap_err();
    assert!(error.contains("1.log"), "{error}");
}

#[test]
fn an_earlier_version_finds_no_older_state_of_a_changed_log() {
    let model = log_of_format_1();
    model.log_dir.lock().unwrap().as_mut().unwrap().record(|state| state.floor = 1).unwrap();
    let mut formats = Vec::new();
    model.disk.change("state", |bytes| {
        let states =
            bytes.chunks(PAGE_BYTES as usize).map(|slot| newest_slot::<EpochState>(slot).unwrap().unwrap().state);
        formats = states.map(|state| (state.format, state.floor)).collect();
    });
    formats.sort_unstable();
    assert_eq!(formats, [(FORMAT, 0), (FORMAT, 1)]);
}

#[test]
fn a_failed_change_of_format_is_repeated_for_both_slots() {
    // The failing steps: write and sync of one slot, then of the other slot.
    for after in 0..4 {
        let model = log_of_format_1();
        let mut log_dir = model.log_dir.lock().unwrap().take().unwrap();
        model.disk.fail_once_after(after, libc::EIO);
        log_dir.record(|state| state.floor = 1).unwrap_err();
        log_dir.record(|state| state.floor = 1).unwrap();
        model.disk.change("state", |bytes| {
            let states =
                bytes.chunks(PAGE_BYTES as usize).map(|slot| newest_slot::<EpochState>(slot).unwrap().unwrap().state);
            assert_eq!(states.map(|state| state.format).collect::<Vec<_>>(), [FORMAT, FORMAT], "step {after} fails");
        });
    }
}

#[test]
fn a_state_with_more_ranges_than_fit_drops_the_oldest_and_can_be_recorded() {
    let model = ProtectedDisk::begin(CrashDisk::new(initial_image()));
    let mut log_dir = model.log_dir.lock().unwrap().take().unwrap();
    let sealed: Vec<EpochRange> =
        (0..400).map(|n| EpochRange { first: 1_000_000 + 3 * n, last: 1_000_001 + 3 * n }).collect();
    let newest = sealed[399].last;
    log_dir
        .record(|state| {
            state.sealed = newest;
            // The order in which they were sealed does not matter.
            state.segments = sealed.iter().copied().rev().collect();
        })
        .unwrap();
    log_dir.record(|state| (state.floor, state.merged) = (7, 6)).unwrap();
    log_dir.record(|state| state.seal(newest + 2, &[newest + 2])).unwrap();
    drop(log_dir);
    let state = LogDirectory::open(model.disk.clone()).unwrap().unwrap().state().clone();
    assert_eq!((state.floor, state.merged, state.sealed), (7, 6, newest + 2));
    let kept = state.segments.len();
    assert!(kept > 100, "{kept}");
    let mut expected = sealed[401 - kept..].to_vec();
    expected.push(EpochRange { first: newest + 2, last: newest + 2 });
    let mut segments = state.segments;
    segments.sort_unstable();
    assert_eq!(segments, expected);
}

#[test]
fn discarded_ranges_are_dropped_from_the_state() {
    let model = ProtectedDisk::begin(CrashDisk::new(initial_image()));
    let mut log_dir = model.log_dir.lock().unwrap().take().unwrap();
    log_dir
        .record(|state| {
            (state.sealed, state.dead) = (9, ranges([(4, 8)]));
            state.segments = ranges([(1, 2), (3, 5), (7, 8)]);
        })
        .unwrap();
    assert_eq!(log_dir.state().segments, ranges([(1, 2), (3, 5)]));
    assert_eq!(log_dir.state().sealed_segments(u64::MAX).collect::<Vec<_>>(), [1, 2, 3]);
}

#[test]
fn the_log_of_another_image_is_rejected_and_a_renamed_one_is_recorded() {
    let model = ProtectedDisk::begin(CrashDisk::new(initial_image()));
    let mut log_dir = model.log_dir.lock().unwrap().take().unwrap();
    // A log of an earlier version adopts the first image name.
    log_dir.check_image("a.raw", None).unwrap();
    log_dir.record(|_| ()).unwrap();
    drop(log_dir);
    let check = |image, renamed_from| {
        LogDirectory::open(model.disk.clone())
            .unwrap()
            .unwrap()
            .check_image(image, renamed_from)
            .map_err(|e| e.to_string())
    };
    check("a.raw", None).unwrap();
    for renamed_from in [None, Some("c.raw")] {
        let error = check("b.raw", renamed_from).unwrap_err();
        assert!(error.contains("a.raw, not of b.raw") && error.contains("--image-renamed-from a.raw"), "{error}");
    }
    check("b.raw", Some("a.raw")).unwrap();
    check("b.raw", None).unwrap();
    // The command can be repeated.
    check("b.raw", Some("a.raw")).unwrap();
    check("a.raw", None).unwrap_err();
}

#[test]
fn an_epoch_with_a_write_in_progress_cannot_be_sealed() {
    let mut model = ProtectedDisk::begin(CrashDisk::new(initial_image()));
    model.prepare().unwrap();
    model.write(0, 8, EntryKind::Data);
    let epoch = model.log().mark().unwrap();
    assert_eq!(model.log().segments_to_seal(epoch).unwrap_err(), CannotSeal::Busy);
    assert_eq!(model.log().segments_to_seal(epoch + 1).unwrap_err(), CannotSeal::NotEnded { closed: epoch });
    model.end_writes();
    assert_eq!(model.log().segments_to_seal(epoch).unwrap().len(), 1);
}
