//! Encrypted stores, and what a host that knows a store accepts in its place.

use crate::common::device::run;
use crate::common::protector::{Protector, crash, restore, store, wait_filled};
use crate::common::{Guest, Lab};
use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn a_guest_is_restored_from_an_encrypted_store_with_its_key_only() {
    let lab = Lab::new();
    let key = lab.path("store.key");
    let key = key.to_str().unwrap();
    lab.rekindle(["store", "new-key", key]).ok();
    let guest = lab.vm("sealed").memory("192M").boot(&[]);
    guest.touch("48M");
    let boot = guest.boot_id();
    let store = store(&lab, "sealed");
    let protect = ["--key-file", key, "--every", "100ms", "--count", "3"];
    let mut protector = Protector::start(&guest, &lab, &store, &protect);
    assert!(protector.child.wait().unwrap().success());
    let url = store.to_str().unwrap();
    lab.rekindle(["--json", "store", "verify", url, "--key-file", key]).ok();
    let wrong = &new_key(&lab, "wrong.key");
    let away = lab.path("away.key");
    let away = away.to_str().unwrap();
    // A protector needs its key when it starts only: then the file may be missing, or be another one.
    let mut protector = Protector::start(&guest, &lab, &store, &["--key-file", key, "--every", "100ms"]);
    protector.next_checkpoint();
    fs::rename(key, away).unwrap();
    protector.next_checkpoint();
    fs::copy(wrong, key).unwrap();
    let newest = protector.next_checkpoint()["number"].as_u64().unwrap();
    protector.end();
    let again = || lab.rekindle(["protect", "sealed", "--store", url, "--key-file", key, "--count", "1"]).status(1);
    again().prints(&["sealed with the key", "add it to the key file"]);
    fs::remove_file(key).unwrap();
    again().prints(&["there is no key file", "copy it from a host that has it"]);
    guest.assert_sound();
    fs::rename(away, key).unwrap();
    let newest = newest_of(&lab, url, key).max(newest);
    crash(&guest);
    let too_high = (newest + 1).to_string();
    for (arguments, words) in [
        (vec![], "--key-file"),
        (vec!["--key-file", wrong.as_str()], "not among those that were given"),
        (vec!["--key-file", away], "there is no key file"),
        (vec!["--key-command", "exit 3"], "the key command (--key-command) has failed: exit status: 3"),
        (vec!["--key-file", key, "--at-least-checkpoint", &too_high], "is required"),
    ] {
        let command = lab.command(["restore", "sealed", "--store", url].into_iter().chain(arguments));
        lab.finish(command).status(1).prints(&[words]);
    }
    // The pager reads the key again.
    let command = format!("cat {key}");
    let restored = restore(&guest, &store, &["--key-command", &command]);
    assert_eq!(restored["checkpoint"], newest);
    assert_eq!(guest.boot_id(), boot);
    guest.verify();
    wait_filled(&guest);
    guest.verify();
    guest.assert_sound();
}

/// Returns the number of the newest checkpoint of a store.
fn newest_of(lab: &Lab, url: &str, key: &str) -> u64 {
    let listing = lab.rekindle(["--json", "store", "ls", url, "--key-file", key]).ok().json();
    listing["checkpoints"].as_array().unwrap().last().unwrap()["number"].as_u64().unwrap()
}

/// Creates a key, and returns the path of its file.
fn new_key(lab: &Lab, name: &str) -> String {
    let key = lab.path(name).to_str().unwrap().to_owned();
    lab.rekindle(["store", "new-key", &key]).ok();
    key
}

fn protect(guest: &Guest<'_>, store: &Path, key: &str) {
    let arguments = ["--key-file", key, "--every", "100ms", "--count", "2"];
    let mut protector = Protector::start(guest, guest.lab, store, &arguments);
    assert!(protector.child.wait().unwrap().success());
}

