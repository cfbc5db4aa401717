//! The pages of a checkpoint that is copied while the guest runs: which are left, which are being copied, and which
//! writers wait.

use std::ops::Range;

/// What to do with a page before a guest thread writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteAction {
    /// Allow the write: the checkpoint does not need the page.
    Allow,
    /// Copy the page first. It counts as being copied until [`Flight::copied`].
    Copy,
    /// Let the writer wait: the page is being copied.
    Wait,
}

/// A set of page numbers.
#[derive(Debug, Clone, Default)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(pages: u64) -> Self {
        Self(vec![0; pages.div_ceil(64) as usize])
    }

    fn has(&self, page: u64) -> bool {
        self.0.get((page / 64) as usize).is_some_and(|word| word & (1 << (page % 64)) != 0)
    }

    fn set(&mut self, page: u64, value: bool) {
        if let Some(word) = self.0.get_mut((page / 64) as usize) {
            let bit = 1 << (page % 64);
            *word = if value { *word | bit } else { *word & !bit };
        }
    }

    /// Finds the first page at or after `from`.
    fn next(&self, from: u64) -> Option<u64> {
        let first = (from / 64) as usize;
        let mut mask = u64::MAX << (from % 64);
        for (n, word) in self.0.iter().enumerate().skip(first) {
            if word & mask != 0 {
                return Some(n as u64 * 64 + u64::from((word & mask).trailing_zeros()));
            }
            mask = u64::MAX;
        }
        None
    }
}

/// The pages of one block.
#[derive(Debug, Default)]
struct BlockPages {
    /// Bytes of a page.
    page: u64,
    to_copy: Bits,
    in_copy: Bits,
}

/// The checkpoint in flight.
#[derive(Debug, Default)]
pub(super) struct Flight {
    blocks: Vec<BlockPages>,
    /// Pages to be copied or being copied.
    left: u64,
    /// Bytes of these pages.
    left_bytes: u64,
    /// Block and page at which the next claim starts its search.
    cursor: (usize, u64),
    /// Block and page of writers that wait for a copy in progress.
    waiting: Vec<(usize, u64)>,
    /// Runs of each block whose writes were allowed since [`Flight::collecting`]; `None` before that.
    allowed: Option<Vec<Vec<Range<u64>>>>,
}

impl Flight {
    /// Starts a checkpoint of these runs (offsets) of blocks with these `(bytes, page size)`.
    pub(super) fn new(blocks: impl Iterator<Item = (u64, u64)>, runs: &[Vec<Range<u64>>]) -> Self {
        let mut flight = Self::default();
        for (index, (bytes, page)) in blocks.enumerate() {
            let pages = bytes.div_ceil(page);
            let mut block = BlockPages { page, to_copy: Bits::new(pages), in_copy: Bits::new(pages) };
            for run in runs.get(index).into_iter().flatten() {
                for number in run.start / page..run.end.div_ceil(page).min(pages) {
                    if !block.to_copy.has(number) {
                        block.to_copy.set(number, true);
                        flight.left += 1;
                        flight.left_bytes += page;
                    }
                }
            }
            flight.blocks.push(block);
        }
        flight
    }

    pub(super) fn left_bytes(&self) -> u64 {
        self.left_bytes
    }

    /// Notes that the pages of the next checkpoint are being collected and protected: from now on, writes that are allowed
    /// are recorded for it.
    pub(super) fn collecting(&mut self) {
        self.allowed = Some(Vec::new());
    }

    /// Records that writes to runs of a block were allowed.
    pub(super) fn allowed(&mut self, block: usize, runs: &[Range<u64>]) {
        let Some(allowed) = &mut self.allowed else { return };
        if allowed.len() <= block {
            allowed.resize_with(block + 1, Vec::new);
        }
        if let Some(before) = allowed.get_mut(block) {
            *before = crate::pages::union(before, runs);
        }
    }

    /// Returns the runs of each block that must be copied now, but whose writes the previous flight has allowed since
    /// [`Flight::collecting`].
    pub(super) fn allowed_before(&self, previous: Self) -> Vec<Vec<Range<u64>>> {
        let blocks = previous.allowed.unwrap_or_default().into_iter().zip(&self.blocks);
        let to_copy = |(runs, block): (Vec<Range<u64>>, &BlockPages)| {
            let mut found = Vec::new();
            let pages = runs.iter().flat_map(|run| run.start / block.page..run.end.div_ceil(block.page));
            for page in pages.filter(|page| block.to_copy.has(*page)) {
                crate::pages::push(&mut found, page * block.page..(page + 1) * block.page);
            }
            found
        };
        blocks.map(to_copy).collect()
    }

    /// Decides what to do before the page at `offset` of block `index` is written.
    pub(super) fn before_write(&mut self, index: usize, offset: u64) -> WriteAction {
        let Some(block) = self.blocks.get_mut(index) else { return WriteAction::Allow };
        let page = offset / block.page;
        if block.to_copy.has(page) {
            block.to_copy.set(page, false);
            block.in_copy.set(page, true);
            return WriteAction::Copy;
        }
        if block.in_copy.has(page) {
            self.waiting.push((index, page));
            return WriteAction::Wait;
        }
        WriteAction::Allow
    }

