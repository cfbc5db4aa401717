//! A libvirt of its own for one test: a real libvirtd and virtlogd of the system (`qemu:///system`) in mount and network
//! namespaces, and domains with the micro guest.
//!
//! Only the directories of libvirt are private, at the usual paths: `/run`, `/etc/libvirt` and its directories below
//! `/var`. They are empty file systems in memory, which vanish with the namespace. The network has a bridge, and no
//! connection to the host's. So tests run concurrently, and do not see the host's libvirt. Cgroups and process numbers
//! are the host's: names of domains contain the number of the test's process, because libvirt names cgroups after them.
//!
//! The namespace has no `/dev/kvm`. Where root may use it and libvirt's user may not, libvirt 9.0 takes what it has found
//! out about each QEMU binary for outdated whenever it starts, and queries all of them again.

use crate::micro::{self, KERNEL, KERNEL_OPTIONS, ONE_CPU, TWO_CPUS, exchange, free_port};
use crate::{DEADLINE, poll, tools};
use nix::sched::{CloneFlags, setns, unshare};
use rekindle_kernel::process::Process;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, mount_move, unmount,
};
use std::cell::Cell;
use std::env;
use std::fs::{self, File};
use std::io;
use std::marker::PhantomData;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

/// Directories of which the namespace has its own.
const PRIVATE_DIRECTORIES: &[&str] =
    &["/run", "/etc/libvirt", "/var/lib/libvirt", "/var/cache/libvirt", "/var/log/libvirt"];
/// The daemon's configuration: root may connect without polkit, which does not run in a test.
const DAEMON_CONFIGURATION: &str = "auth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\n";
const LIBVIRTD: &str = "/usr/sbin/libvirtd";
const VIRTLOGD: &str = "/usr/sbin/virtlogd";
const LIBVIRTD_PID_FILE: &str = "/run/libvirtd.pid";
const VIRTLOGD_PID_FILE: &str = "/run/virtlogd.pid";
/// Where the daemon has the status file and the pid file of each running domain.
const STATUS_DIRECTORY: &str = "/run/libvirt/qemu";
/// The kernel that UEFI starts.
const COMPRESSED_KERNEL: &str = "vmlinuz";
/// The firmware of the package ovmf.
const OVMF: &str = "/usr/share/OVMF";
/// Images that the user of libvirt's QEMUs can read.
const IMAGE_DIRECTORY: &str = "/var/lib/libvirt/images";
/// A bridge to which domains can have taps. The test's address in it is the first of [`NETWORK`].
pub const BRIDGE: &str = "rekindle0";
/// The bridge's network, without the last number of an address.
const NETWORK: [u8; 3] = [198, 51, 100];
/// Time limit of a first reply of the guest. A new connection is faster than a retransmission of QEMU's user network.
const FIRST_REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// The configuration of a second daemon's QEMUs: cgroups are not private, and have the names of the domains.
const WITHOUT_CGROUPS: &str = "cgroup_controllers = []\n";

/// The mount and the network namespace of a thread.
struct Namespaces {
    mount: File,
    network: File,
}

impl Namespaces {
    fn current() -> Self {
        let open = |name: &str| File::open(format!("/proc/thread-self/ns/{name}")).unwrap();
        Self { mount: open("mnt"), network: open("net") }
    }

    /// Puts the calling thread into them. If it is there already, the process may have other threads: the kernel lets none of
    /// several threads enter a mount namespace.
    fn enter(&self) {
        if self.are_of_this_thread() {
            return;
        }
        let directory = env::current_dir().unwrap();
        setns(&self.mount, CloneFlags::CLONE_NEWNS).unwrap();
        setns(&self.network, CloneFlags::CLONE_NEWNET).unwrap();
        env::set_current_dir(directory).unwrap();
    }

    fn are_of_this_thread(&self) -> bool {
        let current = Self::current();
        let is_same = |one: &File, other: &File| one.metadata().unwrap().ino() == other.metadata().unwrap().ino();
        is_same(&self.mount, &current.mount) && is_same(&self.network, &current.network)
    }
}

