//! `rekindle replace-qemu`: replaces QEMUs, and prints what was done to each VM.

use super::dry_run::{self, PlannedAction};
use super::helpers::{report_stopped, start_helpers};
use super::{DESCRIPTORS_TO_RUN_GUESTS, distinct_names, reboot_method};
use crate::cli::{RebootMethod, RebootVmm};
use crate::output::{Output, Usage, chain, duration, exit_status_for};
use crate::progress::start_spinner;
use anyhow::Result;
use rekindle_handover::GuestStatus;
use rekindle_kernel::descriptor_limit;
use rekindle_reboot::bare::{self, BareOptions};
use rekindle_reboot::error::RebootError;
use rekindle_reboot::libvirt::{self, AllDomains, DomainOptions, ReplacedDomains, Selection, SkippedDomain};
use rekindle_reboot::vmm::{self, RebootReport, ReplaceOptions, VmOutcome, VmPlan};
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::status::{self, Status};
use serde::Serialize;
use std::path::Path;
use std::process::ExitCode;

/// Open files for each VM whose QEMU is replaced.
const DESCRIPTORS_PER_VM: u64 = 48;

/// The JSON result of `rekindle replace-qemu`.
#[derive(Serialize)]
struct VmmResult<'a> {
    how: vmm::RebootMethod,
    vms: Vec<VmResult<'a>>,
    /// Time from the first guest's stop to the last guest's resume; `None` if no VM was rebooted.
    #[serde(skip_serializing_if = "Option::is_none")]
    first_stop_to_last_resume_us: Option<u64>,
    /// How long libvirt's daemon was away: one entry for each time that it was stopped.
    #[serde(skip_serializing_if = "<[u64]>::is_empty")]
    daemon_absences_us: &'a [u64],
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
    /// Left out by `--all-libvirt`.
    Skipped {
        name: &'a str,
        reason: &'a str,
    },
}

pub fn reboot_vmm(output: &Output, arguments: &RebootVmm) -> Result<ExitCode> {
    let host = Host::open()?;
    if let Some(socket) = &arguments.qmp {
        return replace_bare(output, &host, arguments, socket);
    }
    let selected = select(&host, arguments)?;
    let domain_options = DomainOptions { qemu: arguments.qemu.clone(), in_place: arguments.in_place };
    let options = ReplaceOptions {
        how: reboot_method(arguments.how),
        qemu: arguments.qemu.clone(),
        rollback: arguments.rollback,
        verify_memory: arguments.verify_memory,
    };
    if arguments.dry_run {
        return dry_run::print(output, &plan(&host, &selected, &options, &domain_options));
    }
    let Selected { vms, domains, skipped } = selected;
    descriptor_limit::require(DESCRIPTORS_TO_RUN_GUESTS + DESCRIPTORS_PER_VM * (vms.len() + domains.len()) as u64)?;
    let spinner =
        start_spinner(output, format!("{} reboot of {}", options.how, [&*vms, &*domains].concat().join(", ")));
    let mut outcomes = if vms.is_empty() { Vec::new() } else { vmm::reboot(&host, &vms, &options) };
    let ReplacedDomains { outcomes: of_domains, absences_us } =
        libvirt::replace_domains(&host, &domains, &domain_options);
    outcomes.extend(of_domains);
    spinner.finish_and_clear();
    vms.iter().for_each(|name| start_helpers(&host, name));
    let failed = outcomes.iter().filter(|outcome| outcome.result.is_err());
    failed.for_each(|outcome| report_stopped(&host, &outcome.name));
    print_vmm_outcomes(output, options.how, &outcomes, &skipped, &absences_us)?;
    let worst = outcomes.iter().map(|vm| vm.result.as_ref().map_or_else(|e| exit_status_for(e.guest), |_| 0)).max();
    Ok(ExitCode::from(worst.unwrap_or(0)))
}

