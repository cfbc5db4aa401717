//! Carries out commands of other threads.

use super::Engine;
use super::command::{CacheCommand, Command, PageCommand, Status};
use super::front_end::FrontEndCounts;
use super::redo_log::EngineLog;
use super::refusal::Refusal;
use super::visit::{EngineView, Visit};
use crate::retained::{RetainedCache, UNCHECKED};
use std::path::Path;
use std::sync::atomic::Ordering;

impl Engine {
    /// Carries out all commands that have arrived.
    pub(super) fn carry_out_commands(&mut self) {
        while let Ok(command) = self.commands.try_recv() {
            self.carry_out(command);
        }
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::Connection(connection_id, command) => self.front_end.carry_out(connection_id, command),
            Command::Pages(command) => self.carry_out_page_command(command),
            Command::Cache(command) => self.carry_out_cache_command(command),
            Command::Ledger(command) => self.carry_out_ledger_command(command),
            Command::Visit(visit) => self.run_visit(visit),
            Command::SetLimits(limits, answer) => {
                self.front_end.set_limits(limits);
                let _ = answer.send(Ok(()));
            }
            Command::UpdateLength(answer) => drop(answer.send(self.update_length())),
            Command::MemoryFilled(answer) => {
                self.is_filling.store(false, Ordering::Relaxed);
                self.front_end.memories().for_each(|memory| memory.set_filled());
                let _ = answer.send(Ok(()));
            }
            Command::OpenDisk(disk, answer) => drop(answer.send(self.front_end.blocks.open(*disk))),
            Command::Status(answer) => {
                self.front_end.blocks.cache.record_all(&mut self.front_end.io.buffers);
                drop(answer.send(Ok(self.status())));
            }
            Command::End(answer) => {
                self.front_end.end();
                let _ = answer.send(Ok(()));
            }
        }
    }

    /// Runs a function of the redo log's keeper.
    fn run_visit(&mut self, visit: Visit) {
        let is_running = self.front_end.is_running();
        let mut log = self.front_end.blocks.log.take();
        let mut view = EngineView { log: &mut log, is_running, ended: None };
        visit.run(&mut view);
        // Writes that waited for the log continue into the image.
        if let Some(mut ended) = view.ended {
            self.front_end.requeue_parts(ended.take_waiting());
        }
        self.front_end.blocks.log = log;
        // Writes that waited may have space now.
        self.front_end.retry_waiting_parts();
    }

    fn carry_out_page_command(&mut self, command: PageCommand) {
        match command {
            PageCommand::Record { process, answer } => drop(answer.send(self.front_end.record_pages(process))),
            PageCommand::End(answer) => {
                self.front_end.end_page_record();
                let _ = answer.send(Ok(()));
            }
            PageCommand::Collect(answer) => drop(answer.send(self.front_end.collect_pages())),
        }
    }

    fn carry_out_cache_command(&mut self, command: CacheCommand) {
        match command {
            CacheCommand::Keep(claim, answer) => drop(answer.send(self.keep(claim.as_deref()))),
            CacheCommand::Reuse(answer) => {
                let blocks = self.front_end.blocks.cache.announce_reuse(&mut self.front_end.io.buffers);
                let _ = answer.send(Ok(blocks));
            }
            CacheCommand::Share(claims, answer) => drop(answer.send(self.front_end.blocks.cache.share(&claims))),
            CacheCommand::Drop(answer) => {
                self.drop_cache();
                let _ = answer.send(Ok(()));
            }
        }
    }

    /// Updates the length of the disk, and notifies the guest if it has grown. Returns the length.
    fn update_length(&mut self) -> Result<u64, Refusal> {
        if self.front_end.blocks.update_capacity()? {
            self.front_end.notify_grown();
        }
        Ok(self.front_end.blocks.capacity())
    }

    /// Turns the memory of the ended guest into the retained cache of the next one.
    fn keep(&mut self, claim: Option<&Path>) -> Result<usize, Refusal> {
        // Queues that do not run are no proof: a guest that is only stopped continues with its memory.
        self.front_end.check_unused()?;
        self.front_end.blocks.cache.keep(claim, &mut self.front_end.io.buffers)
    }

    /// Discards all state of a previous guest. While a guest runs, which would wait for the work, does it in slices.
    fn drop_cache(&mut self) {
        let is_used = self.front_end.is_used();
        let cache = &mut self.front_end.blocks.cache;
        if is_used {
            cache.discard();
        } else {
            cache.drop_all(&mut self.front_end.io.buffers);
        }
    }

    fn status(&self) -> Status {
        let FrontEndCounts { connected, waiting, requests } = self.front_end.counts();
        let blocks = &self.front_end.blocks;
        let cache = &blocks.cache;
        let retained = cache.retained();
        Status {
            bytes: blocks.capacity(),
            connected,
            waiting_for_guest: waiting,
            active: self.front_end.is_active(),
            requests_in_progress: requests,
            mapped_blocks: cache.mapped_blocks(),
            map_bytes: cache.map_bytes(),
            retained: retained.map(|retained| (retained.len(), retained.counts())),
            retained_memory: retained.map(RetainedCache::identity),
            emptied: cache.final_counts(),
            waits: blocks.is_awaited(),
            touched: cache.ledger.touched_count(),
            broken: self.front_end.broken_queues(),
            unchecked: UNCHECKED,
            redo: blocks.log.as_ref().map(EngineLog::status),
        }
    }
}
