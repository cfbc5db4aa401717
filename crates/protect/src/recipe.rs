//! How to build the VM of a checkpoint again.
//!
//! Two kinds: of a VM that Rekindle has started, its definition and its hardware (format 1); of one that it was attached to,
//! the command line of its QEMU, rewritten when it was attached to (format 2, [`rekindle_qemu::foreign`]). Format 3 is 1 with the number of
//! ports of the agent's bus; format 4 is 3 with disks that a server of Rekindle's has, whose epochs the checkpoint's metadata names.
//! Format 5 is 4 with redo logs that are not beside their images.

use rekindle_qemu::command::{Hardware, Net, NetBackend, Ram};
use rekindle_vm::definition::Definition;
use rekindle_vm::hardware::new_generation;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The newest format that this Rekindle reads. It writes an older one where that says all, so that an older one understands it.
pub const FORMAT: u32 = 5;

/// Why a recipe cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// It is of a newer format.
    #[error(
        "the checkpoint says how to build its VM in format {found}; this Rekindle knows up to {FORMAT}: use a newer one"
    )]
    Newer {
        /// Its format.
        found: u64,
    },
    /// It is not a recipe.
    #[error("the checkpoint does not say how to build its VM again")]
    Odd(#[source] serde_json::Error),
}

/// What is stored with a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recipe {
    /// The format of this.
    pub format: u32,
    /// The definition, every default filled in.
    pub definition: Definition,
    /// The machine that the guest sees.
    pub hardware: Hardware,
}

impl Recipe {
    /// Read it from a checkpoint.
    ///
    /// # Errors
    /// [`RecipeError`].
    pub fn read(value: &Value) -> Result<Self, RecipeError> {
        match value.get("format").and_then(Value::as_u64) {
            Some(found) if found > u64::from(FORMAT) => Err(RecipeError::Newer { found }),
            _ => Self::deserialize(value).map_err(RecipeError::Odd),
        }
    }

    /// Make `hardware`, as this host would build the VM, what the guest of the checkpoint already knows: machine type, CPU
    /// model, UUID. Where the files are is this host's business.
    ///
    /// # Errors
    /// A text for each thing that the guest knows and that cannot be made so.
    ///
    /// `given`: the definition that `hardware` comes from was named for this host, and is not the recipe's own.
    pub fn fit(&self, hardware: &mut Hardware, given: bool) -> Result<(), Vec<String>> {
        if self.hardware.foreign.is_some() {
            return self.fit_foreign(hardware, given);
        }
        let mut problems = Vec::new();
        let theirs = &self.hardware;
        hardware.machine.clone_from(&theirs.machine);
        hardware.cpu.clone_from(&theirs.cpu);
        hardware.uuid = theirs.uuid;
        hardware.agent_ports = theirs.agent_ports;
        let mut same = |what: &str, ours: &dyn std::fmt::Debug, theirs: &dyn std::fmt::Debug| {
            let (ours, theirs) = (format!("{ours:?}"), format!("{theirs:?}"));
            if ours != theirs {
                problems.push(format!("{what}: the guest of the checkpoint has {theirs}, the definition says {ours}"));
            }
        };
        same("memory in bytes", &hardware.ram.bytes, &theirs.ram.bytes);
        same("vcpus", &hardware.vcpus, &theirs.vcpus);
        same("devices.vga", &hardware.vga, &theirs.vga);
        same("devices.agent", &hardware.agent, &theirs.agent);
        same("devices.rng", &hardware.rng, &theirs.rng);
        // Another ID is what tells the guest that it was set back; the device must be there or not, as it knows it.
        same("devices.vmgenid", &hardware.vm_generation.is_some(), &theirs.vm_generation.is_some());
        same("qemu_args", &hardware.extra, &theirs.extra);
        let disks = |hardware: &Hardware| {
            let disk = |disk: &rekindle_qemu::command::Disk| {
                (disk.id.clone(), disk.readonly, disk.cache.clone(), disk.serial.clone(), disk.server)
            };
            hardware.disks.iter().map(disk).collect::<Vec<_>>()
        };
        same("disks (id, read-only, cache, serial, server)", &disks(hardware), &disks(theirs));
        let nets =
            |hardware: &Hardware| hardware.nets.iter().map(|net| (net.id.clone(), net.mac.clone())).collect::<Vec<_>>();
        same("nets (id, MAC address)", &nets(hardware), &nets(theirs));
        let kinds = theirs.nets.iter().map(|net| match net.backend {
            NetBackend::User(_) => Kind::User,
            NetBackend::Tap(_) => Kind::Tap,
        });
        problems.extend(unfit_networks(&hardware.nets, kinds));
        if hardware.accel != theirs.accel {
            // Registers are the same; what differs is speed, and which CPU features there can be at all.
            tracing::warn!("the guest ran under {}, and will run under {}", theirs.accel, hardware.accel);
        }
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }

    /// The hardware is the recipe's; this host says where its RAM is, how guest code is run, and what its cards are connected to.
    fn fit_foreign(&self, hardware: &mut Hardware, given: bool) -> Result<(), Vec<String>> {
        let mut problems = Vec::new();
        let theirs = &self.hardware;
        let networks = theirs.foreign.as_ref().map(|foreign| foreign.networks.as_slice()).unwrap_or_default();
        let mut nets = theirs.nets.clone();
        if given && hardware.nets.len() != nets.len() {
            let (have, want) = (hardware.nets.len(), nets.len());
            problems.push(format!("[[net]]: the guest of the checkpoint has {want}, the definition says {have}"));
        } else if given {
            for (net, here) in nets.iter_mut().zip(&hardware.nets) {
                net.backend.clone_from(&here.backend);
            }
        }
        let kinds = networks.iter().map(|network| match network {
            network if network.kind == "user" => Kind::User,
            network if network.needs_tap => Kind::Tap,
            _ => Kind::Any,
        });
        problems.extend(unfit_networks(&nets, kinds));
        if hardware.accel != theirs.accel {
            let (have, want) = (&hardware.accel, &theirs.accel);
            problems.push(format!("the guest ran under {want}, and has devices of it; here it would run under {have}"));
        }
        let generation = match theirs.vm_generation {
            // Another ID is what tells the guest that it was set back.
            Some(_) => hardware.vm_generation.map_or_else(new_generation, Ok).map(Some),
            None => Ok(None),
        };
        let generation = generation.map_err(|problem| vec![problem])?;
        let ram = Ram { path: hardware.ram.path.clone(), ..theirs.ram.clone() };
        *hardware = Hardware { name: hardware.name.clone(), ram, nets, vm_generation: generation, ..theirs.clone() };
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }

    /// Whether the guest can write a disk whose content does not belong to the checkpoint.
    #[must_use]
    pub fn writes_disks(&self) -> bool {
        self.hardware.disks.iter().any(|disk| !disk.readonly)
    }

    /// Whether its host's connections are of a kind that any host has.
    #[must_use]
    pub fn only_user_networks(&self) -> bool {
        self.hardware.nets.iter().all(|net| matches!(net.backend, NetBackend::User(_)))
    }
}

/// What a card must be connected to again.
enum Kind {
    /// A user network: it is part of the device state, which QEMU cannot load into another kind.
    User,
    /// A tap: card and guest have agreed on what only a tap can do.
    Tap,
    Any,
}

/// `wanted`: for each card, in order.
fn unfit_networks(here: &[Net], wanted: impl Iterator<Item = Kind>) -> Vec<String> {
    let unfit = here.iter().zip(wanted).filter_map(|(net, wanted)| {
        let (why, kind) = match (wanted, &net.backend) {
            (Kind::User, NetBackend::Tap(_)) => {
                ("it is a user network, whose connections are in the checkpoint", "user")
            }
            (Kind::Tap, NetBackend::User(_)) => ("its virtio card was on a tap and needs one again", "tap"),
            _ => return None,
        };
        Some(format!(
            "network {}: {why}: restore with --definition FILE whose [[net]]s, in the order of the guest's cards, say \
             kind = \"{kind}\" there",
            net.id
        ))
    });
    unfit.collect()
}
