//! Stores in an object store in memory: the tests of the store in general, and what is particular to requests: lost
//! answers, requests that are carried out late, and servers that ignore conditions.

use super::disk::TestDisk;
use super::model::{Change, Model, content, image, open, open_as, vm};
use super::{epoch, guest, history};
use crate::directory::StoreDirectory;
use crate::engine::{Engine, EngineSettings};
use crate::error::StoreError;
use crate::format::names;
use crate::image::LocalImage;
use crate::listing::list;
use crate::location::Storage;
use crate::objects::schedule::Need;
use crate::objects::{CHUNK_BYTES, CHUNKS_PER_GET, MAX_IN_FLIGHT, ObjectDisk};
use crate::types::Owner;
use crate::verify::verify;
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{FutureExt, StreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use proptest::prelude::*;
use rekindle_pages::{BlockId, PAGE_SIZE, Page, PageNo};
use rekindle_testing::crash_disk::Meanwhile;
use rustix::event::{PollFd, PollFlags, poll};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What happens to a request that changes the object store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
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
}

/// GETs of content.
#[derive(Debug, Clone, Copy, Default)]
struct Reads {
    count: usize,
    in_flight: usize,
    most_in_flight: usize,
    /// Time that each takes.
    latency: Duration,
    /// GETs that fail from now on.
    failing: usize,
    /// GETs from now on whose answer ends too early.
    short: usize,
    /// GETs from now on whose answer is longer than it states.
    long: usize,
}

/// An object store in memory. Clones share the content and the faults; [`TestDisk::handle`] shares only the content.
#[derive(Clone, Default)]
pub struct MemoryObjects {
    objects: Arc<InMemory>,
    faults: Arc<Mutex<Faults>>,
    ignores_conditions: bool,
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
    fn fail_after(&self, after: usize, fault: Fault) {
        let mut faults = self.faults.lock().unwrap();
        (faults.after, faults.fault) = (after, Some(fault));
    }

    /// Ends the faults. Returns whether there was none yet.
    fn stop_failing(&self) -> bool {
        let mut faults = self.faults.lock().unwrap();
        match faults.fault.take() {
            Some(Fault::Outage) => faults.after > 0,
            Some(_) => true,
            None => false,
        }
    }

    fn carry_out_late_request(&self) -> Option<Result<PutResult>> {
        let (path, payload, options) = self.faults.lock().unwrap().late.take()?;
        self.objects.put_opts(&path, payload, options).now_or_never()
    }

    /// Changes the counters of GETs, and returns them as they were after that.
    fn count_reads(&self, change: impl FnOnce(&mut Reads)) -> Reads {
        let mut faults = self.faults.lock().unwrap();
        change(&mut faults.reads);
        faults.reads
    }

