//! A disk of a libvirt domain: overlays are put and merged by libvirt's calls, and the files below are fenced.

use super::fence::{self, FencedImage};
use super::view::{Description, DiskView};
use super::{OverlayDisksError, overlay_name};
use rekindle_disk::overlay::directory::{OverlayDirectory, epoch_of_file, overlay_file_name};
use rekindle_disk::redo::files::LocalFiles;
use rekindle_libvirt::disks::DomainDisk;
use rekindle_qemu::block::graph::{BlockGraph, MergeFilter, OverlayChain};
use rekindle_qemu::block::libvirt;
use rekindle_qemu::block::names::OverlayName;
use rekindle_qemu::block::{BlockError, overlay};
use rekindle_qemu::stopped::Stopped;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

/// How long libvirt may take to record what QEMU has done.
const RECORD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a checkpoint waits for a merge without which the disk would have too many overlays.
pub(super) const LATE_MERGE_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A disk whose overlays are libvirt's.
#[derive(Debug, Clone)]
pub(super) struct LibvirtDisk {
    /// libvirt's name of the disk, such as `vda`.
    pub target: String,
    pub device: String,
    pub number: u16,
    pub image: PathBuf,
    pub fenced: FencedImage,
    pub directory: PathBuf,
}

/// What came of the start of a merge.
#[derive(Debug)]
pub(super) enum MergeStart {
    /// Nothing but this merge, if it was started, has written to the files that had no fence. They have it again.
    Alone(Result<(), OverlayDisksError>),
    /// Another program has written to one of them, or still does. They have no fence until its job has ended.
    NotAlone,
}

/// Returns libvirt's name of QEMU's device at this path.
pub(super) fn target_of(disks: &[DomainDisk], device: &str) -> Option<String> {
    let alias = device.strip_prefix("/machine/peripheral/")?.split('/').next();
    Some(disks.iter().find(|disk| disk.alias.as_deref() == alias)?.target.clone())
}

/// Returns the directory of overlays in which a file is, if it is an overlay.
pub(super) fn directory_of_overlay(file: &str) -> Option<&Path> {
    let path = Path::new(file);
    epoch_of_file(path.file_name()?.to_str()?)?;
    path.parent()
}

impl LibvirtDisk {
    /// Returns the overlay that a file is.
    fn overlay_of(&self, file: &str) -> Option<OverlayName> {
        let name = Path::new(file).file_name()?.to_str()?;
        let is_here = directory_of_overlay(file) == Some(&self.directory);
        is_here.then_some(overlay_name(self.number, epoch_of_file(name)?))
    }

    /// Returns the nodes of the device.
    pub fn chain(&self, graph: &BlockGraph) -> Result<OverlayChain, OverlayDisksError> {
        graph.chain_by_files(&self.device, |file| self.overlay_of(file)).map_err(|e| match e {
            BlockError::ForeignNode { node, .. } => {
                let file_of = |node: &str| graph.node(node).map_or_else(|_| node.to_owned(), |node| node.file.clone());
                let below = graph.nodes_of(&self.device).skip_while(|name| *name != node);
                let below = below.map(file_of).find(|file| self.overlay_of(file).is_some());
                let below = below.map_or_else(|| self.image.clone(), PathBuf::from);
                OverlayDisksError::ForeignSnapshot { target: self.target.clone(), file: file_of(&node), below }
            }
            e => e.into(),
        })
    }

    fn path_of(&self, overlay: &OverlayName) -> PathBuf {
        self.directory.join(overlay_file_name(overlay.epoch))
    }

    /// Returns the file that is on top of the disk.
    pub fn top_file(&self, chain: &OverlayChain) -> PathBuf {
        chain.overlays.last().map_or_else(|| self.image.clone(), |top| self.path_of(top))
    }

    /// Returns whether a merge runs, or libvirt has not recorded yet what QEMU has done.
    pub fn is_merging(&self, view: &mut DiskView<'_>) -> Result<bool, OverlayDisksError> {
        Ok(view.graph()?.libvirt_merge_of(&self.target).is_some() || self.disagreement(view)?.is_some())
    }

