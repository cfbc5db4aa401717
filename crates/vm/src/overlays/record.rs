//! Which disk of a VM has its overlays where: `overlays.json` in the run directory, written before the first overlay.

use super::device::{self, DeviceIdentity};
use super::fence::FencedImage;
use super::libvirt::{self, LibvirtDisk};
use super::view::{Description, read_domain_disks};
use super::{OverlayDisksError, fence};
use crate::rundir::{RunDir, ignore_missing, write_json};
use rekindle_kernel::process::{self, Process};
use rekindle_kernel::write_watch::has_open;
use rekindle_libvirt::disks::DomainDisk;
use rekindle_qemu::block::flash::is_flash;
use rekindle_qemu::block::graph::{BlockGraph, BlockNode, OverlayChain};
use rekindle_qemu::command::ForeignMachine;
use rekindle_qemu::monitor::Monitor;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::Vmm;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Formats on which overlays are tested.
const FORMATS: [&str; 2] = ["raw", "qcow2"];

/// What the name of a directory of overlays has after the name of the image.
pub(super) const OVERLAY_DIRECTORY_SUFFIX: &str = ".rekindle";

/// The content of `overlays.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct OverlayRecord {
    pub disks: Vec<RecordedDisk>,
}

/// A disk with overlays.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RecordedDisk {
    /// QEMU's path of the device.
    pub device: String,
    /// The name of the image's node.
    pub drive: String,
    /// The number of the disk in the names of its nodes.
    pub number: u16,
    pub image: PathBuf,
    /// Directory of the overlays.
    pub directory: PathBuf,
    /// Length of the disk.
    pub bytes: u64,
    /// libvirt's name of the disk, such as `vda`, if libvirt puts its overlays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Set if the image is a block device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_device: Option<DeviceIdentity>,
}

impl RecordedDisk {
    /// Returns the disk if libvirt puts its overlays.
    pub fn libvirt_disk(&self, vmm: &Vmm) -> Option<LibvirtDisk> {
        let Self { device, number, image, directory, target, block_device, .. } = self.clone();
        let fenced = FencedImage::new(&image, block_device, vmm.pid);
        Some(LibvirtDisk { target: target?, device, number, image, fenced, directory })
    }
}

/// Names a QEMU process: the overlays are for this process only.
pub(super) fn owner_of(vmm: &Vmm) -> Result<String, OverlayDisksError> {
    Ok(format!("{} {} {}", this_boot()?, vmm.pid, vmm.started))
}

/// Returns the id of this start of the host.
fn this_boot() -> Result<String, OverlayDisksError> {
    process::boot_id().map_err(OverlayDisksError::io(Path::new("/proc/sys/kernel/random/boot_id")))
}

/// Returns the QEMU that the overlays are for, if it still runs on this host.
pub(super) fn running_owner(owner: &str) -> Result<Option<u32>, OverlayDisksError> {
    let mut words = owner.split(' ');
    let (Some(boot), Some(Ok(pid)), Some(Ok(started))) =
        (words.next(), words.next().map(str::parse), words.next().map(str::parse))
    else {
        return Ok(None);
    };
    let process = Process { pid, started };
    Ok((this_boot()? == boot && process.is_alive()).then_some(pid))
}

fn path(rundir: &RunDir) -> PathBuf {
    rundir.file("overlays.json")
}

impl OverlayRecord {
    pub fn read(rundir: &RunDir) -> Result<Option<Self>, OverlayDisksError> {
        let path = path(rundir);
        match fs::read(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            text => {
                text.and_then(|text| Ok(serde_json::from_slice(&text).map(Some)?)).map_err(OverlayDisksError::io(&path))
            }
        }
    }

    pub fn write(&self, rundir: &RunDir) -> Result<(), OverlayDisksError> {
        write_json(&path(rundir), self).map_err(OverlayDisksError::io(&path(rundir)))
    }

    pub fn remove(rundir: &RunDir) -> Result<(), OverlayDisksError> {
        ignore_missing(fs::remove_file(path(rundir))).map_err(OverlayDisksError::io(&path(rundir)))
    }

