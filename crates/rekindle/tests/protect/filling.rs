//! Checkpoints during the fill of a restore: each of them is complete, whichever process dies meanwhile. Some are
//! compared, page by page, with the guest's memory at the moment of the checkpoint.
//!
//! Terms (`docs/glossary.md`): a restored guest runs while its memory is still *filled* from the checkpoint. The
//! *pager* is the process that does it. A page that is not filled yet is *missing*: a hole in the file that is the
//! guest's RAM. The pager supplies a missing page when the guest accesses it. The *write record* is the pager's record
//! of the pages that the guest has written during the fill. From it, a *protector*, the process that takes checkpoints,
//! knows which pages have changed since the restored checkpoint. So the first checkpoint after a restore need not be
//! full.
//!
//! A checkpoint runs the *disk hook*, a command, while the guest is paused. Here the hook copies the RAM file.

use crate::common::protector::{Protector, Slowdown, crash, pager, restore, restore_with, store, wait_filled};
use crate::common::served::kill_watcher;
use crate::common::{DEADLINE, Guest, Lab, wait_for};
use rekindle_kernel::userfault::remote;
use rekindle_pages::{PAGE_SIZE, PageNo};
use rekindle_store::{Image, ReadOptions, StoreUrl};
use rekindle_vm::fault::POINTS;
use rustix::fs::{SeekFrom, seek};
use serde_json::Value;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Returns the populated runs of a file: all except its holes. Zeroes may be populated.
fn populated_runs(file: &File) -> Vec<Range<u64>> {
    let length = file.metadata().unwrap().len();
    let (mut runs, mut end) = (Vec::new(), 0);
    while let Ok(start) = seek(file, SeekFrom::Data(end)) {
        end = seek(file, SeekFrom::Hole(start)).unwrap_or(length);
        runs.push(start..end);
    }
    runs
}

/// Copies a file with its holes. `cp` would turn pages of zeros into holes, which stand for missing pages in this test.
fn copy_with_holes(source: &Path, copy: &Path) {
    let (source, copy) = (File::open(source).unwrap(), File::create(copy).unwrap());
    copy.set_len(source.metadata().unwrap().len()).unwrap();
    let mut buffer = Vec::new();
    for run in populated_runs(&source) {
        for offset in run.clone().step_by(1 << 20) {
            buffer.resize((run.end - offset).min(1 << 20) as usize, 0);
            source.read_exact_at(&mut buffer, offset).unwrap();
            copy.write_all_at(&buffer, offset).unwrap();
        }
    }
}

/// Environment variables of [`copier`]: the paths of its source and its copy.
const COPY_SOURCE: &str = "REKINDLE_TEST_COPY_FROM";
const COPY: &str = "REKINDLE_TEST_COPY_TO";

/// The name of the test that the disk hook runs, as the test binary takes it.
const COPIER: &str = "filling::copier";

#[test]
#[ignore = "run by the disk hook of the other tests"]
fn copier() {
    let path = |name| PathBuf::from(std::env::var_os(name).unwrap());
    copy_with_holes(&path(COPY_SOURCE), &path(COPY));
}

#[test]
fn a_page_of_zeroes_is_there_in_a_copy_and_a_hole_is_not() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let [source, copy] = ["from", "to"].map(|name| directory.path().join(name));
    let file = File::create(&source).unwrap();
    file.set_len(64 * PAGE_SIZE as u64).unwrap();
    // Pages 4 and 9 are written with zeros: they are populated, and must not become holes.
    for (page, byte) in [(3, 1), (4, 0), (9, 0), (40, 7)] {
        file.write_all_at(&[byte; PAGE_SIZE], page * PAGE_SIZE as u64).unwrap();
    }
    copy_with_holes(&source, &copy);
    let to_pages = |run: &Range<u64>| run.start / PAGE_SIZE as u64..run.end / PAGE_SIZE as u64;
    let populated: Vec<_> = populated_runs(&File::open(&copy).unwrap()).iter().map(to_pages).collect();
    assert_eq!(populated, [3..5, 9..10, 40..41]);
    assert_eq!(fs::read(&source).unwrap(), fs::read(&copy).unwrap());
}

