//! The writer of a store in a directory: one thread owns all of this.
//!
//! [`Engine::begin`], then [`Engine::append`] for frames of pages, then [`Engine::commit`] or [`Engine::abort`]. In
//! between, [`Engine::work`] does a small piece of what can wait: compaction, and writing the base index.

mod basing;
mod commit;
mod compaction;
mod pool;
mod run;

use crate::disk::{Disk, DiskFile};
use crate::error::{Result, StoreError};
use crate::format::base::Place;
use crate::format::manifest::{Cut, Extent, Kept, Manifest, StoredBlock, Table, check_blocks};
use crate::format::segment::{self, FRAME_HEADER_LEN, FrameHeader, Kind, RECORD_LEN, Record};
use crate::format::{entry, names};
use crate::home::Home;
use crate::index::Index;
use crate::log::{self, Claim};
use crate::segments::Files;
use crate::sparse::{Digests, PageSet, Sparse};
use crate::types::{Block, Owner, PAGE_SIZE, Pages, Vm};
use pool::{History, Pool, Role, Segment, cost};
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    /// Open the store in `disk`, or make it, and become its owner. With `only_if`, only if that is still the owner
    /// epoch.
    pub fn open(disk: Arc<dyn Disk>, vm: &Vm, owner: &Owner, only_if: Option<u64>, settings: Settings) -> Result<Self> {
        let home = Home::open_or_create(disk, vm)?;
        let (claim, tail) = log::claim(&home, owner, only_if)?;
        let mut engine = Self {
            slot: claim.slot,
            state: 0,
            claim,
            home,
            settings,
            pool: Pool::default(),
            files: Files::default(),
            blocks: Vec::new(),
            next_block: 0,
            next_segment: 1,
            kept: Vec::new(),
            held: None,
            history: History::default(),
            flight: None,
            active: None,
            compaction: None,
            basing: None,
            tired: false,
            since_base: 0,
            beside: 0,
            retired: Vec::new(),
            broken: None,
        };
        if let Some((state, manifest)) = tail.state {
            engine.state = state.slot;
            let Some(newest) = manifest.newest() else { return Ok(engine) };
            let entry = crate::image::kept_entry(&engine.home, &manifest, newest)?;
            let table = crate::image::table(&engine.home, &entry)?;
            engine.load(&manifest, &table)?;
            engine.clean(&manifest);
        } else {
            engine.clean(&Manifest::default());
        }
        engine.beside = engine.measure_beside();
        Ok(engine)
    }

    /// Take over what is there.
    fn load(&mut self, manifest: &Manifest, table: &Table) -> Result<()> {
        let index = Index::build(&self.home, &self.files, manifest, table, true)?;
        match self.fill(manifest, table, &index) {
            Err(e @ StoreError::Damaged { .. }) if index.has_base() => {
                tracing::warn!("{e}; the index is made from the directories instead");
                let index = Index::build(&self.home, &self.files, manifest, table, false)?;
                self.fill(manifest, table, &index)
            }
            other => other,
        }
    }

    fn fill(&mut self, manifest: &Manifest, table: &Table, index: &Index) -> Result<()> {
        self.pool = Pool::default();
        self.blocks.clear();
        for extent in &manifest.segments {
            self.pool.add(Segment::found(*extent));
        }
        for (position, StoredBlock { number, block, cuts }) in table.blocks.iter().enumerate() {
            let pages = block.pages();
            let (mut places, digests) = (Sparse::new(pages), Digests::new(pages));
            for page in 0..pages {
                let spot = index.find(&self.home, position, page)?;
                if !spot.place.is_stored() {
                    continue;
                }
                if let Some(place) = places.get_mut(page) {
                    *place = spot.place.0;
                }
                digests.set(page, spot.digest);
                if let Some(segment) = self.pool.of(spot.place) {
                    segment.live += cost(spot.place.len());
                }
            }
            let (number, block, cuts, digests) = (*number, block.clone(), cuts.clone(), Arc::new(digests));
            self.blocks.push(BlockState { number, block, cuts, places, digests, new: false });
        }
        let newest = manifest.newest().map_or(0, |kept| kept.number);
        if manifest.oldest().is_some_and(|oldest| oldest < newest) {
            // What is not the newest may be needed by an older checkpoint.
            self.pool.iter_mut().for_each(|segment| segment.unknown_until = newest);
        }
        self.kept.clone_from(&manifest.kept);
        self.next_block = manifest.next_block;
        self.next_segment = manifest.next_segment;
        self.since_base = index.uncovered;
        Ok(())
    }

    /// Remove what an earlier owner has left. Nothing depends on it.
    fn clean(&self, manifest: &Manifest) {
        let disk = &self.home.disk;
        let mine = self.claim.epoch;
        let remove = |name: String| {
            if let Err(e) = disk.remove(&name) {
                tracing::debug!("{}/{name} is left over, and cannot be removed: {e}", disk.name());
            }
        };
        for (name, _) in disk.list("").unwrap_or_default() {
            if name.starts_with(names::NEW) {
                remove(name);
            }
        }
        for directory in [names::LOG, names::SEGMENTS, names::INDEX] {
            for (name, len) in disk.list(directory).unwrap_or_default() {
                let old_new = names::parse_new(&name).is_some_and(|epoch| epoch < mine)
                    || names::parse_last(&name).is_some_and(|slot| slot < self.slot);
                let segment = (directory == names::SEGMENTS).then(|| names::parse_segment(&name)).flatten();
                let unused = segment.is_some_and(|(epoch, number)| {
                    let counts = |extent: &Extent| (extent.epoch, extent.number) == (epoch, number);
                    epoch < mine && !manifest.segments.iter().any(counts)
                });
                let entry = (directory == names::LOG).then(|| names::parse_entry(&name)).flatten();
                let replaced = entry.is_some_and(|slot| {
                    let needed = slot >= self.state || manifest.kept.iter().any(|kept| kept.slot == slot);
                    // Claims are short; they are never removed.
                    !needed
                        && (len > 1024 || slot > manifest.claim)
                        && log::read(&self.home, slot).is_ok_and(|entry| entry.kind != entry::Kind::Claim)
                });
                if old_new || unused || replaced {
                    remove(format!("{directory}/{name}"));
                }
            }
        }
    }

    /// Bytes of the log and the base indices, looked up.
    fn measure_beside(&self) -> u64 {
        let files = [names::LOG, names::INDEX].map(|directory| self.home.disk.list(directory).unwrap_or_default());
        files.iter().flatten().map(|(_, len)| len.next_multiple_of(4096)).sum()
    }

    /// The owner.
    pub fn owner(&self) -> &Claim {
        &self.claim
    }

    /// Number of its newest log entry.
    #[cfg(test)]
    pub fn slot(&self) -> u64 {
        self.slot
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

    /// Take a frame of the checkpoint in hand: [`FRAME_HEADER_LEN`] free bytes, the directory of `count` pages, their content.
    /// What goes wrong is told by the commit.
    pub fn append(&mut self, frame: &mut [u8], count: usize) {
        let began = Instant::now();
        let Some(mut flight) = self.flight.take() else { return };
        if flight.failed.is_none() {
            let waited = flight.syncing;
            flight.failed = self.append_to(&mut flight, frame, count).err();
            flight.writing += began.elapsed().saturating_sub(flight.syncing - waited);
        }
        self.flight = Some(flight);
    }

    fn append_to(&mut self, flight: &mut Flight, frame: &mut [u8], count: usize) -> Result<()> {
        let data_at = FRAME_HEADER_LEN + count * RECORD_LEN;
        let data_len = frame.len().saturating_sub(data_at);
        let number = self.newest() + 1;
        let header = FrameHeader { kind: Kind::Pages, count: count as u32, data_len: data_len as u32, number };
        let wrong = |what: &str| StoreError::Blocks { store: self.home.name().into(), what: what.into() };
        if count > segment::FRAME_RECORDS || data_len > segment::FRAME_DATA || frame.len() < data_at {
            return Err(wrong("a frame of pages is longer than a frame can be"));
        }
        let records = frame.get(FRAME_HEADER_LEN..data_at).unwrap_or_default().as_chunks::<RECORD_LEN>().0;
        let mut total = 0;
        for record in records.iter().map(|bytes| Record::decode(*bytes)) {
            let block = flight.table.iter().find(|(number, _)| *number == record.block);
            if block.is_none_or(|(_, block)| u64::from(record.page) >= block.pages()) {
                return Err(wrong("a page lies beyond its block"));
            }
            if usize::from(record.len) > PAGE_SIZE || (record.len == 0) != (record.digest == 0) {
                return Err(wrong("a page has a length or digest that it cannot have"));
            }
            total += usize::from(record.len);
        }
        if total != data_len {
            return Err(wrong("the lengths of a frame's pages do not add up"));
        }
        header.seal(frame);
        self.make_room(flight, frame.len() as u64)?;
        let position = self.place_for(flight, frame.len() as u64)?;
        let Some(segment) = self.pool.get_mut(position) else { return Ok(()) };
        let at = segment.next();
        let name = names::segment(segment.extent.epoch, segment.extent.number);
        segment.dirty = true;
        if !flight.touched.contains(&position) {
            flight.touched.push(position);
        }
        if let Some(file) = &segment.file {
            file.write_at(frame, at).map_err(|e| StoreError::io(self.home.disk.name(), &name, "writing pages", e))?;
            file.start_writeback(at, frame.len() as u64);
        }
        segment.end = at + frame.len() as u64;
        flight.bytes += segment.end.next_multiple_of(4096) - at;
        let mut data = at + data_at as u64;
        let records = frame.get(FRAME_HEADER_LEN..data_at).unwrap_or_default().as_chunks::<RECORD_LEN>().0;
        for (record, n) in records.iter().map(|bytes| Record::decode(*bytes)).zip(0u64..) {
            let own = at + FRAME_HEADER_LEN as u64 + n * RECORD_LEN as u64;
            let place = Place::new(position, if record.len == 0 { own } else { data }, record.len);
            data += u64::from(record.len);
            let Some(block) = self.blocks.iter().position(|state| state.number == record.block) else { continue };
            let first = flight.sent.get_mut(block).is_some_and(|sent| sent.insert(record.page.into()));
            flight.duplicates |= !first;
            flight.pending.push(Pending { block: block as u16, page: record.page, place, digest: record.digest });
            if record.len == 0 {
                flight.pages.zero += 1;
            } else {
                flight.pages.stored += 1;
                flight.pages.compressed += u64::from(record.len);
            }
        }
        Ok(())
    }

    /// The segment that the next `len` bytes go to.
    fn place_for(&mut self, flight: &mut Flight, len: u64) -> Result<usize> {
        let most = self.segment_len_of(flight);
        if let Some(position) = self.active
            && let Some(segment) = self.pool.get(position)
            && segment.sound
            && segment.file.is_some()
            && segment.next() + len <= most
        {
            return Ok(position);
        }
        self.active = None;
        // So that the commit need not wait for all of a large checkpoint, and the kernel need not hold it.
        let dirty: Vec<_> =
            flight.touched.iter().copied().filter(|p| self.pool.get(*p).is_some_and(|s| s.dirty)).collect();
        for position in dirty.iter().take((dirty.len() + 1).saturating_sub(DIRTY_MOST)) {
            self.sync_segment(*position, &mut flight.syncing)?;
        }
        let position = self.make_segment(Role::Data)?;
        flight.made = true;
        flight.touched.push(position);
        flight.bytes += segment::HEADER_LEN;
        self.active = Some(position);
        Ok(position)
    }

    fn segment_len_of(&self, flight: &Flight) -> u64 {
        match self.settings.segment {
            0 => {
                let pages: u64 = flight.table.iter().map(|(_, block)| block.pages()).sum();
                (pages * PAGE_SIZE as u64 / 32).next_multiple_of(4096).clamp(SEGMENT_LEAST, SEGMENT_MOST)
            }
            set => set,
        }
    }

    /// Make a new segment; it counts for nothing yet.
    fn make_segment(&mut self, role: Role) -> Result<usize> {
        let extent = Extent { epoch: self.claim.epoch, number: self.next_segment, len: 0 };
        let name = names::segment(extent.epoch, extent.number);
        self.next_segment += 1;
        let file: Arc<dyn DiskFile> =
            self.home.disk.create(&name).map_err(self.home.failed(&name, "making a segment"))?;
        let header = segment::encode_header(self.home.id, extent.epoch, extent.number);
        let written = file.write_at(&header, 0).map_err(self.home.failed(&name, "writing its header"));
        let added = written.and_then(|()| {
            let what = "it has more segments than can be told apart".to_owned();
            let full = StoreError::Blocks { store: self.home.name().into(), what };
            self.pool.add(Segment::new(extent, role, file)).ok_or(full)
        });
        if added.is_err() {
            let _ = self.home.disk.remove(&name);
        }
        added
    }

    /// Make what was written to a segment durable. One that is not appended to any more is closed.
    fn sync_segment(&mut self, position: usize, waited: &mut Duration) -> Result<()> {
        let active = self.active == Some(position);
        let Some(segment) = self.pool.get_mut(position) else { return Ok(()) };
        let began = Instant::now();
        let synced = segment.file.as_ref().map_or(Ok(()), |file| file.sync());
        *waited += began.elapsed();
        if let Err(e) = synced {
            // What the kernel could not write it may forget, and then call everything written.
            segment.sound = false;
            let name = names::segment(segment.extent.epoch, segment.extent.number);
            return Err(StoreError::io(self.home.disk.name(), &name, "making pages durable", e));
        }
        segment.dirty = false;
        // One that held something before stays open, so that it can be cut back to that.
        if !active && segment.extent.len == 0 {
            segment.file = None;
        }
        Ok(())
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
