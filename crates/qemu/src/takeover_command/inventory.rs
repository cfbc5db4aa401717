//! What a QEMU has that its manager can change at any moment: disks and their images, devices, objects, jobs, settings.
//!
//! Read twice from one QEMU, an [`Inventory`] shows whether a manager has changed the machine meanwhile. Read from the
//! *source*, which runs the guest, and from the *destination*, which takes it over, it shows whether the command line
//! still describes the machine. Values that the guest or the time change (sizes of files, connections, progress) are
//! left out.

use super::OWN_ID_PREFIX;
use crate::adopt::Obstacle;
use crate::qmp::{Qmp, QmpError};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Where QEMU has the devices that have an id.
pub(super) const DEVICES: &str = "/machine/peripheral";
pub(super) const OBJECTS: &str = "/objects";
/// QOM property of a USB device: whether the guest sees it.
const ATTACHED: &str = "attached";
/// QOM property of a balloon: seconds between two reports of the guest's memory statistics; 0 for none.
const BALLOON_INTERVAL: &str = "guest-stats-polling-interval";
/// Settings of an I/O thread that `query-iothreads` reports under the names of their QOM properties.
const REPORTED_THREAD_SETTINGS: [&str; 4] = ["poll-max-ns", "poll-grow", "poll-shrink", "aio-max-batch"];
/// Settings of an I/O thread that only QOM has. They are set in the order of their names: the maximum first, which must
/// never be below the minimum.
const OTHER_THREAD_SETTINGS: [&str; 2] = ["thread-pool-max", "thread-pool-min"];
/// Limits of a disk's rate in `query-block`, and so arguments of `block_set_io_throttle`; 0 without a limit.
const LIMITS: [&str; 6] = ["bps", "bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"];
/// What else `query-block` has of a limited rate: bursts, the size of a request that counts as several, and the name of the
/// group of disks that share the limits.
const MORE_LIMITS: [&str; 14] = [
    "bps_max",
    "bps_rd_max",
    "bps_wr_max",
    "iops_max",
    "iops_rd_max",
    "iops_wr_max",
    "bps_max_length",
    "bps_rd_max_length",
    "bps_wr_max_length",
    "iops_max_length",
    "iops_rd_max_length",
    "iops_wr_max_length",
    "iops_size",
    "group",
];
/// Members of a block node that only a manager changes. Its size is not among them: an image grows.
const NODE_MEMBERS: [&str; 5] = ["drv", "file", "ro", "cache", "detect_zeroes"];

/// Something that a QEMU has.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Item {
    #[error("disk {0}")]
    Drive(String),
    #[error("device {0}")]
    Device(String),
    #[error("object {0}")]
    Object(String),
    #[error("I/O thread {0}")]
    IoThread(String),
    #[error("character device {0}")]
    CharacterDevice(String),
    #[error("image {0}")]
    BlockNode(String),
    #[error("memory backend {0}")]
    MemoryBackend(String),
    #[error("the networks")]
    Networks,
    #[error("job {0}")]
    Job(String),
    #[error("export {0}")]
    Export(String),
    #[error("USB device of a SPICE client at {0}")]
    RedirectedUsb(String),
    #[error("{name} of {object}")]
    Property { object: String, name: String },
    #[error("write threshold of image {0}")]
    WriteThreshold(String),
    #[error("rate limits of disk {0}")]
    Limits(String),
}

/// What a QEMU has at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The same in each QEMU that has the machine.
    machine: BTreeMap<Item, Value>,
    /// Comparable only with the same process at another time.
    process: BTreeMap<Item, Value>,
    /// Applied to another QEMU by [`Inventory::apply_settings`].
    settings: BTreeMap<Item, Value>,
}

/// The answers of a QEMU from which an inventory is made.
#[derive(Debug, Default)]
struct Answers {
    block: Vec<Value>,
    block_statistics: Vec<Value>,
    nodes: Vec<Value>,
    io_threads: Vec<Value>,
    chardevs: Vec<Value>,
    memory: Vec<Value>,
    jobs: Vec<Value>,
    exports: Vec<Value>,
    objects: Vec<Value>,
    devices: Vec<Value>,
    networks: String,
}

