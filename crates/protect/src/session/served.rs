//! Disks that a server of Rekindle's has: it writes the guest's memory through a mapping of its own, unseen by QEMU's page tables, and
//! notes which pages those are (`docs/disk.md`).

use super::SessionError;
use crate::runs::{Runs, merged, nothing};
use crate::target::Target;
use rekindle_disk::control::{Ask, Control, ControlError};
use rekindle_disk::memory::Span;
use rekindle_memory::pages;
use rekindle_memory::ram::GuestRam;
use rekindle_memory::tracker::Dirty;
use rekindle_vm::disks;
use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

/// How long QEMU may take to connect.
const CONNECTED: Duration = Duration::from_secs(5);

/// The servers of a guest's disks.
pub(super) struct Served {
    controls: Vec<Control>,
    /// Whether all of them have noted all that they wrote since an earlier protector asked for it.
    pub went_on: bool,
}

impl Served {
    /// Have them note what they write from here on.
    pub fn note(target: &Target) -> Result<Self, SessionError> {
        let mut served = Self { controls: Vec::new(), went_on: true };
        for disk in disks::served(&target.state().hardware) {
            let mut control = Control::connect(&disks::control(target.rundir(), &disk.id))?;
            served.went_on &= ask(&mut control, target.vmm().pid)?;
            served.controls.push(control);
        }
        Ok(served)
    }

    /// Whether there are any.
    pub fn any(&self) -> bool {
        !self.controls.is_empty()
    }

    /// `dirty`, and what they have written since the last time. Before `dirty` is read: what is written after that is told the next time.
    pub fn with(&mut self, dirty: Dirty, ram: &GuestRam) -> Result<Dirty, SessionError> {
        if self.controls.is_empty() {
            return Ok(dirty);
        }
        let mut written = nothing(ram);
        for control in &mut self.controls {
            for span in control.collect()? {
                note(&mut written.written, span, ram)?;
            }
        }
        Ok(merged(&dirty, &written))
    }

    /// They need not note any more.
    pub fn end(mut self) {
        for control in &mut self.controls {
            if let Err(e) = control.ask::<bool>(&Ask::Note { pid: None }) {
                tracing::debug!("a disk's server still notes what it writes: {e}");
            }
        }
    }
}

/// QEMU needs a second to connect to a server that was just started in the place of one that has died.
fn ask(control: &mut Control, pid: u32) -> Result<bool, ControlError> {
    let deadline = Instant::now() + CONNECTED;
    loop {
        match control.ask(&Ask::Note { pid: Some(pid) }) {
            Err(ControlError::Refused { .. }) if Instant::now() < deadline => thread::sleep(Duration::from_millis(20)),
            other => return other,
        }
    }
}

/// Add `span`, by QEMU's addresses, to what was written of each block.
fn note(written: &mut Runs, span: Span, ram: &GuestRam) -> Result<(), SessionError> {
    let mut blocks = ram.blocks().iter().zip(written);
    let found = blocks.find(|(block, _)| block.used().contains(&span.address));
    let Some((block, runs)) = found.filter(|(block, _)| span.address + span.bytes <= block.used().end) else {
        return Err(SessionError::Unknown { address: span.address, bytes: span.bytes });
    };
    let at = span.address - block.address;
    let run: Range<u64> = at..at + span.bytes;
    *runs = pages::union(runs, std::slice::from_ref(&run));
    Ok(())
}
