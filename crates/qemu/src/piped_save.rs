//! A pause by a single command: QEMU stops its guest, saves the devices into a pipe, and resumes the guest.
//!
//! `xen-save-devices-state` stops a guest that runs, and resumes it at its end. The pipe is smaller than the state, so QEMU
//! waits within the command until the pipe is read:
//!
//! ```text
//!  QEMU          stop ──> save ──> (the pipe is full) ────────────────> save the rest ──> resume
//!  this process               first byte ──> the work of the pause ──> read the pipe
//! ```
//!
//! No other command passes while the guest is stopped: a slow monitor does not lengthen the pause. QEMU serves no monitor
//! meanwhile, so no other client can resume the guest. If this process ends, QEMU cannot write to the pipe, and resumes
//! the guest by itself.
//!
//! QEMU truncates a descriptor that it is handed as `/dev/fdset/N`, which a pipe does not allow. It opens
//! `/proc/self/fd/N` instead. If QEMU used this number for another file, the command would truncate that file. Therefore the
//! descriptor is put at a number that QEMU does not reach: the system chooses the lowest free one. Each pipe has another
//! number, so that a command that arrives late does not find the next pipe.
//!
//! ```text
//!  PipedSave::offer    add-fd      the pipe is in a descriptor set: QEMU owns its number
//!  OfferedPipe::place  dup3        the pipe has a second number, which QEMU does not know
//!                      remove-fd   the set is removed, and the first number closed
//! ```
//!
//! A process that is killed before `remove-fd` leaves the set. Its number is closed by removing the set only: closed
//! otherwise, the number would be that of the next file that QEMU opens, and QEMU would close that with the set.

use crate::devices::{
    AddedDescriptor, DESCRIPTOR_LABEL, DescriptorSets, DeviceStateError, SAVE_DEVICES, remove_descriptor_sets,
};
use crate::incoming::MAX_DEVICE_STATE_BYTES;
use crate::qmp::{Event, Qmp, QmpError};
use crate::stream;
use rekindle_kernel::descriptor;
use rekindle_kernel::inject::Injector;
use rekindle_kernel::process::Process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, RawFd};
use rustix::fs::{FileType, Mode, fchmod, fstat, stat};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::pipe::fcntl_setpipe_size;
use serde_json::{Value, json};
use std::fs;
use std::io::{self, PipeReader, Read, pipe};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Size of the smallest pipe.
const PAGE_BYTES: usize = 4096;
/// Highest number of a descriptor in QEMU. The kernel keeps a table of all numbers below.
const MAX_NUMBER: RawFd = 4095;
/// Mode of the pipe: QEMU opens it again, as its own user. Other pipes have 0600, so ours are recognized by it. Only a
/// process that may trace QEMU can reach the pipe.
const PIPE_MODE: Mode = Mode::from_bits_retain(0o622);
/// How many numbers are for these descriptors.
const NUMBERS: RawFd = 512;
/// Limit for QEMU to stop its guest, and to save and resume after the pipe was read. libvirt waits up to 30 s for a command
/// of another client to end.
const SAVE_TIMEOUT: Duration = Duration::from_secs(40);
/// How long to wait for output or a reply before the deadline is checked again.
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// A pipe into which a QEMU saves its devices.
#[derive(Debug)]
pub struct PipedSave {
    reader: PipeReader,
    injector: Injector,
    /// Number of the descriptor in QEMU.
    number: RawFd,
    /// Limit of the bytes in the pipe.
    capacity: usize,
    /// Size of an earlier state.
    state_bytes: usize,
}

/// A saved state, and when the guest was stopped and resumed for it, in µs since 1970.
#[derive(Debug)]
pub struct SavedInPause {
    pub devices: Vec<u8>,
    pub stopped_host_us: u64,
    pub resumed_host_us: u64,
}

/// A pipe that QEMU has in a descriptor set, where no save can use it.
#[derive(Debug)]
pub struct OfferedPipe {
    save: PipedSave,
    set: AddedDescriptor,
}

impl OfferedPipe {
    /// Puts the descriptor at its number, and removes the set.
    ///
    /// # Errors
    /// When QEMU does not answer or cannot be traced.
    pub fn place(self, qmp: &mut Qmp) -> Result<PipedSave, DeviceStateError> {
        let Self { save, set: AddedDescriptor { fdset_id, fd } } = self;
        let replaced = descriptor::replace(save.injector, &[(fd, save.number)]);
        qmp.execute::<Value>("remove-fd", json!({ "fdset-id": fdset_id }))?;
        replaced.map_err(DeviceStateError::Pipe)?;
        Ok(save)
    }
}

