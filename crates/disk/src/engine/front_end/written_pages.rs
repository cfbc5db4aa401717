//! The pages of a guest's memory that the server writes, recorded for a protector: QEMU's page tables do not show them.
//!
//! A record is of one QEMU, from start to end. The record ends with the QEMU's connection or with this process. A
//! later request for the record fails, because any page may have been written by then.

use super::FrontEnd;
use crate::engine::command::PageRecord;
use crate::engine::ids::ConnectionId;
use crate::engine::refusal::Refusal;
use crate::memory::{Memory, Span};
use std::sync::Arc;

/// The record of the pages that the server writes in one QEMU's guest.
#[derive(Debug)]
pub(super) struct WrittenPages {
    pub connection_id: ConnectionId,
    /// Pages written through a previous mapping: QEMU has passed its memory table again.
    of_previous_mappings: Vec<Span>,
}

impl WrittenPages {
    /// Continues the record after the memory is mapped anew. *Needs:* no request is in progress.
    pub fn remap(&mut self, previous: Option<Arc<Memory>>, memory: &Memory) {
        let spans = &mut self.of_previous_mappings;
        spans.extend(previous.iter().flat_map(|memory| memory.take_written_pages()));
        // The guest has a limited number of pages, however often its memory is mapped anew.
        spans.sort_unstable_by_key(|span| span.address);
        spans.dedup_by(|next, span| {
            let end = span.address.saturating_add(span.bytes);
            let is_adjacent = next.address <= end;
            if is_adjacent {
                span.bytes = end.max(next.address.saturating_add(next.bytes)) - span.address;
            }
            is_adjacent
        });
        memory.start_recording_pages();
    }
}

impl<B> FrontEnd<B> {
    /// Starts to record the pages of the guest of `process`. Returns whether they were recorded already.
    pub fn record_pages(&mut self, process: u32) -> Result<PageRecord, Refusal> {
        let of_process = self.connections.iter().find(|(_, connection)| connection.process == Some(process));
        let (&connection_id, connection) =
            of_process.ok_or_else(|| Refusal(format!("process {process} is not connected to it")))?;
        let memory = connection.memory.clone();
        if self.written_pages.as_ref().is_some_and(|pages| pages.connection_id == connection_id) {
            return Ok(PageRecord::Continues);
        }
        self.end_page_record();
        if let Some(memory) = memory {
            memory.start_recording_pages();
            // Discard the pages of an earlier record.
            drop(memory.take_written_pages());
        }
        self.written_pages = Some(WrittenPages { connection_id, of_previous_mappings: Vec::new() });
        Ok(PageRecord::New)
    }

    pub fn end_page_record(&mut self) {
        let Some(pages) = self.written_pages.take() else { return };
        let connection = self.connections.get(&pages.connection_id);
        if let Some(memory) = connection.and_then(|connection| connection.memory.as_ref()) {
            memory.stop_recording_pages();
        }
    }

    /// Returns and clears the recorded pages.
    pub fn collect_pages(&mut self) -> Result<Vec<Span>, Refusal> {
        let Some(pages) = &mut self.written_pages else {
            return Err(Refusal(
                "the pages that it wrote were not recorded: another QEMU has connected, or recording was not started"
                    .into(),
            ));
        };
        let mut spans = std::mem::take(&mut pages.of_previous_mappings);
        let connection = self.connections.get(&pages.connection_id);
        let memory = connection.and_then(|connection| connection.memory.as_ref());
        spans.extend(memory.iter().flat_map(|memory| memory.take_written_pages()));
        Ok(spans)
    }
}
