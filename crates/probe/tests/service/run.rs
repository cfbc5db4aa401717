//! Start, duration and live events of a run.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rekindle_probe::{Event, Options, OptionsError, Probe, StartError, render};

use crate::server::{Server, assert_consistent, brisk, ok, stop_once, until};

#[test]
fn a_run_ends_after_its_duration() {
    let server = Server::http(|_| Some(ok("hello")));
    let duration = Duration::from_millis(200);
    let probe = Probe::start(&server.target("http"), Options { duration: Some(duration), ..brisk() }).unwrap();
    until(|| probe.wait_timeout(Duration::from_millis(50)), || "the run does not end".to_owned());
    let snapshot = probe.snapshot();
    let report = probe.stop();
    assert_eq!(snapshot, report);
    assert_consistent(&report);
    assert!(report.elapsed_us >= 200_000);
    assert!(render(&report).starts_with(&report.url));
}

#[test]
fn without_a_duration_a_run_does_not_end_by_itself() {
    let server = Server::http(|_| Some(ok("hello")));
    let probe = Probe::start(&server.target("http"), brisk()).unwrap();
    assert!(!probe.wait_timeout(Duration::from_millis(20)));
    stop_once(probe, |seen| seen.answered >= 1);
}

#[test]
fn stopping_interrupts_a_request_without_failing_it() {
    let server = Server::http(|_| {
        thread::park_timeout(Duration::from_secs(600));
        None
    });
    let options = Options { timeout: Duration::from_secs(600), ..brisk() };
    let began = Instant::now();
    let report = stop_once(Probe::start(&server.target("http"), options).unwrap(), |seen| {
        seen.connections_opened == 1 && seen.gaps_total == 1
    });
    // This does not assert a speed: without the interruption, the run would take ten minutes.
    assert!(began.elapsed() < Duration::from_secs(500));
    assert_eq!((report.sent, report.in_flight, report.failed.total()), (1, 1, 0));
    assert_eq!((report.gaps_total, report.gaps[0].length_us), (1, report.elapsed_us));
}

#[test]
fn events_agree_with_the_report() {
    let server = Server::http(|number| {
        if number % 20 == 10 {
            thread::sleep(Duration::from_millis(30));
        }
        Some(ok("hello"))
    });
    let (sink, events) = mpsc::channel();
    let probe = Probe::start_with_events(&server.target("http"), brisk(), move |event| {
        let _ = sink.send(event);
    })
    .unwrap();
    // An interval is reported when it has ended, not only at the stop.
    let mut reported = Vec::new();
    while !reported.iter().any(|event| matches!(event, Event::Interval(_))) {
        reported.push(events.recv().unwrap());
    }
    let report = stop_once(probe, |seen| seen.gaps_total >= 3);
    reported.extend(events);

    let (mut intervals, mut gaps) = (Vec::new(), Vec::new());
    for event in reported {
        match event {
            Event::Interval(interval) => intervals.push(interval),
            Event::Gap(gap) => gaps.push(gap),
        }
    }
    assert!(intervals.iter().map(|interval| interval.start_ms).eq((0..).step_by(10).take(intervals.len())));
    assert_eq!(intervals, report.intervals);
    assert_eq!(gaps, report.gaps);
    assert!(gaps.len() >= 3);
}

#[test]
fn dropping_a_probe_ends_its_threads() {
    let server = Server::echo(|_, _| {});
    let (sink, events) = mpsc::channel();
    let probe = Probe::start_with_events(&server.target("echo"), brisk(), move |event| {
        let _ = sink.send(event);
    });
    drop(probe.unwrap());
    // The sink has been dropped, so its thread and all other threads have ended.
    assert!(events.iter().count() >= 1);
}

#[test]
fn impossible_starts_are_refused() {
    let target = "http://127.0.0.1:9/".parse().unwrap();
    let refused = Probe::start(&target, Options { connections: 0, ..Options::default() }).unwrap_err();
    assert!(matches!(refused, StartError::Options(OptionsError::Connections(0))), "{refused:?}");
    let netns = Some("rekindle-no-such-namespace".to_owned());
    let refused = Probe::start(&target, Options { netns, ..Options::default() }).unwrap_err();
    assert!(matches!(refused, StartError::Netns(_)), "{refused:?}");
    let unknown = "http://no-such-host.invalid/".parse().unwrap();
    let refused = Probe::start(&unknown, Options::default()).unwrap_err();
    assert!(refused.to_string().starts_with("no-such-host.invalid: no address found"), "{refused}");
}