/// A guest with a store. Its protector's disk hook copies the guest's memory in the pause of a checkpoint.
struct ProtectedGuest<'a> {
    lab: &'a Lab,
    guest: Guest<'a>,
    store: PathBuf,
    /// Shell command that copies the guest's memory.
    hook: String,
}

/// A checkpoint whose pages have been compared with a copy of the memory.
struct ComparedCheckpoint {
    /// Event that the protector printed for the checkpoint.
    event: Value,
    /// Number of pages that were missing in the guest's memory.
    missing: u64,
}

impl ComparedCheckpoint {
    fn number(&self) -> u64 {
        self.event["number"].as_u64().unwrap()
    }

    /// Asserts that the checkpoint contains only changed pages, and that it was taken during the fill if `is_filling`.
    #[track_caller]
    fn assert_incremental(&self, is_filling: bool) {
        assert_eq!(self.event["filling"], is_filling);
        assert_eq!(self.event["full"], false);
    }
}

/// A restore with a slow pager.
struct SlowRestore {
    /// Number of the restored checkpoint.
    checkpoint: u64,
    slowdown: Slowdown,
}

impl<'a> ProtectedGuest<'a> {
    /// Boots a guest, fills `touched_mib` of its memory with a pattern, has it write to this memory continuously, and
    /// takes two checkpoints.
    fn new(lab: &'a Lab, name: &str, memory: &str, touched_mib: u32) -> Self {
        let guest = lab.vm(name).memory(memory).boot(&[]);
        guest.touch(&format!("{touched_mib}M"));
        guest.ask(&format!("dirty 6 {touched_mib} random"));
        let store = store(lab, name);
        let (ram, copies) = (lab.run_root().join(".ram"), lab.path("copies"));
        fs::create_dir(&copies).unwrap();
        // The hook makes a copy if the file `want` exists. A failed checkpoint is repeated under the same number: if
        // there is a copy with this number, it is of the failed attempt and is made again.
        let hook = format!(
            "cd {}; [ -e want ] || [ -e $REKINDLE_CHECKPOINT ] || exit 0
             export {COPY_SOURCE}=$(echo {}/{name}-*.ram) {COPY}=part
             {} {COPIER} --exact --ignored && mv part $REKINDLE_CHECKPOINT && rm -f want",
            copies.display(),
            ram.display(),
            std::env::current_exe().unwrap().display()
        );
        let protected = Self { lab, guest, store, hook };
        let mut protector = protected.protect(&["--count", "2"]);
        assert!(protector.child.wait().unwrap().success());
        protected
    }

    fn protect(&self, arguments: &[&str]) -> Protector {
        self.protect_with(arguments, &[])
    }

    fn protect_with(&self, arguments: &[&str], environment: &[(&str, &str)]) -> Protector {
        let words =
            ["--every", "100ms", "--disk-hook", &self.hook].iter().chain(arguments).copied().collect::<Vec<_>>();
        Protector::start_with(&self.guest, self.lab, &self.store, &words, environment)
    }

    /// Simulates a crash of the guest's host and restores the newest checkpoint with a slow pager.
    fn crash_and_restore(&self) -> SlowRestore {
        crash(&self.guest);
        let restored = restore(&self.guest, &self.store, &[]);
        SlowRestore { checkpoint: restored["checkpoint"].as_u64().unwrap(), slowdown: self.slow_down_pager() }
    }

    fn slow_down_pager(&self) -> Slowdown {
        Slowdown::of(wait_for("a pager", DEADLINE, || pager(&self.guest)))
    }

    fn is_filling(&self) -> bool {
        let text = fs::read_to_string(self.guest.file("fill.json")).unwrap_or_default();
        text.contains("\"filling\"")
    }

