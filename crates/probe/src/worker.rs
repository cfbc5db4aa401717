//! The threads of a probe: one for each connection, and one that passes live events to the sink.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::client::Client;
use crate::event::Event;
use crate::failure::NoAnswer;
use crate::later;
use crate::recorder::Recorder;
use crate::report::Gap;
use crate::schedule::{Backoff, Schedule};
use crate::waiter::{WaitResult, Waiter};
use crate::wire::Io;

/// State that the threads of one probe share.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) recorder: Recorder,
    pub(crate) waiter: Waiter,
    pub(crate) timeout: Duration,
    /// Number of connections' threads that have not ended. The last thread ends the record.
    pub(crate) running: AtomicUsize,
}

/// Decrements the number of running threads on drop, also during a panic.
struct RunningThread<'a>(&'a Run);

impl Drop for RunningThread<'_> {
    fn drop(&mut self) {
        if self.0.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.recorder.end();
        }
    }
}

/// Sends requests over one connection until the run is stopped.
pub(crate) fn run_connection(run: &Run, mut client: Client, mut schedule: Schedule) {
    let _running_thread = RunningThread(run);
    let recorder = &run.recorder;
    let mut backoff = Backoff::default();
    let mut due = schedule.due();
    while run.waiter.sleep_until(Some(later(recorder.origin(), due))) != WaitResult::Stopped {
        recorder.sent();
        let sent = Instant::now();
        match client.exchange(&Io::begin(&run.waiter, recorder, run.timeout)) {
            Ok(()) => {
                recorder.answered(sent.elapsed());
                backoff.reset();
            }
            Err(NoAnswer::Stopped) => break,
            Err(NoAnswer::Failed(failure)) => {
                recorder.failed(&failure);
                tracing::debug!(failure = failure.describe(), "request failed");
                if failure.is_outage() {
                    due = recorder.elapsed().saturating_add(backoff.next());
                    continue;
                }
            }
        }
        recorder.skipped(schedule.advance(recorder.elapsed()));
        due = schedule.due();
    }
    recorder.skipped(schedule.advance(recorder.elapsed()));
    client.close(recorder);
}

/// Passes each interval to `sink` when it ends, and each gap when it is received, until the record has ended.
pub(crate) fn report_events(run: &Arc<Run>, interval: Duration, gaps: &Receiver<Gap>, sink: &mut dyn FnMut(Event)) {
    let mut interval_end = interval;
    loop {
        let time_left = interval_end.saturating_sub(run.recorder.elapsed());
        let has_ended = match gaps.recv_timeout(time_left) {
            Ok(gap) => {
                sink(Event::Gap(gap));
                continue;
            }
            Err(RecvTimeoutError::Timeout) => false,
            Err(RecvTimeoutError::Disconnected) => true,
        };
        for interval in run.recorder.take_intervals() {
            sink(Event::Interval(interval));
        }
        if has_ended {
            return;
        }
        interval_end = interval_end.saturating_add(interval).max(run.recorder.elapsed());
    }
}
