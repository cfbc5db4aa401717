//! A disk's redo log on a disk of the host that is full or fails at each system call that changes or syncs a file of the
//! log or the image.
//!
//! A *redo log* has the writes of a protected guest in *epochs*, one for each time between two checkpoints. To *seal* an
//! epoch is to make it durable; to *merge* it is to copy it to the image (`docs/disk-epochs.md`).
//!
//! The guest's own writes and flushes do not fail here: the server does them with `io_uring`, which the faults do not
//! reach. Everything else of a log is done by system calls: its directory, its state, new segments, seals, merges and
//! its removal.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::{DEADLINE, Disk, FIRST_FREE_FRAME, Guest, GuestRequest, PAGE, RingState, content, log_options, wait_for};
use rekindle_disk::control::{ControlCommand, ControlError};
use rekindle_disk::engine::redo_log::RedoStatus;
use rekindle_disk::keeper::EpochId;
use rekindle_disk::redo::recover::DiskVersion;
use rekindle_testing::io_faults::{FailedCall, Fault, FaultKind, FaultyFiles};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

/// Blocks of the disk.
const BLOCKS: u64 = 8;
/// A scenario makes more calls than this, of which more than a quarter are syncs of files.
const MIN_CALLS: usize = 30;

/// The version of each block.
type Versions = BTreeMap<u64, u64>;

/// What happens while calls can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scenario {
    /// A log begins, three epochs are sealed, and two are merged; in between the log ends and another one begins.
    Protected,
    /// A log begins and ends. The guest writes and flushes afterwards.
    Ended,
}

/// A disk, its guest, and what was reported to the guest and to its protector.
struct History<'f> {
    files: &'f FaultyFiles,
    disk: &'f mut Disk,
    guest: Option<Guest>,
    /// The newest version of each block that the guest has written.
    written: Versions,
    /// The versions that a flush, a seal or a merge has made durable.
    durable: Versions,
    /// The sealed epochs of the present log, with their disks.
    sealed: BTreeMap<u64, Versions>,
    log: Option<EpochId>,
    /// The newest version.
    version: u64,
    errors: Vec<String>,
}

impl<'f> History<'f> {
    /// Starts with a new image.
    fn new(files: &'f FaultyFiles, disk: &'f mut Disk) -> Self {
        let image = File::create(&disk.image).unwrap();
        for block in 0..BLOCKS {
            image.write_all_at(&content(block, 0), block * PAGE).unwrap();
        }
        let versions: Versions = (0..BLOCKS).map(|block| (block, 0)).collect();
        let (written, durable) = (versions.clone(), versions);
        let (sealed, errors) = (BTreeMap::new(), Vec::new());
        Self { files, disk, guest: None, written, durable, sealed, log: None, version: 0, errors }
    }

    /// Starts the server and the guest.
    fn serve(&mut self, version: DiskVersion) {
        let files = self.files.clone();
        self.disk.serve_after(|service| service.redo = log_options(version), move || files.supervise());
        self.guest = Some(Guest::start(&self.disk.socket()));
    }

    fn end(&mut self) {
        self.guest = None;
        self.disk.end();
    }

    fn guest(&mut self) -> &mut Guest {
        self.guest.as_mut().unwrap()
    }

    fn status(&self) -> Option<RedoStatus> {
        self.disk.control().status().unwrap().redo
    }

    /// Checks that an error names the redo log, and the cause.
    fn check_error(&mut self, text: String) {
        let log = self.disk.image.with_extension("raw.redo");
        let failed = self.files.failed();
        let causes = ["os error 28", "os error 5", "failed before", "a flush of the guest has failed", "checksum"];
        let is_consequence = ["start the disk's server", "no redo log", "failed before", "try again when that is done"]
            .iter()
            .any(|why| text.contains(why));
        let names_log = text.contains(&*log.to_string_lossy()) && causes.iter().any(|cause| text.contains(cause));
        assert!(!failed.is_empty() && (names_log || is_consequence), "{text}, after {failed:?}");
        self.errors.push(text);
    }

    /// Sends a request to the server. Returns the answer, or `None` after an error, which is checked.
    fn ask<T: serde::de::DeserializeOwned>(&mut self, command: &ControlCommand) -> Option<T> {
        match self.disk.control().ask(command) {
            Ok(answer) => Some(answer),
            Err(e @ ControlError::Refused { .. }) => {
                self.check_error(e.to_string());
                None
            }
            Err(e) => panic!("{e}"),
        }
    }

    /// Starts a log, unless there is one.
    fn begin(&mut self) {
        if let Some(log) = self.ask::<EpochId>(&ControlCommand::EpochBegin {})
            && self.log.is_none_or(|known| known.disk != log.disk)
        {
            self.sealed.clear();
            self.log = Some(log);
        }
    }

