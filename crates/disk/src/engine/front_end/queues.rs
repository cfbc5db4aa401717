//! Starts and stops queues, takes their requests, answers them and notifies the guest.

use super::connection::Connection;
use super::queue::{InflightQueue, QueueStep, RingError, RunningQueue};
use super::{FrontEnd, StoppingQueue};
use crate::descriptor_chain::DescriptorTable;
use crate::engine::catalog::{BlockCatalog, DriverState};
use crate::engine::command::{QueueDescriptors, Rings};
use crate::engine::ids::ConnectionId;
use crate::engine::io::{MAX_COPIED_BYTES, Token};
use crate::engine::refusal::{Answer, Refusal};
use crate::memory::Memory;
use crate::report::warn_limited;
use std::num::Wrapping;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemory, Permissions};

/// Most entries of a queue (virtio 1.2, 2.7).
pub const MAX_QUEUE_ENTRIES: u16 = 1024;
/// Most requests in progress.
const MAX_REQUESTS: usize = 1024;
/// No request is taken while those in progress have this many bytes: stopping a queue waits for them.
const MAX_REQUESTED_BYTES: u64 = 128 << 20;
/// Most requests to take from a queue in one turn. A long request costs as much as several.
const MAX_COST_PER_TURN: u64 = 256;
/// Most answers before the guest is notified, while the engine has more answers.
const MAX_UNNOTIFIED_ANSWERS: usize = 32;

/// Creates a queue with these rings. Does not set the position at which the queue continues in them.
fn new_queue(rings: &Rings, memory: &Memory) -> Result<Queue, String> {
    let mut queue = Queue::new(MAX_QUEUE_ENTRIES).map_err(|e| e.to_string())?;
    let is_set_up = queue
        .try_set_size(rings.size)
        .and_then(|()| queue.try_set_desc_table_address(GuestAddress(rings.descriptors)))
        .and_then(|()| queue.try_set_avail_ring_address(GuestAddress(rings.available)))
        .and_then(|()| queue.try_set_used_ring_address(GuestAddress(rings.used)));
    is_set_up.map_err(|e| e.to_string())?;
    queue.set_event_idx(rings.has_event_idx);
    queue.set_ready(true);
    let is_mapped = |address, bytes| memory.map.check_range(GuestAddress(address), bytes, Permissions::ReadWrite);
    let entries = usize::from(rings.size);
    // A descriptor has 16 bytes, an entry of the available ring 2 and one of the used ring 8; both rings have 6 more.
    let is_valid = is_mapped(rings.descriptors, entries * 16)
        && is_mapped(rings.available, entries * 2 + 6)
        && is_mapped(rings.used, entries * 8 + 6);
    if is_valid { Ok(queue) } else { Err("its rings are not in the guest's memory".into()) }
}

impl Connection {
    /// Adds a queue, which continues where a previous server or QEMU has left it. Returns whether the guest's driver
    /// has just started.
    fn add_queue(
        &mut self,
        queue_index: u16,
        memory: &Memory,
        rings: &Rings,
        descriptors: QueueDescriptors,
    ) -> Result<DriverState, String> {
        let mut queue = new_queue(rings, memory)?;
        let Wrapping(used) = queue.used_idx(&memory.map, Ordering::Acquire).map_err(|e| e.to_string())?;
        let unfinished = match &mut self.inflight {
            Some(inflight) => inflight.unfinished_heads(queue_index, used).map_err(|e| e.to_string())?,
            None => Vec::new(),
        };
        queue.set_next_used(used);
        // Requests that were taken before are done again; the ring continues after them. The front end's position may be older: a
        // stopped QEMU that reconnects starts its queues where it has left them, and another QEMU may have continued since.
        let next_available = used.wrapping_add(unfinished.len() as u16);
        if next_available != rings.next_available {
            tracing::info!(
                "queue {queue_index} continues at {next_available}; its front end has named {}",
                rings.next_available
            );
        }
        queue.set_next_avail(next_available);
        let queue = RunningQueue::new(queue, descriptors, unfinished);
        // A previous server may have been killed between an answer and its notification, for which the guest waits.
        queue.interrupt();
        self.queues.insert(queue_index, queue);
        let is_first = self.queues.len() == 1;
        if is_first {
            self.repeat_growth();
        }
        Ok(if is_first && used == 0 { DriverState::Started } else { DriverState::Continues })
    }
}

