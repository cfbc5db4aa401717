//! `rekindle recover`.

use crate::cli::Recover;
use crate::output::Output;
use anyhow::Result;
use rekindle_protect::owned::OwnerRecord;
use rekindle_protect::restore::start_pager;
use rekindle_reboot::recover::{self, SilentQemuPolicy};
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use std::process::ExitCode;

pub fn recover(output: &Output, arguments: &Recover) -> Result<ExitCode> {
    let host = Host::open()?;
    let name = &arguments.name;
    let rundir = RunDir::new(&host.root, name.as_str());
    if let Some(owned) = OwnerRecord::read(&rundir)? {
        // Another host may have become the owner before the interrupted operation ended the guest on this host.
        owned.may_run(&rundir)?;
    }
    let discarded = Journal::read(&rundir)?.is_some_and(|left| {
        matches!(left.operation.kind, Kind::Restore | Kind::OsPhase) && left.operation.step < Step::Resume
    });
    if rundir.fill().exists() && !discarded {
        // Start the pager first: a QEMU that waits for a missing page answers no QMP command. A second pager ends by
        // itself.
        start_pager(&rundir)?;
    }
    let patience = SilentQemuPolicy { wait: arguments.wait.as_duration(), force: arguments.force };
    let recovered = recover::recover(&host, name.as_str(), patience)?;
    if State::read(&rundir)?.is_some_and(|state| state.vmm.is_some()) {
        super::reboot::start_helpers(&host, name.as_str());
    }
    output.result(&serde_json::json!({"name": name, "recovered": recovered}), format!("{name}: {recovered}"))?;
    Ok(ExitCode::SUCCESS)
}
