//! Guests whose disk a server of Rekindle's has, protected: what the server writes into their memory is in the checkpoints.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::protector::{Protector, crash, pager, restore, store, wait_filled};
use common::served::{BLOCK, READ, digest, image, kill_server, kill_watcher, read, section, server};
use common::{Guest, Lab};
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Read the disk anew all the time, so that the server writes the guest's memory, while `work` is done.
fn while_reading<T>(guest: &Guest<'_>, expected: &str, work: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut times = 0;
            while !done.load(Ordering::Relaxed) {
                assert_eq!(read(guest, 0, READ / 4), expected);
                guest.ask("drop-caches");
                times += 1;
            }
            times
        });
        // Also when that has failed, or nobody would end.
        let result = panic::catch_unwind(AssertUnwindSafe(work));
        done.store(true, Ordering::Relaxed);
        let result = result.unwrap_or_else(|why| panic::resume_unwind(why));
        assert!(reading.join().unwrap() > 1, "it was read while that was done");
        result
    })
}

#[test]
fn every_page_that_a_server_writes_is_in_the_checkpoint() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("seen").memory("128M").section(&section(&path, "readonly = true\n")).boot(&[]);
    let expected = digest(&path, 0, READ / 4);
    for policy in ["precopy", "basic"] {
        while_reading(&guest, &expected, || {
            // The second one goes on with what the first has left.
            for count in ["6", "10"] {
                let store = store(&lab, policy);
                let arguments = ["--every", "50ms", "--policy", policy, "--count", count, "--compare"];
                let mut protector = Protector::start(&guest, &lab, &store, &arguments);
                let compared = protector.wait("compared");
                assert_eq!(compared["wrong"], 0, "{policy}: {compared}");
                assert!(compared["pages"].as_u64().unwrap() * BLOCK > 64 << 20, "{compared}");
                assert!(protector.child.wait().unwrap().success());
            }
        });
    }
    guest.assert_sound();
}

#[test]
fn what_a_server_that_died_has_written_is_not_trusted_to_be_known() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("unseen").memory("128M").section(&section(&path, "readonly = true\n")).boot(&[]);
    let expected = digest(&path, 0, READ / 4);
    let store = store(&lab, "unseen");
    while_reading(&guest, &expected, || {
        let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms", "--count", "30", "--compare"]);
        protector.wait("attached");
        protector.next_checkpoint();
        let killed = server(&guest).expect("a server");
        killed.kill().unwrap();
        // It is started again, and everything is read once more.
        assert_eq!(protector.wait("attached")["incremental"], false);
        let compared = protector.wait("compared");
        assert_eq!(compared["wrong"], 0, "{compared}");
        assert!(protector.child.wait().unwrap().success());
        assert_ne!(server(&guest), Some(killed));
    });
    guest.assert_sound();
}

#[test]
fn what_would_miss_its_writes_is_refused() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("refused").section(&section(&path, "")).boot(&[]);
    let store = store(&lab, "refused");
    let store = store.to_str().unwrap();
    let all = ["protect", "refused", "--store", store, "--policy", "cow"];
    lab.rekindle(all).status(1).prints(&["the server of disk0", "--policy precopy or basic"]);
    guest.assert_sound();
}

#[test]
fn a_restored_guest_uses_its_disk_while_its_memory_still_comes() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("comes").memory("512M").section(&section(&path, "")).boot(&[]);
    let store = store(&lab, "comes");
    guest.touch("300M");
    // In its cache, so that what it reads elsewhere after the restore is not.
    read(&guest, 0, 64);
    for round in 0..4u64 {
        let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms", "--count", "1"]);
        assert!(protector.child.wait().unwrap().success());
        crash(&guest);
        let restored = restore(&guest, &store, &[]);
        assert_eq!(restored["filled"], false, "{restored}");
        if round == 1 {
            // The pager dies, and whoever waits for a page, in the guest or in the disk's server, waits.
            kill_watcher(&guest);
            if let Some(pager) = pager(&guest) {
                pager.kill().unwrap();
            }
            guest.rekindle(&["recover"]).ok();
        }
        if round == 2 {
            // The one that comes after it waits for missing pages too.
            kill_server(&guest);
            guest.rekindle(&["recover"]).ok();
        }
        guest.ask(&format!("write vda {} 64 {round}", 600 + 64 * round));
        let cached = read(&guest, 0, READ);
        guest.ask("drop-caches");
        assert_eq!(read(&guest, 0, READ), cached, "round {round}: the disk has what its guest wrote");
        wait_filled(&guest);
        guest.verify();
        guest.assert_sound();
    }
}
