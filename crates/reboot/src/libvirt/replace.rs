//! The replacement, from the preflight to the moment at which the guest runs in the destination, and the way back to
//! the source.

use super::daemon_guard::DaemonGuard;
use super::environment::{LibvirtEnvironment, placed_threads, vcpus};
use super::journal::{operation, set_absence};
use super::preflight::{self, DESTINATION_GENERATION, Inspected, check_run_directory, libvirt_monitor, ram_blocks};
use super::recheck::Baseline;
use super::way_back::{abandon, fail_after_decision};
use super::{DomainError, DomainOptions, capabilities, give_back, preflight_error, source, vnc};
use crate::error::{Failure, RebootError};
use crate::vmm::preflight::{compare_blocks, compare_cpus};
use crate::vmm::{QemuInfo, RebootReport, VmOutcome};
use rekindle_handover::copied_ram::{CopiedRam, CopyError, CopyLimit};
use rekindle_handover::ram::Ram;
use rekindle_handover::source_state::{SourceState, StateSink, StreamForm};
use rekindle_handover::takeover::Taps;
use rekindle_handover::{Destination, Handover, PreparedStage, RunningStage};
use rekindle_kernel::process::Process;
use rekindle_kernel::surroundings::ThreadPlaces;
use rekindle_libvirt::daemon::lock::{DaemonLock, check_jobs};
use rekindle_life::attach::AdoptedGuest;
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::command::Start;
use rekindle_qemu::guest;
use rekindle_qemu::monitor::Monitor;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::ramblock;
use rekindle_qemu::stopped::Stopped;
use rekindle_qemu::stream;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::definition::Name;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Absence, Journal, Kind, LibvirtOperation, Step};
use rekindle_vm::lock::OperationLock;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::timeline::{Phase, Recorder};
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

/// How long the source's monitor may take to greet, while libvirt's daemon is stopped.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the destination may take to load the devices, in the pause. It usually takes milliseconds.
const LOAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Name of the operation, for other processes that find the domain locked.
const OPERATION: &str = "replace-qemu";

/// Replaces the QEMUs of domains of libvirt, one after the other.
///
/// *Needs:* root; the domains run; libvirt's daemon runs.
/// *On success:* each guest runs in its destination QEMU, and libvirt manages it as before.
/// *On failure:* [`Failure::guest`] states the guest's status for each domain. The other domains continue.
#[must_use]
pub fn replace_domains(host: &Host, names: &[String], options: &DomainOptions) -> Vec<VmOutcome> {
    let outcome = |name: &String| VmOutcome { name: name.clone(), result: replace_domain(host, name, options) };
    names.iter().map(outcome).collect()
}

fn replace_domain(host: &Host, name: &str, options: &DomainOptions) -> Result<RebootReport, Failure> {
    let _daemon_lock = DaemonLock::acquire().map_err(Failure::unchanged)?;
    check_jobs().map_err(Failure::unchanged)?;
    let mut recorder = Recorder::new(name, OPERATION);
    let mut inspected = preflight::inspect(host, name, options).map_err(Failure::unchanged)?;
    recorder.step("preflight");
    let (_lock, mut handover) = begin(host, name, &mut inspected, recorder).map_err(Failure::unchanged)?;
    handover.pass("libvirt.prepare.journalled");
    let prepared = match prepare(&mut handover, &mut inspected) {
        Ok(prepared) => prepared,
        Err(error) => return Err(abandon(handover, error)),
    };
    handover.pass("libvirt.prepare.copied");
    let source = QemuInfo {
        binary: inspected.baseline.adopted.binary.clone(),
        version: Some(inspected.baseline.adopted.version.clone()),
        pid: inspected.baseline.adopted.pid,
    };
    let machine = inspected.baseline.adopted.machine.clone();
    // The rest ends here: libvirt's daemon ends when its clients have disconnected.
    let Inspected { baseline, .. } = inspected;
    let (ram_files, places) = (prepared.ram_files, prepared.places);
    let mut guard = DaemonGuard::default();
    let transferred = match hand_over(&mut handover, &mut guard, &baseline, machine, prepared.destination) {
        Ok(transferred) => transferred,
        Err(error) if handover.journal.operation.step >= Step::Resume => {
            return Err(fail_after_decision(handover, &ram_files, error));
        }
        Err(error) => return Err(abandon(handover, error)),
    };
    let Transferred { mut running, stopped_host_us } = transferred;
    place_threads(&places, &mut running);
    running.begin_give_back(&mut handover).map_err(Failure::needs_recovery)?;
    give_back::give_back(&mut handover, running.vmm.process(), &mut running.qmp).map_err(Failure::needs_recovery)?;
    handover.recorder.step("give back");
    let report = RebootReport {
        name: name.into(),
        stopped_us: running.stage.resumed_host_us.saturating_sub(stopped_host_us),
        stop_host_us: stopped_host_us,
        resume_host_us: running.stage.resumed_host_us,
        steps: handover.recorder.entries().to_vec(),
        from: source,
        to: QemuInfo {
            binary: running.vmm.binary.clone(),
            version: Some(running.qmp.version().clone()),
            pid: running.vmm.pid,
        },
        memory: None,
    };
    give_back::settle(handover, &running.vmm, &mut running.qmp).map_err(Failure::needs_recovery)?;
    Ok(report)
}

