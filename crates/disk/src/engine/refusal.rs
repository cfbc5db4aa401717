//! How a command to the engine is answered: with a result, or with the reason why it is rejected.

use std::sync::mpsc::Sender;

/// The reason why a command is rejected.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(pub String);

/// The sender for the result of a command.
pub type Answer<T> = Sender<Result<T, Refusal>>;
