//! The process that serves one disk, and its two sockets.

use crate::broker::{BrokeredFiles, DiskBroker, FrontEndMemory};
use crate::channel;
use crate::config::DiskConfig;
use crate::confinement::{self, frames_directory};
use crate::control;
use crate::engine::command::{Command, ConnectionCommand, OpenDisk};
use crate::engine::refusal::Refusal;
use crate::engine::{self, ConnectionId, EngineDisk, Handle, Settings};
use crate::image::{Image, ImageError, OpenMode};
use crate::keeper::{self, LogOptions};
use crate::redo::error::RedoError;
use crate::redo::offline::image_name;
use crate::report::warn_limited;
use crate::retained::UNCHECKED;
use crate::served_disk::{PendingDisk, ServedDisk};
use crate::session::{FillState, FrontEndSession};
use rekindle_kernel::confinement::ConfinementError;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use vhost::vhost_user::{BackendReqHandler, Error};

/// Most connections of a socket: each has a thread.
const MAX_CONNECTIONS: usize = 64;
/// How long to wait after a failed `accept`.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

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
    #[error(transparent)]
    Confinement(#[from] ConfinementError),
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
    /// The number of the user that the server becomes when it is confined, and of the group that may connect to `socket` in addition
    /// to the user that has started it.
    pub user: Option<u32>,
    /// Path of the control socket.
    pub control: PathBuf,
    pub redo: LogOptions,
    pub settings: Settings,
    /// The server waits until a command names the epoch. The image is not locked until then.
    pub is_awaiting_epoch: bool,
    /// Confine the process ([`crate::confinement`]). It must have one thread only.
    pub confine: bool,
}

/// Ends a server.
#[derive(Debug, Clone)]
pub struct Stopper(Handle);

impl Stopper {
    /// Ends the server after all requests are done.
    ///
    /// # Errors
    /// [`Refusal`] if it has ended already.
    pub fn stop(&self) -> Result<(), Refusal> {
        self.0.ask(Command::End)
    }
}

/// Serves a disk until a command or the [`Stopper`] ends the server. Calls `ready` when both sockets exist.
///
/// *Needs:* no other process has the image open.
/// *On success:* all writes that the guest has flushed are on the disk.
/// *On failure:* nothing was served, the image is unchanged.
pub fn serve(service: Service, ready: impl FnOnce(Stopper)) -> Result<(), ServeError> {
    let Service { image: path, mode, socket, user, control, mut redo, settings, is_awaiting_epoch, confine } = service;
    if UNCHECKED {
        tracing::error!(
            "BUILT WITH unchecked-attic, for the fault experiment: blocks of {} are served unchecked, which damages its guest's data",
            path.display()
        );
    }
    let inspected = Image::inspect(&path)?;
    let broker = if confine {
        let may_have_log = !mode.readonly && redo.directory_for(&inspected).is_some();
        redo.image_name = image_name(&path);
        let redo = redo.files(&inspected, mode);
        let sockets = [socket.clone(), control.clone()];
        // It must not inherit the locked image.
        Some(Arc::new(DiskBroker::start(BrokeredFiles { image: path.clone(), mode, redo, may_have_log, sockets })?))
    } else {
        None
    };
    let memory = FrontEndMemory::new(broker.clone());
    // The image is locked, unless the server waits: of two servers only one gets as far as its sockets.
    let image = if is_awaiting_epoch { inspected } else { Image::open(&path, mode)? };
    let is_filling = Arc::clone(&settings.is_filling);
    let config = DiskConfig { capacity: image.bytes, readonly: mode.readonly, queues: settings.queues };
    let (front_ends, control_clients) = (listen(&socket, user)?, listen(&control, None)?);
    let failed = |source| ServeError::Engine { image: path.clone(), source };
    let ring = engine::create_ring().map_err(failed)?;
    let user = user.filter(|_| confine);
    confinement::create_frames_directory(&control, user);
    let mut is_in_frames = false;
    // The image and the sockets are open, and there are no other threads yet. The redo log is read afterwards.
    if confine {
        // As the VM's user, it may be unable to search the directories above.
        is_in_frames = user.is_some() && std::env::set_current_dir(frames_directory(&control)).is_ok();
        confinement::of_server(&control, user).enter()?;
        broker.iter().try_for_each(|broker| broker.end_process_with_it()).map_err(failed)?;
    }
    let (disk, engine_thread) = if is_awaiting_epoch {
        let (engine, engine_thread) = engine::start(EngineDisk::Awaited(image), settings, ring).map_err(failed)?;
        let (image, is_filling, broker) = (path.clone(), Arc::clone(&is_filling), broker.clone());
        (ServedDisk::awaited(engine, PendingDisk { image, mode, redo, broker, is_filling }), engine_thread)
    } else {
        let mut opened_log = keeper::open(&image, redo, broker.clone())?;
        let disk = OpenDisk { image, log: opened_log.engine_log.take() };
        let (engine, engine_thread) =
            engine::start(EngineDisk::Open(Box::new(disk)), settings, ring).map_err(failed)?;
        (ServedDisk::new(engine.clone(), opened_log.start(&engine)), engine_thread)
    };
    let disk = Arc::new(if is_in_frames { disk.in_frames_directory() } else { disk });
    let engine = disk.engine.clone();
    accept(front_ends, move |number, stream| {
        // A process that has ended needs no memory.
        let front_end = memory.identify(&stream).ok();
        let fill_state = FillState { is_filling: Arc::clone(&is_filling), front_end, memory: memory.clone() };
        serve_front_end(&engine, ConnectionId(number), config, fill_state, stream);
    });
    let controlled_disk = Arc::clone(&disk);
    accept(control_clients, move |_, stream| {
        if let Err(e) = control::serve(&controlled_disk, &stream) {
            tracing::debug!("a control connection: {e}");
        }
    });
    ready(Stopper(disk.engine.clone()));
    let ended = engine_thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    disk.release();
    match &broker {
        Some(broker) => broker.remove_sockets(),
        None => [&socket, &control].into_iter().for_each(|socket| drop(fs::remove_file(socket))),
    }
    ended.map_err(failed)
}

