//! The pages of a checkpoint that is being copied while the guest runs: who copies which, and which writers wait.

use std::ops::Range;

/// What is to become of a page that somebody wants to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Nobody needs it: it may be written.
    Free,
    /// Copy it first. It counts as being copied until [`Flight::copied`].
    Copy,
    /// It is just being copied: the writer waits until that is done.
    Wait,
}

/// A set of pages by number.
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

    /// The first page at or after `from`.
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

/// One block's part.
#[derive(Debug, Default)]
struct Part {
    page: u64,
    to_copy: Bits,
    in_copy: Bits,
}

/// The whole.
#[derive(Debug, Default)]
pub(super) struct Flight {
    parts: Vec<Part>,
    /// Pages to be copied and being copied.
    left: u64,
    /// Bytes of them.
    left_bytes: u64,
    /// Where the next claim begins to look.
    cursor: (usize, u64),
    /// Block and page of writers that wait for a copy in progress.
    waiting: Vec<(usize, u64)>,
    /// Runs of each block that were allowed to be written since the next checkpoint is being collected, once it is.
    allowed: Option<Vec<Vec<Range<u64>>>>,
}

impl Flight {
    /// A checkpoint of these runs (offsets) of blocks with these `(bytes, page size)`.
    pub(super) fn new(blocks: impl Iterator<Item = (u64, u64)>, runs: &[Vec<Range<u64>>]) -> Self {
        let mut flight = Self::default();
        for (index, (bytes, page)) in blocks.enumerate() {
            let pages = bytes.div_ceil(page);
            let mut part = Part { page, to_copy: Bits::new(pages), in_copy: Bits::new(pages) };
            for run in runs.get(index).into_iter().flatten() {
                for number in run.start / page..run.end.div_ceil(page).min(pages) {
                    if !part.to_copy.has(number) {
                        part.to_copy.set(number, true);
                        flight.left += 1;
                        flight.left_bytes += page;
                    }
                }
            }
            flight.parts.push(part);
        }
        flight
    }

    pub(super) fn left_bytes(&self) -> u64 {
        self.left_bytes
    }

    /// The pages of the next checkpoint are being collected, which protects them: from here on note what is allowed.
    pub(super) fn collecting(&mut self) {
        self.allowed = Some(Vec::new());
    }

    /// Runs of a block may be written.
    pub(super) fn allowed(&mut self, block: usize, runs: &[Range<u64>]) {
        let Some(allowed) = &mut self.allowed else { return };
        if allowed.len() <= block {
            allowed.resize_with(block + 1, Vec::new);
        }
        if let Some(before) = allowed.get_mut(block) {
            *before = crate::pages::union(before, runs);
        }
    }

    /// What of each block is to be copied now, but was allowed in the flight before since [`Flight::collecting`].
    pub(super) fn allowed_before(&self, before: Self) -> Vec<Vec<Range<u64>>> {
        let blocks = before.allowed.unwrap_or_default().into_iter().zip(&self.parts);
        let to_copy = |(runs, part): (Vec<Range<u64>>, &Part)| {
            let mut found = Vec::new();
            let pages = runs.iter().flat_map(|run| run.start / part.page..run.end.div_ceil(part.page));
            for page in pages.filter(|page| part.to_copy.has(*page)) {
                crate::pages::push(&mut found, page * part.page..(page + 1) * part.page);
            }
            found
        };
        blocks.map(to_copy).collect()
    }

    /// Somebody wants to write the page at `offset` of a block.
    pub(super) fn want(&mut self, block: usize, offset: u64) -> Wanted {
        let Some(part) = self.parts.get_mut(block) else { return Wanted::Free };
        let page = offset / part.page;
        if part.to_copy.has(page) {
            part.to_copy.set(page, false);
            part.in_copy.set(page, true);
            return Wanted::Copy;
        }
        if part.in_copy.has(page) {
            self.waiting.push((block, page));
            return Wanted::Wait;
        }
        Wanted::Free
    }

