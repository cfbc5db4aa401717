//! Output of `--dry-run`: what would be done to each VM, and what prevents it.

use crate::output::{Output, chain};
use anyhow::Result;
use serde_json::json;
use std::error::Error;
use std::process::ExitCode;

/// The name of a VM, and what would be done to it or why that is not possible.
pub type Planned<E> = (String, Result<String, E>);

/// Prints what would be done. Exit status 1 if it is not possible for a VM.
pub fn print<E: Error + 'static>(output: &Output, vms: &[Planned<E>]) -> Result<ExitCode> {
    let (mut text, mut values) = (String::new(), Vec::new());
    for (name, planned) in vms {
        match planned {
            Ok(would) => {
                text += &format!("{name}: would {would}\n");
                values.push(json!({"name": name, "would": would}));
            }
            Err(error) => {
                let error = chain(error);
                text += &format!("{name}: not possible: {error}\n");
                values.push(json!({"name": name, "error": error}));
            }
        }
    }
    output.result(&json!({"dry_run": true, "vms": values}), text + "nothing was changed")?;
    Ok(if vms.iter().all(|(_, planned)| planned.is_ok()) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
