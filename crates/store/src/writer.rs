//! Writes checkpoints.
//!
//! ```text
//! caller               packers (threads)      the store's own thread
//! digest, drop what    compress in place      append, commit, compact
//! is unchanged ------> -------------------->  (or send to a server)
//! ```
//!
//! From the guest's memory to the disk, a page stays in one buffer: that of its frame, with space for the frame's
//! directory before the first page. The caller digests each page, which takes about 200 ns and avoids storing
//! unchanged pages. All other work is done by other threads. Frames keep their order, whichever packer is done first.

use crate::disk::{Disk, LocalDisk};
use crate::engine::{self, Engine, Frame, Request, Settings, StartedBlock, State};
use crate::error::{Result, StoreError};
use crate::format::page::{Digester, Packer};
use crate::format::segment::{FRAME_HEADER_LEN, FRAME_RECORDS, RECORD_LEN, Record};
use crate::remote::{self, Identity};
use crate::types::{Block, Committed, Guest, OnlyIf, Owner, Vm};
use crate::url::StoreUrl;
use rekindle_kernel::large::HUGE;
use rekindle_pages::{BlockId, DirtySet, PAGE_SIZE, Page, PageNo, PageRuns};
use serde_json::Value;
use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Limit of pages in a frame: with header and directory it fits into a huge page.
const FRAME_PAGES: usize = 507;
/// Bytes before the first page of a frame that is being built: space for the longest directory.
const HEAD: usize = FRAME_HEADER_LEN + FRAME_RECORDS * RECORD_LEN;
const _: () = assert!(HEAD + FRAME_PAGES * PAGE_SIZE <= HUGE);

/// Options for writing a store.
#[derive(Debug, Clone)]
pub struct Options {
    /// The VM of the store. A store of another VM is rejected.
    pub vm: Vm,
    /// Number of checkpoints to keep, at least 1.
    pub keep: u32,
    /// The owner's operation, as shown to users: `protect web`.
    pub operation: String,
    /// What happens to the guest.
    pub guest: Guest,
    /// Become the owner only if this condition holds. The store must exist.
    pub only_if: Option<OnlyIf>,
    /// Threads that compress; 0: depends on this machine.
    pub packers: usize,
    /// Certificates for a server.
    pub identity: Option<Identity>,
    /// Bytes of a segment; 0: depends on the guest's size.
    pub segment: u64,
    /// Create a missing store. Never with `only_if`.
    pub create: bool,
}

impl Options {
    /// Default options for `vm`: keep 10 checkpoints, in an existing store.
    #[must_use]
    pub fn new(vm: Vm, operation: &str) -> Self {
        let operation = operation.to_owned();
        let (guest, only_if) = (Guest::Same, None);
        Self { vm, keep: 10, operation, guest, only_if, packers: 0, identity: None, segment: 0, create: false }
    }
}

/// A frame that is being built: its pages follow [`HEAD`], one after another.
#[derive(Debug)]
struct FrameBuilder {
    /// `len` is 0 for pages of zeroes, which have no content in the frame.
    records: Vec<Record>,
    frame: Frame,
}

impl FrameBuilder {
    fn new(mut frame: Frame) -> Self {
        frame.bytes.clear();
        frame.bytes.grow(HEAD);
        Self { records: Vec::with_capacity(FRAME_RECORDS), frame }
    }

    /// Number of pages that still fit.
    fn room(&self) -> usize {
        let pages = self.frame.bytes.len().saturating_sub(HEAD) / PAGE_SIZE;
        FRAME_PAGES.saturating_sub(pages).min(FRAME_RECORDS.saturating_sub(self.records.len()))
    }
}

/// Job of a packer: pack the frame and send it.
type Job = (FrameBuilder, Sender<Frame>);

/// State of a store that was opened for writing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Opened {
    pub digester: Digester,
    /// Number of the newest checkpoint; 0 if there is none.
    pub newest: u64,
    pub epoch: u64,
}

/// The owner of a store, writing checkpoints into it.
///
/// Dropping it ends its threads; what was committed stays.
#[derive(Debug)]
pub struct Writer {
    store: String,
    digester: Digester,
    next: u64,
    epoch: u64,
    requests: Option<Sender<Request>>,
    jobs: Option<Sender<Job>>,
    /// Channel of free buffers; the sender returns a buffer to it.
    frames: (Sender<Frame>, Receiver<Frame>),
    threads: Vec<JoinHandle<()>>,
    raw: Option<FrameBuilder>,
    /// With the pages that were sent for the open checkpoint.
    blocks: Vec<(StartedBlock, DirtySet)>,
    unchanged: u64,
}

