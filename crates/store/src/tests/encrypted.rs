//! Encrypted stores: the tests of the store in general, what the files reveal, and what an attacker that can change them
//! achieves.

use super::disk::{Encrypted, TestDisk, keys};
use super::full::walk;
use super::memory_objects::MemoryObjects;
use super::model::{Change, Model, check_image, content, image, open, open_as, send, vm};
use super::{epoch, guest, history};
use crate::admin;
use crate::credentials::Credentials;
use crate::directory::StoreDirectory;
use crate::engine::{CheckpointState, Engine, EngineSettings};
use crate::error::{Result, StoreError};
use crate::fencing::fence;
use crate::format::entry::Section;
use crate::format::{checksum, names};
use crate::image::LocalImage;
use crate::keys::KeySource;
use crate::listing::list;
use crate::location::Storage;
use crate::log;
use crate::sealing::tests::sealed_pieces;
use crate::types::{Expected, Guest, KnownStore, OnlyIf, Owner, Vm};
use crate::url::StoreUrl;
use crate::verify::verify;
use proptest::prelude::*;
use rekindle_pages::{BlockId, PAGE_SIZE, PageNo};
use rekindle_testing::crash_disk::CrashDisk;
use rustix::io::Errno;
use uuid::Uuid;

type Disk = Encrypted<CrashDisk>;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn an_encrypted_store_holds_what_the_model_holds(
        keep in 1u32..4, steps in proptest::collection::vec(history::step(), 1..40),
    ) {
        history::run(&Disk::default(), keep, steps);
    }

    #[test]
    fn an_encrypted_store_of_objects_holds_what_the_model_holds(
        keep in 1u32..4, steps in proptest::collection::vec(history::step(), 1..40),
    ) {
        history::run(&Encrypted::<MemoryObjects>::default(), keep, steps);
    }

    #[test]
    fn only_the_host_that_began_it_last_commits_to_an_encrypted_store(steps in guest::steps()) {
        guest::play::<Disk>(steps);
    }
}

#[test]
fn an_encrypted_image_is_read_correctly_or_reported_as_removed() {
    history::read_lazily(&Disk::default());
}

#[test]
fn owners_of_an_encrypted_store_that_stall_spoil_nothing() {
    epoch::commit_after_another_claim::<Disk>();
    epoch::claim_conditionally::<Disk>();
    epoch::stall_in_a_commit::<Disk>();
    epoch::stall_in_a_compaction::<Disk>();
    epoch::create_concurrently::<Disk>();
}

/// Each key is used with each nonce once: [`crate::sealing::tests::note_nonce`] fails otherwise.
#[test]
fn no_nonce_is_used_again_after_commits_that_failed() {
    walk(Encrypted, Errno::NOSPC, true, 1);
    walk(Encrypted, Errno::IO, false, 1);
    walk(Encrypted, Errno::NOSPC, false, usize::MAX);
    assert!(sealed_pieces() > 10_000, "{}", sealed_pieces());
}

#[test]
fn a_segment_is_not_appended_to_after_an_abort() {
    let disk = Disk::default();
    let mut engine = open(&disk, 2).unwrap();
    let mut model = Model { keep: 2, ..Model::default() };
    for n in 0..4 {
        model.commit(&mut engine, &change(n)).unwrap();
        let started =
            engine.begin(model.after(&change(n)).blocks.into_iter().map(|(block, _)| block).collect()).unwrap();
        send(&mut engine, &[(started[0].number, 3, 7), (started[0].number, 4, 9)]);
        engine.abort();
        let segments = disk.names().iter().filter(|name| name.starts_with(names::SEGMENTS)).count();
        assert!(segments > n as usize, "{segments} after {n} aborts");
    }
    model.check(&disk);
}

/// Returns change `n` of a fixed history. Changes overlap in their pages, so that later ones replace records of earlier
/// ones. Some pages are zero (kind 0).
fn change(n: u64) -> Change {
    let pages = (0..14u64).map(|i| (0usize, (n * 5 + i * (1 + n % 3)) % 30, (n + i) % 9)).collect();
    Change { blocks: vec![("ram", 30), ("bios", 3)], pages }
}

