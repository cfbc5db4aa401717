//! A VM's place on this host: run directory, lock, network, RAM file; everything that a VM has before it has a QEMU.
//!
//! `rekindle run` boots a guest in it, `rekindle restore` lets one go on from a checkpoint.

use crate::definition::{Bytes, Definition, memory_flaw};
use crate::hardware;
use crate::host::Host;
use crate::journal::{Journal, Kind, Operation};
use crate::life::{LifeError, clean_up, ram_name, unique_name};
use crate::lock::Lock;
use crate::network;
use crate::rundir::RunDir;
use crate::state::{State, format_of};
use rekindle_memory::directory::{RamDirectory, RamError, huge_page_size};
use rekindle_qemu::binary::Binary;
use rekindle_qemu::command::{Directory, Hardware};
use rekindle_qemu::qmp::Version;
use rekindle_qemu::vmm::Vmm;
use std::os::fd::{OwnedFd, RawFd};
use std::path::Path;

/// A place that nobody else works on, for a VM that does not run yet.
#[derive(Debug)]
pub struct Place<'a> {
    host: &'a Host,
    /// Its run directory.
    pub rundir: RunDir,
    /// What its run directory says.
    pub state: State,
    ram: RamDirectory,
    _lock: Lock,
}

/// What a QEMU is started with in a place.
#[derive(Debug)]
pub struct Made {
    /// The operation's journal.
    pub journal: Journal,
    /// The QEMU's own directory.
    pub directory: Directory,
    /// Taps, at the numbers that the command line names.
    pub fds: Vec<(OwnedFd, RawFd)>,
}

impl<'a> Place<'a> {
    /// Take the place of the VM of `definition`, for `operation`. `fit` may refuse the hardware that the definition came to,
    /// or change what a guest that exists already needs otherwise.
    ///
    /// On success: nothing exists but the run directory with the lock and `state.json`.
    ///
    /// # Errors
    /// [`LifeError`]: it runs, or is being worked on; the definition asks for what this host or this QEMU does not have.
    /// Nothing is left behind.
    pub fn take(
        host: &'a Host,
        definition: Definition,
        qemu: Option<&Path>,
        operation: &str,
        fit: impl FnOnce(&mut Hardware) -> Result<(), Vec<String>>,
    ) -> Result<Self, LifeError> {
        let name = definition.name.to_string();
        let failed = |source| LifeError::RunDir { name: name.clone(), source };
        let rundir = RunDir::new(&host.root, &name);
        rundir.create().map_err(failed)?;
        let lock = Lock::acquire(&rundir, operation)?;
        if let Some(Journal { operation: Operation { kind, step, .. }, .. }) =
            Journal::left_behind(&rundir).map_err(failed)?
        {
            return Err(LifeError::NeedsRecovery { name, kind, step });
        }
        if let Some(state) = State::read(&rundir).map_err(failed)? {
            if let Some(vmm) = &state.vmm {
                vmm.wait_released().map_err(failed)?;
            }
            match state.vmm.as_ref().filter(|vmm| vmm.is_alive()) {
                Some(vmm) => return Err(LifeError::Running { name, pid: vmm.pid }),
                // It ended by itself: its RAM is worth nothing without a QEMU.
                None => clean_up(host, &rundir, &state)?,
            }
            rundir.create().map_err(failed)?;
        }
        match prepare(host, &rundir, definition, qemu, fit) {
            Ok((state, ram)) => Ok(Self { host, rundir, state, ram, _lock: lock }),
            Err(e) => {
                let _ = rundir.remove();
                host.release_ram();
                Err(e)
            }
        }
    }

    /// Make the network and the RAM file, under a journal of `kind`.
    ///
    /// # Errors
    /// [`LifeError`]; what was made is for [`Place::undo`].
    pub fn make(&self, kind: Kind) -> Result<Made, LifeError> {
        let failed = |source| LifeError::RunDir { name: self.rundir.name().into(), source };
        let journal = Journal::open(&self.rundir, kind, None, self.state.generation).map_err(failed)?;
        let fds = network::create(self.host, &self.state)?;
        for (path, bytes) in self.state.hardware.ram_files() {
            self.ram.create(&ram_name(&path), bytes)?;
        }
        let directory = self.rundir.create_vmm(self.state.generation).map_err(failed)?;
        Ok(Made { journal, directory, fds })
    }

    /// Record the QEMU that runs the guest in this place, and end the operation.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn settle(&self, journal: Journal, vmm: Vmm, version: Version) -> Result<State, LifeError> {
        let failed = |source| LifeError::RunDir { name: self.rundir.name().into(), source };
        let state = State { vmm: Some(vmm), version: Some(version), ..self.state.clone() };
        state.write(&self.rundir).map_err(failed)?;
        journal.close().map_err(failed)?;
        Ok(state)
    }

    /// Take everything away again, QEMUs that were started here too.
    pub fn undo(self) {
        if let Err(e) = clean_up(self.host, &self.rundir, &self.state) {
            tracing::warn!("after a failed start: {e}");
        }
    }
}

/// Everything that can be refused, before anything is made.
fn prepare(
    host: &Host,
    rundir: &RunDir,
    definition: Definition,
    qemu: Option<&Path>,
    fit: impl FnOnce(&mut Hardware) -> Result<(), Vec<String>>,
) -> Result<(State, RamDirectory), LifeError> {
    let name = definition.name.to_string();
    let unfit = |problems| LifeError::Unfit { name: name.clone(), problems };
    let binary = Binary::probe(qemu.unwrap_or(&definition.qemu))?;
    let ram = host.ram_directory(&definition)?;
    let page = huge_page_size(ram.path())
        .map_err(|source| RamError::Directory { path: ram.path().to_owned(), source })?
        .map(Bytes::new);
    if let Some(why) = memory_flaw(definition.memory, page, &ram.path().display().to_string()) {
        return Err(unfit(vec![format!("`memory = \"{}\"`: {why}", definition.memory)]));
    }
    let file = ram.file(&unique_name(rundir));
    let mut hardware = hardware::pin(&definition, &binary, file).map_err(|problem| unfit(vec![problem]))?;
    fit(&mut hardware).map_err(unfit)?;
    let missing = hardware::missing(&hardware, &binary);
    if !missing.is_empty() {
        return Err(unfit(missing));
    }
    network::check(&definition)?;
    let state = State {
        format: format_of(&hardware),
        definition: Definition { qemu: binary.path, ..definition },
        hardware,
        generation: 1,
        vmm: None,
        version: Some(binary.version),
        previous: None,
        attached: None,
    };
    state.write(rundir).map_err(|source| LifeError::RunDir { name: name.clone(), source })?;
    Ok((state, ram))
}
