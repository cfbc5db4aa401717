//! Slow work that no thread waits for.

use std::thread;

/// Runs `work` on a new thread. If no thread can be started, drops `of` immediately.
pub(crate) fn run_in_background<T: Send + 'static>(what: &'static str, of: T, work: impl FnOnce(T) + Send + 'static) {
    // If the thread does not start, the closure is dropped and `of` with it. Callers need nothing else.
    if let Err(e) = thread::Builder::new().name(what.into()).spawn(move || work(of)) {
        tracing::debug!("{what}: no thread can be started: {e}");
    }
}
