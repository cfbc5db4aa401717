//! `rekindle watch`: one process for each VM that Rekindle has started. It restarts the processes that serve the VM
//! ([`super::helpers`]), and reboots a guest that reboots itself or panics: with a warm cache, or from a phase.
//!
//! By default, QEMU resets a guest that reboots itself in place, which discards its cache. So QEMU is configured to
//! stop instead (`set-action`), and this process does the work of `rekindle reboot os --how warm-cache | phase`. It
//! serves every QEMU that the VM gets, and ends with the VM. If it has died, a guest that reboots itself stays stopped
//! until `rekindle recover` boots it and starts another watch process.

use super::helpers::{HelperSupervisor, chain};
use super::{OsRebootMethod, default_method, phase, shut_down_and_boot};
use crate::error::{Failure, Problem, RebootError};
use rekindle_handover::HandoverError;
use rekindle_kernel::spawn::{detach, disown};
use rekindle_life::shutdown::EndMethod;
use rekindle_protect::owned::{OwnedElsewhere, OwnerRecord};
use rekindle_qemu::guest::run_state;
use rekindle_qemu::qmp::{Event, Qmp, QmpError};
use rekindle_qemu::vmm::Vmm;
use rekindle_store::StoreError;
use rekindle_vm::definition::{Definition, OnCrash, OnReboot};
use rekindle_vm::error::LifeError;
use rekindle_vm::helpers::Helper;
use rekindle_vm::host::Host;
use rekindle_vm::lock::{self, is_at};
use rekindle_vm::qemu::ENDED_RUN_STATES;
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

const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of one wait for an event.
const EVENT_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long another operation on the VM may delay a reboot.
const BUSY_TIMEOUT: Duration = Duration::from_secs(600);
/// A guest that panics within this time after it continued from a phase is booted: it may have inherited the cause.
const SUSPECT_PERIOD: Duration = Duration::from_secs(60);
/// Interval between attempts to notify an unreachable store.
const STORE_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How long a process may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a VM may be without a QEMU while it is replaced.
const REPLACEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Event that a guest has caused by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GuestEvent {
    Rebooted,
    PoweredOff,
    Panicked,
}

/// Starts the watch process of a VM that Rekindle has started, unless it runs, and waits until it has started.
///
/// # Errors
/// Errors of starting the process, or an error that states how the process has ended.
pub fn start(rundir: &RunDir, state: &State) -> io::Result<()> {
    if state.attached.is_none() { spawn(rundir, "watch", &Helper::Watch) } else { Ok(()) }
}

/// Starts `rekindle NAME VM`, the process of the VM's `helper`, and waits until it holds its lock. Does nothing if the
/// helper runs.
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
    // An injected fault is meant for this process only, not for the processes that it starts.
    let mut child = detach(command.env_remove("REKINDLE_FAULT")).stdin(Stdio::null()).spawn()?;
    let deadline = Instant::now() + START_TIMEOUT;
    while helper.process(rundir).is_none() && child.try_wait()?.is_none() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
    // The process ends without an error if another instance was faster, or if the VM does not exist any more.
    let failed = child.try_wait()?.filter(|status| !status.success());
    disown(child);
    match failed {
        Some(status) => Err(io::Error::other(format!("`rekindle {name}` ended with {status}; see {}", log.display()))),
        None => Ok(()),
    }
}

/// Error that ends the watch process or the saver of phases.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    #[error("cannot read the run directory of VM {name}")]
    RunDir {
        name: String,
        #[source]
        source: io::Error,
    },
}

/// Serves a VM until it is removed, or until its QEMU has ended and is not replaced.
pub fn run(host: &Host, name: &str) -> Result<(), WatchError> {
    let rundir = RunDir::new(&host.root, name);
    let failed = |source| WatchError::RunDir { name: name.to_owned(), source };
    let Some(lock) = lock_file(&rundir.watch_lock()).map_err(failed)? else { return Ok(()) };
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| HelperSupervisor::new(&rundir, host.log_limit).supervise(&ended));
        let _end = EndOnDrop(&ended);
        reboot_guests(host, &rundir, &lock)
    })
}

