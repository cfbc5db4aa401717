//! The directories of this user's VMs on this host.
//!
//! Root's run directories are under `/run/rekindle`, another user's under `$XDG_RUNTIME_DIR/rekindle`;
//! `REKINDLE_RUN_DIR` overrides both. Logs are in `/var/log/rekindle`, another user's in
//! `$XDG_STATE_HOME/rekindle/log`. If `REKINDLE_RUN_DIR` names another directory than the default, logs are below
//! that. `REKINDLE_LOG_DIR` overrides all of these. `/etc/rekindle/host.toml` (or the file that
//! `REKINDLE_HOST_CONFIG` names) sets the size of Rekindle's own tmpfs for guest RAM, or names another directory, and
//! allows what checkpoints may use ([`crate::restore_rules`]).

use crate::definition::{Bytes, Definition, Name};
use crate::logs;
use crate::restore_rules::{RestoreConfig, RestoreRules};
use crate::rundir::RunDir;
use rekindle_memory::directory::{RamDirectory, RamError};
use serde::Deserialize;
use std::env;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Why this host's configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// There is no directory for run directories.
    #[error(
        "no place for run directories: XDG_RUNTIME_DIR is not set; log in through PAM (loginctl enable-linger USER), \
         or set REKINDLE_RUN_DIR to a directory on a tmpfs"
    )]
    NoRunDir,
    /// A directory cannot be used.
    #[error("run directory {}", path.display())]
    RunDir {
        /// Path of the directory.
        path: PathBuf,
        /// The error of making or checking it.
        #[source]
        source: io::Error,
    },
    /// The host's configuration is not valid.
    #[error("{}: {message}", path.display())]
    Config {
        /// Path of the configuration file.
        path: PathBuf,
        /// The mistake.
        message: String,
    },
}

/// `host.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    ram_size: Option<Bytes>,
    ram_dir: Option<PathBuf>,
    save_dir: Option<PathBuf>,
    suspend_dir: Option<PathBuf>,
    log_dir: Option<PathBuf>,
    log_limit: Option<Bytes>,
    confine_helpers: Option<bool>,
    #[serde(default)]
    qemu_own_user: OwnUserSetting,
    #[serde(default)]
    qemu_as_root: Vec<String>,
    #[serde(default)]
    restore: RestoreConfig,
}

/// `qemu_own_user` in `host.toml`. An enum of its own for the text of its error.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "qemu_own_user must be \"where-possible\", \"required\" or \"off\"; single VMs can be named in qemu_as_root"
)]
enum OwnUserSetting {
    Known(OwnUser),
}

impl Default for OwnUserSetting {
    fn default() -> Self {
        Self::Known(OwnUser::default())
    }
}

/// Whether the QEMU of a VM of root runs as a user of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OwnUser {
    /// As root.
    Off,
    /// If the VM has nothing that prevents it.
    #[default]
    WherePossible,
    /// It must.
    Required,
}

/// The directories of this user's VMs on this host.
#[derive(Debug, Clone)]
pub struct Host {
    /// Parent of the run directories. Each VM's has the VM's name.
    pub root: PathBuf,
    /// Directory into which a `saved` reboot writes RAM, unless the definition names another one.
    pub save_dir: PathBuf,
    /// Directory of the records of guests that were suspended for a reboot of the host. It is on a disk, so that
    /// guests whose RAM is lost are known too.
    pub suspend_dir: PathBuf,
    /// Parent of the log directories. Each VM's has the VM's name.
    pub log_dir: PathBuf,
    /// Length in bytes above which a log is rotated.
    pub log_limit: u64,
    /// What checkpoints may use of this host.
    pub restore_rules: RestoreRules,
    /// Directory of what this host itself has run: see [`Host::run_machine`].
    run_machines: PathBuf,
    /// Directory of what this host knows of stores: see [`Host::known_store`].
    known_stores: PathBuf,
    /// Directory of the users of VMs; `None` if this user is not root.
    qemu_users: Option<PathBuf>,
    own_user: OwnUser,
    /// Names of VMs whose QEMU runs as root.
    as_root: Vec<String>,
    ram: RamLocation,
    /// Size of Rekindle's own tmpfs.
    tmpfs_bytes: u64,
}

/// Where guest RAM is, unless a definition names a directory.
#[derive(Debug, Clone)]
enum RamLocation {
    /// The directory that `host.toml` names.
    Named(PathBuf),
    /// A tmpfs that Rekindle mounts: root's default.
    OwnTmpfs { path: PathBuf, bytes: u64 },
    /// A directory in `/dev/shm`: other users' default.
    SharedMemory(PathBuf),
}

