//! The XML of a domain for another libvirt: what the domain needs on its host, and its disks on other files.

use crate::disks::{self, DomainDisk};
use roxmltree::{Document, Node};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A domain, and what it needs on the host that runs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    pub name: String,
    pub uuid: String,
    pub disks: Vec<DomainDisk>,
    /// libvirt's networks that its cards are in.
    pub networks: BTreeSet<String>,
    /// Network interfaces of the host that its cards are connected to.
    pub interfaces: BTreeSet<String>,
    /// The QEMU binary.
    pub emulator: Option<PathBuf>,
    /// The QEMU binary, and the files from which it boots. Those of the disks are in `disks`.
    pub files: Vec<PathBuf>,
}

/// A file for a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskFile {
    pub path: PathBuf,
    /// QEMU's name of its format, such as `qcow2`.
    pub format: String,
}

impl DiskFile {
    #[must_use]
    pub fn qcow2(path: PathBuf) -> Self {
        Self { path, format: "qcow2".into() }
    }
}

/// Reads the XML of a domain.
///
/// # Errors
/// A text: what is wrong with the XML.
pub fn describe(xml: &str) -> Result<Description, String> {
    let document = Document::parse(xml).map_err(|e| e.to_string())?;
    let domain = document.root_element();
    let text = |name: &str| {
        let found = domain.children().find(|child| child.has_tag_name(name)).and_then(|child| child.text());
        found.map(|text| text.trim().to_owned()).ok_or_else(|| format!("the domain has no <{name}>"))
    };
    let sources = |attribute: &str| -> BTreeSet<String> {
        let cards = document.descendants().filter(|node| node.has_tag_name("interface"));
        let sources = cards.flat_map(|card| card.children()).filter(|child| child.has_tag_name("source"));
        sources.filter_map(|source| source.attribute(attribute)).map(str::to_owned).collect()
    };
    let is_file = |node: &Node<'_, '_>| {
        let parent = node.parent_element().map(|parent| parent.tag_name().name().to_owned());
        matches!(
            (parent.as_deref(), node.tag_name().name()),
            (Some("os"), "kernel" | "initrd" | "loader") | (Some("devices"), "emulator")
        )
    };
    let files = document.descendants().filter(is_file).filter_map(|node| node.text());
    // libvirt makes the file of the variables, if there is none.
    let templates = document.descendants().filter(|node| node.has_tag_name("nvram"));
    let files = files.chain(templates.filter_map(|node| node.attribute("template")));
    let emulator = document.descendants().find(|node| node.has_tag_name("emulator")).and_then(|node| node.text());
    let (networks, bridges, devices) = (sources("network"), sources("bridge"), sources("dev"));
    Ok(Description {
        name: text("name")?,
        uuid: text("uuid")?,
        disks: disks::of_domain(xml)?,
        // A running card in a network names the network's bridge as well.
        interfaces: if networks.is_empty() { bridges.union(&devices).cloned().collect() } else { devices },
        networks,
        emulator: emulator.map(|text| PathBuf::from(text.trim())),
        files: files.map(|text| PathBuf::from(text.trim())).collect(),
    })
}

