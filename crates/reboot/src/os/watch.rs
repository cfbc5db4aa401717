//! `rekindle watch`: one process for each VM that Rekindle has started. It restarts the processes that serve the VM
//! ([`super::helpers`]), and reboots a guest that reboots itself or panics with a warm cache, or from a phase.
//!
//! QEMU would reset the guest in place, and its cache with it. So it is told to stop there instead (`set-action`), and the
//! process here does what `rekindle reboot os --how warm-cache | phase` does. It goes on with whichever QEMU the VM has, and
//! ends with the VM. If it has died, a guest that reboots itself stays stopped: `rekindle recover` boots it, and starts another one.

use super::helpers::{Helpers, chain};
use super::{How, boot_unless, phase, usual};
use crate::vmm::{Failure, Problem, RebootError};
use rekindle_kernel::spawn::{detach, disown};
use rekindle_protect::owned::{Over, Owned};
use rekindle_qemu::qmp::{Event, Qmp, QmpError};
use rekindle_qemu::vmm::Vmm;
use rekindle_store::StoreError;
use rekindle_vm::definition::{Definition, OnCrash, OnReboot};
use rekindle_vm::helpers::Helper;
use rekindle_vm::host::Host;
use rekindle_vm::life::{End, LifeError, SHUT_DOWN, run_state};
use rekindle_vm::lock::{self, is_at};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long a QEMU may take to answer.
const ANSWER: Duration = Duration::from_secs(10);
/// How long is waited for the guest at a time.
const LONG: Duration = Duration::from_secs(24 * 3600);
/// Between two looks at what cannot be waited for.
const LOOK: Duration = Duration::from_millis(50);
/// How long an operation in hand may be in the way of a reboot.
const BUSY: Duration = Duration::from_secs(600);
/// A guest that panics so soon after it has gone on from a phase may have its reason there: it is booted.
const SOON: Duration = Duration::from_secs(60);
/// How long until a store that could not be told something is told it again.
const STORE: Duration = Duration::from_secs(1);
/// How long a process may take to begin.
const BEGINNING: Duration = Duration::from_secs(10);
/// How long a VM without a QEMU may be between two of them.
const BETWEEN: Duration = Duration::from_secs(5);

/// What a guest has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Happened {
    Rebooted,
    PoweredOff,
    Panicked,
}

/// Start the process for a VM that Rekindle has started, unless it runs, and wait until it has begun.
///
/// # Errors
/// The system's; that it has ended instead.
pub fn start(rundir: &RunDir, state: &State) -> io::Result<()> {
    if state.attached.is_none() { spawn(rundir, "watch", &Helper::Watch) } else { Ok(()) }
}

/// Start `rekindle COMMAND NAME`, which is that helper of the VM, and wait until it has its lock. Where it runs already nothing is done.
pub(super) fn spawn(rundir: &RunDir, name: &str, helper: &Helper) -> io::Result<()> {
    if helper.process(rundir).is_some() {
        return Ok(());
    }
    let log = rundir.file(&format!("{name}.log"));
    let open = || OpenOptions::new().create(true).append(true).mode(0o600).open(&log);
    let mut command = Command::new(std::env::current_exe()?);
    command.args([name, rundir.name()]).stdout(open()?).stderr(open()?);
    if let Some(root) = rundir.path().parent() {
        command.env("REKINDLE_RUN_DIR", root);
    }
    // A fault that is injected into this process is not one of those that it starts.
    let mut child = detach(command.env_remove("REKINDLE_FAULT")).stdin(Stdio::null()).spawn()?;
    let deadline = Instant::now() + BEGINNING;
    while helper.process(rundir).is_none() && child.try_wait()?.is_none() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
    // It ends without an error where another one was faster, and where the VM is gone.
    let failed = child.try_wait()?.filter(|status| !status.success());
    disown(child);
    match failed {
        Some(status) => Err(io::Error::other(format!("`rekindle {name}` has ended: {status}; see {}", log.display()))),
        None => Ok(()),
    }
}

