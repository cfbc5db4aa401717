//! Rate limits of a disk: for fairness between VMs, and to reproduce the papers' disks.
//!
//! Bytes and operations each have a leaky bucket, as in QEMU's `throttle` group. A bucket leaks at the configured
//! rate. A request waits while a bucket holds more than the rate allows in a tenth of a second. So the disk of
//! another VMM can be limited in the same way.

use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Capacity of a bucket, in seconds of its rate.
const BURST_SECONDS: f64 = 0.1;

/// The rate limits of a disk; `None`: unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes per second, of reads and writes together.
    pub bps: Option<u64>,
    /// Requests per second. A long request counts once.
    pub iops: Option<u64>,
}

/// A leaky bucket.
#[derive(Debug)]
struct Bucket {
    /// Units that leak per second.
    rate: f64,
    /// Units in the bucket at `updated`.
    level: f64,
    updated: Instant,
}

impl Bucket {
    fn new(rate: u64, now: Instant) -> Self {
        Self { rate: rate.max(1) as f64, level: 0.0, updated: now }
    }

    fn leak(&mut self, now: Instant) {
        let leaked = now.saturating_duration_since(self.updated).as_secs_f64() * self.rate;
        self.level = (self.level - leaked).max(0.0);
        self.updated = now;
    }

    /// Returns the seconds until the bucket has space for another request.
    fn seconds_to_wait(&self) -> f64 {
        (self.level / self.rate - BURST_SECONDS).max(0.0)
    }
}

/// A rate limiter that applies [`Limits`] to requests.
#[derive(Debug)]
pub struct Throttle {
    bytes: Option<Bucket>,
    requests: Option<Bucket>,
}

impl Throttle {
    /// Creates a throttle with empty buckets.
    #[must_use]
    pub fn new(limits: Limits, now: Instant) -> Self {
        let bucket = |rate: Option<u64>| rate.map(|rate| Bucket::new(rate, now));
        Self { bytes: bucket(limits.bps), requests: bucket(limits.iops) }
    }

    /// Admits and counts a request of `bytes` bytes, if it may start now.
    ///
    /// # Errors
    /// The time to wait until the next attempt.
    pub fn admit(&mut self, bytes: u64, now: Instant) -> Result<(), Duration> {
        let mut seconds = 0.0f64;
        for bucket in [&mut self.bytes, &mut self.requests].into_iter().flatten() {
            bucket.leak(now);
            seconds = seconds.max(bucket.seconds_to_wait());
        }
        if seconds > 0.0 {
            return Err(Duration::from_secs_f64(seconds));
        }
        self.charge(bytes);
        Ok(())
    }

    /// Counts a request of `bytes` bytes that does not wait. Later requests wait longer.
    pub fn charge(&mut self, bytes: u64) {
        if let Some(bucket) = &mut self.bytes {
            bucket.level += bytes as f64;
        }
        if let Some(bucket) = &mut self.requests {
            bucket.level += 1.0;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_disk_is_as_fast_as_its_limits_and_no_faster(
            bps in 1_000_000u64..500_000_000, iops in 10u64..100_000, bytes in 512u64..(1 << 20),
        ) {
            let begin = Instant::now();
            let mut throttle = Throttle::new(Limits { bps: Some(bps), iops: Some(iops) }, begin);
            let (mut now, mut admitted) = (begin, 0u32);
            // There is enough work that the first burst does not matter.
            while now.duration_since(begin) < Duration::from_secs(20) && admitted < 20_000 {
                match throttle.admit(bytes, now) {
                    Ok(()) => admitted += 1,
                    Err(wait) => now += wait + Duration::from_nanos(1),
                }
            }
            let elapsed = now.duration_since(begin).as_secs_f64();
            let by_bytes = f64::from(admitted) * bytes as f64 / bps as f64;
            let by_requests = f64::from(admitted) / iops as f64;
            let expected = by_bytes.max(by_requests);
            // The buckets may hold a tenth of a second's work, and the last request.
            let slack = BURST_SECONDS + (bytes as f64 / bps as f64).max(1.0 / iops as f64) + 0.001;
            prop_assert!(elapsed + slack >= expected, "too fast: {elapsed} s for {expected} s of work");
            prop_assert!(elapsed <= expected + 0.001, "too slow: {elapsed} s for {expected} s of work");
        }
    }

    #[test]
    fn without_limits_no_request_waits_and_a_pause_saves_up_no_more_than_a_burst() {
        let now = Instant::now();
        let mut unlimited = Throttle::new(Limits::default(), now);
        assert!((0..1000).all(|_| unlimited.admit(1 << 20, now).is_ok()));
        let mut limited = Throttle::new(Limits { bps: None, iops: Some(100) }, now);
        let later = now + Duration::from_secs(3600);
        let admitted = (0..1000).take_while(|_| limited.admit(4096, later).is_ok()).count();
        assert_eq!(admitted, 11, "a tenth of a second, and the one that is over it");
    }
}
