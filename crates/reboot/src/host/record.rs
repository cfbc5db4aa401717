//! The record of suspended guests.
//!
//! ```text
//! SUSPEND_DIR/              on a disk: a host whose RAM is lost must still know which guests it has lost
//!   lock                    flock: held by the process that suspends or resumes
//!   host.json               written last: it validates the other files that have its token
//!   guests/NAME.json        one guest; in a separate folder, so that a VM may have any name
//! RAM_DIR/.suspended/       next to the RAM, and lost with it
//!   token                   the same token: this RAM belongs to that record
//!   NAME-HASH.stream        a guest's state without main RAM
//!   NAME-HASH.pages         a digest of each page of its RAM
//! ```
//!
//! All files are written atomically. A guest's file is durably marked `struck` before the guest is resumed: from then
//! on no other QEMU may get its state.

use super::HostError;
use crate::vmm::RebootMethod;
use rekindle_qemu::cpu::Features;
use rekindle_vm::journal::SavedState;
use rekindle_vm::names::unique_name;
use rekindle_vm::rundir::{RunDir, sync_directory, write_atomically, write_json};
use rekindle_vm::state::State;
use rekindle_vm::timeline::{Entry as StepEntry, host_us};
use rustix::fs::{FlockOperation, flock};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The format of these files.
///
/// Format 1 had guests as `NAME.json` next to `host.json`; such files are still read.
const FORMAT: u32 = 2;
const HEADER_FILE: &str = "host.json";
const GUEST_DIR: &str = "guests";
const LOCK_FILE: &str = "lock";
/// Name of the directory next to the RAM.
const STATE_DIR: &str = ".suspended";
const TOKEN_FILE: &str = "token";

/// Data common to all guests of one suspend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordHeader {
    pub format: u32,
    /// Unique ID of this suspend.
    pub token: String,
    /// Boot ID of the kernel under which the guests were suspended.
    pub boot_id: String,
    /// When the record was committed: host clock, microseconds since 1970.
    pub committed_us: u64,
}

/// A file, with the length and digest that it must have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileDigest {
    pub path: PathBuf,
    /// Length of the file in bytes.
    pub bytes: u64,
    /// XXH3 digest of the file's content.
    pub digest: u64,
}

/// One suspended guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SuspendedGuest {
    /// Must equal the token of the [`RecordHeader`]; otherwise the entry does not count.
    pub token: String,
    pub how: RebootMethod,
    pub state: State,
    /// `false` if the VM's owner had paused the guest: it stays paused.
    pub running: bool,
    /// The saved state; `None` if the guest was shut down.
    pub saved: Option<SavedState>,
    /// Digests of the pages of the guest's RAM.
    #[serde(rename = "pages")]
    pub page_digests: Option<FileDigest>,
    /// Processor features that the guest saw.
    pub cpu: Features,
    /// Modification times of the guest's disk images; `None` if they do not show writes.
    #[serde(rename = "disks")]
    pub disk_times: Option<Vec<(PathBuf, i128)>>,
    /// When the guest was stopped: host clock, microseconds since 1970.
    pub stop_us: u64,
    /// Reason why the guest was shut down although another method was requested.
    pub fell_back: Option<String>,
    /// Set before a QEMU resumes the guest: from then on no other QEMU may get its state.
    #[serde(rename = "struck")]
    pub resume_started: bool,
    /// Steps of the guest's suspend.
    pub steps: Vec<StepEntry>,
    /// Files from which the guest's QEMU is started, to be read ahead.
    #[serde(default)]
    pub files: Vec<PathBuf>,
}

impl SuspendedGuest {
    /// Returns the entry of a guest that could neither be suspended nor shut down. The guest ends with the host and is
    /// booted later.
    #[must_use]
    pub fn not_suspended(token: &str, state: State, why: String) -> Self {
        Self {
            token: token.into(),
            how: RebootMethod::Cold,
            disk_times: None,
            state,
            running: true,
            saved: None,
            page_digests: None,
            cpu: Features::new(),
            stop_us: host_us(),
            fell_back: Some(why),
            resume_started: false,
            steps: Vec::new(),
            files: Vec::new(),
        }
    }
}

/// A host's record of suspended guests.
#[derive(Debug)]
pub struct SuspendRecord {
    directory: PathBuf,
    /// Lock of the record: one process at a time suspends or resumes guests.
    lock: Option<File>,
    /// Header that validates the entries. `None`: no guest is suspended.
    pub header: Option<RecordHeader>,
}

