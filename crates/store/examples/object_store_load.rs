//! Load on an object store, for a benchmark. The environment has the variables of the server. Prints a JSON object for
//! each measurement:
//!
//! ```text
//! object_store_load commit STORE ROUNDS BYTES   commit of a checkpoint of BYTES of a guest with 1 GiB of RAM, by turns with a
//!                                               PUT of as many
//! object_store_load race STORE ROUNDS           two hosts race to own a store
//! ```

use object_store::aws::AmazonS3Builder;
use object_store::path::Path;
use object_store::{ObjectStore, PutOptions, PutPayload};
use rekindle_pages::{BlockId, PAGE_SIZE, Page, PageNo};
use rekindle_store::types::{Block, OnlyIf, Owner, Vm};
use rekindle_store::{Options, StoreError, StoreUrl, Writer, admin};
use serde_json::{Value, json};
use std::error::Error;
use std::sync::Barrier;
use std::time::{Duration, Instant};
use std::{env, thread};
use tokio::runtime::{Builder, Runtime};
use uuid::Uuid;

type AnyError = Box<dyn Error + Send + Sync>;

/// A device state of the usual size.
static DEVICES: [u8; 40 << 10] = [7; 40 << 10];
/// Every claim stays in the log of a store, so that a store with many of them becomes slow. Another store is used after
/// this many races.
const RACES_PER_STORE: u64 = 50;
/// RAM of the guest whose checkpoints are committed. The size of the objects depends on it: 32 MiB.
const RAM_BYTES: u64 = 1 << 30;
/// Time for the server to remove what was replaced, before each measurement.
const SETTLING: Duration = Duration::from_secs(2);
/// Object to which the bytes of a checkpoint are written, below the name of the store.
const PLAIN_OBJECT: &str = "plain";

fn vm() -> Vm {
    Vm { uuid: Uuid::from_u128(1), name: "bench".into() }
}

/// Fills pages with bytes that cannot be compressed, different ones in each round.
fn noise(pages: u64, round: u64) -> Vec<Page> {
    let mut state = 0x9e37_79b9_7f4a_7c15 ^ (round + 1);
    let mut next = || {
        // Xorshift.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut page = || {
        let mut page = [0; PAGE_SIZE];
        page.as_chunks_mut::<8>().0.iter_mut().for_each(|word| *word = next().to_le_bytes());
        page
    };
    (0..pages).map(|_| page()).collect()
}

