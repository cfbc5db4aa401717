//! A pause of the guest, from QMP `stop` to `cont`: the device state is saved while the caller works.
//!
//! ```text
//!  first connection   stage stop ──> stop ─── the caller's work ──────────────────> cont (staged)
//!  second connection  stage save ────────> save the devices ──> separate output ──┘
//! ```
//!
//! A *staged* command was sent except for its end, so that QEMU only has to receive the end.
//!
//! A QEMU that Rekindle did not start usually has one connection, which may be slow (libvirt). There, [`PipedSave`] does all
//! of a pause by one command, except for the first pause and for work that needs the monitor.

use crate::event::PauseSteps;
use rekindle_handover::priority::boost_monitor_and_processors;
use rekindle_kernel::inject::Injector;
use rekindle_kernel::process::Process;
use rekindle_kernel::sched::{self, PriorityBoost};
use rekindle_qemu::devices::{DeviceState, DeviceStateError};
use rekindle_qemu::guest;
use rekindle_qemu::guest::run_state;
use rekindle_qemu::hold::OutputHold;
use rekindle_qemu::piped_save::{self, HeldSave, PipedSave, SavedInPause};
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::stopped::Stopped;
use rekindle_vm::fault;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::timeline::host_us;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long QEMU may take to resume a guest. It usually takes a millisecond.
const RESUME_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a pause failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PauseError {
    /// The guest was stopped by another process.
    #[error("the guest is stopped already ({state})")]
    NotRunning {
        /// QEMU's run state.
        state: String,
    },
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error(transparent)]
    Devices(#[from] DeviceStateError),
    /// The mark of a guest that this process has stopped cannot be written.
    #[error("{}", path.display())]
    Mark {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// The guest's state after a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterPause {
    /// The guest is resumed, also after a failure.
    Resume,
    /// The guest stays stopped, also after a failure: the journal of the operation decides how it continues.
    StayStopped,
}

/// The result of a pause.
#[derive(Debug)]
pub(crate) struct Paused<T> {
    pub result: T,
    /// The device state during the pause.
    pub devices: Vec<u8>,
    /// When QEMU stopped the guest, in µs since 1970.
    pub stopped_host_us: u64,
    /// When the guest was resumed, or, if it stays stopped, when its state was read; in µs since 1970.
    pub resumed_host_us: u64,
    pub steps: PauseSteps,
}

impl<T> Paused<T> {
    /// Returns how long the guest was stopped, in µs.
    pub(crate) fn stopped_us(&self) -> u64 {
        self.resumed_host_us.saturating_sub(self.stopped_host_us)
    }
}

/// The monitor connections to a QEMU that a pause needs.
#[derive(Debug)]
pub(crate) struct Monitors {
    process: Process,
    control: Qmp,
    /// A second connection, on which the command that saves the devices is staged.
    save: Option<Qmp>,
    devices: DeviceState,
    /// Set while network output is held.
    hold: Option<OutputHold>,
    piped: Piped,
    marks: PauseMarks,
}

/// The files that exist during a pause. If this process is killed, the next process that finds one ends the pause.
#[derive(Debug)]
pub(crate) struct PauseMarks {
    /// This process keeps the guest stopped: it must be resumed.
    stopped: PathBuf,
    /// QEMU resumes the guest by itself: only the priority of its threads must be lowered.
    piped: PathBuf,
}

impl PauseMarks {
    pub(crate) fn of(rundir: &RunDir) -> Self {
        Self { stopped: rundir.paused(), piped: rundir.piped_pause() }
    }
}

/// Whether pauses are done by a [`PipedSave`].
#[derive(Debug)]
enum Piped {
    /// Not with this QEMU.
    Never,
    /// From the next pause on, if the state of `state_bytes` is large enough.
    Wanted {
        injector: Injector,
        state_bytes: usize,
    },
    Open(PipedSave),
}

/// What the work of a pause needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PauseKind {
    /// The work sends no command to QEMU. The guest is resumed, also after a failure.
    WithoutMonitor,
    /// The work, or a program that it runs, may use a monitor.
    WithMonitor(AfterPause),
}

/// Measures the steps of a pause.
#[derive(Debug)]
pub(crate) struct LapTimer {
    lap_started: Instant,
    pub steps: PauseSteps,
}

impl LapTimer {
    fn new() -> Self {
        Self { lap_started: Instant::now(), steps: PauseSteps::default() }
    }

