//! The disks of the destination. They have the images that the source's have now, also if block jobs, snapshots or changed
//! media have made others of them since its start. The *source* is the QEMU that runs the guest, the *destination* the one
//! that takes it over ([`super`]).
//!
//! The images of a disk are a chain of block nodes: the disk's own, then the backing images. A node that the command line
//! describes keeps its options; only its backing node and its access change. A node that was added while the guest ran gets
//! options from what QEMU reports about it. This needs nodes with names, which libvirt gives to all of them.

use super::facts::Drive;
use super::{OptionAt, Rewriter};
use crate::block::graph::{BlockNode, CacheMode};
use crate::foreign::disk_differences;
use crate::options::Options;
use serde_json::{Value, json};

/// Formats and storages of nodes that can be described from what QEMU reports about them.
const FORMATS: [&str; 2] = ["raw", "qcow2"];
const STORAGES: [&str; 2] = ["file", "host_device"];
const BLOCKDEV: &str = "-blockdev";

/// Options of the image that a disk had at the start. QEMU does not report them, so images that were added since get them.
#[derive(Default)]
struct GivenImage {
    /// Whether the guest may discard blocks.
    discard: Option<String>,
    /// How the host reads and writes the file.
    aio: Option<String>,
}

impl Rewriter<'_> {
    /// Gives the disks the images that they have now, as far as that is possible. [`Rewriter::check_disks`] rejects the
    /// rest.
    pub(super) fn follow_images(&mut self) {
        let facts = self.facts;
        for drive in &facts.drives {
            let Some(device) = self.device_of(&drive.device) else { continue };
            let given = device.options.get("drive");
            let has_changed = given.as_ref() != drive.nodes.first() || self.has_other_backing(&drive.nodes);
            if has_changed && self.can_follow(drive, given.as_deref()) {
                let image = given.as_deref().map(|node| self.given_image(node)).unwrap_or_default();
                self.remove_closed(given.as_deref());
                self.follow(drive, &image);
            }
        }
    }

    /// Returns whether the command line can describe the present images of a drive. `given` names its node there.
    fn can_follow(&self, drive: &Drive, given: Option<&str>) -> bool {
        let is_given = given.map_or_else(|| self.is_empty_drive(&drive.device), |node| self.is_blockdev(node));
        let named = named_nodes(drive);
        // Nodes with made-up names are possible only where QEMU opens the backing image that is recorded in a file.
        let is_complete = named.len() == drive.nodes.len()
            || named.last().is_some_and(|lowest| self.is_blockdev(lowest) && !self.backing_nodes.contains_key(*lowest));
        is_given && is_complete && named.iter().all(|node| self.is_blockdev(node) || self.is_describable(drive, node))
    }

    /// Returns whether the options of a node, and of the storage below it, follow from what QEMU reports.
    fn is_describable(&self, drive: &Drive, name: &str) -> bool {
        let storage_name = drive.storages.get(name).filter(|storage| !storage.starts_with('#'));
        let storage = storage_name.and_then(|storage| self.facts.nodes.get(storage));
        let (Some(image), Some(storage)) = (self.facts.nodes.get(name), storage) else { return false };
        // QEMU describes a raw image that is only a part of its file in JSON.
        !self.block_nodes.contains_key(name)
            && FORMATS.contains(&image.driver.as_str())
            && (image.driver != "raw" || image.file == storage.file)
            && STORAGES.contains(&storage.driver.as_str())
            && storage.file.starts_with('/')
    }

    fn is_blockdev(&self, node: &str) -> bool {
        let option = |node: &OptionAt| self.arguments.get(node.position.checked_sub(1)?);
        self.block_nodes.get(node).and_then(option).is_some_and(|option| option == BLOCKDEV)
    }

    fn given_image(&self, node: &str) -> GivenImage {
        let option = |node: &str, key: &str| self.block_nodes.get(node)?.options.get(key);
        let aio = option(node, "file").and_then(|storage| option(&storage, "aio"));
        GivenImage { discard: option(node, "discard"), aio }
    }

    /// Leaves out the nodes that QEMU has no more, of those that the command line gives a drive: `top`, its backing nodes,
    /// and the storages of all.
    pub(super) fn remove_closed(&mut self, top: Option<&str>) {
        let mut next = top.map(str::to_owned);
        while let Some(node) = next {
            let Some(given) = self.block_nodes.get(&node) else { return };
            let storage = given.options.get("file");
            next = self.backing_nodes.get(&node).cloned().flatten();
            for name in storage.into_iter().chain([node]) {
                if !self.facts.nodes.contains_key(&name)
                    && let Some(closed) = self.block_nodes.remove(&name)
                {
                    self.removed.insert(closed.position);
                    self.backing_nodes.remove(&name);
                }
            }
        }
    }

    /// Gives a drive its present images, lowest first: QEMU opens nodes in the order of the command line.
    fn follow(&mut self, drive: &Drive, given: &GivenImage) {
        let mut backing: Option<&str> = None;
        let mut is_moved = false;
        for node in named_nodes(drive).into_iter().rev() {
            if self.is_blockdev(node) {
                self.connect(node, backing, is_moved);
            } else {
                self.add_image(drive, node, backing, given);
                is_moved = true;
            }
            backing = Some(node);
        }
        let Some(device) = self.devices.iter_mut().find(|device| is_at(&device.options, &drive.device)) else { return };
        match drive.nodes.first() {
            Some(node) => device.options.set("drive", node),
            None => device.options.remove(|key| key == "drive"),
        }
        device.write(&mut self.arguments);
    }

    /// Puts a node of the command line on its present backing node. `is_moved` moves it to the end of
    /// the command line: QEMU must open its new backing node first.
    fn connect(&mut self, name: &str, backing: Option<&str>, is_moved: bool) {
        let Some(node) = self.block_nodes.get_mut(name) else { return };
        let stated = self.backing_nodes.get(name);
        if stated.map(|stated| stated.as_deref()) != Some(backing) && (stated.is_some() || backing.is_some()) {
            match backing {
                Some(backing) => node.options.set("backing", backing),
                None => node.options.set_null("backing"),
            }
            self.backing_nodes.insert(name.to_owned(), backing.map(str::to_owned));
        }
        if let Some(now) = self.facts.nodes.get(name) {
            let is_read_only = node.options.get("read-only").is_some_and(|value| value == "on");
            if is_read_only != now.read_only && node.options.get("auto-read-only").is_none() {
                node.options.set_switch("read-only", now.read_only);
            }
        }
        node.write(&mut self.arguments);
        if is_moved {
            let (position, options) = (node.position, node.options.clone());
            self.removed.insert(position);
            self.add_node(name, options);
        }
    }

    /// Adds a node that was added while the guest ran, and the storage below it.
    fn add_image(&mut self, drive: &Drive, name: &str, backing: Option<&str>, given: &GivenImage) {
        let Some(storage_name) = drive.storages.get(name) else { return };
        let facts = self.facts;
        let (Some(image), Some(storage)) = (facts.nodes.get(name), facts.nodes.get(storage_name)) else { return };
        if !self.is_blockdev(storage_name) {
            let mut options = node_options(storage_name, storage);
            options.set("filename", &storage.file);
            options.set_switch("auto-read-only", true);
            // The node above decides which discards reach this one.
            options.set("discard", "unmap");
            // QEMU rejects `native` unless `cache.direct` is on.
            if let Some(aio) = given.aio.as_deref().filter(|aio| *aio != "native" || storage.cache.direct) {
                options.set("aio", aio);
            }
            self.add_node(storage_name, options);
        }
        let mut options = node_options(name, image);
        options.set("file", storage_name);
        options.set_switch("read-only", image.read_only);
        options.set("detect-zeroes", &image.detect_zeroes);
        // QEMU detects zeroes to discard them only where it discards.
        let needed = (image.detect_zeroes == "unmap").then_some("unmap");
        if let Some(discard) = needed.or(given.discard.as_deref()) {
            options.set("discard", discard);
        }
        match backing {
            Some(backing) => options.set("backing", backing),
            None if image.driver == "raw" => {}
            None => options.set_null("backing"),
        }
        self.backing_nodes.insert(name.to_owned(), backing.map(str::to_owned));
        self.add_node(name, options);
    }

    fn add_node(&mut self, name: &str, options: Options) {
        self.arguments.push(BLOCKDEV.into());
        let position = self.arguments.len();
        self.arguments.push(options.to_string());
        self.block_nodes.insert(name.to_owned(), OptionAt { position, options });
    }

    /// Rejects drives whose medium, images or tray have changed since the start, and were not followed.
    pub(super) fn check_disks(&mut self) {
        let facts = self.facts;
        let devices: Vec<Options> = self.devices.iter().map(|device| device.options.clone()).collect();
        let nodes = self.block_nodes.keys().cloned().collect();
        self.obstacles.extend(disk_differences(&devices, &nodes, &facts.machine.disks));
        for drive in &facts.drives {
            for why in self.changes_of(drive) {
                self.refuse(format!("disk {}", drive.device), why);
            }
        }
    }

    /// Returns why a drive cannot be taken over.
    fn changes_of(&self, drive: &Drive) -> Vec<String> {
        let Drive { device, file, nodes, tray_open, .. } = drive;
        let mut changes = Vec::new();
        let given_node = self.node_of(device);
        let is_plugged = self.facts.plugged.iter().any(|plugged| device.split('/').any(|part| part == plugged.id));
        if file.is_some() && self.is_empty_drive(device) && !is_plugged {
            changes.push(
                "its medium was inserted while the guest ran: eject it (virsh change-media --eject), or start the VM \
                 with it"
                    .into(),
            );
        }
        if given_node.as_ref() == nodes.first() && self.has_other_backing(nodes) {
            changes.push(
                "its backing images have changed while the guest ran (blockpull, blockcommit), and not all can be opened \
                 again (raw and qcow2 in files and block devices can): shut the guest down and start it again"
                    .into(),
            );
        }
        if *tray_open {
            changes.push("its tray is open: close it".into());
        }
        if file.is_none() && given_node.as_ref().is_some_and(|node| self.has_medium(node)) {
            changes.push("its medium was ejected while the guest ran: start the VM without it".into());
        }
        let given_file = given_node.and_then(|node| self.file_of(&node));
        if let (Some(given), Some(current)) = (given_file, file)
            && given.starts_with('/')
            && current.starts_with('/')
            && given != *current
        {
            changes
                .push(format!("the command line gives it {given}, but it shows {current} now: start the VM with that"));
        }
        changes
    }

    /// Returns what the device's `drive=` names.
    fn node_of(&self, qom_path: &str) -> Option<String> {
        self.device_of(qom_path)?.options.get("drive")
    }

    fn device_of(&self, qom_path: &str) -> Option<&OptionAt> {
        self.devices.iter().find(|device| is_at(&device.options, qom_path))
    }

    /// Returns whether the command line gives the device no medium. Floppy controllers have `driveA=` and `driveB=`.
    fn is_empty_drive(&self, qom_path: &str) -> bool {
        let names_drive = |key: &&str| key.starts_with("drive") && *key != "driver";
        self.device_of(qom_path).is_some_and(|device| !device.options.keys().iter().any(names_drive))
    }

    /// Returns whether the command line states other backing images than these nodes have, from the drive's own on.
    fn has_other_backing(&self, nodes: &[String]) -> bool {
        let below = nodes.iter().skip(1).map(Some).chain([None]);
        nodes
            .iter()
            .zip(below)
            .any(|(node, below)| self.backing_nodes.get(node).is_some_and(|stated| stated.as_ref() != below))
    }

    /// Returns whether the command line gives the drive or block node `name` a file.
    fn has_medium(&self, name: &str) -> bool {
        self.block_nodes.contains_key(name) || self.file_of(name).is_some()
    }

    /// Returns the file of the `-drive` with this id.
    fn file_of(&self, id: &str) -> Option<String> {
        self.drives.iter().find(|drive| drive.get("id").as_deref() == Some(id))?.get("file")
    }
}

/// Returns whether these are the options of the device at a QOM path.
fn is_at(device: &Options, qom_path: &str) -> bool {
    device.get("id").is_some_and(|id| qom_path.split('/').any(|part| part == id))
}

/// Returns the nodes of a drive, its own first, up to the first whose name QEMU has made up (`#block123`).
fn named_nodes(drive: &Drive) -> Vec<&str> {
    drive.nodes.iter().map(String::as_str).take_while(|node| !node.starts_with('#')).collect()
}

/// Returns the options that a format and a storage have.
fn node_options(name: &str, node: &BlockNode) -> Options {
    let CacheMode { direct, no_flush } = node.cache;
    let cache = json!({"direct": direct, "no-flush": no_flush});
    let members = [("driver", node.driver.as_str().into()), ("node-name", name.into()), ("cache", cache)];
    Options::Json(members.into_iter().map(|(key, value): (_, Value)| (key.to_owned(), value)).collect())
}

#[cfg(test)]
mod tests;
