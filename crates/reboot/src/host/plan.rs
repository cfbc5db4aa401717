//! The plan of `rekindle reboot-host`: the method for each VM, and the kernel to boot.
//!
//! The plan is written to a file for the systemd unit that suspends the guests at the end of the shutdown
//! ([`super::shutdown`]).

use super::guest::preflight;
use super::kernel::InstalledKernel;
use super::setup::reserve;
use super::{HostError, PreventingVm, RebootMethod};
use crate::error::{Problem, RebootError};
use rekindle_vm::causes::with_causes;
use rekindle_vm::host::Host;
use rekindle_vm::lock;
use rekindle_vm::rundir::{RunDir, write_json};
use rekindle_vm::state::State;
use rekindle_vm::status::{self, Status};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// How to treat VMs that cannot be carried over by the requested method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OthersPolicy {
    /// Do not reboot the host.
    Refuse,
    /// Save these VMs' RAM to disk.
    Saved,
    /// Shut these VMs down, and boot them after the reboot.
    Cold,
}

/// A VM, and the method by which its guest survives the reboot. In JSON, a list of both.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(String, RebootMethod)", into = "(String, RebootMethod)")]
pub struct PlannedVm {
    pub name: String,
    pub how: RebootMethod,
}

impl From<(String, RebootMethod)> for PlannedVm {
    fn from((name, how): (String, RebootMethod)) -> Self {
        Self { name, how }
    }
}

impl From<PlannedVm> for (String, RebootMethod) {
    fn from(vm: PlannedVm) -> Self {
        (vm.name, vm.how)
    }
}

/// The plan of a host reboot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRebootPlan {
    /// Unique ID of this plan.
    pub token: String,
    pub how: RebootMethod,
    /// All running VMs.
    pub vms: Vec<PlannedVm>,
    /// The kernel that is entered by kexec. `None`: the host reboots through its firmware.
    pub kernel: Option<InstalledKernel>,
}

impl HostRebootPlan {
    fn new(how: RebootMethod, vms: Vec<PlannedVm>, kernel: Option<InstalledKernel>) -> Self {
        Self { token: uuid::Uuid::new_v4().simple().to_string(), how, vms, kernel }
    }

    /// Checks all VMs and makes a plan. Changes nothing.
    ///
    /// # Errors
    /// [`HostError::Preflight`] names every VM that prevents the reboot, with all reasons.
    pub fn make(host: &Host, how: RebootMethod, others: OthersPolicy) -> Result<Self, HostError> {
        let mut vms = Vec::new();
        let mut preventing = Vec::new();
        for name in RunDir::list(&host.root).map_err(HostError::file(&host.root))? {
            match choose_method(host, &name, how, others) {
                Ok(Some(how)) => vms.push(PlannedVm { name, how }),
                Ok(None) => {}
                Err(problems) => preventing.push(PreventingVm { name, problems }),
            }
        }
        if !preventing.is_empty() {
            return Err(HostError::Preflight(preventing));
        }
        let kernel = (how == RebootMethod::Warm).then(|| InstalledKernel::newest(Path::new("/"))).transpose()?;
        Ok(Self::new(how, vms, kernel))
    }

    /// Plans a manual suspend: all running VMs, with the same method, whether or not their RAM would survive a reboot.
    ///
    /// # Errors
    /// [`HostError::File`] if the VMs cannot be listed.
    pub fn for_manual_suspend(host: &Host, how: RebootMethod) -> Result<Self, HostError> {
        let mut names = RunDir::list(&host.root).map_err(HostError::file(&host.root))?;
        names.retain(|name| {
            let status = status::status(&RunDir::new(&host.root, name));
            !matches!(status, Ok(Status::Ended | Status::Prepared | Status::Suspended) | Err(_))
        });
        Ok(Self::new(how, names.into_iter().map(|name| PlannedVm { name, how }).collect(), None))
    }

