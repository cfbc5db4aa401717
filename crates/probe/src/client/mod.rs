//! A client: its connection, if one is open, and the protocol on it.

mod echo;
mod http;
mod response;

use crate::failure::{Failure, NoAnswer};
use crate::target::{Scheme, Target};
use crate::wire::{Dialer, IdleState, Io, Observer, Wire};

use echo::Echo;
use http::Http;

/// Result of a request whose connection was not lost.
struct Answer {
    /// The connection can be used for another request.
    keeps_connection: bool,
    /// Why the answer is wrong; `None` for a good answer.
    fault: Option<Failure>,
}

/// Sends requests to a target, one at a time.
#[derive(Debug)]
pub(crate) struct Client {
    dialer: Dialer,
    wire: Option<Wire>,
    protocol: Protocol,
}

/// The protocol of a client, with its state on the connection.
#[derive(Debug)]
enum Protocol {
    Http(Http),
    Tcp,
    Echo(Echo),
}

impl Client {
    /// Returns a client of `target` without a connection. `id` distinguishes its messages from those of other clients.
    pub(crate) fn new(target: &Target, dialer: Dialer, id: usize) -> Self {
        let protocol = match target.scheme() {
            Scheme::Http => Protocol::Http(Http::new(target)),
            Scheme::Tcp => Protocol::Tcp,
            Scheme::Echo => Protocol::Echo(Echo::new(id)),
        };
        Self { dialer, wire: None, protocol }
    }

    /// Sends one request and reads the whole answer, on the open connection or on a new one.
    ///
    /// The connection stays open for the next request only if the answer was complete and allows it. If the peer has
    /// ended the connection, the observer is notified. If that happened before this request was sent, a new connection
    /// is opened, and the request does not fail.
    pub(crate) fn exchange(&mut self, io: &Io<'_>) -> Result<(), NoAnswer> {
        let mut wire = self.take_or_open_wire(io)?;
        let result = match &mut self.protocol {
            Protocol::Http(http) => http.exchange(&mut wire, io),
            Protocol::Echo(echo) => echo.exchange(&mut wire, io),
            Protocol::Tcp => {
                wire.abort();
                return Ok(());
            }
        };
        match result {
            Ok(Answer { keeps_connection, fault }) => {
                if keeps_connection {
                    self.wire = Some(wire);
                } else {
                    wire.abort();
                }
                fault.map_or(Ok(()), |failure| Err(failure.into()))
            }
            Err(no_answer) => {
                if matches!(no_answer, NoAnswer::Failed(Failure::Lost(_))) {
                    io.observer.lost();
                }
                Err(no_answer)
            }
        }
    }

    /// Returns the open connection if it is still usable, or else a new one.
    fn take_or_open_wire(&mut self, io: &Io<'_>) -> Result<Wire, NoAnswer> {
        if let Some(wire) = self.wire.take() {
            match wire.idle_state() {
                IdleState::Quiet => return Ok(wire),
                IdleState::Ended => io.observer.lost(),
                IdleState::Unasked => {
                    return Err(Failure::WrongContent("bytes came between two requests".to_owned()).into());
                }
            }
        }
        self.dialer.dial(io)
    }

    /// Closes the connection. If the peer has already ended it, it counts as lost.
    pub(crate) fn close(&mut self, observer: &dyn Observer) {
        if self.wire.take().is_some_and(|wire| wire.idle_state() == IdleState::Ended) {
            observer.lost();
        }
    }
}
