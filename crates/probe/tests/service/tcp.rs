//! `tcp://`: connecting without sending, and its possible outcomes.

use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rekindle_probe::{CheckError, Failure, Options, Probe, Target, check};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, listen, socket_with};

use crate::server::{Server, brisk, stop_once, until};

/// Returns a port that is taken but on which no process listens.
fn deaf_port() -> (OwnedFd, u16) {
    let fd = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    bind(&fd, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = SocketAddrV4::try_from(getsockname(&fd).unwrap()).unwrap();
    (fd, address.port())
}

#[test]
fn every_request_is_a_connection() {
    let server = Server::start(|_, _| Ok(()));
    let probe = Probe::start(&server.target("tcp"), brisk()).unwrap();
    let report = stop_once(probe, |seen| seen.answered >= 100);
    assert_eq!((report.failed.total(), report.connections_lost), (0, 0));
    assert_eq!(report.connections_opened, report.answered);
}

#[test]
fn an_ipv6_address_in_brackets_is_reached() {
    // Some machines that run the tests have no IPv6.
    let Ok(listener) = TcpListener::bind("[::1]:0") else { return };
    let server = Server::on(listener, |_, _| Ok(()));
    let target = server.target("tcp");
    assert!(target.to_string().starts_with("tcp://[::1]:"));
    check(&target, Duration::from_secs(60), None).unwrap();
}

#[test]
fn a_name_is_resolved() {
    let server = Server::start(|_, _| Ok(()));
    // If `localhost` also resolves to `::1`, where the connection is refused, the other address is tried.
    let target: Target = format!("tcp://localhost:{}", server.target("tcp").port()).parse().unwrap();
    check(&target, Duration::from_secs(60), None).unwrap();
    let unknown = check(&"tcp://no-such-host.invalid:1".parse().unwrap(), Duration::from_secs(60), None);
    assert!(matches!(unknown, Err(CheckError::Resolve(_))), "{unknown:?}");
}

#[test]
fn refusals_are_counted_until_a_server_listens() {
    let (fd, port) = deaf_port();
    let target: Target = format!("tcp://127.0.0.1:{port}").parse().unwrap();
    let refused = check(&target, Duration::from_secs(60), None);
    assert!(matches!(refused, Err(CheckError::Unhealthy { source: Failure::Refused, .. })), "{refused:?}");

    let probe = Probe::start(&target, brisk()).unwrap();
    until(|| probe.snapshot().failed.refused >= 5, || format!("{:#?}", probe.snapshot()));
    assert_eq!(probe.snapshot().answered, 0);
    listen(&fd, 128).unwrap();
    let report = stop_once(probe, |seen| seen.answered >= 10);
    assert_eq!(report.failed.total(), report.failed.refused);
    assert_eq!(report.connections_lost, 0);
    // At least 1 + 2 + 4 ms of backoff passed before the fifth refusal.
    assert!(report.longest_gap_us >= 7_000);
}

#[test]
fn an_unanswered_syn_is_sent_anew_and_fails_nothing() {
    // If its queue is full, a listener leaves SYNs unanswered.
    let (fd, port) = deaf_port();
    listen(&fd, 0).unwrap();
    let listener = TcpListener::from(fd);
    let address = listener.local_addr().unwrap();
    let mut queued = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(100)) {
        queued.push(stream);
    }
    let target: Target = format!("tcp://127.0.0.1:{port}").parse().unwrap();
    let attempt = Duration::from_millis(10);
    let probe = Probe::start(&target, Options { connect_attempt: attempt, ..brisk() }).unwrap();
    until(|| probe.snapshot().elapsed_us >= 50_000, || "time stands still".to_owned());
    assert_eq!((probe.snapshot().sent, probe.snapshot().in_flight), (1, 1));

    let _server = Server::on(listener, |_, _| Ok(()));
    let report = stop_once(probe, |seen| seen.answered >= 10);
    assert_eq!(report.failed.total(), 0);
    assert!(report.longest_gap_us >= 50_000);
}
