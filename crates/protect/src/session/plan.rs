//! How a guest is to be protected: what it has decides what can be done.

use super::{GREETING, SessionError};
use crate::policy::Policy;
use crate::protector::{Disks, Failure, ProtectError};
use crate::target::Target;
use rekindle_qemu::adopt::{Adopted, Obstacle};
use rekindle_qemu::command::Disk;
use rekindle_qemu::foreign::{self, Facts};
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_vm::disks;
use serde_json::Value;

/// How a guest is to be protected, after it was looked at.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) policy: Policy,
    pub(super) hook: Option<String>,
    pub(super) control: Qmp,
    /// The guest has a device through which it gives memory back.
    pub(super) gives_back: bool,
    /// Its devices and disks, which its command line says.
    pub(super) foreign: Option<(Box<Adopted>, Facts)>,
}

impl Plan {
    /// Look at the guest.
    pub(crate) fn of(target: &Target, wanted: Option<Policy>, disks: &Disks) -> Result<Self, Failure> {
        let name = || target.name().to_owned();
        let found = target.vmm().adopt(GREETING);
        let (adopted, mut control) = found.map_err(SessionError::from)?;
        // Rekindle's own servers write the guest's memory too, and tell what they have written.
        let served: Vec<_> = disks::served(&target.state().hardware).collect();
        let obstacles: Vec<_> = adopted.obstacles.iter().filter(|one| !is_served(one, &served)).cloned().collect();
        if !obstacles.is_empty() {
            return Err(ProtectError::Obstacles { name: name(), obstacles }.into());
        }
        let mut foreign = None;
        if target.state().attached.is_some() {
            // It may have been changed since it was attached to.
            let found = foreign::of(&adopted, &mut control).map_err(SessionError::from)?;
            if let Err(obstacles) = found {
                return Err(ProtectError::Obstacles { name: name(), obstacles }.into());
            }
            let facts = foreign::facts(&adopted, &mut control).map_err(SessionError::from)?;
            foreign = Some((Box::new(adopted.clone()), facts));
        }
        let images = images(&mut control).map_err(SessionError::from)?;
        let hook = match disks {
            Disks::Refuse => {
                // Those that a server has are none of them, and have epochs.
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
                return Err(ProtectError::Served { name: name(), disk }.into());
            }
            (Some(policy), _) => policy,
            // What a server writes waits for nobody.
            (None, Some(_)) if !served.is_empty() => Policy::Basic,
            (None, Some(_)) => Policy::Cow,
            (None, None) => Policy::Precopy,
        };
        Ok(Self { policy, hook, control, gives_back: adopted.gives_back, foreign })
    }
}

/// Whether it is the device of a disk that a server of Rekindle's has.
fn is_served(obstacle: &Obstacle, served: &[&Disk]) -> bool {
    served.iter().any(|disk| {
        let at = format!("(/machine/peripheral/{}", disk.id);
        obstacle.what.strip_prefix("vhost-user-blk").and_then(|rest| rest.split_once(&at)).is_some_and(
            |(kind, rest)| ["", "-pci"].contains(&kind.trim_end()) && (rest == ")" || rest == "/virtio-backend)"),
        )
    })
}

/// A disk image that QEMU has open for its guest.
struct Image {
    file: String,
    writable: bool,
    /// Opened with `O_DIRECT`: the kernel reads it into guest memory past QEMU's page tables.
    direct: bool,
}

fn images(qmp: &mut Qmp) -> Result<Vec<Image>, QmpError> {
    let devices: Vec<Value> = qmp.execute("query-block", ())?;
    let image = |device: &Value| {
        let inserted = device.get("inserted")?;
        Some(Image {
            file: inserted.get("file").and_then(Value::as_str).unwrap_or("a disk").to_owned(),
            writable: inserted.get("ro").and_then(Value::as_bool) != Some(true),
            direct: inserted.pointer("/cache/direct").and_then(Value::as_bool) != Some(false),
        })
    };
    Ok(devices.iter().filter_map(image).collect())
}
