//! Work on several guests at the same time.

use std::num::NonZero;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;

/// Why there is no result for a guest.
#[derive(Debug, thiserror::Error)]
#[error("the thread of this guest panicked")]
pub(crate) struct Panicked;

/// Calls `work` for each item, each in a thread of its own. Returns the results in the order of the items.
pub(crate) fn in_threads<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> R + Sync,
) -> Vec<Result<R, Panicked>> {
    thread::scope(|scope| {
        let work = &work;
        let workers: Vec<_> = items.into_iter().map(|item| scope.spawn(move || work(item))).collect();
        workers.into_iter().map(|worker| worker.join().map_err(|_| Panicked)).collect()
    })
}

/// Limits what runs concurrently to the number of processors. A hand-over is pure computation: with more at a time, each
/// guest would be stopped for longer and no hand-over would finish sooner.
pub(crate) struct ProcessorGate {
    free: Mutex<usize>,
    freed: Condvar,
}

impl ProcessorGate {
    pub(crate) fn new() -> Self {
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        Self { free: Mutex::new(processors), freed: Condvar::new() }
    }

    /// Waits for a processor, and calls `work`.
    pub(crate) fn pass<T>(&self, work: impl FnOnce() -> T) -> T {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free = self.freed.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner);
        *free -= 1;
        drop(free);
        // Also after a panic, so that the work on other guests does not wait for ever.
        let _slot = Slot(self);
        work()
    }
}

/// A processor of a [`ProcessorGate`], which is free again when this is dropped.
struct Slot<'a>(&'a ProcessorGate);

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::resume_unwind;

    #[test]
    fn a_panic_is_the_result_of_its_item_only_and_frees_its_processor() {
        let gate = ProcessorGate { free: Mutex::new(1), freed: Condvar::new() };
        let results = in_threads([1, 2, 3], |number| {
            gate.pass(|| if number == 2 { resume_unwind(Box::new("a test's panic")) } else { 10 * number })
        });
        let results: Vec<_> = results.into_iter().map(Result::ok).collect();
        assert_eq!(results, [Some(10), None, Some(30)]);
    }
}
