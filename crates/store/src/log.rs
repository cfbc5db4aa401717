//! The log: numbered entries. An entry is a *claim*, by which a host becomes the owner of the store, or it commits a
//! checkpoint or a compaction. The *owner epoch* counts the owners.
//!
//! An entry appears atomically, or not at all if another process took its number first.
//!
//! A new entry is written under a temporary name, synced, and then linked to its number. The link is the commit, and
//! also checks the owner epoch: for a superseded owner the link fails, because the claim of the next owner has the
//! number.

use crate::directory::{StoreDirectory, check_exclusive_links, read_whole, write_new};
use crate::error::{Result, StoreError};
use crate::format::codec::{Reader, Writer};
use crate::format::entry::{self, EncodedEntry, Entry, Kind, Section};
use crate::format::manifest::{EntryId, KeptCheckpoint, Manifest};
use crate::format::names;
use crate::format::sealed_entry;
use crate::format::{Flaw, Structure};
use crate::sealing::FileIdentity;
use crate::types::{Expected, Guest, KnownState, KnownStore, OnlyIf, Owner};
use serde::Serialize;
use std::borrow::Cow;
use std::io;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Limit of attempts to read or claim a store that other processes change concurrently.
pub(crate) const MAX_ATTEMPTS: usize = 100;

/// Attempts to list the log after which a gap in the newest entries is an error.
const GAP_ATTEMPTS: usize = 3;

/// The end of the log.
#[derive(Debug)]
pub(crate) struct LogTail {
    /// Number of the newest entry; 0 if the log is empty.
    pub newest: u64,
    /// Owner epoch; 0 before the first claim.
    pub epoch: u64,
    /// The entry by which the current owner claimed the store; number 0 before the first claim.
    pub claim: EntryId,
    pub newest_state: Option<StateEntry>,
}

/// A log entry with a manifest. The newest one determines the state of the store.
#[derive(Debug)]
pub(crate) struct StateEntry {
    pub entry: Entry,
    pub manifest: Manifest,
}

/// The ownership of a store in one epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    pub epoch: u64,
    pub owner: Owner,
    /// The claim's log entry.
    pub(crate) entry: EntryId,
}

/// The content of a claim. The id makes it different from every other claim: a process recognizes its own claim by the
/// content.
#[derive(Serialize)]
struct UniqueClaim<'a> {
    #[serde(flatten)]
    owner: &'a Owner,
    id: Uuid,
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

/// Numbers of the files in the directory of the log.
pub(crate) struct LogListing {
    /// Numbers of all entries, ascending.
    pub log_numbers: Vec<u64>,
    /// Number in the second name of the newest entry, if it has one.
    pub second_name: Option<u64>,
}

pub(crate) fn list(store: &StoreDirectory) -> Result<LogListing> {
    let files = store.disk.list(names::LOG).map_err(store.failed(names::LOG, "listing the directory"))?;
    let mut log_numbers: Vec<_> = files.iter().filter_map(|(name, _)| names::parse_entry(name)).collect();
    log_numbers.sort_unstable();
    Ok(LogListing { log_numbers, second_name: files.iter().filter_map(|(name, _)| names::parse_last(name)).max() })
}

/// Reads the log entry with number `log_number`.
pub(crate) fn read(store: &StoreDirectory, log_number: u64) -> Result<Entry> {
    let name = names::entry(log_number);
    let bytes = read_whole(&store.disk, &name, entry::MAX_ENTRY_BYTES + sealed_entry::OVERHEAD)?;
    opened(store, log_number, bytes)
        .and_then(|bytes| Entry::decode(bytes, store.id, log_number))
        .map_err(|flaw| StoreError::flaw(store.name(), &name, flaw))
}

/// Decrypts the content of a log file, if the store is encrypted.
fn opened(store: &StoreDirectory, log_number: u64, bytes: Vec<u8>) -> std::result::Result<Vec<u8>, Flaw> {
    let seal = sealed_entry::decode_header(&bytes)?;
    match store.find_key(FileIdentity::Entry(log_number), seal, Structure::EntryHeader)? {
        Some(key) => sealed_entry::open(&key, bytes),
        None => Ok(bytes),
    }
}

