//! What a protector adds to the events of its VM ([`rekindle_vm::events`]): its start and end, and why it takes no checkpoints.

use super::{StopReason, Summary};
use crate::event::ProtectEvent;
use rekindle_store::StoreUrl;
use rekindle_vm::causes::with_causes;
use rekindle_vm::events::{EventKind, record, shortened};
use rekindle_vm::rundir::RunDir;
use std::error::Error;

/// Records each change of a protector's condition once. A protector reports it at each attempt.
#[derive(Debug)]
pub(crate) struct EventLog {
    rundir: RunDir,
    store: String,
    /// The last event that was recorded.
    last: Option<EventKind>,
}

impl EventLog {
    pub fn new(rundir: &RunDir, store: &StoreUrl) -> Self {
        Self { rundir: rundir.clone(), store: store.to_string(), last: None }
    }

    /// Records what this event of the protector changes.
    pub fn note(&mut self, event: &ProtectEvent) {
        let kind = match event {
            ProtectEvent::Checkpoint(_) | ProtectEvent::Attached { .. } => match &self.last {
                None | Some(EventKind::ProtectionWaits { .. }) => {
                    EventKind::ProtectionStarted { store: self.store.clone() }
                }
                Some(_) => return,
            },
            ProtectEvent::StoreAway { error } => EventKind::StoreAway { error: shortened(error) },
            ProtectEvent::StoreBack => EventKind::StoreBack,
            ProtectEvent::Waiting { state } => EventKind::ProtectionWaits { why: shortened(state) },
            ProtectEvent::Moved { .. }
            | ProtectEvent::Filled
            | ProtectEvent::Compared(_)
            | ProtectEvent::Lag { .. } => return,
        };
        if self.last.as_ref() != Some(&kind) {
            record(&self.rundir, kind.clone());
            self.last = Some(kind);
        }
    }

    /// Records the end of the protector, if it has protected the guest.
    pub fn end<E: Error + 'static>(&self, ended: &Result<Summary, E>) {
        if self.last.is_none() {
            return;
        }
        let why = match ended {
            Ok(summary) => match summary.ended {
                StopReason::Requested => "its protector was stopped".to_owned(),
                StopReason::Counted => "all requested checkpoints were taken".to_owned(),
                StopReason::Stays => "the guest stays stopped after its last checkpoint".to_owned(),
                StopReason::QemuEnded => "its QEMU has ended".to_owned(),
            },
            Err(error) => shortened(&with_causes(error)),
        };
        record(&self.rundir, EventKind::ProtectionEnded { why });
    }
}
