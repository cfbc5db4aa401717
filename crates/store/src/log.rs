//! The log: numbered entries. An entry appears atomically, or not at all if another process took its number first.
//!
//! A new entry is written under a temporary name, synced, and then linked to its number. The link is the commit, and
//! also checks the owner epoch: for a superseded owner the link fails, because the claim of the next owner has the
//! number.

use crate::error::{Result, StoreError};
use crate::format::Flaw;
use crate::format::codec::{Reader, Writer};
use crate::format::entry::{self, Entry, Kind, Section};
use crate::format::manifest::Manifest;
use crate::format::names;
use crate::home::{Home, read_whole, write_new};
use crate::types::{Guest, OnlyIf, Owner};
use std::io;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Limit of attempts to read or claim a store that other processes change concurrently.
pub(crate) const TRIES: usize = 100;

/// The end of the log.
#[derive(Debug)]
pub(crate) struct Tail {
    /// Number of the newest entry; 0 if the log is empty.
    pub top: u64,
    /// Owner epoch; 0 before the first claim.
    pub epoch: u64,
    /// Number of the entry by which the current owner claimed the store.
    pub claim: u64,
    /// Newest entry with a manifest, and that manifest.
    pub state: Option<(Entry, Manifest)>,
}

/// The ownership of a store in one epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    pub epoch: u64,
    pub owner: Owner,
    /// Number of the claim's log entry.
    pub(crate) slot: u64,
}

/// Failure of appending an entry to the log.
#[derive(Debug)]
pub(crate) enum NotAppended {
    /// Another entry has the number.
    Taken,
    /// The entry is certainly not in the log.
    Failed(StoreError),
    /// The entry may or may not be in the log.
    Uncertain(StoreError),
}

/// Returns the numbers of all entries, ascending, and the number in the newest entry's second name, if there is one.
pub(crate) fn slots(home: &Home) -> Result<(Vec<u64>, Option<u64>)> {
    let listed = home.disk.list(names::LOG).map_err(home.failed(names::LOG, "listing the directory"))?;
    let mut slots: Vec<_> = listed.iter().filter_map(|(name, _)| names::parse_entry(name)).collect();
    slots.sort_unstable();
    Ok((slots, listed.iter().filter_map(|(name, _)| names::parse_last(name)).max()))
}

/// Reads the log entry with number `slot`.
pub(crate) fn read(home: &Home, slot: u64) -> Result<Entry> {
    let name = names::entry(slot);
    let bytes = read_whole(&home.disk, &name, entry::LONGEST)?;
    Entry::decode(bytes, home.id, slot).map_err(|flaw| StoreError::flaw(home.name(), &name, flaw))
}

/// Decodes a section of an entry.
pub(crate) fn section(home: &Home, entry: &Entry, section: Section) -> Result<Vec<u8>> {
    entry.section(section).map_err(|flaw| StoreError::flaw(home.name(), &names::entry(entry.slot), flaw))
}

/// Decodes the manifest of an entry, and fills in the checksum of the entry's own footer.
pub(crate) fn manifest(home: &Home, entry: &Entry) -> Result<Manifest> {
    let bytes = section(home, entry, Section::Manifest)?;
    let mut manifest =
        Manifest::decode(&bytes).map_err(|flaw| StoreError::flaw(home.name(), &names::entry(entry.slot), flaw))?;
    if let Some(own) = manifest.kept.iter_mut().find(|kept| kept.slot == entry.slot) {
        own.footer = entry.footer;
    }
    Ok(manifest)
}

/// Reads the claim in the log entry with number `slot`.
pub(crate) fn claim_in(home: &Home, slot: u64) -> Result<Claim> {
    let entry = read(home, slot)?;
    let bytes = section(home, &entry, Section::Claim)?;
    let owner = serde_json::from_slice(&bytes).map_err(|_| {
        let flaw = Flaw::bad(Section::Claim.structure(), 0, "it does not name an owner");
        StoreError::flaw(home.name(), &names::entry(slot), flaw)
    })?;
    Ok(Claim { epoch: entry.epoch, owner, slot })
}

