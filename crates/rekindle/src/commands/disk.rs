//! `rekindle disk`: runs the server of a disk, and controls running servers over their control sockets.
//!
//! A server has two sockets: QEMU connects to one for the guest's requests, and these commands to the *control socket*.
//! The server's state has words of its own:
//!
//! - *redo log*: the writes of a guest of which checkpoints are taken, before they are merged into the image. Each
//!   checkpoint ends an *epoch* of writes, so the disk of a checkpoint is the image and the epochs up to its own. A
//!   disk that was *rewound* to an epoch still has later ones; the guest's first write discards them.
//! - *mapped blocks*: blocks that the guest has cached in its memory, as far as the server knows (the *block map*).
//! - *retained cache*: the guest's memory, kept after its end, from which the server serves the mapped blocks to the
//!   guest's next boot, at most for `--attic-keep`.
//! - *filling*: a guest that was restored from a checkpoint runs while its memory is still being loaded.

use crate::cli::{Disk, DiskAt, DiskLimit, DiskMerge, DiskRate, DiskServe};
use crate::output::{Output, bytes};
use anyhow::{Context, Result, bail};
use rekindle_disk::control::{Control, ControlCommand};
use rekindle_disk::engine::Settings;
use rekindle_disk::engine::command::Status;
use rekindle_disk::image::OpenMode;
use rekindle_disk::keeper::LogOptions;
use rekindle_disk::limit::Limits;
use rekindle_disk::redo::offline::{default_directory, inspect_log, merge_all};
use rekindle_disk::redo::recover::DiskVersion;
use rekindle_disk::server::{Service, serve};
use rekindle_vm::disks;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::{self, Host};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

/// Size of the blocks of a cache.
const BLOCK_BYTES: u64 = 4096;
/// How long to wait for a server to merge a log while it serves its guest.
const MERGE_TIMEOUT: Duration = Duration::from_secs(3600);

