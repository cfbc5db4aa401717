//! The order of the GETs of a store: those that a guest waits for first, those that are only likely to be needed last.
//!
//! At most [`MAX_IN_FLIGHT`] are in flight. Some of these places are kept for the guest, so that a page that it waits for
//! never waits for the end of a read-ahead.

use futures_util::future::BoxFuture;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tokio::runtime::Handle;

/// Limit of the GETs that are in flight.
pub(crate) const MAX_IN_FLIGHT: usize = 8;
/// Limit of those in flight that nothing waits for.
pub(crate) const MAX_UNNEEDED_IN_FLIGHT: usize = 6;
/// The same while a guest waits: they share the bandwidth with what it needs.
const MAX_UNNEEDED_WHILE_WAITING: usize = 2;
/// Limit of the read-ahead that is queued. More is not started.
const MAX_QUEUED_AHEAD: usize = 8;
/// Limit of queued GETs of callers that do not wait. They try again later.
const MAX_QUEUED_NEEDED: usize = 64;

/// How urgent a GET is. The most urgent ones are first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    /// A guest, or the calling thread, waits for it.
    Guest,
    /// It is the next to be loaded in the background.
    Background,
    /// It is likely to be needed soon.
    ReadAhead,
}

/// The number of a GET.
pub(super) type JobId = u64;

struct Job {
    id: JobId,
    work: BoxFuture<'static, ()>,
}

#[derive(Default)]
struct Queues {
    guest: VecDeque<Job>,
    background: VecDeque<Job>,
    ahead: VecDeque<Job>,
    in_flight: usize,
    /// Those in flight that were not for a guest when they were sent.
    unneeded_in_flight: usize,
    started: JobId,
}

impl Queues {
    fn queue(&mut self, need: Need) -> &mut VecDeque<Job> {
        match need {
            Need::Guest => &mut self.guest,
            Need::Background => &mut self.background,
            Need::ReadAhead => &mut self.ahead,
        }
    }

    /// Takes the next GET that may be sent now. The second value: whether it is for a guest.
    fn next(&mut self, has_guests: bool) -> Option<(Job, bool)> {
        if self.in_flight >= MAX_IN_FLIGHT {
            return None;
        }
        if let Some(job) = self.guest.pop_front() {
            self.in_flight += 1;
            return Some((job, true));
        }
        let is_guest_waiting = has_guests && self.in_flight > self.unneeded_in_flight;
        let limit = if is_guest_waiting { MAX_UNNEEDED_WHILE_WAITING } else { MAX_UNNEEDED_IN_FLIGHT };
        if self.unneeded_in_flight >= limit {
            return None;
        }
        let job = self.background.pop_front().or_else(|| self.ahead.pop_front())?;
        self.in_flight += 1;
        self.unneeded_in_flight += 1;
        Some((job, false))
    }
}

/// The GETs of a store that are in flight or queued.
pub(super) struct Schedule {
    runtime: &'static Handle,
    queues: Mutex<Queues>,
    /// Whether guests wait for what is read here. Otherwise [`Need::Guest`] only means that a thread waits.
    has_guests: AtomicBool,
    /// Readable after the end of a GET. Only callers that do not wait for GETs need it.
    ends: OnceLock<OwnedFd>,
}

impl std::fmt::Debug for Schedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Schedule").finish_non_exhaustive()
    }
}

/// The place of a GET in flight. Dropped when it has ended, also by a panic.
struct GetInFlight {
    schedule: Arc<Schedule>,
    is_for_guest: bool,
}

impl Drop for GetInFlight {
    fn drop(&mut self) {
        let mut queues = self.schedule.queues();
        queues.in_flight -= 1;
        if !self.is_for_guest {
            queues.unneeded_in_flight -= 1;
        }
        drop(queues);
        self.schedule.signal();
        Schedule::send_next(&self.schedule);
    }
}

impl Schedule {
    pub fn new(runtime: &'static Handle) -> Arc<Self> {
        Arc::new(Self { runtime, queues: Mutex::default(), has_guests: AtomicBool::new(false), ends: OnceLock::new() })
    }

    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether another GET can be started that the caller does not wait for.
    pub fn has_room(&self, need: Need) -> bool {
        let mut queues = self.queues();
        let limit = if need == Need::ReadAhead { MAX_QUEUED_AHEAD } else { MAX_QUEUED_NEEDED };
        queues.queue(need).len() < limit
    }

    /// From now on, what nothing waits for leaves bandwidth to the rest.
    pub fn expect_guests(&self) {
        self.has_guests.store(true, Ordering::Relaxed);
    }

    /// Starts or queues a GET.
    pub fn start(self: &Arc<Self>, need: Need, work: BoxFuture<'static, ()>) -> JobId {
        let id = {
            let mut queues = self.queues();
            queues.started += 1;
            let id = queues.started;
            queues.queue(need).push_back(Job { id, work });
            id
        };
        Self::send_next(self);
        id
    }

