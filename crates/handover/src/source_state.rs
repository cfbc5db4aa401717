//! Saves the state of a source QEMU except the RAM that the destination maps: the devices, and the *small RAM blocks*
//! (firmware, ACPI tables, video memory).
//!
//! The small blocks are sent while the guest still runs, and the pages that have changed since are sent in the pause,
//! if QEMU can save devices alone. Otherwise QEMU writes both in one stream.

use crate::HandoverError;
use crate::saved_state::StreamWriter;
use rekindle_memory::carried::CarriedBlocks;
use rekindle_qemu::devices::SAVE_DEVICES;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::ramblock::RamBlock;
use rekindle_qemu::stream::{self, RamSection};
use rekindle_qemu::transfer::{Feed, StateOutput};
use rekindle_qemu::vmm::Vmm;
use serde_json::Value;
use std::io;
use std::time::Duration;

/// How long to wait for a connection to the source's second monitor: without it, the save is only slower.
const SECOND_MONITOR_TIMEOUT: Duration = Duration::from_millis(100);
/// Initial capacity of the device state's buffer, in bytes: more than an ordinary device state needs.
const DEVICES_CAPACITY_BYTES: usize = 1 << 20;

/// The receivers of the state: the destination if it is connected, and a file if the state must outlive both QEMUs.
#[derive(Debug)]
pub struct StateSink<'a> {
    pub feed: Option<&'a mut Feed>,
    pub file: Option<&'a mut StreamWriter>,
}

impl StateSink<'_> {
    fn write(&mut self, part: &[u8]) -> Result<(), HandoverError> {
        if let Some(feed) = &mut self.feed {
            feed.write(part)?;
        }
        self.file.as_mut().map_or(Ok(()), |file| file.write(part))
    }
}

/// The form of the stream, as the destination expects it, and how the device state gets out of the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamForm {
    /// For QEMUs with Rekindle's command line: started with `send-configuration=off` and `suppress-vmdesc=on`. The
    /// source can open a pipe in its directory.
    Own,
    /// For QEMUs with the command line of another manager, which may also run as another user.
    Foreign {
        /// Name of the machine type with its version, e.g. `pc-q35-10.0`.
        machine: String,
    },
}

/// A save of the source's state in progress.
#[derive(Debug)]
pub struct SourceState {
    source: Vmm,
    output: StateOutput,
    form: StreamForm,
    /// A second monitor connection, on which the save command is staged. `None` if nothing is staged, e.g. because
    /// another client uses that monitor.
    save_qmp: Option<Qmp>,
    blocks: SmallBlocks,
}

/// How the RAM blocks outside the RAM file are saved.
#[derive(Debug)]
enum SmallBlocks {
    /// The blocks are read from the source's memory. `sent`: the content that was sent while the guest ran.
    FromMemory { table: Vec<RamBlock>, sent: CarriedBlocks, section: RamSection },
    /// The blocks were read from the source's memory after the guest had stopped.
    AllSent,
    /// The blocks are part of the stream that the source writes.
    InStream,
}

impl SourceState {
    /// Prepares to save the guest of `source` with the RAM blocks `carried`. Writes these blocks to `sink` while the guest
    /// runs, if this QEMU can save devices alone. A source of [`StreamForm::Foreign`] must be able to do that: otherwise
    /// its stream would contain its private RAM.
    ///
    /// # Errors
    /// [`HandoverError`]; the source is unchanged.
    pub fn prepare(
        source: &Vmm,
        qmp: &mut Qmp,
        carried: Vec<RamBlock>,
        form: StreamForm,
        sink: &mut StateSink<'_>,
    ) -> Result<Self, HandoverError> {
        let commands: Vec<Value> = qmp.execute("query-commands", ())?;
        let can_save_devices = commands.iter().any(|command| command["name"] == SAVE_DEVICES);
        let are_addresses_known = carried.iter().all(|block| block.address.is_some());
        let (output, blocks) = if can_save_devices && are_addresses_known {
            let sent = CarriedBlocks::read(source.process(), &carried).map_err(|e| unreadable(source, e))?;
            let mut part = stream::HEADER.to_vec();
            let output = match &form {
                StreamForm::Own => StateOutput::devices(source)?,
                StreamForm::Foreign { machine } => {
                    stream::configuration_ignoring_shared(&mut part, machine);
                    StateOutput::memory(qmp)?
                }
            };
            let section = start_section(&mut part, &sent);
            sink.write(&part)?;
            (output, SmallBlocks::FromMemory { table: carried, sent, section })
        } else if form == StreamForm::Own {
            (StateOutput::migration(qmp)?, SmallBlocks::InStream)
        } else {
            let no_command =
                io::Error::other(format!("its QEMU has no `{SAVE_DEVICES}`, or its blocks have no address"));
            return Err(unreadable(source, no_command));
        };
        Ok(Self { source: source.clone(), output, form, save_qmp: None, blocks })
    }

