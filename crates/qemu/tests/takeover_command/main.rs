//! Command lines of libvirt and Proxmox, rewritten for a QEMU that takes over the guest: which arguments change, and
//! that QEMU starts with the result and has the same RAM blocks.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod line;

use line::Line;
use rekindle_kernel::{descriptor, tap};
use rekindle_qemu::adopt::adopt;
use rekindle_qemu::command::Directory;
use rekindle_qemu::ramblock;
use rekindle_qemu::syntax::Syntax;
use rekindle_qemu::takeover_command::{
    CommandLine, Descriptor, Destination, ListenAddress, SourceDescriptor, open_descriptors, read_facts, rewrite, vnc,
};
use rekindle_qemu::vmm::{START_TIMEOUT, Vmm};
use rekindle_testing::foreign::{ForeignQemu, QemuOptions};
use rekindle_testing::{DEADLINE, rfb, tools};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// Returns the difference of two argument lists, in order: `- ARGUMENT` of `old`, `+ ARGUMENT` of `new`. All other
/// arguments are in both lists, in the same order.
fn changes(old: &[String], new: &[String]) -> Vec<String> {
    // Length of the longest common subsequence of `old[i..]` and `new[j..]`.
    let mut common = vec![vec![0; new.len() + 1]; old.len() + 1];
    for i in (0..old.len()).rev() {
        for j in (0..new.len()).rev() {
            common[i][j] =
                if old[i] == new[j] { common[i + 1][j + 1] + 1 } else { common[i + 1][j].max(common[i][j + 1]) };
        }
    }
    let (mut i, mut j) = (0, 0);
    let mut changes = Vec::new();
    while i < old.len() || j < new.len() {
        if i < old.len() && j < new.len() && old[i] == new[j] {
            (i, j) = (i + 1, j + 1);
        } else if j == new.len() || (i < old.len() && common[i + 1][j] >= common[i][j + 1]) {
            changes.push(format!("- {}", old[i]));
            i += 1;
        } else {
            changes.push(format!("+ {}", new[j]));
            j += 1;
        }
    }
    changes
}

#[test]
fn only_what_two_qemus_cannot_share_is_changed() {
    let mut differing = BTreeMap::new();
    for name in ["user-network", "tap-and-memfd", "uefi-and-numa", "libvirt-11-form", "proxmox-8-form", "tpm"] {
        let line = Line::read(name);
        let rewritten = line.rewrite().unwrap_or_else(|obstacles| panic!("{name}: {obstacles:?}"));
        let changes = changes(&line.arguments, &rewritten.arguments);
        if changes != line.changes {
            differing.insert(name, changes);
        }
    }
    assert!(differing.is_empty(), "other changes than in the files:\n{}", serde_json::to_string(&differing).unwrap());
}

#[test]
fn a_second_replacement_connects_to_another_emulator_of_the_tpm() {
    let mut line = Line::read("tpm");
    let first = line.rewrite().unwrap();
    let emulators = |line: &CommandLine| -> Vec<(RawFd, String)> {
        let found = line.descriptors.iter().filter_map(|(number, descriptor)| match descriptor {
            Descriptor::TpmEmulator { server } => Some((*number, server.clone())),
            _ => None,
        });
        found.collect()
    };
    let [(number, server)] = &emulators(&first)[..] else { panic!("{:?}", first.descriptors) };
    assert_eq!(server, "/run/libvirt/qemu/swtpm/6-golden-tpm-swtpm.sock");
    line.arguments = first.arguments.clone();
    // The path at which the second emulator has listened.
    let second = "/run/libvirt/qemu/swtpm/6-golden-tpm-swtpm.sock.rekindle".to_owned();
    line.open.insert(*number, SourceDescriptor::Client { server: second.clone() });
    assert_eq!(emulators(&line.rewrite().unwrap()), [(*number, second)]);
    line.open.insert(*number, SourceDescriptor::Other);
    assert_eq!(line.rewrite().unwrap_err()[0].what, "-chardev chrtpm");
}

#[test]
fn a_tpm_of_the_host_is_refused() {
    let mut line = Line::read("tpm");
    let at = line.arguments.iter().position(|word| word == "-tpmdev").unwrap() + 1;
    line.arguments[at] = "passthrough,id=tpm-tpm0,path=/dev/tpm0".into();
    let obstacles = line.rewrite().unwrap_err();
    assert!(obstacles.iter().any(|obstacle| obstacle.what == "-tpmdev passthrough"), "{obstacles:?}");
}

#[test]
fn a_second_replacement_has_only_its_own_monitors() {
    let mut line = Line::read("uefi-and-numa");
    let first = line.rewrite().unwrap();
    line.arguments = first.arguments.clone();
    let second = line.rewrite().unwrap();
    let count = |line: &CommandLine, text: &str| line.arguments.iter().filter(|word| word.contains(text)).count();
    for text in ["rekindle-", "memory-backend-file", "chardev=charmonitor", "defer", "-S"] {
        assert_eq!(count(&second, text), count(&first, text), "{text}: {:?}", second.arguments);
    }
    assert_eq!(second.descriptors.len(), first.descriptors.len());
}

