//! The disks of a checkpoint: base and overlays as at its moment, and a fresh overlay for what the restored guest writes,
//! which starts as a copy of the checkpoint's head if there is one.
//!
//! ```text
//! open (claims, checks) ──> create (the fresh overlays) ──> (QEMU starts, loads) ──> note_resume ──> the guest runs
//!                                └── a failure: dropped; the fresh files are removed, nothing else has changed
//! ```
//!
//! `fresh-overlays.json` in the run directory names the fresh files before they are made, until the guest is about to
//! run. So the recovery of a restore that was killed removes them, too.
//!
//! The files of the checkpoint are not written, so a restore can be repeated until the restored guest's first
//! checkpoint is committed.

use super::head::copy_data;
use super::record::{OverlayRecord, RecordedDisk, owner_of, running_owner};
use super::{OverlayDisksError, OverlayEpoch, device, fence, overlay_name};
use crate::fault;
use crate::rundir::{RunDir, ignore_missing, write_json};
use rekindle_disk::overlay::OverlayError;
use rekindle_disk::overlay::directory::{OverlayDirectory, epoch_of_file};
use rekindle_disk::overlay::state::{OverlayFence, OverlayState};
use rekindle_disk::redo::files::LocalFiles;
use rekindle_kernel::file::is_locked;
use rekindle_libvirt::disks::DomainDisk;
use rekindle_qemu::block::graph::BlockGraph;
use rekindle_qemu::block::overlay::CLUSTER_BYTES;
use rekindle_qemu::command::{DiskOverlays, OverlayFile};
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::Vmm;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use uuid::Uuid;

/// The QEMU that has written the checkpoint's disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceQemu {
    /// It must have ended.
    Ended,
    /// In a move, it keeps the stopped guest and its disks open until the guest runs here. It never writes to a file of the
    /// checkpoint, only to the overlay of which the checkpoint has a copy.
    Stopped,
}

/// The claimed disks of a checkpoint. On drop, the fresh overlays are removed, unless the guest may run on them.
#[derive(Debug)]
pub struct RestoredOverlays {
    disks: Vec<RestoredDisk>,
}

#[derive(Debug)]
struct RestoredDisk {
    at: OverlayEpoch,
    directory: OverlayDirectory<LocalFiles>,
    /// The epochs whose overlays make the checkpoint's disk, oldest first.
    below: Vec<u64>,
    /// The epoch that the restored guest writes to.
    fresh: u64,
    is_fresh_needed: bool,
    /// libvirt's name of the disk, if libvirt gets the guest.
    target: Option<String>,
}

impl RestoredOverlays {
    /// Claims the disks of a checkpoint and checks that they are still there. Changes nothing.
    ///
    /// # Errors
    /// [`OverlayDisksError`] names the disk that is missing, newer than the checkpoint, or in use.
    pub fn open(epochs: &[OverlayEpoch], source: SourceQemu) -> Result<Self, OverlayDisksError> {
        let disks = epochs.iter().map(|at| RestoredDisk::open(at, source)).collect::<Result<_, _>>()?;
        Ok(Self { disks })
    }

    /// Returns the overlays that the destination QEMU must open.
    #[must_use]
    pub fn for_qemu(&self) -> Vec<DiskOverlays> {
        self.disks.iter().map(RestoredDisk::for_qemu).collect()
    }

    /// Notes that libvirt gets the guest. Returns the file of each disk, by libvirt's name of it.
    ///
    /// # Errors
    /// [`OverlayDisksError::DomainXml`] if `disks`, those of the domain, do not include one.
    pub fn give_to_libvirt(&mut self, disks: &[DomainDisk]) -> Result<BTreeMap<String, PathBuf>, OverlayDisksError> {
        let mut files = BTreeMap::new();
        for disk in &mut self.disks {
            let problem = || format!("it has no disk for QEMU's device {}", disk.at.device);
            // A checkpoint of a QEMU of Rekindle's own has no name of the disk.
            let is_this = |of_domain: &&DomainDisk| match &disk.at.target {
                Some(target) => of_domain.target == *target,
                None => of_domain.files.first().map(Path::new) == Some(&disk.at.image),
            };
            let found = disks.iter().find(is_this).map(|of_domain| of_domain.target.clone());
            let target = found.ok_or_else(|| OverlayDisksError::DomainXml { problem: problem() })?;
            files.insert(target.clone(), disk.directory.path_of(disk.fresh));
            disk.target = Some(target);
        }
        Ok(files)
    }

