//! A VM as its owner defines it: one TOML file, read into a complete [`Definition`].
//!
//! Only `name` and something to boot (a kernel or a disk) must be written. Whatever is left out is filled in when the
//! file is read, so a `Definition` has no hidden defaults: [`Definition::to_toml`] writes out a complete file, and what
//! it writes reads back as the same definition. Relative paths are made absolute on reading, from the file's own
//! folder.
//!
//! | file | what it is for |
//! |---|---|
//! | `document` | walks the TOML tree and collects every mistake with its line and column |
//! | `parse` | which keys there are, their defaults, and which go together |
//! | `files` | kernels, disks and folders that must be there |
//! | `arguments` | `qemu_args`: what may not be passed, and what cannot be carried to another VMM |
//! | `hints` | the nearest known key to an unknown one |
//! | `units`, `names`, `network`, `addresses`, `probe` | the values |
//! | `error` | what can be wrong |
//!
//! A `Definition` also goes into `state.json` by serde. There it is not checked against the host again, and a key that
//! is added here later needs `#[serde(default)]`, so that a VM which an older Rekindle started is still understood.

/// Conversions for `#[serde(into = "String", try_from = "String")]`: the text that `Display` writes and `FromStr`
/// reads.
macro_rules! serde_as_text {
    ($($type:ty),+) => {$(
        impl From<$type> for String {
            fn from(value: $type) -> Self {
                value.to_string()
            }
        }

        impl TryFrom<String> for $type {
            type Error = <$type as std::str::FromStr>::Err;

            fn try_from(text: String) -> Result<Self, Self::Error> {
                text.parse()
            }
        }
    )+};
}

mod addresses;
mod arguments;
mod document;
mod error;
mod files;
mod hints;
mod keys;
mod names;
mod network;
mod parse;
mod probe;
#[cfg(test)]
mod tests;
mod units;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use self::addresses::{AddressError, Forward, HostAddress, Mac, Protocol};
pub use self::arguments::uncarriable;
pub use self::error::{DefinitionError, DefinitionErrors, Problem};
pub use self::names::{Name, NameError};
pub use self::network::{Net, NetBackend, TapPlace, derived_ifname};
pub(crate) use self::parse::memory_flaw;
pub use self::probe::{Probe, ProbeError, ProbeKind};
pub use self::units::{Bytes, Span, UnitError};

/// The CPU model that `cpu = "auto"` means under TCG: a named one, so that it is the same in every QEMU.
pub const TCG_CPU: &str = "qemu64";
/// The CPU model that `cpu = "auto"` means under KVM.
pub const KVM_CPU: &str = "host";

/// One VM, complete. See `docs/vm-definition.md` for every key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Definition {
    /// What the VM is called; also its run directory.
    pub name: Name,
    /// Guest RAM: at least 1 MiB and a multiple of it, and of the page size where [`Ram::dir`] is a hugetlbfs.
    pub memory: Bytes,
    /// Virtual CPUs, at least 1.
    pub vcpus: u8,
    /// How guest code is run.
    pub accel: Accel,
    /// QEMU's machine type; an alias such as `q35` is pinned to what it stands for when the VM first starts.
    pub machine: String,
    /// QEMU's CPU model with its features, or `auto`: see [`Definition::cpu_model`].
    pub cpu: String,
    /// The QEMU binary: a bare name to look up in `PATH`, or an absolute path.
    pub qemu: PathBuf,
    /// How to ask whether the service in the guest is well.
    pub probe: Option<Probe>,
    /// How long a guest may take to shut down by itself before it is powered off.
    pub shutdown_timeout: Span,
    /// What is done when the guest reboots itself.
    #[serde(default)]
    pub on_reboot: OnReboot,
    /// What is done when its kernel panics.
    #[serde(default)]
    pub on_crash: OnCrash,
    /// The folder into which a `saved` reboot writes the guest's RAM; `None` leaves it to Rekindle.
    pub save_dir: Option<PathBuf>,
    /// Further arguments for QEMU, passed on as they are.
    pub qemu_args: Vec<String>,
    /// Where guest RAM is kept.
    pub ram: Ram,
    /// The kernel that QEMU loads; `None`: the firmware boots the first disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<Boot>,
    /// Devices that are there or not.
    pub devices: Devices,
    /// Phases of its boot that are kept.
    #[serde(default, skip_serializing_if = "Phase::is_empty")]
    pub phase: Phase,
    /// The disks, in the order in which the guest sees them.
    #[serde(rename = "disk", default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<Disk>,
    /// The network interfaces, in the order in which the guest sees them.
    #[serde(rename = "net", default, skip_serializing_if = "Vec::is_empty")]
    pub nets: Vec<Net>,
}

/// How guest code is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// KVM where `kvm_intel` or `kvm_amd` is loaded, else TCG.
    Auto,
    /// By the CPU.
    Kvm,
    /// By translation.
    Tcg,
}

/// What is done when the guest reboots itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnReboot {
    /// QEMU resets it in place.
    #[default]
    Reset,
    /// It is booted in a new QEMU, and finds what it had cached of its disk.
    WarmCache,
    /// It continues from the latest usable phase of an earlier boot, or is booted.
    Phase,
}

