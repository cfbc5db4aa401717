//! The command line of a VM's hardware.
//!
//! The same [`Hardware`] must give the same guest-visible machine in every QEMU; otherwise the device state does not
//! fit. Therefore the machine type is versioned, each device has a fixed PCI slot, and nothing comes from a
//! configuration file or from a default of the binary.

use crate::foreign::Foreign;
use crate::options::Options;
use crate::ramblock::MAIN_RAM;
use crate::syntax::Syntax;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Ports of a new VM's agent bus. The first is reserved for a console, the second is the agent's, and two are spare,
/// because the number that a guest sees must never change.
pub const AGENT_PORTS: u32 = 4;

/// The port's name in the guest. The guest announces phases of its boot through this port.
pub const PHASE_PORT: &str = "org.rekindle.phase.0";

/// First PCI slots (of bus 0) by kind of device. Slot 0 is the host bridge, 0x1f the south bridge.
const SLOT_VGA: u8 = 0x01;
const SLOT_RNG: u8 = 0x02;
const SLOT_SERIAL: u8 = 0x03;
const SLOT_DISK: u8 = 0x04;
const SLOT_NET: u8 = 0x10;
const SLOT_PANIC: u8 = 0x18;
/// Number of devices of a kind that fit between two first slots.
const SLOTS_DISK: usize = (SLOT_NET - SLOT_DISK) as usize;
const SLOTS_NET: usize = (SLOT_PANIC - SLOT_NET) as usize;

/// First descriptor number for the taps of a QEMU: so high that it is not in use for anything else.
const FIRST_TAP_FD: RawFd = 40;
/// First descriptor number for the real taps of a QEMU that was started with stand-ins; see [`Tap::waiting_fd`].
const FIRST_WAITING_FD: RawFd = 60;

/// Everything of a VM that its guest can see.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hardware {
    /// VM name, also shown in the process list.
    pub name: String,
    /// Identity of the VM, which the guest also sees (SMBIOS). None for a VM that was started by a Rekindle without
    /// this field.
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
    /// RAM file and size.
    pub ram: Ram,
    /// Kernel to boot without a boot loader.
    pub boot: Option<Boot>,
    /// Disks in the order of their slots.
    pub disks: Vec<Disk>,
    /// Network cards in the order of their slots.
    pub nets: Vec<Net>,
    /// Whether there is a VGA card.
    pub vga: bool,
    /// Whether there is a port for the guest agent.
    pub agent: bool,
    /// Whether there is a virtio source of randomness.
    pub rng: bool,
    /// VM generation ID (UAPI.14) that a device shows to the guest. A changed ID means that the guest was set back to
    /// an earlier moment or was cloned; therefore it stays the same over every reboot. None: there is no such device.
    #[serde(default)]
    pub vm_generation: Option<Uuid>,
    /// Number of ports on the agent's bus. Each port has two queues, which cost time with each save and load:
    /// [`AGENT_PORTS`] are enough. None: QEMU's 31, as in a VM of an older Rekindle; the number that a guest sees
    /// must never change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_ports: Option<u32>,
    /// Whether there is a port, on the agent's bus, through which the guest announces phases of its boot.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub phase: bool,
    /// Whether there is a device through which the guest's kernel reports a panic.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub panic: bool,
    /// Further arguments for QEMU from the VM's definition.
    pub extra: Vec<String>,
    /// The command line of a QEMU that Rekindle did not start. If present, the machine is built from it; of the other
    /// fields, only memory, networks, accelerator, name and identity are then used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub foreign: Option<Foreign>,
}

/// The guest's RAM: a file that is mapped shared, so that it outlives QEMU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ram {
    /// Path of the file.
    pub path: PathBuf,
    /// Size in bytes.
    pub bytes: u64,
    /// Whether QEMU populates the file when it starts.
    pub prealloc: bool,
}

/// Direct kernel boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// Kernel image.
    pub kernel: PathBuf,
    /// Initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Kernel command line.
    pub append: String,
}

