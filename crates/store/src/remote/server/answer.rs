//! Answers to a client: success, an error, and reports that the server is still working on a request.

use crate::error::{ConnectionError, StoreError};
use crate::format::codec::shortened;
use crate::remote::connection::Connection;
use crate::remote::protocol::{Failure, Kind};
use serde::de::DeserializeOwned;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// Interval of the reports to a client that the server is still working on its request.
const BUSY_INTERVAL: Duration = Duration::from_secs(5);
/// Limit of an error message's length in bytes.
const MAX_FAILURE_TEXT_BYTES: usize = 16 << 10;
/// Result of serving: the error because of which the connection ended, if any.
pub(super) type ServeResult = std::result::Result<(), ConnectionError>;

/// Reports success without a result.
pub(super) fn send_done(connection: &mut Connection) -> ServeResult {
    connection.send(Kind::Done, &[b"null"])
}

/// Sends an error to the client; the connection stays open.
pub(super) fn fail(connection: &mut Connection, e: &StoreError) -> ServeResult {
    let mut failure = Failure::of(e);
    failure.text = shortened(&failure.text, MAX_FAILURE_TEXT_BYTES).to_owned();
    connection.send_json(Kind::Failure, &failure)
}

/// Sends a protocol error to the client and ends the connection.
pub(super) fn refuse(connection: &mut Connection, text: &str) -> ServeResult {
    connection.send_json(Kind::Failure, &Failure::protocol(text))?;
    Err(ConnectionError::protocol(text))
}

/// Waits for the result of another thread, and regularly reports to the client that the work is in progress. Returns
/// `None` if the thread has ended.
pub(super) fn wait_for<T>(
    connection: &mut Connection,
    answer: &Receiver<T>,
) -> std::result::Result<Option<T>, ConnectionError> {
    loop {
        match answer.recv_timeout(BUSY_INTERVAL) {
            Ok(answer) => return Ok(Some(answer)),
            Err(RecvTimeoutError::Timeout) => connection.send(Kind::Busy, &[])?,
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
        }
    }
}

pub(super) fn parse<T: DeserializeOwned>(payload: &[u8]) -> std::result::Result<T, ConnectionError> {
    serde_json::from_slice(payload)
        .map_err(|e| ConnectionError::protocol(format!("a request that cannot be read: {e}")))
}
