//! The journal of an operation on a VM.
//!
//! `operation.json` exists from before an operation's first step until after its last. Each step is written and
//! synced before it is taken. If the file exists while the lock is free, the operation's process has died; the file
//! names the step and the QEMUs that take part.

pub use rekindle_libvirt::daemon::DaemonRecord;

use crate::events::{self, EventKind};
use crate::rundir::{RunDir, read_record, sync_directory, write_json};
use rekindle_qemu::ramblock::RamBlock;
use rekindle_qemu::vmm::Vmm;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::RawFd;
use std::path::PathBuf;
use uuid::Uuid;

/// The kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// `rekindle run`.
    Run,
    /// `rekindle restore --prepare`.
    Prepare,
    /// `rekindle restore`.
    Restore,
    /// `rekindle restore --into-libvirt`.
    LibvirtRestore,
    /// `rekindle move`, on the source host.
    Move,
    /// `rekindle stop`.
    Stop,
    /// `rekindle replace-qemu --how warm`.
    VmmWarm,
    /// `rekindle replace-qemu --how saved`.
    VmmSaved,
    /// `rekindle replace-qemu --how cold`.
    VmmCold,
    /// `rekindle replace-qemu`, for a domain of libvirt.
    LibvirtReplace,
    /// `rekindle replace-qemu`, for a QEMU that is known by its QMP socket.
    BareReplace,
    /// `rekindle reboot --how cold`.
    OsCold,
    /// `rekindle reboot --how warm-cache`.
    OsWarmCache,
    /// `rekindle reboot --how kexec`: the guest stays in the same QEMU.
    OsKexec,
    /// `rekindle reboot --how phase`.
    OsPhase,
    /// `rekindle host suspend --how warm`, and its `resume`: the RAM stays in place.
    HostWarm,
    /// `rekindle host suspend --how saved`, and its `resume`: the RAM is on disk.
    HostSaved,
    /// `rekindle host suspend --how cold`, and its `resume`: the guest is shut down and booted.
    HostCold,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Run => "run",
            Self::Prepare => "restore --prepare",
            Self::Restore => "restore",
            Self::LibvirtRestore => "restore --into-libvirt",
            Self::Move => "move",
            Self::Stop => "stop",
            Self::VmmWarm => "replace-qemu --how warm",
            Self::VmmSaved => "replace-qemu --how saved",
            Self::VmmCold => "replace-qemu --how cold",
            Self::LibvirtReplace | Self::BareReplace => "replace-qemu",
            Self::OsCold => "reboot --how cold",
            Self::OsWarmCache => "reboot --how warm-cache",
            Self::OsKexec => "reboot --how kexec",
            Self::OsPhase => "reboot --how phase",
            Self::HostWarm => "host suspend --how warm",
            Self::HostSaved => "host suspend --how saved",
            Self::HostCold => "host suspend --how cold",
        })
    }
}

/// The step that an operation has reached. `docs/run-directory.md` describes what each means for recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Nothing has been stopped yet.
    Prepare,
    /// The guest is being stopped and its state saved.
    Suspend,
    /// The guest's state is saved, complete, in the files that the journal names; no QEMU runs it.
    Saved,
    /// The decision: from now on only the destination QEMU may run the guest.
    Resume,
    /// The destination QEMU runs the guest; the program that manages the guest gets it back.
    GiveBack,
    /// The destination QEMU runs the guest, and the source is ended.
    Settle,
}

/// Written as the end of "was interrupted ...".
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Prepare => "before it stopped anything",
            Self::Suspend => "while it stopped the guest",
            Self::Saved => "after it had saved the guest's state",
            Self::Resume => "while it resumed the guest",
            Self::GiveBack => "while it returned the guest to its manager",
            Self::Settle => "while it cleaned up",
        })
    }
}

/// A file with a saved state, and what identifies its content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedState {
    /// Path of the file: a stream for `-incoming`.
    pub path: PathBuf,
    /// Length in bytes.
    pub bytes: u64,
    /// XXH3 digest of the content.
    pub digest: u64,
    /// Whether the stream was written with `x-ignore-shared`, so that it also requires the RAM file.
    pub without_ram: bool,
}