    /// Writes some blocks as the guest. Returns `None` if a write waits, because a full disk stays full.
    fn write(&mut self) -> Option<()> {
        self.version += 1;
        let version = self.version;
        for block in (version % 3..BLOCKS).step_by(3) {
            self.guest().fill(FIRST_FREE_FRAME, &content(block, version));
            self.guest().add_request(0, &GuestRequest::write(block, FIRST_FREE_FRAME));
            self.guest().kick(0);
            self.written.insert(block, version);
            let is_done = wait_for("a write", || {
                if self.finish_write() {
                    return Some(true);
                }
                let why = self.status()?.waiting?;
                assert!(why.contains("no segment") || why.contains("no room") || why.contains("about to end"), "{why}");
                self.files.is_full().then_some(false)
            });
            is_done.then_some(())?;
        }
        Some(())
    }

    /// Returns whether the write in progress is done.
    fn finish_write(&mut self) -> bool {
        let completed = self.guest().take_completed(0);
        assert!(completed.iter().all(|request| request.status == 0), "{completed:?}");
        !completed.is_empty()
    }

    /// Flushes as the guest, which may fail after a failed sync.
    fn flush(&mut self) {
        if self.guest().request(&GuestRequest::flush()) == 0 {
            self.durable = self.written.clone();
            self.files.note_flush();
        } else {
            assert!(has_failed_sync(&self.files.failed()), "{:?}", self.files.failed());
        }
    }

    /// Ends an epoch and seals it. Returns its number if both succeeded.
    fn seal(&mut self) -> Option<u64> {
        self.guest().stop(0);
        let marked = self.ask::<EpochId>(&ControlCommand::EpochMark {});
        self.guest().run(0, RingState::Kept);
        let EpochId { epoch, .. } = marked?;
        let versions = self.written.clone();
        self.ask::<()>(&ControlCommand::EpochSeal { epoch })?;
        self.durable = versions.clone();
        self.sealed.insert(epoch, versions);
        Some(epoch)
    }

    /// Reports the checkpoint of an epoch as committed, and waits for the merge. Returns whether it succeeded.
    fn merge(&mut self, epoch: u64) -> bool {
        if self.ask::<()>(&ControlCommand::EpochCommitted { epoch }).is_none() {
            return false;
        }
        self.sealed.retain(|sealed, _| *sealed >= epoch);
        let ended = wait_for("the merge", || {
            let status = self.status()?;
            (status.merged >= epoch).then_some(None).or_else(|| status.failed.map(Some))
        });
        if let Some(why) = ended {
            self.check_error(why);
            return false;
        }
        true
    }

    /// Merges and removes the log. Returns whether that succeeded.
    fn end_log(&mut self) -> bool {
        self.sealed.clear();
        match self.disk.control().end_epochs(DEADLINE) {
            Ok(()) => {
                if self.log.take().is_some() {
                    self.durable = self.written.clone();
                }
                true
            }
            Err(e) => {
                self.check_error(e.to_string());
                false
            }
        }
    }

    /// Runs a scenario. It ends when a write waits: then no epoch can be marked.
    fn run(&mut self, scenario: Scenario) -> Option<()> {
        self.write()?;
        if scenario == Scenario::Ended {
            self.begin();
            self.write()?;
            self.seal();
            self.write()?;
            self.end_log();
            self.write()?;
            self.flush();
            return Some(());
        }
        for round in 0..3 {
            self.begin();
            self.write()?;
            if round == 1 {
                self.flush();
            }
            let sealed = self.seal();
            self.write()?;
            if let Some(epoch) = sealed.filter(|_| round < 2) {
                self.merge(epoch);
            }
            if round == 1 {
                self.end_log();
            }
        }
        Some(())
    }

    /// Checks that no durable write is missing, and, without a power failure, no other one. Returns the versions found.
    fn check_disk(&mut self, loses_unsynced: bool) -> Versions {
        let mut found = Versions::new();
        for block in 0..BLOCKS {
            let (written, durable) = (self.written[&block], self.durable[&block]);
            let status = self.guest().request(&GuestRequest::read(block, FIRST_FREE_FRAME));
            let bytes = self.guest().frame(FIRST_FREE_FRAME);
            let oldest = if loses_unsynced { durable } else { written };
            let version = (oldest..=written).rev().find(|version| status == 0 && bytes == content(block, *version));
            let is_lost = loses_unsynced && written != durable;
            let actual = (0..=self.version).find(|version| bytes == content(block, *version));
            assert!(
                version.is_some() || is_lost,
                "block {block}: {actual:?}, status {status}; written {written}, durable {durable}"
            );
            found.insert(block, version.unwrap_or(durable));
        }
        found
    }

