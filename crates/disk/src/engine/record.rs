//! What the server writes of a guest's memory, kept for a protector: it does not show in QEMU's page tables.
//!
//! A record is of one front end, from its beginning to its end. With the front end, or this process, it is gone, and who asks is told
//! that: everything may have been written then.

use super::Engine;
use super::command::{Refused, Session};
use crate::memory::{Memory, Span};
use std::sync::Arc;

/// See [the module](self).
#[derive(Debug)]
pub(super) struct Record {
    pub session: Session,
    /// Written through a mapping that there is no more: QEMU has told its memory anew.
    before: Vec<Span>,
}

impl Record {
    /// The front end's memory is mapped anew. Nothing of it is under way.
    pub fn goes_on(&mut self, before: Option<Arc<Memory>>, memory: &Memory) {
        self.before.extend(before.iter().flat_map(|memory| memory.collect()));
        // As often as a guest has its memory mapped anew, there is no more than its pages.
        self.before.sort_unstable_by_key(|span| span.address);
        self.before.dedup_by(|next, span| {
            let end = span.address.saturating_add(span.bytes);
            let joins = next.address <= end;
            if joins {
                span.bytes = end.max(next.address.saturating_add(next.bytes)) - span.address;
            }
            joins
        });
        memory.note(true);
    }
}

impl Engine {
    /// Note what is written of the guest of `process`; of none, if there is none given. Whether that was noted already.
    pub(super) fn note(&mut self, process: Option<u32>) -> Result<bool, Refused> {
        let Some(process) = process else {
            self.end_record();
            return Ok(false);
        };
        let found = self.fronts.iter().find(|(_, front)| front.process == Some(process));
        let (&session, front) = found.ok_or_else(|| Refused(format!("process {process} is not connected to it")))?;
        let memory = front.memory.clone();
        if self.record.as_ref().is_some_and(|record| record.session == session) {
            return Ok(true);
        }
        self.end_record();
        if let Some(memory) = memory {
            memory.note(true);
            // Of an earlier record.
            drop(memory.collect());
        }
        self.record = Some(Record { session, before: Vec::new() });
        Ok(false)
    }

    fn end_record(&mut self) {
        let Some(record) = self.record.take() else { return };
        if let Some(memory) = self.fronts.get(&record.session).and_then(|front| front.memory.as_ref()) {
            memory.note(false);
        }
    }

    /// What was written since the last time.
    pub(super) fn collect(&mut self) -> Result<Vec<Span>, Refused> {
        let Some(record) = &mut self.record else {
            return Err(Refused(
                "what it has written was not noted: another QEMU has connected, or nobody has asked".into(),
            ));
        };
        let mut written = std::mem::take(&mut record.before);
        let memory = self.fronts.get(&record.session).and_then(|front| front.memory.as_ref());
        written.extend(memory.iter().flat_map(|memory| memory.collect()));
        Ok(written)
    }
}
