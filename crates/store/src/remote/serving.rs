//! Serves a client's requests over one connection.

use super::connection::{Connection, ConnectionError};
use super::protocol::{
    BlockNumbers, BlockTable, Failure, Hello, Kind, PAGES, Purpose, Retention, VERSION, Welcome, decode_ids,
    encode_ids, encode_stored,
};
use super::server::Timeouts;
use crate::admin::{self, Fenced};
use crate::disk::{Disk, LocalDisk};
use crate::engine::{self, Engine, Frame, Request, Settings, StartedBlock, State};
use crate::error::{Result, StoreError};
use crate::format::codec::{Reader, Writer, shortened};
use crate::format::entry::Section;
use crate::format::segment::FRAME_HEADER_LEN;
use crate::home::Home;
use crate::image::LocalImage;
use crate::listing::list;
use crate::types::{OnlyIf, Owner, Vm};
use crate::verify::verify;
use serde::de::DeserializeOwned;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

/// Interval of the reports to a client that the server is still working on its request.
const BUSY: Duration = Duration::from_secs(5);
/// Limit of frames that are queued for writing.
const WAITING: usize = 4;

/// Result of serving: the error because of which the connection ended, if any.
type ServeResult = std::result::Result<(), ConnectionError>;

/// Serves a client until it disconnects.
pub(super) fn serve(mut connection: Connection, directory: &Path, patience: Timeouts) -> ServeResult {
    let Some((kind, payload)) = connection.receive()? else { return Ok(()) };
    if kind != Kind::Hello {
        return refuse(&mut connection, &format!("{kind:?} before a greeting"));
    }
    let hello: Hello = match serde_json::from_slice(&payload) {
        Ok(hello) => hello,
        Err(e) => {
            return refuse(
                &mut connection,
                &format!("the greeting cannot be read ({e}); are both of the same version?"),
            );
        }
    };
    if hello.version != VERSION {
        let text = format!("protocol version {}, this server speaks {VERSION}; use the same Rekindle", hello.version);
        return refuse(&mut connection, &text);
    }
    let name = hello.name.as_str();
    let disk = Arc::new(LocalDisk::named(&directory.join(name), name));
    let result = match hello.purpose {
        Purpose::Write { vm, owner, only_if, keep, segment, create } => {
            let settings = Settings { keep: keep.max(1), segment: segment.min(1 << 26), create };
            match Engine::open(disk, &vm, &owner, only_if, settings) {
                Ok(engine) => return write(&mut connection, engine, vm, patience),
                Err(e) => Err(e),
            }
        }
        Purpose::Read { vm, at, lazy } => {
            let open = if lazy { LocalImage::open_lazily } else { LocalImage::open };
            match Home::open(disk, vm).and_then(|home| open(home, at)) {
                Ok(image) => return read(&mut connection, &image, patience),
                Err(e) => Err(e),
            }
        }
        Purpose::Inspect => match Home::open(disk, None) {
            Ok(home) => return inspect(&mut connection, &home),
            Err(e) => Err(e),
        },
        Purpose::Init => {
            return match Home::init(&(disk as Arc<dyn Disk>)) {
                Ok(()) => connection.send(Kind::Done, &[b"null"]),
                Err(e) => fail(&mut connection, &e),
            };
        }
        Purpose::Fence { vm, owner, only_if } => fence(disk, &vm, &owner, only_if),
    };
    match result {
        Ok(welcome) => connection.send_json(Kind::Welcome, &welcome),
        Err(e) => fail(&mut connection, &e),
    }
}

/// Sends an error to the client; the connection stays open.
fn fail(connection: &mut Connection, e: &StoreError) -> ServeResult {
    let mut failure = Failure::of(e);
    failure.text = shortened(&failure.text, 16 << 10).to_owned();
    connection.send_json(Kind::Failure, &failure)
}

