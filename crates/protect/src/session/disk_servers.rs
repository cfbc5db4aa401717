//! Collects the pages that disk servers write. They write the guest's memory through their own mapping, which QEMU's
//! page tables do not show, and record the written pages (`docs/disk.md`).

use crate::error::CheckpointError;
use crate::runs::{BlockRuns, merged, no_pages};
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
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const CONNECT_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Connections to a guest's disk servers.
pub(super) struct DiskServers {
    controls: Vec<Control>,
    /// The servers' records are complete since an earlier protector started them.
    pub record_is_complete: bool,
}

impl DiskServers {
    /// Starts recording in all disk servers of `target`.
    pub fn start_recording(target: &Target) -> Result<Self, CheckpointError> {
        let mut servers = Self { controls: Vec::new(), record_is_complete: true };
        for disk in disks::served(&target.state().hardware) {
            let mut control = Control::connect(&disks::control_socket(target.rundir(), &disk.id))?;
            servers.record_is_complete &= start_record(&mut control, target.vmm().pid)?;
            servers.controls.push(control);
        }
        Ok(servers)
    }

    pub fn is_empty(&self) -> bool {
        self.controls.is_empty()
    }

    /// Adds to `dirty` the pages that the servers have written since the last call. Must be called before the pages in
    /// `dirty` are read: later writes are in the next call's result.
    pub fn add_written(&mut self, dirty: Dirty, ram: &GuestRam) -> Result<Dirty, CheckpointError> {
        let mut written = no_pages(ram);
        for control in &mut self.controls {
            for span in control.collect()? {
                add_span(&mut written.written, span, ram)?;
            }
        }
        Ok(merged(&dirty, &written))
    }

    pub fn stop_recording(mut self) {
        for control in &mut self.controls {
            if let Err(e) = control.ask::<bool>(&ControlCommand::RecordPages { pid: None }) {
                tracing::debug!("cannot stop the record of a disk server: {e}");
            }
        }
    }
}

/// Starts the record of one server. Returns whether the server has already recorded for an earlier protector. If the
/// server has just replaced one that died, QEMU takes a second to connect to it; meanwhile the server rejects the
/// request.
fn start_record(control: &mut Control, qemu_pid: u32) -> Result<bool, ControlError> {
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    loop {
        match control.ask(&ControlCommand::RecordPages { pid: Some(qemu_pid) }) {
            Err(ControlError::Refused { .. }) if Instant::now() < deadline => thread::sleep(CONNECT_POLL_INTERVAL),
            answer => return answer,
        }
    }
}

/// Adds `span`, whose address is in QEMU's address space, to the written runs of its block.
fn add_span(written: &mut BlockRuns, span: Span, ram: &GuestRam) -> Result<(), CheckpointError> {
    let Span { address, bytes } = span;
    let mut blocks = ram.blocks().iter().zip(written);
    let containing = blocks.find(|(block, _)| block.used().contains(&address));
    let Some((block, runs)) = containing.filter(|(block, _)| address + bytes <= block.used().end) else {
        return Err(CheckpointError::OutsideRam { address, bytes });
    };
    let start = address - block.address;
    let run: Range<u64> = start..start + bytes;
    *runs = runs.union(std::slice::from_ref(&run));
    Ok(())
}
