//! A VM's slot on this host: run directory, lock, network, RAM file; everything that a VM has before it has a QEMU.
//!
//! ```text
//! IdleSlot ──plan──> Plan                      all checks have passed; nothing is made
//!     └───────into_slot(plan)──> VmSlot        the state file is written
//!                                   └──make──> SlotResources: journal, taps, RAM file, disk servers
//! ```
//!
//! `rekindle run` boots a guest in it, and `rekindle restore` resumes a guest in it from a checkpoint.

use crate::cleanup::clean_up;
use crate::definition::{Bytes, Definition, memory_flaw};
use crate::disks::{self, DisksError, Epochs, LeftoverLogs};
use crate::error::LifeError;
use crate::hardware;
use crate::host::Host;
use crate::journal::{End, Journal, Kind, Operation, Step};
use crate::lock::OperationLock;
use crate::names::unique_name;
use crate::network;
use crate::phases;
use crate::ram;
use crate::rundir::RunDir;
use crate::state::{Prepared, State, format_of};
use rekindle_memory::directory::{RamDirectory, RamError, huge_page_size};
use rekindle_qemu::binary::Binary;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::qmp::Version;
use rekindle_qemu::vmm::Vmm;
use std::os::fd::{OwnedFd, RawFd};
use std::path::{Path, PathBuf};

/// The locked run directory of a VM that does not run. A QEMU may wait in it for a checkpoint.
#[derive(Debug)]
pub struct IdleSlot<'a> {
    host: &'a Host,
    /// Run directory of the VM.
    pub rundir: RunDir,
    state: Option<State>,
    /// A prepared QEMU that has ended by itself.
    ended_prepared: Option<Prepared>,
    lock: OperationLock,
}

/// A VM that has passed all checks on this host.
#[derive(Debug)]
pub struct Plan {
    /// The future content of the state file.
    pub state: State,
    /// The QEMU binary of the VM.
    binary: Binary,
    ram: RamDirectory,
}

impl Plan {
    /// Checks that there is room for the guest's RAM now. Nothing is reserved: [`VmSlot::make`] and
    /// [`VmSlot::claim_ram`] do that.
    ///
    /// # Errors
    /// [`LifeError::Ram`] when there is not enough room.
    pub fn check_room(&self) -> Result<(), LifeError> {
        let bytes = self.state.hardware.ram_files().iter().map(|(_, bytes)| bytes).sum();
        Ok(self.ram.check_room(bytes)?)
    }
}

impl<'a> IdleSlot<'a> {
    /// Locks the name of a VM for `operation`. Removes the remains of an earlier VM of the name whose QEMU has ended.
    ///
    /// # Errors
    /// [`LifeError`]: the VM runs, is busy, or needs recovery.
    pub fn lock(host: &'a Host, name: &str, operation: &str) -> Result<Self, LifeError> {
        let name = name.to_owned();
        let failed = |source| LifeError::RunDir { name: name.clone(), source };
        let rundir = RunDir::new(&host.root, &name);
        host.create_run_dir(&rundir).map_err(failed)?;
        let lock = OperationLock::acquire(&rundir, operation)?;
        if let Some(Journal { operation: Operation { kind, step, .. }, .. }) = Journal::read(&rundir).map_err(failed)? {
            return Err(LifeError::NeedsRecovery { name, kind, step });
        }
        let state = State::read(&rundir).map_err(failed)?;
        let mut slot = Self { host, rundir, state, ended_prepared: None, lock };
        let Some(state) = &slot.state else { return Ok(slot) };
        for vmm in state.qemus() {
            vmm.wait_released().map_err(failed)?;
        }
        if let Some(vmm) = state.vmm.as_ref().filter(|vmm| vmm.is_alive()) {
            return Err(LifeError::Running { name, pid: vmm.pid });
        }
        let prepared = state.prepared.clone();
        if !prepared.as_ref().is_some_and(|prepared| prepared.vmm.is_alive()) {
            // The QEMU has ended by itself: RAM without a QEMU is worthless.
            slot.clear()?;
            slot.ended_prepared = prepared;
        }
        Ok(slot)
    }

