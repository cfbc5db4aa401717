//! Devices that were plugged in or unplugged while the guest ran. The *source* is the QEMU that runs the guest, the
//! *destination* the one that takes it over ([`super`]).
//!
//! The command line does not name a device that was plugged in. Its option is made from the properties that QEMU reports:
//! those that a manager chooses and that differ from QEMU's default. QEMU computes many others, such as the geometry of a
//! disk, and some defaults depend on its version, so the destination's device is compared with the source's afterwards
//! ([`PluggedDevice::differences`]).

use super::inventory::{DEVICES, OBJECTS, child_type};
use super::{Item, OptionAt, Rewriter, refusal_of_device};
use crate::foreign::split;
use crate::options::Options;
use crate::qmp::{Qmp, QmpError};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Properties that a manager chooses. Without the `drive`: the images of a disk are followed as those of other disks.
const CHOSEN: [&str; 64] = [
    "acpi-index",
    "addr",
    "ats",
    "bootindex",
    "channel",
    "chardev",
    "cmd_per_lun",
    "config-wce",
    "device_id",
    "disable-legacy",
    "disable-modern",
    "discard_granularity",
    "event_idx",
    "failover",
    "host_mtu",
    "hotplug",
    "indirect_desc",
    "ioeventfd",
    "iommu_platform",
    "iothread",
    "logical_block_size",
    "lun",
    "mac",
    "max-bytes",
    "max_sectors",
    "memdev",
    "mq",
    "multifunction",
    "name",
    "netdev",
    "node",
    "nr",
    "num-queues",
    "packed",
    "period",
    "physical_block_size",
    "port",
    "port_wwn",
    "product",
    "queue-size",
    "removable",
    "rerror",
    "rng",
    "romfile",
    "rotation_rate",
    "rx_queue_size",
    "scsi",
    "scsi-id",
    "serial",
    "share-rw",
    "slot",
    "tx",
    "tx_queue_size",
    "vectors",
    "vendor",
    "ver",
    "werror",
    "write-cache",
    "wwn",
    "guest-stats-polling-interval",
    "free-page-reporting",
    "deflate-on-oom",
    "chassis",
    "bus_nr",
];
/// Properties whose values differ between versions of QEMU although the guest sees the same.
const VERSION_DEPENDENT: [&str; 1] = ["rombar"];
const DRIVE: &str = "drive";

/// A device that was plugged in while the guest ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluggedDevice {
    pub id: String,
    /// Name of its type.
    pub driver: String,
    /// QOM path of the bus on which it is; none for a device without a bus, such as memory.
    pub bus: Option<String>,
    /// All its properties, by name.
    pub properties: BTreeMap<String, Value>,
    /// QEMU's defaults of the properties that have one.
    pub defaults: BTreeMap<String, Value>,
}

impl PluggedDevice {
    fn read(qmp: &mut Qmp, id: &str) -> Result<Self, QmpError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Description {
            name: String,
            default_value: Option<Value>,
        }
        let path = path_of(id);
        let driver: String = qmp.execute("qom-get", json!({"path": path, "property": "type"}))?;
        let bus = property(qmp, &path, "parent_bus")?.and_then(|bus| Some(bus.as_str()?.to_owned()));
        let described: Vec<Description> = qmp.execute("device-list-properties", json!({"typename": driver}))?;
        let mut device = Self {
            id: id.into(),
            driver,
            // A device of memory has a bus that has no name.
            bus: bus.filter(|bus| !bus.is_empty() && !bus.starts_with("/machine/unattached/")),
            properties: BTreeMap::new(),
            defaults: BTreeMap::new(),
        };
        for Description { name, default_value } in described {
            if let Some(value) = property(qmp, &path, &name)? {
                device.properties.insert(name.clone(), value);
            }
            device.defaults.extend(default_value.map(|value| (name, value)));
        }
        Ok(device)
    }

    /// Returns the option that makes such a device, without its drive.
    fn options(&self) -> Options {
        let mut options = Map::from_iter([("driver", &self.driver), ("id", &self.id)].map(text_member));
        if let Some(bus) = self.bus.as_deref().and_then(|path| path.rsplit('/').next()) {
            options.insert("bus".into(), bus.into());
        }
        for (name, value) in &self.properties {
            let is_empty = value.is_null() || value == "";
            if CHOSEN.contains(&name.as_str()) && !is_empty && self.defaults.get(name) != Some(value) {
                options.insert(name.clone(), value.clone());
            }
        }
        Options::Json(options)
    }

    /// Returns the id of the device on whose bus this one is.
    fn parent(&self) -> Option<&str> {
        self.bus.as_deref()?.strip_prefix(DEVICES)?.strip_prefix('/')?.split('/').next()
    }

    fn text(&self, property: &str) -> Option<&str> {
        self.properties.get(property)?.as_str().filter(|text| !text.is_empty())
    }

    /// Returns the properties that the device of this id has otherwise in another QEMU. Those that only one of the two QEMUs
    /// has do not count.
    ///
    /// # Errors
    /// When QEMU does not answer or returns an error.
    pub fn differences(&self, other: &mut Qmp) -> Result<Vec<Item>, QmpError> {
        let path = path_of(&self.id);
        let mut differences = Vec::new();
        for (name, value) in &self.properties {
            let is_different = property(other, &path, name)?.is_some_and(|other| other != *value);
            if is_different && !VERSION_DEPENDENT.contains(&name.as_str()) {
                differences.push(Item::Property { object: format!("device {}", self.id), name: name.clone() });
            }
        }
        Ok(differences)
    }
}

