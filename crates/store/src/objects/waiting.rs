//! Whether the calling thread may wait for an object store.
//!
//! A page is found through an index, a segment's header and the page itself, each of which may have to be read. A pager must
//! not wait for any of them. So in [`without_waiting`], each read that has no result yet is started and fails with
//! `WouldBlock`, and the caller repeats all of it later.

use super::schedule::Need;
use std::cell::Cell;
use std::io;

thread_local! {
    /// `Some`: this thread must not wait; how urgent its reads are.
    static NEED: Cell<Option<Need>> = const { Cell::new(None) };
}

thread_local! {
    /// How urgent the reads of this thread are while it may wait.
    static WAITING: Cell<Need> = const { Cell::new(Need::Guest) };
}

/// Restores the previous state on drop, also during a panic.
struct Restored(Option<Need>);

impl Drop for Restored {
    fn drop(&mut self) {
        NEED.set(self.0);
    }
}

/// Makes the reads of this thread, which may wait for them, no more urgent than `need`. For a thread of its own.
pub fn wait_as(need: Need) {
    WAITING.set(need);
}

/// Returns how urgent the reads are that this thread waits for.
pub(super) fn waiting_need() -> Need {
    WAITING.get()
}

fn with<T>(need: Option<Need>, work: impl FnOnce() -> T) -> T {
    let _restored = Restored(NEED.replace(need));
    work()
}

/// Does `work`, whose reads of objects fail with `WouldBlock` in place of waiting.
pub(crate) fn without_waiting<T>(need: Need, work: impl FnOnce() -> T) -> T {
    with(Some(need), work)
}

/// Does `work`, which may wait, although the caller does not. For rare work that cannot be done in steps.
pub(crate) fn may_wait<T>(work: impl FnOnce() -> T) -> T {
    with(None, work)
}

/// Returns how urgent the reads of this thread are, if it must not wait.
pub(crate) fn need_without_waiting() -> Option<Need> {
    NEED.get()
}

pub(super) fn would_block() -> io::Error {
    io::ErrorKind::WouldBlock.into()
}
