//! The device state of a stopped guest, without its RAM, saved into memory of this process.
//!
//! `xen-save-devices-state` takes a file name. `/dev/fdset/N` is a valid one: a descriptor that QEMU received over
//! its monitor. Therefore no path has to be accessible to QEMU (another user, a chroot, a mount namespace), and
//! nothing of the guest is written to a disk.

use crate::incoming::MAX_DEVICE_STATE_BYTES;
use crate::qmp::{Qmp, QmpError};
use crate::stream::{self, StreamError};
use rekindle_kernel::process::Process;
use rustix::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use rustix::fs::{MemfdFlags, Mode, OFlags, SeekFrom, memfd_create, open, seek};
use serde::Deserialize;
use serde_json::{Value, json};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The command that saves devices without RAM. QEMU for x86 has it, even without Xen.
pub const SAVE_DEVICES: &str = "xen-save-devices-state";

/// Why a device state could not be saved.
#[derive(Debug, thiserror::Error)]
pub enum DeviceStateError {
    #[error(
        "QEMU {version} has no `{SAVE_DEVICES}`: it is built for another architecture than x86, or with Xen left out"
    )]
    NoCommand { version: String },
    /// QEMU returns an error or does not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error("cannot take the device state into memory")]
    Memory(#[source] io::Error),
    #[error("cannot take the device state through a pipe")]
    Pipe(#[source] io::Error),
    #[error(
        "QEMU has saved {saved} bytes of device state, which fit into the pipe of {capacity} bytes: the guest may have run \
         before the pipe was read"
    )]
    NotHeld { saved: usize, capacity: usize },
    /// QEMU's output is not a valid device state.
    #[error(transparent)]
    Stream(#[from] StreamError),
}

/// A memory file for the device state of one QEMU, used for many saves.
#[derive(Debug)]
pub struct DeviceState {
    /// Descriptor that QEMU writes to. QEMU gets duplicates of it, which share our file position.
    writer: OwnedFd,
    memory: File,
    /// Number of the descriptor set in QEMU.
    set: u64,
    /// Whether QEMU releases the locks of the disk images with each save.
    releases_disks: bool,
}

/// Text by which our descriptors are recognized among those that QEMU received from others.
pub(crate) const DESCRIPTOR_LABEL: &str = "rekindle-devices";
/// First number of our descriptor sets, far from those that QEMU and libvirt choose. The process number is added, so
/// each process has one set. QEMU requires 31 bits.
const FIRST_SET: u64 = 0x7265_0000;

/// QEMU's reply to `add-fd`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct AddedDescriptor {
    pub(crate) fdset_id: u64,
    /// Number of the descriptor in QEMU.
    pub(crate) fd: RawFd,
}

/// Descriptor sets to remove.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DescriptorSets {
    /// Those of this process and of processes that have ended.
    Unused,
    /// Those of pipes. A process that was killed while it opened one has left them.
    Pipes,
    /// Those of all processes.
    All,
}

