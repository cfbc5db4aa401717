//! Takes and sends the pages of one checkpoint: before the pause, in it, and after it.
//!
//! | policy | before the pause | in the pause | after it |
//! |---|---|---|---|
//! | `basic` | only for a full checkpoint: all pages | copy the dirty pages | send the copies |
//! | `precopy` | send dirty pages until few are left | copy the pages written meanwhile | send the copies |
//! | `cow` | | protect the dirty pages | copy and send each before the guest changes it |

use super::memory::{CollectOptions, CollectedPages};
use super::tracking::Tracking;
use super::{TrackingSession, cow};
use crate::epochs::DiskEpoch;
use crate::error::CheckpointError;
use crate::pause::{AfterPause, PauseKind, Paused};
use crate::policy::Policy;
use crate::runs::{BlockRuns, read, runs_of_block, send, send_zeroes};
use rekindle_handover::written_disks;
use rekindle_memory::ram::{GuestRam, GuestRamError};
use rekindle_memory::tracker::{Asynchronous, Dirty};
use rekindle_pages::{BlockId, PageNo, PageRun, PageRuns};
use rekindle_qemu::stopped::Stopped;
use rekindle_qemu::userfaultfd;
use rekindle_store::Checkpoint;
use rekindle_vm::fault;
use rekindle_vm::overlays::OverlayEpoch;
use std::process::{Command, Stdio};

/// Maximum number of pre-copy passes over dirty pages before the guest is stopped.
const MAX_PRECOPY_PASSES: u32 = 3;
/// Pre-copy ends when a pass collects fewer dirty bytes than this: copying as many while the guest is stopped takes
/// less than a millisecond.
const FEW_DIRTY_BYTES: u64 = 1 << 20;

/// The kind of checkpoint to take.
#[derive(Debug, Clone, Copy)]
pub(super) struct TakeOptions {
    /// The store has never had a checkpoint, so it holds zeroes everywhere.
    pub store_is_empty: bool,
    /// A restore has loaded all pages, and its pager is to end.
    pub end_pager: bool,
    pub after_pause: AfterPause,
}

/// The result of taking and sending a checkpoint's pages.
pub(super) struct TakenPages {
    pub paused: Paused<()>,
    /// The epochs of the guest's disks.
    pub disks: Vec<DiskEpoch>,
    /// The disks on overlays.
    pub overlays: Vec<OverlayEpoch>,
    pub dirty_bytes: u64,
    pub copied_stopped_bytes: u64,
    pub copied_for_writes: u64,
}

/// A guest that stays stopped, and its changes since the previous checkpoint.
pub(crate) struct StoppedGuest<'a> {
    /// The number of the checkpoint that will contain this state.
    pub(crate) number: u64,
    /// The device state.
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

/// Pages with their content, in the same order.
pub(crate) struct ChangedPages {
    pub(crate) pages: Vec<PageRun>,
    pub(crate) content: Vec<u8>,
}

impl StoppedGuest<'_> {
    /// Returns those of the `wanted` pages that have changed.
    pub(crate) fn changed_pages(&self, wanted: &[PageRun]) -> Result<ChangedPages, GuestRamError> {
        let mut changed = ChangedPages { pages: Vec::new(), content: Vec::new() };
        for (index, block) in self.ram.blocks().iter().enumerate() {
            let id = BlockId(index);
            let mut wanted_runs = PageRuns::new();
            for run in wanted.iter().filter(|run| run.block() == id) {
                wanted_runs = wanted_runs.union(std::slice::from_ref(&run.offsets()));
            }
            let wanted_of = |runs: &BlockRuns| runs_of_block(runs, index).intersection(&wanted_runs);
            let (written, zero) = (wanted_of(&self.changed.written), wanted_of(&self.changed.zero));
            for run in written.iter().chain(&zero) {
                let pages = PageNo::containing(run.start)..PageNo::containing(run.end);
                changed.pages.push(PageRun::new(id, pages));
            }
            let mut content = Vec::new();
            read(self.ram, block, &written, &mut content)?;
            content.resize(content.len() + zero.bytes() as usize, 0);
            changed.content.append(&mut content);
        }
        Ok(changed)
    }
}