fn config_path() -> PathBuf {
    env::var_os("REKINDLE_HOST_CONFIG").map_or("/etc/rekindle/host.toml".into(), PathBuf::from)
}

/// Returns the file with the settings of `rekindle protect` for the VM `name`: in the directory `protect` next to `host.toml`.
/// Without `REKINDLE_HOST_CONFIG`, another user than root has a directory of its own, because root's file can be read by root
/// only. `None`: this user has no home.
#[must_use]
pub fn protect_settings_file(name: &Name) -> Option<PathBuf> {
    let own_directory = || match path_from_env("XDG_CONFIG_HOME") {
        Some(directory) => Some(directory.join("rekindle")),
        None => path_from_env("HOME").map(|home| home.join(".config/rekindle")),
    };
    let is_root = rustix::process::geteuid().is_root();
    let directory = match config_path().parent() {
        Some(parent) if is_root || path_from_env("REKINDLE_HOST_CONFIG").is_some() => Some(parent.to_owned()),
        _ => own_directory(),
    };
    Some(directory?.join("protect").join(format!("{name}.toml")))
}

/// Checks a file with the host's configuration.
///
/// # Errors
/// [`HostError::Config`], also when the file is missing.
pub fn check_config(path: &Path) -> Result<(), HostError> {
    let invalid = |message| HostError::Config { path: path.to_owned(), message };
    fs::metadata(path).map_err(|e| invalid(e.to_string()))?;
    let config = read_config(path)?;
    check_log_limit(path, &config)?;
    RestoreRules::new(path.to_owned(), config.restore).map(drop).map_err(invalid)
}

/// Returns the length in bytes above which a log is rotated.
fn check_log_limit(path: &Path, config: &Config) -> Result<u64, HostError> {
    match config.log_limit.map_or(logs::DEFAULT_LIMIT_BYTES, Bytes::as_u64) {
        limit if limit < logs::MIN_LIMIT_BYTES => {
            let message = format!("log_limit must be at least {} bytes", logs::MIN_LIMIT_BYTES);
            Err(HostError::Config { path: path.to_owned(), message })
        }
        limit => Ok(limit),
    }
}

/// Returns whether disk servers and pagers confine themselves. Only `confine_helpers` in `host.toml` turns it off.
///
/// # Errors
/// [`HostError::Config`].
pub fn confines_helpers() -> Result<bool, HostError> {
    Ok(read_config(&config_path())?.confine_helpers.unwrap_or(true))
}

impl Host {
    /// Determines the directories for the calling user.
    ///
    /// # Errors
    /// [`HostError`]; also when a directory belongs to another user.
    pub fn open() -> Result<Self, HostError> {
        let is_root = rustix::process::geteuid().is_root();
        let config_path = config_path();
        let config = read_config(&config_path)?;
        let log_limit = check_log_limit(&config_path, &config)?;
        let default_root = default_root();
        let root = run_root()?;
        make_private(&root).map_err(|source| HostError::RunDir { path: root.clone(), source })?;
        let log_dir = match path_from_env("REKINDLE_LOG_DIR").or(config.log_dir) {
            Some(dir) => absolute(dir)?,
            None if Some(&root) != default_root.as_ref() => root.join(".log"),
            None if is_root => "/var/log/rekindle".into(),
            None => user_state_dir(&root).join("log"),
        };
        let tmpfs_bytes = config.ram_size.map_or_else(default_ram_size, Bytes::as_u64);
        let ram = match config.ram_dir {
            Some(path) => RamLocation::Named(path),
            None if is_root => RamLocation::OwnTmpfs { path: root.join(".ram"), bytes: tmpfs_bytes },
            None => {
                let uid = rustix::process::geteuid().as_raw();
                RamLocation::SharedMemory(format!("/dev/shm/rekindle-{uid}").into())
            }
        };
        let invalid = |message| HostError::Config { path: config_path.clone(), message };
        let restore_rules = RestoreRules::new(config_path.clone(), config.restore).map_err(invalid)?;
        let disk_dir = if is_root { "/var/lib/rekindle".into() } else { user_state_dir(&root) };
        let kept = |name: &str| match &default_root {
            Some(default) if *default != root => root.join(format!(".{name}")),
            _ => disk_dir.join(name),
        };
        let OwnUserSetting::Known(own_user) = config.qemu_own_user;
        let (run_machines, known_stores) = (kept("machines"), kept("stores"));
        let qemu_users = is_root.then(|| kept("users"));
        Ok(Self {
            save_dir: config.save_dir.unwrap_or_else(|| disk_dir.join("saved")),
            suspend_dir: config.suspend_dir.unwrap_or_else(|| disk_dir.join("suspended")),
            root,
            log_dir,
            log_limit,
            restore_rules,
            run_machines,
            known_stores,
            qemu_users,
            own_user,
            as_root: config.qemu_as_root,
            ram,
            tmpfs_bytes,
        })
    }

