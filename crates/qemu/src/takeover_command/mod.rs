//! The command line of a QEMU that takes over the guest of a QEMU which Rekindle did not start.
//!
//! The *source* is the running QEMU, started by libvirt, by Proxmox or by hand. The *destination* is the QEMU that
//! continues the guest on the same host, for the same manager. Its command line is the source's, word for word, except
//! for what two QEMUs cannot have at the same time:
//!
//! | option of the source | in the destination |
//! |---|---|
//! | RAM: `-object memory-backend-*`, or only `-m` | `memory-backend-file` of the same id, on a memfd |
//! | listening sockets: `path=`, `host=,port=`, `-qmp unix:...` | `fd=N` |
//! | taps: `ifname=`, `script=`, `br=` | `fd=N`, `vhostfd=N` |
//! | forwarded ports of user networks | none; they are added after the source has stopped |
//! | address of a VNC server | none; the server gets the source's listening sockets when the source has been frozen |
//! | addresses of a VNC server with websockets | stand-ins, which the source's listening sockets replace then |
//! | addresses of a SPICE server | stand-ins, which the source's listening sockets replace then |
//! | the connection to a TPM's emulator | `fd=N`, a connection to another emulator |
//! | files of character devices | appended to, not truncated |
//! | images of disks (`-blockdev`) | those that the disks have now |
//! | devices, networks, character devices | with those that were plugged in since the start, without those that were unplugged |
//! | `-incoming`, `-loadvm`, `-daemonize`, `-pidfile` | `-incoming defer -S`, and Rekindle's own monitors |
//!
//! ([`crate::foreign`] derives a machine for *another* host from such a command line: without its sockets, files and
//! passed descriptors.)
//!
//! [`rewrite`] is a pure function of the arguments, of [`RunningFacts`] and of the [`SourceDescriptor`]s that the source
//! has open. A *descriptor* that the source's command line names keeps its number; all others get numbers that the source
//! does not use. [`CommandLine::descriptors`] states what must be open at each number when the destination is started:
//!
//! ```
//! use rekindle_qemu::foreign::MachineFacts;
//! use rekindle_qemu::syntax::Syntax;
//! use rekindle_qemu::takeover_command::{Descriptor, Destination, ListenAddress, RunningFacts, SourceDescriptor, rewrite};
//! use std::collections::BTreeMap;
//!
//! let line = "-machine pc-q35-7.2 -display none -qmp unix:/run/a.qmp,server=on,wait=off -pidfile /run/a.pid";
//! let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
//! let facts = RunningFacts {
//!     machine: MachineFacts { machine: "pc-q35-7.2".into(), ..MachineFacts::default() },
//!     ..RunningFacts::default()
//! };
//! let qmp = SourceDescriptor::Listener(ListenAddress::Unix("/run/a.qmp".into()));
//! let destination = Destination { label: "1".into(), syntax: Syntax::default(), socket_directory: None };
//! // QEMU reports no RAM: an obstacle, which would be shown with all others.
//! let obstacles = rewrite(&arguments, &facts, &BTreeMap::from([(7, qmp.clone())]), &destination).unwrap_err();
//! assert_eq!(obstacles.len(), 1);
//!
//! # use rekindle_qemu::command::RamBackend;
//! # use rekindle_qemu::ramblock::RamBlock;
//! let mut facts = facts;
//! facts.machine.backends.push(RamBackend { id: "pc.ram".into(), bytes: 128 << 20 });
//! facts.machine.main_backend = Some("pc.ram".into());
//! # let (used, total) = (128 << 20, 128 << 20);
//! # facts.ram_blocks.push(RamBlock { id: "pc.ram".into(), used, total, page_size: 4096, offset: 0, address: None });
//! let line = rewrite(&arguments, &facts, &BTreeMap::from([(7, qmp)]), &destination).unwrap();
//! let is_listener = |descriptor: &&Descriptor| matches!(descriptor, Descriptor::Listener { source: 7 });
//! assert_eq!(line.descriptors.values().filter(is_listener).count(), 1);
//! assert_eq!(line.pid_file.as_deref(), Some("/run/a.pid"));
//! ```
//!
//! [`read_facts`] and [`open_descriptors`] read the facts and the descriptors of a running QEMU. [`Inventory`] has
//! everything that its manager may change: with it, two QEMUs are compared, and settings without an option are passed
//! on. The password of a VNC or SPICE server cannot be read: its manager must supply it.
//!
//! The descriptor of a listening socket, tap or vhost device is at first a *stand-in*: a private one of the same kind.
//! The real one replaces it when the source has been frozen.

