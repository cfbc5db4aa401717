//! The file system in the reserved RAM: kept if it holds suspended guests, else created anew.
//!
//! After a power failure RAM may hold anything, also data that resembles a file system. So the file system is trusted
//! only if the record of suspended guests expects it: without a check in the same boot or in a kernel that was entered
//! by kexec for that record, otherwise only after a check by `e2fsck`.

use super::reserve::{self, Reserve};
use super::{HostError, run};
use crate::host::RebootMethod;
use crate::host::files::read_ahead;
use crate::host::record::SuspendRecord;
use crate::host::survived::{Trust, command_line};
use rekindle_vm::causes::with_causes;
use rekindle_vm::host::Host;
use rekindle_vm::network;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// How long the drivers may take to create the device.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
const DEVICE_DRIVERS: &[&str] = &["nd_e820", "nd_pmem"];
const FILE_SYSTEM_LABEL: &str = "rekindle-ram";

/// Result of mounting the reserved RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MountOutcome {
    /// The file system was mounted already.
    Before,
    /// The file system was mounted as it was: it holds suspended guests.
    Kept,
    /// A new, empty file system was created and mounted.
    New,
}

/// Mounts the reserved RAM at the RAM directory of this host. Needs root.
///
/// # Errors
/// [`HostError`] if no RAM is reserved, or if the device or a tool is missing.
pub fn mount_ram(host: &Host) -> Result<MountOutcome, HostError> {
    let Some(mount_point) = host.named_ram_directory() else {
        let text = "/etc/rekindle/host.toml has no `ram_dir`; rekindle host init --reserve SIZE --write sets one";
        return Err(HostError::Setup(text.into()));
    };
    let command_line = command_line().map_err(HostError::file(Path::new("/proc/cmdline")))?;
    let Some(reserve) = Reserve::of(&command_line) else {
        let text = "no RAM is reserved: this kernel's command line has no memmap=SIZE!START; see rekindle host init";
        return Err(HostError::Setup(text.into()));
    };
    prepare_for_guests(host)?;
    let failed = HostError::file(mount_point);
    DirBuilder::new().recursive(true).mode(0o700).create(mount_point).map_err(&failed)?;
    let device = wait_for_device(reserve)?;
    if is_mounted(&device, mount_point).map_err(&failed)? {
        return Ok(MountOutcome::Before);
    }
    let outcome = if holds_guests(host, &device)? && mount_kept(&device, mount_point)? {
        MountOutcome::Kept
    } else {
        make_file_system(&device)?;
        mount_device(&device, mount_point).map_err(|e| HostError::file(&device)(e.into()))?;
        MountOutcome::New
    };
    if !reserve::holds(mount_point).map_err(&failed)? {
        let (device, mount_point) = (device.display(), mount_point.display());
        return Err(HostError::Setup(format!("{device} is mounted at {mount_point}, but without DAX")));
    }
    Ok(outcome)
}

fn mount_device(device: &Path, mount_point: &Path) -> Result<(), Errno> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
    mount(device, mount_point, "ext4", flags, Some(c"dax=always"))
}

/// Mounts a file system that is expected to hold suspended guests. Returns whether the device has a file system.
fn mount_kept(device: &Path, mount_point: &Path) -> Result<bool, HostError> {
    match mount_device(device, mount_point) {
        Ok(()) => Ok(true),
        // These two errors mean that the device has no file system. Any other cause may be fixable, and is no reason to
        // discard guests.
        Err(Errno::INVAL | Errno::UCLEAN) => {
            tracing::warn!("the RAM of suspended guests is lost: {} holds no file system", device.display());
            Ok(false)
        }
        Err(e) => Err(HostError::file(device)(e.into())),
    }
}

/// Makes the kernel read the files of the guests' QEMUs in the background while this process waits for the device. Makes the network
/// namespaces of the guests, and the tmpfs for RAM that is not in the reserved RAM: they are mounts, and those of the process that
/// resumes the guests do not reach the host.
fn prepare_for_guests(host: &Host) -> Result<(), HostError> {
    let entries = SuspendRecord::read(&host.suspend_dir)?.entries()?;
    for entry in &entries {
        read_ahead(entry.files.iter());
    }
    for entry in &entries {
        // The other guests do not depend on it.
        if let Err(e) = network::make_namespaces(host, &entry.state.definition) {
            tracing::warn!("{}: cannot make its network namespace: {}", entry.state.hardware.name, with_causes(&e));
        }
        if let Err(e) = host.mount_for(&entry.state.hardware.ram.path) {
            tracing::warn!("{}: its RAM cannot be made: {}", entry.state.hardware.name, with_causes(&e));
        }
    }
    Ok(())
}

fn wait_for_device(reserve: Reserve) -> Result<PathBuf, HostError> {
    let sys = Path::new("/sys");
    let failed = HostError::file(&sys.join("block"));
    let deadline = Instant::now() + DEVICE_TIMEOUT;
    let mut are_drivers_loaded = false;
    loop {
        if let Some(device) = reserve::find_device(sys, reserve).map_err(&failed)?.filter(|device| device.exists()) {
            return Ok(device);
        }
        if !are_drivers_loaded {
            are_drivers_loaded = true;
            for driver in DEVICE_DRIVERS {
                // The unit may load no module. Systemd and udev load them, maybe a moment later.
                if let Err(e) = run("modprobe", &[driver]) {
                    tracing::warn!("{e}");
                }
            }
        }
        if Instant::now() > deadline {
            return Err(HostError::Setup(format!(
                "{reserve} is on the kernel's command line, but Linux has created no device for it; check that the \
                 range is RAM: dmesg | grep -e e820 -e pmem"
            )));
        }
        thread::sleep(POLL_INTERVAL);
    }
}

fn is_mounted(device: &Path, mount_point: &Path) -> std::io::Result<bool> {
    Ok(fs::metadata(device)?.rdev() == fs::metadata(mount_point)?.dev())
}

/// Returns whether the device holds suspended guests, as far as this can be determined before a mount.
fn holds_guests(host: &Host, device: &Path) -> Result<bool, HostError> {
    let record = SuspendRecord::read(&host.suspend_dir)?;
    let Some(header) = &record.header else { return Ok(false) };
    if !record.entries()?.iter().any(|entry| entry.how == RebootMethod::Warm && !entry.resume_started) {
        return Ok(false);
    }
    match Trust::of(header).map_err(HostError::file(Path::new("/proc")))? {
        Trust::SameBoot | Trust::Kexec => Ok(true),
        Trust::Digests => is_file_system_intact(device),
    }
}

fn is_file_system_intact(device: &Path) -> Result<bool, HostError> {
    let check = Command::new("e2fsck").args(["-f", "-n"]).arg(device).output();
    let is_intact = check.map_err(HostError::file(Path::new("e2fsck")))?.status.success();
    if !is_intact {
        tracing::warn!("the RAM of suspended guests is lost: the file system in {} is damaged", device.display());
    }
    Ok(is_intact)
}

fn make_file_system(device: &Path) -> Result<(), HostError> {
    let device = device.to_string_lossy();
    // For few, large files, with extents in whole huge pages, so that QEMU can map them as huge pages.
    let options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard,stride=512,stripe_width=512";
    let mut arguments = vec!["-q", "-F", "-b", "4096", "-i", "4194304", "-m", "0", "-J", "size=16"];
    arguments.extend(["-L", FILE_SYSTEM_LABEL, "-E", options, &*device]);
    run("mkfs.ext4", &arguments)
}
