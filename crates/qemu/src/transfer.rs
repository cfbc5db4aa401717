//! A stream out of one QEMU and into another.
//!
//! Both ends are pipes with this process in the middle: it sees every byte, so that it can keep the stream as well,
//! and it never waits for a QEMU that does not move.

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

/// How long QEMU may take to read the next part of a state, or to write all of its device state.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes that a state may have: devices, and RAM that is not shared, as that of graphics cards.
const MOST_STATE: u64 = 1 << 30;
/// Bytes that fit into a pipe: several times a device state.
const PIPE: usize = 1 << 20;
/// The command that saves devices without RAM. Built into QEMU for x86 also without Xen.
pub const SAVE_DEVICES: &str = "xen-save-devices-state";
/// Name by which a QEMU knows the descriptor that it is given.
const FD_NAME: &str = "rekindle";

/// Why a stream did not get through.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// QEMU refused something.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The pipe failed; a broken one means that the QEMU at its other end has ended or cancelled.
    #[error("the pipe to QEMU failed")]
    Pipe(#[source] io::Error),
    /// The QEMU at the other end does not move.
    #[error("QEMU has not read or written the guest's state within {} s", PATIENCE.as_secs())]
    Stuck,
    /// It is longer than any state is.
    #[error("QEMU has sent more than {} MiB as the state of its devices", MOST_STATE >> 20)]
    TooLong,
    /// QEMU reports that the transfer failed.
    #[error("QEMU could not {what} the state: {reason}")]
    Failed {
        /// `save` or `load`.
        what: &'static str,
        /// QEMU's words.
        reason: String,
    },
}