    /// Makes the fresh overlays durably, with the `qemu-img` of this QEMU.
    ///
    /// # Errors
    /// If a file cannot be made.
    pub fn create(&mut self, rundir: &RunDir, qemu: &Path) -> Result<(), OverlayDisksError> {
        if self.disks.is_empty() {
            return Ok(());
        }
        self.name_fresh(rundir, None)?;
        let qemu_img = qemu_img_of(qemu);
        self.disks.iter_mut().try_for_each(|disk| disk.create(&qemu_img))
    }

    /// Finds the disks in the QEMU that libvirt has started, in which nodes have other names than in the checkpoint.
    ///
    /// # Errors
    /// [`OverlayDisksError::Changed`] if a disk is not on exactly the overlays of the checkpoint and the fresh one.
    pub fn locate(&mut self, qmp: &mut Qmp, vmm: &Vmm) -> Result<(), OverlayDisksError> {
        if self.disks.is_empty() {
            return Ok(());
        }
        let graph = BlockGraph::read(qmp)?;
        self.disks.iter_mut().try_for_each(|disk| disk.locate(&graph, vmm))
    }

    /// Records that the guest runs on its fresh overlays, in `vmm`. All epochs after the checkpoint are dead from here
    /// on. Must precede the resume.
    ///
    /// # Errors
    /// If a record cannot be written; then the guest must not run.
    pub fn note_resume(&mut self, rundir: &RunDir, vmm: &Vmm) -> Result<(), OverlayDisksError> {
        if self.disks.is_empty() {
            return Ok(());
        }
        OverlayRecord { disks: self.disks.iter().map(RestoredDisk::recorded).collect() }.write(rundir)?;
        let owner = owner_of(vmm)?;
        self.name_fresh(rundir, Some(&owner))?;
        for disk in &mut self.disks {
            disk.is_fresh_needed = true;
            let (epoch, fresh) = (disk.at.id.epoch, disk.fresh);
            disk.directory.record(|state| {
                state.restart_at(epoch, fresh, owner.clone());
                // libvirt's users could merge into what the checkpoint needs.
                let is_in_force = disk.target.is_some();
                state.fence = state.fence.map(|fence| OverlayFence { is_in_force, ..fence });
            })?;
            // libvirt must not start the domain on a discarded overlay.
            if let Some(OverlayFence { image_mode, .. }) = disk.directory.state().fence {
                let discarded = disk.directory.epochs()?.into_iter().filter(|found| *found > epoch && *found != fresh);
                for epoch in discarded {
                    fence::close(&disk.directory.path_of(epoch))?;
                }
                // The QEMU of Rekindle's own merges into the image.
                if disk.target.is_none() {
                    fence::remove_from_image(&disk.at.image, image_mode)?;
                }
            }
        }
        fault::point("overlay.restore.recorded", None, Some(vmm));
        let path = fresh_path(rundir);
        ignore_missing(fs::remove_file(&path)).map_err(OverlayDisksError::io(&path))
    }

    /// Records which files are fresh. `owner`: the QEMU that the overlays are about to be for.
    fn name_fresh(&self, rundir: &RunDir, owner: Option<&str>) -> Result<(), OverlayDisksError> {
        let fresh: Vec<FreshOverlay> = self.disks.iter().map(|disk| disk.fresh(owner)).collect();
        write_json(&fresh_path(rundir), &fresh).map_err(OverlayDisksError::io(&fresh_path(rundir)))
    }
}

