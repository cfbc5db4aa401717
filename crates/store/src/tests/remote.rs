//! Stores on a server: same behaviour as in a directory, and failures of the connection.

use super::model::{block, content, vm};
use crate::admin;
use crate::error::StoreError;
use crate::export::export;
use crate::reader::{Image, ReadOptions};
use crate::remote::connection::Connection;
use crate::remote::protocol::{Kind, Purpose, VERSION};
use crate::remote::server::{Server, Stop, Timeouts};
use crate::remote::{ConnectionError, Identity, SpareConnections};
use crate::types::{Guest, OnlyIf, Owner};
use crate::url::StoreUrl;
use crate::writer::{Options, Writer};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};
use rekindle_pages::{BlockId, PAGE_SIZE, Page, PageNo};
use serde_json::json;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A certificate authority, which signs the certificates of a test.
struct Authority {
    directory: TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::OrganizationName, name);
        let key = KeyPair::generate().unwrap();
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        Self { directory, issuer: Issuer::new(params, key) }
    }

    fn ca(&self) -> PathBuf {
        self.directory.path().join("ca.pem")
    }

    /// Returns a certificate for `name` that is valid until `year`.
    fn sign(&self, name: &str, year: i32) -> Identity {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.not_after = date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().unwrap();
        let path = |what: &str| self.directory.path().join(format!("{name}-{year}.{what}"));
        fs::write(path("pem"), params.signed_by(&key, &self.issuer).unwrap().pem()).unwrap();
        fs::write(path("key"), key.serialize_pem()).unwrap();
        Identity { cert: path("pem"), key: path("key"), ca: self.ca() }
    }
}

/// A server that is stopped on drop.
struct Running {
    address: SocketAddr,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn new(directory: &Path, identity: &Identity, patience: Timeouts) -> Self {
        let server = Server::bind("127.0.0.1:0", directory, identity).unwrap().with_patience(patience);
        let (address, stop) = (server.address().unwrap(), server.stopper());
        let thread = Some(thread::spawn(move || server.run().unwrap()));
        Self { address, stop, thread }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// A proxy that forwards bytes to a server, and closes the connection after a number of bytes.
struct Cutter {
    address: SocketAddr,
    left: Arc<AtomicI64>,
}

impl Cutter {
    fn new(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let left = Arc::new(AtomicI64::new(i64::MAX));
        let shared = left.clone();
        // This thread ends with the process.
        thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(to)) else { continue };
                let left = shared.clone();
                let (mut from, mut into) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                thread::spawn(move || {
                    let mut buffer = [0; 512];
                    while let Ok(n @ 1..) = from.read(&mut buffer) {
                        if left.fetch_sub(n as i64, Ordering::SeqCst) < n as i64
                            || into.write_all(&buffer[..n]).is_err()
                        {
                            break;
                        }
                    }
                    let _ = (from.shutdown(Shutdown::Both), into.shutdown(Shutdown::Both));
                });
                let (mut from, mut into) = (server, client);
                thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut into);
                    let _ = (from.shutdown(Shutdown::Both), into.shutdown(Shutdown::Both));
                });
            }
        });
        Self { address, left }
    }
}

fn url(address: SocketAddr, name: &str) -> StoreUrl {
    format!("tls://127.0.0.1:{}/{name}", address.port()).parse().unwrap()
}

fn options(identity: &Identity, operation: &str) -> Options {
    Options { keep: 3, identity: Some(identity.clone()), create: true, ..Options::new(vm(), operation) }
}

fn which(identity: &Identity) -> ReadOptions {
    ReadOptions { identity: Some(identity.clone()), ..ReadOptions::default() }
}

const PAGES: u64 = 600;
/// Position of the first block.
const RAM: BlockId = BlockId(0);

fn pages(round: u64) -> Vec<(u64, Page)> {
    (0..PAGES)
        .filter(|page| !(page + round).is_multiple_of(3))
        .map(|page| (page, content(page * 7 % 60 + round)))
        .collect()
}

