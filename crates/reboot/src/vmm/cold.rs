//! Cold: the guest is shut down and booted in a new QEMU. Its disk cache may be retained for the next boot.

use super::{ColdReboot, Failure, GuestStatus, RebootError, Replacement, resume, switch};
use rekindle_qemu::command::Start;
use rekindle_qemu::vmm::{self, Vmm, log_tail};
use rekindle_vm::error::LifeError;
use rekindle_vm::fault;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::shutdown::{self, End, Ended};
use rekindle_vm::timeline::{Phase, host_us};
use rekindle_vm::{disks, network, phases, ram};

/// Shuts the guest down and boots it.
pub(crate) fn reboot(mut replacement: Replacement, kind: Kind, end: End) -> Result<ColdReboot, Failure> {
    let mut journal = replacement.open_journal(kind).map_err(|error| Failure::new(GuestStatus::Unchanged, error))?;
    let done = shut_down(&mut replacement, &mut journal, end)
        .and_then(|(stopped, ended)| boot(&mut replacement, journal, stopped, ended));
    done.map_err(|error| Failure::new(GuestStatus::NeedsRecovery, error))
}

/// Ends the guest. Returns when and how it ended.
pub(crate) fn shut_down(
    replacement: &mut Replacement,
    journal: &mut Journal,
    end: End,
) -> Result<(u64, Ended), RebootError> {
    let source_qemu = replacement.source_qemu.clone();
    replacement.hold_run_state()?;
    journal.advance(Step::Suspend).map_err(replacement.file_error("operation.json"))?;
    fault::point("cold.suspend.journalled", Some(&source_qemu), None);
    replacement.recorder.phase(Phase::Suspend);
    let ended = shutdown::end(&source_qemu, end, replacement.held.state.definition.shutdown_timeout.as_duration())?;
    let stopped = host_us();
    replacement.recorder.step(ended.step());
    fault::point("cold.suspend.off", Some(&source_qemu), None);
    Ok((stopped, ended))
}

/// Boots the guest in a new QEMU.
pub(crate) fn boot(
    replacement: &mut Replacement,
    mut journal: Journal,
    stopped: u64,
    ended: Ended,
) -> Result<ColdReboot, RebootError> {
    let rundir = replacement.held.rundir.clone();
    let source_qemu = replacement.source_qemu.clone();
    replacement.recorder.phase(Phase::Renew);
    let hardware = &replacement.held.state.hardware;
    let warm = journal.operation.kind == Kind::OsWarmCache;
    let retained = if warm {
        ram::renew_keeping_cache(&rundir, hardware)?
    } else {
        ram::renew(&rundir, hardware)?;
        None
    };
    fault::point("cold.renew.memory", Some(&source_qemu), None);
    disks::start(&rundir, hardware).map_err(LifeError::from)?;
    phases::begin(&rundir, hardware, &replacement.held.state.definition);
    replacement.recorder.step("renew its memory");
    let directory = rundir.create_vmm(journal.operation.generation).map_err(replacement.file_error("vmm"))?;
    let fds = network::reopen(hardware)?;
    let arguments = hardware.arguments(&directory, &rundir.console_log(), Start::Paused, replacement.binary.syntax);
    let destination_qemu = Vmm::spawn(&replacement.binary.path, &arguments, &directory, fds)?;
    fault::point("cold.renew.spawned", Some(&source_qemu), Some(&destination_qemu));
    let mut qmp = destination_qemu.connect(vmm::START)?;
    replacement.recorder.step("start the new QEMU");
    replacement.recorder.phase(Phase::Resume);
    journal.advance(Step::Resume).map_err(replacement.file_error("operation.json"))?;
    let resumed = resume(&mut qmp, true)?;
    replacement.recorder.step("boot");
    fault::point("cold.resume.resumed", Some(&source_qemu), Some(&destination_qemu));
    replacement.recorder.phase(Phase::Settle);
    if !destination_qemu.is_alive() {
        let log = log_tail(&destination_qemu.directory(), 10);
        return Err(RebootError::DiedRunning { name: rundir.name().into(), log });
    }
    let state = switch::settle(&rundir, replacement.held.state.clone(), None, &destination_qemu, &qmp, journal, None)?;
    replacement.recorder.step("record");
    fault::point("cold.settle.recorded", Some(&source_qemu), Some(&destination_qemu));
    replacement.recorder.write(&rundir);
    Ok(ColdReboot { report: replacement.report(&destination_qemu, &state, (stopped, resumed), None), retained, ended })
}
