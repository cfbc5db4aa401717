//! What the XML of a domain uses of the host that runs it.
//!
//! The XML of a checkpoint may have been changed, and libvirt builds a QEMU's command line from it as root. So each
//! element is compared with a list of those that only describe the guest's machine. Files are reported, and so is each
//! other element. Whether the host permits these is not decided here.

use roxmltree::{Document, Node};
use std::path::PathBuf;

/// What a domain uses of the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DomainUses {
    pub uuid: String,
    /// The QEMU binary.
    pub emulator: Option<PathBuf>,
    pub files: Vec<UsedFile>,
    pub elements: Vec<UsedElement>,
}

/// A file or block device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsedFile {
    /// The element that names it, such as `disk`.
    pub element: String,
    pub path: PathBuf,
}

/// An element that may reach the host in another way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsedElement {
    /// Name of the element with its namespace's prefix, such as `qemu:commandline`.
    pub name: String,
    pub why: String,
    /// Text of the element.
    pub text: String,
}

/// Elements of a domain that only describe the guest, with everything in them.
const DESCRIPTIONS: &[&str] = &[
    "name",
    "uuid",
    "genid",
    "title",
    "description",
    "metadata",
    "memory",
    "currentMemory",
    "maxMemory",
    "vcpu",
    "vcpus",
    "iothreads",
    "iothreadids",
    "defaultiothread",
    "cputune",
    "numatune",
    "blkiotune",
    "memtune",
    "sysinfo",
    "features",
    "cpu",
    "clock",
    "on_poweroff",
    "on_reboot",
    "on_crash",
    "on_lockfailure",
    "pm",
    "perf",
    "memoryBacking",
    "resource",
    "keywrap",
];
/// Elements of `<os>` that only describe the guest.
const BOOT_DESCRIPTIONS: &[&str] = &["type", "boot", "bootmenu", "bios", "smbios", "cmdline", "firmware"];
/// Elements of `<os>` that name a file.
const BOOT_FILES: &[&str] = &["kernel", "initrd", "dtb", "loader", "nvram"];
/// Devices that only the guest sees.
const GUEST_DEVICES: &[&str] = &[
    "controller",
    "input",
    "memballoon",
    "video",
    "sound",
    "audio",
    "watchdog",
    "panic",
    "hub",
    "vmcoreinfo",
    "iommu",
    "memory",
];
/// Devices with a character device.
const CHARACTER_DEVICES: &[&str] = &["serial", "console", "parallel", "channel"];
/// Where a character device may be connected: libvirt chooses the path, or there is none.
const CHARACTER_DEVICE_TYPES: &[&str] = &["pty", "null", "unix", "vc", "spicevmc", "file"];
/// Networks that the host's administrator has made.
const NETWORK_TYPES: &[&str] = &["network", "bridge", "user"];
/// Sources of randomness.
const RANDOM_FILES: &[&str] = &["/dev/urandom", "/dev/random", "/dev/hwrng"];
/// Directories in which libvirt makes sockets and logs itself.
const LIBVIRT_DIRECTORIES: &[&str] =
    &["/var/lib/libvirt/qemu/", "/run/libvirt/qemu/", "/var/run/libvirt/qemu/", "/dev/pts/"];

/// Reads what the XML of a domain uses.
///
/// # Errors
/// A text: what is wrong with the XML.
pub fn of_domain(xml: &str) -> Result<DomainUses, String> {
    let document = Document::parse(xml).map_err(|e| e.to_string())?;
    let domain = document.root_element();
    let mut uses = DomainUses::default();
    if domain.tag_name().name() != "domain" || domain.tag_name().namespace().is_some() {
        return Err("its element is not <domain>".into());
    }
    if !matches!(domain.attribute("type"), Some("kvm" | "qemu")) {
        return Err("its type is neither kvm nor qemu".into());
    }
    for child in domain.children().filter(Node::is_element) {
        match name_of(child).as_str() {
            "uuid" => uses.uuid = child.text().unwrap_or_default().trim().to_owned(),
            "os" => uses.read_boot(child),
            "devices" => uses.read_devices(child),
            "seclabel" => uses.read_label(child),
            "memoryBacking" if child.descendants().any(|node| node.has_attribute("path")) => {
                uses.refuse(child, "it names a file");
            }
            "metadata" => {}
            name if DESCRIPTIONS.contains(&name) => {
                uses.check_namespaces(child);
                // `<sysinfo>` can put a file into the guest.
                child
                    .descendants()
                    .filter_map(|node| node.attribute("file"))
                    .for_each(|path| uses.use_file(name, path));
            }
            _ => uses.refuse(child, "it is not known to only describe the guest"),
        }
    }
    Ok(uses)
}

