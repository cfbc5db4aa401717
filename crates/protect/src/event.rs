//! What a protector reports.

use serde::{Deserialize, Serialize};
use std::fmt;

/// An event of a protector.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum ProtectEvent {
    /// Tracking of the guest's memory has started.
    Attached {
        pid: u32,
        ram_bytes: u64,
        /// The next checkpoint holds only changes: the tracking of an earlier protector is continued.
        incremental: bool,
        /// A restore still fills the memory: the next checkpoint holds what the guest has written since, on top of
        /// the one that is restored.
        #[serde(default)]
        filling: bool,
    },
    /// The fill is complete, and the memory is tracked without the pager from now on.
    Filled,
    /// A checkpoint was committed.
    Checkpoint(Box<CheckpointReport>),
    /// The guest's memory was compared with the newest checkpoint.
    Compared(Comparison),
    /// The newest committed checkpoint is older than `--max-lag`.
    Lag {
        /// Its age.
        lag_ms: u64,
        /// The limit.
        max_ms: u64,
    },
    /// The store cannot be written; the protector tries again.
    StoreAway { error: String },
    /// The store can be written again.
    StoreBack,
    /// The guest was stopped by another process, or its memory is incomplete; no checkpoint is possible until that
    /// changes.
    Waiting {
        /// The reason.
        state: String,
    },
    /// Another QEMU runs the guest now, or its RAM blocks have changed; tracking starts again.
    Moved { why: String },
}

/// A committed checkpoint and its cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CheckpointReport {
    pub number: u64,
    /// Whether it holds all of the guest's memory, not only what changed.
    pub full: bool,
    /// A restore still filled the guest's memory. Missing pages are as in the checkpoint that is restored.
    #[serde(default)]
    pub filling: bool,
    /// When the guest was stopped, in µs since 1970. The checkpoint has the guest's state of that moment.
    pub stopped_host_us: u64,
    /// Guest-stopped time: QEMU's `STOP` to `RESUME` by the host's clock, in µs.
    pub stopped_us: u64,
    /// From the guest's stop for the previous checkpoint to this one, in ms; none for the first.
    pub interval_ms: Option<u64>,
    /// The configured interval, in ms.
    pub every_ms: u64,
    /// Bytes of pages that may have changed.
    pub dirty_bytes: u64,
    /// Bytes that were copied while the guest was stopped.
    pub copied_stopped_bytes: u64,
    /// Pages copied because the guest was about to write them (`cow`).
    pub copied_for_writes: u64,
    /// Pages stored with their content.
    pub pages_stored: u64,
    pub pages_zero: u64,
    /// Pages with unchanged content.
    pub pages_unchanged: u64,
    /// Bytes of the stored pages after compression.
    pub compressed_bytes: u64,
    /// All bytes written to the store.
    pub bytes: u64,
    /// From the guest's resume to the release of the network output that it sent before its stop, in µs; none if
    /// output is not held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released_us: Option<u64>,
    /// Bytes of device state.
    pub devices_bytes: u64,
    /// From the guest's resume to the commit, in µs.
    pub commit_us: u64,
    /// Time spent writing, before the pause and after it, in µs, without waiting for the disk.
    pub writing_us: u64,
    /// Waiting until the written data is durable, in µs.
    pub syncing_us: u64,
    /// From the start of the checkpoint, before the guest was stopped, to the commit, in µs.
    #[serde(default)]
    pub took_us: u64,
    pub steps: PauseSteps,
}

/// A stopped guest's memory, compared with the newest checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Comparison {
    pub checkpoint: u64,
    /// Compared pages of all RAM blocks.
    pub pages: u64,
    /// Pages that were not compared: the guest has written them since, and the next checkpoint would have them.
    pub written_since: u64,
    /// Pages that differ: a restore would load wrong content.
    pub wrong: u64,
    /// Block ids and page numbers of the first wrong pages.
    pub named: Vec<String>,
    /// How long the guest was stopped for the comparison, in µs.
    pub stopped_us: u64,
}

/// The steps of a pause, in µs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PauseSteps {
    /// Until QEMU has stopped the guest and drained its I/O.
    pub stop: u64,
    /// Collecting the written pages and protecting them again.
    pub collect: u64,
    /// Copying by the policy.
    pub copy: u64,
    /// The rest of saving the devices.
    pub devices: u64,
    /// Separating the network output that was sent before the stop, where output is held.
    #[serde(default)]
    pub cut: u64,
    /// Until the guest runs again.
    pub resume: u64,
}

impl fmt::Display for ProtectEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let ms = |us: u64| us as f64 / 1e3;
        match self {
            Self::Attached { pid, ram_bytes, incremental, filling } => {
                let next = match (filling, incremental) {
                    (true, true) => {
                        "the restore still fills; the next checkpoint is its writes on top of the restored one"
                    }
                    (true, false) => "the restore still fills; the next checkpoint has everything that is loaded",
                    (false, true) => "continues where an earlier protector stopped",
                    (false, false) => "the next checkpoint is full",
                };
                write!(f, "tracking {:.0} MiB of QEMU process {pid}; {next}", mib(*ram_bytes))
            }
            Self::Checkpoint(done) => {
                let CheckpointReport { number, stopped_us, every_ms, dirty_bytes, bytes, commit_us, .. } = &**done;
                write!(
                    f,
                    "checkpoint {number}: stopped {:.1} ms, {:.1} MiB dirty",
                    ms(*stopped_us),
                    mib(*dirty_bytes)
                )?;
                write!(f, ", {:.1} MiB written, committed after {:.0} ms", mib(*bytes), ms(*commit_us))?;
                match done.interval_ms {
                    Some(interval) => write!(f, ", interval {:.2} s of {:.2} s", ms(interval), ms(*every_ms)),
                    None => Ok(()),
                }
            }
            Self::Compared(Comparison { checkpoint, pages, written_since, wrong, named, stopped_us }) => {
                write!(f, "{pages} pages compared with checkpoint {checkpoint} while the guest was stopped for ")?;
                write!(f, "{:.0} ms: {wrong} differ; {written_since} were written since", ms(*stopped_us))?;
                if named.is_empty() { Ok(()) } else { write!(f, ". Wrong: {}", named.join(", ")) }
            }
            Self::Lag { lag_ms, max_ms } => {
                write!(f, "the newest checkpoint is {:.1} s old, more than {:.1} s", ms(*lag_ms), ms(*max_ms))
            }
            Self::StoreAway { error } => write!(f, "the store cannot be written, trying again: {error}"),
            Self::Filled => write!(f, "all memory is loaded; tracking continues without the pager"),
            Self::StoreBack => write!(f, "the store can be written again"),
            Self::Waiting { state } => write!(f, "no checkpoint for now: {state}"),
            Self::Moved { why } => write!(f, "tracking starts again: {why}"),
        }
    }
}
