//! The steps of `rekindle host init`: the files that are written, and the commands that are run.

use super::mount::{MountOutcome, mount_ram};
use super::requirements::missing_requirements;
use super::reserve::{Reserve, firmware_ram};
use super::target::{INSTALLED_PROGRAM, SetupTarget};
use super::{HostError, RAM_UNIT, RESUME_UNIT, SUSPEND_UNIT, run};
use crate::host::survived::command_line;
use rekindle_vm::hardware;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::write_atomically;
use serde::Serialize;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Mount point of the file system in the reserved RAM.
const RAM_DIR: &str = "/var/lib/rekindle/ram";
/// File names and contents of the units.
const UNITS: &[(&str, &str)] = &[
    (SUSPEND_UNIT, include_str!("../../../../../packaging/systemd/rekindle-suspend.service")),
    (RAM_UNIT, include_str!("../../../../../packaging/systemd/rekindle-ram.service")),
    (RESUME_UNIT, include_str!("../../../../../packaging/systemd/rekindle-resume.service")),
];
/// Links by which systemd knows that the units are enabled.
const UNIT_LINKS: &[&str] = &[
    "/etc/systemd/system/sysinit.target.wants/rekindle-suspend.service",
    "/etc/systemd/system/multi-user.target.wants/rekindle-resume.service",
];
/// Services that create network cards and bridges during a boot: guests are unreachable before the network is up, so
/// these get as much processor time as the guests.
const NETWORK_SERVICES: &[&str] = &["systemd-udevd", "systemd-networkd", "NetworkManager", "networking"];
/// Directories in which a package, or `make install`, puts units. A unit in `/etc` hides them.
const PACKAGE_UNIT_DIRS: &[&str] = &["/usr/local/lib/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];
const SERVICE_DIRS: &[&str] = &["/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];
const CPU_WEIGHT_DROP_IN: &str = include_str!("../../../../../packaging/systemd/first.conf");

/// One step of the setup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum SetupStep {
    /// This part of the setup is done already.
    Done { what: String },
    /// Write a file.
    Write { path: PathBuf, content: String },
    /// Remove a file.
    Remove { path: PathBuf, why: String },
    /// Run a command.
    Run { command: Vec<String> },
    /// Mount the RAM, if it is reserved already.
    Mount,
    /// A step that the administrator has to do.
    ByHand { what: String },
}

impl SetupStep {
    fn run(words: &[&str]) -> Self {
        Self::Run { command: words.iter().map(ToString::to_string).collect() }
    }

    /// Returns the step that makes a file have this content.
    fn write(path: PathBuf, content: String) -> Self {
        match fs::read_to_string(&path) {
            Ok(current) if current == content => Self::Done { what: path.display().to_string() },
            _ => Self::Write { path, content },
        }
    }

    fn is_write(&self) -> bool {
        matches!(self, Self::Write { .. })
    }

    /// Returns whether systemd has to reload its units after this step on a unit file.
    fn changes_units(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Remove { .. })
    }
}

/// Returns the steps that reserve `bytes` of RAM, at `start` if given, and set the host up to use that RAM. Changes
/// nothing.
///
/// # Errors
/// [`HostError::Setup`] lists all missing requirements and conflicts.
pub fn plan_steps(target: &SetupTarget, bytes: u64, start: Option<u64>) -> Result<Vec<SetupStep>, HostError> {
    let mut problems = missing_requirements(target);
    let mut steps = Vec::new();
    match reserve_steps(target, bytes, start) {
        Ok(reserve_steps) => steps.extend(reserve_steps),
        Err(problem) => problems.push(problem),
    }
    match host_toml_step(target) {
        Ok(step) => steps.push(step),
        Err(problem) => problems.push(problem),
    }
    if !problems.is_empty() {
        let lines: Vec<_> = problems.iter().map(|problem| format!("  - {problem}")).collect();
        return Err(HostError::Setup(format!(
            "this host cannot be set up; nothing was changed:\n{}",
            lines.join("\n")
        )));
    }
    let unit_files = unit_file_steps(target);
    let is_reload_needed = unit_files.iter().any(SetupStep::changes_units)
        || !UNIT_LINKS.iter().all(|link| target.path(link).is_symlink());
    steps.extend(unit_files);
    steps.push(SetupStep::write(target.path("/etc/modules-load.d/rekindle.conf"), early_modules(target)));
    if is_reload_needed {
        steps.push(SetupStep::run(&["systemctl", "daemon-reload"]));
        steps.push(SetupStep::run(&["systemctl", "--quiet", "enable", SUSPEND_UNIT, RESUME_UNIT]));
    } else {
        steps.push(SetupStep::Done { what: "the units are enabled".into() });
    }
    steps.push(SetupStep::Mount);
    Ok(steps)
}

