//! What to do next with a disk's overlays: decided from the durable state and from what QEMU and the directory have,
//! and from nothing else. So a process that was killed at any point, and its successor, do the same.

use super::state::OverlayState;

/// Most overlays on a disk when another one is put on it: each one makes the guest's reads slower.
pub const MAX_OVERLAYS: usize = 3;

/// What QEMU and the directory have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundOverlays {
    /// Epochs whose overlays are on the disk, oldest first. The guest writes to the last.
    pub chain: Vec<u64>,
    /// The overlay that the next mark puts on the disk, if QEMU has it.
    pub prepared: Option<u64>,
    /// The newest epoch of a merge that runs, or that has ended undismissed.
    pub merging: Option<u64>,
    /// Epochs that have files, oldest first.
    pub files: Vec<u64>,
}

/// The next step for a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverlayStep {
    /// Wait for the end of the merge.
    AwaitMerge { up_to: u64 },
    /// Sync the image, then record that it has these epochs. Their files are the only durable copy until then.
    RecordMerged { up_to: u64 },
    /// Remove the nodes and the file of a merged epoch.
    Delete { epoch: u64 },
    /// Record that checkpoints before this one are about to lose their disk.
    RaiseFloor { to: u64 },
    /// Start to merge these epochs.
    Merge { up_to: u64 },
    /// The device is on its image while there are overlays. Either an end or a first mark was interrupted in this
    /// QEMU, and the image has all writes; or this QEMU was started on the image, which is then an older disk. The
    /// caller knows which QEMU the overlays were made for.
    Resolve,
    /// Make the overlay for the next mark.
    Create { epoch: u64 },
    /// Nothing to do before the next mark.
    Done,
}

/// Why no overlay can be put on a disk now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MarkObstacle {
    #[error("overlays up to epoch {up_to} are being merged")]
    Merging { up_to: u64 },
    #[error("{MAX_OVERLAYS} overlays are not merged yet; their checkpoints are not committed, or merging is slow")]
    Behind,
    #[error("no overlay is prepared")]
    NotPrepared,
}

impl FoundOverlays {
    /// Returns the epoch that the next mark begins.
    #[must_use]
    pub fn next_epoch(&self, state: &OverlayState) -> u64 {
        self.chain.last().copied().unwrap_or(state.merged) + 1
    }

    /// Returns the overlay that can be put on the disk now.
    ///
    /// # Errors
    /// If a mark would fail, or the chain would become too long.
    pub fn check_mark(&self, state: &OverlayState) -> Result<u64, MarkObstacle> {
        match self.merging {
            Some(up_to) => Err(MarkObstacle::Merging { up_to }),
            None if self.chain.len() >= MAX_OVERLAYS => Err(MarkObstacle::Behind),
            None => self.prepared.filter(|epoch| *epoch == self.next_epoch(state)).ok_or(MarkObstacle::NotPrepared),
        }
    }

