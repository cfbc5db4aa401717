//! What others ask the engine for, and what they get.

use super::Engine;
use super::command::{Command, Refused, Status};
use crate::attic::Attic;
use crate::limit::Throttle;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Engine {
    /// Do what was asked for.
    pub(super) fn serve_commands(&mut self) {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Join(session, process) => self.join(session, process),
                Command::Leave(session) => self.leave(session),
                Command::Memory(session, memory, answer) => drop(answer.send(self.set_memory(session, memory))),
                Command::Inflight(session, inflight, answer) => drop(answer.send(self.set_inflight(session, inflight))),
                Command::Start(session, queue, rings, ends, answer) => {
                    drop(answer.send(self.start_line(session, queue, rings, ends)));
                }
                Command::Call(session, queue, call, answer) => drop(answer.send(self.set_call(session, queue, call))),
                Command::Stop(session, queue, answer) => self.stop_line(session, queue, answer),
                Command::Limit(limits, answer) => {
                    self.settings.limits = limits;
                    self.throttle = Throttle::new(limits, Instant::now());
                    let _ = answer.send(Ok(()));
                }
                Command::Measure(answer) => {
                    let measured = self.image.measure(self.capacity).map_err(|e| Refused(e.to_string()));
                    self.capacity = *measured.as_ref().unwrap_or(&self.capacity);
                    let _ = answer.send(measured);
                }
                Command::Keep(answer) => drop(answer.send(self.keep())),
                Command::Drop(answer) => {
                    (self.attic, self.emptied) = (None, None);
                    // What is known of its memory keeps that from going.
                    if self.fronts.is_empty() && self.jobs.is_empty() {
                        self.map = None;
                    }
                    let _ = answer.send(Ok(()));
                }
                Command::Note(process, answer) => drop(answer.send(self.note(process))),
                Command::Collect(answer) => drop(answer.send(self.collect())),
                Command::Visit(visit) => self.visited(visit),
                Command::Filled(answer) => {
                    self.settings.filling.store(false, Ordering::Relaxed);
                    self.fronts.values().filter_map(|front| front.memory.as_ref()).for_each(|memory| memory.filled());
                    let _ = answer.send(Ok(()));
                }
                Command::Status(answer) => drop(answer.send(Ok(self.status()))),
                Command::End(answer) => {
                    self.ended = true;
                    let _ = answer.send(Ok(()));
                }
            }
        }
    }

    /// The memory of the guest that has ended becomes the attic of the next one.
    fn keep(&mut self) -> Result<usize, Refused> {
        // Also one whose queues do not run: a guest that is only stopped goes on with its memory.
        if self.jobs.iter().next().is_some() || !self.fronts.is_empty() {
            return Err(Refused("a QEMU is still connected".into()));
        }
        // Asked for once more, by who finishes what another has begun: nobody has used the disk since.
        let Some((map, memory)) = self.map.take() else { return Ok(self.attic.as_ref().map_or(0, Attic::len)) };
        let attic = Attic::new(&memory, map, self.digester);
        let blocks = attic.len();
        self.attic = (blocks > 0).then_some(attic);
        self.emptied = None;
        self.swept = false;
        self.kept_at = Instant::now();
        Ok(blocks)
    }

    fn status(&self) -> Status {
        Status {
            bytes: self.capacity,
            connected: self.fronts.len(),
            active: self.active.is_some(),
            under_way: self.jobs.len(),
            mapped: self.map.as_ref().map_or(0, |(map, _)| map.len()),
            map_bytes: self.map.as_ref().map_or(0, |(map, _)| map.bytes()),
            attic: self.attic.as_ref().map(|attic| (attic.len(), attic.told())),
            emptied: self.emptied,
            unchecked: crate::attic::UNCHECKED,
            redo: self.logged.as_ref().map(super::logged::Logged::told),
        }
    }
}
