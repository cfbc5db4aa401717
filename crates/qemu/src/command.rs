//! The command line of a VM's hardware.
//!
//! The same [`Hardware`] must give the same guest-visible machine in every QEMU, or device state does not fit: so the
//! machine type is a versioned one, each device has a fixed PCI slot, and nothing comes from a configuration file or
//! a default of the binary.

use crate::foreign::Foreign;
use crate::options::Options;
use crate::ramblock::MAIN_RAM;
use crate::syntax::Syntax;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Ports of a new VM's agent bus: the first one is for a console, the second the agent's, and two are left, since a
/// guest must never find another number.
pub const AGENT_PORTS: u32 = 4;

/// What the guest finds the port as by which it announces phases of its boot.
pub const PHASE_PORT: &str = "org.rekindle.phase.0";

/// First PCI slots (of bus 0) by kind of device. Slot 0 is the host bridge, 0x1f the south bridge.
const SLOT_VGA: u8 = 0x01;
const SLOT_RNG: u8 = 0x02;
const SLOT_SERIAL: u8 = 0x03;
const SLOT_DISK: u8 = 0x04;
const SLOT_NET: u8 = 0x10;
const SLOT_PANIC: u8 = 0x18;
/// Devices of a kind that fit between one first slot and the next.
const SLOTS_DISK: usize = (SLOT_NET - SLOT_DISK) as usize;
const SLOTS_NET: usize = (SLOT_PANIC - SLOT_NET) as usize;

/// Descriptor numbers at which a QEMU finds its taps: high enough never to be given to anything else before.
const FIRST_TAP_FD: RawFd = 40;
/// Where the real taps wait in a QEMU that was started with stand-ins; see [`Tap::waiting_fd`].
const FIRST_WAITING_FD: RawFd = 60;

/// Everything of a VM that its guest can see.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hardware {
    /// Name, also in the process list.
    pub name: String,
    /// The identity of this VM, which its guest sees too (SMBIOS). None for one that was started by a version without
    /// it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
    /// Versioned machine type.
    pub machine: String,
    /// CPU model with features.
    pub cpu: String,
    /// `kvm` or `tcg`.
    pub accel: String,
    /// Number of virtual CPUs.
    pub vcpus: u32,
    /// RAM.
    pub ram: Ram,
    /// A kernel to boot without boot loader.
    pub boot: Option<Boot>,
    /// Disks in the order of their slots.
    pub disks: Vec<Disk>,
    /// Network cards in the order of their slots.
    pub nets: Vec<Net>,
    /// A VGA card.
    pub vga: bool,
    /// A port for the guest agent.
    pub agent: bool,
    /// A source of randomness.
    pub rng: bool,
    /// The VM generation ID (UAPI.14) that a device shows the guest. A changed one means that the guest was set back
    /// to an earlier moment or was cloned: so it stays the same over every reboot. None: there is no such device.
    #[serde(default)]
    pub vm_generation: Option<Uuid>,
    /// Ports that the agent's bus has room for. Each is two queues, which cost time with each save and load:
    /// [`AGENT_PORTS`] are enough. None: QEMU's 31, as a VM of an older Rekindle has them; a guest must never find
    /// another number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_ports: Option<u32>,
    /// A port by which the guest announces phases of its boot, on the agent's bus.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub phase: bool,
    /// A device by which the guest's kernel reports its panic.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub panic: bool,
    /// Whatever else the owner gives to QEMU.
    pub extra: Vec<String>,
    /// The command line of a QEMU that Rekindle did not start: the machine is built from it instead of all this. Here
    /// are then its memory, networks, accelerator, name and identity only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub foreign: Option<Foreign>,
}

/// The guest's RAM: a file that is mapped shared, so that it outlives QEMU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ram {
    /// The file.
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// Whether QEMU shall populate it at the start.
    pub prealloc: bool,
}

/// Direct kernel boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// The kernel.
    pub kernel: PathBuf,
    /// Its initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Its command line.
    pub append: String,
}

