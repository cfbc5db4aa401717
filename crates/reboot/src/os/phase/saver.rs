//! Waits until a VM's guest announces a phase of its boot, or is healthy, and has a candidate of that phase saved
//! unless a usable one exists.
//!
//! The saver is a process of its own, `rekindle phases NAME`, started by `run`, `recover`, `restore` and every reboot
//! of the guest. If it has died, the guest's boot waits a moment at each phase and continues; saved candidates remain.

use super::health::HealthyPhase;
use super::port::PhasePort;
use super::save::{SaveOutcome, save};
use crate::os::watch::{self, WatchError};
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::definition::Definition;
use rekindle_vm::helpers::Helper;
use rekindle_vm::host::Host;
use rekindle_vm::logs::Throttle;
use rekindle_vm::phases;
use rekindle_vm::rundir::RunDir;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

/// Timeout of one wait for an announcement.
const EVENT_TIMEOUT: Duration = Duration::from_secs(3600);
/// Interval between health checks.
const HEALTH_INTERVAL: Duration = Duration::from_millis(100);
/// At most this many unsaved phases are logged in this time.
const REPORT_LIMIT: (u32, Duration) = (10, Duration::from_secs(60));
/// Interval between checks for the VM's next QEMU.
const QEMU_INTERVAL: Duration = Duration::from_millis(20);

/// Starts the saver if the VM's definition names phases. If a saver runs already, the new one ends by itself.
///
/// # Errors
/// Errors of starting the process.
pub fn start(rundir: &RunDir, definition: &Definition) -> io::Result<()> {
    if definition.phase.is_empty() { Ok(()) } else { watch::spawn(rundir, "phases", &Helper::Phases) }
}

/// Serves a VM until it is removed, or until its QEMU has ended and is not replaced.
pub fn run(host: &Host, name: &str) -> Result<(), WatchError> {
    let rundir = RunDir::new(&host.root, name);
    let failed = |source| WatchError::RunDir { name: name.to_owned(), source };
    let Some(_lock) = watch::lock_file(&rundir.phases_lock()).map_err(failed)? else { return Ok(()) };
    let mut expected = false;
    let mut throttle = Throttle::new(REPORT_LIMIT.0, REPORT_LIMIT.1);
    while let Some((vmm, definition)) = watch::current_qemu(&rundir).map_err(failed)? {
        let health = HealthyPhase::of(&definition).unwrap_or_else(|e| {
            tracing::warn!("cannot check whether the guest is healthy: {e}");
            None
        });
        if let Err(e) = serve_guest(host, &rundir, &vmm, health.as_ref(), (&mut expected, &mut throttle)) {
            tracing::debug!("QEMU (process {}): {e}", vmm.pid);
        }
        // QEMU is ending or being replaced, or another client has its port.
        thread::sleep(QEMU_INTERVAL);
    }
    Ok(())
}

/// Serves the guest of one QEMU until that QEMU ends. `expected`: save the phase in which the guest is healthy next.
fn serve_guest(
    host: &Host,
    rundir: &RunDir,
    vmm: &Vmm,
    health: Option<&HealthyPhase>,
    (expected, throttle): (&mut bool, &mut Throttle),
) -> io::Result<()> {
    let mut port = PhasePort::connect(vmm)?;
    *expected |= phases::take_expected(rundir);
    loop {
        let awaited = health.filter(|_| *expected);
        let announced = port.next_phase(if awaited.is_some() { HEALTH_INTERVAL } else { EVENT_TIMEOUT })?;
        match (announced, awaited) {
            (Some(phase), _) => port.answer(&save_phase(host, rundir, vmm, &phase, throttle))?,
            (None, Some(health)) if health.is_healthy(vmm) => {
                *expected = false;
                save_phase(host, rundir, vmm, &health.phase, throttle);
            }
            (None, _) => {}
        }
    }
}

/// Saves a candidate of a phase unless a usable one exists. Returns the answer for the guest.
fn save_phase(host: &Host, rundir: &RunDir, vmm: &Vmm, phase: &str, throttle: &mut Throttle) -> String {
    match save(host, rundir, vmm, phase) {
        Ok(SaveOutcome::Saved { stopped_us, bytes }) => {
            tracing::info!("saved phase {phase}: {bytes} bytes, guest stopped for {stopped_us} µs");
            "saved".into()
        }
        Ok(SaveOutcome::Existing) => "kept".into(),
        Err(why) => {
            // Limit the log: a guest may announce phases continuously.
            match throttle.admit(Instant::now()) {
                Some(0) => tracing::warn!("phase {phase} was not saved: {why}"),
                Some(left_out) => {
                    tracing::warn!("phase {phase} was not saved: {why}; {left_out} similar messages were suppressed")
                }
                None => {}
            }
            format!("skipped {why}")
        }
    }
}
