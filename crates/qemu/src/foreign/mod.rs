//! The machine of a QEMU that Rekindle did not start, described so that another QEMU can build it again.
//!
//! A restored guest must see the machine that it knows. For a QEMU that Rekindle started, [`Hardware`] describes the
//! machine. For any other, its command line does. Arguments that the guest can see are kept word for word, with the
//! machine type pinned to the versioned one. Arguments about the process (monitors, sockets, users, windows) are left
//! out or replaced by Rekindle's own. Each memory backend becomes a file in Rekindle's RAM directory with the same
//! id, because the id is the name of the RAM block in the device state.
//!
//! [`of`] reports devices and options that cannot be carried over. It does so when the guest is attached, not when it
//! is restored.

mod paths;
mod rewrite;
mod words;

use crate::adopt::{Adopted, Backend, Obstacle};
use crate::command::{Directory, Hardware, NetBackend, Start, Tap};
use crate::cpu::{self, Features};
use crate::options::Options;
use crate::qmp::{Qmp, QmpError};
use crate::ramblock;
use crate::syntax::Syntax;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// A reason, as shown to the user.
type Why = &'static str;

/// The machine of a QEMU that Rekindle did not start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Foreign {
    /// The kept arguments, rewritten where necessary.
    pub words: Vec<String>,
    /// Memory backends. The first one's file is the one that [`crate::command::Ram`] names; the other files are in
    /// the same directory.
    pub backends: Vec<RamBackend>,
    /// Networks, in the order of [`Hardware::nets`].
    pub networks: Vec<Network>,
    /// Id of the character device that becomes Rekindle's console.
    pub console: Option<String>,
    /// Id of the character device that becomes the guest agent's port.
    pub agent: Option<String>,
    /// CPU features that the guest sees: `-cpu max` and `-cpu host` mean something else in another QEMU or on another
    /// host.
    #[serde(default)]
    pub cpu: Features,
}

/// A memory backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamBackend {
    /// Id of the backend, which is also the name of its RAM block.
    pub id: String,
    /// Size in bytes.
    pub bytes: u64,
}

/// A network of the guest's, `-netdev`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Id of the network.
    pub id: String,
    /// Type of the network: `user`, `tap`, ...
    pub kind: String,
    /// Options of a network of type `user`, without the forwarded ports: the guest knows the addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub options: Option<String>,
    /// Whether the network must be a tap again: the card sends frames with headers that only a tap understands.
    pub needs_tap: bool,
    /// MAC address on the command line; empty if QEMU chose it.
    pub mac: String,
    /// Forwarded ports in QEMU's notation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forwards: Vec<String>,
}

/// A machine and the guest's current VM generation ID, or everything that cannot be carried over.
pub type Found = Result<(Foreign, Option<Uuid>), Vec<Obstacle>>;

/// Properties of a QEMU that its command line does not show.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Versioned machine type.
    pub machine: String,
    /// Memory backends with their sizes.
    pub backends: Vec<RamBackend>,
    /// Id of the backend of the machine's main memory. None if NUMA nodes name their backends.
    pub main: Option<String>,
    /// Ids of the current devices.
    pub devices: BTreeSet<String>,
    /// Current disks: path of the device, name of its block node.
    pub disks: Vec<(String, String)>,
    /// Working directory, to which relative paths refer.
    pub cwd: PathBuf,
}

/// Determines the machine of `adopted` from its command line and from QMP. The inner error lists everything that
/// cannot be carried over.
///
/// # Errors
/// When QEMU does not answer or returns an error.
pub fn of(adopted: &Adopted, qmp: &mut Qmp) -> Result<Found, QmpError> {
    let facts = facts(adopted, qmp)?;
    let mut problems = Vec::new();
    // The device state names RAM blocks; a restored QEMU names them after their backends.
    let blocks = ramblock::list(qmp)?;
    for RamBackend { id, bytes } in &facts.backends {
        if !blocks.iter().any(|block| block.id == *id && block.used == *bytes) {
            problems.push(Obstacle {
                what: format!("memory backend {id}"),
                why: format!(
                    "no RAM block of {bytes} bytes has its name: a machine type before 4.0 names them otherwise"
                ),
            });
        }
    }
    let generation = match qmp.execute::<Value>("query-vm-generation-id", ()) {
        Ok(reply) => reply.get("guid").and_then(Value::as_str).and_then(|guid| guid.parse().ok()),
        Err(QmpError::Refused { .. }) => None,
        Err(e) => return Err(e),
    };
    match rewrite::rewrite(&adopted.arguments, &facts) {
        Ok(foreign) if problems.is_empty() => Ok(Ok((Foreign { cpu: cpu::features(qmp)?, ..foreign }, generation))),
        Ok(_) => Ok(Err(problems)),
        Err(more) => {
            problems.extend(more);
            Ok(Err(problems))
        }
    }
}

