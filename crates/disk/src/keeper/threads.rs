//! Threads and shared values of the keeper, behind traits so that a model checker can replace the system's
//! (`model.rs`).

use std::fmt::Debug;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A value that one thread at a time uses. Threads can wait for changes of the value.
pub trait Monitor<T>: Send + Sync + 'static {
    fn new(value: T) -> Self;
    /// Calls `run` with exclusive access, then wakes all waiting threads.
    fn with<R>(&self, run: impl FnOnce(&mut T) -> R) -> R;
    /// Waits until `until` returns a value, and returns that value.
    fn wait<R>(&self, until: impl FnMut(&mut T) -> Option<R>) -> R;
    /// Waits like [`Self::wait`], but stops after `timeout`.
    fn wait_timeout<R>(&self, timeout: Duration, until: impl FnMut(&mut T) -> Option<R>) -> Option<R>;
}

/// An implementation of threads and monitors.
pub trait Threads: Debug + Send + Sync + 'static {
    type Monitor<T: Send + 'static>: Monitor<T>;
    type Thread: Send + 'static;
    fn spawn(run: impl FnOnce() + Send + 'static) -> Self::Thread;
    fn join(thread: Self::Thread);
    /// Returns the time since `since`.
    fn elapsed(since: Instant) -> Duration;
}

/// The system's threads.
#[derive(Debug)]
pub struct SystemThreads;

/// A [`Monitor`] for the system's threads.
#[derive(Debug)]
pub struct SystemMonitor<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> SystemMonitor<T> {
    fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send + 'static> Monitor<T> for SystemMonitor<T> {
    fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Condvar::new() }
    }

    fn with<R>(&self, run: impl FnOnce(&mut T) -> R) -> R {
        let result = run(&mut self.lock());
        self.changed.notify_all();
        result
    }

    fn wait<R>(&self, mut until: impl FnMut(&mut T) -> Option<R>) -> R {
        let mut value = self.lock();
        loop {
            if let Some(result) = until(&mut value) {
                return result;
            }
            value = self.changed.wait(value).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn wait_timeout<R>(&self, timeout: Duration, mut until: impl FnMut(&mut T) -> Option<R>) -> Option<R> {
        let deadline = Instant::now() + timeout;
        let mut value = self.lock();
        loop {
            let result = until(&mut value);
            let remaining = deadline.saturating_duration_since(Instant::now());
            if result.is_some() || remaining.is_zero() {
                return result;
            }
            value = self.changed.wait_timeout(value, remaining).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Threads for SystemThreads {
    type Monitor<T: Send + 'static> = SystemMonitor<T>;
    type Thread = JoinHandle<()>;

    fn spawn(run: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
        thread::spawn(run)
    }

    fn join(thread: JoinHandle<()>) {
        // The thread itself has reported the panic.
        let _ = thread.join();
    }

    fn elapsed(since: Instant) -> Duration {
        since.elapsed()
    }
}
