//! Overlays on the disks of a machine whose command line Rekindle did not write: the arguments with which another QEMU
//! opens them.
//!
//! The device is given the newest overlay instead of its image. The image and the overlays below are read-only, as
//! QEMU leaves them when it puts an overlay on a disk, so that it can merge them later.

use super::{DiskOverlays, ForeignMachine, OverlayFile};
use crate::options::Options;
use serde_json::json;

/// A node that no QEMU has: a QEMU with this drive does not start.
const UNKNOWN_DRIVE: &str = "rekindle-overlays-unknown";

impl ForeignMachine {
    /// Checks that the overlays of this image's node could be given to another QEMU.
    ///
    /// # Errors
    /// A text: why not.
    pub fn check_overlay(&self, drive: &str) -> Result<(), String> {
        let values = |option: &str, implied_key: &str, key: &str| {
            let option_values = self.arguments.windows(2).filter(|words| words[0] == option).map(|words| &words[1]);
            let parsed = option_values.filter_map(|value| Options::parse(value, implied_key).ok());
            parsed.filter(|options| options.get(key).as_deref() == Some(drive)).collect::<Vec<_>>()
        };
        let devices = values("-device", "driver", "drive");
        match (devices.as_slice(), values("-blockdev", "driver", "node-name").as_slice()) {
            ([device], [_]) if device.get("share-rw").as_deref() == Some("on") => {
                Err("another process may write it, too (share-rw=on)".into())
            }
            ([_], [_]) => Ok(()),
            _ => Err("QEMU's command line does not give it by -blockdev ...,node-name=NODE and -device ...,drive=NODE"
                .into()),
        }
    }

    /// Returns the arguments with the overlays on the disks.
    pub(super) fn arguments_with_overlays(&self) -> Vec<String> {
        let mut arguments = Vec::new();
        for (index, argument) in self.arguments.iter().enumerate() {
            let option = index.checked_sub(1).and_then(|before| self.arguments.get(before)).map_or("", String::as_str);
            let mut added = Vec::new();
            let rewritten = self.overlays.iter().find_map(|disk| match option {
                "-blockdev" => {
                    added = disk.nodes();
                    disk.read_only_image(argument)
                }
                "-device" => disk.device_on_top(argument),
                _ => None,
            });
            if rewritten.is_none() {
                added.clear();
            }
            arguments.push(rewritten.unwrap_or_else(|| argument.clone()));
            arguments.extend(added.into_iter().flat_map(|node| ["-blockdev".to_owned(), node]));
        }
        arguments
    }
}

impl DiskOverlays {
    fn read_only_image(&self, blockdev: &str) -> Option<String> {
        let mut options = Options::parse(blockdev, "driver").ok()?;
        (options.get("node-name")? == self.drive).then(|| {
            options.set_switch("read-only", true);
            options.set_switch("auto-read-only", false);
            options.to_string()
        })
    }

    fn device_on_top(&self, device: &str) -> Option<String> {
        let mut options = Options::parse(device, "driver").ok()?;
        (options.get("drive")? == self.drive).then(|| {
            let top = self.files.last().map_or_else(|| UNKNOWN_DRIVE.to_owned(), |file| file.name.node());
            options.set("drive", &top);
            options.to_string()
        })
    }

    /// Returns the options of the overlays' nodes, lowest first.
    fn nodes(&self) -> Vec<String> {
        let cache = json!({"direct": self.cache.direct, "no-flush": self.cache.no_flush});
        let mut below = self.drive.clone();
        let mut nodes = Vec::new();
        for (index, OverlayFile { name, path }) in self.files.iter().enumerate() {
            let is_top = index + 1 == self.files.len();
            let file = json!({"driver": "file", "filename": path, "node-name": name.file_node(), "cache": cache,
                "discard": "unmap"});
            let overlay = json!({"driver": "qcow2", "file": name.file_node(), "node-name": name.node(),
                "backing": below, "cache": cache, "discard": "unmap", "detect-zeroes": self.detect_zeroes,
                "read-only": !is_top, "auto-read-only": false});
            nodes.extend([file.to_string(), overlay.to_string()]);
            below = name.node();
        }
        nodes
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::block::graph::CacheMode;
    use crate::block::names::OverlayName;
    use crate::cpu::Features;

    fn machine(arguments: &[&str], epochs: &[u64]) -> ForeignMachine {
        let file = |epoch: &u64| OverlayFile {
            name: OverlayName { disk: 0, epoch: *epoch },
            path: format!("/images/e{epoch}").into(),
        };
        let overlays = DiskOverlays {
            drive: "f0".into(),
            cache: CacheMode { direct: false, no_flush: false },
            detect_zeroes: "off".into(),
            files: epochs.iter().map(file).collect(),
        };
        ForeignMachine {
            arguments: arguments.iter().map(|argument| (*argument).into()).collect(),
            backends: Vec::new(),
            networks: Vec::new(),
            console: None,
            agent: None,
            cpu: Features::new(),
            overlays: vec![overlays],
            domain_xml: None,
            has_tpm_emulator: false,
        }
    }

    const ARGUMENTS: [&str; 6] = [
        "-blockdev",
        "file,filename=/images/disk,node-name=s0",
        "-blockdev",
        "raw,file=s0,node-name=f0",
        "-device",
        "virtio-blk-pci,drive=f0,id=disk0",
    ];

    #[test]
    fn the_device_is_on_the_newest_overlay_and_all_below_is_read_only() {
        let arguments = machine(&ARGUMENTS, &[2, 5]).arguments_with_overlays();
        assert_eq!(arguments[3], "driver=raw,file=s0,node-name=f0,read-only=on,auto-read-only=off");
        let node = |index: usize| serde_json::from_str::<serde_json::Value>(&arguments[index]).unwrap();
        assert_eq!(
            (node(5)["node-name"].clone(), node(5)["filename"].clone()),
            (json!("rks-0-2"), json!("/images/e2"))
        );
        assert_eq!((node(7)["backing"].clone(), node(7)["read-only"].clone()), (json!("f0"), json!(true)));
        assert_eq!((node(11)["backing"].clone(), node(11)["read-only"].clone()), (json!("rk-0-2"), json!(false)));
        assert_eq!(arguments[12..], ["-device", "driver=virtio-blk-pci,drive=rk-0-5,id=disk0"]);
    }

    #[test]
    fn without_the_restores_knowledge_no_qemu_starts_on_an_older_disk() {
        let text = serde_json::to_string(&machine(&ARGUMENTS, &[2])).unwrap();
        let stored: ForeignMachine = serde_json::from_str(&text).unwrap();
        let arguments = stored.arguments_with_overlays();
        assert_eq!(arguments.last().unwrap(), "driver=virtio-blk-pci,drive=rekindle-overlays-unknown,id=disk0");
    }

    #[test]
    fn a_disk_without_a_node_name_on_the_command_line_is_rejected() {
        assert_eq!(machine(&ARGUMENTS, &[]).check_overlay("f0"), Ok(()));
        let drive = ["-drive", "file=/images/disk,id=d0,if=none", "-device", "virtio-blk-pci,drive=d0"];
        assert!(machine(&drive, &[]).check_overlay("#block123").is_err());
        assert!(machine(&drive, &[]).check_overlay("d0").is_err());
        let shared = [&ARGUMENTS[..4], &["-device", "virtio-blk-pci,drive=f0,share-rw=on"]].concat();
        assert!(machine(&shared, &[]).check_overlay("f0").unwrap_err().contains("share-rw"));
    }
}
