//! A store while the host's real-time clock jumps by a year.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use rekindle_pages::{BlockId, PAGE_SIZE, PageNo};
use rekindle_store::types::{Block, Guest, Owner, Vm, now_us};
use rekindle_store::{Image, Options, ReadOptions, StoreError, StoreUrl, Writer, admin};
use rekindle_testing::shifted_clock::{self, ShiftedClock, YEAR_S};
use serde_json::json;
use std::env;
use std::process::Command;
use uuid::Uuid;

/// Set in the process that runs the tests with a clock that jumps.
const STARTED: &str = "REKINDLE_TEST_CLOCKS";
const PAGES: u64 = 40;

/// Runs the test `name` again in a process of its own, whose clock jumps. Returns whether this is that process.
fn with_own_clock(name: &str) -> bool {
    if env::var_os(STARTED).is_some() {
        return true;
    }
    let clock = ShiftedClock::new();
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).envs(clock.environment()).env(STARTED, "1");
    assert!(command.status().unwrap().success());
    false
}

/// Lets the clock jump to this offset. Returns the time then.
fn jump_to(offset_s: i64) -> u64 {
    shifted_clock::set_own(offset_s);
    now_us()
}

fn vm() -> Vm {
    Vm { uuid: Uuid::from_u128(7), name: "web".into() }
}

/// Commits a checkpoint whose pages all have this content.
fn commit(writer: &mut Writer, byte: u8) -> rekindle_store::Result<u64> {
    let bytes = PAGES * PAGE_SIZE as u64;
    let mut checkpoint = writer.begin(&[Block { id: "pc.ram".into(), used: bytes, max: bytes, page_size: 4096 }])?;
    let content = [byte; PAGE_SIZE];
    checkpoint.pages(BlockId(0), (0..PAGES).map(|page| (PageNo(page), &content)))?;
    checkpoint.commit(&json!({"name": "web"}), &json!({}), &[byte; 5000]).map(|committed| committed.number)
}

#[track_caller]
fn assert_newest(url: &StoreUrl, number: u64, byte: u8) {
    let image = Image::open(url, &ReadOptions::default()).unwrap();
    assert_eq!(image.info().number, number);
    let mut count = 0;
    image
        .read_pages(BlockId(0), PageNo(0)..PageNo(PAGES), |_, content| {
            assert_eq!(*content, [byte; PAGE_SIZE]);
            count += 1;
        })
        .unwrap();
    assert_eq!(count, PAGES);
}

#[test]
fn no_jump_of_the_clock_changes_the_owner_of_a_store_or_the_checkpoints_that_it_keeps() {
    if !with_own_clock("no_jump_of_the_clock_changes_the_owner_of_a_store_or_the_checkpoints_that_it_keeps") {
        return;
    }
    for (before, after) in [(0, YEAR_S), (0, -YEAR_S), (YEAR_S, -YEAR_S), (-YEAR_S, YEAR_S)] {
        let row = format!("from {before} s to {after} s");
        let began_at = jump_to(before);
        let directory = tempfile::tempdir().unwrap();
        let url = StoreUrl::Directory(directory.path().join("web"));
        let options = |operation: &str| Options { keep: 2, create: true, ..Options::new(vm(), operation) };
        let mut writer = Writer::open(&url, &options("protect web")).unwrap();
        assert_eq!((1..=3).map(|n| commit(&mut writer, n).unwrap()).last(), Some(3), "{row}");
        let jumped_at = jump_to(after);
        assert_eq!(jumped_at > began_at, after > before, "{row}");
        assert_eq!(commit(&mut writer, 4).unwrap(), 4, "{row}");
        writer.settle().unwrap();
        // The newest are kept, by number.
        let kept = || admin::listing(&url, None).unwrap().checkpoints;
        assert_eq!(kept().iter().map(|listed| listed.number).collect::<Vec<_>>(), [3, 4], "{row}");
        assert!(kept()[1].info.as_ref().unwrap().time_us >= jumped_at, "{row}");
        // The next owner is a host whose clock is the one before the jump; then one with the other clock again.
        jump_to(before);
        let restore = Owner::here("restore web").with(Guest::Restored);
        let fenced = admin::fence(&url, &vm(), &restore, None, None).unwrap();
        assert_eq!((fenced.epoch, fenced.newest), (2, 4), "{row}");
        jump_to(after);
        let e = commit(&mut writer, 5).unwrap_err();
        assert!(matches!(&e, StoreError::Superseded { epoch: 2, .. }), "{row}: {e}");
        assert_eq!(e.guest_is_over(1).map(|owner| owner.run), Some(2), "{row}");
        let mut next = Writer::open(&url, &options("protect web")).unwrap();
        assert_eq!((next.epoch(), commit(&mut next, 6).unwrap()), (3, 5), "{row}");
        jump_to(before);
        next.settle().unwrap();
        drop(next);
        admin::compact(&url, None).unwrap();
        assert_newest(&url, 5, 6);
        assert!(admin::verified(&url, None, &mut |_, _| {}).unwrap().is_good(), "{row}");
    }
}