    /// Returns the record of the QEMU that waits for a checkpoint, if there is one.
    #[must_use]
    pub fn prepared(&self) -> Option<(&State, &Prepared)> {
        self.state.as_ref().and_then(|state| Some((state, state.prepared.as_ref()?)))
    }

    /// Returns the prepared QEMU that had ended by itself. The options given when it was prepared still apply.
    #[must_use]
    pub fn ended_prepared(&self) -> Option<&Prepared> {
        self.ended_prepared.as_ref()
    }

    /// Ends a waiting QEMU and removes the remains of the VM.
    ///
    /// # Errors
    /// [`LifeError`], for the first process, tap or file that cannot be removed.
    pub fn clear(&mut self) -> Result<(), LifeError> {
        if let Some(state) = &self.state {
            clean_up(self.host, &self.rundir, state)?;
            self.state = None;
            let failed = |source| LifeError::RunDir { name: self.rundir.name().into(), source };
            self.host.create_run_dir(&self.rundir).map_err(failed)?;
        }
        Ok(())
    }

    /// Releases the lock. Removes the run directory if the VM had no state.
    pub fn release(self) {
        if self.state.is_none() {
            let _ = self.rundir.remove();
            self.host.release_ram();
        }
    }

    /// Runs all checks that can reject the VM of `definition`, whose memory will be loaded from a checkpoint, on this host. Nothing is
    /// made. `fit` may reject the resulting hardware, or change it for a guest that exists already. `epochs` are those of the
    /// checkpoint to restore; the newest version of all other disks is used.
    ///
    /// # Errors
    /// [`LifeError`]: the definition requires something that this host or this QEMU does not have.
    pub fn plan(
        &self,
        definition: Definition,
        qemu: Option<&Path>,
        epochs: &Epochs,
        fit: impl FnOnce(&mut Hardware) -> Result<(), Vec<String>>,
    ) -> Result<Plan, LifeError> {
        let ram = self.host.fillable_ram_directory(&definition)?;
        self.plan_with(definition, qemu, ram, epochs, fit)
    }

    fn plan_with(
        &self,
        definition: Definition,
        qemu: Option<&Path>,
        ram: RamDirectory,
        epochs: &Epochs,
        fit: impl FnOnce(&mut Hardware) -> Result<(), Vec<String>>,
    ) -> Result<Plan, LifeError> {
        let name = definition.name.to_string();
        let unfit = |problems| LifeError::Unfit { name: name.clone(), problems };
        let binary_cache = self.host.binaries();
        let binary = Binary::probe_cached(qemu.unwrap_or(&definition.qemu), &binary_cache)?;
        check_memory(&definition, &ram)?;
        let ram_file = ram.file(&unique_name(&self.rundir));
        let mut hardware = hardware::pin(&definition, &binary, ram_file).map_err(|problem| unfit(vec![problem]))?;
        fit(&mut hardware).map_err(unfit)?;
        reject_any(disks::redo_log_problems(&hardware, epochs, LeftoverLogs::Use)).map_err(unfit)?;
        let binary = hardware::binary_for(&hardware, binary, &binary_cache)?;
        reject_any(hardware::missing(&hardware, &binary)).map_err(unfit)?;
        network::check(&definition)?;
        let state = State {
            format: format_of(&hardware),
            definition: Definition { qemu: binary.path.clone(), ..definition },
            hardware,
            generation: 1,
            vmm: None,
            version: Some(binary.version.clone()),
            previous: None,
            attached: None,
            prepared: None,
        };
        Ok(Plan { state, binary, ram })
    }

