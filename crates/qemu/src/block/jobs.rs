//! QEMU's jobs: work on block nodes that continues after the command that started it.
//!
//! A job that has ended stays *concluded*, with its error, until it is dismissed. So a result is never lost, even if
//! the process that started the job has been killed meanwhile.

use super::BlockError;
use crate::qmp::{Qmp, QmpError};
use serde::Deserialize;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Beginning of the ids of Rekindle's jobs.
const OWN_PREFIX: &str = "rk-";
const CONCLUDED: &str = "concluded";
/// Status in which a merge of the newest overlay waits for `job-complete`.
pub(super) const READY: &str = "ready";
const STATUS_CHANGE: &str = "JOB_STATUS_CHANGE";
/// Interval between two queries of a job. libvirt passes no event of a job that is not its own.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Limit for QEMU to end a cancelled job: it waits for the requests that the job has started.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(30);

/// A job as QEMU describes it.
#[derive(Debug, Clone, Deserialize)]
pub struct Job {
    pub id: String,
    pub status: String,
    /// Why the job failed or was cancelled, if it has.
    pub error: Option<String>,
}

/// How a cancelled job has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CancelOutcome {
    Cancelled,
    /// The job was complete before it could be cancelled.
    Completed,
    NoSuchJob,
}

/// Returns whether Rekindle started the job with this id.
#[must_use]
pub fn is_own_job(id: &str) -> bool {
    id.starts_with(OWN_PREFIX)
}

/// Returns libvirt's merge of a disk, which has libvirt's name `target`.
pub(super) fn libvirt_merge<'j>(jobs: &'j [Job], target: &str) -> Option<&'j Job> {
    let prefix = format!("commit-{target}-");
    jobs.iter().find(|job| job.id.starts_with(&prefix))
}

impl Job {
    /// Returns all jobs.
    ///
    /// # Errors
    /// When QEMU does not answer.
    pub fn list(qmp: &mut Qmp) -> Result<Vec<Self>, QmpError> {
        qmp.execute("query-jobs", ())
    }

    /// Returns the job with this id, if there is one.
    ///
    /// # Errors
    /// When QEMU does not answer.
    pub fn find(qmp: &mut Qmp, id: &str) -> Result<Option<Self>, QmpError> {
        Ok(Self::list(qmp)?.into_iter().find(|job| job.id == id))
    }

    #[must_use]
    pub fn is_concluded(&self) -> bool {
        self.status == CONCLUDED
    }
}

/// Waits until a job is concluded, and dismisses it.
///
/// # Errors
/// [`BlockError::JobFailed`] with QEMU's reason; [`BlockError::JobTimeout`], and the job runs on.
pub fn finish(qmp: &mut Qmp, id: &str, timeout: Duration) -> Result<(), BlockError> {
    finish_checked(qmp, id, timeout, |_| Ok(()))
}

/// As [`finish`]; `check` is called before a job without error is dismissed. If it fails, or this process is killed
/// before, the job stays concluded, so that its result is checked again.
pub(super) fn finish_checked(
    qmp: &mut Qmp,
    id: &str,
    timeout: Duration,
    check: impl FnOnce(&mut Qmp) -> Result<(), BlockError>,
) -> Result<(), BlockError> {
    let job = wait_until(qmp, id, timeout, Job::is_concluded)?;
    if job.error.is_none() {
        check(qmp)?;
    }
    dismiss(qmp, id)?;
    job.error.map_or(Ok(()), |message| Err(BlockError::JobFailed { job: id.into(), message }))
}

/// Cancels a job and waits for its end. A merge that is cancelled has copied any part of the overlay.
///
/// # Errors
/// When QEMU does not answer, or does not end the job.
pub fn cancel(qmp: &mut Qmp, id: &str) -> Result<CancelOutcome, BlockError> {
    match qmp.execute::<Value>("job-cancel", json!({"id": id})) {
        // The job is concluded, or there is none.
        Ok(_) | Err(QmpError::Refused { .. }) => {}
        Err(e) => return Err(e.into()),
    }
    if Job::find(qmp, id)?.is_none() {
        return Ok(CancelOutcome::NoSuchJob);
    }
    match finish(qmp, id, CANCEL_TIMEOUT) {
        Ok(()) => Ok(CancelOutcome::Completed),
        Err(BlockError::JobFailed { .. }) => Ok(CancelOutcome::Cancelled),
        Err(e) => Err(e),
    }
}

fn dismiss(qmp: &mut Qmp, id: &str) -> Result<(), QmpError> {
    qmp.execute::<Value>("job-dismiss", json!({"id": id})).map(drop)
}

/// Waits until `has_arrived` accepts the job: by QEMU's events, and by queries where there are none.
pub(super) fn wait_until(
    qmp: &mut Qmp,
    id: &str,
    timeout: Duration,
    has_arrived: impl Fn(&Job) -> bool,
) -> Result<Job, BlockError> {
    let deadline = Instant::now() + timeout;
    loop {
        // An event that arrives after this query is kept, and ends the wait below.
        let job = Job::find(qmp, id)?.ok_or_else(|| BlockError::JobVanished { job: id.into() })?;
        if has_arrived(&job) {
            return Ok(job);
        }
        let is_of_job = |data: &Value| data.get("id").and_then(Value::as_str) == Some(id);
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(BlockError::JobTimeout { job: id.into(), after: timeout });
        }
        match qmp.wait_event("the end of a block job", left.min(POLL_INTERVAL), |event| {
            (event.name == STATUS_CHANGE && is_of_job(&event.data)).then_some(())
        }) {
            Ok(()) | Err(QmpError::Timeout { .. }) => {}
            Err(e) => return Err(e.into()),
        }
    }
}
