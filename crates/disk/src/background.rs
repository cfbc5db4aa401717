//! Slow work that nothing waits for.

use std::thread;

/// Runs `work` on a thread of its own; if no thread can be started, drops `of` immediately.
pub(crate) fn run_in_background<T: Send + 'static>(what: &'static str, of: T, work: impl FnOnce(T) + Send + 'static) {
    // If the thread does not start, the closure is dropped and `of` with it, which is all that callers need.
    if let Err(e) = thread::Builder::new().name(what.into()).spawn(move || work(of)) {
        tracing::debug!("{what}: no thread can be started: {e}");
    }
}