    fn lists(&self) -> usize {
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
        let Reads { latency, failing, short, long, .. } = self.count_reads(|reads| {
            reads.count += 1;
            reads.in_flight += 1;
            reads.most_in_flight = reads.most_in_flight.max(reads.in_flight);
        });
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

fn change(n: u64) -> Change {
    let pages = (0..14u64).map(|i| (0usize, (n * 5 + i * (1 + n % 3)) % 30, 1 + (n + i) % 9)).collect();
    Change { blocks: vec![("ram", 30), ("bios", 3)], pages }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_store_of_objects_holds_what_the_model_holds(
        keep in 1u32..4, steps in proptest::collection::vec(history::step(), 1..40),
    ) {
        history::run(&MemoryObjects::default(), keep, steps);
    }

    #[test]
    fn only_the_host_that_began_it_last_commits_to_objects(steps in guest::steps()) {
        guest::play::<MemoryObjects>(steps);
    }
}

#[test]
fn an_image_is_read_correctly_or_reported_as_removed_although_removed_objects_cannot_be_read() {
    history::read_lazily(&MemoryObjects::default());
}

#[test]
fn previous_owners_are_rejected() {
    epoch::commit_after_another_claim::<MemoryObjects>();
    epoch::claim_conditionally::<MemoryObjects>();
}

#[test]
fn an_owner_that_stalls_before_any_request_of_a_commit_spoils_nothing() {
    epoch::stall_in_a_commit::<MemoryObjects>();
}

#[test]
fn an_owner_that_stalls_before_any_request_of_a_compaction_deletes_nothing_that_is_needed() {
    epoch::stall_in_a_compaction::<MemoryObjects>();
}

#[test]
fn two_processes_that_create_a_store_of_objects_concurrently_get_the_same_one() {
    epoch::create_concurrently::<MemoryObjects>();
}

/// Returns a store with three checkpoints, and its model.
fn with_checkpoints() -> (MemoryObjects, Model) {
    let disk = MemoryObjects::default();
    let mut model = Model { keep: 2, ..Model::default() };
    let mut engine = open(&disk, 2).unwrap();
    for n in 0..3 {
        model.commit(&mut engine, &change(n)).unwrap();
        engine.remove_obsolete_files();
    }
    (disk, model)
}

#[test]
fn a_request_whose_answer_is_lost_anywhere_counts_as_done() {
    for after in 0.. {
        let (disk, mut model) = with_checkpoints();
        disk.fail_after(after, Fault::LostAnswer);
        let mut engine = open(&disk, 2).unwrap_or_else(|e| panic!("claiming, request {after}: {e}"));
        model.commit(&mut engine, &change(3)).unwrap_or_else(|e| panic!("request {after}: {e}"));
        engine.settle().unwrap();
        engine.remove_obsolete_files();
        model.check(&disk);
        if disk.stop_failing() {
            assert!(after > MemoryObjects::COMMIT_STEPS, "it has more requests than {after}");
            break;
        }
    }
}

/// The process or the server ends before any request. The next owner finds the newest checkpoint or the one before.
#[test]
fn an_outage_before_any_request_leaves_the_previous_checkpoint() {
    for after in 0.. {
        let (disk, mut model) = with_checkpoints();
        let writer = disk.handle();
        writer.fail_after(after, Fault::Outage);
        let before = model.clone();
        let committed = open(&writer, 2).and_then(|mut engine| {
            let committed = model.commit(&mut engine, &change(3));
            engine.remove_obsolete_files();
            committed
        });
        let is_complete = writer.stop_failing();
        let mut next = open(&disk, 2).unwrap();
        if let Err(e) = committed {
            assert!(!is_complete, "{e}");
            model = before;
        }
        assert_eq!(next.newest(), model.newest(), "before request {after}");
        model.check(&disk);
        model.commit(&mut next, &change(4)).unwrap();
        next.remove_obsolete_files();
        model.check(&disk);
        let used: u64 = list(&StoreDirectory::open(disk.shared(), None).unwrap()).unwrap().disk;
        assert!(used > 0);
        if is_complete {
            assert!(after > MemoryObjects::COMMIT_STEPS, "it has more requests than {after}");
            break;
        }
    }
}

/// A request without an answer is carried out after the client has stopped waiting for it.
#[test]
fn a_request_that_is_carried_out_late_changes_nothing_that_counts() {
    for next_owner_is_first in [false, true] {
        let mut commits_carried_out = 0;
        for after in 0.. {
            let (disk, mut model) = with_checkpoints();
            let writer = disk.handle();
            let mut engine = open(&writer, 2).unwrap();
            writer.fail_after(after, Fault::Late);
            let committed = model.commit(&mut engine, &change(3));
            engine.remove_obsolete_files();
            let is_complete = writer.faults.lock().unwrap().late.is_none();
            writer.stop_failing();
            if is_complete {
                assert!(after > 0, "a commit has more requests than {after}");
                break;
            }
            let late = |disk: &MemoryObjects| disk.carry_out_late_request().unwrap().is_ok();
            if committed.is_err() {
                // An owner whose entry may still appear cannot commit: the next checkpoint would have the same number.
                let _ = model.commit(&mut engine, &change(3));
            }
            if next_owner_is_first {
                let mut next = open(&disk, 2).unwrap();
                late(&writer);
                let newest = next.newest();
                assert!(newest == model.newest(), "request {after}: {newest}");
                model.commit(&mut next, &change(4)).unwrap();
                next.remove_obsolete_files();
            } else {
                late(&writer);
                drop(engine);
                let mut next = open(&disk, 2).unwrap();
                if next.newest() > model.newest() {
                    // The request was the commit.
                    commits_carried_out += 1;
                    let expected = model.after(&change(3));
                    model.checkpoints.insert(next.newest(), expected);
                    model.checkpoints.pop_first();
                }
                assert_eq!(next.newest(), model.newest(), "request {after}");
                model.check(&disk);
                model.commit(&mut next, &change(4)).unwrap();
                next.remove_obsolete_files();
            }
            model.check(&disk);
        }
        assert_eq!(commits_carried_out, usize::from(!next_owner_is_first));
    }
}

#[test]
fn a_server_that_ignores_conditions_is_rejected() {
    let disk = MemoryObjects { ignores_conditions: true, ..MemoryObjects::default() };
    let e = StoreDirectory::init(&disk.shared().disk).unwrap_err();
    assert!(std::error::Error::source(&e).unwrap().to_string().contains("ignores the condition"), "{e}");
    // Nothing that counts was written.
    assert_eq!(disk.names(), [names::EXCLUSIVE]);
    let good = MemoryObjects::default();
    drop(open(&good, 2).unwrap());
    // The server was replaced by one that ignores conditions: no process may claim the store.
    let bad = MemoryObjects { ignores_conditions: true, ..good.handle() };
    let before = bad.names();
    assert!(open(&bad, 2).is_err());
    assert_eq!(bad.names(), before);
}

#[test]
fn an_unused_store_is_created_once() {
    let disk = MemoryObjects::default();
    StoreDirectory::init(&disk.shared().disk).unwrap();
    let again = StoreDirectory::init(&disk.shared().disk);
    assert!(matches!(again, Err(StoreError::Exists { vm: None, .. })));
    drop(open(&disk, 2).unwrap());
    assert!(!disk.names().contains(&names::UNUSED.to_owned()));
    assert!(matches!(StoreDirectory::init(&disk.shared().disk), Err(StoreError::Exists { vm: Some(_), .. })));
}

#[test]
fn a_prefix_with_other_objects_is_rejected() {
    let disk = MemoryObjects::default();
    let other = Path::from("site/web/photos/1.jpeg");
    disk.objects
        .put_opts(&other, Bytes::from_static(b"x").into(), PutOptions::default())
        .now_or_never()
        .unwrap()
        .unwrap();
    let e = StoreDirectory::init(&disk.shared().disk).unwrap_err();
    assert!(matches!(&e, StoreError::NotEmpty { found, .. } if found == "photos"), "{e}");
    assert_eq!(disk.names(), ["photos/1.jpeg"]);
}

/// Every commit leaves a segment, because objects cannot be appended to.
#[test]
fn small_segments_are_merged_and_a_commit_lists_nothing() {
    let disk = MemoryObjects::default();
    let mut model = Model { keep: 2, ..Model::default() };
    let mut engine = open(&disk, 2).unwrap();
    let mut most_segments = 0;
    for n in 0..400 {
        let lists = disk.lists();
        let change = Change { blocks: vec![("ram", 2000)], pages: vec![(0, n * 5 % 2000, 1 + n % 9)] };
        model.commit(&mut engine, &change).unwrap();
        assert_eq!(disk.lists(), lists);
        engine.remove_obsolete_files();
        while engine.work() {}
        let segments = disk.names().into_iter().filter(|name| name.starts_with(names::SEGMENTS)).count();
        most_segments = most_segments.max(segments);
    }
    assert!((60..100).contains(&most_segments), "{most_segments}");
    model.check(&disk);
    drop(engine);
    let verified = verify(&StoreDirectory::open(disk.shared(), None).unwrap(), |_, _| {}).unwrap();
    assert!(verified.is_good() && verified.warnings.is_empty(), "{verified:?}");
}

#[test]
fn of_owners_that_claim_concurrently_each_has_an_epoch_of_its_own() {
    let (disk, model) = with_checkpoints();
    let claim = |n: usize| open_as(&disk, 2, &format!("race {n}"), None).map(|engine| engine.owner().epoch);
    let mut epochs: Vec<u64> = std::thread::scope(|scope| {
        let racers: Vec<_> = (0..8).map(|n| scope.spawn(move || claim(n).unwrap())).collect();
        racers.into_iter().map(|racer| racer.join().unwrap()).collect()
    });
    epochs.sort_unstable();
    assert_eq!(epochs, (2..10).collect::<Vec<u64>>());
    // Of those with a condition, at most one succeeds.
    let winners = std::thread::scope(|scope| {
        let conditional = || open_as(&disk, 2, "race", Some(9)).is_ok();
        let racers: Vec<_> = (0..8).map(|_| scope.spawn(conditional)).collect();
        racers.into_iter().map(|racer| racer.join().unwrap()).filter(|won| *won).count()
    });
    assert_eq!(winners, 1);
    model.check(&disk);
}

#[test]
fn an_object_is_read_in_any_pieces() {
    let disk = MemoryObjects::default().shared().disk;
    let content: Vec<u8> = (0..3_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let file = disk.create("segments/x").unwrap();
    file.write_at(&content[1000..], 1000).unwrap();
    file.write_at(&content[..1000], 0).unwrap();
    file.start_sync();
    file.sync().unwrap();
    assert_eq!(file.write_at(b"x", 0).unwrap_err().kind(), io::ErrorKind::Unsupported);
    let file = disk.open("segments/x").unwrap();
    assert_eq!(file.length().unwrap(), 3_000_000);
    for (offset, len) in
        [(0, 10), (262_140, 10), (2_999_990, 100), (3_000_000, 5), (1_000_000, 1_500_000), (0, 3_000_000), (4 << 20, 1)]
    {
        let mut found = vec![0; len];
        let count = file.read_at(&mut found, offset as u64).unwrap();
        let expected = content.get(offset..).unwrap_or_default();
        let expected = &expected[..expected.len().min(len)];
        assert!(found[..count] == *expected, "{offset} {len}");
    }
    assert_eq!(disk.create("segments/x").unwrap().sync().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    disk.remove("segments/x").unwrap();
    assert_eq!(disk.open("segments/x").unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(vm().name, "web");
}

/// Reads all pages as a pager does, one after the other, after the next ones were announced. Returns their number.
fn read_like_a_pager(image: &LocalImage, mut check: impl FnMut(PageNo, &Page)) -> u64 {
    let order: Vec<_> = image.hot().unwrap().collect();
    let mut found = [0; PAGE_SIZE];
    let mut announced = 0;
    let arrivals = image.arrivals().unwrap();
    for (number, (block, page)) in order.iter().enumerate() {
        if number % 64 == 0 {
            announced = announced.max(number);
            announced += image.start_reads(&order[announced..order.len().min(announced + 1024)]).unwrap();
        }
        while !image.read_page_if_ready((*block, *page), &mut found, Need::Background).unwrap() {
            poll(&mut [PollFd::new(&arrivals, PollFlags::IN)], None).unwrap();
            rustix::io::read(arrivals, &mut [0; 8]).unwrap();
        }
        check(*page, &found);
    }
    order.len() as u64
}

/// Returns a store with one checkpoint of a block of `pages` pages that cannot be compressed.
fn with_full_checkpoint(pages: u64, segment: u64) -> MemoryObjects {
    let disk = MemoryObjects::default();
    let settings = EngineSettings { keep: 2, segment, create: true };
    let mut engine = Engine::open(disk.shared(), &vm(), &Owner::here("test"), None, settings).unwrap();
    let mut model = Model { keep: 2, ..Model::default() };
    // Each odd kind of content is another page that cannot be compressed.
    let written = (0..pages).map(|page| (0, page, 2 * page + 1)).collect();
    model.commit(&mut engine, &Change { blocks: vec![("ram", pages)], pages: written }).unwrap();
    engine.settle().unwrap();
    disk
}

/// The time until all pages are read must not be the latency of the server times the pages.
#[test]
fn pages_are_read_with_few_requests_of_which_several_are_in_flight() {
    // Twice what the cache holds.
    const PAGES: u64 = 16_000;
    const SEGMENT_BYTES: u64 = 8 << 20;
    let disk = with_full_checkpoint(PAGES, SEGMENT_BYTES);
    let opened = image(&disk, None).unwrap();
    let before = disk.count_reads(|reads| reads.latency = Duration::from_millis(2));
    let read = read_like_a_pager(&opened, |page, found| assert!(*found == content(2 * page.0 + 1), "{page}"));
    assert_eq!(read, PAGES);
    let after = disk.count_reads(|_| ());
    let (stored, requests) = (PAGES * PAGE_SIZE as u64, (after.count - before.count) as u64);
    // In each object some requests are smaller: at its end, and where a directory was read before.
    let smaller = 4 * stored.div_ceil(SEGMENT_BYTES);
    assert!(requests <= stored.div_ceil(CHUNKS_PER_GET * CHUNK_BYTES) + smaller, "{requests} GETs");
    // Opening an object is a GET of its own.
    assert!((3..=MAX_IN_FLIGHT + 1).contains(&after.most_in_flight), "{after:?}");

    // Pages that are not near each other, without an announcement.
    let spread: Vec<_> = (0..PAGES).step_by(500).map(|page| (BlockId(0), PageNo(page))).collect();
    let opened = image(&disk, None).unwrap();
    disk.count_reads(|reads| reads.most_in_flight = 0);
    opened.read_stored(&spread).unwrap();
    let after = disk.count_reads(|_| ());
    assert!((3..=MAX_IN_FLIGHT).contains(&after.most_in_flight), "{after:?}");
}

#[test]
fn a_chunk_that_could_not_be_read_ahead_is_read_when_it_is_needed() {
    let disk = MemoryObjects::default();
    let shared = disk.shared();
    let content: Vec<u8> = (0..4_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let file = shared.disk.create("segments/x").unwrap();
    file.write_at(&content, 0).unwrap();
    file.sync().unwrap();
    let file = shared.disk.open("segments/x").unwrap();
    let mut found = vec![0; CHUNK_BYTES as usize];
    // Opening has read the first chunk. The GETs of the second one and of those after it fail.
    disk.count_reads(|reads| reads.failing = 3);
    let mut failed = 0;
    for chunk in 0..4_000_000 / CHUNK_BYTES {
        let offset = chunk * CHUNK_BYTES;
        while let Err(e) = file.read_at(&mut found, offset) {
            assert_eq!(e.kind(), io::ErrorKind::TimedOut);
            failed += 1;
            assert!(failed <= 3, "an error is kept");
        }
        assert!(found == content[offset as usize..][..found.len()], "chunk {chunk}");
    }
    assert!(failed > 0);
}

#[test]
fn an_answer_of_another_length_is_an_error_and_is_not_kept() {
    let disk = MemoryObjects::default();
    let shared = disk.shared();
    let content: Vec<u8> = (0..4 * CHUNK_BYTES).map(|n| (n / 1000) as u8).collect();
    let file = shared.disk.create("segments/x").unwrap();
    file.write_at(&content, 0).unwrap();
    file.sync().unwrap();
    for change in [|reads: &mut Reads| reads.short = 1, |reads: &mut Reads| reads.long = 1] {
        disk.count_reads(change);
        assert_eq!(shared.disk.open("segments/x").unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        let file = shared.disk.open("segments/x").unwrap();
        disk.count_reads(change);
        let mut found = vec![0; 1000];
        let at = 2 * CHUNK_BYTES;
        assert_eq!(file.read_at(&mut found, at).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(file.read_at(&mut found, at).unwrap(), 1000);
        assert!(found == content[at as usize..at as usize + 1000]);
    }
}

/// Threads that only inspect a GET must not keep the one that waits for it from being woken.
#[test]
fn a_reader_is_woken_although_others_inspect_its_get() {
    const READERS: u64 = 4;
    let disk = MemoryObjects::default();
    let shared = disk.shared();
    let file = shared.disk.create("segments/x").unwrap();
    file.write_at(&vec![7; 16 * CHUNK_BYTES as usize], 0).unwrap();
    file.sync().unwrap();
    disk.count_reads(|reads| reads.latency = Duration::from_millis(5));
    let file = shared.disk.open("segments/x").unwrap();
    std::thread::scope(|scope| {
        for reader in 0..READERS {
            let file = &file;
            scope.spawn(move || {
                for chunk in (reader..16).chain(0..reader) {
                    let range = chunk * CHUNK_BYTES..(chunk + 1) * CHUNK_BYTES;
                    for _ in 0..50 {
                        file.start_read(range.clone());
                    }
                    let mut found = [0; 10];
                    assert_eq!(file.read_at(&mut found, range.start + reader).unwrap(), 10);
                    assert_eq!(found, [7; 10]);
                }
            });
        }
    });
}

/// A pager serves other faults while a page is on its way.
#[test]
fn pages_are_read_without_waiting_and_one_that_a_guest_needs_is_first() {
    const PAGES: u64 = 4000;
    let disk = with_full_checkpoint(PAGES, 8 << 20);
    let opened = image(&disk, None).unwrap();
    let latency = Duration::from_millis(40);
    disk.count_reads(|reads| (reads.latency, reads.count) = (latency, 0));
    let mut found = [0; PAGE_SIZE];
    let mut wait_for = |page: u64, need: Need| {
        let began = Instant::now();
        let id = (BlockId(0), PageNo(page));
        while !opened.read_page_if_ready(id, &mut found, need).unwrap() {
            assert!(began.elapsed() < 100 * latency, "page {page}");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(found == content(2 * page + 1), "{page}");
        began.elapsed()
    };
    // The segment is opened without waiting, too.
    let began = Instant::now();
    let mut other = [0; PAGE_SIZE];
    assert!(!opened.read_page_if_ready((BlockId(0), PageNo(0)), &mut other, Need::Guest).unwrap());
    assert!(began.elapsed() < latency);
    wait_for(0, Need::Guest);
    wait_for(3000, Need::Guest);
    let order: Vec<_> = (0..PAGES).map(|page| (BlockId(0), PageNo(page))).collect();
    let started = opened.start_reads(&order).unwrap();
    // More than is in flight, and bounded.
    assert!((MAX_IN_FLIGHT * 256..PAGES as usize).contains(&started), "{started}");
    // Two GETs at most: the one of the page, and of the first chunk of its segment.
    assert!(wait_for(3900, Need::Guest) < 4 * latency);
    for page in (0..PAGES).step_by(7) {
        wait_for(page, Need::Background);
    }
    let reads = disk.count_reads(|_| ());
    assert!(reads.most_in_flight <= MAX_IN_FLIGHT, "{reads:?}");
    // A failure is reported once, and the next attempt is another GET.
    let fresh = image(&disk, None).unwrap();
    disk.count_reads(|reads| (reads.failing, reads.latency) = (1, Duration::ZERO));
    let mut failures = 0;
    let ids = (BlockId(0), PageNo(2000));
    loop {
        match fresh.read_page_if_ready(ids, &mut other, Need::Guest) {
            Ok(true) => break,
            Ok(false) => std::thread::sleep(Duration::from_millis(1)),
            Err(_) => failures += 1,
        }
    }
    assert!(failures == 1 && other == content(4001), "{failures}");
}
