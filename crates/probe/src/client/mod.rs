//! A client: its connection, if one is open, and the protocol on it.

mod echo;
mod http;
mod response;

use crate::failure::{Broken, Failure};
use crate::target::{Scheme, Target};
use crate::wire::{Dialer, Idle, Io, Observer, Wire};

use echo::Echo;
use http::Http;

/// Result of a request whose connection was not lost.
struct Answer {
    /// The connection can be used for another request.
    keep: bool,
    /// Why the answer is wrong; `None` for a good answer.
    wrong: Option<Failure>,
}

/// Sends requests to a target, one at a time.
#[derive(Debug)]
pub(crate) struct Client {
    dialer: Dialer,
    wire: Option<Wire>,
    protocol: Protocol,
}

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
    pub(crate) fn exchange(&mut self, io: &Io<'_>) -> Result<(), Broken> {
        let mut wire = self.open(io)?;
        let result = match &mut self.protocol {
            Protocol::Http(http) => http.exchange(&mut wire, io),
            Protocol::Echo(echo) => echo.exchange(&mut wire, io),
            Protocol::Tcp => {
                wire.abort();
                return Ok(());
            }
        };
        match result {
            Ok(Answer { keep, wrong }) => {
                if keep {
                    self.wire = Some(wire);
                } else {
                    wire.abort();
                }
                wrong.map_or(Ok(()), |failure| Err(failure.into()))
            }
            Err(broken) => {
                if matches!(broken, Broken::Failed(Failure::Lost(_))) {
                    io.observer.lost();
                }
                Err(broken)
            }
        }
    }

    fn open(&mut self, io: &Io<'_>) -> Result<Wire, Broken> {
        if let Some(wire) = self.wire.take() {
            match wire.idle() {
                Idle::Quiet => return Ok(wire),
                Idle::Ended => io.observer.lost(),
                Idle::Unasked => {
                    return Err(Failure::WrongContent("bytes came between two requests".to_owned()).into());
                }
            }
        }
        self.dialer.dial(io)
    }

    /// Closes the connection. If the peer has already ended it, it counts as lost.
    pub(crate) fn close(&mut self, observer: &dyn Observer) {
        if self.wire.take().is_some_and(|wire| wire.idle() == Idle::Ended) {
            observer.lost();
        }
    }
}