/// A disk, served by QEMU itself or by a server of Rekindle's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Id of the device.
    pub id: String,
    /// Image or block device.
    pub path: PathBuf,
    /// QEMU's format driver.
    pub format: String,
    /// Whether the guest may not write.
    pub readonly: bool,
    /// QEMU's name of the cache mode.
    pub cache: String,
    /// Serial number the guest sees.
    pub serial: Option<String>,
    /// Rekindle's server has it, and QEMU reaches that at [`Directory::disk`] (vhost-user).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub server: bool,
    /// The directory of its redo log, which its server makes; none: next to the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redo: Option<PathBuf>,
    /// How long its server keeps what the guest before had cached, in ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attic_keep_ms: Option<u64>,
    /// Bytes per second that it is held to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bps: Option<u64>,
    /// Requests per second that it is held to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u32>,
}

/// Queues of a disk that a server has, for a guest with as many processors: one for each, up to what is worth its
/// memory.
#[must_use]
pub fn disk_queues(vcpus: u32) -> u16 {
    vcpus.clamp(1, 8) as u16
}

/// A network card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Net {
    /// Id of the device.
    pub id: String,
    /// MAC address.
    pub mac: String,
    /// What it is connected to.
    pub backend: NetBackend,
}

/// What a network card is connected to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NetBackend {
    /// QEMU's own user-mode network, with forwarded ports in QEMU's notation (`tcp:127.0.0.1:2222-:22`).
    User(Vec<String>),
    /// A tap interface.
    Tap(Tap),
}

/// A tap interface, and at which descriptors a QEMU of this VM has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tap {
    /// Interface name.
    pub ifname: String,
    /// Network namespace it lives in.
    pub netns: Option<String>,
}

impl Tap {
    /// The descriptor at which the QEMU uses the tap of its `index`-th network card.
    #[must_use]
    pub fn fd(index: usize) -> RawFd {
        FIRST_TAP_FD + index as RawFd
    }

    /// The descriptor at which a QEMU that takes over keeps the real tap until its guest is stopped elsewhere. Until
    /// then it has a stand-in at [`Tap::fd`]: QEMU reads a tap as soon as it has it and would swallow a packet.
    #[must_use]
    pub fn waiting_fd(index: usize) -> RawFd {
        FIRST_WAITING_FD + index as RawFd
    }
}

/// Sockets and files of one QEMU process, in a directory of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Directory(pub PathBuf);

impl Directory {
    /// QMP, for operations.
    #[must_use]
    pub fn qmp(&self) -> PathBuf {
        self.0.join("qmp.sock")
    }
    /// QMP, for a watcher that runs during an operation.
    #[must_use]
    pub fn watch(&self) -> PathBuf {
        self.0.join("watch.sock")
    }
    /// QMP, for the loop that takes checkpoints.
    #[must_use]
    pub fn protect(&self) -> PathBuf {
        self.0.join("protect.sock")
    }
    /// A second one for that loop: a command that is staged keeps its connection busy.
    #[must_use]
    pub fn save(&self) -> PathBuf {
        self.0.join("save.sock")
    }
    /// QMP, for the process that waits for the guest's reboot or panic. Only where a disk has a server: without,
    /// nothing is done about it.
    #[must_use]
    pub fn events(&self) -> PathBuf {
        self.0.join("events.sock")
    }
    /// The guest's serial console.
    #[must_use]
    pub fn console(&self) -> PathBuf {
        self.0.join("console.sock")
    }
    /// The guest agent's port.
    #[must_use]
    pub fn agent(&self) -> PathBuf {
        self.0.join("agent.sock")
    }
    /// The port by which the guest announces phases of its boot.
    #[must_use]
    pub fn phase(&self) -> PathBuf {
        self.0.join("phase.sock")
    }
    /// Where the server of disk `id` listens for QEMUs. It outlives them, so it is in the folder above.
    #[must_use]
    pub fn disk(&self, id: &str) -> PathBuf {
        self.0.parent().unwrap_or(Path::new("")).join(format!("disk-{id}.sock"))
    }
    /// Where QEMU writes its number.
    #[must_use]
    pub fn pid(&self) -> PathBuf {
        self.0.join("qemu.pid")
    }
    /// Locked by QEMU from before its program starts until it has ended: by this it is found.
    #[must_use]
    pub fn lock(&self) -> PathBuf {
        self.0.join("qemu.lock")
    }
    /// QEMU's messages.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.0.join("qemu.log")
    }
}

