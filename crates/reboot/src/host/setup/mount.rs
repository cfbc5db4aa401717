//! The file system in the reserved RAM: kept if suspended guests are in it, else made anew.
//!
//! After a power failure RAM holds anything, also what looks like a file system. So nothing in it is believed unless the record of suspended
//! guests says that it should be there: in a kernel that was entered by kexec for that record as it is, else only if it is whole.

use super::super::files::read_ahead;
use super::super::plan::run;
use super::super::record::Record;
use super::super::survived::Trust;
use super::super::{HostError, How};
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

/// How long the drivers may take to make the device.
const DEVICE: Duration = Duration::from_secs(30);
/// The drivers of the device.
const DRIVERS: &[&str] = &["nd_e820", "nd_pmem"];
/// By which it is known.
const LABEL: &str = "rekindle-ram";

/// What was found there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mounted {
    /// It was mounted already.
    Before,
    /// With suspended guests in it.
    Kept,
    /// New, and empty.
    New,
}

/// Mount the reserved RAM at the RAM directory of this host. Needs root.
///
/// # Errors
/// [`HostError`]: nothing is reserved, no device, no tools.
pub fn mount_ram(host: &Host) -> Result<Mounted, HostError> {
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
        return Ok(Mounted::Before);
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
    let mount = || mount(&device, at, "ext4", flags, Some(c"dax=always"));
    let kept = if is_wanted(host, &device)? { Some(mount()) } else { None };
    let mounted = match kept {
        Some(Ok(())) => Mounted::Kept,
        // There is no file system; anything else may be mended, and is no reason to give guests up.
        Some(Err(e)) if ![Errno::INVAL, Errno::UCLEAN].contains(&e) => return Err(failed(&device)(e.into())),
        lost => {
            if lost.is_some() {
                tracing::warn!(
                    "the RAM of suspended guests did not survive: no file system is in {}",
                    device.display()
                );
            }
            make(&device)?;
            mount().map_err(|e| failed(&device)(e.into()))?;
            Mounted::New
        }
    };
    if !reserve::holds(at).map_err(failed(at))? {
        return Err(setup(format!("{} is mounted at {}, but without DAX", device.display(), at.display())));
    }
    Ok(mounted)
}

/// While this waits for its device, what guests' QEMUs are started from comes.
fn read_ahead_for(host: &Host) -> Result<(), HostError> {
    let record = Record::read(&host.suspend_dir)?;
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
    let deadline = Instant::now() + DEVICE;
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
                "{reserve} is on the command line, but Linux has made no device of it; is it RAM? dmesg | grep -e e820 -e pmem"
            )));
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn is_mounted(device: &Path, at: &Path) -> std::io::Result<bool> {
    Ok(fs::metadata(device)?.rdev() == fs::metadata(at)?.dev())
}

/// Whether suspended guests are in it, as far as can be told before it is mounted.
fn is_wanted(host: &Host, device: &Path) -> Result<bool, HostError> {
    let record = Record::read(&host.suspend_dir)?;
    let Some(head) = &record.head else { return Ok(false) };
    let mut warm = false;
    for name in record.names()? {
        warm |= record.entry(&name)?.is_some_and(|entry| entry.how == How::Warm && !entry.struck);
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
                    "the RAM of suspended guests did not survive: no whole file system is in {}",
                    device.display()
                );
            }
            Ok(checked.status.success())
        }
    }
}

fn make(device: &Path) -> Result<(), HostError> {
    let device = device.to_string_lossy();
    // Few, large files; extents in whole huge pages, so that QEMU's page tables can have them.
    let options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard,stride=512,stripe_width=512";
    run(
        "mkfs.ext4",
        &["-q", "-F", "-b", "4096", "-i", "4194304", "-m", "0", "-J", "size=16", "-L", LABEL, "-E", options, &device],
    )
}
