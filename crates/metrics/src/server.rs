//! Answers scrapes and serves the page, over HTTP. Requests only read, and cannot choose what is read.

use crate::collect::Collector;
use crate::exposition::Format;
use crate::page::feed::{EventStream, Feed, Lease, NoEvents};
use crate::page::history::History;
use crate::page::{DOCUMENT, security_policy};
use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::header::{
    ACCEPT, ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue,
    REFERRER_POLICY, RETRY_AFTER, X_CONTENT_TYPE_OPTIONS,
};
use hyper::http::uri::Authority;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout_at;

/// Where metrics are served.
pub const PATH: &str = "/metrics";
/// Where the page is served.
pub const PAGE_PATH: &str = "/";
/// Where the page gets its events.
const EVENTS_PATH: &str = "/events";
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections at a time. Others wait in the kernel's queue. More than the limit of open pages, so that pages never
/// prevent scrapes.
const MAX_CONNECTIONS: usize = 32;
/// Length of the longest request that is read. A scrape has a few hundred bytes.
const MAX_REQUEST_BYTES: usize = 16 << 10;
/// Limit of what the kernel keeps for a client that reads slowly, which Linux doubles.
const SEND_BUFFER_BYTES: usize = 128 << 10;
/// Requests within this time get the same figures, so that many clients cost no more than one.
const REUSE_TIME: Duration = Duration::from_secs(1);
/// Interval of collections while a page is open.
const PAGE_INTERVAL: Duration = Duration::from_secs(1);
/// Delay after a failed `accept(2)`, e.g. because no descriptor is free.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
const NOT_FOUND_TEXT: &str = "Metrics are at /metrics, the page at /.\n";
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

type Answer = Response<Either<Full<Bytes>, EventStream>>;

/// A socket that listens for scrapes and browsers.
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
        let text = Bytes::from(self.collector.collect().snapshot.encode(format).unwrap_or_default());
        *known = Some((Instant::now(), text.clone()));
        text
    }
}

/// What all requests share.
struct Site {
    figures: Arc<Mutex<Figures>>,
    feed: Feed,
    security_policy: HeaderValue,
    is_on_loopback: bool,
}

impl Server {
    /// Listens at `address`.
    ///
    /// # Errors
    /// Errors of `bind(2)`, e.g. because another process has the port.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        // Accepted connections inherit it.
        rustix::net::sockopt::set_socket_send_buffer_size(&listener, SEND_BUFFER_BYTES)?;
        Ok(Self { listener })
    }

    /// Returns the address, with the port that the kernel has chosen if it was 0.
    ///
    /// # Errors
    /// Errors of `getsockname(2)`.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Answers requests until the process ends.
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
        runtime.block_on(self.accept_all(collector))
    }

    async fn accept_all(self, collector: Collector) -> io::Result<Infallible> {
        let is_on_loopback = self.address()?.ip().is_loopback();
        let listener = tokio::net::TcpListener::from_std(self.listener)?;
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let history = History::new(host, collector.version(), PAGE_INTERVAL.as_millis() as u64);
        let figures = Arc::new(Mutex::new(Figures { collector, texts: [None, None] }));
        let (feed, source) = Feed::new();
        let collected = Arc::clone(&figures);
        tokio::spawn(source.run(history, PAGE_INTERVAL, async move || {
            let figures = Arc::clone(&collected);
            let collect = move || figures.lock().unwrap_or_else(PoisonError::into_inner).collector.collect();
            tokio::task::spawn_blocking(collect).await.ok()
        }));
        let security_policy = HeaderValue::try_from(security_policy()).map_err(io::Error::other)?;
        let site = Arc::new(Site { figures, feed, security_policy, is_on_loopback });
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
            let site = Arc::clone(&site);
            tokio::spawn(async move {
                serve(stream, &site).await;
                drop(permit);
            });
        }
    }
}

/// Serves one request. The connection ends when its lease does.
async fn serve(stream: TcpStream, site: &Site) {
    let lease = Lease::new();
    let service = service_fn(|request| answer(request, site, lease.clone()));
    // Without keep-alive no connection lasts longer than one answer.
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_REQUEST_BYTES)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    loop {
        let ends = lease.ends();
        match timeout_at(ends, connection.as_mut()).await {
            Ok(Ok(())) => return,
            Ok(Err(e)) => return tracing::debug!("a request failed: {e}"),
            Err(_) if lease.ends() == ends => return tracing::debug!("a client was too slow"),
            Err(_) => {}
        }
    }
}

async fn answer(request: Request<Incoming>, site: &Site, lease: Lease) -> Result<Answer, Infallible> {
    let mut response = route(&request, site, lease).await;
    let headers = response.headers_mut();
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    for (name, value) in
        [("cross-origin-resource-policy", "same-origin"), ("cross-origin-opener-policy", "same-origin")]
    {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    Ok(response)
}

async fn route(request: &Request<Incoming>, site: &Site, lease: Lease) -> Answer {
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "use GET\n");
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    if site.is_on_loopback && !names_this_host(request.headers()) {
        return plain(StatusCode::FORBIDDEN, "unknown host name; use localhost or an IP address\n");
    }
    match request.uri().path() {
        PATH => scrape(request, site).await,
        PAGE_PATH => {
            let mut response = with_type("text/html; charset=utf-8", Bytes::from_static(DOCUMENT.as_bytes()));
            response.headers_mut().insert(CONTENT_SECURITY_POLICY, site.security_policy.clone());
            response
        }
        EVENTS_PATH => events(request, site, lease).await,
        _ => plain(StatusCode::NOT_FOUND, NOT_FOUND_TEXT),
    }
}

