//! What the command line of a machine uses of the host that runs it.
//!
//! The description of a machine that Rekindle did not start ([`ForeignMachine`]) has QEMU's arguments. One that comes from
//! a store may have been changed, so each argument is checked against a list of those that only describe the machine.
//! Files are reported, and everything else is reported as an argument that is not known to be harmless. Whether the host
//! permits these is not decided here.
//!
//! A list of what is harmful would be out of date with each version of QEMU. So options, devices, objects and block
//! drivers are listed if they are harmless, and a value with a slash, which could be a file's name, only passes where a
//! file is expected.

mod harmless;

use crate::command::{ForeignMachine, Hardware, NetBackend};
use crate::foreign::{CommandOption, split};
use crate::options::Options;
use harmless::{
    BLOCK_DRIVERS, CARD_KEYS, CLOCK_KEYS, DEVICES, FILES, GPU_DEVICES, HARMLESS, HOST_DEVICES, HOST_PROPERTIES,
    JSON_OPTIONS, MACHINE_KEYS, OBJECTS, PROCESSOR_SUFFIX, RANDOM_FILES, USB_DEVICES, USER_NETWORK_KEYS, WORDS,
};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// Something of the host that a machine uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostAccess {
    /// A file, block device or directory. `what`: the argument that names it.
    File { what: String, path: PathBuf },
    /// An argument that is not known to be harmless. `text`: the option with its value.
    Argument { text: String, why: String },
}

const NOT_LISTED: &str = "not known to only describe the machine";

/// Returns an option with its value in one text, as `host.toml` lists it.
#[must_use]
pub fn option_text(option: &str, value: Option<&str>) -> String {
    value.map_or_else(|| option.to_owned(), |value| format!("{option} {value}"))
}

/// Returns what arguments use of the host: files, and arguments that are not known to be harmless.
#[must_use]
pub fn of_arguments(arguments: &[String]) -> Vec<HostAccess> {
    let mut found = Vec::new();
    match split(arguments) {
        Ok(options) => options.iter().for_each(|option| Reader { option, found: &mut found }.read()),
        Err(option) => found.push(argument(&option, None, "QEMU's option is unknown, or its value is missing")),
    }
    found
}

/// Returns what the machine of an attached QEMU uses of the host, as [`of_arguments`] does.
#[must_use]
pub fn of_foreign(hardware: &Hardware, machine: &ForeignMachine) -> Vec<HostAccess> {
    let mut found = of_arguments(&machine.arguments);
    let options = split(&machine.arguments).unwrap_or_default();
    for network in &machine.networks {
        check_user_network(network.options.as_deref(), &mut found);
    }
    let types = options.iter().filter(|option| ["machine", "M"].contains(&option.name));
    for option in types {
        let kind =
            Options::parse(option.value.unwrap_or_default(), "type").ok().and_then(|machine| machine.get("type"));
        if kind.as_deref() != Some(hardware.machine.as_str()) {
            found.push(argument("-machine", option.value, "another machine type than that of the checkpoint"));
        }
    }
    found.extend(fields_without_meaning(hardware));
    found
}

/// Reports fields that an attached VM does not have. They are not on QEMU's command line, but others would use them.
fn fields_without_meaning(hardware: &Hardware) -> Vec<HostAccess> {
    let mut found = Vec::new();
    let mut report = |is_present: bool, what: &str| {
        if is_present {
            found.push(argument(what, None, "an attached VM has none"));
        }
    };
    report(!hardware.disks.is_empty(), "disks of Rekindle's own");
    report(hardware.boot.is_some(), "a kernel of Rekindle's own");
    report(hardware.cpu.contains('/'), "a processor with the name of a file");
    report(!hardware.extra.is_empty(), "free arguments in addition to the command line");
    for net in &hardware.nets {
        match &net.backend {
            NetBackend::User(rules) => {
                for rule in rules.iter().filter(|rule| !is_forward(rule)) {
                    found.push(argument("hostfwd", Some(rule), "not a forwarded port"));
                }
            }
            NetBackend::Tap(tap) => {
                let names = [Some(&tap.ifname), tap.netns.as_ref()];
                for name in names.into_iter().flatten().filter(|name| !is_plain_name(name)) {
                    found.push(argument("tap", Some(name), "not the name of an interface or a namespace"));
                }
            }
        }
    }
    found
}

