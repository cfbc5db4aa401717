//! One guest's part of a suspend: ready, saved with its QEMU still there, and then either ended or on its way again.

use super::How;
use super::digests::Ahead;
use super::files::mapped;
use super::record::{Entry, Kept, beside, files_beside};
use super::survived::write_pages;
use crate::vmm::handover::{Keeper, disk_times};
use crate::vmm::warm::put_blocks;
use crate::vmm::{Change, Options, Patience, RUN_STATE_PATIENCE, RebootError, begin, saved, stop, switch};
use rekindle_memory::carried::Carried;
use rekindle_memory::digest;
use rekindle_memory::directory::RamDirectory;
use rekindle_qemu::binary::{Binary, BinaryError};
use rekindle_qemu::cpu;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::ramblock;
use rekindle_qemu::stream;
use rekindle_qemu::transfer::Tap;
use rekindle_qemu::vmm;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, SavedState, Step};
use rekindle_vm::life::{self, Ended, LifeError};
use rekindle_vm::lock::RunState;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::timeline::{Phase, host_us};
use rekindle_vm::{disks, fault, ram};
use serde_json::Value;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// What besides digests is written beside the RAM of a guest, at most: its state, with video memory.
const STREAM: u64 = 64 << 20;

/// How VM `name` is suspended, as its operations are called.
pub(super) fn operation(how: How) -> (String, Kind) {
    let kind = match how {
        How::Warm => Kind::HostWarm,
        How::Saved => Kind::HostSaved,
        How::Cold => Kind::HostCold,
    };
    (format!("host suspend --how {how}"), kind)
}

/// A guest about which everything is known that can be known while it runs.
pub(super) struct Ready {
    change: Change,
    journal: Journal,
    /// None of a guest that is shut down: QEMU serves one client at a time.
    qmp: Option<Qmp>,
    cpu: cpu::Features,
    ahead: Option<Ahead>,
    files: Vec<PathBuf>,
}

/// Look at VM `name` as its suspend will; nothing is changed.
pub(super) fn look(
    host: &Host,
    name: &str,
    how: How,
    probe: impl FnOnce(&Path) -> Result<Binary, BinaryError>,
) -> Result<Change, RebootError> {
    let options = Options { how, qemu: None, rollback: false, verify_memory: false };
    let change = begin(host, name, &operation(how).0, &options, probe)?;
    if how == How::Warm {
        let ram = &change.held.state.hardware.ram;
        // Eight bytes of digest for each page of 4 KiB.
        let beside = ram.path.parent().unwrap_or(Path::new("/"));
        RamDirectory::at(beside)?.check_room(ram.bytes / 512 + STREAM)?;
    }
    Ok(change)
}

impl Ready {
    pub(super) fn name(&self) -> &str {
        self.change.name()
    }

    /// *On failure:* the guest is as it was.
    pub(super) fn new(mut change: Change) -> Result<Self, RebootError> {
        let how = change.options.how;
        let hardware = change.held.state.hardware.clone();
        let mut qmp = change.old.connect(vmm::START)?;
        let cpu = cpu::features(&mut qmp)?;
        let mut ahead = None;
        if how == How::Warm {
            let held = RunState::acquire(&change.held.rundir, RUN_STATE_PATIENCE).map_err(LifeError::from)?;
            let mark = change.held.rundir.paused();
            ahead = Ahead::begin(&change.old, &mut qmp, &hardware, change.running.then_some(mark.as_path()))?;
            drop(held);
            change.recorder.step("digest memory ahead");
        }
        let opened = change.open_journal(operation(how).1);
        match opened {
            Ok(journal) => {
                fault::point("host.suspend.journalled", Some(&change.old), None);
                let qmp = (how != How::Cold).then_some(qmp);
                let files = mapped(&change.old);
                Ok(Self { change, journal, qmp, cpu, ahead, files })
            }
            Err(e) => {
                give_up(ahead);
                Err(e)
            }
        }
    }

    /// Its run directory and what that says.
    pub(super) fn place(&self) -> (RunDir, State) {
        (self.change.held.rundir.clone(), self.change.held.state.clone())
    }

    pub(super) fn how(&self) -> How {
        self.change.options.how
    }

