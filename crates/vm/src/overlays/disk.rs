//! The overlays of one disk: the steps of `rekindle_disk::overlay::plan`, taken in a running QEMU.
//!
//! | module | contents |
//! |---|---|
//! | `mark` | a checkpoint: an overlay is put, or the one that is there is copied |
//! | `steps` | between two checkpoints: overlays are made and merged |
//! | `end` | the device is put on its image again |

mod end;
mod mark;
mod steps;

use super::libvirt::{LATE_MERGE_TIMEOUT, LibvirtDisk};
use super::record::{RecordedDisk, running_owner};
use super::view::DiskView;
use super::{MIN_FREE_BYTES, OverlayDisksError, OverlayEpoch, device, fence, owner_of};
use crate::fault;
use rekindle_disk::overlay::directory::{OverlayDirectory, OverlayHead, epoch_of_file};
use rekindle_disk::overlay::plan::{FoundOverlays, MAX_OVERLAYS, MarkObstacle, OverlayStep};
use rekindle_disk::overlay::state::{OverlayFence, OverlayState};
use rekindle_disk::redo::files::LocalFiles;
use rekindle_qemu::block::graph::{BlockGraph, CacheMode, OverlayChain};
use rekindle_qemu::block::libvirt as libvirt_block;
use rekindle_qemu::block::names::OverlayName;
use rekindle_qemu::block::overlay;
use rekindle_qemu::vmm::Vmm;
use rustix::fs::{chown, statvfs};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The directory of overlays can be entered by QEMU's user, and read by ours only.
const DIRECTORY_MODE: u32 = 0o711;
/// Limit for the steps between two checkpoints, of which there are about eight.
const MAX_STEPS: usize = 64;

/// The node that the guest writes to, and what is recorded of the image's node.
#[derive(Debug)]
struct Prepared {
    chain: OverlayChain,
    format: String,
    cache: CacheMode,
    detect_zeroes: String,
    bytes: u64,
    /// The overlay for the next mark, which is durable.
    epoch: u64,
    path: PathBuf,
    head: Option<Head>,
}

/// The head of the epoch that the next mark ends: a copy of the overlay above it, which is on the disk then.
#[derive(Debug)]
struct Head {
    /// The overlay is on the disk.
    is_put: bool,
    name: OverlayHead,
    /// The file that gets the copy of the overlay.
    file: File,
}

/// A merge of the overlays up to an epoch.
#[derive(Debug)]
struct DueMerge {
    chain: OverlayChain,
    up_to: u64,
}

/// A disk with overlays.
#[derive(Debug)]
pub(super) struct OverlayDisk {
    recorded: RecordedDisk,
    directory: OverlayDirectory<LocalFiles>,
    vmm: Vmm,
    /// Set if libvirt puts the overlays.
    libvirt: Option<LibvirtDisk>,
    /// The newest epoch whose checkpoint certainly counts.
    committed: u64,
    /// The head of the newest checkpoint. That of a later epoch, or with a higher number, is newer.
    committed_head: Option<OverlayHead>,
    /// A head that this process has made and not sealed, so that no checkpoint has it.
    unsealed_head: Option<OverlayHead>,
    /// Epochs up to this one that are newer than `committed` have no checkpoint, and will not get one.
    decided: u64,
    /// An overlay that this process has made durable; one of another process may not be.
    created: Option<u64>,
    /// Length of the disk for which `created` was made.
    created_bytes: u64,
    prepared: Option<Prepared>,
    due_merge: Option<DueMerge>,
    /// The chain to end.
    ending: Option<OverlayChain>,
}

impl OverlayDisk {
    /// Makes the directory of a disk that has no overlays.
    pub fn begin(recorded: RecordedDisk, vmm: &Vmm) -> Result<Self, OverlayDisksError> {
        let owner = owner_of(vmm)?;
        let image = recorded.image.to_string_lossy().into_owned();
        let mut state = OverlayState { owner, ..OverlayState::new(image, recorded.bytes) };
        if let Some(disk) = recorded.libvirt_disk(vmm) {
            let image_mode = disk.fenced.mode_without()?;
            state.fence = Some(OverlayFence { image_mode, is_in_force: true });
        }
        if let Some(directory) = OverlayDirectory::open(files_of(&recorded))? {
            let OverlayState { may_be_marked, owner, .. } = directory.state();
            if *may_be_marked || running_owner(owner)?.is_some() {
                return Err(other_qemu(&recorded));
            }
            // Its QEMU has ended before the first mark.
            directory.destroy()?;
        }
        let directory = OverlayDirectory::create(files_of(&recorded), state)?;
        let path = &recorded.directory;
        fs::set_permissions(path, Permissions::from_mode(DIRECTORY_MODE)).map_err(OverlayDisksError::io(path))?;
        fault::point("overlay.begin.directory", Some(vmm), None);
        Ok(Self::over(recorded, directory, vmm))
    }

