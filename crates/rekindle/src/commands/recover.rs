//! `rekindle recover`.

use crate::cli::NameOnly;
use crate::output::Output;
use anyhow::Result;
use rekindle_protect::restore::start_pager;
use rekindle_reboot::vmm;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use std::process::ExitCode;

pub fn recover(output: &Output, arguments: &NameOnly) -> Result<ExitCode> {
    let host = Host::open()?;
    let name = &arguments.name;
    let rundir = RunDir::new(&host.root, name.as_str());
    if rundir.fill().exists() {
        // Before anything is asked of QEMU: it may itself wait for a missing page. A second pager finds the first, and ends.
        start_pager(&rundir)?;
    }
    let recovered = vmm::recover(&host, name.as_str())?;
    output.result(&serde_json::json!({"name": name, "recovered": recovered}), format!("{name}: {recovered}"))?;
    Ok(ExitCode::SUCCESS)
}
