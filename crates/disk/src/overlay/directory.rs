//! The directory of a disk's overlays: the state file, one qcow2 file for each epoch, and *heads*.
//!
//! A head of epoch N is a copy of the overlay of epoch N + 1, made in the pause of a checkpoint. It has what the guest has
//! written since epoch N ended. Several checkpoints may copy the same overlay, so an epoch may have several heads.
//!
//! One process at a time has the directory claimed. The files are created and removed here; their content is QEMU's.

use super::OverlayError;
use super::state::{FIRST_EPOCH, OverlayState};
use crate::redo::files::LogFiles;
use crate::slots::{Counted, SLOT_BYTES, confirm_newest, newest_slot, slot_offset, write_slot};
use rekindle_kernel::durable_file::DurableFile;
use rekindle_kernel::uring::Buffer;
use std::io;
use std::path::{Path, PathBuf};

const STATE_NAME: &str = "state";
/// Exists while other programs can merge into what checkpoints need, and until it is certain that none has.
const EXPOSED_NAME: &str = "exposed";
const STATE_BYTES: u64 = 2 * SLOT_BYTES;

/// Returns the name of the file with an epoch's writes.
#[must_use]
pub fn overlay_file_name(epoch: u64) -> String {
    format!("epoch-{epoch:012}.qcow2")
}

/// Returns the epoch whose overlay has this file name.
#[must_use]
pub fn epoch_of_file(name: &str) -> Option<u64> {
    let epoch = name.strip_prefix("epoch-")?.strip_suffix(".qcow2")?.parse().ok()?;
    (overlay_file_name(epoch) == name).then_some(epoch)
}

/// One of the heads of an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct OverlayHead {
    pub epoch: u64,
    /// Ascends from 1. Earlier versions made one head of an epoch, which has 0.
    pub number: u64,
}

impl OverlayHead {
    fn file_name(self) -> String {
        let Self { epoch, number } = self;
        match number {
            0 => format!("head-{epoch:012}.qcow2"),
            _ => format!("head-{epoch:012}-{number}.qcow2"),
        }
    }

    fn from_file_name(name: &str) -> Option<Self> {
        let numbers = name.strip_prefix("head-")?.strip_suffix(".qcow2")?;
        let (epoch, number) = numbers.split_once('-').unwrap_or((numbers, "0"));
        let head = Self { epoch: epoch.parse().ok()?, number: number.parse().ok()? };
        (head.file_name() == name).then_some(head)
    }
}

/// The claimed directory of a disk's overlays.
#[derive(Debug)]
pub struct OverlayDirectory<D: LogFiles> {
    files: D,
    state_file: D::File,
    state: OverlayState,
    /// The count of the state's slot.
    count: u64,
    _claim: D::Claim,
}

fn failed<D: LogFiles>(files: &D, doing: &'static str) -> impl FnOnce(io::Error) -> OverlayError {
    let path = files.path().to_owned();
    move |source| match source.kind() {
        io::ErrorKind::ResourceBusy => OverlayError::InUse { path },
        _ => OverlayError::Io { path, doing, source },
    }
}

impl<D: LogFiles> OverlayDirectory<D> {
    /// Creates the directory of a disk that has no overlays, or an empty one. What an interrupted creation or end has
    /// left is removed.
    ///
    /// # Errors
    /// [`OverlayError::Occupied`] if there is a file that may be needed; nothing is changed then.
    pub fn create(files: D, state: OverlayState) -> Result<Self, OverlayError> {
        files.create_directory().map_err(failed(&files, "making the directory"))?;
        let claim = files.claim().and_then(|claim| claim.ok_or(io::ErrorKind::NotFound.into()));
        let claim = claim.map_err(failed(&files, "locking the directory"))?;
        for name in files.list().map_err(failed(&files, "reading the directory"))? {
            let beginning = if name == STATE_NAME { files.peek(&name, STATE_BYTES) } else { Ok(None) };
            let beginning = beginning.map_err(failed(&files, "reading its state"))?;
            // The creation ended before the first state was durable.
            let is_unused =
                beginning.is_some_and(|state| matches!(newest_slot::<OverlayState>(&state.bytes), Ok(None)));
            if !is_unused {
                return Err(OverlayError::Occupied { path: files.path().to_owned(), name });
            }
            files.remove(&name).map_err(failed(&files, "removing what was left there"))?;
        }
        let state_file = files.create(STATE_NAME).map_err(failed(&files, "making its state"))?;
        state_file.write_at(&Buffer::new(STATE_BYTES as usize), 0).map_err(failed(&files, "making its state"))?;
        let mut directory = Self { files, state_file, state, count: 0, _claim: claim };
        directory.record(|_| ())?;
        directory.sync_names()?;
        Ok(directory)
    }

