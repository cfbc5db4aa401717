//! What the protecting loop tells.

use serde::{Deserialize, Serialize};
use std::fmt;

/// One thing that happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// The guest's memory is tracked from now on.
    Attached {
        /// The QEMU.
        pid: u32,
        /// Bytes of all its RAM blocks.
        ram_bytes: u64,
        /// The next checkpoint holds only what changed: tracking was found as an earlier protector left it.
        incremental: bool,
        /// A restore is still bringing its memory: the next checkpoint holds what the guest has written since, put over the one
        /// that is restored.
        #[serde(default)]
        filling: bool,
    },
    /// All memory of a restored guest is there, and is tracked without its pager from now on.
    Filled,
    /// A checkpoint counts.
    Checkpoint(Box<Done>),
    /// The guest's memory was compared with the newest checkpoint.
    Compared(Compared),
    /// The newest checkpoint that counts is older than `--max-lag`.
    Lag {
        /// How old it is.
        lag_ms: u64,
        /// How old it may be.
        max_ms: u64,
    },
    /// The store cannot be written; it is tried again.
    StoreAway {
        /// Why.
        error: String,
    },
    /// The store can be written again.
    StoreBack,
    /// The guest is stopped by somebody else, or its memory is not all there; checkpoints wait for it.
    Waiting {
        /// What is waited for.
        state: String,
    },
    /// Another QEMU runs the guest now, or its memory has another shape; tracking begins anew.
    Moved {
        /// Why.
        why: String,
    },
}

/// A checkpoint that counts, and what it took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// Its number.
    pub number: u64,
    /// Whether it holds all of the guest's memory, not only what changed.
    pub full: bool,
    /// A restore was still bringing the guest's memory. What had not come is as in the checkpoint that is restored.
    #[serde(default)]
    pub filling: bool,
    /// When the guest was stopped, in µs since 1970: what it did until then is in the checkpoint.
    pub stopped_host_us: u64,
    /// Guest-stopped time: QEMU's `STOP` to `RESUME` by the host's clock, in µs.
    pub stopped_us: u64,
    /// From the guest's stop at the checkpoint before to its stop at this one, in ms; none for the first.
    pub interval_ms: Option<u64>,
    /// The interval that was asked for, in ms.
    pub every_ms: u64,
    /// Bytes of pages that may have changed.
    pub dirty_bytes: u64,
    /// Bytes that were copied while the guest was stopped.
    pub copied_stopped_bytes: u64,
    /// Pages copied because the guest wanted to write them (`cow`).
    pub copied_for_writes: u64,
    /// Pages stored with their content.
    pub pages_stored: u64,
    /// Pages that became zero.
    pub pages_zero: u64,
    /// Pages that were as before.
    pub pages_unchanged: u64,
    /// Bytes of the stored pages after compression.
    pub compressed_bytes: u64,
    /// Bytes written to the store, all together.
    pub bytes: u64,
    /// What the guest had sent until its stop was let out after the commit, as long after its resume, in µs; none if it is not held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released_us: Option<u64>,
    /// Bytes of device state.
    pub devices_bytes: u64,
    /// From the guest's resume to the commit, in µs.
    pub commit_us: u64,
    /// Of it and of what went before the pause: writing, in µs; waiting for the disk is not part of it.
    pub writing_us: u64,
    /// Waiting until what was written is durable, in µs.
    pub syncing_us: u64,
    /// From the beginning of the checkpoint, before the guest was stopped, to the commit, in µs.
    #[serde(default)]
    pub took_us: u64,
    /// What was done while the guest was stopped, in µs each.
    pub steps: Steps,
}

/// A stopped guest's memory against the newest checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Compared {
    /// The checkpoint.
    pub checkpoint: u64,
    /// Pages of all RAM blocks that were compared.
    pub pages: u64,
    /// Pages that were not: the guest has written them since, and the next checkpoint would have them.
    pub written_since: u64,
    /// Pages that differ: a restore would get them wrong.
    pub wrong: u64,
    /// Names of the first of them.
    pub named: Vec<String>,
    /// How long the guest was stopped for it, in µs.
    pub stopped_us: u64,
}

/// The parts of a pause, in µs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Steps {
    /// Until QEMU had stopped the guest and drained its I/O.
    pub stop: u64,
    /// Which pages were written; they are protected again.
    pub collect: u64,
    /// What the policy copied.
    pub copy: u64,
    /// What was left of saving the devices then.
    pub devices: u64,
    /// Setting apart what the guest had sent until then, where that is held.
    #[serde(default)]
    pub cut: u64,
    /// Until the guest ran again.
    pub resume: u64,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let ms = |us: u64| us as f64 / 1e3;
        match self {
            Self::Attached { pid, ram_bytes, incremental, filling } => {
                let next = match (filling, incremental) {
                    (true, true) => "its memory still comes; what it writes goes over the checkpoint that is restored",
                    (true, false) => "its memory still comes; all that is there first",
                    (false, true) => "goes on where an earlier protector left off",
                    (false, false) => "a full one first",
                };
                write!(f, "tracking {:.0} MiB of QEMU process {pid}; {next}", mib(*ram_bytes))
            }
            Self::Checkpoint(done) => {
                let Done { number, stopped_us, every_ms, dirty_bytes, bytes, commit_us, .. } = &**done;
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
            Self::Compared(Compared { checkpoint, pages, written_since, wrong, named, stopped_us }) => {
                write!(f, "{pages} pages compared with checkpoint {checkpoint} while the guest was stopped for ")?;
                write!(f, "{:.0} ms: {wrong} differ; {written_since} were written since", ms(*stopped_us))?;
                if named.is_empty() { Ok(()) } else { write!(f, ". Wrong: {}", named.join(", ")) }
            }
            Self::Lag { lag_ms, max_ms } => {
                write!(f, "the newest checkpoint is {:.1} s old, more than {:.1} s", ms(*lag_ms), ms(*max_ms))
            }
            Self::StoreAway { error } => write!(f, "the store cannot be written, trying again: {error}"),
            Self::Filled => write!(f, "all of its memory is there; tracking goes on without its pager"),
            Self::StoreBack => write!(f, "the store can be written again"),
            Self::Waiting { state } => write!(f, "no checkpoint for now: {state}"),
            Self::Moved { why } => write!(f, "tracking begins anew: {why}"),
        }
    }
}
