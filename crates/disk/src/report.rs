//! Warnings that a guest or its QEMU can cause at any rate. Only a few of each kind are logged per minute.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Most warnings of one kind that are logged in one [`WINDOW`].
const MAX_WARNINGS: u32 = 5;
const WINDOW: Duration = Duration::from_secs(60);

/// A limit on the rate of one kind of warning.
#[derive(Debug)]
pub struct RateLimit(Mutex<WindowState>);

#[derive(Debug)]
struct WindowState {
    /// Start of the current window.
    started: Option<Instant>,
    /// Number of warnings logged in the window.
    logged: u32,
    /// Number of warnings omitted since the last logged one.
    omitted: u64,
}

impl RateLimit {
    /// Creates a limit with nothing logged yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(WindowState { started: None, logged: 0, omitted: 0 }))
    }

    /// Decides whether to log the warning at `now`. Returns the number of warnings omitted since the last logged one,
    /// or `None` to omit this warning, too.
    pub fn admit(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.started.is_none_or(|started| now.saturating_duration_since(started) >= WINDOW) {
            (state.started, state.logged) = (Some(now), 0);
        }
        if state.logged == MAX_WARNINGS {
            state.omitted = state.omitted.saturating_add(1);
            return None;
        }
        state.logged += 1;
        Some(std::mem::take(&mut state.omitted))
    }
}

impl Default for RateLimit {
    fn default() -> Self {
        Self::new()
    }
}

/// Logs a warning that a guest or its QEMU can cause, limited by [`RateLimit`].
macro_rules! warn_limited {
    ($($message:tt)*) => {{
        static LIMIT: $crate::report::RateLimit = $crate::report::RateLimit::new();
        match LIMIT.admit(std::time::Instant::now()) {
            Some(0) => tracing::warn!($($message)*),
            Some(omitted) => tracing::warn!("{} ({omitted} earlier warnings of this kind were not logged)", format_args!($($message)*)),
            None => {}
        }
    }};
}
pub(crate) use warn_limited;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_a_minute_are_logged_and_the_others_are_counted() {
        let (limit, begin) = (RateLimit::new(), Instant::now());
        // One warning per millisecond.
        let logged = |first_ms: u64, count: u64| {
            let times = (first_ms..first_ms + count).map(|ms| begin + Duration::from_millis(ms));
            times.filter_map(|time| limit.admit(time)).collect::<Vec<_>>()
        };
        assert_eq!(logged(0, 1000), [0; MAX_WARNINGS as usize]);
        assert!(logged(59_000, 900).is_empty());
        assert_eq!(logged(60_000, 3), [1000 - u64::from(MAX_WARNINGS) + 900, 0, 0]);
    }
}
