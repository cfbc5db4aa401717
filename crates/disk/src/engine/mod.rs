//! The engine: one thread that serves the guest's requests and the commands of other threads.
//!
//! ```text
//!  guest's queues          other threads: sessions of QEMUs, control commands, the keeper of the redo log
//!        │                        │ commands
//!        │                 ┌──────┴──────┐
//!        │                 │   Engine    │ the loop: waits for a completion or a command, and lets each part work
//!        │                 └──────┬──────┘
//!  ┌─────┴────────────────────────┴──────┐
//!  │ front_end::FrontEnd                 │ owns: connected QEMUs and their memory, queues, requests in progress
//!  │ vhost-user: queues, descriptor      │ and the record of them that outlives the server, rate limit,
//!  │ chains, replay of a killed server's │ the io_uring ring, buffers
//!  │ requests                            │
//!  └─────┬───────────────────────────────┘
//!        │ catalog::BlockCatalog:  where is this block?   may I write it?   what must be recorded?
//!  ┌─────┴───────────────────────────────┐
//!  │ disk_blocks::DiskBlocks             │ owns: the image, and the two parts below, which do not know each other
//!  └─────┬─────────────────────────┬─────┘
//!  ┌─────┴──────────────────┐ ┌────┴─────────────────────┐
//!  │ redo_log::EngineLog    │ │ reboot_cache::RebootCache│
//!  │ owns: where each block │ │ owns: the block map of   │
//!  │ of a protected disk is │ │ the running guest, the   │
//!  │ in the log, writes     │ │ retained cache of the    │
//!  │ that wait for space,   │ │ previous one, the ledger │
//!  │ space to reclaim       │ │ of touched blocks        │
//!  └────────────────────────┘ └──────────────────────────┘
//!    epochs, seals, merges:     how blocks are kept, checked and given back:
//!    crate::keeper, crate::redo crate::retained, crate::block_map, crate::ledger
//! ```
//!
//! | module | contents |
//! |---|---|
//! | `catalog` | the trait, and the types of its questions and answers |
//! | `front_end`, `disk_blocks`, [`redo_log`], `reboot_cache` | the parts |
//! | `io` | the ring and its buffers |
//! | `ids` | numbers of connections and of parts of requests |
//! | `handle`, [`command`], [`refusal`], `dispatch` | sending commands, their answers, and how they are carried out |
//! | [`ledger_commands`] | commands for phase-based reboots |
//! | [`visit`] | functions of the redo log's keeper that run on this thread |
//!
//! All data passes through the engine's own buffers. So a digest is of the bytes that were moved, even if the guest
//! changes its page meanwhile. A write has the content of one moment. A guest cannot change data that a device is
//! still reading.
//!
//! ```text
//! read    disk ── buffer ──> digest, guest, block map          write   guest ── buffer ──> digest, disk, block map
//!         cache ─ buffer ──> digest equal? guest, map
//! ```

mod catalog;
pub mod command;
mod disk_blocks;
mod dispatch;
mod front_end;
mod handle;
mod ids;
mod io;
pub mod ledger_commands;
mod reboot_cache;
pub mod redo_log;
pub mod refusal;
pub mod visit;

use crate::image::Image;
use crate::limit::Limits;
use command::{Command, OpenDisk};
use disk_blocks::DiskBlocks;
use front_end::FrontEnd;
pub use front_end::MAX_QUEUE_ENTRIES;
pub use handle::Handle;
pub use ids::{ConnectionId, PartId};
pub use io::create_ring;
use io::{DiskIo, MAX_COPIED_BYTES, Token};
use reboot_cache::RebootCache;
use redo_log::{EngineLog, RequestSequence};
use rekindle_kernel::uring::{Completion, IdleRing};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::io::Result as IoResult;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Most bytes of one operation. A longer request is divided.
pub const MAX_OPERATION_BYTES: usize = 1 << 20;

#[derive(Debug, Clone)]
pub struct Settings {
    /// Serial number that the guest sees.
    pub serial: String,
    pub limits: Limits,
    /// Maintain a block map, for a warm cache.
    pub has_block_map: bool,
    /// Most queues that a guest may use.
    pub queues: u16,
    /// How long to keep a retained cache.
    pub retain_for: Option<Duration>,
    /// A restore is still filling the guest's memory, until [`Command::MemoryFilled`].
    pub is_filling: Arc<AtomicBool>,
}

/// The disk that an engine serves.
#[derive(Debug)]
pub enum EngineDisk {
    Open(Box<OpenDisk>),
    /// An image that was only inspected. No queue runs until [`Command::OpenDisk`].
    Awaited(Image),
}

