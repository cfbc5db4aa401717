//! Flash memories, such as the one in which UEFI has its variables. QEMU has a file for each, as for a disk, but a flash
//! memory is no disk: its content is saved with the device state, and after loading that, QEMU writes it back to the file.

use crate::qmp::{Qmp, QmpError};
use serde_json::json;

/// QOM type of a flash memory on a PC.
const FLASH: &str = "cfi.pflash01";

/// Returns whether QEMU's device at this QOM path is a flash memory.
///
/// # Errors
/// When QEMU does not answer.
pub fn is_flash(qmp: &mut Qmp, device: &str) -> Result<bool, QmpError> {
    match qmp.execute::<String>("qom-get", json!({"path": device, "property": "type"})) {
        Ok(kind) => Ok(kind == FLASH),
        // Not a path but the id of a `-drive` without a device.
        Err(QmpError::Refused { .. }) => Ok(false),
        Err(e) => Err(e),
    }
}
