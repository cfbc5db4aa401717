//! Decides how to protect a guest, from its devices and disks: which policy, and what becomes of its disks.

use crate::error::{CheckpointError, ProtectError, TrackingStartError};
use crate::policy::Policy;
use crate::target::Target;
use rekindle_qemu::adopt::{Adopted, Obstacle};
use rekindle_qemu::block::flash::is_flash;
use rekindle_qemu::command::Disk;
use rekindle_qemu::foreign::{self, MachineFacts};
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_vm::disks;
use rekindle_vm::overlays::{OverlayDisks, OverlayDisksError};
use serde_json::Value;
use std::path::PathBuf;
use std::time::Duration;

/// How long QEMU may take to send its greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);

/// Handling of disks that QEMU itself writes, not a disk server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskPolicy {
    /// Reject a guest that has such a disk.
    Refuse,
    /// The user accepts that a restored guest finds its disks newer than its memory.
    CrashConsistent,
    /// A command of the user snapshots the disks while the guest is stopped.
    Hook(String),
    /// QEMU puts an overlay on each disk at each checkpoint.
    Overlays {
        /// Where the overlays are; none: next to the images.
        parent: Option<PathBuf>,
    },
}

/// The way in which a guest is protected.
#[derive(Debug)]
pub(crate) struct ProtectionPlan {
    pub(crate) policy: Policy,
    /// The user's command that snapshots disks.
    pub(crate) disk_hook: Option<String>,
    pub(crate) control: Qmp,
    /// A second connection, if QEMU has a socket for it.
    pub(crate) save: Option<Qmp>,
    /// The guest has a device through which it returns memory.
    pub(crate) returns_memory: bool,
    /// Set for an attached guest.
    pub(crate) attached: Option<AttachedDevices>,
    /// The disks on overlays.
    pub(crate) overlays: Option<OverlayDisks>,
}

/// The devices and disks of an attached guest, as its QEMU's command line lists them. Checkpoints record that command
/// line, so no device may be added or removed.
#[derive(Debug)]
pub(crate) struct AttachedDevices {
    adopted: Box<Adopted>,
    facts: MachineFacts,
}

impl AttachedDevices {
    /// Returns whether the guest still has the same devices and disks.
    pub(crate) fn are_unchanged(&self, control: &mut Qmp) -> Result<bool, CheckpointError> {
        Ok(foreign::read_facts(&self.adopted, control)? == self.facts)
    }
}

impl ProtectionPlan {
    /// Inspects the guest. Rejects a guest that cannot be protected. Puts its disks on overlays, if `disk_policy` requires
    /// that.
    pub(crate) fn make(
        target: &Target,
        wanted_policy: Option<Policy>,
        disk_policy: &DiskPolicy,
    ) -> Result<Self, TrackingStartError> {
        let mut plan = Self::inspect(target, wanted_policy, disk_policy)?;
        plan.overlays = begin_overlays(target, disk_policy, &mut plan.control)?;
        Ok(plan)
    }

    /// Inspects the guest and changes nothing. Rejects a guest that cannot be protected. The plan has no overlays.
    pub(crate) fn inspect(
        target: &Target,
        wanted_policy: Option<Policy>,
        disk_policy: &DiskPolicy,
    ) -> Result<Self, TrackingStartError> {
        let name = target.name();
        let vmm = match disk_policy {
            // libvirt puts them on the disks.
            DiskPolicy::Overlays { .. } => &target.vmm().through_its_manager(),
            _ => target.vmm(),
        };
        let (adopted, mut control) = vmm.adopt(GREETING_TIMEOUT).map_err(CheckpointError::from)?;
        let save = vmm.connect_for_saves(GREETING_TIMEOUT).map_err(CheckpointError::from)?;
        // Rekindle's disk servers also write the guest's memory, but report their writes.
        let served_disks: Vec<_> = disks::served(&target.state().hardware).collect();
        let is_obstacle = |obstacle: &&Obstacle| !is_served_disk(obstacle, &served_disks);
        let obstacles: Vec<_> = adopted.obstacles.iter().filter(is_obstacle).cloned().collect();
        if !obstacles.is_empty() {
            return Err(ProtectError::Obstacles { name: name.into(), obstacles }.into());
        }
        let attached = match target.state().attached {
            Some(_) => Some(inspect_attached(target, &adopted, &mut control)?),
            None => None,
        };
        let images = open_images(&mut control).map_err(CheckpointError::from)?;
        let disk_hook = choose_disk_hook(name, disk_policy, &images)?;
        let policy = choose_policy(name, wanted_policy, &images, &served_disks)?;
        check_overlays(target, disk_policy, &mut control)?;
        Ok(Self { policy, disk_hook, control, save, returns_memory: adopted.gives_back, attached, overlays: None })
    }
}