/// Encrypts the content of a log file, if the store is encrypted.
fn sealed<'c>(store: &StoreDirectory, log_number: u64, content: &'c [u8]) -> Result<Cow<'c, [u8]>> {
    let name = names::entry(log_number);
    match store.create_key(FileIdentity::Entry(log_number), &name)? {
        Some((seal, key)) => {
            sealed_entry::seal(seal, &key, content).map(Cow::Owned).map_err(store.failed(&name, "encrypting"))
        }
        None => Ok(Cow::Borrowed(content)),
    }
}

/// Decodes a section of an entry.
pub(crate) fn section(store: &StoreDirectory, entry: &Entry, section: Section) -> Result<Vec<u8>> {
    entry.section(section).map_err(|flaw| StoreError::flaw(store.name(), &names::entry(entry.log_number), flaw))
}

/// Decodes the manifest of an entry, and fills in the checksum of the entry's own footer.
pub(crate) fn manifest(store: &StoreDirectory, entry: &Entry) -> Result<Manifest> {
    let bytes = section(store, entry, Section::Manifest)?;
    let mut manifest = Manifest::decode(&bytes)
        .map_err(|flaw| StoreError::flaw(store.name(), &names::entry(entry.log_number), flaw))?;
    if let Some(own) = manifest.kept.iter_mut().find(|kept| kept.log_number == entry.log_number) {
        own.footer = entry.footer;
    }
    if let Some(sealed) = &mut manifest.sealed {
        sealed.base_entries.push(EntryId { log_number: entry.log_number, footer: entry.footer });
    }
    if manifest.sealed.is_some() != store.is_encrypted() {
        let flaw =
            Flaw::bad(Structure::Manifest, 0, "it is of an encrypted store, and this one is not, or the reverse");
        return Err(StoreError::flaw(store.name(), &names::entry(entry.log_number), flaw));
    }
    Ok(manifest)
}

/// Reads the claim in a log entry, whose footer is checked if it is known (not 0).
pub(crate) fn read_claim(store: &StoreDirectory, EntryId { log_number, footer }: EntryId) -> Result<Claim> {
    let entry = read(store, log_number)?;
    if footer != 0 && footer != entry.footer {
        let flaw = Flaw::bad(Structure::EntryFooter, 0, "it is not the claim that the manifest names");
        return Err(StoreError::flaw(store.name(), &names::entry(log_number), flaw));
    }
    let bytes = section(store, &entry, Section::Claim)?;
    let owner = serde_json::from_slice(&bytes).map_err(|_| {
        let flaw = Flaw::bad(Section::Claim.structure(), 0, "it does not name an owner");
        StoreError::flaw(store.name(), &names::entry(log_number), flaw)
    })?;
    Ok(Claim { epoch: entry.epoch, owner, entry: EntryId { log_number, footer: entry.footer } })
}

/// Reads the end of the log: the newest entry, the claims before it, and the newest entry with a manifest.
pub(crate) fn tail(store: &StoreDirectory) -> Result<LogTail> {
    let mut attempts = 0;
    'attempt: loop {
        attempts += 1;
        let LogListing { log_numbers, second_name } = list(store)?;
        let newest = log_numbers.last().copied().max(second_name).unwrap_or(0);
        let mut tail = LogTail { newest, epoch: 0, claim: EntryId::default(), newest_state: None };
        let mut next = EntryId::numbered(newest);
        while next.log_number > 0 {
            let log_number = next.log_number;
            if log_numbers.binary_search(&log_number).is_err() {
                if attempts < GAP_ATTEMPTS {
                    continue 'attempt;
                }
                // Claims are never removed. The newest manifest before each claim is not removed either.
                let needed = "the newest entries of the log have no gap".to_owned();
                let file = names::entry(log_number);
                return Err(StoreError::Missing { store: store.name().into(), file, needed });
            }
            let entry = match read(store, log_number) {
                // The owner may have removed an entry that a newer entry replaces.
                Err(e) if e.is_not_found() && attempts < MAX_ATTEMPTS => continue 'attempt,
                result => result?,
            };
            if tail.epoch == 0 {
                tail.epoch = entry.epoch;
            }
            if entry.kind == Kind::Claim {
                if tail.claim.log_number < log_number {
                    tail.claim = EntryId { log_number, footer: entry.footer };
                }
                next = state_before_claim(store, &entry)?;
                continue;
            }
            if next.footer != 0 && next.footer != entry.footer {
                let flaw = Flaw::bad(Structure::EntryFooter, 0, "it is not the entry that the claim after it names");
                return Err(StoreError::flaw(store.name(), &names::entry(log_number), flaw));
            }
            let manifest = manifest(store, &entry)?;
            if tail.claim.log_number < manifest.claim {
                let footer = manifest.sealed.as_ref().map_or(0, |sealed| sealed.claim_footer);
                tail.claim = EntryId { log_number: manifest.claim, footer };
            }
            tail.newest_state = Some(StateEntry { entry, manifest });
            break;
        }
        return Ok(tail);
    }
}

