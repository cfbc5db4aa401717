//! `rekindle protect` takes checkpoints until interrupted; `rekindle release` releases held network output.

use super::store::identity;
use super::{disk_policy, interrupts};
use crate::cli::{NameOnly, Protect};
use crate::output::Output;
use anyhow::Result;
use rekindle_protect::event::ProtectEvent;
use rekindle_protect::output;
use rekindle_protect::protector::{ProtectSettings, StopReason, protect as run};
use rekindle_vm::host::Host;
use std::process::ExitCode;

pub fn protect(output: &Output, arguments: &Protect) -> Result<ExitCode> {
    let host = Host::open()?;
    let settings = ProtectSettings {
        store: arguments.store.clone(),
        identity: identity(&arguments.tls),
        every: arguments.every.as_duration(),
        policy: arguments.policy,
        keep: arguments.keep,
        max_lag: arguments.max_lag.map(|span| span.as_duration()),
        disks: disk_policy(arguments.disk_hook.as_ref(), arguments.disk, arguments.overlay_dir.as_ref()),
        count: arguments.count,
        output_commit: arguments.output_commit,
        compare: arguments.compare,
        stay: arguments.stay,
        create_store: arguments.create_store,
        abandon_old: arguments.abandon_old_checkpoints,
    };
    let interrupted = interrupts()?;
    let name = arguments.name.to_string();
    let mut wrong_pages = 0;
    let mut report = |event: &ProtectEvent| {
        if let ProtectEvent::Compared(compared) = event {
            wrong_pages += compared.wrong;
        }
        let _ = output.result(event, format!("{name}: {event}"));
    };
    let summary = run(&host, &name, &settings, &interrupted, &mut report)?;
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

pub fn release(output: &Output, arguments: &NameOnly) -> Result<ExitCode> {
    let name = arguments.name.as_str();
    let released = output::release(&Host::open()?, name)?;
    let text =
        if released { "held network output was released; output commit is off" } else { "no network output was held" };
    output.result(&serde_json::json!({"name": name, "released": released}), format!("{name}: {text}"))?;
    Ok(ExitCode::SUCCESS)
}
