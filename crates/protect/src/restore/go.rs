//! From a QEMU that waits with empty RAM to a guest that runs, and what can wait until it does.
//!
//! Until the guest runs, this process itself brings the pages that are waited for; then a pager of its own takes over: to
//! start it takes time that the guest would have to wait.

use super::checkpoint::Ahead;
use super::{CAPABILITIES, Request, RestoreError, Restored, same_blocks, same_processors};
use crate::pager::{Fill, PagerEvent, Source, lock};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::output::last_lines;
use rekindle_kernel::sched::{self, PriorityBoost, Rank};
use rekindle_kernel::spawn::{detach, disown};
use rekindle_memory::missing::{Content, Page, PageSource, Pager, PagerError, Progress};
use rekindle_memory::ram::GuestRam;
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
/// How long an agent may take to set the guest's clock: its own pages come on demand.
const AGENT: Duration = Duration::from_secs(5);
/// How long QEMU may take to tell that the guest has the agent's port open.
const PORT: Duration = Duration::from_millis(20);

/// What became of the guest's clock, which goes on from the time of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Clock {
    /// Its agent has set it.
    Set,
    /// The guest was told the time, and sets it itself.
    Told,
    /// No agent runs in the guest.
    NoAgent,
    /// It could not be set.
    Failed(String),
}

impl std::fmt::Display for Clock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Set => write!(f, "its clock is set"),
            Self::Told => write!(f, "it was told the time"),
            Self::NoAgent => write!(f, "its clock is that of the checkpoint, since no agent runs in it"),
            Self::Failed(why) => write!(f, "its clock is that of the checkpoint, since it cannot be set: {why}"),
        }
    }
}

/// A QEMU that waits for a state.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) vmm: Vmm,
    pub(crate) qmp: Qmp,
    pub(crate) ram: GuestRam,
    pub(crate) journal: Journal,
    /// It waited before this command.
    pub(crate) prepared: bool,
    /// Its memory was registered before this command, too.
    pub(crate) registered: Option<Registered>,
}

/// A QEMU whose guest's memory is waited for by whoever touches it, and which reads its state from a pipe. Nothing of the guest's is there.
#[derive(Debug)]
pub(crate) struct Registered {
    injector: Injector,
    pager: Pager,
    feed: Feed,
}

impl Registered {
    /// Register its blocks `paged`.
    pub(crate) fn new(vmm: &Vmm, qmp: &mut Qmp, ram: &GuestRam, paged: &[String]) -> Result<Self, RestoreError> {
        let injector = Injector::new(vmm.process())?;
        let pager = Pager::register(injector, ram, |id| paged.iter().any(|paged| paged == id), None)?;
        Ok(Self { injector, pager, feed: Feed::open(qmp, &[])? })
    }
}

impl Waiting {
    /// Start one.
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

/// Sets the flag when it goes, however that comes about.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The pages that are waited for, brought by this process.
struct OnDemand<'scope, 'env> {
    ending: Ending<'env>,
    thread: ScopedJoinHandle<'scope, Result<Progress, PagerError>>,
    _lock: File,
}

/// Pages of a checkpoint, which may still have to be committed.
struct Coming<'a> {
    ahead: &'a Ahead,
    tell: Option<&'a mut dyn FnMut(&PagerEvent)>,
    source: Option<Source<'a>>,
}

impl<'a> Coming<'a> {
    fn new(ahead: &'a Ahead, tell: &'a mut dyn FnMut(&PagerEvent)) -> Self {
        Self { ahead, tell: Some(tell), source: None }
    }
}

impl PageSource for Coming<'_> {
    type Error = RestoreError;

    fn page(&mut self, block: &str, page: u64, buffer: &mut Page) -> Result<Content, RestoreError> {
        if let Some(tell) = self.tell.take() {
            self.source = Some(Source::new(self.ahead.image()?, tell));
        }
        match &mut self.source {
            Some(source) => Ok(source.page(block, page, buffer)?),
            None => Err(RestoreError::NotCommitted { number: self.ahead.number }),
        }
    }

    fn retry(&mut self, error: &RestoreError, attempt: u32) -> Option<Duration> {
        match (&mut self.source, error) {
            (Some(source), RestoreError::Store(e)) => source.retry(e, attempt),
            _ => None,
        }
    }
}

/// A QEMU has all that it can have before its guest is loaded into it: empty RAM whose pages are waited for, and devices that have done nothing.
pub struct Moment<'a> {
    /// The timeline.
    pub recorder: &'a mut Recorder,
    /// The operation's.
    pub journal: &'a mut Journal,
    /// Into the QEMU that waits.
    pub injector: Injector,
    /// Set while there is time to bring memory that nobody waits for.
    pub bring_all: &'a AtomicBool,
}

/// What is done at that moment. Gives how much of the time that took is nobody's loading.
pub type Ready<'a> = dyn FnMut(Moment<'_>) -> Result<Duration, RestoreError> + 'a;

