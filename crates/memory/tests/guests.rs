//! Real guests in stock QEMUs of both versions: adopting them, injecting system calls, tracking writes, and restoring
//! page by page.

#![allow(unsafe_code, reason = "the shared module of the tests maps memory of its own")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::qemu::{Config, MIB, Qemu, Ram, content_of_blocks, overlay, pause, resume};
use common::{apply, victim, wait_for};
use rekindle_kernel::inject::{Call, Injector};
use rekindle_kernel::userfault::remote;
use rekindle_memory::missing::{Content, PageSource, Pager};
use rekindle_memory::ram::GuestRam;
use rekindle_memory::tracker::{Asynchronous, Dirty, Synchronous, TrackError, Tracker};
use rekindle_pages::{BlockId, PAGE_SIZE, Page, PageNo};
use rekindle_qemu::adopt::adopt;
use rekindle_qemu::ramblock;
use rekindle_qemu::stopped::{NotStopped, Stopped};
use rekindle_testing::process::open_files;
use rekindle_testing::tools::{qemu_new, qemu_old};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Bytes that the guest must write between two stops, so that there is something to track.
const MIN_WRITTEN_BYTES: u64 = 1 << 20;
const SANDBOX: [&str; 2] = ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"];

fn binaries() -> [&'static Path; 2] {
    [qemu_new(), qemu_old()]
}

#[track_caller]
fn assert_same(ram: &GuestRam, copies: &[Vec<u8>], now: &[Vec<u8>], what: &str) {
    for (block, (copy, now)) in ram.blocks().iter().zip(copies.iter().zip(now)) {
        let pages = copy.chunks(4096).zip(now.chunks(4096)).enumerate();
        let different: Vec<_> = pages.filter(|(_, (copy, now))| copy != now).map(|(page, _)| page).collect();
        assert!(different.is_empty(), "{what}: pages {different:?} of {} differ", block.info.id);
    }
}

/// Asserts that the copies equal the memory of the stopped guest. Compares in pieces, because a full copy for each
/// comparison is slow.
#[track_caller]
fn assert_is_memory(ram: &GuestRam, copies: &[Vec<u8>], what: &str) {
    const PIECE_BYTES: usize = 1 << 20;
    let mut piece = vec![0; PIECE_BYTES];
    for (block, copy) in ram.blocks().iter().zip(copies) {
        let mut different_pages = Vec::new();
        let mut compare = |range: Range<u64>, memory: &[u8]| {
            let copied_pages = copy[range.start as usize..range.end as usize].chunks(PAGE_SIZE);
            for (number, (copied, page)) in copied_pages.zip(memory.chunks(PAGE_SIZE)).enumerate() {
                if copied != page {
                    different_pages.push(range.start / PAGE_SIZE as u64 + number as u64);
                }
            }
        };
        let zeros = vec![0; PIECE_BYTES];
        let populated = ram.populated(block).unwrap();
        for range in populated.complement(copy.len() as u64).split(PIECE_BYTES as u64).iter().flatten() {
            compare(range.clone(), &zeros[..(range.end - range.start) as usize]);
        }
        for range in populated.split(PIECE_BYTES as u64).iter().flatten() {
            let memory = &mut piece[..(range.end - range.start) as usize];
            ram.read(block, std::slice::from_ref(range), memory).unwrap();
            compare(range.clone(), memory);
        }
        assert!(different_pages.is_empty(), "{what}: pages {different_pages:?} of {} differ", block.info.id);
    }
}

#[test]
fn a_thousand_injected_calls_do_not_disturb_the_guest_of_a_busy_qemu() {
    for binary in binaries() {
        let qemu = Qemu::boot(Config::new(binary, Ram::Private).with(&SANDBOX));
        qemu.write_continuously();
        let injector = Injector::new(qemu.process).unwrap();
        let before: u64 = qemu.ask("tick").parse().unwrap();
        for _ in 0..1000 {
            let pid = injector.call(Call::new("getpid", 39, [])).unwrap();
            assert_eq!(pid, u64::from(qemu.process.pid));
        }
        wait_for(
            || "the guest to continue counting".into(),
            || (qemu.ask("tick").parse::<u64>().unwrap() > before + 3).then_some(()),
        );
        qemu.verify();
    }
}

