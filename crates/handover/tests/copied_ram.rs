//! Copies of the RAM of running QEMUs that were not started by Rekindle. The guests write memory and read a disk with
//! `O_DIRECT`, so that the disk writes their memory too.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use rekindle_handover::copied_ram::{CopiedRam, CopyLimit};
use rekindle_handover::ram::{Ram, RamSource};
use rekindle_handover::ram_transfer::RamTransfer;
use rekindle_handover::ram_transfer_error::RamTransferError;
use rekindle_handover::source_ram::SourceRam;
use rekindle_handover::source_state::{SourceState, StateSink, StreamForm};
use rekindle_kernel::process::Process;
use rekindle_kernel::userfault::{Mode, remote};
use rekindle_memory::ram::GuestRam;
use rekindle_pages::PAGE_SIZE;
use rekindle_qemu::guest;
use rekindle_qemu::monitor::Monitor;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::stopped::Stopped;
use rekindle_qemu::transfer::{Feed, save_to_file, set_capabilities, wait_loaded};
use rekindle_qemu::vmm::Vmm;
use rekindle_testing::foreign::{ForeignQemu, QemuOptions};
use rekindle_testing::hugepages::{HUGE_PAGE_SIZE, HugePages};
use rekindle_testing::process::open_files;
use rekindle_testing::tools::{qemu_new, qemu_newest, qemu_old};
use rekindle_testing::wait_for;
use serde_json::json;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// Name of the main RAM block, as libvirt chooses it.
const MAIN_RAM: &str = "pc.ram";
const RAM_MIB: u64 = 192;
const MIB: u64 = 1 << 20;
/// Guest commands: fill a part of the memory with a pattern, then write random pages of it all the time. `verify`
/// checks that each page has the content last written, and counts the pages.
const FILL_MEMORY: &str = "touch 48M 7";
const WRITE_MEMORY: &str = "dirty 20 48 random";
const STOP_WRITING: &str = "dirty 0";
const FILLED_BYTES: u64 = 48 * MIB;
/// A machine type that all versions of QEMU in these tests have.
const COMMON_MACHINE: &str = "pc-q35-7.2";
/// Blocks of 4096 bytes of the guest's disk.
const DISK_BLOCKS: u64 = 2048;
/// Stops of each guest, after each of which the copy is compared.
const STOPS: u64 = 20;

fn binaries() -> [&'static Path; 3] {
    [qemu_old(), qemu_new(), qemu_newest()]
}

/// Returns the options of a QEMU with the RAM of `backend` and a disk that is read with `O_DIRECT`. They are those of
/// other managers: the migration stream has a configuration section and a description.
fn options<'a>(binary: &'a Path, backend: &str, machine: &str, disk: &Path) -> QemuOptions<'a> {
    let drive = format!("file={},if=none,id=d,format=raw,cache=none,aio=native", disk.display());
    let ram = format!("{backend},id={MAIN_RAM},size={RAM_MIB}M");
    QemuOptions::new(binary)
        .arguments(&["-machine", &format!("{machine},memory-backend={MAIN_RAM}"), "-m", &format!("{RAM_MIB}M")])
        .arguments(&["-object", &ram, "-drive", &drive, "-device", "virtio-blk-pci,drive=d"])
}

/// A QEMU and the directory of its files.
struct Source {
    // The field order drops QEMU before its files.
    qemu: ForeignQemu,
    directory: tempfile::TempDir,
}

impl Source {
    /// Boots a guest with two processors that run.
    fn boot(binary: &Path, backend: &str) -> Self {
        Self::boot_as(binary, backend, "q35")
    }

    /// Boots a guest with a machine type that several versions of QEMU have.
    fn boot_as(binary: &Path, backend: &str, machine: &str) -> Self {
        // Not on a tmpfs, which has no O_DIRECT.
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let disk = directory.path().join("disk");
        fs::write(&disk, random_bytes((DISK_BLOCKS * 4096) as usize)).unwrap();
        let options = options(binary, backend, machine, &disk);
        let qemu = ForeignQemu::boot(directory.path(), &options);
        qemu.ask("online-cpu 1");
        Self { qemu, directory }
    }
}

fn random_bytes(count: usize) -> Vec<u8> {
    let mut random = 1;
    let words = (0..count / 8).flat_map(|_| {
        random = next_random(random);
        random.to_ne_bytes()
    });
    words.collect()
}

/// Xorshift, so that each run of a test makes the same choices.
fn next_random(mut random: u64) -> u64 {
    random ^= random << 13;
    random ^= random >> 7;
    random ^ random << 17
}

fn copy_of(ram: &GuestRam) -> CopiedRam {
    CopiedRam::new(SourceRam::of(ram, &supplied()).unwrap())
}

fn supplied() -> [String; 1] {
    [MAIN_RAM.to_owned()]
}