impl DomainUses {
    fn refuse(&mut self, node: Node<'_, '_>, why: &str) {
        let text = node.document().input_text().get(node.range()).unwrap_or_default().to_owned();
        self.elements.push(UsedElement { name: name_of(node), why: why.into(), text });
    }

    fn use_file(&mut self, element: &str, path: &str) {
        self.files.push(UsedFile { element: element.into(), path: path.trim().into() });
    }

    /// Elements of other namespaces reach past libvirt.
    fn check_namespaces(&mut self, node: Node<'_, '_>) {
        for inner in node.descendants().filter(|inner| inner.tag_name().namespace().is_some()) {
            self.refuse(inner, "it reaches past libvirt's own elements");
        }
    }

    fn read_boot(&mut self, boot: Node<'_, '_>) {
        for child in boot.children().filter(Node::is_element) {
            match name_of(child).as_str() {
                name if BOOT_FILES.contains(&name) => {
                    for path in [child.text().map(str::trim), child.attribute("template")].into_iter().flatten() {
                        if !path.is_empty() {
                            self.use_file(name, path);
                        }
                    }
                    // A source of another kind.
                    for source in child.children().filter(Node::is_element) {
                        match (source.tag_name().name(), source.attribute("file")) {
                            ("source", Some(path)) if source.children().all(|node| !node.is_element()) => {
                                self.use_file(name, path);
                            }
                            _ => self.refuse(child, "it is not a plain file"),
                        }
                    }
                }
                name if BOOT_DESCRIPTIONS.contains(&name) => self.check_namespaces(child),
                _ => self.refuse(child, "it is not known to only describe the guest"),
            }
        }
    }

    fn read_devices(&mut self, devices: Node<'_, '_>) {
        for device in devices.children().filter(Node::is_element) {
            self.check_namespaces(device);
            match name_of(device).as_str() {
                "emulator" => self.emulator = Some(device.text().unwrap_or_default().trim().into()),
                "disk" => self.read_disk(device),
                "interface" => self.read_interface(device),
                name if CHARACTER_DEVICES.contains(&name) => self.read_character_device(device),
                "rng" => self.read_random(device),
                "graphics" => self.read_graphics(device),
                "tpm" if child(device, "backend").and_then(|backend| backend.attribute("type")) == Some("emulator") => {
                }
                "tpm" => self.refuse(device, "it is not an emulated TPM"),
                "memory" if device.descendants().any(|node| node.has_tag_name("path")) => {
                    self.refuse(device, "it names a file");
                }
                "audio" if !matches!(device.attribute("type"), Some("none" | "spice")) => {
                    self.refuse(device, "only an audio device that plays nothing is allowed");
                }
                "input" if matches!(device.attribute("type"), Some("passthrough" | "evdev")) => {
                    self.refuse(device, "it is a device of the host");
                }
                name if GUEST_DEVICES.contains(&name) => self.refuse_files(device),
                _ => self.refuse(device, "it is not known to be a device that only the guest sees"),
            }
        }
    }

    /// Reports a device with an attribute that could name a file.
    fn refuse_files(&mut self, device: Node<'_, '_>) {
        let names_file = |node: &Node<'_, '_>| {
            node.attributes().any(|attribute| attribute.value().starts_with('/'))
                || node.text().is_some_and(|text| text.trim_start().starts_with('/'))
        };
        if device.descendants().any(|node| names_file(&node)) {
            self.refuse(device, "it names a file");
        }
    }

    fn read_disk(&mut self, disk: Node<'_, '_>) {
        let is_source =
            |node: &Node<'_, '_>| ["source", "backingStore", "mirror", "dataStore"].contains(&node.tag_name().name());
        let mut kinds: Vec<_> =
            disk.descendants().filter(is_source).filter_map(|node| node.attribute("type")).collect();
        kinds.extend(disk.attribute("type"));
        if let Some(kind) = kinds.iter().find(|kind| !["file", "block"].contains(kind)) {
            return self.refuse(disk, &format!("its source is of type {kind}, not a file or a block device"));
        }
        let is_lun =
            disk.attribute("device") == Some("lun") || disk.has_attribute("sgio") || disk.has_attribute("rawio");
        if is_lun || disk.descendants().any(|node| node.has_tag_name("reservations")) {
            return self.refuse(disk, "it passes commands to a device of the host");
        }
        let mut has_other = false;
        for node in disk.descendants().filter(Node::is_element) {
            for attribute in node.attributes() {
                match attribute.name() {
                    "file" | "dev" if is_source(&node) => self.use_file("disk", attribute.value()),
                    _ if attribute.value().starts_with('/') => has_other = true,
                    _ => {}
                }
            }
        }
        if has_other {
            self.refuse(disk, "it names a file other than its source");
        }
    }

