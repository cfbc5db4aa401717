//! The retained cache: a rebooted guest finds the blocks that it had cached, and never reads anything other than the
//! disk's content.
//!
//! The *retained cache* is the memory of the guest's previous boot, from which the server reads blocks instead of from
//! the disk (`docs/disk.md`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::{
    CompletedRequest, DataPiece, Disk, FIRST_FREE_FRAME, GUEST_FRAMES, Guest, GuestRequest, IN, OUT, PAGE, RingState,
    WRITE_ZEROES, content, wait_for,
};
use proptest::prelude::*;
use rekindle_disk::control::ControlCommand;
use rekindle_disk::retained::CacheCounts;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Duration;

const KEEP: ControlCommand = ControlCommand::KeepCache { claim: None };

/// Ends the guest and starts another one with fresh memory. Returns the number of blocks in the retained cache.
fn reboot(disk: &Disk, guest: Guest) -> (Guest, u64) {
    drop(guest);
    wait_for("the front end to have gone", || (!disk.control().status().unwrap().active).then_some(()));
    let kept = disk.control().ask(&KEEP).unwrap();
    assert_eq!(disk.control().ask::<u64>(&KEEP).unwrap(), kept, "repeated, it stays");
    (Guest::start(&disk.socket()), kept)
}

fn cache_status(disk: &Disk) -> Option<(usize, CacheCounts)> {
    disk.control().status().unwrap().retained
}

#[test]
fn unused_blocks_are_released_to_the_host_after_the_configured_time() {
    let disk = Disk::with(64, |service| service.settings.retain_for = Some(Duration::from_millis(300)));
    let mut guest = Guest::start(&disk.socket());
    (0..32).for_each(|block| drop(guest.read(block, FIRST_FREE_FRAME + block)));
    let memory = guest.memory.try_clone().unwrap();
    let (mut guest, kept) = reboot(&disk, guest);
    assert_eq!(kept, 32);
    let emptied = wait_for("the retained cache to go", || disk.control().status().unwrap().emptied);
    assert_eq!(emptied, CacheCounts { dropped: 32, ..CacheCounts::default() });
    assert_eq!(memory.metadata().unwrap().blocks(), 0, "all of the previous memory");
    change_image(&disk, 3, &content(3, 5));
    assert_eq!(guest.read(3, FIRST_FREE_FRAME), content(3, 5), "from the disk");
}

/// Requests of 1 MiB are digested after they were answered, while small ones touch the same blocks.
#[test]
fn concurrent_large_requests_are_recorded_as_on_the_disk() {
    for _ in 0..6 {
        mix_large_and_small_requests();
    }
}

fn mix_large_and_small_requests() {
    // Blocks of a large request: 256 * 4 KiB = 1 MiB. The disk is eight such pieces.
    const LARGE: u64 = 256;
    let disk = Disk::new(8 * LARGE);
    let mut guest = Guest::connect(&disk.socket(), common::memory(), 2);
    guest.run(0, RingState::Empty);
    guest.run(1, RingState::Empty);
    let large = |kind: u32, number: u64, frame: u64| GuestRequest {
        kind,
        sector: number * LARGE * 8,
        data: vec![DataPiece { address: frame * PAGE, len: (LARGE * PAGE) as u32, is_writable: kind == IN }],
    };
    let frame = |number: u64| FIRST_FREE_FRAME + number * LARGE;
    let small = FIRST_FREE_FRAME + 8 * LARGE;
    for round in 1..=6 {
        // In odd rounds all pieces are read. In even rounds every second piece is written and the others are read.
        let is_written = |number: u64| round % 2 == 0 && number.is_multiple_of(2);
        for number in 0..8 {
            if is_written(number) {
                (0..LARGE).for_each(|n| guest.fill(frame(number) + n, &content(number * LARGE + n, round)));
            }
            guest.add_request(0, &large(u32::from(is_written(number)), number, frame(number)));
        }
        // Small writes into blocks that are being read: in the four odd pieces, at another place in each round.
        for n in 0..16 {
            let block = (n % 4 * 2 + 1) * LARGE + round * 32 + n;
            guest.fill(small + n, &content(block, round));
            guest.add_request(1, &GuestRequest::write(block, small + n));
        }
        guest.kick(0);
        guest.kick(1);
        let mut completed = Vec::new();
        wait_for("all of them", || {
            completed.extend(guest.take_completed(0));
            completed.extend(guest.take_completed(1));
            (completed.len() == 8 + 16).then_some(())
        });
        assert!(completed.iter().all(|completed| completed.status == 0), "{completed:?}");
        for number in (0..8).filter(|number| is_written(*number)) {
            for block in number * LARGE..(number + 1) * LARGE {
                assert!(disk.block(block) == content(block, round), "round {round}: block {block} of the disk");
            }
        }
        for number in (0..8).filter(|number| !is_written(*number) && number.is_multiple_of(2)) {
            for n in 0..LARGE {
                let block = number * LARGE + n;
                assert!(guest.frame(frame(number) + n) == disk.block(block), "round {round}: block {block} as read");
            }
        }
    }
    let (mut guest, kept) = reboot(&disk, guest);
    // At least the four pieces that the last round wrote.
    assert!(kept >= 4 * LARGE, "{kept}: a read is not known if one of its blocks was written meanwhile");
    for number in 0..8 {
        assert_eq!(guest.request(&large(0, number, frame(number))), 0);
        for n in 0..LARGE {
            let block = number * LARGE + n;
            assert!(guest.frame(frame(number) + n) == disk.block(block), "block {block} after the reboot");
        }
    }
}

