//! One guest of a test: its answers over the network, and Rekindle's reports about it.

use super::lab::{CommandResult, Lab};
use super::observe::{self, Qemu};
use super::{DEADLINE, wait_for};
use rekindle_kernel::netns;
use rekindle_testing::micro::exchange;
use rekindle_testing::poll;
use serde_json::Value;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A guest of a lab. It need not be running.
pub struct Guest<'a> {
    pub lab: &'a Lab,
    /// The VM's name.
    pub name: String,
    namespace: Option<String>,
    address: SocketAddr,
}

/// Connects within `patience`. Retries if the host finds no answer to ARP.
///
/// The host's kernel probes an address three times, a second apart, for all connections together. An earlier connection
/// that still sends (its FIN, to a guest that was suspended) can have used up the probes, so that a new connection
/// fails within milliseconds.
fn connect_with_arp_failures(address: SocketAddr, patience: Duration) -> io::Result<TcpStream> {
    let end = Instant::now() + patience;
    loop {
        let remaining = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&address, remaining) {
            Err(e) if e.kind() == io::ErrorKind::HostUnreachable && Instant::now() < end => {}
            connected => return connected,
        }
    }
}

impl<'a> Guest<'a> {
    pub(super) fn new(lab: &'a Lab, name: &str, namespace: Option<String>, address: SocketAddr) -> Self {
        Self { lab, name: name.into(), namespace, address }
    }

    /// Returns a guest whose command service is at this address of the host.
    pub fn at(lab: &'a Lab, name: &str, address: SocketAddr) -> Self {
        Self::new(lab, name, None, address)
    }

    pub fn ip(&self) -> String {
        self.address.ip().to_string()
    }

