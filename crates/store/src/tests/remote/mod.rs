//! Stores on a server. This file has what the tests share: certificates, a server, and a proxy that cuts connections.

mod bad_peers;
mod connections;
mod same_as_directory;

use super::model::{block, content, vm};
use crate::reader::{Image, ReadOptions};
use crate::remote::Identity;
use crate::remote::server::{Server, Stop, Timeouts};
use crate::url::StoreUrl;
use crate::writer::{Options, Writer};
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
struct RunningServer {
    address: SocketAddr,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl RunningServer {
    fn new(directory: &Path, identity: &Identity, timeouts: Timeouts) -> Self {
        let server = Server::bind("127.0.0.1:0", directory, identity).unwrap().with_timeouts(timeouts);
        let (address, stop) = (server.address().unwrap(), server.stopper());
        let thread = Some(thread::spawn(move || server.run().unwrap()));
        Self { address, stop, thread }
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// A proxy that forwards bytes to a server, and closes the connection after a number of bytes.
struct CuttingProxy {
    address: SocketAddr,
    /// Bytes from the client after which the connection is closed.
    remaining_bytes: Arc<AtomicI64>,
}

impl CuttingProxy {
    fn new(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let remaining_bytes = Arc::new(AtomicI64::new(i64::MAX));
        let shared = remaining_bytes.clone();
        // This thread ends with the process.
        thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(to)) else { continue };
                let remaining_bytes = shared.clone();
                let (mut from, mut into) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                thread::spawn(move || {
                    let mut buffer = [0; 512];
                    while let Ok(n @ 1..) = from.read(&mut buffer) {
                        if remaining_bytes.fetch_sub(n as i64, Ordering::SeqCst) < n as i64
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
        Self { address, remaining_bytes }
    }
}

fn url(address: SocketAddr, name: &str) -> StoreUrl {
    format!("tls://127.0.0.1:{}/{name}", address.port()).parse().unwrap()
}

fn options(identity: &Identity, operation: &str) -> Options {
    Options { keep: 3, credentials: Some(identity.clone().into()), create: true, ..Options::new(vm(), operation) }
}

fn read_options(identity: &Identity) -> ReadOptions {
    ReadOptions { credentials: Some(identity.clone().into()), ..ReadOptions::default() }
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
