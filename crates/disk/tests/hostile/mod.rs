//! A hostile guest and a hostile QEMU against a running server: any bytes are a program for both of them.
//!
//! | module | contents |
//! |---|---|
//! | `peer` | a front end's connection, its memory and its rings |
//! | `steps` | the steps of a program: messages in any order, changes of rings while the engine reads them |
//!
//! After each program the server must be as before: every queue has stopped when requested, every connection is
//! closed, a well-behaved guest is served and finds its data on the disk, and no thread and no descriptor is left. A
//! wait longer than [`DEADLINE`] is a hang. [`World::check_growth`] checks the memory.
//!
//! Shared by the test `hostile_peers`, which runs a fixed number of programs on each build, and the target `engine`
//! in `fuzz/`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(dead_code, reason = "each user needs a part of it")]

mod peer;
mod steps;

use peer::{FLUSH, Peer, READ, WRITE};
use rekindle_disk::control::{Control, ControlCommand};
use rekindle_disk::engine::Settings;
use rekindle_disk::image::OpenMode;
use rekindle_disk::keeper::{EpochId, LogOptions};
use rekindle_disk::limit::Limits;
use rekindle_disk::redo::recover::DiskVersion;
use rekindle_disk::server::{Service, serve};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

/// A time that is longer than any step takes, even on a busy machine.
pub const DEADLINE: Duration = Duration::from_secs(60);
/// Bytes of a disk.
const CAPACITY: u64 = 64 << 20;
/// Most bytes that the process may need in addition to those after its first programs.
const MAX_GROWTH: u64 = 128 << 20;

/// A source of decisions from bytes.
pub struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let len = N.min(self.0.len());
        let (now, later) = self.0.split_at(len);
        bytes[..len].copy_from_slice(now);
        self.0 = later;
        bytes
    }

    fn u8(&mut self) -> u8 {
        self.bytes::<1>()[0]
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.bytes())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    fn one_in(&mut self, of: u8) -> bool {
        self.u8() % of == of - 1
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::from(self.u8()) % of.len()]
    }
}

/// A server, and the known content of its disk.
struct Disk {
    directory: PathBuf,
    image: PathBuf,
    has_log: bool,
    control: Control,
    /// Number of well-behaved guests so far, which determines the content of their blocks.
    rounds: u64,
}

/// The servers that programs are run against, all in this process.
pub struct World {
    _directory: tempfile::TempDir,
    disks: Vec<Disk>,
    threads: usize,
    descriptors: usize,
    memory: u64,
    programs: u64,
}

impl World {
    /// Starts two servers, one of them with a redo log. `directory` has their files.
    pub fn start(directory: &Path) -> Self {
        let root = tempfile::Builder::new().prefix("hostile-").tempdir_in(directory).unwrap();
        let disks = [false, true].map(|has_log| Disk::start(&root.path().join(format!("log-{has_log}")), has_log));
        let mut world = Self {
            _directory: root,
            disks: disks.into(),
            threads: usize::MAX,
            descriptors: usize::MAX,
            memory: u64::MAX,
            programs: 0,
        };
        (0..world.disks.len()).for_each(|disk| world.check(disk));
        (world.threads, world.descriptors) = (count_proc_entries("task"), count_proc_entries("fd"));
        world
    }

    /// Runs a program, and checks that the server is as before.
    ///
    /// # Panics
    /// If the server is not as before, which is a defect.
    pub fn run(&mut self, program: &[u8]) {
        let mut input = Input(program);
        let number = usize::from(input.u8()) % self.disks.len();
        let disk = &mut self.disks[number];
        steps::run(&mut input, &disk.directory.join("disk.sock"), &mut disk.control);
        self.check(number);
    }

    fn check(&mut self, number: usize) {
        let disk = &mut self.disks[number];
        wait_for("all connections to end", || {
            let status = disk.control.status().unwrap();
            (status.connected == 0 && status.requests_in_progress == 0 && !status.active).then_some(())
        });
        disk.control.ask::<()>(&ControlCommand::SetLimits { bps: None, iops: None }).unwrap();
        if disk.has_log {
            // A guest waits while its log is full.
            disk.commit();
        }
        disk.serve_well_behaved();
        assert_eq!(fs::metadata(&disk.image).unwrap().len(), CAPACITY, "nothing was written behind the end");
        wait_for("the front end to have gone", || (disk.control.status().unwrap().connected == 0).then_some(()));
        // Memory may be freed in the background.
        let (threads, descriptors) = (self.threads, self.descriptors);
        wait_for("threads to end", || (count_proc_entries("task") <= threads).then_some(()));
        let is_closed = || (count_proc_entries("fd") <= descriptors).then_some(());
        if is_closed().is_none() {
            // Retained memory of guests has open files.
            for disk in &mut self.disks {
                disk.control.ask::<()>(&ControlCommand::DropCache {}).unwrap();
            }
        }
        wait_for("descriptors to be closed", is_closed);
    }

