//! The files and steps of `rekindle host init`.

use super::reserve::{Reserve, firmware_ram};
use super::{HostError, RESUME, SUSPEND, mount, run};
use rekindle_vm::hardware;
use rekindle_vm::host::Host;
use serde::Serialize;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Mount point of the file system in the reserved RAM.
const RAM_DIR: &str = "/var/lib/rekindle/ram";
const UNITS: &[(&str, &str)] = &[
    (SUSPEND, include_str!("../../../../../packaging/systemd/rekindle-suspend.service")),
    (RESUME, include_str!("../../../../../packaging/systemd/rekindle-resume.service")),
];
/// Services that create network cards and bridges during a boot: guests are unreachable before the network is up, so
/// these get as much processor time as the guests.
const NETWORK: &[&str] = &["systemd-udevd", "systemd-networkd", "NetworkManager", "networking"];
const CPU_WEIGHTS: &str = include_str!("../../../../../packaging/systemd/first.conf");
/// Path by which the units call this program.
const INSTALLED_PROGRAM: &str = "/usr/bin/rekindle";
/// Tools that a shutdown and a boot call, each with the package that contains it.
const TOOLS: &[(&str, &str)] = &[("kexec", "kexec-tools"), ("mkfs.ext4", "e2fsprogs"), ("e2fsck", "e2fsprogs")];
/// Required kernel options.
const OPTIONS: &[&str] = &["CONFIG_X86_PMEM_LEGACY", "CONFIG_FS_DAX", "CONFIG_KEXEC_FILE"];

/// One step of the setup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum SetupStep {
    /// This part of the setup is done already.
    Done { what: String },
    /// Write a file.
    Write { path: PathBuf, content: String },
    /// Run a command.
    Run { command: Vec<String> },
    /// Mount the RAM, if it is reserved already.
    Mount,
    /// A step that the administrator has to do.
    ByHand { what: String },
}

/// The host that is set up: the root of its files, and the path of this program.
#[derive(Debug, Clone)]
pub struct SetupTarget {
    /// `/`, except in tests.
    pub root: PathBuf,
    pub program: PathBuf,
}

impl SetupTarget {
    ///
    /// # Errors
    /// Errors of finding the path of this program.
    pub fn here() -> io::Result<Self> {
        let usual = Path::new(INSTALLED_PROGRAM);
        let me = std::env::current_exe()?;
        let is_usual = fs::canonicalize(usual).is_ok_and(|usual| usual == me);
        Ok(Self { root: "/".into(), program: if is_usual { usual.into() } else { me } })
    }

    fn path(&self, absolute: &str) -> PathBuf {
        self.root.join(absolute.trim_start_matches('/'))
    }
}

/// Returns the steps that reserve `bytes` of RAM, at `start` if given, and set the host up to use that RAM. Changes
/// nothing.
///
/// # Errors
/// [`HostError::Setup`] lists all missing requirements and conflicts.
pub fn steps(target: &SetupTarget, bytes: u64, start: Option<u64>) -> Result<Vec<SetupStep>, HostError> {
    let mut against = missing(target);
    let mut steps = Vec::new();
    match parameter(target, bytes, start) {
        Ok(more) => steps.extend(more),
        Err(why) => against.push(why),
    }
    match host_toml(target) {
        Ok(step) => steps.push(step),
        Err(why) => against.push(why),
    }
    if !against.is_empty() {
        let lines: Vec<_> = against.iter().map(|why| format!("  - {why}")).collect();
        return Err(HostError::Setup(format!(
            "this host cannot be set up; nothing was changed:\n{}",
            lines.join("\n")
        )));
    }
    let mut units = false;
    for (name, content) in UNITS {
        let content = content.replace(INSTALLED_PROGRAM, &target.program.to_string_lossy());
        let step = write_step(target.path(&format!("/etc/systemd/system/{name}")), content);
        units |= matches!(step, SetupStep::Write { .. });
        steps.push(step);
    }
    for service in NETWORK.iter().filter(|service| is_service(target, service)) {
        let step = write_step(
            target.path(&format!("/etc/systemd/system/{service}.service.d/60-rekindle.conf")),
            CPU_WEIGHTS.into(),
        );
        units |= matches!(step, SetupStep::Write { .. });
        steps.push(step);
    }
    steps.push(write_step(target.path("/etc/modules-load.d/rekindle.conf"), modules(target)));
    let enabled = [("sysinit.target", SUSPEND), ("multi-user.target", RESUME)];
    let link = |(wanted_by, name): &(&str, &str)| target.path(&format!("/etc/systemd/system/{wanted_by}.wants/{name}"));
    if units || !enabled.iter().all(|unit| link(unit).is_symlink()) {
        steps.push(command(&["systemctl", "daemon-reload"]));
        steps.push(command(&["systemctl", "--quiet", "enable", SUSPEND, RESUME]));
    } else {
        steps.push(SetupStep::Done { what: "the units are enabled".into() });
    }
    steps.push(SetupStep::Mount);
    Ok(steps)
}

