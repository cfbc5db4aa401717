//! Answers scrapes over HTTP. Requests only read, and cannot choose what is read.

use crate::collect::Collector;
use crate::exposition::Format;
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// Where metrics are served.
pub const PATH: &str = "/metrics";
/// Limit for a client to send a request and to receive the answer.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections at a time. Others wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 32;
/// Length of the longest request that is read. A scrape has a few hundred bytes.
const MAX_REQUEST_BYTES: usize = 16 << 10;
/// Requests within this time get the same figures, so that many clients cost no more than one.
const REUSE_TIME: Duration = Duration::from_secs(1);
/// Delay after a failed `accept(2)`, e.g. because no descriptor is free.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
const LANDING_TEXT: &str = "Rekindle's metrics are at /metrics.\n";

/// A socket that listens for scrapes.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
}

/// The figures that were read last.
struct Figures {
    collector: Collector,
    /// The exposition in each format, and when it was made.
    texts: [Option<(Instant, Bytes)>; 2],
}

impl Figures {
    fn text(&mut self, format: Format) -> Bytes {
        let [open_metrics, prometheus] = &mut self.texts;
        let known = match format {
            Format::OpenMetrics => open_metrics,
            Format::PrometheusText => prometheus,
        };
        if let Some((made_at, text)) = known
            && made_at.elapsed() < REUSE_TIME
        {
            return text.clone();
        }
        let text = Bytes::from(self.collector.collect().encode(format).unwrap_or_default());
        *known = Some((Instant::now(), text.clone()));
        text
    }
}

impl Server {
    /// Listens at `address`.
    ///
    /// # Errors
    /// Errors of `bind(2)`, e.g. because another process has the port.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener })
    }

    /// Returns the address, with the port that the kernel has chosen if it was 0.
    ///
    /// # Errors
    /// Errors of `getsockname(2)`.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Answers scrapes until the process ends.
    ///
    /// # Errors
    /// When the threads cannot be started.
    pub fn run(self, collector: Collector) -> io::Result<Infallible> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            // Figures are read one after the other.
            .max_blocking_threads(1)
            .build()?;
        let figures = Arc::new(Mutex::new(Figures { collector, texts: [None, None] }));
        runtime.block_on(self.accept_all(figures))
    }

    async fn accept_all(self, figures: Arc<Mutex<Figures>>) -> io::Result<Infallible> {
        let listener = tokio::net::TcpListener::from_std(self.listener)?;
        let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let permit = Arc::clone(&connections).acquire_owned().await.map_err(io::Error::other)?;
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(e) => {
                    tracing::debug!("accept: {e}");
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                    continue;
                }
            };
            let figures = Arc::clone(&figures);
            tokio::spawn(async move {
                let answer = service_fn(|request| answer(request, Arc::clone(&figures)));
                // Without keep-alive no connection lasts longer than one answer.
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEADER_TIMEOUT)
                    .max_buf_size(MAX_REQUEST_BYTES)
                    .keep_alive(false)
                    .serve_connection(TokioIo::new(stream), answer);
                match tokio::time::timeout(CONNECTION_TIMEOUT, connection).await {
                    Ok(Ok(())) => {}
                    Ok(Err(e)) => tracing::debug!("a scrape failed: {e}"),
                    Err(_) => tracing::debug!("a scrape took too long"),
                }
                drop(permit);
            });
        }
    }
}

async fn answer(request: Request<Incoming>, figures: Arc<Mutex<Figures>>) -> Result<Response<Full<Bytes>>, Infallible> {
    let plain = |status, text: &'static str| {
        let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
        response
    };
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "use GET\n");
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return Ok(response);
    }
    match request.uri().path() {
        PATH => {}
        "/" => return Ok(plain(StatusCode::OK, LANDING_TEXT)),
        _ => return Ok(plain(StatusCode::NOT_FOUND, LANDING_TEXT)),
    }
    let accept = request.headers().get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let format = Format::accepted_by(&accept.collect::<Vec<_>>().join(","));
    // Other connections are served meanwhile.
    let read = move || figures.lock().unwrap_or_else(PoisonError::into_inner).text(format);
    let Ok(text) = tokio::task::spawn_blocking(read).await else {
        return Ok(plain(StatusCode::INTERNAL_SERVER_ERROR, "the figures cannot be read\n"));
    };
    let mut response = Response::new(Full::new(text));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(format.content_type()));
    Ok(response)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::thread;

    fn start() -> (SocketAddr, tempfile::TempDir) {
        let root = tempfile::tempdir().unwrap();
        let server = Server::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = server.address().unwrap();
        let collector = Collector::new(root.path().join("vms"), root.path().join("libvirt"), "1");
        thread::spawn(|| server.run(collector));
        (address, root)
    }

    /// Sends a request and returns the whole answer.
    fn send(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        // The server may close a connection whose request it has not read to its end.
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    #[test]
    fn metrics_are_served_in_the_format_that_the_client_accepts() {
        let (address, _root) = start();
        let get = |path: &str, accept: &str| {
            send(address, &format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nAccept: {accept}\r\n\r\n"))
        };
        let answer = get(PATH, "application/openmetrics-text;version=1.0.0,*/*;q=0.1");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains("content-type: application/openmetrics-text; version=1.0.0"), "{answer}");
        assert!(answer.ends_with("# EOF\n"), "{answer}");
        let answer = get(PATH, "*/*");
        assert!(answer.contains("content-type: text/plain; version=0.0.4") && !answer.contains("EOF"), "{answer}");
        assert!(get("/", "*/*").contains("/metrics"));
        assert!(get("/../etc/passwd", "*/*").starts_with("HTTP/1.1 404"));
    }

    #[test]
    fn what_is_no_scrape_is_rejected_and_others_are_answered() {
        let (address, _root) = start();
        let answer = send(address, &format!("POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"));
        assert!(answer.starts_with("HTTP/1.1 405") && answer.contains("allow: GET, HEAD"), "{answer}");
        assert!(!send(address, "not HTTP\r\n\r\n").starts_with("HTTP/1.1 200"));
        let long = format!("GET {PATH} HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(1 << 20));
        let mut stream = TcpStream::connect(address).unwrap();
        let _ = stream.write_all(long.as_bytes());
        // These send nothing.
        let silent: Vec<_> = (0..MAX_CONNECTIONS / 2).map(|_| TcpStream::connect(address).unwrap()).collect();
        let answer = send(address, &format!("HEAD {PATH} HTTP/1.1\r\nHost: x\r\n\r\n"));
        assert!(answer.starts_with("HTTP/1.1 200") && !answer.contains("rekindle_build_info"), "{answer}");
        drop(silent);
    }
}