fn commit(writer: &mut Writer, round: u64) -> crate::Result<crate::types::Committed> {
    let mut checkpoint = writer.begin(&[block("ram", PAGES), block("bios", 4)])?;
    checkpoint.pages(RAM, pages(round).iter().map(|(page, content)| (PageNo(*page), content)))?;
    let devices = [b"QEVM\0\0\0\x03".to_vec(), vec![round as u8 + 1; 50_000], vec![0]].concat();
    checkpoint.commit(&json!({"name": "web"}), &json!({"round": round}), &devices)
}

/// Returns the expected content after `rounds` commits, page by page.
fn expected(rounds: u64) -> Vec<Page> {
    let mut all = vec![[0; PAGE_SIZE]; PAGES as usize];
    for round in 0..rounds {
        pages(round).into_iter().for_each(|(page, content)| all[page as usize] = content);
    }
    all
}

fn check(image: &Image, rounds: u64) {
    let all = expected(rounds);
    assert_eq!(image.info().number, rounds);
    let mut seen = 0;
    image
        .read_pages(RAM, PageNo(0)..PageNo(PAGES), |page, content| {
            assert!(*content == all[page.0 as usize], "page {page}");
            seen += 1;
        })
        .unwrap();
    assert_eq!(seen, PAGES);
    let mut content = [1; PAGE_SIZE];
    for page in (0..PAGES).rev().step_by(7) {
        image.read_page((RAM, PageNo(page)), &mut content).unwrap();
        assert!(content == all[page as usize], "page {page}");
    }
    assert_eq!(image.metadata().unwrap(), json!({"round": rounds - 1}));
    assert_eq!(image.devices().unwrap()[9], rounds as u8);
}

#[test]
fn a_store_on_a_server_is_as_one_in_a_directory() {
    let authority = Authority::new("ours");
    let directory = tempfile::tempdir().unwrap();
    let (server, client) = (authority.sign("127.0.0.1", 2100), authority.sign("client", 2100));
    let running = Running::new(directory.path(), &server, Timeouts::default());
    let there = url(running.address, "web");
    let here = StoreUrl::Directory(directory.path().join("web"));
    let mut writer = Writer::open(&there, &options(&client, "protect web")).unwrap();
    for round in 0..4 {
        assert_eq!(writer.next_number(), round + 1);
        commit(&mut writer, round).unwrap();
    }
    // Unchanged pages are not sent, so the client must report their number to the server.
    let again = commit(&mut writer, 3).unwrap();
    assert_eq!((again.pages.stored, again.pages.zero), (0, 0));
    assert_eq!(again.pages.unchanged, pages(3).len() as u64);
    // A later writer does not send them either.
    drop(writer);
    let mut writer = Writer::open(&there, &options(&client, "protect web")).unwrap();
    let again = commit(&mut writer, 3).unwrap();
    assert_eq!((again.number, again.pages.stored, again.pages.zero), (6, 0, 0));
    commit(&mut writer, 4).unwrap();
    // An aborted checkpoint leaves no trace.
    let mut checkpoint = writer.begin(&[block("ram", PAGES), block("bios", 4)]).unwrap();
    checkpoint.pages(RAM, [(PageNo(0), &content(5))]).unwrap();
    drop(checkpoint);
    writer.settle().unwrap();

    let remote = Image::open(&there, &which(&client)).unwrap();
    let local = Image::open(&here, &ReadOptions::default()).unwrap();
    assert_eq!((remote.info(), remote.vm()), (local.info(), local.vm()));
    assert_eq!(remote.definition().unwrap(), local.definition().unwrap());
    let hot = |image: &Image| image.hot().collect::<crate::Result<Vec<_>>>().unwrap();
    assert_eq!(hot(&remote), hot(&local));
    assert!(hot(&remote).len() > 500);
    let exported = |image: &Image| {
        let mut out = Vec::new();
        export(image, &mut out, None, &mut |_, _| {}).unwrap();
        out
    };
    assert!(exported(&remote) == exported(&local));
    let mut content = [0; PAGE_SIZE];
    for image in [&remote, &local] {
        let e = image.read_page((RAM, PageNo(PAGES)), &mut content).unwrap_err();
        assert_eq!(e.kind(), "no-such-page", "{e}");
        assert!(e.to_string().contains("600"), "{e}");
    }
    let at = |at| Image::open(&there, &ReadOptions { at: Some(at), ..which(&client) });
    assert_eq!(at(6).unwrap().info().number, 6);
    assert!(matches!(at(2).unwrap_err(), StoreError::NoSuchCheckpoint { have, .. } if have == [5, 6, 7]));
    let e = Image::open(&url(running.address, "other"), &which(&client)).unwrap_err();
    assert_eq!(e.kind(), "not-a-store", "{e}");

    let listing = admin::listing(&there, Some(&client)).unwrap();
    assert_eq!(listing, admin::listing(&here, None).unwrap());
    assert_eq!(listing.owner.as_ref().unwrap().operation, "protect web");
    assert_eq!(listing.checkpoints.len(), 3);
    let verified = admin::verified(&there, Some(&client), &mut |_, _| {}).unwrap();
    assert!(verified.is_good() && verified.checkpoints == 3 && verified.pages > 500, "{verified:?}");
    // The error that the previous owner gets names the new owner.
    let fenced = admin::fence(&there, &vm(), &Owner::here("restore web"), None, Some(&client)).unwrap();
    assert_eq!(fenced, admin::Fenced { epoch: 3, newest: 7 });
    let e = commit(&mut writer, 5).unwrap_err();
    assert_eq!(super::model::owner_of(&e), Some((2, 3, "restore web")), "{e}");
    assert!(admin::compact(&there, Some(&client)).is_ok());
    check_rest(&there, &client);
}