    /// Stop the guest and save it; its QEMU stays, stopped. Of a guest that is shut down it has ended.
    ///
    /// *On failure:* the guest goes on, if its QEMU lives.
    pub(super) fn save(mut self, host: &Host, token: &str, fell_back: Option<String>) -> Result<Saved, RebootError> {
        let done = self.save_it(host);
        let Self { mut change, mut journal, cpu, ahead, files, .. } = self;
        match done {
            Ok((saved, pages, stop_us)) => {
                let entry = Entry {
                    token: token.into(),
                    how: change.options.how,
                    state: change.held.state.clone(),
                    running: change.running,
                    saved,
                    pages,
                    cpu,
                    disks: disk_times(&change.held.state.hardware),
                    stop_us,
                    fell_back,
                    struck: false,
                    steps: Vec::new(),
                    files,
                };
                journal.operation.saved = entry.saved.clone();
                // Of a guest that was shut down there is nothing that could be gone on with.
                let step = if entry.how == How::Cold { Step::Suspend } else { Step::Saved };
                let advanced = journal.advance(step).map_err(change.file_error("operation.json"));
                change.recorder.step("keep the state");
                let saved = Saved { change, journal, entry };
                fault::point("host.suspend.saved", Some(&saved.change.old), None);
                match advanced {
                    Ok(()) => Ok(saved),
                    Err(e) => {
                        saved.back(host);
                        Err(e)
                    }
                }
            }
            Err(error) => {
                give_up(ahead);
                if change.options.how == How::Cold && !change.old.is_alive() {
                    return Err(error);
                }
                Err(*switch::give_up(&change.held.rundir, &change.old, journal, change.running, error).error)
            }
        }
    }

    /// Gives its state and the digests of its RAM, if there are any, and when it was stopped.
    fn save_it(&mut self, host: &Host) -> Result<(Option<SavedState>, Option<Kept>, u64), RebootError> {
        let file = self.change.file_error("operation.json");
        self.change.hold_run_state()?;
        self.journal.advance(Step::Suspend).map_err(file)?;
        self.change.recorder.phase(Phase::Suspend);
        let state = self.change.held.state.clone();
        let rundir = self.change.held.rundir.clone();
        let old = self.change.old.clone();
        if self.how() == How::Cold {
            let ended = life::shut_down(&old, state.definition.shutdown_timeout.as_duration())?;
            if matches!(ended, Ended::ByAgent | Ended::ByAcpi) {
                disks::end_epochs(&rundir, &state.hardware);
            }
            self.change.recorder.step("shut down");
            return Ok((None, None, host_us()));
        }
        // Let go of at the end of this: whoever is to go back connects anew.
        let mut qmp = self.qmp.take().map_or_else(|| old.connect(vmm::START), Ok)?;
        let stopped = self.stop(&mut qmp)?;
        if self.how() == How::Saved {
            let saved = saved::save(&mut qmp, &life::saved_path(host, &rundir, &state.definition))?;
            self.change.recorder.step("save to disk");
            return Ok((Some(saved), None, stopped));
        }
        let [stream, pages] = files_beside(&beside(&state), &rundir);
        let saved = self.save_devices(&mut qmp, stream)?;
        self.change.recorder.step("save devices");
        let digests = self.digests(&mut qmp, &state.hardware.ram.path)?;
        let kept = write_pages(&pages, &digests).map_err(|source| RebootError::File { path: pages, source })?;
        self.change.recorder.step("digest memory");
        Ok((Some(saved), Some(kept), stopped))
    }

    /// Stop the guest, and make its disks last: their images must not be older than its memory, whatever comes.
    fn stop(&mut self, qmp: &mut Qmp) -> Result<u64, RebootError> {
        let stopped = stop(qmp, self.change.running)?;
        self.change.recorder.step("stop");
        fault::point("host.suspend.stopped", Some(&self.change.old), None);
        for disk in self.change.held.state.hardware.disks.iter().filter(|disk| !disk.readonly) {
            let synced = File::open(&disk.path).and_then(|image| image.sync_all());
            synced.map_err(|source| RebootError::File { path: disk.path.clone(), source })?;
        }
        self.change.recorder.step("sync its disks");
        Ok(stopped)
    }