/// Why it waits no more.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// A file of the run directory.
    #[error("run directory of VM {name}")]
    RunDir {
        /// The VM.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Wait, until the VM is gone or its QEMU has ended and is not replaced.
///
/// # Errors
/// [`WatchError`].
pub fn run(host: &Host, name: &str) -> Result<(), WatchError> {
    let rundir = RunDir::new(&host.root, name);
    let failed = |source| WatchError::RunDir { name: name.to_owned(), source };
    let Some(lock) = lock_file(&rundir.watch_lock()).map_err(failed)? else { return Ok(()) };
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| Helpers::new(&rundir, host.log_limit).keep(&ended));
        let _end = EndOnDrop(&ended);
        guests(host, &rundir, &lock)
    })
}

/// Sets a flag on drop, also during a panic.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Reboot the VM's guests that reboot themselves or panic, until the VM is gone or its QEMU has ended and is not replaced.
fn guests(host: &Host, rundir: &RunDir, lock: &File) -> Result<(), WatchError> {
    let name = rundir.name();
    let failed = |source| WatchError::RunDir { name: name.to_owned(), source };
    let mut gone_on: Option<Instant> = None;
    loop {
        // The VM of this name may be another one by now, with another process that watches it.
        let is_ours = is_at(lock, &rundir.watch_lock()).map_err(failed)?;
        let Some((vmm, definition)) = next(rundir).map_err(failed)?.filter(|_| is_ours) else { return Ok(()) };
        if !definition.watches_guest() {
            while !vmm.process().wait_end(LONG).map_err(failed)? {}
            continue;
        }
        match wait(rundir, &vmm, &definition) {
            Ok(Some(Happened::PoweredOff) | None) => {}
            Ok(Some(what @ (Happened::Rebooted | Happened::Panicked))) => {
                tracing::info!(
                    "the guest has {}: it is booted",
                    if what == Happened::Rebooted { "rebooted itself" } else { "panicked" }
                );
                let is_soon = what == Happened::Panicked && gone_on.is_some_and(|at| at.elapsed() < SOON);
                let how = if is_soon { usual(host, name) } else { how(host, name, &definition, what) };
                match again(host, name, &vmm, how) {
                    Ok(()) => gone_on = (how == How::Phase).then(Instant::now),
                    // Its helpers are still needed, and it may be booted by hand.
                    Err(e) => {
                        tracing::error!(
                            "{name}: the guest could not be rebooted: {}; rekindle recover {name}",
                            chain(&e)
                        );
                    }
                }
            }
            Err(e) => {
                tracing::debug!("QEMU (process {}): {e}", vmm.pid);
                thread::sleep(LOOK);
            }
        }
        // It ends, or is being replaced.
        while vmm.is_alive() && is_done(&vmm) {
            thread::sleep(LOOK);
        }
    }
}

/// Whether a QEMU has nothing to do any more.
fn is_done(vmm: &Vmm) -> bool {
    let state = Qmp::connect(&vmm.directory().events(), ANSWER).and_then(|mut qmp| run_state(&mut qmp));
    state.is_ok_and(|state| SHUT_DOWN.contains(&state.as_str()))
}

/// One at a time.
pub(super) fn lock_file(path: &Path) -> io::Result<Option<File>> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// The VM's QEMU; none if it has none any more.
pub(super) fn next(rundir: &RunDir) -> io::Result<Option<(Vmm, Definition)>> {
    let mut deadline = Instant::now() + BETWEEN;
    loop {
        if let Some(State { vmm: Some(vmm), definition, .. }) = State::read(rundir)?
            && vmm.is_alive()
        {
            return Ok(Some((vmm, definition)));
        }
        if !rundir.exists() || Instant::now() > deadline {
            return Ok(None);
        }
        if lock::holder(rundir).is_some() {
            deadline = Instant::now() + BETWEEN;
        }
        thread::sleep(LOOK);
    }
}

