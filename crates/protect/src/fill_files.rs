//! The files in the run directory that a pager uses, and the notification at the end of a fill.
//!
//! Rekindle's commands trust what is in a run directory. So a confined pager has no access to it: its *broker*, a
//! process outside of its confinement, does these operations, which are fixed, for the fill that it was started for.

use crate::fill::{self, Fill, FillError, FillStage, lock_pager, try_lock_file, try_lock_write_record};
use crate::fill_progress;
use rekindle_kernel::confinement::broker::{Answer, Broker, Request};
use rekindle_kernel::confinement::{Access, CapabilitySet, Grant, capabilities_for};
use rekindle_memory::missing::Registration;
use rekindle_vm::disks;
use rekindle_vm::rundir::RunDir;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The broker's operations, by their number in a request.
mod operation {
    pub const CLOSE: u64 = 0;
    pub const NOTIFY_FILLED: u64 = 1;
    pub const IS_CURRENT: u64 = 2;
    pub const READ_STAGE: u64 = 3;
    pub const RECORD_FILLED: u64 = 4;
    pub const REMOVE: u64 = 5;
}

/// The stages, by their number in an answer.
const STAGES: [FillStage; 3] = [FillStage::Filling, FillStage::Filled, FillStage::HandedOver];

/// Access to the files of one fill.
#[derive(Debug, Clone)]
pub(crate) struct FillFiles {
    rundir: RunDir,
    fill: Fill,
    /// `None`: this process is not confined.
    confined: Option<Confined>,
}

/// What a confined pager uses instead of paths.
#[derive(Debug, Clone)]
struct Confined {
    broker: Arc<Broker>,
    /// The lock files. This process takes the locks itself: the holder of the pager's lock is the pager to other commands.
    pager_lock: Arc<File>,
    write_record_lock: Arc<File>,
}

impl FillFiles {
    pub(crate) fn new(rundir: &RunDir, fill: &Fill) -> Self {
        Self { rundir: rundir.clone(), fill: fill.clone(), confined: None }
    }

    /// Opens the lock files, and starts a broker, for a process that will be confined. `registration`: the userfaultfd in
    /// QEMU.
    ///
    /// # Errors
    /// [`FillError`].
    pub(crate) fn through_broker(self, registration: Option<Registration>) -> Result<Self, FillError> {
        let open_lock = |path| fill::open_lock(path).map(Arc::new);
        let pager_lock = open_lock(self.rundir.pager_lock())?;
        let write_record_lock = open_lock(fill::write_record_lock(&self.rundir))?;
        let unconfined = self.clone();
        let is_closed = AtomicBool::new(false);
        let handle = move |Request { numbers: [operation, ..], .. }: Request| match operation {
            // Once: afterwards the number may be that of another descriptor in QEMU.
            operation::CLOSE if is_closed.load(Ordering::SeqCst) => Ok(Answer::default()),
            operation::CLOSE => {
                registration.map_or(Ok(()), Registration::close).map_err(io::Error::other)?;
                is_closed.store(true, Ordering::SeqCst);
                Ok(Answer::default())
            }
            _ => unconfined.handle(operation),
        };
        let kept = CapabilitySet::SYS_PTRACE | capabilities_for(&[Grant::new(self.rundir.path(), Access::Directory)]);
        let broker = Arc::new(Broker::start(1, kept, handle)?);
        Ok(Self { confined: Some(Confined { broker, pager_lock, write_record_lock }), ..self })
    }