impl PipedSave {
    /// Makes the pipe and hands it to QEMU; [`OfferedPipe::place`] must follow. QEMU has it until [`PipedSave::close`].
    /// `state_bytes` is the size of an earlier state. Returns `None` if QEMU cannot have such a descriptor, or the state is
    /// too small.
    ///
    /// # Errors
    /// When QEMU does not answer or cannot be traced.
    pub fn offer(
        qmp: &mut Qmp,
        injector: Injector,
        state_bytes: usize,
    ) -> Result<Option<OfferedPipe>, DeviceStateError> {
        close_leftovers(qmp, injector)?;
        let Some(number) = unreached_number(injector.process()) else { return Ok(None) };
        let (reader, writer) = pipe().map_err(DeviceStateError::Pipe)?;
        let failed = |e: Errno| DeviceStateError::Pipe(e.into());
        let Some(capacity) = largest_capacity(state_bytes) else { return Ok(None) };
        let capacity = fcntl_setpipe_size(&writer, capacity).map_err(failed)?;
        ioctl_fionbio(&reader, true).map_err(failed)?;
        fchmod(&writer, PIPE_MODE).map_err(failed)?;
        let set = qmp.execute_with_fd("add-fd", json!({ "opaque": DESCRIPTOR_LABEL }), writer.as_fd())?;
        Ok(Some(OfferedPipe { save: Self { reader, injector, number, capacity, state_bytes }, set }))
    }

    /// Makes the empty pipe smaller if it is too large for a state of `state_bytes`.
    fn shrink(&mut self, state_bytes: usize) -> Result<(), DeviceStateError> {
        if let Some(capacity) = largest_capacity(state_bytes).filter(|capacity| *capacity < self.capacity) {
            let set = fcntl_setpipe_size(&self.reader, capacity);
            self.capacity = set.map_err(|e| DeviceStateError::Pipe(e.into()))?;
        }
        Ok(())
    }

    /// Returns the injector of the QEMU.
    #[must_use]
    pub fn injector(&self) -> Injector {
        self.injector
    }

    /// Sends the command to a QEMU whose guest runs, and waits until QEMU has stopped the guest, completed its I/O, and
    /// writes to the pipe.
    ///
    /// # Errors
    /// [`QmpError::Refused`] when QEMU cannot open the pipe. After each error QEMU resumes the guest by itself.
    pub fn begin(self, qmp: &mut Qmp) -> Result<HeldSave, DeviceStateError> {
        let ours = fstat(&self.reader).map_err(|e| DeviceStateError::Pipe(e.into()))?;
        let theirs = stat(path_in(self.injector.process(), self.number));
        let theirs = theirs.map_err(|e| DeviceStateError::Pipe(e.into()))?;
        if (ours.st_dev, ours.st_ino) != (theirs.st_dev, theirs.st_ino) {
            return Err(DeviceStateError::Pipe(io::Error::other("QEMU has another file at the pipe's descriptor")));
        }
        // Otherwise the first byte does not prove that the guest is stopped.
        if !matches!((&self.reader).read(&mut [0]), Err(e) if e.kind() == io::ErrorKind::WouldBlock) {
            return Err(DeviceStateError::Pipe(io::Error::other("QEMU has written to the pipe too early")));
        }
        qmp.drop_events();
        let arguments = json!({"filename": format!("/proc/self/fd/{}", self.number), "live": false});
        qmp.send(SAVE_DEVICES, arguments, &[])?;
        let mut held = HeldSave { pipe: self, has_replied: false };
        match held.wait_output(qmp) {
            Ok(()) => Ok(held),
            Err(e) => Err(held.abandon(qmp, e)),
        }
    }

    /// Closes the descriptor in QEMU.
    ///
    /// # Errors
    /// When QEMU does not answer or cannot be traced.
    pub fn close(self, qmp: &mut Qmp) -> Result<(), DeviceStateError> {
        close_leftovers(qmp, self.injector)
    }
}

/// A save that waits until the pipe is read: the guest is stopped.
#[derive(Debug)]
pub struct HeldSave {
    pipe: PipedSave,
    has_replied: bool,
}

impl HeldSave {
    /// Waits for the first output.
    fn wait_output(&mut self, qmp: &mut Qmp) -> Result<(), DeviceStateError> {
        let deadline = Instant::now() + SAVE_TIMEOUT;
        loop {
            let state = self.wait_ready(qmp, deadline)?;
            if state.contains(PollFlags::IN) {
                return Ok(());
            }
            if self.take_reply(qmp)? {
                return Err(self.not_held(0));
            }
            if state.contains(PollFlags::HUP) {
                return Err(DeviceStateError::Pipe(io::ErrorKind::BrokenPipe.into()));
            }
        }
    }