    /// Returns a host for tests, with everything in `root`.
    #[cfg(test)]
    pub(crate) fn at(root: &Path) -> Self {
        let directory = |name: &str| root.join(name);
        Self {
            root: root.to_owned(),
            save_dir: directory("saved"),
            suspend_dir: directory("suspended"),
            log_dir: directory(".log"),
            log_limit: logs::DEFAULT_LIMIT_BYTES,
            restore_rules: RestoreRules::new(directory("host.toml"), RestoreConfig::default())
                .unwrap_or_else(|e| panic!("{e}")),
            run_machines: directory(".machines"),
            known_stores: directory(".stores"),
            qemu_users: None,
            own_user: OwnUser::default(),
            as_root: Vec::new(),
            ram: RamLocation::Named(directory(".ram")),
            tmpfs_bytes: default_ram_size(),
        }
    }

    /// Makes the run directory of a VM, and links its logs. It is no error if the directory exists.
    ///
    /// # Errors
    /// Errors of `mkdir(2)`.
    pub fn create_run_dir(&self, rundir: &RunDir) -> io::Result<()> {
        rundir.create()?;
        rundir.link_logs(&self.log_dir)
    }

    /// Returns the RAM directory of a VM: the one that its definition names, or this host's.
    ///
    /// # Errors
    /// [`RamError`], when the directory cannot be made or used.
    pub fn ram_directory(&self, definition: &Definition) -> Result<RamDirectory, RamError> {
        if let Some(dir) = &definition.ram.dir {
            return RamDirectory::at(dir);
        }
        match &self.ram {
            RamLocation::Named(path) => RamDirectory::at(path),
            RamLocation::OwnTmpfs { path, bytes } => RamDirectory::own_tmpfs(path, *bytes),
            RamLocation::SharedMemory(path) => {
                make_private(path).map_err(|source| RamError::Directory { path: path.clone(), source })?;
                RamDirectory::at(path)
            }
        }
    }

    /// Returns the RAM directory of a VM whose memory is loaded from a checkpoint while it runs: as [`Host::ram_directory`], but a
    /// tmpfs if that is this host's directory and on DAX, where Linux cannot wait for single pages.
    ///
    /// # Errors
    /// As for [`Host::ram_directory`]; [`RamError::Direct`] if the definition names a directory on DAX.
    pub fn fillable_ram_directory(&self, definition: &Definition) -> Result<RamDirectory, RamError> {
        let directory = self.ram_directory(definition)?;
        if !directory.is_direct()? {
            return Ok(directory);
        }
        if let Some(path) = &definition.ram.dir {
            return Err(RamError::Direct { path: path.clone() });
        }
        tracing::warn!(
            "VM {}: its RAM is on a tmpfs, not in the reserved RAM: it will not outlive a kernel, until you stop the VM and run it",
            definition.name
        );
        RamDirectory::own_tmpfs(&self.own_tmpfs(), self.tmpfs_bytes)
    }

    /// Mounts Rekindle's own tmpfs if the RAM file `ram` was in it. It is gone after a boot of the host.
    ///
    /// # Errors
    /// [`RamError`]; also if the host would not see the mount.
    pub fn mount_for(&self, ram: &Path) -> Result<(), RamError> {
        let own = self.own_tmpfs();
        if ram.starts_with(&own) { RamDirectory::own_tmpfs(&own, self.tmpfs_bytes).map(drop) } else { Ok(()) }
    }

    fn own_tmpfs(&self) -> PathBuf {
        self.root.join(".ram")
    }

    /// Returns the directory that `ram_dir` in `host.toml` names, if it names one.
    #[must_use]
    pub fn named_ram_directory(&self) -> Option<&Path> {
        match &self.ram {
            RamLocation::Named(path) => Some(path),
            RamLocation::OwnTmpfs { .. } | RamLocation::SharedMemory(_) => None,
        }
    }

    /// Returns the file that describes the machine of the VM `name` as this host has run it. It survives a reboot of the
    /// host, so that the VM can be restored without further configuration.
    #[must_use]
    pub fn run_machine(&self, name: &Name) -> PathBuf {
        self.run_machines.join(format!("{name}.json"))
    }

    /// Returns the file with what this host knows of the store of the VM `name`. It survives a reboot of the host.
    #[must_use]
    pub fn known_store(&self, name: &str) -> PathBuf {
        self.known_stores.join(format!("{name}.json"))
    }

