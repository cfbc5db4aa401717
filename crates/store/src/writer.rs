//! Writes checkpoints as the owner of a store.
//!
//! ```text
//! caller                packers (threads)      the store's own thread
//! digest, drop          compress in place      append, commit, compact
//! unchanged pages ----> -------------------->
//! ```
//!
//! From the guest's memory to the disk, a page stays in the buffer of one frame, which has space for the frame's
//! directory before the first page. The caller's thread computes the digest of each page. This takes about 200 ns and
//! avoids storing unchanged pages. Other threads do all other work. Frames are written in the order in which they were
//! filled, regardless of which packer is done first.

use crate::credentials::Credentials;
use crate::engine::{self, CheckpointState, Engine, EngineSettings, Frame, OpenedStore, Request, StartedBlock};
use crate::error::{Result, StoreError};
use crate::format::page::Digester;
use crate::format::segment::Record;
use crate::location::Storage;
use crate::packing::{FrameBuilder, PackJob, pack_all};
use crate::types::{Block, Committed, Guest, KnownStore, OnlyIf, Owner, Vm};
use crate::url::StoreUrl;
use rekindle_pages::{BlockId, DirtySet, PAGE_SIZE, Page, PageNo, PageRuns};
use serde_json::Value;
use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

/// Limit of threads that compress.
const MAX_PACKERS: usize = 16;

/// Options for writing a store.
#[derive(Debug, Clone)]
pub struct Options {
    /// The VM of the store. A store of another VM is rejected.
    pub vm: Vm,
    /// Number of checkpoints to keep, at least 1.
    pub keep: u32,
    /// Operation as shown to users, e.g. `protect web`.
    pub operation: String,
    /// Effect of the operation on the guest.
    pub guest: Guest,
    /// Become the owner only if this condition holds. The store must exist.
    pub only_if: Option<OnlyIf>,
    /// Number of threads that compress; with 0, it depends on the number of processors.
    pub packers: usize,
    pub credentials: Option<Credentials>,
    /// Bytes of a segment; with 0, the length depends on the guest's RAM.
    pub segment: u64,
    /// Create a missing store. Has no effect with `only_if`.
    pub create: bool,
}

impl Options {
    /// Returns the default options for `vm`: keep 10 checkpoints, do not create a missing store.
    #[must_use]
    pub fn new(vm: Vm, operation: &str) -> Self {
        let operation = operation.to_owned();
        let (guest, only_if) = (Guest::Same, None);
        Self { vm, keep: 10, operation, guest, only_if, packers: 0, credentials: None, segment: 0, create: false }
    }
}

impl Options {
    fn owner(&self) -> Owner {
        Owner::here(&self.operation).with(self.guest)
    }

    fn settings(&self) -> EngineSettings {
        EngineSettings { keep: self.keep.max(1), segment: self.segment, create: self.create }
    }
}

/// A block of the open checkpoint.
#[derive(Debug)]
struct OpenBlock {
    started: StartedBlock,
    /// Pages that were sent.
    sent: DirtySet,
}

/// The owner of a store, which writes checkpoints into it.
///
/// Dropping the writer ends its threads. Committed checkpoints stay.
#[derive(Debug)]
pub struct Writer {
    /// Name of the store for messages.
    store: String,
    digester: Digester,
    /// Number of the next checkpoint.
    next: u64,
    known: KnownStore,
    requests: Option<Sender<Request>>,
    pack_jobs: Option<Sender<PackJob>>,
    /// The store's thread returns the buffer of a frame here after writing the frame.
    return_frame: Sender<Frame>,
    free_frames: Receiver<Frame>,
    threads: Vec<JoinHandle<()>>,
    /// Frame that is being filled.
    filling: Option<FrameBuilder>,
    /// Blocks of the open checkpoint.
    blocks: Vec<OpenBlock>,
    /// Pages that the caller has added but that were unchanged.
    unchanged: u64,
}

impl Writer {
    /// Opens a store and becomes its owner: no previous owner can commit any more.
    ///
    /// # Errors
    /// [`StoreError::NotAStore`] without [`Options::create`]; [`StoreError::OtherVm`], [`StoreError::NotEmpty`];
    /// [`StoreError::Superseded`] with [`Options::only_if`]. The previous owner is still the owner then. After any
    /// other error the store may have been claimed already: damage; [`StoreError::Io`].
    pub fn open(url: &StoreUrl, options: &Options) -> Result<Self> {
        Self::on_disk(Storage::of(url, options.credentials.as_ref())?, options)
    }

