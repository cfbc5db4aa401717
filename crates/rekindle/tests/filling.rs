//! Checkpoints while a restore still fills: each is whole, whatever dies meanwhile. Every page of some of them is compared with
//! the guest's memory at the very moment.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::protector::{Protector, crash, pager, restore, restore_with, store, wait_filled};
use common::served::kill_watcher;
use common::{DEADLINE, Guest, Lab, wait_for};
use rekindle_kernel::process::Process;
use rekindle_kernel::userfault::remote;
use rekindle_pages::{PAGE_SIZE, PageNo};
use rekindle_store::{Image, ReadOptions, StoreUrl};
use rekindle_vm::fault::POINTS;
use rustix::fs::{SeekFrom, seek};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Lets a pager work for a small part of the time only, so that its restore takes long. On a busy machine it is stopped late, and then
/// for the longer.
struct Slow {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

fn signal(process: Process, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(process.pid).unwrap()).unwrap();
    if process.is_alive() {
        let _ = kill_process(pid, signal);
    }
}

impl Slow {
    fn down(process: Process) -> Self {
        let end = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&end);
        let thread = thread::spawn(move || {
            let mut worked = Duration::from_millis(1);
            while !told.load(Ordering::Relaxed) {
                signal(process, Signal::STOP);
                thread::sleep((worked * 40).min(Duration::from_millis(400)));
                let since = Instant::now();
                signal(process, Signal::CONT);
                thread::sleep(Duration::from_millis(1));
                worked = since.elapsed();
            }
            signal(process, Signal::CONT);
        });
        Self { end, thread: Some(thread) }
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        let _ = self.thread.take().unwrap().join();
    }
}

/// Runs of a file that hold something, zeroes among it.
fn runs(file: &File) -> Vec<Range<u64>> {
    let length = file.metadata().unwrap().len();
    let (mut runs, mut at) = (Vec::new(), 0);
    while let Ok(start) = seek(file, SeekFrom::Data(at)) {
        at = seek(file, SeekFrom::Hole(start)).unwrap_or(length);
        runs.push(start..at);
    }
    runs
}

/// Copy a file so that what holds something holds something, and nothing else does. `cp` does not: of a page that is all zero it makes
/// a hole, which here is one that is missing.
fn copy(from: &Path, to: &Path) {
    let (from, to) = (File::open(from).unwrap(), File::create(to).unwrap());
    to.set_len(from.metadata().unwrap().len()).unwrap();
    let mut buffer = Vec::new();
    for run in runs(&from) {
        for at in run.clone().step_by(1 << 20) {
            buffer.resize((run.end - at).min(1 << 20) as usize, 0);
            from.read_exact_at(&mut buffer, at).unwrap();
            to.write_all_at(&buffer, at).unwrap();
        }
    }
}

/// Where the copier reads and writes.
const FROM: &str = "REKINDLE_TEST_COPY_FROM";
const TO: &str = "REKINDLE_TEST_COPY_TO";

#[test]
#[ignore = "run by the disk hook of the other tests"]
fn copier() {
    let path = |name| PathBuf::from(std::env::var_os(name).unwrap());
    copy(&path(FROM), &path(TO));
}

#[test]
fn a_page_of_zeroes_is_there_in_a_copy_and_a_hole_is_not() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let [from, to] = ["from", "to"].map(|name| directory.path().join(name));
    let file = File::create(&from).unwrap();
    file.set_len(64 * PAGE_SIZE as u64).unwrap();
    for (page, byte) in [(3, 1), (4, 0), (9, 0), (40, 7)] {
        file.write_all_at(&[byte; PAGE_SIZE], page * PAGE_SIZE as u64).unwrap();
    }
    copy(&from, &to);
    let to_pages = |run: &Range<u64>| run.start / PAGE_SIZE as u64..run.end / PAGE_SIZE as u64;
    let there: Vec<_> = runs(&File::open(&to).unwrap()).iter().map(to_pages).collect();
    assert_eq!(there, [3..5, 9..10, 40..41]);
    assert_eq!(fs::read(&from).unwrap(), fs::read(&to).unwrap());
}

/// A guest with a store, and copies of its memory that are made in the pause of a checkpoint.
struct Case<'a> {
    lab: &'a Lab,
    guest: Guest<'a>,
    store: PathBuf,
    hook: String,
}