/// Name of the journal in the run directory.
pub const JOURNAL_FILE: &str = "operation.json";

/// The content of `operation.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// The kind of the operation.
    pub kind: Kind,
    /// The step that the operation has reached.
    pub step: Step,
    /// Process number of the operation.
    pub pid: u32,
    /// The source QEMU.
    pub from: Option<Vmm>,
    /// Generation of the destination QEMU.
    pub generation: u32,
    /// The destination QEMU, after it was started.
    pub to: Option<Vmm>,
    /// The saved state, from [`Step::Saved`] on.
    pub saved: Option<SavedState>,
    /// Whether the guest ran before the operation. If false, its owner had paused it, and it must stay paused.
    pub running: bool,
    /// Whether the guest's memory is lost, so that it is booted from its disks.
    pub lost: bool,
    /// Modification times of the writable disk images just before a destination QEMU was resumed whose RAM came from
    /// a disk. While they are unchanged, the saved state and the disks belong together. `None` if unknown.
    pub disks_at_resume: Option<Vec<(PathBuf, i128)>>,
    /// Modification time of the RAM file just before the destination QEMU was resumed, in ns since 1970. While it is
    /// unchanged, the guest has not run in the destination.
    pub untouched_since_ns: Option<i128>,
    /// The source's numbers of the queues of its taps that are detached while the guest is handed over. If the guest
    /// returns to the source, they are attached again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub detached_queues: Vec<RawFd>,
    /// For kexec: the boot ID of the boot that will end, as the guest's kernel reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<String>,
    /// For a guest that Rekindle did not start: what passes to the destination.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passed: Option<PassedParts>,
    /// For a domain of libvirt: what returns it to libvirt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub libvirt: Option<LibvirtOperation>,
    /// For a QEMU that is known by its QMP socket: what its manager must find.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bare: Option<BareOperation>,
    /// For RAM that is moved in place: the blocks in both QEMUs, in the same order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved_ram: Option<MovedBlocks>,
    /// For a restore into libvirt: the domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored_domain: Option<RestoredDomain>,
}

/// RAM blocks whose pages are moved from the source to the destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedBlocks {
    /// The source's, in private memory.
    pub source: Vec<RamBlock>,
    /// The destination's.
    pub destination: Vec<RamBlock>,
}

/// What the replacement of a QEMU, which is known by its QMP socket, returns to its manager besides its sockets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BareOperation {
    /// The file that names the QEMU's process.
    pub pid_file: Option<PathBuf>,
}

/// The domain that a restore into libvirt makes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoredDomain {
    /// The domain's UUID.
    pub uuid: String,
    /// libvirt's connection URI. None: libvirt chooses.
    pub connect: Option<String>,
}

/// What passes to the destination, of a guest that Rekindle did not start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedParts {
    /// Listening sockets that pass to the destination.
    pub listeners: Vec<PassedListener>,
    /// Forwarded ports, which the destination gets when the source has ended.
    pub forwards: Vec<ForwardedPort>,
    /// Numbers in the destination at which the listening sockets of its VNC server are open; `None` without a server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vnc: Option<Vec<RawFd>>,
    /// The stand-ins at which its VNC server listens, if it has websockets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vnc_stand_ins: Vec<PassedStandIn>,
    /// The stand-ins at which its SPICE server listens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spice_stand_ins: Vec<PassedStandIn>,
    /// The emulator of its TPM; `None` without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpm: Option<PassedTpm>,
}

