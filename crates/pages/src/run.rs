//! Adjacent pages of a block, by number.

use crate::{BlockId, PageId, PageNo};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Adjacent pages of one block. In JSON, an array of three numbers: block, first page, number of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(BlockId, PageNo, u64)", into = "(BlockId, PageNo, u64)")]
pub struct PageRun {
    block: BlockId,
    first: PageNo,
    count: u64,
}

impl From<(BlockId, PageNo, u64)> for PageRun {
    fn from((block, first, count): (BlockId, PageNo, u64)) -> Self {
        Self { block, first, count }
    }
}

impl From<PageRun> for (BlockId, PageNo, u64) {
    fn from(run: PageRun) -> Self {
        (run.block, run.first, run.count)
    }
}

impl PageRun {
    pub fn new(block: BlockId, pages: Range<PageNo>) -> Self {
        Self { block, first: pages.start, count: pages.end.0.saturating_sub(pages.start.0) }
    }

    /// Merges adjacent pages into runs. The pages of a block must be ascending to be merged.
    pub fn merged(pages: impl IntoIterator<Item = PageId>) -> Vec<Self> {
        let mut runs: Vec<Self> = Vec::new();
        for (block, page) in pages {
            match runs.last_mut().filter(|run| run.block == block && run.end() == page) {
                Some(run) => run.count += 1,
                None => runs.push(Self { block, first: page, count: 1 }),
            }
        }
        runs
    }

    pub fn block(&self) -> BlockId {
        self.block
    }

    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the page after the last one.
    fn end(&self) -> PageNo {
        PageNo(self.first.0.saturating_add(self.count))
    }

    /// Returns the byte offsets in the block.
    pub fn offsets(&self) -> Range<u64> {
        self.first.offset()..self.end().offset()
    }

    pub fn pages(&self) -> impl Iterator<Item = PageId> + use<> {
        self.pages_below(PageNo(u64::MAX))
    }

    /// Returns the pages before `end`.
    pub fn pages_below(&self, end: PageNo) -> impl Iterator<Item = PageId> + use<> {
        let block = self.block;
        (self.first.0..self.end().min(end).0).map(move |page| (block, PageNo(page)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(block: usize, pages: Range<u64>) -> PageRun {
        PageRun::new(BlockId(block), PageNo(pages.start)..PageNo(pages.end))
    }

    #[test]
    fn a_run_is_three_numbers_in_json() {
        assert_eq!(serde_json::to_string(&run(1, 7..9)).unwrap(), "[1,7,2]");
        assert_eq!(serde_json::from_str::<PageRun>("[1,7,2]").unwrap(), run(1, 7..9));
    }

    #[test]
    fn a_run_from_a_file_may_have_any_numbers() {
        let read: PageRun = serde_json::from_str("[0,18446744073709551614,18446744073709551615]").unwrap();
        assert_eq!((read.count(), read.pages_below(PageNo(100)).count()), (u64::MAX, 0));
        assert_eq!(run(0, Range { start: 5, end: 3 }).count(), 0);
        assert_eq!(run(0, 2..9).pages_below(PageNo(4)).map(|(_, page)| page.0).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(run(0, 2..9).offsets(), 8192..36_864);
    }

    proptest! {
        #[test]
        fn merged_runs_have_the_same_pages_in_the_same_order(
            pages in proptest::collection::vec((0usize..3, 0u64..6), 0..40),
        ) {
            let pages: Vec<PageId> = pages.into_iter().map(|(block, page)| (BlockId(block), PageNo(page))).collect();
            let runs = PageRun::merged(pages.iter().copied());
            prop_assert_eq!(runs.iter().flat_map(PageRun::pages).collect::<Vec<_>>(), pages.clone());
            prop_assert_eq!(runs.iter().map(PageRun::count).sum::<u64>(), pages.len() as u64);
            prop_assert!(runs.windows(2).all(|two| two[0].block() != two[1].block() || two[0].end() != two[1].first));
        }
    }
}