impl<'a> Case<'a> {
    /// A guest whose memory has a pattern, is being written all the time, and is in a store.
    fn new(lab: &'a Lab, name: &str, memory: &str, touched: u32) -> Self {
        let guest = lab.vm(name).memory(memory).boot(&[]);
        guest.touch(&format!("{touched}M"));
        guest.ask(&format!("dirty 6 {touched} random"));
        let store = store(lab, name);
        let (ram, aside) = (lab.run_root().join(".ram"), lab.path("aside"));
        fs::create_dir(&aside).unwrap();
        // One that fails is taken again under its number: then it is the memory of that moment that counts.
        let hook = format!(
            "cd {}; [ -e want ] || [ -e $REKINDLE_CHECKPOINT ] || exit 0
             {FROM}=$(echo {}/{name}-*.ram) {TO}=part {} copier --exact --ignored && mv part $REKINDLE_CHECKPOINT && rm -f want",
            aside.display(),
            ram.display(),
            std::env::current_exe().unwrap().display()
        );
        let case = Self { lab, guest, store, hook };
        let mut protector = case.protect(&["--count", "2"]);
        assert!(protector.child.wait().unwrap().success());
        case
    }

    fn protect(&self, arguments: &[&str]) -> Protector {
        self.protect_with(arguments, &[])
    }

    fn protect_with(&self, arguments: &[&str], environment: &[(&str, &str)]) -> Protector {
        let all = ["--every", "100ms", "--disk-hook", &self.hook].iter().chain(arguments).copied().collect::<Vec<_>>();
        Protector::start_with(&self.guest, self.lab, &self.store, &all, environment)
    }

    /// The host dies; the guest goes on from the newest checkpoint, and its pager is slow.
    fn restore(&self) -> (u64, Slow) {
        crash(&self.guest);
        let restored = restore(&self.guest, &self.store, &[]);
        let pager = wait_for("a pager", DEADLINE, || pager(&self.guest));
        (restored["checkpoint"].as_u64().unwrap(), Slow::down(pager))
    }

    fn is_filling(&self) -> bool {
        let text = fs::read_to_string(self.guest.file("fill.json")).unwrap_or_default();
        text.contains("\"filling\"")
    }

    /// Wait for a checkpoint of which there is a copy; compare all pages. What is not there yet has to be as in `restored`.
    /// Gives the checkpoint and how many pages were not there.
    #[track_caller]
    fn compare_next(&self, protector: &mut Protector, restored: u64) -> (Value, u64) {
        let aside = self.lab.path("aside");
        fs::write(aside.join("want"), []).unwrap();
        loop {
            let checkpoint = protector.wait("checkpoint");
            let copy = aside.join(checkpoint["number"].to_string());
            if copy.exists() {
                let missing = compare(&self.store, &copy, checkpoint["number"].as_u64().unwrap(), restored);
                fs::remove_file(copy).unwrap();
                return (checkpoint, missing);
            }
        }
    }

    /// The userfaultfds in its QEMU.
    fn userfaultfds(&self) -> usize {
        // It may be in the pause of a checkpoint.
        let qemus = self.guest.qemus();
        let [qemu] = qemus.as_slice() else { panic!("{} QEMUs", qemus.len()) };
        remote::existing(qemu.process).unwrap().len()
    }
}

fn image(store: &Path, number: u64) -> Image {
    let url: StoreUrl = store.to_str().unwrap().parse().unwrap();
    Image::open(&url, &ReadOptions { at: Some(number), ..ReadOptions::default() }).unwrap()
}

