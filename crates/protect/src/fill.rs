//! A fill: the memory of a restored guest that a *pager*, a process, still loads. `fill.json` in the run directory
//! describes it. The pager's *write record* shows which pages the guest has written since the restore.
//!
//! | file | holder of its lock |
//! |---|---|
//! | `fill.json` | none; exists until the fill is complete and no process uses the pager's write record |
//! | the pager's lock | the pager that serves the VM |
//! | `fill.lock` | the process that uses the pager's write record ([`crate::write_record`]) |

use crate::credential_paths::CredentialPaths;
use rekindle_kernel::confinement::ConfinementError;
use rekindle_kernel::inject::InjectError;
use rekindle_memory::missing::PagerError;
use rekindle_memory::ram::{GuestRam, GuestRamError};
use rekindle_qemu::ramblock::{MAIN_RAM, RamBlock};
use rekindle_qemu::vmm::Vmm;
use rekindle_store::Credentials;
use rekindle_store::keys::KeySource;
use rekindle_store::{Image, ReadOptions, StoreError, StoreUrl};
use rekindle_vm::rundir::{RunDir, read_record, write_json};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait for another process that checks whether there is a pager. It holds the lock for microseconds.
const PAGER_LOCK_TIMEOUT: Duration = Duration::from_millis(100);
/// Format of `fill.json` that this version of Rekindle writes.
const FORMAT: u32 = 1;

/// Why a pager cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum FillError {
    #[error("all memory of {name} is loaded; a pager has nothing to do")]
    NothingToFill { name: String },
    #[error("another pager already serves {name}")]
    AlreadyServed { name: String },
    #[error("{}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Another checkpoint has taken the place of the restored one.
    #[error(
        "{store}: its checkpoint {number} is not the one that was restored: the store was rolled back or exchanged; put the right one \
         there, then: rekindle recover"
    )]
    OtherCheckpoint { store: StoreUrl, number: u64 },
    #[error(transparent)]
    Confinement(#[from] ConfinementError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Inject(#[from] InjectError),
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    #[error(transparent)]
    Pager(#[from] PagerError),
}

/// Content of `fill.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fill {
    format: u32,
    pub store: StoreUrl,
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "identity")]
    credentials: Option<CredentialPaths>,
    /// Number of the checkpoint from which the memory is loaded.
    pub number: u64,
    /// The QEMU whose memory is filled.
    pub vmm: Vmm,
    /// All RAM blocks of that QEMU.
    pub(crate) blocks: Vec<RamBlock>,
    /// Ids of the blocks that the pager fills.
    #[serde(default = "main_ram_only")]
    pub(crate) paged: Vec<String>,
    /// The owner epoch that committed the checkpoint.
    #[serde(default)]
    pub(crate) epoch: Option<u64>,
    /// Identifies the checkpoint, as the restore has checked it: see [`Image::footer`].
    #[serde(default)]
    footer: Option<u64>,
    #[serde(default)]
    pub stage: FillStage,
}

/// Progress of a fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FillStage {
    /// Pages are missing.
    #[default]
    Filling,
    /// All pages are loaded. A protector still relies on the pager's write record, so the pager continues to serve.
    Filled,
    /// A protector tracks the memory itself. The pager only has to close its descriptor.
    HandedOver,
}

/// Returns the value of `paged` for records of earlier versions.
fn main_ram_only() -> Vec<String> {
    vec![MAIN_RAM.to_owned()]
}

impl Fill {
    /// Describes the fill of the blocks `paged` of `vmm` from the checkpoint `image` of `store`.
    pub(crate) fn new(
        store: StoreUrl,
        credentials: Option<&Credentials>,
        image: &Image,
        vmm: Vmm,
        ram: &GuestRam,
        paged: Vec<String>,
    ) -> Self {
        let blocks = ram.blocks().iter().map(|block| block.info.clone()).collect();
        // The pager may be started from another directory.
        let credentials = credentials.and_then(CredentialPaths::of);
        let (info, footer, stage) = (image.info(), Some(image.footer()), FillStage::Filling);
        let (number, epoch) = (info.number, Some(info.epoch));
        Self { format: FORMAT, store, credentials, number, vmm, blocks, paged, epoch, footer, stage }
    }

    /// Returns whether the pager fills the block `id`.
    pub(crate) fn is_paged(&self, id: &str) -> bool {
        self.paged.iter().any(|paged| paged == id)
    }

    /// Opens the checkpoint.
    pub(crate) fn open_checkpoint(&self) -> Result<Image, FillError> {
        let credentials = self.credentials.as_ref().map(CredentialPaths::credentials);
        let image =
            Image::open(&self.store, &ReadOptions { at: Some(self.number), credentials, ..ReadOptions::default() })?;
        if self.footer.is_some_and(|footer| footer != image.footer()) {
            return Err(FillError::OtherCheckpoint { store: self.store.clone(), number: self.number });
        }
        Ok(image)
    }

