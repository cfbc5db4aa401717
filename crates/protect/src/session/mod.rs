//! A session of a protector with one QEMU: its monitors, its memory, and the record of which pages were written.
//!
//! | module | contents |
//! |---|---|
//! | `tracking` | the tracker that records writes |
//! | `disk_servers` | the writes of disk servers, which the tracker does not see |
//! | `memory` | the guest's memory, and which of its pages the next checkpoint must contain |
//! | `take` | takes and sends the pages of a checkpoint |
//! | `cow` | policy `cow`: copies pages after the guest has resumed |
//! | `compare` | compares the guest's memory with a checkpoint |

mod compare;
mod cow;
mod disk_servers;
mod memory;
mod take;
mod tracking;

use crate::epochs::{self, DiskEpoch, EpochDisks};
use crate::error::CheckpointError;
use crate::event::CheckpointReport;
use crate::load_pages::{self, LoadPageList};
use crate::pause::{AfterPause, Monitors, PauseMarks, Paused};
use crate::plan::{AttachedDevices, ProtectionPlan};
use crate::policy::Policy;
use crate::recipe::{self, Recipe};
use crate::runs::block_table;
use crate::target::Target;
use crate::write_record::LockedWriteRecord;
use disk_servers::DiskServers;
use memory::TrackedMemory;
use rekindle_kernel::inject::Injector;
use rekindle_memory::ram::GuestRam;
use rekindle_memory::tracker::{self, TrackError};
use rekindle_qemu::devices::{DescriptorSets, remove_descriptor_sets};
use rekindle_qemu::userfaultfd;
use rekindle_store::Writer;
use rekindle_vm::fault;
use rekindle_vm::lock::RunStateLock;
use rekindle_vm::overlays::{OverlayDisks, OverlayEpoch};
use rekindle_vm::timeline::host_us;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use take::{TakeOptions, TakenPages};
use tracking::Tracking;

pub(crate) use take::{OnStopped, StoppedGuest};
pub(crate) use tracking::InitialTracking;

/// A QEMU whose guest's writes are tracked, so that checkpoints of it can be taken.
pub(crate) struct TrackingSession {
    pub(crate) target: Target,
    policy: Policy,
    /// The user's command that snapshots disks.
    disk_hook: Option<String>,
    epochs: EpochDisks,
    /// The disks that QEMU itself serves, if they take part.
    overlays: Option<OverlayDisks>,
    monitors: Monitors,
    memory: TrackedMemory,
    /// Buffer for the content of pages, reused by all checkpoints.
    buffer: Vec<u8>,
    /// Set while a restore fills.
    pager_record: Option<Box<LockedWriteRecord>>,
    /// Set for an attached guest.
    attached: Option<AttachedDevices>,
    load_pages: LoadPageList,
    /// When the guest was stopped for the previous checkpoint, in µs since 1970.
    previous_stop_host_us: Option<u64>,
    /// The device state of the previous checkpoint.
    previous_devices: Vec<u8>,
}

impl TrackingSession {
    /// Starts to track the memory of `target`.
    pub(crate) fn attach(
        target: Target,
        plan: ProtectionPlan,
        initial: InitialTracking,
    ) -> Result<Self, CheckpointError> {
        let ProtectionPlan { policy, disk_hook, control, save, returns_memory, attached, overlays } = plan;
        let mut monitors = Monitors::new(target.process(), control, save, PauseMarks::of(target.rundir()))?;
        let ram = GuestRam::of(monitors.control(), target.process())?;
        let ram = Arc::new(if returns_memory { ram } else { ram.never_shrinking() });
        let injector = Injector::new(target.process())?;
        if !matches!(initial, InitialTracking::Continue) || policy == Policy::Cow {
            tracker::close_leftovers(injector).map_err(TrackError::from)?;
        }
        // A QEMU that runs as another user may not be permitted to create a userfaultfd itself.
        let device = userfaultfd::hand(monitors.control(), target.process())?;
        // Must precede the tracking, so that no write is missed in between.
        let disk_servers = DiskServers::start_recording(&target)?;
        let load_pages = LoadPageList::locate(monitors.control(), &ram);
        let paused = monitors.pause(|stopped, laps| {
            let started = Tracking::start(policy, &initial, injector, &ram, stopped, device)?;
            laps.steps.collect = laps.lap();
            Ok::<_, CheckpointError>(started)
        });
        userfaultfd::take_back(monitors.control())?;
        let paused = paused?;
        if attached.is_some() {
            monitors.prefer_piped(injector, paused.devices.len());
        }
        let memory = TrackedMemory::new(ram, paused.result, disk_servers)?;
        let pager_record = match initial {
            InitialTracking::Filling { record, .. } => Some(record),
            InitialTracking::Fresh | InitialTracking::Continue => None,
        };
        Ok(Self {
            epochs: EpochDisks::of(&target),
            overlays,
            target,
            policy,
            disk_hook,
            monitors,
            memory,
            buffer: Vec::new(),
            pager_record,
            attached,
            load_pages,
            previous_stop_host_us: None,
            previous_devices: Vec::new(),
        })
    }

