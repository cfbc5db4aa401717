//! Reads a checkpoint from a server, with read-ahead and several requests in flight. The client checks every page.

use super::connection::Connection;
use super::protocol::{
    CheckpointRequest, Kind, MAX_PAGES_PER_REQUEST, Purpose, SectionCode, decode_ids, decode_stored, encode_ids,
};
use super::{SpareConnections, greet, greet_over};
use crate::credentials::Identity;
use crate::error::{BadPage, ConnectionError, Result, StoreError};
use crate::format::codec::Writer;
use crate::format::entry::Section;
use crate::format::page::{Digester, StoredPage, unpack};
use crate::types::{CheckpointInfo, Vm};
use crate::url::Remote;
use rekindle_pages::{PAGE_SIZE, Page, PageId, PageNo};
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Number of pages in a read of a single page: the neighbours of a page are likely to be read next (HydraVM, figure 5).
const PAGES_PER_SINGLE_READ: u64 = 32;
/// Limit of cached pages that were read ahead.
const MAX_CACHED_PAGES: usize = 4096;
const MAX_REQUESTS_IN_FLIGHT: usize = 4;
/// Number of pages in a request, if many pages are read.
const PAGES_PER_READ: usize = 256;

/// A checkpoint on a server.
#[derive(Debug)]
pub(crate) struct RemoteImage {
    server: Remote,
    store: String,
    identity: Option<Identity>,
    purpose: Purpose,
    digester: Digester,
    vm: String,
    info: CheckpointInfo,
    state: Mutex<ImageState>,
}

/// The connection of an image, and the pages that were read ahead.
#[derive(Debug)]
struct ImageState {
    /// `None` after it failed.
    connection: Option<Connection>,
    read_ahead: ReadAheadCache,
}

/// Pages that were read ahead. Each is used once.
#[derive(Debug, Default)]
struct ReadAheadCache {
    pages: HashMap<PageId, StoredPage>,
    /// The order in which pages were added. It may contain pages that were taken since.
    added: VecDeque<PageId>,
}

impl ReadAheadCache {
    fn take(&mut self, id: PageId) -> Option<StoredPage> {
        self.pages.remove(&id)
    }

    /// Adds a page. Drops the oldest pages if there are too many.
    fn add(&mut self, id: PageId, page: StoredPage) {
        if self.pages.insert(id, page).is_none() {
            self.added.push_back(id);
        }
        while self.added.len() > MAX_CACHED_PAGES {
            if let Some(oldest) = self.added.pop_front() {
                self.pages.remove(&oldest);
            }
        }
    }
}

impl RemoteImage {
    /// Connects to the server and opens a checkpoint.
    pub fn open(
        server: &Remote,
        identity: Option<&Identity>,
        spare: &SpareConnections,
        request: CheckpointRequest,
    ) -> Result<(Self, Vm, CheckpointInfo)> {
        let lazy = request.lazy;
        let (connection, welcome) = greet_over(spare, server, identity, &Purpose::Read(request))?;
        let store = server.to_string();
        let info = welcome.info.ok_or_else(|| StoreError::Connection {
            store: store.clone(),
            doing: "opening",
            source: ConnectionError::protocol("no checkpoint was opened"),
        })?;
        let image = Self {
            server: server.clone(),
            store,
            identity: identity.cloned(),
            // A later connection must open the same checkpoint.
            purpose: Purpose::Read(CheckpointRequest { vm: Some(welcome.vm.uuid), at: Some(info.number), lazy }),
            digester: Digester::new(welcome.id),
            vm: welcome.vm.name.clone(),
            info: info.clone(),
            state: Mutex::new(ImageState { connection: Some(connection), read_ahead: ReadAheadCache::default() }),
        };
        Ok((image, welcome.vm, info))
    }

    pub fn name(&self) -> &str {
        &self.store
    }

    pub fn digester(&self) -> Digester {
        self.digester
    }

