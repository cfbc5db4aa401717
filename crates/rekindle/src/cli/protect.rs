//! `rekindle protect`, `restore` and the pager.

use super::store::Tls;
use clap::{Args, ValueEnum};
use rekindle_protect::policy::Policy;
use rekindle_store::StoreUrl;
use rekindle_vm::definition::{Name, Span};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct Protect {
    /// The VM.
    pub name: Name,
    /// Where checkpoints go: a directory, or tls://HOST:PORT/NAME. It must be a store: see `rekindle store init`.
    #[arg(long, value_name = "URL")]
    pub store: StoreUrl,
    /// Create the store if there is none.
    #[arg(long)]
    pub create_store: bool,
    /// Start a new store where the one that this host has written is gone (with --create-store, unless there is a new one). The old checkpoints
    /// must not be restored later.
    #[arg(long)]
    pub abandon_old_checkpoints: bool,
    #[command(flatten)]
    pub tls: Tls,
    /// Time from one checkpoint to the next.
    #[arg(long, default_value = "2s", value_name = "TIME")]
    pub every: Span,
    /// What is copied when: basic, cow or precopy [default: precopy; cow for a VM with O_DIRECT disks].
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<Policy>,
    /// How many checkpoints are kept.
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep: u32,
    /// Tell when the newest checkpoint is older than this.
    #[arg(long, value_name = "TIME")]
    pub max_lag: Option<Span>,
    /// For a VM that writes disks: a restored guest may find them newer than its memory.
    #[arg(long, value_enum, value_name = "RULE")]
    pub disk: Option<DiskRule>,
    /// A command that snapshots the disks; it runs while the guest is stopped.
    #[arg(long, value_name = "COMMAND", conflicts_with = "disk")]
    pub disk_hook: Option<String>,
    /// End after so many checkpoints, and leave no trace in QEMU.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Hold what the guest sends until the checkpoint that covers it counts: nobody sees what a fail-over takes back. Each answer of
    /// the guest waits for that.
    #[arg(long)]
    pub output_commit: bool,
    /// Then compare all of the guest's memory with the newest checkpoint, while it is stopped (takes seconds per GiB).
    #[arg(long, requires = "count")]
    pub compare: bool,
    /// Then take one more, from which the guest does not go on: for whoever is about to end it.
    #[arg(long, requires = "count", conflicts_with = "compare", hide = true)]
    pub stay: bool,
}

/// What of disks that a protected guest writes.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum DiskRule {
    /// After a restore they are as after a power failure, and newer than the guest's memory.
    CrashConsistent,
}

#[derive(Debug, Args)]
pub struct Restore {
    /// The VM.
    pub name: Name,
    /// Where its checkpoints are: a directory, or tls://HOST:PORT/NAME.
    #[arg(long, value_name = "URL")]
    pub store: StoreUrl,
    #[command(flatten)]
    pub tls: Tls,
    /// The checkpoint [default: the newest].
    #[arg(long, value_name = "N")]
    pub at: Option<u64>,
    /// Bring all memory before the guest goes on.
    #[arg(long)]
    pub eager: bool,
    /// Hold what the guest sends until `rekindle protect --output-commit` lets it out.
    #[arg(long, conflicts_with = "prepare")]
    pub output_commit: bool,
    /// Only start a QEMU that waits with empty RAM: the next restore is a load and a resume.
    #[arg(long, conflicts_with_all = ["at", "eager"])]
    pub prepare: bool,
    /// How the VM is to be built here [default: as on the host of the checkpoint].
    #[arg(long, value_name = "FILE")]
    pub definition: Option<PathBuf>,
    /// The QEMU to use instead of the one that the definition names.
    #[arg(long, value_name = "PATH")]
    pub qemu: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Pager {
    /// The VM.
    pub name: Name,
    /// Tell on standard input, a socket, when it could begin, and wait for the one before to end.
    #[arg(long, hide = true)]
    pub hand_over: bool,
}