/// Returns the `qemu-img` of a QEMU.
pub(super) fn qemu_img_of(qemu: &Path) -> PathBuf {
    let sibling = qemu.with_file_name("qemu-img");
    if sibling.exists() { sibling } else { PathBuf::from("qemu-img") }
}

/// Makes an empty overlay out of the file at `path`, for a disk of `bytes` bytes in the file `below`.
pub(super) fn write_header(
    qemu_img: &Path,
    path: &Path,
    below: &Path,
    format: &str,
    bytes: u64,
) -> Result<(), OverlayDisksError> {
    let mut command = Command::new(qemu_img);
    // `-u`: the disk below is not opened.
    let options = format!("lazy_refcounts=on,extended_l2=on,cluster_size={CLUSTER_BYTES}");
    command.args(["create", "-q", "-f", "qcow2", "-u", "-o", &options, "-F", format, "-b"]).arg(below);
    command.arg(path).arg(bytes.to_string());
    run(command)
}

/// Changes the name of the file below in the header of the overlay at `path`.
fn rename_below(qemu_img: &Path, path: &Path, below: &Path, format: &str) -> Result<(), OverlayDisksError> {
    let mut command = Command::new(qemu_img);
    // `-u`: the disk below is not opened.
    command.args(["rebase", "-u", "-f", "qcow2", "-F", format, "-b"]).arg(below).arg(path);
    run(command)
}

/// Runs `qemu-img`.
pub(super) fn run(command: Command) -> Result<(), OverlayDisksError> {
    output_of(command).map(drop)
}

/// Runs `qemu-img` and returns its output.
pub(super) fn output_of(mut command: Command) -> Result<Vec<u8>, OverlayDisksError> {
    command.stdin(Stdio::null());
    let failed = |why: String| OverlayDisksError::QemuImg { why };
    let output = command.output().map_err(|e| failed(format!("cannot be started: {e}")))?;
    if !output.status.success() {
        return Err(failed(format!("failed: {}", String::from_utf8_lossy(&output.stderr).trim())));
    }
    Ok(output.stdout)
}

/// Byte that QEMU locks in a file that it may write.
pub(super) const QEMU_WRITER_BYTE: u64 = 101;
/// Byte that QEMU locks in a file that it reads.
const QEMU_READER_BYTE: u64 = 100;

/// Checks that no program can have changed the files of a libvirt domain's checkpoint, and that no QEMU writes to a
/// newer overlay: libvirt may have started the domain again on its overlays.
fn check_fence(
    at: &OverlayEpoch,
    directory: &OverlayDirectory<LocalFiles>,
    below: &[u64],
    source: SourceQemu,
) -> Result<(), OverlayDisksError> {
    if fence::is_image_open(&at.image)? {
        let file = at.image.clone();
        return Err(match at.block_device {
            Some(_) => OverlayDisksError::DeviceFenceOpen { device: file },
            None => OverlayDisksError::FenceOpen { file },
        });
    }
    for file in below.iter().map(|epoch| directory.path_of(*epoch)) {
        if fence::is_open(&file)? {
            return Err(OverlayDisksError::FenceOpen { file });
        }
    }
    let copied_overlay = at.head().filter(|_| source == SourceQemu::Stopped).map(|head| head.epoch + 1);
    for epoch in directory.epochs()?.into_iter().filter(|epoch| Some(*epoch) != copied_overlay) {
        let path = directory.path_of(epoch);
        if is_locked_by_qemu(&path, QEMU_WRITER_BYTE)? {
            return Err(OverlayDisksError::DomainRuns { file: path });
        }
    }
    Ok(())
}

