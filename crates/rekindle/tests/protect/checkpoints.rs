//! `rekindle protect` and `rekindle restore` with real guests: a restore yields the committed state, whichever process
//! dies when.

use crate::common::protector::{Protector, crash, pager, restore, store, wait_filled};
use crate::common::served::kill_watcher;
use crate::common::{DEADLINE, Guest, Lab, Net, assert_ticks_once, qemu_new, wait_for};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

#[test]
fn a_restore_yields_what_was_committed_with_every_policy() {
    for policy in ["precopy", "basic", "cow"] {
        let lab = Lab::new();
        let guest = lab.vm(policy).memory("192M").boot(&[]);
        let store = store(&lab, policy);
        let mut protector = Protector::start(&guest, &lab, &store, &["--every", "200ms", "--policy", policy]);
        assert_eq!(protector.wait("attached")["incremental"], false);
        let first = protector.wait("checkpoint");
        assert_eq!((first["full"].clone(), first["number"].clone()), (true.into(), 1.into()));
        guest.touch("48M");
        let (boot, tick) = (guest.boot_id(), guest.tick());
        let checkpoint = protector.next_checkpoint();
        assert_eq!(checkpoint["full"], false);
        assert!(checkpoint["stopped_us"].as_u64().unwrap() > 0);
        crash(&guest);
        // The protector reports that QEMU has ended.
        let mut last_events = String::new();
        std::io::Read::read_to_string(&mut protector.lines, &mut last_events).unwrap();
        assert!(last_events.contains("qemu-ended"), "{last_events}");

        let restored = restore(&guest, &store, &[]);
        assert!(restored["checkpoint"].as_u64() >= checkpoint["number"].as_u64(), "{restored}");
        assert_eq!(guest.boot_id(), boot, "the guest was booted");
        assert!(guest.tick() > tick);
        guest.verify();
        wait_filled(&guest);
        guest.verify();
        guest.assert_sound();
        assert_ticks_once(&guest.file("console.log"));
        // The guest can be protected again, into the same store.
        let mut again = Protector::start(&guest, &lab, &store, &["--every", "200ms", "--count", "2"]);
        assert!(again.wait("checkpoint")["number"].as_u64() > restored["checkpoint"].as_u64());
        again.wait("checkpoint");
        assert!(again.child.wait().unwrap().success());
        guest.assert_sound();
    }
}

#[test]
fn the_guests_memory_is_compared_with_the_store() {
    let lab = Lab::new();
    let guest = lab.vm("compared").memory("192M").boot(&[]);
    guest.touch("48M");
    guest.ask("dirty 20 32 random");
    for policy in ["precopy", "basic", "cow"] {
        let arguments = ["--every", "50ms", "--policy", policy, "--count", "8", "--compare"];
        let mut protector = Protector::start(&guest, &lab, &store(&lab, policy), &arguments);
        let compared = protector.wait("compared");
        assert_eq!((compared["wrong"].clone(), compared["checkpoint"].clone()), (0.into(), 8.into()), "{compared}");
        let pages = compared["pages"].as_u64().unwrap();
        assert!(pages > 0 && pages + compared["written_since"].as_u64().unwrap() >= 192 << 8, "{compared}");
        assert!(protector.child.wait().unwrap().success());
    }
    guest.ask("dirty 0");
    // The comparison finds a change that the page tables do not show, here in the pause of the second checkpoint, and
    // names its page.
    let (page, change) = untracked_change(&guest);
    let hook = format!("test $REKINDLE_CHECKPOINT != 2 || {change}");
    let arguments = ["--every", "50ms", "--policy", "basic", "--count", "2", "--compare", "--disk-hook", &hook];
    let mut protector = Protector::start(&guest, &lab, &store(&lab, "untracked"), &arguments);
    let compared = protector.wait("compared");
    assert_eq!(compared["wrong"], 1, "{compared}");
    assert!(compared["named"][0].as_str().unwrap().ends_with(&format!(" page {page}")), "{compared}");
    assert_eq!(protector.child.wait().unwrap().code(), Some(1));
}

