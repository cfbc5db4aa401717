//! What a program that runs in the place of a disk's server can reach.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use nix::sched::CloneFlags;
use rekindle_disk::broker::{BrokeredFiles, DiskBroker, FrontEndMemory, ServedFiles};
use rekindle_disk::confinement;
use rekindle_disk::image::OpenMode;
use rekindle_disk::redo::files::{LocalFiles, LogFiles};
use rekindle_disk::redo::offline::default_directory;
use rekindle_kernel::process::Process;
use rekindle_testing::hostile::{Attempt, Outcome, run};
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// The directories of two VMs of one user, whose images are in one directory.
struct Host {
    images: tempfile::TempDir,
    own_run: tempfile::TempDir,
    other_run: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let directory = || tempfile::tempdir().unwrap();
        let host = Self { images: directory(), own_run: directory(), other_run: directory() };
        for run in [&host.own_run, &host.other_run] {
            // As a run directory.
            fs::set_permissions(run.path(), Permissions::from_mode(0o700)).unwrap();
        }
        for name in ["own.raw", "other.raw"] {
            fs::write(host.image(name), [1; 4096]).unwrap();
        }
        for run in [&host.own_run, &host.other_run] {
            fs::write(run.path().join("state.json"), "{}").unwrap();
        }
        fs::create_dir(host.image("other.raw.redo")).unwrap();
        host
    }

    fn image(&self, name: &str) -> PathBuf {
        self.images.path().join(name)
    }

    fn own_file(&self, name: &str) -> PathBuf {
        self.own_run.path().join(name)
    }

    fn log(&self) -> LocalFiles {
        LocalFiles::new(&default_directory(&self.image("own.raw")), false)
    }

    fn start_broker(&self) -> Arc<DiskBroker> {
        let sockets = ["disk-disk0.sock", "disk-disk0.control"].map(|name| self.own_file(name));
        let mode = OpenMode { readonly: false, direct: false };
        let files = BrokeredFiles { image: self.image("own.raw"), mode, redo: self.log(), may_have_log: true, sockets };
        Arc::new(DiskBroker::start(files).unwrap())
    }

    fn confine(&self) {
        confinement::of_server(&self.own_file("disk-disk0.control"), None).enter().unwrap();
    }

    /// Runs a program in the place of the server of `own.raw`, which has opened its image.
    fn run(&self, attempt: &Attempt) -> Outcome {
        run(attempt, || self.confine())
    }
}

#[test]
fn a_hostile_disk_server_reaches_its_own_disk_only() {
    let host = Host::new();
    let qmp = host.other_run.path().join("qmp.sock");
    let _qmp = UnixListener::bind(&qmp).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut other_qemu = Command::new("sleep").arg("1000").spawn().unwrap();
    for attempt in [
        Attempt::Read(host.image("other.raw")),
        Attempt::Write(host.image("other.raw")),
        Attempt::Read(host.other_run.path().join("state.json")),
        Attempt::Create(host.images.path().join("created")),
        Attempt::CreateDirectory(host.images.path().join("other.redo")),
        Attempt::RenameDirectory(host.image("other.raw.redo"), host.image("moved")),
        // Rekindle's commands trust the files of the run directory.
        Attempt::Read(host.own_file("state.json")),
        Attempt::Write(host.own_file("state.json")),
        Attempt::Create(host.own_file("fill.json")),
        Attempt::Remove(host.own_file("fill.json")),
        Attempt::SetSignalOwner(other_qemu.id()),
        Attempt::Read("/etc/shadow".into()),
        Attempt::Write("/proc/sys/vm/overcommit_memory".into()),
        Attempt::ConnectUnix(qmp),
        Attempt::ConnectTcp(tcp.local_addr().unwrap()),
        Attempt::Socket(libc::AF_PACKET),
        Attempt::Socket(libc::AF_NETLINK),
        Attempt::StartProgram("/bin/true".into()),
        Attempt::Fork,
        Attempt::Trace(other_qemu.id()),
        Attempt::Signal(other_qemu.id()),
        Attempt::Namespace(CloneFlags::CLONE_NEWUSER),
        Attempt::Mount(host.own_run.path().into()),
        Attempt::Ring,
        Attempt::Bpf,
        Attempt::Remove(host.image("other.raw")),
    ] {
        assert_ne!(host.run(&attempt), Outcome::Done, "{attempt:?}, confined");
        assert_eq!(run(&attempt, || ()), Outcome::Done, "{attempt:?}, not confined");
    }
    other_qemu.kill().unwrap();
    other_qemu.wait().unwrap();
}