/// How a QEMU starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Boot the guest.
    Boot,
    /// As [`Start::Boot`], but paused until `cont`.
    Paused,
    /// Wait for a state that is handed over, and stay paused then. Ports are not forwarded yet: the QEMU before still
    /// holds them.
    Incoming,
}

/// Doubles the commas, as QEMU's `key=value` options want it.
fn escaped(text: &str) -> String {
    text.replace(',', ",,")
}

fn escaped_path(path: &Path) -> String {
    escaped(&path.to_string_lossy())
}

impl Hardware {
    /// How many disks and network cards fit.
    ///
    /// # Errors
    /// A text that names what is too many.
    pub fn check_slots(&self) -> Result<(), String> {
        let fits = |what: &str, have: usize, limit: usize| {
            if have > limit { Err(format!("{have} {what}, but a VM has room for {limit}")) } else { Ok(()) }
        };
        fits("disks", self.disks.len(), SLOTS_DISK)?;
        fits("network cards", self.nets.len(), SLOTS_NET)
    }

    /// The arguments for a QEMU of this `syntax` with this hardware, with its sockets in `directory` and the guest's
    /// console logged to `console_log`.
    #[must_use]
    pub fn arguments(&self, directory: &Directory, console_log: &Path, start: Start, syntax: Syntax) -> Vec<String> {
        if let Some(foreign) = &self.foreign {
            return foreign.arguments(self, directory, console_log, start, syntax);
        }
        let mut line = Line(Vec::new());
        line.add("-name", syntax.name(&escaped(&self.name)));
        if let Some(uuid) = self.uuid {
            line.add("-uuid", uuid.to_string());
        }
        line.flag("-nodefaults").flag("-no-user-config").add("-display", "none").add("-msg", "timestamp=on");
        line.add("-pidfile", directory.pid().to_string_lossy());
        // `suppress-vmdesc` and `send-configuration=off`: so that the state without RAM is a valid incoming stream.
        line.add("-machine", format!("{},memory-backend=ram,suppress-vmdesc=on", self.machine));
        line.add("-global", "migration.send-configuration=off");
        line.add("-accel", if self.accel == "tcg" { "tcg,thread=multi" } else { &self.accel });
        line.add("-cpu", &self.cpu);
        line.add("-smp", self.vcpus.to_string());
        line.add("-m", format!("{}K", self.ram.bytes / 1024));
        line.add(
            "-object",
            format!(
                "memory-backend-file,id=ram,size={},mem-path={},share=on,prealloc={}",
                self.ram.bytes,
                escaped_path(&self.ram.path),
                if self.ram.prealloc && start != Start::Incoming { "on" } else { "off" }
            ),
        );
        let (qmp, watch, protect, save) = (directory.qmp(), directory.watch(), directory.protect(), directory.save());
        let monitors = [("qmp", qmp), ("watch", watch), ("protect", protect), ("save", save)];
        let events = self.disks.iter().any(|disk| disk.server).then(|| ("events", directory.events()));
        for (id, socket) in monitors.into_iter().chain(events) {
            line.add("-chardev", format!("socket,id={id},path={},server=on,wait=off", escaped_path(&socket)));
            let (option, value) = syntax.monitor(id);
            line.add(option, value);
        }
        let (socket, log) = (escaped_path(&directory.console()), escaped_path(console_log));
        let console = format!("socket,id=console,path={socket},server=on,wait=off,logfile={log},logappend=on");
        line.add("-chardev", console).add("-serial", "chardev:console");
        if let Some(boot) = &self.boot {
            line.add("-kernel", boot.kernel.to_string_lossy());
            if let Some(initrd) = &boot.initrd {
                line.add("-initrd", initrd.to_string_lossy());
            }
            line.add("-append", &boot.append);
        }
        if self.vga {
            line.device(SLOT_VGA, json!({"driver": "VGA", "id": "vga"}));
        }
        if self.rng {
            line.add("-object", "rng-random,id=rng,filename=/dev/urandom");
            line.device(SLOT_RNG, json!({"driver": "virtio-rng-pci", "id": "rng-device", "rng": "rng"}));
        }
        if let Some(guid) = self.vm_generation {
            line.add("-device", json!({"driver": "vmgenid", "id": "vm-generation", "guid": guid}).to_string());
        }
        if self.agent || self.phase {
            line.device(SLOT_SERIAL, Self::serial(self.agent_ports));
        }
        let ports = [
            (self.agent, 1, "agent", "org.qemu.guest_agent.0", directory.agent()),
            (self.phase, 2, "phase", PHASE_PORT, directory.phase()),
        ];
        for (_, nr, id, name, socket) in ports.into_iter().filter(|(is_there, ..)| *is_there) {
            line.add("-chardev", format!("socket,id={id},path={},server=on,wait=off", escaped_path(&socket)));
            let port = json!({"driver": "virtserialport", "bus": "ports.0", "nr": nr, "chardev": id,
                "id": format!("{id}-port"), "name": name});
            line.add("-device", port.to_string());
        }
        for (slot, disk) in (SLOT_DISK..).zip(&self.disks) {
            if disk.server {
                line.served_disk(slot, disk, directory, self.vcpus, syntax);
            } else {
                line.disk(slot, disk);
            }
        }
        for (index, net) in self.nets.iter().enumerate() {
            line.net(SLOT_NET + index as u8, index, net, start);
        }
        if self.panic {
            line.device(SLOT_PANIC, json!({"driver": "pvpanic-pci", "id": "panic"}));
        }
        line.0.extend(self.extra.iter().cloned());
        match start {
            Start::Boot => {}
            Start::Paused => {
                line.flag("-S");
            }
            Start::Incoming => {
                line.add("-incoming", "defer").flag("-S");
            }
        }
        line.0
    }

