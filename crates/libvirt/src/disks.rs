//! The disks in a domain's XML.

use roxmltree::{Document, Node};

/// A disk as libvirt has recorded it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainDisk {
    /// libvirt's name of the disk within the domain, such as `vda`.
    pub target: String,
    /// The id of QEMU's device; only a running domain has it.
    pub alias: Option<String>,
    /// Files or block devices of the disk, the one that the guest writes to first.
    pub files: Vec<String>,
    /// libvirt's block job has copied everything, and can put the disk on the file that it has written.
    pub is_copied: bool,
}

/// Reads the disks from a domain's XML.
///
/// # Errors
/// A text: what is wrong with the XML.
pub fn of_domain(xml: &str) -> Result<Vec<DomainDisk>, String> {
    let document = Document::parse(xml).map_err(|e| e.to_string())?;
    let is_disk = |node: &Node<'_, '_>| {
        node.has_tag_name("disk") && node.parent_element().is_some_and(|parent| parent.has_tag_name("devices"))
    };
    document
        .descendants()
        .filter(is_disk)
        .map(|disk| read(disk).ok_or_else(|| "a disk without target".into()))
        .collect()
}

fn read(disk: Node<'_, '_>) -> Option<DomainDisk> {
    let target = child(disk, "target")?.attribute("dev")?.to_owned();
    let alias = child(disk, "alias").and_then(|alias| alias.attribute("name")).map(str::to_owned);
    let mut files = Vec::new();
    let mut layer = Some(disk);
    while let Some(node) = layer {
        let source = child(node, "source");
        files.extend(source.and_then(|source| source.attribute("file").or(source.attribute("dev"))).map(str::to_owned));
        layer = child(node, "backingStore");
    }
    let is_copied = child(disk, "mirror").is_some_and(|mirror| mirror.attribute("ready") == Some("yes"));
    Some(DomainDisk { target, alias, files, is_copied })
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|child| child.has_tag_name(name))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn the_chain_of_each_disk_is_read_without_what_a_job_writes() {
        let xml = "<domain><devices>
            <disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='/e3' index='5'/>
              <backingStore type='file' index='2'><format type='raw'/><source file='/it&apos;s'/><backingStore/>
              </backingStore>
              <mirror type='file' job='active-commit' ready='yes'><source file='/other'/></mirror>
              <target dev='vda' bus='virtio'/><alias name='virtio-disk0'/></disk>
            <disk type='block' device='disk'><source dev='/dev/vg/lv'/><target dev='vdb'/></disk>
            <disk type='file' device='cdrom'><target dev='sda' bus='sata'/><readonly/></disk>
            </devices></domain>";
        let disks = of_domain(xml).unwrap();
        let disk = |target: &str, alias: Option<&str>, files: &[&str]| DomainDisk {
            target: target.into(),
            alias: alias.map(str::to_owned),
            files: files.iter().map(|file| (*file).to_owned()).collect(),
            is_copied: target == "vda",
        };
        let expected = [
            disk("vda", Some("virtio-disk0"), &["/e3", "/it's"]),
            disk("vdb", None, &["/dev/vg/lv"]),
            disk("sda", None, &[]),
        ];
        assert_eq!(disks, expected);
        of_domain("<domain><devices><disk/></devices></domain>").unwrap_err();
        of_domain("<domain").unwrap_err();
    }
}
