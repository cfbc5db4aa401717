//! Commands for phase-based reboots, in which a guest continues from a *boot snapshot*, a state that was saved during
//! an earlier boot (`docs/os-reboot.md`).
//!
//! The *ledger* ([`crate::ledger`]) records the blocks that the guest has touched, which means read or written. A
//! *moment* is the ledger's mark for a snapshot. The snapshot may be used while no block that the guest had touched
//! before the moment is written after it.

use super::Engine;
use super::refusal::{Answer, Refusal};
use crate::ledger::{Moment, StaleReason};
use std::sync::atomic::Ordering;

/// A command about the ledger.
#[derive(Debug)]
pub enum LedgerCommand {
    /// Start the record of a new boot: the guest has read and written nothing yet.
    Begin(Answer<()>),
    /// Mark the current moment. The guest must be stopped.
    Mark(Answer<Moment>),
    /// Check whether a guest of a moment may continue. Answered with the reason why not.
    Check(Moment, Answer<Option<StaleReason>>),
    /// Continue the next guest from that moment, unless it is stale. Answered like `Check`. The guest's memory is
    /// filled while the guest runs.
    Resume(Moment, Answer<Option<StaleReason>>),
}

impl Engine {
    pub(super) fn carry_out_ledger_command(&mut self, command: LedgerCommand) {
        match command {
            LedgerCommand::Begin(answer) => {
                let started = self.front_end.check_unused().map(|()| self.front_end.blocks.cache.ledger.start_boot());
                let _ = answer.send(started);
            }
            LedgerCommand::Mark(answer) => drop(answer.send(self.mark_moment())),
            LedgerCommand::Check(moment, answer) => {
                let blocks = &self.front_end.blocks;
                let _ = answer.send(Ok(blocks.cache.ledger.check(moment, &blocks.image_state()).err()));
            }
            LedgerCommand::Resume(moment, answer) => drop(answer.send(self.resume_from(moment))),
        }
    }

    fn mark_moment(&mut self) -> Result<Moment, Refusal> {
        if self.front_end.is_running() {
            return Err(Refusal(
                "the guest runs, so its snapshot would miss its latest actions; stop the guest first".into(),
            ));
        }
        let state = self.front_end.blocks.image_state();
        self.front_end.blocks.cache.ledger.mark(state).ok_or_else(|| {
            Refusal(
                "its server has been started again under the guest: what that had touched before is not known".into(),
            )
        })
    }

    fn resume_from(&mut self, moment: Moment) -> Result<Option<StaleReason>, Refusal> {
        self.front_end.check_unused()?;
        let state = self.front_end.blocks.image_state();
        let stale = self.front_end.blocks.cache.ledger.resume(moment, &state).err();
        if stale.is_none() {
            // Memory of the next QEMU may have pages that are not filled yet: see `missing_pages`.
            self.is_filling.store(true, Ordering::Relaxed);
        }
        Ok(stale)
    }
}
