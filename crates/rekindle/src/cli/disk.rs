//! `rekindle disk`: the server of a guest's disk.

use clap::{Args, Subcommand};
use rekindle_vm::definition::{Bytes, Span};
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub enum Disk {
    /// Serve a raw image or a block device to a QEMU, by vhost-user.
    ///
    /// QEMU is given it by: -chardev socket,id=d,path=SOCKET,reconnect-ms=100 (before QEMU 9.2: reconnect=1) -device vhost-user-blk-pci,chardev=d, and memory that is
    /// shared (memory-backend-file or memory-backend-memfd with share=on).
    ///
    /// Needs: an image that nobody else has open; io_uring.
    /// On success: serves until it is interrupted or told to end; what the guest has flushed is on the disk.
    /// On failure: exit status 1; the image is as it was.
    Serve(DiskServe),
    /// Tell what a server does, and what it knows of its guest's cache.
    Status(DiskAt),
    /// Hold a disk to a rate, or do not any more.
    Limit(DiskLimit),
    /// The image has become longer: let the guest see it when it looks again.
    Resize(DiskAt),
    /// The guest has ended: use its memory as a cache for the next one.
    ///
    /// Needs: that no QEMU uses the disk just now.
    /// On success: blocks that the guest still had are served from there, if they are what is on the disk.
    /// On failure: the next guest reads everything from the disk.
    Keep(DiskAt),
    /// Use the former guest's memory no more, and give it back.
    Drop(DiskAt),
    /// Merge the redo log of a disk into its image.
    ///
    /// Needs: the control socket of the disk's server, or the image, which nobody has open then.
    /// On success: the image is the newest disk, and has no log; the disk of no checkpoint is to be had any more.
    /// On failure: exit status 1; the log is still there, and can be merged again.
    Merge(DiskMerge),
    /// End a server.
    End(DiskAt),
}

#[derive(Debug, Args)]
pub struct DiskServe {
    /// The image: a raw file or a block device.
    pub image: PathBuf,
    /// The socket for QEMU.
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// The socket for the other commands here [default: the one for QEMU, with .control behind it].
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Refuse writes.
    #[arg(long)]
    pub readonly: bool,
    /// The serial number that the guest sees, at most 20 bytes.
    #[arg(long, default_value = "")]
    pub serial: String,
    /// Queues that the guest may have.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub queues: u16,
    /// Through the host's page cache.
    #[arg(long)]
    pub buffered: bool,
    /// Do not remember where blocks are: a reboot finds a cold cache.
    #[arg(long)]
    pub no_map: bool,
    /// Give the former guest's memory up after so long [default: when the guest needs the room].
    #[arg(long, value_name = "TIME")]
    pub attic_keep: Option<Span>,
    /// A restore still brings the guest's memory: wait for pages that are missing.
    #[arg(long, hide = true)]
    pub filling: bool,
    /// Only look at the image, until `have` on the control socket says as of which checkpoint it is to be served.
    #[arg(long, hide = true, conflicts_with = "epoch")]
    pub wait: bool,
    #[command(flatten)]
    pub rate: DiskRate,
    /// The directory of its redo log, of this disk alone: empty, or not there yet [default: IMAGE.redo; a block device has none].
    #[arg(long, value_name = "DIR")]
    pub redo: Option<PathBuf>,
    /// Bytes that its redo log may take [default: a quarter of the disk, at least 4G].
    #[arg(long, value_name = "BYTES")]
    pub redo_limit: Option<Bytes>,
    /// Serve the disk of a checkpoint: of its redo log only what was written up to this epoch. The rest is given up when the guest writes.
    #[arg(long, value_name = "N", requires = "disk_id")]
    pub epoch: Option<u64>,
    /// The guest went on from that checkpoint, and what it wrote is of this epoch and later ones: all of it is to be had.
    #[arg(long, value_name = "N", requires = "epoch", hide = true)]
    pub since: Option<u64>,
    /// The identity that the disk must have.
    #[arg(long, value_name = "UUID", requires = "epoch")]
    pub disk_id: Option<uuid::Uuid>,
}

#[derive(Debug, Args)]
pub struct DiskMerge {
    /// The image, or the control socket of its server.
    #[arg(value_name = "IMAGE|CONTROL")]
    pub image: PathBuf,
    /// The directory of its redo log [default: IMAGE.redo].
    #[arg(long, value_name = "DIR")]
    pub redo: Option<PathBuf>,
    /// Only show what would be merged. Nothing is changed.
    #[arg(long)]
    pub dry_run: bool,
    /// Through the host's page cache.
    #[arg(long)]
    pub buffered: bool,
}

#[derive(Debug, Args)]
pub struct DiskRate {
    /// Bytes in a second, e.g. 90M [default: no limit].
    #[arg(long, value_name = "BYTES")]
    pub bps: Option<Bytes>,
    /// Requests in a second [default: no limit].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub iops: Option<u64>,
}

#[derive(Debug, Args)]
pub struct DiskAt {
    /// The disk of a VM, NAME/ID (NAME where only one has a server), or the path of the server's control socket.
    #[arg(value_name = "NAME[/ID]|CONTROL")]
    pub disk: PathBuf,
}

#[derive(Debug, Args)]
pub struct DiskLimit {
    #[command(flatten)]
    pub at: DiskAt,
    #[command(flatten)]
    pub rate: DiskRate,
}
