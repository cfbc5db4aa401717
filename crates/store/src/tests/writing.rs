//! Pages that the caller passes one by one, and pages that the writer reads itself, give the same store.

use super::disk::TestDisk;
use super::model::{block, content, image, vm};
use crate::error::StoreError;
use crate::writer::{Options, Writer};
use proptest::prelude::*;
use rekindle_pages::{BlockId, PAGE_SIZE, PageNo, PageRuns};
use rekindle_testing::crash_disk::CrashDisk;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;

const PAGES: u64 = 2500;
const RAM: BlockId = BlockId(0);

fn writer(disk: &impl TestDisk) -> Writer {
    Writer::on_disk(disk.shared(), &Options { create: true, ..Options::new(vm(), "test") }).unwrap()
}

fn numbers(runs: &PageRuns) -> impl Iterator<Item = u64> + '_ {
    runs.numbers().map(|page| page.0)
}

/// Returns the runs of pages, given the first page and the end of each.
fn runs(pages: &[(u64, u64)]) -> PageRuns {
    pages.iter().map(|&(first, end)| PageNo(first).offset()..PageNo(end).offset()).collect()
}

fn runs_of(lengths: &[(u64, u64)]) -> PageRuns {
    let mut at = 0;
    let mut pages = Vec::new();
    for (gap, length) in lengths {
        pages.push(((at + gap).min(PAGES), (at + gap + length).min(PAGES)));
        at = (at + gap + length).min(PAGES);
    }
    runs(&pages)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn pages_that_are_read_by_runs_are_those_that_were_there(
        rounds in proptest::collection::vec((proptest::collection::vec((0u64..200, 0u64..900), 1..6), 0u64..5, any::<bool>()), 1..4),
    ) {
        let disk = CrashDisk::default();
        let mut writer = writer(&disk);
        let mut expected = BTreeMap::new();
        for (lengths, salt, by_reading) in rounds {
            let runs = runs_of(&lengths);
            let kind = |page: u64| (page * 7 + salt) % 5;
            let mut checkpoint = writer.begin(&[block("ram", PAGES)]).unwrap();
            if by_reading {
                let done: Result<(), StoreError> = checkpoint.read(RAM, &runs, |runs, room| {
                    assert_eq!(numbers(runs).count() * PAGE_SIZE, room.len());
                    for (page, place) in numbers(runs).zip(room.as_chunks_mut::<PAGE_SIZE>().0) {
                        *place = content(kind(page));
                    }
                    Ok(())
                });
                done.unwrap();
            } else {
                let pages: Vec<_> = numbers(&runs).map(|page| (page, content(kind(page)))).collect();
                checkpoint.pages(RAM, pages.iter().map(|(page, content)| (PageNo(*page), content))).unwrap();
            }
            let committed = checkpoint.commit(&Value::Null, &Value::Null, &[]).unwrap();
            let sent = numbers(&runs).count() as u64;
            let of = |page| expected.get(&page).copied().unwrap_or(0);
            let unchanged = numbers(&runs).filter(|page| of(*page) == kind(*page)).count() as u64;
            prop_assert_eq!(committed.pages.unchanged, unchanged);
            prop_assert_eq!(committed.pages.stored + committed.pages.zero + unchanged, sent);
            expected.extend(numbers(&runs).map(|page| (page, kind(page))));
        }
        drop(writer);
        let image = image(&disk, None).unwrap();
        let mut page = [1; PAGE_SIZE];
        for number in 0..PAGES {
            image.read_page((RAM, PageNo(number)), &mut page).unwrap();
            prop_assert!(page == content(expected.get(&number).copied().unwrap_or(0)), "page {}", number);
        }
    }
}

#[test]
fn what_cannot_be_read_is_not_stored_and_the_rest_is() {
    let disk = CrashDisk::default();
    let mut writer = writer(&disk);
    let mut checkpoint = writer.begin(&[block("ram", 8)]).unwrap();
    let fill = |runs: &PageRuns, room: &mut [u8]| {
        if numbers(runs).any(|page| page == 4) {
            let source = io::Error::other("no such memory");
            return Err(StoreError::Io { store: "s".into(), file: "f".into(), doing: "reading", source });
        }
        room.fill(9);
        Ok(())
    };
    checkpoint.read(RAM, &runs(&[(1, 2), (3, 4)]), fill).unwrap();
    assert!(checkpoint.read(RAM, &runs(&[(4, 5), (5, 5)]), fill).is_err());
    assert!(matches!(
        checkpoint.read(RAM, &runs(&[(7, 7), (7, 9)]), fill),
        Err(StoreError::NoSuchPage { page: 8, .. })
    ));
    checkpoint.read(RAM, &runs(&[(7, 8), (8, 8)]), fill).unwrap();
    let committed = checkpoint.commit(&Value::Null, &Value::Null, &[]).unwrap();
    assert_eq!((committed.pages.stored, committed.pages.zero), (3, 0));
    drop(writer);
    let image = image(&disk, None).unwrap();
    let mut page = [1; PAGE_SIZE];
    for (number, byte) in [(0, 0), (1, 9), (3, 9), (4, 0), (7, 9)] {
        image.read_page((RAM, PageNo(number)), &mut page).unwrap();
        assert_eq!(page, [byte; PAGE_SIZE], "page {number}");
    }
}