/// Writes a store with checkpoints of three owners, moved pages and a base index.
fn fill(disk: &impl TestDisk) -> Model {
    let mut model = Model { keep: 3, ..Model::default() };
    for owner in 0..3 {
        let mut engine = open_as(disk, 3, &format!("owner {owner}"), None).unwrap();
        for n in 0..3 {
            model.commit(&mut engine, &change(3 * owner + n)).unwrap();
            engine.remove_obsolete_files();
        }
        if owner == 1 {
            engine.compact().unwrap();
            engine.settle().unwrap();
        }
        engine.remove_obsolete_files();
    }
    model.check(disk);
    model
}

/// Returns whether `needle` is anywhere in `hay`.
fn contains(hay: &[u8], needle: &[u8]) -> bool {
    hay.windows(needle.len()).any(|window| window == needle)
}

#[test]
fn no_file_of_the_store_contains_anything_of_the_guest() {
    const MARKER: &[u8] = b"geheimnis";
    let state = CheckpointState {
        definition: [b"definition ", MARKER].concat(),
        metadata: [b"metadata ", MARKER].concat(),
        devices: [b"devices ", MARKER].concat(),
    };
    // The digest of a page reveals whether its content is known.
    let found = |storage: Storage, disk: &CrashDisk| {
        let settings = EngineSettings { keep: 2, segment: 48 << 10, create: true };
        let mut engine = Engine::open(storage, &vm(), &Owner::here("geheimnis"), None, settings).unwrap();
        let digest = engine.opened().digester.digest(&content(13)).to_le_bytes();
        for n in 0..3 {
            let started = engine.begin(vec![super::model::block("ram", 30)]).unwrap();
            let pages: Vec<_> = (0..20).map(|page| (started[0].number, page, 13 + n * (page % 2))).collect();
            send(&mut engine, &pages);
            engine.commit(&state, 0).unwrap();
        }
        engine.compact().unwrap();
        engine.settle().unwrap();
        drop(engine);
        let files: Vec<Vec<u8>> = disk.names().iter().map(|name| disk.content(name).unwrap()).collect();
        let page = content(13);
        [MARKER, &page[100..116], &digest].map(|secret| files.iter().any(|file| contains(file, secret)))
    };
    let disk = CrashDisk::default();
    assert_eq!(found(Encrypted(disk.clone()).shared(), &disk), [false; 3]);
    // The search finds what is not encrypted.
    let disk = CrashDisk::default();
    assert_eq!(found(disk.shared(), &disk), [true; 3]);
}

fn with_keys(disk: &CrashDisk, values: &[u8]) -> Storage {
    Storage { keys: Some(keys(values)), ..disk.shared() }
}

fn commit_with(disk: &CrashDisk, values: &[u8], model: &mut Model, n: u64) -> Result<Engine> {
    let settings = EngineSettings { keep: 3, segment: 48 << 10, create: true };
    let mut engine = Engine::open(with_keys(disk, values), &vm(), &Owner::here("test"), None, settings)?;
    model.commit(&mut engine, &change(n))?;
    engine.remove_obsolete_files();
    Ok(engine)
}

#[test]
fn a_store_opens_with_its_keys_only_and_keys_can_be_rotated() {
    let disk = CrashDisk::default();
    let mut model = Model { keep: 3, ..Model::default() };
    commit_with(&disk, &[1], &mut model, 0).unwrap();
    let opened = |values: &[u8]| LocalImage::open(StoreDirectory::open(with_keys(&disk, values), None)?, None);
    // A wrong key; no key; an encrypted store to a process that wants to write without a key.
    let e = opened(&[2]).unwrap_err();
    assert!(matches!(e, StoreError::UnknownKey { .. }), "{e}");
    let e = image(&disk, None).unwrap_err();
    assert!(matches!(e, StoreError::Encrypted { .. }) && e.to_string().contains("--key-file"), "{e}");
    let e = open(&disk, 3).unwrap_err();
    assert!(matches!(e, StoreError::Encrypted { .. }), "{e}");
    // The new key is the first one. Both are needed to read, until nothing of the old one is left.
    commit_with(&disk, &[2, 1], &mut model, 1).unwrap();
    check_image(&opened(&[1, 2]).unwrap(), model.newest(), &model.checkpoints[&model.newest()]);
    for values in [&[1][..], &[2]] {
        let e = opened(values).unwrap_err();
        assert!(matches!(e, StoreError::UnknownKey { .. }), "{e}");
    }
    // A compaction copies old pages into segments of the new key.
    let mut engine = commit_with(&disk, &[3, 2, 1], &mut model, 2).unwrap();
    engine.compact().unwrap();
    for (number, expected) in &model.checkpoints {
        let store = StoreDirectory::open(with_keys(&disk, &[1, 2, 3]), None).unwrap();
        check_image(&LocalImage::open(store, Some(*number)).unwrap(), *number, expected);
    }
    let verified = verify(&StoreDirectory::open(with_keys(&disk, &[1, 2, 3]), None).unwrap(), |_, _| {}).unwrap();
    assert!(verified.is_good() && verified.warnings.is_empty() && verified.checkpoints == 3, "{verified:?}");
}

