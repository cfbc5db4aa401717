//! Stock QEMUs with the micro guest, started without Rekindle.

use super::{DEADLINE, wait_for};
use rekindle_kernel::process::Process;
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::qmp::Qmp;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

/// Programs and files that the tests need.
pub struct Tools {
    /// The newer QEMU.
    pub new: PathBuf,
    /// QEMU 7.2.
    pub old: PathBuf,
    /// The guest's directory.
    pub micro: PathBuf,
}

pub fn tools() -> &'static Tools {
    static TOOLS: OnceLock<Tools> = OnceLock::new();
    TOOLS.get_or_init(|| {
        let given = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let mut known = BTreeMap::new();
        if given("QEMU_NEW").is_none() || given("QEMU_OLD").is_none() {
            let text = script("scripts/setup", &["--print-env"]);
            let pairs = text.lines().filter_map(|line| line.split_once('='));
            known.extend(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())));
        }
        let path = |name: &str| PathBuf::from(given(name).or(known.get(name).cloned()).unwrap_or_default());
        let micro = given("REKINDLE_TEST_MICRO")
            .unwrap_or_else(|| script("tests/images/build", &["micro"]).lines().last().unwrap_or("").into());
        let tools = Tools { new: path("QEMU_NEW"), old: path("QEMU_OLD"), micro: micro.into() };
        for file in [&tools.new, &tools.old, &tools.micro.join("vmlinuz"), &tools.micro.join("initrd")] {
            assert!(file.exists(), "{} is missing; run: scripts/setup && tests/images/build micro", file.display());
        }
        tools
    })
}

fn script(name: &str, arguments: &[&str]) -> String {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name);
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{name} failed; run: scripts/setup\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Kind of the guest's RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ram {
    /// A shared file.
    File,
    /// A shared memfd.
    Memfd,
    /// Private memory, as with `-m`.
    Private,
}

/// Options of a QEMU.
pub struct Config<'a> {
    pub binary: &'a Path,
    pub ram: Ram,
    /// Additional arguments.
    pub more: Vec<String>,
    /// A RAM disk that is unpacked over the guest's.
    pub overlay: Option<PathBuf>,
    /// A directory to use instead of a new one.
    pub directory: Option<PathBuf>,
}

impl<'a> Config<'a> {
    pub fn new(binary: &'a Path, ram: Ram) -> Self {
        Self { binary, ram, more: Vec::new(), overlay: None, directory: None }
    }

    /// Adds arguments.
    pub fn with(mut self, more: &[&str]) -> Self {
        self.more.extend(more.iter().map(|word| (*word).to_owned()));
        self
    }
}

/// MiB of RAM of each guest.
pub const MIB: u64 = 192;

/// A running QEMU.
pub struct Qemu {
    child: Child,
    directory: tempfile::TempDir,
    port: u16,
    pub process: Process,
}

