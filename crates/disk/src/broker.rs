//! What a confined server cannot do itself, done by a process outside of its confinement.
//!
//! | operations | the server would need |
//! |---|---|
//! | open the image; use the directory of the redo log | paths of files that do not exist yet, or that another server replaces |
//! | find a front end; fetch a page of its memory | the capability to read the memory of other processes |
//! | remove the sockets | write access to the run directory of the VM, which Rekindle's commands trust |
//!
//! Its paths are fixed when it starts. The server gets open files, and nothing of the memory of a front end.

use crate::image::OpenMode;
use crate::redo::directory::STATE_NAME;
use crate::redo::files::{FileStart, LocalClaim, LocalFiles, LogFiles, read_start};
use crate::redo::format::segment_epoch;
use rekindle_kernel::confinement::broker::{Answer, Broker, Request};
use rekindle_kernel::confinement::{Access, CapabilitySet, ConfinementError, Grant, capabilities_for};
use rekindle_kernel::durable_file::LocalFile;
use rekindle_kernel::memory;
use rekindle_kernel::process::Process;
use rekindle_kernel::userfault::{Features, Userfault, UserfaultError, open_device};
use rustix::fs::{MemfdFlags, OFlags, memfd_create};
use rustix::net::sockopt::socket_peercred;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Most operations at a time: front ends whose pages are fetched, and one of the log.
const CONNECTIONS: usize = 5;

/// The operations, by their number in a request.
mod operation {
    pub const IDENTIFY_PEER: u64 = 0;
    pub const CHECK_ALIVE: u64 = 1;
    pub const FETCH_PAGE: u64 = 2;
    pub const OPEN_IMAGE: u64 = 3;
    pub const OPEN_IMAGE_DIRECT: u64 = 14;
    pub const CREATE_DIRECTORY: u64 = 4;
    pub const CLAIM_DIRECTORY: u64 = 5;
    pub const LIST: u64 = 6;
    pub const CREATE: u64 = 7;
    pub const OPEN: u64 = 8;
    pub const OPEN_TO_PEEK: u64 = 9;
    pub const REMOVE: u64 = 10;
    pub const SYNC_DIRECTORY: u64 = 11;
    pub const REMOVE_DIRECTORY: u64 = 12;
    pub const REMOVE_SOCKETS: u64 = 13;
}

/// The files that a broker uses for its server.
#[derive(Debug, Clone)]
pub struct BrokeredFiles {
    pub image: PathBuf,
    pub mode: OpenMode,
    /// Directory of the redo log.
    pub redo: LocalFiles,
    /// Whether the disk can have a log. Otherwise it is only checked that there is none.
    pub may_have_log: bool,
    /// Paths of the server's sockets.
    pub sockets: [PathBuf; 2],
}

/// The connection to the broker of this server.
#[derive(Debug)]
pub struct DiskBroker(Broker);

impl DiskBroker {
    /// Starts a broker. This process must have one thread.
    ///
    /// # Errors
    /// [`ConfinementError`].
    pub fn start(files: BrokeredFiles) -> Result<Self, ConfinementError> {
        let mut used =
            vec![Grant::new(&files.image, if files.mode.readonly { Access::Read } else { Access::WriteFile })];
        for path in [files.redo.path(), parent_of(files.redo.path())] {
            used.push(Grant::new(path, Access::Directory));
        }
        let kept = CapabilitySet::SYS_PTRACE | capabilities_for(&used);
        let service = Service { files, front_ends: Mutex::default() };
        Ok(Self(Broker::start(CONNECTIONS, kept, move |request| service.handle(request))?))
    }

    /// Opens the image with these flags. Access (reading, writing) is fixed.
    ///
    /// # Errors
    /// Errors of `open(2)`.
    pub fn open_image(&self, flags: OFlags) -> io::Result<File> {
        let is_direct = flags.contains(OFlags::DIRECT);
        let operation = if is_direct { operation::OPEN_IMAGE_DIRECT } else { operation::OPEN_IMAGE };
        file_of(self.0.ask([operation, 0, 0, 0], OsStr::new(""), None)?)
    }

    /// Ends this process when the broker has ended: the redo log could not grow any more.
    ///
    /// # Errors
    /// Errors of starting a thread.
    pub fn end_process_with_it(&self) -> io::Result<()> {
        self.0.end_process_with_it()
    }

    /// Removes the sockets of the server, which is about to end.
    pub fn remove_sockets(&self) {
        if let Err(e) = self.0.ask_number([operation::REMOVE_SOCKETS, 0, 0, 0]) {
            tracing::debug!("cannot remove the sockets: {e}");
        }
    }
}