#[test]
fn a_store_without_encryption_is_rejected_if_a_key_was_given() {
    let disk = CrashDisk::default();
    fill(&disk);
    let e = StoreDirectory::open(with_keys(&disk, &[1]), None).unwrap_err();
    assert!(matches!(e, StoreError::NotEncrypted { .. }), "{e}");
    let e = commit_with(&disk, &[1], &mut Model::default(), 0).unwrap_err();
    assert!(matches!(e, StoreError::NotEncrypted { .. }), "{e}");
    // A store that no VM uses becomes encrypted when it is used with a key first.
    let disk = CrashDisk::default();
    StoreDirectory::init(&disk.shared().disk).unwrap();
    let boot = Owner::here("start web").with(Guest::Booted);
    fence(with_keys(&disk, &[1]), &vm(), &boot, None).unwrap();
    assert!(matches!(open(&disk, 3).unwrap_err(), StoreError::Encrypted { .. }));
    assert!(matches!(StoreDirectory::init(&disk.shared().disk), Err(StoreError::Exists { vm: Some(_), .. })));
}

#[test]
fn commands_get_the_keys_from_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let key = crate::keys::NewKey::generate().unwrap().line.to_string();
    let credentials = Credentials { keys: Some(KeySource::Command(format!("echo {key}"))), ..Credentials::default() };
    let url = StoreUrl::Directory(dir.path().join("store"));
    let options =
        crate::Options { credentials: Some(credentials.clone()), create: true, ..crate::Options::new(vm(), "test") };
    let mut writer = crate::Writer::open(&url, &options).unwrap();
    let mut checkpoint = writer.begin(&[super::model::block("ram", 4)]).unwrap();
    checkpoint.pages(BlockId(0), [(PageNo(1), &content(3))]).unwrap();
    checkpoint.commit(&serde_json::Value::Null, &serde_json::Value::Null, b"devices").unwrap();
    drop(writer);
    assert!(admin::verified(&url, Some(&credentials), &mut |_, _| {}).unwrap().is_good());
    assert!(matches!(admin::listing(&url, None), Err(StoreError::Encrypted { .. })));
    let missing = Credentials { keys: Some(KeySource::File(dir.path().join("none"))), ..Credentials::default() };
    assert!(matches!(admin::listing(&url, Some(&missing)), Err(StoreError::Keys(_))));
}

/// Returns what is known of a store now.
fn known_store(disk: &impl TestDisk) -> KnownStore {
    let store = StoreDirectory::open(disk.shared(), None).unwrap();
    let tail = log::tail(&store).unwrap();
    let claim = log::read_claim(&store, tail.claim).unwrap();
    KnownStore::of(&store, &claim, tail.newest_state.and_then(|state| state.manifest.newest()))
}

fn expected(known: KnownStore) -> Expected {
    Expected { known: Some(known), ..Expected::default() }
}

fn check_known(disk: &impl TestDisk, known: KnownStore) -> Result<()> {
    let store = StoreDirectory::open(disk.shared(), None)?;
    log::check_expected(&store, &log::tail(&store)?, &expected(known))
}

