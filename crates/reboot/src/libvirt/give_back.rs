//! Returns a domain to libvirt, whose guest runs in the destination: the destination gets the source's listening
//! sockets, also those of its VNC and SPICE servers, libvirt's record names the destination, and the daemon is started.

use super::journal::{operation, set_absence};
use super::preflight::libvirt_monitor;
use super::status_file::{FileMark, StatusEdit, StatusFile, write_pid_file};
use super::{DomainError, daemon, record_copy};
use crate::error::RebootError;
use crate::unprepared::environment::vcpus;
use crate::unprepared::give::{Passwords, end_source, finish_move, give};
use crate::unprepared::recover::ResumedDestination;
use crate::unprepared::{passed, stand_in, vnc};
use rekindle_handover::Handover;
use rekindle_handover::moved_ram::{MoveReport, RamMove};
use rekindle_kernel::process::Process;
use rekindle_libvirt::domains::CHARDEV_PREFIX;
use rekindle_libvirt::graphics_password::{GraphicsPassword, Server};
use rekindle_qemu::guest;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::direct_monitors;
use rekindle_vm::journal::{Absence, LibvirtOperation};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

/// How long the daemon may take to find a domain again. It asks each QEMU for its devices.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(120);
/// How long libvirt may take to pass a command on.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A domain whose guest runs in the destination, which libvirt's record names. The daemon has yet to connect to it.
pub(super) struct GivenBack {
    pub handover: Handover,
    pub destination: Vmm,
    pub qmp: Qmp,
    /// Identifies the record as it was written, which the daemon replaces when it has connected; `None` if the daemon
    /// already ran.
    mark: Option<FileMark>,
    /// Set while RAM is moved in place.
    ram_move: Option<RamMove>,
}

impl GivenBack {
    /// Waits until the daemon, which has been started, has connected to the destination.
    ///
    /// # Errors
    /// [`RebootError`]: the guest runs; `rekindle recover` repeats this.
    pub(super) fn wait_reconnected(&mut self) -> Result<(), RebootError> {
        let libvirt = operation(&self.handover)?;
        wait_reconnected(self.handover.name(), libvirt, self.mark, self.destination.process())?;
        self.handover.pass("libvirt.give-back.reconnected");
        self.handover.recorder.step("give back");
        Ok(())
    }

    /// Waits until all RAM that is moved in place is in the destination.
    ///
    /// # Errors
    /// As [`finish_move`].
    pub(super) fn finish_move(&mut self) -> Result<Option<MoveReport>, RebootError> {
        finish_move(&mut self.handover, self.ram_move.take())
    }

    /// Ends the source and the operation.
    ///
    /// # Errors
    /// As [`settle`].
    pub(super) fn settle(mut self) -> Result<(), RebootError> {
        settle(self.handover, &self.destination, &mut self.qmp)
    }
}

/// Gives the domain, whose guest runs in the destination, back to libvirt, whose daemon can then be started. Can be
/// repeated.
///
/// # Errors
/// [`RebootError`]: the guest runs; `rekindle recover` repeats this.
pub(super) fn give_back(mut handover: Handover, resumed: ResumedDestination) -> Result<GivenBack, RebootError> {
    let ResumedDestination { vmm: destination, mut qmp, ram_move } = resumed;
    let process = destination.process();
    let libvirt = operation(&handover)?.clone();
    record_copy::restore_if_missing(&handover.rundir, &libvirt)?;
    let record = StatusFile::read(&libvirt.status_file)?.parse()?;
    if record.pid != process.pid {
        // An administrator may have started it since, and it would take the change of its record for a crash.
        daemon::stop(&libvirt.daemon)?;
        let status = StatusFile::read(&libvirt.status_file)?;
        let passwords = Passwords {
            vnc: GraphicsPassword::of(&status, Server::Vnc)?,
            spice: GraphicsPassword::of(&status, Server::Spice)?,
        };
        give(&handover, process, &mut qmp, &passwords)?;
        let edited = StatusFile::read(&libvirt.status_file)?.edited(&edit(&libvirt, process, &mut qmp)?)?;
        edited.write()?;
        handover.pass("libvirt.give-back.status-written");
    }
    write_pid_file(&libvirt.status_file, process.pid)?;
    handover.pass("libvirt.give-back.pid-written");
    let mark = match daemon::running(&libvirt.daemon.pid_file) {
        None => Some(FileMark::of(&libvirt.status_file).map_err(RebootError::file(&libvirt.status_file))?),
        Some(_) => None,
    };
    set_absence(&mut handover, Absence::Starting)?;
    handover.recorder.step("write libvirt's record");
    Ok(GivenBack { handover, destination, qmp, mark, ram_move })
}

