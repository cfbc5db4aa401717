//! What this host knows of the store of a VM: `/var/lib/rekindle/stores/NAME.json`.
//!
//! A store that is encrypted cannot be forged, but an attacker that can write to it can show an older state of it, or another
//! store. A host that has used the store before detects that. The run directory cannot keep this knowledge: it is
//! removed with the VM, and lost when the host reboots.

use rekindle_store::types::KnownStore;
use rekindle_store::{Credentials, StoreUrl};
use rekindle_vm::host::{Host, make_private};
use rekindle_vm::rundir::{ignore_missing, write_json};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::PathBuf;

/// Why a store must not be used.
#[derive(Debug, thiserror::Error)]
pub enum KnownStoreError {
    #[error(
        "{}: cannot be read, so it is unknown which store VM {name} has; correct the file; or, if the store is certainly the \
         right one: rekindle store forget {name}",
        path.display()
    )]
    Read {
        path: PathBuf,
        name: String,
        #[source]
        source: io::Error,
    },
    #[error(
        "the checkpoints of VM {name} are encrypted (in {store}), and no key was given: give --key-file or --key-command; to use \
         a store without encryption from now on: rekindle store forget {name}"
    )]
    NoKey { name: String, store: StoreUrl },
}

/// Content of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// Where the store was, for messages.
    store: StoreUrl,
    #[serde(flatten)]
    known: KnownStore,
}

/// The file about the store of one VM.
#[derive(Debug, Clone)]
pub struct KnownStoreFile {
    name: String,
    path: PathBuf,
}

impl KnownStoreFile {
    #[must_use]
    pub fn of(host: &Host, name: &str) -> Self {
        Self { name: name.to_owned(), path: host.known_store(name) }
    }

    /// Returns the file of a VM in a directory of a test.
    #[cfg(test)]
    pub(crate) fn in_directory(directory: &std::path::Path, name: &str) -> Self {
        Self { name: name.to_owned(), path: directory.join("stores").join(format!("{name}.json")) }
    }

    /// Returns what is known, and rejects credentials without a key if the store is known to be encrypted: an attacker may
    /// have exchanged it for one without encryption.
    ///
    /// # Errors
    /// [`KnownStoreError`].
    pub(crate) fn check(&self, credentials: Option<&Credentials>) -> Result<Option<KnownStore>, KnownStoreError> {
        let Some(Record { store, known }) = self.read()? else { return Ok(None) };
        let has_key = credentials.is_some_and(|credentials| credentials.keys.is_some());
        if known.encrypted && !has_key {
            return Err(KnownStoreError::NoKey { name: self.name.clone(), store });
        }
        Ok(Some(known))
    }

    fn read(&self) -> Result<Option<Record>, KnownStoreError> {
        let failed = |source| KnownStoreError::Read { path: self.path.clone(), name: self.name.clone(), source };
        match fs::read(&self.path) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| failed(e.into())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed(e)),
        }
    }

    /// Records the state of the VM's store, unless a later owner of this host has done so.
    pub(crate) fn note(&self, store: &StoreUrl, known: KnownStore) {
        let is_outdated =
            |record: &Record| record.known.id == known.id && record.known.reached.epoch > known.reached.epoch;
        match self.read() {
            Ok(Some(record)) if is_outdated(&record) => {}
            _ => self.replace(store, known),
        }
    }

    /// Records the state of the VM's store, whatever was known before. If that fails, later checks are weaker; the guest is
    /// protected nevertheless.
    pub(crate) fn replace(&self, store: &StoreUrl, known: KnownStore) {
        let record = Record { store: store.clone(), known };
        let directory = self.path.parent().map_or(Ok(()), make_private);
        if let Err(e) = directory.and_then(|()| write_json(&self.path, &record)) {
            // The record of another store would prevent a restore from this one.
            let is_removed = ignore_missing(fs::remove_file(&self.path)).is_ok();
            let effect = match is_removed {
                true => "this host does not notice if the store is rolled back",
                false => "this host may reject the store at the next restore",
            };
            tracing::warn!("{}: {e}; {effect}", self.path.display());
        }
    }

    /// Forgets what is known, so that any store of the VM can be used. Returns whether anything was known.
    ///
    /// # Errors
    /// Errors of removing the file.
    pub fn forget(&self) -> io::Result<bool> {
        let existed = self.path.try_exists()?;
        ignore_missing(fs::remove_file(&self.path))?;
        Ok(existed)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use rekindle_store::keys::KeySource;
    use rekindle_store::types::KnownState;
    use uuid::Uuid;

    #[test]
    fn a_host_remembers_the_store_until_it_forgets_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = KnownStoreFile::in_directory(dir.path(), "web");
        assert_eq!(file.check(None).unwrap(), None);
        let reached = KnownState { epoch: 3, checkpoint: 7 };
        let known = KnownStore { id: Uuid::from_u128(1), encrypted: false, reached, footer: u64::MAX, claim_footer: 1 };
        let store: StoreUrl = "s3://bucket/web".parse().unwrap();
        file.note(&store, known);
        assert_eq!(file.check(None).unwrap(), Some(known));
        let earlier = KnownStore { reached: KnownState { epoch: 2, checkpoint: 6 }, ..known };
        file.note(&store, earlier);
        assert_eq!(file.check(None).unwrap(), Some(known));
        file.replace(&store, earlier);
        assert_eq!(file.check(None).unwrap(), Some(earlier));
        // From now on, a key is required.
        file.note(&store, KnownStore { encrypted: true, ..known });
        let e = file.check(None).unwrap_err().to_string();
        assert!(e.contains("s3://bucket/web") && e.contains("rekindle store forget web"), "{e}");
        let credentials = Credentials { keys: Some(KeySource::File("/keys".into())), ..Credentials::default() };
        assert!(file.check(Some(&credentials)).unwrap().unwrap().encrypted);
        assert!(file.forget().unwrap() && !file.forget().unwrap());
        assert_eq!(file.check(None).unwrap(), None);
    }

    #[test]
    fn a_record_that_cannot_be_read_is_an_error_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let file = KnownStoreFile::in_directory(dir.path(), "web");
        fs::create_dir(dir.path().join("stores")).unwrap();
        fs::write(&file.path, "{").unwrap();
        let e = file.check(None).unwrap_err();
        assert!(matches!(e, KnownStoreError::Read { .. }) && e.to_string().contains("store forget web"), "{e}");
        file.forget().unwrap();
        file.check(None).unwrap();
    }
}
