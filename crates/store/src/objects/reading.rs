//! A file that is open for reading. Objects are read in *chunks*, because a request takes longer than the transfer of
//! what is near the wanted bytes: pages that were written together, and the directory before them.
//!
//! Adjacent chunks are read with one GET, and several GETs are in flight. A reader that reads chunk after chunk finds
//! the next ones read or in flight (*read-ahead*), so that its speed does not depend on the latency of the server.

use super::bucket::{Bucket, Front, ReadResult};
use bytes::Bytes;
use rekindle_kernel::durable_file::DurableFile;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch::{self, Receiver};

pub(crate) const CHUNK_BYTES: u64 = 256 << 10;

/// Limit of the chunks that one GET reads.
pub(crate) const CHUNKS_PER_GET: u64 = 4;

/// Limit of the chunks that are read ahead of a reader.
const READ_AHEAD_CHUNKS: u64 = 4 * CHUNKS_PER_GET;

/// Limit of the cache of a store.
const CACHED_CHUNKS: usize = 128;

/// An open object and the number of a chunk of it.
type ChunkId = (u64, u64);

/// A GET of adjacent chunks: in flight, or its result.
#[derive(Debug, Clone)]
struct Get {
    first_chunk: u64,
    /// `None`: in flight. Any number of threads can wait for it; inspecting it affects none of them.
    result: Receiver<Option<ReadResult>>,
}

impl Get {
    /// Returns a GET that has already ended.
    fn ended(bytes: Bytes) -> Self {
        Self { first_chunk: 0, result: watch::channel(Some(Ok(bytes))).1 }
    }

    fn has_failed(&self) -> bool {
        match &*self.result.borrow() {
            Some(result) => result.is_err(),
            // The task that reads was cancelled.
            None => self.result.has_changed().is_err(),
        }
    }

    /// Waits for the result, and returns a chunk of it.
    fn wait(&self, bucket: &Bucket, chunk: u64) -> io::Result<Bytes> {
        let mut receiver = self.result.clone();
        let ended = bucket.wait(receiver.wait_for(Option::is_some)).map_err(io::Error::other)?.clone();
        let bytes = ended.ok_or(io::ErrorKind::Interrupted)?.map_err(|e| io::Error::new(e.kind(), e))?;
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
}

#[derive(Debug, Default)]
struct CachedChunks {
    chunks: HashMap<ChunkId, CachedChunk>,
    /// Number of the last use.
    uses: u64,
}

impl CachedChunks {
    /// Returns the GET of a chunk, unless there was none or it has failed.
    fn get(&mut self, id: ChunkId) -> Option<Get> {
        self.uses += 1;
        let cached = self.chunks.get_mut(&id).filter(|cached| !cached.get.has_failed())?;
        cached.used = self.uses;
        Some(cached.get.clone())
    }

    fn has(&self, id: ChunkId) -> bool {
        self.chunks.get(&id).is_some_and(|cached| !cached.get.has_failed())
    }

    fn put(&mut self, id: ChunkId, get: Get) {
        if self.chunks.len() >= CACHED_CHUNKS
            && let Some(oldest) = self.chunks.iter().min_by_key(|(_, cached)| cached.used).map(|(id, _)| *id)
        {
            self.chunks.remove(&oldest);
        }
        self.uses += 1;
        self.chunks.insert(id, CachedChunk { get, used: self.uses });
    }
}

/// The chunks that were used last, and those in flight.
#[derive(Debug, Default)]
pub(super) struct ChunkCache {
    cached: Mutex<CachedChunks>,
    /// Objects that were opened. A name that is opened again is another object here.
    opened: AtomicU64,
}

impl ChunkCache {
    fn cached(&self) -> MutexGuard<'_, CachedChunks> {
        self.cached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
pub(super) struct OpenObject {
    bucket: Arc<Bucket>,
    cache: Arc<ChunkCache>,
    name: String,
    id: u64,
    len: u64,
}

impl OpenObject {
    /// Opens an object, and reads its first chunk.
    pub fn open(bucket: &Arc<Bucket>, cache: &Arc<ChunkCache>, name: &str) -> io::Result<Self> {
        let Front { bytes, len } = bucket.front(name, CHUNK_BYTES)?;
        let id = cache.opened.fetch_add(1, Ordering::Relaxed);
        cache.cached().put((id, 0), Get::ended(bytes));
        Ok(Self { bucket: bucket.clone(), cache: cache.clone(), name: name.to_owned(), id, len })
    }

    /// Starts a GET of adjacent chunks.
    fn start(&self, cached: &mut CachedChunks, chunks: Range<u64>) -> Get {
        let range = chunks.start * CHUNK_BYTES..(chunks.end * CHUNK_BYTES).min(self.len);
        let get = Get { first_chunk: chunks.start, result: self.bucket.start_read(&self.name, range) };
        chunks.for_each(|chunk| cached.put((self.id, chunk), get.clone()));
        get
    }

    /// Returns the GET of each of `chunks`. Starts those that are missing.
    fn gets(&self, cached: &mut CachedChunks, chunks: Range<u64>) -> Vec<Get> {
        let mut gets = Vec::new();
        let mut chunk = chunks.start;
        while chunk < chunks.end {
            if let Some(get) = cached.get((self.id, chunk)) {
                gets.push(get);
                chunk += 1;
                continue;
            }
            let most = chunks.end.min(chunk + CHUNKS_PER_GET);
            let end = (chunk + 1..most).find(|next| cached.has((self.id, *next))).unwrap_or(most);
            let get = self.start(cached, chunk..end);
            gets.extend((chunk..end).map(|_| get.clone()));
            chunk = end;
        }
        gets
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
            self.gets(cached, missing..end);
        } else {
            self.gets(cached, missing..missing + whole_gets);
        }
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
        let gets = {
            let mut cached = self.cache.cached();
            let gets = self.gets(&mut cached, chunks.clone());
            self.read_ahead(&mut cached, chunks.end - 1);
            gets
        };
        let mut filled = 0;
        for (chunk, get) in chunks.zip(gets) {
            let bytes = get.wait(&self.bucket, chunk)?;
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

    fn start_read(&self, range: Range<u64>) {
        let end = self.len.min(range.end);
        if range.start < end {
            self.gets(&mut self.cache.cached(), range.start / CHUNK_BYTES..end.div_ceil(CHUNK_BYTES));
        }
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
