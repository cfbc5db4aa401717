//! Saves the device state of a source QEMU, and its RAM blocks that are not in the RAM file: firmware, ACPI tables,
//! video memory.

use crate::HandoverError;
use crate::saved_state::StreamWriter;
use rekindle_memory::carried::CarriedBlocks;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::ramblock::RamBlock;
use rekindle_qemu::stream::{self, RamSection};
use rekindle_qemu::transfer::{Feed, SAVE_DEVICES, Tap};
use rekindle_qemu::vmm::Vmm;
use serde_json::Value;
use std::io;
use std::time::Duration;

/// How long to wait for a connection to the source's second monitor: without it, the save is only slower.
const SECOND_MONITOR_TIMEOUT: Duration = Duration::from_millis(100);
/// Initial capacity of the device state's buffer, in bytes: more than an ordinary device state needs.
const DEVICES_CAPACITY: usize = 1 << 20;

/// The receivers of the state: a file, and the destination if it is connected.
#[derive(Debug)]
pub struct StateSink<'a> {
    pub feed: Option<&'a mut Feed>,
    pub file: &'a mut StreamWriter,
}

impl StateSink<'_> {
    fn write(&mut self, part: &[u8]) -> Result<(), HandoverError> {
        if let Some(feed) = &mut self.feed {
            feed.write(part)?;
        }
        self.file.write(part)
    }
}

/// A save of the source's state in progress.
#[derive(Debug)]
pub struct SourceState {
    source: Vmm,
    tap: Tap,
    /// A second monitor connection, on which the save command is staged. `None` if nothing is staged, e.g. because
    /// another client uses that monitor.
    save_qmp: Option<Qmp>,
    blocks: SmallBlocks,
}

/// How the RAM blocks outside the RAM file are saved.
#[derive(Debug)]
enum SmallBlocks {
    /// The blocks are read from the source's memory. `sent`: the content that was sent while the guest ran.
    QemuMemory { table: Vec<RamBlock>, sent: CarriedBlocks, section: RamSection },
    /// The blocks were read from the source's memory after the guest had stopped.
    Sent,
    /// The blocks are part of the stream that the source writes.
    InStream,
}

impl SourceState {
    /// Prepares to save the guest of `source`, whose RAM blocks are `table`. Writes the small RAM blocks to `sink`
    /// while the guest runs, if this QEMU can save devices alone.
    ///
    /// # Errors
    /// [`HandoverError`]; the source is unchanged.
    pub fn prepare(
        source: &Vmm,
        qmp: &mut Qmp,
        table: Vec<RamBlock>,
        sink: &mut StateSink<'_>,
    ) -> Result<Self, HandoverError> {
        let commands: Vec<Value> = qmp.execute("query-commands", ())?;
        let saves_devices = commands.iter().any(|command| command["name"] == SAVE_DEVICES);
        let (tap, blocks) = if saves_devices && table.iter().all(|block| block.address.is_some()) {
            let sent = CarriedBlocks::read(source.process(), &table).map_err(|e| unreadable(source, e))?;
            let mut part = stream::HEADER.to_vec();
            let section = start_section(&mut part, &sent);
            sink.write(&part)?;
            (Tap::devices(&source.directory())?, SmallBlocks::QemuMemory { table, sent, section })
        } else {
            (Tap::migration(qmp)?, SmallBlocks::InStream)
        };
        Ok(Self { source: source.clone(), tap, save_qmp: None, blocks })
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
            self.tap.stage(&mut qmp)?;
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
            Some(qmp) => self.tap.begin(qmp, true)?,
            None => self.tap.begin(source_qmp, false)?,
        }
        Ok(())
    }

    /// Sends the pages of the small RAM blocks that have changed since [`SourceState::prepare`]. Returns the blocks'
    /// content, or `None` if the blocks are part of the source's stream or were already sent.
    ///
    /// # Errors
    /// [`HandoverError::File`]: the blocks cannot be read, or their sizes have changed.
    pub fn send_blocks(&mut self, sink: &mut StateSink<'_>) -> Result<Option<CarriedBlocks>, HandoverError> {
        let (table, sent, mut section) = match std::mem::replace(&mut self.blocks, SmallBlocks::Sent) {
            SmallBlocks::QemuMemory { table, sent, section } => (table, sent, section),
            others => {
                self.blocks = others;
                return Ok(None);
            }
        };
        let now = CarriedBlocks::read(self.source.process(), &table).map_err(|e| unreadable(&self.source, e))?;
        let resized = || io::Error::other("a RAM block changed its size during the hand-over; try again");
        let changes = now.changes_since(&sent).ok_or_else(|| unreadable(&self.source, resized()))?;
        let mut part = Vec::new();
        for (block, offset, page) in changes {
            section.page(&mut part, block, offset, page);
        }
        section.end(&mut part);
        sink.write(&part)?;
        Ok(Some(now))
    }

    /// Receives the device state, and passes it to `feed` as it arrives.
    ///
    /// # Errors
    /// [`HandoverError::Transfer`]: the source or the destination has ended. [`HandoverError::File`]: the device state
    /// is incomplete.
    pub fn send_devices(self, source_qmp: &mut Qmp, mut feed: Option<&mut Feed>) -> Result<DeviceState, HandoverError> {
        // If the blocks were sent separately, the header was sent with them.
        let mut header = if self.is_resumable_during_load() { stream::HEADER.len() } else { 0 };
        let Self { source, tap, mut save_qmp, .. } = self;
        let mut devices = Vec::with_capacity(DEVICES_CAPACITY);
        tap.drain(save_qmp.as_mut().unwrap_or(source_qmp), |part| {
            let skipped = header.min(part.len());
            header -= skipped;
            let part = part.get(skipped..).unwrap_or_default();
            devices.extend(part);
            feed.as_mut().map_or(Ok(()), |feed| feed.write(part))
        })?;
        if devices.last() != Some(&stream::END_OF_STREAM) {
            return Err(unreadable(&source, io::Error::other("the saved device state is truncated")));
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