    /// Opens the directory; `None` if the disk has no overlays.
    ///
    /// # Errors
    /// [`OverlayError::InUse`]; [`OverlayError::DamagedState`] if there are overlays without a valid state.
    pub fn open(files: D) -> Result<Option<Self>, OverlayError> {
        let Some(claim) = files.claim().map_err(failed(&files, "locking the directory"))? else { return Ok(None) };
        let names = files.list().map_err(failed(&files, "reading the directory"))?;
        let has_overlays = names.iter().any(|name| epoch_of_file(name).is_some());
        let damaged = || OverlayError::DamagedState { path: files.path().to_owned() };
        let state_file = match files.open(STATE_NAME) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return if has_overlays { Err(damaged()) } else { Ok(None) };
            }
            opened => opened.map_err(failed(&files, "opening its state"))?,
        };
        let mut slots = Buffer::new(STATE_BYTES as usize);
        state_file.read_at(&mut slots, 0).map_err(failed(&files, "reading its state"))?;
        let newest = newest_slot(&slots);
        match newest.map_err(|found| OverlayError::NewerFormat { path: files.path().to_owned(), found })? {
            None if has_overlays => Err(damaged()),
            None => Ok(None),
            Some(Counted { count, state }) => {
                confirm_newest(&state_file, &slots, count).map_err(failed(&files, "making its state durable"))?;
                Ok(Some(Self { files, state_file, state, count, _claim: claim }))
            }
        }
    }

    /// Reads the state of a directory that another process may have claimed. `None`: it has no valid state.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn peek(files: &D) -> Result<Option<OverlayState>, OverlayError> {
        match files.peek(STATE_NAME, STATE_BYTES) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            start => {
                let start = start.map_err(failed(files, "reading its state"))?;
                let newest = start.map(|start| newest_slot::<OverlayState>(&start.bytes));
                Ok(newest.and_then(Result::ok).flatten().map(|slot| slot.state))
            }
        }
    }

    #[must_use]
    pub fn state(&self) -> &OverlayState {
        &self.state
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        self.files.path()
    }

    /// Returns the epochs whose files make the disk of `epoch`, with the image: oldest first.
    ///
    /// # Errors
    /// [`OverlayError::NoEpoch`] if the disk of this epoch's mark is not there any more, or was never durable;
    /// [`OverlayError::MissingEpoch`].
    pub fn overlays_of(&self, epoch: u64) -> Result<Vec<u64>, OverlayError> {
        let path = || self.files.path().to_owned();
        if !self.state.has_epoch(epoch) {
            return Err(OverlayError::NoEpoch { path: path(), epoch });
        }
        let (files, wanted) = (self.epochs()?, self.state.merged + 1..=epoch);
        let wanted: Vec<u64> = wanted.filter(|epoch| !self.state.is_dead(*epoch)).collect();
        match wanted.iter().find(|epoch| !files.contains(epoch)) {
            Some(epoch) => {
                Err(OverlayError::MissingEpoch { path: path(), epoch: *epoch, name: overlay_file_name(*epoch) })
            }
            None => Ok(wanted),
        }
    }

    /// Returns an epoch that is newer than all that the disk has ever had.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn unused_epoch(&self) -> Result<u64, OverlayError> {
        let state = &self.state;
        let dead = state.dead.iter().map(|dead| dead.last);
        let newest = self.epochs()?.into_iter().chain(dead).chain([state.sealed, state.merged, state.floor]).max();
        Ok(newest.unwrap_or_default() + 1)
    }

    /// Returns the path of an epoch's file.
    #[must_use]
    pub fn path_of(&self, epoch: u64) -> PathBuf {
        self.files.path().join(overlay_file_name(epoch))
    }

    /// Changes the state durably.
    ///
    /// # Errors
    /// After [`OverlayError::Io`] the change may still be on the disk, so it must describe a fact that is already true.
    pub fn record(&mut self, change: impl FnOnce(&mut OverlayState)) -> Result<(), OverlayError> {
        let (mut state, count) = (self.state.clone(), self.count + 1);
        change(&mut state);
        let written = write_slot(&state, count).and_then(|page| {
            self.state_file.write_at(page.get(..SLOT_BYTES as usize).unwrap_or_default(), slot_offset(count))?;
            self.state_file.sync()
        });
        written.map_err(failed(&self.files, "writing its state"))?;
        (self.state, self.count) = (state, count);
        Ok(())
    }

    /// Returns the path of the file that [`Self::note_exposed`] makes.
    #[must_use]
    pub fn exposed_path(&self) -> PathBuf {
        self.files.path().join(EXPOSED_NAME)
    }

    /// Returns whether another program may have merged into what checkpoints need, which is not known yet.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn is_exposed(&self) -> Result<bool, OverlayError> {
        let names = self.files.list().map_err(failed(&self.files, "reading the directory"))?;
        Ok(names.iter().any(|name| name == EXPOSED_NAME))
    }

    /// Records durably that other programs are about to be able to merge into what checkpoints need.
    ///
    /// # Errors
    /// If the file cannot be made.
    pub fn note_exposed(&self) -> Result<(), OverlayError> {
        if !self.is_exposed()? {
            self.files.create(EXPOSED_NAME).map_err(failed(&self.files, "making a file in it"))?;
        }
        self.sync_names()
    }

    /// Records that no other program can merge any more, and that what it may have done is recorded.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub fn note_not_exposed(&self) -> Result<(), OverlayError> {
        if self.is_exposed()? {
            self.files.remove(EXPOSED_NAME).map_err(failed(&self.files, "removing a file in it"))?;
        }
        self.sync_names()
    }

    /// Returns the epochs that have files, oldest first. Those that are merged already are of no use.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn epochs(&self) -> Result<Vec<u64>, OverlayError> {
        let names = self.files.list().map_err(failed(&self.files, "reading the directory"))?;
        let mut epochs: Vec<u64> = names.iter().filter_map(|name| epoch_of_file(name)).collect();
        epochs.sort_unstable();
        Ok(epochs)
    }

    /// Creates the empty file of an epoch that no mark has started. Call [`Self::make_durable`] when QEMU has written its
    /// header, and before the mark: what the guest flushes after the mark must be found after a power failure.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub fn create_overlay(&self, epoch: u64) -> Result<PathBuf, OverlayError> {
        // An earlier process may have been killed before the mark.
        self.create_anew(&overlay_file_name(epoch)).map_err(failed(&self.files, "making an overlay"))?;
        Ok(self.path_of(epoch))
    }

    /// Returns the path of a head.
    #[must_use]
    pub fn head_path(&self, head: OverlayHead) -> PathBuf {
        self.files.path().join(head.file_name())
    }

    /// Returns whether there is this head.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn has_head(&self, head: OverlayHead) -> Result<bool, OverlayError> {
        Ok(self.heads()?.contains(&head))
    }

    fn heads(&self) -> Result<Vec<OverlayHead>, OverlayError> {
        let names = self.files.list().map_err(failed(&self.files, "reading the directory"))?;
        Ok(names.iter().filter_map(|name| OverlayHead::from_file_name(name)).collect())
    }

    /// Creates the empty file of an epoch's next head. [`Self::seal`] makes it durable. The earlier heads stay, because
    /// checkpoints may have them.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub fn create_head(&self, epoch: u64) -> Result<OverlayHead, OverlayError> {
        let newest = self.heads()?.into_iter().filter(|head| head.epoch == epoch).map(|head| head.number).max();
        let head = OverlayHead { epoch, number: newest.unwrap_or_default() + 1 };
        self.files.create(&head.file_name()).map_err(failed(&self.files, "making the head of an overlay"))?;
        Ok(head)
    }

    /// Removes the heads that no checkpoint needs any more. `committed`: the head of the newest checkpoint.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub fn remove_useless_heads(&self, committed: Option<OverlayHead>) -> Result<(), OverlayError> {
        let is_replaced =
            |head: &OverlayHead| committed.is_some_and(|newest| head.epoch == newest.epoch && *head < newest);
        let is_useless =
            |head: &OverlayHead| head.epoch < self.state.floor || self.state.is_dead(head.epoch) || is_replaced(head);
        self.heads()?.into_iter().filter(is_useless).try_for_each(|head| self.remove_head(head))
    }

    /// Removes all heads newer than `committed`, the head of the newest checkpoint in the store. The caller knows that the
    /// checkpoints of the newer heads can no longer be committed. If the file of `committed` is missing, removes nothing: a
    /// checkpoint in another store has replaced it.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub fn remove_heads_after(&self, committed: Option<OverlayHead>) -> Result<(), OverlayError> {
        let heads = self.heads()?;
        let Some(committed) = committed.filter(|committed| heads.contains(committed)) else { return Ok(()) };
        heads.into_iter().filter(|head| *head > committed).try_for_each(|head| self.remove_head(head))
    }

    /// Removes a head.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn remove_head(&self, head: OverlayHead) -> Result<(), OverlayError> {
        self.files.remove(&head.file_name()).map_err(failed(&self.files, "removing the head of an overlay"))
    }

    /// Creates a file, in place of one that an earlier process has left.
    fn create_anew(&self, name: &str) -> io::Result<()> {
        match self.files.create(name) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                self.files.remove(name)?;
                self.files.create(name)
            }
            created => created,
        }
        .map(drop)
    }

    /// Makes the name and the present content of an epoch's file durable.
    ///
    /// # Errors
    /// If a sync fails.
    pub fn make_durable(&self, epoch: u64) -> Result<(), OverlayError> {
        self.sync_overlay(epoch)?;
        self.sync_names()
    }

    /// Makes all epochs up to `epoch`, which its mark has ended, durable, with the head of the checkpoint, and records that.
    /// `sync_image`: makes the image durable, which has the writes of the first epoch.
    ///
    /// # Errors
    /// If a sync fails. Then it is unknown what is durable, and the kernel reports that only once: every later seal
    /// fails with [`OverlayError::SealFailed`], also in another process, until the overlays are ended.
    pub fn seal(
        &mut self,
        epoch: u64,
        head: Option<OverlayHead>,
        sync_image: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), OverlayError> {
        if self.state.seal_failed {
            return Err(OverlayError::SealFailed { path: self.files.path().to_owned() });
        }
        if let Err(e) = self.sync_epochs(epoch, head, sync_image) {
            // In this process it counts even if it cannot be recorded.
            if let Err(e) = self.record(|state| state.seal_failed = true) {
                tracing::warn!("cannot record that a sync has failed: {e}");
                self.state.seal_failed = true;
            }
            return Err(e);
        }
        match epoch > self.state.sealed {
            true => self.record(|state| state.sealed = epoch),
            // An epoch of which another checkpoint was taken.
            false => Ok(()),
        }
    }

    fn sync_epochs(
        &self,
        epoch: u64,
        head: Option<OverlayHead>,
        sync_image: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), OverlayError> {
        if self.state.sealed < FIRST_EPOCH {
            sync_image().map_err(failed(&self.files, "syncing the image"))?;
        }
        let mut unsealed = (self.state.sealed.max(self.state.merged) + 1)..=epoch;
        unsealed.try_for_each(|epoch| if self.state.is_dead(epoch) { Ok(()) } else { self.sync_overlay(epoch) })?;
        let Some(head) = head else { return Ok(()) };
        self.sync_file(epoch, head.file_name())?;
        self.sync_names()
    }

    fn sync_overlay(&self, epoch: u64) -> Result<(), OverlayError> {
        self.sync_file(epoch, overlay_file_name(epoch))
    }

    fn sync_file(&self, epoch: u64, name: String) -> Result<(), OverlayError> {
        let file = self.files.open(&name).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => OverlayError::MissingEpoch { path: self.files.path().to_owned(), epoch, name },
            _ => failed(&self.files, "opening an overlay")(e),
        })?;
        file.sync().map_err(failed(&self.files, "syncing an overlay"))
    }

    fn sync_names(&self) -> Result<(), OverlayError> {
        self.files.sync().map_err(failed(&self.files, "making its directory durable"))
    }

    /// Removes the file of an epoch that is merged or was never marked.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub fn remove_overlay(&self, epoch: u64) -> Result<(), OverlayError> {
        self.files.remove(&overlay_file_name(epoch)).map_err(failed(&self.files, "removing an overlay"))?;
        self.sync_names()
    }

    /// Records that the image is about to get all writes: no checkpoint has a disk from here on. Required before QEMU
    /// starts to merge the overlay that the guest writes to.
    ///
    /// # Errors
    /// If the state cannot be written.
    pub fn close(&mut self) -> Result<(), OverlayError> {
        let last = self.epochs()?.last().copied().unwrap_or(self.state.merged);
        self.record(|state| state.floor = state.floor.max(last))
    }

    /// Removes all overlays, the state and the directory. QEMU has merged all overlays and uses none, and the image is
    /// durable. The guest is stopped until this returns: its next writes are in the image, and the overlays would hide
    /// them after a crash. Files that are not ours stay, and then the directory stays, too.
    ///
    /// # Errors
    /// If something cannot be removed; then no overlay has a write that the image does not have.
    pub fn destroy(mut self) -> Result<(), OverlayError> {
        let epochs = self.epochs()?;
        let last = epochs.last().copied().unwrap_or(self.state.merged);
        self.record(|state| (state.floor, state.merged) = (state.floor.max(last), state.merged.max(last)))?;
        for epoch in epochs {
            self.files.remove(&overlay_file_name(epoch)).map_err(failed(&self.files, "removing an overlay"))?;
        }
        self.heads()?.into_iter().try_for_each(|head| self.remove_head(head))?;
        // Overlays without a state are damaged.
        self.note_not_exposed()?;
        self.files.remove(STATE_NAME).map_err(failed(&self.files, "removing its state"))?;
        match self.files.list().map_err(failed(&self.files, "reading the directory"))?.into_iter().next() {
            Some(name) => Err(OverlayError::Occupied { path: self.files.path().to_owned(), name }),
            None => self.files.remove_directory().map_err(failed(&self.files, "removing the directory")),
        }
    }
}
