//! A session of a protector with one QEMU: its monitors, its memory, and the record of which pages were written.

mod compare;
mod plan;
mod served;
mod take;

use crate::epochs::{self, EpochDisks, EpochError};
use crate::event::CheckpointReport;
use crate::filling::FillRecord;
use crate::load_pages;
use crate::pager::FillError;
use crate::pause::{AfterPause, Monitors, PauseError, Paused};
use crate::policy::Policy;
use crate::runs::no_pages;
use crate::target::{Target, TargetError};
use rekindle_disk::control::ControlError;
use rekindle_kernel::inject::{InjectError, Injector};
use rekindle_memory::ram::{Block, GuestRam, GuestRamError};
use rekindle_memory::tracker::{self, Asynchronous, Dirty, Filling, Synchronous, TrackError, Tracker};
use rekindle_pages::{BlockId, PageRun};
use rekindle_qemu::adopt::{AdoptError, Adopted};
use rekindle_qemu::foreign::{self, Facts};
use rekindle_qemu::qmp::QmpError;
use rekindle_qemu::stopped::Stopped;
use rekindle_qemu::{devices, userfaultfd};
use rekindle_store::types;
use rekindle_store::{StoreError, Writer};
use rekindle_vm::fault;
use rekindle_vm::lock::RunStateLock;
use rekindle_vm::timeline::host_us;
use serde_json::{Value, json};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub(crate) use plan::Plan;
use served::DiskServers;
use take::TakenPages;
pub(crate) use take::{OnStopped, StoppedGuest};

/// Number of checkpoints after which the guest's virtio rings are located again: the guest may have been rebooted.
const LOCATE_EVERY: u32 = 64;
/// How long QEMU may take to send its greeting.
const GREETING: Duration = Duration::from_secs(5);

