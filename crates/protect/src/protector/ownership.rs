//! Makes this host the owner of a store, before the first checkpoint.
//!
//! A host becomes the owner by a *claim*, an entry in the store's log. The *owner epoch* counts the owners
//! (`docs/store-format.md`).

use super::ProtectSettings;
use crate::error::ProtectError;
use crate::owned::OwnerRecord;
use crate::target::Target;
use rekindle_store::types::{Guest, OnlyIf, Owner};
use rekindle_store::{Options, StoreError, Writer, admin};
use rekindle_vm::rundir::RunDir;

/// Makes this host the owner of the store. If this host has a record that the guest started on it, the store must still
/// allow the guest to run. Otherwise the guest counts as booted on this host.
pub(super) fn become_owner(
    target: &Target,
    settings: &ProtectSettings,
    options: &Options,
) -> Result<(OwnerRecord, Writer), ProtectError> {
    let mut known_record = OwnerRecord::read(target.rundir())?.filter(|record| record.is_of(&settings.store));
    if let Some(record) = &known_record {
        record.may_run(target.rundir())?;
        if settings.abandon_old && store_is_missing(target, record, settings)? {
            OwnerRecord::abandon(target.rundir())?;
            known_record = None;
        }
    }
    let Some(record) = known_record else {
        let create = settings.create_store;
        let writer = Writer::open(&settings.store, &Options { guest: Guest::Booted, create, ..options.clone() })?;
        let record = OwnerRecord::new(&settings.store, settings.credentials.as_ref(), writer.epoch());
        record.write(target.rundir())?;
        return Ok((record, writer));
    };
    let only_if = Some(OnlyIf::Run { run: record.run() });
    match Writer::open(&settings.store, &Options { only_if, ..options.clone() }) {
        Ok(writer) => Ok((record, writer)),
        Err(e) if e.is_no_store() => Err(record.store_gone(target.rundir(), &e).into()),
        Err(e) => match e.guest_is_over(record.run()) {
            Some(owner) => Err(end_guest(&record, target.rundir(), owner)),
            None => Err(e.into()),
        },
    }
}

/// Ends the guest's processes on this host, because `owner` has the guest. Returns the error to report.
pub(super) fn end_guest(record: &OwnerRecord, rundir: &RunDir, owner: &Owner) -> ProtectError {
    record.end_guest(rundir, owner).map_or_else(ProtectError::from, ProtectError::from)
}

/// Returns whether the store that this host has written is missing, so that a new one can be started. If the path has
/// another VM's store, this returns false, and opening that store fails later.
fn store_is_missing(target: &Target, record: &OwnerRecord, settings: &ProtectSettings) -> Result<bool, ProtectError> {
    match admin::listing(&settings.store, settings.credentials.as_ref()) {
        Ok(listing) if listing.vm.uuid == target.identity().uuid => {
            let (name, store) = (target.name().into(), settings.store.to_string());
            Err(ProtectError::StoreExists { name, store, checkpoints: listing.checkpoints.len() })
        }
        Ok(_) => Ok(false),
        Err(e @ StoreError::NotAStore { .. }) if !settings.create_store => {
            Err(record.store_gone(target.rundir(), &e).into())
        }
        Err(e) if e.is_no_store() => Ok(true),
        Err(e) => Err(e.into()),
    }
}
