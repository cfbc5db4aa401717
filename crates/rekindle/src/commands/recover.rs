//! `rekindle recover`.

use crate::cli::NameOnly;
use crate::output::Output;
use anyhow::Result;
use rekindle_reboot::vmm;
use rekindle_vm::host::Host;
use std::process::ExitCode;

pub fn recover(output: &Output, arguments: &NameOnly) -> Result<ExitCode> {
    let host = Host::open()?;
    let name = &arguments.name;
    let recovered = vmm::recover(&host, name.as_str())?;
    output.result(&serde_json::json!({"name": name, "recovered": recovered}), format!("{name}: {recovered}"))?;
    Ok(ExitCode::SUCCESS)
}