/// Begins and ends a redo log, as a log without writes.
fn begin_and_end(files: &ServedFiles) {
    files.create_directory().unwrap();
    let claim = files.claim().unwrap().expect("a directory");
    drop(files.create("1.log").unwrap());
    assert_eq!(files.create("1.log").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(files.open("2.log").unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(files.peek("1.log", 8).unwrap().expect("a file").length, 0);
    assert_eq!(files.list().unwrap(), ["1.log"]);
    assert_eq!(files.remove_directory().unwrap_err().kind(), io::ErrorKind::DirectoryNotEmpty);
    drop(files.open("1.log").unwrap());
    files.remove("1.log").unwrap();
    files.sync().unwrap();
    files.remove_directory().unwrap();
    drop(claim);
    assert!(files.claim().unwrap().is_none());
}

#[test]
fn a_confined_server_begins_and_ends_redo_logs_again_and_again() {
    let host = Host::new();
    // The attempt succeeds if nothing before it has failed.
    let frames = confinement::frames_directory(&host.own_file("disk-disk0.control"));
    DirBuilder::new().mode(0o700).create(&frames).unwrap();
    let reuse = |name: &str| {
        run(&Attempt::Create(frames.join(name)), || {
            let files = ServedFiles::new(host.log(), Some(host.start_broker()));
            host.confine();
            (0..3).for_each(|_| begin_and_end(&files));
        })
    };
    assert_eq!(reuse("new"), Outcome::Done);
    assert!(frames.join("new").exists());
    fs::create_dir(default_directory(&host.image("own.raw"))).unwrap();
    assert_eq!(reuse("existing"), Outcome::Done);
    assert_eq!(entries(host.images.path()), ["other.raw", "other.raw.redo", "own.raw"], "nothing is left");
}

#[test]
fn a_hostile_disk_server_gets_nothing_else_from_its_broker() {
    let host = Host::new();
    fs::create_dir(default_directory(&host.image("own.raw"))).unwrap();
    let mut other_qemu = Command::new("sleep").arg("1000").spawn().unwrap();
    let other = Process::of(other_qemu.id()).unwrap();
    let address = rekindle_kernel::maps::of(other).unwrap()[0].range.start;
    let outcome = run(&Attempt::Read("/dev/null".into()), || {
        let broker = host.start_broker();
        let (files, memory) =
            (ServedFiles::new(host.log(), Some(Arc::clone(&broker))), FrontEndMemory::new(Some(broker)));
        for name in [
            "../other.raw",
            "/etc/shadow",
            "..",
            ".",
            "",
            "a/b",
            "1.log/",
            "./1.log",
            "n\0n",
            "other.raw",
            "1.logs",
            "01.log",
        ] {
            assert_eq!(files.open(name).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{name}");
            assert_eq!(files.create(name).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{name}");
            assert_eq!(files.peek(name, 1).unwrap(), None, "{name}");
            assert_eq!(files.remove(name).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{name}");
        }
        // A process that has not connected to the server.
        assert_eq!(memory.touch(other, address).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert!(!memory.is_alive(other) && other.is_alive());
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let connected = memory.identify(&ours).unwrap();
        assert!(memory.is_alive(connected));
        memory.touch(connected, connected_address()).unwrap();
    });
    assert_eq!(outcome, Outcome::Done);
    other_qemu.kill().unwrap();
    other_qemu.wait().unwrap();
}

/// Returns an address that this process has mapped.
fn connected_address() -> u64 {
    static BYTE: u8 = 0;
    std::ptr::from_ref(&BYTE) as u64
}

fn entries(directory: &Path) -> Vec<String> {
    let names = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}
