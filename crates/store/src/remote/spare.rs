//! Lines that are made before they are needed: a handshake takes a millisecond, which a guest that is stopped would wait for.

use super::identity::Identity;
use super::line::Line;
use crate::error::{Result, StoreError};
use crate::url::{Remote, StoreUrl};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A line that is older is not used: a server waits for 30 s until it is told what a line is for.
const FRESH: Duration = Duration::from_secs(10);

/// Lines to servers on which nothing has been said. Each is used once.
#[derive(Debug, Clone, Default)]
pub struct Spare(Arc<Mutex<Vec<Made>>>);

#[derive(Debug)]
struct Made {
    at: Instant,
    server: Remote,
    line: Line,
}

impl Spare {
    fn made(&self) -> MutexGuard<'_, Vec<Made>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Make `count` of them. A store in a directory needs none.
    ///
    /// # Errors
    /// [`StoreError::Line`].
    pub fn make(&self, url: &StoreUrl, identity: Option<&Identity>, count: usize) -> Result<()> {
        let StoreUrl::Remote(server) = url else { return Ok(()) };
        for _ in 0..count {
            let (store, doing) = (server.to_string(), "connecting");
            let line = Line::connect(server, identity).map_err(|source| StoreError::Line { store, doing, source })?;
            self.made().push(Made { at: Instant::now(), server: server.clone(), line });
        }
        Ok(())
    }

    /// One to `server`.
    pub(super) fn take(&self, server: &Remote) -> Option<Line> {
        let mut made = self.made();
        made.retain(|made| made.at.elapsed() < FRESH);
        let at = made.iter().position(|made| made.server == *server)?;
        Some(made.swap_remove(at).line)
    }
}
