//! The pages of a checkpoint that is copied while the guest runs: pages to be copied, pages being copied, and pages for
//! which writers wait.

use rekindle_pages::{DirtySet, PageNo, PageRuns};
use std::ops::Range;

/// The action on a page before a guest thread writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteAction {
    /// Allow the write: the checkpoint does not need the page.
    Allow,
    /// Copy the page first. It counts as being copied until [`Flight::mark_copied`].
    Copy,
    /// Make the writer wait: the page is being copied.
    Wait,
}

/// The pages of one block.
#[derive(Debug, Default)]
struct BlockPages {
    /// Bytes of a page. The sets contain numbers of pages of this size.
    page_bytes: u64,
    to_copy: DirtySet,
    in_copy: DirtySet,
}

impl BlockPages {
    /// Returns the numbers of the pages that overlap a run (offsets).
    fn numbers(&self, run: &Range<u64>) -> impl Iterator<Item = PageNo> + use<> {
        (run.start / self.page_bytes..run.end.div_ceil(self.page_bytes)).map(PageNo)
    }

    /// Returns the offsets of a page.
    fn offsets(&self, number: PageNo) -> Range<u64> {
        number.0 * self.page_bytes..(number.0 + 1) * self.page_bytes
    }
}

/// A checkpoint whose pages are being copied.
#[derive(Debug, Default)]
pub(super) struct Flight {
    blocks: Vec<BlockPages>,
    /// Block and page at which the next claim starts its search.
    cursor: (usize, PageNo),
    /// Block and page of writers that wait for a copy in progress.
    waiting: Vec<(usize, PageNo)>,
    /// Runs of each block whose writes were allowed since [`Flight::start_recording_allowed`]; `None` before that.
    allowed: Option<Vec<PageRuns>>,
}

impl Flight {
    /// Starts a checkpoint of these runs (offsets). `blocks` has `(bytes, page size)` of each block.
    pub(super) fn new(blocks: impl Iterator<Item = (u64, u64)>, runs: &[PageRuns]) -> Self {
        let mut flight = Self::default();
        for (index, (bytes, page_bytes)) in blocks.enumerate() {
            let pages = bytes.div_ceil(page_bytes);
            let (to_copy, in_copy) = (DirtySet::with_room(pages), DirtySet::with_room(pages));
            let mut block = BlockPages { page_bytes, to_copy, in_copy };
            for run in runs.get(index).into_iter().flatten() {
                for number in block.numbers(run).filter(|number| number.0 < pages) {
                    block.to_copy.insert(number);
                }
            }
            flight.blocks.push(block);
        }
        flight
    }