/// Sets a flag on drop, also during a panic.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Reboots the VM's guest whenever it reboots itself or panics, until the VM is removed, or until its QEMU has ended
/// and is not replaced.
fn reboot_guests(host: &Host, rundir: &RunDir, lock: &File) -> Result<(), WatchError> {
    let name = rundir.name();
    let failed = |source| WatchError::RunDir { name: name.to_owned(), source };
    let mut resumed_from_phase: Option<Instant> = None;
    loop {
        // The name may belong to another VM by now. That VM has its own watch process.
        let is_ours = is_at(lock, &rundir.watch_lock()).map_err(failed)?;
        let Some((vmm, definition)) = current_qemu(rundir).map_err(failed)?.filter(|_| is_ours) else { return Ok(()) };
        if !definition.watches_guest() {
            while !vmm.process().wait_end(EVENT_TIMEOUT).map_err(failed)? {}
            continue;
        }
        match wait(rundir, &vmm, &definition) {
            Ok(Some(GuestEvent::PoweredOff) | None) => {}
            Ok(Some(what @ (GuestEvent::Rebooted | GuestEvent::Panicked))) => {
                tracing::info!(
                    "the guest has {}; rebooting it",
                    if what == GuestEvent::Rebooted { "rebooted itself" } else { "panicked" }
                );
                let is_suspect =
                    what == GuestEvent::Panicked && resumed_from_phase.is_some_and(|at| at.elapsed() < SUSPECT_PERIOD);
                let how = if is_suspect { default_method(host, name) } else { how(host, name, &definition, what) };
                match reboot_ended_guest(host, name, &vmm, how) {
                    Ok(()) => resumed_from_phase = (how == OsRebootMethod::Phase).then(Instant::now),
                    // Continue: the VM's helpers are still needed, and the user may boot the guest.
                    Err(e) => {
                        tracing::error!("{name}: cannot reboot the guest: {}; run: rekindle recover {name}", chain(&e));
                    }
                }
            }
            Err(e) => {
                tracing::debug!("QEMU (process {}): {e}", vmm.pid);
                thread::sleep(POLL_INTERVAL);
            }
        }
        // QEMU is ending or being replaced.
        while vmm.is_alive() && is_shut_down(&vmm) {
            thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Returns whether the guest of this QEMU has shut down.
fn is_shut_down(vmm: &Vmm) -> bool {
    let state = Qmp::connect(&vmm.directory().events(), ANSWER_TIMEOUT).and_then(|mut qmp| run_state(&mut qmp));
    state.is_ok_and(|state| ENDED_RUN_STATES.contains(&state.as_str()))
}

/// Takes the lock that ensures a single instance. `None` if another process holds it.
pub(super) fn lock_file(path: &Path) -> io::Result<Option<File>> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Returns the VM's QEMU and definition. `None` if the VM has no QEMU any more.
pub(super) fn current_qemu(rundir: &RunDir) -> io::Result<Option<(Vmm, Definition)>> {
    let mut deadline = Instant::now() + REPLACEMENT_TIMEOUT;
    loop {
        if let Some(State { vmm: Some(vmm), definition, .. }) = State::read(rundir)?
            && vmm.is_alive()
        {
            return Ok(Some((vmm, definition)));
        }
        if !rundir.exists() || Instant::now() > deadline {
            return Ok(None);
        }
        if lock::running_operation(rundir).is_some() {
            deadline = Instant::now() + REPLACEMENT_TIMEOUT;
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Waits until the guest reboots itself, powers off or panics. Ends the QEMU of a guest that has powered off.
fn wait(rundir: &RunDir, vmm: &Vmm, definition: &Definition) -> Result<Option<GuestEvent>, QmpError> {
    let mut qmp = Qmp::connect(&vmm.directory().events(), ANSWER_TIMEOUT)?;
    let mut actions = serde_json::Map::new();
    if definition.on_reboot != OnReboot::Reset {
        actions.insert("reboot".into(), "shutdown".into());
        actions.insert("shutdown".into(), "pause".into());
    }
    if definition.on_crash != OnCrash::Leave {
        actions.insert("panic".into(), "pause".into());
    }
    qmp.execute::<Value>("set-action", actions)?;
    // Earlier events had QEMU's default action: the guest was reset in place, or QEMU ended.
    let wanted = |event: &Event| match event.name.as_str() {
        "SHUTDOWN" => match event.data.get("reason").and_then(Value::as_str) {
            Some("guest-reset") => Some(GuestEvent::Rebooted),
            Some("guest-shutdown") => Some(GuestEvent::PoweredOff),
            // `rekindle` itself has caused the shutdown.
            _ => None,
        },
        "GUEST_PANICKED" => Some(GuestEvent::Panicked),
        _ => None,
    };
    let event = loop {
        match qmp.wait_event("SHUTDOWN", EVENT_TIMEOUT, wanted) {
            Ok(event) => break event,
            Err(QmpError::Timeout { .. }) => {}
            Err(QmpError::Closed { .. }) => return Ok(None),
            Err(e) => return Err(e),
        }
    };
    if event == GuestEvent::PoweredOff {
        report_end(rundir, vmm);
        qmp.execute::<Value>("quit", json!({}))?;
    }
    Ok(Some(event))
}

/// Reports to the store that a protected guest has shut down cleanly, so that it is not rolled back to its last
/// checkpoint. While the store is unreachable, the stopped QEMU stays, which shows that the guest has shut down, until
/// another operation ends it.
fn report_end(rundir: &RunDir, vmm: &Vmm) {
    let mut reported = false;
    // An operation that holds the VM's lock has requested the shutdown, or handles it.
    while vmm.is_alive() && lock::running_operation(rundir).is_none() {
        let result = match (OwnerRecord::read(rundir), State::read(rundir)) {
            (Ok(Some(owned)), Ok(Some(state))) => owned.report_shutdown(rundir, &state),
            (Ok(_), Ok(_)) => Ok(()),
            (Err(e), _) => Err(e.into()),
            (_, Err(e)) => Err(e.into()),
        };
        match result {
            Ok(()) => return,
            // Another host owns the guest, so the end of this QEMU does not concern the store.
            Err(e)
                if e.is::<OwnedElsewhere>()
                    || e.downcast_ref::<StoreError>().is_some_and(|e| e.kind() == "superseded") =>
            {
                return;
            }
            Err(e) => {
                if !std::mem::replace(&mut reported, true) {
                    let name = rundir.name();
                    tracing::warn!("{name} has shut down; cannot report this to its store, retrying: {e}");
                }
                thread::sleep(STORE_RETRY_INTERVAL);
            }
        }
    }
}

/// Returns the method by which the guest is rebooted after this event.
fn how(host: &Host, name: &str, definition: &Definition, what: GuestEvent) -> OsRebootMethod {
    let by_phase = match what {
        GuestEvent::Panicked => definition.on_crash == OnCrash::Phase,
        GuestEvent::Rebooted | GuestEvent::PoweredOff => definition.on_reboot == OnReboot::Phase,
    };
    if by_phase { OsRebootMethod::Phase } else { default_method(host, name) }
}

/// Reboots the ended guest once no other operation holds the VM. Does nothing if such an operation has booted or
/// stopped the VM already.
fn reboot_ended_guest(host: &Host, name: &str, ended: &Vmm, how: OsRebootMethod) -> Result<(), Failure> {
    let is_another = |state: &State| {
        let other = state.vmm.as_ref() != Some(ended);
        other.then(|| Problem("it already runs in another QEMU".into()))
    };
    let deadline = Instant::now() + BUSY_TIMEOUT;
    loop {
        let done = match how {
            OsRebootMethod::Phase => phase::reboot(host, name, None, EndMethod::Shutdown, is_another),
            OsRebootMethod::Cold | OsRebootMethod::WarmCache | OsRebootMethod::Kexec => {
                shut_down_and_boot(host, name, how == OsRebootMethod::WarmCache, EndMethod::Shutdown, is_another)
            }
        };
        match done {
            Err(failure)
                if matches!(*failure.error, RebootError::Handover(HandoverError::Life(LifeError::Lock(_))))
                    && Instant::now() < deadline =>
            {
                thread::sleep(POLL_INTERVAL);
            }
            // `rekindle stop`, `recover` or another reboot was faster.
            Err(failure)
                if matches!(
                    *failure.error,
                    RebootError::Prevented { .. }
                        | RebootError::Handover(HandoverError::Life(
                            LifeError::Unknown { .. } | LifeError::Ended { .. }
                        ))
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
