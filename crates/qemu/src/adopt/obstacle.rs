//! Reasons why a guest cannot be protected: another process, the host's kernel or hardware writes its memory, unseen
//! by QEMU's page tables; or its memory or a device cannot be read at all.

use super::AdoptError;
use crate::block::migration;
use crate::qmp::{Qmp, QmpError};
use rekindle_kernel::process::Process;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fs;

/// Something that prevents protecting a guest.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Obstacle {
    /// The device, file or network, as QEMU or the kernel names it.
    pub what: String,
    /// Why it prevents protecting the guest.
    pub why: String,
}

/// A device or object of a QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Object {
    pub path: String,
    pub kind: String,
}

const OTHER_PROCESS: &str =
    "another process writes the guest's memory through a mapping of its own, unseen by QEMU's page tables";
const HOST_KERNEL: &str = "the host's kernel writes the guest's memory, unseen by QEMU's page tables";
const HARDWARE: &str = "hardware writes the guest's memory past the processor, and its state cannot be read";
const ENCRYPTED: &str = "the guest's memory is encrypted with a key that is not available outside the guest";

/// Prefixes of QOM types that are obstacles, with the reason.
const OBSTACLE_TYPES: [(&str, &str); 11] = [
    ("vfio-", HARDWARE),
    ("vhost-user-", OTHER_PROCESS),
    ("ivshmem-", OTHER_PROCESS),
    ("x-pci-proxy-dev", OTHER_PROCESS),
    ("vhost-vdpa-", HARDWARE),
    ("vhost-scsi", HOST_KERNEL),
    ("vhost-vsock", HOST_KERNEL),
    ("sev-", ENCRYPTED),
    ("tdx-guest", ENCRYPTED),
    ("memory-backend-epc", ENCRYPTED),
    ("usb-host", "the state of a host device that is passed through cannot be read"),
];

/// Prefixes of open files that are obstacles. `/dev/vhost-net` is none: the kernel's thread that serves a card runs in
/// QEMU's address space, so that its writes are tracked like those of QEMU, and it does not run while the guest is stopped.
const OBSTACLE_FILES: [(&str, &str); 5] = [
    ("/dev/vfio/", HARDWARE),
    ("/dev/iommu", HARDWARE),
    ("/dev/vhost-vdpa", HARDWARE),
    ("/dev/vhost-scsi", HOST_KERNEL),
    ("/dev/vhost-vsock", HOST_KERNEL),
];

/// Kinds of networks, as `info network` prints them, that are obstacles.
const OBSTACLE_NETWORKS: [(&str, &str); 2] = [("vhost-user", OTHER_PROCESS), ("vhost-vdpa", HARDWARE)];

/// Returns why a device or object of this type is an obstacle.
pub(crate) fn obstacle_of_type(kind: &str) -> Option<&'static str> {
    OBSTACLE_TYPES.iter().find(|(prefix, _)| kind.starts_with(prefix)).map(|(_, why)| *why)
}

/// Returns why a network of this kind is an obstacle.
pub(crate) fn obstacle_of_network(kind: &str) -> Option<&'static str> {
    OBSTACLE_NETWORKS.iter().find(|(network, _)| *network == kind).map(|(_, why)| *why)
}

/// Returns whether a guest can return memory to the host through a device of this type.
pub(super) fn gives_back(kind: &str) -> bool {
    ["virtio-balloon", "virtio-mem"].iter().any(|device| kind.starts_with(device))
}

/// Lists all devices of a QEMU's machine, and all objects.
pub(super) fn list_objects(qmp: &mut Qmp) -> Result<Vec<Object>, QmpError> {
    /// No machine nests its devices that deep.
    const MAX_DEPTH: usize = 6;
    let mut objects = Vec::new();
    let mut unvisited: Vec<_> =
        ["/machine/peripheral", "/machine/peripheral-anon", "/objects"].map(|path| (path.to_owned(), 0)).into();
    while let Some((parent, depth)) = unvisited.pop() {
        for child in children(qmp, &parent)? {
            if depth < MAX_DEPTH && !is_leaf(&child.kind) {
                unvisited.push((child.path.clone(), depth + 1));
            }
            objects.push(child);
        }
    }
    Ok(objects)
}

/// Returns whether this is a type with many children, none of which is a device.
fn is_leaf(kind: &str) -> bool {
    kind.contains("memory-region") || kind == "irq"
}

