//! The description of a VM's machine, from which each of its QEMUs is started: processors, RAM, disks, network cards.
//!
//! The description is stored with the VM and with its checkpoints. A machine that Rekindle has designed is described by
//! the fields of [`Hardware`]. A machine that another program has started is described by the command line of its QEMU:
//! [`ForeignMachine`].

use crate::block::graph::CacheMode;
use crate::block::names::OverlayName;
use crate::cpu::Features;
use crate::ramblock::MAIN_RAM;
use serde::{Deserialize, Serialize};
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Ports of a new VM's agent bus. The first is reserved for a console, the second is the agent's, and two are spare,
/// because the number that a guest sees must never change.
pub const AGENT_PORTS: u32 = 4;

/// The port's name in the guest. The guest announces phases of its boot through this port.
pub const PHASE_PORT: &str = "org.rekindle.phase.0";

/// First descriptor number for the taps of a QEMU: so high that it is not in use for anything else.
const FIRST_TAP_FD: RawFd = 40;
/// First descriptor number for the real taps of a QEMU that was started with stand-ins; see [`TapSlot`].
const FIRST_WAITING_FD: RawFd = 60;
/// Number of cards for which numbers are reserved.
const MAX_TAPS: RawFd = FIRST_WAITING_FD - FIRST_TAP_FD;
/// First descriptor number for the queues of each card after its first one: those in use, then those that wait.
const FIRST_QUEUE_FD: RawFd = 100;
const FIRST_WAITING_QUEUE_FD: RawFd = FIRST_QUEUE_FD + MAX_TAPS * FURTHER_QUEUES;
/// First descriptor number for vhost devices.
const FIRST_VHOST_FD: RawFd = FIRST_WAITING_QUEUE_FD + MAX_TAPS * FURTHER_QUEUES;

/// Most queues of a card, as of a disk ([`disk_queues`]).
pub const MAX_QUEUES: u16 = 8;
const FURTHER_QUEUES: RawFd = MAX_QUEUES as RawFd - 1;
// The usual limit of a process.
const _: () = assert!(FIRST_VHOST_FD + MAX_TAPS * MAX_QUEUES as RawFd <= 1024);

/// Everything of a VM that its guest can see.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hardware {
    /// Name of the VM, also shown in the process list.
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
    pub vcpus: u32,
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
    pub foreign: Option<ForeignMachine>,
}

#[cfg(test)]
impl Hardware {
    /// Returns a machine with nothing but RAM, for tests.
    pub(crate) fn bare(ram_bytes: u64) -> Self {
        Self {
            name: "x".into(),
            uuid: None,
            machine: "pc-q35-7.2".into(),
            cpu: String::new(),
            accel: "tcg".into(),
            vcpus: 1,
            ram: Ram { path: "/ram/x.ram".into(), bytes: ram_bytes, prealloc: false },
            boot: None,
            disks: Vec::new(),
            nets: Vec::new(),
            vga: false,
            agent: false,
            agent_ports: None,
            phase: false,
            panic: false,
            rng: false,
            vm_generation: None,
            extra: Vec::new(),
            foreign: None,
        }
    }
}

impl Hardware {
    /// Returns the names of the RAM blocks that are files in the RAM directory. These are loaded on demand.
    pub fn ram_ids(&self) -> Vec<String> {
        match &self.foreign {
            Some(foreign) => foreign.backends.iter().map(|backend| backend.id.clone()).collect(),
            None => vec![MAIN_RAM.to_owned()],
        }
    }

    /// Returns the files of [`Hardware::ram_ids`], each with its size in bytes.
    pub fn ram_files(&self) -> Vec<(PathBuf, u64)> {
        match &self.foreign {
            Some(foreign) => foreign.ram_files(&self.ram.path),
            None => vec![(self.ram.path.clone(), self.ram.bytes)],
        }
    }

    /// Returns the forwarded ports, as `(network id, rule)`.
    pub fn forwards(&self) -> impl Iterator<Item = (&str, &str)> {
        self.nets.iter().flat_map(|net| {
            let rules = match &net.backend {
                NetBackend::User(rules) => rules.as_slice(),
                NetBackend::Tap(_) => &[],
            };
            rules.iter().map(|rule| (net.id.as_str(), rule.as_str()))
        })
    }

