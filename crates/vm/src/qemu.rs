//! The processes of a VM's QEMUs, and the meaning of a guest's run states.

use crate::error::LifeError;
use crate::qemu_user;
use crate::rundir::RunDir;
use crate::state::State;
use rekindle_kernel::lockfile;
use rekindle_kernel::process::Process;
use rekindle_qemu::command::Directory;
use std::io;
use std::time::Duration;

/// QEMU's run states of a guest that has ended by itself and does not have to be shut down.
pub const ENDED_RUN_STATES: &[&str] = &[OFF, PANICKED];
/// Run state of a guest that has powered itself off, or has reset itself while QEMU does not reset in place.
pub const OFF: &str = "shutdown";
/// Run state of a guest whose kernel has panicked.
pub const PANICKED: &str = "guest-panicked";

/// Limit for a killed process to end.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the processes of the QEMU that was started in `directory`, including its children, whether it was recorded
/// or not. A process that only names the directory, or has a file of it open, is not among them.
///
/// # Errors
/// When the lock of the directory is held by a process that cannot be seen.
pub fn processes_of(directory: &Directory) -> io::Result<Vec<Process>> {
    let lock = directory.lock();
    if lock.exists() {
        return lockfile::holders(&lock);
    }
    // A QEMU that an earlier version of Rekindle has started holds only QEMU's own lock. A QEMU with a user of its own could
    // name another file.
    Ok(lockfile::owner(&directory.pid())?.into_iter().collect())
}

/// Ends every QEMU that was started in a VM's run directory immediately.
///
/// # Errors
/// [`LifeError::Stuck`] for a QEMU that does not end.
pub fn end_all_qemus(rundir: &RunDir, state: &State) -> Result<(), LifeError> {
    let failed = |source| LifeError::RunDir { name: rundir.name().into(), source };
    for generation in 1..=state.generation + 1 {
        kill_all(rundir, processes_of(&rundir.vmm(generation)).map_err(failed)?)?;
    }
    // A QEMU with a user of its own can unlock its lock, and start other processes if nothing filters its system calls.
    kill_all(rundir, qemu_user::processes(rundir)?)
}

fn kill_all(rundir: &RunDir, processes: Vec<Process>) -> Result<(), LifeError> {
    let failed = |source| LifeError::RunDir { name: rundir.name().into(), source };
    for process in processes {
        process.kill().map_err(failed)?;
        if !process.wait_end(KILL_TIMEOUT).map_err(failed)? {
            return Err(LifeError::Stuck { name: rundir.name().into(), program: "QEMU", pid: process.pid });
        }
    }
    Ok(())
}
