//! Both trackers, with a process whose threads write its memory at random. A copy that is updated with the reported
//! pages must equal the memory.

#![allow(unsafe_code, reason = "the process's memory is a mapping of its own")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::victim::{self, Kind, PAGE, Victim};
use common::{apply, wait_for};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::userfault::remote;
use rekindle_memory::ram::GuestRam;
use rekindle_memory::tracker::{Asynchronous, Dirty, Synchronous, TrackError, Tracker, close_leftovers, leftovers};
use rekindle_pages::BlockId;
use rekindle_qemu::stopped::Stopped;
use rekindle_testing::hugepages::HugePages;
use rekindle_testing::process::descriptors;
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

#[track_caller]
fn assert_same(copy: &[u8], memory: &[u8], what: &str) {
    assert_same_except(copy, memory, what, |_| false);
}

/// Asserts that all pages are equal, except pages of the memory for which `may_differ` returns true.
#[track_caller]
fn assert_same_except(copy: &[u8], memory: &[u8], what: &str, may_differ: impl Fn(&[u8]) -> bool) {
    let pages = copy.chunks(PAGE as usize).zip(memory.chunks(PAGE as usize)).enumerate();
    let different = pages.filter(|(_, (copy, memory))| copy != memory && !may_differ(memory));
    let different: Vec<_> = different.map(|(page, _)| page).collect();
    assert!(different.is_empty(), "{what}: pages {different:?} differ");
}

/// Kinds of memory with a number of pages each. Only one test at a time uses them, because of the huge pages.
struct Kinds {
    with_pages: Vec<(Kind, u64)>,
    _huge: Option<HugePages>,
    _one_test_at_a_time: MutexGuard<'static, ()>,
}

fn kinds() -> Kinds {
    static ONE_TEST_AT_A_TIME: Mutex<()> = Mutex::new(());
    let guard = ONE_TEST_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    // Twice the pages in use: a page that was given back is not free immediately, and without a free page its next
    // writer would be killed.
    let huge = HugePages::add(64).ok();
    let mut with_pages = vec![(Kind::Private, 8000), (Kind::Shared, 8000)];
    match huge {
        Some(_) => with_pages.push((Kind::Huge, 32)),
        None => eprintln!("no huge pages: not run for them"),
    }
    Kinds { with_pages, _huge: huge, _one_test_at_a_time: guard }
}

#[test]
fn a_copy_updated_from_the_asynchronous_tracker_is_the_memory_at_each_stop() {
    let kinds = kinds();
    for &(kind, pages) in &kinds.with_pages {
        for give_back in [false, true] {
            let victim = Victim::start(kind, pages, give_back);
            let injector = Injector::new(victim.process).unwrap();
            let before = descriptors(victim.process.pid);
            let mut stopped = Stopped::vouched();
            victim.stop();
            let attached = Asynchronous::attach(injector, Arc::clone(&victim.ram), &mut stopped, None);
            let mut tracker = attached.unwrap_or_else(|e| panic!("{kind:?}: {e}: {:?}", std::error::Error::source(&e)));
            let mut copy = vec![0xff; victim.memory().len()];
            apply(&victim.ram, &Dirty::everything(&victim.ram).unwrap(), &mut [&mut copy]);
            let (mut reported, mut peeked) = (0, 0);
            for round in 0..40 {
                // The exception in the module's documentation: a shared page given back whose first write has started.
                let excepted = |page: &[u8]| give_back && kind != Kind::Private && page.iter().all(|&byte| byte == 0);
                let what = format!("{kind:?}, {give_back}, round {round}");
                assert_same_except(&copy, &victim.memory(), &what, excepted);
                victim.resume();
                thread::sleep(Duration::from_millis(5));
                peeked += tracker.peek().unwrap().bytes();
                if round % 2 == 1 {
                    tracker.prepare().unwrap();
                    thread::sleep(Duration::from_millis(2));
                }
                victim.stop();
                let dirty = tracker.collect(&mut stopped).unwrap();
                reported += dirty.bytes();
                apply(&victim.ram, &dirty, &mut [&mut copy]);
                assert_eq!(tracker.peek().unwrap().bytes(), 0, "the record is reset");
            }
            assert!(peeked > 0);
            assert!(reported > 0 && (kind == Kind::Huge || reported < 40 * copy.len() as u64 / 2), "{reported}");
            victim.resume();
            tracker.detach().unwrap();
            assert_eq!(descriptors(victim.process.pid), before);
            assert!(!victim.is_registered());
        }
    }
}

