//! A state moved out of one QEMU and into another.
//!
//! Both QEMUs are connected by pipes to this process, which sees every byte. Therefore it can also keep the stream,
//! and it never waits without limit for a QEMU that does not read or write.

use crate::command::Directory;
use crate::qmp::{Qmp, QmpError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat, open};
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
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Limit of a state in bytes: devices, and RAM that is not shared, such as video memory.
const MOST_STATE: u64 = 1 << 30;
/// Capacity of a pipe in bytes: several times a device state.
const PIPE: usize = 1 << 20;
/// The command that saves devices without RAM. QEMU for x86 has it, even without Xen.
pub const SAVE_DEVICES: &str = "xen-save-devices-state";
/// Name under which QEMU knows a descriptor that it was handed.
const FD_NAME: &str = "rekindle";

/// Why a state could not be transferred.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// QEMU returned an error or did not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The pipe failed. A broken pipe means that the QEMU at its other end has ended or cancelled.
    #[error("the pipe to QEMU failed")]
    Pipe(#[source] io::Error),
    /// The QEMU at the other end neither reads nor writes.
    #[error("QEMU has not read or written the guest's state within {} s", PATIENCE.as_secs())]
    Stuck,
    /// The state exceeds the limit.
    #[error("QEMU has sent more than {} MiB as the state of its devices", MOST_STATE >> 20)]
    TooLong,
    /// QEMU reports that the transfer failed.
    #[error("QEMU could not {what} the state: {reason}")]
    Failed {
        /// `save` or `load`.
        what: &'static str,
        /// QEMU's error text.
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
    struct Added {
        #[serde(rename = "fdset-id")]
        set: u64,
    }
    let capabilities: Vec<Value> = qmp.execute("query-migrate-capabilities", ())?;
    // Only a QEMU with the transport for files has this capability.
    if !capabilities.iter().any(|one| one["capability"] == "mapped-ram") {
        qmp.execute_with_fd::<Value>("getfd", json!({ "fdname": FD_NAME }), file.as_fd())?;
        return qmp.execute::<Value>(command, json!({ "uri": format!("fd:{FD_NAME}") })).map(drop);
    }
    let Added { set } = qmp.execute_with_fd("add-fd", json!({}), file.as_fd())?;
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
        let _ = fcntl_setpipe_size(&writer, PIPE);
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
                Ok(n) => part = part.get(n..).unwrap_or_default(),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => wait(&self.pipe, PollFlags::OUT)?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(TransferError::Pipe(e)),
            }
        }
        Ok(())
    }
}

