//! Administration of a store.

use crate::directory::StoreDirectory;
use crate::error::Result;
use crate::fencing::fence_directory;
use crate::listing::{Listing, list};
use crate::location::Location;
use crate::remote::{self, Identity, SpareConnections};
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
/// [`crate::StoreError::Exists`] (the existing store is unchanged); [`crate::StoreError::NotEmpty`]; for a store on a
/// server also [`crate::StoreError::Connection`].
pub fn init(url: &StoreUrl, identity: Option<&Identity>) -> Result<()> {
    match Location::of(url)? {
        Location::Disk(disk) => StoreDirectory::init(&disk),
        Location::Server(server) => remote::init(server, identity),
    }
}

/// Lists the contents of a store.
///
/// # Errors
/// [`crate::StoreError::NotAStore`]; damage to the log; for a store on a server also [`crate::StoreError::Connection`].
pub fn listing(url: &StoreUrl, identity: Option<&Identity>) -> Result<Listing> {
    match Location::of(url)? {
        Location::Disk(disk) => list(&StoreDirectory::open(disk, None)?),
        Location::Server(server) => remote::listing(server, identity),
    }
}

/// Verifies every byte of a store that is in use. A server verifies its own stores.
///
/// # Errors
/// Errors of [`listing`]. Damage that is found is no error: the result lists it.
pub fn verified(url: &StoreUrl, identity: Option<&Identity>, progress: Progress<'_>) -> Result<Verified> {
    match Location::of(url)? {
        Location::Disk(disk) => verify(&StoreDirectory::open(disk, None)?, progress),
        Location::Server(server) => remote::verified(server, identity),
    }
}

/// Frees all space that can be freed. Returns the number of bytes. Becomes the owner of the store: a protector that
/// still writes to it cannot commit any more.
///
/// # Errors
/// Errors of [`Writer::open`] and [`Writer::compact`].
pub fn compact(url: &StoreUrl, identity: Option<&Identity>) -> Result<u64> {
    let found = listing(url, identity)?;
    let keep = u32::try_from(found.checkpoints.len()).unwrap_or(u32::MAX).max(1);
    let identity = identity.cloned();
    let options = Options { keep, identity, ..Options::new(found.vm, "store compact") };
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
    identity: Option<&Identity>,
) -> Result<Fenced> {
    fence_over(&SpareConnections::default(), url, vm, owner, only_if, identity)
}

/// Fences a store like [`fence`], over an open connection from `spare` if there is one.
///
/// # Errors
/// Errors of [`fence`].
pub fn fence_over(
    spare: &SpareConnections,
    url: &StoreUrl,
    vm: &Vm,
    owner: &Owner,
    only_if: Option<OnlyIf>,
    identity: Option<&Identity>,
) -> Result<Fenced> {
    match Location::of(url)? {
        Location::Disk(disk) => fence_directory(disk, vm, owner, only_if).map(|(_, fenced)| fenced),
        Location::Server(server) => remote::fence(server, vm, owner, only_if, identity, spare),
    }
}
