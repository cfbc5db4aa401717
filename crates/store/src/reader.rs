//! Reads a checkpoint of a store.

use crate::credentials::Credentials;
use crate::directory::StoreDirectory;
use crate::error::{Result, StoreError};
use crate::format::entry::Section;
use crate::image::{LocalHotPages, LocalImage};
use crate::location::Storage;
use crate::log;
use crate::objects::schedule::Need;
use crate::types::{CheckpointInfo, Expected, Vm};
use crate::url::StoreUrl;
use rekindle_pages::{BlockId, Page, PageId, PageNo};
use serde_json::Value;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use uuid::Uuid;

/// Which checkpoint to open, and how to reach its store.
#[derive(Debug, Clone, Default)]
pub struct ReadOptions {
    /// Number of the checkpoint; `None` for the newest.
    pub at: Option<u64>,
    /// Required VM of the store; `None` for any VM.
    pub vm: Option<Uuid>,
    pub credentials: Option<Credentials>,
    /// What the store must be.
    pub expected: Option<Expected>,
    /// Build the index of pages only when the first page is read. Building takes longer the larger the guest is, and
    /// some callers need only the description of the checkpoint.
    pub lazy: bool,
}

/// A checkpoint that was opened for reading. Several threads can read it concurrently.
#[derive(Debug)]
pub struct Image {
    local: LocalImage,
    vm: Vm,
    info: CheckpointInfo,
}

impl Image {
    /// Opens a checkpoint of a store.
    ///
    /// The image stays readable while the owner writes, as long as the store keeps the checkpoint;
    /// [`crate::Writer::hold`] ensures that. With [`ReadOptions::lazy`], damage to the index is reported when the first
    /// page is read.
    ///
    /// # Errors
    /// [`StoreError::NotAStore`], [`StoreError::OtherVm`], [`StoreError::Empty`], [`StoreError::NoSuchCheckpoint`],
    /// [`StoreError::Missing`], [`StoreError::Damaged`].
    pub fn open(url: &StoreUrl, which: &ReadOptions) -> Result<Self> {
        Self::on_disk(Storage::of(url, which.credentials.as_ref())?, which)
    }

    /// Opens a checkpoint of the store in `storage`, like [`Image::open`].
    ///
    /// # Errors
    /// Errors of [`Image::open`].
    pub fn on_disk(storage: impl Into<Storage>, which: &ReadOptions) -> Result<Self> {
        let store = StoreDirectory::open(storage, which.vm)?;
        if let Some(expected) = &which.expected {
            log::check_expected(&store, &log::tail(&store)?, expected)?;
        }
        let vm = store.vm.clone();
        let local =
            if which.lazy { LocalImage::open_lazily(store, which.at)? } else { LocalImage::open(store, which.at)? };
        let info = local.info();
        Ok(Self { local, vm, info })
    }

    #[must_use]
    pub fn vm(&self) -> &Vm {
        &self.vm
    }

    /// Returns the checksum in the footer of the checkpoint's log entry, which two histories of a store do not share.
    #[must_use]
    pub fn footer(&self) -> u64 {
        self.local.footer()
    }

    /// Describes the checkpoint, including its RAM block table.
    #[must_use]
    pub fn info(&self) -> &CheckpointInfo {
        &self.info
    }

    /// Finds a block by QEMU's name for it, and returns its position in the block table.
    #[must_use]
    pub fn block(&self, name: &str) -> Option<BlockId> {
        self.info.blocks.iter().position(|block| block.id == name).map(BlockId)
    }

    fn section(&self, section: Section) -> Result<Vec<u8>> {
        self.local.section(section)
    }

    fn json(&self, section: Section) -> Result<Value> {
        let bytes = self.section(section)?;
        serde_json::from_slice(&bytes).map_err(|_| {
            let (store, file) = (self.name().to_owned(), format!("checkpoint {}", self.info.number));
            let what = "it is not JSON".into();
            StoreError::Damaged { store, file, structure: section.structure(), at: 0, what }
        })
    }

    /// Returns the name of the store for messages.
    fn name(&self) -> &str {
        self.local.store().name()
    }

    /// Reads the stored definition: how to rebuild the VM.
    ///
    /// # Errors
    /// [`StoreError::Damaged`]; errors of reading it.
    pub fn definition(&self) -> Result<Value> {
        self.json(Section::Definition)
    }

    /// Reads the notes that the protector has stored.
    ///
    /// # Errors
    /// [`StoreError::Damaged`]; errors of reading them.
    pub fn metadata(&self) -> Result<Value> {
        self.json(Section::Metadata)
    }

    /// Reads the device state.
    ///
    /// # Errors
    /// [`StoreError::Damaged`]; errors of reading it.
    pub fn devices(&self) -> Result<Vec<u8>> {
        self.section(Section::Devices)
    }

