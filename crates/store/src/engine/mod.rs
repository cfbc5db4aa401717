//! The writer of a store in a directory. One thread owns it.
//!
//! A checkpoint is [`Engine::begin`], then [`Engine::append`] for each frame of pages, then [`Engine::commit`] or
//! [`Engine::abort`]. Between these calls, [`Engine::work`] does a small piece of background work: compaction, or
//! writing the base index.

mod append;
mod basing;
mod commit;
mod compaction;
mod opening;
mod pool;
mod run;

use crate::error::{Result, StoreError};
use crate::format::base::Location;
use crate::format::manifest::{Cut, Kept, StoredBlock, check_blocks};
use crate::format::names;
use crate::home::Home;
use crate::log::{self, Claim};
use crate::segments::Files;
use crate::sparse::{Digests, Sparse};
use crate::types::{Block, Pages};
use pool::{History, Pool};
use rekindle_pages::{DirtySet, PAGE_SIZE};
use std::sync::Arc;
use std::time::Duration;

pub(crate) use commit::State;
pub(crate) use run::{Frame, Request, StartedBlock, run};

/// Limit of a segment's bytes. The last frame of a segment may exceed it.
const SEGMENT_MAX: u64 = 32 << 20;
const SEGMENT_MIN: u64 = 256 << 10;
/// Limit of segments with unsynced pages, because the kernel keeps these pages in memory.
const MAX_DIRTY: usize = 4;

#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Number of checkpoints to keep.
    pub keep: u32,
    /// Bytes of a segment; with 0, the length depends on the guest's RAM.
    pub segment: u64,
    /// Create a missing store.
    pub create: bool,
}

/// A RAM block and the state of its stored pages.
#[derive(Debug)]
struct BlockState {
    number: u16,
    block: Block,
    cuts: Vec<Cut>,
    places: Sparse<u64>,
    digests: Arc<Digests>,
    /// No checkpoint has the block yet.
    new: bool,
}

impl BlockState {
    /// Records that the block has only `left` pages from checkpoint `number` on, and clears the others.
    fn cut(&mut self, number: u64, left: u64) {
        let beyond: Vec<u64> = self.places.set_from(left).map(|(page, _)| page).collect();
        for page in beyond {
            self.digests.set(page, 0);
            if let Some(place) = self.places.get_mut(page) {
                *place = 0;
            }
        }
        let cuts = std::mem::take(&mut self.cuts);
        let mut stored = StoredBlock { number: self.number, block: self.block.clone(), cuts };
        stored.cut(number, left);
        self.cuts = stored.cuts;
    }
}

/// A page of the open checkpoint.
#[derive(Debug, Clone, Copy)]
struct Pending {
    block: u16,
    page: u32,
    place: Location,
    digest: u64,
}

/// The open checkpoint.
#[derive(Debug, Default)]
struct Flight {
    table: Vec<(u16, Block)>,
    pending: Vec<Pending>,
    sent: Vec<DirtySet>,
    duplicates: bool,
    pages: Pages,
    bytes: u64,
    writing: Duration,
    syncing: Duration,
    /// Positions of the segments to which the checkpoint has written.
    touched: Vec<usize>,
    /// The checkpoint has created a segment whose name is not durable yet.
    made: bool,
    /// Error because of which the checkpoint cannot be committed.
    failed: Option<StoreError>,
}

/// The writer of a store.
#[derive(Debug)]
pub(crate) struct Engine {
    home: Home,
    settings: Settings,
    claim: Claim,
    /// Number of the last log entry that was written or found.
    slot: u64,
    /// Number of the newest log entry with a manifest; 0 if there is none.
    state: u64,
    pool: Pool,
    files: Files,
    blocks: Vec<BlockState>,
    next_block: u16,
    next_segment: u64,
    kept: Vec<Kept>,
    /// Number of a checkpoint that is kept regardless of its age.
    held: Option<u64>,
    history: History,
    flight: Option<Flight>,
    /// Position of the segment to which pages are appended.
    active: Option<usize>,
    compaction: Option<compaction::Compaction>,
    basing: Option<basing::BaseInProgress>,
    /// Background work has failed since the last commit.
    background_failed: bool,
    /// Pages stored since the last base index.
    since_base: u64,
    /// Bytes of the log and the base indices.
    log_and_index_bytes: u64,
    /// Names of files that are to be removed.
    retired: Vec<String>,
    /// Why the engine cannot write any more: it is unknown whether the newest log entry was written.
    broken: Option<String>,
}

impl Engine {
    pub fn owner(&self) -> &Claim {
        &self.claim
    }

    #[cfg(test)]
    pub fn slot(&self) -> u64 {
        self.slot
    }

    pub fn id(&self) -> uuid::Uuid {
        self.home.id
    }

    pub fn digester(&self) -> crate::format::page::Digester {
        self.home.digester()
    }

    /// Makes the commit of the open checkpoint fail with the message `why`.
    pub fn fail(&mut self, why: &str) {
        if let Some(flight) = &mut self.flight {
            let error = StoreError::Closed { store: self.home.name().into(), why: why.into() };
            flight.failed.get_or_insert(error);
        }
    }

    /// Returns the name of the store for messages.
    pub fn name(&self) -> &str {
        self.home.name()
    }

    /// Returns the number of the newest checkpoint; 0 if there is none.
    pub fn newest(&self) -> u64 {
        self.kept.last().map_or(0, |kept| kept.number)
    }

    fn oldest(&self) -> u64 {
        self.kept.first().map_or(0, |kept| kept.number)
    }

