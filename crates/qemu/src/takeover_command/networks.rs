//! The networks that QEMU has at present: those of cards that were plugged in are not on its command line, and those of cards that
//! were unplugged still are. Only the human monitor lists them.

use super::PluggedDevice;
use crate::foreign::split;
use crate::options::Options;
use crate::qmp::{Qmp, QmpError};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::RawFd;

/// The host's end of a card that was plugged in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluggedNetwork {
    /// QEMU's type, such as `tap`.
    pub kind: String,
    /// QEMU's descriptors of a tap, one for each queue; `None` if it does not report one of them.
    pub descriptors: Option<Vec<RawFd>>,
}

/// How the networks differ from those of the command line.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ChangedNetworks {
    /// Those of cards that were plugged in, by id.
    pub(super) plugged: BTreeMap<String, PluggedNetwork>,
    /// Ids on the command line that QEMU does not have any more.
    pub(super) removed: BTreeSet<String>,
}

impl ChangedNetworks {
    /// # Errors
    /// When QEMU does not answer or returns an error.
    pub(super) fn read(arguments: &[String], plugged: &[PluggedDevice], qmp: &mut Qmp) -> Result<Self, QmpError> {
        let listed: String = qmp.execute("human-monitor-command", json!({"command-line": "info network"}))?;
        Ok(Self::of(arguments, plugged, &networks(&listed)))
    }

    fn of(arguments: &[String], plugged: &[PluggedDevice], present: &BTreeMap<String, PluggedNetwork>) -> Self {
        // An unknown option is reported by the rewrite.
        let options = split(arguments).unwrap_or_default();
        let values = options.iter().filter(|option| option.name == "netdev").filter_map(|option| option.value);
        let named = values.filter_map(|value| Options::parse(value, "type").ok()?.get("id"));
        let of_plugged = plugged.iter().filter_map(|device| device.text("netdev"));
        let plugged = of_plugged.filter_map(|id| Some((id.to_owned(), present.get(id)?.clone())));
        Self { plugged: plugged.collect(), removed: named.filter(|id| !present.contains_key(id)).collect() }
    }
}

/// Returns the clients that QEMU lists: a line for each queue, such as ` \\ hostnet0: index=0,type=tap,fd=33`.
fn networks(listed: &str) -> BTreeMap<String, PluggedNetwork> {
    let mut networks: BTreeMap<String, PluggedNetwork> = BTreeMap::new();
    for line in listed.lines() {
        let line = line.trim_start_matches([' ', '\\']).trim_end();
        let Some((id, settings)) = line.split_once(": index=") else { continue };
        let setting = |key: &str| settings.split(',').find_map(|setting| setting.strip_prefix(key)?.strip_prefix('='));
        let descriptor = setting("fd").and_then(|number| number.parse().ok());
        let kind = setting("type").unwrap_or_default().to_owned();
        let network = networks.entry(id.to_owned()).or_insert(PluggedNetwork { kind, descriptors: Some(Vec::new()) });
        network.descriptors = network.descriptors.take().zip(descriptor).map(|(mut numbers, number)| {
            numbers.push(number);
            numbers
        });
    }
    networks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As QEMU 10.0 prints it, for a tap with two queues that was plugged in, one of the command line, and a user network.
    const LISTED: &str = "net1: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:00:01:03\r
 \\ hostnet1: index=0,type=tap,fd=41\r
net1: index=1,type=nic,model=virtio-net-pci,macaddr=52:54:00:00:01:03\r
 \\ hostnet1: index=1,type=tap,fd=42\r
net0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:00:01:02\r
 \\ hostnet0: index=0,type=tap,ifname=vnet0,script=no,downscript=no\r
 \\ net: index=0,type=user,net=10.0.2.0,restrict=off\r
";

    #[test]
    fn each_queue_of_a_network_is_a_line() {
        let networks = networks(LISTED);
        let network = |kind: &str, descriptors| PluggedNetwork { kind: kind.into(), descriptors };
        assert_eq!(networks["hostnet1"], network("tap", Some(vec![41, 42])));
        assert_eq!(networks["hostnet0"], network("tap", None));
        assert_eq!(networks["net"], network("user", None));
    }

    #[test]
    fn networks_of_the_command_line_that_qemu_does_not_have_were_removed() {
        let line = "-netdev tap,fd=33,id=hostnet0 -netdev user,id=gone";
        let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let card = PluggedDevice {
            id: "net1".into(),
            driver: "virtio-net-pci".into(),
            bus: None,
            properties: BTreeMap::from([("netdev".into(), "hostnet1".into())]),
            defaults: BTreeMap::new(),
        };
        let changed = ChangedNetworks::of(&arguments, &[card], &networks(LISTED));
        assert_eq!(changed.removed, BTreeSet::from(["gone".into()]));
        assert_eq!(changed.plugged.keys().collect::<Vec<_>>(), ["hostnet1"]);
    }
}
