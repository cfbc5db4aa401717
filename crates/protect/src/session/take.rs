//! Takes the pages of one checkpoint before, during and after the pause.

use super::{CheckpointError, Copies, Tracking, TrackingSession, lock};
use crate::epochs::DiskEpoch;
use crate::pause::{AfterPause, LapTimer, Paused};
use crate::policy::Policy;
use crate::runs::{BATCH, Runs, copy_all, merged, read, send, send_from, send_zeroes};
use rekindle_memory::ram::{GuestRam, GuestRamError};
use rekindle_memory::tracker::{Dirty, Synchronous, TrackError, Tracker};
use rekindle_pages::{BlockId, PAGE_SIZE, PageNo, PageRun, PageRuns};
use rekindle_qemu::stopped::Stopped;
use rekindle_store::Checkpoint;
use rekindle_vm::fault;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of pre-copy passes over dirty pages before the guest is stopped.
const PASSES: u32 = 3;
/// Pre-copy ends when a pass collects fewer dirty bytes than this: copying as many while the guest is stopped takes
/// less than a millisecond.
const FEW_BYTES: u64 = 1 << 20;

/// The result of taking and sending a checkpoint's pages.
pub(super) struct TakenPages {
    pub paused: Paused<()>,
    /// The epochs of the guest's disks.
    pub disks: Vec<DiskEpoch>,
    pub dirty_bytes: u64,
    pub copied_stopped_bytes: u64,
    pub copied_for_writes: u64,
}

/// A guest that stays stopped, and its changes since the previous checkpoint.
pub(crate) struct StoppedGuest<'a> {
    /// The number of the checkpoint that will contain this state.
    pub(crate) number: u64,
    pub(crate) devices: &'a [u8],
    /// The device state of the previous checkpoint.
    pub(crate) devices_before: &'a [u8],
    /// The epochs of the guest's disks.
    pub(crate) disks: &'a [DiskEpoch],
    ram: &'a GuestRam,
    changed: &'a Dirty,
}

/// A function that is called when the guest is stopped and its state was read, before the commit.
pub(crate) type OnStopped<'a> = dyn FnMut(&StoppedGuest<'_>) + 'a;

impl StoppedGuest<'_> {
    /// Returns those of the pages `among` that have changed, and their content in the same order.
    pub(crate) fn changed(&self, among: &[PageRun]) -> Result<(Vec<PageRun>, Vec<u8>), GuestRamError> {
        let (mut changed, mut content) = (Vec::new(), Vec::new());
        for (index, block) in self.ram.blocks().iter().enumerate() {
            let mut wanted = PageRuns::new();
            for run in among.iter().filter(|run| run.block() == BlockId(index)) {
                wanted = wanted.union(std::slice::from_ref(&run.offsets()));
            }
            let both = |runs: &Runs| runs.get(index).map_or_else(PageRuns::new, |runs| runs.intersection(&wanted));
            let (written, zero) = (both(&self.changed.written), both(&self.changed.zero));
            let numbers =
                written.iter().chain(&zero).map(|run| PageNo::containing(run.start)..PageNo::containing(run.end));
            changed.extend(numbers.map(|pages| PageRun::new(BlockId(index), pages)));
            let mut bytes = Vec::new();
            read(self.ram, block, &written, &mut bytes)?;
            bytes.resize(bytes.len() + zero.bytes() as usize, 0);
            content.append(&mut bytes);
        }
        Ok((changed, content))
    }
}

