//! Stores on a server: refused by name until there is one.
//!
//! The types have no values, so that nothing can pretend to be connected.

use crate::error::{Result, StoreError};
use crate::format::entry::Section;
use crate::image::PageId;
use crate::listing::Listing;
use crate::reader::Which;
use crate::types::{CheckpointInfo, Page, Vm};
use crate::url::{Remote, StoreUrl};
use crate::verify::Verified;
use crate::writer::{Opened, Options};
use std::sync::mpsc::Receiver;

/// Who we are to a server.
#[derive(Debug, Clone)]
pub enum Identity {}

fn not_yet<T>(server: &Remote) -> Result<T> {
    Err(StoreError::NotYet { store: StoreUrl::Remote(server.clone()).to_string() })
}

#[derive(Debug)]
pub(crate) enum RemoteImage {}

impl RemoteImage {
    pub(crate) fn open(server: &Remote, _: &Which) -> Result<(Self, Vm, CheckpointInfo)> {
        not_yet(server)
    }

    pub(crate) fn section(&self, _: Section) -> Result<Vec<u8>> {
        match *self {}
    }

    pub(crate) fn name(&self) -> &str {
        match *self {}
    }

    pub(crate) fn read_page(&self, _: usize, _: u64, _: &mut Page) -> Result<()> {
        match *self {}
    }

    pub(crate) fn read_many(&self, _: &[PageId], _: impl FnMut(PageId, &Page)) -> Result<()> {
        match *self {}
    }

    pub(crate) fn hot(&self) -> RemoteHot<'_> {
        match *self {}
    }
}

/// Pages of an image on a server, those written last first.
#[derive(Debug)]
pub struct RemoteHot<'a>(&'a RemoteImage);

impl RemoteHot<'_> {
    pub(crate) fn next(&mut self) -> Option<Result<PageId>> {
        match *self.0 {}
    }
}

pub(crate) fn listing(server: &Remote, _: Option<&Identity>) -> Result<Listing> {
    not_yet(server)
}

pub(crate) fn verified(server: &Remote, _: Option<&Identity>) -> Result<Verified> {
    not_yet(server)
}

pub(crate) fn fence(server: &Remote, _: &Vm, _: &str, _: Option<&Identity>) -> Result<u64> {
    not_yet(server)
}

#[derive(Debug)]
pub(crate) enum WriteSession {}

impl WriteSession {
    pub(crate) fn open(server: &Remote, _: &Options) -> Result<Self> {
        not_yet(server)
    }

    pub(crate) fn opened(&self) -> Opened {
        match *self {}
    }

    pub(crate) fn run(self, _: &Receiver<crate::engine::Request>) {
        match self {}
    }
}
