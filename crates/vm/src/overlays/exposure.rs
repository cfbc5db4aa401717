//! Whether only our own merge has written to a file that had no fence for it.
//!
//! libvirt runs one block job of a disk at a time, and QEMU opens the file into which a job merges for writing exactly once.
//! So a file was opened for writing once if our call has succeeded, and never if it was rejected. Any other count shows that
//! another job, or another program, has had the file, also if that has ended or was cancelled, which leaves no trace in QEMU's
//! nodes.

use super::OverlayDisksError;
use rekindle_kernel::write_watch::{WriteWatch, open_for_writing};
use std::path::{Path, PathBuf};

/// A file that has a fence, and is about to have none.
#[derive(Debug)]
pub(super) struct Exposure {
    file: PathBuf,
    qemu: u32,
    watch: WriteWatch,
}

impl Exposure {
    /// Starts to count. `file`: as this QEMU opens it.
    pub fn start(file: &Path, qemu: u32) -> Result<Self, OverlayDisksError> {
        let watch = WriteWatch::start(file).map_err(OverlayDisksError::io(file))?;
        Ok(Self { file: file.to_owned(), qemu, watch })
    }

    /// Returns how often the file was opened for writing since the start.
    pub fn writers(&mut self) -> Result<usize, OverlayDisksError> {
        let failed = |e| OverlayDisksError::io(&self.file)(e);
        let mut closed = self.watch.closed().map_err(failed)?;
        loop {
            let open = open_for_writing(self.qemu, &self.file).map_err(failed)?;
            // One that was closed meanwhile is in neither number.
            let before = closed;
            closed = self.watch.closed().map_err(failed)?;
            if closed == before {
                return Ok(closed + open);
            }
        }
    }
}
