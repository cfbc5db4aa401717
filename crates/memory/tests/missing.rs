//! The pager, with a process that reads its memory during the fill.
//!
//! To *fill* memory is to load its pages while the process that owns it runs. The *pager* does it, and first supplies
//! the pages that the process waits for. The process is called the *victim*.

#![allow(unsafe_code, reason = "the process's memory is a mapping of its own")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::victim::{self, Kind, PAGE, Victim, expected};
use common::wait_for;
use rekindle_kernel::inject::Injector;
use rekindle_kernel::process::Process;
use rekindle_kernel::userfault::remote;
use rekindle_memory::missing::{Content, Need, PageSource, Pager, PagerError};
use rekindle_memory::ram::GuestRam;
use rekindle_pages::{BlockId, Page, PageNo};
use rekindle_qemu::ramblock::RamBlock;
use rekindle_testing::hugepages::HugePages;
use rekindle_testing::process::descriptors;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[test]
#[ignore = "run by the other tests"]
fn victim() {
    victim::act();
}

/// The only block of a victim.
const RAM: BlockId = BlockId(0);

/// A page that is unavailable for some attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FailingPage {
    page: u64,
    failures_left: u32,
}

/// Supplies the pages that the reader expects.
#[derive(Default)]
struct Pattern {
    failing_page: Option<FailingPage>,
    /// Whether the source ends the pager after a failure.
    ends_after_failure: bool,
    /// Time to supply each page.
    delay: Duration,
    served: u64,
}

impl PageSource for Pattern {
    type Error = io::Error;

    fn page(&mut self, block: BlockId, PageNo(page): PageNo, buffer: &mut Page) -> io::Result<Content> {
        assert_eq!(block, RAM);
        if let Some(failing) = &mut self.failing_page
            && failing.page == page
            && failing.failures_left > 0
        {
            failing.failures_left -= 1;
            return Err(io::Error::other("the store is unreachable"));
        }
        std::thread::sleep(self.delay);
        self.served += 1;
        if page.is_multiple_of(3) {
            return Ok(Content::Zero);
        }
        for (n, word) in buffer.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *word = expected(page, n as u64).to_ne_bytes();
        }
        Ok(Content::Data)
    }

    fn retry(&mut self, _: &io::Error, _: u32) -> Option<Duration> {
        (!self.ends_after_failure).then_some(Duration::from_millis(1))
    }
}

fn every_block(_: &str) -> bool {
    true
}

fn never() -> AtomicBool {
    AtomicBool::new(false)
}

#[test]
fn every_page_is_right_during_the_fill_and_no_trace_is_left() {
    let huge = HugePages::add(16).ok();
    let mut kinds = vec![(Kind::Private, 4000), (Kind::Shared, 4000)];
    kinds.extend(huge.as_ref().map(|_| (Kind::Huge, 8)));
    for (kind, pages) in kinds {
        let mut reader = Victim::reader(kind, pages);
        let before = descriptors(reader.process.pid);
        let injector = Injector::new(reader.process).unwrap();
        let mut source = Pattern::default();
        let mut pager = Pager::begin(injector, &reader.ram, every_block, &mut source, None).unwrap();
        assert!(reader.is_registered());
        reader.begin();
        // Fills the second half of the pages first.
        let length = reader.ram.blocks()[0].info.used;
        let progress = pager.run(&mut source, [(0, length / 2..length)], &never()).unwrap();
        assert!(progress.complete && progress.left == 0 && progress.faults > 0, "{kind:?}: {progress:?}");
        assert!(progress.filled + progress.demanded > 0, "{kind:?}: {progress:?}");
        // Checked only while the reader runs: a process that has ended has no memory.
        if reader.is_reading() {
            assert!(!reader.is_registered());
            assert_eq!(descriptors(reader.process.pid), before);
        }
        reader.assert_all_right();
    }
}

