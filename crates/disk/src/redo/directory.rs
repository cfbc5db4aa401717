//! The directory of a log: the state file and the segments.
//!
//! A *segment* is the file with the writes of one *epoch*, the time between two checkpoints. The state file records
//! which epochs are sealed (durable) and merged (copied to the image).

use super::epoch_state::{CountedState, EpochRange, EpochState, FORMAT};
use super::error::RedoError;
use super::files::{FileStart, LogFiles};
use super::format::{PAGE_BYTES, SegmentHead, read_head, segment_epoch, segment_name, write_head};
use super::log::Segment;
use crate::report::warn_limited;
use crate::slots::{CHECKSUM_BYTES, SlotRecord, confirm_newest, newest_slot, slot_offset, write_slot};
use rekindle_kernel::durable_file::DurableFile;
use rekindle_kernel::uring::Buffer;
use rustix::rand::{GetRandomFlags, getrandom};
use std::io;
use uuid::Uuid;

/// File name of the state.
pub const STATE_NAME: &str = "state";
/// Bytes of the state file: two slots.
pub const STATE_BYTES: u64 = 2 * PAGE_BYTES;
/// Bytes that are reserved for a new segment.
const RESERVED_BYTES: u64 = 4 << 20;

/// Returns whether name and content are those of a file that a log created. The file may be incomplete after a crash.
fn is_file_of_log(name: &str, FileStart { bytes, length }: &FileStart) -> bool {
    let is_zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
    // Only zeros have been written to the file.
    let has_only_zeros = *length == bytes.len() as u64 && is_zero(bytes);
    if name == STATE_NAME {
        let is_slot = |slot: &[u8]| {
            slot.starts_with(EpochState::MAGIC)
                || is_zero(slot.get(..PAGE_BYTES as usize - CHECKSUM_BYTES).unwrap_or(slot))
        };
        return *length <= STATE_BYTES && bytes.chunks(PAGE_BYTES as usize).all(is_slot);
    }
    // A file with a valid head can end within the head's page: the write of the page was interrupted.
    segment_epoch(name).is_some() && (has_only_zeros || read_head(bytes).is_some())
}

/// Returns whether a log created the file with this name.
fn was_created_by_log(files: &impl LogFiles, name: &str) -> io::Result<bool> {
    let Some(beginning) = files.peek(name, STATE_BYTES)? else { return Ok(false) };
    if is_file_of_log(name, &beginning) {
        return Ok(true);
    }
    // Space was reserved for a segment, and its head is not durable yet.
    let whole = if beginning.length <= RESERVED_BYTES { files.peek(name, RESERVED_BYTES)? } else { None };
    Ok(whole.is_some_and(|whole| is_file_of_log(name, &whole)))
}

/// Returns the error for a file that no log created.
fn foreign_file(files: &impl LogFiles, name: &str) -> RedoError {
    let path = files.path().to_owned();
    let target = std::fs::read_link(&path).ok();
    RedoError::ForeignFile { path, target, name: name.into() }
}

/// Returns the last epoch of a log that may have a segment: the current epoch, `current`, and the one after it may have
/// segments, which are empty when the log ends.
#[must_use]
pub fn last_used_epoch(current: u64) -> u64 {
    current + 1
}

/// The directory of an open log: its state, its segment files and the lock.
#[derive(Debug)]
pub struct LogDirectory<D: LogFiles> {
    files: D,
    state_file: D::File,
    state: EpochState,
    /// The count of the state's slot.
    count: u64,
    /// Epochs to discard before the first write: the disk was opened at an older epoch.
    rewound: Option<EpochRange>,
    /// Prevents changes by other processes.
    _claim: D::Claim,
}

/// Locks the directory; `None` if there is no directory.
fn claim<D: LogFiles>(files: &D) -> Result<Option<D::Claim>, RedoError> {
    files.claim().map_err(|e| match e.kind() {
        io::ErrorKind::ResourceBusy => RedoError::InUse { path: files.path().to_owned() },
        _ => RedoError::io(files.path(), "locking the directory")(e),
    })
}

