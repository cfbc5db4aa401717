//! Arguments of `rekindle move`, and how another host is reached.

use super::store::StoreCredentials;
use clap::Args;
use rekindle_store::StoreUrl;
use rekindle_vm::definition::Name;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct Move {
    /// The VM: one that Rekindle runs, or an attached domain of libvirt.
    pub name: Name,
    #[command(flatten)]
    pub remote: RemoteHost,
    /// The store for its checkpoints: a directory that both hosts have, or s3://BUCKET/PREFIX.
    #[arg(long, value_name = "URL")]
    pub store: StoreUrl,
    /// Create the store if there is none.
    #[arg(long)]
    pub create_store: bool,
    #[command(flatten)]
    pub credentials: StoreCredentials,
    /// A definition file on the other host to build the VM from [default: as on this host].
    #[arg(long, value_name = "FILE")]
    pub definition: Option<PathBuf>,
    /// The QEMU on the other host to use instead of the one in the definition.
    #[arg(long, value_name = "PATH")]
    pub qemu: Option<PathBuf>,
    /// For a domain of libvirt: the connection URI of libvirt on the other host [default: as on this host].
    #[arg(long, value_name = "URI", conflicts_with_all = ["definition", "qemu"])]
    pub connect: Option<String>,
    /// Required for a domain of libvirt, which is new: see the limits in docs/move.md.
    #[arg(long)]
    pub preview: bool,
    /// Only check, here and on the other host, whether the VM can be moved; change nothing.
    #[arg(long)]
    pub dry_run: bool,
}

/// How another host is reached.
#[derive(Debug, Args)]
pub struct RemoteHost {
    /// The other host, as an ssh destination.
    #[arg(long, value_name = "HOST")]
    pub to: String,
    /// The command that connects to the other host, with its options.
    #[arg(long, default_value = "ssh", value_name = "COMMAND")]
    pub ssh: String,
    /// The path of rekindle on the other host.
    #[arg(long, default_value = "rekindle", value_name = "PATH")]
    pub rekindle: String,
}
