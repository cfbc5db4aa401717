//! `rekindle replace-qemu --in-place`: RAM is moved to the new QEMU, page by page, instead of copied.

use crate::bare::{assert_continues, boot, replacing};
use crate::common::{Lab, assert_ticks_once, qemu_new, wait_for};
use rekindle_kernel::process::Process;
use rekindle_memory::ram::GuestRam;
use rekindle_testing::DEADLINE;
use rekindle_testing::foreign::{ForeignQemu, QemuOptions};
use rekindle_testing::process::descriptors;
use rekindle_vm::fault::{DOMAIN_POINTS, MOVE_POINTS};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;

const MIB: u64 = 1 << 20;
/// RAM of the guests.
const RAM_BYTES: u64 = 256 * MIB;
const MAIN_RAM: &str = "pc.ram";

/// Boots a guest that has written most of its memory.
fn boot_full(lab: &Lab) -> ForeignQemu {
    let qemu = boot(lab, qemu_new());
    qemu.ask("touch 176M 7");
    qemu.ask("dirty 20 48 random");
    qemu
}

fn moving(lab: &Lab, qemu: &ForeignQemu) -> Command {
    let mut command = replacing(lab, qemu, qemu_new());
    command.arg("--in-place");
    command
}

/// The RAM of a source, and the file to which it is moved.
struct MovedMemory {
    source: GuestRam,
    rekindle: Process,
}

impl MovedMemory {
    /// Returns the bytes of the RAM that are in the source.
    fn source_bytes(&self) -> u64 {
        let block = self.source.block(self.source.block_id(MAIN_RAM).unwrap()).unwrap();
        // 0 when it has ended.
        self.source.populated(block).map_or(0, |runs| runs.bytes())
    }

    /// Returns the bytes of the RAM that are in the file of the destination.
    fn destination_bytes(&self) -> u64 {
        let descriptors = descriptors_of(self.rekindle);
        let numbers = descriptors.into_iter().filter(|(_, file)| file.contains("memfd:rekindle-ram"));
        let file = |number| fs::metadata(format!("/proc/{}/fd/{number}", self.rekindle.pid)).ok();
        numbers.filter_map(|(number, _)| file(number)).map(|file| file.blocks() * 512).max().unwrap_or(0)
    }

    /// Returns the bytes of both: at least what they have at one moment, since a page that moves between the two readings counts
    /// twice.
    fn bytes(&self) -> u64 {
        let in_source = self.source_bytes();
        in_source + self.destination_bytes()
    }
}

fn descriptors_of(process: Process) -> Vec<(u32, String)> {
    if fs::exists(format!("/proc/{}/fd", process.pid)).unwrap() {
        descriptors(process.pid).into_iter().collect()
    } else {
        Vec::new()
    }
}

#[test]
fn the_source_and_the_destination_together_have_little_more_than_the_ram() {
    let lab = Lab::without_root();
    let qemu = boot_full(&lab);
    let boot_id = qemu.ask("boot-id");
    let source = GuestRam::of(&mut qemu.qmp(), qemu.process).unwrap();
    let mut command = moving(&lab, &qemu);
    command.env("REKINDLE_FAULT", "replace.move.dropped:stop");
    let child = command.spawn().unwrap();
    let rekindle = Process::of(child.id()).unwrap();
    let memory = MovedMemory { source, rekindle };
    let before = memory.source_bytes();
    assert!(before > RAM_BYTES * 5 / 8, "a copy would not need much: {before}");

    // It stops whenever a window of pages has been dropped: each of the two QEMUs has a part of the RAM.
    let mut most = 0;
    wait_for("the move", DEADLINE, || {
        most = most.max(memory.bytes());
        rekindle.is_stopped().then_some(())
    });
    let (in_source, in_destination) = (memory.source_bytes(), memory.destination_bytes());
    assert!(in_destination > 0 && in_source < before, "{before} -> {in_source}, {in_destination}");
    wait_for("the end of the command", DEADLINE, || {
        most = most.max(memory.bytes());
        rekindle.resume().unwrap();
        rekindle.wait_end(std::time::Duration::ZERO).unwrap().then_some(())
    });
    lab.wait(child, "replace-qemu --in-place".into()).ok().prints(&["moved in place"]);
    assert!(most <= RAM_BYTES * 5 / 4, "both had {} MiB", most / MIB);
    assert!(!qemu.process.is_alive());
    let destination = assert_continues(&lab, &qemu, &boot_id);
    assert_ticks_once(&qemu.path("console"));

    // Its RAM is a file now, for which nothing is moved.
    let again = lab.finish(moving(&lab, &qemu)).ok();
    assert!(!again.stdout.contains("moved in place"), "{again}");
    assert_ne!(assert_continues(&lab, &qemu, &boot_id), destination);
}

/// A control group with a limit of memory. Removed on drop.
struct MemoryLimit(PathBuf);

