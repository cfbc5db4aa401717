//! Prepares a domain while libvirt's daemon and the guest run: starts the destination, and copies the RAM.

use super::environment::{LibvirtEnvironment, placed_threads, vcpus};
use super::preflight::{
    DESTINATION_GENERATION, Inspected, check_run_directory, has_vhost, libvirt_monitor, ram_blocks,
};
use super::recheck::Baseline;
use super::way_back::abandon;
use super::{DomainError, capabilities, give_back, preflight_error, vnc};
use crate::error::{Failure, RebootError};
use crate::vmm::preflight::{compare_blocks, compare_cpus};
use rekindle_handover::copied_ram::{CopiedRam, CopyError, CopyLimit};
use rekindle_handover::takeover::TapTakeover;
use rekindle_handover::{Destination, Handover, PreparedStage};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::process::Process;
use rekindle_kernel::surroundings::ThreadPlaces;
use rekindle_life::attach::AdoptedGuest;
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::command::Start;
use rekindle_qemu::monitor::Monitor;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::ramblock;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Absence, Journal, Kind, LibvirtOperation};
use rekindle_vm::lock::OperationLock;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::timeline::Recorder;
use std::fs::File;
use std::io;
use std::path::Path;

/// Name of the operation, for other processes that find the domain locked.
pub(super) const OPERATION: &str = "replace-qemu";

/// A domain that has passed the preflight.
pub(super) struct Candidate {
    /// Position of its name in the command.
    pub position: usize,
    pub name: String,
    pub recorder: Recorder,
    pub inspected: Inspected,
}

/// A domain whose destination waits for the guest, while the source still runs it.
pub(super) struct Prepared {
    pub position: usize,
    pub lock: OperationLock,
    pub handover: Handover,
    pub baseline: Baseline,
    pub destination: Destination<PreparedStage<CopiedRam>>,
    pub taps: WaitingTaps,
    /// The RAM, as evidence of whether the destination has run the guest.
    pub ram_files: Vec<File>,
    pub places: ThreadPlaces,
    /// The source's monitor, through libvirt, whose daemon ends when its clients have disconnected.
    source_qmp: Option<Qmp>,
}

/// The taps of a guest, for which the waiting destination has stand-ins.
pub(super) struct WaitingTaps {
    pub takeover: TapTakeover,
    /// Injects system calls into the destination.
    pub injector: Injector,
}

/// Prepares as much as possible while libvirt's daemon and the guest run.
pub(super) fn prepare(host: &Host, candidate: Candidate) -> Result<Prepared, Failure> {
    let Candidate { position, name, recorder, mut inspected } = candidate;
    let (lock, mut handover) = begin(host, &name, &mut inspected, recorder).map_err(Failure::unchanged)?;
    handover.pass("libvirt.prepare.journalled");
    let Waiting { destination, taps, ram_files, places } = match start_destination(&mut handover, &mut inspected) {
        Ok(waiting) => waiting,
        Err(error) => return Err(abandon(handover, error).end(Ok(()))),
    };
    handover.pass("libvirt.prepare.copied");
    let Inspected { baseline, qmp, .. } = inspected;
    Ok(Prepared { position, lock, handover, baseline, destination, taps, ram_files, places, source_qmp: Some(qmp) })
}

