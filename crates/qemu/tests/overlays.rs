//! Overlays on the disks of real QEMUs of each supported version: raw and qcow2 images, with and without an image
//! below, given by `-drive` and by `-blockdev`, with and without an I/O thread. The guest is the firmware alone; its
//! writes are made with QEMU's `qemu-io` command on the device.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use rekindle_qemu::block::BlockError;
use rekindle_qemu::block::graph::{BlockGraph, OverlayChain};
use rekindle_qemu::block::jobs::{self, CancelOutcome, Job};
use rekindle_qemu::block::names::OverlayName;
use rekindle_qemu::block::overlay::{self, Mark};
use rekindle_qemu::guest;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::stopped::Stopped;
use rekindle_testing::firmware::FirmwareVm;
use rekindle_testing::{DEADLINE, tools, wait_for};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::thread;

const DISK_BYTES: u64 = 16 << 20;
const DEVICE: &str = "/machine/peripheral/disk0/virtio-backend";
/// A merge at this rate, in bytes per second, does not end during a test.
const SLOW: u64 = 64 << 10;

/// How a disk is given to QEMU.
#[derive(Debug, Clone, Copy)]
struct Layout {
    format: &'static str,
    has_image_below: bool,
    /// By `-drive`, so that its nodes have generated names.
    is_drive: bool,
    has_iothread: bool,
}

const RAW_DRIVE: Layout = Layout { format: "raw", has_image_below: false, is_drive: true, has_iothread: false };
const QCOW2_BELOW: Layout = Layout { format: "qcow2", has_image_below: true, is_drive: false, has_iothread: true };
const LAYOUTS: [Layout; 4] = [
    RAW_DRIVE,
    Layout { format: "raw", is_drive: false, has_iothread: true, ..RAW_DRIVE },
    Layout { format: "qcow2", ..RAW_DRIVE },
    QCOW2_BELOW,
];

