//! Observes QEMUs without Rekindle's records: processes, their run states over time, and consoles of guests.

use rekindle_kernel::process::Process;
use rekindle_qemu::qmp::{Qmp, QmpError};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A QEMU process of a VM.
#[derive(Debug, Clone)]
pub struct Qemu {
    pub process: Process,
    /// Directory of QEMU's sockets.
    pub directory: PathBuf,
}

impl Qemu {
    /// Returns the run state, or `None` if QEMU does not answer.
    pub fn run_state(&self) -> Option<String> {
        self.run_state_within(Duration::from_secs(2))
    }

    fn run_state_within(&self, patience: Duration) -> Option<String> {
        let mut qmp = Qmp::connect(&self.directory.join("watch.sock"), patience).ok()?;
        let status: Value = qmp.execute("query-status", ()).ok()?;
        status["status"].as_str().map(str::to_owned)
    }

    /// Returns the VM generation ID that the guest reads, or `None` if it has no such device.
    pub fn generation(&self) -> Option<String> {
        let mut qmp = Qmp::connect(&self.directory.join("watch.sock"), Duration::from_secs(5)).expect("QEMU answers");
        match qmp.execute::<Value>("query-vm-generation-id", ()) {
            Ok(reply) => reply["guid"].as_str().map(str::to_owned),
            Err(QmpError::Refused { .. }) => None,
            Err(e) => panic!("{e}"),
        }
    }

    /// Returns the distinct (nice, policy) pairs of QEMU's threads, normally those of the test process.
    pub fn scheduling(&self) -> Vec<(i32, u32)> {
        scheduling(self.process.pid)
    }

    fn runs(&self) -> bool {
        self.run_state_within(Duration::from_millis(30)).as_deref() == Some("running")
    }
}

/// Returns the distinct (nice, policy) pairs of a process's threads.
pub fn scheduling(pid: u32) -> Vec<(i32, u32)> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process runs").flatten();
    let stats = tasks.filter_map(|task| fs::read_to_string(task.path().join("stat")).ok());
    // Fields 19 and 41 of proc_pid_stat(5); the name in field 2 may hold spaces and ends with the last bracket.
    let nice_and_policy = |stat: String| {
        let fields: Vec<_> = stat.rsplit(')').next()?.split_whitespace().collect();
        Some((fields.get(19 - 3)?.parse().ok()?, fields.get(41 - 3)?.parse().ok()?))
    };
    stats.filter_map(nice_and_policy).collect::<BTreeSet<_>>().into_iter().collect()
}

/// Finds the QEMUs whose sockets are below `root`, by their command lines.
pub fn qemus(root: &Path) -> Vec<Qemu> {
    qemus_among(root, processes())
}

/// Finds all processes whose command line contains `text`. The path of a test's directory is safe to use as `text`,
/// because it is unique.
pub fn with_argument_containing(text: &str) -> std::io::Result<Vec<Process>> {
    let matches = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.windows(text.len()).any(|part| part == text.as_bytes())
    };
    let found = processes().into_iter().filter(|pid| *pid != std::process::id() && matches(pid));
    Ok(found.filter_map(|pid| Process::of(pid).ok()).collect())
}

