//! Inspects a domain before anything is changed: everything that prevents the replacement is an error that names it.

use super::recheck::Baseline;
use super::status_file::{DomainRecord, StatusFile, StatusFileError};
use super::{DomainError, DomainOptions, daemon, forwards, obstacles, preflight_error, vnc};
use crate::error::RebootError;
use rekindle_kernel::surroundings::ProcessEnvironment;
use rekindle_qemu::adopt::Obstacle;
use rekindle_qemu::binary::Binary;
use rekindle_qemu::command::TapSlot;
use rekindle_qemu::hold::OutputHold;
use rekindle_qemu::monitor::Monitor;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::takeover_command::{
    CommandLine, Descriptor, Destination, Inventory, ListenAddress, MACVTAP_PREFIX, SourceDescriptor, open_descriptors,
    read_facts, rewrite,
};
use rekindle_qemu::vhost;
use rekindle_vm::definition::Name;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{DaemonRecord, ForwardedPort, Journal, PassedListener};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use std::collections::BTreeMap;
use std::ops::RangeFrom;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::Duration;

/// How long libvirt may take to pass the first command on.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(30);
/// Generation of the destination. The source, which Rekindle did not start, is the first.
pub(super) const DESTINATION_GENERATION: u32 = 2;

/// A domain whose QEMU can be replaced, as far as that is known without starting another one.
pub(super) struct Inspected {
    pub name: Name,
    pub status_file: PathBuf,
    pub baseline: Baseline,
    /// A connection to the source through libvirt.
    pub qmp: Qmp,
    pub environment: ProcessEnvironment,
    pub listeners: Vec<PassedListener>,
    pub taps: Vec<TapSlot>,
    pub forwards: Vec<ForwardedPort>,
    pub daemon: DaemonRecord,
    pub binary: Binary,
    /// Memory that the copy of the RAM needs.
    pub copy_bytes: u64,
}

/// Returns how to reach a domain's QEMU while libvirt's daemon runs.
pub(super) fn libvirt_monitor(name: &str) -> Monitor {
    Monitor::Libvirt { domain: name.into(), connect: Some("qemu:///system".into()) }
}

/// Inspects the domain `name`. The guest is not touched.
///
/// # Errors
/// [`RebootError::Preflight`] with everything that prevents the replacement; other errors if the domain cannot be
/// inspected.
pub(super) fn inspect(host: &Host, name: &str, options: &DomainOptions) -> Result<Inspected, RebootError> {
    let vm_name: Name = name.parse().map_err(|e| preflight_error(name, vec![format!("its name: {e}")]))?;
    check_run_directory(host, name)?;
    let status_file = StatusFile::path_of(name);
    let status = StatusFile::read(&status_file)?;
    let record = status.parse()?;
    check_record(name, &record)?;
    let daemon = daemon::find()?;
    let (adopted, mut qmp) = libvirt_monitor(name).adopt(MONITOR_TIMEOUT).map_err(DomainError::from)?;
    if adopted.pid != record.pid {
        return Err(DomainError::Changed { name: name.into(), what: "it has another QEMU".into() }.into());
    }
    let environment = ProcessEnvironment::of(adopted.process()).map_err(DomainError::from)?;
    let path = options.qemu.clone().unwrap_or_else(|| record.emulator.clone());
    let binary = Binary::probe_cached(&path, &host.binaries())?;

    // Before the facts: what changes between the two is found when the domain is checked again.
    let inventory = Inventory::read(&mut qmp)?;
    let found = adopted.obstacles.iter().cloned().chain(inventory.obstacles());
    let mut problems: Vec<String> = found.map(text_of).collect();
    let malformed =
        |e: roxmltree::Error| StatusFileError::Malformed { path: status_file.clone(), problem: e.to_string() };
    problems.extend(obstacles::of_status(name, status.text()).map_err(malformed)?);
    if OutputHold::find(&mut qmp)?.is_some() {
        problems.push(format!("its network output is held: rekindle release {name}"));
    }
    let process_directory = PathBuf::from(format!("/proc/{}/fd", adopted.pid));
    let open = open_descriptors(adopted.process()).map_err(RebootError::file(&process_directory))?;
    problems.extend(obstacles::lease(&open));
    let facts = read_facts(&adopted, &mut qmp)?;
    let label = format!("{}-{DESTINATION_GENERATION}", record.uuid);
    let destination = Destination { label, syntax: binary.syntax };
    let mut copy_bytes = 0;
    let line = match rewrite(&adopted.arguments, &facts, &open, &destination) {
        Ok(line) => {
            problems.extend(not_supported(&line));
            problems.extend(vhost_problem(&line, &mut qmp)?);
            problems.extend(vnc::password_problem(name, &line, &status)?);
            let room = obstacles::room(&mut qmp, adopted.process(), &ram_blocks(&line))?;
            copy_bytes = room.needed_bytes;
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
    let baseline = Baseline { record, adopted, inventory, open, destination, line };
    Ok(Inspected {
        name: vm_name,
        status_file,
        baseline,
        qmp,
        environment,
        listeners,
        taps,
        forwards,
        daemon,
        binary,
        copy_bytes,
    })
}

fn text_of(obstacle: Obstacle) -> String {
    format!("{}: {}", obstacle.what, obstacle.why)
}

/// Returns the names of the RAM blocks that the destination gets as files.
pub(super) fn ram_blocks(line: &CommandLine) -> Vec<String> {
    let block_of = |descriptor: &Descriptor| match descriptor {
        Descriptor::Ram { block, .. } => Some(block.clone()),
        _ => None,
    };
    line.descriptors.values().filter_map(block_of).collect()
}

/// Rejects a name that Rekindle uses for a VM, or for an operation that needs recovery.
pub(super) fn check_run_directory(host: &Host, name: &str) -> Result<(), RebootError> {
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

fn check_record(name: &str, record: &DomainRecord) -> Result<(), RebootError> {
    let mut problems = Vec::new();
    if record.state != "running" {
        problems.push(format!("libvirt reports it as {}: resume it first (virsh resume {name})", record.state));
    }
    if let Some(job) = &record.job {
        problems.push(format!("libvirt is busy with it ({job}): wait until that has ended"));
    }
    if problems.is_empty() { Ok(()) } else { Err(preflight_error(name, problems)) }
}

/// Returns what the command line needs and Rekindle cannot pass on yet.
fn not_supported(line: &CommandLine) -> Vec<String> {
    let mut problems = not_supported_taps(line);
    problems.extend(line.pid_file.iter().map(|path| format!("-pidfile {path}: libvirt does not use it")));
    problems
}

/// Returns whether the host's kernel serves network cards of the destination (vhost-net).
pub(super) fn has_vhost(line: &CommandLine) -> bool {
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

/// Returns the problems of macvtaps, into which a captured frame cannot be sent again, and of taps with several queues.
fn not_supported_taps(line: &CommandLine) -> Vec<String> {
    let mut queues = BTreeMap::<&str, usize>::new();
    for descriptor in line.descriptors.values() {
        if let Descriptor::Tap { interface, .. } = descriptor {
            *queues.entry(interface).or_default() += 1;
        }
    }
    let what = |(interface, queues): (&str, usize)| match queues {
        _ if interface.starts_with(MACVTAP_PREFIX) => Some(format!("{interface}: macvtap (<interface type='direct'>)")),
        1 => None,
        _ => Some(format!("network interface {interface}: several queues")),
    };
    queues.into_iter().filter_map(what).map(|what| format!("{what}: not passed on yet")).collect()
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
