//! Waits beside a VM until its guest announces a phase of its boot, or is healthy, and has that saved as a candidate, unless there is one
//! already that may be used.
//!
//! A process of its own, `rekindle phases NAME`, started by `run`, `recover`, `restore` and every reboot of the guest. If it has died, the guest's boot waits for a
//! moment at each phase and goes on; what was saved is there.

use super::health::Health;
use super::port::Port;
use super::save::{Saved, save};
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

/// How long is waited for the guest at a time.
const LONG: Duration = Duration::from_secs(3600);
/// Between two looks at whether it is healthy, and at what cannot be waited for.
const BETWEEN: Duration = Duration::from_millis(100);
/// Phases that are not saved are reported so often in this time at most.
const REPORTS: (u32, Duration) = (10, Duration::from_secs(60));
/// Between two looks for the VM's next QEMU.
const LOOK: Duration = Duration::from_millis(20);

/// Start the process, if the VM's definition wants it. One that is there already is enough: the second one ends.
///
/// # Errors
/// The system's.
pub fn start(rundir: &RunDir, definition: &Definition) -> io::Result<()> {
    if definition.phase.is_empty() { Ok(()) } else { watch::spawn(rundir, "phases", &Helper::Phases) }
}

/// Wait, until the VM is gone or its QEMU has ended and is not replaced.
///
/// # Errors
/// [`WatchError`].
pub fn run(host: &Host, name: &str) -> Result<(), WatchError> {
    let rundir = RunDir::new(&host.root, name);
    let failed = |source| WatchError::RunDir { name: name.to_owned(), source };
    let Some(_lock) = watch::lock_file(&rundir.phases_lock()).map_err(failed)? else { return Ok(()) };
    let mut expected = false;
    let mut throttle = Throttle::new(REPORTS.0, REPORTS.1);
    while let Some((vmm, definition)) = watch::next(&rundir).map_err(failed)? {
        let health = Health::of(&definition).unwrap_or_else(|e| {
            tracing::warn!("whether the guest is healthy cannot be asked: {e}");
            None
        });
        if let Err(e) = listen(host, &rundir, &vmm, health.as_ref(), (&mut expected, &mut throttle)) {
            tracing::debug!("QEMU (process {}): {e}", vmm.pid);
        }
        // It ends, or is being replaced; or somebody else has its port.
        thread::sleep(LOOK);
    }
    Ok(())
}

/// Serve one QEMU's guest until that QEMU ends. `expected`: it is to be seen when it is healthy.
fn listen(
    host: &Host,
    rundir: &RunDir,
    vmm: &Vmm,
    health: Option<&Health>,
    (expected, throttle): (&mut bool, &mut Throttle),
) -> io::Result<()> {
    let mut port = Port::connect(vmm)?;
    *expected |= phases::take_expected(rundir);
    loop {
        let awaited = health.filter(|_| *expected);
        let announced = port.announced(if awaited.is_some() { BETWEEN } else { LONG })?;
        match (announced, awaited) {
            (Some(phase), _) => port.answer(&keep(host, rundir, vmm, &phase, throttle))?,
            (None, Some(health)) if health.is_well(vmm) => {
                *expected = false;
                keep(host, rundir, vmm, &health.phase, throttle);
            }
            (None, _) => {}
        }
    }
}

/// Have a candidate of a phase; what a guest that waits for it is answered.
fn keep(host: &Host, rundir: &RunDir, vmm: &Vmm, phase: &str, throttle: &mut Throttle) -> String {
    match save(host, rundir, vmm, phase) {
        Ok(Saved::Now { stopped_us, bytes }) => {
            tracing::info!("phase {phase} is saved: {bytes} bytes, the guest was stopped for {stopped_us} µs");
            "saved".into()
        }
        Ok(Saved::Before) => "kept".into(),
        Err(why) => {
            // A guest may announce one all the time.
            match throttle.admit(Instant::now()) {
                Some(0) => tracing::warn!("phase {phase} is not saved: {why}"),
                Some(left_out) => {
                    tracing::warn!("phase {phase} is not saved: {why}; {left_out} more were not reported")
                }
                None => {}
            }
            format!("skipped {why}")
        }
    }
}
