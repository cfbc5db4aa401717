//! The engine: one thread with the image, the queues of the active front end, and all requests in progress.
//!
//! | module | contents |
//! |---|---|
//! | `front` | a front end: its memory and its queues |
//! | `line` | a running queue: takes requests from its rings and checks them |
//! | `record` | pages of the guest's memory that the server writes |
//! | `job` | one request, from the available to the used ring |
//! | `digest_thread` | a thread that digests large pieces |
//! | [`logged`] | writes into the redo log, and reads from it |
//! | [`mod@ledger`] | records for phase-based reboots |
//! | [`command`], `commands`, [`visit`] | requests to the engine from other threads |
//!
//! All data passes through the engine's own buffers. So a digest is of the bytes that were moved, even if the guest changes its page
//! meanwhile; a write has the content of one moment; and a guest cannot change what a device is still reading.
//!
//! ```text
//! read    disk ── buffer ──> digest, guest, block map          write   guest ── buffer ──> digest, disk, block map
//!         cache ─ buffer ──> digest equal? guest, map
//! ```

pub mod command;
mod commands;
mod digest_thread;
mod front;
mod job;
pub mod ledger;
mod line;
pub mod logged;
mod record;
pub mod visit;

use crate::digest::Digester;
use crate::image::Image;
use crate::ledger::Ledger;
use crate::limit::{Limits, Throttle};
use crate::map::BlockMap;
use crate::memory::Memory;
use crate::retained::RetainedCache;
use command::{Command, FrontendId, Refused};
use digest_thread::DigestThread;
use front::Front;
pub use front::MOST_ENTRIES;
use job::{Job, PendingRecord};
use logged::EngineLog;
use record::Record;
use rekindle_kernel::uring::{Buffer, Done, HALF, Ring};
use rustix::event::{EventfdFlags, eventfd};
use slab::Slab;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Most operations in progress.
const DEPTH: u32 = 256;
/// Most bytes of one operation. A longer request is divided.
pub const CHUNK: usize = 1 << 20;
/// Most bytes of unused buffers that are kept.
const POOL: usize = 16 << 20;
/// Most bytes to move between buffers and the guest before new operations are submitted, so that the disk is not idle.
const FEED: usize = 256 << 10;
/// Interval of updating the retained cache.
const MAINTAIN_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Debug, Clone)]
pub struct Settings {
    /// Serial number that the guest sees.
    pub serial: String,
    pub limits: Limits,
    /// Maintain a block map, for a warm cache.
    pub map: bool,
    /// Most queues of a guest.
    pub queues: u16,
    /// How long to keep a retained cache.
    pub retain_for: Option<Duration>,
    /// A restore is still filling the guest's memory, until [`Command::Filled`].
    pub filling: Arc<AtomicBool>,
}

/// The origin of a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    /// Another thread has queued a command or a result.
    Wake,
    /// A queue was kicked.
    Kick(FrontendId, u16),
    /// A part of a job has completed: job number and part.
    Part(u32, u32),
    /// An operation of the redo log itself has completed.
    LogOperation(u32),
}

impl Token {
    fn pack(self) -> u64 {
        match self {
            Self::Wake => 0,
            Self::Kick(session, queue) => 1 << 62 | u64::from(session.0) << 16 | u64::from(queue),
            Self::Part(job, part) => 2 << 62 | u64::from(job) << 24 | u64::from(part),
            Self::LogOperation(number) => 3 << 62 | u64::from(number),
        }
    }

    fn unpack(token: u64) -> Self {
        match token >> 62 {
            0 => Self::Wake,
            1 => Self::Kick(FrontendId((token >> 16) as u32), token as u16),
            3 => Self::LogOperation(token as u32),
            _ => Self::Part((token >> 24) as u32, (token & 0xff_ffff) as u32),
        }
    }
}

/// Sends commands to the engine.
#[derive(Debug, Clone)]
pub struct Handle {
    commands: Sender<Command>,
    wake: Arc<OwnedFd>,
}