/// The state of the engine's thread.
struct Engine {
    front_end: FrontEnd<DiskBlocks>,
    commands: Receiver<Command>,
    /// Readable when another thread has queued a command or a result.
    wake: Arc<OwnedFd>,
    /// [`Settings::is_filling`].
    is_filling: Arc<AtomicBool>,
}

/// Serves `disk` in a new thread, with a ring of [`create_ring`], until [`Command::End`].
///
/// # Errors
/// If random numbers are unavailable, or no thread can be started.
pub fn start(disk: EngineDisk, settings: Settings, ring: IdleRing) -> IoResult<(Handle, JoinHandle<IoResult<()>>)> {
    let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
    let (sender, commands) = channel();
    let handle = Handle::new(sender, Arc::clone(&wake));
    let cache = RebootCache::new(&settings, Arc::clone(&wake))?;
    let (io_result_sender, io_result) = channel();
    let thread = thread::Builder::new().name("disk".into()).spawn(move || {
        // The ring belongs to the thread that enables it.
        let io = match DiskIo::new(ring) {
            Ok(io) => io,
            Err(e) => {
                let _ = io_result_sender.send(Err(e));
                return Ok(());
            }
        };
        let _ = io_result_sender.send(Ok(()));
        let blocks = match disk {
            EngineDisk::Open(disk) => DiskBlocks::new(*disk, cache),
            EngineDisk::Awaited(image) => DiskBlocks::awaited(image, cache),
        };
        let Settings { serial, limits, is_filling, .. } = settings;
        let front_end = FrontEnd::new(blocks, io, serial, limits);
        Engine { front_end, commands, wake, is_filling }.run()
    })?;
    io_result.recv().map_err(std::io::Error::other)??;
    Ok((handle, thread))
}

impl Engine {
    /// Serves requests and commands until the server ends.
    fn run(mut self) -> IoResult<()> {
        self.listen_for_wake();
        loop {
            self.carry_out_commands();
            self.front_end.blocks.cache.record_digested(&mut self.front_end.io.buffers);
            self.front_end.work();
            self.reclaim_log_space();
            self.front_end.notify();
            self.front_end.answer_stopped();
            if self.front_end.has_ended() {
                return Ok(());
            }
            let longest_wait = self.longest_wait();
            self.front_end.io.wait(longest_wait)?;
            for completion in self.front_end.io.completions() {
                self.complete(completion);
                // Moving data takes time: submit operations, so that the disk works meanwhile.
                if std::mem::take(&mut self.front_end.io.copied_bytes) > MAX_COPIED_BYTES {
                    self.front_end.notify();
                    self.front_end.take_requests();
                    self.front_end.start_waiting_parts();
                    self.front_end.io.submit()?;
                }
            }
            self.front_end.blocks.cache.maintain();
        }
    }

    /// Returns the longest time to wait for an event.
    fn longest_wait(&mut self) -> Option<Duration> {
        let throttled = self.front_end.throttled_until().map(|until| until.saturating_duration_since(Instant::now()));
        let maintenance = self.front_end.blocks.cache.next_maintenance();
        let log_work = self.front_end.blocks.log.as_mut().and_then(EngineLog::work);
        let untaken_requests = self.front_end.has_more().then_some(Duration::ZERO);
        [throttled, maintenance, log_work, untaken_requests].into_iter().flatten().min()
    }

    fn listen_for_wake(&mut self) {
        self.front_end.io.listen(&self.wake, Token::Wake);
    }

    /// Passes a completion to the part that waits for it.
    fn complete(&mut self, completion: Completion) {
        match Token::unpack(completion.token) {
            Token::Wake => {
                let _ = rustix::io::read(&self.wake, &mut [0; 8]);
                self.listen_for_wake();
            }
            Token::Kick(connection_id, queue_index) => {
                // A queue that was stopped, and may run again, with another wait for its kicks.
                let is_cancelled = completion.result.is_err_and(|e| Errno::from_io_error(&e) == Some(Errno::CANCELED));
                if !is_cancelled {
                    self.front_end.handle_kick(connection_id, queue_index);
                }
            }
            Token::LogOperation(number) => self.front_end.blocks.log_operation_completed(number, completion.result),
            Token::Part(id) => self.front_end.part_completed(id, completion.result, completion.buffer),
        }
    }

    fn reclaim_log_space(&mut self) {
        let front_end = &mut self.front_end;
        if front_end.blocks.log.as_ref().is_some_and(EngineLog::has_space_to_reclaim) {
            let requests = RequestSequence { oldest: front_end.oldest_sequence(), next: front_end.next_sequence() };
            if let Some(log) = &mut front_end.blocks.log {
                log.reclaim_space(&mut front_end.io, requests);
            }
        }
    }
}
