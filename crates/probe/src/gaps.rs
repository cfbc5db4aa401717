//! Silences between good answers. The code is pure: times are offsets from the start.

use std::time::Duration;

/// Number of gaps that are kept: the longest ones. [`Report::gaps_total`](crate::Report::gaps_total) counts all gaps.
pub const MAX_GAPS: usize = 1024;

/// A period without a good answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Silence {
    pub(crate) start: Duration,
    pub(crate) length: Duration,
}

/// Collects silences, answer by answer.
#[derive(Debug, Clone)]
pub(crate) struct Gaps {
    threshold: Duration,
    /// Time of the last good answer, or of the start.
    last: Duration,
    longest: Duration,
    /// Kept silences above the threshold, in the order of time.
    kept: Vec<Silence>,
    total: u64,
}

impl Gaps {
    pub(crate) fn new(threshold: Duration) -> Self {
        Self { threshold, last: Duration::ZERO, longest: Duration::ZERO, kept: Vec::new(), total: 0 }
    }

    /// Records a good answer, or the stop, at `at`. Returns the silence that it ends if that was a gap.
    pub(crate) fn end_silence(&mut self, at: Duration) -> Option<Silence> {
        let silence = Silence { start: self.last, length: at.saturating_sub(self.last) };
        self.last = self.last.max(at);
        self.longest = self.longest.max(silence.length);
        if silence.length <= self.threshold {
            return None;
        }
        self.total += 1;
        self.keep(silence);
        Some(silence)
    }

    fn keep(&mut self, silence: Silence) {
        if self.kept.len() == MAX_GAPS {
            // Silences above the threshold are rare, so that a search through all of them is cheap.
            let shortest = self.kept.iter().enumerate().min_by_key(|(_, kept)| kept.length);
            match shortest {
                Some((index, kept)) if kept.length < silence.length => _ = self.kept.remove(index),
                _ => return,
            }
        }
        self.kept.push(silence);
    }

    /// Returns the longest silence, even if it is below the threshold.
    pub(crate) fn longest(&self) -> Duration {
        self.longest
    }

    /// Returns the kept gaps in the order of time.
    pub(crate) fn kept(&self) -> &[Silence] {
        &self.kept
    }

    /// Returns the number of all gaps, including those that were not kept.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn a_run_without_answers_is_one_gap() {
        let mut gaps = Gaps::new(ms(5));
        assert_eq!(gaps.end_silence(ms(70)), Some(Silence { start: ms(0), length: ms(70) }));
        assert_eq!((gaps.longest(), gaps.total()), (ms(70), 1));
    }

    #[test]
    fn exactly_the_threshold_is_no_gap() {
        let mut gaps = Gaps::new(ms(5));
        assert_eq!(gaps.end_silence(ms(5)), None);
        assert_eq!((gaps.longest(), gaps.total()), (ms(5), 0));
    }

    #[test]
    fn an_answer_noted_late_ends_nothing() {
        let mut gaps = Gaps::new(ms(5));
        gaps.end_silence(ms(20));
        assert_eq!(gaps.end_silence(ms(10)), None);
        assert_eq!(gaps.end_silence(ms(30)), Some(Silence { start: ms(20), length: ms(10) }));
    }

    #[test]
    fn the_longest_are_kept() {
        let mut gaps = Gaps::new(ms(0));
        let mut now = 0;
        for length in 1..=(MAX_GAPS as u64 + 100) {
            now += length;
            gaps.end_silence(ms(now));
        }
        now += 1;
        gaps.end_silence(ms(now));
        assert_eq!(gaps.total(), MAX_GAPS as u64 + 101);
        assert_eq!(gaps.kept().len(), MAX_GAPS);
        assert_eq!(gaps.kept().iter().map(|gap| gap.length).min(), Some(ms(101)));
        assert!(gaps.kept().is_sorted_by_key(|gap| gap.start));
    }

    proptest! {
        #[test]
        fn gaps_are_the_silences_above_the_threshold(
            mut answers in prop::collection::vec(0_u64..100_000, 0..300),
            threshold in 0_u64..2_000,
            tail in 0_u64..5_000,
        ) {
            answers.sort_unstable();
            let stop = answers.last().unwrap_or(&0) + tail;
            let times: Vec<u64> = [0].into_iter().chain(answers).chain([stop]).collect();

            let mut gaps = Gaps::new(ms(threshold));
            let ended: Vec<_> = times[1..].iter().filter_map(|at| gaps.end_silence(ms(*at))).collect();

            let silences: Vec<_> =
                times.windows(2).map(|pair| Silence { start: ms(pair[0]), length: ms(pair[1] - pair[0]) }).collect();
            let expected: Vec<_> = silences.iter().copied().filter(|s| s.length > ms(threshold)).collect();
            prop_assert_eq!(gaps.longest(), silences.iter().map(|s| s.length).max().unwrap());
            prop_assert_eq!(gaps.kept(), &expected);
            prop_assert_eq!(gaps.total(), expected.len() as u64);
            prop_assert_eq!(ended, expected);
        }
    }
}
