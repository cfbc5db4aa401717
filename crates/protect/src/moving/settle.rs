//! What comes of a guest that was stopped for a move: it goes on here, or it is another host's.
//!
//! The store decides. Its owner epoch is taken by one host only, and both may let the guest go on only as its next owner. So whoever asks
//! for it gets one answer, now and later: *ours*, and the other host never can have it; or *theirs*, and this host's copy is of no
//! use any more, whatever became of theirs: its last checkpoint is in the store. A store that does not answer leaves it open, and
//! then the guest stays stopped.

use super::MoveError;
use super::far::Far;
use super::protocol::{Answer, Say, VERSION};
use super::record::Record;
use crate::owned::{OwnError, Owned};
use rekindle_disk::control::Control;
use rekindle_kernel::sched;
use rekindle_qemu::vmm::{self, Vmm};
use rekindle_store::StoreError;
use rekindle_store::types::{Guest, OnlyIf, Owner};
use rekindle_vm::definition::Name;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Step};
use rekindle_vm::life::{self, Held};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::{disks, life::run_state};
use serde_json::Value;
use std::thread;
use std::time::{Duration, Instant};

/// How long another host may take to say what it sees of a VM: it may be at work on it.
const LOOK: Duration = Duration::from_secs(90);
/// How long QEMU may take to find the servers of its disks again.
const CONNECTED: Duration = Duration::from_secs(5);

/// Whose a guest is that was stopped for a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whose {
    /// It goes on here.
    Ours,
    /// The other host has it, or had it.
    Theirs,
}

/// Ask the store, and settle it by asking: if it can still be ours, it is from here on.
fn whose(record: &mut Record, rundir: &RunDir) -> Result<Whose, OwnError> {
    let (store, identity, vm) = (&record.store, record.identity(), &record.vm);
    // As one that begins here: the other host may have become the owner for it.
    let owner = Owner::here(&format!("move {} back {}", vm.name, record.token)).with(Guest::Restored);
    let only_if = Some(record.run.map_or(OnlyIf::Epoch(record.epoch), |run| OnlyIf::Run { run }));
    let epoch = match Owned::begin(rundir, store, identity.as_ref(), vm, &owner, only_if) {
        Ok(fenced) => fenced.epoch,
        // Our own, of which nobody has learnt: its answer was lost, or whoever asked was killed.
        Err(OwnError::Store(StoreError::Superseded { epoch, owner: found, .. }))
            if !record.token.is_empty() && (&found.operation, &found.host) == (&owner.operation, &owner.host) =>
        {
            Owned::new(store, identity.as_ref(), epoch).write(rundir)?;
            epoch
        }
        Err(OwnError::Store(e)) if e.kind() == "superseded" => return Ok(Whose::Theirs),
        Err(e) => return Err(e),
    };
    // Whoever asks again is told the same.
    (record.epoch, record.run) = (epoch, Some(epoch));
    if let Err(e) = record.write(rundir) {
        tracing::debug!("move.json: {e}");
    }
    Ok(Whose::Ours)
}

/// Let the guest go on here. The caller holds the run state, and knows that no other host can have it. `stopped`: it was stopped for the
/// move, and is not as its owner wants it.
pub(super) fn go_on(
    rundir: &RunDir,
    state: &State,
    vmm: &Vmm,
    journal: Journal,
    stopped: bool,
) -> Result<(), MoveError> {
    let file = |path: std::path::PathBuf| move |source| MoveError::File { path, source };
    if disks::start(rundir, &state.hardware)? > 0 {
        wait_connected(rundir, state);
    }
    // A pause that was cut off has left its threads first; harmless, and not to stay.
    let _ = sched::normal(vmm.process());
    let mark = rundir.paused();
    let stuck = |e| life::LifeError::from(e);
    if stopped || mark.exists() {
        let mut qmp = vmm.connect(vmm::START).map_err(life::LifeError::from)?;
        if run_state(&mut qmp).map_err(stuck)? == "paused" {
            qmp.execute::<Value>("cont", ()).map_err(stuck)?;
        }
    }
    match std::fs::remove_file(&mark) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            return Err(MoveError::File { path: mark, source });
        }
        _ => {}
    }
    journal.close().map_err(file(rundir.file("operation.json")))?;
    Record::remove(rundir).map_err(file(rundir.file("move.json")))
}

/// QEMU tries each second. The guest would wait for its disks meanwhile, and so it is let go when they are there.
fn wait_connected(rundir: &RunDir, state: &State) {
    let deadline = Instant::now() + CONNECTED;
    let connected = |id: &str| {
        let status = Control::connect(&disks::control(rundir, id)).and_then(|mut control| control.status());
        status.is_ok_and(|status| status.connected > 0)
    };
    while !disks::served(&state.hardware).all(|disk| connected(&disk.id)) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
    }
}

/// It is another host's: nothing of it stays here.
pub(super) fn let_go(host: &Host, held: &Held, mut journal: Journal) -> Result<(), MoveError> {
    let path = held.rundir.file("operation.json");
    journal.advance(Step::Settle).map_err(|source| MoveError::File { path, source })?;
    rekindle_vm::fault::point("move.settle.journalled", held.state.vmm.as_ref(), None);
    Ok(life::clean_up(host, &held.rundir, &held.state)?)
}

/// What is to be seen of the VM on the other host: whether it runs, and in words.
pub(super) fn look(far: &Far, name: &Name) -> (bool, String) {
    let asked = far.connect().and_then(|mut line| line.ask(&Say::Ask { version: VERSION, name: name.clone() }, LOOK));
    match asked {
        Ok(Answer::Found { runs, status }) => (runs, status),
        Ok(Answer::Refused { why }) => (false, format!("not to be seen ({why})")),
        Ok(_) => (false, "not to be seen (another answer than one was asked for)".into()),
        Err(e) => (false, format!("not to be seen ({e})")),
    }
}

