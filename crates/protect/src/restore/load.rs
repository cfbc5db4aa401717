//! Load, resume and settle: from a destination QEMU with empty RAM to a running guest.
//!
//! Until the guest runs, this process itself supplies the pages that are waited for; then a pager process takes over. Its start
//! takes time that the guest would have to wait.

use super::checkpoint::LoadInput;
use super::{CAPABILITIES, Request, RestoreError, Restored, same_blocks, same_processors};
use crate::pager::{CheckpointPages, Fill, PagerEvent, lock};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::output::last_lines;
use rekindle_kernel::sched::{self, PriorityBoost, Rank};
use rekindle_kernel::spawn::{detach, disown};
use rekindle_memory::missing::{Content, PageSource, Pager, PagerError, Progress};
use rekindle_memory::ram::GuestRam;
use rekindle_pages::{BlockId, Page, PageNo};
use rekindle_qemu::agent;
use rekindle_qemu::binary::Binary;
use rekindle_qemu::command::{Hardware, Start};
use rekindle_qemu::hold::Hold;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::transfer::{Feed, set_capabilities, wait_loaded};
use rekindle_qemu::vmm::{self, Vmm, log_tail};
use rekindle_store::StoreUrl;
use rekindle_store::remote::Identity;
use rekindle_vm::journal::{Journal, Step};
use rekindle_vm::place::{Made, VmSlot};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::timeline::{Phase, Recorder, host_us};
use rekindle_vm::{fault, network};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// How long a load may take: it waits for the pages that the devices need.
const LOAD: Duration = Duration::from_secs(600);
/// How long an eager restore may take.
const EAGER: Duration = Duration::from_secs(24 * 3600);
/// How long a pager may take to open the store. The guest gets its pages meanwhile.
const PAGER: Duration = Duration::from_secs(60);
/// How long an agent may take to set the guest's clock: its own pages load on demand.
const AGENT: Duration = Duration::from_secs(5);
/// How long QEMU may take to report that the guest has the agent's port open.
const PORT: Duration = Duration::from_millis(20);

/// Whether the guest's clock was set. Otherwise it continues from the time of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Clock {
    /// Set by its agent.
    Set,
    /// The guest was notified of the time, and sets its clock itself.
    #[serde(rename = "told")]
    SetByGuest,
    NoAgent,
    Failed(String),
}

impl std::fmt::Display for Clock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Set => write!(f, "its clock is set"),
            Self::SetByGuest => write!(f, "it sets its clock itself"),
            Self::NoAgent => write!(f, "its clock continues from the checkpoint, since no agent runs in it"),
            Self::Failed(why) => write!(f, "its clock continues from the checkpoint, since it cannot be set: {why}"),
        }
    }
}

/// A destination QEMU that waits for device state.
#[derive(Debug)]
pub(crate) struct DestinationQemu {
    pub(crate) vmm: Vmm,
    pub(crate) qmp: Qmp,
    pub(crate) ram: GuestRam,
    pub(crate) journal: Journal,
    /// It was prepared by an earlier command.
    pub(crate) prepared: bool,
    /// Set if its memory was registered by an earlier command, too.
    pub(crate) registered: Option<RegisteredMemory>,
}

/// The registered memory of a QEMU that reads its device state from a pipe: access to a missing page blocks, and all of them are missing.
#[derive(Debug)]
pub(crate) struct RegisteredMemory {
    injector: Injector,
    pager: Pager,
    feed: Feed,
}

impl RegisteredMemory {
    /// Registers the blocks `paged`.
    pub(crate) fn new(vmm: &Vmm, qmp: &mut Qmp, ram: &GuestRam, paged: &[String]) -> Result<Self, RestoreError> {
        let injector = Injector::new(vmm.process())?;
        let pager = Pager::register(injector, ram, |id| paged.iter().any(|paged| paged == id), None)?;
        Ok(Self { injector, pager, feed: Feed::open(qmp, &[])? })
    }
}

