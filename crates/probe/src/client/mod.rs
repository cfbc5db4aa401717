//! One client: a connection, if one is open, and the protocol spoken on it.

mod echo;
mod http;
mod response;

use crate::failure::{Broken, Failure};
use crate::target::{Scheme, Target};
use crate::wire::{Dialer, Idle, Io, Observer, Wire};

use echo::Echo;
use http::Http;

/// What came of a request, on a connection that was not lost.
struct Answer {
    /// Whether the connection can take another request.
    keep: bool,
    /// What was wrong with the answer, if anything.
    wrong: Option<Failure>,
}

/// Asks a target, one request at a time.
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
    /// A client of `target`, not connected yet. `id` distinguishes its messages from those of other clients.
    pub(crate) fn new(target: &Target, dialer: Dialer, id: usize) -> Self {
        let protocol = match target.scheme() {
            Scheme::Http => Protocol::Http(Http::new(target)),
            Scheme::Tcp => Protocol::Tcp,
            Scheme::Echo => Protocol::Echo(Echo::new(id)),
        };
        Self { dialer, wire: None, protocol }
    }

    /// Sends one request and reads the whole answer, on the open connection or else on a new one.
    ///
    /// The connection stays open for the next request only if this one left it in order. One that the other side ended
    /// is reported to the observer, also if that happened since the last request: that costs a new connection, but
    /// fails nothing.
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

    /// Closes the connection; one that the other side has already ended counts as lost.
    pub(crate) fn close(&mut self, observer: &dyn Observer) {
        if self.wire.take().is_some_and(|wire| wire.idle() == Idle::Ended) {
            observer.lost();
        }
    }
}
