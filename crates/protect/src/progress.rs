//! How far a protecting loop has got, for the next one: `protect.json`.

use crate::policy::Policy;
use rekindle_qemu::vmm::Vmm;
use rekindle_store::StoreUrl;
use rekindle_vm::rundir::{RunDir, write_atomically};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// A checkpoint of a store and the owner epoch that committed it: together they name one checkpoint, whoever else may have
/// written the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Commit {
    pub(crate) number: u64,
    pub(crate) epoch: u64,
}

/// The checkpoint that was committed last by who takes checkpoints of a VM; 0: none, or that is not known.
#[must_use]
pub fn committed(rundir: &RunDir) -> u64 {
    Progress::read(rundir).map_or(0, |progress| progress.committed)
}

/// How long the newest checkpoint of the guest in `vmm` has been there, as who takes them has noted; without any, how long its QEMU. In
/// `store`: one elsewhere is of no use.
#[must_use]
pub fn age(rundir: &RunDir, store: &StoreUrl, vmm: &Vmm) -> Option<Duration> {
    let of_it = Progress::read(rundir).filter(|progress| progress.is_of(vmm) && progress.store == *store);
    let since_boot = uptime();
    let began = Duration::from_millis(vmm.started * 1000 / rustix::param::clock_ticks_per_second());
    let committed = of_it.and_then(|progress| progress.committed_at_ms).map_or(began, Duration::from_millis);
    since_boot.checked_sub(committed)
}

/// Since this host was booted: what the start times of processes are counted from.
pub(crate) fn uptime() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::try_from(now).unwrap_or_default()
}

/// How far a loop has got.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Progress {
    pub(crate) store: StoreUrl,
    /// The QEMU: its process, and when that began.
    pub(crate) pid: u32,
    #[serde(default)]
    pub(crate) started: u64,
    pub(crate) policy: Policy,
    /// The checkpoint for which pages were collected last.
    pub(crate) collected: u64,
    /// The checkpoint that was committed last.
    pub(crate) committed: u64,
    /// When that was, since this host was booted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) committed_at_ms: Option<u64>,
    /// The owner epoch in which `collected` is going to be committed, or was.
    #[serde(default)]
    pub(crate) epoch: u64,
    /// `committed`, and its epoch, if that is known.
    #[serde(default)]
    pub(crate) base: Option<Commit>,
}

impl Progress {
    pub(crate) fn path(rundir: &RunDir) -> PathBuf {
        rundir.file("protect.json")
    }

    /// None too when it is torn or not to be read: then nothing is known.
    pub(crate) fn read(rundir: &RunDir) -> Option<Self> {
        serde_json::from_slice(&fs::read(Self::path(rundir)).ok()?).ok()
    }

    pub(crate) fn write(&self, rundir: &RunDir) {
        // Lost or torn, the next protector begins with a full checkpoint.
        let text = serde_json::to_vec(self).unwrap_or_default();
        if let Err(e) = write_atomically(&Self::path(rundir), &text) {
            tracing::debug!("{}: {e}", Self::path(rundir).display());
        }
    }

    /// Whether all that was collected from `vmm` has arrived in the newest checkpoint of `store`.
    pub(crate) fn has_arrived(&self, store: &StoreUrl, vmm: &Vmm, newest: u64) -> bool {
        self.collected == self.committed && self.committed == newest && self.store == *store && self.is_of(vmm)
    }

    /// Whether it is about this QEMU.
    pub(crate) fn is_of(&self, vmm: &Vmm) -> bool {
        (self.pid, self.started) == (vmm.pid, vmm.started)
    }
}
