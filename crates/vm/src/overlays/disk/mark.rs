//! The disk at a checkpoint: an overlay is put on it, or the one that is there is kept and copied.

use super::{Head, OverlayDisk, Prepared, permit_merge};
use crate::overlays::head::copy_data;
use crate::overlays::record::RecordedDisk;
use crate::overlays::view::DiskView;
use crate::overlays::{OverlayDisksError, OverlayEpoch, overlay_name};
use rekindle_disk::keeper::EpochId;
use rekindle_disk::overlay::plan::{FoundOverlays, MAX_OVERLAYS, MarkObstacle};
use rekindle_kernel::write_watch::has_open;
use rekindle_qemu::block::libvirt::LibvirtMark;
use rekindle_qemu::block::overlay::Mark;
use rekindle_qemu::stopped::Stopped;
use std::fs::File;

/// Largest overlay of libvirt's that is copied in the next pause, too. On a larger one, another overlay is put.
const MAX_KEPT_BYTES: u64 = 1 << 20;

impl OverlayDisk {
    /// Returns the epoch of the overlay on top of the disk if the next checkpoint copies it instead of putting another one.
    pub(super) fn kept_overlay(&self, found: &FoundOverlays) -> Option<u64> {
        let (top, below) = found.chain.split_last()?;
        let state = self.directory.state();
        let ended = below.last().copied().unwrap_or(state.merged);
        // After a restore, the epochs before the one that the guest writes to are dead. Below the floor, an epoch has no disk.
        if ended < state.floor || ended + 1 != *top || state.is_dead(ended) || found.merging.is_some() {
            return None;
        }
        // QEMU puts another one quickly, libvirt does not.
        let is_small = self.libvirt.is_some() && self.stored_bytes(*top) <= MAX_KEPT_BYTES;
        let has_checkpoint = ended <= self.committed || (self.decided < ended && ended <= state.sealed);
        let is_put_in_vain = !has_checkpoint && found.chain.len() >= MAX_OVERLAYS;
        (is_small || is_put_in_vain).then_some(*top)
    }

    pub(super) fn remove_unsealed_head(&mut self) -> Result<(), OverlayDisksError> {
        match self.unsealed_head.take() {
            Some(head) => Ok(self.directory.remove_head(head)?),
            None => Ok(()),
        }
    }

    /// Chooses a new overlay instead of the kept one if the guest has written much to that one since
    /// [`OverlayDisk::prepare`], because copying it would make the pause long. A disk with the most overlays keeps it.
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

    pub(super) fn create_head(&mut self, epoch: u64, is_put: bool) -> Result<Head, OverlayDisksError> {
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

    /// Checks that the disk is still as `marked` describes it. A user of libvirt may have changed it since
    /// [`OverlayDisk::prepare`].
    pub fn check_marked(&self, view: &mut DiskView<'_>, marked: &[OverlayEpoch]) -> Result<(), OverlayDisksError> {
        self.compare_marked(view, marked).map_err(|e| permit_merge(self.directory.state(), e))
    }

    fn compare_marked(&self, view: &mut DiskView<'_>, marked: &[OverlayEpoch]) -> Result<(), OverlayDisksError> {
        let (Some(disk), Some(marked)) = (&self.libvirt, self.of_this_disk(marked)) else { return Ok(()) };
        let epoch = marked.id.epoch;
        disk.await_record(view)?;
        let path = self.directory.path_of(epoch + 1);
        let newest = self.chain_now(view)?.overlays.iter().rev().map(|overlay| overlay.epoch).next();
        let is_open = has_open(self.vmm.pid, &path).map_err(OverlayDisksError::io(&path))?;
        if newest == Some(epoch + 1) && is_open && view.graph()?.libvirt_merge_of(&disk.target).is_none() {
            return disk.fence_image();
        }
        let (expected, actual) = (path.to_string_lossy().into_owned(), "another file".into());
        Err(OverlayDisksError::Changed { device: self.device().into(), expected, actual })
    }

    /// Notes that the prepared overlay is on the disk. Returns the epoch that it has ended.
    pub fn note_mark(&mut self) -> Option<OverlayEpoch> {
        let Prepared { format, cache, detect_zeroes, bytes, epoch, head, .. } = self.prepared.take()?;
        self.created.take_if(|created| *created == epoch);
        let RecordedDisk { device, drive, number, image, directory, target, block_device, .. } = self.recorded.clone();
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
            block_device,
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
}
