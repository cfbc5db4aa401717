//! How fast a guest changes its memory. QEMU measures it while the guest runs: it compares samples of pages.

use crate::qmp::{Qmp, QmpError};
use serde::Deserialize;
use serde_json::{Value, json};
use std::thread;
use std::time::{Duration, Instant};

/// The shortest and the longest measurement that QEMU offers, in seconds.
const LENGTHS_S: std::ops::RangeInclusive<u64> = 1..=60;
/// Pages that are compared of each GiB. QEMU allows at most this many.
const SAMPLES_PER_GIB: u32 = 4096;
/// How much longer than its length a measurement may take: QEMU reads the samples twice.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The result of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangedMemory {
    /// Length of the measurement.
    pub length: Duration,
    /// Memory that changed, in bytes: a page counts once. A multiple of a MiB for each second.
    pub bytes: u64,
}

/// The answer to `query-dirty-rate`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Measurement {
    status: String,
    /// MiB per second.
    dirty_rate: Option<i64>,
}

/// Measures how much memory a guest changes in `length`, which is rounded up to whole seconds, from 1 to 60.
///
/// # Errors
/// [`QmpError::Refused`]: another client measures now. [`QmpError::Timeout`]: QEMU does not finish.
pub fn changed_memory(qmp: &mut Qmp, length: Duration) -> Result<ChangedMemory, QmpError> {
    let seconds = length.as_millis().div_ceil(1000) as u64;
    let seconds = seconds.clamp(*LENGTHS_S.start(), *LENGTHS_S.end());
    qmp.execute::<Value>("calc-dirty-rate", json!({"calc-time": seconds, "sample-pages": SAMPLES_PER_GIB}))?;
    let length = Duration::from_secs(seconds);
    let end = Instant::now() + length + READ_TIMEOUT;
    loop {
        let measurement: Measurement = qmp.execute("query-dirty-rate", ())?;
        match (measurement.status.as_str(), measurement.dirty_rate) {
            ("measured", Some(mib_per_s)) => {
                let bytes = (u64::try_from(mib_per_s).unwrap_or(0) * seconds) << 20;
                return Ok(ChangedMemory { length, bytes });
            }
            _ if Instant::now() >= end => {
                return Err(QmpError::Timeout { during: "calc-dirty-rate".into(), after: length + READ_TIMEOUT });
            }
            _ => thread::sleep(POLL_INTERVAL),
        }
    }
}
