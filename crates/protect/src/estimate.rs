//! Whether a guest can be protected, and how much memory its checkpoints would contain: for `rekindle protect --dry-run`
//! and `rekindle doctor NAME`.
//!
//! Nothing is changed: QEMU samples the guest's pages while it runs, and the store is only read.

use crate::error::{ProtectError, TrackingStartError};
use crate::owned::OwnerRecord;
use crate::plan::{DiskPolicy, ProtectionPlan};
use crate::policy::Policy;
use crate::protector::{ProtectSettings, suitable_target};
use crate::target::Target;
use rekindle_life::attach::{ProtectionLock, check_tracking};
use rekindle_qemu::dirty_rate::changed_memory;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_store::{StoreError, admin};
use rekindle_vm::host::Host;
use serde::Serialize;
use serde_json::Value;
use std::time::Duration;

/// Total length of the measurements.
const MEASURED_TIME: Duration = Duration::from_secs(10);

/// How a guest would be protected: the part of [`ProtectSettings`] that is not about the store.
#[derive(Debug, Clone)]
pub struct Wanted {
    pub policy: Option<Policy>,
    pub disks: DiskPolicy,
    pub output_commit: bool,
    /// Interval from the start of one checkpoint to the start of the next.
    pub every: Duration,
}

/// How much memory the checkpoints of a guest would contain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Estimate {
    /// When pages would be copied.
    pub policy: Policy,
    /// Size of the guest's memory, in bytes: the first checkpoint has all of it.
    pub ram_bytes: u64,
    /// Length of a measurement, in ms: the interval of checkpoints, rounded up to seconds, at most 10 s.
    pub measured_ms: u64,
    /// Memory that the guest changed in each measurement, in bytes. From samples.
    pub changed_bytes: Vec<u64>,
}

impl Estimate {
    /// Returns the mean of the measurements, in bytes.
    #[must_use]
    pub fn mean_bytes(&self) -> u64 {
        self.changed_bytes.iter().sum::<u64>() / (self.changed_bytes.len() as u64).max(1)
    }
}

/// Checks whether VM `name` can be protected like that, and measures for 10 s how much memory it changes.
///
/// *Needs:* the VM runs; the rights of a protector; no protector.
///
/// # Errors
/// [`ProtectError`]: why it cannot be protected.
pub fn estimate(host: &Host, name: &str, wanted: &Wanted) -> Result<Estimate, ProtectError> {
    let failed = |e: QmpError| ProtectError::tracking(name, e);
    let target = suitable_target(host, name, wanted.output_commit)?;
    let _protection = ProtectionLock::take(target.rundir()).map_err(|e| ProtectError::tracking(name, e))?;
    let plan = ProtectionPlan::inspect(&target, wanted.policy, &wanted.disks);
    let ProtectionPlan { policy, mut control, .. } = plan.map_err(|e| start_error(name, e))?;
    check_tracking(target.process(), &mut control).map_err(|e| ProtectError::tracking(name, e))?;
    let ram_bytes = ram_bytes(&mut control).map_err(failed)?;
    let (mut changed_bytes, mut measured) = (Vec::new(), Duration::ZERO);
    let mut length = wanted.every.min(MEASURED_TIME);
    while measured + length <= MEASURED_TIME {
        let changed = changed_memory(&mut control, length).map_err(failed)?;
        changed_bytes.push(changed.bytes.min(ram_bytes));
        length = changed.length;
        measured += length;
    }
    Ok(Estimate { policy, ram_bytes, measured_ms: length.as_millis() as u64, changed_bytes })
}

/// Returns the number of checkpoints in the store of a protector with these settings; `None` if it would create the store.
///
/// # Errors
/// [`ProtectError`]: why it could not write to the store.
pub fn stored_checkpoints(host: &Host, name: &str, settings: &ProtectSettings) -> Result<Option<usize>, ProtectError> {
    let target = Target::of(host, name)?;
    let record = OwnerRecord::read(target.rundir())?.filter(|record| record.is_of(&settings.store));
    if let Some(record) = &record {
        record.may_run(target.rundir())?;
    }
    match admin::listing(&settings.store, settings.credentials.as_ref()) {
        Ok(listing) if listing.vm.uuid == target.identity().uuid => Ok(Some(listing.checkpoints.len())),
        Ok(listing) => {
            let (store, expected, name) = (settings.store.to_string(), target.identity().uuid, target.name().into());
            Err(StoreError::OtherVm { store, found: listing.vm, expected, name: Some(name) }.into())
        }
        // `store init` has created it.
        Err(StoreError::Unused { .. }) => Ok(Some(0)),
        Err(e) if e.is_no_store() && settings.create_store => Ok(None),
        Err(e) => Err(e.into()),
    }
}

fn start_error(name: &str, error: TrackingStartError) -> ProtectError {
    match error {
        TrackingStartError::Fatal(error) => error,
        TrackingStartError::Retryable(error) => ProtectError::tracking(name, error),
    }
}

/// Returns the size of the guest's memory, in bytes.
fn ram_bytes(qmp: &mut Qmp) -> Result<u64, QmpError> {
    let summary: Value = qmp.execute("query-memory-size-summary", ())?;
    let part = |key: &str| summary.get(key).and_then(Value::as_u64).unwrap_or(0);
    Ok(part("base-memory") + part("plugged-memory"))
}