async fn scrape(request: &Request<Incoming>, site: &Site) -> Answer {
    let accept = request.headers().get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let format = Format::accepted_by(&accept.collect::<Vec<_>>().join(","));
    let figures = Arc::clone(&site.figures);
    // Other connections are served meanwhile.
    let read = move || figures.lock().unwrap_or_else(PoisonError::into_inner).text(format);
    let Ok(text) = tokio::task::spawn_blocking(read).await else {
        return plain(StatusCode::INTERNAL_SERVER_ERROR, "the figures cannot be read\n");
    };
    with_type(format.content_type(), text)
}

async fn events(request: &Request<Incoming>, site: &Site, lease: Lease) -> Answer {
    // A page of another site cannot read the events, but could use up the number of open pages.
    let from = request.headers().get(SEC_FETCH_SITE).map(HeaderValue::as_bytes);
    if from.is_some_and(|from| from != b"same-origin" && from != b"none") {
        return plain(StatusCode::FORBIDDEN, "not for pages of other sites\n");
    }
    let stream = match request.method() {
        &Method::HEAD => Either::Left(Full::default()),
        _ => match site.feed.join(lease).await {
            Ok(stream) => Either::Right(stream),
            Err(NoEvents::TooManyPages) => {
                let mut response = plain(StatusCode::SERVICE_UNAVAILABLE, "too many pages are open\n");
                response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("10"));
                return response;
            }
            Err(NoEvents::Ended) => return plain(StatusCode::INTERNAL_SERVER_ERROR, "there are no events\n"),
        },
    };
    let mut response = Response::new(stream);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    response
}

/// Returns whether the client has used a name that only this host has. A page of another site can have its own name
/// resolved to a loopback address (DNS rebinding), and would then be of the same origin. IP addresses are not resolved.
fn names_this_host(headers: &HeaderMap) -> bool {
    let mut hosts = headers.get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return false };
    let Some(authority) = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok()) else { return false };
    let name = authority.host();
    let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    !authority.as_str().contains('@') && (name.eq_ignore_ascii_case("localhost") || address.parse::<IpAddr>().is_ok())
}

fn plain(status: StatusCode, text: &'static str) -> Answer {
    let mut response = with_type("text/plain; charset=utf-8", Bytes::from_static(text.as_bytes()));
    *response.status_mut() = status;
    response
}

