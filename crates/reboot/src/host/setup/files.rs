//! The files and steps of `rekindle host init`.

use super::reserve::{Reserve, firmware_ram};
use super::{HostError, RESUME, SUSPEND, mount, run};
use rekindle_vm::hardware;
use rekindle_vm::host::Host;
use serde::Serialize;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where guests' RAM lives.
const RAM: &str = "/var/lib/rekindle/ram";
const UNITS: &[(&str, &str)] = &[
    (SUSPEND, include_str!("../../../../../packaging/systemd/rekindle-suspend.service")),
    (RESUME, include_str!("../../../../../packaging/systemd/rekindle-resume.service")),
];
/// Who makes network cards and bridges of a host that boots: as much as the guests themselves, the network has to be
/// there for them to be heard.
const NETWORK: &[&str] = &["systemd-udevd", "systemd-networkd", "NetworkManager", "networking"];
const FIRST: &str = include_str!("../../../../../packaging/systemd/first.conf");
/// As which the units call this program.
const PROGRAM: &str = "/usr/bin/rekindle";
/// What a shutdown and a boot call.
const TOOLS: &[(&str, &str)] = &[("kexec", "kexec-tools"), ("mkfs.ext4", "e2fsprogs"), ("e2fsck", "e2fsprogs")];
/// What the kernel must be able to do.
const OPTIONS: &[&str] = &["CONFIG_X86_PMEM_LEGACY", "CONFIG_FS_DAX", "CONFIG_KEXEC_FILE"];

/// What a step is to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum Step {
    /// It is as it should be.
    Done {
        /// What.
        what: String,
    },
    /// A file is written.
    Write {
        /// The file.
        path: PathBuf,
        /// What it is going to hold.
        content: String,
    },
    /// A command is run.
    Run {
        /// With its arguments.
        command: Vec<String>,
    },
    /// The RAM is mounted, if it is reserved already.
    Mount,
    /// Only its owner can do it.
    ByHand {
        /// What.
        what: String,
    },
}

/// The host that is set up: its files below a root, and this program.
#[derive(Debug, Clone)]
pub struct Place {
    /// `/`, but for tests.
    pub root: PathBuf,
    /// This program.
    pub program: PathBuf,
}

impl Place {
    /// This host.
    ///
    /// # Errors
    /// When this program does not know where it is.
    pub fn here() -> io::Result<Self> {
        let usual = Path::new(PROGRAM);
        let me = std::env::current_exe()?;
        let is_usual = fs::canonicalize(usual).is_ok_and(|usual| usual == me);
        Ok(Self { root: "/".into(), program: if is_usual { usual.into() } else { me } })
    }

    fn path(&self, absolute: &str) -> PathBuf {
        self.root.join(absolute.trim_start_matches('/'))
    }
}

/// What is to be done so that `bytes` of RAM outlive a kernel, at `start` if that is given. Nothing is changed.
///
/// # Errors
/// [`HostError::Setup`] names everything that cannot work or is in the way.
pub fn steps(place: &Place, bytes: u64, start: Option<u64>) -> Result<Vec<Step>, HostError> {
    let mut against = lacking(place);
    let mut steps = Vec::new();
    match parameter(place, bytes, start) {
        Ok(more) => steps.extend(more),
        Err(why) => against.push(why),
    }
    match host_toml(place) {
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
        let content = content.replace(PROGRAM, &place.program.to_string_lossy());
        let step = written(place.path(&format!("/etc/systemd/system/{name}")), content);
        units |= matches!(step, Step::Write { .. });
        steps.push(step);
    }
    for service in NETWORK.iter().filter(|service| is_service(place, service)) {
        let step =
            written(place.path(&format!("/etc/systemd/system/{service}.service.d/60-rekindle.conf")), FIRST.into());
        units |= matches!(step, Step::Write { .. });
        steps.push(step);
    }
    steps.push(written(place.path("/etc/modules-load.d/rekindle.conf"), modules(place)));
    let enabled = [("sysinit.target", SUSPEND), ("multi-user.target", RESUME)];
    let link = |(target, name): &(&str, &str)| place.path(&format!("/etc/systemd/system/{target}.wants/{name}"));
    if units || !enabled.iter().all(|unit| link(unit).is_symlink()) {
        steps.push(command(&["systemctl", "daemon-reload"]));
        steps.push(command(&["systemctl", "--quiet", "enable", SUSPEND, RESUME]));
    } else {
        steps.push(Step::Done { what: "the units are enabled".into() });
    }
    steps.push(Step::Mount);
    Ok(steps)
}

