//! A protector that runs while a restore still fills: which process may end the pager's write record, and whether that
//! record is usable for a checkpoint.
//!
//! The pager may release the memory, and the write record with it, only while it holds `fill.lock`. A protector that
//! relies on the record holds the lock the whole time. The lock of a killed process is free.
//!
//! ```text
//!  pager      loads ... fill complete: writes `filled`, continues to serve
//!  protector  locks, checkpoints ...      next pause: own descriptor, writes `handed-over`, unlocks
//!  pager                                                                  lock free: closes, removes fill.json
//! ```

use crate::pager::{Fill, FillError, Stage};
use crate::progress::{CommitId, Progress};
use crate::session::CheckpointError;
use rekindle_qemu::vmm::Vmm;
use rekindle_store::StoreUrl;
use rekindle_vm::rundir::RunDir;
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;

/// Tries to lock `fill.lock`. Returns `None` if another process holds the lock.
pub(crate) fn lock(rundir: &RunDir) -> Result<Option<File>, FillError> {
    let path = rundir.file("fill.lock");
    let opened = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = opened.map_err(|source| FillError::File { path: path.clone(), source })?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(FillError::File { path, source: e.into() }),
    }
}

/// A restore that still fills. Its pager keeps the write record as long as this value exists.
#[derive(Debug)]
pub(crate) struct FillRecord {
    rundir: RunDir,
    pub(crate) fill: Fill,
    _lock: File,
}

fn wait(why: &str) -> CheckpointError {
    CheckpointError::Filling { why: why.into() }
}

impl FillRecord {
    /// Locks the pager's write record. Returns `None` if all of the VM's memory is loaded and no pager uses it.
    ///
    /// # Errors
    /// [`CheckpointError::Filling`]: a fill or its pager has not ended, and the write record cannot be used now.
    pub(crate) fn take(rundir: &RunDir) -> Result<Option<Self>, CheckpointError> {
        if Fill::read(rundir)?.is_none() {
            return Ok(None);
        }
        let Some(lock) = lock(rundir)? else {
            return Err(wait("its pager is about to release it, or another protector uses the write record"));
        };
        let Some(fill) = Fill::read(rundir)? else { return Ok(None) };
        match fill.stage {
            Stage::Filling => {
                let held = Self { rundir: rundir.clone(), fill, _lock: lock };
                held.require_pager()?;
                Ok(Some(held))
            }
            // The pager ends as soon as it has the lock, which is released when this function returns.
            Stage::Filled | Stage::HandedOver if Fill::is_served(rundir)? => {
                Err(wait("all of it is loaded, and its pager is about to end"))
            }
            Stage::Filled => Err(wait("it has no pager; start one: rekindle recover")),
            Stage::HandedOver => Ok(None),
        }
    }

    /// Checks that a pager serves: without a pager, the devices of a stopped guest could wait for a missing page.
    pub(crate) fn require_pager(&self) -> Result<(), CheckpointError> {
        match Fill::is_served(&self.rundir)? {
            true => Ok(()),
            false => Err(wait("it has no pager; start one: rekindle recover")),
        }
    }

    /// Returns whether the fill is complete, so that the next pause can end the pager.
    pub(crate) fn is_filled(&self) -> bool {
        matches!(Fill::read(&self.rundir), Ok(Some(Fill { stage: Stage::Filled, .. })))
    }

    /// Records that the protector tracks the memory with its own descriptor, so that the pager may close its
    /// descriptor.
    pub(crate) fn hand_over(self) -> Result<(), CheckpointError> {
        Ok(self.fill.with_stage(Stage::HandedOver).write(&self.rundir)?)
    }
}

/// Usability of the pager's write record for a checkpoint on top of the newest one in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecordWorth {
    /// The record contains all writes since the newest checkpoint.
    Complete,
    /// Some of the record was collected but not committed. Missing pages are still as in the newest checkpoint.
    Partial,
    /// Missing pages may differ from those in the newest checkpoint.
    Unusable,
}