/// Sends a protocol error to the client and ends the connection.
fn refuse(connection: &mut Connection, text: &str) -> ServeResult {
    connection.send_json(Kind::Failure, &Failure::protocol(text))?;
    Err(ConnectionError::protocol(text))
}

fn fence(disk: Arc<LocalDisk>, vm: &Vm, owner: &Owner, only_if: Option<OnlyIf>) -> Result<Welcome> {
    let (home, Fenced { epoch, newest }) = admin::fence_in(disk, vm, owner, only_if)?;
    Ok(Welcome { id: home.id, vm: home.vm, epoch, newest, info: None })
}

/// Waits for the result of another thread, and regularly reports to the client that the work is in progress. Returns
/// `None` if the thread has ended.
fn wait<T>(connection: &mut Connection, answer: &Receiver<T>) -> std::result::Result<Option<T>, ConnectionError> {
    loop {
        match answer.recv_timeout(BUSY) {
            Ok(answer) => return Ok(Some(answer)),
            Err(RecvTimeoutError::Timeout) => connection.send(Kind::Busy, &[])?,
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
        }
    }
}

fn parse<T: DeserializeOwned>(payload: &[u8]) -> std::result::Result<T, ConnectionError> {
    serde_json::from_slice(payload)
        .map_err(|e| ConnectionError::protocol(format!("a request that cannot be read: {e}")))
}

/// Serves a client that writes.
struct WriteServer<'a> {
    connection: &'a mut Connection,
    requests: Sender<Request>,
    /// Channel through which the engine returns frames after writing them.
    back: (Sender<Frame>, Receiver<Frame>),
    waiting: usize,
    started: Vec<StartedBlock>,
    in_hand: bool,
    patience: Timeouts,
}

fn write(connection: &mut Connection, engine: Engine, vm: Vm, patience: Timeouts) -> ServeResult {
    let welcome = Welcome { id: engine.id(), vm, epoch: engine.owner().epoch, newest: engine.newest(), info: None };
    connection.send_json(Kind::Welcome, &welcome)?;
    let (requests, asked) = mpsc::channel();
    // When the connection ends, the sender is dropped. The engine's thread then aborts an open checkpoint and ends.
    thread::scope(|scope| {
        let run = thread::Builder::new().name("store".into()).spawn_scoped(scope, move || engine::run(engine, &asked));
        run.map_err(ConnectionError::Io)?;
        let back = mpsc::channel();
        WriteServer { connection, requests, back, waiting: 0, started: Vec::new(), in_hand: false, patience }.serve()
    })
}

