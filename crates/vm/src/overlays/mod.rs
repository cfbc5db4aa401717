//! The disks of a VM that its QEMU itself serves, at the moments of its checkpoints.
//!
//! At each checkpoint QEMU puts a new *overlay* on each disk, a qcow2 file that receives all further writes, so the
//! disk below keeps the content of that moment. The time between two checkpoints is an *epoch*, and the overlays are
//! numbered by it. Once a checkpoint is committed, QEMU merges the overlays that belong to it into the image. This
//! module drives `rekindle_disk::overlay`, which decides and records, and `rekindle_qemu::block`, which asks QEMU:
//!
//! ```text
//! prepare ──> put_early ──> mark ──> seal ──> (the store's commit) ──> note_commit ──> (merge, in the background) ──> ...
//!            (runs)      (stopped)  (runs)                              (runs)
//! ```
//!
//! libvirt takes some 10 ms to put an overlay on a disk, which is too long for a pause. So it does that before: `put_early`.
//! In the pause the overlay has what the guest has written in between, and is copied: the *head* of the checkpoint's disk.
//! A restore puts a copy of the head on the disk, in place of an empty overlay.
//!
//! As long as an overlay of libvirt's is small, the next checkpoints copy it, too, and no further one is put: a disk that the
//! guest hardly writes costs neither calls nor merges. An overlay that was put for a checkpoint that was not committed is
//! used for the next one in the same way, if the disk has too many.
//!
//! A process may be killed at any point. The next one calls [`OverlayDisks::adopt`] before it resumes the guest.
//!
//! | module | contents |
//! |---|---|
//! | `record` | which disk has its overlays where: a file in the run directory |
//! | `disk` | the steps of one disk |
//! | `device` | identifies a block device |
//! | `libvirt` | the steps that differ for a disk of a libvirt domain |
//! | `apparmor` | lets a confined QEMU write to the files into which it merges |
//! | `fence` | keeps users of libvirt from merging into the files below the newest overlay |
//! | `exposure` | notices that they have merged while the fence was open for a merge of ours |
//! | `head` | copies an overlay in the pause |
//! | `restore` | the disks of a checkpoint |
//! | `offline` | merges overlays while no QEMU uses them |
//! | `view` | what QEMU and libvirt have, read no more often than it changes |

#![allow(missing_docs, reason = "comments only where a name is not enough")]

mod apparmor;
mod device;
mod disk;
mod exposure;
mod fence;
mod head;
mod libvirt;
mod offline;
mod record;
mod restore;
mod view;

pub use offline::OfflineOverlays;
pub(crate) use restore::remove_fresh;
pub use restore::{RestoredOverlays, SourceQemu, fence_discarded};

use crate::fault;
use crate::rundir::{RunDir, ignore_missing};
use device::DeviceIdentity;
use disk::OverlayDisk;
use record::{OverlayRecord, owner_of};
use rekindle_disk::keeper::EpochId;
use rekindle_disk::overlay::OverlayError;
use rekindle_disk::overlay::directory::{OverlayDirectory, OverlayHead};
use rekindle_disk::overlay::plan::MarkObstacle;
use rekindle_disk::redo::files::LocalFiles;
use rekindle_kernel::surroundings::EnvironmentError;
use rekindle_qemu::block::BlockError;
use rekindle_qemu::block::graph::{BlockGraph, CacheMode};
use rekindle_qemu::block::libvirt::LibvirtMark;
use rekindle_qemu::block::migration;
use rekindle_qemu::block::names::OverlayName;
use rekindle_qemu::block::overlay::{self, Mark};
use rekindle_qemu::command::ForeignMachine;
use rekindle_qemu::guest;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::stopped::Stopped;
use rekindle_qemu::vmm::Vmm;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use uuid::Uuid;
use view::{Description, DiskView};

/// Space that must be free for overlays at each checkpoint. A guest that fills it before the next one is stopped by
/// QEMU until there is room.
pub const MIN_FREE_BYTES: u64 = 128 << 20;

