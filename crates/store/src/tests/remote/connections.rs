//! Connections that fail, spare connections, and certificates that are not accepted.

use super::{Authority, CuttingProxy, PAGES, RAM, RunningServer, check, commit, options, read_options, url};
use crate::admin;
use crate::credentials::Credentials;
use crate::error::StoreError;
use crate::reader::{Image, ReadOptions};
use crate::remote::server::{Server, Timeouts};
use crate::remote::{ConnectionError, Identity, SpareConnections};
use crate::tests::model::{block, content, owner_of, vm};
use crate::types::{Guest, OnlyIf, Owner};
use crate::url::StoreUrl;
use crate::writer::Writer;
use rekindle_pages::{PAGE_SIZE, PageNo};
use serde_json::json;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::thread;

#[test]
fn a_connection_that_fails_anywhere_costs_only_the_open_checkpoint() {
    let authority = Authority::new("ours");
    let directory = tempfile::tempdir().unwrap();
    let (server, client) = (authority.sign("127.0.0.1", 2100), authority.sign("client", 2100));
    let running = RunningServer::new(directory.path(), &server, Timeouts::default());
    let proxy = CuttingProxy::new(running.address);
    let store_url = url(proxy.address, "web");
    let mut writer = Writer::open(&store_url, &options(&client, "protect web")).unwrap();
    commit(&mut writer, 0).unwrap();
    let mut committed = 1;
    let mut lost = 0;
    let cuts = [0, 300, 900, 2_000, 4_000, 9_000].into_iter().chain((1..).map(|n| n * 70_000));
    for cut in cuts {
        proxy.remaining_bytes.store(cut, Ordering::SeqCst);
        let epoch = writer.epoch();
        let done = commit(&mut writer, committed);
        let was_not_cut = proxy.remaining_bytes.swap(i64::MAX, Ordering::SeqCst) >= 0;
        match done {
            Ok(done) => {
                committed += 1;
                assert_eq!(done.number, committed);
                if was_not_cut {
                    break;
                }
            }
            Err(e @ StoreError::Connection { .. }) => {
                lost += 1;
                // The newest checkpoint is the last committed one, or the next one if only the answer to its commit was
                // lost.
                let image = Image::open(&url(running.address, "web"), &read_options(&client)).unwrap();
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
        assert!(writer.epoch() > epoch || was_not_cut);
    }
    assert!(lost > 3, "{lost} of them were cut");
    // Reading continues over a new connection as well.
    let image = Image::open(&store_url, &read_options(&client)).unwrap();
    for cut in [0, 700, 2_000, 5_000] {
        proxy.remaining_bytes.store(cut, Ordering::SeqCst);
        let mut content = [0; PAGE_SIZE];
        let failed =
            (0..PAGES).step_by(40).filter(|page| image.read_page((RAM, PageNo(*page)), &mut content).is_err()).count();
        proxy.remaining_bytes.store(i64::MAX, Ordering::SeqCst);
        assert!(failed > 0 || cut > 0);
        check(&image, committed);
    }
    // The writer does not continue if the store had another owner meanwhile.
    proxy.remaining_bytes.store(0, Ordering::SeqCst);
    assert!(matches!(commit(&mut writer, 9), Err(StoreError::Connection { .. })));
    proxy.remaining_bytes.store(i64::MAX, Ordering::SeqCst);
    admin::fence(&store_url, &vm(), &Owner::here("restore web"), None, Some(&client.clone().into())).unwrap();
    let e = commit(&mut writer, 9).unwrap_err();
    assert!(owner_of(&e).is_some_and(|(_, _, operation)| operation == "restore web"), "{e}");
}

/// A writer that connects knows every page that the server has, also of a block whose digests need several requests.
#[test]
fn pages_that_the_server_has_are_not_sent_again_by_the_next_writer() {
    const PAGES: [u64; 4] = [0, 7999, 8000, 19_999];
    let authority = Authority::new("ours");
    let directory = tempfile::tempdir().unwrap();
    let (server, client) = (authority.sign("127.0.0.1", 2100), authority.sign("client", 2100));
    let running = RunningServer::new(directory.path(), &server, Timeouts::default());
    let contents = PAGES.map(|page| (PageNo(page), content(page + 1)));
    for expected in [(4, 0), (0, 4)] {
        let mut writer = Writer::open(&url(running.address, "web"), &options(&client, "protect web")).unwrap();
        let mut checkpoint = writer.begin(&[block("ram", 20_000), block("rom", 3)]).unwrap();
        checkpoint.pages(RAM, contents.iter().map(|(page, content)| (*page, content))).unwrap();
        let pages = checkpoint.commit(&json!({"name": "web"}), &json!({}), &[7; 5000]).unwrap().pages;
        assert_eq!((pages.stored, pages.unchanged), expected);
    }
}

#[test]
fn a_spare_connection_is_used_once_and_for_its_server_only() {
    let authority = Authority::new("ours");
    let directory = tempfile::tempdir().unwrap();
    let (server, client) = (authority.sign("127.0.0.1", 2100), authority.sign("client", 2100));
    let running = RunningServer::new(directory.path(), &server, Timeouts::default());
    let store_url = url(running.address, "web");
    commit(&mut Writer::open(&store_url, &options(&client, "protect web")).unwrap(), 0).unwrap();
    // Opening a new connection requires a certificate, so that success without one means that a spare connection was
    // used.
    let spare = SpareConnections::default();
    let open = |spare: &SpareConnections| {
        Image::open(&store_url, &ReadOptions { spare: spare.clone(), ..ReadOptions::default() })
    };
    let refused = |e: StoreError| matches!(e, StoreError::Connection { source: ConnectionError::NoIdentity, .. });
    assert!(refused(open(&spare).unwrap_err()));
    spare.make(&store_url, Some(&client.clone().into()), 2).unwrap();
    check(&open(&spare).unwrap(), 1);
    let owner = Owner::here("move web").with(Guest::Restored);
    let fence = |to: &StoreUrl| admin::fence_over(&spare, to, &vm(), &owner, Some(OnlyIf::Epoch(1)), None);
    let other = RunningServer::new(directory.path(), &server, Timeouts::default());
    assert!(refused(fence(&url(other.address, "web")).unwrap_err()), "it leads elsewhere");
    assert_eq!(fence(&store_url).unwrap().epoch, 2);
    assert!(refused(open(&spare).unwrap_err()), "there were two");
    // A spare connection to a server that has stopped is not usable.
    spare.make(&store_url, Some(&client.clone().into()), 1).unwrap();
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
    let running = RunningServer::new(directory.path(), &good, Timeouts::default());
    let store_url = url(running.address, "web");
    let message = |store_url: &StoreUrl, identity: Option<Identity>| {
        let e = admin::listing(store_url, identity.map(Credentials::from).as_ref()).unwrap_err();
        let StoreError::Connection { source, .. } = e else { panic!("{e}") };
        source.to_string()
    };
    let listed = admin::listing(&store_url, Some(&client.clone().into())).unwrap_err();
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
        (Some(ours.sign("client", 2001)), ["client-2001.pem has expired", "renew it, or set the clock of the server"]),
        (Some(Identity { cert: "/nowhere.pem".into(), ..client.clone() }), ["/nowhere.pem", "certificate"]),
        (Some(Identity { key: good.key.clone(), ..client.clone() }), ["client-2100.pem", "key"]),
        (Some(Identity { ca: client.key.clone(), ..client.clone() }), ["client-2100.key", "certificate"]),
    ] {
        let text = message(&store_url, identity);
        assert!(words.iter().all(|word| text.contains(word)), "{text} has not {words:?}");
    }
    for (name, year, words) in
        [("elsewhere", 2100, "for another name"), ("127.0.0.1", 2001, "has expired at 2001-01-01")]
    {
        let running = RunningServer::new(directory.path(), &ours.sign(name, year), Timeouts::default());
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