/// Starts another kernel in the guest's memory, whose driver starts anew. Returns the number of cached blocks.
fn start_other_kernel(disk: &Disk, guest: &mut Guest) -> u64 {
    let blocks = disk.control().ask(&ControlCommand::ReuseCache {}).unwrap();
    guest.stop(0);
    guest.run(0, RingState::Empty);
    blocks
}

#[test]
fn another_kernel_in_the_same_memory_uses_what_is_still_there() {
    let disk = Disk::new(256);
    let mut guest = Guest::start(&disk.socket());
    (0..64).for_each(|block| drop(guest.read(block, FIRST_FREE_FRAME + block)));
    guest.write(70, FIRST_FREE_FRAME + 70, &content(70, 1));
    assert_eq!(disk.control().ask::<u64>(&ControlCommand::ReuseCache {}).unwrap(), 65);
    // A guest that is stopped and continues has not started another kernel: its rings continue at the same position.
    guest.stop(0);
    guest.run(0, RingState::Kept);
    assert_eq!(cache_status(&disk), None);
    assert_eq!(start_other_kernel(&disk, &mut guest), 65);
    let before = guest_blocks(&guest);
    // The new kernel has used this frame, and written that block.
    guest.fill(FIRST_FREE_FRAME + 5, &content(5, 9));
    guest.write(6, FIRST_FREE_FRAME + 200, &content(6, 2));
    for block in 0..8 {
        change_image(&disk, block, &content(block, 8));
    }
    assert_eq!(guest.read(1, FIRST_FREE_FRAME + 100), content(1, 0), "where the previous kernel had it");
    assert_eq!(guest.read(1, FIRST_FREE_FRAME + 101), content(1, 8), "once only");
    assert_eq!(guest.read(5, FIRST_FREE_FRAME + 102), content(5, 8), "from the disk");
    assert_eq!(guest.read(6, FIRST_FREE_FRAME + 103), content(6, 8), "what it has written is not what lay there");
    assert_eq!(guest.read(70, FIRST_FREE_FRAME + 104), content(70, 1));
    // The block is read into a frame whose own block is read next.
    assert_eq!(guest.read(2, FIRST_FREE_FRAME + 3), content(2, 0));
    assert_eq!(guest.read(3, FIRST_FREE_FRAME + 105), content(3, 8), "overwritten meanwhile");
    let (left, became) = cache_status(&disk).unwrap();
    assert_eq!((left, became), (59, CacheCounts { served: 3, refused: 2, overwritten: 1, ..CacheCounts::default() }));
    assert!(guest_blocks(&guest) >= before, "nothing of a guest's memory is given back");
    assert!(guest.frame(FIRST_FREE_FRAME + 60) == content(60, 0), "nor changed");

    // The new kernel's reads are recorded: the next reboot has these blocks, and none of the previous kernel's.
    let (mut guest, kept) = reboot(&disk, guest);
    assert_eq!(kept, 6);
    assert_eq!(guest.read(2, FIRST_FREE_FRAME), content(2, 0));
    // Only the announced start of the driver is the start of another kernel; later resets of the driver are not.
    guest.stop(0);
    guest.run(0, RingState::Empty);
    assert_eq!(guest.read(9, FIRST_FREE_FRAME + 9), content(9, 0));
}

