//! Finds the rings of a guest's virtio devices in QEMU's memory. QEMU itself reads this memory when it loads the
//! devices, so it must be filled before.

use crate::qmp::{Qmp, QmpError};
use crate::ramblock::host_address;
use rekindle_pages::PAGE_SIZE;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::ops::Range;

/// Largest number of queues of a virtio device in QEMU.
const MAX_QUEUES: u64 = 1024;
/// Largest number of entries of a queue (virtio 1.2, 2.7).
const MAX_QUEUE_ENTRIES: u64 = 1 << 15;
const PAGE_BYTES: u64 = PAGE_SIZE as u64;

/// Returns the rings of all virtio devices, as whole pages at addresses in QEMU. A device that the guest does not use
/// has no rings.
///
/// The result describes the present: a guest that resets a device may move its rings.
///
/// # Errors
/// [`QmpError::Refused`] if QEMU does not have `x-query-virtio` (QEMU 7.2); other errors when QEMU does not answer.
pub fn of(qmp: &mut Qmp) -> Result<Vec<Range<u64>>, QmpError> {
    let devices: Vec<Value> = qmp.execute("x-query-virtio", ())?;
    let mut pages = BTreeSet::new();
    for path in devices.iter().filter_map(|device| device.get("path")) {
        // The number of queues is not queried: at `x-query-virtio-status` QEMU 11.1 ends with a failed assertion.
        for queue in 0..MAX_QUEUES {
            let request = json!({ "path": path, "queue": queue });
            let status: Value = match qmp.execute("x-query-virtio-queue-status", request) {
                // The device has no queue of this number, or is not started.
                Err(QmpError::Refused { .. }) => break,
                other => other?,
            };
            for ring in queue_rings(&status) {
                let page_numbers = ring.start / PAGE_BYTES..ring.end.div_ceil(PAGE_BYTES);
                pages.extend(page_numbers.map(|number| number * PAGE_BYTES));
            }
        }
    }
    let pages: Vec<u64> = pages.into_iter().collect();
    let mut addresses = Vec::new();
    add_addresses(qmp, &pages, &mut addresses)?;
    Ok(addresses)
}

/// Returns the descriptor table, available ring and used ring of a split queue in guest memory (virtio 1.2, 2.7). A
/// packed queue is not larger.
fn queue_rings(status: &Value) -> Vec<Range<u64>> {
    let number = |key: &str| status.get(key).and_then(Value::as_u64).unwrap_or(0);
    let entries = number("vring-num").min(MAX_QUEUE_ENTRIES);
    let sizes = [("vring-desc", 16 * entries), ("vring-avail", 6 + 2 * entries), ("vring-used", 6 + 8 * entries)];
    let rings = sizes.map(|(key, bytes)| number(key)..number(key).saturating_add(bytes));
    rings.into_iter().filter(|ring| ring.start != 0).collect()
}

/// Adds the addresses in QEMU of sorted pages of the guest. If two pages are as far apart in QEMU as in the guest, the
/// pages between them are assumed to lie between them in QEMU too; otherwise each half of the pages is looked up.
fn add_addresses(qmp: &mut Qmp, pages: &[u64], addresses: &mut Vec<Range<u64>>) -> Result<(), QmpError> {
    let (Some(first), Some(last)) = (pages.first(), pages.last()) else { return Ok(()) };
    if let (Some(first_address), Some(last_address)) = (host_address(qmp, *first)?, host_address(qmp, *last)?)
        && last_address.wrapping_sub(first_address) == last - first
    {
        let page_addresses = pages.iter().map(|page| first_address + (page - first));
        addresses.extend(page_addresses.map(|address| address..address + PAGE_BYTES));
        return Ok(());
    }
    if pages.len() == 1 {
        // There is no memory at this page.
        return Ok(());
    }
    let (lower, upper) = pages.split_at(pages.len() / 2);
    add_addresses(qmp, lower, addresses)?;
    add_addresses(qmp, upper, addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_has_three_rings_and_an_unused_one_none() {
        let queue = json!({"vring-num": 256, "vring-desc": 0x1000, "vring-avail": 0x2000, "vring-used": 0x3000});
        assert_eq!(queue_rings(&queue), [0x1000..0x2000, 0x2000..0x2000 + 518, 0x3000..0x3000 + 2054]);
        let unused = json!({"vring-num": 256, "vring-desc": 0, "vring-avail": 0, "vring-used": 0});
        assert_eq!(queue_rings(&unused), []);
        assert_eq!(queue_rings(&json!({"vring-num": u64::MAX, "vring-desc": u64::MAX})).len(), 1, "no overflow");
    }
}