    /// Takes the next pages to be copied, of one block and at most `max` bytes (at least a page).
    pub(super) fn claim(&mut self, max: u64) -> Option<(usize, Vec<Range<u64>>)> {
        loop {
            let (index, from) = self.cursor;
            let block = self.blocks.get_mut(index)?;
            let mut runs: Vec<Range<u64>> = Vec::new();
            let (mut at, mut bytes) = (from, 0);
            while bytes == 0 || bytes + block.page <= max {
                let Some(page) = block.to_copy.next(at) else { break };
                block.to_copy.set(page, false);
                block.in_copy.set(page, true);
                crate::pages::push(&mut runs, page * block.page..(page + 1) * block.page);
                at = page + 1;
                bytes += block.page;
            }
            if !runs.is_empty() {
                self.cursor = (index, at);
                return Some((index, runs));
            }
            self.cursor = (index + 1, 0);
        }
    }

    /// Notes that runs of a block have been copied. Returns the offsets of the pages for which writers wait.
    pub(super) fn copied(&mut self, index: usize, runs: &[Range<u64>]) -> Vec<Range<u64>> {
        let Some(block) = self.blocks.get_mut(index) else { return Vec::new() };
        for run in runs {
            for page in run.start / block.page..run.end.div_ceil(block.page) {
                if block.in_copy.has(page) {
                    block.in_copy.set(page, false);
                    self.left -= 1;
                    self.left_bytes -= block.page;
                }
            }
        }
        let mut waited_for = Vec::new();
        self.waiting.retain(|&(of, page)| {
            let keep = of != index || block.in_copy.has(page);
            if !keep {
                waited_for.push(page * block.page..(page + 1) * block.page);
            }
            keep
        });
        waited_for
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "the vector has one run")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = 4096;

    #[test]
    fn a_page_is_copied_once_and_its_writer_waits_only_until_then() {
        let runs = vec![vec![], vec![2 * PAGE..4 * PAGE, 9 * PAGE..10 * PAGE]];
        let mut flight = Flight::new([(PAGE, PAGE), (10 * PAGE, PAGE)].into_iter(), &runs);
        assert_eq!(flight.left_bytes(), 3 * PAGE);
        assert_eq!(flight.before_write(1, 0), WriteAction::Allow);
        assert_eq!(flight.before_write(1, 3 * PAGE + 5), WriteAction::Copy);
        let (block, claimed) = flight.claim(2 * PAGE).unwrap();
        assert_eq!((block, claimed.clone()), (1, vec![2 * PAGE..3 * PAGE, 9 * PAGE..10 * PAGE]));
        assert_eq!(flight.claim(PAGE), None);
        assert_eq!(flight.before_write(1, 9 * PAGE), WriteAction::Wait);
        assert_eq!(flight.copied(1, &[3 * PAGE..4 * PAGE]), []);
        assert_eq!(flight.left_bytes(), 2 * PAGE);
        assert_eq!(flight.copied(1, &claimed), vec![9 * PAGE..10 * PAGE; 1]);
        assert_eq!(flight.before_write(1, 9 * PAGE), WriteAction::Allow);
        assert_eq!(flight.left_bytes(), 0);
    }

    #[test]
    fn writes_allowed_while_the_next_checkpoint_is_collected_are_reported_to_it() {
        let blocks = || [(10 * PAGE, PAGE), (10 * PAGE, PAGE)].into_iter();
        let mut flight = Flight::new(blocks(), &[]);
        flight.allowed(1, &[7 * PAGE..8 * PAGE]);
        flight.collecting();
        for page in [3, 5, 2] {
            flight.allowed(1, &[page * PAGE..(page + 1) * PAGE]);
        }
        let next = Flight::new(blocks(), &[vec![0..10 * PAGE], vec![3 * PAGE..4 * PAGE, 5 * PAGE..9 * PAGE]]);
        assert_eq!(next.allowed_before(flight), vec![vec![], vec![3 * PAGE..4 * PAGE, 5 * PAGE..6 * PAGE]]);
        assert_eq!(Flight::new(blocks(), &[]).allowed_before(next), Vec::<Vec<Range<u64>>>::new());
    }

    #[test]
    fn huge_pages_count_whole() {
        let huge = 2 << 20;
        let mut flight = Flight::new([(4 * huge, huge)].into_iter(), &[vec![huge..2 * huge; 1]]);
        assert_eq!(flight.left_bytes(), huge);
        assert_eq!(flight.claim(PAGE).unwrap(), (0, vec![huge..2 * huge; 1]), "at least a page");
    }

    proptest! {
        #[test]
        fn every_page_is_copied_once(
            pages in proptest::collection::btree_set(0u64..300, 0..200),
            writes in proptest::collection::vec(0u64..300, 0..50),
            max in 1u64..20,
        ) {
            let runs = vec![pages.iter().map(|n| n * PAGE..(n + 1) * PAGE).collect::<Vec<_>>()];
            let mut flight = Flight::new([(300 * PAGE, PAGE)].into_iter(), &runs);
            let mut copied = Vec::new();
            let mut writes = writes.into_iter();
            loop {
                if let Some(page) = writes.next()
                    && flight.before_write(0, page * PAGE) == WriteAction::Copy
                {
                    copied.push(page);
                    flight.copied(0, &[page * PAGE..(page + 1) * PAGE]);
                }
                let Some((_, runs)) = flight.claim(max * PAGE) else { break };
                copied.extend(runs.iter().flat_map(|run| run.start / PAGE..run.end / PAGE));
                flight.copied(0, &runs);
            }
            copied.sort_unstable();
            prop_assert_eq!(copied, pages.into_iter().collect::<Vec<_>>());
            prop_assert_eq!(flight.left_bytes(), 0);
        }
    }
}