    fn save_devices(&mut self, qmp: &mut Qmp, path: PathBuf) -> Result<SavedState, RebootError> {
        let old = &self.change.old;
        let commands: Vec<Value> = qmp.execute("query-commands", ())?;
        let in_one = commands.iter().any(|command| command["name"] == "xen-save-devices-state");
        let blocks = ramblock::list(qmp)?;
        let mut keeper = Keeper::at(path)?;
        let mut skip = 0;
        let tap = if in_one && blocks.iter().all(|block| block.address.is_some()) {
            let unreadable = |source| RebootError::File { path: format!("/proc/{}/mem", old.pid).into(), source };
            let carried = Carried::read(old.process(), &blocks).map_err(unreadable)?;
            let mut part = stream::HEADER.to_vec();
            put_blocks(&mut part, &carried).end(&mut part);
            keeper.write(&part)?;
            skip = stream::HEADER.len();
            Tap::devices(&old.directory())?
        } else {
            Tap::migration(qmp)?
        };
        tap.begin(qmp, false)?;
        let mut devices = Vec::with_capacity(1 << 20);
        tap.drain(qmp, |part| {
            let skipped = skip.min(part.len());
            skip -= skipped;
            devices.extend(part.get(skipped..).unwrap_or_default());
            Ok(())
        })?;
        if devices.last() != Some(&stream::END_OF_STREAM) {
            let source = io::Error::other("the device state that it saved is cut short");
            return Err(RebootError::File { path: format!("/proc/{}", old.pid).into(), source });
        }
        keeper.write(&devices)?;
        keeper.finish()
    }

    fn digests(&mut self, qmp: &mut Qmp, ram: &Path) -> Result<Vec<u64>, RebootError> {
        match self.ahead.take().map(|ahead| ahead.finish(qmp)) {
            Some(Ok(digests)) => return Ok(digests),
            Some(Err(why)) => tracing::debug!("all of {} is digested: {why}", ram.display()),
            None => {}
        }
        digest::file_pages(ram).map_err(|source| RebootError::File { path: ram.to_owned(), source })
    }

    /// Nothing was stopped, and nothing is to be.
    pub(super) fn give_up(self) {
        let Self { change, journal, ahead, .. } = self;
        give_up(ahead);
        if let Err(e) = journal.close() {
            tracing::error!("{}: {e}", change.name());
        }
    }
}

fn give_up(ahead: Option<Ahead>) {
    if let Some(ahead) = ahead {
        ahead.give_up();
    }
}

/// A guest whose state is kept, and whose QEMU is still there.
pub(super) struct Saved {
    change: Change,
    journal: Journal,
    pub(super) entry: Entry,
}

impl Saved {
    pub(super) fn name(&self) -> &str {
        self.change.name()
    }

    pub(super) fn vmm(&self) -> &vmm::Vmm {
        &self.change.old
    }

    /// The directory of the RAM that the guest is to find again.
    pub(super) fn ram_directory(&self) -> Option<&Path> {
        self.entry.state.hardware.ram.path.parent().filter(|_| self.entry.how == How::Warm)
    }

    /// What was done until here is written down with it.
    pub(super) fn told(&self) -> Entry {
        Entry { steps: self.change.recorder.entries().to_vec(), ..self.entry.clone() }
    }

    /// It is not to be suspended after all. What cannot go back, since its QEMU has ended, is for `recover`.
    pub(super) fn back(self, host: &Host) {
        let Self { change, journal, entry } = self;
        let name = change.name().to_owned();
        if let Some(saved) = &entry.saved {
            let _ = fs::remove_file(&saved.path);
        }
        let back = if change.old.is_alive() {
            let mut journal = journal;
            journal.operation.saved = None;
            switch::back(&change.held.rundir, &change.old, journal, change.running)
        } else {
            drop(change);
            crate::vmm::recover(host, &name, Patience::default()).map(drop)
        };
        if let Err(e) = back {
            tracing::error!("{name} does not go on ({e}); rekindle recover {name}");
        }
    }

    /// The record is committed: its QEMU goes, and the servers of its disks.
    pub(super) fn end(self) -> Result<(), RebootError> {
        let hardware = &self.change.held.state.hardware;
        let named = |source| RebootError::File { path: self.change.held.rundir.path().to_owned(), source };
        self.change.old.kill().map_err(named)?;
        disks::end(&self.change.held.rundir, hardware).map_err(LifeError::from)?;
        if self.entry.how == How::Saved {
            // What is saved is on a disk; its RAM has no further use.
            let directory = hardware.ram.path.parent().unwrap_or(Path::new("/"));
            for (path, _) in hardware.ram_files() {
                RamDirectory::at(directory)?.remove(&ram::name(&path))?;
            }
        }
        self.change.recorder.write(&self.change.held.rundir);
        fault::point("host.suspend.ended", Some(&self.change.old), None);
        Ok(())
    }
}
