//! Resumes a guest from a checkpoint; its pages load on demand (HydraVM, sections IV-A and IV-B).
//!
//! | module | contents |
//! |---|---|
//! | `checkpoint` | reads the part of a checkpoint that is needed before the guest runs |
//! | [`prepare`] | a destination QEMU that waits with empty RAM |
//! | `concurrent` | a load that runs concurrently with the commit of its checkpoint |
//! | `load` | loads, resumes and settles: from a waiting QEMU to a running guest |
//! | [`on_demand`] | the RAM of a destination whose missing pages are in a checkpoint |
//! | [`into_libvirt`] | the same for a domain, which libvirt runs and manages afterwards |
//! | [`recover`] | finishes or undoes an interrupted restore |
//!
//! `docs/protect.md` has the sequence.

pub(crate) mod checkpoint;
pub(crate) mod concurrent;
mod error;
pub mod into_libvirt;
pub(crate) mod load;
pub mod on_demand;
pub mod prepare;
pub mod recover;

pub use error::RestoreError;
pub use on_demand::start_pager;
pub use rekindle_handover::after_resume::ClockOutcome;

use crate::known_store::KnownStoreFile;
use crate::recipe::permission::{OperatorChoice, Permission};
use checkpoint::ChosenCheckpoint;
use load::EmptyDestination;
use prepare::{PrimedQemu, WaitingQemu};
use rekindle_handover::{Handover, OwnRunDir};
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::command::{Disk, DiskOverlays, Hardware};
use rekindle_qemu::cpu;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::Vmm;
use rekindle_store::types::{Expected, KnownState};
use rekindle_store::{Credentials, StoreError, StoreUrl};
use rekindle_vm::definition::{Definition, Name};
use rekindle_vm::disks::Epochs;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind};
use rekindle_vm::overlays::{RestoredOverlays, SourceQemu};
use rekindle_vm::slot::{IdleSlot, Plan, SlotResources, VmSlot};
use rekindle_vm::state::Prepared;
use rekindle_vm::timeline::Recorder;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;
use std::time::Instant;

/// Maximum number of attempts of a restore, which starts again if another checkpoint was committed meanwhile.
const MAX_ATTEMPTS: usize = 3;

/// Parameters of a restore.
#[derive(Debug, Clone)]
pub struct Request {
    pub store: StoreUrl,
    /// This host's credentials for the store.
    pub credentials: Option<Credentials>,
    /// Number of the checkpoint to restore; none: the newest.
    pub at: Option<u64>,
    /// State that the store must have reached, besides what this host knows.
    pub at_least: KnownState,
    /// What this host knows of the VM's store.
    pub known_store: KnownStoreFile,
    /// The source host of a move has named the store, which may be another than this host knows.
    pub is_store_of_source: bool,
    /// Load all memory before the guest resumes.
    pub eager: bool,
    /// The definition to use instead of the recipe's, if the VM's files have other paths on this host.
    pub definition: Option<Definition>,
    /// The VM's definition on this host, if the operator has one here without naming it for the restore: the checkpoint may
    /// use what it names. The guest is rebuilt as it was at the checkpoint.
    pub local_definition: Option<Definition>,
    /// libvirt's name of the VM on this host, if the operator has named it.
    pub local_domain: Option<String>,
    /// Path of the QEMU to use instead of the definition's.
    pub qemu: Option<PathBuf>,
    /// Hold network output from the guest's first instruction on. A protector with output commit adopts the hold.
    pub hold_output: bool,
    /// Set for a move: the restore succeeds only if this host becomes the next owner of the store, because the source
    /// host may resume the guest.
    pub move_claim: Option<Arc<MoveClaim>>,
}

impl Request {
    /// Returns what the store must be.
    ///
    /// # Errors
    /// [`KnownStoreError`](crate::known_store::KnownStoreError): the store must not be used.
    pub(crate) fn expected(&self) -> Result<Expected, RestoreError> {
        let known = self.known_store.check(self.credentials.as_ref())?.filter(|_| !self.is_store_of_source);
        Ok(Expected { at_least: self.at_least, at_epoch: None, known })
    }