/// Returns the IDs of all processes.
fn processes() -> BTreeSet<u32> {
    let entries = fs::read_dir("/proc").expect("/proc").flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Finds the QEMUs below `root`, as [`qemus`] does, among the processes `pids`.
fn qemus_among(root: &Path, pids: impl IntoIterator<Item = u32>) -> Vec<Qemu> {
    let mut found = Vec::new();
    for pid in pids {
        let Ok(line) = fs::read(format!("/proc/{pid}/cmdline")) else { continue };
        let arguments: Vec<_> = line.split(|&byte| byte == 0).map(String::from_utf8_lossy).collect();
        let file = arguments.iter().zip(arguments.iter().skip(1)).find(|(option, _)| *option == "-pidfile");
        let Some(file) = file.map(|(_, file)| PathBuf::from(&**file)).filter(|file| file.starts_with(root)) else {
            continue;
        };
        if let Ok(process) = Process::of(pid)
            && process.is_alive()
            && let Some(directory) = file.parent()
        {
            found.push(Qemu { process, directory: directory.to_owned() });
        }
    }
    found.sort_by_key(|qemu| qemu.directory.clone());
    found
}

/// A thread that continuously checks that no two QEMUs run one guest.
pub struct Watch {
    end: Arc<AtomicBool>,
    seen: Arc<AtomicBool>,
    thread: Option<JoinHandle<(u64, Vec<String>)>>,
}

impl Watch {
    /// Starts to watch all VMs below `root`.
    pub fn start(root: &Path) -> Self {
        Self::start_for(&[root])
    }

    /// Starts to watch all VMs below several directories. VMs of the same name count as one.
    pub fn start_for(roots: &[&Path]) -> Self {
        let end = Arc::new(AtomicBool::new(false));
        let has_seen = Arc::new(AtomicBool::new(false));
        let (ended, seeing) = (Arc::clone(&end), Arc::clone(&has_seen));
        let roots: Vec<_> = roots.iter().map(|root| root.to_path_buf()).collect();
        // Skip other programs, which saves most of the time. Unlike Rekindle's processes, they never become a QEMU.
        let is_unrelated = |pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            !["rekindle", "qemu"].iter().any(|word| line.windows(word.len()).any(|part| part == word.as_bytes()))
        };
        let mut others: BTreeSet<u32> = processes().into_iter().filter(is_unrelated).collect();
        let thread = thread::spawn(move || {
            let (mut rounds, mut seen) = (0, Vec::new());
            // Check at least once, even if the thread is stopped immediately.
            loop {
                let running = processes();
                // Forget IDs of ended processes: a QEMU can have such an ID in the next round.
                others.retain(|pid| running.contains(pid));
                rounds += 1;
                let of = |root: &PathBuf| qemus_among(root, running.difference(&others).copied());
                seen.extend(two_running(roots.iter().flat_map(of).collect()));
                seeing.store(!seen.is_empty(), Ordering::Relaxed);
                if ended.load(Ordering::Relaxed) {
                    return (rounds, seen);
                }
                thread::sleep(Duration::from_millis(1));
            }
        });
        Self { end, seen: has_seen, thread: Some(thread) }
    }

    /// Waits until the thread has seen two QEMUs run one guest, or `patience` is over.
    pub fn wait_seen(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        while !self.seen.load(Ordering::Relaxed) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops the thread and asserts that no VM was run by two QEMUs.
    #[track_caller]
    pub fn end(mut self) {
        self.end.store(true, Ordering::Relaxed);
        let (rounds, seen) = self.thread.take().expect("ended once").join().expect("the watch does not panic");
        assert!(rounds > 0, "no round of checks has ended");
        assert!(seen.is_empty(), "two QEMUs ran one guest: {seen:?}");
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
    }
}

/// Describes two QEMUs of one VM that run at the same moment. `None` if no such QEMUs are found.
///
/// The QEMUs are queried one after the other, and the guest may move from one to another in between. So a QEMU counts
/// only if it ran both before and after another one was seen running: then both ran at the same time.
fn two_running(qemus: Vec<Qemu>) -> Option<String> {
    let mut by_vm: BTreeMap<OsString, Vec<Qemu>> = BTreeMap::new();
    for qemu in qemus {
        by_vm.entry(qemu.directory.parent()?.file_name()?.to_owned()).or_default().push(qemu);
    }
    by_vm.values().find_map(|all| {
        let running: Vec<_> = all.iter().filter(|qemu| qemu.runs()).collect();
        let (first, rest) = running.split_first()?;
        (!rest.is_empty() && first.runs()).then(|| format!("{first:?} and {rest:?}"))
    })
}

/// Asserts that the guest printed each tick once. A guest that ran in two QEMUs, or was rolled back, prints a tick
/// twice.
#[track_caller]
pub fn assert_ticks_once(console: &Path) {
    let text = fs::read(console).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let mut seen = BTreeSet::new();
    for line in text.lines().map(str::trim_end) {
        if line.ends_with("rekindle-micro ready") {
            seen.clear();
        }
        // The lines are "tick N UPTIME": the time distinguishes a whole line from two mixed ones.
        let words: Vec<_> = line.split(' ').collect();
        if let ["tick", number, time] = words.as_slice()
            && let (Ok(number), Ok(_)) = (number.parse::<u64>(), time.parse::<f64>())
        {
            assert!(
                seen.insert(number),
                "{}: tick {number} was printed twice by one boot of the guest",
                console.display()
            );
        }
    }
}
