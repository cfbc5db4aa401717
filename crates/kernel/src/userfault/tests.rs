//! userfaultfd on memory of this process and of a child.

use super::*;
use crate::inject::Injector;
use crate::maps;
use crate::memory;
use crate::process::Process;
use crate::testing::{Area, Kind};
use rekindle_pages::PAGE_SIZE;
use rekindle_testing::process::descriptors;
use rustix::event::{PollFd, PollFlags, poll};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

const PAGE: u64 = PAGE_SIZE as u64;

fn wait_event(userfault: &Userfault) -> Event {
    let end = Instant::now() + std::time::Duration::from_secs(20);
    loop {
        let _ =
            poll(&mut [PollFd::new(userfault, PollFlags::IN)], Some(&rustix::time::Timespec { tv_sec: 1, tv_nsec: 0 }));
        if let Some(event) = userfault.events().unwrap().into_iter().next() {
            return event;
        }
        assert!(Instant::now() < end, "no event");
    }
}

#[test]
fn a_missing_page_is_waited_for_and_an_existing_one_is_reported() {
    let area = Area::new(Kind::Shared, 8);
    let userfault = Userfault::own(Features::MISSING_SHMEM).unwrap();
    userfault.register(area.range(), Mode::MISSING).unwrap();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| area.get(3));
        match wait_event(&userfault) {
            Event::Fault { address, write: false, write_protected: false, minor: false } => {
                assert_eq!(address, area.address(3));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(userfault.copy(area.address(2), &[7; 2 * PAGE_SIZE], true).unwrap(), Filled::All);
        assert_eq!(reader.join().unwrap(), 7);
    });
    assert_eq!(userfault.copy(area.address(0), &[8; 4 * PAGE_SIZE], true).unwrap(), Filled::Exists(2 * PAGE));
    assert_eq!(userfault.zero(area.address(4)..area.address(6), true).unwrap(), Filled::All);
    userfault.unregister(area.range()).unwrap();
    let bytes: Vec<_> = (0..8).map(|page| area.get(page)).collect();
    assert_eq!(bytes, [8, 8, 7, 7, 0, 0, 0, 0]);
    assert_eq!(userfault.copy(area.address(7), &[1; PAGE_SIZE], true).unwrap(), Filled::Gone(0));
}

#[test]
fn a_write_to_a_protected_page_waits_until_it_is_allowed() {
    for kind in [Kind::Shared, Kind::Private] {
        let area = Area::new(kind, 4);
        area.set(1, 5);
        let features = Features::WP_HUGETLBFS_SHMEM | Features::WP_UNPOPULATED | Features::PAGEFAULT_FLAG_WP;
        let userfault = Userfault::own(features).unwrap();
        userfault.register(area.range(), Mode::WRITE_PROTECT).unwrap();
        userfault.write_protect(area.range(), true).unwrap();
        for page in [1, 2] {
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| area.set(page, 9));
                match wait_event(&userfault) {
                    Event::Fault { address, write: true, write_protected: true, .. } => {
                        assert_eq!(address, area.address(page));
                    }
                    other => panic!("{other:?}"),
                }
                assert_eq!(area.get(page), if page == 1 { 5 } else { 0 }, "not yet written");
                userfault.write_protect(area.address(page)..area.address(page + 1), false).unwrap();
                writer.join().unwrap();
            });
            assert_eq!(area.get(page), 9);
        }
    }
}

#[test]
fn closing_the_last_descriptor_lets_writers_continue() {
    let area = Area::new(Kind::Shared, 1);
    area.set(0, 1);
    let userfault = Userfault::own(Features::WP_HUGETLBFS_SHMEM | Features::PAGEFAULT_FLAG_WP).unwrap();
    userfault.register(area.range(), Mode::WRITE_PROTECT).unwrap();
    userfault.write_protect(area.range(), true).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| area.set(0, 2));
        wait_event(&userfault);
        drop(userfault);
        writer.join().unwrap();
    });
    assert_eq!(area.get(0), 2);
}

#[test]
fn a_fault_that_was_read_is_reported_again_after_a_wake_only() {
    let area = Area::new(Kind::Shared, 2);
    let userfault = Userfault::own(Features::MISSING_SHMEM).unwrap();
    userfault.register(area.range(), Mode::MISSING).unwrap();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| area.get(1));
        wait_event(&userfault);
        assert!(userfault.events().unwrap().is_empty());
        userfault.wake(area.range()).unwrap();
        assert!(matches!(wait_event(&userfault), Event::Fault { address, .. } if address == area.address(1)));
        userfault.zero(area.address(1)..area.address(2), true).unwrap();
        assert_eq!(reader.join().unwrap(), 0);
    });
}

#[test]
fn a_page_is_poisoned_once_and_may_be_filled_later() {
    let area = Area::new(Kind::Shared, 2);
    let userfault = Userfault::own(Features::MISSING_SHMEM | Features::POISON).unwrap();
    userfault.register(area.range(), Mode::MISSING).unwrap();
    assert_eq!(userfault.poison(area.address(1)..area.address(2)).unwrap(), Filled::All);
    assert_eq!(userfault.poison(area.range()).unwrap(), Filled::Exists(PAGE));
    assert_eq!(userfault.copy(area.address(1), &[1; PAGE_SIZE], true).unwrap(), Filled::All);
    assert_eq!(area.get(1), 1);
}

