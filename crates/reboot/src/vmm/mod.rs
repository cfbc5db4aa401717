//! Replacing the QEMU process of a VM.
//!
//! | how | what happens to the guest |
//! |---|---|
//! | [`How::Warm`] | stopped for some milliseconds; its RAM does not move |
//! | [`How::Saved`] | stopped while its RAM is written to disk and read back |
//! | [`How::Cold`] | shut down and booted |
//!
//! `docs/vmm-restart.md` has the sequence and the argument; `docs/run-directory.md` what is written down when.

mod answer;
pub(crate) mod cold;
mod generation;
pub(crate) mod handover;
mod preflight;
pub(crate) mod recover;
pub(crate) mod saved;
pub(crate) mod switch;
mod verify;
pub(crate) mod warm;

pub use answer::Patience;
pub use preflight::Problem;
pub use recover::{Recovered, recover};

use rekindle_kernel::sched::PriorityBoost;
use rekindle_memory::directory::RamError;
use rekindle_protect::moving::MoveError;
use rekindle_protect::restore::RestoreError;
use rekindle_qemu::binary::{Binary, BinaryError};
use rekindle_qemu::qmp::{Qmp, QmpError, Version};
use rekindle_qemu::transfer::TransferError;
use rekindle_qemu::vmm::{Vmm, VmmError};
use rekindle_vm::disks::Kept;
use rekindle_vm::hardware;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind};
use rekindle_vm::life::{End, Ended, Held, LifeError};
use rekindle_vm::lock;
use rekindle_vm::network::NetworkError;
use rekindle_vm::state::State;
use rekindle_vm::timeline::{Entry, Recorder};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Barrier, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// How a VMM is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum How {
    /// The guest's RAM stays where it is; only device state passes from the old QEMU to the new.
    Warm,
    /// The guest's RAM goes to disk and back, by QEMU's own migration.
    Saved,
    /// The guest is shut down and booted.
    Cold,
}

impl std::fmt::Display for How {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Warm => "warm",
            Self::Saved => "saved",
            Self::Cold => "cold",
        })
    }
}

/// What is wanted.
#[derive(Debug, Clone)]
pub struct Options {
    /// How.
    pub how: How,
    /// The binary to run from now on; none: the one that runs.
    pub qemu: Option<PathBuf>,
    /// Back to the binary before the last upgrade.
    pub rollback: bool,
    /// Digest all of the guest's memory in the old QEMU and in the new one, while it is stopped, and compare.
    pub verify_memory: bool,
}

/// A QEMU as it is reported.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Side {
    /// Its binary.
    pub binary: PathBuf,
    /// Its version.
    pub version: Option<Version>,
    /// Its process.
    pub pid: u32,
}

/// What a reboot did.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// The VM.
    pub name: String,
    /// Guest-stopped time in microseconds of the host's clock: from QEMU's `STOP` (cold: the old QEMU's end) to the
    /// new QEMU's `RESUME`.
    pub stopped_us: u64,
    /// When it was stopped: microseconds since 1970.
    pub stop_host_us: u64,
    /// When it went on.
    pub resume_host_us: u64,
    /// The steps in order.
    pub steps: Vec<Entry>,
    /// What ran before.
    pub from: Side,
    /// What runs now.
    pub to: Side,
    /// With [`Options::verify_memory`]: bytes of pages that differ; `None` for what the QEMU does not let be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
}

pub use verify::Memory;

/// What the guest is left with after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Left {
    /// As it was before.
    AsItWas,
    /// `rekindle recover` has to decide.
    NeedsRecovery,
}

