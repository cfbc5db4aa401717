//! Measures a store on this machine. Compares it with `dd` of the same bytes on the same disk:
//!
//! ```text
//! cargo run --release -p rekindle-store --example commit -- DIRECTORY [ROUNDS]
//! ```
//!
//! Prints one JSON object: the time of a commit compared with `dd conv=fdatasync`, bytes written compared with
//! compressed bytes of the dirty pages, the time to open an image of 8 GiB compared with one of 512 MiB, the time to
//! read, and the memory of the writer.

use rekindle_pages::{BlockId, PAGE_SIZE, Page, PageNo};
use rekindle_store::types::{Block, Vm};
use rekindle_store::{Image, Options, ReadOptions, Result, StoreUrl, Writer};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, fs, io};
use uuid::Uuid;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The upper half of an address as a program's pointers have it.
const POINTER_BASE: u64 = 0x7f3a_0000_0000;
/// A device state of the usual size.
static DEVICES: [u8; 40 << 10] = [7; 40 << 10];

/// Knuth's linear congruential generator: a run of the benchmark always writes the same pages.
fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state
}

/// Fills a page as it is typical of guests. Of eight pages, four are parts of a program (this one), two hold pointers
/// and counters, one is partly noise, and one is sparse. No two pages are equal.
fn fill(page: &mut Page, program: &[u8], state: &mut u64) {
    // The low bits of such a generator repeat.
    let random = next_random(state) >> 24;
    match random % 8 {
        0..4 => {
            let at = (random >> 3) as usize % (program.len() - PAGE_SIZE);
            page.copy_from_slice(&program[at..at + PAGE_SIZE]);
        }
        4 | 5 => fill_with_pointers(page, random),
        6 => fill_with_noise(page, state),
        _ => {
            *page = [0; PAGE_SIZE];
            page.iter_mut().step_by(97).for_each(|byte| *byte = random as u8);
        }
    }
    // This makes the page unlike all others.
    page[..8].copy_from_slice(&random.to_le_bytes());
}

/// Fills a page with records of a pointer, which is partly random, and three small counters.
fn fill_with_pointers(page: &mut Page, random: u64) {
    for (n, word) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let n = n as u64;
        let value = if n.is_multiple_of(4) { POINTER_BASE + (random ^ (n * 4099)) % (1 << 24) } else { n / 5 };
        *word = value.to_le_bytes();
    }
}

/// Fills a page with records of eight words: three are random, so they cannot be compressed, and five are a pointer.
fn fill_with_noise(page: &mut Page, state: &mut u64) {
    const RANDOM_WORDS: usize = 3;
    for (n, words) in page.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        for (m, word) in words.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let random = next_random(state);
            let value = if m < RANDOM_WORDS { random ^ random >> 29 } else { POINTER_BASE | n as u64 };
            *word = value.to_le_bytes();
        }
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

fn vm(name: &str) -> Vm {
    Vm { uuid: Uuid::from_u128(1), name: name.into() }
}

fn block(bytes: u64) -> Block {
    Block { id: "ram".into(), used: bytes, max: bytes, page_size: 4096 }
}

/// Returns the seconds that `dd` takes to make `bytes` of `from` durable in a new file.
fn dd(directory: &Path, from: &Path, bytes: u64) -> io::Result<f64> {
    let to = directory.join("dd.out");
    let _ = fs::remove_file(&to);
    let began = Instant::now();
    let status = Command::new("dd")
        .args([format!("if={}", from.display()), format!("of={}", to.display())])
        .args(["bs=1M".into(), format!("count={bytes}"), "iflag=count_bytes".into()])
        .args(["conv=fdatasync", "status=none"])
        .status()?;
    let took = began.elapsed();
    if !status.success() {
        return Err(io::Error::other("dd failed"));
    }
    fs::remove_file(&to)?;
    Ok(took.as_secs_f64())
}

fn measuring_failed(directory: &Path, source: io::Error) -> rekindle_store::StoreError {
    rekindle_store::StoreError::Io {
        store: directory.display().to_string(),
        file: String::new(),
        doing: "measuring",
        source,
    }
}