    /// Compares libvirt's record with QEMU's nodes. Returns a file that differs, if any.
    fn disagreement(&self, view: &mut DiskView<'_>) -> Result<Option<String>, OverlayDisksError> {
        let chain = self.chain(view.graph()?.as_ref())?;
        let overlays = chain.overlays.iter().rev().map(|overlay| self.path_of(overlay));
        let actual: Vec<PathBuf> = overlays.chain([self.image.clone()]).collect();
        let files_of = |disks: Rc<[DomainDisk]>| {
            disks.iter().find(|disk| disk.target == self.target).map(|disk| disk.files.clone()).unwrap_or_default()
        };
        let recorded = files_of(view.domain_disks(Description::Running)?);
        let differs = |(index, file): (usize, &PathBuf)| recorded.get(index).map(Path::new) != Some(file);
        if let Some((_, file)) = actual.iter().enumerate().find(|at| differs(*at)) {
            return Ok(Some(file.to_string_lossy().into_owned()));
        }
        // The user may have edited the definition for the next start, but it must not need a file that is removed.
        let next = files_of(view.domain_disks(Description::NextStart)?);
        let is_stale =
            |file: &String| self.overlay_of(file).is_some() && !actual.iter().any(|now| now == Path::new(file));
        Ok(next.into_iter().find(is_stale))
    }

    /// Waits until libvirt's record is that of QEMU.
    pub fn await_record(&self, view: &mut DiskView<'_>) -> Result<(), OverlayDisksError> {
        let deadline = Instant::now() + RECORD_TIMEOUT;
        while let Some(file) = self.disagreement(view)? {
            if Instant::now() >= deadline {
                return Err(OverlayDisksError::LibvirtDisagrees { target: self.target.clone(), file });
            }
            thread::sleep(POLL_INTERVAL);
            view.forget();
        }
        Ok(())
    }

    /// Fences what is below the newest overlay. The newest one, or the image without overlays, can be written.
    pub fn fence(&self, chain: &OverlayChain, image_mode: u32) -> Result<(), OverlayDisksError> {
        let Some((top, closed)) = chain.overlays.split_last() else {
            return self.fenced.remove(image_mode);
        };
        closed.iter().try_for_each(|overlay| fence::close(&self.path_of(overlay)))?;
        self.fenced.close()?;
        fence::open(&self.path_of(top))
    }

    /// Fences the file that is on top of the disk, onto which an overlay is about to be put.
    pub fn fence_top(&self, chain: &OverlayChain) -> Result<(), OverlayDisksError> {
        match chain.overlays.last() {
            Some(top) => fence::close(&self.path_of(top)),
            // The guest writes to it until the call.
            None => self.fenced.close_to_jobs(),
        }
    }

    /// Fences the image below an overlay that was put on it, which has no merge.
    pub fn fence_image(&self) -> Result<(), OverlayDisksError> {
        self.fenced.close()
    }

    /// Removes the fence of the image and all overlays.
    pub fn remove_fence(
        &self,
        directory: &OverlayDirectory<LocalFiles>,
        image_mode: u32,
    ) -> Result<(), OverlayDisksError> {
        directory.epochs()?.into_iter().try_for_each(|epoch| fence::open(&directory.path_of(epoch)))?;
        self.fenced.remove(image_mode)
    }

