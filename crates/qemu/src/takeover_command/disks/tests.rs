//! Disks whose images have changed while the guest ran.

use crate::block::graph::{BlockNode, CacheMode};
use crate::foreign::CurrentDisk;
use crate::options::Options;
use crate::syntax::Syntax;
use crate::takeover_command::tests::{facts, rewrite_line};
use crate::takeover_command::{CommandLine, Drive};
use serde_json::{Value, json};

/// A node that QEMU has now.
struct Node {
    name: &'static str,
    driver: &'static str,
    file: &'static str,
    read_only: bool,
}

const fn node(name: &'static str, driver: &'static str, file: &'static str, read_only: bool) -> Node {
    Node { name, driver, file, read_only }
}

/// A disk of three images, as libvirt writes it. A node of a file has the name of the image's and `-s`.
const CHAIN: [&str; 6] = [
    r#"{"driver":"file","filename":"/base","node-name":"base-s","auto-read-only":true,"discard":"unmap"}"#,
    r#"{"node-name":"base","read-only":true,"driver":"qcow2","file":"base-s","backing":null}"#,
    r#"{"driver":"file","filename":"/middle","node-name":"middle-s","auto-read-only":true,"discard":"unmap"}"#,
    r#"{"node-name":"middle","read-only":true,"driver":"qcow2","file":"middle-s","backing":"base"}"#,
    r#"{"driver":"file","filename":"/top","node-name":"top-s","aio":"native","auto-read-only":true,"discard":"unmap"}"#,
    r#"{"node-name":"top","read-only":false,"discard":"unmap","driver":"qcow2","file":"top-s","backing":"middle"}"#,
];
const DEVICE: &str = r#"{"driver":"virtio-blk-pci","id":"disk","drive":"top"}"#;

/// Rewrites a command line whose disk `disk` has these images now, its own first. Those of [`CHAIN`] that are not among
/// them are closed. A file of `part:PATH` is a part of the file at the path.
fn rewritten(blockdevs: &[&str], device: &str, images: &[Node]) -> Result<CommandLine, Vec<String>> {
    let mut facts = facts(&["disk"]);
    let path = "/machine/peripheral/disk/virtio-backend".to_owned();
    let mut drive = Drive {
        device: path.clone(),
        file: images.first().map(|image| image.file.into()),
        nodes: images.iter().map(|image| image.name.into()).collect(),
        storages: Default::default(),
        tray_open: false,
    };
    for Node { name, driver, file, read_only } in images {
        let cache = CacheMode { direct: true, no_flush: false };
        let detect_zeroes = "off".to_owned();
        let path = file.strip_prefix("part:").unwrap_or(file);
        let described = |driver: &str, file: &str| BlockNode {
            driver: driver.into(),
            file: file.into(),
            read_only: *read_only,
            size: 0,
            cache,
            detect_zeroes: detect_zeroes.clone(),
        };
        let storage = if name.starts_with('#') { format!("{name}1") } else { format!("{name}-s") };
        drive.storages.insert((*name).into(), storage.clone());
        facts.nodes.insert((*name).into(), described(driver, file));
        facts.nodes.insert(storage, described(if path.starts_with('/') { "file" } else { "nbd" }, path));
    }
    if let Some(image) = images.first() {
        facts.machine.disks = vec![CurrentDisk { device: path, node: image.name.into() }];
    }
    facts.drives = vec![drive];
    let blockdevs: String = blockdevs.iter().map(|value| format!("-blockdev {value} ")).collect();
    let line = format!("-display none {blockdevs}-device {device}");
    let rewritten = rewrite_line(&line, &facts, &[], Syntax::default());
    rewritten.map_err(|obstacles| obstacles.into_iter().map(|obstacle| obstacle.why).collect())
}

