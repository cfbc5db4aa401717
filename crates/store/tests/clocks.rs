//! Stores while the host's real-time clock jumps by a year, and while certificates expire.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rekindle_pages::{BlockId, PAGE_SIZE, PageNo};
use rekindle_store::remote::Identity;
use rekindle_store::remote::server::{Server, Stop};
use rekindle_store::types::{Block, Guest, Owner, Vm, now_us};
use rekindle_store::{Credentials, Image, Options, ReadOptions, StoreError, StoreUrl, Writer, admin};
use rekindle_testing::shifted_clock::{self, ShiftedClock, YEAR_S};
use serde_json::json;
use std::error::Error;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime};
use std::{env, fs};
use uuid::Uuid;

/// Set in the process that runs the tests with a clock that jumps.
const STARTED: &str = "REKINDLE_TEST_CLOCKS";
const PAGES: u64 = 40;

/// Runs the test `name` again in a process of its own, whose clock jumps. Returns whether this is that process.
fn with_own_clock(name: &str) -> bool {
    if env::var_os(STARTED).is_some() {
        return true;
    }
    let clock = ShiftedClock::new();
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).envs(clock.environment()).env(STARTED, "1");
    assert!(command.status().unwrap().success());
    false
}

/// Lets the clock jump to this offset. Returns the time then.
fn jump_to(offset_s: i64) -> u64 {
    shifted_clock::set_own(offset_s);
    now_us()
}

fn vm() -> Vm {
    Vm { uuid: Uuid::from_u128(7), name: "web".into() }
}

/// Commits a checkpoint whose pages all have this content.
fn commit(writer: &mut Writer, byte: u8) -> rekindle_store::Result<u64> {
    let bytes = PAGES * PAGE_SIZE as u64;
    let mut checkpoint = writer.begin(&[Block { id: "pc.ram".into(), used: bytes, max: bytes, page_size: 4096 }])?;
    let content = [byte; PAGE_SIZE];
    checkpoint.pages(BlockId(0), (0..PAGES).map(|page| (PageNo(page), &content)))?;
    checkpoint.commit(&json!({"name": "web"}), &json!({}), &[byte; 5000]).map(|committed| committed.number)
}

#[track_caller]
fn assert_newest(url: &StoreUrl, credentials: Option<&Credentials>, number: u64, byte: u8) {
    let options = ReadOptions { credentials: credentials.cloned(), ..ReadOptions::default() };
    let image = Image::open(url, &options).unwrap();
    assert_eq!(image.info().number, number);
    let mut count = 0;
    image
        .read_pages(BlockId(0), PageNo(0)..PageNo(PAGES), |_, content| {
            assert_eq!(*content, [byte; PAGE_SIZE]);
            count += 1;
        })
        .unwrap();
    assert_eq!(count, PAGES);
}