fn file_of(answer: Answer) -> io::Result<File> {
    answer.descriptor.map(File::from).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The part of the broker that does the operations.
struct Service {
    files: BrokeredFiles,
    /// The processes that have connected to the server.
    front_ends: Mutex<Vec<Process>>,
}

impl Service {
    fn handle(&self, Request { numbers, name, descriptor }: Request) -> io::Result<Answer> {
        let [operation, pid, started, address] = numbers;
        let front_end = || Ok::<_, io::Error>(Process { pid: u32::try_from(pid).map_err(io::Error::other)?, started });
        let image = |flags| Ok(opened(self.files.mode.open(&self.files.image, flags)?.into()));
        match operation {
            operation::IDENTIFY_PEER => {
                self.identify(&descriptor.ok_or(io::ErrorKind::InvalidInput)?).map(Answer::from)
            }
            operation::CHECK_ALIVE => {
                let process = front_end()?;
                Ok(Answer::from(u64::from(self.has_connected(process) && process.is_alive())))
            }
            operation::FETCH_PAGE => {
                let process = front_end()?;
                if !self.has_connected(process) {
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
                memory::read(process, address, &mut [0]).map(Answer::from)
            }
            operation::OPEN_IMAGE => image(OFlags::empty()),
            operation::OPEN_IMAGE_DIRECT => image(OFlags::DIRECT),
            operation::REMOVE_SOCKETS => {
                // Each, also if another one is missing.
                let removed = self.files.sockets.each_ref().map(fs::remove_file);
                removed.into_iter().collect::<io::Result<()>>().map(Answer::from)
            }
            _ => self.handle_log_request(operation, &name),
        }
    }

    /// Does an operation on the redo log, as the server of an unconfined disk does it.
    fn handle_log_request(&self, operation: u64, name: &OsStr) -> io::Result<Answer> {
        let log = &self.files.redo;
        let is_check = [operation::CLAIM_DIRECTORY, operation::LIST, operation::OPEN_TO_PEEK].contains(&operation);
        if !self.files.may_have_log && !is_check {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        match operation {
            operation::CREATE_DIRECTORY => log.create_directory().map(Answer::from),
            operation::CLAIM_DIRECTORY => {
                let claim = log.claim()?.map(|LocalClaim(directory)| directory.into());
                Ok(Answer { number: 0, descriptor: claim })
            }
            operation::LIST => Ok(opened(write_names(&log.list()?)?)),
            operation::CREATE => Ok(opened(into_descriptor(log.create(file_name(name)?)?)?)),
            operation::OPEN => Ok(opened(into_descriptor(log.open(file_name(name)?)?)?)),
            operation::OPEN_TO_PEEK => {
                // A file with another name is reported as no file of a log.
                let file = file_name(name).ok().map_or(Ok(None), |name| log.open_to_peek(name))?;
                Ok(Answer { number: 0, descriptor: file.map(OwnedFd::from) })
            }
            operation::REMOVE => log.remove(file_name(name)?).map(Answer::from),
            operation::SYNC_DIRECTORY => log.sync().map(Answer::from),
            operation::REMOVE_DIRECTORY => log.remove_directory().map(Answer::from),
            _ => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Adds the process at the other end of a connection of the server. Returns its start time.
    fn identify(&self, connection: &OwnedFd) -> io::Result<u64> {
        let process = peer(connection)?;
        let mut front_ends = self.front_ends.lock().unwrap_or_else(PoisonError::into_inner);
        front_ends.retain(|known| *known != process && known.is_alive());
        front_ends.push(process);
        Ok(process.started)
    }

    fn has_connected(&self, process: Process) -> bool {
        self.front_ends.lock().unwrap_or_else(PoisonError::into_inner).contains(&process)
    }
}

/// Returns the process that has connected to this process.
fn peer(connection: impl AsFd) -> io::Result<Process> {
    Process::of(peer_number(connection)?)
}

fn peer_number(connection: impl AsFd) -> io::Result<u32> {
    u32::try_from(socket_peercred(connection)?.pid.as_raw_nonzero().get()).map_err(io::Error::other)
}

/// Rejects everything that is not the name of a file of a log.
fn file_name(name: &OsStr) -> io::Result<&str> {
    let is_of_log = |name: &&str| *name == STATE_NAME || segment_epoch(name).is_some();
    name.to_str().filter(is_of_log).ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

fn opened(file: OwnedFd) -> Answer {
    Answer { number: 0, descriptor: Some(file) }
}

fn into_descriptor(LocalFile(file): LocalFile) -> io::Result<OwnedFd> {
    Arc::try_unwrap(file).map(OwnedFd::from).or_else(|shared| Ok(shared.try_clone()?.into()))
}

/// Writes names to a file in memory, each with a zero byte after it.
fn write_names(names: &[String]) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create("names", MemfdFlags::CLOEXEC)?);
    for name in names {
        file.write_all(name.as_bytes())?;
        file.write_all(&[0])?;
    }
    file.rewind()?;
    Ok(file.into())
}

fn read_names(mut file: File) -> io::Result<Vec<String>> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let names = bytes.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    Ok(names.map(|name| String::from_utf8_lossy(name).into_owned()).collect())
}

/// The directory of a redo log, of a server that may be confined.
#[derive(Debug, Clone)]
pub struct ServedFiles {
    local: LocalFiles,
    /// `None`: this process is not confined.
    broker: Option<Arc<DiskBroker>>,
}

impl ServedFiles {
    /// Wraps the directory. With a broker, the broker was started for the same one.
    #[must_use]
    pub fn new(local: LocalFiles, broker: Option<Arc<DiskBroker>>) -> Self {
        Self { local, broker }
    }

    /// Lets the broker do an operation. `None`: there is no broker.
    fn ask(&self, operation: u64, name: &str) -> Option<io::Result<Answer>> {
        let DiskBroker(broker) = self.broker.as_deref()?;
        Some(broker.ask([operation, 0, 0, 0], OsStr::new(name), None))
    }
}

impl LogFiles for ServedFiles {
    type File = LocalFile;
    type Claim = LocalClaim;

    fn path(&self) -> &Path {
        self.local.path()
    }

    fn create_directory(&self) -> io::Result<()> {
        self.ask(operation::CREATE_DIRECTORY, "")
            .map_or_else(|| self.local.create_directory(), |answer| answer.map(drop))
    }

    fn claim(&self) -> io::Result<Option<LocalClaim>> {
        let Some(answer) = self.ask(operation::CLAIM_DIRECTORY, "") else { return self.local.claim() };
        Ok(answer?.descriptor.map(|directory| LocalClaim(directory.into())))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.ask(operation::LIST, "").map_or_else(|| self.local.list(), |answer| read_names(file_of(answer?)?))
    }

    fn create(&self, name: &str) -> io::Result<LocalFile> {
        let Some(answer) = self.ask(operation::CREATE, name) else { return self.local.create(name) };
        Ok(LocalFile(Arc::new(file_of(answer?)?)))
    }

    fn peek(&self, name: &str, max_bytes: u64) -> io::Result<Option<FileStart>> {
        let Some(answer) = self.ask(operation::OPEN_TO_PEEK, name) else { return self.local.peek(name, max_bytes) };
        answer?.descriptor.map(|file| read_start(file.into(), max_bytes)).transpose()
    }

    fn open(&self, name: &str) -> io::Result<LocalFile> {
        let Some(answer) = self.ask(operation::OPEN, name) else { return self.local.open(name) };
        Ok(LocalFile(Arc::new(file_of(answer?)?)))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.ask(operation::REMOVE, name).map_or_else(|| self.local.remove(name), |answer| answer.map(drop))
    }

    fn sync(&self) -> io::Result<()> {
        self.ask(operation::SYNC_DIRECTORY, "").map_or_else(|| self.local.sync(), |answer| answer.map(drop))
    }

    fn remove_directory(&self) -> io::Result<()> {
        self.ask(operation::REMOVE_DIRECTORY, "")
            .map_or_else(|| self.local.remove_directory(), |answer| answer.map(drop))
    }
}

/// How this process finds front ends and reads their memory, of which a restore has not filled all pages yet.
#[derive(Debug, Clone, Default)]
pub struct FrontEndMemory {
    /// `None`: this process is not confined.
    broker: Option<Arc<DiskBroker>>,
    /// The device of userfaultfds, which this process may be unable to open later.
    userfault_device: Option<Arc<File>>,
}

impl FrontEndMemory {
    /// *Needs:* this process is not confined yet.
    #[must_use]
    pub fn new(broker: Option<Arc<DiskBroker>>) -> Self {
        Self { broker, userfault_device: open_device().ok().map(Arc::new) }
    }

    /// Creates a userfaultfd for this process's own mapping of the memory.
    ///
    /// # Errors
    /// As for [`Userfault::own`].
    pub fn userfault(&self) -> Result<Userfault, UserfaultError> {
        Userfault::own_by(self.userfault_device.as_deref(), Features::empty())
    }

    /// Returns the process that has connected.
    ///
    /// # Errors
    /// An error if it has ended.
    pub fn identify(&self, connection: &UnixStream) -> io::Result<Process> {
        let Some(DiskBroker(broker)) = self.broker.as_deref() else { return peer(connection) };
        let request = [operation::IDENTIFY_PEER, 0, 0, 0];
        let started = broker.ask(request, OsStr::new(""), Some(connection.as_fd()))?.number;
        Ok(Process { pid: peer_number(connection)?, started })
    }

    /// Returns whether the process still runs. It counts as ended if the broker has ended.
    #[must_use]
    pub fn is_alive(&self, process: Process) -> bool {
        let Some(DiskBroker(broker)) = self.broker.as_deref() else { return process.is_alive() };
        matches!(broker.ask_number([operation::CHECK_ALIVE, process.pid.into(), process.started, 0]), Ok(1))
    }

    /// Reads a byte of the process's memory, which waits until the page is filled.
    ///
    /// # Errors
    /// Errors of `process_vm_readv(2)`.
    pub fn touch(&self, process: Process, address: u64) -> io::Result<()> {
        let Some(DiskBroker(broker)) = self.broker.as_deref() else { return memory::read(process, address, &mut [0]) };
        broker.ask_number([operation::FETCH_PAGE, process.pid.into(), process.started, address]).map(drop)
    }
}