pub(crate) fn tail(home: &Home) -> Result<Tail> {
    let mut tries = 0;
    'again: loop {
        tries += 1;
        let (slots, last) = slots(home)?;
        let top = slots.last().copied().max(last).unwrap_or(0);
        let mut tail = Tail { top, epoch: 0, claim: 0, state: None };
        let mut slot = tail.top;
        while slot > 0 {
            if slots.binary_search(&slot).is_err() {
                if tries < 3 {
                    continue 'again;
                }
                // Claims are never removed. The newest manifest before each claim is not removed either.
                let needed = "the newest entries of the log have no gap".to_owned();
                return Err(StoreError::Missing { store: home.name().into(), file: names::entry(slot), needed });
            }
            let entry = match read(home, slot) {
                // The owner may have removed an entry that a newer entry replaces.
                Err(e) if e.is_not_found() && tries < TRIES => continue 'again,
                other => other?,
            };
            if tail.epoch == 0 {
                tail.epoch = entry.epoch;
            }
            if entry.kind == Kind::Claim {
                tail.claim = tail.claim.max(slot);
                slot = before(home, &entry)?;
                continue;
            }
            let manifest = manifest(home, &entry)?;
            tail.claim = tail.claim.max(manifest.claim);
            tail.state = Some((entry, manifest));
            break;
        }
        return Ok(tail);
    }
}

/// Returns the number of the entry with the newest manifest at the time of `claim`, or 0. A claim of an older Rekindle
/// does not record it; then the number of the preceding entry is returned.
fn before(home: &Home, claim: &Entry) -> Result<u64> {
    if claim.section_len(Section::Before) == 0 {
        return Ok(claim.slot - 1);
    }
    let bytes = section(home, claim, Section::Before)?;
    let before = Reader::new(&bytes).u64().filter(|before| *before < claim.slot);
    before.ok_or_else(|| {
        let flaw = Flaw::bad(Section::Before.structure(), 0, "it does not name the entry before it");
        StoreError::flaw(home.name(), &names::entry(claim.slot), flaw)
    })
}

/// Appends an entry to the log as number `slot`. Adds the time spent waiting for the disk to `waited`.
pub(crate) fn append(
    home: &Home,
    epoch: u64,
    slot: u64,
    content: &[u8],
    waited: &mut Duration,
) -> std::result::Result<(), NotAppended> {
    let new = names::new(names::LOG, epoch, &Uuid::new_v4().simple().to_string());
    let name = names::entry(slot);
    let began = Instant::now();
    let linked = write_new(&home.disk, &new, content).map_err(NotAppended::Failed).and_then(|()| {
        home.disk.link(&new, &name).or_else(|e| match read_whole(&home.disk, &name, entry::LONGEST) {
            // The entry is ours: the link succeeded, but the file server's answer was lost.
            Ok(found) if found == content => Ok(()),
            Ok(_) => Err(NotAppended::Taken),
            Err(other) if other.is_not_found() && e.kind() != io::ErrorKind::AlreadyExists => {
                Err(NotAppended::Failed(home.failed(&name, "linking the log entry")(e)))
            }
            Err(other) => Err(NotAppended::Uncertain(other)),
        })
    });
    let done = linked.and_then(|()| {
        let synced = home.disk.sync_directory(names::LOG);
        synced.map_err(|e| NotAppended::Uncertain(home.failed(names::LOG, "making the log entry durable")(e)))
    });
    *waited += began.elapsed();
    if done.is_ok() {
        // A second name, so that a reader notices if the entry is lost. The name need not be durable.
        let _ = home.disk.link(&new, &names::last(slot));
        let _ = home.disk.remove(&names::last(slot.saturating_sub(1)));
    }
    // The temporary name is not needed, whether the link succeeded or failed.
    let _ = home.disk.remove(&new);
    done
}