fn qemu_img(arguments: &[&str]) -> String {
    let output = Command::new("qemu-img").args(arguments).output().unwrap();
    assert!(output.status.success(), "qemu-img {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A QEMU with one disk.
struct Machine {
    vm: FirmwareVm,
    qmp: Qmp,
    layout: Layout,
}

impl Machine {
    fn start(binary: &Path, layout: Layout) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        let (image, size) = (path("image"), DISK_BYTES.to_string());
        if layout.has_image_below {
            qemu_img(&["create", "-q", "-f", "raw", &path("below"), &size]);
            let below = path("below");
            qemu_img(&["create", "-q", "-f", layout.format, "-F", "raw", "-b", &below, &image]);
        } else {
            qemu_img(&["create", "-q", "-f", layout.format, &image, &size]);
        }
        let mut arguments = vec!["-object".to_owned(), "iothread,id=io0".to_owned()];
        // libvirt's node names.
        let (file_node, node) = ("libvirt-1-storage", "libvirt-1-format");
        let iothread = if layout.has_iothread { ",iothread=io0" } else { "" };
        if layout.is_drive {
            arguments.extend(["-drive".into(), format!("file={image},format={},if=none,id={node}", layout.format)]);
        } else {
            let file = json!({"driver": "file", "filename": image, "node-name": file_node});
            let format = json!({"driver": layout.format, "file": file_node, "node-name": node});
            arguments.extend(["-blockdev".into(), file.to_string(), "-blockdev".into(), format.to_string()]);
        }
        arguments.extend(["-device".into(), format!("virtio-blk-pci,id=disk0,drive={node}{iothread}")]);
        let vm = FirmwareVm::start(binary, directory, &["qmp"], &arguments);
        let qmp = wait_for("QMP", DEADLINE, || Qmp::connect(&vm.path("qmp"), DEADLINE).ok());
        Self { vm, qmp, layout }
    }

    fn path(&self, name: &str) -> String {
        self.vm.path(name).to_str().unwrap().to_owned()
    }

    fn graph(&mut self) -> BlockGraph {
        BlockGraph::read(&mut self.qmp).unwrap()
    }

    fn chain(&mut self) -> OverlayChain {
        self.graph().chain_of(DEVICE).unwrap()
    }

    /// Writes bytes of this value to one MiB of the disk and flushes them, as the guest. Without the flush, metadata of
    /// a qcow2 file may be in QEMU only.
    fn write(&mut self, mib: u64, value: u8) {
        for command in [&format!("write -P {value} {mib}M 1M"), "flush"] {
            self.qmp.human(&format!("qemu-io -d {DEVICE} \"{command}\"")).unwrap();
        }
    }

    fn create(&mut self, epoch: u64) -> OverlayName {
        let name = OverlayName { disk: 0, epoch };
        let (chain, path) = (self.chain(), self.path(&format!("epoch-{epoch}")));
        File::create_new(&path).unwrap();
        overlay::create(&mut self.qmp, &chain, name, Path::new(&path)).unwrap();
        name
    }

    fn try_mark(&mut self, overlay: OverlayName) -> Result<(), BlockError> {
        let chain = self.chain();
        guest::stop(&mut self.qmp).unwrap();
        let mut stopped = Stopped::check(&mut self.qmp).unwrap();
        let marked = overlay::mark(&mut stopped, &[Mark { chain: &chain, overlay }]);
        guest::resume(&mut self.qmp).unwrap();
        marked
    }

    fn end(&mut self, chain: &OverlayChain) {
        overlay::prepare_end(&mut self.qmp, chain, DEADLINE).unwrap();
        guest::stop(&mut self.qmp).unwrap();
        overlay::end(&mut Stopped::check(&mut self.qmp).unwrap(), chain).unwrap();
        guest::resume(&mut self.qmp).unwrap();
    }

    /// Returns the first byte of each MiB of an image, as a program outside of QEMU reads it.
    fn content(&self, image: &str, format: &str) -> Vec<u8> {
        let copy = self.path("copy");
        qemu_img(&["convert", "-U", "-f", format, "-O", "raw", &self.path(image), &copy]);
        fs::read(copy).unwrap().iter().step_by(1 << 20).copied().collect()
    }

    fn base_content(&self) -> Vec<u8> {
        self.content("image", self.layout.format)
    }
}

/// Returns a disk's content with these values in the first MiB.
fn disk(values: &[u8]) -> Vec<u8> {
    let mut content = vec![0; (DISK_BYTES >> 20) as usize];
    content[..values.len()].copy_from_slice(values);
    content
}

/// Takes a disk through three epochs: a mark, a merge, a mark, the end of all overlays.
fn run_epochs(binary: &Path, layout: Layout) {
    let mut machine = Machine::start(binary, layout);
    let before = machine.chain();
    assert_eq!(before.overlays, [], "{layout:?}");
    machine.write(0, 1);
    let (first, second, third) = (machine.create(1), machine.create(2), machine.create(3));
    machine.try_mark(first).unwrap();
    machine.write(1, 2);
    machine.try_mark(second).unwrap();
    machine.write(2, 3);
    assert_eq!(machine.chain().overlays, [first, second], "{layout:?}");
    // The base has the content of the first mark, and the chain up to an epoch that of its mark.
    assert_eq!(machine.base_content(), disk(&[1]), "{layout:?}");
    assert_eq!(machine.content("epoch-1", "qcow2"), disk(&[1, 2]), "{layout:?}");

    let chain = machine.chain();
    overlay::start_merge(&mut machine.qmp, &chain, first, 0).unwrap();
    overlay::finish_merge(&mut machine.qmp, &chain, first, DEADLINE).unwrap();
    // What was merged is in the image immediately, also the metadata of a qcow2 image: a sync of the file is enough.
    assert_eq!(machine.base_content(), disk(&[1, 2]), "{layout:?}");
    overlay::remove_unused(&mut machine.qmp, first).unwrap();
    overlay::remove_unused(&mut machine.qmp, first).unwrap();
    fs::remove_file(machine.path("epoch-1")).unwrap();
    // The header of the overlay above names the base now.
    assert_eq!(machine.content("epoch-2", "qcow2"), disk(&[1, 2, 3]), "{layout:?}");

    machine.try_mark(third).unwrap();
    machine.write(3, 4);
    let chain = machine.chain();
    machine.end(&chain);
    assert_eq!(machine.base_content(), disk(&[1, 2, 3, 4]), "{layout:?}");
    assert_eq!(machine.chain(), before, "{layout:?}");
    let graph = machine.graph();
    assert!(!graph.node(&before.base).unwrap().read_only, "{layout:?}");
    for name in [first, second, third] {
        assert!(!graph.has_node(&name.node()) && !graph.has_node(&name.file_node()), "{layout:?} {name:?}");
    }
    // The guest writes to its image as before.
    machine.write(4, 5);
    assert_eq!(machine.base_content(), disk(&[1, 2, 3, 4, 5]), "{layout:?}");
}

/// Marks and backs up a disk during a merge, cancels the merge, and repeats it.
fn interrupt_merge(binary: &Path, layout: Layout) {
    let mut machine = Machine::start(binary, layout);
    let (first, second, third) = (machine.create(1), machine.create(2), machine.create(3));
    machine.try_mark(first).unwrap();
    for mib in 0..8 {
        machine.write(mib, 1);
    }
    machine.try_mark(second).unwrap();
    let chain = machine.chain();
    overlay::start_merge(&mut machine.qmp, &chain, first, SLOW).unwrap();
    assert_eq!(machine.graph().merge_of(0), Some(first));
    assert!(machine.chain().is_merging);
    let rejected = machine.try_mark(third);
    let is_busy =
        |e: &BlockError| matches!(e, BlockError::Qmp(e @ QmpError::Refused { .. }) if e.to_string().contains("busy"));
    assert!(rejected.as_ref().is_err_and(is_busy), "{layout:?}: {rejected:?}");
    let backup = json!({"job-id": "backup", "device": chain.base, "target": third.node(), "sync": "full"});
    let rejected = machine.qmp.execute::<Value>("blockdev-backup", backup);
    assert!(matches!(rejected, Err(QmpError::Refused { .. })), "{layout:?}: {rejected:?}");
    let unfinished = overlay::finish_merge(&mut machine.qmp, &chain, first, std::time::Duration::from_millis(1));
    assert!(matches!(unfinished, Err(BlockError::JobTimeout { .. })), "{layout:?}: {unfinished:?}");

    assert_eq!(jobs::cancel(&mut machine.qmp, &first.merge_job()).unwrap(), CancelOutcome::Cancelled);
    assert_eq!(jobs::cancel(&mut machine.qmp, &first.merge_job()).unwrap(), CancelOutcome::NoSuchJob);
    assert_eq!(machine.chain(), chain, "{layout:?}");
    machine.try_mark(third).unwrap();
    // Two closed epochs are merged by one job, and the first of them for the second time.
    let chain = machine.chain();
    overlay::start_merge(&mut machine.qmp, &chain, second, 0).unwrap();
    overlay::finish_merge(&mut machine.qmp, &chain, second, DEADLINE).unwrap();
    assert_eq!(machine.chain().overlays, [third], "{layout:?}");
    assert_eq!(machine.base_content(), disk(&[1; 8]), "{layout:?}");
    machine.write(8, 2);
    let chain = machine.chain();
    machine.end(&chain);
    assert_eq!(machine.base_content(), disk(&[1, 1, 1, 1, 1, 1, 1, 1, 2]), "{layout:?}");
}

fn run_all_epochs(binary: &Path) {
    LAYOUTS.into_iter().for_each(|layout| run_epochs(binary, layout));
}

fn interrupt_merges(binary: &Path) {
    [RAW_DRIVE, QCOW2_BELOW].into_iter().for_each(|layout| interrupt_merge(binary, layout));
}

#[test]
fn epochs_with_qemu_7() {
    run_all_epochs(tools::qemu_old());
}

#[test]
fn epochs_with_qemu_10() {
    run_all_epochs(tools::qemu_new());
}

#[test]
fn epochs_with_qemu_11() {
    run_all_epochs(tools::qemu_newest());
}

#[test]
fn an_interrupted_merge_with_qemu_7() {
    interrupt_merges(tools::qemu_old());
}

#[test]
fn an_interrupted_merge_with_qemu_10() {
    interrupt_merges(tools::qemu_new());
}

#[test]
fn an_interrupted_merge_with_qemu_11() {
    interrupt_merges(tools::qemu_newest());
}

#[test]
fn a_disk_that_was_resized_gets_an_overlay_of_its_size() {
    let mut machine = Machine::start(tools::qemu_new(), RAW_DRIVE);
    let (name, base) = (machine.create(1), machine.chain().base);
    machine.qmp.execute::<Value>("block_resize", json!({"node-name": base, "size": 2 * DISK_BYTES})).unwrap();
    assert!(matches!(machine.try_mark(name), Err(BlockError::Resized { .. })));
    assert_eq!(machine.chain().overlays, []);
    fs::remove_file(machine.path("epoch-1")).unwrap();
    let name = machine.create(1);
    machine.try_mark(name).unwrap();
    assert_eq!(machine.chain().overlays, [name]);
}

#[test]
fn an_overlay_that_cannot_be_made_leaves_no_node() {
    let mut machine = Machine::start(tools::qemu_new(), RAW_DRIVE);
    let (chain, name) = (machine.chain(), OverlayName { disk: 0, epoch: 1 });
    // QEMU opens a directory for reading and cannot write a header into it.
    let rejected = overlay::create(&mut machine.qmp, &chain, name, &machine.vm.path(""));
    assert!(rejected.is_err());
    let graph = machine.graph();
    assert!(!graph.has_node(&name.node()) && !graph.has_node(&name.file_node()));
    machine.create(1);
}

#[test]
fn an_end_whose_answer_was_lost_is_an_end() {
    let mut machine = Machine::start(tools::qemu_new(), QCOW2_BELOW);
    let first = machine.create(1);
    machine.try_mark(first).unwrap();
    machine.write(0, 1);
    let chain = machine.chain();
    overlay::prepare_end(&mut machine.qmp, &chain, DEADLINE).unwrap();
    guest::stop(&mut machine.qmp).unwrap();
    machine.qmp.execute::<Value>("job-complete", json!({"id": "rk-end-0"})).unwrap();
    jobs::finish(&mut machine.qmp, "rk-end-0", DEADLINE).unwrap();
    // The job is gone. The graph shows that the device is on its base.
    overlay::end(&mut Stopped::check(&mut machine.qmp).unwrap(), &chain).unwrap();
    assert_eq!(machine.chain().overlays, []);
    assert_eq!(machine.base_content(), disk(&[1]));
}

#[test]
fn an_end_that_fails_leaves_the_device_on_its_overlay() {
    let mut machine = Machine::start(tools::qemu_new(), RAW_DRIVE);
    let first = machine.create(1);
    machine.try_mark(first).unwrap();
    let chain = machine.chain();
    guest::stop(&mut machine.qmp).unwrap();
    // Without `prepare_end` there is no job to complete.
    let failed = overlay::end(&mut Stopped::check(&mut machine.qmp).unwrap(), &chain);
    assert!(matches!(failed, Err(BlockError::JobVanished { .. })), "{failed:?}");
    assert_eq!(machine.chain(), chain);
}

#[test]
fn a_merge_of_a_killed_process_is_checked_before_it_is_dismissed() {
    let mut machine = Machine::start(tools::qemu_new(), RAW_DRIVE);
    let (first, second) = (machine.create(1), machine.create(2));
    machine.try_mark(first).unwrap();
    machine.write(0, 1);
    machine.try_mark(second).unwrap();
    let chain = machine.chain();
    overlay::start_merge(&mut machine.qmp, &chain, first, 0).unwrap();
    let is_concluded = |qmp: &mut Qmp| Job::find(qmp, &first.merge_job()).unwrap().filter(Job::is_concluded).map(drop);
    wait_for("the merge", DEADLINE, || is_concluded(&mut machine.qmp));
    // A base that QEMU could not make read-only again has not been flushed.
    let unflushed = OverlayChain { base: chain.top(), ..chain.clone() };
    let checked = overlay::finish_merge(&mut machine.qmp, &unflushed, first, DEADLINE);
    assert!(matches!(checked, Err(BlockError::BaseNotFlushed { .. })), "{checked:?}");
    assert_eq!(machine.graph().merge_of(0), Some(first));
    overlay::finish_merge(&mut machine.qmp, &chain, first, DEADLINE).unwrap();
    assert_eq!(machine.graph().merge_of(0), None);
}

/// Answers as a QEMU whose job ends at the second query, without any event, as libvirt's monitor relay does.
fn serve_job_without_events(listener: &UnixListener) {
    let (stream, _) = listener.accept().unwrap();
    let commands = serde_json::Deserializer::from_reader(stream.try_clone().unwrap()).into_iter::<Value>();
    let mut writer = stream;
    writeln!(
        writer,
        "{}",
        json!({"QMP": {"version": {"qemu": {"major": 10, "minor": 0, "micro": 0}, "package": ""},
        "capabilities": []}})
    )
    .unwrap();
    let mut queries = 0;
    for command in commands.map_while(Result::ok) {
        let answer = match command["execute"].as_str().unwrap() {
            "query-jobs" => {
                queries += 1;
                let status = if queries < 2 { "running" } else { "concluded" };
                json!([{"id": "rk-merge-0-2", "status": status}])
            }
            _ => json!({}),
        };
        let mut reply = json!({"return": answer});
        if let Some(id) = command.get("id") {
            reply["id"] = id.clone();
        }
        writeln!(writer, "{reply}").unwrap();
    }
}

#[test]
fn the_end_of_a_job_is_found_without_events() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("qmp");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = thread::spawn(move || serve_job_without_events(&listener));
    let mut qmp = Qmp::connect(&socket, DEADLINE).unwrap();
    jobs::finish(&mut qmp, "rk-merge-0-2", DEADLINE).unwrap();
    drop(qmp);
    server.join().unwrap();
}
