//! What differs between the kinds of guests that a resource can be: VMs of Rekindle's own, and domains of libvirt.

mod domain;
mod own;

use crate::outcome::{StartError, StartResult, StrayQemu};
use crate::resource::{GuestKind, Resource};
use rekindle_life::shutdown::Ended;
use rekindle_store::listing::Listing;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::status::Status;
use std::io;
use std::time::Instant;

/// The guest of a resource on this node.
pub(crate) trait ResourceGuest {
    /// Returns the QEMU that runs the guest here although the run directory does not have it.
    ///
    /// # Errors
    /// If it is unknown whether there is one.
    fn stray(&self, rundir: &RunDir) -> io::Result<Option<StrayQemu>>;

    /// Returns the status. A guest that has shut down cleanly is stopped as [`rekindle_vm::qemu::OFF`].
    ///
    /// # Errors
    /// If the run directory cannot be read.
    fn status(&self, rundir: &RunDir) -> io::Result<Status>;

    /// Makes a clean shutdown of the guest distinguishable from a crash.
    ///
    /// # Errors
    /// A text: QEMU does not answer.
    fn make_shutdown_visible(&self, rundir: &RunDir) -> Result<(), String>;

    /// Requests a shutdown of the guest, by `deadline`. Does not wait for it.
    ///
    /// # Errors
    /// A text: why it cannot be requested.
    fn request_shutdown(&self, rundir: &RunDir, deadline: Instant) -> Result<(), String>;

    /// Resumes the guest from its newest checkpoint.
    ///
    /// # Errors
    /// [`StartError`]: the guest does not run here.
    fn restore(&self, host: &Host) -> Result<StartResult, StartError>;

    /// Boots the guest from the newest state of its disks, and makes this node the owner of the store before that. No
    /// checkpoint is valid any more that the disks could belong to. Takes over a guest that [`ResourceGuest::stray`]
    /// returns.
    ///
    /// # Errors
    /// [`StartError`]: the guest does not run here.
    fn boot(&self, host: &Host, listing: Option<&Listing>) -> Result<(), StartError>;

    /// Kills every QEMU of the guest that ending the VM of the run directory does not end.
    ///
    /// # Errors
    /// [`LifeError`]: a process still runs.
    fn end_strays(&self, rundir: &RunDir) -> Result<(), LifeError>;

    /// Ends a guest of which nothing is needed any more, and removes the run directory.
    ///
    /// # Errors
    /// [`LifeError`]: a process still runs, or a file cannot be removed.
    fn end_immediately(&self, host: &Host, rundir: &RunDir) -> Result<Ended, LifeError>;
}

/// Returns the guest of a resource.
pub(crate) fn guest_of(resource: &Resource) -> Box<dyn ResourceGuest + '_> {
    match &resource.guest {
        GuestKind::Own { definition } => Box::new(own::OwnGuest { resource, definition }),
        GuestKind::Domain { name } => Box::new(domain::DomainGuest { resource, domain: name }),
    }
}
