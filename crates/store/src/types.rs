//! VMs, RAM blocks, owners and checkpoints of a store.

use rekindle_pages::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use uuid::Uuid;

/// The VM to which a store belongs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vm {
    pub uuid: Uuid,
    /// Name for users.
    pub name: String,
}

/// A RAM block as it was at a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// QEMU's name of the block, as `info ramblock` shows it.
    pub id: String,
    /// Bytes in use, which are stored.
    pub used: u64,
    /// Bytes to which the block may grow.
    pub max: u64,
    /// Page size of the backing memory (4 KiB, or the huge page size). The store's own pages always have [`PAGE_SIZE`].
    pub page_size: u64,
}

impl Block {
    /// Returns the number of pages of [`PAGE_SIZE`].
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.used.div_ceil(PAGE_SIZE as u64)
    }
}

/// Effect on the guest when its store gets a new owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Guest {
    /// The guest continues to run unchanged.
    #[default]
    Same,
    /// The guest was booted: earlier checkpoints belong to another run of the guest.
    Booted,
    /// The guest resumes from a checkpoint.
    Restored,
    /// The guest was cleanly shut down: no checkpoint may be restored.
    Ended,
}

/// Condition for becoming the owner of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnlyIf {
    /// The owner epoch still has this value.
    Epoch(u64),
    /// The guest is still the one that began in epoch `run`, even if the store has had other owners since.
    Run { run: u64 },
    /// The store is the expected one, and has reached the expected state.
    Expected(Expected),
}

/// How far a store has come: its owners and its checkpoints are counted up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct KnownState {
    /// Owner epoch.
    pub epoch: u64,
    /// Number of the newest checkpoint.
    pub checkpoint: u64,
}

/// What is known of a store that was used before. A store that has not reached the same state was rolled back, or is an old copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownStore {
    /// ID of the store.
    pub id: Uuid,
    pub encrypted: bool,
    #[serde(flatten)]
    pub reached: KnownState,
    /// Checksum in the footer of the newest checkpoint's log entry: two histories of one store may have a checkpoint of
    /// the same number. 0 without a checkpoint.
    pub footer: u64,
    /// Checksum in the footer of the owner's claim: two histories may have an owner of the same epoch.
    pub claim_footer: u64,
}

impl KnownStore {
    /// Returns whether both are the same store with the same newest checkpoint, whichever owner it has.
    #[must_use]
    pub fn has_same_checkpoint(&self, other: &Self) -> bool {
        let newest = |known: &Self| (known.id, known.reached.checkpoint, known.footer);
        newest(self) == newest(other)
    }
}

/// What a store must be to be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Expected {
    /// The state that the store must have reached, whichever it is.
    pub at_least: KnownState,
    /// The owner epoch that the store must still have.
    pub at_epoch: Option<u64>,
    /// What is known of the store of the VM. If it is encrypted, no other store may take its place.
    pub known: Option<KnownStore>,
}

impl Expected {
    /// Returns whether a new store, which has no VM yet, can be the expected one.
    pub(crate) fn allows_unused(&self) -> bool {
        let is_encrypted = self.known.is_some_and(|known| known.encrypted);
        self.at_least == KnownState::default() && self.at_epoch.is_none() && !is_encrypted
    }
}

impl KnownState {
    /// Returns whether a store in this state has reached `required`.
    pub(crate) fn has_reached(self, required: Self) -> bool {
        self.epoch >= required.epoch && self.checkpoint >= required.checkpoint
    }
}

impl fmt::Display for KnownState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "owner epoch {}, checkpoint {}", self.epoch, self.checkpoint)
    }
}

/// The owner of a store. Only commits of the newest owner are valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// Name of the owner's host.
    pub host: String,
    /// Process ID on the owner's host.
    pub pid: u32,
    /// Operation as shown to users, e.g. `protect web`.
    pub operation: String,
    /// Time when the ownership began, in microseconds since 1970 by the owner's clock.
    pub since_us: u64,
    /// Effect of the owner's operation on the guest.
    #[serde(default)]
    pub guest: Guest,
    /// Epoch in which the guest began to run on its host, or was shut down. A host that runs the guest since an earlier
    /// epoch must stop the guest. The store fills this in; 0 if unknown, because an older Rekindle has claimed the
    /// store.
    #[serde(default)]
    pub run: u64,
    /// Epoch in which the guest was booted or shut down. Checkpoints of earlier epochs belong to an earlier boot. The
    /// store fills this in; 0 if unknown.
    #[serde(default)]
    pub boot: u64,
}

impl Owner {
    /// Returns an owner for this process and `operation`, with the guest unchanged ([`Guest::Same`]).
    #[must_use]
    pub fn here(operation: &str) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let (pid, operation, since_us) = (std::process::id(), operation.to_owned(), now_us());
        Self { host, pid, operation, since_us, guest: Guest::Same, run: 0, boot: 0 }
    }

    #[must_use]
    pub fn with(self, guest: Guest) -> Self {
        Self { guest, ..self }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, pid, operation, since_us, .. } = self;
        write!(f, "`{operation}` on {host} (process {pid}), since {}", utc(*since_us))
    }
}

/// Numbers of pages in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Pages {
    /// Pages stored with content.
    pub stored: u64,
    /// Pages recorded as zero.
    pub zero: u64,
    /// Pages that the caller has added but that were unchanged, so that they were not stored.
    pub unchanged: u64,
    /// Bytes of the stored pages after compression.
    pub compressed: u64,
}

/// A committed checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointInfo {
    /// Number of the checkpoint. The first checkpoint of a store has number 1; numbers have no gaps.
    pub number: u64,
    /// Epoch of the owner that committed the checkpoint.
    pub epoch: u64,
    /// Time of the commit, in microseconds since 1970 by the owner's clock.
    pub time_us: u64,
    pub blocks: Vec<Block>,
    pub pages: Pages,
    /// Total bytes written for the checkpoint.
    pub bytes: u64,
    /// Bytes of the device state.
    pub devices: u64,
}

/// Result of a commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Committed {
    /// Number of the checkpoint.
    pub number: u64,
    pub pages: Pages,
    /// Total bytes written for the checkpoint.
    pub bytes: u64,
    /// Time spent writing.
    pub writing: Duration,
    /// Time spent waiting for the disk.
    pub syncing: Duration,
    /// What is known of the store now.
    #[serde(skip)]
    pub known: KnownStore,
}

/// Returns the current time in microseconds since 1970.
pub fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

/// Formats a time for users: `2025-03-01 12:30:05.123 UTC`.
#[must_use]
pub fn utc(us: u64) -> String {
    let (seconds, ms) = (us / 1_000_000, us / 1000 % 1000);
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    // Civil date from days since 1970, counted in years that begin in March so that the leap day comes last.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    let year = year + era * 400 + carry;
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{ms:03} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_dates() {
        assert_eq!(utc(0), "1970-01-01 00:00:00.000 UTC");
        assert_eq!(utc(951_827_696_789_000), "2000-02-29 12:34:56.789 UTC");
        assert_eq!(utc(1_735_689_599_999_999), "2024-12-31 23:59:59.999 UTC");
    }
}
