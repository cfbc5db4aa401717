//! The directory of a log: what is durable about its epochs, and its segments' files.

use super::error::RedoError;
use super::files::{Files, LogFile, Peek};
use super::format::{Head, PAGE, read_head, write_head};
use super::log::Segment;
use super::slot::{FORMAT, MAGIC, State, newest_slot, write_slot};
use rekindle_kernel::uring::Buffer;
use rustix::rand::{GetRandomFlags, getrandom};
use std::io;
use uuid::Uuid;

/// Its file.
const NAME: &str = "state";
/// Room that a segment is made with.
const RESERVED: u64 = 4 << 20;

/// The epoch of the segment with this name.
#[must_use]
pub fn epoch_of(name: &str) -> Option<u64> {
    let epoch = name.strip_suffix(".log")?.parse().ok()?;
    (name_of(epoch) == name).then_some(epoch)
}

/// The name of an epoch's segment.
#[must_use]
pub fn name_of(epoch: u64) -> String {
    format!("{epoch}.log")
}

/// Whether a file is one that a log made, also one that a crash has left incomplete: by its name and by what is in it.
fn is_ours(name: &str, Peek { bytes, length }: &Peek) -> bool {
    let is_zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
    // Nothing was written to it, apart from zeroes.
    let is_empty = *length == bytes.len() as u64 && is_zero(bytes);
    if name == NAME {
        let is_slot = |slot: &[u8]| slot.starts_with(MAGIC) || is_zero(slot.get(..PAGE as usize - 16).unwrap_or(slot));
        return *length <= 2 * PAGE && bytes.chunks(PAGE as usize).all(is_slot);
    }
    epoch_of(name).is_some() && (is_empty || bytes.get(..PAGE as usize).and_then(read_head).is_some())
}

/// Whether what has this name in the directory is a file that a log made.
fn recognise(files: &impl Files, name: &str) -> io::Result<bool> {
    let Some(first) = files.peek(name, 2 * PAGE)? else { return Ok(false) };
    if is_ours(name, &first) {
        return Ok(true);
    }
    // Room that was reserved for a segment, before its head was durable.
    let whole = if first.length <= RESERVED { files.peek(name, RESERVED)? } else { None };
    Ok(whole.is_some_and(|whole| is_ours(name, &whole)))
}

/// Why a name in the directory of a log is not removed.
fn foreign(files: &impl Files, name: &str) -> RedoError {
    let path = files.path().to_owned();
    let target = std::fs::read_link(&path).ok();
    RedoError::Foreign { path, target, name: name.into() }
}

/// See [the module](self).
#[derive(Debug)]
pub struct Home<D: Files> {
    files: D,
    file: D::File,
    state: State,
    count: u64,
    /// To be given up before anything is written: the disk was opened at an older epoch.
    rewound: Option<(u64, u64)>,
    /// Held so that no other process changes the directory.
    _claim: D::Claim,
}

fn claim<D: Files>(files: &D) -> Result<Option<D::Claim>, RedoError> {
    files.claim().map_err(|e| match e.kind() {
        io::ErrorKind::ResourceBusy => RedoError::InUse { path: files.path().to_owned() },
        _ => RedoError::io(files.path(), "locking the directory")(e),
    })
}

impl<D: Files> Home<D> {
    /// Begin a log for a disk of `bytes` bytes that has none. `image`: the file name of its image.
    ///
    /// *On failure:* what there is then is no log. Files that no log made are as they were, and keep this from beginning.
    ///
    /// # Errors
    /// [`RedoError`].
    pub fn create(files: D, bytes: u64, image: Option<String>) -> Result<Self, RedoError> {
        let failed = |doing| RedoError::io(files.path(), doing);
        files.make().map_err(failed("making the directory"))?;
        let claim = claim(&files)?.ok_or(io::ErrorKind::NotFound.into()).map_err(failed("locking the directory"))?;
        Self::clear(&files)?;
        let file = files.create(NAME).map_err(failed("making its state"))?;
        let (format, disk) = (FORMAT, Uuid::new_v4());
        let (dead, segments) = (Vec::new(), Vec::new());
        let state = State { format, disk, bytes, sealed: 0, floor: 0, merged: 0, dead, image, segments };
        let empty = Buffer::new(2 * PAGE as usize);
        file.write_at(&empty, 0).map_err(failed("making its state"))?;
        let mut home = Self { files, file, state, count: 0, rewound: None, _claim: claim };
        home.record(|_| ())?;
        home.files.sync().map_err(RedoError::io(home.files.path(), "making its directory durable"))?;
        Ok(home)
    }