/// Returns the block nodes of the destination, in order, and the node of its disk.
fn followed(images: &[Node]) -> (Vec<Value>, Option<String>) {
    let line = rewritten(&CHAIN, DEVICE, images).unwrap();
    let values = |option: &str| {
        let pairs = line.arguments.iter().zip(line.arguments.iter().skip(1));
        pairs.filter(|(name, _)| *name == option).map(|(_, value)| value.clone()).collect::<Vec<_>>()
    };
    let device = Options::parse(&values("-device")[0], "driver").unwrap();
    (values("-blockdev").iter().map(|value| serde_json::from_str(value).unwrap()).collect(), device.get("drive"))
}

/// Returns whether a command line has this value, with its members in any order.
fn has(line: &CommandLine, value: &str) -> bool {
    let expected: Value = serde_json::from_str(value).unwrap();
    line.arguments.iter().any(|argument| serde_json::from_str(argument).is_ok_and(|value: Value| value == expected))
}

/// Returns the names of nodes with those of their backing nodes; `null` for none.
fn backings(nodes: &[Value]) -> Vec<(&str, &Value)> {
    let images = nodes.iter().filter(|node| node.get("file").is_some());
    images.map(|node| (node["node-name"].as_str().unwrap(), &node["backing"])).collect()
}

#[test]
fn unchanged_images_are_kept_word_for_word() {
    let images = [
        node("top", "qcow2", "/top", false),
        node("middle", "qcow2", "/middle", true),
        node("base", "qcow2", "/base", true),
    ];
    let line = rewritten(&CHAIN, DEVICE, &images).unwrap();
    for value in CHAIN.iter().chain(&[DEVICE]) {
        assert!(line.arguments.iter().any(|argument| argument == value), "{value}");
    }
}

#[test]
fn an_overlay_that_was_put_on_a_disk_is_added_above_its_images() {
    let images = [
        node("snap", "qcow2", "/snap,1", false),
        node("top", "qcow2", "/top", true),
        node("middle", "qcow2", "/middle", true),
        node("base", "qcow2", "/base", true),
    ];
    let (nodes, drive) = followed(&images);
    assert_eq!(drive.as_deref(), Some("snap"));
    assert_eq!(nodes.len(), 8);
    assert_eq!(nodes[5]["read-only"], true);
    let cache = json!({"direct": true, "no-flush": false});
    let storage = json!({"driver": "file", "node-name": "snap-s", "cache": cache, "filename": "/snap,1",
        "auto-read-only": true, "discard": "unmap", "aio": "native"});
    let image = json!({"driver": "qcow2", "node-name": "snap", "cache": cache, "file": "snap-s", "read-only": false,
        "detect-zeroes": "off", "discard": "unmap", "backing": "top"});
    assert_eq!(nodes[6..], [storage, image]);
}

#[test]
fn images_that_were_committed_or_pulled_are_left_out() {
    let (base, null) = (&json!("base"), &Value::Null);
    // The disk is on its lowest image again, which can be written now.
    let (nodes, drive) = followed(&[node("base", "qcow2", "/base", false)]);
    assert_eq!((backings(&nodes), drive.as_deref()), (vec![("base", null)], Some("base")));
    assert_eq!((nodes.len(), &nodes[1]["read-only"]), (2, &Value::Bool(false)));
    // The image in the middle was merged into the lowest one, or into the disk's own.
    let top = node("top", "qcow2", "/top", false);
    let (nodes, drive) = followed(&[top, node("base", "qcow2", "/base", true)]);
    assert_eq!((backings(&nodes), drive.as_deref()), (vec![("base", null), ("top", base)], Some("top")));
    assert_eq!(nodes.len(), 4);
    // All were.
    let (nodes, _) = followed(&[node("top", "qcow2", "/top", false)]);
    assert_eq!((backings(&nodes), nodes.len()), (vec![("top", null)], 2));
}

#[test]
fn a_disk_that_was_copied_has_the_copy() {
    let (nodes, drive) = followed(&[node("copy", "raw", "/copy", false)]);
    assert_eq!((nodes.len(), drive.as_deref()), (2, Some("copy")));
    assert_eq!((&nodes[0]["filename"], &nodes[1]["file"]), (&json!("/copy"), &json!("copy-s")));
    // As the image that the disk had at the start, which is closed.
    assert_eq!((&nodes[0]["aio"], &nodes[1]["discard"]), (&json!("native"), &json!("unmap")));
    // A raw image has none, and QEMU rejects the option.
    assert_eq!(nodes[1].get("backing"), None);
}

