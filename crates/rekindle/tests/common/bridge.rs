//! A bridge on the test host.

use super::lab::Lab;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// A bridge that is connected to a lab's namespace; the bridge and the connection are removed on drop. Only the
/// bridge's own ports can reach it: the host has no address on it.
pub struct Bridge {
    /// Name that is unique on this host.
    pub name: String,
    namespace: String,
}

/// The interface in the lab's namespace that leads to the bridge.
pub const NEAR: &str = "near";

fn ip(line: &str) {
    let output = Command::new("ip").args(line.split(' ')).output().expect("ip runs");
    assert!(output.status.success(), "ip {line}: {}", String::from_utf8_lossy(&output.stderr));
}

impl Bridge {
    /// Creates the bridge and the lab's namespace.
    pub fn new(lab: &Lab) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("rt{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let bridge = Self { name, namespace: lab.namespace.clone() };
        let Self { name, namespace } = &bridge;
        ip(&format!("netns add {namespace}"));
        ip(&format!("link add {name} type bridge"));
        ip(&format!("link set {name} up"));
        ip(&format!("link add {name}p master {name} type veth peer name {NEAR} netns {namespace}"));
        ip(&format!("link set {name}p up"));
        ip(&format!("-n {namespace} link set {NEAR} up"));
        bridge
    }

    /// Gives the lab an address in the bridge's network.
    pub fn address(&self, address: &str) {
        ip(&format!("-n {} addr add {address} dev {NEAR}", self.namespace));
    }

    /// Returns the interfaces in the bridge, except the one that leads to the lab.
    pub fn ports(&self) -> Vec<String> {
        let output = Command::new("ip").args(["-o", "link", "show", "master", &self.name]).output().expect("ip runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let names = text.lines().filter_map(|line| Some(line.split(": ").nth(1)?.split('@').next()?.trim().to_owned()));
        names.filter(|name| *name != format!("{}p", self.name)).collect()
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        // Removing one end of the veth pair removes both.
        for line in [
            format!("link del {}p", self.name),
            format!("link del {}", self.name),
            format!("netns del {}", self.namespace),
        ] {
            let _ = Command::new("ip").args(line.split(' ')).stderr(Stdio::null()).status();
        }
    }
}
