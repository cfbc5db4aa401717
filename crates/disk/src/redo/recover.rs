//! Opening a log: after a crash, after a server that was killed, or to go back to a checkpoint.

use super::error::RedoError;
use super::files::{Files, LogFile};
use super::format::{PAGE, What, read_head, read_header, read_seal, seal_length, sum};
use super::log::{Log, Placed, Segment};
use super::state::{Home, epoch_of, name_of};
use rekindle_kernel::uring::Buffer;
use std::collections::BTreeSet;
use std::io;
use uuid::Uuid;

/// Bytes that are read at a time.
const WINDOW: u64 = 4 << 20;

/// Which disk is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wanted {
    /// With all that was written.
    #[default]
    Newest,
    /// That of a checkpoint.
    Epoch {
        /// Its epoch.
        epoch: u64,
        /// Of which disk.
        disk: Uuid,
    },
    /// That of a guest which has gone on from a checkpoint, and may not have written since: what it has not given up by writing is
    /// not its own. The newest, if there is nothing of that left.
    Since {
        /// The checkpoint's epoch.
        epoch: u64,
        /// Of which disk.
        disk: Uuid,
        /// The first epoch of the guest that went on.
        first: u64,
    },
}

/// Open the log in `files` of a disk of `bytes` bytes; `None` if there is none.
///
/// *On success:* all that was found is durable, and belongs to epochs that have ended. Nothing was given up yet.
///
/// # Errors
/// [`RedoError`]; nothing has changed.
#[allow(clippy::type_complexity, reason = "a log and where it is, or none")]
pub fn open<D: Files>(
    files: D,
    bytes: u64,
    wanted: Wanted,
    limit: u64,
) -> Result<Option<(Home<D>, Log<D::File>)>, RedoError> {
    let path = files.path().to_owned();
    let failed = |doing| RedoError::io(&path, doing);
    let Some(mut home) = Home::open(files)? else {
        return match wanted {
            Wanted::Newest | Wanted::Since { .. } => Ok(None),
            Wanted::Epoch { epoch, disk } => Err(RedoError::NoLog { path, epoch, disk }),
        };
    };
    let state = home.state().clone();
    let names = home.files().list().map_err(failed("reading the directory"))?;
    let mut epochs: Vec<u64> = names.iter().filter_map(|name| epoch_of(name)).collect();
    epochs.sort_unstable();
    let wanted = match wanted {
        Wanted::Since { epoch, disk, first } => {
            let is_there = |of: &u64| (epoch + 1..first).contains(of) && *of > state.merged && !state.is_dead(*of);
            let is_left = disk == state.disk && epochs.iter().any(is_there);
            if is_left { Wanted::Epoch { epoch, disk } } else { Wanted::Newest }
        }
        other => other,
    };
    if let Wanted::Epoch { epoch, disk } = wanted {
        let path = path.clone();
        if disk != state.disk {
            return Err(RedoError::OtherDisk { path, found: state.disk, wanted: disk });
        } else if state.floor > epoch {
            return Err(RedoError::NewerDisk { path, epoch, floor: state.floor });
        } else if state.is_dead(epoch) {
            return Err(RedoError::GivenUp { path, epoch });
        } else if epoch > state.sealed {
            return Err(RedoError::NotSealed { path, epoch, sealed: state.sealed });
        }
    }
    let given = [state.sealed, state.floor, state.merged].into_iter();
    let given = given.chain(state.dead.iter().map(|(_, last)| *last)).chain(epochs.iter().copied());
    let newest = given.max().unwrap_or(0);
    let closed = match wanted {
        Wanted::Epoch { epoch, .. } => epoch,
        Wanted::Newest | Wanted::Since { .. } => (0..=newest).rev().find(|epoch| !state.is_dead(*epoch)).unwrap_or(0),
    };
    let mut log = Log::new(state.disk, newest + 1, closed, state.merged, limit);
    let must_be_whole: BTreeSet<u64> = state.sealed_segments().filter(|epoch| *epoch <= closed).collect();
    let lost = |epoch, what| RedoError::Lost { path: path.clone(), name: name_of(epoch), epoch, what };
    if let Some(epoch) = must_be_whole.iter().find(|epoch| !epochs.contains(epoch)) {
        return Err(lost(*epoch, "the file is missing".into()));
    }
    for epoch in epochs.into_iter().filter(|epoch| *epoch <= closed && *epoch > state.merged && !state.is_dead(*epoch))
    {
        let file = home.files().open(&name_of(epoch)).map_err(failed("opening a segment"))?;
        let is_sealed = must_be_whole.contains(&epoch);
        let found = scan(&file, epoch, state.disk).map_err(failed("reading a segment"))?;
        let found = if is_sealed { Some(whole(found).map_err(|what| lost(epoch, what))?) } else { found };
        let Some(Found { nonce, end, entries, .. }) = found else { continue };
        if let Some(end) = entries.iter().map(|entry| entry.at + entry.bytes).find(|end| *end > bytes) {
            return Err(RedoError::Shorter { path, end, bytes });
        }
        // A server that was killed has left it to the system.
        file.sync().map_err(failed("making a segment durable"))?;
        if !entries.is_empty() {
            log.found(Segment::new(epoch, nonce, file), end, entries, is_sealed);
        }
    }
    if (closed + 1..=newest).any(|epoch| !state.is_dead(epoch)) {
        home.rewind(closed + 1, newest);
    }
    // Left by one that was killed meanwhile; they are not read, so they may stay.
    if let Err(e) = home.remove_done() {
        tracing::warn!("{e}");
    }
    Ok(Some((home, log)))
}

