//! Reports of a protector to systemd, if it runs as a service of `Type=notify`: `sd_notify(3)`.
//!
//! | message | sent |
//! |---|---|
//! | `READY=1` | when the store is open and the guest's memory is tracked, or the protector reports why it has to wait |
//! | `STATUS=` | every few seconds: the age of the newest commit, and why there is no newer one |
//! | `WATCHDOG=1` | while a restart of the protector would not help: see [`Progress::is_stuck`] |
//! | `STOPPING=1` | when the last checkpoint is committed |

use rekindle_protect::event::{CheckpointReport, ProtectEvent};
use rekindle_vm::rundir::RunDir;
use sd_notify::NotifyState;
use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Interval of the reports. A watchdog may require a shorter one.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);
/// How long a pause may keep the guest stopped. It takes milliseconds, with `--disk-hook` as long as the command.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// How long a protector may report nothing, at least: a checkpoint of a guest that has written much takes minutes.
const MIN_SILENCE: Duration = Duration::from_secs(15 * 60);
/// How many of the longest checkpoints, or configured intervals, a protector may report nothing.
const MAX_SILENT_CHECKPOINTS: u32 = 10;

/// Sends reports until it is dropped.
#[derive(Debug)]
pub struct ServiceReport {
    events: Option<Sender<ProtectEvent>>,
    thread: Option<JoinHandle<()>>,
}

impl ServiceReport {
    /// Starts to report. `None`: this process is not such a service.
    pub fn start(rundir: &RunDir, every: Duration) -> io::Result<Option<Self>> {
        if env::var_os("NOTIFY_SOCKET").is_none() {
            return Ok(None);
        }
        let watchdog = sd_notify::watchdog_enabled();
        // systemd requires a message in each interval; half of it leaves time for a busy machine.
        let interval = watchdog.map_or(REPORT_INTERVAL, |limit| (limit / 2).min(REPORT_INTERVAL));
        let (events, received) = mpsc::channel();
        let progress = Progress::new(every, Instant::now());
        let pause = PauseWatch { mark: rundir.paused(), seen: None };
        let thread = thread::Builder::new().name("service-report".into());
        let thread = thread.spawn(move || report(&received, interval, watchdog.is_some(), progress, pause))?;
        Ok(Some(Self { events: Some(events), thread: Some(thread) }))
    }

    pub fn note(&self, event: &ProtectEvent) {
        if let Some(events) = &self.events {
            let _ = events.send(event.clone());
        }
    }
}