impl Inventory {
    /// # Errors
    /// When QEMU does not answer or returns an error.
    pub fn read(qmp: &mut Qmp) -> Result<Self, QmpError> {
        let answers = Answers {
            block: qmp.execute("query-block", ())?,
            block_statistics: qmp.execute("query-blockstats", ())?,
            nodes: qmp.execute("query-named-block-nodes", json!({"flat": true}))?,
            io_threads: qmp.execute("query-iothreads", ())?,
            chardevs: qmp.execute("query-chardev", ())?,
            memory: qmp.execute("query-memdev", ())?,
            jobs: qmp.execute("query-jobs", ())?,
            exports: qmp.execute("query-block-exports", ())?,
            objects: qmp.execute("qom-list", json!({"path": OBJECTS}))?,
            devices: qmp.execute("qom-list", json!({"path": DEVICES}))?,
            networks: qmp.human("info network")?,
        };
        let mut inventory = Self::from_answers(&answers);
        for object in answers.usb_redirections() {
            if property(qmp, &object, ATTACHED)? == true {
                inventory.process.insert(Item::RedirectedUsb(object), Value::Null);
            }
        }
        for (object, name) in answers.settings_in_qom() {
            match property(qmp, &object, name) {
                Ok(value) => drop(inventory.settings.insert(Item::Property { object, name: name.into() }, value)),
                Err(QmpError::Refused { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(inventory)
    }

    fn from_answers(answers: &Answers) -> Self {
        let mut inventory = Self::default();
        inventory.add_disks(answers);
        inventory.add_io_threads(&answers.io_threads);
        for device in &answers.devices {
            let name = text(device, "name");
            if let Some(kind) = child_type(device) {
                inventory.machine.insert(Item::Device(name), kind.into());
            }
        }
        for object in &answers.objects {
            // The destination has each memory backend in a file. Monitors are objects since QEMU 11.
            let kind = match child_type(object) {
                None => continue,
                Some(kind) if kind.starts_with("monitor-") => continue,
                Some(kind) if kind.starts_with("memory-backend-") => "memory-backend",
                Some(kind) => kind,
            };
            inventory.machine.insert(Item::Object(text(object, "name")), kind.into());
        }
        let labels = answers.chardevs.iter().map(|chardev| text(chardev, "label"));
        for label in labels.filter(|label| !label.starts_with(OWN_ID_PREFIX)) {
            inventory.machine.insert(Item::CharacterDevice(label), Value::Null);
        }
        for backend in &answers.memory {
            inventory.process.insert(Item::MemoryBackend(text(backend, "id")), backend.clone());
        }
        for job in &answers.jobs {
            inventory.process.insert(Item::Job(text(job, "id")), job.get("type").cloned().unwrap_or_default());
        }
        for export in &answers.exports {
            inventory.process.insert(Item::Export(text(export, "id")), export.clone());
        }
        inventory.process.insert(Item::Networks, answers.networks.as_str().into());
        inventory
    }

    fn add_disks(&mut self, answers: &Answers) {
        let nodes: BTreeMap<String, &Value> =
            answers.nodes.iter().map(|node| (text(node, "node-name"), node)).collect();
        for (name, node) in &nodes {
            self.process.insert(Item::BlockNode(name.clone()), members(node, &NODE_MEMBERS));
            let threshold = node.get("write_threshold").and_then(Value::as_u64).unwrap_or(0);
            if threshold > 0 {
                self.settings.insert(Item::WriteThreshold(name.clone()), threshold.into());
            }
        }
        let chains = answers.block_statistics.iter().filter_map(|chain| Some((device_name(chain)?, chain)));
        let chains: BTreeMap<String, &Value> = chains.collect();
        for drive in &answers.block {
            let Some(name) = device_name(drive) else { continue };
            let inserted = drive.get("inserted").unwrap_or(&Value::Null);
            let chain = chains.get(&name).copied().unwrap_or(&Value::Null);
            let size = inserted.pointer("/image/virtual-size").cloned().unwrap_or_default();
            let machine = json!({"images": images(chain, &nodes), "size": size});
            let process = json!({"nodes": node_names(chain), "tray": drive.get("tray_open")});
            self.machine.insert(Item::Drive(name.clone()), machine);
            self.process.insert(Item::Drive(name.clone()), process);
            if !inserted.is_null() {
                self.settings.insert(Item::Limits(name), limits(inserted));
            }
        }
    }

    fn add_io_threads(&mut self, io_threads: &[Value]) {
        for thread in io_threads {
            let id = text(thread, "id");
            self.machine.insert(Item::IoThread(id.clone()), Value::Null);
            for name in REPORTED_THREAD_SETTINGS {
                if let Some(value) = thread.get(name) {
                    let object = format!("{OBJECTS}/{id}");
                    self.settings.insert(Item::Property { object, name: name.into() }, value.clone());
                }
            }
        }
    }

    /// Returns what differs from `earlier`, an inventory of the same process.
    #[must_use]
    pub fn changes_since(&self, earlier: &Self) -> Vec<Item> {
        let maps =
            [(&self.machine, &earlier.machine), (&self.process, &earlier.process), (&self.settings, &earlier.settings)];
        let changed: BTreeSet<Item> = maps.into_iter().flat_map(|(now, before)| differing(now, before)).collect();
        changed.into_iter().collect()
    }

    /// Returns what another QEMU, which shall have the same machine, has otherwise. Settings are not compared.
    #[must_use]
    pub fn differences_from(&self, other: &Self) -> Vec<Item> {
        differing(&self.machine, &other.machine)
    }

    /// Returns what another QEMU would not continue.
    #[must_use]
    pub fn obstacles(&self) -> Vec<Obstacle> {
        let why = |item: &Item| match item {
            Item::Job(_) => Some("another QEMU does not continue it: wait until it has ended, or cancel it"),
            Item::RedirectedUsb(_) => Some("another QEMU cannot continue it: disconnect it in the client"),
            Item::Export(_) => Some("its clients would lose the disk: end the backup or the NBD server"),
            _ => None,
        };
        let obstacle = |item: &Item| Some(Obstacle { what: item.to_string(), why: why(item)?.into() });
        self.process.keys().filter_map(obstacle).collect()
    }

    /// Gives another QEMU of the machine the settings that a manager may have changed since the start: the interval of
    /// balloon statistics, those of I/O threads, write thresholds, and the rate limits of disks. A setting that it does not
    /// know is left out.
    ///
    /// # Errors
    /// When QEMU does not answer or returns an error.
    pub fn apply_settings(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        let drives: Vec<Value> = qmp.execute("query-block", ())?;
        for (item, value) in &self.settings {
            match item {
                Item::Property { object, name } if is_set(name, value) => match property(qmp, object, name) {
                    Ok(current) if current == *value => {}
                    Ok(_) => {
                        let arguments = json!({"path": object, "property": name, "value": value});
                        qmp.execute::<Value>("qom-set", arguments)?;
                    }
                    Err(QmpError::Refused { .. }) => tracing::warn!("{item}: the new QEMU does not have this setting"),
                    Err(e) => return Err(e),
                },
                Item::WriteThreshold(node) => {
                    let arguments = json!({"node-name": node, "write-threshold": value});
                    qmp.execute::<Value>("block-set-write-threshold", arguments)?;
                }
                Item::Limits(name) => {
                    let drive = drives.iter().find(|drive| device_name(drive).as_ref() == Some(name));
                    if let Some(arguments) = drive.and_then(|drive| change_of_limits(drive, value)) {
                        qmp.execute::<Value>("block_set_io_throttle", arguments)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Answers {
    /// Returns the devices that show the guest a USB device of a SPICE client, when one is connected.
    fn usb_redirections(&self) -> impl Iterator<Item = String> {
        let redirections = self.devices.iter().filter(|device| child_type(device) == Some("usb-redir"));
        redirections.map(|device| format!("{DEVICES}/{}", text(device, "name")))
    }

    /// Returns the settings that QMP's queries do not report, as objects and names of properties.
    fn settings_in_qom(&self) -> Vec<(String, &'static str)> {
        let balloons =
            self.devices.iter().filter(|device| child_type(device).is_some_and(|kind| kind.contains("balloon")));
        let balloons = balloons.map(|device| (format!("{DEVICES}/{}", text(device, "name")), BALLOON_INTERVAL));
        let of_thread = |thread: &Value| {
            let object = format!("{OBJECTS}/{}", text(thread, "id"));
            OTHER_THREAD_SETTINGS.map(|name| (object.clone(), name))
        };
        balloons.chain(self.io_threads.iter().flat_map(of_thread)).collect()
    }
}

/// Returns whether a setting differs from QEMU's default. 0 stands for that, which depends on the version, except for
/// the longest time of polling: there it means not to poll.
fn is_set(name: &str, value: &Value) -> bool {
    *value != 0 || name == "poll-max-ns"
}

fn property(qmp: &mut Qmp, object: &str, name: &str) -> Result<Value, QmpError> {
    qmp.execute("qom-get", json!({"path": object, "property": name}))
}

fn differing(left: &BTreeMap<Item, Value>, right: &BTreeMap<Item, Value>) -> Vec<Item> {
    let items: BTreeSet<&Item> = left.keys().chain(right.keys()).collect();
    items.into_iter().filter(|item| left.get(item) != right.get(item)).cloned().collect()
}

/// Returns the name of the drive of an entry of `query-block` or `query-blockstats`. `None` if no device has it.
pub(super) fn device_name(entry: &Value) -> Option<String> {
    let member = |name: &str| entry.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    let path = member("qdev").or_else(|| member("device"))?;
    let below = path.strip_prefix(DEVICES).and_then(|path| path.strip_prefix('/'));
    let id = below.and_then(|path| path.split('/').next());
    // A device without an id has a number, which depends on QEMU's version.
    let unnamed = path.starts_with("/machine/unattached/").then(|| member("device")).flatten();
    Some(id.or(unnamed).unwrap_or(path).to_owned())
}

/// Returns the names of the nodes of an entry of `query-blockstats`, that of the drive first, then the backing images.
pub(super) fn node_names(chain: &Value) -> Vec<String> {
    images_of(chain).filter_map(node_name).collect()
}

/// Returns the nodes of the files in which the images of an entry of `query-blockstats` are, by the images' nodes.
pub(super) fn storage_nodes(chain: &Value) -> BTreeMap<String, String> {
    images_of(chain).filter_map(|image| Some((node_name(image)?, node_name(image.get("parent")?)?))).collect()
}

fn images_of(chain: &Value) -> impl Iterator<Item = &Value> {
    std::iter::successors(Some(chain), |node| node.get("backing"))
}

fn node_name(node: &Value) -> Option<String> {
    Some(node.get("node-name")?.as_str()?.to_owned())
}

/// Describes the images of an entry of `query-blockstats`, which is nested as the nodes are. Their names are left out:
/// QEMU makes them up for nodes that the command line does not name.
fn images(chain: &Value, nodes: &BTreeMap<String, &Value>) -> Value {
    let Some(node) = chain.get("node-name").and_then(Value::as_str).and_then(|name| nodes.get(name)) else {
        return Value::Null;
    };
    let below = |name: &str| chain.get(name).map_or(Value::Null, |child| images(child, nodes));
    let (file, backing) = (below("parent"), below("backing"));
    let mut image = members(node, &["drv", "ro"]);
    // A node above others has a name that is made of theirs.
    let is_lowest = file.is_null() && backing.is_null();
    if let (Value::Object(image), true) = (&mut image, is_lowest) {
        image.insert("file".into(), text(node, "file").into());
    }
    json!({"node": image, "file": file, "backing": backing})
}

/// Returns the rate limits of a member `inserted` of `query-block`.
fn limits(inserted: &Value) -> Value {
    let is_limited = |name: &&str| inserted.get(name).and_then(Value::as_u64).is_some_and(|limit| limit > 0);
    let mut limits = members(inserted, if LIMITS.iter().any(is_limited) { &MORE_LIMITS } else { &[] });
    for name in LIMITS {
        limits[name] = inserted.get(name).cloned().unwrap_or_else(|| 0.into());
    }
    limits
}

/// Returns the arguments of the command that gives an entry of `query-block` the limits `wanted`. `None` if it has them.
fn change_of_limits(drive: &Value, wanted: &Value) -> Option<Value> {
    let inserted = drive.get("inserted")?;
    if limits(inserted) == *wanted {
        return None;
    }
    let mut arguments = wanted.clone();
    match drive.get("qdev") {
        Some(path) => arguments["id"] = path.clone(),
        None => arguments["device"] = drive.get("device")?.clone(),
    }
    Some(arguments)
}

fn members(value: &Value, names: &[&str]) -> Value {
    let present = names.iter().filter_map(|name| Some(((*name).to_owned(), value.get(name)?.clone())));
    present.collect::<Map<_, _>>().into()
}

fn text(value: &Value, name: &str) -> String {
    value.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// Returns the type of an entry of `qom-list` that is an object.
pub(super) fn child_type(entry: &Value) -> Option<&str> {
    entry.get("type")?.as_str()?.strip_prefix("child<")?.strip_suffix('>')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers of QEMU 7.2: a disk with a backing image, an empty CD-ROM drive, an I/O thread and a balloon.
    fn answers() -> Answers {
        let node = |name: &str, driver: &str, file: &str, read_only: bool| {
            json!({"node-name": name, "drv": driver, "file": file, "ro": read_only, "detect_zeroes": "off",
                "write_threshold": 0, "cache": {"no-flush": false, "direct": false, "writeback": true},
                "image": {"virtual-size": 16777216, "actual-size": 4096}})
        };
        let list = |value: Value| serde_json::from_value(value).unwrap();
        Answers {
            block: list(json!([
                {"device": "", "qdev": "/machine/peripheral/virtio-disk0/virtio-backend", "io-status": "ok",
                    "inserted": {"node-name": "libvirt-1-format", "bps": 0, "image": {"virtual-size": 16777216}}},
                {"device": "", "qdev": "ide0-0-1", "tray_open": false, "removable": true, "io-status": "ok"}])),
            block_statistics: list(json!([
                {"device": "", "qdev": "/machine/peripheral/virtio-disk0/virtio-backend",
                    "node-name": "libvirt-1-format", "parent": {"node-name": "libvirt-1-storage"},
                    "backing": {"node-name": "libvirt-2-format", "parent": {"node-name": "libvirt-2-storage"}}},
                {"device": "", "qdev": "ide0-0-1"}])),
            nodes: vec![
                node("libvirt-1-format", "qcow2", "json:{}", false),
                node("libvirt-1-storage", "file", "/top.qcow2", false),
                node("libvirt-2-format", "raw", "/base.raw", true),
                node("libvirt-2-storage", "file", "/base.raw", false),
            ],
            io_threads: list(json!([{"id": "iothread1", "thread-id": 22985, "poll-max-ns": 32768, "poll-grow": 0}])),
            chardevs: list(json!([{"label": "charserial0", "filename": "pty:/dev/pts/1", "frontend-open": true},
                {"label": "rekindle-a-2-qmp", "filename": "unix:", "frontend-open": true}])),
            memory: list(json!([{"id": "pc.ram", "size": 67108864}])),
            objects: list(json!([{"name": "type", "type": "string"}, {"name": "iothread1", "type": "child<iothread>"},
                {"name": "pc.ram", "type": "child<memory-backend-ram>"}])),
            devices: list(json!([{"name": "balloon0", "type": "child<virtio-balloon-pci>"}])),
            networks: "net: index=0,type=user".into(),
            ..Answers::default()
        }
    }

    /// Returns the names of what a change of the answers changes: for the same QEMU, and for another one.
    fn changed(change: impl Fn(&mut Answers)) -> (Vec<String>, Vec<String>) {
        let before = Inventory::from_answers(&answers());
        let mut changed_answers = answers();
        change(&mut changed_answers);
        let now = Inventory::from_answers(&changed_answers);
        let names = |items: Vec<Item>| items.iter().map(Item::to_string).collect();
        (names(now.changes_since(&before)), names(before.differences_from(&now)))
    }

    fn owned(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn what_a_guest_and_the_time_change_is_no_difference() {
        let none = (Vec::new(), Vec::new());
        assert_eq!(changed(|answers| answers.nodes[1]["image"]["virtual-size"] = 99.into()), none);
        assert_eq!(changed(|answers| answers.block[0]["io-status"] = "failed".into()), none);
        assert_eq!(changed(|answers| answers.chardevs[0]["frontend-open"] = false.into()), none);
        assert_eq!(changed(|answers| answers.io_threads[0]["thread-id"] = 1.into()), none);
    }

    #[test]
    fn a_snapshot_is_found() {
        let snapshot = |answers: &mut Answers| {
            answers.nodes.push(json!({"node-name": "overlay", "drv": "file", "file": "/overlay", "ro": false}));
            let below = answers.block_statistics[0].clone();
            answers.block_statistics[0] =
                json!({"qdev": below["qdev"], "device": "", "node-name": "overlay", "backing": below});
        };
        let (changes, differences) = changed(snapshot);
        assert_eq!(changes, owned(&["disk virtio-disk0", "image overlay"]));
        assert_eq!(differences, owned(&["disk virtio-disk0"]));
    }

    #[test]
    fn a_pulled_backing_image_another_file_and_another_access_are_found() {
        let disk = owned(&["disk virtio-disk0"]);
        let pulled = |answers: &mut Answers| {
            answers.block_statistics[0].as_object_mut().unwrap().remove("backing");
        };
        assert_eq!(changed(pulled).1, disk);
        assert_eq!(changed(|answers| answers.nodes[3]["file"] = "/other.raw".into()).1, disk);
        assert_eq!(changed(|answers| answers.nodes[2]["ro"] = false.into()).1, disk);
        assert_eq!(changed(|answers| answers.nodes[2]["drv"] = "qcow2".into()).1, disk);
        // Another QEMU makes up other names.
        let renamed = |answers: &mut Answers| {
            answers.nodes[3]["node-name"] = "#block042".into();
            answers.block_statistics[0]["backing"]["parent"]["node-name"] = "#block042".into();
        };
        assert_eq!(changed(renamed).1, Vec::<String>::new());
    }

    #[test]
    fn threads_objects_and_devices_are_compared() {
        let (_, differences) = changed(|answers| answers.io_threads.clear());
        assert_eq!(differences, owned(&["I/O thread iothread1"]));
        let in_a_file = |answers: &mut Answers| answers.objects[2]["type"] = "child<memory-backend-file>".into();
        assert_eq!(changed(in_a_file), (Vec::new(), Vec::new()));
        let monitor = |answers: &mut Answers| {
            answers.objects.push(json!({"name": "monitor", "type": "child<monitor-qmp>"}));
        };
        assert_eq!(changed(monitor), (Vec::new(), Vec::new()));
        assert_eq!(changed(|answers| drop(answers.objects.pop())).1, owned(&["object pc.ram"]));
        assert_eq!(changed(|answers| drop(answers.devices.pop())).1, owned(&["device balloon0"]));
        assert_eq!(changed(|answers| answers.chardevs[0]["label"] = "x".into()).1.len(), 2);
    }

    #[test]
    fn settings_are_compared_in_one_qemu_only() {
        let (changes, differences) = changed(|answers| answers.nodes[1]["write_threshold"] = 4096.into());
        assert_eq!(changes, owned(&["write threshold of image libvirt-1-storage"]));
        assert_eq!(differences, Vec::<String>::new());
        let (changes, differences) = changed(|answers| answers.io_threads[0]["poll-grow"] = 2.into());
        assert_eq!(changes, owned(&["poll-grow of /objects/iothread1"]));
        assert_eq!(differences, Vec::<String>::new());
        assert!(!is_set("poll-grow", &0.into()));
        assert!(is_set("poll-max-ns", &0.into()) && is_set(BALLOON_INTERVAL, &5.into()));
    }

    #[test]
    fn limits_are_compared_in_one_qemu_and_set_in_another_one() {
        let (changes, differences) = changed(|answers| answers.block[0]["inserted"]["bps"] = 7.into());
        assert_eq!(changes, owned(&["rate limits of disk virtio-disk0"]));
        assert_eq!(differences, Vec::<String>::new());

        let none = json!({"bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0});
        let limited = json!({"bps": 0, "bps_rd": 9, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0,
            "bps_rd_max": 99, "bps_rd_max_length": 2, "iops_size": 4096, "group": "shared"});
        let drive = |qdev: Value, inserted: &Value| json!({"device": "d", "qdev": qdev, "inserted": inserted});
        let with = |limits: &Value, name: &str, value: &str| {
            let mut arguments = limits.clone();
            arguments[name] = value.into();
            arguments
        };
        assert_eq!(limits(&json!({"iops_size": 4096})), none);
        assert_eq!(change_of_limits(&drive("/q".into(), &limited), &limits(&limited)), None);
        assert_eq!(change_of_limits(&drive("/q".into(), &none), &limited), Some(with(&limited, "id", "/q")));
        assert_eq!(change_of_limits(&drive("/q".into(), &limited), &none), Some(with(&none, "id", "/q")));
        let without_path = json!({"device": "d", "inserted": none});
        assert_eq!(change_of_limits(&without_path, &limited), Some(with(&limited, "device", "d")));
        assert_eq!(change_of_limits(&json!({"device": "d"}), &limited), None);
    }

    #[test]
    fn jobs_and_exports_are_obstacles() {
        let mut answers = answers();
        assert_eq!(Inventory::from_answers(&answers).obstacles(), []);
        answers.jobs.push(json!({"id": "pull-vda-libvirt-1-format", "type": "stream", "current-progress": 1}));
        answers.exports.push(json!({"id": "nbd0", "type": "nbd"}));
        let obstacles = Inventory::from_answers(&answers).obstacles();
        let names: Vec<&str> = obstacles.iter().map(|obstacle| obstacle.what.as_str()).collect();
        assert_eq!(names, ["job pull-vda-libvirt-1-format", "export nbd0"]);
    }
}