#[test]
fn a_store_that_was_rolled_back_is_rejected() {
    let disk = Disk::default();
    fill(&disk);
    let known = known_store(&disk);
    check_known(&disk, known).unwrap();
    // The newest entries are removed one after the other, each with its second name.
    let mut entries: Vec<String> = disk.names().into_iter().filter(|name| name.starts_with(names::LOG)).collect();
    entries.sort_unstable();
    let rolled_back = Encrypted(disk.0.copy());
    for name in entries.iter().filter(|name| name.contains("last-")) {
        rolled_back.0.remove(name).unwrap();
    }
    for name in entries.iter().rev().filter(|name| !name.contains("last-")).take(3) {
        rolled_back.0.remove(name).unwrap();
        let Ok(()) = StoreDirectory::open(rolled_back.shared(), None).and_then(|store| log::tail(&store).map(drop))
        else {
            continue;
        };
        let e = check_known(&rolled_back, known).unwrap_err();
        assert!(matches!(e, StoreError::RolledBack { .. }), "{e}");
        let restored = Owner::here("restore web").with(Guest::Restored);
        let copy = Encrypted(rolled_back.0.copy());
        let e = fence(copy.shared(), &vm(), &restored, Some(OnlyIf::Expected(expected(known)))).unwrap_err();
        assert!(matches!(e, StoreError::RolledBack { .. }), "{e}");
    }
    let restored = Owner::here("restore web").with(Guest::Restored);
    fence(disk.shared(), &vm(), &restored, Some(OnlyIf::Expected(expected(known)))).unwrap();
}

/// Recomputes all checksums in a file of a store, as an attacker can.
fn fix_checksums(name: &str, bytes: &mut [u8]) {
    let sum_to = |bytes: &mut [u8], at: usize| {
        if let Some((summed, rest)) = bytes.split_at_mut_checked(at)
            && let Some(sum) = rest.first_chunk_mut::<8>()
        {
            *sum = checksum(summed).to_le_bytes();
        }
    };
    let number = |bytes: &[u8], at: usize| {
        bytes
            .get(at..)
            .and_then(|bytes| bytes.first_chunk::<4>())
            .map_or(0, |bytes| u32::from_le_bytes(*bytes) as usize)
    };
    if name == names::SUPERBLOCK {
        sum_to(bytes, 4088);
    } else if name.starts_with(names::LOG) {
        sum_to(bytes, 56);
    } else if name.starts_with(names::SEGMENTS) {
        sum_to(bytes, 88);
        for begin in (4096..bytes.len()).step_by(4096) {
            let frame = &mut bytes[begin..];
            if frame.starts_with(b"RKFR") && frame.len() >= 64 {
                let page_len = if frame[4] == 2 { 24 } else { 16 };
                let end = 64 + number(frame, 8).min(1024) * page_len + if frame[6] == 1 { 16 } else { 0 };
                let summed = [&frame[..56], &frame[64..end.min(frame.len()).max(64)]].concat();
                frame[56..64].copy_from_slice(&checksum(&summed).to_le_bytes());
            }
        }
    } else if name.starts_with(names::INDEX) && bytes.len() >= 4096 {
        let (at, len) = (number(bytes, 48), number(bytes, 56));
        if let Some(trailer) = bytes.get(at..at.saturating_add(len)) {
            let sum = checksum(trailer);
            bytes[64..72].copy_from_slice(&sum.to_le_bytes());
        }
        sum_to(bytes, 112);
    }
}

/// Asserts that each page that can be read, and the device state, is correct. Returns whether anything was rejected.
fn read_all(disk: &Disk, model: &Model, known: KnownStore) -> bool {
    let mut is_rejected = check_known(disk, known).is_err();
    if !is_rejected {
        match image(disk, None) {
            Ok(image) => assert_eq!(image.info().number, model.newest(), "another checkpoint is taken for the newest"),
            Err(_) => is_rejected = true,
        }
    }
    for (number, expected) in &model.checkpoints {
        let Ok(image) = image(disk, Some(*number)) else {
            is_rejected = true;
            continue;
        };
        let blocks: Vec<_> = expected.blocks.iter().map(|(block, _)| block.clone()).collect();
        assert_eq!(image.info().blocks, blocks);
        match image.section(Section::Devices) {
            Ok(devices) => assert_eq!(devices, expected.devices),
            Err(_) => is_rejected = true,
        }
        for (position, (block, pages)) in expected.blocks.iter().enumerate() {
            for page in 0..block.pages() {
                let mut found = [1; PAGE_SIZE];
                match image.read_page((BlockId(position), PageNo(page)), &mut found) {
                    Ok(()) => assert!(found == content(pages.get(&page).copied().unwrap_or(0)), "a wrong page"),
                    Err(_) => is_rejected = true,
                }
            }
        }
    }
    is_rejected
}

