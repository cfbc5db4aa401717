//! Prepares a domain while libvirt's daemon and the guest run: starts the destination, and copies the RAM.

use super::preflight::{DomainToReplace, libvirt_monitor};
use super::way_back::abandon;
use super::{capabilities, give_back};
use crate::error::{Failure, RebootError};
use crate::unprepared::environment::vcpus;
use crate::unprepared::inspect::{Inspected, check_run_directory};
use crate::unprepared::recheck::Baseline;
use crate::unprepared::start::{Waiting, start_destination};
use crate::unprepared::{DESTINATION_GENERATION, OPERATION, UnpreparedError, passed_parts};
use rekindle_handover::Handover;
use rekindle_libvirt::status_file::DomainRecord;
use rekindle_life::attach::AdoptedGuest;
use rekindle_qemu::monitor::Monitor;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Absence, Journal, Kind, LibvirtOperation};
use rekindle_vm::lock::OperationLock;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::timeline::Recorder;
use std::path::Path;

/// Where libvirt has the logs of its QEMUs.
const LOG_DIRECTORY: &str = "/var/log/libvirt/qemu";

/// A domain that has passed the preflight.
pub(super) struct Candidate {
    /// Position of its name in the command.
    pub position: usize,
    pub name: String,
    pub recorder: Recorder,
    pub domain: DomainToReplace,
}

/// A domain whose destination waits for the guest, while the source still runs it.
pub(super) struct Prepared {
    pub position: usize,
    pub lock: OperationLock,
    pub handover: Handover,
    pub record: DomainRecord,
    pub baseline: Baseline,
    pub waiting: Waiting,
    /// The source's monitor, through libvirt, whose daemon ends when its clients have disconnected.
    source_qmp: Option<Qmp>,
}

/// Prepares as much as possible while libvirt's daemon and the guest run.
pub(super) fn prepare(host: &Host, candidate: Candidate) -> Result<Prepared, Failure> {
    let Candidate { position, name, recorder, mut domain } = candidate;
    let (lock, mut handover) = begin(host, &name, &mut domain, recorder).map_err(Failure::unchanged)?;
    handover.pass("replace.prepare.journalled");
    let log = Path::new(LOG_DIRECTORY).join(format!("{name}.log"));
    let waiting = match start_destination(&mut handover, &mut domain.inspected, Some(&log), give_back::rehearse) {
        Ok(waiting) => waiting,
        Err(error) => return Err(abandon(handover, error).end(Ok(()))),
    };
    handover.pass("replace.prepare.copied");
    let DomainToReplace { record, inspected: Inspected { baseline, qmp, .. }, .. } = domain;
    Ok(Prepared { position, lock, handover, record, baseline, waiting, source_qmp: Some(qmp) })
}

impl Prepared {
    /// Copies what the guest has written while other domains were prepared.
    pub(super) fn copy_again(mut self) -> Result<Self, Failure> {
        let Some(qmp) = &mut self.source_qmp else { return Ok(self) };
        match self.waiting.destination.stage.ram.copy_while_running(qmp) {
            Ok(()) => Ok(self),
            Err(error) => Err(abandon(self.handover, UnpreparedError::from(error).into()).end(Ok(()))),
        }
    }

    /// Ends the connection to libvirt's daemon.
    pub(super) fn disconnect(&mut self) {
        self.source_qmp = None;
    }
}

/// Locks the domain and journals the operation.
fn begin(
    host: &Host,
    name: &str,
    domain: &mut DomainToReplace,
    recorder: Recorder,
) -> Result<(OperationLock, Handover), RebootError> {
    let rundir = RunDir::new(&host.root, name);
    host.create_run_dir(&rundir).map_err(RebootError::file(rundir.path()))?;
    let lock = OperationLock::acquire(&rundir, OPERATION).map_err(LifeError::from)?;
    // It was checked before, without the lock.
    check_run_directory(host, name)?;
    match journal_operation(&rundir, domain, recorder) {
        Ok(handover) => Ok((lock, handover)),
        Err(error) => {
            let _ = rundir.remove();
            Err(error)
        }
    }
}

fn journal_operation(
    rundir: &RunDir,
    domain: &mut DomainToReplace,
    recorder: Recorder,
) -> Result<Handover, RebootError> {
    let DomainToReplace { name, status_file, record, daemon, inspected } = &mut *domain;
    let (adopted, binary) = (&inspected.baseline.adopted, &inspected.binary);
    let source = Vmm {
        binary: adopted.binary.clone(),
        pid: adopted.pid,
        started: adopted.started,
        directory: rundir.vmm(DESTINATION_GENERATION - 1).0,
        // It is free only while the daemon is stopped.
        monitor: Some(Monitor::Socket { path: record.monitor.clone() }),
        direct_monitors: None,
    };
    let failed = RebootError::file(&rundir.file("operation.json"));
    let capabilities = if binary.version == adopted.version {
        None
    } else {
        let accelerator = &adopted.accelerator;
        Some(capabilities::after_change(&record.capabilities, &record.emulator, &binary.path, accelerator)?)
    };
    let libvirt = LibvirtOperation {
        status_file: status_file.clone(),
        monitor: record.monitor.clone(),
        uuid: record.uuid,
        daemon: daemon.clone(),
        absence: Absence::Present,
        emulator: Some(binary.path.clone()).filter(|path| *path != record.emulator),
        capabilities,
    };
    let mut journal =
        Journal::open(rundir, Kind::LibvirtReplace, Some(source), DESTINATION_GENERATION).map_err(&failed)?;
    journal.operation.libvirt = Some(libvirt);
    journal.operation.passed = Some(passed_parts(inspected));
    journal.write().map_err(&failed)?;
    // Written after the journal: without a state, the operation has started nothing.
    let vcpus = vcpus(&mut inspected.qmp)?.len() as u32;
    let monitor = libvirt_monitor(rundir.name());
    let guest = AdoptedGuest {
        adopted: &inspected.baseline.adopted,
        foreign: None,
        generation: None,
        monitor: &monitor,
        vcpus,
    };
    let state = guest.into_state(rundir, name);
    state.write(rundir).map_err(RebootError::file(&rundir.file("state.json")))?;
    Ok(Handover { rundir: rundir.clone(), state, journal, recorder })
}
