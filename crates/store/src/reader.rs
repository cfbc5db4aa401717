//! An image opened for reading, wherever it is.

use crate::disk::{Disk, LocalDisk};
use crate::error::{Result, StoreError};
use crate::format::entry::Section;
use crate::home::Home;
use crate::image::{Hot, LocalImage, PageId};
use crate::remote::{Identity, RemoteImage, Spare};
use crate::types::{CheckpointInfo, Page, Vm};
use crate::url::StoreUrl;
use serde_json::Value;
use std::ops::Range;
use std::sync::Arc;
use uuid::Uuid;

/// What is to be opened.
#[derive(Debug, Clone, Default)]
pub struct Which {
    /// Number of the checkpoint; the newest if `None`.
    pub at: Option<u64>,
    /// The VM that it must be of; any if `None`.
    pub vm: Option<Uuid>,
    /// Who we are to a server.
    pub identity: Option<Identity>,
    /// Look where its pages are when the first one is wanted, not before: that takes the longer the larger the guest is, and
    /// some only want to know what the checkpoint says of itself.
    pub unlooked: bool,
    /// Lines to a server that are there already.
    pub spare: Spare,
}

/// One checkpoint, opened for reading. Several threads can read at once.
#[derive(Debug)]
pub struct Image {
    source: Source,
    vm: Vm,
    info: CheckpointInfo,
}

#[derive(Debug)]
enum Source {
    Local(Box<LocalImage>),
    Remote(Box<RemoteImage>),
}

impl Image {
    /// Open a checkpoint of a store.
    ///
    /// It stays readable while its owner goes on, as long as it is kept; [`crate::Writer::hold`] keeps it. With
    /// [`Which::unlooked`] damage to the index is told when the first page is read.
    ///
    /// # Errors
    /// [`StoreError::NotAStore`], [`StoreError::OtherVm`], [`StoreError::Empty`], [`StoreError::NoSuchCheckpoint`], damage by
    /// name; for one on a server also [`StoreError::Line`] and [`StoreError::Refused`].
    pub fn open(url: &StoreUrl, which: &Which) -> Result<Self> {
        match url {
            StoreUrl::Directory(path) => Self::on_disk(Arc::new(LocalDisk::new(path)), which),
            StoreUrl::Remote(server) => {
                let (remote, vm, info) = RemoteImage::open(server, which)?;
                Ok(Self { source: Source::Remote(Box::new(remote)), vm, info })
            }
        }
    }

    /// As [`Image::open`], for a store in `disk`.
    ///
    /// # Errors
    /// As [`Image::open`].
    pub fn on_disk(disk: Arc<dyn Disk>, which: &Which) -> Result<Self> {
        let home = Home::open(disk, which.vm)?;
        let vm = home.vm.clone();
        let local =
            if which.unlooked { LocalImage::open_unlooked(home, which.at)? } else { LocalImage::open(home, which.at)? };
        let info = local.info();
        Ok(Self { source: Source::Local(Box::new(local)), vm, info })
    }

    /// The VM.
    #[must_use]
    pub fn vm(&self) -> &Vm {
        &self.vm
    }

    /// The checkpoint, with its RAM block table.
    #[must_use]
    pub fn info(&self) -> &CheckpointInfo {
        &self.info
    }

    /// Position of the block `id` in the table.
    #[must_use]
    pub fn block(&self, id: &str) -> Option<usize> {
        self.info.blocks.iter().position(|block| block.id == id)
    }

    fn section(&self, section: Section) -> Result<Vec<u8>> {
        match &self.source {
            Source::Local(local) => local.section(section),
            Source::Remote(remote) => remote.section(section),
        }
    }

    fn json(&self, section: Section) -> Result<Value> {
        let bytes = self.section(section)?;
        serde_json::from_slice(&bytes).map_err(|_| {
            let (store, file) = (self.name().to_owned(), format!("checkpoint {}", self.info.number));
            let what = "it is not JSON".into();
            StoreError::Damaged { store, file, structure: section.structure(), at: 0, what }
        })
    }

    /// Where it is, for messages.
    fn name(&self) -> &str {
        match &self.source {
            Source::Local(local) => local.home().name(),
            Source::Remote(remote) => remote.name(),
        }
    }