    /// Does an operation in the broker.
    fn handle(&self, operation: u64) -> io::Result<Answer> {
        match operation {
            operation::NOTIFY_FILLED => {
                self.notify_filled();
                Ok(Answer::default())
            }
            operation::IS_CURRENT => self.is_current().map(|is_current| u64::from(is_current).into()).map_err(into_io),
            operation::READ_STAGE => {
                let stage = self.read_stage().map_err(into_io)?;
                let number = STAGES.iter().position(|known| Some(*known) == stage).unwrap_or(STAGES.len());
                Ok((number as u64).into())
            }
            operation::RECORD_FILLED | operation::REMOVE if !self.is_same_fill().map_err(into_io)? => {
                // A later restore has another fill.
                Err(io::ErrorKind::PermissionDenied.into())
            }
            operation::RECORD_FILLED => self.record_filled().map(Answer::from).map_err(into_io),
            operation::REMOVE => self.remove().map(Answer::from).map_err(into_io),
            _ => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Lets the broker do an operation. `None`: there is no broker.
    fn ask(&self, operation: u64) -> Option<Result<Answer, FillError>> {
        let answer = self.confined.as_ref()?.broker.ask([operation, 0, 0, 0], OsStr::new(""), None);
        Some(answer.map_err(|source| FillError::File { path: self.rundir.fill(), source }))
    }

    /// Returns what closes the userfaultfd in QEMU. `None`: this process can close it itself.
    pub(crate) fn close_through(&self) -> Option<impl Fn() -> io::Result<()> + Send + 'static> {
        let broker = Arc::clone(&self.confined.as_ref()?.broker);
        Some(move || broker.ask_number([operation::CLOSE, 0, 0, 0]).map(drop))
    }

    /// Ends this process when its broker has ended.
    pub(crate) fn end_process_with_broker(&self) -> io::Result<()> {
        self.confined.as_ref().map_or(Ok(()), |confined| confined.broker.end_process_with_it())
    }

    /// Takes the pager's lock, which locks out other pagers, until the result is dropped; if this process is confined, until
    /// it ends.
    ///
    /// # Errors
    /// [`FillError::AlreadyServed`].
    pub(crate) fn lock_pager(&self) -> Result<Arc<File>, FillError> {
        let Some(Confined { pager_lock, .. }) = &self.confined else { return lock_pager(&self.rundir).map(Arc::new) };
        match try_lock_file(pager_lock, self.rundir.pager_lock())? {
            true => Ok(Arc::clone(pager_lock)),
            false => Err(FillError::AlreadyServed { name: self.rundir.name().into() }),
        }
    }

    /// Tries to lock the pager's write record, as [`Self::lock_pager`] does. Returns `None` if another process holds the lock.
    pub(crate) fn try_lock_write_record(&self) -> Result<Option<Arc<File>>, FillError> {
        let Some(Confined { write_record_lock, .. }) = &self.confined else {
            return Ok(try_lock_write_record(&self.rundir)?.map(Arc::new));
        };
        let is_locked = try_lock_file(write_record_lock, fill::write_record_lock(&self.rundir))?;
        Ok(is_locked.then(|| Arc::clone(write_record_lock)))
    }

    /// Returns whether the run directory still has the fill, in any stage.
    fn is_same_fill(&self) -> Result<bool, FillError> {
        let current = Fill::read(&self.rundir)?;
        Ok(current.is_some_and(|current| current.with_stage(self.fill.stage) == self.fill))
    }

    /// Returns whether the run directory still has the same fill.
    pub(crate) fn is_current(&self) -> Result<bool, FillError> {
        match self.ask(operation::IS_CURRENT) {
            Some(answer) => Ok(answer?.number != 0),
            None => Ok(Fill::read(&self.rundir)?.as_ref() == Some(&self.fill)),
        }
    }

    /// Returns the stage of the fill; `None` if there is no fill.
    pub(crate) fn read_stage(&self) -> Result<Option<FillStage>, FillError> {
        match self.ask(operation::READ_STAGE) {
            Some(answer) => Ok(usize::try_from(answer?.number).ok().and_then(|number| STAGES.get(number)).copied()),
            None => Ok(Fill::read(&self.rundir)?.map(|fill| fill.stage)),
        }
    }

    /// Records that all pages are loaded.
    pub(crate) fn record_filled(&self) -> Result<(), FillError> {
        match self.ask(operation::RECORD_FILLED) {
            Some(answer) => answer.map(drop),
            None => self.fill.with_stage(FillStage::Filled).write(&self.rundir),
        }
    }

    /// Notifies the servers of the VM's disks that all memory is loaded.
    pub(crate) fn notify_filled(&self) {
        match self.ask(operation::NOTIFY_FILLED) {
            Some(Ok(_)) => {}
            Some(Err(e)) => tracing::debug!("disk servers still check for missing pages: {e}"),
            None => disks::notify_filled(&self.rundir),
        }
    }

    /// Removes the description of the fill, which is complete.
    pub(crate) fn remove(&self) -> Result<(), FillError> {
        match self.ask(operation::REMOVE) {
            Some(answer) => answer.map(drop),
            None => {
                let _ = fs::remove_file(fill_progress::path(&self.rundir));
                let path = self.rundir.fill();
                fs::remove_file(&path).map_err(|source| FillError::File { path, source })
            }
        }
    }
}

fn into_io(error: FillError) -> io::Error {
    match error {
        FillError::File { source, .. } => source,
        error => io::Error::other(error),
    }
}
