//! Why a request failed.

use std::io;
use std::time::Duration;

use crate::report::Failures;

/// Why one request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// No whole answer in time.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// No process listens at the target.
    #[error("connection refused")]
    Refused,
    /// No connection, for any other reason than a refusal.
    #[error("cannot connect")]
    Unreachable(#[source] io::Error),
    /// An established connection was reset or closed before the answer was whole.
    #[error("connection lost before the answer was whole")]
    Lost(#[source] io::Error),
    /// The server answered with an HTTP error.
    #[error("HTTP status {0}")]
    Status(u16),
    /// An answer came that is none.
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

    /// Whether the service cannot be heard at all, so that the next request should not wait for its tick.
    pub(crate) fn is_outage(&self) -> bool {
        !matches!(self, Self::Status(_) | Self::WrongContent(_))
    }

    /// The failure and its cause in one line.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Unreachable(cause) | Self::Lost(cause) => format!("{self}: {cause}"),
            _ => self.to_string(),
        }
    }
}

/// Why a request did not end with an answer.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The probe was stopped meanwhile.
    Stopped,
    Failed(Failure),
}

impl From<Failure> for Broken {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}
