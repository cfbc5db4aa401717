//! The device state of a stopped guest, without its RAM, into memory of ours.
//!
//! `xen-save-devices-state` takes a file name. `/dev/fdset/N` is one: a descriptor that QEMU was handed over its
//! monitor. So nothing has to be at a path that QEMU may open (another user, a chroot, a mount namespace), and
//! nothing of the guest is on a disk.

use crate::incoming::MOST_DEVICES;
use crate::qmp::{Qmp, QmpError};
use crate::stream::{self, StreamError};
use crate::transfer::SAVE_DEVICES;
use rekindle_kernel::process::Process;
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{MemfdFlags, Mode, OFlags, SeekFrom, memfd_create, open, seek};
use serde::Deserialize;
use serde_json::{Value, json};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Why there is no device state.
#[derive(Debug, thiserror::Error)]
pub enum DeviceStateError {
    /// QEMU does not have the command.
    #[error(
        "QEMU {version} has no `{SAVE_DEVICES}`: it is built for another architecture than x86, or with Xen left out"
    )]
    NoCommand {
        /// Its version.
        version: String,
    },
    /// QEMU refuses.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// Memory of ours fails.
    #[error("cannot take the device state into memory")]
    Memory(#[source] io::Error),
    /// What QEMU wrote is no device state.
    #[error(transparent)]
    Stream(#[from] StreamError),
}

/// A place for the device state of one QEMU, to be used again and again.
#[derive(Debug)]
pub struct DeviceState {
    /// What QEMU writes to: it gets duplicates, which share our position.
    writer: OwnedFd,
    memory: File,
    set: u64,
}

/// How the descriptors are known among others that QEMU was handed.
const OPAQUE: &str = "rekindle-devices";
/// Where our numbers of sets begin: far from those that QEMU and libvirt choose by themselves. One for each process;
/// QEMU wants 31 bits.
const FIRST_SET: u64 = 0x7265_0000;

/// Takes back what [`DeviceState::open`] handed to QEMU, here or in a process of ours that has ended; `all`: in any.
///
/// QEMU drops it by itself only when no client is connected to any of its monitors.
///
/// # Errors
/// When QEMU does not answer.
pub fn sweep(qmp: &mut Qmp, all: bool) -> Result<(), QmpError> {
    #[derive(Deserialize)]
    struct Descriptor {
        opaque: Option<String>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Set {
        fdset_id: u64,
        fds: Vec<Descriptor>,
    }
    let sets: Vec<Set> = qmp.execute("query-fdsets", ())?;
    for set in sets {
        let ours = set.fds.iter().any(|fd| fd.opaque.as_deref() == Some(OPAQUE));
        let owner = set.fdset_id.checked_sub(FIRST_SET).and_then(|pid| u32::try_from(pid).ok());
        let left = owner.is_none_or(|pid| pid == std::process::id() || Process::of(pid).is_err());
        if ours && (all || left) {
            match qmp.execute::<Value>("remove-fd", json!({"fdset-id": set.fdset_id})) {
                // Gone in between.
                Err(QmpError::Refused { .. }) => {}
                other => drop(other?),
            }
        }
    }
    Ok(())
}

impl DeviceState {
    /// Hands QEMU the place. It has it until [`sweep`].
    ///
    /// # Errors
    /// [`DeviceStateError`].
    pub fn open(qmp: &mut Qmp) -> Result<Self, DeviceStateError> {
        #[derive(Deserialize)]
        struct Command {
            name: String,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Added {
            fdset_id: u64,
        }
        let commands: Vec<Command> = qmp.execute("query-commands", ())?;
        if !commands.iter().any(|command| command.name == SAVE_DEVICES) {
            return Err(DeviceStateError::NoCommand { version: qmp.version().to_string() });
        }
        let failed = |e: rustix::io::Errno| DeviceStateError::Memory(e.into());
        let memory = memfd_create("rekindle-devices", MemfdFlags::CLOEXEC).map_err(failed)?;
        // QEMU wants a descriptor of exactly the kind that it opens: one that can only be written.
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        let writer = open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
        sweep(qmp, false)?;
        let set = json!({"fdset-id": FIRST_SET + u64::from(std::process::id()), "opaque": OPAQUE});
        let Added { fdset_id } = qmp.execute_with_fd("add-fd", set, writer.as_fd())?;
        Ok(Self { writer, memory: memory.into(), set: fdset_id })
    }

    /// Sends ahead what can be sent of the command, on a connection that has nothing else to do until
    /// [`DeviceState::begin`].
    ///
    /// # Errors
    /// When QEMU has gone.
    pub fn stage(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        qmp.stage(SAVE_DEVICES, self.arguments())
    }

    /// `live: false`: the disks stay active.
    fn arguments(&self) -> Value {
        json!({"filename": format!("/dev/fdset/{}", self.set), "live": false})
    }

    /// Begins to save with the guest stopped; the command was staged if `staged`. Other work can be done meanwhile.
    ///
    /// # Errors
    /// When QEMU has gone.
    pub fn begin(&self, qmp: &mut Qmp, staged: bool) -> Result<(), DeviceStateError> {
        seek(&self.writer, SeekFrom::Start(0)).map_err(|e| DeviceStateError::Memory(e.into()))?;
        if staged {
            qmp.fire(SAVE_DEVICES)?
        } else {
            qmp.send(SAVE_DEVICES, self.arguments(), &[])?
        }
        Ok(())
    }

    /// Waits until QEMU has saved. What it wrote is then for [`DeviceState::take`].
    ///
    /// # Errors
    /// [`DeviceStateError::Qmp`] when it failed.
    pub fn wait(&self, qmp: &mut Qmp) -> Result<(), DeviceStateError> {
        Ok(qmp.reply::<Value>(SAVE_DEVICES).map(drop)?)
    }

    /// The state that was saved, checked to be whole: a stream for `-incoming`.
    ///
    /// # Errors
    /// [`DeviceStateError::Stream`] when it is not.
    pub fn take(&self) -> Result<Vec<u8>, DeviceStateError> {
        let length = self.memory.metadata().map_err(DeviceStateError::Memory)?.len();
        if length > MOST_DEVICES {
            let why = format!("QEMU has written {length} bytes of device state, more than {MOST_DEVICES}");
            return Err(DeviceStateError::Memory(io::Error::new(io::ErrorKind::InvalidData, why)));
        }
        let mut state = vec![0; usize::try_from(length).unwrap_or_default()];
        self.memory.read_exact_at(&mut state, 0).map_err(DeviceStateError::Memory)?;
        stream::check(&state)?;
        Ok(state)
    }
}
