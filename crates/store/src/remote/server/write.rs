//! Serves a client that writes checkpoints: passes its requests to the thread of an engine.

use super::Timeouts;
use super::answer::{ServeResult, fail, parse, refuse, send_done, wait_for};
use crate::engine::{self, CheckpointState, Engine, Frame, Request, StartedBlock};
use crate::error::ConnectionError;
use crate::format::codec::{Reader, Writer};
use crate::format::segment::FRAME_HEADER_LEN;
use crate::remote::connection::Connection;
use crate::remote::protocol::{BlockNumbers, BlockTable, DigestRange, Kind, Retention, Welcome};
use crate::types::Vm;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

/// Limit of frames (up to 1024 pages each) that are queued for writing.
const MAX_QUEUED_FRAMES: usize = 4;
/// Limit of digests in a request.
const MAX_DIGESTS: u64 = 1 << 16;

/// Serves a client with an engine that has opened the store.
pub(super) fn serve(connection: &mut Connection, engine: Engine, vm: Vm, timeouts: Timeouts) -> ServeResult {
    let opened = engine.opened();
    let welcome = Welcome { id: engine.id(), vm, epoch: opened.epoch, newest: opened.newest, info: None };
    connection.send_json(Kind::Welcome, &welcome)?;
    let (requests, received) = mpsc::channel();
    // When the connection ends, the sender is dropped. The engine's thread then aborts an open checkpoint and ends.
    thread::scope(|scope| {
        thread::Builder::new()
            .name("store".into())
            .spawn_scoped(scope, move || engine::run(engine, &received))
            .map_err(ConnectionError::Io)?;
        let (return_frame, returned_frames) = mpsc::channel();
        let server = WriteServer {
            connection,
            requests,
            return_frame,
            returned_frames,
            created_frames: 0,
            started: Vec::new(),
            checkpoint_is_open: false,
            timeouts,
        };
        server.serve()
    })
}

struct WriteServer<'a> {
    connection: &'a mut Connection,
    /// Requests to the engine.
    requests: Sender<Request>,
    /// The engine returns frames here after writing them.
    return_frame: Sender<Frame>,
    returned_frames: Receiver<Frame>,
    created_frames: usize,
    /// Blocks of the open or last checkpoint.
    started: Vec<StartedBlock>,
    checkpoint_is_open: bool,
    timeouts: Timeouts,
}