fn check_rest(there: &StoreUrl, client: &Identity) {
    for lazy in [false, true] {
        let image = Image::open(there, &ReadOptions { lazy, ..which(client) }).unwrap();
        assert_eq!(image.info().number, 7);
        assert_eq!(image.hot().count(), Image::open(there, &which(client)).unwrap().hot().count());
        let all = expected(5);
        let mut given: Vec<_> =
            all.iter().zip((0..).map(PageNo)).map(|(content, page)| ((RAM, page), content)).collect();
        assert!(image.unlike(&given).unwrap().is_empty());
        given[3].1 = &[9; PAGE_SIZE];
        assert_eq!(image.unlike(&given).unwrap(), [(RAM, PageNo(3))]);
        assert_eq!(image.unlike(&[((RAM, PageNo(PAGES)), &[0; PAGE_SIZE])]).unwrap_err().kind(), "no-such-page");
        let mut content = [0; PAGE_SIZE];
        for page in 0..PAGES {
            image.read_page((RAM, PageNo(page)), &mut content).unwrap();
            assert!(content == all[page as usize]);
        }
    }
}

#[test]
fn a_connection_that_fails_anywhere_costs_only_the_open_checkpoint() {
    let authority = Authority::new("ours");
    let directory = tempfile::tempdir().unwrap();
    let (server, client) = (authority.sign("127.0.0.1", 2100), authority.sign("client", 2100));
    let running = Running::new(directory.path(), &server, Timeouts::default());
    let cutter = Cutter::new(running.address);
    let there = url(cutter.address, "web");
    let mut writer = Writer::open(&there, &options(&client, "protect web")).unwrap();
    commit(&mut writer, 0).unwrap();
    let mut committed = 1;
    let mut lost = 0;
    let cuts = [0, 300, 900, 2_000, 4_000, 9_000].into_iter().chain((1..).map(|n| n * 70_000));
    for cut in cuts {
        cutter.left.store(cut, Ordering::SeqCst);
        let epoch = writer.epoch();
        let done = commit(&mut writer, committed);
        let whole = cutter.left.swap(i64::MAX, Ordering::SeqCst) >= 0;
        match done {
            Ok(done) => {
                committed += 1;
                assert_eq!(done.number, committed);
                if whole {
                    break;
                }
            }
            Err(e @ StoreError::Connection { .. }) => {
                lost += 1;
                // The newest checkpoint is the last committed one, or the next one if only the answer to its commit was
                // lost.
                let image = Image::open(&url(running.address, "web"), &which(&client)).unwrap();
                assert!((committed..=committed + 1).contains(&image.info().number), "{e}");
                committed = image.info().number;
                check(&image, committed);
            }
            Err(e) => panic!("cut after {cut}: {e}"),
        }
        // The writer continues as the same owner with a new epoch.
        let done = commit(&mut writer, committed).unwrap_or_else(|e| panic!("after the cut at {cut}: {e}"));
        committed += 1;
        assert_eq!(done.number, committed);
        assert!(writer.epoch() > epoch || whole);
    }
    assert!(lost > 3, "{lost} of them were cut");
    // Reading continues over a new connection as well.
    let image = Image::open(&there, &which(&client)).unwrap();
    for cut in [0, 700, 2_000, 5_000] {
        cutter.left.store(cut, Ordering::SeqCst);
        let mut content = [0; PAGE_SIZE];
        let failed =
            (0..PAGES).step_by(40).filter(|page| image.read_page((RAM, PageNo(*page)), &mut content).is_err()).count();
        cutter.left.store(i64::MAX, Ordering::SeqCst);
        assert!(failed > 0 || cut > 0);
        check(&image, committed);
    }
    // The writer does not continue if the store had another owner meanwhile.
    cutter.left.store(0, Ordering::SeqCst);
    assert!(matches!(commit(&mut writer, 9), Err(StoreError::Connection { .. })));
    cutter.left.store(i64::MAX, Ordering::SeqCst);
    admin::fence(&there, &vm(), &Owner::here("restore web"), None, Some(&client)).unwrap();
    let e = commit(&mut writer, 9).unwrap_err();
    assert!(super::model::owner_of(&e).is_some_and(|(_, _, operation)| operation == "restore web"), "{e}");
}