/// Why the disks cannot take part in a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum OverlayDisksError {
    #[error(transparent)]
    Block(#[from] BlockError),
    #[error(transparent)]
    Directory(#[from] OverlayError),
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error("{}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{device}: no overlay can be put on its disk: {why}")]
    Unsuitable { device: String, why: String },
    #[error(
        "overlays {}: they belong to another QEMU, and {device} was given {} alone, which is an older disk; end this \
         QEMU, and restore the guest, or copy its newest disk from the newest overlay (docs/protect-attached.md)",
        directory.display(), image.display()
    )]
    OtherQemu { device: String, directory: PathBuf, image: PathBuf },
    #[error("{device} is on node {actual} and not above {expected}: another program has changed the disk")]
    Changed { device: String, expected: String, actual: String },
    #[error("QEMU has overlays of Rekindle, but the VM's run directory does not record where their files are")]
    Unrecorded,
    #[error("block job {id} of another program uses QEMU's disks; no checkpoint is taken until it has ended")]
    ForeignJob { id: String },
    #[error(
        "block job {id} merges the disk, and may be another program's; no checkpoint is taken until it has ended, and then \
         earlier ones have lost their disk"
    )]
    UnresolvedMerge { id: String },
    #[error("{device}: {obstacle}")]
    NotReady {
        device: String,
        #[source]
        obstacle: MarkObstacle,
    },
    #[error(
        "overlays {}: less than {} MiB are free on their file system, and a guest whose overlay is full is stopped",
        directory.display(), MIN_FREE_BYTES >> 20
    )]
    NoSpace { directory: PathBuf },
    #[error("QEMU process {pid} still runs the guest on the overlays {}", directory.display())]
    InUse { pid: u32, directory: PathBuf },
    #[error(
        "{target}: {file} is above its overlays, a snapshot of another program; no checkpoint is taken until it is merged: \
         virsh blockcommit DOMAIN {target} --base {} --active --pivot", below.display()
    )]
    ForeignSnapshot { target: String, file: String, below: PathBuf },
    #[error("{target}: libvirt's record and QEMU differ about {file}; no checkpoint is taken meanwhile")]
    LibvirtDisagrees { target: String, file: String },
    #[error(
        "{device}: another program may have merged newer writes into {} or into an older overlay, for example \
         virsh blockcommit, so earlier checkpoints have lost their disk; the next checkpoint has one", image.display()
    )]
    Interference { device: String, image: PathBuf },
    #[error(
        "{device}: another program, for example virsh blockcommit, has merged its overlays into {}, so no earlier \
         checkpoint has its disk any more; if protection has ended, run: rekindle detach, attach, protect", file.display()
    )]
    MergedByOthers { device: String, file: PathBuf },
    #[error(
        "{device}: a merge by another program, for example virsh blockcommit --active, was ended without a pivot, and QEMU has \
         left {} writable below its overlays; use rekindle detach, attach and protect", image.display()
    )]
    LeftWritable { device: String, image: PathBuf },
    #[error(
        "{}: another program, for example virsh blockcommit, may have merged newer writes into it or into an overlay, so this \
         checkpoint has lost its disk. Restore a later checkpoint, or boot the newest disk: virsh start \
         (docs/protect-attached.md)", image.display()
    )]
    ChangedByOthers { image: PathBuf },
    #[error(
        "{}: other programs could merge newer writes into it when Rekindle was killed, so one may have changed it since the \
         checkpoint. If no other program has merged: rm {}, and repeat this", image.display(), exposed.display()
    )]
    Exposed { image: PathBuf, exposed: PathBuf },
    #[error("cannot read libvirt's description of the domain: {problem}")]
    DomainXml { problem: String },
    #[error(
        "its disk is on overlays of an earlier `rekindle protect`, in {}: merge them first \
         (docs/protect-attached.md, A domain that libvirt has started again)",
        directory.display()
    )]
    OnOldOverlays { directory: PathBuf },
    #[error(
        "{} has write permission, so another program may have changed it since the checkpoint. If no program has written to it: \
         chmod a-w {}, and repeat this", file.display(), file.display()
    )]
    FenceOpen { file: PathBuf },
    #[error(
        "{} is writable, so another program may have changed it since the checkpoint; this is so after a start of this host, \
         on another host, and if Rekindle was killed in a merge. If no program has written to it: blockdev --setro {}, and \
         repeat this", device.display(), device.display()
    )]
    DeviceFenceOpen { device: PathBuf },
    #[error(
        "{} is another block device than at the checkpoint: it is {actual}, and was {expected}; make {} refer to that device \
         again, and repeat this", image.display(), image.display()
    )]
    OtherDevice { image: PathBuf, expected: String, actual: String },
    #[error(
        "{} is in use by this host: unmount it, or remove the device that uses it (see `lsblk {}`)",
        device.display(), device.display()
    )]
    DeviceInUse { device: PathBuf },
    #[error("a QEMU writes to {}: libvirt has started the domain again; end it first", file.display())]
    DomainRuns { file: PathBuf },
    #[error(
        "overlays {}: it is not certain which one is the newest ({why}), so they are not merged: merge them by hand \
         (docs/protect-attached.md, Copying the newest disk)", directory.display()
    )]
    NewestUncertain { directory: PathBuf, why: &'static str },
    #[error(
        "the domain's definition has the disk on overlay {}, which does not exist any more: another node has merged it into \
         the image. Put the definition on the image: virsh edit", file.display()
    )]
    OverlayGone { file: PathBuf },
    #[error("cannot make or merge an overlay: qemu-img {why}")]
    QemuImg { why: String },
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    #[error(
        "{}: {why}; AppArmor 4.1 or newer is required, whose rules have priorities, or a domain without AppArmor \
         (docs/protect-attached.md)", profile.display()
    )]
    AppArmor { profile: PathBuf, why: String },
    #[error("AppArmor's profile {} cannot be changed: {why}", profile.display())]
    Profile { profile: PathBuf, why: String },
}

