//! `rekindle host` and `rekindle reboot-host`: prints the plans and reports of [`rekindle_reboot::host`].

use super::dry_run::{self, PlannedAction};
use super::{distinct_names, reboot_method};
use crate::cli::{Host as HostCommand, HostInit, HostSuspend, Others, RebootHost, RebootMethod};
use crate::output::{Output, Usage, duration};
use anyhow::{Result, bail};
use rekindle_reboot::host::plan::{HostRebootPlan, OthersPolicy, PlannedVm};
use rekindle_reboot::host::setup::{self, MountOutcome, SetupStep, SetupTarget};
use rekindle_reboot::host::{self, Fallback, ResumeOutcome, ResumeReport, SuspendReport};
use rekindle_reboot::recover::recover_suspend;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use serde_json::json;
use std::process::ExitCode;

pub fn run(output: &Output, command: &HostCommand) -> Result<ExitCode> {
    match command {
        HostCommand::Init(arguments) => init(output, arguments),
        HostCommand::Mount => mount(output),
        HostCommand::Suspend(arguments) => suspend(output, arguments),
        HostCommand::Resume => resume(output),
    }
}

pub fn reboot(output: &Output, arguments: &RebootHost) -> Result<ExitCode> {
    let host = Host::open()?;
    let others = match arguments.others {
        Others::Refuse => OthersPolicy::Refuse,
        Others::Saved => OthersPolicy::Saved,
        Others::Cold => OthersPolicy::Cold,
    };
    let plan = HostRebootPlan::make(&host, reboot_method(arguments.how), others)?;
    if !arguments.dry_run {
        host::shut_down_host(&host, &plan)?;
    }
    let verb = if arguments.dry_run { "would reboot" } else { "reboots" };
    let kernel = plan.kernel.as_ref().map_or_else(String::new, |kernel| format!(", into {}", kernel.version));
    let mut text = format!("this host {verb}{kernel}\n");
    for PlannedVm { name, how } in &plan.vms {
        text += &format!("{name}: {how}\n");
    }
    output.result(&plan, text)?;
    Ok(ExitCode::SUCCESS)
}

fn init(output: &Output, arguments: &HostInit) -> Result<ExitCode> {
    let target = SetupTarget::this_host()?;
    let start = arguments.start.map(|start| start.as_u64());
    let steps = setup::plan_steps(&target, arguments.reserve.as_u64(), start)?;
    let mounted = if arguments.write { setup::carry_out(&steps)? } else { None };
    let mut text: String = match arguments.write {
        true => steps.iter().map(|step| describe_done_step(step, mounted)).collect(),
        false => steps.iter().map(describe_planned_step).collect(),
    };
    if !arguments.write {
        text += "nothing was changed; to carry this out, repeat the command with --write\n";
    }
    output.result(&json!({"steps": steps, "written": arguments.write, "mounted": mounted}), text)?;
    Ok(ExitCode::SUCCESS)
}

fn describe_done_step(step: &SetupStep, mounted: Option<MountOutcome>) -> String {
    match step {
        SetupStep::Write { path, content } => format!("written  {} ({} bytes)\n", path.display(), content.len()),
        SetupStep::Remove { path, why } => format!("removed  {}: {why}\n", path.display()),
        SetupStep::Run { command } => format!("done     {}\n", command.join(" ")),
        SetupStep::Mount => match mounted {
            Some(mounted) => format!("{}\n", mounted_text(mounted)),
            None => "later    the RAM is mounted at the first boot that reserves it\n".into(),
        },
        SetupStep::Done { .. } | SetupStep::ByHand { .. } => describe_planned_step(step),
    }
}

fn describe_planned_step(step: &SetupStep) -> String {
    match step {
        SetupStep::Done { what } => format!("ok       {what}\n"),
        SetupStep::Write { path, content } => format!("write    {}\n{}", path.display(), indented(content)),
        SetupStep::Remove { path, why } => format!("remove   {}: {why}\n", path.display()),
        SetupStep::Run { command } => format!("run      {}\n", command.join(" ")),
        SetupStep::ByHand { what } => format!("by hand  {what}\n"),
        SetupStep::Mount => "mount    the reserved RAM, and start the units\n".into(),
    }
}

fn indented(content: &str) -> String {
    content.lines().map(|line| format!("         | {line}\n")).collect()
}

fn mounted_text(mounted: MountOutcome) -> &'static str {
    match mounted {
        MountOutcome::Before => "the reserved RAM was already mounted",
        MountOutcome::Kept => "the reserved RAM is mounted, with suspended guests in it",
        MountOutcome::New => "the reserved RAM is mounted, new and empty",
    }
}

fn mount(output: &Output) -> Result<ExitCode> {
    let mounted = setup::mount_ram(&Host::open()?)?;
    output.result(&json!({"mounted": mounted}), mounted_text(mounted))?;
    Ok(ExitCode::SUCCESS)
}

