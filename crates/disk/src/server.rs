//! The process that serves one disk, and its two sockets.

use crate::channel;
use crate::config::DiskConfig;
use crate::control;
use crate::engine::command::{Command, ConnectionCommand, FrontendId};
use crate::engine::{self, EngineDisk, Handle, Settings};
use crate::image::{Image, ImageError, OpenMode};
use crate::redo::error::RedoError;
use crate::redo::keeper::{self, LogOptions};
use crate::report::warn_limited;
use crate::retained::UNCHECKED;
use crate::served_disk::{PendingDisk, ServedDisk};
use crate::session::{FillState, Frontend};
use rustix::net::sockopt::socket_peercred;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread;
use vhost::vhost_user::{BackendReqHandler, Error};

/// The reason why a disk cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Redo(#[from] RedoError),
    #[error("{}: another server listens there", path.display())]
    Busy { path: PathBuf },
    #[error("{}: cannot listen there", path.display())]
    Socket {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot serve {}: io_uring is needed (kernel.io_uring_disabled must be 0 for it)", image.display())]
    Engine {
        image: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// A disk to serve, and its sockets.
#[derive(Debug, Clone)]
pub struct Service {
    pub image: PathBuf,
    pub mode: OpenMode,
    pub socket: PathBuf,
    /// Path of the control socket.
    pub control: PathBuf,
    pub redo: LogOptions,
    pub settings: Settings,
    /// The server waits until a command names the epoch. The image is not locked until then.
    pub waits: bool,
}

/// Serves a disk until a command ends the server. Calls `ready` when both sockets exist.
///
/// *Needs:* no other process has the image open.
/// *On success:* all writes that the guest has flushed are on the disk.
/// *On failure:* nothing was served, the image is unchanged.
pub fn serve(service: Service, ready: impl FnOnce()) -> Result<(), ServeError> {
    let Service { image: path, mode, socket, control, redo, settings, waits } = service;
    if UNCHECKED {
        tracing::error!(
            "BUILT WITH unchecked-attic, for the fault experiment: blocks of {} are served unchecked, which damages its guest's data",
            path.display()
        );
    }
    // The image is locked, unless the server waits: of two servers only one gets as far as its sockets.
    let image = if waits { Image::inspect(&path)? } else { Image::open(&path, mode)? };
    let filling = Arc::clone(&settings.filling);
    let shape = DiskConfig { capacity: image.bytes, readonly: mode.readonly, queues: settings.queues };
    let (guests, asked) = (listen(&socket)?, listen(&control)?);
    let failed = |source| ServeError::Engine { image: path.clone(), source };
    let (disk, thread) = if waits {
        let (engine, thread) = engine::start(EngineDisk::Awaited(image), settings).map_err(failed)?;
        let waiting = PendingDisk { image: path.clone(), mode, redo, filling: Arc::clone(&filling) };
        (ServedDisk::waiting(engine, waiting), thread)
    } else {
        let mut redo = keeper::open(&image, redo)?;
        let disk = EngineDisk::Open(image, redo.engine_log.take().map(Box::new));
        let (engine, thread) = engine::start(disk, settings).map_err(failed)?;
        (ServedDisk::new(engine.clone(), redo.start(&engine)), thread)
    };
    let disk = Arc::new(disk);
    accept(guests, &disk.engine, move |engine, number, stream| {
        serve_front(engine, FrontendId(number), shape, &filling, stream);
    });
    let controlled = Arc::clone(&disk);
    accept(asked, &disk.engine, move |_, _, stream| {
        if let Err(e) = control::serve(&controlled, &stream) {
            tracing::debug!("a control connection: {e}");
        }
    });
    ready();
    let ended = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    disk.release();
    for socket in [&socket, &control] {
        let _ = fs::remove_file(socket);
    }
    ended.map_err(failed)
}

/// Listens at `path`, for this user only, and replaces the socket of a server that has ended.
fn listen(path: &Path) -> Result<UnixListener, ServeError> {
    let failed = |source| ServeError::Socket { path: path.to_owned(), source };
    if UnixStream::connect(path).is_ok() {
        return Err(ServeError::Busy { path: path.to_owned() });
    }
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

/// Most connections of a socket: each has a thread.
const MOST_CONNECTIONS: usize = 64;

/// Starts a thread for each connection. Connections above the limit are closed.
fn accept(listener: UnixListener, engine: &Handle, each: impl Fn(Handle, u32, UnixStream) + Clone + Send + 'static) {
    let engine = engine.clone();
    let connected = Arc::new(());
    thread::spawn(move || {
        for (stream, number) in listener.incoming().zip(1..) {
            let (engine, each) = (engine.clone(), each.clone());
            match stream {
                Ok(_) if Arc::strong_count(&connected) > MOST_CONNECTIONS => {
                    warn_limited!("closed a connection: there are {MOST_CONNECTIONS} already");
                }
                Ok(stream) => {
                    let connected = Arc::clone(&connected);
                    let served = thread::Builder::new().spawn(move || {
                        each(engine, number, stream);
                        drop(connected);
                    });
                    if let Err(e) = served {
                        warn_limited!("rejected a connection: no thread can be started: {e}");
                    }
                }
                Err(e) => {
                    warn_limited!("cannot accept a connection: {e}");
                    // Probably out of descriptors: wait before the next attempt.
                    thread::sleep(std::time::Duration::from_millis(100));
                }
            }
        }
    });
}

/// Removes a front end from the engine on drop, also during a panic.
struct LeaveOnDrop<'a>(&'a Handle, FrontendId);

impl Drop for LeaveOnDrop<'_> {
    fn drop(&mut self) {
        self.0.send(Command::Connection(self.1, ConnectionCommand::Leave));
    }
}

/// Serves vhost-user to one front end until it disconnects.
fn serve_front(engine: Handle, session: FrontendId, shape: DiskConfig, filling: &Arc<AtomicBool>, stream: UnixStream) {
    let process = socket_peercred(&stream).ok().and_then(|peer| u32::try_from(peer.pid.as_raw_nonzero().get()).ok());
    engine.send(Command::Connection(session, ConnectionCommand::Join { process }));
    let _leave = LeaveOnDrop(&engine, session);
    let frontend = Arc::new(Mutex::new(Frontend::new(
        engine.clone(),
        session,
        shape,
        FillState { is: Arc::clone(filling), process },
    )));
    let ahead = stream.try_clone();
    let mut handler = BackendReqHandler::from_stream(stream, frontend);
    let why = loop {
        match ahead.as_ref().map(channel::offered) {
            // Waits for the answer, so that a front end that passes many channels has at most one in this process.
            Ok(Ok(Some(channel))) => {
                drop(engine.ask(|answer| Command::Connection(session, ConnectionCommand::Channel(channel, answer))))
            }
            Ok(Ok(None)) => {}
            Ok(Err(e)) => break Error::SocketError(e),
            Err(e) => break Error::SocketError(e.kind().into()),
        }
        if let Err(e) = handler.handle_request() {
            break e;
        }
    };
    if !matches!(why, Error::Disconnected) {
        warn_limited!("front end {}: {why}; closing its connection", session.0);
    }
}
