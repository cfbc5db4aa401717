//! Scans of this process's own memory.

use super::*;
use crate::testing::{Area, Kind};
use crate::userfault::{Features, Mode, Userfault};
use rekindle_testing::hugepages::HugePages;

fn pages(area: &Area, runs: &[Range<u64>]) -> Vec<Range<u64>> {
    let size = area.address(1) - area.address(0);
    runs.iter().map(|run| (run.start - area.address(0)) / size..(run.end - area.address(0)) / size).collect()
}

fn armed(area: &Area) -> Userfault {
    let features = Features::WP_ASYNC | Features::WP_UNPOPULATED | Features::WP_HUGETLBFS_SHMEM;
    let userfault = Userfault::own(features).unwrap();
    userfault.register(area.range(), Mode::WRITE_PROTECT).unwrap();
    userfault.write_protect(area.range(), true).unwrap();
    userfault
}

#[test]
fn written_pages_are_found_again_and_again_until_they_are_rearmed() {
    let huge = HugePages::add(16);
    for kind in [Kind::Private, Kind::Shared, Kind::Huge] {
        let Some(area) = Area::try_new(kind, 16) else {
            eprintln!("no huge pages: not run for them ({})", huge.is_ok());
            continue;
        };
        area.set(0, 1);
        area.set(7, 1);
        let userfault = armed(&area);
        let mut scanner = Scanner::open(Process::current().unwrap()).unwrap();
        let mut written = |rearm| pages(&area, &scanner.written(area.range(), rearm).unwrap());
        assert!(written(Rearm::No).is_empty(), "{kind:?}");
        for page in [3, 7, 8] {
            area.set(page, 2);
        }
        assert_eq!(written(Rearm::No), [3..4, 7..9], "{kind:?}");
        assert_eq!(written(Rearm::Yes), [3..4, 7..9], "{kind:?}");
        assert!(written(Rearm::No).is_empty(), "{kind:?}");
        area.set(7, 3);
        area.set(12, 3);
        assert_eq!(written(Rearm::Yes), [7..8, 12..13], "{kind:?}");
        userfault.unregister(area.range()).unwrap();
        let unprotected = scanner.written(area.range(), Rearm::No);
        assert!(matches!(unprotected, Err(ScanError::Unprotected { .. })), "{kind:?}");
    }
}

#[test]
fn more_runs_than_the_buffer_holds() {
    let area = Area::new(Kind::Shared, 4 * RUNS_PER_CALL + 1);
    let _userfault = armed(&area);
    for page in (0..4 * RUNS_PER_CALL).step_by(2) {
        area.set(page, 1);
    }
    let mut scanner = Scanner::open(Process::current().unwrap()).unwrap();
    for rearm in [Rearm::No, Rearm::Yes] {
        let written = pages(&area, &scanner.written(area.range(), rearm).unwrap());
        assert_eq!(written.len(), 2 * RUNS_PER_CALL);
        assert!(written.iter().zip((0..).step_by(2)).all(|(run, page)| *run == (page..page + 1)));
    }
    assert!(scanner.written(area.range(), Rearm::Yes).unwrap().is_empty());
}

#[test]
fn what_is_there_and_what_is_not() {
    let area = Area::new(Kind::Private, 1024);
    for page in [1, 2, 700] {
        area.set(page, 1);
    }
    let mut scanner = Scanner::open(Process::current().unwrap()).unwrap();
    let there = scanner.matching(area.range(), Query::all(Categories::PRESENT)).unwrap();
    assert_eq!(pages(&area, &there), [1..3, 700..701]);
    let query = Query { none: Categories::ZERO, ..Query::all(Categories::PRESENT) };
    assert_eq!(scanner.first(area.range(), query).unwrap(), Some(area.address(1)));
    assert_eq!(scanner.first(area.address(3)..area.address(700), query).unwrap(), None);
    let none = Categories::PRESENT | Categories::SWAPPED;
    let query = Query { none, ..Query::all(Categories::empty()) };
    let absent = scanner.matching(area.range(), query).unwrap();
    assert_eq!(pages(&area, &absent), [0..1, 3..700, 701..1024]);
}

#[test]
fn a_process_without_a_page_map_is_named() {
    let e = Scanner::open(Process { pid: 0x7fff_ffff, started: 0 }).unwrap_err();
    assert!(e.to_string().contains("2147483647"), "{e}");
}

#[test]
fn whether_the_kernel_reports_memory_given_back_is_found_by_trying() {
    let area = Area::new(Kind::Private, 2048);
    (0..2048).for_each(|page| area.set(page, 1));
    let _userfault = armed(&area);
    let first = (area.address(0).next_multiple_of(2 << 20) - area.address(0)) as usize >> 12;
    area.give_back_some(first, 512);
    let mut scanner = Scanner::open(Process::current().unwrap()).unwrap();
    let reported = !scanner.written(area.range(), Rearm::No).unwrap().is_empty();
    assert_eq!(kernel_reports_given_back(), reported);
    // A query for absent pages finds them with any kernel.
    let none = Categories::PRESENT | Categories::SWAPPED;
    let query = Query { none, ..Query::all(Categories::empty()) };
    let absent = scanner.matching(area.range(), query).unwrap();
    assert_eq!(pages(&area, &absent), vec![first as u64..first as u64 + 512; 1]);
}

