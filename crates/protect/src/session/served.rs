//! Collects the pages that disk servers write. They write the guest's memory through their own mapping, which QEMU's
//! page tables do not show, and record the written pages (`docs/disk.md`).

use super::CheckpointError;
use crate::runs::{Runs, merged, no_pages};
use crate::target::Target;
use rekindle_disk::control::{Control, ControlCommand, ControlError};
use rekindle_disk::memory::Span;
use rekindle_memory::ram::GuestRam;
use rekindle_memory::tracker::Dirty;
use rekindle_vm::disks;
use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

/// How long QEMU may take to connect to a server.
const CONNECTED: Duration = Duration::from_secs(5);

/// Connections to a guest's disk servers.
pub(super) struct DiskServers {
    controls: Vec<Control>,
    /// The servers' records are complete since an earlier protector started them.
    pub complete: bool,
}

impl DiskServers {
    /// Starts recording in all disk servers of `target`.
    pub fn start(target: &Target) -> Result<Self, CheckpointError> {
        let mut served = Self { controls: Vec::new(), complete: true };
        for disk in disks::served(&target.state().hardware) {
            let mut control = Control::connect(&disks::control(target.rundir(), &disk.id))?;
            served.complete &= ask(&mut control, target.vmm().pid)?;
            served.controls.push(control);
        }
        Ok(served)
    }

    pub fn any(&self) -> bool {
        !self.controls.is_empty()
    }

    /// Adds to `dirty` the pages that the servers have written since the last call. Must be called before the pages in
    /// `dirty` are read: later writes are in the next call's result.
    pub fn with(&mut self, dirty: Dirty, ram: &GuestRam) -> Result<Dirty, CheckpointError> {
        if self.controls.is_empty() {
            return Ok(dirty);
        }
        let mut written = no_pages(ram);
        for control in &mut self.controls {
            for span in control.collect()? {
                note(&mut written.written, span, ram)?;
            }
        }
        Ok(merged(&dirty, &written))
    }

    /// Stops the recording.
    pub fn end(mut self) {
        for control in &mut self.controls {
            if let Err(e) = control.ask::<bool>(&ControlCommand::RecordPages { pid: None }) {
                tracing::debug!("cannot stop the record of a disk server: {e}");
            }
        }
    }
}

/// Starts recording in one server. Retries for [`CONNECTED`]: if the server has just replaced one that died, QEMU takes
/// a second to connect to it.
fn ask(control: &mut Control, pid: u32) -> Result<bool, ControlError> {
    let deadline = Instant::now() + CONNECTED;
    loop {
        match control.ask(&ControlCommand::RecordPages { pid: Some(pid) }) {
            Err(ControlError::Refused { .. }) if Instant::now() < deadline => thread::sleep(Duration::from_millis(20)),
            other => return other,
        }
    }
}

/// Adds `span`, whose address is in QEMU's address space, to the written runs of its block.
fn note(written: &mut Runs, span: Span, ram: &GuestRam) -> Result<(), CheckpointError> {
    let mut blocks = ram.blocks().iter().zip(written);
    let found = blocks.find(|(block, _)| block.used().contains(&span.address));
    let Some((block, runs)) = found.filter(|(block, _)| span.address + span.bytes <= block.used().end) else {
        return Err(CheckpointError::Unknown { address: span.address, bytes: span.bytes });
    };
    let at = span.address - block.address;
    let run: Range<u64> = at..at + span.bytes;
    *runs = runs.union(std::slice::from_ref(&run));
    Ok(())
}
