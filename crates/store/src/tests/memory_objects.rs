//! An object store in memory, whose requests can fail, lose their answer, or take time.

use super::disk::TestDisk;
use crate::location::Storage;
use crate::objects::ObjectDisk;
use async_trait::async_trait;
use futures_util::stream::BoxStream;
use futures_util::{FutureExt, StreamExt, poll};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use rekindle_testing::crash_disk::Meanwhile;
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Semaphore;

/// What happens to a request that changes the object store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// It is carried out, but has no answer.
    LostAnswer,
    /// It is carried out when [`MemoryObjects::carry_out_late_request`] is called, and has no answer.
    Late,
    /// It and all later ones fail and are not carried out.
    Outage,
}

/// A request that is carried out late.
type LateRequest = (Path, PutPayload, PutOptions);

#[derive(Default)]
struct Faults {
    /// Requests that are still carried out normally before the fault.
    after: usize,
    fault: Option<Fault>,
    late: Option<LateRequest>,
    interruption: Option<(usize, Meanwhile)>,
    /// Number of requests that list objects.
    lists: usize,
    reads: Reads,
    /// If set, each GET needs a permit to end.
    gate: Option<Arc<Semaphore>>,
}

/// GETs of content.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Reads {
    pub(super) count: usize,
    pub(super) in_flight: usize,
    pub(super) most_in_flight: usize,
    /// Time that each takes.
    pub(super) latency: Duration,
    /// GETs that fail from now on.
    pub(super) failing: usize,
    /// GETs from now on whose answer ends too early.
    pub(super) short: usize,
    /// GETs from now on whose answer is longer than it states.
    pub(super) long: usize,
}

/// An object store in memory. Clones share the content and the faults; [`TestDisk::handle`] shares only the content.
#[derive(Clone, Default)]
pub struct MemoryObjects {
    objects: Arc<InMemory>,
    faults: Arc<Mutex<Faults>>,
    ignores_conditions: bool,
    /// Conditions are checked some time before the write.
    is_slow_to_write: bool,
}

impl fmt::Debug for MemoryObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MemoryObjects")
    }
}

impl fmt::Display for MemoryObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("memory")
    }
}

fn no_answer() -> Error {
    Error::Generic { store: "memory", source: "no answer".into() }
}

impl MemoryObjects {
    pub(super) fn fail_after(&self, after: usize, fault: Fault) {
        let mut faults = self.faults.lock().unwrap();
        (faults.after, faults.fault) = (after, Some(fault));
    }

    /// Ends the faults. Returns whether there was none yet.
    pub(super) fn stop_failing(&self) -> bool {
        let mut faults = self.faults.lock().unwrap();
        match faults.fault.take() {
            Some(Fault::Outage) => faults.after > 0,
            Some(_) => true,
            None => false,
        }
    }

    /// Returns a server that ignores the conditions of a PUT.
    pub(super) fn without_conditions(self) -> Self {
        Self { ignores_conditions: true, ..self }
    }

    /// Returns a server that checks a condition and writes in two steps.
    pub(super) fn without_atomic_conditions(self) -> Self {
        Self { is_slow_to_write: true, ..self }
    }

    pub(super) fn has_late_request(&self) -> bool {
        self.faults.lock().unwrap().late.is_some()
    }

    /// Returns the objects themselves, without faults.
    pub(super) fn contents(&self) -> &InMemory {
        &self.objects
    }

    pub(super) fn carry_out_late_request(&self) -> Option<Result<PutResult>> {
        let (path, payload, options) = self.faults.lock().unwrap().late.take()?;
        self.objects.put_opts(&path, payload, options).now_or_never()
    }

    /// Changes the counters of GETs, and returns them as they were after that.
    pub(super) fn count_reads(&self, change: impl FnOnce(&mut Reads)) -> Reads {
        let mut faults = self.faults.lock().unwrap();
        change(&mut faults.reads);
        faults.reads
    }

    /// From now on, no GET ends without [`Self::let_reads_end`].
    pub(super) fn hold_reads(&self) {
        self.faults.lock().unwrap().gate = Some(Arc::new(Semaphore::new(0)));
    }

    /// Lets the next `count` of the held GETs end.
    pub(super) fn let_reads_end(&self, count: usize) {
        self.faults.lock().unwrap().gate.as_ref().unwrap().add_permits(count);
    }

    /// Lets all GETs end.
    pub(super) fn stop_holding_reads(&self) {
        let gate = self.faults.lock().unwrap().gate.take().unwrap();
        gate.add_permits(Semaphore::MAX_PERMITS / 2);
    }

    pub(super) fn lists(&self) -> usize {
        self.faults.lock().unwrap().lists
    }