/// One descriptor for missing pages and for writes: the pager relies on it when it records writes while it fills.
#[test]
fn a_page_that_comes_protected_counts_as_written_from_its_first_write_on_and_a_missing_one_does_not() {
    let huge = HugePages::add(8);
    for kind in [Kind::Private, Kind::Shared, Kind::Huge] {
        let Some(area) = Area::try_new(kind, 8) else {
            eprintln!("no huge pages: not run for them ({})", huge.is_ok());
            continue;
        };
        let size = (area.address(1) - area.address(0)) as usize;
        area.set(7, 1);
        let features = Features::WP_ASYNC
            | Features::WP_UNPOPULATED
            | Features::WP_HUGETLBFS_SHMEM
            | Features::MISSING_SHMEM
            | Features::MISSING_HUGETLBFS
            | Features::EVENT_REMOVE;
        let userfault = Userfault::own(features).unwrap();
        userfault.register(area.range(), Mode::MISSING | Mode::WRITE_PROTECT).unwrap();
        let mut scanner = Scanner::open(Process::current().unwrap()).unwrap();
        let mut written = |rearm| pages(&area, &scanner.written_where_present(area.range(), rearm).unwrap());
        // A page that was present before the registration counts as written: it was never protected.
        assert_eq!(written(Rearm::Yes), vec![7..8; 1], "{kind:?}");
        let content = vec![5; size];
        for page in [0, 1, 2] {
            userfault.copy_protected(area.address(page), &content, true).unwrap();
        }
        userfault.copy(area.address(3), &content, true).unwrap();
        assert_eq!(written(Rearm::Yes), vec![3..4; 1], "{kind:?}: it came unprotected");
        assert!(written(Rearm::Yes).is_empty(), "{kind:?}: neither missing pages nor protected ones");
        assert_eq!((area.get(0), area.get(2)), (5, 5));
        assert!(written(Rearm::No).is_empty(), "{kind:?}: reading is not writing");
        area.set(1, 6);
        assert_eq!(written(Rearm::Yes), vec![1..2; 1], "{kind:?}");
        // Protection of a missing page does not prevent filling it.
        userfault.write_protect(area.address(4)..area.address(6), true).unwrap();
        userfault.copy_protected(area.address(4), &content, true).unwrap();
        userfault.copy(area.address(5), &content, true).unwrap();
        assert_eq!(written(Rearm::Yes), vec![5..6; 1], "{kind:?}");
        area.set(4, 7);
        assert_eq!(written(Rearm::No), vec![4..5; 1], "{kind:?}");
        assert_eq!((area.get(4), area.get(5)), (7, 5));
        // A range that is no longer registered is reported as untracked.
        userfault.unregister(area.address(5)..area.address(7)).unwrap();
        assert_eq!(pages(&area, &scanner.untracked(area.range()).unwrap()), vec![5..7; 1], "{kind:?}");
        assert!(matches!(scanner.written_where_present(area.range(), Rearm::No), Err(ScanError::Unprotected { .. })));
    }
}

/// The kernel unmaps pages of a shared file when it needs memory; the test uses `madvise` for that.
#[test]
fn an_unmapped_page_of_a_file_keeps_its_marker_if_it_was_protected_and_has_none_if_it_was_written() {
    let area = Area::new(Kind::Shared, 4);
    let features =
        Features::WP_ASYNC | Features::WP_UNPOPULATED | Features::WP_HUGETLBFS_SHMEM | Features::MISSING_SHMEM;
    let userfault = Userfault::own(features).unwrap();
    userfault.register(area.range(), Mode::MISSING | Mode::WRITE_PROTECT).unwrap();
    for page in [0, 1] {
        userfault.copy_protected(area.address(page), &[5; 4096], true).unwrap();
    }
    area.set(1, 6);
    area.give_back_some(0, 2);
    let mut scanner = Scanner::open(Process::current().unwrap()).unwrap();
    assert!(scanner.written_where_present(area.range(), Rearm::No).unwrap().is_empty());
    // Page 1 was written, pages 2 and 3 are missing: only the file shows the difference.
    let absent = Query { none: Categories::PRESENT | Categories::SWAPPED, ..Query::all(Categories::empty()) };
    assert_eq!(pages(&area, &scanner.matching(area.range(), absent).unwrap()), vec![1..4; 1]);
    // After protection while unmapped, the page is tracked again.
    userfault.write_protect(area.address(1)..area.address(2), true).unwrap();
    assert_eq!(pages(&area, &scanner.matching(area.range(), absent).unwrap()), vec![2..4; 1]);
    assert_eq!((area.get(0), area.get(1)), (5, 6));
    assert!(scanner.written_where_present(area.range(), Rearm::No).unwrap().is_empty());
    area.set(1, 7);
    assert_eq!(pages(&area, &scanner.written_where_present(area.range(), Rearm::No).unwrap()), vec![1..2; 1]);
}
