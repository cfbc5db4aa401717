//! The `[[net]]` sections.

use super::super::document::{Section, quoted};
use super::super::error::Problem;
use super::super::names::{check_interface, check_netns};
use super::super::{Forward, HostAddress, Mac, Net, NetBackend, TapPlace, derived_ifname};
use super::{Taken, id};

/// Reads every net, in order. `stem` is the VM's name, from which addresses and interface names are derived.
pub(super) fn read(top: &Section<'_>, stem: &str) -> Vec<Net> {
    let mut ids = Taken::new("give each net its own id");
    let mut macs = Taken::new("give each net its own address, or leave `mac` out");
    let mut taps = Taken::new("give each tap its own name, or leave `ifname` out");
    let mut forwards: Vec<(Forward, usize)> = Vec::new();
    let mut net = |(index, section): (usize, Section<'_>)| {
        let id = id(&section, index, &mut ids);
        let mac = section.parsed::<Mac>("mac");
        let mac_at = mac.as_ref().map_or(section.at, |found| found.at);
        let mac = mac.map_or_else(|| Mac::derived(stem, &id), |found| found.value);
        macs.claim(&section, "mac", mac.to_string(), mac_at);
        let backend = if is_tap(&section) {
            let ifname = section.checked("ifname", check_interface);
            let ifname_at = ifname.map_or(section.at, |found| found.at);
            let ifname = ifname.map_or_else(|| derived_ifname(stem, &id), |found| found.value.to_owned());
            taps.claim(&section, "ifname", ifname.clone(), ifname_at);
            NetBackend::Tap { ifname, place: tap_place(&section) }
        } else {
            NetBackend::User { forward: forward(&section, &mut forwards) }
        };
        Net { id, mac, backend }
    };
    top.sections("net").into_iter().enumerate().map(&mut net).collect()
}

/// Returns whether the net is a tap, and records keys that belong to the other kind.
fn is_tap(section: &Section<'_>) -> bool {
    if section.at("kind").is_none() {
        section.missing("kind", "write kind = \"user\" (no rights needed) or kind = \"tap\" (with bridge or netns)");
        return ["bridge", "netns", "address", "ifname"].into_iter().any(|key| section.at(key).is_some());
    }
    let tap = section.choice("kind", &[("user", false), ("tap", true)]).is_some_and(|found| found.value);
    let (kind, others): (_, &[&'static str]) =
        if tap { ("tap", &["forward"]) } else { ("user", &["bridge", "netns", "address", "ifname"]) };
    if section.text("kind").is_some_and(|found| found.value == kind) {
        for (key, at) in others.iter().filter_map(|key| Some((key, section.at(key)?))) {
            let other = if tap { "user" } else { "tap" };
            let why = format!(
                "`net.{key}` is for kind = \"{other}\", but this net's kind is \"{kind}\"; change the kind or take `{key}` out"
            );
            section.document().conflict(at, why);
        }
    }
    tap
}

fn tap_place(section: &Section<'_>) -> TapPlace {
    let bridge = section.checked("bridge", check_interface).map(|found| found.value.to_owned());
    let netns = section.checked("netns", check_netns).map(|found| found.value.to_owned());
    let address = section.parsed::<HostAddress>("address").map(|found| found.value);
    match (section.at("bridge"), section.at("netns")) {
        (None, None) => {
            let why = "a tap needs a place; write bridge = \"br0\" (a bridge of the host) or netns = \"blue\" (a network namespace)";
            section.document().conflict(section.at, why);
        }
        (Some(_), Some(at)) => {
            section.document().conflict(at, "`net.bridge` and `net.netns` exclude each other; take one out");
        }
        (Some(_), None) => {
            if let Some(at) = section.at("address") {
                let why = "`net.address` is for a tap in a netns; put the host's address on the bridge itself, and take it out here";
                section.document().conflict(at, why);
            }
        }
        (None, Some(_)) => {}
    }
    match bridge {
        Some(bridge) => TapPlace::Bridge { bridge },
        None => TapPlace::Netns { netns: netns.unwrap_or_default(), address },
    }
}

fn forward(section: &Section<'_>, taken: &mut Vec<(Forward, usize)>) -> Vec<Forward> {
    let mut forwards = Vec::new();
    for text in section.texts("forward") {
        match text.value.parse::<Forward>() {
            Ok(forward) => {
                if let Some((_, first)) = taken.iter().find(|(other, _)| other.collides_with(&forward)) {
                    let (line, _) = section.document().position(*first);
                    let (key, value) = (section.path("forward"), quoted(text.value));
                    let hint = "forward another port of the host";
                    section.document().note(text.at, Problem::Duplicate { key, value, line, hint });
                }
                taken.push((forward, text.at));
                forwards.push(forward);
            }
            Err(why) => section.invalid("forward", quoted(text.value), text.at, why),
        }
    }
    forwards
}
