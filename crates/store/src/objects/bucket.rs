//! Requests to an object store. A small pool of threads sends them; callers wait.

use super::schedule::{JobId, Need, Schedule};
use super::waiting::waiting_need;
use crate::types::{now_us, utc};
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt};
use object_store::client::HttpError;
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, Error, GetOptions, GetRange, GetResult, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    PutPayload,
};
use std::future::Future;
use std::io;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::watch::{self, Receiver};
use uuid::Uuid;

/// Threads that send requests, in the whole process.
const THREADS: usize = 2;

/// Attempts to create an object whose first attempt had no clear answer. Each includes the retries of the client.
const CREATE_ATTEMPTS: u32 = 3;

/// Wait before another attempt to create an object.
const CREATE_DELAY: Duration = Duration::from_millis(50);

/// Code of S3 for a bucket that does not exist.
const NO_BUCKET: &str = "NoSuchBucket";

/// Key of the metadata that identifies the request that has created an object.
const WRITER: &str = "rekindle-writer";

/// The first bytes of an object, and its length.
#[derive(Debug, Clone)]
pub(super) struct Front {
    pub bytes: Bytes,
    pub len: u64,
}

/// The objects of a store.
#[derive(Debug)]
pub(super) struct Bucket {
    objects: Arc<dyn ObjectStore>,
    prefix: Path,
    name: String,
    runtime: &'static Handle,
    schedule: Arc<Schedule>,
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
        let runtime = runtime()?;
        Ok(Self { objects, prefix, name, runtime, schedule: Schedule::new(runtime) })
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

    /// Sends `requests` to create one empty object, concurrently. Returns how many have created it.
    ///
    /// # Errors
    /// As for [`Bucket::create`], except `AlreadyExists`.
    pub fn count_created(&self, name: &str, requests: usize) -> io::Result<usize> {
        let create = |_| self.create_later(name, Bytes::new());
        let results = self.wait(futures_util::future::join_all((0..requests).map(create)));
        results.into_iter().try_fold(0, |created, result| match result {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(created),
            other => other.map(|()| created + 1),
        })
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
                    return Err(io::Error::new(io::ErrorKind::TimedOut, io_error(e)));
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

    pub fn exists(&self, name: &str) -> io::Result<bool> {
        match self.wait(self.objects.head(&self.path(name))) {
            Ok(_) => Ok(true),
            Err(Error::NotFound { .. }) => Ok(false),
            Err(e) => Err(io_error(e)),
        }
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

    /// Starts to read the first `len` bytes of an object, or all if it is shorter.
    pub fn start_front(self: &Arc<Self>, name: &str, len: u64, need: Need) -> Pending<Front> {
        let (bucket, path) = (self.clone(), self.path(name));
        self.start(need, async move {
            let options = GetOptions { range: Some(GetRange::Bounded(0..len)), ..GetOptions::default() };
            match bucket.objects.get_opts(&path, options).await {
                Ok(found) => {
                    let size = found.meta.size;
                    Ok(Front { bytes: exactly(found, len.min(size)).await?, len: size })
                }
                Err(e @ (Error::NotFound { .. } | Error::PermissionDenied { .. } | Error::Unauthenticated { .. })) => {
                    Err(io_error(e))
                }
                // An empty object has no first byte, so the range is an error.
                Err(e) if has_answer(&e) => match bucket.objects.head(&path).await {
                    Ok(meta) if meta.size == 0 => Ok(Front { bytes: Bytes::new(), len: 0 }),
                    _ => Err(io_error(e)),
                },
                Err(e) => Err(io_error(e)),
            }
        })
    }

    /// Starts to read a range of an object. The result need not be awaited.
    pub fn start_read(self: &Arc<Self>, name: &str, range: Range<u64>, need: Need) -> Pending<Bytes> {
        let (bucket, path) = (self.clone(), self.path(name));
        self.start(need, async move {
            let options = GetOptions { range: Some(GetRange::Bounded(range.clone())), ..GetOptions::default() };
            let found = bucket.objects.get_opts(&path, options).await.map_err(io_error)?;
            exactly(found, range.end - range.start).await
        })
    }

    fn start<T: Clone + Send + Sync + 'static>(
        &self,
        need: Need,
        read: impl Future<Output = io::Result<T>> + Send + 'static,
    ) -> Pending<T> {
        let (sender, result) = watch::channel(None);
        let work = async move {
            // Without a receiver, the result is not needed any more.
            let _ = sender.send(Some(read.await.map_err(Arc::new)));
        };
        let job = Some(self.schedule.start(need, work.boxed()));
        Pending { job, result }
    }

    /// Waits for the result of a GET, which becomes as urgent as the thread's waiting is.
    pub fn wait_for<T: Clone>(&self, pending: &Pending<T>) -> io::Result<T> {
        self.promote(pending, waiting_need());
        let mut receiver = pending.result.clone();
        self.wait(async {
            // An error means that the task was cancelled.
            let _ = receiver.wait_for(Option::is_some).await;
        });
        pending.ended().unwrap_or_else(|| Err(io::ErrorKind::Interrupted.into()))
    }

    /// Makes a GET at least as urgent as `need`.
    pub fn promote<T>(&self, pending: &Pending<T>, need: Need) {
        if let Some(job) = pending.job.filter(|_| pending.result.borrow().is_none()) {
            self.schedule.promote(job, need);
        }
    }

    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }
}

