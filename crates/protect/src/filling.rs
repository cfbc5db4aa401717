//! A protector that runs while a restore still fills: which process may end the pager's write record, and what the
//! record is worth.
//!
//! The pager may release the memory, and the record with it, only while it holds `fill.lock`. A protector that relies
//! on the record holds the lock all the time. If either is killed, the lock is free.
//!
//! ```text
//!  pager       loads ... complete: fill.json has `filled`; continues to serve          lock free: closes, removes
//! fill.json  protector   locks, checkpoints ...                     next pause: own descriptor, `handed-over`,
//! unlocks
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

/// Tries to lock `fill.lock`. `None` if another process has it.
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

/// A restore that still fills. Its pager keeps the write record while this exists.
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
    /// `None` if all of the VM's memory is loaded and no pager has it.
    ///
    /// # Errors
    /// [`CheckpointError::Filling`] if memory is missing and no record can be used now.
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
            // Its pager ends as soon as it has the lock, which is free when this returns.
            Stage::Filled | Stage::HandedOver if Fill::is_served(rundir)? => {
                Err(wait("all of it is loaded, and its pager is about to end"))
            }
            Stage::Filled => Err(wait("it has no pager; start one: rekindle recover")),
            Stage::HandedOver => Ok(None),
        }
    }

    /// Checks that a pager serves: without one, a stopped guest could wait for a page that its devices need.
    pub(crate) fn require_pager(&self) -> Result<(), CheckpointError> {
        match Fill::is_served(&self.rundir)? {
            true => Ok(()),
            false => Err(wait("it has no pager; start one: rekindle recover")),
        }
    }

    /// Whether the fill is complete, so that the next pause can end the pager.
    pub(crate) fn is_filled(&self) -> bool {
        matches!(Fill::read(&self.rundir), Ok(Some(Fill { stage: Stage::Filled, .. })))
    }

    /// Records that we track the memory with our own descriptor: the pager may close its descriptor.
    pub(crate) fn hand_over(self) -> Result<(), CheckpointError> {
        Ok(self.fill.with_stage(Stage::HandedOver).write(&self.rundir)?)
    }
}

/// What the pager's write record is worth for a checkpoint on top of the newest one in `store`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecordWorth {
    /// It has everything that was written since the newest checkpoint.
    Complete,
    /// Some of it was collected and not committed. Missing pages are still as in the newest checkpoint.
    Partial,
    /// Missing pages may differ from those in the newest checkpoint.
    Unusable,
}

/// Judges a write record by what the restore and the previous protector have recorded.
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
    // A protector records its progress before it collects from a QEMU.
    let before = before.filter(|before| before.is_of(vmm));
    // Only a protector that started from the restored checkpoint, or from a successor of it, has committed these: see
    // `ProtectLoop::checkpoint`.
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
        // Of the previous QEMU.
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
        // Between two checkpoints.
        assert_eq!(judged(Some(&progress(8, 8, 4, Some(at(8, 4)))), at(8, 4)), RecordWorth::Complete);
        // Collected and committed, although that is not recorded; collected and not committed.
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
