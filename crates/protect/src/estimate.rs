//! `rekindle protect --dry-run`: whether a guest can be protected, and how much memory its checkpoints would contain.
//!
//! Nothing is changed: QEMU samples the guest's pages while it runs, and the store is only read.

use crate::error::{ProtectError, TrackingStartError};
use crate::owned::OwnerRecord;
use crate::plan::ProtectionPlan;
use crate::policy::Policy;
use crate::protector::{ProtectSettings, suitable_target};
use crate::target::Target;
use rekindle_life::attach::{ProtectionLock, check_tracking};
use rekindle_qemu::dirty_rate::{ChangedMemory, changed_memory};
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_store::{StoreError, admin};
use rekindle_vm::host::Host;
use serde::Serialize;
use serde_json::Value;
use std::time::Duration;

/// Total length of the measurements.
const MEASURED_TIME: Duration = Duration::from_secs(10);

/// What protecting a guest would require of the store.
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
    /// Number of checkpoints in the store; `None` if there is no store yet.
    pub checkpoints: Option<usize>,
}

impl Estimate {
    /// Returns the mean of the measurements, in bytes.
    #[must_use]
    pub fn mean_bytes(&self) -> u64 {
        self.changed_bytes.iter().sum::<u64>() / (self.changed_bytes.len() as u64).max(1)
    }
}

/// Checks whether VM `name` can be protected with these settings, and measures for 10 s how much memory it changes.
///
/// *Needs:* the VM runs; the rights of a protector.
///
/// # Errors
/// [`ProtectError`]: why it cannot be protected.
pub fn estimate(host: &Host, name: &str, settings: &ProtectSettings) -> Result<Estimate, ProtectError> {
    let failed = |e: QmpError| ProtectError::tracking(name, e);
    let target = suitable_target(host, name, settings)?;
    let _protection = ProtectionLock::take(target.rundir()).map_err(|e| ProtectError::tracking(name, e))?;
    let checkpoints = read_store(&target, settings)?;
    let plan = ProtectionPlan::inspect(&target, settings.policy, &settings.disks);
    let ProtectionPlan { policy, mut control, .. } = plan.map_err(|e| start_error(name, e))?;
    check_tracking(target.process(), &mut control).map_err(|e| ProtectError::tracking(name, e))?;
    let ram_bytes = ram_bytes(&mut control).map_err(failed)?;
    let (mut changed_bytes, mut measured) = (Vec::new(), Duration::ZERO);
    let mut length = settings.every.min(MEASURED_TIME);
    while measured + length <= MEASURED_TIME {
        let changed = changed_memory(&mut control, length).map_err(failed)?;
        let ChangedMemory { bytes, .. } = changed;
        changed_bytes.push(bytes.min(ram_bytes));
        length = changed.length;
        measured += length;
    }
    Ok(Estimate { policy, ram_bytes, measured_ms: length.as_millis() as u64, changed_bytes, checkpoints })
}

/// Returns the number of checkpoints in the store; `None` if it is to be created. Rejects a store that the protector of this
/// guest could not write.
fn read_store(target: &Target, settings: &ProtectSettings) -> Result<Option<usize>, ProtectError> {
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
