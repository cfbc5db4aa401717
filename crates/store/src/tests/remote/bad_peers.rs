//! Peers that are silent, too slow, or send messages that make no sense.

use super::{Authority, PAGES, RAM, RunningServer, check, commit, options, read_options, url};
use crate::admin;
use crate::error::StoreError;
use crate::reader::Image;
use crate::remote::connection::Connection;
use crate::remote::identity::LocalEnd;
use crate::remote::protocol::{CheckpointRequest, Hello, Kind, Purpose, VERSION};
use crate::remote::server::Timeouts;
use crate::remote::{ConnectionError, Identity};
use crate::tests::model::{block, content, vm};
use crate::types::Owner;
use crate::url::StoreUrl;
use crate::writer::Writer;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use rekindle_pages::PageNo;
use serde_json::json;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Time limit in these tests.
const SOON: Duration = Duration::from_millis(300);

/// Returns a connection to a server, after a greeting with `purpose` if there is one.
fn connect_and_greet(address: SocketAddr, client: &Identity, purpose: Option<Purpose>) -> Connection {
    let StoreUrl::Remote(remote) = url(address, "web") else { panic!("not a server") };
    let mut connection = Connection::connect(&remote, Some(client)).unwrap();
    if let Some(purpose) = purpose {
        let hello = Hello { version: VERSION, name: remote.name, purpose };
        connection.ask_json::<serde_json::Value>("test", Kind::Hello, &hello, Kind::Welcome).unwrap();
    }
    connection
}

/// Returns both ends of a connection: the server's, which has the time limit `within`, and the client's.
fn connected_pair(within: Duration) -> (Connection, Connection) {
    let authority = Authority::new("ours");
    let (server, client) = (authority.sign("127.0.0.1", 2100), authority.sign("client", 2100));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (config, end) = (server.server().unwrap(), LocalEnd::server(&server.cert));
    let accept = move || Connection::accept(listener.accept().unwrap().0, config, end, within).unwrap();
    let accepted = thread::spawn(accept);
    let client = connect_and_greet(address, &client, None);
    (accepted.join().unwrap(), client)
}

/// Calls `step` every millisecond until it fails, for at most 10 s. Returns whether it has failed.
fn repeat_until_failure(mut step: impl FnMut() -> bool + Send + 'static) -> JoinHandle<bool> {
    thread::spawn(move || {
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            if !step() {
                return true;
            }
            thread::sleep(Duration::from_millis(1));
        }
        false
    })
}

#[test]
fn a_silent_client_is_dropped() {
    let authority = Authority::new("ours");
    let directory = tempfile::tempdir().unwrap();
    let (server, client) = (authority.sign("127.0.0.1", 2100), authority.sign("client", 2100));
    // Much longer than this client takes from one message to the next, on a busy machine too.
    let soon = Duration::from_millis(700);
    let running = RunningServer::new(directory.path(), &server, Timeouts { within: soon, idle: soon });
    let store_url = url(running.address, "web");
    // A client that sends no greeting is disconnected.
    let mut mute = TcpStream::connect(running.address).unwrap();
    mute.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    while !matches!(mute.read(&mut [0; 100]), Ok(0) | Err(_)) {}
    // A silent writer is disconnected and its checkpoint aborted. It reconnects for the next checkpoint.
    let mut writer = Writer::open(&store_url, &options(&client, "protect web")).unwrap();
    commit(&mut writer, 0).unwrap();
    let epoch = writer.epoch();
    let mut checkpoint = writer.begin(&[block("ram", PAGES)]).unwrap();
    checkpoint.pages(RAM, [(PageNo(1), &content(1))]).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let store = directory.path().join("web/segments");
    let partial = |store: &Path| fs::read_dir(store).unwrap().count();
    while partial(&store) > 1 && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(20));
    }
    thread::sleep(soon * 3);
    let e = checkpoint.commit(&json!(0), &json!(0), &[]).unwrap_err();
    assert!(matches!(e, StoreError::Connection { .. }), "{e}");
    commit(&mut writer, 1).unwrap();
    assert!(writer.epoch() > epoch);
    assert_eq!(Image::open(&store_url, &read_options(&client)).unwrap().info().number, 2);
}

#[test]
fn a_frame_that_comes_byte_by_byte_ends_the_connection() {
    for client_drips in [true, false] {
        let (server, client) = connected_pair(SOON);
        let (mut dripping, mut connection) = if client_drips { (client, server) } else { (server, client) };
        connection.limit(SOON, 1 << 20);
        dripping.send_length(Kind::Pages.limit() as u32, Kind::Pages.code()).unwrap();
        let dripper = repeat_until_failure(move || dripping.send_raw(&[0]).is_ok());
        let e = connection.receive().unwrap_err();
        assert!(matches!(e, ConnectionError::Slow { .. }), "{e}");
        drop(connection);
        dripper.join().unwrap();
    }
}

