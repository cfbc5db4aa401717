//! `rekindle reboot`.

use super::{distinct, dry_run, known};
use crate::cli::{EndOs, NameOnly, OsMethod, RebootMethod, RebootOs, RebootVmm};
use crate::output::{Output, Usage, bytes, chain, duration, status_left};
use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use rekindle_handover::GuestStatus;
use rekindle_life::shutdown::{EndMethod, Ended};
use rekindle_reboot::os::phase::{PhaseOutcome, SkippedCandidate, saver};
use rekindle_reboot::os::{self, OsRebootReport};
use rekindle_reboot::vmm::{self, RebootReport, ReplaceOptions, VmOutcome};
use rekindle_vm::disks::RetainedCache;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::status::{self, Status};
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
    how: os::OsRebootMethod,
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

pub fn vmm(output: &Output, arguments: &RebootVmm) -> Result<ExitCode> {
    let host = Host::open()?;
    let names = if arguments.all { running(&host)? } else { distinct(&arguments.names)? };
    let how = match arguments.how {
        RebootMethod::Warm => vmm::RebootMethod::Warm,
        RebootMethod::Saved => vmm::RebootMethod::Saved,
        RebootMethod::Cold => vmm::RebootMethod::Cold,
    };
    let options = ReplaceOptions {
        how,
        qemu: arguments.qemu.clone(),
        rollback: arguments.rollback,
        verify_memory: arguments.verify_memory,
    };
    if arguments.dry_run {
        let planned: Vec<_> = vmm::plan(&host, &names, &options)
            .into_iter()
            .map(|(name, planned)| (name, planned.map(|planned| would(how, &planned))))
            .collect();
        return dry_run::print(output, &planned);
    }
    let waiting = spinner(output, format!("{how} reboot of {}", names.join(", ")));
    let outcomes = vmm::reboot(&host, &names, &options);
    waiting.finish_and_clear();
    names.iter().for_each(|name| start_helpers(&host, name));
    print(output, how, &outcomes)?;
    let worst = outcomes.iter().map(|(_, outcome)| outcome.as_ref().map_or_else(|e| status_left(e.guest), |_| 0)).max();
    Ok(ExitCode::from(worst.unwrap_or(0)))
}

pub fn os(output: &Output, arguments: &RebootOs) -> Result<ExitCode> {
    let host = Host::open()?;
    let name = arguments.name.as_str();
    let how = match arguments.how {
        Some(OsMethod::Cold) => os::OsRebootMethod::Cold,
        Some(OsMethod::WarmCache) => os::OsRebootMethod::WarmCache,
        Some(OsMethod::Kexec) => os::OsRebootMethod::Kexec,
        Some(OsMethod::Phase) => os::OsRebootMethod::Phase,
        None => os::default_method(&host, name),
    };
    if how != os::OsRebootMethod::Kexec && (arguments.kernel.is_some() || arguments.initrd.is_some()) {
        return Err(Usage("--kernel and --initrd are for --how kexec".into()).into());
    }
    if how != os::OsRebootMethod::Phase && arguments.candidate.is_some() {
        return Err(Usage("--candidate is for --how phase".into()).into());
    }
    let end = match arguments.end {
        EndOs::Shutdown => EndMethod::Shutdown,
        EndOs::Freeze if how == os::OsRebootMethod::Kexec => {
            return Err(Usage(
                "--end freeze is not for --how kexec: the guest shuts itself down to start the next kernel".into(),
            )
            .into());
        }
        EndOs::Freeze => EndMethod::Freeze,
    };
    let kexec = os::KexecRequest { kernel: arguments.kernel.clone(), initrd: arguments.initrd.clone() };
    let request = os::OsRebootRequest { how, kexec, candidate: arguments.candidate.clone(), end };
    if arguments.dry_run {
        let would = match how {
            os::OsRebootMethod::Cold => "shut its guest down and boot it",
            os::OsRebootMethod::WarmCache => "shut its guest down and boot it, with what it has cached of its disks",
            os::OsRebootMethod::Kexec => "have its guest load another kernel and start that",
            os::OsRebootMethod::Phase => {
                "shut its guest down and continue from a saved phase of an earlier boot, or else boot it"
            }
        };
        let checked = os::check(&host, name, &request).map(|()| would.to_owned()).map_err(|failure| *failure.error);
        return dry_run::print(output, &[(name.to_owned(), checked)]);
    }
    let waiting = spinner(output, format!("reboot of {name}"));
    let rebooted = os::reboot(&host, name, &request);
    waiting.finish_and_clear();
    let OsRebootReport { report, kept, ended, kexec, phase } = &rebooted?;
    start_helpers(&host, name);
    let candidate = phase.as_ref().and_then(|phase| phase.candidate.as_ref());
    let mut text = match (how, kexec) {
        _ if candidate.is_some() => {
            let (candidate, stopped) = (candidate.map_or("", String::as_str), duration(report.stopped_us));
            format!("{name}: continued from phase {candidate} after {stopped}")
        }
        (os::OsRebootMethod::Kexec, Some(loaded)) => {
            format!("{name}: runs again after {}, with kernel {}", duration(report.stopped_us), loaded.kernel.display())
        }
        (os::OsRebootMethod::Kexec, None) => format!("{name}: was rebooted by its firmware, not by kexec"),
        _ => format!("{name}: booted after {}", duration(report.stopped_us)),
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
            let disks = format!("{}{}", if disks.len() == 1 { "disk " } else { "disks " }, disks.join(", "));
            text += &format!("; {} of its cache of {disks} are retained", bytes(kept.bytes));
        }
        None if how == os::OsRebootMethod::WarmCache => text += "; nothing of its cache is retained",
        None => {}
    }
    output.result(
        &OsResult { how, report, kept: kept.as_ref(), ended: *ended, kexec: kexec.as_ref(), phase: phase.as_ref() },
        text,
    )?;
    Ok(ExitCode::SUCCESS)
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
    known(&Host::open()?, arguments.name.as_str())?;
    saver::run(&Host::open()?, arguments.name.as_str())?;
    Ok(ExitCode::SUCCESS)
}

