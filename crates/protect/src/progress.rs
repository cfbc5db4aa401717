//! `protect.json`: the progress of a protector, from which the next protector continues.

use crate::policy::Policy;
use rekindle_qemu::vmm::Vmm;
use rekindle_store::StoreUrl;
use rekindle_store::types::KnownStore;
use rekindle_vm::rundir::{RunDir, read_record, write_atomically};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// A checkpoint and the owner epoch that committed it. Together they identify a checkpoint even if another host has
/// written the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CommitId {
    pub(crate) number: u64,
    pub(crate) epoch: u64,
}

/// Returns the number of the last checkpoint that the VM's protector committed; 0 if there is none or it is unknown.
#[must_use]
pub fn committed(rundir: &RunDir) -> u64 {
    Progress::read(rundir).map_or(0, |progress| progress.committed)
}

/// The newest checkpoint of a VM, as its last protector has recorded it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewestCheckpoint {
    pub number: u64,
    pub epoch: u64,
    /// Time since the commit; none in records of earlier versions.
    pub age: Option<Duration>,
}

/// Returns the newest checkpoint that a protector of this VM has committed on this host; `None` if there is none.
#[must_use]
pub fn newest(rundir: &RunDir) -> Option<NewestCheckpoint> {
    let Progress { committed, committed_at_ms, epoch, .. } = Progress::read(rundir)?;
    let age = committed_at_ms.and_then(|ms| uptime().checked_sub(Duration::from_millis(ms)));
    (committed > 0).then_some(NewestCheckpoint { number: committed, epoch, age })
}

/// Returns the age of the newest checkpoint of the guest in `vmm`, as its protector has recorded it; without a
/// checkpoint, the age of the QEMU. Only checkpoints in `store` count.
#[must_use]
pub fn age(rundir: &RunDir, store: &StoreUrl, vmm: &Vmm) -> Option<Duration> {
    let now = uptime();
    let progress = Progress::read(rundir).filter(|progress| progress.is_of(vmm) && progress.store == *store);
    let committed = progress.and_then(|progress| progress.committed_at_ms).map(Duration::from_millis);
    let qemu_started = Duration::from_millis(vmm.started * 1000 / rustix::param::clock_ticks_per_second());
    now.checked_sub(committed.unwrap_or(qemu_started))
}

/// Returns the time since this host was booted, the origin of processes' start times.
pub(crate) fn uptime() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::try_from(now).unwrap_or_default()
}

/// Content of `protect.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Progress {
    pub(crate) store: StoreUrl,
    /// Pid of the QEMU; identifies it together with `started`.
    pub(crate) pid: u32,
    #[serde(default)]
    pub(crate) started: u64,
    pub(crate) policy: Policy,
    /// The checkpoint for which dirty pages were collected last.
    pub(crate) collected: u64,
    pub(crate) committed: u64,
    /// When `committed` was committed, in ms since this host was booted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) committed_at_ms: Option<u64>,
    /// The owner epoch that commits `collected`, or has committed it.
    #[serde(default)]
    pub(crate) epoch: u64,
    /// `committed` with its owner epoch, if that is known.
    #[serde(default)]
    pub(crate) base: Option<CommitId>,
    /// The store as of `committed`; `None` without a commit, and in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) known: Option<KnownStore>,
}

impl Progress {
    pub(crate) fn path(rundir: &RunDir) -> PathBuf {
        rundir.file("protect.json")
    }

    /// Reads the record. A torn or unreadable record counts as none.
    pub(crate) fn read(rundir: &RunDir) -> Option<Self> {
        serde_json::from_slice(&read_record(&Self::path(rundir)).ok()?).ok()
    }

    pub(crate) fn write(&self, rundir: &RunDir) {
        // If the record is lost or torn, the next protector starts with a full checkpoint.
        let text = serde_json::to_vec(self).unwrap_or_default();
        if let Err(e) = write_atomically(&Self::path(rundir), &text) {
            tracing::debug!("{}: {e}", Self::path(rundir).display());
        }
    }

    /// Returns whether all pages that were collected from `vmm` are in the newest checkpoint of `store`.
    pub(crate) fn is_all_committed(&self, store: &StoreUrl, vmm: &Vmm, newest: u64) -> bool {
        self.collected == self.committed && self.committed == newest && self.store == *store && self.is_of(vmm)
    }

    /// Returns whether the record is about this QEMU.
    pub(crate) fn is_of(&self, vmm: &Vmm) -> bool {
        (self.pid, self.started) == (vmm.pid, vmm.started)
    }
}
