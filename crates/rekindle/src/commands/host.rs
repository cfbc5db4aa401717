//! `rekindle host` and `rekindle reboot host`.

use super::{distinct, dry_run};
use crate::cli::{Host as Commands, HostInit, HostSuspend, Others, RebootHost, RebootMethod};
use crate::output::{Output, Usage, duration};
use anyhow::{Result, bail};
use rekindle_reboot::host::plan::{self, HostRebootPlan};
use rekindle_reboot::host::setup::{self, MountOutcome, SetupStep, SetupTarget};
use rekindle_reboot::host::{self, Fallback, ResumeOutcome, ResumeReport, SuspendReport};
use rekindle_reboot::recover::recover_suspend;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use serde_json::json;
use std::process::ExitCode;

pub fn run(output: &Output, command: &Commands) -> Result<ExitCode> {
    match command {
        Commands::Init(arguments) => init(output, arguments),
        Commands::Mount => mount(output),
        Commands::Suspend(arguments) => suspend(output, arguments),
        Commands::Resume => resume(output),
    }
}

fn method(how: RebootMethod) -> host::RebootMethod {
    match how {
        RebootMethod::Warm => host::RebootMethod::Warm,
        RebootMethod::Saved => host::RebootMethod::Saved,
        RebootMethod::Cold => host::RebootMethod::Cold,
    }
}

pub fn reboot(output: &Output, arguments: &RebootHost) -> Result<ExitCode> {
    let host = Host::open()?;
    let others = match arguments.others {
        Others::Refuse => plan::OthersPolicy::Refuse,
        Others::Saved => plan::OthersPolicy::Saved,
        Others::Cold => plan::OthersPolicy::Cold,
    };
    let plan = plan::make(&host, method(arguments.how), others)?;
    if !arguments.dry_run {
        plan::carry_out(&host, &plan)?;
    }
    let kernel = plan.kernel.as_ref().map_or_else(String::new, |kernel| format!(", into {}", kernel.version));
    let doing = if arguments.dry_run { "would reboot" } else { "reboots" };
    let mut text = format!("this host {doing}{kernel}\n");
    for (name, how) in &plan.vms {
        text += &format!("{name}: {how}\n");
    }
    output.result(&plan, text)?;
    Ok(ExitCode::SUCCESS)
}