impl SuspendRecord {
    /// Reads the record in `directory`, which need not exist.
    ///
    /// # Errors
    /// [`HostError::Record`] if the record exists and cannot be read or parsed.
    pub fn read(directory: &Path) -> Result<Self, HostError> {
        let path = directory.join(HEADER_FILE);
        let header: Option<RecordHeader> = read_json(&path)?;
        if let Some(RecordHeader { format, .. }) = header.as_ref().filter(|header| header.format > FORMAT) {
            let text = format!("it has format {format}, written by a newer Rekindle; use that version");
            return Err(HostError::record(&path)(io::Error::other(text)));
        }
        Ok(Self { directory: directory.to_owned(), lock: None, header })
    }

    /// Waits until no other process suspends or resumes guests, then reads the record. Excludes such processes until
    /// the returned record is dropped.
    ///
    /// # Errors
    /// [`HostError::Record`] if the record cannot be locked or read.
    pub fn lock(directory: &Path) -> Result<Self, HostError> {
        let path = directory.join(LOCK_FILE);
        let failed = HostError::record(&path);
        create_private_directory(directory).map_err(&failed)?;
        let mut options = OpenOptions::new();
        let lock = options.write(true).create(true).truncate(false).mode(0o600).open(&path).map_err(&failed)?;
        flock(&lock, FlockOperation::LockExclusive).map_err(|e| failed(e.into()))?;
        Ok(Self { lock: Some(lock), ..Self::read(directory)? })
    }

    /// Returns the names of all suspended VMs.
    ///
    /// # Errors
    /// [`HostError::Record`] if a file of the record cannot be read.
    pub fn names(&self) -> Result<Vec<String>, HostError> {
        Ok(self.entries()?.into_iter().map(|entry| entry.state.hardware.name).collect())
    }

    /// Returns all suspended guests, in the order of their names.
    ///
    /// # Errors
    /// [`HostError::Record`] if a file of the record cannot be read.
    pub fn entries(&self) -> Result<Vec<SuspendedGuest>, HostError> {
        let mut entries = Vec::new();
        for name in self.file_names()? {
            entries.extend(self.entry(&name)?);
        }
        Ok(entries)
    }

    /// Returns the names of all VMs that have a file in the record, whether or not it counts.
    fn file_names(&self) -> Result<BTreeSet<String>, HostError> {
        let mut names = BTreeSet::from_iter(json_files(&self.directory.join(GUEST_DIR))?);
        names.extend(json_files(&self.directory)?.into_iter().filter(|name| self.format_1_file(name).is_some()));
        Ok(names)
    }

    /// Returns the entry of VM `name`. `None` if the VM is not suspended.
    ///
    /// # Errors
    /// [`HostError::Record`] if the entry cannot be read.
    pub fn entry(&self, name: &str) -> Result<Option<SuspendedGuest>, HostError> {
        let Some(header) = &self.header else { return Ok(None) };
        Ok(self.read_entry(name)?.filter(|entry| entry.token == header.token))
    }

