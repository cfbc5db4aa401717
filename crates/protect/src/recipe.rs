//! The recipe of a checkpoint: how to rebuild its VM.
//!
//! | format | contents |
//! |---|---|
//! | 1 | a VM that Rekindle has started: its definition and its hardware |
//! | 2 | an attached VM: the command line of its QEMU, rewritten on attach ([`rekindle_qemu::foreign`]) |
//! | 3 | format 1, and the number of ports of the agent's bus |
//! | 4 | format 3, and disks on Rekindle's disk servers, whose epochs are in the checkpoint's metadata |
//! | 5 | format 4, and redo logs outside the images' directories |
//! | 6 | format 5, and the port through which a guest announces phases |
//! | 7 | format 2, and disks on overlays, which are in the checkpoint's metadata |
//! | 8 | format 7, and numbered copies of overlays |
//! | 9 | formats 6 and 8, and network cards with several queues, or that the host's kernel serves (vhost-net) |

pub(crate) mod permission;

use rekindle_qemu::command::{Disk, ForeignNetwork, Hardware, Net, NetBackend, Ram};
use rekindle_vm::definition::{Definition, Name};
use rekindle_vm::hardware::new_generation;
use rekindle_vm::state::format_of;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The newest format that this version of Rekindle reads. It writes the oldest format that suffices, so that older
/// versions can read the recipe.
pub const FORMAT: u32 = 9;
/// The oldest format with overlays.
pub const WITH_OVERLAYS: u32 = 7;
/// The oldest format with numbered copies of overlays.
pub const WITH_HEADS: u32 = 8;

/// Why a recipe cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    #[error(
        "the checkpoint describes its VM in format {found}, and this Rekindle supports formats up to {FORMAT}: use a \
         newer one"
    )]
    Newer { found: u64 },
    #[error("the checkpoint has no usable description of its VM")]
    Malformed(#[source] serde_json::Error),
    /// What the host's configuration does not allow, and how to allow it.
    #[error("this host does not allow what the checkpoint of {name} describes; nothing was started:\n{}", problems.iter().map(|what| format!("  - {what}")).collect::<Vec<_>>().join("\n"))]
    NotAllowed { name: String, problems: Vec<String> },
}

/// The description of a VM that is stored with each checkpoint. One that was read may have been written by anything that
/// can write to the store: a VM is only started from an [`AllowedRecipe`](permission::AllowedRecipe).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recipe {
    format: u32,
    /// The definition, with all defaults filled in.
    definition: Definition,
    /// The machine that the guest sees.
    hardware: Hardware,
}

impl Recipe {
    /// Returns the recipe of a VM of this host.
    pub(crate) fn new(definition: Definition, hardware: Hardware) -> Self {
        Self { format: format_of(&hardware), definition, hardware }
    }

    /// Requires readers to know this format.
    pub(crate) fn require_format(&mut self, format: u32) {
        self.format = self.format.max(format);
    }

    /// Removes the overlays that are known only to one start of a QEMU.
    pub(crate) fn clear_overlays(&mut self) {
        if let Some(machine) = &mut self.hardware.foreign {
            machine.overlays.clear();
        }
    }

    /// Returns the name of the VM.
    pub(crate) fn name(&self) -> &Name {
        &self.definition.name
    }

    /// Returns the RAM blocks that are loaded on demand.
    pub(crate) fn ram_ids(&self) -> Vec<String> {
        self.hardware.ram_ids()
    }

    /// Returns the versioned type of the machine.
    pub(crate) fn machine(&self) -> &str {
        &self.hardware.machine
    }

    /// Returns libvirt's description of the domain, if the recipe is that of a domain.
    pub(crate) fn domain_xml(&self) -> Option<&str> {
        self.hardware.foreign.as_ref()?.domain_xml.as_deref()
    }

    /// Returns the machine, for comparison with one of this host.
    pub(crate) fn into_hardware(self) -> Hardware {
        self.hardware
    }

