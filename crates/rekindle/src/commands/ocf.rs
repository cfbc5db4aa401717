//! `rekindle ocf`.

use super::store::identity;
use super::{dry_run, moving};
use crate::cli::{DiskRule, Ocf, OcfMigrate, OcfMonitor, OcfResource, OcfStop, StopMethod};
use crate::output::Output;
use anyhow::Result;
use rekindle_cluster::config::{Utilization, configuration_commands};
use rekindle_cluster::migrate::{migrate_to as migrate, settings as move_settings};
use rekindle_cluster::monitor::{Verdict, monitor as check_running};
use rekindle_cluster::resource::Resource;
use rekindle_cluster::start::{StartResult, start as begin};
use rekindle_cluster::stop::{self, stop as end};
use rekindle_life::stop::{Stoppable, stoppable};
use rekindle_protect::moving::MoveEvent;
use rekindle_protect::moving::source::check;
use rekindle_protect::protector::{DiskPolicy, ProtectSettings};
use rekindle_vm::definition::Definition;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

pub fn run(output: &Output, command: &Ocf) -> Result<ExitCode> {
    match command {
        Ocf::Start(arguments) => start(output, arguments),
        Ocf::Stop(arguments) => stop(output, arguments),
        Ocf::MigrateTo(arguments) => migrate_to(output, arguments),
        Ocf::Monitor(arguments) => monitor(output, arguments),
        Ocf::ShowConfig(arguments) => show_config(output, arguments),
    }
}

fn definition(arguments: &OcfResource) -> PathBuf {
    let usual = || Path::new("/etc/rekindle").join(format!("{}.toml", arguments.name));
    arguments.definition.clone().unwrap_or_else(usual)
}

fn resource(arguments: &OcfResource) -> Resource {
    let disks = match (&arguments.disk_hook, arguments.disk) {
        (Some(command), _) => DiskPolicy::Hook(command.clone()),
        (None, Some(DiskRule::CrashConsistent)) => DiskPolicy::CrashConsistent,
        (None, None) => DiskPolicy::Refuse,
    };
    let protect = ProtectSettings {
        store: arguments.store.clone(),
        identity: identity(&arguments.tls),
        every: arguments.every.as_duration(),
        policy: arguments.policy,
        keep: arguments.keep,
        max_lag: None,
        disks,
        count: None,
        output_commit: arguments.output_commit,
        compare: false,
        stay: false,
        create_store: false,
        abandon_old: false,
    };
    Resource { name: arguments.name.clone(), definition: definition(arguments), protect }
}

fn deadline(arguments: &OcfResource) -> Instant {
    Instant::now() + arguments.within.as_duration()
}

fn start(output: &Output, arguments: &OcfResource) -> Result<ExitCode> {
    let (host, resource) = (Host::open()?, resource(arguments));
    let started = begin(&host, &resource, deadline(arguments))?;
    let name = &resource.name;
    super::reboot::start_helpers(&host, name.as_str());
    let text = match &started {
        StartResult::Already => format!("{name} runs already"),
        StartResult::Restored(restored) => format!("{name} resumed from checkpoint {}", restored.checkpoint),
        StartResult::Booted { why } => format!("{name} was booted: {why}"),
    };
    output.result(&started, text)?;
    Ok(ExitCode::SUCCESS)
}

