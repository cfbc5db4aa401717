//! The start of the destination, while the source runs the guest, and the first copy of the RAM.

use super::environment::{UnpreparedEnvironment, placed_threads};
use super::inspect::{Inspected, has_vhost, ram_blocks};
use super::{UnpreparedError, preflight_error};
use crate::error::RebootError;
use crate::vmm::preflight::{compare_blocks, compare_cpus, compare_queues};
use rekindle_handover::ram_transfer_error::RamTransferError;
use rekindle_handover::takeover::TapTakeover;
use rekindle_handover::unprepared_ram::UnpreparedRam;
use rekindle_handover::{Destination, Handover, PreparedStage};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::process::Process;
use rekindle_kernel::surroundings::ThreadPlaces;
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::command::Start;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::ramblock;
use std::fs::File;
use std::io;
use std::path::Path;

/// A destination with most of the guest's RAM.
pub(crate) struct Waiting {
    pub destination: Destination<PreparedStage<UnpreparedRam>>,
    pub taps: WaitingTaps,
    /// The RAM, as evidence of whether the destination has run the guest.
    pub ram_files: Vec<File>,
    pub places: ThreadPlaces,
}

/// The taps of a guest, for which the waiting destination has stand-ins.
pub(crate) struct WaitingTaps {
    pub takeover: TapTakeover,
    /// Injects system calls into the destination.
    pub injector: Injector,
}

/// Prepares as much as possible while the guest runs: starts the destination, compares it with the source, and copies the
/// RAM. `log`: the source's log. `rehearse` rejects a destination that the guest's manager could not use.
pub(crate) fn start_destination(
    handover: &mut Handover,
    inspected: &mut Inspected,
    log: Option<&Path>,
    rehearse: impl FnOnce(&Handover, Process, &mut Qmp) -> Result<(), RebootError>,
) -> Result<Waiting, RebootError> {
    let source = inspected.baseline.adopted.process();
    let guest_ram =
        GuestRam::of(&mut inspected.qmp, source).map_err(RamTransferError::from).map_err(UnpreparedError::from)?;
    let ids = ram_blocks(&inspected.baseline.line);
    let payer = Process::current().map_err(RebootError::file(Path::new("/proc/self/stat")))?;
    let ram = UnpreparedRam::plan(&guest_ram, &ids, payer, inspected.transfer).map_err(UnpreparedError::from)?;
    let rundir = handover.rundir.clone();
    let (start_taps, mut takeover) = TapTakeover::prepare(inspected.taps.clone(), source)?;
    if has_vhost(&inspected.baseline.line) {
        takeover.expect_vhost();
    }
    if let Some(tpm) = &mut inspected.tpm {
        tpm.start(handover)?;
    } else {
        handover.pass("replace.prepare.tpm-unlocked");
    }
    handover.pass("replace.prepare.tpm-started");
    let environment = UnpreparedEnvironment { rundir: &rundir, inspected, ram: &ram, log };
    let mut destination = Destination::spawn(handover, &environment, Start::Incoming, start_taps)?;
    handover.recorder.step("start the new QEMU");
    handover.pass("replace.prepare.spawned");

    compare_qemus(handover.name(), &mut inspected.qmp, &mut destination.qmp, &ids)?;
    inspected.baseline.fit(&mut destination.qmp)?;
    let process = destination.vmm.process();
    rehearse(handover, process, &mut destination.qmp)?;
    let untraceable = RebootError::file(Path::new(&format!("/proc/{}/maps", process.pid)));
    let taps = WaitingTaps { takeover, injector: Injector::new(process).map_err(|e| untraceable(e.into()))? };
    let copies: io::Result<Vec<File>> = ram.blocks().map(|block| block.file.try_clone()).collect();
    let ram_files = copies.map_err(RebootError::file(Path::new("/proc/self/fd")))?;
    let places = ThreadPlaces::of(source, &placed_threads(&mut inspected.qmp)?).map_err(UnpreparedError::from)?;
    let mut destination = destination.prepare(ram)?;
    handover.pass("replace.prepare.compared");
    destination.stage.ram.copy_while_running(&mut inspected.qmp).map_err(UnpreparedError::from)?;
    handover.recorder.step("copy memory");
    destination.populate_heap(taps.injector);
    Ok(Waiting { destination, taps, ram_files, places })
}

/// Moves the threads of the destination's virtual processors to the control groups and processors of the source's.
pub(crate) fn place_threads(places: &ThreadPlaces, destination: Process, qmp: &mut Qmp) {
    let placed = placed_threads(qmp)
        .map_err(|e| e.to_string())
        .and_then(|threads| places.apply(destination, &threads).map_err(|e| e.to_string()));
    if let Err(e) = placed {
        tracing::warn!("{e}; limits for single virtual processors do not apply to the new QEMU");
    }
}

/// Rejects a destination that is a different machine.
fn compare_qemus(name: &str, source: &mut Qmp, destination: &mut Qmp, supplied: &[String]) -> Result<(), RebootError> {
    let mut problems = compare_cpus(source, destination)?;
    problems.extend(compare_queues(source, destination)?);
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
