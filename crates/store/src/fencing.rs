//! Becomes the owner of a store without writing checkpoints to it. The new owner's *claim*, an entry of
//! the log, makes each later commit of a previous owner fail ([`log`]).

use crate::directory::StoreDirectory;
use crate::error::Result;
use crate::location::Storage;
use crate::log;
use crate::types::{Guest, KnownStore, OnlyIf, Owner, Vm};

/// A store that was fenced: no previous owner can commit to it any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fenced {
    /// New owner epoch.
    pub epoch: u64,
    /// Number of the newest checkpoint, which cannot change any more; 0 if there is none.
    pub newest: u64,
    /// What is known of the store now.
    pub known: KnownStore,
}

/// Claims the store in `storage` for `owner`. An unused store is assigned to the first guest that is booted
/// ([`Guest::Booted`]).
///
/// # Errors
/// Errors of opening the store and of [`log::claim`].
pub(crate) fn fence(storage: impl Into<Storage>, vm: &Vm, owner: &Owner, only_if: Option<OnlyIf>) -> Result<Fenced> {
    let store = match (owner.guest, only_if) {
        (Guest::Booted, None) => StoreDirectory::open_for(storage, vm, false)?,
        (Guest::Booted, Some(OnlyIf::Expected(expected))) if expected.allows_unused() => {
            StoreDirectory::open_for(storage, vm, false)?
        }
        _ => StoreDirectory::open(storage, Some(vm.uuid))?,
    };
    let (claim, tail) = log::claim(&store, owner, only_if)?;
    let known = KnownStore::of(&store, &claim, tail.newest_state.and_then(|state| state.manifest.newest()));
    Ok(Fenced { epoch: claim.epoch, newest: known.reached.checkpoint, known })
}