#[test]
fn a_guest_that_begins_elsewhere_ends_the_one_before_through_a_server_too() {
    let authority = Authority::new("ours");
    let directory = tempfile::tempdir().unwrap();
    let (server, client) = (authority.sign("127.0.0.1", 2100), authority.sign("client", 2100));
    let running = Running::new(directory.path(), &server, Timeouts::default());
    let cutter = Cutter::new(running.address);
    let there = url(cutter.address, "web");
    let begin = |operation: &str, guest, only_if| {
        admin::fence(&there, &vm(), &Owner::here(operation).with(guest), only_if, Some(&client))
    };
    // A boot uses a store that was created before, and does not create a store itself.
    assert_eq!(begin("start web", Guest::Booted, None).unwrap_err().kind(), "not-a-store");
    admin::init(&there, Some(&client)).unwrap();
    assert_eq!(begin("start web", Guest::Booted, None).unwrap().epoch, 1);
    let options = Options { only_if: Some(OnlyIf::Run { run: 1 }), ..options(&client, "protect web") };
    let mut writer = Writer::open(&there, &options).unwrap();
    commit(&mut writer, 0).unwrap();
    let restorable = || admin::listing(&there, Some(&client)).unwrap().restorable();
    assert_eq!(restorable(), Some(1));
    // The claim of a new connection records no new boot of the guest.
    cutter.left.store(0, Ordering::SeqCst);
    assert!(matches!(commit(&mut writer, 1), Err(StoreError::Connection { .. })));
    cutter.left.store(i64::MAX, Ordering::SeqCst);
    commit(&mut writer, 1).unwrap();
    assert_eq!((writer.epoch(), restorable()), (3, Some(2)));
    assert_eq!(begin("restore web", Guest::Restored, None).unwrap().epoch, 4);
    let e = commit(&mut writer, 2).unwrap_err();
    assert_eq!(e.guest_is_over(1).map(|owner| (owner.run, owner.boot)), Some((4, 1)), "{e}");
    let e = Writer::open(&there, &options).unwrap_err();
    assert!(e.guest_is_over(1).is_some(), "{e}");
    let e = begin("stop web", Guest::Ended, Some(OnlyIf::Run { run: 1 })).unwrap_err();
    assert!(e.guest_is_over(1).is_some(), "{e}");
    assert_eq!(restorable(), Some(2));
    begin("stop web", Guest::Ended, Some(OnlyIf::Run { run: 4 })).unwrap();
    assert_eq!(restorable(), None);
}

