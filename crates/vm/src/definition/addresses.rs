//! The addresses in a `[[net]]`: of an interface ([`Mac`]), of the host ([`HostAddress`]), of a forwarded port
//! ([`Forward`]). Crates for Ethernet addresses accept further spellings, so [`Mac`] has its own parser.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// The Ethernet address of one interface: neither zero nor a group address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Mac([u8; 6]);

/// An address and the prefix length of its network: `10.77.0.1/24`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct HostAddress(IpNet);

/// A port of the host that leads to a port of the guest: `ADDRESS:PORT:GUEST_PORT`, with the suffix `/udp` for UDP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Forward {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Address of the host to listen on; `0.0.0.0` means all addresses.
    pub host: Ipv4Addr,
    /// Port of the host.
    pub port: u16,
    /// Port of the guest.
    pub guest_port: u16,
}

/// Transport protocol of a [`Forward`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// Why a text is not a valid address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The text does not have six bytes.
    #[error("not an Ethernet address; write six pairs of hexadecimal digits, for example 52:54:00:12:34:56")]
    Mac,
    /// A multicast address or zero: no interface has it.
    #[error("a group or null address, which no single interface can have; write one like 52:54:00:12:34:56")]
    MacGroup,
    /// The prefix length or the address is missing.
    #[error("not an address with a prefix length; write for example 10.77.0.1/24")]
    HostAddress,
    /// An address that a host cannot have.
    #[error("the {kind}, not an address for the host; write the host's own, for example {hint}")]
    NotAHost {
        /// What the address is instead.
        kind: &'static str,
        /// An address that would be valid.
        hint: String,
    },
    /// The text does not have the form `ADDRESS:PORT:GUEST_PORT`.
    #[error("not a forward; write HOST_ADDRESS:HOST_PORT:GUEST_PORT, for example {hint}")]
    Forward {
        /// The text corrected as far as it can be understood, or an example.
        hint: String,
    },
    /// An IPv6 address: QEMU's user-mode network forwards only IPv4.
    #[error("only IPv4 addresses can be forwarded; write for example 127.0.0.1:2222:22")]
    ForwardIpv6,
    /// A port that is not a number from 1 to 65535.
    #[error("`{0}` is not a port; write a number from 1 to 65535")]
    Port(String),
}

impl Mac {
    /// Returns the address of net `id` of VM `name`: QEMU's prefix 52:54:00, which is locally administered, and 24
    /// bits of a hash of both names. The same names always give the same address, on every host and in every release
    /// of Rekindle.
    pub fn derived(name: &str, id: &str) -> Self {
        let [byte0, byte1, byte2, ..] = digest(name, id);
        Self([0x52, 0x54, 0x00, byte0, byte1, byte2])
    }

    /// Returns the bytes in the order of the wire.
    pub const fn octets(self) -> [u8; 6] {
        self.0
    }
}

/// Hashes both names with XXH3. Its specification is fixed: derived addresses must never change between releases.
pub(super) fn digest(name: &str, id: &str) -> [u8; 8] {
    xxh3_64(format!("{name}\0{id}").as_bytes()).to_be_bytes()
}

impl FromStr for Mac {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let mut octets = [0; 6];
        let mut pairs = text.split(':');
        for octet in &mut octets {
            let pair = pairs.next().filter(|p| p.len() == 2 && p.bytes().all(|b| b.is_ascii_hexdigit()));
            *octet = pair.and_then(|p| u8::from_str_radix(p, 16).ok()).ok_or(AddressError::Mac)?;
        }
        match pairs.next() {
            Some(_) => Err(AddressError::Mac),
            None if octets[0] & 1 == 1 || octets == [0; 6] => Err(AddressError::MacGroup),
            None => Ok(Self(octets)),
        }
    }
}

impl FromStr for HostAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let net = text.parse().ok().filter(|net: &IpNet| net.prefix_len() > 0).ok_or(AddressError::HostAddress)?;
        let address = net.addr();
        let first_host = net.hosts().find(|host| *host != net.network());
        // In a network of one or two addresses, each of them is a host's.
        let has_reserved_addresses = net.max_prefix_len() - net.prefix_len() > 1;
        let (kind, valid_host) = if address.is_multicast() {
            ("address of a group", None)
        } else if has_reserved_addresses && address == net.network() {
            ("address of the network itself", first_host)
        } else if has_reserved_addresses && address.is_ipv4() && address == net.broadcast() {
            ("broadcast address of the network", first_host)
        } else {
            return Ok(Self(net));
        };
        let hint = valid_host.map_or_else(|| "10.77.0.1/24".into(), |host| format!("{host}/{}", net.prefix_len()));
        Err(AddressError::NotAHost { kind, hint })
    }
}

