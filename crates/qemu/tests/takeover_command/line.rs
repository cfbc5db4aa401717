//! A command line of the directory `lines`, with what its QEMU reported when it ran. `source` in the file states which
//! program wrote the line.

use rekindle_qemu::adopt::Obstacle;
use rekindle_qemu::command::RamBackend;
use rekindle_qemu::foreign::{CurrentDisk, MachineFacts};
use rekindle_qemu::options::Options;
use rekindle_qemu::ramblock::RamBlock;
use rekindle_qemu::syntax::Syntax;
use rekindle_qemu::takeover_command::{
    CommandLine, Destination, Drive, ListenAddress, RunningFacts, SourceDescriptor, rewrite,
};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::fd::RawFd;
use std::path::Path;

pub struct Line {
    pub arguments: Vec<String>,
    pub facts: RunningFacts,
    pub open: BTreeMap<RawFd, SourceDescriptor>,
    /// The changes by the rewrite: `- ARGUMENT` and `+ ARGUMENT`.
    pub changes: Vec<String>,
}

fn texts(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().map(|text| text.as_str().unwrap().to_owned()).collect()
}

/// Returns the objects of a command line by id: none was added or removed since the start.
fn objects(arguments: &[String]) -> BTreeMap<String, Options> {
    let values = arguments.windows(2).filter(|pair| pair[0] == "-object").map(|pair| &pair[1]);
    let objects = values.map(|value| Options::parse(value, "qom-type").unwrap());
    objects.map(|object| (object.get("id").unwrap(), object)).collect()
}

impl Line {
    /// Reads `lines/NAME.json`.
    pub fn read(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/takeover_command/lines/{name}.json"));
        let file: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let list = |key: &str| file[key].as_array().cloned().unwrap_or_default();
        let drives = list("drives");
        let disk = |drive: &Value| Some(CurrentDisk { device: text(&drive["device"])?, node: text(&drive["node"])? });
        let machine = MachineFacts {
            machine: text(&file["machine"]).unwrap(),
            backends: list("backends")
                .iter()
                .map(|backend| RamBackend {
                    id: text(&backend["id"]).unwrap(),
                    bytes: backend["bytes"].as_u64().unwrap(),
                })
                .collect(),
            main_backend: text(&file["main_backend"]),
            devices: texts(&file["devices"]).into_iter().collect(),
            disks: drives.iter().filter_map(disk).collect(),
            cwd: "/".into(),
        };
        let facts = RunningFacts {
            machine,
            ram_blocks: list("ram_blocks").iter().map(ram_block).collect(),
            drives: drives
                .iter()
                .map(|drive| Drive {
                    device: text(&drive["device"]).unwrap(),
                    file: text(&drive["file"]),
                    nodes: text(&drive["node"]).into_iter().collect(),
                    storages: BTreeMap::new(),
                    tray_open: drive["tray_open"].as_bool().unwrap(),
                })
                .collect(),
            fd_sets: fd_sets(&file["fd_sets"]),
            vnc_servers: serde_json::from_value(file["vnc_servers"].clone()).unwrap_or_default(),
            objects: objects(&texts(&file["arguments"])),
            ..RunningFacts::default()
        };
        let open = file["descriptors"].as_object().unwrap().iter();
        Self {
            arguments: texts(&file["arguments"]),
            facts,
            open: open.map(|(number, value)| (number.parse().unwrap(), descriptor(value))).collect(),
            changes: texts(&file["changes"]),
        }
    }

    pub fn rewrite(&self) -> Result<CommandLine, Vec<Obstacle>> {
        self.rewrite_for(Syntax::default())
    }

    pub fn rewrite_for(&self, syntax: Syntax) -> Result<CommandLine, Vec<Obstacle>> {
        let destination = Destination { label: "6a5a3e0e-2".into(), syntax, socket_directory: None };
        rewrite(&self.arguments, &self.facts, &self.open, &destination)
    }
}

fn ram_block(block: &Value) -> RamBlock {
    let number = |key: &str| block[key].as_u64().unwrap();
    RamBlock {
        id: block["id"].as_str().unwrap().to_owned(),
        used: number("bytes"),
        total: number("bytes"),
        page_size: number("page_bytes"),
        offset: 0,
        address: None,
    }
}

fn fd_sets(sets: &Value) -> BTreeMap<u32, Vec<RawFd>> {
    let numbers = |list: &Value| list.as_array().unwrap().iter().map(|fd| fd.as_i64().unwrap() as RawFd).collect();
    sets.as_object().into_iter().flatten().map(|(set, fds)| (set.parse().unwrap(), numbers(fds))).collect()
}

fn descriptor(value: &Value) -> SourceDescriptor {
    match value.as_str() {
        Some("null") => return SourceDescriptor::Null,
        Some("vhost") => return SourceDescriptor::VhostNet,
        Some(_) => return SourceDescriptor::Other,
        None => {}
    }
    if let Some(path) = value["unix"].as_str() {
        SourceDescriptor::Listener(ListenAddress::Unix(path.into()))
    } else if let Some(address) = value["tcp"].as_str() {
        SourceDescriptor::Listener(ListenAddress::Tcp(address.parse().unwrap()))
    } else {
        SourceDescriptor::Tap { interface: value["tap"].as_str().unwrap().into() }
    }
}
