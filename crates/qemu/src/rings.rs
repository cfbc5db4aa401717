//! Finds the rings of a guest's virtio devices in QEMU's memory. QEMU itself reads this memory when it loads the
//! devices, so it must be filled before.

use crate::qmp::{Qmp, QmpError};
use crate::ramblock::host_address;
use crate::virtio_queues::{self, RingAddresses, VirtioQueue};
use rekindle_pages::PAGE_SIZE;
use std::collections::BTreeSet;
use std::ops::Range;

/// Largest number of entries of a queue (virtio 1.2, 2.7).
const MAX_QUEUE_ENTRIES: u64 = 1 << 15;
const PAGE_BYTES: u64 = PAGE_SIZE as u64;

/// Returns the rings of all virtio devices, as whole pages at addresses in QEMU. A device that the guest does not use
/// has no rings. The guest may run.
///
/// The result describes the present: a guest that resets a device may move its rings.
///
/// # Errors
/// [`QmpError::Refused`] if QEMU does not have `x-query-virtio`, an unstable command; other errors when QEMU does not answer.
pub fn of(qmp: &mut Qmp) -> Result<Vec<Range<u64>>, QmpError> {
    let mut pages = BTreeSet::new();
    for queue in virtio_queues::of_running(qmp)? {
        for ring in queue_rings(&queue) {
            let page_numbers = ring.start / PAGE_BYTES..ring.end.div_ceil(PAGE_BYTES);
            pages.extend(page_numbers.map(|number| number * PAGE_BYTES));
        }
    }
    let pages: Vec<u64> = pages.into_iter().collect();
    let mut addresses = Vec::new();
    add_addresses(qmp, &pages, &mut addresses)?;
    Ok(addresses)
}

/// Returns the descriptor table, available ring and used ring of a split queue in guest memory (virtio 1.2, 2.7). A
/// packed queue is not larger.
fn queue_rings(queue: &VirtioQueue) -> Vec<Range<u64>> {
    let entries = queue.entries.min(MAX_QUEUE_ENTRIES);
    let RingAddresses { descriptors, available, used } = queue.rings;
    let sizes = [(descriptors, 16 * entries), (available, 6 + 2 * entries), (used, 6 + 8 * entries)];
    let rings = sizes.map(|(start, bytes)| start..start.saturating_add(bytes));
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
        let rings = |entries: u64, descriptors: u64, available: u64, used: u64| {
            let rings = RingAddresses { descriptors, available, used };
            queue_rings(&VirtioQueue { device: String::new(), number: 0, entries, offered_entries: None, rings })
        };
        assert_eq!(rings(256, 0x1000, 0x2000, 0x3000), [0x1000..0x2000, 0x2000..0x2000 + 518, 0x3000..0x3000 + 2054]);
        assert_eq!(rings(256, 0, 0, 0), []);
        assert_eq!(rings(u64::MAX, u64::MAX, 0, 0).len(), 1, "no overflow");
    }
}
