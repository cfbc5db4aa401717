//! `rekindle reboot`: under a VM, in it, and under all of them.

use super::RebootHost;
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
    /// Reboot the guest's system: shut it down, by its agent, else the power button, else (after `shutdown_timeout`) the plug, and boot it.
    ///
    /// Needs: the VM runs; for --how warm-cache a disk with `server = true`, and RAM that is not in huge pages; for --how kexec
    /// qemu-guest-agent that may run programs, systemd and kexec-tools in the guest; for --how phase [phase] in its definition; for --end
    /// freeze qemu-guest-agent.
    /// On success: the guest boots. With --how warm-cache it is given what it had cached of its disk from its former memory, each block
    /// only if it is what is on the disk. With --how kexec its new kernel runs, without firmware and boot loader, and its agent answers. With
    /// --how phase it goes on from the latest phase of an earlier boot of which no block of a disk that it knew was written since; where there
    /// is none, it boots.
    /// On failure: exit status 1 and the guest as it was, or 3 and `rekindle recover` to decide.
    Os(RebootOs),
    /// Reboot this host under its guests.
    ///
    /// Needs: root, systemd, `rekindle host init`; every VM can be carried in its way, or --others says what becomes of it.
    /// On success: the host goes down; in its next boot the guests go on.
    /// On failure: exit status 1, and all guests run as before.
    Host(RebootHost),
}

/// How a guest is brought to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EndOs {
    /// It shuts itself down: services end in order, file systems are unmounted.
    Shutdown,
    /// Its agent writes its file systems out and freezes them, and it is powered off: what programs have written to files is there, but they are
    /// not asked to end.
    Freeze,
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
    /// Only show what would be done to each VM, and what prevents it. Nothing is changed.
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct RebootOs {
    /// The VM.
    pub name: Name,
    /// How [default: warm-cache if a disk has a server, else cold].
    #[arg(long, value_enum)]
    pub how: Option<HowOs>,
    /// With --how phase: the phase to go on from, and no other [default: the latest that may be used].
    #[arg(long, value_name = "PHASE")]
    pub candidate: Option<String>,
    /// How its former life ends; by kexec it always shuts itself down.
    #[arg(long, value_enum, default_value = "shutdown")]
    pub end: EndOs,
    /// With --how kexec: the kernel, a path in the guest [default: the guest's own].
    #[arg(long, value_name = "PATH")]
    pub kernel: Option<String>,
    /// With --how kexec: its initial RAM disk, a path in the guest, or none [default: the one beside the kernel].
    #[arg(long, value_name = "PATH")]
    pub initrd: Option<String>,
    /// Only show what would be done to each VM, and what prevents it. Nothing is changed.
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HowOs {
    /// Its memory is gone.
    Cold,
    /// What it had cached of its disk is there again.
    WarmCache,
    /// Its own kernel starts another one.
    Kexec,
    /// It goes on from a phase of an earlier boot.
    Phase,
}
