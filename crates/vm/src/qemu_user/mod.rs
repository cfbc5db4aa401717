//! The user that the QEMU of a VM runs as, and the files that exist for it.
//!
//! A VM of root has a user of its own, unless something prevents it: a number, recorded in a directory that survives a reboot of the
//! host ([`records`]), without an entry in `/etc/passwd`. An attacker that controls its QEMU is then this user, in a [`Jail`] with the
//! files of its VM and the programs of the host.
//!
//! ```text
//! RUNDIR          root:GROUP 0710   search only: the sockets of disk servers have the group
//! RUNDIR/vmm-N    root:GROUP 1770   QEMU makes its sockets there; log and lock stay root's
//!                            1710   from its greeting on
//! RAM, console    USER              files of Rekindle's own
//! images, kernel  as they are       an entry in the access control list, if one is needed
//! ```

mod obstacle;
mod records;

pub use obstacle::Obstacle;

use crate::causes::with_causes;
use crate::host::{Host, HostError, OwnUser};
use crate::rundir::RunDir;
use rekindle_kernel::access_list;
use rekindle_kernel::jail::{Jail, JailPath};
use rekindle_kernel::process::Process;
use rekindle_kernel::users::can_become;
use rekindle_qemu::command::{Directory, Hardware};
use rekindle_qemu::used_files::{self, UsedFile};
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

/// Programs, libraries, firmware, and the configuration of name resolution. Permissions protect what is secret there.
const SYSTEM: [&str; 7] = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc"];
/// Where the resolver's configuration may be a link to, outside of [`SYSTEM`].
const RESOLVER: &str = "/etc/resolv.conf";
const DEVICES: [&str; 5] = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", KVM];
const KVM: &str = "/dev/kvm";
/// Mode of the directory of a QEMU with a user of its own, while it starts.
const OWN_USER_MODE: u32 = 0o1770;
/// Its mode from its greeting on.
const SEALED_MODE: u32 = 0o1710;
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
        "{}: user {user} of VM {name} cannot be permitted to use it; use a file system with access control lists, or add \
         {name} to qemu_as_root in host.toml: its QEMU then runs as root",
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
    /// This process cannot start processes as the user.
    #[error(
        "VM {name}: user {user} cannot be used here: this process has no CAP_SETUID or CAP_SETGID, or the container's user \
         namespace does not have this number; use another container, or add {name} to qemu_as_root in host.toml"
    )]
    NotHere {
        /// Name of the VM.
        name: String,
        /// Number of the user.
        user: u32,
    },
    /// Something prevents it.
    #[error(
        "VM {name}: its QEMU cannot run as a user of its own: {obstacle}. Remove this, or add {name} to qemu_as_root in \
         host.toml: its QEMU then runs as root. See The user of a VM in docs/run-directory.md"
    )]
    Obstacle {
        /// Name of the VM.
        name: String,
        /// What prevents it.
        obstacle: Obstacle,
    },
}

/// How the next QEMU of a VM runs.
#[derive(Debug)]
pub struct QemuIdentity {
    /// Where it runs. `None`: as the calling user, without a jail.
    pub jail: Option<Jail>,
    /// Set if it may run as root should it be impossible to enter the jail.
    pub if_jail_fails: Option<RunAsRoot>,
}

/// The permission to start a QEMU as root. Only a VM that has never had a QEMU with a user of its own gets it: otherwise, an
/// attacker that controls the running QEMU could make its successor run as root.
#[derive(Debug)]
pub struct RunAsRoot {
    users: PathBuf,
    user: u32,
}

