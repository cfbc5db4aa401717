//! Decides how to protect a guest, from its devices and disks.

use super::{CheckpointError, GREETING};
use crate::policy::Policy;
use crate::protector::{Disks, Failure, ProtectError};
use crate::target::Target;
use rekindle_qemu::adopt::{Adopted, Obstacle};
use rekindle_qemu::command::Disk;
use rekindle_qemu::foreign::{self, MachineFacts};
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_vm::disks;
use serde_json::Value;

/// The way in which a guest is protected.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) policy: Policy,
    pub(super) hook: Option<String>,
    pub(super) control: Qmp,
    /// The guest has a device through which it returns memory.
    pub(super) gives_back: bool,
    /// The devices and disks of an attached guest, as its QEMU's command line lists them.
    pub(super) foreign: Option<(Box<Adopted>, MachineFacts)>,
}

impl Plan {
    /// Inspects the guest. Rejects a guest that cannot be protected.
    pub(crate) fn of(target: &Target, wanted: Option<Policy>, disks: &Disks) -> Result<Self, Failure> {
        let name = || target.name().to_owned();
        let found = target.vmm().adopt(GREETING);
        let (adopted, mut control) = found.map_err(CheckpointError::from)?;
        // Rekindle's disk servers also write the guest's memory, but report their writes.
        let served: Vec<_> = disks::served(&target.state().hardware).collect();
        let obstacles: Vec<_> =
            adopted.obstacles.iter().filter(|obstacle| !is_served(obstacle, &served)).cloned().collect();
        if !obstacles.is_empty() {
            return Err(ProtectError::Obstacles { name: name(), obstacles }.into());
        }
        let mut foreign = None;
        if target.state().attached.is_some() {
            // The guest's devices may have changed since it was attached.
            let found = foreign::describe(&adopted, &mut control).map_err(CheckpointError::from)?;
            if let Err(obstacles) = found {
                return Err(ProtectError::Obstacles { name: name(), obstacles }.into());
            }
            let facts = foreign::read_facts(&adopted, &mut control).map_err(CheckpointError::from)?;
            foreign = Some((Box::new(adopted.clone()), facts));
        }
        let images = images(&mut control).map_err(CheckpointError::from)?;
        let hook = match disks {
            Disks::Refuse => {
                // `images` does not include disks on a disk server, which have epochs.
                if let Some(disk) = images.iter().find(|image| image.writable) {
                    return Err(ProtectError::Disk { name: name(), disk: disk.file.clone() }.into());
                }
                None
            }
            Disks::CrashConsistent => None,
            Disks::Hook(command) => Some(command.clone()),
        };
        let direct = images.iter().find(|image| image.direct);
        let policy = match (wanted, direct) {
            (Some(Policy::Precopy), Some(disk)) => {
                return Err(ProtectError::Direct { name: name(), disk: disk.file.clone() }.into());
            }
            (Some(Policy::Cow), _) if !served.is_empty() => {
                let disk = served.first().map_or_else(String::new, |disk| disk.id.clone());
                return Err(ProtectError::DiskServer { name: name(), disk }.into());
            }
            (Some(policy), _) => policy,
            // A disk server does not wait for a page to be copied.
            (None, Some(_)) if !served.is_empty() => Policy::Basic,
            (None, Some(_)) => Policy::Cow,
            (None, None) => Policy::Precopy,
        };
        Ok(Self { policy, hook, control, gives_back: adopted.gives_back, foreign })
    }
}

/// Returns whether the obstacle is the device of a disk on a disk server.
fn is_served(obstacle: &Obstacle, served: &[&Disk]) -> bool {
    served.iter().any(|disk| {
        let at = format!("(/machine/peripheral/{}", disk.id);
        obstacle.what.strip_prefix("vhost-user-blk").and_then(|rest| rest.split_once(&at)).is_some_and(
            |(kind, rest)| ["", "-pci"].contains(&kind.trim_end()) && (rest == ")" || rest == "/virtio-backend)"),
        )
    })
}

/// A disk image that QEMU has open for its guest.
struct OpenImage {
    file: String,
    writable: bool,
    /// The image is open with `O_DIRECT`: the kernel reads it into guest memory past QEMU's page tables.
    direct: bool,
}

fn images(qmp: &mut Qmp) -> Result<Vec<OpenImage>, QmpError> {
    let devices: Vec<Value> = qmp.execute("query-block", ())?;
    let image = |device: &Value| {
        let inserted = device.get("inserted")?;
        Some(OpenImage {
            file: inserted.get("file").and_then(Value::as_str).unwrap_or("a disk").to_owned(),
            writable: inserted.get("ro").and_then(Value::as_bool) != Some(true),
            direct: inserted.pointer("/cache/direct").and_then(Value::as_bool) != Some(false),
        })
    };
    Ok(devices.iter().filter_map(image).collect())
}