pub fn run(output: &Output, disk: Disk) -> Result<ExitCode> {
    match disk {
        Disk::Serve(arguments) => serve_disk(output, arguments)?,
        Disk::Status(at) => {
            let status = connect(&at)?.status()?;
            output.result(&status, describe(&status))?;
        }
        Disk::Limit(DiskLimit { at, rate }) => {
            let Limits { bps, iops } = limits(&rate);
            connect(&at)?.ask::<()>(&ControlCommand::SetLimits { bps, iops })?;
            output.result(&json!({"bps": bps, "iops": iops}), "done")?;
        }
        Disk::Resize(at) => {
            let length: u64 = connect(&at)?.ask(&ControlCommand::UpdateLength {})?;
            output.result(&json!({"bytes": length}), format!("the disk has {} now", bytes(length)))?;
        }
        Disk::Keep(at) => {
            // No claim: no other server uses this guest's memory, so the frames that this one does not need are free.
            let blocks: u64 = connect(&at)?.ask(&ControlCommand::KeepCache { claim: None })?;
            let text = format!("{} are retained for the guest's next boot", bytes(blocks * BLOCK_BYTES));
            output.result(&json!({"blocks": blocks}), text)?;
        }
        Disk::Drop(at) => {
            connect(&at)?.ask::<()>(&ControlCommand::DropCache {})?;
            output.result(&json!({}), "done")?;
        }
        Disk::Merge(arguments) => merge(output, &arguments)?,
        Disk::End(at) => {
            connect(&at)?.ask::<()>(&ControlCommand::End {})?;
            output.result(&json!({}), "done")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Merges a disk's redo log: through its server if `image` is the server's control socket.
fn merge(output: &Output, arguments: &DiskMerge) -> Result<()> {
    let image = &arguments.image;
    let is_served = fs::metadata(image).is_ok_and(|metadata| metadata.file_type().is_socket());
    let directory = arguments.redo.clone().unwrap_or_else(|| default_directory(image));
    let renamed_from = arguments.image_renamed_from.as_deref();
    match (arguments.dry_run, is_served) {
        (true, true) => {
            let redo_bytes = Control::connect(image)?.status()?.redo.map(|redo| redo.bytes);
            let amount = redo_bytes.map(|redo_bytes| format!("{} of redo log", bytes(redo_bytes)));
            print_planned_merge(output, image, &json!({"dry_run": true, "redo_bytes": redo_bytes}), amount)
        }
        (true, false) => {
            fs::metadata(image).with_context(|| format!("disk image {}", image.display()))?;
            let log = inspect_log(image, &directory, u64::MAX, renamed_from)?;
            let writes = log.map(|log| log.writes);
            let amount = writes.map(|writes| format!("{writes} writes of redo log"));
            print_planned_merge(output, image, &json!({"dry_run": true, "writes": writes}), amount)
        }
        (false, true) => {
            Control::connect(image)?.end_epochs(MERGE_TIMEOUT)?;
            Ok(output.result(&json!({}), "merged; the disk no longer has a redo log")?)
        }
        (false, false) => {
            let epochs = merge_all(image, &directory, !arguments.buffered, renamed_from)?;
            let text = match epochs {
                Some(epochs) => format!("merged {epochs} epochs; {} is the newest disk", image.display()),
                None => format!("{} has no redo log", image.display()),
            };
            Ok(output.result(&json!({"epochs": epochs}), text)?)
        }
    }
}

/// Prints how much redo log `merge` would merge into the image. `amount`: `None` if there is no log.
fn print_planned_merge(output: &Output, image: &Path, value: &Value, amount: Option<String>) -> Result<()> {
    let text = match amount {
        Some(amount) => format!("would merge {amount}; the disks of its checkpoints could no longer be restored"),
        None => "has no redo log".to_owned(),
    };
    Ok(output.result(value, format!("{}: {text}\nnothing was changed", image.display()))?)
}

/// Connects to the server of a disk: `VM`, `VM/DISK`, or the path of its control socket.
fn connect(DiskAt { disk }: &DiskAt) -> Result<Control> {
    let is_name = !disk.is_absolute() && !disk.starts_with(".") && !disk.starts_with("..") && !disk.exists();
    let Some(vm_and_disk) = disk.to_str().filter(|_| is_name) else { return Ok(Control::connect(disk)?) };
    let (name, id) = vm_and_disk.split_once('/').map_or((vm_and_disk, None), |(name, id)| (name, Some(id)));
    let rundir = RunDir::new(&Host::open()?.root, name);
    let state = State::read(&rundir)?.ok_or_else(|| LifeError::Unknown { name: name.into() })?;
    let served: Vec<_> = disks::served(&state.hardware).map(|disk| disk.id.as_str()).collect();
    let served_id = match (id, served.as_slice()) {
        (Some(id), _) => served.iter().find(|disk| **disk == id).copied(),
        (None, [only]) => Some(*only),
        (None, _) => None,
    };
    match served_id {
        Some(id) => Ok(Control::connect(&disks::control_socket(&rundir, id))?),
        None if served.is_empty() => {
            bail!("no disk of {name} has a server; to start one, set `server = true` in its [[disk]]")
        }
        None => bail!("which disk of {name}? These have servers: {name}/{}", served.join(&format!(", {name}/"))),
    }
}

fn limits(rate: &DiskRate) -> Limits {
    Limits { bps: rate.bps.map(|bps| bps.as_u64()), iops: rate.iops }
}

/// Serves a disk until a signal or `rekindle disk end` ends the server.
fn serve_disk(output: &Output, arguments: DiskServe) -> Result<()> {
    let confine = host::confines_helpers()?;
    let started = json!({"socket": &arguments.socket, "control": control_path(&arguments), "image": &arguments.image});
    let text = format!("serving {} at {}", arguments.image.display(), arguments.socket.display());
    let service = service(arguments, confine);
    // A signal ends the server as `rekindle disk end` does, after all requests are done.
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let signals_handle = signals.handle();
    let mut signal_thread = None;
    let served = serve(service, |stopper| {
        // Not earlier: this thread is confined, too.
        signal_thread = Some(thread::spawn(move || {
            if signals.forever().next().is_some()
                && let Err(e) = stopper.stop()
            {
                tracing::debug!("the server has already ended: {e}");
            }
        }));
        if let Err(e) = output.result(&started, text) {
            tracing::debug!("cannot write to standard output: {e}");
        }
    });
    signals_handle.close();
    let _ = signal_thread.map(thread::JoinHandle::join);
    Ok(served?)
}

fn control_path(arguments: &DiskServe) -> PathBuf {
    arguments.control.clone().unwrap_or_else(|| {
        let mut path = arguments.socket.clone().into_os_string();
        path.push(".control");
        PathBuf::from(path)
    })
}

/// Returns the version of the disk to serve: the newest, or that at the end of an epoch, with or without the writes of a
/// guest that has resumed from there, whose first epoch is `since`.
fn version(arguments: &DiskServe) -> DiskVersion {
    match (arguments.epoch, arguments.disk_id, arguments.since) {
        (Some(epoch), Some(disk), Some(first)) => DiskVersion::Since { epoch, disk, first },
        (Some(epoch), Some(disk), None) => DiskVersion::Epoch { epoch, disk },
        // The command line requires a disk's identity with an epoch, and an epoch with `since`.
        _ => DiskVersion::Newest,
    }
}

/// Converts the arguments.
fn service(arguments: DiskServe, confine: bool) -> Service {
    let version = version(&arguments);
    let control = control_path(&arguments);
    let settings = Settings {
        serial: arguments.serial,
        limits: limits(&arguments.rate),
        has_block_map: !arguments.no_map,
        queues: arguments.queues,
        retain_for: arguments.attic_keep.map(|keep| Duration::from_millis(keep.as_millis())),
        is_filling: Arc::new(AtomicBool::new(arguments.filling)),
    };
    Service {
        image: arguments.image,
        mode: OpenMode { readonly: arguments.readonly, direct: !arguments.buffered },
        socket: arguments.socket,
        user: arguments.user,
        control,
        redo: LogOptions {
            directory: arguments.redo,
            version,
            limit: arguments.redo_limit.map(|limit| limit.as_u64()),
            image_name: None,
            renamed_from: arguments.image_renamed_from,
        },
        settings,
        is_awaiting_epoch: arguments.wait,
        confine,
    }
}

fn describe(status: &Status) -> String {
    let use_state = if status.active { "in use" } else { "not in use" };
    let mut text = format!(
        "{}, {use_state}, {} requests in progress; {} of its guest's cache are mapped ({} for the map)",
        bytes(status.bytes),
        status.requests_in_progress,
        bytes(status.mapped_blocks as u64 * BLOCK_BYTES),
        bytes(status.map_bytes as u64)
    );
    text += &describe_retained_cache(status);
    text += &describe_redo_log(status);
    if status.waits {
        text += "; waits for a restore, which names the disk's epoch";
    }
    for broken_queue in &status.broken {
        text += &format!(
            "; queue {} has stopped with an error until the guest resets the disk: {}",
            broken_queue.queue, broken_queue.why
        );
    }
    if status.unchecked {
        text += "; BUILT WITH unchecked-attic: blocks of the retained cache are served UNCHECKED and damage this guest";
    }
    text
}

/// Describes the retained cache, or the last one, which is empty now; empty if there was none.
fn describe_retained_cache(status: &Status) -> String {
    let (remaining_blocks, counts) = match (status.retained, status.emptied) {
        (Some((blocks, counts)), _) => (blocks as u64, counts),
        (None, Some(final_counts)) => (0, final_counts),
        (None, None) => return String::new(),
    };
    format!(
        "; retained cache: {} left, {} served, {} different from the disk, {} dropped \
         because the guest needed the memory",
        bytes(remaining_blocks * BLOCK_BYTES),
        bytes(counts.served * BLOCK_BYTES),
        bytes(counts.refused * BLOCK_BYTES),
        bytes(counts.dropped * BLOCK_BYTES)
    )
}

/// Describes the redo log; empty if the disk has none.
fn describe_redo_log(status: &Status) -> String {
    let Some(redo) = &status.redo else { return String::new() };
    let mut text = format!(
        "; disk {}, in epoch {}, merged up to {}; {} of redo log, of at most {}",
        redo.disk,
        redo.epoch,
        redo.merged,
        bytes(redo.bytes),
        bytes(redo.limit)
    );
    if redo.rewound {
        text += "; at a checkpoint: later epochs are discarded at the first write";
    }
    if let Some(why) = &redo.waiting {
        text += &format!("\nwrites wait: {why}");
    }
    if let Some(error) = &redo.failed {
        text += &format!("\n{error}");
    }
    text
}