/// Waits until a descriptor is ready, at most [`PATIENCE`].
fn wait(fd: impl AsFd, flags: PollFlags) -> Result<(), TransferError> {
    let limit = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    match poll(&mut [PollFd::new(&fd, flags)], Some(&limit)) {
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

fn wait_migration(qmp: &mut Qmp, what: &'static str, timeout: Duration) -> Result<(), TransferError> {
    let done =
        qmp.wait_event("MIGRATION", timeout, |event| match event.data.get("status").and_then(Value::as_str) {
            Some("completed") => Some(true),
            Some("failed" | "cancelled") => Some(false),
            _ => None,
        })?;
    if done {
        return Ok(());
    }
    let status: Value = qmp.execute("query-migrate", ())?;
    let reason = status.get("error-desc").and_then(Value::as_str).unwrap_or("it gives no reason").to_owned();
    Err(TransferError::Failed { what, reason })
}

/// The pipe out of a QEMU for its device state.
#[derive(Debug)]
pub enum Tap {
    /// `xen-save-devices-state`: only devices.
    Devices(Fifo),
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
    fn make(path: PathBuf) -> io::Result<Self> {
        // A pipe of an interrupted attempt may still exist.
        let _ = fs::remove_file(&path);
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        let reader = open(&path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?;
        let writer = open(&path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        let _ = fcntl_setpipe_size(&writer, PIPE);
        Ok(Self { path, reader: PipeReader::from(reader), _writer: writer })
    }
}

impl Drop for Fifo {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl Tap {
    /// Prepares to save with `xen-save-devices-state`.
    ///
    /// # Errors
    /// When no pipe can be made in the QEMU's directory.
    pub fn devices(directory: &Directory) -> Result<Self, TransferError> {
        Fifo::make(directory.0.join("state.fifo")).map(Self::Devices).map_err(TransferError::Pipe)
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
        let _ = fcntl_setpipe_size(&writer, PIPE);
        qmp.execute_with_fd::<Value>("getfd", json!({ "fdname": FD_NAME }), writer.as_fd())?;
        ioctl_fionbio(&reader, true).map_err(|e| TransferError::Pipe(e.into()))?;
        Ok(Self::Migration(reader))
    }

    /// Sends the first part of the save command ahead, on a connection that is used for nothing else.
    ///
    /// # Errors
    /// When QEMU has closed the connection.
    pub fn stage(&self, qmp: &mut Qmp) -> Result<(), TransferError> {
        if let Self::Devices(fifo) = self {
            qmp.stage(SAVE_DEVICES, json!({"filename": fifo.path}))?;
        }
        Ok(())
    }

    /// Starts to save. `staged` means that the command was staged. The caller can do other work between this and
    /// [`Tap::drain`].
    ///
    /// # Errors
    /// When QEMU has closed the connection, or rejects the command.
    pub fn begin(&self, qmp: &mut Qmp, staged: bool) -> Result<(), TransferError> {
        match self {
            // `live` is true by default: if the guest was stopped before, QEMU also unlocks its disk images, so that
            // another QEMU can lock them.
            Self::Devices(_) if staged => qmp.fire(SAVE_DEVICES)?,
            Self::Devices(fifo) => qmp.send(SAVE_DEVICES, json!({"filename": fifo.path}), &[])?,
            Self::Migration(_) => {
                qmp.drop_events();
                qmp.execute::<Value>("migrate", json!({ "uri": format!("fd:{FD_NAME}") }))?;
            }
        }
        Ok(())
    }

    /// Reads the state while it arrives and passes each part to `take`, until QEMU reports that it is complete.
    ///
    /// # Errors
    /// When QEMU has ended or fails, the state exceeds the limit, or `take` returns an error.
    pub fn drain(
        mut self,
        qmp: &mut Qmp,
        mut take: impl FnMut(&[u8]) -> Result<(), TransferError>,
    ) -> Result<(), TransferError> {
        let mut left = MOST_STATE;
        let mut take = |part: &[u8]| {
            left = left.checked_sub(part.len() as u64).ok_or(TransferError::TooLong)?;
            take(part)
        };
        let mut buffer = vec![0; PIPE];
        let deadline = Instant::now() + PATIENCE;
        match &mut self {
            Self::Devices(Fifo { reader: pipe, .. }) => {
                // The reply is the end mark: all that QEMU wrote before it is in the pipe.
                loop {
                    let replied = qmp.try_reply::<Value>(SAVE_DEVICES)?.is_some();
                    while let Some(part) = read_some(pipe, &mut buffer)? {
                        if part.is_empty() {
                            break;
                        }
                        take(part)?;
                    }
                    if replied {
                        break;
                    }
                    if Instant::now() > deadline {
                        return Err(TransferError::Stuck);
                    }
                    let limit = Timespec { tv_sec: 1, tv_nsec: 0 };
                    let mut fds = [PollFd::new(pipe, PollFlags::IN), PollFd::new(qmp, PollFlags::IN)];
                    match poll(&mut fds, Some(&limit)) {
                        Ok(_) | Err(Errno::INTR) => {}
                        Err(e) => return Err(TransferError::Pipe(e.into())),
                    }
                }
            }
            Self::Migration(pipe) => {
                loop {
                    match read_some(pipe, &mut buffer)? {
                        Some([]) => break,
                        Some(part) => take(part)?,
                        None if Instant::now() > deadline => return Err(TransferError::Stuck),
                        None => wait(&*pipe, PollFlags::IN)?,
                    }
                }
                wait_saved(qmp, PATIENCE)?;
            }
        }
        Ok(())
    }
}

/// Returns the next part from the pipe: `None` if there is nothing now, empty at the end.
fn read_some<'a>(pipe: &mut PipeReader, buffer: &'a mut [u8]) -> Result<Option<&'a [u8]>, TransferError> {
    loop {
        match pipe.read(buffer) {
            Ok(n) => return Ok(Some(buffer.get(..n).unwrap_or_default())),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(TransferError::Pipe(e)),
        }
    }
}
