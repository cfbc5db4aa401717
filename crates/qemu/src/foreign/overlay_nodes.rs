//! Rekindle's overlays on a command line: libvirt has started the domain on them, to restore it.
//!
//! Later checkpoints merge these overlays, and delete their files. What stays is the image at the bottom, the *base*. So
//! the disk of the command line is the base, and a restore builds the machine without the overlays.

use crate::block::names::is_overlay_file;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The block nodes of overlays on a command line.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct OverlayNodes {
    /// For each overlay, the node below.
    below: BTreeMap<String, String>,
    /// The nodes of their files.
    files: BTreeSet<String>,
}

impl OverlayNodes {
    pub(super) fn of(arguments: &[String]) -> Self {
        let nodes: Vec<Value> = options(arguments).filter_map(|(_, value)| serde_json::from_str(value).ok()).collect();
        let text = |node: &Value, key: &str| node.get(key).and_then(Value::as_str).map(str::to_owned);
        let is_file = |node: &&Value| text(node, "filename").is_some_and(|path| is_overlay_file(&path));
        let files: BTreeSet<String> = nodes.iter().filter(is_file).filter_map(|node| text(node, "node-name")).collect();
        let is_overlay = |node: &&Value| text(node, "file").is_some_and(|file| files.contains(&file));
        let below = |node: &Value| Some((text(node, "node-name")?, text(node, "backing")?));
        Self { below: nodes.iter().filter(is_overlay).filter_map(below).collect(), files }
    }

    /// Returns the topmost overlay of each disk, by the disk's base.
    pub(super) fn tops(&self) -> BTreeMap<String, String> {
        let lower: BTreeSet<&String> = self.below.values().collect();
        let tops = self.below.keys().filter(|node| !lower.contains(node));
        tops.map(|top| (self.base_of(top).to_owned(), top.clone())).collect()
    }

    fn base_of<'a>(&'a self, node: &'a str) -> &'a str {
        let mut base = node;
        // Each step takes another node, unless the command line has a circle, which QEMU rejects.
        for _ in 0..self.below.len() {
            base = self.below.get(base).map_or(base, String::as_str);
        }
        base
    }
}

/// Returns the values of `-blockdev` with their positions.
fn options(arguments: &[String]) -> impl Iterator<Item = (usize, &str)> {
    let pairs = arguments.windows(2).enumerate();
    pairs.filter_map(|(index, pair)| match pair {
        [option, value] if option == "-blockdev" => Some((index + 1, value.as_str())),
        _ => None,
    })
}

/// Returns a command line of which the devices are on the bases of their disks.
#[must_use]
pub fn without_overlays(arguments: &[String]) -> Vec<String> {
    let overlays = OverlayNodes::of(arguments);
    let is_dropped = |value: &str| {
        let node: Option<Value> = serde_json::from_str(value).ok();
        let name = node.as_ref().and_then(|node| node.get("node-name")).and_then(Value::as_str);
        name.is_some_and(|name| overlays.below.contains_key(name) || overlays.files.contains(name))
    };
    let dropped: BTreeSet<usize> =
        options(arguments).filter(|(_, value)| is_dropped(value)).flat_map(|(index, _)| [index - 1, index]).collect();
    let kept = arguments.iter().enumerate().filter(|(index, _)| !dropped.contains(index));
    kept.map(|(_, argument)| on_bases(argument, &overlays)).collect()
}

/// Replaces the overlay that a device is on by the base.
fn on_bases(argument: &str, overlays: &OverlayNodes) -> String {
    let mut changed = argument.to_owned();
    for (base, top) in overlays.tops() {
        changed = changed.replace(&format!("\"drive\":\"{top}\""), &format!("\"drive\":\"{base}\""));
        let given = format!("drive={top}");
        let parts =
            changed.split(',').map(|part| if part == given { format!("drive={base}") } else { part.to_owned() });
        changed = parts.collect::<Vec<_>>().join(",");
    }
    changed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blockdev(node: &str) -> [String; 2] {
        ["-blockdev".into(), node.into()]
    }

    fn line(drive: &str) -> Vec<String> {
        let image = [
            blockdev(r#"{"driver":"file","filename":"/i/vda.image","node-name":"libvirt-3-storage"}"#),
            blockdev(r#"{"node-name":"libvirt-3-format","driver":"raw","file":"libvirt-3-storage"}"#),
        ];
        let device = ["-device".to_owned(), drive.to_owned()];
        image.into_iter().flatten().chain(device).collect()
    }

    fn on_overlays(drive: &str) -> Vec<String> {
        let mut arguments = line(drive);
        for (number, epoch) in [(2, 4), (1, 6)] {
            let (storage, below) = (format!("libvirt-{number}-storage"), number + 1);
            arguments.extend(blockdev(&format!(
                r#"{{"driver":"file","filename":"/i/vda.image.rekindle/epoch-00000000000{epoch}.qcow2","node-name":"{storage}"}}"#
            )));
            arguments.extend(blockdev(&format!(
                r#"{{"node-name":"libvirt-{number}-format","driver":"qcow2","file":"{storage}","backing":"libvirt-{below}-format"}}"#
            )));
        }
        arguments
    }

    #[test]
    fn the_devices_are_on_the_images_and_the_overlays_are_left_out() {
        let devices = [
            r#"{"driver":"virtio-blk-pci","drive":"libvirt-N-format","id":"virtio-disk0"}"#,
            "virtio-blk-pci,drive=libvirt-N-format,id=virtio-disk0",
        ];
        for device in devices {
            let (top, base) = (device.replace('N', "1"), device.replace('N', "3"));
            assert_eq!(without_overlays(&on_overlays(&top)), line(&base));
            assert_eq!(without_overlays(&line(&base)), line(&base));
        }
        let tops = OverlayNodes::of(&on_overlays("")).tops();
        assert_eq!(tops, [("libvirt-3-format".to_owned(), "libvirt-1-format".to_owned())].into());
    }
}