#[test]
fn no_old_content_is_put_where_the_guest_has_given_pages_back() {
    for kind in [Kind::Private, Kind::Shared] {
        let mut giver = Victim::giver(kind, 1000);
        let injector = Injector::new(giver.process).unwrap();
        let mut source = Pattern { delay: Duration::from_micros(50), ..Pattern::default() };
        let mut pager = Pager::begin(injector, &giver.ram, every_block, &mut source, None).unwrap();
        // Some of the pages are filled before they are given back.
        let end = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (pager, source, end) = (&mut pager, &mut source, &end);
            let running = scope.spawn(move || pager.run(source, [(0, 0..400 * PAGE)], end).unwrap());
            let populated = || giver.ram.populated(&giver.ram.blocks()[0]).unwrap().bytes();
            wait_for(|| "some pages".into(), || (populated() > 100 * PAGE).then_some(()));
            end.store(true, Ordering::Relaxed);
            running.join().unwrap();
        });
        giver.begin();
        let progress = pager.run(&mut source, [], &never()).unwrap();
        assert!(progress.complete && progress.given_back > 0, "{progress:?}");
        giver.assert_all_right();
    }
}

#[test]
fn while_the_source_fails_for_one_page_only_its_readers_wait() {
    let mut reader = Victim::reader(Kind::Shared, 500);
    let injector = Injector::new(reader.process).unwrap();
    let mut source = Pattern { failing_page: Some(FailingPage { page: 100, failures_left: 50 }), ..Pattern::default() };
    let mut pager = Pager::begin(injector, &reader.ram, every_block, &mut source, None).unwrap();
    reader.begin();
    let progress = pager.run(&mut source, [], &never()).unwrap();
    assert_eq!(source.failing_page, Some(FailingPage { page: 100, failures_left: 0 }));
    assert!(progress.complete);
    reader.assert_all_right();
}

#[test]
fn the_error_names_an_unavailable_page_and_its_reader_waits_for_the_next_pager() {
    let mut reader = Victim::reader(Kind::Private, 500);
    let injector = Injector::new(reader.process).unwrap();
    let failing_page = Some(FailingPage { page: 101, failures_left: u32::MAX });
    let mut source = Pattern { failing_page, ends_after_failure: true, ..Pattern::default() };
    let mut pager = Pager::begin(injector, &reader.ram, every_block, &mut source, None).unwrap();
    reader.begin();
    let e = pager.run(&mut source, [], &never()).unwrap_err();
    assert!(matches!(&e, PagerError::Source { page: PageNo(101), block, .. } if block == "ram"), "{e}");
    drop(pager);
    assert!(reader.is_reading() && reader.is_registered());
    let mut source = Pattern::default();
    let mut next = Pager::take_over(injector, &reader.ram, every_block).unwrap().expect("a registration");
    assert!(next.progress().left < 500, "present pages are known");
    assert!(next.run(&mut source, [], &never()).unwrap().complete);
    assert!(source.served < 500);
    reader.assert_all_right();
}

/// The program of a pager that is killed, not a test. The environment names its victim.
#[test]
#[ignore = "run by the other tests"]
fn pager() {
    let Ok(victim) = std::env::var("REKINDLE_TEST_PAGED") else { return };
    let numbers: Vec<u64> = victim.split(' ').map(|word| word.parse().unwrap()).collect();
    let [pid, address, pages, is_first] = numbers[..] else { panic!("{victim}") };
    let process = Process::of(pid as u32).unwrap();
    let total = pages * PAGE;
    let block = RamBlock { id: "ram".into(), used: total, total, page_size: PAGE, offset: 0, address: Some(address) };
    let ram = GuestRam::from_blocks(process, vec![block]).unwrap();
    let mut source = Pattern { delay: Duration::from_micros(20), ..Pattern::default() };
    let injector = Injector::new(process).unwrap();
    let mut pager = match is_first {
        1 => Pager::begin(injector, &ram, every_block, &mut source, None).unwrap(),
        _ => Pager::take_over(injector, &ram, every_block).unwrap().expect("a registration"),
    };
    println!("serving");
    pager.run(&mut source, [], &never()).unwrap();
    println!("complete");
}

