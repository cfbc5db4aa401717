//! User, groups and privileges of a process.

use super::EnvironmentError;
use super::action::{Action, Step};
use super::proc_file::ProcDirectory;
use rustix::fs::Mode;
use rustix::process::{Gid, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};
use std::io;

/// User, groups, privileges and umask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// Real, effective and saved user id.
    pub uid: u32,
    /// Real, effective and saved group id.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Capability sets.
    pub capabilities: Capabilities,
    /// Whether an exec can give no privileges.
    pub no_new_privs: bool,
    /// Permission bits that new files do not get.
    pub umask: u32,
}

/// The capability sets of a thread; `capabilities(7)` defines them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of capabilities(7)")]
pub struct Capabilities {
    pub inheritable: CapabilitySet,
    pub permitted: CapabilitySet,
    pub effective: CapabilitySet,
    pub bounding: CapabilitySet,
    pub ambient: CapabilitySet,
}

impl Credentials {
    /// Reads the credentials of `source`, and checks that `this`, the calling process, can reproduce them.
    pub(super) fn of(source: &ProcDirectory, this: &ProcDirectory) -> Result<Self, EnvironmentError> {
        let (credentials, ours) = (Self::read(source)?, Self::read(this)?);
        let pid = source.pid;
        if !ours.capabilities.bounding.contains(credentials.capabilities.bounding) {
            return Err(EnvironmentError::Restricted { pid, restriction: "a smaller capability bounding set" });
        }
        if ours.no_new_privs && !credentials.no_new_privs {
            return Err(EnvironmentError::Restricted { pid, restriction: "no_new_privs" });
        }
        let (now, after_exec) = (credentials.capabilities, credentials.capabilities_after_exec());
        if !now.permitted.contains(after_exec) || !now.effective.contains(after_exec) {
            return Err(EnvironmentError::DroppedCapabilities { pid });
        }
        Ok(credentials)
    }

    fn read(directory: &ProcDirectory) -> Result<Self, EnvironmentError> {
        let status = directory.text("status")?;
        let ids = |key| Some(value(&status, key)?.split_ascii_whitespace().map(str::to_owned).collect::<Vec<_>>());
        if ["Uid", "Gid"].iter().any(|key| ids(key).is_some_and(|ids| ids.iter().any(|id| *id != ids[0]))) {
            return Err(EnvironmentError::TwoUsers { pid: directory.pid });
        }
        Self::parse(&status).ok_or_else(|| directory.invalid("status", &status))
    }

    fn parse(status: &str) -> Option<Self> {
        let id = |key| value(status, key)?.split_ascii_whitespace().next()?.parse().ok();
        let set = |key| Some(CapabilitySet::from_bits_retain(u64::from_str_radix(value(status, key)?, 16).ok()?));
        Some(Self {
            uid: id("Uid")?,
            gid: id("Gid")?,
            groups: value(status, "Groups")?
                .split_ascii_whitespace()
                .map(|id| id.parse().ok())
                .collect::<Option<_>>()?,
            capabilities: Capabilities {
                inheritable: set("CapInh")?,
                permitted: set("CapPrm")?,
                effective: set("CapEff")?,
                bounding: set("CapBnd")?,
                ambient: set("CapAmb")?,
            },
            no_new_privs: value(status, "NoNewPrivs")? != "0",
            umask: u32::from_str_radix(value(status, "Umask")?, 8).ok()?,
        })
    }

    /// Returns the permitted and effective set after an exec of a program without file capabilities
    /// (`capabilities(7)`, *Transformation of capabilities during execve*).
    fn capabilities_after_exec(&self) -> CapabilitySet {
        let Capabilities { inheritable, permitted, bounding, ambient, .. } = self.capabilities;
        match (self.uid, self.no_new_privs) {
            (0, false) => inheritable | bounding,
            (0, true) => (inheritable | bounding) & permitted,
            _ => ambient,
        }
    }

