//! The server: serves many stores in one directory, with a thread for each client.

use super::connection::{Connection, ConnectionError, PATIENCE};
use super::identity::Identity;
use super::serving::serve;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::ServerConfig;
use std::collections::HashMap;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Limit of concurrent clients.
const CLIENTS: usize = 256;

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
        Self { within: PATIENCE, idle: Duration::from_secs(600) }
    }
}

#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    config: Arc<ServerConfig>,
    directory: PathBuf,
    patience: Timeouts,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    clients: Mutex<HashMap<u64, TcpStream>>,
}

/// Handle that stops a server.
#[derive(Debug, Clone)]
pub struct Stop(Arc<Shared>);

impl Stop {
    /// Stops the server: it accepts no more clients and disconnects the existing clients. Open checkpoints are aborted.
    pub fn stop(&self) {
        self.0.stop.store(true, Ordering::SeqCst);
        for client in self.0.clients.lock().unwrap_or_else(PoisonError::into_inner).values() {
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
        let config = identity.server()?;
        std::fs::create_dir_all(directory)
            .map_err(|source| ServeError::Directory { path: directory.to_owned(), source })?;
        let failed = |source| ServeError::Listen { address: address.to_owned(), source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self {
            listener,
            config,
            directory: directory.to_owned(),
            patience: Timeouts::default(),
            shared: Arc::default(),
        })
    }

    #[must_use]
    pub fn with_patience(self, patience: Timeouts) -> Self {
        Self { patience, ..self }
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
        thread::scope(|scope| {
            let server = &self;
            let mut number = 0;
            let served = loop {
                if server.shared.stop.load(Ordering::SeqCst) {
                    break Ok(());
                }
                let a_moment = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
                match poll(&mut [PollFd::new(&server.listener, PollFlags::IN)], Some(&a_moment)) {
                    Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                    Ok(_) => {}
                    Err(e) => break Err(ServeError::Accept(e.into())),
                }
                let (tcp, from) = match server.listener.accept() {
                    Ok(accepted) => accepted,
                    Err(e) => {
                        // Either the client has disconnected already, or too many files are open.
                        tracing::debug!("cannot accept a client: {e}");
                        continue;
                    }
                };
                number += 1;
                let work = move || server.client(tcp, from, number);
                if let Err(e) = thread::Builder::new().name(format!("client {number}")).spawn_scoped(scope, work) {
                    tracing::warn!("{from}: cannot start a thread for this client: {e}");
                }
            };
            // The thread scope waits for the remaining clients.
            server.stopper().stop();
            served
        })
    }

    fn client(&self, tcp: TcpStream, from: SocketAddr, number: u64) {
        let clients = || self.shared.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let entered = tcp.set_nonblocking(false).and_then(|()| {
            let own = tcp.try_clone()?;
            let mut clients = clients();
            if clients.len() >= CLIENTS {
                return Err(io::Error::other(format!("there are {CLIENTS} clients already")));
            }
            clients.insert(number, own);
            Ok(())
        });
        if let Err(e) = entered {
            tracing::warn!("{from}: client rejected: {e}");
            return;
        }
        // The server may have been stopped since it accepted the client.
        if !self.shared.stop.load(Ordering::SeqCst) {
            let accepted = Connection::accept(tcp, self.config.clone(), self.patience.within);
            match accepted.and_then(|connection| serve(connection, &self.directory, self.patience)) {
                Ok(()) => tracing::debug!("{from}: disconnected"),
                Err(e) => {
                    let cause = std::error::Error::source(&e).map(|cause| format!(": {cause}")).unwrap_or_default();
                    tracing::warn!("{from}: {e}{cause}");
                }
            }
        }
        clients().remove(&number);
    }
}
