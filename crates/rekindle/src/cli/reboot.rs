//! `rekindle reboot`: under a VM, and in it.

use clap::{Args, Subcommand, ValueEnum};
use rekindle_vm::definition::Name;
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub enum Reboot {
    /// Replace the QEMU process of VMs, under running guests.
    ///
    /// Needs: the VMs run; the new QEMU knows their machine type, CPU model and devices.
    /// On success: each guest runs in a new QEMU.
    /// On failure: exit status 1 and the guest as it was, or 3 and `rekindle recover` to decide.
    Vmm(RebootVmm),
    /// Reboot the guest's system: shut it down, by its agent or the power button, and boot it.
    ///
    /// Needs: the VM runs; for --how warm-cache a disk with `server = true`, and RAM that is not in huge pages.
    /// On success: the guest boots. With --how warm-cache it is given what it had cached of its disk from its former memory, each block
    /// only if it is what is on the disk.
    /// On failure: exit status 1 and the guest as it was, or 3 and `rekindle recover` to decide.
    Os(RebootOs),
}

/// How a VMM is replaced.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum How {
    /// The guest's RAM stays where it is: stopped for milliseconds.
    Warm,
    /// The guest's RAM goes to disk and back.
    Saved,
    /// The guest is shut down and booted.
    Cold,
}

#[derive(Debug, Args)]
pub struct RebootVmm {
    /// The VMs.
    #[arg(required_unless_present = "all")]
    pub names: Vec<Name>,
    /// All VMs that run.
    #[arg(long, conflicts_with = "names")]
    pub all: bool,
    /// How.
    #[arg(long, value_enum, default_value = "warm")]
    pub how: How,
    /// The QEMU to run from now on [default: the one that runs].
    #[arg(long, value_name = "PATH")]
    pub qemu: Option<PathBuf>,
    /// Back to the QEMU before the last upgrade.
    #[arg(long, conflicts_with = "qemu")]
    pub rollback: bool,
    /// Compare all of the guest's memory before and after, while it is stopped (takes seconds per GiB).
    #[arg(long)]
    pub verify_memory: bool,
}

#[derive(Debug, Args)]
pub struct RebootOs {
    /// The VM.
    pub name: Name,
    /// How [default: warm-cache if a disk has a server, else cold].
    #[arg(long, value_enum)]
    pub how: Option<HowOs>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HowOs {
    /// Its memory is gone.
    Cold,
    /// What it had cached of its disk is there again.
    WarmCache,
}
