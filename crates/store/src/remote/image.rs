//! Reads a checkpoint from a server, with read-ahead and several requests in flight. The client checks every page.

use super::connection::{Connection, ConnectionError};
use super::identity::Identity;
use super::protocol::{Kind, PAGES, Purpose, decode_ids, decode_stored, encode_ids};
use super::{greet, greet_over};
use crate::error::{BadPage, Result, StoreError};
use crate::format::codec::Writer;
use crate::format::entry::Section;
use crate::format::page::{Digester, unpack};
use crate::reader::ReadOptions;
use crate::types::{CheckpointInfo, Vm};
use crate::url::Remote;
use rekindle_pages::{PAGE_SIZE, Page, PageId, PageNo};
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Number of pages in a read of a single page: the neighbours of a page are likely to be read next (HydraVM, figure 5).
const AHEAD: u64 = 32;
/// Limit of cached pages that were read ahead.
const MAX_AHEAD: usize = 4096;
/// Number of requests in flight.
const WINDOW: usize = 4;
/// Number of pages in a request.
const TOGETHER: usize = 256;

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
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    connection: Option<Connection>,
    ahead: HashMap<PageId, (u64, Vec<u8>)>,
    order: VecDeque<PageId>,
}

impl RemoteImage {
    /// Connects to the server and opens a checkpoint.
    pub fn open(server: &Remote, which: &ReadOptions) -> Result<(Self, Vm, CheckpointInfo)> {
        let purpose = Purpose::Read { vm: which.vm, at: which.at, lazy: which.lazy };
        let (connection, welcome) = greet_over(&which.spare, server, which.identity.as_ref(), &purpose)?;
        let store = server.to_string();
        let info = welcome.info.ok_or_else(|| StoreError::Connection {
            store: store.clone(),
            doing: "opening",
            source: ConnectionError::protocol("no checkpoint was opened"),
        })?;
        let image = Self {
            server: server.clone(),
            store,
            identity: which.identity.clone(),
            // A later connection must open the same checkpoint.
            purpose: Purpose::Read { vm: Some(welcome.vm.uuid), at: Some(info.number), lazy: which.lazy },
            digester: Digester::new(welcome.id),
            vm: welcome.vm.name.clone(),
            info: info.clone(),
            inner: Mutex::new(Inner { connection: Some(connection), ahead: HashMap::new(), order: VecDeque::new() }),
        };
        Ok((image, welcome.vm, info))
    }

    pub fn name(&self) -> &str {
        &self.store
    }

