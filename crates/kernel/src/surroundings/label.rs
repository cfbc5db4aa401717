//! The label that a security module has given to a process, and by which it decides what the process may do.

use super::EnvironmentError;
use super::action::{Action, Step};
use super::proc_file::ProcDirectory;
use rustix::fs::{Mode, OFlags};
use std::ffi::CStr;
use std::fs;
use std::io;

/// The label of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SecurityLabel {
    /// A profile of AppArmor, `unconfined` if none applies.
    AppArmor {
        /// Its name, without the mode.
        profile: String,
    },
    /// A context of SELinux, or of another module with the same interface.
    Selinux {
        /// `user:role:type:level`
        context: String,
    },
}

impl SecurityLabel {
    /// Returns the label of the process with this number; `None` if no security module labels processes.
    ///
    /// # Errors
    /// If it has ended, or its label cannot be read.
    pub fn of_process(pid: u32) -> Result<Option<Self>, EnvironmentError> {
        Self::of(&ProcDirectory::of(pid))
    }

    /// Returns `None` if no security module labels processes.
    pub(super) fn of(source: &ProcDirectory) -> Result<Option<Self>, EnvironmentError> {
        // A kernel that has AppArmor or SELinux, but switched off, answers EINVAL or an empty text.
        let read = |name| match source.bytes(name) {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).trim_end_matches(['\0', '\n']).to_owned()),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) || e.kind() == io::ErrorKind::NotFound => {
                Ok(String::new())
            }
            Err(e) => Err(source.error(name, e)),
        };
        let app_armor = read("attr/apparmor/current")?;
        if !app_armor.is_empty() {
            return Ok(Some(Self::app_armor(&app_armor)));
        }
        let label = read("attr/current")?;
        let is_app_armor =
            || fs::read_to_string("/sys/module/apparmor/parameters/enabled").is_ok_and(|text| text.starts_with('Y'));
        Ok(match label {
            label if label.is_empty() => None,
            label if is_app_armor() => Some(Self::app_armor(&label)),
            context => Some(Self::Selinux { context }),
        })
    }

    /// Removes the mode from a text like `libvirt-4f1c... (enforce)`.
    fn app_armor(text: &str) -> Self {
        let profile = match text.rsplit_once(" (") {
            Some((profile, mode)) if mode.ends_with(')') => profile,
            _ => text,
        };
        Self::AppArmor { profile: profile.to_owned() }
    }

    /// Returns the action that sets the label for the next exec. It comes before the namespaces, because the mount
    /// namespace may have no `/proc`.
    pub(super) fn action(&self) -> Action {
        let (label, text) = match self {
            Self::AppArmor { profile } => (profile, format!("exec {profile}")),
            Self::Selinux { context } => (context, context.clone()),
        };
        let is_app_armor = matches!(self, Self::AppArmor { .. });
        Action::new(Step::Label(label.clone()), move || {
            if is_app_armor {
                match write(c"/proc/thread-self/attr/apparmor/exec", &text) {
                    // Linux before 5.8 has the general file only.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    result => return result,
                }
            }
            write(c"/proc/thread-self/attr/exec", &text)
        })
    }
}

fn write(path: &CStr, text: &str) -> io::Result<()> {
    let file = rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(file, text.as_bytes())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_have_no_mode() {
        for (text, profile) in [
            ("libvirt-4f1c (enforce)", "libvirt-4f1c"),
            ("unconfined", "unconfined"),
            ("a profile (x) (complain)", "a profile (x)"),
        ] {
            assert_eq!(SecurityLabel::app_armor(text), SecurityLabel::AppArmor { profile: profile.into() });
        }
    }
}