    fn serial(ports: Option<u32>) -> Value {
        match ports {
            Some(ports) => json!({"driver": "virtio-serial-pci", "id": "ports", "max_ports": ports}),
            None => json!({"driver": "virtio-serial-pci", "id": "ports"}),
        }
    }

    /// The RAM blocks that are files in the RAM directory, which are loaded on demand: their names.
    #[must_use]
    pub fn ram_ids(&self) -> Vec<String> {
        match &self.foreign {
            Some(foreign) => foreign.ram_ids().map(str::to_owned).collect(),
            None => vec![MAIN_RAM.to_owned()],
        }
    }

    /// Their files, with their bytes.
    #[must_use]
    pub fn ram_files(&self) -> Vec<(PathBuf, u64)> {
        match &self.foreign {
            Some(foreign) => foreign.ram_files(&self.ram.path).collect(),
            None => vec![(self.ram.path.clone(), self.ram.bytes)],
        }
    }

    /// The forwarded ports, as `(network id, rule)`.
    pub fn forwards(&self) -> impl Iterator<Item = (&str, &str)> {
        self.nets.iter().flat_map(|net| match &net.backend {
            NetBackend::User(rules) => rules.iter().map(|rule| (net.id.as_str(), rule.as_str())).collect::<Vec<_>>(),
            NetBackend::Tap(_) => Vec::new(),
        })
    }

    /// The taps with the index that [`Tap::fd`] takes.
    pub fn taps(&self) -> impl Iterator<Item = (usize, &Tap)> {
        self.nets.iter().enumerate().filter_map(|(index, net)| match &net.backend {
            NetBackend::Tap(tap) => Some((index, tap)),
            NetBackend::User(_) => None,
        })
    }

    /// The device types that the command line names, those among the owner's own arguments too.
    #[must_use]
    pub fn device_types(&self) -> Vec<String> {
        let nowhere = Directory(PathBuf::new());
        let arguments = self.arguments(&nowhere, Path::new(""), Start::Boot, Syntax::default());
        let devices = arguments.iter().zip(arguments.iter().skip(1)).filter(|(option, _)| *option == "-device");
        devices.filter_map(|(_, value)| Options::parse(value, "driver").ok()?.get("driver")).collect()
    }
}

struct Line(Vec<String>);

