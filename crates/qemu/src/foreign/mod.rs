//! Derives the description of a machine that Rekindle did not start, so that another QEMU can build it again.
//!
//! A restored guest must see the machine that it knows. For a QEMU that Rekindle started, the VM's definition describes
//! the machine. For any other, its command line does. Arguments that the guest can see are kept word for word, with the
//! machine type pinned to the versioned one. Arguments about the process (monitors, sockets, users, windows) are left
//! out or replaced by Rekindle's own. Each memory backend becomes a file in Rekindle's RAM directory with the same id,
//! because the id is the name of the RAM block in the device state.
//!
//! [`describe`] reports devices and options that cannot be carried over. It does so when the guest is attached, not
//! when it is restored. [`ForeignMachine`] is the result.

mod carry_rules;
mod differences;
mod overlay_nodes;
mod paths;
mod rewrite;

pub(crate) use carry_rules::{CarryRule, CommandOption, Reason, split};
pub(crate) use differences::{device_differences, disk_differences};
pub use overlay_nodes::without_overlays;
pub(crate) use paths::with_absolute_paths;
pub(crate) use rewrite::{forwards, refused_device, refused_object};

use crate::adopt::{Adopted, Obstacle};
use crate::block::BlockError;
use crate::block::graph::BlockGraph;
use crate::block::names::OverlayName;
use crate::command::{ForeignMachine, RamBackend};
use crate::cpu;
use crate::qmp::{Qmp, QmpError};
use crate::ramblock;
use overlay_nodes::OverlayNodes;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;
use uuid::Uuid;

/// A machine that can be built again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    pub machine: ForeignMachine,
    /// The guest's current VM generation ID, if it has a device for it.
    pub vm_generation: Option<Uuid>,
}

/// Properties of a running machine that QEMU's command line does not show.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachineFacts {
    /// Versioned machine type.
    pub machine: String,
    pub backends: Vec<RamBackend>,
    /// Id of the backend of the machine's main memory. None if NUMA nodes name their backends.
    pub main_backend: Option<String>,
    /// Ids of the current devices.
    pub devices: BTreeSet<String>,
    pub disks: Vec<CurrentDisk>,
    /// Working directory of the process, to which relative paths refer.
    pub cwd: PathBuf,
}

/// A disk device and the image that it shows at present.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CurrentDisk {
    /// QOM path or id of the device.
    pub device: String,
    /// Name of the block node.
    pub node: String,
}

/// Derives the description of `adopted`'s machine from its command line and from QMP. The inner error lists everything
/// that cannot be carried over.
///
/// # Errors
/// When QEMU does not answer or returns an error.
pub fn describe(adopted: &Adopted, qmp: &mut Qmp) -> Result<Result<Description, Vec<Obstacle>>, QmpError> {
    let facts = read_facts(adopted, qmp)?;
    let mut obstacles = unnamed_blocks(&facts.backends, qmp)?;
    match rewrite::rewrite(&adopted.arguments, &facts) {
        Ok(machine) if obstacles.is_empty() => {
            let machine = ForeignMachine { cpu: cpu::features(qmp)?, ..machine };
            Ok(Ok(Description { machine, vm_generation: read_vm_generation(qmp)? }))
        }
        rewritten => {
            obstacles.extend(rewritten.err().unwrap_or_default());
            Ok(Err(obstacles))
        }
    }
}

