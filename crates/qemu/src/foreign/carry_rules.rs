//! Splits a QEMU command line into options, and decides for each how it is carried over into the rebuilt machine.
//!
//! A machine is rebuilt when its guest is restored in another QEMU. The rule depends on whether the guest can see the
//! option's effect ([`super`]).

/// A reason, as shown to the user.
pub(crate) type Reason = &'static str;

/// How an option is carried over when the machine is built again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CarryRule {
    /// Unchanged: the guest sees it, or its devices depend on it.
    Keep,
    /// Left out: it concerns the process, not the guest, or Rekindle sets it itself.
    Drop,
    /// Rewritten by the option's own rule.
    Rewrite,
    /// Not possible, for this reason.
    Refuse(Reason),
}

/// Options of QEMU that share a rule.
type RuleTable = &'static [(&'static [&'static str], CarryRule)];

/// Options with a value.
const OPTIONS_WITH_VALUE: RuleTable = {
    use CarryRule::{Drop, Keep, Refuse, Rewrite};
    &[
        (&["cpu", "smp", "numa", "m", "uuid", "smbios", "rtc", "boot", "global", "set", "k", "watchdog-action"], Keep),
        (&["blockdev", "drive", "hda", "hdb", "hdc", "hdd", "cdrom", "fda", "fdb", "pflash", "mtdblock", "sd"], Keep),
        (&["kernel", "shim", "initrd", "append", "dtb", "bios", "L", "acpitable", "fw_cfg", "option-rom"], Keep),
        (&["vga", "usbdevice", "icount", "compat", "action", "overcommit", "fsdev", "iscsi"], Keep),
        (
            &["name", "qmp", "qmp-pretty", "monitor", "mon", "pidfile", "incoming", "gdb", "display", "vnc", "spice"],
            Drop,
        ),
        (
            &[
                "accel", "mem-path", "runas", "run-with", "chroot", "sandbox", "D", "d", "trace", "msg", "dfilter",
                "seed",
            ],
            Drop,
        ),
        // Only Proxmox's QEMU has `-id`: the number of the VM.
        (&["loadvm", "add-fd", "plugin", "echr", "rotate", "id"], Drop),
        (&["machine", "M", "device", "object", "netdev", "nic", "net", "chardev", "serial", "parallel"], Rewrite),
        (&["debugcon", "audiodev", "audio", "tpmdev"], Rewrite),
        (&["readconfig"], Refuse("the options in that file cannot be seen: start it with the options themselves")),
        (&["virtfs"], Refuse("QEMU cannot save the files that a guest has open on it: start it without")),
        (&["xen-domid"], Refuse("the guest's memory belongs to Xen")),
    ]
};

/// Options without a value.
const SWITCHES: RuleTable = {
    use CarryRule::{Drop, Keep, Refuse, Rewrite};
    &[
        (&["nodefaults", "no-user-config", "usb", "no-fd-bootchk", "win2k-hack", "no-reboot"], Keep),
        (&["S", "daemonize", "no-shutdown", "enable-kvm", "s", "mem-prealloc", "singlestep", "full-screen"], Drop),
        (&["one-insn-per-tb", "async-teardown", "perfmap", "jitdump", "preconfig", "enable-sync-profile"], Drop),
        (&["only-migratable", "portrait"], Drop),
        (&["nographic", "no-acpi", "no-hpet"], Rewrite),
        (&["snapshot"], Refuse("what the guest writes to its disks is in a nameless file that ends with QEMU")),
        (&["xen-attach", "xen-domid-restrict"], Refuse("the guest's memory belongs to Xen")),
    ]
};

/// One option of a command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CommandOption<'a> {
    /// Name without dashes; `hda` for a disk that was given without an option.
    pub name: &'a str,
    /// The option's value; none for a switch.
    pub value: Option<&'a str>,
    pub rule: CarryRule,
}

fn find_rule(table: RuleTable, option: &str) -> Option<CarryRule> {
    table.iter().find(|(names, _)| names.contains(&option)).map(|(_, rule)| *rule)
}

/// Splits a command line, given without the program's name.
///
/// # Errors
/// The first option that is unknown or has no value. After an unknown option it is not known whether the next word is
/// its value.
pub(crate) fn split(arguments: &[String]) -> Result<Vec<CommandOption<'_>>, String> {
    let mut options = Vec::new();
    let mut unread = arguments.iter();
    while let Some(argument) = unread.next() {
        let Some(name) = argument.strip_prefix('-').filter(|name| !name.is_empty()) else {
            options.push(CommandOption { name: "hda", value: Some(argument), rule: CarryRule::Keep });
            continue;
        };
        let name = name.strip_prefix('-').unwrap_or(name);
        let unknown = || format!("-{name}");
        let (value, rule) = match (find_rule(SWITCHES, name), find_rule(OPTIONS_WITH_VALUE, name)) {
            (Some(rule), _) => (None, rule),
            (None, Some(rule)) => (Some(unread.next().ok_or_else(unknown)?.as_str()), rule),
            (None, None) => return Err(unknown()),
        };
        options.push(CommandOption { name, value, rule });
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the names and values of the options of a command line.
    fn split_line(line: &str) -> Result<Vec<(String, Option<String>)>, String> {
        let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let options = split(&arguments)?;
        Ok(options.into_iter().map(|option| (option.name.into(), option.value.map(str::to_owned))).collect())
    }

    #[test]
    fn values_switches_and_a_bare_disk() {
        let options = split_line("-nodefaults --machine q35 disk.img -S -append -x").unwrap();
        let expected = [
            ("nodefaults", None),
            ("machine", Some("q35")),
            ("hda", Some("disk.img")),
            ("S", None),
            ("append", Some("-x")),
        ];
        assert_eq!(options, expected.map(|(name, value)| (name.to_owned(), value.map(str::to_owned))));
    }

    #[test]
    fn an_unknown_or_incomplete_option_is_named() {
        assert_eq!(split_line("-nodefaults -frobnicate x").unwrap_err(), "-frobnicate");
        assert_eq!(split_line("-nodefaults -m").unwrap_err(), "-m");
    }

    #[test]
    fn no_option_has_two_rules() {
        let rules = OPTIONS_WITH_VALUE.iter().chain(SWITCHES);
        let mut names: Vec<_> = rules.flat_map(|(names, _)| names.iter()).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
