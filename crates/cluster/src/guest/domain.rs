//! A domain of the system's libvirt, which is attached while it runs.
//!
//! libvirt's status files show which QEMU runs the domain, also while its daemon is stopped. Everything else is a query to
//! the daemon, with a time limit: a daemon that hangs must not hold up the cluster.

use super::ResourceGuest;
use crate::outcome::{StartError, StartResult, StrayQemu};
use crate::resource::{Resource, SYSTEM_URI};
use rekindle_kernel::libvirt_client::{Connection, Domain, DomainState, LibvirtError};
use rekindle_kernel::output::last_lines;
use rekindle_kernel::process::Process;
use rekindle_libvirt::disks::DomainDisk;
use rekindle_libvirt::domains;
use rekindle_libvirt::portable_xml::{self, DiskFile};
use rekindle_libvirt::status_file::{StatusFile, StatusFileError};
use rekindle_life::attach::attach;
use rekindle_life::shutdown::{Ended, pull_the_plug};
use rekindle_life::stop;
use rekindle_protect::owned::OwnerRecord;
use rekindle_protect::restore::into_libvirt::restore_into_libvirt;
use rekindle_qemu::monitor::Monitor;
use rekindle_store::listing::Listing;
use rekindle_store::types::{Guest, OnlyIf, Owner, Vm};
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::Journal;
use rekindle_vm::lock::running_operation;
use rekindle_vm::overlays::OfflineOverlays;
use rekindle_vm::qemu::OFF;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::status::{self, Status};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Where this libvirt has the logs of its QEMUs.
const LOG_DIRECTORY: &str = "/var/log/libvirt/qemu";
/// Lines at the end of a QEMU's log that may have the reason for its end.
const LOG_LINES: usize = 20;
/// What a QEMU prints when a signal ends it, before the sender.
const SIGNAL_MESSAGE: &str = "terminating on signal";
/// The daemons that end a QEMU by a signal when its guest has shut down.
const DAEMONS: [&str; 2] = ["libvirtd)", "virtqemud)"];

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

/// What libvirt knows of a domain that it has a definition of.
struct Definition {
    uuid: Uuid,
    is_started_automatically: bool,
}