pub fn watch(arguments: &NameOnly) -> Result<ExitCode> {
    known(&Host::open()?, arguments.name.as_str())?;
    os::watch::run(&Host::open()?, arguments.name.as_str())?;
    Ok(ExitCode::SUCCESS)
}

/// Shows a spinner while an operation runs. The duration depends on guest and disk, so no progress can be shown.
fn spinner(output: &Output, message: String) -> ProgressBar {
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

fn would(how: vmm::RebootMethod, planned: &vmm::ReplacementPlan) -> String {
    let vmm::ReplacementPlan { from, binary, version } = planned;
    let guest = match how {
        vmm::RebootMethod::Warm => "its guest stopped for milliseconds",
        vmm::RebootMethod::Saved => "its guest stopped while its RAM is saved to disk and loaded",
        vmm::RebootMethod::Cold => "its guest shut down and booted",
    };
    let old = from.version.as_ref().map(|version| format!(" ({version})")).unwrap_or_default();
    format!("replace QEMU process {}{old} by {} ({version}), {guest}", from.pid, binary.display())
}

fn running(host: &Host) -> Result<Vec<String>> {
    let mut names = RunDir::list(&host.root)?;
    let runs = |name: &str| status::status(&RunDir::new(&host.root, name));
    names.retain(|name| matches!(runs(name), Ok(Status::Running | Status::Degraded(_))));
    if names.is_empty() {
        return Err(Usage("--all: no VM runs".into()).into());
    }
    Ok(names)
}

fn print(output: &Output, how: vmm::RebootMethod, outcomes: &[VmOutcome]) -> Result<()> {
    let done = || outcomes.iter().filter_map(|(_, outcome)| outcome.as_ref().ok());
    let first = done().map(|report| report.stop_host_us).min();
    let last = done().map(|report| report.resume_host_us).max();
    let span = first.zip(last).map(|(first, last)| last.saturating_sub(first));
    let mut text = String::new();
    let mut vms = Vec::new();
    for (name, outcome) in outcomes {
        match outcome {
            Ok(report) => {
                text += &line(report);
                let memory_changed_bytes = report.memory.as_ref().map(|memory| memory.ram_changed_bytes);
                vms.push(VmResult::Done { report, memory_changed_bytes });
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
    if let (Some(span), true) = (span, outcomes.len() > 1) {
        text += &format!("from the first stop to the last resume: {}\n", duration(span));
    }
    if output.json() || !text.is_empty() {
        output.result(&VmmResult { how, vms, first_stop_to_last_resume_us: span }, text)?;
    }
    Ok(())
}

fn line(report: &RebootReport) -> String {
    let version = |side: &vmm::QemuInfo| side.version.as_ref().map(ToString::to_string).unwrap_or_default();
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
        let changed: Vec<_> = memory.blocks_changed.iter().filter(|(_, changed)| **changed).map(|(id, _)| id).collect();
        line += &format!("; memory changed: {} bytes of RAM, blocks {changed:?}", memory.ram_changed_bytes);
        if !memory.not_compared.is_empty() {
            line += &format!(", not compared {:?}", memory.not_compared);
        }
    }
    line + "\n"
}
