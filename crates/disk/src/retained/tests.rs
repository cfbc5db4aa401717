//! A retained cache in a file like a guest's memory: which blocks it serves, and which frames (pages of that memory) it
//! releases. A *claim* is the file in which a server marks the frames that it needs.

#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;
use crate::memory::Region;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

const FRAMES: u64 = 256;

/// Creates a file like a guest's memory, whose blocks are its pages.
fn memory_file(frames: u64) -> File {
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(frames * BLOCK as u64).unwrap();
    file
}

/// Returns the cache of a guest with FRAMES frames, of which every fourth holds a block: 1000 + its number.
fn cache_of_previous_guest() -> (RetainedCache, Arc<Memory>, File) {
    let file = memory_file(FRAMES);
    let region = Region {
        address: 0,
        bytes: FRAMES * BLOCK as u64,
        file: file.try_clone().unwrap(),
        offset: 0,
        front_end_address: 0,
    };
    let memory = Arc::new(Memory::map(vec![region]).unwrap());
    let (mut map, digester) = (BlockMap::new(memory.frames()), Digester::new().unwrap());
    for frame in 0..FRAMES {
        memory.write(frame * BLOCK as u64, &content(frame)).unwrap();
        if frame % 4 == 0 {
            map.moved(1000 + frame, frame as Frame, digester.digest(&content(frame)));
        }
    }
    (RetainedCache::new(&memory, map, digester, None).unwrap(), memory, file)
}

/// Returns the content of a frame.
fn content(frame: u64) -> Block {
    [frame as u8 ^ 0x5a; BLOCK]
}

/// Returns the number of frames that the host has allocated.
fn allocated_frames(file: &File) -> u64 {
    file.metadata().unwrap().blocks() * 512 / BLOCK as u64
}

#[test]
fn memory_with_another_user_is_not_released() {
    let (mut cache, memory, file) = cache_of_previous_guest();
    assert!(cache.is_in(&memory));
    let other = memory_file(1);
    let region = Region { address: 0, bytes: BLOCK as u64, file: other, offset: 0, front_end_address: 0 };
    assert!(!cache.is_in(&Memory::map(vec![region]).unwrap()));
    assert!(cache.take(1000, &mut [0; BLOCK])[0].is_some());
    let before = file.metadata().unwrap().blocks();
    cache.detach();
    assert_eq!(file.metadata().unwrap().blocks(), before);
    let mut found = [0; BLOCK];
    memory.read(0, &mut found).unwrap();
    assert_eq!(found, content(0));
}

#[test]
fn a_block_is_served_once_and_its_frame_is_released() {
    let (mut cache, _memory, file) = cache_of_previous_guest();
    let mut block = [0; BLOCK];
    assert_eq!(cache.take(1001, &mut block), [None], "never cached");
    assert!(cache.take(1004, &mut block)[0].is_some());
    assert_eq!(block, content(4));
    assert_eq!(cache.take(1004, &mut block), [None], "a second time");
    cache.release_frames();
    // 64 frames of 256 held a block, and one of them was released.
    assert_eq!((cache.len(), allocated_frames(&file)), (63, FRAMES - 1));
    assert_eq!(cache.counts(), CacheCounts { served: 1, ..CacheCounts::default() });
}

#[test]
fn contiguous_blocks_are_read_together() {
    let (cache, memory, file) = cache_of_previous_guest();
    let (mut map, digester) = (BlockMap::new(memory.frames()), cache.digester);
    // Blocks 7 to 9 are in adjacent frames, and block 10 is elsewhere. Block 11 was never cached. Block 12 is followed
    // by block 13, whose frame is changed below, and block 14 was never cached.
    for (block, frame) in [(7, 20), (8, 21), (9, 22), (10, 3), (12, 40), (13, 41)] {
        map.moved(block, frame, digester.digest(&content(frame.into())));
    }
    memory.write(41 * BLOCK as u64, &[0; BLOCK]).unwrap();
    let mut cache = RetainedCache::new(&memory, map, digester, None).unwrap();
    let mut bytes = [0; 8 * BLOCK];
    let found = cache.take(7, &mut bytes);
    let is_served: Vec<_> = found.iter().map(Option::is_some).collect();
    assert_eq!(is_served, [true, true, true, true, false, true, false, false]);
    for (place, frame) in [(0, 20), (1, 21), (2, 22), (3, 3), (5, 40)] {
        assert_eq!(bytes.as_chunks::<BLOCK>().0[place], content(frame), "frame {frame}");
    }
    assert_eq!(cache.counts(), CacheCounts { served: 5, refused: 1, ..CacheCounts::default() });
    assert!(cache.is_empty());
    cache.release_frames();
    assert_eq!(allocated_frames(&file), FRAMES - 6);
}