#[test]
fn a_qemu_is_identified_by_its_socket_and_its_blocks_are_found() {
    for binary in binaries() {
        for ram in [Ram::File, Ram::Memfd, Ram::Private] {
            let more = ["-name", "some,,one", "-device", "virtio-balloon-pci"];
            let qemu = Qemu::start(Config::new(binary, ram).with(&more));
            drop(qemu.qmp());
            let (adopted, mut qmp) = adopt(&qemu.path("qmp"), Duration::from_secs(30)).unwrap();
            assert_eq!(adopted.process(), qemu.process);
            assert_eq!(adopted.binary, binary.canonicalize().unwrap());
            assert!(adopted.arguments.contains(&"some,,one".to_owned()), "{:?}", adopted.arguments);
            assert_eq!(adopted.name.as_deref(), Some("some,one"));
            assert_eq!((adopted.accelerator.as_str(), adopted.uid), ("tcg", 0));
            assert!(adopted.machine.starts_with("pc-q35-"), "{}", adopted.machine);
            assert_eq!(adopted.obstacles, []);
            assert!(adopted.gives_back);
            let [backend] = adopted.backends.as_slice() else { panic!("{:?}", adopted.backends) };
            assert_eq!((backend.size, backend.share), (MIB << 20, Some(ram != Ram::Private)));

            let found = GuestRam::of(&mut qmp, qemu.process).unwrap();
            let listed = ramblock::list(&mut qmp).unwrap();
            assert_eq!(found.blocks().len(), listed.len());
            assert!(listed.len() > 5, "{listed:?}");
            assert_eq!(found.changes(&mut qmp).unwrap(), []);
            for (block, listed) in found.blocks().iter().zip(&listed) {
                // A QEMU that reports addresses must report those that were found.
                assert!(listed.address.is_none_or(|address| address == block.address), "{block:?}");
            }
            let main = found.blocks().iter().find(|block| block.info.id == "ram").unwrap();
            assert_eq!((main.shared, main.file().is_some()), (ram != Ram::Private, ram != Ram::Private));
            // The firmware's last 16 bytes begin with a jump (at the processor's first instruction).
            let bios = found.blocks().iter().find(|block| block.info.id == "pc.bios").unwrap();
            let end = bios.info.used;
            let mut last = vec![0; 16];
            found.read(bios, std::slice::from_ref(&(end - 16..end)), &mut last).unwrap();
            assert_eq!(last[0], 0xea);
        }
    }
}

#[test]
fn obstacles_to_adoption_are_named() {
    let binary = qemu_new();
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let file = directory.path().join("shared");
    fs::write(&file, vec![0; 4 << 20]).unwrap();
    let backend = format!("memory-backend-file,id=extra,size=4M,share=on,mem-path={}", file.display());
    let more = ["-object", &backend, "-device", "ivshmem-plain,memdev=extra"];
    let qemu = Qemu::start(Config::new(binary, Ram::Private).with(&more));
    drop(qemu.qmp());
    let (adopted, _qmp) = adopt(&qemu.path("qmp"), Duration::from_secs(30)).unwrap();
    let named: Vec<_> = adopted.obstacles.iter().map(|obstacle| obstacle.what.as_str()).collect();
    // One obstacle is found by Rekindle, the other one is reported by QEMU.
    assert_eq!(named.len(), 2, "{named:?}");
    assert!(named.iter().any(|what| what.starts_with("ivshmem-plain")), "{named:?}");
    assert!(named.iter().any(|what| what.contains("Migration is disabled")), "{named:?}");
}

#[test]
fn a_socket_that_is_not_of_qemu_is_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let answer = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut replies = &stream;
        let greeting = json!({"QMP": {"version": {"qemu": {"major": 1, "minor": 0, "micro": 0}}, "capabilities": []}});
        writeln!(replies, "{greeting}").unwrap();
        let mut commands = serde_json::Deserializer::from_reader(&stream).into_iter::<Value>();
        let negotiation = commands.next().unwrap().unwrap();
        writeln!(replies, "{}", json!({"return": {}, "id": negotiation["id"]})).unwrap();
        let _ = commands.next();
    });
    let e = adopt(&path, Duration::from_secs(30)).unwrap_err();
    assert!(e.to_string().contains("no QEMU holds the socket"), "{e}");
    answer.join().unwrap();
}