impl DestinationQemu {
    /// Starts one.
    pub(crate) fn start(
        rundir: &RunDir,
        binary: &Binary,
        made: Made,
        hardware: &Hardware,
    ) -> Result<Self, RestoreError> {
        let Made { mut journal, directory, fds } = made;
        let arguments = hardware.arguments(&directory, &rundir.console_log(), Start::Incoming, binary.syntax);
        let vmm = Vmm::spawn(&binary.path, &arguments, &directory, fds)?;
        journal.operation.to = Some(vmm.clone());
        journal.write().map_err(journalled(rundir))?;
        let mut qmp = vmm.connect(vmm::START)?;
        set_capabilities(&mut qmp, CAPABILITIES)?;
        let ram = GuestRam::of(&mut qmp, vmm.process())?;
        Ok(Self { vmm, qmp, ram, journal, prepared: false, registered: None })
    }
}

fn journalled(rundir: &RunDir) -> impl Fn(std::io::Error) -> RestoreError {
    let path = rundir.file("operation.json");
    move |source| RestoreError::Journal { path: path.clone(), source }
}

/// Sets the flag on drop, also during a panic.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A thread that supplies the pages that are waited for.
struct OnDemand<'scope, 'env> {
    ending: SetOnDrop<'env>,
    thread: ScopedJoinHandle<'scope, Result<Progress, PagerError>>,
    _lock: File,
}

/// Pages of a checkpoint that may not be committed yet.
struct UncommittedPages<'a> {
    input: &'a LoadInput,
    ram: &'a GuestRam,
    on_event: Option<&'a mut dyn FnMut(&PagerEvent)>,
    source: Option<CheckpointPages<'a>>,
}

impl<'a> UncommittedPages<'a> {
    fn new(input: &'a LoadInput, ram: &'a GuestRam, on_event: &'a mut dyn FnMut(&PagerEvent)) -> Self {
        Self { input, ram, on_event: Some(on_event), source: None }
    }
}

impl PageSource for UncommittedPages<'_> {
    type Error = RestoreError;

    fn page(&mut self, block: BlockId, page: PageNo, buffer: &mut Page) -> Result<Content, RestoreError> {
        if let Some(on_event) = self.on_event.take() {
            self.source = Some(CheckpointPages::new(self.input.image()?, self.ram, on_event));
        }
        match &mut self.source {
            Some(source) => Ok(source.page(block, page, buffer)?),
            None => Err(RestoreError::NotCommitted { number: self.input.number }),
        }
    }

    fn retry(&mut self, error: &RestoreError, attempt: u32) -> Option<Duration> {
        match (&mut self.source, error) {
            (Some(source), RestoreError::Store(e)) => source.retry(e, attempt),
            _ => None,
        }
    }
}

/// A destination QEMU just before the load: its RAM is empty and blocks on access, its devices have done nothing.
pub struct BeforeLoad<'a> {
    pub recorder: &'a mut Recorder,
    /// The journal of the operation.
    pub journal: &'a mut Journal,
    /// Injects into the destination QEMU.
    pub injector: Injector,
    /// Set it to load pages in the background as long as there is time.
    pub fill_all: &'a AtomicBool,
}

/// Called at that moment. Returns how much of the time that it took is not part of the load.
pub type OnReady<'a> = dyn FnMut(BeforeLoad<'_>) -> Result<Duration, RestoreError> + 'a;

/// The VM that a guest is loaded into.
pub(crate) struct LoadTarget<'a> {
    pub(crate) rundir: &'a RunDir,
    pub(crate) hardware: &'a Hardware,
    /// Called when only the load of the devices and the resume are left. Another QEMU of the VM may run until then; the load changes things
    /// outside of its QEMU, such as the offloads of a tap, which another guest must not get.
    pub(crate) ready: &'a mut OnReady<'a>,
    /// Called as soon as the guest runs.
    pub(crate) resumed: &'a dyn Fn(),
    /// Whether the guest was notified of the time by then. An agent that sets it keeps a processor of the guest busy for a second (`hwclock --systohc`).
    pub(crate) clock_notified: &'a dyn Fn() -> bool,
    /// Records the QEMU that runs the guest, and ends the operation.
    pub(crate) settle: &'a dyn Fn(Journal, Vmm, &Qmp) -> Result<(), RestoreError>,
}

