//! A pause of the guest: everything that happens between QMP `stop` and `cont`.

use crate::event::Steps;
use rekindle_kernel::process::Process;
use rekindle_kernel::sched::{self, First, Rank};
use rekindle_qemu::devices::{DeviceState, DeviceStateError};
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::stopped::Stopped;
use rekindle_vm::life::run_state;
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

/// What a pause gave.
#[derive(Debug)]
pub(crate) struct Paused<T> {
    pub result: T,
    /// The device state of that moment.
    pub devices: Vec<u8>,
    /// When QEMU stopped the guest, in µs since 1970.
    pub stopped_host_us: u64,
    /// When the guest went on.
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
        Ok(Self { process, control, save, devices, mark })
    }

    /// The connection, for whatever does not stop the guest.
    pub(crate) fn control(&mut self) -> &mut Qmp {
        &mut self.control
    }

    /// Stop the guest, save its devices, do `work` meanwhile, and let the guest go on, whatever came of it.
    ///
    /// Nobody else may stop the guest or let it go on meanwhile.
    pub(crate) fn pause<T, E: From<PauseError>>(
        &mut self,
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
        let done = self.stopped(&mut laps, work);
        drop(first);
        // Where the guest was not let go on, the mark stays for who can do it.
        let (result, stopped_host_us, resumed_host_us) = done?;
        remove(&self.mark)?;
        let result = result?;
        let devices = self.devices.take().map_err(PauseError::from)?;
        Ok(Paused { result, devices, stopped_host_us, resumed_host_us, steps: laps.steps })
    }

    /// With `stop` staged. The outer result: whether the guest runs again.
    fn stopped<T, E: From<PauseError>>(
        &mut self,
        laps: &mut Laps,
        work: impl FnOnce(&mut Stopped<'_>, &mut Laps) -> Result<T, E>,
    ) -> Result<(Result<T, E>, u64, u64), E> {
        let failed = |e: QmpError| E::from(PauseError::from(e));
        let (mut stopped, stopped_host_us) = Stopped::by_stopping(&mut self.control).map_err(failed)?;
        laps.steps.stop = laps.lap();
        let begun = match (&mut self.save, stopped.qmp()) {
            (Some(save), Some(control)) => self.devices.begin(save, true).and_then(|()| Ok(control.stage("cont", ())?)),
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
                result.and_then(|value| saved.map(|()| value).map_err(|e| PauseError::from(e).into()))
            }
            Err(e) => Err(PauseError::from(e).into()),
        };
        self.control.drop_events();
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
fn go_first(process: Process) -> First {
    let mut first = First::default();
    let rank = |name: &str| match name {
        sched::MAIN | "IO mon_iothread" => Some(Rank::First),
        _ => name.starts_with("CPU ").then_some(Rank::Third),
    };
    if let Err(e) = first.this_thread().and_then(|()| first.threads_of(process, rank)) {
        tracing::debug!("the pause is scheduled as everything else: {e}");
    }
    first
}