fn command(words: &[&str]) -> Step {
    Step::Run { command: words.iter().map(ToString::to_string).collect() }
}

/// What a resume needs of the kernel, for a boot to load beforehand: the reserved RAM's driver, KVM, taps.
fn modules(place: &Place) -> String {
    let cpuinfo = fs::read_to_string(place.path("/proc/cpuinfo")).unwrap_or_default();
    let all = ["nd_e820", "nd_pmem"].into_iter().chain(hardware::kvm_module(&cpuinfo)).chain(["tun"]);
    all.map(|module| format!("{module}\n")).collect()
}

/// Whether this host has this service at all.
fn is_service(place: &Place, name: &str) -> bool {
    let places = ["/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];
    places.iter().any(|folder| place.path(folder).join(format!("{name}.service")).exists())
}

fn written(path: PathBuf, content: String) -> Step {
    match fs::read_to_string(&path) {
        Ok(now) if now == content => Step::Done { what: path.display().to_string() },
        _ => Step::Write { path, content },
    }
}

/// What this host does not have.
fn lacking(place: &Place) -> Vec<String> {
    let mut lacking = Vec::new();
    if !place.path("/run/systemd/system").is_dir() {
        lacking.push("this host is not run by systemd, whose units suspend and resume guests".into());
    }
    for (tool, package) in TOOLS {
        let there = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].iter().any(|dir| place.path(dir).join(tool).exists());
        if !there {
            lacking.push(format!("there is no {tool}: apt-get install {package}"));
        }
    }
    let release = fs::read_to_string(place.path("/proc/sys/kernel/osrelease")).unwrap_or_default();
    let config = place.path(&format!("/boot/config-{}", release.trim()));
    if let Ok(config) = fs::read_to_string(&config) {
        let has = |option: &str| {
            config.lines().any(|line| [format!("{option}=y"), format!("{option}=m")].contains(&line.into()))
        };
        lacking.extend(OPTIONS.iter().filter(|option| !has(option)).map(|option| {
            format!("the kernel {} was built without {option}; install another, e.g. linux-image-amd64", release.trim())
        }));
    }
    lacking
}

/// The kernel's parameter, in the boot loader's configuration if that is GRUB's as Debian has it.
fn parameter(place: &Place, bytes: u64, start: Option<u64>) -> Result<Vec<Step>, String> {
    let line = fs::read_to_string(place.path("/proc/cmdline")).map_err(|e| format!("/proc/cmdline: {e}"))?;
    let reserve = match Reserve::of(&line) {
        Some(now) if now.bytes == bytes && start.is_none_or(|start| start == now.start) => now,
        _ => {
            let ram = firmware_ram(&place.path("/sys"))
                .map_err(|e| format!("/sys/firmware/memmap: {e}; which addresses are RAM is not known: name a place with --start, and put memmap=SIZE!START on the kernel's command line yourself"))?;
            Reserve::choose(&ram, bytes, start)?
        }
    };
    let there = Reserve::of(&line) == Some(reserve);
    let path = place.path("/etc/default/grub.d/60-rekindle.cfg");
    if !place.path("/etc/default/grub").exists() || !place.path("/usr/sbin/update-grub").exists() {
        return Ok(vec![if there {
            Step::Done { what: format!("{reserve} is on this kernel's command line") }
        } else {
            let what =
                format!("put {reserve} on the kernel's command line: this host has no GRUB as Debian sets it up");
            Step::ByHand { what }
        }]);
    }
    let content = format!(
        "# Written by `rekindle host init`: RAM for guests that outlives the kernel.\n\
         GRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX {reserve}\"\n"
    );
    let mut steps = vec![written(path, content)];
    if matches!(steps.as_slice(), [Step::Write { .. }]) {
        steps.push(command(&["update-grub"]));
    }
    if !there {
        steps.push(Step::ByHand { what: format!("reboot this host once: its kernel was booted without {reserve}") });
    }
    Ok(steps)
}