/// Why a VMM could not be replaced.
#[derive(Debug, thiserror::Error)]
pub enum RebootError {
    /// Something speaks against it; nothing was stopped.
    #[error("the VMM of {name} cannot be replaced; nothing was stopped:\n{}", bulleted(.problems))]
    Preflight {
        /// The VM.
        name: String,
        /// What.
        problems: Vec<Problem>,
    },
    /// Something speaks against a reboot of the guest.
    #[error("{name} was not rebooted: {problem}")]
    Against {
        /// The VM.
        name: String,
        /// What.
        problem: Problem,
    },
    /// A guest that was to start another kernel by itself has not, as far as is to be seen.
    #[error("{name}: {what}")]
    Kexec {
        /// The VM.
        name: String,
        /// What it has done, and what to do.
        what: String,
    },
    /// A candidate cannot be loaded.
    #[error("the candidate cannot be loaded")]
    Candidate(#[source] Box<RestoreError>),
    /// A move to another host that was cut off is not settled.
    #[error(transparent)]
    Move(#[from] MoveError),
    /// Nowhere to go back to.
    #[error("VM {name} has had no other QEMU: there is nothing to roll back to")]
    NoRollback {
        /// The VM.
        name: String,
    },
    /// The old QEMU died before the guest's state was saved.
    #[error(
        "the old QEMU of {name} died before its guest's state was saved: the guest's processor state, and with it its \
         memory, is lost; rekindle recover {name} boots it from its disks"
    )]
    Lost {
        /// The VM.
        name: String,
    },
    /// The new QEMU died after it had run the guest.
    #[error(
        "the new QEMU of {name} died after its guest had run in it: the guest's memory is no longer that of the old \
         QEMU and is lost; rekindle recover {name} boots it from its disks; the new QEMU said:\n{said}"
    )]
    DiedRunning {
        /// The VM.
        name: String,
        /// The end of its log.
        said: String,
    },
    /// A QEMU that may run the guest does not answer.
    #[error(
        "{name}: QEMU (process {pid}) runs but has not answered within {} s; it may run the guest, so nothing was changed. If it is \
         stopped, resume it: kill -CONT {pid}; if another program is connected to its QMP sockets, end that one; then: rekindle \
         recover {name}. To kill it, with what its guest has not written to disk: rekindle recover {name} --force",
        waited.as_secs()
    )]
    Silent {
        /// The VM.
        name: String,
        /// The QEMU.
        pid: u32,
        /// How long an answer was waited for.
        waited: Duration,
    },
    /// The new QEMU died while it waited for the guest of a candidate to go on.
    #[error("the new QEMU of {name} died before its guest went on; it said:\n{said}")]
    DiedWaiting {
        /// The VM.
        name: String,
        /// The end of its log.
        said: String,
    },
    /// The new QEMU failed before it ran the guest.
    #[error("the new QEMU of {name} failed to {doing}; it said:\n{said}")]
    NewFailed {
        /// The VM.
        name: String,
        /// What it was doing.
        doing: &'static str,
        /// The end of its log.
        said: String,
        /// Why.
        #[source]
        source: Box<RebootError>,
    },
    /// The saved state is not what was written.
    #[error(
        "the saved state {} of {name} is damaged: {what}; it is not loaded, and no QEMU has the guest any more; \
         rekindle stop {name} gives it up",
        path.display()
    )]
    Damaged {
        /// The VM.
        name: String,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// What is known of a suspended guest cannot be read or written.
    #[error("{name}: {why}")]
    Record {
        /// The VM.
        name: String,
        /// Why.
        why: String,
    },
    /// The kernel or QEMU that it would go on with offers less than it had.
    #[error(
        "{name} stays suspended: it would be without processor features that it uses ({words}); boot the former kernel, or          give its memory up: rekindle stop {name}"
    )]
    FewerFeatures {
        /// The VM.
        name: String,
        /// Which.
        words: String,
    },
    /// A file of an operation cannot be written or read.
    #[error("{}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// See [`LifeError`].
    #[error(transparent)]
    Life(#[from] LifeError),
    /// See [`BinaryError`].
    #[error(transparent)]
    Binary(#[from] BinaryError),
    /// See [`VmmError`].
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// See [`QmpError`].
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// See [`TransferError`].
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// See [`NetworkError`].
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// See [`RamError`].
    #[error(transparent)]
    Ram(#[from] RamError),
}

fn bulleted(problems: &[Problem]) -> String {
    problems.iter().map(|problem| format!("  - {problem}")).collect::<Vec<_>>().join("\n")
}

/// A reboot that failed, and what that means for the guest.
#[derive(Debug, thiserror::Error)]
#[error("{}", match (left, &**error) {
    // There was no guest that ran.
    (Left::AsItWas, RebootError::Life(LifeError::Unknown { .. } | LifeError::Ended { .. } | LifeError::Prepared { .. })) => {
        "not rebooted"
    }
    (Left::AsItWas, _) => "the reboot failed; the guest runs as before",
    (Left::NeedsRecovery, _) => "the reboot failed; the guest needs `rekindle recover`",
})]
pub struct Failure {
    /// What the guest is left with.
    pub left: Left,
    /// Why.
    #[source]
    pub error: Box<RebootError>,
}