#[test]
fn a_copy_that_follows_a_running_guest_is_its_memory_at_each_stop() {
    let cases = [(0, Ram::File), (0, Ram::Private), (1, Ram::File), (1, Ram::Private), (0, Ram::Memfd)];
    for (binary, kind) in cases {
        let binary = binaries()[binary];
        let qemu = Qemu::boot(Config::new(binary, kind).with(&SANDBOX));
        qemu.write_continuously();
        let mut qmp = qemu.qmp();
        let ram = Arc::new(GuestRam::of(&mut qmp, qemu.process).unwrap());
        let injector = Injector::new(qemu.process).unwrap();
        let before = open_files(qemu.process.pid);
        assert!(matches!(Stopped::check(&mut qmp), Err(NotStopped::Runs { .. })));
        pause(&mut qmp);
        let mut stopped = Stopped::check(&mut qmp).unwrap();
        let mut tracker = Asynchronous::attach(injector, Arc::clone(&ram), &mut stopped, None).unwrap();
        let mut copies: Vec<_> = content_of_blocks(&ram).iter().map(|all| vec![0xff; all.len()]).collect();
        apply(&ram, &Dirty::everything(&ram).unwrap(), &mut copies);
        let mut reported = 0;
        for round in 0..8 {
            assert_is_memory(&ram, &copies, &format!("{} {kind:?}, round {round}", binary.display()));
            resume(&mut qmp);
            wait_for(|| qemu.output(), || (tracker.peek().unwrap().bytes() > MIN_WRITTEN_BYTES).then_some(()));
            pause(&mut qmp);
            let mut stopped = Stopped::check(&mut qmp).unwrap();
            let dirty = tracker.collect(&mut stopped).unwrap();
            reported += dirty.bytes();
            apply(&ram, &dirty, &mut copies);
        }
        assert!(reported > 0 && reported < 8 * (MIB << 20) / 2, "{reported}");
        resume(&mut qmp);
        tracker.detach().unwrap();
        assert_eq!(open_files(qemu.process.pid), before);
        assert!(!victim::is_registered(qemu.process));
        drop(qmp);
        qemu.verify();
    }
}

#[test]
fn checkpoints_are_copied_while_the_guest_runs() {
    for binary in binaries() {
        let qemu = Qemu::boot(Config::new(binary, Ram::File));
        qemu.write_continuously();
        let mut qmp = qemu.qmp();
        let ram = Arc::new(GuestRam::of(&mut qmp, qemu.process).unwrap());
        let injector = Injector::new(qemu.process).unwrap();
        let before = open_files(qemu.process.pid);
        pause(&mut qmp);
        let copies = Arc::new(Mutex::new(content_of_blocks(&ram)));
        let copier = Arc::clone(&copies);
        let save = move |ram: &GuestRam, block: BlockId, page: Range<u64>| {
            let mut bytes = vec![0; (page.end - page.start) as usize];
            ram.read(ram.block(block).unwrap(), std::slice::from_ref(&page), &mut bytes).unwrap();
            copier.lock().unwrap()[block.0][page.start as usize..page.end as usize].copy_from_slice(&bytes);
        };
        let mut stopped = Stopped::check(&mut qmp).unwrap();
        let attached = Synchronous::attach(injector, Arc::clone(&ram), &mut stopped, save.clone(), None);
        let mut tracker = attached.unwrap();
        for round in 0..6 {
            resume(&mut qmp);
            wait_for(|| qemu.output(), || (tracker.peek().unwrap().bytes() > MIN_WRITTEN_BYTES).then_some(()));
            pause(&mut qmp);
            let mut stopped = Stopped::check(&mut qmp).unwrap();
            let dirty = tracker.collect(&mut stopped).unwrap();
            let now = content_of_blocks(&ram);
            tracker.begin(&dirty.written, &mut stopped).unwrap();
            resume(&mut qmp);
            while let Some(claim) = tracker.claim(64 << 10) {
                claim.runs.iter().for_each(|run| save(&ram, claim.block, run.clone()));
            }
            wait_for(|| "the last pages".into(), || tracker.check_all_copied().ok());
            assert_same(&ram, &copies.lock().unwrap(), &now, &format!("{}, round {round}", binary.display()));
        }
        assert!(tracker.faults() > 0);
        tracker.detach().unwrap();
        assert_eq!(open_files(qemu.process.pid), before);
        assert!(!victim::is_registered(qemu.process));
        drop(qmp);
        qemu.verify();
    }
}

