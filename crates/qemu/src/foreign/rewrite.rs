//! Rewrites a command line so that Rekindle can build the same machine again. This module does not query QEMU.

use super::paths::absolute;
use super::words::{Fate, Word, split};
use super::{Facts, Foreign, Network, RamBackend, Why};
use crate::adopt::Obstacle;
use crate::cpu::Features;
use crate::options::Options;
use serde_json::Value;
use std::collections::BTreeSet;

/// Devices that cannot be built again, by type prefix. (QEMU itself reports what it cannot save: see the obstacles of
/// [`crate::adopt`].)
const DEVICES: &[(&str, Why)] = &[
    ("qxl", "it needs a SPICE server, which the restored guest does not have: use virtio-vga or VGA"),
    ("virtio-gpu-gl", "QEMU cannot save what is in the host's graphics driver"),
    ("virtio-vga-gl", "QEMU cannot save what is in the host's graphics driver"),
    ("virtio-9p", "QEMU cannot save the files that a guest has open on it"),
    ("nvme", "QEMU cannot save its state"),
    ("usb-mtp", "QEMU cannot save its state"),
    ("nvdimm", "its content is a file of its own, which a restored guest would not write"),
    ("virtio-pmem", "its content is a file of its own, which a restored guest would not write"),
    ("usb-redir", "its state is at its other end"),
    ("ccid-card-passthru", "its state is at its other end"),
];

