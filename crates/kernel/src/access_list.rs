//! Access control lists of files (acl(5)), as the kernel stores them: `linux/posix_acl_xattr.h`.

use rustix::fs::{XattrFlags, getxattr, setxattr};
use rustix::io::Errno;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Permission to read, in a list and in the last three bits of a mode.
pub const READ: u16 = 4;
/// Permission to write.
pub const WRITE: u16 = 2;

const ATTRIBUTE: &str = "system.posix_acl_access";
const VERSION: [u8; 4] = 2_u32.to_le_bytes();
const ENTRY_BYTES: usize = 8;
/// Largest value of an attribute (`XATTR_SIZE_MAX`).
const MAX_BYTES: usize = 64 << 10;

/// Kinds of entries, in the order that the kernel requires.
const OWNER: u16 = 0x01;
const USER: u16 = 0x02;
const OWNING_GROUP: u16 = 0x04;
const GROUP: u16 = 0x08;
/// Limits the entries of users and groups; in the mode, it takes the place of the owning group.
const MASK: u16 = 0x10;
const OTHERS: u16 = 0x20;
/// The number in an entry that has none.
const NO_ID: u32 = u32::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    kind: u16,
    permissions: u16,
    id: u32,
}

/// Returns what the entry of a user permits, limited by the mask: bits of [`READ`] and [`WRITE`]. `None` without an entry.
///
/// # Errors
/// When the list cannot be read, or the file system has none.
pub fn of_user(path: &Path, user: u32) -> io::Result<Option<u16>> {
    let entries = read(path)?;
    let mask = find(&entries, MASK, NO_ID).map_or(u16::MAX, |mask| mask.permissions);
    Ok(find(&entries, USER, user).map(|entry| entry.permissions & mask & (READ | WRITE)))
}

/// Adds `permissions` to the entry of a user. Nothing changes for others.
///
/// # Errors
/// As [`of_user`]; `PermissionDenied` if this process is not the owner and not root.
pub fn add_user(path: &Path, user: u32, permissions: u16) -> io::Result<()> {
    let mut entries = read(path)?;
    match find(&entries, MASK, NO_ID).copied() {
        // A larger mask must not restore what `chmod` has taken away from the other entries.
        Some(mask) => {
            let limited = entries.iter_mut().filter(|entry| [USER, OWNING_GROUP, GROUP].contains(&entry.kind));
            limited.for_each(|entry| entry.permissions &= mask.permissions);
        }
        None => {
            let group = find(&entries, OWNING_GROUP, NO_ID).map_or(0, |group| group.permissions);
            entries.push(Entry { kind: MASK, permissions: group, id: NO_ID });
        }
    }
    if find(&entries, USER, user).is_none() {
        entries.push(Entry { kind: USER, permissions: 0, id: user });
    }
    let changed = entries.iter_mut().filter(|entry| entry.kind == MASK || entry.kind == USER && entry.id == user);
    changed.for_each(|entry| entry.permissions |= permissions);
    entries.sort_by_key(|entry| (entry.kind, entry.id));
    Ok(setxattr(path, ATTRIBUTE, &encode(&entries), XattrFlags::empty())?)
}

/// Removes the entry of a user, if there is one. Nothing changes for others.
///
/// # Errors
/// As [`add_user`].
pub fn remove_user(path: &Path, user: u32) -> io::Result<()> {
    let mut entries = read(path)?;
    if find(&entries, USER, user).is_none() {
        return Ok(());
    }
    entries.retain(|entry| entry.kind != USER || entry.id != user);
    // Without a mask, the file has a mode only.
    if !entries.iter().any(|entry| [USER, GROUP].contains(&entry.kind)) {
        let mask = find(&entries, MASK, NO_ID).map_or(u16::MAX, |mask| mask.permissions);
        entries.retain(|entry| entry.kind != MASK);
        let group = entries.iter_mut().filter(|entry| entry.kind == OWNING_GROUP);
        group.for_each(|entry| entry.permissions &= mask);
    }
    Ok(setxattr(path, ATTRIBUTE, &encode(&entries), XattrFlags::empty())?)
}

