//! The pages that QEMU itself reads while it loads a guest's devices: mostly the rings of virtio devices.
//!
//! Each missing page costs a fault and a read of the store, one after the other, while the guest waits. Therefore a
//! checkpoint lists these pages (`first` in its metadata), and a restore reads them together while QEMU starts. The
//! list is a hint: an error in it only costs time.

use rekindle_memory::ram::GuestRam;
use rekindle_pages::{BlockId, PAGE_SIZE, Page, PageId, PageNo, PageRun};
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::ramblock::MAIN_RAM;
use rekindle_qemu::{rings, stream};
use rekindle_store::{Image, StoreError};
use std::collections::BTreeSet;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// The key of the list in a checkpoint's metadata.
pub(crate) const KEY: &str = "first";
/// Maximum number of pages in the list. Reading more takes longer than it saves.
const MAX_PAGES: usize = 1024;
/// Number of threads that read concurrently.
const MAX_READERS: usize = 4;
/// Maximum number of chunks into which a list is divided for the readers.
const MAX_CHUNKS: usize = 32;
/// Number of checkpoints after which the guest's virtio rings are located again: the guest may have been rebooted.
const LOCATE_EVERY: u32 = 64;

/// Pages that QEMU reads in the memory of every PC: the option ROM that gives old guests a local APIC (`kvmvapic`), and
/// the region of the video memory if there is no video card.
const PC_PAGES: [PageNo; 5] = [PageNo(0xb8), PageNo(0xc0), PageNo(0xc1), PageNo(0xc2), PageNo(0xc3)];

/// Pages with their content.
pub(crate) type Pages = Vec<(PageId, Box<Page>)>;

/// The list for the next checkpoints. It is located again every [`LOCATE_EVERY`] checkpoints.
#[derive(Debug)]
pub(crate) struct LoadPageList {
    runs: Vec<PageRun>,
    /// Number of checkpoints for which the list stays valid.
    checkpoints_left: u32,
}

impl LoadPageList {
    pub(crate) fn locate(qmp: &mut Qmp, ram: &GuestRam) -> Self {
        Self { runs: locate(qmp, ram), checkpoints_left: LOCATE_EVERY }
    }

    pub(crate) fn runs(&self) -> &[PageRun] {
        &self.runs
    }

    /// Counts a checkpoint, and locates the pages again if it is time.
    pub(crate) fn note_commit(&mut self, qmp: &mut Qmp, ram: &GuestRam) {
        self.checkpoints_left -= 1;
        if self.checkpoints_left == 0 {
            *self = Self::locate(qmp, ram);
        }
    }
}

/// Returns the pages that the QEMU of `qmp` would read during a load; none if QEMU does not report them.
pub(crate) fn locate(qmp: &mut Qmp, ram: &GuestRam) -> Vec<PageRun> {
    let ranges = rings::of(qmp).unwrap_or_else(|e| {
        tracing::debug!("cannot locate the rings of the virtio devices: {e}");
        Vec::new()
    });
    let page_size = PAGE_SIZE as u64;
    let mut pages = BTreeSet::new();
    for range in ranges {
        let mut blocks = ram.blocks().iter().enumerate();
        let Some((index, block)) = blocks.find(|(_, block)| block.used().contains(&range.start)) else { continue };
        let end = range.end.min(block.used().end);
        let numbers = (range.start - block.address) / page_size..(end - block.address).div_ceil(page_size);
        pages.extend(numbers.map(|number| (BlockId(index), PageNo(number))));
    }
    PageRun::merged(pages.into_iter().take(MAX_PAGES))
}

/// Reads the pages in the checkpoint's list and the pages that the device state `devices` refers to, in the blocks
/// `paged`. A page that cannot be read now is loaded on demand.
pub(crate) fn read(image: &Image, paged: &[String], devices: &[u8]) -> Pages {
    let metadata = match image.metadata() {
        Ok(metadata) => metadata,
        Err(e) => {
            tracing::debug!("the pages that a load needs are not known: {e}");
            return Pages::new();
        }
    };
    let listed: Option<Vec<PageRun>> = metadata.get(KEY).and_then(|list| serde_json::from_value(list.clone()).ok());
    let mut runs = Vec::new();
    if let Some(main_ram) = image.block(MAIN_RAM) {
        // The page is below 4 GiB, so its address is its offset in the block.
        let generation_page = stream::generation_address(devices).map(PageNo::containing);
        let pages = PC_PAGES.into_iter().chain(generation_page);
        runs.extend(pages.map(|page| PageRun::new(main_ram, page..page.next())));
    }
    runs.extend(listed.unwrap_or_default());
    let blocks = &image.info().blocks;
    let page_count_if_paged = |BlockId(index)| {
        PageNo(blocks.get(index).filter(|block| paged.contains(&block.id)).map_or(0, |block| block.pages()))
    };
    let pages = runs.iter().flat_map(|run| run.pages_below(page_count_if_paged(run.block())));
    let pages: BTreeSet<PageId> = pages.take(MAX_PAGES).collect();
    read_parallel(image, &Vec::from_iter(pages), |_| true).unwrap_or_else(|e| {
        tracing::debug!("cannot read the pages that a load needs: {e}");
        Pages::new()
    })
}

/// Reads `pages` in parallel: a disk does several reads as fast as one. Returns the pages that `keep` accepts, in the
/// given order.
pub(crate) fn read_parallel(
    image: &Image,
    pages: &[PageId],
    keep: impl Fn(&Page) -> bool + Sync,
) -> Result<Pages, StoreError> {
    let read_chunk = |chunk: &[PageId]| {
        let mut kept = Pages::new();
        image.read_many(chunk, |id, content| {
            if keep(content) {
                kept.push((id, Box::new(*content)));
            }
        })?;
        Ok::<_, StoreError>(kept)
    };
    let chunk_length = pages.len().div_ceil(MAX_CHUNKS).max(1);
    let chunks: Vec<_> = pages.chunks(chunk_length).map(|chunk| (chunk, OnceLock::new())).collect();
    let next_chunk = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..MAX_READERS.min(chunks.len()) {
            scope.spawn(|| {
                while let Some((chunk, result)) = chunks.get(next_chunk.fetch_add(1, Ordering::Relaxed)) {
                    let _ = result.set(read_chunk(chunk));
                }
            });
        }
    });
    let mut pages_read = Pages::new();
    for result in chunks.into_iter().filter_map(|(_, result)| result.into_inner()) {
        pages_read.append(&mut result?);
    }
    Ok(pages_read)
}
