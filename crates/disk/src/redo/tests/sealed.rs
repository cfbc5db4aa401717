//! Damage to the segment of a sealed epoch: opening the log fails, and names the segment.

use super::files::Memory;
use super::world::{BYTES, World, content, image};
use crate::redo::files::Files;
use crate::redo::format::{PAGE, What};
use crate::redo::log::seal::CannotSeal;
use crate::redo::recover::{Wanted, open};
use crate::redo::slot::tests::slot;
use crate::redo::slot::{FORMAT, newest_slot};
use crate::redo::state::Home;

const LIMIT: u64 = 1 << 30;

/// Three epochs. The first and the second one are sealed; two writes each, the first of which is overwritten in the first epoch.
fn world() -> World {
    let mut world = World::begin(Memory::new(image()));
    for _ in 0..2 {
        world.prepare().unwrap();
        for sector in [0, 0, 8] {
            world.write(sector, 8, What::Data);
        }
        world.write(20, 8, What::Hole);
        let epoch = world.mark();
        world.seal(epoch).unwrap();
    }
    world.write(4, 8, What::Data);
    world.end_writes();
    world.flush();
    world.prepare().unwrap();
    world
}

fn opened(world: &World, wanted: Wanted) -> Result<(), String> {
    open(world.disk.clone(), BYTES, wanted, LIMIT).map(drop).map_err(|e| e.to_string())
}

fn length(world: &World, name: &str) -> usize {
    let mut length = 0;
    world.disk.change(name, |bytes| length = bytes.len());
    length
}

/// The error of opening the newest disk names the segment and what can be done; an older checkpoint can still be opened.
#[track_caller]
fn is_rejected(world: &World, epoch: u64, context: &str) {
    let name = format!("{epoch}.log");
    for wanted in [Wanted::Newest, Wanted::Epoch { epoch: 2, disk: world.uuid }] {
        let error = opened(world, wanted).expect_err(context);
        assert!(error.contains(&name) && error.contains("restore"), "{context}: {error}");
    }
    let older = opened(world, Wanted::Epoch { epoch: 1, disk: world.uuid });
    assert_eq!(older.is_ok(), epoch == 2, "{context}: {older:?}");
}

#[test]
fn a_flipped_bit_in_a_sealed_epoch_is_an_error_and_not_older_data() {
    let page = PAGE as usize;
    for epoch in [1, 2] {
        let name = format!("{epoch}.log");
        let world = world();
        // Head; header and data of the second entry; header of the last one, which has no data; the seal record.
        for at in [20, 3 * page + 20, 4 * page + 7, 7 * page + 20, 8 * page + 20, 9 * page + 7] {
            world.disk.change(&name, |bytes| bytes[at] ^= 0x40);
            is_rejected(&world, epoch, &format!("{name}: byte {at}"));
            world.disk.change(&name, |bytes| bytes[at] ^= 0x40);
        }
        opened(&world, Wanted::Newest).unwrap();
    }
}

#[test]
fn a_truncated_segment_of_a_sealed_epoch_is_an_error() {
    for epoch in [1, 2] {
        let name = format!("{epoch}.log");
        for pages in 0..length(&world(), &name) / PAGE as usize {
            let world = world();
            world.disk.change(&name, |bytes| bytes.truncate(pages * PAGE as usize));
            is_rejected(&world, epoch, &format!("{name} of {pages} pages"));
        }
    }
}

#[test]
fn a_missing_segment_of_a_sealed_epoch_is_an_error() {
    for epoch in [1, 2] {
        let world = world();
        world.disk.remove(&format!("{epoch}.log")).unwrap();
        is_rejected(&world, epoch, "missing");
    }
}

#[test]
fn damage_to_an_epoch_that_is_not_sealed_is_a_torn_write() {
    let world = world();
    world.disk.change("3.log", |bytes| bytes[PAGE as usize + 20] ^= 1);
    opened(&world, Wanted::Newest).unwrap();
    world.disk.remove("3.log").unwrap();
    opened(&world, Wanted::Newest).unwrap();
}

#[test]
fn what_was_merged_or_discarded_may_be_missing() {
    let mut world = world();
    world.commit(1).unwrap();
    assert!(!world.disk.names().contains(&"1.log".into()));
    opened(&world, Wanted::Newest).unwrap();
    let mut world = self::world();
    world.reopen(Wanted::Epoch { epoch: 1, disk: world.uuid });
    world.prepare().unwrap();
    assert!(!world.disk.names().contains(&"2.log".into()));
    world.write(9, 1, What::Data);
    world.end_writes();
    world.reopen(Wanted::Newest);
}

#[test]
fn epochs_that_a_killed_server_left_are_covered_by_the_next_seal() {
    let mut world = World::begin(Memory::new(image()));
    world.prepare().unwrap();
    world.write(0, 8, What::Data);
    world.end_writes();
    world.reopen(Wanted::Newest);
    world.prepare().unwrap();
    world.write(8, 8, What::Data);
    let epoch = world.mark();
    world.seal(epoch).unwrap();
    opened(&world, Wanted::Newest).unwrap();
    world.disk.change("1.log", |bytes| bytes[2 * PAGE as usize] ^= 1);
    let error = opened(&world, Wanted::Newest).unwrap_err();
    assert!(error.contains("1.log"), "{error}");
}