/// Rejects a disk policy that does not suit the VM, or the overlays of an earlier protector.
fn check_overlays(target: &Target, disk_policy: &DiskPolicy, control: &mut Qmp) -> Result<(), TrackingStartError> {
    let name = || target.name().to_owned();
    match disk_policy {
        DiskPolicy::Overlays { .. } if target.state().hardware.foreign.is_none() => {
            Err(ProtectError::OwnDisks { name: name() }.into())
        }
        DiskPolicy::Overlays { .. } => Ok(()),
        _ => match adopt_overlays(target, control)? {
            Some(_) => Err(ProtectError::OnOverlays { name: name() }.into()),
            None => Ok(()),
        },
    }
}

/// Takes over the overlays of an earlier protector, and begins those that `disk_policy` asks for.
fn begin_overlays(
    target: &Target,
    disk_policy: &DiskPolicy,
    control: &mut Qmp,
) -> Result<Option<OverlayDisks>, TrackingStartError> {
    let (rundir, vmm) = (target.rundir(), target.vmm());
    let (DiskPolicy::Overlays { parent }, Some(machine)) = (disk_policy, &target.state().hardware.foreign) else {
        return Ok(None);
    };
    let uuid = target.identity().uuid;
    let overlays = OverlayDisks::begin(control, rundir, vmm, machine, uuid, parent.as_deref())
        .map_err(|e| overlays_failed(target, e))?;
    if overlays.is_without_space() {
        // QEMU may have stopped the guest, which cannot be tracked then.
        let _run_state = target.hold_run_state().map_err(CheckpointError::from)?;
        overlays.end(control, rundir).map_err(|e| ProtectError::tracking(target.name(), e))?;
        return Err(ProtectError::OverlaysFull { name: target.name().into() }.into());
    }
    Ok(Some(overlays))
}

/// Takes over the overlays of an earlier protector, if there are any.
fn adopt_overlays(target: &Target, control: &mut Qmp) -> Result<Option<OverlayDisks>, TrackingStartError> {
    OverlayDisks::adopt(control, target.rundir(), target.vmm()).map_err(|e| overlays_failed(target, e))
}

/// Returns the error of overlays that could not be taken over or started. A program that works on the disks, or a restart of
/// libvirt's daemon, only delays the protection.
fn overlays_failed(target: &Target, error: OverlayDisksError) -> TrackingStartError {
    let may_pass = error.may_pass();
    let error = CheckpointError::Overlays(error);
    if may_pass || error.is_of_libvirt() {
        return TrackingStartError::Retryable(error);
    }
    TrackingStartError::Fatal(ProtectError::tracking(target.name(), error))
}

/// Inspects the devices of an attached guest, which may have changed since it was attached.
fn inspect_attached(
    target: &Target,
    adopted: &Adopted,
    control: &mut Qmp,
) -> Result<AttachedDevices, TrackingStartError> {
    let mut description = foreign::describe(adopted, control).map_err(CheckpointError::from)?;
    // A snapshot that another program has put above overlays only delays them. It may have been merged meanwhile.
    if description.is_err() && adopt_overlays(target, control)?.is_some() {
        description = foreign::describe(adopted, control).map_err(CheckpointError::from)?;
    }
    if let Err(obstacles) = description {
        return Err(ProtectError::Obstacles { name: target.name().into(), obstacles }.into());
    }
    let facts = foreign::read_facts(adopted, control).map_err(CheckpointError::from)?;
    Ok(AttachedDevices { adopted: Box::new(adopted.clone()), facts })
}