    fn read_entry(&self, name: &str) -> Result<Option<SuspendedGuest>, HostError> {
        match read_json(&self.file(name))? {
            Some(entry) => Ok(Some(entry)),
            None => self.format_1_file(name).map_or(Ok(None), |path| read_json(&path)),
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.join(GUEST_DIR).join(format!("{name}.json"))
    }

    /// Returns the path of a guest's file in format 1. `None` for a VM named `host`, which had no file of its own.
    fn format_1_file(&self, name: &str) -> Option<PathBuf> {
        let file = format!("{name}.json");
        (file != HEADER_FILE).then(|| self.directory.join(file))
    }

    /// Removes the files of VM `name`. The file of the newer format is removed last, because it is the file that
    /// counts.
    fn remove_files(&self, name: &str) -> io::Result<()> {
        if let Some(path) = self.format_1_file(name) {
            remove_if_exists(&path)?;
        }
        remove_if_exists(&self.file(name))
    }

    /// Starts a new record, which counts only after [`SuspendRecord::commit`]. Removes the remains of an earlier,
    /// uncommitted record.
    ///
    /// # Errors
    /// [`HostError::StillSuspended`] if guests are suspended, [`HostError::Record`] if the record cannot be accessed.
    pub fn begin(directory: &Path) -> Result<Self, HostError> {
        let mut record = Self::lock(directory)?;
        let names = record.names()?;
        if !names.is_empty() {
            return Err(HostError::StillSuspended(names));
        }
        let failed = HostError::record(directory);
        remove_if_exists(&directory.join(HEADER_FILE)).map_err(&failed)?;
        for name in record.file_names()? {
            record.remove_files(&name).map_err(&failed)?;
        }
        sync_directory(directory).map_err(failed)?;
        record.header = None;
        Ok(record)
    }

    /// Writes an entry, which counts only after [`SuspendRecord::commit`] of its token.
    ///
    /// # Errors
    /// [`HostError::Record`] if the file cannot be written.
    pub fn write_entry(&self, entry: &SuspendedGuest) -> Result<(), HostError> {
        let path = self.file(&entry.state.hardware.name);
        create_private_directory(&self.directory.join(GUEST_DIR))
            .and_then(|()| sync_directory(&self.directory))
            .and_then(|()| write_json(&path, entry))
            .map_err(HostError::record(&path))
    }

    /// Validates all entries with this token.
    ///
    /// # Errors
    /// [`HostError::Record`] if the header cannot be written: then no entry counts.
    pub fn commit(&mut self, token: String, boot_id: String, committed_us: u64) -> Result<(), HostError> {
        let header = RecordHeader { format: FORMAT, token, boot_id, committed_us };
        let path = self.directory.join(HEADER_FILE);
        write_json(&path, &header).map_err(HostError::record(&path))?;
        self.header = Some(header);
        Ok(())
    }

    /// Marks `entry` so that no other process resumes the guest. The caller is about to resume it.
    ///
    /// # Errors
    /// [`HostError::Record`] if the entry cannot be written: then it is unchanged.
    pub fn mark_resume_started(&self, entry: &SuspendedGuest) -> Result<(), HostError> {
        self.write_entry(&SuspendedGuest { resume_started: true, ..entry.clone() })
    }

    /// Removes the entry of VM `name` and its files next to the RAM. A missing entry is not an error.
    ///
    /// # Errors
    /// [`HostError::Record`] if a file cannot be removed.
    pub fn remove_entry(&self, name: &str) -> Result<(), HostError> {
        let failed = HostError::record(&self.file(name));
        let entry = self.read_entry(name)?;
        self.remove_files(name).map_err(&failed)?;
        let Some(entry) = entry else { return Ok(()) };
        let guest_directory = self.directory.join(GUEST_DIR);
        if guest_directory.exists() {
            sync_directory(&guest_directory).map_err(&failed)?;
        }
        sync_directory(&self.directory).map_err(&failed)?;
        let saved_state = entry.saved.as_ref().map(|saved| &saved.path);
        let page_digests = entry.page_digests.as_ref().map(|digests| &digests.path);
        for path in saved_state.into_iter().chain(page_digests) {
            remove_if_exists(path).map_err(&failed)?;
        }
        if self.file_names()?.is_empty() {
            remove_if_exists(&self.directory.join(HEADER_FILE)).map_err(&failed)?;
            // The directory stays if another guest's file is just being written.
            let _ = fs::remove_dir(&guest_directory);
        }
        self.remove_state_directory(&state_directory(&entry.state));
        Ok(())
    }

    /// Removes the files that an interrupted suspend has left next to the RAM of a VM that is not suspended.
    pub(super) fn remove_leftovers(&self, rundir: &RunDir, state: &State) {
        let directory = state_directory(state);
        for path in state_files(&directory, rundir) {
            let _ = remove_if_exists(&path);
        }
        self.remove_state_directory(&directory);
    }

    /// Removes the directory next to the RAM if it holds no guest's files. The directory stays if another process is
    /// about to write to it.
    fn remove_state_directory(&self, directory: &Path) {
        let Ok(mut files) = fs::read_dir(directory) else { return };
        if files.any(|file| file.is_ok_and(|file| file.file_name() != TOKEN_FILE)) {
            return;
        }
        // Locked here unless this record is locked already.
        let mut temporary_lock = None;
        if self.lock.is_none() {
            temporary_lock = self.try_lock();
        }
        if self.lock.is_some() || temporary_lock.is_some() {
            let _ = fs::remove_dir_all(directory);
        }
    }

    fn try_lock(&self) -> Option<File> {
        let lock = File::open(self.directory.join(LOCK_FILE)).ok()?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).ok().map(|()| lock)
    }
}

/// Returns the directory, next to a VM's RAM, that holds the state of suspended guests.
pub(super) fn state_directory(state: &State) -> PathBuf {
    state.hardware.ram.path.parent().unwrap_or(Path::new("/")).join(STATE_DIR)
}

/// Creates the [`state_directory`] of a VM and writes the record's token to it.
///
/// # Errors
/// Errors of creating the directory and of writing the file.
pub(super) fn write_token(state: &State, token: &str) -> io::Result<()> {
    let directory = state_directory(state);
    create_private_directory(&directory)?;
    write_atomically(&directory.join(TOKEN_FILE), token.as_bytes())
}

/// Returns the paths of a VM's files in its [`state_directory`]: the saved state, and the digests of the RAM's pages.
pub(super) fn state_files(directory: &Path, rundir: &RunDir) -> [PathBuf; 2] {
    let vm = unique_name(rundir);
    ["stream", "pages"].map(|extension| directory.join(format!("{vm}.{extension}")))
}

/// Returns the token in a VM's [`state_directory`], if there is one.
pub(super) fn read_token(state: &State) -> Option<String> {
    fs::read_to_string(state_directory(state).join(TOKEN_FILE)).ok()
}

