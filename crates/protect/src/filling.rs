//! A protector beside a restore that still fills: who may end the pager's record of what was written, and what that record is
//! worth.
//!
//! The pager may let go of the memory, and of the record with it, only while it holds `fill.lock`; a protector that goes by the
//! record holds it all the while. Either of them killed, the lock is free.
//!
//! ```text
//!  pager       brings ... all is there: fill.json says `filled`; serves on             lock free: closes, fill.json goes
//!  protector   locks, checkpoints ...                     next pause: own descriptor, `handed-over`, unlocks
//! ```

use crate::pager::{Fill, FillError, Stage};
use crate::progress::{Commit, Progress};
use crate::session::SessionError;
use rekindle_qemu::vmm::Vmm;
use rekindle_store::StoreUrl;
use rekindle_vm::rundir::RunDir;
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;

/// Take `fill.lock`. `None`: somebody else has it.
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

/// A restore that fills, whose pager keeps its record for as long as this lives.
#[derive(Debug)]
pub(crate) struct Held {
    rundir: RunDir,
    pub(crate) fill: Fill,
    _lock: File,
}

fn wait(why: &str) -> SessionError {
    SessionError::Filling { why: why.into() }
}

impl Held {
    /// `None`: all of the VM's memory is there, and no pager has it.
    ///
    /// # Errors
    /// [`SessionError::Filling`] when it is not, and there is no record to go by now.
    pub(crate) fn take(rundir: &RunDir) -> Result<Option<Self>, SessionError> {
        if Fill::read(rundir)?.is_none() {
            return Ok(None);
        }
        let Some(lock) = lock(rundir)? else {
            return Err(wait("its pager is just letting go of it, or another protector goes by its record"));
        };
        let Some(fill) = Fill::read(rundir)? else { return Ok(None) };
        match fill.stage {
            Stage::Filling => {
                let held = Self { rundir: rundir.clone(), fill, _lock: lock };
                held.served()?;
                Ok(Some(held))
            }
            // Its pager ends as soon as it has the lock, which is free when this returns; then nobody is in its way.
            Stage::Filled | Stage::HandedOver if Fill::is_served(rundir)? => {
                Err(wait("all of it is there, its pager is about to end"))
            }
            Stage::Filled => Err(wait("it has no pager: rekindle recover")),
            Stage::HandedOver => Ok(None),
        }
    }

    /// That a pager serves: without one a guest that is stopped might have to wait for a page that its devices need.
    pub(crate) fn served(&self) -> Result<(), SessionError> {
        match Fill::is_served(&self.rundir)? {
            true => Ok(()),
            false => Err(wait("it has no pager: rekindle recover")),
        }
    }

    /// Whether all is there, so that the next pause can take the memory over.
    pub(crate) fn is_filled(&self) -> bool {
        matches!(Fill::read(&self.rundir), Ok(Some(Fill { stage: Stage::Filled, .. })))
    }

    /// The memory is tracked by a descriptor of our own: the pager may close its one.
    pub(crate) fn handed_over(self) -> Result<(), SessionError> {
        Ok(self.fill.at(Stage::HandedOver).write(&self.rundir)?)
    }
}

/// What the pager's record is worth for a checkpoint that goes on from the newest one of `store`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Worth {
    /// It tells all that was written since the newest checkpoint.
    Whole,
    /// Some of it was collected, and did not arrive. What is missing is still as in the newest checkpoint.
    Torn,
    /// What is missing is not known to be in the newest checkpoint.
    Nothing,
}

