//! Whether the guest really runs: QEMU is asked, not only its process looked for.

use crate::loops;
use crate::resource::Resource;
use rekindle_kernel::file::flock_holder;
use rekindle_probe::{Target, check};
use rekindle_protect::owned::Owned;
use rekindle_protect::progress::{age, committed};
use rekindle_protect::protector::Settings;
use rekindle_qemu::agent;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::definition::{Definition, NetBackend, TapPlace};
use rekindle_vm::host::Host;
use rekindle_vm::life::{self, OFF, SHUT_DOWN, Status};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::shutdown::pull_the_plug;
use rekindle_vm::state::State;
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Between two looks at a guest that is just being stopped or let go.
const LOOK: Duration = Duration::from_millis(50);
/// How long QEMU may take to answer.
const ANSWER: Duration = Duration::from_secs(2);
/// How long its store may take to say who has the guest.
const STORE: Duration = Duration::from_secs(3);
/// How long the guest's service may take to answer.
const SERVICE: Duration = Duration::from_secs(5);
/// So many checkpoints an answer takes where what the guest sends is held: for its address, its connection and itself, and the one that was
/// under way.
const HELD: u32 = 4;

/// How long a guest that has reset itself or has panicked may be without its reboot, before it counts as one that has ended: whoever
/// waits for that takes the VM's lock at once, and is seen by that.
const REBOOT: Duration = Duration::from_secs(3);
/// So many intervals without a checkpoint, and [`LATE`] at least, and the guest counts as not protected.
const LATE_INTERVALS: u32 = 10;
/// Whatever the interval is: a store may be away for so long without being told of here.
const LATE: Duration = Duration::from_secs(60);

/// What is to be said of the VM on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", content = "why", rename_all = "kebab-case")]
pub enum Verdict {
    /// Its guest runs.
    Running,
    /// Its guest runs; a process that serves it is missing, or a fail-over would take it back by more than it should.
    Degraded(String),
    /// Nothing of it runs that could harm a guest elsewhere.
    NotRunning,
    /// It is there, and its guest does not run, or not well.
    Failed(String),
}

impl Verdict {
    /// OCF's exit code.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Running => 0,
            Self::Failed(_) => 1,
            Self::NotRunning => 7,
            Self::Degraded(_) => 190,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Running => f.write_str("running"),
            Self::NotRunning => f.write_str("not running"),
            Self::Degraded(why) | Self::Failed(why) => f.write_str(why),
        }
    }
}

/// Look at the VM. A guest that was taken over elsewhere, and runs here still, is ended. A guest that runs without a protector is given
/// one. `deep`: its service is asked, as its definition's `probe` says.
#[must_use]
pub fn monitor(host: &Host, resource: &Resource, deadline: Instant, deep: bool) -> Verdict {
    let rundir = RunDir::new(&host.root, resource.name.as_str());
    let looked = look(&rundir, resource, deadline);
    if !matches!(looked, Verdict::Running | Verdict::Degraded(_)) {
        return looked;
    }
    if let Some(verdict) = protect_again(&rundir, resource) {
        return verdict;
    }
    if let Verdict::Degraded(_) = looked {
        return looked;
    }
    match if deep { service(&rundir, resource, deadline) } else { Verdict::Running } {
        Verdict::Running => late(&rundir, resource).map_or(Verdict::Running, Verdict::Degraded),
        other => other,
    }
}

/// Why the guest counts as not protected, if it does: a protector that ends each time, that is stopped, that writes elsewhere, or whose
/// store is away.
fn late(rundir: &RunDir, resource: &Resource) -> Option<String> {
    let vmm = qemu(rundir)?;
    let Settings { store, every, .. } = &resource.protect;
    let age = age(rundir, store, &vmm)?;
    (age > LATE.max(*every * LATE_INTERVALS)).then(|| {
        let (age, said) = (age.as_secs(), loops::last_words(rundir));
        format!(
            "its guest runs, and no checkpoint of it was committed to {store} for {age} s; its protector says: {said}"
        )
    })
}