/// Returns a page that the guest has touched, and a command that changes this page in the guest's RAM file.
fn untracked_change(guest: &Guest<'_>) -> (u64, String) {
    use std::os::unix::fs::FileExt;
    let shown = guest.rekindle(&["--json", "show"]).ok().json();
    let path = shown["hardware"]["ram"]["path"].as_str().unwrap();
    let file = fs::File::open(path).unwrap();
    let mut content = [0; 4096];
    let pages = file.metadata().unwrap().len() / 4096;
    // Choose the last page with the agent's fill pattern: it is neither text nor zero, and is not written again.
    let page = (0..pages).rev().find(|page| {
        file.read_exact_at(&mut content, page * 4096).unwrap();
        content.chunks(8).filter(|word| word.iter().any(|byte| *byte > 127)).count() > 500
    });
    let page = page.expect("a touched page");
    let change = format!("printf '\\{:03o}' | dd of={path} bs=1 seek={} conv=notrunc", !content[0], page * 4096);
    (page, change)
}

#[test]
fn a_guest_survives_its_pager_and_reads_no_wrong_page() {
    let lab = Lab::new();
    let guest = lab.vm("paged").memory("256M").boot(&[]);
    guest.touch("128M");
    let boot = guest.boot_id();
    let store = store(&lab, "paged");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "200ms", "--count", "1"]);
    assert!(protector.child.wait().unwrap().success());
    let mut killed = 0;
    for _ in 0..5 {
        crash(&guest);
        restore(&guest, &store, &[]);
        // The fill may have finished already. Then the next round tries again.
        kill_watcher(&guest);
        if let Some(pager) = pager(&guest) {
            pager.kill().unwrap();
            assert!(pager.wait_end(Duration::from_secs(10)).unwrap());
        }
        if guest.file("fill.json").exists() {
            killed += 1;
            // A protector does not take a checkpoint of incomplete memory, ...
            let mut protector = Protector::start(&guest, &lab, &store, &["--every", "200ms", "--count", "1"]);
            protector.wait("waiting");
            drop(protector);
            // ... and a new QEMU does not get such memory. The failed reboot starts the VM's helpers again, and so the
            // pager.
            guest.rekindle(&["replace-qemu"]).status(1).prints(&["still being loaded", "rekindle recover"]);
        }
        guest.rekindle(&["recover"]).ok();
        wait_filled(&guest);
        assert_eq!(guest.boot_id(), boot);
        guest.verify();
        guest.assert_sound();
        if killed == 2 {
            break;
        }
    }
    assert!(killed > 0, "each fill finished before its pager was killed");
}

/// A protector's memory is bounded by 64 MB, plus 16 bytes per page, plus the pages of a checkpoint in flight.
#[test]
fn a_protector_keeps_no_second_copy_of_the_guest() {
    let lab = Lab::new();
    let guest = lab.vm("lean").memory("512M").boot(&[]);
    guest.touch("384M");
    guest.ask("dirty 10 64 random");
    for policy in ["precopy", "basic", "cow"] {
        let store = store(&lab, policy);
        let mut protector = Protector::start(&guest, &lab, &store, &["--every", "200ms", "--policy", policy]);
        let full = protector.wait("checkpoint");
        assert!(full["dirty_bytes"].as_u64().unwrap() > 384 << 20, "{full}");
        // Pages in flight were copied and are not in the store yet. The rest of a full checkpoint is read in parts.
        let in_flight = |checkpoint: &Value| {
            let pages = checkpoint["copied_for_writes"].as_u64().unwrap();
            checkpoint["copied_stopped_bytes"].as_u64().unwrap() + pages * 4096
        };
        let most_in_flight = (0..5).map(|_| in_flight(&protector.wait("checkpoint"))).fold(in_flight(&full), u64::max);
        let (memory, bound) = (protector.most_memory(), 64_000_000 + 16 * ((512 << 20) / 4096) + most_in_flight);
        eprintln!("{policy}: at most {memory} bytes of memory, {most_in_flight} of them in flight");
        assert!(memory < bound, "{policy}: {memory} of {bound} bytes");
    }
}

#[test]
fn an_eager_restore_loads_all_memory_and_an_older_checkpoint_can_be_chosen() {
    let lab = Lab::new();
    let guest = lab.vm("eager").boot(&[]);
    let store = store(&lab, "eager");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms", "--count", "3", "--keep", "2"]);
    assert!(protector.child.wait().unwrap().success());
    // A restore of a guest that runs is rejected.
    let path = store.to_str().unwrap();
    lab.rekindle(["restore", "eager", "--store", path]).status(1).prints(&["eager runs already"]);
    let boot = guest.boot_id();
    crash(&guest);
    lab.rekindle(["restore", "eager", "--store", path, "--at", "1"])
        .status(1)
        .prints(&["there is no checkpoint 1", "2"]);
    lab.assert_empty();
    let restored = restore(&guest, &store, &["--eager", "--at", "2"]);
    assert_eq!((restored["filled"].clone(), restored["checkpoint"].clone()), (true.into(), 2.into()));
    assert_eq!(guest.boot_id(), boot);
    guest.assert_sound();
}

