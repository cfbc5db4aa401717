//! One guest's part of a suspend: it is prepared, then saved while its QEMU still exists, then ended or resumed.

use super::RebootMethod;
use super::digests::EarlyDigests;
use super::files::mapped;
use super::record::{FileDigest, SuspendedGuest, state_directory, state_files};
use super::survived::write_pages;
use crate::error::RebootError;
use crate::vmm::recover::{recover_cold, recover_handover};
use crate::vmm::{RUN_STATE_TIMEOUT, ReplaceOptions, Replacement, begin, stop};
use rekindle_handover::Handover;
use rekindle_handover::evidence::disk_times;
use rekindle_handover::saved_state::{StreamWriter, save_with_ram};
use rekindle_handover::source_state::{SourceState, StateSink};
use rekindle_life::shutdown::Ended;
use rekindle_life::shutdown::shut_down;
use rekindle_memory::digest;
use rekindle_memory::directory::RamDirectory;
use rekindle_qemu::binary::{Binary, BinaryError};
use rekindle_qemu::cpu;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::ramblock;
use rekindle_qemu::vmm;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Kind, SavedState, Step};
use rekindle_vm::lock::RunStateLock;
use rekindle_vm::names::saved_path;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::timeline::{Phase, host_us};
use rekindle_vm::{disks, ram};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Upper limit of the bytes written next to a guest's RAM besides digests: the device state, with video memory.
const MAX_STREAM_BYTES: u64 = 64 << 20;

/// Returns the name and kind of the operation that suspends a guest by this method.
pub(super) fn operation(how: RebootMethod) -> (String, Kind) {
    let kind = match how {
        RebootMethod::Warm => Kind::HostWarm,
        RebootMethod::Saved => Kind::HostSaved,
        RebootMethod::Cold => Kind::HostCold,
    };
    (format!("host suspend --how {how}"), kind)
}

/// A running guest whose suspend is prepared as far as possible.
pub(super) struct PreparedSuspend {
    replacement: Replacement,
    handover: Handover,
    /// `None` if the guest is to be shut down: QEMU serves one client at a time, and the shutdown connects itself.
    qmp: Option<Qmp>,
    cpu: cpu::Features,
    early: Option<EarlyDigests>,
    files: Vec<PathBuf>,
}

/// Runs the preflight of a suspend of VM `name`. Changes nothing.
pub(super) fn preflight(
    host: &Host,
    name: &str,
    how: RebootMethod,
    probe: impl FnOnce(&Path) -> Result<Binary, BinaryError>,
) -> Result<Replacement, RebootError> {
    let options = ReplaceOptions { how, qemu: None, rollback: false, verify_memory: false };
    let replacement = begin(host, name, &operation(how).0, &options, probe)?;
    if how == RebootMethod::Warm {
        let ram = &replacement.held.state.hardware.ram;
        // Eight bytes of digest for each page of 4 KiB.
        let state_directory = ram.path.parent().unwrap_or(Path::new("/"));
        RamDirectory::at(state_directory)?.check_room(ram.bytes / 512 + MAX_STREAM_BYTES)?;
    }
    Ok(replacement)
}

impl PreparedSuspend {
    pub(super) fn name(&self) -> &str {
        self.replacement.name()
    }

    /// *On failure:* the guest is unchanged.
    pub(super) fn new(mut replacement: Replacement) -> Result<Self, RebootError> {
        let how = replacement.options.how;
        let hardware = replacement.held.state.hardware.clone();
        let mut qmp = replacement.source_qemu.connect(vmm::START_TIMEOUT)?;
        let cpu = cpu::features(&mut qmp)?;
        let mut early = None;
        if how == RebootMethod::Warm {
            let held = RunStateLock::acquire(&replacement.held.rundir, RUN_STATE_TIMEOUT).map_err(LifeError::from)?;
            let mark = replacement.held.rundir.paused();
            early = EarlyDigests::begin(
                &replacement.source_qemu,
                &mut qmp,
                &hardware,
                replacement.running.then_some(mark.as_path()),
            )?;
            drop(held);
            replacement.recorder.step("digest memory ahead");
        }
        match replacement.begin_handover(operation(how).1) {
            Ok(handover) => {
                handover.pass("host.suspend.journalled");
                let qmp = (how != RebootMethod::Cold).then_some(qmp);
                let files = mapped(&replacement.source_qemu);
                Ok(Self { replacement, handover, qmp, cpu, early, files })
            }
            Err(e) => {
                discard_digests(early);
                Err(e)
            }
        }
    }

