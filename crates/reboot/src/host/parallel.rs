//! Runs one thread for each guest: guests are stopped together, so no guest waits for another one.

use std::panic::resume_unwind;
use std::thread;

/// Runs `work` on all items in parallel. The results are in the order of the items.
pub(super) fn in_parallel<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let work = &work;
    thread::scope(|scope| {
        let workers: Vec<_> = items.into_iter().map(|item| scope.spawn(move || work(item))).collect();
        workers.into_iter().map(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    })
}
