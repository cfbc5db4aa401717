//! The engine: one thread that has the image, the queues of the front end that is active, and everything that is under way.
//!
//! | module | what it is for |
//! |---|---|
//! | `front` | a front end: its memory and its queues |
//! | `line` | a queue that is served: what is next in it, and what is wrong with its rings |
//! | `record` | what is written of a guest's memory |
//! | `job` | one request from the available to the used ring |
//! | `hand` | what was moved in large pieces is digested beside the engine |
//! | [`logged`] | writes that go to the redo log, and reads of what is there |
//! | [`mod@ledger`] | what is noted for phase-based reboots |
//! | [`command`], `asked`, [`visit`] | what others ask the engine for |
//!
//! All data goes through buffers of our own. So a digest is of what was moved, whatever the guest does with its page meanwhile; a write
//! is of one moment; and nothing that the guest does can change what a device is still reading.
//!
//! ```text
//! read    disk ── buffer ──> digest, guest, block map          write   guest ── buffer ──> digest, disk, block map
//!         attic ─ buffer ──> digest: the same? guest, map
//! ```

mod asked;
pub mod command;
mod front;
mod hand;
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
use command::{Command, Refused, Session};
use front::Front;
pub use front::MOST_ENTRIES;
use hand::Hand;
use job::{Job, Late};
use logged::Logged;
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

/// Operations under way at a time.
const DEPTH: u32 = 256;
/// Bytes of one operation at most. A longer request is cut.
pub const CHUNK: usize = 1 << 20;
/// Bytes of buffers that are kept for the next request.
const POOL: usize = 16 << 20;
/// So many bytes may be moved between buffers and the guest before it is seen to that the disk is not idle.
const FEED: usize = 256 << 10;
/// How often it is looked after the attic while there is one.
const MAINTAIN_INTERVAL: Duration = Duration::from_millis(100);

/// What a disk is served with.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What its guest sees as its serial number.
    pub serial: String,
    /// The rates it is held to.
    pub limits: Limits,
    /// Remember where its blocks are, for a warm cache.
    pub map: bool,
    /// Queues that a guest may have.
    pub queues: u16,
    /// How long an attic is kept at most.
    pub retain_for: Option<Duration>,
    /// A restore still brings the guest's memory, until [`Command::Filled`].
    pub filling: Arc<AtomicBool>,
}

/// What a completion belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    /// Somebody wants something of the engine.
    Wake,
    /// A queue has been kicked.
    Kick(Session, u16),
    /// A part of a job has ended: its number, and which part.
    Part(u32, u32),
    /// Something that was for the log alone.
    Own(u32),
}

impl Token {
    fn pack(self) -> u64 {
        match self {
            Self::Wake => 0,
            Self::Kick(session, queue) => 1 << 62 | u64::from(session.0) << 16 | u64::from(queue),
            Self::Part(job, part) => 2 << 62 | u64::from(job) << 24 | u64::from(part),
            Self::Own(number) => 3 << 62 | u64::from(number),
        }
    }

    fn unpack(token: u64) -> Self {
        match token >> 62 {
            0 => Self::Wake,
            1 => Self::Kick(Session((token >> 16) as u32), token as u16),
            3 => Self::Own(token as u32),
            _ => Self::Part((token >> 24) as u32, (token & 0xff_ffff) as u32),
        }
    }
}

/// How the engine is reached.
#[derive(Debug, Clone)]
pub struct Handle {
    commands: Sender<Command>,
    wake: Arc<OwnedFd>,
}

