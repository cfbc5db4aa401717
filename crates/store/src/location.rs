//! Where a store is: on a disk, whose operations this process does itself, or on a server of Rekindle.

use crate::disk::{Disk, LocalDisk};
use crate::error::{Result, StoreError};
use crate::objects::ObjectDisk;
use crate::url::{Remote, StoreUrl};
use std::sync::Arc;

pub(crate) enum Location<'a> {
    Disk(Arc<dyn Disk>),
    Server(&'a Remote),
}

impl<'a> Location<'a> {
    /// Returns the location of a store, which need not exist.
    ///
    /// # Errors
    /// [`StoreError::Io`] if the settings of an object store are wrong.
    pub fn of(url: &'a StoreUrl) -> Result<Self> {
        Ok(match url {
            StoreUrl::Directory(path) => Self::Disk(Arc::new(LocalDisk::new(path))),
            StoreUrl::Remote(server) => Self::Server(server),
            StoreUrl::Objects(address) => {
                let failed =
                    |e| StoreError::io(&address.to_string(), "", "reading the settings of the object store", e);
                Self::Disk(Arc::new(ObjectDisk::new(address).map_err(failed)?))
            }
        })
    }
}