/// Returns the steps that add the kernel parameter, in GRUB's configuration if that is set up as on Debian.
fn reserve_steps(target: &SetupTarget, bytes: u64, start: Option<u64>) -> Result<Vec<SetupStep>, String> {
    let command_line = fs::read_to_string(target.path("/proc/cmdline")).map_err(|e| format!("/proc/cmdline: {e}"))?;
    let current = Reserve::of(&command_line);
    let is_as_configured =
        |reserve: &Reserve| reserve.bytes == bytes && start.is_none_or(|start| start == reserve.start);
    let reserve = match current.filter(is_as_configured) {
        Some(current) => current,
        None => Reserve::choose(&read_firmware_ram(target)?, bytes, start)?,
    };
    let is_reserved = current == Some(reserve);
    if !target.path("/etc/default/grub").exists() || !target.path("/usr/sbin/update-grub").exists() {
        return Ok(vec![if is_reserved {
            SetupStep::Done { what: format!("{reserve} is on this kernel's command line") }
        } else {
            let what = format!("add {reserve} to the kernel's command line: this host has no GRUB set up as on Debian");
            SetupStep::ByHand { what }
        }]);
    }
    let content = format!(
        "# Written by `rekindle host init`: RAM for guests that outlives the kernel.\n\
         GRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX {reserve}\"\n"
    );
    let mut steps = vec![SetupStep::write(target.path("/etc/default/grub.d/60-rekindle.cfg"), content)];
    if steps.iter().any(SetupStep::is_write) {
        steps.push(SetupStep::run(&["update-grub"]));
    }
    if !is_reserved {
        let what = format!("reboot this host once: its kernel was booted without {reserve}");
        steps.push(SetupStep::ByHand { what });
    }
    Ok(steps)
}

fn read_firmware_ram(target: &SetupTarget) -> Result<Vec<Range<u64>>, String> {
    firmware_ram(&target.path("/sys")).map_err(|e| {
        format!(
            "/sys/firmware/memmap: {e}, so the addresses of RAM are unknown: choose a range with --start, and add \
             memmap=SIZE!START to the kernel's command line yourself"
        )
    })
}

/// Returns the step that configures the file system in the reserved RAM as the place of guests' RAM.
fn host_toml_step(target: &SetupTarget) -> Result<SetupStep, String> {
    let path = target.path("/etc/rekindle/host.toml");
    let ram_dir_line = format!("ram_dir = \"{RAM_DIR}\"\n");
    let current = match fs::read_to_string(&path) {
        Ok(current) => current,
        Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(format!("{}: {e}", path.display())),
    };
    let table: toml::Table = current.parse().map_err(|e| format!("{}: {e}", path.display()))?;
    match table.get("ram_dir").map(|value| value.as_str()) {
        Some(Some(RAM_DIR)) => Ok(SetupStep::Done { what: path.display().to_string() }),
        Some(_) => Err(format!(
            "{}: `ram_dir` is another directory; remove that line, or change it to: {}",
            path.display(),
            ram_dir_line.trim()
        )),
        None => Ok(SetupStep::Write { path, content: ram_dir_line + &current }),
    }
}

/// Returns the step that makes systemd use this unit. A unit of a package is used as it is: an upgrade of the package
/// changes it, but not a copy in `/etc`, which would hide it.
fn unit_step(target: &SetupTarget, name: &str, content: String) -> SetupStep {
    let path = target.path(&format!("/etc/systemd/system/{name}"));
    let packaged = PACKAGE_UNIT_DIRS.iter().map(|directory| target.path(directory).join(name));
    let has_content = |path: &PathBuf| fs::read_to_string(path).is_ok_and(|current| current == content);
    match packaged.into_iter().find(has_content) {
        Some(unit) if path.is_file() => SetupStep::Remove { path, why: format!("it hides {}", unit.display()) },
        Some(unit) => SetupStep::Done { what: unit.display().to_string() },
        None => SetupStep::write(path, content),
    }
}

