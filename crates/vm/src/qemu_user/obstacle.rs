//! What prevents that a QEMU runs as a user of its own: something that its jail would not have.

use crate::restore_rules::image_layers::files_in_header;
use rekindle_kernel::confinement::needs_privilege_for_userfaultfd;
use rekindle_kernel::jail::JailPath;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::host_access::{self, HostAccess};
use rekindle_qemu::used_files;
use std::fmt;
use std::io::ErrorKind;
use std::path::Path;

/// What prevents that the QEMU of a machine runs as a user of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle(String);

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Obstacle {
    /// Returns the first obstacle of a machine.
    #[must_use]
    pub fn of(hardware: &Hardware) -> Option<Self> {
        let of_definition = in_definition(hardware).or_else(|| in_files(hardware));
        of_definition.map(Self).or_else(|| Self::in_images(hardware))
    }

    /// Returns the first obstacle that only the content of an image has. An attacker that controls the QEMU can write that.
    #[must_use]
    pub(super) fn in_images(hardware: &Hardware) -> Option<Self> {
        let own = hardware.disks.iter().filter(|disk| !disk.server && disk.format != "raw");
        let own = own.map(|disk| disk.path.clone());
        let files =
            host_access::of_arguments(&with_headers(&hardware.extra)).into_iter().filter_map(|access| match access {
                HostAccess::File { path, .. } => Some(path),
                HostAccess::Argument { .. } => None,
            });
        own.chain(files).find_map(|image| in_image(&image)).map(Self)
    }
}

fn in_definition(hardware: &Hardware) -> Option<String> {
    if hardware.foreign.is_some() {
        return Some("it was attached, so its files are only known from a command line".into());
    }
    if let Some((_, rule)) = hardware.forwards().find(|(_, rule)| is_privileged_port(rule)) {
        return Some(format!("the forwarded port of `{rule}`, which is below 1024"));
    }
    if let Some(text) = in_arguments(&hardware.extra) {
        return Some(format!("`{text}` in its qemu_args"));
    }
    needs_privilege_for_userfaultfd()
        .then(|| "this host has no /dev/userfaultfd, and vm.unprivileged_userfaultfd is not 1".into())
}

fn in_arguments(arguments: &[String]) -> Option<String> {
    let of_host = host_access::of_arguments(arguments).into_iter().find_map(|access| match access {
        HostAccess::Argument { text, .. } if !needs_nothing(&text) => Some(text),
        _ => None,
    });
    of_host.or_else(|| needs_more_than_files(arguments))
}

/// Returns whether QEMU needs nothing of the host for an option that does more than to describe the machine.
fn needs_nothing(text: &str) -> bool {
    let is_tcp_display =
        |address: &str| address.split(',').next().is_some_and(|first| first.contains(':') && !first.contains('/'));
    ["-display none", "-monitor none"].contains(&text)
        || text.strip_prefix("-vnc ").is_some_and(|address| !address.starts_with("unix:") && is_tcp_display(address))
}

/// Returns an argument that only describes the machine, and for which QEMU needs a privilege or files that it names itself.
fn needs_more_than_files(arguments: &[String]) -> Option<String> {
    let parts = arguments.iter().flat_map(|argument| argument.split(','));
    let is_obstacle = |part: &str| match part.split_once('=') {
        Some(("mem-lock" | "snapshot", value)) => value != "off",
        Some(("hostfwd", rule)) => is_privileged_port(rule),
        _ => ["-snapshot", "mem-lock", "snapshot"].contains(&part),
    };
    parts.into_iter().find(|part| is_obstacle(part)).map(str::to_owned)
}

/// Returns the arguments without the disks whose header QEMU does not read. A guest writes that of its raw disk as it likes.
fn with_headers(arguments: &[String]) -> Vec<String> {
    let is_raw = |argument: &str| argument.split(',').any(|part| ["format=raw", "driver=raw"].contains(&part));
    let mut kept: Vec<String> = Vec::new();
    for argument in arguments {
        if is_raw(argument) && kept.last().is_some_and(|option| option.starts_with('-')) {
            kept.pop();
        } else {
            kept.push(argument.clone());
        }
    }
    kept
}

