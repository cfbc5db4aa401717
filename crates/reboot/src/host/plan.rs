//! `rekindle reboot host`: the method for each VM, the kernel to boot, and the shutdown.
//!
//! The plan is written to a file for the systemd unit that suspends the guests at the end of the shutdown. Everything
//! can be undone until systemd has received the request to shut down.

use super::guest::preflight;
use super::setup::{self, reserve};
use super::survived::{PARAMETER, command_line};
use super::{HostError, RebootMethod};
use crate::error::{Problem, RebootError};
use rekindle_kernel::kexec;
use rekindle_qemu::binary::Binary;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::{RunDir, write_json};
use rekindle_vm::state::State;
use rekindle_vm::status::{self, Status};
use rekindle_vm::{disks, lock};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

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

/// An installed kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstalledKernel {
    /// The kernel's version, which is the name of its folder of modules.
    pub version: String,
    pub image: PathBuf,
    pub initrd: Option<PathBuf>,
}

/// The plan of a host reboot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRebootPlan {
    /// Unique ID of this plan.
    pub token: String,
    pub how: RebootMethod,
    /// Every running VM, with its method.
    pub vms: Vec<(String, RebootMethod)>,
    /// The kernel that is entered by kexec. `None`: the host reboots through its firmware.
    pub kernel: Option<InstalledKernel>,
}

fn path(host: &Host) -> PathBuf {
    host.root.join(".host-plan.json")
}

/// Reads the plan of a reboot in progress.
///
/// # Errors
/// [`HostError::File`] if the plan exists and cannot be read or parsed.
pub fn read(host: &Host) -> Result<Option<HostRebootPlan>, HostError> {
    let path = path(host);
    let failed = |source| HostError::File { path: path.clone(), source };
    match fs::read(&path) {
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| failed(e.into())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(failed(e)),
    }
}

/// Checks all VMs and makes a plan. Changes nothing.
///
/// # Errors
/// [`HostError::Preflight`] names every VM that prevents the reboot, with all reasons.
pub fn make(host: &Host, how: RebootMethod, others: OthersPolicy) -> Result<HostRebootPlan, HostError> {
    let failed = |source| HostError::File { path: host.root.clone(), source };
    let names = RunDir::list(&host.root).map_err(failed)?;
    let mut vms = Vec::new();
    let mut preventing = Vec::new();
    for name in names {
        match method_for(host, &name, how, others) {
            Ok(Some(how)) => vms.push((name, how)),
            Ok(None) => {}
            Err(problems) => preventing.push((name, problems)),
        }
    }
    if !preventing.is_empty() {
        return Err(HostError::Preflight(preventing));
    }
    let kernel = (how == RebootMethod::Warm).then(|| newest(Path::new("/"))).transpose()?;
    Ok(HostRebootPlan { token: new_token(), how, vms, kernel })
}

/// Returns the method for one VM. `None` if the VM does not run.
fn method_for(
    host: &Host,
    name: &str,
    how: RebootMethod,
    others: OthersPolicy,
) -> Result<Option<RebootMethod>, Vec<Problem>> {
    let rundir = RunDir::new(&host.root, name);
    let problem = |text: String| vec![Problem(text)];
    let status = status::status(&rundir).map_err(|e| problem(e.to_string()))?;
    match status {
        Status::Ended | Status::Prepared => return Ok(None),
        Status::NeedsRecovery => return Err(problem(format!("it needs recovery first: rekindle recover {name}"))),
        Status::Suspended => {
            return Err(problem("it is still suspended; resume it first: rekindle host resume".into()));
        }
        Status::Busy(operation) => {
            return Err(problem(format!("the operation `{operation}` holds it; wait for that to end")));
        }
        Status::Running | Status::Degraded(_) | Status::Stopped(_) | Status::Silent | Status::Protected => {}
    }
    let state = State::read(&rundir).map_err(|e| problem(e.to_string()))?;
    if let Some(attached) = state.as_ref().and_then(|state| state.attached.as_ref()) {
        let text = format!(
            "it was adopted ({}) and cannot be carried over; detach it (rekindle detach {name}), then shut it down or \
             save it with the program that started it",
            attached.starter
        );
        return Err(problem(text));
    }
    let mut problems = match state.as_ref().filter(|_| how == RebootMethod::Warm) {
        Some(state) => why_not_preserved(&state.hardware.ram.path).into_iter().map(Problem).collect(),
        None => Vec::new(),
    };
    let carries = |how| preflight(host, name, how, |path| Binary::probe_cached(path, &host.binaries())).map(drop);
    problems.extend(carries(how).err().map(problems_of).unwrap_or_default());
    if problems.is_empty() {
        return Ok(Some(how));
    }
    let other = match others {
        OthersPolicy::Refuse => {
            problems.push(Problem("to use another method for it: --others saved, or --others cold".into()));
            return Err(problems);
        }
        OthersPolicy::Saved => RebootMethod::Saved,
        OthersPolicy::Cold => RebootMethod::Cold,
    };
    match carries(other) {
        Ok(()) => Ok(Some(other)),
        Err(error) => {
            problems.extend(problems_of(error));
            Err(problems)
        }
    }
}