fn with_type(content_type: &'static str, content: Bytes) -> Answer {
    let mut response = Response::new(Either::Left(Full::new(content)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::page::feed::MAX_PAGES;
    use rekindle_testing::DEADLINE;
    use rekindle_vm::rundir::RunDir;
    use std::fs;
    use std::io::{BufRead, BufReader, Read, Write};
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
        assert!(get("/unknown", "*/*").contains("/metrics"));
        assert!(get("/../etc/passwd", "*/*").starts_with("HTTP/1.1 404"));
    }

    #[test]
    fn what_is_no_scrape_is_rejected_and_others_are_answered() {
        let (address, _root) = start();
        let answer = send(address, &format!("POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"));
        assert!(answer.starts_with("HTTP/1.1 405") && answer.contains("allow: GET, HEAD"), "{answer}");
        assert!(!send(address, "not HTTP\r\n\r\n").starts_with("HTTP/1.1 200"));
        let long = format!("GET {PATH} HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(1 << 20));
        let mut stream = TcpStream::connect(address).unwrap();
        let _ = stream.write_all(long.as_bytes());
        // These send nothing.
        let silent: Vec<_> = (0..MAX_CONNECTIONS / 2).map(|_| TcpStream::connect(address).unwrap()).collect();
        let answer = send(address, &format!("HEAD {PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
        assert!(answer.starts_with("HTTP/1.1 200") && !answer.contains("rekindle_build_info"), "{answer}");
        drop(silent);
    }

    /// Returns the head of an answer, in lower case, and its body.
    fn request(address: SocketAddr, line: &str, headers: &str) -> (String, String) {
        let answer = send(address, &format!("{line} HTTP/1.1\r\n{headers}\r\n"));
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        (head.to_lowercase(), body.to_owned())
    }

    #[test]
    fn the_page_may_use_only_itself() {
        let (address, _root) = start();
        let (head, body) = request(address, "GET /", "Host: localhost\r\n");
        assert!(head.starts_with("http/1.1 200"), "{head}");
        assert_eq!(body, DOCUMENT);
        for header in [
            "content-type: text/html; charset=utf-8",
            "content-security-policy: default-src 'none'; script-src 'sha256-",
            "require-trusted-types-for 'script'; trusted-types 'none'",
            "frame-ancestors 'none'",
            "x-content-type-options: nosniff",
            "referrer-policy: no-referrer",
            "cache-control: no-store",
            "cross-origin-resource-policy: same-origin",
        ] {
            assert!(head.contains(header), "{header}: {head}");
        }
        assert!(!head.contains("unsafe"), "{head}");
        let (head, body) = request(address, "HEAD /", "Host: localhost\r\n");
        assert!(head.contains("text/html") && body.is_empty(), "{head}");
        for path in ["/", EVENTS_PATH, PATH] {
            for method in ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT"] {
                let (head, _) = request(address, &format!("{method} {path}"), "Host: localhost\r\n");
                assert!(!head.starts_with("http/1.1 200"), "{method} {path}: {head}");
            }
        }
    }

    #[test]
    fn names_of_other_hosts_are_rejected() {
        let (address, _root) = start();
        for host in ["localhost", "LOCALHOST:8080", "127.0.0.1", "[::1]:19750", "192.0.2.1:80"] {
            let (head, _) = request(address, "GET /", &format!("Host: {host}\r\n"));
            assert!(head.starts_with("http/1.1 200"), "{host}: {head}");
        }
        let line = |host: &str| format!("Host: {host}\r\n");
        let mut bad: Vec<_> =
            ["example.org", "localhost.example.org", "127.0.0.1.example.org", "a@localhost", "", "[::1"]
                .map(line)
                .into();
        bad.extend([String::new(), "Host: localhost\r\nHost: example.org\r\n".to_owned()]);
        for headers in bad {
            for path in ["/", EVENTS_PATH, PATH] {
                let (head, body) = request(address, &format!("GET {path}"), &headers);
                assert!(head.starts_with("http/1.1 40"), "{path} {headers}: {head}");
                assert!(!body.contains("rekindle_") && !body.contains("<html"), "{path} {headers}");
            }
        }
    }

    /// Connects to the events; returns the connection after the head of the answer.
    fn open_events(address: SocketAddr) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream.write_all(format!("GET {EVENTS_PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).unwrap();
        let mut reader = BufReader::new(stream);
        wait_for(&mut reader, "\r\n");
        reader
    }

    /// Reads lines until one contains `text`, and returns that line.
    fn wait_for(reader: &mut impl BufRead, text: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(reader.read_line(&mut line).unwrap() > 0, "the stream has ended before {text}");
            if line.contains(text) {
                return line;
            }
        }
    }

    #[test]
    fn a_change_of_a_run_directory_reaches_an_open_page() {
        let (address, root) = start();
        let mut events = open_events(address);
        wait_for(&mut events, "event: start");
        wait_for(&mut events, "event: complete");
        let rundir = RunDir::new(&root.path().join("vms"), "<b>web");
        rundir.create().unwrap();
        fs::write(rundir.file("state.json"), include_str!("../tests/state.json")).unwrap();
        wait_for(&mut events, "event: guests");
        let guests = wait_for(&mut events, "data: ");
        let guests: serde_json::Value = serde_json::from_str(guests.trim().trim_start_matches("data: ")).unwrap();
        assert_eq!(guests[0]["name"], "<b>web");
        assert_eq!(guests[0]["state"]["text"], "ended");
        assert_eq!(guests[0]["qemu"], "10.0.2");
        // Another page starts with it.
        let mut other = open_events(address);
        assert!(wait_for(&mut other, "web").contains("\"ended\""));
        fs::remove_dir_all(rundir.path()).unwrap();
        wait_for(&mut events, "event: removed");
        wait_for(&mut other, "event: removed");
    }

    #[test]
    fn events_are_limited_and_not_for_other_sites() {
        let (address, _root) = start();
        let (head, body) = request(address, &format!("HEAD {EVENTS_PATH}"), "Host: localhost\r\n");
        assert!(head.contains("content-type: text/event-stream") && body.is_empty(), "{head}");
        for site in ["cross-site", "same-site", ""] {
            let headers = format!("Host: localhost\r\nSec-Fetch-Site: {site}\r\n");
            let (head, _) = request(address, &format!("GET {EVENTS_PATH}"), &headers);
            assert!(head.starts_with("http/1.1 403"), "{head}");
        }
        let pages: Vec<_> = (0..MAX_PAGES).map(|_| open_events(address)).collect();
        let (head, _) = request(address, &format!("GET {EVENTS_PATH}"), "Host: localhost\r\n");
        assert!(head.starts_with("http/1.1 503") && head.contains("retry-after"), "{head}");
        // Scrapes are answered meanwhile.
        let (head, _) = request(address, &format!("GET {PATH}"), "Host: localhost\r\n");
        assert!(head.starts_with("http/1.1 200"), "{head}");
        drop(pages);
        let is_accepted = || {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(format!("GET {EVENTS_PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).unwrap();
            let mut status = String::new();
            BufReader::new(stream).read_line(&mut status).unwrap();
            status.contains(" 200 ").then_some(())
        };
        rekindle_testing::wait_for("a place of a page that was closed", DEADLINE, is_accepted);
    }
}
