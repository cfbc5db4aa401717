//! The directory of a store: opens and creates it, and reads whole files.

use crate::disk::Disk;
use crate::error::{Result, StoreError};
use crate::format::names;
use crate::format::page::Digester;
use crate::format::superblock::{Superblock, authenticate};
use crate::format::{Flaw, Structure};
use crate::location::Storage;
use crate::sealing::{FileIdentity, FileKey, Seal, StoreKeys};
use crate::types::{Vm, now_us};
use rekindle_kernel::durable_file::DurableFile;
use std::io;
use std::sync::Arc;
use uuid::Uuid;

/// A store directory whose superblock was read.
#[derive(Debug, Clone)]
pub(crate) struct StoreDirectory {
    pub disk: Arc<dyn Disk>,
    pub id: Uuid,
    pub vm: Vm,
    pub created_us: u64,
    /// Keys of an encrypted store.
    keys: Option<StoreKeys>,
}

impl StoreDirectory {
    /// Opens the store in `storage`; with `expected`, only if the store belongs to that VM.
    ///
    /// # Errors
    /// [`StoreError::NotAStore`], [`StoreError::Unused`], [`StoreError::OtherVm`], [`StoreError::Damaged`],
    /// [`StoreError::Newer`]; [`StoreError::Encrypted`], [`StoreError::NotEncrypted`], [`StoreError::UnknownKey`].
    pub fn open(storage: impl Into<Storage>, expected: Option<Uuid>) -> Result<Self> {
        let Storage { disk, keys } = storage.into();
        let store = disk.name().to_owned();
        let bytes = read_superblock(&disk)?;
        let flawed = |flaw| StoreError::flaw(&store, names::SUPERBLOCK, flaw);
        let (block, seal) = Superblock::decode(&bytes).map_err(flawed)?;
        let keys = match (keys, seal) {
            (None, None) => None,
            (None, Some(_)) => return Err(StoreError::Encrypted { store }),
            (Some(_), None) => return Err(StoreError::NotEncrypted { store }),
            (Some(keys), Some(seal)) => {
                let keys = StoreKeys::new(keys, block.id, block.vm.uuid);
                let key = keys.find(seal, FileIdentity::Superblock);
                let authentic =
                    key.ok_or(Flaw::UnknownKey { key: seal.key }).and_then(|key| authenticate(&bytes, &key));
                authentic.map_err(flawed)?;
                Some(keys)
            }
        };
        if let Some(expected) = expected.filter(|expected| *expected != block.vm.uuid) {
            return Err(StoreError::OtherVm { store, found: block.vm, expected, name: None });
        }
        Ok(Self { disk, id: block.id, vm: block.vm, created_us: block.created_us, keys })
    }