    /// Returns the descriptor numbers of the taps of a QEMU and of one that takes its guest over.
    pub fn tap_slots(&self) -> Vec<TapSlot> {
        let slot = |index, tap: &Tap, queue| TapSlot {
            interface: tap.ifname.clone(),
            source: Tap::fd(index, queue),
            destination: Tap::fd(index, queue),
            waiting: Tap::waiting_fd(index, queue),
        };
        self.taps().flat_map(|(index, tap)| (0..tap.queues).map(move |queue| slot(index, tap, queue))).collect()
    }

    /// Returns the descriptor numbers of a QEMU's vhost devices.
    pub fn vhost_fds(&self) -> Vec<RawFd> {
        self.taps().flat_map(|(index, tap)| tap.vhost_fds(index)).collect()
    }

    /// Returns whether the host's kernel serves a network card (vhost-net).
    pub fn has_vhost(&self) -> bool {
        self.taps().any(|(_, tap)| tap.vhost)
    }

    /// Returns the problem of a network card whose output QEMU cannot hold ([`crate::hold`]).
    pub fn unheld_output(&self) -> Option<String> {
        let is_unheld = |net: &&Net| matches!(&net.backend, NetBackend::Tap(tap) if tap.queues > 1 || tap.vhost);
        let net = self.nets.iter().find(is_unheld)?;
        Some(format!("the output of network {} cannot be held: it has `queues` or `vhost`", net.id))
    }

    /// Returns the taps, each with its `index` for [`Tap::fd`].
    pub fn taps(&self) -> impl Iterator<Item = (usize, &Tap)> {
        self.nets.iter().enumerate().filter_map(|(index, net)| match &net.backend {
            NetBackend::Tap(tap) => Some((index, tap)),
            NetBackend::User(_) => None,
        })
    }
}

/// The guest's RAM: a file that is mapped shared, so that it outlives QEMU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ram {
    pub path: PathBuf,
    pub bytes: u64,
    /// Whether QEMU populates the file when it starts.
    pub prealloc: bool,
}

/// Direct kernel boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    pub kernel: PathBuf,
    pub initrd: Option<PathBuf>,
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
    /// Whether a disk server serves it (vhost-user); its socket is [`Directory::disk`](super::Directory::disk).
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
pub fn disk_queues(vcpus: u32) -> u16 {
    vcpus.clamp(1, 8) as u16
}

/// A network card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Net {
    /// Id of the network in QEMU.
    pub id: String,
    pub mac: String,
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
    pub ifname: String,
    /// Network namespace that contains the interface.
    pub netns: Option<String>,
    /// Number of queues of the card, at most [`MAX_QUEUES`]. Each has two virtqueues and a file of the tap.
    #[serde(default = "one_queue", skip_serializing_if = "is_one_queue")]
    pub queues: u16,
    /// Whether the host's kernel serves the card (vhost-net).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub vhost: bool,
}

/// Returns the number of queues of a card that names none.
pub fn one_queue() -> u16 {
    1
}

/// Returns whether a card need not name its number of queues.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
pub fn is_one_queue(queues: &u16) -> bool {
    *queues == 1
}

impl Tap {
    /// Returns the descriptor number that QEMU uses for a queue of the tap of its `index`-th network card.
    pub fn fd(index: usize, queue: u16) -> RawFd {
        match queue {
            0 => FIRST_TAP_FD + index as RawFd,
            _ => FIRST_QUEUE_FD + further_queue(index, queue),
        }
    }

    /// Returns the descriptor number at which a queue of the real tap waits in a destination QEMU: see [`TapSlot`].
    fn waiting_fd(index: usize, queue: u16) -> RawFd {
        match queue {
            0 => FIRST_WAITING_FD + index as RawFd,
            _ => FIRST_WAITING_QUEUE_FD + further_queue(index, queue),
        }
    }

    /// Returns the descriptor numbers of the vhost devices of the `index`-th network card: one for each queue.
    fn vhost_fds(&self, index: usize) -> Vec<RawFd> {
        let first = FIRST_VHOST_FD + index as RawFd * RawFd::from(MAX_QUEUES);
        let queues = if self.vhost { self.queues } else { 0 };
        (0..queues).map(|queue| first + RawFd::from(queue)).collect()
    }