/// Returns properties of `adopted` that its command line does not show. If they change, devices or disks have
/// changed.
///
/// # Errors
/// When QEMU does not answer or returns an error.
pub fn facts(adopted: &Adopted, qmp: &mut Qmp) -> Result<Facts, QmpError> {
    #[derive(Deserialize)]
    struct Property {
        name: String,
        #[serde(rename = "type")]
        kind: String,
    }
    let main = match qmp.execute::<String>("qom-get", json!({"path": "/machine", "property": "memory-backend"})) {
        Ok(path) => path.rsplit('/').next().filter(|id| !id.is_empty()).map(str::to_owned),
        Err(QmpError::Refused { .. }) => None,
        Err(e) => return Err(e),
    };
    let devices: Vec<Property> = qmp.execute("qom-list", json!({"path": "/machine/peripheral"}))?;
    let disks: Vec<Value> = qmp.execute("query-block", ())?;
    let disk = |disk: &Value| {
        let device = disk.get("qdev")?.as_str()?.to_owned();
        Some((device, disk.pointer("/inserted/node-name")?.as_str()?.to_owned()))
    };
    let backend = |backend: &Backend| Some(RamBackend { id: backend.id.clone()?, bytes: backend.size });
    Ok(Facts {
        machine: adopted.machine.clone(),
        backends: adopted.backends.iter().filter_map(backend).collect(),
        main,
        devices: devices
            .into_iter()
            .filter(|device| device.kind.starts_with("child<"))
            .map(|child| child.name)
            .collect(),
        disks: disks.iter().filter_map(disk).collect(),
        cwd: std::fs::read_link(format!("/proc/{}/cwd", adopted.pid)).unwrap_or_default(),
    })
}

impl Foreign {
    /// Returns the names of the RAM blocks that are memory backends. These are loaded on demand.
    pub fn ram_ids(&self) -> impl Iterator<Item = &str> {
        self.backends.iter().map(|backend| backend.id.as_str())
    }

    /// Returns the file of each backend with its size in bytes; `main` is the first backend's file.
    pub fn ram_files<'a>(&'a self, main: &'a Path) -> impl Iterator<Item = (PathBuf, u64)> + 'a {
        self.backends.iter().enumerate().map(move |(index, backend)| {
            let kind = main.extension().unwrap_or_default().to_string_lossy();
            let path = if index == 0 { main.to_owned() } else { main.with_extension(format!("{index}.{kind}")) };
            (path, backend.bytes)
        })
    }

    /// Returns the arguments for a QEMU with this machine, as [`Hardware::arguments`].
    pub(crate) fn arguments(
        &self,
        hardware: &Hardware,
        directory: &Directory,
        console_log: &Path,
        start: Start,
        syntax: Syntax,
    ) -> Vec<String> {
        let escaped = |text: &str| text.replace(',', ",,");
        let path = |path: &Path| escaped(&path.to_string_lossy());
        let mut line = Vec::new();
        let mut add = |option: &str, value: String| line.extend([option.to_owned(), value]);
        add("-name", syntax.name(&escaped(&hardware.name)));
        add("-display", "none".into());
        add("-msg", "timestamp=on".into());
        add("-monitor", "none".into());
        add("-pidfile", directory.pid().to_string_lossy().into_owned());
        add("-global", "migration.send-configuration=off".into());
        add("-accel", if hardware.accel == "tcg" { "tcg,thread=multi".into() } else { hardware.accel.clone() });
        for (backend, (file, bytes)) in self.backends.iter().zip(self.ram_files(&hardware.ram.path)) {
            let (id, file) = (escaped(&backend.id), path(&file));
            let place = format!("size={bytes},mem-path={file},share=on,prealloc=off");
            add("-object", format!("memory-backend-file,id={id},{place}"));
        }
        let (qmp, watch, protect, save) = (directory.qmp(), directory.watch(), directory.protect(), directory.save());
        for (id, socket) in [("qmp", qmp), ("watch", watch), ("protect", protect), ("save", save)] {
            add("-chardev", format!("socket,id=rekindle-{id},path={},server=on,wait=off", path(&socket)));
            let (option, value) = syntax.monitor(&format!("rekindle-{id}"));
            add(option, value);
        }
        let sockets = [
            (&self.console, directory.console(), format!(",logfile={},logappend=on", path(console_log))),
            (&self.agent, directory.agent(), String::new()),
        ];
        for (id, socket, log) in sockets {
            if let Some(id) = id {
                add("-chardev", format!("socket,id={},path={},server=on,wait=off{log}", escaped(id), path(&socket)));
            }
        }
        for (index, (net, network)) in hardware.nets.iter().zip(&self.networks).enumerate() {
            let id = escaped(&net.id);
            add(
                "-netdev",
                match &net.backend {
                    NetBackend::Tap(_) => format!("tap,id={id},fd={},vhost=off", Tap::fd(index)),
                    NetBackend::User(rules) => {
                        let options = network.options.clone().unwrap_or_else(|| format!("user,id={id}"));
                        with_forwards(options, rules)
                    }
                },
            );
        }
        let mut device = false;
        for word in &self.words {
            let generation = hardware.vm_generation.filter(|_| std::mem::take(&mut device));
            line.push(generation.and_then(|guid| with_generation(word, guid)).unwrap_or_else(|| word.clone()));
            device = word == "-device";
        }
        match start {
            Start::Boot => {}
            Start::Paused => line.push("-S".into()),
            Start::Incoming => line.extend(["-incoming", "defer", "-S"].map(str::to_owned)),
        }
        line
    }
}

/// Adds forwarded ports to the options of a user network, as JSON if the options are JSON.
fn with_forwards(network: String, rules: &[String]) -> String {
    match Options::parse(&network, "type") {
        Ok(Options::Json(mut map)) if !rules.is_empty() => {
            let rules: Vec<_> = rules.iter().map(|rule| json!({ "str": rule })).collect();
            map.insert("hostfwd".into(), rules.into());
            Value::Object(map).to_string()
        }
        _ => rules.iter().fold(network, |network, rule| network + ",hostfwd=" + &rule.replace(',', ",,")),
    }
}

/// Returns the options of a VM generation ID device with the ID `guid`; `None` for another device.
fn with_generation(device: &str, guid: Uuid) -> Option<String> {
    let mut options = Options::parse(device, "driver").ok()?;
    (options.get("driver")? == "vmgenid").then(|| {
        options.set("guid", &guid.to_string());
        options.to_string()
    })
}
