//! A jail for a program that a guest can attack: a user of its own, no capabilities, and a file system that has only the
//! files that the program needs, at their usual paths.
//!
//! ```text
//! parent   prepares all arguments, forks
//! child    mount namespace ── tmpfs ── binds the files ── pivot_root ── user ── exec
//! ```
//!
//! Devices, files and sockets in directories of other programs do not exist in the jail, whatever their permissions are. The
//! network, with its abstract sockets, is shared. A file is
//! reachable through its bind although other users cannot enter the directories above it; the permissions of the file
//! itself apply ([`JailPath::permit`]).

use crate::access_list::{self, READ, WRITE};
use crate::users::become_user;
use rustix::fs::{CWD, FileType, Mode, StatVfsMountFlags};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind_recursive, mount_change, mount_remount, unmount,
};
use rustix::process::{chdir, pivot_root};
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set, remove_capability_from_bounding_set, set_capabilities,
    set_no_new_privs,
};
use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A number that no user has.
const NO_USER: u32 = u32::MAX;

/// A path that exists in a jail: a file, or a directory with all that is in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JailPath {
    /// An absolute path, the same in the jail. In place of a symbolic link, the jail has what it refers to.
    pub path: PathBuf,
    /// Whether files there may be written, created and removed, as far as their permissions allow it. Otherwise they may be
    /// read and executed.
    pub is_writable: bool,
    /// Whether device files there may be used.
    pub has_devices: bool,
}

impl JailPath {
    /// Permits a user to read the file, and to write it if the path is writable, if its permissions do not allow that yet:
    /// by an entry in its access control list. Directories stay as they are.
    ///
    /// # Errors
    /// When the file cannot be read, or its file system has no access control lists.
    pub fn permit(&self, user: u32) -> io::Result<()> {
        let Some(missing) = self.missing_permissions(Some(user))? else { return Ok(()) };
        access_list::add_user(&self.path, user, missing).map_err(|e| list_error(&e))
    }

    /// Returns an error if [`permit`](Self::permit) cannot permit a user that has no rights yet. Changes nothing.
    ///
    /// # Errors
    /// As [`permit`](Self::permit), with the path.
    pub fn can_be_permitted(&self) -> io::Result<()> {
        self.missing_permissions(None).map(drop).map_err(|e| with_path(&self.path, &e))
    }

    /// Returns what an entry of the user must permit. `None`: it needs no entry.
    fn missing_permissions(&self, user: Option<u32>) -> io::Result<Option<u16>> {
        let file = fs::metadata(&self.path)?;
        let mode = file.mode() as u16;
        if file.is_dir() {
            const READ_AND_SEARCH: u16 = 0o5;
            let is_open = mode & READ_AND_SEARCH == READ_AND_SEARCH;
            let closed = || io::Error::new(io::ErrorKind::PermissionDenied, "other users cannot read this directory");
            return if is_open { Ok(None) } else { Err(closed()) };
        }
        let wanted = if self.is_writable { READ | WRITE } else { READ };
        let is_permitted = |permissions: u16| permissions & wanted == wanted;
        if is_permitted(mode) || user == Some(file.uid()) && is_permitted(mode >> 6) {
            return Ok(None);
        }
        let listed = access_list::of_user(&self.path, user.unwrap_or(NO_USER)).map_err(|e| list_error(&e))?;
        Ok(if listed.is_some_and(is_permitted) { None } else { Some(wanted) })
    }
}

fn list_error(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("its access control list: {error}"))
}

/// The jail of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Jail {
    /// User ID of the program; not root.
    pub user: u32,
    /// Group ID of the program.
    pub group: u32,
    /// Its other groups.
    pub groups: Vec<u32>,
    /// An existing directory, used for nothing else, on which the child mounts the root of the jail. It stays empty for other
    /// processes.
    pub root: PathBuf,
    /// The paths that exist in it. A later path may be in an earlier one.
    pub paths: Vec<JailPath>,
}

/// A mount in the jail.
#[derive(Debug)]
struct Bind {
    source: CString,
    target: CString,
    is_directory: bool,
    flags: MountFlags,
}

