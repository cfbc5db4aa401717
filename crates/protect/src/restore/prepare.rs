//! A destination QEMU that waits with empty RAM on a spare host. It needs as few resources as HydraVM's restore from a
//! store, and is as fast as a hot standby.
//!
//! The QEMU is started for the machine of the store's newest checkpoint, and gets the checkpoint's firmware. Nothing
//! else is read from the store before the restore, and the store is not claimed. The RAM is an empty file for which no
//! memory is reserved, so any number of such QEMUs can wait on one host. All files that QEMU has read at its start are
//! marked, and the machine is compared again at the restore; if anything has changed, a new QEMU is started.
//!
//! Disk servers are started with the QEMU. They only inspect their images, which another host still writes. At the
//! restore each server gets its epoch, then opens and locks its image, or fails; no queue runs before that.

use super::checkpoint::{self, ChosenCheckpoint};
use super::load::{self, EmptyDestination};
use super::on_demand::RegisteredMemory;
use super::{Request, RestoreError, Restored, handover_into, same_blocks, same_processors};
use rekindle_handover::{Destination, OwnRunDir};
use rekindle_memory::missing::Pager;
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::mark::Mark;
use rekindle_qemu::program::Program;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::definition::{Definition, Name};
use rekindle_vm::disks::{self, Epochs};
use rekindle_vm::error::LifeError;
use rekindle_vm::fault;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::slot::{IdleSlot, Plan, SlotResources, VmSlot};
use rekindle_vm::state::{Prepared, State};
use rekindle_vm::timeline::Recorder;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// How long a waiting QEMU may take to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// How long to wait until QEMU's memory use is constant.
const REST: Duration = Duration::from_secs(1);

/// The result of [`prepare`]: a QEMU that waits for a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedQemu {
    pub name: String,
    /// The checkpoint from whose recipe the QEMU was started.
    pub checkpoint: u64,
    pub pid: u32,
    /// Memory use of the QEMU in bytes.
    pub resident_bytes: u64,
    /// Size of the guest's RAM in bytes.
    pub ram_bytes: u64,
    /// A QEMU that waited before was replaced by this one.
    pub replaced: bool,
}

/// Starts a QEMU that waits for a restore of VM `name`.
///
/// *Needs:* the store; no running VM of that name; a QEMU that supports the guest's machine; the files that the
/// definition names.
/// *On success:* a QEMU waits with empty RAM; the store is unchanged. A QEMU that waited before has been ended.
/// *On failure:* nothing is left behind. A QEMU that waited before continues to wait if the failure precedes the start
/// of the new one.
pub fn prepare(host: &Host, name: &Name, request: &Request) -> Result<PreparedQemu, RestoreError> {
    let mut recorder = Recorder::new(name.as_str(), "restore --prepare");
    let chosen = ChosenCheckpoint::open(request)?;
    let idle_slot = IdleSlot::lock(host, name.as_str(), "restore --prepare")?;
    let replaced = idle_slot.prepared().is_some();
    let definition = request.definition.clone().unwrap_or_else(|| chosen.recipe.definition.clone());
    let definition = Definition { name: name.clone(), ..definition };
    let planned = idle_slot.plan(definition, request.qemu.as_deref(), &chosen.epochs, |hardware| {
        chosen.recipe.fit(hardware, request.definition.is_some())
    });
    let plan = match planned {
        Ok(plan) => plan,
        Err(e) => {
            idle_slot.release();
            return Err(e.into());
        }
    };
    recorder.step("check what it needs");
    let place = idle_slot.into_slot(plan)?;
    match start(&place, &chosen, request) {
        Ok((vmm, ram_bytes)) => {
            recorder.step("start QEMU");
            recorder.write(&place.rundir);
            let (name, checkpoint) = (place.rundir.name().to_owned(), chosen.image.info().number);
            let resident_bytes = at_rest(&vmm);
            Ok(PreparedQemu { name, checkpoint, pid: vmm.pid, resident_bytes, ram_bytes, replaced })
        }
        Err(e) => {
            place.undo();
            Err(e)
        }
    }
}

