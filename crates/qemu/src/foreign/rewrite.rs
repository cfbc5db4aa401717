//! Rewrites a command line so that Rekindle can build the same machine again. This module does not query QEMU: it uses
//! the facts that were read before.
//!
//! The options are read one after the other, each by its [`CarryRule`]. Afterwards [`finish`] adds what several options
//! give together (machine, memory, console) and checks that the command line describes the machine as it is now.

mod finish;

use super::MachineFacts;
use super::carry_rules::{CarryRule, CommandOption, Reason, split};
use super::paths::with_absolute_paths;
use crate::adopt::Obstacle;
use crate::command::{ForeignMachine, ForeignNetwork};
use crate::options::Options;
use serde_json::Value;
use std::collections::BTreeSet;

/// Devices that cannot be built again, by type prefix. (QEMU itself reports what it cannot save: see the obstacles of
/// [`crate::adopt`].)
const REFUSED_DEVICES: &[(&str, Reason)] = &[
    ("qxl", "it needs a SPICE server, which the new QEMU does not have: use virtio-vga or VGA"),
    ("virtio-gpu-gl", "QEMU cannot save what is in the host's graphics driver"),
    ("virtio-vga-gl", "QEMU cannot save what is in the host's graphics driver"),
    ("virtio-9p", "QEMU cannot save the files that a guest has open on it"),
    ("nvme", "QEMU cannot save its state"),
    ("usb-mtp", "QEMU cannot save its state"),
    ("nvdimm", "its content is a file of its own, which Rekindle does not carry over"),
    ("virtio-pmem", "its content is a file of its own, which Rekindle does not carry over"),
    ("usb-redir", "its state is at its other end"),
    ("ccid-card-passthru", "its state is at its other end"),
];

/// Objects that cannot be built again, by type prefix.
const REFUSED_OBJECTS: &[(&str, Reason)] = &[
    ("filter-", "it is a part of another program's pipeline: start it without"),
    ("colo-compare", "it is a part of another program's pipeline: start it without"),
    ("dbus-vmstate", "the state behind it is in other processes: start it without"),
    ("x-remote-object", "the device is in another process"),
    ("x-vfio-user-server", "the device is in another process"),
    ("cryptodev-vhost", "its state is in the host's kernel or in another process"),
    ("memory-backend-epc", "the guest's memory is encrypted with a key that is not available outside the guest"),
    ("sev-", "the guest's memory is encrypted with a key that is not available outside the guest"),
    ("tdx-guest", "the guest's memory is encrypted with a key that is not available outside the guest"),
];

/// Objects that concern the process or its windows, by type prefix. They are left out.
const PROCESS_OBJECTS: &[&str] = &["tls-c", "authz-", "thread-context", "input-", "secret", "monitor-"];

/// Networks whose cards send frames with headers that only a tap understands.
const NETWORKS_WITH_HEADERS: &[&str] = &["tap", "bridge"];

/// The machine as far as the command line has been read.
#[derive(Default)]
struct Rewriter {
    /// The rewritten arguments.
    arguments: Vec<String>,
    obstacles: Vec<Obstacle>,
    machine_options: Vec<(String, Option<String>)>,
    /// Ids of the memory backends that the command line names.
    backends: Vec<String>,
    networks: Vec<ForeignNetwork>,
    devices: Vec<Options>,
    /// Ids of the character devices.
    chardevs: BTreeSet<String>,
    /// Ids of the secrets, which are left out.
    secrets: BTreeSet<String>,
    /// Id of the character device that becomes the console.
    console: Option<String>,
    has_nodefaults: bool,
    has_nographic: bool,
    has_serial: bool,
    has_parallel: bool,
    has_memory_size: bool,
    has_tpm_emulator: bool,
}

/// Rewrites the `arguments` of a QEMU, using the `facts` of its machine.
///
/// # Errors
/// All options, devices and disks that cannot be carried over.
pub(super) fn rewrite(arguments: &[String], facts: &MachineFacts) -> Result<ForeignMachine, Vec<Obstacle>> {
    let options = split(arguments).map_err(|option| {
        let why = "Rekindle does not know this option of QEMU, or its value is missing; start it without".into();
        vec![Obstacle { what: option, why }]
    })?;
    let mut rewriter = Rewriter::default();
    for option in &options {
        rewriter.read(option, facts);
    }
    rewriter.finish(facts)
}