/// Becomes the owner of the store: no previous owner can commit any more. With `only_if`, only if that condition holds.
///
/// # Errors
/// [`StoreError::Superseded`] if the condition does not hold; damage; [`StoreError::Io`]. The previous owner is still
/// the owner then, unless the error occurred while the claim was linked or made durable: the claim may be in the log.
pub(crate) fn claim(home: &Home, owner: &Owner, only_if: Option<OnlyIf>) -> Result<(Claim, Tail)> {
    for _ in 0..TRIES {
        let tail = tail(home)?;
        let owner = follow(home, owner, &tail)?;
        let over = match only_if {
            Some(OnlyIf::Epoch(mine)) if mine != tail.epoch => Some(mine),
            Some(OnlyIf::Run { run }) if run != guest_epochs(home, &tail)?.run => Some(run),
            _ => None,
        };
        if let Some(mine) = over {
            return Err(superseded(home, mine, tail.claim));
        }
        // The existing entries must be durable before a claim that builds on them.
        home.disk.sync_directory(names::LOG).map_err(home.failed(names::LOG, "making the log durable"))?;
        let (epoch, slot) = (tail.epoch + 1, tail.top + 1);
        let text = serde_json::to_vec(&owner).map_err(|e| StoreError::io(home.name(), "", "claiming", e.into()))?;
        let mut before = Vec::new();
        before.put_u64(tail.state.as_ref().map_or(0, |(entry, _)| entry.slot));
        let sections: &[(Section, &[u8])] = &[(Section::Claim, &text), (Section::Before, &before)];
        let (content, _) = entry::encode(home.id, Kind::Claim, epoch, slot, sections);
        let mut waited = Duration::ZERO;
        match append(home, epoch, slot, &content, &mut waited) {
            Ok(()) => {}
            Err(NotAppended::Taken) => continue,
            Err(NotAppended::Failed(e) | NotAppended::Uncertain(e)) => return Err(e),
        }
        // The client of a file server may have listed an old state of the directory. Our change of the directory has
        // refreshed it.
        if follows(home, epoch, slot)? {
            return Ok((Claim { epoch, owner, slot }, tail));
        }
        let _ = home.disk.remove(&names::last(slot));
        let _ = home.disk.remove(&names::entry(slot));
    }
    let e = io::Error::new(io::ErrorKind::ResourceBusy, "other processes claim it all the time; try again later");
    Err(StoreError::io(home.name(), "", "claiming", e))
}

/// Returns whether a new claim has a correct number: all entries after it are of later owners, which have seen the
/// claim. If an entry after it is of the claim's own epoch or an earlier one, the claim has taken the number of a
/// removed entry. A correct claim must stay, because the previous owner must always find its next number taken.
fn follows(home: &Home, epoch: u64, slot: u64) -> Result<bool> {
    let (slots, _) = slots(home)?;
    if slots.binary_search(&slot).is_err() {
        return Ok(false);
    }
    for later in slots.into_iter().filter(|other| *other > slot) {
        match read(home, later) {
            Ok(entry) if entry.epoch > epoch => {}
            Ok(_) => return Ok(false),
            // The entry's owner has removed it meanwhile.
            Err(e) if e.is_not_found() => {}
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

/// Epochs in which the guest of the current owner began to run and was booted ([`Owner::run`], [`Owner::boot`]).
#[derive(Debug, Clone, Copy, Default)]
struct GuestEpochs {
    run: u64,
    boot: u64,
}

fn guest_epochs(home: &Home, tail: &Tail) -> Result<GuestEpochs> {
    if tail.claim == 0 {
        return Ok(GuestEpochs::default());
    }
    let Owner { run, boot, .. } = claim_in(home, tail.claim)?.owner;
    Ok(GuestEpochs { run, boot })
}

/// Returns `owner` with the epochs of its guest filled in for the log.
fn follow(home: &Home, owner: &Owner, tail: &Tail) -> Result<Owner> {
    let now = tail.epoch + 1;
    let GuestEpochs { run, boot } = match owner.guest {
        Guest::Booted | Guest::Ended => GuestEpochs { run: now, boot: now },
        Guest::Restored => GuestEpochs { run: now, ..guest_epochs(home, tail)? },
        Guest::Same => guest_epochs(home, tail)?,
    };
    Ok(Owner { run, boot, ..owner.clone() })
}

/// Returns the error for an owner of epoch `mine` that was superseded by entry `slot` of another owner.
pub(crate) fn superseded(home: &Home, mine: u64, slot: u64) -> StoreError {
    // Later owners may have claimed the store since.
    let newest = tail(home).map_or(slot, |tail| tail.claim.max(slot));
    match claim_in(home, newest) {
        Ok(Claim { epoch, owner, .. }) => StoreError::Superseded { store: home.name().into(), mine, epoch, owner },
        Err(e) => e,
    }
}
