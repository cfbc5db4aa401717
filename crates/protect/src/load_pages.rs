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
const READERS: usize = 4;
/// Number of parts into which a list is divided for the readers.
const PARTS: usize = 32;

/// Pages that QEMU reads in the memory of every PC: the option ROM that gives old guests a local APIC (`kvmvapic`), and
/// the region of the video memory if there is no video card.
const PC_PAGES: [PageNo; 5] = [PageNo(0xb8), PageNo(0xc0), PageNo(0xc1), PageNo(0xc2), PageNo(0xc3)];

pub(crate) type Pages = Vec<(BlockId, PageNo, Box<Page>)>;

/// Returns the pages that the QEMU of `qmp` would read during a load; none if QEMU does not report them.
pub(crate) fn locate(qmp: &mut Qmp, ram: &GuestRam) -> Vec<PageRun> {
    let ranges = rings::of(qmp).unwrap_or_else(|e| {
        tracing::debug!("cannot locate the rings of the virtio devices: {e}");
        Vec::new()
    });
    let page = PAGE_SIZE as u64;
    let mut pages = BTreeSet::new();
    for range in ranges {
        let mut blocks = ram.blocks().iter().enumerate();
        let Some((index, block)) = blocks.find(|(_, block)| block.used().contains(&range.start)) else { continue };
        let end = range.end.min(block.used().end);
        let numbers = (range.start - block.address) / page..(end - block.address).div_ceil(page);
        pages.extend(numbers.map(|number| (BlockId(index), PageNo(number))));
    }
    PageRun::merged(pages.into_iter().take(MAX_PAGES))
}

/// Reads the pages in the checkpoint's list and the pages that the device state `devices` refers to, in the blocks
/// `paged`. A page that cannot be read now is loaded on demand.
pub(crate) fn read(image: &Image, paged: &[String], devices: &[u8]) -> Pages {
    let named: Vec<PageRun> = match image.metadata() {
        Ok(metadata) => metadata.get(KEY).cloned().map(serde_json::from_value).and_then(Result::ok).unwrap_or_default(),
        Err(e) => {
            tracing::debug!("the pages that a load needs are not known: {e}");
            return Pages::new();
        }
    };
    let blocks = &image.info().blocks;
    // End of the pages of a block; zero if the block is not paged.
    let end = |BlockId(block)| {
        PageNo(blocks.get(block).filter(|block| paged.contains(&block.id)).map_or(0, |block| block.pages()))
    };
    // The page is below 4 GiB, so its address is its offset in the block.
    let generation = stream::generation_address(devices).map(PageNo::containing);
    let main = image.block(MAIN_RAM);
    let fixed = main
        .into_iter()
        .flat_map(|main| PC_PAGES.into_iter().chain(generation).map(move |page| PageRun::new(main, page..page.next())));
    let pages: BTreeSet<PageId> =
        fixed.chain(named).flat_map(|run| run.pages_below(end(run.block()))).take(MAX_PAGES).collect();
    let pages: Vec<_> = pages.into_iter().collect();
    read_parallel(image, &pages, |_| true).unwrap_or_else(|e| {
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
    let next = AtomicUsize::new(0);
    let read = |part: &[PageId]| {
        let mut read = Pages::new();
        let take = |(block, page), content: &Page| {
            if keep(content) {
                read.push((block, page, Box::new(*content)));
            }
        };
        image.read_many(part, take).map(|()| read)
    };
    let part = pages.len().div_ceil(PARTS).max(1);
    let parts: Vec<_> = pages.chunks(part).map(|part| (part, OnceLock::new())).collect();
    thread::scope(|scope| {
        for _ in 0..READERS.min(parts.len()) {
            scope.spawn(|| {
                while let Some((part, done)) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let _ = done.set(read(part));
                }
            });
        }
    });
    let done = parts.into_iter().filter_map(|(_, done)| done.into_inner());
    done.collect::<Result<Vec<_>, _>>().map(|parts| parts.into_iter().flatten().collect())
}