/// Returns how much memory of the host the guest's memory takes, in units of 512 bytes.
fn guest_blocks(guest: &Guest) -> u64 {
    guest.memory.metadata().unwrap().blocks()
}

/// Changes a block of the image without the server, to see where a read comes from.
fn change_image(disk: &Disk, block: u64, bytes: &[u8]) {
    File::options().write(true).open(&disk.image).unwrap().write_all_at(bytes, block * PAGE).unwrap();
}

#[test]
fn a_rebooted_guest_gets_cached_blocks_and_changed_ones_come_from_the_disk() {
    let disk = Disk::new(256);
    let mut guest = Guest::start(&disk.socket());
    for block in 0..64 {
        guest.read(block, FIRST_FREE_FRAME + block);
    }
    guest.write(70, FIRST_FREE_FRAME + 70, &content(70, 1));
    // A page in the guest's page cache that the guest changed and did not write back.
    guest.fill(FIRST_FREE_FRAME + 5, &content(5, 9));
    // A frame that was reused for other content.
    guest.fill(FIRST_FREE_FRAME + 6, &[0; PAGE as usize]);
    // A page with a single changed bit.
    let mut damaged = content(7, 0);
    damaged[1000] ^= 4;
    guest.fill(FIRST_FREE_FRAME + 7, &damaged);
    let memory = guest.memory.try_clone().unwrap();
    let (mut guest, kept) = reboot(&disk, guest);
    assert_eq!(kept, 65);
    // The content of the first read shows where it comes from.
    change_image(&disk, 1, &content(1, 8));
    assert_eq!(guest.read(1, FIRST_FREE_FRAME), content(1, 0), "from the retained cache");
    assert_eq!(guest.read(1, FIRST_FREE_FRAME), content(1, 8), "once only");
    for block in [5, 6, 7] {
        assert_eq!(guest.read(block, FIRST_FREE_FRAME + block), content(block, 0), "block {block} comes from the disk");
    }
    assert_eq!(guest.read(70, FIRST_FREE_FRAME + 70), content(70, 1));
    let (left, cache_status) = cache_status(&disk).unwrap();
    assert_eq!((left, cache_status), (60, CacheCounts { served: 2, refused: 3, ..CacheCounts::default() }));
    for block in (0..64).chain([70]).filter(|block| ![1, 5, 6, 7, 70].contains(block)) {
        assert_eq!(guest.read(block, FIRST_FREE_FRAME + 100), content(block, 0));
    }
    wait_for("the retained cache to be empty", || poll_empty_cache(&disk));
    assert_eq!(memory.metadata().unwrap().blocks(), 0, "all of it has been given back");
}

fn poll_empty_cache(disk: &Disk) -> Option<()> {
    cache_status(disk).is_none().then_some(())
}

#[test]
fn a_written_block_is_not_served_with_its_old_content() {
    let disk = Disk::new(64);
    let mut guest = Guest::start(&disk.socket());
    (0..32).for_each(|block| drop(guest.read(block, FIRST_FREE_FRAME + block)));
    let (mut guest, _) = reboot(&disk, guest);
    // Blocks are written whole, in part, zeroed, and by a failing write.
    guest.write(3, FIRST_FREE_FRAME, &content(3, 1));
    guest.fill(FIRST_FREE_FRAME, &[7; PAGE as usize]);
    assert_eq!(
        guest.request(&GuestRequest {
            kind: OUT,
            sector: 4 * 8 + 2,
            data: vec![DataPiece::readable(FIRST_FREE_FRAME * PAGE, 512)]
        }),
        0
    );
    let range = [&(5u64 * 8).to_le_bytes()[..], &8u32.to_le_bytes(), &[0; 4]].concat();
    guest.memory.write_all_at(&range, FIRST_FREE_FRAME * PAGE).unwrap();
    assert_eq!(
        guest.request(&GuestRequest {
            kind: WRITE_ZEROES,
            sector: 0,
            data: vec![DataPiece::readable(FIRST_FREE_FRAME * PAGE, 16)]
        }),
        0
    );
    assert_eq!(
        guest.request(&GuestRequest { kind: OUT, sector: 6 * 8, data: vec![DataPiece::readable(1 << 40, PAGE)] }),
        1
    );
    for block in 0..32 {
        assert_eq!(guest.read(block, FIRST_FREE_FRAME + 40), disk.block(block), "block {block}");
    }
    assert_eq!(disk.block(3), content(3, 1));
}

