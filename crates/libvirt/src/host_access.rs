//! What the XML of a domain uses of the host that runs it.
//!
//! The XML of a checkpoint may have been changed, and libvirt builds a QEMU's command line from it as root. So each
//! element is compared with a list of those that only describe the guest's machine. Files are reported, and so is each
//! other element. Whether the host permits these is not decided here.

use roxmltree::{Document, Node};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What a domain uses of the host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainUses {
    pub name: String,
    pub uuid: String,
    /// QEMU binaries.
    pub emulators: Vec<PathBuf>,
    pub files: Vec<UsedFile>,
    /// Free arguments of QEMU.
    pub arguments: Vec<String>,
    pub elements: Vec<UsedElement>,
}

/// A file or block device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsedFile {
    /// The element that names it, such as `disk`.
    pub element: String,
    pub path: PathBuf,
    /// Format of a disk's image.
    pub format: Option<String>,
}

/// An element that may reach the host in another way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsedElement {
    /// Name of the element with its namespace's prefix, such as `qemu:commandline`.
    pub name: String,
    pub why: String,
    /// The element, without what libvirt adds while the domain runs.
    pub content: String,
}

/// Namespace of the elements that give QEMU arguments.
const QEMU_NAMESPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

/// Elements of a domain that only describe the guest, with everything in them.
const DESCRIPTIONS: &[&str] = &[
    "name",
    "uuid",
    "genid",
    "title",
    "description",
    "memory",
    "currentMemory",
    "maxMemory",
    "vcpu",
    "vcpus",
    "iothreads",
    "iothreadids",
    "defaultiothread",
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
    "redirdev",
    "smartcard",
];
/// Limits on processor time. Others would give the guest precedence over everything on the host.
const PROCESSOR_LIMITS: &[&str] = &[
    "shares",
    "global_period",
    "global_quota",
    "period",
    "quota",
    "emulator_period",
    "emulator_quota",
    "iothread_period",
    "iothread_quota",
    "vcpupin",
    "emulatorpin",
    "iothreadpin",
];
/// Attributes that name a file, device or directory, also without a slash.
const FILE_ATTRIBUTES: &[&str] =
    &["path", "file", "dir", "socket", "template", "rendernode", "evdev", "logFile", "tap"];
/// Parts of a source of a disk that use secrets or devices of the host.
const SOURCE_ACCESS: &[&str] = &["encryption", "auth", "reservations", "cookies", "ssl", "nvme", "vhostuser"];
/// Devices with a character device.
const CHARACTER_DEVICES: &[&str] = &["serial", "console", "parallel", "channel"];
/// Formats of images.
const IMAGE_FORMATS: &[&str] = &["raw", "qcow2"];
/// Where a character device may be connected: libvirt chooses the path, or there is none.
const CHARACTER_DEVICE_TYPES: &[&str] = &["pty", "null", "unix", "vc", "spicevmc", "file"];
/// Networks that the host's administrator has made.
const NETWORK_TYPES: &[&str] = &["network", "bridge", "user"];
/// Directories in which libvirt makes the sockets of channels, each in a directory of the domain.
const CHANNEL_DIRECTORIES: &[&str] =
    &["/var/lib/libvirt/qemu/channel/target/", "/run/libvirt/qemu/channel/", "/var/run/libvirt/qemu/channel/"];
/// Directory in which libvirt makes a directory for each running domain.
const DOMAIN_DIRECTORY: &str = "/var/lib/libvirt/qemu/";
/// The control group of libvirt's domains.
const MACHINES: &str = "/machine";

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
    check_plain(domain)?;
    for once in ["name", "uuid", "os"] {
        if domain.children().filter(|child| child.has_tag_name(once)).count() > 1 {
            return Err(format!("it has several <{once}>"));
        }
    }
    for child in domain.children().filter(Node::is_element) {
        match name_of(child).as_str() {
            "name" => uses.name = text_of(child),
            "uuid" => uses.uuid = text_of(child),
            "os" => uses.read_boot(child),
            "devices" => uses.read_devices(child),
            "seclabel" => uses.read_label(child),
            "metadata" => {}
            "resource" => uses.read_resource(child),
            "cputune" => uses.read_processor_limits(child),
            "memoryBacking" if child.descendants().any(|node| node.has_attribute("path")) => {
                uses.refuse(child, "it names a file");
            }
            "sysinfo" => {
                // It can put a file into the guest.
                let entries = child.descendants().filter_map(|node| node.attribute("file"));
                entries.for_each(|path| uses.use_file("sysinfo", path));
            }
            name if DESCRIPTIONS.contains(&name) => {}
            _ if child.tag_name().namespace() == Some(QEMU_NAMESPACE) && child.tag_name().name() == "commandline" => {
                uses.read_arguments(child);
            }
            _ => uses.refuse(child, "it is not known to only describe the guest"),
        }
    }
    Ok(uses)
}

