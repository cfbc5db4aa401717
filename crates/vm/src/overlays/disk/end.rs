//! The end of a disk's overlays: the device is on its image again.

use super::OverlayDisk;
use crate::fault;
use crate::overlays::OverlayDisksError;
use crate::overlays::view::DiskView;
use rekindle_disk::overlay::OverlayError;
use rekindle_qemu::block::libvirt as libvirt_block;
use rekindle_qemu::block::names::OverlayName;
use rekindle_qemu::block::{jobs, overlay};
use rekindle_qemu::stopped::Stopped;
use std::time::Duration;

/// How long QEMU may take to merge all overlays while the guest runs.
const END_TIMEOUT: Duration = Duration::from_secs(600);

impl OverlayDisk {
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

    /// Fences a block device of a libvirt domain, because no checkpoint follows. A merge, in which it can be written, ends before
    /// that.
    pub fn settle(&self, view: &mut DiskView<'_>) -> Result<(), OverlayDisksError> {
        let Some(disk) = self.libvirt.as_ref().filter(|disk| disk.fenced.is_device()) else { return Ok(()) };
        if !self.vmm.is_alive() {
            // A checkpoint needs the device as it is.
            return if self.directory.state().sealed > 0 { disk.fenced.close_device() } else { Ok(()) };
        }
        if let Some(up_to) = self.found(view)?.merging {
            self.finish_or_cancel_merge(view, up_to)?;
        }
        self.fence(&self.chain_now(view)?)
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