/// Objects that cannot be built again, by type prefix.
const OBJECTS: &[(&str, Why)] = &[
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

/// Objects that concern the process or its windows. They are left out.
const OBJECTS_OF_THE_PROCESS: &[&str] = &["tls-c", "authz-", "thread-context", "input-", "secret", "monitor-"];

/// Networks whose cards send frames with headers that only a tap understands.
const WITH_HEADERS: &[&str] = &["tap", "bridge"];

/// The command line as far as it is rewritten.
#[derive(Default)]
struct Line {
    words: Vec<String>,
    problems: Vec<Obstacle>,
    machine: Vec<(String, Option<String>)>,
    backends: Vec<RamBackend>,
    networks: Vec<Network>,
    devices: Vec<Options>,
    chardevs: BTreeSet<String>,
    secrets: BTreeSet<String>,
    console: Option<String>,
    nodefaults: bool,
    has_serial: bool,
    has_parallel: bool,
    has_memory: bool,
    nographic: bool,
}

/// Rewrites the `arguments` of a QEMU, using its `facts`.
///
/// # Errors
/// All options, devices and disks that cannot be carried over.
pub(super) fn rewrite(arguments: &[String], facts: &Facts) -> Result<Foreign, Vec<Obstacle>> {
    let words = split(arguments).map_err(|option| {
        let why = "Rekindle does not know this option of QEMU, or its value is missing; start it without".into();
        vec![Obstacle { what: option, why }]
    })?;
    let mut line = Line::default();
    for word in &words {
        line.nodefaults |= word.option == "nodefaults";
        line.has_memory |= word.option == "m";
        match word.fate {
            Fate::Drop => {}
            Fate::Refuse(why) => line.refuse(format!("-{}", word.option), why),
            Fate::Keep => match absolute(word, &facts.cwd) {
                Ok(value) => line.keep(word.option, value.as_deref()),
                Err(path) => {
                    let here = facts.cwd.display();
                    let why = format!("there is no {path} in {here}, where QEMU is now: start it with the full path");
                    line.refuse(format!("-{} {}", word.option, word.value.unwrap_or_default()), why);
                }
            },
            Fate::Rewrite => line.rewrite(word),
        }
    }
    line.finish(facts)
}

impl Line {
    fn refuse(&mut self, what: impl Into<String>, why: impl Into<String>) {
        self.problems.push(Obstacle { what: what.into(), why: why.into() });
    }

    fn keep(&mut self, option: &str, value: Option<&str>) {
        self.words.push(format!("-{option}"));
        self.words.extend(value.map(str::to_owned));
    }

    fn options(&mut self, word: &Word<'_>, implied: &str) -> Option<Options> {
        let value = word.value.unwrap_or_default();
        match Options::parse(value, implied) {
            Ok(options) => Some(options),
            Err(e) => {
                self.refuse(format!("-{} {value}", word.option), e.why);
                None
            }
        }
    }

    fn rewrite(&mut self, word: &Word<'_>) {
        let value = word.value.unwrap_or_default();
        match word.option {
            "machine" | "M" => self.machine(word),
            "device" => self.device(word),
            "object" => self.object(word),
            "netdev" => self.netdev(word),
            "nic" | "net" => self.nic(word),
            "chardev" => {
                let id = self.options(word, "backend").and_then(|options| options.get("id"));
                self.chardevs.extend(id);
            }
            "serial" => {
                let first = !std::mem::replace(&mut self.has_serial, true);
                match value.strip_prefix("chardev:") {
                    Some(id) if first => {
                        self.console = Some(id.into());
                        self.keep("serial", Some(value));
                    }
                    Some(_) => self.keep("serial", Some(value)),
                    None if value == "none" => self.keep("serial", Some(value)),
                    None if first => self.own_console(),
                    None => self.keep("serial", Some("null")),
                }
            }
            "parallel" | "debugcon" => {
                self.has_parallel |= word.option == "parallel";
                let stays = value == "none" || value.starts_with("chardev:");
                self.keep(word.option, Some(if stays { value } else { "null" }));
            }
            "audiodev" | "audio" => {
                let Some(mut options) = self.options(word, "driver") else { return };
                options.remove(|key| !["driver", "id", "model"].contains(&key));
                options.set("driver", "none");
                self.keep(word.option, Some(&options.to_string()));
            }
            "nographic" => self.nographic = true,
            // QEMU 9.0 removed this option; all supported versions accept the machine property.
            "no-acpi" => self.machine.push(("acpi".into(), Some("off".into()))),
            "no-hpet" => self.machine.push(("hpet".into(), Some("off".into()))),
            other => self.refuse(format!("-{other}"), "Rekindle has no rule for it"),
        }
    }

    /// Adds a serial port with a character device of Rekindle's own.
    fn own_console(&mut self) {
        self.has_serial = true;
        self.console = Some("rekindle-console".into());
        self.keep("serial", Some("chardev:rekindle-console"));
    }

    fn machine(&mut self, word: &Word<'_>) {
        match self.options(word, "type") {
            Some(Options::Pairs(pairs)) => self.machine.extend(pairs),
            Some(Options::Json(map)) => {
                let options = Options::Json(map);
                let pairs = options.keys().into_iter().map(|key| (key.to_owned(), options.get(key)));
                self.machine.extend(pairs);
            }
            None => {}
        }
    }

    fn device(&mut self, word: &Word<'_>) {
        let Some(options) = self.options(word, "driver") else { return };
        let driver = options.get("driver").unwrap_or_default();
        if let Some((_, why)) = DEVICES.iter().find(|(start, _)| driver.starts_with(start)) {
            self.refuse(format!("-device {driver}"), *why);
        }
        if driver.contains("serial") && !self.has_serial && self.console.is_none() {
            self.console = options.get("chardev").filter(|_| ["isa-serial", "pci-serial"].contains(&driver.as_str()));
        }
        self.keep("device", word.value);
        self.devices.push(options);
    }

    fn object(&mut self, word: &Word<'_>) {
        let Some(mut options) = self.options(word, "qom-type") else { return };
        let kind = options.get("qom-type").unwrap_or_default();
        let id = options.get("id").unwrap_or_default();
        if let Some((_, why)) = OBJECTS.iter().find(|(start, _)| kind.starts_with(start)) {
            self.refuse(format!("-object {kind},id={id}"), *why);
        } else if kind.starts_with("memory-backend-") {
            self.backends.push(RamBackend { id, bytes: 0 });
        } else if kind.starts_with("secret") {
            self.secrets.insert(id);
        } else if OBJECTS_OF_THE_PROCESS.iter().any(|start| kind.starts_with(start)) {
            // These objects are left out.
        } else if kind == "rng-egd" {
            options.remove(|key| key != "id" && key != "qom-type");
            options.set("qom-type", "rng-random");
            options.set("filename", "/dev/urandom");
            self.keep("object", Some(&options.to_string()));
        } else {
            self.keep("object", word.value);
        }
    }

    fn netdev(&mut self, word: &Word<'_>) {
        let Some(mut options) = self.options(word, "type") else { return };
        let (kind, id) = (options.get("type").unwrap_or_default(), options.get("id").unwrap_or_default());
        if kind == "hubport" {
            self.refuse(
                format!("-netdev hubport,id={id}"),
                "a hub of several networks: give each card a network of its own",
            );
            return;
        }
        let forwards = forwards(&options);
        options.remove(|key| key == "hostfwd");
        let user = kind == "user";
        let network = Network {
            id,
            options: user.then(|| options.to_string()),
            needs_tap: WITH_HEADERS.contains(&kind.as_str()),
            mac: String::new(),
            forwards: if user { forwards } else { Vec::new() },
            kind,
        };
        self.networks.push(network);
    }

    /// Handles the short options, which describe a network and its card together.
    fn nic(&mut self, word: &Word<'_>) {
        let Some(options) = self.options(word, "type") else { return };
        let kind = options.get("type").unwrap_or_default();
        if ["none", "user"].contains(&kind.as_str()) || (kind == "nic" && word.option == "net") {
            self.keep(word.option, word.value);
        } else {
            let what = format!("-{} {}", word.option, word.value.unwrap_or_default());
            self.refuse(what, "a network that cannot be made again: name it by -netdev, and its card by -device");
        }
    }

    fn finish(mut self, facts: &Facts) -> Result<Foreign, Vec<Obstacle>> {
        self.finish_machine(facts);
        self.finish_memory(facts);
        self.check_devices(facts);
        self.check_disks(facts);
        self.check_references();
        for network in &mut self.networks {
            let card = self.devices.iter().find(|device| device.get("netdev").as_ref() == Some(&network.id));
            network.mac = card.and_then(|card| card.get("mac")).unwrap_or_default();
            let driver = card.and_then(|card| card.get("driver")).unwrap_or_default();
            network.needs_tap &= driver.starts_with("virtio-net");
        }
        let isa_serial = self.devices.iter().any(|device| device.get("driver").as_deref() == Some("isa-serial"));
        if !self.nodefaults && !self.has_serial && !isa_serial {
            self.own_console();
        }
        if self.nographic && !self.nodefaults && !self.has_parallel {
            self.keep("parallel", Some("null"));
        }
        let agent = self.devices.iter().find(|device| device.get("name").as_deref() == Some("org.qemu.guest_agent.0"));
        let agent = agent.and_then(|device| device.get("chardev"));
        // The other ends of all other character devices are gone: the guest finds them as if no client were
        // connected.
        let own = [&self.console, &agent].map(|id| id.clone().unwrap_or_default());
        for id in std::mem::take(&mut self.chardevs).into_iter().filter(|id| !own.contains(id)) {
            self.keep("chardev", Some(&format!("null,id={}", id.replace(',', ",,"))));
        }
        if !self.problems.is_empty() {
            return Err(self.problems);
        }
        let Self { words, backends, networks, console, .. } = self;
        Ok(Foreign { words, backends, networks, console, agent, cpu: Features::new() })
    }

    fn finish_machine(&mut self, facts: &Facts) {
        let mut machine = Options::Pairs(std::mem::take(&mut self.machine));
        if machine.get("confidential-guest-support").is_some() {
            self.refuse("-machine confidential-guest-support", "the guest's memory is encrypted");
        }
        machine.remove(|key| ["type", "accel", "memory-backend", "suppress-vmdesc"].contains(&key));
        let mut pinned = Options::Pairs(vec![("type".into(), Some(facts.machine.clone()))]);
        if let (Options::Pairs(all), Options::Pairs(kept)) = (&mut pinned, machine) {
            all.extend(kept);
        }
        if let Some(main) = &facts.main {
            pinned.set("memory-backend", main);
        }
        if self.nographic {
            pinned.set("graphics", "off");
        }
        pinned.set("suppress-vmdesc", "on");
        self.keep("machine", Some(&pinned.to_string()));
    }

    /// Keeps each backend of the command line and the one that QEMU made for `-m`. Rejects additional and missing
    /// backends.
    fn finish_memory(&mut self, facts: &Facts) {
        if facts.backends.is_empty() {
            self.refuse(
                "the guest's memory",
                "it is no memory backend of QEMU's: that needs QEMU 5.0 and a usual machine type",
            );
        }
        let named: Vec<_> = self.backends.iter().map(|backend| backend.id.clone()).collect();
        for backend in &facts.backends {
            if !named.contains(&backend.id) && facts.main.as_ref() != Some(&backend.id) {
                let why = "memory that was plugged in while the guest ran is not on its command line: unplug it, or start the \
                           VM with it";
                self.refuse(format!("memory backend {}", backend.id), why);
            }
        }
        for id in named.iter().filter(|id| !facts.backends.iter().any(|backend| backend.id == **id)) {
            self.refuse(
                format!("memory backend {id}"),
                "it was taken away while the guest ran; start the VM without it",
            );
        }
        self.backends.clone_from(&facts.backends);
        if !self.has_memory {
            let bytes = facts.backends.iter().map(|backend| backend.bytes).sum::<u64>();
            self.keep("m", Some(&format!("{}K", bytes / 1024)));
        }
    }

    /// Rejects a machine whose devices are not exactly those of its command line.
    fn check_devices(&mut self, facts: &Facts) {
        let named: BTreeSet<String> = self.devices.iter().filter_map(|device| device.get("id")).collect();
        for id in facts.devices.difference(&named) {
            let why = "it was plugged in while the guest ran, and is not on its command line: unplug it, or start the VM with it";
            self.refuse(format!("device {id}"), why);
        }
        for id in named.difference(&facts.devices) {
            self.refuse(format!("device {id}"), "it was unplugged while the guest ran: start the VM without it");
        }
        let of_descriptor =
            |device: &&Options| device.keys().iter().any(|key| ["fd", "vhostfd", "vhostfds"].contains(key));
        let found: Vec<_> =
            self.devices.iter().filter(of_descriptor).filter_map(|device| device.get("driver")).collect();
        for driver in found {
            self.refuse(format!("-device {driver}"), "it is on a file descriptor that only this QEMU has");
        }
    }

    /// Rejects a disk whose image is not that of the command line: a snapshot was taken, or the medium was changed.
    fn check_disks(&mut self, facts: &Facts) {
        let mut changed = Vec::new();
        for device in &self.devices {
            let (Some(id), Some(node)) = (device.get("id"), device.get("drive")) else { continue };
            let here = |path: &str| path == id || path.split('/').any(|part| part == id);
            let is_node = self.words.iter().any(|word| {
                Options::parse(word, "driver").is_ok_and(|block| block.get("node-name").as_ref() == Some(&node))
            });
            let now = facts.disks.iter().find(|(path, _)| here(path));
            if let (true, Some((_, now))) = (is_node, now)
                && *now != node
            {
                changed.push((id, node, now.clone()));
            }
        }
        for (id, node, now) in changed {
            let why = format!(
                "the command line gives it {node}, but it shows {now} now (a snapshot or another medium): start the VM with \
                 that"
            );
            self.refuse(format!("disk {id}"), why);
        }
    }

    /// Rejects kept arguments that need something which is left out.
    fn check_references(&mut self) {
        let words = self.words.clone();
        for secret in std::mem::take(&mut self.secrets) {
            let asks = |word: &&String| word.contains("secret") && word.contains(&secret);
            if let Some(word) = words.iter().find(asks) {
                let why =
                    format!("it needs the secret {secret}, which this QEMU was handed: use one that is not encrypted");
                self.refuse(word.clone(), why);
            }
        }
        for word in words.iter().filter(|word| word.contains("/dev/fdset/")) {
            self.refuse(word.clone(), "it is on a file descriptor that only this QEMU has: name a file");
        }
    }
}

/// Returns the forwarded ports of a user network, from `key=value` options or JSON.
fn forwards(options: &Options) -> Vec<String> {
    match options {
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
