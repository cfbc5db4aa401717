//! QEMUs with the micro guest that were not started by Rekindle.

use crate::micro::{self, exchange, free_port};
use crate::{DEADLINE, poll, tools, wait_for};
use rekindle_kernel::process::Process;
use rekindle_qemu::qmp::Qmp;
use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Time limit of a first reply. QEMU's user network accepts a connection before its guest can, and retransmits a lost packet only after 6 to 48 s. A
/// new connection is faster.
const FIRST_REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// How to start a QEMU.
#[derive(Debug, Clone)]
pub struct QemuOptions<'a> {
    binary: &'a Path,
    arguments: Vec<String>,
    /// Addition to the guest's kernel command line.
    kernel_options: String,
    /// A cpio archive that the guest's kernel unpacks over its RAM disk.
    overlay: Option<Vec<u8>>,
    user: Option<&'a str>,
    is_daemon: bool,
}

impl<'a> QemuOptions<'a> {
    /// Makes options for a guest with two processors (one does not run yet, see [`micro::ONE_CPU`]), a network card and a VGA card. The caller adds the machine and
    /// the memory.
    pub fn new(binary: &'a Path) -> Self {
        Self {
            binary,
            arguments: Vec::new(),
            kernel_options: String::new(),
            overlay: None,
            user: None,
            is_daemon: false,
        }
    }

    /// Adds arguments.
    #[must_use]
    pub fn arguments(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        self
    }

    /// Appends to the guest's kernel command line.
    #[must_use]
    pub fn append(mut self, text: &str) -> Self {
        self.kernel_options += &format!(" {text}");
        self
    }

    /// Adds a RAM disk (a cpio archive) that the guest's kernel unpacks over the first one.
    #[must_use]
    pub fn overlay(mut self, archive: Vec<u8>) -> Self {
        self.overlay = Some(archive);
        self
    }

    /// Runs QEMU as another user, in group `nogroup`.
    #[must_use]
    pub fn user(mut self, user: &'a str) -> Self {
        self.user = Some(user);
        self
    }

    /// Starts QEMU in the background, without a parent that waits for it, and with a pid file.
    #[must_use]
    pub fn daemon(mut self) -> Self {
        self.is_daemon = true;
        self
    }

    /// Writes the guest's image into the directory. A copy, because another user may be unable to read the image in its
    /// own directory.
    fn write_image(&self, directory: &Path) {
        fs::copy(tools::micro().join(micro::KERNEL), directory.join(micro::KERNEL)).unwrap();
        let mut initrd = fs::read(tools::micro().join("initrd")).unwrap();
        if let Some(overlay) = &self.overlay {
            initrd.resize(initrd.len().next_multiple_of(4), 0);
            initrd.extend(overlay);
        }
        fs::write(directory.join("initrd"), initrd).unwrap();
    }

    /// Returns the command without arguments, which starts QEMU as its user. Gives the directory to that user.
    fn program(&self, directory: &Path) -> Command {
        let Some(user) = self.user else { return Command::new(self.binary) };
        assert!(Command::new("chown").args(["-R", user]).arg(directory).status().unwrap().success());
        let mut command = Command::new("setpriv");
        command.args(["--reuid", user, "--regid", "nogroup", "--clear-groups"]).arg(self.binary);
        command
    }

    /// Prepares the directory and returns the command. `port` of this host is forwarded to the guest.
    fn command(&self, directory: &Path, port: u16) -> Command {
        self.write_image(directory);
        let path = |name: &str| directory.join(name).to_string_lossy().into_owned();
        let mut command = self.program(directory);
        command.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-nodefaults", "-display", "none"]);
        command.args(["-kernel", &path(micro::KERNEL), "-initrd", &path("initrd")]);
        command.args(["-append", &format!("{} {}{}", micro::KERNEL_OPTIONS, micro::ONE_CPU, self.kernel_options)]);
        command.args(["-serial", &format!("file:{}", path("console"))]);
        command.args(["-qmp", &format!("unix:{},server=on,wait=off", path("qmp"))]);
        let forward = format!("user,id=net,hostfwd=tcp:127.0.0.1:{port}-:{}", micro::PORT);
        command.args(["-netdev", &forward, "-device", "virtio-net-pci,netdev=net,mac=52:54:00:00:00:77"]);
        if self.is_daemon {
            command.args(["-daemonize", "-pidfile", &path("pid")]);
        }
        command.args(["-device", "VGA"]).args(&self.arguments).stdin(Stdio::null()).stdout(Stdio::null());
        command
    }
}