    /// Returns the time since the previous lap, in µs.
    pub(crate) fn lap(&mut self) -> u64 {
        let now = Instant::now();
        let us = now.duration_since(self.lap_started).as_micros() as u64;
        self.lap_started = now;
        us
    }
}

impl Monitors {
    pub(crate) fn new(
        process: Process,
        mut control: Qmp,
        save: Option<Qmp>,
        marks: PauseMarks,
    ) -> Result<Self, PauseError> {
        let devices = DeviceState::open(&mut control)?;
        if marks.stopped.exists() || marks.piped.exists() {
            // A protector was killed during a pause; QEMU's threads may still have a raised priority.
            if let Err(e) = sched::normal(process) {
                tracing::debug!("cannot reset the priority of QEMU's threads: {e}");
            }
            if marks.stopped.exists() && run_state(&mut control)? == "paused" {
                guest::resume(&mut control)?;
            }
            remove_mark(&marks.stopped)?;
            remove_mark(&marks.piped)?;
        }
        Ok(Self { process, control, save, devices, hold: None, piped: Piped::Never, marks })
    }

    /// Returns the first connection, for commands that do not stop the guest.
    pub(crate) fn control(&mut self) -> &mut Qmp {
        &mut self.control
    }

    /// Rejects a guest that another process has stopped.
    pub(crate) fn check_running(&mut self) -> Result<(), PauseError> {
        match run_state(&mut self.control)? {
            state if state == "running" => Ok(()),
            state => Err(PauseError::NotRunning { state }),
        }
    }

    /// Holds the guest's output on `nets` until [`Monitors::release_output`]. Without `nets`, holds output only if an
    /// earlier protector has started to.
    ///
    /// Uses the second connection, because a command may be staged on the first one.
    pub(crate) fn hold(&mut self, nets: Option<&[&str]>) -> Result<(), QmpError> {
        if let Some(save) = &mut self.save {
            self.hold = match nets {
                Some(nets) => Some(OutputHold::begin(save, nets.iter().copied())?),
                None => match OutputHold::find(save)? {
                    // Completes a partial hold, and closes its gate.
                    Some(earlier) => Some(OutputHold::begin(save, earlier.nets())?),
                    None => None,
                },
            };
        }
        Ok(())
    }

    /// Returns whether network output is held.
    pub(crate) fn holds_output(&self) -> bool {
        self.hold.is_some()
    }

    /// Releases the output that was sent before the last stop. Must be called after the checkpoint of that stop is
    /// committed.
    pub(crate) fn release_output(&mut self) -> Result<(), QmpError> {
        match (&self.hold, &mut self.save) {
            (Some(hold), Some(save)) => hold.release(save),
            _ => Ok(()),
        }
    }

    /// Releases all output and stops holding it.
    pub(crate) fn end_hold(&mut self) -> Result<(), QmpError> {
        match (self.hold.take(), &mut self.save) {
            (Some(hold), Some(save)) => hold.end(save),
            _ => Ok(()),
        }
    }

