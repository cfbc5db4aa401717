//! `http://`: keep-alive, framings, silences, errors.

use std::io::{BufReader, Write};
use std::net::TcpStream;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rekindle_probe::{CheckError, Failure, Options, Probe, Target, check};

use crate::server::{Server, brisk, ok, read_request, stop_once};

const LONG_TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn connections_are_kept_and_answers_counted() {
    let server = Server::http(|_| Some(ok("hello")));
    let options = Options { connections: 3, ..brisk() };
    let probe = Probe::start(&server.target("http"), options).unwrap();
    let report = stop_once(probe, |seen| seen.answered >= 300);
    assert_eq!(report.failed.total(), 0);
    assert_eq!((report.connections_opened, report.connections_lost), (3, 0));
    assert!(report.bytes >= report.answered * ok("hello").len() as u64);
    let latency = report.latency.unwrap();
    assert!(0 < latency.p50_us && latency.p50_us <= latency.p95_us);
    assert!(latency.p95_us <= latency.p99_us && latency.p99_us <= latency.max_us);
}

#[test]
fn the_request_is_a_get_with_host_and_path() {
    let (seen, requests) = mpsc::channel();
    let seen = Mutex::new(seen);
    let server = Server::start(move |mut stream, _| {
        let head = read_request(&mut BufReader::new(stream.try_clone()?))?.unwrap();
        seen.lock().unwrap().send(head).unwrap();
        stream.write_all(&ok(""))
    });
    let target: Target = format!("{}health?full=1", server.target("http")).parse().unwrap();
    check(&target, LONG_TIMEOUT, None).unwrap();
    let head = requests.recv().unwrap();
    assert!(head.starts_with("GET /health?full=1 HTTP/1.1\r\n"), "{head}");
    assert!(head.contains(&format!("\r\nHost: 127.0.0.1:{}\r\n", target.port())), "{head}");
}

#[test]
fn a_silence_is_a_gap_of_at_least_its_length() {
    let server = Server::http(|number| {
        if number == 50 {
            thread::sleep(Duration::from_millis(80));
        }
        Some(ok("hello"))
    });
    let probe = Probe::start(&server.target("http"), brisk()).unwrap();
    let report = stop_once(probe, |seen| seen.answered >= 100);
    assert_eq!((report.failed.total(), report.connections_opened, report.connections_lost), (0, 1, 0));
    assert!(report.longest_gap_us >= 80_000, "{}", report.longest_gap_us);
    assert!(report.skipped >= 70, "{}", report.skipped);
    // On a busy machine, the first answer can take as long as the gap.
    let started = report.started_unix_ns;
    let gap = report.gaps.iter().find(|gap| gap.length_us >= 80_000 && gap.start_unix_ns > started).unwrap();
    assert!(gap.start_unix_ns + gap.length_us * 1000 <= started + (report.elapsed_us + 1) * 1000);
}

#[test]
fn chunked_bodies_are_read_whole() {
    let body =
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3;x=y\r\n\r\n\n\r\n0\r\nT: 1\r\n\r\n";
    let server = Server::http(|_| Some(body.to_vec()));
    let probe = Probe::start(&server.target("http"), brisk()).unwrap();
    let report = stop_once(probe, |seen| seen.answered >= 50);
    assert_eq!((report.failed.total(), report.connections_opened), (0, 1));
}

#[test]
fn a_large_body_in_pieces_is_one_answer() {
    let server = Server::http(|_| Some(ok(&"x".repeat(3 << 20))));
    let probe = Probe::start(&server.target("http"), brisk()).unwrap();
    let report = stop_once(probe, |seen| seen.answered >= 5);
    assert_eq!((report.failed.total(), report.connections_opened), (0, 1));
    assert!(report.bytes >= report.answered * (3 << 20));
}

#[test]
fn an_announced_close_loses_no_connection() {
    let closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok".to_vec();
    let without_length = b"HTTP/1.0 200 OK\r\n\r\nok".to_vec();
    for answer in [closing, without_length] {
        let server = Server::start(move |mut stream, _| {
            read_request(&mut BufReader::new(stream.try_clone()?))?;
            stream.write_all(&answer)
        });
        let probe = Probe::start(&server.target("http"), brisk()).unwrap();
        let report = stop_once(probe, |seen| seen.answered >= 20);
        assert_eq!((report.failed.total(), report.connections_lost), (0, 0));
        assert!(report.connections_opened >= report.answered);
    }
}

