//! A process with memory of one kind, which its threads write at random. The process is a second run of the test
//! binary, with its test `victim`, which must call [`act`].

use super::wait_for;
use rekindle_kernel::process::Process;
use rekindle_kernel::userfault::{Mode, remote};
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::ramblock::RamBlock;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const KIND: &str = "REKINDLE_TEST_VICTIM";
/// Pages that a giver gives back.
pub const GIVEN_BACK: std::ops::Range<u64> = 100..700;
/// Bytes of an ordinary page.
pub const PAGE: u64 = 4096;
const HUGE: u64 = 2 << 20;

/// Kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Anonymous private memory.
    Private,
    /// A shared memfd.
    Shared,
    /// A shared memfd with huge pages.
    Huge,
}

/// A running victim.
pub struct Victim {
    child: Child,
    input: Option<ChildStdin>,
    output: Option<BufReader<ChildStdout>>,
    pub process: Process,
    pub ram: Arc<GuestRam>,
}

impl Victim {
    /// Starts a victim with `pages` pages, which its threads write. With `give_back` they also give pages back.
    pub fn start(kind: Kind, pages: u64, give_back: bool) -> Self {
        Self::start_as(kind, pages, if give_back { "give-back" } else { "write" })
    }

    /// Starts a victim with `pages` missing pages. After [`Victim::begin`] its threads read all of them and compare
    /// them with [`expected`]. [`Victim::assert_all_right`] checks the result.
    pub fn reader(kind: Kind, pages: u64) -> Self {
        Self::start_as(kind, pages, "read")
    }

    /// Starts a reader that first gives back the pages of [`GIVEN_BACK`].
    pub fn giver(kind: Kind, pages: u64) -> Self {
        Self::start_as(kind, pages, "give")
    }

    /// Starts a victim with `pages` missing pages. After [`Victim::begin`] its threads read and write pages at random,
    /// and with `give_back` give some back, until [`Victim::end`].
    pub fn mixer(kind: Kind, pages: u64, give_back: bool) -> Self {
        Self::start_as(kind, pages, if give_back { "mix-give" } else { "mix" })
    }

    /// Ends a mixer, and asserts that it has found every page as expected.
    pub fn end(&mut self) {
        drop(self.input.take());
        self.assert_all_right();
    }

    /// Starts a victim that has all its pages, and writes when [`Victim::write_some`] is called.
    pub fn server(kind: Kind, pages: u64) -> Self {
        Self::start_as(kind, pages, "serve")
    }

    /// Makes a server write `count` random pages. Returns the time that took, in nanoseconds.
    pub fn write_some(&mut self, count: u64) -> u64 {
        let input = self.input.as_mut().unwrap();
        std::io::Write::write_all(input, format!("{count}\n").as_bytes()).unwrap();
        let mut line = String::new();
        self.output.as_mut().unwrap().read_line(&mut line).unwrap();
        line.trim_end().split_once("took ").unwrap().1.parse().unwrap()
    }

    /// Starts the threads of a reader or mixer.
    pub fn begin(&mut self) {
        std::io::Write::write_all(self.input.as_mut().unwrap(), b"x").unwrap();
    }

    /// Asserts that a reader has found every page as expected. Call it once.
    pub fn assert_all_right(&mut self) {
        let mut output = self.output.take().unwrap();
        wait_for(|| "the reader to end".into(), || self.child.try_wait().unwrap());
        let mut text = String::new();
        std::io::Read::read_to_string(&mut output, &mut text).unwrap();
        assert!(text.contains("all right"), "{text}");
    }

    /// Returns whether a reader still runs.
    pub fn is_reading(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    fn start_as(kind: Kind, pages: u64, role: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "victim", "--ignored", "--nocapture", "--test-threads=1"])
            .env(KIND, format!("{kind:?} {pages} {role}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let address = loop {
            let mut line = String::new();
            assert!(output.read_line(&mut line).unwrap() > 0, "the victim ended");
            if let Some((_, address)) = line.trim_end().split_once("address ") {
                break Some(address.parse::<u64>().unwrap());
            }
        };
        let process = Process::of(child.id()).unwrap();
        let page_size = if kind == Kind::Huge { HUGE } else { PAGE };
        let total = pages * page_size;
        let block = RamBlock { id: "ram".into(), used: total, total, page_size, offset: 0, address };
        let ram = Arc::new(GuestRam::from_blocks(process, vec![block]).unwrap());
        let input = child.stdin.take();
        Self { child, input, output: Some(output), process, ram }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a signal to a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Stops all threads of the victim.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
        wait_for(
            || format!("the victim to stop: its threads are {:?}", self.threads()),
            || self.threads().iter().all(|(_, state, _)| *state == 'T').then_some(()),
        );
    }

