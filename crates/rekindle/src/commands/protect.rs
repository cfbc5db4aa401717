//! `rekindle protect`.

use super::interrupts;
use super::store::identity;
use crate::cli::{DiskRule, Protect};
use crate::output::Output;
use anyhow::Result;
use rekindle_protect::event::Event;
use rekindle_protect::protector::{Disks, Ended, Settings, protect as run};
use rekindle_vm::host::Host;
use std::process::ExitCode;

pub fn protect(output: &Output, arguments: &Protect) -> Result<ExitCode> {
    let host = Host::open()?;
    let disks = match (&arguments.disk_hook, arguments.disk) {
        (Some(command), _) => Disks::Hook(command.clone()),
        (None, Some(DiskRule::CrashConsistent)) => Disks::CrashConsistent,
        (None, None) => Disks::Refuse,
    };
    let settings = Settings {
        store: arguments.store.clone(),
        identity: identity(&arguments.tls),
        every: arguments.every.as_duration(),
        policy: arguments.policy,
        keep: arguments.keep,
        max_lag: arguments.max_lag.map(|span| span.as_duration()),
        disks,
        count: arguments.count,
        compare: arguments.compare,
    };
    let interrupted = interrupts()?;
    let name = arguments.name.to_string();
    let mut wrong = 0;
    let mut tell = |event: &Event| {
        if let Event::Compared(compared) = event {
            wrong += compared.wrong;
        }
        let _ = output.result(event, format!("{name}: {event}"));
    };
    let summary = run(&host, &name, &settings, &interrupted, &mut tell)?;
    let why = match summary.ended {
        Ended::Told => "interrupted; its memory is still tracked, for the next protector",
        Ended::Counted => "done; nothing of it is left in QEMU",
        Ended::QemuEnded => "its QEMU has ended",
    };
    output.result(&summary, format!("{name}: {} checkpoints; {why}", summary.checkpoints))?;
    Ok(if summary.ended == Ended::QemuEnded || wrong > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
