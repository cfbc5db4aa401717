//! The command line of a VM's QEMU.
//!
//! [`Hardware`] describes the VM's machine, and [`Hardware::arguments`] turns it into a command line. The same
//! description must give the same guest-visible machine in every QEMU; otherwise the device state does not fit.
//! Therefore the machine type is versioned, each device has a fixed PCI slot, and nothing comes from a configuration
//! file or from a default of the binary.

mod argument_list;
mod directory;
mod foreign_machine;
mod hardware;
mod overlays;
mod own_machine;

pub use directory::Directory;
pub use hardware::{
    AGENT_PORTS, Boot, Disk, DiskOverlays, ForeignMachine, ForeignNetwork, Hardware, MAX_QUEUES, Net, NetBackend,
    OverlayFile, PHASE_PORT, Ram, RamBackend, Tap, TapSlot, disk_queues, is_one_queue, one_queue,
};

use crate::options::Options;
use crate::syntax::Syntax;
use std::path::{Path, PathBuf};

/// How a QEMU starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Boot the guest.
    Boot,
    /// Boot the guest, but only after `cont`.
    Paused,
    /// Wait for an incoming state, and stay paused afterwards. Ports are not forwarded yet: the source QEMU still holds
    /// them.
    Incoming,
}

impl Hardware {
    /// Returns the arguments for a QEMU of this `syntax` with this hardware. Its sockets are in `directory`, and the
    /// guest's console is logged to `console_log`.
    pub fn arguments(&self, directory: &Directory, console_log: &Path, start: Start, syntax: Syntax) -> Vec<String> {
        match &self.foreign {
            Some(machine) => foreign_machine::arguments(machine, self, directory, console_log, start, syntax),
            None => own_machine::arguments(self, directory, console_log, start, syntax),
        }
    }

    /// Returns the device types that the command line names, including those in [`Hardware::extra`].
    pub fn device_types(&self) -> Vec<String> {
        let no_directory = Directory(PathBuf::new());
        let arguments = self.arguments(&no_directory, Path::new(""), Start::Boot, Syntax::default());
        let pairs = arguments.iter().zip(arguments.iter().skip(1));
        let device_options = pairs.filter(|(option, _)| *option == "-device").map(|(_, value)| value);
        device_options.filter_map(|value| Options::parse(value, "driver").ok()?.get("driver")).collect()
    }

    /// Checks that all disks and network cards have a PCI slot.
    ///
    /// # Errors
    /// A text that states the number of devices and the limit.
    pub fn check_slots(&self) -> Result<(), String> {
        let check = |devices: &str, count: usize, limit: usize| {
            if count > limit { Err(format!("{count} {devices}, but a VM has room for {limit}")) } else { Ok(()) }
        };
        check("disks", self.disks.len(), own_machine::MAX_DISKS)?;
        check("network cards", self.nets.len(), own_machine::MAX_NETS)
    }
}

#[cfg(test)]
mod tests;
