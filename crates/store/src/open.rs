//! A checkpoint opened for reading, wherever its store is.

use crate::disk::LocalDisk;
use crate::error::{Result, StoreError};
use crate::format::entry::Section;
use crate::home::Home;
use crate::image::{LocalImage, PageId};
use crate::types::{CheckpointInfo, Page};
use crate::url::StoreUrl;
use serde_json::Value;
use std::sync::Arc;

/// A checkpoint opened for reading.
#[derive(Debug)]
pub struct Image(LocalImage);

impl Image {
    /// Open checkpoint `at`, or the newest.
    ///
    /// # Errors
    /// [`StoreError::NotAStore`], [`StoreError::NoSuchCheckpoint`] with those that there are, damage by name.
    pub fn open(url: &StoreUrl, at: Option<u64>) -> Result<Self> {
        match url {
            StoreUrl::Directory(path) => {
                let home = Home::open(Arc::new(LocalDisk::new(path)), None)?;
                LocalImage::open(home, at).map(Self)
            }
            StoreUrl::Remote(_) => Err(StoreError::NotYet { store: url.to_string() }),
        }
    }

    /// What it is of.
    #[must_use]
    pub fn info(&self) -> CheckpointInfo {
        self.0.info()
    }

    /// How to build its VM again, as it was given to [`crate::Checkpoint::commit`].
    ///
    /// # Errors
    /// Damage by name.
    pub fn definition(&self) -> Result<Value> {
        let bytes = self.0.section(Section::Definition)?;
        serde_json::from_slice(&bytes).map_err(|e| StoreError::io(self.0.home().name(), "", "reading JSON", e.into()))
    }

    /// Its device state.
    ///
    /// # Errors
    /// Damage by name.
    pub fn devices(&self) -> Result<Vec<u8>> {
        self.0.section(Section::Devices)
    }

    /// See [`LocalImage::read_page`].
    ///
    /// # Errors
    /// As there.
    pub fn read_page(&self, block: usize, page: u64, content: &mut Page) -> Result<()> {
        self.0.read_page(block, page, content)
    }

    /// See [`LocalImage::read_many`].
    ///
    /// # Errors
    /// As there.
    pub fn read_many(&self, pages: &[PageId], take: impl FnMut(PageId, &Page)) -> Result<()> {
        self.0.read_many(pages, take)
    }

    /// See [`LocalImage::hot`].
    pub fn hot(&self) -> impl Iterator<Item = PageId> + '_ {
        self.0.hot()
    }
}