/// Keeps libvirt from starting a domain on the overlay at `path`, because another host has the guest. Does nothing if the path
/// is no overlay, or if a QEMU writes to the file.
///
/// # Errors
/// If the file's permissions cannot be changed.
pub fn fence_discarded(path: &Path) -> Result<(), OverlayDisksError> {
    let is_overlay = path.file_name().is_some_and(|name| epoch_of_file(&name.to_string_lossy()).is_some());
    if !is_overlay || !path.exists() || is_locked_by_qemu(path, QEMU_WRITER_BYTE)? {
        return Ok(());
    }
    fence::close(path)
}

fn is_locked_by_qemu(path: &Path, byte: u64) -> Result<bool, OverlayDisksError> {
    File::open(path).and_then(|file| is_locked(file, byte)).map_err(OverlayDisksError::io(path))
}

/// An overlay that was made for a restored guest which has not run yet.
#[derive(Debug, Serialize, Deserialize)]
struct FreshOverlay {
    directory: PathBuf,
    /// The disk's identity as long as it has overlays.
    disk: Uuid,
    epoch: u64,
    /// The overlays are for one of these until another restore resumes its guest, which may have a file of this epoch.
    owners: Vec<String>,
    /// The newest durable epoch. If it is another one now, the guest has continued in the source QEMU of a move, whose
    /// checkpoints may have a file of this epoch.
    #[serde(default)]
    sealed: Option<u64>,
}

fn fresh_path(rundir: &RunDir) -> PathBuf {
    rundir.file("fresh-overlays.json")
}

/// Removes the overlays of a restore that has ended before its guest could run. Its QEMU has ended.
pub(crate) fn remove_fresh(rundir: &RunDir) {
    let Ok(text) = fs::read(fresh_path(rundir)) else { return };
    let removed = serde_json::from_slice::<Vec<FreshOverlay>>(&text)
        .map_err(|e| OverlayDisksError::io(&fresh_path(rundir))(e.into()))
        .and_then(|overlays| overlays.iter().try_for_each(FreshOverlay::remove));
    // The next restore marks such a file as discarded, and the protector after it removes it.
    if let Err(e) = removed {
        tracing::warn!(error = &e as &dyn std::error::Error, "cannot remove an overlay that was made for a restore");
    }
}

impl FreshOverlay {
    fn remove(&self) -> Result<(), OverlayDisksError> {
        let directory = match OverlayDirectory::open(LocalFiles::new(&self.directory, false)) {
            // The restore itself removes it, or another one uses the disk.
            Err(OverlayError::InUse { .. }) => return Ok(()),
            opened => opened?,
        };
        let is_same = |state: &OverlayState| {
            let is_continued = self.sealed.is_some_and(|sealed| sealed != state.sealed);
            state.disk == self.disk && self.owners.contains(&state.owner) && !is_continued
        };
        let Some(directory) = directory.filter(|directory| is_same(directory.state())) else { return Ok(()) };
        if !directory.epochs()?.contains(&self.epoch) {
            return Ok(());
        }
        let path = directory.path_of(self.epoch);
        let is_of_source = is_locked_by_qemu(&path, QEMU_READER_BYTE)? || is_locked_by_qemu(&path, QEMU_WRITER_BYTE)?;
        if is_of_source { Ok(()) } else { Ok(directory.remove_overlay(self.epoch)?) }
    }
}