/// Returns the steps for our units, and those that write drop-ins for the network services that the host has.
fn unit_file_steps(target: &SetupTarget) -> Vec<SetupStep> {
    let mut steps = Vec::new();
    for (name, content) in UNITS {
        let content = content.replace(INSTALLED_PROGRAM, &target.program.to_string_lossy());
        steps.push(unit_step(target, name, content));
    }
    for service in NETWORK_SERVICES {
        if target.has_file(SERVICE_DIRS, &format!("{service}.service")) {
            let path = format!("/etc/systemd/system/{service}.service.d/60-rekindle.conf");
            steps.push(SetupStep::write(target.path(&path), CPU_WEIGHT_DROP_IN.into()));
        }
    }
    steps
}

/// Returns the kernel modules that a resume needs, for the boot to load early: the driver of the reserved RAM, KVM,
/// taps.
fn early_modules(target: &SetupTarget) -> String {
    let cpuinfo = fs::read_to_string(target.path("/proc/cpuinfo")).unwrap_or_default();
    let modules = ["nd_e820", "nd_pmem"].into_iter().chain(hardware::kvm_module(&cpuinfo)).chain(["tun"]);
    modules.map(|module| format!("{module}\n")).collect()
}

/// Carries out the result of [`plan_steps`]. Returns the result of the mount if RAM is reserved already.
///
/// *On failure:* completed steps stay; running the command again continues from there.
pub fn carry_out(steps: &[SetupStep]) -> Result<Option<MountOutcome>, HostError> {
    let mut mount_outcome = None;
    for step in steps {
        match step {
            SetupStep::Done { .. } | SetupStep::ByHand { .. } => {}
            SetupStep::Write { path, content } => write_config(path, content).map_err(HostError::file(path))?,
            SetupStep::Remove { path, .. } => fs::remove_file(path).map_err(HostError::file(path))?,
            SetupStep::Run { command } => {
                let words: Vec<_> = command.iter().map(String::as_str).collect();
                if let [program, arguments @ ..] = words.as_slice() {
                    run(program, arguments)?;
                }
            }
            SetupStep::Mount => mount_outcome = mount_if_reserved()?,
        }
    }
    Ok(mount_outcome)
}

/// Writes a configuration file atomically. Every user can read it.
fn write_config(path: &Path, content: &str) -> io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
    write_atomically(path, content.as_bytes())?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o644))
}

