//! The thread that owns an engine: requests in their order, and what can wait in between.

use super::Engine;
use super::commit::State;
use crate::error::Result;
use crate::sparse::Digests;
use crate::types::{Block, Committed};
use rekindle_kernel::large::Large;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};

/// A block of a checkpoint that was begun.
#[derive(Debug, Clone)]
pub(crate) struct Begun {
    /// The number that its pages are stored under.
    pub number: u16,
    /// Pages that it has.
    pub pages: u64,
    /// Their digests at the checkpoint before.
    pub digests: Arc<Digests>,
}

/// A frame of pages: free bytes for its header, the directory, the content.
#[derive(Debug, Default)]
pub(crate) struct Frame {
    /// It, at their end.
    pub bytes: Large,
    /// Where it begins in them.
    pub start: usize,
    /// How many pages.
    pub count: usize,
}

impl Frame {
    /// All of it.
    pub fn content(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.start..).unwrap_or_default()
    }
}

/// What the thread is asked to do.
#[derive(Debug)]
pub(crate) enum Request {
    /// Begin a checkpoint.
    Begin(Vec<Block>, Sender<Result<Vec<Begun>>>),
    /// Take a frame, once it is packed. It is given back for the next one.
    Frame(Receiver<Frame>, Sender<Frame>),
    /// Let the checkpoint count.
    Commit(Box<State>, u64, Sender<Result<Committed>>),
    /// Give it up.
    Abort,
    /// Keep so many.
    Keep(u32),
    /// Keep this one.
    Hold(Option<u64>),
    /// Compact all that can be.
    Compact(Sender<Result<u64>>),
    /// Finish what can wait.
    Settle(Sender<Result<()>>),
    /// The epoch.
    Epoch(Sender<u64>),
}

impl Engine {
    /// A small piece of what can wait; whether there is more.
    pub fn work(&mut self) -> bool {
        if self.broken.is_some() {
            return false;
        }
        let done = if self.compaction.is_some() || (self.wants_compaction() && self.start_compaction(false)) {
            self.step_compaction().map(|_| true)
        } else if self.basing.is_some() {
            self.step_base()
        } else if self.wants_base() {
            self.start_base().map(|()| true)
        } else {
            Ok(false)
        };
        done.unwrap_or_else(|e| {
            // Nothing is lost by that. It is tried again after the next checkpoint.
            tracing::warn!("{e}; what was to be tidied up has to wait");
            self.tired = true;
            self.stop_compaction();
            self.stop_base();
            false
        })
    }

    /// Finish what can wait, and write a base index of what there is.
    pub fn settle(&mut self) -> Result<()> {
        self.check_sound()?;
        while self.compaction.is_some() {
            self.step_compaction().map_err(|e| self.explain(e))?;
        }
        if !self.kept.is_empty() && (self.since_base > 0 || self.basing.is_some()) {
            self.start_base().map_err(|e| self.explain(e))?;
            while self.step_base().map_err(|e| self.explain(e))? {}
        }
        Ok(())
    }
}

/// Serve requests until nobody can make any more.
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
        // Whoever asked may have gone; then the answer is of no interest.
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
                let done = engine.commit(&state, unchanged);
                let _ = reply.send(done);
                engine.tidy();
            }
            Request::Abort => engine.abort(),
            Request::Keep(keep) => engine.keep(keep),
            Request::Hold(number) => engine.hold(number),
            Request::Compact(reply) => drop(reply.send(engine.compact())),
            Request::Settle(reply) => drop(reply.send(engine.settle())),
            Request::Epoch(reply) => drop(reply.send(engine.owner().epoch)),
        }
    }
    engine.abort();
    engine.stop_compaction();
    engine.stop_base();
    engine.tidy();
}
