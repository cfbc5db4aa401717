//! The numbers of the users of VMs: each is the name of a link to the name of its VM.
//!
//! ```text
//! users/2100012345 -> web     the VM has this user
//! users/2100012345.used       a QEMU of the VM has run as this user
//! ```

use super::QemuUserError;
use crate::rundir::{ignore_missing, sync_directory};
use rekindle_kernel::users::is_in_use;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};

/// Users of VMs. systemd's list of user numbers leaves this range unused (UIDS-GIDS: 1879048192 to 2147483647), and so does the
/// range that SSSD uses unless it is configured (200000 to 2000200000).
const USERS: RangeInclusive<u32> = 2_100_000_000..=2_100_065_535;

/// Returns the user of a VM, and makes a record if there is none.
pub(super) fn assign(directory: &Path, name: &str) -> Result<u32, QemuUserError> {
    let failed = registry_error(directory, name);
    if let Some(user) = find(directory, name).map_err(&failed)? {
        return Ok(user);
    }
    add(directory, name).map_err(&failed)?.ok_or_else(|| QemuUserError::NoneFree { directory: directory.to_owned() })
}

/// Returns the user in the record of a VM.
pub(super) fn recorded(directory: &Path, name: &str) -> Result<Option<u32>, QemuUserError> {
    find(directory, name).map_err(registry_error(directory, name))
}

/// Removes a record. *Needs:* no process of the user, and no file that it may use.
pub(super) fn remove(directory: &Path, user: u32) -> io::Result<()> {
    fs::remove_file(directory.join(user.to_string()))?;
    sync_directory(directory)
}

/// Records that a QEMU has run as the user.
pub(super) fn mark_used(directory: &Path, user: u32) -> io::Result<()> {
    let mark = used_mark(directory, user);
    if mark.exists() {
        return Ok(());
    }
    File::create(mark)?;
    sync_directory(directory)
}

/// Returns whether a QEMU has run as the user. An error counts as one that has.
pub(super) fn is_used(directory: &Path, user: u32) -> bool {
    used_mark(directory, user).try_exists().unwrap_or(true)
}

fn used_mark(directory: &Path, user: u32) -> PathBuf {
    directory.join(format!("{user}.used"))
}

fn registry_error(directory: &Path, name: &str) -> impl Fn(io::Error) -> QemuUserError {
    move |source| QemuUserError::Registry { directory: directory.to_owned(), name: name.to_owned(), source }
}

/// Returns the numbers in the directory, each with its VM.
fn list(directory: &Path) -> io::Result<Vec<(u32, PathBuf)>> {
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

fn find(directory: &Path, name: &str) -> io::Result<Option<u32>> {
    let found = list(directory)?.into_iter().find(|(number, vm)| vm == Path::new(name) && USERS.contains(number));
    Ok(found.map(|(number, _)| number))
}

/// Makes a record of the VM: a link from the number to the name, made in one step, and by one process only. `None`: all
/// numbers are in use.
///
/// The first number that is tried is random, so that VMs of hosts that share storage seldom have the same one.
fn add(directory: &Path, name: &str) -> io::Result<Option<u32>> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let used: std::collections::BTreeSet<_> = list(directory)?.into_iter().map(|(number, _)| number).collect();
    let first = fastrand::u32(USERS);
    for number in (first..=*USERS.end()).chain(*USERS.start()..first).filter(|number| !used.contains(number)) {
        if is_in_use(number) {
            continue;
        }
        // Of a record that its owner has removed.
        ignore_missing(fs::remove_file(used_mark(directory, number)))?;
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn each_vm_keeps_a_user_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let users = directory.path().join("users");
        assert_eq!(find(&users, "web").unwrap(), None);
        let first = assign(&users, "web").unwrap();
        let second = assign(&users, "db").unwrap();
        assert_ne!(first, second);
        assert_eq!(find(&users, "web").unwrap(), Some(first));
        assert_eq!(assign(&users, "db").unwrap(), second);
        // A number that this version does not give.
        symlink("other", users.join("4000000000")).unwrap();
        assert_eq!(find(&users, "other").unwrap(), None);
        assert!(!is_used(&users, first));
        mark_used(&users, first).unwrap();
        mark_used(&users, first).unwrap();
        assert!(is_used(&users, first) && !is_used(&users, second));
        remove(&users, first).unwrap();
        assert_eq!(find(&users, "web").unwrap(), None);
    }

    #[test]
    fn vms_that_start_together_get_different_users() {
        let directory = tempfile::tempdir().unwrap();
        let users: Vec<_> = std::thread::scope(|scope| {
            let path = directory.path();
            let threads: Vec<_> =
                (0..8).map(|n| scope.spawn(move || add(path, &format!("vm{n}")).unwrap().unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let different: std::collections::BTreeSet<_> = users.iter().collect();
        assert_eq!(different.len(), users.len());
    }
}
