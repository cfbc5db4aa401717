//! A VM as its owner defines it: one TOML file, read into a complete [`Definition`].
//!
//! Only `name` and something to boot (a kernel or a disk) are required. All other keys get their defaults when the
//! file is read, so a `Definition` has no hidden defaults: [`Definition::to_toml`] writes a complete file, and
//! reading that file gives the same definition. Relative paths refer to the file's own folder and are made absolute
//! on reading.
//!
//! | file | purpose |
//! |---|---|
//! | `document` | walks the TOML tree and collects every mistake with its line and column |
//! | `parse` | the keys, their defaults, and which keys exclude or require each other |
//! | `files` | checks of kernels, disks and folders |
//! | `arguments` | `qemu_args`: arguments that are rejected, and arguments that prevent carrying a guest to another QEMU |
//! | `keys` | the known keys, and the nearest one to an unknown key |
//! | `units`, `names`, `network`, `addresses`, `probe` | the values |
//! | `error` | the mistakes |
//!
//! A `Definition` is also part of `state.json`, through serde. It is not checked against the host again when that is
//! read. A new key needs `#[serde(default)]`, so that the state of a VM that an older Rekindle started can still be
//! read.

/// Implements the conversions for `#[serde(into = "String", try_from = "String")]`: `Display` writes the text and
/// `FromStr` reads it.
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

/// The CPU model of `cpu = "auto"` under TCG: a named model, so that it is the same in every QEMU.
pub const TCG_CPU: &str = "qemu64";
/// The CPU model of `cpu = "auto"` under KVM.
pub const KVM_CPU: &str = "host";

/// The complete definition of one VM. `docs/vm-definition.md` describes every key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Definition {
    /// Name of the VM, also of its run directory.
    pub name: Name,
    /// Guest RAM: at least 1 MiB and a multiple of it; if [`Ram::dir`] is on hugetlbfs, also of its page size.
    pub memory: Bytes,
    /// Virtual CPUs, at least 1.
    pub vcpus: u8,
    /// Accelerator.
    pub accel: Accel,
    /// QEMU's machine type. An alias such as `q35` is pinned to its versioned type when the VM first starts.
    pub machine: String,
    /// QEMU's CPU model with its features, or `auto`: see [`Definition::cpu_model`].
    pub cpu: String,
    /// The QEMU binary: a bare name to look up in `PATH`, or an absolute path.
    pub qemu: PathBuf,
    /// Health check of the service in the guest.
    pub probe: Option<Probe>,
    /// Time for the guest to shut down by itself before it is powered off.
    pub shutdown_timeout: Span,
    /// Action when the guest reboots itself.
    #[serde(default)]
    pub on_reboot: OnReboot,
    /// Action when the guest's kernel panics.
    #[serde(default)]
    pub on_crash: OnCrash,
    /// Directory into which a `saved` reboot writes the guest's RAM. `None`: the host's default.
    pub save_dir: Option<PathBuf>,
    /// Further arguments for QEMU, passed unchanged.
    pub qemu_args: Vec<String>,
    /// Location of guest RAM.
    pub ram: Ram,
    /// Kernel that QEMU loads. `None`: the firmware boots the first disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<Boot>,
    /// Optional devices.
    pub devices: Devices,
    /// Phases of the guest's boot that are saved.
    #[serde(default, skip_serializing_if = "Phase::is_empty")]
    pub phase: Phase,
    /// The disks, in the order in which the guest sees them.
    #[serde(rename = "disk", default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<Disk>,
    /// The network interfaces, in the order in which the guest sees them.
    #[serde(rename = "net", default, skip_serializing_if = "Vec::is_empty")]
    pub nets: Vec<Net>,
}

/// Accelerator that runs guest code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// KVM if `kvm_intel` or `kvm_amd` is loaded and `/dev/kvm` opens, otherwise TCG.
    Auto,
    /// Hardware virtualization by the CPU.
    Kvm,
    /// Translation by QEMU.
    Tcg,
}

/// Action when the guest reboots itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnReboot {
    /// QEMU resets the guest in place.
    #[default]
    Reset,
    /// The guest is booted in a new QEMU, with its disk cache of the previous boot retained.
    WarmCache,
    /// The guest continues from the latest usable phase of an earlier boot; if there is none, it is booted.
    Phase,
}

