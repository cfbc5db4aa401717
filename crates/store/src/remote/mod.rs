//! Stores on a server (`tls://HOST:PORT/NAME`): the client and the server.
//!
//! | module | purpose |
//! |---|---|
//! | [`identity`] | certificates, and messages about them |
//! | `connection` | a connection: frames, limits, timeouts |
//! | `protocol` | messages of client and server |
//! | `write_session` | writes a store on a server |
//! | `image` | reads a checkpoint on a server |
//! | `spare` | connections that are opened before they are needed |
//! | [`server`] | the server |

pub(crate) mod connection;
pub mod identity;
mod image;
pub(crate) mod protocol;
pub mod server;
mod spare;
mod write_session;

use crate::error::{Result, StoreError};
use crate::fencing::Fenced;
use crate::listing::Listing;
use crate::log::require_reached;
use crate::types::{KnownState, OnlyIf, Owner, Vm};
use crate::url::Remote;
use crate::verify::Verified;
use connection::Connection;
use protocol::{Hello, Kind, Purpose, Welcome};

pub use crate::credentials::Identity;
pub use crate::error::ConnectionError;
pub use image::RemoteHotPages;
pub(crate) use image::RemoteImage;
pub(crate) use protocol::CheckpointRequest;
pub use spare::SpareConnections;
pub(crate) use write_session::WriteSession;

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
    let mut connection = match spare.take(server) {
        Some(connection) => connection,
        None => connect(server, identity)?,
    };
    let welcome = connection.ask_json(&store, Kind::Hello, &hello(server, purpose.clone()), Kind::Welcome)?;
    Ok((connection, welcome))
}

fn connect(server: &Remote, identity: Option<&Identity>) -> Result<Connection> {
    let failed = |source| StoreError::Connection { store: server.to_string(), doing: "connecting", source };
    Connection::connect(server, identity).map_err(failed)
}

fn hello(server: &Remote, purpose: Purpose) -> Hello {
    Hello { version: protocol::VERSION, name: server.name.clone(), purpose }
}

pub(crate) fn init(server: &Remote, identity: Option<&Identity>) -> Result<()> {
    let mut connection = connect(server, identity)?;
    connection.ask_json(&server.to_string(), Kind::Hello, &hello(server, Purpose::Init), Kind::Done)
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
    // The server may be older than the condition.
    let only_if = match only_if {
        Some(OnlyIf::Expected(expected)) if expected.at_least == KnownState::default() => {
            expected.at_epoch.map(OnlyIf::Epoch)
        }
        Some(OnlyIf::Expected(expected)) => {
            let listing = listing(server, identity)?;
            let checkpoint = listing.checkpoints.last().map_or(0, |listed| listed.number);
            let found = KnownState { epoch: listing.epoch, checkpoint };
            require_reached(&server.to_string(), found, expected.at_least)?;
            Some(OnlyIf::Epoch(expected.at_epoch.unwrap_or(listing.epoch)))
        }
        other => other,
    };
    let purpose = Purpose::Fence { vm: vm.clone(), owner: owner.clone(), only_if };
    let (_, welcome) = greet_over(spare, server, identity, &purpose)?;
    Ok(Fenced { epoch: welcome.epoch, newest: welcome.newest, known: None })
}