impl Qemu {
    /// Starts a QEMU; returns before its guest is up.
    pub fn start(config: Config<'_>) -> Self {
        let made = tempfile::Builder::new().prefix("rekindle-test-").tempdir_in("/dev/shm").unwrap();
        // A QEMU of another user must have access.
        fs::set_permissions(made.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let directory = made.path().to_owned();
        let initrd = directory.join("initrd");
        let mut archive = fs::read(tools().micro.join("initrd")).unwrap();
        if let Some(overlay) = &config.overlay {
            archive.resize(archive.len().next_multiple_of(4), 0);
            archive.extend(fs::read(overlay).unwrap());
        }
        fs::write(&initrd, archive).unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let mut command = Command::new(config.binary);
        let path = |name: &str| directory.join(name).to_string_lossy().into_owned();
        let memory = match config.ram {
            Ram::File => format!("memory-backend-file,id=ram,size={MIB}M,share=on,mem-path={}", path("ram")),
            Ram::Memfd => format!("memory-backend-memfd,id=ram,size={MIB}M,share=on"),
            Ram::Private => format!("memory-backend-ram,id=ram,size={MIB}M"),
        };
        command.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-nodefaults", "-display", "none"]);
        command.args(["-machine", "q35,memory-backend=ram,suppress-vmdesc=on", "-m", &format!("{MIB}M")]);
        command.args(["-global", "migration.send-configuration=off", "-object", &memory]);
        command.arg("-kernel").arg(tools().micro.join("vmlinuz")).arg("-initrd").arg(&initrd);
        command.args(["-append", "console=ttyS0 quiet", "-serial", &format!("file:{}", path("console"))]);
        command.args(["-qmp", &format!("unix:{},server=on,wait=off", path("qmp"))]);
        command.args(["-netdev", &format!("user,id=net,hostfwd=tcp:127.0.0.1:{port}-:7000")]);
        command.args(["-device", "virtio-net-pci,netdev=net", "-device", "VGA"]).args(&config.more);
        let log = fs::File::create(directory.join("log")).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let process = Process::of(child.id()).unwrap();
        Self { child, directory: made, port, process }
    }

    /// Starts a QEMU and waits until its guest is up.
    pub fn boot(config: Config<'_>) -> Self {
        let qemu = Self::start(config);
        wait_for(
            || format!("the guest to be up: {}", qemu.output()),
            || {
                assert!(qemu.process.is_alive(), "QEMU ended: {}", qemu.output());
                qemu.try_ask("tick")
            },
        );
        qemu
    }

    /// Path of one of its files: `qmp`, `console`, `ram`, `log`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// QEMU's log, and the last lines of the guest's console.
    pub fn output(&self) -> String {
        let console = self.console();
        let tail: Vec<_> = console.lines().rev().take(5).collect();
        format!("{} {tail:?}", fs::read_to_string(self.path("log")).unwrap_or_default())
    }

    /// The guest's console.
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.path("console")).unwrap_or_default()).into_owned()
    }

    /// Connects to its QMP socket.
    pub fn qmp(&self) -> Qmp {
        wait_for(|| format!("QMP: {}", self.output()), || Qmp::connect(&self.path("qmp"), DEADLINE).ok())
    }

    fn try_ask(&self, command: &str) -> Option<String> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).ok()?;
        stream.set_read_timeout(Some(DEADLINE)).ok()?;
        writeln!(&stream, "{command}").ok()?;
        let mut reply = String::new();
        BufReader::new(stream).read_line(&mut reply).ok()?;
        reply.strip_prefix("ok").map(|rest| rest.trim().to_owned())
    }

    /// Sends a command to the guest; returns its reply after `ok`.
    #[track_caller]
    pub fn ask(&self, command: &str) -> String {
        let reply = self.try_ask(command);
        reply.unwrap_or_else(|| panic!("the guest does not answer `{command}`: {}", self.output()))
    }

    /// Fills memory with a pattern, and rewrites random parts of it continuously.
    #[track_caller]
    pub fn write_continuously(&self) {
        self.ask("touch 48M 7");
        self.ask("dirty 20 48 random");
    }

    /// Asserts that the pattern is intact.
    #[track_caller]
    pub fn verify(&self) {
        self.ask("dirty 0");
        assert!(self.ask("verify").parse::<u64>().unwrap() > 0);
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Stops or resumes the guest.
pub fn pause(qmp: &mut Qmp, stop: bool) {
    let _: Value = qmp.execute(if stop { "stop" } else { "cont" }, ()).unwrap();
}

/// Reads all blocks of a stopped guest.
pub fn everything(ram: &GuestRam) -> Vec<Vec<u8>> {
    ram.blocks()
        .iter()
        .map(|block| {
            let mut all = vec![0; (block.used().end - block.address) as usize];
            for run in ram.populated(block).unwrap() {
                let part = &mut all[run.start as usize..run.end as usize];
                ram.read(block, std::slice::from_ref(&run), part).unwrap();
            }
            all
        })
        .collect()
}

/// Writes an archive that the kernel unpacks over the guest's RAM disk (cpio, `newc`): files with their modes.
pub fn overlay(path: &Path, files: &[(&str, u32, &str)]) {
    let mut archive = Vec::new();
    let end = [("TRAILER!!!", 0, "")];
    for (number, (name, mode, content)) in files.iter().chain(&end).enumerate() {
        let fields = [number as u32 + 1, *mode, 0, 0, 1, 0, content.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        archive.extend(b"070701");
        archive.extend(fields.iter().flat_map(|field| format!("{field:08x}").into_bytes()));
        archive.extend(name.as_bytes());
        archive.push(0);
        archive.resize(archive.len().next_multiple_of(4), 0);
        archive.extend(content.as_bytes());
        archive.resize(archive.len().next_multiple_of(4), 0);
    }
    fs::write(path, archive).unwrap();
}
