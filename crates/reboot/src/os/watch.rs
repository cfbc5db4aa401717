//! `rekindle watch`: one process for each VM that Rekindle has started. It restarts the processes that serve the VM
//! ([`super::supervisor`]), and reboots a guest that reboots itself or panics: with a warm cache, or from a phase.
//!
//! By default, QEMU resets a guest that reboots itself in place, which discards its cache. So QEMU is configured to
//! stop instead (`set-action`), and this process does the work of `rekindle reboot --how warm-cache | phase`. It
//! serves every QEMU that the VM gets, and ends with the VM. If it has died, a guest that reboots itself stays stopped
//! until `rekindle recover` boots it and starts another watch process.

use super::helper_process::{HelperError, ServedQemu, current_qemu, lock_single_instance, start_helper};
use super::supervisor::HelperSupervisor;
use super::{CacheUse, OsRebootMethod, default_method, phase, shut_down_and_boot};
use crate::error::{Failure, Problem, RebootError};
use rekindle_handover::HandoverError;
use rekindle_life::shutdown::EndMethod;
use rekindle_protect::owned::{OwnedElsewhere, OwnerRecord};
use rekindle_qemu::guest::run_state;
use rekindle_qemu::qmp::{Event, Qmp, QmpError};
use rekindle_qemu::vmm::Vmm;
use rekindle_store::StoreError;
use rekindle_vm::causes::with_causes;
use rekindle_vm::definition::{Definition, OnCrash, OnReboot};
use rekindle_vm::error::LifeError;
use rekindle_vm::events::{self, EventKind};
use rekindle_vm::helpers::Helper;
use rekindle_vm::host::Host;
use rekindle_vm::lock::{self, is_at};
use rekindle_vm::qemu::ENDED_RUN_STATES;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use serde_json::{Value, json};
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long QEMU may take to answer.
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
    if state.attached.is_none() { start_helper(rundir, "watch", &Helper::Watch) } else { Ok(()) }
}

/// Serves a VM until it is removed, or until its QEMU has ended and is not replaced.
pub fn run(host: &Host, name: &str) -> Result<(), HelperError> {
    let rundir = RunDir::new(&host.root, name);
    let lock = lock_single_instance(&rundir.watch_lock()).map_err(HelperError::run_dir(name))?;
    let Some(lock) = lock else { return Ok(()) };
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| HelperSupervisor::new(&rundir, host.log_limit).supervise(&has_ended));
        let _set_on_drop = SetOnDrop(&has_ended);
        reboot_guests(host, &rundir, &lock)
    })
}

