//! `rekindle reboot vmm` and `rekindle reboot os`, and the helpers of a VM that every start of a guest needs.

use super::dry_run::{self, PlannedAction};
use super::{distinct_names, existing_run_dir, reboot_method};
use crate::cli::{EndOs, NameOnly, OsMethod, RebootOs, RebootVmm};
use crate::output::{Output, Usage, bytes, chain, duration, exit_status_for};
use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use rekindle_handover::GuestStatus;
use rekindle_reboot::os::phase::{PhaseOutcome, SkippedCandidate, saver};
use rekindle_reboot::os::{self, OsRebootMethod, OsRebootReport, OsRebootRequest};
use rekindle_reboot::vmm::{self, RebootReport, ReplaceOptions, VmOutcome};
use rekindle_vm::disks::Kept;
use rekindle_vm::host::Host;
use rekindle_vm::life::{self, Status};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::shutdown::{End, Ended};
use rekindle_vm::state::State;
use serde::Serialize;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

/// The JSON result of `rekindle reboot vmm`.
#[derive(Serialize)]
struct VmmResult<'a> {
    how: vmm::RebootMethod,
    vms: Vec<VmResult<'a>>,
    /// Time from the first guest's stop to the last guest's resume; `None` if no VM was rebooted.
    #[serde(skip_serializing_if = "Option::is_none")]
    first_stop_to_last_resume_us: Option<u64>,
}

#[derive(Serialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
enum VmResult<'a> {
    Done {
        #[serde(flatten)]
        report: &'a RebootReport,
        #[serde(skip_serializing_if = "Option::is_none")]
        memory_changed_bytes: Option<u64>,
    },
    Failed {
        name: &'a str,
        left: GuestStatus,
        error: String,
    },
}

/// The JSON result of `rekindle reboot os`.
#[derive(Serialize)]
struct OsResult<'a> {
    how: OsRebootMethod,
    #[serde(flatten)]
    report: &'a RebootReport,
    kept: Option<&'a Kept>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ended: Option<Ended>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kexec: Option<&'a os::LoadedKernel>,
    #[serde(skip_serializing_if = "Option::is_none")]
    phase: Option<&'a PhaseOutcome>,
}

pub fn vmm(output: &Output, arguments: &RebootVmm) -> Result<ExitCode> {
    let host = Host::open()?;
    let names = if arguments.all { running_vms(&host)? } else { distinct_names(&arguments.names)? };
    let how = reboot_method(arguments.how);
    let options = ReplaceOptions {
        how,
        qemu: arguments.qemu.clone(),
        rollback: arguments.rollback,
        verify_memory: arguments.verify_memory,
    };
    if arguments.dry_run {
        let plans: Vec<_> = vmm::plan(&host, &names, &options)
            .into_iter()
            .map(|plan| PlannedAction {
                name: plan.name,
                action: plan.result.map(|replacement| describe_plan(how, &replacement)),
            })
            .collect();
        return dry_run::print(output, &plans);
    }
    let spinner = start_spinner(output, format!("{how} reboot of {}", names.join(", ")));
    let outcomes = vmm::reboot(&host, &names, &options);
    spinner.finish_and_clear();
    names.iter().for_each(|name| start_helpers(&host, name));
    print_vmm_outcomes(output, how, &outcomes)?;
    let worst = outcomes.iter().map(|vm| vm.result.as_ref().map_or_else(|e| exit_status_for(e.guest), |_| 0)).max();
    Ok(ExitCode::from(worst.unwrap_or(0)))
}

pub fn os(output: &Output, arguments: &RebootOs) -> Result<ExitCode> {
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
        EndOs::Shutdown => End::Shutdown,
        EndOs::Freeze if how == OsRebootMethod::Kexec => {
            return usage("--end freeze is not for --how kexec: the guest shuts itself down to start the next kernel");
        }
        EndOs::Freeze => End::Freeze,
    };
    let kexec = os::KexecRequest { kernel: arguments.kernel.clone(), initrd: arguments.initrd.clone() };
    Ok(OsRebootRequest { how, kexec, candidate: arguments.candidate.clone(), end })
}

/// Describes what a reboot would do, for `--dry-run`.
fn describe_os_method(how: OsRebootMethod) -> &'static str {
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

/// Starts the processes that watch a VM and save phases of its guest's boot, unless they run. A failure is only logged,
/// because the guest runs without them.
pub fn start_helpers(host: &Host, name: &str) {
    let rundir = RunDir::new(&host.root, name);
    let state = match State::read(&rundir) {
        Ok(Some(state)) => state,
        Ok(None) => return,
        Err(e) => return tracing::warn!("{name}: {e}; to start `rekindle watch`: rekindle recover {name}"),
    };
    if let Err(e) = os::watch::start(&rundir, &state) {
        tracing::warn!("{name}: `rekindle watch` does not run ({e}); to start it: rekindle recover {name}");
    }
    if let Err(e) = saver::start(&rundir, &state.definition) {
        tracing::warn!("{name}: phases of its guest's boot are not saved ({e}); to save them: rekindle recover {name}");
    }
}

