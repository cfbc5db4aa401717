//! `rekindle ocf`: what the resource agent `ocf:rekindle:vm` has done.

use super::moving::Far;
use super::protect::DiskRule;
use super::store::Tls;
use clap::{Args, Subcommand, ValueEnum};
use rekindle_protect::policy::Policy;
use rekindle_store::StoreUrl;
use rekindle_vm::definition::{Name, Span};
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub enum Ocf {
    /// Have the VM run here: its guest goes on from the newest checkpoint, or is booted where there is none, or where it was shut down
    /// in order since.
    ///
    /// Needs: that nothing runs its guest elsewhere, which fencing sees to; the store, created by `rekindle store init`; room for its RAM.
    /// On success: the guest runs, and checkpoints are taken; whoever ran it before can commit nothing any more.
    /// On failure: nothing of it runs here; the checkpoint is where it was.
    Start(OcfResource),
    /// Have nothing of the VM run here: a last checkpoint, then off.
    ///
    /// Needs: nothing.
    /// On success: nothing of it runs here.
    /// On failure: a process could not be ended; this host has to be fenced.
    Stop(OcfStop),
    /// Have the guest go on on another node without being stopped for more than its last checkpoint: migrate_to. Whether it runs there
    /// is asked there, by `monitor`.
    ///
    /// Needs: what `rekindle move` needs: the store and the disk images on both, and a way for commands from here to there.
    /// On success: it runs there, and nothing of it is left here.
    /// On failure: it goes on here, and checkpoints are taken of it; or it is said what has to be mended, which a stop here does.
    MigrateTo(OcfMigrate),
    /// Whether the guest runs: exit status 0 it does, 7 it does not, 1 it is there and does not run well.
    ///
    /// Needs: nothing.
    /// On success: a guest that runs has a protector; one that another host has taken over was ended.
    /// On failure: as it was.
    Monitor(OcfMonitor),
    /// Print lines for crm and pcs: the resource, with what the VM takes of a node.
    ///
    /// Needs: the definition.
    /// On success: nothing is changed; the lines can be pasted.
    /// On failure: what is wrong with the definition is named.
    ShowConfig(OcfResource),
}

/// A VM as a resource, the same on each node.
#[derive(Debug, Args)]
pub struct OcfResource {
    /// The VM.
    pub name: Name,
    /// Its definition [default: /etc/rekindle/NAME.toml].
    #[arg(long, value_name = "FILE")]
    pub definition: Option<PathBuf>,
    /// Where its checkpoints are: a directory, or tls://HOST:PORT/NAME.
    #[arg(long, value_name = "URL")]
    pub store: StoreUrl,
    #[command(flatten)]
    pub tls: Tls,
    /// Time from one checkpoint to the next.
    #[arg(long, default_value = "2s", value_name = "TIME")]
    pub every: Span,
    /// What is copied when: as for `protect`.
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<Policy>,
    /// How many checkpoints are kept.
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep: u32,
    /// For a VM that writes disks that no server of Rekindle's has: a restored guest may find them newer than its memory.
    #[arg(long, value_enum, value_name = "RULE")]
    pub disk: Option<DiskRule>,
    /// A command that snapshots the disks; it runs while the guest is stopped.
    #[arg(long, value_name = "COMMAND", conflicts_with = "disk")]
    pub disk_hook: Option<String>,
    /// Hold what the guest sends until the checkpoint that covers it counts: as for `protect`.
    #[arg(long)]
    pub output_commit: bool,
    /// How long it may take.
    #[arg(long, default_value = "20s", value_name = "TIME")]
    pub within: Span,
}

#[derive(Debug, Args)]
pub struct OcfStop {
    #[command(flatten)]
    pub resource: OcfResource,
    /// How the guest is stopped.
    #[arg(long, value_enum, value_name = "HOW", default_value = "suspend")]
    pub how: HowStop,
    /// Only show what would be stopped. Nothing is changed.
    #[arg(long)]
    pub dry_run: bool,
}

/// How a guest is stopped.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum HowStop {
    /// A last checkpoint, then off: at its next start it goes on.
    Suspend,
    /// It is asked to shut down: at its next start it is booted.
    Shutdown,
}

#[derive(Debug, Args)]
pub struct OcfMigrate {
    #[command(flatten)]
    pub resource: OcfResource,
    #[command(flatten)]
    pub far: Far,
    /// Only check, here and on the other node, whether it can be moved. Nothing is changed.
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct OcfMonitor {
    #[command(flatten)]
    pub resource: OcfResource,
    /// Ask its service too, as its definition's `probe` says.
    #[arg(long)]
    pub deep: bool,
}