    /// Opens the store in `storage`, like [`Writer::open`].
    ///
    /// # Errors
    /// Errors of [`Writer::open`].
    pub fn on_disk(storage: impl Into<Storage>, options: &Options) -> Result<Self> {
        let engine = Engine::open(storage, &options.vm, &options.owner(), options.only_if, options.settings())?;
        let (store, opened) = (engine.name().to_owned(), engine.opened());
        let failed = |e: io::Error| StoreError::io(&store, "", "starting a thread", e);
        let packers = match options.packers {
            // More than two threads would take processor time that the guest needs.
            0 => thread::available_parallelism().map_or(1, |cores| cores.get().min(2)),
            configured => configured.min(MAX_PACKERS),
        };
        let (requests, received_requests) = mpsc::channel();
        let (pack_jobs, received_jobs) = mpsc::channel::<PackJob>();
        let (return_frame, free_frames) = mpsc::channel();
        let serve = move || engine::run(engine, &received_requests);
        let mut threads = vec![thread::Builder::new().name("store".into()).spawn(serve).map_err(failed)?];
        let received_jobs = Arc::new(Mutex::new(received_jobs));
        for _ in 0..packers {
            let received_jobs = received_jobs.clone();
            let packer = thread::Builder::new().name("store packer".into()).spawn(move || pack_all(&received_jobs));
            threads.push(packer.map_err(failed)?);
        }
        // In addition to a frame for each packer: one is being filled, one is being written, and one is spare.
        for _ in 0..packers + 3 {
            let _ = return_frame.send(Frame::default());
        }
        let OpenedStore { digester, newest, known } = opened;
        Ok(Self {
            store,
            digester,
            next: newest + 1,
            known,
            requests: Some(requests),
            pack_jobs: Some(pack_jobs),
            return_frame,
            free_frames,
            threads,
            filling: None,
            blocks: Vec::new(),
            unchanged: 0,
        })
    }

