//! The `[phase]` section.

use super::super::document::Section;
use super::super::names::check_id;
use super::super::{Disk, DiskFormat, Phase};
use super::UniqueValues;

/// Each candidate takes space on a disk.
const MAX_PHASES: usize = 8;

/// Reads the section. `agent` means that the VM has a port for the guest agent.
pub(super) fn read(top: &Section<'_>, disks: &[Disk], agent: bool) -> Phase {
    let section = top.section("phase");
    if !top.has("phase") {
        return Phase::default();
    }
    if section.is_missing("save") {
        section.record_missing("save", "name the phases that the guest announces, the earliest first, for example save = [\"kernel\", \"services\"]");
    }
    let names = section.texts("save");
    let mut unique_names = UniqueValues::new("give each phase its own name");
    for name in &names {
        if let Err(why) = check_id(name.text) {
            section.reject_item("save", name, why);
        }
        unique_names.claim_at(&section, "save", name.text, name.offset);
    }
    if let Some(name) = names.get(MAX_PHASES) {
        section.reject_item("save", name, format!("one too many; leave {MAX_PHASES}"));
    }
    let healthy = section.text("healthy");
    if let Some(healthy) = healthy {
        if !names.iter().any(|name| name.text == healthy) {
            section.reject("healthy", "not one of the phases under `phase.save`; name it there, too");
        }
        if top.is_missing("probe") && !agent {
            let why = "nothing shows when it is healthy; write probe = \"http://HOST/\" at the top, or leave out `agent = false`";
            section.reject("healthy", why);
        }
    }
    for disk in disks.iter().filter(|disk| !detects_changes(disk)) {
        let id = &disk.id;
        section.conflict_of_section(format!(
            "[phase] needs to know what is written to disk `{id}`; let Rekindle serve it (a raw image, without \
             `server = false`), make it a raw image that is `readonly`, or leave [phase] out"
        ));
    }
    Phase { save: names.into_iter().map(|name| name.text.to_owned()).collect(), healthy: healthy.map(str::to_owned) }
}

/// Returns whether a change of the disk is detected: its server records writes, or it is a file that is only read.
fn detects_changes(disk: &Disk) -> bool {
    disk.server || (disk.readonly && disk.format == DiskFormat::Raw)
}
