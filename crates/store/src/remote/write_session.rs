//! Writes to a store on a server: sends the requests that a local engine would serve over a connection.
//!
//! Pages are sent without waiting for an answer; the commit returns any error. If the connection fails, the open
//! checkpoint is lost. For the next checkpoint, the session connects again and claims the store on the condition that
//! the owner epoch has not changed.

use super::connection::Connection;
use super::greet;
use super::protocol::{BlockNumbers, BlockTable, DigestRange, Kind, Purpose, Retention, Welcome};
use crate::credentials::Identity;
use crate::engine::{CheckpointState, EngineSettings, Frame, OpenedStore, Request, StartedBlock};
use crate::error::{ConnectionError, Result, StoreError};
use crate::format::codec::{Reader, Writer};
use crate::format::page::Digester;
use crate::format::segment::{FRAME_HEADER_LEN, RECORD_LEN, Record};
use crate::page_table::PageDigests;
use crate::types::{Block, Committed, Guest, OnlyIf, Owner, Vm};
use crate::url::Remote;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// Digests that one request asks for. A digest has 8 bytes, so the answer has 64 kB.
const DIGESTS_PER_REQUEST: u64 = 8000;
/// Requests for digests that are sent before the first answer, so that the latency counts once for all of them: 2 GiB of
/// memory. The requests, without their answers, fit into the buffer of a connection.
const DIGEST_REQUESTS_IN_FLIGHT: usize = 64;

/// A block whose digests the client has.
#[derive(Debug)]
struct KnownBlock {
    id: String,
    number: u16,
    pages: u64,
    digests: Arc<PageDigests>,
}

/// The open checkpoint.
#[derive(Debug, Default)]
struct OpenCheckpoint {
    /// Records of the pages that were sent.
    sent: Vec<Record>,
    /// Error because of which the checkpoint cannot be committed.
    failure: Option<StoreError>,
}

/// Returns the number of digests in the request from page `first` on, of a block with this number of pages.
fn digests_from(first: u64, pages: u64) -> u64 {
    (pages - first).min(DIGESTS_PER_REQUEST)
}

/// A client that writes to a store on a server.
#[derive(Debug)]
pub(crate) struct WriteSession {
    server: Remote,
    /// Address of the store for messages.
    store: String,
    identity: Option<Identity>,
    purpose: Purpose,
    /// `None` after it failed.
    connection: Option<Connection>,
    /// ID of the store.
    id: uuid::Uuid,
    epoch: u64,
    newest: u64,
    known_blocks: Vec<KnownBlock>,
    checkpoint: Option<OpenCheckpoint>,
    retention: Retention,
}

impl WriteSession {
    /// Connects to the server and becomes the owner of the store.
    pub fn open(
        server: &Remote,
        identity: Option<&Identity>,
        vm: &Vm,
        owner: Owner,
        only_if: Option<OnlyIf>,
        settings: &EngineSettings,
    ) -> Result<Self> {
        let EngineSettings { keep, segment, create } = *settings;
        let purpose = Purpose::Write { vm: vm.clone(), owner, only_if, keep, segment, create };
        let (connection, welcome) = greet(server, identity, &purpose)?;
        let Welcome { id, epoch, newest, .. } = welcome;
        Ok(Self {
            server: server.clone(),
            store: server.to_string(),
            identity: identity.cloned(),
            purpose,
            connection: Some(connection),
            id,
            epoch,
            newest,
            known_blocks: Vec::new(),
            checkpoint: None,
            retention: Retention { keep: None, hold: None },
        })
    }

    /// Returns the state of the store when it was opened.
    pub fn opened(&self) -> OpenedStore {
        OpenedStore { digester: Digester::new(self.id), newest: self.newest, epoch: self.epoch, known: None }
    }

    /// Serves requests until all senders are dropped.
    pub fn run(mut self, requests: &Receiver<Request>) {
        while let Ok(request) = requests.recv() {
            // A failed send is ignored: the caller has stopped waiting.
            match request {
                Request::Begin(blocks, reply) => drop(reply.send(self.begin(&blocks))),
                Request::Frame(packed, return_frame) => match packed.recv() {
                    Ok(frame) => {
                        self.send_pages(&frame);
                        let _ = return_frame.send(frame);
                    }
                    Err(_) => self.fail("a thread that compresses pages has ended"),
                },
                Request::Commit(state, unchanged, reply) => drop(reply.send(self.commit(&state, unchanged))),
                Request::Abort => self.abort(),
                Request::Keep(keep) => self.set_retention(Retention { keep: Some(keep), ..self.retention.clone() }),
                Request::Hold(hold) => self.set_retention(Retention { hold: Some(hold), ..self.retention.clone() }),
                Request::Compact(reply) => drop(reply.send(self.compact())),
                Request::Settle(reply) => drop(reply.send(self.settle())),
                Request::Epoch(reply) => drop(reply.send(self.epoch)),
            }
        }
    }