    /// Stops the guest, saves its devices, runs `work` meanwhile, and resumes the guest, also if `work` fails.
    ///
    /// The caller makes sure that no other process stops or resumes the guest meanwhile.
    pub(crate) fn pause<T, E: From<PauseError>>(
        &mut self,
        work: impl FnOnce(&mut Stopped<'_>, &mut LapTimer) -> Result<T, E>,
    ) -> Result<Paused<T>, E> {
        self.pause_as(PauseKind::WithMonitor(AfterPause::Resume), |_| Ok(()), work)
    }

    /// Does pauses by one command where possible, from now on. `state_bytes` is the size of the guest's device state.
    pub(crate) fn prefer_piped(&mut self, injector: Injector, state_bytes: usize) {
        self.piped = Piped::Wanted { injector, state_bytes };
    }

    /// Closes in QEMU what a [`PipedSave`] has there.
    pub(crate) fn close_piped(&mut self) -> Result<(), PauseError> {
        match std::mem::replace(&mut self.piped, Piped::Never) {
            Piped::Open(piped) => Ok(piped.close(&mut self.control)?),
            Piped::Never | Piped::Wanted { .. } => Ok(()),
        }
    }

    /// Does the same as [`Monitors::pause`] for another `kind` of pause. `begin` can use the monitor before a command is
    /// staged on it.
    pub(crate) fn pause_as<T, E: From<PauseError>>(
        &mut self,
        kind: PauseKind,
        begin: impl FnOnce(&mut Stopped<'_>) -> Result<(), E>,
        work: impl FnOnce(&mut Stopped<'_>, &mut LapTimer) -> Result<T, E>,
    ) -> Result<Paused<T>, E> {
        let failed = |e: QmpError| E::from(PauseError::from(e));
        self.check_running()?;
        let after = match kind {
            PauseKind::WithMonitor(after) => after,
            PauseKind::WithoutMonitor => {
                if let Some(started) = self.begin_piped()? {
                    return self.finish_piped(started, begin, work);
                }
                AfterPause::Resume
            }
        };
        guest::stage_stop(&mut self.control).map_err(failed)?;
        if let Some(save) = &mut self.save {
            self.devices.stage(save).map_err(failed)?;
        }
        write_mark(&self.marks.stopped)?;
        let boost = raise_priority(self.process);
        let mut laps = LapTimer::new();
        let pause = self.run_pause(&mut laps, after, begin, work);
        drop(boost);
        // If the guest was not resumed, the mark stays for recovery.
        let EndedPause { result, stopped_host_us, resumed_host_us } = pause?;
        remove_mark(&self.marks.stopped)?;
        let result = result?;
        let devices = self.devices.take().map_err(PauseError::from)?;
        Ok(Paused { result, devices, stopped_host_us, resumed_host_us, steps: laps.steps })
    }

    fn open_pipe(&mut self, injector: Injector, state_bytes: usize) -> Result<Option<PipedSave>, DeviceStateError> {
        let Some(pipe) = PipedSave::offer(&mut self.control, injector, state_bytes)? else { return Ok(None) };
        fault::point("pause.pipe.offered", None, None);
        pipe.place(&mut self.control).map(Some)
    }

    /// Stops the guest by a [`PipedSave`]. `None` if that is not possible; then the guest runs.
    fn begin_piped(&mut self) -> Result<Option<StartedPause>, PauseError> {
        let save = match std::mem::replace(&mut self.piped, Piped::Never) {
            Piped::Never => return Ok(None),
            Piped::Open(save) => save,
            Piped::Wanted { injector, state_bytes } => match self.open_pipe(injector, state_bytes) {
                Ok(Some(save)) => save,
                Ok(None) => return Ok(None),
                Err(DeviceStateError::Pipe(e)) => {
                    tracing::debug!("each pause takes three commands: {e}");
                    return Ok(None);
                }
                Err(e) => return Err(e.into()),
            },
        };
        let injector = save.injector();
        write_mark(&self.marks.piped)?;
        let boost = raise_priority(self.process);
        match save.begin(&mut self.control) {
            Ok(save) => Ok(Some(StartedPause { save, seen_host_us: host_us(), boost })),
            Err(e) => {
                drop(boost);
                remove_mark(&self.marks.piped)?;
                if let DeviceStateError::Qmp(QmpError::Refused { .. }) = e {
                    tracing::debug!("each pause takes three commands: {e}");
                    piped_save::close_leftovers(&mut self.control, injector)?;
                    return Ok(None);
                }
                Err(e.into())
            }
        }
    }

    /// Runs the work of a pause that [`Monitors::begin_piped`] has started, and resumes the guest.
    fn finish_piped<T, E: From<PauseError>>(
        &mut self,
        started: StartedPause,
        begin: impl FnOnce(&mut Stopped<'_>) -> Result<(), E>,
        work: impl FnOnce(&mut Stopped<'_>, &mut LapTimer) -> Result<T, E>,
    ) -> Result<Paused<T>, E> {
        let StartedPause { save, seen_host_us, boost } = started;
        let mut laps = LapTimer::new();
        let mut stopped = Stopped::by_held_save(&save);
        let worked = begin(&mut stopped).and_then(|()| work(&mut stopped, &mut laps));
        let read_host_us = host_us();
        let saved = save.finish(&mut self.control);
        drop(boost);
        remove_mark(&self.marks.piped)?;
        let (save, saved) = saved.map_err(PauseError::from)?;
        self.piped = Piped::Open(save);
        let result = worked?;
        let Some(SavedInPause { devices, stopped_host_us, resumed_host_us }) = saved else {
            return Err(PauseError::NotRunning { state: "paused".into() }.into());
        };
        laps.steps.stop = seen_host_us.saturating_sub(stopped_host_us);
        laps.steps.devices = resumed_host_us.saturating_sub(read_host_us);
        Ok(Paused { result, devices, stopped_host_us, resumed_host_us, steps: laps.steps })
    }

    /// Runs the pause, with `stop` staged. Fails if the guest could not be stopped, or not resumed although it should
    /// be; a failure of `work` is in the result.
    fn run_pause<T, E: From<PauseError>>(
        &mut self,
        laps: &mut LapTimer,
        after: AfterPause,
        begin: impl FnOnce(&mut Stopped<'_>) -> Result<(), E>,
        work: impl FnOnce(&mut Stopped<'_>, &mut LapTimer) -> Result<T, E>,
    ) -> Result<EndedPause<T, E>, PauseError> {
        let (mut stopped, stopped_host_us) = Stopped::by_stopping(&mut self.control)?;
        laps.steps.stop = laps.lap();
        let mut saver = DeviceSaver { save: self.save.as_mut(), devices: &self.devices, hold: self.hold.as_ref() };
        let began = begin(&mut stopped);
        laps.steps.disks = laps.lap();
        let started = began.and_then(|()| saver.start(&mut stopped, after).map_err(E::from));
        let resume_is_staged = started.is_ok() && saver.save.is_some() && after == AfterPause::Resume;
        let result = match started {
            Ok(()) => {
                let worked = work(&mut stopped, laps);
                laps.lap();
                let saved = saver.finish(&mut stopped, laps);
                worked.and_then(|value| saved.map(|()| value).map_err(E::from))
            }
            Err(e) => Err(e),
        };
        self.control.drop_events();
        let resumed_host_us = match after {
            AfterPause::StayStopped => host_us(),
            AfterPause::Resume if resume_is_staged => guest::resume_staged(&mut self.control, RESUME_TIMEOUT)?,
            AfterPause::Resume => guest::resume(&mut self.control)?,
        };
        if after == AfterPause::Resume {
            laps.steps.resume = laps.lap();
        }
        Ok(EndedPause { result, stopped_host_us, resumed_host_us })
    }
}

/// A pause that a [`PipedSave`] has started: the guest is stopped.
struct StartedPause {
    save: HeldSave,
    /// When this process has seen that the guest is stopped, in µs since 1970.
    seen_host_us: u64,
    boost: PriorityBoost,
}

/// A pause that has ended as it should; its work may have failed.
struct EndedPause<T, E> {
    result: Result<T, E>,
    stopped_host_us: u64,
    resumed_host_us: u64,
}

/// Saves the devices of a stopped guest, concurrently with the work of the pause if there is a second connection.
struct DeviceSaver<'a> {
    /// The second connection.
    save: Option<&'a mut Qmp>,
    devices: &'a DeviceState,
    hold: Option<&'a OutputHold>,
}

impl DeviceSaver<'_> {
    /// Starts to save the devices. On the first connection, stages the command that resumes the guest.
    fn start(&mut self, stopped: &mut Stopped<'_>, after: AfterPause) -> Result<(), PauseError> {
        match (&mut self.save, stopped.qmp()) {
            (Some(save), Some(control)) => {
                self.devices.begin_staged(save)?;
                if after == AfterPause::Resume {
                    guest::stage_resume(control)?;
                }
            }
            (None, Some(control)) => self.devices.begin(control)?,
            (_, None) => {}
        }
        Ok(())
    }

    /// Waits until the devices are saved. Separates the network output that was sent before the stop, if output is
    /// held.
    fn finish(&mut self, stopped: &mut Stopped<'_>, laps: &mut LapTimer) -> Result<(), PauseError> {
        let saved = match (&mut self.save, stopped.qmp()) {
            (Some(save), _) => self.devices.wait(save),
            (None, Some(control)) => self.devices.wait(control),
            (None, None) => Ok(()),
        };
        laps.steps.devices = laps.lap();
        saved?;
        if let (Some(hold), Some(save)) = (self.hold, &mut self.save) {
            hold.cut(save)?;
        }
        laps.steps.cut = laps.lap();
        Ok(())
    }
}

fn write_mark(mark: &Path) -> Result<(), PauseError> {
    fs::write(mark, []).map_err(|source| PauseError::Mark { path: mark.to_owned(), source })
}

fn remove_mark(mark: &Path) -> Result<(), PauseError> {
    match fs::remove_file(mark) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(PauseError::Mark { path: mark.to_owned(), source })
        }
        _ => Ok(()),
    }
}

/// Raises the priority of the threads that the stopped guest waits for, as a warm replacement does:
/// `docs/vmm-restart.md`.
fn raise_priority(process: Process) -> PriorityBoost {
    let mut boost = PriorityBoost::default();
    if let Err(e) = boost.this_thread().and_then(|()| boost_monitor_and_processors(&mut boost, process)) {
        tracing::debug!("cannot raise the priority of QEMU's threads for the pause: {e}");
    }
    boost
}