    /// Checks that the process needs no more memory than after its first programs. Called after each one.
    ///
    /// # Panics
    /// If the process needs more memory.
    pub fn check_growth(&mut self) {
        self.programs += 1;
        if self.programs == 200 {
            self.memory = private_memory();
        }
        let now = private_memory();
        assert!(now < self.memory.saturating_add(MAX_GROWTH), "{now} bytes, and {} after 200 programs", self.memory);
    }
}

impl Disk {
    fn start(directory: &Path, has_log: bool) -> Self {
        fs::create_dir(directory).unwrap();
        let image = directory.join("disk.raw");
        File::create(&image).unwrap().set_len(CAPACITY).unwrap();
        let settings = Settings {
            serial: "hostile".into(),
            limits: Limits::default(),
            has_block_map: true,
            queues: peer::QUEUES,
            retain_for: None,
            is_filling: Arc::default(),
        };
        let redo = LogOptions { version: DiskVersion::Newest, limit: Some(CAPACITY), ..LogOptions::default() };
        let service = Service {
            image: image.clone(),
            mode: OpenMode { readonly: false, direct: false },
            socket: directory.join("disk.sock"),
            user: None,
            control: directory.join("disk.control"),
            redo,
            settings,
            is_awaiting_epoch: false,
            confine: false,
        };
        let control_path = service.control.clone();
        let (ready, is_ready) = channel();
        thread::spawn(move || serve(service, |_| ready.send(()).unwrap()));
        is_ready.recv_timeout(DEADLINE).expect("the server begins");
        let mut control = Control::connect(&control_path).unwrap();
        if has_log {
            control.ask::<EpochId>(&ControlCommand::EpochBegin {}).unwrap();
        }
        Self { directory: directory.into(), image, has_log, control, rounds: 0 }
    }

    /// Commits a checkpoint, which frees space in the log.
    fn commit(&mut self) {
        let marked: EpochId = self.control.ask(&ControlCommand::EpochMark {}).unwrap();
        self.control.ask::<()>(&ControlCommand::EpochSeal { epoch: marked.epoch }).unwrap();
        self.control.ask::<()>(&ControlCommand::EpochCommitted { epoch: marked.epoch }).unwrap();
    }

    /// Checks that a well-behaved guest is served.
    fn serve_well_behaved(&mut self) {
        self.rounds += 1;
        let mut peer = Peer::connect(&self.directory.join("disk.sock"));
        assert!(peer.introduce(peer::ALL_FEATURES, true), "a new front end is served");
        peer.set_up_queue(0, 64, 0);
        let block = self.rounds * 7 % (CAPACITY / 4096);
        let content = [self.rounds as u8 | 1; 4096];
        peer.write(peer::DATA, &content);
        for (number, kind, data) in [(1, WRITE, peer::DATA), (2, FLUSH, 0), (3, READ, peer::DATA + 4096)] {
            peer.add_request(0, kind, block * 8, data, if kind == FLUSH { 0 } else { 4096 });
            peer.kick(0);
            wait_for("an answer", || (peer.used(0) == number).then_some(()));
            assert_eq!(peer.status(), 0, "request {number}");
        }
        assert!(peer.read::<4096>(peer::DATA + 4096) == content, "what was written is read");
        assert_eq!(peer.stop_queue(0), Some(3));
        if self.has_log {
            self.commit();
        } else {
            let mut found = [0; 4096];
            File::open(&self.image).unwrap().read_exact_at(&mut found, block * 4096).unwrap();
            assert!(found == content, "what was written is on the disk");
        }
    }
}

/// Waits for a condition.
fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    let mut pause = Duration::from_micros(10);
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within {DEADLINE:?}");
        sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(2));
    }
}

/// Returns the number of entries in a directory of this process in `/proc`.
fn count_proc_entries(directory: &str) -> usize {
    fs::read_dir(format!("/proc/self/{directory}")).unwrap().count()
}

/// Returns the bytes of private memory of this process.
fn private_memory() -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}
