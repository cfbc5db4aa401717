//! Events that a protector reports.

use serde::{Deserialize, Serialize};
use std::fmt;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum ProtectEvent {
    /// Tracking of the guest's memory has started.
    Attached {
        pid: u32,
        ram_bytes: u64,
        /// The tracking of an earlier protector continues, so that the next checkpoint contains only changes.
        incremental: bool,
        /// A restore still fills the memory. The next checkpoint contains the writes since the restored checkpoint, on
        /// top of that one.
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
        /// Age of the newest checkpoint.
        lag_ms: u64,
        /// Value of `--max-lag`.
        max_ms: u64,
    },
    /// The store cannot be written; the protector retries.
    StoreAway { error: String },
    /// The store can be written again.
    StoreBack,
    /// No checkpoint is possible for now: the guest was stopped by another process, its memory is incomplete, a disk
    /// server rejects the checkpoint, libvirt's daemon does not answer, or the VM needs recovery.
    Waiting {
        /// The reason, as a sentence fragment.
        state: String,
    },
    /// Another QEMU runs the guest now, or its RAM blocks have changed; tracking starts again.
    Moved { why: String },
}

/// A committed checkpoint and its costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CheckpointReport {
    pub number: u64,
    /// The checkpoint contains all of the guest's memory, not only the changes.
    pub full: bool,
    /// A restore still filled the guest's memory. Missing pages are as in the restored checkpoint.
    #[serde(default)]
    pub filling: bool,
    /// When the guest was stopped, in µs since 1970. The checkpoint has the guest's state at that moment.
    pub stopped_host_us: u64,
    /// Guest-stopped time: QEMU's `STOP` to `RESUME` by the host's clock, in µs.
    pub stopped_us: u64,
    /// Time from the guest's stop for the previous checkpoint to its stop for this one, in ms; none for the first.
    pub interval_ms: Option<u64>,
    /// The configured interval, in ms.
    pub every_ms: u64,
    /// Bytes of pages that may have changed.
    pub dirty_bytes: u64,
    /// Bytes that were copied while the guest was stopped.
    pub copied_stopped_bytes: u64,
    /// Pages that were copied because the guest was about to write them (policy `cow`).
    pub copied_for_writes: u64,
    /// Pages that were stored with their content.
    pub pages_stored: u64,
    pub pages_zero: u64,
    /// Pages that were not stored because their content had not changed.
    pub pages_unchanged: u64,
    /// Bytes of the stored pages after compression.
    pub compressed_bytes: u64,
    /// Total bytes written to the store.
    pub bytes: u64,
    /// Time from the guest's resume to the release of the network output that the guest had sent before its stop, in
    /// µs; none if output is not held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released_us: Option<u64>,
    /// Size of the device state, in bytes.
    pub devices_bytes: u64,
    /// Time from the guest's resume to the commit, in µs.
    pub commit_us: u64,
    /// Time spent writing to the store, before and after the pause, in µs, without waiting for the disk.
    pub writing_us: u64,
    /// Time spent waiting until the written data is durable, in µs.
    pub syncing_us: u64,
    /// Time from the start of the checkpoint, before the guest was stopped, to the commit, in µs.
    #[serde(default)]
    pub took_us: u64,
    pub steps: PauseSteps,
}

/// The result of comparing a stopped guest's memory with the newest checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Comparison {
    pub checkpoint: u64,
    /// Number of compared pages in all RAM blocks.
    pub pages: u64,
    /// Pages that were not compared, because the guest has written them since the checkpoint. The next checkpoint would
    /// contain them.
    pub written_since: u64,
    /// Pages that differ: a restore would load wrong content.
    pub wrong: u64,
    /// Block ids and page numbers of the first wrong pages.
    pub named: Vec<String>,
    /// How long the guest was stopped for the comparison, in µs.
    pub stopped_us: u64,
}

/// Durations of the steps of a pause, in µs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PauseSteps {
    /// Stopping the guest and draining its I/O.
    pub stop: u64,
    /// Putting overlays on disks that QEMU serves.
    #[serde(default)]
    pub disks: u64,
    /// Collecting the written pages and protecting them again.
    pub collect: u64,
    /// Copying the pages that the policy copies while the guest is stopped.
    pub copy: u64,
    /// Saving the devices, as far as the previous steps have not covered it.
    pub devices: u64,
    /// Separating the network output that was sent before the stop, if output is held.
    #[serde(default)]
    pub cut: u64,
    /// Resuming the guest.
    pub resume: u64,
}

impl fmt::Display for ProtectEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let ms = |us: u64| us as f64 / 1e3;
        match self {
            Self::Attached { pid, ram_bytes, incremental, filling } => {
                let next_checkpoint = match (filling, incremental) {
                    (true, true) => {
                        "the restore still fills; the next checkpoint is its writes on top of the restored one"
                    }
                    (true, false) => "the restore still fills; the next checkpoint has everything that is loaded",
                    (false, true) => "continues where an earlier protector stopped",
                    (false, false) => "the next checkpoint is full",
                };
                write!(f, "tracking {:.0} MiB of QEMU process {pid}; {next_checkpoint}", mib(*ram_bytes))
            }
            Self::Checkpoint(report) => {
                let CheckpointReport { number, stopped_us, every_ms, dirty_bytes, bytes, commit_us, .. } = &**report;
                write!(
                    f,
                    "checkpoint {number}: stopped {:.1} ms, {:.1} MiB dirty",
                    ms(*stopped_us),
                    mib(*dirty_bytes)
                )?;
                write!(f, ", {:.1} MiB written, committed after {:.0} ms", mib(*bytes), ms(*commit_us))?;
                match report.interval_ms {
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