/// Files of a line's QEMU, in a directory of the test.
struct Files<'a>(&'a Path);

impl Files<'_> {
    /// Names the files of the line in the directory, and creates them.
    fn place(&self, line: &mut Line) {
        const FLASH_BYTES: [(&str, u64); 2] = [("OVMF_CODE_4M.ms.fd", 3_653_632), ("golden-uefi_VARS.fd", 540_672)];
        let directory = self.0.to_str().unwrap();
        let drives = line.facts.drives.iter_mut().filter_map(|drive| drive.file.as_mut());
        for text in line.arguments.iter_mut().chain(drives) {
            for prefix in ["/var/lib/libvirt/", "/usr/share/OVMF/"] {
                *text = text.replace(prefix, &format!("{directory}{prefix}"));
            }
        }
        for argument in &line.arguments {
            let Ok(options) = serde_json::from_str::<Value>(argument) else { continue };
            let Some(path) = options.get("filename").or_else(|| options.get("file")).and_then(Value::as_str) else {
                continue;
            };
            let path = Path::new(path);
            if !path.starts_with(self.0) {
                continue;
            }
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let name = path.file_name().unwrap().to_str().unwrap();
            let content = match name.rsplit('.').next().unwrap() {
                "qcow2" => empty_qcow2(),
                "aes" => vec![7; 32],
                _ => {
                    let flash = FLASH_BYTES.iter().find(|(flash, _)| *flash == name);
                    vec![0; flash.map_or(2 << 20, |(_, bytes)| *bytes as usize)]
                }
            };
            fs::write(path, content).unwrap();
        }
    }

    /// Opens what the destination needs. Rekindle's monitors are bound in the directory.
    fn open(&self, line: &CommandLine) -> Vec<(OwnedFd, RawFd)> {
        let listener = |name: String| OwnedFd::from(UnixListener::bind(self.0.join(name)).unwrap());
        let open = |(number, descriptor): (&RawFd, &Descriptor)| {
            let fd = match descriptor {
                Descriptor::Ram { bytes, .. } => {
                    let memory = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
                    ftruncate(&memory, *bytes).unwrap();
                    memory
                }
                Descriptor::OwnMonitor { name } => {
                    let directory = Directory(self.0.to_owned());
                    let path = [directory.qmp(), directory.watch(), directory.protect(), directory.save()];
                    let path = path.into_iter().find(|path| path.to_string_lossy().contains(name)).unwrap();
                    UnixListener::bind(path).unwrap().into()
                }
                Descriptor::Listener { source } => listener(format!("stand-in-{source}")),
                Descriptor::Tap { .. } => {
                    tap::open_transient(&format!("rkc{}", std::process::id()), tap::Features::OWN).unwrap()
                }
                Descriptor::Duplicate { source } => listener(format!("duplicate-{source}")),
                Descriptor::VhostNet | Descriptor::TpmEmulator { .. } => {
                    panic!("no line of this test has {descriptor:?}")
                }
            };
            (fd, *number)
        };
        line.descriptors.iter().map(open).collect()
    }
}

/// Returns a qcow2 image of 1 GiB without data.
fn empty_qcow2() -> Vec<u8> {
    const CLUSTER_BITS: u32 = 16;
    const CLUSTER: usize = 1 << CLUSTER_BITS;
    let words: [u32; 18] = [
        u32::from_be_bytes(*b"QFI\xfb"),
        2, // version
        0,
        0,
        0, // no backing file
        CLUSTER_BITS,
        0,
        1 << 30, // size
        0,       // not encrypted
        2,       // entries of the L1 table
        0,
        3 << CLUSTER_BITS, // the L1 table
        0,
        1 << CLUSTER_BITS, // the refcount table
        1,                 // clusters of the refcount table
        0,
        0,
        0, // no snapshots
    ];
    let mut image: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
    image.resize(4 * CLUSTER, 0);
    image[CLUSTER..CLUSTER + 8].copy_from_slice(&(2 * CLUSTER as u64).to_be_bytes());
    for reference_count in image[2 * CLUSTER..2 * CLUSTER + 8].chunks_mut(2) {
        reference_count.copy_from_slice(&1u16.to_be_bytes());
    }
    image
}