#[test]
fn a_spare_connection_is_used_once_and_for_its_server_only() {
    let authority = Authority::new("ours");
    let directory = tempfile::tempdir().unwrap();
    let (server, client) = (authority.sign("127.0.0.1", 2100), authority.sign("client", 2100));
    let running = Running::new(directory.path(), &server, Timeouts::default());
    let there = url(running.address, "web");
    commit(&mut Writer::open(&there, &options(&client, "protect web")).unwrap(), 0).unwrap();
    // Opening a new connection requires a certificate, so that success without one means that a spare connection was
    // used.
    let spare = SpareConnections::default();
    let open =
        |spare: &SpareConnections| Image::open(&there, &ReadOptions { spare: spare.clone(), ..ReadOptions::default() });
    let refused = |e: StoreError| matches!(e, StoreError::Connection { source: ConnectionError::NoIdentity, .. });
    assert!(refused(open(&spare).unwrap_err()));
    spare.make(&there, Some(&client), 2).unwrap();
    check(&open(&spare).unwrap(), 1);
    let owner = Owner::here("move web").with(Guest::Restored);
    let fence = |to: &StoreUrl| admin::fence_over(&spare, to, &vm(), &owner, Some(OnlyIf::Epoch(1)), None);
    let other = Running::new(directory.path(), &server, Timeouts::default());
    assert!(refused(fence(&url(other.address, "web")).unwrap_err()), "it leads elsewhere");
    assert_eq!(fence(&there).unwrap().epoch, 2);
    assert!(refused(open(&spare).unwrap_err()), "there were two");
    // A spare connection to a server that has stopped is not usable.
    spare.make(&there, Some(&client), 1).unwrap();
    drop(running);
    assert!(matches!(open(&spare).unwrap_err(), StoreError::Connection { .. }));
    spare.make(&StoreUrl::Directory(directory.path().join("web")), None, 2).unwrap();
}

#[test]
fn errors_about_unsuitable_certificates_name_the_remedy() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let directory = tempfile::tempdir().unwrap();
    let good = ours.sign("127.0.0.1", 2100);
    let client = ours.sign("client", 2100);
    let running = Running::new(directory.path(), &good, Timeouts::default());
    let there = url(running.address, "web");
    let message = |there: &StoreUrl, identity: Option<Identity>| {
        let e = admin::listing(there, identity.as_ref()).unwrap_err();
        let StoreError::Connection { source, .. } = e else { panic!("{e}") };
        source.to_string()
    };
    let listed = admin::listing(&there, Some(&client)).unwrap_err();
    assert_eq!(listed.kind(), "not-a-store", "{listed}");
    for (identity, words) in [
        (None, ["--cert", "--key"]),
        // The client's certificate is signed by another authority.
        (
            Some(Identity { ca: ours.ca(), ..theirs.sign("client", 2100) }),
            ["does not know the authority", "--client-ca"],
        ),
        // The server's certificate is signed by another authority.
        (Some(Identity { ca: theirs.ca(), ..client.clone() }), ["not signed by the configured authority", "--ca"]),
        (Some(ours.sign("client", 2001)), ["certificate has expired", "renew"]),
        (Some(Identity { cert: "/nowhere.pem".into(), ..client.clone() }), ["/nowhere.pem", "certificate"]),
        (Some(Identity { key: good.key.clone(), ..client.clone() }), ["client-2100.pem", "key"]),
        (Some(Identity { ca: client.key.clone(), ..client.clone() }), ["client-2100.key", "certificate"]),
    ] {
        let text = message(&there, identity);
        assert!(words.iter().all(|word| text.contains(word)), "{text} has not {words:?}");
    }
    for (name, year, words) in [("elsewhere", 2100, "for another name"), ("127.0.0.1", 2001, "has expired")] {
        let running = Running::new(directory.path(), &ours.sign(name, year), Timeouts::default());
        let text = message(&url(running.address, "web"), Some(client.clone()));
        assert!(text.contains(words), "{text}");
    }
    // Another program listens on the port, or none.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap();
    let chatter = thread::spawn(move || other.accept().unwrap().0.write_all(b"220 mail ready\r\n").unwrap());
    let text = message(&url(address, "web"), Some(client.clone()));
    assert!(text.contains("does not speak TLS") || text.contains("closed"), "{text}");
    chatter.join().unwrap();
    let text = message(&url(address, "web"), Some(client));
    assert!(text.contains("rekindle store serve"), "{text}");
    // The server still accepts connections.
    assert!(TcpStream::connect(running.address).is_ok());
    let e =
        Server::bind("127.0.0.1:0", directory.path(), &Identity { key: "/nowhere.key".into(), ..good }).unwrap_err();
    assert!(e.to_string().contains("/nowhere.key"), "{e}");
}