    /// Returns the owner epoch.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.known.reached.epoch
    }

    /// Returns what is known of the store since the last commit.
    #[must_use]
    pub fn known_store(&self) -> KnownStore {
        self.known
    }

    /// Returns the number that the next checkpoint gets.
    #[must_use]
    pub fn next_number(&self) -> u64 {
        self.next
    }

    /// Sets how many checkpoints the store keeps from the next commit on.
    pub fn keep(&mut self, keep: u32) {
        let _ = self.ask(Request::Keep(keep));
    }

    /// Keeps checkpoint `number` regardless of its age, because a process reads it. `None` releases it. Pages that
    /// later checkpoints replace stay on the disk meanwhile, so the store may exceed its size limit.
    pub fn hold(&mut self, number: Option<u64>) {
        let _ = self.ask(Request::Hold(number));
    }

    /// Begins a checkpoint of a VM that has these RAM blocks.
    ///
    /// # Errors
    /// [`StoreError::Superseded`]; [`StoreError::Blocks`].
    pub fn begin(&mut self, blocks: &[Block]) -> Result<Checkpoint<'_>> {
        let (reply, answer) = mpsc::channel();
        self.ask(Request::Begin(blocks.to_vec(), reply))?;
        let started = self.answer(&answer)??;
        // Reuses the allocated memory of the previous checkpoint's sets.
        let mut previous = std::mem::take(&mut self.blocks).into_iter();
        for started in started {
            let mut sent = previous.next().map(|block| block.sent).unwrap_or_default();
            sent.clear();
            self.blocks.push(OpenBlock { started, sent });
        }
        self.unchanged = 0;
        Ok(Checkpoint { writer: self, open: true })
    }

    /// Frees all space that can be freed. Returns the number of bytes.
    ///
    /// # Errors
    /// [`StoreError::Superseded`]; errors of reading and writing segments. Committed checkpoints stay unchanged.
    pub fn compact(&mut self) -> Result<u64> {
        let (reply, answer) = mpsc::channel();
        self.ask(Request::Compact(reply))?;
        self.answer(&answer)?
    }

    /// Finishes background work and writes a base index, so that opening the store is fast.
    ///
    /// # Errors
    /// [`StoreError::Superseded`]; errors of reading and writing segments. Committed checkpoints stay unchanged.
    pub fn settle(&mut self) -> Result<()> {
        let (reply, answer) = mpsc::channel();
        self.ask(Request::Settle(reply))?;
        self.answer(&answer)?
    }

    fn ended(&self) -> StoreError {
        StoreError::Closed { store: self.store.clone(), why: "its thread has ended".into() }
    }

    fn ask(&self, request: Request) -> Result<()> {
        self.requests.as_ref().and_then(|requests| requests.send(request).ok()).ok_or_else(|| self.ended())
    }

    fn answer<T>(&self, answer: &Receiver<T>) -> Result<T> {
        answer.recv().map_err(|_| self.ended())
    }

    /// Sends the frame that is being filled to a packer, and a receiver for the packed frame to the store's thread.
    fn flush(&mut self) -> Result<()> {
        // An empty frame is kept for the next checkpoint.
        let Some(frame) = self.filling.take_if(|frame| !frame.records.is_empty()) else { return Ok(()) };
        let (send_packed, packed) = mpsc::channel();
        let job = PackJob { frame, send_packed };
        self.pack_jobs.as_ref().and_then(|jobs| jobs.send(job).ok()).ok_or_else(|| self.ended())?;
        self.ask(Request::Frame(packed, self.return_frame.clone()))
    }

    /// Takes the frame that is being filled, with space for at least one page.
    fn take_frame_with_space(&mut self) -> Result<FrameBuilder> {
        if self.filling.as_ref().is_some_and(|frame| frame.free_pages() == 0) {
            self.flush()?;
        }
        match self.filling.take() {
            Some(frame) => Ok(frame),
            None => Ok(FrameBuilder::new(self.free_frames.recv().map_err(|_| self.ended())?)),
        }
    }

    /// Returns the record to store for a page of a block of the open checkpoint; `None` if the page is unchanged.
    fn record_if_changed(&mut self, block: BlockId, page: PageNo, content: &Page) -> Option<Record> {
        let digest = self.digester.digest(content);
        let OpenBlock { started, sent } = self.blocks.get_mut(block.0)?;
        // A page that was sent already may have had other content at that time.
        if started.digests.get(page.0) == digest && !sent.contains(page) {
            self.unchanged += 1;
            return None;
        }
        sent.insert(page);
        let len = if digest == 0 { 0 } else { PAGE_SIZE as u16 };
        Some(Record { digest, page: page.0 as u32, len, block: started.number })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // The threads end after the last request, when all senders are dropped.
        self.requests = None;
        self.pack_jobs = None;
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("{}: a thread of the writer panicked", self.store);
            }
        }
    }
}

/// An open checkpoint. Dropping it aborts the checkpoint, and the store keeps no trace of it.
#[derive(Debug)]
pub struct Checkpoint<'a> {
    writer: &'a mut Writer,
    open: bool,
}