impl<B: BlockCatalog> FrontEnd<B> {
    pub(super) fn start_queue(
        &mut self,
        connection_id: ConnectionId,
        queue_index: u16,
        rings: &Rings,
        descriptors: QueueDescriptors,
    ) -> Result<(), Refusal> {
        if !self.blocks.is_open() {
            return Err(Refusal("it waits for a restore, and has no disk yet".into()));
        }
        if let Some(other) = self.active.filter(|active| *active != connection_id)
            && self.connections.get(&other).is_some_and(Connection::has_queues)
        {
            return Err(Refusal("another front end's queues run: stop that guest first".into()));
        }
        let connection = self.connection(connection_id)?;
        let memory = connection.memory.clone().ok_or_else(|| Refusal("it has no memory".into()))?;
        let rejected = |why: String| Refusal(format!("queue {queue_index}: {why}"));
        let driver = connection.add_queue(queue_index, &memory, rings, descriptors).map_err(rejected)?;
        self.active = Some(connection_id);
        self.blocks.begin_records(&memory, driver, &mut self.io.buffers);
        self.listen_for_kick(connection_id, queue_index);
        self.take_requests_from(connection_id, queue_index);
        Ok(())
    }

    fn listen_for_kick(&mut self, connection_id: ConnectionId, queue_index: u16) {
        if let Some(queue) = self.queue(connection_id, queue_index) {
            let kick = Arc::clone(&queue.kick);
            self.io.listen(&kick, Token::Kick(connection_id, queue_index));
        }
    }

    fn queue(&self, connection_id: ConnectionId, queue_index: u16) -> Option<&RunningQueue> {
        self.connections.get(&connection_id)?.queues.get(&queue_index)
    }

    fn queue_mut(&mut self, connection_id: ConnectionId, queue_index: u16) -> Option<&mut RunningQueue> {
        self.connections.get_mut(&connection_id)?.queues.get_mut(&queue_index)
    }

    /// Stops taking requests from a queue. [`Self::answer_stopped`] answers when none of its requests is in progress.
    /// Requests that a previous server or front end had taken are done first: the next QEMU may have another record
    /// of requests in progress, without them.
    pub(super) fn stop_queue(&mut self, connection_id: ConnectionId, queue_index: u16, answer: Answer<u16>) {
        match self.queue_mut(connection_id, queue_index) {
            Some(queue) => {
                queue.is_stopping = true;
                let has_unfinished = queue.has_unfinished();
                self.has_more |= has_unfinished;
                self.stopping_queues.push(StoppingQueue { connection_id, queue_index, answer });
                // Writes that wait because the log is full continue, too: they must complete before the guest stops.
                self.retry_waiting_parts();
            }
            None => drop(answer.send(Err(Refusal(format!("queue {queue_index} does not run"))))),
        }
    }

    /// Returns whether requests of a queue are in progress or are still to be repeated.
    fn has_requests(&self, connection_id: ConnectionId, queue_index: u16) -> bool {
        self.queue(connection_id, queue_index).is_some_and(RunningQueue::has_unfinished)
            || self
                .requests
                .iter()
                .any(|(_, active)| active.connection_id == connection_id && active.queue_index == queue_index)
    }

    /// Removes queues that are being stopped and have no requests any more, and answers with their positions.
    pub fn answer_stopped(&mut self) {
        if self.stopping_queues.is_empty() {
            return;
        }
        let stopping_queues = std::mem::take(&mut self.stopping_queues);
        let (busy, idle): (Vec<_>, Vec<_>) = stopping_queues
            .into_iter()
            .partition(|stopping| self.has_requests(stopping.connection_id, stopping.queue_index));
        self.stopping_queues = busy;
        for StoppingQueue { connection_id, queue_index, answer } in idle {
            let connection = self.connections.get_mut(&connection_id);
            let queue = connection.and_then(|connection| connection.queues.remove(&queue_index));
            self.io.stop_listening(Token::Kick(connection_id, queue_index));
            // All earlier requests have been answered.
            let position = queue.map(|queue| queue.rings.next_avail());
            let _ = answer.send(position.ok_or_else(|| Refusal(format!("queue {queue_index} does not run"))));
        }
    }

    /// Handles a kick: the guest has added requests to the queue.
    pub fn handle_kick(&mut self, connection_id: ConnectionId, queue_index: u16) {
        let Some(queue) = self.queue(connection_id, queue_index).filter(|queue| queue.why_broken.is_none()) else {
            return;
        };
        if let Err(e) = queue.receive_kick() {
            return self.break_queue(connection_id, queue_index, &e);
        }
        self.listen_for_kick(connection_id, queue_index);
        self.take_requests_from(connection_id, queue_index);
    }