#[test]
fn a_node_below_which_one_was_added_comes_after_it() {
    let images = [node("top", "qcow2", "/top", false), node("new", "qcow2", "/new", true)];
    let (nodes, _) = followed(&images);
    assert_eq!(backings(&nodes), [("new", &Value::Null), ("top", &json!("new"))]);
}

#[test]
fn a_medium_is_inserted_and_ejected() {
    let cd = r#"{"driver":"ide-cd","id":"disk"}"#;
    let line = rewritten(&[], cd, &[node("iso", "raw", "/iso", true)]).unwrap();
    let device = r#"{"driver":"ide-cd","id":"disk","drive":"iso"}"#;
    assert!(has(&line, device), "{:?}", line.arguments);
    let line = rewritten(&CHAIN[..2], r#"{"driver":"ide-cd","id":"disk","drive":"base"}"#, &[]).unwrap();
    assert!(has(&line, cd), "{:?}", line.arguments);
    assert!(!line.arguments.iter().any(|argument| argument == "-blockdev"), "{:?}", line.arguments);
    let floppies = "isa-fdc,id=disk,driveA=base";
    let kept = rewritten(&CHAIN[..2], floppies, &[node("base", "qcow2", "/base", true)]).unwrap();
    assert_eq!(kept.arguments.iter().filter(|argument| argument.contains("driveA=base")).count(), 1);
}

#[test]
fn the_backing_image_that_is_recorded_in_a_file_needs_no_option() {
    let top = r#"{"node-name":"top","read-only":false,"driver":"qcow2","file":"top-s"}"#;
    let unnamed = || node("#block7", "qcow2", "/base", true);
    let disk = || node("top", "qcow2", "/top", false);
    let line = rewritten(&[CHAIN[4], top], DEVICE, &[disk(), unnamed()]).unwrap();
    assert!(line.arguments.iter().any(|argument| argument == top));
    let images = [node("snap", "qcow2", "/snap", false), node("top", "qcow2", "/top", true), unnamed()];
    let line = rewritten(&[CHAIN[4], top], DEVICE, &images).unwrap();
    assert!(has(&line, &top.replace("false", "true")), "{:?}", line.arguments);
}

#[test]
fn images_that_cannot_be_described_are_named() {
    let disk = || node("top", "qcow2", "/top", true);
    let base = || node("base", "qcow2", "/base", true);
    let snapshots = [
        vec![node("#block5", "qcow2", "/snap", false), disk()],
        vec![node("snap", "qed", "/snap", false), disk()],
        vec![node("snap", "qcow2", "nbd://host", false), disk()],
        vec![node("copy", "raw", "part:/disk", false)],
        // No option names what is below it.
        vec![node("snap", "qcow2", "/snap", false), node("#block5", "qcow2", "/new", true)],
    ];
    for images in snapshots {
        let problems = rewritten(&CHAIN, DEVICE, &images).unwrap_err();
        assert!(problems.iter().all(|problem| problem.contains("a snapshot or another medium")), "{problems:?}");
    }
    // A node of -drive has a name, but no -blockdev can have the same one.
    let with_drive = rewritten(
        &CHAIN,
        &format!("{DEVICE} -drive node-name=snap,if=none"),
        &[node("snap", "qcow2", "/snap", false), disk()],
    );
    assert!(with_drive.unwrap_err()[0].contains("a snapshot or another medium"));
    let problems = rewritten(&CHAIN, DEVICE, &[disk(), node("#block5", "qcow2", "/new", true), base()]).unwrap_err();
    assert!(problems.len() == 1 && problems[0].contains("blockpull"), "{problems:?}");
    let problems = rewritten(&[], r#"{"driver":"ide-cd","id":"disk"}"#, &[node("#block5", "raw", "/iso", true)]);
    let problems = problems.unwrap_err();
    assert!(problems.len() == 1 && problems[0].contains("--eject"), "{problems:?}");
}
