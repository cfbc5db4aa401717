//! Writes to a store on a server: sends the requests that a local engine would serve over a connection.
//!
//! Pages are sent without waiting for an answer; the commit returns any error. If the connection fails, the open
//! checkpoint is lost. For the next checkpoint, the session connects again and claims the store on the condition that
//! the owner epoch has not changed.

use super::connection::{Connection, ConnectionError};
use super::greet;
use super::identity::Identity;
use super::protocol::{BlockNumbers, BlockTable, Kind, Purpose, Retention, Welcome};
use crate::engine::{Frame, Request, StartedBlock, State};
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

/// Number of digests in a request.
const DIGESTS: u64 = 8000;

/// A block whose digests the client has.
#[derive(Debug)]
struct KnownBlock {
    id: String,
    number: u16,
    pages: u64,
    digests: Arc<Digests>,
}

/// A client that writes to a store on a server.
#[derive(Debug)]
pub(crate) struct WriteSession {
    server: Remote,
    store: String,
    identity: Option<Identity>,
    purpose: Purpose,
    connection: Option<Connection>,
    id: uuid::Uuid,
    epoch: u64,
    newest: u64,
    known: Vec<KnownBlock>,
    /// Block number, page number and digest of each page that was sent for the open checkpoint; `None` if none is open.
    sent: Option<Vec<(u16, u32, u64)>>,
    lost: Option<StoreError>,
    kept: Retention,
}

impl WriteSession {
    /// Connects to the server and becomes the owner of the store.
    pub fn open(server: &Remote, options: &Options) -> Result<Self> {
        let owner = Owner::here(&options.operation).with(options.guest);
        let Options { vm, only_if, keep, segment, create, .. } = options.clone();
        let purpose = Purpose::Write { vm, owner, only_if, keep, segment, create };
        let (connection, welcome) = greet(server, options.identity.as_ref(), &purpose)?;
        let Welcome { id, epoch, newest, .. } = welcome;
        Ok(Self {
            server: server.clone(),
            store: server.to_string(),
            identity: options.identity.clone(),
            purpose,
            connection: Some(connection),
            id,
            epoch,
            newest,
            known: Vec::new(),
            sent: None,
            lost: None,
            kept: Retention { keep: None, hold: None },
        })
    }

    /// Returns the state of the store when it was opened.
    pub fn opened(&self) -> Opened {
        Opened { digester: Digester::new(self.id), newest: self.newest, epoch: self.epoch }
    }

