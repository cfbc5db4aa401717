//! Serves one client: receives its greeting, opens the store, and hands the connection over to the part of the server
//! for the client's purpose.

use super::answer::{ServeResult, fail, refuse, send_done};
use super::{Timeouts, inspect, read, write};
use crate::directory::StoreDirectory;
use crate::disk::{Disk, LocalDisk};
use crate::engine::{Engine, EngineSettings};
use crate::error::Result;
use crate::fencing::{Fenced, fence_directory};
use crate::image::LocalImage;
use crate::remote::connection::Connection;
use crate::remote::protocol::{CheckpointRequest, Hello, Kind, Purpose, VERSION, Welcome};
use crate::types::{OnlyIf, Owner, Vm};
use std::path::Path;
use std::sync::Arc;

/// Limit of a segment's bytes that a client may choose.
const MAX_SEGMENT_BYTES: u64 = 1 << 26;

/// Serves a client until it disconnects. The stores are in `directory`.
pub(super) fn serve(mut connection: Connection, directory: &Path, timeouts: Timeouts) -> ServeResult {
    let Some((kind, payload)) = connection.receive()? else { return Ok(()) };
    let hello = match parse_greeting(kind, &payload) {
        Ok(hello) => hello,
        Err(text) => return refuse(&mut connection, &text),
    };
    let name = hello.name.as_str();
    let disk = Arc::new(LocalDisk::named(&directory.join(name), name));
    match hello.purpose {
        Purpose::Write { vm, owner, only_if, keep, segment, create } => {
            let settings = EngineSettings { keep: keep.max(1), segment: segment.min(MAX_SEGMENT_BYTES), create };
            match Engine::open(disk, &vm, &owner, only_if, settings) {
                Ok(engine) => write::serve(&mut connection, engine, vm, timeouts),
                Err(e) => fail(&mut connection, &e),
            }
        }
        Purpose::Read(request) => match open_image(disk, &request) {
            Ok(image) => read::serve(&mut connection, &image, timeouts),
            Err(e) => fail(&mut connection, &e),
        },
        Purpose::Inspect => match StoreDirectory::open(disk, None) {
            Ok(store) => inspect::serve(&mut connection, &store),
            Err(e) => fail(&mut connection, &e),
        },
        Purpose::Init => match StoreDirectory::init(&(disk as Arc<dyn Disk>)) {
            Ok(()) => send_done(&mut connection),
            Err(e) => fail(&mut connection, &e),
        },
        Purpose::Fence { vm, owner, only_if } => match fence(disk, &vm, &owner, only_if) {
            Ok(welcome) => connection.send_json(Kind::Welcome, &welcome),
            Err(e) => fail(&mut connection, &e),
        },
    }
}

/// Parses the first message of a client. An error is the text for the client.
fn parse_greeting(kind: Kind, payload: &[u8]) -> std::result::Result<Hello, String> {
    if kind != Kind::Hello {
        return Err(format!("{kind:?} before a greeting"));
    }
    let hello: Hello = serde_json::from_slice(payload)
        .map_err(|e| format!("the greeting cannot be read ({e}); are both of the same version?"))?;
    if hello.version != VERSION {
        let version = hello.version;
        return Err(format!("protocol version {version}, this server speaks {VERSION}; use the same Rekindle"));
    }
    Ok(hello)
}

fn open_image(disk: Arc<LocalDisk>, request: &CheckpointRequest) -> Result<LocalImage> {
    let store = StoreDirectory::open(disk, request.vm)?;
    if request.lazy { LocalImage::open_lazily(store, request.at) } else { LocalImage::open(store, request.at) }
}

fn fence(disk: Arc<LocalDisk>, vm: &Vm, owner: &Owner, only_if: Option<OnlyIf>) -> Result<Welcome> {
    let (store, Fenced { epoch, newest, .. }) = fence_directory(disk, vm, owner, only_if)?;
    Ok(Welcome { id: store.id, vm: store.vm, epoch, newest, info: None })
}
