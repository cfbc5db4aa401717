//! The writer of a store in a directory: one thread owns all of this.
//!
//! [`Engine::begin`], then [`Engine::append`] for frames of pages, then [`Engine::commit`] or [`Engine::abort`]. In
//! between, [`Engine::work`] does a small piece of what can wait: compaction, and writing the base index.

mod append;
mod basing;
mod commit;
mod compaction;
mod opening;
mod pool;
mod run;

use crate::error::{Result, StoreError};
use crate::format::base::Place;
use crate::format::manifest::{Cut, Kept, StoredBlock, check_blocks};
use crate::format::names;
use crate::home::Home;
use crate::log::{self, Claim};
use crate::segments::Files;
use crate::sparse::{Digests, PageSet, Sparse};
use crate::types::{Block, PAGE_SIZE, Pages};
use pool::{History, Pool};
use std::sync::Arc;
use std::time::Duration;

pub(crate) use commit::State;
pub(crate) use run::{Begun, Frame, Request, run};

/// Bytes of a segment at most, apart from its last frame.
const SEGMENT_MOST: u64 = 32 << 20;
const SEGMENT_LEAST: u64 = 256 << 10;
/// Segments with unsynced pages at most: what the kernel holds of them in memory.
const DIRTY_MOST: usize = 4;

/// How a writer is to work.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Checkpoints to keep.
    pub keep: u32,
    /// Bytes of a segment; by the guest's size if 0.
    pub segment: u64,
    /// Create the store if there is none.
    pub create: bool,
}

/// A RAM block as it is stored.
#[derive(Debug)]
struct BlockState {
    number: u16,
    block: Block,
    cuts: Vec<Cut>,
    places: Sparse<u64>,
    digests: Arc<Digests>,
    /// Whether no checkpoint has it yet.
    new: bool,
}

impl BlockState {
    /// Checkpoint `number` leaves `left` pages: forget the others.
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

/// One page of the checkpoint in hand.
#[derive(Debug, Clone, Copy)]
struct Pending {
    block: u16,
    page: u32,
    place: Place,
    digest: u64,
}

/// The checkpoint in hand.
#[derive(Debug, Default)]
struct Flight {
    table: Vec<(u16, Block)>,
    pending: Vec<Pending>,
    sent: Vec<PageSet>,
    duplicates: bool,
    pages: Pages,
    bytes: u64,
    writing: Duration,
    syncing: Duration,
    /// Segments that it has written to.
    touched: Vec<usize>,
    /// Whether it has made a segment whose name is not durable yet.
    made: bool,
    /// Why it cannot be committed.
    failed: Option<StoreError>,
}

/// The writer of a store.
#[derive(Debug)]
pub(crate) struct Engine {
    home: Home,
    settings: Settings,
    claim: Claim,
    /// The log entry that was written or found last.
    slot: u64,
    /// The newest entry with a manifest; 0 if there is none.
    state: u64,
    pool: Pool,
    files: Files,
    blocks: Vec<BlockState>,
    next_block: u16,
    next_segment: u64,
    kept: Vec<Kept>,
    /// A checkpoint that is kept although it is old.
    held: Option<u64>,
    history: History,
    flight: Option<Flight>,
    /// Segment that is appended to.
    active: Option<usize>,
    compaction: Option<compaction::Compaction>,
    basing: Option<basing::Basing>,
    /// Whether background work has failed since the last commit.
    tired: bool,
    /// Pages stored since the last base index.
    since_base: u64,
    /// Bytes of the log and the base indices.
    beside: u64,
    /// Names of files that are not needed any more.
    retired: Vec<String>,
    /// Why nothing can be written any more.
    broken: Option<String>,
}

impl Engine {
    /// The owner.
    pub fn owner(&self) -> &Claim {
        &self.claim
    }

    /// Number of its newest log entry.
    #[cfg(test)]
    pub fn slot(&self) -> u64 {
        self.slot
    }

    /// Of the store.
    pub fn id(&self) -> uuid::Uuid {
        self.home.id
    }

    /// The digester of its pages.
    pub fn digester(&self) -> crate::format::page::Digester {
        self.home.digester()
    }

    /// The checkpoint in hand cannot be committed.
    pub fn fail(&mut self, why: &str) {
        if let Some(flight) = &mut self.flight {
            let error = StoreError::Closed { store: self.home.name().into(), why: why.into() };
            flight.failed.get_or_insert(error);
        }
    }

    /// Where it is, for messages.
    pub fn name(&self) -> &str {
        self.home.name()
    }

    /// Number of the newest checkpoint; 0 if there is none.
    pub fn newest(&self) -> u64 {
        self.kept.last().map_or(0, |kept| kept.number)
    }

