//! Queries the store for the guest's checkpoints and its owner.

use crate::outcome::StartError;
use crate::resource::Resource;
use rekindle_store::credentials::{Credentials, Retries};
use rekindle_store::listing::Listing;
use rekindle_store::{StoreError, admin};
use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Queries the store, and repeats the query until `deadline`: the store may itself be failing over to another node.
/// `None`: no VM has used the store yet.
pub(crate) fn find_with_retries(resource: &Resource, deadline: Instant) -> Result<Option<Listing>, StartError> {
    let credentials = resource.protect.credentials.clone().unwrap_or_default();
    let credentials = Credentials { retries: Retries::Never, ..credentials };
    let mut is_reported = false;
    loop {
        match list(resource, Some(&credentials)) {
            Err(e) if e.is_transient() && Instant::now() < deadline => {
                if !std::mem::replace(&mut is_reported, true) {
                    let why = e.source().map_or_else(|| e.to_string(), ToString::to_string);
                    tracing::warn!("{}: {why}; retrying", resource.name);
                }
                thread::sleep(POLL_INTERVAL);
            }
            result => return result,
        }
    }
}

/// Queries the store. `None`: no VM has used the store yet.
pub(crate) fn find(resource: &Resource) -> Result<Option<Listing>, StartError> {
    list(resource, resource.protect.credentials.as_ref())
}

fn list(resource: &Resource, credentials: Option<&Credentials>) -> Result<Option<Listing>, StartError> {
    match admin::listing(&resource.protect.store, credentials) {
        Ok(listing) => Ok(Some(listing)),
        Err(StoreError::NotAStore { store }) => Err(StartError::NotAStore { store }),
        Err(StoreError::Unused { .. }) => Ok(None),
        Err(e) => Err(StartError::Store(e)),
    }
}
