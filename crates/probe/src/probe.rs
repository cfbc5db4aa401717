//! A probe that runs in the background.

use std::fmt;
use std::io::{self, PipeWriter};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::thread::set_current_timer_slack;

use crate::client::Client;
use crate::event::Event;
use crate::later;
use crate::netns::{self, InsideError, NetnsError};
use crate::options::{Options, OptionsError};
use crate::recorder::Recorder;
use crate::report::Report;
use crate::schedule::Schedule;
use crate::target::Target;
use crate::waiter::Waiter;
use crate::wire::{Dialer, ResolveError};
use crate::worker::{self, Run};

/// Limit of gaps that wait for a slow event sink.
const MAX_GAPS_BEHIND: usize = 1024;

/// Error of starting a probe.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The options are not valid.
    #[error("{0}")]
    Options(OptionsError),
    /// The network namespace cannot be entered.
    #[error(transparent)]
    Netns(NetnsError),
    /// The target's host has no address.
    #[error(transparent)]
    Resolve(ResolveError),
    /// Creating threads or descriptors failed.
    #[error("cannot set up the probe's threads; lower the number of connections, or raise `ulimit -n -u`")]
    Threads(#[source] io::Error),
}

impl From<InsideError> for StartError {
    fn from(error: InsideError) -> Self {
        match error {
            InsideError::Netns(error) => Self::Netns(error),
            InsideError::Thread(error) => Self::Threads(error),
        }
    }
}

/// A running probe, whose threads work in the background. Dropping the probe stops them.
pub struct Probe {
    run: Arc<Run>,
    threads: Vec<JoinHandle<()>>,
    /// No message is ever sent. The channel is disconnected when all connections' threads have ended.
    ended: Mutex<Receiver<()>>,
    /// Dropping the writer wakes the threads and ends them.
    stop: Option<PipeWriter>,
}

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Probe").field("run", &self.run).finish_non_exhaustive()
    }
}

/// A connection's thread that is ready and waits for its run.
struct Starter {
    thread: JoinHandle<()>,
    run_sender: Sender<Arc<Run>>,
}

impl Probe {
    /// Starts to probe.
    ///
    /// Before this function returns, the host's name is resolved and the network namespace is entered. Whether the
    /// target answers is not checked, because the probe measures that.
    ///
    /// # Errors
    ///
    /// [`StartError`]. Threads that have already been started end.
    pub fn start(target: &Target, options: Options) -> Result<Self, StartError> {
        Self::start_inner(target, &options, None)
    }

    /// Starts to probe, and passes each interval and each gap to `sink` when it ends.
    ///
    /// The sink runs on its own thread, so that a slow sink does not disturb the measurement. When [`Probe::stop`]
    /// returns, all events have been passed.
    ///
    /// # Errors
    ///
    /// Errors of [`Probe::start`].
    pub fn start_with_events(
        target: &Target,
        options: Options,
        sink: impl FnMut(Event) + Send + 'static,
    ) -> Result<Self, StartError> {
        Self::start_inner(target, &options, Some(Box::new(sink)))
    }

    fn start_inner(
        target: &Target,
        options: &Options,
        sink: Option<Box<dyn FnMut(Event) + Send>>,
    ) -> Result<Self, StartError> {
        options.validate().map_err(StartError::Options)?;
        let netns = options.netns.as_deref();
        let dialer =
            netns::inside(netns, || Dialer::resolve(target, options.connect_attempt))?.map_err(StartError::Resolve)?;

        let (ready, readiness) = mpsc::channel();
        let (ending, ended) = mpsc::channel();
        let mut starters = Vec::with_capacity(options.connections);
        for index in 0..options.connections {
            let client = Client::new(target, dialer.clone(), index);
            let schedule = Schedule::new(options.every, index, options.connections);
            starters.push(spawn(client, schedule, index, options.netns.clone(), ready.clone(), ending.clone())?);
        }
        drop((ready, ending));
        // If entering has failed, the starters are dropped, which ends the threads that wait for a run.
        for entered in readiness {
            entered.map_err(StartError::Netns)?;
        }

        // The measurement starts.
        let (gap_sender, event_source) = match sink {
            Some(sink) => {
                let (gap_sender, gaps) = mpsc::sync_channel(MAX_GAPS_BEHIND);
                (Some(gap_sender), Some((gaps, sink)))
            }
            None => (None, None),
        };
        let recorder = Recorder::start(target, options, gap_sender).map_err(StartError::Threads)?;
        let end = options.duration.map(|duration| later(recorder.origin(), duration));
        let (waiter, stop) = Waiter::new(end).map_err(StartError::Threads)?;
        let running = AtomicUsize::new(options.connections);
        let run = Arc::new(Run { recorder, waiter, timeout: options.timeout, running });
        let mut threads = Vec::with_capacity(options.connections + 1);
        if let Some((gaps, mut sink)) = event_source {
            let (run, interval) = (Arc::clone(&run), options.interval);
            let work = move || worker::report_events(&run, interval, &gaps, &mut sink);
            threads.push(thread::Builder::new().name("probe-events".into()).spawn(work).map_err(StartError::Threads)?);
        }
        for starter in starters {
            // The thread only waits for this message, so it cannot have ended.
            let _ = starter.run_sender.send(Arc::clone(&run));
            threads.push(starter.thread);
        }
        Ok(Self { run, threads, ended: Mutex::new(ended), stop: Some(stop) })
    }

    /// Returns the report as if the probe were stopped now. The probe continues.
    pub fn snapshot(&self) -> Report {
        self.run.recorder.report()
    }

    /// Waits until [`Options::duration`] is over, but no longer than `timeout`. Returns whether the duration is over.
    pub fn wait_timeout(&self, timeout: Duration) -> bool {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.recv_timeout(timeout) == Err(RecvTimeoutError::Disconnected)
    }

    /// Stops the probe immediately. Outstanding requests are dropped and count as [`in_flight`](Report::in_flight), not
    /// as failed.
    pub fn stop(mut self) -> Report {
        self.shut_down();
        self.run.recorder.report()
    }

    fn shut_down(&mut self) {
        self.run.waiter.mark_stopped();
        self.stop = None;
        for thread in self.threads.drain(..) {
            // A panicking thread has already printed its panic.
            let _ = thread.join();
        }
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.shut_down();
    }
}

/// Starts the thread of one connection. The thread reports on `ready` whether it has entered the network namespace,
/// then waits for its run. If it gets no run, it ends.
fn spawn(
    client: Client,
    schedule: Schedule,
    index: usize,
    netns: Option<String>,
    ready: Sender<Result<(), NetnsError>>,
    ending: Sender<()>,
) -> Result<Starter, StartError> {
    let (run_sender, runs) = mpsc::channel::<Arc<Run>>();
    let work = move || {
        let _ending = ending;
        // Makes sleeps precise to a microsecond instead of the usual 50 µs. Without it, ticks are only later.
        let _ = set_current_timer_slack(Some(NonZeroU64::MIN));
        let entered = netns.as_deref().map_or(Ok(()), netns::enter);
        if ready.send(entered).is_ok()
            && let Ok(run) = {
                drop(ready);
                runs.recv()
            }
        {
            worker::run_connection(&run, client, schedule);
        }
    };
    let thread = thread::Builder::new().name(format!("probe-{index}")).spawn(work).map_err(StartError::Threads)?;
    Ok(Starter { thread, run_sender })
}
