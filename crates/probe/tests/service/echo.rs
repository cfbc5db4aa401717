//! `echo://`: numbered messages that the service must return.

use std::io::{Read, Write};
use std::time::Duration;

use rekindle_probe::{Options, Probe};

use crate::server::{Server, brisk, stop_once};

#[test]
fn messages_come_back_on_one_connection() {
    let server = Server::echo(|_, _| {});
    let probe = Probe::start(&server.target("echo"), Options { connections: 2, ..brisk() }).unwrap();
    let report = stop_once(probe, |seen| seen.answered >= 200);
    assert_eq!(report.failed.total(), 0);
    assert_eq!((report.connections_opened, report.connections_lost), (2, 0));
}

#[test]
fn an_echo_in_pieces_is_one_answer() {
    let server = Server::start(|mut stream, _| {
        let mut byte = [0];
        while stream.read(&mut byte)? == 1 {
            stream.write_all(&byte)?;
        }
        Ok(())
    });
    let probe = Probe::start(&server.target("echo"), brisk()).unwrap();
    let report = stop_once(probe, |seen| seen.answered >= 20);
    assert_eq!((report.failed.total(), report.connections_opened), (0, 1));
}

#[test]
fn a_wrong_echo_is_wrong_content_and_no_lost_connection() {
    let server = Server::echo(|number, bytes| {
        if number == 3 {
            bytes[20] ^= 1;
        }
    });
    let probe = Probe::start(&server.target("echo"), brisk()).unwrap();
    let report = stop_once(probe, |seen| seen.failed.wrong_content >= 2);
    assert_eq!(report.failed.total(), report.failed.wrong_content);
    assert!(report.answered >= 6);
    assert_eq!(report.connections_lost, 0);
    assert!(report.first_failure.unwrap().contains("is no echo of"));
}

#[test]
fn an_echo_too_many_is_wrong_content() {
    let server = Server::echo(|number, bytes| {
        if number == 3 {
            bytes.extend_from_slice(b"more");
        }
    });
    let probe = Probe::start(&server.target("echo"), brisk()).unwrap();
    let report = stop_once(probe, |seen| seen.failed.wrong_content >= 1);
    assert_eq!((report.failed.total(), report.connections_lost), (report.failed.wrong_content, 0));
}

#[test]
fn a_reset_is_counted_and_probing_continues() {
    // Closing with unread bytes sends a reset.
    let server = Server::start(|mut stream, number| {
        let mut message = [0; 37];
        if number == 0 {
            return stream.read_exact(&mut message[..1]);
        }
        loop {
            stream.read_exact(&mut message)?;
            stream.write_all(&message)?;
        }
    });
    let probe = Probe::start(&server.target("echo"), Options { every: Duration::from_micros(100), ..brisk() }).unwrap();
    let report = stop_once(probe, |seen| seen.answered >= 100);
    assert_eq!((report.failed.resets, report.failed.total()), (1, 1));
    assert_eq!((report.connections_opened, report.connections_lost), (2, 1));
}