#[test]
fn a_peer_that_takes_a_frame_byte_by_byte_ends_the_connection() {
    let (mut connection, mut client) = connected_pair(SOON);
    connection.limit(SOON, 1 << 30);
    let dripper = repeat_until_failure(move || client.receive_raw(&mut [0; 512]).is_ok_and(|n| n > 0));
    let e = connection.send(Kind::Verified, &[&vec![0; Kind::Verified.limit()]]).unwrap_err();
    assert!(matches!(e, ConnectionError::Slow { .. }), "{e}");
    drop(connection);
    dripper.join().unwrap();
}

#[test]
fn a_handshake_that_comes_byte_by_byte_is_dropped() {
    let authority = Authority::new("ours");
    let directory = tempfile::tempdir().unwrap();
    let timeouts = Timeouts { within: SOON, idle: SOON };
    let running = RunningServer::new(directory.path(), &authority.sign("127.0.0.1", 2100), timeouts);
    let mut client = TcpStream::connect(running.address).unwrap();
    // The header of a TLS record of 16 KiB.
    client.write_all(&[22, 3, 1, 0x40, 0]).unwrap();
    assert!(
        repeat_until_failure(move || client.write_all(&[0]).is_ok()).join().unwrap(),
        "the server still listens to it"
    );
}

#[test]
fn a_peer_that_works_without_end_is_disconnected() {
    for server_works in [true, false] {
        let (server, client) = connected_pair(SOON);
        let (mut busy, mut connection) = if server_works { (server, client) } else { (client, server) };
        let work = repeat_until_failure(move || busy.send(Kind::Busy, &[]).is_ok());
        // A client must not report that it is working.
        let e = if server_works { connection.receive_during_work(SOON) } else { connection.receive() }.unwrap_err();
        assert!(matches!(e, ConnectionError::Slow { .. }), "{e}");
        drop(connection);
        work.join().unwrap();
    }
}

#[test]
fn no_message_of_a_client_harms_the_server_or_the_store() {
    let authority = Authority::new("ours");
    let directory = tempfile::tempdir().unwrap();
    let (server, client) = (authority.sign("127.0.0.1", 2100), authority.sign("client", 2100));
    let running = RunningServer::new(directory.path(), &server, Timeouts::default());
    let store_url = url(running.address, "web");
    let mut writer = Writer::open(&store_url, &options(&client, "protect web")).unwrap();
    commit(&mut writer, 0).unwrap();
    drop(writer);
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), rng);
    let payload = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..300),
        Just(br#"{"blocks":[{"id":"ram","used":17592186044416,"max":17592186044416,"page_size":4096}]}"#.to_vec()),
        Just(br#"{"blocks":[{"id":"ram","used":4096,"max":8192,"page_size":4096}]}"#.to_vec()),
        Just([&1u32.to_le_bytes()[..], &[0; 16]].concat()),
        Just([&u32::MAX.to_le_bytes()[..], &[7; 40]].concat()),
    ];
    let messages = proptest::collection::vec((0..Kind::ALL.len(), payload), 1..6);
    for round in 0..120 {
        let purpose = match round % 4 {
            0 => None,
            1 => Some(Purpose::Inspect),
            2 => Some(Purpose::Read(CheckpointRequest { vm: None, at: None, lazy: false })),
            _ => Some(Purpose::Write {
                vm: vm(),
                owner: Owner::here("odd"),
                only_if: None,
                keep: 3,
                segment: 0,
                create: true,
            }),
        };
        let mut connection = connect_and_greet(running.address, &client, purpose);
        for (kind, payload) in messages.new_tree(&mut runner).unwrap().current() {
            let kind = Kind::ALL[kind];
            if connection.send(kind, &[&payload[..payload.len().min(kind.limit())]]).is_err() {
                break;
            }
        }
    }
    // Frames with a length beyond the limit are rejected.
    for kind in Kind::ALL {
        let mut connection = connect_and_greet(running.address, &client, Some(Purpose::Inspect));
        let text = connection.send_length(u32::MAX, kind.code()).and_then(|()| connection.receive());
        assert!(!matches!(text, Ok(Some((kind, _))) if kind != Kind::Failure));
    }
    check(&Image::open(&store_url, &read_options(&client)).unwrap(), 1);
    assert!(admin::verified(&store_url, Some(&client.clone().into()), &mut |_, _| {}).unwrap().is_good());
    // A greeting with another protocol version is rejected.
    let StoreUrl::Remote(remote) = store_url else { panic!("not a server") };
    let mut connection = Connection::connect(&remote, Some(&client)).unwrap();
    let hello = Hello { version: VERSION + 1, name: remote.name, purpose: Purpose::Inspect };
    let e = connection.ask_json::<serde_json::Value>("test", Kind::Hello, &hello, Kind::Welcome).unwrap_err();
    assert!(e.to_string().contains(&format!("protocol version {}", VERSION + 1)), "{e}");
    assert!(matches!(connection.receive(), Ok(None) | Err(ConnectionError::Closed)));
}
