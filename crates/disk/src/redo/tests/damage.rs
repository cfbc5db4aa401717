//! Logs that are damaged, full, another's, or cannot be written.

use super::files::Memory;
use super::world::{BYTES, World, content, image};
use crate::redo::error::RedoError;
use crate::redo::format::What;
use crate::redo::recover::{Wanted, open};
use crate::redo::state::Home;
use uuid::Uuid;

const LIMIT: u64 = 1 << 30;

/// Two epochs, of which the first is sealed, and a write that is flushed.
fn world() -> World {
    let mut world = World::begin(Memory::new(image()));
    world.prepare().unwrap();
    world.write(0, 8, What::Data);
    world.end_writes();
    let epoch = world.mark();
    world.seal(epoch).unwrap();
    assert_eq!(epoch, 1);
    world.write(4, 8, What::Data);
    world.end_writes();
    world.flush();
    world.prepare().unwrap();
    world
}

#[test]
fn what_cannot_be_gone_back_to_is_refused_by_name() {
    let world = world();
    let wanted = |epoch, disk| Wanted::Epoch { epoch, disk };
    let opened = |disk: &Memory, wanted| open(disk.clone(), BYTES, wanted, LIMIT).map(|opened| opened.is_some());
    assert!(opened(&world.disk, wanted(1, world.uuid)).unwrap());
    assert!(matches!(opened(&world.disk, wanted(1, Uuid::new_v4())), Err(RedoError::OtherDisk { .. })));
    assert!(matches!(opened(&world.disk, wanted(2, world.uuid)), Err(RedoError::NotSealed { sealed: 1, .. })));
    let mut world = world;
    let epoch = world.mark();
    world.seal(epoch).unwrap();
    world.commit(epoch).unwrap();
    let refused = opened(&world.disk, wanted(1, world.uuid)).unwrap_err();
    assert!(matches!(refused, RedoError::NewerDisk { epoch: 1, floor: 2, .. }));
    assert!(refused.to_string().contains("the disk is newer than the checkpoint"), "{refused}");
    world.end();
    assert!(matches!(opened(&world.disk, wanted(2, world.uuid)), Err(RedoError::NoLog { epoch: 2, .. })));
    assert!(!opened(&world.disk, Wanted::Newest).unwrap());
    let shorter = self::world();
    assert!(matches!(open(shorter.disk, 512, Wanted::Newest, LIMIT), Err(RedoError::Shorter { bytes: 512, .. })));
}

#[test]
fn going_back_gives_up_nothing_until_something_is_written() {
    let mut world = world();
    let newest = content(&world.disk, world.log.as_ref());
    world.reopen(Wanted::Epoch { epoch: 1, disk: world.uuid });
    // It was not gone on from there: the newest disk is still there.
    let (_, log) = open(world.disk.clone(), BYTES, Wanted::Newest, LIMIT).unwrap().unwrap();
    assert_eq!(content(&world.disk, Some(&log)), newest);
    world.reopen(Wanted::Epoch { epoch: 1, disk: world.uuid });
    world.prepare().unwrap();
    world.write(20, 1, What::Data);
    world.end_writes();
    let (_, log) = open(world.disk.clone(), BYTES, Wanted::Newest, LIMIT).unwrap().unwrap();
    assert_eq!(content(&world.disk, Some(&log))[..20], world.epochs[&1][..20]);
    let epoch = world.mark();
    assert!(epoch > 3, "epochs 2 and 3 were given out before");
    world.seal(epoch).unwrap();
    let given_up = open(world.disk.clone(), BYTES, Wanted::Epoch { epoch: 2, disk: world.uuid }, LIMIT);
    assert!(matches!(given_up, Err(RedoError::GivenUp { epoch: 2, .. })));
}

#[test]
fn one_slot_may_be_damaged_and_both_are_refused() {
    let world = world();
    for slot in [0, 4096] {
        let world = self::world();
        world.disk.change("state", |bytes| bytes[slot + 30] ^= 1);
        assert!(open(world.disk, BYTES, Wanted::Newest, LIMIT).unwrap().is_some(), "slot {slot}");
    }
    world.disk.change("state", |bytes| bytes.iter_mut().for_each(|byte| *byte ^= 1));
    assert!(matches!(open(world.disk, BYTES, Wanted::Newest, LIMIT), Err(RedoError::Damaged { .. })));
}

#[test]
fn an_entry_that_is_damaged_hides_nothing_else() {
    let mut world = World::begin(Memory::new(image()));
    world.prepare().unwrap();
    for sector in [0, 8, 16] {
        world.write(sector, 8, What::Data);
    }
    world.end_writes();
    let before = content(&world.disk, world.log.as_ref());
    // Header and data of the second one: 4096 for the head, 8192 an entry.
    for at in [4096 + 8192 + 20, 4096 + 8192 + 4096 + 7] {
        let disk = world.disk.clone();
        disk.change("1.log", |bytes| bytes[at] ^= 0x40);
        let (_, log) = open(disk.clone(), BYTES, Wanted::Newest, LIMIT).unwrap().unwrap();
        let after = content(&disk, Some(&log));
        assert_eq!((&after[..8], &after[16..]), (&before[..8], &before[16..]), "byte {at}");
        assert_eq!(after[8..16], super::world::initial()[8..16], "byte {at}");
        disk.change("1.log", |bytes| bytes[at] ^= 0x40);
    }
    // What an older log has left behind, or a guest has written there, is no entry.
    let stale = World::begin(Memory::new(image()));
    let mut stale = stale;
    stale.prepare().unwrap();
    stale.write(30, 8, What::Data);
    stale.end_writes();
    let mut entry = Vec::new();
    stale.disk.change("1.log", |bytes| entry = bytes[4096..].to_vec());
    world.disk.change("1.log", |bytes| bytes.extend(entry));
    let (_, log) = open(world.disk.clone(), BYTES, Wanted::Newest, LIMIT).unwrap().unwrap();
    assert_eq!(content(&world.disk, Some(&log)), before);
}

