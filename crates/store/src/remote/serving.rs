//! One connection, seen from the server.

use super::line::{Line, LineError};
use super::protocol::{
    BeginBlocks, BegunBlocks, Failure, Hello, KeepWhat, Kind, PAGES, Purpose, VERSION, Welcome, decode_ids, encode_ids,
    encode_stored,
};
use super::server::Patience;
use crate::admin::{self, Fenced};
use crate::disk::{Disk, LocalDisk};
use crate::engine::{self, Begun, Engine, Frame, Request, Settings, State};
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

/// How often a client is told that its request is still being worked on.
const BUSY: Duration = Duration::from_secs(5);
/// Frames that wait for the disk, at most.
const WAITING: usize = 4;

/// Why a connection ended.
type Ended = std::result::Result<(), LineError>;

/// Serve a client until it goes.
pub(super) fn serve(mut line: Line, directory: &Path, patience: Patience) -> Ended {
    let Some((kind, payload)) = line.receive()? else { return Ok(()) };
    if kind != Kind::Hello {
        return refuse(&mut line, &format!("{kind:?} before a greeting"));
    }
    let hello: Hello = match serde_json::from_slice(&payload) {
        Ok(hello) => hello,
        Err(e) => {
            return refuse(&mut line, &format!("the greeting cannot be read ({e}); are both of the same version?"));
        }
    };
    if hello.version != VERSION {
        let text = format!("protocol version {}, this server speaks {VERSION}; use the same Rekindle", hello.version);
        return refuse(&mut line, &text);
    }
    let name = hello.name.as_str();
    let disk = Arc::new(LocalDisk::named(&directory.join(name), name));
    let result = match hello.purpose {
        Purpose::Write { vm, owner, only_if, keep, segment, create } => {
            let settings = Settings { keep: keep.max(1), segment: segment.min(1 << 26), create };
            match Engine::open(disk, &vm, &owner, only_if, settings) {
                Ok(engine) => return write(&mut line, engine, vm, patience),
                Err(e) => Err(e),
            }
        }
        Purpose::Read { vm, at, unlooked } => {
            let open = if unlooked { LocalImage::open_unlooked } else { LocalImage::open };
            match Home::open(disk, vm).and_then(|home| open(home, at)) {
                Ok(image) => return read(&mut line, &image, patience),
                Err(e) => Err(e),
            }
        }
        Purpose::Look => match Home::open(disk, None) {
            Ok(home) => return look(&mut line, &home),
            Err(e) => Err(e),
        },
        Purpose::Init => {
            return match Home::init(&(disk as Arc<dyn Disk>)) {
                Ok(()) => line.send(Kind::Done, &[b"null"]),
                Err(e) => fail(&mut line, &e),
            };
        }
        Purpose::Fence { vm, owner, only_if } => fence(disk, &vm, &owner, only_if),
    };
    match result {
        Ok(welcome) => line.send_json(Kind::Welcome, &welcome),
        Err(e) => fail(&mut line, &e),
    }
}

/// Tell the client what went wrong; the connection goes on.
fn fail(line: &mut Line, e: &StoreError) -> Ended {
    let mut failure = Failure::of(e);
    failure.text = shortened(&failure.text, 16 << 10).to_owned();
    line.send_json(Kind::Failure, &failure)
}

/// Tell the client that it says what makes no sense, and end.
fn refuse(line: &mut Line, text: &str) -> Ended {
    line.send_json(Kind::Failure, &Failure::protocol(text))?;
    Err(LineError::protocol(text))
}

fn fence(disk: Arc<LocalDisk>, vm: &Vm, owner: &Owner, only_if: Option<OnlyIf>) -> Result<Welcome> {
    let (home, Fenced { epoch, newest }) = admin::fence_in(disk, vm, owner, only_if)?;
    Ok(Welcome { id: home.id, vm: home.vm, epoch, newest, info: None })
}

/// Wait for what somebody works on, and tell the client meanwhile that it is being worked on. `None` when the worker has
/// gone.
fn wait<T>(line: &mut Line, answer: &Receiver<T>) -> std::result::Result<Option<T>, LineError> {
    loop {
        match answer.recv_timeout(BUSY) {
            Ok(answer) => return Ok(Some(answer)),
            Err(RecvTimeoutError::Timeout) => line.send(Kind::Busy, &[])?,
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
        }
    }
}

fn parse<T: DeserializeOwned>(payload: &[u8]) -> std::result::Result<T, LineError> {
    serde_json::from_slice(payload).map_err(|e| LineError::protocol(format!("a request that cannot be read: {e}")))
}

/// A client that writes.
struct Session<'a> {
    line: &'a mut Line,
    requests: Sender<Request>,
    /// Frames that wait for the disk come back here.
    back: (Sender<Frame>, Receiver<Frame>),
    waiting: usize,
    begun: Vec<Begun>,
    in_hand: bool,
    patience: Patience,
}