    /// Makes a queued GET as urgent as `need`. Has no effect on one that is in flight or has ended.
    pub fn promote(self: &Arc<Self>, id: JobId, need: Need) {
        let mut queues = self.queues();
        for less_urgent in [Need::Background, Need::ReadAhead].into_iter().filter(|other| *other > need) {
            let queue = queues.queue(less_urgent);
            if let Some(job) = queue.iter().position(|job| job.id == id).and_then(|position| queue.remove(position)) {
                queues.queue(need).push_back(job);
                break;
            }
        }
        drop(queues);
        Self::send_next(self);
    }

    /// Sends the GETs that may be sent now.
    fn send_next(schedule: &Arc<Self>) {
        loop {
            let next = schedule.queues().next(schedule.has_guests.load(Ordering::Relaxed));
            let Some((job, is_for_guest)) = next else { return };
            let in_flight = GetInFlight { schedule: schedule.clone(), is_for_guest };
            schedule.runtime.spawn(async move {
                // Dropped after the work.
                let _in_flight = in_flight;
                job.work.await;
            });
        }
    }

    /// Returns a descriptor that is readable after GETs have ended, until it is read.
    ///
    /// # Errors
    /// Errors of `eventfd(2)`.
    pub fn ends(&self) -> io::Result<BorrowedFd<'_>> {
        if self.ends.get().is_none() {
            let created = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            let _ = self.ends.set(created);
        }
        self.ends.get().map(AsFd::as_fd).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn signal(&self) {
        if let Some(ends) = self.ends.get() {
            // If the counter is full, the descriptor is readable anyway.
            let _ = rustix::io::write(ends, &1u64.to_ne_bytes());
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use futures_util::{FutureExt, poll};
    use std::pin::pin;
    use std::task::Poll;
    use std::time::Duration;
    use tokio::sync::Semaphore;
    use tokio::sync::mpsc::unbounded_channel;

    #[test]
    fn what_a_guest_waits_for_is_sent_first_and_a_place_is_kept_for_it() {
        let runtime: &'static tokio::runtime::Runtime =
            Box::leak(Box::new(tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap()));
        let schedule = Schedule::new(runtime.handle());
        let (sender, mut sent) = unbounded_channel();
        let may_end = Arc::new(Semaphore::new(0));
        schedule.expect_guests();
        let start = |need: Need| {
            let (sender, may_end) = (sender.clone(), may_end.clone());
            let work = async move {
                let mut permit = pin!(may_end.acquire());
                // They may end in the order of their messages, so each waits before it sends its own.
                let permitted = poll!(&mut permit);
                sender.send(need).unwrap();
                match permitted {
                    Poll::Ready(permit) => permit,
                    Poll::Pending => permit.await,
                }
                .unwrap()
                .forget();
            };
            schedule.start(need, work.boxed())
        };
        let mut take = |count: usize| -> Vec<Need> { (0..count).map(|_| sent.blocking_recv().unwrap()).collect() };
        let mut last = 0;
        for _ in 0..MAX_UNNEEDED_IN_FLIGHT + MAX_QUEUED_AHEAD {
            assert!(schedule.has_room(Need::ReadAhead));
            last = start(Need::ReadAhead);
        }
        assert!(!schedule.has_room(Need::ReadAhead));
        assert_eq!(take(MAX_UNNEEDED_IN_FLIGHT), [Need::ReadAhead; MAX_UNNEEDED_IN_FLIGHT]);
        // Places for a guest are free.
        start(Need::Guest);
        start(Need::Guest);
        assert_eq!(take(2), [Need::Guest; 2]);
        // All places are taken. The next ones are in the order of their urgency.
        start(Need::Background);
        start(Need::Guest);
        let in_flight = || {
            let queues = schedule.queues();
            (queues.in_flight, queues.unneeded_in_flight)
        };
        assert_eq!(in_flight(), (MAX_IN_FLIGHT, MAX_UNNEEDED_IN_FLIGHT));
        let ends = schedule.ends().unwrap();
        may_end.add_permits(1);
        assert_eq!(take(1), [Need::Guest]);
        schedule.promote(last, Need::Guest);
        may_end.add_permits(1);
        // It was queued as read-ahead.
        assert_eq!(take(1), [Need::ReadAhead]);
        assert_eq!(schedule.queues().ahead.len(), MAX_QUEUED_AHEAD - 1);
        let mut counter = [0; 8];
        assert_eq!(rustix::io::read(ends, &mut counter).unwrap(), 8);
        // While guests wait, what nothing waits for gets no further place.
        may_end.add_permits(1);
        while in_flight() != (MAX_IN_FLIGHT - 1, MAX_UNNEEDED_IN_FLIGHT - 3) {
            std::thread::sleep(Duration::from_millis(1));
        }
        may_end.add_permits(100);
        assert_eq!(take(1), [Need::Background]);
        assert_eq!(take(MAX_QUEUED_AHEAD - 1).len(), MAX_QUEUED_AHEAD - 1);
        while in_flight() != (0, 0) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