impl OverlayDisksError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    /// Returns whether only another program's work on the disks is in the way, such as a snapshot or a block job. A later
    /// attempt may succeed.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::NotReady { .. }
                | Self::ForeignJob { .. }
                | Self::UnresolvedMerge { .. }
                | Self::ForeignSnapshot { .. }
                | Self::Interference { .. }
                | Self::LibvirtDisagrees { .. }
                | Self::Block(BlockError::LibvirtRejected { .. } | BlockError::JobTimeout { .. })
        )
    }
}

/// The disk of a device at a checkpoint: what a restore must open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverlayEpoch {
    /// QEMU's path of the device.
    pub device: String,
    /// The name of the image's node, which the device's `drive` names.
    pub drive: String,
    /// The number of the disk in the names of its nodes.
    pub number: u16,
    pub image: PathBuf,
    /// QEMU's format driver of the image.
    pub format: String,
    pub directory: PathBuf,
    /// Length of the disk.
    pub bytes: u64,
    pub cache: CacheMode,
    pub detect_zeroes: String,
    /// libvirt's name of the disk, if a domain has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Set if the image is a block device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) block_device: Option<DeviceIdentity>,
    /// Whether the directory has a head for the checkpoint.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_head: bool,
    /// Which head of the epoch.
    #[serde(default)]
    pub head_number: u64,
    #[serde(flatten)]
    pub id: EpochId,
}

impl OverlayEpoch {
    fn head(&self) -> Option<OverlayHead> {
        self.has_head.then_some(OverlayHead { epoch: self.id.epoch, number: self.head_number })
    }

    /// Returns which file of the disk this host does not have, or has another one of. The disk may be in use.
    #[must_use]
    pub fn missing(&self) -> Option<String> {
        if !self.image.exists() {
            return Some(format!("the file {}", self.image.display()));
        }
        let found = OverlayDirectory::peek(&LocalFiles::new(&self.directory, false));
        let is_here = found.is_ok_and(|state| state.is_some_and(|state| state.disk == self.id.disk));
        (!is_here).then(|| format!("the overlays of this disk in {}", self.directory.display()))
    }
}

/// The disks of a running VM that take part in checkpoints by overlays.
#[derive(Debug)]
pub struct OverlayDisks {
    vmm: Vmm,
    disks: Vec<OverlayDisk>,
    /// libvirt's names of the domain's other disks.
    others: Vec<String>,
}

