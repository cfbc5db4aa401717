//! `rekindle reboot host`: what is going to be done with each VM, the kernel to go on with, and the shutdown.
//!
//! What was decided is written down for the unit that suspends the guests at the end of the shutdown. Until systemd has been told to
//! shut down, everything can be taken back.

use super::one::look;
use super::setup::{self, reserve};
use super::survived::{PARAMETER, command_line};
use super::{HostError, How};
use crate::vmm::{Problem, RebootError};
use rekindle_kernel::kexec;
use rekindle_qemu::binary::Binary;
use rekindle_vm::host::Host;
use rekindle_vm::life::{self, Status};
use rekindle_vm::rundir::{RunDir, write_json};
use rekindle_vm::state::State;
use rekindle_vm::{disks, lock};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What becomes of VMs that cannot be carried as is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Others {
    /// Then the host is not rebooted.
    Refuse,
    /// Their RAM goes to disk.
    Saved,
    /// They are shut down, and booted after it.
    Cold,
}

/// A kernel that is installed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// Its version, as its modules' folder is called.
    pub version: String,
    /// The image.
    pub image: PathBuf,
    /// Its initial RAM disk, if it has one.
    pub initrd: Option<PathBuf>,
}

/// What is going to be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// What tells it from every other.
    pub token: String,
    /// How the host is rebooted.
    pub how: How,
    /// Each VM that runs, and what is done with it.
    pub vms: Vec<(String, How)>,
    /// The kernel that is entered by kexec; none: an ordinary reboot.
    pub kernel: Option<Kernel>,
}

fn path(host: &Host) -> PathBuf {
    host.root.join(".host-plan.json")
}

/// The plan of a reboot that is under way.
///
/// # Errors
/// [`HostError::File`].
pub fn read(host: &Host) -> Result<Option<Plan>, HostError> {
    let path = path(host);
    let failed = |source| HostError::File { path: path.clone(), source };
    match fs::read(&path) {
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| failed(e.into())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(failed(e)),
    }
}

/// Look at all VMs, and decide. Nothing is changed.
///
/// # Errors
/// [`HostError::Preflight`] names every VM that speaks against it, with all reasons.
pub fn make(host: &Host, how: How, others: Others) -> Result<Plan, HostError> {
    let failed = |source| HostError::File { path: host.root.clone(), source };
    let names = RunDir::list(&host.root).map_err(failed)?;
    let mut vms = Vec::new();
    let mut against = Vec::new();
    for name in names {
        match one(host, &name, how, others) {
            Ok(Some(how)) => vms.push((name, how)),
            Ok(None) => {}
            Err(problems) => against.push((name, problems)),
        }
    }
    if !against.is_empty() {
        return Err(HostError::Preflight(against));
    }
    let kernel = (how == How::Warm).then(|| newest(Path::new("/"))).transpose()?;
    Ok(Plan { token: new_token(), how, vms, kernel })
}

/// What is done with one VM; none if it does not run.
fn one(host: &Host, name: &str, how: How, others: Others) -> Result<Option<How>, Vec<Problem>> {
    let rundir = RunDir::new(&host.root, name);
    let problem = |text: String| vec![Problem(text)];
    let status = life::status(&rundir).map_err(|e| problem(e.to_string()))?;
    match status {
        Status::Ended | Status::Prepared => return Ok(None),
        Status::NeedsRecovery => return Err(problem(format!("it needs recovery first: rekindle recover {name}"))),
        Status::Suspended => return Err(problem("it is suspended still: rekindle host resume".into())),
        Status::Busy(operation) => return Err(problem(format!("`{operation}` is at work on it; wait for it to end"))),
        Status::Running | Status::Degraded(_) | Status::Stopped(_) | Status::Silent | Status::Protected => {}
    }
    let state = State::read(&rundir).map_err(|e| problem(e.to_string()))?;
    if let Some(attached) = state.as_ref().and_then(|state| state.attached.as_ref()) {
        let text = format!(
            "it was attached to ({}): whoever started it has to see to it; let go of it (rekindle detach {name}), and shut it down or \
             have it saved there",
            attached.starter
        );
        return Err(problem(text));
    }
    let mut problems = match state.as_ref().filter(|_| how == How::Warm) {
        Some(state) => not_kept(&state.hardware.ram.path).into_iter().map(Problem).collect(),
        None => Vec::new(),
    };
    let carries = |how| look(host, name, how, |path| Binary::known(path, &host.binaries())).map(drop);
    problems.extend(carries(how).err().map(told).unwrap_or_default());
    if problems.is_empty() {
        return Ok(Some(how));
    }
    let other = match others {
        Others::Refuse => {
            problems.push(Problem("to carry it otherwise: --others saved, or --others cold".into()));
            return Err(problems);
        }
        Others::Saved => How::Saved,
        Others::Cold => How::Cold,
    };
    match carries(other) {
        Ok(()) => Ok(Some(other)),
        Err(error) => {
            problems.extend(told(error));
            Err(problems)
        }
    }
}