impl Failure {
    fn new(left: Left, error: RebootError) -> Self {
        Self { left, error: Box::new(error) }
    }
}

/// What came of one VM of a reboot.
pub type Outcome = (String, Result<Report, Failure>);

/// Replace the QEMUs of `names`, in parallel.
///
/// *Needs:* the VMs run; nothing else is at work on them; the new binary fits (see [`Problem`]).
/// *On success:* each guest runs in a new QEMU; the old one is gone.
/// *On failure:* per VM, as [`Failure::left`] says. The others are not held up.
///
/// Nobody is stopped before everybody has been prepared, so that the time in which guests are stopped has no
/// preparation in it, and guests are handed over as many at a time as there are processors.
#[must_use]
pub fn reboot(host: &Host, names: &[String], options: &Options) -> Vec<Outcome> {
    let together = Together { barrier: Barrier::new(names.len()), gate: Gate::new(), binaries: Mutex::default() };
    thread::scope(|scope| {
        let workers: Vec<_> = names
            .iter()
            .map(|name| {
                let together = &together;
                (name, scope.spawn(move || one(host, name, options, together)))
            })
            .collect();
        workers
            .into_iter()
            .map(|(name, worker)| {
                let outcome = worker.join().unwrap_or_else(|_| {
                    let source = io::Error::other("the thread that rebooted this VM panicked");
                    let error = RebootError::File { path: host.root.join(name), source };
                    Err(Failure::new(Left::NeedsRecovery, error))
                });
                (name.clone(), outcome)
            })
            .collect()
    })
}

/// What a reboot would do to one VM.
#[derive(Debug, Clone)]
pub struct Planned {
    /// What runs.
    pub from: Side,
    /// What would run.
    pub binary: PathBuf,
    /// Its version.
    pub version: Version,
}

/// Looks at what [`reboot`] would do to each of `names`, and what prevents it. Nothing is changed.
#[must_use]
pub fn plan(host: &Host, names: &[String], options: &Options) -> Vec<(String, Result<Planned, RebootError>)> {
    let together = Together { barrier: Barrier::new(1), gate: Gate::new(), binaries: Mutex::default() };
    let operation = format!("reboot vmm --how {} --dry-run", options.how);
    let one = |name: &String| {
        let change = begin(host, name, &operation, options, |path| together.probe(host, path))?;
        let (version, pid) = (change.held.state.version.clone(), change.old.pid);
        let from = Side { binary: change.old.binary.clone(), version, pid };
        Ok(Planned { from, binary: change.binary.path.clone(), version: change.binary.version.clone() })
    };
    names.iter().map(|name| (name.clone(), one(name))).collect()
}

/// What the VMs of one reboot share.
struct Together {
    /// Nobody is stopped before everybody is prepared.
    barrier: Barrier,
    /// How many are switched at a time.
    gate: Gate,
    /// What the binaries can do, asked once each.
    binaries: Mutex<HashMap<PathBuf, Binary>>,
}