/// Listens at `path`, for this user and `group`, and replaces the socket of a server that has ended.
fn listen(path: &Path, group: Option<u32>) -> Result<UnixListener, ServeError> {
    let failed = |source| ServeError::Socket { path: path.to_owned(), source };
    if UnixStream::connect(path).is_ok() {
        return Err(ServeError::Busy { path: path.to_owned() });
    }
    // Nothing connects to it yet: QEMU would be rejected, and try again only after some time. The name is short, because
    // the path of a socket is limited.
    let new_path = path.with_file_name(format!(".{}", std::process::id()));
    match fs::remove_file(&new_path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
        _ => {}
    }
    let listener = UnixListener::bind(&new_path).map_err(failed)?;
    let mode = if group.is_some() { 0o660 } else { 0o600 };
    chown(&new_path, None, group)
        .and_then(|()| fs::set_permissions(&new_path, Permissions::from_mode(mode)))
        .and_then(|()| fs::rename(&new_path, path))
        .map_err(failed)?;
    Ok(listener)
}

/// Starts a thread for each connection, which calls `serve` with the connection's number and socket. Connections above
/// the limit are closed.
fn accept(listener: UnixListener, serve: impl Fn(u32, UnixStream) + Clone + Send + 'static) {
    // Each connection holds a clone, so that their number is known.
    let connected = Arc::new(());
    thread::spawn(move || {
        for (stream, number) in listener.incoming().zip(1..) {
            match stream {
                Ok(_) if Arc::strong_count(&connected) > MAX_CONNECTIONS => {
                    warn_limited!("closed a connection: there are {MAX_CONNECTIONS} already");
                }
                Ok(stream) => {
                    let (serve, connected) = (serve.clone(), Arc::clone(&connected));
                    let started = thread::Builder::new().spawn(move || {
                        serve(number, stream);
                        drop(connected);
                    });
                    if let Err(e) = started {
                        warn_limited!("rejected a connection: no thread can be started: {e}");
                    }
                }
                Err(e) => {
                    warn_limited!("cannot accept a connection: {e}");
                    // Probably out of descriptors: wait before the next attempt.
                    thread::sleep(ACCEPT_RETRY_INTERVAL);
                }
            }
        }
    });
}

/// Removes a front end from the engine on drop, also during a panic.
struct LeaveOnDrop<'a> {
    engine: &'a Handle,
    connection_id: ConnectionId,
}

impl Drop for LeaveOnDrop<'_> {
    fn drop(&mut self) {
        self.engine.send(Command::Connection(self.connection_id, ConnectionCommand::Leave));
    }
}

/// Serves vhost-user to one front end until it disconnects.
fn serve_front_end(
    engine: &Handle,
    connection_id: ConnectionId,
    config: DiskConfig,
    fill_state: FillState,
    stream: UnixStream,
) {
    engine.send(Command::Connection(
        connection_id,
        ConnectionCommand::Join { process: fill_state.front_end.map(|process| process.pid) },
    ));
    let _leave_on_drop = LeaveOnDrop { engine, connection_id };
    let session = FrontEndSession::new(engine.clone(), connection_id, config, fill_state);
    let error = handle_messages(engine, connection_id, session, stream);
    if !matches!(error, Error::Disconnected) {
        warn_limited!("front end {}: {error}; closing its connection", connection_id.0);
    }
}

/// Handles the messages of a front end. Returns the error that ends the connection.
fn handle_messages(
    engine: &Handle,
    connection_id: ConnectionId,
    session: FrontEndSession,
    stream: UnixStream,
) -> Error {
    let peek_stream = match stream.try_clone() {
        Ok(peek_stream) => peek_stream,
        Err(e) => return Error::SocketError(e),
    };
    let mut handler = BackendReqHandler::from_stream(stream, Arc::new(Mutex::new(session)));
    loop {
        match channel::peek_offered_channel(&peek_stream) {
            // Waits for the answer, so that a front end that passes many channels has at most one in this process.
            Ok(Some(channel)) => {
                let set_channel = |answer| ConnectionCommand::SetChannel(channel, answer);
                drop(engine.ask(|answer| Command::Connection(connection_id, set_channel(answer))));
            }
            Ok(None) => {}
            Err(e) => return Error::SocketError(e),
        }
        if let Err(e) = handler.handle_request() {
            return e;
        }
    }
}