/// What is done when the guest's kernel panics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnCrash {
    /// Nothing: it stays as it is, or resets itself.
    #[default]
    Leave,
    /// It is booted in a new QEMU, and finds what it had cached of its disk.
    WarmCache,
    /// It continues from the latest usable phase of an earlier boot, or is booted.
    Phase,
}

/// `[ram]`: where guest RAM is kept.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Ram {
    /// A folder on tmpfs, hugetlbfs or fsdax; `None`: Rekindle's own tmpfs.
    pub dir: Option<PathBuf>,
    /// Claim all of it when the VM starts.
    pub prealloc: bool,
}

/// `[boot]`: the kernel that QEMU loads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// A Linux kernel (`bzImage`), absolute.
    pub kernel: PathBuf,
    /// Its initial RAM disk, absolute.
    pub initrd: Option<PathBuf>,
    /// Its command line.
    pub append: String,
}

/// `[devices]`: what is there besides disks and nets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Devices {
    /// A standard VGA card, with its video memory.
    pub vga: bool,
    /// The virtio-serial port `org.qemu.guest_agent.0`.
    pub agent: bool,
    /// virtio-rng, fed by the host.
    pub rng: bool,
    /// The VM generation ID device.
    #[serde(default)]
    pub vmgenid: bool,
}

/// `[phase]`: snapshots of phases of the guest's boot, from which it can be rebooted.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Phase {
    /// The phases, as the guest calls them, the earliest first.
    pub save: Vec<String>,
    /// The one of them that the guest does not announce: it is reached when its `probe` first answers or, without
    /// one, its agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub healthy: Option<String>,
}

impl Phase {
    /// Whether none is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.save.is_empty()
    }
}

/// One `[[disk]]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Unique among the VM's disks; part of QEMU's ids. Default `disk0`, `disk1`, ... by position.
    pub id: String,
    /// A file or a block device, absolute.
    pub path: PathBuf,
    /// How the image is written.
    pub format: DiskFormat,
    /// The guest may not write.
    pub readonly: bool,
    /// What the host caches.
    pub cache: DiskCache,
    /// The serial number that the guest sees, at most 20 characters.
    pub serial: Option<String>,
    /// Rekindle's own server has it, which knows after a reboot what the guest had cached; else QEMU itself. A
    /// definition without this key gives every disk a server that can have one; a state without it was written by a
    /// version that had none.
    #[serde(default)]
    pub server: bool,
    /// The folder in which a server makes the disk's redo log; none: next to the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redo: Option<PathBuf>,
    /// How long a server keeps what the guest before had cached of it; none: until the guest needs the room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attic_keep: Option<Span>,
    /// Bytes per second, read and written, that it is held to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bps: Option<Bytes>,
    /// Requests per second that it is held to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u32>,
}

/// How an image is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskFormat {
    /// The disk's bytes as they are.
    Raw,
    /// QEMU's own format.
    Qcow2,
}

/// QEMU's cache modes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskCache {
    /// The host's page cache is used; a guest's flush reaches the disk.
    Writeback,
    /// Every write reaches the disk before it is reported done.
    Writethrough,
    /// No host page cache (`O_DIRECT`); a guest's flush reaches the disk. Not possible on tmpfs.
    None,
    /// No host page cache, and every write reaches the disk. Not possible on tmpfs.
    Directsync,
    /// Flushes are ignored: a host crash loses the disk. For throw-away guests.
    Unsafe,
}

impl Definition {
    /// Whether a guest that reboots itself or panics is stopped there, for `rekindle watch` to reboot it.
    #[must_use]
    pub fn watches_guest(&self) -> bool {
        self.on_reboot != OnReboot::Reset || self.on_crash != OnCrash::Leave
    }

    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with it, in the order of the file; or that it cannot be read.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, DefinitionErrors> {
        let path = path.as_ref();
        let file = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&text, path.parent().unwrap_or(Path::new("")), &file),
            Err(error) => {
                let error = DefinitionError { line: 0, column: 0, problem: Problem::Unreadable(error) };
                Err(DefinitionErrors { file, errors: vec![error] })
            }
        }
    }

    /// Reads and checks `text`. Relative paths in it start from `base_dir`; messages call it `file_name`.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with it, in the order of the text.
    pub fn parse(text: &str, base_dir: impl AsRef<Path>, file_name: &str) -> Result<Self, DefinitionErrors> {
        parse::parse(text, base_dir.as_ref(), file_name)
    }

    /// The complete definition as TOML. [`Definition::parse`] reads it back as the same.
    ///
    /// # Errors
    ///
    /// A path that is not UTF-8, which a definition that was read from TOML has only if its folder's name is not.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string(self)
    }

    /// QEMU's CPU model, with `auto` resolved for KVM or TCG.
    pub fn cpu_model(&self, kvm: bool) -> &str {
        match self.cpu.as_str() {
            "auto" if kvm => KVM_CPU,
            "auto" => TCG_CPU,
            named => named,
        }
    }
}

impl Default for Devices {
    fn default() -> Self {
        Self { vga: false, agent: true, rng: true, vmgenid: true }
    }
}

impl DiskFormat {
    /// QEMU's name for it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

impl DiskCache {
    /// QEMU's name for it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Writeback => "writeback",
            Self::Writethrough => "writethrough",
            Self::None => "none",
            Self::Directsync => "directsync",
            Self::Unsafe => "unsafe",
        }
    }
}
