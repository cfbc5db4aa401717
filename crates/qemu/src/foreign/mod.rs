//! A machine that was started with another program's command line, so that it can be built again elsewhere.
//!
//! A guest that is restored must see the machine that it knows. Of a QEMU that Rekindle has started, [`Hardware`]
//! describes it. Of another, its command line does: what the guest can see of it is kept word for word, with the
//! machine type pinned to the versioned one; what is about the process (monitors, sockets, users, windows) is left
//! out or becomes Rekindle's own; and each memory backend becomes a file in Rekindle's RAM directory, with the same
//! id, since the id is the name of the RAM block in the device state.
//!
//! What cannot be carried over is named by [`of`], when the guest is attached, and not when it is to be restored.

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

/// A reason, for people.
type Why = &'static str;

/// A machine that was started with another program's command line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Foreign {
    /// What is kept of the command line, rewritten where it has to be.
    pub words: Vec<String>,
    /// Its memory. The first is the file that [`crate::command::Ram`] names, the others are in the same directory.
    pub backends: Vec<RamBackend>,
    /// Its networks, in the order of [`Hardware::nets`].
    pub networks: Vec<Network>,
    /// The character device that becomes Rekindle's console.
    pub console: Option<String>,
    /// The one that becomes the guest agent's port.
    pub agent: Option<String>,
    /// What the guest sees of its processors: `-cpu max` and `-cpu host` mean something else in another QEMU or host.
    #[serde(default)]
    pub cpu: Features,
}

/// A memory backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamBackend {
    /// Its id, which is also the name of its RAM block.
    pub id: String,
    /// Bytes.
    pub bytes: u64,
}

/// A network of the guest's, `-netdev`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Its id.
    pub id: String,
    /// What it was: `user`, `tap`, ...
    pub kind: String,
    /// Of one of kind `user`, its options but for forwarded ports: the guest knows its addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub options: Option<String>,
    /// The card talks to its network with headers that only a tap knows, so that it needs a tap again.
    pub needs_tap: bool,
    /// The card's address from the command line; empty where QEMU chose it.
    pub mac: String,
    /// Forwarded ports in QEMU's notation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forwards: Vec<String>,
}

/// A machine with the VM generation ID that its guest has now, or all that cannot be carried over.
pub type Found = Result<(Foreign, Option<Uuid>), Vec<Obstacle>>;

/// What is known of a QEMU in addition to its command line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Versioned machine type.
    pub machine: String,
    /// Its memory backends with their sizes.
    pub backends: Vec<RamBackend>,
    /// The one that is the machine's main memory; none where NUMA nodes name theirs.
    pub main: Option<String>,
    /// Ids of its devices now.
    pub devices: BTreeSet<String>,
    /// Disks as they are now: path of the device, name of its block node.
    pub disks: Vec<(String, String)>,
    /// Where its relative paths begin.
    pub cwd: PathBuf,
}

/// Finds out what machine `adopted` is, from its command line and from QMP. The inner error names all that
/// cannot be carried over.
///
/// # Errors
/// When it does not answer.
pub fn of(adopted: &Adopted, qmp: &mut Qmp) -> Result<Found, QmpError> {
    let facts = facts(adopted, qmp)?;
    let mut problems = Vec::new();
    // The device state names RAM blocks; a restored QEMU names them by their backends.
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

/// What is to be known of `adopted` in addition to its command line. When it changes, devices or disks were changed.
///
/// # Errors
/// When it does not answer.
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
    /// The names of its RAM blocks that are memory backends: what is loaded on demand.
    pub fn ram_ids(&self) -> impl Iterator<Item = &str> {
        self.backends.iter().map(|backend| backend.id.as_str())
    }

    /// The file of each backend, when `main` is that of the first, with its bytes.
    pub fn ram_files<'a>(&'a self, main: &'a Path) -> impl Iterator<Item = (PathBuf, u64)> + 'a {
        self.backends.iter().enumerate().map(move |(index, backend)| {
            let kind = main.extension().unwrap_or_default().to_string_lossy();
            let path = if index == 0 { main.to_owned() } else { main.with_extension(format!("{index}.{kind}")) };
            (path, backend.bytes)
        })
    }

    /// The arguments for a QEMU with this machine, as [`Hardware::arguments`].
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

/// A user network with forwarded ports, in the form in which it is written.
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

/// A VM generation ID device with another ID.
fn with_generation(device: &str, guid: Uuid) -> Option<String> {
    let mut options = Options::parse(device, "driver").ok()?;
    (options.get("driver")? == "vmgenid").then(|| {
        options.set("guid", &guid.to_string());
        options.to_string()
    })
}
