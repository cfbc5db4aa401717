//! `rekindle host init`: sets a host up for reboots under its guests.
//!
//! The setup can be repeated at any time: files that are already correct are not written. Files of other owners are not
//! changed; conflicts are reported.

mod files;
mod findings;
mod mount;
pub mod reserve;

pub use files::{SetupStep, SetupTarget, carry_out, steps};
pub use findings::findings;
pub use mount::{MountOutcome, mount_ram};

use super::HostError;
use super::plan::run;

pub(super) const SUSPEND: &str = "rekindle-suspend.service";
pub(super) const RESUME: &str = "rekindle-resume.service";

/// Checks that the units are active: without them no guest is suspended or resumed.
///
/// # Errors
/// [`HostError::Setup`] if a unit is not active or not enabled.
pub(super) fn check_units() -> Result<(), HostError> {
    for (verb, unit) in [("is-active", SUSPEND), ("is-enabled", RESUME)] {
        if let Err(e) = run("systemctl", &["--quiet", verb, unit]) {
            return Err(HostError::Setup(format!(
                "{unit} is not set up ({e}), so guests would end with the host; run: rekindle host init --reserve \
                 SIZE --write"
            )));
        }
    }
    Ok(())
}
