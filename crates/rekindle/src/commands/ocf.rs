//! `rekindle ocf`: the actions of the resource agent, which [`rekindle_cluster`] carries out.

use super::dry_run::{self, PlannedAction};
use super::helpers::start_helpers;
use super::moving;
use super::protect::protect_settings;
use crate::cli::{
    CheckpointOptions, DiskRule, Ocf, OcfMigrate, OcfMonitor, OcfResource, OcfStop, StopMethod, StoreCredentials,
};
use crate::output::{Output, Usage};
use anyhow::Result;
use clap::ValueEnum;
use rekindle_cluster::config::{Configured, Source, Utilization, check_libvirt, configuration_commands};
use rekindle_cluster::migrate;
use rekindle_cluster::monitor::{self, Verdict};
use rekindle_cluster::outcome::StartResult;
use rekindle_cluster::resource::{GuestKind, Resource};
use rekindle_cluster::start;
use rekindle_cluster::stop;
use rekindle_life::stop::{Stoppable, stoppable};
use rekindle_protect::moving::MoveEvent;
use rekindle_protect::moving::source::check;
use rekindle_vm::definition::Definition;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

pub fn run(output: &Output, command: &Ocf) -> Result<ExitCode> {
    match command {
        Ocf::Start(arguments) => start_vm(output, arguments),
        Ocf::Stop(arguments) => stop_vm(output, arguments),
        Ocf::MigrateTo(arguments) => migrate_to(output, arguments),
        Ocf::Monitor(arguments) => monitor_vm(output, arguments),
        Ocf::ShowConfig(arguments) => show_config(output, arguments),
    }
}

fn definition_path(arguments: &OcfResource) -> PathBuf {
    let default = || Path::new("/etc/rekindle").join(format!("{}.toml", arguments.name));
    arguments.definition.clone().unwrap_or_else(default)
}

fn resource(arguments: &OcfResource) -> Result<Resource> {
    let (guest, default_rule) = match &arguments.libvirt {
        Some(name) => (GuestKind::Domain { name: name.clone() }, Some(DiskRule::Overlays)),
        None => (GuestKind::Own { definition: definition_path(arguments) }, None),
    };
    if let (GuestKind::Own { .. }, Some(DiskRule::Overlays)) = (&guest, arguments.disk) {
        let why = "--disk overlays is for a domain (--libvirt); give the VM's disks `server = true` in the definition, or use \
                   --disk crash-consistent";
        return Err(Usage(why.into()).into());
    }
    let protect = protect_settings(&arguments.checkpoints, arguments.disk.or(default_rule), None);
    Ok(Resource { name: arguments.name.clone(), guest, protect })
}

fn deadline(arguments: &OcfResource) -> Instant {
    Instant::now() + arguments.within.as_duration()
}

fn start_vm(output: &Output, arguments: &OcfResource) -> Result<ExitCode> {
    let (host, resource) = (Host::open()?, resource(arguments)?);
    let started = start::start(&host, &resource, deadline(arguments))?;
    let name = &resource.name;
    start_helpers(&host, name.as_str());
    let text = match &started {
        StartResult::Already => format!("{name} runs already"),
        StartResult::Restored(restored) => format!("{name} resumed from checkpoint {}", restored.checkpoint),
        StartResult::RestoredIntoLibvirt(restored) => {
            format!("libvirt runs domain {} from checkpoint {}", restored.domain, restored.checkpoint)
        }
        StartResult::Booted { why } => format!("{name} was booted: {why}"),
    };
    output.result(&started, text)?;
    Ok(ExitCode::SUCCESS)
}

fn stop_vm(output: &Output, arguments: &OcfStop) -> Result<ExitCode> {
    let how = match arguments.how {
        StopMethod::Suspend => stop::StopMethod::Suspend,
        StopMethod::Shutdown => stop::StopMethod::ShutDown,
    };
    let host = Host::open()?;
    let resource = resource(&arguments.resource)?;
    let name = &resource.name;
    if arguments.dry_run {
        let action = plan_stop(&host, &resource, how);
        return dry_run::print(output, &[PlannedAction { name: name.to_string(), action }]);
    }
    let stopped = stop::stop(&host, &resource, how, deadline(&arguments.resource))?;
    let text = match &stopped.lost {
        None if how != stopped.how => {
            format!("{name} is off; it did not shut down in time; the next start resumes it from its last checkpoint")
        }
        None => format!("{name} is off"),
        Some(why) => format!("{name} is off, without a last checkpoint: {why}"),
    };
    output.result(&stopped, text)?;
    Ok(ExitCode::SUCCESS)
}