/// How to load a guest.
pub(crate) struct LoadOptions<'a> {
    pub(crate) store: &'a StoreUrl,
    pub(crate) identity: Option<&'a Identity>,
    /// Load all memory before the guest resumes.
    pub(crate) eager: bool,
    /// When the command started.
    pub(crate) began: Instant,
    /// Hold network output.
    pub(crate) hold: bool,
    /// Set before the guest is resumed.
    pub(crate) may_run: Option<&'a AtomicBool>,
}

/// A thread that becomes the store's owner during the load.
pub(crate) type Fence<'scope> = ScopedJoinHandle<'scope, Result<(), RestoreError>>;

/// [`load_and_resume`] for a VM that had no QEMU before.
pub(super) fn load_into_slot(
    place: &VmSlot<'_>,
    waiting: DestinationQemu,
    input: &LoadInput,
    fence: Option<Fence<'_>>,
    request: &Request,
    recorder: &mut Recorder,
    began: Instant,
) -> Result<Restored, RestoreError> {
    let target_vm = LoadTarget {
        rundir: &place.rundir,
        hardware: &place.state.hardware,
        ready: &mut |_| Ok(Duration::ZERO),
        resumed: &|| {},
        clock_notified: &|| false,
        settle: &|journal, vmm, qmp| Ok(place.settle(journal, vmm, qmp.version().clone()).map(drop)?),
    };
    let may_run = request.move_claim.as_ref().map(|move_claim| &move_claim.may_run);
    let load = LoadOptions {
        store: &request.store,
        identity: request.identity.as_ref(),
        eager: request.eager,
        began,
        hold: request.hold_output,
        may_run,
    };
    load_and_resume(target_vm, waiting, input, fence, &load, recorder)
}