impl MemoryLimit {
    fn new(bytes: u64) -> Self {
        let name = format!("rekindle-test-{}-{}", std::process::id(), bytes / MIB);
        let version_1 = PathBuf::from("/sys/fs/cgroup/memory");
        let (directory, limit) = if version_1.is_dir() {
            (version_1.join(name), "memory.limit_in_bytes")
        } else {
            fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+memory").unwrap();
            (PathBuf::from("/sys/fs/cgroup").join(name), "memory.max")
        };
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join(limit), bytes.to_string()).unwrap();
        Self(directory)
    }

    /// Returns a command that runs `command` in the group.
    fn around(&self, command: &Command) -> Command {
        let mut limited = Command::new("sh");
        limited.args(["-c", r#"echo $$ > "$0" && exec "$@""#]).arg(self.0.join("cgroup.procs"));
        limited.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => limited.env(name, value),
                None => limited.env_remove(name),
            };
        }
        limited.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        limited
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn ram_is_moved_in_place_if_there_is_no_memory_for_a_copy() {
    let lab = Lab::without_root();
    let qemu = boot_full(&lab);
    let boot_id = qemu.ask("boot-id");
    let mut dry_run = replacing(&lab, &qemu, qemu_new());
    dry_run.arg("--dry-run");
    // Without a limit, which also keeps the probe of the binary out of the limits below.
    let unlimited = lab.rekindle(dry_run.get_args()).ok();
    assert!(!unlimited.stdout.contains("moved in place"), "{unlimited}");
    let too_little = MemoryLimit::new(64 * MIB);
    let refused = lab.finish(too_little.around(&replacing(&lab, &qemu, qemu_new())));
    refused.status(1).prints(&["moving the guest's RAM needs", "raise the limit"]);
    assert_eq!(assert_continues(&lab, &qemu, &boot_id), qemu.process);

    let limit = MemoryLimit::new(192 * MIB);
    lab.finish(limit.around(&dry_run)).ok().prints(&["moved in place"]);
    lab.finish(limit.around(&replacing(&lab, &qemu, qemu_new()))).ok().prints(&["moved in place"]);
    assert_ne!(assert_continues(&lab, &qemu, &boot_id), qemu.process);
}

/// A page of such RAM that the guest has not written has the file's content, and is nowhere in QEMU.
#[test]
fn private_memory_over_a_file_with_content_is_rejected() {
    let lab = Lab::without_root();
    let (directory, template) = (lab.path("bare"), lab.path("template"));
    fs::create_dir(&directory).unwrap();
    fs::write(&template, vec![7; RAM_BYTES as usize]).unwrap();
    let backend = format!("memory-backend-file,id=ram,size=256M,share=off,mem-path={}", template.display());
    let options = QemuOptions::new(qemu_new()).arguments(&["-machine", "q35,memory-backend=ram", "-m", "256"]);
    let qemu = ForeignQemu::boot(&directory, &options.arguments(&["-object", &backend]).daemon());
    for command in [replacing(&lab, &qemu, qemu_new()), moving(&lab, &qemu)] {
        lab.finish(command).status(1).prints(&["which has content", template.to_str().unwrap(), "share=on"]);
        assert!(qemu.process.is_alive() && qemu.is_up());
    }
}

#[test]
fn a_move_that_is_killed_is_finished_or_undone() {
    let points = DOMAIN_POINTS.iter().filter(|point| point.starts_with("replace.")).chain(MOVE_POINTS);
    let (undone, finished): (Vec<&str>, Vec<&str>) =
        points.partition(|point| ["replace.prepare.", "replace.suspend."].iter().any(|step| point.starts_with(step)));
    let lab = Lab::without_root();
    let qemu = boot_full(&lab);
    let boot_id = qemu.ask("boot-id");
    for point in undone {
        kill_and_recover(&lab, &qemu, point);
        assert_eq!(assert_continues(&lab, &qemu, &boot_id), qemu.process, "{point}");
    }
    // RAM that was moved is a file: each point has a guest of its own.
    for point in finished {
        let lab = Lab::without_root();
        let qemu = boot_full(&lab);
        let boot_id = qemu.ask("boot-id");
        kill_and_recover(&lab, &qemu, point);
        assert_ne!(assert_continues(&lab, &qemu, &boot_id), qemu.process, "{point}");
        assert!(!qemu.process.is_alive(), "{point}");
    }
}

fn kill_and_recover(lab: &Lab, qemu: &ForeignQemu, point: &str) {
    eprintln!("==== {point}");
    let mut command = moving(lab, qemu);
    command.env("REKINDLE_FAULT", format!("{point}:kill"));
    lab.finish(command).killed();
    lab.rekindle(["recover", "bare"]).ok();
}

#[test]
fn a_guest_returns_to_its_qemu_if_the_new_one_dies_before_the_decision() {
    let lab = Lab::without_root();
    let qemu = boot_full(&lab);
    let boot_id = qemu.ask("boot-id");
    for point in ["replace.prepare.copied", "replace.suspend.frozen", "replace.suspend.loaded"] {
        let mut command = moving(&lab, &qemu);
        command.env("REKINDLE_FAULT", format!("{point}:kill-new"));
        lab.finish(command).status(1);
        assert_eq!(assert_continues(&lab, &qemu, &boot_id), qemu.process, "{point}");
    }
}

/// No QEMU has all of the RAM then: neither may continue.
#[test]
fn a_guest_whose_qemu_dies_during_the_move_is_reported_as_lost() {
    for fault in
        ["replace.move.dropped:kill-old", "replace.move.dropped:kill-new", "replace.resume.journalled:kill-new"]
    {
        let lab = Lab::without_root();
        let qemu = boot_full(&lab);
        let mut command = moving(&lab, &qemu);
        command.env("REKINDLE_FAULT", fault);
        let failed = lab.finish(command);
        let destination = qemu.named_process().filter(|named| *named != qemu.process);
        if fault.ends_with("kill-old") {
            assert!(destination.is_some(), "{fault}");
            failed.status(3).prints(&["memory is lost", "rekindle recover bare"]);
        } else {
            failed.status(3);
        }
        lab.rekindle(["recover", "bare"]).prints(&["memory is lost"]);
        assert!(!qemu.process.is_alive() && destination.is_none_or(|destination| !destination.is_alive()), "{fault}");
        assert!(!lab.run_root().join("bare").exists(), "{fault}");
    }
}
