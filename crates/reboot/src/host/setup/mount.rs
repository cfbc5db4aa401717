//! The file system in the reserved RAM: kept if it holds suspended guests, else created anew.
//!
//! After a power failure RAM may hold anything, also data that resembles a file system. So the file system is trusted
//! only if the record of suspended guests expects it: without a check in the same boot or in a kernel that was entered
//! by kexec for that record, otherwise only after a check by `e2fsck`.

use super::super::files::read_ahead;
use super::super::plan::run;
use super::super::record::SuspendRecord;
use super::super::survived::Trust;
use super::super::{HostError, RebootMethod};
use super::reserve::{self, Reserve};
use rekindle_vm::host::Host;
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
const DRIVERS: &[&str] = &["nd_e820", "nd_pmem"];
/// Label of the file system.
const LABEL: &str = "rekindle-ram";

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
    let setup = |text: String| HostError::Setup(text);
    let at = host.named_ram_directory().ok_or_else(|| {
        setup("/etc/rekindle/host.toml has no `ram_dir`; rekindle host init --reserve SIZE --write sets one".into())
    })?;
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| HostError::File { path: path.clone(), source }
    };
    let line = super::super::survived::command_line().map_err(failed(Path::new("/proc/cmdline")))?;
    let reserve = Reserve::of(&line).ok_or_else(|| {
        setup("no RAM is reserved: this kernel's command line has no memmap=SIZE!START; see rekindle host init".into())
    })?;
    read_ahead_for(host)?;
    DirBuilder::new().recursive(true).mode(0o700).create(at).map_err(failed(at))?;
    let device = wait_for_device(reserve)?;
    if is_mounted(&device, at).map_err(failed(at))? {
        return Ok(MountOutcome::Before);
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
    let mount = || mount(&device, at, "ext4", flags, Some(c"dax=always"));
    let kept = if holds_guests(host, &device)? { Some(mount()) } else { None };
    let mounted = match kept {
        Some(Ok(())) => MountOutcome::Kept,
        // These two errors mean that the device has no file system. Any other cause may be fixable, and is no reason to
        // discard guests.
        Some(Err(e)) if ![Errno::INVAL, Errno::UCLEAN].contains(&e) => return Err(failed(&device)(e.into())),
        lost => {
            if lost.is_some() {
                tracing::warn!("the RAM of suspended guests is lost: {} holds no file system", device.display());
            }
            make_file_system(&device)?;
            mount().map_err(|e| failed(&device)(e.into()))?;
            MountOutcome::New
        }
    };
    if !reserve::holds(at).map_err(failed(at))? {
        return Err(setup(format!("{} is mounted at {}, but without DAX", device.display(), at.display())));
    }
    Ok(mounted)
}

/// Makes the kernel read the files of the guests' QEMUs in the background while this process waits for the device.
fn read_ahead_for(host: &Host) -> Result<(), HostError> {
    let record = SuspendRecord::read(&host.suspend_dir)?;
    for name in record.names()? {
        if let Some(entry) = record.entry(&name)? {
            read_ahead(entry.files.iter());
        }
    }
    Ok(())
}

fn wait_for_device(reserve: Reserve) -> Result<PathBuf, HostError> {
    let sys = Path::new("/sys");
    let failed = |source| HostError::File { path: sys.join("block"), source };
    let deadline = Instant::now() + DEVICE_TIMEOUT;
    let mut asked = false;
    loop {
        if let Some(device) = reserve::device(sys, reserve).map_err(failed)?.filter(|device| device.exists()) {
            return Ok(device);
        }
        if !asked {
            asked = true;
            for driver in DRIVERS {
                run("modprobe", &[driver])?;
            }
        }
        if Instant::now() > deadline {
            return Err(HostError::Setup(format!(
                "{reserve} is on the kernel's command line, but Linux has created no device for it; check that the \
                 range is RAM: dmesg | grep -e e820 -e pmem"
            )));
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn is_mounted(device: &Path, at: &Path) -> std::io::Result<bool> {
    Ok(fs::metadata(device)?.rdev() == fs::metadata(at)?.dev())
}

/// Returns whether the device holds suspended guests, as far as this can be determined before a mount.
fn holds_guests(host: &Host, device: &Path) -> Result<bool, HostError> {
    let record = SuspendRecord::read(&host.suspend_dir)?;
    let Some(head) = &record.head else { return Ok(false) };
    let mut warm = false;
    for name in record.names()? {
        warm |= record.entry(&name)?.is_some_and(|entry| entry.how == RebootMethod::Warm && !entry.struck);
    }
    if !warm {
        return Ok(false);
    }
    match Trust::of(head).map_err(|source| HostError::File { path: "/proc".into(), source })? {
        Trust::SameBoot | Trust::Kexec => Ok(true),
        Trust::Digests => {
            let checked = Command::new("e2fsck").args(["-f", "-n"]).arg(device).output();
            let checked = checked.map_err(|source| HostError::File { path: "e2fsck".into(), source })?;
            if !checked.status.success() {
                tracing::warn!(
                    "the RAM of suspended guests is lost: the file system in {} is damaged",
                    device.display()
                );
            }
            Ok(checked.status.success())
        }
    }
}

fn make_file_system(device: &Path) -> Result<(), HostError> {
    let device = device.to_string_lossy();
    // For few, large files, with extents in whole huge pages, so that QEMU can map them as huge pages.
    let options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard,stride=512,stripe_width=512";
    run(
        "mkfs.ext4",
        &["-q", "-F", "-b", "4096", "-i", "4194304", "-m", "0", "-J", "size=16", "-L", LABEL, "-E", options, &device],
    )
}