impl Forward {
    /// Returns the value of QEMU's `hostfwd`: `tcp:127.0.0.1:2222-:22`.
    pub fn hostfwd(&self) -> String {
        format!("{}:{}:{}-:{}", self.protocol.as_str(), self.host, self.port, self.guest_port)
    }

    /// Returns whether both would listen on the same port of the host.
    pub fn collides_with(&self, other: &Self) -> bool {
        self.protocol == other.protocol
            && self.port == other.port
            && (self.host == other.host || self.host.is_unspecified() || other.host.is_unspecified())
    }
}

impl Protocol {
    /// Returns `tcp` or `udp`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

impl FromStr for Forward {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        parse_forward(text)?.ok_or_else(|| AddressError::Forward { hint: corrected_forward(text) })
    }
}

/// Parses a forward. Returns `None` if its form or its address is wrong, so that a hint is needed.
fn parse_forward(text: &str) -> Result<Option<Forward>, AddressError> {
    let (addresses, protocol) = match text.split_once('/') {
        None => (text, Protocol::Tcp),
        Some((addresses, "tcp")) => (addresses, Protocol::Tcp),
        Some((addresses, "udp")) => (addresses, Protocol::Udp),
        Some(_) => return Ok(None),
    };
    if addresses.starts_with('[') || addresses.starts_with("::") {
        return Err(AddressError::ForwardIpv6);
    }
    let &[host, port, guest_port] = addresses.split(':').collect::<Vec<_>>().as_slice() else { return Ok(None) };
    let Ok(host) = host.parse() else { return Ok(None) };
    let parse_port = |text: &str| match text.parse::<u16>() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(AddressError::Port(text.to_owned())),
    };
    Ok(Some(Forward { protocol, host, port: parse_port(port)?, guest_port: parse_port(guest_port)? }))
}

/// Returns the hint for a wrong forward. Other programs write `2222:22` or `tcp:127.0.0.1:2222-:22` (or
/// `tcp::2222-:22`): the hint has our spelling of it.
fn corrected_forward(text: &str) -> String {
    let (addresses, suffix) = match text.split_once(':') {
        Some(("tcp", addresses)) => (addresses, ""),
        Some(("udp", addresses)) => (addresses, "/udp"),
        _ => (text, ""),
    };
    let corrected = match addresses.split([':', '-']).filter(|part| !part.is_empty()).collect::<Vec<_>>().as_slice() {
        [port, guest_port] => format!("127.0.0.1:{port}:{guest_port}{suffix}"),
        [host, port, guest_port] => format!("{host}:{port}:{guest_port}{suffix}"),
        _ => String::new(),
    };
    match parse_forward(&corrected) {
        Ok(Some(forward)) => forward.to_string(),
        _ => "127.0.0.1:2222:22".into(),
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs = self.0.map(|octet| format!("{octet:02x}"));
        f.write_str(&pairs.join(":"))
    }
}

impl fmt::Display for HostAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Display for Forward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.host, self.port, self.guest_port)?;
        if self.protocol == Protocol::Udp { f.write_str("/udp") } else { Ok(()) }
    }
}

