//! A pause of the guest: everything that happens between QMP `stop` and `cont`.

use crate::event::Steps;
use rekindle_kernel::process::Process;
use rekindle_kernel::sched::{self, PriorityBoost, Rank};
use rekindle_qemu::devices::{DeviceState, DeviceStateError};
use rekindle_qemu::hold::Hold;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::stopped::Stopped;
use rekindle_vm::life::run_state;
use rekindle_vm::timeline::host_us;
use serde_json::Value;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long QEMU may take to let a guest go on. It takes a millisecond.
const RESUME: Duration = Duration::from_secs(10);

/// Why there was no pause.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PauseError {
    /// Somebody else has stopped the guest.
    #[error("the guest is stopped already ({state})")]
    NotRunning {
        /// QEMU's run state.
        state: String,
    },
    /// QEMU does not do as it is told.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// There is no device state.
    #[error(transparent)]
    Devices(#[from] DeviceStateError),
    /// The mark for who finds the guest stopped cannot be made.
    #[error("{}", path.display())]
    Mark {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// What comes of the guest after a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// It goes on, whatever came of the pause.
    GoesOn,
    /// It stays stopped, whatever came of the pause: its journal says who lets it go on.
    Stays,
}

/// What a pause gave.
#[derive(Debug)]
pub(crate) struct Paused<T> {
    pub result: T,
    /// The device state of that moment.
    pub devices: Vec<u8>,
    /// When QEMU stopped the guest, in µs since 1970.
    pub stopped_host_us: u64,
    /// When the guest went on; when all of it was read, if it stays stopped.
    pub resumed_host_us: u64,
    pub steps: Steps,
}

/// The monitors of a QEMU that a pause needs.
#[derive(Debug)]
pub(crate) struct Monitors {
    process: Process,
    control: Qmp,
    /// A second one, on which the command that saves is staged.
    save: Option<Qmp>,
    devices: DeviceState,
    /// What the guest sends is held until a checkpoint counts.
    hold: Option<Hold>,
    /// There while we keep the guest stopped: were we killed in between, whoever comes next lets it go on.
    mark: PathBuf,
}

/// Times of the steps of a pause.
#[derive(Debug)]
pub(crate) struct Laps {
    at: Instant,
    pub steps: Steps,
}

impl Laps {
    fn new() -> Self {
        Self { at: Instant::now(), steps: Steps::default() }
    }

    /// µs since the last lap.
    pub(crate) fn lap(&mut self) -> u64 {
        let now = Instant::now();
        let us = now.duration_since(self.at).as_micros() as u64;
        self.at = now;
        us
    }
}

impl Monitors {
    pub(crate) fn new(
        process: Process,
        mut control: Qmp,
        save: Option<Qmp>,
        mark: PathBuf,
    ) -> Result<Self, PauseError> {
        let devices = DeviceState::open(&mut control)?;
        if mark.exists() {
            // Somebody of ours was killed in a pause; its threads may still go before all others.
            if let Err(e) = sched::normal(process) {
                tracing::debug!("QEMU's threads are scheduled as they were left: {e}");
            }
            if run_state(&mut control)? == "paused" {
                control.execute::<Value>("cont", ())?;
            }
            remove(&mark)?;
        }
        Ok(Self { process, control, save, devices, hold: None, mark })
    }

    /// The connection, for whatever does not stop the guest.
    pub(crate) fn control(&mut self) -> &mut Qmp {
        &mut self.control
    }

    /// From here on what the guest sends on `nets` waits for [`Monitors::release`]; without `nets`, if somebody has begun to hold it already.
    /// Gives whether it does.
    ///
    /// Needs the second connection: on the first one there may be something staged.
    pub(crate) fn hold(&mut self, nets: Option<&[&str]>) -> Result<bool, QmpError> {
        if let Some(save) = &mut self.save {
            self.hold = match nets {
                Some(nets) => Some(Hold::begin(save, nets.iter().copied())?),
                None => match Hold::found(save)? {
                    // Whole, and its gate closed.
                    Some(found) => Some(Hold::begin(save, found.nets())?),
                    None => None,
                },
            };
        }
        Ok(self.hold.is_some())
    }

    /// Whether what the guest sends is held.
    pub(crate) fn holds(&self) -> bool {
        self.hold.is_some()
    }

    /// Let out what the guest had sent when it was stopped last: that moment is safe.
    pub(crate) fn release(&mut self) -> Result<(), QmpError> {
        match (&self.hold, &mut self.save) {
            (Some(hold), Some(save)) => hold.release(save),
            _ => Ok(()),
        }
    }

    /// Let out all, and hold nothing more.
    pub(crate) fn let_out(&mut self) -> Result<(), QmpError> {
        match (self.hold.take(), &mut self.save) {
            (Some(hold), Some(save)) => hold.end(save),
            _ => Ok(()),
        }
    }

    /// Stop the guest, save its devices, do `work` meanwhile, and let the guest go on, whatever came of it.
    ///
    /// Nobody else may stop the guest or let it go on meanwhile.
    pub(crate) fn pause<T, E: From<PauseError>>(
        &mut self,
        work: impl FnOnce(&mut Stopped<'_>, &mut Laps) -> Result<T, E>,
    ) -> Result<Paused<T>, E> {
        self.pause_then(Then::GoesOn, work)
    }

    /// The same for a guest that may have to stay stopped.
    pub(crate) fn pause_then<T, E: From<PauseError>>(
        &mut self,
        then: Then,
        work: impl FnOnce(&mut Stopped<'_>, &mut Laps) -> Result<T, E>,
    ) -> Result<Paused<T>, E> {
        let failed = |e: QmpError| E::from(PauseError::from(e));
        let state = run_state(&mut self.control).map_err(failed)?;
        if state != "running" {
            return Err(PauseError::NotRunning { state }.into());
        }
        self.control.stage("stop", ()).map_err(failed)?;
        if let Some(save) = &mut self.save {
            self.devices.stage(save).map_err(failed)?;
        }
        let mark = |source| PauseError::Mark { path: self.mark.clone(), source };
        fs::write(&self.mark, []).map_err(mark)?;
        let first = go_first(self.process);
        let mut laps = Laps::new();
        let done = self.stopped(&mut laps, then, work);
        drop(first);
        // Where the guest was not let go on, the mark stays for who can do it.
        let (result, stopped_host_us, resumed_host_us) = done?;
        remove(&self.mark)?;
        let result = result?;
        let devices = self.devices.take().map_err(PauseError::from)?;
        Ok(Paused { result, devices, stopped_host_us, resumed_host_us, steps: laps.steps })
    }

    /// With `stop` staged. The outer result: whether the guest runs again, if it is to.
    fn stopped<T, E: From<PauseError>>(
        &mut self,
        laps: &mut Laps,
        then: Then,
        work: impl FnOnce(&mut Stopped<'_>, &mut Laps) -> Result<T, E>,
    ) -> Result<(Result<T, E>, u64, u64), E> {
        let failed = |e: QmpError| E::from(PauseError::from(e));
        let (mut stopped, stopped_host_us) = Stopped::by_stopping(&mut self.control).map_err(failed)?;
        laps.steps.stop = laps.lap();
        let begun = match (&mut self.save, stopped.qmp()) {
            (Some(save), Some(control)) => self.devices.begin(save, true).and_then(|()| match then {
                Then::GoesOn => Ok(control.stage("cont", ())?),
                Then::Stays => Ok(()),
            }),
            (None, Some(control)) => self.devices.begin(control, false),
            (_, None) => Ok(()),
        };
        let staged = begun.is_ok() && self.save.is_some();
        let result = match begun {
            Ok(()) => {
                let result = work(&mut stopped, laps);
                laps.lap();
                let saved = match (&mut self.save, stopped.qmp()) {
                    (Some(save), _) => self.devices.wait(save),
                    (None, Some(control)) => self.devices.wait(control),
                    (None, None) => Ok(()),
                };
                laps.steps.devices = laps.lap();
                let saved = match (&self.hold, &mut self.save) {
                    (Some(hold), Some(save)) => saved.and_then(|()| Ok(hold.cut(save)?)),
                    _ => saved,
                };
                laps.steps.cut = laps.lap();
                result.and_then(|value| saved.map(|()| value).map_err(|e| PauseError::from(e).into()))
            }
            Err(e) => Err(PauseError::from(e).into()),
        };
        self.control.drop_events();
        if then == Then::Stays {
            return Ok((result, stopped_host_us, host_us()));
        }
        if staged { self.control.fire("cont") } else { self.control.send("cont", (), &[]) }.map_err(failed)?;
        self.control.reply::<Value>("cont").map_err(failed)?;
        let resumed =
            self.control.wait_event("RESUME", RESUME, |event| (event.name == "RESUME").then_some(event.host_us));
        let resumed_host_us = resumed.map_err(failed)?;
        laps.steps.resume = laps.lap();
        Ok((result, stopped_host_us, resumed_host_us))
    }
}

fn remove(mark: &Path) -> Result<(), PauseError> {
    match fs::remove_file(mark) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(PauseError::Mark { path: mark.to_owned(), source })
        }
        _ => Ok(()),
    }
}

/// Let those threads go before all others that the stopped guest waits for. As in a warm reboot: `docs/vmm-restart.md`.
fn go_first(process: Process) -> PriorityBoost {
    let mut first = PriorityBoost::default();
    let rank = |name: &str| match name {
        sched::MAIN | "IO mon_iothread" => Some(Rank::First),
        _ => name.starts_with("CPU ").then_some(Rank::Third),
    };
    if let Err(e) = first.this_thread().and_then(|()| first.threads_of(process, rank)) {
        tracing::debug!("the pause is scheduled as everything else: {e}");
    }
    first
}
