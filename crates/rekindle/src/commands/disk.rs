//! `rekindle disk`.

use crate::cli::{Disk, DiskAt, DiskLimit, DiskMerge, DiskRate, DiskServe};
use crate::output::{Output, bytes};
use anyhow::{Context, Result, bail};
use rekindle_disk::control::{Control, ControlCommand, ControlError};
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
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use serde_json::json;
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

/// How long to wait for a server to merge a log while it serves its guest.
const MERGE_TIMEOUT: Duration = Duration::from_secs(3600);

pub fn run(output: &Output, disk: Disk) -> Result<ExitCode> {
    match disk {
        Disk::Serve(arguments) => return serve_disk(output, arguments),
        Disk::Status(at) => {
            let status = control(&at)?.status()?;
            output.result(&status, draw(&status))?;
        }
        Disk::Limit(DiskLimit { at, rate }) => {
            let Limits { bps, iops } = limits(&rate);
            control(&at)?.ask::<()>(&ControlCommand::SetLimits { bps, iops })?;
            output.result(&json!({"bps": bps, "iops": iops}), "done")?;
        }
        Disk::Resize(at) => {
            let length: u64 = control(&at)?.ask(&ControlCommand::UpdateLength {})?;
            output.result(&json!({"bytes": length}), format!("the disk has {} now", bytes(length)))?;
        }
        Disk::Keep(at) => {
            let blocks: u64 = control(&at)?.ask(&ControlCommand::KeepCache { claim: None })?;
            output.result(
                &json!({"blocks": blocks}),
                format!("{} are retained for the guest's next boot", bytes(blocks * 4096)),
            )?;
        }
        Disk::Drop(at) => {
            control(&at)?.ask::<()>(&ControlCommand::DropCache {})?;
            output.result(&json!({}), "done")?;
        }
        Disk::Merge(DiskMerge { image, redo, image_renamed_from, dry_run, buffered }) => {
            let renamed_from = image_renamed_from.as_deref();
            let served = fs::metadata(&image).is_ok_and(|metadata| metadata.file_type().is_socket());
            if dry_run {
                return would_merge(output, &image, redo, renamed_from, served);
            }
            if served {
                Control::connect(&image)?.end_epochs(MERGE_TIMEOUT)?;
                output.result(&json!({}), "merged; the disk no longer has a redo log")?;
                return Ok(ExitCode::SUCCESS);
            }
            let directory = redo.unwrap_or_else(|| default_directory(&image));
            let merged = merge_all(&image, &directory, !buffered, renamed_from)?;
            let text = match merged {
                Some(epochs) => format!("merged {epochs} epochs; {} is the newest disk", image.display()),
                None => format!("{} has no redo log", image.display()),
            };
            output.result(&json!({"epochs": merged}), text)?;
        }
        Disk::End(at) => {
            control(&at)?.ask::<()>(&ControlCommand::End {})?;
            output.result(&json!({}), "done")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints how much redo log `merge` would merge into the image.
fn would_merge(
    output: &Output,
    image: &Path,
    redo: Option<PathBuf>,
    renamed_from: Option<&str>,
    served: bool,
) -> Result<ExitCode> {
    fs::metadata(image).with_context(|| format!("disk image {}", image.display()))?;
    let (log, value) = if served {
        let left = Control::connect(image)?.status()?.redo.map(|redo| redo.bytes);
        (left.map(|left| format!("{} of redo log", bytes(left))), json!({"dry_run": true, "redo_bytes": left}))
    } else {
        let left = inspect_log(image, &redo.unwrap_or_else(|| default_directory(image)), u64::MAX, renamed_from)?
            .map(|left| left.writes);
        (left.map(|left| format!("{left} writes of redo log")), json!({"dry_run": true, "writes": left}))
    };
    let text = match log {
        Some(log) => format!("would merge {log}; the disks of its checkpoints could no longer be restored"),
        None => "has no redo log".to_owned(),
    };
    output.result(&value, format!("{}: {text}\nnothing was changed", image.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Connects to the server of a disk, named by its VM or by its socket.
fn control(DiskAt { disk }: &DiskAt) -> Result<Control> {
    let is_name = !disk.is_absolute() && !disk.starts_with(".") && !disk.starts_with("..") && !disk.exists();
    let Some(text) = disk.to_str().filter(|_| is_name) else { return Ok(Control::connect(disk)?) };
    let (name, id) = text.split_once('/').map_or((text, None), |(name, id)| (name, Some(id)));
    let rundir = RunDir::new(&Host::open()?.root, name);
    let state = State::read(&rundir)?.ok_or_else(|| LifeError::Unknown { name: name.into() })?;
    let served: Vec<_> = disks::served(&state.hardware).map(|disk| disk.id.as_str()).collect();
    let found = match (id, served.as_slice()) {
        (Some(id), _) => served.iter().find(|disk| **disk == id).copied(),
        (None, [one]) => Some(*one),
        (None, _) => None,
    };
    match found {
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

fn serve_disk(output: &Output, arguments: DiskServe) -> Result<ExitCode> {
    let DiskServe {
        image,
        socket,
        control,
        readonly,
        serial,
        queues,
        buffered,
        no_map,
        filling,
        attic_keep,
        wait,
        rate,
        ..
    } = arguments;
    let version = match (arguments.epoch, arguments.disk_id, arguments.since) {
        (Some(epoch), Some(disk), Some(first)) => DiskVersion::Since { epoch, disk, first },
        (Some(epoch), Some(disk), None) => DiskVersion::Epoch { epoch, disk },
        _ => DiskVersion::Newest,
    };
    let limit = arguments.redo_limit.map(|limit| limit.as_u64());
    let redo = LogOptions { directory: arguments.redo, version, limit, renamed_from: arguments.image_renamed_from };
    let control = control.unwrap_or_else(|| {
        let mut path = socket.clone().into_os_string();
        path.push(".control");
        PathBuf::from(path)
    });
    let settings = Settings {
        serial,
        limits: limits(&rate),
        has_block_map: !no_map,
        queues,
        retain_for: attic_keep.map(|keep| Duration::from_millis(keep.as_millis())),
        is_filling: Arc::new(AtomicBool::new(filling)),
    };
    let mode = OpenMode { readonly, direct: !buffered };
    let service = Service {
        image: image.clone(),
        mode,
        socket: socket.clone(),
        control: control.clone(),
        redo,
        settings,
        is_awaiting_epoch: wait,
    };
    // A signal ends the server as `rekindle disk end` does, after all requests are done.
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let handle = signals.handle();
    let at = control.clone();
    let waiting = thread::spawn(move || {
        if signals.forever().next().is_some() {
            let ended: Result<(), ControlError> =
                Control::connect(&at).and_then(|mut control| control.ask(&ControlCommand::End {}));
            if let Err(e) = ended {
                tracing::debug!("the server has already ended: {e}");
            }
        }
    });
    let started = json!({"socket": socket, "control": control, "image": image});
    let text = format!("serving {} at {}", image.display(), socket.display());
    let served = serve(service, || {
        if let Err(e) = output.result(&started, text) {
            tracing::debug!("cannot write to standard output: {e}");
        }
    });
    handle.close();
    let _ = waiting.join();
    served?;
    Ok(ExitCode::SUCCESS)
}

fn draw(status: &Status) -> String {
    let Status {
        bytes: length,
        active,
        requests_in_progress,
        mapped_blocks,
        map_bytes,
        retained,
        emptied,
        redo,
        waits,
        broken,
        unchecked,
        ..
    } = status;
    let state = if *active { "in use" } else { "not in use" };
    let mut text = format!(
        "{}, {state}, {requests_in_progress} requests in progress; {} of its guest's cache are mapped ({} for the map)",
        bytes(*length),
        bytes(*mapped_blocks as u64 * 4096),
        bytes(*map_bytes as u64)
    );
    if let Some((blocks, counts)) = retained.or(emptied.map(|counts| (0, counts))) {
        text += &format!(
            "; retained cache: {} left, {} served, {} different from the disk, {} dropped because the guest needed the memory",
            bytes(blocks as u64 * 4096),
            bytes(counts.served * 4096),
            bytes(counts.refused * 4096),
            bytes(counts.dropped * 4096)
        );
    }
    if let Some(redo) = redo {
        text += &format!(
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
        for why in redo.waiting.iter().map(|why| format!("writes wait: {why}")).chain(redo.failed.clone()) {
            text += &format!("\n{why}");
        }
    }
    if *waits {
        text += "; waits for a restore, which names the disk's epoch";
    }
    for broken in broken {
        text += &format!(
            "; queue {} has stopped with an error until the guest resets the disk: {}",
            broken.queue, broken.why
        );
    }
    if *unchecked {
        text += "; BUILT WITH unchecked-attic: blocks of the retained cache are served UNCHECKED and damage this guest";
    }
    text
}
