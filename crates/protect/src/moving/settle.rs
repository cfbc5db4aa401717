//! Decides which host has a guest that was stopped for a move.
//!
//! The store decides. Only one host can become the next owner after the owner epoch of the last checkpoint, and each
//! host may resume the guest only as that owner. So every query has the same answer, now and later. If this
//! host is the answer, the other host can never have the guest. If the other host is the answer, it has claimed the
//! guest, and this host's copy is obsolete whatever happens on the other host: the guest's last checkpoint is in the
//! store. If the store does not answer, nothing is decided, and the guest stays stopped.

use super::MoveError;
use super::domain::SourceDomain;
use super::protocol::{Answer, Message, VERSION};
use super::record::MoveRecord;
use super::remote::RemoteHost;
use crate::owned::{OwnError, OwnerRecord};
use rekindle_disk::control::Control;
use rekindle_kernel::sched;
use rekindle_qemu::guest;
use rekindle_qemu::guest::run_state;
use rekindle_qemu::vmm::{self, Vmm};
use rekindle_store::StoreError;
use rekindle_store::types::{Guest, OnlyIf, Owner};
use rekindle_vm::causes::with_causes;
use rekindle_vm::cleanup::clean_up;
use rekindle_vm::definition::Name;
use rekindle_vm::disks;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{End, JOURNAL_FILE, Journal, Step};
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use std::thread;
use std::time::{Duration, Instant};

/// How long another host may take to report a VM's status: it may be executing an operation on the VM.
const STATUS_TIMEOUT: Duration = Duration::from_secs(90);
/// How long QEMU may take to reconnect to its disk servers.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The host that has a guest that was stopped for a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GuestOwner {
    ThisHost,
    /// The other host has claimed the guest.
    OtherHost,
}

/// Queries the store and settles the decision: if the other host has not claimed the guest, claims it for this host.
fn decide_owner(record: &mut MoveRecord, rundir: &RunDir) -> Result<GuestOwner, OwnError> {
    let (store, credentials, vm) = (&record.store, record.credentials(), &record.vm);
    // Claims as an owner whose guest starts on this host: the other host may have become the owner in the same way.
    let owner = Owner::here(&format!("move {} back {}", vm.name, record.token)).with(Guest::Restored);
    let only_if = Some(record.run.map_or(OnlyIf::Epoch(record.epoch), |run| OnlyIf::Run { run }));
    let epoch = match OwnerRecord::claim(rundir, store, credentials.as_ref(), vm, &owner, only_if) {
        Ok(fenced) => fenced.epoch,
        // The claim is this host's own, and is unrecorded because its answer was lost or the process was killed.
        Err(OwnError::Store(StoreError::Superseded { epoch, owner: newest, .. }))
            if !record.token.is_empty() && (&newest.operation, &newest.host) == (&owner.operation, &owner.host) =>
        {
            OwnerRecord::new(store, credentials.as_ref(), epoch).write(rundir)?;
            epoch
        }
        Err(OwnError::Store(e)) if e.kind() == "superseded" => return Ok(GuestOwner::OtherHost),
        Err(e) => return Err(e),
    };
    // With the new epoch in the record, a later query gets the same answer.
    (record.epoch, record.run) = (epoch, Some(epoch));
    if let Err(e) = record.write(rundir) {
        tracing::debug!("move.json: {e}");
    }
    Ok(GuestOwner::ThisHost)
}

/// Resumes the guest on this host. The caller holds the run state, and knows that no other host can have the guest.
/// `was_stopped`: the guest was stopped for the move, not by the user.
pub(super) fn resume_here(
    rundir: &RunDir,
    state: &State,
    vmm: &Vmm,
    journal: Journal,
    was_stopped: bool,
) -> Result<(), MoveError> {
    let failed_at = |path: std::path::PathBuf| move |source| MoveError::File { path, source };
    if disks::start(rundir, &state.hardware)? > 0 {
        wait_disks_connected(rundir, state);
    }
    // An interrupted pause may have left QEMU's threads with a raised priority.
    let _ = sched::normal(vmm.process());
    let mark = rundir.paused();
    if was_stopped || mark.exists() {
        let mut qmp = vmm.connect(vmm::START_TIMEOUT).map_err(LifeError::from)?;
        if run_state(&mut qmp).map_err(LifeError::from)? == "paused" {
            guest::resume(&mut qmp).map_err(LifeError::from)?;
        }
    }
    match std::fs::remove_file(&mark) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            return Err(MoveError::File { path: mark, source });
        }
        _ => {}
    }
    journal.close(End::Undone).map_err(failed_at(rundir.file(JOURNAL_FILE)))?;
    MoveRecord::remove(rundir).map_err(failed_at(rundir.file("move.json")))
}