    /// Returns the path of a file in the VM's run directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.lab.run_root().join(&self.name).join(name)
    }

    /// Connects to a port of the guest, within 2 s.
    pub fn connect(&self, port: u16) -> io::Result<TcpStream> {
        self.connect_within(port, Duration::from_secs(2))
    }

    fn connect_within(&self, port: u16, patience: Duration) -> io::Result<TcpStream> {
        let address = SocketAddr::new(self.address.ip(), port);
        let connect = move || connect_with_arp_failures(address, patience);
        match &self.namespace {
            Some(namespace) => netns::run_in(namespace, connect)?,
            None => connect(),
        }
    }

    /// Sends a command to the guest and returns the reply.
    pub fn try_ask(&self, command: &str) -> io::Result<String> {
        self.try_ask_at(self.address.port(), command)
    }

    /// Sends a command to a port of the guest and returns the reply.
    pub fn try_ask_at(&self, port: u16, command: &str) -> io::Result<String> {
        exchange(&self.connect(port)?, command, Duration::from_secs(60))
    }

    /// Returns whether the guest answers within 2 s. QEMU's user network accepts a connection before its guest can, and
    /// retransmits a lost packet only after 6 to 48 s: another connection is faster.
    pub fn is_up(&self) -> bool {
        let soon = Duration::from_secs(2);
        self.connect(self.address.port()).and_then(|stream| exchange(&stream, "boot-id", soon)).is_ok()
    }

    /// Sends a command without waiting for a reply: the guest may end before it replies.
    #[track_caller]
    pub fn send(&self, command: &str) {
        let stream = self.connect_within(self.address.port(), DEADLINE);
        let sent = stream.and_then(|stream| writeln!(&stream, "{command}"));
        sent.unwrap_or_else(|e| panic!("`{command}` to guest {}: {e}\n{}", self.name, self.lab.state_report()));
    }

    /// Sends a command to a running guest and returns what follows `ok` in the reply.
    #[track_caller]
    pub fn ask(&self, command: &str) -> String {
        // A guest may take long to reply on a busy machine.
        let stream = self.connect_within(self.address.port(), DEADLINE);
        let reply = stream.and_then(|stream| exchange(&stream, command, Duration::from_secs(60)));
        let reply =
            reply.unwrap_or_else(|e| panic!("`{command}` to guest {}: {e}\n{}", self.name, self.lab.state_report()));
        let value = reply.strip_prefix("ok");
        value
            .unwrap_or_else(|| panic!("guest {} answers `{command}`: {reply}\n{}", self.name, self.lab.state_report()))
            .trim()
            .into()
    }

    /// Waits until the guest answers.
    #[track_caller]
    pub fn wait_ready(&self) {
        let is_up = poll(DEADLINE, || {
            assert!(!self.qemus().is_empty(), "guest {}: its QEMU has ended\n{}", self.name, self.lab.state_report());
            self.is_up().then_some(())
        });
        assert!(is_up.is_some(), "guest {} is not up\n{}", self.name, self.lab.state_report());
    }

    /// Returns the kernel's ID of this boot.
    #[track_caller]
    pub fn boot_id(&self) -> String {
        self.ask("boot-id")
    }

    /// Returns the guest's tick counter.
    #[track_caller]
    pub fn tick(&self) -> u64 {
        self.ask("tick").parse().expect("a number")
    }

    /// Fills guest memory with a pattern.
    #[track_caller]
    pub fn touch(&self, size: &str) {
        self.ask(&format!("touch {size} 7"));
    }

    /// Asserts that the pattern of [`Guest::touch`] is intact.
    #[track_caller]
    pub fn verify(&self) {
        // The guest replies shortly before it can accept the next command.
        let answer = wait_for("the guest to be free", DEADLINE, || {
            let answer = self.try_ask("verify").ok()?;
            (!answer.contains("busy with another command")).then_some(answer)
        });
        let pages = answer.strip_prefix("ok ").and_then(|pages| pages.trim().parse::<u64>().ok());
        let pages = pages.unwrap_or_else(|| panic!("guest {} answers `verify`: {answer}", self.name));
        assert!(pages > 0, "no memory was touched in guest {}", self.name);
    }

    /// Runs `rekindle COMMAND.. NAME`.
    pub fn rekindle(&self, arguments: &[&str]) -> CommandResult {
        self.lab.rekindle(arguments.iter().copied().chain([self.name.as_str()]))
    }

    /// Runs `rekindle replace-qemu NAME --how HOW ...`, which may fail.
    pub fn reboot(&self, how: &str, arguments: &[&str]) -> CommandResult {
        let first = ["--json", "replace-qemu", &self.name, "--how", how];
        self.lab.rekindle(first.into_iter().chain(arguments.iter().copied()))
    }

    /// Runs a warm reboot that has to succeed and returns its report.
    #[track_caller]
    pub fn warm(&self, arguments: &[&str]) -> Value {
        self.reboot("warm", arguments).ok().json()["vms"][0].clone()
    }

    /// Returns the status that `rekindle status` reports.
    #[track_caller]
    pub fn status(&self) -> String {
        let listed = self.lab.rekindle(["--json", "ls"]).ok().json();
        let mine = listed.as_array().into_iter().flatten().find(|vm| vm["name"] == self.name.as_str());
        match mine.map(|vm| &vm["status"]) {
            Some(Value::String(status)) => status.clone(),
            Some(other) => other.to_string(),
            None => "absent".into(),
        }
    }

    pub fn qemus(&self) -> Vec<Qemu> {
        observe::qemus(&self.lab.run_root().join(&self.name))
    }

    /// Returns the VM's QEMU. Asserts that it is the only one. The guest may be stopped, e.g. by a checkpoint.
    #[track_caller]
    pub fn single_qemu(&self) -> Qemu {
        let mut qemus = self.qemus();
        assert_eq!(qemus.len(), 1, "exactly one QEMU was expected\n{}", self.lab.state_report());
        qemus.remove(0)
    }

    /// Returns the VM's QEMU. Asserts that it is the only one and runs the guest. While checkpoints are taken, the
    /// guest may be stopped; [`Guest::single_qemu`] permits that.
    #[track_caller]
    pub fn only_qemu(&self) -> Qemu {
        let qemu = self.single_qemu();
        assert_eq!(qemu.run_state().as_deref(), Some("running"), "{}", self.lab.state_report());
        qemu
    }

    /// Asserts that the VM runs in one QEMU, and that no operation has left files.
    #[track_caller]
    pub fn assert_sound(&self) {
        let qemu = self.only_qemu();
        assert_eq!(self.status(), "running", "{}", self.lab.state_report());
        assert!(!self.file("operation.json").exists(), "operation.json is left\n{}", self.lab.state_report());
        assert!(!self.file("handover.stream").exists(), "handover.stream is left");
        let directories: Vec<_> = super::lab::entries(&self.file(""))
            .into_iter()
            .filter(|path| path.is_dir() && !path.is_symlink() && !path.ends_with("frames"))
            .collect();
        assert_eq!(directories, std::slice::from_ref(&qemu.directory), "directories of other QEMUs are left");
        let shown = self.rekindle(&["--json", "show"]).ok().json();
        assert_eq!(shown["vmm"]["pid"], qemu.process.pid, "another QEMU is recorded than runs: {shown:#}");
        let mine = observe::scheduling(std::process::id());
        assert_eq!(qemu.scheduling(), mine, "QEMU's threads have kept a changed priority");
        if self.namespace.is_some() {
            let known = |name: &String| name.ends_with("-net0") || name == super::bridge::NEAR;
            let others: Vec<_> = self.lab.interfaces().into_iter().filter(|name| !known(name)).collect();
            assert!(others.is_empty(), "stand-ins of taps are left: {others:?}");
        }
        // Boot snapshots stay.
        let mut saved = super::lab::entries(&self.lab.save_dir());
        saved.retain(|path| path.extension().is_none_or(|end| end != "phase"));
        assert!(saved.is_empty(), "saved states are left: {saved:?}");
    }
}