    /// Uses the slot for the planned VM, in place of a QEMU that waits in it.
    ///
    /// # Errors
    /// [`LifeError::RunDir`]; nothing is then left behind.
    pub fn into_slot(mut self, plan: Plan) -> Result<VmSlot<'a>, LifeError> {
        self.clear()?;
        if let Err(source) = plan.state.write(&self.rundir) {
            let name = self.rundir.name().to_owned();
            self.release();
            return Err(LifeError::RunDir { name, source });
        }
        Ok(self.into_slot_of_waiting(plan))
    }

    /// As [`IdleSlot::into_slot`], for a guest that will run in the QEMU that waits in the slot.
    #[must_use]
    pub fn into_slot_of_waiting(self, plan: Plan) -> VmSlot<'a> {
        let Plan { state, binary, ram } = plan;
        VmSlot { host: self.host, rundir: self.rundir, state, binary, ram, epochs: None, _lock: self.lock }
    }
}

/// The locked run directory of a VM that does not run yet.
#[derive(Debug)]
pub struct VmSlot<'a> {
    host: &'a Host,
    /// Run directory of the VM.
    pub rundir: RunDir,
    /// Content of the state file.
    pub state: State,
    /// The QEMU binary that the VM will use.
    pub binary: Binary,
    ram: RamDirectory,
    /// Disk epochs of a checkpoint that will be restored.
    epochs: Option<Epochs>,
    _lock: OperationLock,
}

/// The resources with which a QEMU is started in a slot.
#[derive(Debug)]
pub struct SlotResources {
    /// Journal of the operation.
    pub journal: Journal,
    /// Taps, at the descriptor numbers of the command line.
    pub fds: Vec<(OwnedFd, RawFd)>,
}

impl<'a> VmSlot<'a> {
    /// Takes a slot for the VM of `definition`, for `operation`. `fit` may reject the resulting hardware.
    ///
    /// On success: only the run directory with the lock and `state.json` exists.
    ///
    /// # Errors
    /// [`LifeError`]: the VM runs, is prepared for a restore, or is busy; or the definition requires something that
    /// this host or this QEMU does not have. Nothing is left behind.
    pub fn take(
        host: &'a Host,
        definition: Definition,
        qemu: Option<&Path>,
        operation: &str,
        fit: impl FnOnce(&mut Hardware) -> Result<(), Vec<String>>,
    ) -> Result<Self, LifeError> {
        let idle_slot = IdleSlot::lock(host, definition.name.as_str(), operation)?;
        if let Some((state, _)) = idle_slot.prepared() {
            state.refuse_prepared()?;
        }
        let planned = host
            .ram_directory(&definition)
            .map_err(LifeError::from)
            .and_then(|ram| idle_slot.plan_with(definition, qemu, ram, &Epochs::new(), fit));
        match planned {
            Ok(plan) => idle_slot.into_slot(plan),
            Err(e) => {
                idle_slot.release();
                Err(e)
            }
        }
    }

    /// Sets the disk epochs of a checkpoint whose memory will be loaded while the guest runs.
    #[must_use]
    pub fn at_epochs(self, epochs: Epochs) -> Self {
        Self { epochs: Some(epochs), ..self }
    }

    /// Makes the network and the RAM file, and starts the disk servers, under a journal of `kind`.
    ///
    /// # Errors
    /// [`LifeError`]; the caller must remove what was made with [`VmSlot::undo`].
    pub fn make(&self, kind: Kind) -> Result<SlotResources, LifeError> {
        self.make_with(kind, RamDirectory::create, || match &self.epochs {
            Some(epochs) => disks::start_at(&self.rundir, &self.state.hardware, epochs),
            None => disks::start(&self.rundir, &self.state.hardware),
        })
    }

    /// As [`VmSlot::make`], for a QEMU that waits for a checkpoint. No RAM is reserved for it: see
    /// [`RamDirectory::create_waiting`]. The returned hardware has other RAM file names than the state file.
    ///
    /// # Errors
    /// As for [`VmSlot::make`].
    pub fn make_waiting(&self) -> Result<(SlotResources, Hardware), LifeError> {
        let resources = self.make_with(Kind::Prepare, RamDirectory::create_waiting, || {
            disks::start_waiting(&self.rundir, &self.state.hardware)
        })?;
        let mut hardware = self.state.hardware.clone();
        hardware.ram.path = self.ram.waiting(&ram::file_id(&hardware.ram.path));
        Ok((resources, hardware))
    }

