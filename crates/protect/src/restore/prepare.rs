//! A QEMU that waits with empty RAM on a spare host: HydraVM's saving with a hot standby's speed.
//!
//! It was started for the machine of the store's newest checkpoint, and given its firmware. Nothing else of the store is read before
//! the restore, and the store is not claimed. Its RAM is a file without a page in it, which nothing has been promised to: any number of them
//! may wait on one host. All that QEMU has read at its start is marked, and the machine is compared once more at the
//! restore; what is not the same any more is of no use, and a new QEMU is started.
//!
//! Disks that servers have: they are started with it, and have only looked at their images, which somebody else still writes. At the
//! restore each is told its epoch, opens and locks the image, or refuses; no queue runs before.

use super::checkpoint::{self, Chosen};
use super::go::{self, Registered, Waiting};
use super::{Request, RestoreError, Restored, same_blocks, same_processors};
use rekindle_memory::missing::Pager;
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::mark::Mark;
use rekindle_qemu::program::Program;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::definition::{Definition, Name};
use rekindle_vm::disks::{self, Epochs};
use rekindle_vm::fault;
use rekindle_vm::host::Host;
use rekindle_vm::life::LifeError;
use rekindle_vm::place::{Plan, Site, VmSlot};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::{Prepared, State};
use rekindle_vm::timeline::Recorder;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

/// How long a QEMU that waits may take to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// How long it is waited for that its memory does not change any more.
const REST: Duration = Duration::from_secs(1);

/// A QEMU that waits for a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// The VM.
    pub name: String,
    /// The checkpoint whose machine it has.
    pub checkpoint: u64,
    /// The QEMU.
    pub pid: u32,
    /// Bytes of memory that it takes.
    pub resident_bytes: u64,
    /// Bytes of RAM that its guest is going to have.
    pub ram_bytes: u64,
    /// One that waited before was ended for it.
    pub replaced: bool,
}

/// Prepare a restore of VM `name`.
///
/// *Needs:* the store; no VM of that name that runs; a QEMU that knows its machine; what its definition names.
/// *On success:* a QEMU waits with empty RAM; the store is as it was. One that waited before has been ended.
/// *On failure:* nothing is left behind; one that waited before waits on if nothing was begun.
///
/// # Errors
/// [`RestoreError`].
pub fn prepare(host: &Host, name: &Name, request: &Request) -> Result<Waits, RestoreError> {
    let mut recorder = Recorder::new(name.as_str(), "restore --prepare");
    let chosen = Chosen::open(request)?;
    let site = Site::take(host, name.as_str(), "restore --prepare")?;
    let replaced = site.prepared().is_some();
    let definition = request.definition.clone().unwrap_or_else(|| chosen.recipe.definition.clone());
    let definition = Definition { name: name.clone(), ..definition };
    let planned = site.plan(definition, request.qemu.as_deref(), |hardware| {
        chosen.recipe.fit(hardware, request.definition.is_some())
    });
    let plan = match planned {
        Ok(plan) => plan,
        Err(e) => {
            site.leave();
            return Err(e.into());
        }
    };
    recorder.step("see what it needs");
    let place = site.place(plan)?;
    match start(&place, &chosen, request) {
        Ok((vmm, ram_bytes)) => {
            recorder.step("start QEMU");
            recorder.write(&place.rundir);
            let (name, checkpoint) = (place.rundir.name().to_owned(), chosen.image.info().number);
            let resident_bytes = at_rest(&vmm);
            Ok(Waits { name, checkpoint, pid: vmm.pid, resident_bytes, ram_bytes, replaced })
        }
        Err(e) => {
            place.undo();
            Err(e)
        }
    }
}

