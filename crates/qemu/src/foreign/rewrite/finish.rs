//! The end of a rewrite: what several options give together, and checks that the command line describes the machine as
//! it is now.
//!
//! A *foreign* machine is one that Rekindle did not start ([`crate::foreign`]). The rewrite turns its command line into
//! arguments with which another QEMU can build it again. To *keep* an argument is to add it to these. To *refuse* one
//! is to record an [`Obstacle`]: a reason why the machine cannot be built again. The *facts* are what QEMU reported
//! about the machine by QMP. A *backend* is QEMU's object for a piece of the guest's memory, and a *chardev* its object
//! for the other end of a serial port.

use super::Rewriter;
use crate::adopt::Obstacle;
use crate::command::ForeignMachine;
use crate::cpu::Features;
use crate::foreign::MachineFacts;
use crate::foreign::differences::{device_differences, disk_differences};
use crate::options::Options;
use std::collections::BTreeSet;

/// Keys of a device that is on a file descriptor, which QEMU inherited or was handed.
const DESCRIPTOR_KEYS: [&str; 3] = ["fd", "vhostfd", "vhostfds"];

impl Rewriter {
    /// Completes the arguments, or returns everything that cannot be built again.
    pub(super) fn finish(mut self, facts: &MachineFacts) -> Result<ForeignMachine, Vec<Obstacle>> {
        self.finish_machine(facts);
        self.finish_memory(facts);
        self.check_devices(facts);
        self.check_disks(facts);
        self.check_references();
        self.finish_networks();
        self.finish_default_ports();
        let agent = self.agent_chardev();
        self.keep_unconnected_chardevs(agent.as_deref());
        if !self.obstacles.is_empty() {
            return Err(self.obstacles);
        }
        let Self { arguments, networks, console, has_tpm_emulator, .. } = self;
        // `describe` adds the features of the CPU, which it gets from QMP.
        let (backends, cpu) = (facts.backends.clone(), Features::new());
        Ok(ForeignMachine {
            arguments,
            backends,
            networks,
            console,
            agent,
            cpu,
            overlays: Vec::new(),
            domain_xml: None,
            has_tpm_emulator,
        })
    }

    /// Keeps the machine's options, with the versioned type.
    fn finish_machine(&mut self, facts: &MachineFacts) {
        let mut given = Options::Pairs(std::mem::take(&mut self.machine_options));
        if given.get("confidential-guest-support").is_some() {
            self.refuse("-machine confidential-guest-support", "the guest's memory is encrypted");
        }
        // The machine type is pinned to its version, Rekindle sets the accelerator itself, and the other two are set
        // below.
        given.remove(|key| ["type", "accel", "memory-backend", "suppress-vmdesc"].contains(&key));
        let mut pairs = vec![("type".into(), Some(facts.machine.clone()))];
        if let Options::Pairs(given) = given {
            pairs.extend(given);
        }
        let mut machine = Options::Pairs(pairs);
        if let Some(main_backend) = &facts.main_backend {
            machine.set("memory-backend", main_backend);
        }
        if self.has_nographic {
            machine.set("graphics", "off");
        }
        // Otherwise QEMU appends a description in JSON to the saved state, and Rekindle's parser accepts none.
        machine.set("suppress-vmdesc", "on");
        self.keep("machine", Some(&machine.to_string()));
    }

    /// Rejects backends of which the command line and the machine do not both know, except the one that QEMU made for
    /// `-m`.
    fn finish_memory(&mut self, facts: &MachineFacts) {
        if facts.backends.is_empty() {
            let why = "it is no memory backend of QEMU's: that needs QEMU 5.0 and a usual machine type";
            self.refuse("the guest's memory", why);
        }
        let named = std::mem::take(&mut self.backends);
        for backend in &facts.backends {
            if !named.contains(&backend.id) && facts.main_backend.as_ref() != Some(&backend.id) {
                let why = "memory that was plugged in while the guest ran is not on its command line: unplug it, or \
                           start the VM with it";
                self.refuse(format!("memory backend {}", backend.id), why);
            }
        }
        for id in named.iter().filter(|id| !facts.backends.iter().any(|backend| backend.id == **id)) {
            let why = "it was taken away while the guest ran; start the VM without it";
            self.refuse(format!("memory backend {id}"), why);
        }
        if !self.has_memory_size {
            let bytes: u64 = facts.backends.iter().map(|backend| backend.bytes).sum();
            // The command line has no `-m`: the actual size is stated instead. `K` is KiB.
            self.keep("m", Some(&format!("{}K", bytes / 1024)));
        }
    }