impl Drop for ServiceReport {
    fn drop(&mut self) {
        self.events = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn report(
    events: &Receiver<ProtectEvent>,
    interval: Duration,
    has_watchdog: bool,
    mut progress: Progress,
    mut pause: PauseWatch,
) {
    let mut next = Instant::now();
    let mut is_ready = false;
    loop {
        match events.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Ok(event) => {
                let changes = progress.note(&event, Instant::now());
                // Checkpoints may be many in a second.
                if is_ready && !changes && Instant::now() < next {
                    continue;
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        let now = Instant::now();
        next = now + interval;
        let status = progress.status(now);
        let mut states = vec![NotifyState::Status(&status)];
        if progress.is_ready() && !is_ready {
            is_ready = true;
            states.push(NotifyState::Ready);
        }
        if has_watchdog && !progress.is_stuck(now, pause.paused_for(now), waits_in_the_kernel()) {
            states.push(NotifyState::Watchdog);
        }
        send(&states);
    }
    send(&[NotifyState::Stopping, NotifyState::Status(&progress.status(Instant::now()))]);
}

fn send(states: &[NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(states) {
        tracing::debug!("cannot notify systemd: {e}");
    }
}

/// Why there is no newer checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Condition {
    /// The store is being opened.
    Starting,
    /// Checkpoints are taken.
    Protecting,
    /// The store cannot be written.
    StoreAway(String),
    /// Another reason, which the protector reports at each attempt.
    Waiting(String),
}

/// What the events of a protector show.
#[derive(Debug)]
struct Progress {
    condition: Condition,
    /// The number of the newest checkpoint of this protector, and when it was committed.
    newest: Option<(u64, Instant)>,
    last_event: Instant,
    /// The longest time that a checkpoint has taken, at least the configured interval.
    longest: Duration,
    /// A checkpoint with all memory is being taken: its duration cannot be known.
    takes_all: bool,
}

impl Progress {
    fn new(every: Duration, now: Instant) -> Self {
        Self { condition: Condition::Starting, newest: None, last_event: now, longest: every, takes_all: false }
    }

    /// Returns whether the event has changed the condition.
    fn note(&mut self, event: &ProtectEvent, now: Instant) -> bool {
        self.last_event = now;
        let condition = match event {
            ProtectEvent::Attached { incremental, .. } => {
                self.takes_all = !incremental;
                // A new session writes to the store only with its next checkpoint.
                match &self.condition {
                    away @ Condition::StoreAway(_) => away.clone(),
                    _ => Condition::Protecting,
                }
            }
            ProtectEvent::Checkpoint(report) => {
                let CheckpointReport { number, took_us, .. } = &**report;
                self.newest = Some((*number, now));
                self.longest = self.longest.max(Duration::from_micros(*took_us));
                self.takes_all = false;
                Condition::Protecting
            }
            ProtectEvent::StoreAway { error } => Condition::StoreAway(first_line(error)),
            ProtectEvent::StoreBack => Condition::Protecting,
            ProtectEvent::Waiting { state } => Condition::Waiting(first_line(state)),
            ProtectEvent::Moved { why } => Condition::Waiting(format!("tracking starts again: {}", first_line(why))),
            ProtectEvent::Filled | ProtectEvent::Compared(_) | ProtectEvent::Lag { .. } => return false,
        };
        let changes = condition != self.condition;
        self.condition = condition;
        changes
    }

    fn is_ready(&self) -> bool {
        self.condition != Condition::Starting
    }

    fn status(&self, now: Instant) -> String {
        let newest = match self.newest {
            Some((number, committed)) => {
                format!("checkpoint {number} was committed {} s ago", now.duration_since(committed).as_secs())
            }
            None => "no checkpoint since the start of the service".into(),
        };
        match &self.condition {
            Condition::Starting => "opening the store".into(),
            Condition::Protecting => newest,
            Condition::StoreAway(why) => format!("{newest}; the store cannot be written: {why}"),
            Condition::Waiting(why) => format!("{newest}; no checkpoint for now: {why}"),
        }
    }

    /// Returns whether a restart of the protector may help: a pause does not end, or nothing was reported for a long time.
    ///
    /// A restart does not help a protector that waits for its store, or in the kernel for a file system. It would make the
    /// next checkpoint a full one.
    fn is_stuck(&self, now: Instant, paused_for: Duration, waits_in_the_kernel: bool) -> bool {
        let waits_for_others =
            !self.is_ready() || waits_in_the_kernel || matches!(self.condition, Condition::StoreAway(_));
        if waits_for_others {
            return false;
        }
        let max_silence = MIN_SILENCE.max(self.longest * MAX_SILENT_CHECKPOINTS);
        let is_silent = !self.takes_all && now.duration_since(self.last_event) > max_silence;
        // Another command may have stopped the guest if the protector waits.
        let is_in_pause = self.condition == Condition::Protecting && paused_for > MAX_PAUSE;
        is_silent || is_in_pause
    }
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

/// Watches the file that exists while a checkpoint keeps the guest stopped.
#[derive(Debug)]
struct PauseWatch {
    mark: PathBuf,
    /// The file by its inode and the time of its last change, and when it was seen first.
    seen: Option<(u64, i64, i64, Instant)>,
}

impl PauseWatch {
    /// Returns how long the current pause lasts, as far as it was seen.
    fn paused_for(&mut self, now: Instant) -> Duration {
        let Ok(metadata) = fs::metadata(&self.mark) else {
            self.seen = None;
            return Duration::ZERO;
        };
        let file = (metadata.ino(), metadata.mtime(), metadata.mtime_nsec());
        let since = match self.seen {
            Some((ino, seconds, nanoseconds, since)) if (ino, seconds, nanoseconds) == file => since,
            _ => now,
        };
        self.seen = Some((file.0, file.1, file.2, since));
        now.duration_since(since)
    }
}

/// Returns whether a thread of this process waits in the kernel and cannot be interrupted, as in a call to a file system whose
/// server does not answer.
fn waits_in_the_kernel() -> bool {
    let Ok(threads) = fs::read_dir("/proc/self/task") else { return false };
    threads.flatten().any(|thread| is_uninterruptible(&thread.path().join("stat")))
}

fn is_uninterruptible(stat: &Path) -> bool {
    let text = fs::read_to_string(stat).unwrap_or_default();
    // The name before it may have any characters.
    text.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('D'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_secs(2);

    fn attached(incremental: bool) -> ProtectEvent {
        ProtectEvent::Attached { pid: 1, ram_bytes: 1 << 27, incremental, filling: false }
    }

    fn away() -> ProtectEvent {
        ProtectEvent::StoreAway { error: "no answer\n  because: timed out".into() }
    }

    fn is_stuck_after(progress: &Progress, start: Instant, silence: Duration) -> bool {
        progress.is_stuck(start + silence, Duration::ZERO, false)
    }

    #[test]
    fn a_service_is_ready_when_the_guest_is_tracked_or_the_reason_to_wait_is_reported() {
        let start = Instant::now();
        for event in [attached(false), away(), ProtectEvent::Waiting { state: "stopped".into() }] {
            let mut progress = Progress::new(EVERY, start);
            assert!(!progress.is_ready());
            assert!(progress.note(&event, start));
            assert!(progress.is_ready(), "{event:?}");
        }
    }

    #[test]
    fn the_status_has_the_age_of_the_newest_commit_and_the_reason_to_wait() {
        let start = Instant::now();
        let mut progress = Progress::new(EVERY, start);
        progress.note(&attached(false), start);
        assert_eq!(progress.status(start), "no checkpoint since the start of the service");
        progress.newest = Some((7, start));
        progress.note(&away(), start);
        assert_eq!(
            progress.status(start + Duration::from_secs(90)),
            "checkpoint 7 was committed 90 s ago; the store cannot be written: no answer"
        );
        // Tracking that starts again does not show that the store is back.
        assert!(!progress.note(&attached(true), start));
        assert!(progress.note(&ProtectEvent::StoreBack, start));
        assert_eq!(progress.status(start), "checkpoint 7 was committed 0 s ago");
    }

    #[test]
    fn only_a_protector_that_reports_nothing_without_a_reason_is_restarted() {
        let start = Instant::now();
        let long = MIN_SILENCE + EVERY;
        let mut progress = Progress::new(EVERY, start);
        assert!(!is_stuck_after(&progress, start, long), "systemd limits the time of the start");
        progress.note(&attached(false), start);
        assert!(!is_stuck_after(&progress, start, long * 100), "a full checkpoint may take any time");
        progress.note(&attached(true), start);
        assert!(!is_stuck_after(&progress, start, MIN_SILENCE));
        assert!(is_stuck_after(&progress, start, long));
        assert!(!progress.is_stuck(start + long, Duration::ZERO, true), "a file system does not answer");
        progress.longest = MIN_SILENCE;
        assert!(!is_stuck_after(&progress, start, long), "checkpoints take long");
        progress.longest = EVERY;
        progress.note(&ProtectEvent::Waiting { state: "the guest was stopped".into() }, start + long);
        assert!(!is_stuck_after(&progress, start, long), "it tries again and again");
        progress.note(&away(), start);
        assert!(!is_stuck_after(&progress, start, long * 100), "the store is away");
    }

    #[test]
    fn a_pause_that_does_not_end_is_stuck_unless_another_program_has_stopped_the_guest() {
        let start = Instant::now();
        let pause = MAX_PAUSE + Duration::from_secs(1);
        let mut progress = Progress::new(EVERY, start);
        progress.note(&attached(false), start);
        assert!(progress.is_stuck(start, pause, false));
        assert!(!progress.is_stuck(start, MAX_PAUSE, false));
        progress.note(&ProtectEvent::Waiting { state: "the guest was stopped".into() }, start);
        assert!(!progress.is_stuck(start, pause, false));
    }

    #[test]
    fn the_time_of_a_pause_counts_from_its_own_file() {
        let directory = tempfile::tempdir().unwrap();
        let mark = directory.path().join("paused");
        let mut watch = PauseWatch { mark: mark.clone(), seen: None };
        let start = Instant::now();
        let later = start + Duration::from_secs(90);
        assert_eq!(watch.paused_for(start), Duration::ZERO);
        fs::write(&mark, []).unwrap();
        assert_eq!(watch.paused_for(start), Duration::ZERO);
        assert_eq!(watch.paused_for(later), Duration::from_secs(90));
        fs::remove_file(&mark).unwrap();
        assert_eq!(watch.paused_for(later), Duration::ZERO);
        assert_eq!(watch.seen, None);
    }

    #[test]
    fn a_thread_that_waits_in_the_kernel_is_recognised_by_its_state() {
        let directory = tempfile::tempdir().unwrap();
        let stat = directory.path().join("stat");
        for (text, expected) in
            [("7 (a) D) S 1 7", false), ("7 (protect) D 1 7", true), ("7 (x) R 1", false), ("", false)]
        {
            fs::write(&stat, text).unwrap();
            assert_eq!(is_uninterruptible(&stat), expected, "{text}");
        }
    }
}
