//! The pages of a guest's memory that the server writes, recorded for a protector: QEMU's page tables do not show them.
//!
//! A record is of one front end, from start to end. It ends with the front end or this process; a later request for it fails, since
//! any page may have been written by then.

use super::Engine;
use super::command::{FrontendId, Refused};
use crate::memory::{Memory, Span};
use std::sync::Arc;

/// See [the module](self).
#[derive(Debug)]
pub(super) struct Record {
    pub session: FrontendId,
    /// Pages written through a previous mapping: QEMU has passed its memory table again.
    before: Vec<Span>,
}

impl Record {
    /// Continues the record after the memory is mapped anew. *Needs:* no request is in progress.
    pub fn remap(&mut self, before: Option<Arc<Memory>>, memory: &Memory) {
        self.before.extend(before.iter().flat_map(|memory| memory.collect()));
        // However often the memory is mapped anew, the pages are no more than the guest has.
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
    /// Starts recording the pages of the guest of `process`, or stops. Returns whether they were recorded already.
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
            // Left by an earlier record.
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

    /// Returns and clears the recorded pages.
    pub(super) fn collect(&mut self) -> Result<Vec<Span>, Refused> {
        let Some(record) = &mut self.record else {
            return Err(Refused(
                "the pages that it wrote were not recorded: another QEMU has connected, or recording was not started"
                    .into(),
            ));
        };
        let mut written = std::mem::take(&mut record.before);
        let memory = self.fronts.get(&record.session).and_then(|front| front.memory.as_ref());
        written.extend(memory.iter().flat_map(|memory| memory.collect()));
        Ok(written)
    }
}