#[test]
fn store_commands_work_and_stock_qemu_loads_an_exported_checkpoint() {
    let lab = Lab::new();
    // The state of a virtio-net with a tap can only be loaded with a tap; this guest has no network, so that any QEMU
    // can load it.
    let guest = lab.vm("kept").memory("96M").net(Net::None).start(&[]);
    let ticks = |console: &Path| {
        let text = fs::read_to_string(console).unwrap_or_default();
        text.lines().filter(|line| line.starts_with("tick ")).nth(3).map(str::to_owned)
    };
    wait_for("the guest to tick", DEADLINE, || ticks(&guest.file("console.log")));
    let store = store(&lab, "kept");
    let path = store.to_str().unwrap();
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms", "--count", "2"]);
    assert!(protector.child.wait().unwrap().success());
    let listed = lab.rekindle(["--json", "store", "ls", path]).ok().json();
    assert_eq!(listed["checkpoints"].as_array().unwrap().len(), 2, "{listed:#}");
    assert_eq!(listed["vm"]["name"], "kept");
    lab.rekindle(["store", "ls", path]).ok().prints(&["NUMBER", "protect kept", "on the disk"]);
    lab.rekindle(["store", "verify", path]).ok().prints(&["2 checkpoints", "all good"]);
    lab.rekindle(["store", "compact", path]).ok().prints(&["freed"]);

    // Start QEMU without Rekindle, with the same command line but anonymous RAM.
    let stream = lab.path("kept.stream");
    let file = stream.to_str().unwrap();
    lab.rekindle(["store", "export", path, "--output", file]).ok().prints(&["checkpoint 2"]);
    // Only libvirt's own domains can be given to it.
    let for_libvirt = lab.path("for-libvirt");
    let export = ["store", "export", path, "--libvirt", "--output", for_libvirt.to_str().unwrap()];
    lab.rekindle(export).status(1).prints(&["does not have libvirt's description of a domain"]);
    assert!(!for_libvirt.exists());
    lab.rekindle(["store", "export", path, "--output", file]).status(0);
    let shown = guest.rekindle(&["--json", "show"]).ok().json();
    let line: Vec<String> = serde_json::from_value(shown["command_line"].clone()).unwrap();
    let logs = fs::canonicalize(guest.file("logs")).unwrap();
    crash(&guest);
    let aside = lab.path("aside");
    fs::create_dir(&aside).unwrap();
    let own = |word: &String| {
        let word =
            word.replace(&format!("{}/vmm-1", guest.file("").display()).replace("//", "/"), aside.to_str().unwrap());
        let word = word.replace(logs.to_str().unwrap(), aside.to_str().unwrap());
        let word = word.replace(guest.file("").to_str().unwrap(), &format!("{}/", aside.display()));
        if word.starts_with("memory-backend-file") { "memory-backend-ram,id=ram,size=96M".to_owned() } else { word }
    };
    let mut words: Vec<String> = line.iter().map(own).collect();
    // This QEMU starts `cat`.
    let sandbox = words.iter().position(|word| word == "-sandbox").unwrap();
    words.drain(sandbox..sandbox + 2);
    words.extend(["-incoming".to_owned(), format!("exec:cat {file}")]);
    let mut qemu = std::process::Command::new(qemu_new()).args(&words).stderr(Stdio::piped()).spawn().unwrap();
    let console = aside.join("console.log");
    let ticked = wait_for("the guest to tick in another QEMU", DEADLINE, || {
        if let Some(status) = qemu.try_wait().unwrap() {
            let mut errors = String::new();
            std::io::Read::read_to_string(qemu.stderr.as_mut().unwrap(), &mut errors).unwrap();
            panic!("{status}: {errors}\n{words:?}");
        }
        ticks(&console)
    });
    qemu.kill().unwrap();
    qemu.wait().unwrap();
    assert!(ticked.starts_with("tick "));
}