    fn over(recorded: RecordedDisk, directory: OverlayDirectory<LocalFiles>, vmm: &Vmm) -> Self {
        let libvirt = recorded.libvirt_disk(vmm);
        Self {
            recorded,
            directory,
            vmm: vmm.clone(),
            libvirt,
            committed: 0,
            committed_head: None,
            unsealed_head: None,
            decided: 0,
            created: None,
            created_bytes: 0,
            prepared: None,
            due_merge: None,
            ending: None,
        }
    }

    /// Takes over the overlays of a disk; `None` if the device is on its image, which then has all writes.
    pub fn adopt(
        view: &mut DiskView<'_>,
        recorded: RecordedDisk,
        vmm: &Vmm,
    ) -> Result<Option<Self>, OverlayDisksError> {
        let files = files_of(&recorded);
        Self::adopt_own(view, recorded, vmm).map_err(|e| match (&e, OverlayDirectory::open(files)) {
            (OverlayDisksError::ForeignSnapshot { .. }, Ok(Some(directory))) => permit_merge(directory.state(), e),
            _ => e,
        })
    }

    fn adopt_own(
        view: &mut DiskView<'_>,
        recorded: RecordedDisk,
        vmm: &Vmm,
    ) -> Result<Option<Self>, OverlayDisksError> {
        // It may be about to put the device on its image.
        match recorded.libvirt_disk(vmm) {
            Some(disk) => {
                disk.chain(view.graph()?.as_ref())?;
                libvirt_block::cancel_merge(view.monitor_to_change(), &disk.target)?;
                // An end that was interrupted is completed below, and libvirt may still be recording it.
                if disk.chain(view.graph()?.as_ref())?.overlays.is_empty() {
                    disk.await_record(view)?;
                }
            }
            None => overlay::cancel_end(view.monitor_to_change(), recorded.number)?,
        }
        let directory = OverlayDirectory::open(files_of(&recorded))?;
        let Some(directory) = directory else {
            let graph = view.graph()?;
            let chain = match recorded.libvirt_disk(vmm) {
                Some(disk) => disk.chain(&graph)?,
                None => graph.chain_of(&recorded.device)?,
            };
            return if chain.overlays.is_empty() { Ok(None) } else { Err(OverlayDisksError::Unrecorded) };
        };
        if directory.state().owner != owner_of(vmm)? {
            return Err(other_qemu(&recorded));
        }
        let mut disk = Self::over(recorded, directory, vmm);
        disk.remove_prepared_nodes(view)?;
        if disk.found(view)?.next_step(disk.directory.state(), 0) != OverlayStep::Resolve {
            disk.resolve_exposure(view)?;
            disk.fence(&disk.chain_now(view)?)?;
            return Ok(Some(disk));
        }
        // An end, or the preparation of the first mark, was interrupted in this QEMU.
        disk.finish_end(view)?;
        Ok(None)
    }

    /// Passes a fault point.
    pub fn pass(&self, point: &'static str) {
        fault::point(point, Some(&self.vmm), None);
    }

    pub fn number(&self) -> u16 {
        self.recorded.number
    }

    pub fn device(&self) -> &str {
        &self.recorded.device
    }

    /// Removes the nodes of overlays that are on no disk. An earlier process may have made them, and not durable.
    fn remove_prepared_nodes(&mut self, view: &mut DiskView<'_>) -> Result<(), OverlayDisksError> {
        self.created = None;
        if self.libvirt.is_some() {
            return Ok(());
        }
        let graph = view.graph()?;
        let chain = self.checked_chain(&graph)?;
        let newest = chain.overlays.last().map_or(self.directory.state().merged, |newest| newest.epoch);
        let unused: Vec<OverlayName> = graph.overlays_of(self.number()).filter(|name| name.epoch > newest).collect();
        unused.into_iter().try_for_each(|name| Ok(overlay::remove_unused(view.monitor_to_change(), name)?))
    }