/// What became of a move that was cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// The guest goes on here.
    Back,
    /// It runs on the other host; nothing of it is left here.
    Away,
}

/// Settle a move that was cut off, whose QEMU here is alive or was stopped for good. The caller holds the run state.
///
/// *Needs:* the store, if the other host may have been told.
/// *On success:* as [`Settled`] says.
/// *On failure:* the guest is stopped here, or nothing of it is left here ([`MoveError::Taken`]).
///
/// # Errors
/// [`MoveError`].
pub fn settle(host: &Host, held: &Held, journal: Journal) -> Result<Settled, MoveError> {
    let name = held.rundir.name();
    let vmm = journal.operation.from.clone();
    let step = journal.operation.step;
    let alive = vmm.filter(Vmm::is_alive);
    if step < Step::Resume {
        let vmm = alive.ok_or_else(|| gone(held))?;
        go_on(&held.rundir, &held.state, &vmm, journal, step == Step::Suspend)?;
        return Ok(Settled::Back);
    }
    let record = Record::read(&held.rundir);
    let mut record = record.map_err(|source| MoveError::File { path: held.rundir.file("move.json"), source })?;
    // Without a QEMU here there is nothing to be decided: the guest is what the store has.
    if let Some(vmm) = alive.filter(|_| step < Step::Settle) {
        let far = record.far.host.clone();
        let unknown =
            |e: OwnError| MoveError::Unknown { name: name.into(), host: far, why: crate::protector::chain(&e) };
        if whose(&mut record, &held.rundir).map_err(unknown)? == Whose::Ours {
            go_on(&held.rundir, &held.state, &vmm, journal, true)?;
            return Ok(Settled::Back);
        }
    }
    let_go(host, held, journal)?;
    let (runs, status) = look(&record.far, &held.state.definition.name);
    if runs { Ok(Settled::Away) } else { Err(taken(&record, status)) }
}

fn gone(held: &Held) -> MoveError {
    let said = vmm::log_tail(&held.rundir.vmm(held.state.generation), 10);
    life::LifeError::Ended { name: held.rundir.name().into(), log: said }.into()
}

/// The other host has it, and it is not seen to run there.
pub(super) fn taken(record: &Record, status: String) -> MoveError {
    let (name, host, store) = (record.vm.name.clone(), record.far.host.clone(), record.store.to_string());
    MoveError::Taken { name, host, status, store }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use rekindle_store::StoreUrl;
    use rekindle_store::admin;
    use rekindle_store::types::Vm;

    struct Place {
        _root: tempfile::TempDir,
        store: StoreUrl,
        rundir: RunDir,
        record: Record,
    }

    /// A guest that was stopped for a move, and of whose fate the other host has said nothing.
    fn stopped() -> Place {
        let root = tempfile::tempdir().unwrap();
        let store = StoreUrl::Directory(root.path().join("store"));
        admin::init(&store, None).unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        let vm = Vm { uuid: uuid::Uuid::from_u128(7), name: "web".into() };
        let owner = Owner::here("start web").with(Guest::Booted);
        let epoch = Owned::begin(&rundir, &store, None, &vm, &owner, None).unwrap().epoch;
        let far: Far =
            serde_json::from_value(serde_json::json!({"host": "b", "ssh": "ssh", "rekindle": "rekindle"})).unwrap();
        let record = Record::new(far, store.clone(), None, vm, (epoch, Some(epoch)), 3);
        record.write(&rundir).unwrap();
        Place { _root: root, store, rundir, record }
    }

    fn claim(place: &Place, operation: &str, guest: Guest, only_if: Option<OnlyIf>) -> Result<u64, StoreError> {
        let owner = Owner { host: "b".into(), ..Owner::here(operation).with(guest) };
        admin::fence(&place.store, &place.record.vm, &owner, only_if, None).map(|fenced| fenced.epoch)
    }

    #[test]
    fn a_claim_of_which_nobody_has_learnt_is_known_again() {
        let mut place = stopped();
        let mut copy = place.record.clone();
        assert_eq!(whose(&mut copy, &place.rundir).unwrap(), Whose::Ours);
        // As if it had been killed before it wrote that down.
        place.record.write(&place.rundir).unwrap();
        let first = place.record.run.unwrap();
        Owned::new(&place.store, None, first).write(&place.rundir).unwrap();
        assert_eq!(whose(&mut place.record, &place.rundir).unwrap(), Whose::Ours);
        assert_eq!(Owned::read(&place.rundir).unwrap().unwrap().run(), copy.epoch);
        // The other host was told the epoch before it.
        assert!(matches!(
            claim(&place, "receive web", Guest::Restored, Some(OnlyIf::Epoch(first))),
            Err(StoreError::Superseded { .. })
        ));
    }

    #[test]
    fn an_administrator_s_claim_takes_the_guest_from_nobody() {
        let mut place = stopped();
        claim(&place, "store compact", Guest::Same, None).unwrap();
        assert_eq!(whose(&mut place.record, &place.rundir).unwrap(), Whose::Ours);
    }

    #[test]
    fn what_the_other_host_has_begun_is_its() {
        let mut place = stopped();
        let epoch = claim(&place, "receive web", Guest::Restored, Some(OnlyIf::Epoch(place.record.epoch))).unwrap();
        assert_eq!(whose(&mut place.record.clone(), &place.rundir).unwrap(), Whose::Theirs);
        // It has said that it could not let it go on after all.
        place.record = place.record.clone().at(epoch);
        assert_eq!(whose(&mut place.record, &place.rundir).unwrap(), Whose::Ours);
    }
}