    /// Starts to merge the overlays up to `up_to`. The image can be written by others only until libvirt's call returns: QEMU
    /// has opened it then. A block device stays writable until [`LibvirtDisk::fence`], for this QEMU alone by permissions.
    ///
    /// If the overlay above `up_to` is fenced, also waits for the end of the merge. QEMU opens that overlay anew then, to
    /// record its new base in it, and QEMU 10.0 ends with a segmentation fault if it cannot.
    ///
    /// # Errors
    /// It is not known whether another program has written to the image or that overlay.
    pub fn start_merge(
        &self,
        view: &mut DiskView<'_>,
        chain: &OverlayChain,
        up_to: OverlayName,
        speed: u64,
        pass: impl Fn(&'static str),
    ) -> Result<MergeStart, OverlayDisksError> {
        let mut image = self.fenced.watch()?;
        let above = chain.overlays.iter().rev().skip(1).rfind(|overlay| overlay.epoch > up_to.epoch);
        let above = above.map(|overlay| self.path_of(overlay));
        let watched = |path: PathBuf| Ok::<_, OverlayDisksError>((self.fenced.watch_overlay(&path)?, path));
        let mut above = above.map(watched).transpose()?;
        if let Some((_, above)) = &above {
            fence::open(above)?;
        }
        self.fenced.open()?;
        pass("overlay.merge.unfenced");
        let of_above = above.as_mut().map(|(above, _)| above.writers()).transpose()?;
        if image.writers()? + of_above.unwrap_or_default() != 0 {
            // No fence until that job has ended: QEMU 10.0 ends if it may not write to the image at a pivot.
            return Ok(MergeStart::NotAlone);
        }
        let (base, top) = (&self.image, self.path_of(&up_to));
        let started = libvirt::start_merge(view.monitor_to_change(), &self.target, base, Some(&top), speed);
        pass("overlay.merge.requested");
        self.fenced.close_to_jobs()?;
        let mut is_alone = image.writers()? == usize::from(started.is_ok());
        let mut started = started.map_err(OverlayDisksError::from);
        if let Some((mut above, path)) = above {
            started = started.and_then(|()| self.finish_merge(view, LATE_MERGE_TIMEOUT));
            // Also after a lost answer: the fence is put in force only when no merge runs.
            libvirt::cancel_merge(view.monitor_to_change(), &self.target)?;
            fence::close(&path)?;
            // QEMU has recorded the new base in it.
            let is_merged = self.chain(view.graph()?.as_ref())?.overlays.iter().all(|now| now.epoch > up_to.epoch);
            is_alone &= above.writers()? == usize::from(is_merged);
        }
        if is_alone {
            return Ok(MergeStart::Alone(started));
        }
        self.fenced.open()?;
        Ok(MergeStart::NotAlone)
    }

    /// Returns a block job of another program that merges into the image or into an overlay below the newest, if one runs.
    /// `floor`: the newest epoch that ours merge.
    pub fn foreign_merge(&self, graph: &BlockGraph, floor: u64) -> Option<String> {
        let job = graph.libvirt_merge_of(&self.target)?;
        let is_foreign = |filter: MergeFilter<'_>| {
            self.overlay_of(filter.merged_file).is_some_and(|merged| filter.is_active || merged.epoch > floor)
        };
        graph.merge_filters().any(is_foreign).then(|| job.id.clone())
    }

    /// Returns whether an image or an overlay below the newest has no fence.
    pub fn is_exposed(&self, chain: &OverlayChain) -> Result<bool, OverlayDisksError> {
        let Some((_, closed)) = chain.overlays.split_last() else { return Ok(false) };
        for overlay in closed {
            if fence::is_open(&self.path_of(overlay))? {
                return Ok(true);
            }
        }
        self.fenced.is_open_to_jobs()
    }

    /// Waits for the end of a merge, and until libvirt has recorded it.
    pub fn finish_merge(&self, view: &mut DiskView<'_>, timeout: Duration) -> Result<(), OverlayDisksError> {
        if !libvirt::is_ended(view.monitor_to_change(), &self.target, timeout)? {
            let job = format!("commit-{}", self.target);
            return Err(BlockError::JobTimeout { job, after: timeout }.into());
        }
        self.await_record(view)
    }

