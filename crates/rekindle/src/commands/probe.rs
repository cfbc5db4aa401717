//! `rekindle probe`.

use crate::cli::Probe;
use crate::output::{Output, Usage};
use anyhow::Result;
use rekindle_probe::{Options, Target};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// An interrupt ends the watching, not the report.
fn interrupts() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&flag))?;
    }
    Ok(flag)
}
