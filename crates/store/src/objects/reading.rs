//! A file that is open for reading. Objects are read in *chunks*, because a request takes longer than the transfer of
//! what is near the wanted bytes: pages that were written together, and the directory before them.
//!
//! Adjacent chunks are read with one GET, and several GETs are in flight ([`super::schedule`]). A reader that reads chunk
//! after chunk finds the next ones read or in flight (*read-ahead*), so that its speed does not depend on the latency of
//! the server. Chunks that were read ahead and not used yet take a part of the cache only.

use super::bucket::{Bucket, Front, Pending};
use super::schedule::Need;
use super::waiting::{need_without_waiting, waiting_need, would_block};
use bytes::Bytes;
use rekindle_kernel::durable_file::DurableFile;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) const CHUNK_BYTES: u64 = 256 << 10;

/// Limit of the chunks that one GET reads.
pub(crate) const CHUNKS_PER_GET: u64 = 4;

/// Limit of the chunks that are read ahead of a reader.
const READ_AHEAD_CHUNKS: u64 = 4 * CHUNKS_PER_GET;

/// Limit of the cache of a store.
const CACHED_CHUNKS: usize = 128;

/// Limit of the chunks that were read ahead and that nothing has used yet. Less than half, so that what a reader has consumed
/// is removed earlier than what it has not reached yet.
const MAX_UNUSED_CHUNKS: usize = CACHED_CHUNKS * 3 / 8;

/// Limit of objects that are being opened by callers that do not wait.
const MAX_OPENING: usize = 64;

/// An open object and the number of a chunk of it.
type ChunkId = (u64, u64);

/// A GET of adjacent chunks.
#[derive(Debug, Clone)]
struct Get {
    first_chunk: u64,
    pending: Pending<Bytes>,
}

impl Get {
    /// Returns a chunk of the result.
    fn chunk(&self, bytes: &Bytes, chunk: u64) -> io::Result<Bytes> {
        let begin = ((chunk - self.first_chunk) * CHUNK_BYTES) as usize;
        if begin >= bytes.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(bytes.slice(begin..bytes.len().min(begin + CHUNK_BYTES as usize)))
    }
}

#[derive(Debug)]
struct CachedChunk {
    get: Get,
    /// Number of the last use.
    used: u64,
    /// It was read ahead, and nothing has used it yet.
    is_unused: bool,
}

#[derive(Debug, Default)]
struct CachedChunks {
    chunks: HashMap<ChunkId, CachedChunk>,
    /// Number of the last use.
    uses: u64,
}

impl CachedChunks {
    /// Returns the GET of a chunk, unless there was none or it has failed.
    fn get(&mut self, id: ChunkId, need: Need) -> Option<Get> {
        self.uses += 1;
        let cached = self.chunks.get_mut(&id).filter(|cached| !cached.get.pending.has_failed())?;
        if need != Need::ReadAhead {
            (cached.used, cached.is_unused) = (self.uses, false);
        }
        Some(cached.get.clone())
    }

    fn has(&self, id: ChunkId) -> bool {
        self.chunks.get(&id).is_some_and(|cached| !cached.get.pending.has_failed())
    }

    /// Removes a chunk whose GET has failed for a caller that needs it. Returns the error.
    fn take_failure(&mut self, id: ChunkId) -> Option<io::Error> {
        let cached = self.chunks.get(&id).filter(|cached| !cached.is_unused)?;
        let error = cached.get.pending.ended()?.err()?;
        self.chunks.remove(&id);
        Some(error)
    }

    fn unused(&self) -> usize {
        self.chunks.values().filter(|cached| cached.is_unused).count()
    }

    fn put(&mut self, id: ChunkId, get: Get, need: Need) {
        if self.chunks.len() >= CACHED_CHUNKS {
            self.evict();
        }
        self.uses += 1;
        self.chunks.insert(id, CachedChunk { get, used: self.uses, is_unused: need == Need::ReadAhead });
    }

    /// Removes all chunks of the GET whose last use is the longest ago; they share their memory. To be read ahead is a use,
    /// so that what a reader has consumed is removed before what it needs next. A GET in flight that a reader waits for stays,
    /// so that it is not repeated; the schedule limits how many there are.
    fn evict(&mut self) {
        let mut last_uses: HashMap<ChunkId, u64> = HashMap::new();
        for ((object, _), cached) in &self.chunks {
            let last_use = last_uses.entry((*object, cached.get.first_chunk)).or_default();
            *last_use = cached.used.max(*last_use);
        }
        let is_awaited = |cached: &CachedChunk| !cached.is_unused && cached.get.pending.ended().is_none();
        for ((object, _), cached) in self.chunks.iter().filter(|(_, cached)| is_awaited(cached)) {
            last_uses.remove(&(*object, cached.get.first_chunk));
        }
        if let Some((oldest, _)) = last_uses.into_iter().min_by_key(|(_, last_use)| *last_use) {
            self.chunks.retain(|(object, _), cached| (*object, cached.get.first_chunk) != oldest);
        }
    }
}

