//! Reads of an object store: few requests, several in flight, and the one that a guest needs first.

use super::disk::TestDisk;
use super::memory_objects::{MemoryObjects, Reads};
use super::model::{Change, Model, content, image, vm};
use crate::engine::{Engine, EngineSettings};
use crate::image::LocalImage;
use crate::objects::schedule::{MAX_UNNEEDED_IN_FLIGHT, Need};
use crate::objects::{CHUNK_BYTES, CHUNKS_PER_GET, MAX_IN_FLIGHT};
use crate::types::Owner;
use rekindle_pages::{BlockId, PAGE_SIZE, Page, PageNo};
use rekindle_testing::{DEADLINE, wait_for};
use rustix::event::{PollFd, PollFlags, poll};
use std::io;
use std::time::Duration;

#[test]
fn an_object_is_read_in_any_pieces() {
    let disk = MemoryObjects::default().shared().disk;
    let content: Vec<u8> = (0..3_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let file = disk.create("segments/x").unwrap();
    file.write_at(&content[1000..], 1000).unwrap();
    file.write_at(&content[..1000], 0).unwrap();
    file.start_sync();
    file.sync().unwrap();
    assert_eq!(file.write_at(b"x", 0).unwrap_err().kind(), io::ErrorKind::Unsupported);
    let file = disk.open("segments/x").unwrap();
    assert_eq!(file.length().unwrap(), 3_000_000);
    for (offset, len) in
        [(0, 10), (262_140, 10), (2_999_990, 100), (3_000_000, 5), (1_000_000, 1_500_000), (0, 3_000_000), (4 << 20, 1)]
    {
        let mut found = vec![0; len];
        let count = file.read_at(&mut found, offset as u64).unwrap();
        let expected = content.get(offset..).unwrap_or_default();
        let expected = &expected[..expected.len().min(len)];
        assert!(found[..count] == *expected, "{offset} {len}");
    }
    assert_eq!(disk.create("segments/x").unwrap().sync().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    disk.remove("segments/x").unwrap();
    assert_eq!(disk.open("segments/x").unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(vm().name, "web");
}

/// Reads all pages as a pager does, one after the other, after the next ones were announced. Returns their number.
fn read_like_a_pager(image: &LocalImage, mut check: impl FnMut(PageNo, &Page)) -> u64 {
    let order: Vec<_> = image.hot().unwrap().collect();
    let mut found = [0; PAGE_SIZE];
    let mut announced = 0;
    let arrivals = image.arrivals().unwrap();
    for (number, (block, page)) in order.iter().enumerate() {
        if number % 64 == 0 {
            announced = announced.max(number);
            announced += image.start_reads(&order[announced..order.len().min(announced + 1024)]).unwrap();
        }
        while !image.read_page_if_ready((*block, *page), &mut found, Need::Background).unwrap() {
            poll(&mut [PollFd::new(&arrivals, PollFlags::IN)], None).unwrap();
            rustix::io::read(arrivals, &mut [0; 8]).unwrap();
        }
        check(*page, &found);
    }
    order.len() as u64
}

/// Returns a store with one checkpoint of a block of `pages` pages that cannot be compressed.
fn with_full_checkpoint(pages: u64, segment: u64) -> MemoryObjects {
    let disk = MemoryObjects::default();
    let settings = EngineSettings { keep: 2, segment, create: true };
    let mut engine = Engine::open(disk.shared(), &vm(), &Owner::here("test"), None, settings).unwrap();
    let mut model = Model { keep: 2, ..Model::default() };
    // Each odd kind of content is another page that cannot be compressed.
    let written = (0..pages).map(|page| (0, page, 2 * page + 1)).collect();
    model.commit(&mut engine, &Change { blocks: vec![("ram", pages)], pages: written }).unwrap();
    engine.settle().unwrap();
    disk
}

/// The time until all pages are read must not be the latency of the server times the pages.
#[test]
fn pages_are_read_with_few_requests_of_which_several_are_in_flight() {
    // Twice what the cache holds.
    const PAGES: u64 = 16_000;
    const SEGMENT_BYTES: u64 = 8 << 20;
    let disk = with_full_checkpoint(PAGES, SEGMENT_BYTES);
    let opened = image(&disk, None).unwrap();
    let before = disk.count_reads(|reads| reads.latency = Duration::from_millis(2));
    let read = read_like_a_pager(&opened, |page, found| assert!(*found == content(2 * page.0 + 1), "{page}"));
    assert_eq!(read, PAGES);
    let after = disk.count_reads(|_| ());
    let (stored, requests) = (PAGES * PAGE_SIZE as u64, (after.count - before.count) as u64);
    // In each object some requests are smaller: at its end, and where a directory was read before.
    let smaller = 4 * stored.div_ceil(SEGMENT_BYTES);
    assert!(requests <= stored.div_ceil(CHUNKS_PER_GET * CHUNK_BYTES) + smaller, "{requests} GETs");
    // Opening an object is a GET of its own.
    assert!((3..=MAX_IN_FLIGHT + 1).contains(&after.most_in_flight), "{after:?}");

    // Pages that are not near each other, without an announcement.
    let spread: Vec<_> = (0..PAGES).step_by(500).map(|page| (BlockId(0), PageNo(page))).collect();
    let opened = image(&disk, None).unwrap();
    disk.count_reads(|reads| reads.most_in_flight = 0);
    opened.read_stored(&spread).unwrap();
    let after = disk.count_reads(|_| ());
    assert!((3..=MAX_IN_FLIGHT).contains(&after.most_in_flight), "{after:?}");
}

#[test]
fn a_chunk_that_could_not_be_read_ahead_is_read_when_it_is_needed() {
    let disk = MemoryObjects::default();
    let shared = disk.shared();
    let content: Vec<u8> = (0..4_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let file = shared.disk.create("segments/x").unwrap();
    file.write_at(&content, 0).unwrap();
    file.sync().unwrap();
    let file = shared.disk.open("segments/x").unwrap();
    let mut found = vec![0; CHUNK_BYTES as usize];
    // Opening has read the first chunk. The GETs of the second one and of those after it fail.
    disk.count_reads(|reads| reads.failing = 3);
    let mut failed = 0;
    for chunk in 0..4_000_000 / CHUNK_BYTES {
        let offset = chunk * CHUNK_BYTES;
        while let Err(e) = file.read_at(&mut found, offset) {
            assert_eq!(e.kind(), io::ErrorKind::TimedOut);
            failed += 1;
            assert!(failed <= 3, "an error is kept");
        }
        assert!(found == content[offset as usize..][..found.len()], "chunk {chunk}");
    }
    assert!(failed > 0);
}

#[test]
fn an_answer_of_another_length_is_an_error_and_is_not_kept() {
    let disk = MemoryObjects::default();
    let shared = disk.shared();
    let content: Vec<u8> = (0..4 * CHUNK_BYTES).map(|n| (n / 1000) as u8).collect();
    let file = shared.disk.create("segments/x").unwrap();
    file.write_at(&content, 0).unwrap();
    file.sync().unwrap();
    for change in [|reads: &mut Reads| reads.short = 1, |reads: &mut Reads| reads.long = 1] {
        disk.count_reads(change);
        assert_eq!(shared.disk.open("segments/x").unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        let file = shared.disk.open("segments/x").unwrap();
        disk.count_reads(change);
        let mut found = vec![0; 1000];
        let at = 2 * CHUNK_BYTES;
        assert_eq!(file.read_at(&mut found, at).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(file.read_at(&mut found, at).unwrap(), 1000);
        assert!(found == content[at as usize..at as usize + 1000]);
    }
}

/// Threads that only inspect a GET must not keep the one that waits for it from being woken.
#[test]
fn a_reader_is_woken_although_others_inspect_its_get() {
    const READERS: u64 = 4;
    let disk = MemoryObjects::default();
    let shared = disk.shared();
    let file = shared.disk.create("segments/x").unwrap();
    file.write_at(&vec![7; 16 * CHUNK_BYTES as usize], 0).unwrap();
    file.sync().unwrap();
    disk.count_reads(|reads| reads.latency = Duration::from_millis(5));
    let file = shared.disk.open("segments/x").unwrap();
    std::thread::scope(|scope| {
        for reader in 0..READERS {
            let file = &file;
            scope.spawn(move || {
                for chunk in (reader..16).chain(0..reader) {
                    let range = chunk * CHUNK_BYTES..(chunk + 1) * CHUNK_BYTES;
                    for _ in 0..50 {
                        file.start_read(range.clone());
                    }
                    let mut found = [0; 10];
                    assert_eq!(file.read_at(&mut found, range.start + reader).unwrap(), 10);
                    assert_eq!(found, [7; 10]);
                }
            });
        }
    });
}

/// A pager serves other faults while a page is on its way.
#[test]
fn pages_are_read_without_waiting_and_one_that_a_guest_needs_is_first() {
    const PAGES: u64 = 4000;
    // One segment, so that a page needs no other GET than its own once this is open.
    let disk = with_full_checkpoint(PAGES, 64 << 20);
    let opened = image(&disk, None).unwrap();
    let is_ready = |page: u64, need: Need| {
        let mut found = [0; PAGE_SIZE];
        let is_ready = opened.read_page_if_ready((BlockId(0), PageNo(page)), &mut found, need).unwrap();
        assert!(!is_ready || found == content(2 * page + 1), "{page}");
        is_ready
    };
    let wait_until_ready = |page: u64, need: Need| {
        wait_for(&format!("page {page}"), DEADLINE, || is_ready(page, need).then_some(()));
    };
    // Neither the page nor the segment that has to be opened is waited for.
    disk.hold_reads();
    assert!(!is_ready(0, Need::Guest));
    disk.stop_holding_reads();
    wait_until_ready(0, Need::Guest);

    disk.hold_reads();
    let order: Vec<_> = (0..PAGES).map(|page| (BlockId(0), PageNo(page))).collect();
    let started = opened.start_reads(&order).unwrap();
    // More than is in flight, and bounded.
    assert!((MAX_IN_FLIGHT * 256..PAGES as usize).contains(&started), "{started}");
    let wait_in_flight = |count: usize| {
        wait_for("GETs", DEADLINE, || (disk.count_reads(|_| ()).in_flight >= count).then_some(()));
    };
    wait_in_flight(MAX_UNNEEDED_IN_FLIGHT);
    assert!(!is_ready(3900, Need::Guest));
    wait_in_flight(MAX_UNNEEDED_IN_FLIGHT + 1);
    // Others are queued, but only those that were in flight before end earlier. The page may be in two chunks.
    disk.let_reads_end(MAX_UNNEEDED_IN_FLIGHT + 2);
    wait_until_ready(3900, Need::Guest);
    disk.stop_holding_reads();
    for page in (0..PAGES).step_by(7) {
        wait_until_ready(page, Need::Background);
    }
    let reads = disk.count_reads(|_| ());
    assert!(reads.most_in_flight <= MAX_IN_FLIGHT, "{reads:?}");
}

#[test]
fn a_failure_is_reported_once_and_the_next_attempt_is_another_get() {
    let disk = with_full_checkpoint(4000, 8 << 20);
    let opened = image(&disk, None).unwrap();
    disk.count_reads(|reads| reads.failing = 1);
    let mut failures = 0;
    let mut found = [0; PAGE_SIZE];
    wait_for("the page", DEADLINE, || {
        match opened.read_page_if_ready((BlockId(0), PageNo(2000)), &mut found, Need::Guest) {
            Ok(is_ready) => return is_ready.then_some(()),
            Err(_) => failures += 1,
        }
        None
    });
    assert!(failures == 1 && found == content(4001), "{failures}");
}
