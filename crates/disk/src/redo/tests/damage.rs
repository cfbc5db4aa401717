//! Logs that are damaged or full, belong to another disk, or cannot be written.

use super::model::{BYTES, ProtectedDisk, content, initial_image};
use crate::block::SECTOR;
use crate::redo::directory::{LogDirectory, last_used_epoch};
use crate::redo::error::RedoError;
use crate::redo::format::EntryKind;
use crate::redo::log::SpaceLimit;
use crate::redo::recover::{DiskVersion, RecoveredLog, open};
use rekindle_kernel::durable_file::DurableFile;
use rekindle_testing::crash_disk::CrashDisk;
use uuid::Uuid;

/// A limit of the log that no test of an open disk reaches.
const LIMIT: u64 = 1 << 30;
/// Bytes of a segment's head up to the end of its checksum; the remaining bytes of its page are zeros.
const HEAD_BYTES: usize = 68;

/// Returns a disk with two epochs, of which the first is sealed, and a flushed write.
fn model() -> ProtectedDisk {
    let mut model = ProtectedDisk::begin(CrashDisk::new(initial_image()));
    model.prepare().unwrap();
    model.write(0, 8, EntryKind::Data);
    model.end_writes();
    let epoch = model.mark();
    model.seal(epoch).unwrap();
    assert_eq!(epoch, 1);
    model.write(4, 8, EntryKind::Data);
    model.end_writes();
    model.flush();
    model.prepare().unwrap();
    model
}

#[test]
fn an_epoch_that_is_unavailable_fails_with_an_error_that_names_the_reason() {
    let model = model();
    let version = |epoch, disk| DiskVersion::Epoch { epoch, disk };
    let opened = |disk: &CrashDisk, version| open(disk.clone(), BYTES, version, LIMIT).map(|opened| opened.is_some());
    assert!(opened(&model.disk, version(1, model.uuid)).unwrap());
    assert!(matches!(opened(&model.disk, version(1, Uuid::new_v4())), Err(RedoError::OtherDisk { .. })));
    assert!(matches!(opened(&model.disk, version(2, model.uuid)), Err(RedoError::NotSealed { sealed: 1, .. })));
    let mut model = model;
    let epoch = model.mark();
    model.seal(epoch).unwrap();
    model.commit(epoch).unwrap();
    let refused = opened(&model.disk, version(1, model.uuid)).unwrap_err();
    assert!(matches!(refused, RedoError::NewerDisk { epoch: 1, floor: 2, .. }));
    assert!(refused.to_string().contains("the disk is newer than the checkpoint"), "{refused}");
    model.end();
    assert!(matches!(opened(&model.disk, version(2, model.uuid)), Err(RedoError::NoLog { epoch: 2, .. })));
    assert!(!opened(&model.disk, DiskVersion::Newest).unwrap());
    let shorter = self::model();
    assert!(matches!(
        open(shorter.disk, 512, DiskVersion::Newest, LIMIT),
        Err(RedoError::ImageTooShort { bytes: 512, .. })
    ));
}

#[test]
fn opening_an_older_epoch_discards_nothing_until_a_write() {
    let mut model = model();
    let newest = content(&model.disk, model.log.as_ref());
    model.reopen(DiskVersion::Epoch { epoch: 1, disk: model.uuid });
    // Nothing was written since: the newest disk is still available.
    let RecoveredLog { log, .. } = open(model.disk.clone(), BYTES, DiskVersion::Newest, LIMIT).unwrap().unwrap();
    assert_eq!(content(&model.disk, Some(&log)), newest);
    model.reopen(DiskVersion::Epoch { epoch: 1, disk: model.uuid });
    model.prepare().unwrap();
    model.write(20, 1, EntryKind::Data);
    model.end_writes();
    let RecoveredLog { log, .. } = open(model.disk.clone(), BYTES, DiskVersion::Newest, LIMIT).unwrap().unwrap();
    assert_eq!(content(&model.disk, Some(&log))[..20], model.epochs[&1][..20]);
    let epoch = model.mark();
    assert!(epoch > 3, "epochs 2 and 3 were used before");
    model.seal(epoch).unwrap();
    let discarded = open(model.disk.clone(), BYTES, DiskVersion::Epoch { epoch: 2, disk: model.uuid }, LIMIT);
    assert!(matches!(discarded, Err(RedoError::Discarded { epoch: 2, .. })));
}

#[test]
fn one_damaged_slot_is_tolerated_and_two_are_an_error() {
    let model = model();
    for slot in [0, 4096] {
        let model = self::model();
        model.disk.change("state", |bytes| bytes[slot + 30] ^= 1);
        assert!(open(model.disk, BYTES, DiskVersion::Newest, LIMIT).unwrap().is_some(), "slot {slot}");
    }
    model.disk.change("state", |bytes| bytes.iter_mut().for_each(|byte| *byte ^= 1));
    assert!(matches!(open(model.disk, BYTES, DiskVersion::Newest, LIMIT), Err(RedoError::DamagedState { .. })));
}

