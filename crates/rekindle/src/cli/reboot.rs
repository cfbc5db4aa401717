//! Arguments of `rekindle replace-qemu`, `reboot` and `reboot-host`.

use clap::{Args, Subcommand, ValueEnum};
use rekindle_vm::definition::Name;
use std::path::PathBuf;

/// `rekindle reboot NAME`, or one of the previous names of the three reboots.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true, disable_help_subcommand = true)]
pub struct Reboot {
    #[command(subcommand)]
    pub previous_name: Option<PreviousName>,
    #[command(flatten)]
    pub guest: Option<RebootOs>,
}

/// Names of the reboots in previous releases, kept for one release. A VM of such a name is rebooted by
/// `rekindle reboot -- NAME`.
#[derive(Debug, Subcommand)]
pub enum PreviousName {
    /// Replace the QEMU process under running guests.
    #[command(hide = true)]
    Vmm(RebootVmm),
    /// Reboot the operating system of a guest.
    #[command(hide = true)]
    Os(RebootOs),
    /// Reboot this host and keep its guests.
    #[command(hide = true)]
    Host(RebootHost),
}

/// How to end a guest's current boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EndOs {
    /// Shut down cleanly: services stop, file systems are unmounted.
    Shutdown,
    /// Flush and freeze file systems through the agent, then power off: data in files is kept, but programs do not shut
    /// down.
    Freeze,
}

/// How to carry a guest's RAM over a reboot of its QEMU or of the host.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum RebootMethod {
    /// Leave the guest's RAM in place: the guest is stopped for milliseconds.
    Warm,
    /// Save the guest's RAM to disk, and load it again.
    Saved,
    /// Shut the guest down, and boot it.
    Cold,
}

#[derive(Debug, Args)]
pub struct RebootVmm {
    /// The VMs, or domains of libvirt.
    #[arg(required_unless_present_any = ["all", "all_libvirt"])]
    pub names: Vec<Name>,
    /// All VMs that Rekindle has started and that run.
    #[arg(long, conflicts_with = "names")]
    pub all: bool,
    /// All domains that libvirt runs (qemu:///system), except paused and attached ones.
    #[arg(long, conflicts_with_all = ["names", "all"])]
    pub all_libvirt: bool,
    /// Of all domains, those whose QEMU is not the installed one (as `rekindle status` lists them).
    #[arg(long, requires = "all_libvirt", conflicts_with = "qemu")]
    pub outdated: bool,
    /// The QMP socket of a QEMU that neither Rekindle nor libvirt has started. The name is free to choose.
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["all", "all_libvirt", "rollback", "verify_memory"])]
    pub qmp: Option<PathBuf>,
    /// How to carry the guest's RAM over.
    #[arg(long, value_enum, default_value = "warm")]
    pub how: RebootMethod,
    /// The new QEMU [default: the file from which the guest's QEMU was started, as it is now; for a domain, its <emulator>].
    #[arg(long, value_name = "PATH")]
    pub qemu: Option<PathBuf>,
    /// Return to the QEMU before the last upgrade.
    #[arg(long, conflicts_with = "qemu")]
    pub rollback: bool,
    /// Compare all of the guest's memory before and after, while the guest is stopped (takes seconds per GiB).
    #[arg(long)]
    pub verify_memory: bool,
    /// For guests that Rekindle did not start: move their RAM to the new QEMU page by page, after the guest has resumed
    /// there, instead of copying it before [default: only if there is no memory for a copy].
    #[arg(long, conflicts_with_all = ["rollback", "verify_memory"])]
    pub in_place: bool,
    /// Only show what would be done to each VM and what prevents it; change nothing.
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct RebootOs {
    /// The VM.
    pub name: Name,
    /// How to reboot [default: warm-cache if a disk has a server, else cold].
    #[arg(long, value_enum)]
    pub how: Option<OsMethod>,
    /// With --how phase: the saved phase to continue from [default: the latest usable one].
    #[arg(long, value_name = "PHASE")]
    pub candidate: Option<String>,
    /// How to end the current boot; kexec always shuts down.
    #[arg(long, value_enum, default_value = "shutdown")]
    pub end: EndOs,
    /// With --how kexec: the kernel, a path in the guest [default: the guest's own].
    #[arg(long, value_name = "PATH")]
    pub kernel: Option<String>,
    /// With --how kexec: its initial RAM disk, a path in the guest, or none [default: the one next to the kernel].
    #[arg(long, value_name = "PATH")]
    pub initrd: Option<String>,
    /// Only show what would be done to each VM and what prevents it; change nothing.
    #[arg(long)]
    pub dry_run: bool,
}

/// How to reboot a guest's operating system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OsMethod {
    /// Shut down and boot with an empty cache.
    Cold,
    /// Shut down and boot; disk blocks that the guest had cached are served from its previous memory.
    WarmCache,
    /// Let the guest's kernel start the next one.
    Kexec,
    /// Continue from a state saved in an earlier boot.
    Phase,
}

#[derive(Debug, Args)]
pub struct RebootHost {
    /// Where guests' RAM is kept.
    #[arg(long, value_enum, default_value_t = RebootMethod::Warm)]
    pub how: RebootMethod,
    /// What to do with VMs that cannot be kept in this way.
    #[arg(long, value_enum, default_value_t = Others::Refuse)]
    pub others: Others,
    /// Only show what would be done to each VM; change nothing.
    #[arg(long)]
    pub dry_run: bool,
}

/// What to do with VMs for which the chosen method is not possible.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Others {
    /// Do not reboot the host.
    Refuse,
    /// Save their RAM to disk.
    Saved,
    /// Shut them down, and boot them again.
    Cold,
}