/// Waits until QEMU has reconnected to the disk servers, which it tries every second. A guest that is resumed earlier
/// would wait for its disks.
fn wait_disks_connected(rundir: &RunDir, state: &State) {
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    let is_connected = |id: &str| {
        let status = Control::connect(&disks::control_socket(rundir, id)).and_then(|mut control| control.status());
        status.is_ok_and(|status| status.connected > 0)
    };
    while !disks::served(&state.hardware).all(|disk| is_connected(&disk.id)) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
    }
}

/// Removes a VM from this host after another host has claimed its guest.
pub(super) fn remove_here(host: &Host, held: &LockedVm, mut journal: Journal) -> Result<(), MoveError> {
    let path = held.rundir.file(JOURNAL_FILE);
    journal.advance(Step::Settle).map_err(|source| MoveError::File { path, source })?;
    rekindle_vm::fault::point("move.settle.journalled", held.state.vmm.as_ref(), None);
    if let Some(domain) = SourceDomain::of(&held.state) {
        domain.end(&held.rundir, &held.state)?;
    }
    Ok(clean_up(host, &held.rundir, &held.state)?)
}

/// Queries the other host for the VM's status. Also returns whether the guest runs on it.
pub(super) fn remote_status(remote: &RemoteHost, name: &Name) -> (bool, String) {
    let answer = remote.connect().and_then(|mut connection| {
        connection.ask(&Message::QueryStatus { version: VERSION, name: name.clone() }, STATUS_TIMEOUT)
    });
    match answer {
        Ok(Answer::Found { runs, status }) => (runs, status),
        Ok(Answer::Refused { why }) => (false, format!("unknown ({why})")),
        Ok(_) => (false, "unknown (the answer is of another kind)".into()),
        Err(e) => (false, format!("unknown ({e})")),
    }
}

/// The result of settling an interrupted move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// The guest runs on this host.
    ResumedHere,
    /// The guest runs on the other host; nothing of the VM is left on this host.
    RunsThere,
}

/// Settles an interrupted move whose source QEMU is alive or has ended for good. The caller holds the run state.
///
/// *Needs:* the store, if the other host may have been notified.
/// *On success:* as [`Settled`] describes.
/// *On failure:* the guest is stopped on this host, or nothing of it is left on this host ([`MoveError::Taken`]).
pub fn settle(host: &Host, held: &LockedVm, journal: Journal) -> Result<Settled, MoveError> {
    let name = held.rundir.name();
    let vmm = journal.operation.from.clone();
    let step = journal.operation.step;
    let source_qemu = vmm.filter(Vmm::is_alive);
    if step < Step::Resume {
        let vmm = source_qemu.ok_or_else(|| qemu_ended(held))?;
        resume_here(&held.rundir, &held.state, &vmm, journal, step == Step::Suspend)?;
        return Ok(Settled::ResumedHere);
    }
    let record = MoveRecord::read(&held.rundir);
    let mut record = record.map_err(|source| MoveError::File { path: held.rundir.file("move.json"), source })?;
    // Without a source QEMU there is nothing to decide: the guest's only state is in the store.
    if let Some(vmm) = source_qemu.filter(|_| step < Step::Settle) {
        let remote = record.remote.host.clone();
        let unknown = |e: OwnError| MoveError::Unknown { name: name.into(), host: remote, why: with_causes(&e) };
        if decide_owner(&mut record, &held.rundir).map_err(unknown)? == GuestOwner::ThisHost {
            resume_here(&held.rundir, &held.state, &vmm, journal, true)?;
            return Ok(Settled::ResumedHere);
        }
    }
    remove_here(host, held, journal)?;
    let (runs, status) = remote_status(&record.remote, &held.state.definition.name);
    if runs { Ok(Settled::RunsThere) } else { Err(taken(&record, status)) }
}

