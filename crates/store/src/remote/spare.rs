//! Connections that are opened before they are needed: a handshake takes a millisecond, for which a stopped guest
//! would wait.

use super::connection::Connection;
use super::identity::Identity;
use crate::error::{Result, StoreError};
use crate::url::{Remote, StoreUrl};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum age of a connection for use: a server waits 30 s for the greeting.
const FRESH: Duration = Duration::from_secs(10);

/// Open connections to servers, without a greeting yet. Each is used once.
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

    /// Opens `count` connections. A store in a directory needs none.
    ///
    /// # Errors
    /// [`StoreError::Connection`].
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

    /// Takes a connection to `server`.
    pub(super) fn take(&self, server: &Remote) -> Option<Connection> {
        let mut made = self.made();
        made.retain(|made| made.at.elapsed() < FRESH);
        let at = made.iter().position(|made| made.server == *server)?;
        Some(made.swap_remove(at).connection)
    }
}
