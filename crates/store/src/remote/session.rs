//! A writer whose store is on a server: the requests that a local engine would serve, sent over a line.
//!
//! Pages go out without an answer; the commit tells what became of them. When the line breaks, the checkpoint in hand is
//! lost. The next one connects again, and claims the store on condition that the owner epoch is still ours.

use super::greet;
use super::identity::Identity;
use super::line::{Line, LineError};
use super::protocol::{BeginBlocks, BegunBlocks, KeepWhat, Kind, Purpose, Welcome};
use crate::engine::{Begun, Frame, Request, State};
use crate::error::{Result, StoreError};
use crate::format::codec::{Reader, Writer};
use crate::format::page::Digester;
use crate::format::segment::{FRAME_HEADER_LEN, RECORD_LEN, Record};
use crate::sparse::Digests;
use crate::types::{Block, Committed, Guest, OnlyIf, Owner};
use crate::url::Remote;
use crate::writer::{Opened, Options};
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// Digests asked for at a time.
const DIGESTS: u64 = 8000;

/// A block as this side knows it.
#[derive(Debug)]
struct Known {
    id: String,
    number: u16,
    pages: u64,
    digests: Arc<Digests>,
}

/// The client's end of writing to a server.
#[derive(Debug)]
pub(crate) struct WriteSession {
    server: Remote,
    store: String,
    identity: Option<Identity>,
    purpose: Purpose,
    line: Option<Line>,
    id: uuid::Uuid,
    epoch: u64,
    newest: u64,
    known: Vec<Known>,
    /// Number, page and digest of what was sent of the checkpoint in hand; `None` without one.
    sent: Option<Vec<(u16, u32, u64)>>,
    lost: Option<StoreError>,
    kept: KeepWhat,
}

impl WriteSession {
    /// Connect, and become the owner.
    pub fn open(server: &Remote, options: &Options) -> Result<Self> {
        let owner = Owner::here(&options.operation).with(options.guest);
        let Options { vm, only_if, keep, segment, create, .. } = options.clone();
        let purpose = Purpose::Write { vm, owner, only_if, keep, segment, create };
        let (line, welcome) = greet(server, options.identity.as_ref(), &purpose)?;
        let Welcome { id, epoch, newest, .. } = welcome;
        Ok(Self {
            server: server.clone(),
            store: server.to_string(),
            identity: options.identity.clone(),
            purpose,
            line: Some(line),
            id,
            epoch,
            newest,
            known: Vec::new(),
            sent: None,
            lost: None,
            kept: KeepWhat { keep: None, hold: None },
        })
    }

    /// What the writer needs to know.
    pub fn opened(&self) -> Opened {
        Opened { digester: Digester::new(self.id), newest: self.newest, epoch: self.epoch }
    }

    /// Serve requests until nobody can make any more.
    pub fn run(mut self, requests: &Receiver<Request>) {
        while let Ok(request) = requests.recv() {
            match request {
                Request::Begin(blocks, reply) => drop(reply.send(self.begin(&blocks))),
                Request::Frame(frame, back) => match frame.recv() {
                    Ok(frame) => {
                        self.pages(&frame);
                        let _ = back.send(frame);
                    }
                    Err(_) => {
                        let why = "a thread that compresses pages has ended".to_owned();
                        self.lost.get_or_insert(StoreError::Closed { store: self.store.clone(), why });
                    }
                },
                Request::Commit(state, unchanged, reply) => drop(reply.send(self.commit(&state, unchanged))),
                Request::Abort => self.abort(),
                Request::Keep(keep) => self.keep(KeepWhat { keep: Some(keep), ..self.kept.clone() }),
                Request::Hold(hold) => self.keep(KeepWhat { hold: Some(hold), ..self.kept.clone() }),
                Request::Compact(reply) => drop(reply.send(self.with_line(|line, store| {
                    let freed = line.ask(store, Kind::Compact, &[], Kind::Done)?;
                    Ok(Reader::new(&freed).u64().unwrap_or(0))
                }))),
                Request::Settle(reply) => drop(
                    reply.send(self.with_line(|line, store| line.ask(store, Kind::Settle, &[], Kind::Done)).map(drop)),
                ),
                Request::Epoch(reply) => drop(reply.send(self.epoch)),
            }
        }
    }