impl Handle {
    /// Ask for something and wait for the answer.
    ///
    /// # Errors
    /// [`Refused`]; also when the engine has ended.
    pub fn ask<T>(&self, command: impl FnOnce(Sender<Result<T, Refused>>) -> Command) -> Result<T, Refused> {
        let (sender, answer) = channel();
        let gone = || Refused("the disk's engine has ended".into());
        self.commands.send(command(sender)).map_err(|_| gone())?;
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).map_err(|_| gone())?;
        answer.recv().map_err(|_| gone())?
    }

    /// Tell something that has no answer.
    pub fn tell(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

/// A request that is stopped: a queue, and who waits until nothing of it is under way.
type Stopping = (Session, u16, Sender<Result<u16, Refused>>);

/// See [the module](self).
struct Engine {
    ring: Ring,
    image: Arc<Image>,
    capacity: u64,
    settings: Settings,
    commands: Receiver<Command>,
    wake: Arc<OwnedFd>,
    fronts: BTreeMap<Session, Front>,
    /// The one whose queues run.
    active: Option<Session>,
    /// What is written of a guest's memory, for a protector.
    record: Option<Record>,
    stopping: Vec<Stopping>,
    jobs: Slab<Job>,
    hand: Hand,
    /// What it digests.
    late: Slab<Late>,
    /// Parts that wait for room in the ring, or for the rate.
    waiting: VecDeque<(usize, u32)>,
    throttle: Throttle,
    /// When the first that waits for the rate may go on.
    due: Option<Instant>,
    digester: Digester,
    map: Option<(BlockMap, Arc<Memory>)>,
    retained: Option<RetainedCache>,
    /// When the guest's driver begins anew, what the map knows is an attic in the same memory.
    reuse: bool,
    /// When it was made.
    kept_at: Instant,
    /// The disk is still to come.
    waits: bool,
    /// The redo log, if the disk has one.
    logged: Option<Logged>,
    /// What the guest has touched, for phase-based reboots.
    ledger: Ledger,
    /// The number of the next request among all.
    serial: u64,
    /// What became of the one before, which is empty.
    emptied: Option<crate::retained::CacheCounts>,
    /// When it was last looked after.
    looked: Instant,
    /// Some of it is to be given back at once, as far as requests leave time for it.
    maintaining: bool,
    /// A request has ended: there may be room for one that waits in its queue.
    has_room: bool,
    /// There may be more in a queue than was taken in its turn.
    has_more: bool,
    /// Bytes of all requests that were taken out of the queues and have not ended.
    taken_bytes: u64,
    /// Answers that no guest has been notified of.
    unnotified: usize,
    /// Bytes that are under way.
    moving: usize,
    /// Bytes that were moved since the disk was seen to.
    has_moved: usize,
    pool: Vec<Buffer>,
    pooled: usize,
    ended: bool,
}

/// Serve `image` in a thread of its own, until [`Command::End`]. `logged`: its redo log, if it has one already. `waits`: the image was
/// only looked at, and no queue runs until [`Command::Have`].
///
/// # Errors
/// The system's: no `io_uring`, no random numbers.
pub fn start(
    image: Image,
    settings: Settings,
    logged: Option<Logged>,
    waits: bool,
) -> io::Result<(Handle, JoinHandle<io::Result<()>>)> {
    let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
    let (sender, commands) = channel();
    let handle = Handle { commands: sender, wake: Arc::clone(&wake) };
    let digester = Digester::new()?;
    let hand = Hand::begin(Arc::clone(&wake))?;
    let (ready, is_ready) = channel();
    let thread = thread::Builder::new().name("disk".into()).spawn(move || {
        // The ring is of the thread that made it.
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
            hand,
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
            looked: Instant::now(),
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
            // Not where a request ends: one that needs no disk ends where it begins.
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
                // What was moved has taken its time: meanwhile the disk is to have something to do.
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

    /// How long to wait at most.
    fn limit(&mut self) -> Option<Duration> {
        let due = self.due.map(|due| due.saturating_duration_since(Instant::now()));
        let look = self.retained.as_ref().map(|_| if self.maintaining { Duration::ZERO } else { MAINTAIN_INTERVAL });
        let log = self.logged.as_mut().and_then(Logged::limit);
        let more = self.has_more.then_some(Duration::ZERO);
        due.into_iter().chain(look).chain(log).chain(more).min()
    }

    fn listen(&mut self, descriptor: &Arc<OwnedFd>, token: Token) {
        // There are far fewer queues than the ring has room for, and jobs leave it to them: see `begin_waiting`.
        if self.ring.when_readable(descriptor, token.pack()).is_err() {
            tracing::error!("there is no room to wait for {token:?}");
        }
    }

    fn completed(&mut self, done: Done) {
        match Token::unpack(done.token) {
            Token::Wake => {
                let _ = rustix::io::read(&self.wake, &mut [0; 8]);
                self.listen(&Arc::clone(&self.wake), Token::Wake);
            }
            Token::Kick(session, queue) => self.kicked(session, queue),
            Token::Own(number) => self.own_ended(number, &done.result),
            Token::Part(job, part) => self.part_ended(job as usize, part, done.result, done.buffer),
        }
    }

    /// A buffer of at least `bytes` bytes.
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

    /// The attic takes no more room than the guest has not taken yet.
    fn maintain_retained(&mut self) {
        let Some(retained) = &mut self.retained else { return };
        if self.looked.elapsed() >= MAINTAIN_INTERVAL {
            self.looked = Instant::now();
            if self.settings.retain_for.is_some_and(|keep| self.kept_at.elapsed() >= keep) {
                retained.discard();
            }
            retained.update(self.map.as_ref().map(|(_, memory)| memory.room()));
        }
        self.maintaining = retained.maintain();
        if retained.is_done() {
            tracing::info!("the attic is empty: {:?}", retained.counts());
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
            Token::Kick(Session(7), 3),
            Token::Kick(Session(u32::MAX), u16::MAX),
            Token::Part(u32::MAX, 0xff_ffff),
            Token::Own(u32::MAX),
        ] {
            assert_eq!(Token::unpack(token.pack()), token);
        }
    }
}