/// Rejects what libvirt could read otherwise than this module: namespaces, which libvirt ignores in many places, and text
/// in several parts.
fn check_plain(domain: Node<'_, '_>) -> Result<(), String> {
    for child in domain.children().filter(|child| child.is_element() && !child.has_tag_name("metadata")) {
        for node in child.descendants() {
            if node.is_comment() || node.is_pi() {
                return Err("it has comments or instructions for programs".into());
            }
            let has_namespace = node.tag_name().namespace().is_some() && child.tag_name().namespace().is_none();
            if has_namespace || node.attributes().any(|attribute| attribute.namespace().is_some()) {
                return Err(format!("<{}> or an attribute in it has a namespace", node.tag_name().name()));
            }
        }
    }
    Ok(())
}

/// Returns the text of an element.
fn text_of(node: Node<'_, '_>) -> String {
    let texts: String = node.descendants().filter(Node::is_text).filter_map(|text| text.text()).collect();
    texts.trim().to_owned()
}

/// Returns an element as text for comparison: without white space, and without the names that libvirt gives to the devices
/// of a running domain.
fn content_of(node: Node<'_, '_>) -> String {
    if node.is_text() {
        return node.text().unwrap_or_default().trim().to_owned();
    }
    if !node.is_element() || node.has_tag_name("alias") {
        return String::new();
    }
    let tag = node.tag_name();
    let attributes = node.attributes().map(|attribute| format!(" {}={:?}", attribute.name(), attribute.value()));
    let inner: String = node.children().map(content_of).collect();
    format!("<{}{}{}>{inner}</>", tag.namespace().unwrap_or_default(), tag.name(), attributes.collect::<String>())
}

impl DomainUses {
    fn refuse(&mut self, node: Node<'_, '_>, why: &str) {
        self.elements.push(UsedElement { name: name_of(node), why: why.into(), content: content_of(node) });
    }

    fn use_file(&mut self, element: &str, path: &str) {
        self.files.push(UsedFile { element: element.into(), path: path.trim().into(), format: None });
    }

    fn read_arguments(&mut self, command_line: Node<'_, '_>) {
        for child in command_line.children().filter(Node::is_element) {
            match (child.tag_name().name(), child.attribute("value")) {
                ("arg", Some(value)) if child.tag_name().namespace() == Some(QEMU_NAMESPACE) => {
                    self.arguments.push(value.to_owned());
                }
                _ => self.refuse(command_line, "it sets QEMU's environment"),
            }
        }
    }

    fn read_resource(&mut self, resource: Node<'_, '_>) {
        let mut parts = resource.children().filter(Node::is_element);
        if !parts.all(|part| part.has_tag_name("partition") && text_of(part) == MACHINES) {
            self.refuse(resource, "it chooses a control group of the host");
        }
    }

    fn read_processor_limits(&mut self, limits: Node<'_, '_>) {
        let is_limit = |node: Node<'_, '_>| PROCESSOR_LIMITS.contains(&node.tag_name().name());
        if !limits.children().filter(Node::is_element).all(is_limit) {
            self.refuse(limits, "it may give the guest precedence over the host");
        }
    }

