//! Waits until a VM's guest announces a phase of its boot, or is healthy, and has a candidate of that phase saved
//! unless a usable one exists.
//!
//! The saver is a process of its own, `rekindle phases NAME`, started by `run`, `recover`, `restore` and every reboot
//! of the guest. If it has died, the guest's boot waits a moment at each phase and continues; saved candidates remain.

use super::health::HealthyPhase;
use super::port::PhasePort;
use super::save::{SaveOutcome, save};
use crate::os::helper_process::{HelperError, ServedQemu, current_qemu, lock_single_instance, start_helper};
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
/// At most this many unsaved phases are logged in [`LOG_PERIOD`].
const MAX_LOG_LINES: u32 = 10;
const LOG_PERIOD: Duration = Duration::from_secs(60);
/// Interval between checks for the VM's next QEMU.
const QEMU_INTERVAL: Duration = Duration::from_millis(20);

/// Starts the saver if the VM's definition names phases. If a saver runs already, the new one ends by itself.
///
/// # Errors
/// Errors of starting the process.
pub fn start(rundir: &RunDir, definition: &Definition) -> io::Result<()> {
    if definition.phase.is_empty() { Ok(()) } else { start_helper(rundir, "phases", &Helper::Phases) }
}

/// Serves a VM until it is removed, or until its QEMU has ended and is not replaced.
pub fn run(host: &Host, name: &str) -> Result<(), HelperError> {
    let rundir = RunDir::new(&host.root, name);
    let failed = HelperError::run_dir(name);
    let Some(_lock) = lock_single_instance(&rundir.phases_lock()).map_err(&failed)? else { return Ok(()) };
    let throttle = Throttle::new(MAX_LOG_LINES, LOG_PERIOD);
    let mut saver = PhaseSaver { host, rundir: &rundir, is_health_awaited: false, throttle };
    while let Some(ServedQemu { vmm, definition }) = current_qemu(&rundir).map_err(&failed)? {
        let healthy_phase = HealthyPhase::of(&definition).unwrap_or_else(|e| {
            tracing::warn!("cannot check whether the guest is healthy: {e}");
            None
        });
        if let Err(e) = saver.serve_guest(&vmm, healthy_phase.as_ref()) {
            tracing::debug!("QEMU (process {}): {e}", vmm.pid);
        }
        // QEMU is ending or being replaced, or another client has its port.
        thread::sleep(QEMU_INTERVAL);
    }
    Ok(())
}

/// Saves the phases of one VM's guests.
struct PhaseSaver<'a> {
    host: &'a Host,
    rundir: &'a RunDir,
    /// `true`: the phase in which the guest is healthy is still to be saved.
    is_health_awaited: bool,
    /// Limits the log: a guest may announce phases continuously.
    throttle: Throttle,
}

impl PhaseSaver<'_> {
    /// Serves the guest of one QEMU until that QEMU ends.
    fn serve_guest(&mut self, vmm: &Vmm, healthy_phase: Option<&HealthyPhase>) -> io::Result<()> {
        let mut port = PhasePort::connect(vmm)?;
        self.is_health_awaited |= phases::take_expected(self.rundir);
        loop {
            let awaited = healthy_phase.filter(|_| self.is_health_awaited);
            let announced = port.next_phase(if awaited.is_some() { HEALTH_INTERVAL } else { EVENT_TIMEOUT })?;
            match (announced, awaited) {
                (Some(phase), _) => port.answer(&self.save_phase(vmm, &phase))?,
                (None, Some(awaited)) if awaited.is_healthy(vmm) => {
                    self.is_health_awaited = false;
                    self.save_phase(vmm, &awaited.phase);
                }
                (None, _) => {}
            }
        }
    }

    /// Saves a candidate of a phase unless a usable one exists. Returns the answer for the guest.
    fn save_phase(&mut self, vmm: &Vmm, phase: &str) -> String {
        match save(self.host, self.rundir, vmm, phase) {
            Ok(SaveOutcome::Saved { stopped_us, bytes }) => {
                tracing::info!("saved phase {phase}: {bytes} bytes, guest stopped for {stopped_us} µs");
                "saved".into()
            }
            Ok(SaveOutcome::Existing) => "kept".into(),
            Err(why) => {
                match self.throttle.admit(Instant::now()) {
                    Some(0) => tracing::warn!("phase {phase} was not saved: {why}"),
                    Some(suppressed) => tracing::warn!(
                        "phase {phase} was not saved: {why}; {suppressed} similar messages were suppressed"
                    ),
                    None => {}
                }
                format!("skipped {why}")
            }
        }
    }
}