fn stop(output: &Output, arguments: &OcfStop) -> Result<ExitCode> {
    let how = match arguments.how {
        StopMethod::Suspend => stop::StopMethod::Suspend,
        StopMethod::Shutdown => stop::StopMethod::ShutDown,
    };
    let resource = resource(&arguments.resource);
    if arguments.dry_run {
        let name = resource.name.to_string();
        let first = match how {
            stop::StopMethod::Suspend => "take a last checkpoint",
            stop::StopMethod::ShutDown => "shut its guest down",
        };
        let would = match stoppable(&Host::open()?, &name) {
            Ok(Stoppable::Guest(pid)) => Ok(format!("{first}, and end QEMU process {pid}")),
            Ok(Stoppable::Prepared(pid)) => Ok(format!("end QEMU process {pid}, which waits for a restore")),
            Ok(Stoppable::Files) => Ok("remove what is left of it; its QEMU has ended".to_owned()),
            Err(LifeError::Unknown { .. }) => Ok("do nothing: it does not run here".to_owned()),
            Err(e) => Err(e),
        };
        return dry_run::print(output, &[(name, would)]);
    }
    let stopped = end(&Host::open()?, &resource, how, deadline(&arguments.resource))?;
    let text = match &stopped.lost {
        None if how != stopped.how => {
            format!(
                "{} is off; it did not shut down in time; the next start resumes it from its last checkpoint",
                resource.name
            )
        }
        None => format!("{} is off", resource.name),
        Some(why) => format!("{} is off, without a last checkpoint: {why}", resource.name),
    };
    output.result(&stopped, text)?;
    Ok(ExitCode::SUCCESS)
}

fn migrate_to(output: &Output, arguments: &OcfMigrate) -> Result<ExitCode> {
    let resource = resource(&arguments.resource);
    let mut report = |event: &MoveEvent| tracing::debug!("{event}");
    let (far, deadline) = (moving::remote_host(&arguments.far), deadline(&arguments.resource));
    if arguments.dry_run {
        let (name, would) = (resource.name.to_string(), format!("move its guest to {}", far.host));
        let checked = check(&Host::open()?, &resource.name, &move_settings(&resource, far), &mut report);
        return dry_run::print(output, &[(name, checked.map(|()| would))]);
    }
    let moved = migrate(&Host::open()?, &resource, far, deadline, &mut report)?;
    output.result(&moved, moving::text(&moved))?;
    Ok(ExitCode::SUCCESS)
}

fn monitor(output: &Output, arguments: &OcfMonitor) -> Result<ExitCode> {
    let resource = resource(&arguments.resource);
    // An unknown state must not count as "not running": report it as a failure.
    let verdict = match Host::open() {
        Ok(host) => {
            let verdict = check_running(&host, &resource, deadline(&arguments.resource), arguments.deep);
            if let Verdict::Running | Verdict::Degraded(_) = verdict {
                super::reboot::start_helpers(&host, resource.name.as_str());
            }
            verdict
        }
        Err(e) => Verdict::Failed(e.to_string()),
    };
    output.result(&verdict, format!("{}: {verdict}", resource.name))?;
    Ok(ExitCode::from(verdict.exit_code()))
}

fn show_config(output: &Output, arguments: &OcfResource) -> Result<ExitCode> {
    let file = definition(arguments);
    // Not a usage error: the agent would report that as an error of the whole cluster, but files are specific to a
    // node.
    let definition = Definition::load(&file)?;
    let path = |path: &PathBuf| path.display().to_string();
    let mut parameters = vec![("store", arguments.store.to_string())];
    let tls = [("cert", &arguments.tls.cert), ("key", &arguments.tls.key), ("ca", &arguments.tls.ca)];
    parameters.extend(tls.into_iter().filter_map(|(key, value)| Some((key, path(value.as_ref()?)))));
    parameters.push(("every", arguments.every.to_string()));
    parameters.push(("keep", arguments.keep.to_string()));
    parameters.extend(arguments.policy.map(|policy| ("policy", policy.to_string())));
    parameters.extend(arguments.disk.map(|DiskRule::CrashConsistent| ("disk", "crash-consistent".to_owned())));
    parameters.extend(arguments.disk_hook.clone().map(|command| ("disk_hook", command)));
    parameters.extend(arguments.output_commit.then(|| ("output_commit", "true".to_owned())));
    let utilization = Utilization::of(&definition);
    output.result(
        &utilization,
        configuration_commands(&definition, &std::path::absolute(&file).unwrap_or(file), &parameters),
    )?;
    Ok(ExitCode::SUCCESS)
}