    /// Creates a store without a VM in `disk`: [`StoreDirectory::open_for`] assigns it to the first VM. Completes a
    /// store whose creation was interrupted.
    ///
    /// # Errors
    /// [`StoreError::Exists`] (the existing store is unchanged); [`StoreError::NotEmpty`]; [`StoreError::NoSpace`].
    pub fn init(disk: &Arc<dyn Disk>) -> Result<()> {
        let store = disk.name().to_owned();
        match read_superblock(disk) {
            Err(StoreError::NotAStore { .. }) => {}
            Err(StoreError::Unused { store }) => return Err(StoreError::Exists { store, vm: None }),
            Err(e) => return Err(e),
            Ok(bytes) => {
                let flawed = |flaw| StoreError::flaw(&store, names::SUPERBLOCK, flaw);
                let (block, _) = Superblock::decode(&bytes).map_err(flawed)?;
                return Err(StoreError::Exists { store, vm: Some(block.vm) });
            }
        }
        create_directories(disk)?;
        // The file is empty: only its name matters.
        match disk.create(names::UNUSED).and_then(|file| file.sync()) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Err(StoreError::Exists { store, vm: None }),
            created => created.map_err(|e| StoreError::io(&store, names::UNUSED, "creating the file", e))?,
        }
        disk.sync_directory("").map_err(|e| StoreError::io(&store, "", "making the store durable", e))
    }

    /// Opens the store in `storage` for `vm`. An unused store is assigned to `vm`, and becomes encrypted if there are
    /// keys. A missing store is created only with
    /// `create`, because the path may be mistyped or its file system not mounted. Completes a store whose creation was
    /// interrupted. Two processes that create the store concurrently get the same store.
    ///
    /// # Errors
    /// Errors of [`StoreDirectory::open`]; [`StoreError::NotEmpty`]; [`StoreError::NoSpace`], which leaves only empty
    /// directories.
    pub fn open_for(storage: impl Into<Storage>, vm: &Vm, create: bool) -> Result<Self> {
        let storage = storage.into();
        let disk = storage.disk.clone();
        let name_it = |e| match e {
            StoreError::OtherVm { store, found, expected, .. } => {
                StoreError::OtherVm { store, found, expected, name: Some(vm.name.clone()) }
            }
            other => other,
        };
        match Self::open(storage.clone(), Some(vm.uuid)) {
            Err(StoreError::Unused { .. }) => {}
            Err(StoreError::NotAStore { .. }) if create => {}
            other => return other.map_err(name_it),
        }
        let store = disk.name().to_owned();
        create_directories(&disk)?;
        let block = Superblock { id: Uuid::new_v4(), vm: vm.clone(), created_us: now_us() };
        let new = format!("{}00000000-{}", names::NEW, Uuid::new_v4().simple());
        let keys = storage.keys.clone().map(|keys| StoreKeys::new(keys, block.id, vm.uuid));
        let seal = keys.map(|keys| keys.create(FileIdentity::Superblock)).transpose();
        let content = seal.and_then(|seal| block.encode(seal.as_ref()));
        let content = content.map_err(|e| StoreError::io(&store, names::SUPERBLOCK, "encrypting", e))?;
        let written = write_new(&disk, &new, &content).and_then(|()| {
            match disk.link(&new, names::SUPERBLOCK) {
                // Another process has linked its superblock first, and may have removed our file. Its superblock is
                // valid.
                Err(e) if matches!(e.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound) => Ok(()),
                other => other.map_err(|e| StoreError::io(&store, names::SUPERBLOCK, "linking the superblock", e)),
            }
        });
        let _ = disk.remove(&new);
        written?;
        disk.sync_directory("").map_err(|e| StoreError::io(&store, "", "making the superblock durable", e))?;
        // If the file cannot be removed, it has no effect: the superblock takes precedence.
        let _ = disk.remove(names::UNUSED);
        Self::open(storage, Some(vm.uuid)).map_err(name_it)
    }

    /// Returns the name of the store for messages.
    pub fn name(&self) -> &str {
        self.disk.name()
    }

    pub fn is_encrypted(&self) -> bool {
        self.keys.is_some()
    }

    pub fn digester(&self) -> Digester {
        Digester::new(self.id)
    }

    /// Returns a new key for the file `name`, which is about to be created; `None` if the store is not encrypted.
    pub fn create_key(&self, file: FileIdentity, name: &str) -> Result<Option<(Seal, FileKey)>> {
        self.keys.as_ref().map(|keys| keys.create(file)).transpose().map_err(self.failed(name, "encrypting"))
    }

    /// Returns the key of an existing file, which its header names; `None` if the store is not encrypted.
    ///
    /// # Errors
    /// The file is sealed with a key that was not given. Either the file or the store is not encrypted, but the other
    /// is; the flaw is then one of `header`.
    pub fn find_key(
        &self,
        file: FileIdentity,
        seal: Option<Seal>,
        header: Structure,
    ) -> std::result::Result<Option<FileKey>, Flaw> {
        match (&self.keys, seal) {
            (None, None) => Ok(None),
            (Some(keys), Some(seal)) => keys.find(seal, file).map(Some).ok_or(Flaw::UnknownKey { key: seal.key }),
            (Some(_), None) => Err(Flaw::bad(header, 0, "it is not encrypted, but its store is")),
            (None, Some(_)) => Err(Flaw::bad(header, 0, "it is encrypted, but its store is not")),
        }
    }

    /// Converts the operating system's error for `doing` something with the file `name`.
    pub fn failed<'a>(&'a self, name: &'a str, doing: &'static str) -> impl FnOnce(io::Error) -> StoreError + 'a {
        move |e| StoreError::io(self.name(), name, doing, e)
    }

    /// Reads `len` bytes at offset `at` of the file `name`, or fewer at the end of the file.
    pub fn read_at(&self, file: &Arc<dyn DurableFile>, name: &str, at: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let found = file.read_at(&mut bytes, at).map_err(self.failed(name, "reading"))?;
        bytes.truncate(found);
        Ok(bytes)
    }
}