    /// Rejects a machine whose devices are not exactly those of its command line, and devices on descriptors.
    fn check_devices(&mut self, facts: &MachineFacts) {
        self.obstacles.extend(device_differences(&self.devices, &facts.devices));
        let has_descriptor = |device: &&Options| device.keys().iter().any(|key| DESCRIPTOR_KEYS.contains(key));
        let on_descriptors = self.devices.iter().filter(has_descriptor);
        let drivers: Vec<_> = on_descriptors.filter_map(|device| device.get("driver")).collect();
        for driver in drivers {
            self.refuse(format!("-device {driver}"), "it is on a file descriptor that only this QEMU has");
        }
    }

    /// Rejects a disk whose image is not that of the command line: a snapshot was taken, or the medium was changed.
    fn check_disks(&mut self, facts: &MachineFacts) {
        let node_name = |argument: &String| Options::parse(argument, "driver").ok()?.get("node-name");
        let nodes: BTreeSet<String> = self.arguments.iter().filter_map(node_name).collect();
        self.obstacles.extend(disk_differences(&self.devices, &nodes, &facts.disks));
    }

    /// Rejects kept arguments that need something which is left out.
    fn check_references(&mut self) {
        let arguments = self.arguments.clone();
        for secret in std::mem::take(&mut self.secrets) {
            // Any key may name a secret (`key-secret`, `password-secret`), so each argument with the word and the id is
            // rejected.
            let needs_secret = |argument: &&String| argument.contains("secret") && argument.contains(&secret);
            if let Some(argument) = arguments.iter().find(needs_secret) {
                let why =
                    format!("it needs the secret {secret}, which this QEMU was handed: use one that is not encrypted");
                self.refuse(argument.clone(), why);
            }
        }
        for argument in arguments.iter().filter(|argument| argument.contains("/dev/fdset/")) {
            self.refuse(argument.clone(), "it is on a file descriptor that only this QEMU has: name a file");
        }
    }

    /// Adds to each network what the device of its card states.
    fn finish_networks(&mut self) {
        for network in &mut self.networks {
            let card = self.devices.iter().find(|device| device.get("netdev").as_ref() == Some(&network.id));
            let property = |key: &str| card.and_then(|card| card.get(key)).unwrap_or_default();
            network.mac = property("mac");
            // Only a virtio card sends frames with headers, which only a tap understands.
            network.needs_tap &= property("driver").starts_with("virtio-net");
        }
    }

    /// Adds the serial and parallel port that QEMU adds by default.
    fn finish_default_ports(&mut self) {
        if self.has_nodefaults {
            return;
        }
        let mut drivers = self.devices.iter().filter_map(|device| device.get("driver"));
        let has_isa_serial = drivers.any(|driver| driver == "isa-serial");
        if !self.has_serial && !has_isa_serial {
            self.add_own_console();
        }
        // `-nographic`, which is left out, would add this port.
        if self.has_nographic && !self.has_parallel {
            self.keep("parallel", Some("null"));
        }
    }

    /// Returns the id of the character device of the guest agent's port.
    fn agent_chardev(&self) -> Option<String> {
        let is_agent = |device: &&Options| device.get("name").as_deref() == Some("org.qemu.guest_agent.0");
        self.devices.iter().find(is_agent)?.get("chardev")
    }

    /// Keeps all character devices other than the console's and the agent's. Their other ends are gone: the guest finds
    /// them as if no client were connected.
    fn keep_unconnected_chardevs(&mut self, agent: Option<&str>) {
        for id in std::mem::take(&mut self.chardevs) {
            if Some(id.as_str()) != agent && Some(&id) != self.console.as_ref() {
                // In an option of QEMU, a comma in a value is written twice.
                self.keep("chardev", Some(&format!("null,id={}", id.replace(',', ",,"))));
            }
        }
    }
}