    fn credentials(&self) -> Credentials {
        self.credentials.as_ref().map(CredentialPaths::credentials).unwrap_or_default()
    }

    /// Returns the files that the variables of an object store name, e.g. certificates of authorities.
    pub(crate) fn connection_files(&self) -> Vec<PathBuf> {
        let environment_file = self.credentials().environment_file;
        // A file that cannot be read is an error of `read_secrets`. Only an object store needs its secrets.
        let environment_file = environment_file.filter(|_| matches!(self.store, StoreUrl::Objects(_)));
        environment_file.and_then(|file| file.read().ok()).unwrap_or_default()
    }

    /// Reads the keys of an encrypted store and the variables of an object store, which this process keeps: later it may be
    /// unable to read them.
    pub(crate) fn read_secrets(&self) -> Result<(), FillError> {
        let Credentials { keys, environment_file, .. } = self.credentials();
        keys.map_or(Ok(()), |keys| keys.keys().map(drop)).map_err(StoreError::from)?;
        if let (StoreUrl::Objects(_), Some(file)) = (&self.store, environment_file) {
            file.read().map_err(StoreError::from)?;
        }
        Ok(())
    }

    /// Returns the files that [`Fill::read_secrets`] reads.
    pub(crate) fn secret_files(&self) -> Vec<PathBuf> {
        let Credentials { keys, environment_file, .. } = self.credentials();
        let key_file = keys.and_then(|keys| match keys {
            KeySource::File(path) => Some(path),
            KeySource::Command(_) => None,
        });
        let environment_file = environment_file.filter(|_| matches!(self.store, StoreUrl::Objects(_)));
        key_file.into_iter().chain(environment_file.map(|file| file.path().to_owned())).collect()
    }

    pub(crate) fn write(&self, rundir: &RunDir) -> Result<(), FillError> {
        write_json(&rundir.fill(), self).map_err(|source| FillError::File { path: rundir.fill(), source })
    }

    /// Reads the description of the unfinished fill of the VM of `rundir`. `None`: no fill is unfinished.
    ///
    /// # Errors
    /// [`FillError::File`]: `fill.json` cannot be read.
    pub fn read(rundir: &RunDir) -> Result<Option<Self>, FillError> {
        let failed = |source| FillError::File { path: rundir.fill(), source };
        match read_record(&rundir.fill()) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| failed(e.into())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed(e)),
        }
    }

    /// Returns this fill with another stage.
    pub(crate) fn with_stage(&self, stage: FillStage) -> Self {
        Self { stage, ..self.clone() }
    }
}

/// Takes the pager's lock, which locks out other pagers.
pub(crate) fn lock_pager(rundir: &RunDir) -> Result<File, FillError> {
    let deadline = Instant::now() + PAGER_LOCK_TIMEOUT;
    loop {
        match try_lock(rundir.pager_lock(), FlockOperation::NonBlockingLockExclusive)? {
            Some(lock) => return Ok(lock),
            // A protector that checks for a pager holds the lock for a moment.
            None if Instant::now() < deadline => thread::sleep(Duration::from_millis(1)),
            None => return Err(FillError::AlreadyServed { name: rundir.name().into() }),
        }
    }
}

/// Returns whether a pager serves the VM of `rundir` now.
pub(crate) fn is_served(rundir: &RunDir) -> Result<bool, FillError> {
    Ok(try_lock(rundir.pager_lock(), FlockOperation::NonBlockingLockShared)?.is_none())
}

/// Tries to lock the pager's write record. Returns `None` if another process holds the lock.
pub(crate) fn try_lock_write_record(rundir: &RunDir) -> Result<Option<File>, FillError> {
    try_lock(write_record_lock(rundir), FlockOperation::NonBlockingLockExclusive)
}

/// Returns the lock file of the pager's write record.
pub(crate) fn write_record_lock(rundir: &RunDir) -> PathBuf {
    rundir.file("fill.lock")
}

/// Tries to lock the file `path`. Returns `None` if another process holds a conflicting lock.
fn try_lock(path: PathBuf, operation: FlockOperation) -> Result<Option<File>, FillError> {
    let file = open_lock(path.clone())?;
    Ok(try_flock(&file, path, operation)?.then_some(file))
}

/// Opens a lock file, only for locking it.
pub(crate) fn open_lock(path: PathBuf) -> Result<File, FillError> {
    let created = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    created.and_then(|_| File::open(&path)).map_err(|source| FillError::File { path, source })
}

/// Tries to take the exclusive lock of an open lock file. Returns whether this process has it.
pub(crate) fn try_lock_file(file: &File, path: PathBuf) -> Result<bool, FillError> {
    try_flock(file, path, FlockOperation::NonBlockingLockExclusive)
}

fn try_flock(file: &File, path: PathBuf, operation: FlockOperation) -> Result<bool, FillError> {
    match flock(file, operation) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(e) => Err(FillError::File { path, source: e.into() }),
    }
}
