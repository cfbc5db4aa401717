//! The candidates of a VM: where they are, and whether they may be used.

use super::Skipped;
use rekindle_protect::candidate::{self, Found};
use rekindle_protect::restore::RestoreError;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::mark::Mark;
use rekindle_store::{StoreError, StoreUrl};
use rekindle_vm::host::Host;
use rekindle_vm::phases::{self, DiskThen, PhaseError};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// A candidate, for those who look.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    /// Its phase.
    pub name: String,
    /// When it was taken, in µs since 1970; none if there is none.
    pub taken_us: Option<u64>,
    /// Bytes that it takes.
    pub bytes: u64,
    /// Why it may not be used; none if it may.
    pub void: Option<String>,
}

/// What is kept of the moment of a candidate, beside its guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct About {
    /// This boot of the host: times of files may be those of before a crash in another one.
    host: String,
    /// The kernel and RAM disk that QEMU has loaded. A cold boot would load those of now.
    files: Vec<Mark>,
    disks: Vec<DiskThen>,
}

/// Why what is to be kept cannot be found out.
#[derive(Debug, thiserror::Error)]
pub(super) enum AboutError {
    #[error(transparent)]
    Disks(#[from] PhaseError),
    #[error("{}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl About {
    /// Of now, with the guest of this VM stopped.
    pub(super) fn now(rundir: &RunDir, hardware: &Hardware) -> Result<Self, AboutError> {
        let mark = |path: &PathBuf| Mark::of(path).map_err(|source| AboutError::File { path: path.clone(), source });
        let files = boot_files(hardware).map(mark).collect::<Result<_, _>>()?;
        Ok(Self { host: host_boot()?, files, disks: phases::mark(rundir, hardware)? })
    }

    pub(super) fn disks(&self) -> &[DiskThen] {
        &self.disks
    }
}

fn boot_files(hardware: &Hardware) -> impl Iterator<Item = &PathBuf> {
    hardware.boot.iter().flat_map(|boot| [Some(&boot.kernel), boot.initrd.as_ref()]).flatten()
}

fn host_boot() -> Result<String, AboutError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let read = std::fs::read_to_string(path);
    read.map(|text| text.trim().to_owned()).map_err(|source| AboutError::File { path: path.to_owned(), source })
}

/// Where the candidate of a phase is.
pub(super) fn place(host: &Host, rundir: &RunDir, state: &State, phase: &str) -> PathBuf {
    phases::directory(host, rundir, &state.definition).join(phase)
}

/// One that may be used.
#[derive(Debug)]
pub(super) struct Good {
    pub(super) name: String,
    pub(super) store: StoreUrl,
    pub(super) about: About,
}

/// A phase, looked at.
pub(super) struct Looked {
    /// When its candidate was taken, in µs since 1970, if there is one.
    taken_us: Option<u64>,
    bytes: u64,
    /// It may be used now; otherwise why not. That may end at any moment as long as a QEMU of the VM runs.
    pub(super) good: Result<Good, String>,
}

/// Look at the candidate of a phase.
pub(super) fn find(host: &Host, rundir: &RunDir, state: &State, phase: &str) -> Looked {
    let none = |why: String| Looked { taken_us: None, bytes: 0, good: Err(why) };
    let path = place(host, rundir, state, phase);
    let store = StoreUrl::Directory(path.clone());
    match candidate::look(&store) {
        _ if !path.exists() => none("none was saved of this phase".into()),
        Err(RestoreError::Store(StoreError::Empty { .. })) => none("none was saved of this phase".into()),
        Err(e) => none(chain(&e)),
        Ok(found) => {
            let good = judge(rundir, state, &found).map(|about| Good { name: phase.into(), store, about });
            Looked { taken_us: Some(found.taken_us), bytes: found.bytes, good }
        }
    }
}

fn judge(rundir: &RunDir, state: &State, found: &Found) -> Result<About, String> {
    let about: About = serde_json::from_value::<About>(found.about.clone())
        .map_err(|e| format!("what is said of it cannot be understood: {e}"))?;
    if like(&found.hardware) != like(&state.hardware) {
        return Err("the VM has other hardware now".into());
    }
    match host_boot() {
        Ok(now) if now == about.host => {}
        Ok(_) => return Err("the host was booted since".into()),
        Err(e) => return Err(chain(&e)),
    }
    if let Some(mark) = about.files.iter().find(|mark| !mark.holds()) {
        return Err(format!("{} has changed since", mark.path.display()));
    }
    match phases::check(rundir, &state.hardware, &about.disks) {
        None => Ok(about),
        Some(why) => Err(why),
    }
}

/// What of a machine a guest knows from its boot on. Its generation ID is another one after each restore.
fn like(hardware: &Hardware) -> Hardware {
    let mut like = Hardware { vm_generation: hardware.vm_generation.map(|_| Uuid::nil()), ..hardware.clone() };
    like.ram.path = PathBuf::new();
    like
}

/// The latest phase of which there is a candidate that may be used, and why those after it may not. `only`: this one or none. `failed`: those
/// that were tried.
pub(super) fn choose(
    host: &Host,
    rundir: &RunDir,
    state: &State,
    only: Option<&str>,
    failed: &[Skipped],
) -> (Option<Good>, Vec<Skipped>) {
    let mut skipped = Vec::new();
    let wanted = state.definition.phase.save.iter().rev().filter(|name| only.is_none_or(|only| only == name.as_str()));
    for name in wanted {
        match find(host, rundir, state, name).good {
            Ok(good) => match failed.iter().find(|failed| failed.name == *name) {
                Some(failed) => skipped.push(failed.clone()),
                None => return (Some(good), skipped),
            },
            Err(why) => skipped.push(Skipped { name: name.clone(), why }),
        }
    }
    (None, skipped)
}

/// All phases of which a VM is to have candidates, the earliest first.
#[must_use]
pub fn list(host: &Host, rundir: &RunDir, state: &State) -> Vec<Candidate> {
    let one = |name: &String| {
        let Looked { taken_us, bytes, good } = find(host, rundir, state, name);
        Candidate { name: name.clone(), taken_us, bytes, void: good.err() }
    };
    state.definition.phase.save.iter().map(one).collect()
}

/// With all its causes, in one line.
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

/// As it is stored.
pub(super) fn value(about: &About) -> Value {
    serde_json::to_value(about).unwrap_or(Value::Null)
}