    /// How to build the VM again, as it was committed.
    ///
    /// # Errors
    /// When it is damaged.
    pub fn definition(&self) -> Result<Value> {
        self.json(Section::Definition)
    }

    /// What the protecting loop noted.
    ///
    /// # Errors
    /// When it is damaged.
    pub fn metadata(&self) -> Result<Value> {
        self.json(Section::Metadata)
    }

    /// The device state.
    ///
    /// # Errors
    /// When it is damaged.
    pub fn devices(&self) -> Result<Vec<u8>> {
        self.section(Section::Devices)
    }

    /// Which of the pages are another content than the given one. No page is read for it: their digests are compared.
    ///
    /// # Errors
    /// As for [`Image::read_page`].
    pub fn unlike(&self, given: &[(PageId, &Page)]) -> Result<Vec<PageId>> {
        let ids: Vec<PageId> = given.iter().map(|(id, _)| *id).collect();
        let (digester, digests) = match &self.source {
            Source::Local(image) => (image.home().digester(), image.digests(&ids)?),
            Source::Remote(remote) => (remote.digester(), remote.digests(&ids)?),
        };
        // Most of them are one page of zeroes, again and again.
        let mut before: Option<(&Page, u64)> = None;
        let mut unlike = Vec::new();
        for ((id, content), stored) in given.iter().zip(digests) {
            let digest = match before {
                Some((known, digest)) if std::ptr::eq(known, *content) => digest,
                _ => before.insert((content, digester.digest(content))).1,
            };
            if digest != stored {
                unlike.push(*id);
            }
        }
        Ok(unlike)
    }

    /// Read one page of a block, by its position in the table. One that was never stored is zero.
    ///
    /// # Errors
    /// [`StoreError::Page`] if it is not as it was stored; then `content` is not to be used. [`StoreError::NoSuchPage`].
    /// [`StoreError::NoSuchCheckpoint`] if it has ceased to be kept.
    pub fn read_page(&self, block: usize, page: u64, content: &mut Page) -> Result<()> {
        match &self.source {
            Source::Local(local) => local.read_page(block, page, content),
            Source::Remote(remote) => remote.read_page(block, page, content),
        }
    }

    /// Read many pages; `take` gets them in the order asked for.
    ///
    /// # Errors
    /// As [`Image::read_page`]; those before the one that failed were taken.
    pub fn read_many(&self, pages: &[PageId], take: impl FnMut(PageId, &Page)) -> Result<()> {
        match &self.source {
            Source::Local(local) => local.read_many(pages, take),
            Source::Remote(remote) => remote.read_many(pages, take),
        }
    }

    /// Read pages that follow one another.
    ///
    /// # Errors
    /// As [`Image::read_many`].
    pub fn read_pages(&self, block: usize, pages: Range<u64>, mut take: impl FnMut(u64, &Page)) -> Result<()> {
        const TOGETHER: u64 = 4096;
        let mut first = pages.start;
        while first < pages.end {
            let end = pages.end.min(first + TOGETHER);
            let some: Vec<PageId> = (first..end).map(|page| (block, page)).collect();
            self.read_many(&some, |(_, page), content| take(page, content))?;
            first = end;
        }
        Ok(())
    }

    /// The pages that are not zero, those written last first: the working set of the guest, then the rest.
    pub fn hot(&self) -> HotPages<'_> {
        match &self.source {
            Source::Local(local) => match local.hot() {
                Ok(hot) => HotPages::Local(Box::new(hot)),
                Err(e) => HotPages::Unknown(Some(Box::new(e))),
            },
            Source::Remote(remote) => HotPages::Remote(remote.hot()),
        }
    }
}

/// Pages of an image, those written last first.
#[derive(Debug)]
pub enum HotPages<'a> {
    /// Of one in a directory.
    Local(Box<Hot<'a>>),
    /// Of one on a server.
    Remote(crate::remote::RemoteHot<'a>),
    /// It cannot be told which they are: why, once.
    Unknown(Option<Box<StoreError>>),
}

impl Iterator for HotPages<'_> {
    type Item = Result<PageId>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Self::Local(hot) => hot.next().map(Ok),
            Self::Remote(hot) => hot.next(),
            Self::Unknown(why) => why.take().map(|why| Err(*why)),
        }
    }
}
