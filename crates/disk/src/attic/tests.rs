#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;
use crate::memory::Region;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

const PAGES: u64 = 256;

/// As a guest's memory is: a file whose blocks are its pages, and nothing else.
fn memory_file(frames: u64) -> File {
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(frames * BLOCK as u64).unwrap();
    file
}

/// A guest with PAGES frames, of which each fourth holds a block: 1000 + its number.
fn former() -> (Attic, Arc<Memory>, File) {
    let file = memory_file(PAGES);
    let region =
        Region { address: 0, bytes: PAGES * BLOCK as u64, file: file.try_clone().unwrap(), offset: 0, front: 0 };
    let memory = Arc::new(Memory::map(vec![region]).unwrap());
    let (mut map, digester) = (BlockMap::new(memory.frames()), Digester::new().unwrap());
    for frame in 0..PAGES {
        memory.write(frame * BLOCK as u64, &content(frame)).unwrap();
        if frame % 4 == 0 {
            map.moved(1000 + frame, frame as Frame, digester.of(&content(frame)));
        }
    }
    (Attic::new(&memory, map, digester, None).unwrap(), memory, file)
}

fn content(frame: u64) -> Block {
    [frame as u8 ^ 0x5a; BLOCK]
}

fn there(file: &File) -> u64 {
    file.metadata().unwrap().blocks() * 512 / BLOCK as u64
}

#[test]
fn memory_that_somebody_else_uses_now_is_left_alone() {
    let (mut attic, memory, file) = former();
    assert!(attic.is_in(&memory));
    let other = memory_file(1);
    let region = Region { address: 0, bytes: BLOCK as u64, file: other, offset: 0, front: 0 };
    assert!(!attic.is_in(&Memory::map(vec![region]).unwrap()));
    assert!(attic.take(1000, &mut [0; BLOCK])[0].is_some());
    let before = file.metadata().unwrap().blocks();
    attic.leave();
    assert_eq!(file.metadata().unwrap().blocks(), before);
    let mut found = [0; BLOCK];
    memory.read(0, &mut found).unwrap();
    assert_eq!(found, content(0));
}

#[test]
fn a_block_is_given_once_and_its_frame_goes_back() {
    let (mut attic, _memory, file) = former();
    let mut block = [0; BLOCK];
    assert_eq!(attic.take(1001, &mut block), [None], "it never had it");
    assert!(attic.take(1004, &mut block)[0].is_some());
    assert_eq!(block, content(4));
    assert_eq!(attic.take(1004, &mut block), [None], "a second time");
    attic.give_back();
    assert_eq!((attic.len(), there(&file)), (63, PAGES - 1));
    assert_eq!(attic.told(), Told { served: 1, ..Told::default() });
}

#[test]
fn blocks_that_lie_in_one_piece_are_taken_in_one() {
    let (attic, memory, file) = former();
    let (mut map, digester) = (BlockMap::new(memory.frames()), attic.digester);
    // Two pieces, a gap, one that was changed, and one whose frame there is not.
    for (block, frame) in [(7, 20), (8, 21), (9, 22), (10, 3), (12, 40), (13, 41)] {
        map.moved(block, frame, digester.of(&content(frame.into())));
    }
    memory.write(41 * BLOCK as u64, &[0; BLOCK]).unwrap();
    let mut attic = Attic::new(&memory, map, digester, None).unwrap();
    let mut bytes = [0; 8 * BLOCK];
    let found = attic.take(7, &mut bytes);
    let is_there: Vec<_> = found.iter().map(Option::is_some).collect();
    assert_eq!(is_there, [true, true, true, true, false, true, false, false]);
    for (place, frame) in [(0, 20), (1, 21), (2, 22), (3, 3), (5, 40)] {
        assert_eq!(bytes.as_chunks::<BLOCK>().0[place], content(frame), "frame {frame}");
    }
    assert_eq!(attic.told(), Told { served: 5, refused: 1, ..Told::default() });
    assert!(attic.is_empty());
    attic.give_back();
    assert_eq!(there(&file), PAGES - 6);
}

#[test]
fn what_is_not_as_the_disk_is_is_not_given() {
    let (mut attic, memory, _file) = former();
    let mut block = [0; BLOCK];
    // A single bit, somewhere.
    memory.write(8 * 4096 + 2000, &[content(8)[0] ^ 0x10]).unwrap();
    assert_eq!(attic.take(1008, &mut block)[0].is_some(), UNCHECKED);
    attic.changed(1012..1013);
    attic.changed(5..6);
    assert_eq!(attic.take(1012, &mut block), [None], "the disk has another one now");
    assert_eq!(
        attic.told(),
        Told { refused: u64::from(!UNCHECKED), served: u64::from(UNCHECKED), overwritten: 1, ..Told::default() }
    );
}