impl WriteServer<'_> {
    fn serve(mut self) -> ServeResult {
        loop {
            self.connection.set_patience(if self.in_hand { self.patience.within } else { self.patience.idle });
            let Some((kind, payload)) = self.connection.receive()? else { return Ok(()) };
            match kind {
                Kind::Begin => self.begin(&payload)?,
                Kind::Pages => self.pages(&payload)?,
                Kind::Commit => self.commit(&payload)?,
                Kind::Abort => {
                    self.in_hand = false;
                    self.ask(Request::Abort)?;
                    self.connection.send(Kind::Done, &[b"null"])?;
                }
                Kind::Keep => {
                    let what: Retention = parse(&payload)?;
                    if let Some(keep) = what.keep {
                        self.ask(Request::Keep(keep))?;
                    }
                    if let Some(hold) = what.hold {
                        self.ask(Request::Hold(hold))?;
                    }
                    self.connection.send(Kind::Done, &[b"null"])?;
                }
                Kind::Digests => self.digests(&payload)?,
                Kind::Compact => {
                    let (reply, answer) = mpsc::channel();
                    self.ask(Request::Compact(reply))?;
                    match self.wait(&answer)? {
                        Ok(freed) => self.connection.send(Kind::Done, &[&freed.to_le_bytes()])?,
                        Err(e) => fail(self.connection, &e)?,
                    }
                }
                Kind::Settle => {
                    let (reply, answer) = mpsc::channel();
                    self.ask(Request::Settle(reply))?;
                    match self.wait(&answer)? {
                        Ok(()) => self.connection.send(Kind::Done, &[b"null"])?,
                        Err(e) => fail(self.connection, &e)?,
                    }
                }
                other => return refuse(self.connection, &format!("{other:?} from a client that writes")),
            }
        }
    }

    fn ask(&self, request: Request) -> ServeResult {
        self.requests.send(request).map_err(|_| ConnectionError::protocol("the store's thread has ended"))
    }

    fn wait<T>(&mut self, answer: &Receiver<T>) -> std::result::Result<T, ConnectionError> {
        wait(self.connection, answer)?.ok_or_else(|| ConnectionError::protocol("the store's thread has ended"))
    }

    fn begin(&mut self, payload: &[u8]) -> ServeResult {
        let BlockTable { blocks } = parse(payload)?;
        let (reply, answer) = mpsc::channel();
        self.ask(Request::Begin(blocks, reply))?;
        match self.wait(&answer)? {
            Ok(started) => {
                let numbers = started.iter().map(|started| started.number).collect();
                self.started = started;
                self.in_hand = true;
                self.connection.send_json(Kind::BlockNumbers, &BlockNumbers { numbers })
            }
            Err(e) => fail(self.connection, &e),
        }
    }

    fn pages(&mut self, payload: &[u8]) -> ServeResult {
        let Some((count, body)) = payload.split_first_chunk::<4>() else {
            return refuse(self.connection, "pages without their number");
        };
        if !self.in_hand {
            return refuse(self.connection, "pages without a checkpoint");
        }
        // If too many frames are queued, waits until the engine returns one.
        let mut frame = if self.waiting < WAITING {
            self.waiting += 1;
            Frame::default()
        } else {
            let back = self.back.1.recv();
            back.map_err(|_| ConnectionError::protocol("the store's thread has ended"))?
        };
        frame.count = u32::from_le_bytes(*count) as usize;
        frame.start = 0;
        frame.bytes.clear();
        frame.bytes.grow(FRAME_HEADER_LEN).fill(0);
        frame.bytes.extend_from_slice(body);
        let (ready, coming) = mpsc::channel();
        let _ = ready.send(frame);
        self.ask(Request::Frame(coming, self.back.0.clone()))
    }

    fn commit(&mut self, payload: &[u8]) -> ServeResult {
        let mut reader = Reader::new(payload);
        let mut fields = || {
            let (unchanged, definition, metadata) = (reader.u64()?, reader.u32()? as usize, reader.u32()? as usize);
            let definition = reader.bytes(definition)?.to_vec();
            let metadata = reader.bytes(metadata)?.to_vec();
            Some((unchanged, State { definition, metadata, devices: reader.rest().to_vec() }))
        };
        let Some((unchanged, state)) = fields() else {
            return refuse(self.connection, "a commit that cannot be read");
        };
        self.in_hand = false;
        let (reply, answer) = mpsc::channel();
        self.ask(Request::Commit(Box::new(state), unchanged, reply))?;
        match self.wait(&answer)? {
            Ok(committed) => self.connection.send_json(Kind::Committed, &committed),
            Err(e) => fail(self.connection, &e),
        }
    }

    fn digests(&mut self, payload: &[u8]) -> ServeResult {
        let mut reader = Reader::new(payload);
        let mut fields = || Some((reader.u16()?, reader.u64()?, reader.u64()?));
        let Some((number, first, count)) = fields().filter(|(_, _, count)| *count <= 1 << 16) else {
            return refuse(self.connection, "a request for digests that cannot be read");
        };
        let mut out = Vec::new();
        let found = self.started.iter().find(|started| started.number == number);
        if let Some(started) = found.filter(|started| !started.digests.is_untouched()) {
            (first..first.saturating_add(count)).for_each(|page| out.put_u64(started.digests.get(page)));
        }
        self.connection.send(Kind::Bytes, &[&out])
    }
}