impl RunAsRoot {
    /// Withdraws what the VM's user has got, also `directory`, and then forgets the user, unless the servers of the VM's disks run as
    /// this user.
    ///
    /// # Errors
    /// [`QemuUserError::OwnFile`]: QEMU must not be started then, since `directory` counts as one of a QEMU with a user of its own.
    pub fn instead(
        self,
        name: &str,
        directory: &Directory,
        hardware: &Hardware,
        why: &dyn std::error::Error,
    ) -> Result<(), QemuUserError> {
        warn_of_root(name, why);
        let path = &directory.0;
        chown(path, None, Some(rustix::process::getegid().as_raw()))
            .and_then(|()| fs::set_permissions(path, Permissions::from_mode(0o700)))
            .map_err(|source| QemuUserError::OwnFile {
                path: path.clone(),
                name: name.to_owned(),
                user: self.user,
                source,
            })?;
        let has_servers = hardware.disks.iter().any(|disk| disk.server);
        if has_servers || !withdraw_from(&self.users, self.user, hardware) {
            return Ok(());
        }
        if let Err(e) = records::remove(&self.users, self.user) {
            tracing::warn!("{}: the record of user {} stays: {e}", self.users.display(), self.user);
        }
        Ok(())
    }
}

fn warn_of_root(name: &str, why: &dyn std::error::Error) {
    tracing::warn!(
        "VM {name}: its QEMU runs as root, because it cannot run as a user of its own: {}",
        with_causes(why)
    );
}

/// Returns how the next QEMU of a VM runs, in `directory`, after its user has got what the QEMU needs. As the calling user, if that
/// is not root, or if `host.toml` does not require another one and something prevents it.
///
/// *Needs:* the operation lock of the VM; RAM files that exist.
/// *On failure:* nothing was started. Permissions that were given remain.
///
/// # Errors
/// [`QemuUserError`].
pub fn of_next_qemu(
    rundir: &RunDir,
    directory: &Directory,
    hardware: &Hardware,
    program: &Path,
) -> Result<QemuIdentity, QemuUserError> {
    const AS_CALLER: QemuIdentity = QemuIdentity { jail: None, if_jail_fails: None };
    let name = rundir.name();
    let host = Host::open()?;
    let (Some(users), own_user) = (host.qemu_users(), host.own_user(name)) else { return Ok(AS_CALLER) };
    if own_user == OwnUser::Off {
        return Ok(AS_CALLER);
    }
    let is_required = own_user == OwnUser::Required;
    let recorded = records::recorded(users, name)?;
    let has_had_own_user = recorded.is_some_and(|user| records::is_used(users, user));
    // What an image names may be the work of an attacker that has controlled the VM's previous QEMU.
    let obstacle = if has_had_own_user { Obstacle::in_images(hardware) } else { None };
    if let Some(obstacle) = obstacle.or_else(|| Obstacle::of(hardware).filter(|_| is_required)) {
        return Err(QemuUserError::Obstacle { name: name.to_owned(), obstacle });
    }
    if let Some(obstacle) = Obstacle::of(hardware) {
        tracing::warn!("VM {name}: its QEMU runs as root, because it cannot run as a user of its own: {obstacle}");
        return Ok(AS_CALLER);
    }
    let may_be_root = !has_had_own_user && !is_required;
    let user = match recorded.map_or_else(|| records::assign(users, name), Ok) {
        Err(e) if may_be_root => {
            warn_of_root(name, &e);
            return Ok(AS_CALLER);
        }
        assigned => assigned?,
    };
    let run_as_root = may_be_root.then(|| RunAsRoot { users: users.to_owned(), user });
    match (prepare_jail(users, user, rundir, directory, hardware, program), run_as_root) {
        (Err(e), Some(run_as_root)) => {
            run_as_root.instead(name, directory, hardware, &e)?;
            Ok(AS_CALLER)
        }
        (prepared, if_jail_fails) => Ok(QemuIdentity { jail: Some(prepared?), if_jail_fails }),
    }
}

