//! What the server of a disk may use after it has opened its files.

use crate::image::OpenMode;
use crate::redo::files::reserve_path;
use rekindle_kernel::confinement::{Access, Calls, Confinement, Grant};
use rekindle_kernel::userfault::remote::DEVICE;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The files of a server.
#[derive(Debug)]
pub struct ServerFiles<'a> {
    pub image: &'a Path,
    pub mode: OpenMode,
    /// Directory of the redo log; `None` if the disk cannot have one.
    pub redo: Option<&'a Path>,
    /// Path of the control socket.
    pub control: &'a Path,
    /// Image and redo log are opened later, and until then another server may replace the log's directory.
    pub is_awaiting: bool,
}

impl ServerFiles<'_> {
    /// Returns the confinement of the server.
    #[must_use]
    pub fn confinement(&self) -> Confinement {
        let mut files = vec![Grant::new(DEVICE, Access::WriteFile)];
        if self.is_awaiting {
            let access = if self.mode.readonly { Access::Read } else { Access::WriteFile };
            files.push(Grant::new(self.image, access));
        }
        if let Some(redo) = self.redo {
            files.extend([redo, &reserve_path(redo)].map(|path| Grant::new(path, Access::Directory)));
            let parent = parent_of(redo);
            files.push(Grant::new(parent, Access::Subdirectories));
            if self.is_awaiting {
                files.push(Grant::new(parent, Access::Directory));
            }
        }
        // Of the VM's run directory: it also has the lists of frames that servers exchange.
        let directory = parent_of(self.control);
        if is_private(directory) {
            files.push(Grant::new(directory, Access::Directory));
        }
        Confinement { files, calls: Calls::FILES | Calls::CONNECTIONS | Calls::RING | Calls::USERFAULTFD }
    }
}

fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns whether only this user can use the directory, as a run directory. Others, such as `/tmp`, are not granted.
fn is_private(directory: &Path) -> bool {
    fs::metadata(directory)
        .is_ok_and(|metadata| metadata.mode() & 0o077 == 0 && metadata.uid() == rustix::process::geteuid().as_raw())
}
