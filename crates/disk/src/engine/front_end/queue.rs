//! A running queue: takes requests from its rings and checks them.
//!
//! The guest can write anything into its rings at any time. Content that no correct driver writes is a [`RingError`].
//! The queue is then *broken*: it takes no more requests, and its front end is notified once. Requests in progress
//! complete, and the queue can be stopped like any other. It works again when it is restarted, which a driver does
//! after it resets its device.

use crate::engine::command::QueueDescriptors;
use crate::inflight::Inflight;
use crate::memory::{Memory, WriteMarks};
use rustix::io::{Errno, read, write};
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use virtio_queue::{Error, Queue, QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;

/// The fault in the rings of a queue.
#[derive(Debug, thiserror::Error)]
pub(super) enum RingError {
    #[error("its available ring's index {index} is more than its {size} entries ahead of {next}")]
    Index { index: u16, next: u16, size: u16 },
    #[error("its available ring names descriptor {head}, and there are {size}")]
    Head { head: u16, size: u16 },
    #[error("the memory of requests under way names descriptor {head}, and there are {size}")]
    Inflight { head: u16, size: u16 },
    #[error("its rings cannot be accessed: {0}")]
    Access(Error),
    #[error("its kicks cannot be received: {0}")]
    Kick(Errno),
}

/// The next step with a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueueStep {
    /// Serve a new request, whose first descriptor is `head`.
    ServeNew {
        head: u16,
    },
    /// Serve a request that a previous server has taken already.
    ServeAgain {
        head: u16,
    },
    /// Check again: the guest has just added a request.
    Retry,
    WaitForKick,
}

/// One queue's part of the record of requests in progress.
pub(super) struct InflightQueue<'a> {
    pub record: &'a mut Inflight,
    pub queue_index: u16,
}

/// A queue that runs: its rings, its descriptors and its state.
pub(super) struct RunningQueue {
    pub rings: Queue,
    pub kick: Arc<OwnedFd>,
    pub call: Option<File>,
    /// Written when the queue breaks.
    pub error: Option<File>,
    /// Heads of requests that a previous server has taken and not completed.
    unfinished: VecDeque<u16>,
    /// The queue is being stopped: no new requests are taken.
    pub is_stopping: bool,
    /// The reason why no request is taken any more.
    pub why_broken: Option<String>,
    /// The used ring has entries that the guest has not been notified of.
    has_unnotified_answers: bool,
}

impl RunningQueue {
    /// Creates a queue. `unfinished`: heads of the requests to do again before new ones.
    pub fn new(rings: Queue, descriptors: QueueDescriptors, unfinished: Vec<u16>) -> Self {
        let QueueDescriptors { kick, call, error } = descriptors;
        Self {
            rings,
            kick: Arc::new(kick),
            call,
            error,
            unfinished: unfinished.into(),
            is_stopping: false,
            why_broken: None,
            has_unnotified_answers: false,
        }
    }

    /// Takes the next request from the queue.
    pub fn next_request(&mut self, memory: &Memory) -> Result<QueueStep, RingError> {
        let size = self.rings.size();
        if self.why_broken.is_some() {
            return Ok(QueueStep::WaitForKick);
        }
        if let Some(head) = self.unfinished.pop_front() {
            let is_valid = head < size;
            return if is_valid { Ok(QueueStep::ServeAgain { head }) } else { Err(RingError::Inflight { head, size }) };
        }
        if self.is_stopping {
            return Ok(QueueStep::WaitForKick);
        }
        self.next_available(memory)
    }

    /// Takes the next request from the available ring.
    fn next_available(&mut self, memory: &Memory) -> Result<QueueStep, RingError> {
        let size = self.rings.size();
        let map: &GuestMemoryMmap<WriteMarks> = &memory.map;
        self.rings.disable_notification(map).map_err(RingError::Access)?;
        let next = self.rings.next_avail();
        let mut available = match self.rings.iter(map) {
            Err(Error::InvalidAvailRingIndex) => {
                let index = self.rings.avail_idx(map, std::sync::atomic::Ordering::Relaxed);
                let index = index.map_err(RingError::Access)?.0;
                return Err(RingError::Index { index, next, size });
            }
            iterator => iterator.map_err(RingError::Access)?,
        };
        match available.next().map(|chain| chain.head_index()) {
            Some(head) if head < size => Ok(QueueStep::ServeNew { head }),
            Some(head) => {
                available.go_to_previous_position();
                Err(RingError::Head { head, size })
            }
            None => {
                let has_new_request = self.rings.enable_notification(map).map_err(RingError::Access)?;
                Ok(if has_new_request { QueueStep::Retry } else { QueueStep::WaitForKick })
            }
        }
    }

    pub fn receive_kick(&self) -> Result<(), RingError> {
        match read(&self.kick, &mut [0; 8]) {
            // The kick was received: by this read, or before by the front end.
            Ok(8) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Ok(_) => Err(RingError::Kick(Errno::PIPE)),
            Err(e) => Err(RingError::Kick(e)),
        }
    }

    /// Puts a chain into the used ring. [`Self::notify`] notifies the guest. The inner result: whether the answer is
    /// in the record of requests in progress.
    pub fn answer(
        &mut self,
        memory: &Memory,
        inflight: Option<InflightQueue<'_>>,
        head: u16,
        written: u32,
    ) -> Result<std::io::Result<()>, RingError> {
        let Some(InflightQueue { record, queue_index }) = inflight else {
            self.add_used(memory, head, written)?;
            return Ok(Ok(()));
        };
        let recorded = record.record_answering(queue_index, head);
        self.add_used(memory, head, written)?;
        Ok(recorded.and_then(|()| record.record_answered(queue_index, head, self.rings.next_used())))
    }

    fn add_used(&mut self, memory: &Memory, head: u16, written: u32) -> Result<(), RingError> {
        self.rings.add_used(&memory.map, head, written).map_err(RingError::Access)?;
        self.has_unnotified_answers = true;
        Ok(())
    }

    /// Notifies the guest of new entries in the used ring, if its driver requires that.
    pub fn notify(&mut self, memory: &Memory) {
        if std::mem::take(&mut self.has_unnotified_answers)
            && self.rings.needs_notification(&memory.map).unwrap_or(true)
        {
            self.interrupt();
        }
    }

    /// Notifies the guest in any case. A driver that finds nothing new in the used ring ignores the notification.
    pub fn interrupt(&self) {
        self.call.iter().for_each(signal);
    }

    /// Stops taking requests permanently. Returns whether the queue was not broken before.
    pub fn set_broken(&mut self, error: &RingError) -> bool {
        let is_first_error = self.why_broken.is_none();
        if is_first_error {
            self.why_broken = Some(error.to_string());
            self.error.iter().for_each(signal);
        }
        is_first_error
    }

    /// Returns whether requests of a previous server are still to be done.
    pub fn has_unfinished(&self) -> bool {
        self.why_broken.is_none() && !self.unfinished.is_empty()
    }
}

/// Adds one to an eventfd. If it is at its maximum, the other side has been notified already.
fn signal(descriptor: &File) {
    let _ = write(descriptor, &1u64.to_ne_bytes());
}