/// All arguments of the child's system calls: after the fork it may not allocate.
#[derive(Debug)]
struct Preparation {
    root: CString,
    /// In this order: parents first.
    directories: Vec<CString>,
    binds: Vec<Bind>,
    proc: CString,
    user: u32,
    group: u32,
    groups: Vec<u32>,
}

/// A step into the jail that has failed. Without allocations.
struct FailedStep<'a> {
    step: &'static str,
    path: Option<&'a CStr>,
    error: Errno,
}

impl FailedStep<'_> {
    fn of(step: &'static str) -> impl Fn(Errno) -> Self {
        move |error| Self { step, path: None, error }
    }

    /// Writes the step to standard error. Returns the error.
    fn report(self) -> io::Error {
        let path = self.path.map_or(&b""[..], CStr::to_bytes);
        for part in [b"cannot enter the jail: ", self.step.as_bytes(), path, b"\n"] {
            let _ = rustix::io::write(rustix::stdio::stderr(), part);
        }
        self.error.into()
    }
}

impl Jail {
    /// Makes `command` start in the jail. The caller must be root.
    ///
    /// # Errors
    /// `NotFound` if a path does not exist; `InvalidInput` for a relative path or user 0. Errors of the child are errors of
    /// starting the command; it writes the step that has failed to its standard error.
    pub fn apply(&self, command: &mut Command) -> io::Result<()> {
        let preparation = self.prepare()?;
        // SAFETY: the closure makes system calls only. Everything that it uses was allocated before the fork.
        unsafe { command.pre_exec(move || preparation.enter().map_err(|failed| failed.report())) };
        Ok(())
    }

    fn prepare(&self) -> io::Result<Preparation> {
        if self.user == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a jail needs a user other than root"));
        }
        let mut directories = BTreeSet::new();
        let mut binds = Vec::new();
        for JailPath { path, is_writable, has_devices } in &self.paths {
            let is_directory = fs::metadata(path).map_err(|e| with_path(path, &e))?.is_dir();
            let target = self.inside(path)?;
            let above = if is_directory { Some(target.as_path()) } else { target.parent() };
            let missing = above.into_iter().flat_map(Path::ancestors).take_while(|ancestor| *ancestor != self.root);
            directories.extend(missing.map(Path::to_owned));
            let mut flags = MountFlags::NOSUID | inherited_flags(path)?;
            flags.set(MountFlags::RDONLY, !is_writable || flags.contains(MountFlags::RDONLY));
            flags.set(MountFlags::NOEXEC, *is_writable || *has_devices || flags.contains(MountFlags::NOEXEC));
            flags.set(MountFlags::NODEV, !has_devices);
            binds.push(Bind { source: c_path(path)?, target: c_path(&target)?, is_directory, flags });
        }
        let proc = self.root.join("proc");
        directories.insert(proc.clone());
        Ok(Preparation {
            root: c_path(&self.root)?,
            directories: directories.iter().map(|directory| c_path(directory)).collect::<io::Result<_>>()?,
            binds,
            proc: c_path(&proc)?,
            user: self.user,
            group: self.group,
            groups: self.groups.clone(),
        })
    }

    /// Returns where the child mounts a path.
    fn inside(&self, path: &Path) -> io::Result<PathBuf> {
        let relative = path.strip_prefix("/").map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("{}: not an absolute path", path.display()))
        })?;
        Ok(self.root.join(relative))
    }
}

/// Returns the flags of the mount that has the path which the jail must not take away.
fn inherited_flags(path: &Path) -> io::Result<MountFlags> {
    let mount = rustix::fs::statvfs(path).map_err(|e| with_path(path, &e.into()))?.f_flag;
    let mut flags = MountFlags::empty();
    flags.set(MountFlags::RDONLY, mount.contains(StatVfsMountFlags::RDONLY));
    flags.set(MountFlags::NOEXEC, mount.contains(StatVfsMountFlags::NOEXEC));
    Ok(flags)
}

fn with_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

