//! One guest: what it says of itself, and what `rekindle` says of it.

use super::eyes::{self, Qemu};
use super::lab::{Done, Lab};
use super::{DEADLINE, wait_for};
use rekindle_kernel::netns;
use serde_json::Value;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A guest of a lab.
pub struct Guest<'a> {
    /// Where it lives.
    pub lab: &'a Lab,
    /// The VM's name.
    pub name: String,
    namespace: Option<String>,
    address: SocketAddr,
}

/// Connects within `patience`, although the host may find no answer to ARP meanwhile.
///
/// The host's kernel probes an address three times, a second apart, for all connections together. An earlier connection that still
/// sends (its FIN, to a guest that was suspended) can have used up the probes, so that a new one fails within milliseconds.
fn connect_with_arp_failures(address: SocketAddr, patience: Duration) -> io::Result<TcpStream> {
    let end = Instant::now() + patience;
    loop {
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&address, left) {
            Err(e) if e.kind() == io::ErrorKind::HostUnreachable && Instant::now() < end => {}
            connected => return connected,
        }
    }
}

impl<'a> Guest<'a> {
    pub(super) fn new(lab: &'a Lab, name: &str, namespace: Option<String>, address: SocketAddr) -> Self {
        Self { lab, name: name.into(), namespace, address }
    }

    /// Its address.
    pub fn ip(&self) -> String {
        self.address.ip().to_string()
    }