    /// Returns the next step. `committed`: the newest checkpoint that certainly counts. While the outcome of a commit
    /// is unknown, the checkpoint before it is still needed.
    #[must_use]
    pub fn next_step(&self, state: &OverlayState, committed: u64) -> OverlayStep {
        if let Some(up_to) = self.merging {
            return OverlayStep::AwaitMerge { up_to };
        }
        // A merge has taken these overlays off the disk.
        if let Some(below) = self.chain.first().map(|lowest| lowest - 1).filter(|below| *below > state.merged) {
            return OverlayStep::RecordMerged { up_to: below };
        }
        // Before the first mark, the only file is that of the prepared overlay.
        let next = self.next_epoch(state);
        let is_prepared = |epoch: u64| epoch == next && self.prepared == Some(next);
        if self.chain.is_empty() && self.files.iter().any(|epoch| *epoch > state.merged && !is_prepared(*epoch)) {
            return OverlayStep::Resolve;
        }
        let is_useless = |epoch: &u64| *epoch <= state.merged || state.is_dead(*epoch);
        // Newest first: the node of an overlay that was merged together with older ones still uses theirs.
        if let Some(epoch) = self.files.iter().copied().rev().find(is_useless) {
            return OverlayStep::Delete { epoch };
        }
        let closed = self.chain.split_last().map_or(&[][..], |(_, closed)| closed);
        // Only sealed epochs have checkpoints.
        let mergeable = committed.min(state.sealed);
        if let Some(up_to) = closed.iter().copied().filter(|epoch| *epoch <= mergeable).max() {
            return if state.floor < up_to {
                OverlayStep::RaiseFloor { to: up_to }
            } else {
                OverlayStep::Merge { up_to }
            };
        }
        if self.prepared == Some(next) { OverlayStep::Done } else { OverlayStep::Create { epoch: next } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(sealed: u64, floor: u64, merged: u64) -> OverlayState {
        OverlayState { sealed, floor, merged, ..OverlayState::new("disk.raw".into(), 4096) }
    }

    /// As after a restore of epoch 2, with epoch 6 as the fresh one.
    fn dead(mut state: OverlayState) -> OverlayState {
        state.restart_at(2, 6, "another QEMU".into());
        state
    }

    fn found(chain: &[u64], prepared: Option<u64>, files: &[u64]) -> FoundOverlays {
        FoundOverlays { chain: chain.into(), prepared, merging: None, files: files.into() }
    }

    #[test]
    fn each_remainder_of_a_killed_process_has_a_next_step() {
        let steps = [
            ("nothing yet", found(&[], None, &[]), state(0, 1, 1), 0, OverlayStep::Create { epoch: 2 }),
            ("file without node", found(&[], None, &[2]), state(0, 1, 1), 0, OverlayStep::Resolve),
            ("interrupted end", found(&[], None, &[3, 4]), state(2, 4, 2), 2, OverlayStep::Resolve),
            ("end, next one prepared", found(&[], Some(5), &[3, 4, 5]), state(2, 4, 2), 2, OverlayStep::Resolve),
            ("end of the first", found(&[], Some(3), &[2, 3]), state(1, 2, 1), 1, OverlayStep::Resolve),
            ("prepared", found(&[], Some(2), &[2]), state(0, 1, 1), 0, OverlayStep::Done),
            ("marked, not sealed", found(&[2, 3], Some(4), &[2, 3, 4]), state(1, 1, 1), 2, OverlayStep::Done),
            ("sealed, not committed", found(&[2, 3], Some(4), &[2, 3, 4]), state(2, 1, 1), 1, OverlayStep::Done),
            ("committed", found(&[2, 3], Some(4), &[2, 3, 4]), state(2, 1, 1), 2, OverlayStep::RaiseFloor { to: 2 }),
            ("floor raised", found(&[2, 3], Some(4), &[2, 3, 4]), state(2, 2, 1), 2, OverlayStep::Merge { up_to: 2 }),
            ("merged", found(&[3], Some(4), &[2, 3, 4]), state(2, 2, 1), 2, OverlayStep::RecordMerged { up_to: 2 }),
            ("recorded", found(&[3], Some(4), &[2, 3, 4]), state(2, 2, 2), 2, OverlayStep::Delete { epoch: 2 }),
            ("deleted", found(&[3], Some(4), &[3, 4]), state(2, 2, 2), 2, OverlayStep::Done),
            (
                "restored",
                found(&[2, 6], None, &[2, 3, 4, 6]),
                dead(state(4, 1, 1)),
                2,
                OverlayStep::Delete { epoch: 4 },
            ),
            (
                "of a restore",
                found(&[6], None, &[2, 6]),
                dead(state(4, 2, 1)),
                2,
                OverlayStep::RecordMerged { up_to: 5 },
            ),
            ("active overlay", found(&[3], None, &[3]), state(3, 2, 2), 3, OverlayStep::Create { epoch: 4 }),
        ];
        for (situation, found, state, committed, expected) in steps {
            assert_eq!(found.next_step(&state, committed), expected, "{situation}");
        }
        let merging = FoundOverlays { merging: Some(2), ..found(&[2, 3], Some(4), &[2, 3, 4]) };
        assert_eq!(merging.next_step(&state(2, 2, 1), 2), OverlayStep::AwaitMerge { up_to: 2 });
    }

    #[test]
    fn a_mark_needs_a_prepared_overlay_a_short_chain_and_no_merge() {
        let (state, ready) = (state(2, 1, 1), found(&[2, 3], Some(4), &[2, 3, 4]));
        assert_eq!(ready.check_mark(&state), Ok(4));
        let unprepared = FoundOverlays { prepared: None, ..ready.clone() };
        assert_eq!(unprepared.check_mark(&state), Err(MarkObstacle::NotPrepared));
        let merging = FoundOverlays { merging: Some(2), ..ready };
        assert_eq!(merging.check_mark(&state), Err(MarkObstacle::Merging { up_to: 2 }));
        assert_eq!(found(&[2, 3, 4], Some(5), &[]).check_mark(&state), Err(MarkObstacle::Behind));
    }
}
