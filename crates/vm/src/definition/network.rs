//! A VM's network interfaces: QEMU's own user-mode network, or a tap in a bridge or a network namespace.

use serde::{Deserialize, Serialize};

use super::addresses::{Forward, HostAddress, Mac, digest};
use super::names::MAX_INTERFACE_CHARS;
use rekindle_qemu::command::{is_one_queue, one_queue};

/// One `[[net]]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Net {
    /// Unique among the VM's nets, and part of QEMU's ids. Default `net0`, `net1`, ... by position.
    pub id: String,
    /// MAC address of the guest's card. Default [`Mac::derived`], so that it is the same at every start and on every
    /// host.
    pub mac: Mac,
    /// The network on the host's side.
    #[serde(flatten)]
    pub backend: NetBackend,
}

/// The host's side of a [`Net`]: the key `kind` and the keys that belong to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum NetBackend {
    /// QEMU's own network, which needs no rights. The guest can open connections to the outside; only forwarded ports
    /// are reachable from the outside.
    User {
        /// Ports of the host that lead to the guest.
        #[serde(default)]
        forward: Vec<Forward>,
    },
    /// A tap interface, kept open by Rekindle, so that the guest's TCP connections outlive a QEMU.
    Tap {
        /// Name of the tap on the host. Default [`derived_ifname`].
        ifname: String,
        /// Number of queues of the guest's card.
        #[serde(default = "one_queue", skip_serializing_if = "is_one_queue")]
        queues: u16,
        /// Whether the host's kernel serves the card (vhost-net).
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        vhost: bool,
        /// Where the tap is connected.
        #[serde(flatten)]
        place: TapPlace,
    },
}

/// Where a tap is connected: the key `bridge`, or `netns` with `address`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TapPlace {
    /// A bridge of the host.
    Bridge {
        /// Name of the bridge.
        bridge: String,
    },
    /// A network namespace, which Rekindle makes if it does not exist.
    Netns {
        /// Name of the namespace, as `ip netns` shows it.
        netns: String,
        /// The host's own address on the tap. `None`: the tap gets no address.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        address: Option<HostAddress>,
    },
}

/// Returns the default name of a tap: `NAME-ID` if that fits the 15 characters of an interface name, otherwise the
/// first 8 characters of the VM's name and a hash of both. An id with a dash also gets the hash, so that VM `a` with
/// net `b-c` and VM `a-b` with net `c` do not claim the same tap.
pub fn derived_ifname(name: &str, id: &str) -> String {
    let short_name = format!("{name}-{id}");
    if short_name.len() <= MAX_INTERFACE_CHARS && !id.contains('-') {
        return short_name;
    }
    let [byte0, byte1, byte2, ..] = digest(name, id);
    let stem: String = name.chars().take(8).collect();
    format!("{stem}-{byte0:02x}{byte1:02x}{byte2:02x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_interface_names_fit_and_differ() {
        assert_eq!(derived_ifname("web", "net0"), "web-net0");
        assert_eq!(derived_ifname("abcdefghij", "net0"), "abcdefghij-net0");
        assert_eq!(derived_ifname("abcdefghijk", "net0"), "abcdefgh-7e3846");
        assert_ne!(derived_ifname("a", "b-c"), derived_ifname("a-b", "c"));
        assert!(derived_ifname(&"x".repeat(63), &"y".repeat(31)).len() == 15);
    }
}
