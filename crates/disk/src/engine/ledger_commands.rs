//! Commands for phase-based reboots: [`crate::ledger`].

use super::Engine;
use super::command::Refused;
use crate::ledger::{Moment, StaleReason};
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;

/// A command about the ledger.
#[derive(Debug)]
pub enum LedgerCommand {
    /// A guest that has read and written nothing boots.
    Begin(Sender<Result<(), Refused>>),
    /// Mark the current moment.
    Mark(Sender<Result<Moment, Refused>>),
    /// Check whether a guest of a moment may continue.
    Check(Moment, Sender<Result<Option<StaleReason>, Refused>>),
    /// Continue the next guest from that moment, if it may. Its memory is filled while it runs.
    Resume(Moment, Sender<Result<Option<StaleReason>, Refused>>),
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

    fn mark_moment(&mut self) -> Result<Moment, Refused> {
        if self.front_end.is_running() {
            return Err(Refused(
                "the guest runs, so its snapshot would miss its latest actions; stop the guest first".into(),
            ));
        }
        let state = self.front_end.blocks.image_state();
        self.front_end.blocks.cache.ledger.mark(state).ok_or_else(|| {
            Refused(
                "its server has been started again under the guest: what that had touched before is not known".into(),
            )
        })
    }

    fn resume_from(&mut self, moment: Moment) -> Result<Option<StaleReason>, Refused> {
        self.front_end.check_unused()?;
        let state = self.front_end.blocks.image_state();
        let stale = self.front_end.blocks.cache.ledger.resume(moment, &state).err();
        if stale.is_none() {
            self.filling.store(true, Ordering::Relaxed);
        }
        Ok(stale)
    }
}
