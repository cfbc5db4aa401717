//! The queues of a guest's virtio devices.

use crate::qmp::{Qmp, QmpError};
use serde::Deserialize;
use serde_json::json;

/// Largest number of queues of a virtio device in QEMU.
const MAX_QUEUES: u64 = 1024;

/// A queue as QEMU reports it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct VirtioQueue {
    /// The device, by its path in QEMU.
    #[serde(skip)]
    pub device: String,
    /// The number of the queue in its device.
    #[serde(skip)]
    pub number: u64,
    /// Number of entries that the guest uses.
    #[serde(rename = "vring-num")]
    pub entries: u64,
    /// Number of entries that QEMU offers.
    #[serde(rename = "vring-num-default")]
    pub offered_entries: u64,
    /// Where the guest has put the descriptor table, in guest memory; 0 if the queue is unused.
    pub vring_desc: u64,
    pub vring_avail: u64,
    pub vring_used: u64,
}

/// Returns the queues of all virtio devices, those of a device in the order of their numbers.
///
/// # Errors
/// [`QmpError::Refused`] if QEMU does not have `x-query-virtio`, an unstable command; other errors when QEMU does not answer.
pub fn of(qmp: &mut Qmp) -> Result<Vec<VirtioQueue>, QmpError> {
    #[derive(Deserialize)]
    struct Device {
        path: String,
    }
    let devices: Vec<Device> = qmp.execute("x-query-virtio", ())?;
    let mut queues = Vec::new();
    for Device { path } in devices {
        // The number of queues is not queried: at `x-query-virtio-status` QEMU 11.1 ends with a failed assertion.
        for number in 0..MAX_QUEUES {
            let request = json!({ "path": path, "queue": number });
            match qmp.execute::<VirtioQueue>("x-query-virtio-queue-status", request) {
                // The device has no queue of this number.
                Err(QmpError::Refused { .. }) => break,
                queue => queues.push(VirtioQueue { device: path.clone(), number, ..queue? }),
            }
        }
    }
    Ok(queues)
}