    /// Returns the pages whose stored content differs from the given content. Compares digests, so no page is read.
    ///
    /// # Errors
    /// Errors of [`Image::read_page`].
    pub fn unlike(&self, given: &[(PageId, &Page)]) -> Result<Vec<PageId>> {
        let ids: Vec<PageId> = given.iter().map(|(id, _)| *id).collect();
        let (digester, digests) = (self.local.store().digester(), self.local.digests(&ids)?);
        // Callers often pass the same page of zeroes many times, so its digest is reused.
        let mut last_digest: Option<(&Page, u64)> = None;
        let mut unlike = Vec::new();
        for ((id, content), stored) in given.iter().zip(digests) {
            let digest = match last_digest {
                Some((page, digest)) if std::ptr::eq(page, *content) => digest,
                _ => last_digest.insert((content, digester.digest(content))).1,
            };
            if digest != stored {
                unlike.push(*id);
            }
        }
        Ok(unlike)
    }

    /// Reads one page. A page that was never stored is zero.
    ///
    /// # Errors
    /// [`StoreError::Page`] if the page is damaged; `content` must not be used then. [`StoreError::NoSuchPage`].
    /// [`StoreError::NoSuchCheckpoint`] if the store does not keep the checkpoint any more.
    pub fn read_page(&self, page: PageId, content: &mut Page) -> Result<()> {
        self.local.read_page(page, content)
    }

    /// Returns whether the checkpoint is in an object store, so that reading ahead saves time, and a page can be read without
    /// waiting for it.
    #[must_use]
    pub fn has_latency(&self) -> bool {
        self.local.has_latency()
    }

    /// Starts to read pages that will be read soon, several requests at a time, as a hint. Returns for how many of the first
    /// pages there was room. Only for an image that [has latency](Image::has_latency).
    pub fn start_reads(&self, pages: &[PageId]) -> usize {
        self.local.start_reads(pages).unwrap_or_else(|e| {
            // Reading the page itself reports the error.
            tracing::debug!("cannot read ahead: {e}");
            0
        })
    }

    /// Reads one page like [`Image::read_page`]. From an object store, reads it only if that is possible without waiting.
    /// Otherwise starts to read it, and returns `false`: the caller tries again when [`Image::arrivals`] is readable. Waits
    /// nevertheless if the index of pages has to be built (again).
    ///
    /// # Errors
    /// Errors of [`Image::read_page`]; `content` must not be used then. The next call tries again.
    pub fn read_page_if_ready(&self, page: PageId, content: &mut Page, need: Need) -> Result<bool> {
        self.local.read_page_if_ready(page, content, need)
    }

    /// Returns a descriptor that becomes readable when a read has ended that [`Image::read_page_if_ready`] has started.
    #[must_use]
    pub fn arrivals(&self) -> Option<BorrowedFd<'_>> {
        self.local.arrivals()
    }

    /// Reads pages of any blocks, and passes them to `take` in the given order.
    ///
    /// # Errors
    /// Errors of [`Image::read_page`]. The pages before the failed page were passed to `take`.
    pub fn read_many(&self, pages: &[PageId], take: impl FnMut(PageId, &Page)) -> Result<()> {
        self.local.read_many(pages, take)
    }

    /// Reads consecutive pages.
    ///
    /// # Errors
    /// Errors of [`Image::read_many`].
    pub fn read_pages(&self, block: BlockId, pages: Range<PageNo>, mut take: impl FnMut(PageNo, &Page)) -> Result<()> {
        const PAGES_PER_READ: u64 = 4096;
        let (mut first, last) = (pages.start.0, pages.end.0);
        while first < last {
            let end = last.min(first + PAGES_PER_READ);
            let ids: Vec<PageId> = (first..end).map(|page| (block, PageNo(page))).collect();
            self.read_many(&ids, |(_, page), content| take(page, content))?;
            first = end;
        }
        Ok(())
    }

    /// Iterates over the nonzero pages, the most recently written first: the guest's working set, then the rest.
    pub fn hot(&self) -> HotPages<'_> {
        match self.local.hot() {
            Ok(hot) => HotPages::Known(Box::new(hot)),
            Err(e) => HotPages::Unknown(Some(Box::new(e))),
        }
    }
}

/// Nonzero pages of a checkpoint, the most recently written first.
#[derive(Debug)]
pub enum HotPages<'a> {
    Known(Box<LocalHotPages<'a>>),
    /// The order cannot be determined. The iterator returns the error once.
    Unknown(Option<Box<StoreError>>),
}

impl Iterator for HotPages<'_> {
    type Item = Result<PageId>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Self::Known(hot) => hot.next().map(Ok),
            Self::Unknown(why) => why.take().map(|why| Err(*why)),
        }
    }
}
