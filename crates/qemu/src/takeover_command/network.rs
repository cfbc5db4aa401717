//! Networks. Taps are passed as descriptors. Ports that a user network forwards are bound by the source: they are left
//! out, and reported so that they can be added later. The *source* is the QEMU that runs the guest now.

use super::{Descriptor, Forward, Rewriter, SourceDescriptor};
use crate::adopt::obstacle_of_network;
use crate::foreign::{CommandOption, forwards};
use crate::options::Options;
use std::os::fd::RawFd;

/// Options of a tap that QEMU rejects if the tap is a descriptor. `downscript` is then not run when the guest ends; most
/// taps need none, because the interface ends with its last descriptor.
const NAMED_TAP_KEYS: [&str; 9] =
    ["ifname", "script", "downscript", "br", "helper", "queues", "vnet_hdr", "vhostfd", "vhostfds"];

impl Rewriter<'_> {
    pub(super) fn read_netdev(&mut self, option: &CommandOption<'_>) {
        let Some(mut netdev) = self.parse(option, "type") else { return };
        let (kind, id) = (netdev.get("type").unwrap_or_default(), netdev.get("id").unwrap_or_default());
        // Its card was unplugged. Another one may have been plugged in with a network of this id.
        if self.facts.removed_networks.contains(&id) || self.facts.plugged_networks.contains_key(&id) {
            return;
        }
        match kind.as_str() {
            "user" => self.add_user_network(option, netdev, Some(id)),
            "tap" if netdev.get("fd").or_else(|| netdev.get("fds")).is_some() => self.keep_tap(option, &netdev, &id),
            "tap" | "bridge" => {
                if self.pass_named_tap(&mut netdev, &id) {
                    self.add("netdev", netdev.to_string());
                }
            }
            "hubport" => self.keep_unchanged(option),
            other => {
                let why = "its other end is another process, which has one connection to the guest";
                self.refuse(format!("-netdev {other},id={id}"), obstacle_of_network(other).unwrap_or(why));
            }
        }
    }

    /// Handles `-nic` and `-net`, which describe a network and its card together.
    pub(super) fn read_short_network(&mut self, option: &CommandOption<'_>) {
        let Some(network) = self.parse(option, "type") else { return };
        match network.get("type").unwrap_or_default().as_str() {
            "none" => self.keep_unchanged(option),
            "nic" if option.name == "net" => self.keep_unchanged(option),
            "user" => {
                let id = network.get("id");
                self.add_user_network(option, network, id);
            }
            _ => {
                let what = format!("-{} {}", option.name, option.value.unwrap_or_default());
                self.refuse(what, "Rekindle passes on only a network that -netdev names, with its card by -device");
            }
        }
    }

    /// Keeps a user network, without its forwarded ports.
    fn add_user_network(&mut self, option: &CommandOption<'_>, mut network: Options, id: Option<String>) {
        let rules = forwards(&network);
        if rules.is_empty() {
            self.keep_unchanged(option);
            return;
        }
        self.forwards.extend(rules.into_iter().map(|rule| Forward { network: id.clone(), rule }));
        network.remove(|key| key == "hostfwd");
        self.add(option.name, network.to_string());
    }

    /// Keeps a tap that the source was given as descriptors.
    fn keep_tap(&mut self, option: &CommandOption<'_>, netdev: &Options, id: &str) {
        let values = |keys: [&str; 2]| keys.into_iter().filter_map(|key| netdev.get(key)).collect::<Vec<_>>().join(":");
        let (queues, vhosts) = (values(["fd", "fds"]), values(["vhostfd", "vhostfds"]));
        for word in queues.split(':') {
            let number = word.parse::<RawFd>();
            match number.as_ref().ok().and_then(|number| self.numbers.source(*number)) {
                Some(SourceDescriptor::Tap { interface }) => {
                    let source = number.unwrap_or_default();
                    self.numbers.put(source, Descriptor::Tap { source, interface: interface.clone() });
                }
                _ => self.refuse(format!("network {id}"), format!("descriptor {word} of this QEMU is no tap")),
            }
        }
        for word in vhosts.split(':').filter(|word| !word.is_empty()) {
            match word.parse() {
                Ok(number) => self.numbers.put(number, Descriptor::VhostNet),
                Err(_) => self.refuse(format!("network {id}"), format!("{word} is no descriptor's number")),
            }
        }
        let has_vhost = is_on(netdev, "vhost") || is_on(netdev, "vhostforce");
        if has_vhost && vhosts.is_empty() {
            let mut netdev = netdev.clone();
            self.add_vhosts(&mut netdev, queues.split(':').count());
            self.add("netdev", netdev.to_string());
        } else {
            self.keep_unchanged(option);
        }
    }

    /// Replaces a tap that the source has opened by name, or got from a helper, by descriptors. Returns `false` after an
    /// obstacle was added.
    fn pass_named_tap(&mut self, netdev: &mut Options, id: &str) -> bool {
        let Some(interface) = netdev.get("ifname") else {
            self.refuse(format!("network {id}"), "the command line does not name its tap: start it with ifname=");
            return false;
        };
        let queues = self.numbers.claim_tap(&interface);
        let expected: usize = netdev.get("queues").and_then(|queues| queues.parse().ok()).unwrap_or(1);
        if queues.len() != expected {
            let why = format!("this QEMU has {} descriptors of tap {interface}, not {expected}", queues.len());
            self.refuse(format!("network {id}"), why);
            return false;
        }
        netdev.remove(|key| NAMED_TAP_KEYS.contains(&key));
        netdev.set("type", "tap");
        netdev.set(if expected == 1 { "fd" } else { "fds" }, &joined(&queues));
        if is_on(netdev, "vhost") || is_on(netdev, "vhostforce") {
            self.add_vhosts(netdev, expected);
        }
        true
    }

    /// Adds the networks of cards that were plugged in while the guest ran: taps, which QEMU was given as descriptors.
    pub(super) fn add_plugged_networks(&mut self) {
        let facts = self.facts;
        if facts.plugged_networks.is_empty() {
            return;
        }
        let queues = facts.plugged_networks.values().filter_map(|network| network.descriptors.as_ref());
        let queue_count: usize = queues.map(Vec::len).sum();
        let has_vhost = match self.numbers.unnamed_vhosts().checked_sub(self.unnamed_vhosts) {
            Some(0) => false,
            Some(count) if count == queue_count => true,
            _ => {
                let why = "Rekindle cannot find out which of them the host's kernel serves (vhost-net): unplug them";
                return self.refuse("network cards that were plugged in", why);
            }
        };
        for (id, network) in &facts.plugged_networks {
            let (kind, descriptors) = (network.kind.as_str(), network.descriptors.as_deref());
            let queue = |source: &RawFd| match self.numbers.source(*source) {
                Some(SourceDescriptor::Tap { interface }) => {
                    Some(Descriptor::Tap { source: *source, interface: interface.clone() })
                }
                _ => None,
            };
            let queues: Option<Vec<Descriptor>> =
                descriptors.filter(|_| kind == "tap").and_then(|numbers| numbers.iter().map(queue).collect());
            let Some(queues) = queues else {
                let why = "its card was plugged in while the guest ran; of these, only taps that QEMU was given as \
                           descriptors can be passed on: unplug it, or start the VM with it";
                self.refuse(format!("network {id} ({kind})"), why);
                continue;
            };
            let count = queues.len();
            let numbers: Vec<RawFd> = queues.into_iter().map(|queue| self.numbers.put_new(queue)).collect();
            let key = if count == 1 { "fd" } else { "fds" };
            let mut netdev = Options::Pairs(vec![("type".into(), Some("tap".into())), ("id".into(), Some(id.clone()))]);
            netdev.set(key, &joined(&numbers));
            if has_vhost {
                netdev.set("vhost", "on");
                self.add_vhosts(&mut netdev, count);
            }
            self.add("netdev", netdev.to_string());
        }
    }

    /// Gives each queue of a tap a vhost device: the destination may be unable to open one.
    fn add_vhosts(&mut self, netdev: &mut Options, queues: usize) {
        self.unnamed_vhosts += queues;
        let numbers: Vec<_> = (0..queues).map(|_| self.numbers.put_new(Descriptor::VhostNet)).collect();
        let is_single = netdev.get("fd").is_some();
        netdev.set(if is_single { "vhostfd" } else { "vhostfds" }, &joined(&numbers));
    }
}

fn is_on(options: &Options, key: &str) -> bool {
    options.get(key).is_some_and(|value| ["on", "yes", "true", "y"].contains(&value.as_str()))
}

fn joined(numbers: &[RawFd]) -> String {
    numbers.iter().map(RawFd::to_string).collect::<Vec<_>>().join(":")
}