/// The VM that a guest is loaded into.
pub(crate) struct Seat<'a> {
    pub(crate) rundir: &'a RunDir,
    pub(crate) hardware: &'a Hardware,
    /// Called when nothing is left but to load the guest's devices, and to let it go on. Until then another QEMU may run; what a load sets outside of
    /// its QEMU, as the offloads of a tap, is not to be another guest's.
    pub(crate) ready: &'a mut Ready<'a>,
    /// Called as soon as the guest runs.
    pub(crate) resumed: &'a dyn Fn(),
    /// Whether the guest has been told the time by then. An agent that sets it has the guest's processor busy for a second (`hwclock --systohc`).
    pub(crate) told: &'a dyn Fn() -> bool,
    /// Records the QEMU that runs it, and ends the operation.
    pub(crate) settle: &'a dyn Fn(Journal, Vmm, &Qmp) -> Result<(), RestoreError>,
}

/// How a guest is loaded.
pub(crate) struct Load<'a> {
    pub(crate) store: &'a StoreUrl,
    pub(crate) identity: Option<&'a Identity>,
    /// Bring all memory before the guest goes on.
    pub(crate) eager: bool,
    /// When the command began.
    pub(crate) began: Instant,
    /// Hold what the guest sends.
    pub(crate) hold: bool,
    /// Set before the guest is let go.
    pub(crate) begun: Option<&'a AtomicBool>,
}

/// Becoming the store's owner, under way beside the load.
pub(crate) type Fence<'scope> = ScopedJoinHandle<'scope, Result<(), RestoreError>>;

/// [`go`] for a VM that had none before.
pub(super) fn go_in(
    place: &VmSlot<'_>,
    waiting: Waiting,
    ahead: &Ahead,
    fence: Option<Fence<'_>>,
    request: &Request,
    recorder: &mut Recorder,
    began: Instant,
) -> Result<Restored, RestoreError> {
    let seat = Seat {
        rundir: &place.rundir,
        hardware: &place.state.hardware,
        ready: &mut |_| Ok(Duration::ZERO),
        resumed: &|| {},
        told: &|| false,
        settle: &|journal, vmm, qmp| Ok(place.settle(journal, vmm, qmp.version().clone()).map(drop)?),
    };
    let begun = request.take_over.as_ref().map(|take_over| &take_over.begun);
    let load = Load {
        store: &request.store,
        identity: request.identity.as_ref(),
        eager: request.eager,
        began,
        hold: request.hold_output,
        begun,
    };
    go(seat, waiting, ahead, fence, &load, recorder)
}