/// Mounts the RAM and starts the units if this kernel was booted with the reserve. Otherwise the next boot does.
fn mount_if_reserved() -> Result<Option<MountOutcome>, HostError> {
    let command_line = command_line().map_err(HostError::file(Path::new("/proc/cmdline")))?;
    if Reserve::of(&command_line).is_none() {
        return Ok(None);
    }
    let host = Host::open().map_err(|e| HostError::Setup(e.to_string()))?;
    let mount_outcome = mount_ram(&host)?;
    run("systemctl", &["start", RESUME_UNIT, SUSPEND_UNIT])?;
    Ok(Some(mount_outcome))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A host with 8 GiB, systemd, the tools and GRUB.
    fn sample_host() -> (tempfile::TempDir, SetupTarget) {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (index, (start, end)) in [(0x1000, 2 * GIB - 1), (4 * GIB, 10 * GIB - 1)].into_iter().enumerate() {
            write(&format!("sys/firmware/memmap/{index}/type"), "System RAM\n");
            write(&format!("sys/firmware/memmap/{index}/start"), &format!("{start:#x}\n"));
            write(&format!("sys/firmware/memmap/{index}/end"), &format!("{end:#x}\n"));
        }
        write("proc/cmdline", "root=/dev/sda1 ro\n");
        write("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu svm vmx_not sse\n");
        write("proc/sys/kernel/osrelease", "6.12\n");
        write("boot/config-6.12", "CONFIG_X86_PMEM_LEGACY=m\nCONFIG_FS_DAX=y\nCONFIG_KEXEC_FILE=y\n");
        write("etc/default/grub", "");
        for tool in ["update-grub", "kexec", "mkfs.ext4", "e2fsck"] {
            write(&format!("usr/sbin/{tool}"), "");
        }
        fs::create_dir_all(root.join("run/systemd/system")).unwrap();
        let target = SetupTarget { root: root.into(), program: "/opt/rekindle".into() };
        (directory, target)
    }

    /// Carries out the steps that write files.
    fn write_files(steps: &[SetupStep]) {
        for step in steps {
            if let SetupStep::Write { path, content } = step {
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, content).unwrap();
            }
        }
    }

    #[test]
    fn no_unit_can_hold_up_a_boot_or_a_shutdown_for_ever() {
        for (name, unit) in UNITS {
            let timeouts: Vec<_> = unit.lines().filter(|line| line.starts_with("Timeout")).collect();
            assert!(!timeouts.is_empty(), "{name} is of type oneshot, which has no timeout by itself");
            assert!(timeouts.iter().all(|line| !line.ends_with("infinity")), "{name}: {timeouts:?}");
        }
    }

    #[test]
    fn mounts_reach_the_host_and_guests_are_resumed_only_with_their_ram() {
        let unit = |wanted: &str| UNITS.iter().find(|(name, _)| *name == wanted).unwrap().1;
        let has = |name: &str, line: &str| unit(name).lines().any(|found| found == line);
        // Each of these options gives a unit a mount namespace, from which no mount reaches the host.
        let separating = |line: &str| {
            [
                "Protect",
                "Private",
                "ReadOnlyPaths=",
                "ReadWritePaths=",
                "InaccessiblePaths=",
                "BindPaths=",
                "MountFlags=",
            ]
            .iter()
            .any(|option| line.starts_with(option))
        };
        let harmless = ["PrivateMounts=no", "PrivateNetwork=yes", "ProtectClock=yes", "ProtectHostname=yes"];
        let separates: Vec<_> =
            unit(RAM_UNIT).lines().filter(|line| separating(line) && !harmless.contains(line)).collect();
        assert_eq!(separates, Vec::<&str>::new());
        // From systemd 254 on, a private network implies private mounts.
        assert!(has(RAM_UNIT, "PrivateMounts=no"));
        for line in ["Requires=rekindle-ram.service", "After=rekindle-ram.service"] {
            assert!(has(RESUME_UNIT, line), "{line}");
        }
        assert!(has(RESUME_UNIT, &format!("AssertPathIsMountPoint={RAM_DIR}")));
        assert!(has(RAM_UNIT, "Wants=rekindle-resume.service"), "a second attempt resumes them, too");
        for name in [RESUME_UNIT, SUSPEND_UNIT] {
            // Otherwise, ProtectClock= closes the devices of guests, before systemd 253.
            assert!(has(name, "DeviceAllow=block-* rw") && has(name, "DeviceAllow=char-* rw"), "{name}");
        }
    }

    #[test]
    fn a_second_run_writes_nothing() {
        let (_directory, target) = sample_host();
        let steps = plan_steps(&target, 2 * GIB, None).unwrap();
        write_files(&steps);
        let grub = fs::read_to_string(target.path("/etc/default/grub.d/60-rekindle.cfg")).unwrap();
        assert!(grub.contains("memmap=2048M!8192M"), "{grub}");
        let unit = fs::read_to_string(target.path("/etc/systemd/system/rekindle-suspend.service")).unwrap();
        assert!(unit.contains("ExecStop=/opt/rekindle host suspend --planned"), "{unit}");
        assert_eq!(
            fs::read_to_string(target.path("/etc/rekindle/host.toml")).unwrap(),
            "ram_dir = \"/var/lib/rekindle/ram\"\n"
        );
        let modules = fs::read_to_string(target.path("/etc/modules-load.d/rekindle.conf")).unwrap();
        assert_eq!(modules, "nd_e820\nnd_pmem\nkvm_amd\ntun\n");
        let again = plan_steps(&target, 2 * GIB, None).unwrap();
        assert!(!again.iter().any(SetupStep::is_write), "{again:#?}");
        let by_hand = again.iter().any(|step| matches!(step, SetupStep::ByHand { what } if what.contains("reboot")));
        assert!(by_hand, "the kernel was booted without the parameter: {again:#?}");
        fs::write(target.path("/proc/cmdline"), "root=/dev/sda1 memmap=2G!8G\n").unwrap();
        let booted = plan_steps(&target, 2 * GIB, None).unwrap();
        assert!(
            !booted.iter().any(|step| matches!(step, SetupStep::ByHand { .. } | SetupStep::Write { .. })),
            "{booted:#?}"
        );
    }

    #[test]
    fn units_of_a_package_are_used_and_copies_that_hide_them_are_removed() {
        let (_directory, mut target) = sample_host();
        target.program = INSTALLED_PROGRAM.into();
        let unit_steps = |target: &SetupTarget| -> Vec<_> {
            let steps = unit_file_steps(target);
            steps.into_iter().take(UNITS.len()).collect()
        };
        let copies = unit_steps(&target);
        assert!(copies.iter().all(SetupStep::is_write), "no package is installed: {copies:#?}");
        write_files(&copies);
        let directory = target.path("/usr/lib/systemd/system");
        fs::create_dir_all(&directory).unwrap();
        for (name, content) in UNITS {
            fs::write(directory.join(name), content).unwrap();
        }
        let removed = unit_steps(&target);
        for (step, (name, _)) in removed.iter().zip(UNITS) {
            let SetupStep::Remove { path, .. } = step else { panic!("{step:?}") };
            assert_eq!(*path, target.path("/etc/systemd/system").join(name));
            assert!(step.changes_units());
            fs::remove_file(path).unwrap();
        }
        assert!(unit_steps(&target).iter().all(|step| matches!(step, SetupStep::Done { .. })));
        // Another program than that of the package.
        target.program = "/opt/rekindle".into();
        assert!(unit_steps(&target).iter().all(SetupStep::is_write));
    }

    #[test]
    fn network_services_that_exist_get_a_processor_weight_and_no_others() {
        let (_directory, target) = sample_host();
        let folder = target.path("/usr/lib/systemd/system");
        fs::create_dir_all(&folder).unwrap();
        for service in ["systemd-udevd", "systemd-networkd"] {
            fs::write(folder.join(format!("{service}.service")), "").unwrap();
        }
        let steps = plan_steps(&target, GIB, None).unwrap();
        write_files(&steps);
        let drop_in = |service: &str| target.path(&format!("/etc/systemd/system/{service}.service.d/60-rekindle.conf"));
        for (service, is_installed) in [("systemd-udevd", true), ("systemd-networkd", true), ("NetworkManager", false)]
        {
            assert_eq!(drop_in(service).exists(), is_installed, "{service}");
        }
        assert!(fs::read_to_string(drop_in("systemd-udevd")).unwrap().contains("StartupCPUWeight="));
        for link in UNIT_LINKS.iter().map(|link| target.path(link)) {
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink("/dev/null", link).unwrap();
        }
        let needs_reload = |target: &SetupTarget| {
            let reload = SetupStep::run(&["systemctl", "daemon-reload"]);
            plan_steps(target, GIB, None).unwrap().contains(&reload)
        };
        assert!(!needs_reload(&target), "all files are as they should be");
        fs::remove_file(drop_in("systemd-networkd")).unwrap();
        assert!(needs_reload(&target), "systemd does not know a new drop-in until it reloads");
    }

    #[test]
    fn all_missing_requirements_and_conflicts_are_reported_together() {
        let (_directory, target) = sample_host();
        fs::remove_file(target.path("/usr/sbin/kexec")).unwrap();
        fs::write(target.path("/boot/config-6.12"), "CONFIG_FS_DAX=y\nCONFIG_KEXEC_FILE=y\n").unwrap();
        fs::create_dir_all(target.path("/etc/rekindle")).unwrap();
        fs::write(target.path("/etc/rekindle/host.toml"), "ram_dir = \"/mnt/ram\"\n").unwrap();
        let text = plan_steps(&target, 64 * GIB, None).unwrap_err().to_string();
        for word in ["kexec-tools", "CONFIG_X86_PMEM_LEGACY", "host.toml", "65536 MiB"] {
            assert!(text.contains(word), "{word} in {text}");
        }
    }

    #[test]
    fn other_settings_in_host_toml_are_kept() {
        let (_directory, target) = sample_host();
        fs::create_dir_all(target.path("/etc/rekindle")).unwrap();
        fs::write(target.path("/etc/rekindle/host.toml"), "save_dir = \"/srv\"\n").unwrap();
        write_files(&plan_steps(&target, GIB, None).unwrap());
        let text = fs::read_to_string(target.path("/etc/rekindle/host.toml")).unwrap();
        assert!(text.contains("save_dir = \"/srv\"") && text.contains("ram_dir"), "{text}");
    }

    #[test]
    fn without_grub_the_administrator_adds_the_parameter() {
        let (_directory, target) = sample_host();
        fs::remove_file(target.path("/etc/default/grub")).unwrap();
        let is_by_hand = |steps: &[SetupStep]| {
            steps.iter().any(|step| matches!(step, SetupStep::ByHand { what } if what.contains("memmap=")))
        };
        assert!(is_by_hand(&plan_steps(&target, GIB, None).unwrap()));
        fs::write(target.path("/proc/cmdline"), "memmap=1G!8G\n").unwrap();
        assert!(!is_by_hand(&plan_steps(&target, GIB, None).unwrap()));
    }
}
