//! Resumes one suspended guest in a new QEMU: from its saved state or, if it was shut down or its memory is lost, by
//! booting it.

use super::record::{SuspendRecord, SuspendedGuest};
use super::survived::{Trust, check_ram};
use super::{HostError, RebootMethod};
use crate::error::RebootError;
use crate::interrupted::Recovered;
use crate::vmm::recover::{boot_after_loss, boot_after_shutdown};
use crate::vmm::{saved, warm};
use rekindle_handover::after_resume::{announce, set_clock};
use rekindle_handover::evidence::disk_times;
use rekindle_handover::ram::Ram;
use rekindle_handover::takeover::Taps;
use rekindle_handover::{Destination, Handover, LoadedStage};
use rekindle_qemu::cpu;
use rekindle_qemu::qmp::Qmp;
use rekindle_vm::error::LifeError;
use rekindle_vm::fault;
use rekindle_vm::host::Host;
use rekindle_vm::network;
use rekindle_vm::timeline::{Phase, Recorder, host_us};
use std::fs;
use std::io;
use std::time::Duration;

/// How long a bridge may take to appear after a boot.
const BRIDGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Reported reason for the loss of a guest's memory if the guest may have run already.
pub(super) const INTERRUPTED_RESUME_REASON: &str = "the host went down just as the guest was resumed";

/// A guest that runs again.
pub(super) struct ResumedGuest {
    pub(super) recovered: Recovered,
    /// Reason why the guest's memory is lost; `None` if it is not.
    pub(super) loss: Option<String>,
    /// When the guest was resumed or booted, in µs since 1970.
    pub(super) resumed_host_us: u64,
}

/// Resumes the guest of an entry. Boots it if it was shut down or its memory is lost.
pub(super) fn resume_guest(
    host: &Host,
    record: &SuspendRecord,
    mut handover: Handover,
    entry: &SuspendedGuest,
    trust: Trust,
) -> Result<ResumedGuest, RebootError> {
    handover.recorder = Recorder::new(handover.name(), "host resume");
    handover.end_destination()?;
    check_disks_exist(entry)?;
    network::wait_for_bridges(&entry.state.definition, BRIDGE_TIMEOUT)?;
    handover.recorder.step("wait for its bridges");
    // Open each tap only once: a tap has one user at a time, and a thread that is just starting another QEMU holds
    // copies of open descriptors for a moment.
    let taps = network::create(host, &entry.state)?;
    fault::point("host.resume.placed", None, None);
    handover.recorder.step("make its place");

    let loss = loss_reason(entry, trust);
    handover.recorder.step("check its memory");
    if loss.is_some() || entry.how == RebootMethod::Cold {
        return boot_guest(record, handover, entry, taps, loss);
    }
    let resumed_host_us = resume_saved(record, handover, entry, taps)?;
    Ok(ResumedGuest { recovered: Recovered::FromState, loss: None, resumed_host_us })
}

/// Boots a guest that was shut down, or whose memory is lost for the reason `loss`.
fn boot_guest(
    record: &SuspendRecord,
    handover: Handover,
    entry: &SuspendedGuest,
    taps: Taps,
    loss: Option<String>,
) -> Result<ResumedGuest, RebootError> {
    let name = handover.name().to_owned();
    // The guest is booted in any case: if this attempt is interrupted, the next one boots it too.
    record.mark_resume_started(entry).map_err(unwritten(&name))?;
    fault::point("host.resume.struck", None, None);
    let recovered = match &loss {
        Some(why) => {
            tracing::warn!("{name}: its memory is lost, and it is booted from its disks: {why}");
            boot_after_loss(handover, Some(taps))?
        }
        None => boot_after_shutdown(handover, Some(taps))?,
    };
    record.remove_entry(&name).map_err(unwritten(&name))?;
    Ok(ResumedGuest { recovered, loss, resumed_host_us: host_us() })
}

/// Returns a function that adds the name of a VM to an error of writing the record.
fn unwritten(name: &str) -> impl Fn(HostError) -> RebootError {
    move |error| RebootError::Record { name: name.into(), why: error.to_string() }
}

