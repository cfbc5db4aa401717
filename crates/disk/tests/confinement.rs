//! What a program that runs in the place of a disk's server can reach.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use nix::sched::CloneFlags;
use rekindle_disk::confinement::ServerFiles;
use rekindle_disk::image::OpenMode;
use rekindle_disk::redo::files::{LocalFiles, LogFiles};
use rekindle_disk::redo::offline::default_directory;
use rekindle_testing::hostile::{Attempt, Outcome, run};
use std::fs::{self, Permissions};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

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
        fs::write(host.other_run.path().join("state.json"), "{}").unwrap();
        host
    }

    fn image(&self, name: &str) -> PathBuf {
        self.images.path().join(name)
    }

    /// Runs a program in the place of the server of `own.raw`, which has opened its image.
    fn run(&self, attempt: &Attempt) -> Outcome {
        let image = self.image("own.raw");
        let redo = default_directory(&image);
        let control = self.own_run.path().join("disk-disk0.control");
        let mode = OpenMode { readonly: false, direct: false };
        let files = ServerFiles { image: &image, mode, redo: Some(&redo), control: &control, is_awaiting: false };
        run(attempt, || files.confinement().enter().unwrap())
    }
}

#[test]
fn a_hostile_disk_server_reaches_its_own_vm_only() {
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
fn begin_and_end(files: &LocalFiles) {
    files.create_directory().unwrap();
    let claim = files.claim().unwrap().expect("a directory");
    drop(files.create("1.log").unwrap());
    assert_eq!(files.list().unwrap(), ["1.log"]);
    files.remove("1.log").unwrap();
    files.remove_directory().unwrap();
    drop(claim);
}

#[test]
fn a_confined_server_begins_and_ends_redo_logs_again_and_again() {
    let host = Host::new();
    let redo = default_directory(&host.image("own.raw"));
    let evidence = |name: &str| host.own_run.path().join(name);
    // The attempt succeeds if nothing before it has failed.
    let reuse = |files: LocalFiles, name: &str| {
        let done = Attempt::Create(evidence(name));
        let (image, control) = (host.image("own.raw"), evidence("disk-disk0.control"));
        run(&done, || {
            let mode = OpenMode { readonly: false, direct: false };
            let redo = Some(files.path());
            ServerFiles { image: &image, mode, redo, control: &control, is_awaiting: false }
                .confinement()
                .enter()
                .unwrap();
            for _ in 0..3 {
                begin_and_end(&files);
            }
            files.remove_reserve();
        })
    };
    assert_eq!(reuse(LocalFiles::new(&redo, false).reserved(), "new"), Outcome::Done);
    assert!(evidence("new").exists());
    fs::create_dir(&redo).unwrap();
    assert_eq!(reuse(LocalFiles::new(&redo, false).reserved(), "existing"), Outcome::Done);
    assert_eq!(entries(host.images.path()), ["other.raw", "own.raw"], "nothing is left");
}

fn entries(directory: &Path) -> Vec<String> {
    let names = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}