impl Prepared {
    /// Copies what the guest has written while other domains were prepared.
    pub(super) fn copy_again(mut self) -> Result<Self, Failure> {
        let Some(qmp) = &mut self.source_qmp else { return Ok(self) };
        match self.destination.stage.ram.copy_while_running(qmp, CopyLimit::default()) {
            Ok(_) => Ok(self),
            Err(error) => Err(abandon(self.handover, DomainError::from(error).into()).end(Ok(()))),
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
    inspected: &mut Inspected,
    recorder: Recorder,
) -> Result<(OperationLock, Handover), RebootError> {
    let rundir = RunDir::new(&host.root, name);
    host.create_run_dir(&rundir).map_err(RebootError::file(rundir.path()))?;
    let lock = OperationLock::acquire(&rundir, OPERATION).map_err(LifeError::from)?;
    // It was checked before, without the lock.
    check_run_directory(host, name)?;
    match journal_operation(&rundir, inspected, recorder) {
        Ok(handover) => Ok((lock, handover)),
        Err(error) => {
            let _ = rundir.remove();
            Err(error)
        }
    }
}

fn journal_operation(rundir: &RunDir, inspected: &mut Inspected, recorder: Recorder) -> Result<Handover, RebootError> {
    let Inspected { status_file, baseline, listeners, forwards, daemon, binary, .. } = &*inspected;
    let Baseline { record, adopted, .. } = baseline;
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
        listeners: listeners.clone(),
        forwards: forwards.clone(),
        vnc: vnc::listeners(&baseline.line),
        emulator: Some(binary.path.clone()).filter(|path| *path != record.emulator),
        capabilities,
    };
    let mut journal =
        Journal::open(rundir, Kind::LibvirtReplace, Some(source), DESTINATION_GENERATION).map_err(&failed)?;
    journal.operation.libvirt = Some(libvirt);
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
    let state = guest.into_state(rundir, &inspected.name);
    state.write(rundir).map_err(RebootError::file(&rundir.file("state.json")))?;
    Ok(Handover { rundir: rundir.clone(), state, journal, recorder })
}

/// A destination with most of the guest's RAM.
struct Waiting {
    destination: Destination<PreparedStage<CopiedRam>>,
    taps: WaitingTaps,
    ram_files: Vec<File>,
    places: ThreadPlaces,
}

/// Prepares as much as possible while libvirt's daemon and the guest run: starts the destination, compares it with the
/// source, and copies the RAM.
fn start_destination(handover: &mut Handover, inspected: &mut Inspected) -> Result<Waiting, RebootError> {
    let source = inspected.baseline.adopted.process();
    let guest_ram = GuestRam::of(&mut inspected.qmp, source).map_err(CopyError::from).map_err(DomainError::from)?;
    let ids = ram_blocks(&inspected.baseline.line);
    let payer = Process::current().map_err(RebootError::file(Path::new("/proc/self/stat")))?;
    let ram = CopiedRam::plan(&guest_ram, &ids, payer).map_err(DomainError::from)?;
    let rundir = handover.rundir.clone();
    let (start_taps, mut takeover) = TapTakeover::prepare(inspected.taps.clone(), source)?;
    if has_vhost(&inspected.baseline.line) {
        takeover.expect_vhost();
    }
    let environment = LibvirtEnvironment { rundir: &rundir, inspected, ram: &ram };
    let mut destination = Destination::spawn(handover, &environment, Start::Incoming, start_taps)?;
    handover.recorder.step("start the new QEMU");
    handover.pass("libvirt.prepare.spawned");

    compare_qemus(handover.name(), &mut inspected.qmp, &mut destination.qmp, &ids)?;
    inspected.baseline.fit(&mut destination.qmp)?;
    let process = destination.vmm.process();
    give_back::rehearse(handover, process, &mut destination.qmp)?;
    let untraceable = RebootError::file(Path::new(&format!("/proc/{}/maps", process.pid)));
    let taps = WaitingTaps { takeover, injector: Injector::new(process).map_err(|e| untraceable(e.into()))? };
    let copies: io::Result<Vec<File>> = ram.blocks().map(|block| block.file.try_clone()).collect();
    let ram_files = copies.map_err(RebootError::file(Path::new("/proc/self/fd")))?;
    let places = ThreadPlaces::of(source, &placed_threads(&mut inspected.qmp)?).map_err(DomainError::from)?;
    let mut destination = destination.prepare(ram)?;
    handover.pass("libvirt.prepare.compared");
    let copied = destination.stage.ram.copy_while_running(&mut inspected.qmp, CopyLimit::default());
    copied.map_err(DomainError::from)?;
    handover.recorder.step("copy memory");
    destination.populate_heap(taps.injector);
    Ok(Waiting { destination, taps, ram_files, places })
}

/// Rejects a destination that is a different machine.
fn compare_qemus(name: &str, source: &mut Qmp, destination: &mut Qmp, supplied: &[String]) -> Result<(), RebootError> {
    let mut problems = compare_cpus(source, destination)?;
    let (source_blocks, blocks) = (ramblock::list(source)?, ramblock::list(destination)?);
    problems.extend(compare_blocks(&source_blocks, &blocks));
    let mut texts: Vec<String> = problems.into_iter().map(|problem| problem.0).collect();
    for id in supplied {
        let size = |blocks: &[ramblock::RamBlock]| blocks.iter().find(|block| block.id == *id).map(|block| block.total);
        if size(&source_blocks) != size(&blocks) {
            texts.push(format!("RAM block {id} has another size in the destination QEMU"));
        }
    }
    if texts.is_empty() { Ok(()) } else { Err(preflight_error(name, texts)) }
}
