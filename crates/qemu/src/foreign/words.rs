//! Splits a QEMU command line into options, and decides for each how it is carried over.

use super::Why;

/// How an option is carried over when the machine is built again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// Unchanged: the guest sees it, or its devices depend on it.
    Keep,
    /// Left out: it concerns the process, not the guest, or Rekindle sets it itself.
    Drop,
    /// Rewritten by the option's own rule.
    Rewrite,
    /// Not possible, for this reason.
    Refuse(Why),
}

/// Options with a value.
const VALUED: &[(&[&str], Fate)] = {
    use Fate::{Drop, Keep, Refuse, Rewrite};
    &[
        (&["cpu", "smp", "numa", "m", "uuid", "smbios", "rtc", "boot", "global", "set", "k", "watchdog-action"], Keep),
        (&["blockdev", "drive", "hda", "hdb", "hdc", "hdd", "cdrom", "fda", "fdb", "pflash", "mtdblock", "sd"], Keep),
        (&["kernel", "shim", "initrd", "append", "dtb", "bios", "L", "acpitable", "fw_cfg", "option-rom"], Keep),
        (&["vga", "usbdevice", "icount", "compat", "sandbox", "action", "overcommit", "fsdev", "iscsi"], Keep),
        (
            &["name", "qmp", "qmp-pretty", "monitor", "mon", "pidfile", "incoming", "gdb", "display", "vnc", "spice"],
            Drop,
        ),
        (&["accel", "mem-path", "runas", "run-with", "chroot", "D", "d", "trace", "msg", "dfilter", "seed"], Drop),
        (&["loadvm", "add-fd", "plugin", "echr", "rotate"], Drop),
        (&["machine", "M", "device", "object", "netdev", "nic", "net", "chardev", "serial", "parallel"], Rewrite),
        (&["debugcon", "audiodev", "audio"], Rewrite),
        (&["readconfig"], Refuse("the options in that file cannot be seen: start it with the options themselves")),
        (&["tpmdev"], Refuse("the state of a TPM is in another process or in hardware: start it without")),
        (&["virtfs"], Refuse("QEMU cannot save the files that a guest has open on it: start it without")),
        (&["xen-domid"], Refuse("the guest's memory belongs to Xen")),
    ]
};

/// Options without a value.
const SWITCHES: &[(&[&str], Fate)] = {
    use Fate::{Drop, Keep, Refuse, Rewrite};
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
pub(super) struct Word<'a> {
    /// Name without dashes; `hda` for a disk that was given without an option.
    pub option: &'a str,
    /// The option's value; none for a switch.
    pub value: Option<&'a str>,
    /// How the option is carried over.
    pub fate: Fate,
}

fn find(table: &'static [(&'static [&'static str], Fate)], option: &str) -> Option<Fate> {
    table.iter().find(|(names, _)| names.contains(&option)).map(|(_, fate)| *fate)
}

/// Splits a command line, without the program's name.
///
/// # Errors
/// The first option that is unknown or has no value. After an unknown option it is not known whether the next word is
/// its value.
pub(super) fn split(arguments: &[String]) -> Result<Vec<Word<'_>>, String> {
    let mut words = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let Some(option) = argument.strip_prefix('-').filter(|option| !option.is_empty()) else {
            words.push(Word { option: "hda", value: Some(argument), fate: Fate::Keep });
            continue;
        };
        let option = option.strip_prefix('-').unwrap_or(option);
        let unknown = || format!("-{option}");
        let (value, fate) = match (find(SWITCHES, option), find(VALUED, option)) {
            (Some(fate), _) => (None, fate),
            (None, Some(fate)) => (Some(rest.next().ok_or_else(unknown)?.as_str()), fate),
            (None, None) => return Err(unknown()),
        };
        words.push(Word { option, value, fate });
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Result<Vec<(String, Option<String>)>, String> {
        let line: Vec<String> = line.split(' ').map(str::to_owned).collect();
        Ok(split(&line)?.into_iter().map(|word| (word.option.into(), word.value.map(str::to_owned))).collect())
    }

    #[test]
    fn values_switches_and_a_bare_disk() {
        let found = words("-nodefaults --machine q35 disk.img -S -append -x").unwrap();
        let want = [
            ("nodefaults", None),
            ("machine", Some("q35")),
            ("hda", Some("disk.img")),
            ("S", None),
            ("append", Some("-x")),
        ];
        assert_eq!(found, want.map(|(option, value)| (option.to_owned(), value.map(str::to_owned))));
    }

    #[test]
    fn what_is_not_known_or_incomplete_is_named() {
        assert_eq!(words("-nodefaults -frobnicate x").unwrap_err(), "-frobnicate");
        assert_eq!(words("-nodefaults -m").unwrap_err(), "-m");
    }

    #[test]
    fn no_option_is_in_two_places() {
        let mut all: Vec<_> = VALUED.iter().chain(SWITCHES).flat_map(|(names, _)| names.iter()).collect();
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}