fn children(qmp: &mut Qmp, parent: &str) -> Result<Vec<Object>, QmpError> {
    #[derive(Deserialize)]
    struct Property {
        name: String,
        #[serde(rename = "type")]
        kind: String,
    }
    let properties = match qmp.execute::<Vec<Property>>("qom-list", json!({"path": parent})) {
        // The device was unplugged after it was listed.
        Err(QmpError::Refused { .. }) => return Ok(Vec::new()),
        other => other?,
    };
    let child = |property: Property| {
        let kind = property.kind.strip_prefix("child<")?.strip_suffix('>')?.to_owned();
        Some(Object { path: format!("{parent}/{}", property.name), kind })
    };
    Ok(properties.into_iter().filter_map(child).collect())
}

/// Lists all obstacles, without duplicates.
pub(super) fn find_all(qmp: &mut Qmp, process: Process, objects: &[Object]) -> Result<Vec<Obstacle>, AdoptError> {
    let mut obstacles = Vec::new();
    for Object { path, kind } in objects {
        if let Some(why) = obstacle_of_type(kind) {
            obstacles.push(Obstacle { what: format!("{kind} ({path})"), why: why.into() });
        }
    }
    obstacles.extend(network_obstacles(&qmp.human("info network")?));
    obstacles.extend(migration_blockers(&qmp.execute("query-migrate", ())?));
    let unreadable = |source| AdoptError::Process { pid: process.pid, source };
    for entry in fs::read_dir(format!("/proc/{}/fd", process.pid)).map_err(unreadable)? {
        let Ok(file) = fs::read_link(entry.map_err(unreadable)?.path()) else { continue };
        let file = file.to_string_lossy();
        if let Some((_, why)) = OBSTACLE_FILES.iter().find(|(prefix, _)| file.starts_with(prefix)) {
            obstacles.push(Obstacle { what: file.into_owned(), why: (*why).into() });
        }
    }
    obstacles.sort();
    obstacles.dedup();
    Ok(obstacles)
}

/// Returns what QEMU itself cannot save. QEMU reports these only here, and no error when it saves devices alone.
fn migration_blockers(migration: &Value) -> Vec<Obstacle> {
    let reasons = migration.get("blocked-reasons").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let obstacle = |reason: &Value| {
        let why = "QEMU cannot save all of its state: start it without that".into();
        Some(Obstacle { what: reason.as_str()?.trim().to_owned(), why })
    };
    let is_of_overlays = |reason: &&Value| reason.as_str().is_some_and(migration::is_forbidden_by_overlays);
    reasons.iter().filter(|reason| !is_of_overlays(reason)).filter_map(obstacle).collect()
}

/// Parses lines such as `net0: index=0,type=vhost-user,chardev=c`. A line below its card begins with ` \ `.
fn network_obstacles(text: &str) -> Vec<Obstacle> {
    let obstacle = |line: &str| {
        let (name, properties) = line.trim_start_matches([' ', '\\']).split_once(": ")?;
        let kind = properties.split(',').find_map(|property| property.strip_prefix("type="))?;
        let why = obstacle_of_network(kind)?;
        Some(Obstacle { what: format!("network {name} ({kind})"), why: why.into() })
    };
    text.lines().filter_map(obstacle).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_of_foreign_processes() {
        let text = "card: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:56\n \
                    \\ net0: index=0,type=vhost-user,chardev=c\nnet1: index=0,type=user,net=10.0.2.0\n";
        let obstacles = network_obstacles(text);
        assert_eq!(obstacles.len(), 1);
        assert_eq!(obstacles[0].what, "network net0 (vhost-user)");
    }

    #[test]
    fn devices_that_qemu_cannot_save() {
        let status = json!({"blocked-reasons": ["State blocked by non-migratable device '0000:00:02.0/nvme'"]});
        let obstacles = migration_blockers(&status);
        assert!(obstacles[0].what.contains("nvme"), "{obstacles:?}");
        assert!(migration_blockers(&json!({})).is_empty());
        let overlays = "The vdi format used by node 'rekindle-detach-first' does not support live migration";
        assert!(migration_blockers(&json!({"blocked-reasons": [overlays]})).is_empty());
    }

    #[test]
    fn devices_that_give_memory_back() {
        assert!(gives_back("virtio-balloon-pci") && gives_back("virtio-mem-pci"));
        assert!(!gives_back("virtio-net-pci"));
    }
}
