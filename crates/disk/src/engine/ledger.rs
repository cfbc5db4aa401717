//! The engine's part of phase-based reboots: [`crate::ledger`].

use super::Engine;
use super::command::Refused;
use crate::block::touched;
use crate::ledger::{ImageStamp, ImageState, Moment, StaleReason};
use crate::request::{Kind, Range};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;

/// A request about the ledger.
#[derive(Debug)]
pub enum LedgerCommand {
    /// A guest boots that has read and written nothing.
    Begin(Sender<Result<(), Refused>>),
    /// Mark this moment.
    Mark(Sender<Result<Moment, Refused>>),
    /// Whether a guest of a moment may continue.
    Check(Moment, Sender<Result<Option<StaleReason>, Refused>>),
    /// The next guest continues from that moment, if it may. Its memory is filled while it runs.
    Resume(Moment, Sender<Result<Option<StaleReason>, Refused>>),
}

impl Engine {
    /// Records the blocks of a request before any of it is done.
    pub(super) fn note_touched(&mut self, number: usize) {
        let Some(Ok(kind)) = self.jobs.get(number).map(super::Job::wants) else { return };
        let blocks = |range: &Range| touched(range.at, range.bytes);
        match kind {
            Kind::Read(range) => self.ledger.record_read(blocks(range)),
            Kind::Write(range) => self.ledger.record_write(blocks(range)),
            Kind::Discard(ranges) => ranges.iter().for_each(|range| self.ledger.record_write(blocks(range))),
            Kind::Zeroes(ranges) => ranges.iter().for_each(|(range, _)| self.ledger.record_write(blocks(range))),
            Kind::Flush | Kind::Identity => {}
        }
    }

    /// Answers a request.
    pub(super) fn serve_ledger(&mut self, command: LedgerCommand) {
        match command {
            LedgerCommand::Begin(answer) => {
                let started = self.without_guest().map(|()| self.ledger.start_boot());
                let _ = answer.send(started);
            }
            LedgerCommand::Mark(answer) => drop(answer.send(self.mark_moment())),
            LedgerCommand::Check(moment, answer) => {
                let _ = answer.send(Ok(self.ledger.check(moment, &self.image_state()).err()));
            }
            LedgerCommand::Resume(moment, answer) => {
                let resumed = self.without_guest().map(|()| {
                    let void = self.ledger.resume(moment, &self.image_state()).err();
                    if void.is_none() {
                        self.settings.filling.store(true, Ordering::Relaxed);
                    }
                    void
                });
                let _ = answer.send(resumed);
            }
        }
    }

    fn without_guest(&self) -> Result<(), Refused> {
        if self.is_used() { Err(Refused("a QEMU is still connected".into())) } else { Ok(()) }
    }

    fn mark_moment(&mut self) -> Result<Moment, Refused> {
        let runs = self.active.and_then(|active| self.fronts.get(&active)).is_some_and(|front| !front.lines.is_empty());
        if runs || !self.jobs.is_empty() {
            return Err(Refused(
                "the guest runs, so its snapshot would miss its latest actions; stop the guest first".into(),
            ));
        }
        let state = self.image_state();
        self.ledger.mark(state).ok_or_else(|| {
            Refused(
                "its server has been started again under the guest: what that had touched before is not known".into(),
            )
        })
    }

    /// Length and times of the image. For a device, and for an image into which a log is merged, the times mean nothing: only the lock
    /// prevents changes by others.
    fn image_state(&self) -> ImageState {
        ImageState { capacity: self.capacity, stamp: self.image_stamp() }
    }

    fn image_stamp(&self) -> Option<ImageStamp> {
        if self.image.is_device || self.logged.is_some() {
            return Some(ImageStamp { bytes: self.capacity, modified_ns: 0, changed_ns: 0 });
        }
        let found = self.image.file.metadata().ok()?;
        let ns = |seconds: i64, rest: i64| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
        let modified_ns = ns(found.mtime(), found.mtime_nsec());
        Some(ImageStamp { bytes: found.len(), modified_ns, changed_ns: ns(found.ctime(), found.ctime_nsec()) })
    }
}
