//! `rekindle move`.

use super::store::Tls;
use clap::Args;
use rekindle_store::StoreUrl;
use rekindle_vm::definition::Name;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct Move {
    /// The VM.
    pub name: Name,
    #[command(flatten)]
    pub far: Far,
    /// Where its checkpoints go, for both hosts: a directory that both have, or tls://HOST:PORT/NAME.
    #[arg(long, value_name = "URL")]
    pub store: StoreUrl,
    /// Create the store if there is none.
    #[arg(long)]
    pub create_store: bool,
    #[command(flatten)]
    pub tls: Tls,
    /// A file of the other host that says how the VM is to be built there [default: as here].
    #[arg(long, value_name = "FILE")]
    pub definition: Option<PathBuf>,
    /// The QEMU of the other host to use instead of the one that the definition names.
    #[arg(long, value_name = "PATH")]
    pub qemu: Option<PathBuf>,
    /// Only check, here and on the other host, whether it can be moved. Nothing is changed.
    #[arg(long)]
    pub dry_run: bool,
}

/// How another host is reached.
#[derive(Debug, Args)]
pub struct Far {
    /// The other host, as ssh knows it.
    #[arg(long, value_name = "HOST")]
    pub to: String,
    /// The command that leads to the other host, with its options.
    #[arg(long, default_value = "ssh", value_name = "COMMAND")]
    pub ssh: String,
    /// Rekindle on the other host.
    #[arg(long, default_value = "rekindle", value_name = "PATH")]
    pub rekindle: String,
}