impl Rewriter {
    fn read(&mut self, option: &CommandOption<'_>, facts: &MachineFacts) {
        self.has_nodefaults |= option.name == "nodefaults";
        self.has_memory_size |= option.name == "m";
        match option.rule {
            CarryRule::Drop => {}
            CarryRule::Refuse(why) => self.refuse(format!("-{}", option.name), why),
            CarryRule::Keep => match with_absolute_paths(option, &facts.cwd) {
                Ok(value) => self.keep(option.name, value.as_deref()),
                Err(path) => {
                    let cwd = facts.cwd.display();
                    let why = format!("there is no {path} in {cwd}, where QEMU is now: start it with the full path");
                    self.refuse(format!("-{} {}", option.name, option.value.unwrap_or_default()), why);
                }
            },
            CarryRule::Rewrite => self.rewrite(option),
        }
    }

    fn rewrite(&mut self, option: &CommandOption<'_>) {
        let value = option.value.unwrap_or_default();
        match option.name {
            "machine" | "M" => self.read_machine(option),
            "device" => self.read_device(option),
            "object" => self.read_object(option),
            "netdev" => self.read_netdev(option),
            "nic" | "net" => self.read_short_network(option),
            "chardev" => {
                let id = self.parse(option, "backend").and_then(|chardev| chardev.get("id"));
                self.chardevs.extend(id);
            }
            "serial" => self.read_serial(value),
            "parallel" | "debugcon" => {
                self.has_parallel |= option.name == "parallel";
                let is_kept = value == "none" || value.starts_with("chardev:");
                self.keep(option.name, Some(if is_kept { value } else { "null" }));
            }
            "audiodev" | "audio" => {
                let Some(mut audio) = self.parse(option, "driver") else { return };
                audio.remove(|key| !["driver", "id", "model"].contains(&key));
                audio.set("driver", "none");
                self.keep(option.name, Some(&audio.to_string()));
            }
            "tpmdev" => self.read_tpmdev(option),
            "nographic" => self.has_nographic = true,
            // QEMU 9.0 removed this option; all supported versions accept the machine property.
            "no-acpi" => self.machine_options.push(("acpi".into(), Some("off".into()))),
            "no-hpet" => self.machine_options.push(("hpet".into(), Some("off".into()))),
            other => self.refuse(format!("-{other}"), "Rekindle has no rule for it"),
        }
    }

    /// Adds an obstacle: `what` cannot be carried over.
    fn refuse(&mut self, what: impl Into<String>, why: impl Into<String>) {
        self.obstacles.push(Obstacle { what: what.into(), why: why.into() });
    }

    /// Adds an option to the rewritten arguments.
    fn keep(&mut self, option: &str, value: Option<&str>) {
        self.arguments.push(format!("-{option}"));
        self.arguments.extend(value.map(str::to_owned));
    }

    /// Parses the value of an option. `None` after an obstacle was added.
    fn parse(&mut self, option: &CommandOption<'_>, implied_key: &str) -> Option<Options> {
        let value = option.value.unwrap_or_default();
        match Options::parse(value, implied_key) {
            Ok(options) => Some(options),
            Err(e) => {
                self.refuse(format!("-{} {value}", option.name), e.why);
                None
            }
        }
    }

    /// Keeps the first serial port as the console. The others stay, but nothing is connected to them.
    fn read_serial(&mut self, value: &str) {
        let is_first = !std::mem::replace(&mut self.has_serial, true);
        match value.strip_prefix("chardev:") {
            Some(id) => {
                if is_first {
                    self.console = Some(id.into());
                }
                self.keep("serial", Some(value));
            }
            None if value == "none" => self.keep("serial", Some(value)),
            None if is_first => self.add_own_console(),
            None => self.keep("serial", Some("null")),
        }
    }

    /// Adds a serial port with a character device of Rekindle's own.
    fn add_own_console(&mut self) {
        self.has_serial = true;
        self.console = Some("rekindle-console".into());
        self.keep("serial", Some("chardev:rekindle-console"));
    }

    fn read_machine(&mut self, option: &CommandOption<'_>) {
        match self.parse(option, "type") {
            Some(Options::Pairs(pairs)) => self.machine_options.extend(pairs),
            Some(machine @ Options::Json(_)) => {
                let pairs = machine.keys().into_iter().map(|key| (key.to_owned(), machine.get(key)));
                self.machine_options.extend(pairs);
            }
            None => {}
        }
    }

    fn read_device(&mut self, option: &CommandOption<'_>) {
        let Some(device) = self.parse(option, "driver") else { return };
        let driver = device.get("driver").unwrap_or_default();
        if let Some(why) = refused_device(&driver) {
            self.refuse(format!("-device {driver}"), why);
        }
        let is_serial_port = ["isa-serial", "pci-serial"].contains(&driver.as_str());
        if is_serial_port && !self.has_serial && self.console.is_none() {
            self.console = device.get("chardev");
        }
        self.keep("device", option.value);
        self.devices.push(device);
    }