/// Start a protector where there is none. A verdict where the guest may not run, or nobody can take checkpoints of it.
fn protect_again(rundir: &RunDir, resource: &Resource) -> Option<Verdict> {
    if loops::running(rundir).is_some() {
        return None;
    }
    // It says why it has ended; whether the guest may run at all comes first.
    match taken_over(rundir) {
        Ok(None) => {}
        Ok(Some(over)) => {
            tracing::error!("{over}");
            return Some(Verdict::NotRunning);
        }
        Err(why) => return Some(Verdict::Failed(why)),
    }
    let said = loops::last_words(rundir);
    match loops::ensure(rundir, resource) {
        Ok(_) => {
            let name = &resource.name;
            tracing::warn!(
                "{name}: nobody took checkpoints of it; a protector was started. The one before said: {said}"
            );
            None
        }
        Err(e) => Some(Verdict::Failed(format!("no checkpoints are taken of it, and that cannot be mended: {e}"))),
    }
}

/// Whether the guest runs.
fn look(rundir: &RunDir, resource: &Resource, deadline: Instant) -> Verdict {
    if !rundir.exists() {
        return Verdict::NotRunning;
    }
    match Owned::read(rundir) {
        Ok(Some(owned)) if owned.may_run(rundir).is_err() => {
            // Its end may have been cut off.
            return match pull_the_plug(rundir) {
                Ok(()) => Verdict::NotRunning,
                Err(e) => Verdict::Failed(format!("another node has it, and it cannot be ended here: {e}")),
            };
        }
        Ok(_) => {}
        Err(e) => return Verdict::Failed(e.to_string()),
    }
    let mut tried = false;
    let mut reboot_until = None;
    loop {
        let status = match life::status(rundir) {
            Ok(status) => status,
            Err(e) => return Verdict::Failed(e.to_string()),
        };
        // A protector that was killed in its pause has left the guest stopped: the next one lets it go on.
        let left = matches!(&status, Status::Stopped(why) if why == "paused") && rundir.paused().exists();
        if left
            && !std::mem::replace(&mut tried, true)
            && let Some(verdict) = protect_again(rundir, resource)
        {
            return verdict;
        }
        let verdict = match judge(rundir, &status) {
            Some(Verdict::NotRunning | Verdict::Failed(_)) if may_reboot(rundir, &status) => {
                let until = *reboot_until.get_or_insert_with(|| deadline.min(Instant::now() + REBOOT));
                if Instant::now() < until { None } else { judge(rundir, &status) }
            }
            verdict => verdict,
        };
        match verdict {
            // A checkpoint stops it for milliseconds; a reboot is under way; its QEMU is slow.
            None if Instant::now() < deadline => thread::sleep(LOOK),
            None => return Verdict::Failed("its guest is stopped, or its QEMU does not answer".into()),
            Some(verdict) => return verdict,
        }
    }
}

/// Whether a guest that has come to its end may be one that is about to be booted again, by `rekindle watch`.
fn may_reboot(rundir: &RunDir, status: &Status) -> bool {
    let ended = matches!(status, Status::Stopped(why) if SHUT_DOWN.contains(&why.as_str()));
    let is_watched = |state: State| state.definition.watches_guest();
    ended
        && State::read(rundir).ok().flatten().is_some_and(is_watched)
        && matches!(flock_holder(&rundir.watch_lock()), Ok(Some(_)))
}

/// `None`: to be looked at again.
fn judge(rundir: &RunDir, status: &Status) -> Option<Verdict> {
    match status {
        // Its only monitor is its protector's.
        Status::Protected => Some(Verdict::Running),
        Status::Running => match stays_when_shut_down(rundir) {
            Ok(()) => Some(Verdict::Running),
            Err(_) => None,
        },
        Status::Degraded(why) => match stays_when_shut_down(rundir) {
            Ok(()) => Some(Verdict::Degraded(format!("its guest runs, but is degraded: {why}"))),
            Err(_) => None,
        },
        // It was in order, and is not to be gone back behind.
        Status::Stopped(why) if why == OFF => Some(Verdict::NotRunning),
        Status::Stopped(why) if SHUT_DOWN.contains(&why.as_str()) => {
            Some(Verdict::Failed(format!("its guest is {why}")))
        }
        Status::Stopped(_) | Status::Silent => None,
        // The QEMU before has ended or is about to; there is going to be one.
        Status::Busy(_) => None,
        Status::Prepared | Status::Ended => Some(Verdict::NotRunning),
        Status::Suspended => Some(Verdict::Failed("it is suspended for a reboot of this host".into())),
        Status::NeedsRecovery => Some(Verdict::Failed("an operation on it was cut off; rekindle recover".into())),
    }
}