/// Sets a flag on drop, also during a panic.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Reboots the VM's guest whenever it reboots itself or panics, until the VM is removed, or until its QEMU has ended
/// and is not replaced.
fn reboot_guests(host: &Host, rundir: &RunDir, lock: &File) -> Result<(), HelperError> {
    let name = rundir.name();
    let failed = HelperError::run_dir(name);
    let mut resumed_from_phase: Option<Instant> = None;
    loop {
        // The name may belong to another VM by now. That VM has its own watch process.
        let is_ours = is_at(lock, &rundir.watch_lock()).map_err(&failed)?;
        let Some(qemu) = current_qemu(rundir).map_err(&failed)?.filter(|_| is_ours) else { return Ok(()) };
        let ServedQemu { vmm, definition } = qemu;
        if !definition.watches_guest() {
            while !vmm.process().wait_end(EVENT_TIMEOUT).map_err(&failed)? {}
            continue;
        }
        match wait_for_event(host, rundir, &vmm, &definition) {
            Ok(Some(GuestEvent::PoweredOff) | None) => {}
            Ok(Some(event @ (GuestEvent::Rebooted | GuestEvent::Panicked))) => {
                let what = if event == GuestEvent::Rebooted { "rebooted itself" } else { "panicked" };
                tracing::info!("the guest has {what}; rebooting it");
                events::record(rundir, EventKind::GuestRebooted { panicked: event == GuestEvent::Panicked });
                let is_suspect = event == GuestEvent::Panicked
                    && resumed_from_phase.is_some_and(|resumed| resumed.elapsed() < SUSPECT_PERIOD);
                let how = match is_suspect {
                    true => default_method(host, name),
                    false => choose_method(host, name, &definition, event),
                };
                match reboot_ended_guest(host, name, &vmm, how) {
                    Ok(()) => resumed_from_phase = (how == OsRebootMethod::Phase).then(Instant::now),
                    // Continue: the VM's helpers are still needed, and the user may boot the guest.
                    Err(e) => {
                        let why = with_causes(&e);
                        tracing::error!("{name}: cannot reboot the guest: {why}; run: rekindle recover {name}");
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

/// Waits until the guest reboots itself, powers off or panics. Ends the QEMU of a guest that has powered off. `None` if
/// QEMU has ended before that.
fn wait_for_event(
    host: &Host,
    rundir: &RunDir,
    vmm: &Vmm,
    definition: &Definition,
) -> Result<Option<GuestEvent>, QmpError> {
    let mut qmp = Qmp::connect(&vmm.directory().events(), ANSWER_TIMEOUT)?;
    set_actions(&mut qmp, definition)?;
    let event = loop {
        match qmp.wait_event("SHUTDOWN", EVENT_TIMEOUT, guest_event) {
            Ok(event) => break event,
            Err(QmpError::Timeout { .. }) => {}
            Err(QmpError::Closed { .. }) => return Ok(None),
            Err(e) => return Err(e),
        }
    };
    if event == GuestEvent::PoweredOff {
        report_shutdown(host, rundir, vmm);
        qmp.execute::<Value>("quit", json!({}))?;
    }
    Ok(Some(event))
}

/// Configures QEMU to stop the guest on the events that this process handles. Events before that had QEMU's default
/// action: the guest was reset in place, or QEMU ended.
fn set_actions(qmp: &mut Qmp, definition: &Definition) -> Result<(), QmpError> {
    let mut actions = serde_json::Map::new();
    if definition.on_reboot != OnReboot::Reset {
        actions.insert("reboot".into(), "shutdown".into());
        actions.insert("shutdown".into(), "pause".into());
    }
    if definition.on_crash != OnCrash::Leave {
        actions.insert("panic".into(), "pause".into());
    }
    qmp.execute::<Value>("set-action", actions)?;
    Ok(())
}

fn guest_event(event: &Event) -> Option<GuestEvent> {
    match event.name.as_str() {
        "SHUTDOWN" => match event.data.get("reason").and_then(Value::as_str) {
            Some("guest-reset") => Some(GuestEvent::Rebooted),
            Some("guest-shutdown") => Some(GuestEvent::PoweredOff),
            // `rekindle` itself has caused the shutdown.
            _ => None,
        },
        "GUEST_PANICKED" => Some(GuestEvent::Panicked),
        _ => None,
    }
}

/// Reports to the store that a protected guest has shut down cleanly, so that it is not rolled back to its last
/// checkpoint. While the store is unreachable, the stopped QEMU stays, which shows that the guest has shut down, until
/// another operation ends it.
fn report_shutdown(host: &Host, rundir: &RunDir, vmm: &Vmm) {
    let mut is_failure_logged = false;
    // An operation that holds the VM's lock has requested the shutdown, or handles it.
    while vmm.is_alive() && lock::running_operation(rundir).is_none() {
        let result = match (OwnerRecord::read(rundir), State::read(rundir)) {
            (Ok(Some(owner)), Ok(Some(state))) => owner.report_shutdown(host, rundir, &state),
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
                if !std::mem::replace(&mut is_failure_logged, true) {
                    let name = rundir.name();
                    tracing::warn!("{name} has shut down; cannot report this to its store, retrying: {e}");
                }
                thread::sleep(STORE_RETRY_INTERVAL);
            }
        }
    }
}

/// Returns the method by which the guest is rebooted after this event.
fn choose_method(host: &Host, name: &str, definition: &Definition, event: GuestEvent) -> OsRebootMethod {
    let by_phase = match event {
        GuestEvent::Panicked => definition.on_crash == OnCrash::Phase,
        GuestEvent::Rebooted | GuestEvent::PoweredOff => definition.on_reboot == OnReboot::Phase,
    };
    if by_phase { OsRebootMethod::Phase } else { default_method(host, name) }
}

/// Reboots the ended guest once no other operation holds the VM. Does nothing if such an operation has booted or
/// stopped the VM already.
fn reboot_ended_guest(host: &Host, name: &str, ended_qemu: &Vmm, how: OsRebootMethod) -> Result<(), Failure> {
    let runs_elsewhere = |state: &State| {
        let is_replaced = state.vmm.as_ref() != Some(ended_qemu);
        is_replaced.then(|| Problem("it already runs in another QEMU".into()))
    };
    let deadline = Instant::now() + BUSY_TIMEOUT;
    loop {
        let rebooted = match how {
            OsRebootMethod::Phase => phase::reboot(host, name, None, EndMethod::Shutdown, runs_elsewhere),
            OsRebootMethod::WarmCache => {
                shut_down_and_boot(host, name, CacheUse::Retain, EndMethod::Shutdown, runs_elsewhere)
            }
            OsRebootMethod::Cold | OsRebootMethod::Kexec => {
                shut_down_and_boot(host, name, CacheUse::Discard, EndMethod::Shutdown, runs_elsewhere)
            }
        };
        match rebooted {
            Ok(_) => return Ok(()),
            Err(failure) if is_vm_busy(&failure) && Instant::now() < deadline => thread::sleep(POLL_INTERVAL),
            Err(failure) if is_superseded(&failure) => return Ok(()),
            Err(failure) => return Err(failure),
        }
    }
}

fn is_vm_busy(failure: &Failure) -> bool {
    matches!(*failure.error, RebootError::Handover(HandoverError::Life(LifeError::Lock(_))))
}

/// Returns whether `rekindle stop`, `recover` or another reboot was faster.
fn is_superseded(failure: &Failure) -> bool {
    match &*failure.error {
        RebootError::Prevented { .. } => true,
        RebootError::Handover(HandoverError::Life(error)) => {
            matches!(error, LifeError::Unknown { .. } | LifeError::Ended { .. })
        }
        _ => false,
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
