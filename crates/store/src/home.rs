//! The directory of a store: opening, making, reading its files whole.

use crate::disk::{Disk, DiskFile};
use crate::error::{Result, StoreError};
use crate::format::names;
use crate::format::page::Digester;
use crate::format::superblock::Superblock;
use crate::types::{Vm, now_us};
use std::io;
use std::sync::Arc;
use uuid::Uuid;

/// A store whose superblock was read.
#[derive(Debug, Clone)]
pub(crate) struct Home {
    pub disk: Arc<dyn Disk>,
    pub id: Uuid,
    pub vm: Vm,
    pub created_us: u64,
}

impl Home {
    /// Open the store in `disk`; with `expected`, only if it is of that VM.
    ///
    /// # Errors
    /// [`StoreError::NotAStore`], [`StoreError::Unused`], [`StoreError::OtherVm`], [`StoreError::Damaged`], [`StoreError::Newer`].
    pub fn open(disk: Arc<dyn Disk>, expected: Option<Uuid>) -> Result<Self> {
        let store = disk.name().to_owned();
        let bytes = match read_whole(&disk, names::SUPERBLOCK, 1 << 16) {
            Ok(bytes) => bytes,
            Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Err(match disk.open(names::UNUSED) {
                    Ok(_) => StoreError::Unused { store },
                    Err(_) => StoreError::NotAStore { store },
                });
            }
            Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotADirectory => {
                return Err(StoreError::NotADirectory { store });
            }
            Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
                return Err(StoreError::Denied { store, source });
            }
            Err(e) => return Err(e),
        };
        let block = Superblock::decode(&bytes).map_err(|flaw| StoreError::flaw(&store, names::SUPERBLOCK, flaw))?;
        if let Some(expected) = expected.filter(|expected| *expected != block.vm.uuid) {
            return Err(StoreError::OtherVm { store, found: block.vm, expected, name: None });
        }
        Ok(Self { disk, id: block.id, vm: block.vm, created_us: block.created_us })
    }

    /// Creates a store in `disk` that no VM uses yet: [`Home::open_for`] gives it to the first one. One that was half created is finished.
    ///
    /// # Errors
    /// [`StoreError::Exists`], and then nothing was changed; [`StoreError::NotEmpty`]; [`StoreError::NoSpace`].
    pub fn init(disk: &Arc<dyn Disk>) -> Result<()> {
        let store = disk.name().to_owned();
        match Self::open(disk.clone(), None) {
            Err(StoreError::NotAStore { .. }) => {}
            Err(StoreError::Unused { store }) => return Err(StoreError::Exists { store, vm: None }),
            Ok(home) => return Err(StoreError::Exists { store, vm: Some(home.vm) }),
            Err(e) => return Err(e),
        }
        create_directories(disk)?;
        // Its name says it all.
        let file = match disk.create(names::UNUSED) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Err(StoreError::Exists { store, vm: None }),
            other => other.map_err(|e| StoreError::io(&store, names::UNUSED, "creating the file", e))?,
        };
        file.sync().map_err(|e| StoreError::io(&store, names::UNUSED, "making the file durable", e))?;
        disk.sync_directory("").map_err(|e| StoreError::io(&store, "", "making the store durable", e))
    }

    /// Opens the store in `disk` for `vm`, which it belongs to from then on if it was unused. Where there is none, creates it only if
    /// `create`: the path may be mistyped, or its file system not be mounted. One that was half created is finished; of two that create
    /// it concurrently, both get the same.
    ///
    /// # Errors
    /// As [`Home::open`]; [`StoreError::NotEmpty`]; [`StoreError::NoSpace`] and then nothing but empty directories is left.
    pub fn open_for(disk: Arc<dyn Disk>, vm: &Vm, create: bool) -> Result<Self> {
        let name_it = |e| match e {
            StoreError::OtherVm { store, found, expected, .. } => {
                StoreError::OtherVm { store, found, expected, name: Some(vm.name.clone()) }
            }
            other => other,
        };
        match Self::open(disk.clone(), Some(vm.uuid)) {
            Err(StoreError::Unused { .. }) => {}
            Err(StoreError::NotAStore { .. }) if create => {}
            other => return other.map_err(name_it),
        }
        let store = disk.name().to_owned();
        create_directories(&disk)?;
        let block = Superblock { id: Uuid::new_v4(), vm: vm.clone(), created_us: now_us() };
        let new = format!("{}00000000-{}", names::NEW, Uuid::new_v4().simple());
        let written = write_new(&disk, &new, &block.encode()).and_then(|()| {
            match disk.link(&new, names::SUPERBLOCK) {
                // Somebody else was first, and may have tidied up what we had written: theirs holds.
                Err(e) if matches!(e.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound) => Ok(()),
                other => other.map_err(|e| StoreError::io(&store, names::SUPERBLOCK, "linking the superblock", e)),
            }
        });
        let _ = disk.remove(&new);
        written?;
        disk.sync_directory("").map_err(|e| StoreError::io(&store, "", "making the superblock durable", e))?;
        // Left over, it means nothing: there is a superblock.
        let _ = disk.remove(names::UNUSED);
        Self::open(disk, Some(vm.uuid)).map_err(name_it)
    }

    /// Where it is, for messages.
    pub fn name(&self) -> &str {
        self.disk.name()
    }

    /// The digester of its pages.
    pub fn digester(&self) -> Digester {
        Digester::new(self.id)
    }

    /// The system refused `doing` with file `name`.
    pub fn failed<'a>(&'a self, name: &'a str, doing: &'static str) -> impl FnOnce(io::Error) -> StoreError + 'a {
        move |e| StoreError::io(self.name(), name, doing, e)
    }

    /// Bytes of the file `name`, exactly `len` of them at `at`, or as many as it has.
    pub fn read_at(&self, file: &Arc<dyn DiskFile>, name: &str, at: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let found = file.read_at(&mut bytes, at).map_err(self.failed(name, "reading"))?;
        bytes.truncate(found);
        Ok(bytes)
    }
}

