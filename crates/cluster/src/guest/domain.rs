//! A domain of the system's libvirt, which is attached while it runs.
//!
//! libvirt's status files show which QEMU runs the domain, also while its daemon is stopped. Everything else is a query to
//! the daemon, with a time limit: a daemon that hangs must not hold up the cluster.

use super::ResourceGuest;
use crate::outcome::{StartError, StartResult, StrayQemu};
use crate::resource::{Resource, SYSTEM_URI};
use rekindle_kernel::libvirt_client::{Connection, Domain, DomainState, LibvirtError};
use rekindle_kernel::output::last_lines;
use rekindle_kernel::patience::answer_within;
use rekindle_kernel::process::Process;
use rekindle_libvirt::disks::DomainDisk;
use rekindle_libvirt::domains;
use rekindle_libvirt::portable_xml::{self, DiskFile};
use rekindle_libvirt::status_file::{StatusFile, StatusFileError};
use rekindle_life::attach::attach_locked;
use rekindle_life::shutdown::{Ended, pull_the_plug};
use rekindle_life::stop;
use rekindle_protect::owned::OwnerRecord;
use rekindle_protect::restore::into_libvirt::restore_into_libvirt;
use rekindle_qemu::monitor::Monitor;
use rekindle_store::listing::Listing;
use rekindle_store::types::Vm;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::Journal;
use rekindle_vm::lock::{OperationLock, running_operation};
use rekindle_vm::overlays::OfflineOverlays;
use rekindle_vm::qemu::OFF;
use rekindle_vm::rundir::{RunDir, ignore_missing};
use rekindle_vm::state::State;
use rekindle_vm::status::{self, Status};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Directory of the logs of its QEMUs.
const LOG_DIRECTORY: &str = "/var/log/libvirt/qemu";
/// Number of lines at the end of a QEMU's log in which the reason for its end is searched.
const LOG_LINES: usize = 20;
/// What a QEMU prints when a signal ends it, before the sender.
const SIGNAL_MESSAGE: &str = "terminating on signal";
/// What libvirt writes into a QEMU's log after a shutdown of the guest, behind all lines of that QEMU.
const SHUTDOWN_MESSAGE: &str = "shutting down, reason=shutdown";
/// The daemons that end a QEMU by a signal when its guest has shut down.
const DAEMONS: [&str; 2] = ["libvirtd)", "virtqemud)"];

/// File in the run directory that exists while libvirt may start the domain: from the request to the answer.
const START_REQUESTED: &str = "libvirt-start";

/// How long libvirt may take to answer a query.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// How long libvirt may take to request a shutdown: it waits for a guest agent that does not answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// How long requests of a shutdown that are rejected are repeated: longer than a checkpoint pauses the guest.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long libvirt may take to start a domain.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// How long libvirt may take to notice the end of a QEMU.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a killed QEMU may take to end.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

pub(super) struct DomainGuest<'a> {
    pub resource: &'a Resource,
    /// libvirt's name.
    pub domain: &'a str,
}

/// Why libvirt has not done what was requested.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Unanswered {
    /// The reason. Nothing was done.
    Rejected(String),
    /// It may still do it.
    Late(String),
}

impl From<Unanswered> for String {
    fn from(unanswered: Unanswered) -> Self {
        match unanswered {
            Unanswered::Rejected(why) | Unanswered::Late(why) => why,
        }
    }
}

/// What libvirt knows of a domain that it has a definition of.
struct Definition {
    uuid: Uuid,
    is_started_automatically: bool,
}

/// A domain that libvirt runs.
struct RunningDomain {
    uuid: Uuid,
    process: Process,
}