/// Returns the XML with other files for the disks with these names, such as `vda`.
///
/// # Errors
/// A text: the disk that cannot be changed, and why.
pub fn with_disks_on(xml: &str, files: &BTreeMap<String, DiskFile>) -> Result<String, String> {
    let document = Document::parse(xml).map_err(|e| e.to_string())?;
    let mut changes: Vec<(Range<usize>, String)> = Vec::new();
    for (target, file) in files {
        let has_target = |disk: &Node<'_, '_>| {
            disk.has_tag_name("disk")
                && child(*disk, "target").is_some_and(|node| node.attribute("dev") == Some(target.as_str()))
        };
        let disk = document.descendants().find(has_target).ok_or_else(|| format!("there is no disk {target}"))?;
        let source = child(disk, "source").ok_or_else(|| format!("disk {target} has no source"))?;
        let kind = disk.attribute_node("type").filter(|kind| ["file", "block"].contains(&kind.value()));
        let Some(kind) = kind.filter(|_| !source.has_children()) else {
            return Err(format!("disk {target} is no plain file or block device"));
        };
        changes.push((kind.range(), "type='file'".into()));
        changes.push((source.range(), format!("<source file='{}'/>", escaped(&file.path))));
        let driver = child(disk, "driver").ok_or_else(|| format!("disk {target} has no driver"))?;
        let format = driver.attribute_node("type").ok_or_else(|| format!("disk {target} has no format"))?;
        changes.push((format.range(), format!("type='{}'", file.format)));
        // libvirt reads the chain from the files.
        changes.extend(child(disk, "backingStore").map(|below| (below.range(), String::new())));
    }
    changes.sort_by_key(|(range, _)| std::cmp::Reverse(range.start));
    let mut changed = xml.to_owned();
    for (range, text) in changes {
        changed.replace_range(range, &text);
    }
    Ok(changed)
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|child| child.has_tag_name(name))
}

fn escaped(path: &Path) -> String {
    let path = path.to_string_lossy();
    path.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('\'', "&apos;")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    const XML: &str = "<domain type='kvm'><name>db</name><uuid>1-2</uuid>
        <os><loader>/ovmf</loader><nvram template='/vars'>/new</nvram><kernel>/boot/k</kernel></os>
        <devices><emulator>/usr/bin/qemu</emulator>
          <disk type='file' device='disk'><driver name='qemu' type='raw' cache='none'/><source file='/i/a&amp;b' index='2'/>
            <backingStore type='file'><format type='raw'/><source file='/below'/></backingStore>
            <target dev='vda' bus='virtio'/><alias name='virtio-disk0'/></disk>
          <disk type='block' device='disk'><driver name='qemu' type='raw'/><source dev='/dev/x'/>
            <target dev='vdb' bus='virtio'/></disk>
          <disk type='network' device='disk'><driver name='qemu' type='raw'/><source protocol='nbd' name='x'/>
            <target dev='vdd' bus='virtio'/></disk>
          <interface type='network'><source network='default' bridge='virbr0'/></interface>
        </devices></domain>";

    #[test]
    fn what_a_domain_needs_is_read() {
        let description = describe(XML).unwrap();
        assert_eq!((description.name.as_str(), description.uuid.as_str()), ("db", "1-2"));
        assert_eq!(description.files, ["/ovmf", "/boot/k", "/usr/bin/qemu", "/vars"].map(PathBuf::from));
        assert_eq!(description.networks, ["default".to_owned()].into());
        assert!(description.interfaces.is_empty());
        let bridged = describe(&XML.replace("network='default' ", "")).unwrap();
        assert_eq!(bridged.interfaces, ["virbr0".to_owned()].into());
        assert_eq!(describe("<domain><name>a</name></domain>").unwrap_err(), "the domain has no <uuid>");
        describe("<domain").unwrap_err();
    }

    #[test]
    fn a_disk_is_put_on_another_file_and_everything_else_stays() {
        let changed = with_disks_on(XML, &[("vda".to_owned(), DiskFile::qcow2("/it's".into()))].into()).unwrap();
        assert!(changed.contains("<driver name='qemu' type='qcow2' cache='none'/><source file='/it&apos;s'/>"));
        assert!(!changed.contains("/below") && changed.contains("<source dev='/dev/x'/>"));
        assert_eq!(disks::of_domain(&changed).unwrap()[0].files, ["/it's"]);
        let from_device = with_disks_on(XML, &[("vdb".to_owned(), DiskFile::qcow2("/e2".into()))].into()).unwrap();
        assert!(from_device.contains(
            "<disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='/e2'/>\n            <target dev='vdb'"
        ));
        for (target, why) in [("vdd", "disk vdd is no plain file or block device"), ("vdc", "there is no disk vdc")] {
            let files = [(target.to_owned(), DiskFile::qcow2("/x".into()))].into();
            assert_eq!(with_disks_on(XML, &files).unwrap_err(), why);
        }
    }
}
