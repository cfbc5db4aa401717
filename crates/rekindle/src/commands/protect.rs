//! `rekindle protect` takes checkpoints until interrupted; `rekindle release` releases held network output.

use super::helpers::report_stopped;
use super::install_service;
use super::interrupts;
use super::service_report::ServiceReport;
use super::store::credentials;
use crate::cli::{CheckpointOptions, DiskRule, NameOnly, Protect};
use crate::output::{Output, bytes};
use crate::progress::start_spinner;
use anyhow::{Context, Result};
use rekindle_protect::estimate::{Estimate, Wanted, estimate, stored_checkpoints};
use rekindle_protect::event::ProtectEvent;
use rekindle_protect::output;
use rekindle_protect::protector::{DiskPolicy, ProtectError, ProtectSettings, StopReason, protect as run};
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// Returns the settings of a protector that runs until it is interrupted, with disks as `rule` requires.
pub(super) fn protect_settings(
    options: &CheckpointOptions,
    rule: Option<DiskRule>,
    overlay_parent: Option<&PathBuf>,
) -> ProtectSettings {
    ProtectSettings {
        store: options.store.clone(),
        credentials: credentials(&options.credentials),
        every: options.every.as_duration(),
        policy: options.policy,
        keep: options.keep,
        max_lag: None,
        disks: disk_policy(options.disk_hook.as_ref(), rule, overlay_parent),
        count: None,
        output_commit: options.output_commit,
        compare: false,
        stay: false,
        create_store: false,
        abandon_old: false,
    }
}

pub fn protect(output: &Output, arguments: &Protect) -> Result<ExitCode> {
    let host = Host::open()?;
    if arguments.install_service {
        return install_service::install(output, &host, arguments);
    }
    let settings = ProtectSettings {
        max_lag: arguments.max_lag.map(|span| span.as_duration()),
        count: arguments.count,
        compare: arguments.compare,
        stay: arguments.stay,
        create_store: arguments.create_store,
        abandon_old: arguments.abandon_old_checkpoints,
        ..protect_settings(&arguments.checkpoints, arguments.disk, arguments.overlay_dir.as_ref())
    };
    let name = arguments.name.to_string();
    if arguments.dry_run {
        return print_estimate(output, &host, &name, &settings);
    }
    let interrupted = interrupts()?;
    let service = ServiceReport::start(&RunDir::new(&host.root, &name), settings.every);
    let service = service.context("cannot start the thread that reports to systemd")?;
    let mut wrong_pages = 0;
    let mut report = |event: &ProtectEvent| {
        if let Some(service) = &service {
            service.note(event);
        }
        if let ProtectEvent::Compared(compared) = event {
            wrong_pages += compared.wrong;
        }
        let _ = output.result(event, format!("{name}: {event}"));
    };
    let summary = run(&host, &name, &settings, &interrupted, &mut report);
    drop(service);
    let summary = summary.inspect_err(|_| report_stopped(&host, &name))?;
    let why = match summary.ended {
        StopReason::Requested => "interrupted; its memory is still tracked, for the next `rekindle protect`",
        StopReason::Counted if summary.overlays_left => {
            "done; its disks stay on their overlays, which the checkpoints need, until `rekindle detach`"
        }
        StopReason::Counted => "done; nothing of Rekindle is left in QEMU",
        StopReason::Stays => "the guest is stopped at the last one",
        StopReason::QemuEnded => "its QEMU has ended",
    };
    let output_note = if summary.output_held {
        format!("; its network output is held until it is protected again, or until: rekindle release {name}")
    } else {
        String::new()
    };
    output.result(&summary, format!("{name}: {} checkpoints; {why}{output_note}", summary.checkpoints))?;
    Ok(if summary.ended == StopReason::QemuEnded || wrong_pages > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Prints whether the VM can be protected, and how much memory its checkpoints would contain.
fn print_estimate(output: &Output, host: &Host, name: &str, settings: &ProtectSettings) -> Result<ExitCode> {
    let checkpoints = stored_checkpoints(host, name, settings)?;
    let ProtectSettings { policy, disks, output_commit, every, .. } = settings.clone();
    let estimate = measured_estimate(output, host, name, &Wanted { policy, disks, output_commit, every })?;
    let store = match checkpoints {
        None => "would be created".to_owned(),
        Some(count) => format!("has {count} checkpoints"),
    };
    let text = format!(
        "{name}: can be protected; {}\n{} {store}\nnothing was changed",
        describe_estimate(&estimate),
        settings.store
    );
    output.result(&json!({"dry_run": true, "name": name, "estimate": estimate, "checkpoints": checkpoints}), text)?;
    Ok(ExitCode::SUCCESS)
}

/// Measures for 10 s, and shows that it does.
pub(super) fn measured_estimate(
    output: &Output,
    host: &Host,
    name: &str,
    wanted: &Wanted,
) -> Result<Estimate, ProtectError> {
    let spinner = start_spinner(output, format!("measuring how much memory {name} changes"));
    let estimated = estimate(host, name, wanted);
    spinner.finish_and_clear();
    estimated
}

pub(super) fn describe_estimate(estimate: &Estimate) -> String {
    let (mean, count) = (estimate.mean_bytes(), estimate.changed_bytes.len());
    let most = estimate.changed_bytes.iter().max().copied().unwrap_or(0);
    format!(
        "its pages would be copied by policy {}\n\
         the first checkpoint has all of its memory: {}\n\
         each further one has what changes in {} s: {} (mean of {count} measurements; most {})",
        estimate.policy,
        bytes(estimate.ram_bytes),
        estimate.measured_ms / 1000,
        bytes(mean),
        bytes(most),
    )
}

/// Returns how `protect` treats disks that Rekindle does not serve.
fn disk_policy(hook: Option<&String>, rule: Option<DiskRule>, overlay_parent: Option<&PathBuf>) -> DiskPolicy {
    match (hook, rule) {
        (Some(command), _) => DiskPolicy::Hook(command.clone()),
        (None, Some(DiskRule::Overlays)) => DiskPolicy::Overlays { parent: overlay_parent.cloned() },
        (None, Some(DiskRule::CrashConsistent)) => DiskPolicy::CrashConsistent,
        (None, None) => DiskPolicy::Refuse,
    }
}

pub fn release(output: &Output, arguments: &NameOnly) -> Result<ExitCode> {
    let name = arguments.name.as_str();
    let released = output::release(&Host::open()?, name)?;
    let text =
        if released { "held network output was released; output commit is off" } else { "no network output was held" };
    output.result(&json!({"name": name, "released": released}), format!("{name}: {text}"))?;
    Ok(ExitCode::SUCCESS)
}