#[test]
fn retained_cache_and_new_memory_are_together_no_larger_than_the_guest() {
    let disk = Disk::new(GUEST_FRAMES);
    let mut guest = Guest::start(&disk.socket());
    for block in 0..2000 {
        guest.read(block, FIRST_FREE_FRAME + block);
    }
    let old = guest.memory.try_clone().unwrap();
    let (guest, kept) = reboot(&disk, guest);
    assert_eq!(kept, 2000);
    let frames = |file: &File| file.metadata().unwrap().blocks() * 512 / PAGE;
    // The guest allocates its memory gradually.
    for upto in (0..=GUEST_FRAMES).step_by(256).skip(1) {
        guest.memory.write_all_at(&vec![1; 256 * PAGE as usize], (upto - 256) * PAGE).unwrap();
        wait_for("the retained cache to shrink", || {
            (frames(&old) + frames(&guest.memory) <= GUEST_FRAMES * 105 / 100).then_some(())
        });
    }
    wait_for("the retained cache to be empty", || poll_empty_cache(&disk));
}

#[test]
fn a_retained_cache_is_of_the_previous_guest_and_is_dropped_on_request() {
    let disk = Disk::new(64);
    let mut guest = Guest::start(&disk.socket());
    assert!(disk.control().ask::<u64>(&KEEP).unwrap_err().to_string().contains("still connected"));
    guest.read(1, FIRST_FREE_FRAME);
    let (mut guest, kept) = reboot(&disk, guest);
    assert_eq!(kept, 1);
    guest.read(2, FIRST_FREE_FRAME);
    // Only the memory of the immediately previous guest is used.
    let (mut guest, kept) = reboot(&disk, guest);
    assert_eq!(kept, 1);
    change_image(&disk, 1, &content(1, 8));
    assert_eq!(guest.read(1, FIRST_FREE_FRAME), content(1, 8));
    disk.control().ask::<()>(&ControlCommand::DropCache {}).unwrap();
    assert_eq!(cache_status(&disk), None);
    change_image(&disk, 2, &content(2, 8));
    assert_eq!(guest.read(2, FIRST_FREE_FRAME), content(2, 8));
}

/// Reads a block through the guest's second queue, which is the other disk's.
fn read_through_second_queue(guest: &mut Guest, block: u64, frame: u64) -> Vec<u8> {
    guest.add_request(1, &GuestRequest::read(block, frame));
    guest.kick(1);
    let completed = wait_for("an answer", || Some(guest.take_completed(1)).filter(|completed| !completed.is_empty()));
    assert!(matches!(completed[..], [CompletedRequest { status: 0, .. }]), "{completed:?}");
    guest.frame(frame)
}

/// Starts a guest with two disks.
fn start_guest_with_disks(disks: &[Disk; 2]) -> [Guest; 2] {
    let memory = common::memory();
    let mut guests = disks.each_ref().map(|disk| Guest::connect(&disk.socket(), memory.try_clone().unwrap(), 2));
    guests[0].run(0, RingState::Empty);
    guests[1].run(1, RingState::Empty);
    guests
}