#[test]
fn a_hundred_attachments_leave_no_trace() {
    for binary in binaries() {
        let qemu = Qemu::boot(Config::new(binary, Ram::File).with(&SANDBOX));
        qemu.write_continuously();
        let mut qmp = qemu.qmp();
        let ram = Arc::new(GuestRam::of(&mut qmp, qemu.process).unwrap());
        let injector = Injector::new(qemu.process).unwrap();
        let before = open_files(qemu.process.pid);
        for _ in 0..100 {
            pause(&mut qmp);
            let mut stopped = Stopped::check(&mut qmp).unwrap();
            let tracker = Asynchronous::attach(injector, Arc::clone(&ram), &mut stopped, None).unwrap();
            resume(&mut qmp);
            tracker.detach().unwrap();
        }
        assert_eq!(open_files(qemu.process.pid), before);
        assert!(!victim::is_registered(qemu.process));
        drop(qmp);
        qemu.verify();
    }
}

#[test]
fn a_qemu_of_another_user_is_tracked_through_the_device() {
    let allowed = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap();
    assert_eq!(allowed.trim(), "0", "only root may use userfaultfd in this test: sysctl vm.unprivileged_userfaultfd=0");
    let config = Config::new(qemu_new(), Ram::Private).with(&["-run-with", "user=nobody", "-sandbox", "on"]);
    let qemu = Qemu::start(config);
    let mut qmp = qemu.qmp();
    let ram = Arc::new(GuestRam::of(&mut qmp, qemu.process).unwrap());
    let injector = Injector::new(qemu.process).unwrap();
    pause(&mut qmp);
    let mut stopped = Stopped::check(&mut qmp).unwrap();
    let e = Asynchronous::attach(injector, Arc::clone(&ram), &mut stopped, None).unwrap_err();
    assert!(matches!(e, TrackError::Remote(remote::RemoteError::Denied { .. })), "{e}");
    assert!(e.to_string().contains("/dev/userfaultfd"), "{e}");
    let device = File::options().read(true).write(true).open(remote::DEVICE).unwrap();
    let name = json!({"fdname": "userfaultfd"});
    let _: Value = qmp.execute_with_fd("getfd", &name, device.as_fd()).unwrap();
    let number = remote::device_in(qemu.process).unwrap();
    let mut stopped = Stopped::check(&mut qmp).unwrap();
    let mut tracker = Asynchronous::attach(injector, ram, &mut stopped, number).unwrap();
    let _: Value = qmp.execute("closefd", &name).unwrap();
    resume(&mut qmp);
    wait_for(|| "the guest to write".into(), || (tracker.peek().unwrap().bytes() > 1 << 20).then_some(()));
    tracker.detach().unwrap();
    assert_eq!(remote::device_in(qemu.process).unwrap(), None);
}

#[test]
fn pages_written_by_disk_reads_are_reported() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let disk = directory.path().join("disk");
    let mut random = 1u64;
    let content: Vec<u8> = (0..(24 << 20) / 8)
        .flat_map(|_| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random.to_ne_bytes()
        })
        .collect();
    fs::write(&disk, content).unwrap();
    // Reads the disk repeatedly, each time into other pages.
    let script = "#!/bin/sh\nmount -t proc proc /proc\nmount -t devtmpfs dev /dev\n\
        while read -r module; do insmod /modules/$module.ko; done </modules/order\n\
        while true; do echo sum $(md5sum </dev/vda); echo 3 >/proc/sys/vm/drop_caches; done\n";
    let archive = overlay(&[("init", 0o100_755, script)]);
    for binary in binaries() {
        for kind in [Ram::File, Ram::Private] {
            let drive = format!("file={},if=none,id=d,format=raw,cache=none,aio=native", disk.display());
            let config = Config::new(binary, kind).with(&["-drive", &drive, "-device", "virtio-blk-pci,drive=d"]);
            let qemu = Qemu::start(config.overlay(archive.clone()));
            let sums = || qemu.console().lines().filter(|line| line.starts_with("sum ")).count();
            wait_for(|| qemu.output(), || (sums() > 0).then_some(()));
            let mut qmp = qemu.qmp();
            let ram = Arc::new(GuestRam::of(&mut qmp, qemu.process).unwrap());
            let injector = Injector::new(qemu.process).unwrap();
            pause(&mut qmp);
            let mut stopped = Stopped::check(&mut qmp).unwrap();
            let mut tracker = Asynchronous::attach(injector, Arc::clone(&ram), &mut stopped, None).unwrap();
            let mut copies = content_of_blocks(&ram);
            let before = sums();
            for round in 0..30 {
                resume(&mut qmp);
                // No condition to wait for: the stops should hit different moments of the guest's reads.
                thread::sleep(Duration::from_millis(10 + 7 * (round % 5)));
                pause(&mut qmp);
                let mut stopped = Stopped::check(&mut qmp).unwrap();
                let dirty = tracker.collect(&mut stopped).unwrap();
                apply(&ram, &dirty, &mut copies);
                assert_is_memory(&ram, &copies, &format!("{kind:?}, round {round}"));
            }
            resume(&mut qmp);
            tracker.detach().unwrap();
            wait_for(|| qemu.output(), || (sums() > before + 1).then_some(()));
            let console = qemu.console();
            // The last line may be incomplete.
            let whole = console.rsplit_once('\n').unwrap().0;
            let mut seen: Vec<_> = whole.lines().filter(|line| line.starts_with("sum ")).map(str::trim_end).collect();
            seen.dedup();
            assert_eq!(seen.len(), 1, "{seen:?}");
        }
    }
}