    fn lock(&self) -> MutexGuard<'_, ImageState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `work` with the connection. If an existing connection fails, calls it again with a new one.
    fn with_connection<T>(
        &self,
        state: &mut ImageState,
        mut work: impl FnMut(&mut Connection) -> Result<T>,
    ) -> Result<T> {
        let mut is_new_connection = false;
        loop {
            if state.connection.is_none() {
                let (connection, _) = greet(&self.server, self.identity.as_ref(), &self.purpose)?;
                state.connection = Some(connection);
                is_new_connection = true;
            }
            let Some(connection) = &mut state.connection else { continue };
            match work(connection) {
                Err(StoreError::Connection { .. }) if !is_new_connection => state.connection = None,
                Err(e) => {
                    if matches!(e, StoreError::Connection { .. }) {
                        state.connection = None;
                    }
                    return Err(e);
                }
                result => return result,
            }
        }
    }

    /// Reads a section of the checkpoint's log entry.
    pub fn section(&self, section: Section) -> Result<Vec<u8>> {
        let Some(code) = SectionCode::encode(section) else {
            let text = format!("{} is not read from a server", section.structure());
            return Err(StoreError::Refused { store: self.store.clone(), kind: "protocol".into(), text });
        };
        self.with_connection(&mut self.lock(), |connection| {
            connection.ask(&self.store, Kind::Section, &[&[code]], Kind::Bytes)
        })
    }

    fn protocol_error(&self, what: &str) -> StoreError {
        self.connection_failed(ConnectionError::protocol(what))
    }

    fn connection_failed(&self, source: ConnectionError) -> StoreError {
        StoreError::Connection { store: self.store.clone(), doing: Kind::Read.doing(), source }
    }

    fn decode_pages(&self, answer: &[u8], expected: usize) -> Result<Vec<StoredPage>> {
        let pages = decode_stored(answer).filter(|pages| pages.len() == expected);
        pages.ok_or_else(|| self.protocol_error("pages that cannot be read"))
    }

    fn unpack(&self, (block, page): PageId, stored: &StoredPage, content: &mut Page) -> Result<()> {
        unpack(self.digester, &stored.bytes, stored.digest, content).map_err(|what| {
            StoreError::from(Box::new(BadPage {
                store: self.store.clone(),
                vm: self.vm.clone(),
                checkpoint: self.info.number,
                block: self.info.blocks.get(block.0).map(|block| block.id.clone()).unwrap_or_default(),
                page: page.0,
                file: "on the server".into(),
                at: 0,
                what: what.into(),
            }))
        })
    }

    /// Reads one page. Caches the pages that follow it.
    pub fn read_page(&self, id: PageId, content: &mut Page) -> Result<()> {
        let (block, PageNo(page)) = id;
        let mut state = self.lock();
        if let Some(stored) = state.read_ahead.take(id) {
            drop(state);
            return self.unpack(id, &stored, content);
        }
        let pages = self.info.blocks.get(block.0).map_or(0, |block| block.pages());
        // A page that does not exist is also requested, so that the error is the same as for a store in a directory.
        let end = (page + PAGES_PER_SINGLE_READ).min(pages).max(page.saturating_add(1));
        let ids: Vec<PageId> = (page..end).map(|page| (block, PageNo(page))).collect();
        let request = encode_ids(&ids);
        let answer = self.with_connection(&mut state, |connection| {
            connection.ask(&self.store, Kind::Read, &[&request], Kind::Stored)
        })?;
        let mut pages = ids.iter().copied().zip(self.decode_pages(&answer, ids.len())?);
        let Some((_, requested)) = pages.next() else { return Err(self.protocol_error("no page")) };
        for (id, page) in pages {
            state.read_ahead.add(id, page);
        }
        drop(state);
        self.unpack(id, &requested, content)
    }

    /// Returns the digests of pages, in the given order.
    pub fn digests(&self, pages: &[PageId]) -> Result<Vec<u64>> {
        let mut state = self.lock();
        let mut digests = Vec::with_capacity(pages.len());
        for ids in pages.chunks(MAX_PAGES_PER_REQUEST) {
            let request = encode_ids(ids);
            let answer = self.with_connection(&mut state, |connection| {
                connection.ask(&self.store, Kind::Digests, &[&request], Kind::Bytes)
            })?;
            match answer.as_chunks::<8>() {
                (found, []) if found.len() == ids.len() => {
                    digests.extend(found.iter().copied().map(u64::from_le_bytes));
                }
                _ => return Err(self.protocol_error("digests that cannot be read")),
            }
        }
        Ok(digests)
    }