/// Wait for what the guest does that is to be dealt with here. One that powers itself off has its QEMU ended.
fn wait(rundir: &RunDir, vmm: &Vmm, definition: &Definition) -> Result<Option<Happened>, QmpError> {
    let mut qmp = Qmp::connect(&vmm.directory().events(), ANSWER)?;
    let mut actions = serde_json::Map::new();
    if definition.on_reboot != OnReboot::Reset {
        actions.insert("reboot".into(), "shutdown".into());
        actions.insert("shutdown".into(), "pause".into());
    }
    if definition.on_crash != OnCrash::Leave {
        actions.insert("panic".into(), "pause".into());
    }
    qmp.execute::<Value>("set-action", actions)?;
    // Before that it would have been reset in place, or would have ended.
    let wanted = |event: &Event| match event.name.as_str() {
        "SHUTDOWN" => match event.data.get("reason").and_then(Value::as_str) {
            Some("guest-reset") => Some(Happened::Rebooted),
            Some("guest-shutdown") => Some(Happened::PoweredOff),
            // What `rekindle` does itself.
            _ => None,
        },
        "GUEST_PANICKED" => Some(Happened::Panicked),
        _ => None,
    };
    let happened = loop {
        match qmp.wait_event("SHUTDOWN", LONG, wanted) {
            Ok(happened) => break happened,
            Err(QmpError::Timeout { .. }) => {}
            Err(QmpError::Closed { .. }) => return Ok(None),
            Err(e) => return Err(e),
        }
    };
    if happened == Happened::PoweredOff {
        report_end(rundir, vmm);
        qmp.execute::<Value>("quit", json!({}))?;
    }
    Ok(Some(happened))
}

/// A guest of which a store has checkpoints has shut itself down in order: it is not to be gone back behind that. As long as the store
/// cannot be told its QEMU stays, stopped, by which whoever looks sees that it has; unless somebody ends it meanwhile.
fn report_end(rundir: &RunDir, vmm: &Vmm) {
    let mut said = false;
    // Whoever is at work on it has asked the guest for that, or knows what comes of it.
    while vmm.is_alive() && lock::holder(rundir).is_none() {
        let told = match (Owned::read(rundir), State::read(rundir)) {
            (Ok(Some(owned)), Ok(Some(state))) => owned.report_end(rundir, &state),
            (Ok(_), Ok(_)) => Ok(()),
            (Err(e), _) => Err(e.into()),
            (_, Err(e)) => Err(e.into()),
        };
        match told {
            Ok(()) => return,
            // Somebody else has the guest: its end here is of no concern to the store.
            Err(e) if e.is::<Over>() || e.downcast_ref::<StoreError>().is_some_and(|e| e.kind() == "superseded") => {
                return;
            }
            Err(e) => {
                if !std::mem::replace(&mut said, true) {
                    let name = rundir.name();
                    tracing::warn!("{name} has shut down; its store cannot be told, and is asked again: {e}");
                }
                thread::sleep(STORE);
            }
        }
    }
}

/// How a guest that has done that is rebooted. Where nothing can be kept it is booted all the same.
fn how(host: &Host, name: &str, definition: &Definition, what: Happened) -> How {
    let by_phase = match what {
        Happened::Panicked => definition.on_crash == OnCrash::Phase,
        Happened::Rebooted | Happened::PoweredOff => definition.on_reboot == OnReboot::Phase,
    };
    if by_phase { How::Phase } else { usual(host, name) }
}

/// Reboot it, when whoever is at work on it is done; not if that has booted it meanwhile.
fn again(host: &Host, name: &str, ended: &Vmm, how: How) -> Result<(), Failure> {
    let is_another = |state: &State| {
        let other = state.vmm.as_ref() != Some(ended);
        other.then(|| Problem("it runs in another QEMU already".into()))
    };
    let deadline = Instant::now() + BUSY;
    loop {
        let done = match how {
            How::Phase => phase::reboot(host, name, None, End::Shutdown, is_another),
            How::Cold | How::WarmCache | How::Kexec => {
                boot_unless(host, name, how == How::WarmCache, End::Shutdown, is_another)
            }
        };
        match done {
            Err(failure)
                if matches!(*failure.error, RebootError::Life(LifeError::Lock(_))) && Instant::now() < deadline =>
            {
                thread::sleep(LOOK);
            }
            // `rekindle stop`, `recover` or another reboot was faster.
            Err(failure)
                if matches!(
                    *failure.error,
                    RebootError::Against { .. }
                        | RebootError::Life(LifeError::Unknown { .. } | LifeError::Ended { .. })
                ) =>
            {
                return Ok(());
            }
            other => return other.map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_without_a_warm_cache_has_its_guest_reset_in_place() {
        let text = "name = \"x\"\n[boot]\nkernel = \"/bin/true\"\n";
        let definition = Definition::parse(text, "/", "x.toml").unwrap();
        assert!(!definition.watches_guest());
        assert!(Definition { on_crash: OnCrash::WarmCache, ..definition.clone() }.watches_guest());
        assert!(Definition { on_reboot: OnReboot::Phase, ..definition }.watches_guest());
    }
}