    /// Requests a copy of the memory, waits for the checkpoint of that moment, and asserts that all pages are the same.
    /// A page that is missing in the memory must be the one of checkpoint `restored`.
    #[track_caller]
    fn compare_next(&self, protector: &mut Protector, restored: u64) -> ComparedCheckpoint {
        let copies = self.lab.path("copies");
        fs::write(copies.join("want"), []).unwrap();
        loop {
            let event = protector.wait("checkpoint");
            let copy = copies.join(event["number"].to_string());
            if copy.exists() {
                let missing = compare(&self.store, &copy, event["number"].as_u64().unwrap(), restored);
                fs::remove_file(copy).unwrap();
                return ComparedCheckpoint { event, missing };
            }
        }
    }

    /// Returns the number of userfaultfds in QEMU.
    fn userfaultfds(&self) -> usize {
        // The guest may be in the pause of a checkpoint.
        let qemus = self.guest.qemus();
        let [qemu] = qemus.as_slice() else { panic!("{} QEMUs", qemus.len()) };
        remote::existing(qemu.process).unwrap().len()
    }
}

fn image(store: &Path, number: u64) -> Image {
    let url: StoreUrl = store.to_str().unwrap().parse().unwrap();
    Image::open(&url, &ReadOptions { at: Some(number), ..ReadOptions::default() }).unwrap()
}

/// Asserts that every page of the main RAM of checkpoint `number` equals a copy of the memory at that moment. Returns
/// the number of pages that are missing in the copy; they must equal those of checkpoint `restored`.
#[track_caller]
fn compare(store: &Path, copy: &Path, number: u64, restored: u64) -> u64 {
    let (checkpoint, restored_checkpoint) = (image(store, number), image(store, restored));
    let main = checkpoint.block("ram").expect("main RAM");
    let copy = File::open(copy).unwrap();
    let length = copy.metadata().unwrap().len();
    assert_eq!(checkpoint.info().blocks[main.0].used, length);
    let (mut wrong, mut missing) = (Vec::new(), 0);
    let (mut expected, mut actual) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
    let mut populated = populated_runs(&copy).into_iter().peekable();
    for page in 0..length / PAGE_SIZE as u64 {
        let offset = page * PAGE_SIZE as u64;
        while populated.next_if(|run| run.end <= offset).is_some() {}
        let is_populated = populated.peek().is_some_and(|run| run.contains(&offset));
        checkpoint.read_page((main, PageNo(page)), &mut actual).unwrap();
        if is_populated {
            copy.read_exact_at(&mut expected, offset).unwrap();
        } else {
            missing += 1;
            restored_checkpoint.read_page((main, PageNo(page)), &mut expected).unwrap();
        }
        if actual != expected {
            wrong.push(page);
            let mut old = [0; PAGE_SIZE];
            restored_checkpoint.read_page((main, PageNo(page)), &mut old).unwrap();
            let differ: Vec<_> = (0..PAGE_SIZE).filter(|n| actual[*n] != expected[*n]).collect();
            let (first, last) = (differ[0], differ[differ.len() - 1]);
            eprintln!(
                "page {page} of checkpoint {number}: {} bytes differ, from {first} to {last}\n\
                 memory: {:02x?}, populated: {is_populated}, as in checkpoint {restored}: {}\n\
                 checkpoint: {:02x?}, zero: {}, as in checkpoint {restored}: {}",
                differ.len(),
                &expected[first..(first + 16).min(PAGE_SIZE)],
                expected == old,
                &actual[first..(first + 16).min(PAGE_SIZE)],
                actual == [0; PAGE_SIZE],
                actual == old,
            );
        }
    }
    assert!(wrong.is_empty(), "checkpoint {number}: {} pages are wrong: {wrong:?}", wrong.len());
    missing
}

