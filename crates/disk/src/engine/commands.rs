//! Carries out commands of other threads.

use super::Engine;
use super::command::{Command, Refused, Status};
use super::front::Front;
use super::logged::EngineLog;
use crate::background::run_in_background;
use crate::image::Image;
use crate::limit::Throttle;
use crate::memory::Memory;
use crate::retained::RetainedCache;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Engine {
    pub(super) fn serve_commands(&mut self) {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Join(session, process) => self.join(session, process),
                Command::Leave(session) => self.leave(session),
                Command::Channel(session, channel, answer) => {
                    self.set_channel(session, channel);
                    let _ = answer.send(Ok(()));
                }
                Command::Memory(session, memory, answer) => drop(answer.send(self.set_memory(session, memory))),
                Command::Inflight(session, inflight, answer) => drop(answer.send(self.set_inflight(session, inflight))),
                Command::Start(session, queue, rings, ends, answer) => {
                    drop(answer.send(self.start_line(session, queue, rings, ends)));
                }
                Command::Notification(session, queue, which, descriptor, answer) => {
                    drop(answer.send(self.set_notify(session, queue, which, descriptor)));
                }
                Command::Stop(session, queue, answer) => self.stop_line(session, queue, answer),
                Command::Limit(limits, answer) => {
                    self.settings.limits = limits;
                    self.throttle = Throttle::new(limits, Instant::now());
                    let _ = answer.send(Ok(()));
                }
                Command::Measure(answer) => drop(answer.send(self.measure())),
                Command::Keep(claim, answer) => drop(answer.send(self.keep(claim.as_deref()))),
                Command::Reuse(answer) => {
                    self.reuse = true;
                    self.note_all();
                    let _ = answer.send(Ok(self.map.as_ref().map_or(0, |(map, _)| map.len())));
                }
                Command::Share(claims, answer) => drop(answer.send(self.share(&claims))),
                Command::Drop(answer) => {
                    self.drop_retained();
                    let _ = answer.send(Ok(()));
                }
                Command::Note(process, answer) => drop(answer.send(self.note(process))),
                Command::Collect(answer) => drop(answer.send(self.collect())),
                Command::Ledger(question) => self.serve_ledger(question),
                Command::Have(disk, answer) => drop(answer.send(self.have(*disk))),
                Command::Visit(visit) => self.visited(visit),
                Command::Filled(answer) => {
                    self.settings.filling.store(false, Ordering::Relaxed);
                    self.fronts.values().filter_map(|front| front.memory.as_ref()).for_each(|memory| memory.filled());
                    let _ = answer.send(Ok(()));
                }
                Command::Status(answer) => {
                    self.note_all();
                    drop(answer.send(Ok(self.status())));
                }
                Command::End(answer) => {
                    self.ended = true;
                    self.release();
                    let _ = answer.send(Ok(()));
                }
            }
        }
    }

    /// Adds the disk that the server has waited for. No queue has run before.
    fn have(&mut self, (image, logged): (Image, Option<EngineLog>)) -> Result<(), Refused> {
        if !std::mem::replace(&mut self.waits, false) {
            return Err(Refused("it has its disk already".into()));
        }
        (self.capacity, self.image, self.logged) = (image.bytes, Arc::new(image), logged);
        Ok(())
    }

    /// Updates the length of the image, and notifies the guest if it has grown.
    fn measure(&mut self) -> Result<u64, Refused> {
        let measured = self.image.measure(self.capacity).map_err(|e| Refused(e.to_string()))?;
        if std::mem::replace(&mut self.capacity, measured) < measured {
            self.notify_grown();
        }
        Ok(measured)
    }

    /// Turns the memory of the ended guest into the retained cache of the next one.
    fn keep(&mut self, claim: Option<&Path>) -> Result<usize, Refused> {
        // Queues that do not run are no proof: a guest that is only stopped continues with its memory.
        if self.is_used() {
            return Err(Refused("a QEMU is still connected".into()));
        }
        let failed = |e: io::Error| {
            let at = claim.map_or(String::new(), |path| format!("{}: ", path.display()));
            Refused(format!("{at}cannot record which of the guest's memory is needed: {e}"))
        };
        self.note_all();
        let Some((map, memory)) = self.map.take() else {
            // Repeated by a process that finishes an interrupted operation: the disk was not used since.
            let Some(retained) = self.retained.as_mut().filter(|retained| !retained.is_discarded()) else {
                return Ok(0);
            };
            claim.map_or(Ok(()), |path| retained.publish(path)).map_err(failed)?;
            return Ok(retained.len());
        };
        // The previous cache first: the new one's claim may have the same file.
        (self.retained, self.emptied, self.kept_at) = (None, None, Instant::now());
        self.reuse = false;
        if map.is_empty() {
            return Ok(0);
        }
        let retained = self.retained.insert(RetainedCache::new(&memory, map, self.digester, claim).map_err(failed)?);
        let kept = retained.len();
        Memory::unmap_in_background(memory);
        Ok(kept)
    }

    fn share(&mut self, claims: &[PathBuf]) -> Result<(), Refused> {
        let Some(retained) = self.retained.as_mut() else {
            return Err(Refused("there is no retained cache".into()));
        };
        retained.share(claims).map_err(|e| Refused(format!("cannot read which memory the VM's other disks need: {e}")))
    }

    /// Discards all state of a previous guest. Work that a running guest would wait for is done in slices.
    fn drop_retained(&mut self) {
        (self.emptied, self.reuse) = (None, false);
        if self.is_used() {
            self.retained.iter_mut().for_each(RetainedCache::discard);
            return;
        }
        // The block map refers to that memory and keeps it mapped. The next guest may be waiting for the answer.
        if let Some(retained) = self.retained.take() {
            run_in_background("retained", retained, drop);
        }
        self.note_all();
        if let Some((_, memory)) = self.map.take() {
            Memory::unmap_in_background(memory);
        }
    }

    /// Whether a guest uses the disk or may continue with it: a stopped guest has memory here. A QEMU that has connected and waits for its
    /// guest has none.
    pub(super) fn is_used(&self) -> bool {
        !self.jobs.is_empty() || !self.fronts.values().all(Front::waits)
    }

    fn status(&self) -> Status {
        let retained = self.retained.as_ref().filter(|retained| !retained.is_discarded());
        Status {
            bytes: self.capacity,
            connected: self.fronts.len(),
            waiting: self.fronts.values().filter(|front| front.waits()).count(),
            active: self.active.is_some(),
            under_way: self.jobs.len(),
            mapped: self.map.as_ref().map_or(0, |(map, _)| map.len()),
            map_bytes: self.map.as_ref().map_or(0, |(map, _)| map.bytes()),
            retained: retained.map(|retained| (retained.len(), retained.counts())),
            retained_memory: retained.map(RetainedCache::identity),
            emptied: self.emptied,
            waits: self.waits,
            touched: self.ledger.touched_count(),
            broken: self.broken(),
            unchecked: crate::retained::UNCHECKED,
            redo: self.logged.as_ref().map(super::logged::EngineLog::status),
        }
    }
}
