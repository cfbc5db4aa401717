//! Inspects a guest that Rekindle did not start: everything that prevents the replacement of its QEMU is a problem that is
//! named. Nothing is changed.

use super::recheck::Baseline;
use super::tpm::{self, TpmEmulator};
use super::{UnpreparedError, forwards, obstacles, preflight_error};
use crate::error::RebootError;
use rekindle_handover::ram_transfer::RamTransfer;
use rekindle_kernel::process::Process;
use rekindle_kernel::surroundings::ProcessEnvironment;
use rekindle_qemu::adopt::{Adopted, Obstacle};
use rekindle_qemu::binary::Binary;
use rekindle_qemu::command::TapSlot;
use rekindle_qemu::hold::OutputHold;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::takeover_command::{
    CommandLine, Descriptor, Destination, Inventory, ListenAddress, MACVTAP_PREFIX, RunningFacts, SourceDescriptor,
    open_descriptors, read_facts, rewrite,
};
use rekindle_qemu::vhost;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{ForwardedPort, Journal, PassedListener};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use std::collections::BTreeSet;
use std::io;
use std::ops::RangeFrom;
use std::os::fd::RawFd;
use std::path::PathBuf;

/// A guest whose QEMU can be replaced, as far as that is known without starting another one.
pub(crate) struct Inspected {
    pub baseline: Baseline,
    /// A connection to the source.
    pub qmp: Qmp,
    pub environment: ProcessEnvironment,
    pub listeners: Vec<PassedListener>,
    pub taps: Vec<TapSlot>,
    pub forwards: Vec<ForwardedPort>,
    /// The emulator of the guest's TPM, if it has one.
    pub tpm: Option<TpmEmulator>,
    pub binary: Binary,
    /// How its private RAM gets to the destination.
    pub transfer: RamTransfer,
    /// Memory that the transfer needs.
    pub transfer_bytes: u64,
}

/// A QEMU to inspect, and its successor.
pub(crate) struct Subject<'a> {
    pub name: &'a str,
    pub adopted: Adopted,
    pub qmp: Qmp,
    pub binary: Binary,
    /// As in [`Destination`].
    pub label: String,
    /// As in [`Destination`].
    pub socket_directory: Option<PathBuf>,
    /// Whether its RAM is to be moved in place, even if there is room for a copy.
    pub prefers_in_place: bool,
}

/// Inspects the guest. `problems`: what is known already. `of_manager` returns the problems that the guest's manager has
/// with the destination's command line.
///
/// # Errors
/// [`RebootError::Preflight`] with everything that prevents the replacement; other errors if the guest cannot be
/// inspected.
pub(crate) fn inspect(
    subject: Subject<'_>,
    mut problems: Vec<String>,
    of_manager: impl FnOnce(&CommandLine, &RunningFacts) -> Result<Vec<String>, RebootError>,
) -> Result<Inspected, RebootError> {
    let Subject { name, adopted, mut qmp, binary, label, socket_directory, prefers_in_place } = subject;
    let environment = ProcessEnvironment::of(adopted.process()).map_err(UnpreparedError::from)?;
    // Before the facts: what changes between the two is found when the guest is checked again.
    let inventory = Inventory::read(&mut qmp)?;
    let found = adopted.obstacles.iter().cloned().chain(inventory.obstacles());
    problems.extend(found.map(text_of));
    if OutputHold::find(&mut qmp)?.is_some() {
        problems.push(format!("its network output is held: rekindle release {name}"));
    }
    let process_directory = PathBuf::from(format!("/proc/{}/fd", adopted.pid));
    let open = open_descriptors(adopted.process()).map_err(RebootError::file(&process_directory))?;
    problems.extend(obstacles::lease(&open));
    let facts = read_facts(&adopted, &mut qmp)?;
    let destination = Destination { label, syntax: binary.syntax, socket_directory };
    let (mut transfer, mut transfer_bytes, mut emulator) = (RamTransfer::Copied, 0, None);
    let line = match rewrite(&adopted.arguments, &facts, &open, &destination) {
        Ok(line) => {
            problems.extend(not_supported_taps(&line));
            problems.extend(vhost_problem(&line, &mut qmp)?);
            match tpm::inspect(&line) {
                Ok(found) => emulator = found,
                Err(problem) => problems.push(problem),
            }
            problems.extend(of_manager(&line, &facts)?);
            let room = obstacles::room(&mut qmp, adopted.process(), &ram_blocks(&line), prefers_in_place)?;
            (transfer, transfer_bytes) = (room.transfer, room.needed_bytes);
            problems.extend(room.problems);
            Some(line)
        }
        Err(obstacles) => {
            problems.extend(obstacles.into_iter().map(text_of));
            None
        }
    };
    let forwards = forwards::list(&mut qmp)?.unwrap_or_else(|problem| {
        problems.push(problem);
        Vec::new()
    });
    let Some(line) = line.filter(|_| problems.is_empty()) else { return Err(preflight_error(name, problems)) };
    let mut spare = line.spare_numbers();
    let listeners = passed_listeners(name, &line, &mut spare, |number| open.get(&number))?;
    let taps = line.tap_slots(&mut spare);
    let baseline =
        Baseline { name: name.to_owned(), adopted, inventory, open, destination, line, plugged: facts.plugged };
    let tpm = emulator;
    Ok(Inspected { baseline, qmp, environment, listeners, taps, forwards, tpm, binary, transfer, transfer_bytes })
}