/// Returns the command that snapshots the disks, if there is one. `images` has the disks that QEMU itself has open:
/// disks on a disk server are not among them, and have epochs.
fn choose_disk_hook(
    name: &str,
    disk_policy: &DiskPolicy,
    images: &[OpenImage],
) -> Result<Option<String>, ProtectError> {
    match (disk_policy, images.iter().find(|image| image.writable)) {
        (DiskPolicy::Refuse, Some(image)) => {
            Err(ProtectError::WritableDisk { name: name.into(), disk: image.file.clone() })
        }
        (DiskPolicy::Refuse, None) | (DiskPolicy::CrashConsistent | DiskPolicy::Overlays { .. }, _) => Ok(None),
        (DiskPolicy::Hook(command), _) => Ok(Some(command.clone())),
    }
}

/// Returns the wanted policy, if the guest's disks permit it; without a wanted one, the best policy that they permit.
fn choose_policy(
    name: &str,
    wanted: Option<Policy>,
    images: &[OpenImage],
    served_disks: &[&Disk],
) -> Result<Policy, ProtectError> {
    let direct_image = images.iter().find(|image| image.direct);
    match (wanted, direct_image, served_disks.first()) {
        (Some(Policy::Precopy), Some(image), _) => {
            Err(ProtectError::DirectIo { name: name.into(), disk: image.file.clone() })
        }
        (Some(Policy::Cow), _, Some(disk)) => {
            Err(ProtectError::CowDiskServer { name: name.into(), disk: disk.id.clone() })
        }
        (Some(policy), _, _) => Ok(policy),
        // A disk server does not wait for a page to be copied.
        (None, Some(_), Some(_)) => Ok(Policy::Basic),
        (None, Some(_), None) => Ok(Policy::Cow),
        (None, None, _) => Ok(Policy::Precopy),
    }
}

/// Returns whether the obstacle is the device of a disk on a disk server.
fn is_served_disk(obstacle: &Obstacle, served_disks: &[&Disk]) -> bool {
    served_disks.iter().any(|disk| {
        let path = format!("(/machine/peripheral/{}", disk.id);
        let parts = obstacle.what.strip_prefix("vhost-user-blk").and_then(|device| device.split_once(&path));
        parts.is_some_and(|(bus, child)| {
            ["", "-pci"].contains(&bus.trim_end()) && [")", "/virtio-backend)"].contains(&child)
        })
    })
}

/// A disk image that QEMU has open for its guest.
struct OpenImage {
    file: String,
    writable: bool,
    /// The image is open with `O_DIRECT`: the kernel reads it into guest memory past QEMU's page tables.
    direct: bool,
}

/// Lists the images of disks. Those of flash memories are not among them.
fn open_images(qmp: &mut Qmp) -> Result<Vec<OpenImage>, QmpError> {
    let devices: Vec<Value> = qmp.execute("query-block", ())?;
    let mut images = Vec::new();
    for device in &devices {
        let Some(inserted) = device.get("inserted") else { continue };
        let path = device.get("qdev").and_then(Value::as_str).filter(|path| !path.is_empty());
        if path.map(|path| is_flash(qmp, path)).transpose()? != Some(true) {
            images.push(OpenImage {
                file: inserted.get("file").and_then(Value::as_str).unwrap_or("a disk").to_owned(),
                writable: inserted.get("ro").and_then(Value::as_bool) != Some(true),
                direct: inserted.pointer("/cache/direct").and_then(Value::as_bool) != Some(false),
            });
        }
    }
    Ok(images)
}