    fn make_with(
        &self,
        kind: Kind,
        create_ram: impl Fn(&RamDirectory, &str, u64) -> Result<PathBuf, RamError>,
        start_servers: impl FnOnce() -> Result<usize, DisksError>,
    ) -> Result<SlotResources, LifeError> {
        let failed = |source| LifeError::RunDir { name: self.rundir.name().into(), source };
        let journal = Journal::open(&self.rundir, kind, None, self.state.generation).map_err(failed)?;
        let fds = network::create(self.host, &self.state)?;
        for (path, bytes) in self.state.hardware.ram_files() {
            create_ram(&self.ram, &ram::file_id(&path), bytes)?;
        }
        start_servers()?;
        // A restored guest knows its disks already.
        if kind == Kind::Run {
            phases::begin_boot(&self.rundir, &self.state.hardware, &self.state.definition);
        }
        Ok(SlotResources { journal, fds })
    }

    /// Reserves the RAM for the QEMU that waits in this slot, and opens the journal of its restore.
    ///
    /// # Errors
    /// [`LifeError::Ram`], in which case the QEMU waits as before; [`LifeError::RunDir`].
    pub fn claim_ram(&self, waiting_qemu: &Vmm) -> Result<Journal, LifeError> {
        let failed = |source| LifeError::RunDir { name: self.rundir.name().into(), source };
        for (path, bytes) in self.state.hardware.ram_files() {
            self.ram.claim(&ram::file_id(&path), bytes)?;
        }
        let mut journal = Journal::open(&self.rundir, Kind::Restore, None, self.state.generation).map_err(failed)?;
        journal.operation.to = Some(waiting_qemu.clone());
        journal.write().map_err(failed)?;
        self.state.write(&self.rundir).map_err(failed)?;
        Ok(journal)
    }

    /// Records the QEMU that waits for a checkpoint in this slot, and ends the operation.
    ///
    /// # Errors
    /// [`LifeError::RunDir`], when the state or the journal cannot be written.
    pub fn settle_prepared(&self, journal: Journal, prepared: Prepared, version: Version) -> Result<State, LifeError> {
        let failed = |source| LifeError::RunDir { name: self.rundir.name().into(), source };
        let state = State { prepared: Some(prepared), version: Some(version), ..self.state.clone() };
        state.write(&self.rundir).map_err(failed)?;
        journal.close(End::Done).map_err(failed)?;
        Ok(state)
    }

    /// Returns the QEMU that may run the guest of a restore: it was sent `cont`, and has not ended.
    #[must_use]
    pub fn qemu_that_may_run(&self) -> Option<Vmm> {
        let Journal { operation, .. } = Journal::read(&self.rundir).ok()??;
        if operation.step < Step::Resume {
            return None;
        }
        operation.to.filter(Vmm::is_alive)
    }

    /// Removes everything that was made, including QEMUs that were started in this slot.
    pub fn undo(self) {
        if let Err(e) = clean_up(self.host, &self.rundir, &self.state) {
            tracing::warn!("after a failed start: {e}");
        }
    }
}

/// Rejects an amount of memory that the file system of the RAM directory cannot give.
fn check_memory(definition: &Definition, ram: &RamDirectory) -> Result<(), LifeError> {
    let page_size = huge_page_size(ram.path())
        .map_err(|source| RamError::Directory { path: ram.path().to_owned(), source })?
        .map(Bytes::new);
    let memory = definition.memory;
    let Some(why) = memory_flaw(memory, page_size, &ram.path().display().to_string()) else { return Ok(()) };
    let problems = vec![format!("`memory = \"{memory}\"`: {why}")];
    Err(LifeError::Unfit { name: definition.name.to_string(), problems })
}

fn reject_any(problems: Vec<String>) -> Result<(), Vec<String>> {
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}
