//! What an administrator does with a store, wherever it is.

use crate::disk::{Disk, LocalDisk};
use crate::error::Result;
use crate::home::Home;
use crate::listing::{Listing, list};
use crate::log;
use crate::remote::{self, Identity, Spare};
use crate::types::{Guest, OnlyIf, Owner, Vm};
use crate::url::StoreUrl;
use crate::verify::{Verified, verify};
use crate::writer::{Options, Writer};
use std::path::Path;
use std::sync::Arc;

/// Bytes that were looked at, and how many there are.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

pub(crate) fn home(path: &Path) -> Result<Home> {
    Home::open(Arc::new(LocalDisk::new(path)), None)
}

/// Creates a store that no VM uses yet: it belongs to the first that is protected, or booted by a cluster manager, with it.
///
/// # Errors
/// [`crate::StoreError::Exists`], and then nothing was changed; [`crate::StoreError::NotEmpty`]; for one on a server also
/// [`crate::StoreError::Line`].
pub fn init(url: &StoreUrl, identity: Option<&Identity>) -> Result<()> {
    match url {
        StoreUrl::Directory(path) => {
            let disk: Arc<dyn Disk> = Arc::new(LocalDisk::new(path));
            Home::init(&disk)
        }
        StoreUrl::Remote(server) => remote::init(server, identity),
    }
}

/// What is in a store.
///
/// # Errors
/// [`crate::StoreError::NotAStore`], damage by name; for one on a server also [`crate::StoreError::Line`].
pub fn listing(url: &StoreUrl, identity: Option<&Identity>) -> Result<Listing> {
    match url {
        StoreUrl::Directory(path) => list(&home(path)?),
        StoreUrl::Remote(server) => remote::listing(server, identity),
    }
}

/// Look at every byte that counts of a store. One on a server is looked at there.
///
/// # Errors
/// As [`listing`]; what is found to be bad is in the answer.
pub fn verified(url: &StoreUrl, identity: Option<&Identity>, progress: Progress<'_>) -> Result<Verified> {
    match url {
        StoreUrl::Directory(path) => verify(&home(path)?, progress),
        StoreUrl::Remote(server) => remote::verified(server, identity),
    }
}

/// Free all room that can be freed; the bytes. This becomes the owner of the store: a loop that still protects the VM into
/// it is refused from then on.
///
/// # Errors
/// As [`Writer::open`].
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

/// A store that nobody else can commit to any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fenced {
    /// The new owner epoch.
    pub epoch: u64,
    /// The newest checkpoint, now for good; 0 if there is none.
    pub newest: u64,
}

/// Become the owner of a store without writing to it: whoever was it before can commit nothing any more. A restore does this
/// before it reads. The first guest that is booted ([`Guest::Booted`]) gets a store that is unused.
///
/// # Errors
/// As [`Writer::open`].
pub fn fence(
    url: &StoreUrl,
    vm: &Vm,
    owner: &Owner,
    only_if: Option<OnlyIf>,
    identity: Option<&Identity>,
) -> Result<Fenced> {
    fence_over(&Spare::default(), url, vm, owner, only_if, identity)
}

/// As [`fence`], over a line to a server that is there already.
///
/// # Errors
/// As [`fence`].
pub fn fence_over(
    spare: &Spare,
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
