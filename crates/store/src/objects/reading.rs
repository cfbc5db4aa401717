//! A file that is open for reading. Objects are read in *chunks*, because a request takes longer than the transfer of
//! what is near the wanted bytes: pages that were written together, and the directory before them.

use super::bucket::{Bucket, Front};
use bytes::Bytes;
use rekindle_kernel::durable_file::DurableFile;
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const CHUNK_BYTES: u64 = 256 << 10;

/// Chunks that are read together if the chunk before them was read, too.
const READ_AHEAD_CHUNKS: u64 = 8;

/// Limit of the cache of a store.
const CACHED_CHUNKS: usize = 128;

/// An open object and the number of a chunk of it.
type ChunkId = (u64, u64);

#[derive(Debug, Default)]
struct CachedChunks {
    chunks: HashMap<ChunkId, (Bytes, u64)>,
    /// Number of the last use.
    uses: u64,
}

/// The chunks that were used last.
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

    fn get(&self, id: ChunkId) -> Option<Bytes> {
        let mut cached = self.cached();
        cached.uses += 1;
        let now = cached.uses;
        let (bytes, used) = cached.chunks.get_mut(&id)?;
        *used = now;
        Some(bytes.clone())
    }

    fn has(&self, id: ChunkId) -> bool {
        self.cached().chunks.contains_key(&id)
    }

    fn put(&self, id: ChunkId, bytes: Bytes) {
        let mut cached = self.cached();
        if cached.chunks.len() >= CACHED_CHUNKS
            && let Some(oldest) = cached.chunks.iter().min_by_key(|(_, (_, used))| *used).map(|(id, _)| *id)
        {
            cached.chunks.remove(&oldest);
        }
        cached.uses += 1;
        let now = cached.uses;
        cached.chunks.insert(id, (bytes, now));
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
        cache.put((id, 0), bytes);
        Ok(Self { bucket: bucket.clone(), cache: cache.clone(), name: name.to_owned(), id, len })
    }

    /// Reads chunk `wanted`, and with it the next missing chunks up to chunk `last` and those that are read ahead.
    fn fetch(&self, wanted: u64, last: u64) -> io::Result<Bytes> {
        let is_sequential = wanted > 0 && self.cache.has((self.id, wanted - 1));
        let ahead = if is_sequential { wanted + READ_AHEAD_CHUNKS - 1 } else { wanted };
        let last = last.max(ahead).min((self.len - 1) / CHUNK_BYTES);
        let end = (wanted + 1..=last).find(|chunk| self.cache.has((self.id, *chunk))).unwrap_or(last + 1);
        let range = wanted * CHUNK_BYTES..(end * CHUNK_BYTES).min(self.len);
        let mut first = None;
        let mut chunk = wanted;
        // The parts of a read are multiples of a chunk.
        for part in self.bucket.read(&self.name, range)? {
            for begin in (0..part.len()).step_by(CHUNK_BYTES as usize) {
                let bytes = part.slice(begin..part.len().min(begin + CHUNK_BYTES as usize));
                first.get_or_insert_with(|| bytes.clone());
                self.cache.put((self.id, chunk), bytes);
                chunk += 1;
            }
        }
        first.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

fn read_only() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "the object is open for reading")
}

impl DurableFile for OpenObject {
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        let end = self.len.min(offset.saturating_add(target.len() as u64));
        let mut filled = 0;
        while offset + (filled as u64) < end {
            let at = offset + filled as u64;
            let chunk = at / CHUNK_BYTES;
            let bytes = match self.cache.get((self.id, chunk)) {
                Some(bytes) => bytes,
                None => self.fetch(chunk, (end - 1) / CHUNK_BYTES)?,
            };
            let begin = (at - chunk * CHUNK_BYTES) as usize;
            let available = bytes.get(begin..).filter(|available| !available.is_empty());
            let available = available.ok_or(io::ErrorKind::UnexpectedEof)?;
            let count = available.len().min((end - at) as usize);
            if let (Some(target), Some(found)) = (target.get_mut(filled..filled + count), available.get(..count)) {
                target.copy_from_slice(found);
            }
            filled += count;
        }
        Ok(filled)
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
