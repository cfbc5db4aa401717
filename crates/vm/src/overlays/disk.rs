//! The overlays of one disk: the steps of `rekindle_disk::overlay::plan`, taken in a running QEMU.

use super::head::copy_data;
use super::libvirt::{self, LATE_MERGE_TIMEOUT, LibvirtDisk};
use super::record::{RecordedDisk, has_open, running_owner};
use super::restore::{qemu_img_of, write_header};
use super::view::DiskView;
use super::{MIN_FREE_BYTES, OverlayDisksError, OverlayEpoch, fence, overlay_name, owner_of};
use crate::fault;
use rekindle_disk::keeper::EpochId;
use rekindle_disk::overlay::OverlayError;
use rekindle_disk::overlay::directory::{OverlayDirectory, OverlayHead, epoch_of_file};
use rekindle_disk::overlay::plan::{FoundOverlays, MAX_OVERLAYS, MarkObstacle, OverlayStep};
use rekindle_disk::overlay::state::{OverlayFence, OverlayState};
use rekindle_disk::redo::files::LocalFiles;
use rekindle_qemu::block::BlockError;
use rekindle_qemu::block::graph::{BlockGraph, CacheMode, OverlayChain};
use rekindle_qemu::block::libvirt as libvirt_block;
use rekindle_qemu::block::libvirt::LibvirtMark;
use rekindle_qemu::block::overlay::{self, Mark};
use rekindle_qemu::block::{jobs, names::OverlayName};
use rekindle_qemu::stopped::Stopped;
use rekindle_qemu::vmm::Vmm;
use rustix::fs::statvfs;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a merge may delay a checkpoint before it is cancelled. It is repeated after that checkpoint.
const MERGE_GRACE: Duration = Duration::from_secs(1);
/// How long QEMU may take to merge all overlays while the guest runs.
const END_TIMEOUT: Duration = Duration::from_secs(600);
/// A merge without which no other overlay can be put on the disk is not slowed down.
const NO_SPEED_LIMIT: u64 = 0;
/// Lowest rate of a merge, in bytes per second.
const MIN_MERGE_SPEED: u64 = 4 << 20;
/// Part of the time between two checkpoints in which a merge is to end, from the commit on. A faster one delays the guest's
/// requests more, because QEMU's main loop does both. A slower one may still run when the next checkpoint is prepared.
const MERGE_PERCENT: u64 = 55;
/// The directory of overlays can be entered by QEMU's user, and read by ours only.
const DIRECTORY_MODE: u32 = 0o711;
/// Largest overlay of libvirt's that is copied in the next pause, too. On a larger one, another overlay is put.
const MAX_KEPT_BYTES: u64 = 1 << 20;
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
        if recorded.target.is_some() {
            let image_mode = fence::mode_without(&recorded.image)?;
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
        let libvirt = recorded.libvirt_disk();
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
        match recorded.libvirt_disk() {
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
            let chain = match recorded.libvirt_disk() {
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

    /// Returns the epoch of the overlay on top of the disk if the next checkpoint copies it instead of putting another one.
    fn kept_overlay(&self, found: &FoundOverlays) -> Option<u64> {
        let (top, below) = found.chain.split_last()?;
        let state = self.directory.state();
        let ended = below.last().copied().unwrap_or(state.merged);
        // After a restore, the epochs before the one that the guest writes to are dead.
        if ended + 1 != *top || state.is_dead(ended) || found.merging.is_some() {
            return None;
        }
        // QEMU puts another one quickly, libvirt does not.
        let is_small = self.libvirt.is_some() && self.stored_bytes(*top) <= MAX_KEPT_BYTES;
        let has_checkpoint = ended <= self.committed || (self.decided < ended && ended <= state.sealed);
        let is_put_in_vain = !has_checkpoint && found.chain.len() >= MAX_OVERLAYS;
        (is_small || is_put_in_vain).then_some(*top)
    }

    fn remove_unsealed_head(&mut self) -> Result<(), OverlayDisksError> {
        match self.unsealed_head.take() {
            Some(head) => Ok(self.directory.remove_head(head)?),
            None => Ok(()),
        }
    }

    /// Puts another overlay on the disk after all, if the guest has made the one that is to be kept large since
    /// [`OverlayDisk::prepare`]: the pause would be long.
    pub fn reconsider_kept(&mut self) -> Result<(), OverlayDisksError> {
        let Some(Prepared { chain, epoch, head: Some(Head { is_put: true, .. }), .. }) = &self.prepared else {
            return Ok(());
        };
        let (top, is_full) = (*epoch, chain.overlays.len() >= MAX_OVERLAYS);
        if self.libvirt.is_none() || is_full || self.stored_bytes(top) <= MAX_KEPT_BYTES {
            return Ok(());
        }
        if self.created != Some(top + 1) {
            return Err(self.not_ready(MarkObstacle::NotPrepared));
        }
        self.remove_unsealed_head()?;
        let (head, path) = (self.create_head(top, false)?, self.directory.path_of(top + 1));
        if let Some(prepared) = &mut self.prepared {
            (prepared.epoch, prepared.path, prepared.head) = (top + 1, path, Some(head));
        }
        Ok(())
    }

    fn not_ready(&self, obstacle: MarkObstacle) -> OverlayDisksError {
        OverlayDisksError::NotReady { device: self.device().into(), obstacle }
    }

    fn create_head(&mut self, epoch: u64, is_put: bool) -> Result<Head, OverlayDisksError> {
        let name = self.directory.create_head(epoch)?;
        self.unsealed_head = Some(name);
        let path = self.directory.head_path(name);
        let file = File::options().write(true).open(&path).map_err(OverlayDisksError::io(&path))?;
        Ok(Head { is_put, name, file })
    }

    /// Returns whether libvirt has to put the next overlay on the disk.
    pub fn is_to_be_put_early(&self) -> bool {
        let head = self.prepared.as_ref().and_then(|prepared| prepared.head.as_ref());
        self.libvirt.is_some() && head.is_none_or(|head| !head.is_put)
    }

    /// Notes the end of libvirt's call that puts the next overlay on the disk.
    pub fn note_put_early(&mut self, is_put: bool) {
        match self.prepared.as_mut().and_then(|prepared| prepared.head.as_mut()) {
            // Another disk's overlay was put.
            Some(head) if head.is_put => return,
            Some(head) => head.is_put = is_put,
            None => {}
        }
        // Also after an error: the overlay may be on the disk and have writes of the guest, so it is not put again.
        self.created = None;
    }

    /// Copies the overlay on top of the disk, if it was put before this pause. When QEMU stops a guest, it writes everything
    /// into the files of its disks.
    pub fn copy_head(&mut self, _stopped: &mut Stopped<'_>) -> Result<(), OverlayDisksError> {
        let device = self.recorded.device.clone();
        let Some(Prepared { path, head: Some(Head { is_put, file, .. }), .. }) = self.prepared.as_mut() else {
            return Ok(());
        };
        if !*is_put {
            return Err(OverlayDisksError::NotReady { device, obstacle: MarkObstacle::NotPrepared });
        }
        let copied = File::open(&*path).and_then(|overlay| copy_data(&overlay, file));
        copied.map_err(OverlayDisksError::io(path))
    }

    /// Takes all steps up to the next merge, for [`OverlayDisk::start_due_merge`]. While a merge runs, or if none is due,
    /// makes the next overlay.
    pub fn advance(&mut self, view: &mut DiskView<'_>) -> Result<(), OverlayDisksError> {
        self.due_merge = None;
        for _ in 0..MAX_STEPS {
            let found = self.found(view)?;
            match found.next_step(self.directory.state(), self.committed) {
                OverlayStep::AwaitMerge { .. } => return self.create_next(view, &found),
                OverlayStep::Done => break,
                OverlayStep::Merge { up_to } => {
                    self.due_merge = Some(DueMerge { chain: self.chain_now(view)?, up_to });
                    return Ok(());
                }
                step => self.take_step(view, step)?,
            }
        }
        Ok(())
    }

    /// Starts the merge that [`OverlayDisk::advance`] has found to be next, so that it ends within `interval`.
    pub fn start_due_merge(&mut self, view: &mut DiskView<'_>, interval: Duration) -> Result<(), OverlayDisksError> {
        let Some(merge) = self.due_merge.take() else { return Ok(()) };
        let speed = self.merge_speed(&merge, interval);
        self.start_merge(view, &merge, speed)
    }

    fn start_merge(&self, view: &mut DiskView<'_>, merge: &DueMerge, speed: u64) -> Result<(), OverlayDisksError> {
        let newest = overlay_name(self.number(), merge.up_to);
        if let Some(disk) = &self.libvirt {
            disk.start_merge(view, &merge.chain, newest, speed, || self.pass("overlay.merge.unfenced"))?;
        } else {
            overlay::start_merge(view.monitor_to_change(), &merge.chain, newest, speed)?;
        }
        self.pass("overlay.merge.started");
        Ok(())
    }

    /// Returns the rate at which a merge ends before the next checkpoint.
    fn merge_speed(&self, merge: &DueMerge, interval: Duration) -> u64 {
        let epochs = merge.chain.overlays.iter().map(|overlay| overlay.epoch).filter(|epoch| *epoch <= merge.up_to);
        let bytes: u64 = epochs.map(|epoch| self.stored_bytes(epoch)).sum();
        let usable_ms = (interval.as_millis() as u64 * MERGE_PERCENT / 100).max(1);
        (bytes.saturating_mul(1000) / usable_ms).max(MIN_MERGE_SPEED)
    }

    fn stored_bytes(&self, epoch: u64) -> u64 {
        fs::metadata(self.directory.path_of(epoch)).map_or(0, |file| file.blocks() * 512)
    }

    fn take_step(&mut self, view: &mut DiskView<'_>, step: OverlayStep) -> Result<(), OverlayDisksError> {
        match step {
            OverlayStep::AwaitMerge { up_to } => self.finish_merge(view, up_to, LATE_MERGE_TIMEOUT),
            OverlayStep::RecordMerged { up_to } => {
                // libvirt dismisses its job, so there may have been none to wait for.
                if self.libvirt.is_some() {
                    self.pass("overlay.merge.merged");
                }
                // A merge makes the image read-only again, unless a flush of it has failed.
                let chain = self.chain_now(view)?;
                if !view.graph()?.node(&chain.base)?.read_only {
                    return Err(BlockError::BaseNotFlushed { base: chain.base }.into());
                }
                self.sync_image()?;
                // A user of libvirt may have merged it in the moment before the fence. What a restore has discarded was not
                // merged: checkpoints before it keep their disk.
                self.directory.record(|state| {
                    state.floor = state.floor.max(state.newest_living(up_to));
                    state.merged = state.merged.max(up_to);
                })?;
                self.pass("overlay.merge.recorded");
                Ok(())
            }
            OverlayStep::Delete { epoch } => {
                libvirt::remove_unused(self.libvirt.as_ref(), view, overlay_name(self.number(), epoch))?;
                self.directory.remove_overlay(epoch)?;
                self.pass("overlay.merge.deleted");
                Ok(())
            }
            OverlayStep::RaiseFloor { to } => {
                self.directory.record(|state| state.floor = state.floor.max(to))?;
                self.directory.remove_useless_heads(self.committed_head)?;
                self.pass("overlay.merge.floor");
                Ok(())
            }
            OverlayStep::Merge { up_to } => {
                let merge = DueMerge { chain: self.chain_now(view)?, up_to };
                self.start_merge(view, &merge, NO_SPEED_LIMIT)
            }
            OverlayStep::Create { epoch } => self.create(view, epoch),
            // `adopt` has resolved what an earlier process has left, so another program has changed the disk.
            OverlayStep::Resolve => Err(other_qemu(&self.recorded)),
            OverlayStep::Done => Ok(()),
        }
    }

    fn create_next(&mut self, view: &mut DiskView<'_>, found: &FoundOverlays) -> Result<(), OverlayDisksError> {
        let epoch = found.next_epoch(self.directory.state());
        if self.created == Some(epoch) { Ok(()) } else { self.create(view, epoch) }
    }

    fn create(&mut self, view: &mut DiskView<'_>, epoch: u64) -> Result<(), OverlayDisksError> {
        self.check_space()?;
        let name = overlay_name(self.number(), epoch);
        let chain = self.chain_now(view)?;
        libvirt::remove_unused(self.libvirt.as_ref(), view, name)?;
        let path = self.directory.create_overlay(epoch)?;
        give_to_user_of(&self.vmm, &path)?;
        self.pass("overlay.create.file");
        if let Some(disk) = &self.libvirt {
            let graph = view.graph()?;
            let top = graph.node(&chain.top())?;
            write_header(&qemu_img_of(&self.vmm.binary), &path, &disk.top_file(&chain), &top.driver, top.size)?;
            self.created_bytes = top.size;
            return self.finish_create(epoch);
        }
        overlay::create(view.monitor_to_change(), &chain, name, &path)?;
        if !has_open(&self.vmm, &path).map_err(OverlayDisksError::io(&path))? {
            overlay::remove_unused(view.monitor_to_change(), name)?;
            let why = format!("QEMU does not see {} there", path.display());
            return Err(OverlayDisksError::Unsuitable { device: self.device().into(), why });
        }
        self.finish_create(epoch)
    }

    fn finish_create(&mut self, epoch: u64) -> Result<(), OverlayDisksError> {
        self.pass("overlay.create.opened");
        self.directory.make_durable(epoch)?;
        self.created = Some(epoch);
        self.pass("overlay.create.durable");
        Ok(())
    }

    fn finish_merge(&self, view: &mut DiskView<'_>, up_to: u64, timeout: Duration) -> Result<(), OverlayDisksError> {
        match &self.libvirt {
            Some(disk) => disk.finish_merge(view, timeout)?,
            None => {
                let chain = self.chain_now(view)?;
                overlay::finish_merge(view.monitor_to_change(), &chain, overlay_name(self.number(), up_to), timeout)?;
                self.pass("overlay.merge.merged");
            }
        }
        Ok(())
    }

    /// Waits a moment for a merge, then cancels it.
    fn finish_or_cancel_merge(&self, view: &mut DiskView<'_>, up_to: u64) -> Result<(), OverlayDisksError> {
        match self.finish_merge(view, up_to, MERGE_GRACE) {
            Err(OverlayDisksError::Block(BlockError::JobTimeout { job, .. })) => match &self.libvirt {
                Some(disk) => Ok(libvirt_block::cancel_merge(view.monitor_to_change(), &disk.target)?),
                None => Ok(jobs::cancel(view.monitor_to_change(), &job).map(drop)?),
            },
            // The overlays are still on the disk, and the merge is repeated after the next checkpoint.
            Err(OverlayDisksError::Block(e @ BlockError::JobFailed { .. })) => {
                tracing::warn!(device = self.device(), error = %e, "overlays could not be merged");
                Ok(())
            }
            finished => finished,
        }
    }

    fn sync_image(&self) -> Result<(), OverlayDisksError> {
        let image = &self.recorded.image;
        File::open(image).and_then(|file| file.sync_data()).map_err(OverlayDisksError::io(image))
    }

    pub fn is_prepared(&self) -> bool {
        self.prepared.is_some()
    }

    /// Returns the next mark, after [`OverlayDisk::prepare`]; `None` if the overlay is put before the pause.
    pub fn next_mark(&self) -> Option<Mark<'_>> {
        let Prepared { chain, epoch, head, .. } = self.prepared.as_ref()?;
        head.is_none().then(|| Mark { chain, overlay: overlay_name(self.number(), *epoch) })
    }

    /// Returns the next mark of a disk whose overlays libvirt puts.
    pub fn next_libvirt_mark(&self) -> Option<LibvirtMark<'_>> {
        let (Prepared { chain, path, .. }, disk) = (self.prepared.as_ref()?, self.libvirt.as_ref()?);
        Some(LibvirtMark { chain, target: &disk.target, file: path, bytes: self.created_bytes })
    }

    /// Returns libvirt's name of the disk.
    pub fn target(&self) -> Option<&str> {
        self.libvirt.as_ref().map(|disk| disk.target.as_str())
    }

    /// Fences the file that the guest writes to, before an overlay is put onto it. The next [`OverlayDisk::prepare`]
    /// removes that if no overlay was put.
    pub fn fence_top(&self) -> Result<(), OverlayDisksError> {
        match (&self.libvirt, &self.prepared) {
            (Some(disk), Some(Prepared { chain, .. })) => disk.fence_top(chain),
            _ => Ok(()),
        }
    }

    /// Checks that the disk is exactly what the mark of `epoch` has made of it: a user of libvirt may have changed it
    /// since [`OverlayDisk::prepare`].
    pub fn check_marked(&self, view: &mut DiskView<'_>, marked: &[OverlayEpoch]) -> Result<(), OverlayDisksError> {
        self.compare_marked(view, marked).map_err(|e| permit_merge(self.directory.state(), e))
    }

    fn compare_marked(&self, view: &mut DiskView<'_>, marked: &[OverlayEpoch]) -> Result<(), OverlayDisksError> {
        let (Some(disk), Some(marked)) = (&self.libvirt, self.of_this_disk(marked)) else { return Ok(()) };
        let epoch = marked.id.epoch;
        disk.await_record(view)?;
        let path = self.directory.path_of(epoch + 1);
        let newest = self.chain_now(view)?.overlays.iter().rev().map(|overlay| overlay.epoch).next();
        let is_open = has_open(&self.vmm, &path).map_err(OverlayDisksError::io(&path))?;
        if newest == Some(epoch + 1) && is_open && view.graph()?.libvirt_merge_of(&disk.target).is_none() {
            return Ok(());
        }
        let (expected, actual) = (path.to_string_lossy().into_owned(), "another file".into());
        Err(OverlayDisksError::Changed { device: self.device().into(), expected, actual })
    }

    /// Notes that the prepared overlay is on the disk. Returns the epoch that it has ended.
    pub fn note_mark(&mut self) -> Option<OverlayEpoch> {
        let Prepared { format, cache, detect_zeroes, bytes, epoch, head, .. } = self.prepared.take()?;
        self.created.take_if(|created| *created == epoch);
        let RecordedDisk { device, drive, number, image, directory, target, .. } = self.recorded.clone();
        let id = EpochId { disk: self.directory.state().disk, epoch: epoch - 1 };
        Some(OverlayEpoch {
            device,
            drive,
            number,
            image,
            format,
            directory,
            bytes,
            cache,
            detect_zeroes,
            target,
            has_head: head.is_some(),
            head_number: head.map_or(0, |head| head.name.number),
            id,
        })
    }

    pub fn seal(&mut self, marked: &[OverlayEpoch]) -> Result<(), OverlayDisksError> {
        let Some(marked) = self.of_this_disk(marked) else { return Ok(()) };
        let (epoch, head) = (marked.id.epoch, marked.head());
        self.unsealed_head = None;
        let image = self.recorded.image.clone();
        self.directory.seal(epoch, head, || File::open(&image)?.sync_data())?;
        self.pass("overlay.seal.sealed");
        Ok(())
    }

    /// Copies all overlays into the image while the guest runs.
    pub fn prepare_end(&mut self, view: &mut DiskView<'_>) -> Result<(), OverlayDisksError> {
        if let Some(disk) = &self.libvirt {
            libvirt_block::cancel_merge(view.monitor_to_change(), &disk.target)?;
            disk.await_record(view)?;
        } else if let Some(up_to) = view.graph()?.merge_of(self.number()) {
            jobs::cancel(view.monitor_to_change(), &up_to.merge_job())?;
        }
        self.remove_prepared_nodes(view)?;
        self.directory.close()?;
        self.pass("overlay.end.closed");
        let chain = self.chain_now(view)?;
        match &self.libvirt {
            // No checkpoint has its disk any more.
            Some(disk) if !chain.overlays.is_empty() => {
                self.remove_fence()?;
                disk.prepare_end(view, END_TIMEOUT)?;
            }
            Some(_) => {}
            None => overlay::prepare_end(view.monitor_to_change(), &chain, END_TIMEOUT)?,
        }
        self.pass("overlay.end.copied");
        self.ending = Some(chain);
        Ok(())
    }

    /// Puts the device on its image, after [`OverlayDisk::prepare_end`].
    pub fn end(&self, stopped: &mut Stopped<'_>) -> Result<(), OverlayDisksError> {
        match (&self.ending, &self.libvirt) {
            (None, _) => Ok(()),
            (Some(chain), Some(disk)) => disk.end(stopped, chain),
            (Some(chain), None) => Ok(overlay::end(stopped, chain)?),
        }
    }

    /// Removes the directory of a disk whose device is on its image. The guest is stopped, or has not run since.
    pub fn finish_end(self, view: &mut DiskView<'_>) -> Result<(), OverlayDisksError> {
        let graph = view.graph()?;
        let chain = self.checked_chain(&graph)?;
        if let Some(top) = chain.overlays.last() {
            let (expected, actual) = (chain.base.clone(), top.node());
            return Err(OverlayDisksError::Changed { device: self.device().into(), expected, actual });
        }
        if let Some(disk) = &self.libvirt {
            disk.await_record(view)?;
        } else {
            let nodes: Vec<OverlayName> = graph.overlays_of(self.number()).collect();
            nodes.into_iter().try_for_each(|name| overlay::remove_unused(view.monitor_to_change(), name))?;
        }
        self.remove_fence()?;
        self.sync_image()?;
        self.pass("overlay.end.on-image");
        match self.directory.destroy() {
            // Another program's file stays, in a directory without a state.
            Err(e @ OverlayError::Occupied { .. }) => tracing::warn!("{e}"),
            destroyed => destroyed?,
        }
        fault::point("overlay.end.removed", Some(&self.vmm), None);
        Ok(())
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
    let process = Path::new("/proc").join(vmm.pid.to_string());
    let owner = fs::metadata(&process).map_err(OverlayDisksError::io(&process))?;
    chown(path, Some(owner.uid()), Some(owner.gid())).map_err(OverlayDisksError::io(path))
}
