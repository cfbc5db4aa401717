//! Loads, resumes and settles a restore: from a destination QEMU with empty RAM to a running guest.

use super::checkpoint::LoadInput;
use super::on_demand::{OnDemandRam, RegisteredMemory, wait_until_filled};
use super::{Request, RestoreError, Restored, require_same_processors};
use rekindle_handover::after_resume::{announce, set_clock};
use rekindle_handover::destination::time_to_resume;
use rekindle_handover::ram::WITHOUT_RAM;
use rekindle_handover::takeover::Taps;
use rekindle_handover::{Destination, Environment, Handover, LoadedStage, PreparedStage, SpawnedStage, priority};
use rekindle_kernel::sched::PriorityBoost;
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::command::{Hardware, Start};
use rekindle_qemu::hold::OutputHold;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::transfer::set_capabilities;
use rekindle_qemu::vmm::{Vmm, log_tail};
use rekindle_store::Credentials;
use rekindle_store::StoreUrl;
use rekindle_vm::timeline::Phase;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// How long a load may take: it waits for the pages that the devices need.
const LOAD_TIMEOUT: Duration = Duration::from_secs(600);

/// A destination QEMU with empty RAM.
#[derive(Debug)]
pub(crate) struct EmptyDestination {
    pub(crate) destination: Destination<SpawnedStage>,
    pub(crate) ram: GuestRam,
    /// Set if an earlier command has also registered the destination's memory.
    pub(crate) registered: Option<RegisteredMemory>,
    pub(crate) origin: Origin,
}

/// The command that has started a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    ThisCommand,
    /// `rekindle restore --prepare`, or the preparation of a move.
    EarlierCommand,
}

impl EmptyDestination {
    /// Starts a destination with empty RAM.
    pub(crate) fn start(
        handover: &mut Handover,
        environment: &impl Environment,
        taps: Taps,
    ) -> Result<Self, RestoreError> {
        let mut destination = Destination::spawn(handover, environment, Start::Incoming, taps)?;
        set_capabilities(&mut destination.qmp, WITHOUT_RAM)?;
        let ram = GuestRam::of(&mut destination.qmp, destination.vmm.process())?;
        Ok(Self { destination, ram, registered: None, origin: Origin::ThisCommand })
    }

    /// Adopts a QEMU that waits.
    pub(crate) fn waiting(
        vmm: Vmm,
        qmp: Qmp,
        ram: GuestRam,
        registered: Option<RegisteredMemory>,
    ) -> Result<Self, RestoreError> {
        let destination = Destination::adopt(vmm, qmp)?;
        Ok(Self { destination, ram, registered, origin: Origin::EarlierCommand })
    }
}

/// Registers the memory of a destination, so that access to a missing page blocks. The destination's devices are not
/// active yet, so another QEMU of the VM may still run.
pub(crate) fn prepare(
    empty: EmptyDestination,
    input: &Arc<LoadInput>,
    hardware: &Hardware,
    handover: &mut Handover,
) -> Result<Destination<PreparedStage<OnDemandRam>>, RestoreError> {
    let EmptyDestination { mut destination, ram, registered, .. } = empty;
    require_same_processors(&mut destination.qmp, hardware, input.number)?;
    let ram = OnDemandRam::new(Arc::clone(input), ram, registered)?;
    let prepared = destination.prepare(ram)?;
    handover.pass("restore.renew.registered");
    handover.recorder.step("register its memory");
    Ok(prepared)
}

/// The location of a checkpoint.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CheckpointSource<'a> {
    pub(crate) store: &'a StoreUrl,
    pub(crate) credentials: Option<&'a Credentials>,
    pub(crate) number: u64,
}

/// A destination that has the guest's devices, and whose main thread has a raised priority until the guest runs.
pub(crate) struct BoostedDestination {
    pub(crate) loaded: Destination<LoadedStage<OnDemandRam>>,
    pub(crate) boost: PriorityBoost,
}

