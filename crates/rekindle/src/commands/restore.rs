//! `rekindle restore` resumes a guest from a checkpoint; `rekindle pager` loads the rest of its memory.

use super::helpers::report_stopped;
use super::store::credentials;
use super::{existing_run_dir, interrupts};
use crate::cli::{Pager, Restore};
use crate::output::{Output, bytes, duration};
use crate::progress::start_progress_bar;
use anyhow::Result;
use rekindle_protect::known_store::KnownStoreFile;
use rekindle_protect::pager::{PagerEvent, serve, serve_after};
use rekindle_protect::restore::into_libvirt::restore_into_libvirt;
use rekindle_protect::restore::prepare::prepare;
use rekindle_protect::restore::{Request, restore as run};
use rekindle_store::types::{KnownState, utc};
use rekindle_vm::definition::Definition;
use rekindle_vm::host::{self, Host};
use std::process::ExitCode;

pub fn restore(output: &Output, arguments: &Restore) -> Result<ExitCode> {
    let host = Host::open()?;
    let request = Request {
        store: arguments.store.clone(),
        credentials: credentials(&arguments.credentials),
        at: arguments.at,
        at_least: KnownState {
            epoch: arguments.at_least_epoch.unwrap_or_default(),
            checkpoint: arguments.at_least_checkpoint.unwrap_or_default(),
        },
        known_store: KnownStoreFile::of(&host, arguments.name.as_str()),
        is_store_of_source: false,
        eager: arguments.eager,
        definition: arguments.definition.as_ref().map(Definition::load).transpose()?,
        local_definition: None,
        local_domain: None,
        qemu: arguments.qemu.clone(),
        hold_output: arguments.output_commit,
        move_claim: None,
    };
    if arguments.into_libvirt {
        return into_libvirt(output, &host, arguments, &request);
    }
    if arguments.prepare {
        let prepared = prepare(&host, &arguments.name, &request)?;
        let text = format!(
            "{} is prepared{}: QEMU process {} waits with empty RAM ({} resident, {} for the guest) for: \
             rekindle restore {} --store {}",
            prepared.name,
            if prepared.replaced { " again" } else { "" },
            prepared.pid,
            bytes(prepared.resident_bytes),
            bytes(prepared.ram_bytes),
            prepared.name,
            arguments.store
        );
        output.result(&prepared, text)?;
        return Ok(ExitCode::SUCCESS);
    }
    let restored = run(&host, &arguments.name, &request);
    let restored = restored.inspect_err(|_| report_stopped(&host, arguments.name.as_str()))?;
    super::helpers::start_helpers(&host, &restored.name);
    let memory = memory_text(restored.filled);
    let text = format!(
        "{} runs after {} from checkpoint {} of {} (QEMU process {}{}); {memory}; {}",
        restored.name,
        duration(restored.resumed_after_us),
        restored.checkpoint,
        utc(restored.taken_us),
        restored.pid,
        if restored.prepared { ", prepared" } else { "" },
        restored.clock
    );
    output.result(&restored, text)?;
    Ok(ExitCode::SUCCESS)
}

fn memory_text(is_filled: bool) -> &'static str {
    if is_filled { "all of its memory is loaded" } else { "its memory is loaded on demand" }
}

fn into_libvirt(output: &Output, host: &Host, arguments: &Restore, request: &Request) -> Result<ExitCode> {
    let bar = start_progress_bar(output, "writing its memory");
    let mut show_progress = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    };
    let restored = restore_into_libvirt(host, &arguments.name, request, arguments.connect.clone(), &mut show_progress);
    bar.finish_and_clear();
    let restored = restored?;
    let memory = memory_text(restored.filled);
    let text = format!(
        "libvirt runs domain {} after {} from checkpoint {} of {} (QEMU process {}); it is attached as {}; {memory}",
        restored.domain,
        duration(restored.resumed_after_us),
        restored.checkpoint,
        utc(restored.taken_us),
        restored.pid,
        restored.name
    );
    output.result(&restored, text)?;
    Ok(ExitCode::SUCCESS)
}

pub fn pager(output: &Output, arguments: &Pager) -> Result<ExitCode> {
    let host = Host::open()?;
    let name = arguments.name.to_string();
    let confine = host::confines_helpers()?;
    let interrupted = interrupts()?;
    let mut report = |event: &PagerEvent| {
        let _ = output.result(event, format!("{name}: {event}"));
    };
    let rundir = existing_run_dir(&host, &name)?;
    let progress = if arguments.hand_over {
        // Notify the previous pager, which supplies pages until then. If it has ended, nothing waits for the
        // notification.
        let ready = || {
            let _ = rustix::io::write(rustix::stdio::stdin(), &[0]);
        };
        serve_after(&rundir, confine, ready, &interrupted, &mut report)?
    } else {
        serve(&rundir, confine, &interrupted, &mut report)?
    };
    Ok(if progress.complete { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