mod character_devices;
mod descriptors;
mod disks;
mod display;
mod facts;
mod finish;
mod inventory;
mod memory;
mod network;
mod networks;
mod open_files;
mod pid_file;
mod plugged;
mod plugged_ports;
mod rules;
pub mod spice;
pub mod stand_in;
mod tpm;
pub mod vnc;

pub use facts::{Drive, RunningFacts, read_facts};
pub use inventory::{Inventory, Item};
pub use networks::PluggedNetwork;
pub use open_files::{MACVTAP_PREFIX, open_descriptors};
pub use plugged::PluggedDevice;
pub use plugged_ports::PortEnd;

use crate::adopt::{Obstacle, obstacle_of_type};
use crate::command::TapSlot;
use crate::foreign::{CarryRule, CommandOption, Reason, refused_device, refused_object, split, with_absolute_paths};
use crate::options::Options;
use crate::syntax::Syntax;
use descriptors::Numbers;
use rules::TakeoverRule;
use serde_json::Value;
use stand_in::StandIn;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::RangeFrom;
use std::os::fd::RawFd;
use std::path::PathBuf;

/// Ids of the character devices of Rekindle's monitors begin with this.
const OWN_ID_PREFIX: &str = "rekindle-";
/// Names of Rekindle's monitors, as [`crate::command::Directory`] has them.
const OWN_MONITORS: [&str; 4] = ["qmp", "watch", "protect", "save"];
const STANDARD_ERROR: RawFd = 2;

/// What the source has open at a descriptor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceDescriptor {
    /// A listening socket.
    Listener(ListenAddress),
    /// A connection to the Unix socket `server`.
    Client {
        server: String,
    },
    /// A queue of a tap or macvtap.
    Tap {
        interface: String,
    },
    /// `/dev/vhost-net`.
    VhostNet,
    /// `/dev/null`.
    Null,
    Other,
}

/// Where a socket listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenAddress {
    /// The path that the socket was bound to; with a leading `@` in the abstract namespace.
    Unix(String),
    Tcp(SocketAddr),
}

/// The QEMU that takes over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// Part of the ids of Rekindle's monitors, by which the process is recognized: letters, digits and `-`.
    pub label: String,
    /// The syntax of its binary.
    pub syntax: Syntax,
    /// A directory in which only the user of the QEMUs can make sockets: a SPICE server needs one.
    pub socket_directory: Option<PathBuf>,
}

/// The destination's command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine {
    /// Arguments, without the program's name.
    pub arguments: Vec<String>,
    /// What must be open when the destination starts, by number. Standard input, output and error are not listed.
    pub descriptors: BTreeMap<RawFd, Descriptor>,
    /// Forwarded ports, to be added when the source has stopped. Another rewrite of `arguments` does not find them.
    pub forwards: Vec<Forward>,
    /// The VNC server.
    pub vnc_server: Option<PassedVncServer>,
    /// The SPICE server.
    pub spice_server: Option<PassedSpiceServer>,
    /// The file that must name the destination's process.
    pub pid_file: Option<String>,
}

impl CommandLine {
    /// Returns numbers that the destination does not use, in ascending order.
    pub fn spare_numbers(&self) -> RangeFrom<RawFd> {
        self.descriptors.last_key_value().map_or(STANDARD_ERROR, |(number, _)| *number).saturating_add(1)..
    }

    /// Returns the queues of taps that the destination gets. They wait at numbers that are taken from `spare`.
    pub fn tap_slots(&self, spare: &mut RangeFrom<RawFd>) -> Vec<TapSlot> {
        let taps = self.descriptors.iter().filter_map(|(number, descriptor)| match descriptor {
            Descriptor::Tap { source, interface } => Some((*number, *source, interface)),
            _ => None,
        });
        let slots = taps.zip(spare).map(|((destination, source, interface), waiting)| TapSlot {
            interface: interface.clone(),
            source,
            destination,
            waiting,
        });
        slots.collect()
    }
}

/// What must be open at a number in the destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Descriptor {
    /// A memfd for a RAM block, of `bytes` and with pages of `page_bytes`.
    Ram { block: String, bytes: u64, page_bytes: u64 },
    /// A new listening socket, for the monitor of this name (`qmp`, `watch`, `protect`, `save`).
    OwnMonitor { name: &'static str },
    /// A stand-in for the listening socket that is `source` in the source.
    Listener { source: RawFd },
    /// A stand-in for the queue of `interface` that is `source` in the source.
    Tap { source: RawFd, interface: String },
    /// A new `/dev/vhost-net`: an open one belongs to the memory of one process.
    VhostNet,
    /// A connection to the emulator that continues the TPM of the one at the Unix socket `server`.
    TpmEmulator { server: String },
    /// A duplicate of `source` in the source. A listening socket of a VNC server is not used until QEMU gets it by
    /// [`vnc::listen`].
    Duplicate { source: RawFd },
}

