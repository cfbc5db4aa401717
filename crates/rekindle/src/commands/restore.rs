//! `rekindle restore` and `rekindle pager`.

use super::interrupts;
use crate::cli::{NameOnly, Restore};
use crate::output::{Output, duration};
use anyhow::Result;
use rekindle_protect::pager::{Told, serve};
use rekindle_protect::restore::{Request, restore as run};
use rekindle_store::types::utc;
use rekindle_vm::definition::Definition;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use std::process::ExitCode;

pub fn restore(output: &Output, arguments: &Restore) -> Result<ExitCode> {
    let host = Host::open()?;
    let request = Request {
        store: arguments.store.clone(),
        at: arguments.at,
        eager: arguments.eager,
        definition: arguments.definition.as_ref().map(Definition::load).transpose()?,
        qemu: arguments.qemu.clone(),
    };
    let restored = run(&host, arguments.name.clone(), &request)?;
    let rest = if restored.filled { "all of its memory is there" } else { "its memory comes on demand" };
    let text = format!(
        "{} runs after {} from checkpoint {} of {} (QEMU process {}); {rest}",
        restored.name,
        duration(restored.us),
        restored.checkpoint,
        utc(restored.taken_us),
        restored.pid
    );
    output.result(&restored, text)?;
    Ok(ExitCode::SUCCESS)
}

pub fn pager(output: &Output, arguments: &NameOnly) -> Result<ExitCode> {
    let host = Host::open()?;
    let name = arguments.name.to_string();
    let interrupted = interrupts()?;
    let mut tell = |told: &Told| {
        let _ = output.result(told, format!("{name}: {told}"));
    };
    let progress = serve(&RunDir::new(&host.root, &name), &interrupted, &mut tell)?;
    Ok(if progress.complete { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