#[test]
fn pagers_are_killed_one_after_the_other_and_every_page_is_right() {
    for (kind, pages) in [(Kind::Private, 20_000), (Kind::Shared, 20_000)] {
        let mut reader = Victim::reader(kind, pages);
        let before = descriptors(reader.process.pid);
        let injector = Injector::new(reader.process).unwrap();
        let mut killed = 0;
        for round in 0.. {
            let address = reader.ram.blocks()[0].address;
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "pager", "--ignored", "--nocapture", "--test-threads=1"]);
            let arguments = format!("{} {address} {pages} {}", reader.process.pid, u32::from(round == 0));
            command.env("REKINDLE_TEST_PAGED", arguments).stdout(std::process::Stdio::piped());
            let mut child = command.spawn().unwrap();
            let mut output = io::BufReader::new(child.stdout.take().unwrap());
            let mut printed = String::new();
            while !printed.contains("serving") {
                assert!(io::BufRead::read_line(&mut output, &mut printed).unwrap() > 0, "{printed}");
            }
            if round == 0 {
                reader.begin();
            }
            // Some pagers are killed during the fill, some at its start.
            std::thread::sleep(Duration::from_millis(20 * (round % 3)));
            child.kill().unwrap();
            child.wait().unwrap();
            io::Read::read_to_string(&mut output, &mut printed).unwrap();
            if printed.contains("complete") {
                break;
            }
            killed += 1;
            if killed == 12 {
                break;
            }
            assert_eq!(remote::existing(reader.process).unwrap().len(), 1);
        }
        assert!(killed > 3, "{killed}");
        if let Some(mut last) = Pager::take_over(injector, &reader.ram, every_block).unwrap() {
            assert!(last.run(&mut Pattern::default(), [], &never()).unwrap().complete);
            assert_eq!(descriptors(reader.process.pid), before);
        }
        reader.assert_all_right();
    }
}

#[test]
fn pages_present_before_the_guest_ran_are_overwritten() {
    let mut reader = Victim::reader(Kind::Shared, 100);
    let block = &reader.ram.blocks()[0];
    for page in [0, 50, 51] {
        rekindle_kernel::memory::write(reader.process, block.address + page * PAGE, &[0x55; PAGE as usize]).unwrap();
    }
    let injector = Injector::new(reader.process).unwrap();
    let mut source = Pattern { failing_page: Some(FailingPage { page: 50, failures_left: 3 }), ..Pattern::default() };
    let mut pager = Pager::begin(injector, &reader.ram, every_block, &mut source, None).unwrap();
    reader.begin();
    assert!(pager.run(&mut source, [], &never()).unwrap().complete);
    reader.assert_all_right();
}

#[test]
fn the_neighbours_of_a_faulted_page_are_filled_too() {
    let mut reader = Victim::reader(Kind::Shared, 3000);
    let injector = Injector::new(reader.process).unwrap();
    let mut source = Pattern::default();
    let mut pager = Pager::begin(injector, &reader.ram, every_block, &mut source, None).unwrap();
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (pager, source, end) = (&mut pager, &mut source, &end);
        let serving = scope.spawn(move || pager.run_on_demand(source, end, &never()).unwrap());
        let block = &reader.ram.blocks()[0];
        // The test itself reads one page; no other access causes a fault.
        let mut byte = [0];
        rekindle_kernel::memory::read(reader.process, block.address + 1000 * PAGE, &mut byte).unwrap();
        let populated = || reader.ram.populated(block).unwrap().bytes();
        wait_for(|| "its neighbours".into(), || (populated() > 16 * PAGE).then_some(()));
        end.store(true, Ordering::Relaxed);
        let progress = serving.join().unwrap();
        assert_eq!(progress.demanded, 1, "{progress:?}");
        assert!(progress.filled > 0 && progress.left > 2900, "only its neighbours: {progress:?}");
    });
    reader.begin();
    assert!(pager.run(&mut source, [], &never()).unwrap().complete);
    reader.assert_all_right();
}