impl Preparation {
    /// Enters the jail. Makes system calls only.
    fn enter(&self) -> Result<(), FailedStep<'_>> {
        // SAFETY: the flag affects the file system of this process only, which has one thread.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }
            .and_then(|()| mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC))
            .map_err(FailedStep::of("making a mount namespace (needs CAP_SYS_ADMIN)"))?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount(c"jail", self.root.as_c_str(), c"tmpfs", flags, c"mode=755,size=1m")
            .map_err(FailedStep::of("mounting its root"))?;
        let umask = rustix::process::umask(Mode::empty());
        let mode = Mode::from_raw_mode(0o755);
        for directory in &self.directories {
            match rustix::fs::mkdir(directory.as_c_str(), mode) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(FailedStep { step: "making ", path: Some(directory), error }),
            }
        }
        for bind in &self.binds {
            bind.mount().map_err(|error| FailedStep { step: "mounting ", path: Some(&bind.source), error })?;
        }
        rustix::process::umask(umask);
        // Of processes of other users, not even the names are visible.
        mount(c"proc", self.proc.as_c_str(), c"proc", flags, c"hidepid=2").map_err(FailedStep::of("mounting /proc"))?;
        mount_remount(self.root.as_c_str(), MountFlags::BIND | MountFlags::RDONLY | flags, c"")
            .and_then(|()| chdir(self.root.as_c_str()))
            .and_then(|()| pivot_root(c".", c"."))
            .and_then(|()| unmount(c".", UnmountFlags::DETACH))
            .and_then(|()| chdir(c"/"))
            .map_err(FailedStep::of("changing the root"))?;
        self.drop_privileges().map_err(FailedStep::of("changing the user and dropping privileges"))
    }

    fn drop_privileges(&self) -> rustix::io::Result<()> {
        set_no_new_privs(true)?;
        clear_ambient_capability_set()?;
        for capability in CapabilitySet::all().iter() {
            match remove_capability_from_bounding_set(capability) {
                // Not a capability of this kernel.
                Ok(()) | Err(Errno::INVAL) => {}
                Err(e) => return Err(e),
            }
        }
        become_user(self.user, self.group, &self.groups)?;
        let none = CapabilitySet::empty();
        set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
    }
}

