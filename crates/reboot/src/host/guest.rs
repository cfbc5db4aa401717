//! One guest's part of a *suspend*, in which all guests of a host are saved before the host reboots: it is prepared,
//! then saved while its QEMU still exists, then ended or resumed.
//!
//! ```text
//! PreparedSuspend ──save──> SavedGuest ──end──> only the saved state is left
//!  guest runs │              guest stopped │     QEMU has ended
//!             └─cancel                     └─undo: the guest runs again
//! ```
//!
//! | method | RAM | device state (everything else of a guest) |
//! |---|---|---|
//! | warm | stays in memory that survives the host's reboot; digests of its pages show damage | file next to the RAM |
//! | saved | in one file with the device state | the same file |
//! | cold | none: the guest is shut down, and booted after the host | none |
//!
//! A suspend is the first half of a *hand-over*, which moves a guest from its *source* QEMU to another one; the second
//! half follows after the reboot. The code for replacing a QEMU does the work:
//! - [`Replacement`]: a VM that has passed its checks and is locked, with its source QEMU.
//! - [`Handover`]: the hand-over in progress. Its *journal* records each step durably before it happens, so that
//!   `rekindle recover` can finish or undo it after a crash. Its *recorder* notes how long the steps take. Tests can
//!   crash the process where it calls `pass`.
//! - [`SuspendedGuest`]: the guest's entry in the host's record, from which it is resumed after the reboot.

use super::RebootMethod;
use super::digests::EarlyDigests;
use super::files::mapped_files;
use super::record::{FileDigest, SuspendedGuest, state_directory, state_files};
use super::survived::write_page_digests;
use crate::error::RebootError;
use crate::vmm::recover::{recover_cold, recover_handover};
use crate::vmm::{RUN_STATE_TIMEOUT, ReplaceOptions, Replacement, begin, stop};
use rekindle_handover::Handover;
use rekindle_handover::evidence::disk_times;
use rekindle_handover::ram::{Ram, SharedRam};
use rekindle_handover::saved_state::{StreamWriter, save_with_ram};
use rekindle_handover::source_state::{SourceState, StateSink, StreamForm};
use rekindle_life::shutdown::Ended;
use rekindle_life::shutdown::shut_down;
use rekindle_memory::digest;
use rekindle_memory::directory::RamDirectory;
use rekindle_qemu::binary::Binary;
use rekindle_qemu::cpu;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::ramblock;
use rekindle_qemu::vmm;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{End, Kind, SavedState, Step};
use rekindle_vm::lock::RunStateLock;
use rekindle_vm::names::saved_path;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::timeline::{Phase, host_us};
use rekindle_vm::{disks, ram};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Upper limit of the bytes of a device state, with video memory.
const MAX_DEVICE_STATE_BYTES: u64 = 64 << 20;
/// A digest takes eight bytes for each page of 4 KiB.
const RAM_BYTES_PER_DIGEST_BYTE: u64 = 4096 / 8;

/// A running guest whose suspend is prepared as far as possible.
pub(super) struct PreparedSuspend {
    replacement: Replacement,
    handover: Handover,
    /// `None` if the guest is to be shut down: QEMU serves one client at a time, and the shutdown connects itself.
    qmp: Option<Qmp>,
    cpu: cpu::Features,
    /// Digests of the RAM's pages, taken while the guest runs, so that few are left to be taken while it is stopped.
    early_digests: Option<EarlyDigests>,
    /// Files that the source QEMU has mapped, which the next one will need.
    mapped_files: Vec<PathBuf>,
    /// Reason why the guest is to be shut down although another method was requested.
    fell_back: Option<String>,
}

/// What a suspend keeps of a guest that it has stopped.
struct GuestRemains {
    /// `None` if the guest was shut down.
    saved: Option<SavedState>,
    /// Digests of the RAM's pages. `None` if the RAM does not stay in place.
    page_digests: Option<FileDigest>,
    /// When the guest was stopped: microseconds since 1970.
    stopped_host_us: u64,
}