    /// Returns number, state and system call of each thread.
    fn threads(&self) -> Vec<(String, char, String)> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.process.pid)).unwrap().flatten();
        let thread = |task: fs::DirEntry| {
            let stat = fs::read_to_string(task.path().join("stat")).ok()?;
            let call = fs::read_to_string(task.path().join("syscall")).unwrap_or_default();
            Some((task.file_name().to_string_lossy().into_owned(), stat.rsplit_once(") ")?.1.chars().next()?, call))
        };
        tasks.filter_map(thread).collect()
    }

    pub fn resume(&self) {
        self.signal(libc::SIGCONT);
    }

    /// Reads all memory of the victim.
    pub fn memory(&self) -> Vec<u8> {
        super::content(&self.ram, &self.ram.blocks()[0])
    }

    /// Returns whether any memory of the victim is registered with a userfaultfd.
    pub fn is_registered(&self) -> bool {
        is_registered(self.process)
    }
}

/// Returns whether any memory of a process is registered with a userfaultfd.
pub fn is_registered(process: Process) -> bool {
    !remote::registered(process, Mode::all()).unwrap().is_empty()
}

impl Drop for Victim {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The tested memory of the victim.
struct Area {
    start: *mut u8,
    file: i32,
    page: u64,
    pages: u64,
}

// SAFETY: the memory is accessed only by atomic operations and system calls.
unsafe impl Sync for Area {}

impl Area {
    fn new(kind: &str, pages: u64) -> Self {
        let (flags, page, memfd) = match kind {
            "Private" => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, PAGE, None),
            "Shared" => (libc::MAP_SHARED, PAGE, Some(0)),
            "Huge" => (libc::MAP_SHARED, HUGE, Some(libc::MFD_HUGETLB)),
            other => panic!("no kind {other}"),
        };
        let bytes = pages * page;
        // SAFETY: a name that ends with a zero byte.
        let file = memfd.map_or(-1, |flags| unsafe { libc::memfd_create(c"victim".as_ptr(), flags) });
        // SAFETY: a length for our own file.
        assert!(memfd.is_none() || unsafe { libc::ftruncate(file, bytes as i64) } == 0);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping at an address that the kernel chooses.
        let start = unsafe { libc::mmap(null_mut(), bytes as usize, protection, flags, file, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        Self { start: start.cast(), file, page, pages }
    }

    fn word(&self, offset: u64) -> &AtomicU64 {
        let offset = offset / 8 * 8;
        assert!(offset < self.page * self.pages);
        // SAFETY: within the mapping, which is never unmapped, and aligned.
        unsafe { AtomicU64::from_ptr(self.start.add(offset as usize).cast()) }
    }

    /// Gives pages back like QEMU does for a balloon.
    fn give_back(&self, page: u64, pages: u64) {
        let (offset, length) = (page * self.page, pages.min(self.pages - page) * self.page);
        if self.file >= 0 {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            // SAFETY: a range of our own file.
            assert_eq!(unsafe { libc::fallocate(self.file, mode, offset as i64, length as i64) }, 0);
        }
        // SAFETY: within our own mapping, to which there are only references to atomics.
        let done =
            unsafe { libc::madvise(self.start.add(offset as usize).cast(), length as usize, libc::MADV_DONTNEED) };
        assert_eq!(done, 0);
    }
}

/// Returns the number after `random` in a pseudo-random sequence (xorshift).
fn next_random(mut random: u64) -> u64 {
    random ^= random << 13;
    random ^= random >> 7;
    random ^ random << 17
}

/// Runs the role of the victim if this process is one.
pub fn act() {
    let Ok(kind) = std::env::var(KIND) else { return };
    let [kind, pages, role] = kind.split(' ').collect::<Vec<_>>()[..] else { panic!("{kind}") };
    let area = Area::new(kind, pages.parse().unwrap());
    match role {
        "read" => read(&area, false),
        "give" => read(&area, true),
        "serve" => serve(&area),
        "mix" => mix(&area, false),
        "mix-give" => mix(&area, true),
        role => write(&area, role == "give-back"),
    }
}

/// Touches every page. Then, for each line of input with a number, writes that many random pages and prints the time
/// that took, in nanoseconds.
fn serve(area: &Area) {
    (0..area.pages).for_each(|page| area.word(page * area.page).store(page + 1, Ordering::SeqCst));
    println!("address {}", area.start as u64);
    let mut random = 88172645463325252u64;
    for line in std::io::stdin().lines() {
        let count: u64 = line.unwrap().parse().unwrap();
        let start = std::time::Instant::now();
        for _ in 0..count {
            random = next_random(random);
            area.word((random >> 20) % area.pages * area.page).store(random, Ordering::SeqCst);
        }
        println!("took {}", start.elapsed().as_nanos());
    }
}

/// Returns the word of a page that the source supplies. A third of the pages is zero.
pub fn expected(page: u64, word: u64) -> u64 {
    if page.is_multiple_of(3) { 0 } else { page.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ word }
}

/// Runs four threads that read all pages, each in an order of its own, and change a word of each page.
fn read(area: &Area, give_back: bool) {
    println!("address {}", area.start as u64);
    let mut byte = [0];
    std::io::Read::read_exact(&mut std::io::stdin(), &mut byte).unwrap();
    let small_pages = area.pages * area.page / PAGE;
    if give_back {
        area.give_back(GIVEN_BACK.start, GIVEN_BACK.end - GIVEN_BACK.start);
    }
    let is_given_back = |page: u64, found: u64| give_back && GIVEN_BACK.contains(&page) && found == 0;
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            scope.spawn(move || {
                for n in 0..small_pages {
                    // Each page is visited once, because the step and the number of pages have no common factor.
                    let page = (n * 7919 + thread * small_pages / 4) % small_pages;
                    for word in 1..PAGE / 8 {
                        let found = area.word(page * PAGE + word * 8).load(Ordering::SeqCst);
                        // A shared page that was filled before it was given back may keep its content.
                        let may_stay = area.file >= 0 || !give_back || !GIVEN_BACK.contains(&page);
                        let right = is_given_back(page, found) || (may_stay && found == expected(page, word));
                        assert!(right, "page {page}, word {word}: {found:#x}");
                    }
                    // The threads change the first word themselves.
                    area.word(page * PAGE).fetch_add(1, Ordering::SeqCst);
                }
            });
        }
    });
    for page in 0..small_pages {
        let found = area.word(page * PAGE).load(Ordering::SeqCst);
        let right = found == expected(page, 0).wrapping_add(4) || is_given_back(page, found.wrapping_sub(4));
        assert!(right, "page {page}: {found:#x}");
    }
    println!("all right");
    std::process::exit(0);
}