    /// Take the next pages to be copied, of one block and at most `most` bytes (at least a page).
    pub(super) fn claim(&mut self, most: u64) -> Option<(usize, Vec<Range<u64>>)> {
        loop {
            let (block, from) = self.cursor;
            let part = self.parts.get_mut(block)?;
            let mut runs: Vec<Range<u64>> = Vec::new();
            let (mut at, mut bytes) = (from, 0);
            while bytes == 0 || bytes + part.page <= most {
                let Some(page) = part.to_copy.next(at) else { break };
                part.to_copy.set(page, false);
                part.in_copy.set(page, true);
                crate::pages::push(&mut runs, page * part.page..(page + 1) * part.page);
                at = page + 1;
                bytes += part.page;
            }
            if !runs.is_empty() {
                self.cursor = (block, at);
                return Some((block, runs));
            }
            self.cursor = (block + 1, 0);
        }
    }

    /// Runs of a block have been copied. Returns the offsets of the pages for which writers wait.
    pub(super) fn copied(&mut self, block: usize, runs: &[Range<u64>]) -> Vec<Range<u64>> {
        let Some(part) = self.parts.get_mut(block) else { return Vec::new() };
        for run in runs {
            for page in run.start / part.page..run.end.div_ceil(part.page) {
                if part.in_copy.has(page) {
                    part.in_copy.set(page, false);
                    self.left -= 1;
                    self.left_bytes -= part.page;
                }
            }
        }
        let mut free = Vec::new();
        self.waiting.retain(|&(of, page)| {
            let keep = of != block || part.in_copy.has(page);
            if !keep {
                free.push(page * part.page..(page + 1) * part.page);
            }
            keep
        });
        free
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "one run is meant")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = 4096;

    #[test]
    fn a_page_is_copied_once_and_its_writer_waits_only_meanwhile() {
        let runs = vec![vec![], vec![2 * PAGE..4 * PAGE, 9 * PAGE..10 * PAGE]];
        let mut flight = Flight::new([(PAGE, PAGE), (10 * PAGE, PAGE)].into_iter(), &runs);
        assert_eq!(flight.left_bytes(), 3 * PAGE);
        assert_eq!(flight.want(1, 0), Wanted::Free);
        assert_eq!(flight.want(1, 3 * PAGE + 5), Wanted::Copy);
        let (block, claimed) = flight.claim(2 * PAGE).unwrap();
        assert_eq!((block, claimed.clone()), (1, vec![2 * PAGE..3 * PAGE, 9 * PAGE..10 * PAGE]));
        assert_eq!(flight.claim(PAGE), None);
        assert_eq!(flight.want(1, 9 * PAGE), Wanted::Wait);
        assert_eq!(flight.copied(1, &[3 * PAGE..4 * PAGE]), []);
        assert_eq!(flight.left_bytes(), 2 * PAGE);
        assert_eq!(flight.copied(1, &claimed), vec![9 * PAGE..10 * PAGE; 1]);
        assert_eq!(flight.want(1, 9 * PAGE), Wanted::Free);
        assert_eq!(flight.left_bytes(), 0);
    }

    #[test]
    fn what_is_allowed_while_the_next_checkpoint_is_collected_is_told_to_it() {
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
        fn every_page_is_given_out_once(
            pages in proptest::collection::btree_set(0u64..300, 0..200),
            wanted in proptest::collection::vec(0u64..300, 0..50),
            most in 1u64..20,
        ) {
            let runs = vec![pages.iter().map(|n| n * PAGE..(n + 1) * PAGE).collect::<Vec<_>>()];
            let mut flight = Flight::new([(300 * PAGE, PAGE)].into_iter(), &runs);
            let mut given = Vec::new();
            let mut wanted = wanted.into_iter();
            loop {
                if let Some(page) = wanted.next()
                    && flight.want(0, page * PAGE) == Wanted::Copy
                {
                    given.push(page);
                    flight.copied(0, &[page * PAGE..(page + 1) * PAGE]);
                }
                let Some((_, runs)) = flight.claim(most * PAGE) else { break };
                given.extend(runs.iter().flat_map(|run| run.start / PAGE..run.end / PAGE));
                flight.copied(0, &runs);
            }
            given.sort_unstable();
            prop_assert_eq!(given, pages.into_iter().collect::<Vec<_>>());
            prop_assert_eq!(flight.left_bytes(), 0);
        }
    }
}