#[test]
fn until_the_guest_is_started_all_of_its_memory_is_filled() {
    let mut reader = Victim::reader(Kind::Shared, 3000);
    let injector = Injector::new(reader.process).unwrap();
    let mut source = Pattern { delay: Duration::from_micros(20), ..Pattern::default() };
    let mut pager = Pager::begin(injector, &reader.ram, every_block, &mut source, None).unwrap();
    let (end, waits) = (AtomicBool::new(false), AtomicBool::new(true));
    let before_start = std::thread::scope(|scope| {
        let (pager, source, end, waits) = (&mut pager, &mut source, &end, &waits);
        let serving = scope.spawn(move || pager.run_on_demand(source, end, waits).unwrap());
        let populated = || reader.ram.populated(&reader.ram.blocks()[0]).unwrap().bytes();
        wait_for(|| "some of it".into(), || (populated() > 100 * PAGE).then_some(()));
        waits.store(false, Ordering::Relaxed);
        end.store(true, Ordering::Relaxed);
        serving.join().unwrap()
    });
    assert!(
        before_start.filled > 100 && before_start.left > 0 && before_start.demanded == 0 && !before_start.complete,
        "{before_start:?}"
    );
    let (end, waits) = (AtomicBool::new(false), AtomicBool::new(true));
    let after_start = std::thread::scope(|scope| {
        let (pager, source, end, waits) = (&mut pager, &mut source, &end, &waits);
        let serving = scope.spawn(move || pager.run_on_demand(source, end, waits).unwrap());
        let populated = || reader.ram.populated(&reader.ram.blocks()[0]).unwrap().bytes();
        // A third of the pages is zero and not filled.
        wait_for(|| "the rest".into(), || (populated() == 2000 * PAGE).then_some(()));
        end.store(true, Ordering::Relaxed);
        serving.join().unwrap()
    });
    assert!(!after_start.complete, "more faults are possible: {after_start:?}");
    reader.begin();
    assert!(pager.run(&mut source, [], &never()).unwrap().complete);
    reader.assert_all_right();
}

#[test]
fn a_prefilled_page_is_not_fetched_again() {
    let mut reader = Victim::reader(Kind::Shared, 300);
    let injector = Injector::new(reader.process).unwrap();
    let mut source = Pattern::default();
    let mut pager = Pager::begin(injector, &reader.ram, every_block, &mut source, None).unwrap();
    let prefilled: Vec<u64> = (0..300).filter(|page| page % 3 != 0).collect();
    let mut content = [0; PAGE as usize];
    for &page in &prefilled {
        source.page(RAM, PageNo(page), &mut content).unwrap();
        pager.prefill_page(RAM, PageNo(page), &content).unwrap();
        // The page is present: other content is ignored.
        pager.prefill_page(RAM, PageNo(page), &[7; PAGE as usize]).unwrap();
    }
    pager.prefill_page(RAM, PageNo(300), &content).unwrap();
    pager.prefill_page(BlockId(1), PageNo(0), &content).unwrap();
    source.served = 0;
    reader.begin();
    assert!(pager.run(&mut source, [], &never()).unwrap().complete);
    reader.assert_all_right();
    assert_eq!(source.served, 100, "the pages that were not prefilled");
}

#[test]
fn a_pager_ends_when_its_flag_is_set_and_another_run_continues() {
    let mut reader = Victim::reader(Kind::Shared, 3000);
    let injector = Injector::new(reader.process).unwrap();
    let mut source = Pattern { delay: Duration::from_micros(100), ..Pattern::default() };
    let mut pager = Pager::begin(injector, &reader.ram, every_block, &mut source, None).unwrap();
    reader.begin();
    let end = AtomicBool::new(false);
    let progress = std::thread::scope(|scope| {
        let running = scope.spawn(|| pager.run(&mut source, [], &end).unwrap());
        wait_for(
            || "some pages".into(),
            || (reader.ram.populated(&reader.ram.blocks()[0]).unwrap().len() > 1).then_some(()),
        );
        end.store(true, Ordering::Relaxed);
        running.join().unwrap()
    });
    assert!(!progress.complete && progress.left > 0);
    assert!(pager.run(&mut source, [], &never()).unwrap().complete);
    reader.assert_all_right();
}

#[test]
fn a_pager_ends_with_its_process() {
    let reader = Victim::reader(Kind::Shared, 3000);
    let injector = Injector::new(reader.process).unwrap();
    let mut source = Pattern { delay: Duration::from_millis(1), ..Pattern::default() };
    let mut pager = Pager::begin(injector, &reader.ram, every_block, &mut source, None).unwrap();
    drop(reader);
    let e = pager.run(&mut source, [], &never()).unwrap_err();
    assert!(matches!(e, PagerError::QemuEnded { .. }), "{e}");
}