/// Do all slices of what there is to do.
fn tend(attic: &mut Attic, room: Option<usize>) {
    attic.look(room);
    while attic.tend() {}
}

#[test]
fn it_shrinks_evenly_and_nothing_but_blocks_is_kept() {
    let (mut attic, _memory, file) = former();
    tend(&mut attic, None);
    assert_eq!(there(&file), 64, "each fourth frame");
    tend(&mut attic, Some(64));
    assert_eq!(attic.told().dropped, 0, "there is room");
    tend(&mut attic, Some(16));
    assert_eq!((attic.len(), there(&file), attic.told().dropped), (16, 16, 48));
    let left: Vec<_> = attic.map.held().map(|(frame, _)| frame).collect();
    assert!(left.iter().any(|frame| *frame < 128) && left.iter().any(|frame| *frame > 192), "{left:?}");
    let mut block = [0; BLOCK];
    for frame in left {
        assert!(attic.take(1000 + u64::from(frame), &mut block)[0].is_some());
        assert_eq!(block, content(frame.into()));
    }
    assert!(attic.is_done());
    drop(attic);
    assert_eq!(there(&file), 0);
}

#[test]
fn a_large_one_is_given_up_in_slices_and_nobody_has_anything_of_it() {
    let (frames, file) = (8192u64, memory_file(8192));
    let region =
        Region { address: 0, bytes: frames * BLOCK as u64, file: file.try_clone().unwrap(), offset: 0, front: 0 };
    let memory = Memory::map(vec![region]).unwrap();
    let (mut map, digester) = (BlockMap::new(memory.frames()), Digester::new().unwrap());
    for frame in 0..frames {
        memory.write(frame * BLOCK as u64, &content(frame)).unwrap();
        map.moved(frame, frame as Frame, digester.of(&content(frame)));
    }
    let mut attic = Attic::new(&memory, map, digester, None).unwrap();
    tend(&mut attic, None);
    assert_eq!(there(&file), frames, "all of it is of use");
    // A sixteenth part of it is too much, and goes in slices too.
    attic.look(Some((frames - 3000) as usize));
    let mut slices = 0;
    while attic.tend() {
        slices += 1;
        assert!(there(&file) > frames - 1100 * (slices + 1), "in slice {slices}");
    }
    assert_eq!((there(&file), attic.len() as u64), (frames - 3000, frames - 3000));
    attic.give_up();
    assert_eq!((attic.len(), attic.told().dropped), (0, frames));
    assert_eq!(attic.take(8000, &mut [0; BLOCK]), [None]);
    assert!(!attic.is_done() && there(&file) == frames - 3000);
    let mut before = there(&file);
    while attic.tend() {
        let now = there(&file);
        assert!(before - now <= 1024, "{before}, then {now}");
        before = now;
    }
    assert!(attic.is_done());
    assert_eq!(there(&file), 0);
}

/// Two disks in one memory, and the directory that holds their claims.
struct Two {
    attics: [Option<Attic>; 2],
    claims: [PathBuf; 2],
    file: File,
    _directory: tempfile::TempDir,
}

const BOTH: u64 = 8;

/// The first disk has each fourth frame; the second has the next one, and each eighth after the first has had it.
fn two() -> Two {
    let directory = tempfile::tempdir().unwrap();
    let claims = ["a", "b"].map(|name| directory.path().join(name));
    let (first, memory, file) = former();
    let (mut map, digester) = (BlockMap::new(memory.frames()), Digester::new().unwrap());
    for frame in (0..PAGES).filter(|frame| frame % 4 == 1 || frame % BOTH == 0) {
        let content = [frame as u8 ^ 0xa5; BLOCK];
        memory.write(frame * BLOCK as u64, &content).unwrap();
        map.moved(frame, frame as Frame, digester.of(&content));
    }
    let second = Attic::new(&memory, map, digester, Some(&claims[1])).unwrap();
    let mut first = first;
    first.publish(&claims[0]).unwrap();
    Two { attics: [Some(first), Some(second)], claims, file, _directory: directory }
}

impl Two {
    fn share(&mut self) {
        let [first, second] = &mut self.attics;
        first.as_mut().unwrap().share(&self.claims[1..]).unwrap();
        second.as_mut().unwrap().share(&self.claims[..1]).unwrap();
    }

    fn of(&mut self, number: usize) -> &mut Attic {
        self.attics[number].as_mut().unwrap()
    }

    fn tend(&mut self, room: Option<usize>) {
        // Each sees only afterwards what the other has let go of.
        for _ in 0..2 {
            self.attics.iter_mut().flatten().for_each(|attic| tend(attic, room));
        }
    }

