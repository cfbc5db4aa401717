//! The command line of an attached QEMU in a store that others can write: a restoring host uses only what describes the
//! machine, and what its configuration allows.

use super::attach::{ForeignGuest, attach, protect};
use crate::common::hostile::HostileStore;
use crate::common::{Lab, qemu_new};
use serde_json::{Value, json};

#[test]
fn a_changed_command_line_starts_nothing() {
    let lab = Lab::without_root();
    let machine = ["-machine", "q35,smm=off", "-m", "192M", "-device", "vmgenid,id=gen"];
    let mut foreign = ForeignGuest::boot(&lab, "foreign", qemu_new(), &machine);
    attach(&lab, &foreign);
    let store = lab.path("store");
    protect(&lab, "foreign", &store, &["--count", "1"]);
    foreign.qemu.kill();
    let hostile = HostileStore::of(&lab, &store);
    let (trap, mark) = hostile.trap();
    let add = |recipe: &mut Value, option: &str, value: &str| {
        let words = recipe["hardware"]["foreign"]["words"].as_array_mut().unwrap();
        words.extend([json!(option), json!(value)]);
    };
    for (option, value) in [
        ("-netdev", "tap,id=t,script=/tmp/x"),
        ("-chardev", "file,id=c,path=/etc/cron.d/x"),
        ("-device", "virtio-net-pci,romfile=/etc/shadow"),
        ("-object", "memory-backend-file,id=m,mem-path=/etc/shadow,size=1M"),
        ("-plugin", "/tmp/x.so"),
        ("-monitor", "unix:/tmp/m,server,nowait"),
    ] {
        hostile.write(|recipe, _| add(recipe, option, value));
        let line = format!("arguments = [\"{option} {value}\"]");
        hostile.assert_refused("foreign", &[&format!("{option} {value}: "), &line]);
    }
    for (option, value, path) in [
        ("-kernel", "/etc/shadow", "/etc/shadow"),
        ("-drive", "file=/dev/sda,format=raw,if=virtio", "/dev/sda"),
        ("-blockdev", r#"{"driver":"file","filename":"/etc/shadow","node-name":"a"}"#, "/etc/shadow"),
    ] {
        hostile.write(|recipe, _| add(recipe, option, value));
        hostile.assert_refused("foreign", &[&format!("{option}: {path}"), &format!("paths = [\"{path}\"]")]);
    }
    hostile.write(|recipe, _| {
        recipe["hardware"]["foreign"]["networks"][0]["options"] = json!("user,id=n,guestfwd=tcp:10.0.2.9:1-cmd:id");
    });
    hostile.assert_refused("foreign", &["guestfwd", "not a plain user network"]);
    hostile.write(|recipe, _| recipe["definition"]["qemu"] = json!(trap));
    hostile.assert_refused("foreign", &[&trap.display().to_string(), "qemu = ["]);
    hostile.write(|recipe, metadata| {
        recipe["format"] = json!(7);
        metadata["overlays"] = json!([{
            "device": "d", "drive": "d", "number": 0, "image": "/etc/shadow", "format": "raw", "directory": "/etc/x",
            "bytes": 4096, "cache": {"direct": false, "no-flush": false}, "detect_zeroes": "off",
            "disk": "00000000-0000-0000-0000-000000000001", "epoch": 1,
        }]);
    });
    hostile.assert_refused("foreign", &["/etc/shadow", "/etc/x"]);
    assert!(!mark.exists(), "a program of the store was started");
    hostile.write(|_, _| ());
    hostile.run(".host.toml", "foreign", &["restore"]).ok();
}