/// A VNC server of the destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassedVncServer {
    pub id: String,
    /// The numbers at which its listening sockets are open. It listens nowhere until it gets them.
    pub listeners: Vec<RawFd>,
    /// The stand-ins at which a server with websockets listens instead.
    pub stand_ins: Vec<StandIn>,
    /// Whether it accepts no client until it gets the password.
    pub needs_password: bool,
}

/// A SPICE server of the destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassedSpiceServer {
    /// The stand-ins at which it listens until they are replaced.
    pub stand_ins: Vec<StandIn>,
    /// Whether it accepts no client until it gets the password.
    pub needs_password: bool,
}

/// A forwarded port of a user network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forward {
    /// Id of the network; none for the only one.
    pub network: Option<String>,
    /// As in `hostfwd=`.
    pub rule: String,
}

/// The command line as far as it has been rewritten.
struct Rewriter<'a> {
    facts: &'a RunningFacts,
    destination: &'a Destination,
    numbers: Numbers<'a>,
    arguments: Vec<String>,
    obstacles: Vec<Obstacle>,
    forwards: Vec<Forward>,
    vnc_server: Option<PassedVncServer>,
    spice_server: Option<PassedSpiceServer>,
    pid_file: Option<String>,
    /// Ids of the memory backends that the command line names.
    backends: Vec<String>,
    devices: Vec<OptionAt>,
    /// The options of the block nodes that the command line names.
    block_nodes: BTreeMap<String, OptionAt>,
    /// Backing nodes that the command line states, by the names of the nodes above them; `None` for no backing image.
    backing_nodes: BTreeMap<String, Option<String>>,
    /// Values of `-drive`.
    drives: Vec<Options>,
    /// Positions in `arguments` of the values of options that are left out at the end.
    removed: BTreeSet<usize>,
    /// Sets of `-add-fd`.
    fd_sets: BTreeSet<String>,
    /// Number of queues of taps whose vhost devices the command line does not name.
    unnamed_vhosts: usize,
    /// Ids of the character devices that are connections to emulators of TPMs.
    tpm_connections: BTreeSet<String>,
    /// Number of options so far that make a character device without an id, by the name that QEMU gives it.
    unnamed_chardevs: BTreeMap<&'static str, usize>,
    given: GivenOptions,
}

/// An option of the rewritten command line that may change until its end.
struct OptionAt {
    /// Index of its value in the arguments.
    position: usize,
    options: Options,
}

impl OptionAt {
    /// Writes the value into the command line.
    fn write(&self, arguments: &mut [String]) {
        if let Some(argument) = arguments.get_mut(self.position) {
            *argument = self.options.to_string();
        }
    }
}

/// Which options a command line has.
#[derive(Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is the presence of one option")]
struct GivenOptions {
    nodefaults: bool,
    nographic: bool,
    /// `-daemonize`: relative paths were read in another directory.
    daemonize: bool,
    serial: bool,
    monitor: bool,
    display: bool,
    memory_size: bool,
    machine_type: bool,
    memory_backend: bool,
}

/// Rewrites the `arguments` of the source for a QEMU that takes over its guest. `open` are the source's descriptors.
///
/// # Errors
/// Everything that cannot be taken over, each with the reason.
pub fn rewrite(
    arguments: &[String],
    facts: &RunningFacts,
    open: &BTreeMap<RawFd, SourceDescriptor>,
    destination: &Destination,
) -> Result<CommandLine, Vec<Obstacle>> {
    let options = split(arguments).map_err(|option| {
        let why = "Rekindle does not know this option of QEMU, or its value is missing; start it without".into();
        vec![Obstacle { what: option, why }]
    })?;
    let mut rewriter = Rewriter {
        facts,
        destination,
        numbers: Numbers::new(open, &options),
        arguments: Vec::new(),
        obstacles: Vec::new(),
        forwards: Vec::new(),
        vnc_server: None,
        spice_server: None,
        pid_file: None,
        backends: Vec::new(),
        devices: Vec::new(),
        block_nodes: BTreeMap::new(),
        backing_nodes: BTreeMap::new(),
        drives: Vec::new(),
        removed: BTreeSet::new(),
        fd_sets: BTreeSet::new(),
        unnamed_vhosts: 0,
        tpm_connections: tpm::connections(&options),
        unnamed_chardevs: BTreeMap::new(),
        given: GivenOptions { daemonize: options.iter().any(|o| o.name == "daemonize"), ..GivenOptions::default() },
    };
    for option in &options {
        rewriter.read(option);
    }
    rewriter.finish()
}

