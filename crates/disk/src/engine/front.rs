//! A front end: its memory and its queues.

use super::command::{Broken, FrontendId, Notification, QueueDescriptors, Refused, Rings};
use super::line::{Line, QueueStep, RingError};
use super::{Engine, FEED, Token};
use crate::background::run_in_background;
use crate::channel;
use crate::inflight::Inflight;
use crate::map::BlockMap;
use crate::memory::Memory;
use crate::report::warn_limited;
use crate::retained::RetainedCache;
use std::collections::BTreeMap;
use std::fs::File;
use std::num::Wrapping;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemory, Permissions};

/// Most entries of a queue (virtio 1.2, 2.7).
pub const MOST_ENTRIES: u16 = 1024;
/// Most requests in progress.
const MOST_JOBS: usize = 1024;
/// No request is taken while those in progress have this many bytes: stopping a queue waits for them.
const MOST_BYTES: u64 = 128 << 20;
/// Most requests to take from a queue in one turn. A long one counts as several.
const TURN: u64 = 256;
/// Most answers before the guest is notified, while the engine has more of them.
const MOST_UNNOTIFIED: usize = 32;

/// See [the module](self).
#[derive(Default)]
pub(super) struct Front {
    pub process: Option<u32>,
    pub memory: Option<Arc<Memory>>,
    pub lines: BTreeMap<u16, Line>,
    inflight: Option<Inflight>,
    /// A socket for notifications.
    channel: Option<OwnedFd>,
    /// The disk may have grown while its queues did not run: QEMU does not listen then.
    is_growth_unreported: bool,
}

impl Front {
    /// Whether no queue of it has run and it has passed no memory, as a QEMU that waits for its guest's state.
    pub(super) fn waits(&self) -> bool {
        self.memory.is_none() && self.lines.is_empty()
    }

    fn notify_grown(&mut self) {
        self.is_growth_unreported = self.lines.is_empty();
        if let Some(Err(e)) = self.channel.as_ref().map(channel::config_changed) {
            warn_limited!("cannot notify QEMU that the disk has grown: {e}; the guest sees it after a reboot");
        }
    }
}

impl Engine {
    pub(super) fn join(&mut self, session: FrontendId, process: Option<u32>) {
        self.fronts.insert(session, Front { process, is_growth_unreported: true, ..Front::default() });
    }

    pub(super) fn set_channel(&mut self, session: FrontendId, channel: OwnedFd) {
        if let Some(front) = self.fronts.get_mut(&session) {
            front.channel = Some(channel);
        }
    }

    /// Notifies all front ends that the disk has grown.
    pub(super) fn notify_grown(&mut self) {
        self.fronts.values_mut().for_each(Front::notify_grown);
    }

    /// Removes a front end. Its requests in progress still complete, even those that wait because the log is full, without notification.
    pub(super) fn leave(&mut self, session: FrontendId) {
        let front = self.fronts.remove(&session);
        for number in front.iter().flat_map(|front| front.lines.keys()) {
            self.ring.cancel(Token::Kick(session, *number).pack());
        }
        self.stopping.retain(|(of, _, _)| *of != session);
        if self.active == Some(session) {
            self.active = None;
        }
        self.record.take_if(|record| record.session == session);
        self.release();
    }

    fn front(&mut self, session: FrontendId) -> Result<&mut Front, Refused> {
        self.fronts.get_mut(&session).ok_or_else(|| Refused("there is no such front end".into()))
    }

    pub(super) fn set_memory(&mut self, session: FrontendId, memory: Arc<Memory>) -> Result<(), Refused> {
        let front = self.front(session)?;
        if !front.lines.is_empty() {
            return Err(Refused("its queues run, so its memory cannot be replaced".into()));
        }
        let before = front.memory.replace(Arc::clone(&memory));
        if let Some(record) = self.record.as_mut().filter(|record| record.session == session) {
            record.remap(before, &memory);
        }
        // Releasing a frame would take it from that guest.
        if let Some(retained) =
            self.retained.take_if(|retained| retained.is_in(&memory) != retained.is_in_running_guest())
        {
            warn_limited!("the retained cache is dropped: its memory is in use again, or its guest has disconnected");
            retained.detach();
        }
        // Without the other claims, releasing a frame could take it from another disk.
        if self.retained.take_if(|retained| retained.is_unshared()).is_some() {
            warn_limited!("the retained cache is dropped: it is not known which frames the VM's other disks need");
        }
        Ok(())
    }

