//! Character devices: the host's ends of serial ports, channels and monitors. Listening sockets are passed as
//! descriptors, ptys are opened anew, files are appended to. The *source* is the QEMU that runs the guest now.

use super::{Descriptor, ListenAddress, OWN_ID_PREFIX, Rewriter, SourceDescriptor, pid_file, rules};
use crate::foreign::CommandOption;
use crate::options::Options;
use std::net::IpAddr;
use std::os::fd::RawFd;

/// Options of a listening socket that state where it listens.
pub(super) const ADDRESS_KEYS: [&str; 10] =
    ["path", "host", "port", "to", "ipv4", "ipv6", "abstract", "tight", "mptcp", "localaddr"];

const STANDARD_INPUT: RawFd = 0;

impl Rewriter<'_> {
    pub(super) fn read_chardev(&mut self, option: &CommandOption<'_>) {
        let Some(mut chardev) = self.parse(option, "backend") else { return };
        let id = chardev.get("id").unwrap_or_default();
        // An earlier replacement has added it.
        if let Some(path) = pid_file::of_id(&id) {
            self.pid_file = Some(path);
        }
        if id.starts_with(OWN_ID_PREFIX) || self.facts.removed_ports.contains(&id) {
            return;
        }
        let what = format!("-chardev {id}");
        let passed = match self.tpm_connections.contains(&id) {
            true => self.pass_tpm_connection(&what, &mut chardev),
            false => self.pass_chardev(&what, &mut chardev),
        };
        match passed {
            Some(true) => self.add("chardev", chardev.to_string()),
            Some(false) => self.keep_unchanged(option),
            None => {}
        }
    }

    /// Keeps a monitor, unless an earlier replacement has added it.
    pub(super) fn read_mon(&mut self, option: &CommandOption<'_>) {
        let Some(monitor) = self.parse(option, "chardev") else { return };
        if !monitor.get("chardev").is_some_and(|id| id.starts_with(OWN_ID_PREFIX)) {
            self.keep_unchanged(option);
        }
    }

    /// Handles options such as `-serial unix:/run/s,server,nowait`, whose value describes a character device without an
    /// id.
    pub(super) fn read_short_chardev(&mut self, option: &CommandOption<'_>) {
        let value = option.value.unwrap_or_default();
        let what = format!("-{} {value}", option.name);
        let auto_name = match option.name {
            "serial" => "serial",
            "parallel" => "parallel",
            "debugcon" => "debugcon",
            _ => "compat_monitor",
        };
        let count = self.unnamed_chardevs.entry(auto_name).or_default();
        let id = format!("{auto_name}{count}");
        *count += 1;
        let mut chardev = match ShortForm::parse(value, &id) {
            ShortForm::Kept => return self.keep_unchanged(option),
            ShortForm::Chardev(chardev) => chardev,
            ShortForm::Unknown => return self.refuse(what, "Rekindle cannot pass it on: use -chardev"),
        };
        if self.pass_chardev(&what, &mut chardev).is_none() {
            return;
        }
        if chardev.get("backend").as_deref() == Some("stdio") {
            return self.keep_unchanged(option);
        }
        self.add("chardev", chardev.to_string());
        match option.name {
            "qmp" => self.add("mon", format!("chardev={id},mode=control")),
            "qmp-pretty" => self.add("mon", format!("chardev={id},mode=control,pretty=on")),
            "monitor" => self.add("mon", format!("chardev={id},mode=readline")),
            other => self.add(other, format!("chardev:{id}")),
        }
    }

    /// Changes a character device so that two QEMUs can have it. Returns whether it was changed; `None` after an obstacle
    /// was added.
    pub(super) fn pass_chardev(&mut self, what: &str, chardev: &mut Options) -> Option<bool> {
        let mut is_changed = false;
        if chardev.get("logfile").is_some() && chardev.get("logappend").as_deref() != Some("on") {
            chardev.set("logappend", "on");
            is_changed = true;
        }
        let backend = chardev.get("backend").unwrap_or_default();
        if let Some(why) = rules::chardev_backend(&backend) {
            self.refuse(what, why);
            return None;
        }
        match backend.as_str() {
            "socket" => is_changed |= self.pass_socket(what, chardev)?,
            "file" if chardev.get("append").as_deref() != Some("on") => {
                chardev.set("append", "on");
                is_changed = true;
            }
            "stdio" if self.numbers.source(STANDARD_INPUT) != Some(&SourceDescriptor::Null) => {
                self.refuse(what, "two QEMUs would read one terminal: use a socket or a pty");
                return None;
            }
            "pty" if chardev.get("path").is_some() => {
                self.refuse(what, "two QEMUs cannot make one link to their pty: start it without path=");
                return None;
            }
            _ => {}
        }
        Some(is_changed)
    }

    /// Passes a socket on. Returns whether the options were changed; `None` after an obstacle was added.
    fn pass_socket(&mut self, what: &str, socket: &mut Options) -> Option<bool> {
        let is_server = socket.get("server").is_some_and(|value| ["on", "yes", "true"].contains(&value.as_str()));
        let named = socket.get("fd");
        if !is_server {
            return self.keep_connection(what, socket, named.is_some());
        }
        if let Some(word) = named {
            let number = word.parse().ok();
            let descriptor = number.and_then(|number| self.numbers.source(number));
            return match (number, descriptor) {
                (Some(source), Some(SourceDescriptor::Listener(_))) => {
                    self.numbers.put(source, Descriptor::Listener { source });
                    Some(false)
                }
                _ => {
                    self.refuse(what, format!("descriptor {word} of this QEMU is no listening socket"));
                    None
                }
            };
        }
        let claimed = match ListenerSearch::of(socket) {
            Some(search) => self.numbers.claim_listener(|address| search.matches(address)),
            None => None,
        };
        let Some(number) = claimed else {
            self.refuse(what, "this QEMU has not exactly one listening socket of that address");
            return None;
        };
        socket.remove(|key| ADDRESS_KEYS.contains(&key) || ["server", "nowait", "wait"].contains(&key));
        socket.set("fd", &number.to_string());
        socket.set("server", "on");
        // The destination must not wait for a client.
        socket.set("wait", "off");
        Some(true)
    }

    /// Keeps a connection to a server, if QEMU makes it again by itself. Returns whether the options were changed.
    fn keep_connection(&mut self, what: &str, socket: &mut Options, is_descriptor: bool) -> Option<bool> {
        let number = |key: &str| socket.get(key).and_then(|text| text.parse::<u64>().ok()).filter(|number| *number > 0);
        let (seconds, milliseconds) = (number("reconnect"), number("reconnect-ms"));
        if is_descriptor || (seconds.is_none() && milliseconds.is_none()) {
            self.refuse(
                what,
                "it is a connection to a server, and QEMU cannot make another one: start it with reconnect=",
            );
            return None;
        }
        match (seconds, milliseconds, self.destination.syntax.reconnect_ms) {
            (Some(seconds), _, true) => {
                socket.remove(|key| key == "reconnect");
                socket.set("reconnect-ms", &(seconds.saturating_mul(1000)).to_string());
                Some(true)
            }
            (_, Some(milliseconds), false) => {
                socket.remove(|key| key == "reconnect-ms");
                socket.set("reconnect", &milliseconds.div_ceil(1000).to_string());
                Some(true)
            }
            _ => Some(false),
        }
    }

    /// Rejects `-nographic` if it puts a serial port or a monitor on a terminal.
    pub(super) fn check_nographic(&mut self) {
        let given = &self.given;
        let uses_terminal = given.nographic && !given.nodefaults && !(given.serial && given.monitor);
        if uses_terminal && self.numbers.source(STANDARD_INPUT) != Some(&SourceDescriptor::Null) {
            let why = "two QEMUs would read one terminal: start it with -display none, -serial and -monitor";
            self.refuse("-nographic", why);
        }
    }
}

