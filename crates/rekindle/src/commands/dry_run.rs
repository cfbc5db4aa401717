//! Output of `--dry-run`: the planned action for each VM, or the reason that prevents it.

use crate::output::{Output, chain};
use anyhow::Result;
use serde_json::json;
use std::error::Error;
use std::process::ExitCode;

/// The name of a VM, and the planned action or the error that prevents it.
pub type Planned<E> = (String, Result<String, E>);

/// Prints the plans. Returns exit status 1 if an action is not possible for one of the VMs.
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