/// A certificate authority in a directory.
struct Authority {
    directory: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new(directory: &Path) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        fs::write(directory.join("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        Self { directory: directory.to_owned(), issuer: Issuer::new(params, key) }
    }

    /// Writes a certificate for `name` that is valid for `days` from now on. It replaces an earlier one.
    fn sign(&self, name: &str, days: u64) -> Identity {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.not_after = (SystemTime::now() + Duration::from_secs(days * 86_400)).into();
        let key = KeyPair::generate().unwrap();
        let path = |what: &str| self.directory.join(format!("{name}.{what}"));
        fs::write(path("key"), key.serialize_pem()).unwrap();
        fs::write(path("pem"), params.signed_by(&key, &self.issuer).unwrap().pem()).unwrap();
        Identity { cert: path("pem"), key: path("key"), ca: self.directory.join("ca.pem") }
    }
}

/// A server that is stopped on drop.
struct RunningServer {
    address: SocketAddr,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl RunningServer {
    fn start(address: &str, directory: &Path, identity: &Identity) -> Self {
        let server = Server::bind(address, &directory.join("stores"), identity).unwrap();
        let (address, stop) = (server.address().unwrap(), server.stopper());
        Self { address, stop, thread: Some(thread::spawn(move || server.run().unwrap())) }
    }

    fn url(&self) -> StoreUrl {
        format!("tls://127.0.0.1:{}/web", self.address.port()).parse().unwrap()
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        self.stop.stop();
        self.thread.take().unwrap().join().unwrap();
    }
}

#[test]
fn no_jump_of_the_clock_changes_the_owner_of_a_store_or_the_checkpoints_that_it_keeps() {
    if !with_own_clock("no_jump_of_the_clock_changes_the_owner_of_a_store_or_the_checkpoints_that_it_keeps") {
        return;
    }
    for (before, after) in [(0, YEAR_S), (0, -YEAR_S), (YEAR_S, -YEAR_S), (-YEAR_S, YEAR_S)] {
        for is_remote in [false, true] {
            let row = format!("from {before} s to {after} s, remote: {is_remote}");
            let began_at = jump_to(before);
            let directory = tempfile::tempdir().unwrap();
            let authority = Authority::new(directory.path());
            // Valid at all times of the test.
            let server = RunningServer::start("127.0.0.1:0", directory.path(), &authority.sign("127.0.0.1", 4000));
            let (url, credentials) = match is_remote {
                true => (server.url(), Some(Credentials::from(authority.sign("client", 4000)))),
                false => (StoreUrl::Directory(directory.path().join("web")), None),
            };
            let options = |operation: &str| Options {
                keep: 2,
                create: true,
                credentials: credentials.clone(),
                ..Options::new(vm(), operation)
            };
            let mut writer = Writer::open(&url, &options("protect web")).unwrap();
            assert_eq!((1..=3).map(|n| commit(&mut writer, n).unwrap()).last(), Some(3), "{row}");
            let jumped_at = jump_to(after);
            assert_eq!(jumped_at > began_at, after > before, "{row}");
            assert_eq!(commit(&mut writer, 4).unwrap(), 4, "{row}");
            writer.settle().unwrap();
            // The newest are kept, by number.
            let kept = || admin::listing(&url, credentials.as_ref()).unwrap().checkpoints;
            assert_eq!(kept().iter().map(|listed| listed.number).collect::<Vec<_>>(), [3, 4], "{row}");
            assert!(kept()[1].info.as_ref().unwrap().time_us >= jumped_at, "{row}");
            // The next owner is a host whose clock is the one before the jump; then one with the other clock again.
            jump_to(before);
            let restore = Owner::here("restore web").with(Guest::Restored);
            let fenced = admin::fence(&url, &vm(), &restore, None, credentials.as_ref()).unwrap();
            assert_eq!((fenced.epoch, fenced.newest), (2, 4), "{row}");
            jump_to(after);
            let e = commit(&mut writer, 5).unwrap_err();
            assert!(matches!(&e, StoreError::Superseded { epoch: 2, .. }), "{row}: {e}");
            assert_eq!(e.guest_is_over(1).map(|owner| owner.run), Some(2), "{row}");
            let mut next = Writer::open(&url, &options("protect web")).unwrap();
            assert_eq!((next.epoch(), commit(&mut next, 6).unwrap()), (3, 5), "{row}");
            jump_to(before);
            next.settle().unwrap();
            drop(next);
            admin::compact(&url, credentials.as_ref()).unwrap();
            assert_newest(&url, credentials.as_ref(), 5, 6);
            assert!(admin::verified(&url, credentials.as_ref(), &mut |_, _| {}).unwrap().is_good(), "{row}");
        }
    }
}

/// Returns an error with its causes.
fn with_causes(error: &dyn Error) -> String {
    error.source().map_or_else(|| error.to_string(), |cause| format!("{error}: {}", with_causes(cause)))
}

#[test]
fn a_certificate_that_expires_ends_no_connection_and_its_renewal_needs_no_restart() {
    if !with_own_clock("a_certificate_that_expires_ends_no_connection_and_its_renewal_needs_no_restart") {
        return;
    }
    // The days for which the certificates of server and client are valid, and the words of the error.
    for (server_days, client_days, words) in [
        (
            180,
            4000,
            ["the certificate of the server has expired at", "renew it on the server, or set this machine's clock"],
        ),
        (4000, 180, ["client.pem has expired", "renew it, or set the clock of the server"]),
    ] {
        jump_to(0);
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::new(directory.path());
        let identity = authority.sign("127.0.0.1", server_days);
        let client = authority.sign("client", client_days);
        let server = RunningServer::start("127.0.0.1:0", directory.path(), &identity);
        let (url, credentials) = (server.url(), Some(client.into()));
        let options = Options { create: true, credentials: credentials.clone(), ..Options::new(vm(), "protect web") };
        let mut writer = Writer::open(&url, &options).unwrap();
        commit(&mut writer, 1).unwrap();
        // The connection continues: both have checked the certificates at its begin.
        jump_to(YEAR_S);
        assert_eq!(commit(&mut writer, 2).unwrap(), 2);
        let address = server.address.to_string();
        drop(server);
        let server = RunningServer::start(&address, directory.path(), &identity);
        for _ in 0..2 {
            let e = commit(&mut writer, 3).unwrap_err();
            let text = with_causes(&e);
            assert!(e.may_pass() && words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
        }
        // Another command of the same host, before it is connected.
        let text = with_causes(&admin::listing(&url, credentials.as_ref()).unwrap_err());
        assert!(words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
        // Neither the server nor the client is started again.
        authority.sign("127.0.0.1", 4000);
        authority.sign("client", 4000);
        assert_eq!(commit(&mut writer, 4).unwrap(), 3);
        assert_newest(&url, credentials.as_ref(), 3, 4);
        // Files in the middle of a renewal do not keep clients out.
        fs::write(&identity.key, "").unwrap();
        assert_newest(&url, credentials.as_ref(), 3, 4);
        drop(server);
    }
}
