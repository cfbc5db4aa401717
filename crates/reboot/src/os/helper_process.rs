//! The processes `rekindle watch` and `rekindle phases`, each of which serves one VM: starting such a process, and what
//! both need to run.

use rekindle_kernel::spawn::{detach, disown, this_program};
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::definition::Definition;
use rekindle_vm::helpers::Helper;
use rekindle_vm::lock;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

/// How long a process may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(10);
const START_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// How long a VM may be without a QEMU while it is replaced.
const REPLACEMENT_TIMEOUT: Duration = Duration::from_secs(5);
const QEMU_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Error that ends such a process.
#[derive(Debug, thiserror::Error)]
pub enum HelperError {
    #[error("cannot read the run directory of VM {name}")]
    RunDir {
        name: String,
        #[source]
        source: io::Error,
    },
}

impl HelperError {
    /// Returns a function that adds the name of the VM to an error of reading its run directory.
    pub(super) fn run_dir(name: &str) -> impl Fn(io::Error) -> Self {
        move |source| Self::RunDir { name: name.to_owned(), source }
    }
}

/// Starts `rekindle COMMAND VM`, the process of the VM's `helper`, and waits until it holds its lock. Does nothing if
/// the helper runs.
pub(super) fn start_helper(rundir: &RunDir, command: &str, helper: &Helper) -> io::Result<()> {
    if helper.process(rundir).is_some() {
        return Ok(());
    }
    let log = rundir.file(&format!("{command}.log"));
    let open_log = || OpenOptions::new().create(true).append(true).mode(0o600).open(&log);
    let mut program = this_program()?;
    program.args([command, rundir.name()]).stdout(open_log()?).stderr(open_log()?);
    if let Some(root) = rundir.path().parent() {
        program.env("REKINDLE_RUN_DIR", root);
    }
    // An injected fault is meant for this process only, not for the processes that it starts.
    let mut child = detach(program.env_remove("REKINDLE_FAULT")).stdin(Stdio::null()).spawn()?;
    let deadline = Instant::now() + START_TIMEOUT;
    while helper.process(rundir).is_none() && child.try_wait()?.is_none() && Instant::now() < deadline {
        thread::sleep(START_POLL_INTERVAL);
    }
    // The process ends without an error if another instance was faster, or if the VM does not exist any more.
    let failed_status = child.try_wait()?.filter(|status| !status.success());
    disown(child);
    match failed_status {
        Some(status) => {
            Err(io::Error::other(format!("`rekindle {command}` ended with {status}; see {}", log.display())))
        }
        None => Ok(()),
    }
}

/// Takes the lock that ensures a single instance. `None` if another process holds it.
pub(super) fn lock_single_instance(path: &Path) -> io::Result<Option<File>> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// A VM's QEMU, and the VM's definition at that moment.
pub(super) struct ServedQemu {
    pub(super) vmm: Vmm,
    pub(super) definition: Definition,
}

/// Returns the VM's QEMU. Waits while it is being replaced. `None` if the VM has no QEMU any more.
pub(super) fn current_qemu(rundir: &RunDir) -> io::Result<Option<ServedQemu>> {
    let mut deadline = Instant::now() + REPLACEMENT_TIMEOUT;
    loop {
        if let Some(State { vmm: Some(vmm), definition, .. }) = State::read(rundir)?
            && vmm.is_alive()
        {
            return Ok(Some(ServedQemu { vmm, definition }));
        }
        if !rundir.exists() || Instant::now() > deadline {
            return Ok(None);
        }
        if lock::running_operation(rundir).is_some() {
            deadline = Instant::now() + REPLACEMENT_TIMEOUT;
        }
        thread::sleep(QEMU_POLL_INTERVAL);
    }
}
