//! Writes a guest's disks back before its pause.

use rekindle_kernel::process::Process;
use rekindle_kernel::written_files;

/// Writes back what the host caches of the disks that the `source` QEMU serves: when it stops its guest, QEMU waits for
/// that. Without the right to do so, the pause is longer.
pub fn write_back(source: Process) {
    if let Err(e) = written_files::write_back(source) {
        tracing::debug!("the disks are written back in the pause: {e}");
    }
}