/// Loads the devices. This has effects outside of the destination, such as on the offloads of a tap, so no other QEMU
/// of the VM may run.
pub(crate) fn load_devices(
    mut prepared: Destination<PreparedStage<OnDemandRam>>,
    source: CheckpointSource<'_>,
    handover: &mut Handover,
) -> Result<BoostedDestination, RestoreError> {
    handover.recorder.phase(Phase::Renew);
    let vmm = prepared.vmm.clone();
    let mut boost = PriorityBoost::default();
    // Raises the main thread above the guest's processors and the threads that read the store.
    if let Err(e) = priority::boost_monitor(&mut boost, vmm.process()) {
        tracing::debug!("cannot raise the priority of QEMU's threads for the load: {e}");
    }
    let stream = prepared.stage.ram.take_stream();
    let (name, number) = (handover.name().to_owned(), source.number);
    let mut loaded = prepared.feed(handover, &stream, LOAD_TIMEOUT).map_err(|e| match RestoreError::from(e) {
        RestoreError::Transfer(source) => {
            let log = log_tail(&vmm.directory(), 10);
            RestoreError::Load { name, number, log, source }
        }
        other => other,
    })?;
    handover.recorder.step("load its devices");
    loaded.stage.ram.record_fill(&handover.rundir, &vmm, source.store, source.credentials)?;
    Ok(BoostedDestination { loaded, boost })
}

/// A thread that makes this host the store's owner during the load.
pub(crate) type StoreClaim<'scope> = ScopedJoinHandle<'scope, Result<(), RestoreError>>;

/// Loads the checkpoint of `request` into a VM that has no source QEMU. Resumes the guest once `claim` confirms that
/// this host owns the store and the checkpoint is its newest, and `before_resume` has recorded that it is about to run.
/// `started`: when the command started.
pub(super) fn load_and_resume(
    mut handover: Handover,
    empty: EmptyDestination,
    input: &Arc<LoadInput>,
    claim: Option<StoreClaim<'_>>,
    before_resume: &mut dyn FnMut(&Vmm) -> Result<(), RestoreError>,
    request: &Request,
    started: Instant,
) -> Result<Restored, RestoreError> {
    let hardware = handover.state.hardware.clone();
    let (rundir, origin) = (handover.rundir.clone(), empty.origin);
    let prepared = prepare(empty, input, &hardware, &mut handover)?;
    let (store, credentials) = (&request.store, request.credentials.as_ref());
    let source = CheckpointSource { store, credentials, number: input.number };
    let BoostedDestination { mut loaded, boost } = load_devices(prepared, source, &mut handover)?;
    if request.eager {
        loaded.stage.ram.hand_over_to_pager(&rundir);
        wait_until_filled(&rundir, &loaded.vmm)?;
        handover.recorder.step("fill its memory");
    }
    if let Some(claim) = claim {
        claim.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        handover.recorder.step("own the store");
    }
    if request.hold_output {
        OutputHold::begin(&mut loaded.qmp, hardware.nets.iter().map(|net| net.id.as_str()))?;
        handover.recorder.step("hold its output");
    }
    before_resume(&loaded.vmm)?;
    if let Some(move_claim) = &request.move_claim {
        move_claim.may_run.store(true, Ordering::SeqCst);
    }
    let mut running = loaded.commit(&mut handover, "resume")?;
    drop(boost);
    let resumed_after_us = time_to_resume(started.elapsed(), running.stage.resumed_host_us);
    announce(&mut running.qmp, rundir.name());
    let mut settled = running.settle(handover, "record")?;
    settled.ram.hand_over_to_pager(&rundir);
    if !request.eager {
        settled.recorder.step("start its pager");
    }
    rekindle_vm::fault::point("restore.settle.handed-over", None, Some(&settled.vmm));
    let clock = set_clock(&mut settled.qmp, &settled.vmm, hardware.agent);
    settled.recorder.step("set its clock");
    settled.recorder.write(&rundir);
    let info = input.image()?.info();
    Ok(Restored {
        name: rundir.name().to_owned(),
        checkpoint: info.number,
        taken_us: info.time_us,
        resumed_after_us,
        pid: settled.vmm.pid,
        filled: !rundir.fill().exists(),
        prepared: origin == Origin::EarlierCommand,
        unused_reason: None,
        clock,
    })
}
