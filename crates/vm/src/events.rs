//! The events of a VM: what was done to it, and what went wrong. They are in `events.log`, in the directory of its logs, and
//! outlive the VM: a JSON object a line.
//!
//! Events are for people and scripts. Nothing depends on them: an event that cannot be written is lost.

#![allow(missing_docs, reason = "fields whose names need no comment")]

use crate::logs;
use crate::rundir::{EVENTS_LOG, RunDir};
use crate::timeline::host_us;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Length in bytes of the longest text of an event: a store's error may have any length.
const MAX_TEXT_BYTES: usize = 1024;
/// Bytes of a log that are read at a time.
const MAX_READ_BYTES: u64 = 1 << 20;

/// What has happened to a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum EventKind {
    /// An operation on the VM has started, by this process.
    Started { operation: String, process: u32 },
    /// An operation is done.
    Done { operation: String },
    /// An operation was undone: the VM is as it was before.
    Undone { operation: String },
    /// An operation has lost the guest's memory, and the guest was booted.
    MemoryLost { operation: String },
    /// The VM is no longer on this host: it was stopped, or has moved.
    Removed,
    /// The guest has rebooted itself, or has panicked.
    GuestRebooted { panicked: bool },
    /// `rekindle watch` has restarted a helper that had died.
    HelperRestarted { helper: String, process: u32 },
    /// A protector takes checkpoints into this store.
    ProtectionStarted { store: String },
    /// The protector has ended.
    ProtectionEnded { why: String },
    /// The store cannot be written.
    StoreAway { error: String },
    /// The store can be written again.
    StoreBack,
    /// No checkpoint is possible for now.
    ProtectionWaits { why: String },
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Started { operation, process } => write!(f, "{operation}: started (process {process})"),
            Self::Done { operation } => write!(f, "{operation}: done"),
            Self::Undone { operation } => write!(f, "{operation}: undone, the VM is as before"),
            Self::MemoryLost { operation } => write!(f, "{operation}: its memory was lost, it was booted"),
            Self::Removed => f.write_str("removed from this host"),
            Self::GuestRebooted { panicked: false } => f.write_str("the guest has rebooted itself"),
            Self::GuestRebooted { panicked: true } => f.write_str("the guest has panicked"),
            Self::HelperRestarted { helper, process } => write!(f, "{helper} had died; restarted (process {process})"),
            Self::ProtectionStarted { store } => write!(f, "protected into {store}"),
            Self::ProtectionEnded { why } => write!(f, "not protected any more: {why}"),
            Self::StoreAway { error } => write!(f, "the store cannot be written: {error}"),
            Self::StoreBack => f.write_str("the store can be written again"),
            Self::ProtectionWaits { why } => write!(f, "no checkpoint is possible for now: {why}"),
        }
    }
}

/// An event, a line of the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Host clock, in microseconds since 1970.
    pub host_us: u64,
    pub vm: String,
    #[serde(flatten)]
    pub kind: EventKind,
}

/// Appends an event to the log of a VM. A failure is only logged.
pub fn record(rundir: &RunDir, kind: EventKind) {
    let event = Event { host_us: host_us(), vm: rundir.name().into(), kind };
    if let Err(e) = append(&rundir.file(EVENTS_LOG), &event) {
        tracing::debug!("{}: cannot record an event: {e}", rundir.name());
    }
}

fn append(log: &Path, event: &Event) -> io::Result<()> {
    let mut line = serde_json::to_vec(event)?;
    line.push(b'\n');
    // One call, so that lines of several processes do not mix.
    OpenOptions::new().append(true).create(true).mode(0o600).open(log)?.write_all(&line)
}

/// Shortens the text of an event.
#[must_use]
pub fn shortened(text: &str) -> String {
    let first_line = text.lines().next().unwrap_or_default();
    match first_line.char_indices().map(|(start, _)| start).find(|start| *start >= MAX_TEXT_BYTES) {
        Some(end) => format!("{}...", &first_line[..end]),
        None => first_line.to_owned(),
    }
}

/// Reads the logs of events below a directory of logs, and then what is added to them.
#[derive(Debug)]
pub struct EventReader {
    log_dir: PathBuf,
    /// The VMs whose events are read; empty: all.
    names: Vec<String>,
    logs: Vec<ReadLog>,
}

/// How far a log was read.
#[derive(Debug)]
struct ReadLog {
    path: PathBuf,
    inode: u64,
    offset: u64,
}

impl EventReader {
    /// Reads the events of these VMs, or of all if there are none.
    #[must_use]
    pub fn new(log_dir: &Path, names: Vec<String>) -> Self {
        Self { log_dir: log_dir.to_owned(), names, logs: Vec::new() }
    }

    /// Returns the events of the older parts of the logs, oldest first.
    ///
    /// # Errors
    /// When a directory or a log cannot be read.
    pub fn older(&self) -> io::Result<Vec<Event>> {
        let mut events = Vec::new();
        for log in self.paths()? {
            for part in logs::older_parts(&log) {
                match fs::read(&part) {
                    Ok(text) => events.extend(parse(&text)),
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    Err(e) => return Err(with_path(e, &part)),
                }
            }
        }
        events.sort_by_key(|event| event.host_us);
        Ok(events)
    }