/// Every page of the main RAM of a checkpoint against a copy of the memory of that moment.
#[track_caller]
fn compare(store: &Path, copy: &Path, number: u64, restored: u64) -> u64 {
    let (now, before) = (image(store, number), image(store, restored));
    let main = now.block("ram").expect("main RAM");
    let copy = File::open(copy).unwrap();
    let length = copy.metadata().unwrap().len();
    assert_eq!(now.info().blocks[main.0].used, length);
    let (mut wrong, mut missing) = (Vec::new(), 0);
    let (mut there, mut ours) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
    let mut data = runs(&copy).into_iter().peekable();
    for page in 0..length / PAGE_SIZE as u64 {
        let at = page * PAGE_SIZE as u64;
        while data.next_if(|run| run.end <= at).is_some() {}
        let is_there = data.peek().is_some_and(|run| run.contains(&at));
        now.read_page((main, PageNo(page)), &mut ours).unwrap();
        if is_there {
            copy.read_exact_at(&mut there, at).unwrap();
        } else {
            missing += 1;
            before.read_page((main, PageNo(page)), &mut there).unwrap();
        }
        if ours != there {
            wrong.push(page);
            let mut old = [0; PAGE_SIZE];
            before.read_page((main, PageNo(page)), &mut old).unwrap();
            let differ: Vec<_> = (0..PAGE_SIZE).filter(|n| ours[*n] != there[*n]).collect();
            let (first, last) = (differ[0], differ[differ.len() - 1]);
            let (is_old, is_zero, was_old) = (ours == old, ours == [0; PAGE_SIZE], there == old);
            eprintln!(
                "page {page} of checkpoint {number}: {} bytes differ, from {first} to {last}: {:02x?} there and {:02x?} in the checkpoint; there: \
                 {is_there}, as in {restored}: {was_old}; in the checkpoint as in {restored}: {is_old}, zero: {is_zero}",
                differ.len(),
                &there[first..(first + 16).min(PAGE_SIZE)],
                &ours[first..(first + 16).min(PAGE_SIZE)],
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
        let case = Case::new(&lab, policy, "256M", 112);
        let (boot, tick) = (case.guest.boot_id(), case.guest.tick());
        let (restored, slow) = case.restore();
        // The checkpoint that is restored is kept for as long as its pages are brought.
        let mut protector = case.protect(&["--policy", policy, "--keep", "2"]);
        let attached = protector.wait("attached");
        assert_eq!((attached["filling"].clone(), attached["incremental"].clone()), (true.into(), true.into()));
        let (mut newest, mut most) = (0, 0);
        for round in 0..3 {
            let (checkpoint, missing) = case.compare_next(&mut protector, restored);
            most = most.max(checkpoint["dirty_bytes"].as_u64().unwrap());
            assert_eq!((checkpoint["filling"].clone(), checkpoint["full"].clone()), (true.into(), false.into()));
            assert!(missing > 1000, "round {round}: only {missing} pages had not come");
            newest = checkpoint["number"].as_u64().unwrap();
        }
        assert!(case.is_filling(), "it was to be slow");
        // 64 MB, 16 bytes a page, and the pages of a checkpoint in flight.
        let bound = 64_000_000 + 16 * ((256 << 20) / PAGE_SIZE as u64) + most;
        assert!(protector.most_memory() < bound, "{} of {bound} bytes", protector.most_memory());
        eprintln!("{policy}: at most {} bytes of memory, {most} of them in flight", protector.most_memory());
        drop(slow);
        // A restore of a restore that had not ended.
        let (again, slow) = case.restore();
        assert!(again >= newest && newest > restored);
        drop((slow, protector));
        assert_eq!(case.guest.boot_id(), boot, "the guest went on, and was not booted");
        wait_for("its ticks to go on", DEADLINE, || (case.guest.tick() > tick).then_some(()));
        case.guest.verify();
        wait_filled(&case.guest);
        case.guest.verify();
        case.guest.assert_sound();
    }
}

#[test]
fn pager_and_protector_die_during_the_fill_and_no_page_is_wrong() {
    let lab = Lab::new();
    let case = Case::new(&lab, "mortal", "256M", 112);
    let (restored, mut slow) = case.restore();
    let all = ["--keep", "1000"];
    let mut protector = case.protect(&all);
    for round in 0..4 {
        let (_, missing) = case.compare_next(&mut protector, restored);
        assert!(case.is_filling() && missing > 0, "it was to be slow");
        if round % 2 == 0 {
            protector.kill();
            protector = case.protect(&all);
            assert_eq!(protector.wait("attached")["filling"], true);
        } else {
            let victim = pager(&case.guest).expect("it is filling");
            drop(slow);
            kill_watcher(&case.guest);
            victim.kill().unwrap();
            assert!(victim.wait_end(Duration::from_secs(10)).unwrap());
            // No checkpoint stops the guest while nobody brings what it may need then.
            let said = protector.wait("waiting");
            assert!(said["state"].as_str().unwrap().contains("rekindle recover"), "{said}");
            case.guest.rekindle(&["recover"]).ok();
            slow = Slow::down(wait_for("a pager", DEADLINE, || pager(&case.guest)));
            // It may have been about to stop the guest: then it has begun anew by now, while there is still something to come.
            assert_eq!(protector.wait("checkpoint")["filling"], true);
        }
    }
    drop(slow);
    // From the pager's record to one of our own: not one page is lost, and nothing is read again.
    protector.wait("filled");
    for _ in 0..3 {
        let (checkpoint, _) = case.compare_next(&mut protector, restored);
        assert_eq!((checkpoint["filling"].clone(), checkpoint["full"].clone()), (false.into(), false.into()));
    }
    wait_filled(&case.guest);
    wait_for("the pager to close its descriptor", DEADLINE, || (case.userfaultfds() == 1).then_some(()));
    protector.next_checkpoint();
    crash(&case.guest);
    drop(protector);
    restore(&case.guest, &case.store, &[]);
    case.guest.verify();
    wait_filled(&case.guest);
    case.guest.verify();
    case.guest.assert_sound();
}

/// A protector says that it waits, and why. That the pager does not serve yet is also a reason: it has only just been started.
#[track_caller]
fn waits_because(protector: &mut Protector, why: &str) {
    loop {
        let said = protector.wait("waiting");
        let state = said["state"].as_str().unwrap();
        if state.contains(why) {
            return;
        }
        assert!(state.contains("it has no pager"), "{said}");
    }
}

#[test]
fn where_the_record_of_the_pager_is_nothing_to_go_by_protection_waits_until_it_has_ended() {
    let lab = Lab::new();
    let case = Case::new(&lab, "waits", "192M", 64);
    let (restored, slow) = case.restore();
    // Another store, and a policy that wants the memory for itself.
    let other = store(&lab, "elsewhere");
    let path = other.to_str().unwrap();
    let mut elsewhere = Protector::start(&case.guest, &lab, Path::new(path), &["--every", "100ms"]);
    waits_because(&mut elsewhere, "another store");
    drop(elsewhere);
    let mut cow = case.protect(&["--policy", "cow", "--keep", "1000"]);
    waits_because(&mut cow, "policy cow");
    drop(slow);
    assert_eq!(cow.wait("checkpoint")["full"], true);
    case.compare_next(&mut cow, restored);
    drop(cow);
    wait_filled(&case.guest);
    // An older checkpoint than the newest: what is missing is not what the newest has.
    crash(&case.guest);
    let newest = restored.to_string();
    restore(&case.guest, &case.store, &["--at", &newest]);
    let slow = Slow::down(wait_for("a pager", DEADLINE, || pager(&case.guest)));
    let mut protector = case.protect(&["--keep", "1000"]);
    if case.is_filling() {
        waits_because(&mut protector, "not the newest");
    }
    drop(slow);
    assert_eq!(protector.wait("checkpoint")["full"], true);
    case.compare_next(&mut protector, restored);
    protector.end();
    case.guest.verify();
    case.guest.assert_sound();
}

#[test]
fn whoever_dies_at_whichever_step_of_the_end_of_the_fill_the_next_one_finds_out() {
    let lab = Lab::new();
    let case = Case::new(&lab, "steps", "128M", 24);
    let points: Vec<_> = POINTS.iter().filter(|point| point.starts_with("fill.")).collect();
    assert!(points.len() >= 7);
    for point in points {
        eprintln!("==== {point}");
        let fault = format!("{point}:kill");
        let environment = [("REKINDLE_FAULT", fault.as_str())];
        let all = ["--keep", "1000"];
        let of_pager = point.starts_with("fill.end.");
        let restored = if of_pager {
            crash(&case.guest);
            let restored = restore_with(&case.guest, &case.store, &[], &environment);
            wait_for("the pager to die, and another one in its place", DEADLINE, || {
                let told = fs::read_to_string(case.guest.file("helpers.json")).unwrap_or_default();
                told.contains("\"pager\"").then_some(())
            });
            restored["checkpoint"].as_u64().unwrap()
        } else {
            let (restored, slow) = case.restore();
            let mut protector = case.protect_with(&all, &environment);
            assert_eq!(protector.wait("attached")["filling"], true);
            drop(slow);
            protector.wait_killed();
            restored
        };
        let mut protector = case.protect(&all);
        for _ in 0..2 {
            case.compare_next(&mut protector, restored);
        }
        wait_for("the pager to end", DEADLINE, || (!case.guest.file("fill.json").exists()).then_some(()));
        protector.next_checkpoint();
        protector.end();
        assert_eq!(case.userfaultfds(), 1, "{point}: the protector's");
        case.guest.verify();
        case.guest.assert_sound();
    }
}