    fn oldest(&self) -> u64 {
        self.kept.first().map_or(0, |kept| kept.number)
    }

    /// Bytes of RAM, of the checkpoint in hand if there is one.
    fn ram(&self) -> u64 {
        let pages: u64 = match &self.flight {
            Some(flight) => flight.table.iter().map(|(_, block)| block.pages()).sum(),
            None => self.blocks.iter().map(|state| state.block.pages()).sum(),
        };
        pages * PAGE_SIZE as u64
    }

    fn segment_len(&self) -> u64 {
        match self.settings.segment {
            0 => (self.ram() / 32).next_multiple_of(4096).clamp(SEGMENT_LEAST, SEGMENT_MOST),
            set => set,
        }
    }

    /// Bytes on the disk.
    fn used(&self) -> u64 {
        self.pool.bytes() + self.beside
    }

    /// Begin a checkpoint with these blocks. One that was begun before is aborted.
    pub fn begin(&mut self, blocks: Vec<Block>) -> Result<Vec<Begun>> {
        self.abort();
        self.check_owner()?;
        let store = self.home.name().to_owned();
        check_blocks(blocks.iter()).map_err(|what| StoreError::Blocks { store: store.clone(), what: what.into() })?;
        let mut flight = Flight::default();
        let mut begun = Vec::with_capacity(blocks.len());
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
            begun.push(Begun { number, pages, digests: digests.unwrap_or_else(|| Arc::new(Digests::new(0))) });
            flight.table.push((number, block));
        }
        flight.sent = self.blocks.iter().map(|_| PageSet::default()).collect();
        self.flight = Some(flight);
        Ok(begun)
    }

    /// Whether it is known what counts.
    fn check_sound(&self) -> Result<()> {
        let closed = |why: &String| StoreError::Closed { store: self.home.name().into(), why: why.clone() };
        self.broken.as_ref().map_or(Ok(()), |why| Err(closed(why)))
    }

    /// Whether this is still the owner, and can write. It saves work only: a commit is safe without.
    fn check_owner(&self) -> Result<()> {
        self.check_sound()?;
        match self.home.disk.open(&names::entry(self.slot + 1)) {
            Ok(_) => Err(log::superseded(&self.home, self.claim.epoch, self.slot + 1)),
            Err(_) => Ok(()),
        }
    }

    /// An owner that was superseded is told that, rather than what it ran into because of it.
    fn explain(&self, error: StoreError) -> StoreError {
        match error {
            e @ (StoreError::Missing { .. } | StoreError::Io { .. }) => match self.check_owner() {
                Err(superseded @ StoreError::Superseded { .. }) => superseded,
                _ => e,
            },
            other => other,
        }
    }

    /// Give the checkpoint in hand up. It leaves no trace.
    pub fn abort(&mut self) {
        if let Some(flight) = self.flight.take() {
            self.roll_back(flight);
        }
    }

    fn roll_back(&mut self, flight: Flight) {
        for position in flight.touched {
            let Some(segment) = self.pool.get_mut(position) else { continue };
            let counts = segment.extent.len;
            if counts == 0 {
                let name = names::segment(segment.extent.epoch, segment.extent.number);
                self.pool.remove(position);
                self.active = self.active.filter(|active| *active != position);
                if let Err(e) = self.home.disk.remove(&name) {
                    tracing::warn!("{}/{name} is left over, and cannot be removed: {e}", self.home.name());
                }
                continue;
            }
            segment.end = counts;
            segment.dirty = false;
            // Room for others; what stays is overwritten.
            if let Some(Err(e)) = segment.file.as_ref().map(|file| file.truncate(counts)) {
                tracing::debug!("the end of a segment cannot be cut off: {e}");
            }
        }
        self.blocks.retain(|state| !state.new);
        self.release();
    }

    /// Positions of removed segments can be used again, if nothing at work refers to them.
    fn release(&mut self) {
        if self.compaction.is_none() && self.basing.is_none() && self.flight.is_none() {
            self.pool.release();
        }
    }

    /// Remove the files that nothing needs any more.
    pub fn tidy(&mut self) {
        for name in std::mem::take(&mut self.retired) {
            if let Err(e) = self.home.disk.remove(&name) {
                tracing::warn!("{}/{name} is not needed any more, and cannot be removed: {e}", self.home.name());
            }
        }
    }

    /// How many checkpoints are kept from the next commit on.
    pub fn keep(&mut self, keep: u32) {
        self.settings.keep = keep.max(1);
    }

    /// Keep checkpoint `number` however old it gets; `None` lets go of it.
    pub fn hold(&mut self, number: Option<u64>) {
        self.held = number;
    }
}