    /// The line, made anew if it is broken.
    fn connected(&mut self) -> Result<&mut Line> {
        if self.line.is_none() {
            if let Purpose::Write { owner, only_if, keep, create, .. } = &mut self.purpose {
                // Gone since, it is not to be replaced.
                *create = false;
                // What was said of the guest was said once.
                owner.guest = Guest::Same;
                *only_if = Some(OnlyIf::Epoch(self.epoch));
                *keep = self.kept.keep.unwrap_or(*keep);
            }
            let (mut line, welcome) = greet(&self.server, self.identity.as_ref(), &self.purpose)?;
            self.epoch = welcome.epoch;
            self.newest = welcome.newest;
            // A commit whose answer was lost may count; so nothing that we knew is sure.
            self.known.clear();
            if self.kept.hold.is_some() {
                line.ask_json::<()>(&self.store, Kind::Keep, &self.kept, Kind::Done)?;
            }
            self.line = Some(line);
        }
        match &mut self.line {
            Some(line) => Ok(line),
            None => Err(StoreError::Line { store: self.store.clone(), doing: "connecting", source: LineError::Closed }),
        }
    }

    /// Do something over the line. One that turns out to have broken while nothing was going on is made anew, once.
    fn with_line<T>(&mut self, mut work: impl FnMut(&mut Line, &str) -> Result<T>) -> Result<T> {
        let store = self.store.clone();
        let was_there = self.line.is_some();
        let done = work(self.connected()?, &store);
        match done {
            Err(StoreError::Line { .. }) => {
                self.line = None;
                if was_there { work(self.connected()?, &store).inspect_err(|_| self.line = None) } else { done }
            }
            other => other,
        }
    }

    fn begin(&mut self, blocks: &[Block]) -> Result<Vec<Begun>> {
        self.abort();
        let wanted = BeginBlocks { blocks: blocks.to_vec() };
        let begun: BegunBlocks =
            self.with_line(|line, store| line.ask_json(store, Kind::Begin, &wanted, Kind::Begun))?;
        let found: Result<Vec<_>> =
            blocks.iter().zip(&begun.numbers).map(|(block, number)| self.block(block, *number)).collect();
        let found = match found {
            Ok(found) if found.len() == blocks.len() => found,
            other => {
                self.line = None;
                let source = LineError::protocol("fewer block numbers than blocks");
                let few = StoreError::Line { store: self.store.clone(), doing: Kind::Begin.doing(), source };
                return Err(other.err().unwrap_or(few));
            }
        };
        self.sent = Some(Vec::new());
        self.lost = None;
        Ok(found)
    }

    /// What is known of a block. Digests that are not known here are asked for.
    fn block(&mut self, block: &Block, number: u16) -> Result<Begun> {
        let pages = block.pages();
        let known = self.known.iter_mut().find(|known| known.number == number && known.id == block.id);
        if let Some(known) = known {
            if known.pages < pages {
                known.digests = Arc::new(known.digests.resized(pages));
            }
            known.pages = pages;
            return Ok(Begun { number, pages, digests: known.digests.clone() });
        }
        let digests = Digests::new(pages);
        let store = self.store.clone();
        let mut first = 0;
        while first < pages {
            let count = (pages - first).min(DIGESTS);
            let mut wanted = Vec::new();
            wanted.put_u16(number);
            wanted.put_u64(first);
            wanted.put_u64(count);
            let answer = self.connected()?.ask(&store, Kind::Digests, &[&wanted], Kind::Bytes)?;
            let mut reader = Reader::new(&answer);
            for page in first..first + count {
                // A block that was never stored has no digests: all its pages are zero.
                digests.set(page, reader.u64().unwrap_or(0));
            }
            if answer.is_empty() {
                break;
            }
            first += count;
        }
        let digests = Arc::new(digests);
        self.known.push(Known { id: block.id.clone(), number, pages, digests: digests.clone() });
        Ok(Begun { number, pages, digests })
    }