    /// Sends the command that saves the devices, except its end. [`SourceState::begin`] sends the end. Has no effect if
    /// the second monitor is not available, or if QEMU cannot save devices alone.
    ///
    /// # Errors
    /// [`HandoverError::Transfer`]: the source has ended.
    pub fn stage(&mut self) -> Result<(), HandoverError> {
        // A descriptor that was passed to one monitor is unknown to the other.
        if self.is_resumable_during_load()
            && let Ok(mut qmp) = Qmp::connect(&self.source.directory().watch(), SECOND_MONITOR_TIMEOUT)
        {
            self.output.stage(&mut qmp)?;
            self.save_qmp = Some(qmp);
        }
        Ok(())
    }

    /// Returns whether a `cont` during the load resumes the guest. A stream of `migrate` states that the guest was
    /// stopped, which overrides the `cont`.
    #[must_use]
    pub fn is_resumable_during_load(&self) -> bool {
        !matches!(self.blocks, SmallBlocks::InStream)
    }

    /// Makes the source start to save its devices. The guest must be stopped.
    ///
    /// # Errors
    /// [`HandoverError::Transfer`]: the source has ended, or rejects the command.
    pub fn begin(&mut self, source_qmp: &mut Qmp) -> Result<(), HandoverError> {
        match &mut self.save_qmp {
            Some(qmp) => self.output.begin_staged(qmp)?,
            None => self.output.begin(source_qmp)?,
        }
        Ok(())
    }

    /// Sends the pages of the small RAM blocks that have changed since [`SourceState::prepare`]. The guest must be
    /// stopped. Returns the blocks' content, or `None` if the blocks are part of the source's stream or were already
    /// sent.
    ///
    /// # Errors
    /// [`HandoverError::File`]: the blocks cannot be read, or their sizes have changed.
    pub fn send_blocks(&mut self, sink: &mut StateSink<'_>) -> Result<Option<CarriedBlocks>, HandoverError> {
        if !matches!(self.blocks, SmallBlocks::FromMemory { .. }) {
            return Ok(None);
        }
        let blocks = std::mem::replace(&mut self.blocks, SmallBlocks::AllSent);
        let SmallBlocks::FromMemory { table, sent, mut section } = blocks else { return Ok(None) };
        let current = CarriedBlocks::read(self.source.process(), &table).map_err(|e| unreadable(&self.source, e))?;
        let resized = || io::Error::other("a RAM block changed its size during the hand-over; try again");
        let changes = current.changes_since(&sent).ok_or_else(|| unreadable(&self.source, resized()))?;
        let mut part = Vec::new();
        for (block, offset, page) in changes {
            section.page(&mut part, block, offset, page);
        }
        section.end(&mut part);
        sink.write(&part)?;
        Ok(Some(current))
    }

    /// Receives the device state, and passes it to `feed` as it arrives.
    ///
    /// # Errors
    /// [`HandoverError::Transfer`]: the source or the destination has ended. [`HandoverError::File`]: the device state
    /// is incomplete.
    pub fn send_devices(self, source_qmp: &mut Qmp, mut feed: Option<&mut Feed>) -> Result<DeviceState, HandoverError> {
        // If the blocks were sent separately, the header was sent with them.
        let mut bytes_to_skip = if self.is_resumable_during_load() { stream::HEADER.len() } else { 0 };
        let Self { source, output, form, mut save_qmp, .. } = self;
        let mut devices = Vec::with_capacity(DEVICES_CAPACITY_BYTES);
        output.drain(save_qmp.as_mut().unwrap_or(source_qmp), |part| {
            let skipped = bytes_to_skip.min(part.len());
            bytes_to_skip -= skipped;
            let part = part.get(skipped..).unwrap_or_default();
            devices.extend(part);
            feed.as_mut().map_or(Ok(()), |feed| feed.write(part))
        })?;
        if devices.last() != Some(&stream::END_OF_STREAM) {
            return Err(unreadable(&source, io::Error::other("the saved device state is truncated")));
        }
        if let (StreamForm::Foreign { .. }, Some(feed)) = (form, feed) {
            feed.write(&stream::EMPTY_DESCRIPTION)?;
        }
        Ok(DeviceState { bytes: devices, _second_monitor: save_qmp })
    }
}

/// The device state of a stopped source.
#[derive(Debug)]
pub struct DeviceState {
    pub bytes: Vec<u8>,
    /// Kept open until the guest runs: QEMU's monitor thread wakes up for the close, which would delay the load.
    _second_monitor: Option<Qmp>,
}

/// Writes the start of the RAM section with all pages of `blocks`.
fn start_section(out: &mut Vec<u8>, blocks: &CarriedBlocks) -> RamSection {
    let mut section = RamSection::start(out, blocks.sizes());
    for block in &blocks.blocks {
        for (offset, page) in block.pages() {
            section.page(out, &block.id, offset, page);
        }
    }
    section
}

fn unreadable(source: &Vmm, error: io::Error) -> HandoverError {
    HandoverError::File { path: format!("/proc/{}/mem", source.pid).into(), source: error }
}