    pub(super) fn set_inflight(&mut self, session: FrontendId, inflight: Inflight) -> Result<(), Refused> {
        self.front(session)?.inflight = Some(inflight);
        Ok(())
    }

    pub(super) fn set_notify(
        &mut self,
        session: FrontendId,
        queue: u16,
        which: Notification,
        descriptor: Option<File>,
    ) -> Result<(), Refused> {
        if let Some(line) = self.front(session)?.lines.get_mut(&queue) {
            match which {
                Notification::Call => {
                    line.call = descriptor;
                    // Earlier answers could not be notified.
                    line.interrupt();
                }
                Notification::Error => line.error = descriptor,
            }
        }
        Ok(())
    }

    /// Starts a queue.
    pub(super) fn start_line(
        &mut self,
        session: FrontendId,
        number: u16,
        rings: Rings,
        ends: QueueDescriptors,
    ) -> Result<(), Refused> {
        if self.waits {
            return Err(Refused("it waits for a restore, and has no disk yet".into()));
        }
        if let Some(other) = self.active.filter(|active| *active != session)
            && self.fronts.get(&other).is_some_and(|front| !front.lines.is_empty())
        {
            return Err(Refused("another front end's queues run: stop that guest first".into()));
        }
        let front = self.fronts.get_mut(&session).ok_or_else(|| Refused("there is no such front end".into()))?;
        let memory = front.memory.clone().ok_or_else(|| Refused("it has no memory".into()))?;
        let odd = |what: &str| Refused(format!("queue {number}: {what}"));
        let mut queue = Queue::new(MOST_ENTRIES).map_err(|e| odd(&e.to_string()))?;
        let address = GuestAddress;
        let set = queue
            .try_set_size(rings.size)
            .and_then(|()| queue.try_set_desc_table_address(address(rings.descriptors)))
            .and_then(|()| queue.try_set_avail_ring_address(address(rings.available)))
            .and_then(|()| queue.try_set_used_ring_address(address(rings.used)));
        set.map_err(|e| odd(&e.to_string()))?;
        queue.set_event_idx(rings.event_idx);
        queue.set_ready(true);
        let is_there = |at, bytes| memory.map.check_range(address(at), bytes, Permissions::ReadWrite);
        let entries = usize::from(rings.size);
        // A descriptor has 16 bytes, an entry of the available ring 2 and one of the used ring 8; both rings have 6 more.
        let is_valid = is_there(rings.descriptors, entries * 16)
            && is_there(rings.available, entries * 2 + 6)
            && is_there(rings.used, entries * 8 + 6);
        if !is_valid {
            return Err(odd("its rings are not in the guest's memory"));
        }
        let Wrapping(used) = queue.used_idx(&memory.map, Ordering::Acquire).map_err(|e| odd(&e.to_string()))?;
        let again = match &mut front.inflight {
            Some(inflight) => inflight.unfinished(number, used).map_err(|e| odd(&e.to_string()))?,
            None => Vec::new(),
        };
        queue.set_next_used(used);
        // Requests taken before are done again; the ring continues after them.
        queue.set_next_avail(if again.is_empty() { rings.next } else { used.wrapping_add(again.len() as u16) });
        let kick = Arc::new(ends.kick);
        let line = Line {
            queue,
            kick: Arc::clone(&kick),
            call: ends.call,
            error: ends.error,
            again: again.into(),
            stopping: false,
            broken: None,
            has_unnotified: false,
        };
        // A previous server may have been killed between an answer and its notification, for which the guest waits.
        line.interrupt();
        front.lines.insert(number, line);
        if front.is_growth_unreported {
            front.notify_grown();
        }
        let is_new = used == 0 && front.lines.len() == 1;
        self.active = Some(session);
        if is_new {
            self.begin_reuse();
        }
        self.begin_map(&memory);
        self.listen(&kick, Token::Kick(session, number));
        self.take(session, number);
        Ok(())
    }

