//! One QEMU being protected: its monitors, its memory, and what of it was written.

mod compare;
mod plan;
mod served;
mod take;

use crate::epochs::{self, EpochError, Epochs};
use crate::event::Done;
use crate::filling::Held;
use crate::first;
use crate::pager::FillError;
use crate::pause::{Monitors, PauseError, Paused, Then};
use crate::policy::Policy;
use crate::runs::{nothing, read};
use crate::target::{Target, TargetError};
use rekindle_disk::control::ControlError;
use rekindle_kernel::inject::{InjectError, Injector};
use rekindle_memory::ram::{Block, GuestRam, GuestRamError};
use rekindle_memory::tracker::{self, Asynchronous, Dirty, Filling, Synchronous, TrackError, Tracker};
use rekindle_qemu::adopt::{AdoptError, Adopted};
use rekindle_qemu::foreign::{self, Facts};
use rekindle_qemu::qmp::QmpError;
use rekindle_qemu::stopped::Stopped;
use rekindle_qemu::{devices, userfaultfd};
use rekindle_store::types;
use rekindle_store::{StoreError, Writer};
use rekindle_vm::fault;
use rekindle_vm::lock::RunState;
use rekindle_vm::timeline::host_us;
use serde_json::{Value, json};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub(crate) use plan::Plan;
use served::Served;
use take::Taken;
pub(crate) use take::{Read, Tell};

/// After so many checkpoints it is asked again where the guest's devices have their rings: it may have been rebooted.
const LOOK: u32 = 64;
/// How long QEMU may take to greet.
const GREETING: Duration = Duration::from_secs(5);