    pub fn digester(&self) -> Digester {
        self.digester
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `work` with the connection. If an existing connection fails, calls it again with a new one.
    fn with_connection<T>(&self, inner: &mut Inner, mut work: impl FnMut(&mut Connection) -> Result<T>) -> Result<T> {
        let mut fresh = false;
        loop {
            if inner.connection.is_none() {
                let (connection, _) = greet(&self.server, self.identity.as_ref(), &self.purpose)?;
                inner.connection = Some(connection);
                fresh = true;
            }
            let Some(connection) = &mut inner.connection else { continue };
            match work(connection) {
                Err(StoreError::Connection { .. }) if !fresh => inner.connection = None,
                Err(e) => {
                    if matches!(e, StoreError::Connection { .. }) {
                        inner.connection = None;
                    }
                    return Err(e);
                }
                done => return done,
            }
        }
    }

    /// Reads a section of the checkpoint's log entry.
    pub fn section(&self, section: Section) -> Result<Vec<u8>> {
        let code = match section {
            Section::Devices => 0,
            Section::Definition => 1,
            Section::Metadata => 2,
            Section::Claim | Section::Manifest | Section::Before | Section::Checkpoint => {
                let text = format!("{} is not read from a server", section.structure());
                return Err(StoreError::Refused { store: self.store.clone(), kind: "protocol".into(), text });
            }
        };
        self.with_connection(&mut self.inner(), |connection| {
            connection.ask(&self.store, Kind::Section, &[&[code]], Kind::Bytes)
        })
    }

    fn wrong(&self, what: &str) -> StoreError {
        let (doing, source) = (Kind::Read.doing(), ConnectionError::protocol(what));
        StoreError::Connection { store: self.store.clone(), doing, source }
    }

    fn stored(&self, answer: &[u8], wanted: usize) -> Result<Vec<(u64, Vec<u8>)>> {
        let pages = decode_stored(answer).filter(|pages| pages.len() == wanted);
        pages.ok_or_else(|| self.wrong("pages that cannot be read"))
    }

    fn unpack(&self, id: PageId, (digest, stored): &(u64, Vec<u8>), content: &mut Page) -> Result<()> {
        unpack(self.digester, stored, *digest, content).map_err(|what| {
            StoreError::from(Box::new(BadPage {
                store: self.store.clone(),
                vm: self.vm.clone(),
                checkpoint: self.info.number,
                block: self.info.blocks.get(id.0.0).map(|block| block.id.clone()).unwrap_or_default(),
                page: id.1.0,
                file: "on the server".into(),
                at: 0,
                what: what.into(),
            }))
        })
    }

    /// Reads one page. Caches the pages that follow it.
    pub fn read_page(&self, id: PageId, content: &mut Page) -> Result<()> {
        let (block, PageNo(page)) = id;
        let mut inner = self.inner();
        if let Some(found) = inner.ahead.remove(&id) {
            drop(inner);
            return self.unpack(id, &found, content);
        }
        let pages = self.info.blocks.get(block.0).map_or(0, |block| block.pages());
        // A page that does not exist is also requested, so that the error is the same as for a store in a directory.
        let end = (page + AHEAD).min(pages).max(page.saturating_add(1));
        let ids: Vec<PageId> = (page..end).map(|page| (block, PageNo(page))).collect();
        let request = encode_ids(&ids);
        let answer = self.with_connection(&mut inner, |connection| {
            connection.ask(&self.store, Kind::Read, &[&request], Kind::Stored)
        })?;
        let mut found = ids.iter().copied().zip(self.stored(&answer, ids.len())?);
        let Some((_, first)) = found.next() else { return Err(self.wrong("no page")) };
        for (id, page) in found {
            if inner.ahead.insert(id, page).is_none() {
                inner.order.push_back(id);
            }
        }
        while inner.order.len() > MAX_AHEAD {
            if let Some(oldest) = inner.order.pop_front() {
                inner.ahead.remove(&oldest);
            }
        }
        drop(inner);
        self.unpack(id, &first, content)
    }

    /// Returns the digests of pages, in the given order.
    pub fn digests(&self, pages: &[PageId]) -> Result<Vec<u64>> {
        let mut inner = self.inner();
        let mut digests = Vec::with_capacity(pages.len());
        for some in pages.chunks(PAGES) {
            let request = encode_ids(some);
            let answer = self.with_connection(&mut inner, |connection| {
                connection.ask(&self.store, Kind::Digests, &[&request], Kind::Bytes)
            })?;
            match answer.as_chunks::<8>() {
                (found, []) if found.len() == some.len() => {
                    digests.extend(found.iter().copied().map(u64::from_le_bytes))
                }
                _ => return Err(self.wrong("digests that cannot be read")),
            }
        }
        Ok(digests)
    }

    /// Reads pages of any blocks, with several requests in flight.
    pub fn read_many(&self, pages: &[PageId], mut take: impl FnMut(PageId, &Page)) -> Result<()> {
        let mut content = [0; PAGE_SIZE];
        let mut done = 0;
        let mut inner = self.inner();
        self.with_connection(&mut inner, |connection| {
            // After a reconnect, continues with the page after the last one that was passed to `take`.
            let rest = pages.get(done..).unwrap_or_default();
            let mut requests = rest.chunks(TOGETHER);
            let mut in_flight = VecDeque::new();
            let failed =
                |source| StoreError::Connection { store: self.store.clone(), doing: Kind::Read.doing(), source };
            loop {
                while in_flight.len() < WINDOW
                    && let Some(some) = requests.next()
                {
                    connection.send(Kind::Read, &[&encode_ids(some)]).map_err(failed)?;
                    in_flight.push_back(some);
                }
                let Some(some) = in_flight.pop_front() else { return Ok(()) };
                let answer = connection.answer(&self.store, Kind::Read.doing(), Kind::Stored);
                let taken = answer.and_then(|answer| self.stored(&answer, some.len())).and_then(|stored| {
                    for (id, stored) in some.iter().zip(stored) {
                        self.unpack(*id, &stored, &mut content)?;
                        take(*id, &content);
                        done += 1;
                    }
                    Ok(())
                });
                if let Err(e) = taken {
                    // Receives the answers to the other requests, so that they are not mistaken for answers to later
                    // requests.
                    let on_connection = matches!(e, StoreError::Connection { .. });
                    for _ in in_flight.iter().filter(|_| !on_connection) {
                        let _ = connection.answer(&self.store, Kind::Read.doing(), Kind::Stored);
                    }
                    return Err(e);
                }
            }
        })
    }

    /// Iterates over the nonzero pages, the most recently written first.
    pub fn hot(&self) -> RemoteHot<'_> {
        RemoteHot { image: self, given: 0, ready: Vec::new().into_iter(), end: false }
    }
}

/// Nonzero pages of a checkpoint on a server, the most recently written first.
#[derive(Debug)]
pub struct RemoteHot<'a> {
    image: &'a RemoteImage,
    given: u64,
    ready: std::vec::IntoIter<PageId>,
    end: bool,
}

impl RemoteHot<'_> {
    pub(crate) fn next(&mut self) -> Option<Result<PageId>> {
        if let Some(id) = self.ready.next() {
            self.given += 1;
            return Some(Ok(id));
        }
        if self.end {
            return None;
        }
        let mut position = Vec::new();
        position.put_u64(self.given);
        let store = &self.image.store;
        let asked = self.image.with_connection(&mut self.image.inner(), |connection| {
            connection.ask(store, Kind::Hot, &[&position], Kind::Order)
        });
        let part = asked.and_then(|answer| {
            decode_ids(&answer).filter(|ids| ids.len() <= PAGES).ok_or_else(|| self.image.wrong("an order of pages"))
        });
        match part {
            Ok(ids) => {
                self.end = ids.is_empty();
                self.ready = ids.into_iter();
                self.next()
            }
            Err(e) => {
                self.end = true;
                Some(Err(e))
            }
        }
    }
}
