//! A store on a server behaves as one in a directory.

use super::{Authority, CuttingProxy, PAGES, RAM, RunningServer, commit, expected, options, pages, read_options, url};
use crate::admin;
use crate::error::StoreError;
use crate::export::export;
use crate::reader::{Image, ReadOptions};
use crate::remote::Identity;
use crate::remote::server::Timeouts;
use crate::tests::model::{block, content, owner_of, vm};
use crate::types::{Guest, OnlyIf, Owner};
use crate::url::StoreUrl;
use crate::writer::{Options, Writer};
use rekindle_pages::{PAGE_SIZE, PageNo};
use std::sync::atomic::Ordering;

#[test]
fn a_store_on_a_server_is_as_one_in_a_directory() {
    let authority = Authority::new("ours");
    let directory = tempfile::tempdir().unwrap();
    let (server, client) = (authority.sign("127.0.0.1", 2100), authority.sign("client", 2100));
    let running = RunningServer::new(directory.path(), &server, Timeouts::default());
    let store_url = url(running.address, "web");
    let directory_url = StoreUrl::Directory(directory.path().join("web"));
    let mut writer = Writer::open(&store_url, &options(&client, "protect web")).unwrap();
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
    let mut writer = Writer::open(&store_url, &options(&client, "protect web")).unwrap();
    let again = commit(&mut writer, 3).unwrap();
    assert_eq!((again.number, again.pages.stored, again.pages.zero), (6, 0, 0));
    commit(&mut writer, 4).unwrap();
    // An aborted checkpoint leaves no trace.
    let mut checkpoint = writer.begin(&[block("ram", PAGES), block("bios", 4)]).unwrap();
    checkpoint.pages(RAM, [(PageNo(0), &content(5))]).unwrap();
    drop(checkpoint);
    writer.settle().unwrap();

    let remote = Image::open(&store_url, &read_options(&client)).unwrap();
    let local = Image::open(&directory_url, &ReadOptions::default()).unwrap();
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
    let at = |at| Image::open(&store_url, &ReadOptions { at: Some(at), ..read_options(&client) });
    assert_eq!(at(6).unwrap().info().number, 6);
    assert!(matches!(at(2).unwrap_err(), StoreError::NoSuchCheckpoint { have, .. } if have == [5, 6, 7]));
    let e = Image::open(&url(running.address, "other"), &read_options(&client)).unwrap_err();
    assert_eq!(e.kind(), "not-a-store", "{e}");

    let listing = admin::listing(&store_url, Some(&client.clone().into())).unwrap();
    assert_eq!(listing, admin::listing(&directory_url, None).unwrap());
    assert_eq!(listing.owner.as_ref().unwrap().operation, "protect web");
    assert_eq!(listing.checkpoints.len(), 3);
    let verified = admin::verified(&store_url, Some(&client.clone().into()), &mut |_, _| {}).unwrap();
    assert!(verified.is_good() && verified.checkpoints == 3 && verified.pages > 500, "{verified:?}");
    // The error that the previous owner gets names the new owner.
    let fenced =
        admin::fence(&store_url, &vm(), &Owner::here("restore web"), None, Some(&client.clone().into())).unwrap();
    assert_eq!(fenced, admin::Fenced { epoch: 3, newest: 7, known: None });
    let e = commit(&mut writer, 5).unwrap_err();
    assert_eq!(owner_of(&e), Some((2, 3, "restore web")), "{e}");
    assert!(admin::compact(&store_url, Some(&client.clone().into())).is_ok());
    check_lazy_images(&store_url, &client);
}

fn check_lazy_images(store_url: &StoreUrl, client: &Identity) {
    for lazy in [false, true] {
        let image = Image::open(store_url, &ReadOptions { lazy, ..read_options(client) }).unwrap();
        assert_eq!(image.info().number, 7);
        assert_eq!(image.hot().count(), Image::open(store_url, &read_options(client)).unwrap().hot().count());
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
fn a_guest_that_begins_elsewhere_ends_the_one_before_through_a_server_too() {
    let authority = Authority::new("ours");
    let directory = tempfile::tempdir().unwrap();
    let (server, client) = (authority.sign("127.0.0.1", 2100), authority.sign("client", 2100));
    let running = RunningServer::new(directory.path(), &server, Timeouts::default());
    let proxy = CuttingProxy::new(running.address);
    let store_url = url(proxy.address, "web");
    let begin = |operation: &str, guest, only_if| {
        admin::fence(&store_url, &vm(), &Owner::here(operation).with(guest), only_if, Some(&client.clone().into()))
    };
    // A boot uses a store that was created before, and does not create a store itself.
    assert_eq!(begin("start web", Guest::Booted, None).unwrap_err().kind(), "not-a-store");
    admin::init(&store_url, Some(&client.clone().into())).unwrap();
    assert_eq!(begin("start web", Guest::Booted, None).unwrap().epoch, 1);
    let options = Options { only_if: Some(OnlyIf::Run { run: 1 }), ..options(&client, "protect web") };
    let mut writer = Writer::open(&store_url, &options).unwrap();
    commit(&mut writer, 0).unwrap();
    let restorable = || admin::listing(&store_url, Some(&client.clone().into())).unwrap().restorable();
    assert_eq!(restorable(), Some(1));
    // The claim of a new connection records no new boot of the guest.
    proxy.remaining_bytes.store(0, Ordering::SeqCst);
    assert!(matches!(commit(&mut writer, 1), Err(StoreError::Connection { .. })));
    proxy.remaining_bytes.store(i64::MAX, Ordering::SeqCst);
    commit(&mut writer, 1).unwrap();
    assert_eq!((writer.epoch(), restorable()), (3, Some(2)));
    assert_eq!(begin("restore web", Guest::Restored, None).unwrap().epoch, 4);
    let e = commit(&mut writer, 2).unwrap_err();
    assert_eq!(e.guest_is_over(1).map(|owner| (owner.run, owner.boot)), Some((4, 1)), "{e}");
    let e = Writer::open(&store_url, &options).unwrap_err();
    assert!(e.guest_is_over(1).is_some(), "{e}");
    let e = begin("stop web", Guest::Ended, Some(OnlyIf::Run { run: 1 })).unwrap_err();
    assert!(e.guest_is_over(1).is_some(), "{e}");
    assert_eq!(restorable(), Some(2));
    begin("stop web", Guest::Ended, Some(OnlyIf::Run { run: 4 })).unwrap();
    assert_eq!(restorable(), None);
}