    /// A file of its run directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.lab.run_root().join(&self.name).join(name)
    }

    /// Connect to one of its ports, soon.
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

    /// Send a command and give the reply.
    pub fn try_ask(&self, command: &str) -> io::Result<String> {
        self.try_ask_at(self.address.port(), command)
    }

    /// Send a command to one of its ports and give the reply.
    pub fn try_ask_at(&self, port: u16, command: &str) -> io::Result<String> {
        Self::asked(&self.connect(port)?, command, Duration::from_secs(60))
    }

    /// Whether it answers by now. QEMU's user network takes a connection before its guest can, and then lets a packet that
    /// was lost wait for 6 to 48 s: asking again is sooner.
    pub fn is_up(&self) -> bool {
        let soon = Duration::from_secs(2);
        self.connect(self.address.port()).and_then(|stream| Self::asked(&stream, "boot-id", soon)).is_ok()
    }

    fn asked(stream: &TcpStream, command: &str, patience: Duration) -> io::Result<String> {
        stream.set_read_timeout(Some(patience))?;
        writeln!(&*stream, "{command}")?;
        let mut reply = String::new();
        BufReader::new(stream).read_line(&mut reply)?;
        if reply.ends_with('\n') { Ok(reply.trim_end().into()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Send a command whose reply may not come, since the guest ends.
    #[track_caller]
    pub fn tell(&self, command: &str) {
        let stream = self.connect_within(self.address.port(), DEADLINE);
        let sent = stream.and_then(|stream| writeln!(&stream, "{command}"));
        sent.unwrap_or_else(|e| panic!("`{command}` to guest {}: {e}\n{}", self.name, self.lab.scene()));
    }

    /// Send a command to a guest that runs; what it replies after `ok`.
    #[track_caller]
    pub fn ask(&self, command: &str) -> String {
        // A guest that runs on a busy machine may take a while.
        let stream = self.connect_within(self.address.port(), DEADLINE);
        let reply = stream.and_then(|stream| Self::asked(&stream, command, Duration::from_secs(60)));
        let reply = reply.unwrap_or_else(|e| panic!("`{command}` to guest {}: {e}\n{}", self.name, self.lab.scene()));
        let rest = reply.strip_prefix("ok");
        rest.unwrap_or_else(|| panic!("guest {} answers `{command}`: {reply}\n{}", self.name, self.lab.scene()))
            .trim()
            .into()
    }

    /// Wait until it is up.
    #[track_caller]
    pub fn wait_ready(&self) {
        wait_for(&format!("guest {} to be up", self.name), DEADLINE, || {
            assert!(!self.qemus().is_empty(), "guest {}: its QEMU has ended\n{}", self.name, self.lab.scene());
            self.is_up().then_some(())
        });
    }

    /// The kernel's number of this boot.
    #[track_caller]
    pub fn boot_id(&self) -> String {
        self.ask("boot-id")
    }

    /// The guest's counter of ticks.
    #[track_caller]
    pub fn tick(&self) -> u64 {
        self.ask("tick").parse().expect("a number")
    }

    /// Fill memory with a pattern.
    #[track_caller]
    pub fn touch(&self, size: &str) {
        self.ask(&format!("touch {size} 7"));
    }

    /// That the pattern is whole.
    #[track_caller]
    pub fn verify(&self) {
        // It answers a moment before it is free for the next command.
        let answer = wait_for("the guest to be free", DEADLINE, || {
            let answer = self.try_ask("verify").ok()?;
            (!answer.contains("busy with another command")).then_some(answer)
        });
        let pages = answer.strip_prefix("ok ").and_then(|pages| pages.trim().parse::<u64>().ok());
        let pages = pages.unwrap_or_else(|| panic!("guest {} answers `verify`: {answer}", self.name));
        assert!(pages > 0, "no memory was touched in guest {}", self.name);
    }

    /// Run `rekindle COMMAND.. NAME`.
    pub fn rekindle(&self, arguments: &[&str]) -> Done {
        self.lab.rekindle(arguments.iter().copied().chain([self.name.as_str()]))
    }

    /// `rekindle reboot vmm NAME --how HOW ...`, whatever comes of it.
    pub fn reboot(&self, how: &str, arguments: &[&str]) -> Done {
        let first = ["--json", "reboot", "vmm", &self.name, "--how", how];
        self.lab.rekindle(first.into_iter().chain(arguments.iter().copied()))
    }

    /// A warm reboot that has to succeed; its report.
    #[track_caller]
    pub fn warm(&self, arguments: &[&str]) -> Value {
        self.reboot("warm", arguments).ok().json()["vms"][0].clone()
    }

    /// Its status as `rekindle ls` says it.
    #[track_caller]
    pub fn status(&self) -> String {
        let all = self.lab.rekindle(["--json", "ls"]).ok().json();
        let mine = all.as_array().into_iter().flatten().find(|vm| vm["name"] == self.name.as_str());
        match mine.map(|vm| &vm["status"]) {
            Some(Value::String(status)) => status.clone(),
            Some(other) => other.to_string(),
            None => "absent".into(),
        }
    }

    /// Its QEMUs.
    pub fn qemus(&self) -> Vec<Qemu> {
        eyes::qemus(&self.lab.run_root().join(&self.name))
    }

    /// Its only QEMU, which runs the guest.
    #[track_caller]
    pub fn only_qemu(&self) -> Qemu {
        let mut all = self.qemus();
        assert_eq!(all.len(), 1, "exactly one QEMU was expected\n{}", self.lab.scene());
        let qemu = all.remove(0);
        assert_eq!(qemu.run_state().as_deref(), Some("running"), "{}", self.lab.scene());
        qemu
    }

    /// That all is as it should be of a VM that nothing is done to: one QEMU, which runs, and nothing left over.
    #[track_caller]
    pub fn assert_sound(&self) {
        let qemu = self.only_qemu();
        assert_eq!(self.status(), "running", "{}", self.lab.scene());
        assert!(!self.file("operation.json").exists(), "operation.json is left\n{}", self.lab.scene());
        assert!(!self.file("handover.stream").exists(), "handover.stream is left");
        let directories: Vec<_> = super::lab::entries(&self.file(""))
            .into_iter()
            .filter(|path| path.is_dir() && !path.is_symlink())
            .collect();
        assert_eq!(directories, std::slice::from_ref(&qemu.directory), "directories of other QEMUs are left");
        let shown = self.rekindle(&["--json", "show"]).ok().json();
        assert_eq!(shown["vmm"]["pid"], qemu.process.pid, "another QEMU is recorded than runs: {shown:#}");
        let mine = eyes::scheduling(std::process::id());
        assert_eq!(qemu.scheduling(), mine, "threads of QEMU are left before others, or behind them");
        if self.namespace.is_some() {
            let known = |name: &String| name.ends_with("-net0") || name == super::bridge::NEAR;
            let others: Vec<_> = self.lab.interfaces().into_iter().filter(|name| !known(name)).collect();
            assert!(others.is_empty(), "stand-ins of taps are left: {others:?}");
        }
        // Phases of its boot are to be there.
        let mut saved = super::lab::entries(&self.lab.save_dir());
        saved.retain(|path| path.extension().is_none_or(|end| end != "phase"));
        assert!(saved.is_empty(), "saved states are left: {saved:?}");
    }
}