/// Loads the checkpoint, and resumes the guest once `fence` confirms that we own the store and the checkpoint is its newest.
pub(crate) fn load_and_resume(
    target_vm: LoadTarget<'_>,
    waiting: DestinationQemu,
    input: &LoadInput,
    fence: Option<Fence<'_>>,
    load: &LoadOptions<'_>,
    recorder: &mut Recorder,
) -> Result<Restored, RestoreError> {
    let DestinationQemu { vmm, mut qmp, ram, mut journal, prepared, registered } = waiting;
    let number = input.number;
    same_processors(&mut qmp, target_vm.hardware, number)?;
    same_blocks(&ram, &input.blocks, number, &input.paged)?;
    let unloaded = |source| {
        let log = log_tail(&vmm.directory(), 10);
        RestoreError::Load { name: target_vm.rundir.name().to_owned(), number, log, source }
    };
    let (stream, registered) = thread::scope(|scope| {
        let stream = scope.spawn(|| input.stream(&ram));
        let first = scope.spawn(|| input.first());
        // From here on, access to a missing page blocks.
        let mut registered = match registered {
            Some(registered) => registered,
            None => RegisteredMemory::new(&vmm, &mut qmp, &ram, &input.paged)?,
        };
        registered.pager.overwrite(&ram, &mut UncommittedPages::new(input, &ram, &mut |_| {}))?;
        let first = first.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        input.put_first(&first, &ram, &mut registered.pager)?;
        let stream = stream.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok::<_, RestoreError>((stream, registered))
    })?;
    let RegisteredMemory { injector, mut pager, mut feed } = registered;
    fault::point("restore.renew.registered", None, Some(&vmm));
    recorder.step("register its memory");

    let name = target_vm.rundir.name().to_owned();
    let (end, all) = (AtomicBool::new(false), AtomicBool::new(false));
    // Ends the thread that supplies pages also when the load fails.
    thread::scope(|scope| {
        let ending = SetOnDrop(&end);
        let (stop, all, ram) = (&end, &all, &ram);
        // The thread also owns the descriptor: after the pager has taken over and ended, a zero page would block as long as ours is open.
        let thread =
            scope.spawn(move || pager.run_on_demand(&mut UncommittedPages::new(input, ram, &mut |_| {}), stop, all));

        let before_load = BeforeLoad { recorder: &mut *recorder, journal: &mut journal, injector, fill_all: all };
        let not_loading = (target_vm.ready)(before_load)?;
        all.store(false, Ordering::Relaxed);
        recorder.phase(Phase::Renew);
        let raised = raise_priority(&vmm);
        feed.write(&stream).map_err(&unloaded)?;
        drop(feed);
        wait_loaded(&mut qmp, LOAD).map_err(&unloaded)?;
        fault::point("restore.renew.loaded", None, Some(&vmm));
        recorder.step("load its devices");

        // From here on the loaded memory is this VM's.
        let held = lock(target_vm.rundir)?;
        let info = input.image()?.info();
        let paged = input.paged.clone();
        Fill::new(load.store.clone(), load.identity, info, vmm.clone(), &ram, paged).write(target_vm.rundir)?;
        let mut on_demand = Some(OnDemand { ending, thread, _lock: held });
        if let Some(on_demand) = on_demand.take_if(|_| load.eager) {
            hand_over(target_vm.rundir, on_demand);
            wait_filled(target_vm.rundir, &vmm)?;
            recorder.step("fill its memory");
        }
        if let Some(fence) = fence {
            fence.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            recorder.step("own the store");
        }
        if load.hold {
            Hold::begin(&mut qmp, target_vm.hardware.nets.iter().map(|net| net.id.as_str()))?;
            recorder.step("hold its output");
        }
        recorder.phase(Phase::Resume);
        if let Some(may_run) = load.may_run {
            may_run.store(true, Ordering::SeqCst);
        }
        journal.advance(Step::Resume).map_err(journalled(target_vm.rundir))?;
        fault::point("restore.resume.journalled", None, Some(&vmm));
        qmp.drop_events();
        qmp.execute::<Value>("cont", ())?;
        let named = |e: &rekindle_qemu::qmp::Event| (e.name == "RESUME").then_some(e.host_us);
        let resumed = qmp.wait_event("RESUME", Duration::from_secs(10), named)?;
        let us = (load.began.elapsed().saturating_sub(not_loading).as_micros() as u64)
            .saturating_sub(host_us().saturating_sub(resumed));
        drop(raised);
        (target_vm.resumed)();
        fault::point("restore.resume.resumed", None, Some(&vmm));
        recorder.step("resume");

        recorder.phase(Phase::Settle);
        // Switches and neighbors learn its new location.
        let rounds = json!({"initial": 50, "max": 550, "rounds": 5, "step": 100});
        if let Err(e) = qmp.execute::<Value>("announce-self", rounds) {
            tracing::debug!("{name}: its network cards were not announced: {e}");
        }
        network::forward_ports(&mut qmp, target_vm.hardware);
        let pid = vmm.pid;
        (target_vm.settle)(journal, vmm.clone(), &qmp)?;
        fault::point("restore.settle.recorded", None, Some(&vmm));
        recorder.step("record");
        if let Some(on_demand) = on_demand {
            hand_over(target_vm.rundir, on_demand);
            recorder.step("start its pager");
        }
        fault::point("restore.settle.handed-over", None, Some(&vmm));
        let clock = if (target_vm.clock_notified)() {
            Clock::SetByGuest
        } else {
            set_clock(&mut qmp, &vmm, target_vm.hardware.agent)
        };
        recorder.step(if clock == Clock::SetByGuest { "notify the guest of the time" } else { "set its clock" });
        let filled = !target_vm.rundir.fill().exists();
        let (checkpoint, taken_us) = (info.number, info.time_us);
        Ok(Restored { name: name.clone(), checkpoint, taken_us, us, pid, filled, prepared, unused: None, clock })
    })
}

