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

/// Fills a page as it is typical of guests. Of eight pages, four are parts of a program (this one), two hold pointers
/// and counters, one is partly noise, and one is sparse. No two pages are equal.
fn fill(page: &mut Page, program: &[u8], state: &mut u64) {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let random = *state >> 24;
    match random % 8 {
        0..4 => {
            let at = (random >> 3) as usize % (program.len() - PAGE_SIZE);
            page.copy_from_slice(&program[at..at + PAGE_SIZE]);
        }
        4 | 5 => {
            for (n, word) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let value =
                    if n % 4 == 0 { 0x7f3a_0000_0000 + (random ^ (n as u64 * 4099)) % (1 << 24) } else { n as u64 / 5 };
                *word = value.to_le_bytes();
            }
        }
        6 => noisy(page, state),
        _ => {
            *page = [0; PAGE_SIZE];
            page.iter_mut().step_by(97).for_each(|byte| *byte = random as u8);
        }
    }
    page[..8].copy_from_slice(&random.to_le_bytes());
}

fn noisy(page: &mut Page, state: &mut u64) {
    for (n, words) in page.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        for (m, word) in words.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let value = if m < 3 { *state ^ *state >> 29 } else { 0x0000_7f3a_0000_0000 | n as u64 };
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

fn commits(directory: &Path, rounds: u32) -> Result<Value> {
    const RAM: u64 = 512 << 20;
    let io_failed = |e: io::Error| rekindle_store::StoreError::Io {
        store: directory.display().to_string(),
        file: String::new(),
        doing: "measuring",
        source: e,
    };
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
    let full = first.commit(&Value::Null, &Value::Null, &[7; 40 << 10])?;
    let (full_pages, full_compressed) = (full.pages.stored, full.pages.compressed.max(1));
    let full = json!({"bytes": full.bytes, "stored": full.pages.stored, "commit_s": began.elapsed().as_secs_f64()});
    // As many pages as compress to about 46 MB.
    let count = (46 << 20) * full_pages / full_compressed;
    let source = directory.join("dd.in");
    let (mut ours, mut theirs, mut whole, mut ratio) = (vec![], vec![], vec![], vec![]);
    let mut bytes = 0;
    for _ in 0..rounds {
        // The pages that the guest has at the moment of the checkpoint are made before the measurement.
        let mut pages = Vec::with_capacity(count as usize);
        for n in 0..count {
            fill(&mut page, &program, &mut state);
            pages.push((n * 4 % (RAM / PAGE_SIZE as u64), page));
        }
        let began = Instant::now();
        let mut checkpoint = writer.begin(&[block(RAM)])?;
        checkpoint.pages(BlockId(0), pages.iter().map(|(number, page)| (PageNo(*number), page)))?;
        let commit = Instant::now();
        let done = checkpoint.commit(&Value::Null, &Value::Null, &[7; 40 << 10])?;
        ours.push(commit.elapsed().as_secs_f64());
        whole.push(began.elapsed().as_secs_f64());
        ratio.push(done.bytes as f64 / done.pages.compressed as f64);
        bytes = done.bytes;
        if fs::metadata(&source).map_or(0, |metadata| metadata.len()) < bytes {
            // Content that no file system can compress.
            let noise: Vec<u8> = pages.iter().flat_map(|(_, page)| *page).take(2 * bytes as usize).collect();
            fs::write(&source, noise).map_err(io_failed)?;
        }
        theirs.push(dd(directory, &source, bytes).map_err(io_failed)?);
    }
    drop(writer);
    fs::remove_dir_all(&store).map_err(io_failed)?;
    let each: Vec<f64> = whole.iter().zip(&theirs).map(|(ours, theirs)| ours / theirs).collect();
    Ok(json!({
        "first": full, "bytes": bytes, "rounds": rounds, "bytes_of_compressed": median(ratio),
        "pages_and_commit_s": median(whole), "commit_s": median(ours), "dd_s": median(theirs),
        "pages_and_commit_of_dd": median(each),
    }))
}

/// Creates an image of `ram` bytes with a third of the pages filled, and some checkpoints on top.
fn image(directory: &Path, ram: u64) -> Result<(StoreUrl, Value)> {
    let url = StoreUrl::Directory(directory.join(format!("open-{}", ram >> 20)));
    let mut writer = Writer::open(&url, &Options { keep: 10, create: true, ..Options::new(vm("bench"), "bench") })?;
    let mut state = 1;
    let pages = ram / PAGE_SIZE as u64;
    for round in 0..8 {
        if round == 2 {
            // The peak memory after this point is that of the writer.
            let _ = fs::write("/proc/self/clear_refs", "5");
        }
        let mut checkpoint = writer.begin(&[block(ram)])?;
        let step = if round == 0 { 1 } else { 37 };
        for number in (0..pages).step_by(step) {
            // Compressible pages, so that 8 GiB do not take 3 GiB of disk.
            let mut page = [0; PAGE_SIZE];
            state += 1;
            page.as_chunks_mut::<8>()
                .0
                .iter_mut()
                .take(4)
                .for_each(|word| *word = u64::wrapping_mul(state, 0x9e37_79b9_7f4a_7c15).to_le_bytes());
            checkpoint.pages(BlockId(0), [(PageNo(number), &page)])?;
        }
        checkpoint.commit(&Value::Null, &Value::Null, &[7; 40 << 10])?;
        if round == 0 {
            writer.settle()?;
        }
    }
    // The peak memory of the writer.
    let memory = peak_memory();
    Ok((url, json!({"ram": ram, "peak_memory": memory, "most_allowed": (64 << 20) + 16 * pages})))
}

fn peak_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix("kB")?.trim().parse().ok());
    kib.unwrap_or(0u64) * 1024
}

fn opens(directory: &Path, rounds: u32) -> Result<Value> {
    let (small, small_is) = image(directory, 512 << 20)?;
    let (large, large_is) = image(directory, 8 << 30)?;
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
    let mut state = 1u64;
    for _ in 0..4000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let began = Instant::now();
        image.read_page((BlockId(0), PageNo((state >> 33) % (2 << 20))), &mut content)?;
        page_us.push(began.elapsed().as_secs_f64() * 1e6);
    }
    let began = Instant::now();
    let hot: Vec<_> = image.hot().take(100_000).collect::<Result<_>>()?;
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
