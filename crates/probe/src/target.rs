//! The target of a probe, given as a URL: `http://HOST[:PORT]/PATH`, `tcp://HOST:PORT` or `echo://HOST:PORT`.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Protocol of the requests to a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// HTTP/1.1 `GET` on a persistent connection. The whole body is read. A status of 400 or more is a wrong answer.
    Http,
    /// A new TCP connection for each request, which the target's kernel accepts for the service. The connection is
    /// closed with a reset: otherwise a probe every millisecond would soon have all local ports in `TIME_WAIT`.
    Tcp,
    /// Numbered lines on one TCP connection. The service must return each line unchanged, e.g. `socat TCP-LISTEN:7,fork
    /// EXEC:cat`.
    Echo,
}

impl Scheme {
    /// Returns the scheme as it is written in a URL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Tcp => "tcp",
            Self::Echo => "echo",
        }
    }
}

/// A service to probe. It is parsed from a URL, and formatted as a canonical URL.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Target {
    scheme: Scheme,
    host: Host,
    port: u16,
    path: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Host {
    Name(String),
    V4(Ipv4Addr),
    /// The zone names the interface of a link-local address.
    V6(Ipv6Addr, Option<String>),
}

/// Error of parsing a [`Target`] from a URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{url}`: {fault}; use http://HOST[:PORT]/PATH, tcp://HOST:PORT or echo://HOST:PORT (IPv6 in brackets)")]
pub struct UrlError {
    /// The URL as it was given.
    pub url: String,
    /// Fault of the URL.
    pub fault: UrlFault,
}

/// Faults of a URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages are enough")]
pub enum UrlFault {
    #[error("no scheme")]
    NoScheme,
    #[error("https is not supported: probe the plain port, or tcp:// for connects alone")]
    Https,
    #[error("unknown scheme `{0}`")]
    UnknownScheme(String),
    #[error("user names and passwords are not supported")]
    UserInfo,
    #[error("no host")]
    NoHost,
    #[error("`{0}` is neither a host name nor an address")]
    BadHost(String),
    #[error("no port, and {0} has no default one")]
    NoPort(&'static str),
    #[error("`{0}` is not a port (1 to 65535)")]
    BadPort(String),
    #[error("{0} takes no path")]
    PathNotTaken(&'static str),
    #[error("the path holds {0:?}, which must be percent-encoded or left out")]
    BadPath(char),
}

impl Target {
    /// Returns the protocol of the requests.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Returns the host as the resolver expects it: a name, or an address without brackets.
    pub fn host(&self) -> String {
        match &self.host {
            Host::Name(name) => name.clone(),
            Host::V4(address) => address.to_string(),
            Host::V6(address, None) => address.to_string(),
            Host::V6(address, Some(zone)) => format!("{address}%{zone}"),
        }
    }

    /// Returns the TCP port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the path and query of an HTTP request; empty for other schemes.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the value of an HTTP `Host` header. It has no zone, and no port if that is the default port.
    pub(crate) fn authority(&self) -> String {
        let host = match &self.host {
            Host::V6(address, _) => format!("[{address}]"),
            Host::Name(_) | Host::V4(_) => self.host(),
        };
        if self.default_port() == Some(self.port) { host } else { format!("{host}:{}", self.port) }
    }

    fn default_port(&self) -> Option<u16> {
        default_port(self.scheme)
    }

    fn parse(url: &str) -> Result<Self, UrlFault> {
        let (scheme, rest) = url.split_once("://").ok_or(UrlFault::NoScheme)?;
        let scheme = match scheme.to_ascii_lowercase().as_str() {
            "http" => Scheme::Http,
            "tcp" => Scheme::Tcp,
            "echo" => Scheme::Echo,
            "https" => return Err(UrlFault::Https),
            _ => return Err(UrlFault::UnknownScheme(scheme.to_owned())),
        };
        let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        if authority.contains('@') {
            return Err(UrlFault::UserInfo);
        }
        let (host, port) = split_port(authority)?;
        Ok(Self {
            scheme,
            host: Host::parse(host)?,
            port: match port {
                Some(text) => parse_port(text)?,
                None => default_port(scheme).ok_or(UrlFault::NoPort(scheme.as_str()))?,
            },
            path: parse_path(scheme, path)?,
        })
    }
}

impl Host {
    /// Parses a host, in which an IPv6 address has brackets.
    fn parse(text: &str) -> Result<Self, UrlFault> {
        let bad_host = || UrlFault::BadHost(text.to_owned());
        if text.is_empty() || text == "[]" {
            return Err(UrlFault::NoHost);
        }
        if let Some(inner) = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            let (address, zone) = match inner.split_once('%') {
                Some((address, zone)) => (address, Some(zone)),
                None => (inner, None),
            };
            if zone.is_some_and(|zone| !is_label(zone)) {
                return Err(bad_host());
            }
            return Ok(Self::V6(address.parse().map_err(|_| bad_host())?, zone.map(str::to_owned)));
        }
        if let Ok(address) = text.parse() {
            return Ok(Self::V4(address));
        }
        // The resolver interprets `10.1` and `10.0.0.256` in its own way. Therefore a name must have a letter in its
        // last label.
        let name = text.strip_suffix('.').unwrap_or(text);
        let has_valid_labels = name.len() <= 253 && name.split('.').all(|label| label.len() <= 63 && is_label(label));
        let has_letter = |label: &str| label.contains(|c: char| c.is_ascii_alphabetic());
        let is_name = has_valid_labels && name.rsplit('.').next().is_some_and(has_letter);
        if is_name { Ok(Self::Name(text.to_ascii_lowercase())) } else { Err(bad_host()) }
    }
}

fn is_label(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}

fn default_port(scheme: Scheme) -> Option<u16> {
    (scheme == Scheme::Http).then_some(80)
}

/// Splits `HOST[:PORT]`. An IPv6 host keeps its brackets.
fn split_port(authority: &str) -> Result<(&str, Option<&str>), UrlFault> {
    let bad_host = || UrlFault::BadHost(authority.to_owned());
    if authority.starts_with('[') {
        let host_end = authority.find(']').ok_or_else(bad_host)? + 1;
        return match authority[host_end..].strip_prefix(':') {
            Some(port) => Ok((&authority[..host_end], Some(port))),
            None if host_end == authority.len() => Ok((authority, None)),
            None => Err(bad_host()),
        };
    }
    match authority.split_once(':') {
        // Two colons mean an IPv6 address without brackets.
        Some((_, port)) if port.contains(':') => Err(bad_host()),
        Some((host, port)) => Ok((host, Some(port))),
        None => Ok((authority, None)),
    }
}

fn parse_port(text: &str) -> Result<u16, UrlFault> {
    // The parser of numbers would also accept a sign.
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(port) if is_number && port != 0 => Ok(port),
        _ => Err(UrlFault::BadPort(text.to_owned())),
    }
}

