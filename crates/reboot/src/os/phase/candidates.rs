//! The candidates of a VM: where they are stored, and whether they may be used. A *candidate* is a boot snapshot: the
//! state of the guest at a *phase* of an earlier boot ([`super`]).

use super::SkippedCandidate;
use rekindle_protect::candidate::{self, StoredCandidate};
use rekindle_protect::restore::RestoreError;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::file_identity::FileIdentity;
use rekindle_store::{StoreError, StoreUrl};
use rekindle_vm::causes::with_causes;
use rekindle_vm::host::Host;
use rekindle_vm::phases::{self, DiskSnapshot, PhaseError};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// A phase and its candidate, as `show` lists them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    pub name: String,
    /// When the candidate was taken, in µs since 1970. `None`: there is no candidate.
    pub taken_us: Option<u64>,
    /// Size on disk, in bytes.
    pub bytes: u64,
    /// Reason why the candidate is not usable. `None`: it is usable.
    #[serde(rename = "void")]
    pub unusable_because: Option<String>,
}

/// Conditions under which a candidate stays usable. They are stored with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CandidateInfo {
    /// Boot ID of the host. In another boot, file times may be those from before a crash.
    #[serde(rename = "host")]
    host_boot_id: String,
    /// Kernel and RAM disk that QEMU has loaded. A cold boot would load the current files.
    files: Vec<FileIdentity>,
    disks: Vec<DiskSnapshot>,
}

/// Reason why the conditions cannot be determined.
#[derive(Debug, thiserror::Error)]
pub(super) enum InfoError {
    #[error(transparent)]
    Disks(#[from] PhaseError),
    #[error("{}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl CandidateInfo {
    /// Records the current conditions. The guest of this VM must be stopped.
    pub(super) fn record(rundir: &RunDir, hardware: &Hardware) -> Result<Self, InfoError> {
        let mark =
            |path: &PathBuf| FileIdentity::of(path).map_err(|source| InfoError::File { path: path.clone(), source });
        let files = boot_files(hardware).map(mark).collect::<Result<_, _>>()?;
        Ok(Self { host_boot_id: host_boot_id()?, files, disks: phases::mark_disks(rundir, hardware)? })
    }

    pub(super) fn disks(&self) -> &[DiskSnapshot] {
        &self.disks
    }
}

fn boot_files(hardware: &Hardware) -> impl Iterator<Item = &PathBuf> {
    hardware.boot.iter().flat_map(|boot| [Some(&boot.kernel), boot.initrd.as_ref()]).flatten()
}

fn host_boot_id() -> Result<String, InfoError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let boot_id = fs::read_to_string(path).map_err(|source| InfoError::File { path: path.to_owned(), source })?;
    Ok(boot_id.trim().to_owned())
}

/// A candidate that may be used.
#[derive(Debug)]
pub(super) struct UsableCandidate {
    pub(super) name: String,
    pub(super) store: StoreUrl,
    pub(super) info: CandidateInfo,
}

/// A phase and its candidate.
pub(super) struct CandidateCheck {
    /// When the candidate was taken, in µs since 1970. `None`: there is no candidate.
    taken_us: Option<u64>,
    bytes: u64,
    /// The candidate if it is usable now, otherwise the reason why it is not. This may change at any moment while a
    /// QEMU of the VM runs.
    pub(super) usable: Result<UsableCandidate, String>,
}

/// Finds the candidate of a phase and checks it.
pub(super) fn find(host: &Host, rundir: &RunDir, state: &State, phase: &str) -> CandidateCheck {
    let missing = |why: String| CandidateCheck { taken_us: None, bytes: 0, usable: Err(why) };
    let path = phases::directory(host, rundir, &state.definition).join(phase);
    let store = StoreUrl::Directory(path.clone());
    match candidate::describe(&store) {
        _ if !path.exists() => missing("none was saved of this phase".into()),
        Err(RestoreError::Store(StoreError::Empty { .. })) => missing("none was saved of this phase".into()),
        Err(e) => missing(one_line(&e)),
        Ok(stored) => {
            let usable = check_usable(rundir, state, &stored);
            let usable = usable.map(|info| UsableCandidate { name: phase.into(), store, info });
            CandidateCheck { taken_us: Some(stored.taken_us), bytes: stored.bytes, usable }
        }
    }
}

