//! A store in a real object store: Ceph's S3 gateway.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use futures_util::StreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::{ObjectStore, ObjectStoreExt};
use rekindle_pages::{BlockId, PAGE_SIZE, PageNo};
use rekindle_qemu::stream::HEADER;
use rekindle_store::export::export;
use rekindle_store::listing::Listing;
use rekindle_store::types::{Block, OnlyIf, Owner, Vm};
use rekindle_store::{Image, Options, ReadOptions, StoreError, StoreUrl, Writer, admin};
use rekindle_testing::object_store::{BUCKET, ObjectStoreServer};
use serde_json::json;
use std::path::Path;
use std::process::Command;
use std::sync::Barrier;
use std::{env, fs, thread};
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

/// Returns a device state.
fn devices(byte: u8) -> Vec<u8> {
    [&HEADER[..], &[byte; 5000], &[0]].concat()
}

/// Commits a checkpoint with `count` pages of this content.
fn commit(writer: &mut Writer, count: u64, byte: u8) -> rekindle_store::Result<u64> {
    let mut checkpoint = writer.begin(&blocks())?;
    let content = [byte; PAGE_SIZE];
    checkpoint.pages(BlockId(0), (0..count).map(|page| (PageNo(page), &content)))?;
    checkpoint.commit(&json!({"name": "web"}), &json!({}), &devices(byte)).map(|committed| committed.number)
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
    assert_eq!((count, image.devices().unwrap()), (1601, devices(80)));
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

/// Copies the objects of a store to a directory, as a tool of the object store would.
fn copy_objects(name: &str, directory: &Path) {
    let client = AmazonS3Builder::from_env().with_bucket_name(BUCKET).with_allow_http(true).build().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut listed = client.list(Some(&name.into()));
        while let Some(object) = listed.next().await {
            let location = object.unwrap().location;
            let content = client.get(&location).await.unwrap().bytes().await.unwrap();
            let file = directory.join(location.as_ref().strip_prefix(name).unwrap().trim_start_matches('/'));
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, content).unwrap();
        }
    });
}

/// Asserts that two stores have the same checkpoints.
fn assert_same(one: &StoreUrl, other: &StoreUrl, checkpoints: u64) {
    // The rest of what is in the directory does not count.
    let listing = |url: &StoreUrl| Listing { disk: 0, ..admin::listing(url, None).unwrap() };
    assert_eq!(listing(one), listing(other));
    let verified = |url: &StoreUrl| admin::verified(url, None, &mut |_, _| {}).unwrap();
    assert!(verified(one).is_good());
    assert_eq!(verified(one), verified(other));
    for (at, lazy) in (1..=checkpoints).flat_map(|at| [(at, false), (at, true)]) {
        let open =
            |url: &StoreUrl| Image::open(url, &ReadOptions { at: Some(at), lazy, ..ReadOptions::default() }).unwrap();
        let (one, other) = (open(one), open(other));
        assert_eq!((one.vm(), one.info(), one.footer()), (other.vm(), other.info(), other.footer()));
        assert_eq!(one.definition().unwrap(), other.definition().unwrap());
        assert_eq!(one.metadata().unwrap(), other.metadata().unwrap());
        assert_eq!(one.devices().unwrap(), other.devices().unwrap());
        let hot = |image: &Image| image.hot().map(Result::unwrap).collect::<Vec<_>>();
        assert!(!hot(&one).is_empty());
        assert_eq!(hot(&one), hot(&other));
        let content = [at as u8; PAGE_SIZE];
        let given: Vec<_> = (0..2000).map(|page| ((BlockId(0), PageNo(page)), &content)).collect();
        let unlike = one.unlike(&given).unwrap();
        assert!(unlike.len() < given.len());
        assert_eq!(unlike, other.unlike(&given).unwrap());
        let stream = |image: &Image| {
            let mut stream = Vec::new();
            export(image, &mut stream, None, &mut |_, _| {}).unwrap();
            stream
        };
        assert!(stream(&one) == stream(&other), "checkpoint {at} is exported with other content");
    }
}

#[test]
fn a_directory_with_a_copy_of_the_objects_is_the_same_store() {
    if !in_environment("a_directory_with_a_copy_of_the_objects_is_the_same_store") {
        return;
    }
    const CHECKPOINTS: [(u64, u8); 4] = [(1500, 1), (700, 2), (2000, 3), (20, 4)];
    let (name, url) = ("site-1/web", url("site-1/web"));
    let options = Options { create: true, ..Options::new(vm(), "protect web") };
    let directory = tempfile::tempdir().unwrap();
    // Without a base index, and with one.
    for is_settled in [false, true] {
        let mut writer = Writer::open(&url, &options).unwrap();
        if is_settled {
            writer.settle().unwrap();
        } else {
            for (count, byte) in CHECKPOINTS {
                commit(&mut writer, count, byte).unwrap();
            }
        }
        // Its thread changes nothing any more.
        drop(writer);
        let path = directory.path().join(format!("settled-{is_settled}"));
        copy_objects(name, &path);
        let copy = StoreUrl::Directory(path);
        assert_same(&url, &copy, CHECKPOINTS.len() as u64);
        // The copy can be written.
        let mut writer = Writer::open(&copy, &options).unwrap();
        assert_eq!(commit(&mut writer, 30, 5).unwrap(), CHECKPOINTS.len() as u64 + 1);
    }
}
