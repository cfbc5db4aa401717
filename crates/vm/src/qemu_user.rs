//! The user that the QEMU of a VM runs as, and the files that exist for it.
//!
//! A VM of root has a user of its own, unless something prevents it: a number, recorded in a directory that survives a reboot of the
//! host, without an entry in `/etc/passwd`. An attacker that controls its QEMU is then this user, in a [`Jail`] with the
//! files of its VM and the programs of the host.
//!
//! ```text
//! RUNDIR          root:GROUP 0710   search only: the sockets of disk servers have the group
//! RUNDIR/vmm-N    root:GROUP 1770   QEMU makes its sockets there; log and lock stay root's
//!                            1710   from its greeting on
//! RAM, console    USER              files of Rekindle's own
//! images, kernel  as they are       an entry in the access control list, if one is needed
//! ```

use crate::host::{Host, HostError, OwnUser};
use crate::restore_rules::images_below;
use crate::rundir::{RunDir, sync_directory};
use rekindle_kernel::access_list;
use rekindle_kernel::confinement::needs_privilege_for_userfaultfd;
use rekindle_kernel::jail::{Jail, JailPath};
use rekindle_kernel::process::Process;
use rekindle_qemu::command::{Directory, Disk, Hardware};
use rekindle_qemu::host_access::{self, HostAccess};
use rekindle_qemu::used_files;
use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

/// Users of VMs. systemd's list of user numbers leaves this range unused (UIDS-GIDS: 1879048192 to 2147483647).
const USERS: RangeInclusive<u32> = 1_900_000_000..=1_900_065_535;
/// Programs, libraries, firmware, and the configuration of name resolution. Permissions protect what is secret there.
const SYSTEM: [&str; 7] = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc"];
/// Where the resolver's configuration may be a link to, outside of [`SYSTEM`].
const RESOLVER: &str = "/etc/resolv.conf";
const DEVICES: [&str; 5] = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", KVM];
const KVM: &str = "/dev/kvm";
/// Mode of the directory of a QEMU with a user of its own, while it starts.
const OWN_USER_MODE: u32 = 0o1770;
/// Directory, adjacent to the run directories, on which each QEMU mounts the root of its jail.
const JAIL_ROOT: &str = ".jail";

/// Why a QEMU cannot run as the user of its VM.
#[derive(Debug, thiserror::Error)]
pub enum QemuUserError {
    /// The host's configuration cannot be used.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The VM's user cannot be found or recorded.
    #[error("{}: cannot find or record the user of VM {name}; check its permissions and free space", directory.display())]
    Registry {
        /// The directory of the records.
        directory: PathBuf,
        /// Name of the VM.
        name: String,
        /// The error of the file system.
        #[source]
        source: io::Error,
    },
    /// All numbers are in use.
    #[error(
        "{}: all users for VMs are in use. Each file there is a link from a number to a VM's name: remove those of VMs that do not \
         exist, after you have removed their entries from files (setfacl -x u:NUMBER FILE)",
        directory.display()
    )]
    NoneFree {
        /// The directory of the records.
        directory: PathBuf,
    },
    /// A file of Rekindle's own cannot be given to the user.
    #[error("{}: cannot be given to user {user} of VM {name}", path.display())]
    OwnFile {
        /// The file.
        path: PathBuf,
        /// Name of the VM.
        name: String,
        /// Number of the user.
        user: u32,
        /// The error of the file system.
        #[source]
        source: io::Error,
    },
    /// The user cannot be permitted to use a file of the definition.
    #[error(
        "{}: user {user} of VM {name} cannot be permitted to use it; use a file system with access control lists, or remove {name} \
         from qemu_own_user in host.toml: its QEMU then runs as root",
        path.display()
    )]
    File {
        /// The file.
        path: PathBuf,
        /// Name of the VM.
        name: String,
        /// Number of the user.
        user: u32,
        /// The error of the file system.
        #[source]
        source: io::Error,
    },
    /// The user would need files that nothing but the image names.
    #[error(
        "VM {name}: {} has the backing file {}. A QEMU with a user of its own opens no backing file, because an attacker could \
         change this name. Make one image of both (qemu-img convert -O qcow2 {} NEW), or remove {name} from qemu_own_user in \
         host.toml",
        path.display(), backing.display(), path.display()
    )]
    Backing {
        /// Name of the VM.
        name: String,
        /// The image.
        path: PathBuf,
        /// The file that its header names.
        backing: PathBuf,
    },
}

