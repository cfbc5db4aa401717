//! Administration of a store.

use crate::credentials::Credentials;
use crate::directory::StoreDirectory;
use crate::error::Result;
use crate::fencing;
use crate::listing::{Listing, list};
use crate::location::Storage;
use crate::types::{OnlyIf, Owner, Vm};
use crate::url::StoreUrl;
use crate::verify::{Verified, verify};
use crate::writer::{Options, Writer};

pub use crate::fencing::Fenced;

/// Callback for progress: bytes done, bytes in total.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// Creates a store without a VM. The first VM that is protected with the store, or that a cluster manager boots with
/// it, becomes the store's VM.
///
/// # Errors
/// [`crate::StoreError::Exists`] (the existing store is unchanged); [`crate::StoreError::NotEmpty`].
pub fn init(url: &StoreUrl, credentials: Option<&Credentials>) -> Result<()> {
    StoreDirectory::init(&Storage::of(url, credentials)?.disk)
}

/// Lists the contents of a store.
///
/// # Errors
/// [`crate::StoreError::NotAStore`]; damage to the log.
pub fn listing(url: &StoreUrl, credentials: Option<&Credentials>) -> Result<Listing> {
    list(&StoreDirectory::open(Storage::of(url, credentials)?, None)?)
}

/// Verifies every byte of a store that is in use.
///
/// # Errors
/// Errors of [`listing`]. Damage that is found is no error: the result lists it.
pub fn verified(url: &StoreUrl, credentials: Option<&Credentials>, progress: Progress<'_>) -> Result<Verified> {
    verify(&StoreDirectory::open(Storage::of(url, credentials)?, None)?, progress)
}

/// Frees all space that can be freed. Returns the number of bytes. Becomes the owner of the store: a protector that
/// still writes to it cannot commit any more.
///
/// # Errors
/// Errors of [`Writer::open`] and [`Writer::compact`].
pub fn compact(url: &StoreUrl, credentials: Option<&Credentials>) -> Result<u64> {
    let found = listing(url, credentials)?;
    let keep = u32::try_from(found.checkpoints.len()).unwrap_or(u32::MAX).max(1);
    let options = Options { keep, credentials: credentials.cloned(), ..Options::new(found.vm, "store compact") };
    let mut writer = Writer::open(url, &options)?;
    let freed = writer.compact()?;
    writer.settle()?;
    Ok(freed)
}

/// Becomes the owner of a store without writing to it, so that the previous owner cannot commit any more. A restore
/// does this before it reads. An unused store is assigned to the first guest that is booted ([`Guest::Booted`]).
///
/// # Errors
/// Errors of [`Writer::open`].
pub fn fence(
    url: &StoreUrl,
    vm: &Vm,
    owner: &Owner,
    only_if: Option<OnlyIf>,
    credentials: Option<&Credentials>,
) -> Result<Fenced> {
    fencing::fence(Storage::of(url, credentials)?, vm, owner, only_if)
}