/// Returns the user for the servers of the VM's disks: the one that the VM's QEMU has or will have.
/// `None`: they run as the calling user.
///
/// # Errors
/// [`QemuUserError::Host`]; if `host.toml` requires a user of its own, also the others.
pub fn of_disk_servers(name: &str, hardware: &Hardware) -> Result<Option<u32>, QemuUserError> {
    let host = Host::open()?;
    let Some(users) = host.qemu_users() else { return Ok(None) };
    let own_user = host.own_user(name);
    let user = match records::recorded(users, name) {
        Ok(None) if own_user != OwnUser::Off && Obstacle::of(hardware).is_none() => {
            records::assign(users, name).map(Some)
        }
        recorded => recorded,
    };
    let possible = user.and_then(|user| match user.filter(|user| !can_become(*user)) {
        Some(user) => Err(QemuUserError::NotHere { name: name.to_owned(), user }),
        None => Ok(user),
    });
    possible.or_else(|e| {
        if own_user == OwnUser::Required {
            return Err(e);
        }
        tracing::warn!("VM {name}: the servers of its disks run as root: {}", with_causes(&e));
        Ok(None)
    })
}

/// Returns the user that the VM `name` has, also if it is not listed any more: its QEMU may still run as this user.
///
/// # Errors
/// [`QemuUserError::Host`], [`QemuUserError::Registry`].
pub fn recorded(name: &str) -> Result<Option<u32>, QemuUserError> {
    let host = Host::open()?;
    host.qemu_users().map_or(Ok(None), |users| records::recorded(users, name))
}

/// Returns a lock for changes of access control lists. Each is read and written as a whole.
///
/// It is of one file system, so that a server of files that does not answer blocks no other VM.
fn lock_lists(users: &Path, file: &Path) -> io::Result<File> {
    let device = fs::metadata(file)?.dev();
    let lock = OpenOptions::new().create(true).append(true).mode(0o600).open(users.join(format!(".lock-{device}")))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    Ok(lock)
}

/// Permits the user of a VM to use a file.
fn permit(users: &Path, name: &str, user: u32, path: &JailPath) -> Result<(), QemuUserError> {
    let permitted = lock_lists(users, &path.path).and_then(|_lock| path.permit(user));
    permitted.map_err(|source| QemuUserError::File { path: path.path.clone(), name: name.to_owned(), user, source })
}

/// Gives the user of a VM what the QEMU in `directory` needs.
fn prepare_jail(
    users: &Path,
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

    let permit = |path: &JailPath| permit(users, rundir.name(), user, path);
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
    for used in used_files::of(hardware) {
        // QEMU names a file that is missing. A directory above the run directory would have more than this VM.
        let Ok(metadata) = fs::metadata(&used.path) else { continue };
        if rundir.path().starts_with(&used.path) {
            continue;
        }
        let has_devices = metadata.file_type().is_block_device() || metadata.file_type().is_char_device();
        let jail_path = JailPath { has_devices, ..path(&used.path, used.is_written) };
        permit(&jail_path)?;
        // Where the jail has the link, it needs what this leads to. The permissions of directories above a path that is mounted
        // do not matter.
        let is_in_system = is_below_any(&used.path, &SYSTEM);
        let target = fs::canonicalize(&used.path).ok().filter(|_| is_in_system);
        paths.push(JailPath { path: target.unwrap_or(used.path), ..jail_path });
    }
    // Group 0 has rights in many places.
    let group = fs::metadata(KVM).ok().filter(|kvm| kvm.mode() & 0o66 == 0o60 && kvm.gid() != 0).map(|kvm| kvm.gid());
    if hardware.accel == "kvm" && group.is_none() {
        permit(&JailPath { has_devices: true, ..path(Path::new(KVM), true) })?;
    }
    Ok(Jail { user, group: user, groups: group.into_iter().collect(), root, paths })
}

/// Removes the permissions that the user of a VM has got for files that the VM has not made. Without an error: another user
/// never gets the number while the record exists.
///
/// *Needs:* no process of the user.
pub(crate) fn withdraw(host: &Host, name: &str, hardware: &Hardware) {
    let Some(users) = host.qemu_users() else { return };
    match records::recorded(users, name) {
        Ok(Some(user)) => drop(withdraw_from(users, user, hardware)),
        Ok(None) => {}
        Err(e) => tracing::warn!("{e}"),
    }
}