    /// Returns the bytes of the pages to be copied or being copied.
    pub(super) fn uncopied_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| (block.to_copy.len() + block.in_copy.len()) * block.page_bytes).sum()
    }

    /// Records allowed writes from now on, because the pages of the next checkpoint are being collected and protected.
    pub(super) fn start_recording_allowed(&mut self) {
        self.allowed = Some(Vec::new());
    }

    /// Records that writes to runs of a block were allowed.
    pub(super) fn record_allowed(&mut self, block: usize, runs: &[Range<u64>]) {
        let Some(allowed) = &mut self.allowed else { return };
        if allowed.len() <= block {
            allowed.resize_with(block + 1, PageRuns::new);
        }
        if let Some(before) = allowed.get_mut(block) {
            *before = before.union(runs);
        }
    }

    /// Returns the runs of each block that must be copied now, but to which the previous flight has allowed writes
    /// since [`Flight::start_recording_allowed`].
    pub(super) fn allowed_before(&self, previous: Self) -> Vec<PageRuns> {
        let blocks = previous.allowed.unwrap_or_default().into_iter().zip(&self.blocks);
        let to_copy = |(runs, block): (PageRuns, &BlockPages)| {
            let pages = runs.iter().flat_map(|run| block.numbers(run));
            pages.filter(|page| block.to_copy.contains(*page)).map(|page| block.offsets(page)).collect()
        };
        blocks.map(to_copy).collect()
    }

    /// Decides what to do before the page at `offset` of block `index` is written.
    pub(super) fn before_write(&mut self, index: usize, offset: u64) -> WriteAction {
        let Some(block) = self.blocks.get_mut(index) else { return WriteAction::Allow };
        let page = PageNo(offset / block.page_bytes);
        if block.to_copy.remove(page) {
            block.in_copy.insert(page);
            return WriteAction::Copy;
        }
        if block.in_copy.contains(page) {
            self.waiting.push((index, page));
            return WriteAction::Wait;
        }
        WriteAction::Allow
    }

    /// Takes the next pages to be copied: of one block, at most `max_bytes`, at least one page.
    pub(super) fn claim(&mut self, max_bytes: u64) -> Option<(usize, PageRuns)> {
        loop {
            let (index, from) = self.cursor;
            let block = self.blocks.get_mut(index)?;
            let mut runs = PageRuns::new();
            let (mut search_from, mut bytes) = (from, 0);
            while bytes == 0 || bytes + block.page_bytes <= max_bytes {
                let Some(page) = block.to_copy.take_next(search_from) else { break };
                block.in_copy.insert(page);
                runs.push(block.offsets(page));
                search_from = page.next();
                bytes += block.page_bytes;
            }
            if !runs.is_empty() {
                self.cursor = (index, search_from);
                return Some((index, runs));
            }
            self.cursor = (index + 1, PageNo(0));
        }
    }

    /// Notes that runs of a block have been copied. Returns the offsets of the pages for which writers wait, in any
    /// order.
    pub(super) fn mark_copied(&mut self, index: usize, runs: &[Range<u64>]) -> Vec<Range<u64>> {
        let Some(block) = self.blocks.get_mut(index) else { return Vec::new() };
        for run in runs {
            for page in block.numbers(run) {
                block.in_copy.remove(page);
            }
        }
        let mut waited_for = Vec::new();
        self.waiting.retain(|&(waiting_index, page)| {
            let still_waits = waiting_index != index || block.in_copy.contains(page);
            if !still_waits {
                waited_for.push(block.offsets(page));
            }
            still_waits
        });
        waited_for
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "the vector has one run")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = rekindle_pages::PAGE_SIZE as u64;

    fn runs<const N: usize>(runs: [Range<u64>; N]) -> PageRuns {
        runs.into_iter().collect()
    }

    #[test]
    fn a_page_is_copied_once_and_its_writer_waits_only_until_then() {
        let needed = [runs([]), runs([2 * PAGE..4 * PAGE, 9 * PAGE..10 * PAGE])];
        let mut flight = Flight::new([(PAGE, PAGE), (10 * PAGE, PAGE)].into_iter(), &needed);
        assert_eq!(flight.uncopied_bytes(), 3 * PAGE);
        assert_eq!(flight.before_write(1, 0), WriteAction::Allow);
        assert_eq!(flight.before_write(1, 3 * PAGE + 5), WriteAction::Copy);
        let (block, claimed) = flight.claim(2 * PAGE).unwrap();
        assert_eq!((block, claimed.clone()), (1, runs([2 * PAGE..3 * PAGE, 9 * PAGE..10 * PAGE])));
        assert_eq!(flight.claim(PAGE), None);
        assert_eq!(flight.before_write(1, 9 * PAGE), WriteAction::Wait);
        assert_eq!(flight.mark_copied(1, &[3 * PAGE..4 * PAGE]), []);
        assert_eq!(flight.uncopied_bytes(), 2 * PAGE);
        assert_eq!(flight.mark_copied(1, &claimed), vec![9 * PAGE..10 * PAGE; 1]);
        assert_eq!(flight.before_write(1, 9 * PAGE), WriteAction::Allow);
        assert_eq!(flight.uncopied_bytes(), 0);
    }

    #[test]
    fn writes_allowed_while_the_next_checkpoint_is_collected_are_reported_to_it() {
        let blocks = || [(10 * PAGE, PAGE), (10 * PAGE, PAGE)].into_iter();
        let mut flight = Flight::new(blocks(), &[]);
        flight.record_allowed(1, &[7 * PAGE..8 * PAGE]);
        flight.start_recording_allowed();
        for page in [3, 5, 2] {
            flight.record_allowed(1, &[page * PAGE..(page + 1) * PAGE]);
        }
        let next = Flight::new(blocks(), &[runs([0..10 * PAGE]), runs([3 * PAGE..4 * PAGE, 5 * PAGE..9 * PAGE])]);
        assert_eq!(next.allowed_before(flight), [runs([]), runs([3 * PAGE..4 * PAGE, 5 * PAGE..6 * PAGE])]);
        assert_eq!(Flight::new(blocks(), &[]).allowed_before(next), Vec::<PageRuns>::new());
    }

    #[test]
    fn huge_pages_count_whole() {
        let huge = 2 << 20;
        let mut flight = Flight::new([(4 * huge, huge)].into_iter(), &[runs([huge..2 * huge])]);
        assert_eq!(flight.uncopied_bytes(), huge);
        assert_eq!(flight.claim(PAGE).unwrap(), (0, runs([huge..2 * huge])), "at least a page");
    }

    proptest! {
        #[test]
        fn every_page_is_copied_once(
            pages in proptest::collection::btree_set(0u64..300, 0..200),
            writes in proptest::collection::vec(0u64..300, 0..50),
            max in 1u64..20,
        ) {
            let runs = [pages.iter().map(|n| n * PAGE..(n + 1) * PAGE).collect::<PageRuns>()];
            let mut flight = Flight::new([(300 * PAGE, PAGE)].into_iter(), &runs);
            let mut copied = Vec::new();
            let mut writes = writes.into_iter();
            loop {
                if let Some(page) = writes.next()
                    && flight.before_write(0, page * PAGE) == WriteAction::Copy
                {
                    copied.push(page);
                    flight.mark_copied(0, &[page * PAGE..(page + 1) * PAGE]);
                }
                let Some((_, runs)) = flight.claim(max * PAGE) else { break };
                copied.extend(runs.iter().flat_map(|run| run.start / PAGE..run.end / PAGE));
                flight.mark_copied(0, &runs);
            }
            copied.sort_unstable();
            prop_assert_eq!(copied, pages.into_iter().collect::<Vec<_>>());
            prop_assert_eq!(flight.uncopied_bytes(), 0);
        }
    }
}