/// Reads the superblock of the store in `disk`.
fn read_superblock(disk: &Arc<dyn Disk>) -> Result<Vec<u8>> {
    read_whole(disk, names::SUPERBLOCK, 1 << 16).map_err(|e| match e {
        StoreError::Io { source, file, doing, store } => match source.kind() {
            io::ErrorKind::NotFound if disk.open(names::UNUSED).is_ok() => StoreError::Unused { store },
            io::ErrorKind::NotFound => StoreError::NotAStore { store },
            io::ErrorKind::NotADirectory => StoreError::NotADirectory { store },
            io::ErrorKind::PermissionDenied => StoreError::Denied { store, source },
            _ => StoreError::Io { store, file, doing, source },
        },
        e => e,
    })
}

/// Creates the directories of a store and makes them durable. Fails if the directory contains any other file.
fn create_directories(disk: &Arc<dyn Disk>) -> Result<()> {
    let failed = |doing| move |e: io::Error| StoreError::io(disk.name(), "", doing, e);
    disk.create_directory("").map_err(|e| match e.kind() {
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            StoreError::NotADirectory { store: disk.name().to_owned() }
        }
        _ => failed("creating the directory")(e),
    })?;
    let ours = |name: &str| {
        [names::LOG, names::SEGMENTS, names::INDEX, names::SUPERBLOCK, names::UNUSED].contains(&name)
            || name.starts_with(names::EXCLUSIVE)
            || name.starts_with(names::NEW)
    };
    let contents = disk.list("").map_err(failed("listing the directory"))?;
    if let Some((found, _)) = contents.into_iter().find(|(name, _)| !ours(name) && name != "lost+found") {
        return Err(StoreError::NotEmpty { store: disk.name().to_owned(), found });
    }
    check_exclusive_links(disk)?;
    for directory in [names::LOG, names::SEGMENTS, names::INDEX] {
        disk.create_directory(directory)
            .map_err(|e| StoreError::io(disk.name(), directory, "creating the directory", e))?;
    }
    disk.sync_directory("").map_err(failed("making the directory durable"))
}

/// Rejects a disk on which two processes could both become the owner of a store.
pub(crate) fn check_exclusive_links(disk: &Arc<dyn Disk>) -> Result<()> {
    let failed = |e| StoreError::io(disk.name(), names::EXCLUSIVE, "checking for conditional writes", e);
    disk.check_exclusive_links().map_err(failed)
}

/// Reads a file of at most `limit` bytes.
pub(crate) fn read_whole(disk: &Arc<dyn Disk>, name: &str, limit: u64) -> Result<Vec<u8>> {
    let failed = |doing| move |e| StoreError::io(disk.name(), name, doing, e);
    let file = disk.open(name).map_err(failed("opening"))?;
    let len = file.length().map_err(failed("reading its length"))?;
    if len > limit {
        let e = io::Error::new(io::ErrorKind::InvalidData, format!("{len} bytes long; at most {limit} are possible"));
        return Err(failed("reading")(e));
    }
    let mut bytes = vec![0; len as usize];
    let found = file.read_at(&mut bytes, 0).map_err(failed("reading"))?;
    bytes.truncate(found);
    Ok(bytes)
}

/// Creates the file `name` with `content` and makes the content durable, but not the name.
pub(crate) fn write_new(disk: &Arc<dyn Disk>, name: &str, content: &[u8]) -> Result<()> {
    let failed = |doing| move |e| StoreError::io(disk.name(), name, doing, e);
    let file = disk.create(name).map_err(failed("creating the file"))?;
    file.write_at(content, 0).map_err(failed("writing"))?;
    file.sync().map_err(failed("making the file durable"))
}
