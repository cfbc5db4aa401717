//! `qemu_args`: arguments that are rejected because Rekindle sets them itself, and arguments that prevent carrying a
//! guest to another QEMU.

use super::Definition;
use super::document::{Section, TextItem, quoted};

/// Options that Rekindle sets itself, or that would take control of the VM away from it, each with a hint.
const REJECTED_OPTIONS: &[(&[&str], &str)] = &[
    (&["m"], "use the key `memory`"),
    (&["mem-path"], "use the key `dir` under [ram]"),
    (&["mem-prealloc"], "use `prealloc = true` under [ram]"),
    (&["numa"], "leave it out: a VM's RAM is one block, so that it can outlive QEMU"),
    (&["machine", "M"], "use the key `machine`"),
    (&["accel", "enable-kvm"], "use the key `accel`"),
    (&["cpu"], "use the key `cpu`"),
    (&["smp"], "use the key `vcpus`"),
    (&["name"], "use the key `name`"),
    (&["kernel"], "use the key `kernel` under [boot]"),
    (&["initrd"], "use the key `initrd` under [boot]"),
    (&["append"], "use the key `append` under [boot]"),
    (&["vga"], "use `vga = true` under [devices], or `-device` for another card"),
    (&["nographic"], "leave it out: the serial console is always there (`rekindle console`) and no window is opened"),
    (&["S", "preconfig"], "leave it out: Rekindle holds every guest until it is ready, and then starts it"),
    (&["incoming", "loadvm"], "leave it out: Rekindle loads states itself (`rekindle reboot`, `rekindle restore`)"),
    (&["snapshot"], "leave it out: what the guest writes would be lost with its VMM; give it a copy of the disk"),
    (&["daemonize"], "leave it out: Rekindle puts QEMU in the background itself and watches over it"),
    (&["pidfile"], "leave it out: the pidfile is in the VM's run directory"),
    (&["no-reboot", "no-shutdown", "action"], "leave it out: Rekindle's monitor decides on reboots and exits"),
    (&["readconfig"], "write the options themselves: what is in another file cannot be checked"),
    (&["add-fd"], "name a path: a file descriptor is not open any more when QEMU is started again"),
];

/// Records each argument that is not allowed.
pub(super) fn check(section: &Section<'_>, arguments: &[TextItem<'_>]) {
    let mut option_before = None;
    for (index, argument) in arguments.iter().enumerate() {
        let next_text = arguments.get(index + 1).map_or("", |next| next.text);
        if let Some(why) = why_rejected(argument.text, option_before, next_text) {
            section.reject_item("qemu_args", argument, why);
        }
        option_before = option_name(argument.text);
    }
}

/// Returns why an argument is not allowed between the option before it (`None` if a value is before it) and the next
/// argument.
fn why_rejected(text: &str, option_before: Option<&str>, next_text: &str) -> Option<String> {
    if text.contains('\0') {
        return Some("holds a null character, which no argument can; take it out".into());
    }
    let Some(option) = option_name(text) else {
        let why = match option_before {
            Some("device") if driver_of(text) == "vmgenid" => {
                "not allowed here; use the key `vmgenid` under [devices]: the ID must stay the same in every QEMU"
            }
            Some(_) => return None,
            None => "is no option's value: QEMU would take it for a disk; use [[disk]], or put its option before it",
        };
        return Some(why.into());
    };
    if let Some((option, value)) = option.split_once(char::is_whitespace) {
        let (option, value) = (quoted(&format!("-{option}")), quoted(value.trim()));
        return Some(format!("is an option and its value in one; write {option}, {value}"));
    }
    if let Some((_, hint)) = REJECTED_OPTIONS.iter().find(|(options, _)| options.contains(&option)) {
        return Some(format!("not allowed here; {hint}"));
    }
    (option == "global" && next_text.starts_with("migration.")).then(|| {
        "no `migration.` property is allowed here; leave it out: Rekindle sets them for the states that it saves".into()
    })
}

/// Returns the option's name without its one or two dashes; `None` for a value.
fn option_name(argument: &str) -> Option<&str> {
    let option = argument.strip_prefix('-')?;
    Some(option.strip_prefix('-').unwrap_or(option))
}

