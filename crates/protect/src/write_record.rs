//! The write record of a pager, and whether a protector can use it for a checkpoint while the restore still fills.
//!
//! A restored guest runs while the *pager*, a process, still loads (*fills*) its memory. The *write record* shows which
//! pages the guest has written since the restore.
//!
//! The pager registers the memory, so its descriptor is the only record of which pages the guest has written. The pager
//! may release the memory, and the record with it, only while it holds `fill.lock`. A protector that relies on the
//! record holds the lock the whole time. The lock of a killed process is free.
//!
//! ```text
//!  pager      loads ... fill complete: writes `filled`, continues to serve
//!  protector  locks, checkpoints ...      next pause: own descriptor, writes `handed-over`, unlocks
//!  pager                                                                  lock free: closes, removes fill.json
//! ```

use crate::error::CheckpointError;
use crate::fill::{Fill, FillStage, is_served, try_lock_write_record};
use crate::progress::{CommitId, Progress};
use rekindle_qemu::vmm::Vmm;
use rekindle_store::StoreUrl;
use rekindle_vm::rundir::RunDir;
use std::fs::File;

/// The write record of the pager of a restore that still fills. The pager keeps it as long as this value exists.
#[derive(Debug)]
pub(crate) struct LockedWriteRecord {
    rundir: RunDir,
    pub(crate) fill: Fill,
    _lock: File,
}

/// Returns the error for a fill during which no checkpoint is possible.
fn still_filling(why: &str) -> CheckpointError {
    CheckpointError::Filling { why: why.into() }
}

impl LockedWriteRecord {
    /// Locks the pager's write record. Returns `None` if all of the VM's memory is loaded and no pager uses it.
    ///
    /// # Errors
    /// [`CheckpointError::Filling`]: a fill or its pager has not ended, and the write record cannot be used now.
    pub(crate) fn take(rundir: &RunDir) -> Result<Option<Self>, CheckpointError> {
        if Fill::read(rundir)?.is_none() {
            return Ok(None);
        }
        let Some(lock) = try_lock_write_record(rundir)? else {
            return Err(still_filling("its pager is about to release it, or another protector uses the write record"));
        };
        let Some(fill) = Fill::read(rundir)? else { return Ok(None) };
        match fill.stage {
            FillStage::Filling => {
                let record = Self { rundir: rundir.clone(), fill, _lock: lock };
                record.require_pager()?;
                Ok(Some(record))
            }
            // The pager ends as soon as it has the lock, which is released when this function returns.
            FillStage::Filled | FillStage::HandedOver if is_served(rundir)? => {
                Err(still_filling("all of it is loaded, and its pager is about to end"))
            }
            FillStage::Filled => Err(still_filling("it has no pager; start one: rekindle recover")),
            FillStage::HandedOver => Ok(None),
        }
    }

    /// Checks that a pager serves: without a pager, the devices of a stopped guest could wait for a missing page.
    pub(crate) fn require_pager(&self) -> Result<(), CheckpointError> {
        match is_served(&self.rundir)? {
            true => Ok(()),
            false => Err(still_filling("it has no pager; start one: rekindle recover")),
        }
    }

    /// Returns whether the fill is complete, so that the next pause can end the pager.
    pub(crate) fn is_filled(&self) -> bool {
        matches!(Fill::read(&self.rundir), Ok(Some(Fill { stage: FillStage::Filled, .. })))
    }

    /// Records that the protector tracks the memory with its own descriptor, so that the pager may close its
    /// descriptor.
    pub(crate) fn hand_over(self) -> Result<(), CheckpointError> {
        Ok(self.fill.with_stage(FillStage::HandedOver).write(&self.rundir)?)
    }
}

/// Usability of the pager's write record for a checkpoint on top of the newest one in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecordUsability {
    /// The record contains all writes since the newest checkpoint.
    Complete,
    /// Some of the record was collected but not committed. Missing pages are still as in the newest checkpoint.
    Partial,
    /// Missing pages may differ from those in the newest checkpoint.
    Unusable,
}

