//! How each option of the source's command line appears on the destination's. The *source* is the QEMU that runs the
//! guest, the *destination* the one that takes it over on the same host ([`super`]).

use crate::foreign::Reason;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TakeoverRule {
    /// Word for word.
    Keep,
    /// Left out: it concerns only how the source was started.
    Drop,
    /// Rewritten by the option's own rule.
    Rewrite,
    /// Not possible, for this reason.
    Refuse(Reason),
    /// Not possible, for the reason that [`crate::foreign`] has for the option.
    RefuseAsCarried,
}

/// Options that are not kept word for word, without those that [`crate::foreign`] does not know either.
const RULES: &[(&[&str], TakeoverRule)] = {
    use TakeoverRule::{Drop, Refuse, RefuseAsCarried, Rewrite};
    &[
        (&["incoming", "loadvm", "S", "preconfig", "daemonize"], Drop),
        // The memfds replace the files.
        (&["mem-path", "mem-prealloc"], Drop),
        // The destination is started as the user that the source has changed to.
        (&["runas"], Drop),
        (&["machine", "M", "object", "device", "drive", "blockdev", "netdev", "nic", "net"], Rewrite),
        (&["chardev", "mon", "serial", "parallel", "debugcon", "qmp", "qmp-pretty", "monitor"], Rewrite),
        (&["vnc", "spice", "display", "add-fd", "set", "run-with", "pidfile", "overcommit", "tpmdev"], Rewrite),
        (&["chroot"], Refuse("another QEMU cannot be started in that directory: start it without")),
        (&["gdb", "s"], Refuse("two QEMUs cannot wait for a debugger at one address: start it without")),
        (&["plugin"], Refuse("what a plugin has counted ends with QEMU: start it without")),
        (&["readconfig", "virtfs", "snapshot"], RefuseAsCarried),
        (&["xen-domid", "xen-attach", "xen-domid-restrict"], RefuseAsCarried),
    ]
};

/// Returns the rule of an option.
pub(super) fn of(option: &str) -> TakeoverRule {
    RULES.iter().find(|(names, _)| names.contains(&option)).map_or(TakeoverRule::Keep, |(_, rule)| *rule)
}

/// Objects that two QEMUs cannot have, by type prefix, besides those that [`crate::foreign`] rejects.
const REFUSED_OBJECTS: &[(&str, Reason)] = &[
    ("input-", "two QEMUs would read one input device of the host: start it without"),
    ("iommufd", "hardware writes the guest's memory past the processor"),
];

/// Returns why an object of this type cannot be taken over.
pub(super) fn object(kind: &str) -> Option<Reason> {
    REFUSED_OBJECTS.iter().find(|(prefix, _)| kind.starts_with(prefix)).map(|(_, why)| *why)
}

/// Devices that a restored guest cannot have, because its QEMU has no SPICE server, but that another QEMU with the same
/// server can take over. (Of redirected USB devices, see [`super::Inventory::obstacles`].)
const DEVICES_OF_SPICE: [&str; 2] = ["qxl", "usb-redir"];

/// Returns whether a device of this type needs nothing but a SPICE server.
pub(super) fn needs_only_spice(driver: &str) -> bool {
    DEVICES_OF_SPICE.iter().any(|prefix| driver.starts_with(prefix))
}

/// A backend of a character device that only one QEMU can use, with the reason.
const REFUSED_BACKENDS: &[(&[&str], Reason)] = &[
    (&["pipe"], "two QEMUs would read one pipe: use a socket"),
    (&["serial", "tty", "parallel", "parport"], "two QEMUs would read one device of the host"),
    (&["udp"], "two QEMUs cannot receive at one UDP address: use a socket or a pty"),
    (&["braille", "msmouse", "wctablet"], "its state is at its other end: start it without"),
    (&["dbus"], "Rekindle does not pass on a D-Bus server: start the VM without this device"),
];

/// Returns why a character device of this backend cannot be taken over.
pub(super) fn chardev_backend(backend: &str) -> Option<Reason> {
    REFUSED_BACKENDS.iter().find(|(names, _)| names.contains(&backend)).map(|(_, why)| *why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_option_has_two_rules() {
        let mut names: Vec<_> = RULES.iter().flat_map(|(names, _)| names.iter()).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
