//! The processes that serve one VM, `rekindle watch` and `rekindle phases`: every command that starts a guest starts
//! them, too.

use super::existing_run_dir;
use crate::cli::NameOnly;
use anyhow::Result;
use rekindle_reboot::os::phase::saver;
use rekindle_reboot::os::watch as watcher;
use rekindle_vm::helpers;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use std::process::ExitCode;

/// Starts the processes that watch a VM and save phases of its guest's boot, unless they run. A failure is only logged,
/// because the guest runs without them.
pub fn start_helpers(host: &Host, name: &str) {
    let rundir = RunDir::new(&host.root, name);
    let state = match State::read(&rundir) {
        Ok(Some(state)) => state,
        Ok(None) => return,
        Err(e) => return tracing::warn!("{name}: {e}; to start `rekindle watch`: rekindle recover {name}"),
    };
    if let Err(e) = watcher::start(&rundir, &state) {
        tracing::warn!("{name}: `rekindle watch` does not run ({e}); to start it: rekindle recover {name}");
    }
    if let Err(e) = saver::start(&rundir, &state.definition) {
        tracing::warn!("{name}: phases of its guest's boot are not saved ({e}); to save them: rekindle recover {name}");
    }
}

/// Logs which helpers of a VM are stopped, after an operation has failed: they are the probable cause.
pub fn report_stopped(host: &Host, name: &str) {
    match helpers::stopped(&RunDir::new(&host.root, name)) {
        Ok(stopped) => stopped.iter().for_each(|helper| tracing::warn!("{name}: {helper}")),
        Err(e) => tracing::debug!("{name}: {e}"),
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
    watcher::run(&host, arguments.name.as_str())?;
    Ok(ExitCode::SUCCESS)
}