/// Judges the write record of `vmm` by the records of the restore (`fill`) and of the previous protector (`progress`).
/// `newest` is the newest checkpoint of `store`.
pub(crate) fn judge_write_record(
    fill: &Fill,
    progress: Option<&Progress>,
    store: &StoreUrl,
    vmm: &Vmm,
    newest: CommitId,
) -> RecordUsability {
    if fill.store != *store || fill.vmm != *vmm {
        return RecordUsability::Unusable;
    }
    // A protector records its progress before it collects from a QEMU. So without a record of this QEMU, no page was
    // collected from it.
    let progress = progress.filter(|progress| progress.is_of(vmm));
    let restored = fill.epoch.map(|epoch| CommitId { number: fill.number, epoch });
    let mut known_commits = vec![restored];
    // A record of progress with a base comes from a protector that started from the restored checkpoint or a successor
    // of it, so its commits are known: see `CheckpointSeries::record_progress`.
    if let Some(Progress { base: Some(base), collected, epoch, .. }) =
        progress.filter(|progress| progress.store == *store)
    {
        known_commits.extend([Some(*base), Some(CommitId { number: *collected, epoch: *epoch })]);
    }
    if !known_commits.contains(&Some(newest)) {
        return RecordUsability::Unusable;
    }
    match progress {
        Some(progress) if progress.store != *store || progress.collected != newest.number => RecordUsability::Partial,
        _ => RecordUsability::Complete,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;

    const RESTORED: CommitId = CommitId { number: 7, epoch: 3 };

    fn store(name: &str) -> StoreUrl {
        name.parse().unwrap()
    }

    fn vmm(pid: u32) -> Vmm {
        Vmm { binary: "qemu".into(), pid, started: 11, directory: "vmm-1".into(), monitor: None, direct_monitors: None }
    }

    fn fill() -> Fill {
        let json = serde_json::json!({
            "format": 1, "store": store("/srv/a"), "number": RESTORED.number, "epoch": RESTORED.epoch,
            "vmm": vmm(5), "blocks": [],
        });
        serde_json::from_value(json).unwrap()
    }

    fn progress(collected: u64, committed: u64, epoch: u64, base: Option<CommitId>) -> Progress {
        let (pid, started, policy) = (5, 11, Policy::Precopy);
        Progress {
            store: store("/srv/a"),
            pid,
            started,
            policy,
            collected,
            committed,
            committed_at_ms: None,
            epoch,
            base,
            known: None,
        }
    }

    fn usability(progress: Option<&Progress>, newest: CommitId) -> RecordUsability {
        judge_write_record(&fill(), progress, &store("/srv/a"), &vmm(5), newest)
    }

    #[test]
    fn a_record_is_complete_for_the_restored_checkpoint() {
        assert_eq!(fill().stage, FillStage::Filling);
        assert_eq!(usability(None, RESTORED), RecordUsability::Complete);
        // Progress that belongs to the previous QEMU.
        let of_other_qemu = Progress { pid: 4, ..progress(8, 7, 4, Some(RESTORED)) };
        assert_eq!(usability(Some(&of_other_qemu), RESTORED), RecordUsability::Complete);
        let of_other_qemu = Progress { started: 10, ..progress(8, 7, 4, Some(RESTORED)) };
        assert_eq!(usability(Some(&of_other_qemu), RESTORED), RecordUsability::Complete);
    }

    #[test]
    fn a_record_is_unusable_for_a_checkpoint_of_another_host_or_store() {
        assert_eq!(
            usability(None, CommitId { number: 8, epoch: 4 }),
            RecordUsability::Unusable,
            "another owner committed"
        );
        assert_eq!(
            usability(None, CommitId { epoch: 4, ..RESTORED }),
            RecordUsability::Unusable,
            "another checkpoint of that number"
        );
        assert_eq!(judge_write_record(&fill(), None, &store("/srv/b"), &vmm(5), RESTORED), RecordUsability::Unusable);
        assert_eq!(judge_write_record(&fill(), None, &store("/srv/a"), &vmm(6), RESTORED), RecordUsability::Unusable);
        let mut fill_of_old_version = fill();
        fill_of_old_version.epoch = None;
        assert_eq!(
            judge_write_record(&fill_of_old_version, None, &store("/srv/a"), &vmm(5), RESTORED),
            RecordUsability::Unusable
        );
        // A number that the previous protector was going to use, used by another owner.
        let previous = progress(8, 7, 4, Some(RESTORED));
        assert_eq!(usability(Some(&previous), CommitId { number: 8, epoch: 5 }), RecordUsability::Unusable);
        assert_eq!(usability(Some(&previous), CommitId { number: 9, epoch: 4 }), RecordUsability::Unusable);
    }

    #[test]
    fn a_protector_that_died_leaves_the_record_complete_or_partial() {
        let commit = |number, epoch| CommitId { number, epoch };
        // Died between two checkpoints.
        assert_eq!(usability(Some(&progress(8, 8, 4, Some(commit(8, 4)))), commit(8, 4)), RecordUsability::Complete);
        // Died after the commit, before it was recorded; died after collecting, before the commit.
        let previous = progress(9, 8, 5, Some(commit(8, 4)));
        assert_eq!(usability(Some(&previous), commit(9, 5)), RecordUsability::Complete);
        assert_eq!(usability(Some(&previous), commit(8, 4)), RecordUsability::Partial);
        let previous = progress(8, 7, 4, Some(RESTORED));
        assert_eq!(usability(Some(&previous), RESTORED), RecordUsability::Partial);
        // A protector without a base did not rely on a pager's record.
        assert_eq!(usability(Some(&progress(8, 8, 4, None)), commit(8, 4)), RecordUsability::Unusable);
        let in_other_store = Progress { store: store("/srv/b"), ..progress(8, 8, 4, Some(commit(8, 4))) };
        assert_eq!(usability(Some(&in_other_store), RESTORED), RecordUsability::Partial);
    }
}