    fn read_object(&mut self, option: &CommandOption<'_>) {
        let Some(mut object) = self.parse(option, "qom-type") else { return };
        let kind = object.get("qom-type").unwrap_or_default();
        let id = object.get("id").unwrap_or_default();
        if let Some(why) = refused_object(&kind) {
            self.refuse(format!("-object {kind},id={id}"), why);
        } else if kind.starts_with("memory-backend-") {
            self.backends.push(id);
        } else if kind.starts_with("secret") {
            self.secrets.insert(id);
        } else if PROCESS_OBJECTS.iter().any(|prefix| kind.starts_with(prefix)) {
            // These objects are left out.
        } else if kind == "rng-egd" {
            object.remove(|key| key != "id" && key != "qom-type");
            object.set("qom-type", "rng-random");
            object.set("filename", "/dev/urandom");
            self.keep("object", Some(&object.to_string()));
        } else {
            self.keep("object", option.value);
        }
    }

    fn read_netdev(&mut self, option: &CommandOption<'_>) {
        let Some(mut netdev) = self.parse(option, "type") else { return };
        let (kind, id) = (netdev.get("type").unwrap_or_default(), netdev.get("id").unwrap_or_default());
        if kind == "hubport" {
            let why = "a hub of several networks: give each card a network of its own";
            self.refuse(format!("-netdev hubport,id={id}"), why);
            return;
        }
        let forwards = forwards(&netdev);
        netdev.remove(|key| key == "hostfwd");
        let is_user = kind == "user";
        let descriptors = netdev.get("fds").map(|numbers| numbers.split(':').count());
        let named = || netdev.get("queues").and_then(|queues| queues.parse().ok());
        let queues = descriptors.and_then(|count| u16::try_from(count).ok()).or_else(named).unwrap_or(1);
        self.networks.push(ForeignNetwork {
            id,
            options: is_user.then(|| netdev.to_string()),
            needs_tap: NETWORKS_WITH_HEADERS.contains(&kind.as_str()),
            queues,
            mac: String::new(),
            forwards: if is_user { forwards } else { Vec::new() },
            kind,
        });
    }

    /// Leaves a TPM's emulator out: its manager has to start another one.
    fn read_tpmdev(&mut self, option: &CommandOption<'_>) {
        let Some(device) = self.parse(option, "type") else { return };
        match device.get("type").as_deref() {
            Some("emulator") => self.has_tpm_emulator = true,
            kind => {
                let what = format!("-tpmdev {}", kind.unwrap_or_default());
                self.refuse(what, "its state is in hardware of the host: start it without");
            }
        }
    }

    /// Handles `-nic` and `-net`, which describe a network and its card together.
    fn read_short_network(&mut self, option: &CommandOption<'_>) {
        let Some(network) = self.parse(option, "type") else { return };
        let kind = network.get("type").unwrap_or_default();
        if ["none", "user"].contains(&kind.as_str()) || (kind == "nic" && option.name == "net") {
            self.keep(option.name, option.value);
        } else {
            let what = format!("-{} {}", option.name, option.value.unwrap_or_default());
            self.refuse(what, "a network that cannot be made again: name it by -netdev, and its card by -device");
        }
    }
}

/// Returns why a device of this type cannot be built again.
pub(crate) fn refused_device(driver: &str) -> Option<Reason> {
    REFUSED_DEVICES.iter().find(|(prefix, _)| driver.starts_with(prefix)).map(|(_, why)| *why)
}

/// Returns why an object of this type cannot be built again.
pub(crate) fn refused_object(kind: &str) -> Option<Reason> {
    REFUSED_OBJECTS.iter().find(|(prefix, _)| kind.starts_with(prefix)).map(|(_, why)| *why)
}

/// Returns the forwarded ports of a user network, from `key=value` options or JSON.
pub(crate) fn forwards(netdev: &Options) -> Vec<String> {
    match netdev {
        Options::Pairs(pairs) => {
            pairs.iter().filter(|(key, _)| key == "hostfwd").filter_map(|(_, rule)| rule.clone()).collect()
        }
        Options::Json(map) => {
            let rules = map.get("hostfwd").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
            rules.iter().filter_map(|rule| Some(rule.get("str")?.as_str()?.to_owned())).collect()
        }
    }
}

#[cfg(test)]
mod tests;
