//! Merges the overlays of a domain that no QEMU runs: its guest has shut down, and is booted next.
//!
//! ```text
//! open (claims, checks) ──> merge (no checkpoint has its disk any more) ──> (libvirt's definition) ──> finish
//! ```
//!
//! The image stays fenced until it has all writes and libvirt's definition is on it. Until then the domain cannot be started
//! on the image alone, and each step can be repeated after a kill.

use super::record::{OVERLAY_DIRECTORY_SUFFIX, directory_next_to, running_owner};
use super::restore::{QEMU_WRITER_BYTE, output_of, qemu_img_of, run};
use super::{OverlayDisksError, fence, libvirt};
use rekindle_disk::overlay::OverlayError;
use rekindle_disk::overlay::directory::OverlayDirectory;
use rekindle_disk::redo::files::LocalFiles;
use rekindle_kernel::file::is_locked;
use serde::Deserialize;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The overlays of a disk that no QEMU uses, claimed.
#[derive(Debug)]
pub struct OfflineOverlays {
    directory: OverlayDirectory<LocalFiles>,
    image: PathBuf,
    /// The newest overlay, and the image below the oldest one. `None` if no overlay is left.
    chain: Option<Chain>,
}

#[derive(Debug)]
struct Chain {
    top: PathBuf,
    base: Layer,
}

/// A file of a disk, as `qemu-img info` prints it.
#[derive(Debug, Clone, Deserialize)]
struct Layer {
    filename: String,
    format: String,
}

impl OfflineOverlays {
    /// Claims the overlays of the disk that a domain has on `file`: its image, or an overlay next to the image. `None`: the
    /// disk has none. `qemu`: the domain's QEMU.
    ///
    /// # Errors
    /// [`OverlayDisksError`], if a QEMU uses them, or if it is not certain which of them is the newest. Nothing is changed.
    pub fn open(file: &Path, qemu: &Path) -> Result<Option<Self>, OverlayDisksError> {
        let overlay_directory = libvirt::directory_of_overlay(&file.to_string_lossy()).map(Path::to_owned);
        let path = overlay_directory.clone().unwrap_or_else(|| directory_next_to(file));
        let Some(directory) = OverlayDirectory::open(LocalFiles::new(&path, false))? else {
            let gone = || OverlayDisksError::OverlayGone { file: file.to_owned() };
            return if overlay_directory.is_some() { Err(gone()) } else { Ok(None) };
        };
        let text = path.to_string_lossy();
        let image = text.strip_suffix(OVERLAY_DIRECTORY_SUFFIX).map(PathBuf::from);
        let image = image.ok_or_else(|| uncertain(&path, "it is not next to the image"))?;
        let state = directory.state();
        if let Some(pid) = running_owner(&state.owner)? {
            return Err(OverlayDisksError::InUse { pid, directory: path });
        }
        let epochs = directory.epochs()?;
        for file in epochs.iter().map(|epoch| directory.path_of(*epoch)).chain([image.clone()]) {
            let is_written = File::open(&file).and_then(|opened| is_locked(opened, QEMU_WRITER_BYTE));
            if is_written.map_err(OverlayDisksError::io(&file))? {
                return Err(OverlayDisksError::DomainRuns { file });
            }
        }
        let live: Vec<u64> = epochs.into_iter().filter(|epoch| !state.is_dead(*epoch)).collect();
        let chain = live.last().map(|top| Self::chain(&directory, &image, &live, *top, qemu)).transpose()?;
        Ok(Some(Self { directory, image, chain }))
    }

    /// Returns the chain of the newest overlay. Checks that it has all writes.
    fn chain(
        directory: &OverlayDirectory<LocalFiles>,
        image: &Path,
        live: &[u64],
        top: u64,
        qemu: &Path,
    ) -> Result<Chain, OverlayDisksError> {
        let top = directory.path_of(top);
        let mut command = Command::new(qemu_img_of(qemu));
        command.args(["info", "--output=json", "--backing-chain", "-f", "qcow2"]).arg(&top);
        let layers: Vec<Layer> = serde_json::from_slice(&output_of(command)?).map_err(|e| {
            OverlayDisksError::QemuImg { why: format!("info of {} cannot be understood: {e}", top.display()) }
        })?;
        let Some((base, overlays)) = layers.split_last() else {
            return Err(uncertain(directory.path(), "the newest one has no image"));
        };
        if Path::new(&base.filename) != image {
            return Err(uncertain(directory.path(), "the newest one is on another image"));
        }
        let is_in_chain =
            |epoch: &u64| overlays.iter().any(|layer| Path::new(&layer.filename) == directory.path_of(*epoch));
        // QEMU has merged the oldest ones, but not all after the floor.
        let floor = directory.state().floor;
        if live.iter().any(|epoch| *epoch > floor && !is_in_chain(epoch)) {
            return Err(uncertain(directory.path(), "the newest one is not above all others"));
        }
        Ok(Chain { top, base: base.clone() })
    }

    #[must_use]
    pub fn image(&self) -> &Path {
        &self.image
    }

    /// Returns QEMU's name of the image's format, if that is known.
    #[must_use]
    pub fn format(&self) -> Option<&str> {
        self.chain.as_ref().map(|chain| chain.base.format.as_str())
    }

    /// Merges all overlays into the image, durably. No checkpoint has its disk from here on. Can be repeated.
    ///
    /// # Errors
    /// [`OverlayDisksError`]: the disk is still on its overlays.
    pub fn merge(&mut self, qemu: &Path) -> Result<(), OverlayDisksError> {
        let newest = self.directory.epochs()?.last().copied().unwrap_or_default();
        let state = self.directory.state();
        let has_all = state.merged >= newest || !state.may_be_marked;
        let Some(chain) = self.chain.as_ref().filter(|_| !has_all) else { return Ok(()) };
        self.directory.close()?;
        let mut command = Command::new(qemu_img_of(qemu));
        // `-d`: the overlay keeps its content, which a repetition needs.
        command.args(["commit", "-q", "-d", "-f", "qcow2", "-b", &chain.base.filename]).arg(&chain.top);
        run(command)?;
        File::open(&self.image).and_then(|file| file.sync_all()).map_err(OverlayDisksError::io(&self.image))?;
        Ok(self.directory.record(|state| state.note_merged(newest))?)
    }

    /// Removes the overlays and the fence. libvirt has the disk on its image.
    ///
    /// # Errors
    /// [`OverlayDisksError`]: something is left. The next boot repeats this.
    pub fn finish(self) -> Result<(), OverlayDisksError> {
        if let Some(fenced) = self.directory.state().fence {
            fence::remove_from_image(&self.image, fenced.image_mode)?;
        }
        match self.directory.destroy() {
            // Another program's file stays, in a directory without a state.
            Err(e @ OverlayError::Occupied { .. }) => tracing::warn!("{e}"),
            destroyed => destroyed?,
        }
        Ok(())
    }
}

fn uncertain(directory: &Path, why: &'static str) -> OverlayDisksError {
    OverlayDisksError::NewestUncertain { directory: directory.to_owned(), why }
}
