//! `rekindle recover`: starts the pager if it is needed, recovers the VM, and starts its helpers.

use super::helpers::report_stopped;
use crate::cli::Recover;
use crate::output::Output;
use anyhow::Result;
use rekindle_protect::owned::OwnerRecord;
use rekindle_protect::restore::start_pager;
use rekindle_reboot::recover::{self, Recovery, SilentQemuPolicy};
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use std::process::ExitCode;

pub fn recover(output: &Output, arguments: &Recover) -> Result<ExitCode> {
    let host = Host::open()?;
    let name = &arguments.name;
    let rundir = RunDir::new(&host.root, name.as_str());
    if let Some(owner) = OwnerRecord::read(&rundir)? {
        // Another host may have become the owner before the interrupted operation ended the guest on this host.
        owner.may_run(&rundir)?;
    }
    // The recovery ends the QEMU of these operations, so its memory is not needed.
    let is_memory_discarded = Journal::read(&rundir)?.is_some_and(|journal| {
        matches!(journal.operation.kind, Kind::Restore | Kind::LibvirtRestore | Kind::OsPhase)
            && journal.operation.step < Step::Resume
    });
    if rundir.fill().exists() && !is_memory_discarded {
        // Start the pager first: a QEMU that waits for a missing page answers no QMP command. A second pager ends by
        // itself.
        start_pager(&rundir)?;
    }
    let policy = SilentQemuPolicy { wait: arguments.wait.as_duration(), force: arguments.force };
    let recovery = recover::recover(&host, name.as_str(), policy);
    let Recovery { recovered, others } = recovery.inspect_err(|_| report_stopped(&host, name.as_str()))?;
    if State::read(&rundir)?.is_some_and(|state| state.vmm.is_some()) {
        super::helpers::start_helpers(&host, name.as_str());
    }
    let mut result = serde_json::json!({"name": name, "recovered": recovered});
    let mut text = format!("{name}: {recovered}");
    if !others.is_empty() {
        let list = others.iter().map(|(name, recovered)| serde_json::json!({"name": name, "recovered": recovered}));
        result["others"] = list.collect();
        text.extend(others.iter().map(|(name, recovered)| format!("\n{name}: {recovered}")));
    }
    output.result(&result, text)?;
    Ok(ExitCode::SUCCESS)
}
