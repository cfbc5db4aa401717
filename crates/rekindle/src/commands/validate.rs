//! `rekindle validate`: checks a VM's definition, or the host's configuration, and changes nothing.

use super::reject_reserved_name;
use crate::cli::Validate;
use crate::output::{Output, Usage, chain};
use anyhow::Result;
use rekindle_vm::definition::Definition;
use rekindle_vm::host;
use serde_json::json;
use std::process::ExitCode;

pub fn validate(output: &Output, arguments: &Validate) -> Result<ExitCode> {
    let file = &arguments.file;
    if file.file_name().is_some_and(|name| name == "host.toml") {
        host::check_config(file).map_err(|e| Usage(chain(&e)))?;
        let text = format!("{}: no mistakes", file.display());
        output.result(&json!({"file": file, "kind": "host"}), text)?;
        return Ok(ExitCode::SUCCESS);
    }
    let definition = Definition::load(file).map_err(|e| Usage(e.to_string()))?;
    reject_reserved_name(&definition.name)?;
    let Definition { name, memory, disks, nets, .. } = &definition;
    let text = format!(
        "{}: no mistakes: VM {name}, {memory} of memory, {}, {}",
        file.display(),
        count(disks.len(), "disk"),
        count(nets.len(), "network interface"),
    );
    output.result(&json!({"file": file, "kind": "definition", "definition": definition}), text)?;
    Ok(ExitCode::SUCCESS)
}

/// Formats a number of things: `1 disk`, `2 disks`.
fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}
