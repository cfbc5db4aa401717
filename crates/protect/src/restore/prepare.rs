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
use super::{Request, RestoreError, Restored, handover_into, require_same_blocks, require_same_processors};
use crate::recipe::permission::Permission;
use rekindle_handover::{Destination, OwnRunDir};
use rekindle_memory::missing::Pager;
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::file_identity::FileIdentity;
use rekindle_qemu::program::Program;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::definition::Name;
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
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait until QEMU's memory use is constant.
const MEMORY_USE_TIMEOUT: Duration = Duration::from_secs(1);

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
    let permission = Permission::of(host, name, request.choice());
    let chosen = ChosenCheckpoint::open(&permission, request)?;
    if !chosen.overlays.is_empty() {
        return Err(RestoreError::PrepareOverlays { number: chosen.image.info().number });
    }
    let idle_slot = IdleSlot::lock(host, name.as_str(), "restore --prepare")?;
    let replaced = idle_slot.prepared().is_some();
    let recipe = &chosen.recipe;
    let plan =
        idle_slot.plan(recipe.definition().clone(), recipe.qemu(), &chosen.epochs, |hardware| recipe.fit(hardware));
    let plan = match plan {
        Ok(plan) => plan,
        Err(e) => {
            idle_slot.release();
            return Err(e.into());
        }
    };
    recorder.step("check what it needs");
    let slot = idle_slot.into_slot(plan)?;
    match start(&slot, &chosen, &permission, request) {
        Ok(StartedQemu { vmm, ram_bytes }) => {
            recorder.step("start QEMU");
            recorder.write(&slot.rundir);
            let (name, checkpoint) = (slot.rundir.name().to_owned(), chosen.image.info().number);
            let resident_bytes = steady_memory_use(&vmm);
            Ok(PreparedQemu { name, checkpoint, pid: vmm.pid, resident_bytes, ram_bytes, replaced })
        }
        Err(e) => {
            slot.undo();
            Err(e)
        }
    }
}

struct StartedQemu {
    vmm: Vmm,
    /// Size of the guest's RAM.
    ram_bytes: u64,
}

/// Starts a QEMU in `slot`, and records it.
fn start(
    slot: &VmSlot<'_>,
    chosen: &ChosenCheckpoint,
    permission: &Arc<Permission>,
    request: &Request,
) -> Result<StartedQemu, RestoreError> {
    // Must precede QEMU's reading of the files, so that a later change is detected.
    let mut files = mark_files(&slot.state.hardware)?;
    let (SlotResources { journal, fds }, hardware) = slot.make_waiting()?;
    let mut handover = handover_into(slot, journal, Recorder::new(slot.rundir.name(), ""));
    handover.pass("prepare.journalled");
    let environment = OwnRunDir { rundir: &slot.rundir, hardware: &hardware, binary: &slot.binary };
    let EmptyDestination { destination, ram, .. } = EmptyDestination::start(&mut handover, &environment, fds)?;
    let Destination { vmm, mut qmp, .. } = destination;
    let info = chosen.image.info();
    require_same_processors(&mut qmp, &hardware, info.number)?;
    require_same_blocks(&ram, &info.blocks, info.number, &hardware.ram_ids())?;
    // Uses the newest checkpoint: the chosen one may have been deleted.
    let firmware_written = ChosenCheckpoint::open(permission, request)
        .and_then(|newest| checkpoint::write_small_blocks(&newest.image, &hardware.ram_ids(), &ram, vmm.process()));
    if let Err(e) = firmware_written {
        tracing::debug!("cannot load the firmware before the restore: {e}");
    }
    let program_files = mark_program(&vmm);
    files.extend(program_files.map_err(|source| RestoreError::Journal { path: vmm.binary.clone(), source })?);
    let prepared = Prepared {
        vmm: vmm.clone(),
        blocks: ram.blocks().iter().map(|block| block.info.clone()).collect(),
        files,
        given: request.definition.clone(),
        qemu: request.qemu.clone(),
    };
    slot.settle_prepared(handover.journal, prepared, qmp.version().clone())?;
    fault::point("prepare.recorded", None, Some(&vmm));
    let ram_bytes = hardware.ram_files().iter().map(|(_, bytes)| bytes).sum();
    Ok(StartedQemu { vmm, ram_bytes })
}

/// Marks the files that a QEMU reads or opens at its start.
fn mark_files(hardware: &Hardware) -> Result<Vec<FileIdentity>, RestoreError> {
    let boot = hardware.boot.iter().flat_map(|boot| [Some(&boot.kernel), boot.initrd.as_ref()]).flatten();
    // A disk server opens its image at the restore; QEMU does not read it.
    let files = boot.chain(hardware.disks.iter().filter(|disk| !disk.server).map(|disk| &disk.path));
    let mark =
        |path: &PathBuf| FileIdentity::of(path).map_err(|source| RestoreError::Journal { path: path.clone(), source });
    files.map(mark).collect()
}

/// Marks the files of a QEMU's program: its binary and libraries.
fn mark_program(vmm: &Vmm) -> io::Result<BTreeSet<FileIdentity>> {
    let program = Program::of(vmm.process())?;
    program.files.into_iter().chain([program.start]).map(|path| FileIdentity::of(&path)).collect()
}

/// Returns QEMU's memory use once that is constant: soon after its start QEMU returns some memory to the kernel.
fn steady_memory_use(vmm: &Vmm) -> u64 {
    let deadline = Instant::now() + MEMORY_USE_TIMEOUT;
    let mut previous_bytes = resident_bytes(vmm);
    loop {
        thread::sleep(Duration::from_millis(50));
        let bytes = resident_bytes(vmm);
        if bytes == previous_bytes || Instant::now() > deadline {
            return bytes.unwrap_or(0);
        }
        previous_bytes = bytes;
    }
}

