//! What others ask the engine for.

use super::logged::Logged;
use super::visit::Visit;
use crate::image::Image;
use crate::limit::Limits;
use crate::memory::{Memory, Span};
use crate::retained::CacheCounts;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// A front end's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Session(pub u32);

/// Why something is not done.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

type Answer<T> = Sender<Result<T, Refused>>;

/// A queue as its front end has set it up: where its rings are in the guest, and where it goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rings {
    /// Entries.
    pub size: u16,
    /// Descriptors.
    pub descriptors: u64,
    /// Available ring.
    pub available: u64,
    /// Used ring.
    pub used: u64,
    /// Where the available ring is gone on with.
    pub next: u16,
    /// The guest says at which index it wants to be told (`VIRTIO_RING_F_EVENT_IDX`).
    pub event_idx: bool,
}

/// A queue's descriptors.
#[derive(Debug)]
pub struct Ends {
    /// Read when the guest has put something into the available ring.
    pub kick: OwnedFd,
    /// Written when something is in the used ring.
    pub call: Option<File>,
    /// Written when the ring is broken: nothing is taken out of it any more.
    pub error: Option<File>,
}

/// What a front end is notified of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notify {
    /// [`Ends::call`].
    Call,
    /// [`Ends::error`].
    Error,
}

/// A queue that is broken, most likely by the guest's driver: no request is taken from it until the guest resets the disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Broken {
    /// The queue.
    pub queue: u16,
    /// What is wrong with it.
    pub why: String,
}

/// What the engine is doing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Bytes of the disk.
    pub bytes: u64,
    /// Front ends that are connected.
    pub connected: usize,
    /// Those of them that have not begun: QEMUs that wait for their guest's state.
    #[serde(default)]
    pub waiting: usize,
    /// Whether the queues of one of them run.
    pub active: bool,
    /// Requests under way.
    pub under_way: usize,
    /// Blocks whose place is known.
    pub mapped: usize,
    /// Bytes that knowing that takes.
    pub map_bytes: usize,
    /// Blocks in the attic, and what became of others.
    #[serde(rename = "attic")]
    pub retained: Option<(usize, CacheCounts)>,
    /// Which memory the attic is in: the same number for all who have their attics in it.
    #[serde(default, rename = "attic_memory", skip_serializing_if = "Option::is_none")]
    pub retained_memory: Option<u64>,
    /// What became of all blocks of the attic that was the last one, if it is empty.
    pub emptied: Option<CacheCounts>,
    /// Blocks that the guest has read or written since it began; none if that is not known.
    #[serde(default)]
    pub touched: Option<u64>,
    /// The redo log, if the disk has one.
    #[serde(default)]
    pub redo: Option<super::logged::RedoStatus>,
    /// It waits for a restore, and has no disk yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub waits: bool,
    /// Queues that are broken.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub broken: Vec<Broken>,
    /// Blocks of the attic are served unchecked: [`crate::retained::UNCHECKED`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchecked: bool,
}

/// See [the module](self).
#[derive(Debug)]
pub enum Command {
    /// A front end has connected: which, and the process that it is, if the kernel tells.
    Join(Session, Option<u32>),
    /// It has gone.
    Leave(Session),
    /// Where it may be told something unasked.
    Channel(Session, OwnedFd, Answer<()>),
    /// Its memory.
    Memory(Session, Arc<Memory>, Answer<()>),
    /// The requests that are under way, as memory that QEMU holds.
    Inflight(Session, crate::inflight::Inflight, Answer<()>),
    /// Serve a queue. Refused while another front end's queues run.
    Start(Session, u16, Rings, Ends, Answer<()>),
    /// Another descriptor for notifications of a queue that runs.
    Notify(Session, u16, Notify, Option<File>, Answer<()>),
    /// Serve a queue no more. Answered when nothing of it is under way: where the available ring is to be gone on with.
    Stop(Session, u16, Answer<u16>),
    /// Other limits.
    Limit(Limits, Answer<()>),
    /// The image has grown: how long it is now. Front ends are told, and their guests.
    Measure(Answer<u64>),
    /// The guest has ended: its memory becomes the attic of the next one.
    ///
    /// With a path: servers of other disks have theirs in the same memory, and see there which frames this one needs.
    Keep(Option<PathBuf>, Answer<usize>),
    /// The guest is about to start another kernel in its memory: what it has cached is served to that one too. How many blocks it is.
    Reuse(Answer<usize>),
    /// Where all others that have attics in that memory say which frames they need.
    Share(Vec<PathBuf>, Answer<()>),
    /// There is to be no attic any more, nor anything else of a guest that has gone.
    Drop(Answer<()>),
    /// Note which pages of the guest of this process are written, or of none any more. Whether that was done already.
    Note(Option<u32>, Answer<bool>),
    /// The pages that were written since. Refused where not all of them were noted.
    Collect(Answer<Vec<Span>>),
    /// All of the guest's memory is there.
    Filled(Answer<()>),
    /// Something about what the guest has touched.
    Ledger(super::ledger::Question),
    /// It has waited for its disk: the image, and its redo log, if it has one.
    Have(Box<(Image, Option<Logged>)>, Answer<()>),
    /// Do something with the log.
    Visit(Visit),
    /// What it does.
    Status(Answer<Status>),
    /// End when nothing is under way any more.
    End(Answer<()>),
}