serde_as_text!(Mac, HostAddress, Forward);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_addresses_never_change() {
        // Guests know their interface by this address: a change of it breaks their network after an upgrade.
        assert_eq!(Mac::derived("web", "net0").to_string(), "52:54:00:3f:74:0d");
        assert_ne!(Mac::derived("web", "net0"), Mac::derived("web", "net1"));
        assert_ne!(Mac::derived("ab", "c"), Mac::derived("a", "bc"));
        assert_eq!(Mac::derived("db", "net0").octets()[0] & 3, 2, "locally administered, one station");
    }

    #[test]
    fn macs_are_read_and_group_addresses_are_rejected() {
        assert_eq!("52:54:00:AB:cd:01".parse::<Mac>().unwrap().to_string(), "52:54:00:ab:cd:01");
        for bad in ["52:54:00:ab:cd", "52:54:00:ab:cd:01:02", "52-54-00-ab-cd-01", "52:54:00:ab:cd:+1", ""] {
            assert_eq!(bad.parse::<Mac>(), Err(AddressError::Mac), "{bad}");
        }
        for group in ["01:00:5e:00:00:01", "ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00"] {
            assert_eq!(group.parse::<Mac>(), Err(AddressError::MacGroup), "{group}");
        }
    }

    #[test]
    fn host_addresses_are_read_and_others_are_rejected() {
        for good in ["10.77.0.1/24", "10.0.0.0/31", "10.0.0.7/32", "fd00::1/64", "fd00::ffff/112"] {
            assert_eq!(good.parse::<HostAddress>().unwrap().to_string(), good);
        }
        for bad in ["10.77.0.1", "10.77.0.1/33", "10.77.0.1/0", "10.77.0/24", "x/24"] {
            assert_eq!(bad.parse::<HostAddress>(), Err(AddressError::HostAddress), "{bad}");
        }
        for (bad, message) in [
            (
                "10.77.0.0/24",
                "the address of the network itself, not an address for the host; write the host's own, for example 10.77.0.1/24",
            ),
            (
                "10.77.0.255/24",
                "the broadcast address of the network, not an address for the host; write the host's own, for example 10.77.0.1/24",
            ),
            (
                "224.0.0.1/24",
                "the address of a group, not an address for the host; write the host's own, for example 10.77.0.1/24",
            ),
            (
                "fd00::/64",
                "the address of the network itself, not an address for the host; write the host's own, for example fd00::1/64",
            ),
        ] {
            assert_eq!(bad.parse::<HostAddress>().unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn forwards_are_read_written_and_compared() {
        let ssh: Forward = "127.0.0.1:2222:22".parse().unwrap();
        assert_eq!((ssh.to_string().as_str(), ssh.hostfwd().as_str()), ("127.0.0.1:2222:22", "tcp:127.0.0.1:2222-:22"));
        let dns: Forward = "0.0.0.0:5353:53/udp".parse().unwrap();
        assert_eq!((dns.to_string().as_str(), dns.hostfwd().as_str()), ("0.0.0.0:5353:53/udp", "udp:0.0.0.0:5353-:53"));
        assert_eq!("127.0.0.1:2222:22/tcp".parse::<Forward>().unwrap(), ssh);
        assert!(ssh.collides_with(&"0.0.0.0:2222:80".parse().unwrap()));
        assert!(!ssh.collides_with(&"127.0.0.2:2222:22".parse().unwrap()));
        assert!(!ssh.collides_with(&"127.0.0.1:2222:22/udp".parse().unwrap()));
    }

    #[test]
    fn other_spellings_of_a_forward_are_answered_with_ours() {
        let form = "not a forward; write HOST_ADDRESS:HOST_PORT:GUEST_PORT, for example";
        for (text, message) in [
            ("2222:22", format!("{form} 127.0.0.1:2222:22")),
            ("8080:80", format!("{form} 127.0.0.1:8080:80")),
            ("tcp:127.0.0.9:8080-:80", format!("{form} 127.0.0.9:8080:80")),
            ("udp:0.0.0.0:53-:53", format!("{form} 0.0.0.0:53:53/udp")),
            ("tcp::5555-:22", format!("{form} 127.0.0.1:5555:22")),
            ("localhost:2222:22", format!("{form} 127.0.0.1:2222:22")),
            ("ssh", format!("{form} 127.0.0.1:2222:22")),
            ("::1:2222:22", "only IPv4 addresses can be forwarded; write for example 127.0.0.1:2222:22".into()),
            ("[::1]:2222:22", "only IPv4 addresses can be forwarded; write for example 127.0.0.1:2222:22".into()),
            ("127.0.0.1:0:22", "`0` is not a port; write a number from 1 to 65535".into()),
            ("127.0.0.1:2222:ssh", "`ssh` is not a port; write a number from 1 to 65535".into()),
        ] {
            assert_eq!(text.parse::<Forward>().unwrap_err().to_string(), message, "{text}");
        }
    }
}