impl Writer {
    /// Opens a store and becomes its owner: no earlier owner can commit any more.
    ///
    /// # Errors
    /// [`StoreError::NotAStore`] without [`Options::create`]; [`StoreError::OtherVm`], [`StoreError::NotEmpty`],
    /// damage; [`StoreError::Superseded`] with
    /// [`Options::only_if`]; [`StoreError::Connection`] and [`StoreError::Refused`] for one on a server. The earlier
    /// owner then still is the owner.
    pub fn open(url: &StoreUrl, options: &Options) -> Result<Self> {
        match url {
            StoreUrl::Directory(path) => Self::on_disk(Arc::new(LocalDisk::new(path)), options),
            StoreUrl::Remote(server) => {
                let session = remote::WriteSession::open(server, options)?;
                let opened = session.opened();
                Self::start(url.to_string(), opened, options, move |requests| session.run(requests))
            }
        }
    }

    /// As [`Writer::open`], for a store in `disk`.
    ///
    /// # Errors
    /// As [`Writer::open`].
    pub fn on_disk(disk: Arc<dyn Disk>, options: &Options) -> Result<Self> {
        let settings = Settings { keep: options.keep.max(1), segment: options.segment, create: options.create };
        let owner = Owner::here(&options.operation).with(options.guest);
        let engine = Engine::open(disk, &options.vm, &owner, options.only_if, settings)?;
        let opened = Opened { digester: engine.digester(), newest: engine.newest(), epoch: engine.owner().epoch };
        Self::start(engine.name().to_owned(), opened, options, move |requests| engine::run(engine, requests))
    }

    fn start(
        store: String,
        opened: Opened,
        options: &Options,
        serve: impl FnOnce(&Receiver<Request>) + Send + 'static,
    ) -> Result<Self> {
        let failed = |e: io::Error| StoreError::io(&store, "", "starting a thread", e);
        let packers = match options.packers {
            // More than two would take processor time that the guest needs.
            0 => thread::available_parallelism().map_or(1, |cores| cores.get().min(2)),
            set => set.min(16),
        };
        let (requests, asked) = mpsc::channel();
        let (jobs, todo) = mpsc::channel::<Job>();
        let frames = mpsc::channel();
        let mut threads =
            vec![thread::Builder::new().name("store".into()).spawn(move || serve(&asked)).map_err(failed)?];
        let todo = Arc::new(Mutex::new(todo));
        for _ in 0..packers {
            let todo = todo.clone();
            let packer = thread::Builder::new().name("store packer".into()).spawn(move || pack_all(&todo));
            threads.push(packer.map_err(failed)?);
        }
        // In addition to those being packed, one is filled, one is written, and one is spare.
        for _ in 0..packers + 3 {
            let _ = frames.0.send(Frame::default());
        }
        let (requests, jobs) = (Some(requests), Some(jobs));
        let Opened { digester, newest, epoch } = opened;
        Ok(Self {
            store,
            digester,
            next: newest + 1,
            epoch,
            requests,
            jobs,
            frames,
            threads,
            raw: None,
            blocks: Vec::new(),
            unchanged: 0,
        })
    }

