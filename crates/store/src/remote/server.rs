//! The server: many stores in one directory, a thread for each client.

use super::identity::Identity;
use super::line::{Line, LineError, PATIENCE};
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

/// Clients at a time.
const CLIENTS: usize = 256;

/// Why a server cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Its certificates are no good.
    #[error(transparent)]
    Identity(#[from] LineError),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}; name a free one: --listen ADDRESS:PORT")]
    Listen {
        /// The address.
        address: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The directory cannot be used.
    #[error("directory {} for stores", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The system fails.
    #[error("taking clients in failed")]
    Accept(#[source] io::Error),
}

/// How long a client may stand still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Within a greeting, a request, or a checkpoint.
    pub within: Duration,
    /// Between them.
    pub idle: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { within: PATIENCE, idle: Duration::from_secs(600) }
    }
}

/// A server.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    config: Arc<ServerConfig>,
    directory: PathBuf,
    patience: Patience,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    clients: Mutex<HashMap<u64, TcpStream>>,
}

/// Ends a server.
#[derive(Debug, Clone)]
pub struct Stop(Arc<Shared>);

impl Stop {
    /// Let it end: no client is taken in any more, and those that are there are dropped, with what they have not
    /// committed.
    pub fn stop(&self) {
        self.0.stop.store(true, Ordering::SeqCst);
        for client in self.0.clients.lock().unwrap_or_else(PoisonError::into_inner).values() {
            let _ = client.shutdown(Shutdown::Both);
        }
    }
}

impl Server {
    /// Listen on `address`, for stores in `directory`, which is made if it is not there.
    ///
    /// # Errors
    /// [`ServeError`].
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
            patience: Patience::default(),
            shared: Arc::default(),
        })
    }

    /// With another patience.
    #[must_use]
    pub fn with_patience(self, patience: Patience) -> Self {
        Self { patience, ..self }
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The system's.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// What ends it.
    #[must_use]
    pub fn stopper(&self) -> Stop {
        Stop(self.shared.clone())
    }

    /// Serve until it is stopped, and all clients have gone.
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
                        // The client has gone again, or there are too many open files for now.
                        tracing::debug!("a client was not taken in: {e}");
                        continue;
                    }
                };
                number += 1;
                let work = move || server.client(tcp, from, number);
                if let Err(e) = thread::Builder::new().name(format!("client {number}")).spawn_scoped(scope, work) {
                    tracing::warn!("{from}: no thread for it: {e}");
                }
            };
            // The scope waits for those that are there.
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
            tracing::warn!("{from}: not taken in: {e}");
            return;
        }
        // One that came while the server was being stopped.
        if !self.shared.stop.load(Ordering::SeqCst) {
            let accepted = Line::accept(tcp, self.config.clone(), self.patience.within);
            match accepted.and_then(|line| serve(line, &self.directory, self.patience)) {
                Ok(()) => tracing::debug!("{from}: gone"),
                Err(e) => {
                    let cause = std::error::Error::source(&e).map(|cause| format!(": {cause}")).unwrap_or_default();
                    tracing::warn!("{from}: {e}{cause}");
                }
            }
        }
        clients().remove(&number);
    }
}
