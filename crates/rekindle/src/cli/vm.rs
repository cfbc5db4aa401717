//! Arguments of the commands that start, adopt, show, recover and stop VMs.

use clap::{ArgGroup, Args};
use rekindle_vm::definition::{Name, Span};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct Run {
    /// The VM's definition (TOML).
    pub file: PathBuf,
    /// The QEMU to use instead of the one in the definition.
    #[arg(long, value_name = "PATH")]
    pub qemu: Option<PathBuf>,
    /// Boot from the newest disks if a failure has left redo logs. The disks of the last checkpoint are discarded.
    #[arg(long)]
    pub newest_disk: bool,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("monitor").required(true).args(["qmp", "libvirt"]))]
pub struct Attach {
    /// The name for the VM.
    pub name: Name,
    /// A QMP socket of the QEMU that no other program uses.
    #[arg(long, value_name = "SOCKET")]
    pub qmp: Option<PathBuf>,
    /// The libvirt domain: name, number or UUID.
    #[arg(long, value_name = "DOMAIN")]
    pub libvirt: Option<String>,
    /// libvirt's connection URI [default: libvirt's].
    #[arg(long, value_name = "URI", requires = "libvirt")]
    pub connect: Option<String>,
}

#[derive(Debug, Args)]
pub struct Status {
    /// The VMs and libvirt domains [default: all].
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
}

#[derive(Debug, Args)]
pub struct Events {
    /// The VMs [default: all].
    pub names: Vec<Name>,
    /// Also print what happens from now on, until interrupted.
    #[arg(long, short = 'f')]
    pub follow: bool,
    /// How many of the events until now to print.
    #[arg(long, short = 'n', default_value_t = 100, value_name = "N")]
    pub lines: usize,
}

#[derive(Debug, Args)]
pub struct Validate {
    /// The file (TOML).
    pub file: PathBuf,
}

#[derive(Debug, Args)]
pub struct Show {
    /// The VM.
    pub name: Name,
    /// Draw the last operation's steps as bars over time.
    #[arg(long)]
    pub timeline: bool,
}

#[derive(Debug, Args)]
pub struct NameOnly {
    /// The VM.
    pub name: Name,
}

#[derive(Debug, Args)]
pub struct Recover {
    /// The VM.
    pub name: Name,
    /// How long to wait for a running QEMU to answer.
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub wait: Span,
    /// Kill a QEMU that does not answer within that time, although it may run the guest: the guest's memory is lost.
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Args)]
pub struct Stop {
    /// The VMs.
    #[arg(required = true)]
    pub names: Vec<Name>,
    /// Power off without shutting the guest down.
    #[arg(long)]
    pub now: bool,
    /// How long the guest may take to shut down before it is powered off [default: the definition's].
    #[arg(long, conflicts_with = "now", value_name = "TIME")]
    pub timeout: Option<Span>,
    /// Only show what would be done to each VM and what prevents it; change nothing.
    #[arg(long)]
    pub dry_run: bool,
}