/// Returns whether nothing remains.
fn withdraw_from(users: &Path, user: u32, hardware: &Hardware) -> bool {
    let kvm = UsedFile { path: KVM.into(), is_written: true };
    let mut is_complete = true;
    for file in used_files::of(hardware).into_iter().chain([kvm]) {
        let removed = lock_lists(users, &file.path).and_then(|_lock| access_list::remove_user(&file.path, user));
        match removed {
            Err(e) if e.kind() != io::ErrorKind::NotFound && e.kind() != io::ErrorKind::Unsupported => {
                is_complete = false;
                tracing::warn!(
                    "{}: the entry of user {user} stays in its access control list: {e}",
                    file.path.display()
                );
            }
            _ => {}
        }
    }
    is_complete
}

/// Lets a QEMU make no more files in its directory, and records that it has run, if it has a user of its own. *Needs:* a QEMU that
/// has greeted, so that its sockets exist.
///
/// # Errors
/// [`QemuUserError`].
pub fn seal(name: &str, directory: &Directory) -> Result<(), QemuUserError> {
    let Some(user) = starting_user(directory) else { return Ok(()) };
    let own_file = |source| QemuUserError::OwnFile { path: directory.0.clone(), name: name.to_owned(), user, source };
    let host = Host::open()?;
    if let Some(users) = host.qemu_users() {
        let registry = |source| QemuUserError::Registry { directory: users.into(), name: name.to_owned(), source };
        records::mark_used(users, user).map_err(registry)?;
    }
    fs::set_permissions(&directory.0, Permissions::from_mode(SEALED_MODE)).map_err(own_file)
}

/// Returns the user of its own that the QEMU in `directory` has, if it has not greeted yet.
#[must_use]
pub fn starting_user(directory: &Directory) -> Option<u32> {
    let metadata = fs::metadata(&directory.0).ok()?;
    (metadata.mode() & 0o7777 == OWN_USER_MODE).then(|| metadata.gid())
}

/// Returns the processes of the VM's own user in a jail of this VM. With another directory of records, another VM may have a
/// user of the same number.
///
/// # Errors
/// [`QemuUserError::Host`], [`QemuUserError::Registry`].
pub fn processes(rundir: &RunDir) -> Result<Vec<Process>, QemuUserError> {
    let Some(user) = recorded(rundir.name())? else { return Ok(Vec::new()) };
    let relative = rundir.path().strip_prefix("/").unwrap_or(rundir.path());
    // The servers of disks have the same user, and no jail.
    let host_root = file_id(Path::new("/"));
    let is_in_jail = |process: &Path| {
        let root = process.join("root");
        file_id(&root) != host_root && root.join(relative).exists()
    };
    let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = numbers.filter(|entry| entry.metadata().is_ok_and(|process| process.uid() == user));
    let numbers = numbers.filter(|entry| is_in_jail(&entry.path()));
    let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Ok(numbers.filter_map(|number| Process::of(number).ok()).collect())
}

fn file_id(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|file| (file.dev(), file.ino()))
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
    fn a_program_elsewhere_has_its_files_around_it() {
        assert_eq!(prefix(Path::new("/opt/qemu/bin/qemu-system-x86_64")), Some(Path::new("/opt/qemu")));
        assert_eq!(prefix(Path::new("/opt/qemu/qemu-system-x86_64")), Some(Path::new("/opt/qemu")));
        assert_eq!(prefix(Path::new("/qemu-system-x86_64")), None, "not all of the host");
        let around = system_paths(Path::new("/srv/qemu-system-x86_64"), Path::new("/srv/run/web"));
        assert!(!around.iter().any(|path| path.path == Path::new("/srv")), "{around:?}");
    }
}
