//! The AppArmor profile of a libvirt domain.
//!
//! libvirt before 12.1 allows a domain's QEMU only to read files below the newest overlay, by rules such as
//! `deny "IMAGE" w`. Each time a block job ends it writes them anew, and they outweigh the rule by which it allows the
//! next merge (its work item 806). So the profile gets rules of a higher *priority* for the image and its overlays.
//! libvirt writes the profile itself once, and rewrites only a file that the profile includes, so these rules stay.

use super::OverlayDisksError;
use super::record::{OverlayRecord, RecordedDisk};
use crate::rundir::write_atomically;
use rekindle_kernel::surroundings::{EnvironmentError, SecurityLabel};
use rekindle_qemu::vmm::Vmm;
use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where libvirt has the profiles of its domains.
const PROFILES: &str = "/etc/apparmor.d/libvirt";
/// The program by which libvirt loads them.
const PARSER: &str = "/sbin/apparmor_parser";
/// How often the profile is loaded, because libvirt changes what it includes.
const MAX_LOADS: usize = 10;
/// The end of each line that is ours.
const MARK: &str = " # rekindle";
/// What has a meaning in the path of a rule.
const SPECIAL: &[char] = &['\\', '"', '*', '?', '[', ']', '{', '}', '^'];

/// Lets a QEMU merge the overlays of libvirt's disks, if AppArmor confines it.
pub(super) fn allow_merges(vmm: &Vmm, record: &OverlayRecord) -> Result<(), OverlayDisksError> {
    let disks: Vec<&RecordedDisk> = record.disks.iter().filter(|disk| disk.target.is_some()).collect();
    match DomainProfile::of(vmm.pid)? {
        Some(profile) if !disks.is_empty() => profile.allow_merges(&disks),
        _ => Ok(()),
    }
}

/// Undoes [`allow_merges`]. A failure leaves a QEMU that may write to its own disks.
pub(super) fn forbid_merges(vmm: &Vmm) {
    let profile = DomainProfile::of(vmm.pid).map_err(OverlayDisksError::from);
    if let Err(e) = profile.and_then(|profile| profile.map_or(Ok(()), |profile| profile.restore())) {
        tracing::warn!(error = %e, "the AppArmor profile of the domain keeps its rules for overlays");
    }
}

/// A profile that libvirt has made for one domain.
#[derive(Debug)]
struct DomainProfile {
    path: PathBuf,
    parser: PathBuf,
}

impl DomainProfile {
    /// Returns the profile that confines a process; `None` if none of libvirt's does.
    fn of(pid: u32) -> Result<Option<Self>, EnvironmentError> {
        let Some(SecurityLabel::AppArmor { profile }) = SecurityLabel::of_process(pid)? else { return Ok(None) };
        // A domain may have a profile that its administrator has written: libvirt leaves that alone.
        let is_of_libvirt = profile.starts_with("libvirt-") && !profile.contains('/');
        Ok(is_of_libvirt.then(|| Self { path: Path::new(PROFILES).join(profile), parser: PARSER.into() }))
    }

    /// Allows QEMU to write to the images and all overlays of the disks, and loads the profile.
    fn allow_merges(&self, disks: &[&RecordedDisk]) -> Result<(), OverlayDisksError> {
        let rules: Result<Vec<String>, OverlayDisksError> = disks.iter().map(|disk| rules(disk)).collect();
        self.replace_rules(&rules?.concat())
    }

    /// Undoes [`DomainProfile::allow_merges`].
    fn restore(&self) -> Result<(), OverlayDisksError> {
        self.replace_rules("")
    }

    fn replace_rules(&self, rules: &str) -> Result<(), OverlayDisksError> {
        let old = fs::read_to_string(&self.path).map_err(OverlayDisksError::io(&self.path))?;
        let is_ours = |line: &&str| line.trim_end().ends_with(MARK);
        let without: String = old.split_inclusive('\n').filter(|line| !is_ours(line)).collect();
        if rules.is_empty() && without == old {
            return Ok(());
        }
        let Some((before, end)) = without.rfind('}').map(|end| without.split_at(end)) else {
            return Err(self.failed("it has no end, `}`; let libvirt make it again: shut the domain down, remove the file, and start the domain".into()));
        };
        let new = format!("{before}{rules}{end}");
        // libvirt loads the file, too, so it must never have rules that are rejected.
        self.check(&new)?;
        self.write(&new)?;
        // Also if the text is the same: a process may have been killed before this.
        self.load()
    }