#[test]
fn a_silent_client_is_dropped() {
    let authority = Authority::new("ours");
    let directory = tempfile::tempdir().unwrap();
    let (server, client) = (authority.sign("127.0.0.1", 2100), authority.sign("client", 2100));
    let soon = Duration::from_millis(100);
    let running = Running::new(directory.path(), &server, Timeouts { within: soon, idle: soon });
    let there = url(running.address, "web");
    // A client that sends no greeting is disconnected.
    let mut mute = TcpStream::connect(running.address).unwrap();
    mute.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    while !matches!(mute.read(&mut [0; 100]), Ok(0) | Err(_)) {}
    // A silent writer is disconnected and its checkpoint aborted. It reconnects for the next checkpoint.
    let mut writer = Writer::open(&there, &options(&client, "protect web")).unwrap();
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
    assert_eq!(Image::open(&there, &which(&client)).unwrap().info().number, 2);
}

/// Returns a connection to a server, after a greeting with `purpose` if there is one.
fn raw(address: SocketAddr, client: &Identity, purpose: Option<Purpose>) -> Connection {
    let StoreUrl::Remote(remote) = url(address, "web") else { panic!("not a server") };
    let mut connection = Connection::connect(&remote, Some(client)).unwrap();
    if let Some(purpose) = purpose {
        let hello = crate::remote::protocol::Hello { version: VERSION, name: remote.name, purpose };
        connection.ask_json::<serde_json::Value>("test", Kind::Hello, &hello, Kind::Welcome).unwrap();
    }
    connection
}

/// Returns both ends of a connection: the server's, which has the time limit `within`, and the client's.
fn ends(within: Duration) -> (Connection, Connection) {
    let authority = Authority::new("ours");
    let (server, client) = (authority.sign("127.0.0.1", 2100), authority.sign("client", 2100));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let config = server.server().unwrap();
    let accepted = thread::spawn(move || Connection::accept(listener.accept().unwrap().0, config, within).unwrap());
    let client = raw(address, &client, None);
    (accepted.join().unwrap(), client)
}