fn text_of(obstacle: Obstacle) -> String {
    format!("{}: {}", obstacle.what, obstacle.why)
}

/// Returns the names of the RAM blocks that the destination gets as files.
pub(crate) fn ram_blocks(line: &CommandLine) -> Vec<String> {
    let block_of = |descriptor: &Descriptor| match descriptor {
        Descriptor::Ram { block, .. } => Some(block.clone()),
        _ => None,
    };
    line.descriptors.values().filter_map(block_of).collect()
}

/// Rejects a name that Rekindle uses for a VM, or for an operation that needs recovery.
pub(crate) fn check_run_directory(host: &Host, name: &str) -> Result<(), RebootError> {
    let rundir = RunDir::new(&host.root, name);
    let failed = RebootError::file(rundir.path());
    let journal = if rundir.exists() { Journal::read(&rundir).map_err(&failed)? } else { None };
    match (State::read(&rundir).map_err(&failed)?, journal) {
        // An attempt that was interrupted before it started anything has no state.
        (None, _) => Ok(()),
        (Some(_), Some(Journal { operation, .. })) => Err(rekindle_vm::error::LifeError::NeedsRecovery {
            name: name.into(),
            kind: operation.kind,
            step: operation.step,
        }
        .into()),
        (Some(_), None) => {
            let problem = format!("Rekindle has attached it: end its protector, then: rekindle detach {name}");
            Err(preflight_error(name, vec![problem]))
        }
    }
}

/// Rejects a QEMU that is attached, whatever its name is there: its protector would lose it.
pub(crate) fn check_not_attached(host: &Host, name: &str, qemu: Process) -> Result<(), RebootError> {
    let Some(vm) = attached_as(host, qemu)? else { return Ok(()) };
    let problem = format!("Rekindle has attached it as {vm}: end its protector, then: rekindle detach {vm}");
    Err(preflight_error(name, vec![problem]))
}

/// Returns the name under which a QEMU is attached.
pub(crate) fn attached_as(host: &Host, qemu: Process) -> Result<Option<String>, RebootError> {
    let vms = match RunDir::list(&host.root) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        vms => vms.map_err(RebootError::file(&host.root))?,
    };
    for vm in vms {
        let rundir = RunDir::new(&host.root, &vm);
        let state = State::read(&rundir).map_err(RebootError::file(rundir.path()))?;
        let is_this =
            |state: &State| state.attached.is_some() && state.vmm.as_ref().is_some_and(|vmm| vmm.process() == qemu);
        // The state of an interrupted replacement is that of an attached VM.
        if state.as_ref().is_some_and(is_this) && !rundir.file("operation.json").exists() {
            return Ok(Some(vm));
        }
    }
    Ok(None)
}