fn start(place: &VmSlot<'_>, chosen: &Chosen, request: &Request) -> Result<(Vmm, u64), RestoreError> {
    // Before QEMU reads them: a change in between is seen.
    let mut files = marks(&place.state.hardware).map_err(|(path, source)| RestoreError::Journal { path, source })?;
    let (made, hardware) = place.make_waiting()?;
    fault::point("prepare.journalled", None, None);
    let Waiting { vmm, mut qmp, ram, journal, .. } = Waiting::start(&place.rundir, &place.binary, made, &hardware)?;
    fault::point("prepare.spawned", None, Some(&vmm));
    let info = chosen.image.info();
    same_processors(&mut qmp, &hardware, info.number)?;
    same_blocks(&ram, &info.blocks, info.number, &hardware.ram_ids())?;
    // The newest one: the one that was chosen may not be kept any more.
    let put = Chosen::open(request)
        .and_then(|newest| checkpoint::put_small(&newest.image, &hardware.ram_ids(), &ram, vmm.process()));
    if let Err(e) = put {
        tracing::debug!("its firmware is left to the restore: {e}");
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
    place.settle_prepared(journal, prepared, qmp.version().clone())?;
    fault::point("prepare.recorded", None, Some(&vmm));
    Ok((vmm, hardware.ram_files().iter().map(|(_, bytes)| bytes).sum()))
}

/// What a QEMU reads or opens at its start.
fn marks(hardware: &Hardware) -> Result<Vec<Mark>, (PathBuf, io::Error)> {
    let boot = hardware.boot.iter().flat_map(|boot| [Some(&boot.kernel), boot.initrd.as_ref()]).flatten();
    // What a server has, QEMU does not read; the server opens it at the restore.
    let files = boot.chain(hardware.disks.iter().filter(|disk| !disk.server).map(|disk| &disk.path));
    files.map(|path: &PathBuf| Mark::of(path).map_err(|source| (path.clone(), source))).collect()
}

/// Bytes of memory that it takes once it has come to rest: soon after its start it gives some back to the kernel.
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

/// Bytes of memory that a process takes.
fn resident(vmm: &Vmm) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{}/status", vmm.pid)).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// Whether the QEMU that waits has the machine of the plan; then the plan is made to say what it has.
pub(super) fn fits(state: &State, prepared: &Prepared, plan: &mut Plan) -> Result<(), String> {
    prepared.check()?;
    let mut planned = plan.state.hardware.clone();
    // One that no VM has had yet, either of them.
    planned.vm_generation = state.hardware.vm_generation;
    if planned != state.hardware {
        return Err(format!("another machine is needed now: {}", difference(&planned, &state.hardware)));
    }
    if plan.state.definition != state.definition {
        return Err("the VM is defined otherwise now".into());
    }
    plan.state.hardware = planned;
    Ok(())
}

/// The first thing in which two machines differ.
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

/// A QEMU that waits and answers.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) qmp: Qmp,
    pub(super) ram: GuestRam,
    pub(super) registered: Option<Registered>,
}

impl Ready {
    /// Which it is, or why it is none.
    pub(super) fn of(
        prepared: &Prepared,
        rundir: &RunDir,
        hardware: &Hardware,
        early: Option<Early>,
    ) -> Result<Self, String> {
        if let Some(why) = disks::against_waiting(rundir, hardware) {
            return Err(why);
        }
        match early {
            Some(Early { vmm, ready }) if vmm == prepared.vmm => Ok(ready),
            _ => Self::answering(prepared).map_err(|e| format!("it does not answer: {e}"))?.fresh(&prepared.vmm),
        }
    }

    fn answering(prepared: &Prepared) -> Result<Self, RestoreError> {
        let qmp = prepared.vmm.connect(ANSWER)?;
        let ram = GuestRam::from_blocks(prepared.vmm.process(), prepared.blocks.clone())?;
        Ok(Self { qmp, ram, registered: None })
    }

    /// Nobody has begun with it, and been killed.
    fn fresh(self, vmm: &Vmm) -> Result<Self, String> {
        match Pager::is_registered_in(vmm.process()) {
            Ok(false) => Ok(self),
            Ok(true) => Err("its memory was registered by another restore, which has ended".into()),
            Err(e) => Err(format!("whether its memory is registered is not known: {e}")),
        }
    }
}