    /// Removes what a `begin` or `end` that was interrupted has left. Nothing is removed unless all of it is that.
    fn clear(files: &D) -> Result<(), RedoError> {
        let failed = |doing| RedoError::io(files.path(), doing);
        let mut names = files.list().map_err(failed("reading the directory"))?;
        names.sort_unstable();
        for name in &names {
            if !recognise(files, name).map_err(failed("reading what is in the directory"))? {
                return Err(foreign(files, name));
            }
        }
        let has_segments = names.iter().any(|name| epoch_of(name).is_some());
        let state = match files.peek(NAME, 2 * PAGE) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            found => found.map_err(failed("reading its state"))?,
        };
        let state = match state.as_ref().map_or(Ok(None), |found| newest_slot(&found.bytes)) {
            Err(found) => return Err(RedoError::Newer { path: files.path().to_owned(), found }),
            Ok(state) => state,
        };
        match state {
            None if has_segments => return Err(RedoError::Damaged { path: files.path().to_owned() }),
            Some((_, state)) => {
                let is_done = |epoch| epoch <= state.merged || state.is_dead(epoch);
                if !names.iter().filter_map(|name| epoch_of(name)).all(is_done) {
                    return Err(RedoError::Occupied { path: files.path().to_owned(), found: state.disk });
                }
            }
            None => {}
        }
        // The state last: segments without one are a damaged log.
        names.sort_unstable_by_key(|name| name == NAME);
        names.iter().try_for_each(|name| files.remove(name)).map_err(failed("removing what was left there"))
    }

    /// The log in `files`, if there is one.
    ///
    /// # Errors
    /// [`RedoError`].
    pub fn open(files: D) -> Result<Option<Self>, RedoError> {
        let failed = |doing| RedoError::io(files.path(), doing);
        let Some(claim) = claim(&files)? else { return Ok(None) };
        let names = files.list().map_err(failed("reading the directory"))?;
        let has_segments = names.iter().any(|name| epoch_of(name).is_some());
        let damaged = || RedoError::Damaged { path: files.path().to_owned() };
        let file = match files.open(NAME) {
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidInput) => {
                return if has_segments { Err(damaged()) } else { Ok(None) };
            }
            opened => opened.map_err(failed("opening its state"))?,
        };
        let mut slots = Buffer::new(2 * PAGE as usize);
        file.read_at(&mut slots, 0).map_err(failed("reading its state"))?;
        match newest_slot(&slots).map_err(|found| RedoError::Newer { path: files.path().to_owned(), found })? {
            None if has_segments => Err(damaged()),
            None => Ok(None),
            Some((count, state)) => Ok(Some(Self { files, file, state, count, rewound: None, _claim: claim })),
        }
    }

    /// What is durable.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Its files.
    #[must_use]
    pub fn files(&self) -> &D {
        &self.files
    }

    /// Change the state, durably.
    ///
    /// # Errors
    /// [`RedoError::Io`]; it may have been changed on the disk, so what is to be changed must be true already.
    pub fn record(&mut self, change: impl FnOnce(&mut State)) -> Result<(), RedoError> {
        let mut state = self.state.clone();
        change(&mut state);
        let floor = state.merged;
        state.dead.retain(|(_, last)| *last > floor);
        state.segments.retain(|(_, last)| *last > floor);
        if self.state.format < FORMAT {
            // An earlier version must not find the state before the change in the other slot.
            self.state.format = FORMAT;
            self.write(self.state.clone())?;
        }
        self.write(State { format: FORMAT, ..state })
    }

    fn write(&mut self, state: State) -> Result<(), RedoError> {
        let count = self.count + 1;
        let written = write_slot(&state, count).and_then(|page| {
            self.file.write_at(page.get(..PAGE as usize).unwrap_or_default(), count % 2 * PAGE)?;
            self.file.sync()
        });
        written.map_err(RedoError::io(self.files.path(), "writing its state"))?;
        (self.state, self.count) = (state, count);
        Ok(())
    }

    /// Checks that the log is that of the image with this file name, and notes the name in the log of an earlier version.
    /// `renamed_from`: the name that the image had before it was renamed.
    ///
    /// # Errors
    /// [`RedoError::OtherImage`]; [`RedoError::Io`].
    pub fn check_image(&mut self, image: &str, renamed_from: Option<&str>) -> Result<(), RedoError> {
        match self.state.image.as_deref() {
            Some(found) if found == image => Ok(()),
            Some(found) if renamed_from == Some(found) => self.record(|state| state.image = Some(image.into())),
            Some(found) => {
                let (path, found) = (self.files.path().to_owned(), found.into());
                Err(RedoError::OtherImage { path, found, image: image.into() })
            }
            None => {
                // Durable with the next change of the state.
                self.state.image = Some(image.into());
                Ok(())
            }
        }
    }

    /// Epochs `first..=last` are to be given up as soon as anything is written.
    pub fn rewind(&mut self, first: u64, last: u64) {
        self.rewound = Some((first, last));
    }

    /// Whether there are epochs that are to be given up.
    #[must_use]
    pub fn is_rewound(&self) -> bool {
        self.rewound.is_some()
    }

    /// Make the segment of a new epoch, durably. What is to be given up is so from here on.
    ///
    /// # Errors
    /// [`RedoError::Io`].
    pub fn prepare(&mut self, epoch: u64) -> Result<Segment<D::File>, RedoError> {
        if let Some((first, last)) = self.rewound {
            self.record(|state| {
                // Those that were given up before within them are so still.
                state.dead.retain(|(from, to)| *from < first || *to > last);
                state.dead.push((first, last));
            })?;
            self.rewound = None;
            if let Err(e) = self.remove_done() {
                tracing::warn!("epochs that were given up are not removed yet: {e}");
            }
        }
        let made = self.make(epoch);
        made.map_err(RedoError::io(self.files.path(), "making a segment"))
    }

    fn make(&self, epoch: u64) -> io::Result<Segment<D::File>> {
        let name = name_of(epoch);
        let file = match self.files.create(&name) {
            // It could not be made durable before, so nothing has used it.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                self.remove_ours(&name)?;
                self.files.create(&name)?
            }
            created => created?,
        };
        let mut nonce = [0; 16];
        getrandom(&mut nonce, GetRandomFlags::empty())?;
        let head = Head { epoch, disk: self.state.disk, nonce: u128::from_ne_bytes(nonce) };
        let mut page = Buffer::new(PAGE as usize);
        page.copy_from_slice(&write_head(&head));
        file.reserve(RESERVED);
        let durable = file.write_at(&page, 0).and_then(|()| file.sync()).and_then(|()| self.files.sync());
        if let Err(e) = durable {
            let _ = self.files.remove(&name);
            return Err(e);
        }
        Ok(Segment::new(epoch, head.nonce, file))
    }

    /// Removes a segment, if it is one.
    fn remove_ours(&self, name: &str) -> io::Result<()> {
        if recognise(&self.files, name)? {
            return self.files.remove(name);
        }
        let why = format!("{name} is not a file of a redo log; move it away");
        Err(io::Error::new(io::ErrorKind::AlreadyExists, why))
    }

    /// Remove the segments that the image has, and those that were given up.
    ///
    /// # Errors
    /// [`RedoError::Io`]; what is left is removed the next time.
    pub fn remove_done(&self) -> Result<(), RedoError> {
        let failed = |doing| RedoError::io(self.files.path(), doing);
        for name in self.files.list().map_err(failed("reading the directory"))? {
            if epoch_of(&name).is_some_and(|epoch| epoch <= self.state.merged || self.state.is_dead(epoch)) {
                self.remove_ours(&name).map_err(failed("removing a segment"))?;
            }
        }
        Ok(())
    }

    /// Notes that the log is about to end: the image has all of it, and may be newer than each of its epochs from here on. `next`: the
    /// epoch of what would be written now; it and the one after it may have segments, which are empty.
    ///
    /// *On success:* the image may be written without the log.
    /// *On failure:* the log is as it was.
    ///
    /// # Errors
    /// [`RedoError::Io`].
    pub fn close(&mut self, next: u64) -> Result<(), RedoError> {
        let done = next + 1;
        self.record(|state| (state.floor, state.merged) = (state.floor.max(done), state.merged.max(done)))
    }

    /// Remove the log. All that is in it must have been merged, and [`Self::close`] have succeeded. Files that no log made stay, and
    /// the directory with them.
    ///
    /// # Errors
    /// [`RedoError`]; what is left then is a log without writes, or none.
    pub fn destroy(self) -> Result<(), RedoError> {
        let failed = |doing| RedoError::io(self.files.path(), doing);
        let names = self.files.list().map_err(failed("reading the directory"))?;
        let mut others = Vec::new();
        for name in names.into_iter().filter(|name| *name != NAME) {
            match epoch_of(&name).map(|_| self.remove_ours(&name)) {
                Some(Ok(())) => {}
                Some(Err(e)) if e.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(failed("removing a segment")(e));
                }
                _ => others.push(name),
            }
        }
        self.files.sync().map_err(failed("making its directory durable"))?;
        // What has the name of a segment would make a damaged log of a directory without a state.
        if !others.iter().any(|name| epoch_of(name).is_some()) {
            self.files.remove(NAME).map_err(failed("removing its state"))?;
        }
        match others.first() {
            None => self.files.remove_all().map_err(failed("removing the directory")),
            Some(name) => {
                self.files.sync().map_err(failed("making its directory durable"))?;
                Err(foreign(&self.files, name))
            }
        }
    }
}