#[test]
fn a_close_within_an_answer_is_a_lost_connection_and_a_failed_request() {
    let server = Server::start(|mut stream, _| {
        let mut requests = BufReader::new(stream.try_clone()?);
        for _ in 0..10 {
            read_request(&mut requests)?;
            stream.write_all(&ok("hello"))?;
        }
        read_request(&mut requests)?;
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel")
    });
    let probe = Probe::start(&server.target("http"), brisk()).unwrap();
    let report = stop_once(probe, |seen| seen.connections_lost >= 3);
    assert_eq!(report.failed.resets, report.failed.total());
    assert_eq!(report.connections_lost, report.failed.resets);
    assert!(report.answered >= 30);
    let first = report.first_failure.unwrap();
    assert_eq!(first, "connection lost before the answer was whole: the other side closed it");
}

#[test]
fn a_close_between_requests_is_a_lost_connection() {
    let server = Server::http(|number| (number < 5).then(|| ok("hello")));
    let (closes, closed) = mpsc::channel();
    let closes = Arc::new(Mutex::new(closes));
    let idle = Server::start(move |mut stream, _| {
        read_request(&mut BufReader::new(stream.try_clone()?))?;
        stream.write_all(&ok("hello"))?;
        drop(stream);
        let _ = closes.lock().unwrap().send(());
        Ok(())
    });
    // The first request is sent immediately and the next one long after the stop, so the lost connection is only found
    // at the stop.
    let probe = Probe::start(&idle.target("http"), Options { every: LONG_TIMEOUT, ..Options::default() }).unwrap();
    closed.recv().unwrap();
    let report = stop_once(probe, |seen| seen.answered == 1);
    assert_eq!((report.failed.total(), report.connections_opened, report.connections_lost), (0, 1, 1));

    let probe = Probe::start(&server.target("http"), brisk()).unwrap();
    let report = stop_once(probe, |seen| seen.connections_lost >= 3);
    assert!(report.answered >= 15 && report.connections_opened >= 3);
}

#[test]
fn http_errors_are_wrong_content_and_keep_the_connection() {
    let unavailable = b"HTTP/1.1 503 Unavailable\r\nContent-Length: 4\r\n\r\nbusy".to_vec();
    let server = Server::http(move |number| Some(if number < 5 { unavailable.clone() } else { ok("hello") }));
    let probe = Probe::start(&server.target("http"), brisk()).unwrap();
    let report = stop_once(probe, |seen| seen.answered >= 10);
    assert_eq!((report.failed.wrong_content, report.failed.total()), (5, 5));
    assert_eq!((report.connections_opened, report.connections_lost), (1, 0));
    assert_eq!(report.first_failure.as_deref(), Some("HTTP status 503"));
}

#[test]
fn what_is_no_http_is_wrong_content() {
    let server = Server::http(|_| Some(b"220 mail ready\r\n\r\n".to_vec()));
    let probe = Probe::start(&server.target("http"), brisk()).unwrap();
    let report = stop_once(probe, |seen| seen.failed.wrong_content >= 3);
    assert_eq!((report.answered, report.connections_lost), (0, 0));
}

#[test]
fn a_request_without_answer_times_out() {
    let server = Server::http(|_| {
        thread::park_timeout(LONG_TIMEOUT);
        None
    });
    let timeout = Duration::from_millis(30);
    let probe = Probe::start(&server.target("http"), Options { timeout, ..brisk() }).unwrap();
    let report = stop_once(probe, |seen| seen.failed.timeouts >= 3);
    assert_eq!((report.answered, report.connections_lost, report.latency), (0, 0, None));
    assert_eq!((report.gaps_total, report.longest_gap_us), (1, report.elapsed_us));
    assert!(report.longest_gap_us >= 90_000);
}

#[test]
fn a_check_reports_what_is_wrong() {
    let healthy = Server::http(|_| Some(ok("hello")));
    assert!(check(&healthy.target("http"), LONG_TIMEOUT, None).unwrap() > Duration::ZERO);
    let broken = Server::http(|_| Some(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n".to_vec()));
    let error = check(&broken.target("http"), LONG_TIMEOUT, None).unwrap_err();
    assert_eq!(error.to_string(), format!("{}: not healthy", broken.target("http")));
    assert!(matches!(error, CheckError::Unhealthy { source: Failure::Status(500), .. }), "{error:?}");
    let closing = Server::start(|_: TcpStream, _| Ok(()));
    let error = check(&closing.target("http"), LONG_TIMEOUT, None).unwrap_err();
    assert!(matches!(error, CheckError::Unhealthy { source: Failure::Lost(_), .. }), "{error:?}");
}