/// Guests' RAM is to be in the file system that outlives the kernel.
fn host_toml(place: &Place) -> Result<Step, String> {
    let path = place.path("/etc/rekindle/host.toml");
    let line = format!("ram_dir = \"{RAM}\"\n");
    let now = match fs::read_to_string(&path) {
        Ok(now) => now,
        Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(format!("{}: {e}", path.display())),
    };
    let table: toml::Table = now.parse().map_err(|e| format!("{}: {e}", path.display()))?;
    match table.get("ram_dir").map(|value| value.as_str()) {
        Some(Some(RAM)) => Ok(Step::Done { what: path.display().to_string() }),
        Some(_) => Err(format!(
            "{}: `ram_dir` names another place for guests' RAM; take that line out, or make it: {}",
            path.display(),
            line.trim()
        )),
        None => Ok(Step::Write { path, content: line + &now }),
    }
}

/// Do what [`steps`] has found. Gives what was mounted, if it could be.
///
/// *On failure:* what was done before stays, and the same command goes on.
///
/// # Errors
/// [`HostError`].
pub fn carry_out(steps: &[Step]) -> Result<Option<mount::Mounted>, HostError> {
    let mut mounted = None;
    for step in steps {
        match step {
            Step::Done { .. } | Step::ByHand { .. } => {}
            Step::Write { path, content } => {
                let failed = |source| HostError::File { path: path.clone(), source };
                fs::create_dir_all(path.parent().unwrap_or(Path::new("/"))).map_err(failed)?;
                replace(path, content).map_err(failed)?;
            }
            Step::Run { command } => {
                let words: Vec<_> = command.iter().map(String::as_str).collect();
                if let [program, arguments @ ..] = words.as_slice() {
                    run(program, arguments)?;
                }
            }
            Step::Mount => mounted = mount_now()?,
        }
    }
    Ok(mounted)
}

