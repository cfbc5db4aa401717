//! Dropping the capabilities of root.

use super::files::Grant;
use crate::users::become_user;
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
pub use rustix::thread::CapabilitySet;
use rustix::thread::{
    CapabilitySets, capabilities, clear_ambient_capability_set, remove_capability_from_bounding_set, set_capabilities,
    set_keep_capabilities, set_no_new_privs,
};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::thread;

/// Returns the capabilities without which this user cannot open the granted files: none, unless root uses files of
/// another user.
#[must_use]
pub fn capabilities_for(grants: &[Grant]) -> CapabilitySet {
    if !rustix::process::geteuid().is_root() {
        return CapabilitySet::empty();
    }
    // A thread has its own capabilities, and the check must be made without them.
    let needed = thread::scope(|scope| {
        let check = scope.spawn(|| {
            let none = CapabilitySet::empty();
            set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
            Ok::<_, Errno>(grants.iter().filter(|grant| is_denied(grant)).map(capability_for).collect())
        });
        check.join()
    });
    // If it cannot be checked, files that cannot be opened are reported when they are needed.
    match needed {
        Ok(Ok(needed)) => needed,
        Ok(Err(_)) | Err(_) => CapabilitySet::empty(),
    }
}

/// Returns the capability with which root can open a file that is denied to it.
fn capability_for(denied: &Grant) -> CapabilitySet {
    if denied.access.is_writing() { CapabilitySet::DAC_OVERRIDE } else { CapabilitySet::DAC_READ_SEARCH }
}

fn is_denied(grant: &Grant) -> bool {
    let metadata = grant.path.metadata();
    if metadata.is_ok_and(|metadata| metadata.is_dir() && metadata.uid() != 0) {
        // Its files belong to that user, too.
        return true;
    }
    let wanted = if !grant.access.is_writing() {
        Access::READ_OK
    } else if grant.path.is_dir() {
        Access::WRITE_OK | Access::EXEC_OK
    } else {
        Access::READ_OK | Access::WRITE_OK
    };
    accessat(CWD, &grant.path, wanted, AtFlags::empty()) == Err(Errno::ACCESS)
}

/// Reduces the capabilities of the calling thread, and what it could gain by a program, to those of `kept` that it has. With a
/// `user`, makes it this user, and the group of the same number; *needs:* root, one thread.
///
/// No other process of this user can trace it or read its memory (`PR_SET_DUMPABLE`).
///
/// # Errors
/// Errors of `capset(2)`, `prctl(2)`, `setresuid(2)`.
pub(super) fn reduce_to(kept: CapabilitySet, user: Option<u32>) -> io::Result<()> {
    set_no_new_privs(true)?;
    clear_ambient_capability_set()?;
    for capability in CapabilitySet::all().iter() {
        match remove_capability_from_bounding_set(capability) {
            // Not a capability of this kernel; or a user that has no capabilities, and cannot gain any without new
            // privileges.
            Ok(()) | Err(Errno::INVAL | Errno::PERM) => {}
            Err(e) => return Err(e.into()),
        }
    }
    let kept = kept & capabilities(None)?.permitted;
    if let Some(user) = user {
        set_keep_capabilities(!kept.is_empty())?;
        become_user(user, user, &[])?;
        set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    }
    let none = CapabilitySet::empty();
    Ok(set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: none })?)
}