fn start(place: &VmSlot<'_>, chosen: &ChosenCheckpoint, request: &Request) -> Result<(Vmm, u64), RestoreError> {
    // Must precede QEMU's reading of the files, so that a later change is detected.
    let mut files = marks(&place.state.hardware).map_err(|(path, source)| RestoreError::Journal { path, source })?;
    let (SlotResources { journal, fds }, hardware) = place.make_waiting()?;
    let mut handover = handover_into(place, journal, Recorder::new(place.rundir.name(), ""));
    handover.pass("prepare.journalled");
    let environment = OwnRunDir { rundir: &place.rundir, hardware: &hardware, binary: &place.binary };
    let EmptyDestination { destination, ram, .. } = EmptyDestination::start(&mut handover, &environment, fds)?;
    let Destination { vmm, mut qmp, .. } = destination;
    let info = chosen.image.info();
    same_processors(&mut qmp, &hardware, info.number)?;
    same_blocks(&ram, &info.blocks, info.number, &hardware.ram_ids())?;
    // Uses the newest checkpoint: the chosen one may have been deleted.
    let put = ChosenCheckpoint::open(request)
        .and_then(|newest| checkpoint::write_small_blocks(&newest.image, &hardware.ram_ids(), &ram, vmm.process()));
    if let Err(e) = put {
        tracing::debug!("cannot load the firmware before the restore: {e}");
    }
    let program = Program::of(vmm.process()).map(|program| program.files.into_iter().chain([program.start]));
    let marks = program.and_then(|files| files.map(|path| Mark::of(&path)).collect::<io::Result<BTreeSet<_>>>());
    files.extend(marks.map_err(|source| RestoreError::Journal { path: vmm.binary.clone(), source })?);
    let prepared = Prepared {
        vmm: vmm.clone(),
        blocks: ram.blocks().iter().map(|block| block.info.clone()).collect(),
        files,
        given: request.definition.clone(),
        qemu: request.qemu.clone(),
    };
    place.settle_prepared(handover.journal, prepared, qmp.version().clone())?;
    fault::point("prepare.recorded", None, Some(&vmm));
    Ok((vmm, hardware.ram_files().iter().map(|(_, bytes)| bytes).sum()))
}

/// Marks the files that a QEMU reads or opens at its start.
fn marks(hardware: &Hardware) -> Result<Vec<Mark>, (PathBuf, io::Error)> {
    let boot = hardware.boot.iter().flat_map(|boot| [Some(&boot.kernel), boot.initrd.as_ref()]).flatten();
    // A disk server opens its image at the restore; QEMU does not read it.
    let files = boot.chain(hardware.disks.iter().filter(|disk| !disk.server).map(|disk| &disk.path));
    files.map(|path: &PathBuf| Mark::of(path).map_err(|source| (path.clone(), source))).collect()
}

/// Returns QEMU's memory use once that is constant: soon after its start QEMU returns some memory to the kernel.
fn at_rest(vmm: &Vmm) -> u64 {
    let deadline = Instant::now() + REST;
    let mut bytes = resident(vmm);
    loop {
        thread::sleep(Duration::from_millis(50));
        let now = resident(vmm);
        if now == bytes || Instant::now() > deadline {
            return now.unwrap_or(0);
        }
        bytes = now;
    }
}

/// Returns the memory use of a process in bytes.
fn resident(vmm: &Vmm) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{}/status", vmm.pid)).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// Checks that the waiting QEMU has the machine of the plan, and replaces the planned hardware by the QEMU's.
pub(super) fn fits(state: &State, prepared: &Prepared, plan: &mut Plan) -> Result<(), String> {
    prepared.check()?;
    let mut planned = plan.state.hardware.clone();
    // No guest has used either generation ID.
    planned.vm_generation = state.hardware.vm_generation;
    if planned != state.hardware {
        return Err(format!("another machine is needed now: {}", difference(&planned, &state.hardware)));
    }
    if plan.state.definition != state.definition {
        return Err("the definition of the VM has changed".into());
    }
    plan.state.hardware = planned;
    Ok(())
}

/// Returns the first property in which two machines differ.
fn difference(wanted: &Hardware, waits: &Hardware) -> String {
    let fields = |hardware: &Hardware| match serde_json::to_value(hardware) {
        Ok(serde_json::Value::Object(fields)) => fields,
        _ => serde_json::Map::new(),
    };
    let (wanted, waits) = (fields(wanted), fields(waits));
    let differs = wanted.iter().find(|(key, value)| waits.get(*key) != Some(*value));
    differs.map_or_else(String::new, |(key, value)| {
        format!("`{key}` is {value}, not {}", waits.get(key).unwrap_or(&serde_json::Value::Null))
    })
}

/// A waiting QEMU that answers.
#[derive(Debug)]
pub(super) struct WaitingQemu {
    pub(super) qmp: Qmp,
    pub(super) ram: GuestRam,
    pub(super) registered: Option<RegisteredMemory>,
}

impl WaitingQemu {
    /// Connects to the waiting QEMU, or returns why it cannot be used.
    pub(super) fn of(
        prepared: &Prepared,
        rundir: &RunDir,
        hardware: &Hardware,
        early: Option<PrimedQemu>,
    ) -> Result<Self, String> {
        if let Some(why) = disks::why_not_waiting(rundir, hardware) {
            return Err(why);
        }
        match early {
            Some(PrimedQemu { vmm, ready }) if vmm == prepared.vmm => Ok(ready),
            _ => Self::answering(prepared).map_err(|e| format!("it does not answer: {e}"))?.fresh(&prepared.vmm),
        }
    }