#[test]
fn two_disks_keep_their_blocks_in_one_memory_also_when_that_is_repeated() {
    let disks = [Disk::new(64), Disk::new(64)];
    // Blocks that only the second disk has.
    (0..64).for_each(|block| change_image(&disks[1], block, &content(block, 7)));
    let [mut first, mut second] = start_guest_with_disks(&disks);
    (0..32).for_each(|block| drop(first.read(block, FIRST_FREE_FRAME + block)));
    // Half of these frames were the first disk's.
    (0..32).for_each(|block| drop(read_through_second_queue(&mut second, block, FIRST_FREE_FRAME + 16 + block)));
    let memory = first.memory.try_clone().unwrap();
    let frames = || memory.metadata().unwrap().blocks() * 512 / PAGE;
    drop((first, second));
    let claims = disks.each_ref().map(|disk| disk.directory.path().join("claim"));
    let before = frames();
    // The commands are repeated, as after a kill in between.
    for _ in 0..2 {
        for (disk, claim) in disks.iter().zip(&claims) {
            wait_for("the front end to have gone", || (disk.control().status().unwrap().connected == 0).then_some(()));
            let kept: u64 = disk.control().ask(&ControlCommand::KeepCache { claim: Some(claim.clone()) }).unwrap();
            assert_eq!((kept, frames()), (32, before), "nothing is given back yet");
        }
    }
    let identity = |disk: &Disk| disk.control().status().unwrap().retained_memory.expect("a retained cache");
    assert_eq!(identity(&disks[0]), identity(&disks[1]));
    for (disk, other) in [(0, 1), (1, 0)] {
        disks[disk].control().ask::<()>(&ControlCommand::ShareCache { claims: vec![claims[other].clone()] }).unwrap();
    }
    wait_for("unneeded frames to be released", || (frames() == 48).then_some(()));
    let [mut first, mut second] = start_guest_with_disks(&disks);
    (0..32).for_each(|block| assert_eq!(first.read(block, FIRST_FREE_FRAME + block), content(block, 0)));
    (0..32).for_each(|block| {
        assert_eq!(read_through_second_queue(&mut second, block, FIRST_FREE_FRAME + 100 + block), content(block, 7))
    });
    let became = |disk: &Disk| wait_for("the retained cache to be empty", || disk.control().status().unwrap().emptied);
    assert_eq!(became(&disks[0]), CacheCounts { served: 16, refused: 16, ..CacheCounts::default() });
    assert_eq!(became(&disks[1]), CacheCounts { served: 32, ..CacheCounts::default() });
    assert_eq!(frames(), 0, "all of it has been given back");
}

#[test]
fn a_server_without_the_other_claims_releases_nothing() {
    let disk = Disk::new(64);
    let mut guest = Guest::start(&disk.socket());
    (0..32).for_each(|block| drop(guest.read(block, FIRST_FREE_FRAME + block)));
    let memory = guest.memory.try_clone().unwrap();
    let before = memory.metadata().unwrap().blocks();
    drop(guest);
    wait_for("the front end to have gone", || (disk.control().status().unwrap().connected == 0).then_some(()));
    let claim = disk.directory.path().join("claim");
    assert_eq!(disk.control().ask::<u64>(&ControlCommand::KeepCache { claim: Some(claim) }).unwrap(), 32);
    let mut guest = Guest::start(&disk.socket());
    assert_eq!(cache_status(&disk), None, "it has dropped that");
    change_image(&disk, 3, &content(3, 5));
    assert_eq!(guest.read(3, FIRST_FREE_FRAME), content(3, 5), "from the disk");
    assert_eq!(memory.metadata().unwrap().blocks(), before);
    // If the claim cannot be created, nothing is kept.
    let nowhere = disk.directory.path().join("none").join("claim");
    drop(guest);
    wait_for("the front end to have gone", || (disk.control().status().unwrap().connected == 0).then_some(()));
    let refused =
        disk.control().ask::<u64>(&ControlCommand::KeepCache { claim: Some(nowhere) }).unwrap_err().to_string();
    assert!(refused.contains("none/claim"), "{refused}");
    assert_eq!(cache_status(&disk), None);
}

#[derive(Debug, Clone)]
enum GuestAction {
    Read { block: u64, blocks: u64, frame: u64, shift: u64 },
    Write { block: u64, blocks: u64, frame: u64, shift: u64, version: u64 },
    ChangeByte { frame: u64, byte: u8 },
    ReadAndWrite { block: u64, frame: u64, version: u64 },
    Zero { block: u64, blocks: u64 },
    Reboot,
}

const BLOCKS: u64 = 24;