/// Returns whether the text is a rule for a TCP or UDP port, and not for a socket in the file system.
fn is_forward(rule: &str) -> bool {
    ["tcp:", "udp:", ":"].iter().any(|start| rule.starts_with(start)) && !rule.contains('/')
}

/// Returns whether the name of a machine type, an interface, a bridge or a namespace is no path and no option.
#[must_use]
pub fn is_plain_name(name: &str) -> bool {
    let is_allowed = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    !name.is_empty() && !name.starts_with('-') && name != "." && name != ".." && name.chars().all(is_allowed)
}

fn check_user_network(options: Option<&str>, found: &mut Vec<HostAccess>) {
    let Some(text) = options else { return };
    let parsed = Options::parse(text, "type");
    let is_harmless = parsed.is_ok_and(|network| {
        network.get("type").as_deref() == Some("user")
            && network.keys().iter().all(|key| USER_NETWORK_KEYS.contains(key))
    });
    if !is_harmless {
        found.push(argument("-netdev", Some(text), "not a plain user network"));
    }
}

fn argument(option: &str, value: Option<&str>, why: &str) -> HostAccess {
    HostAccess::Argument { text: option_text(option, value), why: why.into() }
}

/// Reads one option.
struct Reader<'a> {
    option: &'a CommandOption<'a>,
    found: &'a mut Vec<HostAccess>,
}