impl Rewriter<'_> {
    fn read(&mut self, option: &CommandOption<'_>) {
        let given = &mut self.given;
        given.nodefaults |= option.name == "nodefaults";
        given.nographic |= option.name == "nographic";
        given.serial |= option.name == "serial";
        given.monitor |= ["monitor", "qmp", "qmp-pretty", "mon"].contains(&option.name);
        given.display |= ["display", "nographic", "vnc", "spice"].contains(&option.name);
        given.memory_size |= option.name == "m";
        match rules::of(option.name) {
            TakeoverRule::Keep => self.keep_unchanged(option),
            TakeoverRule::Drop => {}
            TakeoverRule::Refuse(why) => self.refuse(format!("-{}", option.name), why),
            TakeoverRule::RefuseAsCarried => {
                if let CarryRule::Refuse(why) = option.rule {
                    self.refuse(format!("-{}", option.name), why);
                }
            }
            TakeoverRule::Rewrite => self.rewrite(option),
        }
    }

    fn rewrite(&mut self, option: &CommandOption<'_>) {
        match option.name {
            "machine" | "M" => self.read_machine(option),
            "object" => self.read_object(option),
            "device" => self.read_device(option),
            "drive" | "blockdev" => self.read_drive(option),
            "netdev" => self.read_netdev(option),
            "nic" | "net" => self.read_short_network(option),
            "chardev" => self.read_chardev(option),
            "mon" => self.read_mon(option),
            "serial" | "parallel" | "debugcon" | "qmp" | "qmp-pretty" | "monitor" => self.read_short_chardev(option),
            "vnc" => self.read_vnc(option.value.unwrap_or_default()),
            "spice" => self.read_spice(option),
            "display" => self.read_display(option),
            "add-fd" => self.read_fd_set(option),
            "set" => self.read_set(option),
            "run-with" => self.read_run_with(option),
            "overcommit" => self.read_overcommit(option),
            "tpmdev" => self.read_tpmdev(option),
            "pidfile" => self.pid_file = option.value.map(str::to_owned),
            other => self.refuse(format!("-{other}"), "Rekindle has no rule for it"),
        }
    }

    /// Adds an obstacle: `what` cannot be taken over.
    fn refuse(&mut self, what: impl Into<String>, why: impl Into<String>) {
        self.obstacles.push(Obstacle { what: what.into(), why: why.into() });
    }

    /// Adds an option to the rewritten arguments.
    fn add(&mut self, option: &str, value: impl Into<String>) {
        self.arguments.extend([format!("-{option}"), value.into()]);
    }

    /// Keeps an option word for word. The destination starts in the source's working directory, so that relative paths
    /// mean the same, unless `-daemonize` has changed the directory.
    fn keep_unchanged(&mut self, option: &CommandOption<'_>) {
        if self.given.daemonize
            && let Err(path) = with_absolute_paths(option, &self.facts.machine.cwd)
        {
            let cwd = self.facts.machine.cwd.display();
            let why = format!("there is no {path} in {cwd}, where QEMU is now: start it with the full path");
            self.refuse(format!("-{} {}", option.name, option.value.unwrap_or_default()), why);
        }
        self.arguments.push(format!("-{}", option.name));
        self.arguments.extend(option.value.map(str::to_owned));
    }

    /// Keeps an option word for word. `options` is its value, which may change until the end.
    fn keep_changeable(&mut self, option: &CommandOption<'_>, options: Options) -> OptionAt {
        self.keep_unchanged(option);
        OptionAt { position: self.arguments.len().saturating_sub(1), options }
    }

    /// Parses the value of an option. `None` after an obstacle was added.
    fn parse(&mut self, option: &CommandOption<'_>, implied_key: &str) -> Option<Options> {
        let value = option.value.unwrap_or_default();
        match Options::parse(value, implied_key) {
            Ok(options) => Some(options),
            Err(e) => {
                self.refuse(format!("-{} {value}", option.name), e.why);
                None
            }
        }
    }

    fn read_device(&mut self, option: &CommandOption<'_>) {
        let Some(device) = self.parse(option, "driver") else { return };
        let driver = device.get("driver").unwrap_or_default();
        if let Some(why) = refusal_of_device(&driver) {
            let id = device.get("id").map(|id| format!(",id={id}")).unwrap_or_default();
            self.refuse(format!("-device {driver}{id}"), why);
        }
        let device = self.keep_changeable(option, device);
        self.devices.push(device);
    }

    fn read_object(&mut self, option: &CommandOption<'_>) {
        let Some(object) = self.parse(option, "qom-type") else { return };
        let kind = object.get("qom-type").unwrap_or_default();
        let id = object.get("id").unwrap_or_default();
        if self.was_removed(&kind, &id) {
            return;
        }
        let is_own = object.get("chardev").is_some_and(|chardev| chardev.starts_with(OWN_ID_PREFIX));
        if let Some(why) = obstacle_of_type(&kind).or_else(|| refused_object(&kind)).or_else(|| rules::object(&kind)) {
            self.refuse(format!("-object {kind},id={id}"), why);
        } else if kind.starts_with("memory-backend-") {
            self.read_backend(&id, object);
        } else if !(is_own && kind.starts_with("monitor-")) {
            self.keep_unchanged(option);
        }
    }

    fn read_drive(&mut self, option: &CommandOption<'_>) {
        let Some(drive) = self.parse(option, if option.name == "drive" { "file" } else { "driver" }) else { return };
        if drive.get("driver").as_deref() == Some("nvme") {
            self.refuse("-blockdev nvme", "hardware writes the guest's memory past the processor");
        }
        if drive.get("snapshot").is_some_and(|snapshot| snapshot == "on") {
            let why = "what the guest writes to this disk is in a nameless file that ends with QEMU";
            self.refuse(format!("-drive {}", option.value.unwrap_or_default()), why);
        }
        if option.name == "drive" {
            self.drives.push(drive.clone());
        }
        let name = drive.get("node-name");
        let node = self.keep_changeable(option, drive);
        if let Some(name) = name {
            self.read_backing(&name, &node.options);
            self.block_nodes.insert(name, node);
        }
    }

    /// Notes the backing image of a block node. If the option names none, QEMU takes the one that is recorded in the file.
    fn read_backing(&mut self, name: &str, node: &Options) {
        let is_null = matches!(node, Options::Json(members) if members.get("backing").is_some_and(Value::is_null));
        let backing = node.get("backing").filter(|backing| !backing.is_empty());
        if backing.is_some() || is_null {
            self.backing_nodes.insert(name.to_owned(), backing);
        }
    }

    /// Rejects `-set` for an option that may have another form now.
    fn read_set(&mut self, option: &CommandOption<'_>) {
        const REWRITTEN_GROUPS: [&str; 6] = ["chardev", "mon", "netdev", "machine", "object", "vnc"];
        let group = option.value.unwrap_or_default().split('.').next().unwrap_or_default();
        if REWRITTEN_GROUPS.contains(&group) {
            let why = format!("it changes a -{group} option: write the setting into that option");
            self.refuse(format!("-set {}", option.value.unwrap_or_default()), why);
        }
        self.keep_unchanged(option);
    }

    /// Rejects locked memory: the copy of the guest's RAM would not be locked.
    fn read_overcommit(&mut self, option: &CommandOption<'_>) {
        let Some(overcommit) = self.parse(option, "") else { return };
        if overcommit.get("mem-lock").is_some_and(|value| value != "off") {
            let why = "Rekindle does not lock the memory of another QEMU: start it without (libvirt: <locked/>)";
            self.refuse("-overcommit mem-lock", why);
        }
        self.keep_unchanged(option);
    }

    /// Leaves out the user that the process has changed to: the destination is started as that user.
    fn read_run_with(&mut self, option: &CommandOption<'_>) {
        let Some(mut run_with) = self.parse(option, "") else { return };
        for key in ["chroot", "exit-with-parent"] {
            if run_with.get(key).is_some_and(|value| value != "off") {
                self.refuse(format!("-run-with {key}"), "another QEMU cannot be started there: start it without");
            }
        }
        run_with.remove(|key| key == "user");
        if !run_with.keys().is_empty() {
            self.add("run-with", run_with.to_string());
        }
    }
}

/// Returns why a device of this type cannot be taken over.
fn refusal_of_device(driver: &str) -> Option<Reason> {
    if driver.starts_with("virtio-mem") {
        return Some("Rekindle does not carry over which parts of its memory are plugged in");
    }
    obstacle_of_type(driver).or_else(|| refused_device(driver)).filter(|_| !rules::needs_only_spice(driver))
}

#[cfg(test)]
mod tests;