/// The value of an option that describes a character device without `-chardev`.
enum ShortForm {
    /// It needs nothing of the source's, or a `-chardev` describes it.
    Kept,
    Chardev(Options),
    Unknown,
}

impl ShortForm {
    fn parse(value: &str, id: &str) -> Self {
        const KEPT: [&str; 5] = ["null", "none", "pty", "vc", "ringbuf"];
        if KEPT.contains(&value) || value.starts_with("vc:") || value.starts_with("chardev:") {
            return Self::Kept;
        }
        if value == "stdio" || value == "mon:stdio" {
            return Self::chardev("stdio", id, Options::Pairs(Vec::new()), "");
        }
        let Some((prefix, rest)) = value.split_once(':') else { return Self::Unknown };
        match prefix {
            "file" => {
                let path = Options::Pairs(vec![("path".into(), Some(rest.to_owned()))]);
                Self::chardev("file", id, path, "")
            }
            "unix" => match Options::parse(rest, "path") {
                Ok(socket) => Self::chardev("socket", id, socket, ""),
                Err(_) => Self::Unknown,
            },
            "tcp" | "telnet" | "tn3270" | "websocket" => Self::tcp(if prefix == "tcp" { "" } else { prefix }, rest, id),
            _ => Self::Unknown,
        }
    }

    /// Parses `HOST:PORT,OPTIONS`; the host may be missing.
    fn tcp(protocol: &str, text: &str, id: &str) -> Self {
        let (address, options) = text.split_once(',').unwrap_or((text, ""));
        let Some((host, port)) = address.rsplit_once(':') else { return Self::Unknown };
        match Options::parse(options, "") {
            Ok(mut socket) => {
                socket.set("host", host);
                socket.set("port", port);
                Self::chardev("socket", id, socket, protocol)
            }
            Err(_) => Self::Unknown,
        }
    }

    /// `protocol` is a further switch of the character device; empty if there is none.
    fn chardev(backend: &str, id: &str, options: Options, protocol: &str) -> Self {
        let mut pairs = vec![("backend".into(), Some(backend.to_owned())), ("id".into(), Some(id.to_owned()))];
        if !protocol.is_empty() {
            pairs.push((protocol.into(), Some("on".into())));
        }
        if let Options::Pairs(given) = options {
            pairs.extend(given);
        }
        Self::Chardev(Options::Pairs(pairs))
    }
}

/// Which listening socket of the source belongs to a character device.
enum ListenerSearch {
    Unix(String),
    Tcp { host: Option<IpAddr>, ports: std::ops::RangeInclusive<u16> },
}

impl ListenerSearch {
    /// `None` if the options do not name a path or a port.
    fn of(socket: &Options) -> Option<Self> {
        if let Some(path) = socket.get("path") {
            let is_abstract = socket.get("abstract").is_some_and(|value| value == "on");
            return Some(Self::Unix(if is_abstract { format!("@{path}") } else { path }));
        }
        let port: u16 = socket.get("port")?.parse().ok().filter(|port| *port > 0)?;
        let last = socket.get("to").and_then(|to| to.parse().ok()).unwrap_or(port);
        Some(Self::Tcp { host: socket.get("host").and_then(|host| host.parse().ok()), ports: port..=last })
    }

    fn matches(&self, address: &ListenAddress) -> bool {
        match (self, address) {
            (Self::Unix(path), ListenAddress::Unix(bound)) => path == bound,
            (Self::Tcp { host, ports }, ListenAddress::Tcp(bound)) => {
                ports.contains(&bound.port()) && host.is_none_or(|host| host == bound.ip())
            }
            _ => false,
        }
    }
}