fn suspend(output: &Output, arguments: &HostSuspend) -> Result<ExitCode> {
    if arguments.planned {
        return suspend_planned(output);
    }
    let host = Host::open()?;
    let plan = plan_suspend(&host, arguments)?;
    if plan.vms.is_empty() {
        return Err(Usage("no VM runs".into()).into());
    }
    if arguments.dry_run {
        let action = planned_action(arguments.how);
        let plans: Vec<_> = host::check_suspend(&host, &plan.vms)?
            .into_iter()
            .map(|check| PlannedAction { name: check.name, action: check.result.map(|()| action.to_owned()) })
            .collect();
        return dry_run::print(output, &plans);
    }
    print_suspended(output, &host::suspend(&host, &plan.vms, &plan.token, Fallback::None)?)
}

/// Carries out the plan of `rekindle reboot-host`, at the end of a shutdown.
fn suspend_planned(output: &Output) -> Result<ExitCode> {
    let host = Host::open()?;
    // Without a plan, this shutdown is not one of `rekindle reboot-host`: there is nothing to do.
    let Some(plan) = HostRebootPlan::read(&host)? else { return Ok(ExitCode::SUCCESS) };
    let names: Vec<_> = plan.vms.iter().map(|vm| vm.name.clone()).collect();
    if recover_suspend(&host, &names, &plan.token)? {
        return Ok(ExitCode::SUCCESS);
    }
    let vms = plan.still_running(&host);
    if vms.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    print_suspended(output, &host::suspend(&host, &vms, &plan.token, Fallback::Cold)?)
}

fn print_suspended(output: &Output, reports: &[SuspendReport]) -> Result<ExitCode> {
    output.result(&reports, reports.iter().map(suspended_line).collect::<String>())?;
    Ok(ExitCode::SUCCESS)
}

/// Returns a suspend plan for the named VMs, or for all running ones.
fn plan_suspend(host: &Host, arguments: &HostSuspend) -> Result<HostRebootPlan> {
    if !arguments.all && arguments.names.is_empty() {
        return Err(Usage("name the VMs to suspend, or --all for all that run".into()).into());
    }
    let plan = HostRebootPlan::for_manual_suspend(host, reboot_method(arguments.how))?;
    if arguments.all {
        return Ok(plan);
    }
    let mut vms = Vec::new();
    for name in distinct_names(&arguments.names)? {
        match plan.vms.iter().find(|vm| vm.name == name) {
            Some(vm) => vms.push(vm.clone()),
            None if RunDir::new(&host.root, &name).exists() => {
                bail!("VM {name} does not run; rekindle status shows its state")
            }
            None => return Err(LifeError::Unknown { name }.into()),
        }
    }
    Ok(HostRebootPlan { vms, ..plan })
}

fn planned_action(how: RebootMethod) -> &'static str {
    match how {
        RebootMethod::Warm => "stop its guest, leave its RAM in place, and end its QEMU",
        RebootMethod::Saved => "stop its guest, write its RAM to disk, and end its QEMU",
        RebootMethod::Cold => "shut its guest down",
    }
}

fn suspended_line(report: &SuspendReport) -> String {
    let SuspendReport { name, how, fell_back, .. } = report;
    let why = fell_back.as_ref().map(|why| format!(", because the chosen method failed: {why}")).unwrap_or_default();
    match how {
        host::RebootMethod::Warm => format!("{name}: suspended, its RAM in place{why}\n"),
        host::RebootMethod::Saved => format!("{name}: suspended, its RAM on disk{why}\n"),
        host::RebootMethod::Cold => format!("{name}: shut down{why}\n"),
    }
}

fn resume(output: &Output) -> Result<ExitCode> {
    let reports = host::resume(&Host::open()?)?;
    let mut text: String = reports.iter().map(resumed_line).collect();
    if text.is_empty() {
        text = "no VM is suspended".into();
    }
    output.result(&reports, text)?;
    let has_failed = reports.iter().any(|report| matches!(report.outcome, ResumeOutcome::Failed { .. }));
    Ok(if has_failed { ExitCode::from(3) } else { ExitCode::SUCCESS })
}

fn resumed_line(report: &ResumeReport) -> String {
    let name = &report.name;
    let downtime = report.resume_us.map(|resume_us| duration(resume_us.saturating_sub(report.stop_us)));
    let downtime = downtime.unwrap_or_default();
    match &report.outcome {
        ResumeOutcome::Resumed => format!("{name}: resumed with its memory after {downtime}\n"),
        ResumeOutcome::Booted => format!("{name}: booted {downtime} after it was shut down\n"),
        ResumeOutcome::Lost { why } => format!("{name}: its memory is lost; booted from its disks: {why}\n"),
        ResumeOutcome::Failed { error } => format!("{name}: not resumed: {error}; try: rekindle recover {name}\n"),
    }
}
