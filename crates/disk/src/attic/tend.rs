//! Giving an attic's memory back to the host, in slices: the guest's requests come in between.
//!
//! | | when | what |
//! |---|---|---|
//! | sweep | it is there; another server has let go of its part; it is given up | every frame that no server needs, from the first to the last |
//! | shrink | attic and new memory are more than the guest is long | blocks, some of each part of the memory: which will be wanted is not known |
//!
//! Of several servers each drops as much of what is too much as it has of all that is kept.

use super::{Attic, Others};
use crate::block::BLOCK;
use crate::map::{BlockMap, Frame};

/// Frames that are given back in one slice, at most: about a millisecond's work.
const SLICE: usize = 1024;
/// Frames that are looked at in one slice, at most.
const LOOKED: Frame = 1 << 18;
/// Frames side by side that are dropped together: what was read together lies together, and is wanted together.
const GROUP: Frame = 16;
/// Groups that are looked at in one slice, at most.
const GROUPS: usize = 1024;

/// How far it is.
#[derive(Debug)]
pub(super) struct Tending {
    /// All before this frame was swept; `None`: all.
    sweep: Option<Frame>,
    /// Blocks that are to be dropped.
    excess: usize,
    /// The next group that is looked at, in an order that goes evenly over all.
    next: u64,
}

impl Tending {
    pub fn new() -> Self {
        Self { sweep: Some(0), excess: 0, next: 0 }
    }

    pub fn sweep_again(&mut self) {
        self.sweep = Some(0);
    }
}

impl Attic {
    /// See what has changed. `room`: frames that the new guest has not taken of the host yet, if there is one.
    pub fn look(&mut self, room: Option<usize>) {
        let Others::Known(others) = &mut self.others else { return };
        let before = others.len();
        others.retain(super::claim::Claim::is_held);
        if others.len() < before {
            tracing::debug!("another server needs nothing of the attic any more");
            self.tending.sweep_again();
        }
        let other: usize = others.iter().map(super::claim::Claim::count).sum();
        self.give_back();
        let own = self.map.len();
        let Some(room) = room.filter(|_| self.tending.sweep.is_none() && own > 0) else { return };
        let excess = self.files.taken().saturating_sub(room);
        self.tending.excess = (excess as u128 * own as u128).div_ceil((own + other) as u128) as usize;
    }

    /// Do a slice of what there is to do; whether there is more.
    pub fn tend(&mut self) -> bool {
        if matches!(self.others, Others::Unknown | Others::Guest) {
            return false;
        }
        if self.tending.sweep.is_some() {
            self.sweep();
        } else if self.tending.excess > 0 {
            self.shrink();
        }
        self.tending.sweep.is_some() || self.tending.excess > 0
    }

    /// Let nobody have anything of it any more; its memory is given back in slices.
    pub fn give_up(&mut self) {
        if self.is_given_up {
            return;
        }
        self.is_given_up = true;
        self.told.dropped += self.map.len() as u64;
        self.map = BlockMap::new(0);
        self.done.clear();
        self.own.let_go_of_all();
        self.tending = Tending::new();
    }

    /// Whether nothing is left to be had or to be given back.
    #[must_use]
    pub fn is_done(&self) -> bool {
        let is_tended = self.tending.sweep.is_none() || !matches!(self.others, Others::Known(_));
        self.map.is_empty() && is_tended
    }

    /// Give frames back that nobody needs: most of the former memory, where the guest did not cache much.
    fn sweep(&mut self) {
        let (mut given, mut looked) = (0, 0);
        let ranges: Vec<(Frame, Frame)> = self.files.ranges().map(frames).collect();
        while let Some(at) = self.tending.sweep {
            let ahead = ranges.iter().filter(|(_, end)| at < *end).min();
            let Some((first, end)) = ahead.map(|(first, end)| (at.max(*first), *end)) else {
                self.tending.sweep = None;
                return;
            };
            let free = self.free_from(first, end.min(first.saturating_add(LOOKED)), SLICE - given);
            if free > 0 {
                if let Err(e) = self.punch(first, u64::from(free)) {
                    tracing::warn!("what the attic does not need is not given back: {e}");
                    self.tending.sweep = None;
                    return;
                }
                given += free as usize;
            }
            let needed = self.needed_from(first + free, end);
            looked += free + needed;
            self.tending.sweep = Some(first + free + needed);
            if given >= SLICE || looked >= LOOKED {
                return;
            }
        }
    }

    /// How many frames from `at` on nobody needs, up to `most`.
    fn free_from(&self, at: Frame, end: Frame, most: usize) -> Frame {
        self.alike(at, end.min(at.saturating_add(Frame::try_from(most).unwrap_or(Frame::MAX))), |word| word)
    }

    /// How many frames from `at` on somebody needs.
    fn needed_from(&self, at: Frame, end: Frame) -> Frame {
        self.alike(at, end, |word| !word)
    }

    /// How many frames from `at` on have no bit in what `of` makes of the words of all claims.
    fn alike(&self, at: Frame, end: Frame, of: impl Fn(u64) -> u64) -> Frame {
        let mut frame = at;
        while frame < end {
            let bits = of(self.needed(frame as usize / 64)) >> (frame % 64);
            let alike = bits.trailing_zeros().min(64 - frame % 64);
            frame = frame.saturating_add(alike);
            if bits != 0 {
                break;
            }
        }
        frame.min(end) - at
    }

    /// Drop blocks until nothing is too much.
    fn shrink(&mut self) {
        let groups = u64::from(self.map.frames().div_ceil(GROUP));
        let step = spread(groups);
        let mut dropped = 0;
        for _ in 0..GROUPS {
            if self.tending.excess == 0 || dropped >= SLICE {
                break;
            }
            if self.tending.next >= groups {
                self.tending.excess = 0;
                break;
            }
            let first = (self.tending.next * step % groups) as Frame * GROUP;
            for frame in first..first.saturating_add(GROUP) {
                let Some(block) = self.map.block_in(frame).filter(|_| self.tending.excess > 0) else { continue };
                self.forget(block);
                self.told.dropped += 1;
                (self.tending.excess, dropped) = (self.tending.excess - 1, dropped + 1);
            }
            // What is left of a group is looked at again.
            if self.tending.excess > 0 {
                self.tending.next += 1;
            }
        }
        self.give_back();
    }
}

/// Frames of a range of addresses.
fn frames((first, bytes): (u64, u64)) -> (Frame, Frame) {
    let first = first / BLOCK as u64;
    (first as Frame, (first + bytes / BLOCK as u64) as Frame)
}

/// A step that comes to each of `count` places once, and soon to each part of them: near the golden section, without a common divisor.
fn spread(count: u64) -> u64 {
    let divides_both = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a > 1
    };
    let mut step = (count as f64 * 0.618) as u64;
    while divides_both(step.max(1), count) {
        step += 1;
    }
    step.max(1)
}

#[cfg(test)]
mod tests {
    use super::spread;

    #[test]
    fn every_group_comes_once_and_each_part_soon() {
        for count in [1u64, 2, 3, 4, 6, 16, 30, 97, 256, 1000, 65536] {
            let order: Vec<_> = (0..count).map(|n| n * spread(count) % count).collect();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..count), "{count}: {order:?}");
            if count >= 16 {
                for part in 0..4 {
                    let is_there = order.iter().take(8).any(|group| (part..part + 1).contains(&(group * 4 / count)));
                    assert!(is_there, "{count}: {order:?}");
                }
            }
        }
    }
}