/// Judge a record by what the restore, and the protector before, have left.
pub(crate) fn judge(fill: &Fill, before: Option<&Progress>, store: &StoreUrl, vmm: &Vmm, newest: Commit) -> Worth {
    if fill.store != *store || fill.vmm != *vmm {
        return Worth::Nothing;
    }
    let restored = fill.epoch.map(|epoch| Commit { number: fill.number, epoch });
    // Nobody can have collected from this QEMU without having said so before.
    let before = before.filter(|before| before.is_of(vmm));
    // Only who went on from the restored checkpoint, or from one that did, has committed these: see `Loop::checkpoint`.
    let ours = before.filter(|before| before.store == *store).into_iter().flat_map(|before| {
        [before.base, before.base.map(|_| Commit { number: before.collected, epoch: before.epoch })]
    });
    if !ours.chain([restored]).flatten().any(|known| known == newest) {
        return Worth::Nothing;
    }
    match before {
        Some(before) if before.store != *store || before.collected != newest.number => Worth::Torn,
        _ => Worth::Whole,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;

    const RESTORED: Commit = Commit { number: 7, epoch: 3 };

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

    fn progress(collected: u64, committed: u64, epoch: u64, base: Option<Commit>) -> Progress {
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

    fn judged(before: Option<&Progress>, newest: Commit) -> Worth {
        judge(&fill(), before, &store("/srv/a"), &vmm(5), newest)
    }

    #[test]
    fn a_record_is_whole_for_the_checkpoint_that_is_restored() {
        assert_eq!(fill().stage, Stage::Filling);
        assert_eq!(judged(None, RESTORED), Worth::Whole);
        // Of the QEMU before.
        let other = Progress { pid: 4, ..progress(8, 7, 4, Some(RESTORED)) };
        assert_eq!(judged(Some(&other), RESTORED), Worth::Whole);
        let other = Progress { started: 10, ..progress(8, 7, 4, Some(RESTORED)) };
        assert_eq!(judged(Some(&other), RESTORED), Worth::Whole);
    }

    #[test]
    fn what_another_host_or_another_store_has_is_nothing_to_go_by() {
        assert_eq!(judged(None, Commit { number: 8, epoch: 4 }), Worth::Nothing, "somebody committed");
        assert_eq!(judged(None, Commit { epoch: 4, ..RESTORED }), Worth::Nothing, "another checkpoint of that number");
        assert_eq!(judge(&fill(), None, &store("/srv/b"), &vmm(5), RESTORED), Worth::Nothing);
        assert_eq!(judge(&fill(), None, &store("/srv/a"), &vmm(6), RESTORED), Worth::Nothing);
        let mut old = fill();
        old.epoch = None;
        assert_eq!(judge(&old, None, &store("/srv/a"), &vmm(5), RESTORED), Worth::Nothing);
        // A number that the one before was going to take, taken by another owner.
        let before = progress(8, 7, 4, Some(RESTORED));
        assert_eq!(judged(Some(&before), Commit { number: 8, epoch: 5 }), Worth::Nothing);
        assert_eq!(judged(Some(&before), Commit { number: 9, epoch: 4 }), Worth::Nothing);
    }

    #[test]
    fn a_protector_that_died_leaves_the_record_whole_or_torn() {
        let at = |number, epoch| Commit { number, epoch };
        // Between two checkpoints.
        assert_eq!(judged(Some(&progress(8, 8, 4, Some(at(8, 4)))), at(8, 4)), Worth::Whole);
        // Collected, and committed, although that was not said any more; collected, and not committed.
        let before = progress(9, 8, 5, Some(at(8, 4)));
        assert_eq!(judged(Some(&before), at(9, 5)), Worth::Whole);
        assert_eq!(judged(Some(&before), at(8, 4)), Worth::Torn);
        let before = progress(8, 7, 4, Some(RESTORED));
        assert_eq!(judged(Some(&before), RESTORED), Worth::Torn);
        // One that did not know what it went on from was none beside a pager.
        assert_eq!(judged(Some(&progress(8, 8, 4, None)), at(8, 4)), Worth::Nothing);
        let elsewhere = Progress { store: store("/srv/b"), ..progress(8, 8, 4, Some(at(8, 4))) };
        assert_eq!(judged(Some(&elsewhere), RESTORED), Worth::Torn);
    }
}
