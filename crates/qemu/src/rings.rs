//! Where the rings of a guest's virtio devices are. QEMU itself reads this memory when it loads the devices.

use crate::qmp::{Qmp, QmpError};
use crate::ramblock::host_address;
use rekindle_pages::PAGE_SIZE;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::ops::Range;

/// Largest number of queues of a virtio device in QEMU.
const MOST_QUEUES: u64 = 1024;
const PAGE: u64 = PAGE_SIZE as u64;

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
        for queue in 0..MOST_QUEUES {
            let asked = json!({ "path": path, "queue": queue });
            let reply: Value = match qmp.execute("x-query-virtio-queue-status", asked) {
                // The device has no queue of this number, or is not started.
                Err(QmpError::Refused { .. }) => break,
                other => other?,
            };
            for ring in parts(&reply) {
                pages.extend((ring.start / PAGE..ring.end.div_ceil(PAGE)).map(|page| page * PAGE));
            }
        }
    }
    let pages: Vec<u64> = pages.into_iter().collect();
    let mut found = Vec::new();
    addresses(qmp, &pages, &mut found)?;
    Ok(found)
}

/// Returns the descriptor table, available ring and used ring of a split queue in guest memory (virtio 1.2, 2.7). A
/// packed queue is not larger.
fn parts(queue: &Value) -> Vec<Range<u64>> {
    let number = |key: &str| queue.get(key).and_then(Value::as_u64).unwrap_or(0);
    let entries = number("vring-num").min(1 << 15);
    let parts = [("vring-desc", 16 * entries), ("vring-avail", 6 + 2 * entries), ("vring-used", 6 + 8 * entries)];
    let parts = parts.map(|(key, bytes)| number(key)..number(key).saturating_add(bytes));
    parts.into_iter().filter(|part| part.start != 0).collect()
}

/// Finds the addresses in QEMU of sorted pages of the guest. If two pages are as far apart in QEMU as in the guest,
/// the pages between them are assumed to lie between them in QEMU too.
fn addresses(qmp: &mut Qmp, pages: &[u64], found: &mut Vec<Range<u64>>) -> Result<(), QmpError> {
    let (Some(first), Some(last)) = (pages.first(), pages.last()) else { return Ok(()) };
    let (Some(from), Some(to)) = (host_address(qmp, *first)?, host_address(qmp, *last)?) else {
        return match pages {
            [_] => Ok(()),
            _ => halves(qmp, pages, found),
        };
    };
    if to.wrapping_sub(from) != last - first {
        return halves(qmp, pages, found);
    }
    found.extend(pages.iter().map(|page| from + (page - first)..from + (page - first) + PAGE));
    Ok(())
}

fn halves(qmp: &mut Qmp, pages: &[u64], found: &mut Vec<Range<u64>>) -> Result<(), QmpError> {
    let (before, after) = pages.split_at(pages.len() / 2);
    addresses(qmp, before, found)?;
    addresses(qmp, after, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_has_three_parts_and_an_unused_one_none() {
        let queue = json!({"vring-num": 256, "vring-desc": 0x1000, "vring-avail": 0x2000, "vring-used": 0x3000});
        assert_eq!(parts(&queue), [0x1000..0x2000, 0x2000..0x2000 + 518, 0x3000..0x3000 + 2054]);
        let unused = json!({"vring-num": 256, "vring-desc": 0, "vring-avail": 0, "vring-used": 0});
        assert_eq!(parts(&unused), []);
        assert_eq!(parts(&json!({"vring-num": u64::MAX, "vring-desc": u64::MAX})).len(), 1, "no overflow");
    }
}
