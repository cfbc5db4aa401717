//! Letting out what a guest has sent, and nobody lets out any more.

use crate::target::{Target, TargetError};
use rekindle_qemu::hold::Hold;
use rekindle_qemu::qmp::QmpError;
use rekindle_vm::attach::{AttachError, Protection};
use rekindle_vm::host::Host;
use std::time::Duration;

/// How long QEMU may take to greet.
const GREETING: Duration = Duration::from_secs(5);

/// Why it was not let out.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    /// The VM.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// Somebody does let it out.
    #[error(transparent)]
    Protected(#[from] AttachError),
    /// QEMU does not do as it is told.
    #[error("what {name} has sent is held still")]
    Qmp {
        /// The VM.
        name: String,
        /// Why.
        #[source]
        source: QmpError,
    },
}

/// Let out what VM `name` has sent, and hold nothing more. Gives whether anything was held.
///
/// *Needs:* the VM runs; nobody takes checkpoints of it.
/// *On success:* its network is as it was before. A fail-over to its last checkpoint may now take back what its clients have seen.
/// *On failure:* it is held still.
///
/// # Errors
/// [`ReleaseError`].
pub fn release(host: &Host, name: &str) -> Result<bool, ReleaseError> {
    let target = Target::of(host, name)?;
    let _protection = Protection::take(target.rundir())?;
    let failed = |source| ReleaseError::Qmp { name: name.into(), source };
    let Some(mut qmp) = target.vmm().save(GREETING).map_err(failed)? else { return Ok(false) };
    match Hold::found(&mut qmp).map_err(failed)? {
        Some(hold) => hold.end(&mut qmp).map(|()| true).map_err(failed),
        None => Ok(false),
    }
}
