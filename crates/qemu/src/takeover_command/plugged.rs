//! Devices that were plugged in or unplugged while the guest ran. The *source* is the QEMU that runs the guest, the
//! *destination* the one that takes it over ([`super`]).
//!
//! The command line does not name a device that was plugged in, or has another device of that name which was unplugged
//! before. Its option is made from the properties that QEMU reports: those that a manager chooses and that differ from QEMU's
//! default. QEMU computes many others, such as the geometry of a disk, and some defaults depend on its version, so the
//! destination's device is compared with the source's afterwards ([`PluggedDevice::differences`]).

use super::inventory::{DEVICES, OBJECTS, child_type};
use super::{Item, OptionAt, Rewriter, refusal_of_device};
use crate::foreign::split;
use crate::options::Options;
use crate::qmp::{Qmp, QmpError};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Properties that are copied to the option of a plugged device, besides `drive`: its images are followed as those of other
/// disks.
const CHOSEN: [&str; 64] = [
    "acpi-index",
    "addr",
    "ats",
    "bootindex",
    "bus_nr",
    "channel",
    "chardev",
    "chassis",
    "cmd_per_lun",
    "config-wce",
    "deflate-on-oom",
    "device_id",
    "disable-legacy",
    "disable-modern",
    "discard_granularity",
    "event_idx",
    "failover",
    "free-page-reporting",
    "guest-stats-polling-interval",
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
];
/// Properties whose values differ between versions of QEMU although the guest sees the same.
const VERSION_DEPENDENT: [&str; 1] = ["rombar"];
const DRIVE: &str = "drive";
/// QOM property of a device: the path of its bus.
const PARENT_BUS: &str = "parent_bus";
/// The bus of memory, which cannot be named.
const SYSTEM_BUS: &str = "/machine/unattached/sysbus";
/// Where QEMU has the devices without an id.
const UNNAMED_DEVICES: &str = "/machine/peripheral-anon";

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
    /// Reads a device. `None` if it was unplugged in this moment.
    fn read(qmp: &mut Qmp, id: &str) -> Result<Option<Self>, QmpError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Description {
            name: String,
            default_value: Option<Value>,
        }
        let path = path_of(id);
        let driver = property(qmp, &path, "type")?.and_then(|driver| Some(driver.as_str()?.to_owned()));
        let Some(driver) = driver else { return Ok(None) };
        let bus = property(qmp, &path, PARENT_BUS)?.and_then(|bus| Some(bus.as_str()?.to_owned()));
        let described: Vec<Description> = qmp.execute("device-list-properties", json!({"typename": driver}))?;
        let mut device = Self {
            id: id.into(),
            driver,
            bus: bus.filter(|bus| !bus.is_empty() && bus != SYSTEM_BUS),
            properties: BTreeMap::new(),
            defaults: BTreeMap::new(),
        };
        for Description { name, default_value } in described {
            if let Some(value) = property(qmp, &path, &name)? {
                device.properties.insert(name.clone(), value);
            }
            device.defaults.extend(default_value.map(|value| (name, value)));
        }
        Ok(Some(device))
    }

    /// Returns the option that makes such a device, without its drive.
    fn options(&self) -> Options {
        let mut options = Map::from_iter([("driver", &self.driver), ("id", &self.id)].map(text_member));
        if let Some(bus) = self.bus.as_deref() {
            options.insert("bus".into(), last_part(bus).into());
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

    pub(super) fn text(&self, property: &str) -> Option<&str> {
        self.properties.get(property)?.as_str().filter(|text| !text.is_empty())
    }

    /// Returns the properties whose values differ in another QEMU. Properties that only one of the two QEMUs has do not count.
    ///
    /// # Errors
    /// When QEMU does not answer or returns an error.
    pub fn differences(&self, other: &mut Qmp) -> Result<Vec<Item>, QmpError> {
        let path = path_of(&self.id);
        let mut differing = Vec::new();
        for (name, value) in &self.properties {
            let is_different = property(other, &path, name)?.is_some_and(|actual| actual != *value);
            if is_different && !VERSION_DEPENDENT.contains(&name.as_str()) {
                differing.push(name.as_str());
            }
        }
        if let Some(bus) = &self.bus {
            let actual = property(other, &path, PARENT_BUS)?.unwrap_or_default();
            // QEMU's own devices have other numbers in other versions.
            if actual.as_str().map(last_part) != Some(last_part(bus)) {
                differing.push(PARENT_BUS);
            }
        }
        let item = |name: &str| Item::Property { object: format!("device {}", self.id), name: name.to_owned() };
        Ok(differing.into_iter().map(item).collect())
    }
}

/// Returns the name of the object at a QOM path.
fn last_part(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
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

/// Devices that were plugged in while the guest ran.
#[derive(Debug, Default)]
pub(super) struct Plugged {
    /// Those with an id. A device comes after the device that provides its bus.
    pub(super) devices: Vec<PluggedDevice>,
    /// The types of those without an id.
    pub(super) unnamed: Vec<String>,
}

impl Plugged {
    /// Reads them, of the `current` devices. That the command line names an id proves nothing: another device may have had it.
    ///
    /// # Errors
    /// When QEMU does not answer or returns an error.
    pub(super) fn read(arguments: &[String], current: &BTreeSet<String>, qmp: &mut Qmp) -> Result<Self, QmpError> {
        // An unknown option is reported by the rewrite.
        let options = split(arguments).unwrap_or_default();
        let devices = options.iter().filter(|option| option.name == "device").filter_map(|option| option.value);
        let ids = devices.filter_map(|value| Options::parse(value, "driver").ok()?.get("id"));
        let named: BTreeSet<String> = ids.collect();
        let mut plugged = Vec::new();
        for id in current {
            if !named.contains(id) || is_hotplugged(qmp, &path_of(id))? {
                plugged.extend(PluggedDevice::read(qmp, id)?);
            }
        }
        let mut unnamed = Vec::new();
        let listed: Vec<Value> = qmp.execute("qom-list", json!({"path": UNNAMED_DEVICES}))?;
        for device in &listed {
            let (name, kind) = (device.get("name").and_then(Value::as_str), child_type(device));
            if let (Some(name), Some(kind)) = (name, kind)
                && is_hotplugged(qmp, &format!("{UNNAMED_DEVICES}/{name}"))?
            {
                unnamed.push(kind.to_owned());
            }
        }
        Ok(Self { devices: in_order_of_buses(plugged), unnamed })
    }
}

/// Returns whether a device was plugged in after the start of the machine.
fn is_hotplugged(qmp: &mut Qmp, path: &str) -> Result<bool, QmpError> {
    Ok(property(qmp, path, "hotplugged")? == Some(Value::Bool(true)))
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
    fn has_object(&self, id: &str) -> bool {
        let values = self.arguments.iter().zip(self.arguments.iter().skip(1)).filter(|(name, _)| *name == "-object");
        let mut ids = values.filter_map(|(_, value)| Options::parse(value, "qom-type").ok()?.get("id"));
        ids.any(|other| other == id)
    }

    /// Returns whether an object of the command line was removed since.
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
            if !self.has_object(id) {
                self.add("object", options.to_string());
            }
        }
    }

    /// Adds the devices that were plugged in while the guest ran, and leaves out those that were unplugged.
    pub(super) fn follow_plugging(&mut self) {
        self.leave_out_unplugged();
        self.follow_objects();
        self.add_plugged_networks();
        self.add_plugged_ports();
        let facts = self.facts;
        for driver in &facts.plugged_without_id {
            let why = "it was plugged in while the guest ran: unplug it, or plug it in with an id";
            self.refuse(format!("device {driver} without an id"), why);
        }
        for device in &facts.plugged {
            let PluggedDevice { id, driver, .. } = device;
            if let Some(why) = refusal_of_device(driver) {
                self.refuse(format!("device {driver},id={id}, which was plugged in"), why);
            }
            if device.text("netdev").is_some_and(|network| !facts.plugged_networks.contains_key(network)) {
                self.refuse(format!("device {id}"), "QEMU does not list the network of this card: unplug it");
            }
            let options = device.options();
            self.arguments.push("-device".into());
            let position = self.arguments.len();
            self.arguments.push(options.to_string());
            self.devices.push(OptionAt { position, options });
        }
    }

    /// Leaves out unplugged devices, with the nodes of their images that QEMU no longer has. Of a disk that `-drive` made, QEMU
    /// has removed the drive with the device: [`device_differences`] rejects it.
    ///
    /// [`device_differences`]: crate::foreign::device_differences
    fn leave_out_unplugged(&mut self) {
        let facts = self.facts;
        let is_there =
            |id: &String| facts.machine.devices.contains(id) && !facts.plugged.iter().any(|plugged| plugged.id == *id);
        for device in std::mem::take(&mut self.devices) {
            let Some(id) = device.options.get("id").filter(|id| !is_there(id)) else {
                self.devices.push(device);
                continue;
            };
            let node = device.options.get(DRIVE);
            if node.as_ref().is_some_and(|node| !self.block_nodes.contains_key(node)) {
                if facts.machine.devices.contains(&id) {
                    let why = "it was unplugged, and another device plugged in under its name: start the VM with that";
                    self.refuse(format!("device {id}"), why);
                }
                self.devices.push(device);
                continue;
            }
            self.removed.insert(device.position);
            self.remove_closed(node.as_deref());
        }
    }

    /// Rejects plugged disks whose images cannot be described.
    pub(super) fn check_plugged(&mut self) {
        let facts = self.facts;
        for device in facts.plugged.iter().filter(|device| device.text(DRIVE).is_some()) {
            let has_its_id = |at: &&OptionAt| at.options.get("id").as_ref() == Some(&device.id);
            if self.devices.iter().find(has_its_id).is_some_and(|at| at.options.get(DRIVE).is_none()) {
                let why = "it was plugged in while the guest ran, and not all of its images can be opened again (raw and \
                           qcow2 in files and block devices can): unplug it, or start the VM with it";
                self.refuse(format!("device {}", device.id), why);
            }
        }
    }
}

#[cfg(test)]
mod tests;
