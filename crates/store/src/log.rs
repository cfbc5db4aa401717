//! The log: numbered entries that appear all at once, or not at all because somebody else was first.
//!
//! A new entry is written under another name, synced, and then linked to its number. The link is the whole commit, and
//! the whole check of the owner epoch: whoever was superseded finds the claim of the next owner under its number.

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

/// How often something is looked at again that others change meanwhile.
pub(crate) const TRIES: usize = 100;

/// The end of the log.
#[derive(Debug)]
pub(crate) struct Tail {
    /// Number of the newest entry; 0 if there is none.
    pub top: u64,
    /// The owner epoch; 0 before the first claim.
    pub epoch: u64,
    /// Number of the entry by which the owner claimed the store.
    pub claim: u64,
    /// The newest entry with a manifest, and that.
    pub state: Option<(Entry, Manifest)>,
}

/// The owner of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Its epoch.
    pub epoch: u64,
    /// Who it is.
    pub owner: Owner,
    /// Its entry.
    pub(crate) slot: u64,
}

/// Why an entry is not in the log.
#[derive(Debug)]
pub(crate) enum NotAppended {
    /// Somebody else's has its number.
    Taken,
    /// It certainly is not there.
    Failed(StoreError),
    /// It may or may not last.
    Uncertain(StoreError),
}

/// Numbers of the entries, ascending, and of the one that was there last, as far as that is known.
pub(crate) fn slots(home: &Home) -> Result<(Vec<u64>, Option<u64>)> {
    let listed = home.disk.list(names::LOG).map_err(home.failed(names::LOG, "looking into the directory"))?;
    let mut slots: Vec<_> = listed.iter().filter_map(|(name, _)| names::parse_entry(name)).collect();
    slots.sort_unstable();
    Ok((slots, listed.iter().filter_map(|(name, _)| names::parse_last(name)).max()))
}

/// The entry `slot`.
pub(crate) fn read(home: &Home, slot: u64) -> Result<Entry> {
    let name = names::entry(slot);
    let bytes = read_whole(&home.disk, &name, entry::LONGEST)?;
    Entry::decode(bytes, home.id, slot).map_err(|flaw| StoreError::flaw(home.name(), &name, flaw))
}

/// A section of an entry.
pub(crate) fn section(home: &Home, entry: &Entry, section: Section) -> Result<Vec<u8>> {
    entry.section(section).map_err(|flaw| StoreError::flaw(home.name(), &names::entry(entry.slot), flaw))
}

/// The manifest in an entry. It knows its own checksum from there.
pub(crate) fn manifest(home: &Home, entry: &Entry) -> Result<Manifest> {
    let bytes = section(home, entry, Section::Manifest)?;
    let mut manifest =
        Manifest::decode(&bytes).map_err(|flaw| StoreError::flaw(home.name(), &names::entry(entry.slot), flaw))?;
    if let Some(own) = manifest.kept.iter_mut().find(|kept| kept.slot == entry.slot) {
        own.footer = entry.footer;
    }
    Ok(manifest)
}

/// Who claimed the store by entry `slot`.
pub(crate) fn claim_in(home: &Home, slot: u64) -> Result<Claim> {
    let entry = read(home, slot)?;
    let bytes = section(home, &entry, Section::Claim)?;
    let owner = serde_json::from_slice(&bytes).map_err(|_| {
        let flaw = Flaw::bad(Section::Claim.structure(), 0, "it does not name an owner");
        StoreError::flaw(home.name(), &names::entry(slot), flaw)
    })?;
    Ok(Claim { epoch: entry.epoch, owner, slot })
}

