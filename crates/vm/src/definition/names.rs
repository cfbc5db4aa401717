//! Names of VMs ([`Name`]), of their disks and nets, and of the host's interfaces and namespaces.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

const MAX_ID_CHARS: usize = 31;
/// `IFNAMSIZ` without the final zero.
pub(super) const MAX_INTERFACE_CHARS: usize = 15;
const MAX_FILE_NAME_CHARS: usize = 255;
/// `VIRTIO_BLK_ID_BYTES`.
const MAX_SERIAL_CHARS: usize = 20;

/// A VM's name. It is also the name of its run directory and the beginning of its interface names. Therefore it never
/// contains a `/`, never starts with a dot or a dash, and has at most [`Name::MAX`] characters out of `a-z`, `0-9`,
/// `.`, `_` and `-`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Name(String);

/// Why a text cannot be a name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The text is empty.
    #[error("empty; write 1 to {max} characters out of a-z, 0-9, `.`, `_` and `-`", max = Name::MAX)]
    Empty,
    /// More characters than fit into the path of a socket in the run directory.
    #[error("{length} characters long; shorten it to at most {max}", max = Name::MAX)]
    TooLong {
        /// Length in characters.
        length: usize,
    },
    /// A dot, a dash or an underscore at the start: the name would be a hidden file, or be taken for an option.
    #[error("starts with `{first}`; start it with a-z or 0-9")]
    BadStart {
        /// The first character.
        first: char,
    },
    /// A character that is not allowed.
    #[error("`{bad}` is not allowed in a name; use only a-z, 0-9, `.`, `_` and `-`")]
    BadCharacter {
        /// The first character that is not allowed.
        bad: char,
    },
}

impl Name {
    /// The largest number of characters.
    pub const MAX: usize = 63;

    /// Returns whether a new VM cannot have this name, because it is a subcommand of `rekindle reboot`.
    #[must_use]
    pub fn is_reserved(&self) -> bool {
        ["vmm", "os", "host"].contains(&self.as_str())
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || ['.', '_', '-'].contains(&c);
        if let Some(bad) = text.chars().find(|c| !is_allowed(*c)) {
            return Err(NameError::BadCharacter { bad });
        }
        match text.chars().next() {
            None => Err(NameError::Empty),
            Some(first) if !first.is_ascii_alphanumeric() => Err(NameError::BadStart { first }),
            Some(_) if text.len() > Self::MAX => Err(NameError::TooLong { length: text.len() }),
            Some(_) => Ok(Self(text.to_owned())),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

serde_as_text!(Name);

/// Checks the id of a disk or a net, which is part of QEMU's ids and of interface names.
pub(super) fn check_id(id: &str) -> Result<(), &'static str> {
    let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || ['_', '-'].contains(&c);
    if id.starts_with(|c: char| c.is_ascii_lowercase()) && id.chars().all(is_allowed) && id.len() <= MAX_ID_CHARS {
        Ok(())
    } else {
        Err("not an id; start with a-z, then at most 30 characters out of a-z, 0-9, `_` and `-`")
    }
}

/// Checks the name of an interface or a bridge by the kernel's rules.
pub(super) fn check_interface(name: &str) -> Result<(), &'static str> {
    if is_plain_name(name) && name.len() <= MAX_INTERFACE_CHARS {
        Ok(())
    } else {
        Err("not an interface name; write 1 to 15 characters out of a-z, A-Z, 0-9, `.`, `_` and `-`")
    }
}

/// Checks the name of a network namespace by the rules of `ip netns`.
pub(super) fn check_netns(name: &str) -> Result<(), &'static str> {
    if name.contains('/') {
        Err("not a namespace's name; write the name that `ip netns list` shows, not a path")
    } else if is_plain_name(name) && name.len() <= MAX_FILE_NAME_CHARS {
        Ok(())
    } else {
        Err("not a namespace's name; use only a-z, A-Z, 0-9, `.`, `_` and `-`")
    }
}

/// Checks the serial number that a virtio disk shows to its guest.
pub(super) fn check_serial(serial: &str) -> Result<(), &'static str> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || ['.', '_', '-'].contains(&c);
    if (1..=MAX_SERIAL_CHARS).contains(&serial.len()) && serial.chars().all(is_allowed) {
        Ok(())
    } else {
        Err("not a serial number; write 1 to 20 characters out of a-z, A-Z, 0-9, `.`, `_` and `-`")
    }
}

fn is_plain_name(name: &str) -> bool {
    !name.starts_with(['.', '-'])
        && !name.is_empty()
        && name.chars().all(|c| c.is_ascii_alphanumeric() || ['.', '_', '-'].contains(&c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_directories_and_interfaces() {
        let longest = "a".repeat(63);
        for good in ["web", "0", "a.b_c-d", "10.77.0.1", longest.as_str()] {
            assert_eq!(good.parse::<Name>().unwrap().as_str(), good);
        }
        for (bad, message) in [
            ("", "empty; write 1 to 63 characters out of a-z, 0-9, `.`, `_` and `-`"),
            ("../etc", "`/` is not allowed in a name; use only a-z, 0-9, `.`, `_` and `-`"),
            ("..", "starts with `.`; start it with a-z or 0-9"),
            ("-rf", "starts with `-`; start it with a-z or 0-9"),
            ("Web", "`W` is not allowed in a name; use only a-z, 0-9, `.`, `_` and `-`"),
            ("wéb", "`é` is not allowed in a name; use only a-z, 0-9, `.`, `_` and `-`"),
            (&"a".repeat(64), "64 characters long; shorten it to at most 63"),
        ] {
            assert_eq!(bad.parse::<Name>().unwrap_err().to_string(), message, "{bad}");
        }
    }

    #[test]
    fn stored_names_are_checked_again() {
        assert!(serde_json::from_str::<Name>("\"../../etc\"").is_err());
    }

    #[test]
    fn ids_interfaces_namespaces_and_serials() {
        assert!(check_id("disk0").is_ok() && check_id("a-b_c").is_ok());
        assert!(check_id("0disk").is_err() && check_id("").is_err() && check_id("a.b").is_err());
        assert!(check_interface("br0").is_ok() && check_interface("eth0.100").is_ok());
        assert!(check_interface("abcdefghijklmnop").is_err() && check_interface("tap%d").is_err());
        assert!(check_netns("blue").is_ok() && check_netns("/run/netns/blue").is_err() && check_netns("..").is_err());
        assert!(
            check_serial("ROOT-1").is_ok() && check_serial("a,b").is_err() && check_serial(&"x".repeat(21)).is_err()
        );
    }
}