impl WriteServer<'_> {
    fn serve(mut self) -> ServeResult {
        loop {
            let max_silence = if self.checkpoint_is_open { self.timeouts.within } else { self.timeouts.idle };
            self.connection.set_max_silence(max_silence);
            let Some((kind, payload)) = self.connection.receive()? else { return Ok(()) };
            match kind {
                Kind::Begin => self.begin(&payload)?,
                Kind::Pages => self.append_pages(&payload)?,
                Kind::Commit => self.commit(&payload)?,
                Kind::Abort => self.abort()?,
                Kind::Keep => self.set_retention(&payload)?,
                Kind::Digests => self.send_digests(&payload)?,
                Kind::Compact => self.compact()?,
                Kind::Settle => self.settle()?,
                other => return refuse(self.connection, &format!("{other:?} from a client that writes")),
            }
        }
    }

    fn request(&self, request: Request) -> ServeResult {
        self.requests.send(request).map_err(|_| engine_has_ended())
    }

    fn wait_for<T>(&mut self, answer: &Receiver<T>) -> std::result::Result<T, ConnectionError> {
        wait_for(self.connection, answer)?.ok_or_else(engine_has_ended)
    }

    fn begin(&mut self, payload: &[u8]) -> ServeResult {
        let BlockTable { blocks } = parse(payload)?;
        let (reply, answer) = mpsc::channel();
        self.request(Request::Begin(blocks, reply))?;
        match self.wait_for(&answer)? {
            Ok(started) => {
                let numbers = started.iter().map(|started| started.number).collect();
                self.started = started;
                self.checkpoint_is_open = true;
                self.connection.send_json(Kind::BlockNumbers, &BlockNumbers { numbers })
            }
            Err(e) => fail(self.connection, &e),
        }
    }

    fn append_pages(&mut self, payload: &[u8]) -> ServeResult {
        let Some((count, body)) = payload.split_first_chunk::<4>() else {
            return refuse(self.connection, "pages without their number");
        };
        if !self.checkpoint_is_open {
            return refuse(self.connection, "pages without a checkpoint");
        }
        // If too many frames are queued, waits until the engine returns one.
        let mut frame = if self.created_frames < MAX_QUEUED_FRAMES {
            self.created_frames += 1;
            Frame::default()
        } else {
            self.returned_frames.recv().map_err(|_| engine_has_ended())?
        };
        frame.count = u32::from_le_bytes(*count) as usize;
        frame.start = 0;
        frame.bytes.clear();
        frame.bytes.grow(FRAME_HEADER_LEN).fill(0);
        frame.bytes.extend_from_slice(body);
        // The engine expects a channel, because a local writer sends the frame while it is still being packed.
        let (send_packed, packed) = mpsc::channel();
        let _ = send_packed.send(frame);
        self.request(Request::Frame(packed, self.return_frame.clone()))
    }

    fn commit(&mut self, payload: &[u8]) -> ServeResult {
        let mut reader = Reader::new(payload);
        let mut read_fields = || {
            let (unchanged, definition_len, metadata_len) = (reader.u64()?, reader.u32()?, reader.u32()?);
            let definition = reader.bytes(definition_len as usize)?.to_vec();
            let metadata = reader.bytes(metadata_len as usize)?.to_vec();
            Some((unchanged, CheckpointState { definition, metadata, devices: reader.rest().to_vec() }))
        };
        let Some((unchanged, state)) = read_fields() else {
            return refuse(self.connection, "a commit that cannot be read");
        };
        self.checkpoint_is_open = false;
        let (reply, answer) = mpsc::channel();
        self.request(Request::Commit(Box::new(state), unchanged, reply))?;
        match self.wait_for(&answer)? {
            Ok(committed) => self.connection.send_json(Kind::Committed, &committed),
            Err(e) => fail(self.connection, &e),
        }
    }

    fn abort(&mut self) -> ServeResult {
        self.checkpoint_is_open = false;
        self.request(Request::Abort)?;
        send_done(self.connection)
    }

    fn set_retention(&mut self, payload: &[u8]) -> ServeResult {
        let Retention { keep, hold } = parse(payload)?;
        if let Some(keep) = keep {
            self.request(Request::Keep(keep))?;
        }
        if let Some(hold) = hold {
            self.request(Request::Hold(hold))?;
        }
        send_done(self.connection)
    }

    /// Sends the digests of consecutive pages of a block. A block without stored pages has none.
    fn send_digests(&mut self, payload: &[u8]) -> ServeResult {
        let range = DigestRange::decode(payload).filter(|range| range.count <= MAX_DIGESTS);
        let Some(DigestRange { block, first, count }) = range else {
            return refuse(self.connection, "a request for digests that cannot be read");
        };
        let mut digests = Vec::new();
        let started = self.started.iter().find(|started| started.number == block);
        if let Some(started) = started.filter(|started| !started.digests.is_untouched()) {
            (first..first.saturating_add(count)).for_each(|page| digests.put_u64(started.digests.get(page)));
        }
        self.connection.send(Kind::Bytes, &[&digests])
    }

    fn compact(&mut self) -> ServeResult {
        let (reply, answer) = mpsc::channel();
        self.request(Request::Compact(reply))?;
        match self.wait_for(&answer)? {
            Ok(freed_bytes) => self.connection.send(Kind::Done, &[&freed_bytes.to_le_bytes()]),
            Err(e) => fail(self.connection, &e),
        }
    }

    fn settle(&mut self) -> ServeResult {
        let (reply, answer) = mpsc::channel();
        self.request(Request::Settle(reply))?;
        match self.wait_for(&answer)? {
            Ok(()) => send_done(self.connection),
            Err(e) => fail(self.connection, &e),
        }
    }
}

fn engine_has_ended() -> ConnectionError {
    ConnectionError::protocol("the store's thread has ended")
}
