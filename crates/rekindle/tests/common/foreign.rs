//! A QEMU with the micro guest that Rekindle has not started.

use super::guest::Guest;
use super::lab::Lab;
use super::vm::Net;
use rekindle_kernel::process::Process;
use rekindle_qemu::qmp::Qmp;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The attempts to boot the guest. With two emulated processors 1 boot of 143 hung (`rcu_preempt detected stalls`,
/// "timer wakeup didn't happen"), without Rekindle being involved.
const BOOT_ATTEMPTS: usize = 3;
/// The time limit of one attempt.
const BOOT_LIMIT: Duration = Duration::from_secs(40);

/// Returns a TCP port on which no process listens.
pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A QEMU that Rekindle has not started.
pub struct ForeignQemu<'a> {
    /// The guest, reached over a port that QEMU forwards.
    pub guest: Guest<'a>,
    pub process: Process,
    child: Child,
    directory: PathBuf,
    port: u16,
}

impl<'a> ForeignQemu<'a> {
    /// Starts a QEMU with `arguments` in addition to the usual ones, as `user` if given, and waits until its guest is up.
    pub fn boot(lab: &'a Lab, name: &str, binary: &Path, arguments: &[&str], user: Option<&str>) -> Self {
        let port = free_port();
        let guest = lab.vm(name).net(Net::User(port)).guest();
        let directory = lab.path(&format!("plain-{name}"));
        fs::create_dir(&directory).unwrap();
        let path = |name: &str| directory.join(name).to_string_lossy().into_owned();
        // Another user may be unable to read the image in its own directory.
        let (kernel, initrd) = lab.image();
        fs::copy(kernel, path("vmlinuz")).unwrap();
        fs::copy(initrd, path("initrd")).unwrap();
        let mut command = match user {
            None => Command::new(binary),
            Some(user) => {
                fs::set_permissions(lab.path(""), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
                assert!(Command::new("chown").args(["-R", user, &path("")]).status().unwrap().success());
                let mut command = Command::new("setpriv");
                command.args(["--reuid", user, "--regid", "nogroup", "--clear-groups"]).arg(binary);
                command
            }
        };
        command.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-nodefaults", "-display", "none"]);
        command.args(["-kernel", &path("vmlinuz"), "-initrd", &path("initrd")]);
        command.args([
            "-append",
            "console=ttyS0 quiet rekindle.tick=20",
            "-serial",
            &format!("file:{}", path("console")),
        ]);
        command.args(["-qmp", &format!("unix:{},server=on,wait=off", path("qmp"))]);
        command.args(["-netdev", &format!("user,id=net,hostfwd=tcp:127.0.0.1:{port}-:7000")]);
        command.args(["-device", "virtio-net-pci,netdev=net,mac=52:54:00:00:00:77", "-device", "VGA"]).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = (0..BOOT_ATTEMPTS).find_map(|_| Self::try_boot(&mut command, &path("log"), &guest));
        let child = child.unwrap_or_else(|| {
            panic!("the guest was not up: {}", fs::read_to_string(path("console")).unwrap_or_default());
        });
        let process = Process::of(child.id()).unwrap();
        Self { guest, process, child, directory, port }
    }

    /// Starts QEMU and waits until its guest is up. Kills it and returns `None` if the guest hangs.
    fn try_boot(command: &mut Command, log: &str, guest: &Guest<'_>) -> Option<Child> {
        let mut child = command.stderr(fs::File::create(log).unwrap()).spawn().unwrap();
        let end = Instant::now() + BOOT_LIMIT;
        while !guest.is_up() {
            let errors = || fs::read_to_string(log).unwrap_or_default();
            assert!(child.try_wait().unwrap().is_none(), "QEMU has ended: {}", errors());
            if Instant::now() > end {
                child.kill().unwrap();
                child.wait().unwrap();
                return None;
            }
            thread::sleep(Duration::from_millis(20));
        }
        Some(child)
    }

    /// Returns the port of the host that is forwarded to the guest.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the path of the QMP socket.
    pub fn socket(&self) -> String {
        self.directory.join("qmp").to_string_lossy().into_owned()
    }

    /// Connects to the QMP socket.
    pub fn qmp(&self) -> Qmp {
        Qmp::connect(Path::new(&self.socket()), Duration::from_secs(10)).unwrap()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Counts the open files of QEMU, except sockets, by name.
    pub fn descriptors(&self) -> BTreeMap<String, usize> {
        descriptors(self.process)
    }
}

/// Counts the open files of a process, except sockets, by name.
pub fn descriptors(process: Process) -> BTreeMap<String, usize> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{}/fd", process.pid)).unwrap().flatten() {
        let Ok(link) = fs::read_link(entry.path()) else { continue };
        let name = link.to_string_lossy().into_owned();
        if !name.starts_with("socket:") {
            *all.entry(name).or_default() += 1;
        }
    }
    all
}

impl Drop for ForeignQemu<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
