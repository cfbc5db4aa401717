//! Reasons why a guest cannot be protected: another process, the host's kernel or hardware writes its memory, unseen
//! by QEMU's page tables; or its memory or a device cannot be read at all.

use super::AdoptError;
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

const FOREIGN: &str =
    "another process writes the guest's memory through a mapping of its own, unseen by QEMU's page tables";
const KERNEL: &str = "the host's kernel writes the guest's memory, unseen by QEMU's page tables";
const HARDWARE: &str = "hardware writes the guest's memory past the processor, and its state cannot be read";
const SECRET: &str = "the guest's memory is encrypted with a key that is not available outside the guest";

/// Types with one of these prefixes are obstacles.
const TYPES: [(&str, &str); 11] = [
    ("vfio-", HARDWARE),
    ("vhost-user-", FOREIGN),
    ("ivshmem-", FOREIGN),
    ("x-pci-proxy-dev", FOREIGN),
    ("vhost-vdpa-", HARDWARE),
    ("vhost-scsi", KERNEL),
    ("vhost-vsock", KERNEL),
    ("sev-", SECRET),
    ("tdx-guest", SECRET),
    ("memory-backend-epc", SECRET),
    ("usb-host", "the state of a host device that is passed through cannot be read"),
];

/// Open files with one of these prefixes are obstacles.
const FILES: [(&str, &str); 6] = [
    ("/dev/vfio/", HARDWARE),
    ("/dev/iommu", HARDWARE),
    ("/dev/vhost-vdpa", HARDWARE),
    ("/dev/vhost-net", KERNEL),
    ("/dev/vhost-scsi", KERNEL),
    ("/dev/vhost-vsock", KERNEL),
];

/// Networks of these kinds, as `info network` prints them, are obstacles.
const NETWORKS: [(&str, &str); 2] = [("vhost-user", FOREIGN), ("vhost-vdpa", HARDWARE)];

/// Returns whether a guest can return memory to the host through a device of this type.
pub(super) fn gives_back(kind: &str) -> bool {
    ["virtio-balloon", "virtio-mem"].iter().any(|device| kind.starts_with(device))
}

/// Lists all devices of a QEMU's machine, and all objects.
pub(super) fn devices(qmp: &mut Qmp) -> Result<Vec<Object>, QmpError> {
    /// Depth limit. No machine nests its devices that deep.
    const DEEPEST: usize = 6;
    let mut found = Vec::new();
    let mut next: Vec<_> =
        ["/machine/peripheral", "/machine/peripheral-anon", "/objects"].map(|path| (path.to_owned(), 0)).into();
    while let Some((path, depth)) = next.pop() {
        for (name, kind) in children(qmp, &path)? {
            let path = format!("{path}/{name}");
            if depth < DEEPEST && !is_leaf(&kind) {
                next.push((path.clone(), depth + 1));
            }
            found.push(Object { path, kind });
        }
    }
    Ok(found)
}

/// Returns whether this is a type with many children, none of which is a device.
fn is_leaf(kind: &str) -> bool {
    kind.contains("memory-region") || kind == "irq"
}

fn children(qmp: &mut Qmp, path: &str) -> Result<Vec<(String, String)>, QmpError> {
    #[derive(Deserialize)]
    struct Property {
        name: String,
        #[serde(rename = "type")]
        kind: String,
    }
    let properties = match qmp.execute::<Vec<Property>>("qom-list", json!({"path": path})) {
        // The device was unplugged after it was listed.
        Err(QmpError::Refused { .. }) => return Ok(Vec::new()),
        other => other?,
    };
    let child = |property: Property| {
        let kind = property.kind.strip_prefix("child<")?.strip_suffix('>')?.to_owned();
        Some((property.name, kind))
    };
    Ok(properties.into_iter().filter_map(child).collect())
}

/// Lists all obstacles, without duplicates.
pub(super) fn all(qmp: &mut Qmp, process: Process, devices: &[Object]) -> Result<Vec<Obstacle>, AdoptError> {
    let mut found: Vec<_> = devices
        .iter()
        .filter_map(|device| {
            let (_, why) = TYPES.iter().find(|(start, _)| device.kind.starts_with(start))?;
            Some(Obstacle { what: format!("{} ({})", device.kind, device.path), why: (*why).into() })
        })
        .collect();
    found.extend(networks(&qmp.human("info network")?));
    found.extend(blockers(&qmp.execute("query-migrate", ())?));
    let failed = |source| AdoptError::Process { pid: process.pid, source };
    for entry in fs::read_dir(format!("/proc/{}/fd", process.pid)).map_err(failed)? {
        let Ok(file) = fs::read_link(entry.map_err(failed)?.path()) else { continue };
        let file = file.to_string_lossy();
        if let Some((_, why)) = FILES.iter().find(|(start, _)| file.starts_with(start)) {
            found.push(Obstacle { what: file.into_owned(), why: (*why).into() });
        }
    }
    found.sort();
    found.dedup();
    Ok(found)
}

/// Returns what QEMU itself cannot save. QEMU reports these only here, and no error when it saves devices alone.
fn blockers(migration: &Value) -> Vec<Obstacle> {
    let reasons = migration.get("blocked-reasons").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let obstacle = |reason: &Value| {
        let why = "QEMU cannot save all of its state: start it without that".into();
        Some(Obstacle { what: reason.as_str()?.trim().to_owned(), why })
    };
    reasons.iter().filter_map(obstacle).collect()
}

/// Parses lines such as `net0: index=0,type=vhost-user,chardev=c`. A line below its card begins with ` \ `.
fn networks(text: &str) -> Vec<Obstacle> {
    text.lines()
        .filter_map(|line| {
            let (name, rest) = line.trim_start_matches([' ', '\\']).split_once(": ")?;
            let kind = rest.split(',').find_map(|pair| pair.strip_prefix("type="))?;
            let (_, why) = NETWORKS.iter().find(|(network, _)| *network == kind)?;
            Some(Obstacle { what: format!("network {name} ({kind})"), why: (*why).into() })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_of_foreign_processes() {
        let text = "card: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:56\n \
                    \\ net0: index=0,type=vhost-user,chardev=c\nnet1: index=0,type=user,net=10.0.2.0\n";
        let found = networks(text);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].what, "network net0 (vhost-user)");
    }

    #[test]
    fn what_qemu_cannot_save() {
        let found =
            blockers(&json!({"blocked-reasons": ["State blocked by non-migratable device '0000:00:02.0/nvme'"]}));
        assert!(found[0].what.contains("nvme"), "{found:?}");
        assert!(blockers(&json!({})).is_empty());
    }

    #[test]
    fn devices_that_give_memory_back() {
        assert!(gives_back("virtio-balloon-pci") && gives_back("virtio-mem-pci"));
        assert!(!gives_back("virtio-net-pci"));
    }
}