/// Judges a write record by the records of the restore (`fill`) and of the previous protector (`before`).
pub(crate) fn judge(
    fill: &Fill,
    before: Option<&Progress>,
    store: &StoreUrl,
    vmm: &Vmm,
    newest: CommitId,
) -> RecordWorth {
    if fill.store != *store || fill.vmm != *vmm {
        return RecordWorth::Unusable;
    }
    let restored = fill.epoch.map(|epoch| CommitId { number: fill.number, epoch });
    // A protector records its progress before it collects from a QEMU. So without a record of this QEMU, no page was
    // collected from it.
    let before = before.filter(|before| before.is_of(vmm));
    // A record of progress with a base comes from a protector that started from the restored checkpoint or a successor
    // of it, so its commits are known: see `ProtectLoop::checkpoint`.
    let ours = before.filter(|before| before.store == *store).into_iter().flat_map(|before| {
        [before.base, before.base.map(|_| CommitId { number: before.collected, epoch: before.epoch })]
    });
    if !ours.chain([restored]).flatten().any(|known| known == newest) {
        return RecordWorth::Unusable;
    }
    match before {
        Some(before) if before.store != *store || before.collected != newest.number => RecordWorth::Partial,
        _ => RecordWorth::Complete,
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
        Vmm { binary: "qemu".into(), pid, started: 11, directory: "vmm-1".into(), monitor: None }
    }

    fn fill() -> Fill {
        let fill = serde_json::json!({
            "format": 1, "store": store("/srv/a"), "number": RESTORED.number, "epoch": RESTORED.epoch, "vmm": vmm(5), "blocks": [],
        });
        serde_json::from_value(fill).unwrap()
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
        }
    }

    fn judged(before: Option<&Progress>, newest: CommitId) -> RecordWorth {
        judge(&fill(), before, &store("/srv/a"), &vmm(5), newest)
    }

    #[test]
    fn a_record_is_complete_for_the_restored_checkpoint() {
        assert_eq!(fill().stage, Stage::Filling);
        assert_eq!(judged(None, RESTORED), RecordWorth::Complete);
        // Progress that belongs to the previous QEMU.
        let other = Progress { pid: 4, ..progress(8, 7, 4, Some(RESTORED)) };
        assert_eq!(judged(Some(&other), RESTORED), RecordWorth::Complete);
        let other = Progress { started: 10, ..progress(8, 7, 4, Some(RESTORED)) };
        assert_eq!(judged(Some(&other), RESTORED), RecordWorth::Complete);
    }

    #[test]
    fn a_record_is_unusable_for_a_checkpoint_of_another_host_or_store() {
        assert_eq!(judged(None, CommitId { number: 8, epoch: 4 }), RecordWorth::Unusable, "another owner committed");
        assert_eq!(
            judged(None, CommitId { epoch: 4, ..RESTORED }),
            RecordWorth::Unusable,
            "another checkpoint of that number"
        );
        assert_eq!(judge(&fill(), None, &store("/srv/b"), &vmm(5), RESTORED), RecordWorth::Unusable);
        assert_eq!(judge(&fill(), None, &store("/srv/a"), &vmm(6), RESTORED), RecordWorth::Unusable);
        let mut old = fill();
        old.epoch = None;
        assert_eq!(judge(&old, None, &store("/srv/a"), &vmm(5), RESTORED), RecordWorth::Unusable);
        // A number that the previous protector was going to use, used by another owner.
        let before = progress(8, 7, 4, Some(RESTORED));
        assert_eq!(judged(Some(&before), CommitId { number: 8, epoch: 5 }), RecordWorth::Unusable);
        assert_eq!(judged(Some(&before), CommitId { number: 9, epoch: 4 }), RecordWorth::Unusable);
    }

    #[test]
    fn a_protector_that_died_leaves_the_record_complete_or_partial() {
        let at = |number, epoch| CommitId { number, epoch };
        // Died between two checkpoints.
        assert_eq!(judged(Some(&progress(8, 8, 4, Some(at(8, 4)))), at(8, 4)), RecordWorth::Complete);
        // Died after the commit, before it was recorded; died after collecting, before the commit.
        let before = progress(9, 8, 5, Some(at(8, 4)));
        assert_eq!(judged(Some(&before), at(9, 5)), RecordWorth::Complete);
        assert_eq!(judged(Some(&before), at(8, 4)), RecordWorth::Partial);
        let before = progress(8, 7, 4, Some(RESTORED));
        assert_eq!(judged(Some(&before), RESTORED), RecordWorth::Partial);
        // A protector without a base did not rely on a pager's record.
        assert_eq!(judged(Some(&progress(8, 8, 4, None)), at(8, 4)), RecordWorth::Unusable);
        let elsewhere = Progress { store: store("/srv/b"), ..progress(8, 8, 4, Some(at(8, 4))) };
        assert_eq!(judged(Some(&elsewhere), RESTORED), RecordWorth::Partial);
    }
}