/// Returns the entry with the newest manifest at the time of `claim`, or number 0. A claim of an older Rekindle does not
/// record it; then the preceding entry is returned. The footer is known in encrypted stores.
fn state_before_claim(store: &StoreDirectory, claim: &Entry) -> Result<EntryId> {
    if claim.section_len(Section::Before) == 0 {
        return Ok(EntryId::numbered(claim.log_number - 1));
    }
    let bytes = section(store, claim, Section::Before)?;
    let mut reader = Reader::new(&bytes);
    let before = reader.u64().filter(|before| *before < claim.log_number);
    let footer = if store.is_encrypted() { reader.u64() } else { Some(0) };
    before.zip(footer).map(|(log_number, footer)| EntryId { log_number, footer }).ok_or_else(|| {
        let flaw = Flaw::bad(Section::Before.structure(), 0, "it does not name the entry before it");
        StoreError::flaw(store.name(), &names::entry(claim.log_number), flaw)
    })
}

/// Appends an entry to the log as number `log_number`. Adds the time spent waiting for the disk to `sync_time`.
pub(crate) fn append(
    store: &StoreDirectory,
    epoch: u64,
    log_number: u64,
    content: &[u8],
    sync_time: &mut Duration,
) -> std::result::Result<(), NotAppended> {
    let temporary = names::new(names::LOG, epoch, &Uuid::new_v4().simple().to_string());
    let started_at = Instant::now();
    let content = sealed(store, log_number, content).map_err(NotAppended::Failed)?;
    let appended = write_new(&store.disk, &temporary, &content)
        .map_err(NotAppended::Failed)
        .and_then(|()| link_entry(store, &temporary, log_number, &content))
        .and_then(|()| {
            store
                .disk
                .sync_directory(names::LOG)
                .map_err(|e| NotAppended::Uncertain(store.failed(names::LOG, "making the log entry durable")(e)))
        });
    *sync_time += started_at.elapsed();
    if appended.is_ok() {
        // A second name, so that a reader notices if the entry is lost. The name need not be durable.
        let (marker, previous) = (names::last(log_number), names::last(log_number.saturating_sub(1)));
        store.disk.replace_marker(&temporary, &marker, &previous);
    }
    // The temporary name is not needed, whether the link succeeded or failed.
    let _ = store.disk.remove(&temporary);
    appended
}

/// Links the file `temporary` to its number in the log. This is the commit of the entry.
fn link_entry(
    store: &StoreDirectory,
    temporary: &str,
    log_number: u64,
    content: &[u8],
) -> std::result::Result<(), NotAppended> {
    let name = names::entry(log_number);
    let Err(link_error) = store.disk.link(temporary, &name) else { return Ok(()) };
    match read_whole(&store.disk, &name, entry::MAX_ENTRY_BYTES + sealed_entry::OVERHEAD) {
        // The entry is ours: the link succeeded, but the file server's answer was lost.
        Ok(existing) if existing == content => Ok(()),
        Ok(_) => Err(NotAppended::Taken),
        // A request to an object store may still be carried out.
        Err(_) if link_error.kind() == io::ErrorKind::TimedOut => {
            Err(NotAppended::Uncertain(store.failed(&name, "linking the log entry")(link_error)))
        }
        Err(e) if e.is_not_found() && link_error.kind() != io::ErrorKind::AlreadyExists => {
            Err(NotAppended::Failed(store.failed(&name, "linking the log entry")(link_error)))
        }
        Err(e) => Err(NotAppended::Uncertain(e)),
    }
}