/// A private libvirt. What the test's thread starts and opens from then on, also threads and processes, finds this one
/// instead of the host's. Its domains and daemons end on drop.
pub struct PrivateLibvirt {
    /// Domains that were started with a tap.
    taps: Cell<u8>,
    /// Those of the thread before.
    outer: Namespaces,
    inner: Namespaces,
    /// The namespaces belong to the thread that has made them.
    _not_send: PhantomData<*const ()>,
}

impl PrivateLibvirt {
    /// Starts libvirt for the calling thread. Needs root.
    pub fn start() -> Self {
        Self::start_with("")
    }

    /// Starts the libvirt of another host, and enters it. The file systems outside of libvirt's directories are those of
    /// both hosts.
    pub fn start_second(&self) -> Self {
        self.outer.enter();
        Self::start_with(WITHOUT_CGROUPS)
    }

    /// Makes this the libvirt that the calling thread finds.
    pub fn enter(&self) {
        self.inner.enter();
    }

    /// Returns the beginning of a shell command that runs another one where this libvirt is found.
    pub fn command_prefix(&self) -> String {
        let path = |file: &File| format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        format!("nsenter --mount={} --net={}", path(&self.inner.mount), path(&self.inner.network))
    }

    fn start_with(qemu_configuration: &str) -> Self {
        for program in [LIBVIRTD, VIRTLOGD] {
            assert!(Path::new(program).exists(), "{program} is missing; install libvirt-daemon-system");
        }
        let outer = Namespaces::current();
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).expect("namespaces; run the tests as root");
        mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE).unwrap();
        for directory in PRIVATE_DIRECTORIES {
            fs::create_dir_all(directory).unwrap();
            mount("tmpfs", *directory, "tmpfs", MountFlags::NOSUID, c"mode=755").unwrap();
        }
        hide_kvm();
        fs::write("/etc/libvirt/libvirtd.conf", DAEMON_CONFIGURATION).unwrap();
        fs::write("/etc/libvirt/qemu.conf", qemu_configuration).unwrap();
        fs::create_dir(IMAGE_DIRECTORY).unwrap();
        for image in [KERNEL, COMPRESSED_KERNEL, "initrd"] {
            fs::copy(tools::micro().join(image), Path::new(IMAGE_DIRECTORY).join(image)).unwrap();
        }
        make_bridge();
        start_in_background(VIRTLOGD);
        let inner = Namespaces::current();
        let libvirt = Self { taps: Cell::new(0), outer, inner, _not_send: PhantomData };
        libvirt.start_daemon();
        libvirt
    }

    /// Starts the daemon, and returns when it accepts connections.
    pub fn start_daemon(&self) {
        start_libvirtd();
        self.virsh(&["uri"]);
    }

    /// Starts the daemon. Another process may kill it at any time.
    pub fn launch_daemon(&self) {
        start_libvirtd();
    }

    /// Returns the daemon; `None` if it does not run.
    pub fn daemon(&self) -> Option<Process> {
        process_in(Path::new(LIBVIRTD_PID_FILE))
    }

    /// Stops the daemon. The domains continue.
    pub fn stop_daemon(&self) {
        stop(self.daemon().expect("a running daemon"));
    }

    /// Runs `virsh` and returns its output. Panics if it fails.
    #[track_caller]
    pub fn virsh(&self, arguments: &[&str]) -> String {
        self.try_virsh(arguments).unwrap_or_else(|problem| panic!("virsh {arguments:?}: {problem}"))
    }

    /// Runs `virsh` and returns its output, or its messages if it fails.
    pub fn try_virsh(&self, arguments: &[&str]) -> Result<String, String> {
        let output = Command::new("virsh").args(["--connect", "qemu:///system"]).args(arguments).output();
        let output = output.expect("virsh of the package libvirt-clients");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// Starts a domain and waits until its guest is up.
    pub fn boot(&self, options: &DomainOptions<'_>) -> Domain<'_> {
        let domain = self.create(options);
        let is_up = || {
            assert!(domain.process().is_alive(), "QEMU has ended: {}", domain.log());
            domain.is_up().then_some(())
        };
        assert!(poll(DEADLINE, is_up).is_some(), "the guest is not up: {}", domain.log());
        domain
    }

    /// Starts a domain. Returns before its guest is up.
    pub fn create(&self, options: &DomainOptions<'_>) -> Domain<'_> {
        let name = format!("rekindle-{}-{}", std::process::id(), options.name);
        let port = free_port();
        let reach = match options.network {
            Network::User => Reach::forwarded(port),
            Network::Tap(elements) => self.add_tap(elements),
        };
        let file = Path::new("/run").join(format!("{name}.xml"));
        fs::write(&file, options.xml(&name, port, &reach)).unwrap();
        self.virsh(&["create", &file.to_string_lossy()]);
        Domain { libvirt: self, name, address: reach.address }
    }

    fn add_tap(&self, elements: &str) -> Reach {
        self.taps.set(self.taps.get() + 1);
        let number = self.taps.get().checked_add(1).expect("a free address");
        let [first, second, third] = NETWORK;
        let ip = Ipv4Addr::new(first, second, third, number);
        let interface = format!(
            "<interface type='bridge'><source bridge='{BRIDGE}'/><mac address='52:54:00:00:01:{number:02x}'/>
      <model type='virtio'/>{elements}</interface>"
        );
        Reach { address: (ip, micro::PORT).into(), kernel_options: format!("rekindle.ip={ip}/24"), interface }
    }
}

/// How a test reaches the guest of a domain.
struct Reach {
    address: SocketAddr,
    kernel_options: String,
    /// libvirt's XML of the network card, if it is not the one with the forwarded port.
    interface: String,
}

impl Reach {
    fn forwarded(port: u16) -> Self {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        Self { address, kernel_options: String::new(), interface: String::new() }
    }
}

impl Drop for PrivateLibvirt {
    fn drop(&mut self) {
        self.enter();
        let entries = fs::read_dir(STATUS_DIRECTORY).into_iter().flatten().flatten();
        // The daemon has its own pid file in the directory.
        let status_files =
            entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "xml"));
        let qemus: Vec<_> = status_files.filter_map(|path| process_in(&path.with_extension("pid"))).collect();
        // Only the daemon removes what a domain has outside of the namespace: its cgroups.
        if self.daemon().is_none() {
            start_libvirtd();
        }
        let names = self.try_virsh(&["list", "--name"]).unwrap_or_default();
        let failures: Vec<_> = names.lines().filter_map(|name| self.try_virsh(&["destroy", name]).err()).collect();
        let left: Vec<_> = qemus.into_iter().filter(Process::is_alive).collect();
        for process in &left {
            let _ = process.kill();
        }
        for pid_file in [LIBVIRTD_PID_FILE, VIRTLOGD_PID_FILE] {
            if let Some(process) = process_in(Path::new(pid_file)) {
                stop(process);
            }
        }
        if !thread::panicking() {
            assert!(left.is_empty(), "QEMUs that libvirt did not end: {left:?}; {failures:?}");
        }
    }
}