/// Returns the names of the `*.json` files of a directory, without the extension.
fn json_files(directory: &Path) -> Result<Vec<String>, HostError> {
    let failed = HostError::record(directory);
    let files = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        files => files.map_err(&failed)?,
    };
    let mut names = Vec::new();
    for file in files {
        let name = file.map_err(&failed)?.file_name().to_string_lossy().into_owned();
        names.extend(name.strip_suffix(".json").map(str::to_owned));
    }
    Ok(names)
}

fn create_private_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn remove_if_exists(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, HostError> {
    let failed = HostError::record(path);
    match fs::read(path) {
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| failed(e.into())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(failed(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_counts_before_the_commit_and_an_older_token_never() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("suspended");
        assert!(SuspendRecord::read(&path).unwrap().names().unwrap().is_empty());
        let mut record = SuspendRecord::begin(&path).unwrap();
        fs::write(path.join("web.json"), "{\"token\": 1}").unwrap();
        assert!(record.names().unwrap().is_empty(), "no header");
        record.commit("new".into(), "boot".into(), 7).unwrap();
        assert!(record.names().is_err(), "an invalid entry is an error, and not skipped");
        fs::remove_file(path.join("web.json")).unwrap();
        assert_eq!(SuspendRecord::read(&path).unwrap().header.unwrap().token, "new");
        // The record has no entries, so a new one may be started once this one is dropped.
        drop(record);
        assert!(SuspendRecord::begin(&path).unwrap().header.is_none());
        assert!(!path.join(HEADER_FILE).exists());
        fs::write(path.join(HEADER_FILE), r#"{"format": 9, "token": "", "boot_id": "", "committed_us": 0}"#).unwrap();
        assert!(SuspendRecord::read(&path).unwrap_err().to_string().contains("host.json"));
    }

    /// VM names that are also names of files of the record, or of other components of Rekindle.
    const AMBIGUOUS_NAMES: [&str; 16] = [
        "host",
        "lock",
        "guests",
        "token",
        "host.json",
        "host.new",
        "lock.json",
        "guests.json",
        "a",
        "a.json",
        "a.new",
        "new",
        "json",
        "0",
        "a-b",
        "state",
    ];

    #[test]
    fn a_vm_may_have_any_name_also_that_of_a_file_of_the_record() {
        let directory = tempfile::tempdir().unwrap();
        let mut record = SuspendRecord::begin(directory.path()).unwrap();
        fs::create_dir(directory.path().join(GUEST_DIR)).unwrap();
        record.commit("new".into(), "boot".into(), 7).unwrap();
        for name in AMBIGUOUS_NAMES {
            name.parse::<rekindle_vm::definition::Name>().unwrap();
            write_json(&record.file(name), &format!("this is {name}")).unwrap();
            // Simulates a temporary file that was left behind.
            fs::write(record.file(name).with_extension("new"), "left").unwrap();
        }
        record.commit("newer".into(), "boot".into(), 8).unwrap();
        assert_eq!(SuspendRecord::read(directory.path()).unwrap().header.unwrap().token, "newer");
        assert_eq!(record.file_names().unwrap(), BTreeSet::from(AMBIGUOUS_NAMES.map(str::to_owned)));
        for name in AMBIGUOUS_NAMES {
            assert_eq!(read_json::<String>(&record.file(name)).unwrap().unwrap(), format!("this is {name}"));
            assert!(record.entry(name).is_err(), "{name}: an invalid entry is not skipped");
            record.remove_files(name).unwrap();
            assert_eq!(
                SuspendRecord::read(directory.path()).unwrap().header.unwrap().token,
                "newer",
                "{name} is not the header"
            );
        }
        assert!(record.file_names().unwrap().is_empty());
    }

    #[test]
    fn files_of_the_first_format_are_read_and_removed() {
        let directory = tempfile::tempdir().unwrap();
        let mut record = SuspendRecord::begin(directory.path()).unwrap();
        record.commit("old".into(), "boot".into(), 7).unwrap();
        fs::write(directory.path().join("web.json"), "{}").unwrap();
        let only_web = BTreeSet::from(["web".to_owned()]);
        assert_eq!(record.file_names().unwrap(), only_web);
        assert!(record.entry("web").is_err(), "it is read");
        assert!(record.entry("host").unwrap().is_none(), "that is the header");
        // The file of the newer format counts.
        fs::create_dir(directory.path().join(GUEST_DIR)).unwrap();
        fs::write(record.file("web"), "null").unwrap();
        assert_eq!(record.file_names().unwrap(), only_web);
        record.remove_files("web").unwrap();
        assert!(record.file_names().unwrap().is_empty());
        assert!(record.remove_files("host").is_ok() && directory.path().join(HEADER_FILE).exists());
    }
}