fn text_member((key, text): (&str, &String)) -> (String, Value) {
    (key.to_owned(), text.as_str().into())
}

fn path_of(id: &str) -> String {
    format!("{DEVICES}/{id}")
}

/// Returns a property of an object; none if it does not have it, or if it cannot be read.
fn property(qmp: &mut Qmp, path: &str, name: &str) -> Result<Option<Value>, QmpError> {
    match qmp.execute("qom-get", json!({"path": path, "property": name})) {
        Ok(value) => Ok(Some(value)),
        Err(QmpError::Refused { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Reads the devices that the command line does not name, of the `current` ones. A device is after that on whose bus it is.
///
/// # Errors
/// When QEMU does not answer or returns an error.
pub(super) fn read(
    arguments: &[String],
    current: &BTreeSet<String>,
    qmp: &mut Qmp,
) -> Result<Vec<PluggedDevice>, QmpError> {
    // An unknown option is reported by the rewrite.
    let options = split(arguments).unwrap_or_default();
    let devices = options.iter().filter(|option| option.name == "device").filter_map(|option| option.value);
    let ids = devices.filter_map(|value| Options::parse(value, "driver").ok()?.get("id"));
    let named: BTreeSet<String> = ids.collect();
    let plugged = current.difference(&named).map(|id| PluggedDevice::read(qmp, id));
    Ok(in_order_of_buses(plugged.collect::<Result<_, _>>()?))
}

fn in_order_of_buses(mut devices: Vec<PluggedDevice>) -> Vec<PluggedDevice> {
    let mut ordered = Vec::new();
    while !devices.is_empty() {
        let waiting: BTreeSet<String> = devices.iter().map(|device| device.id.clone()).collect();
        let is_ready = |device: &PluggedDevice| device.parent().is_none_or(|parent| !waiting.contains(parent));
        let (ready, rest): (Vec<_>, Vec<_>) = devices.into_iter().partition(is_ready);
        // QEMU has no two devices that are on each other's bus.
        if ready.is_empty() {
            ordered.extend(rest);
            break;
        }
        ordered.extend(ready);
        devices = rest;
    }
    ordered
}

/// Types of objects that a manager adds and removes while the guest runs, without memory backends, with the properties that
/// their options state. The settings of an I/O thread are passed on by [`super::Inventory::apply_settings`].
const OBJECTS_TO_FOLLOW: [(&str, &[&str]); 3] =
    [("iothread", &[]), ("rng-builtin", &[]), ("rng-random", &["filename"])];

fn stated_properties(kind: &str) -> Option<&'static [&'static str]> {
    OBJECTS_TO_FOLLOW.iter().find(|(followed, _)| *followed == kind).map(|(_, names)| *names)
}

/// Reads the options of the present objects that a manager adds and removes while the guest runs, by id.
///
/// # Errors
/// When QEMU does not answer or returns an error.
pub(super) fn read_objects(qmp: &mut Qmp) -> Result<BTreeMap<String, Options>, QmpError> {
    let listed: Vec<Value> = qmp.execute("qom-list", json!({"path": OBJECTS}))?;
    let mut objects = BTreeMap::new();
    for object in &listed {
        let (Some(id), Some(kind)) = (object.get("name").and_then(Value::as_str), child_type(object)) else { continue };
        let Some(names) = stated_properties(kind) else { continue };
        let members = [("qom-type", kind), ("id", id)].map(|(key, text)| (key.to_owned(), Value::from(text)));
        let mut options = Map::from_iter(members);
        for name in names {
            let value = property(qmp, &format!("{OBJECTS}/{id}"), name)?;
            options.extend(value.map(|value| ((*name).to_owned(), value)));
        }
        objects.insert(id.to_owned(), Options::Json(options));
    }
    Ok(objects)
}

impl Rewriter<'_> {
    /// Returns whether the rewritten command line has an option for the object with this id.
    fn has_option(&self, option: &str, id: &str) -> bool {
        let values = self.arguments.iter().zip(self.arguments.iter().skip(1)).filter(|(name, _)| *name == option);
        let mut ids = values.filter_map(|(_, value)| Options::parse(value, "type").ok()?.get("id"));
        ids.any(|other| other == id)
    }

    /// Returns whether QEMU has the object `id` of the command line no more.
    pub(super) fn was_removed(&self, kind: &str, id: &str) -> bool {
        let backends = &self.facts.machine.backends;
        let is_missing_backend =
            kind.starts_with("memory-backend-") && !backends.iter().any(|backend| backend.id == id);
        is_missing_backend || (stated_properties(kind).is_some() && !self.facts.objects.contains_key(id))
    }

    /// Adds the objects that were added while the guest ran.
    fn follow_objects(&mut self) {
        let facts = self.facts;
        for (id, options) in &facts.objects {
            if !self.has_option("-object", id) {
                self.add("object", options.to_string());
            }
        }
    }

    /// Adds the devices that were plugged in while the guest ran, and leaves out those that were unplugged.
    pub(super) fn follow_plugging(&mut self) {
        self.leave_out_unplugged();
        self.follow_objects();
        let facts = self.facts;
        for device in &facts.plugged {
            let PluggedDevice { id, driver, .. } = device;
            if let Some(why) = refusal_of_device(driver) {
                self.refuse(format!("device {driver},id={id}, which was plugged in"), why);
            }
            for (property, option, what) in
                [("netdev", "-netdev", "network"), ("chardev", "-chardev", "character device")]
            {
                if device.text(property).is_some_and(|other| !self.has_option(option, other)) {
                    let why = format!(
                        "it was plugged in while the guest ran, and Rekindle does not carry over its {what} yet: unplug it, \
                         or start the VM with it"
                    );
                    self.refuse(format!("device {id}"), why);
                }
            }
            let options = device.options();
            self.arguments.push("-device".into());
            let position = self.arguments.len();
            self.arguments.push(options.to_string());
            self.devices.push(OptionAt { position, options });
        }
    }

    /// Leaves out unplugged devices, with the nodes of their images that QEMU has no more. Of a disk that `-drive` made, QEMU
    /// has removed the drive with the device, and the option is rejected by [`Rewriter::check_devices`].
    fn leave_out_unplugged(&mut self) {
        let (devices, current) = (std::mem::take(&mut self.devices), &self.facts.machine.devices);
        for device in devices {
            let is_unplugged = device.options.get("id").is_some_and(|id| !current.contains(&id));
            let node = device.options.get(DRIVE);
            let is_kept = !is_unplugged || node.as_ref().is_some_and(|node| !self.block_nodes.contains_key(node));
            if is_kept {
                self.devices.push(device);
            } else {
                self.removed.insert(device.position);
                self.remove_closed(node.as_deref());
            }
        }
    }

    /// Rejects plugged disks whose images cannot be described.
    pub(super) fn check_plugged(&mut self) {
        let facts = self.facts;
        for device in facts.plugged.iter().filter(|device| device.text(DRIVE).is_some()) {
            let is_it = |at: &&OptionAt| at.options.get("id").as_ref() == Some(&device.id);
            if self.devices.iter().find(is_it).is_some_and(|at| at.options.get(DRIVE).is_none()) {
                let why = "it was plugged in while the guest ran, and its images cannot be opened again (raw and qcow2 in \
                           files and block devices can): unplug it, or start the VM with it";
                self.refuse(format!("device {}", device.id), why);
            }
        }
    }
}

#[cfg(test)]
mod tests;