impl PreparedSuspend {
    /// *On failure:* the guest is unchanged.
    pub(super) fn new(
        host: &Host,
        name: &str,
        how: RebootMethod,
        fell_back: Option<String>,
    ) -> Result<Self, RebootError> {
        let mut replacement = preflight(host, name, how)?;
        let mut qmp = replacement.source_qemu.connect(vmm::START_TIMEOUT)?;
        let cpu = cpu::features(&mut qmp)?;
        let early_digests = match how {
            RebootMethod::Warm => begin_digests(&mut replacement, &mut qmp)?,
            RebootMethod::Saved | RebootMethod::Cold => None,
        };
        match replacement.begin_handover(suspend_kind(how)) {
            Ok(handover) => {
                handover.pass("host.suspend.journalled");
                let qmp = (how != RebootMethod::Cold).then_some(qmp);
                let mapped_files = mapped_files(&replacement.source_qemu);
                Ok(Self { replacement, handover, qmp, cpu, early_digests, mapped_files, fell_back })
            }
            Err(e) => {
                discard_digests(early_digests);
                Err(e)
            }
        }
    }

    pub(super) fn name(&self) -> &str {
        self.replacement.name()
    }

    pub(super) fn how(&self) -> RebootMethod {
        self.replacement.options.how
    }

    pub(super) fn rundir(&self) -> &RunDir {
        &self.replacement.locked_vm.rundir
    }

    pub(super) fn state(&self) -> &State {
        &self.replacement.locked_vm.state
    }

    /// Stops the guest and saves it; its QEMU stays, with the guest stopped. With method cold, the guest is shut down
    /// instead, and its QEMU has ended.
    ///
    /// `token` identifies the suspend.
    ///
    /// *On failure:* the guest is resumed if its QEMU lives.
    pub(super) fn save(mut self, host: &Host, token: &str) -> Result<SavedGuest, RebootError> {
        let stopped_and_saved = self.stop_and_save(host);
        let Self { replacement, mut handover, qmp, cpu, early_digests, mapped_files, fell_back } = self;
        // QEMU serves one client at a time, and returning the guest to the source opens another connection.
        drop(qmp);
        let GuestRemains { saved, page_digests, stopped_host_us } = match stopped_and_saved {
            Ok(remains) => remains,
            Err(error) => {
                discard_digests(early_digests);
                // A guest that was to be shut down and has ended is not lost.
                let is_shut_down = replacement.options.how == RebootMethod::Cold && !replacement.source_qemu.is_alive();
                if is_shut_down {
                    return Err(error);
                }
                // Resumes the guest in its source QEMU.
                let (_, reported_error) = handover.abandon(error);
                return Err(reported_error);
            }
        };
        let entry = SuspendedGuest {
            token: token.into(),
            how: replacement.options.how,
            state: replacement.locked_vm.state.clone(),
            running: replacement.running,
            saved,
            page_digests,
            cpu,
            disk_times: disk_times(&replacement.locked_vm.state.hardware),
            stop_us: stopped_host_us,
            fell_back,
            resume_started: false,
            steps: Vec::new(),
            files: mapped_files,
        };
        handover.journal.operation.saved = entry.saved.clone();
        // A guest that was shut down has no state to resume from.
        let step = if entry.how == RebootMethod::Cold { Step::Suspend } else { Step::Saved };
        let advanced = handover.advance(step);
        handover.recorder.step("keep the state");
        let saved_guest = SavedGuest { replacement, handover, entry };
        saved_guest.handover.pass("host.suspend.saved");
        match advanced {
            Ok(()) => Ok(saved_guest),
            Err(e) => {
                saved_guest.undo();
                Err(e.into())
            }
        }
    }