/// A disk, served by QEMU itself or by one of Rekindle's disk servers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Id of the QEMU device.
    pub id: String,
    /// Image or block device.
    pub path: PathBuf,
    /// QEMU's format driver.
    pub format: String,
    /// Whether the guest is not allowed to write.
    pub readonly: bool,
    /// QEMU's name of the cache mode, e.g. `none`.
    pub cache: String,
    /// Serial number that the guest sees.
    pub serial: Option<String>,
    /// Whether a disk server serves it (vhost-user); its socket is [`Directory::disk`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub server: bool,
    /// Directory of the redo log, which the disk server makes. None: next to the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redo: Option<PathBuf>,
    /// How long the disk server keeps the retained cache of the guest's previous boot, in ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attic_keep_ms: Option<u64>,
    /// Rate limit in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bps: Option<u64>,
    /// Rate limit in requests per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u32>,
}

/// Returns the number of queues of a served disk: one for each virtual CPU, but at most 8, because each costs memory.
#[must_use]
pub fn disk_queues(vcpus: u32) -> u16 {
    vcpus.clamp(1, 8) as u16
}

/// A network card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Net {
    /// Id of the network in QEMU.
    pub id: String,
    /// MAC address.
    pub mac: String,
    /// The other end of the card's network.
    pub backend: NetBackend,
}

/// The other end of a card's network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NetBackend {
    /// QEMU's own user-mode network, with forwarded ports in QEMU's notation (`tcp:127.0.0.1:2222-:22`).
    User(Vec<String>),
    /// A tap interface.
    Tap(Tap),
}

/// A tap interface. The functions return the descriptor numbers at which a QEMU has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tap {
    /// Interface name.
    pub ifname: String,
    /// Network namespace that contains the interface.
    pub netns: Option<String>,
}

impl Tap {
    /// Returns the descriptor number that QEMU uses for the tap of its `index`-th network card.
    #[must_use]
    pub fn fd(index: usize) -> RawFd {
        FIRST_TAP_FD + index as RawFd
    }

    /// Returns the descriptor number at which a destination QEMU keeps the real tap until its guest is stopped in the
    /// source. Until then it has a stand-in at [`Tap::fd`]: QEMU reads a tap from the moment it has it, and would
    /// swallow a packet.
    #[must_use]
    pub fn waiting_fd(index: usize) -> RawFd {
        FIRST_WAITING_FD + index as RawFd
    }
}

/// The directory of one QEMU process, with its sockets and files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Directory(pub PathBuf);

impl Directory {
    /// QMP socket for operations.
    #[must_use]
    pub fn qmp(&self) -> PathBuf {
        self.0.join("qmp.sock")
    }
    /// QMP socket for a watcher that runs during an operation.
    #[must_use]
    pub fn watch(&self) -> PathBuf {
        self.0.join("watch.sock")
    }
    /// QMP socket for the protector.
    #[must_use]
    pub fn protect(&self) -> PathBuf {
        self.0.join("protect.sock")
    }
    /// Second QMP socket for the protector: a staged command keeps its connection busy.
    #[must_use]
    pub fn save(&self) -> PathBuf {
        self.0.join("save.sock")
    }
    /// QMP socket for the process that waits for the guest's reboot or panic. Exists only if a disk is served:
    /// otherwise nothing is done about a reboot or panic.
    #[must_use]
    pub fn events(&self) -> PathBuf {
        self.0.join("events.sock")
    }
    /// Socket of the guest's serial console.
    #[must_use]
    pub fn console(&self) -> PathBuf {
        self.0.join("console.sock")
    }
    /// Socket of the guest agent's port.
    #[must_use]
    pub fn agent(&self) -> PathBuf {
        self.0.join("agent.sock")
    }
    /// Socket of the port through which the guest announces phases of its boot.
    #[must_use]
    pub fn phase(&self) -> PathBuf {
        self.0.join("phase.sock")
    }
    /// Socket of disk `id`'s server. The server outlives each QEMU, so the socket is in the parent directory.
    #[must_use]
    pub fn disk(&self, id: &str) -> PathBuf {
        self.0.parent().unwrap_or(Path::new("")).join(format!("disk-{id}.sock"))
    }
    /// File to which QEMU writes its process number.
    #[must_use]
    pub fn pid(&self) -> PathBuf {
        self.0.join("qemu.pid")
    }
    /// Lock file. QEMU holds its lock from before the program starts until it has ended: the holder of the lock is
    /// the QEMU.
    #[must_use]
    pub fn lock(&self) -> PathBuf {
        self.0.join("qemu.lock")
    }
    /// File with QEMU's messages.
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
    /// Boot the guest, but only after `cont`.
    Paused,
    /// Wait for an incoming state, and stay paused afterwards. Ports are not forwarded yet: the source QEMU still holds
    /// them.
    Incoming,
}

