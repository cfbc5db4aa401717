//! All domains that libvirt runs, for an operation on each of them.

use super::status_file::{DomainRecord, SYSTEM_DIRECTORY};
use crate::error::RebootError;
use crate::unprepared::inspect::attached_as;
use rekindle_libvirt::domains;
use rekindle_vm::host::Host;
use std::path::Path;

/// The running domains of `qemu:///system`.
#[derive(Debug, Default)]
pub struct AllDomains {
    pub names: Vec<String>,
    pub skipped: Vec<SkippedDomain>,
}

/// A domain that is left out on purpose, because its owner has decided so.
#[derive(Debug)]
pub struct SkippedDomain {
    pub name: String,
    pub reason: String,
}

/// Which of libvirt's domains an operation is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selection {
    All,
    /// Those whose QEMU is not the installed one.
    Outdated,
}

/// Returns the domains that libvirt runs.
///
/// # Errors
/// [`RebootError`]: libvirt's record of a domain, or its QEMU's file, cannot be read.
pub fn all_domains(host: &Host, selection: Selection) -> Result<AllDomains, RebootError> {
    let directory = Path::new(SYSTEM_DIRECTORY);
    let mut all = AllDomains::default();
    for record in domains::all(directory).map_err(RebootError::file(directory))? {
        let record = record?;
        match reason_to_skip(host, &record, selection)? {
            None => all.names.push(record.name),
            Some(reason) => all.skipped.push(SkippedDomain { name: record.name, reason }),
        }
    }
    Ok(all)
}

fn reason_to_skip(host: &Host, record: &DomainRecord, selection: Selection) -> Result<Option<String>, RebootError> {
    if record.state != "running" {
        return Ok(Some(format!("libvirt reports it as {}", record.state)));
    }
    if selection == Selection::Outdated
        && domains::outdated(record).map_err(RebootError::file(&record.emulator))?.is_none()
    {
        return Ok(Some("its QEMU is the installed one".into()));
    }
    let Some(program) = domains::qemu(record) else { return Ok(None) };
    let name = attached_as(host, program.process())?;
    Ok(name.map(|name| if name == record.name { "it is attached".into() } else { format!("it is attached as {name}") }))
}
