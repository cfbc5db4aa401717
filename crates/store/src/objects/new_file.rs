//! A file that is being written: it is in memory until it is complete, and then becomes an object.

use super::bucket::Bucket;
use crate::format::names;
use bytes::Bytes;
use rekindle_kernel::durable_file::DurableFile;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::task::JoinHandle;

/// ```text
/// Filling --content, start_sync--> Complete --start_sync--> Uploading --sync--> Uploaded | Failed
/// ```
#[derive(Debug)]
enum Stage {
    Filling(Vec<u8>),
    /// Nothing more is written.
    Complete(Bytes),
    Uploading(JoinHandle<io::Result<()>>),
    Uploaded,
    Failed,
}

#[derive(Debug)]
pub(super) struct NewFile {
    bucket: Arc<Bucket>,
    name: String,
    stage: Mutex<Stage>,
}

impl NewFile {
    pub fn new(bucket: Arc<Bucket>, name: &str) -> Self {
        Self { bucket, name: name.to_owned(), stage: Mutex::new(Stage::Filling(Vec::new())) }
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the file only becomes an object if it is linked to another name.
    fn is_temporary(&self) -> bool {
        self.name.rsplit('/').next().is_some_and(|file_name| file_name.starts_with(names::NEW))
    }

    pub fn is_uploaded(&self) -> bool {
        matches!(*self.stage(), Stage::Uploaded)
    }

    /// Waits until an upload in progress has ended. Returns whether the object may exist.
    pub fn may_be_object(&self) -> bool {
        let mut stage = self.stage();
        if matches!(*stage, Stage::Uploading(_)) {
            let _ = self.finish(&mut stage);
        }
        matches!(*stage, Stage::Uploaded | Stage::Failed)
    }

    /// Returns the content. Nothing can be written any more.
    pub fn content(&self) -> io::Result<Bytes> {
        complete(&mut self.stage()).ok_or_else(|| io::Error::other("its content is not in memory any more"))
    }

    fn start(&self, stage: &mut Stage) {
        if let Some(content) = complete(stage) {
            let (bucket, name) = (self.bucket.clone(), self.name.clone());
            *stage = Stage::Uploading(self.bucket.spawn(async move { bucket.create_later(&name, content).await }));
        }
    }

    /// Waits until the upload has ended.
    fn finish(&self, stage: &mut Stage) -> io::Result<()> {
        let result = match stage {
            Stage::Uploading(upload) => self.bucket.wait(upload).unwrap_or_else(|e| Err(io::Error::other(e))),
            Stage::Uploaded => Ok(()),
            _ => Err(io::Error::other("its upload has failed before")),
        };
        *stage = if result.is_ok() { Stage::Uploaded } else { Stage::Failed };
        result
    }
}

/// Ends the writing. Returns the content, unless its upload was started.
fn complete(stage: &mut Stage) -> Option<Bytes> {
    if let Stage::Filling(content) = stage {
        *stage = Stage::Complete(Bytes::from(std::mem::take(content)));
    }
    match stage {
        Stage::Complete(content) => Some(content.clone()),
        _ => None,
    }
}

fn unsupported(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, what)
}

impl DurableFile for NewFile {
    fn read_at(&self, _target: &mut [u8], _offset: u64) -> io::Result<usize> {
        Err(unsupported("an object is read after it was opened"))
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut stage = self.stage();
        let Stage::Filling(content) = &mut *stage else { return Err(unsupported("an object cannot be changed")) };
        let end = offset as usize + bytes.len();
        if content.len() < end {
            content.resize(end, 0);
        }
        if let Some(target) = content.get_mut(offset as usize..end) {
            target.copy_from_slice(bytes);
        }
        Ok(())
    }

    fn zero(&self, _offset: u64, _len: u64, _hole: bool) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        match &mut *self.stage() {
            Stage::Filling(content) => {
                content.truncate(len as usize);
                Ok(())
            }
            _ => Err(unsupported("an object cannot be changed")),
        }
    }

    fn sync(&self) -> io::Result<()> {
        if self.is_temporary() {
            return Ok(());
        }
        let mut stage = self.stage();
        self.start(&mut stage);
        self.finish(&mut stage)
    }

    fn length(&self) -> io::Result<u64> {
        match &*self.stage() {
            Stage::Filling(content) => Ok(content.len() as u64),
            Stage::Complete(content) => Ok(content.len() as u64),
            _ => Err(unsupported("the length of an object is read after it was opened")),
        }
    }

    fn start_sync(&self) {
        if !self.is_temporary() {
            self.start(&mut self.stage());
        }
    }
}