/// Becomes the owner of the store: no previous owner can commit any more. With `only_if`, only if that condition holds.
///
/// # Errors
/// [`StoreError::Superseded`] if the condition does not hold; damage; [`StoreError::Io`]. The previous owner is still
/// the owner then, unless the error occurred while the claim was linked or made durable: the claim may be in the log.
pub(crate) fn claim(store: &StoreDirectory, owner: &Owner, only_if: Option<OnlyIf>) -> Result<(Claim, LogTail)> {
    check_exclusive_links(&store.disk)?;
    // The process that created the store may have ended, or failed, before the superblock's name was durable. Then a
    // power failure would take the superblock, and with it all that is committed from now on.
    store.disk.sync_directory("").map_err(store.failed("", "making the superblock durable"))?;
    for _ in 0..MAX_ATTEMPTS {
        let tail = tail(store)?;
        let owner = with_guest_epochs(store, owner, &tail)?;
        check_condition(store, &tail, only_if)?;
        // The existing entries must be durable before a claim that builds on them.
        store.disk.sync_directory(names::LOG).map_err(store.failed(names::LOG, "making the log durable"))?;
        let (epoch, log_number) = (tail.epoch + 1, tail.newest + 1);
        let entry = encode_claim(store, epoch, log_number, &owner, &tail)?;
        match append(store, epoch, log_number, &entry.bytes, &mut Duration::default()) {
            Ok(()) => {}
            Err(NotAppended::Taken) => continue,
            Err(NotAppended::Failed(e) | NotAppended::Uncertain(e)) => return Err(e),
        }
        // The client of a file server may have listed an old state of the directory. Our change of the directory has
        // refreshed it.
        if claim_number_is_valid(store, epoch, log_number)? {
            let entry = EntryId { log_number, footer: entry.footer };
            return Ok((Claim { epoch, owner, entry }, tail));
        }
        let _ = store.disk.remove(&names::last(log_number));
        let _ = store.disk.remove(&names::entry(log_number));
    }
    let e = io::Error::new(io::ErrorKind::ResourceBusy, "other processes claim it all the time; try again later");
    Err(StoreError::io(store.name(), "", "claiming", e))
}

/// Fails with [`StoreError::Superseded`] if the condition for a claim does not hold.
fn check_condition(store: &StoreDirectory, tail: &LogTail, only_if: Option<OnlyIf>) -> Result<()> {
    let expected_epoch = match only_if {
        Some(OnlyIf::Expected(expected)) => {
            check_expected(store, tail, &expected)?;
            match expected.at_epoch {
                Some(epoch) if epoch != tail.epoch => epoch,
                _ => return Ok(()),
            }
        }
        Some(OnlyIf::Epoch(epoch)) if epoch != tail.epoch => epoch,
        Some(OnlyIf::Run { run }) if run != guest_epochs(store, tail)?.run => run,
        _ => return Ok(()),
    };
    Err(superseded(store, expected_epoch, tail.claim.log_number))
}

/// Fails with [`StoreError::NotReached`], [`StoreError::OtherStore`], [`StoreError::RolledBack`] or
/// [`StoreError::OtherHistory`] if the store is not what is expected of it.
pub(crate) fn check_expected(store: &StoreDirectory, tail: &LogTail, expected: &Expected) -> Result<()> {
    let kept = tail.newest_state.as_ref().map_or(&[][..], |state| &state.manifest.kept);
    let found = KnownState { epoch: tail.epoch, checkpoint: kept.last().map_or(0, |kept| kept.number) };
    let name = || store.name().to_owned();
    require_reached(store.name(), found, expected.at_least)?;
    let Some(known) = expected.known else { return Ok(()) };
    if known.id != store.id {
        // Without encryption, the ID proves nothing.
        return if known.encrypted { Err(StoreError::OtherStore { store: name() }) } else { Ok(()) };
    }
    if !found.has_reached(known.reached) {
        return Err(StoreError::RolledBack { store: name(), found, known: known.reached });
    }
    let same = kept.iter().find(|kept| kept.number == known.reached.checkpoint);
    let has_other_claim = tail.epoch == known.reached.epoch && tail.claim.footer != known.claim_footer;
    // Without encryption, a manifest does not have the claim's footer.
    if same.is_some_and(|kept| kept.footer != known.footer) || (has_other_claim && tail.claim.footer != 0) {
        return Err(StoreError::OtherHistory { store: name(), known: known.reached });
    }
    Ok(())
}

