//! An image on a server: read with read-ahead, several requests under way, every page checked here.

use super::identity::Identity;
use super::line::{Line, LineError};
use super::protocol::{Kind, PAGES, Purpose, decode_ids, decode_stored, encode_ids};
use super::{greet, greet_over};
use crate::error::{BadPage, Result, StoreError};
use crate::format::codec::Writer;
use crate::format::entry::Section;
use crate::format::page::{Digester, unpack};
use crate::image::PageId;
use crate::reader::Which;
use crate::types::{CheckpointInfo, PAGE_SIZE, Page, Vm};
use crate::url::Remote;
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Pages that are read with one that is wanted: its neighbours are wanted next (HydraVM, figure 5).
const AHEAD: u64 = 32;
/// Pages that were read ahead, at most.
const MOST_AHEAD: usize = 4096;
/// Requests under way at a time.
const WINDOW: usize = 4;
/// Pages of a request.
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
    line: Option<Line>,
    ahead: HashMap<PageId, (u64, Vec<u8>)>,
    order: VecDeque<PageId>,
}

impl RemoteImage {
    /// Open a checkpoint.
    pub fn open(server: &Remote, which: &Which) -> Result<(Self, Vm, CheckpointInfo)> {
        let purpose = Purpose::Read { vm: which.vm, at: which.at, unlooked: which.unlooked };
        let (line, welcome) = greet_over(&which.spare, server, which.identity.as_ref(), &purpose)?;
        let store = server.to_string();
        let info = welcome.info.ok_or_else(|| StoreError::Line {
            store: store.clone(),
            doing: "opening",
            source: LineError::protocol("no checkpoint was opened"),
        })?;
        let image = Self {
            server: server.clone(),
            store,
            identity: which.identity.clone(),
            // The same one, if the line has to be made anew.
            purpose: Purpose::Read { vm: Some(welcome.vm.uuid), at: Some(info.number), unlooked: which.unlooked },
            digester: Digester::new(welcome.id),
            vm: welcome.vm.name.clone(),
            info: info.clone(),
            inner: Mutex::new(Inner { line: Some(line), ahead: HashMap::new(), order: VecDeque::new() }),
        };
        Ok((image, welcome.vm, info))
    }

    /// Where it is.
    pub fn name(&self) -> &str {
        &self.store
    }

    /// How its pages are digested.
    pub fn digester(&self) -> Digester {
        self.digester
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Do something over the line; once more over a new one if it breaks.
    fn with_line<T>(&self, inner: &mut Inner, mut work: impl FnMut(&mut Line) -> Result<T>) -> Result<T> {
        let mut fresh = false;
        loop {
            if inner.line.is_none() {
                let (line, _) = greet(&self.server, self.identity.as_ref(), &self.purpose)?;
                inner.line = Some(line);
                fresh = true;
            }
            let Some(line) = &mut inner.line else { continue };
            match work(line) {
                Err(StoreError::Line { .. }) if !fresh => inner.line = None,
                Err(e) => {
                    if matches!(e, StoreError::Line { .. }) {
                        inner.line = None;
                    }
                    return Err(e);
                }
                done => return done,
            }
        }
    }

    /// A section of its log entry.
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
        self.with_line(&mut self.inner(), |line| line.ask(&self.store, Kind::Section, &[&[code]], Kind::Bytes))
    }

