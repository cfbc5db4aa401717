//! Takes checkpoints of a running guest until it is stopped.
//!
//! | module | contents |
//! |---|---|
//! | this one | parameters, result, entry |
//! | `control_loop` | when checkpoints are taken, and how the protector continues after a failure |
//! | `series` | one checkpoint on top of the other: the store's writer and the record of progress |
//! | `event_log` | what it adds to the events of the VM |
//! | `ownership` | makes this host the owner of the store |

mod control_loop;
mod event_log;
mod ownership;
mod series;

pub use crate::error::ProtectError;
pub use crate::plan::DiskPolicy;
pub(crate) use series::CheckpointSeries;

use crate::counters::CounterFile;
use crate::event::ProtectEvent;
use crate::policy::Policy;
use crate::recipe::permission;
use crate::target::{Target, TargetError};
use control_loop::ControlLoop;
use event_log::EventLog;
use rekindle_life::attach::ProtectionLock;
use rekindle_memory::directory::is_direct;
use rekindle_store::Credentials;
use rekindle_store::StoreUrl;
use rekindle_vm::host::Host;
use serde::{Deserialize, Serialize};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Parameters of a protector.
#[derive(Debug, Clone)]
pub struct ProtectSettings {
    pub store: StoreUrl,
    /// This host's credentials for the store.
    pub credentials: Option<Credentials>,
    /// Interval from the start of one checkpoint to the start of the next.
    pub every: Duration,
    /// The policy; none: the best policy for the guest.
    pub policy: Option<Policy>,
    /// Number of checkpoints that the store keeps.
    pub keep: u32,
    /// Warn when the newest checkpoint is older than this.
    pub max_lag: Option<Duration>,
    pub disks: DiskPolicy,
    /// Number of checkpoints after which to stop.
    pub count: Option<u64>,
    /// Hold network output until the checkpoint that covers it is committed.
    pub output_commit: bool,
    /// After `count` checkpoints, compare the stopped guest's memory with the newest checkpoint.
    pub compare: bool,
    /// After `count` checkpoints, take one more and leave the guest stopped. The caller ends the guest.
    pub stay: bool,
    /// Create the store if there is none.
    pub create_store: bool,
    /// Start a new store if the store that this host has written is missing.
    pub abandon_old: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Number of checkpoints that this protector has committed.
    pub checkpoints: u64,
    /// Number of the newest checkpoint.
    pub newest: Option<u64>,
    pub ended: StopReason,
    /// Network output is still held, and no protector releases it any more.
    #[serde(default)]
    pub output_held: bool,
    /// The guest's disks stay on overlays, which the newest checkpoint needs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overlays_left: bool,
}

/// Why a protector stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StopReason {
    /// Stopped by signal. Tracking stays in QEMU, so that the next protector can continue.
    #[serde(rename = "told")]
    Requested,
    /// The requested number of checkpoints was taken.
    Counted,
    /// The requested number of checkpoints was taken, and one more at which the guest stays stopped.
    Stays,
    /// The guest's QEMU has ended.
    QemuEnded,
}

/// Takes checkpoints of VM `name` until `stop` is set, the requested number is reached, or its QEMU ends.
///
/// *Needs:* the VM runs; root, or the same user with `kernel.yama.ptrace_scope=0`.
/// *On success:* the store has the guest's newest checkpoint.
/// *On failure:* the guest continues to run, unless another host has it now ([`ProtectError::OwnedElsewhere`]); the
/// store keeps the checkpoints that were committed before.
pub fn protect(
    host: &Host,
    name: &str,
    settings: &ProtectSettings,
    stop: &AtomicBool,
    on_event: &mut dyn FnMut(&ProtectEvent),
) -> Result<Summary, ProtectError> {
    let target = suitable_target(host, name, settings.output_commit)?;
    permission::remember(host, &target.state().definition.name, &target.recipe());
    // Must precede the claim of the store: if another protector of the VM runs, it can continue.
    let protection = ProtectionLock::take(target.rundir()).map_err(|e| ProtectError::tracking(name, e))?;
    let series = CheckpointSeries::open(host, &target, settings, &format!("protect {name}"), protection)?;
    let counters = CounterFile::new(target.rundir(), &settings.store, settings.every, settings.max_lag);
    let mut log = EventLog::new(target.rundir(), &settings.store);
    let mut on_event = |event: &ProtectEvent| {
        log.note(event);
        on_event(event);
    };
    let ended = ControlLoop::new(host, settings, stop, &mut on_event, series, counters).run(target);
    log.end(&ended);
    ended
}

/// Finds the running VM `name`. Rejects it if its RAM cannot be tracked or, for output commit, its network output cannot be
/// held.
pub(crate) fn suitable_target(host: &Host, name: &str, output_commit: bool) -> Result<Target, ProtectError> {
    let target = Target::of(host, name)?;
    reject_dax(&target)?;
    if output_commit && target.state().attached.is_some() {
        return Err(ProtectError::AttachedOutput { name: name.into() });
    }
    if output_commit && let Some(problem) = target.state().hardware.unheld_output() {
        return Err(ProtectError::UnheldOutput { name: name.into(), problem });
    }
    Ok(target)
}

/// Rejects guests whose RAM cannot be write-protected (DAX).
pub(crate) fn reject_dax(target: &Target) -> Result<(), ProtectError> {
    let (name, hardware) = (target.name(), &target.state().hardware);
    for (path, _) in hardware.ram_files().into_iter().filter(|_| hardware.foreign.is_none()) {
        match is_direct(&path) {
            Ok(false) => {}
            Ok(true) => return Err(ProtectError::Dax { name: name.into(), path }),
            // If the file cannot be checked, the guest is not tracked either.
            Err(source) => return Err(TargetError::RunDir { path, source }.into()),
        }
    }
    Ok(())
}
