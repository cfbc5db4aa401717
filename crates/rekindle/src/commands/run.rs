//! `rekindle run`: starts a VM from its definition.

use super::show::{description, version_text};
use crate::cli::Run;
use crate::output::{Output, Usage};
use anyhow::Result;
use rekindle_handover::HandoverError;
use rekindle_handover::boot::{self, LeftoverLog, NewVm};
use rekindle_vm::definition::Definition;
use rekindle_vm::host::Host;
use std::process::ExitCode;

pub fn run(output: &Output, arguments: Run) -> Result<ExitCode> {
    let definition = Definition::load(&arguments.file).map_err(|e| Usage(e.to_string()))?;
    super::reject_reserved_name(&definition.name)?;
    let host = Host::open()?;
    let leftover_log = if arguments.newest_disk { LeftoverLog::Merge } else { LeftoverLog::Reject };
    let vm = NewVm { definition, qemu: arguments.qemu, uuid: None, leftover_log };
    let state = boot::start(&host, vm, |_, _| Ok::<_, HandoverError>(()))?;
    let name = state.hardware.name.clone();
    super::helpers::start_helpers(&host, &name);
    let version = version_text(&state);
    let pid = state.vmm.as_ref().map(|vmm| vmm.pid);
    let text = format!(
        "{name} runs: QEMU {version} (process {}), {}, {}; its console: rekindle console {name}",
        pid.unwrap_or_default(),
        state.hardware.machine,
        state.hardware.accel,
    );
    output.result(&description(&host, &state)?, text)?;
    Ok(ExitCode::SUCCESS)
}