impl Handle {
    /// Sends a command and waits for the answer.
    ///
    /// # Errors
    /// [`Refused`], also if the engine has ended.
    pub fn ask<T>(&self, command: impl FnOnce(Sender<Result<T, Refused>>) -> Command) -> Result<T, Refused> {
        let (sender, answer) = channel();
        let gone = || Refused("the disk's engine has ended".into());
        self.commands.send(command(sender)).map_err(|_| gone())?;
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).map_err(|_| gone())?;
        answer.recv().map_err(|_| gone())?
    }

    /// Sends a command that has no answer.
    pub fn send(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

/// A queue that is being stopped, and where to send the answer once none of its requests is in progress.
type Stopping = (FrontendId, u16, Sender<Result<u16, Refused>>);

/// See [the module](self).
struct Engine {
    ring: Ring,
    image: Arc<Image>,
    capacity: u64,
    settings: Settings,
    commands: Receiver<Command>,
    wake: Arc<OwnedFd>,
    fronts: BTreeMap<FrontendId, Front>,
    /// The front end whose queues run.
    active: Option<FrontendId>,
    /// Pages of the guest's memory that the server writes, for a protector.
    record: Option<Record>,
    stopping: Vec<Stopping>,
    jobs: Slab<Job>,
    digest_thread: DigestThread,
    late: Slab<PendingRecord>,
    /// Parts that wait for space in the ring, or for the rate limit.
    waiting: VecDeque<(usize, u32)>,
    throttle: Throttle,
    /// When the first part that waits for the rate limit may start.
    due: Option<Instant>,
    digester: Digester,
    map: Option<(BlockMap, Arc<Memory>)>,
    retained: Option<RetainedCache>,
    /// The next start of the guest's driver turns the block map into a retained cache in the same memory.
    reuse: bool,
    /// When the retained cache was created.
    kept_at: Instant,
    /// The server has no disk yet.
    waits: bool,
    logged: Option<EngineLog>,
    /// What the guest has read or written, for phase-based reboots.
    ledger: Ledger,
    /// Number of the next request.
    serial: u64,
    /// Final counts of the last retained cache, after it became empty.
    emptied: Option<crate::retained::CacheCounts>,
    /// When the retained cache was last updated.
    updated: Instant,
    /// Memory of the retained cache is to be released between requests.
    maintaining: bool,
    /// A request has completed, so that another one may be taken from its queue.
    has_room: bool,
    /// A queue may have more requests than one turn takes.
    has_more: bool,
    /// Bytes of all requests in progress.
    taken_bytes: u64,
    /// Some guest has answers that it has not been notified of.
    unnotified: usize,
    /// Bytes of all operations in progress.
    moving: usize,
    /// Bytes moved since operations were last submitted.
    has_moved: usize,
    pool: Vec<Buffer>,
    pooled: usize,
    ended: bool,
}

/// Serves `image` in a new thread until [`Command::End`]. `logged`: its redo log, if there is one. `waits`: the image was only
/// inspected, and no queue runs until [`Command::Have`].
///
/// # Errors
/// The system's: io_uring or random numbers are unavailable.
pub fn start(
    image: Image,
    settings: Settings,
    logged: Option<EngineLog>,
    waits: bool,
) -> io::Result<(Handle, JoinHandle<io::Result<()>>)> {
    let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
    let (sender, commands) = channel();
    let handle = Handle { commands: sender, wake: Arc::clone(&wake) };
    let digester = Digester::new()?;
    let digest_thread = DigestThread::begin(Arc::clone(&wake))?;
    let (ready, is_ready) = channel();
    let thread = thread::Builder::new().name("disk".into()).spawn(move || {
        // A ring belongs to the thread that created it.
        let ring = match Ring::new(DEPTH) {
            Ok(ring) => ring,
            Err(e) => {
                let _ = ready.send(Err(e));
                return Ok(());
            }
        };
        let _ = ready.send(Ok(()));
        let throttle = Throttle::new(settings.limits, Instant::now());
        let capacity = image.bytes;
        let engine = Engine {
            ring,
            image: Arc::new(image),
            capacity,
            settings,
            commands,
            wake,
            fronts: BTreeMap::new(),
            active: None,
            record: None,
            stopping: Vec::new(),
            jobs: Slab::new(),
            digest_thread,
            late: Slab::new(),
            waiting: VecDeque::new(),
            throttle,
            due: None,
            digester,
            map: None,
            retained: None,
            reuse: false,
            kept_at: Instant::now(),
            waits,
            logged,
            ledger: Ledger::default(),
            serial: 0,
            emptied: None,
            updated: Instant::now(),
            maintaining: false,
            has_room: false,
            unnotified: 0,
            has_more: false,
            taken_bytes: 0,
            moving: 0,
            has_moved: 0,
            pool: Vec::new(),
            pooled: 0,
            ended: false,
        };
        engine.run()
    })?;
    is_ready.recv().map_err(io::Error::other)??;
    Ok((handle, thread))
}

impl Engine {
    fn run(mut self) -> io::Result<()> {
        self.listen(&Arc::clone(&self.wake), Token::Wake);
        loop {
            self.serve_commands();
            self.note_digested();
            // Not at a request's completion: a request that needs no disk completes when it begins.
            if std::mem::take(&mut self.has_room) | std::mem::take(&mut self.has_more) {
                self.take_all();
            }
            self.begin_waiting();
            self.punch();
            self.notify();
            self.answer_stopped();
            if self.ended && self.jobs.is_empty() {
                return Ok(());
            }
            let limit = self.limit();
            self.ring.wait(limit)?;
            for done in self.ring.ended() {
                self.completed(done);
                // Moving data takes time: let the disk work meanwhile.
                if std::mem::take(&mut self.has_moved) > FEED {
                    self.notify();
                    self.take_all();
                    self.begin_waiting();
                    self.ring.submit()?;
                }
            }
            self.maintain_retained();
        }
    }

    /// The longest time to wait for an event.
    fn limit(&mut self) -> Option<Duration> {
        let due = self.due.map(|due| due.saturating_duration_since(Instant::now()));
        let update = self.retained.as_ref().map(|_| if self.maintaining { Duration::ZERO } else { MAINTAIN_INTERVAL });
        let log = self.logged.as_mut().and_then(EngineLog::limit);
        let more = self.has_more.then_some(Duration::ZERO);
        due.into_iter().chain(update).chain(log).chain(more).min()
    }

    fn listen(&mut self, descriptor: &Arc<OwnedFd>, token: Token) {
        // There are far fewer queues than the ring has space for, and jobs leave it to them: see `begin_waiting`.
        if self.ring.when_readable(descriptor, token.pack()).is_err() {
            tracing::error!("the io_uring ring has no space to wait for {token:?}");
        }
    }

    fn completed(&mut self, done: Done) {
        match Token::unpack(done.token) {
            Token::Wake => {
                let _ = rustix::io::read(&self.wake, &mut [0; 8]);
                self.listen(&Arc::clone(&self.wake), Token::Wake);
            }
            Token::Kick(session, queue) => self.kicked(session, queue),
            Token::LogOperation(number) => self.log_operation_ended(number, &done.result),
            Token::Part(job, part) => self.part_ended(job as usize, part, done.result, done.buffer),
        }
    }

    /// Returns a buffer of at least `bytes` bytes.
    fn buffer(&mut self, bytes: usize) -> Buffer {
        let fits = self.pool.iter().rposition(|buffer| buffer.len() >= bytes && buffer.len() <= bytes.max(1) * 4);
        match fits {
            Some(position) => {
                let buffer = self.pool.swap_remove(position);
                self.pooled -= buffer.len();
                buffer
            }
            None if bytes > HALF / 2 && bytes <= HALF => {
                let [first, second] = Buffer::pair();
                self.put_back(Some(second));
                first
            }
            None => Buffer::new(bytes),
        }
    }

    fn put_back(&mut self, buffer: Option<Buffer>) {
        let Some(buffer) = buffer else { return };
        if self.pooled + buffer.len() <= POOL {
            self.pooled += buffer.len();
            self.pool.push(buffer);
        }
    }

    /// Limits the retained cache to the memory that the guest has not allocated yet.
    fn maintain_retained(&mut self) {
        let Some(retained) = &mut self.retained else { return };
        if self.updated.elapsed() >= MAINTAIN_INTERVAL {
            self.updated = Instant::now();
            if self.settings.retain_for.is_some_and(|keep| self.kept_at.elapsed() >= keep) {
                retained.discard();
            }
            retained.update(self.map.as_ref().map(|(_, memory)| memory.room()));
        }
        self.maintaining = retained.maintain();
        if retained.is_done() {
            tracing::info!("the retained cache is empty: {:?}", retained.counts());
            self.emptied = Some(retained.counts());
            (self.retained, self.maintaining) = (None, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_comes_back_as_it_was() {
        for token in [
            Token::Wake,
            Token::Kick(FrontendId(7), 3),
            Token::Kick(FrontendId(u32::MAX), u16::MAX),
            Token::Part(u32::MAX, 0xff_ffff),
            Token::LogOperation(u32::MAX),
        ] {
            assert_eq!(Token::unpack(token.pack()), token);
        }
    }
}