/// Migration capabilities to switch, with what they shall be.
pub type Capabilities<'a> = &'a [(&'a str, bool)];

/// Sets migration capabilities.
///
/// # Errors
/// When QEMU does not know one.
pub fn set_capabilities(qmp: &mut Qmp, capabilities: Capabilities<'_>) -> Result<(), QmpError> {
    let list: Vec<_> = capabilities.iter().map(|(name, on)| json!({"capability": name, "state": on})).collect();
    qmp.execute::<Value>("migrate-set-capabilities", json!({"capabilities": list})).map(drop)
}

/// Has QEMU write all of its state to `file`, which must be open for writing only, or read it from one that is open
/// for reading only. QEMU since 9.0 has a transport for files, and since 11.0 the one for descriptors rejects files.
fn through_file(qmp: &mut Qmp, command: &str, file: &File) -> Result<(), QmpError> {
    #[derive(Deserialize)]
    struct Added {
        #[serde(rename = "fdset-id")]
        set: u64,
    }
    let capabilities: Vec<Value> = qmp.execute("query-migrate-capabilities", ())?;
    // A capability of the transport for files alone.
    if !capabilities.iter().any(|one| one["capability"] == "mapped-ram") {
        qmp.execute_with_fd::<Value>("getfd", json!({ "fdname": FD_NAME }), file.as_fd())?;
        return qmp.execute::<Value>(command, json!({ "uri": format!("fd:{FD_NAME}") })).map(drop);
    }
    let Added { set } = qmp.execute_with_fd("add-fd", json!({}), file.as_fd())?;
    let started = qmp.execute::<Value>(command, json!({ "uri": format!("file:/dev/fdset/{set}") }));
    // QEMU has opened it by now, or has failed to.
    qmp.execute::<Value>("remove-fd", json!({ "fdset-id": set }))?;
    started.map(drop)
}

/// Saves all of a stopped guest, RAM and devices, to `file`, which must be open for writing only, and waits until
/// that is done.
///
/// # Errors
/// [`TransferError`].
pub fn save_to_file(qmp: &mut Qmp, file: &File, timeout: Duration) -> Result<(), TransferError> {
    set_capabilities(qmp, &[("events", true), ("x-ignore-shared", false)])?;
    // The guest is stopped: no bandwidth has to be left for it.
    qmp.execute::<Value>("migrate-set-parameters", json!({ "max-bandwidth": i64::MAX }))?;
    qmp.drop_events();
    through_file(qmp, "migrate", file)?;
    wait_saved(qmp, timeout)
}

/// Begins to load what [`save_to_file`] has saved into a QEMU that was started with `-incoming defer`;
/// [`wait_loaded`] waits for the end.
///
/// # Errors
/// [`TransferError`].
pub fn begin_load_from_file(qmp: &mut Qmp, file: &File) -> Result<(), TransferError> {
    set_capabilities(qmp, &[("events", true)])?;
    Ok(through_file(qmp, "migrate-incoming", file)?)
}

/// The way into a QEMU that was started with `-incoming defer`.
#[derive(Debug)]
pub struct Feed {
    pipe: PipeWriter,
}

impl Feed {
    /// Lets the QEMU read its state from a pipe. `capabilities`: those that it has not been given yet.
    ///
    /// On success: it reads, and takes what is written as it comes.
    ///
    /// # Errors
    /// [`TransferError::Qmp`].
    pub fn open(qmp: &mut Qmp, capabilities: Capabilities<'_>) -> Result<Self, TransferError> {
        if !capabilities.is_empty() {
            set_capabilities(qmp, capabilities)?;
        }
        let (reader, writer) = pipe().map_err(TransferError::Pipe)?;
        // A smaller pipe is only slower.
        let _ = fcntl_setpipe_size(&writer, PIPE);
        ioctl_fionbio(&writer, true).map_err(|e| TransferError::Pipe(e.into()))?;
        qmp.execute_with_fd::<Value>("getfd", json!({ "fdname": FD_NAME }), reader.as_fd())?;
        qmp.execute::<Value>("migrate-incoming", json!({ "uri": format!("fd:{FD_NAME}") }))?;
        Ok(Self { pipe: writer })
    }

    /// Writes a part of the stream.
    ///
    /// # Errors
    /// [`TransferError::Pipe`] when the QEMU has gone; [`TransferError::Stuck`].
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

/// Waits until a descriptor is ready.
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
/// [`TransferError::Failed`] with QEMU's words; [`QmpError::Closed`] when it ended, as it does on a bad state.
pub fn wait_loaded(qmp: &mut Qmp, timeout: Duration) -> Result<(), TransferError> {
    wait_migration(qmp, "load", timeout)
}

/// Waits until an outgoing state is written. The QEMU must have the capability `events`.
///
/// # Errors
/// [`TransferError::Failed`] with QEMU's words.
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

/// The way out of a QEMU for its device state.
#[derive(Debug)]
pub enum Tap {
    /// `xen-save-devices-state`: devices only.
    Devices(Fifo),
    /// `migrate` with `x-ignore-shared`: devices, and the RAM blocks that are not shared.
    Migration(PipeReader),
}

/// A pipe with a name: the command takes a file name, and QEMU would truncate a descriptor that it was handed, which
/// a pipe does not allow.
#[derive(Debug)]
pub struct Fifo {
    path: PathBuf,
    reader: PipeReader,
    /// Held so that the reader sees no end before QEMU has opened it.
    _writer: OwnedFd,
}

impl Fifo {
    fn make(path: PathBuf) -> io::Result<Self> {
        // One from an interrupted attempt may still be there.
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
    /// Prepares to save by `xen-save-devices-state`.
    ///
    /// # Errors
    /// When no pipe can be made in the QEMU's directory.
    pub fn devices(directory: &Directory) -> Result<Self, TransferError> {
        Fifo::make(directory.0.join("state.fifo")).map(Self::Devices).map_err(TransferError::Pipe)
    }

    /// Prepares to save by `migrate` with `x-ignore-shared`.
    ///
    /// # Errors
    /// When the QEMU refuses the descriptor or the capability.
    pub fn migration(qmp: &mut Qmp) -> Result<Self, TransferError> {
        set_capabilities(qmp, &[("events", true), ("x-ignore-shared", true)])?;
        // No limit: the guest is stopped meanwhile.
        qmp.execute::<Value>("migrate-set-parameters", json!({ "max-bandwidth": i64::MAX }))?;
        let (reader, writer) = pipe().map_err(TransferError::Pipe)?;
        let _ = fcntl_setpipe_size(&writer, PIPE);
        qmp.execute_with_fd::<Value>("getfd", json!({ "fdname": FD_NAME }), writer.as_fd())?;
        ioctl_fionbio(&reader, true).map_err(|e| TransferError::Pipe(e.into()))?;
        Ok(Self::Migration(reader))
    }

    /// Sends ahead what can be sent of the command to save, on a connection that has nothing else to do.
    ///
    /// # Errors
    /// When QEMU has gone.
    pub fn stage(&self, qmp: &mut Qmp) -> Result<(), TransferError> {
        if let Self::Devices(fifo) = self {
            qmp.stage(SAVE_DEVICES, json!({"filename": fifo.path}))?;
        }
        Ok(())
    }

    /// Begins to save; the command was staged if `staged`. Between this and [`Tap::drain`] QEMU computes; other work
    /// can be done.
    ///
    /// # Errors
    /// When QEMU has gone, or refuses.
    pub fn begin(&self, qmp: &mut Qmp, staged: bool) -> Result<(), TransferError> {
        match self {
            // `live` is true by default: if the guest was stopped before, QEMU also unlocks its disk images, so
            // that another QEMU can lock them.
            Self::Devices(_) if staged => qmp.fire(SAVE_DEVICES)?,
            Self::Devices(fifo) => qmp.send(SAVE_DEVICES, json!({"filename": fifo.path}), &[])?,
            Self::Migration(_) => {
                qmp.drop_events();
                qmp.execute::<Value>("migrate", json!({ "uri": format!("fd:{FD_NAME}") }))?;
            }
        }
        Ok(())
    }

    /// Takes the state as it comes, giving each part to `take`, until QEMU reports that it is complete.
    ///
    /// # Errors
    /// When QEMU has gone or failed, or `take` did.
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
                // The reply is the end mark: what was written before it is in the pipe.
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

/// What is in the pipe: `None` nothing now, empty at its end.
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
