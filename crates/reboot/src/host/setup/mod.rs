//! `rekindle host init`: sets a host up for reboots under its guests.
//!
//! The setup can be repeated at any time: files that are already correct are not written. Files of other owners are not
//! changed; conflicts are reported.

mod findings;
mod mount;
mod requirements;
pub mod reserve;
mod steps;
mod target;

pub use findings::findings;
pub use mount::{MountOutcome, mount_ram};
pub use steps::{SetupStep, carry_out, plan_steps};
pub use target::SetupTarget;

use super::HostError;
use super::command::run;

/// Unit that mounts the reserved RAM during a boot. [`RESUME_UNIT`] requires it.
pub(super) const RAM_UNIT: &str = "rekindle-ram.service";
/// Unit that suspends all guests at the end of a shutdown.
pub(super) const SUSPEND_UNIT: &str = "rekindle-suspend.service";
/// Unit that resumes all guests during a boot.
pub(super) const RESUME_UNIT: &str = "rekindle-resume.service";

/// Checks that the units are active: without them no guest is suspended or resumed.
///
/// # Errors
/// [`HostError::Setup`] if a unit is not active, not enabled or not installed.
pub(super) fn check_units() -> Result<(), HostError> {
    for (verb, unit) in [("is-active", SUSPEND_UNIT), ("is-enabled", RESUME_UNIT), ("cat", RAM_UNIT)] {
        if let Err(e) = run("systemctl", &["--quiet", verb, unit]) {
            return Err(HostError::Setup(format!(
                "{unit} is not set up ({e}), so guests would end with the host; run: rekindle host init --reserve \
                 SIZE --write"
            )));
        }
    }
    Ok(())
}