impl Bind {
    fn mount(&self) -> rustix::io::Result<()> {
        if !self.is_directory {
            // The mount point. An earlier path may have mounted a directory that has the file.
            match rustix::fs::mknodat(CWD, self.target.as_c_str(), FileType::RegularFile, Mode::RUSR, 0) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(e) => return Err(e),
            }
        }
        mount_bind_recursive(self.source.as_c_str(), self.target.as_c_str())?;
        mount_remount(self.target.as_c_str(), MountFlags::BIND | self.flags, c"")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown};
    use std::process::Stdio;

    const USER: u32 = 1_700_000_001;

    struct Host {
        directory: tempfile::TempDir,
    }

    impl Host {
        fn new() -> Self {
            let host = Self { directory: tempfile::tempdir().unwrap() };
            for name in ["jail", "own", "other"] {
                fs::create_dir(host.path(name)).unwrap();
            }
            for name in ["own/file", "other/file"] {
                fs::write(host.path(name), "content").unwrap();
            }
            chown(host.path("own"), Some(USER), Some(USER)).unwrap();
            host
        }

        fn path(&self, name: &str) -> PathBuf {
            self.directory.path().join(name)
        }

        /// Runs a shell command in a jail that has `own`. Returns its output.
        fn run(&self, script: &str) -> String {
            let read = |path: &str| JailPath { path: path.into(), is_writable: false, has_devices: false };
            // The last one is a file in an earlier one.
            let mut paths: Vec<_> = ["/usr", "/bin", "/lib", "/lib64", "/usr/bin/cat"].map(read).into();
            paths.push(JailPath { path: self.path("own"), is_writable: true, has_devices: false });
            paths.push(JailPath { path: "/dev/null".into(), is_writable: true, has_devices: true });
            let jail = Jail { user: USER, group: USER, groups: Vec::new(), root: self.path("jail"), paths };
            let mut command = Command::new("/usr/bin/sh");
            command.args(["-c", script, "sh"]).arg(self.path("own")).arg(self.path("other")).stdin(Stdio::null());
            jail.apply(&mut command).unwrap();
            let output = command.output().unwrap();
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
        }
    }

    #[test]
    fn a_jail_has_its_own_paths_and_user_only() {
        let host = Host::new();
        // No other user may enter the directory above.
        fs::set_permissions(host.directory.path(), fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(host.run("id -u; id -G"), format!("{USER}\n{USER}\n"));
        assert_eq!(host.run("cat $1/file; echo new >$1/new; cat $1/new; ls $1 | wc -l"), "contentnew\n2\n");
        assert_eq!(fs::read_to_string(host.path("own/new")).unwrap(), "new\n");
        // `SIGCONT` to a process of the same session is permitted to every user, so it would prove nothing.
        for denied in
            ["cat $2/file", "ls /etc", "touch /usr/x", "touch /x", "ls /dev/mem", "kill -0 1", "mount -t tmpfs x $1"]
        {
            let output = host.run(&format!("{denied} >/dev/null 2>&1 && echo done || echo denied"));
            assert_eq!(output, "denied\n", "{denied}");
        }
        let status =
            host.run("while read line; do case $line in Cap*|NoNewPrivs*) echo $line;; esac; done </proc/self/status");
        assert_eq!(status.matches("0000000000000000").count(), 5, "{status}");
        assert!(status.contains("NoNewPrivs: 1"), "{status}");
        // At most the shell and two programs.
        let visible: u32 = host.run("ls -d /proc/[0-9]* | wc -l").trim().parse().unwrap();
        assert!((1..=3).contains(&visible), "{visible} processes");
        // Nothing of the jail is visible outside.
        assert_eq!(fs::read_dir(host.path("jail")).unwrap().count(), 0);
    }

    #[test]
    fn a_jail_that_cannot_be_made_is_an_error() {
        let host = Host::new();
        let jail = |user, path: PathBuf| {
            let paths = vec![JailPath { path, is_writable: false, has_devices: false }];
            let jail = Jail { user, group: USER, groups: Vec::new(), root: host.path("jail"), paths };
            jail.apply(&mut Command::new("true")).unwrap_err().kind()
        };
        assert_eq!(jail(USER, host.path("none")), io::ErrorKind::NotFound);
        assert_eq!(jail(0, host.path("own")), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn the_step_that_fails_is_named() {
        let host = Host::new();
        let log = fs::File::create(host.path("log")).unwrap();
        let jail = Jail { user: USER, group: USER, groups: Vec::new(), root: host.path("own/file"), paths: Vec::new() };
        let mut command = Command::new("true");
        command.stderr(log);
        jail.apply(&mut command).unwrap();
        assert_eq!(command.status().unwrap_err().raw_os_error(), Some(libc::ENOTDIR));
        assert_eq!(fs::read_to_string(host.path("log")).unwrap(), "cannot enter the jail: mounting its root\n");
    }

    #[test]
    fn a_user_is_permitted_only_what_a_path_names() {
        let host = Host::new();
        let file = host.path("other/file");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        let permit =
            |is_writable| JailPath { path: file.clone(), is_writable, has_devices: false }.permit(USER).unwrap();
        let entry = |user| access_list::of_user(&file, user).unwrap();
        permit(false);
        assert_eq!(entry(USER), Some(READ));
        permit(true);
        assert_eq!(entry(USER), Some(READ | WRITE));
        assert_eq!(entry(USER + 1), None);
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o707, 0o600, "the owner's and others' are unchanged");
        // What all users may do needs no entry.
        fs::set_permissions(host.path("own/file"), fs::Permissions::from_mode(0o644)).unwrap();
        JailPath { path: host.path("own/file"), is_writable: false, has_devices: false }.permit(USER + 1).unwrap();
        assert_eq!(access_list::of_user(&host.path("own/file"), USER + 1).unwrap(), None);
    }
}