/// A GET that is queued, in flight, or has ended. Any number of threads can wait for it; inspecting it affects none of them.
#[derive(Debug, Clone)]
pub(super) struct Pending<T> {
    /// `None`: it never was a request.
    job: Option<JobId>,
    result: Receiver<Option<Result<T, Arc<io::Error>>>>,
}

impl<T: Clone> Pending<T> {
    /// Returns a GET that has already ended.
    pub fn of(result: T) -> Self {
        Self { job: None, result: watch::channel(Some(Ok(result))).1 }
    }

    /// Returns the result, if it has ended.
    pub fn ended(&self) -> Option<io::Result<T>> {
        // Before the result, which is sent before the task ends.
        let is_cancelled = self.result.has_changed().is_err();
        match &*self.result.borrow() {
            Some(result) => Some(result.clone().map_err(|e| io::Error::new(e.kind(), e))),
            None => is_cancelled.then(|| Err(io::ErrorKind::Interrupted.into())),
        }
    }

    pub fn has_failed(&self) -> bool {
        self.ended().is_some_and(|result| result.is_err())
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

/// Returns whether the server has answered, so that another request may have an answer, too.
fn has_answer(error: &Error) -> bool {
    let mut causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
    !causes.any(|cause| cause.is::<HttpError>())
}

/// Returns the content of an answer of `len` bytes. A connection can end early without an error, and a server can send without
/// end.
async fn exactly(found: GetResult, len: u64) -> io::Result<Bytes> {
    // `Bytes` keeps what a vector has reserved.
    let mut content = Vec::with_capacity(usize::try_from(len).map_err(io::Error::other)?);
    let mut parts = found.into_stream();
    while let Some(part) = parts.next().await {
        content.extend_from_slice(&part.map_err(io_error)?);
        if content.len() as u64 > len {
            break;
        }
    }
    if content.len() as u64 == len {
        return Ok(content.into());
    }
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the object store's answer has another length than the request"))
}

fn io_error(error: Error) -> io::Error {
    let text = brief(&error);
    if let Some(hint) = clock_hint(&text).or_else(|| certificate_hint(&text)) {
        return io::Error::other(format!("{hint}: {text}"));
    }
    if matches!(error, Error::PermissionDenied { .. } | Error::Unauthenticated { .. }) {
        let what = format!(
            "the object store denies access; check the AWS_ variables (also those of the environment file) and the user's rights: \
             {text}"
        );
        return io::Error::other(what);
    }
    let kind = match &error {
        Error::NotFound { .. } => io::ErrorKind::NotFound,
        Error::AlreadyExists { .. } | Error::Precondition { .. } => io::ErrorKind::AlreadyExists,
        Error::InvalidPath { .. } => io::ErrorKind::InvalidInput,
        Error::NotSupported { .. } | Error::NotImplemented { .. } => io::ErrorKind::Unsupported,
        _ => io::ErrorKind::TimedOut,
    };
    io::Error::new(kind, text)
}

/// Codes of S3 for a request whose time differs too much from the server's.
const WRONG_TIME: [&str; 2] = ["RequestTimeTooSkewed", "RequestExpired"];
/// Texts of `rustls` about a certificate that is not valid at this time.
const NOT_VALID_NOW: [&str; 2] = ["certificate expired", "certificate not valid yet"];

/// Returns what to do about an error that a wrong clock can cause.
fn clock_hint(text: &str) -> Option<String> {
    let now = utc(now_us());
    if WRONG_TIME.iter().any(|code| text.contains(code)) {
        return Some(format!(
            "the object store rejects requests because its clock differs from this machine's ({now}); set the clock that is wrong"
        ));
    }
    NOT_VALID_NOW.iter().any(|part| text.contains(part)).then(|| {
        format!(
            "the object store's certificate is not valid at the time of this machine ({now}); renew it, or set this machine's clock"
        )
    })
}

/// Text of `rustls` about a certificate that it rejects.
const REJECTED_CERTIFICATE: &str = "invalid peer certificate";

/// Returns what to do about a certificate that is not the expected one.
fn certificate_hint(text: &str) -> Option<String> {
    text.contains(REJECTED_CERTIFICATE).then(|| {
        "the object store's certificate is rejected; name the file with the certificate of its authority in AWS_CA_BUNDLE, and in \
         AWS_ENDPOINT_URL the server as in its certificate"
            .to_owned()
    })
}

/// Describes an error with its causes. Of an answer of the server, it has the code only: others may repeat the request, with
/// credentials.
fn brief(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        let next_text = next.to_string();
        if !text.contains(&next_text) {
            text = format!("{text}: {next_text}");
        }
        cause = next.source();
    }
    let code = text.split_once("<Code>").and_then(|(_, rest)| Some(rest.split_once("</Code>")?.0));
    match (text.split_once('<'), code) {
        (Some((before, _)), Some(code)) => format!("{before}{code}"),
        (Some((before, _)), None) => before.trim_end().to_owned(),
        (None, _) => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_does_not_repeat_the_request_with_its_token() {
        let answer = "403 Forbidden: <?xml version=\"1.0\"?><Error><Code>SignatureDoesNotMatch</Code><Message>m</Message>\
                      <CanonicalRequest>x-amz-security-token:secret</CanonicalRequest></Error>";
        let error = Error::Generic { store: "S3", source: answer.into() };
        let text = io_error(error).to_string();
        assert!(text.contains("403 Forbidden: SignatureDoesNotMatch") && !text.contains("secret"), "{text}");
        let denied = |code: &str| {
            let source = format!("403 Forbidden: <Error><Code>{code}</Code><Token>secret</Token></Error>").into();
            io_error(Error::PermissionDenied { path: "web/log/7".into(), source }).to_string()
        };
        let text = denied("RequestTimeTooSkewed");
        assert!(text.contains("set the clock") && !text.contains("AWS_") && !text.contains("secret"), "{text}");
        let text = denied("AccessDenied");
        assert!(text.contains("AWS_") && !text.contains("clock") && !text.contains("secret"), "{text}");
        let rejected = Error::Generic { store: "S3", source: "invalid peer certificate: UnknownIssuer".into() };
        let text = io_error(rejected).to_string();
        assert!(text.contains("AWS_CA_BUNDLE") && text.contains("UnknownIssuer"), "{text}");
        let without_code = Error::Generic { store: "S3", source: "502: <html>token</html>".into() };
        let text = io_error(without_code).to_string();
        assert!(text.contains("502") && !text.contains("token"), "{text}");
    }
}