impl<D: LogFiles> LogDirectory<D> {
    /// Creates the log of a disk of `bytes` bytes that has none. `image`: the file name of its image.
    ///
    /// *On failure:* there is no log. Files that no log created are unchanged; they may be the reason.
    pub fn create(files: D, bytes: u64, image: Option<String>) -> Result<Self, RedoError> {
        let failed = |doing| RedoError::io(files.path(), doing);
        files.create_directory().map_err(failed("making the directory"))?;
        let claim = claim(&files)?.ok_or(io::ErrorKind::NotFound.into()).map_err(failed("locking the directory"))?;
        Self::remove_remains(&files)?;
        let state_file = files.create(STATE_NAME).map_err(failed("making its state"))?;
        let state = EpochState {
            format: FORMAT,
            disk: Uuid::new_v4(),
            bytes,
            sealed: 0,
            floor: 0,
            merged: 0,
            dead: Vec::new(),
            image,
            segments: Vec::new(),
        };
        let empty_slots = Buffer::new(STATE_BYTES as usize);
        state_file.write_at(&empty_slots, 0).map_err(failed("making its state"))?;
        let mut log_dir = Self { files, state_file, state, count: 0, rewound: None, _claim: claim };
        log_dir.record(|_| ())?;
        log_dir.files.sync().map_err(RedoError::io(log_dir.files.path(), "making its directory durable"))?;
        Ok(log_dir)
    }