/// What a domain has.
#[derive(Debug, Clone)]
pub struct DomainOptions<'a> {
    /// Name within the test.
    pub name: &'a str,
    /// QEMU of the domain. Its user must be able to read and execute the file.
    pub emulator: &'a Path,
    /// libvirt's XML of devices in addition to a console and a network card.
    pub devices: &'a str,
    /// libvirt's XML of elements next to `<memory>`, such as `<memoryBacking>`, or an empty text.
    pub memory_backing: &'a str,
    /// Whether the guest uses both of its processors from the end of its kernel's boot on, and so two
    /// queues of a network card that has them.
    pub both_processors: bool,
    /// What starts the guest's kernel.
    pub firmware: Firmware,
    /// The guest's first network card, through which the test reaches the guest.
    pub network: Network<'a>,
}

/// The firmware of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Firmware {
    /// SeaBIOS.
    Bios,
    /// OVMF, with variables of its own.
    Uefi,
}

impl Firmware {
    /// Returns the file of the kernel that it can start.
    fn kernel(self) -> &'static str {
        match self {
            Self::Bios => KERNEL,
            Self::Uefi => COMPRESSED_KERNEL,
        }
    }

    /// Returns libvirt's XML.
    fn xml(self) -> String {
        match self {
            Self::Bios => String::new(),
            Self::Uefi => format!(
                "<loader readonly='yes' type='pflash'>{OVMF}/OVMF_CODE_4M.fd</loader>
    <nvram template='{OVMF}/OVMF_VARS_4M.fd'/>"
            ),
        }
    }
}

