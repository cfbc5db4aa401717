//! What prevents that a QEMU runs as a user of its own: something that its jail would not have.

use crate::restore_rules::image_layers::files_in_header;
use rekindle_kernel::confinement::needs_privilege_for_userfaultfd;
use rekindle_kernel::jail::JailPath;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::host_access::{self, HostAccess};
use rekindle_qemu::used_files;
use std::fmt;
use std::path::Path;

/// What prevents that the QEMU of a machine runs as a user of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    what: String,
    /// Whether only the content of an image has it. An attacker that controls the QEMU can write that.
    pub(super) is_in_image: bool,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl Obstacle {
    /// Returns the first obstacle of a machine, those of its definition first.
    #[must_use]
    pub fn of(hardware: &Hardware) -> Option<Self> {
        if let Some(what) = in_definition(hardware).or_else(|| in_files(hardware)) {
            return Some(Self { what, is_in_image: false });
        }
        in_images(hardware).map(|what| Self { what, is_in_image: true })
    }
}

fn in_definition(hardware: &Hardware) -> Option<String> {
    if hardware.foreign.is_some() {
        return Some("it was attached, so its files are only known from a command line".into());
    }
    if let Some((_, rule)) = hardware.forwards().find(|(_, rule)| is_privileged_port(rule)) {
        return Some(format!("the forwarded port of `{rule}`, which is below 1024"));
    }
    let of_host = host_access::of_arguments(&hardware.extra).into_iter().find_map(|access| match access {
        HostAccess::Argument { text, .. } => Some(text),
        HostAccess::File { .. } => None,
    });
    if let Some(text) = of_host.or_else(|| needs_more_than_files(&hardware.extra)) {
        return Some(format!("`{text}` in its qemu_args"));
    }
    needs_privilege_for_userfaultfd().then(|| "this kernel has no /dev/userfaultfd (Linux 6.1)".into())
}

/// Returns an argument that only describes the machine, and for which QEMU needs a privilege or files that it names itself.
fn needs_more_than_files(arguments: &[String]) -> Option<String> {
    let parts = arguments.iter().flat_map(|argument| argument.split(','));
    let is_obstacle = |part: &str| match part.split_once('=') {
        Some(("mem-lock", value)) => value != "off",
        Some(("snapshot", value)) => value != "off",
        Some(("hostfwd", rule)) => is_privileged_port(rule),
        _ => ["-snapshot", "mem-lock", "snapshot"].contains(&part),
    };
    parts.into_iter().find(|part| is_obstacle(part)).map(str::to_owned)
}

/// Returns whether a rule of a forwarded port (`tcp:ADDRESS:PORT-ADDRESS:PORT`) needs a privilege.
fn is_privileged_port(rule: &str) -> bool {
    let host_side = rule.split('-').next().unwrap_or_default();
    let port = host_side.rsplit(':').next().and_then(|port| port.parse::<u16>().ok());
    port.is_none_or(|port| (1..1024).contains(&port))
}

/// Returns a file that its file system cannot let one more user access.
fn in_files(hardware: &Hardware) -> Option<String> {
    used_files::of(hardware).into_iter().find_map(|used| {
        let path = JailPath { path: used.path, is_writable: used.is_written, has_devices: true };
        match path.can_be_permitted() {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Some(e.to_string()),
            _ => None,
        }
    })
}

/// Returns a file that only the header of an image names.
fn in_images(hardware: &Hardware) -> Option<String> {
    let disks = hardware.disks.iter().filter(|disk| !disk.server && disk.format != "raw").map(|disk| disk.path.clone());
    let files = host_access::of_arguments(&hardware.extra).into_iter().filter_map(|access| match access {
        HostAccess::File { path, .. } => Some(path),
        HostAccess::Argument { .. } => None,
    });
    disks.chain(files).find_map(|image| in_image(&image))
}

fn in_image(image: &Path) -> Option<String> {
    let shown = image.display();
    match files_in_header(image) {
        Err(why) => Some(format!("{shown}: {why}")),
        Ok(files) => files.first().map(|file| {
            let file = file.display();
            format!(
                "the backing file {file} of {shown} (qemu-img convert -O qcow2 {shown} NEW makes one image of both)"
            )
        }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::disks::tests::hardware;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    fn of(arguments: &[&str]) -> Option<Obstacle> {
        let extra = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        Obstacle::of(&Hardware { extra, ..hardware(Path::new("/none.raw")) })
    }

    #[test]
    fn arguments_for_which_a_user_without_privileges_is_not_enough_are_obstacles() {
        for arguments in [
            ["-overcommit", "mem-lock=on"],
            ["-nic", "user,hostfwd=tcp::443-:443"],
            ["-drive", "file=/none.raw,format=raw,snapshot=on"],
            ["-device", "vfio-pci,host=01:00.0"],
            ["-virtfs", "local,path=/srv,mount_tag=srv,security_model=none"],
        ] {
            let found = of(&arguments).unwrap_or_else(|| panic!("{arguments:?}"));
            assert!(found.to_string().contains("qemu_args") && !found.is_in_image, "{found}");
        }
        for arguments in [
            ["-overcommit", "mem-lock=off"],
            ["-nic", "user,hostfwd=tcp::8443-:443"],
            ["-drive", "file=/none.raw,format=raw"],
            ["-cpu", "max"],
        ] {
            assert_eq!(of(&arguments), None, "{arguments:?}");
        }
    }

    #[test]
    fn files_that_only_an_image_names_are_obstacles_of_the_image() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("top.qcow2");
        fs::write(&image, crate::restore_rules::image_layers::tests::qcow2("/srv/base.raw")).unwrap();
        let found = of(&["-drive", &format!("file={}", image.display())]).unwrap();
        assert!(found.is_in_image && found.to_string().contains("/srv/base.raw"), "{found}");
        fs::write(&image, b"KDMV").unwrap();
        let found = of(&["-hda", image.to_str().unwrap()]).unwrap();
        assert!(found.is_in_image && found.to_string().contains("may name other files"), "{found}");
    }

    #[test]
    fn a_directory_that_other_users_cannot_read_is_an_obstacle() {
        let directory = tempfile::tempdir().unwrap();
        let firmware = directory.path().join("firmware");
        fs::create_dir(&firmware).unwrap();
        fs::set_permissions(&firmware, Permissions::from_mode(0o755)).unwrap();
        let arguments = ["-L", firmware.to_str().unwrap()];
        assert_eq!(of(&arguments), None);
        fs::set_permissions(&firmware, Permissions::from_mode(0o700)).unwrap();
        let found = of(&arguments).unwrap();
        assert!(found.to_string().contains("firmware") && !found.is_in_image, "{found}");
    }

    #[test]
    fn a_port_below_1024_needs_a_privilege() {
        assert!(is_privileged_port("tcp:127.0.0.1:443-:443"));
        assert!(!is_privileged_port("tcp:127.0.0.1:8443-:443"));
        assert!(!is_privileged_port("tcp::0-:443"), "any free port");
    }
}
