//! Rebooting the system of a guest.
//!
//! | how | what the guest has in its memory afterwards |
//! |---|---|
//! | [`How::Cold`] | nothing |
//! | [`How::WarmCache`] | nothing; but what it had cached of a disk is given to it from there, block by block, if that is what is on the disk |
//!
//! Either way it is shut down and booted in a QEMU of its own; `docs/disk.md` has the argument for the second.

pub mod watch;

use crate::vmm::{self, Failure, Problem, Report};
use rekindle_memory::directory::huge_page_size;
use rekindle_qemu::command::Hardware;
use rekindle_vm::disks::Kept;
use rekindle_vm::host::Host;
use rekindle_vm::journal::Kind;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// How a guest's system is rebooted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// Shut down and booted.
    Cold,
    /// The same, and its disks' servers keep what it had cached (CacheMind, section 3).
    WarmCache,
}

/// The way that keeps most of VM `name`, as far as it can be told.
#[must_use]
pub fn usual(host: &Host, name: &str) -> How {
    match State::read(&RunDir::new(&host.root, name)) {
        Ok(Some(state)) if no_cache(&state.hardware).is_none() => How::WarmCache,
        _ => How::Cold,
    }
}

/// What a reboot did.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Rebooted {
    /// Of the guest's downtime: from the end of its former QEMU to the first instruction of its firmware.
    #[serde(flatten)]
    pub report: Report,
    /// What of the former guest's memory is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept: Option<Kept>,
}

/// Reboot the system of VM `name`.
///
/// *Needs:* the VM runs; nothing else is at work on it; for [`How::WarmCache`] a disk with a server.
/// *On success:* the guest boots.
/// *On failure:* as [`Failure::left`] says.
///
/// # Errors
/// [`Failure`].
pub fn reboot(host: &Host, name: &str, how: How) -> Result<Rebooted, Failure> {
    reboot_unless(host, name, how, |_| None)
}

/// The same, unless `against` finds something that speaks against it once nobody else is at work on the VM.
fn reboot_unless(
    host: &Host,
    name: &str,
    how: How,
    against: impl FnOnce(&State) -> Option<Problem>,
) -> Result<Rebooted, Failure> {
    let (operation, kind) = match how {
        How::Cold => ("reboot os --how cold", Kind::OsCold),
        How::WarmCache => ("reboot os --how warm-cache", Kind::OsWarmCache),
    };
    let against =
        |state: &State| against(state).or_else(|| (how == How::WarmCache).then(|| no_cache(&state.hardware)).flatten());
    vmm::boot_again(host, name, (operation, kind), against)
        .map(|again| Rebooted { report: again.report, kept: again.kept })
}

/// Why nothing could be kept.
fn no_cache(hardware: &Hardware) -> Option<Problem> {
    if !hardware.disks.iter().any(|disk| disk.server) {
        let why = "no disk of it has a server, which knows what the guest has cached; define one with `server = true` and start the \
                   VM again, or use --how cold";
        return Some(Problem(why.into()));
    }
    let directory = hardware.ram.path.parent().unwrap_or(Path::new("/"));
    matches!(huge_page_size(directory), Ok(Some(_))).then(|| {
        let directory = directory.display();
        Problem(format!(
            "its RAM is in huge pages ({directory}), which are the next guest's as soon as it starts; put `ram.dir` on a tmpfs, or \
             use --how cold"
        ))
    })
}