/// Creates the directories of a store, durably, where nothing else is.
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
            || name.starts_with(names::NEW)
    };
    let there = disk.list("").map_err(failed("looking into the directory"))?;
    if let Some((found, _)) = there.into_iter().find(|(name, _)| !ours(name) && name != "lost+found") {
        return Err(StoreError::NotEmpty { store: disk.name().to_owned(), found });
    }
    for directory in [names::LOG, names::SEGMENTS, names::INDEX] {
        disk.create_directory(directory).map_err(failed("creating a directory in it"))?;
    }
    disk.sync_directory("").map_err(failed("making the directory durable"))
}

/// The content of a file of at most `limit` bytes.
pub(crate) fn read_whole(disk: &Arc<dyn Disk>, name: &str, limit: u64) -> Result<Vec<u8>> {
    let failed = |doing| move |e| StoreError::io(disk.name(), name, doing, e);
    let file = disk.open(name).map_err(failed("opening"))?;
    let len = file.length().map_err(failed("looking at its length"))?;
    if len > limit {
        let e = io::Error::new(io::ErrorKind::InvalidData, format!("{len} bytes long; at most {limit} make sense"));
        return Err(failed("reading")(e));
    }
    let mut bytes = vec![0; len as usize];
    let found = file.read_at(&mut bytes, 0).map_err(failed("reading"))?;
    bytes.truncate(found);
    Ok(bytes)
}

/// Make the file `name` with `content`, durable but for its name.
pub(crate) fn write_new(disk: &Arc<dyn Disk>, name: &str, content: &[u8]) -> Result<()> {
    let failed = |doing| move |e| StoreError::io(disk.name(), name, doing, e);
    let file = disk.create(name).map_err(failed("making the file"))?;
    file.write_at(content, 0).map_err(failed("writing"))?;
    file.sync().map_err(failed("making the file durable"))
}
