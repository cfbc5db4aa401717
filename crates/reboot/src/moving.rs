//! Moves to another host that do not happen: the guest resumes here, and must have its disks.
//!
//! A move ends the servers of the guest's disks while the guest is stopped, and starts them again if the guest stays.
//! QEMU up to 9.0 (from a fix of December 2022 on, which 7.2's later versions have too) then never uses these disks
//! again: the device handles no event of its socket any more, and the guest waits for its disks for ever. Another QEMU
//! process connects them again, so the guest is handed over to one.

use crate::error::RebootError;
use crate::vmm::{self, RebootMethod, ReplaceOptions};
use rekindle_disk::control::Control;
use rekindle_protect::moving::source::{self, MoveSettings};
use rekindle_protect::moving::{MoveError, MoveEvent, MoveReport};
use rekindle_qemu::guest::run_state;
use rekindle_qemu::qmp::Version;
use rekindle_qemu::vmm::START_TIMEOUT;
use rekindle_vm::causes::with_causes;
use rekindle_vm::definition::Name;
use rekindle_vm::disks;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

/// The first QEMU that uses a disk again whose server was restarted while the guest was stopped.
const FIRST_THAT_RECONNECTS: Version = Version { major: 9, minor: 1, micro: 0 };
/// How long a resumed guest's device may take to initialize its disk server. QEMU connects every second.
const INITIALIZE_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Moves a VM to another host as [`source::start`] does. If the guest is resumed on this host instead, it has its disks.
///
/// # Errors
/// [`MoveError`] as for [`source::start`].
pub fn start(
    host: &Host,
    name: &Name,
    settings: &MoveSettings,
    interrupted: &Arc<AtomicBool>,
    report: &mut dyn FnMut(&MoveEvent),
) -> Result<MoveReport, MoveError> {
    source::start(host, name, settings, interrupted, report).inspect_err(|e| {
        if !e.needs_recovery()
            && let Err(e) = reconnect_disks(host, name.as_str())
        {
            let why = with_causes(&e);
            tracing::error!("{name} runs, but without its disks: {why}; run: rekindle replace-qemu {name}");
        }
    })
}

/// Hands a guest over to another QEMU process of the same version if its QEMU does not use its disk servers.
pub(crate) fn reconnect_disks(host: &Host, name: &str) -> Result<(), RebootError> {
    let rundir = RunDir::new(&host.root, name);
    let state = State::read(&rundir).map_err(RebootError::file(rundir.path()))?;
    let Some(State { vmm: Some(vmm), hardware, .. }) = state else { return Ok(()) };
    if disks::served(&hardware).next().is_none() {
        return Ok(());
    }
    let mut qmp = vmm.connect(START_TIMEOUT).map_err(LifeError::from)?;
    if *qmp.version() >= FIRST_THAT_RECONNECTS {
        return Ok(());
    }
    let runs = run_state(&mut qmp)? == "running";
    // A QEMU serves one client at a time, and the hand-over connects itself.
    drop(qmp);
    let uses_server = |id: &str| {
        let status = Control::connect(&disks::control_socket(&rundir, id)).and_then(|mut control| control.status());
        status.is_ok_and(|status| status.connected > status.waiting_for_guest)
    };
    let deadline = Instant::now() + INITIALIZE_TIMEOUT;
    // The device of a stopped guest initializes its server only when the guest resumes.
    while runs && Instant::now() < deadline {
        if disks::served(&hardware).all(|disk| uses_server(&disk.id)) {
            return Ok(());
        }
        thread::sleep(POLL_INTERVAL);
    }
    tracing::warn!("{name}: its QEMU has lost its disks; handing the guest over to another QEMU process");
    let outcomes = vmm::reboot(host, &[name.to_owned()], &ReplaceOptions::same_qemu(RebootMethod::Warm));
    outcomes.into_iter().try_for_each(|outcome| outcome.result.map(drop).map_err(|failure| *failure.error))
}