    /// Takes requests from all queues, because there is space for some again.
    pub fn take_requests(&mut self) {
        let Some(connection_id) = self.active else { return };
        let queue_indexes: Vec<u16> = self
            .connections
            .get(&connection_id)
            .map_or(Vec::new(), |connection| connection.queues.keys().copied().collect());
        queue_indexes.into_iter().for_each(|queue_index| self.take_requests_from(connection_id, queue_index));
    }

    /// Takes requests from a queue's available ring while there is space.
    fn take_requests_from(&mut self, connection_id: ConnectionId, queue_index: u16) {
        // Requests of a previous front end may still write the disk: no new request may overtake them.
        if self.is_ending || self.requests.iter().any(|(_, active)| active.connection_id != connection_id) {
            return;
        }
        let mut cost = 0;
        while cost < MAX_COST_PER_TURN {
            if self.requests.len() >= MAX_REQUESTS || self.requested_bytes >= MAX_REQUESTED_BYTES {
                return;
            }
            let Some(connection) = self.connections.get_mut(&connection_id) else { return };
            let (Some(queue), Some(memory)) = (connection.queues.get_mut(&queue_index), connection.memory.clone())
            else {
                return;
            };
            match queue.next_request(&memory) {
                Ok(QueueStep::ServeNew { head }) => {
                    self.record_taken(connection_id, queue_index, head);
                    cost += self.begin_request(connection_id, queue_index, head, &memory);
                }
                Ok(QueueStep::ServeAgain { head }) => {
                    cost += self.begin_request(connection_id, queue_index, head, &memory)
                }
                Ok(QueueStep::Retry) => cost += 1,
                Ok(QueueStep::WaitForKick) => return,
                Err(e) => return self.break_queue(connection_id, queue_index, &e),
            }
        }
        // A guest that adds requests as fast as they are taken must not block other queues or commands.
        self.has_more = true;
    }

    /// Handles an error of a queue's rings: the queue takes no more requests.
    fn break_queue(&mut self, connection_id: ConnectionId, queue_index: u16, error: &RingError) {
        let queue = self.queue_mut(connection_id, queue_index);
        if queue.is_some_and(|queue| queue.set_broken(error)) {
            warn_limited!(
                "{}: queue {queue_index} is broken: {error}; no more requests are taken from it until the guest resets the disk",
                self.blocks.image_path().display()
            );
        }
    }

    pub(super) fn descriptor_table(&self, connection_id: ConnectionId, queue_index: u16) -> Option<DescriptorTable> {
        let rings = &self.queue(connection_id, queue_index)?.rings;
        Some(DescriptorTable { address: rings.desc_table(), entries: rings.size().into() })
    }

    /// Records a request as in progress, for the next server if this one is killed.
    fn record_taken(&mut self, connection_id: ConnectionId, queue_index: u16, head: u16) {
        let inflight = self.connections.get_mut(&connection_id).and_then(|connection| connection.inflight.as_mut());
        if let Some(Err(e)) = inflight.map(|inflight| inflight.record_taken(queue_index, head)) {
            warn_limited!("a request is not noted as under way: {e}");
        }
    }

    /// Puts a chain into the used ring. [`Self::notify`] notifies the guest, before the engine waits.
    pub(super) fn answer_chain(&mut self, connection_id: ConnectionId, queue_index: u16, head: u16, written: u32) {
        let Some(connection) = self.connections.get_mut(&connection_id) else { return };
        let (Some(queue), Some(memory)) = (connection.queues.get_mut(&queue_index), connection.memory.as_ref()) else {
            return;
        };
        let inflight = connection.inflight.as_mut().map(|record| InflightQueue { record, queue_index });
        match queue.answer(memory, inflight, head, written) {
            Ok(Ok(())) => {}
            Ok(Err(e)) => warn_limited!("a request is not noted as done: {e}"),
            Err(e) => self.break_queue(connection_id, queue_index, &e),
        }
        self.unnotified_answers += 1;
        if self.unnotified_answers >= MAX_UNNOTIFIED_ANSWERS || written as usize >= MAX_COPIED_BYTES {
            self.notify();
        }
    }

    /// Notifies guests of all answers. One notification covers many answers: each notification wakes a processor of
    /// the guest, and costs both sides more than a small request.
    pub fn notify(&mut self) {
        if std::mem::take(&mut self.unnotified_answers) == 0 {
            return;
        }
        for connection in self.connections.values_mut() {
            let Some(memory) = &connection.memory else { continue };
            connection.queues.values_mut().for_each(|queue| queue.notify(memory));
        }
    }
}
