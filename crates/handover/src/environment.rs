//! The surroundings in which a destination QEMU is started.

use crate::HandoverError;
use crate::takeover::Taps;
use rekindle_kernel::vhost_net;
use rekindle_qemu::binary::Binary;
use rekindle_qemu::command::{Hardware, Start};
use rekindle_qemu::vmm::{Vmm, VmmError};
use rekindle_vm::qemu_user;
use rekindle_vm::rundir::RunDir;
use std::io;

/// Starts a VM's QEMUs in the surroundings that the program which manages the VM expects.
pub trait Environment {
    /// Starts the `generation`-th QEMU of the VM. `start` states what the QEMU waits for.
    ///
    /// *On success:* the process runs; its sockets may not be open yet.
    ///
    /// # Errors
    /// [`HandoverError::Vmm`]: QEMU cannot be started. [`HandoverError::File`]: QEMU's directory cannot be created, or
    /// another QEMU runs in it. [`HandoverError::QemuUser`]: the VM's own user cannot use a file.
    fn spawn(&self, generation: u32, start: Start, taps: Taps) -> Result<Vmm, HandoverError>;
}

/// The environment of a VM that Rekindle itself has started: QEMU runs in the VM's run directory, with the command line
/// of the VM's hardware, and as the VM's own user if the host is configured so.
#[derive(Debug, Clone, Copy)]
pub struct OwnRunDir<'a> {
    pub rundir: &'a RunDir,
    pub hardware: &'a Hardware,
    pub binary: &'a Binary,
}

impl Environment for OwnRunDir<'_> {
    fn spawn(&self, generation: u32, start: Start, mut taps: Taps) -> Result<Vmm, HandoverError> {
        let Self { rundir, hardware, binary } = self;
        for number in hardware.vhost_fds() {
            let opened = vhost_net::open();
            taps.push((
                opened.map_err(|source| HandoverError::File { path: vhost_net::DEVICE.into(), source })?,
                number,
            ));
        }
        let directory = rundir
            .create_vmm(generation)
            .map_err(|source| HandoverError::File { path: rundir.vmm(generation).0, source })?;
        let arguments = hardware.arguments(&directory, &rundir.console_log(), start, binary.syntax);
        let next = qemu_user::of_next_qemu(rundir, &directory, hardware, &binary.path)?;
        let Some(run_as_root) = next.if_jail_fails else {
            return Ok(Vmm::spawn(&binary.path, &arguments, &directory, taps, next.jail.as_ref())?);
        };
        let copies = taps.iter().map(|(tap, number)| Ok((tap.try_clone()?, *number))).collect::<io::Result<Taps>>();
        let copies = copies.map_err(|source| HandoverError::File { path: directory.0.clone(), source })?;
        match Vmm::spawn(&binary.path, &arguments, &directory, taps, next.jail.as_ref()) {
            Err(e @ VmmError::Spawn { .. }) => {
                run_as_root.instead(rundir.name(), &directory, hardware, &e)?;
                Ok(Vmm::spawn(&binary.path, &arguments, &directory, copies, None)?)
            }
            spawned => Ok(spawned?),
        }
    }
}