/// What the replacement of a libvirt domain's QEMU needs to return the domain to libvirt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LibvirtOperation {
    /// The file in which libvirt's daemon records the running domain.
    pub status_file: PathBuf,
    /// The monitor socket, which the daemon connects to.
    pub monitor: PathBuf,
    /// The domain's UUID.
    pub uuid: Uuid,
    /// How to start the daemon again.
    pub daemon: DaemonRecord,
    /// Whether the daemon has been stopped.
    pub absence: Absence,
    /// The QEMU to record for this domain until it is shut off; `None`: the same as before.
    pub emulator: Option<PathBuf>,
    /// libvirt's names of the destination's features; `None`: the same as the source's.
    pub capabilities: Option<BTreeSet<String>>,
}

/// A listening socket of the source in the destination. The destination starts with a stand-in, and gets the real one
/// when the source has been frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedListener {
    /// The number in the source.
    pub source: RawFd,
    /// The number that QEMU listens on in the destination. The stand-in is open there first.
    pub destination: RawFd,
    /// A number that QEMU does not use in the destination. The real socket is open there.
    pub spare: RawFd,
}

/// The emulator of the source's TPM, and the one that continues it for the destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedTpm {
    /// The source's.
    pub source: EmulatorProcess,
    /// The destination's; `None` before it was started.
    pub successor: Option<EmulatorProcess>,
    /// The socket of the source's. The successor's replaces it.
    pub socket: PassedFile,
    /// The file with the number of the source's process, if there is one.
    pub pid_file: Option<PathBuf>,
    /// The file that it has locked. Old versions lock none.
    pub lock: MovedFile,
}

/// A process that emulates a TPM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmulatorProcess {
    /// Its number.
    pub pid: u32,
    /// When it was started, in clock ticks since the host's boot.
    pub started: u64,
}

/// A file that both processes open at the same path. The source's is renamed before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedFile {
    /// Where both expect it.
    pub path: PathBuf,
    /// Where the source's is until the source has ended, or the guest has returned to it.
    pub moved: PathBuf,
}

/// A file of which each process has its own. The destination's replaces the source's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedFile {
    /// Where the guest's manager has it.
    pub path: PathBuf,
    /// Where the destination's is until the source has ended.
    pub waiting: PathBuf,
}

/// A listening socket of the source, and the stand-in at which a server of the destination listens until it gets it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedStandIn {
    /// The number at which the source's listening socket is open.
    pub listener: RawFd,
    /// Path of the Unix socket that the server has made in its place.
    pub stand_in: PathBuf,
    /// The server may make several sockets at this path: whether it has removed this one's file to make the next. `None`
    /// if it makes one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_removed: Option<bool>,
}

/// A port of the host that a user network forwards to the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForwardedPort {
    /// Id of the network.
    pub network: String,
    /// As in QEMU's `hostfwd_add`.
    pub rule: String,
}

/// Whether libvirt's daemon has been stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Absence {
    /// It was not stopped.
    Present,
    /// It is asked to end, or has ended.
    Stopped,
    /// It may be started again: it has the domain's new record.
    Starting,
}

/// How an operation has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It was carried out.
    Done,
    /// The VM is as it was before the operation, or another host has the guest.
    Undone,
}

/// The journal of one VM's operation. Only [`Journal::close`] removes it.
#[derive(Debug)]
pub struct Journal {
    rundir: RunDir,
    /// The current content.
    pub operation: Operation,
}

impl Journal {
    /// Opens a journal. When this returns, the first entry is on disk.
    ///
    /// # Errors
    /// When `operation.json` cannot be written or synced.
    pub fn open(rundir: &RunDir, kind: Kind, from: Option<Vmm>, generation: u32) -> io::Result<Self> {
        Self::open_for(rundir, kind, from, generation, true)
    }

    /// As [`Journal::open`], for a guest that may be paused.
    ///
    /// # Errors
    /// When `operation.json` cannot be written or synced.
    pub fn open_for(
        rundir: &RunDir,
        kind: Kind,
        from: Option<Vmm>,
        generation: u32,
        running: bool,
    ) -> io::Result<Self> {
        let operation = Operation {
            kind,
            step: Step::Prepare,
            pid: std::process::id(),
            from,
            generation,
            to: None,
            saved: None,
            running,
            lost: false,
            disks_at_resume: None,
            untouched_since_ns: None,
            detached_queues: Vec::new(),
            boot: None,
            passed: None,
            libvirt: None,
            bare: None,
            moved_ram: None,
            restored_domain: None,
        };
        let journal = Self { rundir: rundir.clone(), operation };
        journal.write()?;
        let started = EventKind::Started { operation: kind.to_string(), process: std::process::id() };
        events::record(rundir, started);
        Ok(journal)
    }