/// Why a session or a checkpoint failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckpointError {
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
    #[error("its memory is still being loaded from a checkpoint: {why}")]
    Filling { why: String },
    #[error(transparent)]
    Fill(#[from] FillError),
    /// A disk server failed.
    #[error(transparent)]
    Epoch(#[from] EpochError),
    #[error("cannot determine which pages of the guest's memory a disk server has written")]
    DiskServer(#[from] ControlError),
    /// A disk server has reported an address outside of the guest's RAM.
    #[error("a disk server has written {bytes} bytes at {address:#x}, which is not in the guest's RAM")]
    Unknown { address: u64, bytes: u64 },
    #[error("the guest's network output cannot be held until a checkpoint is committed")]
    Hold(#[source] QmpError),
    /// The user's command for the disks failed.
    #[error("the disk hook `{command}` failed: {why}")]
    Hook { command: String, why: String },
    /// A RAM block was added, removed or resized.
    #[error("the guest's memory or devices have changed: {0}")]
    Reshaped(String),
    /// A page that the guest was about to write could not be copied.
    #[error("a page could not be copied before the guest changed it")]
    Void(#[source] GuestRamError),
}

/// Pages that were copied because the guest was about to write them.
#[derive(Debug, Default)]
struct Copies {
    pages: Vec<(BlockId, u64, Vec<u8>)>,
    failed: Option<GuestRamError>,
}

fn lock(copies: &Mutex<Copies>) -> MutexGuard<'_, Copies> {
    copies.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How tracking starts: it depends on how much of the guest's memory earlier checkpoints cover.
pub(crate) enum InitialTracking {
    /// No usable record exists: the next checkpoint contains all memory.
    Fresh,
    /// All pages that an earlier protector collected were committed, so its tracking can continue.
    Continue,
    /// A restore still fills the memory, and the pager records writes. `whole`: all pages that were collected from that
    /// record were committed.
    Filling { held: Box<FillRecord>, whole: bool },
}

enum Tracking {
    Asynchronous(Asynchronous),
    Filling(Box<Filling>),
    Synchronous(Synchronous, Arc<Mutex<Copies>>),
}

pub(crate) struct TrackingSession {
    pub(crate) target: Target,
    policy: Policy,
    /// The user's command that snapshots disks.
    hook: Option<String>,
    epochs: EpochDisks,
    monitors: Monitors,
    ram: Arc<GuestRam>,
    tracking: Tracking,
    served: DiskServers,
    /// Pages that were collected since the last commit: the next checkpoint must contain them.
    owed: Dirty,
    /// All of the memory is owed.
    full: bool,
    /// The tracking of an earlier protector continues.
    pub(crate) resumed: bool,
    buffer: Vec<u8>,
    /// When the guest was stopped for the previous checkpoint, in µs since 1970.
    stopped_host_us: Option<u64>,
    /// Set while a restore fills.
    held: Option<Box<FillRecord>>,
    foreign: Option<(Box<Adopted>, Facts)>,
    /// The pages that a load needs, and the number of checkpoints for which this list stays valid.
    first: (Vec<PageRun>, u32),
    /// The device state of the previous checkpoint.
    devices: Vec<u8>,
}

impl TrackingSession {
    /// Starts to track the memory of `target`.
    pub(crate) fn attach(target: Target, plan: Plan, begin: InitialTracking) -> Result<Self, CheckpointError> {
        let Plan { policy, hook, control, gives_back, foreign } = plan;
        let save = target.vmm().save(GREETING)?;
        let mark = target.rundir().paused();
        let mut monitors = Monitors::new(target.process(), control, save, mark)?;
        let ram = GuestRam::of(monitors.control(), target.process())?;
        let ram = Arc::new(if gives_back { ram } else { ram.never_shrinking() });
        let injector = Injector::new(target.process())?;
        let copies = Arc::<Mutex<Copies>>::default();
        if !matches!(begin, InitialTracking::Continue) || policy == Policy::Cow {
            tracker::close_leftovers(injector).map_err(TrackError::from)?;
        }
        // A QEMU that runs as another user may not be permitted to create a userfaultfd itself.
        let device = userfaultfd::hand(monitors.control(), target.process())?;
        // Must precede the tracking, so that no write is missed in between.
        let served = DiskServers::start(&target)?;
        let first = (load_pages::locate(monitors.control(), &ram), LOCATE_EVERY);
        let paused: Result<Paused<(Tracking, bool)>, CheckpointError> = monitors.pause(|stopped, laps| {
            let fresh_tracking = |stopped: &mut Stopped<'_>| {
                let tracker = Asynchronous::attach(injector, Arc::clone(&ram), stopped, device)?;
                Ok::<_, CheckpointError>((Tracking::Asynchronous(tracker), false))
            };
            let attached = match (policy, &begin) {
                (Policy::Cow, _) => {
                    let before = before_write(Arc::clone(&copies));
                    let tracker = Synchronous::attach(injector, Arc::clone(&ram), stopped, before, device)?;
                    (Tracking::Synchronous(tracker, copies), false)
                }
                (_, InitialTracking::Filling { whole, held }) => {
                    let chosen = |id: &str| held.fill.paged.iter().any(|paged| paged == id);
                    let why = "its pager keeps no record of what is written (Linux 6.7 or newer can)";
                    let found = Filling::attach(injector, Arc::clone(&ram), chosen, stopped, device)?;
                    let tracker = found.ok_or_else(|| CheckpointError::Filling { why: why.into() })?;
                    (Tracking::Filling(Box::new(tracker)), *whole)
                }
                (_, InitialTracking::Continue) => match Asynchronous::resume(injector, Arc::clone(&ram), stopped)? {
                    Some(tracker) => (Tracking::Asynchronous(tracker), true),
                    None => {
                        tracker::close_leftovers(injector).map_err(TrackError::from)?;
                        fresh_tracking(stopped)?
                    }
                },
                (_, InitialTracking::Fresh) => fresh_tracking(stopped)?,
            };
            laps.steps.collect = laps.lap();
            Ok::<_, CheckpointError>(attached)
        });
        userfaultfd::take_back(monitors.control())?;
        let (mut tracking, resumed) = paused?.result;
        // Unrecorded writes of the disk servers may be in any page.
        let resumed = resumed && served.complete;
        let owed = match (&mut tracking, resumed) {
            (Tracking::Filling(tracker), true) => tracker.all_of_other_blocks()?,
            (Tracking::Filling(tracker), false) => tracker.everything()?,
            (_, true) => no_pages(&ram),
            (_, false) => Dirty::everything(&ram)?,
        };
        Ok(Self {
            epochs: EpochDisks::of(&target),
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
                InitialTracking::Filling { held, .. } => Some(held),
                InitialTracking::Fresh | InitialTracking::Continue => None,
            },
            foreign,
            first,
            devices: Vec::new(),
        })
    }

    /// Returns whether a restore still fills the memory.
    pub(crate) fn is_filling(&self) -> bool {
        self.held.is_some()
    }

    /// Returns the number of the checkpoint that a restore still loads.
    pub(crate) fn restored(&self) -> Option<u64> {
        self.held.as_ref().map(|held| held.fill.number)
    }

    /// Returns whether the fill is complete, so that the next checkpoint ends the pager.
    pub(crate) fn is_filled(&self) -> bool {
        self.held.as_ref().is_some_and(|held| held.is_filled())
    }

    /// Holds the guest's network output until the checkpoint that covers it is committed. If not `wanted`, holds output
    /// only if an earlier protector has started to. Returns whether output is held.
    pub(crate) fn hold_output(&mut self, wanted: bool) -> Result<bool, CheckpointError> {
        let nets: Vec<_> = self.target.state().hardware.nets.iter().map(|net| net.id.as_str()).collect();
        self.monitors.hold(wanted.then_some(nets.as_slice())).map_err(CheckpointError::Hold)
    }

    /// Releases all held output and stops holding it.
    pub(crate) fn end_hold(&mut self) -> Result<(), CheckpointError> {
        self.monitors.end_hold().map_err(CheckpointError::Hold)
    }

    pub(crate) fn policy(&self) -> Policy {
        self.policy
    }

    /// Returns the total size of the RAM blocks in bytes.
    pub(crate) fn ram_bytes(&self) -> u64 {
        self.ram.blocks().iter().map(|block| block.info.used).sum()
    }

    /// Returns the RAM block table in the store's types.
    fn table(&self) -> Vec<types::Block> {
        let entry = |block: &Block| types::Block {
            id: block.info.id.clone(),
            used: block.info.used,
            max: block.info.total,
            page_size: block.info.page_size,
        };
        self.ram.blocks().iter().map(entry).collect()
    }

    /// Takes one checkpoint and commits it.
    ///
    /// After a failure, the collected pages are owed to the next checkpoint.
    pub(crate) fn checkpoint(
        &mut self,
        writer: &mut Writer,
        every: Duration,
    ) -> Result<CheckpointReport, CheckpointError> {
        self.take_one(writer, every, AfterPause::Resume, &mut |_| {})
    }

    /// Stops the guest, takes its last checkpoint on this host and commits it. Once the guest is stopped it stays
    /// stopped, even after a failure: only the holder of the run state may resume it. `on_stopped` gets the guest's
    /// state before it is committed. The commit may fail.
    pub(crate) fn last(
        &mut self,
        writer: &mut Writer,
        _held: &RunStateLock,
        on_stopped: &mut OnStopped<'_>,
    ) -> Result<CheckpointReport, CheckpointError> {
        self.take_one(writer, Duration::ZERO, AfterPause::StayStopped, on_stopped)
    }

    fn take_one(
        &mut self,
        writer: &mut Writer,
        every: Duration,
        then: AfterPause,
        on_stopped: &mut OnStopped<'_>,
    ) -> Result<CheckpointReport, CheckpointError> {
        let began = Instant::now();
        let filling = self.is_filling();
        let filled = self.is_filled();
        if let Some(held) = &self.held {
            held.require_pager()?;
        }
        let changes = self.ram.changes(self.monitors.control())?;
        if let Some(change) = changes.first() {
            return Err(CheckpointError::Reshaped(format!("{change:?}")));
        }
        self.epochs.begin()?;
        // A store that has never had a checkpoint holds zeroes everywhere.
        let fresh = writer.next_number() == 1;
        let mut checkpoint = writer.begin(&self.table())?;
        let taken = self.take(&mut checkpoint, fresh, filled, then, on_stopped);
        let taken = match taken {
            Ok(taken) => taken,
            Err(e) => {
                self.abandon_flight();
                return Err(e);
            }
        };
        let TakenPages { paused, disks, dirty_bytes, copied_stopped_bytes, copied_for_writes } = taken;
        if let Some((adopted, facts)) = &self.foreign
            && foreign::facts(adopted, self.monitors.control())? != *facts
        {
            // The checkpoint could not be restored: the guest's devices or disks differ from the recorded command line.
            return Err(CheckpointError::Reshaped("devices or disks were added, removed or changed".into()));
        }
        self.epochs.seal(&disks)?;
        let definition = serde_json::to_value(self.target.recipe()).unwrap_or(Value::Null);
        let metadata = json!({
            "policy": self.policy, "stopped_us": paused.resumed_host_us.saturating_sub(paused.stopped_host_us),
            "stopped_host_us": paused.stopped_host_us, "dirty_bytes": dirty_bytes, (load_pages::KEY): self.first.0,
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
        if then == AfterPause::Resume {
            self.epochs.committed(&disks);
            self.first.1 -= 1;
            if self.first.1 == 0 {
                self.first = (load_pages::locate(self.monitors.control(), &self.ram), LOCATE_EVERY);
            }
        }
        let full = std::mem::replace(&mut self.full, false);
        self.owed = no_pages(&self.ram);
        self.devices = paused.devices;
        let interval = self.stopped_host_us.map(|at| paused.stopped_host_us.saturating_sub(at) / 1000);
        self.stopped_host_us = Some(paused.stopped_host_us);
        Ok(CheckpointReport {
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

    /// Removes all traces of the tracking from QEMU.
    pub(crate) fn detach(mut self) -> Result<(), CheckpointError> {
        match self.tracking {
            Tracking::Asynchronous(tracker) => tracker.detach()?,
            Tracking::Filling(tracker) => tracker.detach()?,
            Tracking::Synchronous(tracker, _) => tracker.detach()?,
        }
        self.served.end();
        Ok(devices::sweep(self.monitors.control(), false)?)
    }
}

fn before_write(copies: Arc<Mutex<Copies>>) -> impl FnMut(&GuestRam, BlockId, Range<u64>) + Send + 'static {
    move |ram, id, page| {
        let Some(block) = ram.block(id) else { return };
        let mut bytes = vec![0; (page.end - page.start) as usize];
        match ram.read(block, std::slice::from_ref(&page), &mut bytes) {
            Ok(()) => lock(&copies).pages.push((id, page.start, bytes)),
            Err(e) => {
                lock(&copies).failed.get_or_insert(e);
            }
        }
    }
}
