//! Arguments of `rekindle disk`: the server of a guest's disk.

use clap::{Args, Subcommand};
use rekindle_vm::definition::{Bytes, Span};
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub enum Disk {
    /// Serve a raw image or a block device to a QEMU over vhost-user.
    ///
    /// Options for QEMU: -chardev socket,id=d,path=SOCKET,reconnect-ms=100 (before QEMU 9.2: reconnect=1) -device
    /// vhost-user-blk-pci,chardev=d, and shared memory (memory-backend-file or memory-backend-memfd with share=on).
    ///
    /// Needs: an image that no other process has open; io_uring.
    ///
    /// On success: the server runs until it is interrupted or `rekindle disk end` ends it; flushed data is on the disk.
    ///
    /// On failure: exit status 1; the image is unchanged.
    #[command(after_help = "\
Example:
  rekindle disk serve disk.raw --socket /run/d.sock")]
    Serve(DiskServe),
    /// Show the state of a disk's server and of its retained cache.
    #[command(after_help = "\
Example:
  rekindle disk status web/root")]
    Status(DiskAt),
    /// Set or clear a disk's rate limits.
    ///
    /// A limit that is not given is cleared.
    #[command(after_help = "\
Examples:
  rekindle disk limit web/root --bps 90M --iops 2000
  rekindle disk limit web/root")]
    Limit(DiskLimit),
    /// Announce the new size of a longer image to the guest.
    #[command(after_help = "\
Example:
  truncate -s 20G web.raw && rekindle disk resize web/root")]
    Resize(DiskAt),
    /// Keep the memory of a guest that has ended as a cache for its next boot.
    ///
    /// Needs: no QEMU that uses the disk.
    ///
    /// On success: blocks that the guest had cached are served from its memory if they match the disk.
    ///
    /// On failure: the next boot reads everything from the disk.
    #[command(after_help = "\
Example:
  rekindle disk keep /run/d.sock.control")]
    Keep(DiskAt),
    /// Discard the retained cache and free its memory.
    #[command(after_help = "\
Example:
  rekindle disk drop web/root")]
    Drop(DiskAt),
    /// Merge the redo log of a disk into its image.
    ///
    /// Needs: the control socket of the disk's server, or an image that no process has open.
    ///
    /// On success: the image is the newest disk and has no log; the disks of checkpoints are no longer available.
    ///
    /// On failure: exit status 1; the log still exists, and the command can be repeated.
    #[command(after_help = "\
Examples:
  rekindle disk merge web.raw --dry-run
  rekindle disk merge web.raw
  rekindle disk merge new.raw --redo old.raw.redo --image-renamed-from old.raw")]
    Merge(DiskMerge),
    /// End a disk's server.
    #[command(after_help = "\
Example:
  rekindle disk end /run/d.sock.control")]
    End(DiskAt),
}

#[derive(Debug, Args)]
pub struct DiskServe {
    /// The image: a raw file or a block device.
    pub image: PathBuf,
    /// The socket for QEMU.
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// Run as the user with this number, whose group may connect to the socket for QEMU. Only for root.
    #[arg(long, value_name = "UID")]
    pub user: Option<u32>,
    /// The socket for the other `rekindle disk` commands [default: the one for QEMU, with .control appended].
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Reject writes.
    #[arg(long)]
    pub readonly: bool,
    /// The serial number that the guest sees, at most 20 bytes.
    #[arg(long, default_value = "")]
    pub serial: String,
    /// The maximum number of queues.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub queues: u16,
    /// Use the host's page cache.
    #[arg(long)]
    pub buffered: bool,
    /// Do not record which blocks the guest has cached: its cache is cold after a reboot.
    #[arg(long)]
    pub no_map: bool,
    /// Discard the retained cache after this time [default: when the guest needs the memory].
    #[arg(long, value_name = "TIME")]
    pub attic_keep: Option<Span>,
    /// A restore is still loading the guest's memory: wait for missing pages.
    #[arg(long, hide = true)]
    pub filling: bool,
    /// Only open the image; serve it once `have` on the control socket names the checkpoint.
    #[arg(long, hide = true, conflicts_with = "epoch")]
    pub wait: bool,
    #[command(flatten)]
    pub rate: DiskRate,
    /// The directory for the redo log of this disk only: empty or missing [default: IMAGE.redo; a block device has
    /// none].
    #[arg(long, value_name = "DIR")]
    pub redo: Option<PathBuf>,
    /// Maximum size of its redo log [default: a quarter of the disk, at least 4G].
    #[arg(long, value_name = "BYTES")]
    pub redo_limit: Option<Bytes>,
    /// The old file name of an image that was renamed: accept its redo log and record the new name.
    #[arg(long, value_name = "NAME")]
    pub image_renamed_from: Option<String>,
    /// Serve the disk of a checkpoint: the redo log up to this epoch. Later epochs are discarded when the guest writes.
    #[arg(long, value_name = "N", requires = "disk_id")]
    pub epoch: Option<u64>,
    /// The guest has resumed from that checkpoint and written this and later epochs, which are kept.
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
    /// The old file name of an image that was renamed: accept its redo log.
    #[arg(long, value_name = "NAME")]
    pub image_renamed_from: Option<String>,
    /// Only show what would be merged; change nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Use the host's page cache.
    #[arg(long)]
    pub buffered: bool,
}

#[derive(Debug, Args)]
pub struct DiskRate {
    /// Bytes per second, e.g. 90M [default: no limit].
    #[arg(long, value_name = "BYTES")]
    pub bps: Option<Bytes>,
    /// Requests per second [default: no limit].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub iops: Option<u64>,
}

#[derive(Debug, Args)]
pub struct DiskAt {
    /// The disk of a VM, NAME/ID (or NAME if it has only one served disk), or the path of the server's control socket.
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