/// Measures checkpoints of a guest after a full one, each against `dd` of as many bytes as the checkpoint has written.
fn commits(directory: &Path, rounds: u32) -> Result<Value> {
    const RAM: u64 = 512 * MIB;
    /// Compressed size of the dirty pages of each checkpoint.
    const COMPRESSED_BYTES: u64 = 46 * MIB;
    let io_failed = |e| measuring_failed(directory, e);
    let store = directory.join("commit");
    let url = StoreUrl::Directory(store.clone());
    let mut writer = Writer::open(&url, &Options { keep: 1, create: true, ..Options::new(vm("bench"), "bench") })?;
    let mut state = 1;
    let mut page = [0; PAGE_SIZE];
    let program = fs::read(env::current_exe().map_err(io_failed)?).map_err(io_failed)?;
    let mut first = writer.begin(&[block(RAM)])?;
    for number in 0..RAM / PAGE_SIZE as u64 {
        fill(&mut page, &program, &mut state);
        first.pages(BlockId(0), [(PageNo(number), &page)])?;
    }
    let began = Instant::now();
    let full = first.commit(&Value::Null, &Value::Null, &DEVICES)?;
    let (full_pages, full_compressed) = (full.pages.stored, full.pages.compressed.max(1));
    let full = json!({"bytes": full.bytes, "stored": full.pages.stored, "commit_s": began.elapsed().as_secs_f64()});
    let dirty_pages = COMPRESSED_BYTES * full_pages / full_compressed;
    let dd_input = directory.join("dd.in");
    // One element for each round: seconds, and the bytes written as a ratio to the compressed pages.
    let (mut commit_s, mut pages_and_commit_s, mut dd_s, mut bytes_of_compressed) = (vec![], vec![], vec![], vec![]);
    let mut bytes = 0;
    for _ in 0..rounds {
        // The pages that the guest has at the moment of the checkpoint are made before the measurement.
        let mut pages = Vec::with_capacity(dirty_pages as usize);
        for n in 0..dirty_pages {
            fill(&mut page, &program, &mut state);
            pages.push((n * 4 % (RAM / PAGE_SIZE as u64), page));
        }
        let began = Instant::now();
        let mut checkpoint = writer.begin(&[block(RAM)])?;
        checkpoint.pages(BlockId(0), pages.iter().map(|(number, page)| (PageNo(*number), page)))?;
        let commit_began = Instant::now();
        let done = checkpoint.commit(&Value::Null, &Value::Null, &DEVICES)?;
        commit_s.push(commit_began.elapsed().as_secs_f64());
        pages_and_commit_s.push(began.elapsed().as_secs_f64());
        bytes_of_compressed.push(done.bytes as f64 / done.pages.compressed as f64);
        bytes = done.bytes;
        if fs::metadata(&dd_input).map_or(0, |metadata| metadata.len()) < bytes {
            // The same kind of pages, and not zeros, which a file system might store as a hole. Twice as many bytes as
            // this round needs, so that the file also lasts for larger ones.
            let content: Vec<u8> = pages.iter().flat_map(|(_, page)| *page).take(2 * bytes as usize).collect();
            fs::write(&dd_input, content).map_err(io_failed)?;
        }
        dd_s.push(dd(directory, &dd_input, bytes).map_err(io_failed)?);
    }
    drop(writer);
    fs::remove_dir_all(&store).map_err(io_failed)?;
    let pages_and_commit_of_dd = pages_and_commit_s.iter().zip(&dd_s).map(|(ours, theirs)| ours / theirs).collect();
    Ok(json!({
        "first": full, "bytes": bytes, "rounds": rounds, "bytes_of_compressed": median(bytes_of_compressed),
        "pages_and_commit_s": median(pages_and_commit_s), "commit_s": median(commit_s), "dd_s": median(dd_s),
        "pages_and_commit_of_dd": median(pages_and_commit_of_dd),
    }))
}

/// Fills a page with a few words that differ from those of all other pages. It compresses well, so that 8 GiB do not
/// take 3 GiB of disk.
fn fill_small(page: &mut Page, state: &mut u64) {
    const WORDS: usize = 4;
    /// 2^64 divided by the golden ratio, which distributes consecutive numbers.
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    *state += 1;
    *page = [0; PAGE_SIZE];
    for word in page.as_chunks_mut::<8>().0.iter_mut().take(WORDS) {
        *word = state.wrapping_mul(GOLDEN).to_le_bytes();
    }
}

