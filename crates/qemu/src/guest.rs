//! Stopping and resuming a QEMU's guest. Nothing else in Rekindle sends `stop` or `cont`.

use crate::qmp::{Qmp, QmpError};
use serde_json::Value;
use std::thread;
use std::time::{Duration, Instant};

/// Limit for stopping or resuming a guest. It usually takes a millisecond, and longer if the guest's disks are slow.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit for QEMU to cancel a save whose reader has closed the pipe. Until then it rejects a resume.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(1);
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

const STOP_COMMAND: &str = "stop";
const RESUME_COMMAND: &str = "cont";

/// Returns QEMU's run state, for example `running` or `paused`.
///
/// # Errors
/// If QEMU does not answer.
pub fn run_state(qmp: &mut Qmp) -> Result<String, QmpError> {
    let status: Value = qmp.execute("query-status", ())?;
    Ok(status.get("status").and_then(Value::as_str).unwrap_or("unknown").to_owned())
}

/// Stops the guest. Returns the time of the `STOP` event in µs since 1970.
///
/// # Errors
/// If QEMU rejects the command or does not answer.
pub fn stop(qmp: &mut Qmp) -> Result<u64, QmpError> {
    qmp.drop_events();
    qmp.execute::<Value>(STOP_COMMAND, ())?;
    wait_stopped(qmp)
}

/// Sends the first part of the stop command ahead, for [`stop_staged`].
///
/// # Errors
/// If QEMU has ended.
pub fn stage_stop(qmp: &mut Qmp) -> Result<(), QmpError> {
    qmp.stage(STOP_COMMAND, ())
}

/// Stops the guest by the staged command. Returns the time of the `STOP` event in µs since 1970.
///
/// # Errors
/// If QEMU rejects the command or does not answer.
pub fn stop_staged(qmp: &mut Qmp) -> Result<u64, QmpError> {
    qmp.drop_events();
    qmp.fire(STOP_COMMAND)?;
    qmp.reply::<Value>(STOP_COMMAND)?;
    wait_stopped(qmp)
}

/// Resumes the guest. Returns the time of the `RESUME` event in µs since 1970.
///
/// # Errors
/// If QEMU rejects the command or does not answer.
pub fn resume(qmp: &mut Qmp) -> Result<u64, QmpError> {
    qmp.drop_events();
    qmp.execute::<Value>(RESUME_COMMAND, ())?;
    wait_resumed(qmp, ANSWER_TIMEOUT)
}

/// Resumes the guest of a QEMU whose save was aborted: QEMU rejects the command until it has cancelled the save.
///
/// # Errors
/// If QEMU rejects the command for a second, or does not answer.
pub fn resume_after_save(qmp: &mut Qmp) -> Result<u64, QmpError> {
    let deadline = Instant::now() + CANCEL_TIMEOUT;
    loop {
        match resume(qmp) {
            Err(QmpError::Refused { .. }) if Instant::now() < deadline => thread::sleep(RETRY_INTERVAL),
            result => return result,
        }
    }
}

/// Sends the first part of the resume command ahead, for [`resume_staged`].
///
/// # Errors
/// If QEMU has ended.
pub fn stage_resume(qmp: &mut Qmp) -> Result<(), QmpError> {
    qmp.stage(RESUME_COMMAND, ())
}

/// Resumes the guest by the staged command. During a load it resumes when the load ends. Returns the time of the
/// `RESUME` event in µs since 1970.
///
/// # Errors
/// If QEMU rejects the command, or does not resume the guest within `timeout`.
pub fn resume_staged(qmp: &mut Qmp, timeout: Duration) -> Result<u64, QmpError> {
    qmp.fire(RESUME_COMMAND)?;
    qmp.reply::<Value>(RESUME_COMMAND)?;
    wait_resumed(qmp, timeout)
}

fn wait_stopped(qmp: &mut Qmp) -> Result<u64, QmpError> {
    qmp.wait_event("STOP", ANSWER_TIMEOUT, |event| (event.name == "STOP").then_some(event.host_us))
}

fn wait_resumed(qmp: &mut Qmp, timeout: Duration) -> Result<u64, QmpError> {
    qmp.wait_event("RESUME", timeout, |event| (event.name == "RESUME").then_some(event.host_us))
}
