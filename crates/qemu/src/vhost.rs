//! Whether the host's kernel serves network cards of a guest (vhost-net). While it does, its thread reads the tap, and
//! reads and writes the guest's memory. QEMU starts it when the guest's driver is ready, and stops it with the guest.

use crate::qmp::{Qmp, QmpError};
use serde::Deserialize;
use serde_json::{Value, json};

/// Returns the network cards that the kernel serves now, by their paths in QEMU. No card whose driver is not ready, and
/// none of a stopped guest.
///
/// # Errors
/// [`QmpError::Refused`] if QEMU cannot report it; other errors when QEMU does not answer.
pub fn served_cards(qmp: &mut Qmp) -> Result<Vec<String>, QmpError> {
    #[derive(Deserialize)]
    struct Device {
        name: String,
        path: String,
    }
    let devices: Vec<Device> = qmp.execute("x-query-virtio", ())?;
    let mut served = Vec::new();
    for device in devices.into_iter().filter(|device| device.name == "virtio-net") {
        // Not by `x-query-virtio-status`, at which QEMU 11.1 ends with a failed assertion.
        let request = json!({ "path": device.path, "queue": 0 });
        match qmp.execute::<Value>("x-query-virtio-vhost-queue-status", request) {
            Ok(_) => served.push(device.path),
            Err(QmpError::Refused { description, .. }) if is_not_started(&description) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(served)
}

/// Returns whether QEMU's answer is that vhost does not serve the device.
pub(crate) fn is_not_started(description: &str) -> bool {
    description.contains("vhost device has not started")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_answer_that_vhost_has_not_started_counts() {
        // As QEMU 10.0 answers for a card of a guest whose driver is not ready, and for a path of no device.
        assert!(is_not_started("Error: vhost device has not started yet"));
        assert!(!is_not_started("Path /machine/peripheral/net0 is not a VirtIODevice"));
    }
}