/// Creates a store with the newest checkpoint of `from`, as an attacker with the key can. `credentials`: those of the new store.
fn another_store(lab: &Lab, name: &str, from: &Path, key: &str, credentials: &[&str]) -> PathBuf {
    let (stream, new) = (lab.path(&format!("{name}.stream")), lab.path(name));
    let [stream, new_text, from] = [&stream, &new, &from.to_owned()].map(|path| path.to_str().unwrap().to_owned());
    lab.rekindle(["store", "export", &from, "--output", &stream, "--key-file", key]).ok();
    let listing = lab.rekindle(["--json", "store", "ls", &from, "--key-file", key]).ok().json();
    let uuid = listing["vm"]["uuid"].as_str().unwrap();
    let import = ["store", "import", &new_text, &stream, "--create-store", "--name", "known", "--uuid", uuid];
    lab.rekindle(import.iter().chain(credentials)).ok();
    new
}

#[test]
fn a_host_that_knows_an_encrypted_store_accepts_no_older_or_other_one_until_it_forgets_it() {
    let lab = Lab::new();
    let key = &new_key(&lab, "store.key");
    let guest = lab.vm("known").memory("96M").boot(&[]);
    let (boot, store) = (guest.boot_id(), store(&lab, "known"));
    let (url, old) = (store.to_str().unwrap(), lab.path("old"));
    protect(&guest, &store, key);
    run("cp", &["-a", url, old.to_str().unwrap()]);
    protect(&guest, &store, key);
    let plain = another_store(&lab, "plain", &store, key, &[]);
    let other = another_store(&lab, "other", &store, key, &["--key-file", key]);
    let [plain, other] = [&plain, &other].map(|path| path.to_str().unwrap());
    // The guest's pages are not written without encryption.
    let to_plain = ["protect", "known", "--store", plain, "--count", "1"];
    lab.rekindle(to_plain).status(1).prints(&["are encrypted", "no key was given", "rekindle store forget known"]);

    // The knowledge outlives the run directory, as it outlives a reboot of the host.
    crash(&guest);
    let newest = lab.path("newest");
    fs::rename(&store, &newest).unwrap();
    run("cp", &["-a", old.to_str().unwrap(), url]);
    let with_key = ["--key-file", key];
    for (url, credentials, words) in [
        (url, &with_key[..], "it was rolled back"),
        (plain, &[], "no key was given"),
        (plain, &with_key, "the store is not encrypted"),
        (other, &with_key, "not the encrypted store that this host knows"),
    ] {
        let restore = ["restore", "known", "--store", url];
        let remedy = match words {
            "the store is not encrypted" => "create a new store",
            "no key was given" => "rekindle store forget known",
            _ => "rekindle store forget NAME",
        };
        lab.rekindle(restore.iter().chain(credentials)).status(1).prints(&[words, remedy]);
    }
    // The newest copy at another path is the same store.
    assert_eq!(restore(&guest, &newest, &with_key)["checkpoint"], 4);
    assert_eq!(guest.boot_id(), boot);
    crash(&guest);
    // The restore has raised what is known.
    let e = lab.rekindle(["restore", "known", "--store", url, "--key-file", key]).status(1);
    e.prints(&["at owner epoch 1, checkpoint 2", "this host knows it at owner epoch 3, checkpoint 4"]);
    lab.rekindle(["store", "forget", "known"]).ok();
    assert_eq!(restore(&guest, &store, &with_key)["checkpoint"], 2);
    assert_eq!(guest.boot_id(), boot);
    guest.assert_sound();

    // The checkpoints before a clean shutdown are older than the guest's disks.
    let before_shutdown = lab.path("before-shutdown");
    run("cp", &["-a", url, before_shutdown.to_str().unwrap()]);
    guest.rekindle(&["stop"]).ok();
    let e = lab.rekindle(["restore", "known", "--store", before_shutdown.to_str().unwrap(), "--key-file", key]);
    e.status(1).prints(&["it was rolled back", "this host knows it at owner epoch"]);
}