fn problems_of(error: RebootError) -> Vec<Problem> {
    match error {
        RebootError::Preflight { problems, .. } => problems,
        other => {
            let cause = std::error::Error::source(&other).map(|cause| format!(": {cause}")).unwrap_or_default();
            vec![Problem(format!("{other}{cause}"))]
        }
    }
}

/// Returns the reason why RAM at `path` would not survive the reboot, or `None` if it would.
fn why_not_preserved(path: &Path) -> Option<String> {
    let text = match reserve::holds(path) {
        Ok(true) => return None,
        Ok(false) => "is not in reserved memory, so it is lost with this kernel".into(),
        Err(e) => format!("cannot be checked: {e}"),
    };
    Some(format!(
        "its RAM {} {text}; set this host up (rekindle host init), and restart the VM without `ram.dir`",
        path.display()
    ))
}

/// Returns the newest kernel under `root` whose modules are installed, with its initial RAM disk if there is one.
///
/// # Errors
/// [`HostError::Kernel`] if there is no such kernel.
pub fn newest(root: &Path) -> Result<InstalledKernel, HostError> {
    let boot = root.join("boot");
    let files = fs::read_dir(&boot).map_err(|source| HostError::File { path: boot.clone(), source })?;
    let names = files.flatten().filter_map(|file| file.file_name().into_string().ok());
    let versions = names.filter_map(|name| name.strip_prefix("vmlinuz-").map(str::to_owned));
    // A kernel without its modules would not find its devices.
    let mut versions: Vec<_> = versions.filter(|version| root.join("lib/modules").join(version).is_dir()).collect();
    versions.sort_by_key(|version| numbers(version));
    let Some(version) = versions.pop() else {
        let text = format!("no kernel is installed in {} (vmlinuz-VERSION, with /lib/modules/VERSION)", boot.display());
        return Err(HostError::Kernel(text));
    };
    let initrds = [format!("initrd.img-{version}"), format!("initramfs-{version}.img"), format!("initrd-{version}")];
    let initrd = initrds.iter().map(|name| boot.join(name)).find(|path| path.exists());
    Ok(InstalledKernel { image: boot.join(format!("vmlinuz-{version}")), initrd, version })
}

/// Converts a version for comparison, so that numbers in it compare by value.
fn numbers(version: &str) -> Vec<(u64, String)> {
    let mut parts = Vec::new();
    let mut rest = version;
    while !rest.is_empty() {
        let text = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (before, after) = rest.split_at(text);
        let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        let (number, after) = after.split_at(digits);
        // Text sorts before a number in the same position: 6.1-rc1 before 6.1.1.
        parts.push((number.parse().unwrap_or(0), before.replace('-', " ")));
        rest = after;
    }
    parts
}

/// Returns the next kernel's command line: the current one without the boot loader's parameters, plus the token.
fn next_command_line(now: &str, token: &str) -> String {
    let stays = |word: &&str| !["BOOT_IMAGE=", "initrd=", PARAMETER].iter().any(|start| word.starts_with(start));
    let words = now.split_whitespace().filter(stays);
    words.map(str::to_owned).chain([format!("{PARAMETER}{token}")]).collect::<Vec<_>>().join(" ")
}

/// Loads the kernel, writes the plan, and makes systemd shut the host down.
///
/// *On success:* the shutdown has started. *On failure:* all guests run as before.
pub fn carry_out(host: &Host, plan: &HostRebootPlan) -> Result<(), HostError> {
    setup::check_units()?;
    let started = begin(host, plan);
    if started.is_err() {
        let _ = fs::remove_file(path(host));
        if plan.kernel.is_some() {
            let _ = kexec::unload();
        }
    }
    started
}

fn begin(host: &Host, plan: &HostRebootPlan) -> Result<(), HostError> {
    if let Some(kernel) = &plan.kernel {
        let now = command_line().map_err(|source| HostError::File { path: "/proc/cmdline".into(), source })?;
        let line = next_command_line(&now, &plan.token);
        kexec::load(&kernel.image, kernel.initrd.as_deref(), &line).map_err(HostError::Load)?;
    }
    let path = path(host);
    write_json(&path, plan).map_err(|source| HostError::File { path: path.clone(), source })?;
    keep_over_shutdown(host, plan)?;
    run("systemctl", &["--no-block", if plan.kernel.is_some() { "kexec" } else { "reboot" }])
}

