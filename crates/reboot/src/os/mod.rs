//! Rebooting the operating system of a guest.
//!
//! | how | what the guest has in its memory afterwards |
//! |---|---|
//! | [`OsRebootMethod::Cold`] | nothing |
//! | [`OsRebootMethod::WarmCache`] | nothing; but cached disk blocks are served from memory if they match the disk |
//! | [`OsRebootMethod::Kexec`] | nothing; its kernel has started another one, without firmware and boot loader |
//! | [`OsRebootMethod::Phase`] | its state at a phase of an earlier boot |
//!
//! The first two methods shut the guest down and boot it in a new QEMU. `docs/disk.md` has the argument for a warm
//! cache, `docs/os-reboot.md` for kexec and phases.

mod helper_process;
mod kexec;
pub mod phase;
mod supervisor;
pub mod watch;

pub use helper_process::HelperError;
pub(crate) use kexec::{KexecRecovery, recover as recover_kexec};
pub use kexec::{KexecRequest, LoadedKernel};

use crate::error::{Failure, Problem};
use crate::vmm::{self, ColdReboot, RebootReport};
use rekindle_life::shutdown::{EndMethod, Ended};
use rekindle_memory::directory::huge_page_size;
use rekindle_qemu::agent;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::guest::run_state;
use rekindle_vm::causes::with_causes;
use rekindle_vm::disks::RetainedCache;
use rekindle_vm::host::Host;
use rekindle_vm::journal::Kind;
use rekindle_vm::qemu::ENDED_RUN_STATES;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::Duration;

/// How long QEMU or an agent may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Method by which a guest's operating system is rebooted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OsRebootMethod {
    /// The guest is shut down and booted.
    Cold,
    /// The guest is shut down and booted, while its disk servers retain the blocks that it had cached (CacheMind,
    /// section 3).
    WarmCache,
    /// The guest's kernel starts another kernel by kexec.
    Kexec,
    /// The guest is shut down; the next guest continues from a phase of an earlier boot.
    Phase,
}

/// Returns the default method of VM `name`: with a warm cache if its disks have a server, otherwise cold.
#[must_use]
pub fn default_method(host: &Host, name: &str) -> OsRebootMethod {
    match State::read(&RunDir::new(&host.root, name)) {
        Ok(Some(state)) if why_no_warm_cache(&state.hardware).is_none() => OsRebootMethod::WarmCache,
        _ => OsRebootMethod::Cold,
    }
}

/// Result of [`reboot`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct OsRebootReport {
    /// Guest-stopped time lasts from the end of the previous QEMU to the first instruction of the firmware; by kexec,
    /// from the request to the answer of the new system's agent.
    #[serde(flatten)]
    pub report: RebootReport,
    /// Content of the retained cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept: Option<RetainedCache>,
    /// How the previous guest ended. `None` by kexec.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<Ended>,
    /// The kernel that was started by kexec.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kexec: Option<LoadedKernel>,
    /// The boot snapshot from which the guest continues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<phase::PhaseOutcome>,
}

/// Request to [`reboot`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OsRebootRequest {
    pub how: OsRebootMethod,
    pub kexec: KexecRequest,
    /// The only phase from which [`OsRebootMethod::Phase`] may continue. `None`: the latest usable phase.
    pub candidate: Option<String>,
    /// How the previous guest is ended. With kexec it always shuts itself down.
    pub end: EndMethod,
}

/// Reboots the operating system of VM `name`.
///
/// *Needs:* the VM runs; no other operation holds it; for [`OsRebootMethod::WarmCache`] a disk with a server; for
/// [`OsRebootMethod::Kexec`] an agent that may run programs, and kexec-tools in the guest.
/// *On success:* the guest boots; by kexec its agent answers again.
/// *On failure:* [`Failure::guest`] states whether the guest runs.
pub fn reboot(host: &Host, name: &str, request: &OsRebootRequest) -> Result<OsRebootReport, Failure> {
    let freeze = |state: &State| why_not_freezable(state, request.end);
    match request.how {
        OsRebootMethod::Cold => shut_down_and_boot(host, name, CacheUse::Discard, request.end, freeze),
        OsRebootMethod::WarmCache => shut_down_and_boot(host, name, CacheUse::Retain, request.end, freeze),
        OsRebootMethod::Kexec => kexec::reboot(host, name, &request.kexec),
        OsRebootMethod::Phase => phase::reboot(host, name, request.candidate.as_deref(), request.end, freeze),
    }
}

