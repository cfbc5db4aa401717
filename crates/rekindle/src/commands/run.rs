//! `rekindle run`.

use crate::cli::Run;
use crate::output::{Output, Usage};
use anyhow::Result;
use rekindle_vm::definition::Definition;
use rekindle_vm::host::Host;
use rekindle_vm::life;
use std::process::ExitCode;

pub fn run(output: &Output, arguments: Run) -> Result<ExitCode> {
    let definition = Definition::load(&arguments.file).map_err(|e| Usage(e.to_string()))?;
    let host = Host::open()?;
    let state = life::run(&host, definition, arguments.qemu.as_deref(), arguments.newest_disk)?;
    let name = state.hardware.name.clone();
    super::reboot::start_helpers(&host, &name);
    let version = state.version.as_ref().map(ToString::to_string).unwrap_or_default();
    let pid = state.vmm.as_ref().map(|vmm| vmm.pid);
    let text = format!(
        "{name} runs: QEMU {version} (process {}), {}, {}; its console: rekindle console {name}",
        pid.unwrap_or_default(),
        state.hardware.machine,
        state.hardware.accel,
    );
    output.result(&super::show::description(&host, &state)?, text)?;
    Ok(ExitCode::SUCCESS)
}