    /// Returns the bytes of RAM at the open checkpoint, or at the newest if none is open.
    fn ram(&self) -> u64 {
        let pages: u64 = match &self.flight {
            Some(flight) => flight.table.iter().map(|(_, block)| block.pages()).sum(),
            None => self.blocks.iter().map(|state| state.block.pages()).sum(),
        };
        pages * PAGE_SIZE as u64
    }

    fn segment_len(&self) -> u64 {
        match self.settings.segment {
            0 => (self.ram() / 32).next_multiple_of(4096).clamp(SEGMENT_MIN, SEGMENT_MAX),
            set => set,
        }
    }

    /// Returns the bytes that the store uses on the disk.
    fn used(&self) -> u64 {
        self.pool.bytes() + self.log_and_index_bytes
    }

    /// Begins a checkpoint with these blocks. Aborts an open checkpoint.
    pub fn begin(&mut self, blocks: Vec<Block>) -> Result<Vec<StartedBlock>> {
        self.abort();
        self.check_owner()?;
        let store = self.home.name().to_owned();
        check_blocks(blocks.iter()).map_err(|what| StoreError::Blocks { store: store.clone(), what: what.into() })?;
        let mut flight = Flight::default();
        let mut started = Vec::with_capacity(blocks.len());
        let mut next = self.next_block;
        for block in blocks {
            let pages = block.pages();
            let number = match self.blocks.iter_mut().find(|state| state.block.id == block.id) {
                Some(state) => {
                    if pages > state.places.pages() {
                        state.places.grow(pages);
                        state.digests = Arc::new(state.digests.resized(pages));
                    }
                    state.number
                }
                None => {
                    let number = next;
                    let what = "it has had 65535 different blocks; start a new store".to_owned();
                    next = next.checked_add(1).ok_or_else(|| StoreError::Blocks { store: store.clone(), what })?;
                    let (places, digests) = (Sparse::new(pages), Arc::new(Digests::new(pages)));
                    let (block, cuts) = (block.clone(), Vec::new());
                    self.blocks.push(BlockState { number, block, cuts, places, digests, new: true });
                    number
                }
            };
            let digests = self.blocks.iter().find(|state| state.number == number).map(|state| state.digests.clone());
            started.push(StartedBlock { number, pages, digests: digests.unwrap_or_else(|| Arc::new(Digests::new(0))) });
            flight.table.push((number, block));
        }
        flight.sent = self.blocks.iter().map(|_| DirtySet::default()).collect();
        self.flight = Some(flight);
        Ok(started)
    }

    /// Fails if an earlier error left it unknown whether the newest log entry was written.
    fn check_sound(&self) -> Result<()> {
        let closed = |why: &String| StoreError::Closed { store: self.home.name().into(), why: why.clone() };
        self.broken.as_ref().map_or(Ok(()), |why| Err(closed(why)))
    }

    /// Checks that this process is still the owner and can write. The check only saves work: a commit is safe without
    /// it.
    fn check_owner(&self) -> Result<()> {
        self.check_sound()?;
        match self.home.disk.open(&names::entry(self.slot + 1)) {
            Ok(_) => Err(log::superseded(&self.home, self.claim.epoch, self.slot + 1)),
            Err(_) => Ok(()),
        }
    }

    /// Replaces an error that a new owner has caused with [`StoreError::Superseded`].
    fn explain(&self, error: StoreError) -> StoreError {
        match error {
            e @ (StoreError::Missing { .. } | StoreError::Io { .. }) => match self.check_owner() {
                Err(superseded @ StoreError::Superseded { .. }) => superseded,
                _ => e,
            },
            other => other,
        }
    }

    /// Discards the open checkpoint. The store keeps no trace of it.
    pub fn abort(&mut self) {
        if let Some(flight) = self.flight.take() {
            self.roll_back(flight);
        }
    }

    fn roll_back(&mut self, flight: Flight) {
        for position in flight.touched {
            let Some(segment) = self.pool.get_mut(position) else { continue };
            let committed = segment.extent.len;
            if committed == 0 {
                let name = names::segment(segment.extent.epoch, segment.extent.number);
                self.pool.remove(position);
                self.active = self.active.filter(|active| *active != position);
                if let Err(e) = self.home.disk.remove(&name) {
                    tracing::warn!("cannot remove the unused file {}/{name}: {e}", self.home.name());
                }
                continue;
            }
            segment.end = committed;
            segment.dirty = false;
            // Truncating only frees space. If it fails, later frames overwrite the bytes.
            if let Some(Err(e)) = segment.file.as_ref().map(|file| file.truncate(committed)) {
                tracing::debug!("cannot truncate a segment: {e}");
            }
        }
        self.blocks.retain(|state| !state.new);
        self.release();
    }

    /// Allows the reuse of removed segments' positions, unless an operation in progress refers to them.
    fn release(&mut self) {
        if self.compaction.is_none() && self.basing.is_none() && self.flight.is_none() {
            self.pool.release();
        }
    }

    /// Removes the files that are not needed any more.
    pub fn tidy(&mut self) {
        for name in std::mem::take(&mut self.retired) {
            if let Err(e) = self.home.disk.remove(&name) {
                tracing::warn!("cannot remove the obsolete file {}/{name}: {e}", self.home.name());
            }
        }
    }

    /// Sets how many checkpoints the store keeps from the next commit on.
    pub fn keep(&mut self, keep: u32) {
        self.settings.keep = keep.max(1);
    }

    /// Keeps checkpoint `number` regardless of its age. `None` releases it.
    pub fn hold(&mut self, number: Option<u64>) {
        self.held = number;
    }
}