/// Plans the replacement of one guest's QEMU by the installed one.
pub(super) fn plan_replacement(host: &Host, name: &str) -> Result<PlannedAction<RebootError>> {
    let (domains, vms) = separate_domains(host, vec![name.to_owned()])?;
    let selected = Selected { vms, domains, ..Selected::default() };
    let options = ReplaceOptions { how: vmm::RebootMethod::Warm, qemu: None, rollback: false, verify_memory: false };
    let plans = plan(host, &selected, &options, &DomainOptions { qemu: None, in_place: false });
    plans.into_iter().next().ok_or_else(|| LifeError::Unknown { name: name.into() }.into())
}

/// Replaces the QEMU with the QMP socket `socket`.
fn replace_bare(output: &Output, host: &Host, arguments: &RebootVmm, socket: &Path) -> Result<ExitCode> {
    let [name] = &*distinct_names(&arguments.names)? else {
        return Err(Usage("--qmp: one name, for one QEMU".into()).into());
    };
    if !matches!(arguments.how, RebootMethod::Warm) {
        return Err(Usage("--how is not possible with --qmp".into()).into());
    }
    let options = BareOptions { qmp: socket.to_owned(), qemu: arguments.qemu.clone(), in_place: arguments.in_place };
    if arguments.dry_run {
        return dry_run::print(output, &[planned_action(vmm::RebootMethod::Warm, bare::plan(host, name, &options))]);
    }
    let spinner = start_spinner(output, format!("replacing the QEMU of {name}"));
    let outcome = bare::replace(host, name, &options);
    spinner.finish_and_clear();
    let status = outcome.result.as_ref().map_or_else(|e| exit_status_for(e.guest), |_| 0);
    print_vmm_outcomes(output, vmm::RebootMethod::Warm, &[outcome], &[], &[])?;
    Ok(ExitCode::from(status))
}

/// What a command replaces.
#[derive(Default)]
struct Selected {
    /// Rekindle's own VMs.
    vms: Vec<String>,
    /// Domains of libvirt.
    domains: Vec<String>,
    skipped: Vec<SkippedDomain>,
}

fn select(host: &Host, arguments: &RebootVmm) -> Result<Selected> {
    let selected = if arguments.all_libvirt {
        let selection = if arguments.outdated { Selection::Outdated } else { Selection::All };
        let AllDomains { names, skipped } = libvirt::all_domains(host, selection)?;
        if names.is_empty() && skipped.is_empty() {
            return Err(Usage("--all-libvirt: libvirt runs no domain".into()).into());
        }
        Selected { domains: names, skipped, ..Selected::default() }
    } else {
        let names = if arguments.all { running_vms(host)? } else { distinct_names(&arguments.names)? };
        let (domains, vms) = separate_domains(host, names)?;
        Selected { vms, domains, ..Selected::default() }
    };
    if arguments.in_place && !selected.vms.is_empty() {
        let vms = selected.vms.join(", ");
        return Err(
            Usage(format!("--in-place is not possible for {vms}: the RAM of Rekindle's VMs is not copied")).into()
        );
    }
    if arguments.all_libvirt || !selected.domains.is_empty() {
        check_domain_arguments(arguments, &selected.domains)?;
    }
    Ok(selected)
}

/// Plans what would be done, for `--dry-run`.
fn plan(
    host: &Host,
    selected: &Selected,
    options: &ReplaceOptions,
    domain_options: &DomainOptions,
) -> Vec<PlannedAction<RebootError>> {
    let plans = vmm::plan(host, &selected.vms, options);
    let plans = plans.into_iter().chain(libvirt::plan_domains(host, &selected.domains, domain_options));
    let action = |plan: VmPlan| planned_action(options.how, plan);
    let skip = |SkippedDomain { name, reason }: &SkippedDomain| PlannedAction {
        name: name.clone(),
        action: Ok(format!("skip it: {reason}")),
    };
    plans.map(action).chain(selected.skipped.iter().map(skip)).collect()
}

fn planned_action(how: vmm::RebootMethod, plan: VmPlan) -> PlannedAction<RebootError> {
    PlannedAction { name: plan.name, action: plan.result.map(|replacement| describe_plan(how, &replacement)) }
}