    /// Removes the files of an interrupted `begin` or `end`. Removes nothing if there is any other file.
    fn remove_remains(files: &D) -> Result<(), RedoError> {
        let failed = |doing| RedoError::io(files.path(), doing);
        let mut names = files.list().map_err(failed("reading the directory"))?;
        names.sort_unstable();
        for name in &names {
            if !was_created_by_log(files, name).map_err(failed("reading what is in the directory"))? {
                return Err(foreign_file(files, name));
            }
        }
        let has_segments = names.iter().any(|name| segment_epoch(name).is_some());
        let slots = match files.peek(STATE_NAME, STATE_BYTES) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            peeked => peeked.map_err(failed("reading its state"))?,
        };
        let newest = slots.as_ref().map_or(Ok(None), |slots| newest_slot::<EpochState>(&slots.bytes));
        let newer_format = |found| RedoError::NewerFormat { path: files.path().to_owned(), found };
        match newest.map_err(newer_format)? {
            None if has_segments => return Err(RedoError::DamagedState { path: files.path().to_owned() }),
            Some(CountedState { state, .. }) => {
                let is_done = |epoch| epoch <= state.merged || state.is_dead(epoch);
                if !names.iter().filter_map(|name| segment_epoch(name)).all(is_done) {
                    return Err(RedoError::Occupied { path: files.path().to_owned(), found: state.disk });
                }
            }
            None => {}
        }
        // The state is removed last: segments without a state are a damaged log.
        names.sort_unstable_by_key(|name| name == STATE_NAME);
        names.iter().try_for_each(|name| files.remove(name)).map_err(failed("removing what was left there"))
    }

    /// Returns whether there is a log, without opening it.
    pub fn exists(files: &D) -> Result<bool, RedoError> {
        let failed = |doing| RedoError::io(files.path(), doing);
        let names = files.list().map_err(failed("reading the directory"))?;
        if names.iter().any(|name| segment_epoch(name).is_some()) {
            return Ok(true);
        }
        let slots = match files.peek(STATE_NAME, STATE_BYTES) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            peeked => peeked.map_err(failed("reading its state"))?.map(|start| start.bytes).unwrap_or_default(),
        };
        let newer_format = |found| RedoError::NewerFormat { path: files.path().to_owned(), found };
        Ok(newest_slot::<EpochState>(&slots).map_err(newer_format)?.is_some())
    }

    /// Opens the log in `files`, if there is one.
    pub fn open(files: D) -> Result<Option<Self>, RedoError> {
        let failed = |doing| RedoError::io(files.path(), doing);
        let Some(claim) = claim(&files)? else { return Ok(None) };
        let names = files.list().map_err(failed("reading the directory"))?;
        let has_segments = names.iter().any(|name| segment_epoch(name).is_some());
        let damaged = || RedoError::DamagedState { path: files.path().to_owned() };
        let state_file = match files.open(STATE_NAME) {
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidInput) => {
                return if has_segments { Err(damaged()) } else { Ok(None) };
            }
            opened => opened.map_err(failed("opening its state"))?,
        };
        let mut slots = Buffer::new(STATE_BYTES as usize);
        state_file.read_at(&mut slots, 0).map_err(failed("reading its state"))?;
        match newest_slot(&slots).map_err(|found| RedoError::NewerFormat { path: files.path().to_owned(), found })? {
            None if has_segments => Err(damaged()),
            None => Ok(None),
            Some(CountedState { count, state }) => {
                confirm_newest(&state_file, &slots, count).map_err(failed("making its state durable"))?;
                Ok(Some(Self { files, state_file, state, count, rewound: None, _claim: claim }))
            }
        }
    }

    #[must_use]
    pub fn state(&self) -> &EpochState {
        &self.state
    }

    #[must_use]
    pub fn files(&self) -> &D {
        &self.files
    }

    /// Changes the state durably.
    ///
    /// # Errors
    /// After [`RedoError::Io`] the change may still be on the disk, so it must describe a fact that is already true.
    pub fn record(&mut self, change: impl FnOnce(&mut EpochState)) -> Result<(), RedoError> {
        let mut state = self.state.clone();
        change(&mut state);
        let merged = state.merged;
        state.dead.retain(|range| range.last > merged);
        if let Some(EpochRange { first, last }) = state.fit_segments() {
            warn_limited!(
                "the redo log {}: its state has no space for all ranges of sealed epochs, so damage to segments of epochs {first} to \
                 {last} would not be detected when the log is opened",
                self.files.path().display()
            );
        }
        if self.state.format < FORMAT {
            // An earlier version must not find the old state in the other slot.
            self.write_state(EpochState { format: FORMAT, ..self.state.clone() })?;
        }
        self.write_state(EpochState { format: FORMAT, ..state })
    }

    /// Writes the state to the older slot.
    fn write_state(&mut self, state: EpochState) -> Result<(), RedoError> {
        let count = self.count + 1;
        let written = write_slot(&state, count).and_then(|page| {
            self.state_file.write_at(page.get(..PAGE_BYTES as usize).unwrap_or_default(), slot_offset(count))?;
            self.state_file.sync()
        });
        written.map_err(RedoError::io(self.files.path(), "writing its state"))?;
        (self.state, self.count) = (state, count);
        Ok(())
    }

    /// Checks that the log belongs to the image with this file name, and adds the name to the log of an earlier
    /// version. `renamed_from`: the previous name of a renamed image.
    ///
    /// # Errors
    /// [`RedoError::OtherImage`] if the log belongs to another image; [`RedoError::Io`] if the new name cannot be
    /// recorded.
    pub fn check_image(&mut self, image: &str, renamed_from: Option<&str>) -> Result<(), RedoError> {
        match self.state.image.as_deref() {
            Some(found) if found == image => Ok(()),
            Some(found) if renamed_from == Some(found) => self.record(|state| state.image = Some(image.into())),
            Some(found) => {
                let (path, found) = (self.files.path().to_owned(), found.into());
                Err(RedoError::OtherImage { path, found, image: image.into() })
            }
            None => {
                // Becomes durable with the next change of the state.
                self.state.image = Some(image.into());
                Ok(())
            }
        }
    }

    /// Discards epochs before the next segment is created.
    pub fn rewind(&mut self, discarded: EpochRange) {
        self.rewound = Some(discarded);
    }

    /// Returns whether there are epochs that the next segment discards.
    #[must_use]
    pub fn is_rewound(&self) -> bool {
        self.rewound.is_some()
    }

    /// Creates the segment of a new epoch durably, after discarding the epochs of [`Self::rewind`].
    pub fn create_segment(&mut self, epoch: u64) -> Result<Segment<D::File>, RedoError> {
        if let Some(discarded) = self.rewound {
            self.record(|state| {
                // Earlier ranges within this range stay discarded.
                state.dead.retain(|dead| dead.first < discarded.first || dead.last > discarded.last);
                state.dead.push(discarded);
            })?;
            self.rewound = None;
            if let Err(e) = self.remove_done() {
                tracing::warn!("cannot remove discarded epochs; trying again later: {e}");
            }
        }
        let created = self.create_segment_file(epoch);
        created.map_err(RedoError::io(self.files.path(), "making a segment"))
    }

    fn create_segment_file(&self, epoch: u64) -> io::Result<Segment<D::File>> {
        let name = segment_name(epoch);
        let file = match self.files.create(&name) {
            // A failed attempt left the file and made nothing durable: the file is unused.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                self.remove_file_of_log(&name)?;
                self.files.create(&name)?
            }
            created => created?,
        };
        let mut nonce = [0; 16];
        getrandom(&mut nonce, GetRandomFlags::empty())?;
        let head = SegmentHead { epoch, disk: self.state.disk, nonce: u128::from_ne_bytes(nonce) };
        let mut page = Buffer::new(PAGE_BYTES as usize);
        page.copy_from_slice(&write_head(&head));
        file.reserve(RESERVED_BYTES);
        let durable = file.write_at(&page, 0).and_then(|()| file.sync()).and_then(|()| self.files.sync());
        if let Err(e) = durable {
            let _ = self.files.remove(&name);
            return Err(e);
        }
        Ok(Segment::new(epoch, head.nonce, file))
    }

    /// Removes a file if a log created it. Fails otherwise.
    fn remove_file_of_log(&self, name: &str) -> io::Result<()> {
        if was_created_by_log(&self.files, name)? {
            return self.files.remove(name);
        }
        let why = format!("{name} is not a file of a redo log; move it elsewhere");
        Err(io::Error::new(io::ErrorKind::AlreadyExists, why))
    }

    /// Removes merged and discarded segments.
    ///
    /// # Errors
    /// After [`RedoError::Io`], the next call removes the remaining segments.
    pub fn remove_done(&self) -> Result<(), RedoError> {
        let failed = |doing| RedoError::io(self.files.path(), doing);
        for name in self.files.list().map_err(failed("reading the directory"))? {
            if segment_epoch(&name).is_some_and(|epoch| epoch <= self.state.merged || self.state.is_dead(epoch)) {
                self.remove_file_of_log(&name).map_err(failed("removing a segment"))?;
            }
        }
        Ok(())
    }

    /// Records that the log is about to end: the image has all writes of the log, and may become newer than each of
    /// its epochs. `last_used`: see [`last_used_epoch`].
    ///
    /// # Errors
    /// After [`RedoError::Io`] the state may name the epochs up to `last_used` as merged after a restart, so nothing may
    /// be written to them any more.
    pub fn close(&mut self, last_used: u64) -> Result<(), RedoError> {
        self.record(|state| {
            state.floor = state.floor.max(last_used);
            state.merged = state.merged.max(last_used);
        })
    }

    /// Removes the log. All of it must be merged, and [`Self::close`] must have succeeded. Files that no log created
    /// stay, and then the directory stays, too.
    ///
    /// # Errors
    /// After a [`RedoError`], a log without writes remains, or none.
    pub fn destroy(self) -> Result<(), RedoError> {
        let failed = |doing| RedoError::io(self.files.path(), doing);
        let names = self.files.list().map_err(failed("reading the directory"))?;
        let mut foreign_names = Vec::new();
        for name in names.into_iter().filter(|name| *name != STATE_NAME) {
            match segment_epoch(&name).map(|_| self.remove_file_of_log(&name)) {
                Some(Ok(())) => {}
                Some(Err(e)) if e.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(failed("removing a segment")(e));
                }
                _ => foreign_names.push(name),
            }
        }
        self.files.sync().map_err(failed("making its directory durable"))?;
        // Without a state, a file with the name of a segment would be mistaken for a damaged log.
        if !foreign_names.iter().any(|name| segment_epoch(name).is_some()) {
            self.files.remove(STATE_NAME).map_err(failed("removing its state"))?;
        }
        match foreign_names.first() {
            None => self.files.remove_directory().map_err(failed("removing the directory")),
            Some(name) => {
                self.files.sync().map_err(failed("making its directory durable"))?;
                Err(foreign_file(&self.files, name))
            }
        }
    }
}
