//! The operation in hand.
//!
//! `operation.json` is there from before an operation's first step until after its last; each step is written and
//! synced before it is taken. If one exists while the lock is free, the operation's process died; the file names
//! the step and the QEMUs that take part.

use crate::rundir::{RunDir, sync_directory, write_json};
use rekindle_qemu::vmm::Vmm;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::io;
use std::path::PathBuf;

/// What an operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// `rekindle run`.
    Run,
    /// `rekindle restore --prepare`.
    Prepare,
    /// `rekindle restore`.
    Restore,
    /// `rekindle move`, on the host that has the guest.
    Move,
    /// `rekindle stop`.
    Stop,
    /// `rekindle reboot vmm --how warm`.
    VmmWarm,
    /// `rekindle reboot vmm --how saved`.
    VmmSaved,
    /// `rekindle reboot vmm --how cold`.
    VmmCold,
    /// `rekindle reboot os --how cold`.
    OsCold,
    /// `rekindle reboot os --how warm-cache`.
    OsWarmCache,
    /// `rekindle reboot os --how kexec`: there is one QEMU all the time.
    OsKexec,
    /// `rekindle reboot os --how phase`.
    OsPhase,
    /// `rekindle host suspend`, and `resume`, with the RAM left in place.
    HostWarm,
    /// The same with the RAM on disk.
    HostSaved,
    /// The same with the guest shut down, and booted.
    HostCold,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Run => "run",
            Self::Prepare => "restore --prepare",
            Self::Restore => "restore",
            Self::Move => "move",
            Self::Stop => "stop",
            Self::VmmWarm => "reboot vmm --how warm",
            Self::VmmSaved => "reboot vmm --how saved",
            Self::VmmCold => "reboot vmm --how cold",
            Self::OsCold => "reboot os --how cold",
            Self::OsWarmCache => "reboot os --how warm-cache",
            Self::OsKexec => "reboot os --how kexec",
            Self::OsPhase => "reboot os --how phase",
            Self::HostWarm => "host suspend --how warm",
            Self::HostSaved => "host suspend --how saved",
            Self::HostCold => "host suspend --how cold",
        })
    }
}

/// How far an operation has got. The meaning of each for recovery is in `docs/run-directory.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Nothing has been stopped yet.
    Prepare,
    /// The guest is being stopped and its state saved.
    Suspend,
    /// Its state is saved, whole, in the files that the journal names; no QEMU runs it.
    Saved,
    /// The decision: from here on only the new QEMU may run the guest.
    Resume,
    /// The new QEMU runs the guest.
    Settle,
}

/// As the end of "it was interrupted ...".
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Prepare => "before it stopped anything",
            Self::Suspend => "while it stopped the guest",
            Self::Saved => "after it had saved the guest's state",
            Self::Resume => "while it resumed the guest",
            Self::Settle => "while it cleaned up",
        })
    }
}

/// A file that holds a saved state, with what it must hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedState {
    /// The file: a stream for `-incoming`.
    pub path: PathBuf,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its XXH3 digest.
    pub digest: u64,
    /// Whether the stream was written with `x-ignore-shared`, so that it needs the RAM file, too.
    pub without_ram: bool,
}

/// `operation.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// What it is.
    pub kind: Kind,
    /// How far it has got.
    pub step: Step,
    /// The process that does it.
    pub pid: u32,
    /// The QEMU that ran the guest before.
    pub from: Option<Vmm>,
    /// The generation of the QEMU that shall run it.
    pub generation: u32,
    /// The QEMU that shall run it, once it was started.
    pub to: Option<Vmm>,
    /// The saved state, from [`Step::Saved`] on.
    pub saved: Option<SavedState>,
    /// Whether the guest runs, or was paused by its owner and has to stay so.
    pub running: bool,
    /// The guest's memory is lost, and it is being booted from its disks.
    pub lost: bool,
    /// The modification times of the writable disk images just before a new QEMU was resumed whose RAM came from a
    /// disk: while they are the same, the saved state and the disks belong together. `None` if that is unknown.
    pub disks_at_resume: Option<Vec<(PathBuf, i128)>>,
    /// The RAM file's modification time just before the new QEMU was resumed, in ns since 1970: while it is the same
    /// the guest has not run in the new one.
    pub untouched_since_ns: Option<i128>,
    /// By kexec: the number of the boot that is to end, as the guest's kernel reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<String>,
}

/// The journal of one VM's operation, removed by [`Journal::close`] only.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    /// Its current content.
    pub operation: Operation,
}

impl Journal {
    /// Opens a journal: the first entry is on disk when this returns.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn open(rundir: &RunDir, kind: Kind, from: Option<Vmm>, generation: u32) -> io::Result<Self> {
        Self::open_for(rundir, kind, from, generation, true)
    }

    /// As [`Journal::open`], for a guest that may be paused.
    ///
    /// # Errors
    /// When it cannot be written.
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
            boot: None,
        };
        let journal = Self { path: path(rundir), operation };
        journal.write()?;
        Ok(journal)
    }

    /// The journal that an operation left behind, if there is one.
    ///
    /// # Errors
    /// When it is there but cannot be read.
    pub fn left_behind(rundir: &RunDir) -> io::Result<Option<Self>> {
        let path = path(rundir);
        match fs::read(&path) {
            Ok(text) => {
                let operation = serde_json::from_slice(&text)
                    .map_err(|e| io::Error::other(format!("{} cannot be understood: {e}", path.display())))?;
                Ok(Some(Self { path, operation }))
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Writes that `step` is about to be taken.
    ///
    /// # Errors
    /// When it cannot be written: then the step must not be taken.
    pub fn advance(&mut self, step: Step) -> io::Result<()> {
        self.operation.step = step;
        self.write()
    }

    /// Writes [`Journal::operation`].
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self) -> io::Result<()> {
        write_json(&self.path, &self.operation)
    }

    /// The operation is over, done or undone.
    ///
    /// # Errors
    /// When the journal cannot be removed.
    pub fn close(self) -> io::Result<()> {
        fs::remove_file(&self.path)?;
        sync_directory(self.path.parent().unwrap_or(&self.path))
    }
}

fn path(rundir: &RunDir) -> PathBuf {
    rundir.file("operation.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_found_until_it_is_closed() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        assert!(Journal::left_behind(&rundir).unwrap().is_none());
        let mut journal = Journal::open(&rundir, Kind::VmmWarm, None, 2).unwrap();
        journal.advance(Step::Suspend).unwrap();
        let found = Journal::left_behind(&rundir).unwrap().unwrap();
        assert_eq!(found.operation, journal.operation);
        assert_eq!(found.operation.step, Step::Suspend);
        journal.close().unwrap();
        assert!(Journal::left_behind(&rundir).unwrap().is_none());
    }

    #[test]
    fn a_journal_of_nonsense_is_named() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        fs::write(rundir.file("operation.json"), "{").unwrap();
        assert!(Journal::left_behind(&rundir).unwrap_err().to_string().contains("operation.json"));
    }
}
