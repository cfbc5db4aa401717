//! Both trackers on a process whose threads write its memory at random: what they tell, put together, is the memory.

#![allow(unsafe_code, reason = "the process's memory is a mapping of its own")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::victim::{self, HugePages, Kind, PAGE, Victim};
use common::wait_for;
use rekindle_kernel::inject::Injector;
use rekindle_kernel::userfault::remote;
use rekindle_memory::ram::GuestRam;
use rekindle_memory::tracker::{Asynchronous, Dirty, Synchronous, TrackError, Tracker, leftovers, sweep};
use rekindle_qemu::stopped::Stopped;
use std::fs;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

#[test]
#[ignore = "run by the other tests"]
fn victim() {
    victim::act();
}

/// Bring a copy up to date.
fn apply(ram: &GuestRam, dirty: &Dirty, copy: &mut [u8]) {
    let block = &ram.blocks()[0];
    for run in &dirty.zero[0] {
        copy[run.start as usize..run.end as usize].fill(0);
    }
    for run in &dirty.written[0] {
        ram.read(block, std::slice::from_ref(run), &mut copy[run.start as usize..run.end as usize]).unwrap();
    }
}

#[track_caller]
fn assert_same(copy: &[u8], memory: &[u8], what: &str) {
    assert_same_but(copy, memory, what, |_| false);
}

/// That all pages are the same, but for those of the memory that `may_differ`.
#[track_caller]
fn assert_same_but(copy: &[u8], memory: &[u8], what: &str, may_differ: impl Fn(&[u8]) -> bool) {
    let pages = copy.chunks(PAGE as usize).zip(memory.chunks(PAGE as usize)).enumerate();
    let different = pages.filter(|(_, (copy, memory))| copy != memory && !may_differ(memory));
    let different: Vec<_> = different.map(|(page, _)| page).collect();
    assert!(different.is_empty(), "{what}: pages {different:?} differ");
}

/// Kinds of memory with a number of pages each, for one test at a time because of the huge ones.
struct Kinds {
    all: Vec<(Kind, u64)>,
    _huge: Option<HugePages>,
    _alone: MutexGuard<'static, ()>,
}

fn kinds() -> Kinds {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Twice as many as are used: a page that was given back is not free again at once, and its next writer would be
    // killed.
    let huge = HugePages::take(64);
    let mut all = vec![(Kind::Private, 8000), (Kind::Shared, 8000)];
    match huge {
        Some(_) => all.push((Kind::Huge, 32)),
        None => eprintln!("no huge pages: not run for them"),
    }
    Kinds { all, _huge: huge, _alone: alone }
}

#[test]
fn a_copy_that_follows_what_the_asynchronous_tracker_tells_is_the_memory_at_each_stop() {
    let kinds = kinds();
    for &(kind, pages) in &kinds.all {
        for give_back in [false, true] {
            let victim = Victim::start(kind, pages, give_back);
            let injector = Injector::new(victim.process).unwrap();
            let before = victim::descriptors(victim.process);
            let mut stopped = Stopped::vouched();
            victim.stop();
            let attached = Asynchronous::attach(injector, Arc::clone(&victim.ram), &mut stopped, None);
            let mut tracker = attached.unwrap_or_else(|e| panic!("{kind:?}: {e}: {:?}", std::error::Error::source(&e)));
            let mut copy = vec![0xff; victim.memory().len()];
            apply(&victim.ram, &Dirty::everything(&victim.ram).unwrap(), &mut copy);
            let (mut told, mut looked) = (0, 0);
            for round in 0..40 {
                // What the module's documentation says is not told: a shared page given back whose first write has begun.
                let excepted = |page: &[u8]| give_back && kind != Kind::Private && page.iter().all(|&byte| byte == 0);
                let what = format!("{kind:?}, {give_back}, round {round}");
                assert_same_but(&copy, &victim.memory(), &what, excepted);
                victim.go_on();
                thread::sleep(Duration::from_millis(5));
                looked += tracker.look().unwrap().bytes();
                victim.stop();
                let dirty = tracker.collect(&mut stopped).unwrap();
                told += dirty.bytes();
                apply(&victim.ram, &dirty, &mut copy);
                assert_eq!(tracker.look().unwrap().bytes(), 0, "begun anew");
            }
            assert!(looked > 0);
            assert!(told > 0 && (kind == Kind::Huge || told < 40 * copy.len() as u64 / 2), "{told}");
            victim.go_on();
            tracker.detach().unwrap();
            assert_eq!(victim::descriptors(victim.process), before);
            assert!(!victim.is_registered());
        }
    }
}