    /// Returns the owner epoch. For a store on a server it grows with each new connection.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        let (reply, answer) = mpsc::channel();
        self.ask(Request::Epoch(reply)).and_then(|()| self.answer(&answer)).unwrap_or(self.epoch)
    }

    /// Number of the next checkpoint.
    #[must_use]
    pub fn next_number(&self) -> u64 {
        self.next
    }

    /// Sets how many checkpoints are kept from the next commit on.
    pub fn keep(&mut self, keep: u32) {
        let _ = self.ask(Request::Keep(keep));
    }

    /// Keeps checkpoint `number` and all later ones regardless of their age, because it is being read. `None`
    /// releases it. Until then the store may exceed its size limit.
    pub fn hold(&mut self, number: Option<u64>) {
        let _ = self.ask(Request::Hold(number));
    }

    /// Begins a checkpoint of a VM that has these RAM blocks.
    ///
    /// # Errors
    /// [`StoreError::Superseded`]; [`StoreError::Blocks`]; for a store on a server also [`StoreError::Connection`],
    /// if it cannot be reached again.
    pub fn begin(&mut self, blocks: &[Block]) -> Result<Checkpoint<'_>> {
        let (reply, answer) = mpsc::channel();
        self.ask(Request::Begin(blocks.to_vec(), reply))?;
        let started = self.answer(&answer)??;
        // The sets are reused, to keep their memory.
        let mut sets = std::mem::take(&mut self.blocks).into_iter().map(|(_, set)| set);
        let with_set = |started| {
            let mut set = sets.next().unwrap_or_default();
            set.clear();
            (started, set)
        };
        let blocks: Vec<_> = started.into_iter().map(with_set).collect();
        self.blocks = blocks;
        self.unchanged = 0;
        Ok(Checkpoint { writer: self, open: true })
    }

    /// Frees all space that can be freed; returns the number of bytes.
    ///
    /// # Errors
    /// The system's; the store is then unchanged.
    pub fn compact(&mut self) -> Result<u64> {
        let (reply, answer) = mpsc::channel();
        self.ask(Request::Compact(reply))?;
        self.answer(&answer)?
    }

    /// Finishes background work and writes a base index, so that opening is fast.
    ///
    /// # Errors
    /// The system's; committed checkpoints stay.
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

    /// Sends the frame that is being built to a packer, and a receiver for the packed frame to the store's thread.
    fn flush(&mut self) -> Result<()> {
        // An empty frame stays for the next checkpoint.
        let Some(raw) = self.raw.take_if(|raw| !raw.records.is_empty()) else { return Ok(()) };
        let (packed, coming) = mpsc::channel();
        self.jobs.as_ref().and_then(|jobs| jobs.send((raw, packed)).ok()).ok_or_else(|| self.ended())?;
        self.ask(Request::Frame(coming, self.frames.0.clone()))
    }

    /// Takes a frame with space for at least one page.
    fn room(&mut self) -> Result<FrameBuilder> {
        if self.raw.as_ref().is_some_and(|raw| raw.room() == 0) {
            self.flush()?;
        }
        match self.raw.take() {
            Some(raw) => Ok(raw),
            None => Ok(FrameBuilder::new(self.frames.1.recv().map_err(|_| self.ended())?)),
        }
    }

    /// Returns the record to store for a page of a block of the open checkpoint; `None` if the page is unchanged.
    fn record(&mut self, block: BlockId, page: PageNo, content: &Page) -> Option<Record> {
        let digest = self.digester.digest(content);
        let (started, sent) = self.blocks.get_mut(block.0)?;
        // A page that was sent already may have had other content then.
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
        // Without senders, the threads end after the last request.
        self.requests = None;
        self.jobs = None;
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("{}: a thread of the writer panicked", self.store);
            }
        }
    }
}

/// An open checkpoint. If it is dropped, it is aborted and leaves no trace.
#[derive(Debug)]
pub struct Checkpoint<'a> {
    writer: &'a mut Writer,
    open: bool,
}