    fn stop_and_save(&mut self, host: &Host) -> Result<GuestRemains, RebootError> {
        self.replacement.hold_run_state()?;
        self.handover.advance(Step::Suspend)?;
        self.handover.recorder.phase(Phase::Suspend);
        if self.how() == RebootMethod::Cold {
            return self.shut_down_guest();
        }
        // Dropped at the end of this function, because returning the guest to the source opens another connection.
        let mut qmp = match self.qmp.take() {
            Some(qmp) => qmp,
            None => self.replacement.source_qemu.connect(vmm::START_TIMEOUT)?,
        };
        match self.how() {
            RebootMethod::Saved => self.save_to_disk(host, &mut qmp),
            RebootMethod::Warm | RebootMethod::Cold => self.save_in_place(&mut qmp),
        }
    }

    fn shut_down_guest(&mut self) -> Result<GuestRemains, RebootError> {
        let state = self.state();
        let ended = shut_down(&self.replacement.source_qemu, state.definition.shutdown_timeout.as_duration())?;
        if matches!(ended, Ended::ByAgent | Ended::ByAcpi) {
            disks::end_epochs(self.rundir(), &state.hardware);
        }
        self.handover.recorder.step("shut down");
        Ok(GuestRemains { saved: None, page_digests: None, stopped_host_us: host_us() })
    }

    /// Saves the whole guest to disk, including its RAM.
    fn save_to_disk(&mut self, host: &Host, qmp: &mut Qmp) -> Result<GuestRemains, RebootError> {
        let stopped_host_us = self.stop_guest(qmp)?;
        let path = saved_path(host, self.rundir(), &self.state().definition);
        let saved = save_with_ram(qmp, &path)?;
        self.handover.recorder.step("save to disk");
        Ok(GuestRemains { saved: Some(saved), page_digests: None, stopped_host_us })
    }

    /// Saves the device state next to the RAM, which stays in place, and digests of the RAM's pages.
    fn save_in_place(&mut self, qmp: &mut Qmp) -> Result<GuestRemains, RebootError> {
        let [device_state_path, digest_path] = state_files(&state_directory(self.state()), self.rundir());
        let ram_path = self.state().hardware.ram.path.clone();
        // QEMU's smaller memories, such as firmware and video memory, are not in the RAM file.
        let small_blocks = SharedRam { path: ram_path.clone() }.carried_blocks(ramblock::list(qmp)?);
        let mut file = StreamWriter::create(device_state_path)?;
        // No destination QEMU reads along: `feed`.
        let mut sink = StateSink { feed: None, file: Some(&mut file) };
        let source_qemu = &self.replacement.source_qemu;
        let mut source_state = SourceState::prepare(source_qemu, qmp, small_blocks, StreamForm::Own, &mut sink)?;
        let stopped_host_us = self.stop_guest(qmp)?;
        source_state.begin(qmp)?;
        source_state.send_blocks(&mut sink)?;
        file.write(&source_state.send_devices(qmp, None)?.bytes)?;
        let saved = file.finish()?;
        self.handover.recorder.step("save devices");
        let digests = self.finish_digests(qmp, &ram_path)?;
        let digest_file = write_page_digests(&digest_path, &digests).map_err(RebootError::file(&digest_path))?;
        self.handover.recorder.step("digest memory");
        Ok(GuestRemains { saved: Some(saved), page_digests: Some(digest_file), stopped_host_us })
    }

    /// Stops the guest and syncs its disk images, which must never be older than its memory. Returns the time of the
    /// stop, in µs since 1970.
    fn stop_guest(&mut self, qmp: &mut Qmp) -> Result<u64, RebootError> {
        let stopped_host_us = stop(qmp, self.replacement.running)?;
        self.handover.recorder.step("stop");
        self.handover.pass("host.suspend.stopped");
        for disk in self.state().hardware.disks.iter().filter(|disk| !disk.readonly) {
            let synced = File::open(&disk.path).and_then(|image| image.sync_all());
            synced.map_err(RebootError::file(&disk.path))?;
        }
        self.handover.recorder.step("sync its disks");
        Ok(stopped_host_us)
    }

