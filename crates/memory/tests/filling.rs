//! Tracking during a fill. At each stop, the last checkpoint overwritten with the reported pages must equal the memory.
//!
//! To *fill* memory is to load its pages while the process that owns it (here the *victim*) runs. The *pager* does it.
//! To *track* is to find the pages that were written since the last stop.

#![allow(unsafe_code, reason = "the process's memory is a mapping of its own")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::victim::{self, Kind, PAGE, Victim, expected};
use common::{apply, wait_for};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::userfault::remote;
use rekindle_memory::missing::{Completion, Content, PageSource, Pager};
use rekindle_memory::tracker::{Asynchronous, Filling, TrackError, Tracker};
use rekindle_pages::{BlockId, Page, PageNo};
use rekindle_qemu::stopped::Stopped;
use rekindle_testing::hugepages::HugePages;
use rekindle_testing::process::descriptors;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

#[test]
#[ignore = "run by the other tests"]
fn victim() {
    victim::act();
}

/// The checkpoint that pages are filled from. It slows down when it has supplied more than [`PAGES_AT_FULL_SPEED`]
/// pages per new checkpoint, so that checkpoints are taken during the fill on a busy machine too.
struct Checkpoint {
    delay: Duration,
    supplied: u32,
    taken: Arc<AtomicU32>,
}

/// Pages that are supplied at full speed for each new checkpoint.
const PAGES_AT_FULL_SPEED: u32 = 400;

fn fill_page(page: u64, buffer: &mut [u8]) -> Content {
    if page.is_multiple_of(3) {
        return Content::Zero;
    }
    for (n, word) in buffer.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = expected(page, n as u64).to_ne_bytes();
    }
    Content::Data
}

impl PageSource for Checkpoint {
    type Error = io::Error;

    fn page(&mut self, _: BlockId, PageNo(page): PageNo, buffer: &mut Page) -> io::Result<Content> {
        self.supplied += 1;
        let is_ahead = self.supplied > PAGES_AT_FULL_SPEED * (1 + self.taken.load(Ordering::SeqCst));
        thread::sleep(if is_ahead { Duration::from_millis(1) } else { self.delay });
        Ok(fill_page(page, buffer))
    }

    fn retry(&mut self, _: &io::Error, _: u32) -> Option<Duration> {
        None
    }
}

fn every_block(_: &str) -> bool {
    true
}

/// Asserts that a copy equals the memory, and that pages which are not filled have the content of `image`.
#[track_caller]
fn assert_same_or_missing(victim: &Victim, copy: &[u8], image: &[u8], give_back: bool, what: &str) {
    let memory = victim.memory();
    let size = PAGE as usize;
    let pages = copy.chunks(size).zip(memory.chunks(size)).zip(image.chunks(size)).enumerate();
    let wrong = pages.filter(|(_, ((copy, memory), image))| {
        // The page is missing, or zero in the checkpoint too, or given back (the exception in the tracker's
        // documentation).
        let absent = memory.iter().all(|&byte| byte == 0);
        copy != memory && !(absent && (copy == image || give_back))
    });
    let wrong: Vec<_> = wrong.map(|(page, _)| page).collect();
    assert!(wrong.is_empty(), "{what}: pages {wrong:?} differ");
}

fn populated(victim: &Victim) -> u64 {
    victim.ram.populated(&victim.ram.blocks()[0]).unwrap().bytes()
}

/// The tracker in use.
enum CurrentTracker {
    Filling(Box<Filling>),
    Own(Asynchronous),
}

fn attach(victim: &Victim) -> Box<Filling> {
    let injector = Injector::new(victim.process).unwrap();
    let attached = Filling::attach(injector, Arc::clone(&victim.ram), every_block, &mut Stopped::vouched(), None);
    let attached = attached.unwrap_or_else(|e| panic!("{e}: {:?}", std::error::Error::source(&e)));
    Box::new(attached.expect("the pager records"))
}