/// Action when the guest's kernel panics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnCrash {
    /// None: the guest stays as it is, or resets itself.
    #[default]
    Leave,
    /// The guest is booted in a new QEMU, with its disk cache of the previous boot retained.
    WarmCache,
    /// The guest continues from the latest usable phase of an earlier boot; if there is none, it is booted.
    Phase,
}

/// `[ram]`: location of guest RAM.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Ram {
    /// A directory on tmpfs, hugetlbfs or fsdax. `None`: the host's RAM directory, see [`crate::host`].
    pub dir: Option<PathBuf>,
    /// Whether all RAM is allocated when the VM starts.
    pub prealloc: bool,
}

/// `[boot]`: the kernel that QEMU loads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// Absolute path of a Linux kernel (`bzImage`).
    pub kernel: PathBuf,
    /// Absolute path of the initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Kernel command line.
    pub append: String,
}

/// `[devices]`: devices other than disks and nets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Devices {
    /// Standard VGA card, with its video memory.
    pub vga: bool,
    /// Virtio-serial port `org.qemu.guest_agent.0`.
    pub agent: bool,
    /// virtio-rng, with the host's random numbers.
    pub rng: bool,
    /// VM generation ID device.
    #[serde(default)]
    pub vmgenid: bool,
}

/// `[phase]`: boot snapshots, from which the guest can be rebooted.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Phase {
    /// Names of the phases, as the guest announces them, the earliest first.
    pub save: Vec<String>,
    /// The one of these phases that the guest does not announce. It is reached when the VM's `probe` first succeeds
    /// or, without a probe, when the agent first answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub healthy: Option<String>,
}

impl Phase {
    /// Returns whether no phase is saved.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.save.is_empty()
    }
}

/// One `[[disk]]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Unique among the VM's disks, and part of QEMU's ids. Default `disk0`, `disk1`, ... by position.
    pub id: String,
    /// Absolute path of a file or a block device.
    pub path: PathBuf,
    /// Format of the image.
    pub format: DiskFormat,
    /// Whether the guest is not allowed to write.
    pub readonly: bool,
    /// Use of the host's page cache.
    pub cache: DiskCache,
    /// Serial number that the guest sees, at most 20 characters.
    pub serial: Option<String>,
    /// Whether Rekindle's disk server serves the disk, instead of QEMU. After a reboot the server knows what the
    /// guest had cached. A definition without this key gives a server to every disk that can have one; a state
    /// without it was written by a version without disk servers.
    #[serde(default)]
    pub server: bool,
    /// Directory in which the disk server makes the redo log. None: next to the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redo: Option<PathBuf>,
    /// How long the disk server keeps the retained cache of the previous boot. None: until the guest needs the
    /// memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attic_keep: Option<Span>,
    /// Rate limit in bytes per second, reads and writes together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bps: Option<Bytes>,
    /// Rate limit in requests per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u32>,
}

/// Format of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskFormat {
    /// The disk's bytes without a header.
    Raw,
    /// QEMU's own format, with a header and tables.
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
    /// Returns whether a guest that reboots itself or panics stays stopped, so that `rekindle watch` reboots it.
    #[must_use]
    pub fn watches_guest(&self) -> bool {
        self.on_reboot != OnReboot::Reset || self.on_crash != OnCrash::Leave
    }

    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    ///
    /// All mistakes in the order of the file, or that the file cannot be read.
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

    /// Parses and checks `text`. Relative paths refer to `base_dir`; messages use `file_name`.
    ///
    /// # Errors
    ///
    /// All mistakes, in the order of the text.
    pub fn parse(text: &str, base_dir: impl AsRef<Path>, file_name: &str) -> Result<Self, DefinitionErrors> {
        parse::parse(text, base_dir.as_ref(), file_name)
    }

    /// Returns the complete definition as TOML. [`Definition::parse`] of it gives the same definition.
    ///
    /// # Errors
    ///
    /// A path is not UTF-8. If the definition was read from TOML, this happens only if its folder's name is not
    /// UTF-8.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string(self)
    }

    /// Returns QEMU's CPU model, with `auto` resolved for KVM or TCG.
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
    /// Returns QEMU's name of the format.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

impl DiskCache {
    /// Returns QEMU's name of the cache mode.
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