/// Doubles the commas, as QEMU's `key=value` options require.
fn escaped(text: &str) -> String {
    text.replace(',', ",,")
}

fn escaped_path(path: &Path) -> String {
    escaped(&path.to_string_lossy())
}

impl Hardware {
    /// Checks that all disks and network cards have a PCI slot.
    ///
    /// # Errors
    /// A text that states the number of devices and the limit.
    pub fn check_slots(&self) -> Result<(), String> {
        let fits = |what: &str, have: usize, limit: usize| {
            if have > limit { Err(format!("{have} {what}, but a VM has room for {limit}")) } else { Ok(()) }
        };
        fits("disks", self.disks.len(), SLOTS_DISK)?;
        fits("network cards", self.nets.len(), SLOTS_NET)
    }

    /// Returns the arguments for a QEMU of this `syntax` with this hardware. Its sockets are in `directory`, and the
    /// guest's console is logged to `console_log`.
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
        // `suppress-vmdesc` and `send-configuration=off` make the state without RAM a valid incoming stream.
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

    /// Returns the names of the RAM blocks that are files in the RAM directory. These are loaded on demand.
    #[must_use]
    pub fn ram_ids(&self) -> Vec<String> {
        match &self.foreign {
            Some(foreign) => foreign.ram_ids().map(str::to_owned).collect(),
            None => vec![MAIN_RAM.to_owned()],
        }
    }

    /// Returns the files of [`Hardware::ram_ids`], each with its size in bytes.
    #[must_use]
    pub fn ram_files(&self) -> Vec<(PathBuf, u64)> {
        match &self.foreign {
            Some(foreign) => foreign.ram_files(&self.ram.path).collect(),
            None => vec![(self.ram.path.clone(), self.ram.bytes)],
        }
    }

    /// Returns the forwarded ports, as `(network id, rule)`.
    pub fn forwards(&self) -> impl Iterator<Item = (&str, &str)> {
        self.nets.iter().flat_map(|net| match &net.backend {
            NetBackend::User(rules) => rules.iter().map(|rule| (net.id.as_str(), rule.as_str())).collect::<Vec<_>>(),
            NetBackend::Tap(_) => Vec::new(),
        })
    }

    /// Returns the taps, each with its `index` for [`Tap::fd`].
    pub fn taps(&self) -> impl Iterator<Item = (usize, &Tap)> {
        self.nets.iter().enumerate().filter_map(|(index, net)| match &net.backend {
            NetBackend::Tap(tap) => Some((index, tap)),
            NetBackend::User(_) => None,
        })
    }

    /// Returns the device types that the command line names, including those in [`Hardware::extra`].
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
        // The image file is locked by QEMU's own image locking, which passes from one QEMU to the next.
        let file = json!({"driver": "file", "node-name": format!("{id}-file"), "filename": disk.path, "cache": cache,
            "read-only": disk.readonly, "auto-read-only": false, "discard": "unmap",
            // The previous QEMU was on this host too: the host's cache of the image is valid. Dropping it (for which
            // QEMU also syncs the file) would take longer than all the other steps.
            "drop-cache": false});
        let format = json!({"driver": disk.format, "node-name": format!("{id}-format"), "file": format!("{id}-file"),
            "cache": cache, "read-only": disk.readonly, "discard": "unmap"});
        self.add("-blockdev", file.to_string());
        self.add("-blockdev", format.to_string());
        let mut drive = format!("{id}-format");
        if disk.bps.is_some() || disk.iops.is_some() {
            let group = format!("{id}-limits");
            // 0 means no limit.
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
        // QEMU reconnects when a server that was killed is started again.
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