/// In a kernel that was booted with the reserve, all is begun at once; otherwise the next boot begins it.
fn mount_now() -> Result<Option<mount::Mounted>, HostError> {
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

/// Configuration that all may read; whole or not at all.
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
    fn host() -> (tempfile::TempDir, Place) {
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
        let place = Place { root: root.into(), program: "/opt/rekindle".into() };
        (directory, place)
    }

    /// Do the part of it that is files.
    fn write(steps: &[Step]) {
        for step in steps {
            if let Step::Write { path, content } = step {
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
    fn a_second_time_there_is_nothing_to_write() {
        let (_directory, place) = host();
        let first = steps(&place, 2 * GIB, None).unwrap();
        write(&first);
        let grub = fs::read_to_string(place.path("/etc/default/grub.d/60-rekindle.cfg")).unwrap();
        assert!(grub.contains("memmap=2048M!8192M"), "{grub}");
        let unit = fs::read_to_string(place.path("/etc/systemd/system/rekindle-suspend.service")).unwrap();
        assert!(unit.contains("ExecStop=/opt/rekindle host suspend --planned"), "{unit}");
        assert_eq!(
            fs::read_to_string(place.path("/etc/rekindle/host.toml")).unwrap(),
            "ram_dir = \"/var/lib/rekindle/ram\"\n"
        );
        let modules = fs::read_to_string(place.path("/etc/modules-load.d/rekindle.conf")).unwrap();
        assert_eq!(modules, "nd_e820\nnd_pmem\nkvm_amd\ntun\n");
        let again = steps(&place, 2 * GIB, None).unwrap();
        assert!(!again.iter().any(|step| matches!(step, Step::Write { .. })), "{again:#?}");
        let by_hand = again.iter().any(|step| matches!(step, Step::ByHand { what } if what.contains("reboot")));
        assert!(by_hand, "the kernel was booted without: {again:#?}");
        fs::write(place.path("/proc/cmdline"), "root=/dev/sda1 memmap=2G!8G\n").unwrap();
        let booted = steps(&place, 2 * GIB, None).unwrap();
        assert!(!booted.iter().any(|step| matches!(step, Step::ByHand { .. } | Step::Write { .. })), "{booted:#?}");
    }

    #[test]
    fn the_network_a_host_has_comes_first_and_no_other() {
        let (_directory, place) = host();
        let folder = place.path("/usr/lib/systemd/system");
        fs::create_dir_all(&folder).unwrap();
        for service in ["systemd-udevd", "systemd-networkd"] {
            fs::write(folder.join(format!("{service}.service")), "").unwrap();
        }
        let first = steps(&place, GIB, None).unwrap();
        write(&first);
        let drop_in = |service: &str| place.path(&format!("/etc/systemd/system/{service}.service.d/60-rekindle.conf"));
        for (service, has) in [("systemd-udevd", true), ("systemd-networkd", true), ("NetworkManager", false)] {
            assert_eq!(drop_in(service).exists(), has, "{service}");
        }
        assert!(fs::read_to_string(drop_in("systemd-udevd")).unwrap().contains("StartupCPUWeight="));
        for unit in [SUSPEND, RESUME] {
            let wants = if unit == RESUME { "multi-user.target.wants" } else { "sysinit.target.wants" };
            let wants = place.path(&format!("/etc/systemd/system/{wants}"));
            fs::create_dir_all(&wants).unwrap();
            std::os::unix::fs::symlink("/dev/null", wants.join(unit)).unwrap();
        }
        let reloads = |place: &Place| {
            let reload = command(&["systemctl", "daemon-reload"]);
            steps(place, GIB, None).unwrap().contains(&reload)
        };
        assert!(!reloads(&place), "all is there");
        fs::remove_file(drop_in("systemd-networkd")).unwrap();
        assert!(reloads(&place), "a drop-in that is written is nothing to systemd until it reads it");
    }

    #[test]
    fn what_cannot_work_and_what_is_in_the_way_is_named_at_once() {
        let (_directory, place) = host();
        fs::remove_file(place.path("/usr/sbin/kexec")).unwrap();
        fs::write(place.path("/boot/config-6.12"), "CONFIG_FS_DAX=y\nCONFIG_KEXEC_FILE=y\n").unwrap();
        fs::create_dir_all(place.path("/etc/rekindle")).unwrap();
        fs::write(place.path("/etc/rekindle/host.toml"), "ram_dir = \"/mnt/ram\"\n").unwrap();
        let text = steps(&place, 64 * GIB, None).unwrap_err().to_string();
        for word in ["kexec-tools", "CONFIG_X86_PMEM_LEGACY", "host.toml", "65536 MiB"] {
            assert!(text.contains(word), "{word} in {text}");
        }
    }

    #[test]
    fn what_else_is_in_host_toml_stays() {
        let (_directory, place) = host();
        fs::create_dir_all(place.path("/etc/rekindle")).unwrap();
        fs::write(place.path("/etc/rekindle/host.toml"), "save_dir = \"/srv\"\n").unwrap();
        write(&steps(&place, GIB, None).unwrap());
        let text = fs::read_to_string(place.path("/etc/rekindle/host.toml")).unwrap();
        assert!(text.contains("save_dir = \"/srv\"") && text.contains("ram_dir"), "{text}");
    }

    #[test]
    fn without_grub_the_parameter_is_its_owners() {
        let (_directory, place) = host();
        fs::remove_file(place.path("/etc/default/grub")).unwrap();
        let by_hand =
            |steps: &[Step]| steps.iter().any(|step| matches!(step, Step::ByHand { what } if what.contains("memmap=")));
        assert!(by_hand(&steps(&place, GIB, None).unwrap()));
        fs::write(place.path("/proc/cmdline"), "memmap=1G!8G\n").unwrap();
        assert!(!by_hand(&steps(&place, GIB, None).unwrap()));
    }
}
