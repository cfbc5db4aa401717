//! Waits for answers that may never come: of a store or a daemon that hangs.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Returns the answer of `question`, or `None` if it takes longer than `timeout`. Its thread then waits on.
#[must_use]
pub fn answer_within<T: Send + 'static>(timeout: Duration, question: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (sender, answers) = mpsc::channel();
    thread::spawn(move || drop(sender.send(question())));
    answers.recv_timeout(timeout).ok()
}