fn command(words: &[&str]) -> SetupStep {
    SetupStep::Run { command: words.iter().map(ToString::to_string).collect() }
}

/// Returns the kernel modules that a resume needs, for the boot to load early: the driver of the reserved RAM, KVM,
/// taps.
fn modules(target: &SetupTarget) -> String {
    let cpuinfo = fs::read_to_string(target.path("/proc/cpuinfo")).unwrap_or_default();
    let all = ["nd_e820", "nd_pmem"].into_iter().chain(hardware::kvm_module(&cpuinfo)).chain(["tun"]);
    all.map(|module| format!("{module}\n")).collect()
}

/// Returns whether the host has this systemd service.
fn is_service(target: &SetupTarget, name: &str) -> bool {
    let places = ["/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];
    places.iter().any(|folder| target.path(folder).join(format!("{name}.service")).exists())
}

fn write_step(path: PathBuf, content: String) -> SetupStep {
    match fs::read_to_string(&path) {
        Ok(now) if now == content => SetupStep::Done { what: path.display().to_string() },
        _ => SetupStep::Write { path, content },
    }
}

/// Returns the missing requirements of the host, as texts.
fn missing(target: &SetupTarget) -> Vec<String> {
    let mut missing = Vec::new();
    if !target.path("/run/systemd/system").is_dir() {
        missing.push("this host does not run systemd, whose units suspend and resume guests".into());
    }
    for (tool, package) in TOOLS {
        let there = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].iter().any(|dir| target.path(dir).join(tool).exists());
        if !there {
            missing.push(format!("{tool} is not installed: apt-get install {package}"));
        }
    }
    let release = fs::read_to_string(target.path("/proc/sys/kernel/osrelease")).unwrap_or_default();
    let config = target.path(&format!("/boot/config-{}", release.trim()));
    if let Ok(config) = fs::read_to_string(&config) {
        let has = |option: &str| {
            config.lines().any(|line| [format!("{option}=y"), format!("{option}=m")].contains(&line.into()))
        };
        missing.extend(OPTIONS.iter().filter(|option| !has(option)).map(|option| {
            format!("the kernel {} was built without {option}; install another, e.g. linux-image-amd64", release.trim())
        }));
    }
    missing
}