/// Returns the pages in which the copy differs from the RAM of the stopped source.
fn different_pages(source: &GuestRam, copy: &CopiedRam) -> Vec<u64> {
    const PIECE_PAGES: u64 = 256;
    let block = source.block(source.block_id(MAIN_RAM).unwrap()).unwrap();
    let file = &copy.blocks().next().unwrap().file;
    let mut theirs = vec![0; PAGE_SIZE * PIECE_PAGES as usize];
    let mut ours = theirs.clone();
    let mut different = Vec::new();
    for first_page in (0..(RAM_MIB * MIB) / PAGE_SIZE as u64).step_by(PIECE_PAGES as usize) {
        let start = first_page * PAGE_SIZE as u64;
        source.read(block, std::slice::from_ref(&(start..start + theirs.len() as u64)), &mut theirs).unwrap();
        file.read_exact_at(&mut ours, start).unwrap();
        let pages = (first_page..).zip(theirs.chunks(PAGE_SIZE).zip(ours.chunks(PAGE_SIZE)));
        different.extend(pages.filter(|(_, (theirs, ours))| theirs != ours).map(|(page, _)| page));
    }
    different
}

#[track_caller]
fn assert_is_ram(source: &GuestRam, copy: &CopiedRam, what: &str) {
    let different = different_pages(source, copy);
    assert!(different.is_empty(), "{what}: pages {different:?} differ");
}

/// Makes the guest read its disk repeatedly, into different pages, until `end`. Counts the reads in `reads`.
fn read_disk(qemu: &ForeignQemu, end: &AtomicBool, reads: &AtomicU64) {
    let mut digests = Vec::new();
    while !end.load(Ordering::Relaxed) {
        qemu.ask("drop-caches");
        digests.push(qemu.ask(&format!("read vda 0 {DISK_BLOCKS}")));
        reads.fetch_add(1, Ordering::Relaxed);
    }
    digests.dedup();
    assert_eq!(digests.len(), 1, "{digests:?}");
}

/// Chooses when a copy of a running guest ends, so that each pause has to copy another number of pages.
fn random_limit(random: u64) -> CopyLimit {
    CopyLimit { remaining_bytes: random % (4 * MIB), rounds: 1 + (random >> 32) as u32 % 4 }
}

/// Stops a guest [`STOPS`] times while it writes memory, and compares the copy with its RAM at each stop.
fn follow_a_guest(source: &Source, seed: u64, reads: &AtomicU64) {
    let mut qmp = source.qemu.qmp();
    let ram = GuestRam::of(&mut qmp, source.qemu.process).unwrap();
    let before = open_files(source.qemu.process.pid);
    let mut copy = copy_of(&ram);
    assert!(copy.needs_copy());
    let mut random = seed;
    let (mut running_bytes, mut rest_bytes) = (0, 0);
    for stop in 0..STOPS {
        random = next_random(random);
        let reads_before = reads.load(Ordering::Relaxed);
        running_bytes += copy.copy_while_running(&mut qmp, random_limit(random)).unwrap().copied_bytes;
        // Some stops are in the middle of a disk read, others have whole reads since the last round.
        let whole_read = random.is_multiple_of(2);
        if whole_read {
            wait_for("a disk read", Duration::from_secs(60), || {
                (reads.load(Ordering::Relaxed) > reads_before).then_some(())
            });
        }
        guest::stop(&mut qmp).unwrap();
        rest_bytes += copy.copy_rest(&mut Stopped::check(&mut qmp).unwrap()).unwrap();
        assert_is_ram(&ram, &copy, &format!("seed {seed}, stop {stop}"));
        guest::resume(&mut qmp).unwrap();
    }
    assert!(running_bytes > RAM_MIB * MIB / 2, "{running_bytes} bytes were copied while the guest ran");
    assert!(rest_bytes > 0, "no stop left a page to copy");
    copy.detach().unwrap();
    assert_eq!(open_files(source.qemu.process.pid), before);
    assert!(remote::registered(source.qemu.process, Mode::all()).unwrap().is_empty());
}

#[test]
fn the_copy_of_a_running_guest_is_its_ram_at_each_stop() {
    for (binary, seed) in binaries().into_iter().zip(1..) {
        let source = Source::boot(binary, "memory-backend-ram");
        source.qemu.ask(FILL_MEMORY);
        source.qemu.ask(WRITE_MEMORY);
        let (end, reads) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            scope.spawn(|| read_disk(&source.qemu, &end, &reads));
            // Without this, a failed assertion would leave the reader running and the test hanging.
            let followed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                follow_a_guest(&source, seed, &reads);
            }));
            end.store(true, Ordering::Relaxed);
            if let Err(panic) = followed {
                // The guest may be stopped, so that the reader's request would never be answered.
                let _ = source.qemu.process.kill();
                std::panic::resume_unwind(panic);
            }
        });
        source.qemu.ask(STOP_WRITING);
        assert!(source.qemu.ask("verify").parse::<u64>().unwrap() > 0);
    }
}