/// Copies pages as they are now into a copy of the memory.
fn into_copy(copy: Arc<Mutex<Vec<u8>>>) -> impl Fn(&GuestRam, usize, Range<u64>) + Send + Clone + 'static {
    move |ram, block, page| {
        let mut bytes = vec![0; (page.end - page.start) as usize];
        ram.read(&ram.blocks()[block], std::slice::from_ref(&page), &mut bytes).unwrap();
        copy.lock().unwrap()[page.start as usize..page.end as usize].copy_from_slice(&bytes);
    }
}

#[test]
fn the_synchronous_tracker_lets_every_page_be_copied_as_it_was_at_the_stop() {
    let kinds = kinds();
    for &(kind, pages) in &kinds.all {
        let victim = Victim::start(kind, pages, false);
        let injector = Injector::new(victim.process).unwrap();
        let before = victim::descriptors(victim.process);
        let mut stopped = Stopped::vouched();
        victim.stop();
        let copy = Arc::new(Mutex::new(victim.memory()));
        let save = into_copy(Arc::clone(&copy));
        let ram = Arc::clone(&victim.ram);
        let attached = Synchronous::attach(injector, ram, &mut stopped, save.clone(), None);
        let mut tracker = attached.unwrap_or_else(|e| panic!("{kind:?}: {e}: {:?}", std::error::Error::source(&e)));
        assert_eq!(victim::descriptors(victim.process), before, "ours alone");
        for round in 0..25 {
            victim.go_on();
            thread::sleep(Duration::from_millis(5));
            victim.stop();
            let dirty = tracker.collect(&mut stopped).unwrap();
            let now = victim.memory();
            let copied = tracker.copied_for_writers();
            tracker.begin(&dirty.written, &mut stopped).unwrap();
            let Err(TrackError::InFlight { bytes: left }) = tracker.collect(&mut stopped) else {
                panic!("{kind:?}, round {round}: collected while {} bytes were in flight", dirty.bytes())
            };
            // A fault of before the stop may be served only now: then its page is copied for it.
            let served = (tracker.copied_for_writers() - copied) * victim.ram.blocks()[0].told.page_size;
            let whole = dirty.bytes();
            assert!(
                left <= whole && left + served >= whole,
                "{kind:?}, round {round}: {left} of {whole}, {served} served"
            );
            victim.go_on();
            while let Some(claim) = tracker.claim(64 * PAGE) {
                for run in &claim.runs {
                    save(&victim.ram, claim.block, run.clone());
                }
            }
            wait_for(|| "the last pages to be copied for writers".into(), || tracker.landed().ok());
            // While the guest runs on, the copy is that of the stop.
            assert_same(&copy.lock().unwrap(), &now, &format!("{kind:?}, round {round}"));
        }
        assert!(tracker.faults() > 0 && tracker.copied_for_writers() > 0, "{kind:?}");
        tracker.detach().unwrap();
        assert_eq!(victim::descriptors(victim.process), before);
        assert!(!victim.is_registered());
    }
}