#[test]
fn a_checkpoint_overwritten_with_the_reported_pages_is_the_memory_at_each_stop() {
    let huge = HugePages::add(32).ok();
    let mut kinds = vec![(Kind::Private, 6000, false), (Kind::Shared, 6000, false)];
    kinds.extend([(Kind::Private, 6000, true), (Kind::Shared, 6000, true)]);
    kinds.extend(huge.as_ref().map(|_| (Kind::Huge, 16, false)));
    for (kind, pages, give_back) in kinds {
        let mut victim = Victim::mixer(kind, pages, give_back);
        let before = descriptors(victim.process.pid);
        let injector = Injector::new(victim.process).unwrap();
        let total = victim.ram.blocks()[0].info.used;
        let mut image = vec![0; total as usize];
        for (page, bytes) in image.chunks_mut(PAGE as usize).enumerate() {
            fill_page(page as u64, bytes);
        }
        let mut copy = image.clone();
        let taken = Arc::new(AtomicU32::new(0));
        let mut source = Checkpoint { delay: Duration::from_micros(60), supplied: 0, taken: Arc::clone(&taken) };
        let mut pager = Pager::begin(injector, &victim.ram, every_block, &mut source, None).unwrap();
        let (end, is_filled, is_handed_over) = (AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(false));
        let (mut rounds_after_hand_over, mut reported) = (0, 0);
        thread::scope(|scope| {
            let (mut pager, mut source, end, is_filled, is_handed_over) =
                (&mut pager, &mut source, &end, &is_filled, &is_handed_over);
            let completion = move || {
                is_filled.store(true, Ordering::SeqCst);
                if is_handed_over.load(Ordering::SeqCst) { Completion::HandedOver } else { Completion::Wait }
            };
            let mut running = Some(scope.spawn(move || {
                let progress = pager.run_until(source, [], end, completion).unwrap();
                (pager, source, progress)
            }));
            let mut stopped = Stopped::vouched();
            victim.begin();
            victim.stop();
            let mut current = CurrentTracker::Filling(attach(&victim));
            for round in 0.. {
                victim.resume();
                thread::sleep(Duration::from_millis(5));
                victim.stop();
                let dirty = match &mut current {
                    CurrentTracker::Filling(tracker) if is_filled.load(Ordering::SeqCst) && round > 25 => {
                        let (dirty, own) = tracker.hand_over(&mut stopped, None).unwrap();
                        current = CurrentTracker::Own(own);
                        is_handed_over.store(true, Ordering::SeqCst);
                        dirty
                    }
                    // The protector dies, and the record stays.
                    CurrentTracker::Filling(tracker) if round == 7 => {
                        *tracker = attach(&victim);
                        tracker.collect(&mut stopped).unwrap()
                    }
                    // The protector dies and loses the result of its last collection.
                    CurrentTracker::Filling(tracker) if round == 11 => {
                        tracker.collect(&mut stopped).unwrap();
                        *tracker = attach(&victim);
                        tracker.everything().unwrap()
                    }
                    CurrentTracker::Filling(tracker) => {
                        taken.fetch_add(u32::from(!is_filled.load(Ordering::SeqCst)), Ordering::SeqCst);
                        tracker.collect(&mut stopped).unwrap()
                    }
                    CurrentTracker::Own(own) => {
                        rounds_after_hand_over += 1;
                        own.collect(&mut stopped).unwrap()
                    }
                };
                reported += dirty.bytes();
                apply(&victim.ram, &dirty, &mut [&mut copy]);
                let what = format!("{kind:?}, {give_back}, round {round}");
                assert_same_or_missing(&victim, &copy, &image, give_back, &what);
                // The pager dies, and another one continues.
                if round == 15 && !is_filled.load(Ordering::SeqCst) {
                    end.store(true, Ordering::SeqCst);
                    (pager, source, _) = running.take().unwrap().join().unwrap();
                    end.store(false, Ordering::SeqCst);
                    *pager = Pager::take_over(injector, &victim.ram, every_block).unwrap().expect("a registration");
                    running = Some(scope.spawn(move || {
                        let progress = pager.run_until(source, [], end, completion).unwrap();
                        (pager, source, progress)
                    }));
                }
                if rounds_after_hand_over == 15 {
                    break;
                }
                assert!(round < 10_000, "{} of {total} bytes are filled", populated(&victim));
            }
            let (_, _, progress) = running.unwrap().join().unwrap();
            assert!(progress.complete, "{kind:?}: {progress:?}");
            assert_eq!(
                remote::existing(victim.process).unwrap().len(),
                1,
                "{kind:?}: the tracker's, the pager's is closed"
            );
            let CurrentTracker::Own(own) = current else { panic!("not handed over") };
            victim.resume();
            own.detach().unwrap();
        });
        let taken = taken.load(Ordering::SeqCst);
        assert!(taken > 5, "{kind:?}: {taken} checkpoints during the fill");
        assert!(reported > 0, "{kind:?}");
        assert_eq!(descriptors(victim.process.pid), before, "{kind:?}");
        assert!(!victim.is_registered());
        victim.end();
    }
}

#[test]
fn missing_pages_are_neither_reported_nor_read_and_a_read_page_does_not_count_as_written() {
    let mut reader = Victim::mixer(Kind::Shared, 3000, false);
    let injector = Injector::new(reader.process).unwrap();
    let mut source = Checkpoint {
        delay: Duration::ZERO,
        supplied: 0,
        taken: Arc::new(AtomicU32::new(u32::MAX / PAGES_AT_FULL_SPEED - 1)),
    };
    let mut pager = Pager::begin(injector, &reader.ram, every_block, &mut source, None).unwrap();
    let end = AtomicBool::new(false);
    // All pages are filled, and none is written.
    thread::scope(|scope| {
        let (pager, source, end) = (&mut pager, &mut source, &end);
        let running = scope.spawn(move || pager.run_until(source, [], end, || Completion::Wait).unwrap());
        wait_for(|| "all pages that are not zero".into(), || (populated(&reader) == 2000 * PAGE).then_some(()));
        let mut tracker = attach(&reader);
        // One page was written, by the tracker's test.
        let dirty = tracker.collect(&mut Stopped::vouched()).unwrap();
        assert_eq!((dirty.bytes(), dirty.zero[0].len()), (PAGE, 0));
        assert_eq!(tracker.collect(&mut Stopped::vouched()).unwrap().bytes(), 0);
        assert_eq!(tracker.everything().unwrap().bytes(), 2000 * PAGE);
        assert_eq!(tracker.everything().unwrap().zero[0].len(), 0, "a hole that has not been given back is not zero");
        end.store(true, Ordering::SeqCst);
        running.join().unwrap();
    });
    // The pager ends its record: the result is an error, not "nothing was written".
    let mut tracker = attach(&reader);
    assert!(pager.run(&mut source, [], &AtomicBool::new(false)).unwrap().complete);
    let e = tracker.collect(&mut Stopped::vouched()).unwrap_err();
    assert!(matches!(&e, TrackError::Filled { id } if id == "ram"), "{e}");
    assert!(
        Filling::attach(injector, Arc::clone(&reader.ram), every_block, &mut Stopped::vouched(), None)
            .unwrap()
            .is_none()
    );
    reader.begin();
    reader.end();
}