/// What an attacker has: the store, and others with the same key or of the same VM.
struct Attacker {
    disk: CrashDisk,
    /// A store of another VM with the same key, another store of the same VM, an earlier state of the store, and a store
    /// without encryption.
    others: [CrashDisk; 5],
    random: fastrand::Rng,
}

impl Attacker {
    fn file(&mut self, disk: &CrashDisk) -> String {
        let names = disk.names();
        names[self.random.usize(..names.len())].clone()
    }

    /// Returns a file of the store or of another one.
    fn any_file(&mut self) -> (String, Vec<u8>) {
        let disk = match self.random.usize(..2 * self.others.len()) {
            other if other < self.others.len() => self.others[other].clone(),
            _ => self.disk.clone(),
        };
        let name = self.file(&disk);
        let content = disk.content(&name).unwrap();
        (name, content)
    }

    /// Returns a place where a structure is likely to begin or end.
    fn place(&mut self, len: usize) -> usize {
        let any = self.random.usize(..=len);
        match self.random.u8(..4) {
            0 => any / 4096 * 4096,
            1 => self.random.usize(..200).min(len),
            2 => len - self.random.usize(..100).min(len),
            _ => any,
        }
    }

    /// Returns a copy of the store with one change, and a description of the change.
    fn changed(&mut self) -> (Disk, String) {
        let disk = self.disk.copy();
        let name = self.file(&self.disk.clone());
        let mut bytes = disk.content(&name).unwrap();
        let what = match self.random.u8(..7) {
            0 | 1 => {
                for _ in 0..self.random.usize(1..5) {
                    let at = self.place(bytes.len());
                    let bit = self.random.u8(..8);
                    bytes.get_mut(at).map(|byte| *byte ^= 1 << bit).unwrap_or_default();
                }
                "flipped bits of"
            }
            2 => {
                bytes.truncate(self.place(bytes.len()));
                "truncated"
            }
            3 => {
                // A range of any file at any place of this one, e.g. a page or a frame of another position.
                let (_, from) = self.any_file();
                let (begin, at) = (self.place(from.len()), self.place(bytes.len()));
                let len = match self.random.u8(..3) {
                    0 => 4096,
                    1 => self.random.usize(..300),
                    _ => self.random.usize(..10_000),
                };
                let len = len.min(from.len() - begin).min(bytes.len() - at);
                bytes[at..at + len].copy_from_slice(&from[begin..begin + len]);
                "overwrote a range of"
            }
            4 => {
                let (_, content) = self.any_file();
                bytes = content;
                "replaced with any file"
            }
            5 => {
                // The file of this name in another store.
                let other = self.random.usize(..self.others.len());
                if let Ok(content) = self.others[other].content(&name) {
                    bytes = content;
                }
                "replaced with that of another store"
            }
            _ => {
                // The newest entries of the log, and perhaps the base indices.
                let mut entries: Vec<String> =
                    disk.names().into_iter().filter(|name| name.starts_with(names::LOG)).collect();
                entries.sort_unstable();
                let (seconds, mut firsts): (Vec<_>, Vec<_>) =
                    entries.into_iter().partition(|name| name.contains("last-"));
                let kept = self.random.usize(..firsts.len());
                for name in seconds.into_iter().chain(firsts.drain(kept..)) {
                    disk.remove(&name).unwrap();
                }
                if self.random.bool() {
                    for name in disk.names().into_iter().filter(|name| name.starts_with(names::INDEX)) {
                        disk.remove(&name).unwrap();
                    }
                }
                return (Encrypted(disk), format!("rolled back to {kept} entries"));
            }
        };
        fix_checksums(&name, &mut bytes);
        disk.change(&name, |content| *content = bytes);
        (Encrypted(disk), format!("{what} {name}"))
    }
}

/// Continues the store in `earlier` with three checkpoints and a base index. `model` is its model.
fn branch(earlier: &CrashDisk, model: &mut Model, first_change: u64) -> Disk {
    let disk = Encrypted(earlier.copy());
    let mut engine = open_as(&disk, 3, "newest owner", None).unwrap();
    for n in first_change..first_change + 3 {
        model.commit(&mut engine, &change(n)).unwrap();
    }
    engine.settle().unwrap();
    engine.remove_obsolete_files();
    disk
}