    fn write(&self, text: &str) -> Result<(), OverlayDisksError> {
        let mode = fs::metadata(&self.path).map(|file| file.permissions().mode());
        let written = mode.and_then(|mode| {
            write_atomically(&self.path, text.as_bytes())?;
            fs::set_permissions(&self.path, Permissions::from_mode(mode))
        });
        written.map_err(OverlayDisksError::io(&self.path))
    }

    /// Fails if the parser rejects a profile of this text.
    fn check(&self, text: &str) -> Result<(), OverlayDisksError> {
        let mut command = Command::new(&self.parser);
        command.args(["--skip-kernel-load", "--skip-cache"]).stdin(Stdio::piped());
        self.run(command, text).map_err(|e| match e {
            OverlayDisksError::Profile { profile, why } => OverlayDisksError::AppArmor { profile, why },
            e => e,
        })
    }

    fn load(&self) -> Result<(), OverlayDisksError> {
        for _ in 0..MAX_LOADS {
            let before = self.included();
            let mut command = Command::new(&self.parser);
            command.arg("--replace").arg(&self.path).stdin(Stdio::null());
            self.run(command, "")?;
            // libvirt may have rewritten the included file, and loaded it, meanwhile.
            if self.included() == before {
                return Ok(());
            }
        }
        Err(self.failed(
            "libvirt changes what it includes all the time; repeat this when libvirt has no job with the domain".into(),
        ))
    }

    /// Identifies the content of the file that libvirt rewrites.
    fn included(&self) -> Option<(u64, u64, i64, i64)> {
        let mut path = self.path.clone().into_os_string();
        path.push(".files");
        let file = fs::metadata(path).ok()?;
        Some((file.ino(), file.len(), file.mtime(), file.mtime_nsec()))
    }

    fn run(&self, mut command: Command, input: &str) -> Result<(), OverlayDisksError> {
        let failed = || OverlayDisksError::io(&self.parser);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(failed())?;
        if let Some(mut pipe) = child.stdin.take() {
            // A parser that has ended is reported below.
            let _ = pipe.write_all(input.as_bytes());
        }
        let output = child.wait_with_output().map_err(failed())?;
        if output.status.success() {
            return Ok(());
        }
        Err(self.failed(format!("apparmor_parser failed: {}", String::from_utf8_lossy(&output.stderr).trim())))
    }

    fn failed(&self, why: String) -> OverlayDisksError {
        OverlayDisksError::Profile { profile: self.path.clone(), why }
    }
}

/// Returns the rules for a disk.
fn rules(disk: &RecordedDisk) -> Result<String, OverlayDisksError> {
    // The kernel compares the path without symbolic links. The directory of overlays is not made yet.
    let resolved = |path: &Path| match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) if !path.exists() => Ok(parent.canonicalize()?.join(name)),
        _ => path.canonicalize(),
    };
    let rule = |path: &Path, suffix: &str| {
        let quoted = resolved(path).and_then(|path| quoted(&path, suffix)).map_err(OverlayDisksError::io(path))?;
        Ok::<_, OverlayDisksError>(format!("  priority=1 {quoted} rwk,{MARK}\n"))
    };
    Ok(rule(&disk.image, "")? + &rule(&disk.directory, "/*")?)
}