fn parse_path(scheme: Scheme, path: &str) -> Result<String, UrlFault> {
    if let Some(bad_character) = path.chars().find(|c| !c.is_ascii_graphic() || *c == '#') {
        return Err(UrlFault::BadPath(bad_character));
    }
    match scheme {
        Scheme::Http if path.starts_with('/') => Ok(path.to_owned()),
        Scheme::Http => Ok(format!("/{path}")),
        Scheme::Tcp | Scheme::Echo if matches!(path, "" | "/") => Ok(String::new()),
        Scheme::Tcp | Scheme::Echo => Err(UrlFault::PathNotTaken(scheme.as_str())),
    }
}

impl FromStr for Target {
    type Err = UrlError;

    fn from_str(url: &str) -> Result<Self, UrlError> {
        Self::parse(url).map_err(|fault| UrlError { url: url.to_owned(), fault })
    }
}

impl TryFrom<String> for Target {
    type Error = UrlError;

    fn try_from(url: String) -> Result<Self, UrlError> {
        url.parse()
    }
}

impl From<Target> for String {
    fn from(target: Target) -> Self {
        target.to_string()
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://", self.scheme.as_str())?;
        match &self.host {
            Host::V6(..) => write!(f, "[{}]", self.host())?,
            Host::Name(_) | Host::V4(_) => f.write_str(&self.host())?,
        }
        if self.default_port() != Some(self.port) {
            write!(f, ":{}", self.port)?;
        }
        f.write_str(&self.path)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fault(url: &str) -> UrlFault {
        let error = url.parse::<Target>().unwrap_err();
        assert_eq!(error.url, url);
        error.fault
    }

    #[test]
    fn accepted_forms() {
        for (url, host, port, path, canonical) in [
            ("http://10.0.0.2", "10.0.0.2", 80, "/", "http://10.0.0.2/"),
            ("HTTP://Web.Example:8080/a?b=c", "web.example", 8080, "/a?b=c", "http://web.example:8080/a?b=c"),
            ("http://web?q", "web", 80, "/?q", "http://web/?q"),
            ("http://[::1]:80/x", "::1", 80, "/x", "http://[::1]/x"),
            ("tcp://[fe80::1%tap0]:22", "fe80::1%tap0", 22, "", "tcp://[fe80::1%tap0]:22"),
            ("tcp://10.0.0.2:22/", "10.0.0.2", 22, "", "tcp://10.0.0.2:22"),
            ("echo://guest_1.local.:7", "guest_1.local.", 7, "", "echo://guest_1.local.:7"),
        ] {
            let target: Target = url.parse().unwrap();
            assert_eq!((target.host().as_str(), target.port(), target.path()), (host, port, path), "{url}");
            assert_eq!(target.to_string(), canonical);
        }
    }

    #[test]
    fn host_header_has_no_zone_and_no_default_port() {
        let authority = |url: &str| url.parse::<Target>().unwrap().authority();
        assert_eq!(authority("http://[fe80::1%tap0]:8080/"), "[fe80::1]:8080");
        assert_eq!(authority("http://web:80/"), "web");
    }

    #[test]
    fn each_fault_is_named() {
        assert_eq!(fault("10.0.0.2:80"), UrlFault::NoScheme);
        assert_eq!(fault("https://web/"), UrlFault::Https);
        assert_eq!(fault("htp://web/"), UrlFault::UnknownScheme("htp".into()));
        assert_eq!(fault("http://me@web/"), UrlFault::UserInfo);
        assert_eq!(fault("http:///index"), UrlFault::NoHost);
        assert_eq!(fault("tcp://:22"), UrlFault::NoHost);
        assert_eq!(fault("http://::1/"), UrlFault::BadHost("::1".into()));
        assert_eq!(fault("http://[::1/"), UrlFault::BadHost("[::1".into()));
        assert_eq!(fault("http://[::1]x/"), UrlFault::BadHost("[::1]x".into()));
        assert_eq!(fault("http://10.0.0.256/"), UrlFault::BadHost("10.0.0.256".into()));
        assert_eq!(fault("http://a..b/"), UrlFault::BadHost("a..b".into()));
        assert_eq!(fault("tcp://web"), UrlFault::NoPort("tcp"));
        assert_eq!(fault("tcp://web:0"), UrlFault::BadPort("0".into()));
        assert_eq!(fault("tcp://web:+1"), UrlFault::BadPort("+1".into()));
        assert_eq!(fault("tcp://web:65536"), UrlFault::BadPort("65536".into()));
        assert_eq!(fault("echo://web:7/x"), UrlFault::PathNotTaken("echo"));
        assert_eq!(fault("http://web/a b"), UrlFault::BadPath(' '));
        assert_eq!(fault("http://web/#top"), UrlFault::BadPath('#'));
        assert_eq!(fault("http://web/\r\nX: y"), UrlFault::BadPath('\r'));
    }

    #[test]
    fn the_message_names_the_url_and_the_forms() {
        assert_eq!(
            "htp://web/".parse::<Target>().unwrap_err().to_string(),
            "`htp://web/`: unknown scheme `htp`; use http://HOST[:PORT]/PATH, tcp://HOST:PORT or echo://HOST:PORT \
             (IPv6 in brackets)"
        );
    }

    #[test]
    fn serde_goes_through_the_url() {
        let target: Target = serde_json::from_str("\"http://10.0.0.2/\"").unwrap();
        assert_eq!(serde_json::to_string(&target).unwrap(), "\"http://10.0.0.2/\"");
        let error = serde_json::from_str::<Target>("\"web\"").unwrap_err().to_string();
        assert!(error.contains("`web`: no scheme"), "{error}");
    }

    fn hosts() -> impl Strategy<Value = String> {
        prop_oneof![
            any::<Ipv4Addr>().prop_map(|address| address.to_string()),
            any::<Ipv6Addr>().prop_map(|address| format!("[{address}]")),
            "[a-z][a-z0-9-]{0,10}(\\.[a-z][a-z0-9_-]{0,10}){0,3}",
        ]
    }

    proptest! {
        #[test]
        fn canonical_urls_come_back_the_same(
            scheme in prop::sample::select(vec!["http", "tcp", "echo"]),
            host in hosts(),
            port in 1_u16..,
            path in "/[a-z0-9/?=&%._~-]{0,20}",
        ) {
            let path = if scheme == "http" { path } else { String::new() };
            let target: Target = format!("{scheme}://{host}:{port}{path}").parse().unwrap();
            prop_assert_eq!(target.port(), port);
            prop_assert_eq!(target.path(), path);
            prop_assert_eq!(&target.to_string().parse::<Target>().unwrap(), &target);
        }

        #[test]
        fn any_text_parses_to_something_canonical_or_is_refused(url in "(http|tcp|echo)://\\PC{0,30}|\\PC{0,20}") {
            if let Ok(target) = url.parse::<Target>() {
                prop_assert!(!target.host().is_empty() && target.port() != 0);
                prop_assert!(target.path().bytes().all(|byte| byte.is_ascii_graphic()));
                prop_assert_eq!(&target.to_string().parse::<Target>().unwrap(), &target);
            }
        }
    }
}