/// Reads the facts of `adopted`'s machine. If they change, devices or disks have changed.
///
/// # Errors
/// When QEMU does not answer or returns an error.
pub fn read_facts(adopted: &Adopted, qmp: &mut Qmp) -> Result<MachineFacts, QmpError> {
    #[derive(Deserialize)]
    struct Property {
        name: String,
        #[serde(rename = "type")]
        kind: String,
    }
    let main_backend = match qmp.execute::<String>("qom-get", json!({"path": "/machine", "property": "memory-backend"}))
    {
        Ok(path) => path.rsplit('/').next().filter(|id| !id.is_empty()).map(str::to_owned),
        Err(QmpError::Refused { .. }) => None,
        Err(e) => return Err(e),
    };
    let properties: Vec<Property> = qmp.execute("qom-list", json!({"path": "/machine/peripheral"}))?;
    let devices = properties.into_iter().filter(|property| property.kind.starts_with("child<"));
    let block_devices: Vec<Value> = qmp.execute("query-block", ())?;
    let (mut disks, mut graph) = (Vec::new(), None);
    for block_device in &block_devices {
        let text = |pointer: &str| block_device.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
        if let (Some(node), Some(device)) = (text("/inserted/node-name"), text("/qdev")) {
            let node = below_overlays(&adopted.arguments, &device, node, qmp, &mut graph)?;
            disks.push(CurrentDisk { node, device });
        }
    }
    let backends = adopted.backends.iter();
    Ok(MachineFacts {
        machine: adopted.machine.clone(),
        backends: backends
            .filter_map(|backend| Some(RamBackend { id: backend.id.clone()?, bytes: backend.size }))
            .collect(),
        main_backend,
        devices: devices.map(|device| device.name).collect(),
        disks,
        cwd: std::fs::read_link(format!("/proc/{}/cwd", adopted.pid)).unwrap_or_default(),
    })
}

/// Returns the node below Rekindle's overlays, if `node` is one: the disk that the command line gives the device.
/// `graph`: that of an earlier disk.
fn below_overlays(
    arguments: &[String],
    device: &str,
    node: String,
    qmp: &mut Qmp,
    graph: &mut Option<BlockGraph>,
) -> Result<String, QmpError> {
    let is_given = |node: &str| arguments.iter().any(|argument| argument.contains(&format!("\"{node}\"")));
    // While a protector or `detach` that was killed has left a merge, its filter is on top.
    let is_own = OverlayName::from_node(&node).is_some() || OverlayName::is_merge_filter(&node);
    let tops = OverlayNodes::of(arguments).tops();
    if !is_own && tops.is_empty() && is_given(&node) {
        return Ok(node);
    }
    let graph = match graph.take().map_or_else(|| BlockGraph::read(qmp), Ok) {
        Ok(read) => graph.insert(read),
        Err(BlockError::Qmp(e)) => return Err(e),
        Err(_) => return Ok(node),
    };
    if !is_own {
        // Overlays that libvirt has put, or on which it has started the domain.
        let Some(base) = graph.nodes_of(device).find(|node| !graph.is_overlay_file(node)) else { return Ok(node) };
        // The overlays of the command line may be merged meanwhile, and others be above.
        let given = tops.get(base).filter(|_| graph.is_overlay_file(&node));
        return Ok(given.map_or(base, String::as_str).to_owned());
    }
    match graph.chain_of(device) {
        Ok(chain) => Ok(chain.base),
        Err(BlockError::Qmp(e)) => Err(e),
        // Another program has changed the disk: the overlay is reported as it is.
        Err(_) => Ok(node),
    }
}

/// Reports the backends whose RAM block has another name. The device state names RAM blocks, and a restored QEMU names
/// them after their backends.
fn unnamed_blocks(backends: &[RamBackend], qmp: &mut Qmp) -> Result<Vec<Obstacle>, QmpError> {
    let blocks = ramblock::list(qmp)?;
    let has_block =
        |backend: &&RamBackend| blocks.iter().any(|block| block.id == backend.id && block.used == backend.bytes);
    let obstacle = |RamBackend { id, bytes }: &RamBackend| Obstacle {
        what: format!("memory backend {id}"),
        why: format!("no RAM block of {bytes} bytes has its name: a machine type before 4.0 names them otherwise"),
    };
    Ok(backends.iter().filter(|backend| !has_block(backend)).map(obstacle).collect())
}

fn read_vm_generation(qmp: &mut Qmp) -> Result<Option<Uuid>, QmpError> {
    match qmp.execute::<Value>("query-vm-generation-id", ()) {
        Ok(reply) => Ok(reply.get("guid").and_then(Value::as_str).and_then(|guid| guid.parse().ok())),
        // The machine has no such device.
        Err(QmpError::Refused { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}