impl TrackingSession {
    /// Takes a checkpoint except for its commit. `filled`: a restore has loaded all pages, and its pager is to end. For
    /// a guest that stays stopped, the caller holds the run state.
    pub(super) fn take(
        &mut self,
        checkpoint: &mut Checkpoint<'_>,
        fresh: bool,
        filled: bool,
        then: AfterPause,
        on_stopped: &mut OnStopped<'_>,
    ) -> Result<TakenPages, CheckpointError> {
        let mut sent = 0;
        if self.policy != Policy::Cow && (self.full || self.policy == Policy::Precopy) {
            sent = self.send_ahead(checkpoint, fresh)?;
        }
        let run_state = match then {
            AfterPause::Resume => Some(self.target.hold_run_state()?),
            AfterPause::StayStopped => None,
        };
        let (ram, owed) = (Arc::clone(&self.ram), &mut self.owed);
        let (hook, name, number) = (self.hook.as_deref(), self.target.name(), checkpoint.number());
        let ahead = sent > 0;
        let (tracking, served, epochs) = (&mut self.tracking, &mut self.served, &mut self.epochs);
        let mut disks = Vec::new();
        let paused = self.monitors.pause_then(then, |stopped, laps: &mut LapTimer| {
            disks = epochs.mark()?;
            if let Some(command) = hook {
                run_hook(command, name, number)?;
            }
            let mut next = None;
            let dirty = match tracking {
                Tracking::Asynchronous(tracker) => tracker.collect(stopped)?,
                Tracking::Filling(tracker) if filled => {
                    fault::point("fill.handover.stopped", None, None);
                    let (dirty, tracker) = tracker.hand_over(stopped, None)?;
                    fault::point("fill.handover.tracked", None, None);
                    next = Some(tracker);
                    dirty
                }
                Tracking::Filling(tracker) => {
                    let dirty = tracker.collect(stopped)?;
                    fault::point("fill.checkpoint.collected", None, None);
                    dirty
                }
                Tracking::Synchronous(tracker, _) => {
                    let dirty = tracker.collect(stopped)?;
                    *owed = merged(owed, &dirty);
                    laps.steps.collect = laps.lap();
                    tracker.begin(&owed.written, stopped)?;
                    laps.steps.copy = laps.lap();
                    return Ok::<_, CheckpointError>((owed.clone(), Vec::new(), None));
                }
            };
            if served.any() {
                // Collected pages stay owed even if a disk server fails.
                *owed = merged(owed, &dirty);
            }
            let dirty = served.with(dirty, &ram)?;
            laps.steps.collect = laps.lap();
            // Pages that were sent before the pause have not changed since, or they are in `dirty`.
            let copy = if ahead { dirty.clone() } else { merged(owed, &dirty) };
            *owed = merged(owed, &dirty);
            let copied = copy_all(&ram, &copy.written)?;
            laps.steps.copy = laps.lap();
            Ok((copy, copied, next))
        })?;
        drop(run_state);
        let Paused { result: (dirty, copied, next), devices, stopped_host_us, resumed_host_us, steps } = paused;
        if let Some(tracker) = next {
            self.tracking = Tracking::Asynchronous(tracker);
            fault::point("fill.handover.resumed", None, None);
            self.held.take().map_or(Ok(()), |held| held.hand_over())?;
            fault::point("fill.handover.recorded", None, None);
        }
        if then == AfterPause::StayStopped {
            let (devices_before, ram, changed) = (&self.devices, &self.ram, &self.owed);
            on_stopped(&StoppedGuest { number, devices: &devices, devices_before, disks: &disks, ram, changed });
        }
        let copied_stopped_bytes = copied.iter().map(|part| part.bytes.len() as u64).sum();
        for part in &copied {
            send(checkpoint, part.block, &part.runs, &part.bytes)?;
        }
        let mut copied_for_writes = 0;
        if let Tracking::Synchronous(tracker, copies) = &self.tracking {
            while let Some(claim) = tracker.claim(BATCH) {
                let Some(block) = self.ram.block(claim.block) else { continue };
                read(&self.ram, block, &claim.runs, &mut self.buffer)?;
                let (number, runs) = (claim.block, claim.runs.clone());
                // From here on the guest may write the claimed pages.
                drop(claim);
                send(checkpoint, number, &runs, &self.buffer)?;
            }
            tracker.check_all_copied().or_else(|_| wait_landed(tracker))?;
            let copies = std::mem::take(&mut *lock(copies));
            if let Some(e) = copies.failed {
                return Err(CheckpointError::Void(e));
            }
            copied_for_writes = copies.pages.len() as u64;
            for (block, at, bytes) in &copies.pages {
                let numbers = (PageNo::containing(*at).0..).map(PageNo);
                checkpoint.pages(*block, numbers.zip(bytes.as_chunks::<PAGE_SIZE>().0))?;
            }
        }
        // The first `cow` checkpoint of a store has sent no page yet that could be zero now.
        if !(fresh && self.full && self.policy == Policy::Cow) {
            send_zeroes(checkpoint, &dirty.zero)?;
        }
        let paused = Paused { result: (), devices, stopped_host_us, resumed_host_us, steps };
        let dirty_bytes = if self.policy == Policy::Cow { dirty.bytes() } else { sent.max(dirty.bytes()) };
        Ok(TakenPages { paused, disks, dirty_bytes, copied_stopped_bytes, copied_for_writes })
    }

