//! Errors of the servers of a VM's disks.

use crate::qemu_user::QemuUserError;
use rekindle_disk::control::ControlError;
use rekindle_disk::redo::offline::MergeError;
use std::io;
use std::path::PathBuf;

/// Why the server of a disk could not be started, used or ended.
#[derive(Debug, thiserror::Error)]
pub enum DisksError {
    /// The server does not start.
    #[error("disk {id}: the server of {} does not start; its log ends with:\n{log}", image.display())]
    Start {
        /// Id of the disk.
        id: String,
        /// Path of the disk's image.
        image: PathBuf,
        /// The end of the server's log.
        log: String,
    },
    /// The user of the VM's QEMU, which connects to the server, is unknown.
    #[error(transparent)]
    QemuUser(#[from] QemuUserError),
    /// The server was killed but does not end.
    #[error("disk {id}: its server (process {pid}) was killed but does not end")]
    Stuck {
        /// Id of the disk.
        id: String,
        /// The server's process number.
        pid: u32,
    },
    /// A server runs but does not answer. A second server of the same disk is never started.
    #[error(
        "disk {id}: its server (process {pid}) runs and does not answer; if it is stopped, resume it: kill -CONT {pid}; if it hangs, \
         kill it: kill -KILL {pid}, and run this command again"
    )]
    Silent {
        /// Id of the disk.
        id: String,
        /// The server's process number.
        pid: u32,
    },
    /// The server rejects a command or does not answer it.
    #[error("disk {id}")]
    Refused {
        /// Id of the disk.
        id: String,
        /// The server's answer, or the error of the connection.
        #[source]
        source: ControlError,
    },
    /// The redo log cannot be read or merged.
    #[error("disk {id}")]
    Redo {
        /// Id of the disk.
        id: String,
        /// The error of reading or merging.
        #[source]
        source: MergeError,
    },
    /// The lock of the servers, or the run directory, cannot be used.
    #[error("run directory {}", path.display())]
    RunDir {
        /// Path of the run directory.
        path: PathBuf,
        /// The error of locking or reading.
        #[source]
        source: io::Error,
    },
    /// A system call failed.
    #[error("disk {id}: {doing}")]
    Io {
        /// Id of the disk.
        id: String,
        /// The failed action.
        doing: &'static str,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
}
