//! `rekindle events`: prints what was done to VMs and what went wrong, and follows it.

use super::interrupts;
use crate::cli::Events;
use crate::output::Output;
use anyhow::Result;
use rekindle_vm::events::{Event, EventReader};
use rekindle_vm::host::Host;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, UNIX_EPOCH};

/// Interval in which the logs are read while they are followed.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

pub fn events(output: &Output, arguments: &Events) -> Result<ExitCode> {
    let interrupted = interrupts()?;
    let names = arguments.names.iter().map(ToString::to_string).collect();
    let mut reader = EventReader::new(&Host::open()?.log_dir, names);
    let mut events = reader.older()?;
    // A log may be longer than what is read in one call.
    loop {
        let added = reader.added()?;
        if added.is_empty() {
            break;
        }
        events.extend(added);
    }
    events.sort_by_key(|event| event.host_us);
    for event in events.iter().skip(events.len().saturating_sub(arguments.lines)) {
        print(output, event)?;
    }
    while arguments.follow && !interrupted.load(Ordering::Relaxed) {
        for event in reader.added()? {
            print(output, &event)?;
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(ExitCode::SUCCESS)
}

fn print(output: &Output, event: &Event) -> Result<()> {
    let time = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_micros(event.host_us));
    Ok(output.result(event, format!("{time}  {}  {}", event.vm, event.kind))?)
}