#[test]
fn a_file_with_the_name_of_a_merged_segment_is_removed_only_if_its_head_is_valid() {
    let mut model = model();
    let head = model.disk.content("1.log").unwrap()[..SECTOR as usize].to_vec();
    model.commit(1).unwrap();
    assert!(!model.disk.names().contains(&"1.log".into()));
    let file = model.disk.create("1.log").unwrap();
    let remove_done = || model.log_dir.lock().unwrap().as_ref().unwrap().remove_done();
    let changed = |at: usize| head.iter().enumerate().map(|(n, byte)| byte ^ u8::from(n == at)).collect::<Vec<_>>();
    for at in 0..HEAD_BYTES {
        file.write_at(&changed(at), 0).unwrap();
        assert!(matches!(remove_done(), Err(RedoError::Io { .. })), "byte {at}");
        assert_eq!(model.disk.content("1.log").unwrap(), changed(at));
    }
    file.write_at(&head, 0).unwrap();
    remove_done().unwrap();
    assert!(!model.disk.names().contains(&"1.log".into()));
}

#[test]
fn a_damaged_entry_hides_no_other_entry() {
    let mut model = ProtectedDisk::begin(CrashDisk::new(initial_image()));
    model.prepare().unwrap();
    for sector in [0, 8, 16] {
        model.write(sector, 8, EntryKind::Data);
    }
    model.end_writes();
    let before = content(&model.disk, model.log.as_ref());
    // Header and data of the second entry: the head has 4096 bytes, an entry 8192.
    for at in [4096 + 8192 + 20, 4096 + 8192 + 4096 + 7] {
        let disk = model.disk.clone();
        disk.change("1.log", |bytes| bytes[at] ^= 0x40);
        let RecoveredLog { log, .. } = open(disk.clone(), BYTES, DiskVersion::Newest, LIMIT).unwrap().unwrap();
        let after = content(&disk, Some(&log));
        assert_eq!((&after[..8], &after[16..]), (&before[..8], &before[16..]), "byte {at}");
        assert_eq!(after[8..16], super::model::initial_content()[8..16], "byte {at}");
        disk.change("1.log", |bytes| bytes[at] ^= 0x40);
    }
    // An entry of an older log, or a copy of one that the guest wrote, is not valid.
    let stale = ProtectedDisk::begin(CrashDisk::new(initial_image()));
    let mut stale = stale;
    stale.prepare().unwrap();
    stale.write(30, 8, EntryKind::Data);
    stale.end_writes();
    let mut entry = Vec::new();
    stale.disk.change("1.log", |bytes| entry = bytes[4096..].to_vec());
    model.disk.change("1.log", |bytes| bytes.extend(entry));
    let RecoveredLog { log, .. } = open(model.disk.clone(), BYTES, DiskVersion::Newest, LIMIT).unwrap().unwrap();
    assert_eq!(content(&model.disk, Some(&log)), before);
}

#[test]
fn a_damaged_entry_is_not_merged_and_its_segment_is_kept() {
    // Header and data of the entry of epoch 1: the head has 4096 bytes.
    for at in [4096 + 20, 4096 + 4096 + 7] {
        let mut model = model();
        let epoch = model.mark();
        model.seal(epoch).unwrap();
        let image = |model: &ProtectedDisk| content(&model.disk, None);
        let before = image(&model);
        let floor = |model: &ProtectedDisk| model.log_dir.lock().unwrap().as_ref().unwrap().state().floor;
        let floor_before = floor(&model);
        model.disk.change("1.log", |bytes| bytes[at] ^= 0x40);
        let error = model.commit(epoch).unwrap_err();
        let why = std::error::Error::source(&error).unwrap().to_string();
        assert!(why.contains("1.log") && why.contains("checksum"), "{why}");
        assert_eq!(image(&model), before, "damage is found before the first write");
        assert_eq!(floor(&model), floor_before, "older epochs stay available");
        assert!(model.disk.names().contains(&"1.log".into()));
        model.disk.change("1.log", |bytes| bytes[at] ^= 0x40);
        model.commit(epoch).unwrap();
        model.check();
    }
}