/// As libvirt gives a domain with `<hugepages/>` its RAM, unless it is shared.
#[test]
fn private_huge_pages_are_copied_into_huge_pages() {
    let pages = HugePages::add(2 * RAM_MIB * MIB / HUGE_PAGE_SIZE).unwrap();
    let backend = "memory-backend-memfd,hugetlb=on,hugetlbsize=2M,share=off,prealloc=on";
    let source = Source::boot(qemu_new(), backend);
    source.qemu.ask(FILL_MEMORY);
    source.qemu.ask(WRITE_MEMORY);
    let left = pages.free_bytes();
    assert!(left >= RAM_MIB * MIB);
    let mut qmp = source.qemu.qmp();
    let ram = GuestRam::of(&mut qmp, source.qemu.process).unwrap();
    let this = Process::current().unwrap();
    let mut copy = copy_of(&ram);
    assert_eq!(pages.free_bytes(), left - RAM_MIB * MIB, "reserved");
    assert!(matches!(
        SourceRam::of(&ram, &supplied()).unwrap_err(),
        RamTransferError::NoHugePages { requested, .. } if requested == RAM_MIB * MIB
    ));
    let mut rest_bytes = 0;
    for stop in 0..STOPS {
        copy.copy_while_running(&mut qmp, random_limit(stop)).unwrap();
        guest::stop(&mut qmp).unwrap();
        rest_bytes += copy.copy_rest(&mut Stopped::check(&mut qmp).unwrap()).unwrap();
        assert_is_ram(&ram, &copy, &format!("stop {stop}"));
        guest::resume(&mut qmp).unwrap();
    }
    assert!(rest_bytes > 0, "no stop left a page to copy");
    copy.detach().unwrap();
    drop(copy);
    assert_eq!(pages.free_bytes(), left);
    let in_place = SourceRam::of(&ram, &supplied()).unwrap().check(this, RamTransfer::InPlace).unwrap_err();
    assert!(matches!(in_place, RamTransferError::HugePages { .. }), "{in_place}");
    source.qemu.ask(STOP_WRITING);
    assert!(source.qemu.ask("verify").parse::<u64>().unwrap() > 0);
}

#[test]
fn a_page_that_is_not_copied_is_detected_and_needs_a_copy_while_the_guest_runs() {
    let source = Source::boot(qemu_new(), "memory-backend-ram");
    let mut qmp = source.qemu.qmp();
    let ram = GuestRam::of(&mut qmp, source.qemu.process).unwrap();
    let mut copy = copy_of(&ram);
    guest::stop(&mut qmp).unwrap();
    let e = copy.copy_rest(&mut Stopped::check(&mut qmp).unwrap()).unwrap_err();
    assert!(matches!(e, RamTransferError::NotCopied), "{e}");
    guest::resume(&mut qmp).unwrap();
    source.qemu.ask("dirty 20");
    copy.copy_while_running(&mut qmp, CopyLimit::default()).unwrap();
    wait_for("the guest to write", Duration::from_secs(60), || {
        let tick: u64 = source.qemu.ask("tick").parse().unwrap();
        (tick > 0).then_some(())
    });
    guest::stop(&mut qmp).unwrap();
    assert!(!different_pages(&ram, &copy).is_empty(), "the guest has written since the last round");
    copy.copy_rest(&mut Stopped::check(&mut qmp).unwrap()).unwrap();
    assert_is_ram(&ram, &copy, "after the rest was copied");
    // The comparison itself finds a single changed bit.
    const CHANGED_PAGE: u64 = 5;
    let file = &copy.blocks().next().unwrap().file;
    let mut byte = [0];
    file.read_exact_at(&mut byte, CHANGED_PAGE * PAGE_SIZE as u64).unwrap();
    file.write_all_at(&[byte[0] ^ 1], CHANGED_PAGE * PAGE_SIZE as u64).unwrap();
    assert_eq!(different_pages(&ram, &copy), [CHANGED_PAGE]);
}

#[test]
fn shared_ram_is_passed_on_and_not_copied() {
    let source = Source::boot(qemu_new(), "memory-backend-memfd,share=on");
    let mut qmp = source.qemu.qmp();
    let ram = GuestRam::of(&mut qmp, source.qemu.process).unwrap();
    let before = open_files(source.qemu.process.pid);
    let mut copy = copy_of(&ram);
    assert!(!copy.needs_copy());
    assert_eq!(copy.copy_while_running(&mut qmp, CopyLimit::default()).unwrap().copied_bytes, 0);
    assert_eq!(open_files(source.qemu.process.pid), before, "the source is not tracked");
    guest::stop(&mut qmp).unwrap();
    assert_eq!(copy.copy_rest(&mut Stopped::check(&mut qmp).unwrap()).unwrap(), 0);
    assert_is_ram(&ram, &copy, "the same file");
    let unknown = SourceRam::of(&ram, &["ram-node7".to_owned()]).unwrap_err();
    assert!(unknown.to_string().contains("ram-node7"), "{unknown}");
}

