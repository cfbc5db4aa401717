//! One request, for a health check.

use std::io;
use std::time::{Duration, Instant};

use crate::client::Client;
use crate::failure::{Broken, Failure};
use crate::netns::{self, InsideError, NetnsError};
use crate::options::Options;
use crate::target::Target;
use crate::waiter::Waiter;
use crate::wire::{Dialer, Io, Observer, ResolveError};

/// A service that is not healthy, or could not be asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The network namespace cannot be entered.
    #[error(transparent)]
    Netns(NetnsError),
    /// The target's host has no address.
    #[error(transparent)]
    Resolve(ResolveError),
    /// No thread for entering the network namespace.
    #[error("cannot start a thread to enter the network namespace")]
    Thread(#[source] io::Error),
    /// The service gave no answer, or a wrong one.
    #[error("{url}: not healthy")]
    Unhealthy {
        /// What was asked.
        url: String,
        /// Why it is not healthy.
        source: Failure,
    },
}

struct NoObserver;

impl Observer for NoObserver {}

/// Asks once, on a new connection, from inside the network namespace `/run/netns/NAME` if one is given. Returns how
/// long the answer took, with the connecting.
///
/// A host name is resolved first, which the `timeout` does not bound.
///
/// # Errors
///
/// [`CheckError::Unhealthy`] if no good answer came within `timeout`; the others if it was not possible to ask.
pub fn check(target: &Target, timeout: Duration, netns: Option<&str>) -> Result<Duration, CheckError> {
    netns::inside(netns, || ask(target, timeout)).map_err(|error| match error {
        InsideError::Netns(error) => CheckError::Netns(error),
        InsideError::Thread(error) => CheckError::Thread(error),
    })?
}

fn ask(target: &Target, timeout: Duration) -> Result<Duration, CheckError> {
    let dialer = Dialer::resolve(target, Options::default().connect_attempt).map_err(CheckError::Resolve)?;
    let waiter = Waiter::unstoppable();
    let began = Instant::now();
    match Client::new(target, dialer, 0).exchange(&Io::begin(&waiter, &NoObserver, timeout)) {
        Ok(()) => Ok(began.elapsed()),
        Err(Broken::Failed(source)) => Err(CheckError::Unhealthy { url: target.to_string(), source }),
        // Nothing stops an unstoppable waiter; were it so, no answer came.
        Err(Broken::Stopped) => {
            Err(CheckError::Unhealthy { url: target.to_string(), source: Failure::Timeout(timeout) })
        }
    }
}
