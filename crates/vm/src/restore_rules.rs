//! What checkpoints and VMs that arrive from other hosts may use of this host: `[restore]` in `host.toml`.
//!
//! A store may be written by other hosts. So the programs, files and QEMU arguments that a checkpoint names are only
//! requests. These rules answer them: by default, the QEMUs that the operating system has installed, the usual
//! directories of images, and no further arguments. What `host.toml` lists is allowed as well.

pub(crate) mod image_layers;

use rekindle_qemu::host_access::option_text;
use serde::Deserialize;
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

/// Directories in which the operating system installs QEMU.
const PROGRAM_DIRECTORIES: [&str; 3] = ["/usr/bin", "/usr/local/bin", "/usr/libexec"];
/// Beginnings of the names of QEMU's programs.
const PROGRAM_NAMES: [&str; 2] = ["qemu-system-", "qemu-kvm"];
/// Limit on the images below an image.
const MAX_LAYERS: u32 = 64;
/// Directories of images and firmware.
const FILE_DIRECTORIES: [&str; 7] = [
    "/var/lib/libvirt/images",
    "/var/lib/libvirt/boot",
    "/var/lib/rekindle/images",
    "/usr/share/OVMF",
    "/usr/share/AAVMF",
    "/usr/share/qemu",
    "/usr/share/seabios",
];

/// `[restore]` in `host.toml`. Each list is in addition to the defaults.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RestoreConfig {
    #[serde(default)]
    qemu: Vec<PathBuf>,
    #[serde(default)]
    arguments: Vec<String>,
    #[serde(default)]
    paths: Vec<PathBuf>,
    #[serde(default)]
    elements: Vec<String>,
}

/// The rules of this host.
#[derive(Debug, Clone)]
pub struct RestoreRules {
    /// Path of `host.toml`, for messages.
    config_path: PathBuf,
    config: RestoreConfig,
}

impl RestoreRules {
    pub(crate) fn new(config_path: PathBuf, config: RestoreConfig) -> Result<Self, String> {
        let mut paths = config.qemu.iter().chain(&config.paths);
        if let Some(relative) = paths.find(|path| !path.is_absolute()) {
            return Err(format!("[restore]: {}: not an absolute path", relative.display()));
        }
        Ok(Self { config_path, config })
    }

    /// Checks that a checkpoint may be restored with the QEMU at `path`.
    ///
    /// # Errors
    /// A text: the program, and how to allow it.
    pub fn check_program(&self, path: &Path) -> Result<(), String> {
        let Some(found) = find_program(path) else {
            return Err(format!("QEMU {}: this host has no such program", path.display()));
        };
        let is_listed = |listed: &PathBuf| fs::canonicalize(listed).is_ok_and(|listed| listed == found);
        if self.config.qemu.iter().any(is_listed) || is_installed(&found) {
            return Ok(());
        }
        let remedy = self.remedy("qemu", &path.display().to_string());
        Err(format!("QEMU {}: this program is not allowed; to allow it: {remedy}", path.display()))
    }

    /// Checks that a checkpoint may use the argument `text`, an option with its value, which is not allowed by
    /// default for the reason `why`.
    ///
    /// # Errors
    /// A text: the argument, and how to allow it.
    pub fn check_argument(&self, text: &str, why: &str) -> Result<(), String> {
        if self.config.arguments.iter().any(|allowed| allowed == text) {
            return Ok(());
        }
        Err(format!("{text}: {why}; to allow it: {}", self.remedy("arguments", text)))
    }

    /// Checks each of QEMU's free arguments.
    ///
    /// # Errors
    /// One text for each that is not allowed.
    pub fn check_free_arguments(&self, arguments: &[String]) -> Result<(), Vec<String>> {
        let why = "a free argument of QEMU";
        let texts = option_texts(arguments);
        let problems: Vec<_> = texts.iter().filter_map(|text| self.check_argument(text, why).err()).collect();
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }

    /// Checks that the XML of a domain may have the element `name`, for which `why` is a reason not to.
    ///
    /// # Errors
    /// A text: the element, and how to allow it.
    pub fn check_element(&self, name: &str, why: &str) -> Result<(), String> {
        if self.config.elements.iter().any(|allowed| allowed == name) {
            return Ok(());
        }
        Err(format!(
            "<{name}> in libvirt's description of the domain: {why}; to allow it: {}",
            self.remedy("elements", name)
        ))
    }

    /// Checks that a checkpoint may use the file, block device or directory at `path` for `what`.
    ///
    /// # Errors
    /// A text: the file, and how to allow it.
    ///
    /// `is_known`: whether the VM may use a file although it is not in an allowed directory. The images below a known one must
    /// be allowed or known as well: what the checkpoint declares an image may be a disk with the guest's own data.
    pub fn check_path(&self, what: &str, path: &Path, is_known: &dyn Fn(&Path) -> bool) -> Result<(), String> {
        self.check_layers(what, path, is_known, MAX_LAYERS)
    }

