//! Sends the guests to open pages, by server-sent events. All pages get what one collection has found. Without an open
//! page, nothing is collected.

use super::history::History;
use crate::collect::Collected;
use bytes::Bytes;
use hyper::body::{Body, Frame};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::Instant;

/// Limit of the open pages. Each costs a connection, and the events that it has not taken yet.
pub(crate) const MAX_PAGES: usize = 8;
/// Limit of the events that wait for one page, besides those for its start. A page that is slower is disconnected.
const MAX_WAITING_EVENTS: usize = 64;
/// How long a connection may take nothing.
const LEASE: Duration = Duration::from_secs(30);

/// The time at which a connection is ended. Taking an event extends it.
#[derive(Debug, Clone)]
pub(crate) struct Lease {
    ends: Arc<Mutex<Instant>>,
}

impl Lease {
    pub(crate) fn new() -> Self {
        Self { ends: Arc::new(Mutex::new(Instant::now() + LEASE)) }
    }

    pub(crate) fn ends(&self) -> Instant {
        *self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn extend(&self) {
        *self.ends.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now() + LEASE;
    }
}

/// The events for a page: those for its start, then those of each collection.
#[derive(Debug)]
struct Subscription {
    start: VecDeque<Bytes>,
    events: mpsc::Receiver<Bytes>,
}

/// The body of an answer with events.
#[derive(Debug)]
pub(crate) struct EventStream {
    subscription: Subscription,
    lease: Lease,
    _permit: OwnedSemaphorePermit,
}

impl Body for EventStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        let event = match this.subscription.start.pop_front() {
            Some(event) => Some(event),
            None => ready!(this.subscription.events.poll_recv(context)),
        };
        this.lease.extend();
        Poll::Ready(event.map(|event| Ok(Frame::data(event))))
    }
}

/// Why a page gets no events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoEvents {
    TooManyPages,
    Ended,
}

/// Accepts pages.
#[derive(Debug, Clone)]
pub(crate) struct Feed {
    pages: Arc<Semaphore>,
    joining: mpsc::Sender<oneshot::Sender<Subscription>>,
}

impl Feed {
    /// Returns the feed, and where pages that join it arrive.
    pub(crate) fn new() -> (Self, Source) {
        let (joining, joins) = mpsc::channel(MAX_PAGES);
        (Self { pages: Arc::new(Semaphore::new(MAX_PAGES)), joining }, Source { joins })
    }

    /// Returns the events for one more page.
    pub(crate) async fn join(&self, lease: Lease) -> Result<EventStream, NoEvents> {
        let permit = Arc::clone(&self.pages).try_acquire_owned().map_err(|_| NoEvents::TooManyPages)?;
        let (sender, receiver) = oneshot::channel();
        self.joining.send(sender).await.map_err(|_| NoEvents::Ended)?;
        let subscription = receiver.await.map_err(|_| NoEvents::Ended)?;
        Ok(EventStream { subscription, lease, _permit: permit })
    }
}

/// Collects for the pages that have joined.
#[derive(Debug)]
pub(crate) struct Source {
    joins: mpsc::Receiver<oneshot::Sender<Subscription>>,
}

impl Source {
    /// Serves pages until the feed is dropped. `collect` is called once per interval while a page is open.
    pub(crate) async fn run(
        mut self,
        mut history: History,
        interval: Duration,
        mut collect: impl AsyncFnMut() -> Option<Collected>,
    ) {
        let mut pages: Vec<mpsc::Sender<Bytes>> = Vec::new();
        let mut joining = Vec::new();
        let mut collected_at: Option<Instant> = None;
        loop {
            pages.retain(|page| !page.is_closed());
            if pages.is_empty() && joining.is_empty() {
                let Some(join) = self.joins.recv().await else { return };
                joining.push(join);
            }
            if collected_at.is_none_or(|at| at.elapsed() >= interval) {
                let collected = collect().await;
                collected_at = Some(Instant::now());
                if let Some(collected) = collected {
                    let events = history.update(&collected, now_ms());
                    // A page that has no room for an event is dropped: its connection ends.
                    pages.retain(|page| events.iter().all(|event| page.try_send(event.clone()).is_ok()));
                }
            }
            for join in joining.drain(..) {
                let (sender, events) = mpsc::channel(MAX_WAITING_EVENTS);
                if join.send(Subscription { start: history.all(), events }).is_ok() {
                    pages.push(sender);
                }
            }
            let next = collected_at.unwrap_or_else(Instant::now) + interval;
            match tokio::time::timeout_at(next, self.joins.recv()).await {
                Ok(Some(join)) => joining.push(join),
                Ok(None) => return,
                Err(_) => {}
            }
        }
    }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use http_body_util::BodyExt;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const INTERVAL: Duration = Duration::from_millis(5);