    /// Returns what the operator has named.
    pub(crate) fn choice(&self) -> OperatorChoice<'_> {
        let Self { definition, local_definition, local_domain, qemu, .. } = self;
        OperatorChoice {
            definition: definition.as_ref(),
            local_definition: local_definition.as_ref(),
            qemu: qemu.as_deref(),
            domain: local_domain.as_deref(),
        }
    }

    /// Returns what the QEMU that has written the checkpoint's disks may still do.
    fn source_qemu(&self) -> SourceQemu {
        if self.move_claim.is_some() { SourceQemu::Stopped } else { SourceQemu::Ended }
    }
}

/// A destination host's claim on a guest that the source host has stopped. The source host resumes the guest if this
/// host certainly cannot have it.
#[derive(Debug, Default)]
pub struct MoveClaim {
    /// The owner epoch of the source host; once this host has claimed the store, the owner epoch of that claim. If the
    /// store has another owner, nothing is restored.
    pub owner_epoch: AtomicU64,
    /// Number of the guest's last checkpoint; 0 as long as the source host has not named it.
    pub checkpoint: AtomicU64,
    /// The guest may have been resumed.
    pub may_run: AtomicBool,
}

/// A guest that was restored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    pub name: String,
    pub checkpoint: u64,
    /// When the checkpoint was taken, in µs since 1970, by its host's clock.
    pub taken_us: u64,
    /// Time from the command to the guest's resume, in µs.
    #[serde(rename = "us")]
    pub resumed_after_us: u64,
    /// Pid of the QEMU.
    pub pid: u32,
    /// All of the guest's memory is loaded.
    pub filled: bool,
    /// A prepared QEMU was used.
    pub prepared: bool,
    /// Why the prepared QEMU was not used.
    #[serde(rename = "unused")]
    pub unused_reason: Option<String>,
    /// State of the guest's clock.
    pub clock: ClockOutcome,
}

/// Restores the guest of a checkpoint as VM `name`. Uses the QEMU that was prepared for the VM, if it is suitable.
///
/// *Needs:* the store; room for the guest's RAM; no running VM of that name; a QEMU that supports the guest's machine;
/// the files that the definition names.
/// *On success:* the guest runs; a pager loads the rest of its memory.
/// *On failure:* nothing is left behind, and the checkpoint is unchanged. A prepared QEMU continues to wait, unless it
/// had already been given the state. Exception: after [`RestoreError::MayRun`], the guest may run.
pub fn restore(host: &Host, name: &Name, request: &Request) -> Result<Restored, RestoreError> {
    restore_in(host, name, request, None)
}

/// Does the same as [`restore`], in the prepared QEMU `primed` if that is still the current one.
pub(crate) fn restore_in(
    host: &Host,
    name: &Name,
    request: &Request,
    mut primed: Option<PrimedQemu>,
) -> Result<Restored, RestoreError> {
    let started = Instant::now();
    let mut used_up_reason = None;
    let mut attempts = 1;
    let permission = Permission::of(host, name, request.choice());
    loop {
        match attempt(host, name, request, &permission, &mut primed, started) {
            Err(RestoreError::Changed { .. }) if attempts < MAX_ATTEMPTS => {}
            // The previous owner still commits, and has dropped the checkpoint that was the newest a moment ago.
            Err(RestoreError::Store(StoreError::NoSuchCheckpoint { .. }))
                if request.at.is_none() && attempts < MAX_ATTEMPTS => {}
            // The prepared QEMU had already been given the state.
            Err(e @ RestoreError::Newer { .. }) if attempts < MAX_ATTEMPTS => used_up_reason = Some(e.to_string()),
            Ok(restored) => {
                let unused_reason = restored.unused_reason.or(used_up_reason);
                return Ok(Restored { unused_reason, ..restored });
            }
            Err(e) => return Err(e),
        }
        attempts += 1;
    }
}