/// Have QEMU stay when its guest powers itself off, so that this can be told from a crash.
pub(crate) fn stays_when_shut_down(rundir: &RunDir) -> Result<(), QmpError> {
    let Some(vmm) = qemu(rundir) else { return Ok(()) };
    let mut qmp: Qmp = vmm.watch(ANSWER)?;
    qmp.execute::<Value>("set-action", json!({"shutdown": "pause"})).map(drop)
}

/// Ask the guest to shut itself down, through its agent if it has one, and do not wait for it.
pub(crate) fn tell_to_shut_down(rundir: &RunDir) -> Result<(), QmpError> {
    let Some(vmm) = qemu(rundir) else { return Ok(()) };
    let mut qmp: Qmp = vmm.watch(ANSWER)?;
    if agent::listens(&mut qmp).unwrap_or(false) && agent::shut_down(&vmm.directory().agent(), ANSWER).is_ok() {
        return Ok(());
    }
    qmp.execute::<Value>("system_powerdown", json!({})).map(drop)
}

fn qemu(rundir: &RunDir) -> Option<Vmm> {
    State::read(rundir).ok().flatten().and_then(|state| state.vmm)
}

/// Ask the store whether another node has the guest, and end it here if so.
///
/// A store that cannot be reached says nothing: the guest runs on, as it does while its protector waits for the store.
fn taken_over(rundir: &RunDir) -> Result<Option<String>, String> {
    let Some(owned) = Owned::read(rundir).map_err(|e| e.to_string())? else { return Ok(None) };
    let state = State::read(rundir).map_err(|e| e.to_string())?;
    let Some(uuid) = state.and_then(|state| state.hardware.uuid) else { return Ok(None) };
    let (answer, waits) = mpsc::channel();
    let asks = owned.clone();
    // Not longer than this, whatever the store's line is patient with: a look that takes too long counts as a guest that has failed.
    thread::spawn(move || drop(answer.send(asks.ask(uuid))));
    let Ok(asked) = waits.recv_timeout(STORE) else {
        tracing::warn!("{}: its store does not answer", rundir.name());
        return Ok(None);
    };
    match asked {
        Ok(None) => Ok(None),
        Ok(Some(owner)) => {
            let over = owned.give_up(rundir, &owner);
            over.map(|over| Some(over.to_string()))
                .map_err(|e| format!("another node has it, and it cannot be ended here: {e}"))
        }
        Err(e) => {
            tracing::warn!("{}: its store cannot be asked: {e}", rundir.name());
            Ok(None)
        }
    }
}

/// Ask its service. Where what the guest sends is held until a checkpoint counts, an answer takes some checkpoints: without those it is
/// not the guest that does not answer.
fn service(rundir: &RunDir, resource: &Resource, deadline: Instant) -> Verdict {
    let definition = match State::read(rundir) {
        Ok(Some(state)) => state.definition,
        Ok(None) => return Verdict::NotRunning,
        Err(e) => return Verdict::Failed(e.to_string()),
    };
    let Some(probe) = &definition.probe else { return Verdict::Running };
    let target: Target = match probe.to_string().parse() {
        Ok(target) => target,
        Err(e) => return Verdict::Failed(format!("`probe`: {e}")),
    };
    let held = resource.protect.output_commit;
    let left = deadline.saturating_duration_since(Instant::now());
    let patience = if held { (SERVICE + resource.protect.every * HELD).min(left) } else { SERVICE };
    let before = committed(rundir);
    match check(&target, patience, namespace(&definition)) {
        Ok(_) => Verdict::Running,
        Err(e) if held && committed(rundir) < before + u64::from(HELD) => {
            tracing::warn!(
                "{}: its service does not answer yet, too few checkpoints were committed since: {e}",
                rundir.name()
            );
            Verdict::Running
        }
        Err(e) => Verdict::Failed(format!("its service does not answer: {e}")),
    }
}

/// The network namespace in which its tap is.
fn namespace(definition: &Definition) -> Option<&str> {
    definition.nets.iter().find_map(|net| match &net.backend {
        NetBackend::Tap { place: TapPlace::Netns { netns, .. }, .. } => Some(netns.as_str()),
        NetBackend::Tap { .. } | NetBackend::User { .. } => None,
    })
}

/// Whether its guest has shut itself down in order, and its QEMU waits to be told what then.
pub(crate) fn has_shut_down(rundir: &RunDir) -> bool {
    matches!(life::status(rundir), Ok(Status::Stopped(why)) if why == OFF)
}