    /// Runs a test with a feed and the number of its collections.
    fn with_feed<F: Future<Output = ()>>(test: impl FnOnce(Feed, Arc<AtomicUsize>) -> F) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (feed, source) = Feed::new();
            let collections = Arc::new(AtomicUsize::new(0));
            let counted = Arc::clone(&collections);
            let history = History::new("host".into(), "1", 5);
            tokio::spawn(source.run(history, INTERVAL, async move || {
                counted.fetch_add(1, Ordering::SeqCst);
                Some(Collected::default())
            }));
            test(feed, collections).await;
        });
    }

    async fn next(stream: &mut EventStream) -> Option<String> {
        let frame = stream.frame().await?.unwrap();
        Some(String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap())
    }

    #[test]
    fn nothing_is_collected_without_a_page() {
        with_feed(|feed, collections| async move {
            tokio::time::sleep(INTERVAL * 4).await;
            assert_eq!(collections.load(Ordering::SeqCst), 0);
            let mut stream = feed.join(Lease::new()).await.unwrap();
            assert!(next(&mut stream).await.unwrap().starts_with("event: start\n"));
            while !next(&mut stream).await.unwrap().starts_with("event: samples\n") {}
            drop(stream);
            // The collection that was running may be finished, and no other starts.
            tokio::time::sleep(INTERVAL * 4).await;
            let last = collections.load(Ordering::SeqCst);
            tokio::time::sleep(INTERVAL * 4).await;
            assert_eq!(collections.load(Ordering::SeqCst), last);
        });
    }

    #[test]
    fn all_pages_share_a_collection_and_their_number_is_limited() {
        with_feed(|feed, collections| async move {
            let mut streams = Vec::new();
            for _ in 0..MAX_PAGES {
                streams.push(feed.join(Lease::new()).await.unwrap());
            }
            assert_eq!(feed.join(Lease::new()).await.unwrap_err(), NoEvents::TooManyPages);
            let before = collections.load(Ordering::SeqCst);
            for stream in &mut streams {
                while !next(stream).await.unwrap().starts_with("event: samples\n") {}
            }
            // Each page has waited for the next collection at least.
            let collected = collections.load(Ordering::SeqCst) - before;
            assert!((1..=MAX_PAGES).contains(&collected), "{collected}");
            streams.pop();
            feed.join(Lease::new()).await.unwrap();
        });
    }

    #[test]
    fn a_page_that_takes_no_events_is_disconnected_and_others_are_not() {
        with_feed(|feed, collections| async move {
            let mut slow = feed.join(Lease::new()).await.unwrap();
            let mut fast = feed.join(Lease::new()).await.unwrap();
            while collections.load(Ordering::SeqCst) < MAX_WAITING_EVENTS + 10 {
                next(&mut fast).await.unwrap();
            }
            let mut taken = 0;
            while next(&mut slow).await.is_some() {
                taken += 1;
            }
            assert!((MAX_WAITING_EVENTS..MAX_WAITING_EVENTS + 10).contains(&taken), "{taken}");
            assert!(next(&mut fast).await.is_some());
        });
    }

    #[test]
    fn taking_an_event_extends_the_connection() {
        with_feed(|feed, _| async move {
            let lease = Lease::new();
            let mut stream = feed.join(lease.clone()).await.unwrap();
            let before = lease.ends();
            tokio::time::sleep(Duration::from_millis(2)).await;
            assert_eq!(lease.ends(), before);
            next(&mut stream).await.unwrap();
            assert!(lease.ends() > before);
        });
    }
}