    fn pages(&mut self, frame: &Frame) {
        let (Some(sent), None) = (&mut self.sent, &self.lost) else { return };
        let body = frame.bytes.get(frame.start + FRAME_HEADER_LEN..).unwrap_or_default();
        let records = body.get(..frame.count * RECORD_LEN).unwrap_or_default().as_chunks::<RECORD_LEN>().0;
        sent.extend(records.iter().map(|bytes| {
            let record = Record::decode(*bytes);
            (record.block, record.page, record.digest)
        }));
        let count = (frame.count as u32).to_le_bytes();
        let done = match &mut self.line {
            Some(line) => line.send(Kind::Pages, &[&count, body]),
            None => Err(LineError::Closed),
        };
        if let Err(source) = done {
            // What the server still had to say is what went wrong.
            let doing = Kind::Pages.doing();
            let said = match &mut self.line {
                Some(line) => line.answer(&self.store, doing, Kind::Done).err(),
                None => None,
            };
            let own = StoreError::Line { store: self.store.clone(), doing, source };
            self.lost = Some(said.filter(|e| !matches!(e, StoreError::Line { .. })).unwrap_or(own));
            self.line = None;
        }
    }

    fn commit(&mut self, state: &State, unchanged: u64) -> Result<Committed> {
        let Some(sent) = self.sent.take() else {
            let why = "no checkpoint was begun".to_owned();
            return Err(StoreError::Closed { store: self.store.clone(), why });
        };
        if let Some(lost) = self.lost.take() {
            self.abort_line();
            return Err(lost);
        }
        let mut front = Vec::new();
        front.put_u64(unchanged);
        front.put_u32(state.definition.len() as u32);
        front.put_u32(state.metadata.len() as u32);
        let parts = [front.as_slice(), &state.definition, &state.metadata, &state.devices];
        let store = self.store.clone();
        let Some(line) = &mut self.line else {
            let (doing, source) = (Kind::Commit.doing(), LineError::Closed);
            return Err(StoreError::Line { store, doing, source });
        };
        let answer = line.ask(&store, Kind::Commit, &parts, Kind::Committed);
        let answer = answer.inspect_err(|e| {
            if matches!(e, StoreError::Line { .. }) {
                self.line = None;
            }
        })?;
        let committed: Committed = serde_json::from_slice(&answer).map_err(|e| {
            let source = LineError::protocol(format!("an answer to a commit that cannot be read: {e}"));
            StoreError::Line { store, doing: Kind::Commit.doing(), source }
        })?;
        for (number, page, digest) in sent {
            if let Some(known) = self.known.iter().find(|known| known.number == number) {
                known.digests.set(page.into(), digest);
            }
        }
        self.newest = committed.number;
        Ok(committed)
    }

    fn abort(&mut self) {
        if self.sent.take().is_some() {
            self.abort_line();
        }
        self.lost = None;
    }

    fn abort_line(&mut self) {
        if let Some(line) = &mut self.line
            && line.ask(&self.store, Kind::Abort, &[], Kind::Done).is_err()
        {
            self.line = None;
        }
    }

    fn keep(&mut self, kept: KeepWhat) {
        self.kept = kept;
        if let Some(line) = &mut self.line
            && line.ask_json::<()>(&self.store, Kind::Keep, &self.kept, Kind::Done).is_err()
        {
            // It is said again once there is a line.
            self.line = None;
        }
    }
}
