//! The page of guest RAM with the VM generation ID.
//!
//! QEMU's `vmgenid` writes the ID into the guest's RAM whenever it is loaded (`vmgenid_post_load`), also the one that is
//! there already. With the RAM file marked ([`super::handover::mark`]) that would be taken for a guest that has run, and a
//! load that fails behind it would cost the guest its memory. So the new QEMU is given that page, writable, before the
//! mark: what it writes then leaves the file's time alone.

use rekindle_kernel::memory;
use rekindle_kernel::process::Process;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::stream;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The ID of a guest, and the way to it in the QEMU that takes the guest over.
pub(crate) struct Generation {
    /// As it is in memory.
    bytes: [u8; 16],
    ram: File,
    process: Process,
    /// Where the process has mapped the RAM.
    mapped: u64,
}

impl Generation {
    /// That of a guest which `process` is going to run; `None` if it has none.
    ///
    /// # Errors
    /// When the process's mappings or the RAM file cannot be read.
    pub(crate) fn new(hardware: &Hardware, process: Process) -> io::Result<Option<Self>> {
        let Some(id) = hardware.vm_generation else { return Ok(None) };
        let Some(mapped) = memory::mapping_of(process, &hardware.ram.path)? else { return Ok(None) };
        let ram = File::open(&hardware.ram.path)?;
        Ok(Some(Self { bytes: id.to_bytes_le(), ram, process, mapped: mapped.start }))
    }

    /// Write the ID where the guest has it, as `devices` says, if it is there: nothing changes but the process's page table.
    ///
    /// A guest can say any address. Where this fails the mark says more than is true, which is safe.
    pub(crate) fn write(&self, devices: &[u8]) {
        let Some(address) = stream::generation_address(devices) else { return };
        let mut there = [0; 16];
        // Below 4 GiB, where the main RAM begins: as far into the file as into the guest's memory.
        let read = self.ram.read_exact_at(&mut there, address);
        let place = self.mapped.wrapping_add(address);
        let written =
            read.and_then(|()| if there == self.bytes { memory::write(self.process, place, &there) } else { Ok(()) });
        if let Err(e) = written {
            tracing::debug!("the VM generation ID at {address:#x}: {e}");
        }
    }
}
