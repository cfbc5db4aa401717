//! The QEMU binaries and guest images that the tests need. Environment variables may name them; otherwise the
//! repository's scripts install and build them.

use crate::micro::KERNEL;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

fn repository_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn from_environment(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Runs a script of the repository and returns its standard output.
fn run_script(name: &str, arguments: &[&str]) -> String {
    let output = Command::new(repository_root().join(name)).args(arguments).output();
    let output = output.unwrap_or_else(|e| panic!("{name}: {e}; run: scripts/setup"));
    assert!(output.status.success(), "{name} failed; run: scripts/setup\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// Returns the QEMU that the environment variable `variable` names, or else the one that `scripts/setup` reports for
/// that variable.
fn find_qemu(variable: &str) -> PathBuf {
    static SETTINGS: OnceLock<String> = OnceLock::new();
    let path = from_environment(variable).unwrap_or_else(|| {
        let settings = SETTINGS.get_or_init(|| run_script("scripts/setup", &["--print-env"]));
        let value = settings.lines().filter_map(|line| line.split_once('=')).find(|(key, _)| *key == variable);
        value.map(|(_, value)| value.into()).unwrap_or_default()
    });
    assert!(path.exists(), "{variable}: {} is missing; run: scripts/setup", path.display());
    path
}

/// Returns QEMU 7.2.
pub fn qemu_old() -> &'static Path {
    static OLD: OnceLock<PathBuf> = OnceLock::new();
    OLD.get_or_init(|| find_qemu("QEMU_OLD"))
}

/// Returns the QEMU of most tests: version 10, unless `QEMU_NEW` names another one.
pub fn qemu_new() -> &'static Path {
    static NEW: OnceLock<PathBuf> = OnceLock::new();
    NEW.get_or_init(|| find_qemu("QEMU_NEW"))
}

/// Returns QEMU 11. The path is a script that starts the binary with its own dynamic loader.
pub fn qemu_newest() -> &'static Path {
    static NEWEST: OnceLock<PathBuf> = OnceLock::new();
    NEWEST.get_or_init(|| find_qemu("QEMU_NEWEST"))
}

/// Returns a `host.toml` with the lines `more` that lets checkpoints use the QEMUs and the guest images of the tests, and
/// the files in `directory`.
pub fn host_config(more: &str, directory: &Path) -> String {
    let images = ["REKINDLE_TEST_MICRO", "REKINDLE_TEST_LEAK", "REKINDLE_TEST_DEBIAN"].map(from_environment);
    let home = from_environment("HOME").map(|home| home.join(".cache/rekindle"));
    let cache = from_environment("REKINDLE_CACHE").or(home);
    let paths: Vec<_> = images.into_iter().flatten().chain(cache).chain([directory.to_owned()]).collect();
    let qemus = [qemu_old(), qemu_new(), qemu_newest()];
    format!("{more}\n[restore]\nqemu = {qemus:?}\npaths = {paths:?}\n")
}

/// A guest image: the directory that a build script prints on its last line.
struct Image {
    /// The environment variable that names the directory of an image that has been built.
    variable: &'static str,
    build_command: &'static [&'static str],
    /// The files that the directory must contain.
    files: &'static [&'static str],
}

impl Image {
    fn directory(&self) -> PathBuf {
        let (program, arguments) = self.build_command.split_first().expect("a script");
        let directory = from_environment(self.variable)
            .unwrap_or_else(|| run_script(program, arguments).lines().last().unwrap_or_default().into());
        for file in self.files {
            let path = directory.join(file);
            assert!(path.exists(), "{} is missing; run: {}", path.display(), self.build_command.join(" "));
        }
        directory
    }
}

/// Returns the directory of the micro guest: the kernel as `vmlinux` and, compressed, `vmlinuz`; and `initrd`.
pub fn micro() -> &'static Path {
    const MICRO: Image = Image {
        variable: "REKINDLE_TEST_MICRO",
        build_command: &["tests/images/build", "micro"],
        files: &[KERNEL, "vmlinuz", "initrd"],
    };
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| MICRO.directory())
}

/// Returns the directory of the micro guest that can leak its kernel's memory: the same files.
pub fn leaky() -> &'static Path {
    const LEAKY: Image = Image {
        variable: "REKINDLE_TEST_LEAK",
        build_command: &["tests/images/leak/build"],
        files: &[KERNEL, "vmlinuz", "initrd"],
    };
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| LEAKY.directory())
}

/// Returns the directory of the Debian guest: `vmlinuz`, `initrd`, `disk.raw` and a second disk, `data.raw`.
pub fn debian() -> &'static Path {
    const DEBIAN: Image = Image {
        variable: "REKINDLE_TEST_DEBIAN",
        build_command: &["tests/images/build", "immutable"],
        files: &["vmlinuz", "initrd", "disk.raw", "data.raw"],
    };
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| DEBIAN.directory())
}