    /// Reads the plan of a reboot in progress.
    ///
    /// # Errors
    /// [`HostError::File`] if the plan exists and cannot be read or parsed.
    pub fn read(host: &Host) -> Result<Option<Self>, HostError> {
        let path = plan_file(host);
        let failed = HostError::file(&path);
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| failed(e.into())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed(e)),
        }
    }

    pub(super) fn write(&self, host: &Host) -> Result<(), HostError> {
        let path = plan_file(host);
        write_json(&path, self).map_err(HostError::file(&path))
    }

    /// Returns the VMs of this plan that are still to be suspended, without those that have ended since.
    #[must_use]
    pub fn still_running(&self, host: &Host) -> Vec<PlannedVm> {
        let mut vms = self.vms.clone();
        vms.retain(|vm| {
            let rundir = RunDir::new(&host.root, &vm.name);
            let status = status::status(&rundir);
            if let Some(operation) = lock::running_operation(&rundir) {
                tracing::warn!("{}: the operation `{operation}` holds it", vm.name);
            }
            !matches!(status, Ok(Status::Ended) | Err(_)) && rundir.exists()
        });
        vms
    }
}

fn plan_file(host: &Host) -> PathBuf {
    host.root.join(".host-plan.json")
}

/// Removes the plan of a reboot that does not take place.
pub(super) fn remove_plan(host: &Host) {
    let _ = fs::remove_file(plan_file(host));
}

/// Returns the method for one VM: `how` if that is possible, otherwise the method of `others`. `None` if the VM does
/// not run.
fn choose_method(
    host: &Host,
    name: &str,
    how: RebootMethod,
    others: OthersPolicy,
) -> Result<Option<RebootMethod>, Vec<Problem>> {
    let Some(state) = read_running_state(host, name)? else { return Ok(None) };
    let mut problems = Vec::new();
    if how == RebootMethod::Warm {
        problems.extend(why_not_preserved(&state.hardware.ram.path).map(Problem));
    }
    problems.extend(why_not_suspendable(host, name, how));
    if problems.is_empty() {
        return Ok(Some(how));
    }
    let other_method = match others {
        OthersPolicy::Refuse => {
            problems.push(Problem("to use another method for it: --others saved, or --others cold".into()));
            return Err(problems);
        }
        OthersPolicy::Saved => RebootMethod::Saved,
        OthersPolicy::Cold => RebootMethod::Cold,
    };
    let problems_of_other = why_not_suspendable(host, name, other_method);
    if problems_of_other.is_empty() {
        return Ok(Some(other_method));
    }
    problems.extend(problems_of_other);
    Err(problems)
}

/// Returns the state of a VM if its guest runs, `None` if it does not. Rejects VMs in a state in which no method is
/// possible.
fn read_running_state(host: &Host, name: &str) -> Result<Option<State>, Vec<Problem>> {
    let rundir = RunDir::new(&host.root, name);
    let prevented = |why: String| Err(vec![Problem(why)]);
    let unreadable = |e: io::Error| vec![Problem(e.to_string())];
    match status::status(&rundir).map_err(unreadable)? {
        Status::Ended | Status::Prepared => return Ok(None),
        Status::NeedsRecovery => return prevented(format!("it needs recovery first: rekindle recover {name}")),
        Status::Suspended => {
            return prevented("it is still suspended; resume it first: rekindle host resume".into());
        }
        Status::Busy(operation) => {
            return prevented(format!("the operation `{operation}` holds it; wait for that to end"));
        }
        Status::Running | Status::Degraded(_) | Status::Stopped(_) | Status::Silent | Status::Protected => {}
    }
    let Some(state) = State::read(&rundir).map_err(unreadable)? else {
        return prevented("it was stopped or removed a moment ago; run the command again".into());
    };
    if let Some(attached) = &state.attached {
        return prevented(format!(
            "it was adopted ({}) and cannot be carried over; detach it (rekindle detach {name}), then shut it down or \
             save it with the program that started it",
            attached.starter
        ));
    }
    Ok(Some(state))
}

/// Returns the problems that prevent a suspend of the VM by this method; empty if it is possible.
fn why_not_suspendable(host: &Host, name: &str, how: RebootMethod) -> Vec<Problem> {
    match preflight(host, name, how) {
        Ok(_) => Vec::new(),
        Err(RebootError::Preflight { problems, .. }) => problems,
        Err(error) => vec![Problem(with_causes(&error))],
    }
}

/// Returns the reason why RAM at `path` would not survive the reboot, or `None` if it would.
fn why_not_preserved(path: &Path) -> Option<String> {
    let why = match reserve::holds(path) {
        Ok(true) => return None,
        Ok(false) => "is not in reserved memory, so it is lost with this kernel".into(),
        Err(e) => format!("cannot be checked: {e}"),
    };
    Some(format!(
        "its RAM {} {why}; set this host up (rekindle host init), and restart the VM without `ram.dir`",
        path.display()
    ))
}
