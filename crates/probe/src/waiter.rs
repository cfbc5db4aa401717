//! Waits for a socket, a time or the stop of the probe, whichever is first.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Outcome of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitResult {
    /// The socket is ready, or in error.
    Ready,
    /// The deadline has passed.
    DeadlinePassed,
    /// The probe is being stopped, or its duration is over.
    Stopped,
}

/// The means by which all threads of a probe wait. The stop of the probe closes a pipe, because that interrupts any
/// wait.
#[derive(Debug)]
pub(crate) struct Waiter {
    stop: Option<PipeReader>,
    stopped: AtomicBool,
    run_end: Option<Instant>,
}

impl Waiter {
    /// Returns a waiter that stops at `end`, or when the returned end of the pipe is dropped.
    pub(crate) fn new(run_end: Option<Instant>) -> io::Result<(Self, PipeWriter)> {
        let (reader, writer) = io::pipe()?;
        Ok((Self { stop: Some(reader), stopped: AtomicBool::new(false), run_end }, writer))
    }

    /// Returns a waiter that is never stopped.
    pub(crate) fn unstoppable() -> Self {
        Self { stop: None, stopped: AtomicBool::new(false), run_end: None }
    }

    /// Makes [`Waiter::is_stopped`] return true. It does not end waits: the end of the pipe must be dropped for that.
    pub(crate) fn mark_stopped(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Returns whether the probe is being stopped or its duration is over. For loops that never wait.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed) || self.run_end.is_some_and(|run_end| Instant::now() >= run_end)
    }

    /// Waits until `deadline`, if there is one.
    pub(crate) fn sleep_until(&self, deadline: Option<Instant>) -> WaitResult {
        self.wait(None, deadline)
    }

    /// Waits until the socket is ready for `events`.
    pub(crate) fn wait_for(&self, socket: BorrowedFd<'_>, events: PollFlags, deadline: Instant) -> WaitResult {
        self.wait(Some((socket, events)), Some(deadline))
    }

    fn wait(&self, socket: Option<(BorrowedFd<'_>, PollFlags)>, deadline: Option<Instant>) -> WaitResult {
        let until = [deadline, self.run_end].into_iter().flatten().min();
        loop {
            if self.is_stopped() {
                return WaitResult::Stopped;
            }
            let time_left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if socket.is_none() && time_left == Some(Duration::ZERO) {
                return WaitResult::DeadlinePassed;
            }
            let mut fds = Vec::with_capacity(2);
            fds.extend(self.stop.as_ref().map(|stop| PollFd::new(stop, PollFlags::IN)));
            fds.extend(socket.map(|(fd, events)| PollFd::from_borrowed_fd(fd, events)));
            // A timeout that is too long for the kernel is treated as none.
            let time_left = time_left.and_then(|time_left| Timespec::try_from(time_left).ok());
            match poll(&mut fds, time_left.as_ref()) {
                Ok(0) if time_left.is_none() => {}
                Ok(0) if socket.is_some() && !self.is_stopped() => return WaitResult::DeadlinePassed,
                Ok(0) => {}
                Ok(_) if self.stop.is_some() && !fds[0].revents().is_empty() => return WaitResult::Stopped,
                Ok(_) => return WaitResult::Ready,
                Err(Errno::INTR | Errno::AGAIN | Errno::NOMEM) => {}
                // The remaining errors (EFAULT, EINVAL) are programming errors: the next call on the socket reports
                // them.
                Err(_) => return WaitResult::Ready,
            }
        }
    }
}