#[test]
fn a_damaged_entry_is_not_merged_and_its_segment_stays() {
    // Header and data of the entry of epoch 1: 4096 for the head.
    for at in [4096 + 20, 4096 + 4096 + 7] {
        let mut world = world();
        let epoch = world.mark();
        world.seal(epoch).unwrap();
        let image = |world: &World| content(&world.disk, None);
        let before = image(&world);
        world.disk.change("1.log", |bytes| bytes[at] ^= 0x40);
        let error = world.commit(epoch).unwrap_err();
        let why = std::error::Error::source(&error).unwrap().to_string();
        assert!(why.contains("1.log") && why.contains("checksum"), "{why}");
        assert_eq!(image(&world)[..4], before[..4], "sectors 0 to 3 are of that entry alone");
        assert!(world.disk.names().contains(&"1.log".into()));
        world.disk.change("1.log", |bytes| bytes[at] ^= 0x40);
        world.commit(epoch).unwrap();
        world.check();
    }
}

#[test]
fn an_end_that_cannot_remove_its_files_leaves_no_epoch_that_can_be_had() {
    for after in 0.. {
        let mut world = world();
        let epoch = world.mark();
        world.seal(epoch).unwrap();
        world.commit(epoch).unwrap();
        let steps = world.disk.steps();
        let mut home = world.home.lock().unwrap().take().unwrap();
        let next = world.log().epoch();
        home.close(next).unwrap();
        let used = world.disk.steps() - steps;
        world.disk.refuse(after, libc::EIO);
        let destroyed = home.destroy();
        world.disk.relent();
        // The guest writes to the image itself now.
        let wanted = Wanted::Epoch { epoch, disk: world.uuid };
        let opened = open(world.disk.clone(), BYTES, wanted, LIMIT);
        assert!(
            matches!(opened, Err(RedoError::NewerDisk { .. } | RedoError::NoLog { .. })),
            "{after} steps after {used}: {opened:?}"
        );
        // The next log takes the place of what is left.
        Home::create(world.disk.clone(), BYTES, None).unwrap();
        if destroyed.is_ok() {
            assert!(after > 2, "{after}");
            break;
        }
    }
}

#[test]
fn a_merge_that_fails_at_any_step_is_done_again() {
    for error in [libc::ENOSPC, libc::EIO] {
        let (mut failed, mut broken) = (0, 0);
        for after in 0.. {
            let mut world = world();
            let epoch = world.mark();
            world.seal(epoch).unwrap();
            world.disk.refuse(after, error);
            let merged = world.commit(epoch);
            world.disk.relent();
            // What is read is right, merged or not.
            world.check();
            if world.durability.is_broken() {
                // The kernel reports what it could not write once: only a new server may trust the image again.
                world.commit(epoch).unwrap_err();
                assert!(
                    world.disk.names().contains(&"1.log".into()),
                    "a segment is dropped that may not be in the image"
                );
                world.check();
                world.reopen(Wanted::Newest);
                broken += 1;
            }
            world.commit(epoch).unwrap();
            world.check();
            world.reopen(Wanted::Newest);
            assert_eq!(world.disk.names().iter().filter(|name| *name == "1.log" || *name == "2.log").count(), 0);
            if merged.is_ok() {
                break;
            }
            failed += 1;
        }
        assert!(failed > 5 && broken == 1, "{failed} steps failed, {broken} of them a sync of the image");
    }
}

#[test]
fn a_seal_or_a_segment_that_fails_leaves_what_there_was() {
    for after in 0..3 {
        let mut world = world();
        let epoch = world.mark();
        world.disk.refuse(after, libc::ENOSPC);
        let sealed = world.seal(epoch);
        let made = world.prepare();
        world.disk.relent();
        assert!(sealed.is_err() || made.is_err(), "{after}");
        world.check();
        world.prepare().unwrap();
        world.seal(epoch).unwrap();
        world.write(30, 2, What::Data);
        world.end_writes();
        world.check();
        world.reopen(Wanted::Epoch { epoch, disk: world.uuid });
    }
}

#[test]
fn room_that_was_overwritten_comes_back_and_no_more_is_used_than_the_limit() {
    let mut world = World::begin(Memory::new(image()));
    let uuid = world.uuid;
    world.log = Some(crate::redo::log::Log::new(uuid, 1, 0, 0, 256 << 10));
    world.prepare().unwrap();
    for _ in 0..400 {
        // Ten times the limit, all over the same blocks.
        world.write(0, 8, What::Data);
        world.end_writes();
        world.flush();
        let (bytes, limit) = world.log().bytes();
        assert!(bytes <= limit, "{bytes}");
    }
    world.check();
    world.reopen(Wanted::Newest);
    // Without a flush nothing can be given back.
    let mut world = World::begin(Memory::new(image()));
    world.log = Some(crate::redo::log::Log::new(world.uuid, 1, 0, 0, 256 << 10));
    world.prepare().unwrap();
    let placed = (0..400).take_while(|_| world.log().place(0, 4096, What::Data, true).is_ok()).count();
    assert!((20..40).contains(&placed), "{placed}");
    assert!(world.log().place(0, 4096, What::Data, false).is_ok(), "a queue that is being stopped");
}