/// Returns the memory use of a process in bytes.
fn resident_bytes(vmm: &Vmm) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{}/status", vmm.pid)).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// Checks that the waiting QEMU has the machine of the plan, and replaces the planned hardware by the QEMU's.
pub(super) fn adapt_plan(state: &State, prepared: &Prepared, plan: &mut Plan) -> Result<(), String> {
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
fn difference(wanted: &Hardware, actual: &Hardware) -> String {
    let fields = |hardware: &Hardware| match serde_json::to_value(hardware) {
        Ok(serde_json::Value::Object(fields)) => fields,
        _ => serde_json::Map::new(),
    };
    let (wanted, actual) = (fields(wanted), fields(actual));
    let differs = wanted.iter().find(|(key, value)| actual.get(*key) != Some(*value));
    differs.map_or_else(String::new, |(key, value)| {
        format!("`{key}` is {value}, not {}", actual.get(key).unwrap_or(&serde_json::Value::Null))
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
        primed: Option<PrimedQemu>,
    ) -> Result<Self, String> {
        if let Some(why) = disks::why_not_waiting(rundir, hardware) {
            return Err(why);
        }
        match primed {
            Some(PrimedQemu { vmm, waiting }) if vmm == prepared.vmm => Ok(waiting),
            _ => Self::connect(prepared).map_err(|e| format!("it does not answer: {e}"))?.require_unused(&prepared.vmm),
        }
    }

    fn connect(prepared: &Prepared) -> Result<Self, RestoreError> {
        let qmp = prepared.vmm.connect(ANSWER_TIMEOUT)?;
        let ram = GuestRam::from_blocks(prepared.vmm.process(), prepared.blocks.clone())?;
        Ok(Self { qmp, ram, registered: None })
    }

    /// Checks that no earlier restore, which was killed, has used this QEMU.
    fn require_unused(self, vmm: &Vmm) -> Result<Self, String> {
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
    waiting: WaitingQemu,
}

impl PrimedQemu {
    pub(super) fn new(vmm: Vmm, waiting: WaitingQemu) -> Self {
        Self { vmm, waiting }
    }

    /// Primes the QEMU that was prepared for VM `name`.
    pub(crate) fn take(host: &Host, name: &Name) -> Result<Self, RestoreError> {
        let idle_slot = IdleSlot::lock(host, name.as_str(), "restore --prepare")?;
        let primed = match idle_slot.prepared() {
            Some((state, prepared)) => Self::prime(prepared, &state.hardware.ram_ids()),
            None => Err(LifeError::Unknown { name: name.to_string() }.into()),
        };
        idle_slot.release();
        primed
    }

    /// Registers the blocks `paged` of a waiting QEMU.
    fn prime(prepared: &Prepared, paged: &[String]) -> Result<Self, RestoreError> {
        let mut waiting = WaitingQemu::connect(prepared)?;
        waiting.registered = Some(RegisteredMemory::new(&prepared.vmm, &mut waiting.qmp, &waiting.ram, paged)?);
        fault::point("move.prepare.registered", None, Some(&prepared.vmm));
        Ok(Self { vmm: prepared.vmm.clone(), waiting })
    }
}

/// The guest's disks, opened by their servers. On drop the servers wait again, unless the guest was given to the
/// destination QEMU.
struct OpenDisks(Option<(RunDir, Hardware)>);

impl OpenDisks {
    fn open(rundir: &RunDir, hardware: &Hardware, epochs: &Epochs) -> Result<Self, LifeError> {
        disks::serve_checkpoint(rundir, hardware, epochs)?;
        Ok(Self(Some((rundir.clone(), hardware.clone()))))
    }

    /// Leaves the disks open for the guest.
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
    waiting: WaitingQemu,
    request: &Request,
    mut recorder: Recorder,
    started: Instant,
) -> Result<Restored, RestoreError> {
    // Must precede the claim of the store: if this fails, a protector of the VM can continue. Until QEMU's RAM is
    // claimed, QEMU continues to wait in any case.
    plan.check_room()?;
    let rundir = idle_slot.rundir.clone();
    let WaitingQemu { qmp, ram, registered } = waiting;
    let (vm, number, epochs) = (chosen.image.vm().clone(), chosen.image.info().number, chosen.epochs.clone());
    thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let ChosenCheckpoint { image, recipe, .. } = chosen;
            checkpoint::read(image, recipe.ram_ids())?.with_pages(&ram).map(|input| (input, ram))
        });
        let open_disks = OpenDisks::open(&rundir, &plan.state.hardware, &epochs)?;
        recorder.step("open its disks");
        // The claim waits for the store's disk several times, so it runs concurrently with the load. The guest is not
        // resumed before the claim has ended.
        let claim = scope.spawn(|| checkpoint::claim_during_load(request, &vm, number, &rundir));
        let (input, ram) = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        recorder.step("read the pages for the load");
        let slot = idle_slot.into_slot_of_waiting(plan);
        let journal = slot.claim_ram(&prepared.vmm)?;
        open_disks.keep();
        fault::point("restore.prepare.journalled", None, Some(&prepared.vmm));
        recorder.step("claim its RAM");
        let empty = EmptyDestination::waiting(prepared.vmm.clone(), qmp, ram, registered)?;
        let handover = handover_into(&slot, journal, recorder);
        load::load_and_resume(handover, empty, &Arc::new(input), Some(claim), &mut |_| Ok(()), request, started)
            .map_err(|e| super::undo(slot, e))
    })
}
