//! Arguments of `rekindle store`, and the credentials that all commands with a store have.

use super::NameOnly;
use clap::{Args, Subcommand};
use rekindle_store::StoreUrl;
use rekindle_vm::definition::Name;
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub enum Store {
    /// Create a store for the checkpoints of one VM.
    ///
    /// The store belongs to the first VM that is protected into it.
    ///
    /// Needs: a directory that is empty or does not exist.
    ///
    /// On success: the store exists and has no checkpoints.
    ///
    /// On failure: exit status 1; an existing store is not changed.
    #[command(after_help = "\
Examples:
  rekindle store init /srv/checkpoints/web
  rekindle store init s3://checkpoints/web --environment-file /etc/rekindle/web.env")]
    Init(StoreAt),
    /// Create a key for encrypted stores.
    ///
    /// Needs: no file of that name.
    ///
    /// On success: the file exists, and only its owner can read it.
    #[command(after_help = "\
Examples:
  rekindle store new-key /etc/rekindle/store.key
  rekindle store new-key | vault kv put secret/rekindle key=-")]
    NewKey(StoreNewKey),
    /// List the checkpoints of a store, its owner and its size on disk.
    #[command(after_help = "\
Example:
  rekindle store ls /srv/checkpoints/web")]
    Ls(StoreAt),
    /// Read all checkpoints of a store and report damage.
    ///
    /// Needs: read access to the store, which may be in use.
    ///
    /// On success: there is no damage.
    ///
    /// On failure: exit status 1; the output names each damaged part; nothing was changed.
    #[command(after_help = "\
Example:
  rekindle store verify /srv/checkpoints/web")]
    Verify(StoreAt),
    /// Free all space of a store that its checkpoints do not need.
    ///
    /// Needs: no VM that is being protected into it: this command becomes its owner.
    ///
    /// On success: the store takes little more than its kept checkpoints.
    ///
    /// On failure: the checkpoints are unchanged.
    #[command(after_help = "\
Example:
  rekindle store compact /srv/checkpoints/web")]
    Compact(StoreAt),
    /// Forget what this host knows of the store of a VM.
    ///
    /// Afterwards this host accepts any store of the VM: an older state of it, another one, and one without encryption.
    ///
    /// On success: the next restore or `rekindle protect` records the store again.
    #[command(after_help = "\
Example:
  rekindle store forget web")]
    Forget(NameOnly),
    /// Write a checkpoint as a stream that stock QEMU loads with -incoming.
    ///
    /// Needs: read access to the store.
    ///
    /// On success: the file is complete.
    ///
    /// On failure: there is no file; a partial stream on standard output is one that QEMU rejects.
    #[command(after_help = "\
Examples:
  rekindle store export /srv/checkpoints/web --output web.stream
  rekindle store export /srv/checkpoints/web --at 7 | zstd > web.stream.zst
  rekindle store export /srv/checkpoints/db --libvirt --output db.save")]
    Export(StoreExport),
    /// Import a stream that was exported, or saved by QEMU, as the next checkpoint of a store.
    ///
    /// Needs: no VM that is being protected into it: this command becomes its owner.
    ///
    /// On success: the checkpoint can be restored.
    ///
    /// On failure: the checkpoints are unchanged.
    #[command(after_help = "\
Example:
  rekindle store import /srv/checkpoints/db db.stream --create-store --name db")]
    Import(StoreImport),
}

/// What is needed to reach a store other than its address.
#[derive(Debug, Clone, Args)]
pub struct StoreCredentials {
    /// The keys of an encrypted store, in a file that only its owner can read (`rekindle store new-key FILE`).
    #[arg(long, value_name = "FILE", conflicts_with = "key_command")]
    pub key_file: Option<PathBuf>,
    /// A command that prints the keys of an encrypted store, for /bin/sh.
    #[arg(long, value_name = "COMMAND")]
    pub key_command: Option<String>,
    /// The variables of an object store (`AWS_...=value`), in a file that only its owner can read.
    #[arg(long, value_name = "FILE", env = "REKINDLE_ENVIRONMENT_FILE", hide_env_values = true)]
    pub environment_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct StoreAt {
    /// The store: a directory, or s3://BUCKET/PREFIX.
    pub store: StoreUrl,
    #[command(flatten)]
    pub credentials: StoreCredentials,
}

#[derive(Debug, Args)]
pub struct StoreNewKey {
    /// The file to create [default: write the key to standard output].
    pub file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct StoreExport {
    #[command(flatten)]
    pub from: StoreAt,
    /// The number of the checkpoint [default: the newest].
    #[arg(long, value_name = "N")]
    pub at: Option<u64>,
    /// The file to write; `-` for standard output.
    #[arg(long, short, value_name = "FILE", default_value = "-")]
    pub output: PathBuf,
    /// Machine type, e.g. pc-q35-10.0: required by a QEMU without `-global migration.send-configuration=off`.
    #[arg(long, value_name = "TYPE")]
    pub machine: Option<String>,
    /// Write libvirt's save image, for `virsh restore`: of a domain that was attached with `--libvirt`, and whose disks
    /// are not on overlays.
    #[arg(long, conflicts_with = "machine")]
    pub libvirt: bool,
}

#[derive(Debug, Args)]
pub struct StoreImport {
    #[command(flatten)]
    pub to: StoreAt,
    /// The stream; `-` for standard input.
    pub file: PathBuf,
    /// Create the store if there is none.
    #[arg(long, requires = "name")]
    pub create_store: bool,
    /// The name of the VM, for a new store.
    #[arg(long)]
    pub name: Option<Name>,
    /// Its UUID [default: a new one].
    #[arg(long, requires = "name")]
    pub uuid: Option<uuid::Uuid>,
    /// The number of checkpoints to keep.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub keep: u32,
}
