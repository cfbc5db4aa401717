//! Releases a retained cache's memory to the host, in slices between the guest's requests.
//!
//! | task | when | frames |
//! |---|---|---|
//! | sweep | a new cache; a release by another server; the cache is discarded | all that no server needs, in order |
//! | shrink | cache and new memory exceed the guest's size | blocks from each part, because later reads are unknown |
//!
//! Several servers share the excess in proportion to the number of their blocks.

use super::claim::FrameClaim;
use super::{OtherUsers, RetainedCache};
use crate::block::BLOCK;
use crate::block_map::{BlockMap, Frame};
use std::ops::Range;

/// Most frames that one slice releases: about a millisecond's work.
const MAX_RELEASED_FRAMES: usize = 1024;
/// Most frames that one slice inspects.
const MAX_INSPECTED_FRAMES: Frame = 1 << 18;
/// Adjacent frames that are dropped together: blocks that were read together are adjacent, and will be read together.
const GROUP_FRAMES: Frame = 16;
/// Most groups that one slice inspects.
const MAX_INSPECTED_GROUPS: usize = 1024;

/// Progress of sweep and shrink.
#[derive(Debug)]
pub(super) struct Maintenance {
    /// The next frame to sweep; `None`: the sweep is complete.
    sweep: Option<Frame>,
    /// Number of blocks to drop.
    excess: usize,
    /// The next group to inspect, in an order that is spread evenly over the memory.
    next_group: u64,
}

impl Maintenance {
    pub fn new() -> Self {
        Self { sweep: Some(0), excess: 0, next_group: 0 }
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
        let previous_count = others.len();
        others.retain(FrameClaim::is_held);
        if others.len() < previous_count {
            tracing::debug!("another server has released its part of the retained cache");
            self.maintenance.sweep_again();
        }
        let other_frames: usize = others.iter().map(FrameClaim::count).sum();
        self.release_frames();
        let own_frames = self.map.len();
        let is_swept = self.maintenance.sweep.is_none();
        let Some(room) = room.filter(|_| is_swept && own_frames > 0) else { return };
        let excess = self.files.allocated_frames().saturating_sub(room);
        let own_excess = (excess as u128 * own_frames as u128).div_ceil((own_frames + other_frames) as u128);
        self.maintenance.excess = own_excess as usize;
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
        self.unneeded_frames.clear();
        self.own_claim.release_all();
        self.maintenance = Maintenance::new();
    }

    /// Returns whether nothing is left to serve or to release.
    #[must_use]
    pub fn is_done(&self) -> bool {
        let is_swept_or_kept = self.maintenance.sweep.is_none() || !matches!(self.others, OtherUsers::Known(_));
        self.map.is_empty() && is_swept_or_kept
    }

    /// Releases frames that no server needs: most of the old memory, if the guest cached little.
    fn sweep(&mut self) {
        let (mut released, mut inspected) = (0, 0);
        let ranges: Vec<Range<Frame>> = self.files.address_ranges().map(frames_of).collect();
        while let Some(next) = self.maintenance.sweep {
            let unswept = ranges.iter().filter(|range| next < range.end).min_by_key(|range| range.start);
            let Some(Range { start, end }) = unswept.map(|range| next.max(range.start)..range.end) else {
                self.maintenance.sweep = None;
                return;
            };
            let max_end = end.min(start.saturating_add(MAX_INSPECTED_FRAMES));
            let unneeded = self.count_unneeded(start..max_end, MAX_RELEASED_FRAMES - released);
            if unneeded > 0 {
                if let Err(e) = self.release_run(start, u64::from(unneeded)) {
                    tracing::warn!("cannot release unused memory of the retained cache: {e}");
                    self.maintenance.sweep = None;
                    return;
                }
                released += unneeded as usize;
            }
            let needed = self.count_needed(start + unneeded..end);
            inspected += unneeded + needed;
            self.maintenance.sweep = Some(start + unneeded + needed);
            if released >= MAX_RELEASED_FRAMES || inspected >= MAX_INSPECTED_FRAMES {
                return;
            }
        }
    }

    /// Returns the number of adjacent frames at the start of a range that no server needs, up to `max`.
    fn count_unneeded(&self, frames: Range<Frame>, max: usize) -> Frame {
        let max_end = frames.start.saturating_add(Frame::try_from(max).unwrap_or(Frame::MAX));
        self.count_clear(frames.start..frames.end.min(max_end), |word| word)
    }

    /// Returns the number of adjacent frames at the start of a range that a server needs.
    fn count_needed(&self, frames: Range<Frame>) -> Frame {
        self.count_clear(frames, |word| !word)
    }

    /// Returns the number of adjacent frames at the start of a range whose bits are clear after `transform` is applied
    /// to the words of all claims.
    fn count_clear(&self, frames: Range<Frame>, transform: impl Fn(u64) -> u64) -> Frame {
        let mut frame = frames.start;
        while frame < frames.end {
            let bits = transform(self.needed_word(frame as usize / 64)) >> (frame % 64);
            let clear = bits.trailing_zeros().min(64 - frame % 64);
            frame = frame.saturating_add(clear);
            if bits != 0 {
                break;
            }
        }
        frame.min(frames.end) - frames.start
    }

    /// Drops blocks until there is no excess.
    fn shrink(&mut self) {
        let groups = u64::from(self.map.frames().div_ceil(GROUP_FRAMES));
        let step = spreading_step(groups);
        let mut dropped = 0;
        for _ in 0..MAX_INSPECTED_GROUPS {
            if self.maintenance.excess == 0 || dropped >= MAX_RELEASED_FRAMES {
                break;
            }
            if self.maintenance.next_group >= groups {
                self.maintenance.excess = 0;
                break;
            }
            let first = (self.maintenance.next_group * step % groups) as Frame * GROUP_FRAMES;
            for frame in first..first.saturating_add(GROUP_FRAMES) {
                let Some(block) = self.map.block_in(frame).filter(|_| self.maintenance.excess > 0) else { continue };
                self.drop_block(block);
                self.maintenance.excess -= 1;
                dropped += 1;
            }
            // A group that is not dropped completely is inspected again by the next call.
            if self.maintenance.excess > 0 {
                self.maintenance.next_group += 1;
            }
        }
        self.release_frames();
    }
}

/// Returns the frames of a range of addresses.
fn frames_of(addresses: Range<u64>) -> Range<Frame> {
    let first = addresses.start / BLOCK as u64;
    let count = (addresses.end - addresses.start) / BLOCK as u64;
    first as Frame..(first + count) as Frame
}

/// Returns a step width that visits each of `count` places once, and soon reaches each part of them: near the golden
/// ratio, coprime to `count`.
fn spreading_step(count: u64) -> u64 {
    let have_common_divisor = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a > 1
    };
    let mut step = (count as f64 * 0.618) as u64;
    while have_common_divisor(step.max(1), count) {
        step += 1;
    }
    step.max(1)
}

#[cfg(test)]
mod tests {
    use super::spreading_step;

    #[test]
    fn every_group_is_visited_once_and_each_part_soon() {
        for count in [1u64, 2, 3, 4, 6, 16, 30, 97, 256, 1000, 65536] {
            let order: Vec<_> = (0..count).map(|n| n * spreading_step(count) % count).collect();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..count), "{count}: {order:?}");
            if count >= 16 {
                for part in 0..4 {
                    let is_visited = order.iter().take(8).any(|group| (part..part + 1).contains(&(group * 4 / count)));
                    assert!(is_visited, "{count}: {order:?}");
                }
            }
        }
    }
}
