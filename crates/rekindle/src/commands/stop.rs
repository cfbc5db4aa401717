//! `rekindle stop`.

use super::{distinct, dry_run};
use crate::cli::Stop;
use crate::output::Output;
use anyhow::Result;
use rekindle_cluster::stop::report_shutdown;
use rekindle_life::shutdown::Ended;
use rekindle_life::stop::{self, Stoppable};
use rekindle_reboot::host;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use std::process::ExitCode;
use std::time::Duration;

/// Describes the action of `stop` on a VM, for `--dry-run`.
fn would(host: &Host, name: &str, now: bool) -> Result<String, LifeError> {
    match stop::stoppable(host, name) {
        Ok(Stoppable::Guest(pid)) => {
            let how = if now { "power its guest off" } else { "shut its guest down" };
            Ok(format!("{how} (QEMU process {pid}), and remove what Rekindle keeps of it but its disks"))
        }
        Ok(Stoppable::Prepared(pid)) => Ok(format!("end QEMU process {pid}, which waits for a restore")),
        Ok(Stoppable::Files) => Ok("remove what Rekindle keeps of it but its disks; its QEMU has ended".into()),
        // A suspended VM that has not been resumed in this boot.
        Err(LifeError::Unknown { .. }) if matches!(host::is_suspended(host, name), Ok(true)) => {
            Ok("drop its memory, which a suspend of the host has saved".into())
        }
        Err(e) => Err(e),
    }
}

const DROPPED: &str = "its memory, which a suspend of the host had saved, was dropped";

fn describe(ended: Ended) -> &'static str {
    match ended {
        Ended::ByAgent => "shut down by its agent",
        Ended::ByAcpi => "shut down by ACPI",
        Ended::Frozen | Ended::PoweredOff => "powered off",
        Ended::Prepared => "was only prepared; its waiting QEMU was ended",
        Ended::Before => "had ended by itself",
    }
}

pub fn stop(output: &Output, arguments: &Stop) -> Result<ExitCode> {
    let host = Host::open()?;
    let patience = if arguments.now { Some(Duration::ZERO) } else { arguments.timeout.map(|span| span.as_duration()) };
    if arguments.dry_run {
        let now = patience.is_some_and(|patience| patience.is_zero());
        let planned: Vec<_> = distinct(&arguments.names)?
            .into_iter()
            .map(|name| {
                let would = would(&host, &name, now);
                (name, would)
            })
            .collect();
        return dry_run::print(output, &planned);
    }
    let mut failed = None;
    for name in &arguments.names {
        let stopped = match stop::stop(&host, name.as_str(), patience, |rundir, _| report_shutdown(rundir)) {
            // A suspended VM that has not been resumed in this boot.
            Err(LifeError::Unknown { .. }) if host::drop_suspended(&host, name.as_str())? => {
                Ok((Ended::Before, DROPPED))
            }
            Ok(ended) => {
                let dropped = host::drop_suspended(&host, name.as_str()).map_err(anyhow::Error::from);
                dropped.map(|is_dropped| (ended, if is_dropped { DROPPED } else { describe(ended) }))
            }
            Err(e) => Err(e.into()),
        };
        match stopped {
            Ok((ended, how)) => {
                output.result(&serde_json::json!({"name": name, "ended": ended}), format!("{name}: {how}"))?;
            }
            Err(e) => {
                // Continue with the other VMs.
                if let Some(earlier) = failed.replace(e) {
                    output.error(&earlier);
                }
            }
        }
    }
    failed.map_or(Ok(ExitCode::SUCCESS), Err)
}
