//! The `[[net]]` sections.

use super::super::document::Section;
use super::super::names::{check_interface, check_netns};
use super::super::{Forward, Mac, Net, NetBackend, TapPlace, derived_ifname};
use super::{UniqueValues, read_id, record_duplicate};
use rekindle_qemu::command::MAX_QUEUES;

const TAP_KEYS: &[&str] = &["bridge", "netns", "address", "ifname", "queues", "vhost"];
const USER_KEYS: &[&str] = &["forward"];

/// Reads every net, in order. `vm_name` is that from which addresses and interface names are derived.
pub(super) fn read(top: &Section<'_>, vm_name: &str) -> Vec<Net> {
    let mut ids = UniqueValues::new("give each net its own id");
    let mut macs = UniqueValues::new("give each net its own address, or leave `mac` out");
    let mut taps = UniqueValues::new("give each tap its own name, or leave `ifname` out");
    let mut ports = ClaimedPorts::default();
    let mut nets = Vec::new();
    for (index, section) in top.sections("net").iter().enumerate() {
        let id = read_id(section, index, &mut ids);
        let mac = section.parsed("mac").unwrap_or_else(|| Mac::derived(vm_name, &id));
        macs.claim(section, "mac", &mac.to_string());
        let backend = if is_tap(section) {
            let ifname = section.checked("ifname", check_interface);
            let ifname = ifname.map_or_else(|| derived_ifname(vm_name, &id), str::to_owned);
            taps.claim(section, "ifname", &ifname);
            let queues = section.number("queues", 1, MAX_QUEUES).unwrap_or(1);
            NetBackend::Tap { ifname, queues, vhost: section.flag("vhost", false), place: read_tap_place(section) }
        } else {
            NetBackend::User { forward: read_forwards(section, &mut ports) }
        };
        nets.push(Net { id, mac, backend });
    }
    nets
}

/// Returns whether the net is a tap, and records keys that belong to the other kind.
fn is_tap(section: &Section<'_>) -> bool {
    if !section.has("kind") {
        section.record_missing(
            "kind",
            "write kind = \"user\" (no rights needed) or kind = \"tap\" (with bridge or netns)",
        );
        return TAP_KEYS.iter().any(|key| section.has(key));
    }
    let Some(is_tap) = section.choice("kind", &[("user", false), ("tap", true)]) else { return false };
    let (kind, other_kind, keys_of_other) = if is_tap { ("tap", "user", USER_KEYS) } else { ("user", "tap", TAP_KEYS) };
    for key in keys_of_other.iter().filter(|key| section.has(key)) {
        let why = format!(
            "`net.{key}` is for kind = \"{other_kind}\", but this net's kind is \"{kind}\"; change the kind or take `{key}` out"
        );
        section.conflict(key, why);
    }
    is_tap
}

fn read_tap_place(section: &Section<'_>) -> TapPlace {
    let bridge = section.checked("bridge", check_interface).map(str::to_owned);
    let netns = section.checked("netns", check_netns).map(str::to_owned);
    let address = section.parsed("address");
    match (section.has("bridge"), section.has("netns")) {
        (false, false) => section.conflict_of_section(
            "a tap needs a place; write bridge = \"br0\" (a bridge of the host) or netns = \"blue\" (a network namespace)",
        ),
        (true, true) => section.conflict("netns", "`net.bridge` and `net.netns` exclude each other; take one out"),
        (true, false) if section.has("address") => section.conflict(
            "address",
            "`net.address` is for a tap in a netns; put the host's address on the bridge itself, and take it out here",
        ),
        (true, false) | (false, true) => {}
    }
    match bridge {
        Some(bridge) => TapPlace::Bridge { bridge },
        None => TapPlace::Netns { netns: netns.unwrap_or_default(), address },
    }
}

/// The ports of the host that are forwarded, over all nets, with the byte offsets of the forwards.
#[derive(Default)]
struct ClaimedPorts(Vec<(Forward, usize)>);

fn read_forwards(section: &Section<'_>, ports: &mut ClaimedPorts) -> Vec<Forward> {
    let mut forwards = Vec::new();
    for item in section.texts("forward") {
        let forward = match item.text.parse::<Forward>() {
            Ok(forward) => forward,
            Err(why) => {
                section.reject_item("forward", &item, why);
                continue;
            }
        };
        if let Some((_, first_offset)) = ports.0.iter().find(|(other, _)| other.collides_with(&forward)) {
            let hint = "forward another port of the host";
            record_duplicate(section, "forward", item.text, item.offset, *first_offset, hint);
        }
        ports.0.push((forward, item.offset));
        forwards.push(forward);
    }
    forwards
}