    fn read_interface(&mut self, interface: Node<'_, '_>) {
        let kind = interface.attribute("type").unwrap_or_default();
        if !NETWORK_TYPES.contains(&kind) {
            return self.refuse(interface, &format!("its type is {kind}"));
        }
        let harmless = |node: Node<'_, '_>| {
            !["script", "downscript", "backend"].contains(&node.tag_name().name())
                || !node.attributes().any(|attribute| attribute.value().contains('/') || attribute.name() == "type")
        };
        if !interface.descendants().filter(Node::is_element).all(harmless) {
            return self.refuse(interface, "it names a program or a file");
        }
        self.refuse_files_of_interface(interface);
    }

    fn refuse_files_of_interface(&mut self, interface: Node<'_, '_>) {
        let names_file = |node: Node<'_, '_>| node.attributes().any(|attribute| attribute.value().starts_with('/'));
        if interface.descendants().filter(Node::is_element).any(names_file) {
            self.refuse(interface, "it names a file");
        }
    }

    fn read_character_device(&mut self, device: Node<'_, '_>) {
        let kind = device.attribute("type").unwrap_or("pty");
        if !CHARACTER_DEVICE_TYPES.contains(&kind) {
            return self.refuse(device, &format!("its type is {kind}"));
        }
        let is_own = |path: &str| {
            LIBVIRT_DIRECTORIES.iter().any(|start| path.starts_with(start)) && !path.split('/').any(|part| part == "..")
        };
        let mut files = Vec::new();
        for node in device.descendants().filter(Node::is_element) {
            files.extend(
                node.attributes()
                    .map(|attribute| attribute.value())
                    .filter(|value| value.starts_with('/') && !is_own(value)),
            );
        }
        let element = name_of(device);
        for path in files {
            self.use_file(&element, path);
        }
    }

    fn read_random(&mut self, rng: Node<'_, '_>) {
        let Some(backend) = child(rng, "backend") else { return };
        let is_harmless = match backend.attribute("model") {
            Some("builtin") => true,
            Some("random") => backend.text().is_none_or(|text| RANDOM_FILES.contains(&text.trim())),
            _ => false,
        };
        if !is_harmless {
            self.refuse(rng, "its source is not the host's random numbers");
        }
    }

    fn read_graphics(&mut self, graphics: Node<'_, '_>) {
        if !matches!(graphics.attribute("type"), Some("vnc" | "spice")) {
            return self.refuse(graphics, "it opens a window on the host");
        }
        let is_own =
            |path: &str| LIBVIRT_DIRECTORIES.iter().any(|start| path.starts_with(start)) && !path.contains("/../");
        let is_harmless = |node: Node<'_, '_>| {
            node.attributes().all(|attribute| !attribute.value().starts_with('/') || is_own(attribute.value()))
        };
        if !graphics.descendants().filter(Node::is_element).all(is_harmless)
            || graphics.descendants().any(|node| node.has_tag_name("gl") && node.attribute("rendernode").is_some())
        {
            self.refuse(graphics, "it names a file");
        }
    }

    /// The label of a running domain is that of libvirt's choice. Another user, or no label, must not be chosen by a store.
    fn read_label(&mut self, label: Node<'_, '_>) {
        let is_dynamic = label.attribute("type") == Some("dynamic") && label.attribute("relabel") != Some("no");
        if !is_dynamic {
            self.refuse(label, "it chooses the user or the confinement of QEMU");
        }
    }
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|child| child.has_tag_name(name))
}

/// Returns the name of an element, with a prefix if it is not libvirt's own.
fn name_of(node: Node<'_, '_>) -> String {
    let name = node.tag_name().name();
    match node.tag_name().namespace().map(|uri| node.lookup_prefix(uri)) {
        None => name.to_owned(),
        Some(prefix) => format!("{}:{name}", prefix.unwrap_or("xmlns")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;