#[test]
fn pages_given_back_are_reported() {
    let area = Area::new(Kind::Private, 4);
    area.set(2, 1);
    let userfault = Userfault::own(Features::EVENT_REMOVE).unwrap();
    userfault.register(area.range(), Mode::MISSING).unwrap();
    std::thread::scope(|scope| {
        let giver = scope.spawn(|| area.give_back(2));
        let range = area.address(2)..area.address(3);
        assert!(matches!(wait_event(&userfault), Event::Remove(removed) if removed == range));
        giver.join().unwrap();
    });
}

#[test]
fn a_range_of_another_userfaultfd_is_busy_and_a_missing_feature_is_named() {
    let area = Area::new(Kind::Shared, 1);
    let first = Userfault::own(Features::MISSING_SHMEM).unwrap();
    let second = Userfault::own(Features::MISSING_SHMEM).unwrap();
    first.register(area.range(), Mode::MISSING).unwrap();
    assert!(matches!(second.register(area.range(), Mode::MISSING), Err(UserfaultError::Busy { .. })));
    assert!(matches!(second.register(PAGE..2 * PAGE, Mode::MISSING), Err(UserfaultError::Unfit { .. })));
    let unknown = Features::from_bits_retain(1 << 60) | Features::WP_ASYNC;
    assert!(Userfault::own(unknown).is_err());
    let e = UserfaultError::Unsupported { missing: Features::WP_ASYNC | Features::POISON, since: (6, 7) };
    assert_eq!(Features::WP_ASYNC.since(), (6, 7));
    assert_eq!((Features::MISSING_SHMEM | Features::WP_UNPOPULATED).since(), (6, 4));
    assert!(e.to_string().contains("POISON, WP_ASYNC; Linux 6.7"), "{e}");
    assert!(supported().unwrap().contains(Features::MISSING_SHMEM));
}

struct Cat {
    child: std::process::Child,
    process: Process,
}

impl Cat {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.as_mut().unwrap().write_all(b"there?\n").unwrap();
        let mut answer = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut answer).unwrap();
        let process = Process::of(child.id()).unwrap();
        Self { child, process }
    }
}

impl Drop for Cat {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the range of the heap of a process.
fn heap(process: Process) -> Range<u64> {
    maps::of(process).unwrap().into_iter().find(|map| map.name == "[heap]").unwrap().range
}

#[test]
fn one_in_another_process_is_found_again_and_leaves_no_trace() {
    let cat = Cat::start(&mut Command::new("cat"));
    let before = descriptors(cat.process.pid);
    let injector = Injector::new(cat.process).unwrap();
    let features = Features::WP_ASYNC | Features::WP_UNPOPULATED;
    for _ in 0..100 {
        let remote = remote::Remote::open(injector, features, None).unwrap();
        remote.userfault.register(heap(cat.process), Mode::WRITE_PROTECT).unwrap();
        let found = remote::existing(cat.process).unwrap();
        assert_eq!(found.iter().map(|existing| existing.features).collect::<Vec<_>>(), [features]);
        // The state after the death of our process.
        drop(remote);
        let again = remote::Remote::take(injector, found[0]).unwrap();
        let heap = heap(cat.process);
        assert!(remote::registered(cat.process, Mode::all()).unwrap().contains(&heap));
        assert_eq!(remote::registered(cat.process, Mode::MISSING).unwrap(), []);
        // A child of another test may have a copy of ours until its exec, so closing alone may not release the range.
        again.userfault.unregister(heap).unwrap();
        again.close().unwrap();
        assert_eq!(descriptors(cat.process.pid), before);
        assert_eq!(remote::registered(cat.process, Mode::all()).unwrap(), []);
    }
}

#[test]
fn a_process_of_another_user_needs_the_device() {
    assert!(rustix::process::geteuid().is_root(), "this test needs root");
    let device = fs::File::options().read(true).write(true).open(remote::DEVICE).unwrap();
    let fd = device.as_raw_fd();
    // The device is at descriptor 9, as if QMP's `getfd` had passed it.
    let with_device = |with: bool| {
        let mut command = Command::new("bash");
        let give = if with { format!("exec 9<>/proc/{}/fd/{fd};", std::process::id()) } else { String::new() };
        command.args(["-c", &(give + "exec setpriv --reuid=65534 --regid=65534 --clear-groups cat")]);
        Cat::start(&mut command)
    };
    let features = Features::WP_ASYNC | Features::WP_UNPOPULATED;
    let allowed = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap().trim() != "0";

    let without = with_device(false);
    let injector = Injector::new(without.process).unwrap();
    assert_eq!(remote::device_in(without.process).unwrap(), None);
    match remote::Remote::open(injector, features, None) {
        Err(e @ remote::RemoteError::Denied { .. }) => assert!(e.to_string().contains("/dev/userfaultfd"), "{e}"),
        Ok(_) => assert!(allowed),
        Err(e) => panic!("{e}"),
    }

    let with = with_device(true);
    let injector = Injector::new(with.process).unwrap();
    let number = remote::device_in(with.process).unwrap();
    assert_eq!(number, Some(9));
    let remote = remote::Remote::open(injector, features, number).unwrap();
    let heap = heap(with.process);
    remote.userfault.register(heap.clone(), Mode::WRITE_PROTECT).unwrap();
    remote.userfault.write_protect(heap.clone(), true).unwrap();
    let mut byte = [0];
    memory::read(with.process, heap.start, &mut byte).unwrap();
    remote.close().unwrap();
}