impl TrackingSession {
    /// Takes a checkpoint except for its commit. For a guest that stays stopped, the caller holds the run state.
    pub(super) fn take(
        &mut self,
        checkpoint: &mut Checkpoint<'_>,
        options: TakeOptions,
        on_stopped: &mut OnStopped<'_>,
    ) -> Result<TakenPages, CheckpointError> {
        let TakeOptions { store_is_empty, end_pager, after_pause } = options;
        let is_cow = self.policy == Policy::Cow;
        let sends_while_running = self.policy == Policy::Precopy || (self.memory.is_all_owed() && !is_cow);
        let sent_bytes = match sends_while_running {
            true => Some(self.send_while_running(checkpoint, store_is_empty)?),
            false => None,
        };
        written_disks::write_back(self.target.process());
        if let Some(disks) = self.overlays.as_mut().filter(|disks| disks.are_put_early()) {
            self.monitors.check_running()?;
            disks.put_early(self.monitors.control())?;
            // The overlays are new, and little was written meanwhile.
            written_disks::write_back(self.target.process());
        }
        // After the last collection while the guest runs.
        self.memory.tracking.prepare()?;
        let run_state = match after_pause {
            AfterPause::Resume => Some(self.target.hold_run_state()?),
            AfterPause::StayStopped => None,
        };
        let (number, mut disks) = (checkpoint.number(), Vec::new());
        let device = match end_pager {
            true => userfaultfd::hand(self.monitors.control(), self.target.process())?,
            false => None,
        };
        let collect_options = CollectOptions { were_sent: sent_bytes.is_some(), end_pager, device };
        let mut overlays = Vec::new();
        let has_overlays = self.overlays.is_some();
        let mark_overlays = |stopped: &mut Stopped<'_>| {
            if let Some(disks) = &mut self.overlays {
                overlays = disks.mark(stopped)?;
            }
            Ok(())
        };
        // The user's command may use libvirt or another monitor.
        let kind = match after_pause {
            AfterPause::Resume if !has_overlays && self.disk_hook.is_none() => PauseKind::WithoutMonitor,
            after => PauseKind::WithMonitor(after),
        };
        let paused = self.monitors.pause_as(kind, mark_overlays, |stopped, laps| {
            disks = self.epochs.mark()?;
            if let Some(command) = &self.disk_hook {
                run_disk_hook(command, self.target.name(), number)?;
            }
            self.memory.collect_stopped(collect_options, stopped, laps)
        });
        drop(run_state);
        let taken_back = if end_pager { userfaultfd::take_back(self.monitors.control()) } else { Ok(()) };
        let paused = paused?;
        taken_back?;
        let Paused { result: collected, devices, stopped_host_us, resumed_host_us, steps } = paused;
        let CollectedPages { dirty, copied, own_tracker } = collected;
        if let Some(tracker) = own_tracker {
            self.continue_without_pager(tracker)?;
        }
        if let Some(disks) = &self.overlays {
            disks.check_marked(self.monitors.control(), &overlays)?;
        }
        if after_pause == AfterPause::StayStopped {
            on_stopped(&StoppedGuest {
                number,
                devices: &devices,
                devices_before: &self.previous_devices,
                disks: &disks,
                ram: &self.memory.ram,
                changed: self.memory.owed(),
            });
        }
        let copied_stopped_bytes = copied.iter().map(|pages| pages.bytes.len() as u64).sum();
        for pages in &copied {
            send(checkpoint, pages.block, &pages.runs, &pages.bytes)?;
        }
        let copied_for_writes = match &self.memory.tracking {
            Tracking::Synchronous { tracker, copies } => {
                cow::send_protected_pages(tracker, copies, &self.memory.ram, checkpoint, &mut self.buffer)?
            }
            Tracking::Asynchronous(_) | Tracking::Filling(_) => 0,
        };
        // The first `cow` checkpoint of a store has sent no page yet that could be zero now.
        if !(is_cow && store_is_empty && self.memory.is_all_owed()) {
            send_zeroes(checkpoint, &dirty.zero)?;
        }
        let paused = Paused { result: (), devices, stopped_host_us, resumed_host_us, steps };
        let dirty_bytes = sent_bytes.unwrap_or(0).max(dirty.bytes());
        Ok(TakenPages { paused, disks, overlays, dirty_bytes, copied_stopped_bytes, copied_for_writes })
    }

    /// Tracks the memory with `tracker` from now on, and records that the pager may end.
    fn continue_without_pager(&mut self, tracker: Asynchronous) -> Result<(), CheckpointError> {
        self.memory.tracking = Tracking::Asynchronous(tracker);
        fault::point("fill.handover.resumed", None, None);
        self.pager_record.take().map_or(Ok(()), |record| record.hand_over())?;
        fault::point("fill.handover.recorded", None, None);
        Ok(())
    }

    /// Sends the owed pages while the guest runs; with policy `precopy`, repeats this with the pages that the guest has
    /// written meanwhile, until few are left. Returns the number of sent bytes.
    fn send_while_running(
        &mut self,
        checkpoint: &mut Checkpoint<'_>,
        store_is_empty: bool,
    ) -> Result<u64, CheckpointError> {
        let mut sent_bytes = 0;
        let mut dirty = self.memory.owed().clone();
        for pass in 1..=MAX_PRECOPY_PASSES {
            sent_bytes += self.memory.send(checkpoint, &dirty, store_is_empty)?;
            if self.policy != Policy::Precopy || pass == MAX_PRECOPY_PASSES {
                break;
            }
            // Correct only because QEMU does no I/O past its page tables: `docs/protect.md`.
            dirty = self.memory.collect(&mut Stopped::vouched())?;
            if dirty.bytes() < FEW_DIRTY_BYTES {
                // These few pages were collected, so they count as unwritten now and must be sent.
                sent_bytes += self.memory.send(checkpoint, &dirty, store_is_empty)?;
                break;
            }
        }
        Ok(sent_bytes)
    }
}

/// Runs the user's command that snapshots disks while the guest is stopped.
fn run_disk_hook(command: &str, vm: &str, checkpoint: u64) -> Result<(), CheckpointError> {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).env("REKINDLE_VM", vm).env("REKINDLE_CHECKPOINT", checkpoint.to_string());
    let failed = |why| CheckpointError::DiskHook { command: command.into(), why };
    let output = shell.stdin(Stdio::null()).output().map_err(|e| failed(e.to_string()))?;
    let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(failed(format!("{}; it printed: {stderr}", output.status))) }
}