/// Returns whether a rule of a forwarded port (`tcp:ADDRESS:PORT-ADDRESS:PORT`) needs a privilege.
fn is_privileged_port(rule: &str) -> bool {
    let host_side = rule.split('-').next().unwrap_or_default();
    let port = host_side.rsplit(':').next().and_then(|port| port.parse::<u16>().ok());
    port.is_none_or(|port| (1..1024).contains(&port))
}

/// Returns a file that its file system cannot let one more user access. Other errors may pass, and are those of the attempt.
fn in_files(hardware: &Hardware) -> Option<String> {
    used_files::of(hardware).into_iter().find_map(|used| {
        let path = JailPath { path: used.path, is_writable: used.is_written, has_devices: true };
        let e = path.can_be_permitted().err()?;
        [ErrorKind::Unsupported, ErrorKind::PermissionDenied].contains(&e.kind()).then(|| e.to_string())
    })
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
    use crate::restore_rules::image_layers::tests::qcow2;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    fn machine(arguments: &[&str]) -> Hardware {
        let extra = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        Hardware { extra, ..hardware(Path::new("/none.raw")) }
    }

    #[test]
    fn arguments_for_which_a_user_without_privileges_is_not_enough_are_obstacles() {
        for arguments in [
            ["-overcommit", "mem-lock=on"],
            ["-nic", "user,hostfwd=tcp::443-:443"],
            ["-drive", "file=/none.raw,format=raw,snapshot=on"],
            ["-device", "vfio-pci,host=01:00.0"],
            ["-virtfs", "local,path=/srv,mount_tag=srv,security_model=none"],
            ["-vnc", "unix:/run/vnc"],
            ["-display", "gtk"],
        ] {
            let found = in_definition(&machine(&arguments)).unwrap_or_else(|| panic!("{arguments:?}"));
            assert!(found.contains("qemu_args"), "{found}");
        }
        for arguments in [
            ["-overcommit", "mem-lock=off"],
            ["-nic", "user,hostfwd=tcp::8443-:443"],
            ["-drive", "file=/none.raw,format=raw"],
            ["-cpu", "max"],
            ["-vnc", "127.0.0.1:1,password=on"],
            ["-display", "none"],
        ] {
            assert_eq!(in_arguments(&machine(&arguments).extra), None, "{arguments:?}");
        }
    }

    #[test]
    fn files_that_only_an_image_names_are_obstacles_of_the_image() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("top.qcow2");
        fs::write(&image, qcow2("/srv/base.raw")).unwrap();
        let file = format!("file={}", image.display());
        let found = Obstacle::in_images(&machine(&["-nodefaults", "-drive", &file])).unwrap();
        assert!(found.to_string().contains("/srv/base.raw"), "{found}");
        // QEMU does not read the header of a raw disk, and a guest can write it.
        assert_eq!(Obstacle::in_images(&machine(&["-nodefaults", "-drive", &format!("{file},format=raw")])), None);
        fs::write(&image, b"KDMV").unwrap();
        let found = Obstacle::in_images(&machine(&["-hda", image.to_str().unwrap()])).unwrap();
        assert!(found.to_string().contains("may name other files"), "{found}");
    }

    #[test]
    fn a_directory_that_other_users_cannot_read_is_an_obstacle() {
        let directory = tempfile::tempdir().unwrap();
        let firmware = directory.path().join("firmware");
        fs::create_dir(&firmware).unwrap();
        fs::set_permissions(&firmware, Permissions::from_mode(0o755)).unwrap();
        let machine = machine(&["-L", firmware.to_str().unwrap()]);
        assert_eq!(in_files(&machine), None);
        fs::set_permissions(&firmware, Permissions::from_mode(0o700)).unwrap();
        let found = in_files(&machine).unwrap();
        assert!(found.contains("firmware"), "{found}");
    }

    #[test]
    fn a_port_below_1024_needs_a_privilege() {
        assert!(is_privileged_port("tcp:127.0.0.1:443-:443"));
        assert!(!is_privileged_port("tcp:127.0.0.1:8443-:443"));
        assert!(!is_privileged_port("tcp::0-:443"), "any free port");
    }
}
