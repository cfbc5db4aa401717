//! `rekindle monitor`: writes samples of the host and its guests at intervals, until interrupted.

use super::interrupts;
use crate::cli::Monitor;
use crate::output::{Output, Usage};
use anyhow::Result;
use rekindle_probe::{Target, check};
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::samples::{Sample, SampleFile, Sampler};
use serde_json::Number;
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How often to check for an interrupt.
const INTERRUPT_POLL_INTERVAL: Duration = Duration::from_millis(50);

pub fn monitor(output: &Output, arguments: &Monitor) -> Result<ExitCode> {
    let host = Host::open()?;
    let services = parse_services(&arguments.services)?;
    for name in arguments.names.iter().map(|name| name.as_str()).chain(services.keys().map(String::as_str)) {
        if !RunDir::new(&host.root, name).exists() {
            return Err(LifeError::Unknown { name: name.into() }.into());
        }
    }
    let mut file = arguments.out.as_deref().map(SampleFile::open).transpose()?;
    let sampler = Sampler::new()?;
    let interrupted = interrupts()?;
    let (every, timeout) = (arguments.every.as_duration(), arguments.timeout.as_duration());
    let mut due = Instant::now();
    let mut samples_taken = 0;
    while !interrupted.load(Ordering::Relaxed) {
        let names = match arguments.names.as_slice() {
            [] => RunDir::list(&host.root)?,
            names => names.iter().map(|name| name.as_str().to_owned()).collect(),
        };
        let samples = sample_all(&host, &sampler, &names, &services, timeout, arguments.netns.as_deref())?;
        match &mut file {
            Some(file) => file.append(&samples)?,
            None => samples.iter().try_for_each(|sample| output.line(&serde_json::to_string(sample)?))?,
        }
        samples_taken += 1;
        if arguments.count.is_some_and(|count| samples_taken >= count) {
            break;
        }
        // If a sample takes too long, the samples missed meanwhile are skipped.
        due = (due + every).max(Instant::now());
        wait_until(due, &interrupted);
    }
    Ok(ExitCode::SUCCESS)
}

/// Parses arguments `NAME=URL`. Returns the service of each VM.
fn parse_services(arguments: &[String]) -> Result<BTreeMap<String, Target>> {
    let mut services = BTreeMap::new();
    for argument in arguments {
        let Some((name, url)) = argument.split_once('=') else {
            return Err(Usage(format!("--service {argument}: it must be NAME=URL")).into());
        };
        let target = url.parse().map_err(|e: rekindle_probe::UrlError| Usage(e.to_string()))?;
        services.insert(name.to_owned(), target);
    }
    Ok(services)
}

/// Samples the host and all VMs concurrently, so that a guest whose agent does not answer delays no other.
fn sample_all(
    host: &Host,
    sampler: &Sampler,
    names: &[String],
    services: &BTreeMap<String, Target>,
    timeout: Duration,
    netns: Option<&str>,
) -> Result<Vec<Sample>> {
    let mut samples = vec![sampler.host()?];
    let sample_vm = |name: &String| {
        let mut vm_samples = sampler.vm(&RunDir::new(&host.root, name)).unwrap_or_else(|e| {
            tracing::warn!("{name}: {e}");
            Vec::new()
        });
        // A service that does not answer has no response time in the sample.
        let response_time = services.get(name).and_then(|target| check(target, timeout, netns).ok());
        if let (Some(first), Some(response_time)) = (vm_samples.first_mut(), response_time) {
            let ms = Number::from_f64((response_time.as_secs_f64() * 1e6).round() / 1e3);
            first.metrics.extend(ms.map(|ms| ("response_time_ms".to_owned(), ms)));
        }
        vm_samples
    };
    let sample_vm = &sample_vm;
    thread::scope(|scope| {
        let threads: Vec<_> = names.iter().map(|name| scope.spawn(move || sample_vm(name))).collect();
        samples.extend(threads.into_iter().filter_map(|thread| thread.join().ok()).flatten());
    });
    Ok(samples)
}

fn wait_until(due: Instant, interrupted: &AtomicBool) {
    while !interrupted.load(Ordering::Relaxed) {
        let remaining_time = due.saturating_duration_since(Instant::now());
        if remaining_time.is_zero() {
            return;
        }
        thread::sleep(remaining_time.min(INTERRUPT_POLL_INTERVAL));
    }
}