/// Resumes the guest of an entry from its saved state. Returns the time of the resume, in µs since 1970.
fn resume_saved(
    record: &SuspendRecord,
    mut handover: Handover,
    entry: &SuspendedGuest,
    taps: Taps,
) -> Result<u64, RebootError> {
    let name = handover.name().to_owned();
    let Some(saved) = &entry.saved else { return Err(LifeError::Unknown { name }.into()) };
    let hardware = handover.state.hardware.clone();
    let last_binary = handover.state.vmm.as_ref().map_or(&handover.state.definition.qemu, |vmm| &vmm.binary);
    let binary = handover.rundir.binary(last_binary)?;
    handover.recorder.phase(Phase::Renew);
    match entry.how {
        RebootMethod::Saved => {
            let loaded = saved::load(&mut handover, &hardware, &binary, saved, taps)?;
            resume_loaded(record, handover, entry, loaded)
        }
        _ => {
            let loaded = warm::load(&mut handover, &hardware, &binary, saved, taps)?;
            resume_loaded(record, handover, entry, loaded)
        }
    }
}

/// Resumes the guest in a QEMU that has loaded its state.
fn resume_loaded<R: Ram>(
    record: &SuspendRecord,
    mut handover: Handover,
    entry: &SuspendedGuest,
    mut loaded: Destination<LoadedStage<R>>,
) -> Result<u64, RebootError> {
    let (name, rundir) = (handover.name().to_owned(), handover.rundir.clone());
    handover.recorder.step("load");
    if let Err(error) = check_cpu(&name, entry, &mut loaded.qmp) {
        // The guest stays suspended.
        let _ = loaded.vmm.kill();
        return Err(error);
    }
    record.mark_resume_started(entry).map_err(unwritten(&name))?;
    handover.pass("host.resume.struck");
    let running = loaded.commit(&mut handover, "resume")?;
    handover.pass("host.resume.resumed");
    // Confirm before the entry is removed: the saved state is removed with it, so a recovery must not need it any more.
    running.confirm(&mut handover)?;
    record.remove_entry(&name).map_err(unwritten(&name))?;
    handover.pass("host.resume.recorded");
    let mut settled = running.settle(handover, "record")?;
    settled.recorder.write(&rundir);
    // Network switches may have forgotten the guest's port, and its clock has stood still since the suspend.
    announce(&mut settled.qmp, &name);
    set_clock(&mut settled.qmp, &settled.vmm, settled.state.hardware.agent);
    Ok(settled.resumed_host_us)
}

/// Rejects a guest with a missing disk, so that it stays suspended: the disk may appear later.
fn check_disks_exist(entry: &SuspendedGuest) -> Result<(), RebootError> {
    for disk in &entry.state.hardware.disks {
        fs::metadata(&disk.path).map_err(|e| {
            let text = format!(
                "{e}; the guest stays suspended: mount the missing file system, then run: rekindle host resume"
            );
            RebootError::file(&disk.path)(io::Error::new(e.kind(), text))
        })?;
    }
    Ok(())
}

/// Returns the reason why the memory of a guest is lost, or `None` if it is not.
fn loss_reason(entry: &SuspendedGuest, trust: Trust) -> Option<String> {
    if entry.how == RebootMethod::Cold {
        return None;
    }
    if entry.resume_started {
        return Some(INTERRUPTED_RESUME_REASON.into());
    }
    if disk_times(&entry.state.hardware) != entry.disk_times {
        return Some("its disks were written while it was suspended".into());
    }
    match entry.how {
        RebootMethod::Warm => check_ram(entry, trust).err(),
        RebootMethod::Saved | RebootMethod::Cold => None,
    }
}

/// Rejects a QEMU in which the guest would miss processor features. Additional features are harmless: the guest has
/// never checked for them.
fn check_cpu(name: &str, entry: &SuspendedGuest, qmp: &mut Qmp) -> Result<(), RebootError> {
    let offered = cpu::features(qmp)?;
    let mut missing = Vec::new();
    for (word, used, offered) in cpu::differences(&entry.cpu, &offered) {
        if used & !offered != 0 {
            missing.push(format!("{word} was {used:#x} and is {offered:#x}"));
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(RebootError::FewerFeatures { name: name.into(), words: missing.join(", ") })
}