#[test]
fn a_checkpoint_during_the_fill_is_whole_and_can_be_restored() {
    for policy in ["precopy", "basic"] {
        let lab = Lab::new();
        let protected = ProtectedGuest::new(&lab, policy, "256M", 112);
        let guest = &protected.guest;
        let (boot, tick) = (guest.boot_id(), guest.tick());
        let restore = protected.crash_and_restore();
        // The checkpoint that is restored is kept for as long as its pages are loaded.
        let mut protector = protected.protect(&["--policy", policy, "--keep", "2"]);
        let attached = protector.wait("attached");
        assert_eq!(attached["filling"], true);
        assert_eq!(attached["incremental"], true);
        let (mut newest, mut most_dirty_bytes) = (0, 0);
        for round in 0..3 {
            let checkpoint = protected.compare_next(&mut protector, restore.checkpoint);
            checkpoint.assert_incremental(true);
            let missing = checkpoint.missing;
            // Of the 65,536 pages of the guest: enough that the comparison includes missing pages.
            assert!(missing > 1000, "round {round}: only {missing} pages were missing");
            most_dirty_bytes = most_dirty_bytes.max(checkpoint.event["dirty_bytes"].as_u64().unwrap());
            newest = checkpoint.number();
        }
        assert!(protected.is_filling(), "the pager was not slow enough");
        // The bound on the protector's memory: 64 MB, 16 bytes per page of the guest (256 MiB), and the pages of a
        // checkpoint in flight.
        let bound = 64_000_000 + 16 * ((256 << 20) / PAGE_SIZE as u64) + most_dirty_bytes;
        assert!(protector.most_memory() < bound, "{} of {bound} bytes", protector.most_memory());
        eprintln!("{policy}: at most {} bytes of memory, {most_dirty_bytes} in flight", protector.most_memory());
        drop(restore.slowdown);
        // The guest crashes and is restored before its fill has ended.
        let second_restore = protected.crash_and_restore();
        assert!(second_restore.checkpoint >= newest && newest > restore.checkpoint);
        drop((second_restore, protector));
        assert_eq!(guest.boot_id(), boot, "the guest was booted instead of resumed");
        wait_for("the guest to tick", DEADLINE, || (guest.tick() > tick).then_some(()));
        guest.verify();
        wait_filled(guest);
        guest.verify();
        guest.assert_sound();
    }
}

#[test]
fn pager_and_protector_die_during_the_fill_and_no_page_is_wrong() {
    let lab = Lab::new();
    let protected = ProtectedGuest::new(&lab, "mortal", "256M", 112);
    let guest = &protected.guest;
    let SlowRestore { checkpoint: restored, mut slowdown } = protected.crash_and_restore();
    let arguments = ["--keep", "1000"];
    let mut protector = protected.protect(&arguments);
    for round in 0..4 {
        let checkpoint = protected.compare_next(&mut protector, restored);
        assert!(protected.is_filling() && checkpoint.missing > 0, "the pager was not slow enough");
        if round % 2 == 0 {
            protector.kill();
            protector = protected.protect(&arguments);
            assert_eq!(protector.wait("attached")["filling"], true);
        } else {
            let pager = pager(guest).expect("it is filling");
            drop(slowdown);
            kill_watcher(guest);
            pager.kill().unwrap();
            assert!(pager.wait_end(Duration::from_secs(10)).unwrap());
            // Without a pager no checkpoint may stop the guest, because it may need a page meanwhile.
            let waiting = protector.wait("waiting");
            assert!(waiting["state"].as_str().unwrap().contains("rekindle recover"), "{waiting}");
            guest.rekindle(&["recover"]).ok();
            slowdown = protected.slow_down_pager();
            // This holds also if the protector was about to stop the guest: the guest runs again by now, while pages
            // are still missing.
            assert_eq!(protector.wait("checkpoint")["filling"], true);
        }
    }
    drop(slowdown);
    // The protector replaces the pager's write record with its own. No page is lost, and no page is read again.
    protector.wait("filled");
    for _ in 0..3 {
        protected.compare_next(&mut protector, restored).assert_incremental(false);
    }
    wait_filled(guest);
    wait_for("the pager to close its descriptor", DEADLINE, || (protected.userfaultfds() == 1).then_some(()));
    protector.next_checkpoint();
    crash(guest);
    drop(protector);
    restore(guest, &protected.store, &[]);
    guest.verify();
    wait_filled(guest);
    guest.verify();
    guest.assert_sound();
}