#[test]
fn an_end_that_cannot_remove_its_files_leaves_no_available_epoch() {
    for after in 0.. {
        let mut model = model();
        let epoch = model.mark();
        model.seal(epoch).unwrap();
        model.commit(epoch).unwrap();
        let steps = model.disk.steps();
        let mut log_dir = model.log_dir.lock().unwrap().take().unwrap();
        let next = model.log().epoch();
        log_dir.close(last_used_epoch(next)).unwrap();
        let used = model.disk.steps() - steps;
        model.disk.fail_after(after, libc::EIO);
        let destroyed = log_dir.destroy();
        model.disk.stop_failing();
        // The guest now writes to the image itself.
        let version = DiskVersion::Epoch { epoch, disk: model.uuid };
        let opened = open(model.disk.clone(), BYTES, version, LIMIT);
        assert!(
            matches!(opened, Err(RedoError::NewerDisk { .. } | RedoError::NoLog { .. })),
            "{after} steps after {used}: {opened:?}"
        );
        // The next log replaces the remaining files.
        LogDirectory::create(model.disk.clone(), BYTES, None).unwrap();
        if destroyed.is_ok() {
            assert!(after > 2, "{after}");
            break;
        }
    }
}

#[test]
fn a_merge_that_fails_at_any_step_is_repeated() {
    for error in [libc::ENOSPC, libc::EIO] {
        let (mut failed, mut broken) = (0, 0);
        for after in 0.. {
            let mut model = model();
            let epoch = model.mark();
            model.seal(epoch).unwrap();
            model.disk.fail_after(after, error);
            let merged = model.commit(epoch);
            model.disk.stop_failing();
            // Reads return the right content, whether merged or not.
            model.check();
            if model.durability.is_broken() {
                // The kernel reports a write error once: only a new server may trust the image again.
                model.commit(epoch).unwrap_err();
                assert!(
                    model.disk.names().contains(&"1.log".into()),
                    "a segment that may not be in the image is removed"
                );
                model.check();
                model.reopen(DiskVersion::Newest);
                broken += 1;
            }
            model.commit(epoch).unwrap();
            model.check();
            model.reopen(DiskVersion::Newest);
            assert_eq!(model.disk.names().iter().filter(|name| *name == "1.log" || *name == "2.log").count(), 0);
            if merged.is_ok() {
                break;
            }
            failed += 1;
        }
        assert!(failed > 5 && broken == 1, "{failed} steps failed, {broken} of them a sync of the image");
    }
}

#[test]
fn a_failed_seal_or_segment_changes_nothing() {
    // The steps: write of the seal record, sync, write of the state, sync; then the next segment. Either all steps
    // from the failing one on fail, or only that step.
    for (after, is_once, error) in (0..6).flat_map(|after| {
        [false, true]
            .into_iter()
            .flat_map(move |is_once| [libc::ENOSPC, libc::EIO].map(|error| (after, is_once, error)))
    }) {
        let context = format!("step {after} fails, once: {is_once}, error {error}");
        let mut model = model();
        let epoch = model.mark();
        if is_once {
            model.disk.fail_once_after(after, error)
        } else {
            model.disk.fail_after(after, error)
        }
        let sealed = model.seal(epoch);
        let made = model.prepare();
        model.disk.stop_failing();
        // Only a seal record may be missing.
        assert_eq!(sealed.is_ok(), after >= 4 || (after == 0 && is_once), "{context}: {sealed:?}");
        assert!(sealed.is_err() || made.is_err() || after == 0, "{context}");
        model.check();
        model.prepare().unwrap();
        model.seal(epoch).unwrap();
        model.write(30, 2, EntryKind::Data);
        model.end_writes();
        model.check();
        model.reopen(DiskVersion::Epoch { epoch, disk: model.uuid });
    }
}

#[test]
fn overwritten_space_is_reclaimed_and_the_limit_is_kept() {
    let mut model = ProtectedDisk::begin(CrashDisk::new(initial_image()));
    let uuid = model.uuid;
    model.log = Some(crate::redo::log::Log::new(uuid, 1, 0, 0, 256 << 10));
    model.prepare().unwrap();
    for _ in 0..400 {
        // Writes ten times the limit, always to the same blocks.
        model.write(0, 8, EntryKind::Data);
        model.end_writes();
        model.flush();
        let bytes = model.log().bytes();
        assert!(bytes <= model.log().limit(), "{bytes}");
    }
    model.check();
    model.reopen(DiskVersion::Newest);
    // Without a flush no space can be reclaimed.
    let mut model = ProtectedDisk::begin(CrashDisk::new(initial_image()));
    model.log = Some(crate::redo::log::Log::new(model.uuid, 1, 0, 0, 256 << 10));
    model.prepare().unwrap();
    let placed =
        (0..400).take_while(|_| model.log().allocate(0, 4096, EntryKind::Data, SpaceLimit::Enforced).is_ok()).count();
    assert!((20..40).contains(&placed), "{placed}");
    assert!(
        model.log().allocate(0, 4096, EntryKind::Data, SpaceLimit::MayBeExceeded).is_ok(),
        "a queue that is being stopped has no limit"
    );
}