/// A QEMU that waits, and has been given all that does not depend on the checkpoint: its memory is registered, and it reads from a pipe. It
/// is of use to this process only; to all others, of none.
#[derive(Debug)]
pub(crate) struct Early {
    vmm: Vmm,
    ready: Ready,
}

impl Early {
    pub(super) fn new(vmm: Vmm, ready: Ready) -> Self {
        Self { vmm, ready }
    }

    /// Have the QEMU that was prepared for VM `name` so far.
    pub(crate) fn take(host: &Host, name: &Name) -> Result<Self, RestoreError> {
        let site = Site::take(host, name.as_str(), "restore --prepare")?;
        let found = site.prepared().map(|(state, prepared)| (state.hardware.ram_ids(), prepared.clone()));
        let registered = found.map(|(paged, prepared)| {
            let mut ready = Ready::answering(&prepared)?;
            ready.registered = Some(Registered::new(&prepared.vmm, &mut ready.qmp, &ready.ram, &paged)?);
            fault::point("move.prepare.registered", None, Some(&prepared.vmm));
            Ok(Self { vmm: prepared.vmm, ready })
        });
        site.leave();
        registered.unwrap_or_else(|| Err(LifeError::Unknown { name: name.to_string() }.into()))
    }
}

/// The disks of the guest, until it is given to the QEMU that waits; if it is not, their servers wait on as it does.
struct Had(Option<(RunDir, Hardware)>);

impl Had {
    fn new(rundir: &RunDir, hardware: &Hardware, epochs: &Epochs) -> Result<Self, LifeError> {
        disks::have(rundir, hardware, epochs)?;
        Ok(Self(Some((rundir.clone(), hardware.clone()))))
    }

    fn stay(mut self) {
        self.0 = None;
    }
}

impl Drop for Had {
    fn drop(&mut self) {
        if let Some((rundir, hardware)) = &self.0 {
            disks::wait_again(rundir, hardware);
        }
    }
}

/// Let the guest go on in the QEMU that waits.
#[expect(clippy::too_many_arguments, reason = "they are what a restore consists of")]
pub(super) fn resume_in(
    site: Site<'_>,
    plan: Plan,
    chosen: Chosen,
    prepared: &Prepared,
    ready: Ready,
    request: &Request,
    mut recorder: Recorder,
    began: Instant,
) -> Result<Restored, RestoreError> {
    // Before the store is claimed: whoever protects the VM is to go on if this cannot be. And until the RAM is claimed it
    // waits on whatever happens.
    plan.check_room()?;
    let rundir = site.rundir.clone();
    let Ready { qmp, ram, registered } = ready;
    let (vm, number, epochs) = (chosen.image.vm().clone(), chosen.image.info().number, chosen.epochs.clone());
    thread::scope(|scope| {
        let read = scope.spawn(move || checkpoint::read(chosen)?.with_pages(&ram).map(|ahead| (ahead, ram)));
        let had = Had::new(&rundir, &plan.state.hardware, &epochs)?;
        recorder.step("open its disks");
        // It waits for the store's disk several times. Whether that comes before the load or beside it nobody sees, as long as
        // the guest does not run before.
        let fence = scope.spawn(|| checkpoint::fence_beside(request, &vm, number, &rundir));
        let (ahead, ram) = read.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        recorder.step("read what it needs at once");
        let place = site.place_of(plan);
        let journal = place.claim(&prepared.vmm)?;
        had.stay();
        fault::point("restore.prepare.journalled", None, Some(&prepared.vmm));
        let waiting = Waiting { vmm: prepared.vmm.clone(), qmp, ram, journal, prepared: true, registered };
        recorder.step("claim its RAM");
        match go::go_in(&place, waiting, &ahead, Some(fence), request, &mut recorder, began) {
            Ok(restored) => {
                recorder.write(&place.rundir);
                Ok(restored)
            }
            Err(e) => Err(super::undo(place, e)),
        }
    })
}