/// Reads a file in pieces that are longer than what is asked for.
struct Window<'a, F> {
    file: &'a F,
    buffer: Buffer,
    at: u64,
    held: usize,
}

impl<F: LogFile> Window<'_, F> {
    fn get(&mut self, offset: u64, len: u64) -> io::Result<Option<&[u8]>> {
        let is_held = offset >= self.at && offset + len <= self.at + self.held as u64;
        if !is_held {
            self.at = offset;
            self.held = self.file.read_at(&mut self.buffer, offset)?;
        }
        let from = (offset - self.at) as usize;
        Ok(self.buffer.get(..self.held).and_then(|held| held.get(from..from + len as usize)))
    }
}

/// What is valid in a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The segment's.
    pub nonce: u128,
    /// Nothing that is valid lies at this offset or behind it.
    pub end: u64,
    /// The entries, in the order of their sequence.
    pub entries: Vec<Placed>,
    /// Offsets of the entries that its last seal record lists.
    pub seal: Option<Vec<u64>>,
}

/// The content of a segment whose epoch is sealed: the entries that its seal record lists, all of them.
///
/// # Errors
/// What is missing.
pub fn whole(found: Option<Found>) -> Result<Found, String> {
    let mut found = found.ok_or("its head, at byte 0, is damaged or missing")?;
    let Some(seal) = &found.seal else {
        return Err(format!("its seal record is damaged or missing; entries end at byte {}", found.end));
    };
    let there: BTreeSet<u64> = found.entries.iter().map(|entry| entry.offset).collect();
    let mut missing = seal.iter().filter(|offset| !there.contains(offset));
    if let Some(first) = missing.clone().min() {
        let (count, all) = (missing.by_ref().count(), seal.len());
        return Err(format!("the entry at byte {first} is damaged or missing ({count} of {all} entries are)"));
    }
    // An entry that is not in the list has been overwritten within its epoch, or its write failed.
    let listed: BTreeSet<u64> = seal.iter().copied().collect();
    found.entries.retain(|entry| listed.contains(&entry.offset));
    Ok(found)
}

/// Reads a segment. `None` if it has no valid head: nothing in an unsealed one was ever durable then.
///
/// # Errors
/// The system's.
pub fn scan(file: &impl LogFile, epoch: u64, disk: Uuid) -> io::Result<Option<Found>> {
    let length = file.length()?;
    let buffer = Buffer::new(WINDOW.min(length).max(PAGE) as usize);
    let mut window = Window { file, buffer, at: 0, held: 0 };
    let head = window.get(0, PAGE)?.and_then(read_head).filter(|head| head.epoch == epoch && head.disk == disk);
    let Some(head) = head else { return Ok(None) };
    let (mut entries, mut seal) = (Vec::new(), None);
    let mut offset = PAGE;
    while offset + PAGE <= length {
        let page = window.get(offset, PAGE)?.unwrap_or_default();
        if let Some(header) = read_seal(page, head.nonce, offset) {
            let list = header.list_bytes().filter(|list| *list <= length - offset - PAGE);
            let list = list.map(|list| read_list(file, offset + PAGE, list)).transpose()?;
            let list = list.and_then(|list| header.read_list(&list));
            offset += if list.is_some() { seal_length(header.entries) } else { PAGE };
            seal = list.or(seal);
            continue;
        }
        let Some(header) = read_header(page, head.nonce, offset) else {
            offset += PAGE;
            continue;
        };
        let is_whole = match header.what {
            What::Data => {
                // The last one's padding may be missing.
                let len = header.bytes.min(length.saturating_sub(offset + PAGE));
                window.get(offset + PAGE, len)?.is_some_and(|data| len == header.bytes && sum(data) == header.data)
            }
            What::Zeroes | What::Hole => true,
        };
        if is_whole {
            let super::format::Header { sequence, at, bytes, what, .. } = header;
            entries.push(Placed { epoch, offset, sequence, at, bytes, what });
        }
        offset += header.length();
    }
    entries.sort_unstable_by_key(|entry| entry.sequence);
    Ok(Some(Found { nonce: head.nonce, end: offset, entries, seal }))
}

fn read_list(file: &impl LogFile, offset: u64, bytes: u64) -> io::Result<Buffer> {
    let mut list = Buffer::new(bytes.next_multiple_of(PAGE).max(PAGE) as usize);
    file.read_at(&mut list, offset)?;
    Ok(list)
}