    /// Reads the journal of the operation that runs or was interrupted; `None` if there is none.
    ///
    /// # Errors
    /// When the file exists but cannot be read.
    pub fn read(rundir: &RunDir) -> io::Result<Option<Self>> {
        let path = path(rundir);
        match read_record(&path) {
            Ok(text) => {
                let operation = serde_json::from_slice(&text)
                    .map_err(|e| io::Error::other(format!("{} cannot be understood: {e}", path.display())))?;
                Ok(Some(Self { rundir: rundir.clone(), operation }))
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Records that `step` is about to be taken.
    ///
    /// # Errors
    /// When the journal cannot be written: then the operation is still at its previous step, and `step` must not be
    /// taken.
    pub fn advance(&mut self, step: Step) -> io::Result<()> {
        let previous_step = std::mem::replace(&mut self.operation.step, step);
        self.write().inspect_err(|_| {
            self.operation.step = previous_step;
            // If only the sync of the directory has failed, the file has the new step.
            let _ = self.write();
        })
    }

    /// Writes [`Journal::operation`] to the file.
    ///
    /// # Errors
    /// When the file cannot be written or synced.
    pub fn write(&self) -> io::Result<()> {
        write_json(&path(&self.rundir), &self.operation)
    }

    /// Removes the journal: the operation has ended like this.
    ///
    /// # Errors
    /// When the journal cannot be removed.
    pub fn close(self, end: End) -> io::Result<()> {
        fs::remove_file(path(&self.rundir))?;
        sync_directory(self.rundir.path())?;
        let operation = self.operation.kind.to_string();
        let ended = match end {
            End::Done if self.operation.lost => EventKind::MemoryLost { operation },
            End::Done => EventKind::Done { operation },
            End::Undone => EventKind::Undone { operation },
        };
        events::record(&self.rundir, ended);
        Ok(())
    }
}

fn path(rundir: &RunDir) -> PathBuf {
    rundir.file(JOURNAL_FILE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_found_until_it_is_closed() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        assert!(Journal::read(&rundir).unwrap().is_none());
        let mut journal = Journal::open(&rundir, Kind::VmmWarm, None, 2).unwrap();
        journal.advance(Step::Suspend).unwrap();
        let journal_read = Journal::read(&rundir).unwrap().unwrap();
        assert_eq!(journal_read.operation, journal.operation);
        assert_eq!(journal_read.operation.step, Step::Suspend);
        journal.close(End::Done).unwrap();
        assert!(Journal::read(&rundir).unwrap().is_none());
    }

    #[test]
    fn a_step_that_cannot_be_written_is_not_taken() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        let mut journal = Journal::open(&rundir, Kind::LibvirtReplace, None, 2).unwrap();
        // Where the new content is written before it replaces the journal.
        let obstacle = rundir.file("operation.new");
        fs::create_dir(&obstacle).unwrap();
        journal.advance(Step::Resume).unwrap_err();
        assert_eq!(journal.operation.step, Step::Prepare);
        assert_eq!(Journal::read(&rundir).unwrap().unwrap().operation, journal.operation);
        fs::remove_dir(&obstacle).unwrap();
        journal.advance(Step::Suspend).unwrap();
        assert_eq!(Journal::read(&rundir).unwrap().unwrap().operation.step, Step::Suspend);
    }

    #[test]
    fn a_journal_of_nonsense_is_named() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        fs::write(rundir.file(JOURNAL_FILE), "{").unwrap();
        assert!(Journal::read(&rundir).unwrap_err().to_string().contains("operation.json"));
    }
}
