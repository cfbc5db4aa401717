//! The writer of a store. One thread owns it.
//!
//! A checkpoint is [`Engine::begin`], then [`Engine::append`] for each frame of pages, then [`Engine::commit`] or
//! [`Engine::abort`]. Between these calls, [`Engine::work`] does a small piece of background work: compaction, or
//! writing the base index.
//!
//! | module | purpose |
//! |---|---|
//! | `opening` | claims a store and loads the state of its newest checkpoint |
//! | `append` | appends pages of the open checkpoint to segments |
//! | `commit` | commits the open checkpoint |
//! | `compaction` | copies what is needed out of segments that are mostly garbage |
//! | `base_index` | writes the base index in pieces |
//! | `pool`, `replaced` | which bytes of which segment are needed |
//! | `run` | the thread: serves requests, and does background work between them |

mod append;
mod base_index;
mod commit;
mod compaction;
mod opening;
mod pool;
mod replaced;
mod run;

use crate::directory::StoreDirectory;
use crate::error::{Result, StoreError};
use crate::format::base::Location;
use crate::format::manifest::{EntryId, KeptCheckpoint, StoredBlock, check_blocks};
use crate::format::names;
use crate::format::page::Digester;
use crate::log::{self, Claim};
use crate::page_table::{PageDigests, PageTable};
use crate::segments::OpenSegments;
use crate::types::{Block, KnownStore, Pages};
use pool::SegmentPool;
use rekindle_pages::{DirtySet, PAGE_SIZE};
use replaced::ReplacedRecords;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use commit::CheckpointState;
pub(crate) use run::{Frame, Request, StartedBlock, run};

/// Limits of a segment's bytes, if the length depends on the guest's RAM. The last frame of a segment may exceed them.
const MAX_SEGMENT_BYTES: u64 = 32 << 20;
const MIN_SEGMENT_BYTES: u64 = 256 << 10;

#[derive(Debug, Clone)]
pub(crate) struct EngineSettings {
    /// Number of checkpoints to keep.
    pub keep: u32,
    /// Bytes of a segment; with 0, the length depends on the guest's RAM.
    pub segment: u64,
    /// Create a missing store.
    pub create: bool,
}

/// State of a store that was opened for writing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpenedStore {
    pub digester: Digester,
    /// Number of the newest checkpoint; 0 if there is none.
    pub newest: u64,
    /// What is known of the store now.
    pub known: KnownStore,
}

/// A RAM block and the newest content of its pages.
#[derive(Debug)]
struct BlockState {
    stored: StoredBlock,
    locations: PageTable<Location>,
    digests: Arc<PageDigests>,
    /// No checkpoint has the block yet.
    is_new: bool,
}

impl BlockState {
    /// Returns a block without stored pages.
    fn new(number: u16, block: Block) -> Self {
        let pages = block.pages();
        Self {
            stored: StoredBlock { number, block, cuts: Vec::new() },
            locations: PageTable::new(pages),
            digests: Arc::new(PageDigests::new(pages)),
            is_new: true,
        }
    }

    fn grow(&mut self, pages: u64) {
        if pages > self.locations.pages() {
            self.locations.grow(pages);
            self.digests = Arc::new(self.digests.resized(pages));
        }
    }

    /// Records that the block has only `remaining` pages from checkpoint `number` on, and clears the others.
    fn cut(&mut self, number: u64, remaining: u64) {
        let removed_pages: Vec<u64> = self.locations.values_from(remaining).map(|(page, _)| page).collect();
        for page in removed_pages {
            self.digests.set(page, 0);
            if let Some(location) = self.locations.get_mut(page) {
                *location = Location::default();
            }
        }
        self.stored.cut(number, remaining);
    }
}

/// A page of the open checkpoint.
#[derive(Debug, Clone, Copy)]
struct PendingPage {
    /// Position of the block in [`Engine::blocks`].
    block: u16,
    page: u32,
    location: Location,
    digest: u64,
}

/// A RAM block of the open checkpoint.
#[derive(Debug)]
struct NumberedBlock {
    number: u16,
    block: Block,
}

/// The open checkpoint.
#[derive(Debug, Default)]
struct OpenCheckpoint {
    blocks: Vec<NumberedBlock>,
    pending: Vec<PendingPage>,
    /// For each block of [`Engine::blocks`], the pages that were appended.
    appended: Vec<DirtySet>,
    /// A page was appended more than once.
    has_duplicates: bool,
    pages: Pages,
    /// Bytes written to segments.
    bytes: u64,
    writing: Duration,
    syncing: Duration,
    /// Positions of the segments to which the checkpoint has written.
    written_segments: Vec<usize>,
    /// The checkpoint has created a segment whose name is not durable yet.
    has_new_segments: bool,
    /// Error because of which the checkpoint cannot be committed.
    failure: Option<StoreError>,
}