impl Together {
    fn probe(&self, host: &Host, path: &Path) -> Result<Binary, BinaryError> {
        // Held while asking: the others would ask the same.
        let mut binaries = self.binaries.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(binary) = binaries.get(path) {
            return Ok(binary.clone());
        }
        let binary = Binary::known(path, &host.binaries())?;
        binaries.insert(path.to_owned(), binary.clone());
        Ok(binary)
    }
}

/// Lets as many through at a time as there are processors: handing a guest over is computing from end to end, and
/// more at once would all be stopped for longer without being done sooner.
struct Gate {
    free: Mutex<usize>,
    freed: Condvar,
}

impl Gate {
    fn new() -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        Self { free: Mutex::new(processors), freed: Condvar::new() }
    }

    fn pass<T>(&self, work: impl FnOnce() -> T) -> T {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free = self.freed.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner);
        *free -= 1;
        drop(free);
        let done = work();
        *self.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.freed.notify_one();
        done
    }
}

/// One VM. Passes the barrier as often as all others do, whatever happens.
fn one(host: &Host, name: &str, options: &Options, together: &Together) -> Result<Report, Failure> {
    let operation = format!("reboot vmm --how {}", options.how);
    let begun = begin(host, name, &operation, options, |path| together.probe(host, path))
        .map_err(|error| Failure::new(Left::AsItWas, error));
    match options.how {
        How::Warm => {
            let prepared = begun.and_then(warm::Prepared::new);
            together.barrier.wait();
            // Guests that run again already are not to keep this one waiting. Without the right to it they do.
            let mut first = PriorityBoost::default();
            let _ = first.this_thread();
            let switched = prepared.and_then(|prepared| together.gate.pass(|| prepared.hand_over()));
            drop(first);
            // Ending old QEMUs takes processor time that guests which are still stopped need more.
            together.barrier.wait();
            switched?.settle()
        }
        How::Saved => {
            together.barrier.wait();
            saved::reboot(begun?)
        }
        How::Cold => {
            together.barrier.wait();
            cold::reboot(begun?, Kind::VmmCold, End::Shutdown).map(|again| again.report)
        }
    }
}

/// A guest that was shut down and booted.
pub(crate) struct Again {
    pub(crate) report: Report,
    /// What it had of its disks, if that was kept.
    pub(crate) kept: Option<Kept>,
    /// How it was brought to its end.
    pub(crate) ended: Ended,
}

/// Bring the guest of VM `name` to its `end` and boot it, for `operation` of `kind`, unless `against` finds something that speaks against it.
pub(crate) fn boot_again(
    host: &Host,
    name: &str,
    (operation, kind): (&str, Kind),
    end: End,
    against: impl FnOnce(&State) -> Option<Problem>,
) -> Result<Again, Failure> {
    cold::reboot(begin_again(host, name, operation, against)?, kind, end)
}

/// Begin with that: the VM is held, and nothing has been stopped.
pub(crate) fn begin_again(
    host: &Host,
    name: &str,
    operation: &str,
    against: impl FnOnce(&State) -> Option<Problem>,
) -> Result<Change, Failure> {
    let options = Options { how: How::Cold, qemu: None, rollback: false, verify_memory: false };
    let begun = begin(host, name, operation, &options, |path| Binary::known(path, &host.binaries()));
    let begun = begun.and_then(|change| match against(&change.held.state) {
        None => Ok(change),
        Some(problem) => Err(RebootError::Against { name: name.into(), problem }),
    });
    begun.map_err(|error| Failure::new(Left::AsItWas, error))
}

/// A change of VMMs in hand, past the preflight.
pub(crate) struct Change {
    pub(crate) host: Host,
    pub(crate) held: Held,
    pub(crate) old: Vmm,
    pub(crate) binary: Binary,
    pub(crate) options: Options,
    pub(crate) recorder: Recorder,
    /// Whether the guest runs, or was paused by its owner and has to stay so.
    pub(crate) running: bool,
    run_state: Option<lock::RunState>,
}

/// How long a checkpoint of the guest may be in the way of its reboot.
pub(crate) const RUN_STATE_PATIENCE: Duration = Duration::from_secs(30);

