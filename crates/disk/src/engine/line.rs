//! A running queue: takes requests from its rings and checks them.
//!
//! The guest can write anything into its rings at any time. What no correct driver does is a [`RingError`]: the queue is *broken*, takes
//! no more requests, and its front end is notified once. Requests in progress complete, the queue can be stopped like any other, and
//! works again when it is restarted, which a driver does after it resets its device.

use crate::inflight::Inflight;
use crate::memory::{Memory, WriteMarks};
use rustix::io::{Errno, read, write};
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use virtio_queue::{Error, Queue, QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;

/// What is wrong with the rings of a queue.
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
    /// Serve the request at this descriptor. `is_new`: it has not been taken before.
    Request {
        head: u16,
        is_new: bool,
    },
    /// Check again: the guest has just added a request.
    Retry,
    WaitForKick,
}

/// See [the module](self).
pub(super) struct Line {
    pub queue: Queue,
    pub kick: Arc<OwnedFd>,
    pub call: Option<File>,
    /// Written when the queue breaks.
    pub error: Option<File>,
    /// Taken by a previous server, and not completed.
    pub again: VecDeque<u16>,
    /// No new requests are taken.
    pub stopping: bool,
    /// Why no request is taken any more.
    pub broken: Option<String>,
    /// The used ring has entries that the guest has not been notified of.
    pub has_unnotified: bool,
}

impl Line {
    /// Takes the next request from the queue.
    pub fn next(&mut self, memory: &Memory) -> Result<QueueStep, RingError> {
        let size = self.queue.size();
        if self.broken.is_some() {
            return Ok(QueueStep::WaitForKick);
        }
        if let Some(head) = self.again.pop_front() {
            let found = QueueStep::Request { head, is_new: false };
            return if head < size { Ok(found) } else { Err(RingError::Inflight { head, size }) };
        }
        if self.stopping {
            return Ok(QueueStep::WaitForKick);
        }
        let map: &GuestMemoryMmap<WriteMarks> = &memory.map;
        self.queue.disable_notification(map).map_err(RingError::Access)?;
        let next = self.queue.next_avail();
        let mut available = match self.queue.iter(map) {
            Err(Error::InvalidAvailRingIndex) => {
                let index = self.queue.avail_idx(map, std::sync::atomic::Ordering::Relaxed);
                let index = index.map_err(RingError::Access)?.0;
                return Err(RingError::Index { index, next, size });
            }
            other => other.map_err(RingError::Access)?,
        };
        match available.next().map(|chain| chain.head_index()) {
            Some(head) if head < size => Ok(QueueStep::Request { head, is_new: true }),
            Some(head) => {
                available.go_to_previous_position();
                Err(RingError::Head { head, size })
            }
            None => {
                let is_more = self.queue.enable_notification(map).map_err(RingError::Access)?;
                Ok(if is_more { QueueStep::Retry } else { QueueStep::WaitForKick })
            }
        }
    }

    pub fn kicked(&self) -> Result<(), RingError> {
        match read(&self.kick, &mut [0; 8]) {
            // The front end has received it.
            Ok(8) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Ok(_) => Err(RingError::Kick(Errno::PIPE)),
            Err(e) => Err(RingError::Kick(e)),
        }
    }

    /// Puts a chain into the used ring. [`Line::notify`] notifies the guest.
    pub fn answer(
        &mut self,
        memory: &Memory,
        inflight: Option<(&mut Inflight, u16)>,
        head: u16,
        written: u32,
    ) -> Result<std::io::Result<()>, RingError> {
        let mut inflight = inflight;
        let noted = inflight.as_mut().map_or(Ok(()), |(inflight, number)| inflight.answering(*number, head));
        self.queue.add_used(&memory.map, head, written).map_err(RingError::Access)?;
        let used = self.queue.next_used();
        let noted =
            noted.and_then(|()| inflight.map_or(Ok(()), |(inflight, number)| inflight.answered(number, head, used)));
        self.has_unnotified = true;
        Ok(noted)
    }

    /// Notifies the guest of new entries in the used ring, if its driver requires that.
    pub fn notify(&mut self, memory: &Memory) {
        if std::mem::take(&mut self.has_unnotified) && self.queue.needs_notification(&memory.map).unwrap_or(true) {
            self.interrupt();
        }
    }

    /// Notifies the guest in any case. A driver that finds nothing new in the used ring ignores it.
    pub fn interrupt(&self) {
        self.call.iter().for_each(notify);
    }

    /// Stops taking requests permanently. Returns whether the queue was not broken before.
    pub fn fail(&mut self, error: &RingError) -> bool {
        let is_first = self.broken.is_none();
        if is_first {
            self.broken = Some(error.to_string());
            self.error.iter().for_each(notify);
        }
        is_first
    }

    /// Whether requests of a previous server are still to be done.
    pub fn has_unfinished(&self) -> bool {
        self.broken.is_none() && !self.again.is_empty()
    }
}

/// Adds one to an eventfd. If it is at its maximum, the other side has been notified already.
fn notify(descriptor: &File) {
    let _ = write(descriptor, &1u64.to_ne_bytes());
}
