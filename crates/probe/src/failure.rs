//! Causes of failed requests.

use std::io;
use std::time::Duration;

use crate::report::Failures;

/// Cause of a failed request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// No complete answer within the timeout.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// No process listens at the target.
    #[error("connection refused")]
    Refused,
    /// Connecting failed for another reason than a refusal.
    #[error("cannot connect")]
    Unreachable(#[source] io::Error),
    /// An established connection was reset or closed before the answer was complete.
    #[error("connection lost before the answer was whole")]
    Lost(#[source] io::Error),
    /// The server answered with an HTTP error.
    #[error("HTTP status {0}")]
    Status(u16),
    /// The answer does not have the expected content.
    #[error("wrong content: {0}")]
    WrongContent(String),
}

impl Failure {
    pub(crate) fn count_in(&self, failures: &mut Failures) {
        let counter = match self {
            Self::Timeout(_) => &mut failures.timeouts,
            Self::Refused => &mut failures.refused,
            Self::Unreachable(_) => &mut failures.unreachable,
            Self::Lost(_) => &mut failures.resets,
            Self::Status(_) | Self::WrongContent(_) => &mut failures.wrong_content,
        };
        *counter += 1;
    }

    /// Returns whether the service cannot be reached, so that the next request should not wait for its tick.
    pub(crate) fn is_outage(&self) -> bool {
        !matches!(self, Self::Status(_) | Self::WrongContent(_))
    }

    /// Returns the failure and its cause in one line.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Unreachable(cause) | Self::Lost(cause) => format!("{self}: {cause}"),
            _ => self.to_string(),
        }
    }
}

/// Outcome of a request without a good answer.
#[derive(Debug)]
pub(crate) enum NoAnswer {
    /// The probe was stopped during the request.
    Stopped,
    Failed(Failure),
}

impl From<Failure> for NoAnswer {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}
