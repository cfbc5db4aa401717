//! The candidates of a VM: where they are stored, and whether they may be used.

use super::SkippedCandidate;
use rekindle_protect::candidate::{self, StoredCandidate};
use rekindle_protect::restore::RestoreError;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::file_identity::FileIdentity;
use rekindle_store::{StoreError, StoreUrl};
use rekindle_vm::host::Host;
use rekindle_vm::phases::{self, DiskSnapshot, PhaseError};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;
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
    pub void: Option<String>,
}

/// Conditions under which a candidate stays usable. They are stored with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CandidateInfo {
    /// Boot ID of the host. In another boot, file times may be those from before a crash.
    host: String,
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
    pub(super) fn now(rundir: &RunDir, hardware: &Hardware) -> Result<Self, InfoError> {
        let mark =
            |path: &PathBuf| FileIdentity::of(path).map_err(|source| InfoError::File { path: path.clone(), source });
        let files = boot_files(hardware).map(mark).collect::<Result<_, _>>()?;
        Ok(Self { host: host_boot()?, files, disks: phases::mark_disks(rundir, hardware)? })
    }

    pub(super) fn disks(&self) -> &[DiskSnapshot] {
        &self.disks
    }
}

fn boot_files(hardware: &Hardware) -> impl Iterator<Item = &PathBuf> {
    hardware.boot.iter().flat_map(|boot| [Some(&boot.kernel), boot.initrd.as_ref()]).flatten()
}

fn host_boot() -> Result<String, InfoError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let read = std::fs::read_to_string(path);
    read.map(|text| text.trim().to_owned()).map_err(|source| InfoError::File { path: path.to_owned(), source })
}

/// Returns the path of a phase's candidate.
pub(super) fn path_of(host: &Host, rundir: &RunDir, state: &State, phase: &str) -> PathBuf {
    phases::directory(host, rundir, &state.definition).join(phase)
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
    let none = |why: String| CandidateCheck { taken_us: None, bytes: 0, usable: Err(why) };
    let path = path_of(host, rundir, state, phase);
    let store = StoreUrl::Directory(path.clone());
    match candidate::describe(&store) {
        _ if !path.exists() => none("none was saved of this phase".into()),
        Err(RestoreError::Store(StoreError::Empty { .. })) => none("none was saved of this phase".into()),
        Err(e) => none(chain(&e)),
        Ok(found) => {
            let usable = judge(rundir, state, &found).map(|info| UsableCandidate { name: phase.into(), store, info });
            CandidateCheck { taken_us: Some(found.taken_us), bytes: found.bytes, usable }
        }
    }
}

fn judge(rundir: &RunDir, state: &State, found: &StoredCandidate) -> Result<CandidateInfo, String> {
    let about: CandidateInfo = serde_json::from_value::<CandidateInfo>(found.about.clone())
        .map_err(|e| format!("cannot read its description: {e}"))?;
    if comparable(&found.hardware) != comparable(&state.hardware) {
        return Err("the VM has other hardware now".into());
    }
    match host_boot() {
        Ok(now) if now == about.host => {}
        Ok(_) => return Err("the host was booted since".into()),
        Err(e) => return Err(chain(&e)),
    }
    if let Some(mark) = about.files.iter().find(|mark| !mark.is_unchanged()) {
        return Err(format!("{} has changed since", mark.path.display()));
    }
    match phases::why_stale(rundir, &state.hardware, &about.disks) {
        None => Ok(about),
        Some(why) => Err(why),
    }
}

/// Reduces hardware to the parts that a guest has known since its boot. The VM generation ID changes with each restore.
fn comparable(hardware: &Hardware) -> Hardware {
    let mut comparable = Hardware { vm_generation: hardware.vm_generation.map(|_| Uuid::nil()), ..hardware.clone() };
    comparable.ram.path = PathBuf::new();
    comparable
}

/// Returns the candidate of the latest phase that has a usable one, and the reasons why those of later phases are not
/// usable. `only`: consider this phase alone. `failed`: candidates that could not be loaded.
pub(super) fn choose(
    host: &Host,
    rundir: &RunDir,
    state: &State,
    only: Option<&str>,
    failed: &[SkippedCandidate],
) -> (Option<UsableCandidate>, Vec<SkippedCandidate>) {
    let mut skipped = Vec::new();
    let wanted = state.definition.phase.save.iter().rev().filter(|name| only.is_none_or(|only| only == name.as_str()));
    for name in wanted {
        match find(host, rundir, state, name).usable {
            Ok(usable) => match failed.iter().find(|failed| failed.name == *name) {
                Some(failed) => skipped.push(failed.clone()),
                None => return (Some(usable), skipped),
            },
            Err(why) => skipped.push(SkippedCandidate { name: name.clone(), why }),
        }
    }
    (None, skipped)
}

/// Lists all phases that a VM saves, in the order of the boot.
#[must_use]
pub fn list(host: &Host, rundir: &RunDir, state: &State) -> Vec<Candidate> {
    let one = |name: &String| {
        let CandidateCheck { taken_us, bytes, usable } = find(host, rundir, state, name);
        Candidate { name: name.clone(), taken_us, bytes, void: usable.err() }
    };
    state.definition.phase.save.iter().map(one).collect()
}

/// Formats an error and all its causes in one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let more = source.to_string();
        if !text.ends_with(&more) {
            text += &format!(": {more}");
        }
        next = source.source();
    }
    text.replace('\n', " ")
}

/// Converts the conditions to the JSON value that is stored with the candidate.
pub(super) fn value(about: &CandidateInfo) -> Value {
    serde_json::to_value(about).unwrap_or(Value::Null)
}