/// Device models that cannot be carried, by name prefix. The first match counts.
const UNCARRIABLE_DEVICES: &[(&str, &str)] = &[
    ("vfio-", "the state of a passed-through host device is in the device, where a new QEMU cannot get it"),
    ("vhost-user-", "its state is in a foreign process, which serves one QEMU only and writes guest RAM unseen"),
    ("vhost-", "its state is in the host's kernel, which writes guest RAM unseen by QEMU"),
    ("usb-host", "the state of a passed-through USB device is in the device"),
    ("usb-redir", "the state of a redirected USB device is at its other end"),
    ("usb-mtp", "QEMU cannot save its state"),
    ("ivshmem", "its memory is shared with others and is no part of the guest's RAM"),
    ("nvdimm", "its memory is outside the VM's RAM, which alone is carried"),
    ("virtio-pmem", "its memory is outside the VM's RAM, which alone is carried"),
    ("virtio-mem", "its memory is outside the VM's RAM, which alone is carried"),
    ("pc-dimm", "its memory is outside the VM's RAM, which alone is carried"),
    ("cxl-", "its memory is outside the VM's RAM, which alone is carried"),
    ("nvme", "QEMU cannot save its state; use [[disk]], which is a virtio disk"),
    ("virtio-gpu-gl", "QEMU cannot save what is in the host's graphics driver; use virtio-gpu without `gl`"),
    ("virtio-vga-gl", "QEMU cannot save what is in the host's graphics driver; use virtio-vga without `gl`"),
    ("virtio-sound", "QEMU cannot save its state"),
    ("virtio-9p", "QEMU cannot save the files that a guest has open on it"),
    ("amd-iommu", "QEMU cannot save its state; use intel-iommu or virtio-iommu"),
];

/// Objects, TPMs and memory encryption that cannot be carried: the option, a prefix of its value, and the reason.
const UNCARRIABLE_OPTIONS: &[(&str, &str, &str)] = &[
    ("object", "sev-", "the guest's RAM is encrypted with a key that no new VMM is given"),
    ("object", "tdx-guest", "the guest's RAM is encrypted with a key that no new VMM is given"),
    ("object", "memory-backend-", "its memory is outside the VM's RAM, which alone is carried"),
    ("tpmdev", "passthrough", "the state of the host's TPM is in the TPM"),
    ("tpmdev", "emulator", "its state is in swtpm, which serves one QEMU only"),
    (
        "netdev",
        "vhost-user",
        "its state is in a foreign process, which serves one QEMU only and writes guest RAM unseen",
    ),
    ("netdev", "vhost-vdpa", "the state of a passed-through host device is in the device"),
    ("virtfs", "", "QEMU cannot save the files that a guest has open on it"),
];

/// Lists the `qemu_args` of a VM that cannot be carried to another QEMU, each with the reason. Such a VM runs, but
/// can only be rebooted cold. Empty: nothing prevents carrying it.
///
/// Devices of the definition's own keys can all be carried, and are not checked.
pub fn uncarriable(definition: &Definition) -> Vec<String> {
    let mut uncarriable = Vec::new();
    for pair in definition.qemu_args.windows(2) {
        let [option, value] = pair else { continue };
        if let Some(reason) = option_name(option).and_then(|name| why_uncarriable(name, value)) {
            uncarriable.push(format!("{option} {value}: {reason}"));
        }
    }
    uncarriable
}

/// Returns why a guest with this option of QEMU cannot be carried.
fn why_uncarriable(option: &str, value: &str) -> Option<&'static str> {
    let driver = driver_of(value);
    if option == "device" {
        return UNCARRIABLE_DEVICES.iter().find(|(start, _)| driver.starts_with(start)).map(|(_, reason)| *reason);
    }
    if let Some((.., reason)) =
        UNCARRIABLE_OPTIONS.iter().find(|(name, start, _)| *name == option && driver.starts_with(start))
    {
        return Some(reason);
    }
    (matches!(option, "netdev" | "nic" | "net") && uses_vhost(value))
        .then_some("the state of its queues is in the host's kernel")
}

/// Returns the driver or type that a value names: the text before its first comma, or the `driver`, `qom-type` or
/// `type` of a JSON value.
fn driver_of(value: &str) -> String {
    if let Some(json) = parse_json(value) {
        let named = ["driver", "qom-type", "type"].iter().find_map(|key| json.get(key)?.as_str());
        return named.unwrap_or_default().to_owned();
    }
    let first_part = value.split(',').next().unwrap_or_default();
    let named = ["driver=", "qom-type=", "type="].iter().find_map(|key| first_part.strip_prefix(key));
    named.unwrap_or(first_part).to_owned()
}

fn uses_vhost(value: &str) -> bool {
    if let Some(json) = parse_json(value) {
        return json.get("vhost").is_some_and(|vhost| vhost.as_bool() == Some(true) || vhost.as_str() == Some("on"));
    }
    value
        .split(',')
        .any(|part| matches!(part, "vhost" | "vhost=on" | "vhost=yes" | "vhost=true" | "vhost=y" | "vhostforce=on"))
}

fn parse_json(value: &str) -> Option<serde_json::Value> {
    if value.starts_with('{') { serde_json::from_str(value).ok() } else { None }
}
