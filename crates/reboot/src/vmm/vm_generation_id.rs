//! The VM generation ID in guest RAM.
//!
//! QEMU's `vmgenid` device writes the ID to guest RAM on every load (`vmgenid_post_load`), even if it is unchanged. In
//! a marked RAM file (`rekindle_handover`'s `mark_ram`) this write would look like a guest that has run, and a load
//! that fails after it would lose the guest's memory. So the page is made writable in the destination QEMU before the
//! file is marked: QEMU's later write then does not change the file's modification time.

use rekindle_kernel::process::Process;
use rekindle_kernel::{maps, memory};
use rekindle_qemu::command::Hardware;
use rekindle_qemu::stream;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A guest's VM generation ID, and access to the RAM into which the destination QEMU will write it.
pub(crate) struct VmGenerationId {
    /// The ID in the byte order of guest memory.
    bytes: [u8; 16],
    ram: File,
    process: Process,
    /// Address in `process` at which the RAM file is mapped.
    mapping_start: u64,
}

impl VmGenerationId {
    /// Prepares access to the ID of the guest that `process` is going to run. Returns `None` if the guest has no ID, or
    /// if `process` has not mapped the RAM file.
    ///
    /// # Errors
    /// Errors of reading the process's mappings and of opening the RAM file.
    pub(crate) fn new(hardware: &Hardware, process: Process) -> io::Result<Option<Self>> {
        let Some(id) = hardware.vm_generation else { return Ok(None) };
        let Some(mapping) = maps::range_of_file(process, &hardware.ram.path)? else { return Ok(None) };
        let ram = File::open(&hardware.ram.path)?;
        Ok(Some(Self { bytes: id.to_bytes_le(), ram, process, mapping_start: mapping.start }))
    }

    /// Writes the ID to the address that the device state `devices` names, if the RAM already holds the same ID at that
    /// address. Changes only the process's page table.
    ///
    /// The guest chooses the address, so it may be wrong. If the write fails, the RAM file may later appear modified,
    /// which is safe.
    pub(crate) fn write(&self, devices: &[u8]) {
        let Some(address) = stream::generation_address(devices) else { return };
        if let Err(e) = self.write_at(address) {
            tracing::debug!("cannot write the VM generation ID at {address:#x}: {e}");
        }
    }
    /// Writes the ID to a guest address, if the RAM already holds it there.
    fn write_at(&self, address: u64) -> io::Result<()> {
        let mut current = [0; 16];
        // Main RAM starts at guest address 0, so below 4 GiB the file offset equals the guest address.
        self.ram.read_exact_at(&mut current, address)?;
        if current != self.bytes {
            return Ok(());
        }
        memory::write(self.process, self.mapping_start.wrapping_add(address), &self.bytes)
    }
}
