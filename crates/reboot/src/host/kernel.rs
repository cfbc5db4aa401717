//! The kernel that a host reboots into: finds the newest one that is installed, and loads it for kexec.

use super::HostError;
use super::survived::{TOKEN_PARAMETER, command_line};
use rekindle_kernel::kexec;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

/// An installed kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstalledKernel {
    /// The kernel's version, which is the name of its folder of modules.
    pub version: String,
    pub image: PathBuf,
    pub initrd: Option<PathBuf>,
}

impl InstalledKernel {
    /// Returns the newest kernel under `root` whose modules are installed, with its initial RAM disk if there is one.
    ///
    /// # Errors
    /// [`HostError::Kernel`] if there is no such kernel.
    pub(super) fn newest(root: &Path) -> Result<Self, HostError> {
        let boot = root.join("boot");
        let entries = fs::read_dir(&boot).map_err(HostError::file(&boot))?;
        let file_names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let versions = file_names.filter_map(|name| name.strip_prefix("vmlinuz-").map(str::to_owned));
        // A kernel without its modules would not find its devices.
        let with_modules = versions.filter(|version| root.join("lib/modules").join(version).is_dir());
        let Some(version) = with_modules.max_by_key(|version| version_key(version)) else {
            return Err(HostError::Kernel(format!(
                "no kernel is installed in {} (vmlinuz-VERSION, with /lib/modules/VERSION)",
                boot.display()
            )));
        };
        let initrd_names =
            [format!("initrd.img-{version}"), format!("initramfs-{version}.img"), format!("initrd-{version}")];
        let initrd = initrd_names.iter().map(|name| boot.join(name)).find(|path| path.exists());
        Ok(Self { image: boot.join(format!("vmlinuz-{version}")), initrd, version })
    }

    /// Loads the kernel, so that `systemctl kexec` enters it. Its command line holds `token`.
    pub(super) fn load(&self, token: &str) -> Result<(), HostError> {
        let current = command_line().map_err(HostError::file(Path::new("/proc/cmdline")))?;
        let next = next_command_line(&current, token);
        kexec::load(&self.image, self.initrd.as_deref(), &next).map_err(HostError::Load)
    }
}

/// One number of a version, and the text before it.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct VersionPart {
    number: u64,
    text_before: String,
}

/// Splits a version for comparison, so that its numbers compare by value.
fn version_key(version: &str) -> Vec<VersionPart> {
    let mut parts = Vec::new();
    let mut unread = version;
    while !unread.is_empty() {
        let (text, from_number) = split_before(unread, |c| c.is_ascii_digit());
        let (number, from_text) = split_before(from_number, |c| !c.is_ascii_digit());
        // Text sorts before a number in the same position: 6.1-rc1 before 6.1.1.
        parts.push(VersionPart { number: number.parse().unwrap_or(0), text_before: text.replace('-', " ") });
        unread = from_text;
    }
    parts
}

/// Splits `text` before its first character for which `is_next` is true.
fn split_before(text: &str, is_next: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(is_next).unwrap_or(text.len()))
}

/// Returns the next kernel's command line: the current one without the boot loader's parameters, plus the token.
fn next_command_line(current: &str, token: &str) -> String {
    let is_kept = |word: &&str| !["BOOT_IMAGE=", "initrd=", TOKEN_PARAMETER].iter().any(|name| word.starts_with(name));
    let kept = current.split_whitespace().filter(is_kept);
    kept.map(str::to_owned).chain([format!("{TOKEN_PARAMETER}{token}")]).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_kernel_has_its_modules_and_its_initrd() {
        let root = tempfile::tempdir().unwrap();
        assert!(matches!(InstalledKernel::newest(root.path()), Err(HostError::File { .. })));
        fs::create_dir(root.path().join("boot")).unwrap();
        assert!(matches!(InstalledKernel::newest(root.path()), Err(HostError::Kernel(_))));
        for version in ["6.9.1-1-amd64", "6.10.2-1-amd64", "6.12.95+deb12-cloud-amd64", "6.13-rc1"] {
            fs::write(root.path().join(format!("boot/vmlinuz-{version}")), "").unwrap();
        }
        for version in ["6.9.1-1-amd64", "6.10.2-1-amd64", "6.12.95+deb12-cloud-amd64"] {
            fs::create_dir_all(root.path().join("lib/modules").join(version)).unwrap();
        }
        fs::write(root.path().join("boot/initrd.img-6.12.95+deb12-cloud-amd64"), "").unwrap();
        let newest = InstalledKernel::newest(root.path()).unwrap();
        assert_eq!(newest.version, "6.12.95+deb12-cloud-amd64");
        assert!(newest.initrd.is_some_and(|path| path.ends_with("initrd.img-6.12.95+deb12-cloud-amd64")));
    }

    #[test]
    fn versions_are_compared_by_their_numbers() {
        let mut versions = ["6.12.9", "6.2", "6.12.10", "5.19.17", "6.12"];
        versions.sort_by_key(|version| version_key(version));
        assert_eq!(versions, ["5.19.17", "6.2", "6.12", "6.12.9", "6.12.10"]);
    }

    #[test]
    fn the_next_command_line_has_one_token_and_no_words_of_the_boot_loader() {
        let current = "BOOT_IMAGE=/vmlinuz root=/dev/vda ro memmap=1G!4G rekindle.token=old initrd=x quiet\n";
        assert_eq!(next_command_line(current, "new"), "root=/dev/vda ro memmap=1G!4G quiet rekindle.token=new");
    }
}
