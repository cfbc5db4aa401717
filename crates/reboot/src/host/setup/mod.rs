//! `rekindle host init`: what a host needs to be rebooted under its guests.
//!
//! Nothing is written that is there already as it should be, so it can be done again at any time; and nothing of somebody else's is
//! changed: what is in the way is named.

mod files;
mod findings;
mod mount;
pub mod reserve;

pub use files::{Place, Step, carry_out, steps};
pub use findings::findings;
pub use mount::{Mounted, mount_ram};

use super::HostError;
use super::plan::run;

/// The unit that suspends guests.
pub(super) const SUSPEND: &str = "rekindle-suspend.service";
/// The unit that resumes them.
pub(super) const RESUME: &str = "rekindle-resume.service";

/// The units must be there, or nobody suspends guests and nobody resumes them.
///
/// # Errors
/// [`HostError::Setup`].
pub(super) fn check_units() -> Result<(), HostError> {
    for (verb, unit) in [("is-active", SUSPEND), ("is-enabled", RESUME)] {
        if let Err(e) = run("systemctl", &["--quiet", verb, unit]) {
            return Err(HostError::Setup(format!(
                "{unit} is not set up ({e}), and guests would end with the host; rekindle host init --reserve SIZE --write"
            )));
        }
    }
    Ok(())
}