/// Returns the steps that add the kernel parameter, in GRUB's configuration if that is set up as on Debian.
fn parameter(target: &SetupTarget, bytes: u64, start: Option<u64>) -> Result<Vec<SetupStep>, String> {
    let line = fs::read_to_string(target.path("/proc/cmdline")).map_err(|e| format!("/proc/cmdline: {e}"))?;
    let reserve = match Reserve::of(&line) {
        Some(now) if now.bytes == bytes && start.is_none_or(|start| start == now.start) => now,
        _ => {
            let ram = firmware_ram(&target.path("/sys")).map_err(|e| {
                format!(
                    "/sys/firmware/memmap: {e}, so the addresses of RAM are unknown: choose a range \
                     with --start, and add memmap=SIZE!START to the kernel's command line yourself"
                )
            })?;
            Reserve::choose(&ram, bytes, start)?
        }
    };
    let there = Reserve::of(&line) == Some(reserve);
    let path = target.path("/etc/default/grub.d/60-rekindle.cfg");
    if !target.path("/etc/default/grub").exists() || !target.path("/usr/sbin/update-grub").exists() {
        return Ok(vec![if there {
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
    let mut steps = vec![write_step(path, content)];
    if matches!(steps.as_slice(), [SetupStep::Write { .. }]) {
        steps.push(command(&["update-grub"]));
    }
    if !there {
        steps.push(SetupStep::ByHand {
            what: format!("reboot this host once: its kernel was booted without {reserve}"),
        });
    }
    Ok(steps)
}

/// Returns the step that configures the file system in the reserved RAM as the place of guests' RAM.
fn host_toml(target: &SetupTarget) -> Result<SetupStep, String> {
    let path = target.path("/etc/rekindle/host.toml");
    let line = format!("ram_dir = \"{RAM_DIR}\"\n");
    let now = match fs::read_to_string(&path) {
        Ok(now) => now,
        Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(format!("{}: {e}", path.display())),
    };
    let table: toml::Table = now.parse().map_err(|e| format!("{}: {e}", path.display()))?;
    match table.get("ram_dir").map(|value| value.as_str()) {
        Some(Some(RAM_DIR)) => Ok(SetupStep::Done { what: path.display().to_string() }),
        Some(_) => Err(format!(
            "{}: `ram_dir` is another directory; remove that line, or change it to: {}",
            path.display(),
            line.trim()
        )),
        None => Ok(SetupStep::Write { path, content: line + &now }),
    }
}

/// Carries out the result of [`steps`]. Returns the result of the mount if RAM is reserved already.
///
/// *On failure:* completed steps stay; running the command again continues from there.
pub fn carry_out(steps: &[SetupStep]) -> Result<Option<mount::MountOutcome>, HostError> {
    let mut mounted = None;
    for step in steps {
        match step {
            SetupStep::Done { .. } | SetupStep::ByHand { .. } => {}
            SetupStep::Write { path, content } => {
                let failed = |source| HostError::File { path: path.clone(), source };
                fs::create_dir_all(path.parent().unwrap_or(Path::new("/"))).map_err(failed)?;
                replace(path, content).map_err(failed)?;
            }
            SetupStep::Run { command } => {
                let words: Vec<_> = command.iter().map(String::as_str).collect();
                if let [program, arguments @ ..] = words.as_slice() {
                    run(program, arguments)?;
                }
            }
            SetupStep::Mount => mounted = mount_now()?,
        }
    }
    Ok(mounted)
}

/// Mounts the RAM and starts the units if this kernel was booted with the reserve. Otherwise the next boot does.
fn mount_now() -> Result<Option<mount::MountOutcome>, HostError> {
    let line = super::super::survived::command_line();
    let line = line.map_err(|source| HostError::File { path: "/proc/cmdline".into(), source })?;
    if Reserve::of(&line).is_none() {
        return Ok(None);
    }
    let host = Host::open().map_err(|e| HostError::Setup(e.to_string()))?;
    let mounted = mount::mount_ram(&host)?;
    run("systemctl", &["start", RESUME, SUSPEND])?;
    Ok(Some(mounted))
}

/// Writes a configuration file atomically. Every user can read it.
fn replace(path: &Path, content: &str) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    rekindle_vm::rundir::write_atomically(path, content.as_bytes())?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o644))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A host with 8 GiB, systemd, the tools and GRUB.
    fn host() -> (tempfile::TempDir, SetupTarget) {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let put = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (n, (start, end)) in [(0x1000, 2 * GIB - 1), (4 * GIB, 10 * GIB - 1)].into_iter().enumerate() {
            put(&format!("sys/firmware/memmap/{n}/type"), "System RAM\n");
            put(&format!("sys/firmware/memmap/{n}/start"), &format!("{start:#x}\n"));
            put(&format!("sys/firmware/memmap/{n}/end"), &format!("{end:#x}\n"));
        }
        put("proc/cmdline", "root=/dev/sda1 ro\n");
        put("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu svm vmx_not sse\n");
        put("proc/sys/kernel/osrelease", "6.12\n");
        put("boot/config-6.12", "CONFIG_X86_PMEM_LEGACY=m\nCONFIG_FS_DAX=y\nCONFIG_KEXEC_FILE=y\n");
        put("etc/default/grub", "");
        for tool in ["update-grub", "kexec", "mkfs.ext4", "e2fsck"] {
            put(&format!("usr/sbin/{tool}"), "");
        }
        fs::create_dir_all(root.join("run/systemd/system")).unwrap();
        let target = SetupTarget { root: root.into(), program: "/opt/rekindle".into() };
        (directory, target)
    }

    /// Carries out the steps that write files.
    fn write(steps: &[SetupStep]) {
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
    fn a_second_run_writes_nothing() {
        let (_directory, target) = host();
        let first = steps(&target, 2 * GIB, None).unwrap();
        write(&first);
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
        let again = steps(&target, 2 * GIB, None).unwrap();
        assert!(!again.iter().any(|step| matches!(step, SetupStep::Write { .. })), "{again:#?}");
        let by_hand = again.iter().any(|step| matches!(step, SetupStep::ByHand { what } if what.contains("reboot")));
        assert!(by_hand, "the kernel was booted without the parameter: {again:#?}");
        fs::write(target.path("/proc/cmdline"), "root=/dev/sda1 memmap=2G!8G\n").unwrap();
        let booted = steps(&target, 2 * GIB, None).unwrap();
        assert!(
            !booted.iter().any(|step| matches!(step, SetupStep::ByHand { .. } | SetupStep::Write { .. })),
            "{booted:#?}"
        );
    }

    #[test]
    fn network_services_that_exist_get_a_processor_weight_and_no_others() {
        let (_directory, target) = host();
        let folder = target.path("/usr/lib/systemd/system");
        fs::create_dir_all(&folder).unwrap();
        for service in ["systemd-udevd", "systemd-networkd"] {
            fs::write(folder.join(format!("{service}.service")), "").unwrap();
        }
        let first = steps(&target, GIB, None).unwrap();
        write(&first);
        let drop_in = |service: &str| target.path(&format!("/etc/systemd/system/{service}.service.d/60-rekindle.conf"));
        for (service, has) in [("systemd-udevd", true), ("systemd-networkd", true), ("NetworkManager", false)] {
            assert_eq!(drop_in(service).exists(), has, "{service}");
        }
        assert!(fs::read_to_string(drop_in("systemd-udevd")).unwrap().contains("StartupCPUWeight="));
        for unit in [SUSPEND, RESUME] {
            let wants = if unit == RESUME { "multi-user.target.wants" } else { "sysinit.target.wants" };
            let wants = target.path(&format!("/etc/systemd/system/{wants}"));
            fs::create_dir_all(&wants).unwrap();
            std::os::unix::fs::symlink("/dev/null", wants.join(unit)).unwrap();
        }
        let reloads = |target: &SetupTarget| {
            let reload = command(&["systemctl", "daemon-reload"]);
            steps(target, GIB, None).unwrap().contains(&reload)
        };
        assert!(!reloads(&target), "all is there");
        fs::remove_file(drop_in("systemd-networkd")).unwrap();
        assert!(reloads(&target), "systemd does not know a new drop-in until it reloads");
    }

    #[test]
    fn all_missing_requirements_and_conflicts_are_reported_together() {
        let (_directory, target) = host();
        fs::remove_file(target.path("/usr/sbin/kexec")).unwrap();
        fs::write(target.path("/boot/config-6.12"), "CONFIG_FS_DAX=y\nCONFIG_KEXEC_FILE=y\n").unwrap();
        fs::create_dir_all(target.path("/etc/rekindle")).unwrap();
        fs::write(target.path("/etc/rekindle/host.toml"), "ram_dir = \"/mnt/ram\"\n").unwrap();
        let text = steps(&target, 64 * GIB, None).unwrap_err().to_string();
        for word in ["kexec-tools", "CONFIG_X86_PMEM_LEGACY", "host.toml", "65536 MiB"] {
            assert!(text.contains(word), "{word} in {text}");
        }
    }

    #[test]
    fn other_settings_in_host_toml_are_kept() {
        let (_directory, target) = host();
        fs::create_dir_all(target.path("/etc/rekindle")).unwrap();
        fs::write(target.path("/etc/rekindle/host.toml"), "save_dir = \"/srv\"\n").unwrap();
        write(&steps(&target, GIB, None).unwrap());
        let text = fs::read_to_string(target.path("/etc/rekindle/host.toml")).unwrap();
        assert!(text.contains("save_dir = \"/srv\"") && text.contains("ram_dir"), "{text}");
    }

    #[test]
    fn without_grub_the_administrator_adds_the_parameter() {
        let (_directory, target) = host();
        fs::remove_file(target.path("/etc/default/grub")).unwrap();
        let by_hand = |steps: &[SetupStep]| {
            steps.iter().any(|step| matches!(step, SetupStep::ByHand { what } if what.contains("memmap=")))
        };
        assert!(by_hand(&steps(&target, GIB, None).unwrap()));
        fs::write(target.path("/proc/cmdline"), "memmap=1G!8G\n").unwrap();
        assert!(!by_hand(&steps(&target, GIB, None).unwrap()));
    }
}