    /// Returns the nodes of the device after a check that only ours are on the recorded image.
    fn checked_chain(&self, graph: &BlockGraph) -> Result<OverlayChain, OverlayDisksError> {
        let chain = match &self.libvirt {
            Some(disk) => disk.chain(graph)?,
            None => graph.chain_of(self.device())?,
        };
        let changed = |actual: &str| OverlayDisksError::Changed {
            device: self.device().into(),
            expected: self.recorded.drive.clone(),
            actual: actual.into(),
        };
        let image = &graph.node(&chain.base)?.file;
        if chain.base != self.recorded.drive || *image != self.directory.state().image {
            return Err(changed(&chain.base));
        }
        match chain.overlays.iter().find(|overlay| overlay.disk != self.number()) {
            Some(other) => Err(changed(&other.node())),
            None => Ok(chain),
        }
    }

    fn found(&self, view: &mut DiskView<'_>) -> Result<FoundOverlays, OverlayDisksError> {
        // A merge may end at any time, so it is read before the chain.
        let is_merging = match &self.libvirt {
            Some(disk) => disk.is_merging(view)?,
            None => false,
        };
        let (graph, floor) = (view.graph()?, self.directory.state().floor);
        if let Some(id) = self.libvirt.as_ref().and_then(|disk| disk.foreign_merge(&graph, floor)) {
            return Err(OverlayDisksError::ForeignJob { id });
        }
        let chain = self.checked_chain(view.graph()?.as_ref())?;
        let merging = match &self.libvirt {
            // libvirt's job does not name the epoch, which is of no use: each disk has one job.
            Some(_) => is_merging.then(|| chain.overlays.last().map_or(0, |top| top.epoch)),
            None => view.graph()?.merge_of(self.number()).map(|up_to| up_to.epoch),
        };
        let chain = chain.overlays.iter().map(|overlay| overlay.epoch).collect();
        Ok(FoundOverlays { chain, prepared: self.created, merging, files: self.directory.epochs()? })
    }

    /// Fences the files below the newest overlay of a libvirt domain's disk.
    fn fence(&self, chain: &OverlayChain) -> Result<(), OverlayDisksError> {
        match (&self.libvirt, self.directory.state().fence) {
            (Some(disk), Some(OverlayFence { image_mode, .. })) => disk.fence(chain, image_mode),
            _ => Ok(()),
        }
    }

    fn remove_fence(&self) -> Result<(), OverlayDisksError> {
        match (&self.libvirt, self.directory.state().fence) {
            (Some(disk), Some(OverlayFence { image_mode, .. })) => disk.remove_fence(&self.directory, image_mode),
            _ => Ok(()),
        }
    }

    fn chain_now(&self, view: &mut DiskView<'_>) -> Result<OverlayChain, OverlayDisksError> {
        self.checked_chain(view.graph()?.as_ref())
    }

    /// Notes the disks of the newest checkpoint. None of an earlier attempt can be committed any more.
    pub fn note_committed(&mut self, committed: &[OverlayEpoch]) {
        if let Some(epoch) = self.of_this_disk(committed) {
            let head = epoch.head();
            self.committed = self.committed.max(epoch.id.epoch);
            self.committed_head = self.committed_head.max(head);
            if let Err(e) = self.directory.remove_heads_after(self.committed_head) {
                tracing::warn!(device = self.device(), error = %e, "cannot remove a copy of an overlay");
            }
        }
        self.decided = self.directory.state().sealed;
    }