/// Returns the jail for the next QEMU of a VM, in `directory`, after its user has got what the QEMU needs. `None`: it runs as the
/// calling user, because that is not root, `host.toml` requires it, or something of the VM prevents another user.
///
/// *Needs:* the operation lock of the VM; RAM files that exist.
/// *On failure:* nothing was started. Permissions that were given remain.
///
/// # Errors
/// [`QemuUserError`].
pub fn jail_of_next_qemu(
    rundir: &RunDir,
    directory: &Directory,
    hardware: &Hardware,
    program: &Path,
) -> Result<Option<Jail>, QemuUserError> {
    let host = Host::open()?;
    let (Some(users), own_user) = (host.qemu_users(), host.own_user(rundir.name())) else { return Ok(None) };
    let is_required = own_user == OwnUser::Required;
    if own_user == OwnUser::No || hardware.foreign.is_some() || !is_required && obstacle(hardware).is_some() {
        return Ok(None);
    }
    let user = assign_in(users, rundir.name())?;
    match prepare_jail(user, rundir, directory, hardware, program) {
        Err(e @ QemuUserError::File { .. }) if !is_required => {
            tracing::warn!("QEMU runs as root: {e}");
            Ok(None)
        }
        prepared => prepared.map(Some),
    }
}

/// Returns what prevents that the QEMU of a machine runs as a user of its own: something that its jail would not have.
#[must_use]
pub fn obstacle(hardware: &Hardware) -> Option<String> {
    if hardware.foreign.is_some() {
        return Some("it was attached, so its files are only known from a command line".into());
    }
    let backing = qcow2_disks(hardware).find_map(|disk| images_below(&disk.path).into_iter().next());
    if let Some(backing) = backing {
        return Some(format!("the backing file {}", backing.display()));
    }
    if let Some((_, rule)) = hardware.forwards().find(|(_, rule)| is_privileged_port(rule)) {
        return Some(format!("the forwarded port of `{rule}`, which is below 1024"));
    }
    let argument = host_access::of_arguments(&hardware.extra).into_iter().find_map(|access| match access {
        HostAccess::Argument { text, .. } => Some(text),
        HostAccess::File { .. } => None,
    });
    if let Some(text) = argument {
        return Some(format!("`{text}` in its qemu_args"));
    }
    needs_privilege_for_userfaultfd().then(|| "this kernel has no /dev/userfaultfd (Linux 6.1)".into())
}

/// Returns whether a rule of a forwarded port (`tcp:ADDRESS:PORT-ADDRESS:PORT`) needs a privilege.
fn is_privileged_port(rule: &str) -> bool {
    let host_side = rule.split('-').next().unwrap_or_default();
    let port = host_side.rsplit(':').next().and_then(|port| port.parse::<u16>().ok());
    port.is_none_or(|port| (1..1024).contains(&port))
}

fn qcow2_disks(hardware: &Hardware) -> impl Iterator<Item = &Disk> {
    hardware.disks.iter().filter(|disk| !disk.server && disk.format == "qcow2")
}

fn assign_in(directory: &Path, name: &str) -> Result<u32, QemuUserError> {
    let failed = registry_error(directory, name);
    if let Some(user) = recorded_in(directory, name).map_err(&failed)? {
        return Ok(user);
    }
    record_in(directory, name)
        .map_err(&failed)?
        .ok_or_else(|| QemuUserError::NoneFree { directory: directory.to_owned() })
}

/// Returns the user that the VM `name` has, also if it is not listed any more: its QEMU may still run as this user.
///
/// # Errors
/// [`QemuUserError::Host`], [`QemuUserError::Registry`].
pub fn recorded(name: &str) -> Result<Option<u32>, QemuUserError> {
    let host = Host::open()?;
    let Some(directory) = host.qemu_users() else { return Ok(None) };
    recorded_in(directory, name).map_err(registry_error(directory, name))
}

fn registry_error(directory: &Path, name: &str) -> impl Fn(io::Error) -> QemuUserError {
    move |source| QemuUserError::Registry { directory: directory.to_owned(), name: name.to_owned(), source }
}

/// Returns the numbers in the directory, each with its VM.
fn records(directory: &Path) -> io::Result<Vec<(u32, PathBuf)>> {
    let entries = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut records = Vec::new();
    for entry in entries {
        let entry = entry?;
        if let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) {
            records.push((number, fs::read_link(entry.path()).unwrap_or_default()));
        }
    }
    Ok(records)
}

fn recorded_in(directory: &Path, name: &str) -> io::Result<Option<u32>> {
    let found = records(directory)?.into_iter().find(|(number, vm)| vm == Path::new(name) && USERS.contains(number));
    Ok(found.map(|(number, _)| number))
}