impl Checkpoint<'_> {
    /// Returns the number that the checkpoint gets when it is committed.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.writer.next
    }

    /// Adds pages of a block, which is given by its position in the table of [`Writer::begin`]. If a page is added
    /// twice, the last content is stored. A page that has not changed since the previous checkpoint is not stored
    /// again. A page that was never added to any checkpoint is zero.
    ///
    /// Returns after the contents are copied. Errors of storing them are returned by [`Checkpoint::commit`].
    ///
    /// # Errors
    /// [`StoreError::NoSuchPage`] for a page that the block does not have; [`StoreError::Closed`].
    pub fn pages<'p>(&mut self, block: BlockId, pages: impl IntoIterator<Item = (PageNo, &'p Page)>) -> Result<()> {
        self.check_page_exists(block, None)?;
        for (page, content) in pages {
            self.check_page_exists(block, Some(page))?;
            let Some(record) = self.writer.record_if_changed(block, page, content) else { continue };
            let mut filling = self.writer.take_frame_with_space()?;
            filling.records.push(record);
            if record.len != 0 {
                filling.frame.bytes.extend_from_slice(content);
            }
            self.writer.filling = Some(filling);
        }
        Ok(())
    }

    /// Adds the pages in `runs`, like [`Checkpoint::pages`]. `read` is called with some of the runs and a buffer of
    /// their size, which it must fill. This saves a copy of each page.
    ///
    /// # Errors
    /// Errors of [`Checkpoint::pages`] and of `read`.
    pub fn read<E: From<StoreError>>(
        &mut self,
        block: BlockId,
        runs: &PageRuns,
        mut read: impl FnMut(&PageRuns, &mut [u8]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        self.check_page_exists(block, runs.last().map(|run| PageNo::containing(run.end - 1)))?;
        let mut runs = runs.iter().cloned();
        let mut unread = runs.next();
        while unread.is_some() {
            let mut filling = self.writer.take_frame_with_space()?;
            // The runs that fit into the frame.
            let mut fitting = PageRuns::new();
            let mut free_bytes = (filling.free_pages() * PAGE_SIZE) as u64;
            while free_bytes > 0
                && let Some(run) = unread.take()
            {
                let end = run.end.min(run.start.saturating_add(free_bytes));
                free_bytes -= end - run.start;
                fitting.push(run.start..end);
                unread = if end < run.end { Some(end..run.end) } else { runs.next() };
            }
            let filled_bytes = filling.frame.bytes.len();
            let result = read(&fitting, filling.frame.bytes.grow(fitting.bytes() as usize));
            if result.is_ok() {
                self.drop_unchanged(block, &fitting, filled_bytes, &mut filling);
            } else {
                filling.frame.bytes.truncate(filled_bytes);
            }
            self.writer.filling = Some(filling);
            result?;
        }
        Ok(())
    }

    /// Removes unchanged pages from the pages in `runs`, whose contents are in the frame from offset `begin` on.
    fn drop_unchanged(&mut self, block: BlockId, runs: &PageRuns, begin: usize, filling: &mut FrameBuilder) {
        let (mut read_at, mut write_at) = (begin, begin);
        let FrameBuilder { records, frame: Frame { bytes, .. } } = filling;
        for page in runs.numbers() {
            let content = bytes.get(read_at..).and_then(|unread| unread.first_chunk::<PAGE_SIZE>());
            let record = content.and_then(|content| self.writer.record_if_changed(block, page, content));
            if let Some(record) = record {
                records.push(record);
                if record.len != 0 {
                    if read_at != write_at {
                        bytes.copy_within(read_at..read_at + PAGE_SIZE, write_at);
                    }
                    write_at += PAGE_SIZE;
                }
            }
            read_at += PAGE_SIZE;
        }
        bytes.truncate(write_at);
    }

    /// Checks that `block` exists, and with `page`, that the block has this page.
    fn check_page_exists(&self, block: BlockId, page: Option<PageNo>) -> Result<()> {
        let open_block = self.writer.blocks.get(block.0);
        if open_block.is_some_and(|open| page.is_none_or(|page| page.0 < open.started.pages)) {
            return Ok(());
        }
        let (store, checkpoint) = (self.writer.store.clone(), self.writer.next);
        Err(StoreError::NoSuchPage {
            store,
            checkpoint,
            block: format!("number {block}"),
            page: page.unwrap_or_default().0,
        })
    }

    /// Commits the checkpoint. `definition` describes how to rebuild the VM; `metadata` has notes of the protector. The
    /// store does not interpret these two. `devices` is the device state.
    ///
    /// On success, the checkpoint is durable.
    /// On failure, the checkpoint is not committed, and the next one can begin. Exception: if an error occurs while the
    /// log entry is linked or made durable, it is unknown whether the checkpoint is committed, and every later call fails
    /// with [`StoreError::Closed`].
    ///
    /// # Errors
    /// [`StoreError::Superseded`] if there is a newer owner; [`StoreError::NoSpace`]; [`StoreError::TooLarge`];
    /// [`StoreError::Io`]; [`StoreError::Closed`].
    pub fn commit(mut self, definition: &Value, metadata: &Value, devices: &[u8]) -> Result<Committed> {
        self.writer.flush()?;
        let json = |value: &Value| {
            serde_json::to_vec(value).map_err(|e| StoreError::io(&self.writer.store, "", "writing JSON", e.into()))
        };
        let (definition, metadata) = (json(definition)?, json(metadata)?);
        let state = Box::new(CheckpointState { definition, metadata, devices: devices.to_vec() });
        let (reply, answer) = mpsc::channel();
        self.writer.ask(Request::Commit(state, self.writer.unchanged, reply))?;
        self.open = false;
        let committed = self.writer.answer(&answer)??;
        self.writer.next = committed.number + 1;
        self.writer.known = committed.known;
        Ok(committed)
    }
}

impl Drop for Checkpoint<'_> {
    fn drop(&mut self) {
        if self.open {
            if let Some(filling) = &mut self.writer.filling {
                filling.clear();
            }
            let _ = self.writer.ask(Request::Abort);
        }
    }
}