fn attempt(
    host: &Host,
    name: &Name,
    request: &Request,
    permission: &Arc<Permission>,
    primed: &mut Option<PrimedQemu>,
    started: Instant,
) -> Result<Restored, RestoreError> {
    let mut recorder = Recorder::new(name.as_str(), "restore");
    let chosen = ChosenCheckpoint::open(permission, request)?;
    recorder.step("open the store");
    let mut idle_slot = IdleSlot::lock(host, name.as_str(), "restore")?;
    let planned =
        RestoredOverlays::open(&chosen.overlays, SourceQemu::Ended).map_err(RestoreError::from).and_then(|overlays| {
            let plan = plan_restore(&idle_slot, request, &chosen, &overlays)?;
            Ok((plan, overlays))
        });
    let (RestorePlan { plan, prepared }, mut overlays) = match planned {
        Ok(planned) => planned,
        Err(e) => {
            idle_slot.release();
            return Err(e);
        }
    };
    recorder.step("check what it needs");
    let unused_reason = match prepared {
        PreparedUse::Suitable(prepared) => {
            match WaitingQemu::of(&prepared, &idle_slot.rundir, &plan.state.hardware, primed.take()) {
                Ok(waiting) => {
                    return prepare::resume_in(idle_slot, plan, chosen, &prepared, waiting, request, recorder, started);
                }
                Err(why) => Some(why),
            }
        }
        PreparedUse::Unsuitable(why) => Some(why),
        PreparedUse::NotPrepared => None,
    };
    if let Some(why) = &unused_reason {
        tracing::warn!("the QEMU that was prepared for {name} cannot be used, starting another one: {why}");
        idle_slot.clear()?;
    }
    let slot = idle_slot.into_slot(plan)?.at_epochs(chosen.epochs.clone());
    match restore_in_new_qemu(&slot, chosen, &mut overlays, request, recorder, started) {
        Ok(restored) => Ok(Restored { unused_reason, ..restored }),
        Err(e) => Err(undo(slot, e)),
    }
}

/// Undoes a restore that failed with `e`. A QEMU that may run the guest is left for `rekindle recover`: ending it would
/// lose the guest's work since the resume.
fn undo(slot: VmSlot<'_>, e: RestoreError) -> RestoreError {
    match slot.qemu_that_may_run() {
        Some(vmm) => RestoreError::MayRun { name: slot.rundir.name().into(), pid: vmm.pid, source: Box::new(e) },
        None => {
            slot.undo();
            e
        }
    }
}

/// How the VM is built on this host.
struct RestorePlan {
    plan: Plan,
    prepared: PreparedUse,
}

/// Whether the QEMU that was prepared for the VM can be used.
enum PreparedUse {
    Suitable(Box<Prepared>),
    /// It cannot be used, for this reason.
    Unsuitable(String),
    NotPrepared,
}

fn plan_restore(
    idle_slot: &IdleSlot<'_>,
    request: &Request,
    chosen: &ChosenCheckpoint,
    overlays: &RestoredOverlays,
) -> Result<RestorePlan, RestoreError> {
    let recipe = &chosen.recipe;
    let mut plan = idle_slot.plan(recipe.definition().clone(), recipe.qemu(), &chosen.epochs, |hardware| {
        recipe.fit(hardware)?;
        if let Some(problem) = hardware.unheld_output().filter(|_| request.hold_output) {
            return Err(vec![format!("{problem}; restore it without --output-commit")]);
        }
        put_on_overlays(hardware, overlays)?;
        reject_disks_without_epoch(hardware, &chosen.epochs)
    })?;
    let unsuitable = match idle_slot.prepared() {
        Some((state, prepared)) => match prepare::adapt_plan(state, prepared, &mut plan) {
            Ok(()) => return Ok(RestorePlan { plan, prepared: PreparedUse::Suitable(Box::new(prepared.clone())) }),
            Err(why) => Some(why),
        },
        None => idle_slot.ended_prepared().and_then(|prepared| prepared.check().err()),
    };
    Ok(RestorePlan { plan, prepared: unsuitable.map_or(PreparedUse::NotPrepared, PreparedUse::Unsuitable) })
}

/// Gives the destination's disks the overlays of the checkpoint.
fn put_on_overlays(hardware: &mut Hardware, overlays: &RestoredOverlays) -> Result<(), Vec<String>> {
    let wanted = overlays.for_qemu();
    match &mut hardware.foreign {
        Some(machine) => {
            let unfit = |disk: &DiskOverlays| machine.check_overlay(&disk.drive).err();
            let problems: Vec<String> = wanted.iter().filter_map(unfit).collect();
            machine.overlays = wanted;
            if problems.is_empty() { Ok(()) } else { Err(problems) }
        }
        None if wanted.is_empty() => Ok(()),
        None => Err(vec!["its disks are on overlays, and its machine is not that of an attached QEMU".into()]),
    }
}

