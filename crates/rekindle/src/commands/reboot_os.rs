//! `rekindle reboot`: reboots a guest's operating system, and prints how.

use super::dry_run::{self, PlannedAction};
use super::helpers::start_helpers;
use crate::cli::{EndOs, OsMethod, RebootOs};
use crate::output::{Output, Usage, bytes, duration};
use crate::progress::start_spinner;
use anyhow::Result;
use rekindle_life::shutdown::{EndMethod, Ended};
use rekindle_reboot::os::phase::{PhaseOutcome, SkippedCandidate};
use rekindle_reboot::os::{self, OsRebootMethod, OsRebootReport, OsRebootRequest};
use rekindle_reboot::vmm::RebootReport;
use rekindle_vm::disks::RetainedCache;
use rekindle_vm::host::Host;
use serde::Serialize;
use std::process::ExitCode;

/// The JSON result of `rekindle reboot`.
#[derive(Serialize)]
struct OsResult<'a> {
    how: OsRebootMethod,
    #[serde(flatten)]
    report: &'a RebootReport,
    kept: Option<&'a RetainedCache>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ended: Option<Ended>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kexec: Option<&'a os::LoadedKernel>,
    #[serde(skip_serializing_if = "Option::is_none")]
    phase: Option<&'a PhaseOutcome>,
}

pub fn reboot_os(output: &Output, arguments: &RebootOs) -> Result<ExitCode> {
    let host = Host::open()?;
    let name = arguments.name.as_str();
    let request = os_request(&host, arguments)?;
    if arguments.dry_run {
        let checked = os::check(&host, name, &request).map_err(|failure| *failure.error);
        let action = checked.map(|()| describe_os_method(request.how).to_owned());
        return dry_run::print(output, &[PlannedAction { name: name.to_owned(), action }]);
    }
    let spinner = start_spinner(output, format!("reboot of {name}"));
    let rebooted = os::reboot(&host, name, &request);
    spinner.finish_and_clear();
    let rebooted = rebooted?;
    start_helpers(&host, name);
    let text = describe_os_reboot(name, request.how, &rebooted);
    let OsRebootReport { report, kept, ended, kexec, phase } = &rebooted;
    let result = OsResult {
        how: request.how,
        report,
        kept: kept.as_ref(),
        ended: *ended,
        kexec: kexec.as_ref(),
        phase: phase.as_ref(),
    };
    output.result(&result, text)?;
    Ok(ExitCode::SUCCESS)
}

/// Converts the arguments. Rejects options that do not belong to the method.
fn os_request(host: &Host, arguments: &RebootOs) -> Result<OsRebootRequest> {
    let how = match arguments.how {
        Some(OsMethod::Cold) => OsRebootMethod::Cold,
        Some(OsMethod::WarmCache) => OsRebootMethod::WarmCache,
        Some(OsMethod::Kexec) => OsRebootMethod::Kexec,
        Some(OsMethod::Phase) => OsRebootMethod::Phase,
        None => os::default_method(host, arguments.name.as_str()),
    };
    let usage = |text: &str| Err(Usage(text.into()).into());
    if how != OsRebootMethod::Kexec && (arguments.kernel.is_some() || arguments.initrd.is_some()) {
        return usage("--kernel and --initrd are for --how kexec");
    }
    if how != OsRebootMethod::Phase && arguments.candidate.is_some() {
        return usage("--candidate is for --how phase");
    }
    let end = match arguments.end {
        EndOs::Shutdown => EndMethod::Shutdown,
        EndOs::Freeze if how == OsRebootMethod::Kexec => {
            return usage("--end freeze is not for --how kexec: the guest shuts itself down to start the next kernel");
        }
        EndOs::Freeze => EndMethod::Freeze,
    };
    let kexec = os::KexecRequest { kernel: arguments.kernel.clone(), initrd: arguments.initrd.clone() };
    Ok(OsRebootRequest { how, kexec, candidate: arguments.candidate.clone(), end })
}

/// Describes what a reboot would do, for `--dry-run`.
pub(super) fn describe_os_method(how: OsRebootMethod) -> &'static str {
    match how {
        OsRebootMethod::Cold => "shut its guest down and boot it",
        OsRebootMethod::WarmCache => "shut its guest down and boot it, with what it has cached of its disks",
        OsRebootMethod::Kexec => "have its guest load another kernel and start that",
        OsRebootMethod::Phase => {
            "shut its guest down and continue from a saved phase of an earlier boot, or else boot it"
        }
    }
}

fn describe_os_reboot(name: &str, how: OsRebootMethod, rebooted: &OsRebootReport) -> String {
    let OsRebootReport { report, kept, ended, kexec, phase } = rebooted;
    let stopped = duration(report.stopped_us);
    let candidate = phase.as_ref().and_then(|phase| phase.candidate.as_ref());
    let mut text = match (how, candidate, kexec) {
        (_, Some(candidate), _) => format!("{name}: continued from phase {candidate} after {stopped}"),
        (OsRebootMethod::Kexec, _, Some(loaded)) => {
            format!("{name}: runs again after {stopped}, with kernel {}", loaded.kernel.display())
        }
        (OsRebootMethod::Kexec, _, None) => format!("{name}: was rebooted by its firmware, not by kexec"),
        _ => format!("{name}: booted after {stopped}"),
    };
    if let Some(ended) = ended {
        text += &format!("; it was {}", ended.step());
    }
    for SkippedCandidate { name, why } in phase.iter().flat_map(|phase| &phase.skipped) {
        text += &format!("; not from {name}: {why}");
    }
    match kept {
        Some(kept) => {
            let disks: Vec<_> = kept.disks.keys().map(String::as_str).collect();
            let noun = if disks.len() == 1 { "disk" } else { "disks" };
            text += &format!("; {} of its cache of {noun} {} are retained", bytes(kept.bytes), disks.join(", "));
        }
        None if how == OsRebootMethod::WarmCache => text += "; nothing of its cache is retained",
        None => {}
    }
    text
}