impl OverlayDisks {
    /// Takes over the overlays that an earlier process has put on the disks of `vmm`; `None` if there are none. Completes
    /// an end that was interrupted, so it must precede the resume of a guest that such a process has stopped.
    ///
    /// # Errors
    /// [`OverlayDisksError::OtherQemu`] if the disks are older than the overlays.
    pub fn adopt(qmp: &mut Qmp, rundir: &RunDir, vmm: &Vmm) -> Result<Option<Self>, OverlayDisksError> {
        let Some(record) = OverlayRecord::read(rundir)? else {
            return if BlockGraph::read(qmp)?.has_overlays() { Err(OverlayDisksError::Unrecorded) } else { Ok(None) };
        };
        let mut disks = Vec::new();
        let mut view = DiskView::new(qmp);
        for recorded in record.disks.clone() {
            disks.extend(OverlayDisk::adopt(&mut view, recorded, vmm)?);
        }
        if disks.is_empty() {
            migration::permit(qmp)?;
            apparmor::forbid_merges(vmm);
            return Ok(None);
        }
        // A guest that an earlier process has stopped must not stay so for this.
        if let Err(e) = apparmor::allow_merges(vmm, &record) {
            tracing::warn!(error = %e, "AppArmor may deny merges of the disks' overlays");
        }
        Ok(Some(Self { vmm: vmm.clone(), disks, others: Vec::new() }))
    }

    /// As [`OverlayDisks::adopt`], and begins overlays for all writable disks that have none. Directories are made next
    /// to the images, or in `parent`.
    ///
    /// # Errors
    /// [`OverlayDisksError::Unsuitable`] names the first disk that cannot have overlays.
    pub fn begin(
        qmp: &mut Qmp,
        rundir: &RunDir,
        vmm: &Vmm,
        machine: &ForeignMachine,
        vm: Uuid,
        parent: Option<&Path>,
    ) -> Result<Self, OverlayDisksError> {
        let adopted = Self::adopt(qmp, rundir, vmm)?;
        let record = match (&adopted, OverlayRecord::read(rundir)?) {
            (Some(_), Some(record)) => {
                apparmor::allow_merges(vmm, &record)?;
                record
            }
            _ => {
                let record = OverlayRecord::plan(qmp, vmm, machine, vm, parent)?;
                apparmor::allow_merges(vmm, &record)?;
                record.write(rundir)?;
                fault::point("overlay.begin.recorded", Some(vmm), None);
                record
            }
        };
        // On its images alone, a guest that another program migrates or saves would have older disks than its memory.
        migration::forbid(qmp)?;
        let mut disks = adopted.map(|adopted| adopted.disks).unwrap_or_default();
        for recorded in record.disks {
            if !disks.iter().any(|disk| disk.number() == recorded.number) {
                disks.push(OverlayDisk::begin(recorded, vmm)?);
            }
        }
        Ok(Self { vmm: vmm.clone(), disks, others: Vec::new() })
    }

    /// Notes the disks of the newest checkpoint in the store, whose overlays may be merged. This process owns the store, so
    /// no earlier attempt can be committed any more.
    pub fn note_committed(&mut self, committed: &[OverlayEpoch]) {
        for disk in &mut self.disks {
            disk.note_committed(committed);
        }
    }

    /// Takes the steps after which [`OverlayDisks::mark`] can put the next overlay on all disks. Waits for a merge,
    /// or cancels it, because QEMU rejects a mark meanwhile.
    ///
    /// # Errors
    /// Nothing is marked then; a later attempt may succeed. [`OverlayDisksError::NoSpace`]: [`OverlayDisks::end`] lets
    /// the guest continue without overlays.
    pub fn prepare(&mut self, qmp: &mut Qmp) -> Result<(), OverlayDisksError> {
        let mut view = DiskView::new(qmp);
        self.disks.iter_mut().try_for_each(|disk| disk.prepare(&mut view))?;
        let own: Vec<&str> = self.disks.iter().filter_map(OverlayDisk::target).collect();
        if !own.is_empty() {
            let disks = view.domain_disks(Description::Running)?;
            let targets = disks.iter().map(|disk| disk.target.clone());
            self.others = targets.filter(|target| !own.contains(&target.as_str())).collect();
        }
        match view.graph()?.foreign_jobs().next() {
            Some(job) => Err(OverlayDisksError::ForeignJob { id: job.id.clone() }),
            None => Ok(()),
        }
    }