#[test]
fn overwritten_entries_may_be_punched_out_of_a_sealed_epoch() {
    let mut world = World::begin(Memory::new(image()));
    world.log = Some(crate::redo::log::Log::new(world.uuid, 1, 0, 0, 48 << 10));
    world.prepare().unwrap();
    for _ in 0..4 {
        world.write(0, 8, What::Data);
    }
    let epoch = world.mark();
    world.seal(epoch).unwrap();
    let steps = world.disk.steps();
    world.flush();
    assert!(world.disk.steps() > steps, "nothing was punched out");
    world.reopen(Wanted::Newest);
    let before = content(&world.disk, world.log.as_ref());
    world.reopen(Wanted::Epoch { epoch, disk: world.uuid });
    assert_eq!(content(&world.disk, world.log.as_ref()), before);
}

/// A log as version 1 has left it: epoch 1 is sealed, without a seal record, and the state has neither segments nor an image.
fn log_of_format_1() -> World {
    let mut world = World::begin(Memory::new(image()));
    world.prepare().unwrap();
    world.write(0, 8, What::Data);
    let epoch = world.mark();
    world.flush();
    let json = format!(
        r#"{{"format":1,"disk":"{}","bytes":{BYTES},"sealed":{epoch},"floor":0,"merged":0,"dead":[]}}"#,
        world.uuid
    );
    world.disk.change("state", |bytes| *bytes = [slot(&json, 6), slot(&json, 5)].concat());
    world.promise.sealed.insert(epoch);
    world.reopen(Wanted::Newest);
    world
}

#[test]
fn a_log_of_format_1_is_read_and_its_segments_are_covered_from_the_next_seal_on() {
    let mut world = log_of_format_1();
    world.reopen(Wanted::Epoch { epoch: 1, disk: world.uuid });
    world.reopen(Wanted::Newest);
    // As before: an entry that is damaged is taken for a torn one.
    world.disk.change("1.log", |bytes| bytes[PAGE as usize + 20] ^= 1);
    opened(&world, Wanted::Newest).unwrap();
    world.disk.change("1.log", |bytes| bytes[PAGE as usize + 20] ^= 1);
    world.prepare().unwrap();
    world.write(8, 8, What::Data);
    let epoch = world.mark();
    world.seal(epoch).unwrap();
    opened(&world, Wanted::Newest).unwrap();
    world.disk.change("1.log", |bytes| bytes[PAGE as usize + 20] ^= 1);
    let error = opened(&world, Wanted::Newest).unwrap_err();
    assert!(error.contains("1.log"), "{error}");
}

#[test]
fn an_earlier_version_finds_no_older_state_of_a_log_that_was_changed() {
    let world = log_of_format_1();
    world.home.lock().unwrap().as_mut().unwrap().record(|state| state.floor = 1).unwrap();
    let mut formats = Vec::new();
    world.disk.change("state", |bytes| {
        let states = bytes.chunks(PAGE as usize).map(|slot| newest_slot(slot).unwrap().unwrap().1);
        formats = states.map(|state| (state.format, state.floor)).collect();
    });
    formats.sort_unstable();
    assert_eq!(formats, [(FORMAT, 0), (FORMAT, 1)]);
}

#[test]
fn the_log_of_another_image_is_rejected_and_a_renamed_one_is_recorded() {
    let world = World::begin(Memory::new(image()));
    let mut home = world.home.lock().unwrap().take().unwrap();
    // A log of an earlier version takes the first name.
    home.check_image("a.raw", None).unwrap();
    home.record(|_| ()).unwrap();
    drop(home);
    let check = |image, renamed_from| {
        Home::open(world.disk.clone()).unwrap().unwrap().check_image(image, renamed_from).map_err(|e| e.to_string())
    };
    check("a.raw", None).unwrap();
    for renamed_from in [None, Some("c.raw")] {
        let error = check("b.raw", renamed_from).unwrap_err();
        assert!(error.contains("a.raw, not of b.raw") && error.contains("--image-renamed-from a.raw"), "{error}");
    }
    check("b.raw", Some("a.raw")).unwrap();
    check("b.raw", None).unwrap();
    // The command may be repeated.
    check("b.raw", Some("a.raw")).unwrap();
    check("a.raw", None).unwrap_err();
}

#[test]
fn an_epoch_with_a_write_under_way_cannot_be_sealed() {
    let mut world = World::begin(Memory::new(image()));
    world.prepare().unwrap();
    world.write(0, 8, What::Data);
    let epoch = world.log().mark().unwrap();
    assert_eq!(world.log().unsealed(epoch).unwrap_err(), CannotSeal::Busy);
    assert_eq!(world.log().unsealed(epoch + 1).unwrap_err(), CannotSeal::NotEnded { closed: epoch });
    world.end_writes();
    assert_eq!(world.log().unsealed(epoch).unwrap().len(), 1);
}