/// Checks that [`reboot`] is possible. Changes nothing. Checks inside the guest, as for kexec, are not made.
///
/// # Errors
/// [`Failure`] with the reason. The guest is unchanged.
pub fn check(host: &Host, name: &str, request: &OsRebootRequest) -> Result<(), Failure> {
    let operation = "reboot --dry-run";
    let freeze = |state: &State| why_not_freezable(state, request.end);
    match request.how {
        OsRebootMethod::Cold => vmm::begin_cold_reboot(host, name, operation, freeze).map(drop),
        OsRebootMethod::WarmCache => {
            let find_problem = |state: &State| freeze(state).or_else(|| why_no_warm_cache(&state.hardware));
            vmm::begin_cold_reboot(host, name, operation, find_problem).map(drop)
        }
        OsRebootMethod::Kexec => kexec::check(host, name, operation),
        OsRebootMethod::Phase => {
            let rundir = RunDir::new(&host.root, name);
            let candidate = request.candidate.as_deref();
            let find_problem =
                |state: &State| freeze(state).or_else(|| phase::find_problem(host, &rundir, state, candidate));
            vmm::begin_cold_reboot(host, name, operation, find_problem).map(drop)
        }
    }
}

/// What happens to the previous guest's cache in a reboot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CacheUse {
    Retain,
    Discard,
}

/// Ends the guest and boots it, with a warm or a cold cache. If `find_problem` returns a problem for the locked VM,
/// fails and changes nothing.
fn shut_down_and_boot(
    host: &Host,
    name: &str,
    cache: CacheUse,
    end: EndMethod,
    find_problem: impl FnOnce(&State) -> Option<Problem>,
) -> Result<OsRebootReport, Failure> {
    let (operation, kind) = match cache {
        CacheUse::Discard => ("reboot --how cold", Kind::OsCold),
        CacheUse::Retain => ("reboot --how warm-cache", Kind::OsWarmCache),
    };
    let find_problem = |state: &State| match (find_problem(state), cache) {
        (None, CacheUse::Retain) => why_no_warm_cache(&state.hardware),
        (problem, _) => problem,
    };
    let ColdReboot { report, retained, ended } =
        vmm::cold::reboot(vmm::begin_cold_reboot(host, name, operation, find_problem)?, kind, end)?;
    Ok(OsRebootReport { report, kept: retained, ended: Some(ended), kexec: None, phase: None })
}

/// Returns the reason why no cache can be retained, or `None` if it can.
fn why_no_warm_cache(hardware: &Hardware) -> Option<Problem> {
    if !hardware.disks.iter().any(|disk| disk.server) {
        let why = "none of its disks has a server, which records what the guest has cached; set `server = true` for a \
                   disk and restart the VM, or use --how cold";
        return Some(Problem(why.into()));
    }
    huge_page_directory(hardware).map(|directory| {
        let directory = directory.display();
        Problem(format!(
            "its RAM is in huge pages ({directory}), which the next guest needs as soon as it starts; put `ram.dir` \
             on a tmpfs, or use --how cold"
        ))
    })
}

/// Returns the directory of the guest's RAM if the RAM is in huge pages.
fn huge_page_directory(hardware: &Hardware) -> Option<&Path> {
    let directory = hardware.ram.path.parent().unwrap_or(Path::new("/"));
    matches!(huge_page_size(directory), Ok(Some(_))).then_some(directory)
}

/// Returns the reason why the guest's file systems cannot be frozen, if `end` requires that. A guest that has already
/// ended needs no freezing.
fn why_not_freezable(state: &State, end: EndMethod) -> Option<Problem> {
    let vmm = state.vmm.as_ref().filter(|_| end == EndMethod::Freeze)?;
    let problem = |why: &str| Some(Problem(format!("{why}; or omit --end freeze")));
    if !state.hardware.agent {
        return problem(
            "it has no port for the agent that would freeze its file systems; remove agent = false under [devices] \
             and restart the VM",
        );
    }
    let run_state = vmm.connect(ANSWER_TIMEOUT).ok().and_then(|mut qmp| run_state(&mut qmp).ok());
    if run_state.is_some_and(|run_state| ENDED_RUN_STATES.contains(&run_state.as_str())) {
        return None;
    }
    let error = agent::can_freeze(&vmm.directory().agent(), ANSWER_TIMEOUT).err()?;
    problem(&with_causes(&error))
}