/// A source on another host: each page arrives a while after it was requested, and one only after `may_arrive` is set.
struct Distant<'a> {
    pattern: Pattern,
    requested: BTreeMap<u64, Instant>,
    held: u64,
    may_arrive: &'a AtomicBool,
    arrivals: OwnedFd,
    /// Pages that were supplied for faults.
    for_faults: &'a AtomicU64,
}

impl PageSource for Distant<'_> {
    type Error = io::Error;

    fn page(&mut self, _: BlockId, _: PageNo, _: &mut Page) -> io::Result<Content> {
        panic!("the pager waits for a page");
    }

    fn page_if_ready(
        &mut self,
        block: BlockId,
        page: PageNo,
        buffer: &mut Page,
        need: Need,
    ) -> io::Result<Option<Content>> {
        const LATENCY: Duration = Duration::from_micros(300);
        let requested = *self.requested.entry(page.0).or_insert_with(Instant::now);
        if requested.elapsed() < LATENCY || page.0 == self.held && !self.may_arrive.load(Ordering::Relaxed) {
            return Ok(None);
        }
        if need == Need::Fault {
            self.for_faults.fetch_add(1, Ordering::Relaxed);
        }
        self.pattern.page(block, page, buffer).map(Some)
    }

    fn arrivals(&self) -> Option<BorrowedFd<'_>> {
        Some(self.arrivals.as_fd())
    }

    fn retry(&mut self, _: &io::Error, _: u32) -> Option<Duration> {
        None
    }
}

#[test]
fn faults_are_served_while_a_page_is_on_its_way() {
    const PAGES: u64 = 600;
    let mut reader = Victim::reader(Kind::Shared, PAGES);
    let injector = Injector::new(reader.process).unwrap();
    let mut pager = Pager::register(injector, &reader.ram, every_block, None).unwrap();
    let (may_arrive, has_ended, for_faults) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    let arrivals = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let held = PAGES - 1;
    std::thread::scope(|scope| {
        let notify = arrivals.try_clone().unwrap();
        scope.spawn(|| {
            let notify = notify;
            while !has_ended.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_micros(200));
                rustix::io::write(&notify, &1u64.to_ne_bytes()).unwrap();
            }
        });
        let (may_arrive, for_faults) = (&may_arrive, &for_faults);
        let requested = BTreeMap::new();
        let mut source = Distant { pattern: Pattern::default(), requested, held, may_arrive, arrivals, for_faults };
        reader.begin();
        // The background waits for the page that does not come.
        let running = scope.spawn(move || pager.run(&mut source, [(0, held * PAGE..PAGES * PAGE)], &never()));
        wait_for(|| "faults".into(), || (for_faults.load(Ordering::Relaxed) > 20).then_some(()));
        may_arrive.store(true, Ordering::Relaxed);
        let progress = running.join().unwrap().unwrap();
        has_ended.store(true, Ordering::Relaxed);
        assert!(progress.complete && progress.left == 0, "{progress:?}");
    });
    reader.assert_all_right();
}

/// A source that fails for every page, and permits attempts without limit.
struct Unreachable;

impl PageSource for Unreachable {
    type Error = io::Error;

    fn page(&mut self, _: BlockId, _: PageNo, _: &mut Page) -> io::Result<Content> {
        Err(io::Error::other("the store is unreachable"))
    }

    fn retry(&mut self, _: &io::Error, _: u32) -> Option<Duration> {
        Some(Duration::from_millis(20))
    }
}

#[test]
fn a_pager_with_an_unreachable_source_ends_with_its_process() {
    let reader = Victim::reader(Kind::Shared, 500);
    let injector = Injector::new(reader.process).unwrap();
    let mut pager = Pager::begin(injector, &reader.ram, every_block, &mut Unreachable, None).unwrap();
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| pager.run(&mut Unreachable, [], &end));
        drop(reader);
        let deadline = Instant::now() + Duration::from_secs(30);
        while !serving.is_finished() && Instant::now() < deadline {
            std::thread::yield_now();
        }
        // A pager that does not end makes the test fail, not hang.
        end.store(true, Ordering::Relaxed);
        let e = serving.join().unwrap().unwrap_err();
        assert!(matches!(e, PagerError::QemuEnded { .. }), "{e}");
    });
}
