//! `rekindle store`: fail-over images.

use clap::{Args, Subcommand};
use rekindle_store::StoreUrl;
use rekindle_vm::definition::{Name, Span};
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub enum Store {
    /// Create a store for the checkpoints of one VM.
    ///
    /// It belongs to the first VM that is protected into it. On a server (`rekindle store serve`) it is created there.
    ///
    /// Needs: a directory that is empty or does not exist.
    /// On success: there is a store, without checkpoints.
    /// On failure: exit status 1; a store that exists is not changed.
    #[command(after_help = "\
Examples:
  rekindle store init /srv/checkpoints/web
  rekindle store init tls://backup:7001/web --cert host.pem --key host.key --ca ca.pem")]
    Init(StoreAt),
    /// List the checkpoints of a store, its owner, and what it takes on the disk.
    Ls(StoreAt),
    /// Look at every byte of a store that counts, and name what is bad.
    ///
    /// Needs: to read the store. It may be in use.
    /// On success: all is well.
    /// On failure: exit status 1, with each bad thing named; nothing was changed.
    Verify(StoreAt),
    /// Free all room of a store that can be freed.
    ///
    /// Needs: that nothing protects a VM into it: this becomes its owner.
    /// On success: hardly more than the kept checkpoints is left.
    /// On failure: the store is as it was.
    Compact(StoreAt),
    /// Write a checkpoint as a stream that stock QEMU loads with -incoming.
    ///
    /// Needs: to read the store.
    /// On success: the file is there, whole.
    /// On failure: there is no file; what went to standard output is no whole stream, and no QEMU takes it for one.
    Export(StoreExport),
    /// Read a stream that was exported, or saved by QEMU, into a store as its next checkpoint.
    ///
    /// Needs: that nothing protects a VM into it: this becomes its owner.
    /// On success: the checkpoint can be restored.
    /// On failure: the store is as it was.
    Import(StoreImport),
    /// Keep stores for other hosts, at tls://THIS-HOST:PORT/NAME.
    ///
    /// Needs: a certificate, and the authority that has signed those of the clients.
    /// On success: serves until it is interrupted.
    Serve(StoreServe),
}

/// Who we are to a server.
#[derive(Debug, Args)]
pub struct Tls {
    /// Our certificate, for a store on a server (PEM).
    #[arg(long, value_name = "FILE", requires_all = ["key", "ca"])]
    pub cert: Option<PathBuf>,
    /// Its key (PEM).
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub key: Option<PathBuf>,
    /// The authority that has signed the server's certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub ca: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct StoreAt {
    /// The store: a directory, or tls://HOST:PORT/NAME.
    pub store: StoreUrl,
    #[command(flatten)]
    pub tls: Tls,
}

#[derive(Debug, Args)]
pub struct StoreExport {
    #[command(flatten)]
    pub from: StoreAt,
    /// Number of the checkpoint [default: the newest].
    #[arg(long, value_name = "N")]
    pub at: Option<u64>,
    /// The file to be made; `-` for standard output.
    #[arg(long, short, value_name = "FILE", default_value = "-")]
    pub output: PathBuf,
    /// Machine type, e.g. pc-q35-10.0: needed by a QEMU without `-global migration.send-configuration=off`.
    #[arg(long, value_name = "TYPE")]
    pub machine: Option<String>,
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
    /// Name of the VM, for a new store.
    #[arg(long)]
    pub name: Option<Name>,
    /// Its UUID [default: a new one].
    #[arg(long, requires = "name")]
    pub uuid: Option<uuid::Uuid>,
    /// How many checkpoints are kept.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub keep: u32,
}

#[derive(Debug, Args)]
pub struct StoreServe {
    /// Where to listen.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: String,
    /// The directory of the stores.
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
    /// The server's certificate (PEM).
    #[arg(long, value_name = "FILE")]
    pub cert: PathBuf,
    /// Its key (PEM).
    #[arg(long, value_name = "FILE")]
    pub key: PathBuf,
    /// The authority that has signed the clients' certificates (PEM).
    #[arg(long, value_name = "FILE")]
    pub client_ca: PathBuf,
    /// How long a client may be idle.
    #[arg(long, value_name = "TIME", default_value = "10m")]
    pub idle: Span,
}