impl ResourceGuest for DomainGuest<'_> {
    fn stray(&self, rundir: &RunDir) -> io::Result<Option<StrayQemu>> {
        let Some(process) = self.qemu()? else { return Ok(None) };
        // A restore that runs, or was interrupted, has a QEMU that is not recorded yet.
        let is_in_operation = running_operation(rundir).is_some() || Journal::read(rundir)?.is_some();
        let is_recorded = State::read(rundir)?.and_then(|state| state.vmm).is_some_and(|vmm| vmm.process() == process);
        let stray = StrayQemu { domain: self.domain.to_owned(), process };
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
        // libvirt itself has started QEMU so, and records why it has ended.
        Ok(())
    }

    fn request_shutdown(&self, _rundir: &RunDir, deadline: Instant) -> Result<(), String> {
        let pause_deadline = deadline.min(Instant::now() + PAUSE_TIMEOUT);
        loop {
            let time_left = deadline.saturating_duration_since(Instant::now());
            let requested = self.ask(REQUEST_TIMEOUT.min(time_left), |domain| domain.request_shutdown());
            // libvirt rejects the request while a checkpoint pauses the guest.
            match requested {
                Err(why) if Instant::now() < pause_deadline && self.has_guest() => {
                    tracing::debug!("domain {}: its shutdown is requested again: {why}", self.domain);
                    thread::sleep(POLL_INTERVAL);
                }
                requested => return requested?.ok_or_else(|| self.unknown()),
            }
        }
    }

    fn restore(&self, host: &Host) -> Result<StartResult, StartError> {
        if self.definition().map_err(|why| self.failed(why))?.is_some_and(|found| found.is_started_automatically) {
            return Err(StartError::Autostart { domain: self.domain.to_owned() });
        }
        let (name, request) = (&self.resource.name, self.resource.restore_request());
        let restored = restore_into_libvirt(host, name, &request, Some(SYSTEM_URI.into()), &mut |_, _| ())?;
        Ok(StartResult::RestoredIntoLibvirt(restored))
    }

    fn boot(&self, host: &Host, listing: Option<&Listing>) -> Result<(), StartError> {
        let failed = |why| self.failed(why);
        let is_there = self.qemu().map_err(|e| failed(e.to_string()))?.is_some();
        let definition = self.definition().map_err(failed)?;
        let Some(Definition { uuid, is_started_automatically }) = definition else {
            let (domain, store) = (self.domain.to_owned(), self.resource.protect.store.to_string());
            return Err(StartError::NotDefined { domain, store });
        };
        if is_started_automatically {
            return Err(StartError::Autostart { domain: self.domain.to_owned() });
        }
        let rundir = RunDir::new(&host.root, self.resource.name.as_str());
        host.create_run_dir(&rundir).map_err(|source| LifeError::RunDir { name: rundir.name().into(), source })?;
        let booted = self.claim(&rundir, uuid, listing).and_then(|()| {
            if !is_there {
                self.merge_overlays()?;
                let started = self.ask(START_TIMEOUT, |domain| domain.start()).map_err(failed)?;
                started.ok_or_else(|| failed(self.unknown()))?;
            }
            let monitor = Monitor::Libvirt { domain: uuid.to_string(), connect: Some(SYSTEM_URI.into()) };
            Ok(attach(host, &self.resource.name, monitor).map(drop)?)
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
        if let Some(process) = self.qemu().map_err(failed)? {
            // libvirt removes what else the domain has. If its daemon does not answer, it does so later.
            if let Err(why) = self.ask(KILL_TIMEOUT, |domain| domain.destroy()) {
                tracing::warn!(
                    "{}: libvirt does not end domain {} ({why}); its QEMU is killed",
                    rundir.name(),
                    self.domain
                );
            }
            if process.is_alive() {
                process.kill().map_err(failed)?;
            }
            if !process.wait_end(KILL_TIMEOUT).map_err(failed)? {
                return Err(LifeError::Stuck { name: rundir.name().into(), program: "QEMU", pid: process.pid });
            }
        }
        self.wait_until_off();
        Ok(())
    }

    fn end_immediately(&self, host: &Host, rundir: &RunDir) -> Result<Ended, LifeError> {
        pull_the_plug(rundir)?;
        self.end_strays(rundir)?;
        stop::stop_immediately(host, rundir.name())
    }
}

impl DomainGuest<'_> {
    /// Returns the QEMU that runs the domain, from libvirt's status file. The daemon need not run.
    fn qemu(&self) -> io::Result<Option<Process>> {
        match StatusFile::read(&StatusFile::path_of(self.domain)).and_then(|file| file.parse()) {
            Ok(record) => Ok(domains::qemu(&record).map(|program| program.process())),
            Err(StatusFileError::Unreadable { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(io::Error::other(e)),
        }
    }

    /// Asks libvirt about the domain. `None`: libvirt does not know it.
    fn ask<T: Send + 'static>(
        &self,
        timeout: Duration,
        question: impl FnOnce(&Domain) -> Result<T, LibvirtError> + Send + 'static,
    ) -> Result<Option<T>, String> {
        let (answer_sender, answers) = mpsc::channel();
        let name = self.domain.to_owned();
        // libvirt's calls have no time limit.
        thread::spawn(move || {
            let answer = Connection::open(Some(SYSTEM_URI))
                .and_then(|connection| Arc::new(connection).find(&name)?.map(|domain| question(&domain)).transpose());
            drop(answer_sender.send(answer));
        });
        match answers.recv_timeout(timeout) {
            Ok(answer) => answer.map_err(|e| e.to_string()),
            Err(_) => Err(format!("libvirt has not answered for {} s", timeout.as_secs())),
        }
    }

    fn failed(&self, why: String) -> StartError {
        StartError::Libvirt { domain: self.domain.to_owned(), why }
    }

    fn unknown(&self) -> String {
        format!("libvirt does not know domain {}", self.domain)
    }

    fn definition(&self) -> Result<Option<Definition>, String> {
        let answer = self.ask(ANSWER_TIMEOUT, |domain| {
            let is_persistent = domain.is_persistent()?;
            Ok((is_persistent, domain.uuid()?, is_persistent && domain.is_started_automatically()?))
        })?;
        let Some((true, uuid, is_started_automatically)) = answer else { return Ok(None) };
        let uuid = uuid.parse().map_err(|e| format!("its UUID {uuid}: {e}"))?;
        Ok(Some(Definition { uuid, is_started_automatically }))
    }

    /// Makes this node the owner of the store, if no other has become it since `listing`.
    fn claim(&self, rundir: &RunDir, uuid: Uuid, listing: Option<&Listing>) -> Result<(), StartError> {
        let (store, identity) = (&self.resource.protect.store, self.resource.protect.identity.as_ref());
        let vm = Vm { uuid, name: rundir.name().into() };
        let owner = Owner::here(&format!("start {}", rundir.name())).with(Guest::Booted);
        let only_if = listing.map(|listing| OnlyIf::Epoch(listing.epoch));
        OwnerRecord::claim(rundir, store, identity, &vm, &owner, only_if)?;
        Ok(())
    }

    /// Merges the overlays that an earlier run of the guest has left on its disks, and puts libvirt's definition on the
    /// images. Can be repeated.
    fn merge_overlays(&self) -> Result<(), StartError> {
        let failed = |why| self.failed(why);
        let xml = self.ask(ANSWER_TIMEOUT, |domain| domain.definition()).map_err(failed)?;
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
                    failed(format!("its disk {target} was merged into {image}; put the definition on it: virsh edit"))
                })?;
                let image = DiskFile { path: overlays.image().to_owned(), format: format.to_owned() };
                files.insert(target.clone(), image);
            }
        }
        if !files.is_empty() {
            let on_images = portable_xml::with_disks_on(&xml, &files).map_err(failed)?;
            let defined = self.ask(ANSWER_TIMEOUT, move |domain| domain.redefine(&on_images)).map_err(failed)?;
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
            Ok(Some(DomainState::Other)) => Status::Stopped("about to start or to end".into()),
            // libvirt has lost it.
            Ok(Some(DomainState::ShutOff) | None) => Status::Silent,
            // The guest runs without the daemon, and its protector waits for it.
            Err(why) => Status::Degraded(format!("libvirt does not answer: {why}")),
        }
    }

    /// Returns whether libvirt answers that a QEMU has the guest.
    fn has_guest(&self) -> bool {
        let state = self.ask(ANSWER_TIMEOUT, |domain| domain.state());
        matches!(state, Ok(Some(DomainState::Running | DomainState::Paused)))
    }

    /// Returns whether the guest has shut down cleanly, and libvirt has ended its QEMU therefore. If libvirt's daemon was
    /// started again since, this is not known any more, and the result is false.
    fn has_shut_down(&self) -> bool {
        self.wait_until_off();
        let is_off_by_shutdown = self.ask(ANSWER_TIMEOUT, |domain| domain.is_off_by_shutdown());
        let log = last_lines(&Path::new(LOG_DIRECTORY).join(format!("{}.log", self.domain)), LOG_LINES);
        is_off_by_shutdown == Ok(Some(true)) && !was_ended_by_other_program(&log)
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

/// Returns whether another program than libvirt has ended the last QEMU of this log by a signal. libvirt takes that for a
/// shutdown of the guest.
fn was_ended_by_other_program(log: &str) -> bool {
    let message = log.lines().rfind(|line| line.contains(SIGNAL_MESSAGE));
    message.is_some_and(|line| !DAEMONS.iter().any(|daemon| line.trim_end().ends_with(daemon)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_of_another_program_is_no_shutdown_of_the_guest() {
        let line = |sender: &str| {
            format!("qemu-system-x86_64: {SIGNAL_MESSAGE} 15 from pid 7 ({sender})\n2026: shutting down\n")
        };
        assert!(!was_ended_by_other_program(&line("/usr/sbin/libvirtd")));
        assert!(!was_ended_by_other_program(&line("/usr/sbin/virtqemud")));
        assert!(was_ended_by_other_program(&line("/usr/lib/systemd/systemd")));
        assert!(was_ended_by_other_program(&(line("/usr/sbin/libvirtd") + &line("<unknown process>"))));
        assert!(!was_ended_by_other_program("2026: starting up\n"));
    }
}
