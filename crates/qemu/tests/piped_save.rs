//! Pauses by one command of real QEMUs of each supported version. The guest is the firmware alone.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use rekindle_kernel::descriptor;
use rekindle_kernel::inject::Injector;
use rekindle_kernel::process::Process;
use rekindle_qemu::devices::DeviceStateError;
use rekindle_qemu::guest::{self, run_state};
use rekindle_qemu::piped_save::{HeldSave, PipedSave, close_leftovers};
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_testing::firmware::FirmwareVm;
use rekindle_testing::process::open_files;
use rekindle_testing::{DEADLINE, tools, wait_for};
use rustix::process::{Resource, getrlimit};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// A plausible size of a device state: the actual one is larger.
const STATE_BYTES: usize = 8192;
/// How long a QEMU is observed that must not answer.
const SILENCE: Duration = Duration::from_millis(300);

/// A QEMU with two monitors.
struct Machine {
    vm: FirmwareVm,
    qmp: Qmp,
    other: Qmp,
    injector: Injector,
}

impl Machine {
    fn start(binary: &Path) -> Self {
        let monitors = ["qmp", "other"];
        let vm = FirmwareVm::start(binary, tempfile::tempdir().unwrap(), &monitors, &[]);
        let [qmp, other] =
            monitors.map(|name| wait_for("QMP", DEADLINE, || Qmp::connect(&vm.path(name), DEADLINE).ok()));
        let injector = Injector::new(Process::of(vm.pid()).unwrap()).unwrap();
        Self { vm, qmp, other, injector }
    }

    fn open(&mut self, state_bytes: usize) -> Option<PipedSave> {
        let offered = PipedSave::offer(&mut self.qmp, self.injector, state_bytes).unwrap()?;
        Some(offered.place(&mut self.qmp).unwrap())
    }

    fn begin(&mut self, save: PipedSave) -> Result<HeldSave, DeviceStateError> {
        save.begin(&mut self.qmp)
    }

    fn assert_runs(&mut self) {
        assert_eq!(run_state(&mut self.other).unwrap(), "running");
    }
}

fn on_each_qemu(test: impl Fn(Machine)) {
    for binary in [tools::qemu_old(), tools::qemu_new(), tools::qemu_newest()] {
        eprintln!("{}", binary.display());
        test(Machine::start(binary));
    }
}

#[test]
fn the_guest_is_stopped_until_the_pipe_is_read_and_then_runs() {
    on_each_qemu(|mut machine| {
        let files = open_files(machine.vm.pid());
        let mut save = machine.open(STATE_BYTES).unwrap();
        for _ in 0..3 {
            let held = machine.begin(save).unwrap();
            // QEMU answers no other client, so none can resume the guest.
            machine.other.send("query-status", (), &[]).unwrap();
            std::thread::sleep(SILENCE);
            assert!(machine.other.try_reply::<Value>("query-status").unwrap().is_none());
            let (pipe, saved) = held.finish(&mut machine.qmp).unwrap();
            let saved = saved.unwrap();
            let pause = Duration::from_micros(saved.resumed_host_us - saved.stopped_host_us);
            assert!(pause >= SILENCE, "{pause:?}");
            assert!(saved.devices.len() > STATE_BYTES);
            let status: Value = machine.other.reply("query-status").unwrap();
            assert_eq!(status["status"], "running");
            save = pipe;
        }
        save.close(&mut machine.qmp).unwrap();
        assert_eq!(open_files(machine.vm.pid()), files);
        assert_eq!(machine.qmp.execute::<Value>("query-fdsets", ()).unwrap(), json!([]));
    });
}

#[test]
fn the_guest_runs_again_without_the_process_that_reads_the_pipe() {
    on_each_qemu(|mut machine| {
        let files = open_files(machine.vm.pid());
        let save = machine.open(STATE_BYTES).unwrap();
        // As the kernel does when the process is killed.
        drop(machine.begin(save).unwrap());
        machine.assert_runs();
        let refused = machine.qmp.reply::<Value>("xen-save-devices-state").unwrap_err();
        assert!(matches!(refused, QmpError::Refused { .. }), "{refused}");
        // Another process takes its place, or removes what it has left.
        let save = machine.open(STATE_BYTES).unwrap();
        let (_, saved) = machine.begin(save).unwrap().finish(&mut machine.qmp).unwrap();
        assert!(saved.is_some());
        assert_ne!(open_files(machine.vm.pid()), files);
        close_leftovers(&mut machine.qmp, machine.injector).unwrap();
        assert_eq!(open_files(machine.vm.pid()), files);
        close_leftovers(&mut machine.qmp, machine.injector).unwrap();
    });
}

#[test]
fn a_descriptor_set_of_a_process_that_was_killed_is_removed_before_its_number_is_free() {
    let highest = getrlimit(Resource::Nofile).current.unwrap().min(4096) - 1;
    on_each_qemu(|mut machine| {
        let files = open_files(machine.vm.pid());
        for is_placed in [false, true] {
            drop(PipedSave::offer(&mut machine.qmp, machine.injector, STATE_BYTES).unwrap().unwrap());
            let sets: Value = machine.qmp.execute("query-fdsets", ()).unwrap();
            let number = sets[0]["fds"][0]["fd"].as_i64().unwrap();
            if is_placed {
                descriptor::replace(machine.injector, &[(number as i32, highest as i32)]).unwrap();
            }
            close_leftovers(&mut machine.qmp, machine.injector).unwrap();
            // QEMU would close the number again when it removes the set, after another file may have got it.
            assert_eq!(machine.qmp.execute::<Value>("query-fdsets", ()).unwrap(), json!([]));
            assert_eq!(open_files(machine.vm.pid()), files);
        }
        let save = machine.open(STATE_BYTES).unwrap();
        assert!(machine.begin(save).unwrap().finish(&mut machine.qmp).unwrap().1.is_some());
    });
}

#[test]
fn a_guest_that_another_client_has_stopped_stays_stopped() {
    on_each_qemu(|mut machine| {
        let save = machine.open(STATE_BYTES).unwrap();
        guest::stop(&mut machine.other).unwrap();
        let (_, saved) = machine.begin(save).unwrap().finish(&mut machine.qmp).unwrap();
        assert!(saved.is_none());
        assert_eq!(run_state(&mut machine.other).unwrap(), "paused");
    });
}

#[test]
fn a_state_that_fits_into_the_pipe_is_an_error() {
    on_each_qemu(|mut machine| {
        // No state is that small.
        assert!(machine.open(4096).is_none());
        let save = machine.open(2 << 20).unwrap();
        let e = machine.begin(save).and_then(|held| held.finish(&mut machine.qmp).map(drop)).unwrap_err();
        assert!(matches!(e, DeviceStateError::NotHeld { .. }), "{e}");
        machine.assert_runs();
    });
}

#[test]
fn no_command_is_sent_if_qemu_has_no_such_descriptor_any_more() {
    on_each_qemu(|mut machine| {
        let save = machine.open(STATE_BYTES).unwrap();
        // Another process has taken the place of this one, and closes its descriptor.
        let second = machine.open(STATE_BYTES).unwrap();
        let e = machine.begin(save).unwrap_err();
        assert!(matches!(&e, DeviceStateError::Pipe(_)), "{e}");
        machine.assert_runs();
        let (_, saved) = machine.begin(second).unwrap().finish(&mut machine.qmp).unwrap();
        assert!(saved.is_some());
        machine.assert_runs();
    });
}
