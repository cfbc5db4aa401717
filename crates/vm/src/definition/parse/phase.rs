//! The `[phase]` section.

use super::super::document::Section;
use super::super::names::check_id;
use super::super::{Disk, DiskFormat, Phase};
use super::Taken;

/// Limit of phases: each candidate takes space on a disk.
const MOST: usize = 8;

/// Reads the section. `agent` means that the VM has a port for the guest agent.
pub(super) fn read(top: &Section<'_>, disks: &[Disk], agent: bool) -> Phase {
    let section = top.section("phase");
    if top.at("phase").is_none() {
        return Phase::default();
    }
    if section.is_missing("save") {
        section.missing("save", "name the phases that the guest announces, the earliest first, for example save = [\"kernel\", \"services\"]");
    }
    let names = section.texts("save");
    let mut taken = Taken::new("give each phase its own name");
    for name in &names {
        if let Err(why) = check_id(name.value) {
            section.invalid("save", format!("{:?}", name.value), name.at, why);
        }
        taken.claim(&section, "save", name.value.to_owned(), name.at);
    }
    if let Some(name) = names.get(MOST) {
        section.invalid("save", format!("{:?}", name.value), name.at, format!("one too many; leave {MOST}"));
    }
    let healthy = section.text("healthy");
    if let Some(healthy) = healthy {
        if !names.iter().any(|name| name.value == healthy.value) {
            let why = "not one of the phases under `phase.save`; name it there, too";
            section.invalid("healthy", format!("{:?}", healthy.value), healthy.at, why);
        }
        if top.is_missing("probe") && !agent {
            let why = "nothing shows when it is healthy; write probe = \"http://HOST/\" at the top, or leave out `agent = false`";
            section.invalid("healthy", format!("{:?}", healthy.value), healthy.at, why);
        }
    }
    for disk in disks.iter().filter(|disk| !is_watched(disk)) {
        let id = &disk.id;
        section.document().conflict(
            section.at,
            format!(
                "[phase] needs to know what is written to disk `{id}`; let Rekindle serve it (a raw image, without \
                 `server = false`), make it a raw image that is `readonly`, or leave [phase] out"
            ),
        );
    }
    Phase {
        save: names.into_iter().map(|name| name.value.to_owned()).collect(),
        healthy: healthy.map(|healthy| healthy.value.to_owned()),
    }
}

/// Returns whether a change of the disk is detected: its server records writes, or it is a file that is only read.
fn is_watched(disk: &Disk) -> bool {
    disk.server || (disk.readonly && disk.format == DiskFormat::Raw)
}
