//! The server: serves many stores in one directory, with a thread for each client.

mod answer;
mod greeting;
mod inspect;
mod read;
mod write;

use super::connection::{Connection, MAX_SILENCE};
use crate::credentials::Identity;
use crate::error::ConnectionError;
use crate::remote::identity::ServerTls;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::HashMap;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Limit of concurrent clients.
const MAX_CLIENTS: usize = 256;
/// How often the server checks whether it was stopped.
const STOP_CHECK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The certificates of the server cannot be used.
    #[error(transparent)]
    Identity(#[from] ConnectionError),
    /// Listening on the address failed.
    #[error("cannot listen on {address}; name a free one: --listen ADDRESS:PORT")]
    Listen {
        address: String,
        #[source]
        source: io::Error,
    },
    /// Creating the directory failed.
    #[error("cannot create the directory {} for stores", path.display())]
    Directory {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Accepting a connection failed.
    #[error("cannot accept clients")]
    Accept(#[source] io::Error),
}

/// Time limits for the silence of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Time limit for silence within a greeting, a request, or an open checkpoint.
    pub within: Duration,
    /// Time limit for silence between requests or checkpoints.
    pub idle: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { within: MAX_SILENCE, idle: Duration::from_secs(600) }
    }
}

#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    tls: ServerTls,
    directory: PathBuf,
    timeouts: Timeouts,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    /// Connected clients by number.
    clients: Mutex<HashMap<u64, TcpStream>>,
}

impl Shared {
    fn clients(&self) -> MutexGuard<'_, HashMap<u64, TcpStream>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Handle that stops a server.
#[derive(Debug, Clone)]
pub struct Stop(Arc<Shared>);

impl Stop {
    /// Stops the server: it accepts no more clients and disconnects the existing clients. Open checkpoints are aborted.
    pub fn stop(&self) {
        self.0.stop.store(true, Ordering::SeqCst);
        for client in self.0.clients().values() {
            let _ = client.shutdown(Shutdown::Both);
        }
    }
}

impl Server {
    /// Listens on `address`, for stores in `directory`, which is created if it is missing.
    ///
    /// # Errors
    /// [`ServeError::Identity`], [`ServeError::Directory`], [`ServeError::Listen`].
    pub fn bind(address: &str, directory: &Path, identity: &Identity) -> Result<Self, ServeError> {
        let tls = ServerTls::new(identity)?;
        std::fs::create_dir_all(directory)
            .map_err(|source| ServeError::Directory { path: directory.to_owned(), source })?;
        let failed = |source| ServeError::Listen { address: address.to_owned(), source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self {
            listener,
            tls,
            directory: directory.to_owned(),
            timeouts: Timeouts::default(),
            shared: Arc::default(),
        })
    }

    #[must_use]
    pub fn with_timeouts(self, timeouts: Timeouts) -> Self {
        Self { timeouts, ..self }
    }

    /// Returns the address on which the server listens.
    ///
    /// # Errors
    /// Errors of `getsockname(2)`.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Returns a handle that stops the server.
    #[must_use]
    pub fn stopper(&self) -> Stop {
        Stop(self.shared.clone())
    }

    /// Serves until the server is stopped and all clients are disconnected.
    ///
    /// # Errors
    /// [`ServeError::Accept`].
    pub fn run(self) -> Result<(), ServeError> {
        // The thread scope waits for the remaining clients.
        thread::scope(|scope| {
            let server = &self;
            let mut number = 0;
            let result = loop {
                let (tcp, address) = match server.wait_for_client() {
                    Ok(Some(accepted)) => accepted,
                    Ok(None) => break Ok(()),
                    Err(e) => break Err(e),
                };
                number += 1;
                let serve = move || server.serve_client(tcp, address, number);
                if let Err(e) = thread::Builder::new().name(format!("client {number}")).spawn_scoped(scope, serve) {
                    tracing::warn!("{address}: cannot start a thread for this client: {e}");
                }
            };
            server.stopper().stop();
            result
        })
    }

    /// Waits for the next client. Returns `None` if the server was stopped.
    fn wait_for_client(&self) -> Result<Option<(TcpStream, SocketAddr)>, ServeError> {
        while !self.shared.stop.load(Ordering::SeqCst) {
            match poll(&mut [PollFd::new(&self.listener, PollFlags::IN)], Some(&STOP_CHECK_INTERVAL)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(e) => return Err(ServeError::Accept(e.into())),
            }
            match self.listener.accept() {
                Ok(accepted) => return Ok(Some(accepted)),
                // Either the client has disconnected already, or too many files are open.
                Err(e) => tracing::debug!("cannot accept a client: {e}"),
            }
        }
        Ok(None)
    }

    fn serve_client(&self, tcp: TcpStream, address: SocketAddr, number: u64) {
        if let Err(e) = self.register_client(&tcp, number) {
            tracing::warn!("{address}: client rejected: {e}");
            return;
        }
        // The server may have been stopped since it accepted the client.
        if !self.shared.stop.load(Ordering::SeqCst) {
            let accepted = Connection::accept(tcp, self.tls.config(), self.tls.local_end(), self.timeouts.within);
            match accepted.and_then(|connection| greeting::serve(connection, &self.directory, self.timeouts)) {
                Ok(()) => tracing::debug!("{address}: disconnected"),
                Err(e) => {
                    let cause = std::error::Error::source(&e).map(|cause| format!(": {cause}")).unwrap_or_default();
                    tracing::warn!("{address}: {e}{cause}");
                }
            }
        }
        self.shared.clients().remove(&number);
    }

    /// Adds a client to those that are disconnected when the server is stopped.
    fn register_client(&self, tcp: &TcpStream, number: u64) -> io::Result<()> {
        tcp.set_nonblocking(false)?;
        let tcp = tcp.try_clone()?;
        let mut clients = self.shared.clients();
        if clients.len() >= MAX_CLIENTS {
            return Err(io::Error::other(format!("there are {MAX_CLIENTS} clients already")));
        }
        clients.insert(number, tcp);
        Ok(())
    }
}