    /// Counts a request that changes something. Returns its fault.
    fn next_fault(&self) -> Option<Fault> {
        let work = {
            let mut faults = self.faults.lock().unwrap();
            match &mut faults.interruption {
                Some((0, _)) => faults.interruption.take().map(|(_, work)| work),
                Some((after, _)) => {
                    *after -= 1;
                    None
                }
                None => None,
            }
        };
        if let Some(work) = work {
            // The work waits for requests of its own.
            std::thread::scope(|scope| drop(scope.spawn(work).join()));
        }
        let mut faults = self.faults.lock().unwrap();
        faults.fault?;
        if faults.after > 0 {
            faults.after -= 1;
            return None;
        }
        match faults.fault {
            Some(Fault::Outage) => Some(Fault::Outage),
            _ => faults.fault.take(),
        }
    }
}

#[async_trait]
impl ObjectStore for MemoryObjects {
    async fn put_opts(&self, path: &Path, payload: PutPayload, mut options: PutOptions) -> Result<PutResult> {
        if self.ignores_conditions {
            options.mode = PutMode::Overwrite;
        }
        if self.is_slow_to_write && options.mode == PutMode::Create {
            if let Ok(found) = self.objects.head(path).await {
                return Err(Error::AlreadyExists { path: found.location.to_string(), source: "it exists".into() });
            }
            tokio::task::yield_now().await;
            options.mode = PutMode::Overwrite;
        }
        match self.next_fault() {
            None => self.objects.put_opts(path, payload, options).await,
            Some(Fault::LostAnswer) => {
                let _ = self.objects.put_opts(path, payload, options).await;
                Err(no_answer())
            }
            Some(Fault::Late) => {
                self.faults.lock().unwrap().late = Some((path.clone(), payload, options));
                // The client tries again, but from now on no request gets through.
                self.fail_after(0, Fault::Outage);
                Err(no_answer())
            }
            Some(Fault::Outage) => Err(no_answer()),
        }
    }

    async fn put_multipart_opts(&self, path: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.objects.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        if options.head {
            return self.objects.get_opts(path, options).await;
        }
        let gate = self.faults.lock().unwrap().gate.clone();
        let mut permit = pin!(async {
            if let Some(gate) = gate {
                gate.acquire().await.unwrap().forget()
            }
        });
        // GETs get their permits in the order in which they are counted.
        let permitted = poll!(&mut permit);
        let Reads { latency, failing, short, long, .. } = self.count_reads(|reads| {
            reads.count += 1;
            reads.in_flight += 1;
            reads.most_in_flight = reads.most_in_flight.max(reads.in_flight);
        });
        if permitted.is_pending() {
            permit.await;
        }
        if !latency.is_zero() {
            tokio::time::sleep(latency).await;
        }
        self.count_reads(|reads| {
            reads.in_flight -= 1;
            reads.failing = reads.failing.saturating_sub(1);
            reads.short = reads.short.saturating_sub(1);
            reads.long = reads.long.saturating_sub(1);
        });
        if failing > 0 {
            return Err(no_answer());
        }
        let mut found = self.objects.get_opts(path, options).await?;
        if short > 0 || long > 0 {
            let GetResult { meta, range, attributes, extensions, .. } = &found;
            let (meta, range, attributes, extensions) =
                (meta.clone(), range.clone(), attributes.clone(), extensions.clone());
            let whole = found.bytes().await?;
            let parts = if short > 0 { vec![whole.slice(..whole.len() / 2)] } else { vec![whole.clone(), whole] };
            let payload = GetResultPayload::Stream(futures_util::stream::iter(parts.into_iter().map(Ok)).boxed());
            found = GetResult { payload, meta, range, attributes, extensions };
        }
        Ok(found)
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        match self.next_fault() {
            Some(Fault::Outage) => futures_util::stream::iter([Err(no_answer())]).boxed(),
            _ => self.objects.delete_stream(paths),
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.objects.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.faults.lock().unwrap().lists += 1;
        self.objects.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.objects.copy_opts(from, to, options).await
    }
}

impl TestDisk for MemoryObjects {
    const COMMIT_STEPS: usize = 4;
    const COMPACTION_STEPS: usize = 5;

    fn shared(&self) -> Storage {
        let objects = Arc::new(self.clone());
        Arc::new(ObjectDisk::with(objects, "site/web", "s3://memory/site/web".into()).unwrap()).into()
    }

    fn handle(&self) -> Self {
        Self { faults: Arc::default(), ..self.clone() }
    }

    fn interrupt(&self, after: usize, work: Meanwhile) {
        self.faults.lock().unwrap().interruption = Some((after, work));
    }

    fn names(&self) -> Vec<String> {
        let listed: Vec<_> = self.objects.list(None).collect().now_or_never().unwrap();
        let prefix = "site/web/";
        listed
            .into_iter()
            .map(|meta| meta.unwrap().location.as_ref().strip_prefix(prefix).unwrap().to_owned())
            .collect()
    }
}
