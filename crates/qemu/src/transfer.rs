//! Moves a guest's state out of one QEMU ([`StateOutput`]) and into another ([`Feed`]), or to and from a file.
//!
//! Both QEMUs are connected by pipes to this process, which sees every byte. Therefore it can also keep the stream,
//! and it never waits without limit for a QEMU that does not read or write.

use crate::devices::{DeviceState, DeviceStateError, SAVE_DEVICES};
use crate::qmp::{Qmp, QmpError};
use crate::vmm::{Owner, Vmm};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::fs::{CWD, FileType, Mode, OFlags, fchown, mknodat, open};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::pipe::fcntl_setpipe_size;
use serde::Deserialize;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{self, PipeReader, PipeWriter, Read, Write, pipe};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Limit for QEMU to read the next part of a state, or to write all of its device state.
pub const TRANSFER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait for QEMU's next output or reply before the deadline is checked again.
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Limit of a state in bytes: devices, and RAM that is not shared, such as video memory.
const MAX_STATE_BYTES: u64 = 1 << 30;
/// Capacity of a pipe in bytes: several times a device state.
const PIPE_BYTES: usize = 1 << 20;
/// Name under which QEMU knows a descriptor that it was handed.
const FD_NAME: &str = "rekindle";

/// Why a state could not be transferred.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// QEMU returned an error or did not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error(transparent)]
    Devices(#[from] DeviceStateError),
    /// The pipe failed. A broken pipe means that the QEMU at its other end has ended or cancelled.
    #[error("the pipe to QEMU failed")]
    Pipe(#[source] io::Error),
    #[error("QEMU has not read or written the guest's state within {} s", TRANSFER_TIMEOUT.as_secs())]
    Stuck,
    #[error("QEMU has sent more than {} MiB as the state of its devices", MAX_STATE_BYTES >> 20)]
    TooLong,
    #[error("QEMU could not {what} the state: {reason}")]
    Failed {
        /// `save` or `load`.
        what: &'static str,
        reason: String,
    },
}

/// Migration capabilities, each with its new value.
pub type Capabilities<'a> = &'a [(&'a str, bool)];

/// Sets migration capabilities.
///
/// # Errors
/// When QEMU does not know a capability.
pub fn set_capabilities(qmp: &mut Qmp, capabilities: Capabilities<'_>) -> Result<(), QmpError> {
    let list: Vec<_> = capabilities.iter().map(|(name, on)| json!({"capability": name, "state": on})).collect();
    qmp.execute::<Value>("migrate-set-capabilities", json!({"capabilities": list})).map(drop)
}

/// Makes QEMU write its whole state to `file`, which must be open write-only, or read it from a `file` that is open
/// read-only. QEMU since 9.0 has a transport for files; since 11.0 its transport for descriptors rejects files.
fn through_file(qmp: &mut Qmp, command: &str, file: &File) -> Result<(), QmpError> {
    #[derive(Deserialize)]
    struct AddedDescriptor {
        #[serde(rename = "fdset-id")]
        set: u64,
    }
    let capabilities: Vec<Value> = qmp.execute("query-migrate-capabilities", ())?;
    // Only a QEMU with the transport for files has this capability.
    if !capabilities.iter().any(|capability| capability["capability"] == "mapped-ram") {
        qmp.execute_with_fd::<Value>("getfd", json!({ "fdname": FD_NAME }), file.as_fd())?;
        return qmp.execute::<Value>(command, json!({ "uri": format!("fd:{FD_NAME}") })).map(drop);
    }
    let AddedDescriptor { set } = qmp.execute_with_fd("add-fd", json!({}), file.as_fd())?;
    let started = qmp.execute::<Value>(command, json!({ "uri": format!("file:/dev/fdset/{set}") }));
    // QEMU has opened the file by now, or has failed to.
    qmp.execute::<Value>("remove-fd", json!({ "fdset-id": set }))?;
    started.map(drop)
}

/// Saves a stopped guest, RAM and devices, to `file`, which must be open write-only, and waits until it is saved.
///
/// # Errors
/// [`TransferError`]; also when the save takes longer than `timeout`.
pub fn save_to_file(qmp: &mut Qmp, file: &File, timeout: Duration) -> Result<(), TransferError> {
    set_capabilities(qmp, &[("events", true), ("x-ignore-shared", false)])?;
    // The guest is stopped: it needs no bandwidth.
    qmp.execute::<Value>("migrate-set-parameters", json!({ "max-bandwidth": i64::MAX }))?;
    qmp.drop_events();
    through_file(qmp, "migrate", file)?;
    wait_saved(qmp, timeout)
}

/// Starts to load a state of [`save_to_file`] into a QEMU that was started with `-incoming defer`. [`wait_loaded`]
/// waits for the end.
///
/// # Errors
/// [`TransferError::Qmp`] when QEMU rejects the file.
pub fn begin_load_from_file(qmp: &mut Qmp, file: &File) -> Result<(), TransferError> {
    set_capabilities(qmp, &[("events", true)])?;
    Ok(through_file(qmp, "migrate-incoming", file)?)
}

/// The pipe into a QEMU that was started with `-incoming defer`.
#[derive(Debug)]
pub struct Feed {
    pipe: PipeWriter,
}

impl Feed {
    /// Makes the QEMU read its state from a pipe. `capabilities` are those that were not set yet.
    ///
    /// On success: QEMU reads each part when it is written.
    ///
    /// # Errors
    /// [`TransferError::Qmp`] when QEMU rejects the pipe, [`TransferError::Pipe`] when it cannot be made.
    pub fn open(qmp: &mut Qmp, capabilities: Capabilities<'_>) -> Result<Self, TransferError> {
        if !capabilities.is_empty() {
            set_capabilities(qmp, capabilities)?;
        }
        let (reader, writer) = pipe().map_err(TransferError::Pipe)?;
        // Failure is harmless: a smaller pipe is only slower.
        let _ = fcntl_setpipe_size(&writer, PIPE_BYTES);
        ioctl_fionbio(&writer, true).map_err(|e| TransferError::Pipe(e.into()))?;
        qmp.execute_with_fd::<Value>("getfd", json!({ "fdname": FD_NAME }), reader.as_fd())?;
        qmp.execute::<Value>("migrate-incoming", json!({ "uri": format!("fd:{FD_NAME}") }))?;
        Ok(Self { pipe: writer })
    }

    /// Writes a part of the stream.
    ///
    /// # Errors
    /// [`TransferError::Pipe`] when the QEMU has ended; [`TransferError::Stuck`] when it does not read.
    pub fn write(&mut self, mut part: &[u8]) -> Result<(), TransferError> {
        while !part.is_empty() {
            match self.pipe.write(part) {
                Ok(written) => part = part.get(written..).unwrap_or_default(),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => wait_ready(&self.pipe, PollFlags::OUT)?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(TransferError::Pipe(e)),
            }
        }
        Ok(())
    }
}

/// Waits until a descriptor is ready, at most [`TRANSFER_TIMEOUT`].
fn wait_ready(fd: impl AsFd, flags: PollFlags) -> Result<(), TransferError> {
    let timeout = Timespec { tv_sec: TRANSFER_TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    match poll(&mut [PollFd::new(&fd, flags)], Some(&timeout)) {
        Ok(0) => Err(TransferError::Stuck),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(TransferError::Pipe(e.into())),
    }
}

/// Waits until an incoming state is loaded. The QEMU must have the capability `events`.
///
/// # Errors
/// [`TransferError::Failed`] with QEMU's text; [`QmpError::Closed`] when it ended, as it does on a bad state.
pub fn wait_loaded(qmp: &mut Qmp, timeout: Duration) -> Result<(), TransferError> {
    wait_migration(qmp, "load", timeout)
}

/// Waits until an outgoing state is written. The QEMU must have the capability `events`.
///
/// # Errors
/// [`TransferError::Failed`] with QEMU's text.
pub fn wait_saved(qmp: &mut Qmp, timeout: Duration) -> Result<(), TransferError> {
    wait_migration(qmp, "save", timeout)
}

/// `what`: `save` or `load`.
fn wait_migration(qmp: &mut Qmp, what: &'static str, timeout: Duration) -> Result<(), TransferError> {
    let is_completed =
        qmp.wait_event("MIGRATION", timeout, |event| match event.data.get("status").and_then(Value::as_str) {
            Some("completed") => Some(true),
            Some("failed" | "cancelled") => Some(false),
            _ => None,
        })?;
    if is_completed {
        return Ok(());
    }
    let status: Value = qmp.execute("query-migrate", ())?;
    let reason = status.get("error-desc").and_then(Value::as_str).unwrap_or("it gives no reason").to_owned();
    Err(TransferError::Failed { what, reason })
}

/// How the device state gets out of a QEMU.
#[derive(Debug)]
pub enum StateOutput {
    /// `xen-save-devices-state`: only devices.
    Devices(Fifo),
    /// The same, for a QEMU that cannot open a pipe of ours: another user, a mount namespace, a security label.
    Memory(DeviceState),
    /// `migrate` with `x-ignore-shared`: devices, and the RAM blocks that are not shared.
    Migration(PipeReader),
}

/// A named pipe. The command takes a file name, and QEMU truncates a descriptor that it was handed, which a pipe does
/// not allow.
#[derive(Debug)]
pub struct Fifo {
    path: PathBuf,
    reader: PipeReader,
    /// Kept open so that the reader sees no end before QEMU has opened the pipe.
    _writer: OwnedFd,
}

impl Fifo {
    /// Makes a pipe that `owner` can open.
    fn make(path: PathBuf, owner: Owner) -> io::Result<Self> {
        // A pipe of an interrupted attempt may still exist.
        let _ = fs::remove_file(&path);
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        let reader = open(&path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?;
        let writer = open(&path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        let _ = fcntl_setpipe_size(&writer, PIPE_BYTES);
        fchown(&reader, Some(owner.user), Some(owner.group))?;
        Ok(Self { path, reader: PipeReader::from(reader), _writer: writer })
    }
}

impl Drop for Fifo {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl StateOutput {
    /// Prepares to save with `xen-save-devices-state`.
    ///
    /// # Errors
    /// When no pipe can be made in the QEMU's directory.
    pub fn devices(source: &Vmm) -> Result<Self, TransferError> {
        let path = source.directory.join("state.fifo");
        source.owner().and_then(|owner| Fifo::make(path, owner)).map(Self::Devices).map_err(TransferError::Pipe)
    }

    /// Prepares to save with `xen-save-devices-state` into memory of this process.
    ///
    /// # Errors
    /// When QEMU has no such command, or rejects the descriptor.
    pub fn memory(qmp: &mut Qmp) -> Result<Self, TransferError> {
        Ok(Self::Memory(DeviceState::open(qmp)?.releasing_disks()))
    }

    /// Prepares to save with `migrate` and `x-ignore-shared`.
    ///
    /// # Errors
    /// When QEMU rejects the descriptor or the capability.
    pub fn migration(qmp: &mut Qmp) -> Result<Self, TransferError> {
        set_capabilities(qmp, &[("events", true), ("x-ignore-shared", true)])?;
        // No limit: the guest will be stopped.
        qmp.execute::<Value>("migrate-set-parameters", json!({ "max-bandwidth": i64::MAX }))?;
        let (reader, writer) = pipe().map_err(TransferError::Pipe)?;
        let _ = fcntl_setpipe_size(&writer, PIPE_BYTES);
        qmp.execute_with_fd::<Value>("getfd", json!({ "fdname": FD_NAME }), writer.as_fd())?;
        ioctl_fionbio(&reader, true).map_err(|e| TransferError::Pipe(e.into()))?;
        Ok(Self::Migration(reader))
    }

    /// Sends the first part of the save command ahead, on a connection that is used for nothing else.
    ///
    /// # Errors
    /// When QEMU has closed the connection.
    pub fn stage(&self, qmp: &mut Qmp) -> Result<(), TransferError> {
        match self {
            Self::Devices(fifo) => qmp.stage(SAVE_DEVICES, json!({"filename": fifo.path}))?,
            Self::Memory(state) => state.stage(qmp)?,
            Self::Migration(_) => {}
        }
        Ok(())
    }

    /// Starts to save by the command that [`StateOutput::stage`] has sent ahead on this connection.
    ///
    /// # Errors
    /// When QEMU has closed the connection, or rejects the command.
    pub fn begin_staged(&self, qmp: &mut Qmp) -> Result<(), TransferError> {
        match self {
            Self::Devices(_) => Ok(qmp.fire(SAVE_DEVICES)?),
            Self::Memory(state) => Ok(state.begin_staged(qmp)?),
            Self::Migration(_) => self.begin(qmp),
        }
    }

    /// Starts to save. The caller can do other work between this and [`StateOutput::drain`].
    ///
    /// # Errors
    /// When QEMU has closed the connection, or rejects the command.
    pub fn begin(&self, qmp: &mut Qmp) -> Result<(), TransferError> {
        match self {
            // `live` is true by default: if the guest was stopped before, QEMU also unlocks its disk images, so that
            // another QEMU can lock them.
            Self::Devices(fifo) => qmp.send(SAVE_DEVICES, json!({"filename": fifo.path}), &[])?,
            Self::Memory(state) => state.begin(qmp)?,
            Self::Migration(_) => {
                qmp.drop_events();
                qmp.execute::<Value>("migrate", json!({ "uri": format!("fd:{FD_NAME}") }))?;
            }
        }
        Ok(())
    }

    /// Reads the state while it arrives and passes each part to `receive`, until QEMU reports that it is complete.
    ///
    /// # Errors
    /// When QEMU has ended or fails, the state exceeds the limit, or `receive` returns an error.
    pub fn drain(
        mut self,
        qmp: &mut Qmp,
        mut receive: impl FnMut(&[u8]) -> Result<(), TransferError>,
    ) -> Result<(), TransferError> {
        let mut unused_bytes = MAX_STATE_BYTES;
        let mut receive_limited = |part: &[u8]| {
            unused_bytes = unused_bytes.checked_sub(part.len() as u64).ok_or(TransferError::TooLong)?;
            receive(part)
        };
        match &mut self {
            Self::Devices(fifo) => drain_until_reply(&mut fifo.reader, qmp, &mut receive_limited),
            Self::Memory(state) => {
                state.wait(qmp)?;
                receive_limited(&state.take()?)
            }
            Self::Migration(pipe) => {
                drain_until_end(pipe, &mut receive_limited)?;
                wait_saved(qmp, TRANSFER_TIMEOUT)
            }
        }
    }
}

/// Reads until QEMU replies to the save command: all that QEMU wrote before the reply is in the pipe.
fn drain_until_reply(
    pipe: &mut PipeReader,
    qmp: &mut Qmp,
    receive: &mut impl FnMut(&[u8]) -> Result<(), TransferError>,
) -> Result<(), TransferError> {
    let mut buffer = vec![0; PIPE_BYTES];
    let deadline = Instant::now() + TRANSFER_TIMEOUT;
    loop {
        let has_replied = qmp.try_reply::<Value>(SAVE_DEVICES)?.is_some();
        while let PipeState::Part(part) = read_pipe(pipe, &mut buffer)? {
            receive(part)?;
        }
        if has_replied {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(TransferError::Stuck);
        }
        let mut fds = [PollFd::new(pipe, PollFlags::IN), PollFd::new(qmp, PollFlags::IN)];
        match poll(&mut fds, Some(&POLL_INTERVAL)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(TransferError::Pipe(e.into())),
        }
    }
}

/// Reads until QEMU closes its end of the pipe.
fn drain_until_end(
    pipe: &mut PipeReader,
    receive: &mut impl FnMut(&[u8]) -> Result<(), TransferError>,
) -> Result<(), TransferError> {
    let mut buffer = vec![0; PIPE_BYTES];
    let deadline = Instant::now() + TRANSFER_TIMEOUT;
    loop {
        match read_pipe(pipe, &mut buffer)? {
            PipeState::End => return Ok(()),
            PipeState::Part(part) => receive(part)?,
            PipeState::Empty if Instant::now() > deadline => return Err(TransferError::Stuck),
            PipeState::Empty => wait_ready(&*pipe, PollFlags::IN)?,
        }
    }
}

/// What a pipe without waiting has to read.
enum PipeState<'a> {
    Part(&'a [u8]),
    /// Nothing at present.
    Empty,
    /// Nothing any more: QEMU has closed its end.
    End,
}

fn read_pipe<'a>(pipe: &mut PipeReader, buffer: &'a mut [u8]) -> Result<PipeState<'a>, TransferError> {
    loop {
        match pipe.read(buffer) {
            Ok(0) => return Ok(PipeState::End),
            Ok(count) => return Ok(PipeState::Part(buffer.get(..count).unwrap_or_default())),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(PipeState::Empty),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(TransferError::Pipe(e)),
        }
    }
}
