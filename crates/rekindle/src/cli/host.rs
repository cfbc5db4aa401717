//! `rekindle host` and `rekindle reboot host`.

use super::How;
use clap::{Args, Subcommand, ValueEnum};
use rekindle_vm::definition::{Bytes, Name};

#[derive(Debug, Subcommand)]
pub enum Host {
    /// Set RAM aside that outlives this host's kernel, and install what suspends and resumes guests.
    ///
    /// Needs: root for --write; systemd, kexec-tools; a kernel with legacy persistent memory, DAX and kexec.
    /// On success: without --write, told what would be done; with it, done. It can be done again at any time.
    /// On failure: what is in the way is named; what was done before stays, and the same command goes on.
    Init(HostInit),
    /// Mount the RAM that outlives this host's kernel, as a boot does: kept if suspended guests are in it, else new and empty.
    Mount,
    /// Suspend guests: their QEMUs end, and `rekindle host resume` resumes them, also after a reboot of the host.
    ///
    /// Needs: the VMs run, and can be carried; none is suspended still.
    /// On success: none of these VMs runs.
    /// On failure: all guests continue to run.
    #[command(after_help = "\
Examples:
  rekindle host suspend --all --dry-run
  rekindle host suspend web db
  rekindle host suspend --all --how saved")]
    Suspend(HostSuspend),
    /// Let all suspended guests go on.
    ///
    /// Needs: their disks and bridges.
    /// On success: each goes on with its memory, or is booted where that is lost, which is said.
    /// On failure: exit status 3; those that did not go on are named, and `rekindle recover` lets them.
    Resume,
}

#[derive(Debug, Args)]
pub struct HostInit {
    /// How much RAM guests may have, e.g. 48G.
    #[arg(long, value_name = "SIZE")]
    pub reserve: Bytes,
    /// The address at which it begins [default: such that it ends with the machine's highest RAM].
    #[arg(long, value_name = "SIZE")]
    pub start: Option<Bytes>,
    /// Do it, instead of telling what would be done.
    #[arg(long)]
    pub write: bool,
}

#[derive(Debug, Args)]
pub struct HostSuspend {
    /// The VMs.
    #[arg(value_name = "NAME")]
    pub names: Vec<Name>,
    /// All VMs that run.
    #[arg(long, conflicts_with = "names")]
    pub all: bool,
    /// What becomes of guests' RAM. `warm` outlives a reboot of the host only where it is in reserved RAM.
    #[arg(long, value_enum, default_value_t = How::Warm)]
    pub how: How,
    /// As `rekindle reboot host` has planned it; without a plan, nothing.
    #[arg(long, hide = true, conflicts_with_all = ["how", "names", "all", "dry_run"])]
    pub planned: bool,
    /// Only show what would be done to each VM, and what prevents it. Nothing is changed.
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct RebootHost {
    /// What becomes of guests and of their RAM.
    #[arg(long, value_enum, default_value_t = How::Warm)]
    pub how: How,
    /// What becomes of VMs that cannot be carried so.
    #[arg(long, value_enum, default_value_t = Others::Refuse)]
    pub others: Others,
    /// Only tell what would become of each VM.
    #[arg(long)]
    pub dry_run: bool,
}

/// What becomes of VMs that cannot be carried as is wanted.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Others {
    /// The host is not rebooted.
    Refuse,
    /// Their RAM goes to disk.
    Saved,
    /// They are shut down, and booted again.
    Cold,
}
