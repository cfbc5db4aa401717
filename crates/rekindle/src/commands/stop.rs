//! `rekindle stop`: shuts VMs down, also VMs that a suspend of the host has saved.

use super::distinct_names;
use super::dry_run::{self, PlannedAction};
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

const DROPPED: &str = "its memory, which a suspend of the host had saved, was dropped";

pub fn stop(output: &Output, arguments: &Stop) -> Result<ExitCode> {
    let host = Host::open()?;
    if arguments.dry_run {
        let is_immediate = arguments.now || arguments.timeout.is_some_and(|timeout| timeout.as_duration().is_zero());
        let plan = |name: String| PlannedAction { action: plan_stop(&host, &name, is_immediate), name };
        let plans: Vec<_> = distinct_names(&arguments.names)?.into_iter().map(plan).collect();
        return dry_run::print(output, &plans);
    }
    let timeout = if arguments.now { Some(Duration::ZERO) } else { arguments.timeout.map(|span| span.as_duration()) };
    let mut last_error = None;
    for name in &arguments.names {
        match stop_vm(&host, name.as_str(), timeout) {
            Ok(StoppedVm { ended, text }) => {
                output.result(&serde_json::json!({"name": name, "ended": ended}), format!("{name}: {text}"))?;
            }
            Err(e) => {
                // Continue with the other VMs.
                if let Some(earlier) = last_error.replace(e) {
                    output.error(&earlier);
                }
            }
        }
    }
    last_error.map_or(Ok(ExitCode::SUCCESS), Err)
}

/// How a VM was stopped, for the output.
struct StoppedVm {
    ended: Ended,
    text: &'static str,
}

fn stop_vm(host: &Host, name: &str, timeout: Option<Duration>) -> Result<StoppedVm> {
    match stop::stop(host, name, timeout, |rundir, _| report_shutdown(host, rundir)) {
        Ok(ended) => {
            let is_dropped = host::drop_suspended(host, name)?;
            Ok(StoppedVm { ended, text: if is_dropped { DROPPED } else { describe_end(ended) } })
        }
        // A suspended VM that has not been resumed in this boot.
        Err(LifeError::Unknown { .. }) if host::drop_suspended(host, name)? => {
            Ok(StoppedVm { ended: Ended::Before, text: DROPPED })
        }
        Err(e) => Err(e.into()),
    }
}

fn describe_end(ended: Ended) -> &'static str {
    match ended {
        Ended::ByAgent => "shut down by its agent",
        Ended::ByAcpi => "shut down by ACPI",
        Ended::Frozen | Ended::PoweredOff => "powered off",
        Ended::Prepared => "was only prepared; its waiting QEMU was ended",
        Ended::Before => "had ended by itself",
    }
}

/// Describes the action of `stop` on a VM, for `--dry-run`.
fn plan_stop(host: &Host, name: &str, is_immediate: bool) -> Result<String, LifeError> {
    match stop::stoppable(host, name) {
        Ok(Stoppable::Guest(pid)) => {
            let verb = if is_immediate { "power its guest off" } else { "shut its guest down" };
            Ok(format!("{verb} (QEMU process {pid}), and remove what Rekindle keeps of it but its disks"))
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