/// The chunks that were used last, and those in flight.
#[derive(Debug, Default)]
pub(super) struct ChunkCache {
    cached: Mutex<CachedChunks>,
    /// Objects that were opened. A name that is opened again is another object here.
    opened: AtomicU64,
    /// Objects whose first chunk is being read for callers that do not wait.
    opening: Mutex<HashMap<String, Pending<Front>>>,
}

impl ChunkCache {
    fn cached(&self) -> MutexGuard<'_, CachedChunks> {
        self.cached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn opening(&self) -> MutexGuard<'_, HashMap<String, Pending<Front>>> {
        self.opening.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the first chunk of an object.
    fn front(&self, bucket: &Arc<Bucket>, name: &str) -> io::Result<Front> {
        let Some(need) = need_without_waiting() else {
            let started = self.opening().remove(name).filter(|pending| !pending.has_failed());
            let pending = started.unwrap_or_else(|| bucket.start_front(name, CHUNK_BYTES, waiting_need()));
            return bucket.wait_for(&pending);
        };
        if need == Need::Guest {
            bucket.schedule().expect_guests();
        }
        let mut opening = self.opening();
        if let Some(pending) = opening.get(name) {
            let Some(ended) = pending.ended() else {
                bucket.promote(pending, need);
                return Err(would_block());
            };
            opening.remove(name);
            return ended;
        }
        if bucket.schedule().has_room(need) {
            if opening.len() >= MAX_OPENING {
                // Their callers start them again.
                opening.retain(|_, pending| pending.ended().is_none());
            }
            if opening.len() >= MAX_OPENING {
                return Err(would_block());
            }
            opening.insert(name.to_owned(), bucket.start_front(name, CHUNK_BYTES, need));
        }
        Err(would_block())
    }
}

#[derive(Debug)]
pub(super) struct OpenObject {
    bucket: Arc<Bucket>,
    cache: Arc<ChunkCache>,
    name: String,
    id: u64,
    len: u64,
    /// The last chunk that was read.
    last_read: AtomicU64,
}

impl OpenObject {
    /// Opens an object, and reads its first chunk.
    pub fn open(bucket: &Arc<Bucket>, cache: &Arc<ChunkCache>, name: &str) -> io::Result<Self> {
        let Front { bytes, len } = cache.front(bucket, name)?;
        let id = cache.opened.fetch_add(1, Ordering::Relaxed);
        cache.cached().put((id, 0), Get { first_chunk: 0, pending: Pending::of(bytes) }, Need::Guest);
        let last_read = AtomicU64::new(0);
        Ok(Self { bucket: bucket.clone(), cache: cache.clone(), name: name.to_owned(), id, len, last_read })
    }

    /// Starts a GET of adjacent chunks.
    fn start(&self, cached: &mut CachedChunks, chunks: Range<u64>, need: Need) -> Get {
        let range = chunks.start * CHUNK_BYTES..(chunks.end * CHUNK_BYTES).min(self.len);
        let pending = self.bucket.start_read(&self.name, range, need);
        let get = Get { first_chunk: chunks.start, pending };
        chunks.for_each(|chunk| cached.put((self.id, chunk), get.clone(), need));
        get
    }

    /// Returns the GET of each of `chunks`. Starts those that are missing, while `may_start` returns true.
    fn gets(
        &self,
        cached: &mut CachedChunks,
        chunks: Range<u64>,
        need: Need,
        may_start: impl Fn(&CachedChunks) -> bool,
    ) -> Vec<Option<Get>> {
        let mut gets = Vec::new();
        let mut chunk = chunks.start;
        while chunk < chunks.end {
            if let Some(get) = cached.get((self.id, chunk), need) {
                gets.push(Some(get));
                chunk += 1;
                continue;
            }
            let most = chunks.end.min(chunk + CHUNKS_PER_GET);
            let end = (chunk + 1..most).find(|next| cached.has((self.id, *next))).unwrap_or(most);
            let get = may_start(cached).then(|| self.start(cached, chunk..end, need));
            gets.extend((chunk..end).map(|_| get.clone()));
            chunk = end;
        }
        gets
    }

    /// Starts to read `chunks` as far as there is room. Returns whether there was room for all.
    fn start_ahead(&self, cached: &mut CachedChunks, chunks: Range<u64>) -> bool {
        let has_room = |cached: &CachedChunks| {
            cached.unused() < MAX_UNUSED_CHUNKS && self.bucket.schedule().has_room(Need::ReadAhead)
        };
        self.gets(cached, chunks, Need::ReadAhead, has_room).iter().all(Option::is_some)
    }