    /// Checks a file, and those below it if it is the layer of an image.
    fn check_layers(&self, what: &str, path: &Path, is_known: &dyn Fn(&Path) -> bool, more: u32) -> Result<(), String> {
        let shown = path.display();
        if !is_known(path) && !self.has_path(path) {
            let remedy = self.remedy("paths", &shown.to_string());
            return Err(format!(
                "{what}: {shown} is not in a directory that checkpoints may use; to allow it: {remedy}"
            ));
        }
        let below = image_layers::files_in_header(path).map_err(|why| format!("{what}: {shown}: {why}"))?;
        for file in below {
            let more = more.checked_sub(1).ok_or_else(|| format!("{what}: {shown}: too many images below it"))?;
            self.check_layers(&format!("{what}, below {shown}"), &file, is_known, more)?;
        }
        Ok(())
    }

    fn has_path(&self, path: &Path) -> bool {
        let is_plain = path.is_absolute() && !path.components().any(|part| part == Component::ParentDir);
        let listed = || self.config.paths.iter().map(PathBuf::as_path).chain(FILE_DIRECTORIES.map(Path::new));
        if !is_plain || !listed().any(|directory| path.starts_with(directory)) {
            return false;
        }
        // A link in the directory must not lead out of it. Only in /dev, the names of block devices may be links.
        let is_device_name = path.starts_with("/dev");
        match resolve(path) {
            Some(found) if found == path => true,
            Some(found) if is_device_name && fs::metadata(&found).is_ok_and(|it| it.file_type().is_block_device()) => {
                true
            }
            Some(found) => listed()
                .any(|directory| fs::canonicalize(directory).is_ok_and(|directory| found.starts_with(directory))),
            None => false,
        }
    }

    /// Returns what to write into `host.toml`.
    fn remedy(&self, key: &str, value: &str) -> String {
        let value = toml::Value::from(value).to_string();
        format!("add to {} under [restore]: {key} = [{value}]", self.config_path.display())
    }
}

/// Returns the images below the qcow2 image at `path`. Only for an image that this host itself has given this format.
#[must_use]
pub fn images_below(path: &Path) -> Vec<PathBuf> {
    let mut images = Vec::new();
    let mut next = vec![path.to_owned()];
    while let Some(image) = next.pop().filter(|_| images.len() < MAX_LAYERS as usize) {
        let below = image_layers::files_in_header(&image).unwrap_or_default();
        images.extend(below.iter().cloned());
        next.extend(below);
    }
    images
}

/// Returns QEMU's arguments, each option together with its value.
#[must_use]
pub fn option_texts(arguments: &[String]) -> Vec<String> {
    let mut texts = Vec::new();
    let mut unread = arguments.iter().peekable();
    while let Some(argument) = unread.next() {
        let value = unread.next_if(|next| argument.starts_with('-') && !next.starts_with('-'));
        texts.push(option_text(argument, value.map(String::as_str)));
    }
    texts
}

/// Returns the real path of a file. Of one that does not exist, its directory must exist.
fn resolve(path: &Path) -> Option<PathBuf> {
    match fs::canonicalize(path) {
        Ok(found) => Some(found),
        // A link whose target is missing is no file of this directory.
        Err(_) if path.is_symlink() => None,
        Err(_) => Some(fs::canonicalize(path.parent()?).ok()?.join(path.file_name()?)),
    }
}

/// Returns the real path of a program: a name without a slash is looked up in `PATH`.
#[must_use]
pub fn find_program(path: &Path) -> Option<PathBuf> {
    if path.is_absolute() {
        return fs::canonicalize(path).ok();
    }
    if path.components().count() != 1 {
        return None;
    }
    let directories = std::env::var_os("PATH")?;
    let candidates = std::env::split_paths(&directories).map(|directory| directory.join(path));
    candidates.filter(|candidate| candidate.is_absolute()).find_map(|candidate| fs::canonicalize(candidate).ok())
}