    /// Returns whether a restore still fills the memory.
    pub(crate) fn is_filling(&self) -> bool {
        self.pager_record.is_some()
    }

    /// Returns the number of the checkpoint that a restore still loads.
    pub(crate) fn restored_checkpoint(&self) -> Option<u64> {
        self.pager_record.as_ref().map(|record| record.fill.number)
    }

    /// Returns whether the fill is complete, so that the next checkpoint ends the pager.
    pub(crate) fn is_filled(&self) -> bool {
        self.pager_record.as_ref().is_some_and(|record| record.is_filled())
    }

    /// Returns whether the next checkpoint contains only changes since the newest one in the store.
    pub(crate) fn is_incremental(&self) -> bool {
        !self.memory.is_all_owed()
    }

    /// Holds the guest's network output until the checkpoint that covers it is committed. If not `wanted`, holds output
    /// only if an earlier protector has started to.
    pub(crate) fn hold_output(&mut self, wanted: bool) -> Result<(), CheckpointError> {
        let nets: Vec<_> = self.target.state().hardware.nets.iter().map(|net| net.id.as_str()).collect();
        self.monitors.hold(wanted.then_some(nets.as_slice())).map_err(CheckpointError::HoldOutput)
    }

    pub(crate) fn holds_output(&self) -> bool {
        self.monitors.holds_output()
    }

    /// Releases all held output and stops holding it.
    pub(crate) fn end_hold(&mut self) -> Result<(), CheckpointError> {
        self.monitors.end_hold().map_err(CheckpointError::HoldOutput)
    }

    pub(crate) fn policy(&self) -> Policy {
        self.policy
    }

    /// Returns the total size of the RAM blocks in bytes.
    pub(crate) fn ram_bytes(&self) -> u64 {
        self.memory.ram.blocks().iter().map(|block| block.info.used).sum()
    }

    /// Takes one checkpoint and commits it. `every` is the configured interval.
    ///
    /// After a failure, the collected pages are owed to the next checkpoint.
    pub(crate) fn checkpoint(
        &mut self,
        writer: &mut Writer,
        every: Duration,
    ) -> Result<CheckpointReport, CheckpointError> {
        self.take_and_commit(writer, every, AfterPause::Resume, &mut |_| {})
    }

    /// Stops the guest, takes its last checkpoint on this host and commits it. Once the guest is stopped it stays
    /// stopped, even after a failure: only the holder of the run state may resume it. `on_stopped` gets the guest's
    /// state before it is committed. The commit may fail.
    pub(crate) fn last_checkpoint(
        &mut self,
        writer: &mut Writer,
        _run_state: &RunStateLock,
        on_stopped: &mut OnStopped<'_>,
    ) -> Result<CheckpointReport, CheckpointError> {
        self.take_and_commit(writer, Duration::ZERO, AfterPause::StayStopped, on_stopped)
    }

    fn take_and_commit(
        &mut self,
        writer: &mut Writer,
        every: Duration,
        after_pause: AfterPause,
        on_stopped: &mut OnStopped<'_>,
    ) -> Result<CheckpointReport, CheckpointError> {
        let started = Instant::now();
        let filling = self.is_filling();
        let options =
            TakeOptions { store_is_empty: writer.next_number() == 1, end_pager: self.is_filled(), after_pause };
        self.check_before_pause()?;
        self.epochs.begin()?;
        if let Some(overlays) = &mut self.overlays {
            overlays.prepare(self.monitors.control())?;
        }
        let mut checkpoint = writer.begin(&block_table(&self.memory.ram))?;
        let taken = self.take(&mut checkpoint, options, on_stopped);
        let TakenPages { paused, disks, overlays, dirty_bytes, copied_stopped_bytes, copied_for_writes } =
            taken.inspect_err(|_| self.memory.release_writers())?;
        self.check_devices_unchanged()?;
        self.epochs.seal(&disks)?;
        if let Some(disks) = &mut self.overlays {
            disks.seal(&overlays)?;
        }
        let stopped_us = paused.stopped_us();
        let definition = serde_json::to_value(self.recipe(&overlays)).unwrap_or(Value::Null);
        let metadata = self.metadata(&paused, dirty_bytes, &disks, &overlays);
        let committed = checkpoint.commit(&definition, &metadata, &paused.devices)?;
        let (committed_host_us, took) = (host_us(), started.elapsed());
        let released_us = self.release_output(paused.resumed_host_us)?;
        if after_pause == AfterPause::Resume {
            self.epochs.report_commit(&disks);
            if let Some(disks) = &mut self.overlays {
                disks.note_commit(self.monitors.control(), &overlays, every);
            }
            self.load_pages.note_commit(self.monitors.control(), &self.memory.ram);
        }
        let full = self.memory.is_all_owed();
        self.memory.note_commit();
        let devices_bytes = paused.devices.len() as u64;
        self.previous_devices = paused.devices;
        let previous_stop_host_us = self.previous_stop_host_us.replace(paused.stopped_host_us);
        Ok(CheckpointReport {
            number: committed.number,
            full,
            filling,
            stopped_host_us: paused.stopped_host_us,
            stopped_us,
            interval_ms: previous_stop_host_us.map(|previous| paused.stopped_host_us.saturating_sub(previous) / 1000),
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
            devices_bytes,
            commit_us: committed_host_us.saturating_sub(paused.resumed_host_us),
            writing_us: committed.writing.as_micros() as u64,
            syncing_us: committed.syncing.as_micros() as u64,
            took_us: took.as_micros() as u64,
            steps: paused.steps,
        })
    }