/// Runs threads that read and write random pages while the pager fills them.
fn mix(area: &Area, give_back: bool) {
    println!("address {}", area.start as u64);
    let mut byte = [0];
    std::io::Read::read_exact(&mut std::io::stdin(), &mut byte).unwrap();
    let small_pages = area.pages * area.page / PAGE;
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 1..=4u64 {
            let end = &end;
            scope.spawn(move || {
                let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                while !end.load(Ordering::Relaxed) {
                    random = next_random(random);
                    let page = (random >> 20) % small_pages;
                    // A quarter of the pages is only written, a half is only read.
                    let (read, write) = (!random.is_multiple_of(4), random % 4 < 2);
                    if give_back && seed == 4 && random.is_multiple_of(128) {
                        area.give_back(page, 1 + random / 128 % 100);
                        continue;
                    }
                    if read {
                        let found = area.word(page * PAGE + 8).load(Ordering::SeqCst);
                        assert!(found == expected(page, 1) || (give_back && found == 0), "page {page}: {found:#x}");
                    }
                    if write {
                        area.word(page * PAGE).store(random, Ordering::SeqCst);
                    }
                    if random % 64 == 1 {
                        std::thread::sleep(std::time::Duration::from_millis(1));
                    }
                }
            });
        }
        let mut rest = Vec::new();
        std::io::Read::read_to_end(&mut std::io::stdin(), &mut rest).unwrap();
        end.store(true, Ordering::Relaxed);
    });
    println!("all right");
    std::process::exit(0);
}

/// Runs threads that write random pages.
fn write(area: &Area, give_back: bool) {
    // A quarter of the memory is never touched.
    let touched = area.pages * 3 / 4;
    for page in 0..touched / 2 {
        area.word(page * area.page).store(page + 1, Ordering::SeqCst);
    }
    println!("address {}", area.start as u64);
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 1..=4u64 {
            let end = &end;
            let give_back = give_back && seed == 4;
            scope.spawn(move || {
                let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                while !end.load(Ordering::Relaxed) {
                    random = next_random(random);
                    let page = (random >> 20) % touched;
                    if give_back && random.is_multiple_of(64) {
                        area.give_back(page, 1 + random / 64 % 700);
                    } else {
                        area.word(page * area.page + random % area.page).store(random, Ordering::SeqCst);
                    }
                    // Writes in bursts, so that a round does not write every page.
                    if random % 64 == 1 {
                        std::thread::sleep(std::time::Duration::from_millis(1));
                    }
                }
            });
        }
        let mut rest = Vec::new();
        std::io::Read::read_to_end(&mut std::io::stdin(), &mut rest).unwrap();
        end.store(true, Ordering::Relaxed);
    });
}
