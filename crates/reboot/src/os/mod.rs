//! Rebooting the system of a guest.
//!
//! | how | what the guest has in its memory afterwards |
//! |---|---|
//! | [`How::Cold`] | nothing |
//! | [`How::WarmCache`] | nothing; but what it had cached of a disk is given to it from there, block by block, if that is what is on the disk |
//! | [`How::Kexec`] | nothing; its own kernel has started another one, without firmware and boot loader |
//! | [`How::Phase`] | what it had at a phase of an earlier boot |
//!
//! The first two shut it down and boot it in a QEMU of its own; `docs/disk.md` has the argument for the second, `docs/os-reboot.md` the
//! others.

mod helpers;
mod kexec;
pub mod phase;
pub mod watch;

pub(crate) use kexec::recover as recover_kexec;
pub use kexec::{Loaded, Wanted};

use crate::vmm::{self, Failure, Problem, Report};
use rekindle_memory::directory::huge_page_size;
use rekindle_qemu::agent;
use rekindle_qemu::command::Hardware;
use rekindle_vm::disks::Kept;
use rekindle_vm::host::Host;
use rekindle_vm::journal::Kind;
use rekindle_vm::life::{End, Ended, SHUT_DOWN, run_state};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::Duration;

/// How long QEMU, or an agent, may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// How a guest's system is rebooted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// Shut down and booted.
    Cold,
    /// The same, and its disks' servers keep what it had cached (CacheMind, section 3).
    WarmCache,
    /// Its kernel starts another one.
    Kexec,
    /// Shut down; the next one goes on from a phase of an earlier boot.
    Phase,
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
    /// Of the guest's downtime: from the end of its former QEMU to the first instruction of its firmware. By kexec: from the request to
    /// the answer of the new system's agent.
    #[serde(flatten)]
    pub report: Report,
    /// What of the former guest's memory is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept: Option<Kept>,
    /// How the former guest was brought to its end, if not by kexec.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<Ended>,
    /// The kernel that was started by kexec.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kexec: Option<Loaded>,
    /// What it goes on from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<phase::Outcome>,
}

/// What is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// How.
    pub how: How,
    /// What [`How::Kexec`] is to load.
    pub kexec: Wanted,
    /// The phase that [`How::Phase`] is to go on from, and no other; none: the latest that may be used.
    pub candidate: Option<String>,
    /// How the former guest is brought to its end; by kexec it always shuts itself down.
    pub end: End,
}

/// Reboot the system of VM `name`.
///
/// *Needs:* the VM runs; nothing else is at work on it; for [`How::WarmCache`] a disk with a server; for [`How::Kexec`] an agent that may
/// run programs, and kexec-tools in the guest.
/// *On success:* the guest boots; by kexec its agent answers again.
/// *On failure:* as [`Failure::left`] says.
///
/// # Errors
/// [`Failure`].
pub fn reboot(host: &Host, name: &str, request: &Request) -> Result<Rebooted, Failure> {
    match request.how {
        How::Cold => boot_unless(host, name, false, request.end, |state| no_freeze(state, request.end)),
        How::WarmCache => boot_unless(host, name, true, request.end, |state| no_freeze(state, request.end)),
        How::Kexec => kexec::reboot(host, name, &request.kexec),
        How::Phase => {
            phase::reboot(host, name, request.candidate.as_deref(), request.end, |state| no_freeze(state, request.end))
        }
    }
}

/// Looks at whether [`reboot`] could be done. Nothing is changed: what a guest's own system would refuse is not known then.
///
/// # Errors
/// [`Failure`], with the guest as it was.
pub fn check(host: &Host, name: &str, request: &Request) -> Result<(), Failure> {
    let operation = "reboot os --dry-run";
    let freeze = |state: &State| no_freeze(state, request.end);
    match request.how {
        How::Cold => vmm::begin_again(host, name, operation, freeze).map(drop),
        How::WarmCache => {
            let against = |state: &State| freeze(state).or_else(|| no_cache(&state.hardware));
            vmm::begin_again(host, name, operation, against).map(drop)
        }
        How::Kexec => kexec::check(host, name, operation),
        How::Phase => {
            let rundir = RunDir::new(&host.root, name);
            let only = request.candidate.as_deref();
            let against = |state: &State| freeze(state).or_else(|| phase::against(host, &rundir, state, only));
            vmm::begin_again(host, name, operation, against).map(drop)
        }
    }
}

/// Bring it to its end and boot it, with a warm cache or a cold one, unless `against` finds something that speaks against it once nobody else
/// is at work on the VM.
fn boot_unless(
    host: &Host,
    name: &str,
    warm: bool,
    end: End,
    against: impl FnOnce(&State) -> Option<Problem>,
) -> Result<Rebooted, Failure> {
    let (operation, kind) = match warm {
        false => ("reboot os --how cold", Kind::OsCold),
        true => ("reboot os --how warm-cache", Kind::OsWarmCache),
    };
    let against = |state: &State| against(state).or_else(|| warm.then(|| no_cache(&state.hardware)).flatten());
    vmm::boot_again(host, name, (operation, kind), end, against).map(|again| Rebooted {
        report: again.report,
        kept: again.kept,
        ended: Some(again.ended),
        kexec: None,
        phase: None,
    })
}

/// Why nothing could be kept.
fn no_cache(hardware: &Hardware) -> Option<Problem> {
    if !hardware.disks.iter().any(|disk| disk.server) {
        let why = "no disk of it has a server, which knows what the guest has cached; define one with `server = true` and start the \
                   VM again, or use --how cold";
        return Some(Problem(why.into()));
    }
    huge_pages(hardware).map(|directory| {
        let directory = directory.display();
        Problem(format!(
            "its RAM is in huge pages ({directory}), which are the next guest's as soon as it starts; put `ram.dir` on a tmpfs, or \
             use --how cold"
        ))
    })
}

/// The directory of its RAM, if that is in huge pages.
fn huge_pages(hardware: &Hardware) -> Option<&Path> {
    let directory = hardware.ram.path.parent().unwrap_or(Path::new("/"));
    matches!(huge_page_size(directory), Ok(Some(_))).then_some(directory)
}

/// Why its file systems could not be frozen, if that is wanted. One that has come to its end by itself needs no freezing.
fn no_freeze(state: &State, end: End) -> Option<Problem> {
    let vmm = state.vmm.as_ref().filter(|_| end == End::Freeze)?;
    let otherwise = |why: String| Some(Problem(format!("{why}; or leave --end freeze out")));
    if !state.hardware.agent {
        return otherwise("it has no port for an agent, which would freeze its file systems; leave out agent = false under [devices] and start it again".into());
    }
    let ended = vmm.connect(ANSWER).ok().and_then(|mut qmp| run_state(&mut qmp).ok());
    if ended.is_some_and(|state| SHUT_DOWN.contains(&state.as_str())) {
        return None;
    }
    let e = agent::can_freeze(&vmm.directory().agent(), ANSWER).err()?;
    let cause = std::error::Error::source(&e).map(|cause| format!(" ({cause})")).unwrap_or_default();
    otherwise(format!("{e}{cause}"))
}