    /// Returns the recipe of a checkpoint. A Rekindle that does not know overlays would restore the guest on an older
    /// disk, so it must not be able to read the recipe.
    fn recipe(&self, overlays: &[OverlayEpoch]) -> Recipe {
        let mut recipe = self.target.recipe();
        // Those of the QEMU's start are not those of the checkpoint.
        recipe.clear_overlays();
        match overlays {
            [] => {}
            _ if overlays.iter().any(|overlay| overlay.has_head) => recipe.require_format(recipe::WITH_HEADS),
            _ => recipe.require_format(recipe::WITH_OVERLAYS),
        }
        recipe
    }

    /// Returns the metadata that is stored with a checkpoint.
    fn metadata(&self, paused: &Paused<()>, dirty_bytes: u64, disks: &[DiskEpoch], overlays: &[OverlayEpoch]) -> Value {
        let mut metadata = json!({
            "policy": self.policy, "stopped_us": paused.stopped_us(), "stopped_host_us": paused.stopped_host_us,
            "dirty_bytes": dirty_bytes, (load_pages::KEY): self.load_pages.runs(), (epochs::KEY): disks,
        });
        if !overlays.is_empty() {
            metadata[epochs::OVERLAYS_KEY] = json!(overlays);
        }
        metadata
    }

    /// Notes the disks of the store's newest checkpoint, so that their overlays may be merged.
    pub(crate) fn note_committed_overlays(&mut self, committed: &[OverlayEpoch]) {
        if let Some(overlays) = &mut self.overlays {
            overlays.note_committed(committed);
        }
    }

    /// Returns whether the guest's disks are on overlays.
    pub(crate) fn has_overlays(&self) -> bool {
        self.overlays.is_some()
    }

    /// Leaves the disks as a restore needs them, because this session takes no further checkpoint.
    pub(crate) fn settle_overlays(&mut self) {
        if let Some(overlays) = &mut self.overlays {
            overlays.settle(self.monitors.control());
        }
    }

    /// Lets another host use the overlays of a guest that stays stopped. This QEMU still has them open.
    pub(crate) fn release_overlays(&mut self) {
        self.overlays = None;
    }

    /// If the overlays have no room, merges all of them into their images, so that the guest can run on. Returns whether
    /// that was so.
    pub(crate) fn end_full_overlays(&mut self) -> Result<bool, CheckpointError> {
        let Some(overlays) = self.overlays.take_if(|overlays| overlays.is_without_space()) else { return Ok(false) };
        let _run_state = self.target.hold_run_state()?;
        overlays.end(self.monitors.control(), self.target.rundir())?;
        Ok(true)
    }

    /// Rejects a checkpoint that would block or be incomplete.
    fn check_before_pause(&mut self) -> Result<(), CheckpointError> {
        if let Some(record) = &self.pager_record {
            record.require_pager()?;
        }
        match self.memory.ram.changes(self.monitors.control())?.first() {
            None => Ok(()),
            Some(change) => Err(CheckpointError::Reshaped(format!("{change:?}"))),
        }
    }

    /// Rejects a checkpoint that could not be restored, because an attached guest's devices or disks differ from the
    /// recorded command line.
    fn check_devices_unchanged(&mut self) -> Result<(), CheckpointError> {
        match &self.attached {
            Some(attached) if !attached.are_unchanged(self.monitors.control())? => {
                Err(CheckpointError::Reshaped("devices or disks were added, removed or changed".into()))
            }
            _ => Ok(()),
        }
    }

    /// Releases the network output that the committed checkpoint covers. Returns the time since the guest's resume in
    /// µs; none if no output is held.
    fn release_output(&mut self, resumed_host_us: u64) -> Result<Option<u64>, CheckpointError> {
        if !self.monitors.holds_output() {
            return Ok(None);
        }
        fault::point("output.committed", None, None);
        self.monitors.release_output()?;
        Ok(Some(host_us().saturating_sub(resumed_host_us)))
    }

    /// Removes all traces of the tracking from QEMU.
    pub(crate) fn detach(mut self) -> Result<(), CheckpointError> {
        self.memory.detach()?;
        self.monitors.close_piped()?;
        remove_descriptor_sets(self.monitors.control(), DescriptorSets::Unused)?;
        Ok(())
    }
}