    /// Handles the start of the guest's driver, with its first queue. If a reuse was announced, it is another kernel in the same memory. What
    /// the previous kernel cached is there until the new one uses the frames.
    fn begin_reuse(&mut self) {
        if !std::mem::take(&mut self.reuse) {
            return;
        }
        self.note_all();
        let Some((map, memory)) = self.map.take() else { return };
        match RetainedCache::in_running_guest(&memory, map, self.digester) {
            Ok(retained) => {
                // Of two previous kernels the older one's blocks are less useful.
                if let Some(previous) = self.retained.replace(retained) {
                    run_in_background("retained", previous, drop);
                }
                (self.emptied, self.kept_at) = (None, Instant::now());
            }
            Err(e) => warn_limited!("cannot use what the guest's previous kernel cached: {e}"),
        }
    }

    /// Prepares the block map for a guest's memory. It is kept if the memory is the same: after a VMM restart, or if the table divides the
    /// memory differently, as firmware and kernel do.
    fn begin_map(&mut self, memory: &Arc<Memory>) {
        if !self.settings.map {
            return;
        }
        self.note_all();
        let is_same = self.map.as_ref().is_some_and(|(_, before)| before.is_same(memory));
        match &mut self.map {
            Some((_, before)) if is_same => *before = Arc::clone(memory),
            _ => {
                self.map = BlockMap::try_new(memory.frames()).map(|map| (map, Arc::clone(memory)));
                if self.map.is_none() {
                    warn_limited!(
                        "the host has no memory for the block map: the cache will be cold after the next reboot"
                    );
                }
            }
        }
    }

    /// Stops taking requests from a queue. Answered when none of its requests is in progress: [`Engine::answer_stopped`]. Requests that a
    /// previous server or front end had taken are done first: the next QEMU may have another record of requests in progress, without them.
    pub(super) fn stop_line(
        &mut self,
        session: FrontendId,
        number: u16,
        answer: std::sync::mpsc::Sender<Result<u16, Refused>>,
    ) {
        let line = self.fronts.get_mut(&session).and_then(|front| front.lines.get_mut(&number));
        match line {
            Some(line) => {
                line.stopping = true;
                self.has_more |= line.has_unfinished();
                self.stopping.push((session, number, answer));
                // Writes that wait because the log is full continue, too: they must complete before the guest stops.
                self.release();
            }
            None => drop(answer.send(Err(Refused(format!("queue {number} does not run"))))),
        }
    }