    fn wrong(&self, what: &str) -> StoreError {
        let (doing, source) = (Kind::Read.doing(), LineError::protocol(what));
        StoreError::Line { store: self.store.clone(), doing, source }
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
                block: self.info.blocks.get(id.0).map(|block| block.id.clone()).unwrap_or_default(),
                page: id.1,
                file: "on the server".into(),
                at: 0,
                what: what.into(),
            }))
        })
    }

    /// Read one page, and with it those that follow.
    pub fn read_page(&self, block: usize, page: u64, content: &mut Page) -> Result<()> {
        let id = (block, page);
        let mut inner = self.inner();
        if let Some(found) = inner.ahead.remove(&id) {
            drop(inner);
            return self.unpack(id, &found, content);
        }
        let pages = self.info.blocks.get(block).map_or(0, |block| block.pages());
        // One that is not there is asked for too, so that the server's words are the same as those of a directory.
        let end = (page + AHEAD).min(pages).max(page.saturating_add(1));
        let ids: Vec<PageId> = (page..end).map(|page| (block, page)).collect();
        let request = encode_ids(&ids);
        let answer = self.with_line(&mut inner, |line| line.ask(&self.store, Kind::Read, &[&request], Kind::Stored))?;
        let mut found = ids.iter().copied().zip(self.stored(&answer, ids.len())?);
        let Some((_, first)) = found.next() else { return Err(self.wrong("no page")) };
        for (id, page) in found {
            if inner.ahead.insert(id, page).is_none() {
                inner.order.push_back(id);
            }
        }
        while inner.order.len() > MOST_AHEAD {
            if let Some(oldest) = inner.order.pop_front() {
                inner.ahead.remove(&oldest);
            }
        }
        drop(inner);
        self.unpack(id, &first, content)
    }

    /// The digests of pages, in the order asked for.
    pub fn digests(&self, pages: &[PageId]) -> Result<Vec<u64>> {
        let mut inner = self.inner();
        let mut digests = Vec::with_capacity(pages.len());
        for some in pages.chunks(PAGES) {
            let request = encode_ids(some);
            let answer =
                self.with_line(&mut inner, |line| line.ask(&self.store, Kind::Digests, &[&request], Kind::Bytes))?;
            match answer.as_chunks::<8>() {
                (found, []) if found.len() == some.len() => {
                    digests.extend(found.iter().copied().map(u64::from_le_bytes))
                }
                _ => return Err(self.wrong("digests that cannot be read")),
            }
        }
        Ok(digests)
    }

    /// Read many pages, with several requests under way.
    pub fn read_many(&self, pages: &[PageId], mut take: impl FnMut(PageId, &Page)) -> Result<()> {
        let mut content = [0; PAGE_SIZE];
        let mut done = 0;
        let mut inner = self.inner();
        self.with_line(&mut inner, |line| {
            // After a broken line it goes on where it was.
            let rest = pages.get(done..).unwrap_or_default();
            let mut requests = rest.chunks(TOGETHER);
            let mut under_way = VecDeque::new();
            let failed = |source| StoreError::Line { store: self.store.clone(), doing: Kind::Read.doing(), source };
            loop {
                while under_way.len() < WINDOW
                    && let Some(some) = requests.next()
                {
                    line.send(Kind::Read, &[&encode_ids(some)]).map_err(failed)?;
                    under_way.push_back(some);
                }
                let Some(some) = under_way.pop_front() else { return Ok(()) };
                let answer = line.answer(&self.store, Kind::Read.doing(), Kind::Stored);
                let taken = answer.and_then(|answer| self.stored(&answer, some.len())).and_then(|stored| {
                    for (id, stored) in some.iter().zip(stored) {
                        self.unpack(*id, &stored, &mut content)?;
                        take(*id, &content);
                        done += 1;
                    }
                    Ok(())
                });
                if let Err(e) = taken {
                    // Answers to the others are still to come: they must not be taken for those of the next.
                    let on_line = matches!(e, StoreError::Line { .. });
                    for _ in under_way.iter().filter(|_| !on_line) {
                        let _ = line.answer(&self.store, Kind::Read.doing(), Kind::Stored);
                    }
                    return Err(e);
                }
            }
        })
    }

    /// The pages that are not zero, those written last first.
    pub fn hot(&self) -> RemoteHot<'_> {
        RemoteHot { image: self, given: 0, ready: Vec::new().into_iter(), end: false }
    }
}

/// Pages of an image on a server, those written last first.
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
        let asked =
            self.image.with_line(&mut self.image.inner(), |line| line.ask(store, Kind::Hot, &[&position], Kind::Order));
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