/// Load the checkpoint and let the guest go, once `fence` says that the store is ours and the checkpoint its newest.
pub(crate) fn go(
    seat: Seat<'_>,
    waiting: Waiting,
    ahead: &Ahead,
    fence: Option<Fence<'_>>,
    load: &Load<'_>,
    recorder: &mut Recorder,
) -> Result<Restored, RestoreError> {
    let Waiting { vmm, mut qmp, ram, mut journal, prepared, registered } = waiting;
    let number = ahead.number;
    same_processors(&mut qmp, seat.hardware, number)?;
    same_blocks(&ram, &ahead.blocks, number, &ahead.paged)?;
    let unloaded = |source| {
        let said = log_tail(&vmm.directory(), 10);
        RestoreError::Load { name: seat.rundir.name().to_owned(), number, said, source }
    };
    let (stream, registered) = thread::scope(|scope| {
        let stream = scope.spawn(|| ahead.stream(&ram));
        let first = scope.spawn(|| ahead.first());
        // From here on whoever touches a missing page waits.
        let mut registered = match registered {
            Some(registered) => registered,
            None => Registered::new(&vmm, &mut qmp, &ram, &ahead.paged)?,
        };
        registered.pager.overwrite(&ram, &mut Coming::new(ahead, &mut |_| {}))?;
        let first = first.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        ahead.put_first(&first, &mut registered.pager)?;
        let stream = stream.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok::<_, RestoreError>((stream, registered))
    })?;
    let Registered { injector, mut pager, mut feed } = registered;
    fault::point("restore.renew.registered", None, Some(&vmm));
    recorder.step("register its memory");

    let name = seat.rundir.name().to_owned();
    let (end, all) = (AtomicBool::new(false), AtomicBool::new(false));
    // The thread that serves keeps nothing of what a failed restore gives back.
    thread::scope(|scope| {
        let ending = Ending(&end);
        let (stop, all) = (&end, &all);
        // Its descriptor goes with the thread: once the pager has ended that took over, a zero page would be waited for as long as ours is open.
        let thread = scope.spawn(move || pager.run_on_demand(&mut Coming::new(ahead, &mut |_| {}), stop, all));

        let moment = Moment { recorder: &mut *recorder, journal: &mut journal, injector, bring_all: all };
        let elsewhere = (seat.ready)(moment)?;
        all.store(false, Ordering::Relaxed);
        recorder.phase(Phase::Renew);
        let at_first = go_first(&vmm);
        feed.write(&stream).map_err(&unloaded)?;
        drop(feed);
        wait_loaded(&mut qmp, LOAD).map_err(&unloaded)?;
        fault::point("restore.renew.loaded", None, Some(&vmm));
        recorder.step("load its devices");

        // From here on the memory that is brought is this VM's.
        let held = lock(seat.rundir)?;
        let info = ahead.image()?.info();
        let paged = ahead.paged.clone();
        Fill::new(load.store.clone(), load.identity, info, vmm.clone(), &ram, paged).write(seat.rundir)?;
        let mut on_demand = Some(OnDemand { ending, thread, _lock: held });
        if let Some(on_demand) = on_demand.take_if(|_| load.eager) {
            hand_over(seat.rundir, on_demand);
            wait_filled(seat.rundir, &vmm)?;
            recorder.step("bring its memory");
        }
        if let Some(fence) = fence {
            fence.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            recorder.step("own the store");
        }
        if load.hold {
            Hold::begin(&mut qmp, seat.hardware.nets.iter().map(|net| net.id.as_str()))?;
            recorder.step("hold its output");
        }
        recorder.phase(Phase::Resume);
        if let Some(begun) = load.begun {
            begun.store(true, Ordering::SeqCst);
        }
        journal.advance(Step::Resume).map_err(journalled(seat.rundir))?;
        fault::point("restore.resume.journalled", None, Some(&vmm));
        qmp.drop_events();
        qmp.execute::<Value>("cont", ())?;
        let named = |e: &rekindle_qemu::qmp::Event| (e.name == "RESUME").then_some(e.host_us);
        let resumed = qmp.wait_event("RESUME", Duration::from_secs(10), named)?;
        let us = (load.began.elapsed().saturating_sub(elsewhere).as_micros() as u64)
            .saturating_sub(host_us().saturating_sub(resumed));
        drop(at_first);
        (seat.resumed)();
        fault::point("restore.resume.resumed", None, Some(&vmm));
        recorder.step("resume");

        recorder.phase(Phase::Settle);
        // Switches and neighbours learn where it is now.
        let rounds = json!({"initial": 50, "max": 550, "rounds": 5, "step": 100});
        if let Err(e) = qmp.execute::<Value>("announce-self", rounds) {
            tracing::debug!("{name}: its network cards were not announced: {e}");
        }
        network::forward_ports(&mut qmp, seat.hardware);
        let pid = vmm.pid;
        (seat.settle)(journal, vmm.clone(), &qmp)?;
        fault::point("restore.settle.recorded", None, Some(&vmm));
        recorder.step("record");
        if let Some(on_demand) = on_demand {
            hand_over(seat.rundir, on_demand);
            recorder.step("start its pager");
        }
        fault::point("restore.settle.handed-over", None, Some(&vmm));
        let clock = if (seat.told)() { Clock::Told } else { set_clock(&mut qmp, &vmm, seat.hardware.agent) };
        recorder.step(if clock == Clock::Told { "tell the guest" } else { "set its clock" });
        let filled = !seat.rundir.fill().exists();
        let (checkpoint, taken_us) = (info.number, info.time_us);
        Ok(Restored { name: name.clone(), checkpoint, taken_us, us, pid, filled, prepared, unused: None, clock })
    })
}

/// Its main thread and its monitor go before the guest's processors and before what reads the store.
fn go_first(vmm: &Vmm) -> PriorityBoost {
    let mut at_first = PriorityBoost::default();
    let rank = |name: &str| [sched::MAIN, "IO mon_iothread"].contains(&name).then_some(Rank::First);
    if let Err(e) = at_first.threads_of(vmm.process(), rank) {
        tracing::debug!("the load is scheduled as everything else: {e}");
    }
    at_first
}

/// Start the process that brings the VM's memory, and let it take over from this one. The guest runs: what goes wrong is told,
/// and `recover` starts another pager.
fn hand_over(rundir: &RunDir, on_demand: OnDemand<'_, '_>) {
    let ready = UnixStream::pair().and_then(|(ours, theirs)| {
        spawn_pager(rundir, &["--hand-over"], Stdio::from(OwnedFd::from(theirs)))?;
        ours.set_read_timeout(Some(PAGER))?;
        (&ours).read_exact(&mut [0])
    });
    if let Err(e) = ready {
        let (name, log) = (rundir.name(), log(rundir));
        tracing::warn!(
            "the pager of {name} does not begin ({e}; see {}); pages of the guest that are missing wait until: rekindle recover {name}",
            log.display()
        );
    }
    let OnDemand { ending, thread, _lock: lock } = on_demand;
    drop(ending);
    match thread.join() {
        Ok(Ok(progress)) => tracing::debug!("{} pages were waited for until here", progress.demanded),
        Ok(Err(e)) => tracing::warn!("{e}"),
        Err(panic) => std::panic::resume_unwind(panic),
    }
    drop(lock);
}

/// Have the guest's clock set by its agent, if it has one.
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

/// Start the process that brings the VM's memory.
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
            let said = last_lines(&log(rundir), 10);
            return Err(RestoreError::NotFilled { name: rundir.name().into(), said });
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
