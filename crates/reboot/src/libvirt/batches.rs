//! Which domains are replaced in one absence of libvirt's daemon: as many as the host has memory for. Until a source is
//! ended, its guest's RAM and the copy of it are both in memory.

/// Divides copies that need `needs` bytes into few batches, each of which fits into `available`: first-fit decreasing,
/// which needs at most 22 % more batches than the best division, and one. A copy that does not fit at all is a batch of
/// its own. Returns the numbers of the copies.
pub(super) fn divide(needs: &[u64], available: u64) -> Vec<Vec<usize>> {
    let mut largest_first: Vec<(usize, u64)> = needs.iter().copied().enumerate().collect();
    largest_first.sort_by_key(|(number, bytes)| (std::cmp::Reverse(*bytes), *number));
    let mut batches: Vec<(u64, Vec<usize>)> = Vec::new();
    for (number, bytes) in largest_first {
        let room = |used: &u64| used.checked_add(bytes).is_some_and(|sum| sum <= available);
        match batches.iter_mut().find(|(used, _)| room(used)) {
            Some((used, batch)) => {
                *used += bytes;
                batch.push(number);
            }
            None => batches.push((bytes, vec![number])),
        }
    }
    batches.into_iter().map(|(_, batch)| batch).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_that_fit_together_are_one_batch() {
        assert_eq!(divide(&[], 0), Vec::<Vec<usize>>::new());
        assert_eq!(divide(&[1, 2, 3], 6), [[2, 1, 0]]);
        assert_eq!(divide(&[4, 6, 5, 5], 10), vec![vec![1, 0], vec![2, 3]]);
    }

    #[test]
    fn a_copy_that_does_not_fit_is_alone_and_one_that_needs_nothing_is_in_the_first_batch() {
        assert_eq!(divide(&[0, u64::MAX, 3], 10), vec![vec![1], vec![2, 0]]);
        assert_eq!(divide(&[0, 7, 7], 10), vec![vec![1, 0], vec![2]]);
        assert_eq!(divide(&[0, 0], 0), vec![vec![0, 1]]);
    }
}