    /// Reads the recipe of a checkpoint.
    pub fn read(value: &Value) -> Result<Self, RecipeError> {
        match value.get("format").and_then(Value::as_u64) {
            Some(found) if found > u64::from(FORMAT) => Err(RecipeError::Newer { found }),
            _ => Self::deserialize(value).map_err(RecipeError::Malformed),
        }
    }

    /// Adapts `hardware`, which this host has built from a definition, to the properties that the checkpoint's guest
    /// already knows: machine type, CPU model, UUID. The paths of files remain those of this host.
    ///
    /// # Errors
    /// One message for each property that the guest knows and `hardware` cannot have.
    ///
    /// `is_users_definition`: the user has specified the definition for this host. Otherwise it is the recipe's own.
    fn fit(&self, hardware: &mut Hardware, is_users_definition: bool) -> Result<(), Vec<String>> {
        if self.hardware.foreign.is_some() {
            return self.fit_attached(hardware, is_users_definition);
        }
        let mut problems = Vec::new();
        let theirs = &self.hardware;
        hardware.machine.clone_from(&theirs.machine);
        hardware.cpu.clone_from(&theirs.cpu);
        hardware.uuid = theirs.uuid;
        hardware.agent_ports = theirs.agent_ports;
        let mut require_same = |what: &str, ours: &dyn std::fmt::Debug, theirs: &dyn std::fmt::Debug| {
            let (ours, theirs) = (format!("{ours:?}"), format!("{theirs:?}"));
            if ours != theirs {
                problems.push(format!("{what}: the guest of the checkpoint has {theirs}, the definition has {ours}"));
            }
        };
        require_same("memory in bytes", &hardware.ram.bytes, &theirs.ram.bytes);
        require_same("vcpus", &hardware.vcpus, &theirs.vcpus);
        require_same("devices.vga", &hardware.vga, &theirs.vga);
        require_same("devices.agent", &hardware.agent, &theirs.agent);
        require_same("[phase]", &hardware.phase, &theirs.phase);
        require_same("devices.rng", &hardware.rng, &theirs.rng);
        // The ID itself must differ, so that the guest detects that it was restored. But the device must exist if and
        // only if the guest had it.
        require_same("devices.vmgenid", &hardware.vm_generation.is_some(), &theirs.vm_generation.is_some());
        require_same("qemu_args", &hardware.extra, &theirs.extra);
        let disks = |hardware: &Hardware| {
            let visible =
                |disk: &Disk| (disk.id.clone(), disk.readonly, disk.cache.clone(), disk.serial.clone(), disk.server);
            hardware.disks.iter().map(visible).collect::<Vec<_>>()
        };
        require_same("disks (id, read-only, cache, serial, server)", &disks(hardware), &disks(theirs));
        let nets = |hardware: &Hardware| {
            let visible = |net: &Net| (net.id.clone(), net.mac.clone(), queues(net));
            hardware.nets.iter().map(visible).collect::<Vec<_>>()
        };
        require_same("nets (id, MAC address, queues)", &nets(hardware), &nets(theirs));
        // The kernel offers a guest fewer features than QEMU, which the guest may already use.
        for (ours, theirs) in hardware.nets.iter().zip(&theirs.nets) {
            if has_vhost(ours) && !has_vhost(theirs) {
                problems.push(format!(
                    "network {}: QEMU served the checkpoint's card, with more features than the kernel offers; take `vhost` out",
                    ours.id
                ));
            }
        }
        let kinds = theirs.nets.iter().map(|net| match net.backend {
            NetBackend::User(_) => BackendKind::User,
            NetBackend::Tap(_) => BackendKind::Tap,
        });
        problems.extend(unfit_networks(&hardware.nets, kinds));
        if hardware.accel != theirs.accel {
            // The registers are the same. The speed differs, and the available CPU features may differ.
            tracing::warn!("the guest ran under {}, and will run under {}", theirs.accel, hardware.accel);
        }
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }

    /// Replaces `hardware` by the recipe's hardware, with this host's RAM file, accelerator and network backends.
    fn fit_attached(&self, hardware: &mut Hardware, is_users_definition: bool) -> Result<(), Vec<String>> {
        let mut problems = Vec::new();
        let theirs = &self.hardware;
        let networks = theirs.foreign.as_ref().map(|foreign| foreign.networks.as_slice()).unwrap_or_default();
        if theirs.foreign.as_ref().is_some_and(|foreign| foreign.has_tpm_emulator) {
            problems.push("its TPM: only libvirt can start the emulator; restore it with --into-libvirt".into());
        }
        let mut nets = theirs.nets.clone();
        if is_users_definition && hardware.nets.len() != nets.len() {
            let (have, want) = (hardware.nets.len(), nets.len());
            problems.push(format!("[[net]]: the guest of the checkpoint has {want}, the definition has {have}"));
        } else if is_users_definition {
            for (net, net_here) in nets.iter_mut().zip(&hardware.nets) {
                net.backend.clone_from(&net_here.backend);
            }
        }
        let kinds = networks.iter().map(|network| match network {
            network if network.kind == "user" => BackendKind::User,
            network if network.needs_tap => BackendKind::Tap,
            _ => BackendKind::Any,
        });
        problems.extend(unfit_networks(&nets, kinds));
        problems.extend(nets.iter().zip(networks).filter_map(|(net, network)| unfit_queues(net, network)));
        if hardware.accel != theirs.accel {
            let (have, want) = (&hardware.accel, &theirs.accel);
            problems.push(format!(
                "the guest ran under {want}, and has devices that need it; here it would run under {have}"
            ));
        }
        let generation = match theirs.vm_generation {
            // Uses another ID, so that the guest detects that it was restored.
            Some(_) => hardware.vm_generation.map_or_else(new_generation, Ok).map(Some),
            None => Ok(None),
        };
        let generation = generation.map_err(|problem| vec![problem])?;
        let ram = Ram { path: hardware.ram.path.clone(), ..theirs.ram.clone() };
        *hardware = Hardware { name: hardware.name.clone(), ram, nets, vm_generation: generation, ..theirs.clone() };
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }
}

/// Returns the number of queues of a card.
fn queues(net: &Net) -> u16 {
    if let NetBackend::Tap(tap) = &net.backend { tap.queues } else { 1 }
}

fn has_vhost(net: &Net) -> bool {
    matches!(&net.backend, NetBackend::Tap(tap) if tap.vhost)
}

/// Returns a message if the tap has not as many queues as the card of an attached guest: the guest finds the queue of
/// commands after all others.
fn unfit_queues(net: &Net, network: &ForeignNetwork) -> Option<String> {
    let (ours, theirs) = (queues(net), network.queues);
    (network.needs_tap && matches!(net.backend, NetBackend::Tap(_)) && ours != theirs).then(|| {
        format!(
            "network {}: the guest's card has {theirs} queues, and the tap {ours}: restore with --definition FILE whose [[net]] \
             has queues = {theirs}",
            net.id
        )
    })
}

/// The kind of backend that a network card needs.
enum BackendKind {
    /// A user network: its connections are part of the device state, which QEMU cannot load into another kind of
    /// backend.
    User,
    /// A tap: the card and the guest have negotiated features that only a tap has.
    Tap,
    Any,
}

/// Returns a message for each network whose backend is not of the wanted kind. `wanted_kinds` is in the order of the
/// cards.
fn unfit_networks(nets: &[Net], wanted_kinds: impl Iterator<Item = BackendKind>) -> Vec<String> {
    let unfit = nets.iter().zip(wanted_kinds).filter_map(|(net, wanted)| {
        let (why, kind) = match (wanted, &net.backend) {
            (BackendKind::User, NetBackend::Tap(_)) => {
                ("the card was on a user network, whose connections are in the checkpoint", "user")
            }
            (BackendKind::Tap, NetBackend::User(_)) => ("its virtio card was on a tap and needs one again", "tap"),
            _ => return None,
        };
        Some(format!(
            "network {}: {why}: restore with --definition FILE whose [[net]]s, in the order of the guest's cards, have \
             kind = \"{kind}\" for it",
            net.id
        ))
    });
    unfit.collect()
}
