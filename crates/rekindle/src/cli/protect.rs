//! Arguments of `rekindle protect`, `restore` and `pager`.

use super::settings::{COMMAND_LINE_ONLY, Settings};
use super::store::StoreCredentials;
use clap::{Args, ValueEnum};
use rekindle_protect::policy::Policy;
use rekindle_store::StoreUrl;
use rekindle_vm::definition::{Name, Span};
use std::path::PathBuf;

/// How checkpoints are taken: by `protect`, and by the protector of a cluster's resource.
#[derive(Debug, Args)]
pub struct CheckpointOptions {
    /// The store for the checkpoints: a directory, or s3://BUCKET/PREFIX. `rekindle store init` creates one.
    #[arg(long, value_name = "URL")]
    pub store: StoreUrl,
    #[command(flatten)]
    pub credentials: StoreCredentials,
    /// Time from one checkpoint to the next.
    #[arg(long, default_value = "2s", value_name = "TIME")]
    pub every: Span,
    /// When pages are copied: basic (while the guest is stopped), cow (after it resumes) or precopy (before it stops)
    /// [default: precopy; cow for a VM with O_DIRECT disks].
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<Policy>,
    /// The number of checkpoints to keep.
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep: u32,
    /// A command that takes a snapshot of the disks; it runs while the guest is stopped.
    #[arg(long, value_name = "COMMAND", conflicts_with = "disk")]
    pub disk_hook: Option<String>,
    /// Hold network output until the checkpoint that covers it is committed: clients never see what a fail-over undoes,
    /// but each answer of the guest is delayed.
    #[arg(long)]
    pub output_commit: bool,
}

#[derive(Debug, Args)]
pub struct Protect {
    /// The VM.
    pub name: Name,
    /// The file with options that are not given here [default: /etc/rekindle/protect/NAME.toml, if it exists].
    #[arg(long, value_name = "FILE", help_heading = COMMAND_LINE_ONLY)]
    pub settings: Option<PathBuf>,
    /// Read no file with options.
    #[arg(long, conflicts_with_all = ["settings", "install_service"], help_heading = COMMAND_LINE_ONLY)]
    pub no_settings: bool,
    /// Write these options to the settings file, and protect the VM by the service rekindle-protect@NAME from now on.
    #[arg(long, help_heading = COMMAND_LINE_ONLY, conflicts_with_all = ["settings", "count", "abandon_old_checkpoints"])]
    pub install_service: bool,
    /// Install the service also if the settings file names another store.
    #[arg(long, requires = "install_service", help_heading = COMMAND_LINE_ONLY)]
    pub force: bool,
    /// Only check whether the VM can be protected, and measure for 10 s how much memory it changes. With
    /// --install-service: only show what would be written and run. Changes nothing.
    #[arg(long, conflicts_with_all = ["count", "abandon_old_checkpoints"], help_heading = COMMAND_LINE_ONLY)]
    pub dry_run: bool,
    /// Create the store if there is none.
    #[arg(long, help_heading = COMMAND_LINE_ONLY)]
    pub create_store: bool,
    /// Start a new store in place of the one that this host wrote and that no longer exists (with --create-store,
    /// unless there is a new one). The old checkpoints must not be restored later.
    #[arg(long, help_heading = COMMAND_LINE_ONLY)]
    pub abandon_old_checkpoints: bool,
    #[command(flatten)]
    pub checkpoints: CheckpointOptions,
    /// Warn when the newest checkpoint is older than this.
    #[arg(long, value_name = "TIME")]
    pub max_lag: Option<Span>,
    /// How to protect a VM that writes to disks that Rekindle does not serve.
    #[arg(long, value_enum, value_name = "RULE")]
    pub disk: Option<DiskRule>,
    /// The directory for the overlays of --disk overlays [default: IMAGE.rekindle next to each image].
    #[arg(long, value_name = "DIR", requires = "disk")]
    pub overlay_dir: Option<PathBuf>,
    /// Stop after this many checkpoints, and remove Rekindle's changes from QEMU, except overlays.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = COMMAND_LINE_ONLY)]
    pub count: Option<u64>,
    /// At the end, compare all of the guest's memory with the newest checkpoint while the guest is stopped (takes
    /// seconds per GiB).
    #[arg(long, requires = "count", help_heading = COMMAND_LINE_ONLY)]
    pub compare: bool,
    /// At the end, take one more checkpoint and leave the guest stopped: for a caller that then ends it.
    #[arg(long, requires = "count", conflicts_with = "compare", hide = true, help_heading = COMMAND_LINE_ONLY)]
    pub stay: bool,
    /// Where the options come from, and what `--install-service` writes.
    #[arg(skip)]
    pub merged: Settings,
}

/// How to treat disks that a protected guest writes and Rekindle does not serve.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum DiskRule {
    /// After a restore they are as after a power failure, and can be newer than the guest's memory.
    CrashConsistent,
    /// Each checkpoint includes them: QEMU or libvirt puts an overlay on each disk. Only for an attached QEMU or
    /// domain, and for a VM that was restored from one.
    Overlays,
}

#[derive(Debug, Args)]
pub struct Restore {
    /// The VM.
    pub name: Name,
    /// The store of its checkpoints: a directory, or s3://BUCKET/PREFIX.
    #[arg(long, value_name = "URL")]
    pub store: StoreUrl,
    #[command(flatten)]
    pub credentials: StoreCredentials,
    /// The number of the checkpoint [default: the newest].
    #[arg(long, value_name = "N")]
    pub at: Option<u64>,
    /// Reject the store if its owner epoch is lower, besides what this host knows.
    #[arg(long, value_name = "N")]
    pub at_least_epoch: Option<u64>,
    /// Reject the store if its newest checkpoint has a lower number, besides what this host knows.
    #[arg(long, value_name = "N")]
    pub at_least_checkpoint: Option<u64>,
    /// Load all memory before the guest resumes.
    #[arg(long)]
    pub eager: bool,
    /// Hold network output until `rekindle protect --output-commit` releases it.
    #[arg(long, conflicts_with = "prepare")]
    pub output_commit: bool,
    /// Only start a QEMU that waits with empty RAM, so that the next restore is faster.
    #[arg(long, conflicts_with_all = ["at", "eager"])]
    pub prepare: bool,
    /// A definition to build the VM from [default: as on the host of the checkpoint].
    #[arg(long, value_name = "FILE")]
    pub definition: Option<PathBuf>,
    /// The QEMU to use instead of the one in the definition.
    #[arg(long, value_name = "PATH")]
    pub qemu: Option<PathBuf>,
    /// Restore a domain that was attached with `--libvirt` into libvirt, which then manages it.
    #[arg(long, requires = "preview", conflicts_with_all = ["output_commit", "prepare", "definition", "qemu"])]
    pub into_libvirt: bool,
    /// libvirt's connection URI [default: libvirt chooses].
    #[arg(long, value_name = "URI", requires = "into_libvirt")]
    pub connect: Option<String>,
    /// Required with `--into-libvirt`, which is new: see its limits in docs/protect-attached.md.
    #[arg(long)]
    pub preview: bool,
}

#[derive(Debug, Args)]
pub struct Pager {
    /// The VM.
    pub name: Name,
    /// Report on standard input, a socket, when ready, and wait for the previous pager to end.
    #[arg(long, hide = true)]
    pub hand_over: bool,
}