    /// Returns the options of the network `id` of the `index`-th card, for `-netdev`.
    pub(super) fn netdev(&self, index: usize, id: &str) -> String {
        let joined = |numbers: Vec<RawFd>| numbers.iter().map(RawFd::to_string).collect::<Vec<_>>().join(":");
        let queues = (0..self.queues).map(|queue| Self::fd(index, queue)).collect();
        // QEMU accepts a list of descriptors only where there are several.
        let plural = if self.queues > 1 { "s" } else { "" };
        let vhost = match self.vhost {
            true => format!("on,vhostfd{plural}={}", joined(self.vhost_fds(index))),
            false => "off".into(),
        };
        format!("tap,id={id},fd{plural}={},vhost={vhost}", joined(queues))
    }
}

/// Returns the place of a queue other than the first among all of them.
fn further_queue(index: usize, queue: u16) -> RawFd {
    index as RawFd * FURTHER_QUEUES + RawFd::from(queue) - 1
}

/// The descriptor numbers of one queue of a tap, in a *source* QEMU that uses it and in the *destination* that gets it.
///
/// QEMU reads a tap from the moment it has it, and would swallow a packet. Until the guest is stopped in the source, the
/// destination therefore has a stand-in at the number that its command line names, and the real tap at another number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TapSlot {
    /// Name of the interface, for messages.
    pub interface: String,
    pub source: RawFd,
    pub destination: RawFd,
    /// The number at which the real tap waits in the destination.
    pub waiting: RawFd,
}

/// The machine of a QEMU that Rekindle did not start, as the arguments that build it again. [`crate::foreign`] derives
/// it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForeignMachine {
    /// The arguments that describe the machine, rewritten where necessary.
    #[serde(rename = "words")]
    pub arguments: Vec<String>,
    /// Memory backends. The first one's file is the one that [`Ram`] names; the other files are in the same directory.
    pub backends: Vec<RamBackend>,
    /// Networks, in the order of [`Hardware::nets`].
    pub networks: Vec<ForeignNetwork>,
    /// Id of the character device that becomes Rekindle's console.
    pub console: Option<String>,
    /// Id of the character device that becomes the guest agent's port.
    pub agent: Option<String>,
    /// CPU features that the guest sees: `-cpu max` and `-cpu host` mean something else in another QEMU or on another
    /// host.
    #[serde(default)]
    pub cpu: Features,
    /// The disks that are on overlays.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overlays: Vec<DiskOverlays>,
    /// libvirt's XML of the domain, if it is one: as libvirt sends it to another host in a migration, with passwords.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain_xml: Option<String>,
    /// Whether a TPM's emulator is left out of the arguments: only libvirt, which starts one, can build the machine.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_tpm_emulator: bool,
}

/// A memory backend of a [`ForeignMachine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamBackend {
    /// Id of the backend, which is also the name of its RAM block.
    pub id: String,
    /// Size in bytes.
    pub bytes: u64,
}

/// A network of a [`ForeignMachine`], `-netdev`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForeignNetwork {
    pub id: String,
    /// Type of the network: `user`, `tap`, ...
    pub kind: String,
    /// Options of a network of type `user`, without the forwarded ports: the guest knows the addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub options: Option<String>,
    /// Whether the network must be a tap again: the card sends frames with headers that only a tap understands.
    pub needs_tap: bool,
    /// Number of queues of the tap.
    #[serde(default = "one_queue", skip_serializing_if = "is_one_queue")]
    pub queues: u16,
    /// MAC address on the command line; empty if QEMU chose it.
    pub mac: String,
    /// Forwarded ports in QEMU's notation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forwards: Vec<String>,
}

/// The overlays of one disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskOverlays {
    /// The node of the image, which the device's `drive` names.
    pub drive: String,
    pub cache: CacheMode,
    pub detect_zeroes: String,
    /// The overlays, oldest first; the guest writes to the last. They change with each checkpoint, so they are known
    /// only to the restore that starts the QEMU. No other QEMU can be started for this hardware.
    #[serde(skip)]
    pub files: Vec<OverlayFile>,
}

/// The file of an overlay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverlayFile {
    pub name: OverlayName,
    pub path: PathBuf,
}

impl ForeignMachine {
    /// Returns the file of each backend with its size in bytes; `main` is the first backend's file.
    pub(super) fn ram_files(&self, main: &Path) -> Vec<(PathBuf, u64)> {
        let extension = main.extension().unwrap_or_default().to_string_lossy();
        let file = |index: usize| match index {
            0 => main.to_owned(),
            _ => main.with_extension(format!("{index}.{extension}")),
        };
        self.backends.iter().enumerate().map(|(index, backend)| (file(index), backend.bytes)).collect()
    }
}
