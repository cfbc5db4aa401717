//! Links from a run directory to the VM's logs, which are in another directory and outlive it.
//!
//! ```text
//! /run/rekindle/NAME/
//!   logs            ->  /var/log/rekindle/NAME/    directory of all logs
//!   console.log     ->  logs/console.log           and so on for each log that is not a QEMU's
//!   vmm-3/qemu.log  ->  ../logs/qemu-3.log         log of the third QEMU
//!
//! /var/log/rekindle/NAME/
//!   console.log, console.log.1, console.log.2      newest part, older parts
//! ```

use super::RunDir;
use crate::logs;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};

/// Name of the link, in the run directory, to the log directory.
const LINK_NAME: &str = "logs";
/// Number of QEMUs whose logs are kept.
const KEPT_QEMU_LOGS: u32 = 3;
/// Name of the log of events ([`crate::events`]).
pub const EVENTS_LOG: &str = "events.log";
/// Logs that are always linked. A guest can make their writers write without end.
const ALWAYS_LINKED: [&str; 6] = ["console.log", EVENTS_LOG, "pager.log", "phases.log", "protect.log", "watch.log"];

impl RunDir {
    /// Links the logs of a VM to its directory below `root`. The run directory must exist. Logs of an earlier VM of
    /// the name become older parts. If the directory cannot be made, the logs are in the run directory, and are
    /// bounded as well.
    ///
    /// # Errors
    /// Errors of `mkdir(2)` in the run directory.
    pub fn link_logs(&self, root: &Path) -> io::Result<()> {
        let link = self.file(LINK_NAME);
        if link.symlink_metadata().is_ok() {
            return Ok(());
        }
        let directory = root.join(self.name());
        let created =
            DirBuilder::new().recursive(true).mode(0o700).create(&directory).and_then(|()| logs::set_aside(&directory));
        match created.and_then(|()| symlink(&directory, &link)) {
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
        ALWAYS_LINKED.iter().for_each(|name| self.link_log(name));
        Ok(())
    }

    /// Returns the directory of the VM's logs.
    #[must_use]
    pub fn logs(&self) -> PathBuf {
        let link = self.file(LINK_NAME);
        fs::read_link(&link).unwrap_or_else(|_| if link.exists() { link } else { self.path().to_owned() })
    }

    /// Links the log `name` of the run directory to the log directory.
    pub(crate) fn link_log(&self, name: &str) {
        self.link(&self.file(name), &Path::new(LINK_NAME).join(name));
    }

    /// Links the log of the `generation`-th QEMU, and removes that of the QEMU [`KEPT_QEMU_LOGS`] generations before.
    pub(super) fn link_qemu_log(&self, generation: u32) {
        let log_name = |generation: u32| format!("qemu-{generation}.log");
        // The user may have removed the directory to free space.
        let _ = DirBuilder::new().recursive(true).mode(0o700).create(self.logs());
        // Remove the log of an earlier VM of the same name.
        logs::remove(&self.file(LINK_NAME).join(log_name(generation)));
        if let Some(old_generation) = generation.checked_sub(KEPT_QEMU_LOGS) {
            logs::remove(&self.file(LINK_NAME).join(log_name(old_generation)));
        }
        self.link(&self.vmm(generation).log(), &Path::new("..").join(LINK_NAME).join(log_name(generation)));
    }

    fn link(&self, link: &Path, target: &Path) {
        // A run directory that an older Rekindle has made contains its logs.
        if !self.file(LINK_NAME).exists() {
            return;
        }
        match symlink(target, link) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                tracing::debug!("{}: {e}; this log stays in the run directory", link.display());
            }
            _ => {}
        }
    }

    /// Rotates each log of the VM that is longer than `limit`. Returns the logs that could not be rotated, with the
    /// errors.
    pub fn bound_logs(&self, limit: u64) -> Vec<(PathBuf, io::Error)> {
        logs::bound(&[self.path(), &self.file(LINK_NAME)], limit)
    }
}
