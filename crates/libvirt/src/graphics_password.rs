//! The passwords of a domain's VNC and SPICE servers, which only the status file has: QEMU does not report them.

use crate::status_file::{StatusFile, StatusFileError};
use roxmltree::Document;
use std::fmt;

/// A server that shows a domain's screen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Server {
    Vnc,
    Spice,
}

impl Server {
    /// Returns libvirt's name of it: the value of `type` in `<graphics>`.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Self::Vnc => "vnc",
            Self::Spice => "spice",
        }
    }

    /// Returns its name in a message.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Vnc => "VNC",
            Self::Spice => "SPICE",
        }
    }
}

/// When a password becomes invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expiry {
    Never,
    /// Seconds since 1970.
    At(u64),
}

/// The password of a VNC or SPICE server. Its `Debug` output does not contain it.
#[derive(Clone, PartialEq, Eq)]
pub struct GraphicsPassword {
    pub text: String,
    pub expiry: Expiry,
}

impl fmt::Debug for GraphicsPassword {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphicsPassword").field("expiry", &self.expiry).finish_non_exhaustive()
    }
}

impl GraphicsPassword {
    /// Returns the password that libvirt has recorded for a server of the domain. `None` without one; the server may
    /// have the default password of `qemu.conf` then.
    ///
    /// # Errors
    /// [`StatusFileError::Malformed`].
    pub fn of(status: &StatusFile, server: Server) -> Result<Option<Self>, StatusFileError> {
        parse(status.text(), server).map_err(|problem| status.malformed(problem))
    }

    /// Returns the expiry in the form of QEMU's `expire_password`. As in libvirt, an empty password expires immediately:
    /// it means that no client may connect.
    #[must_use]
    pub fn qemu_expiry(&self) -> String {
        match self.expiry {
            _ if self.text.is_empty() => "now".into(),
            Expiry::Never => "never".into(),
            Expiry::At(seconds) => seconds.to_string(),
        }
    }
}

fn parse(text: &str, server: Server) -> Result<Option<GraphicsPassword>, String> {
    let document = Document::parse(text).map_err(|e| e.to_string())?;
    let is_wanted = |node: &roxmltree::Node<'_, '_>| {
        let is_device = node.parent_element().is_some_and(|parent| parent.has_tag_name("devices"));
        node.has_tag_name("graphics") && node.attribute("type") == Some(server.kind()) && is_device
    };
    let Some(element) = document.descendants().find(is_wanted) else { return Ok(None) };
    let Some(password) = element.attribute("passwd") else { return Ok(None) };
    let expiry = match element.attribute("passwdValidTo") {
        None => Expiry::Never,
        Some(time) => Expiry::At(seconds(time).ok_or_else(|| format!("`{time}` is not a time in UTC"))?),
    };
    Ok(Some(GraphicsPassword { text: password.to_owned(), expiry }))
}

/// Returns the seconds since 1970 of a time such as `2030-04-09T15:51:00`, in UTC. A time before 1970 is 0.
fn seconds(time: &str) -> Option<u64> {
    let (date, time) = time.split_once('T')?;
    let numbers =
        |text: &str, separator| text.split(separator).map(|part| part.parse().ok()).collect::<Option<Vec<i64>>>();
    let (date, time) = (numbers(date, '-')?, numbers(time.trim_end_matches('Z'), ':')?);
    let (&[year, month, day], &[hours, minutes, seconds]) = (date.as_slice(), time.as_slice()) else { return None };
    let is_valid = (0..10_000).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && (0..24).contains(&hours)
        && (0..60).contains(&minutes)
        && (0..=60).contains(&seconds);
    if !is_valid {
        return None;
    }
    // Years begin in March, so that a leap day is the last day of its year.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days_before_month = (153 * month + 2) / 5;
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    /// Days from 1 March of the year 0 to 1 January 1970.
    const DAYS_TO_1970: i64 = 719_468;
    let days = year * 365 + leap_days + days_before_month + day - 1 - DAYS_TO_1970;
    Some(u64::try_from(((days * 24 + hours) * 60 + minutes) * 60 + seconds).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_seconds_since_1970() {
        let cases = [
            ("1970-01-01T00:00:00", Some(0)),
            ("2000-02-29T23:59:59", Some(951_868_799)),
            ("2010-04-09T15:51:00", Some(1_270_828_260)),
            ("2100-03-01T00:00:00Z", Some(4_107_542_400)),
            ("1969-12-31T23:59:59", Some(0)),
            ("2010-13-09T15:51:00", None),
            ("tomorrow", None),
            ("9223372036854775807-01-01T00:00:00", None),
        ];
        for (time, expected) in cases {
            assert_eq!(seconds(time), expected, "{time}");
        }
    }

    #[test]
    fn the_password_is_that_of_the_server_and_is_not_shown() {
        let status = |graphics: &str| {
            let text = format!("<domstatus><domain><devices>{graphics}</devices></domain></domstatus>");
            parse(&text, Server::Vnc)
        };
        assert_eq!(status("<graphics type='spice' passwd='s'/><graphics type='vnc'/>").unwrap(), None);
        let password = status("<graphics type='vnc' passwd='a&amp;b'/>").unwrap().unwrap();
        assert_eq!((password.text.as_str(), password.qemu_expiry().as_str()), ("a&b", "never"));
        assert!(!format!("{password:?}").contains("a&b"));
        let both = "<domain><devices><graphics type='vnc'/><graphics type='spice' passwd='s'/></devices></domain>";
        assert_eq!(parse(both, Server::Spice).unwrap().unwrap().text, "s");
        let expiring = "<graphics type='vnc' passwd='a' passwdValidTo='1970-01-02T00:00:00'/>";
        assert_eq!(status(expiring).unwrap().unwrap().qemu_expiry(), "86400");
        assert_eq!(status("<graphics type='vnc' passwd=''/>").unwrap().unwrap().qemu_expiry(), "now");
        let wrong = status("<graphics type='vnc' passwd='secret' passwdValidTo='x'/>").unwrap_err();
        assert!(wrong.contains("`x`") && !wrong.contains("secret"), "{wrong}");
    }
}
