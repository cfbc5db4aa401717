//! `rekindle probe`: runs the measuring client [`rekindle_probe`], and prints its report.

use super::interrupts;
use crate::cli::Probe;
use crate::output::{Output, Usage};
use anyhow::Result;
use rekindle_probe::{Options, Target};
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub fn probe(output: &Output, arguments: &Probe) -> Result<ExitCode> {
    let target: Target = arguments.url.parse().map_err(|e: rekindle_probe::UrlError| Usage(e.to_string()))?;
    let options = Options {
        every: arguments.every.as_duration(),
        timeout: arguments.timeout.as_duration(),
        connections: arguments.connections,
        interval: arguments.interval.as_duration(),
        duration: arguments.duration.map(|span| span.as_duration()),
        netns: arguments.netns.clone(),
        ..Options::default()
    };
    let interrupted = interrupts()?;
    let probe = if arguments.follow && output.json() {
        rekindle_probe::Probe::start_with_events(&target, options, |event| {
            if let Ok(line) = serde_json::to_string(&event) {
                println!("{line}");
            }
        })?
    } else {
        rekindle_probe::Probe::start(&target, options)?
    };
    while !interrupted.load(Ordering::Relaxed) && !probe.wait_timeout(Duration::from_millis(50)) {}
    let report = probe.stop();
    output.result(&report, rekindle_probe::render(&report))?;
    Ok(if report.answered > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