/// Checks the conditions under which a candidate is usable. Returns them, or the reason why it is not usable.
fn check_usable(rundir: &RunDir, state: &State, stored: &StoredCandidate) -> Result<CandidateInfo, String> {
    let info: CandidateInfo =
        serde_json::from_value(stored.about.clone()).map_err(|e| format!("cannot read its description: {e}"))?;
    if guest_visible(&stored.hardware) != guest_visible(&state.hardware) {
        return Err("the VM has other hardware now".into());
    }
    match host_boot_id() {
        Ok(boot_id) if boot_id == info.host_boot_id => {}
        Ok(_) => return Err("the host was booted since".into()),
        Err(e) => return Err(one_line(&e)),
    }
    if let Some(mark) = info.files.iter().find(|mark| !mark.is_unchanged()) {
        return Err(format!("{} has changed since", mark.path.display()));
    }
    match phases::why_stale(rundir, &state.hardware, &info.disks) {
        None => Ok(info),
        Some(why) => Err(why),
    }
}

/// Reduces hardware to the parts that a guest has known since its boot. The VM generation ID changes with each restore.
fn guest_visible(hardware: &Hardware) -> Hardware {
    let mut hardware = Hardware { vm_generation: hardware.vm_generation.map(|_| Uuid::nil()), ..hardware.clone() };
    hardware.ram.path = PathBuf::new();
    hardware
}

/// Result of [`choose`].
pub(super) struct CandidateChoice {
    /// The candidate of the latest phase that has a usable one.
    pub(super) chosen: Option<UsableCandidate>,
    /// The candidates of later phases.
    pub(super) skipped: Vec<SkippedCandidate>,
}

/// Chooses the candidate of the latest phase that has a usable one. `only_phase`: consider this phase alone. `failed`:
/// candidates that could not be loaded.
pub(super) fn choose(
    host: &Host,
    rundir: &RunDir,
    state: &State,
    only_phase: Option<&str>,
    failed: &[SkippedCandidate],
) -> CandidateChoice {
    let mut skipped = Vec::new();
    for name in state.definition.phase.save.iter().rev() {
        if only_phase.is_some_and(|only_phase| only_phase != name) {
            continue;
        }
        match find(host, rundir, state, name).usable {
            Ok(usable) => match failed.iter().find(|failed| failed.name == *name) {
                Some(failed) => skipped.push(failed.clone()),
                None => return CandidateChoice { chosen: Some(usable), skipped },
            },
            Err(why) => skipped.push(SkippedCandidate { name: name.clone(), why }),
        }
    }
    CandidateChoice { chosen: None, skipped }
}

/// Lists all phases that a VM saves, in the order of the boot.
#[must_use]
pub fn list(host: &Host, rundir: &RunDir, state: &State) -> Vec<Candidate> {
    let describe = |name: &String| {
        let CandidateCheck { taken_us, bytes, usable } = find(host, rundir, state, name);
        Candidate { name: name.clone(), taken_us, bytes, unusable_because: usable.err() }
    };
    state.definition.phase.save.iter().map(describe).collect()
}

/// Formats an error and all its causes in one line, as the port for phases requires.
pub(super) fn one_line(error: &dyn std::error::Error) -> String {
    with_causes(error).replace('\n', " ")
}

/// Converts the conditions to the JSON value that is stored with the candidate.
pub(super) fn to_json(info: &CandidateInfo) -> Value {
    serde_json::to_value(info).unwrap_or(Value::Null)
}