/// The end of the log.
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
                // Claims are kept for ever, and below them the newest manifest.
                let needed = "the newest entries of the log have no gap".to_owned();
                return Err(StoreError::Missing { store: home.name().into(), file: names::entry(slot), needed });
            }
            let entry = match read(home, slot) {
                // An owner at work removes entries that a newer one has replaced.
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

/// Where the newest manifest was when a store was claimed by `claim`, or 0; else the entry before it.
fn before(home: &Home, claim: &Entry) -> Result<u64> {
    if claim.section_len(Section::Before) == 0 {
        return Ok(claim.slot - 1);
    }
    let bytes = section(home, claim, Section::Before)?;
    let before = Reader::new(&bytes).u64().filter(|before| *before < claim.slot);
    before.ok_or_else(|| {
        let flaw = Flaw::bad(Section::Before.structure(), 0, "it does not say what was before it");
        StoreError::flaw(home.name(), &names::entry(claim.slot), flaw)
    })
}

/// Put an entry into the log as number `slot`. `waited` grows by the time spent in waiting for the disk.
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
            // An answer that got lost on its way from a file server: it is ours.
            Ok(there) if there == content => Ok(()),
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
        // So that it is missed if it goes. Nothing waits for that to be durable.
        let _ = home.disk.link(&new, &names::last(slot));
        let _ = home.disk.remove(&names::last(slot.saturating_sub(1)));
    }
    // Its first name is of no use, whatever became of it.
    let _ = home.disk.remove(&new);
    done
}

/// Become the owner of the store: from now on nothing of an earlier owner can count any more. With `only_if`, only if
/// that holds still.
///
/// # Errors
/// [`StoreError::Superseded`] if it is not; damage and the system's errors, after which the earlier owner still holds.
pub(crate) fn claim(home: &Home, owner: &Owner, only_if: Option<OnlyIf>) -> Result<(Claim, Tail)> {
    for _ in 0..TRIES {
        let tail = tail(home)?;
        let owner = follow(home, owner, &tail)?;
        let over = match only_if {
            Some(OnlyIf::Epoch(mine)) if mine != tail.epoch => Some(mine),
            Some(OnlyIf::Run { run }) if run != before_it(home, &tail)?.run => Some(run),
            _ => None,
        };
        if let Some(mine) = over {
            return Err(superseded(home, mine, tail.claim));
        }
        // What we found must last at least as long as what we build on it.
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
        // A file server's client may have shown an old list of the directory. It is fresh now, since we changed it.
        if follows(home, epoch, slot)? {
            return Ok((Claim { epoch, owner, slot }, tail));
        }
        let _ = home.disk.remove(&names::last(slot));
        let _ = home.disk.remove(&names::entry(slot));
    }
    let e = io::Error::new(io::ErrorKind::ResourceBusy, "others claim it all the time");
    Err(StoreError::io(home.name(), "", "claiming", e))
}

/// Whether a claim that has just got its number is where it belongs: what comes after it is of later owners, which have seen it. A
/// claim among entries of its own or an earlier epoch has taken the number of one that is not needed any more. A claim that was right
/// must stay: the owner before it must find its next number taken for ever.
fn follows(home: &Home, epoch: u64, slot: u64) -> Result<bool> {
    let (slots, _) = slots(home)?;
    if slots.binary_search(&slot).is_err() {
        return Ok(false);
    }
    for later in slots.into_iter().filter(|other| *other > slot) {
        match read(home, later) {
            Ok(entry) if entry.epoch > epoch => {}
            Ok(_) => return Ok(false),
            // Its owner needs it no more.
            Err(e) if e.is_not_found() => {}
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

/// When the guest of the owner so far began.
#[derive(Debug, Clone, Copy, Default)]
struct Before {
    run: u64,
    boot: u64,
}

fn before_it(home: &Home, tail: &Tail) -> Result<Before> {
    if tail.claim == 0 {
        return Ok(Before::default());
    }
    let Owner { run, boot, .. } = claim_in(home, tail.claim)?.owner;
    Ok(Before { run, boot })
}

/// `owner` as it is going to be in the log, with the epochs of its guest.
fn follow(home: &Home, owner: &Owner, tail: &Tail) -> Result<Owner> {
    let now = tail.epoch + 1;
    let Before { run, boot } = match owner.guest {
        Guest::Booted | Guest::Ended => Before { run: now, boot: now },
        Guest::Restored => Before { run: now, ..before_it(home, tail)? },
        Guest::Same => before_it(home, tail)?,
    };
    Ok(Owner { run, boot, ..owner.clone() })
}

/// The error for an owner whose epoch `mine` is over, because of the entry `slot` of another owner.
pub(crate) fn superseded(home: &Home, mine: u64, slot: u64) -> StoreError {
    // There may be newer ones still.
    let newest = tail(home).map_or(slot, |tail| tail.claim.max(slot));
    match claim_in(home, newest) {
        Ok(Claim { epoch, owner, .. }) => StoreError::Superseded { store: home.name().into(), mine, epoch, owner },
        Err(e) => e,
    }
}
