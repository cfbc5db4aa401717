//! Random histories of guests that boot, read, write, are marked and set back, on a disk whose blocks have versions.

#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const BLOCKS: u64 = 24;
const CAPACITY: u64 = BLOCKS * 4096;

/// Returns the state of a disk of `capacity` bytes whose image was last changed at `time`.
const fn image(capacity: u64, time: i128) -> ImageState {
    ImageState { capacity, stamp: Some(ImageStamp { bytes: CAPACITY, modified_ns: time, changed_ns: time }) }
}

const IMAGE: ImageState = image(CAPACITY, 1);

#[derive(Debug, Clone)]
enum LedgerAction {
    Boot,
    Read(Range<u64>),
    Write(Range<u64>),
    LedgerMark,
    /// Continue from one of the marks, if possible.
    Resume(prop::sample::Index),
    /// The server is killed and another one starts, with or without a write by another process in between.
    Server(Option<u64>),
    /// The image grows.
    Grow,
}

fn step() -> impl Strategy<Value = LedgerAction> {
    let range = (0..BLOCKS, 1..4u64).prop_map(|(at, count)| at..(at + count).min(BLOCKS));
    prop_oneof![
        2 => Just(LedgerAction::Boot),
        10 => range.clone().prop_map(LedgerAction::Read),
        6 => range.prop_map(LedgerAction::Write),
        5 => Just(LedgerAction::LedgerMark),
        6 => any::<prop::sample::Index>().prop_map(LedgerAction::Resume),
        1 => prop::option::of(0..BLOCKS).prop_map(LedgerAction::Server),
        1 => Just(LedgerAction::Grow),
    ]
}

/// The version of each block that a guest has read or written.
type KnownBlocks = BTreeMap<u64, u64>;

#[derive(Default)]
struct LedgerModel {
    disk: [u64; BLOCKS as usize],
    version: u64,
    bytes: u64,
    /// `None`: the guest is older than the server.
    guest: Option<KnownBlocks>,
}

impl LedgerModel {
    fn write(&mut self, block: u64) {
        self.version += 1;
        self.disk[block as usize] = self.version;
    }

    fn holds(&self, known: &KnownBlocks) -> bool {
        known.iter().all(|(block, version)| self.disk[*block as usize] == *version)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// A guest is set back to a mark only if all blocks that it had touched are unchanged, and always if none of them
    /// was written.
    #[test]
    fn no_guest_continues_from_a_stale_mark(steps in prop::collection::vec(step(), 1..60)) {
        let (mut ledger, mut model) = (Ledger::default(), LedgerModel { bytes: CAPACITY, ..LedgerModel::default() });
        // Moment, the guest's blocks, bytes, whether any of the blocks was written since (also between two servers).
        let mut marks: Vec<(Moment, KnownBlocks, u64, bool)> = Vec::new();
        for step in steps {
            match step {
                LedgerAction::Boot => {
                    ledger.start_boot();
                    model.guest = Some(KnownBlocks::new());
                }
                LedgerAction::Read(range) => {
                    ledger.record_read(range.clone());
                    let disk = model.disk;
                    model.guest.iter_mut().for_each(|guest| {
                        guest.extend(range.clone().map(|block| (block, disk[block as usize])));
                    });
                }
                LedgerAction::Write(range) => {
                    ledger.record_write(range.clone());
                    for block in range.clone() {
                        model.write(block);
                    }
                    let disk = model.disk;
                    model.guest.iter_mut().for_each(|guest| {
                        guest.extend(range.clone().map(|block| (block, disk[block as usize])));
                    });
                    for (_, known, _, is_written) in &mut marks {
                        *is_written |= range.clone().any(|block| known.contains_key(&block));
                    }
                }
                LedgerAction::LedgerMark => {
                    let moment = ledger.mark(image(model.bytes, 1));
                    prop_assert_eq!(moment.is_some(), model.guest.is_some());
                    if let (Some(moment), Some(guest)) = (moment, &model.guest) {
                        prop_assert!(model.holds(guest), "a guest knows its disk");
                        marks.push((moment, guest.clone(), model.bytes, false));
                    }
                }
                LedgerAction::Resume(index) if !marks.is_empty() => {
                    let (moment, known, bytes, is_written) = index.get(&marks).clone();
                    let resumed = ledger.resume(moment, &image(model.bytes, 1));
                    if resumed.is_ok() {
                        prop_assert!(model.holds(&known), "a guest is set back, but its disk has changed");
                        prop_assert_eq!(bytes, model.bytes);
                        model.guest = Some(known);
                    } else if moment.server == ledger.server && !is_written && bytes == model.bytes {
                        prop_assert_eq!(resumed, Err(StaleReason::Dropped), "none of its blocks was written");
                    }
                }
                LedgerAction::Resume(_) => {}
                LedgerAction::Server(other) => {
                    ledger = Ledger::default();
                    model.guest = None;
                    other.into_iter().for_each(|block| model.write(block));
                }
                LedgerAction::Grow => model.bytes += 4096,
            }
        }
    }
}

#[test]
fn each_reason_is_reported() {
    let mut ledger = Ledger::default();
    assert_eq!(ledger.mark(IMAGE), None, "the guest is older than the server");
    ledger.start_boot();
    ledger.record_read(3..5);
    let moment = ledger.mark(IMAGE).unwrap();
    assert_eq!(ledger.check(moment, &IMAGE), Ok(()));
    assert_eq!(
        ledger.check(moment, &image(2 * CAPACITY, 1)),
        Err(StaleReason::Resized { then: CAPACITY, now: 2 * CAPACITY })
    );
    assert_eq!(ledger.check(moment, &image(CAPACITY, 2)), Err(StaleReason::Foreign));
    assert_eq!(ledger.check(Moment { server: Uuid::nil(), ..moment }, &IMAGE), Err(StaleReason::Server));
    ledger.record_write(0..3);
    ledger.record_write(5..9);
    // The guest has changed the image, so the stamp is no evidence.
    assert_eq!(ledger.check(moment, &image(CAPACITY, 2)), Ok(()));
    ledger.record_write(4..20);
    assert_eq!(ledger.check(moment, &IMAGE), Err(StaleReason::Written { block: 4 }));
    let first = ledger.mark(IMAGE).unwrap();
    for _ in 0..MAX_MARKS {
        ledger.mark(IMAGE).unwrap();
    }
    assert_eq!(ledger.resume(first, &IMAGE), Err(StaleReason::Dropped));
    assert_eq!(ledger.touched_count(), Some(20), "a rejected moment changes nothing");
}

#[test]
fn a_guest_has_touched_what_it_has_written() {
    let mut ledger = Ledger::default();
    ledger.start_boot();
    ledger.record_write(7..8);
    let moment = ledger.mark(IMAGE).unwrap();
    ledger.record_write(7..8);
    assert_eq!(ledger.check(moment, &IMAGE), Err(StaleReason::Written { block: 7 }));
}