    /// Serves requests until all senders are dropped.
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
                Request::Keep(keep) => self.keep(Retention { keep: Some(keep), ..self.kept.clone() }),
                Request::Hold(hold) => self.keep(Retention { hold: Some(hold), ..self.kept.clone() }),
                Request::Compact(reply) => drop(reply.send(self.with_connection(|connection, store| {
                    let freed = connection.ask(store, Kind::Compact, &[], Kind::Done)?;
                    Ok(Reader::new(&freed).u64().unwrap_or(0))
                }))),
                Request::Settle(reply) => drop(
                    reply.send(
                        self.with_connection(|connection, store| connection.ask(store, Kind::Settle, &[], Kind::Done))
                            .map(drop),
                    ),
                ),
                Request::Epoch(reply) => drop(reply.send(self.epoch)),
            }
        }
    }

    /// Returns the connection. Connects again if the previous connection failed.
    fn connected(&mut self) -> Result<&mut Connection> {
        if self.connection.is_none() {
            if let Purpose::Write { owner, only_if, keep, create, .. } = &mut self.purpose {
                // A store that has disappeared must not be created again.
                *create = false;
                // The first claim has recorded the change of the guest already.
                owner.guest = Guest::Same;
                *only_if = Some(OnlyIf::Epoch(self.epoch));
                *keep = self.kept.keep.unwrap_or(*keep);
            }
            let (mut connection, welcome) = greet(&self.server, self.identity.as_ref(), &self.purpose)?;
            self.epoch = welcome.epoch;
            self.newest = welcome.newest;
            // A commit whose answer was lost may be valid. The known digests may therefore be outdated.
            self.known.clear();
            if self.kept.hold.is_some() {
                connection.ask_json::<()>(&self.store, Kind::Keep, &self.kept, Kind::Done)?;
            }
            self.connection = Some(connection);
        }
        match &mut self.connection {
            Some(connection) => Ok(connection),
            None => Err(StoreError::Connection {
                store: self.store.clone(),
                doing: "connecting",
                source: ConnectionError::Closed,
            }),
        }
    }

    /// Calls `work` with the connection. If an existing connection turns out to be broken, calls it again with a new
    /// one.
    fn with_connection<T>(&mut self, mut work: impl FnMut(&mut Connection, &str) -> Result<T>) -> Result<T> {
        let store = self.store.clone();
        let was_there = self.connection.is_some();
        let done = work(self.connected()?, &store);
        match done {
            Err(StoreError::Connection { .. }) => {
                self.connection = None;
                if was_there { work(self.connected()?, &store).inspect_err(|_| self.connection = None) } else { done }
            }
            other => other,
        }
    }

    fn begin(&mut self, blocks: &[Block]) -> Result<Vec<StartedBlock>> {
        self.abort();
        let table = BlockTable { blocks: blocks.to_vec() };
        let started: BlockNumbers = self
            .with_connection(|connection, store| connection.ask_json(store, Kind::Begin, &table, Kind::BlockNumbers))?;
        let found: Result<Vec<_>> =
            blocks.iter().zip(&started.numbers).map(|(block, number)| self.block(block, *number)).collect();
        let found = match found {
            Ok(found) if found.len() == blocks.len() => found,
            other => {
                self.connection = None;
                let source = ConnectionError::protocol("fewer block numbers than blocks");
                let few = StoreError::Connection { store: self.store.clone(), doing: Kind::Begin.doing(), source };
                return Err(other.err().unwrap_or(few));
            }
        };
        self.sent = Some(Vec::new());
        self.lost = None;
        Ok(found)
    }

    /// Returns a block and its digests. Requests missing digests from the server.
    fn block(&mut self, block: &Block, number: u16) -> Result<StartedBlock> {
        let pages = block.pages();
        let known = self.known.iter_mut().find(|known| known.number == number && known.id == block.id);
        if let Some(known) = known {
            if known.pages < pages {
                known.digests = Arc::new(known.digests.resized(pages));
            }
            known.pages = pages;
            return Ok(StartedBlock { number, pages, digests: known.digests.clone() });
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
                // A block that was never stored has no digests on the server: all its pages are zero.
                digests.set(page, reader.u64().unwrap_or(0));
            }
            if answer.is_empty() {
                break;
            }
            first += count;
        }
        let digests = Arc::new(digests);
        self.known.push(KnownBlock { id: block.id.clone(), number, pages, digests: digests.clone() });
        Ok(StartedBlock { number, pages, digests })
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
        let done = match &mut self.connection {
            Some(connection) => connection.send(Kind::Pages, &[&count, body]),
            None => Err(ConnectionError::Closed),
        };
        if let Err(source) = done {
            // The server may have reported the cause before it closed the connection.
            let doing = Kind::Pages.doing();
            let reported = match &mut self.connection {
                Some(connection) => connection.answer(&self.store, doing, Kind::Done).err(),
                None => None,
            };
            let own = StoreError::Connection { store: self.store.clone(), doing, source };
            self.lost = Some(reported.filter(|e| !matches!(e, StoreError::Connection { .. })).unwrap_or(own));
            self.connection = None;
        }
    }

    fn commit(&mut self, state: &State, unchanged: u64) -> Result<Committed> {
        let Some(sent) = self.sent.take() else {
            let why = "no checkpoint was started".to_owned();
            return Err(StoreError::Closed { store: self.store.clone(), why });
        };
        if let Some(lost) = self.lost.take() {
            self.abort_remote();
            return Err(lost);
        }
        let mut front = Vec::new();
        front.put_u64(unchanged);
        front.put_u32(state.definition.len() as u32);
        front.put_u32(state.metadata.len() as u32);
        let parts = [front.as_slice(), &state.definition, &state.metadata, &state.devices];
        let store = self.store.clone();
        let Some(connection) = &mut self.connection else {
            let (doing, source) = (Kind::Commit.doing(), ConnectionError::Closed);
            return Err(StoreError::Connection { store, doing, source });
        };
        let answer = connection.ask(&store, Kind::Commit, &parts, Kind::Committed);
        let answer = answer.inspect_err(|e| {
            if matches!(e, StoreError::Connection { .. }) {
                self.connection = None;
            }
        })?;
        let committed: Committed = serde_json::from_slice(&answer).map_err(|e| {
            let source = ConnectionError::protocol(format!("an answer to a commit that cannot be read: {e}"));
            StoreError::Connection { store, doing: Kind::Commit.doing(), source }
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
            self.abort_remote();
        }
        self.lost = None;
    }

    fn abort_remote(&mut self) {
        if let Some(connection) = &mut self.connection
            && connection.ask(&self.store, Kind::Abort, &[], Kind::Done).is_err()
        {
            self.connection = None;
        }
    }

    fn keep(&mut self, kept: Retention) {
        self.kept = kept;
        if let Some(connection) = &mut self.connection
            && connection.ask_json::<()>(&self.store, Kind::Keep, &self.kept, Kind::Done).is_err()
        {
            // The setting is sent again over the next connection.
            self.connection = None;
        }
    }
}
