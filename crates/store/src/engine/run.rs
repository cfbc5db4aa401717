//! The thread that owns an engine. It serves requests in order, and does background work between requests.

use super::Engine;
use super::commit::CheckpointState;
use super::compaction::Urgency;
use crate::error::Result;
use crate::page_table::PageDigests;
use crate::types::{Block, Committed};
use rekindle_kernel::large::Large;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};

/// A RAM block of an open checkpoint.
#[derive(Debug, Clone)]
pub(crate) struct StartedBlock {
    /// The block number in the store's records.
    pub number: u16,
    pub pages: u64,
    /// Digests of the pages at the previous checkpoint.
    pub digests: Arc<PageDigests>,
}

/// A frame of pages: free bytes for the header, the directory, the content.
#[derive(Debug, Default)]
pub(crate) struct Frame {
    /// The buffer. The frame is its last part.
    pub bytes: Large,
    /// Offset of the frame in the buffer.
    pub start: usize,
    /// Number of pages.
    pub count: usize,
}

impl Frame {
    pub fn content(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.start..).unwrap_or_default()
    }
}

/// A request to the thread, with the sender for the answer.
#[derive(Debug)]
pub(crate) enum Request {
    Begin(Vec<Block>, Sender<Result<Vec<StartedBlock>>>),
    /// Appends a frame once it is packed, then sends the buffer back for reuse.
    Frame(Receiver<Frame>, Sender<Frame>),
    /// Commits the checkpoint, given the number of unchanged pages.
    Commit(Box<CheckpointState>, u64, Sender<Result<Committed>>),
    Abort,
    /// Sets how many checkpoints are kept ([`Engine::keep`]).
    Keep(u32),
    /// Holds a checkpoint, or releases it ([`Engine::hold`]).
    Hold(Option<u64>),
    Compact(Sender<Result<u64>>),
    /// Finishes background work and writes a base index ([`Engine::settle`]).
    Settle(Sender<Result<()>>),
}

impl Engine {
    /// Does a small piece of background work. Returns whether there is more.
    pub fn work(&mut self) -> bool {
        if self.broken.is_some() {
            return false;
        }
        let has_more = if self.compaction.is_some()
            || (self.wants_compaction() && self.start_compaction(Urgency::Background))
            || (self.wants_merge() && self.start_merge())
        {
            self.step_compaction().map(|_| true)
        } else if self.base_index.is_some() {
            self.step_base_index()
        } else if self.wants_base_index() {
            self.start_base_index().map(|()| true)
        } else {
            Ok(false)
        };
        has_more.unwrap_or_else(|e| {
            // No data is lost: background work changes nothing until it is complete.
            tracing::warn!("background work on the store failed and is tried again after the next checkpoint: {e}");
            self.background_failed = true;
            self.stop_compaction();
            self.stop_base_index();
            false
        })
    }

    /// Finishes background work, and writes a base index.
    pub fn settle(&mut self) -> Result<()> {
        self.check_sound()?;
        self.run_compaction().map_err(|e| self.explain(e))?;
        if !self.kept.is_empty() && (self.pages_since_base > 0 || self.base_index.is_some()) {
            self.start_base_index().map_err(|e| self.explain(e))?;
            while self.step_base_index().map_err(|e| self.explain(e))? {}
        }
        Ok(())
    }
}

/// Serves requests until all senders are dropped.
pub(crate) fn run(mut engine: Engine, requests: &Receiver<Request>) {
    loop {
        let request = match requests.try_recv() {
            Ok(request) => request,
            Err(TryRecvError::Disconnected) => break,
            Err(TryRecvError::Empty) => {
                if engine.work() {
                    continue;
                }
                match requests.recv() {
                    Ok(request) => request,
                    Err(_) => break,
                }
            }
        };
        // A failed send is ignored: the caller has stopped waiting.
        match request {
            Request::Begin(blocks, reply) => drop(reply.send(engine.begin(blocks))),
            Request::Frame(frame, back) => match frame.recv() {
                Ok(mut frame) => {
                    let count = frame.count;
                    engine.append(frame.content(), count);
                    let _ = back.send(frame);
                }
                Err(_) => engine.fail("a thread that compresses pages has ended"),
            },
            Request::Commit(state, unchanged, reply) => {
                // Files are removed after the answer, so that the caller does not wait for that.
                let _ = reply.send(engine.commit(&state, unchanged));
                engine.remove_obsolete_files();
            }
            Request::Abort => engine.abort(),
            Request::Keep(keep) => engine.keep(keep),
            Request::Hold(number) => engine.hold(number),
            Request::Compact(reply) => drop(reply.send(engine.compact())),
            Request::Settle(reply) => drop(reply.send(engine.settle())),
        }
    }
    engine.abort();
    engine.stop_compaction();
    engine.stop_base_index();
    engine.remove_obsolete_files();
}