/// Rejects disks that may be newer than the checkpoint. Returns one message for each.
fn reject_disks_without_epoch(hardware: &Hardware, epochs: &Epochs) -> Result<(), Vec<String>> {
    let has_no_epoch = |disk: &&Disk| disk.server && !disk.readonly && !epochs.contains_key(&disk.id);
    let problems: Vec<_> = hardware
        .disks
        .iter()
        .filter(has_no_epoch)
        .map(|disk| {
            format!(
                "disk {}: the checkpoint does not record its epoch, so the disk may be newer than the guest's memory",
                disk.id
            )
        })
        .collect();
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

/// Restores into a new destination QEMU, which is started while the store is being read.
fn restore_in_new_qemu(
    slot: &VmSlot<'_>,
    chosen: ChosenCheckpoint,
    overlays: &mut RestoredOverlays,
    request: &Request,
    recorder: Recorder,
    started: Instant,
) -> Result<Restored, RestoreError> {
    // All checks precede the claim of the store: if one fails, a protector of the VM can continue.
    let SlotResources { journal, fds } = slot.make(Kind::Restore)?;
    let mut handover = handover_into(slot, journal, recorder);
    handover.pass("restore.prepare.journalled");
    overlays.create(&slot.rundir, &slot.binary.path)?;
    handover.pass("overlay.restore.created");
    handover.recorder.step("make its place");
    let environment = OwnRunDir { rundir: &slot.rundir, hardware: &slot.state.hardware, binary: &slot.binary };
    let (input, empty) = thread::scope(|scope| {
        let input = scope.spawn(|| checkpoint::claim_and_read(chosen, request, &slot.rundir));
        let empty = EmptyDestination::start(&mut handover, &environment, fds)?;
        handover.recorder.step("start QEMU");
        let input = input.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok::<_, RestoreError>((Arc::new(input), empty))
    })?;
    handover.recorder.step("read its devices");
    let mut before_resume = |vmm: &Vmm| Ok(overlays.note_resume(&slot.rundir, vmm)?);
    load::load_and_resume(handover, empty, &input, None, &mut before_resume, request, started)
}

/// Returns the hand-over of a restore into `slot`. It has no source.
fn handover_into(slot: &VmSlot<'_>, journal: Journal, recorder: Recorder) -> Handover {
    Handover { rundir: slot.rundir.clone(), state: slot.state.clone(), journal, recorder }
}

/// Rejects a QEMU whose processor features differ from those that the guest of an attached QEMU has seen: the CPU model
/// alone does not determine them.
fn require_same_processors(qmp: &mut Qmp, hardware: &Hardware, number: u64) -> Result<(), RestoreError> {
    let Some(foreign) = &hardware.foreign else { return Ok(()) };
    let words = cpu::differences(&foreign.cpu, &cpu::features(qmp)?);
    if words.is_empty() { Ok(()) } else { Err(RestoreError::Cpu { number, words }) }
}

/// Rejects a QEMU whose RAM blocks differ from the checkpoint's. The sizes of blocks may differ, except of those in
/// `paged`.
fn require_same_blocks(
    ram: &GuestRam,
    theirs: &[rekindle_store::types::Block],
    number: u64,
    paged: &[String],
) -> Result<(), RestoreError> {
    let differ = |what: String| RestoreError::Blocks { number, what };
    let ours: Vec<_> = ram.blocks().iter().map(|block| &block.info).collect();
    for block in theirs {
        match ours.iter().find(|ours| ours.id == block.id) {
            None => return Err(differ(format!("it has no block {}", block.id))),
            Some(ours) if paged.contains(&block.id) && ours.used != block.used => {
                let (id, ours, theirs) = (&block.id, ours.used, block.used);
                return Err(differ(format!("its {id} has {ours} bytes, the guest's {theirs}")));
            }
            Some(_) => {}
        }
    }
    match ours.iter().find(|ours| !theirs.iter().any(|block| block.id == ours.id)) {
        Some(block) => Err(differ(format!("the guest has no block {}", block.id))),
        None => Ok(()),
    }
}
