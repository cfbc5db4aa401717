//! Copies of the RAM of running QEMUs that were not started by Rekindle. The guests write memory and read a disk with
//! `O_DIRECT`, so that the disk writes their memory too.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use rekindle_handover::copied_ram::{CopiedRam, CopyError, CopyLimit};
use rekindle_kernel::process::Process;
use rekindle_kernel::userfault::{Mode, remote};
use rekindle_memory::ram::GuestRam;
use rekindle_pages::PAGE_SIZE;
use rekindle_qemu::drain::drain;
use rekindle_qemu::guest;
use rekindle_qemu::stopped::Stopped;
use rekindle_testing::foreign::{ForeignQemu, QemuOptions};
use rekindle_testing::process::open_files;
use rekindle_testing::tools::{qemu_new, qemu_newest, qemu_old};
use rekindle_testing::wait_for;
use std::fs;
use std::io::{BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

/// Name of the main RAM block, as libvirt chooses it.
const MAIN_RAM: &str = "pc.ram";
const RAM_MIB: u64 = 192;
/// Blocks of 4096 bytes of the guest's disk.
const DISK_BLOCKS: u64 = 2048;
/// Stops of each guest, after each of which the copy is compared.
const STOPS: u64 = 20;

fn binaries() -> [&'static Path; 3] {
    [qemu_old(), qemu_new(), qemu_newest()]
}

/// A QEMU and the directory of its files.
struct Source {
    // The field order drops QEMU before its files.
    qemu: ForeignQemu,
    directory: tempfile::TempDir,
}

impl Source {
    /// Boots a guest with private or shared RAM, and a disk that is read with `O_DIRECT`.
    fn boot(binary: &Path, backend: &str) -> Self {
        // Not on a tmpfs, which has no O_DIRECT.
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let disk = directory.path().join("disk");
        fs::write(&disk, random_bytes((DISK_BLOCKS * 4096) as usize)).unwrap();
        let drive = format!("file={},if=none,id=d,format=raw,cache=none,aio=native", disk.display());
        let ram = format!("{backend},id={MAIN_RAM},size={RAM_MIB}M");
        let options = QemuOptions::new(binary)
            .arguments(&["-machine", &format!("q35,memory-backend={MAIN_RAM}"), "-m", &format!("{RAM_MIB}M")])
            .arguments(&["-object", &ram, "-drive", &drive, "-device", "virtio-blk-pci,drive=d"]);
        Self { qemu: ForeignQemu::boot(directory.path(), &options), directory }
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
    for first_page in (0..(RAM_MIB << 20) / PAGE_SIZE as u64).step_by(PIECE_PAGES as usize) {
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

fn follow_a_guest(source: &Source, seed: u64, reads: &AtomicU64) {
    let mut qmp = source.qemu.qmp();
    let ram = GuestRam::of(&mut qmp, source.qemu.process).unwrap();
    let before = open_files(source.qemu.process.pid);
    let mut copy = CopiedRam::plan(&ram, &supplied(), Process::current().unwrap()).unwrap();
    assert!(copy.needs_copy());
    let mut random = seed;
    let (mut running_bytes, mut rest_bytes) = (0, 0);
    for stop in 0..STOPS {
        random = next_random(random);
        let reads_before = reads.load(Ordering::Relaxed);
        let limit = CopyLimit { remaining_bytes: random % (4 << 20), rounds: 1 + (random >> 32) as u32 % 4 };
        running_bytes += copy.copy_while_running(&mut qmp, limit).unwrap().copied_bytes;
        // Some stops are in the middle of a disk read, others have whole reads since the last round.
        if random.is_multiple_of(2) {
            wait_for("a disk read", Duration::from_secs(60), || {
                (reads.load(Ordering::Relaxed) > reads_before).then_some(())
            });
        }
        guest::stop(&mut qmp).unwrap();
        rest_bytes += copy.copy_rest(&mut Stopped::check(&mut qmp).unwrap()).unwrap();
        assert_is_ram(&ram, &copy, &format!("seed {seed}, stop {stop}"));
        guest::resume(&mut qmp).unwrap();
    }
    assert!(running_bytes > RAM_MIB << 19 && rest_bytes > 0, "{running_bytes} {rest_bytes}");
    copy.detach().unwrap();
    assert_eq!(open_files(source.qemu.process.pid), before);
    assert!(remote::registered(source.qemu.process, Mode::all()).unwrap().is_empty());
}

#[test]
fn the_copy_of_a_running_guest_is_its_ram_at_each_stop() {
    for (binary, seed) in binaries().into_iter().zip(1..) {
        let source = Source::boot(binary, "memory-backend-ram");
        source.qemu.ask("touch 48M 7");
        source.qemu.ask("dirty 20 48 random");
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
        source.qemu.ask("dirty 0");
        assert!(source.qemu.ask("verify").parse::<u64>().unwrap() > 0);
        assert!(source.directory.path().exists());
    }
}

#[test]
fn a_page_that_is_not_copied_is_detected_and_needs_a_copy_while_the_guest_runs() {
    let source = Source::boot(qemu_new(), "memory-backend-ram");
    let mut qmp = source.qemu.qmp();
    let ram = GuestRam::of(&mut qmp, source.qemu.process).unwrap();
    let mut copy = CopiedRam::plan(&ram, &supplied(), Process::current().unwrap()).unwrap();
    guest::stop(&mut qmp).unwrap();
    let e = copy.copy_rest(&mut Stopped::check(&mut qmp).unwrap()).unwrap_err();
    assert!(matches!(e, CopyError::NotCopied), "{e}");
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
    let file = &copy.blocks().next().unwrap().file;
    let mut byte = [0];
    file.read_exact_at(&mut byte, 5 * PAGE_SIZE as u64).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 5 * PAGE_SIZE as u64).unwrap();
    assert_eq!(different_pages(&ram, &copy), [5]);
}

#[test]
fn shared_ram_is_passed_on_and_not_copied() {
    let source = Source::boot(qemu_new(), "memory-backend-memfd,share=on");
    let mut qmp = source.qemu.qmp();
    let ram = GuestRam::of(&mut qmp, source.qemu.process).unwrap();
    let before = open_files(source.qemu.process.pid);
    let mut copy = CopiedRam::plan(&ram, &supplied(), Process::current().unwrap()).unwrap();
    assert!(!copy.needs_copy());
    assert_eq!(copy.copy_while_running(&mut qmp, CopyLimit::default()).unwrap().copied_bytes, 0);
    assert_eq!(open_files(source.qemu.process.pid), before, "the source is not tracked");
    guest::stop(&mut qmp).unwrap();
    assert_eq!(copy.copy_rest(&mut Stopped::check(&mut qmp).unwrap()).unwrap(), 0);
    assert_is_ram(&ram, &copy, "the same file");
    let unknown = CopiedRam::plan(&ram, &["ram-node7".to_owned()], Process::current().unwrap()).unwrap_err();
    assert!(unknown.to_string().contains("ram-node7"), "{unknown}");
}

/// An NBD server that answers a read only after a while.
struct SlowDisk {
    /// Receives a message for each read that has arrived.
    arrived: Receiver<()>,
    /// Number of reads that were answered.
    answered: &'static AtomicU64,
}

/// Bytes of the slow disk.
const SLOW_DISK_BYTES: u64 = 1 << 20;
/// Time from a read to its answer: more than a QMP command without a drain takes.
const ANSWER_DELAY: Duration = Duration::from_millis(700);

impl SlowDisk {
    fn serve(socket: PathBuf) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let (arrival, arrived) = channel();
        let answered: &'static AtomicU64 = Box::leak(Box::default());
        thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            negotiate(&stream);
            let mut requests = BufReader::new(&stream);
            let mut request = [0; 28];
            // Magic, flags and type, handle, offset, length; all big-endian.
            while requests.read_exact(&mut request).is_ok() {
                let length = u32::from_be_bytes(request[24..28].try_into().unwrap());
                let _ = arrival.send(());
                thread::sleep(ANSWER_DELAY);
                let mut answer = 0x6744_6698u32.to_be_bytes().to_vec();
                answer.extend([0; 4]);
                answer.extend(&request[8..16]);
                answer.resize(answer.len() + length as usize, 0);
                answered.fetch_add(1, Ordering::SeqCst);
                if (&stream).write_all(&answer).is_err() {
                    return;
                }
            }
        });
        Self { arrived, answered }
    }
}