    /// Reads the state, whereupon QEMU resumes the guest. The saved state is `None` if QEMU has not stopped and resumed the
    /// guest: another client had stopped it before.
    ///
    /// # Errors
    /// QEMU resumes the guest by itself. [`DeviceStateError::NotHeld`] if the guest may have run before the pipe was read.
    pub fn finish(mut self, qmp: &mut Qmp) -> Result<(PipedSave, Option<SavedInPause>), DeviceStateError> {
        match self.read(qmp) {
            Ok(saved) => Ok((self.pipe, saved)),
            Err(e) => Err(self.abandon(qmp, e)),
        }
    }

    fn read(&mut self, qmp: &mut Qmp) -> Result<Option<SavedInPause>, DeviceStateError> {
        let deadline = Instant::now() + SAVE_TIMEOUT;
        let mut devices = Vec::with_capacity(2 * self.pipe.state_bytes);
        loop {
            // All that QEMU has written before its reply is in the pipe when the reply arrives.
            let has_replied = self.take_reply(qmp)?;
            self.read_available(&mut devices)?;
            if has_replied {
                break;
            }
            self.wait_ready(qmp, deadline)?;
        }
        if devices.len() <= self.pipe.capacity {
            return Err(self.not_held(devices.len()));
        }
        stream::check(&devices)?;
        self.pipe.shrink(devices.len())?;
        let times = last_pause(qmp.kept_events());
        Ok(times.map(|(stopped_host_us, resumed_host_us)| SavedInPause { devices, stopped_host_us, resumed_host_us }))
    }

    fn read_available(&self, devices: &mut Vec<u8>) -> Result<(), DeviceStateError> {
        let limit = MAX_DEVICE_STATE_BYTES + 1 - devices.len() as u64;
        match (&self.pipe.reader).take(limit).read_to_end(devices) {
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(DeviceStateError::Pipe(e)),
            _ => {}
        }
        if devices.len() as u64 > MAX_DEVICE_STATE_BYTES {
            return Err(DeviceStateError::Pipe(io::ErrorKind::FileTooLarge.into()));
        }
        Ok(())
    }

    /// Waits for output or a reply. Returns the state of the pipe.
    fn wait_ready(&self, qmp: &Qmp, deadline: Instant) -> Result<PollFlags, DeviceStateError> {
        if Instant::now() > deadline {
            return Err(QmpError::Timeout { during: SAVE_DEVICES.into(), after: SAVE_TIMEOUT }.into());
        }
        let mut fds = [PollFd::new(&self.pipe.reader, PollFlags::IN), PollFd::new(qmp, PollFlags::IN)];
        match poll(&mut fds, Some(&POLL_INTERVAL)) {
            Ok(_) => Ok(fds[0].revents()),
            Err(Errno::INTR) => Ok(PollFlags::empty()),
            Err(e) => Err(DeviceStateError::Pipe(e.into())),
        }
    }

    /// Returns whether the reply has arrived.
    fn take_reply(&mut self, qmp: &mut Qmp) -> Result<bool, QmpError> {
        let reply = qmp.try_reply::<Value>(SAVE_DEVICES);
        self.has_replied = !matches!(reply, Ok(None));
        Ok(reply?.is_some())
    }

    fn not_held(&self, saved: usize) -> DeviceStateError {
        DeviceStateError::NotHeld { saved, capacity: self.pipe.capacity }
    }

    /// Closes the pipe after the failure `e`, so that QEMU cannot write to it and resumes the guest, and waits for the
    /// reply.
    fn abandon(self, qmp: &mut Qmp, e: DeviceStateError) -> DeviceStateError {
        let Self { pipe, has_replied, .. } = self;
        drop(pipe);
        if !has_replied && let Err(e) = qmp.reply::<Value>(SAVE_DEVICES) {
            tracing::debug!("a save was abandoned: {e}");
        }
        e
    }
}

/// Returns when the guest was stopped and resumed last, if it runs after these events. The events are in QEMU's order. Their
/// times are not compared: the host's clock may have been set.
fn last_pause<'a>(events: impl Iterator<Item = &'a Event>) -> Option<(u64, u64)> {
    let (mut stopped_host_us, mut pause) = (None, None);
    for event in events {
        match event.name.as_str() {
            "STOP" => (stopped_host_us, pause) = (Some(event.host_us), None),
            "RESUME" => pause = stopped_host_us.take().map(|stopped| (stopped, event.host_us)),
            _ => {}
        }
    }
    pause
}