fn micros(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// Plain PUTs to the bucket of a store.
struct PlainClient {
    runtime: Runtime,
    bucket: Box<dyn ObjectStore>,
    object: Path,
}

impl PlainClient {
    fn new(store: &StoreUrl) -> Result<Self, AnyError> {
        let StoreUrl::Objects(address) = store else { return Err("not the address of an object store".into()) };
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let bucket = AmazonS3Builder::from_env().with_bucket_name(&address.bucket).build()?;
        Ok(Self { runtime, bucket: Box::new(bucket), object: Path::from(format!("{}-{PLAIN_OBJECT}", address.prefix)) })
    }

    /// Writes one object. Returns the time in microseconds.
    fn put(&self, content: PutPayload) -> Result<u64, AnyError> {
        thread::sleep(SETTLING);
        let began = Instant::now();
        self.runtime.block_on(self.bucket.put_opts(&self.object, content, PutOptions::default()))?;
        Ok(micros(began))
    }
}

/// Measures commits of checkpoints with `bytes` of pages, each by turns with a PUT of as many bytes as it has written.
fn commits(store: &StoreUrl, rounds: u64, bytes: u64) -> Result<(), AnyError> {
    let pages = bytes.div_ceil(PAGE_SIZE as u64);
    let blocks = [Block { id: "ram".into(), used: RAM_BYTES, max: RAM_BYTES, page_size: 4096 }];
    let mut writer = Writer::open(store, &Options { keep: 1, create: true, ..Options::new(vm(), "bench") })?;
    let client = PlainClient::new(store)?;
    let mut commit = |content: &[Page]| -> Result<(u64, u64), AnyError> {
        thread::sleep(SETTLING);
        let began = Instant::now();
        let mut checkpoint = writer.begin(&blocks)?;
        checkpoint
            .pages(BlockId(0), content.iter().enumerate().map(|(page, content)| (PageNo(page as u64), content)))?;
        let committed = checkpoint.commit(&Value::Null, &Value::Null, &DEVICES)?;
        Ok((micros(began), committed.bytes))
    };
    // The first commit also opens connections, and shows how many bytes one has.
    let (_, bytes_written) = commit(&noise(pages, 0))?;
    let length = usize::try_from(bytes_written)?;
    for round in 0..rounds {
        let content = noise(pages, round + 1);
        let plain: Vec<u8> = content.iter().flatten().chain(&DEVICES).copied().cycle().take(length).collect();
        let plain = PutPayload::from(plain);
        // A B, B A, ...
        let measured = if round % 2 == 0 {
            (commit(&content)?, client.put(plain)?)
        } else {
            let put = client.put(plain)?;
            (commit(&content)?, put)
        };
        let ((commit_us, bytes), put_us) = measured;
        println!("{}", json!({"round": round, "how": "s3", "us": commit_us, "bytes": bytes}));
        println!("{}", json!({"round": round, "how": "put", "us": put_us, "bytes": length}));
    }
    Ok(())
}

/// Lets two hosts race to own a store: by turns both claim it, and one claims it while its owner commits.
fn races(store: &StoreUrl, rounds: u64) -> Result<(), AnyError> {
    for round in 0..rounds {
        let url: StoreUrl = format!("{store}/{}", round / RACES_PER_STORE).parse()?;
        let began = Instant::now();
        let (how, owners, error) = if round % 2 == 0 { claims(&url)? } else { commit_and_claim(&url, round)? };
        let error = error.map(|error| error.to_string());
        println!("{}", json!({"round": round, "how": how, "us": micros(began), "owners": owners, "error": error}));
    }
    Ok(())
}

/// Name of the race, the number of hosts that were the owner of the same epoch, and an error other than that of a host
/// that has lost. The number is `None` if it is unknown because of the error.
type Race = (&'static str, Option<usize>, Option<StoreError>);

/// Two hosts claim the store under the condition that its owner is still the same.
fn claims(url: &StoreUrl) -> Result<Race, AnyError> {
    let options = Options { create: true, ..Options::new(vm(), "bench") };
    drop(Writer::open(url, &options)?);
    let epoch = admin::listing(url, None)?.epoch;
    let barrier = Barrier::new(2);
    let claim = || {
        barrier.wait();
        admin::fence(url, &vm(), &Owner::here("restore bench"), Some(OnlyIf::Epoch(epoch)), None)
    };
    let results = thread::scope(|scope| {
        let racers = [scope.spawn(claim), scope.spawn(claim)];
        racers.map(|racer| racer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    let owners = results.iter().filter(|result| result.is_ok()).count();
    let error = results.into_iter().filter_map(Result::err).find(|e| !matches!(e, StoreError::Superseded { .. }));
    // A claim with an error may have been carried out.
    Ok(("claim", Some(owners).filter(|owners| *owners > 1 || error.is_none()), error))
}

/// The owner commits a checkpoint while another host claims the store. Both are owners if the commit was acknowledged, and
/// the other host does not know of it.
fn commit_and_claim(url: &StoreUrl, round: u64) -> Result<Race, AnyError> {
    let mut writer = Writer::open(url, &Options { create: true, ..Options::new(vm(), "bench") })?;
    let barrier = Barrier::new(2);
    let content = noise(1, round);
    let bytes = PAGE_SIZE as u64;
    let mut commit = || -> rekindle_store::Result<u64> {
        let blocks = [Block { id: "ram".into(), used: bytes, max: bytes, page_size: 4096 }];
        let written = writer.begin(&blocks).and_then(|mut checkpoint| {
            checkpoint.pages(BlockId(0), content.iter().map(|page| (PageNo(0), page)))?;
            Ok(checkpoint)
        });
        // Also after an error: the other side waits.
        barrier.wait();
        written?.commit(&Value::Null, &Value::Null, &DEVICES).map(|committed| committed.number)
    };
    let (committed, claimed) = thread::scope(|scope| {
        let committing = scope.spawn(&mut commit);
        barrier.wait();
        let claimed = admin::fence(url, &vm(), &Owner::here("restore bench"), None, None);
        (committing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), claimed)
    });
    let claimed = match claimed {
        Ok(claimed) => claimed,
        Err(error) => return Ok(("commit", None, Some(error))),
    };
    Ok(match committed {
        Ok(number) => ("commit", Some(if number == claimed.newest { 1 } else { 2 }), None),
        Err(StoreError::Superseded { .. }) => ("commit", Some(1), None),
        // The commit may have been carried out.
        Err(error) => ("commit", None, Some(error)),
    })
}

fn main() -> Result<(), AnyError> {
    let words: Vec<String> = env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["commit", store, rounds, bytes] => commits(&store.parse()?, rounds.parse()?, bytes.parse()?),
        ["race", store, rounds] => races(&store.parse()?, rounds.parse()?),
        _ => Err("usage: object_store_load commit STORE ROUNDS BYTES | race STORE ROUNDS".into()),
    }
}