/// Returns whether the host's kernel serves network cards of the destination (vhost-net).
pub(crate) fn has_vhost(line: &CommandLine) -> bool {
    line.descriptors.values().any(|descriptor| *descriptor == Descriptor::VhostNet)
}

/// Returns the problem of network cards that the host's kernel serves.
fn vhost_problem(line: &CommandLine, source: &mut Qmp) -> Result<Option<String>, QmpError> {
    if !has_vhost(line) {
        return Ok(None);
    }
    if line.arguments.iter().any(|argument| is_behind_iommu(argument)) {
        return Ok(Some("/dev/vhost-net behind an IOMMU (<driver iommu='on'/>): not passed on yet".into()));
    }
    // In the pause, the source must be able to report that it has stopped vhost.
    match vhost::served_cards(source) {
        Ok(_) => Ok(None),
        Err(QmpError::Refused { .. }) => {
            Ok(Some("/dev/vhost-net: this QEMU does not report whether the kernel has stopped".into()))
        }
        Err(e) => Err(e),
    }
}

/// Returns whether an argument describes a virtio device behind an IOMMU, in the syntaxes that libvirt has used.
fn is_behind_iommu(argument: &str) -> bool {
    ["iommu_platform=on", r#""iommu_platform":true"#].iter().any(|text| argument.contains(text))
}

/// Returns the problems of macvtaps, into which a captured frame cannot be sent again.
fn not_supported_taps(line: &CommandLine) -> Vec<String> {
    let interfaces: BTreeSet<&String> = line
        .descriptors
        .values()
        .filter_map(|descriptor| match descriptor {
            Descriptor::Tap { interface, .. } => Some(interface),
            _ => None,
        })
        .collect();
    let macvtaps = interfaces.into_iter().filter(|interface| interface.starts_with(MACVTAP_PREFIX));
    macvtaps.map(|name| format!("{name}: macvtap (<interface type='direct'>): not passed on yet")).collect()
}

/// Returns the listening sockets of the command line, each with a number from `spare`.
fn passed_listeners<'a>(
    name: &str,
    line: &CommandLine,
    spare: &mut RangeFrom<RawFd>,
    source_descriptor: impl Fn(RawFd) -> Option<&'a SourceDescriptor>,
) -> Result<Vec<PassedListener>, RebootError> {
    let mut listeners = Vec::new();
    let is_listener = |(number, descriptor): (&RawFd, &Descriptor)| match descriptor {
        Descriptor::Listener { source } => Some((*number, *source)),
        _ => None,
    };
    for ((destination, source), spare) in line.descriptors.iter().filter_map(is_listener).zip(spare) {
        if let Some(SourceDescriptor::Listener(ListenAddress::Tcp(address))) = source_descriptor(source) {
            let problem = format!("a character device listens on {address}: only Unix sockets are passed on yet");
            return Err(preflight_error(name, vec![problem]));
        }
        listeners.push(PassedListener { source, destination, spare });
    }
    Ok(listeners)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_behind_an_iommu_is_known_in_both_syntaxes() {
        let card = r#"{"driver":"virtio-net-pci","netdev":"hostnet0","id":"net0""#;
        assert!(is_behind_iommu(&format!(r#"{card},"iommu_platform":true}}"#)));
        assert!(is_behind_iommu("virtio-net-pci,iommu_platform=on,netdev=hostnet0"));
        assert!(!is_behind_iommu(&format!(r#"{card},"iommu_platform":false}}"#)));
        assert!(!is_behind_iommu("virtio-net-pci,netdev=hostnet0"));
    }
}
