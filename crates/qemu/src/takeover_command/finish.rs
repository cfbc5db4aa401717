//! The end of a rewrite: Rekindle's own monitors, and checks that the command line describes the machine as it is now.
//! The *source* is the QEMU that runs the guest, the *destination* the one that takes it over ([`super`]).

use super::{CommandLine, Descriptor, OWN_ID_PREFIX, OWN_MONITORS, Rewriter, facts::Drive, pid_file};
use crate::adopt::Obstacle;
use crate::foreign::{CommandOption, device_differences, disk_differences};
use crate::options::Options;
use std::collections::BTreeSet;

impl Rewriter<'_> {
    /// Completes the command line, or returns everything that cannot be taken over.
    pub(super) fn finish(mut self) -> Result<CommandLine, Vec<Obstacle>> {
        self.finish_machine();
        self.check_display();
        self.check_nographic();
        let machine = &self.facts.machine;
        self.obstacles.extend(device_differences(&self.devices, &machine.devices));
        self.obstacles.extend(disk_differences(&self.devices, &self.block_nodes, &machine.disks));
        self.check_drives();
        self.check_fd_sets();
        self.add_own_monitors();
        if let Some(path) = &self.pid_file {
            let option = pid_file::option(path);
            self.add("chardev", option);
        }
        self.add("incoming", "defer");
        self.arguments.push("-S".into());
        if !self.obstacles.is_empty() {
            self.obstacles.sort();
            self.obstacles.dedup();
            return Err(self.obstacles);
        }
        Ok(CommandLine {
            arguments: self.arguments,
            descriptors: self.numbers.into_destination(),
            forwards: self.forwards,
            vnc_server: self.vnc_server,
            spice_server: self.spice_server,
            pid_file: self.pid_file,
        })
    }

    fn add_own_monitors(&mut self) {
        for name in OWN_MONITORS {
            let id = format!("{OWN_ID_PREFIX}{}-{name}", self.destination.label);
            let number = self.numbers.put_new(Descriptor::OwnMonitor { name });
            self.add("chardev", format!("socket,id={id},fd={number},server=on,wait=off"));
            let (option, value) = self.destination.syntax.monitor(&id);
            self.arguments.extend([option.to_owned(), value]);
        }
    }

    /// Passes on the descriptor of `-add-fd`. QEMU duplicates it when it starts and closes the number that the command
    /// line names.
    pub(super) fn read_fd_set(&mut self, option: &CommandOption<'_>) {
        let Some(member) = self.parse(option, "") else { return };
        let set = member.get("set").unwrap_or_default();
        let in_set = set.parse().ok().and_then(|set: u32| self.facts.fd_sets.get(&set)).map(Vec::as_slice);
        match (member.get("fd").and_then(|fd| fd.parse().ok()), in_set) {
            (Some(number), Some([source])) => self.numbers.put(number, Descriptor::Duplicate { source: *source }),
            _ => {
                let why = format!("QEMU has not exactly one descriptor in the set {set}");
                self.refuse(format!("-add-fd {}", option.value.unwrap_or_default()), why);
            }
        }
        self.fd_sets.insert(set);
        self.keep_unchanged(option);
    }

    /// Rejects options that need a descriptor which QEMU got after its start.
    fn check_fd_sets(&mut self) {
        const PREFIX: &str = "/dev/fdset/";
        let mut missing = Vec::new();
        for argument in &self.arguments {
            for (index, _) in argument.match_indices(PREFIX) {
                let rest = argument.get(index + PREFIX.len()..).unwrap_or_default();
                let set: String = rest.chars().take_while(char::is_ascii_digit).collect();
                if !self.fd_sets.contains(&set) {
                    missing.push((argument.clone(), format!("{PREFIX}{set} was passed to QEMU after its start")));
                }
            }
        }
        for (argument, why) in missing {
            self.refuse(argument, why);
        }
    }

    /// Rejects drives whose medium, backing images, tray or limits have changed since the start.
    fn check_drives(&mut self) {
        let facts = self.facts;
        let is_limit = |key: &str| key.starts_with("throttling.") || ["bps", "iops"].contains(&key);
        let limits_are_given = self.drives.iter().any(|drive| drive.keys().into_iter().any(is_limit));
        for Drive { device, file, nodes, tray_open, is_limited } in &facts.drives {
            let what = format!("disk {device}");
            let given_node = self.node_of(device);
            if file.is_some() && self.is_empty_drive(device) {
                let why = "its medium was inserted while the guest ran: eject it (virsh change-media --eject), or start \
                           the VM with it";
                self.refuse(&what, why);
            }
            if given_node.as_ref() == nodes.first() && self.has_other_backing(nodes) {
                let why = "its backing images have changed while the guest ran (blockpull, blockcommit): shut the \
                           guest down and start it again";
                self.refuse(&what, why);
            }
            if *is_limited && !limits_are_given {
                self.refuse(
                    &what,
                    "its rate was limited while the guest ran, and Rekindle does not carry limits over yet",
                );
            }
            if *tray_open {
                self.refuse(&what, "its tray is open: close it");
            }
            if file.is_none() && given_node.as_ref().is_some_and(|node| self.has_medium(node)) {
                self.refuse(&what, "its medium was ejected while the guest ran: start the VM without it");
            }
            let given_file = given_node.and_then(|node| self.file_of(&node));
            if let (Some(given), Some(current)) = (given_file, file)
                && given.starts_with('/')
                && current.starts_with('/')
                && given != *current
            {
                let why =
                    format!("the command line gives it {given}, but it shows {current} now: start the VM with that");
                self.refuse(&what, why);
            }
        }
    }

    /// Returns what the device's `drive=` names.
    fn node_of(&self, qom_path: &str) -> Option<String> {
        self.device_of(qom_path)?.get("drive")
    }

    fn device_of(&self, qom_path: &str) -> Option<&Options> {
        let parts: BTreeSet<&str> = qom_path.split('/').collect();
        self.devices.iter().find(|device| device.get("id").is_some_and(|id| parts.contains(id.as_str())))
    }

    /// Returns whether the command line gives the device no medium. Floppy controllers have `driveA=` and `driveB=`.
    fn is_empty_drive(&self, qom_path: &str) -> bool {
        let names_drive = |key: &&str| key.starts_with("drive") && *key != "driver";
        self.device_of(qom_path).is_some_and(|device| !device.keys().iter().any(names_drive))
    }

    /// Returns whether the command line states other backing images than these nodes have, from the drive's own on.
    fn has_other_backing(&self, nodes: &[String]) -> bool {
        let below = nodes.iter().skip(1).map(Some).chain([None]);
        nodes
            .iter()
            .zip(below)
            .any(|(node, below)| self.backing_nodes.get(node).is_some_and(|stated| stated.as_ref() != below))
    }

    /// Returns whether the command line gives the drive or block node `name` a file.
    fn has_medium(&self, name: &str) -> bool {
        self.block_nodes.contains(name) || self.file_of(name).is_some()
    }

    /// Returns the file of the `-drive` with this id.
    fn file_of(&self, id: &str) -> Option<String> {
        self.drives.iter().find(|drive| drive.get("id").as_deref() == Some(id))?.get("file")
    }
}
