//! Reads the figures of all guests of this host from files and `/proc`.

use crate::catalog as metric;
use crate::exposition::{Snapshot, Value};
use crate::timeline::{LastOperation, TimelineCounts};
use rekindle_kernel::file::FlockTable;
use rekindle_libvirt::domains;
use rekindle_protect::counters::{DurationHistogram, ProtectCounters};
use rekindle_protect::fill::{Fill, FillStage};
use rekindle_protect::fill_progress::FillProgress;
use rekindle_protect::progress;
use rekindle_qemu::outdated::Comparisons;
use rekindle_qemu::program::Program;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::helpers;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::lock;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::time::Instant;

pub(crate) const REKINDLE: &str = "rekindle";
pub(crate) const ATTACHED: &str = "attached";
pub(crate) const LIBVIRT: &str = "libvirt";
/// Limit of the helpers of a VM whose restarts are reported.
const MAX_HELPERS: usize = 64;

/// Reads the figures, and remembers what need not be read again.
#[derive(Debug)]
pub struct Collector {
    /// The directory that has the run directories.
    root: PathBuf,
    /// The directory with the status files of libvirt's daemon.
    domains: PathBuf,
    version: &'static str,
    comparisons: Comparisons,
    timelines: HashMap<String, TimelineCounts>,
}

/// All figures at one moment, and what no figure can express.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Collected {
    pub snapshot: Snapshot,
    /// By name of the VM.
    pub(crate) activities: BTreeMap<String, Activity>,
}

/// What is done with a VM.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Activity {
    /// The operation that runs now.
    pub running: Option<String>,
    /// A QEMU waits with empty RAM for a checkpoint.
    pub is_prepared: bool,
    pub last: Option<LastOperation>,
}

/// What the collection of all guests shares.
struct Collection {
    snapshot: Snapshot,
    activities: BTreeMap<String, Activity>,
    locks: FlockTable,
    running: BTreeMap<&'static str, u64>,
    /// QEMUs of attached VMs, which libvirt's domains name once more.
    attached_pids: HashSet<u32>,
}

impl Collector {
    #[must_use]
    pub fn new(root: PathBuf, domains: PathBuf, version: &'static str) -> Self {
        Self { root, domains, version, comparisons: Comparisons::default(), timelines: HashMap::new() }
    }

