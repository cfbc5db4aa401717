//! Cold: the guest is shut down and booted, in a new QEMU; what it had of its disks may be kept for it.

use super::{Again, Change, Failure, Left, RebootError, resume, switch};
use rekindle_qemu::command::Start;
use rekindle_qemu::vmm::{self, Vmm, log_tail};
use rekindle_vm::fault;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::life::{End, Ended, LifeError};
use rekindle_vm::timeline::{Phase, host_us};
use rekindle_vm::{disks, life, network, phases, ram};

/// Shut the guest down and boot it.
pub(crate) fn reboot(mut change: Change, kind: Kind, end: End) -> Result<Again, Failure> {
    let mut journal = change.open_journal(kind).map_err(|error| Failure::new(Left::AsItWas, error))?;
    let done = shut_down(&mut change, &mut journal, end)
        .and_then(|(stopped, ended)| boot(&mut change, journal, stopped, ended));
    done.map_err(|error| Failure::new(Left::NeedsRecovery, error))
}

/// Bring the guest to its end: gives when it had ended, and how that came about.
pub(crate) fn shut_down(change: &mut Change, journal: &mut Journal, end: End) -> Result<(u64, Ended), RebootError> {
    let old = change.old.clone();
    change.hold_run_state()?;
    journal.advance(Step::Suspend).map_err(change.file_error("operation.json"))?;
    fault::point("cold.suspend.journalled", Some(&old), None);
    change.recorder.phase(Phase::Suspend);
    let ended = life::end(&old, end, change.held.state.definition.shutdown_timeout.as_duration())?;
    let stopped = host_us();
    change.recorder.step(ended.step());
    fault::point("cold.suspend.off", Some(&old), None);
    Ok((stopped, ended))
}

/// Boot it in a new QEMU.
pub(crate) fn boot(
    change: &mut Change,
    mut journal: Journal,
    stopped: u64,
    ended: Ended,
) -> Result<Again, RebootError> {
    let rundir = change.held.rundir.clone();
    let old = change.old.clone();
    change.recorder.phase(Phase::Renew);
    let hardware = &change.held.state.hardware;
    let warm = journal.operation.kind == Kind::OsWarmCache;
    let kept = if warm {
        ram::renew_keeping_cache(&rundir, hardware)?
    } else {
        ram::renew(&rundir, hardware)?;
        None
    };
    fault::point("cold.renew.memory", Some(&old), None);
    disks::start(&rundir, hardware).map_err(LifeError::from)?;
    phases::begin(&rundir, hardware, &change.held.state.definition);
    change.recorder.step("renew its memory");
    let directory = rundir.create_vmm(journal.operation.generation).map_err(change.file_error("vmm"))?;
    let fds = network::reopen(hardware)?;
    let arguments = hardware.arguments(&directory, &rundir.console_log(), Start::Paused, change.binary.syntax);
    let new = Vmm::spawn(&change.binary.path, &arguments, &directory, fds)?;
    fault::point("cold.renew.spawned", Some(&old), Some(&new));
    let mut qmp = new.connect(vmm::START)?;
    change.recorder.step("start the new QEMU");
    change.recorder.phase(Phase::Resume);
    journal.advance(Step::Resume).map_err(change.file_error("operation.json"))?;
    let resumed = resume(&mut qmp, true)?;
    change.recorder.step("boot");
    fault::point("cold.resume.resumed", Some(&old), Some(&new));
    change.recorder.phase(Phase::Settle);
    if !new.is_alive() {
        let said = log_tail(&new.directory(), 10);
        return Err(RebootError::DiedRunning { name: rundir.name().into(), said });
    }
    let state = switch::settle(&rundir, change.held.state.clone(), None, &new, &qmp, journal, None)?;
    change.recorder.step("record");
    fault::point("cold.settle.recorded", Some(&old), Some(&new));
    change.recorder.write(&rundir);
    Ok(Again { report: change.report(&new, &state, (stopped, resumed), None), kept, ended })
}
