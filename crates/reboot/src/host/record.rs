//! The record of suspended guests.
//!
//! ```text
//! SUSPEND_DIR/              on a disk: a host whose RAM is lost must still know whom it has lost
//!   lock                    flock: held by who suspends or resumes
//!   host.json               written last: it makes the others count, if they have its token
//!   guests/NAME.json        one guest; in a folder of their own, so that a VM may have any name
//! RAM_DIR/.suspended/       beside the RAM, and gone with it
//!   token                   the token once more: this RAM belongs to that record
//!   NAME-HASH.stream        a guest without its main RAM
//!   NAME-HASH.pages         a digest of each page of its RAM
//! ```
//!
//! All files are written whole or not at all. A guest's file is marked `struck`, and that is made last, before the guest is let go: from then on no
//! other QEMU may be given its state.

use super::HostError;
use crate::vmm::How;
use rekindle_qemu::cpu::Features;
use rekindle_vm::journal::SavedState;
use rekindle_vm::life::unique_name;
use rekindle_vm::rundir::{RunDir, sync_directory, write_json};
use rekindle_vm::state::State;
use rekindle_vm::timeline::{Entry as Span, host_us};
use rustix::fs::{FlockOperation, flock};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The format of these files.
///
/// 1: guests beside `host.json`, as `NAME.json`. Such files are still read.
const FORMAT: u32 = 2;
const HOST: &str = "host.json";
const GUESTS: &str = "guests";
const LOCK: &str = "lock";
/// Beside the RAM.
const BESIDE: &str = ".suspended";

/// What holds for all guests of one suspend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// The format of the record.
    pub format: u32,
    /// What tells this suspend from every other.
    pub token: String,
    /// The boot ID of the kernel under which it was.
    pub boot_id: String,
    /// When it was committed: host clock, microseconds since 1970.
    pub committed_us: u64,
}

/// A file with what it must hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// The file.
    pub path: PathBuf,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its XXH3 digest.
    pub digest: u64,
}

/// One suspended guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// That of its [`Head`].
    pub token: String,
    /// How it was suspended.
    pub how: How,
    /// Its VM.
    pub state: State,
    /// Whether it ran, or was paused by its owner and stays so.
    pub running: bool,
    /// Its state; none if it was shut down.
    pub saved: Option<SavedState>,
    /// The digests of the pages of its RAM.
    pub pages: Option<Kept>,
    /// What it saw of its processors.
    pub cpu: Features,
    /// The modification times of its disks' images; none where they tell nothing.
    pub disks: Option<Vec<(PathBuf, i128)>>,
    /// When it was stopped: host clock, microseconds since 1970.
    pub stop_us: u64,
    /// Why it was shut down although something else was wanted.
    pub fell_back: Option<String>,
    /// A QEMU was about to be let go with it: nobody else may have it.
    pub struck: bool,
    /// The steps of its suspend.
    pub steps: Vec<Span>,
    /// What its QEMU is started from, to be read ahead.
    #[serde(default)]
    pub files: Vec<PathBuf>,
}

impl Entry {
    /// That of a guest which could neither be suspended nor shut down, and ends with the host: so that it is booted after.
    #[must_use]
    pub fn given_up(token: &str, state: State, why: String) -> Self {
        Self {
            token: token.into(),
            how: How::Cold,
            disks: None,
            state,
            running: true,
            saved: None,
            pages: None,
            cpu: Features::new(),
            stop_us: host_us(),
            fell_back: Some(why),
            struck: false,
            steps: Vec::new(),
            files: Vec::new(),
        }
    }
}

/// The record of a host.
#[derive(Debug)]
pub struct Record {
    directory: PathBuf,
    /// Held by who suspends or resumes: one at a time.
    lock: Option<File>,
    /// What makes entries count; none: nobody is suspended.
    pub head: Option<Head>,
}

