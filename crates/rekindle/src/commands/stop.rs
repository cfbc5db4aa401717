//! `rekindle stop`.

use crate::cli::Stop;
use crate::output::Output;
use anyhow::Result;
use rekindle_cluster::stop::tell_end;
use rekindle_reboot::host;
use rekindle_vm::host::Host;
use rekindle_vm::life::{self, Ended, LifeError};
use std::process::ExitCode;
use std::time::Duration;

pub fn stop(output: &Output, arguments: &Stop) -> Result<ExitCode> {
    let host = Host::open()?;
    let patience = if arguments.now { Some(Duration::ZERO) } else { arguments.timeout.map(|span| span.as_duration()) };
    let mut failed = None;
    for name in &arguments.names {
        let stopped = match life::stop_with(&host, name.as_str(), patience, |rundir, _| tell_end(rundir)) {
            // This boot does not know of it yet.
            Err(LifeError::Unknown { .. }) if host::give_up(&host, name.as_str())? => Ok(Ended::Before),
            Ok(ended) => host::give_up(&host, name.as_str()).map(|_| ended).map_err(anyhow::Error::from),
            Err(e) => Err(e.into()),
        };
        match stopped {
            Ok(ended) => {
                let how = match ended {
                    Ended::ByAgent => "shut down by its agent",
                    Ended::ByAcpi => "shut down by ACPI",
                    Ended::Frozen | Ended::PoweredOff => "powered off",
                    Ended::Prepared => "was only prepared; the QEMU that waited has ended",
                    Ended::Before => "had ended by itself",
                };
                output.result(&serde_json::json!({"name": name, "ended": ended}), format!("{name}: {how}"))?;
            }
            Err(e) => {
                // The others are stopped all the same.
                if let Some(earlier) = failed.replace(e) {
                    output.error(&earlier);
                }
            }
        }
    }
    failed.map_or(Ok(ExitCode::SUCCESS), Err)
}