#[test]
fn a_block_that_differs_from_the_disk_is_not_served() {
    let (mut cache, memory, _file) = cache_of_previous_guest();
    let mut block = [0; BLOCK];
    // A single changed bit.
    memory.write(8 * 4096 + 2000, &[content(8)[0] ^ 0x10]).unwrap();
    assert_eq!(cache.take(1008, &mut block)[0].is_some(), UNCHECKED);
    cache.changed(1012..1013);
    cache.changed(5..6);
    assert_eq!(cache.take(1012, &mut block), [None], "the disk has changed since");
    assert_eq!(
        cache.counts(),
        CacheCounts {
            refused: u64::from(!UNCHECKED),
            served: u64::from(UNCHECKED),
            overwritten: 1,
            ..CacheCounts::default()
        }
    );
}

/// Works until nothing is remaining to do.
fn maintain(cache: &mut RetainedCache, room: Option<usize>) {
    cache.update(room);
    while cache.maintain() {}
}

#[test]
fn a_cache_shrinks_evenly_and_keeps_only_blocks() {
    let (mut cache, _memory, file) = cache_of_previous_guest();
    maintain(&mut cache, None);
    assert_eq!(allocated_frames(&file), 64, "each fourth frame");
    maintain(&mut cache, Some(64));
    assert_eq!(cache.counts().dropped, 0, "there is no excess");
    maintain(&mut cache, Some(16));
    assert_eq!((cache.len(), allocated_frames(&file), cache.counts().dropped), (16, 16, 48));
    let remaining: Vec<_> = cache.map.held_blocks().map(|(frame, _)| frame).collect();
    assert!(remaining.iter().any(|frame| *frame < 128) && remaining.iter().any(|frame| *frame > 192), "{remaining:?}");
    let mut block = [0; BLOCK];
    for frame in remaining {
        assert!(cache.take(1000 + u64::from(frame), &mut block)[0].is_some());
        assert_eq!(block, content(frame.into()));
    }
    assert!(cache.is_done());
    drop(cache);
    assert_eq!(allocated_frames(&file), 0);
}

#[test]
fn a_large_cache_is_discarded_in_slices_and_serves_nothing_then() {
    let (frames, file) = (8192u64, memory_file(8192));
    let region = Region {
        address: 0,
        bytes: frames * BLOCK as u64,
        file: file.try_clone().unwrap(),
        offset: 0,
        front_end_address: 0,
    };
    let memory = Memory::map(vec![region]).unwrap();
    let (mut map, digester) = (BlockMap::new(memory.frames()), Digester::new().unwrap());
    for frame in 0..frames {
        memory.write(frame * BLOCK as u64, &content(frame)).unwrap();
        map.moved(frame, frame as Frame, digester.digest(&content(frame)));
    }
    let mut cache = RetainedCache::new(&memory, map, digester, None).unwrap();
    maintain(&mut cache, None);
    assert_eq!(allocated_frames(&file), frames, "all of it is needed");
    // The new guest has room for all but 3000 frames. These are dropped in slices of about 1024.
    cache.update(Some((frames - 3000) as usize));
    let mut slices = 0;
    while cache.maintain() {
        slices += 1;
        assert!(allocated_frames(&file) > frames - 1100 * (slices + 1), "in slice {slices}");
    }
    assert_eq!((allocated_frames(&file), cache.len() as u64), (frames - 3000, frames - 3000));
    cache.discard();
    assert_eq!((cache.len(), cache.counts().dropped), (0, frames));
    assert_eq!(cache.take(8000, &mut [0; BLOCK]), [None]);
    assert!(!cache.is_done() && allocated_frames(&file) == frames - 3000);
    let mut before = allocated_frames(&file);
    while cache.maintain() {
        let now = allocated_frames(&file);
        assert!(before - now <= 1024, "{before}, then {now}");
        before = now;
    }
    assert!(cache.is_done());
    assert_eq!(allocated_frames(&file), 0);
}

