//! The queues of a guest's virtio devices.
//!
//! While another process serves a device of a running guest (vhost-user), QEMU does not know the position in its queues. For
//! `x-query-virtio-queue-status` it requests the position with `GET_VRING_BASE`, at which that process stops the queue: the
//! protocol requires it. QEMU starts the queue again only after its guest was stopped; until then the guest waits for the
//! device. `x-query-virtio-vhost-queue-status` sends no message to that process.

use crate::qmp::{Qmp, QmpError};
use crate::vhost;
use serde::Deserialize;
use serde_json::json;

/// Largest number of queues of a virtio device in QEMU.
const MAX_QUEUES: u64 = 1024;
/// With this start the QOM types of devices that only vhost can serve.
const VHOST_TYPE: &str = "vhost-";

/// A queue as QEMU reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtioQueue {
    /// The device, by its path in QEMU.
    pub device: String,
    /// The number of the queue in its device.
    pub number: u64,
    /// Number of entries that the guest uses.
    pub entries: u64,
    /// Number of entries that QEMU offers. `None` for a queue that vhost serves now.
    pub offered_entries: Option<u64>,
    pub rings: RingAddresses,
}

/// Where the guest has put the rings of a queue, in guest memory; 0 if the queue is unused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingAddresses {
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
}

/// Returns the queues of all virtio devices, those of a device in the order of their numbers. The guest may run: no queue
/// is stopped. Leaves out the queues of vhost devices that the guest does not use at present.
///
/// # Errors
/// [`QmpError::Refused`] if QEMU does not have `x-query-virtio`, an unstable command; other errors when QEMU does not answer.
pub fn of_running(qmp: &mut Qmp) -> Result<Vec<VirtioQueue>, QmpError> {
    let mut queues = Vec::new();
    for device in devices(qmp)? {
        let kind: String = qmp.execute("qom-get", json!({ "path": device, "property": "type" }))?;
        for number in 0..MAX_QUEUES {
            let queue = match query_vhost(qmp, &device, number)? {
                VhostQueue::Served(queue) => Some(queue),
                // The guest's driver may start the device before the other query, which would stop the queue.
                VhostQueue::NotStarted if kind.starts_with(VHOST_TYPE) => None,
                VhostQueue::NotStarted | VhostQueue::None => query(qmp, &device, number)?,
            };
            let Some(queue) = queue else { break };
            queues.push(queue);
        }
    }
    Ok(queues)
}

/// Returns the queues of all virtio devices, those of a device in the order of their numbers.
///
/// *Needs:* QEMU waits for its guest's state, so that it does not run the guest.
///
/// # Errors
/// As for [`of_running`].
pub fn of_waiting(qmp: &mut Qmp) -> Result<Vec<VirtioQueue>, QmpError> {
    let mut queues = Vec::new();
    for device in devices(qmp)? {
        for number in 0..MAX_QUEUES {
            let Some(queue) = query(qmp, &device, number)? else { break };
            queues.push(queue);
        }
    }
    Ok(queues)
}

/// Returns the paths of all virtio devices in QEMU. The number of their queues is not queried: at `x-query-virtio-status` QEMU
/// 11.1 ends with a failed assertion.
fn devices(qmp: &mut Qmp) -> Result<Vec<String>, QmpError> {
    #[derive(Deserialize)]
    struct Device {
        path: String,
    }
    let devices: Vec<Device> = qmp.execute("x-query-virtio", ())?;
    Ok(devices.into_iter().map(|device| device.path).collect())
}

/// A queue as vhost has it.
enum VhostQueue {
    Served(VirtioQueue),
    /// vhost serves nothing of the device now. Of most devices it never does.
    NotStarted,
    /// vhost serves the device, but has no queue of this number.
    None,
}

fn query_vhost(qmp: &mut Qmp, device: &str, number: u64) -> Result<VhostQueue, QmpError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Status {
        num: u64,
        desc_phys: u64,
        avail_phys: u64,
        used_phys: u64,
    }
    let request = json!({ "path": device, "queue": number });
    match qmp.execute("x-query-virtio-vhost-queue-status", request) {
        Ok(Status { num, desc_phys, avail_phys, used_phys }) => Ok(VhostQueue::Served(VirtioQueue {
            device: device.into(),
            number,
            entries: num,
            offered_entries: None,
            rings: RingAddresses { descriptors: desc_phys, available: avail_phys, used: used_phys },
        })),
        Err(QmpError::Refused { description, .. }) if vhost::is_not_started(&description) => Ok(VhostQueue::NotStarted),
        Err(QmpError::Refused { .. }) => Ok(VhostQueue::None),
        Err(e) => Err(e),
    }
}

/// Queries a queue that vhost does not serve. `None` if there is no queue of this number.
fn query(qmp: &mut Qmp, device: &str, number: u64) -> Result<Option<VirtioQueue>, QmpError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Status {
        vring_num: u64,
        vring_num_default: u64,
        vring_desc: u64,
        vring_avail: u64,
        vring_used: u64,
    }
    let request = json!({ "path": device, "queue": number });
    let status: Status = match qmp.execute("x-query-virtio-queue-status", request) {
        Err(QmpError::Refused { .. }) => return Ok(None),
        status => status?,
    };
    Ok(Some(VirtioQueue {
        device: device.into(),
        number,
        entries: status.vring_num,
        offered_entries: Some(status.vring_num_default),
        rings: RingAddresses { descriptors: status.vring_desc, available: status.vring_avail, used: status.vring_used },
    }))
}