    /// Returns the directory that records the users of VMs ([`crate::qemu_user`]). It survives a reboot of the host. `None`
    /// if this user is not root.
    #[must_use]
    pub fn qemu_users(&self) -> Option<&Path> {
        self.qemu_users.as_deref()
    }

    /// Returns whether the next QEMU of the VM `name` is to run as a user of its own.
    #[must_use]
    pub fn own_user(&self, name: &str) -> OwnUser {
        if self.as_root.iter().any(|listed| listed == name) { OwnUser::Off } else { self.own_user }
    }

    /// Returns the directory of the cached answers of QEMU binaries.
    #[must_use]
    pub fn binaries(&self) -> PathBuf {
        self.root.join(crate::rundir::BINARY_CACHE)
    }

    /// Unmounts Rekindle's own tmpfs if it has no guest's RAM any more. It is no error if it is in use.
    pub fn release_ram(&self) {
        let own = self.own_tmpfs();
        // A directory that an administrator names is not Rekindle's to unmount.
        if self.named_ram_directory() != Some(&own) {
            RamDirectory::release_own_tmpfs(&own);
        }
    }
}

/// Returns three quarters of the machine's RAM: the rest is for the host and the QEMUs themselves.
fn default_ram_size() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram as u64 * u64::from(info.mem_unit)) / 4 * 3
}

/// Returns the directory that has the run directories of this user's VMs, for programs that only read: it need not exist,
/// and may belong to another user.
///
/// # Errors
/// [`HostError::NoRunDir`].
pub fn run_root() -> Result<PathBuf, HostError> {
    match path_from_env("REKINDLE_RUN_DIR") {
        Some(dir) => absolute(dir),
        None => default_root().ok_or(HostError::NoRunDir),
    }
}

fn default_root() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        Some("/run/rekindle".into())
    } else {
        path_from_env("XDG_RUNTIME_DIR").map(|runtime| runtime.join("rekindle"))
    }
}

fn absolute(path: PathBuf) -> Result<PathBuf, HostError> {
    std::path::absolute(&path).map_err(|source| HostError::RunDir { path, source })
}

/// Returns the path in an environment variable, unless it is empty.
fn path_from_env(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Returns the directory of an unprivileged user's data that has to survive a reboot of the host.
fn user_state_dir(fallback: &Path) -> PathBuf {
    path_from_env("XDG_STATE_HOME")
        .or_else(|| path_from_env("HOME").map(|home| home.join(".local/state")))
        .map_or_else(|| fallback.to_owned(), |dir| dir.join("rekindle"))
}

/// Makes a directory that only this user may enter, with missing parents.
///
/// # Errors
/// When it cannot be made, or belongs to another user.
pub fn make_private(path: &Path) -> io::Result<()> {
    let denied = |why: String, user: &str| {
        let message = format!("{why}; run this command as {user}, or use a directory of your own");
        io::Error::new(io::ErrorKind::PermissionDenied, message)
    };
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|e| match e.kind() {
        io::ErrorKind::PermissionDenied => denied("permission denied".into(), "its owner, usually root (sudo)"),
        io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => io::Error::new(
            e.kind(),
            "a file is in its place; remove it, or set REKINDLE_RUN_DIR to a directory on a tmpfs",
        ),
        _ => e,
    })?;
    let owner = std::os::unix::fs::MetadataExt::uid(&fs::metadata(path)?);
    if owner == rustix::process::geteuid().as_raw() {
        Ok(())
    } else {
        let user = if owner == 0 { "root (sudo)".to_owned() } else { format!("user {owner}") };
        Err(denied(format!("it belongs to user {owner}"), &user))
    }
}

/// Adds what to write to an error in which serde only names the type.
fn with_remedy(message: String) -> String {
    match message.contains("expected a string") {
        true => message.trim_end().to_owned() + "; write the value in quotes, a size with its unit: \"512M\"",
        false => message,
    }
}

fn read_config(path: &Path) -> Result<Config, HostError> {
    let invalid = |message: String| HostError::Config { path: path.to_owned(), message };
    match fs::read_to_string(path) {
        Ok(text) => toml::from_str(&text).map_err(|e| invalid(with_remedy(e.to_string()))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Config::default()),
        Err(e) => Err(invalid(e.to_string())),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_directory_of_another_user_is_not_to_be_removed() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("run");
        fs::create_dir(&path).unwrap();
        assert!(make_private(&path).is_ok());
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        let e = make_private(&path).unwrap_err().to_string();
        assert!(e.contains("run this command as user 65534") && !e.contains("remove"), "{e}");
    }
}
