//! Slow work that no thread waits for.

use std::thread;

/// Runs `work` with `value` on a new thread. If no thread can be started, drops `value` immediately.
pub(crate) fn run_in_background<T: Send + 'static>(
    thread_name: &'static str,
    value: T,
    work: impl FnOnce(T) + Send + 'static,
) {
    // If the thread does not start, the closure is dropped and `value` with it. Callers need nothing else.
    if let Err(e) = thread::Builder::new().name(thread_name.into()).spawn(move || work(value)) {
        tracing::debug!("{thread_name}: no thread can be started: {e}");
    }
}