    /// Returns the events that were added since the last call, oldest first.
    ///
    /// # Errors
    /// When a directory or a log cannot be read.
    pub fn added(&mut self) -> io::Result<Vec<Event>> {
        let mut events = Vec::new();
        for path in self.paths()? {
            match self.read_on(&path) {
                Ok(text) => events.extend(parse(&text)),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(with_path(e, &path)),
            }
        }
        events.sort_by_key(|event| event.host_us);
        Ok(events)
    }

    /// Returns the whole lines of a log that follow those that were returned before.
    fn read_on(&mut self, path: &Path) -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let metadata = file.metadata()?;
        let index = match self.logs.iter().position(|log| log.path == path) {
            Some(index) => index,
            None => {
                self.logs.push(ReadLog { path: path.to_owned(), inode: metadata.ino(), offset: 0 });
                self.logs.len() - 1
            }
        };
        let log = &mut self.logs[index];
        if log.inode != metadata.ino() || metadata.len() < log.offset {
            // It was rotated.
            (log.inode, log.offset) = (metadata.ino(), 0);
        }
        file.seek(SeekFrom::Start(log.offset))?;
        let mut text = Vec::new();
        file.take(MAX_READ_BYTES).read_to_end(&mut text)?;
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        text.truncate(whole);
        log.offset += whole as u64;
        Ok(text)
    }

    fn paths(&self) -> io::Result<Vec<PathBuf>> {
        if !self.names.is_empty() {
            return Ok(self.names.iter().map(|name| self.log_dir.join(name).join(EVENTS_LOG)).collect());
        }
        match fs::read_dir(&self.log_dir) {
            Ok(entries) => entries.map(|entry| entry.map(|entry| entry.path().join(EVENTS_LOG))).collect(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(with_path(e, &self.log_dir)),
        }
    }
}

fn with_path(e: io::Error, path: &Path) -> io::Error {
    io::Error::new(e.kind(), format!("{}: {e}", path.display()))
}

/// Returns the events of a text. Lines that are none, for example after a crash, are left out.
fn parse(text: &[u8]) -> impl Iterator<Item = Event> + '_ {
    text.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(name: &str) -> EventKind {
        EventKind::Done { operation: name.into() }
    }

    fn kinds(events: Vec<Event>) -> Vec<EventKind> {
        events.into_iter().map(|event| event.kind).collect()
    }

    /// A run directory whose logs are in a directory of their own.
    fn vm(root: &Path, name: &str) -> RunDir {
        let rundir = RunDir::new(&root.join("run"), name);
        rundir.create().unwrap();
        rundir.link_logs(&root.join("log")).unwrap();
        rundir
    }

    #[test]
    fn events_of_all_or_of_some_vms_are_read_once_in_the_order_of_time() {
        let root = tempfile::tempdir().unwrap();
        let (web, db) = (vm(root.path(), "web"), vm(root.path(), "db"));
        let mut all = EventReader::new(&root.path().join("log"), Vec::new());
        assert_eq!(all.added().unwrap(), []);
        record(&web, operation("first"));
        record(&db, operation("second"));
        record(&web, EventKind::StoreBack);
        assert_eq!(kinds(all.added().unwrap()), [operation("first"), operation("second"), EventKind::StoreBack]);
        assert_eq!(all.added().unwrap(), []);
        record(&db, operation("third"));
        assert_eq!(kinds(all.added().unwrap()), [operation("third")]);
        let mut one = EventReader::new(&root.path().join("log"), vec!["web".into(), "none".into()]);
        let events = one.added().unwrap();
        assert!(events.iter().all(|event| event.vm == "web"), "{events:?}");
        assert_eq!(kinds(events), [operation("first"), EventKind::StoreBack]);
    }

    #[test]
    fn a_line_counts_when_it_is_whole_and_damage_is_left_out() {
        let root = tempfile::tempdir().unwrap();
        let web = vm(root.path(), "web");
        let mut reader = EventReader::new(&root.path().join("log"), Vec::new());
        record(&web, operation("first"));
        let log = web.file(EVENTS_LOG);
        let mut file = OpenOptions::new().append(true).open(&log).unwrap();
        file.write_all(b"\0\0damage\n{\"host_us\": 1, \"vm\": \"web\", ").unwrap();
        assert_eq!(kinds(reader.added().unwrap()), [operation("first")]);
        file.write_all(b"\"event\": \"store-back\"}\n").unwrap();
        assert_eq!(kinds(reader.added().unwrap()), [EventKind::StoreBack]);
    }

    #[test]
    fn events_of_an_earlier_vm_of_the_name_are_in_the_older_parts() {
        let root = tempfile::tempdir().unwrap();
        let web = vm(root.path(), "web");
        let mut reader = EventReader::new(&root.path().join("log"), Vec::new());
        record(&web, operation("earlier"));
        assert_eq!(reader.added().unwrap().len(), 1);
        fs::remove_dir_all(web.path()).unwrap();
        let web = vm(root.path(), "web");
        record(&web, operation("later"));
        assert_eq!(kinds(reader.older().unwrap()), [operation("earlier")]);
        assert_eq!(kinds(reader.added().unwrap()), [operation("later")]);
    }

    #[test]
    fn texts_are_short_and_of_one_line() {
        assert_eq!(shortened("no answer\nsecond line"), "no answer");
        let long = shortened(&"ä".repeat(5000));
        assert!(long.len() <= MAX_TEXT_BYTES + 4 && long.ends_with("ä..."), "{} bytes", long.len());
    }
}