impl Change {
    pub(crate) fn name(&self) -> &str {
        self.held.rundir.name()
    }

    /// What is told when it is done.
    pub(crate) fn report(&self, new: &Vmm, state: &State, times: (u64, u64), memory: Option<Memory>) -> Report {
        let (stop_host_us, resume_host_us) = times;
        Report {
            name: self.name().into(),
            stopped_us: resume_host_us.saturating_sub(stop_host_us),
            stop_host_us,
            resume_host_us,
            steps: self.recorder.entries().to_vec(),
            from: Side { binary: self.old.binary.clone(), version: self.held.state.version.clone(), pid: self.old.pid },
            to: Side { binary: new.binary.clone(), version: state.version.clone(), pid: new.pid },
            memory,
        }
    }

    /// From here on nobody else stops the guest or lets it go on, until this change is through.
    pub(crate) fn hold_run_state(&mut self) -> Result<(), RebootError> {
        let lock = lock::RunState::acquire(&self.held.rundir, RUN_STATE_PATIENCE).map_err(LifeError::from)?;
        self.run_state = Some(lock);
        Ok(())
    }

    /// Begin the operation's journal.
    pub(crate) fn open_journal(&self, kind: Kind) -> Result<Journal, RebootError> {
        let generation = self.held.state.generation + 1;
        let journal = Journal::open_for(&self.held.rundir, kind, Some(self.old.clone()), generation, self.running);
        journal.map_err(self.file_error("operation.json"))
    }

    pub(crate) fn file_error(&self, file: &str) -> impl Fn(io::Error) -> RebootError + use<> {
        let path = self.held.rundir.file(file);
        move |source| RebootError::File { path: path.clone(), source }
    }
}

pub(crate) fn begin(
    host: &Host,
    name: &str,
    operation: &str,
    options: &Options,
    probe: impl FnOnce(&Path) -> Result<Binary, BinaryError>,
) -> Result<Change, RebootError> {
    let recorder = Recorder::new(name, operation);
    let held = Held::take_once_saved(host, name, operation)?;
    let old = held.vmm()?.clone();
    held.refuse_attached("giving its guest to another QEMU")?;
    if held.state.hardware.foreign.is_some() {
        return Err(LifeError::Foreign { name: name.into() }.into());
    }
    let path = match (&options.qemu, options.rollback) {
        (Some(path), _) => path.clone(),
        (None, true) => held.state.previous.clone().ok_or_else(|| RebootError::NoRollback { name: name.into() })?,
        (None, false) => old.binary.clone(),
    };
    let binary = hardware::relied_on(&held.state.hardware, probe(&path)?, &host.binaries())?;
    let options = options.clone();
    let mut change =
        Change { host: host.clone(), held, old, binary, options, recorder, running: true, run_state: None };
    change.running = preflight::check(&change)?;
    change.recorder.step("preflight");
    Ok(change)
}

/// Let the guest go in this QEMU, or leave it paused, and tell when.
pub(crate) fn resume(qmp: &mut Qmp, run: bool) -> Result<u64, QmpError> {
    if !run {
        return Ok(rekindle_vm::timeline::host_us());
    }
    qmp.drop_events();
    qmp.execute::<Value>("cont", ())?;
    wait_resumed(qmp, Duration::from_secs(10))
}

/// Wait for QEMU's `RESUME`, and tell when it was.
fn wait_resumed(qmp: &mut Qmp, timeout: Duration) -> Result<u64, QmpError> {
    qmp.wait_event("RESUME", timeout, |event| (event.name == "RESUME").then_some(event.host_us))
}

/// Stop the guest in this QEMU, and tell when.
pub(crate) fn stop(qmp: &mut Qmp, runs: bool) -> Result<u64, QmpError> {
    if !runs {
        return Ok(rekindle_vm::timeline::host_us());
    }
    qmp.drop_events();
    qmp.execute::<Value>("stop", ())?;
    qmp.wait_event("STOP", Duration::from_secs(10), |event| (event.name == "STOP").then_some(event.host_us))
}