/// Makes a record of the VM: a link from the number to the name, made in one step, and by one process only. `None`: all
/// numbers are in use.
fn record_in(directory: &Path, name: &str) -> io::Result<Option<u32>> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let used = records(directory)?;
    for number in USERS.filter(|number| used.iter().all(|(used, _)| used != number)) {
        match symlink(name, directory.join(number.to_string())) {
            // Another VM has got it meanwhile.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            made => {
                made?;
                sync_directory(directory)?;
                return Ok(Some(number));
            }
        }
    }
    Ok(None)
}

/// Gives the user of a VM what the QEMU in `directory` needs.
fn prepare_jail(
    user: u32,
    rundir: &RunDir,
    directory: &Directory,
    hardware: &Hardware,
    program: &Path,
) -> Result<Jail, QemuUserError> {
    let at = |path: &Path| {
        let (path, name) = (path.to_owned(), rundir.name().to_owned());
        move |source| QemuUserError::OwnFile { path, name, user, source }
    };
    let set_group = |path: &Path, mode| {
        chown(path, None, Some(user))
            .and_then(|()| fs::set_permissions(path, Permissions::from_mode(mode)))
            .map_err(at(path))
    };
    set_group(rundir.path(), 0o710)?;
    set_group(&directory.0, OWN_USER_MODE)?;
    let console_log = rundir.console_log();
    let mut options = OpenOptions::new();
    options.create(true).append(true).mode(0o600).open(&console_log).map_err(at(&console_log))?;
    chown(&console_log, Some(user), Some(user)).map_err(at(&console_log))?;

    let root = rundir.path().with_file_name(JAIL_ROOT);
    match DirBuilder::new().mode(0o700).create(&root) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(at(&root)(e)),
        _ => {}
    }
    let path = |path: &Path, is_writable| JailPath { path: path.to_owned(), is_writable, has_devices: false };
    let mut paths = system_paths(program, rundir.path());
    let served: Vec<_> = hardware.disks.iter().filter(|disk| disk.server).collect();
    if !served.is_empty() {
        paths.push(path(rundir.path(), false));
    }
    for disk in served {
        // A server that was started before the VM had a user.
        let socket = directory.disk(&disk.id);
        set_group(&socket, 0o660)?;
    }
    paths.push(path(&directory.0, true));
    paths.push(path(&console_log, true));
    for (ram, _) in hardware.ram_files() {
        let file_type = fs::metadata(&ram).map_err(at(&ram))?.file_type();
        let jail_path = JailPath { has_devices: !file_type.is_file(), ..path(&ram, true) };
        if file_type.is_file() { chown(&ram, Some(user), Some(user)) } else { jail_path.permit(user) }
            .map_err(at(&ram))?;
        paths.push(jail_path);
    }
    for disk in qcow2_disks(hardware) {
        if let Some(backing) = images_below(&disk.path).into_iter().next() {
            let name = rundir.name().to_owned();
            return Err(QemuUserError::Backing { name, path: disk.path.clone(), backing });
        }
    }
    for used in used_files::of(hardware) {
        // QEMU names a file that is missing. A directory above the run directory would have more than this VM.
        let Ok(metadata) = fs::metadata(&used.path) else { continue };
        if rundir.path().starts_with(&used.path) {
            continue;
        }
        let has_devices = metadata.file_type().is_block_device() || metadata.file_type().is_char_device();
        let jail_path = JailPath { has_devices, ..path(&used.path, used.is_written) };
        jail_path.permit(user).map_err(|source| QemuUserError::File {
            path: used.path.clone(),
            name: rundir.name().to_owned(),
            user,
            source,
        })?;
        if used.is_written || !is_below_any(&used.path, &SYSTEM) {
            paths.push(jail_path);
        }
    }
    // Group 0 has rights in many places.
    let groups = fs::metadata(KVM).ok().filter(|kvm| kvm.mode() & 0o66 == 0o60 && kvm.gid() != 0).map(|kvm| kvm.gid());
    Ok(Jail { user, group: user, groups: groups.into_iter().collect(), root, paths })
}

/// Removes the permissions that the user of a VM has got for files that the VM has not made. Without an error: another user
/// never gets the number while the record exists.
///
/// *Needs:* no process of the user.
pub(crate) fn withdraw(name: &str, hardware: &Hardware) {
    let user = match recorded(name) {
        Ok(Some(user)) => user,
        Ok(None) => return,
        Err(e) => return tracing::warn!("{e}"),
    };
    for file in used_files::of(hardware) {
        match access_list::remove_user(&file.path, user) {
            Err(e) if e.kind() != io::ErrorKind::NotFound && e.kind() != io::ErrorKind::Unsupported => {
                tracing::warn!(
                    "{}: the entry of user {user} stays in its access control list: {e}",
                    file.path.display()
                );
            }
            _ => {}
        }
    }
}