/// Starts a QEMU with the rewritten line, and checks that it waits for the guest's state with the source's RAM blocks.
fn start(name: &str, binary: &Path) {
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let files = Files(root.path());
    let mut line = Line::read(name);
    files.place(&mut line);
    let rewritten = line.rewrite_for(Syntax::default()).unwrap();
    let directory = Directory(root.path().to_owned());
    let qemu = Vmm::spawn(binary, &rewritten.arguments, &directory, files.open(&rewritten), None).unwrap();
    let connected = qemu.connect(START_TIMEOUT);
    let mut qmp = connected.unwrap_or_else(|e| panic!("{name} with {}: {e}", binary.display()));
    let status: Value = qmp.execute("query-status", ()).unwrap();
    assert_eq!(status["status"], "inmigrate", "{name} with {}", binary.display());
    let blocks = |list: &[ramblock::RamBlock]| {
        list.iter().map(|block| (block.id.clone(), block.total)).collect::<BTreeMap<_, _>>()
    };
    let destination = ramblock::list(&mut qmp).unwrap();
    assert_eq!(blocks(&destination), blocks(&line.facts.ram_blocks), "{name} with {}", binary.display());
    let backends: Value = qmp.execute("query-memdev", ()).unwrap();
    assert!(backends.as_array().unwrap().iter().all(|backend| backend["share"] == true), "{backends}");
    qemu.kill().unwrap();
}

/// Rewrites the line of a running QEMU from what it reports itself, and starts a QEMU of the same binary with it.
fn start_from_running(binary: &Path) {
    let (source_root, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let vnc_path = source_root.path().join("vnc");
    let vnc_option = format!("unix:{},password=on", vnc_path.display());
    let options = QemuOptions::new(binary).arguments(&["-machine", "q35", "-m", "64", "-vnc", &vnc_option]);
    let source = ForeignQemu::start(source_root.path(), &options);
    drop(source.qmp());
    let (adopted, mut qmp) = adopt(&source.path("qmp"), DEADLINE).unwrap();
    let facts = read_facts(&adopted, &mut qmp).unwrap();
    let open = open_descriptors(source.process).unwrap();
    let destination =
        Destination { label: "2".into(), syntax: Syntax::query(&mut qmp).unwrap(), socket_directory: None };
    let rewritten = rewrite(&adopted.arguments, &facts, &open, &destination).unwrap();
    assert_eq!(rewritten.forwards.len(), 1, "{:?}", rewritten.forwards);
    let listeners = rewritten.descriptors.values().filter(|kind| matches!(kind, Descriptor::Listener { .. })).count();
    assert_eq!(listeners, 1, "the socket of -qmp");
    let directory = Directory(root.path().to_owned());
    let server = rewritten.vnc_server.as_ref().unwrap();
    let [vnc_number] = server.listeners.as_slice() else { panic!("{server:?}") };
    let Descriptor::Duplicate { source: vnc_source } = rewritten.descriptors[vnc_number] else { panic!("{server:?}") };
    let fds = Files(root.path()).open(&rewritten);
    let qemu = Vmm::spawn(binary, &rewritten.arguments, &directory, fds, None).unwrap();
    let mut destination_qmp = qemu.connect(START_TIMEOUT).unwrap();
    let blocks = |list: Vec<ramblock::RamBlock>| {
        list.into_iter().map(|block| (block.id, block.total)).collect::<BTreeMap<_, _>>()
    };
    assert_eq!(blocks(ramblock::list(&mut destination_qmp).unwrap()), blocks(ramblock::list(&mut qmp).unwrap()));

    assert!(server.needs_password && vnc::can_listen(&mut destination_qmp).unwrap());
    let socket = descriptor::take(source.process, vnc_source).unwrap();
    source.process.kill().unwrap();
    // What arrives before the server listens, waits.
    let mut client = UnixStream::connect(&vnc_path).unwrap();
    client.set_read_timeout(Some(DEADLINE)).unwrap();
    vnc::set_password(&mut destination_qmp, "secret", "never").unwrap();
    vnc::listen(&mut destination_qmp, &[socket]).unwrap();
    rfb::banner(&mut client).unwrap();
    let servers = vnc::servers(&mut destination_qmp).unwrap();
    assert!(servers[0].addresses[0].is(&ListenAddress::Unix(vnc_path.to_str().unwrap().into())), "{servers:?}");
    drop(client);
    let client = UnixStream::connect(&vnc_path).unwrap();
    client.set_read_timeout(Some(DEADLINE)).unwrap();
    rfb::screen(client, Some("secret")).unwrap();
    qemu.kill().unwrap();
}

#[test]
fn a_qemu_started_by_hand_is_rewritten_from_what_it_reports() {
    [tools::qemu_old(), tools::qemu_new(), tools::qemu_newest()].into_iter().for_each(start_from_running);
}

#[test]
fn qemu_7_2_starts_with_the_rewritten_lines() {
    ["user-network", "tap-and-memfd", "uefi-and-numa"].iter().for_each(|name| start(name, tools::qemu_old()));
}

#[test]
fn qemu_10_starts_with_the_rewritten_lines() {
    ["user-network", "tap-and-memfd", "uefi-and-numa"].iter().for_each(|name| start(name, tools::qemu_new()));
}

#[test]
fn qemu_11_starts_with_the_rewritten_lines() {
    ["user-network", "tap-and-memfd", "uefi-and-numa"].iter().for_each(|name| start(name, tools::qemu_newest()));
}
