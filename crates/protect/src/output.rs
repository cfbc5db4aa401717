//! Releases network output that is still held after its protector has ended.

use crate::target::{Target, TargetError};
use rekindle_life::attach::{AttachError, ProtectionLock};
use rekindle_qemu::hold::OutputHold;
use rekindle_qemu::qmp::QmpError;
use rekindle_vm::host::Host;
use std::time::Duration;

/// How long QEMU may take to send its greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);

/// Why held output was not released.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A protector runs, which releases the output itself.
    #[error(transparent)]
    Protected(#[from] AttachError),
    #[error("the network output of {name} is still held")]
    Qmp {
        name: String,
        #[source]
        source: QmpError,
    },
}

/// Releases the held network output of VM `name` and stops holding it. Returns whether any was held.
///
/// *Needs:* the VM runs, and no protector takes checkpoints of it.
/// *On success:* the VM's network output is not held any more. A fail-over to the VM's last checkpoint may now revert
/// output that its clients have seen.
/// *On failure:* the output is still held.
pub fn release(host: &Host, name: &str) -> Result<bool, ReleaseError> {
    let target = Target::of(host, name)?;
    let _protection = ProtectionLock::take(target.rundir())?;
    let failed = |source| ReleaseError::Qmp { name: name.into(), source };
    let Some(mut qmp) = target.vmm().connect_for_saves(GREETING_TIMEOUT).map_err(failed)? else { return Ok(false) };
    match OutputHold::find(&mut qmp).map_err(failed)? {
        Some(hold) => hold.end(&mut qmp).map(|()| true).map_err(failed),
        None => Ok(false),
    }
}
