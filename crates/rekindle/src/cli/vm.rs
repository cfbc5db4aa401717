//! Starting, adopting, showing and stopping VMs.

use clap::{ArgGroup, Args};
use rekindle_vm::definition::{Name, Span};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct Run {
    /// The VM's definition (TOML).
    pub file: PathBuf,
    /// The QEMU to use instead of the one that the definition names.
    #[arg(long, value_name = "PATH")]
    pub qemu: Option<PathBuf>,
    /// A failure has left disks with a redo log: start from the newest ones. The disks of the last checkpoint are given up.
    #[arg(long)]
    pub newest_disk: bool,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("monitor").required(true).args(["qmp", "libvirt"]))]
pub struct Attach {
    /// What the VM is to be called here.
    pub name: Name,
    /// A QMP socket of the QEMU, which nobody else uses.
    #[arg(long, value_name = "SOCKET")]
    pub qmp: Option<PathBuf>,
    /// The libvirt domain that it is: name, number or UUID.
    #[arg(long, value_name = "DOMAIN")]
    pub libvirt: Option<String>,
    /// libvirt's connection URI [default: as virsh chooses].
    #[arg(long, value_name = "URI", requires = "libvirt")]
    pub connect: Option<String>,
}

#[derive(Debug, Args)]
pub struct Show {
    /// The VM.
    pub name: Name,
    /// Draw what was done to it as bars over time.
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
    /// How long a QEMU that runs may take to answer.
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub wait: Span,
    /// Kill a QEMU that does not answer by then, although it may run the guest: the guest's memory is lost.
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Args)]
pub struct Stop {
    /// The VMs.
    #[arg(required = true)]
    pub names: Vec<Name>,
    /// Pull the plug: do not ask the guest.
    #[arg(long)]
    pub now: bool,
    /// How long the guest may take to shut down before the plug is pulled [default: the definition's].
    #[arg(long, conflicts_with = "now", value_name = "TIME")]
    pub timeout: Option<Span>,
    /// Only show what would be done to each VM, and what prevents it. Nothing is changed.
    #[arg(long)]
    pub dry_run: bool,
}