    /// Returns whether [`OverlayDisks::put_early`] puts overlays on the disks.
    #[must_use]
    pub fn are_put_early(&self) -> bool {
        self.disks.iter().any(|disk| disk.target().is_some())
    }

    /// Lets libvirt put the next overlay on each disk of a domain that does not keep its overlay. Does nothing for a guest that
    /// is no domain of libvirt. The guest should run: without a pause after it, the overlay has no checkpoint.
    ///
    /// # Errors
    /// If libvirt rejects it. If its answer was lost, [`OverlayDisks::prepare`] finds out. A snapshot that a user has taken
    /// since [`OverlayDisks::prepare`] is below the overlay now: [`OverlayDisks::check_marked`] fails.
    pub fn put_early(&mut self, qmp: &mut Qmp) -> Result<(), OverlayDisksError> {
        self.pass("overlay.mark.chosen");
        self.disks.iter_mut().try_for_each(OverlayDisk::reconsider_kept)?;
        let not_put: Vec<&OverlayDisk> = self.disks.iter().filter(|disk| disk.is_to_be_put_early()).collect();
        if not_put.is_empty() {
            return Ok(());
        }
        let marks: Option<Vec<LibvirtMark<'_>>> = not_put.iter().map(|disk| disk.next_libvirt_mark()).collect();
        let marks = marks.ok_or_else(not_prepared)?;
        let put: Vec<&str> = not_put.iter().filter_map(|disk| disk.target()).collect();
        let own = self.disks.iter().filter_map(OverlayDisk::target).filter(|target| !put.contains(target));
        let others: Vec<String> = own.map(str::to_owned).chain(self.others.iter().cloned()).collect();
        self.pass("overlay.mark.prepared");
        not_put.iter().try_for_each(|disk| disk.fence_top())?;
        self.pass("overlay.mark.fenced");
        let put = rekindle_qemu::block::libvirt::mark(qmp, &marks, &others);
        self.pass("overlay.mark.marked");
        self.disks.iter_mut().for_each(|disk| disk.note_put_early(put.is_ok()));
        Ok(put?)
    }

    /// Ends the current epoch of all disks, or of none.
    ///
    /// # Errors
    /// If QEMU rejects it. If its answer was lost, [`OverlayDisks::prepare`] finds out.
    pub fn mark(&mut self, stopped: &mut Stopped<'_>) -> Result<Vec<OverlayEpoch>, OverlayDisksError> {
        if !self.disks.iter().all(OverlayDisk::is_prepared) {
            return Err(not_prepared());
        }
        self.disks.iter_mut().try_for_each(|disk| disk.copy_head(stopped))?;
        self.pass("overlay.mark.copied");
        let marks: Vec<Mark<'_>> = self.disks.iter().filter_map(OverlayDisk::next_mark).collect();
        if !marks.is_empty() {
            self.pass("overlay.mark.prepared");
            overlay::mark(stopped, &marks)?;
            self.pass("overlay.mark.marked");
        }
        Ok(self.disks.iter_mut().filter_map(OverlayDisk::note_mark).collect())
    }

    /// Checks that no other program has changed the disks since [`OverlayDisks::prepare`]. Must follow the pause directly:
    /// a user's snapshot leaves no trace once it is merged.
    ///
    /// # Errors
    /// The marked disks are not those of the checkpoint.
    pub fn check_marked(&self, qmp: &mut Qmp, marked: &[OverlayEpoch]) -> Result<(), OverlayDisksError> {
        let mut view = DiskView::new(qmp);
        self.disks.iter().try_for_each(|disk| disk.check_marked(&mut view, marked))
    }

    /// Makes the marked disks durable. Must precede the store's commit.
    ///
    /// # Errors
    /// If a sync fails; then no later one succeeds, either.
    pub fn seal(&mut self, marked: &[OverlayEpoch]) -> Result<(), OverlayDisksError> {
        self.disks.iter_mut().try_for_each(|disk| disk.seal(marked))
    }