/// A network card of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network<'a> {
    /// QEMU's user network. QEMUs with a tap have one as well, which the guest does not use.
    User,
    /// A tap in [`BRIDGE`], with further elements of `<interface>`.
    Tap(&'a str),
}

impl<'a> DomainOptions<'a> {
    /// Makes options for a guest with two processors (one does not run yet, see [`ONE_CPU`]) and 256 MiB of RAM in the
    /// QEMU of most tests.
    pub fn new(name: &'a str) -> Self {
        Self {
            name,
            emulator: tools::qemu_new(),
            devices: "",
            memory_backing: "",
            both_processors: false,
            firmware: Firmware::Bios,
            network: Network::User,
        }
    }

    /// Returns libvirt's description. `port` of this host is forwarded to the guest, which libvirt's own network cards
    /// of type `user` cannot. That card comes after a tap's on the bus.
    fn xml(&self, name: &str, port: u16, reach: &Reach) -> String {
        let Self { emulator, devices, memory_backing, .. } = self;
        let processors = if self.both_processors { TWO_CPUS } else { ONE_CPU };
        let (emulator, guest_port) = (emulator.display(), micro::PORT);
        let (firmware, kernel) = (self.firmware.xml(), self.firmware.kernel());
        let Reach { kernel_options, interface, .. } = reach;
        format!(
            "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{name}</name>
  <memory unit='MiB'>256</memory>
  {memory_backing}
  <vcpu>2</vcpu>
  <os>
    <type arch='x86_64' machine='pc'>hvm</type>
    {firmware}
    <kernel>{IMAGE_DIRECTORY}/{kernel}</kernel>
    <initrd>{IMAGE_DIRECTORY}/initrd</initrd>
    <cmdline>{KERNEL_OPTIONS} {processors} {kernel_options}</cmdline>
  </os>
  <features><acpi/></features>
  <devices>
    <emulator>{emulator}</emulator>
    <serial type='pty'/>
    {interface}
    {devices}
  </devices>
  <qemu:commandline>
    <qemu:arg value='-netdev'/>
    <qemu:arg value='user,id=net,hostfwd=tcp:127.0.0.1:{port}-:{guest_port}'/>
    <qemu:arg value='-device'/>
    <qemu:arg value='virtio-net-pci,netdev=net,mac=52:54:00:00:00:77,addr=0x1e'/>
  </qemu:commandline>
</domain>
"
        )
    }
}

/// A running domain.
pub struct Domain<'a> {
    libvirt: &'a PrivateLibvirt,
    /// Name that libvirt knows.
    pub name: String,
    /// Address of the guest's command service.
    pub address: SocketAddr,
}

impl Domain<'_> {
    /// Returns the path of the status file, which exists while the domain runs.
    pub fn status_file(&self) -> PathBuf {
        Path::new(STATUS_DIRECTORY).join(format!("{}.xml", self.name))
    }

    /// Returns the QEMU that libvirt has recorded.
    pub fn process(&self) -> Process {
        process_in(&Path::new(STATUS_DIRECTORY).join(format!("{}.pid", self.name))).expect("a running domain")
    }

    /// Returns libvirt's name of the domain's state: `running`, `paused`, `shut off`.
    pub fn state(&self) -> String {
        self.libvirt.virsh(&["domstate", &self.name])
    }

    /// Returns QEMU's log.
    pub fn log(&self) -> String {
        fs::read_to_string(format!("/var/log/libvirt/qemu/{}.log", self.name)).unwrap_or_default()
    }

    /// Sends a command to the guest and returns its reply.
    ///
    /// # Errors
    /// If there is no reply within `timeout`.
    pub fn try_ask(&self, command: &str, timeout: Duration) -> io::Result<String> {
        exchange(&TcpStream::connect_timeout(&self.address, timeout)?, command, timeout)
    }

    /// Returns whether the guest replies.
    pub fn is_up(&self) -> bool {
        self.try_ask("boot-id", FIRST_REPLY_TIMEOUT).is_ok()
    }

    /// Returns libvirt's UUID of the domain.
    pub fn uuid(&self) -> String {
        self.libvirt.virsh(&["domuuid", &self.name])
    }

    /// Sends a command to the guest and returns the text after `ok` in the reply.
    #[track_caller]
    pub fn ask(&self, command: &str) -> String {
        let reply = self.try_ask(command, DEADLINE).unwrap_or_else(|e| panic!("`{command}` to the guest: {e}"));
        let answer = reply.strip_prefix("ok").unwrap_or_else(|| panic!("the guest answers `{command}`: {reply}"));
        answer.trim().into()
    }
}

