//! A single request, as a health check.

use std::io;
use std::time::{Duration, Instant};

use crate::client::Client;
use crate::failure::{Failure, NoAnswer};
use crate::netns::{self, InsideError, NetnsError};
use crate::options::Options;
use crate::target::Target;
use crate::waiter::Waiter;
use crate::wire::{Dialer, Io, Observer, ResolveError};

/// Error of a health check: the service is not healthy, or could not be checked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The network namespace cannot be entered.
    #[error(transparent)]
    Netns(NetnsError),
    /// The target's host has no address.
    #[error(transparent)]
    Resolve(ResolveError),
    /// The thread that enters the network namespace cannot be started.
    #[error("cannot start a thread to enter the network namespace")]
    Thread(#[source] io::Error),
    /// The service gave no answer, or a wrong answer.
    #[error("{url}: not healthy")]
    Unhealthy {
        /// URL of the service.
        url: String,
        /// Why the request failed.
        source: Failure,
    },
}

/// Ignores notifications about connections.
struct NoObserver;

impl Observer for NoObserver {}

/// Sends one request on a new connection, from inside the network namespace `/run/netns/NAME` if `netns` names one.
/// Returns the time until the answer was complete, including the time to connect.
///
/// A host name is resolved first. `timeout` does not limit the resolution.
///
/// # Errors
///
/// [`CheckError::Unhealthy`] if no good answer is received within `timeout`; the other errors if no request could be
/// sent.
pub fn check(target: &Target, timeout: Duration, netns: Option<&str>) -> Result<Duration, CheckError> {
    netns::inside(netns, || send_request(target, timeout)).map_err(|error| match error {
        InsideError::Netns(error) => CheckError::Netns(error),
        InsideError::Thread(error) => CheckError::Thread(error),
    })?
}

fn send_request(target: &Target, timeout: Duration) -> Result<Duration, CheckError> {
    let dialer = Dialer::resolve(target, Options::default().connect_attempt).map_err(CheckError::Resolve)?;
    let waiter = Waiter::unstoppable();
    let started = Instant::now();
    match Client::new(target, dialer, 0).exchange(&Io::begin(&waiter, &NoObserver, timeout)) {
        Ok(()) => Ok(started.elapsed()),
        Err(NoAnswer::Failed(source)) => Err(CheckError::Unhealthy { url: target.to_string(), source }),
        // An unstoppable waiter is never stopped. If it were, there would be no answer either.
        Err(NoAnswer::Stopped) => {
            Err(CheckError::Unhealthy { url: target.to_string(), source: Failure::Timeout(timeout) })
        }
    }
}