/// Why a session or a checkpoint failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    #[error(transparent)]
    Pause(#[from] PauseError),
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    #[error(transparent)]
    Track(#[from] TrackError),
    #[error(transparent)]
    Inject(#[from] InjectError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Adopt(#[from] AdoptError),
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A restore is still bringing its memory, and no checkpoint can be taken of it meanwhile.
    #[error("its memory is still being brought from a checkpoint: {why}")]
    Filling { why: String },
    #[error(transparent)]
    Fill(#[from] FillError),
    /// A disk that has a server did not do as it was asked.
    #[error(transparent)]
    Epoch(#[from] EpochError),
    /// A disk's server does not tell what it has written.
    #[error("what the server of a disk has written to the guest's memory is not known")]
    Served(#[from] ControlError),
    /// It has told something else.
    #[error("the server of a disk has written {bytes} bytes at {address:#x}, which are no RAM of this guest's")]
    Unknown { address: u64, bytes: u64 },
    /// QEMU does not hold what the guest sends.
    #[error("what the guest sends cannot be held until a checkpoint counts")]
    Hold(#[source] QmpError),
    /// The owner's command for the disks failed.
    #[error("the disk hook `{command}` failed: {why}")]
    Hook { command: String, why: String },
    /// A RAM block came, went or was resized.
    #[error("the guest has another shape: {0}")]
    Reshaped(String),
    /// A page that the guest was about to change could not be copied.
    #[error("a page could not be copied before the guest changed it")]
    Void(#[source] GuestRamError),
}

/// Pages copied because the guest wanted to write them.
#[derive(Debug, Default)]
struct Copies {
    pages: Vec<(usize, u64, Vec<u8>)>,
    failed: Option<GuestRamError>,
}

fn lock(copies: &Mutex<Copies>) -> MutexGuard<'_, Copies> {
    copies.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is known of the memory of a guest when its protection begins.
pub(crate) enum Begin {
    /// Nothing.
    Anew,
    /// What an earlier protector collected has all arrived, so its tracking may be gone on with.
    Resume,
    /// A restore still brings it, and its pager records what is written. `whole`: nothing of that record was collected without
    /// having arrived.
    Filling { held: Box<Held>, whole: bool },
}

enum Tracking {
    Asynchronous(Asynchronous),
    Filling(Box<Filling>),
    Synchronous(Synchronous, Arc<Mutex<Copies>>),
}

pub(crate) struct Session {
    pub(crate) target: Target,
    policy: Policy,
    /// The owner's command that snapshots disks.
    hook: Option<String>,
    epochs: Epochs,
    monitors: Monitors,
    ram: Arc<GuestRam>,
    tracking: Tracking,
    served: Served,
    /// What has been collected since the last commit.
    owed: Dirty,
    /// Everything is owed.
    full: bool,
    /// Whether tracking was found as an earlier protector left it.
    pub(crate) resumed: bool,
    buffer: Vec<u8>,
    /// When the guest was stopped for the checkpoint before.
    stopped_host_us: Option<u64>,
    /// A restore still fills.
    held: Option<Box<Held>>,
    foreign: Option<(Box<Adopted>, Facts)>,
    /// What a restore needs first, and for how many checkpoints it is still taken to be so.
    first: (Vec<first::Run>, u32),
    /// The device state of the checkpoint before.
    devices: Vec<u8>,
}

impl Session {
    /// Begin to track the memory of `target`.
    pub(crate) fn attach(target: Target, plan: Plan, begin: Begin) -> Result<Self, SessionError> {
        let Plan { policy, hook, control, gives_back, foreign } = plan;
        let save = target.vmm().save(GREETING)?;
        let mark = target.rundir().paused();
        let mut monitors = Monitors::new(target.process(), control, save, mark)?;
        let ram = GuestRam::of(monitors.control(), target.process())?;
        let ram = Arc::new(if gives_back { ram } else { ram.never_shrinking() });
        let injector = Injector::new(target.process())?;
        let copies = Arc::<Mutex<Copies>>::default();
        if !matches!(begin, Begin::Resume) || policy == Policy::Cow {
            tracker::close_leftovers(injector).map_err(TrackError::from)?;
        }
        // A QEMU of another user may not make a userfaultfd by itself.
        let device = userfaultfd::hand(monitors.control(), target.process())?;
        // From before the tracking begins, so that nothing is written in between.
        let served = Served::note(&target)?;
        let first = (first::of(monitors.control(), &ram), LOOK);
        let paused: Result<Paused<(Tracking, bool)>, SessionError> = monitors.pause(|stopped, laps| {
            let anew = |stopped: &mut Stopped<'_>| {
                let tracker = Asynchronous::attach(injector, Arc::clone(&ram), stopped, device)?;
                Ok::<_, SessionError>((Tracking::Asynchronous(tracker), false))
            };
            let attached = match (policy, &begin) {
                (Policy::Cow, _) => {
                    let before = before_write(Arc::clone(&copies));
                    let tracker = Synchronous::attach(injector, Arc::clone(&ram), stopped, before, device)?;
                    (Tracking::Synchronous(tracker, copies), false)
                }
                (_, Begin::Filling { whole, held }) => {
                    let chosen = |id: &str| held.fill.paged.iter().any(|paged| paged == id);
                    let why = "its pager keeps no record of what is written (Linux 6.7 or newer can)";
                    let found = Filling::attach(injector, Arc::clone(&ram), chosen, stopped, device)?;
                    let tracker = found.ok_or_else(|| SessionError::Filling { why: why.into() })?;
                    (Tracking::Filling(Box::new(tracker)), *whole)
                }
                (_, Begin::Resume) => match Asynchronous::resume(injector, Arc::clone(&ram), stopped)? {
                    Some(tracker) => (Tracking::Asynchronous(tracker), true),
                    None => {
                        tracker::close_leftovers(injector).map_err(TrackError::from)?;
                        anew(stopped)?
                    }
                },
                (_, Begin::Anew) => anew(stopped)?,
            };
            laps.steps.collect = laps.lap();
            Ok::<_, SessionError>(attached)
        });
        userfaultfd::take_back(monitors.control())?;
        let (mut tracking, resumed) = paused?.result;
        // What the servers wrote while nobody noted it may be anything.
        let resumed = resumed && served.went_on;
        let owed = match (&mut tracking, resumed) {
            (Tracking::Filling(tracker), true) => tracker.all_of_other_blocks()?,
            (Tracking::Filling(tracker), false) => tracker.everything()?,
            (_, true) => nothing(&ram),
            (_, false) => Dirty::everything(&ram)?,
        };
        Ok(Self {
            epochs: Epochs::of(&target),
            target,
            policy,
            hook,
            monitors,
            ram,
            tracking,
            served,
            owed,
            full: !resumed,
            resumed,
            buffer: Vec::new(),
            stopped_host_us: None,
            held: match begin {
                Begin::Filling { held, .. } => Some(held),
                Begin::Anew | Begin::Resume => None,
            },
            foreign,
            first,
            devices: Vec::new(),
        })
    }

    /// Whether a restore is still bringing its memory.
    pub(crate) fn is_filling(&self) -> bool {
        self.held.is_some()
    }

    /// The checkpoint that a restore is still bringing.
    pub(crate) fn restored(&self) -> Option<u64> {
        self.held.as_ref().map(|held| held.fill.number)
    }

    /// Whether the restore has brought everything, so that the next checkpoint ends its pager.
    pub(crate) fn may_take_over(&self) -> bool {
        self.held.as_ref().is_some_and(|held| held.is_filled())
    }

    /// From here on what the guest sends is held until the checkpoint that covers it counts; if not `wanted`, only if that was begun
    /// before. Gives whether it is.
    pub(crate) fn hold_output(&mut self, wanted: bool) -> Result<bool, SessionError> {
        let nets: Vec<_> = self.target.state().hardware.nets.iter().map(|net| net.id.as_str()).collect();
        self.monitors.hold(wanted.then_some(nets.as_slice())).map_err(SessionError::Hold)
    }

    /// Let out all that is held, and hold nothing more.
    pub(crate) fn let_output_out(&mut self) -> Result<(), SessionError> {
        self.monitors.let_out().map_err(SessionError::Hold)
    }

    /// What is copied when.
    pub(crate) fn policy(&self) -> Policy {
        self.policy
    }

    /// Bytes of all RAM blocks.
    pub(crate) fn ram_bytes(&self) -> u64 {
        self.ram.blocks().iter().map(|block| block.info.used).sum()
    }

    /// The RAM blocks as a store wants them.
    fn table(&self) -> Vec<types::Block> {
        let one = |block: &Block| types::Block {
            id: block.info.id.clone(),
            used: block.info.used,
            max: block.info.total,
            page_size: block.info.page_size,
        };
        self.ram.blocks().iter().map(one).collect()
    }

    /// Take one checkpoint and commit it.
    ///
    /// On failure what was collected is owed to the next one.
    pub(crate) fn checkpoint(&mut self, writer: &mut Writer, every: Duration) -> Result<Done, SessionError> {
        self.one(writer, every, Then::GoesOn, &mut |_| {})
    }

    /// Stop the guest, take the last checkpoint of it here and commit it. Once it is stopped it stays so, whatever comes of this: only
    /// who holds the run state may let it go on. What is told to `tell` is not committed yet, and may never be.
    pub(crate) fn last(
        &mut self,
        writer: &mut Writer,
        _held: &RunState,
        tell: &mut Tell<'_>,
    ) -> Result<Done, SessionError> {
        self.one(writer, Duration::ZERO, Then::Stays, tell)
    }

    fn one(
        &mut self,
        writer: &mut Writer,
        every: Duration,
        then: Then,
        tell: &mut Tell<'_>,
    ) -> Result<Done, SessionError> {
        let began = Instant::now();
        let filling = self.is_filling();
        let filled = self.may_take_over();
        if let Some(held) = &self.held {
            held.served()?;
        }
        let changes = self.ram.changes(self.monitors.control())?;
        if let Some(change) = changes.first() {
            return Err(SessionError::Reshaped(format!("{change:?}")));
        }
        self.epochs.begin()?;
        // A store that has never had a checkpoint holds zeroes everywhere.
        let fresh = writer.next_number() == 1;
        let mut checkpoint = writer.begin(&self.table())?;
        let taken = self.take(&mut checkpoint, fresh, filled, then, tell);
        let taken = match taken {
            Ok(taken) => taken,
            Err(e) => {
                self.give_up_flight();
                return Err(e);
            }
        };
        let Taken { paused, disks, dirty_bytes, copied_stopped_bytes, copied_for_writes } = taken;
        if let Some((adopted, facts)) = &self.foreign
            && foreign::facts(adopted, self.monitors.control())? != *facts
        {
            // It could not be restored: devices or disks are not those of the command line any more.
            return Err(SessionError::Reshaped("devices or disks have come, gone or changed".into()));
        }
        self.epochs.seal(&disks)?;
        let definition = serde_json::to_value(self.target.recipe()).unwrap_or(Value::Null);
        let metadata = json!({
            "policy": self.policy, "stopped_us": paused.resumed_host_us.saturating_sub(paused.stopped_host_us),
            "stopped_host_us": paused.stopped_host_us, "dirty_bytes": dirty_bytes, (first::KEY): self.first.0,
            (epochs::KEY): disks,
        });
        let committed = checkpoint.commit(&definition, &metadata, &paused.devices)?;
        let (now, took) = (host_us(), began.elapsed());
        let released_us = if self.monitors.holds() {
            fault::point("output.committed", None, None);
            self.monitors.release()?;
            Some(host_us().saturating_sub(paused.resumed_host_us))
        } else {
            None
        };
        if then == Then::GoesOn {
            self.epochs.committed(&disks);
            self.first.1 -= 1;
            if self.first.1 == 0 {
                self.first = (first::of(self.monitors.control(), &self.ram), LOOK);
            }
        }
        let full = std::mem::replace(&mut self.full, false);
        self.owed = nothing(&self.ram);
        self.devices = paused.devices;
        let interval = self.stopped_host_us.map(|at| paused.stopped_host_us.saturating_sub(at) / 1000);
        self.stopped_host_us = Some(paused.stopped_host_us);
        Ok(Done {
            number: committed.number,
            full,
            filling,
            stopped_host_us: paused.stopped_host_us,
            stopped_us: paused.resumed_host_us.saturating_sub(paused.stopped_host_us),
            interval_ms: interval,
            every_ms: every.as_millis() as u64,
            dirty_bytes,
            copied_stopped_bytes,
            copied_for_writes,
            pages_stored: committed.pages.stored,
            pages_zero: committed.pages.zero,
            pages_unchanged: committed.pages.unchanged,
            compressed_bytes: committed.pages.compressed,
            bytes: committed.bytes,
            released_us,
            devices_bytes: self.devices.len() as u64,
            commit_us: now.saturating_sub(paused.resumed_host_us),
            writing_us: committed.writing.as_micros() as u64,
            syncing_us: committed.syncing.as_micros() as u64,
            took_us: took.as_micros() as u64,
            steps: paused.steps,
        })
    }

    /// Leave no trace in QEMU.
    pub(crate) fn detach(mut self) -> Result<(), SessionError> {
        match self.tracking {
            Tracking::Asynchronous(tracker) => tracker.detach()?,
            Tracking::Filling(tracker) => tracker.detach()?,
            Tracking::Synchronous(tracker, _) => tracker.detach()?,
        }
        self.served.end();
        Ok(devices::sweep(self.monitors.control(), false)?)
    }
}

fn before_write(copies: Arc<Mutex<Copies>>) -> impl FnMut(&GuestRam, usize, Range<u64>) + Send + 'static {
    move |ram, index, page| {
        let Some(block) = ram.blocks().get(index) else { return };
        let mut bytes = Vec::new();
        match read(ram, block, std::slice::from_ref(&page), &mut bytes) {
            Ok(()) => lock(&copies).pages.push((index, page.start, bytes)),
            Err(e) => {
                lock(&copies).failed.get_or_insert(e);
            }
        }
    }
}