    /// Frames that any of them has a block in.
    fn needed(&self) -> u64 {
        let all = self.attics.iter().flatten().flat_map(|attic| attic.map.held().map(|(frame, _)| frame));
        all.collect::<std::collections::BTreeSet<_>>().len() as u64
    }
}

#[test]
fn nothing_is_given_back_before_it_is_known_what_others_need() {
    let mut two = two();
    two.tend(Some(0));
    assert!(two.of(0).take(1004, &mut [0; BLOCK])[0].is_some());
    two.of(0).changed(1012..1013);
    two.tend(Some(0));
    assert_eq!(there(&two.file), PAGES, "all of it is there");
    assert!(two.of(0).is_unshared());
    two.of(0).give_up();
    assert!(two.of(0).is_done());
    two.attics[0] = None;
    assert_eq!(there(&two.file), PAGES);
}

#[test]
fn a_frame_that_two_disks_claim_is_served_to_the_right_one_and_stays_until_both_are_through() {
    let mut two = two();
    two.share();
    two.tend(None);
    assert_eq!((there(&two.file), two.needed()), (128, 128), "half of it holds a block of either disk");
    // What the first had there has another digest now; the frame is not taken from the second.
    let mut block = [0; BLOCK];
    assert_eq!(two.of(0).take(1000, &mut block)[0].is_some(), UNCHECKED);
    two.of(0).changed(1008..1009);
    two.tend(None);
    assert_eq!(there(&two.file), 128);
    assert!(two.of(1).take(8, &mut block)[0].is_some());
    assert_eq!(block, [8 ^ 0xa5; BLOCK]);
    two.of(1).changed(0..1);
    two.tend(None);
    assert_eq!((there(&two.file), two.needed()), (126, 126));
    // The other way round: the second lets go first.
    assert!(two.of(1).take(16, &mut block)[0].is_some());
    two.tend(None);
    assert_eq!(there(&two.file), 126, "the first has not been asked for it yet");
    two.of(0).changed(1016..1017);
    two.tend(None);
    assert_eq!((there(&two.file), two.needed()), (125, 125));
}

#[test]
fn what_one_has_needed_goes_when_it_has_gone() {
    for how in ["died", "given up"] {
        let mut two = two();
        two.share();
        two.tend(None);
        match how {
            "died" => two.attics[0] = None,
            _ => two.of(0).give_up(),
        }
        two.tend(None);
        assert_eq!(there(&two.file), 96, "{how}: the second's");
        let mut block = [0; BLOCK];
        for frame in (0..PAGES).filter(|frame| frame % 4 == 1 || frame % BOTH == 0) {
            assert!(two.of(1).take(frame, &mut block)[0].is_some(), "{how}: frame {frame}");
        }
        assert!(two.of(1).is_done());
        two.attics[1] = None;
        assert_eq!(there(&two.file), 0, "{how}");
    }
}

#[test]
fn together_they_shrink_to_the_room_there_is() {
    for room in [120, 90, 40, 3, 0] {
        let mut two = two();
        two.share();
        two.tend(None);
        // What one lets go of of what both need is free when the other has, too: that takes further looks.
        for _ in 0..10 {
            two.tend(Some(room));
        }
        let left = there(&two.file);
        assert!(left <= room as u64, "{left} of {room}");
        assert_eq!(left, two.needed());
        assert!(left + 40 >= room as u64, "hardly more was dropped than had to be: {left} of {room}");
        let each = two.attics.iter().flatten().map(Attic::len).collect::<Vec<_>>();
        assert!(room < 40 || each.iter().all(|blocks| *blocks > 0), "{each:?}");
    }
}

proptest::proptest! {
    /// Whatever happens in whichever order: no disk loses to the other what it could have had, and what nobody needs goes.
    #[test]
    fn neither_takes_anything_from_the_other(steps in proptest::collection::vec((0..2usize, 0..4u8, 0..PAGES), 0..300)) {
        let mut two = two();
        two.share();
        for (number, what, frame) in steps {
            let base = if number == 0 { 1000 } else { 0 };
            let attic = two.of(number);
            match what {
                0 | 1 => {
                    let known = attic.map.get(base + frame).is_some();
                    let stale = number == 0 && frame % BOTH == 0 && !UNCHECKED;
                    let mut block = [0; BLOCK];
                    let found = attic.take(base + frame, &mut block)[0].is_some();
                    proptest::prop_assert_eq!(found, known && !stale, "disk {}, frame {}", number, frame);
                }
                2 => attic.changed(base + frame..base + frame + 1),
                _ => {
                    attic.look(None);
                    attic.tend();
                }
            }
        }
        two.tend(None);
        proptest::prop_assert_eq!(there(&two.file), two.needed());
    }
}