/// Greets an NBD client (`proto.md` of NBD), which may request any export. Knows only the option to choose an export.
fn negotiate(mut stream: &UnixStream) {
    const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
    const NBD_OPT_GO: u32 = 7;
    stream.write_all(b"NBDMAGIC").unwrap();
    stream.write_all(OPTION_MAGIC).unwrap();
    // Fixed new-style handshake, no zeros.
    stream.write_all(&3u16.to_be_bytes()).unwrap();
    stream.read_exact(&mut [0; 4]).unwrap();
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header).unwrap();
        assert_eq!(&header[..8], OPTION_MAGIC);
        let option = u32::from_be_bytes(header[8..12].try_into().unwrap());
        let mut data = vec![0; u32::from_be_bytes(header[12..16].try_into().unwrap()) as usize];
        stream.read_exact(&mut data).unwrap();
        let mut reply = |kind: u32, data: &[u8]| {
            let mut reply = 0x0003_e889_0455_65a9u64.to_be_bytes().to_vec();
            reply.extend(option.to_be_bytes());
            reply.extend(kind.to_be_bytes());
            reply.extend((data.len() as u32).to_be_bytes());
            reply.extend(data);
            stream.write_all(&reply).unwrap();
        };
        if option != NBD_OPT_GO {
            // Unsupported.
            reply(1 << 31 | 1, &[]);
            continue;
        }
        // Information about the export: its size, and that it has flags and is read-only.
        let mut export = 0u16.to_be_bytes().to_vec();
        export.extend(SLOW_DISK_BYTES.to_be_bytes());
        export.extend(3u16.to_be_bytes());
        reply(3, &export);
        // Acknowledged: requests follow.
        reply(1, &[]);
        return;
    }
}