/// A running QEMU, which is killed on drop.
pub struct ForeignQemu {
    child: Child,
    directory: PathBuf,
    port: u16,
    /// The QEMU process, since `setpriv` replaces itself by QEMU.
    pub process: Process,
}

impl ForeignQemu {
    /// Starts a QEMU with its files in `directory`. Returns before its guest is up.
    pub fn start(directory: &Path, options: &QemuOptions<'_>) -> Self {
        // A QEMU of another user must have access.
        fs::set_permissions(directory, PermissionsExt::from_mode(0o755)).unwrap();
        let port = free_port();
        let mut command = options.command(directory, port);
        let log = File::create(directory.join("log")).unwrap();
        let mut child = command.stderr(log).spawn().unwrap();
        let process = if options.is_daemon {
            assert!(child.wait().unwrap().success(), "{}", fs::read_to_string(directory.join("log")).unwrap());
            named_process(directory).expect("a pid file")
        } else {
            Process::of(child.id()).unwrap()
        };
        Self { child, directory: directory.to_owned(), port, process }
    }

    /// Starts a QEMU with its files in `directory` and waits until its guest is up.
    pub fn boot(directory: &Path, options: &QemuOptions<'_>) -> Self {
        let qemu = Self::start(directory, options);
        let is_up = || {
            assert!(qemu.process.is_alive(), "QEMU has ended: {}", qemu.output());
            qemu.is_up().then_some(())
        };
        assert!(poll(DEADLINE, is_up).is_some(), "the guest is not up: {}", qemu.output());
        qemu
    }

    /// Returns the port of this host that is forwarded to the guest.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the process that the pid file of a daemon names now; `None` if it has ended.
    pub fn named_process(&self) -> Option<Process> {
        named_process(&self.directory)
    }

    /// Returns the path of a file of this QEMU: `qmp`, `console`, `log`, `pid`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Returns the output of the guest's console.
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.path("console")).unwrap_or_default()).into_owned()
    }

    /// Returns QEMU's log and the last lines of the guest's console.
    pub fn output(&self) -> String {
        let console = self.console();
        let last_lines: Vec<_> = console.lines().rev().take(5).collect();
        format!("{} {last_lines:?}", fs::read_to_string(self.path("log")).unwrap_or_default())
    }

    /// Connects to the QMP socket.
    pub fn qmp(&self) -> Qmp {
        let connect = || Qmp::connect(&self.path("qmp"), DEADLINE).ok();
        wait_for("QMP", DEADLINE, connect)
    }

    fn try_ask(&self, command: &str, timeout: Duration) -> io::Result<String> {
        exchange(&TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?, command, timeout)
    }

    /// Returns whether the guest replies.
    pub fn is_up(&self) -> bool {
        self.try_ask("boot-id", FIRST_REPLY_TIMEOUT).is_ok()
    }

    /// Sends a command to the guest and returns the text after `ok` in the reply.
    #[track_caller]
    pub fn ask(&self, command: &str) -> String {
        match self.try_ask(command, DEADLINE) {
            Ok(reply) => match reply.strip_prefix("ok") {
                Some(answer) => answer.trim().into(),
                None => panic!("the guest answers `{command}`: {reply}: {}", self.output()),
            },
            Err(e) => panic!("`{command}` to the guest: {e}: {}", self.output()),
        }
    }

    /// Kills QEMU.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn named_process(directory: &Path) -> Option<Process> {
    let number = fs::read_to_string(directory.join("pid")).ok()?.trim().parse().ok()?;
    Process::of(number).ok().filter(Process::is_alive)
}

impl Drop for ForeignQemu {
    fn drop(&mut self) {
        if let Some(daemon) = self.named_process() {
            let _ = daemon.kill();
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
