//! Stores on a server: `tls://HOST:PORT/NAME`, and the server.
//!
//! | module | what it is for |
//! |---|---|
//! | [`identity`] | certificates, and what is wrong with them |
//! | `line` | a connection: frames, limits, patience |
//! | `protocol` | what the two say to each other |
//! | `session` | a writer whose store is on a server |
//! | `image` | an image on a server |
//! | `spare` | lines that are made before they are needed |
//! | [`server`] | the server |

pub mod identity;
mod image;
pub(crate) mod line;
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
use line::Line;
use protocol::{Kind, Purpose, Welcome};

pub use identity::Identity;
pub use image::RemoteHot;
pub(crate) use image::RemoteImage;
pub use line::LineError;
pub(crate) use session::WriteSession;
pub use spare::Spare;

/// Connect, say what for, and be welcomed.
fn greet(server: &Remote, identity: Option<&Identity>, purpose: &Purpose) -> Result<(Line, Welcome)> {
    greet_over(&Spare::default(), server, identity, purpose)
}

/// The same over a spare line, if there is one.
fn greet_over(
    spare: &Spare,
    server: &Remote,
    identity: Option<&Identity>,
    purpose: &Purpose,
) -> Result<(Line, Welcome)> {
    let store = server.to_string();
    let connected = spare.take(server).map_or_else(|| Line::connect(server, identity), Ok);
    let mut line =
        connected.map_err(|source| StoreError::Line { store: store.clone(), doing: "connecting", source })?;
    let hello = protocol::Hello { version: protocol::VERSION, name: server.name.clone(), purpose: purpose.clone() };
    let welcome = line.ask_json(&store, Kind::Hello, &hello, Kind::Welcome)?;
    Ok((line, welcome))
}

pub(crate) fn init(server: &Remote, identity: Option<&Identity>) -> Result<()> {
    let store = server.to_string();
    let mut line = Line::connect(server, identity).map_err(|source| StoreError::Line {
        store: store.clone(),
        doing: "connecting",
        source,
    })?;
    let hello = protocol::Hello { version: protocol::VERSION, name: server.name.clone(), purpose: Purpose::Init };
    line.ask_json(&store, Kind::Hello, &hello, Kind::Done)
}

pub(crate) fn listing(server: &Remote, identity: Option<&Identity>) -> Result<Listing> {
    let (mut line, _) = greet(server, identity, &Purpose::Look)?;
    line.ask_json(&server.to_string(), Kind::List, &(), Kind::Listing)
}

pub(crate) fn verified(server: &Remote, identity: Option<&Identity>) -> Result<Verified> {
    let (mut line, _) = greet(server, identity, &Purpose::Look)?;
    line.ask_json(&server.to_string(), Kind::Verify, &(), Kind::Verified)
}

pub(crate) fn fence(
    server: &Remote,
    vm: &Vm,
    owner: &Owner,
    only_if: Option<OnlyIf>,
    identity: Option<&Identity>,
    spare: &Spare,
) -> Result<Fenced> {
    let purpose = Purpose::Fence { vm: vm.clone(), owner: owner.clone(), only_if };
    let (_, welcome) = greet_over(spare, server, identity, &purpose)?;
    Ok(Fenced { epoch: welcome.epoch, newest: welcome.newest })
}