    /// Starts the GETs of the chunks after `chunk` if those before it were read: the more of them, the more.
    fn read_ahead(&self, cached: &mut CachedChunks, chunk: u64) {
        let before =
            (1..=READ_AHEAD_CHUNKS / 2).take_while(|n| *n <= chunk && cached.has((self.id, chunk - n))).count();
        let end_of_object = self.len.div_ceil(CHUNK_BYTES);
        let end = (chunk + 1 + 2 * before as u64).min(end_of_object);
        let Some(missing) = (chunk + 1..end).find(|next| !cached.has((self.id, *next))) else { return };
        // Whole GETs only, except where the next chunk is missing, and at the end of the object.
        let whole_gets = (end - missing) / CHUNKS_PER_GET * CHUNKS_PER_GET;
        if end == end_of_object || whole_gets == 0 && missing == chunk + 1 {
            self.start_ahead(cached, missing..end);
        } else {
            self.start_ahead(cached, missing..missing + whole_gets);
        }
    }

    /// Returns the GETs of chunks that are to be read now.
    fn gets_to_read(&self, chunks: Range<u64>) -> Vec<Option<Get>> {
        let mut cached = self.cache.cached();
        let need = need_without_waiting();
        let gets = self.gets(&mut cached, chunks.clone(), need.unwrap_or_else(waiting_need), |_| {
            need.is_none_or(|need| self.bucket.schedule().has_room(need))
        });
        // Most reads are in the chunk of the previous read.
        let last = chunks.end - 1;
        if self.last_read.swap(last, Ordering::Relaxed) != last {
            self.read_ahead(&mut cached, last);
        }
        gets
    }

    /// Returns chunks. If the caller must not wait, all that are missing are started.
    fn read_chunks(&self, chunks: Range<u64>) -> io::Result<Vec<Bytes>> {
        let Some(need) = need_without_waiting() else {
            let gets = self.gets_to_read(chunks.clone());
            let wait = |(chunk, get): (u64, Option<Get>)| {
                let get = get.ok_or_else(would_block)?;
                get.chunk(&self.bucket.wait_for(&get.pending)?, chunk)
            };
            return chunks.zip(gets).map(wait).collect();
        };
        if need == Need::Guest {
            self.bucket.schedule().expect_guests();
        }
        let failure = {
            let mut cached = self.cache.cached();
            // The next attempt starts another GET.
            chunks.clone().find_map(|chunk| cached.take_failure((self.id, chunk)))
        };
        if let Some(failure) = failure {
            return Err(failure);
        }
        let gets = self.gets_to_read(chunks.clone());
        gets.iter().flatten().for_each(|get| self.bucket.promote(&get.pending, need));
        let read = |(chunk, get): (u64, &Option<Get>)| {
            let get = get.as_ref().ok_or_else(would_block)?;
            get.chunk(&get.pending.ended().unwrap_or_else(|| Err(would_block()))?, chunk)
        };
        chunks.zip(&gets).map(read).collect()
    }
}

impl Drop for OpenObject {
    fn drop(&mut self) {
        self.cache.cached().chunks.retain(|(object, _), _| *object != self.id);
    }
}

fn read_only() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "the object is open for reading")
}

impl DurableFile for OpenObject {
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        let end = self.len.min(offset.saturating_add(target.len() as u64));
        if offset >= end {
            return Ok(0);
        }
        let chunks = offset / CHUNK_BYTES..end.div_ceil(CHUNK_BYTES);
        let mut filled = 0;
        for (chunk, bytes) in chunks.clone().zip(self.read_chunks(chunks)?) {
            let at = offset + filled as u64;
            let begin = (at - chunk * CHUNK_BYTES) as usize;
            let available = bytes.get(begin..).filter(|available| !available.is_empty());
            let available = available.ok_or(io::ErrorKind::UnexpectedEof)?;
            let count = available.len().min((end - at) as usize);
            if let (Some(target), Some(found)) = (target.get_mut(filled..filled + count), available.get(..count)) {
                target.copy_from_slice(found);
            }
            filled += count;
        }
        if offset + (filled as u64) < end {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(filled)
    }

    fn start_read(&self, range: Range<u64>) -> bool {
        let end = self.len.min(range.end);
        let chunks = range.start / CHUNK_BYTES..end.div_ceil(CHUNK_BYTES);
        range.start >= end || self.start_ahead(&mut self.cache.cached(), chunks)
    }

    fn write_at(&self, _bytes: &[u8], _offset: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn zero(&self, _offset: u64, _len: u64, _hole: bool) -> io::Result<()> {
        Err(read_only())
    }

    fn truncate(&self, _len: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.len)
    }
}