/// Raises the priority of QEMU's main thread and monitor over that of the guest's processors and of the threads that read the store.
fn raise_priority(vmm: &Vmm) -> PriorityBoost {
    let mut raised = PriorityBoost::default();
    let rank = |name: &str| [sched::MAIN, "IO mon_iothread"].contains(&name).then_some(Rank::First);
    if let Err(e) = raised.threads_of(vmm.process(), rank) {
        tracing::debug!("cannot raise the priority of QEMU's threads for the load: {e}");
    }
    raised
}

/// Starts the pager process, and lets it take over from this one. The guest runs: a failure is logged, and `recover`
/// starts another pager.
fn hand_over(rundir: &RunDir, on_demand: OnDemand<'_, '_>) {
    let ready = UnixStream::pair().and_then(|(ours, theirs)| {
        spawn_pager(rundir, &["--hand-over"], Stdio::from(OwnedFd::from(theirs)))?;
        ours.set_read_timeout(Some(PAGER))?;
        (&ours).read_exact(&mut [0])
    });
    if let Err(e) = ready {
        let (name, log) = (rundir.name(), log(rundir));
        tracing::warn!(
            "cannot start the pager of {name} ({e}; check {}); the guest blocks where it needs a missing page; to start a pager: rekindle recover {name}",
            log.display()
        );
    }
    let OnDemand { ending, thread, _lock: lock } = on_demand;
    drop(ending);
    match thread.join() {
        Ok(Ok(progress)) => tracing::debug!("{} pages were supplied before the pager took over", progress.demanded),
        Ok(Err(e)) => tracing::warn!("{e}"),
        Err(panic) => std::panic::resume_unwind(panic),
    }
    drop(lock);
}

/// Has the guest's agent set its clock, if it has one.
fn set_clock(qmp: &mut Qmp, vmm: &Vmm, has_port: bool) -> Clock {
    let deadline = Instant::now() + PORT;
    loop {
        match agent::listens(qmp) {
            _ if !has_port => return Clock::NoAgent,
            Ok(true) => break,
            Ok(false) if Instant::now() > deadline => return Clock::NoAgent,
            Ok(false) => thread::sleep(Duration::from_millis(2)),
            Err(e) => return failed(&e),
        }
    }
    match agent::set_time(&vmm.directory().agent(), AGENT) {
        Ok(()) => Clock::Set,
        Err(e) => failed(&e),
    }
}

fn failed(why: &dyn std::fmt::Display) -> Clock {
    tracing::warn!("the guest's clock is not set: {why}; set it in the guest, e.g. chronyc makestep");
    Clock::Failed(why.to_string())
}

/// Starts the pager process.
///
/// # Errors
/// [`RestoreError::Start`].
pub fn start_pager(rundir: &RunDir) -> Result<(), RestoreError> {
    spawn_pager(rundir, &[], Stdio::null()).map_err(|source| RestoreError::Start { name: rundir.name().into(), source })
}

fn spawn_pager(rundir: &RunDir, arguments: &[&str], stdin: Stdio) -> std::io::Result<()> {
    let open = || OpenOptions::new().create(true).append(true).mode(0o600).open(log(rundir));
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["pager"]).args(arguments).arg(rundir.name()).stdout(open()?).stderr(open()?);
    if let Some(root) = rundir.path().parent() {
        command.env("REKINDLE_RUN_DIR", root);
    }
    detach(&mut command).stdin(stdin).spawn().map(disown)
}

fn log(rundir: &RunDir) -> PathBuf {
    rundir.file("pager.log")
}

fn wait_filled(rundir: &RunDir, vmm: &Vmm) -> Result<(), RestoreError> {
    let deadline = Instant::now() + EAGER;
    while rundir.fill().exists() {
        if !vmm.is_alive() || Instant::now() > deadline {
            let log = last_lines(&log(rundir), 10);
            return Err(RestoreError::NotFilled { name: rundir.name().into(), log });
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
