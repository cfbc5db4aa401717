//! A protector as a service of systemd: what it reports to a socket in place of systemd's, and its settings file.

use crate::common::device::Tmpfs;
use crate::common::protector::Protector;
use crate::common::{DEADLINE, Lab, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, Permissions};
use std::io::BufReader;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::{Duration, Instant};

/// The interval in which the watchdog requires a message.
const WATCHDOG: Duration = Duration::from_secs(2);

/// The socket of a service manager, and the last status.
struct Manager {
    socket: UnixDatagram,
    is_ready: bool,
    watchdogs: u32,
    status: String,
    is_stopping: bool,
}

impl Manager {
    fn new(path: &Path) -> Self {
        let socket = UnixDatagram::bind(path).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        Self { socket, is_ready: false, watchdogs: 0, status: String::new(), is_stopping: false }
    }

    /// Receives messages until `is_reached`.
    #[track_caller]
    fn wait(&mut self, what: &str, is_reached: impl Fn(&Self) -> bool) {
        let end = Instant::now() + DEADLINE;
        let mut buffer = [0; 4096];
        while !is_reached(self) {
            assert!(Instant::now() < end, "no message: {what}; the last status is {}", self.status);
            let Ok(length) = self.socket.recv(&mut buffer) else { continue };
            for line in String::from_utf8_lossy(&buffer[..length]).lines() {
                match line.split_once('=').unwrap() {
                    ("READY", "1") => self.is_ready = true,
                    ("WATCHDOG", "1") => self.watchdogs += 1,
                    ("STOPPING", "1") => self.is_stopping = true,
                    ("STATUS", status) => self.status = status.into(),
                    _ => panic!("{line}"),
                }
            }
        }
    }

    /// Counts the messages for the watchdog in three of its intervals.
    fn watchdogs_in_three_intervals(&mut self) -> u32 {
        let (before, end) = (self.watchdogs, Instant::now() + 3 * WATCHDOG);
        self.wait("any", |_| Instant::now() >= end);
        self.watchdogs - before
    }
}

#[test]
fn a_service_reports_that_it_is_ready_its_status_and_that_it_is_not_stuck() {
    let lab = Lab::new();
    let guest = lab.vm("web").memory("96M").boot(&[]);
    let small = Tmpfs::new(&lab, "small", 512);
    let store = small.path.join("store");
    lab.rekindle(["store", "init", store.to_str().unwrap()]).ok();
    // All options but the store and the interval are in the settings file.
    let settings = lab.path("protect/web.toml");
    fs::create_dir(settings.parent().unwrap()).unwrap();
    fs::write(&settings, format!("store = {store:?}\nkeep = 2\nevery = \"1h\"\n")).unwrap();
    fs::set_permissions(&settings, Permissions::from_mode(0o600)).unwrap();

    let socket = lab.path("notify");
    let mut manager = Manager::new(&socket);
    let mut command = lab.command(["--json", "protect", "web", "--every", "200ms"]);
    command.env("NOTIFY_SOCKET", &socket).env("WATCHDOG_USEC", WATCHDOG.as_micros().to_string());
    let mut child = command.spawn().unwrap();
    let mut protector = Protector { lines: BufReader::new(child.stdout.take().unwrap()), child };
    manager.wait("ready", |manager| manager.is_ready);
    manager.wait("a commit", |manager| manager.status.starts_with("checkpoint "));
    assert!(manager.status.ends_with(" s ago"), "{}", manager.status);
    assert!(manager.watchdogs_in_three_intervals() >= 3, "systemd would kill the protector");

    // The store is full: no checkpoint is possible, and a restart would not help.
    small.fill();
    guest.ask("dirty 20 32 random");
    protector.wait("store-away");
    manager.wait("the store is full", |manager| manager.status.contains("; the store cannot be written: "));
    assert!(manager.watchdogs_in_three_intervals() >= 3, "systemd would restart a protector that waits for its store");
    guest.ask("dirty 0");
    small.empty();
    protector.wait("store-back");
    manager.wait("the store has room", |manager| manager.status.ends_with(" s ago"));

    // `keep` is that of the file.
    protector.next_checkpoint();
    protector.next_checkpoint();
    let listed = lab.rekindle(["--json", "store", "ls", store.to_str().unwrap()]).ok().json();
    let count = listed["checkpoints"].as_array().unwrap().len();
    assert!(count <= 3, "{count} checkpoints");

    // A stop resumes the guest and commits what is being taken.
    let pid = Pid::from_raw(i32::try_from(protector.child.id()).unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    manager.wait("the stop", |manager| manager.is_stopping);
    let ended = || protector.child.try_wait().unwrap();
    assert!(wait_for("the protector to end", DEADLINE, ended).success());
    assert_eq!(guest.status(), "running");
    guest.assert_sound();
}

#[test]
fn a_service_of_a_vm_that_does_not_run_fails_before_it_is_ready() {
    let lab = Lab::without_root();
    let socket = lab.path("notify");
    let mut manager = Manager::new(&socket);
    let store = lab.path("store");
    let mut command = lab.command(["protect", "web", "--store", store.to_str().unwrap()]);
    command.env("NOTIFY_SOCKET", &socket);
    lab.finish(command).status(1);
    manager.wait("the end", |manager| manager.is_stopping);
    assert!(!manager.is_ready);
}

#[test]
fn a_service_is_not_installed_where_systemd_does_not_run_and_the_error_has_the_command() {
    if Path::new("/run/systemd/system").exists() {
        return;
    }
    let lab = Lab::new();
    lab.vm("web").memory("96M").boot(&[]);
    let store = lab.path("store");
    let store = store.to_str().unwrap();
    let failed = lab.rekindle(["protect", "web", "--store", store, "--every", "5s", "--install-service"]).status(1);
    for words in ["systemd does not manage this host", &format!("rekindle protect web --every 5s --store {store}")] {
        assert!(failed.stderr.contains(words), "{}", failed.stderr);
    }
    assert!(!lab.path("protect").exists(), "a settings file was written");
}