/// Two disks with blocks in the same memory, and the directory of their claims.
struct TwoDisks {
    caches: [Option<RetainedCache>; 2],
    claims: [PathBuf; 2],
    file: File,
    _directory: tempfile::TempDir,
}

/// Each frame whose number is a multiple of this had a block of both disks.
const SHARED_INTERVAL: u64 = 8;

/// Returns two disks. The first disk has every fourth frame. The second disk has the frame after each of them, and
/// every eighth frame that the first disk had before.
fn two_disks() -> TwoDisks {
    let directory = tempfile::tempdir().unwrap();
    let claims = ["a", "b"].map(|name| directory.path().join(name));
    let (mut first, memory, file) = cache_of_previous_guest();
    let (mut map, digester) = (BlockMap::new(memory.frames()), Digester::new().unwrap());
    for frame in (0..FRAMES).filter(|frame| frame % 4 == 1 || frame % SHARED_INTERVAL == 0) {
        let content = [frame as u8 ^ 0xa5; BLOCK];
        memory.write(frame * BLOCK as u64, &content).unwrap();
        map.moved(frame, frame as Frame, digester.digest(&content));
    }
    let second = RetainedCache::new(&memory, map, digester, Some(&claims[1])).unwrap();
    first.publish(&claims[0]).unwrap();
    TwoDisks { caches: [Some(first), Some(second)], claims, file, _directory: directory }
}

impl TwoDisks {
    fn share(&mut self) {
        let [first, second] = &mut self.caches;
        first.as_mut().unwrap().share(&self.claims[1..]).unwrap();
        second.as_mut().unwrap().share(&self.claims[..1]).unwrap();
    }

    fn cache(&mut self, number: usize) -> &mut RetainedCache {
        self.caches[number].as_mut().unwrap()
    }

    fn maintain(&mut self, room: Option<usize>) {
        // Each server sees only in the next round which frames the other server has released.
        for _ in 0..2 {
            self.caches.iter_mut().flatten().for_each(|cache| maintain(cache, room));
        }
    }

    /// Returns the number of frames in which either disk has a block.
    fn needed_frames(&self) -> u64 {
        let all = self.caches.iter().flatten().flat_map(|cache| cache.map.held_blocks().map(|(frame, _)| frame));
        all.collect::<std::collections::BTreeSet<_>>().len() as u64
    }
}

#[test]
fn no_frame_is_released_before_the_other_claims_are_known() {
    let mut disks = two_disks();
    disks.maintain(Some(0));
    assert!(disks.cache(0).take(1004, &mut [0; BLOCK])[0].is_some());
    disks.cache(0).changed(1012..1013);
    disks.maintain(Some(0));
    assert_eq!(allocated_frames(&disks.file), FRAMES, "all of it is there");
    assert!(disks.cache(0).is_unshared());
    disks.cache(0).discard();
    assert!(disks.cache(0).is_done());
    disks.caches[0] = None;
    assert_eq!(allocated_frames(&disks.file), FRAMES);
}