    /// Sends dirty pages while the guest runs, until few are left. Returns the number of sent bytes plus 1, or 0 if the
    /// tracking does not allow this.
    fn send_ahead(&mut self, checkpoint: &mut Checkpoint<'_>, fresh: bool) -> Result<u64, CheckpointError> {
        if matches!(self.tracking, Tracking::Synchronous(..)) {
            return Ok(0);
        }
        let mut sent = 1;
        let mut now = self.owed.clone();
        for pass in 0..PASSES {
            sent += self.send_dirty(checkpoint, &now, fresh)?;
            if self.policy != Policy::Precopy || pass + 1 == PASSES {
                break;
            }
            // Correct only because QEMU does no I/O past its page tables: `docs/protect.md`.
            let mut running = Stopped::vouched();
            now = match &mut self.tracking {
                Tracking::Asynchronous(tracker) => tracker.collect(&mut running)?,
                Tracking::Filling(tracker) => tracker.collect(&mut running)?,
                Tracking::Synchronous(..) => break,
            };
            if self.served.any() {
                self.owed = merged(&self.owed, &now);
            }
            now = self.served.with(now, &self.ram)?;
            self.owed = merged(&self.owed, &now);
            if now.bytes() < FEW_BYTES {
                // These few pages were collected, so they count as unwritten now and must be sent.
                sent += self.send_dirty(checkpoint, &now, fresh)?;
                break;
            }
        }
        Ok(sent)
    }

    /// Sends dirty pages from the guest's memory. Returns their size in bytes.
    fn send_dirty(&self, checkpoint: &mut Checkpoint<'_>, dirty: &Dirty, fresh: bool) -> Result<u64, CheckpointError> {
        for ((index, block), runs) in self.ram.blocks().iter().enumerate().zip(&dirty.written) {
            send_from(checkpoint, BlockId(index), runs, &self.ram, block)?;
        }
        if !fresh {
            send_zeroes(checkpoint, &dirty.zero)?;
        }
        Ok(dirty.bytes())
    }

    /// Releases all blocked writers after a failure. Their pages stay owed.
    pub(super) fn abandon_flight(&mut self) {
        if let Tracking::Synchronous(tracker, copies) = &self.tracking {
            while let Some(claim) = tracker.claim(u64::MAX) {
                drop(claim);
            }
            let _ = wait_landed(tracker);
            *lock(copies) = Copies::default();
        }
    }
}

/// Waits until no fault is in flight: a fault that is being served counts as in flight for some microseconds after the
/// last claim.
fn wait_landed(tracker: &Synchronous) -> Result<(), TrackError> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match tracker.check_all_copied() {
            Err(TrackError::InFlight { .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_micros(50));
            }
            other => return other,
        }
    }
}

/// Runs the user's command that snapshots disks while the guest is stopped.
fn run_hook(command: &str, name: &str, checkpoint: u64) -> Result<(), CheckpointError> {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).env("REKINDLE_VM", name).env("REKINDLE_CHECKPOINT", checkpoint.to_string());
    let failed = |why| CheckpointError::Hook { command: command.into(), why };
    let output = shell.stdin(Stdio::null()).output().map_err(|e| failed(e.to_string()))?;
    let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(failed(format!("{}; it printed: {stderr}", output.status))) }
}
