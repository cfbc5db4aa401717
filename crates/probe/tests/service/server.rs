//! Servers for the tests, and functions that wait until a probe has seen their behaviour.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rekindle_probe::{Options, Probe, Report, Target};

/// A TCP server on a local port, with a thread for each connection.
pub struct Server {
    address: SocketAddr,
    stopping: Arc<AtomicBool>,
}

impl Server {
    /// Serves each connection, numbered from 0, with `handler`. The connection is closed when `handler` returns.
    pub fn start(handler: impl Fn(TcpStream, usize) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self::on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap(), handler)
    }

    pub fn on(
        listener: TcpListener,
        handler: impl Fn(TcpStream, usize) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let address = listener.local_addr().unwrap();
        let stopping = Arc::new(AtomicBool::new(false));
        let (handler, stop) = (Arc::new(handler), Arc::clone(&stopping));
        thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                let (Ok(stream), handler) = (stream, Arc::clone(&handler)) else { continue };
                let _ = stream.set_nodelay(true);
                // The probe may close the connection at any time.
                thread::spawn(move || handler(stream, number));
            }
        });
        Self { address, stopping }
    }

    /// Serves HTTP. `answer` gets the number of the request on its connection, and returns the response, or `None` to
    /// close the connection.
    pub fn http(answer: impl Fn(usize) -> Option<Vec<u8>> + Send + Sync + 'static) -> Self {
        Self::http_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap(), answer)
    }

    pub fn http_on(listener: TcpListener, answer: impl Fn(usize) -> Option<Vec<u8>> + Send + Sync + 'static) -> Self {
        Self::on(listener, move |stream, _| {
            let mut requests = BufReader::new(stream.try_clone()?);
            let mut stream = stream;
            let mut number = 0;
            while read_request(&mut requests)?.is_some() {
                let Some(bytes) = answer(number) else { return Ok(()) };
                stream.write_all(&bytes)?;
                number += 1;
            }
            Ok(())
        })
    }

    /// Echoes each received piece after `change` has modified it.
    pub fn echo(change: impl Fn(usize, &mut Vec<u8>) + Send + Sync + 'static) -> Self {
        Self::start(move |mut stream, _| {
            let mut buffer = [0; 4096];
            for number in 0.. {
                let received = stream.read(&mut buffer)?;
                if received == 0 {
                    break;
                }
                let mut bytes = buffer[..received].to_vec();
                change(number, &mut bytes);
                stream.write_all(&bytes)?;
            }
            Ok(())
        })
    }

    pub fn target(&self, scheme: &str) -> Target {
        format!("{scheme}://{}", self.address).parse().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::SeqCst);
        // Wakes the thread from `accept`, so that it ends. A thread in another network namespace is not reached and
        // stays.
        let _ = TcpStream::connect(self.address);
    }
}

/// Reads the head of a request; `None` at the end of the stream.
pub fn read_request(requests: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if requests.read_line(&mut head)? == 0 {
            return Ok(None);
        }
    }
    Ok(Some(head))
}

/// Returns a good response with a body.
pub fn ok(body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// Returns options with a request every millisecond, and silences of 20 ms as gaps.
pub fn brisk() -> Options {
    Options {
        every: Duration::from_millis(1),
        gap_threshold: Some(Duration::from_millis(20)),
        interval: Duration::from_millis(10),
        ..Options::default()
    }
}

/// Waits until `seen` holds for the report, stops the probe, and checks that the report's totals agree.
pub fn stop_once(probe: Probe, seen: impl Fn(&Report) -> bool) -> Report {
    until(|| seen(&probe.snapshot()), || format!("{:#?}", probe.snapshot()));
    let report = probe.stop();
    assert_consistent(&report);
    report
}

/// Waits until a condition holds. Panics after a deadline with the text of `instead`.
pub fn until(condition: impl Fn() -> bool, instead: impl Fn() -> String) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain: {}", instead());
        thread::sleep(Duration::from_millis(1));
    }
}

pub fn assert_consistent(report: &Report) {
    let sum = |of: fn(&rekindle_probe::Interval) -> u64| report.intervals.iter().map(of).sum::<u64>();
    assert_eq!(report.sent, report.answered + report.failed.total() + report.in_flight, "{report:#?}");
    assert_eq!(sum(|interval| interval.answered), report.answered);
    assert_eq!(sum(|interval| interval.failed), report.failed.total());
    assert_eq!(sum(|interval| interval.bytes), report.bytes);
    assert!(report.gaps.iter().all(|gap| gap.length_us <= report.longest_gap_us));
    assert!(report.in_flight <= report.connections);
    assert!(report.connections_lost <= report.connections_opened);
    assert_eq!(report.first_failure.is_some(), report.failed.total() > 0);
    assert_eq!(report.latency.is_some(), report.answered > 0);
    let json = serde_json::to_string(report).unwrap();
    assert_eq!(&serde_json::from_str::<Report>(&json).unwrap(), report);
}