/// Describes a running QEMU. Its monitor socket is free only while no connection to it is open.
fn vmm_of(qemu: &ForeignQemu) -> Vmm {
    Vmm {
        binary: PathBuf::new(),
        pid: qemu.process.pid,
        started: qemu.process.started,
        directory: qemu.path("."),
        monitor: Some(Monitor::Socket { path: qemu.path("qmp") }),
        direct_monitors: None,
    }
}

/// Sends the state of the stopped source, except its main RAM, to a destination that waits for it at `feed`: first the
/// other RAM blocks (`carried`: firmware, video memory), then the devices. The destination maps the main RAM.
fn send_state(source: &Source, qmp: &mut Qmp, ram: &GuestRam, copy: &CopiedRam, feed: &mut Feed) {
    let table: Vec<_> = ram.blocks().iter().map(|block| block.info.clone()).collect();
    let all = table.len();
    let carried = copy.carried_blocks(table);
    assert_eq!(carried.len(), all - 1);
    let machine: String = qmp.execute("qom-get", json!({"path": "/machine", "property": "type"})).unwrap();
    let machine = machine.strip_suffix("-machine").unwrap().to_owned();
    let mut sink = StateSink { feed: Some(feed), file: None };
    let form = StreamForm::Foreign { machine };
    let mut state = SourceState::prepare(&vmm_of(&source.qemu), qmp, carried, form, &mut sink).unwrap();
    state.begin(qmp).unwrap();
    state.send_blocks(&mut sink).unwrap();
    state.send_devices(qmp, Some(feed)).unwrap();
}

#[test]
fn a_guest_continues_on_the_copy_in_a_qemu_that_can_save_all_of_it() {
    for (from, to) in [(qemu_old(), qemu_new()), (qemu_new(), qemu_newest())] {
        let mut source = Source::boot_as(from, "memory-backend-ram", COMMON_MACHINE);
        source.qemu.ask(FILL_MEMORY);
        source.qemu.ask(WRITE_MEMORY);
        let boot = source.qemu.ask("boot-id");
        let mut qmp = source.qemu.qmp();
        let ram = GuestRam::of(&mut qmp, source.qemu.process).unwrap();
        let mut copy = copy_of(&ram);
        let file = &copy.blocks().next().unwrap().file;
        let mapped = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let backend = format!("memory-backend-file,mem-path={mapped},share=on");
        let directory = tempfile::tempdir().unwrap();
        let disk = source.directory.path().join("disk");
        let options = options(to, &backend, COMMON_MACHINE, &disk).arguments(&["-incoming", "defer", "-S"]);
        let destination = ForeignQemu::start(directory.path(), &options);
        let mut destination_qmp = destination.qmp();
        let mut feed = copy.connect(&vmm_of(&destination), &mut destination_qmp).unwrap();

        copy.copy_while_running(&mut qmp, CopyLimit::default()).unwrap();
        guest::stop(&mut qmp).unwrap();
        copy.copy_rest(&mut Stopped::check(&mut qmp).unwrap()).unwrap();
        send_state(&source, &mut qmp, &ram, &copy, &mut feed);
        drop(feed);
        wait_loaded(&mut destination_qmp, rekindle_testing::DEADLINE)
            .unwrap_or_else(|e| panic!("{e}: {}", destination.output()));
        guest::resume(&mut destination_qmp).unwrap();
        source.qemu.kill();
        assert_eq!(destination.ask("boot-id"), boot);
        destination.ask(STOP_WRITING);
        assert!(destination.ask("verify").parse::<u64>().unwrap() > 0);
        destination.ask(&format!("read vda 0 {DISK_BLOCKS}"));
        // QEMU expects a description of the devices at the end of the stream, and warns if it is missing.
        let log = fs::read_to_string(destination.path("log")).unwrap();
        assert!(!log.contains("vmdescription"), "{log}");

        // With the capabilities of the hand-over, shared RAM is not in a stream. A manager does not know them, and
        // saves all of the RAM.
        guest::stop(&mut destination_qmp).unwrap();
        let saved = directory.path().join("saved");
        let managers_capabilities = [("x-ignore-shared", false), ("late-block-activate", false)];
        set_capabilities(&mut destination_qmp, &managers_capabilities).unwrap();
        save_to_file(&mut destination_qmp, &fs::File::create(&saved).unwrap(), rekindle_testing::DEADLINE).unwrap();
        assert!(saved.metadata().unwrap().len() > FILLED_BYTES);
    }
}