    /// Copies all overlays into the image while the guest runs.
    pub fn prepare_end(&self, view: &mut DiskView<'_>, timeout: Duration) -> Result<(), OverlayDisksError> {
        libvirt::start_merge(view.monitor_to_change(), &self.target, &self.image, None, 0)?;
        self.await_copied(view, timeout).inspect_err(|_| {
            if let Err(e) = libvirt::cancel_merge(view.monitor_to_change(), &self.target) {
                tracing::warn!(disk = self.target, error = %e, "cannot cancel a block job");
            }
        })
    }

    /// Waits until QEMU has copied all overlays, and libvirt has recorded that: it rejects the pivot before.
    fn await_copied(&self, view: &mut DiskView<'_>, timeout: Duration) -> Result<(), OverlayDisksError> {
        libvirt::wait_copied(view.monitor_to_change(), &self.target, timeout)?;
        let deadline = Instant::now() + RECORD_TIMEOUT;
        let is_copied = |disk: &DomainDisk| disk.target == self.target && disk.is_copied;
        while !view.domain_disks(Description::Running)?.iter().any(is_copied) {
            if Instant::now() >= deadline {
                let (target, file) = (self.target.clone(), self.image.to_string_lossy().into_owned());
                return Err(OverlayDisksError::LibvirtDisagrees { target, file });
            }
            thread::sleep(POLL_INTERVAL);
            view.forget();
        }
        Ok(())
    }

    /// Puts the device on its image.
    pub fn end(&self, stopped: &mut Stopped<'_>, chain: &OverlayChain) -> Result<(), OverlayDisksError> {
        if chain.overlays.is_empty() {
            return Ok(());
        }
        let pivoted = libvirt::pivot(stopped, &self.target);
        let Some(qmp) = stopped.qmp() else { return Ok(()) };
        // After an error, also a lost answer, the device may nevertheless be on its image: the graph decides.
        let unknown = |e: BlockError| BlockError::EndUnknown { device: self.device.clone(), source: Box::new(e) };
        if pivoted.is_err() {
            libvirt::cancel_merge(qmp, &self.target).map_err(unknown)?;
        }
        let now = self.chain(&BlockGraph::read(qmp).map_err(unknown)?)?;
        match pivoted {
            _ if now.overlays.is_empty() => Ok(()),
            Err(e) => Err(e.into()),
            Ok(()) => {
                let (device, base, actual) = (self.device.clone(), now.base.clone(), now.top());
                Err(BlockError::NotOnBase { device, base, actual }.into())
            }
        }
    }
}

/// Removes the nodes of overlays from a QEMU that has them from Rekindle; libvirt removes those of its own.
pub(super) fn remove_unused(
    disk: Option<&LibvirtDisk>,
    view: &mut DiskView<'_>,
    name: OverlayName,
) -> Result<(), BlockError> {
    match disk {
        Some(_) => Ok(()),
        None => overlay::remove_unused(view.monitor_to_change(), name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_qemu::block::names::is_overlay_file;

    #[test]
    fn an_overlay_has_the_file_name_by_which_it_is_recognised() {
        let file = format!("/images/disk.rekindle/{}", overlay_file_name(7));
        assert!(is_overlay_file(&file));
        assert_eq!(directory_of_overlay(&file), Some(Path::new("/images/disk.rekindle")));
        assert_eq!(directory_of_overlay("/images/disk.rekindle/state"), None);
    }

    #[test]
    fn libvirts_name_of_a_device_is_found_by_its_alias() {
        let disk = |target: &str, alias: &str| DomainDisk {
            target: target.into(),
            alias: Some(alias.into()),
            files: Vec::new(),
            is_copied: false,
        };
        let disks = [disk("vda", "virtio-disk0"), disk("sda", "scsi0-0-0-0")];
        let target = |device| target_of(&disks, device);
        assert_eq!(target("/machine/peripheral/virtio-disk0/virtio-backend").as_deref(), Some("vda"));
        assert_eq!(target("/machine/peripheral/scsi0-0-0-0").as_deref(), Some("sda"));
        assert_eq!(target("/machine/peripheral-anon/device[1]"), None);
    }
}