/// Names of domains of libvirt, and of Rekindle's own VMs.
fn separate_domains(host: &Host, names: Vec<String>) -> Result<(Vec<String>, Vec<String>)> {
    let (mut domains, mut vms) = (Vec::new(), Vec::new());
    for name in names {
        // An attached VM is a domain too.
        let is_own = State::read(&RunDir::new(&host.root, &name))?.is_some_and(|state| state.attached.is_none());
        if !is_own && libvirt::is_domain(&name) { domains.push(name) } else { vms.push(name) }
    }
    Ok((domains, vms))
}

/// Rejects arguments that have no meaning for domains of libvirt.
fn check_domain_arguments(arguments: &RebootVmm, domains: &[String]) -> Result<()> {
    let is_warm = matches!(arguments.how, RebootMethod::Warm);
    let options =
        [(!is_warm, "--how"), (arguments.rollback, "--rollback"), (arguments.verify_memory, "--verify-memory")];
    let domains = if domains.is_empty() { "domains".to_owned() } else { domains.join(", ") };
    if let Some((_, option)) = options.iter().find(|(is_given, _)| *is_given) {
        return Err(Usage(format!("{option} is not possible for {domains}, which libvirt manages")).into());
    }
    Ok(())
}

/// Describes what a replacement would do, for `--dry-run`.
fn describe_plan(how: vmm::RebootMethod, plan: &vmm::ReplacementPlan) -> String {
    let vmm::ReplacementPlan { from, binary, version, moves_in_place } = plan;
    let guest = match how {
        vmm::RebootMethod::Warm if *moves_in_place => {
            "its guest stopped for milliseconds, and then slower while its RAM is moved in place"
        }
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
        let rundir = RunDir::new(&host.root, name);
        let is_attached = matches!(State::read(&rundir), Ok(Some(state)) if state.attached.is_some());
        !is_attached && matches!(status::status(&rundir), Ok(Status::Running | Status::Degraded(_)))
    });
    if names.is_empty() {
        return Err(Usage("--all: no VM runs".into()).into());
    }
    Ok(names)
}

fn print_vmm_outcomes(
    output: &Output,
    how: vmm::RebootMethod,
    outcomes: &[VmOutcome],
    skipped: &[SkippedDomain],
    absences_us: &[u64],
) -> Result<()> {
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
    for SkippedDomain { name, reason } in skipped {
        text += &format!("{name}: skipped: {reason}\n");
        vms.push(VmResult::Skipped { name, reason });
    }
    let first_stop_us = reports.iter().map(|report| report.stop_host_us).min();
    let last_resume_us = reports.iter().map(|report| report.resume_host_us).max();
    let total_us = first_stop_us.zip(last_resume_us).map(|(stop, resume)| resume.saturating_sub(stop));
    if let Some(total_us) = total_us
        && outcomes.len() > 1
    {
        text += &format!("from the first stop to the last resume: {}\n", duration(total_us));
    }
    text += &absences_line(absences_us);
    if output.json() || !text.is_empty() {
        let first_stop_to_last_resume_us = total_us;
        let result = VmmResult { how, vms, first_stop_to_last_resume_us, daemon_absences_us: absences_us };
        output.result(&result, text)?;
    }
    Ok(())
}

fn absences_line(absences_us: &[u64]) -> String {
    match absences_us {
        [] => String::new(),
        [us] => format!("libvirt's daemon was stopped for {}\n", duration(*us)),
        several => {
            let times: Vec<_> = several.iter().map(|us| duration(*us)).collect();
            format!(
                "libvirt's daemon was stopped {} times, for {}: there was no memory for copies of all guests' RAM at the \
                 same time\n",
                times.len(),
                times.join(", ")
            )
        }
    }
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
    if let Some(moved) = &report.moved_in_place {
        line += &format!(
            "; its RAM was moved in place: it waited for {} pages, at most {}",
            moved.demanded_pages,
            duration(moved.longest_wait_us)
        );
    }
    line + "\n"
}
