//! Stores on a server.

use crate::error::Result;
use crate::url::Remote;
use crate::writer::{Opened, Options};
use std::sync::mpsc::Receiver;

/// x
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// x
    #[error("x")]
    X,
}
/// x
#[derive(Debug, Clone)]
pub struct Identity;

pub(crate) struct WriteSession;
impl WriteSession {
    pub fn open(_: &Remote, _: &Options) -> Result<Self> {
        Ok(Self)
    }
    pub fn opened(&self) -> Opened {
        Opened { digester: crate::format::page::Digester::new(uuid::Uuid::nil()), newest: 0, epoch: 0 }
    }
    pub fn run(self, _: &Receiver<crate::engine::Request>) {}
}