/// Returns whether the operating system has installed this QEMU: only root can have written it.
fn is_installed(program: &Path) -> bool {
    let has_name = program
        .file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| PROGRAM_NAMES.iter().any(|start| name.starts_with(start)));
    let is_in =
        |directory: &&str| fs::canonicalize(directory).is_ok_and(|directory| program.parent() == Some(&directory));
    let is_roots = |file: Metadata| file.uid() == 0 && file.mode() & 0o022 == 0;
    has_name
        && PROGRAM_DIRECTORIES.iter().any(is_in)
        && program.ancestors().all(|path| fs::metadata(path).is_ok_and(is_roots))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
    use std::os::unix::fs::symlink;

    fn rules(text: &str) -> RestoreRules {
        RestoreRules::new("/etc/rekindle/host.toml".into(), toml::from_str(text).unwrap()).unwrap()
    }

    fn check(rules: &RestoreRules, path: &Path) -> Result<(), String> {
        rules.check_path("disk", path, &|_| false)
    }

    #[test]
    fn only_installed_and_listed_programs_are_allowed() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("qemu-system-x86_64");
        fs::copy("/bin/true", &program).unwrap();
        for hostile in [program.as_path(), Path::new("/bin/sh"), Path::new("/usr/bin/../../bin/sh"), Path::new("sh")] {
            let e = rules("").check_program(hostile).unwrap_err();
            let remedy = format!("add to /etc/rekindle/host.toml under [restore]: qemu = [\"{}\"]", hostile.display());
            assert!(e.contains(&remedy), "{e}");
        }
        let missing = rules("").check_program(Path::new("bin/qemu-system-x86_64")).unwrap_err();
        assert!(missing.contains("no such program"), "{missing}");
        rules(&format!("qemu = [{program:?}]")).check_program(&program).unwrap();
        // A program that others can replace is not the operating system's.
        assert!(!is_installed(&program));
    }

    #[test]
    fn links_do_not_lead_out_of_an_allowed_directory() {
        let directory = tempfile::tempdir().unwrap();
        let allowed = directory.path().join("images");
        fs::create_dir(&allowed).unwrap();
        fs::write(allowed.join("disk"), "").unwrap();
        fs::write(directory.path().join("secret"), "").unwrap();
        symlink(directory.path().join("secret"), allowed.join("out")).unwrap();
        symlink(allowed.join("disk"), allowed.join("in")).unwrap();
        symlink(directory.path().join("absent"), allowed.join("dangling")).unwrap();
        let device = directory.path().join("device");
        mknodat(CWD, &device, FileType::BlockDevice, Mode::RUSR, makedev(7, 1)).unwrap();
        symlink(&device, allowed.join("to-device")).unwrap();
        let rules = rules(&format!("paths = [{allowed:?}]"));
        for name in ["disk", "in", "new"] {
            check(&rules, &allowed.join(name)).unwrap();
        }
        for name in ["out", "dangling", "to-device", "../secret", "absent/new"] {
            let e = check(&rules, &allowed.join(name)).unwrap_err();
            assert!(e.contains(name) && e.contains("paths = ["), "{e}");
        }
        check(&rules, Path::new("/etc/shadow")).unwrap_err();
        check(&rules, Path::new("images/disk")).unwrap_err();
    }

    #[test]
    fn images_below_an_image_must_be_allowed_too() {
        let directory = tempfile::tempdir().unwrap();
        let allowed = directory.path().join("images");
        fs::create_dir(&allowed).unwrap();
        let (top, secret) = (allowed.join("top"), directory.path().join("secret"));
        fs::write(&secret, "").unwrap();
        fs::write(allowed.join("base"), "").unwrap();
        let rules = rules(&format!("paths = [{allowed:?}]"));
        let write = |name: &str| fs::write(&top, image_layers::tests::qcow2(name)).unwrap();
        for name in ["", "base", allowed.join("base").to_str().unwrap()] {
            write(name);
            check(&rules, &top).unwrap();
        }
        for name in [secret.to_str().unwrap(), "../secret", "json:{}", "nbd://h/x", "/proc/self/fd/0", "top"] {
            write(name);
            let e = check(&rules, &top).unwrap_err();
            assert!(e.contains("top"), "{e}");
        }
        // A known disk does not make known what its data name.
        rules.check_path("disk", &top, &|path| path == top).unwrap_err();
        write(secret.to_str().unwrap());
        rules.check_path("disk", &top, &|path| path == top).unwrap_err();
        rules.check_path("disk", &top, &|path| path == top || path == secret).unwrap();
        assert_eq!(images_below(&top), std::slice::from_ref(&secret));
        let e = check(&rules, &top).unwrap_err();
        assert!(e.contains(&format!("paths = [\"{}\"]", secret.display())), "{e}");
    }

    #[test]
    fn each_free_argument_is_named_with_the_line_that_allows_it() {
        let arguments = ["-device", "edu,id=e", "-sandbox", "-plugin", "/tmp/x.so"].map(str::to_owned);
        let problems = rules("").check_free_arguments(&arguments).unwrap_err();
        assert_eq!(problems.len(), 3, "{problems:?}");
        assert!(problems[2].contains("arguments = [\"-plugin /tmp/x.so\"]"), "{problems:?}");
        let allowed = r#"arguments = ["-device edu,id=e", "-sandbox", "-plugin /tmp/x.so"]"#;
        rules(allowed).check_free_arguments(&arguments).unwrap();
        let other = ["-device", "edu,id=f"].map(str::to_owned);
        rules(allowed).check_free_arguments(&other).unwrap_err();
    }

    #[test]
    fn relative_paths_in_the_configuration_are_rejected() {
        let config = toml::from_str("paths = [\"images\"]").unwrap();
        assert!(RestoreRules::new("/h".into(), config).unwrap_err().contains("images"));
    }
}