fn write(line: &mut Line, engine: Engine, vm: Vm, patience: Patience) -> Ended {
    let welcome = Welcome { id: engine.id(), vm, epoch: engine.owner().epoch, newest: engine.newest(), info: None };
    line.send_json(Kind::Welcome, &welcome)?;
    let (requests, asked) = mpsc::channel();
    // Ends, with what was in hand given up, when there is nobody left to ask.
    thread::scope(|scope| {
        let run = thread::Builder::new().name("store".into()).spawn_scoped(scope, move || engine::run(engine, &asked));
        run.map_err(LineError::Io)?;
        let back = mpsc::channel();
        Session { line, requests, back, waiting: 0, begun: Vec::new(), in_hand: false, patience }.serve()
    })
}

impl Session<'_> {
    fn serve(mut self) -> Ended {
        loop {
            self.line.set_patience(if self.in_hand { self.patience.within } else { self.patience.idle });
            let Some((kind, payload)) = self.line.receive()? else { return Ok(()) };
            match kind {
                Kind::Begin => self.begin(&payload)?,
                Kind::Pages => self.pages(&payload)?,
                Kind::Commit => self.commit(&payload)?,
                Kind::Abort => {
                    self.in_hand = false;
                    self.ask(Request::Abort)?;
                    self.line.send(Kind::Done, &[b"null"])?;
                }
                Kind::Keep => {
                    let what: KeepWhat = parse(&payload)?;
                    if let Some(keep) = what.keep {
                        self.ask(Request::Keep(keep))?;
                    }
                    if let Some(hold) = what.hold {
                        self.ask(Request::Hold(hold))?;
                    }
                    self.line.send(Kind::Done, &[b"null"])?;
                }
                Kind::Digests => self.digests(&payload)?,
                Kind::Compact => {
                    let (reply, answer) = mpsc::channel();
                    self.ask(Request::Compact(reply))?;
                    match self.wait(&answer)? {
                        Ok(freed) => self.line.send(Kind::Done, &[&freed.to_le_bytes()])?,
                        Err(e) => fail(self.line, &e)?,
                    }
                }
                Kind::Settle => {
                    let (reply, answer) = mpsc::channel();
                    self.ask(Request::Settle(reply))?;
                    match self.wait(&answer)? {
                        Ok(()) => self.line.send(Kind::Done, &[b"null"])?,
                        Err(e) => fail(self.line, &e)?,
                    }
                }
                other => return refuse(self.line, &format!("{other:?} from a client that writes")),
            }
        }
    }

    fn ask(&self, request: Request) -> Ended {
        self.requests.send(request).map_err(|_| LineError::protocol("the store's thread has ended"))
    }

    fn wait<T>(&mut self, answer: &Receiver<T>) -> std::result::Result<T, LineError> {
        wait(self.line, answer)?.ok_or_else(|| LineError::protocol("the store's thread has ended"))
    }

    fn begin(&mut self, payload: &[u8]) -> Ended {
        let BeginBlocks { blocks } = parse(payload)?;
        let (reply, answer) = mpsc::channel();
        self.ask(Request::Begin(blocks, reply))?;
        match self.wait(&answer)? {
            Ok(begun) => {
                let numbers = begun.iter().map(|begun| begun.number).collect();
                self.begun = begun;
                self.in_hand = true;
                self.line.send_json(Kind::Begun, &BegunBlocks { numbers })
            }
            Err(e) => fail(self.line, &e),
        }
    }

    fn pages(&mut self, payload: &[u8]) -> Ended {
        let Some((count, body)) = payload.split_first_chunk::<4>() else {
            return refuse(self.line, "pages without their number");
        };
        if !self.in_hand {
            return refuse(self.line, "pages without a checkpoint");
        }
        // As fast as the disk takes them, and no faster.
        let mut frame = if self.waiting < WAITING {
            self.waiting += 1;
            Frame::default()
        } else {
            let back = self.back.1.recv();
            back.map_err(|_| LineError::protocol("the store's thread has ended"))?
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

    fn commit(&mut self, payload: &[u8]) -> Ended {
        let mut reader = Reader::new(payload);
        let mut fields = || {
            let (unchanged, definition, metadata) = (reader.u64()?, reader.u32()? as usize, reader.u32()? as usize);
            let definition = reader.bytes(definition)?.to_vec();
            let metadata = reader.bytes(metadata)?.to_vec();
            Some((unchanged, State { definition, metadata, devices: reader.rest().to_vec() }))
        };
        let Some((unchanged, state)) = fields() else {
            return refuse(self.line, "a commit that cannot be read");
        };
        self.in_hand = false;
        let (reply, answer) = mpsc::channel();
        self.ask(Request::Commit(Box::new(state), unchanged, reply))?;
        match self.wait(&answer)? {
            Ok(committed) => self.line.send_json(Kind::Committed, &committed),
            Err(e) => fail(self.line, &e),
        }
    }

    fn digests(&mut self, payload: &[u8]) -> Ended {
        let mut reader = Reader::new(payload);
        let mut fields = || Some((reader.u16()?, reader.u64()?, reader.u64()?));
        let Some((number, first, count)) = fields().filter(|(_, _, count)| *count <= 1 << 16) else {
            return refuse(self.line, "a request for digests that cannot be read");
        };
        let mut out = Vec::new();
        let found = self.begun.iter().find(|begun| begun.number == number);
        if let Some(begun) = found.filter(|begun| !begun.digests.is_untouched()) {
            (first..first.saturating_add(count)).for_each(|page| out.put_u64(begun.digests.get(page)));
        }
        self.line.send(Kind::Bytes, &[&out])
    }
}

/// A client that reads.
fn read(line: &mut Line, image: &LocalImage, patience: Patience) -> Ended {
    let home = image.home();
    let info = image.info();
    let welcome =
        Welcome { id: home.id, vm: home.vm.clone(), epoch: info.epoch, newest: info.number, info: Some(info) };
    line.send_json(Kind::Welcome, &welcome)?;
    line.set_patience(patience.idle);
    let mut hot = None;
    let mut position = 0u64;
    while let Some((kind, payload)) = line.receive()? {
        match kind {
            Kind::Read => {
                let Some(ids) = decode_ids(&payload) else {
                    return refuse(line, "a request for pages that cannot be read");
                };
                match image.read_stored(&ids) {
                    Ok(pages) => line.send(Kind::Stored, &[&encode_stored(&pages)])?,
                    Err(e) => fail(line, &e)?,
                }
            }
            Kind::Digests => {
                let Some(ids) = decode_ids(&payload) else {
                    return refuse(line, "a request for digests that cannot be read");
                };
                match image.digests(&ids) {
                    Ok(digests) => {
                        let bytes: Vec<u8> = digests.into_iter().flat_map(u64::to_le_bytes).collect();
                        line.send(Kind::Bytes, &[&bytes])?;
                    }
                    Err(e) => fail(line, &e)?,
                }
            }
            Kind::Hot => {
                let Some(from) = Reader::new(&payload).u64() else {
                    return refuse(line, "a request for an order that cannot be read");
                };
                if hot.is_none() || from != position {
                    hot = match image.hot() {
                        Ok(pages) => Some(pages),
                        Err(e) => {
                            fail(line, &e)?;
                            continue;
                        }
                    };
                    position = 0;
                }
                if let Some(hot) = &mut hot {
                    let skip = usize::try_from(from - position).unwrap_or(usize::MAX);
                    let some: Vec<_> = hot.skip(skip).take(PAGES).collect();
                    position = from + some.len() as u64;
                    line.send(Kind::Order, &[&encode_ids(&some)])?;
                }
            }
            Kind::Section => {
                let section = match payload.as_slice() {
                    [0] => Section::Devices,
                    [1] => Section::Definition,
                    [2] => Section::Metadata,
                    _ => return refuse(line, "a request for a section that is not known"),
                };
                match image.section(section) {
                    Ok(bytes) => line.send(Kind::Bytes, &[&bytes])?,
                    Err(e) => fail(line, &e)?,
                }
            }
            other => return refuse(line, &format!("{other:?} from a client that reads")),
        }
    }
    Ok(())
}

/// A client that looks.
fn look(line: &mut Line, home: &Home) -> Ended {
    let welcome = Welcome { id: home.id, vm: home.vm.clone(), epoch: 0, newest: 0, info: None };
    line.send_json(Kind::Welcome, &welcome)?;
    while let Some((kind, _)) = line.receive()? {
        match kind {
            Kind::List => match list(home) {
                Ok(listing) => line.send_json(Kind::Listing, &listing)?,
                Err(e) => fail(line, &e)?,
            },
            Kind::Verify => {
                let (done, answer) = mpsc::channel();
                let verified = thread::scope(|scope| {
                    let work = move || drop(done.send(verify(home, |_, _| {})));
                    thread::Builder::new().name("verify".into()).spawn_scoped(scope, work).map_err(LineError::Io)?;
                    wait(line, &answer)
                })?;
                match verified {
                    Some(Ok(verified)) => line.send_json(Kind::Verified, &verified)?,
                    Some(Err(e)) => fail(line, &e)?,
                    None => return refuse(line, "looking at the store has failed"),
                }
            }
            other => return refuse(line, &format!("{other:?} from a client that looks")),
        }
    }
    Ok(())
}