/// Closes the descriptors of [`PipedSave`]s in QEMU, also of processes that were killed. QEMU itself does not close the
/// descriptor of a save that has failed.
///
/// # Errors
/// When QEMU does not answer or cannot be traced.
pub fn close_leftovers(qmp: &mut Qmp, injector: Injector) -> Result<(), DeviceStateError> {
    let process = injector.process();
    let close =
        |number: &RawFd| descriptor::close(injector, *number).map_err(|e| DeviceStateError::Pipe(io::Error::other(e)));
    let failed = DeviceStateError::Pipe;
    let is_for_open = |number: &RawFd| numbers(process).is_some_and(|numbers| numbers.contains(number));
    our_pipes(process).map_err(failed)?.iter().filter(|number| is_for_open(number)).try_for_each(close)?;
    // No save can start any more. When QEMU replies, none is in progress, in which QEMU still uses its descriptor.
    let in_sets = remove_descriptor_sets(qmp, DescriptorSets::Pipes)?;
    our_pipes(process).map_err(failed)?.iter().filter(|number| !in_sets.contains(number)).try_for_each(close)
}

/// Returns the numbers of our pipes in QEMU.
fn our_pipes(process: Process) -> io::Result<Vec<RawFd>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(format!("/proc/{}/fd", process.pid))? {
        let Some(number) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // A descriptor may be closed meanwhile.
        let Ok(stat) = stat(path_in(process, number)) else { continue };
        if FileType::from_raw_mode(stat.st_mode) == FileType::Fifo && Mode::from_raw_mode(stat.st_mode) == PIPE_MODE {
            numbers.push(number);
        }
    }
    Ok(numbers)
}

/// Returns the number for a new descriptor; `None` if QEMU has so many descriptors that it might reach the number, or has
/// something else there.
fn unreached_number(process: Process) -> Option<RawFd> {
    let numbers = numbers(process)?;
    let count = RawFd::try_from(fs::read_dir(format!("/proc/{}/fd", process.pid)).ok()?.count()).ok()?;
    let is_unreached = count.checked_mul(2)? < *numbers.start();
    // A command that was sent for an earlier pipe, and is late, must not find this one.
    let milliseconds = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_millis() % NUMBERS as u128;
    let number = numbers.start() + RawFd::try_from(milliseconds).ok()?;
    let is_free = fs::symlink_metadata(path_in(process, number)).is_err();
    (is_unreached && is_free).then_some(number)
}

/// Returns the numbers that are for these descriptors: the highest ones that QEMU may use, at most [`MAX_NUMBER`].
fn numbers(process: Process) -> Option<RangeInclusive<RawFd>> {
    let limits = fs::read_to_string(format!("/proc/{}/limits", process.pid)).ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let limit: RawFd = match line.split_whitespace().next()? {
        "unlimited" => RawFd::MAX,
        limit => limit.parse().unwrap_or(RawFd::MAX),
    };
    let highest = limit.saturating_sub(1).min(MAX_NUMBER);
    Some(highest - (NUMBERS - 1)..=highest)
}

fn path_in(process: Process, number: RawFd) -> PathBuf {
    PathBuf::from(format!("/proc/{}/fd/{number}", process.pid))
}

/// Returns the size of the largest pipe into which a state of `state_bytes`, or one that is a quarter smaller, does not
/// fit. `None` if there is none.
fn largest_capacity(state_bytes: usize) -> Option<usize> {
    let limit = state_bytes / 4 * 3;
    std::iter::successors(Some(PAGE_BYTES), |capacity| capacity.checked_mul(2))
        .take_while(|capacity| *capacity <= limit)
        .last()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_is_smaller_than_a_state_that_is_a_quarter_smaller() {
        let capacities = [0, 4096, 5464, 10_920, 10_924, 100_000].map(largest_capacity);
        assert_eq!(capacities, [None, None, Some(4096), Some(4096), Some(8192), Some(65536)]);
    }

    #[test]
    fn the_last_pause_is_found_by_the_order_of_events_whatever_their_times() {
        const YEAR_US: u64 = 365 * 86_400 * 1_000_000;
        let now = 1_800_000_000_000_000;
        let events = |events: &[(&str, u64)]| {
            let event =
                |(name, host_us): &(&str, u64)| Event { name: (*name).into(), data: Value::Null, host_us: *host_us };
            events.iter().map(event).collect::<Vec<_>>()
        };
        for (given, expected) in [
            (&[("STOP", now), ("RESUME", now + 1)][..], Some((now, now + 1))),
            // The host's clock was set during the pause.
            (&[("STOP", now), ("RESUME", now - YEAR_US)], Some((now, now - YEAR_US))),
            (&[("STOP", now), ("RESUME", now + YEAR_US)], Some((now, now + YEAR_US))),
            // Another client has stopped the guest, or stops and resumes it before.
            (&[("STOP", now)], None),
            (&[("STOP", 1), ("RESUME", 2), ("STOP", 3)], None),
            (&[("STOP", 1), ("RESUME", 2), ("STOP", 3), ("NIC_RX_FILTER_CHANGED", 4), ("RESUME", 5)], Some((3, 5))),
            (&[("RESUME", 1)], None),
        ] {
            assert_eq!(last_pause(events(given).iter()), expected, "{given:?}");
        }
    }
}