/// Moves the guests to a systemd scope of their own, which systemd leaves alone until the end of the shutdown.
/// Otherwise systemd would end the guests with the session that started them, before it stops the services.
fn keep_over_shutdown(host: &Host, plan: &HostRebootPlan) -> Result<(), HostError> {
    let mut pids = Vec::new();
    for (name, _) in &plan.vms {
        let rundir = RunDir::new(&host.root, name);
        let failed = |source| HostError::File { path: rundir.path().to_owned(), source };
        let Some(state) = State::read(&rundir).map_err(failed)? else { continue };
        pids.extend(state.vmm.as_ref().filter(|vmm| vmm.is_alive()).map(|vmm| vmm.pid));
        for disk in disks::served(&state.hardware) {
            let servers = disks::servers(&rundir, &disk.id).map_err(failed)?;
            pids.extend(servers.iter().map(|server| server.pid));
        }
    }
    if pids.is_empty() {
        return Ok(());
    }
    let name = format!("rekindle-guests-{}.scope", plan.token.get(..8).unwrap_or(&plan.token));
    let mut arguments: Vec<String> =
        ["call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1"].map(Into::into).into();
    arguments.extend(["org.freedesktop.systemd1.Manager", "StartTransientUnit", "ssa(sv)a(sa(sv))"].map(Into::into));
    arguments.extend([name, "fail".into(), "2".into(), "DefaultDependencies".into(), "b".into(), "false".into()]);
    arguments.extend(["PIDs".into(), "au".into(), pids.len().to_string()]);
    arguments.extend(pids.iter().map(ToString::to_string));
    arguments.push("0".into());
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    run("busctl", &arguments)
}

/// Plans a manual suspend: all running VMs, with the same method, whether or not their RAM would survive a reboot.
///
/// # Errors
/// [`HostError::File`] if the VMs cannot be listed.
pub fn for_manual_suspend(host: &Host, how: RebootMethod) -> Result<HostRebootPlan, HostError> {
    let names = RunDir::list(&host.root).map_err(|source| HostError::File { path: host.root.clone(), source })?;
    let runs = |name: &String| {
        let status = status::status(&RunDir::new(&host.root, name));
        !matches!(status, Ok(Status::Ended | Status::Prepared | Status::Suspended) | Err(_))
    };
    let vms = names.into_iter().filter(runs).map(|name| (name, how)).collect();
    Ok(HostRebootPlan { token: new_token(), how, vms, kernel: None })
}

fn new_token() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}

pub(super) fn run(program: &str, arguments: &[&str]) -> Result<(), HostError> {
    let failed =
        |stderr: String| HostError::Command { command: format!("{program} {}", arguments.join(" ")), output: stderr };
    let output = Command::new(program).args(arguments).output().map_err(|e| failed(e.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(failed(if stderr.is_empty() { output.status.to_string() } else { stderr }))
}

/// Returns the VMs of a plan that are still to be suspended, without those that have ended since.
#[must_use]
pub fn still_running(host: &Host, plan: &HostRebootPlan) -> Vec<(String, RebootMethod)> {
    let runs = |name: &str| {
        let rundir = RunDir::new(&host.root, name);
        let status = status::status(&rundir);
        if let Some(holder) = lock::running_operation(&rundir) {
            tracing::warn!("{name}: the operation `{holder}` holds it");
        }
        !matches!(status, Ok(Status::Ended) | Err(_)) && rundir.exists()
    };
    plan.vms.iter().filter(|(name, _)| runs(name)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_kernel_has_its_modules_and_its_initrd() {
        let root = tempfile::tempdir().unwrap();
        assert!(matches!(newest(root.path()), Err(HostError::File { .. })));
        fs::create_dir(root.path().join("boot")).unwrap();
        assert!(matches!(newest(root.path()), Err(HostError::Kernel(_))));
        for version in ["6.9.1-1-amd64", "6.10.2-1-amd64", "6.12.95+deb12-cloud-amd64", "6.13-rc1"] {
            fs::write(root.path().join(format!("boot/vmlinuz-{version}")), "").unwrap();
        }
        for version in ["6.9.1-1-amd64", "6.10.2-1-amd64", "6.12.95+deb12-cloud-amd64"] {
            fs::create_dir_all(root.path().join("lib/modules").join(version)).unwrap();
        }
        fs::write(root.path().join("boot/initrd.img-6.12.95+deb12-cloud-amd64"), "").unwrap();
        let found = newest(root.path()).unwrap();
        assert_eq!(found.version, "6.12.95+deb12-cloud-amd64");
        assert!(found.initrd.is_some_and(|path| path.ends_with("initrd.img-6.12.95+deb12-cloud-amd64")));
    }

    #[test]
    fn versions_are_compared_by_their_numbers() {
        let mut all = ["6.12.9", "6.2", "6.12.10", "5.19.17", "6.12"];
        all.sort_by_key(|version| numbers(version));
        assert_eq!(all, ["5.19.17", "6.2", "6.12", "6.12.9", "6.12.10"]);
    }

    #[test]
    fn the_next_command_line_has_one_token_and_no_words_of_the_boot_loader() {
        let now = "BOOT_IMAGE=/vmlinuz root=/dev/vda ro memmap=1G!4G rekindle.token=old initrd=x quiet\n";
        assert_eq!(next_command_line(now, "new"), "root=/dev/vda ro memmap=1G!4G quiet rekindle.token=new");
    }
}