    pub(super) fn rundir_and_state(&self) -> (RunDir, State) {
        (self.replacement.held.rundir.clone(), self.replacement.held.state.clone())
    }

    pub(super) fn how(&self) -> RebootMethod {
        self.replacement.options.how
    }

    /// Stops the guest and saves it; its QEMU stays, with the guest stopped. With method cold, the guest is shut down
    /// instead, and its QEMU has ended.
    ///
    /// *On failure:* the guest is resumed if its QEMU lives.
    pub(super) fn save(
        mut self,
        host: &Host,
        token: &str,
        fell_back: Option<String>,
    ) -> Result<SavedGuest, RebootError> {
        let result = self.save_state(host);
        let Self { replacement, mut handover, qmp, cpu, early, files } = self;
        // QEMU serves one client at a time, and returning the guest to the source opens another connection.
        drop(qmp);
        let (saved, pages, stop_us) = match result {
            Ok(state) => state,
            Err(error) => {
                discard_digests(early);
                // A guest that was to be shut down and has ended is not lost.
                let is_shut_down = replacement.options.how == RebootMethod::Cold && !replacement.source_qemu.is_alive();
                return Err(if is_shut_down { error } else { handover.abandon(error).1 });
            }
        };
        let entry = SuspendedGuest {
            token: token.into(),
            how: replacement.options.how,
            state: replacement.held.state.clone(),
            running: replacement.running,
            saved,
            pages,
            cpu,
            disks: disk_times(&replacement.held.state.hardware),
            stop_us,
            fell_back,
            struck: false,
            steps: Vec::new(),
            files,
        };
        handover.journal.operation.saved = entry.saved.clone();
        // A guest that was shut down has no state to resume from.
        let step = if entry.how == RebootMethod::Cold { Step::Suspend } else { Step::Saved };
        let advanced = handover.advance(step);
        handover.recorder.step("keep the state");
        let saved = SavedGuest { replacement, handover, entry };
        saved.handover.pass("host.suspend.saved");
        match advanced {
            Ok(()) => Ok(saved),
            Err(e) => {
                saved.undo();
                Err(e.into())
            }
        }
    }

    /// Saves the guest. Returns its saved state and the digests of its RAM, if there are any, and the time of its stop
    /// in µs since 1970.
    fn save_state(&mut self, host: &Host) -> Result<(Option<SavedState>, Option<FileDigest>, u64), RebootError> {
        self.replacement.hold_run_state()?;
        self.handover.advance(Step::Suspend)?;
        self.handover.recorder.phase(Phase::Suspend);
        let state = self.replacement.held.state.clone();
        let rundir = self.replacement.held.rundir.clone();
        let source_qemu = self.replacement.source_qemu.clone();
        if self.how() == RebootMethod::Cold {
            let ended = shut_down(&source_qemu, state.definition.shutdown_timeout.as_duration())?;
            if matches!(ended, Ended::ByAgent | Ended::ByAcpi) {
                disks::end_epochs(&rundir, &state.hardware);
            }
            self.handover.recorder.step("shut down");
            return Ok((None, None, host_us()));
        }
        // Dropped at the end of this function, because returning the guest to the source opens another connection.
        let mut qmp = self.qmp.take().map_or_else(|| source_qemu.connect(vmm::START_TIMEOUT), Ok)?;
        if self.how() == RebootMethod::Saved {
            let stopped_host_us = self.stop(&mut qmp)?;
            let saved = save_with_ram(&mut qmp, &saved_path(host, &rundir, &state.definition))?;
            self.handover.recorder.step("save to disk");
            return Ok((Some(saved), None, stopped_host_us));
        }
        let [stream, pages] = state_files(&state_directory(&state), &rundir);
        let blocks = ramblock::list(&mut qmp)?;
        let mut stream = StreamWriter::create(stream)?;
        let mut sink = StateSink { feed: None, file: &mut stream };
        let mut source_state = SourceState::prepare(&source_qemu, &mut qmp, blocks, &mut sink)?;
        let stopped_host_us = self.stop(&mut qmp)?;
        source_state.begin(&mut qmp)?;
        source_state.send_blocks(&mut sink)?;
        stream.write(&source_state.send_devices(&mut qmp, None)?.bytes)?;
        let saved = stream.finish()?;
        self.handover.recorder.step("save devices");
        let digests = self.digests(&mut qmp, &state.hardware.ram.path)?;
        let digest_file = write_pages(&pages, &digests).map_err(|source| RebootError::File { path: pages, source })?;
        self.handover.recorder.step("digest memory");
        Ok((Some(saved), Some(digest_file), stopped_host_us))
    }