/// Saved RAM blocks, in the order of the QEMU that is filled.
struct Image {
    blocks: Vec<Vec<u8>>,
    delay: Duration,
}

impl PageSource for Image {
    type Error = std::io::Error;

    fn page(&mut self, block: BlockId, page: PageNo, buffer: &mut Page) -> std::io::Result<Content> {
        thread::sleep(self.delay);
        buffer.copy_from_slice(&self.blocks[block.0][page.offset() as usize..][..PAGE_SIZE]);
        Ok(if buffer.iter().all(|&byte| byte == 0) { Content::Zero } else { Content::Data })
    }

    fn retry(&mut self, _: &std::io::Error, _: u32) -> Option<Duration> {
        None
    }
}

#[test]
fn a_guest_runs_in_a_new_qemu_during_the_fill_although_the_pager_is_replaced() {
    for binary in binaries() {
        for kind in [Ram::File, Ram::Private] {
            let old = Qemu::boot(Config::new(binary, kind));
            old.ask("touch 64M 7");
            let mut qmp = old.qmp();
            pause(&mut qmp);
            let directory = tempfile::tempdir_in("/dev/shm").unwrap();
            let state: PathBuf = directory.path().join("state");
            let _: Value = qmp.execute("xen-save-devices-state", json!({"filename": state, "live": false})).unwrap();
            let ram = GuestRam::of(&mut qmp, old.process).unwrap();
            let names = ram.blocks().iter().map(|block| block.info.id.clone());
            let mut saved: BTreeMap<String, Vec<u8>> = names.zip(content_of_blocks(&ram)).collect();
            drop((qmp, ram, old));

            let new = Qemu::start(Config::new(binary, kind).with(&["-incoming", "defer"]));
            let mut qmp = new.qmp();
            let ram = GuestRam::of(&mut qmp, new.process).unwrap();
            let blocks = ram.blocks().iter().map(|block| saved.remove(&block.info.id).unwrap()).collect();
            let mut image = Image { blocks, delay: Duration::from_micros(30) };
            let injector = Injector::new(new.process).unwrap();
            // All blocks, including firmware and video memory.
            let mut pager = Pager::begin(injector, &ram, |_| true, &mut image, None).unwrap();
            let end = AtomicBool::new(false);
            thread::scope(|scope| {
                let (image, end) = (&mut image, &end);
                let running = scope.spawn(move || pager.run(image, [], end).unwrap());
                let uri = format!("exec:cat {}", state.display());
                let _: Value = qmp.execute("migrate-incoming", json!({"uri": uri})).unwrap();
                thread::sleep(Duration::from_millis(300));
                end.store(true, std::sync::atomic::Ordering::Relaxed);
                let progress = running.join().unwrap();
                assert!(!progress.complete && progress.faults > 0, "{progress:?}");
            });
            let mut pager = Pager::take_over(injector, &ram, |_| true).unwrap().expect("a registration");
            image.delay = Duration::ZERO;
            let progress = pager.run(&mut image, [], &AtomicBool::new(false)).unwrap();
            assert!(progress.complete, "{progress:?}");
            let running = |qmp: &mut rekindle_qemu::qmp::Qmp| {
                let status: Value = qmp.execute("query-status", ()).unwrap();
                (status["status"] == "running").then_some(())
            };
            wait_for(|| new.output(), || running(&mut qmp));
            assert!(!victim::is_registered(new.process));
            assert_eq!(remote::existing(new.process).unwrap(), []);
            drop(qmp);
            new.verify();
        }
    }
}