/// Returns a path as a rule has it. `suffix` may be a pattern.
fn quoted(path: &Path, suffix: &str) -> io::Result<String> {
    let text = path.to_str().filter(|text| !text.chars().any(char::is_control));
    let text = text.ok_or_else(|| io::Error::other("no rule of AppArmor can name this file; rename it"))?;
    let mut quoted = String::from('"');
    for character in text.chars() {
        if SPECIAL.contains(&character) {
            quoted.push('\\');
        }
        quoted.push(character);
    }
    Ok(quoted + suffix + "\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error;

    const FRESH: &str = "profile libvirt-1 flags=(attach_disconnected) {\n  #include <libvirt/libvirt-1.files>\n\n}\n";

    /// A profile whose parser is a script.
    fn profile(folder: &Path, script: &str) -> io::Result<DomainProfile> {
        let made = DomainProfile { path: folder.join("libvirt-1"), parser: folder.join("parser") };
        fs::write(&made.path, FRESH)?;
        fs::write(&made.parser, format!("#!/bin/sh\ncd '{}'\n{script}\n", folder.display()))?;
        fs::set_permissions(&made.parser, Permissions::from_mode(0o755))?;
        Ok(made)
    }

    fn disk(folder: &Path) -> io::Result<RecordedDisk> {
        let (image, directory) = (folder.join("disk.img"), folder.join("disk.img.rekindle"));
        fs::write(&image, "")?;
        let device = "/machine/peripheral/virtio-disk0".into();
        let (drive, target, block_device) = ("d".into(), None, None);
        Ok(RecordedDisk { device, drive, number: 0, image, directory, bytes: 0, target, block_device })
    }

    #[test]
    fn rules_are_checked_and_loaded_and_removed_without_a_trace() -> Result<(), Box<dyn Error>> {
        let folder = tempfile::tempdir()?;
        let profile = profile(
            folder.path(),
            r#"echo "$1" >> calls; if [ "$1" = --replace ]; then cp "$2" loaded; else cat > checked; fi"#,
        )?;
        let disk = disk(folder.path())?;
        profile.allow_merges(&[&disk])?;
        profile.allow_merges(&[&disk])?;
        let loaded = fs::read_to_string(folder.path().join("loaded"))?;
        let path = folder.path().canonicalize()?.display().to_string();
        let rules = format!(
            "  priority=1 \"{path}/disk.img\" rwk, # rekindle\n  priority=1 \"{path}/disk.img.rekindle/*\" rwk, # rekindle\n"
        );
        assert_eq!(loaded, FRESH.replace("}\n", &format!("{rules}}}\n")));
        profile.restore()?;
        profile.restore()?;
        assert_eq!(fs::read_to_string(&profile.path)?, FRESH);
        assert_eq!(fs::read_to_string(folder.path().join("loaded"))?, FRESH);
        assert_eq!(fs::read_to_string(folder.path().join("checked"))?, FRESH);
        assert_eq!(fs::read_to_string(folder.path().join("calls"))?, "--skip-kernel-load\n--replace\n".repeat(3));
        Ok(())
    }

    #[test]
    fn a_profile_stays_as_it_was_if_its_parser_rejects_the_rules() -> Result<(), Box<dyn Error>> {
        let folder = tempfile::tempdir()?;
        let script = "[ \"$1\" != --replace ] || touch loaded; echo 'syntax error, unexpected TOK_ID' >&2; exit 1";
        let profile = profile(folder.path(), script)?;
        let disk = disk(folder.path())?;
        let failed = profile.allow_merges(&[&disk]).expect_err("the parser rejects the rules");
        assert!(failed.to_string().contains("unexpected TOK_ID"), "{failed}");
        assert!(failed.to_string().contains("AppArmor 4.1"), "{failed}");
        assert_eq!(fs::read_to_string(&profile.path)?, FRESH);
        assert!(!folder.path().join("loaded").exists());
        Ok(())
    }

    #[test]
    fn a_rule_names_the_device_to_which_a_link_leads() -> Result<(), Box<dyn Error>> {
        let folder = tempfile::tempdir()?;
        let mut disk = disk(folder.path())?;
        let link = folder.path().join("lv");
        std::os::unix::fs::symlink(&disk.image, &link)?;
        let expected = rules(&disk)?;
        disk.image = link;
        assert_eq!(rules(&disk)?, expected);
        Ok(())
    }

    #[test]
    fn patterns_in_a_path_are_only_text() -> io::Result<()> {
        assert_eq!(quoted(Path::new("/a b/{c}*"), "/*")?, r#""/a b/\{c\}\*/*""#);
        quoted(Path::new("/a\nb"), "").expect_err("a rule is one line");
        Ok(())
    }
}