    /// Notes the commit of the checkpoint with these disks, and starts to merge their overlays so that the merge ends
    /// within `interval`. A failure only delays the merge.
    pub fn note_commit(&mut self, qmp: &mut Qmp, marked: &[OverlayEpoch], interval: Duration) {
        self.note_committed(marked);
        let mut view = DiskView::new(qmp);
        for disk in &mut self.disks {
            let advanced = disk.advance(&mut view);
            disk.warn_if_late(advanced);
        }
        for disk in &mut self.disks {
            let started = disk.start_due_merge(&mut view, interval);
            disk.warn_if_late(started);
        }
        // One view shows which merges have ended already.
        for disk in &mut self.disks {
            let advanced = disk.advance(&mut view);
            disk.warn_if_late(advanced);
        }
    }

    /// Fences the block devices of a libvirt domain, because this process takes no further checkpoint. A failure leaves one
    /// writable, and a restore then asks the user.
    pub fn settle(&mut self, qmp: &mut Qmp) {
        let mut view = DiskView::new(qmp);
        for disk in &self.disks {
            if let Err(e) = disk.settle(&mut view) {
                tracing::warn!(
                    device = disk.device(),
                    error = %e,
                    "a block device below overlays stays writable; if no program has written to it, make it read-only before a \
                     restore (blockdev --setro)"
                );
            }
        }
    }

    /// Returns whether there is too little room for overlays.
    #[must_use]
    pub fn is_without_space(&self) -> bool {
        self.disks.iter().any(|disk| disk.check_space().is_err())
    }

    /// Merges all overlays into their images and removes them: the devices are on their images as before. The guest runs
    /// meanwhile, except for the last part. No checkpoint has its disks after this. The caller holds the VM's run state.
    ///
    /// # Errors
    /// [`BlockError::EndUnknown`] or [`OverlayDisksError::Directory`]: the guest stays stopped until this is repeated by
    /// [`OverlayDisks::adopt`]. Otherwise it runs on, and the disks that were not ended stay on their overlays.
    pub fn end(mut self, qmp: &mut Qmp, rundir: &RunDir) -> Result<(), OverlayDisksError> {
        let mut view = DiskView::new(qmp);
        self.disks.iter_mut().try_for_each(|disk| disk.prepare_end(&mut view))?;
        let state = guest::run_state(qmp)?;
        let mark = rundir.paused();
        if state == "running" {
            fs::write(&mark, []).map_err(OverlayDisksError::io(&mark))?;
            guest::stop(qmp)?;
        }
        self.pass("overlay.end.stopped");
        let vmm = self.vmm.clone();
        let ended = self.end_stopped(qmp);
        let must_stay_stopped = matches!(
            ended,
            Err(OverlayDisksError::Block(BlockError::EndUnknown { .. })
                | OverlayDisksError::Directory(_)
                | OverlayDisksError::LibvirtDisagrees { .. }
                | OverlayDisksError::Io { .. })
        );
        // QEMU has stopped a guest whose overlay was full.
        if !must_stay_stopped && (state == "running" || (state == "io-error" && ended.is_ok())) {
            guest::resume(qmp)?;
            ignore_missing(fs::remove_file(&mark)).map_err(OverlayDisksError::io(&mark))?;
        }
        ended?;
        migration::permit(qmp)?;
        apparmor::forbid_merges(&vmm);
        OverlayRecord::remove(rundir)
    }

    /// Passes a fault point.
    fn pass(&self, point: &'static str) {
        if let Some(disk) = self.disks.first() {
            disk.pass(point);
        }
    }

    fn end_stopped(self, qmp: &mut Qmp) -> Result<(), OverlayDisksError> {
        for disk in self.disks {
            let mut stopped = Stopped::check(qmp).map_err(BlockError::from)?;
            disk.end(&mut stopped)?;
            disk.finish_end(&mut DiskView::new(qmp))?;
        }
        Ok(())
    }
}

fn not_prepared() -> OverlayDisksError {
    OverlayDisksError::NotReady { device: "a disk".into(), obstacle: MarkObstacle::NotPrepared }
}

/// Returns the overlay of disk `number` for `epoch`.
fn overlay_name(number: u16, epoch: u64) -> OverlayName {
    OverlayName { disk: number, epoch }
}
