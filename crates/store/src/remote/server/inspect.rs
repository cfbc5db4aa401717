//! Serves a client that lists or verifies a store.

use super::answer::{ServeResult, fail, refuse, wait_for};
use crate::directory::StoreDirectory;
use crate::error::ConnectionError;
use crate::listing::list;
use crate::remote::connection::Connection;
use crate::remote::protocol::{Kind, Welcome};
use crate::verify::verify;
use std::sync::mpsc;
use std::thread;

pub(super) fn serve(connection: &mut Connection, store: &StoreDirectory) -> ServeResult {
    let welcome = Welcome { id: store.id, vm: store.vm.clone(), epoch: 0, newest: 0, info: None };
    connection.send_json(Kind::Welcome, &welcome)?;
    while let Some((kind, _)) = connection.receive()? {
        match kind {
            Kind::List => match list(store) {
                Ok(listing) => connection.send_json(Kind::Listing, &listing)?,
                Err(e) => fail(connection, &e)?,
            },
            Kind::Verify => verify_in_thread(connection, store)?,
            other => return refuse(connection, &format!("{other:?} from a client that inspects")),
        }
    }
    Ok(())
}

/// Verifies the store in another thread, while this thread reports to the client that the work is in progress.
fn verify_in_thread(connection: &mut Connection, store: &StoreDirectory) -> ServeResult {
    let (reply, answer) = mpsc::channel();
    let verified = thread::scope(|scope| {
        thread::Builder::new()
            .name("verify".into())
            .spawn_scoped(scope, move || drop(reply.send(verify(store, |_, _| {}))))
            .map_err(ConnectionError::Io)?;
        wait_for(connection, &answer)
    })?;
    match verified {
        Some(Ok(verified)) => connection.send_json(Kind::Verified, &verified),
        Some(Err(e)) => fail(connection, &e),
        None => refuse(connection, "the verification has failed"),
    }
}
