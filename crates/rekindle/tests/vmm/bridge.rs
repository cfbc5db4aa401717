//! Guests in a bridge that the administrator has created. Rekindle does not remove it.

use crate::common::{Bridge, Lab, assert_ticks_once};
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

/// Returns whether the host has this interface.
fn is_there(interface: &str) -> bool {
    Path::new("/sys/class/net").join(interface).exists()
}

/// Returns the stand-in taps on the host, which exist only during a reboot.
fn stand_ins() -> Vec<String> {
    let interfaces =
        std::fs::read_dir("/sys/class/net").unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    interfaces
        .filter(|name| name.strip_prefix("rk").is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_hexdigit())))
        .collect()
}

#[test]
fn connections_over_a_bridge_outlive_a_qemu() {
    let lab = Lab::new();
    let bridge = Bridge::new(&lab);
    let guest = lab.vm("bridged").bridge(&bridge).boot(&[]);
    assert_eq!(bridge.ports(), ["bridged-net0"]);
    guest.touch("16M");
    let boot = guest.boot_id();
    let mut echo = guest.connect(7).unwrap();
    echo.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut echoes = |text: &[u8]| {
        let mut back = vec![0; text.len()];
        echo.write_all(text).unwrap();
        echo.read_exact(&mut back).unwrap();
        assert_eq!(back, text);
    };
    echoes(b"before");
    for how in ["warm", "warm", "saved"] {
        guest.reboot(how, &[]).ok();
        echoes(how.as_bytes());
        guest.verify();
        assert_eq!(guest.boot_id(), boot, "after {how}");
        assert_eq!(bridge.ports(), ["bridged-net0"], "after {how}");
        assert!(stand_ins().is_empty(), "{:?} after {how}", stand_ins());
        guest.assert_sound();
    }
    assert_ticks_once(&guest.file("console.log"));
    guest.reboot("cold", &[]).ok();
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot);
    guest.rekindle(&["stop"]).ok();
    // The tap is Rekindle's, the bridge is not.
    assert!(bridge.ports().is_empty() && !is_there("bridged-net0") && is_there(&bridge.name), "{:?}", bridge.ports());
    drop(bridge);
    lab.assert_empty();
}

#[test]
fn a_missing_or_wrong_bridge_is_rejected_with_a_remedy_before_anything_is_created() {
    let lab = Lab::new();
    let run = |bridge: &str, words: &[&str]| {
        let section = format!("[[net]]\nkind = \"tap\"\nbridge = \"{bridge}\"");
        let definition = lab.vm("astray").net(crate::common::Net::None).section(&section).write();
        lab.rekindle(["run", definition.to_str().unwrap()]).status(1).prints(words);
        assert!(!is_there("astray-net0"));
        lab.assert_empty();
    };
    run(
        "rt-absent",
        &["network net0: `bridge = \"rt-absent\"`: there is no such interface", "ip link add rt-absent type bridge"],
    );
    run("lo", &["network net0: `bridge = \"lo\"`: that interface is no bridge"]);
}