/// Creates an image of `ram` bytes: a checkpoint with all pages, and some with a part of them on top. Returns it with
/// the writer's peak memory and its bar.
fn image(directory: &Path, ram: u64) -> Result<(StoreUrl, Value)> {
    const CHECKPOINTS: usize = 8;
    /// Every 37th page is dirty in the checkpoints after the first one.
    const DIRTY_STEP: usize = 37;
    /// Bar of the writer's peak memory: a part that does not depend on the RAM, and one for each page.
    const FIXED_BYTES: u64 = 64 * MIB;
    const BYTES_PER_PAGE: u64 = 16;
    let url = StoreUrl::Directory(directory.join(format!("open-{}", ram / MIB)));
    let mut writer = Writer::open(&url, &Options { keep: 10, create: true, ..Options::new(vm("bench"), "bench") })?;
    let mut state = 1;
    let mut page = [0; PAGE_SIZE];
    let pages = ram / PAGE_SIZE as u64;
    for round in 0..CHECKPOINTS {
        if round == 2 {
            // The full checkpoint and a first one on top are not measured.
            reset_peak_memory();
        }
        let mut checkpoint = writer.begin(&[block(ram)])?;
        let step = if round == 0 { 1 } else { DIRTY_STEP };
        for number in (0..pages).step_by(step) {
            fill_small(&mut page, &mut state);
            checkpoint.pages(BlockId(0), [(PageNo(number), &page)])?;
        }
        checkpoint.commit(&Value::Null, &Value::Null, &DEVICES)?;
        if round == 0 {
            writer.settle()?;
        }
    }
    let most_allowed = FIXED_BYTES + BYTES_PER_PAGE * pages;
    Ok((url, json!({"ram": ram, "peak_memory": peak_memory(), "most_allowed": most_allowed})))
}

/// Makes the kernel count this process's peak memory from now on. See proc_pid_clear_refs(5).
fn reset_peak_memory() {
    const PEAK_RESIDENT_MEMORY: &str = "5";
    let _ = fs::write("/proc/self/clear_refs", PEAK_RESIDENT_MEMORY);
}

fn peak_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix("kB")?.trim().parse().ok());
    kib.unwrap_or(0u64) * 1024
}

/// Measures opening a small and a large image, and reading pages of the large one: random ones, and the *hot* ones,
/// which a restore loads first.
fn opens(directory: &Path, rounds: u32) -> Result<Value> {
    const LARGE: u64 = 8 * GIB;
    const RANDOM_READS: u32 = 4000;
    const MAX_HOT: usize = 100_000;
    let (small, small_is) = image(directory, 512 * MIB)?;
    let (large, large_is) = image(directory, LARGE)?;
    let (mut small_ms, mut large_ms, mut page_us) = (vec![], vec![], vec![]);
    let mut content = [0; PAGE_SIZE];
    for _ in 0..rounds.max(9) {
        for (url, times) in [(&small, &mut small_ms), (&large, &mut large_ms)] {
            let began = Instant::now();
            let image = Image::open(url, &ReadOptions::default())?;
            image.devices()?;
            image.read_page((BlockId(0), PageNo(12345)), &mut content)?;
            times.push(began.elapsed().as_secs_f64() * 1e3);
        }
    }
    let image = Image::open(&large, &ReadOptions::default())?;
    let mut state = 1;
    for _ in 0..RANDOM_READS {
        let page = PageNo((next_random(&mut state) >> 33) % (LARGE / PAGE_SIZE as u64));
        let began = Instant::now();
        image.read_page((BlockId(0), page), &mut content)?;
        page_us.push(began.elapsed().as_secs_f64() * 1e6);
    }
    let began = Instant::now();
    let hot: Vec<_> = image.hot().take(MAX_HOT).collect::<Result<_>>()?;
    let mut read = 0u64;
    image.read_many(&hot, |_, _| read += 1)?;
    let hot_s = began.elapsed().as_secs_f64();
    Ok(json!({
        "small": small_is, "large": large_is, "open_512M_ms": median(small_ms), "open_8G_ms": median(large_ms),
        "random_page_us": median(page_us), "hot_pages": read, "hot_pages_per_s": read as f64 / hot_s,
    }))
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut arguments = env::args().skip(1);
    let under = arguments.next().map_or_else(env::temp_dir, PathBuf::from);
    let rounds = arguments.next().map_or(Ok(9), |rounds| rounds.parse())?;
    let directory = under.join(format!("rekindle-store-bench-{}", std::process::id()));
    fs::create_dir_all(&directory)?;
    let began = Instant::now();
    let measured = (|| {
        Ok::<_, rekindle_store::StoreError>(json!({
            "commit": commits(&directory, rounds)?,
            "open": opens(&directory, rounds)?,
        }))
    })();
    fs::remove_dir_all(&directory)?;
    let measured = measured?;
    println!("{measured:#}");
    eprintln!("{} s", Duration::from_secs(began.elapsed().as_secs()).as_secs());
    Ok(())
}
