//! Requests to an object store. A small pool of threads sends them; callers wait.

use bytes::Bytes;
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, Error, GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload,
};
use std::future::Future;
use std::io;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Semaphore;
use tokio::sync::watch::{self, Receiver};
use uuid::Uuid;

/// Threads that send requests, in the whole process.
const THREADS: usize = 2;

/// Attempts to create an object whose first attempt had no clear answer. Each includes the retries of the client.
const CREATE_ATTEMPTS: u32 = 3;

/// Wait before another attempt to create an object.
const CREATE_DELAY: Duration = Duration::from_millis(50);

/// Limit of the GETs of ranges that are in flight.
pub(crate) const MAX_PARALLEL_READS: usize = 8;

/// Code of S3 for a bucket that does not exist.
const NO_BUCKET: &str = "NoSuchBucket";

/// Key of the metadata that identifies the request that has created an object.
const WRITER: &str = "rekindle-writer";

/// The first bytes of an object, and its length.
pub(super) struct Front {
    pub bytes: Bytes,
    pub len: u64,
}

/// The result of a GET, for all that wait for it.
pub(super) type ReadResult = Result<Bytes, Arc<io::Error>>;

/// The objects of a store.
#[derive(Debug)]
pub(super) struct Bucket {
    objects: Arc<dyn ObjectStore>,
    prefix: Path,
    name: String,
    runtime: &'static Handle,
    /// Permits to send GETs of ranges.
    reads: Semaphore,
}

/// Returns the pool of threads that send requests.
fn runtime() -> io::Result<&'static Handle> {
    static RUNTIME: OnceLock<Option<Runtime>> = OnceLock::new();
    let start = || {
        let build =
            Builder::new_multi_thread().worker_threads(THREADS).thread_name("object store").enable_all().build();
        build.inspect_err(|e| tracing::error!("cannot start the threads for an object store: {e}")).ok()
    };
    let started = RUNTIME.get_or_init(start).as_ref();
    started.map(Runtime::handle).ok_or_else(|| io::Error::other("its threads cannot be started"))
}

/// What is known after an attempt to create an object.
enum Created {
    Ours,
    /// Another request has created it before.
    Taken,
    /// The object did not exist when it was read after the attempt.
    Unknown(Error),
}

