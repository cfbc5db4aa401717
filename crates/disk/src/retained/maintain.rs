//! Releases a retained cache's memory to the host, in slices between the guest's requests.
//!
//! | task | when | frames |
//! |---|---|---|
//! | sweep | a new cache; a release by another server; the cache is discarded | all that no server needs, in order |
//! | shrink | cache and new memory exceed the guest's size | blocks from each part, because later reads are unknown |
//!
//! Several servers share the excess in proportion to the number of their blocks.

use super::{OtherUsers, RetainedCache};
use crate::block::BLOCK;
use crate::block_map::{BlockMap, Frame};

/// Most frames that one slice releases: about a millisecond's work.
const MAX_RELEASED: usize = 1024;
/// Most frames that one slice inspects.
const MAX_INSPECTED: Frame = 1 << 18;
/// Adjacent frames that are dropped together: blocks that were read together are adjacent, and will be read together.
const GROUP: Frame = 16;
/// Most groups that one slice inspects.
const MAX_GROUPS: usize = 1024;

/// Progress of sweep and shrink.
#[derive(Debug)]
pub(super) struct Maintenance {
    /// The next frame to sweep; `None`: the sweep is complete.
    sweep: Option<Frame>,
    /// Number of blocks to drop.
    excess: usize,
    /// The next group to inspect, in an order that is spread evenly over the memory.
    next: u64,
}

impl Maintenance {
    pub fn new() -> Self {
        Self { sweep: Some(0), excess: 0, next: 0 }
    }

    pub fn sweep_again(&mut self) {
        self.sweep = Some(0);
    }
}

impl RetainedCache {
    /// Updates the amount of memory to release. `room`: frames that the new guest has not allocated yet, if there is
    /// one.
    pub fn update(&mut self, room: Option<usize>) {
        let OtherUsers::Known(others) = &mut self.others else { return };
        let before = others.len();
        others.retain(super::claim::FrameClaim::is_held);
        if others.len() < before {
            tracing::debug!("another server has released its part of the retained cache");
            self.maintenance.sweep_again();
        }
        let other: usize = others.iter().map(super::claim::FrameClaim::count).sum();
        self.release_frames();
        let own = self.map.len();
        let Some(room) = room.filter(|_| self.maintenance.sweep.is_none() && own > 0) else { return };
        let excess = self.files.taken().saturating_sub(room);
        self.maintenance.excess = (excess as u128 * own as u128).div_ceil((own + other) as u128) as usize;
    }

    /// Works for one slice. Returns whether there is more to do.
    pub fn maintain(&mut self) -> bool {
        if matches!(self.others, OtherUsers::Unknown | OtherUsers::Guest) {
            return false;
        }
        if self.maintenance.sweep.is_some() {
            self.sweep();
        } else if self.maintenance.excess > 0 {
            self.shrink();
        }
        self.maintenance.sweep.is_some() || self.maintenance.excess > 0
    }

    /// Stops serving blocks; the memory is released in slices.
    pub fn discard(&mut self) {
        if self.is_discarded {
            return;
        }
        self.is_discarded = true;
        self.counts.dropped += self.map.len() as u64;
        self.map = BlockMap::new(0);
        self.done.clear();
        self.own.release_all();
        self.maintenance = Maintenance::new();
    }

    /// Returns whether nothing is left to serve or to release.
    #[must_use]
    pub fn is_done(&self) -> bool {
        let is_tended = self.maintenance.sweep.is_none() || !matches!(self.others, OtherUsers::Known(_));
        self.map.is_empty() && is_tended
    }

    /// Releases frames that no server needs: most of the old memory, if the guest cached little.
    fn sweep(&mut self) {
        let (mut given, mut inspected) = (0, 0);
        let ranges: Vec<(Frame, Frame)> = self.files.ranges().map(frames).collect();
        while let Some(at) = self.maintenance.sweep {
            let ahead = ranges.iter().filter(|(_, end)| at < *end).min();
            let Some((first, end)) = ahead.map(|(first, end)| (at.max(*first), *end)) else {
                self.maintenance.sweep = None;
                return;
            };
            let free = self.free_from(first, end.min(first.saturating_add(MAX_INSPECTED)), MAX_RELEASED - given);
            if free > 0 {
                if let Err(e) = self.punch(first, u64::from(free)) {
                    tracing::warn!("cannot release unused memory of the retained cache: {e}");
                    self.maintenance.sweep = None;
                    return;
                }
                given += free as usize;
            }
            let needed = self.needed_from(first + free, end);
            inspected += free + needed;
            self.maintenance.sweep = Some(first + free + needed);
            if given >= MAX_RELEASED || inspected >= MAX_INSPECTED {
                return;
            }
        }
    }

    /// Returns the number of adjacent frames from `at` on that no server needs, up to `most`.
    fn free_from(&self, at: Frame, end: Frame, most: usize) -> Frame {
        self.alike(at, end.min(at.saturating_add(Frame::try_from(most).unwrap_or(Frame::MAX))), |word| word)
    }

    /// Returns the number of adjacent frames from `at` on that a server needs.
    fn needed_from(&self, at: Frame, end: Frame) -> Frame {
        self.alike(at, end, |word| !word)
    }

    /// Returns the number of adjacent frames from `at` on whose bits are clear after `of` is applied to the words of
    /// all claims.
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

    /// Drops blocks until there is no excess.
    fn shrink(&mut self) {
        let groups = u64::from(self.map.frames().div_ceil(GROUP));
        let step = spread(groups);
        let mut dropped = 0;
        for _ in 0..MAX_GROUPS {
            if self.maintenance.excess == 0 || dropped >= MAX_RELEASED {
                break;
            }
            if self.maintenance.next >= groups {
                self.maintenance.excess = 0;
                break;
            }
            let first = (self.maintenance.next * step % groups) as Frame * GROUP;
            for frame in first..first.saturating_add(GROUP) {
                let Some(block) = self.map.block_in(frame).filter(|_| self.maintenance.excess > 0) else { continue };
                self.forget(block);
                self.counts.dropped += 1;
                (self.maintenance.excess, dropped) = (self.maintenance.excess - 1, dropped + 1);
            }
            // A group that is not dropped completely is inspected again by the next call.
            if self.maintenance.excess > 0 {
                self.maintenance.next += 1;
            }
        }
        self.release_frames();
    }
}

/// Returns the frames of a range of addresses.
fn frames((first, bytes): (u64, u64)) -> (Frame, Frame) {
    let first = first / BLOCK as u64;
    (first as Frame, (first + bytes / BLOCK as u64) as Frame)
}

/// Returns a step width that visits each of `count` places once, and soon reaches each part of them: near the golden
/// ratio, coprime to `count`.
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
    fn every_group_is_visited_once_and_each_part_soon() {
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
