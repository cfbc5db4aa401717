//! Connections that are opened before they are needed. A handshake takes a millisecond, during which a guest may be
//! stopped.

use super::connection::Connection;
use super::identity::Identity;
use crate::error::{Result, StoreError};
use crate::url::{Remote, StoreUrl};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum age at which a connection may be used. A server waits 30 s for the greeting.
const FRESH: Duration = Duration::from_secs(10);

/// Open connections to servers, before their greeting. Each connection is used once.
#[derive(Debug, Clone, Default)]
pub struct SpareConnections(Arc<Mutex<Vec<SpareConnection>>>);

#[derive(Debug)]
struct SpareConnection {
    at: Instant,
    server: Remote,
    connection: Connection,
}

impl SpareConnections {
    fn made(&self) -> MutexGuard<'_, Vec<SpareConnection>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens `count` connections to the server of `url`. A store in a directory needs none.
    ///
    /// # Errors
    /// [`StoreError::Connection`] if connecting fails.
    pub fn make(&self, url: &StoreUrl, identity: Option<&Identity>, count: usize) -> Result<()> {
        let StoreUrl::Remote(server) = url else { return Ok(()) };
        for _ in 0..count {
            let (store, doing) = (server.to_string(), "connecting");
            let connection = Connection::connect(server, identity).map_err(|source| StoreError::Connection {
                store,
                doing,
                source,
            })?;
            self.made().push(SpareConnection { at: Instant::now(), server: server.clone(), connection });
        }
        Ok(())
    }

    /// Removes a connection to `server` that is fresh enough, and returns it.
    pub(super) fn take(&self, server: &Remote) -> Option<Connection> {
        let mut made = self.made();
        made.retain(|made| made.at.elapsed() < FRESH);
        let at = made.iter().position(|made| made.server == *server)?;
        Some(made.swap_remove(at).connection)
    }
}