/// After a store was rolled back, its files get the names of earlier ones, with the same keys.
#[test]
fn files_of_two_histories_of_a_store_cannot_be_mixed() {
    let disk = Disk::default();
    let model = fill(&disk);
    let (mut first_model, mut second_model) = (model.clone(), model);
    let first = branch(&disk.0, &mut first_model, 20);
    let second = branch(&disk.0, &mut second_model, 30);
    let known = known_store(&first);
    assert!(!read_all(&first, &first_model, known));
    let common: Vec<String> = first.0.names().into_iter().filter(|name| second.0.content(name).is_ok()).collect();
    let (mut segments, mut base_indices) = (0, 0);
    for name in common.iter().filter(|name| first.0.content(name).unwrap() != second.0.content(name).unwrap()) {
        let mixed = Encrypted(first.0.copy());
        mixed.0.change(name, |content| *content = second.0.content(name).unwrap());
        let is_rejected = read_all(&mixed, &first_model, known);
        if name.starts_with(names::INDEX) {
            // It is not used, but built from the directories.
            base_indices += 1;
            let warnings = verify(&StoreDirectory::open(mixed.shared(), None).unwrap(), |_, _| {}).unwrap().warnings;
            assert!(warnings.iter().any(|warning| warning.contains("of this history")), "{warnings:?}");
        } else {
            segments += usize::from(name.starts_with(names::SEGMENTS));
            // A claim is read by those that want to know the owner.
            let is_listed = list(&StoreDirectory::open(mixed.shared(), None).unwrap()).is_ok();
            assert!(is_rejected || !is_listed || name.contains("last-"), "{name}");
        }
    }
    assert!(segments > 0 && base_indices > 0, "{common:?}");
    // The whole other history.
    let e = check_known(&second, known).unwrap_err();
    assert!(matches!(e, StoreError::OtherHistory { .. }), "{e}");
    // Another store of the same VM and key. Without encryption, the ID of a store proves nothing.
    let (another, plain) = (Disk::default(), CrashDisk::default());
    fill(&another);
    fill(&plain);
    let e = check_known(&another, known).unwrap_err();
    assert!(matches!(e, StoreError::OtherStore { .. }), "{e}");
    check_known(&another, KnownStore { id: Uuid::from_u128(5), ..known_store(&plain) }).unwrap();
}

#[test]
fn no_change_of_ten_thousand_gives_wrong_content() {
    let disk = Disk::default();
    let mut model = fill(&disk);
    let settings = EngineSettings { keep: 3, segment: 48 << 10, create: true };
    let another_vm = CrashDisk::default();
    let other = Vm { uuid: Uuid::from_u128(9), name: "other".into() };
    let mut engine = Engine::open(with_keys(&another_vm, &[1]), &other, &Owner::here("test"), None, settings).unwrap();
    let mut of_other = Model { keep: 3, ..Model::default() };
    for n in 0..9 {
        of_other.commit(&mut engine, &change(n + 3)).unwrap();
    }
    engine.settle().unwrap();
    let [again, plain] = [CrashDisk::default(), CrashDisk::default()];
    fill(&Encrypted(again.clone()));
    fill(&plain);
    let earlier = disk.0.copy();
    // The same store, which another host has continued from the earlier state.
    let branch = branch(&earlier, &mut model.clone(), 30);
    let mut engine = open_as(&disk, 3, "newest owner", None).unwrap();
    for n in 20..23 {
        model.commit(&mut engine, &change(n)).unwrap();
    }
    engine.settle().unwrap();
    drop(engine);
    let known = known_store(&disk);
    assert_eq!((known.reached.epoch, known.reached.checkpoint), (4, model.newest()));
    assert!(!read_all(&disk, &model, known));
    let random = fastrand::Rng::with_seed(0);
    let others = [another_vm, again, earlier, plain, branch.0];
    let mut attacker = Attacker { disk: disk.0.copy(), others, random };
    let mut rejected = 0;
    for n in 0..10_000 {
        let (changed, what) = attacker.changed();
        let checked = std::panic::catch_unwind(|| read_all(&changed, &model, known));
        rejected += usize::from(checked.unwrap_or_else(|_| panic!("change {n}: {what}")));
    }
    // Some changes have no effect: bytes that are not used, or base indices, which are only a shortcut.
    assert!(rejected > 4000, "{rejected} changes were rejected");
}
