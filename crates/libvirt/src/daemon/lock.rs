//! The right to stop libvirt's daemon, which one operation on this host has at a time: another one would start the
//! daemon while the first needs it stopped.

use super::DaemonError;
use crate::domains;
use crate::status_file::SYSTEM_DIRECTORY;
use rekindle_kernel::file::flock_holder;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::File;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How long another operation may have the daemon. It copies the RAM of its domains in this time.
const TIMEOUT: Duration = Duration::from_secs(300);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A lock of the directory of the daemon's status files. The kernel releases it when the process ends.
#[derive(Debug)]
pub struct DaemonLock {
    _directory: File,
}

impl DaemonLock {
    /// Waits until no other operation has the daemon, at most for 5 minutes.
    ///
    /// # Errors
    /// [`DaemonError::Locked`], which names the other operation's process.
    pub fn acquire() -> Result<Self, DaemonError> {
        Self::acquire_within(Path::new(SYSTEM_DIRECTORY), TIMEOUT)
    }

    fn acquire_within(directory: &Path, timeout: Duration) -> Result<Self, DaemonError> {
        let failed = |source| DaemonError::Lock { path: directory.to_owned(), source };
        let file = File::open(directory).map_err(failed)?;
        let deadline = Instant::now() + timeout;
        let holder = || flock_holder(directory).ok().flatten().map_or("unknown".into(), |pid| pid.to_string());
        let mut is_reported = false;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self { _directory: file }),
                Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < deadline => {
                    if !std::mem::replace(&mut is_reported, true) {
                        tracing::info!("waiting for another operation (process {}) with libvirt's daemon", holder());
                    }
                    thread::sleep(POLL_INTERVAL);
                }
                Err(Errno::WOULDBLOCK | Errno::INTR) => return Err(DaemonError::Locked { pid: holder() }),
                Err(e) => return Err(failed(e.into())),
            }
        }
    }
}

/// Rejects a stop of the daemon that would interrupt a job: a migration, save, dump or backup, or a job on a disk, of any
/// domain.
///
/// # Errors
/// [`DaemonError::Busy`] with all of them; also when a domain's status file cannot be read.
pub fn check_jobs() -> Result<(), DaemonError> {
    check_jobs_in(Path::new(SYSTEM_DIRECTORY))
}

fn check_jobs_in(directory: &Path) -> Result<(), DaemonError> {
    let records = domains::all(directory).map_err(|source| DaemonError::Lock { path: directory.to_owned(), source })?;
    let records = records.into_iter().collect::<Result<Vec<_>, _>>()?;
    let jobs = records.iter().filter_map(|record| Some(format!("{} ({})", record.name, record.job.as_ref()?)));
    let jobs: Vec<_> = jobs.collect();
    if jobs.is_empty() { Ok(()) } else { Err(DaemonError::Busy { jobs: jobs.join(", ") }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tempfile::TempDir;

    #[test]
    fn a_second_operation_waits_and_then_names_the_first() {
        let directory = TempDir::new().unwrap();
        let first = DaemonLock::acquire_within(directory.path(), Duration::ZERO).unwrap();
        let error = DaemonLock::acquire_within(directory.path(), Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
        thread::scope(|scope| {
            let second = scope.spawn(|| DaemonLock::acquire_within(directory.path(), TIMEOUT).map(drop));
            drop(first);
            second.join().unwrap().unwrap();
        });
    }

    #[test]
    fn jobs_of_all_domains_are_named() {
        let directory = TempDir::new().unwrap();
        let idle = include_str!("../../tests/status/libvirt-9.0.xml");
        fs::write(directory.path().join("a.xml"), idle).unwrap();
        check_jobs_in(directory.path()).unwrap();
        for (name, job) in [("b", "<job type='none' async='migration out'/>"), ("c", "<blockjobs active='yes'/>")] {
            let text = idle.replace("golden-user", name).replace("<vcpus>", &format!("{job}<vcpus>"));
            fs::write(directory.path().join(format!("{name}.xml")), text).unwrap();
        }
        let error = check_jobs_in(directory.path()).unwrap_err().to_string();
        assert!(error.contains("b (migration out), c (a job on a disk)"), "{error}");
        fs::write(directory.path().join("d.xml"), "<domstatus").unwrap();
        assert!(matches!(check_jobs_in(directory.path()), Err(DaemonError::StatusFile(_))));
    }
}
