//! Output of `--dry-run`, the same for all commands: the planned action for each VM, or the reason that prevents it.

use crate::output::{Output, chain};
use anyhow::Result;
use serde_json::json;
use std::error::Error;
use std::process::ExitCode;

/// What a command would do to a VM, for example `shut its guest down`, or the error that prevents it.
pub struct PlannedAction<E> {
    pub name: String,
    pub action: Result<String, E>,
}

/// Prints the plans. Returns exit status 1 if an action is not possible for one of the VMs.
pub fn print<E: Error + 'static>(output: &Output, plans: &[PlannedAction<E>]) -> Result<ExitCode> {
    let (mut text, mut vms) = (String::new(), Vec::new());
    for PlannedAction { name, action } in plans {
        match action {
            Ok(action) => {
                text += &format!("{name}: would {action}\n");
                vms.push(json!({"name": name, "would": action}));
            }
            Err(error) => {
                let error = chain(error);
                text += &format!("{name}: not possible: {error}\n");
                vms.push(json!({"name": name, "error": error}));
            }
        }
    }
    output.result(&json!({"dry_run": true, "vms": vms}), text + "nothing was changed")?;
    let is_possible = plans.iter().all(|plan| plan.action.is_ok());
    Ok(if is_possible { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
