//! Properties of a running machine that its command line does not show.

use super::inventory::{device_name, node_names, storage_nodes};
use super::networks::{ChangedNetworks, PluggedNetwork};
use super::plugged::{self, Plugged, PluggedDevice};
use super::plugged_ports::{ChangedPorts, PortEnd};
use super::vnc::{self, VncServer};
use crate::adopt::Adopted;
use crate::block::graph::{self, BlockNode};
use crate::foreign::{self, MachineFacts};
use crate::options::Options;
use crate::qmp::{Qmp, QmpError};
use crate::ramblock::{self, RamBlock};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::RawFd;

/// Properties of a running machine, as far as they decide how another QEMU takes over its guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunningFacts {
    pub machine: MachineFacts,
    pub ram_blocks: Vec<RamBlock>,
    pub drives: Vec<Drive>,
    /// All block nodes, by name.
    pub nodes: BTreeMap<String, BlockNode>,
    /// The descriptors that QEMU has for each set of `-add-fd`. They have other numbers than on the command line.
    pub fd_sets: BTreeMap<u32, Vec<RawFd>>,
    pub vnc_servers: Vec<VncServer>,
    /// Devices that were plugged in since the start. A device comes after the device that provides its bus.
    pub plugged: Vec<PluggedDevice>,
    /// The types of those that have no id.
    pub plugged_without_id: Vec<String>,
    /// The networks of cards that were plugged in, by id.
    pub plugged_networks: BTreeMap<String, PluggedNetwork>,
    /// The networks of the command line that QEMU does not have any more.
    pub removed_networks: BTreeSet<String>,
    /// The character devices of ports that were plugged in, by id.
    pub plugged_ports: BTreeMap<String, PortEnd>,
    /// Ids of character devices on the command line that are not to be made again as it states.
    pub removed_ports: BTreeSet<String>,
    /// The options of the present objects that a manager adds and removes while the guest runs, by id.
    pub objects: BTreeMap<String, Options>,
}

/// A drive of the machine at present.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drive {
    /// QOM path or id of the device; of `-drive`, its id if it has no device.
    pub device: String,
    /// Name of the file that is shown; none without a medium.
    pub file: Option<String>,
    /// Names of the block nodes of its image and of the backing images, its own first.
    pub nodes: Vec<String>,
    /// The nodes of the files in which these images are, by the names of the images' nodes.
    pub storages: BTreeMap<String, String>,
    /// Whether the tray is open.
    pub tray_open: bool,
}

/// Reads the facts of `adopted`'s machine.
///
/// # Errors
/// When QEMU does not answer or returns an error.
pub fn read_facts(adopted: &Adopted, qmp: &mut Qmp) -> Result<RunningFacts, QmpError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct FdSet {
        fdset_id: u32,
        fds: Vec<SetMember>,
    }
    #[derive(Deserialize)]
    struct SetMember {
        fd: RawFd,
    }
    let machine = foreign::read_facts(adopted, qmp)?;
    let drives: Vec<Value> = qmp.execute("query-block", ())?;
    let chains: Vec<Value> = qmp.execute("query-blockstats", ())?;
    let fd_sets: Vec<FdSet> = qmp.execute("query-fdsets", ())?;
    let members = |set: FdSet| (set.fdset_id, set.fds.into_iter().map(|member| member.fd).collect());
    let Plugged { devices: plugged, unnamed } = Plugged::read(&adopted.arguments, &machine.devices, qmp)?;
    let networks = ChangedNetworks::read(&adopted.arguments, &plugged, qmp)?;
    let ports = ChangedPorts::read(&adopted.arguments, &plugged, qmp)?;
    Ok(RunningFacts {
        plugged_ports: ports.plugged,
        removed_ports: ports.removed,
        plugged_networks: networks.plugged,
        removed_networks: networks.removed,
        plugged,
        plugged_without_id: unnamed,
        objects: plugged::read_objects(qmp)?,
        machine,
        ram_blocks: ramblock::list(qmp)?,
        drives: drives.iter().filter_map(|entry| drive(entry, &chains)).collect(),
        nodes: graph::read_nodes(qmp)?,
        fd_sets: fd_sets.into_iter().map(members).collect(),
        vnc_servers: vnc::servers(qmp)?,
    })
}

/// Reads an entry of `query-block`, and that of the same drive in `query-blockstats`. `None` if the guest does not see
/// the drive.
fn drive(entry: &Value, chains: &[Value]) -> Option<Drive> {
    let text = |pointer: &str| entry.pointer(pointer).and_then(Value::as_str).filter(|text| !text.is_empty());
    let name = device_name(entry);
    let chain = chains.iter().find(|chain| name.is_some() && device_name(chain) == name);
    Some(Drive {
        device: text("/qdev").or_else(|| text("/device"))?.to_owned(),
        file: text("/inserted/file").map(str::to_owned),
        nodes: chain.map(node_names).unwrap_or_default(),
        storages: chain.map(storage_nodes).unwrap_or_default(),
        tray_open: entry.get("tray_open").and_then(Value::as_bool).unwrap_or(false),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn entries_of_query_block() {
        let disk = json!({"device": "", "qdev": "/machine/peripheral/virtio-disk0/virtio-backend",
            "inserted": {"file": "/images/a"}});
        let device = "/machine/peripheral/virtio-disk0/virtio-backend".to_owned();
        let file = Some("/images/a".to_owned());
        let chain = json!({"qdev": "/machine/peripheral/virtio-disk0/virtio-backend", "node-name": "top",
            "parent": {"node-name": "top-file"}, "backing": {"node-name": "base", "parent": {"node-name": "base-file"}}});
        let nodes = vec!["top".to_owned(), "base".to_owned()];
        let storages = nodes.iter().map(|node| (node.clone(), format!("{node}-file"))).collect();
        let expected = Drive { device, file, nodes, storages, tray_open: false };
        assert_eq!(drive(&disk, &[chain]), Some(expected));
        let empty = json!({"device": "ide1-cd0", "tray_open": true});
        let device = "ide1-cd0".to_owned();
        let (nodes, storages) = (Vec::new(), BTreeMap::new());
        let expected = Drive { device, file: None, nodes, storages, tray_open: true };
        assert_eq!(drive(&empty, &[]), Some(expected));
        assert_eq!(drive(&json!({"device": "", "inserted": {"file": "/images/a"}}), &[]), None);
    }
}
