//! The files in the run directory that a pager uses, and the notification at the end of a fill.
//!
//! Rekindle's commands trust what is in a run directory. So a confined pager has no access to it: its *broker*, a
//! process outside of its confinement, does these operations, which are fixed, for the fill that it was started for.

use crate::fill::{Fill, FillError, FillStage, lock_pager, try_lock_write_record};
use rekindle_kernel::confinement::broker::{Answer, Broker, Request};
use rekindle_kernel::confinement::{Access, CapabilitySet, ConfinementError, Grant, capabilities_for};
use rekindle_memory::missing::Registration;
use rekindle_vm::disks;
use rekindle_vm::rundir::RunDir;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::sync::Arc;

/// The broker's operations, by their number in a request.
mod operation {
    pub const CLOSE: u64 = 0;
    pub const NOTIFY_FILLED: u64 = 1;
    pub const LOCK_PAGER: u64 = 2;
    pub const IS_CURRENT: u64 = 3;
    pub const LOCK_WRITE_RECORD: u64 = 4;
    pub const READ_STAGE: u64 = 5;
    pub const RECORD_FILLED: u64 = 6;
    pub const REMOVE: u64 = 7;
}

/// The stages, by their number in an answer.
const STAGES: [FillStage; 3] = [FillStage::Filling, FillStage::Filled, FillStage::HandedOver];
/// The number of a lock that another process holds.
const HELD: u64 = 1;

/// Access to the files of one fill.
#[derive(Debug, Clone)]
pub(crate) struct FillFiles {
    rundir: RunDir,
    fill: Fill,
    /// `None`: this process is not confined.
    broker: Option<Arc<Broker>>,
}

impl FillFiles {
    pub(crate) fn new(rundir: &RunDir, fill: &Fill) -> Self {
        Self { rundir: rundir.clone(), fill: fill.clone(), broker: None }
    }

    /// Starts a broker for a process that will be confined. `registration`: the userfaultfd in QEMU.
    ///
    /// # Errors
    /// [`ConfinementError`].
    pub(crate) fn through_broker(self, registration: Option<Registration>) -> Result<Self, ConfinementError> {
        let direct = self.clone();
        let answer = move |Request { numbers: [operation, ..], .. }: Request| match operation {
            operation::CLOSE => {
                let closed = registration.map_or(Ok(()), Registration::close);
                closed.map(Answer::from).map_err(io::Error::other)
            }
            _ => direct.answer(operation),
        };
        let kept = CapabilitySet::SYS_PTRACE | capabilities_for(&[Grant::new(self.rundir.path(), Access::Directory)]);
        Ok(Self { broker: Some(Arc::new(Broker::start(1, kept, answer)?)), ..self })
    }

    /// Does an operation in the broker.
    fn answer(&self, operation: u64) -> io::Result<Answer> {
        let locked = |lock: Option<File>| Answer {
            number: if lock.is_none() { HELD } else { 0 },
            descriptor: lock.map(Into::into),
        };
        match operation {
            operation::NOTIFY_FILLED => {
                self.notify_filled();
                Ok(Answer::default())
            }
            operation::LOCK_PAGER => match self.lock_pager() {
                Err(FillError::AlreadyServed { .. }) => Ok(locked(None)),
                lock => Ok(locked(Some(lock.map_err(into_io)?))),
            },
            operation::IS_CURRENT => self.is_current().map(|is_current| u64::from(is_current).into()).map_err(into_io),
            operation::LOCK_WRITE_RECORD => self.try_lock_write_record().map(locked).map_err(into_io),
            operation::READ_STAGE => {
                let stage = self.read_stage().map_err(into_io)?;
                let number = STAGES.iter().position(|known| Some(*known) == stage).unwrap_or(STAGES.len());
                Ok((number as u64).into())
            }
            operation::RECORD_FILLED => self.record_filled().map(Answer::from).map_err(into_io),
            operation::REMOVE => self.remove().map(Answer::from).map_err(into_io),
            _ => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Lets the broker do an operation. `None`: there is no broker.
    fn ask(&self, operation: u64) -> Option<Result<Answer, FillError>> {
        let answer = self.broker.as_ref()?.ask([operation, 0, 0, 0], OsStr::new(""), None);
        Some(answer.map_err(|source| FillError::File { path: self.rundir.fill(), source }))
    }

    /// Returns what closes the userfaultfd in QEMU. `None`: this process can close it itself.
    pub(crate) fn close_through(&self) -> Option<impl Fn() -> io::Result<()> + Send + 'static> {
        let broker = Arc::clone(self.broker.as_ref()?);
        Some(move || broker.ask_number([operation::CLOSE, 0, 0, 0]).map(drop))
    }

    /// Takes the pager's lock, which locks out other pagers.
    ///
    /// # Errors
    /// [`FillError::AlreadyServed`].
    pub(crate) fn lock_pager(&self) -> Result<File, FillError> {
        let Some(answer) = self.ask(operation::LOCK_PAGER) else { return lock_pager(&self.rundir) };
        let lock = answer?.descriptor.map(File::from);
        lock.ok_or_else(|| FillError::AlreadyServed { name: self.rundir.name().into() })
    }

    /// Returns whether the run directory still has the same fill.
    pub(crate) fn is_current(&self) -> Result<bool, FillError> {
        match self.ask(operation::IS_CURRENT) {
            Some(answer) => Ok(answer?.number != 0),
            None => Ok(Fill::read(&self.rundir)?.as_ref() == Some(&self.fill)),
        }
    }

    /// Tries to lock the pager's write record. Returns `None` if another process holds the lock.
    pub(crate) fn try_lock_write_record(&self) -> Result<Option<File>, FillError> {
        match self.ask(operation::LOCK_WRITE_RECORD) {
            Some(answer) => Ok(answer?.descriptor.map(File::from)),
            None => try_lock_write_record(&self.rundir),
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