/// Runs `ip` in the thread's namespace and returns its output.
pub fn ip(arguments: &str) -> String {
    let output = Command::new("ip").args(arguments.split(' ')).output().expect("ip of the package iproute2");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn make_bridge() {
    let [first, second, third] = NETWORK;
    ip("link set lo up");
    ip(&format!("link add {BRIDGE} type bridge"));
    ip(&format!("addr add {first}.{second}.{third}.1/24 dev {BRIDGE}"));
    ip(&format!("link set {BRIDGE} up"));
}

/// Gives the namespace a `/dev` without `kvm`: the same devices, links and mounted file systems. libvirt makes a `/dev`
/// for each QEMU, and moves there whatever is mounted below `/dev`, which fails for a single device and for mounts that
/// are covered by others.
fn hide_kvm() {
    let staging = Path::new("/run/dev");
    fs::create_dir(staging).unwrap();
    mount("tmpfs", staging, "tmpfs", MountFlags::NOSUID, c"mode=755").unwrap();
    copy_devices(Path::new("/dev"), staging);
    for directory in ["pts", "shm"] {
        fs::create_dir_all(staging.join(directory)).unwrap();
        mount_bind(Path::new("/dev").join(directory), staging.join(directory)).unwrap();
    }
    for mounted in ["/dev/pts", "/dev/shm", "/dev/mqueue", "/dev/hugepages", "/dev"] {
        match unmount(mounted, UnmountFlags::DETACH) {
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
            Err(e) => panic!("{mounted}: {e}"),
        }
    }
    mount_move(staging, "/dev").unwrap();
}

/// Copies devices and symbolic links, not files.
fn copy_devices(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let copy = to.join(path.file_name().unwrap());
        let metadata = path.symlink_metadata().unwrap();
        let file_type = FileType::from_raw_mode(metadata.mode());
        match file_type {
            FileType::CharacterDevice | FileType::BlockDevice if !path.ends_with("kvm") => {
                mknodat(CWD, &copy, file_type, Mode::from_raw_mode(metadata.mode()), metadata.rdev()).unwrap();
                fs::set_permissions(&copy, metadata.permissions()).unwrap();
            }
            FileType::Symlink => symlink(fs::read_link(&path).unwrap(), &copy).unwrap(),
            FileType::Directory if path.ends_with("net") => {
                fs::create_dir(&copy).unwrap();
                copy_devices(&path, &copy);
            }
            _ => {}
        }
    }
}

fn start_libvirtd() {
    // A daemon that was killed keeps its pid file locked until its last thread has ended.
    if let Some(killed) = recorded_in(Path::new(LIBVIRTD_PID_FILE)) {
        assert!(killed.wait_end(DEADLINE).unwrap(), "a daemon runs already, or does not end");
    }
    start_in_background(LIBVIRTD);
}

/// Starts a daemon that goes to the background when it is ready. Needs a running virtlogd for libvirtd.
fn start_in_background(program: &str) {
    let status = Command::new(program).arg("-d").stdin(Stdio::null()).stdout(Stdio::null()).status();
    assert!(status.expect(program).success(), "{program} does not start");
}

fn stop(process: Process) {
    process.terminate().unwrap();
    if !process.wait_end(DEADLINE).unwrap() {
        let _ = process.kill();
        panic!("process {} did not end", process.pid);
    }
}

/// Returns the running process that a pid file names. A daemon has created the file before it writes it.
fn process_in(pid_file: &Path) -> Option<Process> {
    recorded_in(pid_file).filter(Process::is_alive)
}

/// Returns the process that a pid file names, which may be ending.
fn recorded_in(pid_file: &Path) -> Option<Process> {
    let text = fs::read_to_string(pid_file).ok()?;
    Process::of(text.trim().parse().ok()?).ok()
}