    /// All steps of a log, which must succeed.
    fn continue_normally(&mut self) {
        let errors = self.errors.len();
        self.begin();
        for _ in 0..2 {
            self.write().unwrap();
            let epoch = self.seal().unwrap_or_else(|| panic!("{:?}", self.errors));
            assert!(self.merge(epoch), "{:?}", self.errors);
        }
        self.write().unwrap();
        assert!(self.end_log(), "{:?}", self.errors);
        assert_eq!(self.errors.len(), errors, "{:?}", self.errors);
        for block in 0..BLOCKS {
            assert_eq!(self.disk.block(block), content(block, self.written[&block]), "block {block} of the image");
        }
    }
}

/// Returns whether the sync of a file has failed, after which it is unknown what of it is durable.
fn has_failed_sync(failed: &[FailedCall]) -> bool {
    failed.iter().any(|call| call.name == "fdatasync")
}

/// Lets each call of the scenario fail.
fn walk(scenario: Scenario, kind: FaultKind) {
    let directory = tempfile::Builder::new().prefix("faults-").tempdir_in("/dev/shm").unwrap();
    let directory = fs::canonicalize(directory.path()).unwrap();
    let files = FaultyFiles::new(&directory);
    let mut disk = Disk::new(1);
    disk.end();
    disk.image = directory.join("disk.raw");
    for number in 1.. {
        let has_failed = run_with(&files, &mut disk, scenario, Fault { kind, number });
        if !has_failed {
            let min_calls = if kind == FaultKind::SyncLosesData { MIN_CALLS / 4 } else { MIN_CALLS };
            assert!(number > min_calls, "{number} calls");
            break;
        }
    }
}

/// Runs the scenario with a fault, and checks what is left. Returns whether a call has failed.
fn run_with(files: &FaultyFiles, disk: &mut Disk, scenario: Scenario, fault: Fault) -> bool {
    let mut history = History::new(files, disk);
    history.serve(DiskVersion::Newest);
    files.start(fault);
    let is_complete = history.run(scenario).is_some();
    let failed = files.stop();
    println!("{scenario:?} {fault:?}: {failed:?}, {:?}", history.errors);
    assert!(!failed.is_empty() || history.errors.is_empty());
    if !is_complete {
        wait_for("the write that waits for space", || history.finish_write().then_some(()));
    }
    let has_lost = fault.kind == FaultKind::SyncLosesData && !failed.is_empty();
    history.check_disk(has_lost);
    if scenario == Scenario::Protected && !has_failed_sync(&failed) {
        // The disk works again, and nothing is unknown: the server continues.
        let sealed = std::mem::take(&mut history.sealed);
        history.begin();
        history.seal().unwrap_or_else(|| panic!("{:?}", history.errors));
        history.sealed.extend(sealed);
    }
    history.end();
    if has_failed_sync(&failed) {
        // The next server reads what may not be durable.
        history.serve(DiskVersion::Newest);
        history.check_disk(has_lost);
        history.end();
    }
    files.lose_power();
    // The newest sealed epoch is as it was when its seal was reported.
    if let (Some(EpochId { disk, .. }), Some((epoch, versions))) = (history.log, history.sealed.pop_last()) {
        history.serve(DiskVersion::Epoch { epoch, disk });
        for (block, version) in versions {
            assert_eq!(history.guest().read(block, FIRST_FREE_FRAME), content(block, version), "epoch {epoch}");
        }
        history.end();
    }
    history.serve(DiskVersion::Newest);
    history.written = history.check_disk(true);
    history.durable = history.written.clone();
    history.log = None;
    history.continue_normally();
    history.end();
    !failed.is_empty()
}

#[test]
fn a_log_whose_disk_is_full_for_one_call() {
    walk(Scenario::Protected, FaultKind::NoSpaceOnce);
}

#[test]
fn a_log_whose_disk_is_full_from_one_call_on() {
    walk(Scenario::Protected, FaultKind::NoSpace);
}

#[test]
fn a_log_of_which_one_call_fails() {
    walk(Scenario::Protected, FaultKind::IoErrorOnce);
}

#[test]
fn a_log_of_which_one_sync_fails_and_loses_what_was_written() {
    walk(Scenario::Protected, FaultKind::SyncLosesData);
}

#[test]
fn a_log_that_ends_while_the_disk_is_full() {
    walk(Scenario::Ended, FaultKind::NoSpace);
}

#[test]
fn a_log_that_ends_while_one_call_fails() {
    walk(Scenario::Ended, FaultKind::IoErrorOnce);
}
