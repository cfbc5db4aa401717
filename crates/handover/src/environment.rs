//! Where a destination QEMU runs, and which program manages it afterwards.

use crate::HandoverError;
use crate::takeover::Taps;
use rekindle_qemu::binary::Binary;
use rekindle_qemu::command::{Hardware, Start};
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::rundir::RunDir;

/// Starts QEMUs of a VM in the surroundings that its manager expects.
pub trait Environment {
    /// Starts the `generation`-th QEMU of the VM. `start` states what it waits for.
    ///
    /// *On success:* the process runs; it need not have opened its sockets yet.
    ///
    /// # Errors
    /// [`HandoverError::Vmm`]: it cannot be started. [`HandoverError::File`]: its directory cannot be created, or
    /// another QEMU runs there.
    fn spawn(&self, generation: u32, start: Start, taps: Taps) -> Result<Vmm, HandoverError>;
}

/// A VM that Rekindle itself started: its QEMU runs in the VM's run directory, with the command line of its hardware.
#[derive(Debug, Clone, Copy)]
pub struct OwnRunDir<'a> {
    pub rundir: &'a RunDir,
    pub hardware: &'a Hardware,
    pub binary: &'a Binary,
}

impl Environment for OwnRunDir<'_> {
    fn spawn(&self, generation: u32, start: Start, taps: Taps) -> Result<Vmm, HandoverError> {
        let Self { rundir, hardware, binary } = self;
        let directory = rundir
            .create_vmm(generation)
            .map_err(|source| HandoverError::File { path: rundir.vmm(generation).0, source })?;
        let arguments = hardware.arguments(&directory, &rundir.console_log(), start, binary.syntax);
        Ok(Vmm::spawn(&binary.path, &arguments, &directory, taps)?)
    }
}
