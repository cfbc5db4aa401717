//! The steps between two checkpoints: the overlay for the next mark is made, and the overlays of the committed checkpoint are
//! merged.

use super::{DueMerge, MAX_STEPS, OverlayDisk, give_to_user_of, other_qemu};
use crate::overlays::libvirt::{self, LATE_MERGE_TIMEOUT, MergeStart};
use crate::overlays::restore::{qemu_img_of, write_header};
use crate::overlays::view::DiskView;
use crate::overlays::{OverlayDisksError, overlay_name};
use rekindle_disk::overlay::plan::{FoundOverlays, OverlayStep};
use rekindle_kernel::write_watch::has_open;
use rekindle_qemu::block::graph::OverlayChain;
use rekindle_qemu::block::libvirt as libvirt_block;
use rekindle_qemu::block::{BlockError, jobs, overlay};
use std::time::Duration;

/// How long a merge may delay a checkpoint before it is cancelled. It is repeated after that checkpoint.
const MERGE_GRACE: Duration = Duration::from_secs(1);
/// A merge without which no other overlay can be put on the disk is not slowed down.
const NO_SPEED_LIMIT: u64 = 0;
/// Lowest rate of a merge, in bytes per second.
const MIN_MERGE_SPEED: u64 = 4 << 20;
/// Part of the time between two checkpoints in which a merge is to end, from the commit on. A faster one delays the guest's
/// requests more, because QEMU's main loop does both. A slower one may still run when the next checkpoint is prepared.
const MERGE_PERCENT: u64 = 55;

impl OverlayDisk {
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

    /// Logs why the overlays are not merged yet.
    pub fn warn_if_late(&self, taken: Result<(), OverlayDisksError>) {
        if let Err(e) = taken {
            tracing::warn!(device = self.device(), error = %e, "overlays are not merged yet");
        }
    }

    /// Starts the merge that [`OverlayDisk::advance`] has found to be next, so that it ends within `interval`.
    pub fn start_due_merge(&mut self, view: &mut DiskView<'_>, interval: Duration) -> Result<(), OverlayDisksError> {
        let Some(merge) = self.due_merge.take() else { return Ok(()) };
        let speed = self.merge_speed(&merge, interval);
        self.start_merge(view, &merge, speed)
    }

    fn start_merge(&mut self, view: &mut DiskView<'_>, merge: &DueMerge, speed: u64) -> Result<(), OverlayDisksError> {
        let newest = overlay_name(self.number(), merge.up_to);
        if let Some(disk) = self.libvirt.clone() {
            self.resolve_exposure(view)?;
            self.directory.note_exposed()?;
            // Until it is certain that no other program has merged, the next step resolves it.
            match disk.start_merge(view, &merge.chain, newest, speed, |point| self.pass(point))? {
                MergeStart::Alone(started) => {
                    self.directory.note_not_exposed()?;
                    started?;
                }
                MergeStart::NotAlone => {
                    self.note_changed_by_others(&merge.chain)?;
                    let (device, image) = (self.device().into(), self.recorded.image.clone());
                    return Err(OverlayDisksError::Interference { device, image });
                }
            }
        } else {
            overlay::start_merge(view.monitor_to_change(), &merge.chain, newest, speed)?;
        }
        self.pass("overlay.merge.started");
        Ok(())
    }

    /// Records that another program may have merged the overlays of this chain.
    fn note_changed_by_others(&mut self, chain: &OverlayChain) -> Result<(), OverlayDisksError> {
        let newest = chain.overlays.last().map(|top| top.epoch);
        let newest = newest.or(self.directory.epochs()?.last().copied()).unwrap_or_default();
        Ok(self.directory.record(|state| state.note_changed_by_others(newest))?)
    }