    /// Returns the connection. Connects again if the previous connection failed.
    fn connected(&mut self) -> Result<&mut Connection> {
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.reconnect()?,
        };
        Ok(self.connection.insert(connection))
    }

    fn reconnect(&mut self) -> Result<Connection> {
        if let Purpose::Write { owner, only_if, keep, create, .. } = &mut self.purpose {
            // A store that has disappeared must not be created again.
            *create = false;
            // The first claim has recorded the change of the guest already.
            owner.guest = Guest::Same;
            *only_if = Some(OnlyIf::Epoch(self.epoch));
            *keep = self.retention.keep.unwrap_or(*keep);
        }
        let (mut connection, welcome) = greet(&self.server, self.identity.as_ref(), &self.purpose)?;
        self.epoch = welcome.epoch;
        self.newest = welcome.newest;
        // A commit whose answer was lost may be valid. The known digests may therefore be outdated.
        self.known_blocks.clear();
        if self.retention.hold.is_some() {
            connection.ask_json::<()>(&self.store, Kind::Keep, &self.retention, Kind::Done)?;
        }
        Ok(connection)
    }

    /// Calls `work` with the connection. If an existing connection turns out to be broken, calls it again with a new
    /// one.
    fn with_connection<T>(&mut self, mut work: impl FnMut(&mut Connection, &str) -> Result<T>) -> Result<T> {
        let store = self.store.clone();
        let was_connected = self.connection.is_some();
        let result = work(self.connected()?, &store);
        if !matches!(result, Err(StoreError::Connection { .. })) {
            return result;
        }
        self.connection = None;
        if !was_connected {
            return result;
        }
        work(self.connected()?, &store).inspect_err(|_| self.connection = None)
    }

    fn connection_failed(&self, kind: Kind, source: ConnectionError) -> StoreError {
        StoreError::Connection { store: self.store.clone(), doing: kind.doing(), source }
    }

    fn begin(&mut self, blocks: &[Block]) -> Result<Vec<StartedBlock>> {
        self.abort();
        let table = BlockTable { blocks: blocks.to_vec() };
        let BlockNumbers { numbers } = self
            .with_connection(|connection, store| connection.ask_json(store, Kind::Begin, &table, Kind::BlockNumbers))?;
        let started = self.start_blocks(blocks, &numbers).inspect_err(|_| self.connection = None)?;
        self.checkpoint = Some(OpenCheckpoint::default());
        Ok(started)
    }

    fn start_blocks(&mut self, blocks: &[Block], numbers: &[u16]) -> Result<Vec<StartedBlock>> {
        if numbers.len() < blocks.len() {
            let source = ConnectionError::protocol("fewer block numbers than blocks");
            return Err(self.connection_failed(Kind::Begin, source));
        }
        blocks.iter().zip(numbers).map(|(block, number)| self.start_block(block, *number)).collect()
    }

    /// Returns a block and its digests. Requests missing digests from the server.
    fn start_block(&mut self, block: &Block, number: u16) -> Result<StartedBlock> {
        let pages = block.pages();
        let known = self.known_blocks.iter_mut().find(|known| known.number == number && known.id == block.id);
        if let Some(known) = known {
            if known.pages < pages {
                known.digests = Arc::new(known.digests.resized(pages));
            }
            known.pages = pages;
            return Ok(StartedBlock { number, pages, digests: known.digests.clone() });
        }
        let digests = Arc::new(self.request_digests(number, pages)?);
        self.known_blocks.push(KnownBlock { id: block.id.clone(), number, pages, digests: digests.clone() });
        Ok(StartedBlock { number, pages, digests })
    }

    fn request_digests(&mut self, number: u16, pages: u64) -> Result<PageDigests> {
        let digests = PageDigests::new(pages);
        let store = self.store.clone();
        let connection = self.connected()?;
        let failed = |source| StoreError::Connection { store: store.clone(), doing: Kind::Digests.doing(), source };
        let firsts: Vec<u64> = (0..pages).step_by(DIGESTS_PER_REQUEST as usize).collect();
        for together in firsts.chunks(DIGEST_REQUESTS_IN_FLIGHT) {
            for first in together {
                let range = DigestRange { block: number, first: *first, count: digests_from(*first, pages) }.encode();
                connection.send(Kind::Digests, &[&range]).map_err(failed)?;
            }
            let mut is_stored = true;
            for first in together {
                let answer = connection.answer(&store, Kind::Digests.doing(), Kind::Bytes)?;
                // A block that was never stored has no digests on the server: all its pages are zero.
                is_stored &= !answer.is_empty();
                let mut reader = Reader::new(&answer);
                for page in *first..*first + digests_from(*first, pages) {
                    digests.set(page, reader.u64().unwrap_or(0));
                }
            }
            if !is_stored {
                break;
            }
        }
        Ok(digests)
    }

    /// Sends a frame of pages, unless the checkpoint has failed already.
    fn send_pages(&mut self, frame: &Frame) {
        let Some(checkpoint) = self.checkpoint.as_mut().filter(|checkpoint| checkpoint.failure.is_none()) else {
            return;
        };
        let body = frame.bytes.get(frame.start + FRAME_HEADER_LEN..).unwrap_or_default();
        let directory = body.get(..frame.count * RECORD_LEN).unwrap_or_default().as_chunks::<RECORD_LEN>().0;
        checkpoint.sent.extend(directory.iter().map(|bytes| Record::decode(*bytes)));
        let count = (frame.count as u32).to_le_bytes();
        let sent = match &mut self.connection {
            Some(connection) => connection.send(Kind::Pages, &[&count, body]),
            None => Err(ConnectionError::Closed),
        };
        if let Err(source) = sent {
            let failure =
                self.cause_reported_by_server().unwrap_or_else(|| self.connection_failed(Kind::Pages, source));
            if let Some(checkpoint) = &mut self.checkpoint {
                checkpoint.failure = Some(failure);
            }
            self.connection = None;
        }
    }

    /// Returns the error that the server has sent before it closed the connection, if any.
    fn cause_reported_by_server(&mut self) -> Option<StoreError> {
        let answer = self.connection.as_mut()?.answer(&self.store, Kind::Pages.doing(), Kind::Done);
        answer.err().filter(|e| !matches!(e, StoreError::Connection { .. }))
    }

    /// Makes the commit of the open checkpoint fail with the message `why`.
    fn fail(&mut self, why: &str) {
        if let Some(checkpoint) = &mut self.checkpoint {
            let error = StoreError::Closed { store: self.store.clone(), why: why.into() };
            checkpoint.failure.get_or_insert(error);
        }
    }

    fn commit(&mut self, state: &CheckpointState, unchanged: u64) -> Result<Committed> {
        let Some(checkpoint) = self.checkpoint.take() else {
            let why = "no checkpoint was started".to_owned();
            return Err(StoreError::Closed { store: self.store.clone(), why });
        };
        if let Some(failure) = checkpoint.failure {
            self.abort_on_server();
            return Err(failure);
        }
        let answer = self.send_commit(state, unchanged).inspect_err(|e| {
            if matches!(e, StoreError::Connection { .. }) {
                self.connection = None;
            }
        })?;
        let committed: Committed = serde_json::from_slice(&answer).map_err(|e| {
            let source = ConnectionError::protocol(format!("an answer to a commit that cannot be read: {e}"));
            self.connection_failed(Kind::Commit, source)
        })?;
        for Record { block, page, digest, .. } in checkpoint.sent {
            if let Some(known) = self.known_blocks.iter().find(|known| known.number == block) {
                known.digests.set(page.into(), digest);
            }
        }
        self.newest = committed.number;
        Ok(committed)
    }

    fn send_commit(&mut self, state: &CheckpointState, unchanged: u64) -> Result<Vec<u8>> {
        let mut front = Vec::new();
        front.put_u64(unchanged);
        front.put_u32(state.definition.len() as u32);
        front.put_u32(state.metadata.len() as u32);
        let parts = [front.as_slice(), &state.definition, &state.metadata, &state.devices];
        match &mut self.connection {
            Some(connection) => connection.ask(&self.store, Kind::Commit, &parts, Kind::Committed),
            None => Err(self.connection_failed(Kind::Commit, ConnectionError::Closed)),
        }
    }

    fn abort(&mut self) {
        if self.checkpoint.take().is_some() {
            self.abort_on_server();
        }
    }

    fn abort_on_server(&mut self) {
        if let Some(connection) = &mut self.connection
            && connection.ask(&self.store, Kind::Abort, &[], Kind::Done).is_err()
        {
            self.connection = None;
        }
    }

    fn set_retention(&mut self, retention: Retention) {
        self.retention = retention;
        if let Some(connection) = &mut self.connection
            && connection.ask_json::<()>(&self.store, Kind::Keep, &self.retention, Kind::Done).is_err()
        {
            // The setting is sent again over the next connection.
            self.connection = None;
        }
    }

    fn compact(&mut self) -> Result<u64> {
        self.with_connection(|connection, store| {
            let freed_bytes = connection.ask(store, Kind::Compact, &[], Kind::Done)?;
            Ok(Reader::new(&freed_bytes).u64().unwrap_or(0))
        })
    }

    fn settle(&mut self) -> Result<()> {
        self.with_connection(|connection, store| connection.ask(store, Kind::Settle, &[], Kind::Done).map(drop))
    }
}
