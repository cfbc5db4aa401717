//! Arguments of `rekindle host`: suspending and resuming guests, and preparing the host for reboots.

use super::RebootMethod;
use clap::{Args, Subcommand};
use rekindle_vm::definition::{Bytes, Name};

#[derive(Debug, Subcommand)]
pub enum Host {
    /// Reserve RAM that survives a reboot of this host, and install the units that suspend and resume guests.
    ///
    /// Needs: root for --write; systemd, kexec-tools; a kernel with legacy persistent memory, DAX and kexec.
    ///
    /// On success: without --write, the steps are printed; with it, they are done. The command can be repeated at any
    /// time.
    ///
    /// On failure: the error names the obstacle; steps that were done are kept, and the same command continues.
    #[command(after_help = "\
Examples:
  rekindle host init --reserve 48G
  rekindle host init --reserve 48G --write")]
    Init(HostInit),
    /// Mount the reserved RAM, as a boot does.
    ///
    /// Missing network namespaces of suspended guests are made, too. The RAM's content is kept if it holds suspended guests; otherwise it is made new and empty.
    #[command(after_help = "\
Example:
  rekindle host mount")]
    Mount,
    /// Suspend guests and end their QEMUs; `rekindle host resume` resumes them, also after a reboot of the host.
    ///
    /// Needs: the VMs run and can be suspended; no other VM is still suspended.
    ///
    /// On success: none of these VMs runs.
    ///
    /// On failure: all guests continue to run.
    #[command(after_help = "\
Examples:
  rekindle host suspend --all --dry-run
  rekindle host suspend web db
  rekindle host suspend --all --how saved")]
    Suspend(HostSuspend),
    /// Resume all suspended guests.
    ///
    /// Needs: their disks and bridges.
    ///
    /// On success: each guest resumes with its memory; one whose memory is lost boots, and the output names it.
    ///
    /// On failure: exit status 3; the output names the guests that did not resume, which `rekindle recover` resumes.
    #[command(after_help = "\
Example:
  rekindle host resume")]
    Resume,
}

#[derive(Debug, Args)]
pub struct HostInit {
    /// RAM to reserve for guests, e.g. 48G.
    #[arg(long, value_name = "SIZE")]
    pub reserve: Bytes,
    /// Start address of the reserved RAM [default: it ends where the machine's highest RAM ends].
    #[arg(long, value_name = "SIZE")]
    pub start: Option<Bytes>,
    /// Carry the steps out instead of printing them.
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
    /// Where guests' RAM is kept. `warm` survives a reboot of the host only in reserved RAM.
    #[arg(long, value_enum, default_value_t = RebootMethod::Warm)]
    pub how: RebootMethod,
    /// Carry out the plan of `rekindle reboot-host`; without a plan, do nothing.
    #[arg(long, hide = true, conflicts_with_all = ["how", "names", "all", "dry_run"])]
    pub planned: bool,
    /// Only show what would be done to each VM and what prevents it; change nothing.
    #[arg(long)]
    pub dry_run: bool,
}
