//! A store in a real object store: Ceph's S3 gateway.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use rekindle_pages::{BlockId, PAGE_SIZE, PageNo};
use rekindle_store::types::{Block, OnlyIf, Owner, Vm};
use rekindle_store::{Image, Options, ReadOptions, StoreError, StoreUrl, Writer, admin};
use rekindle_testing::object_store::{BUCKET, ObjectStoreServer};
use serde_json::json;
use std::process::Command;
use std::sync::Barrier;
use std::{env, thread};
use uuid::Uuid;

/// Set in the process that runs the tests with the variables of the server.
const STARTED: &str = "REKINDLE_TEST_OBJECT_STORE";
const RACES: u64 = 20;
const RACERS: usize = 4;

/// Runs the test `name` again in a process of its own, whose environment has the variables of an object store. Returns
/// whether this is that process.
fn in_environment(name: &str) -> bool {
    if env::var_os(STARTED).is_some() {
        return true;
    }
    let server = ObjectStoreServer::start();
    let mut command = Command::new(env::current_exe().unwrap());
    let status = command.args(["--exact", name, "--nocapture"]).envs(server.environment()).env(STARTED, "1").status();
    assert!(status.unwrap().success());
    false
}

fn vm() -> Vm {
    Vm { uuid: Uuid::from_u128(7), name: "web".into() }
}

fn url(name: &str) -> StoreUrl {
    format!("s3://{BUCKET}/{name}").parse().unwrap()
}

fn blocks() -> [Block; 1] {
    const PAGES: u64 = 2000;
    let bytes = PAGES * PAGE_SIZE as u64;
    [Block { id: "pc.ram".into(), used: bytes, max: bytes, page_size: 4096 }]
}

/// Commits a checkpoint with `count` pages of this content.
fn commit(writer: &mut Writer, count: u64, byte: u8) -> rekindle_store::Result<u64> {
    let mut checkpoint = writer.begin(&blocks())?;
    let content = [byte; PAGE_SIZE];
    checkpoint.pages(BlockId(0), (0..count).map(|page| (PageNo(page), &content)))?;
    checkpoint.commit(&json!({"name": "web"}), &json!({}), &[byte; 5000]).map(|committed| committed.number)
}

#[test]
fn checkpoints_are_written_read_verified_and_compacted() {
    if !in_environment("checkpoints_are_written_read_verified_and_compacted") {
        return;
    }
    let url = url("site-1/web");
    assert!(matches!(admin::listing(&url, None), Err(StoreError::NotAStore { .. })));
    admin::init(&url, None).unwrap();
    assert!(matches!(admin::init(&url, None), Err(StoreError::Exists { vm: None, .. })));
    let mut writer = Writer::open(&url, &Options { keep: 2, ..Options::new(vm(), "protect web") }).unwrap();
    for round in 1..=80u8 {
        assert_eq!(commit(&mut writer, 1 + u64::from(round) * 20 % 2000, round).unwrap(), u64::from(round));
    }
    let image = Image::open(&url, &ReadOptions::default()).unwrap();
    let (mut page, mut count) = ([0; PAGE_SIZE], 0);
    image.read_page((BlockId(0), PageNo(100)), &mut page).unwrap();
    assert_eq!(page, [80; PAGE_SIZE]);
    image
        .read_pages(BlockId(0), PageNo(0)..PageNo(1601), |_, content| {
            assert_eq!(*content, [80; PAGE_SIZE]);
            count += 1;
        })
        .unwrap();
    assert_eq!((count, image.devices().unwrap()), (1601, vec![80; 5000]));
    writer.settle().unwrap();
    drop(writer);
    admin::compact(&url, None).unwrap();
    let verified = admin::verified(&url, None, &mut |_, _| {}).unwrap();
    assert!(verified.is_good() && verified.checkpoints == 2, "{verified:?}");
    let listing = admin::listing(&url, None).unwrap();
    assert_eq!(listing.checkpoints.iter().map(|listed| listed.number).collect::<Vec<_>>(), [79, 80]);
    assert_eq!(listing.epoch, 2);
    // A bucket that does not exist.
    let missing: StoreUrl = "s3://no-such-bucket/web".parse().unwrap();
    let e = admin::init(&missing, None).unwrap_err();
    assert!(std::error::Error::source(&e).unwrap().to_string().contains("bucket does not exist"), "{e}");
}

#[test]
fn of_several_hosts_that_race_for_a_store_one_wins() {
    if !in_environment("of_several_hosts_that_race_for_a_store_one_wins") {
        return;
    }
    let url = url("web");
    drop(Writer::open(&url, &Options { create: true, ..Options::new(vm(), "protect web") }).unwrap());
    for race in 0..RACES {
        let epoch = admin::listing(&url, None).unwrap().epoch;
        let barrier = Barrier::new(RACERS);
        let claim = || {
            let owner = Owner::here("restore web");
            barrier.wait();
            admin::fence(&url, &vm(), &owner, Some(OnlyIf::Epoch(epoch)), None)
        };
        let results: Vec<_> = thread::scope(|scope| {
            let racers: Vec<_> = (0..RACERS).map(|_| scope.spawn(claim)).collect();
            racers.into_iter().map(|racer| racer.join().unwrap()).collect()
        });
        let (won, lost): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
        assert_eq!(won.len(), 1, "race {race}: {won:?}");
        assert!(lost.iter().all(|lost| matches!(lost, Err(StoreError::Superseded { .. }))), "race {race}: {lost:?}");
    }
    // An owner commits while others claim: each commit that was acknowledged is there, and none after a claim.
    for race in 0..RACES {
        let mut writer = Writer::open(&url, &Options::new(vm(), "protect web")).unwrap();
        let barrier = Barrier::new(2);
        let (committed, fenced) = thread::scope(|scope| {
            let committing = scope.spawn(|| {
                barrier.wait();
                commit(&mut writer, 5, race as u8)
            });
            barrier.wait();
            let fenced = admin::fence(&url, &vm(), &Owner::here("restore web"), None, None).unwrap();
            (committing.join().unwrap(), fenced)
        });
        match committed {
            Ok(number) => assert_eq!(fenced.newest, number, "race {race}"),
            Err(e) => assert!(matches!(e, StoreError::Superseded { .. }), "race {race}: {e}"),
        }
        assert!(matches!(commit(&mut writer, 1, 1), Err(StoreError::Superseded { .. })), "race {race}");
        let newest = admin::listing(&url, None).unwrap().checkpoints.last().map_or(0, |listed| listed.number);
        assert_eq!(newest, fenced.newest, "race {race}");
    }
}