impl ResourceGuest for DomainGuest<'_> {
    fn stray(&self, rundir: &RunDir) -> io::Result<Option<StrayQemu>> {
        let is_running = running_operation(rundir).is_some();
        if !is_running && fs::exists(rundir.file(START_REQUESTED))? {
            return Err(io::Error::other(self.may_start(rundir)));
        }
        let Some(RunningDomain { uuid, process }) = self.running()? else { return Ok(None) };
        // A restore that runs, or was interrupted, has a QEMU that is not recorded yet.
        let is_in_operation = is_running || Journal::read(rundir)?.is_some();
        let is_recorded = State::read(rundir)?.and_then(|state| state.vmm).is_some_and(|vmm| vmm.process() == process);
        let stray = StrayQemu { domain: self.domain.to_owned(), uuid, process };
        Ok(Some(stray).filter(|_| !is_in_operation && !is_recorded))
    }

    fn status(&self, rundir: &RunDir) -> io::Result<Status> {
        Ok(match status::status(rundir)? {
            Status::Ended if rundir.exists() && self.has_shut_down() => Status::Stopped(OFF.to_owned()),
            recorded @ (Status::Running | Status::Protected | Status::Degraded(_)) => self.status_in_libvirt(recorded),
            other => other,
        })
    }

    fn make_shutdown_visible(&self, _rundir: &RunDir) -> Result<(), String> {
        // libvirt itself starts QEMU with -no-shutdown, and records why it has ended.
        Ok(())
    }

    fn request_shutdown(&self, _rundir: &RunDir, deadline: Instant) -> Result<(), String> {
        let pause_deadline = deadline.min(Instant::now() + PAUSE_TIMEOUT);
        loop {
            let time_left = deadline.saturating_duration_since(Instant::now());
            let requested = self.ask(REQUEST_TIMEOUT.min(time_left), |domain| domain.request_shutdown());
            // libvirt rejects the request while a checkpoint pauses the guest.
            match requested {
                Err(Unanswered::Rejected(why)) if Instant::now() < pause_deadline && self.has_guest() => {
                    tracing::debug!("domain {}: its shutdown is requested again: {why}", self.domain);
                    thread::sleep(POLL_INTERVAL);
                }
                requested => return requested.map_err(String::from)?.ok_or_else(|| self.unknown()),
            }
        }
    }

    fn restore(&self, host: &Host) -> Result<StartResult, StartError> {
        if self.definition().map_err(|why| self.failed(why))?.is_some_and(|found| found.is_started_automatically) {
            return Err(StartError::Autostart { domain: self.domain.to_owned() });
        }
        let (name, request) = (&self.resource.name, self.resource.restore_request(host));
        let restored = restore_into_libvirt(host, name, &request, Some(SYSTEM_URI.into()), &mut |_, _| ())?;
        Ok(StartResult::RestoredIntoLibvirt(restored))
    }

    fn boot(&self, host: &Host, listing: Option<&Listing>) -> Result<(), StartError> {
        let failed = |why| self.failed(why);
        let is_there = self.running().map_err(|e| failed(e.to_string()))?.is_some();
        let definition = self.definition().map_err(failed)?;
        let Some(Definition { uuid, is_started_automatically }) = definition else {
            let (domain, store) = (self.domain.to_owned(), self.resource.protect.store.to_string());
            return Err(StartError::NotDefined { domain, store });
        };
        if is_started_automatically {
            return Err(StartError::Autostart { domain: self.domain.to_owned() });
        }
        let rundir = RunDir::new(&host.root, self.resource.name.as_str());
        let run_dir_failed = |source| LifeError::RunDir { name: rundir.name().into(), source };
        if State::read(&rundir).map_err(run_dir_failed)?.is_some() {
            // Of an earlier run of the guest.
            stop::stop_immediately(host, rundir.name())?;
        }
        host.create_run_dir(&rundir).map_err(run_dir_failed)?;
        // Until the guest is attached, this shows monitors that its start is under way.
        let _lock = OperationLock::acquire(&rundir, "start").map_err(LifeError::from)?;
        let booted = self.claim(host, &rundir, uuid, listing).and_then(|()| {
            if !is_there {
                self.merge_overlays()?;
                self.start(&rundir)?;
            }
            let monitor = Monitor::Libvirt { domain: uuid.to_string(), connect: Some(SYSTEM_URI.into()) };
            Ok(attach_locked(host, &rundir, &self.resource.name, monitor).map(drop)?)
        });
        booted.inspect_err(|_| {
            // A guest that was there before is left to the cluster, which stops it.
            let ended = if is_there { Ok(()) } else { self.end_strays(&rundir) };
            let removed = ended.map_err(|e| e.to_string()).and_then(|()| rundir.remove().map_err(|e| e.to_string()));
            if let Err(e) = removed {
                tracing::error!("{}: cannot undo its start: {e}", rundir.name());
            }
        })
    }

    fn end_strays(&self, rundir: &RunDir) -> Result<(), LifeError> {
        let failed = |source| LifeError::RunDir { name: rundir.name().into(), source };
        let may_start = fs::exists(rundir.file(START_REQUESTED)).map_err(failed)?;
        let qemu = self.running().map_err(failed)?.map(|running| running.process);
        if may_start || qemu.is_some() {
            // libvirt removes what else the domain has. If its daemon does not answer, it does so later. It handles a request
            // to start the domain before this one.
            match self.ask(KILL_TIMEOUT, |domain| domain.destroy()) {
                Err(Unanswered::Late(_)) if may_start => return Err(self.may_start(rundir)),
                Err(e) if qemu.is_some() => {
                    let (name, why) = (rundir.name(), String::from(e));
                    tracing::warn!("{name}: libvirt does not end domain {} ({why}); its QEMU is killed", self.domain);
                }
                _ => {}
            }
        }
        // After the request, which may have come just after the start.
        if let Some(process) = self.running().map_err(failed)?.map(|running| running.process).or(qemu) {
            if process.is_alive() {
                process.kill().map_err(failed)?;
            }
            if !process.wait_end(KILL_TIMEOUT).map_err(failed)? {
                return Err(LifeError::Stuck { name: rundir.name().into(), program: "QEMU", pid: process.pid });
            }
        }
        self.wait_until_off();
        ignore_missing(fs::remove_file(rundir.file(START_REQUESTED))).map_err(failed)
    }

    fn end_immediately(&self, host: &Host, rundir: &RunDir) -> Result<Ended, LifeError> {
        pull_the_plug(rundir)?;
        self.end_strays(rundir)?;
        stop::stop_immediately(host, rundir.name())
    }
}