impl RestoredDisk {
    fn open(at: &OverlayEpoch, source: SourceQemu) -> Result<Self, OverlayDisksError> {
        let path = || at.directory.clone();
        let no_epoch = || OverlayError::NoEpoch { path: path(), epoch: at.id.epoch };
        let directory = OverlayDirectory::open(LocalFiles::new(&at.directory, false))?.ok_or_else(no_epoch)?;
        let state = directory.state();
        if state.disk != at.id.disk {
            return Err(no_epoch().into());
        }
        if source == SourceQemu::Ended
            && let Some(pid) = running_owner(&state.owner)?
        {
            return Err(OverlayDisksError::InUse { pid, directory: path() });
        }
        if state.is_changed_by_others(at.id.epoch) {
            return Err(OverlayDisksError::ChangedByOthers { image: at.image.clone() });
        }
        if directory.is_exposed()? {
            return Err(OverlayDisksError::Exposed { image: at.image.clone(), exposed: directory.exposed_path() });
        }
        let below = directory.overlays_of(at.id.epoch)?;
        device::check_same(&at.image, at.block_device.as_ref())?;
        if at.block_device.is_some() {
            device::check_unused(&at.image)?;
        }
        if state.fence.is_some_and(|fence| fence.is_in_force) {
            check_fence(at, &directory, &below, source)?;
        }
        if let Some(head) = at.head()
            && !directory.has_head(head)?
        {
            return Err(no_epoch().into());
        }
        let fresh = directory.unused_epoch()?;
        Ok(Self { at: at.clone(), directory, below, fresh, is_fresh_needed: false, target: None })
    }

    fn fresh(&self, owner: Option<&str>) -> FreshOverlay {
        let state = self.directory.state();
        let owners = [state.owner.as_str()].into_iter().chain(owner).map(str::to_owned).collect();
        let (directory, sealed) = (self.directory.path().to_owned(), Some(state.sealed));
        FreshOverlay { directory, disk: self.at.id.disk, epoch: self.fresh, owners, sealed }
    }

    fn for_qemu(&self) -> DiskOverlays {
        let file =
            |epoch: u64| OverlayFile { name: overlay_name(self.at.number, epoch), path: self.directory.path_of(epoch) };
        let OverlayEpoch { drive, cache, detect_zeroes, .. } = self.at.clone();
        let files = self.below.iter().copied().chain([self.fresh]).map(file).collect();
        DiskOverlays { drive, cache, detect_zeroes, files }
    }

    fn create(&mut self, qemu_img: &Path) -> Result<(), OverlayDisksError> {
        let path = self.directory.create_overlay(self.fresh)?;
        let (below, format) = match self.below.last() {
            Some(epoch) => (self.directory.path_of(*epoch), "qcow2"),
            None => (self.at.image.clone(), self.at.format.as_str()),
        };
        if let Some(head) = self.at.head() {
            let head = self.directory.head_path(head);
            let copied = File::open(&head).and_then(|head| copy_data(&head, &File::create(&path)?));
            copied.map_err(OverlayDisksError::io(&head))?;
            // What was below it may have been merged since.
            rename_below(qemu_img, &path, &below, format)?;
        } else {
            write_header(qemu_img, &path, &below, format, self.at.bytes)?;
        }
        Ok(self.directory.make_durable(self.fresh)?)
    }

    fn locate(&mut self, graph: &BlockGraph, vmm: &Vmm) -> Result<(), OverlayDisksError> {
        let Some(disk) = self.recorded().libvirt_disk(vmm) else { return Ok(()) };
        let chain = disk.chain(graph)?;
        let expected = self.for_qemu().files.into_iter().map(|file| file.name);
        if !chain.overlays.iter().copied().eq(expected) {
            let path = |epoch: u64| self.directory.path_of(epoch).to_string_lossy().into_owned();
            let actual = disk.top_file(&chain).to_string_lossy().into_owned();
            return Err(OverlayDisksError::Changed { device: chain.device, expected: path(self.fresh), actual });
        }
        self.at.drive = chain.base;
        Ok(())
    }

    fn recorded(&self) -> RecordedDisk {
        let OverlayEpoch { device, drive, number, image, bytes, block_device, .. } = self.at.clone();
        let directory = self.directory.path().to_owned();
        RecordedDisk { device, drive, number, image, directory, bytes, target: self.target.clone(), block_device }
    }
}

impl Drop for RestoredDisk {
    fn drop(&mut self) {
        if !self.is_fresh_needed
            && self.directory.path_of(self.fresh).exists()
            && let Err(e) = self.directory.remove_overlay(self.fresh)
        {
            tracing::warn!("cannot remove an overlay that was made for a restore: {e}");
        }
    }
}
