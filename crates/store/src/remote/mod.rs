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

#[derive(Debug)]
pub(crate) struct RemoteImage;
impl RemoteImage {
    pub fn open(
        _: &Remote,
        _: &crate::reader::Which,
    ) -> Result<(Self, crate::types::Vm, crate::types::CheckpointInfo)> {
        todo_()
    }
    pub fn section(&self, _: crate::format::entry::Section) -> Result<Vec<u8>> {
        todo_()
    }
    pub fn name(&self) -> &str {
        ""
    }
    pub fn read_page(&self, _: usize, _: u64, _: &mut crate::types::Page) -> Result<()> {
        todo_()
    }
    pub fn read_many(
        &self,
        _: &[crate::image::PageId],
        _: impl FnMut(crate::image::PageId, &crate::types::Page),
    ) -> Result<()> {
        todo_()
    }
    pub fn hot(&self) -> RemoteHot<'_> {
        RemoteHot(self)
    }
}
fn todo_<T>() -> Result<T> {
    Err(crate::StoreError::Closed { store: String::new(), why: String::new() })
}
/// x
#[derive(Debug)]
pub struct RemoteHot<'a>(&'a RemoteImage);
impl RemoteHot<'_> {
    pub(crate) fn next(&mut self) -> Option<Result<crate::image::PageId>> {
        None
    }
}
pub(crate) fn listing(_: &Remote, _: Option<&Identity>) -> Result<crate::listing::Listing> {
    todo_()
}
pub(crate) fn verified(_: &Remote, _: Option<&Identity>) -> Result<crate::verify::Verified> {
    todo_()
}
pub(crate) fn fence(_: &Remote, _: &crate::types::Vm, _: &str, _: Option<&Identity>) -> Result<u64> {
    todo_()
}
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