    /// If files that checkpoints need had no fence, so that another program may have changed them, puts the fence in force again,
    /// and records that these checkpoints have lost their disk.
    pub(super) fn resolve_exposure(&mut self, view: &mut DiskView<'_>) -> Result<(), OverlayDisksError> {
        let Some(disk) = &self.libvirt else { return Ok(()) };
        let graph = view.graph()?;
        let chain = disk.chain(&graph)?;
        let newest = chain.overlays.last().map(|top| top.epoch);
        // At the end of the overlays no checkpoint has its disk, and there is no fence.
        let is_open = newest > Some(self.directory.state().floor) && disk.is_exposed(&chain)?;
        if !is_open && !self.directory.is_exposed()? {
            return Ok(());
        }
        // QEMU may need write permission at its end.
        if let Some(job) = graph.libvirt_merge_of(&disk.target) {
            return Err(OverlayDisksError::UnresolvedMerge { id: job.id.clone() });
        }
        self.directory.note_exposed()?;
        self.fence(&chain)?;
        self.note_changed_by_others(&chain)?;
        let (device, image) = (self.device().into(), self.recorded.image.clone());
        tracing::warn!("{}", OverlayDisksError::Interference { device, image });
        Ok(self.directory.note_not_exposed()?)
    }

    /// Rejects an image below overlays that QEMU has left writable, as it does when a merge of the newest overlay by another
    /// program is ended without a pivot: a merge of ours would then end without a flush.
    pub(super) fn check_base_read_only(&self, view: &mut DiskView<'_>) -> Result<(), OverlayDisksError> {
        let (Some(disk), graph) = (&self.libvirt, view.graph()?) else { return Ok(()) };
        let chain = self.checked_chain(&graph)?;
        let is_merging = graph.libvirt_merge_of(&disk.target).is_some();
        // One that has ended without a flush has an error of its own.
        let is_recorded =
            chain.overlays.first().is_some_and(|lowest| lowest.epoch - 1 <= self.directory.state().merged);
        if is_merging || !is_recorded || graph.node(&chain.base)?.read_only {
            return Ok(());
        }
        let (device, image) = (self.device().into(), self.recorded.image.clone());
        Err(OverlayDisksError::LeftWritable { device, image })
    }

    /// Returns the rate at which a merge ends before the next checkpoint.
    fn merge_speed(&self, merge: &DueMerge, interval: Duration) -> u64 {
        let epochs = merge.chain.overlays.iter().map(|overlay| overlay.epoch).filter(|epoch| *epoch <= merge.up_to);
        let bytes: u64 = epochs.map(|epoch| self.stored_bytes(epoch)).sum();
        let usable_ms = (interval.as_millis() as u64 * MERGE_PERCENT / 100).max(1);
        (bytes.saturating_mul(1000) / usable_ms).max(MIN_MERGE_SPEED)
    }

    pub(super) fn take_step(&mut self, view: &mut DiskView<'_>, step: OverlayStep) -> Result<(), OverlayDisksError> {
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
                    if self.libvirt.is_some() {
                        // QEMU leaves it so after a merge of another program that was ended without a pivot.
                        self.note_changed_by_others(&chain)?;
                    }
                    return Err(BlockError::BaseNotFlushed { base: chain.base }.into());
                }
                self.sync_image()?;
                self.directory.record(|state| state.note_merged(up_to))?;
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
            OverlayStep::Resolve if self.libvirt.is_some() => Err(self.merged_by_others(&self.recorded.image)),
            OverlayStep::Resolve => Err(other_qemu(&self.recorded)),
            OverlayStep::Done => Ok(()),
        }
    }

    pub(super) fn create_next(
        &mut self,
        view: &mut DiskView<'_>,
        found: &FoundOverlays,
    ) -> Result<(), OverlayDisksError> {
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
        if !has_open(self.vmm.pid, &path).map_err(OverlayDisksError::io(&path))? {
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

    pub(super) fn finish_merge(
        &self,
        view: &mut DiskView<'_>,
        up_to: u64,
        timeout: Duration,
    ) -> Result<(), OverlayDisksError> {
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
    pub(super) fn finish_or_cancel_merge(&self, view: &mut DiskView<'_>, up_to: u64) -> Result<(), OverlayDisksError> {
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
}