fn told(error: RebootError) -> Vec<Problem> {
    match error {
        RebootError::Preflight { problems, .. } => problems,
        other => {
            let cause = std::error::Error::source(&other).map(|cause| format!(": {cause}")).unwrap_or_default();
            vec![Problem(format!("{other}{cause}"))]
        }
    }
}

/// Why RAM at `path` would not outlive the kernel.
fn not_kept(path: &Path) -> Option<String> {
    let text = match reserve::holds(path) {
        Ok(true) => return None,
        Ok(false) => "is not in memory that outlives this kernel".into(),
        Err(e) => format!("cannot be looked at: {e}"),
    };
    Some(format!(
        "its RAM {} {text}; set this host up for it (rekindle host init), and start the VM again without `ram.dir`",
        path.display()
    ))
}

/// The newest kernel installed below `root`, with its initial RAM disk.
///
/// # Errors
/// [`HostError::Kernel`].
pub fn newest(root: &Path) -> Result<Kernel, HostError> {
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
    Ok(Kernel { image: boot.join(format!("vmlinuz-{version}")), initrd, version })
}

/// A version as it is compared: numbers by their value.
fn numbers(version: &str) -> Vec<(u64, String)> {
    let mut parts = Vec::new();
    let mut rest = version;
    while !rest.is_empty() {
        let text = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (before, after) = rest.split_at(text);
        let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        let (number, after) = after.split_at(digits);
        // Text sorts before a number of the same place: 6.1-rc1 before 6.1.1.
        parts.push((number.parse().unwrap_or(0), before.replace('-', " ")));
        rest = after;
    }
    parts
}

/// The command line for the next kernel: this one's, but for what the boot loader added, with the token.
fn next_command_line(now: &str, token: &str) -> String {
    let stays = |word: &&str| !["BOOT_IMAGE=", "initrd=", PARAMETER].iter().any(|start| word.starts_with(start));
    let words = now.split_whitespace().filter(stays);
    words.map(str::to_owned).chain([format!("{PARAMETER}{token}")]).collect::<Vec<_>>().join(" ")
}

/// Load the kernel, write the plan down, and have systemd shut the host down.
///
/// *On success:* the shutdown has begun. *On failure:* guests go on as if nothing had been.
///
/// # Errors
/// [`HostError`].
pub fn carry_out(host: &Host, plan: &Plan) -> Result<(), HostError> {
    setup::check_units()?;
    let begun = begin(host, plan);
    if begun.is_err() {
        let _ = fs::remove_file(path(host));
        if plan.kernel.is_some() {
            let _ = kexec::unload();
        }
    }
    begun
}

fn begin(host: &Host, plan: &Plan) -> Result<(), HostError> {
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

/// systemd ends the session that a guest was started from before the services, and the guest with it. So guests get a scope of their
/// own, which a shutdown leaves alone until the last.
fn keep_over_shutdown(host: &Host, plan: &Plan) -> Result<(), HostError> {
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

/// All VMs that run, one way for all, whether or not their RAM outlives the kernel: for a suspend by hand, with no reboot in sight.
///
/// # Errors
/// [`HostError::File`].
pub fn for_now(host: &Host, how: How) -> Result<Plan, HostError> {
    let names = RunDir::list(&host.root).map_err(|source| HostError::File { path: host.root.clone(), source })?;
    let runs = |name: &String| {
        let status = life::status(&RunDir::new(&host.root, name));
        !matches!(status, Ok(Status::Ended | Status::Prepared | Status::Suspended) | Err(_))
    };
    let vms = names.into_iter().filter(runs).map(|name| (name, how)).collect();
    Ok(Plan { token: new_token(), how, vms, kernel: None })
}

fn new_token() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}

pub(super) fn run(program: &str, arguments: &[&str]) -> Result<(), HostError> {
    let failed = |said: String| HostError::Command { command: format!("{program} {}", arguments.join(" ")), said };
    let output = Command::new(program).args(arguments).output().map_err(|e| failed(e.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(failed(if said.is_empty() { output.status.to_string() } else { said }))
}

/// The VMs of a plan that are still to be suspended, as of now: one that has ended since is left out.
#[must_use]
pub fn still_running(host: &Host, plan: &Plan) -> Vec<(String, How)> {
    let runs = |name: &str| {
        let rundir = RunDir::new(&host.root, name);
        let status = life::status(&rundir);
        if let Some(holder) = lock::holder(&rundir) {
            tracing::warn!("{name}: `{holder}` is at work on it");
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
    fn the_next_command_line_has_one_token_and_nothing_of_the_boot_loader() {
        let now = "BOOT_IMAGE=/vmlinuz root=/dev/vda ro memmap=1G!4G rekindle.token=old initrd=x quiet\n";
        assert_eq!(next_command_line(now, "new"), "root=/dev/vda ro memmap=1G!4G quiet rekindle.token=new");
    }
}