#[test]
fn a_drain_waits_for_the_disk_reads_in_flight_while_the_guest_runs() {
    for binary in binaries() {
        for iothread in [false, true] {
            let directory = tempfile::tempdir().unwrap();
            let socket = directory.path().join("disk");
            let disk = SlowDisk::serve(socket.clone());
            let drive = format!("driver=nbd,server.type=unix,server.path={},node-name=d,read-only=on", socket.display());
            let device = format!("virtio-blk-pci,drive=d,bootindex=0{}", if iothread { ",iothread=io" } else { "" });
            let options = QemuOptions::new(binary).arguments(&["-machine", "q35", "-m", "192M"]);
            let options = options.arguments(&["-object", "iothread,id=io", "-blockdev", &drive, "-device", &device]);
            let qemu = ForeignQemu::start(directory.path(), &options);
            let mut qmp = qemu.qmp();
            // QEMU itself may read the disk when it opens it. The guest reads the partition table.
            for read in 1..=3 {
                disk.arrived.recv_timeout(rekindle_testing::DEADLINE).unwrap_or_else(|e| panic!("{e}: {}", qemu.output()));
                drain(&mut qmp).unwrap();
                let answered = disk.answered.load(Ordering::SeqCst);
                assert!(answered >= read, "{}, read {read}: {answered} answered", binary.display());
                assert_eq!(guest::run_state(&mut qmp).unwrap(), "running");
            }
        }
    }
}
