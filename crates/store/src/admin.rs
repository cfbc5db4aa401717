//! Administration of a store in a directory or on a server.

use crate::disk::{Disk, LocalDisk};
use crate::error::Result;
use crate::home::Home;
use crate::listing::{Listing, list};
use crate::log;
use crate::remote::{self, Identity, SpareConnections};
use crate::types::{Guest, OnlyIf, Owner, Vm};
use crate::url::StoreUrl;
use crate::verify::{Verified, verify};
use crate::writer::{Options, Writer};
use std::path::Path;
use std::sync::Arc;

/// Callback for progress: bytes done, bytes in total.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

pub(crate) fn home(path: &Path) -> Result<Home> {
    Home::open(Arc::new(LocalDisk::new(path)), None)
}

/// Creates a store without a VM. The first VM that is protected with the store, or that a cluster manager boots with
/// it, becomes the store's VM.
///
/// # Errors
/// [`crate::StoreError::Exists`] (the existing store is unchanged); [`crate::StoreError::NotEmpty`]; for a store on a
/// server also [`crate::StoreError::Connection`].
pub fn init(url: &StoreUrl, identity: Option<&Identity>) -> Result<()> {
    match url {
        StoreUrl::Directory(path) => {
            let disk: Arc<dyn Disk> = Arc::new(LocalDisk::new(path));
            Home::init(&disk)
        }
        StoreUrl::Remote(server) => remote::init(server, identity),
    }
}

/// Lists the contents of a store.
///
/// # Errors
/// [`crate::StoreError::NotAStore`]; damage to the log; for a store on a server also [`crate::StoreError::Connection`].
pub fn listing(url: &StoreUrl, identity: Option<&Identity>) -> Result<Listing> {
    match url {
        StoreUrl::Directory(path) => list(&home(path)?),
        StoreUrl::Remote(server) => remote::listing(server, identity),
    }
}

/// Verifies every byte of a store that is in use. A server verifies its own stores.
///
/// # Errors
/// Errors of [`listing`]. Damage that is found is no error: the result lists it.
pub fn verified(url: &StoreUrl, identity: Option<&Identity>, progress: Progress<'_>) -> Result<Verified> {
    match url {
        StoreUrl::Directory(path) => verify(&home(path)?, progress),
        StoreUrl::Remote(server) => remote::verified(server, identity),
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

/// Result of [`fence`]: no previous owner can commit to the store any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fenced {
    /// New owner epoch.
    pub epoch: u64,
    /// Number of the newest checkpoint, which cannot change any more; 0 if there is none.
    pub newest: u64,
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
    match url {
        StoreUrl::Directory(path) => {
            fence_in(Arc::new(LocalDisk::new(path)), vm, owner, only_if).map(|(_, fenced)| fenced)
        }
        StoreUrl::Remote(server) => remote::fence(server, vm, owner, only_if, identity, spare),
    }
}

pub(crate) fn fence_in(disk: Arc<dyn Disk>, vm: &Vm, owner: &Owner, only_if: Option<OnlyIf>) -> Result<(Home, Fenced)> {
    let home = match (owner.guest, only_if) {
        (Guest::Booted, None) => Home::open_for(disk, vm, false)?,
        _ => Home::open(disk, Some(vm.uuid))?,
    };
    let (claim, tail) = log::claim(&home, owner, only_if)?;
    let newest = tail.state.and_then(|(_, manifest)| manifest.newest()).map_or(0, |kept| kept.number);
    Ok((home, Fenced { epoch: claim.epoch, newest }))
}