/// Calls `step` every millisecond until it fails, for at most 10 s. Returns whether it has failed.
fn repeat(mut step: impl FnMut() -> bool + Send + 'static) -> JoinHandle<bool> {
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

const SOON: Duration = Duration::from_millis(300);

#[test]
fn a_frame_that_comes_byte_by_byte_ends_the_connection() {
    for client_drips in [true, false] {
        let (server, client) = ends(SOON);
        let (mut dripping, mut connection) = if client_drips { (client, server) } else { (server, client) };
        connection.limit(SOON, 1 << 20);
        dripping.send_length(Kind::Pages.limit() as u32, Kind::Pages.code()).unwrap();
        let drip = repeat(move || dripping.send_raw(&[0]).is_ok());
        let e = connection.receive().unwrap_err();
        assert!(matches!(e, ConnectionError::Slow { .. }), "{e}");
        drop(connection);
        drip.join().unwrap();
    }
}

#[test]
fn a_peer_that_takes_a_frame_byte_by_byte_ends_the_connection() {
    let (mut connection, mut client) = ends(SOON);
    connection.limit(SOON, 1 << 30);
    let drip = repeat(move || client.receive_raw(&mut [0; 512]).is_ok_and(|n| n > 0));
    let e = connection.send(Kind::Verified, &[&vec![0; Kind::Verified.limit()]]).unwrap_err();
    assert!(matches!(e, ConnectionError::Slow { .. }), "{e}");
    drop(connection);
    drip.join().unwrap();
}

#[test]
fn a_handshake_that_comes_byte_by_byte_is_dropped() {
    let authority = Authority::new("ours");
    let directory = tempfile::tempdir().unwrap();
    let patience = Timeouts { within: SOON, idle: SOON };
    let running = Running::new(directory.path(), &authority.sign("127.0.0.1", 2100), patience);
    let mut client = TcpStream::connect(running.address).unwrap();
    // The header of a TLS record of 16 KiB.
    client.write_all(&[22, 3, 1, 0x40, 0]).unwrap();
    assert!(repeat(move || client.write_all(&[0]).is_ok()).join().unwrap(), "the server still listens to it");
}

#[test]
fn a_peer_that_works_without_end_is_disconnected() {
    for server_works in [true, false] {
        let (server, client) = ends(SOON);
        let (mut busy, mut connection) = if server_works { (server, client) } else { (client, server) };
        let work = repeat(move || busy.send(Kind::Busy, &[]).is_ok());
        // A client must not report that it is working.
        let e = if server_works { connection.receive_within(SOON) } else { connection.receive() }.unwrap_err();
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
    let running = Running::new(directory.path(), &server, Timeouts::default());
    let there = url(running.address, "web");
    let mut writer = Writer::open(&there, &options(&client, "protect web")).unwrap();
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
            2 => Some(Purpose::Read { vm: None, at: None, lazy: false }),
            _ => Some(Purpose::Write {
                vm: vm(),
                owner: Owner::here("odd"),
                only_if: None,
                keep: 3,
                segment: 0,
                create: true,
            }),
        };
        let mut connection = raw(running.address, &client, purpose);
        for (kind, payload) in messages.new_tree(&mut runner).unwrap().current() {
            let kind = Kind::ALL[kind];
            if connection.send(kind, &[&payload[..payload.len().min(kind.limit())]]).is_err() {
                break;
            }
        }
    }
    // Frames with a length beyond the limit are rejected.
    for kind in Kind::ALL {
        let mut connection = raw(running.address, &client, Some(Purpose::Inspect));
        let text = connection.send_length(u32::MAX, kind.code()).and_then(|()| connection.receive());
        assert!(!matches!(text, Ok(Some((kind, _))) if kind != Kind::Failure));
    }
    check(&Image::open(&there, &which(&client)).unwrap(), 1);
    assert!(admin::verified(&there, Some(&client), &mut |_, _| {}).unwrap().is_good());
    // A greeting with another protocol version is rejected.
    let StoreUrl::Remote(remote) = there else { panic!("not a server") };
    let mut connection = Connection::connect(&remote, Some(&client)).unwrap();
    let hello = crate::remote::protocol::Hello { version: VERSION + 1, name: remote.name, purpose: Purpose::Inspect };
    let e = connection.ask_json::<serde_json::Value>("test", Kind::Hello, &hello, Kind::Welcome).unwrap_err();
    assert!(e.to_string().contains(&format!("protocol version {}", VERSION + 1)), "{e}");
    assert!(matches!(connection.receive(), Ok(None) | Err(ConnectionError::Closed)));
}