    fn answering(prepared: &Prepared) -> Result<Self, RestoreError> {
        let qmp = prepared.vmm.connect(ANSWER)?;
        let ram = GuestRam::from_blocks(prepared.vmm.process(), prepared.blocks.clone())?;
        Ok(Self { qmp, ram, registered: None })
    }

    /// Checks that no earlier restore, which was killed, has used this QEMU.
    fn fresh(self, vmm: &Vmm) -> Result<Self, String> {
        match Pager::is_registered_in(vmm.process()) {
            Ok(false) => Ok(self),
            Ok(true) => Err("its memory was registered by another restore, which has ended".into()),
            Err(e) => Err(format!("cannot determine whether its memory is registered: {e}")),
        }
    }
}

/// A waiting QEMU that has everything that does not depend on the checkpoint: its memory is registered, and it reads
/// from a pipe. Only this process can use it.
#[derive(Debug)]
pub(crate) struct PrimedQemu {
    vmm: Vmm,
    ready: WaitingQemu,
}

impl PrimedQemu {
    pub(super) fn new(vmm: Vmm, ready: WaitingQemu) -> Self {
        Self { vmm, ready }
    }

    /// Primes the QEMU that was prepared for VM `name`.
    pub(crate) fn take(host: &Host, name: &Name) -> Result<Self, RestoreError> {
        let idle_slot = IdleSlot::lock(host, name.as_str(), "restore --prepare")?;
        let found = idle_slot.prepared().map(|(state, prepared)| (state.hardware.ram_ids(), prepared.clone()));
        let registered = found.map(|(paged, prepared)| {
            let mut ready = WaitingQemu::answering(&prepared)?;
            ready.registered = Some(RegisteredMemory::new(&prepared.vmm, &mut ready.qmp, &ready.ram, &paged)?);
            fault::point("move.prepare.registered", None, Some(&prepared.vmm));
            Ok(Self { vmm: prepared.vmm, ready })
        });
        idle_slot.release();
        registered.unwrap_or_else(|| Err(LifeError::Unknown { name: name.to_string() }.into()))
    }
}

/// The guest's disks, opened by their servers. On drop the servers wait again, unless the guest was given to the
/// destination QEMU.
struct OpenDisks(Option<(RunDir, Hardware)>);

impl OpenDisks {
    fn new(rundir: &RunDir, hardware: &Hardware, epochs: &Epochs) -> Result<Self, LifeError> {
        disks::serve_checkpoint(rundir, hardware, epochs)?;
        Ok(Self(Some((rundir.clone(), hardware.clone()))))
    }

    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for OpenDisks {
    fn drop(&mut self) {
        if let Some((rundir, hardware)) = &self.0 {
            disks::wait_again(rundir, hardware);
        }
    }
}

/// Resumes the guest in the waiting QEMU.
#[expect(clippy::too_many_arguments, reason = "the parts of a restore")]
pub(super) fn resume_in(
    idle_slot: IdleSlot<'_>,
    plan: Plan,
    chosen: ChosenCheckpoint,
    prepared: &Prepared,
    ready: WaitingQemu,
    request: &Request,
    mut recorder: Recorder,
    began: Instant,
) -> Result<Restored, RestoreError> {
    // Must precede the claim of the store: if this fails, a protector of the VM can continue. Until QEMU's RAM is
    // claimed, QEMU continues to wait in any case.
    plan.check_room()?;
    let rundir = idle_slot.rundir.clone();
    let WaitingQemu { qmp, ram, registered } = ready;
    let (vm, number, epochs) = (chosen.image.vm().clone(), chosen.image.info().number, chosen.epochs.clone());
    thread::scope(|scope| {
        let read = scope.spawn(move || checkpoint::read(chosen)?.with_pages(&ram).map(|input| (input, ram)));
        let disks_open = OpenDisks::new(&rundir, &plan.state.hardware, &epochs)?;
        recorder.step("open its disks");
        // The claim waits for the store's disk several times, so it runs concurrently with the load. The guest is not
        // resumed before the claim has ended.
        let fence = scope.spawn(|| checkpoint::fence_during_load(request, &vm, number, &rundir));
        let (input, ram) = read.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        recorder.step("read the pages for the load");
        let place = idle_slot.into_slot_of_waiting(plan);
        let journal = place.claim_ram(&prepared.vmm)?;
        disks_open.keep();
        fault::point("restore.prepare.journalled", None, Some(&prepared.vmm));
        recorder.step("claim its RAM");
        let waiting = EmptyDestination::waiting(prepared.vmm.clone(), qmp, ram, registered)?;
        let handover = handover_into(&place, journal, recorder);
        load::load_and_resume(handover, waiting, &Arc::new(input), Some(fence), request, began)
            .map_err(|e| super::undo(place, e))
    })
}
