//! Random histories of guests that boot, read, write, are marked and set back, on a disk whose blocks have versions.

#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const BLOCKS: u64 = 24;
const CAPACITY: u64 = BLOCKS * 4096;
const LOOK: Option<Look> = Some((CAPACITY, 1, 1));

#[derive(Debug, Clone)]
enum Step {
    Boot,
    Read(Range<u64>),
    Write(Range<u64>),
    Mark,
    /// Continue from one of the marks, if possible.
    GoOn(prop::sample::Index),
    /// The server is killed and another one starts, with or without a write by another process in between.
    Server(Option<u64>),
    /// The image grows.
    Grow,
}

fn step() -> impl Strategy<Value = Step> {
    let range = (0..BLOCKS, 1..4u64).prop_map(|(at, count)| at..(at + count).min(BLOCKS));
    prop_oneof![
        2 => Just(Step::Boot),
        10 => range.clone().prop_map(Step::Read),
        6 => range.prop_map(Step::Write),
        5 => Just(Step::Mark),
        6 => any::<prop::sample::Index>().prop_map(Step::GoOn),
        1 => prop::option::of(0..BLOCKS).prop_map(Step::Server),
        1 => Just(Step::Grow),
    ]
}

/// The version of each block that a guest has read or written.
type Known = BTreeMap<u64, u64>;

#[derive(Default)]
struct World {
    disk: [u64; BLOCKS as usize],
    version: u64,
    bytes: u64,
    /// `None`: the guest is older than the server.
    guest: Option<Known>,
}

impl World {
    fn write(&mut self, block: u64) {
        self.version += 1;
        self.disk[block as usize] = self.version;
    }

    fn holds(&self, known: &Known) -> bool {
        known.iter().all(|(block, version)| self.disk[*block as usize] == *version)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// A guest is set back to a mark only if all blocks that it had touched are unchanged, and always if none of them was written.
    #[test]
    fn no_guest_continues_from_a_stale_mark(steps in prop::collection::vec(step(), 1..60)) {
        let (mut ledger, mut world) = (Ledger::default(), World { bytes: CAPACITY, ..World::default() });
        // Moment, the guest's blocks, bytes, whether any of the blocks was written since (also between two servers).
        let mut marks: Vec<(Moment, Known, u64, bool)> = Vec::new();
        for step in steps {
            match step {
                Step::Boot => {
                    ledger.begin();
                    world.guest = Some(Known::new());
                }
                Step::Read(range) => {
                    ledger.reads(range.clone());
                    let disk = world.disk;
                    world.guest.iter_mut().for_each(|guest| {
                        guest.extend(range.clone().map(|block| (block, disk[block as usize])));
                    });
                }
                Step::Write(range) => {
                    ledger.changes(range.clone());
                    for block in range.clone() {
                        world.write(block);
                    }
                    let disk = world.disk;
                    world.guest.iter_mut().for_each(|guest| {
                        guest.extend(range.clone().map(|block| (block, disk[block as usize])));
                    });
                    for (_, known, _, is_written) in &mut marks {
                        *is_written |= range.clone().any(|block| known.contains_key(&block));
                    }
                }
                Step::Mark => {
                    let moment = ledger.mark(world.bytes, LOOK);
                    prop_assert_eq!(moment.is_some(), world.guest.is_some());
                    if let (Some(moment), Some(guest)) = (moment, &world.guest) {
                        prop_assert!(world.holds(guest), "a guest knows its disk");
                        marks.push((moment, guest.clone(), world.bytes, false));
                    }
                }
                Step::GoOn(index) if !marks.is_empty() => {
                    let (moment, known, bytes, is_written) = index.get(&marks).clone();
                    let went = ledger.go_on(moment, world.bytes, LOOK);
                    if went.is_ok() {
                        prop_assert!(world.holds(&known), "a guest is set back, but its disk has changed");
                        prop_assert_eq!(bytes, world.bytes);
                        world.guest = Some(known);
                    } else if moment.server == ledger.server && !is_written && bytes == world.bytes {
                        prop_assert_eq!(went, Err(Void::Dropped), "none of its blocks was written");
                    }
                }
                Step::GoOn(_) => {}
                Step::Server(somebody) => {
                    ledger = Ledger::default();
                    world.guest = None;
                    somebody.into_iter().for_each(|block| world.write(block));
                }
                Step::Grow => world.bytes += 4096,
            }
        }
    }
}

#[test]
fn each_reason_is_reported() {
    let mut ledger = Ledger::default();
    assert_eq!(ledger.mark(CAPACITY, LOOK), None, "the guest is older than the server");
    ledger.begin();
    ledger.reads(3..5);
    let moment = ledger.mark(CAPACITY, LOOK).unwrap();
    assert_eq!(ledger.check(moment, CAPACITY, LOOK), Ok(()));
    assert_eq!(ledger.check(moment, 2 * CAPACITY, LOOK), Err(Void::Resized { then: CAPACITY, now: 2 * CAPACITY }));
    assert_eq!(ledger.check(moment, CAPACITY, Some((CAPACITY, 2, 2))), Err(Void::Foreign));
    assert_eq!(ledger.check(Moment { server: Uuid::nil(), ..moment }, CAPACITY, LOOK), Err(Void::Server));
    ledger.changes(0..3);
    ledger.changes(5..9);
    // The guest has changed it, so the stamp is no evidence.
    assert_eq!(ledger.check(moment, CAPACITY, Some((CAPACITY, 2, 2))), Ok(()));
    ledger.changes(4..20);
    assert_eq!(ledger.check(moment, CAPACITY, LOOK), Err(Void::Written { block: 4 }));
    let first = ledger.mark(CAPACITY, LOOK).unwrap();
    for _ in 0..MARKS {
        ledger.mark(CAPACITY, LOOK).unwrap();
    }
    assert_eq!(ledger.go_on(first, CAPACITY, LOOK), Err(Void::Dropped));
    assert_eq!(ledger.touched(), Some(20), "a rejected moment changes nothing");
}

#[test]
fn a_guest_has_touched_what_it_has_written() {
    let mut ledger = Ledger::default();
    ledger.begin();
    ledger.changes(7..8);
    let moment = ledger.mark(CAPACITY, LOOK).unwrap();
    ledger.changes(7..8);
    assert_eq!(ledger.check(moment, CAPACITY, LOOK), Err(Void::Written { block: 7 }));
}