/// Describes the action of a stop.
fn plan_stop(host: &Host, resource: &Resource, how: stop::StopMethod) -> Result<String, LifeError> {
    let first_step = match how {
        stop::StopMethod::Suspend => "take a last checkpoint",
        stop::StopMethod::ShutDown => "shut its guest down",
    };
    if let Ok(Some(stray)) = stop::stray(host, resource) {
        return Ok(format!("shut the guest down, and kill its QEMU if that takes too long: {stray}"));
    }
    match stoppable(host, resource.name.as_str()) {
        Ok(Stoppable::Guest(pid)) => Ok(format!("{first_step}, and end QEMU process {pid}")),
        Ok(Stoppable::Prepared(pid)) => Ok(format!("end QEMU process {pid}, which waits for a restore")),
        Ok(Stoppable::Files) => Ok("remove what is left of it; its QEMU has ended".to_owned()),
        Err(LifeError::Attached { .. }) if matches!(resource.guest, GuestKind::Domain { .. }) => {
            Ok(format!("{first_step}, and end the QEMU of its domain"))
        }
        Err(LifeError::Unknown { .. }) => Ok("do nothing: it does not run here".to_owned()),
        Err(e) => Err(e),
    }
}

fn migrate_to(output: &Output, arguments: &OcfMigrate) -> Result<ExitCode> {
    let host = Host::open()?;
    let resource = resource(&arguments.resource)?;
    if let GuestKind::Domain { name } = &resource.guest {
        let why = format!(
            "domain {name} cannot be moved while it runs; set allow-migrate=false: it is then stopped here, and \
                           started on the other node"
        );
        return Err(Usage(why).into());
    }
    let remote = moving::remote_host(&arguments.remote);
    let deadline = deadline(&arguments.resource);
    let mut report = |event: &MoveEvent| tracing::debug!("{event}");
    if arguments.dry_run {
        let would_move = format!("move its guest to {}", remote.host);
        let checked = check(&host, &resource.name, &migrate::settings(&resource, remote), &mut report);
        let plan = PlannedAction { name: resource.name.to_string(), action: checked.map(|()| would_move) };
        return dry_run::print(output, &[plan]);
    }
    let moved = migrate::migrate_to(&host, &resource, remote, deadline, &mut report)?;
    output.result(&moved, moving::describe(&moved))?;
    Ok(ExitCode::SUCCESS)
}

fn monitor_vm(output: &Output, arguments: &OcfMonitor) -> Result<ExitCode> {
    let resource = resource(&arguments.resource)?;
    // An unknown state must not count as "not running": report it as a failure.
    let verdict = match Host::open() {
        Ok(host) => {
            let verdict = monitor::monitor(&host, &resource, deadline(&arguments.resource), arguments.deep);
            if let Verdict::Running | Verdict::Degraded(_) = verdict {
                start_helpers(&host, resource.name.as_str());
            }
            verdict
        }
        Err(e) => Verdict::Failed(e.to_string()),
    };
    output.result(&verdict, format!("{}: {verdict}", resource.name))?;
    Ok(ExitCode::from(verdict.exit_code()))
}

fn show_config(output: &Output, arguments: &OcfResource) -> Result<ExitCode> {
    let resource = resource(arguments)?;
    let file = match &resource.guest {
        GuestKind::Own { definition } => definition.clone(),
        GuestKind::Domain { name } => return show_domain_config(output, arguments, name),
    };
    // Not a usage error: the agent would report that as an error of the whole cluster, but files are specific to a
    // node.
    let definition = Definition::load(&file)?;
    let parameters = parameters(arguments)?;
    let utilization = Utilization::of(&definition);
    let file = std::path::absolute(&file).unwrap_or(file);
    let configured = Configured {
        name: definition.name.as_str(),
        source: Source::Definition(&file),
        utilization: Some(utilization),
    };
    output.result(&utilization, configuration_commands(&configured, &parameters))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the configuration of a domain. It may be unknown to libvirt here, because a restore defines it.
fn show_domain_config(output: &Output, arguments: &OcfResource, domain: &str) -> Result<ExitCode> {
    check_libvirt()?;
    let configured = Configured { name: arguments.name.as_str(), source: Source::Domain(domain), utilization: None };
    output.result(&configured.utilization, configuration_commands(&configured, &parameters(arguments)?))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the parameters of the resource, except for what the guest is.
fn parameters(arguments: &OcfResource) -> Result<Vec<(&'static str, String)>> {
    let CheckpointOptions { store, credentials, every, policy, keep, disk_hook, output_commit } =
        &arguments.checkpoints;
    let mut parameters = vec![("store", store.to_string())];
    let StoreCredentials { key_file, key_command, environment_file } = credentials;
    for (name, file) in [("key_file", key_file), ("environment_file", environment_file)] {
        parameters.extend(file.as_ref().map(|file| (name, file.display().to_string())));
    }
    parameters.extend(key_command.clone().map(|command| ("key_command", command)));
    parameters.push(("every", every.to_string()));
    parameters.push(("keep", keep.to_string()));
    parameters.extend(policy.map(|policy| ("policy", policy.to_string())));
    parameters.extend(arguments.disk.and_then(|rule| Some(("disk", rule.to_possible_value()?.get_name().to_owned()))));
    parameters.extend(disk_hook.clone().map(|command| ("disk_hook", command)));
    parameters.extend(output_commit.then(|| ("output_commit", "true".to_owned())));
    Ok(parameters)
}
