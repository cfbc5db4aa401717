//! Commands to the engine from other threads: QEMUs' connections, control commands, the keeper of the redo log.

use super::ids::ConnectionId;
use super::ledger_commands::LedgerCommand;
use super::redo_log::{EngineLog, RedoStatus};
use super::refusal::Answer;
use super::visit::Visit;
use crate::image::Image;
use crate::inflight::Inflight;
use crate::limit::Limits;
use crate::memory::{Memory, Span};
use crate::retained::CacheCounts;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

/// A command to the engine from another thread.
#[derive(Debug)]
pub enum Command {
    Connection(ConnectionId, ConnectionCommand),
    Pages(PageCommand),
    Cache(CacheCommand),
    Ledger(LedgerCommand),
    /// Run a function with the redo log.
    Visit(Visit),
    SetLimits(Limits, Answer<()>),
    /// Update the length of a grown image. Notifies QEMUs and their guests.
    UpdateLength(Answer<u64>),
    /// The guest's memory is filled completely.
    MemoryFilled(Answer<()>),
    /// Serve the disk that the server has waited for.
    OpenDisk(Box<OpenDisk>, Answer<()>),
    Status(Answer<Status>),
    /// End when no request is in progress.
    End(Answer<()>),
}

/// An open disk: its image, and its redo log if there is one.
#[derive(Debug)]
pub struct OpenDisk {
    pub image: Image,
    pub log: Option<EngineLog>,
}

/// A command of a connected QEMU.
#[derive(Debug)]
pub enum ConnectionCommand {
    /// The QEMU has connected. `process`: its process ID, if the kernel reports it.
    Join { process: Option<u32> },
    /// The QEMU has disconnected.
    Leave,
    /// A socket for notifications to the QEMU.
    SetChannel(OwnedFd, Answer<()>),
    /// The QEMU reads the disk's length in bytes.
    ReadLength(Answer<u64>),
    /// The memory of the QEMU's guest.
    SetMemory(Arc<Memory>, Answer<()>),
    /// The record of requests in progress, in memory that QEMU holds.
    SetInflight(Inflight, Answer<()>),
    /// Start a queue. Rejected while another QEMU's queues run.
    StartQueue { queue_index: u16, rings: Rings, descriptors: QueueDescriptors, answer: Answer<()> },
    /// Replace a descriptor of a queue for notifications.
    SetNotification { queue_index: u16, which: Notification, descriptor: Option<File>, answer: Answer<()> },
    /// Stop a queue. Answered with the next index of the available ring, once no request of the queue is in progress.
    StopQueue { queue_index: u16, answer: Answer<u16> },
}

/// A queue as its front end has set it up: its rings in the guest, and its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rings {
    pub size: u16,
    /// Address of the descriptors.
    pub descriptors: u64,
    /// Address of the available ring.
    pub available: u64,
    /// Address of the used ring.
    pub used: u64,
    /// Next index of the available ring.
    pub next_available: u16,
    /// The guest states the index at which it is to be notified (`VIRTIO_RING_F_EVENT_IDX`).
    pub has_event_idx: bool,
}

#[derive(Debug)]
pub struct QueueDescriptors {
    /// Readable when the guest has added to the available ring.
    pub kick: OwnedFd,
    /// Written when the used ring has new entries.
    pub call: Option<File>,
    /// Written when the queue is broken, and takes no more requests.
    pub error: Option<File>,
}

/// One of the descriptors that notify a front end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notification {
    /// [`QueueDescriptors::call`].
    Call,
    /// [`QueueDescriptors::error`].
    Error,
}

/// A command about the record of the guest's pages that the server writes.
#[derive(Debug)]
pub enum PageCommand {
    /// Start recording the pages of the guest of this process.
    Record { process: u32, answer: Answer<PageRecord> },
    /// Stop recording.
    End(Answer<()>),
    /// Return and clear the recorded pages. Rejected if the record is incomplete.
    Collect(Answer<Vec<Span>>),
}

/// The state of the page record when a record is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageRecord {
    /// Pages were recorded already, without interruption.
    Continues,
    New,
}

/// A command about the cache that the server keeps over reboots.
#[derive(Debug)]
pub enum CacheCommand {
    /// The guest has ended: its memory becomes the retained cache of the next one.
    ///
    /// With a path, the servers of other disks use the same memory. The file at that path shows them which frames
    /// this server needs.
    Keep(Option<PathBuf>, Answer<usize>),
    /// The guest is about to start another kernel in its memory, which is to use the cached blocks. Answered with the
    /// number of blocks.
    Reuse(Answer<usize>),
    /// The files in which the other servers show which frames they need.
    Share(Vec<PathBuf>, Answer<()>),
    /// Discard the retained cache, and all other state of a previous guest.
    Drop(Answer<()>),
}

/// A queue that is broken, most likely by a fault of the guest's driver. It takes no request until the guest resets
/// the disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokenQueue {
    pub queue: u16,
    /// Description of the fault.
    pub why: String,
}

/// The state of the engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Bytes of the disk.
    pub bytes: u64,
    /// Number of connected front ends.
    pub connected: usize,
    /// Number of connected front ends that have not started: QEMUs that wait for their guest's state.
    #[serde(default, rename = "waiting")]
    pub waiting_for_guest: usize,
    /// Whether the queues of a connected front end run.
    pub active: bool,
    /// Number of requests in progress.
    #[serde(rename = "under_way")]
    pub requests_in_progress: usize,
    /// Number of blocks in the block map.
    #[serde(rename = "mapped")]
    pub mapped_blocks: usize,
    /// Memory of the block map in bytes.
    pub map_bytes: usize,
    /// Number of blocks in the retained cache, and the counts of its other blocks by their fate.
    #[serde(rename = "attic")]
    pub retained: Option<(usize, CacheCounts)>,
    /// Identity of the memory that has the retained cache: the same number for all servers that use the memory.
    #[serde(default, rename = "attic_memory", skip_serializing_if = "Option::is_none")]
    pub retained_memory: Option<u64>,
    /// Final counts of the last retained cache, once it is empty.
    pub emptied: Option<CacheCounts>,
    /// Number of blocks that the guest has read or written since its boot; `None` if unknown.
    #[serde(default)]
    pub touched: Option<u64>,
    #[serde(default)]
    pub redo: Option<RedoStatus>,
    /// The server waits for a restore, and has no disk yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub waits: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub broken: Vec<BrokenQueue>,
    /// Blocks of the retained cache are served unchecked: [`crate::retained::UNCHECKED`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchecked: bool,
}
