//! `rekindle status`: the guests of this host, Rekindle's and libvirt's, their state, and which of them run in a QEMU
//! that is older than the installed one.

use super::show::version_text;
use crate::cli::Status;
use crate::output::Output;
use anyhow::{Result, bail};
use comfy_table::{Table, presets};
use rekindle_libvirt::domains;
use rekindle_libvirt::status_file::{DomainRecord, SYSTEM_DIRECTORY};
use rekindle_qemu::outdated::{self, Outdated};
use rekindle_qemu::program::Program;
use rekindle_vm::causes::with_causes;
use rekindle_vm::definition::Bytes;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::status;
use serde::Serialize;
use std::io;
use std::path::Path;
use std::process::ExitCode;

/// The whole answer. `format` changes when a field changes its meaning.
#[derive(Serialize)]
struct HostStatus {
    format: u32,
    guests: Vec<GuestStatus>,
    /// What could not be read, each with its reason.
    unreadable: Vec<String>,
}

/// One guest.
#[derive(Serialize)]
struct GuestStatus {
    name: String,
    manager: Manager,
    /// As in `rekindle show`, or libvirt's name of the domain's state.
    status: String,
    /// Version that QEMU has reported; libvirt does not record it.
    qemu_version: Option<String>,
    pid: Option<u32>,
    /// RAM of a VM; libvirt's domains have none here.
    memory: Option<Bytes>,
    /// How the QEMU differs from the installed one; null if it is the installed one.
    outdated: Option<Outdated>,
}

/// A guest, and the comparison of its QEMU with the installed one.
struct Inspection {
    guest: GuestStatus,
    comparison: io::Result<Option<Outdated>>,
}

/// Which program starts and stops a guest.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Manager {
    Rekindle,
    /// The program that started the QEMU that `rekindle attach` adopted.
    Attached,
    Libvirt,
}

pub fn status(output: &Output, arguments: &Status) -> Result<ExitCode> {
    let host = Host::open()?;
    let mut answer = HostStatus { format: 1, guests: Vec::new(), unreadable: Vec::new() };
    for name in RunDir::list(&host.root)? {
        match inspect_vm(&host, &name) {
            Ok(Some(inspection)) => answer.add(inspection),
            // The VM is just being created or removed.
            Ok(None) => {}
            Err(e) => answer.unreadable.push(format!("VM {name}: {e}")),
        }
    }
    match domains::all(Path::new(SYSTEM_DIRECTORY)) {
        Ok(records) => records.into_iter().for_each(|domain| match domain {
            Ok(domain) => answer.add_domain(domain),
            Err(e) => answer.unreadable.push(with_causes(&e)),
        }),
        Err(e) => answer.unreadable.push(format!("libvirt's domains ({SYSTEM_DIRECTORY}): {e}; run as root")),
    }
    answer.select(&arguments.names)?;
    output.result(&answer, answer.text())?;
    Ok(ExitCode::SUCCESS)
}

/// Inspects a VM of Rekindle. Returns `None` if it has no state.
fn inspect_vm(host: &Host, name: &str) -> io::Result<Option<Inspection>> {
    let rundir = RunDir::new(&host.root, name);
    let Some(state) = State::read(&rundir)? else { return Ok(None) };
    let vmm = state.vmm.as_ref().filter(|vmm| vmm.is_alive());
    let comparison = vmm.map_or(Ok(None), |vmm| {
        let program = Program::of(vmm.process())?;
        outdated::compare(&program, &vmm.binary)
    });
    let guest = GuestStatus {
        name: name.to_owned(),
        manager: if state.attached.is_some() { Manager::Attached } else { Manager::Rekindle },
        status: status::status(&rundir)?.to_string(),
        qemu_version: Some(version_text(&state)).filter(|version| !version.is_empty()),
        pid: vmm.map(|vmm| vmm.pid),
        memory: Some(state.definition.memory),
        outdated: None,
    };
    Ok(Some(Inspection { guest, comparison }))
}

impl HostStatus {
    /// Adds a guest. A QEMU that cannot be compared is reported instead of being taken for a current one.
    fn add(&mut self, inspection: Inspection) {
        let Inspection { mut guest, comparison } = inspection;
        match comparison {
            Ok(outdated) => guest.outdated = outdated,
            Err(e) => self.unreadable.push(format!("the QEMU of {}: {e}", guest.name)),
        }
        self.guests.push(guest);
    }

    /// Adds a domain, unless its QEMU has been attached and is in the list already.
    fn add_domain(&mut self, domain: DomainRecord) {
        let is_attached = |guest: &GuestStatus| guest.manager == Manager::Attached && guest.pid == Some(domain.pid);
        if self.guests.iter().any(is_attached) {
            return;
        }
        let comparison = domains::outdated(&domain);
        let has_qemu = domains::qemu(&domain).is_some();
        let guest = GuestStatus {
            name: domain.name,
            manager: Manager::Libvirt,
            status: if has_qemu { domain.state } else { "ended".into() },
            qemu_version: None,
            pid: has_qemu.then_some(domain.pid),
            memory: None,
            outdated: None,
        };
        self.add(Inspection { guest, comparison });
    }

    /// Keeps only the guests with these names, unless there are none.
    fn select(&mut self, names: &[String]) -> Result<()> {
        for name in names {
            if !self.guests.iter().any(|guest| guest.name == *name) {
                bail!(
                    "there is no VM and no running libvirt domain {name}; `rekindle status` lists them{}",
                    self.reasons()
                );
            }
        }
        if !names.is_empty() {
            self.guests.retain(|guest| names.contains(&guest.name));
        }
        Ok(())
    }

    /// Lists what could not be read, a line for each.
    fn reasons(&self) -> String {
        self.unreadable.iter().map(|problem| format!("\n  cannot read {problem}")).collect()
    }

    fn text(&self) -> String {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).set_header(["NAME", "MANAGER", "STATUS", "PROCESS", "MEMORY", "QEMU"]);
        for guest in &self.guests {
            let manager = match guest.manager {
                Manager::Rekindle => "rekindle",
                Manager::Attached => "attached",
                Manager::Libvirt => "libvirt",
            };
            let pid = guest.pid.map(|pid| pid.to_string()).unwrap_or_default();
            let qemu = match &guest.outdated {
                Some(outdated) => format!("out of date: {outdated}"),
                None => guest.qemu_version.clone().unwrap_or_default(),
            };
            let memory = guest.memory.map(|memory| memory.to_string()).unwrap_or_default();
            table.add_row([guest.name.clone(), manager.to_owned(), guest.status.clone(), pid, memory, qemu]);
        }
        let mut text = if self.guests.is_empty() { "no VMs and no domains".to_owned() } else { table.trim_fmt() };
        for problem in &self.unreadable {
            text += &format!("\ncannot read {problem}");
        }
        text
    }
}
