//! Stores in an object store (S3): each file of a store is one object, which is written as a whole and never changed.
//!
//! The map of the file operations to requests, and why it keeps what a directory guarantees, is in
//! `docs/store-format.md`, *Object stores*. In short:
//!
//! | operation | request |
//! |---|---|
//! | `create`, `write_at` | none: the content is kept in memory |
//! | `sync` | a PUT that only creates; none for a file with a temporary name |
//! | `link` | a PUT of the content that only creates. This is the commit |
//! | `open`, `read_at` | GETs of ranges |
//!
//! | module | purpose |
//! |---|---|
//! | `bucket` | requests, their retries and errors; the thread pool that sends them |
//! | `new_file` | a file that is being written |
//! | `reading` | a file that is open for reading, and the cache of what was read |
//! | `schedule` | the order of GETs, and the limit of those in flight |
//! | `waiting` | reads that do not wait |
//! | `settings` | credentials, endpoint and certificates, from variables |

#[cfg(test)]
pub(crate) use {
    reading::{CHUNK_BYTES, CHUNKS_PER_GET},
    schedule::MAX_IN_FLIGHT,
};

mod bucket;
mod new_file;
mod reading;
pub mod schedule;
mod settings;
pub(crate) mod waiting;

use crate::credentials::Retries;
use crate::disk::Disk;
use crate::environment_file::Variables;
use crate::format::names;
use crate::url::ObjectAddress;
use bucket::Bucket;
use bytes::Bytes;
use new_file::NewFile;
use object_store::ObjectStore;
use reading::{ChunkCache, OpenObject};
use rekindle_kernel::durable_file::DurableFile;
use std::collections::HashMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use uuid::Uuid;

/// How often a server is checked before the first store is created in a place.
const CHECK_ROUNDS: usize = 3;
/// Requests that create one object, to find out whether the server lets only one of them succeed.
const CONCURRENT_CREATIONS: usize = 8;

/// The objects below a prefix of a bucket, as a directory of files.
#[derive(Debug)]
pub struct ObjectDisk {
    bucket: Arc<Bucket>,
    cache: Arc<ChunkCache>,
    /// Files that this process has created and that are not complete objects yet, by name.
    new_files: Mutex<HashMap<String, Arc<NewFile>>>,
}

impl ObjectDisk {
    /// Prepares access to the objects at `address`. Sends no request. `variables` replace those of the environment.
    ///
    /// # Errors
    /// `InvalidInput` if the settings are wrong or incomplete.
    pub(crate) fn new(address: &ObjectAddress, variables: &Variables, retries: Retries) -> io::Result<Self> {
        let objects = settings::s3(&address.bucket, variables, retries)?;
        Self::with(objects, &address.prefix, address.to_string())
    }

    /// Returns the objects in `objects` below `prefix`, with `name` as their name in messages.
    pub(crate) fn with(objects: Arc<dyn ObjectStore>, prefix: &str, name: String) -> io::Result<Self> {
        let bucket = Arc::new(Bucket::new(objects, prefix, name)?);
        Ok(Self { bucket, cache: Arc::default(), new_files: Mutex::default() })
    }

    /// Returns whether one of several requests to create an object succeeds, and none of the others. Some servers check the condition
    /// and write in two steps, so that requests that arrive together succeed together.
    fn creates_exclusively(&self) -> io::Result<bool> {
        let name = format!("{}-{}", names::EXCLUSIVE, Uuid::new_v4());
        let together = self.bucket.count_created(&name, CONCURRENT_CREATIONS);
        let afterwards = self.bucket.count_created(&name, 1);
        self.bucket.remove(&name)?;
        Ok((together?, afterwards?) == (1, 0))
    }

    fn new_files(&self) -> MutexGuard<'_, HashMap<String, Arc<NewFile>>> {
        self.new_files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new_file(&self, name: &str) -> io::Result<Arc<NewFile>> {
        self.new_files().get(name).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Disk for ObjectDisk {
    fn name(&self) -> &str {
        self.bucket.name()
    }

    fn create_directory(&self, _name: &str) -> io::Result<()> {
        // An object store has no directories.
        Ok(())
    }

    fn list(&self, name: &str) -> io::Result<Vec<(String, u64)>> {
        self.bucket.list(name)
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DurableFile>> {
        let file = Arc::new(NewFile::new(self.bucket.clone(), name));
        let mut new_files = self.new_files();
        // Complete objects need no place in the list any more.
        new_files.retain(|_, file| !file.is_uploaded());
        if new_files.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        new_files.insert(name.to_owned(), file.clone());
        Ok(file)
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn DurableFile>> {
        Ok(Arc::new(OpenObject::open(&self.bucket, &self.cache, name)?))
    }

    fn link(&self, from: &str, to: &str) -> io::Result<()> {
        let content = self.new_file(from)?.content()?;
        self.bucket.create(to, content)
    }

    fn replace_marker(&self, _from: &str, to: &str, previous: &str) {
        self.bucket.create_and_remove(to, Bytes::new(), previous);
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let new_file = self.new_files().remove(name);
        match new_file {
            Some(file) if !file.may_be_object() => Ok(()),
            _ => self.bucket.remove(name),
        }
    }

    fn sync_directory(&self, _name: &str) -> io::Result<()> {
        // A completed PUT or DELETE is durable and visible.
        Ok(())
    }

    fn check_exclusive_links(&self) -> io::Result<()> {
        let is_exclusive = if self.bucket.exists(names::EXCLUSIVE)? {
            // The server has passed the check. Another one may have replaced it.
            self.bucket.count_created(names::EXCLUSIVE, 1)? == 0
        } else {
            let mut has_passed = true;
            for _ in 0..CHECK_ROUNDS {
                has_passed = has_passed && self.creates_exclusively()?;
            }
            if has_passed {
                self.bucket.count_created(names::EXCLUSIVE, 1)?;
            }
            has_passed
        };
        if !is_exclusive {
            let what = "the object store does not keep the condition `If-None-Match: *` of a PUT request, so two hosts could \
                        own the store at the same time; use an object store with atomic conditional writes";
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        Ok(())
    }

    fn can_append(&self) -> bool {
        false
    }

    fn has_latency(&self) -> bool {
        true
    }

    fn arrivals(&self) -> Option<BorrowedFd<'_>> {
        let ends = self.bucket.schedule().ends();
        ends.inspect_err(|e| tracing::debug!("the ends of reads are polled: {e}")).ok()
    }
}
