//! Stores on a server (`tls://HOST:PORT/NAME`): the client and the server.
//!
//! | module | purpose |
//! |---|---|
//! | [`identity`] | certificates, and messages about them |
//! | `connection` | a connection: frames, limits, timeouts |
//! | `protocol` | messages of client and server |
//! | `session` | writes a store on a server |
//! | `image` | reads a checkpoint on a server |
//! | `spare` | connections that are opened before they are needed |
//! | [`server`] | the server |

pub(crate) mod connection;
pub mod identity;
mod image;
pub(crate) mod protocol;
pub mod server;
mod serving;
mod session;
mod spare;

use crate::admin::Fenced;
use crate::error::{Result, StoreError};
use crate::listing::Listing;
use crate::types::{OnlyIf, Owner, Vm};
use crate::url::Remote;
use crate::verify::Verified;
use connection::Connection;
use protocol::{Kind, Purpose, Welcome};

pub use connection::ConnectionError;
pub use identity::Identity;
pub use image::RemoteHot;
pub(crate) use image::RemoteImage;
pub(crate) use session::WriteSession;
pub use spare::SpareConnections;

/// Connects to the server and sends a greeting with `purpose`.
fn greet(server: &Remote, identity: Option<&Identity>, purpose: &Purpose) -> Result<(Connection, Welcome)> {
    greet_over(&SpareConnections::default(), server, identity, purpose)
}

/// Sends a greeting like [`greet`], over a spare connection if there is one.
fn greet_over(
    spare: &SpareConnections,
    server: &Remote,
    identity: Option<&Identity>,
    purpose: &Purpose,
) -> Result<(Connection, Welcome)> {
    let store = server.to_string();
    let connected = spare.take(server).map_or_else(|| Connection::connect(server, identity), Ok);
    let mut connection =
        connected.map_err(|source| StoreError::Connection { store: store.clone(), doing: "connecting", source })?;
    let hello = protocol::Hello { version: protocol::VERSION, name: server.name.clone(), purpose: purpose.clone() };
    let welcome = connection.ask_json(&store, Kind::Hello, &hello, Kind::Welcome)?;
    Ok((connection, welcome))
}

pub(crate) fn init(server: &Remote, identity: Option<&Identity>) -> Result<()> {
    let store = server.to_string();
    let mut connection = Connection::connect(server, identity).map_err(|source| StoreError::Connection {
        store: store.clone(),
        doing: "connecting",
        source,
    })?;
    let hello = protocol::Hello { version: protocol::VERSION, name: server.name.clone(), purpose: Purpose::Init };
    connection.ask_json(&store, Kind::Hello, &hello, Kind::Done)
}

pub(crate) fn listing(server: &Remote, identity: Option<&Identity>) -> Result<Listing> {
    let (mut connection, _) = greet(server, identity, &Purpose::Inspect)?;
    connection.ask_json(&server.to_string(), Kind::List, &(), Kind::Listing)
}

pub(crate) fn verified(server: &Remote, identity: Option<&Identity>) -> Result<Verified> {
    let (mut connection, _) = greet(server, identity, &Purpose::Inspect)?;
    connection.ask_json(&server.to_string(), Kind::Verify, &(), Kind::Verified)
}

pub(crate) fn fence(
    server: &Remote,
    vm: &Vm,
    owner: &Owner,
    only_if: Option<OnlyIf>,
    identity: Option<&Identity>,
    spare: &SpareConnections,
) -> Result<Fenced> {
    let purpose = Purpose::Fence { vm: vm.clone(), owner: owner.clone(), only_if };
    let (_, welcome) = greet_over(spare, server, identity, &purpose)?;
    Ok(Fenced { epoch: welcome.epoch, newest: welcome.newest })
}
