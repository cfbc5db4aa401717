//! Connections that are opened before they are needed. A handshake takes a millisecond, during which a guest may be
//! stopped.

use super::connection::Connection;
use crate::credentials::Credentials;
use crate::error::Result;
use crate::url::{Remote, StoreUrl};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum age at which a connection may be used. A server waits 30 s for the greeting.
const MAX_AGE: Duration = Duration::from_secs(10);

/// Open connections to servers, before their greeting. Each connection is used once.
#[derive(Debug, Clone, Default)]
pub struct SpareConnections(Arc<Mutex<Vec<SpareConnection>>>);

#[derive(Debug)]
struct SpareConnection {
    opened_at: Instant,
    server: Remote,
    connection: Connection,
}

impl SpareConnections {
    fn lock(&self) -> MutexGuard<'_, Vec<SpareConnection>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens `count` connections to the server of `url`. A store in a directory needs none.
    ///
    /// # Errors
    /// [`crate::StoreError::Connection`] if connecting fails.
    pub fn make(&self, url: &StoreUrl, credentials: Option<&Credentials>, count: usize) -> Result<()> {
        let StoreUrl::Remote(server) = url else { return Ok(()) };
        for _ in 0..count {
            let connection = super::connect(server, Credentials::tls_of(credentials))?;
            self.lock().push(SpareConnection { opened_at: Instant::now(), server: server.clone(), connection });
        }
        Ok(())
    }

    /// Removes a connection to `server` that is fresh enough, and returns it.
    pub(super) fn take(&self, server: &Remote) -> Option<Connection> {
        let mut spare = self.lock();
        spare.retain(|spare| spare.opened_at.elapsed() < MAX_AGE);
        let position = spare.iter().position(|spare| spare.server == *server)?;
        Some(spare.swap_remove(position).connection)
    }
}
