//! The address of the health check of a guest's service: `http://10.77.0.2/`, `tcp://10.77.0.2:22`,
//! `echo://10.77.0.2:7`.
//!
//! This module only has the address. Another crate runs the check.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The condition under which the service is healthy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ProbeKind {
    /// `GET` is answered with a status below 400.
    Http,
    /// A connection is accepted.
    Tcp,
    /// One long connection returns the bytes that it was sent.
    Echo,
}

/// The address of a guest's health check.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Probe {
    /// The check to run.
    pub kind: ProbeKind,
    /// A host name or an address; an IPv6 address without its brackets.
    pub host: String,
    /// The TCP port.
    pub port: u16,
    /// Path and query for [`ProbeKind::Http`], with the leading `/`; otherwise empty.
    pub path: String,
}

/// Why a text is not a probe.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// The scheme is missing or unknown.
    #[error("not a probe; write http://HOST[:PORT]/PATH, tcp://HOST:PORT or echo://HOST:PORT")]
    BadScheme,
    /// The scheme is `https`: a probe with a certificate measures more than the guest.
    #[error("https is not supported; probe the plain port with http://, or only the connection with tcp://")]
    Https,
    /// The host is missing, or is not a valid name or address.
    #[error("`{host}` is not a host; write a host name, an IPv4 address or [IPv6 address]")]
    BadHost {
        /// The text in place of the host.
        host: String,
    },
    /// The port is missing: `tcp` and `echo` have no default.
    #[error("no port; write {hint}")]
    NoPort {
        /// The probe with an example of a port.
        hint: String,
    },
    /// The port is not a number from 1 to 65535.
    #[error("`{port}` is not a port; write a number from 1 to 65535")]
    BadPort {
        /// The text in place of the port.
        port: String,
    },
    /// A `tcp` or `echo` probe has a path.
    #[error("{scheme} has no path; write {hint}")]
    PathNotAllowed {
        /// `tcp` or `echo`.
        scheme: &'static str,
        /// The probe without the path.
        hint: String,
    },
}

impl ProbeKind {
    /// Returns the scheme, the part before `://`.
    pub const fn scheme(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Tcp => "tcp",
            Self::Echo => "echo",
        }
    }
}

impl FromStr for Probe {
    type Err = ProbeError;

    fn from_str(text: &str) -> Result<Self, ProbeError> {
        let (scheme, address) = text.split_once("://").ok_or(ProbeError::BadScheme)?;
        let kind = match scheme {
            "http" => ProbeKind::Http,
            "tcp" => ProbeKind::Tcp,
            "echo" => ProbeKind::Echo,
            "https" => return Err(ProbeError::Https),
            _ => return Err(ProbeError::BadScheme),
        };
        let (authority, path) = address.split_at(address.find(['/', '?']).unwrap_or(address.len()));
        let (host, port) = split_authority(authority)?;
        let port = match port {
            Some(port) => match port.parse::<u16>() {
                Ok(number) if number > 0 => number,
                _ => return Err(ProbeError::BadPort { port: port.into() }),
            },
            None if kind == ProbeKind::Http => 80,
            None => return Err(ProbeError::NoPort { hint: format!("{scheme}://{authority}:PORT") }),
        };
        let path = match kind {
            ProbeKind::Http if path.starts_with('/') => path.to_owned(),
            ProbeKind::Http => format!("/{path}"),
            _ if path.is_empty() || path == "/" => String::new(),
            _ => {
                let hint = format!("{scheme}://{authority}");
                return Err(ProbeError::PathNotAllowed { scheme: kind.scheme(), hint });
            }
        };
        Ok(Self { kind, host, port, path })
    }
}

/// Splits an authority into the host and the port, if it has one.
fn split_authority(authority: &str) -> Result<(String, Option<&str>), ProbeError> {
    let bad_host = || ProbeError::BadHost { host: authority.into() };
    if let Some(bracketed) = authority.strip_prefix('[') {
        let (host, port) = bracketed.split_once(']').ok_or_else(bad_host)?;
        let address: Ipv6Addr = host.parse().map_err(|_| bad_host())?;
        return match port {
            "" => Ok((address.to_string(), None)),
            port => Ok((address.to_string(), Some(port.strip_prefix(':').ok_or_else(bad_host)?))),
        };
    }
    let (host, port) = match authority.split_once(':') {
        Some((_, port)) if port.contains(':') => return Err(bad_host()),
        Some((host, port)) => (host, Some(port)),
        None => (authority, None),
    };
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || ['.', '-', '_'].contains(&c);
    if host.is_empty() || !host.chars().all(is_allowed) {
        return Err(bad_host());
    }
    Ok((host.to_owned(), port))
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://", self.kind.scheme())?;
        match self.host.parse::<IpAddr>() {
            Ok(IpAddr::V6(address)) => write!(f, "[{address}]")?,
            _ => f.write_str(&self.host)?,
        }
        if (self.kind, self.port) != (ProbeKind::Http, 80) {
            write!(f, ":{}", self.port)?;
        }
        f.write_str(&self.path)
    }
}

serde_as_text!(Probe);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_are_read_and_written() {
        for (text, shown, port) in [
            ("http://10.77.0.2/", "http://10.77.0.2/", 80),
            ("http://10.77.0.2", "http://10.77.0.2/", 80),
            ("http://web.lan:8080/health?full=1", "http://web.lan:8080/health?full=1", 8080),
            ("http://[fd00::2]:80/", "http://[fd00::2]/", 80),
            ("tcp://10.77.0.2:22", "tcp://10.77.0.2:22", 22),
            ("echo://[::1]:7", "echo://[::1]:7", 7),
        ] {
            let probe: Probe = text.parse().unwrap();
            assert_eq!((probe.to_string().as_str(), probe.port), (shown, port));
            assert_eq!(shown.parse::<Probe>().unwrap(), probe);
        }
    }

    #[test]
    fn the_error_for_a_wrong_probe_shows_a_right_one() {
        let form = "not a probe; write http://HOST[:PORT]/PATH, tcp://HOST:PORT or echo://HOST:PORT";
        for (text, message) in [
            ("10.77.0.2:80", form),
            ("ping://10.77.0.2", form),
            (
                "https://web/",
                "https is not supported; probe the plain port with http://, or only the connection with tcp://",
            ),
            ("http:///x", "`` is not a host; write a host name, an IPv4 address or [IPv6 address]"),
            ("http://fd00::2/", "`fd00::2` is not a host; write a host name, an IPv4 address or [IPv6 address]"),
            ("tcp://10.77.0.2", "no port; write tcp://10.77.0.2:PORT"),
            ("tcp://10.77.0.2:0", "`0` is not a port; write a number from 1 to 65535"),
            ("echo://10.77.0.2:7/x", "echo has no path; write echo://10.77.0.2:7"),
        ] {
            assert_eq!(text.parse::<Probe>().unwrap_err().to_string(), message, "{text}");
        }
    }
}