#[test]
fn a_frame_that_two_disks_claim_is_served_to_the_right_one_and_kept_until_both_release_it() {
    let mut disks = two_disks();
    disks.share();
    disks.maintain(None);
    // The first disk has 64 frames. The second has 96: 64 others, and 32 of the first's.
    assert_eq!(
        (allocated_frames(&disks.file), disks.needed_frames()),
        (128, 128),
        "half of it holds a block of either disk"
    );
    // The first disk's block in this frame has another digest; the frame stays for the second disk.
    let mut block = [0; BLOCK];
    assert_eq!(disks.cache(0).take(1000, &mut block)[0].is_some(), UNCHECKED);
    disks.cache(0).changed(1008..1009);
    disks.maintain(None);
    assert_eq!(allocated_frames(&disks.file), 128);
    assert!(disks.cache(1).take(8, &mut block)[0].is_some());
    assert_eq!(block, [8 ^ 0xa5; BLOCK]);
    disks.cache(1).changed(0..1);
    disks.maintain(None);
    assert_eq!((allocated_frames(&disks.file), disks.needed_frames()), (126, 126));
    // In the other order: the second disk releases first.
    assert!(disks.cache(1).take(16, &mut block)[0].is_some());
    disks.maintain(None);
    assert_eq!(allocated_frames(&disks.file), 126, "the first has not taken it yet");
    disks.cache(0).changed(1016..1017);
    disks.maintain(None);
    assert_eq!((allocated_frames(&disks.file), disks.needed_frames()), (125, 125));
}

#[test]
fn the_frames_of_a_server_are_released_when_it_ends() {
    for end in ["died", "discarded"] {
        let mut disks = two_disks();
        disks.share();
        disks.maintain(None);
        match end {
            "died" => disks.caches[0] = None,
            _ => disks.cache(0).discard(),
        }
        disks.maintain(None);
        assert_eq!(allocated_frames(&disks.file), 96, "{end}: the second's");
        let mut block = [0; BLOCK];
        for frame in (0..FRAMES).filter(|frame| frame % 4 == 1 || frame % SHARED_INTERVAL == 0) {
            assert!(disks.cache(1).take(frame, &mut block)[0].is_some(), "{end}: frame {frame}");
        }
        assert!(disks.cache(1).is_done());
        disks.caches[1] = None;
        assert_eq!(allocated_frames(&disks.file), 0, "{end}");
    }
}

#[test]
fn two_caches_shrink_together_to_the_available_memory() {
    for room in [120, 90, 40, 3, 0] {
        let mut disks = two_disks();
        disks.share();
        disks.maintain(None);
        // A frame that both disks need is free when both have released it, which takes several rounds.
        for _ in 0..10 {
            disks.maintain(Some(room));
        }
        let remaining = allocated_frames(&disks.file);
        assert!(remaining <= room as u64, "{remaining} of {room}");
        assert_eq!(remaining, disks.needed_frames());
        assert!(remaining + 40 >= room as u64, "hardly more was dropped than necessary: {remaining} of {room}");
        let each = disks.caches.iter().flatten().map(RetainedCache::len).collect::<Vec<_>>();
        assert!(room < 40 || each.iter().all(|blocks| *blocks > 0), "{each:?}");
    }
}

proptest::proptest! {
    /// In any order of steps, no disk loses a block because of the other disk, and frames that neither disk needs are
    /// released.
    #[test]
    fn no_cache_loses_a_block_because_of_another(steps in proptest::collection::vec((0..2usize, 0..4u8, 0..FRAMES), 0..300)) {
        let mut disks = two_disks();
        disks.share();
        for (number, what, frame) in steps {
            let base = if number == 0 { 1000 } else { 0 };
            let cache = disks.cache(number);
            match what {
                0 | 1 => {
                    let known = cache.map.get(base + frame).is_some();
                    let stale = number == 0 && frame % SHARED_INTERVAL == 0 && !UNCHECKED;
                    let mut block = [0; BLOCK];
                    let found = cache.take(base + frame, &mut block)[0].is_some();
                    proptest::prop_assert_eq!(found, known && !stale, "disk {}, frame {}", number, frame);
                }
                2 => cache.changed(base + frame..base + frame + 1),
                _ => {
                    cache.update(None);
                    cache.maintain();
                }
            }
        }
        disks.maintain(None);
        proptest::prop_assert_eq!(allocated_frames(&disks.file), disks.needed_frames());
    }
}