fn init(output: &Output, arguments: &HostInit) -> Result<ExitCode> {
    let place = SetupTarget::here()?;
    let steps = setup::steps(&place, arguments.reserve.as_u64(), arguments.start.map(|start| start.as_u64()))?;
    let mounted = if arguments.write { setup::carry_out(&steps)? } else { None };
    let mut text = String::new();
    for step in &steps {
        text += &match step {
            SetupStep::Done { what } => format!("ok       {what}\n"),
            SetupStep::Write { path, content } if arguments.write => {
                format!("written  {} ({} bytes)\n", path.display(), content.len())
            }
            SetupStep::Write { path, content } => format!("write    {}\n{}", path.display(), indented(content)),
            SetupStep::Run { command } if arguments.write => format!("done     {}\n", command.join(" ")),
            SetupStep::Run { command } => format!("run      {}\n", command.join(" ")),
            SetupStep::ByHand { what } => format!("by hand  {what}\n"),
            SetupStep::Mount => match (arguments.write, mounted) {
                (true, Some(mounted)) => format!("{}\n", mounted_text(mounted)),
                (true, None) => "later    the RAM is mounted at the first boot that reserves it\n".into(),
                (false, _) => "mount    the reserved RAM, and start the units\n".into(),
            },
        };
    }
    if !arguments.write {
        text += "nothing was changed; to carry this out, repeat the command with --write\n";
    }
    output.result(&json!({"steps": steps, "written": arguments.write, "mounted": mounted}), text)?;
    Ok(ExitCode::SUCCESS)
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
    let host = Host::open()?;
    let (plan, fallback) = if arguments.planned {
        // Without a plan, this shutdown is not one of `rekindle reboot host`: there is nothing to do.
        let Some(plan) = plan::read(&host)? else { return Ok(ExitCode::SUCCESS) };
        let names: Vec<_> = plan.vms.iter().map(|(name, _)| name.clone()).collect();
        if recover_suspend(&host, &names, &plan.token)? {
            return Ok(ExitCode::SUCCESS);
        }
        let vms = plan::still_running(&host, &plan);
        (HostRebootPlan { vms, ..plan }, Fallback::Cold)
    } else {
        (chosen(&host, arguments)?, Fallback::None)
    };
    if plan.vms.is_empty() {
        if !arguments.planned {
            return Err(Usage("no VM runs".into()).into());
        }
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.dry_run {
        let checked: Vec<_> = host::check(&host, &plan.vms)?
            .into_iter()
            .map(|(name, checked)| (name, checked.map(|()| would(arguments.how).to_owned())))
            .collect();
        return dry_run::print(output, &checked);
    }
    let suspended = host::suspend(&host, &plan.vms, &plan.token, fallback)?;
    output.result(&suspended, suspended.iter().map(suspended_line).collect::<String>())?;
    Ok(ExitCode::SUCCESS)
}

/// Returns a suspend plan for the named VMs, or for all running ones.
fn chosen(host: &Host, arguments: &HostSuspend) -> Result<HostRebootPlan> {
    if !arguments.all && arguments.names.is_empty() {
        return Err(Usage("name the VMs to suspend, or --all for all that run".into()).into());
    }
    let all = plan::for_manual_suspend(host, method(arguments.how))?;
    if arguments.all {
        return Ok(all);
    }
    let mut vms = Vec::new();
    for name in distinct(&arguments.names)? {
        match all.vms.iter().find(|(running, _)| *running == name) {
            Some(vm) => vms.push(vm.clone()),
            None if RunDir::new(&host.root, &name).exists() => {
                bail!("VM {name} does not run; rekindle ls shows its state")
            }
            None => return Err(LifeError::Unknown { name }.into()),
        }
    }
    Ok(HostRebootPlan { vms, ..all })
}

fn would(how: RebootMethod) -> &'static str {
    match how {
        RebootMethod::Warm => "stop its guest, leave its RAM in place, and end its QEMU",
        RebootMethod::Saved => "stop its guest, write its RAM to disk, and end its QEMU",
        RebootMethod::Cold => "shut its guest down",
    }
}

fn suspended_line(one: &SuspendReport) -> String {
    let why =
        one.fell_back.as_ref().map(|why| format!(", because the chosen method failed: {why}")).unwrap_or_default();
    match one.how {
        host::RebootMethod::Warm => format!("{}: suspended, its RAM in place{why}\n", one.name),
        host::RebootMethod::Saved => format!("{}: suspended, its RAM on disk{why}\n", one.name),
        host::RebootMethod::Cold => format!("{}: shut down{why}\n", one.name),
    }
}

fn resume(output: &Output) -> Result<ExitCode> {
    let resumed = host::resume(&Host::open()?)?;
    let mut text: String = resumed.iter().map(resumed_line).collect();
    if text.is_empty() {
        text = "no VM is suspended".into();
    }
    output.result(&resumed, text)?;
    let failed = resumed.iter().any(|one| matches!(one.outcome, ResumeOutcome::Failed { .. }));
    Ok(if failed { ExitCode::from(3) } else { ExitCode::SUCCESS })
}

fn resumed_line(one: &ResumeReport) -> String {
    let away = one.resume_us.map(|at| duration(at.saturating_sub(one.stop_us))).unwrap_or_default();
    let name = &one.name;
    match &one.outcome {
        ResumeOutcome::Resumed => format!("{name}: resumed with its memory after {away}\n"),
        ResumeOutcome::Booted => format!("{name}: booted {away} after it was shut down\n"),
        ResumeOutcome::Lost { why } => format!("{name}: its memory is lost; booted from its disks: {why}\n"),
        ResumeOutcome::Failed { error } => format!("{name}: not resumed: {error}; try: rekindle recover {name}\n"),
    }
}