#[test]
fn a_copy_updated_while_the_memory_is_written_is_the_memory_at_each_stop() {
    for give_back in [false, true] {
        let victim = Victim::start(Kind::Private, 8000, give_back);
        let injector = Injector::new(victim.process).unwrap();
        let mut stopped = Stopped::vouched();
        let attached = Asynchronous::attach_running(injector, Arc::clone(&victim.ram), None);
        let (mut tracker, everything) = attached.unwrap();
        let mut copy = vec![0xff; 8000 * PAGE as usize];
        apply(&victim.ram, &everything.vouched(), &mut [&mut copy]);
        let mut collected_running = 0;
        for round in 0..40 {
            for _ in 0..3 {
                let dirty = tracker.collect_running().unwrap().vouched();
                collected_running += dirty.bytes();
                apply(&victim.ram, &dirty, &mut [&mut copy]);
            }
            victim.stop();
            tracker.prove(&mut stopped).unwrap();
            apply(&victim.ram, &tracker.collect(&mut stopped).unwrap(), &mut [&mut copy]);
            assert_same(&copy, &victim.memory(), &format!("give back: {give_back}, round {round}"));
            victim.resume();
        }
        assert!(collected_running > 0);
        tracker.detach().unwrap();
        assert!(!victim.is_registered());
    }
}

/// Returns a function that copies a page's current content into a copy of the memory.
fn into_copy(copy: Arc<Mutex<Vec<u8>>>) -> impl Fn(&GuestRam, BlockId, Range<u64>) + Send + Clone + 'static {
    move |ram, block, page| {
        let mut bytes = vec![0; (page.end - page.start) as usize];
        ram.read(ram.block(block).unwrap(), std::slice::from_ref(&page), &mut bytes).unwrap();
        copy.lock().unwrap()[page.start as usize..page.end as usize].copy_from_slice(&bytes);
    }
}

#[test]
fn with_the_synchronous_tracker_every_page_is_copied_as_it_was_at_the_stop() {
    let kinds = kinds();
    for &(kind, pages) in &kinds.with_pages {
        let victim = Victim::start(kind, pages, false);
        let injector = Injector::new(victim.process).unwrap();
        let before = descriptors(victim.process.pid);
        let mut stopped = Stopped::vouched();
        victim.stop();
        let copy = Arc::new(Mutex::new(victim.memory()));
        let save = into_copy(Arc::clone(&copy));
        let ram = Arc::clone(&victim.ram);
        let attached = Synchronous::attach(injector, ram, &mut stopped, save.clone(), None);
        let mut tracker = attached.unwrap_or_else(|e| panic!("{kind:?}: {e}: {:?}", std::error::Error::source(&e)));
        assert_eq!(descriptors(victim.process.pid), before, "only this process has the descriptor");
        for round in 0..25 {
            victim.resume();
            thread::sleep(Duration::from_millis(5));
            // On a busy machine it may not have run yet.
            wait_for(|| "a write".into(), || (tracker.peek().unwrap().bytes() > 0).then_some(()));
            victim.stop();
            let dirty = tracker.collect(&mut stopped).unwrap();
            let memory_at_stop = victim.memory();
            let copied_before = tracker.copied_for_writers();
            tracker.begin(&dirty.written, &mut stopped).unwrap();
            let Err(TrackError::InFlight { bytes: bytes_in_flight }) = tracker.collect(&mut stopped) else {
                panic!("{kind:?}, round {round}: collected while {} bytes were in flight", dirty.bytes())
            };
            // A fault from before the stop may be served only now, which copies its page.
            let copied_pages = tracker.copied_for_writers() - copied_before;
            let copied_bytes = copied_pages * victim.ram.blocks()[0].info.page_size;
            let dirty_bytes = dirty.bytes();
            assert!(
                bytes_in_flight <= dirty_bytes && bytes_in_flight + copied_bytes >= dirty_bytes,
                "{kind:?}, round {round}: {bytes_in_flight} of {dirty_bytes}, {copied_bytes} copied for writers"
            );
            victim.resume();
            while let Some(claim) = tracker.claim(64 * PAGE) {
                for run in &claim.runs {
                    save(&victim.ram, claim.block, run.clone());
                }
            }
            wait_for(|| "the last pages to be copied for writers".into(), || tracker.check_all_copied().ok());
            // The guest runs, but the copy must have the content of the stop.
            assert_same(&copy.lock().unwrap(), &memory_at_stop, &format!("{kind:?}, round {round}"));
        }
        assert!(tracker.faults() > 0 && tracker.copied_for_writers() > 0, "{kind:?}");
        tracker.detach().unwrap();
        assert_eq!(descriptors(victim.process.pid), before);
        assert!(!victim.is_registered());
    }
}