impl Line {
    fn flag(&mut self, flag: &str) -> &mut Self {
        self.0.push(flag.into());
        self
    }

    fn add(&mut self, option: &str, value: impl AsRef<str>) -> &mut Self {
        self.0.extend([option.into(), value.as_ref().into()]);
        self
    }

    fn device(&mut self, slot: u8, mut device: Value) {
        if let Some(map) = device.as_object_mut() {
            map.insert("bus".into(), "pcie.0".into());
            map.insert("addr".into(), format!("{slot:#x}").into());
        }
        self.add("-device", device.to_string());
    }

    fn disk(&mut self, slot: u8, disk: &Disk) {
        let (direct, no_flush, write_cache) = match disk.cache.as_str() {
            "none" => (true, false, "on"),
            "directsync" => (true, false, "off"),
            "writethrough" => (false, false, "off"),
            "unsafe" => (false, true, "on"),
            _ => (false, false, "on"),
        };
        let id = &disk.id;
        let cache = json!({"direct": direct, "no-flush": no_flush});
        // The file beneath gets its lock from QEMU's own image locking, which passes from one QEMU to the next.
        let file = json!({"driver": "file", "node-name": format!("{id}-file"), "filename": disk.path, "cache": cache,
            "read-only": disk.readonly, "auto-read-only": false, "discard": "unmap",
            // The QEMU before was on this host too: what the host has cached of the image is right, and dropping it
            // (for which QEMU also syncs the file) would take longer than all the rest.
            "drop-cache": false});
        let format = json!({"driver": disk.format, "node-name": format!("{id}-format"), "file": format!("{id}-file"),
            "cache": cache, "read-only": disk.readonly, "discard": "unmap"});
        self.add("-blockdev", file.to_string());
        self.add("-blockdev", format.to_string());
        let mut drive = format!("{id}-format");
        if disk.bps.is_some() || disk.iops.is_some() {
            let group = format!("{id}-limits");
            // 0 is no limit.
            let limits = json!({"bps-total": disk.bps.unwrap_or(0), "iops-total": disk.iops.unwrap_or(0)});
            self.add("-object", json!({"qom-type": "throttle-group", "id": group, "limits": limits}).to_string());
            let limited = format!("{id}-limited");
            let filter = json!({"driver": "throttle", "node-name": limited, "throttle-group": group, "file": drive,
                "cache": cache, "read-only": disk.readonly, "discard": "unmap"});
            self.add("-blockdev", filter.to_string());
            drive = limited;
        }
        let mut device = json!({"driver": "virtio-blk-pci", "id": id, "drive": drive,
            "write-cache": write_cache});
        if let (Some(map), Some(serial)) = (device.as_object_mut(), &disk.serial) {
            map.insert("serial".into(), serial.clone().into());
        }
        self.device(slot, device);
    }

    fn served_disk(&mut self, slot: u8, disk: &Disk, directory: &Directory, vcpus: u32, syntax: Syntax) {
        let (id, socket) = (&disk.id, escaped_path(&directory.disk(&disk.id)));
        // QEMU connects again to the server that comes after one that was killed.
        self.add("-chardev", format!("socket,id={id}-server,path={socket},{}", syntax.reconnect()));
        let device = json!({"driver": "vhost-user-blk-pci", "id": id, "chardev": format!("{id}-server"),
            "num-queues": disk_queues(vcpus)});
        self.device(slot, device);
    }

    fn net(&mut self, slot: u8, index: usize, net: &Net, start: Start) {
        let id = &net.id;
        match &net.backend {
            NetBackend::User(rules) => {
                let mut backend = format!("user,id={id}");
                for rule in rules.iter().filter(|_| start != Start::Incoming) {
                    backend += &format!(",hostfwd={rule}");
                }
                self.add("-netdev", backend);
            }
            NetBackend::Tap(_) => {
                self.add("-netdev", format!("tap,id={id},fd={},vhost=off", Tap::fd(index)));
            }
        }
        let device = json!({"driver": "virtio-net-pci", "id": format!("{id}-card"), "netdev": id, "mac": net.mac});
        self.device(slot, device);
    }
}

#[cfg(test)]
mod tests;
