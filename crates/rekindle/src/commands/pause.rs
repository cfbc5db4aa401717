//! `rekindle pause` and `rekindle resume`: the owner of a VM stops its guest, and lets it continue.

use crate::cli::NameOnly;
use crate::output::Output;
use anyhow::Result;
use rekindle_life::pause::{self, Change};
use rekindle_vm::host::Host;
use serde_json::json;
use std::process::ExitCode;

pub fn pause(output: &Output, arguments: &NameOnly) -> Result<ExitCode> {
    let name = arguments.name.as_str();
    let text = match pause::pause(&Host::open()?, name)? {
        Change::Made => format!("{name} is paused; to continue it: rekindle resume {name}"),
        Change::NotNeeded => format!("{name} was paused already"),
    };
    output.result(&json!({"name": name, "status": "paused"}), text)?;
    Ok(ExitCode::SUCCESS)
}

pub fn resume(output: &Output, arguments: &NameOnly) -> Result<ExitCode> {
    let name = arguments.name.as_str();
    let text = match pause::resume(&Host::open()?, name)? {
        Change::Made => format!("{name} runs again"),
        Change::NotNeeded => format!("{name} was running already"),
    };
    output.result(&json!({"name": name, "status": "running"}), text)?;
    Ok(ExitCode::SUCCESS)
}