fn qemu_ended(held: &LockedVm) -> MoveError {
    let log = vmm::log_tail(&held.rundir.vmm(held.state.generation), 10);
    LifeError::Ended { name: held.rundir.name().into(), log }.into()
}

/// Returns the error for a guest that the other host has claimed and does not report as running.
pub(super) fn taken(record: &MoveRecord, status: String) -> MoveError {
    let (name, host, store) = (record.vm.name.clone(), record.remote.host.clone(), record.store.to_string());
    MoveError::Taken { name, host, status, store }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use rekindle_store::StoreUrl;
    use rekindle_store::admin;
    use rekindle_store::types::Vm;

    struct StoppedGuest {
        _root: tempfile::TempDir,
        store: StoreUrl,
        rundir: RunDir,
        record: MoveRecord,
    }

    /// Returns a guest that was stopped for a move, without an answer from the other host.
    fn stop_guest() -> StoppedGuest {
        let root = tempfile::tempdir().unwrap();
        let store = StoreUrl::Directory(root.path().join("store"));
        admin::init(&store, None).unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        let vm = Vm { uuid: uuid::Uuid::from_u128(7), name: "web".into() };
        let owner = Owner::here("start web").with(Guest::Booted);
        let epoch = OwnerRecord::claim(&rundir, &store, None, &vm, &owner, None).unwrap().epoch;
        let remote: RemoteHost =
            serde_json::from_value(serde_json::json!({"host": "b", "ssh": "ssh", "rekindle": "rekindle"})).unwrap();
        let record = MoveRecord::new(remote, store.clone(), None, vm, epoch, Some(epoch), 3);
        record.write(&rundir).unwrap();
        StoppedGuest { _root: root, store, rundir, record }
    }

    fn claim(moving: &StoppedGuest, operation: &str, guest: Guest, only_if: Option<OnlyIf>) -> Result<u64, StoreError> {
        let owner = Owner { host: "b".into(), ..Owner::here(operation).with(guest) };
        admin::fence(&moving.store, &moving.record.vm, &owner, only_if, None).map(|fenced| fenced.epoch)
    }

    #[test]
    fn a_claim_that_was_not_recorded_is_recognized() {
        let mut moving = stop_guest();
        let mut updated_record = moving.record.clone();
        assert_eq!(decide_owner(&mut updated_record, &moving.rundir).unwrap(), GuestOwner::ThisHost);
        // As if the process had been killed before it recorded the claim.
        moving.record.write(&moving.rundir).unwrap();
        let first_epoch = moving.record.run.unwrap();
        OwnerRecord::new(&moving.store, None, first_epoch).write(&moving.rundir).unwrap();
        assert_eq!(decide_owner(&mut moving.record, &moving.rundir).unwrap(), GuestOwner::ThisHost);
        assert_eq!(OwnerRecord::read(&moving.rundir).unwrap().unwrap().run(), updated_record.epoch);
        // The other host was given the epoch before that claim.
        assert!(matches!(
            claim(&moving, "receive web", Guest::Restored, Some(OnlyIf::Epoch(first_epoch))),
            Err(StoreError::Superseded { .. })
        ));
    }

    #[test]
    fn an_administrator_s_claim_does_not_take_the_guest() {
        let mut moving = stop_guest();
        claim(&moving, "store compact", Guest::Same, None).unwrap();
        assert_eq!(decide_owner(&mut moving.record, &moving.rundir).unwrap(), GuestOwner::ThisHost);
    }

    #[test]
    fn a_guest_that_the_other_host_has_claimed_is_there() {
        let mut moving = stop_guest();
        let epoch = claim(&moving, "receive web", Guest::Restored, Some(OnlyIf::Epoch(moving.record.epoch))).unwrap();
        assert_eq!(decide_owner(&mut moving.record.clone(), &moving.rundir).unwrap(), GuestOwner::OtherHost);
        // The other host has reported that it could not resume the guest.
        moving.record = moving.record.clone().with_owner_epoch(epoch);
        assert_eq!(decide_owner(&mut moving.record, &moving.rundir).unwrap(), GuestOwner::ThisHost);
    }
}