/// Fails with [`StoreError::NotReached`] if a store has not reached a state.
fn require_reached(store: &str, found: KnownState, required: KnownState) -> Result<()> {
    if found.has_reached(required) {
        Ok(())
    } else {
        Err(StoreError::NotReached { store: store.into(), found, required })
    }
}

impl KnownStore {
    /// Returns what is known of a store in an owner epoch. `newest`: its newest checkpoint.
    pub(crate) fn of(store: &StoreDirectory, claim: &Claim, newest: Option<KeptCheckpoint>) -> Self {
        let reached = KnownState { epoch: claim.epoch, checkpoint: newest.map_or(0, |kept| kept.number) };
        let (footer, claim_footer) = (newest.map_or(0, |kept| kept.footer), claim.entry.footer);
        Self { id: store.id, encrypted: store.is_encrypted(), reached, footer, claim_footer }
    }
}

fn encode_claim(
    store: &StoreDirectory,
    epoch: u64,
    log_number: u64,
    owner: &Owner,
    tail: &LogTail,
) -> Result<EncodedEntry> {
    let claim = UniqueClaim { owner, id: Uuid::new_v4() };
    let owner = serde_json::to_vec(&claim).map_err(|e| StoreError::io(store.name(), "", "claiming", e.into()))?;
    let state = tail.newest_state.as_ref().map(|state| &state.entry);
    let mut before = Vec::new();
    before.put_u64(state.map_or(0, |entry| entry.log_number));
    if store.is_encrypted() {
        before.put_u64(state.map_or(0, |entry| entry.footer));
    }
    let sections: &[(Section, &[u8])] = &[(Section::Claim, &owner), (Section::Before, &before)];
    Ok(entry::encode(store.id, Kind::Claim, epoch, log_number, sections))
}

/// Returns whether a new claim has a correct number: all entries after it are of later owners, which have seen the
/// claim. If an entry after it is of the claim's own epoch or an earlier one, the claim has taken the number of a
/// removed entry. A correct claim must stay, because the previous owner must always find its next number taken.
fn claim_number_is_valid(store: &StoreDirectory, epoch: u64, log_number: u64) -> Result<bool> {
    let LogListing { log_numbers, .. } = list(store)?;
    if log_numbers.binary_search(&log_number).is_err() {
        return Ok(false);
    }
    for later in log_numbers.into_iter().filter(|listed| *listed > log_number) {
        match read(store, later) {
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

fn guest_epochs(store: &StoreDirectory, tail: &LogTail) -> Result<GuestEpochs> {
    if tail.claim.log_number == 0 {
        return Ok(GuestEpochs::default());
    }
    let Owner { run, boot, .. } = read_claim(store, tail.claim)?.owner;
    Ok(GuestEpochs { run, boot })
}

/// Returns `owner` with the epochs of its guest filled in for the log.
fn with_guest_epochs(store: &StoreDirectory, owner: &Owner, tail: &LogTail) -> Result<Owner> {
    let new_epoch = tail.epoch + 1;
    let GuestEpochs { run, boot } = match owner.guest {
        Guest::Booted | Guest::Ended => GuestEpochs { run: new_epoch, boot: new_epoch },
        Guest::Restored => GuestEpochs { run: new_epoch, ..guest_epochs(store, tail)? },
        Guest::Same => guest_epochs(store, tail)?,
    };
    Ok(Owner { run, boot, ..owner.clone() })
}

/// Returns the error for an owner of epoch `mine` that was superseded by entry `log_number` of another owner.
pub(crate) fn superseded(store: &StoreDirectory, mine: u64, log_number: u64) -> StoreError {
    // Later owners may have claimed the store since.
    let found = EntryId::numbered(log_number);
    let newest = tail(store).map_or(found, |tail| if tail.claim.log_number < log_number { found } else { tail.claim });
    match read_claim(store, newest) {
        Ok(Claim { epoch, owner, .. }) => StoreError::Superseded { store: store.name().into(), mine, epoch, owner },
        Err(e) => e,
    }
}