    /// Appends the actions that take these credentials. Each needs a privilege that a later one drops.
    pub(super) fn add_actions(&self, actions: &mut Vec<Action>) {
        let Self { uid, gid, umask, capabilities, .. } = *self;
        let mut add = |step, run: Box<dyn Fn() -> io::Result<()> + Send + Sync>| actions.push(Action { step, run });
        let umask_action = move || {
            rustix::process::umask(Mode::from_raw_mode(umask));
            Ok(())
        };
        add(Step::Umask, Box::new(umask_action));
        let groups: Vec<_> = self.groups.iter().map(|&group| Gid::from_raw(group)).collect();
        // Even the same groups could not be set by a caller without CAP_SETGID.
        if rustix::process::getgroups().ok().as_ref() != Some(&groups) {
            add(Step::Groups, Box::new(move || Ok(rustix::thread::set_thread_groups(&groups)?)));
        }
        let gid = Gid::from_raw(gid);
        add(Step::GroupId, Box::new(move || Ok(rustix::thread::set_thread_res_gid(gid, gid, gid)?)));
        add(Step::BoundingSet, Box::new(move || limit_bounding_set(capabilities.bounding)));
        add(Step::UserId, Box::new(move || set_user(Uid::from_raw(uid))));
        add(Step::Capabilities, Box::new(move || capabilities.set()));
        if self.no_new_privs {
            add(Step::NoNewPrivs, Box::new(|| Ok(rustix::thread::set_no_new_privs(true)?)));
        }
    }
}

impl Capabilities {
    /// Sets all but the bounding set.
    fn set(self) -> io::Result<()> {
        let Self { inheritable, permitted, effective, ambient, .. } = self;
        rustix::thread::set_capabilities(None, CapabilitySets { effective, permitted, inheritable })?;
        rustix::thread::clear_ambient_capability_set()?;
        for capability in each_capability().filter(|&capability| ambient.contains(capability)) {
            rustix::thread::configure_capability_in_ambient_set(capability, true)?;
        }
        Ok(())
    }
}

/// Sets all user ids without losing the permitted capabilities, which [`Capabilities::set`] reduces afterwards.
fn set_user(uid: Uid) -> io::Result<()> {
    rustix::thread::set_keep_capabilities(true)?;
    Ok(rustix::thread::set_thread_res_uid(uid, uid, uid)?)
}

fn limit_bounding_set(remaining: CapabilitySet) -> io::Result<()> {
    for capability in each_capability().filter(|&capability| !remaining.contains(capability)) {
        match rustix::thread::capability_is_in_bounding_set(capability) {
            Ok(true) => rustix::thread::remove_capability_from_bounding_set(capability)?,
            Ok(false) => {}
            // The kernel has no capability of this number.
            Err(rustix::io::Errno::INVAL) => return Ok(()),
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn each_capability() -> impl Iterator<Item = CapabilitySet> {
    (0..u64::BITS).map(|bit| CapabilitySet::from_bits_retain(1 << bit))
}

/// Returns the value of a line `KEY:\tVALUE` of `/proc/PID/status`.
fn value<'a>(status: &'a str, key: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(permitted: &str, ambient: &str, no_new_privs: u8) -> Credentials {
        let status = format!(
            "Name:\tx\nUmask:\t0027\nUid:\t0\t0\t0\t0\nGid:\t5\t5\t5\t5\nGroups:\t5 1000 \n\
             CapInh:\t0\nCapPrm:\t{permitted}\nCapEff:\t{permitted}\n\
             CapBnd:\t3000\nCapAmb:\t{ambient}\nNoNewPrivs:\t{no_new_privs}\n"
        );
        Credentials::parse(&status).unwrap()
    }

    #[test]
    fn status_lines_become_credentials() {
        let credentials = root("3000", "0", 0);
        assert_eq!((credentials.uid, credentials.gid, credentials.umask), (0, 5, 0o27));
        assert_eq!(credentials.groups, [5, 1000]);
        assert_eq!(credentials.capabilities.bounding, CapabilitySet::NET_ADMIN | CapabilitySet::NET_RAW);
        assert_eq!(Credentials::parse("Uid:\t0\t0\t0\t0\n"), None);
    }

    #[test]
    fn an_exec_gives_root_its_bounding_set_and_other_users_their_ambient_set() {
        let both = CapabilitySet::NET_ADMIN | CapabilitySet::NET_RAW;
        assert_eq!(root("1000", "0", 0).capabilities_after_exec(), both);
        assert_eq!(root("1000", "0", 1).capabilities_after_exec(), CapabilitySet::NET_ADMIN);
        let user = Credentials { uid: 65534, ..root("3000", "1000", 0) };
        assert_eq!(user.capabilities_after_exec(), CapabilitySet::NET_ADMIN);
    }
}