impl DomainGuest<'_> {
    /// Returns the QEMU that runs the domain, from libvirt's status file. The daemon need not run.
    fn running(&self) -> io::Result<Option<RunningDomain>> {
        match StatusFile::read(&StatusFile::path_of(self.domain)).and_then(|file| file.parse()) {
            Ok(record) => {
                let qemu = domains::qemu(&record);
                Ok(qemu.map(|program| RunningDomain { uuid: record.uuid, process: program.process() }))
            }
            Err(StatusFileError::Unreadable { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(io::Error::other(e)),
        }
    }

    /// Asks libvirt about the domain. `None`: libvirt does not know it.
    fn ask<T: Send + 'static>(
        &self,
        timeout: Duration,
        question: impl FnOnce(&Domain) -> Result<T, LibvirtError> + Send + 'static,
    ) -> Result<Option<T>, Unanswered> {
        let name = self.domain.to_owned();
        let answer = answer_within(timeout, move || {
            let connection = Connection::open(Some(SYSTEM_URI))?;
            Arc::new(connection).find(&name)?.map(|domain| question(&domain)).transpose()
        });
        match answer {
            Some(answer) => answer.map_err(|e: LibvirtError| Unanswered::Rejected(e.to_string())),
            None => Err(Unanswered::Late(format!("libvirt has not answered for {} s", timeout.as_secs()))),
        }
    }

    /// Starts the domain. If libvirt does not answer, it may still start it, which the run directory shows.
    fn start(&self, rundir: &RunDir) -> Result<(), StartError> {
        let requested = rundir.file(START_REQUESTED);
        let failed = |source| LifeError::RunDir { name: rundir.name().into(), source };
        fs::write(&requested, "").map_err(failed)?;
        let started = match self.ask(START_TIMEOUT, |domain| domain.start()) {
            Err(Unanswered::Late(_)) => return Err(self.may_start(rundir).into()),
            answer => answer,
        };
        fs::remove_file(&requested).map_err(failed)?;
        started.map_err(|why| self.failed(why))?.ok_or_else(|| self.failed(self.unknown()))
    }

    fn may_start(&self, rundir: &RunDir) -> LifeError {
        LifeError::MayStart { name: rundir.name().into(), domain: self.domain.to_owned() }
    }

    fn failed(&self, why: impl Into<String>) -> StartError {
        StartError::Libvirt { domain: self.domain.to_owned(), why: why.into() }
    }

    fn unknown(&self) -> String {
        format!("libvirt does not know domain {}", self.domain)
    }

    fn definition(&self) -> Result<Option<Definition>, String> {
        let answer = self.ask(ANSWER_TIMEOUT, |domain| {
            let is_persistent = domain.is_persistent()?;
            Ok((is_persistent, domain.uuid()?, is_persistent && domain.is_started_automatically()?))
        });
        let answer = answer.map_err(String::from)?;
        let Some((true, uuid, is_started_automatically)) = answer else { return Ok(None) };
        let uuid = uuid.parse().map_err(|e| format!("its UUID {uuid}: {e}"))?;
        Ok(Some(Definition { uuid, is_started_automatically }))
    }

    /// Makes this node the owner of the store, if no other has become it since `listing`.
    fn claim(&self, host: &Host, rundir: &RunDir, uuid: Uuid, listing: Option<&Listing>) -> Result<(), StartError> {
        let (store, credentials) = (&self.resource.protect.store, self.resource.protect.credentials.as_ref());
        let vm = Vm { uuid, name: rundir.name().into() };
        let at_epoch = listing.map(|listing| listing.epoch);
        Ok(OwnerRecord::claim_for_boot(host, rundir, store, credentials, &vm, at_epoch)?)
    }

    /// Merges the overlays that an earlier run of the guest has left on its disks, and puts libvirt's definition on the
    /// images. Can be repeated.
    fn merge_overlays(&self) -> Result<(), StartError> {
        let failed = |why| self.failed(why);
        let xml = self.ask(ANSWER_TIMEOUT, |domain| domain.definition()).map_err(String::from).map_err(failed)?;
        let xml = xml.ok_or_else(|| failed(self.unknown()))?;
        let description = portable_xml::describe(&xml).map_err(failed)?;
        let qemu = description.emulator.unwrap_or_default();
        let mut disks = Vec::new();
        for DomainDisk { target, files, .. } in description.disks {
            let Some(file) = files.first().map(PathBuf::from) else { continue };
            if let Some(overlays) = OfflineOverlays::open(&file, &qemu)? {
                disks.push((target, file, overlays));
            }
        }
        let mut files = BTreeMap::new();
        for (target, file, overlays) in &mut disks {
            overlays.merge(&qemu)?;
            if file != overlays.image() {
                let format = overlays.format().ok_or_else(|| {
                    let image = overlays.image().display();
                    failed(format!(
                        "its disk {target} was merged into {image}; put the definition on the image: virsh edit"
                    ))
                })?;
                let image = DiskFile { path: overlays.image().to_owned(), format: format.to_owned() };
                files.insert(target.clone(), image);
            }
        }
        if !files.is_empty() {
            let on_images = portable_xml::with_disks_on(&xml, &files).map_err(failed)?;
            let defined = self
                .ask(ANSWER_TIMEOUT, move |domain| domain.redefine(&on_images))
                .map_err(String::from)
                .map_err(failed)?;
            defined.ok_or_else(|| failed(self.unknown()))?;
        }
        Ok(disks.into_iter().try_for_each(|(_, _, overlays)| overlays.finish())?)
    }

    /// Combines the status of the VM with libvirt's: only a guest that both know to run does.
    fn status_in_libvirt(&self, recorded: Status) -> Status {
        match self.ask(ANSWER_TIMEOUT, |domain| domain.state()) {
            Ok(Some(DomainState::Running)) if recorded == Status::Protected => Status::Running,
            Ok(Some(DomainState::Running)) => recorded,
            Ok(Some(DomainState::Paused)) => Status::Stopped("paused".into()),
            Ok(Some(DomainState::Other)) => Status::Stopped("starting or shutting down".into()),
            // libvirt has lost it.
            Ok(Some(DomainState::ShutOff) | None) => Status::Silent,
            // The guest runs without the daemon, and its protector waits for it.
            Err(why) => Status::Degraded(format!("libvirt does not answer: {}", String::from(why))),
        }
    }

    /// Returns whether libvirt answers that a QEMU has the guest.
    fn has_guest(&self) -> bool {
        let state = self.ask(ANSWER_TIMEOUT, |domain| domain.state());
        matches!(state, Ok(Some(DomainState::Running | DomainState::Paused)))
    }

    /// Returns whether the guest has shut down cleanly, after which libvirt has ended its QEMU. `false` also if that is not
    /// known: libvirt's daemon was started again since, or QEMU's log cannot be read.
    fn has_shut_down(&self) -> bool {
        if !matches!(self.running(), Ok(None)) {
            return false;
        }
        self.wait_until_off();
        if self.ask(ANSWER_TIMEOUT, |domain| domain.is_off_by_shutdown()) != Ok(Some(true)) {
            return false;
        }
        let log = Path::new(LOG_DIRECTORY).join(format!("{}.log", self.domain));
        // Another daemon writes the log, a moment later.
        let deadline = Instant::now() + NOTICE_TIMEOUT;
        loop {
            match is_ended_by_libvirt(&last_lines(&log, LOG_LINES)) {
                None if Instant::now() < deadline => thread::sleep(POLL_INTERVAL),
                by_libvirt => return by_libvirt == Some(true),
            }
        }
    }

    /// Waits until libvirt has noticed the end of the QEMU.
    fn wait_until_off(&self) {
        let deadline = Instant::now() + NOTICE_TIMEOUT;
        let is_active = || {
            let state = self.ask(ANSWER_TIMEOUT, |domain| domain.state());
            state.is_ok_and(|state| state.is_some_and(|state| state != DomainState::ShutOff))
        };
        while fs::exists(StatusFile::path_of(self.domain)).unwrap_or(false) && is_active() {
            if Instant::now() > deadline {
                return tracing::warn!("domain {}: libvirt has not noticed that its QEMU has ended", self.domain);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Returns whether no other program than libvirt has ended the QEMU whose log ends with these lines. If another program has
/// done that by a signal, libvirt takes it for a shutdown of the guest. `None`: they do not show what has ended it.
fn is_ended_by_libvirt(lines: &str) -> Option<bool> {
    match lines.lines().rfind(|line| line.contains(SIGNAL_MESSAGE)) {
        Some(message) => Some(DAEMONS.iter().any(|daemon| message.trim_end().ends_with(daemon))),
        // A QEMU whose guest has shut down may have ended before libvirt's signal.
        None => lines.trim_end().ends_with(SHUTDOWN_MESSAGE).then_some(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_of_another_program_is_no_shutdown_of_the_guest() {
        let line = |sender: &str| {
            format!(
                "qemu-system-x86_64: {SIGNAL_MESSAGE} 15 from pid 7 ({sender})\n2026: shutting down, reason=shutdown\n"
            )
        };
        assert_eq!(is_ended_by_libvirt(&line("/usr/sbin/libvirtd")), Some(true));
        assert_eq!(is_ended_by_libvirt(&line("/usr/sbin/virtqemud")), Some(true));
        assert_eq!(is_ended_by_libvirt(&line("/usr/lib/systemd/systemd")), Some(false));
        assert_eq!(is_ended_by_libvirt(&(line("/usr/sbin/libvirtd") + &line("<unknown process>"))), Some(false));
        assert_eq!(is_ended_by_libvirt("2026: shutting down, reason=shutdown\n"), Some(true));
        for unknown in ["", "2026: starting up\n", "2026: shutting down, reason=crashed\n"] {
            assert_eq!(is_ended_by_libvirt(unknown), None, "{unknown}");
        }
    }
}
