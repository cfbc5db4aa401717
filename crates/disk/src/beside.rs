//! What takes long and is waited for by nobody.

use std::thread;

/// Do it on a thread of its own; where there is none, at once.
pub(crate) fn beside<T: Send + 'static>(what: &'static str, of: T, work: impl FnOnce(T) + Send + 'static) {
    // Were the thread not to start, `of` is dropped with the closure, which is all that the work comes to.
    if let Err(e) = thread::Builder::new().name(what.into()).spawn(move || work(of)) {
        tracing::debug!("{what}: done at once: {e}");
    }
}