    /// Returns the version of this program.
    #[must_use]
    pub fn version(&self) -> &'static str {
        self.version
    }

    /// Reads all figures. What cannot be read is missing in the result, and counted in it.
    pub fn collect(&mut self) -> Collected {
        let started = Instant::now();
        let locks = FlockTable::read().unwrap_or_default();
        let running = [REKINDLE, ATTACHED, LIBVIRT].into_iter().map(|manager| (manager, 0)).collect();
        let mut collection = Collection {
            snapshot: Snapshot::default(),
            activities: BTreeMap::new(),
            locks,
            running,
            attached_pids: HashSet::new(),
        };
        collection.snapshot.add(&metric::BUILD, &[self.version], Value::Number(1.0));
        let unreadable_vms = self.add_vms(&mut collection);
        let unreadable_domains = self.add_domains(&mut collection);
        let Collection { mut snapshot, activities, running, .. } = collection;
        snapshot.add(&metric::UNREADABLE, &["vms"], Value::Count(unreadable_vms));
        snapshot.add(&metric::UNREADABLE, &["libvirt"], Value::Count(unreadable_domains));
        for (manager, count) in running {
            snapshot.add(&metric::GUESTS, &[manager], Value::Count(count));
        }
        snapshot.add(&metric::COLLECTION, &[], Value::Number(started.elapsed().as_secs_f64()));
        Collected { snapshot, activities }
    }

    /// Adds the VMs. Returns the number of those that cannot be read.
    fn add_vms(&mut self, collection: &mut Collection) -> u64 {
        let names = match RunDir::list(&self.root) {
            Ok(names) => names,
            // No VM has been started yet.
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(e) => {
                tracing::debug!("{}: {e}", self.root.display());
                return 1;
            }
        };
        self.timelines.retain(|name, _| names.binary_search(name).is_ok());
        let mut unreadable = 0;
        for name in &names {
            if let Err(e) = self.add_vm(collection, name) {
                tracing::debug!("VM {name}: {e}");
                unreadable += 1;
            }
        }
        unreadable
    }

    /// Adds a VM. One that is being created or removed is skipped.
    fn add_vm(&mut self, collection: &mut Collection, name: &str) -> io::Result<()> {
        let rundir = RunDir::new(&self.root, name);
        let Some(state) = State::read(&rundir)? else { return Ok(()) };
        let manager = if state.attached.is_some() { ATTACHED } else { REKINDLE };
        let qemu = state.vmm.as_ref().filter(|vmm| vmm.is_alive());
        let version = state.version.as_ref().map(ToString::to_string).unwrap_or_default();
        let snapshot = &mut collection.snapshot;
        snapshot.add(&metric::VM_INFO, &[name, manager, &version], Value::Number(1.0));
        snapshot.add_flag(&metric::VM_UP, &[name, manager], qemu.is_some());
        if let Some(vmm) = qemu {
            *collection.running.entry(manager).or_default() += 1;
            if state.attached.is_some() {
                collection.attached_pids.insert(vmm.pid);
            }
            let compared = Program::of(vmm.process())
                .and_then(|program| self.comparisons.compare(&program, &vmm.binary))
                .map(|outdated| snapshot.add_flag(&metric::QEMU_OUTDATED, &[name, manager], outdated.is_some()));
            if let Err(e) = compared {
                tracing::debug!("the QEMU of {name}: {e}");
            }
        }
        add_interruption(snapshot, &rundir)?;
        add_helpers(snapshot, &rundir, &state, &collection.locks)?;
        add_protection(snapshot, &rundir, &collection.locks);
        add_fill(snapshot, &rundir, &collection.locks);
        let timeline = self.timelines.entry(name.to_owned()).or_default();
        timeline.update(&rundir);
        add_operations(snapshot, name, timeline);
        let activity = Activity {
            running: lock::running_operation(&rundir),
            is_prepared: state.prepared.as_ref().is_some_and(|prepared| prepared.vmm.is_alive()),
            last: timeline.last_operation().cloned(),
        };
        collection.activities.insert(name.to_owned(), activity);
        Ok(())
    }

    /// Adds libvirt's domains. Returns the number of those that cannot be read; 0 if this user may not read any.
    fn add_domains(&mut self, collection: &mut Collection) -> u64 {
        let records = match domains::all(&self.domains) {
            Ok(records) => records,
            Err(e) => {
                tracing::debug!("{}: {e}", self.domains.display());
                return u64::from(e.kind() != io::ErrorKind::PermissionDenied);
            }
        };
        let mut unreadable = 0;
        for record in records {
            let Ok(domain) = record else {
                unreadable += 1;
                continue;
            };
            if collection.attached_pids.contains(&domain.pid) {
                continue;
            }
            let labels = [domain.name.as_str(), LIBVIRT];
            let program = domains::qemu(&domain);
            collection.snapshot.add_flag(&metric::VM_UP, &labels, program.is_some());
            let Some(program) = program else { continue };
            *collection.running.entry(LIBVIRT).or_default() += 1;
            match self.comparisons.compare(&program, &domain.emulator) {
                Ok(outdated) => collection.snapshot.add_flag(&metric::QEMU_OUTDATED, &labels, outdated.is_some()),
                Err(e) => tracing::debug!("the QEMU of {}: {e}", domain.name),
            }
        }
        unreadable
    }
}

/// Adds whether an operation was interrupted, as `rekindle status` determines it.
fn add_interruption(snapshot: &mut Snapshot, rundir: &RunDir) -> io::Result<()> {
    // Read the journal first: an operation that ends in between removes its journal before it releases the lock.
    let journal = match Journal::read(rundir)? {
        Some(_) if lock::running_operation(rundir).is_none() => Journal::read(rundir)?,
        _ => None,
    };
    let is_suspended = journal.as_ref().is_some_and(|Journal { operation, .. }| {
        matches!(operation.kind, Kind::HostWarm | Kind::HostSaved)
            && operation.step == Step::Saved
            && !operation.from.as_ref().is_some_and(Vmm::is_alive)
    });
    snapshot.add_flag(&metric::SUSPENDED, &[rundir.name()], is_suspended);
    snapshot.add_flag(&metric::NEEDS_RECOVERY, &[rundir.name()], journal.is_some() && !is_suspended);
    Ok(())
}