/// Threads that keep all processors busy, so that the thread of ours called `name` runs seldom, until this is dropped.
struct Busy {
    end: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

fn busy_beside(name: &str) -> Busy {
    for task in fs::read_dir("/proc/self/task").unwrap().flatten() {
        if fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name) {
            let (thread, none) =
                (task.file_name().to_str().unwrap().parse().unwrap(), libc::sched_param { sched_priority: 0 });
            // SAFETY: of a thread of ours; the kernel reads the parameter.
            assert_eq!(unsafe { libc::sched_setscheduler(thread, libc::SCHED_IDLE, &raw const none) }, 0);
        }
    }
    let end = Arc::new(AtomicBool::new(false));
    let one = || {
        let end = Arc::clone(&end);
        thread::spawn(move || while !end.load(Ordering::Relaxed) {})
    };
    let threads = (0..thread::available_parallelism().unwrap().get()).map(|_| one()).collect();
    Busy { end, threads }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

/// Two writers of a page, or one that a signal has taken out of its wait, have two faults, and the second one is served although the page
/// may be written already: here often after the pause that protects it again.
#[test]
fn a_fault_that_is_served_late_lets_no_page_be_written_before_it_is_copied() {
    let mut kinds = kinds();
    kinds.all.iter_mut().for_each(|(_, pages)| *pages = (*pages).min(60));
    for &(kind, pages) in &kinds.all {
        let victim = Victim::start(kind, pages, false);
        let injector = Injector::new(victim.process).unwrap();
        let mut stopped = Stopped::vouched();
        victim.stop();
        let copy = Arc::new(Mutex::new(victim.memory()));
        let save = into_copy(Arc::clone(&copy));
        let ram = Arc::clone(&victim.ram);
        let mut tracker = Synchronous::attach(injector, ram, &mut stopped, save.clone(), None).unwrap();
        let busy = busy_beside("write faults");
        for round in 0..60 {
            victim.go_on();
            thread::sleep(Duration::from_millis(5));
            victim.stop();
            let dirty = tracker.collect(&mut stopped).unwrap();
            let now = victim.memory();
            tracker.begin(&dirty.written, &mut stopped).unwrap();
            victim.go_on();
            thread::sleep(Duration::from_millis(1));
            while let Some(claim) = tracker.claim(4 * PAGE) {
                claim.runs.iter().for_each(|run| save(&victim.ram, claim.block, run.clone()));
            }
            wait_for(|| "the last pages to be copied for writers".into(), || tracker.landed().ok());
            assert_same(&copy.lock().unwrap(), &now, &format!("{kind:?}, round {round}"));
        }
        drop(busy);
        tracker.detach().unwrap();
    }
}

/// That the victim's threads still write.
fn assert_writes(victim: &Victim) {
    let before = victim.memory();
    wait_for(|| "the victim to write".into(), || (victim.memory() != before).then_some(()));
}

#[test]
fn a_synchronous_tracker_that_dies_frees_the_process() {
    let victim = Victim::start(Kind::Shared, 2000, false);
    let injector = Injector::new(victim.process).unwrap();
    victim.stop();
    let nothing = |_: &GuestRam, _: usize, _: Range<u64>| {};
    let tracker =
        Synchronous::attach(injector, Arc::clone(&victim.ram), &mut Stopped::vouched(), nothing, None).unwrap();
    victim.go_on();
    drop(tracker);
    assert_writes(&victim);
    assert!(!victim.is_registered());
}

#[test]
fn what_an_asynchronous_tracker_leaves_is_gone_on_with_or_swept() {
    let victim = Victim::start(Kind::Shared, 4000, false);
    let injector = Injector::new(victim.process).unwrap();
    let before = victim::descriptors(victim.process);
    let ram = || Arc::clone(&victim.ram);
    let mut stopped = Stopped::vouched();
    assert!(Asynchronous::resume(injector, ram(), &mut stopped).unwrap().is_none());
    victim.stop();
    let tracker = Asynchronous::attach(injector, ram(), &mut stopped, None).unwrap();
    let mut copy = victim.memory();
    // As if killed: nothing is undone.
    drop(tracker);
    victim.go_on();
    assert_writes(&victim);
    victim.stop();
    assert_eq!(leftovers(victim.process).unwrap().len(), 1);
    let mut again = Asynchronous::resume(injector, ram(), &mut stopped).unwrap().expect("it was left");
    let dirty = again.collect(&mut stopped).unwrap();
    assert!(dirty.bytes() > 0 && dirty.bytes() < copy.len() as u64);
    apply(&victim.ram, &dirty, &mut copy);
    assert_same(&copy, &victim.memory(), "resumed");
    // Attaching anew removes what is left of the old.
    drop(again);
    let anew = Asynchronous::attach(injector, ram(), &mut stopped, None).unwrap();
    assert_eq!(remote::existing(victim.process).unwrap().len(), 1);
    drop(anew);
    assert_eq!(sweep(injector).unwrap(), 1);
    assert_eq!(sweep(injector).unwrap(), 0);
    assert_eq!(victim::descriptors(victim.process), before);
    assert!(!victim.is_registered());
    victim.go_on();
    assert_writes(&victim);
}

#[test]
fn attaching_and_detaching_a_hundred_times_leaves_no_trace() {
    let victim = Victim::start(Kind::Private, 1000, false);
    let injector = Injector::new(victim.process).unwrap();
    let before = victim::descriptors(victim.process);
    let nothing = |_: &GuestRam, _: usize, _: Range<u64>| {};
    for round in 0..100 {
        let ram = Arc::clone(&victim.ram);
        let mut stopped = Stopped::vouched();
        victim.stop();
        if round % 2 == 0 {
            let tracker = Asynchronous::attach(injector, ram, &mut stopped, None).unwrap();
            victim.go_on();
            tracker.detach().unwrap();
        } else {
            let tracker = Synchronous::attach(injector, ram, &mut stopped, nothing, None).unwrap();
            victim.go_on();
            tracker.detach().unwrap();
        }
        assert_eq!(victim::descriptors(victim.process), before, "round {round}");
        assert!(!victim.is_registered(), "round {round}");
    }
    assert_writes(&victim);
}

/// Not a test: what `docs/attach.md` says it costs. `cargo test --release -p rekindle-memory --test tracker measure --
/// --ignored --nocapture`
#[test]
#[ignore = "prints figures"]
fn measure() {
    const DIRTY: u64 = 10_000;
    let milliseconds = |begun: Instant| begun.elapsed().as_secs_f64() * 1e3;
    let kinds = [(Kind::Shared, 512u64), (Kind::Shared, 2048), (Kind::Shared, 8192), (Kind::Private, 512)];
    for ((kind, mib), shrinks) in kinds.into_iter().flat_map(|kind| [(kind, true), (kind, false)]) {
        let mut victim = Victim::server(kind, mib << 8);
        if !shrinks {
            let told = victim.ram.blocks()[0].told.clone();
            victim.ram = Arc::new(GuestRam::from_blocks(victim.process, vec![told]).unwrap().never_shrinking());
        }
        let injector = Injector::new(victim.process).unwrap();
        let mut stopped = Stopped::vouched();
        let shared = Arc::clone(&victim.ram);
        let ram = || Arc::clone(&shared);
        println!("{kind:?} {mib} MiB, {}", if shrinks { "may shrink" } else { "never shrinks" });
        let calls = 200;
        let begun = Instant::now();
        for _ in 0..calls {
            injector.call(rekindle_kernel::inject::Call::new("getpid", libc::SYS_getpid, [])).unwrap();
        }
        println!("  system call inside the process: {:.3} ms", milliseconds(begun) / f64::from(calls));
        let nothing = |_: &GuestRam, _: usize, _: Range<u64>| {};
        let begun = Instant::now();
        let mut asynchronous = Asynchronous::attach(injector, ram(), &mut stopped, None).unwrap();
        println!("  asynchronous: attach {:.2} ms", milliseconds(begun));
        for round in 0..3 {
            let took = victim.write_some(DIRTY);
            let begun = Instant::now();
            let pages = asynchronous.look().unwrap().bytes() / PAGE;
            let looked = milliseconds(begun);
            let begun = Instant::now();
            let dirty = asynchronous.collect(&mut stopped).unwrap();
            let collected = milliseconds(begun);
            println!(
                "  asynchronous {round}: {pages} pages, {:.2} us a write, look {looked:.2} ms, collect {collected:.2} ms",
                took as f64 / 1e3 / DIRTY as f64
            );
            if round == 2 {
                let block = &victim.ram.blocks()[0];
                let mut buffer = vec![1; dirty.bytes() as usize];
                let begun = Instant::now();
                victim.ram.read(block, &dirty.written[0], &mut buffer).unwrap();
                let how = if block.file().is_some() { "pread" } else { "process_vm_readv" };
                let own = milliseconds(begun);
                let pieces = |run: &Range<u64>| (block.address + run.start, (run.end - run.start) as usize);
                let pieces: Vec<_> = dirty.written[0].iter().map(pieces).collect();
                let begun = Instant::now();
                rekindle_kernel::memory::read_pieces(victim.process, &pieces, &mut buffer).unwrap();
                let pages = dirty.bytes() / PAGE;
                println!(
                    "  {pages} scattered pages: {how} {own:.2} ms, process_vm_readv {:.2} ms",
                    milliseconds(begun)
                );
            }
        }
        let begun = Instant::now();
        asynchronous.detach().unwrap();
        println!("  asynchronous: detach {:.2} ms", milliseconds(begun));
        let begun = Instant::now();
        let mut synchronous = Synchronous::attach(injector, ram(), &mut stopped, nothing, None).unwrap();
        println!("  synchronous: attach {:.2} ms", milliseconds(begun));
        for (round, count) in [100, 1000, DIRTY].into_iter().enumerate() {
            let took = victim.write_some(count);
            let begun = Instant::now();
            let pages = synchronous.collect(&mut stopped).unwrap().bytes() / PAGE;
            println!(
                "  synchronous {round}: {pages} pages, {:.2} us a write, collect {:.2} ms",
                took as f64 / 1e3 / count as f64,
                milliseconds(begun)
            );
        }
        synchronous.detach().unwrap();
    }
}