/// Rejects a destination for which libvirt's record of the domain cannot be edited, and keeps a copy of the record.
pub(super) fn rehearse(handover: &Handover, destination: Process, qmp: &mut Qmp) -> Result<(), RebootError> {
    let libvirt = operation(handover)?;
    vnc::rehearse(handover.name(), passed(handover)?, qmp)?;
    stand_in::rehearse(handover.name(), passed(handover)?, destination)?;
    let record = StatusFile::read(&libvirt.status_file)?;
    record.edited(&edit(libvirt, destination, qmp)?)?;
    Ok(record_copy::keep(&handover.rundir, &record)?)
}

/// Returns what libvirt must know of the destination.
fn edit(libvirt: &LibvirtOperation, destination: Process, qmp: &mut Qmp) -> Result<StatusEdit, QmpError> {
    #[derive(Deserialize)]
    struct Chardev {
        label: String,
        filename: String,
    }
    let chardevs: Vec<Chardev> = qmp.execute("query-chardev", ())?;
    let pty = |chardev: Chardev| {
        let alias = chardev.label.strip_prefix(CHARDEV_PREFIX)?;
        Some((alias.to_owned(), chardev.filename.strip_prefix("pty:")?.to_owned()))
    };
    let vcpus: BTreeMap<u32, u32> = vcpus(qmp)?.into_iter().map(|vcpu| (vcpu.cpu_index, vcpu.thread_id)).collect();
    Ok(StatusEdit {
        pid: destination.pid,
        vcpus,
        ptys: chardevs.into_iter().filter_map(pty).collect(),
        emulator: libvirt.emulator.clone(),
        capabilities: libvirt.capabilities.clone(),
    })
}

/// Waits until the daemon has connected to the destination: it has replaced the record, which had `mark`, and it passes
/// commands on.
fn wait_reconnected(
    name: &str,
    libvirt: &LibvirtOperation,
    mark: Option<FileMark>,
    destination: Process,
) -> Result<(), RebootError> {
    let status_file = &libvirt.status_file;
    let deadline = Instant::now() + RECONNECT_TIMEOUT;
    let failed = |why: String| RebootError::from(DomainError::NotReconnected { name: name.into(), why });
    loop {
        if !destination.is_alive() {
            return Err(failed(format!("that QEMU (process {}) has ended", destination.pid)));
        }
        if daemon::running(&libvirt.daemon.pid_file).is_none() {
            return Err(failed("its daemon has ended".into()));
        }
        let is_replaced = mark.is_none_or(|mark| FileMark::of(status_file).is_ok_and(|current| current != mark));
        if is_replaced {
            let record = StatusFile::read(status_file).and_then(|file| file.parse());
            let answer = libvirt_monitor(name).connect(MONITOR_TIMEOUT).and_then(|mut qmp| guest::run_state(&mut qmp));
            match (record, answer) {
                (Ok(record), Ok(_)) if record.pid == destination.pid => return Ok(()),
                (Ok(record), _) if record.pid != destination.pid => {
                    return Err(failed(format!("it has process {} for it", record.pid)));
                }
                _ => {}
            }
        }
        if Instant::now() > deadline {
            return Err(failed(format!("it has not done so within {} s", RECONNECT_TIMEOUT.as_secs())));
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Ends the source and the operation. libvirt has the domain back.
///
/// # Errors
/// [`RebootError`]: the guest runs; `rekindle recover` repeats this.
pub(super) fn settle(mut handover: Handover, destination: &Vmm, qmp: &mut Qmp) -> Result<(), RebootError> {
    end_source(&mut handover, destination, qmp)?;
    if let Err(e) = direct_monitors::keep(&handover.rundir, destination) {
        tracing::warn!("{}: a protector has to go through libvirt, which takes longer: {e}", handover.name());
    }
    handover.rundir.remove().map_err(RebootError::file(handover.rundir.path()))
}