/// Waits until a protector reports that it waits for `reason`. Before that, it may report that the pager, which has
/// just been started, does not serve yet.
#[track_caller]
fn wait_for_waiting(protector: &mut Protector, reason: &str) {
    loop {
        let waiting = protector.wait("waiting");
        let state = waiting["state"].as_str().unwrap();
        if state.contains(reason) {
            return;
        }
        assert!(state.contains("it has no pager"), "{waiting}");
    }
}

#[test]
fn where_the_record_of_the_pager_cannot_be_used_protection_waits_until_it_has_ended() {
    let lab = Lab::new();
    let protected = ProtectedGuest::new(&lab, "waits", "192M", 64);
    let guest = &protected.guest;
    let SlowRestore { checkpoint: restored, slowdown } = protected.crash_and_restore();
    // Try another store, and a policy that needs its own write record.
    let mut elsewhere = Protector::start(guest, &lab, &store(&lab, "elsewhere"), &["--every", "100ms"]);
    wait_for_waiting(&mut elsewhere, "another store");
    drop(elsewhere);
    let mut cow = protected.protect(&["--policy", "cow", "--keep", "1000"]);
    wait_for_waiting(&mut cow, "policy cow");
    drop(slowdown);
    assert_eq!(cow.wait("checkpoint")["full"], true);
    protected.compare_next(&mut cow, restored);
    drop(cow);
    wait_filled(guest);
    // Restore a checkpoint that is not the newest: its missing pages are not those of the newest.
    crash(guest);
    restore(guest, &protected.store, &["--at", &restored.to_string()]);
    let slowdown = protected.slow_down_pager();
    let mut protector = protected.protect(&["--keep", "1000"]);
    if protected.is_filling() {
        wait_for_waiting(&mut protector, "not the newest");
    }
    drop(slowdown);
    assert_eq!(protector.wait("checkpoint")["full"], true);
    protected.compare_next(&mut protector, restored);
    protector.end();
    guest.verify();
    guest.assert_sound();
}

#[test]
fn a_death_at_any_step_of_the_end_of_the_fill_is_found_by_the_next_process() {
    let lab = Lab::new();
    let protected = ProtectedGuest::new(&lab, "steps", "128M", 24);
    let guest = &protected.guest;
    let points: Vec<_> = POINTS.iter().filter(|point| point.starts_with("fill.")).collect();
    // Fails if the points are renamed, which would leave nothing to test.
    assert!(points.len() >= 7);
    for point in points {
        eprintln!("==== {point}");
        let fault = format!("{point}:kill");
        let environment = [("REKINDLE_FAULT", fault.as_str())];
        let arguments = ["--keep", "1000"];
        // The pager passes the points `fill.end.`, the protector all others.
        let is_of_pager = point.starts_with("fill.end.");
        let restored = if is_of_pager {
            crash(guest);
            let restored = restore_with(guest, &protected.store, &[], &environment);
            wait_for("the pager to die, and a restart of it", DEADLINE, || {
                let restarts = fs::read_to_string(guest.file("helpers.json")).unwrap_or_default();
                restarts.contains("\"pager\"").then_some(())
            });
            restored["checkpoint"].as_u64().unwrap()
        } else {
            let restore = protected.crash_and_restore();
            let mut protector = protected.protect_with(&arguments, &environment);
            assert_eq!(protector.wait("attached")["filling"], true);
            drop(restore.slowdown);
            protector.wait_killed();
            restore.checkpoint
        };
        let mut protector = protected.protect(&arguments);
        for _ in 0..2 {
            protected.compare_next(&mut protector, restored);
        }
        wait_filled(guest);
        protector.next_checkpoint();
        protector.end();
        assert_eq!(protected.userfaultfds(), 1, "{point}: the protector's");
        guest.verify();
        guest.assert_sound();
    }
}