impl Bucket {
    pub fn new(objects: Arc<dyn ObjectStore>, prefix: &str, name: String) -> io::Result<Self> {
        let prefix = Path::parse(prefix).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
        Ok(Self { objects, prefix, name, runtime: runtime()?, reads: Semaphore::new(MAX_PARALLEL_READS) })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Waits for `work`.
    pub fn wait<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// Does `work` in the background.
    pub fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> tokio::task::JoinHandle<T> {
        self.runtime.spawn(work)
    }

    fn path(&self, name: &str) -> Path {
        let parts = self.prefix.parts().chain(name.split('/').filter(|part| !part.is_empty()).map(Into::into));
        parts.collect()
    }

    /// Creates an object if there is none of this name. Returns when it is durable.
    ///
    /// # Errors
    /// `AlreadyExists`. `TimedOut`: the object may or may not exist, now or later.
    pub fn create(&self, name: &str, content: Bytes) -> io::Result<()> {
        self.wait(self.create_later(name, content))
    }

    /// Does the same as [`Bucket::create`].
    pub async fn create_later(&self, name: &str, content: Bytes) -> io::Result<()> {
        let path = self.path(name);
        // The id shows whether an existing object is the result of this call, also if the answer was lost.
        let writer = Uuid::new_v4().to_string();
        let mut attempts = 1;
        loop {
            match self.try_create(&path, &content, &writer).await {
                Created::Ours => return Ok(()),
                Created::Taken => return Err(io::ErrorKind::AlreadyExists.into()),
                Created::Unknown(e) if attempts == CREATE_ATTEMPTS || !may_pass(&e) => {
                    // Even a clear rejection can follow an attempt of the client that had no answer.
                    return Err(io::Error::new(io::ErrorKind::TimedOut, e));
                }
                Created::Unknown(_) => {
                    tokio::time::sleep(CREATE_DELAY * attempts).await;
                    attempts += 1;
                }
            }
        }
    }

    async fn try_create(&self, path: &Path, content: &Bytes, writer: &str) -> Created {
        let attributes: Attributes = [(Attribute::Metadata(WRITER.into()), writer.to_owned())].into_iter().collect();
        let options = PutOptions { mode: PutMode::Create, attributes, ..PutOptions::default() };
        let payload = PutPayload::from_bytes(content.clone());
        let Err(error) = self.objects.put_opts(path, payload, options).await else { return Created::Ours };
        match self.writer(path).await {
            Ok(found) if found.as_deref() == Some(writer) => Created::Ours,
            Ok(_) => Created::Taken,
            Err(_) => Created::Unknown(error),
        }
    }

    /// Reads the id of the request that has created an object.
    async fn writer(&self, path: &Path) -> Result<Option<String>, Error> {
        let found = self.objects.get_opts(path, GetOptions { head: true, ..GetOptions::default() }).await?;
        Ok(found.attributes.get(&Attribute::Metadata(WRITER.into())).map(|writer| writer.to_string()))
    }

    /// Creates one object and removes another, concurrently. Errors are ignored.
    pub fn create_and_remove(&self, created: &str, content: Bytes, removed: &str) {
        let removed = self.path(removed);
        self.wait(async {
            let _ =
                futures_util::future::join(self.create_later(created, content), self.objects.delete(&removed)).await;
        });
    }

    pub fn remove(&self, name: &str) -> io::Result<()> {
        let path = self.path(name);
        match self.wait(self.objects.delete(&path)) {
            Err(Error::NotFound { .. }) => Err(io::ErrorKind::NotFound.into()),
            other => other.map_err(io_error),
        }
    }

    /// Returns names and lengths of the objects in directory `name`, and the names of its directories.
    pub fn list(&self, name: &str) -> io::Result<Vec<(String, u64)>> {
        let directory = self.path(name);
        let prefix = (!directory.as_ref().is_empty()).then_some(&directory);
        let listed = self.wait(self.objects.list_with_delimiter(prefix)).map_err(|e| match e {
            e if e.to_string().contains(NO_BUCKET) => {
                let what = "the bucket does not exist; create it with the tools of the object store";
                io::Error::new(io::ErrorKind::NotFound, what)
            }
            e => io_error(e),
        })?;
        let files = listed.objects.into_iter().map(|object| (object.location, object.size));
        let directories = listed.common_prefixes.into_iter().map(|directory| (directory, 0));
        Ok(files.chain(directories).filter_map(|(path, len)| Some((path.filename()?.to_owned(), len))).collect())
    }

    /// Reads the first `len` bytes of an object, or all if it is shorter.
    pub fn front(&self, name: &str, len: u64) -> io::Result<Front> {
        let path = self.path(name);
        self.wait(async {
            let options = GetOptions { range: Some(GetRange::Bounded(0..len)), ..GetOptions::default() };
            match self.objects.get_opts(&path, options).await {
                Ok(found) => {
                    let len = found.meta.size;
                    Ok(Front { bytes: found.bytes().await.map_err(io_error)?, len })
                }
                Err(e @ (Error::NotFound { .. } | Error::PermissionDenied { .. } | Error::Unauthenticated { .. })) => {
                    Err(io_error(e))
                }
                // An empty object has no first byte, so the range is an error.
                Err(e) => match self.objects.head(&path).await {
                    Ok(meta) if meta.size == 0 => Ok(Front { bytes: Bytes::new(), len: 0 }),
                    _ => Err(io_error(e)),
                },
            }
        })
    }

    /// Starts to read a range of an object. Returns where the result will be. It need not be awaited.
    pub fn start_read(self: &Arc<Self>, name: &str, range: Range<u64>) -> Receiver<Option<ReadResult>> {
        let (bucket, path) = (self.clone(), self.path(name));
        let (sender, receiver) = watch::channel(None);
        self.runtime.spawn(async move {
            let _permit = bucket.reads.acquire().await;
            let read = bucket.objects.get_range(&path, range).await;
            // Without a receiver, the result is not needed any more.
            let _ = sender.send(Some(read.map_err(|e| Arc::new(io_error(e)))));
        });
        receiver
    }
}

/// Returns whether another attempt can have another result.
fn may_pass(error: &Error) -> bool {
    match error {
        // S3 answers 409 to a conditional PUT if another request for the object is in progress.
        Error::AlreadyExists { .. } | Error::Precondition { .. } => true,
        Error::PermissionDenied { .. }
        | Error::Unauthenticated { .. }
        | Error::NotFound { .. }
        | Error::InvalidPath { .. }
        | Error::NotSupported { .. }
        | Error::NotImplemented { .. } => false,
        _ => true,
    }
}

fn io_error(error: Error) -> io::Error {
    if matches!(error, Error::PermissionDenied { .. } | Error::Unauthenticated { .. }) {
        let what = format!("the object store denies access; check the AWS_ variables and the user's rights: {error}");
        return io::Error::other(what);
    }
    let kind = match &error {
        Error::NotFound { .. } => io::ErrorKind::NotFound,
        Error::AlreadyExists { .. } | Error::Precondition { .. } => io::ErrorKind::AlreadyExists,
        Error::InvalidPath { .. } => io::ErrorKind::InvalidInput,
        Error::NotSupported { .. } | Error::NotImplemented { .. } => io::ErrorKind::Unsupported,
        _ => io::ErrorKind::TimedOut,
    };
    io::Error::new(kind, error)
}
