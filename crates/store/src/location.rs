//! A store's disk, by its address.

use crate::credentials::{Credentials, Retries};
use crate::disk::{Disk, LocalDisk};
use crate::environment_file::EnvironmentFile;
use crate::error::{Result, StoreError};
use crate::keys::KeySource;
use crate::objects::ObjectDisk;
use crate::sealing::KeyRing;
use crate::url::StoreUrl;
use std::sync::Arc;

/// A disk, and the keys for an encrypted store on it.
#[derive(Debug, Clone)]
pub struct Storage {
    pub disk: Arc<dyn Disk>,
    pub keys: Option<Arc<KeyRing>>,
}

impl From<Arc<dyn Disk>> for Storage {
    fn from(disk: Arc<dyn Disk>) -> Self {
        Self { disk, keys: None }
    }
}

impl<D: Disk + 'static> From<Arc<D>> for Storage {
    fn from(disk: Arc<D>) -> Self {
        Self { disk, keys: None }
    }
}

impl Storage {
    /// Returns the storage of a store, which need not exist.
    ///
    /// # Errors
    /// [`StoreError::Io`] if the settings of an object store are wrong; [`StoreError::EnvironmentFile`];
    /// [`StoreError::Keys`].
    pub(crate) fn of(url: &StoreUrl, credentials: Option<&Credentials>) -> Result<Self> {
        let disk: Arc<dyn Disk> = match url {
            StoreUrl::Directory(path) => Arc::new(LocalDisk::new(path)),
            StoreUrl::Objects(address) => {
                let failed =
                    |e| StoreError::io(&address.to_string(), "", "reading the settings of the object store", e);
                let file = credentials.and_then(|credentials| credentials.environment_file.as_ref());
                let variables = file.map(EnvironmentFile::variables).transpose()?.unwrap_or_default();
                let retries = credentials.map_or(Retries::default(), |credentials| credentials.retries);
                Arc::new(ObjectDisk::new(address, &variables, retries).map_err(failed)?)
            }
        };
        let keys = credentials.and_then(|credentials| credentials.keys.as_ref());
        Ok(Self { disk, keys: keys.map(KeySource::keys).transpose()? })
    }
}