    /// Lists all writable disks of a QEMU, without flash memories. Nothing is made.
    pub fn plan(
        qmp: &mut Qmp,
        vmm: &Vmm,
        machine: &ForeignMachine,
        vm: Uuid,
        parent: Option<&Path>,
    ) -> Result<Self, OverlayDisksError> {
        let graph = BlockGraph::read(qmp)?;
        let domain_disks = match vmm.monitor {
            Some(Monitor::Libvirt { .. }) => Some(read_domain_disks(qmp, Description::Running)?),
            _ => None,
        };
        if let Some(directory) = graph.files().find_map(libvirt::directory_of_overlay) {
            return Err(OverlayDisksError::OnOldOverlays { directory: directory.to_owned() });
        }
        let mut disks = Vec::new();
        for device in graph.devices() {
            let chain = graph.chain_of(device)?;
            if !chain.overlays.is_empty() {
                return Err(OverlayDisksError::Unrecorded);
            }
            let node = graph.node(&chain.base)?;
            if !node.read_only && !is_flash(qmp, device)? {
                let number = disks.len() as u16;
                let unsuitable = |why: String| OverlayDisksError::Unsuitable { device: device.into(), why };
                let image = usable_image(vmm, machine, &chain, node).map_err(unsuitable)?;
                let directory = directory_of(&image, parent, vm, number).map_err(unsuitable)?;
                let target = domain_disks.as_ref().map(|disks| fenced_target(vmm, disks, device, &image));
                let target = target.transpose().map_err(unsuitable)?;
                let (drive, bytes) = (chain.base.clone(), node.size);
                let block_device = DeviceIdentity::of(&image)?;
                if block_device.is_some() {
                    device::check_unused(&image)?;
                }
                let device = device.into();
                disks.push(RecordedDisk { device, drive, number, image, directory, bytes, target, block_device });
            }
        }
        Ok(Self { disks })
    }
}

/// Returns the image of a disk, or why no overlay can be put on it.
fn usable_image(
    vmm: &Vmm,
    machine: &ForeignMachine,
    chain: &OverlayChain,
    node: &BlockNode,
) -> Result<PathBuf, String> {
    machine.check_overlay(&chain.base)?;
    if !FORMATS.contains(&node.driver.as_str()) {
        return Err(format!("its format is {}; only raw and qcow2 are supported", node.driver));
    }
    let image = PathBuf::from(&node.file);
    if !image.is_absolute() {
        return Err(format!(
            "its image {} is no local file with an absolute path. Nothing keeps other programs from writing to a disk that \
             QEMU reaches by a network, and nothing shows after a failure whether one has. Give the domain a block device \
             instead, by a network client of the kernel (such as rbd, iSCSI, NVMe or nbd), or use another --disk policy",
            node.file
        ));
    }
    if !has_open(vmm.pid, &image).map_err(|e| format!("{}: {e}", image.display()))? {
        return Err(format!("{} is not the file that QEMU has open under this name", image.display()));
    }
    Ok(image)
}

/// Returns libvirt's name of a disk, or why its image cannot be fenced.
fn fenced_target(vmm: &Vmm, disks: &[DomainDisk], device: &str, image: &Path) -> Result<String, String> {
    let target = libvirt::target_of(disks, device).ok_or("libvirt has no disk for this device")?;
    let kind = fs::metadata(image).map(|metadata| metadata.file_type());
    if kind.as_ref().is_ok_and(FileTypeExt::is_block_device) {
        match fence::has_own_node(image, vmm.pid) {
            Ok(true) => {}
            Ok(false) => {
                return Err(format!(
                    "its QEMU shares the node of the block device {} with the host, so no permission of the node keeps it from \
                     merging; leave `namespaces` in qemu.conf at its default",
                    image.display()
                ));
            }
            Err(e) => return Err(format!("cannot read the node of {} in its QEMU: {e}", image.display())),
        }
    } else if !kind.is_ok_and(|kind| kind.is_file()) {
        return Err(format!("{} is no regular file and no block device", image.display()));
    }
    if disks.iter().any(|disk| disk.target == target && disk.files.first().map(Path::new) != Some(image)) {
        return Err(format!("libvirt has another file than {} for it", image.display()));
    }
    match fence::is_ignored_by(vmm.pid) {
        Ok(false) => Ok(target),
        Ok(true) => Err("its QEMU may write files without write permission (CAP_DAC_OVERRIDE); leave \
                         clear_emulator_capabilities in qemu.conf at its default"
            .into()),
        Err(e) => Err(format!("cannot read the capabilities of its QEMU: {e}")),
    }
}

fn directory_of(image: &Path, parent: Option<&Path>, vm: Uuid, number: u16) -> Result<PathBuf, String> {
    if let Some(parent) = parent {
        let parent = parent.canonicalize().map_err(|e| format!("{}: {e}", parent.display()))?;
        return Ok(parent.join(format!("{vm}-{number}")));
    }
    let kind = fs::metadata(image).map_err(|e| format!("{}: {e}", image.display()))?.file_type();
    if kind.is_block_device() {
        return Err(
            "it is a block device, and a directory for its overlays is not named (protect --overlay-dir DIR)".into()
        );
    }
    Ok(directory_next_to(image))
}

/// Returns the directory next to an image that has its overlays.
pub(super) fn directory_next_to(image: &Path) -> PathBuf {
    let mut directory = image.to_owned().into_os_string();
    directory.push(OVERLAY_DIRECTORY_SUFFIX);
    directory.into()
}