#[test]
fn protection_continues_after_a_warm_reboot_and_after_a_protector_dies() {
    let lab = Lab::new();
    let guest = lab.vm("moved").memory("192M").boot(&[]);
    let store = store(&lab, "moved");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "200ms"]);
    protector.next_checkpoint();
    guest.warm(&[]);
    protector.wait("moved");
    guest.touch("32M");
    let boot = guest.boot_id();
    protector.next_checkpoint();
    // After a kill between two checkpoints, the next protector continues; after a kill within one, it starts with a
    // full checkpoint.
    for _ in 0..4 {
        protector.kill();
        wait_for("the guest to run", DEADLINE, || {
            let mut next = Protector::start(&guest, &lab, &store, &["--every", "200ms", "--count", "1"]);
            next.child.wait().unwrap().success().then_some(())
        });
        protector = Protector::start(&guest, &lab, &store, &["--every", "100ms"]);
        protector.next_checkpoint();
    }
    crash(&guest);
    drop(protector);
    restore(&guest, &store, &[]);
    assert_eq!(guest.boot_id(), boot);
    guest.verify();
    wait_filled(&guest);
    guest.assert_sound();
}

#[test]
fn a_guest_that_a_killed_protector_left_stopped_is_resumed() {
    let lab = Lab::new();
    let guest = lab.vm("left").boot(&[]);
    let store = store(&lab, "left");
    let stop = || {
        let path = guest.only_qemu().directory.join("watch.sock");
        let mut qmp = rekindle_qemu::qmp::Qmp::connect(&path, DEADLINE).unwrap();
        qmp.execute::<Value>("stop", ()).unwrap();
        fs::write(guest.file("paused"), []).unwrap();
    };
    stop();
    assert!(guest.status().contains("paused"));
    guest.rekindle(&["recover"]).ok().prints(&["left the guest stopped", "it was resumed"]);
    assert_eq!(guest.status(), "running");
    guest.rekindle(&["recover"]).ok().prints(&["nothing to recover"]);
    // A warm reboot keeps a pause that an operator requested, but ends that of an interrupted checkpoint.
    stop();
    guest.warm(&[]);
    assert_eq!(guest.status(), "running");
    assert!(!guest.file("paused").exists());
    stop();
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms", "--count", "1"]);
    protector.wait("checkpoint");
    assert!(protector.child.wait().unwrap().success());
    assert_eq!(guest.status(), "running");
    guest.assert_sound();
}

#[test]
fn errors_name_what_prevents_a_protection_or_a_restore() {
    let lab = Lab::new();
    let disk = lab.path("disk.raw");
    fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
    let guest =
        lab.vm("written").section(&format!("[[disk]]\npath = {disk:?}\ncache = \"none\"\nserver = false")).boot(&[]);
    let directory = store(&lab, "written");
    let path = directory.to_str().unwrap();
    let protect = |arguments: &[&str]| lab.rekindle(["protect", "written", "--store", path].iter().chain(arguments));
    protect(&[]).status(1).prints(&["writes to", "disk.raw", "--disk crash-consistent"]);
    let crash_consistent = ["--disk", "crash-consistent", "--count", "1"];
    protect(&[&crash_consistent[..], &["--policy", "precopy"]].concat())
        .status(1)
        .prints(&["O_DIRECT", "--policy cow"]);
    protect(&["--disk-hook", "exit 7", "--every", "50ms", "--count", "1"])
        .status(1)
        .prints(&["hook `exit 7`", "exit status: 7"]);
    guest.assert_sound();
    protect(&crash_consistent).ok();
    let other = lab.vm("other").start(&[]);
    lab.rekindle(["protect", "other", "--store", path]).status(1).prints(&["holds VM written", "not VM other"]);
    lab.rekindle(["protect", "absent", "--store", path]).status(1).prints(&["there is no VM absent"]);
    let nothing = lab.path("nothing");
    fs::create_dir(&nothing).unwrap();
    lab.rekindle(["restore", "x", "--store", nothing.to_str().unwrap()]).status(1).prints(&["not a store of Rekindle"]);
    other.rekindle(&["stop", "--now"]).ok();
    crash(&guest);
    let definition = fs::read_to_string(lab.path("written.toml")).unwrap();
    let on_tap = |line: &&str| ["netns = ", "address = ", "ifname = "].iter().any(|key| line.starts_with(key));
    let lines = definition.lines().filter(|line| !on_tap(line));
    let here = lab.path("here.toml");
    fs::write(&here, lines.collect::<Vec<_>>().join("\n").replace("kind = \"tap\"", "kind = \"user\"")).unwrap();
    lab.rekindle(["restore", "written", "--store", path, "--definition", here.to_str().unwrap()]).status(1).prints(&[
        "network net0",
        "needs one again",
        "kind = \"tap\"",
    ]);
    fs::remove_file(&disk).unwrap();
    lab.rekindle(["restore", "written", "--store", path]).status(1).prints(&["disk.raw"]);
    lab.assert_empty();
}