    pub(super) fn answer_stopped(&mut self) {
        let is_busy = |session: FrontendId, number: u16| {
            let line = self.fronts.get(&session).and_then(|front| front.lines.get(&number));
            line.is_some_and(Line::has_unfinished)
                || self.jobs.iter().any(|(_, job)| job.session == session && job.queue == number)
        };
        let (busy, idle): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.stopping).into_iter().partition(|(session, number, _)| is_busy(*session, *number));
        self.stopping = busy;
        for (session, number, answer) in idle {
            let line = self.fronts.get_mut(&session).and_then(|front| front.lines.remove(&number));
            self.ring.cancel(Token::Kick(session, number).pack());
            // All earlier requests have been answered.
            let next = line.map(|line| line.queue.next_avail());
            let _ = answer.send(next.ok_or_else(|| Refused(format!("queue {number} does not run"))));
        }
    }

    pub(super) fn kicked(&mut self, session: FrontendId, number: u16) {
        let Some(line) = self.fronts.get(&session).and_then(|front| front.lines.get(&number)) else { return };
        if line.broken.is_some() {
            return;
        }
        if let Err(e) = line.kicked() {
            return self.ring_failed(session, number, &e);
        }
        let kick = Arc::clone(&line.kick);
        self.listen(&kick, Token::Kick(session, number));
        self.take(session, number);
    }

    /// Takes requests from all queues: there is space for some again.
    pub(super) fn take_all(&mut self) {
        let Some(session) = self.active else { return };
        let numbers: Vec<u16> =
            self.fronts.get(&session).map_or(Vec::new(), |front| front.lines.keys().copied().collect());
        numbers.into_iter().for_each(|number| self.take(session, number));
    }

    /// Takes requests from the available ring, as far as there is space.
    fn take(&mut self, session: FrontendId, number: u16) {
        // Requests of a previous front end may still write the disk: no new request may overtake them.
        if self.ended || self.jobs.iter().any(|(_, job)| job.session != session) {
            return;
        }
        let mut cost = 0;
        while cost < TURN {
            if self.jobs.len() >= MOST_JOBS || self.taken_bytes >= MOST_BYTES {
                return;
            }
            let Some(front) = self.fronts.get_mut(&session) else { return };
            let (Some(line), Some(memory)) = (front.lines.get_mut(&number), front.memory.clone()) else { return };
            match line.next(&memory) {
                Ok(QueueStep::Request { head, is_new }) => cost += self.begin(session, number, head, &memory, is_new),
                Ok(QueueStep::Retry) => cost += 1,
                Ok(QueueStep::WaitForKick) => return,
                Err(e) => return self.ring_failed(session, number, &e),
            }
        }
        // A guest that adds requests as fast as they are taken must not block other queues or commands.
        self.has_more = true;
    }

    /// Handles a broken queue: it takes no more requests.
    fn ring_failed(&mut self, session: FrontendId, number: u16, error: &RingError) {
        let line = self.fronts.get_mut(&session).and_then(|front| front.lines.get_mut(&number));
        if line.is_some_and(|line| line.fail(error)) {
            warn_limited!(
                "{}: queue {number} is broken: {error}; no more requests are taken from it until the guest resets the disk",
                self.image.path.display()
            );
        }
    }

    pub(super) fn broken(&self) -> Vec<Broken> {
        let lines = self.fronts.values().flat_map(|front| &front.lines);
        lines.filter_map(|(queue, line)| Some(Broken { queue: *queue, why: line.broken.clone()? })).collect()
    }

    /// Address and number of a queue's descriptors.
    pub(super) fn table(&self, session: FrontendId, number: u16) -> Option<(u64, u16)> {
        let line = self.fronts.get(&session)?.lines.get(&number)?;
        Some((line.queue.desc_table(), line.queue.size()))
    }

    pub(super) fn note_taken(&mut self, session: FrontendId, number: u16, head: u16) {
        let inflight = self.fronts.get_mut(&session).and_then(|front| front.inflight.as_mut());
        if let Some(Err(e)) = inflight.map(|inflight| inflight.taken(number, head)) {
            warn_limited!("a request is not noted as under way: {e}");
        }
    }

    /// Puts a chain into the used ring. [`Engine::notify`] notifies the guest, before the engine waits.
    pub(super) fn answer_chain(&mut self, session: FrontendId, number: u16, head: u16, written: u32) {
        let Some(front) = self.fronts.get_mut(&session) else { return };
        let (Some(line), Some(memory)) = (front.lines.get_mut(&number), front.memory.as_ref()) else { return };
        match line.answer(memory, front.inflight.as_mut().map(|inflight| (inflight, number)), head, written) {
            Ok(Ok(())) => {}
            Ok(Err(e)) => warn_limited!("a request is not noted as done: {e}"),
            Err(e) => self.ring_failed(session, number, &e),
        }
        self.unnotified += 1;
        if self.unnotified >= MOST_UNNOTIFIED || written as usize >= FEED {
            self.notify();
        }
    }

    /// Notifies guests of all answers. One notification is for many answers: each wakes a processor of the guest, and costs both sides more
    /// than a small request.
    pub(super) fn notify(&mut self) {
        if std::mem::take(&mut self.unnotified) == 0 {
            return;
        }
        for front in self.fronts.values_mut() {
            let Some(memory) = &front.memory else { continue };
            front.lines.values_mut().for_each(|line| line.notify(memory));
        }
    }
}
