//! Protected guests with disk servers: checkpoints include the disk server's writes to the guest's memory.

use crate::common::protector::{Protector, crash, pager, restore, store, wait_filled};
use crate::common::served::{BLOCK, READ, digest, image, kill_server, kill_watcher, read, section, server};
use crate::common::{Guest, Lab};
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Does `work` while the guest reads its disk repeatedly, so that the server writes the guest's memory.
fn while_reading<T>(guest: &Guest<'_>, expected: &str, work: impl FnOnce() -> T) -> T {
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut times = 0;
            while !is_done.load(Ordering::Relaxed) {
                assert_eq!(read(guest, 0, READ / 4), expected);
                guest.ask("drop-caches");
                times += 1;
            }
            times
        });
        // Set the flag also after a panic: otherwise the reading thread would not end.
        let result = panic::catch_unwind(AssertUnwindSafe(work));
        is_done.store(true, Ordering::Relaxed);
        let result = result.unwrap_or_else(|why| panic::resume_unwind(why));
        assert!(reading.join().unwrap() > 1, "the disk was not read during the work");
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
            // The second protector continues from the first one's write record.
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
fn after_a_server_died_its_writes_are_unknown_and_all_memory_is_read_again() {
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
        // The server is started again, and the next checkpoint reads all memory again.
        assert_eq!(protector.wait("attached")["incremental"], false);
        let compared = protector.wait("compared");
        assert_eq!(compared["wrong"], 0, "{compared}");
        assert!(protector.child.wait().unwrap().success());
        assert_ne!(server(&guest), Some(killed));
    });
    guest.assert_sound();
}

#[test]
fn a_policy_that_would_miss_a_server_s_writes_is_rejected() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("missed").section(&section(&path, "")).boot(&[]);
    let store = store(&lab, "missed");
    let store = store.to_str().unwrap();
    let words = ["protect", "missed", "--store", store, "--policy", "cow"];
    lab.rekindle(words).status(1).prints(&["the server of disk disk0", "--policy precopy or basic"]);
    guest.assert_sound();
}

#[test]
fn a_restored_guest_uses_its_disk_during_the_fill() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("filling").memory("512M").section(&section(&path, "")).boot(&[]);
    let store = store(&lab, "filling");
    guest.touch("300M");
    // These blocks are in the page cache; the blocks that are read after the restore are not.
    read(&guest, 0, 64);
    for round in 0..4u64 {
        let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms", "--count", "1"]);
        assert!(protector.child.wait().unwrap().success());
        crash(&guest);
        let restored = restore(&guest, &store, &[]);
        assert_eq!(restored["filled"], false, "{restored}");
        if round == 1 {
            // The pager dies: each access to a missing page, by the guest or by the disk server, blocks.
            kill_watcher(&guest);
            if let Some(pager) = pager(&guest) {
                pager.kill().unwrap();
            }
            guest.rekindle(&["recover"]).ok();
        }
        if round == 2 {
            // The next disk server blocks on missing pages too.
            kill_server(&guest);
            guest.rekindle(&["recover"]).ok();
        }
        guest.ask(&format!("write vda {} 64 {round}", 600 + 64 * round));
        let cached = read(&guest, 0, READ);
        guest.ask("drop-caches");
        assert_eq!(read(&guest, 0, READ), cached, "round {round}: the page cache differs from the disk");
        wait_filled(&guest);
        guest.verify();
        guest.assert_sound();
    }
}