impl Record {
    /// Read the record in `directory`, which need not exist.
    ///
    /// # Errors
    /// [`HostError::Record`]: it is there and cannot be understood.
    pub fn read(directory: &Path) -> Result<Self, HostError> {
        let head: Option<Head> = read_json(&directory.join(HOST))?;
        if let Some(Head { format, .. }) = head.as_ref().filter(|head| head.format > FORMAT) {
            let text = format!("it is of format {format}, written by a newer Rekindle; use that one");
            return Err(HostError::Record { path: directory.join(HOST), source: io::Error::other(text) });
        }
        Ok(Self { directory: directory.to_owned(), lock: None, head })
    }

    /// The same, once nobody else suspends or resumes guests, and nobody does until this is dropped.
    ///
    /// # Errors
    /// [`HostError::Record`].
    pub fn hold(directory: &Path) -> Result<Self, HostError> {
        let path = directory.join(LOCK);
        let failed = |source| HostError::Record { path: path.clone(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(failed)?;
        let mut options = OpenOptions::new();
        let lock = options.write(true).create(true).truncate(false).mode(0o600).open(&path).map_err(failed)?;
        flock(&lock, FlockOperation::LockExclusive).map_err(|e| failed(e.into()))?;
        Ok(Self { lock: Some(lock), ..Self::read(directory)? })
    }

    /// The names of those who are suspended.
    ///
    /// # Errors
    /// [`HostError::Record`].
    pub fn names(&self) -> Result<Vec<String>, HostError> {
        let mut names = self.files()?;
        let mut failed = None;
        names.retain(|name| match self.entry(name) {
            Ok(entry) => entry.is_some(),
            Err(e) => {
                failed = Some(e);
                false
            }
        });
        failed.map_or(Ok(names), Err)
    }

    fn files(&self) -> Result<Vec<String>, HostError> {
        let old = json_files(&self.directory)?.into_iter().filter(|name| self.old_file(name).is_some());
        let mut names: Vec<_> = json_files(&self.directory.join(GUESTS))?.into_iter().chain(old).collect();
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// What is known of VM `name`, if it is suspended.
    ///
    /// # Errors
    /// [`HostError::Record`].
    pub fn entry(&self, name: &str) -> Result<Option<Entry>, HostError> {
        let Some(head) = &self.head else { return Ok(None) };
        Ok(self.read_entry(name)?.filter(|entry| entry.token == head.token))
    }

    fn read_entry(&self, name: &str) -> Result<Option<Entry>, HostError> {
        match read_json(&self.file(name))? {
            Some(entry) => Ok(Some(entry)),
            None => self.old_file(name).map_or(Ok(None), |path| read_json(&path)),
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.join(GUESTS).join(format!("{name}.json"))
    }

    /// Where format 1 had a guest's file. It had none of a VM `host`.
    fn old_file(&self, name: &str) -> Option<PathBuf> {
        let file = format!("{name}.json");
        (file != HOST).then(|| self.directory.join(file))
    }

    /// Remove what is known of VM `name`: the newer file last, since it is the one that counts.
    fn remove_files(&self, name: &str) -> io::Result<()> {
        if let Some(old) = self.old_file(name) {
            remove(&old)?;
        }
        remove(&self.file(name))
    }

    /// Begin a new record; nothing counts before [`Record::commit`]. What an earlier one that was not committed has left goes.
    ///
    /// # Errors
    /// [`HostError::StillSuspended`], [`HostError::Record`].
    pub fn begin(directory: &Path) -> Result<Self, HostError> {
        let mut record = Self::hold(directory)?;
        let names = record.names()?;
        if !names.is_empty() {
            return Err(HostError::StillSuspended(names));
        }
        let failed = |source| HostError::Record { path: directory.to_owned(), source };
        remove(&directory.join(HOST)).map_err(failed)?;
        for name in record.files()? {
            record.remove_files(&name).map_err(failed)?;
        }
        sync_directory(directory).map_err(failed)?;
        record.head = None;
        Ok(record)
    }

    /// Write an entry down.
    ///
    /// # Errors
    /// [`HostError::Record`].
    pub fn list(&self, entry: &Entry) -> Result<(), HostError> {
        let path = self.file(&entry.state.hardware.name);
        let folder = self.directory.join(GUESTS);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.and_then(|()| sync_directory(&self.directory))
            .and_then(|()| write_json(&path, entry))
            .map_err(|source| HostError::Record { path, source })
    }

    /// All entries with this token count from here on.
    ///
    /// # Errors
    /// [`HostError::Record`]; then none does.
    pub fn commit(&mut self, token: String, boot_id: String, committed_us: u64) -> Result<(), HostError> {
        let head = Head { format: FORMAT, token, boot_id, committed_us };
        let path = self.directory.join(HOST);
        write_json(&path, &head).map_err(|source| HostError::Record { path, source })?;
        self.head = Some(head);
        Ok(())
    }

    /// From here on nobody may be given the state of `entry` but who is about to let it go.
    ///
    /// # Errors
    /// [`HostError::Record`]; then it is as it was.
    pub fn strike(&self, entry: &Entry) -> Result<(), HostError> {
        self.list(&Entry { struck: true, ..entry.clone() })
    }

    /// VM `name` is suspended no more: its entry goes, and what was kept beside its RAM. Not to be there is no error.
    ///
    /// # Errors
    /// [`HostError::Record`].
    pub fn forget(&self, name: &str) -> Result<(), HostError> {
        let failed = |source| HostError::Record { path: self.file(name), source };
        let entry = self.read_entry(name)?;
        self.remove_files(name).map_err(failed)?;
        if let Some(entry) = entry {
            let folder = self.directory.join(GUESTS);
            if folder.exists() {
                sync_directory(&folder).map_err(failed)?;
            }
            sync_directory(&self.directory).map_err(failed)?;
            let saved = entry.saved.as_ref().map(|saved| &saved.path);
            for path in saved.into_iter().chain(entry.pages.as_ref().map(|pages| &pages.path)) {
                remove(path).map_err(failed)?;
            }
            if self.files()?.is_empty() {
                remove(&self.directory.join(HOST)).map_err(failed)?;
                // Another guest's file may just be being written; then it stays.
                let _ = fs::remove_dir(&folder);
            }
            self.leave(&beside(&entry.state));
        }
        Ok(())
    }

    /// A VM that is not suspended has nothing beside its RAM: remove what a suspend that did not come to its end has left.
    pub(super) fn sweep(&self, rundir: &RunDir, state: &State) {
        let directory = beside(state);
        for path in files_beside(&directory, rundir) {
            let _ = remove(&path);
        }
        self.leave(&directory);
    }

    /// The last one of that directory takes it away, unless somebody is just about to put something there.
    fn leave(&self, directory: &Path) {
        let others = fs::read_dir(directory).map(|all| all.flatten().any(|file| file.file_name() != "token"));
        if others.unwrap_or(true) {
            return;
        }
        let lock = || {
            let lock = File::open(self.directory.join(LOCK)).ok()?;
            flock(&lock, FlockOperation::NonBlockingLockExclusive).ok().map(|()| lock)
        };
        let other = if self.lock.is_some() { None } else { Some(lock()) };
        if !matches!(other, Some(None)) {
            let _ = fs::remove_dir_all(directory);
        }
    }
}

/// The directory beside the RAM of a VM.
pub(super) fn beside(state: &State) -> PathBuf {
    state.hardware.ram.path.parent().unwrap_or(Path::new("/")).join(BESIDE)
}

/// Make that directory, and pair it with the record of this token.
///
/// # Errors
/// The system's.
pub(super) fn pair(state: &State, token: &str) -> io::Result<()> {
    let directory = beside(state);
    DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
    rekindle_vm::rundir::write_atomically(&directory.join("token"), token.as_bytes())
}

/// Files beside the RAM of a VM: its state, and the digests of its pages.
pub(super) fn files_beside(directory: &Path, rundir: &RunDir) -> [PathBuf; 2] {
    let stem = unique_name(rundir);
    ["stream", "pages"].map(|kind| directory.join(format!("{stem}.{kind}")))
}

/// The token of that directory, if it has one.
pub(super) fn paired(state: &State) -> Option<String> {
    fs::read_to_string(beside(state).join("token")).ok()
}

/// The names of the files `*.json` of a directory, without that.
fn json_files(directory: &Path) -> Result<Vec<String>, HostError> {
    let failed = |source| HostError::Record { path: directory.to_owned(), source };
    let entries = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
        names.extend(name.strip_suffix(".json").map(str::to_owned));
    }
    Ok(names)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, HostError> {
    let failed = |source| HostError::Record { path: path.to_owned(), source };
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
        assert!(Record::read(&path).unwrap().names().unwrap().is_empty());
        let mut record = Record::begin(&path).unwrap();
        fs::write(path.join("web.json"), "{\"token\": 1}").unwrap();
        assert!(record.names().unwrap().is_empty(), "no head");
        record.commit("new".into(), "boot".into(), 7).unwrap();
        assert!(record.names().is_err(), "an entry that is no entry is told, and not left out");
        fs::remove_file(path.join("web.json")).unwrap();
        assert_eq!(Record::read(&path).unwrap().head.unwrap().token, "new");
        // Nobody is in it: the next one may begin, once this one has ended.
        drop(record);
        assert!(Record::begin(&path).unwrap().head.is_none());
        assert!(!path.join(HOST).exists());
        fs::write(path.join(HOST), r#"{"format": 9, "token": "", "boot_id": "", "committed_us": 0}"#).unwrap();
        assert!(Record::read(&path).unwrap_err().to_string().contains("host.json"));
    }

    /// Names that a VM may have, and that files of the record, or of other parts of Rekindle, have too.
    const ODD: [&str; 16] = [
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
    fn a_vm_may_have_any_name_whatever_the_files_of_the_record_are_called() {
        let directory = tempfile::tempdir().unwrap();
        let mut record = Record::begin(directory.path()).unwrap();
        fs::create_dir(directory.path().join(GUESTS)).unwrap();
        record.commit("new".into(), "boot".into(), 7).unwrap();
        for name in ODD {
            name.parse::<rekindle_vm::definition::Name>().unwrap();
            write_json(&record.file(name), &format!("this is {name}")).unwrap();
            // As its temporary file would be, if it was left.
            fs::write(record.file(name).with_extension("new"), "left").unwrap();
        }
        record.commit("newer".into(), "boot".into(), 8).unwrap();
        assert_eq!(Record::read(directory.path()).unwrap().head.unwrap().token, "newer");
        let mut all: Vec<_> = ODD.map(str::to_owned).into();
        all.sort();
        assert_eq!(record.files().unwrap(), all);
        for name in ODD {
            assert_eq!(read_json::<String>(&record.file(name)).unwrap().unwrap(), format!("this is {name}"));
            assert!(record.entry(name).is_err(), "{name}: what is no entry is not left out");
            record.remove_files(name).unwrap();
            assert_eq!(Record::read(directory.path()).unwrap().head.unwrap().token, "newer", "{name} is not the head");
        }
        assert!(record.files().unwrap().is_empty());
    }

    #[test]
    fn files_of_the_first_format_are_read_and_removed() {
        let directory = tempfile::tempdir().unwrap();
        let mut record = Record::begin(directory.path()).unwrap();
        record.commit("old".into(), "boot".into(), 7).unwrap();
        fs::write(directory.path().join("web.json"), "{}").unwrap();
        assert_eq!(record.files().unwrap(), ["web"]);
        assert!(record.entry("web").is_err(), "it is read");
        assert!(record.entry("host").unwrap().is_none(), "that is the head");
        // The newer file is the one that counts.
        fs::create_dir(directory.path().join(GUESTS)).unwrap();
        fs::write(record.file("web"), "null").unwrap();
        assert_eq!(record.files().unwrap(), ["web"]);
        record.remove_files("web").unwrap();
        assert!(record.files().unwrap().is_empty());
        assert!(record.remove_files("host").is_ok() && directory.path().join(HOST).exists());
    }
}
