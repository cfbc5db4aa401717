//! The pages of a guest's memory that the server writes, recorded for a protector: QEMU's page tables do not show them.
//!
//! A record is of one QEMU, from start to end. The record ends with the QEMU's connection or with this process. A
//! later request for the record fails, because any page may have been written by then.

use super::FrontEnd;
use crate::engine::command::{FrontendId, PageRecord, Refused};
use crate::memory::{Memory, Span};
use std::sync::Arc;

/// The record of the pages that the server writes in one QEMU's guest.
#[derive(Debug)]
pub(super) struct WrittenPages {
    pub session: FrontendId,
    /// Pages written through a previous mapping: QEMU has passed its memory table again.
    of_previous_mappings: Vec<Span>,
}

impl WrittenPages {
    /// Continues the record after the memory is mapped anew. *Needs:* no request is in progress.
    pub fn remap(&mut self, previous: Option<Arc<Memory>>, memory: &Memory) {
        let pages = &mut self.of_previous_mappings;
        pages.extend(previous.iter().flat_map(|memory| memory.collect()));
        // The guest has a limited number of pages, however often its memory is mapped anew.
        pages.sort_unstable_by_key(|span| span.address);
        pages.dedup_by(|next, span| {
            let end = span.address.saturating_add(span.bytes);
            let is_adjacent = next.address <= end;
            if is_adjacent {
                span.bytes = end.max(next.address.saturating_add(next.bytes)) - span.address;
            }
            is_adjacent
        });
        memory.note(true);
    }
}

impl<B> FrontEnd<B> {
    /// Starts to record the pages of the guest of `process`. Returns whether they were recorded already.
    pub fn record_pages(&mut self, process: u32) -> Result<PageRecord, Refused> {
        let found = self.connections.iter().find(|(_, connection)| connection.process == Some(process));
        let (&session, connection) =
            found.ok_or_else(|| Refused(format!("process {process} is not connected to it")))?;
        let memory = connection.memory.clone();
        if self.written_pages.as_ref().is_some_and(|pages| pages.session == session) {
            return Ok(PageRecord::Continues);
        }
        self.end_page_record();
        if let Some(memory) = memory {
            memory.note(true);
            // Discard the pages of an earlier record.
            drop(memory.collect());
        }
        self.written_pages = Some(WrittenPages { session, of_previous_mappings: Vec::new() });
        Ok(PageRecord::New)
    }

    pub fn end_page_record(&mut self) {
        let Some(pages) = self.written_pages.take() else { return };
        let connection = self.connections.get(&pages.session);
        if let Some(memory) = connection.and_then(|connection| connection.memory.as_ref()) {
            memory.note(false);
        }
    }

    /// Returns and clears the recorded pages.
    pub fn collect_pages(&mut self) -> Result<Vec<Span>, Refused> {
        let Some(pages) = &mut self.written_pages else {
            return Err(Refused(
                "the pages that it wrote were not recorded: another QEMU has connected, or recording was not started"
                    .into(),
            ));
        };
        let mut written = std::mem::take(&mut pages.of_previous_mappings);
        let connection = self.connections.get(&pages.session);
        let memory = connection.and_then(|connection| connection.memory.as_ref());
        written.extend(memory.iter().flat_map(|memory| memory.collect()));
        Ok(written)
    }
}