impl Checkpoint<'_> {
    /// The number that it gets when it is committed.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.writer.next
    }

    /// Adds pages of a block, given by its position in the table of [`Writer::begin`]. If a page is added twice, the
    /// last content is stored. Pages that have not changed since the previous checkpoint are dropped. A page that was
    /// never added to any checkpoint is zero.
    ///
    /// Returns when the contents are copied. The commit returns errors of storing them.
    ///
    /// # Errors
    /// [`StoreError::NoSuchPage`] for a page that the block does not have; [`StoreError::Closed`].
    pub fn pages<'p>(&mut self, block: BlockId, pages: impl IntoIterator<Item = (PageNo, &'p Page)>) -> Result<()> {
        self.check(block, None)?;
        for (page, content) in pages {
            self.check(block, Some(page))?;
            let Some(record) = self.writer.record(block, page, content) else { continue };
            let mut raw = self.writer.room()?;
            raw.records.push(record);
            if record.len != 0 {
                raw.frame.bytes.extend_from_slice(content);
            }
            self.writer.raw = Some(raw);
        }
        Ok(())
    }

    /// As [`Checkpoint::pages`], for the pages in `runs` (offsets). `read` is called with some of the runs and a
    /// buffer of their size, which it must fill. This saves a copy of each page.
    ///
    /// # Errors
    /// As [`Checkpoint::pages`], and those of `read`.
    pub fn read<E: From<StoreError>>(
        &mut self,
        block: BlockId,
        runs: &PageRuns,
        mut read: impl FnMut(&PageRuns, &mut [u8]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        self.check(block, runs.last().map(|run| PageNo::containing(run.end - 1)))?;
        let mut runs = runs.iter().cloned();
        let mut rest = runs.next();
        while rest.is_some() {
            let mut raw = self.writer.room()?;
            let kept = raw.frame.bytes.len();
            let mut left = (raw.room() * PAGE_SIZE) as u64;
            let mut part = PageRuns::new();
            while left > 0
                && let Some(run) = rest.take()
            {
                let end = run.end.min(run.start.saturating_add(left));
                left -= end - run.start;
                part.push(run.start..end);
                rest = if end < run.end { Some(end..run.end) } else { runs.next() };
            }
            let done = read(&part, raw.frame.bytes.grow(part.bytes() as usize));
            if done.is_ok() {
                self.drop_unchanged(block, &part, kept, &mut raw);
            } else {
                raw.frame.bytes.truncate(kept);
            }
            self.writer.raw = Some(raw);
            done?;
        }
        Ok(())
    }

    /// Removes unchanged pages from the pages in `runs`, whose contents are in `raw` from `at` on.
    fn drop_unchanged(&mut self, block: BlockId, runs: &PageRuns, at: usize, raw: &mut FrameBuilder) {
        let (mut from, mut to) = (at, at);
        let FrameBuilder { records, frame: Frame { bytes, .. } } = raw;
        for page in runs.numbers() {
            let content = bytes.get(from..).and_then(|rest| rest.first_chunk::<PAGE_SIZE>());
            if let Some(record) = content.and_then(|content| self.writer.record(block, page, content)) {
                records.push(record);
                if record.len != 0 {
                    if from != to {
                        bytes.copy_within(from..from + PAGE_SIZE, to);
                    }
                    to += PAGE_SIZE;
                }
            }
            from += PAGE_SIZE;
        }
        bytes.truncate(to);
    }

    /// Checks that there is such a block, with page `page`.
    fn check(&self, block: BlockId, page: Option<PageNo>) -> Result<()> {
        let found = self.writer.blocks.get(block.0);
        if found.is_some_and(|(started, _)| page.is_none_or(|page| page.0 < started.pages)) {
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

    /// Commits the checkpoint. `definition` describes how to rebuild the VM, `metadata` has notes of the protector;
    /// the store does not interpret them. `devices` is the device state.
    ///
    /// On success: the checkpoint is durable.
    /// On failure: it is not committed, and the next one can begin.
    ///
    /// # Errors
    /// [`StoreError::Superseded`] if there is another owner now; [`StoreError::NoSpace`]; [`StoreError::TooLarge`]; the
    /// system's. After [`StoreError::Closed`], or if the connection to a server is lost during the commit, the
    /// checkpoint may be committed.
    pub fn commit(mut self, definition: &Value, metadata: &Value, devices: &[u8]) -> Result<Committed> {
        self.writer.flush()?;
        let json = |value: &Value| {
            serde_json::to_vec(value).map_err(|e| StoreError::io(&self.writer.store, "", "writing JSON", e.into()))
        };
        let (definition, metadata) = (json(definition)?, json(metadata)?);
        let state = Box::new(State { definition, metadata, devices: devices.to_vec() });
        let (reply, answer) = mpsc::channel();
        self.writer.ask(Request::Commit(state, self.writer.unchanged, reply))?;
        self.open = false;
        let committed = self.writer.answer(&answer)??;
        self.writer.next = committed.number + 1;
        Ok(committed)
    }
}

impl Drop for Checkpoint<'_> {
    fn drop(&mut self) {
        if self.open {
            if let Some(raw) = &mut self.writer.raw {
                raw.records.clear();
                raw.frame.bytes.truncate(HEAD);
            }
            let _ = self.writer.ask(Request::Abort);
        }
    }
}

/// Packs frames until there are no more jobs.
fn pack_all(todo: &Mutex<Receiver<Job>>) {
    let mut packer = Packer::default();
    loop {
        let job = todo.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((raw, packed)) = job else { return };
        let _ = packed.send(pack(&mut packer, raw));
    }
}

/// Compresses the pages in place, and writes the directory in front of them.
fn pack(packer: &mut Packer, raw: FrameBuilder) -> Frame {
    let FrameBuilder { mut records, mut frame } = raw;
    frame.count = records.len();
    frame.start = HEAD - FRAME_HEADER_LEN - RECORD_LEN * frame.count.min(FRAME_RECORDS);
    let bytes = &mut frame.bytes;
    let (mut from, mut to) = (HEAD, HEAD);
    for record in records.iter_mut().filter(|record| record.len != 0) {
        let Some(page) = bytes.get(from..).and_then(|rest| rest.first_chunk::<PAGE_SIZE>()) else { break };
        // Never longer than the page, so that it ends before the next page.
        match packer.pack(page) {
            Some(stored) => {
                record.len = stored.len() as u16;
                if let Some(place) = bytes.get_mut(to..to + stored.len()) {
                    place.copy_from_slice(stored);
                }
            }
            None if from != to => bytes.copy_within(from..from + PAGE_SIZE, to),
            None => {}
        }
        from += PAGE_SIZE;
        to += usize::from(record.len);
    }
    bytes.truncate(to);
    let head = bytes.get_mut(frame.start..HEAD).unwrap_or_default();
    let (header, directory) = head.split_at_mut_checked(FRAME_HEADER_LEN).unwrap_or_default();
    header.fill(0);
    for (place, record) in directory.as_chunks_mut::<RECORD_LEN>().0.iter_mut().zip(&records) {
        *place = record.encode();
    }
    frame
}
