//! The end of a rewrite: Rekindle's own monitors, and checks that the command line describes the machine as it is now.
//! The *source* is the QEMU that runs the guest, the *destination* the one that takes it over ([`super`]).

use super::{CommandLine, Descriptor, OWN_ID_PREFIX, OWN_MONITORS, Rewriter, pid_file};
use crate::adopt::Obstacle;
use crate::foreign::{CommandOption, device_differences};
use crate::options::Options;

impl Rewriter<'_> {
    /// Completes the command line, or returns everything that cannot be taken over.
    pub(super) fn finish(mut self) -> Result<CommandLine, Vec<Obstacle>> {
        self.finish_machine();
        self.check_display();
        self.check_nographic();
        self.follow_plugging();
        let devices: Vec<Options> = self.devices.iter().map(|device| device.options.clone()).collect();
        self.obstacles.extend(device_differences(&devices, &self.facts.machine.devices));
        self.follow_images();
        self.check_disks();
        self.check_plugged();
        self.leave_out_removed();
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

    /// Removes the options whose values are at the positions in `removed`.
    fn leave_out_removed(&mut self) {
        let removed = std::mem::take(&mut self.removed);
        let is_kept = |position: usize| !removed.contains(&position) && !removed.contains(&(position + 1));
        let arguments = std::mem::take(&mut self.arguments).into_iter().enumerate();
        self.arguments = arguments.filter(|(position, _)| is_kept(*position)).map(|(_, argument)| argument).collect();
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
}