    fn of_this_disk<'e>(&self, epochs: &'e [OverlayEpoch]) -> Option<&'e OverlayEpoch> {
        epochs.iter().find(|epoch| epoch.id.disk == self.directory.state().disk)
    }

    /// Fails if the file system of the overlays is nearly full.
    pub fn check_space(&self) -> Result<(), OverlayDisksError> {
        let path = self.directory.path();
        let free = statvfs(path).map_err(|e| OverlayDisksError::io(path)(e.into()))?;
        match free.f_bavail.saturating_mul(free.f_frsize) {
            bytes if bytes < MIN_FREE_BYTES => Err(OverlayDisksError::NoSpace { directory: path.to_owned() }),
            _ => Ok(()),
        }
    }

    /// Takes all steps that must precede a mark. A merge that is due waits until after it, unless the disk has too many
    /// overlays.
    pub fn prepare(&mut self, view: &mut DiskView<'_>) -> Result<(), OverlayDisksError> {
        self.prepare_own(view).map_err(|e| permit_merge(self.directory.state(), e))
    }

    fn prepare_own(&mut self, view: &mut DiskView<'_>) -> Result<(), OverlayDisksError> {
        self.prepared = None;
        self.resolve_exposure(view)?;
        self.check_base_read_only(view)?;
        device::check_same(&self.recorded.image, self.recorded.block_device.as_ref())?;
        for _ in 0..MAX_STEPS {
            let found = self.found(view)?;
            let is_full = found.chain.len() >= MAX_OVERLAYS;
            match found.next_step(self.directory.state(), self.committed) {
                OverlayStep::AwaitMerge { up_to } if is_full => self.finish_merge(view, up_to, LATE_MERGE_TIMEOUT)?,
                OverlayStep::AwaitMerge { up_to } => self.finish_or_cancel_merge(view, up_to)?,
                OverlayStep::RaiseFloor { .. } | OverlayStep::Merge { .. } if !is_full => {
                    self.create_next(view, &found)?;
                    break;
                }
                OverlayStep::RaiseFloor { .. } | OverlayStep::Merge { .. } if self.kept_overlay(&found).is_some() => {
                    break;
                }
                OverlayStep::Done => break,
                step => self.take_step(view, step)?,
            }
        }
        self.check_space()?;
        let found = self.found(view)?;
        let kept = self.kept_overlay(&found);
        let epoch = match kept {
            Some(epoch) => epoch,
            None => found.check_mark(self.directory.state()).map_err(|obstacle| self.not_ready(obstacle))?,
        };
        if !self.directory.state().may_be_marked {
            self.directory.record(|state| state.may_be_marked = true)?;
        }
        let graph = view.graph()?;
        let chain = self.checked_chain(&graph)?;
        // The guest never writes to an overlay that belongs to a checkpoint.
        if let Some(top) = chain.overlays.last().filter(|top| top.epoch <= self.directory.state().sealed) {
            return Err(self.merged_by_others(&self.directory.path_of(top.epoch)));
        }
        self.fence(&chain)?;
        let (base, top) = (graph.node(&chain.base)?, graph.node(&chain.top())?);
        let (format, cache, detect_zeroes, bytes) =
            (base.driver.clone(), base.cache, base.detect_zeroes.clone(), top.size);
        let path = self.directory.path_of(epoch);
        self.directory.remove_useless_heads(self.committed_head)?;
        self.remove_unsealed_head()?;
        let is_put = kept.is_some();
        let head = match is_put || self.libvirt.is_some() {
            true => Some(self.create_head(epoch - 1, is_put)?),
            false => None,
        };
        self.prepared = Some(Prepared { chain, format, cache, detect_zeroes, bytes, epoch, path, head });
        Ok(())
    }

    /// Returns the error for overlays that another program has taken off the disk.
    fn merged_by_others(&self, file: &Path) -> OverlayDisksError {
        OverlayDisksError::MergedByOthers { device: self.device().into(), file: file.to_owned() }
    }

    fn not_ready(&self, obstacle: MarkObstacle) -> OverlayDisksError {
        OverlayDisksError::NotReady { device: self.device().into(), obstacle }
    }

    fn stored_bytes(&self, epoch: u64) -> u64 {
        fs::metadata(self.directory.path_of(epoch)).map_or(0, |file| file.blocks() * 512)
    }

    fn sync_image(&self) -> Result<(), OverlayDisksError> {
        let image = &self.recorded.image;
        File::open(image).and_then(|file| file.sync_data()).map_err(OverlayDisksError::io(image))
    }
}

fn files_of(recorded: &RecordedDisk) -> LocalFiles {
    LocalFiles::new(&recorded.directory, false)
}

/// Gives back write permission to the overlay below a user's snapshot, so that the user can merge the snapshot. That overlay is
/// fenced if another one was about to be put on the disk, or is above the snapshot now. Returns the error.
fn permit_merge(state: &OverlayState, error: OverlayDisksError) -> OverlayDisksError {
    let OverlayDisksError::ForeignSnapshot { below, .. } = &error else { return error };
    let epoch = below.file_name().and_then(|name| epoch_of_file(name.to_str()?));
    // The overlay of a sealed epoch may belong to a checkpoint.
    let permitted = if epoch > Some(state.sealed) { fence::open(below) } else { Ok(()) };
    permitted.err().unwrap_or(error)
}

fn other_qemu(recorded: &RecordedDisk) -> OverlayDisksError {
    let RecordedDisk { device, directory, image, .. } = recorded.clone();
    OverlayDisksError::OtherQemu { device, directory, image }
}

/// Gives a file to the user that QEMU runs as.
pub(super) fn give_to_user_of(vmm: &Vmm, path: &Path) -> Result<(), OverlayDisksError> {
    let owner = vmm.owner().map_err(OverlayDisksError::io(path))?;
    chown(path, Some(owner.user), Some(owner.group)).map_err(|e| OverlayDisksError::io(path)(e.into()))
}