impl OpenCheckpoint {
    fn block(&self, number: u16) -> Option<&Block> {
        self.blocks.iter().find(|numbered| numbered.number == number).map(|numbered| &numbered.block)
    }

    fn ram_bytes(&self) -> u64 {
        self.blocks.iter().map(|numbered| numbered.block.pages()).sum::<u64>() * PAGE_SIZE as u64
    }
}

/// The writer of a store.
#[derive(Debug)]
pub(crate) struct Engine {
    store: StoreDirectory,
    settings: EngineSettings,
    claim: Claim,
    /// Number of the last log entry that was written or found.
    newest_entry: u64,
    /// The newest log entry with a manifest; number 0 if there is none.
    newest_manifest_entry: EntryId,
    /// Log entries after which the existing base indices of this history were written.
    base_entries: Vec<EntryId>,
    pool: SegmentPool,
    /// Buffer for an encrypted frame.
    sealed_frame: Vec<u8>,
    /// Segments that are open for reading.
    open_segments: OpenSegments,
    blocks: Vec<BlockState>,
    next_block: u16,
    next_segment: u64,
    kept: Vec<KeptCheckpoint>,
    /// Number of a checkpoint that is kept regardless of its age.
    held: Option<u64>,
    replaced: ReplacedRecords,
    checkpoint: Option<OpenCheckpoint>,
    /// Position of the segment to which pages are appended.
    active: Option<usize>,
    compaction: Option<compaction::Compaction>,
    base_index: Option<base_index::BaseIndexWriter>,
    /// Background work has failed since the last commit.
    background_failed: bool,
    /// Pages stored since the last base index.
    pages_since_base: u64,
    /// Bytes of the log and the base indices.
    log_and_index_bytes: u64,
    /// Names of files that are to be removed.
    obsolete_files: Vec<String>,
    /// Why the engine cannot write any more: it is unknown whether the newest log entry was written.
    broken: Option<String>,
}

impl Engine {
    #[cfg(test)]
    pub fn owner(&self) -> &Claim {
        &self.claim
    }

    #[cfg(test)]
    pub fn newest_entry(&self) -> u64 {
        self.newest_entry
    }

    pub fn opened(&self) -> OpenedStore {
        OpenedStore { digester: self.store.digester(), newest: self.newest(), known: self.known_store() }
    }

    /// Returns the state of the store as this owner has left it.
    pub fn known_store(&self) -> KnownStore {
        KnownStore::of(&self.store, &self.claim, self.kept.last().copied())
    }

    /// Returns the name of the store for messages.
    pub fn name(&self) -> &str {
        self.store.name()
    }

    /// Returns the number of the newest checkpoint; 0 if there is none.
    pub fn newest(&self) -> u64 {
        self.kept.last().map_or(0, |kept| kept.number)
    }

    fn oldest(&self) -> u64 {
        self.kept.first().map_or(0, |kept| kept.number)
    }

    /// Sets how many checkpoints the store keeps from the next commit on.
    pub fn keep(&mut self, keep: u32) {
        self.settings.keep = keep.max(1);
    }

    /// Keeps checkpoint `number` regardless of its age. `None` releases it.
    pub fn hold(&mut self, number: Option<u64>) {
        self.held = number;
    }

    /// Begins a checkpoint with these blocks. Aborts an open checkpoint.
    pub fn begin(&mut self, blocks: Vec<Block>) -> Result<Vec<StartedBlock>> {
        self.abort();
        self.check_owner()?;
        check_blocks(blocks.iter()).map_err(|what| self.bad_blocks(what))?;
        let mut checkpoint = OpenCheckpoint::default();
        let mut started = Vec::with_capacity(blocks.len());
        for block in blocks {
            let position = self.find_or_add_block(&block)?;
            let Some(state) = self.blocks.get_mut(position) else { continue };
            state.grow(block.pages());
            let (number, digests) = (state.stored.number, state.digests.clone());
            started.push(StartedBlock { number, pages: block.pages(), digests });
            checkpoint.blocks.push(NumberedBlock { number, block });
        }
        checkpoint.appended = self.blocks.iter().map(|_| DirtySet::default()).collect();
        self.checkpoint = Some(checkpoint);
        Ok(started)
    }

    /// Returns the position of a block in [`Engine::blocks`].
    fn find_or_add_block(&mut self, block: &Block) -> Result<usize> {
        if let Some(position) = self.blocks.iter().position(|state| state.stored.block.id == block.id) {
            return Ok(position);
        }
        let number = self.next_block_number();
        if number == u16::MAX {
            return Err(self.bad_blocks("it has had 65535 different blocks; start a new store"));
        }
        self.blocks.push(BlockState::new(number, block.clone()));
        Ok(self.blocks.len() - 1)
    }

    /// Returns the number for the next new block, after the new blocks of the open checkpoint.
    fn next_block_number(&self) -> u16 {
        let after_existing = self.blocks.iter().map(|state| state.stored.number + 1).max();
        after_existing.unwrap_or(0).max(self.next_block)
    }