    /// Reads pages of any blocks, with several requests in flight.
    pub fn read_many(&self, pages: &[PageId], mut take: impl FnMut(PageId, &Page)) -> Result<()> {
        let mut content = [0; PAGE_SIZE];
        let mut passed = 0;
        self.with_connection(&mut self.lock(), |connection| {
            // After a reconnect, continues with the page after the last one that was passed to `take`.
            let remaining = pages.get(passed..).unwrap_or_default();
            self.read_pipelined(connection, remaining, |id, stored| {
                self.unpack(id, stored, &mut content)?;
                take(id, &content);
                passed += 1;
                Ok(())
            })
        })
    }

    /// Requests pages, several requests at a time, and passes each page to `take`.
    fn read_pipelined(
        &self,
        connection: &mut Connection,
        pages: &[PageId],
        mut take: impl FnMut(PageId, &StoredPage) -> Result<()>,
    ) -> Result<()> {
        let mut requests = pages.chunks(PAGES_PER_READ);
        let mut in_flight = VecDeque::new();
        loop {
            while in_flight.len() < MAX_REQUESTS_IN_FLIGHT
                && let Some(ids) = requests.next()
            {
                let sent = connection.send(Kind::Read, &[&encode_ids(ids)]);
                sent.map_err(|source| self.connection_failed(source))?;
                in_flight.push_back(ids);
            }
            let Some(ids) = in_flight.pop_front() else { return Ok(()) };
            if let Err(e) = self.receive_pages(connection, ids, &mut take) {
                // Receives the answers to the other requests, so that they are not mistaken for answers to later
                // requests.
                if !matches!(e, StoreError::Connection { .. }) {
                    for _ in in_flight {
                        let _ = connection.answer(&self.store, Kind::Read.doing(), Kind::Stored);
                    }
                }
                return Err(e);
            }
        }
    }

    /// Receives the answer to a request for pages, and passes each page to `take`.
    fn receive_pages(
        &self,
        connection: &mut Connection,
        ids: &[PageId],
        take: &mut impl FnMut(PageId, &StoredPage) -> Result<()>,
    ) -> Result<()> {
        let answer = connection.answer(&self.store, Kind::Read.doing(), Kind::Stored)?;
        for (id, stored) in ids.iter().zip(self.decode_pages(&answer, ids.len())?) {
            take(*id, &stored)?;
        }
        Ok(())
    }

    /// Iterates over the nonzero pages, the most recently written first.
    pub fn hot(&self) -> RemoteHotPages<'_> {
        RemoteHotPages { image: self, position: 0, received: Vec::new().into_iter(), is_at_end: false }
    }
}

/// Nonzero pages of a checkpoint on a server, the most recently written first.
#[derive(Debug)]
pub struct RemoteHotPages<'a> {
    image: &'a RemoteImage,
    /// Number of pages that were returned.
    position: u64,
    /// Pages that were received and not returned yet.
    received: std::vec::IntoIter<PageId>,
    is_at_end: bool,
}

impl RemoteHotPages<'_> {
    pub(crate) fn next(&mut self) -> Option<Result<PageId>> {
        if self.received.as_slice().is_empty() && !self.is_at_end {
            match self.request_more() {
                Ok(ids) => {
                    self.is_at_end = ids.is_empty();
                    self.received = ids.into_iter();
                }
                Err(e) => {
                    self.is_at_end = true;
                    return Some(Err(e));
                }
            }
        }
        let id = self.received.next()?;
        self.position += 1;
        Some(Ok(id))
    }

    fn request_more(&self) -> Result<Vec<PageId>> {
        let image = self.image;
        let mut position = Vec::new();
        position.put_u64(self.position);
        let answer = image.with_connection(&mut image.lock(), |connection| {
            connection.ask(&image.store, Kind::Hot, &[&position], Kind::Order)
        })?;
        decode_ids(&answer).ok_or_else(|| image.protocol_error("an order of pages"))
    }
}
