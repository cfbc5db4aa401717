//! Connections to the monitors of real QEMUs of each supported version.

#![allow(clippy::unwrap_used, reason = "tests")]

use rekindle_kernel::process::Process;
use rekindle_qemu::guest::run_state;
use rekindle_qemu::qmp::Qmp;
use rekindle_testing::firmware::FirmwareVm;
use rekindle_testing::{DEADLINE, tools, wait_for};

/// Enough for a few connections that a QEMU greets while it executes a command of the client before.
const CONNECTIONS: usize = 150;

/// A QEMU that was frozen executes the last command of a client that has gone, and sends the reply to the next one.
#[test]
fn replies_to_the_client_before_are_not_taken_for_own_ones() {
    for binary in [tools::qemu_old(), tools::qemu_new(), tools::qemu_newest()] {
        let vm = FirmwareVm::start(binary, tempfile::tempdir().unwrap(), &["qmp"], &[]);
        let process = Process::of(vm.pid()).unwrap();
        let connect = || Qmp::connect(&vm.path("qmp"), DEADLINE);
        let mut qmp = wait_for("QMP", DEADLINE, || connect().ok());
        for (command, state) in [("stop", "paused"), ("cont", "running")].into_iter().cycle().take(CONNECTIONS) {
            process.stop().unwrap();
            qmp.send(command, (), &[]).unwrap();
            drop(qmp);
            process.resume().unwrap();
            qmp = connect().unwrap();
            // The command may have been dropped with its connection.
            let _ = qmp.execute::<serde_json::Value>(command, ());
            assert_eq!(run_state(&mut qmp).unwrap(), state);
        }
    }
}