/// Threads that keep all processors busy until this is dropped.
struct BusyThreads {
    end: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

/// Gives the thread called `name` the lowest priority and keeps all processors busy, so that it runs rarely.
fn starve(name: &str) -> BusyThreads {
    for task in fs::read_dir("/proc/self/task").unwrap().flatten() {
        if fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name) {
            let (thread, none) =
                (task.file_name().to_str().unwrap().parse().unwrap(), libc::sched_param { sched_priority: 0 });
            // SAFETY: the thread is of this process; the kernel only reads the parameter.
            assert_eq!(unsafe { libc::sched_setscheduler(thread, libc::SCHED_IDLE, &raw const none) }, 0);
        }
    }
    let end = Arc::new(AtomicBool::new(false));
    let spawn_busy_thread = || {
        let end = Arc::clone(&end);
        thread::spawn(move || while !end.load(Ordering::Relaxed) {})
    };
    let threads = (0..thread::available_parallelism().unwrap().get()).map(|_| spawn_busy_thread()).collect();
    BusyThreads { end, threads }
}

impl Drop for BusyThreads {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

/// Two writers of a page, or a writer whose wait was interrupted by a signal, cause two faults. The second fault is
/// served although the write is allowed already; in this test often after the pause that protects the page again.
#[test]
fn a_fault_that_is_served_late_does_not_allow_a_write_before_the_page_is_copied() {
    let mut kinds = kinds();
    kinds.with_pages.iter_mut().for_each(|(_, pages)| *pages = (*pages).min(60));
    for &(kind, pages) in &kinds.with_pages {
        let victim = Victim::start(kind, pages, false);
        let injector = Injector::new(victim.process).unwrap();
        let mut stopped = Stopped::vouched();
        victim.stop();
        let copy = Arc::new(Mutex::new(victim.memory()));
        let save = into_copy(Arc::clone(&copy));
        let ram = Arc::clone(&victim.ram);
        let mut tracker = Synchronous::attach(injector, ram, &mut stopped, save.clone(), None).unwrap();
        let busy = starve("write faults");
        for round in 0..60 {
            victim.resume();
            thread::sleep(Duration::from_millis(5));
            victim.stop();
            let dirty = tracker.collect(&mut stopped).unwrap();
            let memory_at_stop = victim.memory();
            tracker.begin(&dirty.written, &mut stopped).unwrap();
            victim.resume();
            thread::sleep(Duration::from_millis(1));
            while let Some(claim) = tracker.claim(4 * PAGE) {
                claim.runs.iter().for_each(|run| save(&victim.ram, claim.block, run.clone()));
            }
            wait_for(|| "the last pages to be copied for writers".into(), || tracker.check_all_copied().ok());
            assert_same(&copy.lock().unwrap(), &memory_at_stop, &format!("{kind:?}, round {round}"));
        }
        drop(busy);
        tracker.detach().unwrap();
    }
}

/// Asserts that the victim's threads still write.
fn assert_writes(victim: &Victim) {
    let before = victim.memory();
    wait_for(|| "the victim to write".into(), || (victim.memory() != before).then_some(()));
}

#[test]
fn the_process_continues_when_a_synchronous_tracker_dies() {
    let victim = Victim::start(Kind::Shared, 2000, false);
    let injector = Injector::new(victim.process).unwrap();
    victim.stop();
    let nothing = |_: &GuestRam, _: BlockId, _: Range<u64>| {};
    let tracker =
        Synchronous::attach(injector, Arc::clone(&victim.ram), &mut Stopped::vouched(), nothing, None).unwrap();
    victim.resume();
    drop(tracker);
    assert_writes(&victim);
    assert!(!victim.is_registered());
}

#[test]
fn the_record_of_a_dead_asynchronous_tracker_is_resumed_or_removed() {
    let victim = Victim::start(Kind::Shared, 4000, false);
    let injector = Injector::new(victim.process).unwrap();
    let before = descriptors(victim.process.pid);
    let ram = || Arc::clone(&victim.ram);
    let mut stopped = Stopped::vouched();
    assert!(Asynchronous::resume(injector, ram(), &mut stopped).unwrap().is_none());
    victim.stop();
    let tracker = Asynchronous::attach(injector, ram(), &mut stopped, None).unwrap();
    let mut copy = victim.memory();
    // Like after a kill, nothing is undone.
    drop(tracker);
    victim.resume();
    assert_writes(&victim);
    victim.stop();
    assert_eq!(leftovers(victim.process).unwrap().len(), 1);
    let mut resumed = Asynchronous::resume(injector, ram(), &mut stopped).unwrap().expect("a record");
    let dirty = resumed.collect(&mut stopped).unwrap();
    assert!(dirty.bytes() > 0 && dirty.bytes() < copy.len() as u64);
    apply(&victim.ram, &dirty, &mut [&mut copy]);
    assert_same(&copy, &victim.memory(), "resumed");
    // A new tracker removes the old one's descriptor.
    drop(resumed);
    let new = Asynchronous::attach(injector, ram(), &mut stopped, None).unwrap();
    assert_eq!(remote::existing(victim.process).unwrap().len(), 1);
    drop(new);
    assert_eq!(close_leftovers(injector).unwrap(), 1);
    assert_eq!(close_leftovers(injector).unwrap(), 0);
    assert_eq!(descriptors(victim.process.pid), before);
    assert!(!victim.is_registered());
    victim.resume();
    assert_writes(&victim);
}

#[test]
fn attaching_and_detaching_a_hundred_times_leaves_no_trace() {
    let victim = Victim::start(Kind::Private, 1000, false);
    let injector = Injector::new(victim.process).unwrap();
    let before = descriptors(victim.process.pid);
    let nothing = |_: &GuestRam, _: BlockId, _: Range<u64>| {};
    for round in 0..100 {
        let ram = Arc::clone(&victim.ram);
        let mut stopped = Stopped::vouched();
        victim.stop();
        if round % 2 == 0 {
            let tracker = Asynchronous::attach(injector, ram, &mut stopped, None).unwrap();
            victim.resume();
            tracker.detach().unwrap();
        } else {
            let tracker = Synchronous::attach(injector, ram, &mut stopped, nothing, None).unwrap();
            victim.resume();
            tracker.detach().unwrap();
        }
        assert_eq!(descriptors(victim.process.pid), before, "round {round}");
        assert!(!victim.is_registered(), "round {round}");
    }
    assert_writes(&victim);
}

/// Measures the figures of `docs/internals/attach.md`; not a test.
///
/// `cargo test --release -p rekindle-memory --test tracker measure -- --ignored --nocapture`
#[test]
#[ignore = "prints figures"]
fn measure() {
    /// Number of random pages that are written before each measurement.
    const WRITES: u64 = 10_000;
    let milliseconds = |start: Instant| start.elapsed().as_secs_f64() * 1e3;
    let kinds = [(Kind::Shared, 512u64), (Kind::Shared, 2048), (Kind::Shared, 8192), (Kind::Private, 512)];
    for ((kind, mib), shrinks) in kinds.into_iter().flat_map(|kind| [(kind, true), (kind, false)]) {
        let mut victim = Victim::server(kind, mib << 8);
        if !shrinks {
            let block = victim.ram.blocks()[0].info.clone();
            victim.ram = Arc::new(GuestRam::from_blocks(victim.process, vec![block]).unwrap().never_shrinking());
        }
        let injector = Injector::new(victim.process).unwrap();
        let mut stopped = Stopped::vouched();
        let shared = Arc::clone(&victim.ram);
        let ram = || Arc::clone(&shared);
        println!("{kind:?} {mib} MiB, {}", if shrinks { "may shrink" } else { "never shrinks" });
        let calls = 200;
        let start = Instant::now();
        for _ in 0..calls {
            injector.call(rekindle_kernel::inject::Call::new("getpid", libc::SYS_getpid, [])).unwrap();
        }
        println!("  system call inside the process: {:.3} ms", milliseconds(start) / f64::from(calls));
        let nothing = |_: &GuestRam, _: BlockId, _: Range<u64>| {};
        let start = Instant::now();
        let mut asynchronous = Asynchronous::attach(injector, ram(), &mut stopped, None).unwrap();
        println!("  asynchronous: attach {:.2} ms", milliseconds(start));
        for round in 0..3 {
            let took = victim.write_some(WRITES);
            let start = Instant::now();
            let pages = asynchronous.peek().unwrap().bytes() / PAGE;
            let peeked = milliseconds(start);
            let start = Instant::now();
            let dirty = asynchronous.collect(&mut stopped).unwrap();
            let collected = milliseconds(start);
            println!(
                "  asynchronous {round}: {pages} pages, {:.2} us a write, peek {peeked:.2} ms, collect {collected:.2} ms",
                took as f64 / 1e3 / WRITES as f64
            );
            if round == 2 {
                let block = &victim.ram.blocks()[0];
                let mut buffer = vec![1; dirty.bytes() as usize];
                let start = Instant::now();
                victim.ram.read(block, &dirty.written[0], &mut buffer).unwrap();
                let how = if block.file().is_some() { "pread" } else { "process_vm_readv" };
                let own = milliseconds(start);
                let pieces = |run: &Range<u64>| (block.address + run.start, (run.end - run.start) as usize);
                let pieces: Vec<_> = dirty.written[0].iter().map(pieces).collect();
                let start = Instant::now();
                rekindle_kernel::memory::read_pieces(victim.process, &pieces, &mut buffer).unwrap();
                let pages = dirty.bytes() / PAGE;
                println!(
                    "  {pages} scattered pages: {how} {own:.2} ms, process_vm_readv {:.2} ms",
                    milliseconds(start)
                );
            }
        }
        let start = Instant::now();
        asynchronous.detach().unwrap();
        println!("  asynchronous: detach {:.2} ms", milliseconds(start));
        let start = Instant::now();
        let mut synchronous = Synchronous::attach(injector, ram(), &mut stopped, nothing, None).unwrap();
        println!("  synchronous: attach {:.2} ms", milliseconds(start));
        for (round, count) in [100, 1000, WRITES].into_iter().enumerate() {
            let took = victim.write_some(count);
            let start = Instant::now();
            let pages = synchronous.collect(&mut stopped).unwrap().bytes() / PAGE;
            println!(
                "  synchronous {round}: {pages} pages, {:.2} us a write, collect {:.2} ms",
                took as f64 / 1e3 / count as f64,
                milliseconds(start)
            );
        }
        synchronous.detach().unwrap();
    }
}
