//! Waiting for a socket, a point in time or the stop of the probe, whichever comes first.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Woken {
    /// The socket is ready, or in error.
    Ready,
    /// The deadline has passed.
    Late,
    /// The probe is being stopped, or its duration is over.
    Stopped,
}

/// What the threads of a probe wait with. Stopping is the end of a pipe, so that it wakes a thread out of any wait.
#[derive(Debug)]
pub(crate) struct Waiter {
    stop: Option<PipeReader>,
    stopped: AtomicBool,
    end: Option<Instant>,
}

impl Waiter {
    /// A waiter that stops at `end`, if there is one, or once the pipe's other end is dropped.
    pub(crate) fn new(end: Option<Instant>) -> io::Result<(Self, PipeWriter)> {
        let (reader, writer) = io::pipe()?;
        Ok((Self { stop: Some(reader), stopped: AtomicBool::new(false), end }, writer))
    }

    /// A waiter that nothing stops.
    pub(crate) fn unstoppable() -> Self {
        Self { stop: None, stopped: AtomicBool::new(false), end: None }
    }

    /// Makes [`Waiter::is_stopped`] true; waits are ended by dropping the pipe's other end.
    pub(crate) fn mark_stopped(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Whether the probe is being stopped, or its duration is over; for loops that never wait.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed) || self.end.is_some_and(|end| Instant::now() >= end)
    }

    /// Waits until `deadline`, if there is one.
    pub(crate) fn sleep_until(&self, deadline: Option<Instant>) -> Woken {
        self.wait(None, deadline)
    }

    /// Waits until the socket can be read or written, as in `events`.
    pub(crate) fn wait_for(&self, socket: BorrowedFd<'_>, events: PollFlags, deadline: Instant) -> Woken {
        self.wait(Some((socket, events)), Some(deadline))
    }

    fn wait(&self, socket: Option<(BorrowedFd<'_>, PollFlags)>, deadline: Option<Instant>) -> Woken {
        let until = [deadline, self.end].into_iter().flatten().min();
        loop {
            if self.is_stopped() {
                return Woken::Stopped;
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if socket.is_none() && left == Some(Duration::ZERO) {
                return Woken::Late;
            }
            let mut fds = Vec::with_capacity(2);
            fds.extend(self.stop.as_ref().map(|stop| PollFd::new(stop, PollFlags::IN)));
            fds.extend(socket.map(|(fd, events)| PollFd::from_borrowed_fd(fd, events)));
            // One too long for the kernel is as good as none.
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            match poll(&mut fds, left.as_ref()) {
                Ok(0) if left.is_none() => {}
                Ok(0) if socket.is_some() && !self.is_stopped() => return Woken::Late,
                Ok(0) => {}
                Ok(_) if self.stop.is_some() && !fds[0].revents().is_empty() => return Woken::Stopped,
                Ok(_) => return Woken::Ready,
                Err(Errno::INTR | Errno::AGAIN | Errno::NOMEM) => {}
                // Only a programming error is left (EFAULT, EINVAL): the socket's next call reports it.
                Err(_) => return Woken::Ready,
            }
        }
    }
}
