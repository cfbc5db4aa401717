//! The programs and kernel options that a host must have before it can be set up.

use super::target::SetupTarget;
use std::fs;

/// Tools that a shutdown and a boot call, each with the package that contains it.
const TOOLS: &[(&str, &str)] = &[("kexec", "kexec-tools"), ("mkfs.ext4", "e2fsprogs"), ("e2fsck", "e2fsprogs")];
const TOOL_DIRS: &[&str] = &["/usr/sbin", "/sbin", "/usr/bin", "/bin"];
const KERNEL_OPTIONS: &[&str] = &["CONFIG_X86_PMEM_LEGACY", "CONFIG_FS_DAX", "CONFIG_KEXEC_FILE"];

/// Returns a text for each requirement that the host does not meet.
pub(super) fn missing_requirements(target: &SetupTarget) -> Vec<String> {
    let mut missing = Vec::new();
    if !target.path("/run/systemd/system").is_dir() {
        missing.push("this host does not run systemd, whose units suspend and resume guests".into());
    }
    for (tool, package) in TOOLS {
        if !target.has_file(TOOL_DIRS, tool) {
            missing.push(format!("{tool} is not installed: apt-get install {package}"));
        }
    }
    missing.extend(missing_kernel_options(target));
    missing
}

/// Checks the options of the running kernel, if its configuration is installed.
fn missing_kernel_options(target: &SetupTarget) -> Vec<String> {
    let release = fs::read_to_string(target.path("/proc/sys/kernel/osrelease")).unwrap_or_default();
    let release = release.trim();
    let Ok(config) = fs::read_to_string(target.path(&format!("/boot/config-{release}"))) else { return Vec::new() };
    let is_set = |option: &str| {
        let (built_in, module) = (format!("{option}=y"), format!("{option}=m"));
        config.lines().any(|line| line == built_in || line == module)
    };
    let missing = KERNEL_OPTIONS.iter().filter(|option| !is_set(option));
    missing
        .map(|option| {
            format!("the kernel {release} was built without {option}; install another, e.g. linux-image-amd64")
        })
        .collect()
}