fn find(entries: &[Entry], kind: u16, id: u32) -> Option<&Entry> {
    entries.iter().find(|entry| entry.kind == kind && (entry.id == id || id == NO_ID))
}

/// Reads the list. A file without one has the entries of its mode.
fn read(path: &Path) -> io::Result<Vec<Entry>> {
    let mut bytes = vec![0; MAX_BYTES];
    match getxattr(path, ATTRIBUTE, bytes.as_mut_slice()) {
        Ok(length) => decode(bytes.get(..length).unwrap_or_default()).ok_or_else(|| io::ErrorKind::InvalidData.into()),
        Err(Errno::NODATA) => {
            let mode = fs::metadata(path)?.mode() as u16;
            let entry = |kind, shift: u32| Entry { kind, permissions: (mode >> shift) & 0o7, id: NO_ID };
            Ok(vec![entry(OWNER, 6), entry(OWNING_GROUP, 3), entry(OTHERS, 0)])
        }
        Err(e) => Err(e.into()),
    }
}

fn decode(bytes: &[u8]) -> Option<Vec<Entry>> {
    let (entries, []) = bytes.strip_prefix(&VERSION)?.as_chunks::<ENTRY_BYTES>() else { return None };
    let entry = |[k0, k1, p0, p1, id @ ..]: &[u8; ENTRY_BYTES]| Entry {
        kind: u16::from_le_bytes([*k0, *k1]),
        permissions: u16::from_le_bytes([*p0, *p1]),
        id: u32::from_le_bytes(*id),
    };
    Some(entries.iter().map(entry).collect())
}

fn encode(entries: &[Entry]) -> Vec<u8> {
    let mut bytes = VERSION.to_vec();
    for Entry { kind, permissions, id } in entries {
        bytes.extend([kind.to_le_bytes(), permissions.to_le_bytes()].concat());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    const FIRST: u32 = 1_700_000_001;
    const SECOND: u32 = 1_700_000_002;

    /// Returns whether a process of the user can open the file, for each of reading and writing.
    fn opens(path: &Path, user: u32) -> [bool; 2] {
        ["<", ">>"].map(|how| {
            let script = format!(": {how}\"$1\"");
            let mut shell = Command::new("sh");
            shell.args(["-c", &script, "sh"]).arg(path).uid(user).gid(user);
            shell.output().unwrap().status.success()
        })
    }

    #[test]
    fn a_user_gets_what_is_added_and_no_other_user_gets_more() {
        assert!(rustix::process::geteuid().is_root(), "this test needs root");
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        let path = directory.path().join("file");
        fs::write(&path, "content").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(of_user(&path, FIRST).unwrap(), None);
        add_user(&path, FIRST, READ).unwrap();
        assert_eq!((of_user(&path, FIRST).unwrap(), opens(&path, FIRST)), (Some(READ), [true, false]));
        assert_eq!((of_user(&path, SECOND).unwrap(), opens(&path, SECOND)), (None, [false, false]));
        add_user(&path, FIRST, READ | WRITE).unwrap();
        assert_eq!(opens(&path, FIRST), [true, true]);
        // `chmod` takes it away from all entries; only that of the second user comes back.
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert_eq!((of_user(&path, FIRST).unwrap(), opens(&path, FIRST)), (Some(0), [false, false]));
        add_user(&path, SECOND, READ).unwrap();
        assert_eq!((opens(&path, FIRST), opens(&path, SECOND)), ([false, false], [true, false]));
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o707, 0o600, "owner and others");
        remove_user(&path, FIRST).unwrap();
        assert_eq!((of_user(&path, FIRST).unwrap(), opens(&path, SECOND)), (None, [true, false]));
        remove_user(&path, SECOND).unwrap();
        assert_eq!((opens(&path, SECOND), fs::metadata(&path).unwrap().mode() & 0o777), ([false, false], 0o600));
        remove_user(&path, SECOND).unwrap();
    }

    #[test]
    fn a_list_that_is_not_understood_is_an_error() {
        assert_eq!(decode(&encode(&[])), Some(Vec::new()));
        assert_eq!(decode(&[3, 0, 0, 0]), None);
        assert_eq!(decode(&[2, 0, 0, 0, 1]), None);
    }
}