    /// Returns the digests of the stopped guest's RAM pages. Only pages that were written since the early digests are
    /// read, if there are early digests.
    fn finish_digests(&mut self, qmp: &mut Qmp, ram: &Path) -> Result<Vec<u64>, RebootError> {
        match self.early_digests.take().map(|early| early.finish(qmp)) {
            Some(Ok(digests)) => return Ok(digests),
            Some(Err(why)) => tracing::debug!("cannot use early digests; digesting all of {}: {why}", ram.display()),
            None => {}
        }
        digest::file_pages(ram).map_err(RebootError::file(ram))
    }

    /// Cancels the suspend before the guest was stopped.
    pub(super) fn cancel(self) {
        let Self { replacement, handover, early_digests, .. } = self;
        discard_digests(early_digests);
        if let Err(e) = handover.journal.close(End::Undone) {
            tracing::error!("{}: {e}", replacement.name());
        }
    }
}

/// Returns the kind of the operation that suspends a guest by this method.
pub(super) fn suspend_kind(how: RebootMethod) -> Kind {
    match how {
        RebootMethod::Warm => Kind::HostWarm,
        RebootMethod::Saved => Kind::HostSaved,
        RebootMethod::Cold => Kind::HostCold,
    }
}

/// Runs the preflight of a suspend of VM `name`, the checks before anything is stopped. Changes nothing.
pub(super) fn preflight(host: &Host, name: &str, how: RebootMethod) -> Result<Replacement, RebootError> {
    let operation = format!("host suspend --how {how}");
    let options = ReplaceOptions::same_qemu(how);
    let replacement = begin(host, name, &operation, &options, |path| Binary::probe_cached(path, &host.binaries()))?;
    if how == RebootMethod::Warm {
        let ram = &replacement.locked_vm.state.hardware.ram;
        let ram_directory = RamDirectory::at(ram.path.parent().unwrap_or(Path::new("/")))?;
        ram_directory.check_room(ram.bytes / RAM_BYTES_PER_DIGEST_BYTE + MAX_DEVICE_STATE_BYTES)?;
    }
    Ok(replacement)
}

/// Digests the RAM of a guest while it runs, if its writes can be tracked.
fn begin_digests(replacement: &mut Replacement, qmp: &mut Qmp) -> Result<Option<EarlyDigests>, RebootError> {
    let rundir = &replacement.locked_vm.rundir;
    let _run_state = RunStateLock::acquire(rundir, RUN_STATE_TIMEOUT).map_err(LifeError::from)?;
    let paused_mark = replacement.running.then(|| rundir.paused());
    let hardware = &replacement.locked_vm.state.hardware;
    let digests = EarlyDigests::begin(&replacement.source_qemu, qmp, hardware, paused_mark.as_deref())?;
    replacement.recorder.step("digest memory ahead");
    Ok(digests)
}

fn discard_digests(digests: Option<EarlyDigests>) {
    if let Some(digests) = digests {
        digests.discard();
    }
}

/// A guest whose state is saved. Its QEMU still exists, with the guest stopped, unless the guest was shut down.
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
        let resumed = if replacement.source_qemu.is_alive() {
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
        if let Err(e) = resumed {
            tracing::error!("{name}: cannot resume the guest: {e}; run: rekindle recover {name}");
        }
    }

    /// Ends the QEMU and the disk servers. The record must be committed.
    pub(super) fn end(self) -> Result<(), RebootError> {
        let rundir = &self.replacement.locked_vm.rundir;
        let hardware = &self.replacement.locked_vm.state.hardware;
        self.replacement.source_qemu.kill().map_err(RebootError::file(rundir.path()))?;
        disks::end(rundir, hardware).map_err(LifeError::from)?;
        if self.entry.how == RebootMethod::Saved {
            // The saved state on disk contains the RAM, so the RAM files are not needed any more.
            let directory = hardware.ram.path.parent().unwrap_or(Path::new("/"));
            for (path, _) in hardware.ram_files() {
                RamDirectory::at(directory)?.remove(&ram::file_id(&path))?;
            }
        }
        self.handover.recorder.write(rundir);
        self.handover.pass("host.suspend.ended");
        Ok(())
    }
}
