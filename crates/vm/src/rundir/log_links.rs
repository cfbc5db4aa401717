//! The links from a run directory to the logs of its VM, which are elsewhere and outlive it.
//!
//! ```text
//! /run/rekindle/NAME/logs  ->  /var/log/rekindle/NAME/
//! /run/rekindle/NAME/console.log  ->  logs/console.log         (and so on for each log)
//!                                     logs/console.log.1, .2   older parts
//! ```

use super::RunDir;
use crate::logs;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};

/// The link to the directory of the logs, in the run directory.
const DIRECTORY: &str = "logs";
/// Logs of earlier QEMUs that are kept.
const QEMUS: u32 = 3;
/// What a guest can make a process write is in one of these, whatever the VM has.
const USUAL: [&str; 5] = ["console.log", "pager.log", "phases.log", "protect.log", "watch.log"];

impl RunDir {
    /// Links the logs of a VM, whose run directory exists, to its directory below `root`. What an earlier VM of its
    /// name has left there becomes the older parts. Where that is not possible the logs are in the run directory,
    /// bounded all the same.
    ///
    /// # Errors
    /// When nothing can be made in the run directory.
    pub fn link_logs(&self, root: &Path) -> io::Result<()> {
        let link = self.file(DIRECTORY);
        if link.symlink_metadata().is_ok() {
            return Ok(());
        }
        let directory = root.join(self.name());
        let made =
            DirBuilder::new().recursive(true).mode(0o700).create(&directory).and_then(|()| logs::set_aside(&directory));
        match made.and_then(|()| symlink(&directory, &link)) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
            Err(e) => {
                tracing::warn!(
                    "{}: {e}; the logs of {} are in {} until it is stopped",
                    directory.display(),
                    self.name(),
                    link.display()
                );
                DirBuilder::new().recursive(true).mode(0o700).create(&link)?;
            }
        }
        USUAL.iter().for_each(|name| self.link_log(name));
        Ok(())
    }

    /// Where the logs of the VM are.
    #[must_use]
    pub fn logs(&self) -> PathBuf {
        let link = self.file(DIRECTORY);
        fs::read_link(&link).unwrap_or_else(|_| if link.exists() { link } else { self.path().to_owned() })
    }

    /// Links the log `name` of the run directory to the directory of the logs.
    pub(crate) fn link_log(&self, name: &str) {
        self.link(&self.file(name), &Path::new(DIRECTORY).join(name));
    }

    /// Links the log of the `generation`-th QEMU. Those of the last few QEMUs stay.
    pub(super) fn link_qemu_log(&self, generation: u32) {
        let name = |generation: u32| format!("qemu-{generation}.log");
        // The user may have removed it to free space.
        let _ = DirBuilder::new().recursive(true).mode(0o700).create(self.logs());
        // What a VM of the same name had left.
        logs::remove(&self.file(DIRECTORY).join(name(generation)));
        if let Some(old) = generation.checked_sub(QEMUS) {
            logs::remove(&self.file(DIRECTORY).join(name(old)));
        }
        self.link(&self.vmm(generation).log(), &Path::new("..").join(DIRECTORY).join(name(generation)));
    }

    fn link(&self, at: &Path, to: &Path) {
        // One that an older Rekindle has made has its logs in the run directory.
        if !self.file(DIRECTORY).exists() {
            return;
        }
        match symlink(to, at) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                tracing::debug!("{}: {e}; this log stays in the run directory", at.display());
            }
            _ => {}
        }
    }

    /// Rotates each log of the VM that is longer than `limit`. Returns those that cannot be bounded, and why.
    pub fn bound_logs(&self, limit: u64) -> Vec<(PathBuf, io::Error)> {
        logs::bound(&[self.path(), &self.file(DIRECTORY)], limit)
    }
}