/// Removes descriptor sets that Rekindle handed to QEMU. Returns the descriptors of all sets, also of other programs: only
/// QEMU may close them, because it closes their numbers when it removes the set.
///
/// QEMU removes a set by itself only when no client is connected to any of its monitors.
///
/// # Errors
/// When QEMU does not answer or returns an error.
pub fn remove_descriptor_sets(qmp: &mut Qmp, which: DescriptorSets) -> Result<Vec<RawFd>, QmpError> {
    #[derive(Deserialize)]
    struct Descriptor {
        fd: RawFd,
        opaque: Option<String>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct DescriptorSet {
        fdset_id: u64,
        fds: Vec<Descriptor>,
    }
    let sets: Vec<DescriptorSet> = qmp.execute("query-fdsets", ())?;
    for set in &sets {
        let is_of_rekindle = set.fds.iter().any(|fd| fd.opaque.as_deref() == Some(DESCRIPTOR_LABEL));
        let owner = set.fdset_id.checked_sub(FIRST_SET).and_then(|pid| u32::try_from(pid).ok());
        let is_wanted = match which {
            DescriptorSets::Unused => owner.is_none_or(|pid| pid == std::process::id() || Process::of(pid).is_err()),
            // QEMU has chosen the number.
            DescriptorSets::Pipes => owner.is_none(),
            DescriptorSets::All => true,
        };
        if is_of_rekindle && is_wanted {
            match qmp.execute::<Value>("remove-fd", json!({"fdset-id": set.fdset_id})) {
                // QEMU removed it in the meantime.
                Err(QmpError::Refused { .. }) => {}
                other => drop(other?),
            }
        }
    }
    Ok(sets.iter().flat_map(|set| &set.fds).map(|descriptor| descriptor.fd).collect())
}

impl DeviceState {
    /// Makes the memory file and hands it to QEMU, which keeps it until [`remove_descriptor_sets`].
    ///
    /// # Errors
    /// [`DeviceStateError`]; also when QEMU has no command for it.
    pub fn open(qmp: &mut Qmp) -> Result<Self, DeviceStateError> {
        #[derive(Deserialize)]
        struct Command {
            name: String,
        }
        let commands: Vec<Command> = qmp.execute("query-commands", ())?;
        if !commands.iter().any(|command| command.name == SAVE_DEVICES) {
            return Err(DeviceStateError::NoCommand { version: qmp.version().to_string() });
        }
        let failed = |e: rustix::io::Errno| DeviceStateError::Memory(e.into());
        let memory = memfd_create("rekindle-devices", MemfdFlags::CLOEXEC).map_err(failed)?;
        // QEMU requires a descriptor of exactly the access mode that it opens: write-only.
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        let writer = open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
        remove_descriptor_sets(qmp, DescriptorSets::Unused)?;
        let set = json!({"fdset-id": FIRST_SET + u64::from(std::process::id()), "opaque": DESCRIPTOR_LABEL});
        let AddedDescriptor { fdset_id, .. } = qmp.execute_with_fd("add-fd", set, writer.as_fd())?;
        Ok(Self { writer, memory: memory.into(), set: fdset_id, releases_disks: false })
    }

    /// Makes QEMU release its disk images with a save, so that another QEMU can lock them. A `cont` takes them back. The
    /// guest must have been stopped before the save.
    #[must_use]
    pub fn releasing_disks(self) -> Self {
        Self { releases_disks: true, ..self }
    }

    /// Sends the first part of the command ahead, on a connection that is used for nothing else until
    /// [`DeviceState::begin_staged`].
    ///
    /// # Errors
    /// When QEMU has closed the connection.
    pub fn stage(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        qmp.stage(SAVE_DEVICES, self.arguments())
    }

    /// `live: false` keeps the disks active. `live: true` deactivates them if the guest was stopped before.
    fn arguments(&self) -> Value {
        json!({"filename": format!("/dev/fdset/{}", self.set), "live": self.releases_disks})
    }

    /// Starts to save; the guest must be stopped. The caller can do other work until [`DeviceState::wait`].
    ///
    /// # Errors
    /// When QEMU has closed the connection, or the memory file cannot be rewound.
    pub fn begin(&self, qmp: &mut Qmp) -> Result<(), DeviceStateError> {
        self.rewind()?;
        Ok(qmp.send(SAVE_DEVICES, self.arguments(), &[])?)
    }

    /// Starts to save like [`DeviceState::begin`], by the command that [`DeviceState::stage`] has sent ahead.
    ///
    /// # Errors
    /// As for [`DeviceState::begin`].
    pub fn begin_staged(&self, qmp: &mut Qmp) -> Result<(), DeviceStateError> {
        self.rewind()?;
        Ok(qmp.fire(SAVE_DEVICES)?)
    }

    fn rewind(&self) -> Result<(), DeviceStateError> {
        seek(&self.writer, SeekFrom::Start(0)).map(drop).map_err(|e| DeviceStateError::Memory(e.into()))
    }

    /// Waits until QEMU has saved the state, which [`DeviceState::take`] then returns.
    ///
    /// # Errors
    /// [`DeviceStateError::Qmp`] when QEMU could not save.
    pub fn wait(&self, qmp: &mut Qmp) -> Result<(), DeviceStateError> {
        Ok(qmp.reply::<Value>(SAVE_DEVICES).map(drop)?)
    }

    /// Returns the saved state after checking that it is complete: a stream for `-incoming`.
    ///
    /// # Errors
    /// [`DeviceStateError::Stream`] when it is incomplete, and [`DeviceStateError::Memory`] when it is too large.
    pub fn take(&self) -> Result<Vec<u8>, DeviceStateError> {
        let length = self.memory.metadata().map_err(DeviceStateError::Memory)?.len();
        if length > MAX_DEVICE_STATE_BYTES {
            let why = format!("QEMU has written {length} bytes of device state, more than {MAX_DEVICE_STATE_BYTES}");
            return Err(DeviceStateError::Memory(io::Error::new(io::ErrorKind::InvalidData, why)));
        }
        let mut state = vec![0; usize::try_from(length).unwrap_or_default()];
        self.memory.read_exact_at(&mut state, 0).map_err(DeviceStateError::Memory)?;
        stream::check(&state)?;
        Ok(state)
    }
}