/// Lets QEMU make no more files in its directory. *Needs:* a QEMU that has greeted, so that its sockets exist.
///
/// # Errors
/// Errors of `chmod(2)`.
pub fn seal(directory: &Directory) -> io::Result<()> {
    let mode = fs::metadata(&directory.0)?.mode() & 0o7777;
    if mode == OWN_USER_MODE { fs::set_permissions(&directory.0, Permissions::from_mode(0o1710)) } else { Ok(()) }
}

/// Returns the processes of the VM's own user in a jail of this VM. With another directory of records, another VM may have a
/// user of the same number.
///
/// # Errors
/// [`QemuUserError::Host`], [`QemuUserError::Registry`].
pub fn processes(rundir: &RunDir) -> Result<Vec<Process>, QemuUserError> {
    let Some(user) = recorded(rundir.name())? else { return Ok(Vec::new()) };
    let relative = rundir.path().strip_prefix("/").unwrap_or(rundir.path());
    let is_in_jail = |process: &Path| process.join("root").join(relative).exists();
    let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = numbers.filter(|entry| entry.metadata().is_ok_and(|process| process.uid() == user));
    let numbers = numbers.filter(|entry| is_in_jail(&entry.path()));
    let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Ok(numbers.filter_map(|number| Process::of(number).ok()).collect())
}

/// Returns what every QEMU needs: the programs of the host, `program` if it is elsewhere, and devices without content.
fn system_paths(program: &Path, rundir: &Path) -> Vec<JailPath> {
    let real_program = fs::canonicalize(program).unwrap_or_else(|_| program.to_owned());
    let resolver = fs::canonicalize(RESOLVER).ok();
    // A user of a VM cannot enter the directories above its run directory.
    let prefix = prefix(&real_program).filter(|prefix| !rundir.starts_with(prefix)).unwrap_or(&real_program);
    let elsewhere = [Some(prefix), Some(program), resolver.as_deref()];
    let elsewhere = elsewhere.into_iter().flatten().filter(|path| !is_below_any(path, &SYSTEM));
    let read = SYSTEM.iter().map(Path::new).chain(elsewhere);
    let read = read.map(|path| JailPath { path: path.to_owned(), is_writable: false, has_devices: false });
    let devices = DEVICES.iter().map(|path| JailPath { path: path.into(), is_writable: true, has_devices: true });
    read.chain(devices).filter(|path| path.path.exists()).collect()
}

/// Returns the directory with a program, its libraries and its firmware: what `bin` is in.
fn prefix(program: &Path) -> Option<&Path> {
    let directory = program.parent()?;
    let prefix = if directory.ends_with("bin") { directory.parent()? } else { directory };
    (prefix != Path::new("/")).then_some(prefix)
}

fn is_below_any(path: &Path, directories: &[&str]) -> bool {
    directories.iter().any(|directory| path.starts_with(directory))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_vm_keeps_a_user_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let users = directory.path().join("users");
        assert_eq!(recorded_in(&users, "web").unwrap(), None);
        let first = record_in(&users, "web").unwrap().unwrap();
        let second = record_in(&users, "db").unwrap().unwrap();
        assert_ne!(first, second);
        assert_eq!(recorded_in(&users, "web").unwrap(), Some(first));
        assert_eq!(recorded_in(&users, "db").unwrap(), Some(second));
        // A number that this version does not give.
        symlink("other", users.join("4000000000")).unwrap();
        assert_eq!(recorded_in(&users, "other").unwrap(), None);
    }

    #[test]
    fn vms_that_start_together_get_different_users() {
        let directory = tempfile::tempdir().unwrap();
        let users: Vec<_> = std::thread::scope(|scope| {
            let path = directory.path();
            let threads: Vec<_> =
                (0..8).map(|n| scope.spawn(move || record_in(path, &format!("vm{n}")).unwrap().unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let different: std::collections::BTreeSet<_> = users.iter().collect();
        assert_eq!(different.len(), users.len());
    }

    #[test]
    fn a_program_elsewhere_has_its_files_around_it() {
        assert_eq!(prefix(Path::new("/opt/qemu/bin/qemu-system-x86_64")), Some(Path::new("/opt/qemu")));
        assert_eq!(prefix(Path::new("/opt/qemu/qemu-system-x86_64")), Some(Path::new("/opt/qemu")));
        assert_eq!(prefix(Path::new("/qemu-system-x86_64")), None, "not all of the host");
        let around = system_paths(Path::new("/srv/qemu-system-x86_64"), Path::new("/srv/run/web"));
        assert!(!around.iter().any(|path| path.path == Path::new("/srv")), "{around:?}");
    }
}