/// Locks the domain and journals the operation.
fn begin(
    host: &Host,
    name: &str,
    inspected: &mut Inspected,
    recorder: Recorder,
) -> Result<(OperationLock, Handover), RebootError> {
    let vm_name: Name = name.parse().map_err(|e| preflight_error(name, vec![format!("its name: {e}")]))?;
    let rundir = RunDir::new(&host.root, name);
    host.create_run_dir(&rundir).map_err(RebootError::file(rundir.path()))?;
    let lock = OperationLock::acquire(&rundir, OPERATION).map_err(LifeError::from)?;
    // It was checked before, without the lock.
    check_run_directory(host, name)?;
    match journal_operation(&rundir, &vm_name, inspected, recorder) {
        Ok(handover) => Ok((lock, handover)),
        Err(error) => {
            let _ = rundir.remove();
            Err(error)
        }
    }
}

fn journal_operation(
    rundir: &RunDir,
    name: &Name,
    inspected: &mut Inspected,
    recorder: Recorder,
) -> Result<Handover, RebootError> {
    let Inspected { status_file, baseline, listeners, forwards, daemon, binary, .. } = &*inspected;
    let Baseline { record, adopted, .. } = baseline;
    let source = Vmm {
        binary: adopted.binary.clone(),
        pid: adopted.pid,
        started: adopted.started,
        directory: rundir.vmm(DESTINATION_GENERATION - 1).0,
        // It is free only while the daemon is stopped.
        monitor: Some(Monitor::Socket { path: record.monitor.clone() }),
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
    let monitor = libvirt_monitor(name.as_str());
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

/// A destination that waits for the guest, while the source still runs it.
struct Prepared {
    destination: Destination<PreparedStage<CopiedRam>>,
    /// The RAM, as evidence of whether the destination has run the guest.
    ram_files: Vec<File>,
    places: ThreadPlaces,
}

/// Prepares as much as possible while libvirt's daemon and the guest run: starts the destination, compares it with the
/// source, and copies the RAM.
fn prepare(handover: &mut Handover, inspected: &mut Inspected) -> Result<Prepared, RebootError> {
    let source = inspected.baseline.adopted.process();
    let guest_ram = GuestRam::of(&mut inspected.qmp, source).map_err(CopyError::from).map_err(DomainError::from)?;
    let ids = ram_blocks(&inspected.baseline.line);
    let payer = Process::current().map_err(RebootError::file(Path::new("/proc/self/stat")))?;
    let ram = CopiedRam::plan(&guest_ram, &ids, payer).map_err(DomainError::from)?;
    let rundir = handover.rundir.clone();
    let environment = LibvirtEnvironment { rundir: &rundir, inspected, ram: &ram };
    let mut destination = Destination::spawn(handover, &environment, Start::Incoming, Taps::new())?;
    handover.recorder.step("start the new QEMU");
    handover.pass("libvirt.prepare.spawned");

    compare_qemus(handover.name(), &mut inspected.qmp, &mut destination.qmp, &ids)?;
    inspected.baseline.fit(&mut destination.qmp)?;
    let process = destination.vmm.process();
    give_back::rehearse(handover, process, &mut destination.qmp)?;
    let copies: io::Result<Vec<File>> = ram.blocks().map(|block| block.file.try_clone()).collect();
    let ram_files = copies.map_err(RebootError::file(Path::new("/proc/self/fd")))?;
    let places = ThreadPlaces::of(source, &placed_threads(&mut inspected.qmp)?).map_err(DomainError::from)?;
    let mut destination = destination.prepare(ram)?;
    handover.pass("libvirt.prepare.compared");
    let copied = destination.stage.ram.copy_while_running(&mut inspected.qmp, CopyLimit::default());
    copied.map_err(DomainError::from)?;
    handover.recorder.step("copy memory");
    Ok(Prepared { destination, ram_files, places })
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

/// The guest runs in the destination. The source is stopped.
struct Transferred {
    running: Destination<RunningStage<CopiedRam>>,
    stopped_host_us: u64,
}

/// Stops libvirt's daemon, and moves the guest from the source to the destination.
fn hand_over(
    handover: &mut Handover,
    guard: &mut DaemonGuard,
    baseline: &Baseline,
    machine: String,
    mut destination: Destination<PreparedStage<CopiedRam>>,
) -> Result<Transferred, RebootError> {
    // A job may have been started while the RAM was copied.
    check_jobs()?;
    set_absence(handover, Absence::Stopped)?;
    handover.pass("libvirt.daemon.stopping");
    let libvirt = operation(handover)?.clone();
    guard.stop(&libvirt.daemon)?;
    handover.pass("libvirt.daemon.stopped");
    let source = handover.source().cloned().ok_or_else(|| DomainError::Lost { name: handover.name().into() })?;
    let mut source_qmp = source.connect(MONITOR_TIMEOUT)?;
    handover.recorder.step("stop libvirt's daemon");
    baseline.check_unchanged(&libvirt, &mut source_qmp)?;
    handover.recorder.step("check the source");
    let ram = &mut destination.stage.ram;
    ram.copy_while_running(&mut source_qmp, CopyLimit::default()).map_err(DomainError::from)?;
    // Not from QEMU's own list: QEMU 7.2 does not report the addresses of its blocks.
    let blocks = GuestRam::of(&mut source_qmp, source.process()).map_err(CopyError::from).map_err(DomainError::from)?;
    let carried = ram.carried_blocks(blocks.blocks().iter().map(|block| block.info.clone()).collect());
    // No file: without the source's private RAM, the state of the devices is useless.
    let mut sink = StateSink { feed: Some(&mut destination.stage.feed), file: None };
    let form = StreamForm::Foreign { machine };
    let mut source_state = SourceState::prepare(&source, &mut source_qmp, carried, form, &mut sink)?;
    handover.recorder.step("copy memory");

    handover.advance(Step::Suspend)?;
    handover.pass("libvirt.suspend.journalled");
    handover.recorder.phase(Phase::Suspend);
    let stopped_host_us = guest::stop(&mut source_qmp)?;
    handover.pass("libvirt.suspend.stopped");
    handover.recorder.step("stop");
    source_state.begin(&mut source_qmp)?;
    let mut sink = StateSink { feed: Some(&mut destination.stage.feed), file: None };
    source_state.send_blocks(&mut sink)?;
    let devices = source_state.send_devices(&mut source_qmp, None)?.bytes;
    handover.recorder.step("save devices");
    // The last of the guest's requests to its disks ended when it was stopped, so its RAM does not change any more.
    let resumed = |_| DomainError::Changed { name: handover.name().into(), what: "its guest was resumed".into() };
    let mut stopped = Stopped::check(&mut source_qmp).map_err(resumed)?;
    destination.stage.ram.copy_rest(&mut stopped).map_err(DomainError::from)?;
    handover.recorder.step("copy the rest");
    // Not earlier: a destination that loads a virtio device compares its state with the rings in RAM.
    destination.stage.feed.write(&devices)?;
    destination.stage.feed.write(&stream::EMPTY_DESCRIPTION)?;
    handover.pass("libvirt.suspend.copied");
    let loaded = destination.finish_feed().wait(handover, LOAD_TIMEOUT)?;
    handover.recorder.step("load");
    handover.pass("libvirt.suspend.loaded");
    source::freeze(handover)?;
    handover.recorder.step("freeze");
    handover.pass("libvirt.suspend.frozen");
    let running = loaded.commit(handover, "resume")?;
    handover.pass("libvirt.resume.resumed");
    Ok(Transferred { running, stopped_host_us })
}

/// Moves the threads of the destination's virtual processors to the control groups and processors of the source's.
fn place_threads(places: &ThreadPlaces, running: &mut Destination<RunningStage<CopiedRam>>) {
    let process = running.vmm.process();
    let placed = placed_threads(&mut running.qmp)
        .map_err(|e| e.to_string())
        .and_then(|threads| places.apply(process, &threads).map_err(|e| e.to_string()));
    if let Err(e) = placed {
        tracing::warn!("{e}; libvirt's limits for single virtual processors do not apply to the new QEMU");
    }
}