    fn read_boot(&mut self, boot: Node<'_, '_>) {
        for child in boot.children().filter(Node::is_element) {
            match name_of(child).as_str() {
                name if BOOT_FILES.contains(&name) => {
                    for path in [text_of(child).as_str(), child.attribute("template").unwrap_or_default()] {
                        if !path.is_empty() {
                            self.use_file(name, path);
                        }
                    }
                    if !matches!(child.attribute("type"), None | Some("file" | "rom" | "pflash")) {
                        self.refuse(child, "it is not a plain file");
                    }
                    // A source in an element of its own.
                    for source in child.children().filter(Node::is_element) {
                        let is_plain = source.tag_name().name() == "source"
                            && source.attributes().all(|attribute| ["file", "index"].contains(&attribute.name()))
                            && source.children().all(|node| !node.is_element());
                        match source.attribute("file") {
                            Some(path) if is_plain => self.use_file(name, path),
                            _ => self.refuse(child, "it is not a plain file"),
                        }
                    }
                }
                name if BOOT_DESCRIPTIONS.contains(&name) => {}
                _ => self.refuse(child, "it is not known to only describe the guest"),
            }
        }
    }

    fn read_devices(&mut self, devices: Node<'_, '_>) {
        for device in devices.children().filter(Node::is_element) {
            match name_of(device).as_str() {
                "emulator" => self.emulators.push(text_of(device).into()),
                "disk" => self.read_disk(device),
                "interface" => self.read_interface(device),
                name if CHARACTER_DEVICES.contains(&name) => self.read_character_device(device),
                "rng" => self.read_random(device),
                "graphics" => self.read_graphics(device),
                "tpm" => self.read_tpm(device),
                "memory" if device.descendants().any(|node| node.has_tag_name("path")) => {
                    self.refuse(device, "it names a file");
                }
                "redirdev" | "smartcard" if device.attribute("type") != Some("spicevmc") => {
                    self.refuse(device, "it may be a device of the host");
                }
                "video" if device.descendants().any(|node| node.attribute("name") == Some("vhostuser")) => {
                    self.refuse(device, "it starts a program of the host");
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

    /// Reports a device that could name a file.
    fn refuse_files(&mut self, device: Node<'_, '_>) {
        let has_file = |node: Node<'_, '_>| {
            node.attributes().any(|attribute| names_file(attribute.name(), attribute.value()))
                || node.is_text() && node.text().is_some_and(|text| text.contains('/'))
        };
        if device.descendants().any(has_file) {
            self.refuse(device, "it names a file");
        }
    }

    fn read_tpm(&mut self, tpm: Node<'_, '_>) {
        let is_emulator = |node: Node<'_, '_>| {
            node.has_tag_name("backend")
                && node.attribute("type") == Some("emulator")
                && !node.descendants().any(|inner| ["source", "device"].contains(&inner.tag_name().name()))
        };
        let mut parts = tpm.children().filter(|node| node.is_element() && node.tag_name().name() == "backend");
        if !parts.all(is_emulator) {
            self.refuse(tpm, "it is not an emulated TPM with the state that libvirt keeps for the domain");
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
        if is_lun {
            return self.refuse(disk, "it passes commands to a device of the host");
        }
        if disk.descendants().any(|node| SOURCE_ACCESS.contains(&node.tag_name().name())) {
            return self.refuse(disk, "it uses secrets or devices of the host");
        }
        let is_format = |node: &Node<'_, '_>| ["driver", "format"].contains(&node.tag_name().name());
        let mut formats = disk.descendants().filter(is_format).filter_map(|node| node.attribute("type"));
        if let Some(format) = formats.find(|format| !IMAGE_FORMATS.contains(format)) {
            return self.refuse(disk, &format!("an image in the format {format} may name other files"));
        }
        let mut has_other = false;
        for node in disk.descendants().filter(Node::is_element) {
            for attribute in node.attributes() {
                match attribute.name() {
                    "file" | "dev" if is_source(&node) => {
                        let (path, format) = (attribute.value().trim().into(), format_of(node));
                        self.files.push(UsedFile { element: "disk".into(), path, format });
                    }
                    name => has_other |= names_file(name, attribute.value()),
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
        let is_harmless = |node: Node<'_, '_>| match node.tag_name().name() {
            "script" | "downscript" => false,
            "backend" => !node.has_attribute("type"),
            _ => true,
        };
        if !interface.descendants().filter(Node::is_element).all(is_harmless) {
            return self.refuse(interface, "it names a program");
        }
        self.refuse_files(interface);
    }

    fn read_character_device(&mut self, device: Node<'_, '_>) {
        let kind = device.attribute("type").unwrap_or("pty");
        if !CHARACTER_DEVICE_TYPES.contains(&kind) {
            return self.refuse(device, &format!("its type is {kind}"));
        }
        let target = child(device, "target").and_then(|target| target.attribute("name")).unwrap_or_default();
        let element = name_of(device);
        for node in device.descendants().filter(Node::is_element) {
            for attribute in node.attributes() {
                let path = attribute.value();
                // libvirt chooses these anew when it starts the domain.
                let is_chosen = match (kind, node.tag_name().name()) {
                    ("pty", "console" | "source") => path.starts_with("/dev/pts/") && !path.contains(".."),
                    ("unix", "source") => {
                        node.attribute("mode") == Some("bind")
                            && is_in_own_directory(path, CHANNEL_DIRECTORIES, &self.name, target)
                    }
                    _ => false,
                };
                if names_file(attribute.name(), path) && !is_chosen {
                    self.use_file(&element, path);
                }
            }
        }
    }

    fn read_random(&mut self, rng: Node<'_, '_>) {
        let is_random = |backend: Node<'_, '_>| match backend.attribute("model") {
            Some("builtin") => true,
            Some("random") => ["", "/dev/urandom", "/dev/random", "/dev/hwrng"].contains(&text_of(backend).as_str()),
            _ => false,
        };
        let mut backends = rng.children().filter(|node| node.has_tag_name("backend"));
        let is_harmless = backends.all(is_random);
        if !is_harmless {
            self.refuse(rng, "its source is not the host's random numbers");
        }
    }

    fn read_graphics(&mut self, graphics: Node<'_, '_>) {
        if !matches!(graphics.attribute("type"), Some("vnc" | "spice")) {
            return self.refuse(graphics, "it opens a window on the host");
        }
        let name = &self.name;
        let socket_name = format!("{}.sock", graphics.attribute("type").unwrap_or_default());
        let is_harmless = |node: Node<'_, '_>| {
            node.attributes().all(|attribute| {
                !names_file(attribute.name(), attribute.value())
                    || is_in_own_directory(attribute.value(), &[DOMAIN_DIRECTORY], name, &socket_name)
            })
        };
        if !graphics.descendants().filter(Node::is_element).all(is_harmless)
            || graphics.descendants().any(|node| node.has_tag_name("gl") && node.attribute("rendernode").is_some())
        {
            self.refuse(graphics, "it names a file");
        }
    }

    /// The label of a running domain is that of libvirt's choice. Another user, or no label, must not be chosen by a store.
    fn read_label(&mut self, label: Node<'_, '_>) {
        let is_dynamic = label.attribute("type") == Some("dynamic")
            && label.attribute("relabel") != Some("no")
            && child(label, "baselabel").is_none();
        if !is_dynamic {
            self.refuse(label, "it chooses the user or the confinement of QEMU");
        }
    }
}

/// Returns whether an attribute may name a file.
fn names_file(attribute: &str, value: &str) -> bool {
    value.contains('/') || FILE_ATTRIBUTES.contains(&attribute)
}

/// Returns whether `path` is the file that libvirt makes with this name in the directory of a running domain: `NUMBER-NAME`
/// or `domain-NUMBER-NAME` in one of `parents`.
fn is_in_own_directory(path: &str, parents: &[&str], domain: &str, file: &str) -> bool {
    let rest = parents.iter().find_map(|parent| path.strip_prefix(parent));
    let Some((directory, name)) = rest.and_then(|rest| rest.split_once('/')) else { return false };
    let numbered = directory.strip_prefix("domain-").unwrap_or(directory);
    let Some((number, short_name)) = numbered.split_once('-') else { return false };
    let is_number = !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit());
    // libvirt shortens a long name.
    let has_name = short_name == domain || short_name.len() >= 20 && domain.starts_with(short_name);
    is_number && has_name && !file.is_empty() && name == file
}

/// Returns the format of the image with this source: the one of the disk, or of the image below.
fn format_of(source: Node<'_, '_>) -> Option<String> {
    let layer = source.parent_element()?;
    let format = child(layer, "format").or_else(|| child(layer, "driver"))?;
    format.attribute("type").map(str::to_owned)
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