fn add_helpers(snapshot: &mut Snapshot, rundir: &RunDir, state: &State, locks: &FlockTable) -> io::Result<()> {
    let missing = helpers::without_lock(rundir, state, locks)?.len() as u64;
    snapshot.add(&metric::HELPERS_MISSING, &[rundir.name()], Value::Count(missing));
    for (helper, restarts) in helpers::read_record(rundir).into_iter().take(MAX_HELPERS) {
        snapshot.add(&metric::HELPER_RESTARTS, &[rundir.name(), &helper], Value::Count(restarts.count));
    }
    Ok(())
}

/// Adds what the protector has recorded. Nothing for a VM that was never protected here.
fn add_protection(snapshot: &mut Snapshot, rundir: &RunDir, locks: &FlockTable) {
    let vm = &[rundir.name()];
    let counters = ProtectCounters::read(rundir);
    let newest = progress::newest(rundir);
    if counters.is_none() && newest.is_none() {
        return;
    }
    let is_up = locks.holder(&rundir.protection_lock()).is_ok_and(|holder| holder.is_some());
    snapshot.add_flag(&metric::PROTECTOR_UP, vm, is_up);
    if let Some(newest) = newest {
        snapshot.add(&metric::CHECKPOINT_NUMBER, vm, Value::Count(newest.number));
        snapshot.add(&metric::OWNER_EPOCH, vm, Value::Count(newest.epoch));
        if let Some(age) = newest.age {
            snapshot.add(&metric::CHECKPOINT_AGE, vm, Value::Number(age.as_secs_f64()));
        }
    }
    let Some(counters) = counters else { return };
    let seconds = |ms: u64| Value::Number(ms as f64 / 1e3);
    snapshot.add(&metric::CHECKPOINT_INTERVAL, vm, seconds(counters.every_ms));
    if let Some(interval_ms) = counters.interval_ms {
        snapshot.add(&metric::LAST_INTERVAL, vm, seconds(interval_ms));
    }
    if let Some(max_lag_ms) = counters.max_lag_ms {
        snapshot.add(&metric::MAX_LAG, vm, seconds(max_lag_ms));
    }
    for (metric, count) in [
        (&metric::LAG_EXCEEDED, counters.lag_exceeded),
        (&metric::CHECKPOINTS, counters.checkpoints),
        (&metric::FULL_CHECKPOINTS, counters.full_checkpoints),
        (&metric::DIRTY, counters.dirty_bytes),
        (&metric::WRITTEN, counters.written_bytes),
        (&metric::STORE_FAILURES, counters.store_failures),
        (&metric::TRACKING_RESTARTS, counters.tracking_restarts),
    ] {
        snapshot.add(metric, vm, Value::Count(count));
    }
    for (metric, histogram) in [
        (&metric::PAUSE, &counters.pauses),
        (&metric::DURATION, &counters.durations),
        (&metric::COMMIT, &counters.commits),
    ] {
        if let Some(value) = histogram_value(histogram) {
            snapshot.add(metric, vm, value);
        }
    }
    // Of a protector that has ended, these would be what it was like then.
    snapshot.add_flag(&metric::STORE_AWAY, vm, is_up && counters.is_store_away);
    let is_waiting = counters.is_waiting || rundir.unprotected().exists();
    snapshot.add_flag(&metric::PROTECTOR_WAITING, vm, is_up && is_waiting);
    if let Some(space) = counters.store_space {
        snapshot.add(&metric::STORE_SIZE, vm, Value::Count(space.size));
        snapshot.add(&metric::STORE_AVAILABLE, vm, Value::Count(space.available));
    }
}

fn histogram_value(histogram: &DurationHistogram) -> Option<Value> {
    let seconds = |us: u64| us as f64 / 1e6;
    let buckets = histogram.buckets.iter().map(|&(bound, count)| (seconds(bound), count)).collect();
    Some(Value::Histogram { sum: seconds(histogram.sum_us), count: histogram.count()?, buckets })
}