    /// Stops the guest and syncs its disk images, which must never be older than its memory. Returns the time of the
    /// stop, in µs since 1970.
    fn stop(&mut self, qmp: &mut Qmp) -> Result<u64, RebootError> {
        let stopped = stop(qmp, self.replacement.running)?;
        self.handover.recorder.step("stop");
        self.handover.pass("host.suspend.stopped");
        for disk in self.replacement.held.state.hardware.disks.iter().filter(|disk| !disk.readonly) {
            let synced = File::open(&disk.path).and_then(|image| image.sync_all());
            synced.map_err(|source| RebootError::File { path: disk.path.clone(), source })?;
        }
        self.handover.recorder.step("sync its disks");
        Ok(stopped)
    }

    fn digests(&mut self, qmp: &mut Qmp, ram: &Path) -> Result<Vec<u64>, RebootError> {
        match self.early.take().map(|early| early.finish(qmp)) {
            Some(Ok(digests)) => return Ok(digests),
            Some(Err(why)) => tracing::debug!("cannot use early digests; digesting all of {}: {why}", ram.display()),
            None => {}
        }
        digest::file_pages(ram).map_err(|source| RebootError::File { path: ram.to_owned(), source })
    }

    /// Cancels the suspend before the guest was stopped.
    pub(super) fn cancel(self) {
        let Self { replacement, handover, early, .. } = self;
        discard_digests(early);
        if let Err(e) = handover.journal.close() {
            tracing::error!("{}: {e}", replacement.name());
        }
    }
}

fn discard_digests(early: Option<EarlyDigests>) {
    if let Some(early) = early {
        early.discard();
    }
}

/// A guest whose state is saved, and whose QEMU still exists.
pub(super) struct SavedGuest {
    replacement: Replacement,
    handover: Handover,
    pub(super) entry: SuspendedGuest,
}

impl SavedGuest {
    pub(super) fn name(&self) -> &str {
        self.replacement.name()
    }

    pub(super) fn vmm(&self) -> &vmm::Vmm {
        &self.replacement.source_qemu
    }

    /// Returns the directory of the guest's RAM if the RAM stays in place (method warm); `None` with other methods.
    pub(super) fn ram_directory(&self) -> Option<&Path> {
        self.entry.state.hardware.ram.path.parent().filter(|_| self.entry.how == RebootMethod::Warm)
    }

    /// Returns the entry with the steps taken so far.
    pub(super) fn entry_with_steps(&self) -> SuspendedGuest {
        SuspendedGuest { steps: self.handover.recorder.entries().to_vec(), ..self.entry.clone() }
    }

    /// Undoes the suspend. A guest whose QEMU has ended already is resumed from its saved state or, if it was shut
    /// down, booted.
    pub(super) fn undo(self) {
        let Self { replacement, mut handover, entry } = self;
        let name = replacement.name().to_owned();
        let undone = if replacement.source_qemu.is_alive() {
            if let Some(saved) = &entry.saved {
                let _ = fs::remove_file(&saved.path);
            }
            handover.journal.operation.saved = None;
            handover.return_to_source().map_err(RebootError::from)
        } else if entry.how == RebootMethod::Cold {
            recover_cold(handover).map(drop)
        } else {
            recover_handover(handover).map(drop)
        };
        if let Err(e) = undone {
            tracing::error!("{name}: cannot resume the guest: {e}; run: rekindle recover {name}");
        }
    }

    /// Ends the QEMU and the disk servers. The record must be committed.
    pub(super) fn end(self) -> Result<(), RebootError> {
        let hardware = &self.replacement.held.state.hardware;
        let named = |source| RebootError::File { path: self.replacement.held.rundir.path().to_owned(), source };
        self.replacement.source_qemu.kill().map_err(named)?;
        disks::end(&self.replacement.held.rundir, hardware).map_err(LifeError::from)?;
        if self.entry.how == RebootMethod::Saved {
            // The saved state on disk contains the RAM, so the RAM files are not needed any more.
            let directory = hardware.ram.path.parent().unwrap_or(Path::new("/"));
            for (path, _) in hardware.ram_files() {
                RamDirectory::at(directory)?.remove(&ram::file_id(&path))?;
            }
        }
        self.handover.recorder.write(&self.replacement.held.rundir);
        self.handover.pass("host.suspend.ended");
        Ok(())
    }
}