/// Serves a client that reads.
fn read(connection: &mut Connection, image: &LocalImage, patience: Timeouts) -> ServeResult {
    let home = image.home();
    let info = image.info();
    let welcome =
        Welcome { id: home.id, vm: home.vm.clone(), epoch: info.epoch, newest: info.number, info: Some(info) };
    connection.send_json(Kind::Welcome, &welcome)?;
    connection.set_patience(patience.idle);
    let mut hot = None;
    let mut position = 0u64;
    while let Some((kind, payload)) = connection.receive()? {
        match kind {
            Kind::Read => {
                let Some(ids) = decode_ids(&payload) else {
                    return refuse(connection, "a request for pages that cannot be read");
                };
                match image.read_stored(&ids) {
                    Ok(pages) => connection.send(Kind::Stored, &[&encode_stored(&pages)])?,
                    Err(e) => fail(connection, &e)?,
                }
            }
            Kind::Digests => {
                let Some(ids) = decode_ids(&payload) else {
                    return refuse(connection, "a request for digests that cannot be read");
                };
                match image.digests(&ids) {
                    Ok(digests) => {
                        let bytes: Vec<u8> = digests.into_iter().flat_map(u64::to_le_bytes).collect();
                        connection.send(Kind::Bytes, &[&bytes])?;
                    }
                    Err(e) => fail(connection, &e)?,
                }
            }
            Kind::Hot => {
                let Some(from) = Reader::new(&payload).u64() else {
                    return refuse(connection, "a request for an order that cannot be read");
                };
                if hot.is_none() || from != position {
                    hot = match image.hot() {
                        Ok(pages) => Some(pages),
                        Err(e) => {
                            fail(connection, &e)?;
                            continue;
                        }
                    };
                    position = 0;
                }
                if let Some(hot) = &mut hot {
                    let skip = usize::try_from(from - position).unwrap_or(usize::MAX);
                    let some: Vec<_> = hot.skip(skip).take(PAGES).collect();
                    position = from + some.len() as u64;
                    connection.send(Kind::Order, &[&encode_ids(&some)])?;
                }
            }
            Kind::Section => {
                let section = match payload.as_slice() {
                    [0] => Section::Devices,
                    [1] => Section::Definition,
                    [2] => Section::Metadata,
                    _ => return refuse(connection, "a request for a section that is not known"),
                };
                match image.section(section) {
                    Ok(bytes) => connection.send(Kind::Bytes, &[&bytes])?,
                    Err(e) => fail(connection, &e)?,
                }
            }
            other => return refuse(connection, &format!("{other:?} from a client that reads")),
        }
    }
    Ok(())
}

/// Serves a client that lists or verifies.
fn inspect(connection: &mut Connection, home: &Home) -> ServeResult {
    let welcome = Welcome { id: home.id, vm: home.vm.clone(), epoch: 0, newest: 0, info: None };
    connection.send_json(Kind::Welcome, &welcome)?;
    while let Some((kind, _)) = connection.receive()? {
        match kind {
            Kind::List => match list(home) {
                Ok(listing) => connection.send_json(Kind::Listing, &listing)?,
                Err(e) => fail(connection, &e)?,
            },
            Kind::Verify => {
                let (done, answer) = mpsc::channel();
                let verified = thread::scope(|scope| {
                    let work = move || drop(done.send(verify(home, |_, _| {})));
                    thread::Builder::new()
                        .name("verify".into())
                        .spawn_scoped(scope, work)
                        .map_err(ConnectionError::Io)?;
                    wait(connection, &answer)
                })?;
                match verified {
                    Some(Ok(verified)) => connection.send_json(Kind::Verified, &verified)?,
                    Some(Err(e)) => fail(connection, &e)?,
                    None => return refuse(connection, "the verification has failed"),
                }
            }
            other => return refuse(connection, &format!("{other:?} from a client that inspects")),
        }
    }
    Ok(())
}