impl Reader<'_> {
    fn read(&mut self) {
        let value = self.option.value.unwrap_or_default();
        match self.option.name {
            name if HARMLESS.contains(&name) => {}
            name if FILES.contains(&name) => self.file(value),
            name if WORDS.contains(&name) => self.word_or_file(value),
            "usbdevice" if USB_DEVICES.contains(&value) => {}
            "serial" | "parallel" | "debugcon"
                if value == "none" || value == "null" || value.strip_prefix("chardev:").is_some() => {}
            "icount" => self.listed_keys(CLOCK_KEYS, "shift"),
            "smbios" => self.keys(&["file", "path"], ""),
            "boot" => self.keys(&["splash"], "order"),
            "fw_cfg" => self.keys(&["file"], "name"),
            "acpitable" => self.acpi_table(),
            "machine" | "M" => self.listed_keys(MACHINE_KEYS, "type"),
            "chardev" => self.null_device(),
            "audiodev" | "audio" => self.no_audio(),
            "device" => self.device(),
            "global" => self.global(),
            "object" => self.object(),
            "drive" => self.drive(),
            "blockdev" => self.blockdev(),
            "nic" | "net" => self.short_network(),
            _ => self.refuse(NOT_LISTED),
        }
    }

    fn refuse(&mut self, why: &str) {
        self.found.push(argument(&format!("-{}", self.option.name), self.option.value, why));
    }

    fn file(&mut self, path: &str) {
        if path.starts_with('/') {
            let what = format!("-{}", self.option.name);
            self.found.push(HostAccess::File { what, path: path.into() });
        } else {
            // A protocol (`json:`, `nbd:`), or relative to a directory that is not known.
            self.refuse("not a file with an absolute path");
        }
    }

    /// A name without a slash is not looked up outside of QEMU's own files.
    fn word_or_file(&mut self, value: &str) {
        if value.contains('/') {
            self.file(value);
        } else if value.contains(':') {
            self.refuse(NOT_LISTED);
        }
    }

    fn parse(&mut self, implied_key: &str) -> Option<Options> {
        let text = self.option.value.unwrap_or_default();
        if text.starts_with('{') && !JSON_OPTIONS.contains(&self.option.name) {
            self.refuse("QEMU does not read this option as JSON");
            return None;
        }
        let parsed = Options::parse(text, implied_key);
        parsed.map_err(|e| self.refuse(&e.why)).ok()
    }

    /// Reports the files at `file_keys`. All occurrences of a key count.
    fn keys(&mut self, file_keys: &[&str], implied_key: &str) {
        let Some(options) = self.parse(implied_key) else { return };
        for (key, value) in pairs(&options) {
            if file_keys.contains(&key.as_str()) {
                self.file(&value);
            }
        }
    }

    fn acpi_table(&mut self) {
        let Some(options) = self.parse("") else { return };
        for (key, value) in pairs(&options) {
            if ["file", "data"].contains(&key.as_str()) {
                value.split(':').for_each(|path| self.file(path));
            }
        }
    }

    fn listed_keys(&mut self, keys: &[&str], implied_key: &str) {
        let Some(options) = self.parse(implied_key) else { return };
        let is_harmless = |(key, value): &(String, String)| keys.contains(&key.as_str()) && !value.contains('/');
        if let Some((key, _)) = pairs(&options).iter().find(|pair| !is_harmless(pair)) {
            self.refuse(&format!("`{key}` is {NOT_LISTED}"));
        }
    }

    fn null_device(&mut self) {
        let Some(options) = self.parse("backend") else { return };
        let is_null = options.get("backend").as_deref() == Some("null");
        if !is_null || options.keys().iter().any(|key| !["backend", "id"].contains(key)) {
            self.refuse("only a character device that is connected to nothing is allowed");
        }
    }

    fn no_audio(&mut self) {
        let Some(options) = self.parse("driver") else { return };
        let has_none = options.get("driver").as_deref() == Some("none");
        if !has_none || options.keys().iter().any(|key| !["driver", "id", "model"].contains(key)) {
            self.refuse("only a driver that plays nothing is allowed");
        }
    }

    fn device(&mut self) {
        let Some(options) = self.parse("driver") else { return };
        let driver = options.get("driver").unwrap_or_default();
        if !is_device(&driver) {
            return self.refuse(NOT_LISTED);
        }
        if let Some((key, _)) = pairs(&options).iter().find(|(key, value)| reaches_host(key, value)) {
            self.refuse(&format!("`{key}` may reach the host"));
        }
    }

    /// Reads `DRIVER.PROPERTY=VALUE`, or the three by their keys.
    fn global(&mut self) {
        let value = self.option.value.unwrap_or_default();
        // QEMU takes the short form, if it can be one.
        let is_short = value.split('=').next().is_some_and(|name| name.contains('.'));
        let keyed = || {
            let options = self.parse_quietly()?;
            Some((options.get("driver")?, options.get("property")?, options.get("value")?))
        };
        // `cfi.pflash01` has a dot in its name.
        let short = || {
            let (property, set) = value.split_once('=')?;
            let (driver, property) = property.rsplit_once('.')?;
            Some((driver.to_owned(), property.to_owned(), set.to_owned()))
        };
        match if is_short { short() } else { keyed() } {
            Some((driver, property, set)) if is_device(&driver) && !reaches_host(&property, &set) => {}
            _ => self.refuse(NOT_LISTED),
        }
    }

    /// Returns keys and values that only occur once.
    fn parse_quietly(&self) -> Option<Options> {
        let options = Options::parse(self.option.value.unwrap_or_default(), "").ok()?;
        let mut keys = options.keys();
        keys.sort_unstable();
        let is_unique = keys.windows(2).all(|pair| pair[0] != pair[1]);
        (is_unique && matches!(options, Options::Pairs(_))).then_some(options)
    }

    fn object(&mut self) {
        let Some(options) = self.parse("qom-type") else { return };
        let kind = options.get("qom-type").unwrap_or_default();
        if !OBJECTS.contains(&kind.as_str()) {
            return self.refuse(NOT_LISTED);
        }
        for (key, value) in pairs(&options) {
            let is_random = kind == "rng-random" && key == "filename" && RANDOM_FILES.contains(&value.as_str());
            if !is_random && (value.contains('/') || key == "filename") {
                return self.refuse(&format!("`{key}` may reach the host"));
            }
        }
    }

    fn drive(&mut self) {
        let Some(options) = self.parse("file") else { return };
        for (key, value) in pairs(&options) {
            let last = key.rsplit('.').next().unwrap_or_default();
            match last {
                "filename" => self.file(&value),
                "locking" => return self.refuse("another program could use the disk"),
                "file" if value.is_empty() => {}
                "file" => self.file(&value),
                "driver" | "format" if !BLOCK_DRIVERS.contains(&value.as_str()) => {
                    return self.refuse(&format!("block driver `{value}`: {NOT_LISTED}"));
                }
                _ if value.contains('/') => return self.refuse(&format!("`{key}` may reach the host")),
                _ => {}
            }
        }
    }

    fn blockdev(&mut self) {
        match self.parse("driver") {
            Some(Options::Json(node)) => self.node(&node),
            Some(options @ Options::Pairs(_)) => {
                let pairs = pairs(&options);
                if !pairs.iter().any(|(key, _)| key == "driver") {
                    return self.refuse("it has no block driver");
                }
                for (key, value) in pairs {
                    self.node_property(&key, &value);
                }
            }
            None => {}
        }
    }

    /// Reads a block node and those in it.
    fn node(&mut self, node: &Map<String, Value>) {
        for (key, value) in node {
            match value {
                Value::String(text) => self.node_property(key, text),
                Value::Object(inner) => self.node(inner),
                Value::Array(items)
                    if items.iter().any(|item| item.is_array() || item.is_object() || item.is_string()) =>
                {
                    self.refuse(&format!("`{key}`: {NOT_LISTED}"));
                }
                _ => {}
            }
        }
    }

    fn node_property(&mut self, key: &str, value: &str) {
        match key.rsplit('.').next().unwrap_or_default() {
            "filename" => self.file(value),
            "driver" if !BLOCK_DRIVERS.contains(&value) => {
                self.refuse(&format!("block driver `{value}`: {NOT_LISTED}"));
            }
            "locking" => self.refuse("another program could use the disk"),
            _ if value.contains('/') => self.refuse(&format!("`{key}` may reach the host")),
            _ => {}
        }
    }

    fn short_network(&mut self) {
        let Some(options) = self.parse("type") else { return };
        let kind = options.get("type").unwrap_or_default();
        let is_known = ["none", "user"].contains(&kind.as_str()) || (kind == "nic" && self.option.name == "net");
        let is_harmless = |key: &&str| USER_NETWORK_KEYS.contains(key) || CARD_KEYS.contains(key);
        let forwards = pairs(&options).into_iter().filter(|(key, _)| key == "hostfwd");
        let has_other_forward = forwards.into_iter().any(|(_, rule)| !is_forward(&rule));
        let mut keys = options.keys();
        keys.retain(|key| *key != "hostfwd");
        if !is_known || has_other_forward || !keys.iter().all(is_harmless) {
            self.refuse("not a plain user network");
        }
    }
}

fn is_device(driver: &str) -> bool {
    let is_of_host = HOST_DEVICES.contains(&driver) || GPU_DEVICES.iter().any(|part| driver.contains(part));
    let is_listed = DEVICES.iter().any(|prefix| driver.starts_with(prefix)) || driver.ends_with(PROCESSOR_SUFFIX);
    is_listed && !is_of_host
}

/// Returns whether a property of a device may name something of the host.
fn reaches_host(key: &str, value: &str) -> bool {
    HOST_PROPERTIES.contains(&key) || value.contains('/')
}

/// Returns all keys with their texts. Nested JSON is given as its text.
fn pairs(options: &Options) -> Vec<(String, String)> {
    match options {
        Options::Pairs(pairs) => {
            pairs.iter().map(|(key, value)| (key.clone(), value.clone().unwrap_or_else(|| "on".into()))).collect()
        }
        Options::Json(map) => {
            let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            map.iter().map(|(key, value)| (key.clone(), text(value))).collect()
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;