    fn bad_blocks(&self, what: &str) -> StoreError {
        StoreError::Blocks { store: self.store.name().into(), what: what.into() }
    }

    /// Makes the commit of the open checkpoint fail with the message `why`.
    pub fn fail(&mut self, why: &str) {
        if let Some(checkpoint) = &mut self.checkpoint {
            let error = StoreError::Closed { store: self.store.name().into(), why: why.into() };
            checkpoint.failure.get_or_insert(error);
        }
    }

    /// Discards the open checkpoint. The store keeps no trace of it.
    pub fn abort(&mut self) {
        if let Some(checkpoint) = self.checkpoint.take() {
            self.roll_back(checkpoint);
        }
    }

    fn roll_back(&mut self, checkpoint: OpenCheckpoint) {
        for position in checkpoint.written_segments {
            let Some(segment) = self.pool.get_mut(position) else { continue };
            let committed = segment.extent.len;
            if committed == 0 {
                let name = segment.name();
                self.pool.remove(position);
                self.active = self.active.filter(|active| *active != position);
                self.remove_unused_file(&name);
                continue;
            }
            segment.end = committed;
            segment.is_dirty = false;
            // Truncating only frees space. If it fails, later frames overwrite the bytes.
            if let Some(Err(e)) = segment.file.as_ref().map(|file| file.truncate(committed)) {
                tracing::debug!("cannot truncate a segment: {e}");
            }
            if segment.key.take().is_some() {
                // Its key was used with the nonces of these bytes, so nothing else may be written there.
                segment.file = None;
                segment.is_sound = false;
                self.active = self.active.filter(|active| *active != position);
            }
        }
        self.blocks.retain(|state| !state.is_new);
        self.allow_reuse_of_positions();
    }

    /// Allows the reuse of removed segments' positions, unless an operation in progress refers to them.
    fn allow_reuse_of_positions(&mut self) {
        if self.compaction.is_none() && self.base_index.is_none() && self.checkpoint.is_none() {
            self.pool.allow_reuse();
        }
    }

    fn remove_unused_file(&self, name: &str) {
        if let Err(e) = self.store.disk.remove(name) {
            tracing::warn!("cannot remove the unused file {}/{name}: {e}", self.store.name());
        }
    }

    /// Removes the files that are not needed any more.
    pub fn remove_obsolete_files(&mut self) {
        let obsolete_files = std::mem::take(&mut self.obsolete_files);
        for name in &obsolete_files {
            if let Err(e) = self.store.disk.remove(name) {
                tracing::warn!("cannot remove the obsolete file {}/{name}: {e}", self.store.name());
            }
        }
        // A list of objects is requested here, where no caller waits for it.
        if !self.store.disk.can_append() && obsolete_files.iter().any(|name| name.starts_with(names::LOG)) {
            self.log_and_index_bytes = self.measure_log_and_index();
        }
    }

    /// Fails if an earlier error left it unknown whether the newest log entry was written.
    fn check_sound(&self) -> Result<()> {
        match &self.broken {
            Some(why) => Err(StoreError::Closed { store: self.store.name().into(), why: why.clone() }),
            None => Ok(()),
        }
    }

    /// Checks that this process is still the owner and can write. The check only saves work: a commit is safe without
    /// it.
    fn check_owner(&self) -> Result<()> {
        self.check_sound()?;
        let next_entry = self.newest_entry + 1;
        match self.store.disk.open(&names::entry(next_entry)) {
            Ok(_) => Err(log::superseded(&self.store, self.claim.epoch, next_entry)),
            Err(_) => Ok(()),
        }
    }

    /// Replaces an error that a new owner has caused with [`StoreError::Superseded`].
    fn explain(&self, error: StoreError) -> StoreError {
        if !matches!(error, StoreError::Missing { .. } | StoreError::Io { .. }) {
            return error;
        }
        match self.check_owner() {
            Err(superseded @ StoreError::Superseded { .. }) => superseded,
            _ => error,
        }
    }

    /// Returns the bytes of RAM at the open checkpoint, or at the newest if none is open.
    fn ram_bytes(&self) -> u64 {
        match &self.checkpoint {
            Some(checkpoint) => checkpoint.ram_bytes(),
            None => self.blocks.iter().map(|state| state.stored.block.pages()).sum::<u64>() * PAGE_SIZE as u64,
        }
    }

    /// Returns the limit of a segment's bytes for a guest with `ram_bytes` of RAM.
    fn max_segment_bytes(&self, ram_bytes: u64) -> u64 {
        match self.settings.segment {
            0 => (ram_bytes / 32).next_multiple_of(4096).clamp(MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES),
            configured => configured,
        }
    }

    /// Returns the bytes that the store uses on the disk.
    fn used_bytes(&self) -> u64 {
        self.pool.bytes() + self.log_and_index_bytes
    }
}