/// Adds the progress of a fill that is not complete.
fn add_fill(snapshot: &mut Snapshot, rundir: &RunDir, locks: &FlockTable) {
    let vm = &[rundir.name()];
    let Ok(Some(fill)) = Fill::read(rundir) else { return };
    let is_up = locks.holder(&rundir.pager_lock()).is_ok_and(|holder| holder.is_some());
    snapshot.add_flag(&metric::PAGER_UP, vm, is_up);
    if let Some(progress) = FillProgress::read(rundir) {
        // In the later stages nothing is missing but what the guest has given back.
        let missing = if fill.stage == FillStage::Filling { progress.missing } else { 0 };
        snapshot.add(&metric::FILL_MEMORY, vm, Value::Count(progress.total));
        snapshot.add(&metric::FILL_MISSING, vm, Value::Count(missing));
    }
}

fn add_operations(snapshot: &mut Snapshot, name: &str, timeline: &TimelineCounts) {
    for (operation, counts) in timeline.operations() {
        snapshot.add(&metric::OPERATIONS, &[name, operation], Value::Count(counts.count));
        if let Some(stopped) = &counts.stopped {
            let seconds = |us: u64| us as f64 / 1e6;
            let buckets = stopped.buckets().map(|(bound, count)| (seconds(bound), count)).collect();
            let value = Value::Histogram { sum: seconds(stopped.sum_us), count: stopped.count(), buckets };
            snapshot.add(&metric::REPLACEMENT_STOPPED, &[name, operation], value);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::exposition::Format;
    use rekindle_vm::rundir::MAX_RECORD_BYTES;
    use std::fs::{self, File};
    use std::os::unix::fs::symlink;

    fn collector(root: &std::path::Path) -> Collector {
        Collector::new(root.join("vms"), root.join("libvirt"), "1.2.3")
    }

    #[test]
    fn a_host_without_vms_has_no_guests() {
        let root = tempfile::tempdir().unwrap();
        let snapshot = collector(root.path()).collect().snapshot;
        assert_eq!(snapshot.number(&metric::GUESTS, &["rekindle"]), Some(0.0));
        assert_eq!(snapshot.number(&metric::UNREADABLE, &["vms"]), Some(0.0));
        assert!(snapshot.encode(Format::OpenMetrics).unwrap().contains("rekindle_build_info{version=\"1.2.3\"} 1\n"));
    }

    #[test]
    fn hostile_run_directories_are_counted_and_do_not_stop_the_others() {
        let root = tempfile::tempdir().unwrap();
        let vms = root.path().join("vms");
        let state_of = |name: &str| {
            let rundir = RunDir::new(&vms, name);
            rundir.create().unwrap();
            rundir.file("state.json")
        };
        fs::write(state_of("half-written"), "{\"format\": 1, \"defin").unwrap();
        fs::write(state_of("not-text"), [0xff, 0xfe, 0]).unwrap();
        fs::write(state_of("deep"), "[".repeat(1 << 20)).unwrap();
        File::create(state_of("huge")).unwrap().set_len(MAX_RECORD_BYTES + 1).unwrap();
        symlink("/dev/zero", state_of("link")).unwrap();
        fs::create_dir(state_of("directory")).unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, state_of("pipe"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
        state_of("being-created");
        let mut collector = collector(root.path());
        let snapshot = collector.collect().snapshot;
        assert_eq!(snapshot.number(&metric::UNREADABLE, &["vms"]), Some(7.0));
        // VMs come and go.
        fs::remove_dir_all(&vms).unwrap();
        assert_eq!(collector.collect().snapshot.number(&metric::UNREADABLE, &["vms"]), Some(0.0));
    }

    #[test]
    fn a_damaged_record_of_a_protector_gives_no_figures_but_valid_text() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        let max = u64::MAX;
        for text in [
            format!(r#"{{"pauses": {{"buckets": [[1, {max}], [2, {max}]], "above": {max}, "sum_us": {max}}}}}"#),
            r#"{"pauses": {"buckets": [[5, 1], [1, 1]], "above": 0, "sum_us": 0}}"#.to_owned(),
        ] {
            fs::write(rundir.file("protect-counters.json"), text).unwrap();
            let mut snapshot = Snapshot::default();
            add_protection(&mut snapshot, &rundir, &FlockTable::default());
            assert_eq!(snapshot.number(&metric::PROTECTOR_UP, &["web"]), Some(0.0));
            let text = snapshot.encode(Format::OpenMetrics).unwrap();
            assert!(!text.contains("rekindle_checkpoint_pause_seconds"), "{text}");
        }
    }
}
