//! The commands, one file for each group, and what they share.

use crate::cli::RebootMethod;
use crate::output::Usage;
use anyhow::Result;
use rekindle_reboot::vmm;
use rekindle_vm::definition::Name;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub mod attach;
pub mod console;
pub mod disk;
pub mod doctor;
pub mod dry_run;
pub mod events;
pub mod generate;
mod guest_findings;
pub mod helpers;
pub mod host;
mod install_service;
mod man_pages;
pub mod metrics;
pub mod monitor;
pub mod moving;
pub mod ocf;
pub mod pause;
pub mod probe;
pub mod protect;
pub mod reboot_os;
pub mod reboot_vmm;
pub mod recover;
pub mod restore;
pub mod run;
mod service_report;
pub mod show;
pub mod status;
pub mod stop;
pub mod store;
pub mod validate;

/// Open files of a command that starts or serves guests, or of the QEMU that it starts and that inherits its limit.
pub const DESCRIPTORS_TO_RUN_GUESTS: u64 = 256;

/// Rejects names that are given twice.
fn distinct_names(arguments: &[Name]) -> Result<Vec<String>> {
    let mut names: Vec<String> = Vec::new();
    for name in arguments.iter().map(ToString::to_string) {
        if names.contains(&name) {
            return Err(Usage(format!("VM {name} is named twice")).into());
        }
        names.push(name);
    }
    Ok(names)
}

/// Rejects a new VM with the name of a subcommand of `rekindle reboot`.
fn reject_reserved_name(name: &Name) -> Result<(), Usage> {
    if !name.is_reserved() {
        return Ok(());
    }
    Err(Usage(format!(
        "a new VM cannot have the name {name}: `rekindle reboot {name}` is a command; choose another name"
    )))
}

/// Returns the run directory of an existing VM.
fn existing_run_dir(host: &Host, name: &str) -> Result<RunDir> {
    let rundir = RunDir::new(&host.root, name);
    if rundir.exists() { Ok(rundir) } else { Err(LifeError::Unknown { name: name.into() }.into()) }
}

fn reboot_method(argument: RebootMethod) -> vmm::RebootMethod {
    match argument {
        RebootMethod::Warm => vmm::RebootMethod::Warm,
        RebootMethod::Saved => vmm::RebootMethod::Saved,
        RebootMethod::Cold => vmm::RebootMethod::Cold,
    }
}

/// Returns a flag that SIGINT and SIGTERM set, for commands that then shut down cleanly.
fn interrupts() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&flag))?;
    }
    Ok(flag)
}
