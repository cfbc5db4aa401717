//! The vhost-user front end: connected QEMUs, their queues, and the requests in progress.
//!
//! | module | contents |
//! |---|---|
//! | `connection` | one connected QEMU: its memory and its queues |
//! | `queue` | a running queue: takes requests from its rings and checks them |
//! | `queues` | starts and stops queues, takes their requests, notifies the guest |
//! | `written_pages` | pages of the guest's memory that the server writes |
//! | `request` | one request, from the available to the used ring |
//!
//! "Front end" in the vhost-user protocol is the QEMU. Each connected QEMU is a [`Connection`] in this module.

mod connection;
mod queue;
mod queues;
mod request;
mod written_pages;

use super::catalog::BlockCatalog;
use super::command::BrokenQueue;
use super::ids::{ConnectionId, PartId};
use super::io::DiskIo;
use super::refusal::{Answer, Refusal};
use crate::limit::{Limits, Throttle};
use crate::memory::Memory;
use connection::Connection;
use queue::RunningQueue;
pub use queues::MAX_QUEUE_ENTRIES;
use request::ActiveRequest;
use slab::Slab;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;
use written_pages::WrittenPages;

/// A queue that is being stopped.
struct StoppingQueue {
    connection_id: ConnectionId,
    queue_index: u16,
    /// Receives the queue's position once none of its requests is in progress.
    answer: Answer<u16>,
}

/// The connected QEMUs, their queues and their requests in progress.
pub(super) struct FrontEnd<B> {
    /// The block catalog: image, redo log and cache.
    pub blocks: B,
    pub io: DiskIo,
    /// Serial number that the guest sees.
    serial: String,
    connections: BTreeMap<ConnectionId, Connection>,
    /// The connection whose queues run.
    active: Option<ConnectionId>,
    /// Pages of the guest's memory that the server writes, for a protector.
    written_pages: Option<WrittenPages>,
    stopping_queues: Vec<StoppingQueue>,
    requests: Slab<ActiveRequest>,
    /// Sequence number of the next request.
    next_sequence: u64,
    /// Bytes of all requests in progress.
    requested_bytes: u64,
    /// Parts that wait for space in the ring, or for the rate limit.
    waiting_parts: VecDeque<PartId>,
    throttle: Throttle,
    /// Time at which the first part that waits for the rate limit may start.
    throttled_until: Option<Instant>,
    /// A request has completed, so that another one may be taken from its queue.
    has_room: bool,
    /// A queue may have more requests than one turn takes.
    has_more: bool,
    /// Number of answers that guests have not been notified of.
    unnotified_answers: usize,
    /// The server is ending: no request is taken any more.
    is_ending: bool,
}

impl<B: BlockCatalog> FrontEnd<B> {
    pub fn new(blocks: B, io: DiskIo, serial: String, limits: Limits) -> Self {
        Self {
            blocks,
            io,
            serial,
            connections: BTreeMap::new(),
            active: None,
            written_pages: None,
            stopping_queues: Vec::new(),
            requests: Slab::new(),
            next_sequence: 0,
            requested_bytes: 0,
            waiting_parts: VecDeque::new(),
            throttle: Throttle::new(limits, Instant::now()),
            throttled_until: None,
            has_room: false,
            has_more: false,
            unnotified_answers: 0,
            is_ending: false,
        }
    }

    /// Does all work that needs no completion.
    pub fn work(&mut self) {
        // Not done when a request completes: a request that needs no disk completes when it begins.
        if std::mem::take(&mut self.has_room) | std::mem::take(&mut self.has_more) {
            self.take_requests();
        }
        self.start_waiting_parts();
    }

    /// Returns the time at which the first part that waits for the rate limit may start.
    pub fn throttled_until(&self) -> Option<Instant> {
        self.throttled_until
    }

    /// Returns whether a queue may have requests that the last turn did not take, and for which there is space.
    pub fn has_more(&self) -> bool {
        self.has_more || self.has_room
    }

    pub fn set_limits(&mut self, limits: Limits) {
        self.throttle = Throttle::new(limits, Instant::now());
    }

    /// Stops taking requests. Requests in progress complete, also those that wait because the log is full.
    pub fn end(&mut self) {
        self.is_ending = true;
        self.retry_waiting_parts();
    }

    pub fn has_ended(&self) -> bool {
        self.is_ending && self.requests.is_empty()
    }

    /// Retries parts that wait for the redo log.
    pub fn retry_waiting_parts(&mut self) {
        self.blocks.retry_waiting(&mut self.waiting_parts);
    }

    /// Queues parts again that have waited for a redo log that has ended.
    pub fn requeue_parts(&mut self, parts: impl IntoIterator<Item = PartId>) {
        self.waiting_parts.extend(parts);
    }

    /// Returns the sequence number of the oldest request in progress.
    pub fn oldest_sequence(&self) -> Option<u64> {
        self.requests.iter().map(|(_, active)| active.sequence).min()
    }

    pub fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// Returns whether the guest's queues run, or requests are in progress.
    pub fn is_running(&self) -> bool {
        let has_queues =
            self.active.and_then(|active| self.connections.get(&active)).is_some_and(Connection::has_queues);
        has_queues || !self.requests.is_empty()
    }

    /// Returns whether a guest uses the disk or may continue with it. The QEMU of a stopped guest has passed its
    /// memory to this server. A QEMU that has connected and waits for its guest has not.
    pub fn is_used(&self) -> bool {
        !self.requests.is_empty() || !self.connections.values().all(Connection::is_waiting)
    }

    /// Rejects a command while a guest uses the disk or may continue with it.
    pub fn check_unused(&self) -> Result<(), Refusal> {
        if self.is_used() { Err(Refusal("a QEMU is still connected".into())) } else { Ok(()) }
    }

    /// Returns the memories of all connected QEMUs.
    pub fn memories(&self) -> impl Iterator<Item = &Arc<Memory>> {
        self.connections.values().filter_map(|connection| connection.memory.as_ref())
    }

    pub fn counts(&self) -> FrontEndCounts {
        FrontEndCounts {
            connected: self.connections.len(),
            waiting: self.connections.values().filter(|connection| connection.is_waiting()).count(),
            requests: self.requests.len(),
        }
    }

    /// Returns whether the queues of a connected QEMU have been started.
    pub fn is_active(&self) -> bool {
        self.active.is_some()
    }

    pub fn broken_queues(&self) -> Vec<BrokenQueue> {
        let queues = self.connections.values().flat_map(|connection| &connection.queues);
        let broken =
            |(index, queue): (&u16, &RunningQueue)| Some(BrokenQueue { queue: *index, why: queue.why_broken.clone()? });
        queues.filter_map(broken).collect()
    }
}

pub(super) struct FrontEndCounts {
    /// Number of connected QEMUs.
    pub connected: usize,
    /// Number of connected QEMUs that wait for their guest's state.
    pub waiting: usize,
    /// Number of requests in progress.
    pub requests: usize,
}