fn guest_action() -> impl Strategy<Value = GuestAction> {
    let (block, frame) = (0..BLOCKS - 3, FIRST_FREE_FRAME..FIRST_FREE_FRAME + 20);
    let shift = prop_oneof![4 => Just(0u64), 1 => Just(512u64)];
    prop_oneof![
        6 => (block.clone(), 1..4u64, frame.clone(), shift.clone())
            .prop_map(|(block, blocks, frame, shift)| GuestAction::Read { block, blocks, frame, shift }),
        4 => (block.clone(), 1..4u64, frame.clone(), shift, 1..200u64)
            .prop_map(|(block, blocks, frame, shift, version)| GuestAction::Write { block, blocks, frame, shift, version }),
        3 => (frame.clone(), any::<u8>()).prop_map(|(frame, byte)| GuestAction::ChangeByte { frame, byte }),
        2 => (block.clone(), frame, 1..200u64)
            .prop_map(|(block, frame, version)| GuestAction::ReadAndWrite { block, frame, version }),
        1 => (block, 1..4u64).prop_map(|(block, blocks)| GuestAction::Zero { block, blocks }),
        3 => Just(GuestAction::Reboot),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    /// A guest reads the content of the disk, before and after any number of reboots.
    #[test]
    fn a_guest_never_reads_anything_but_the_disks_content(actions in proptest::collection::vec(guest_action(), 1..60)) {
        let disk = Disk::new(BLOCKS);
        let mut guest = Guest::start(&disk.socket());
        for action in actions {
            match action {
                GuestAction::Read { block, blocks, frame, shift } => {
                    let bytes = blocks * PAGE;
                    let request = GuestRequest { kind: IN, sector: block * 8, data: vec![DataPiece::writable(frame * PAGE + shift, bytes)] };
                    prop_assert_eq!(guest.request(&request), 0);
                    let mut got = vec![0; bytes as usize];
                    guest.memory.read_exact_at(&mut got, frame * PAGE + shift).unwrap();
                    let on_disk: Vec<u8> = (block..block + blocks).flat_map(|block| disk.block(block)).collect();
                    prop_assert!(got == on_disk, "{} blocks from {}", blocks, block);
                }
                GuestAction::Write { block, blocks, frame, shift, version } => {
                    let bytes: Vec<u8> = (block..block + blocks).flat_map(|block| content(block, version)).collect();
                    guest.memory.write_all_at(&bytes, frame * PAGE + shift).unwrap();
                    let data = vec![DataPiece::readable(frame * PAGE + shift, bytes.len() as u64)];
                    prop_assert_eq!(guest.request(&GuestRequest { kind: OUT, sector: block * 8, data }), 0);
                }
                GuestAction::ChangeByte { frame, byte } => guest.memory.write_all_at(&[byte], frame * PAGE + 77).unwrap(),
                GuestAction::ReadAndWrite { block, frame, version } => {
                    // A concurrent read and write of one block: the read may return either content.
                    guest.fill(frame, &content(block, version));
                    let requests = [GuestRequest::read(block, FIRST_FREE_FRAME + 30), GuestRequest::write(block, frame), GuestRequest::read(block, FIRST_FREE_FRAME + 31)];
                    for request in &requests {
                        guest.add_request(0, request);
                    }
                    guest.kick(0);
                    let mut completed = Vec::new();
                    wait_for("all three", || {
                        completed.extend(guest.take_completed(0));
                        (completed.len() == 3).then_some(())
                    });
                    prop_assert!(completed.iter().all(|completed| completed.status == 0));
                }
                GuestAction::Zero { block, blocks } => {
                    let range = [&(block * 8).to_le_bytes()[..], &(blocks as u32 * 8).to_le_bytes(), &[0; 4]].concat();
                    guest.memory.write_all_at(&range, 100 * PAGE).unwrap();
                    prop_assert_eq!(guest.request(&GuestRequest { kind: WRITE_ZEROES, sector: 0, data: vec![DataPiece::readable(100 * PAGE, 16)] }), 0);
                }
                GuestAction::Reboot => guest = reboot(&disk, guest).0,
            }
        }
        let (mut guest, _) = reboot(&disk, guest);
        for block in 0..BLOCKS {
            prop_assert!(guest.read(block, FIRST_FREE_FRAME + block) == disk.block(block), "block {} after the last reboot", block);
        }
    }
}