pub fn phases(arguments: &NameOnly) -> Result<ExitCode> {
    let host = Host::open()?;
    existing_run_dir(&host, arguments.name.as_str())?;
    saver::run(&host, arguments.name.as_str())?;
    Ok(ExitCode::SUCCESS)
}

pub fn watch(arguments: &NameOnly) -> Result<ExitCode> {
    let host = Host::open()?;
    existing_run_dir(&host, arguments.name.as_str())?;
    os::watch::run(&host, arguments.name.as_str())?;
    Ok(ExitCode::SUCCESS)
}

/// Shows a spinner while an operation runs. The duration depends on guest and disk, so no progress can be shown.
fn start_spinner(output: &Output, message: String) -> ProgressBar {
    if output.json() || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner().with_message(message);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Describes what a replacement would do, for `--dry-run`.
fn describe_plan(how: vmm::RebootMethod, plan: &vmm::ReplacementPlan) -> String {
    let vmm::ReplacementPlan { from, binary, version } = plan;
    let guest = match how {
        vmm::RebootMethod::Warm => "its guest stopped for milliseconds",
        vmm::RebootMethod::Saved => "its guest stopped while its RAM is saved to disk and loaded",
        vmm::RebootMethod::Cold => "its guest shut down and booted",
    };
    let source_version = from.version.as_ref().map(|version| format!(" ({version})")).unwrap_or_default();
    format!("replace QEMU process {}{source_version} by {} ({version}), {guest}", from.pid, binary.display())
}

fn running_vms(host: &Host) -> Result<Vec<String>> {
    let mut names = RunDir::list(&host.root)?;
    names.retain(|name| {
        let status = life::status(&RunDir::new(&host.root, name));
        matches!(status, Ok(Status::Running | Status::Degraded(_)))
    });
    if names.is_empty() {
        return Err(Usage("--all: no VM runs".into()).into());
    }
    Ok(names)
}

fn print_vmm_outcomes(output: &Output, how: vmm::RebootMethod, outcomes: &[VmOutcome]) -> Result<()> {
    let mut text = String::new();
    let mut vms = Vec::new();
    let mut reports = Vec::new();
    for VmOutcome { name, result } in outcomes {
        match result {
            Ok(report) => {
                text += &replacement_line(report);
                let memory_changed_bytes = report.memory.as_ref().map(|memory| memory.ram_changed_bytes);
                vms.push(VmResult::Done { report, memory_changed_bytes });
                reports.push(report);
            }
            Err(failure) => {
                let error = chain(failure);
                // Without --json, errors go to standard error.
                if !output.json() {
                    eprintln!("rekindle: {name}: {error}");
                }
                vms.push(VmResult::Failed { name, left: failure.guest, error });
            }
        }
    }
    let first_stop_us = reports.iter().map(|report| report.stop_host_us).min();
    let last_resume_us = reports.iter().map(|report| report.resume_host_us).max();
    let total_us = first_stop_us.zip(last_resume_us).map(|(stop, resume)| resume.saturating_sub(stop));
    if let Some(total_us) = total_us
        && outcomes.len() > 1
    {
        text += &format!("from the first stop to the last resume: {}\n", duration(total_us));
    }
    if output.json() || !text.is_empty() {
        output.result(&VmmResult { how, vms, first_stop_to_last_resume_us: total_us }, text)?;
    }
    Ok(())
}

fn replacement_line(report: &RebootReport) -> String {
    let version = |qemu: &vmm::QemuInfo| qemu.version.as_ref().map(ToString::to_string).unwrap_or_default();
    let mut line = format!(
        "{}: stopped for {}; QEMU {} (process {}) -> QEMU {} (process {})",
        report.name,
        duration(report.stopped_us),
        version(&report.from),
        report.from.pid,
        version(&report.to),
        report.to.pid
    );
    if let Some(memory) = &report.memory {
        let changed: Vec<_> =
            memory.blocks_changed.iter().filter(|(_, is_changed)| **is_changed).map(|(id, _)| id).collect();
        line += &format!("; memory changed: {} bytes of RAM, blocks {changed:?}", memory.ram_changed_bytes);
        if !memory.not_compared.is_empty() {
            line += &format!(", not compared {:?}", memory.not_compared);
        }
    }
    line + "\n"
}
