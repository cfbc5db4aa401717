//! Restores a checkpoint of a libvirt domain into libvirt, which runs and manages it afterwards.
//!
//! ```text
//!  prepare  check what the domain needs, make its overlays, own the store
//!  renew    libvirt starts its QEMU from a save image, paused; attach the domain
//!  resume   libvirt resumes the guest
//!  settle   define the domain, or put its definition on the same disks
//! ```
//!
//! libvirt makes the QEMU, its networks, labels and control groups, as in `virsh restore`. The save image is a pipe without
//! the guest's memory, which loads on demand as in another restore.
//!
//! | module | contents |
//! |---|---|
//! | `client` | what a restore asks libvirt |
//! | [`preflight`] | whether this host could run a domain that another host is about to move |
//! | `stream` | what libvirt and its QEMU get, and the registration of the RAM in between |
//! | `image_pipe` | the pipe |
//!
//! Before the journal has the step `resume`, a failure or [`recover`] removes everything. The guest never runs before.

mod client;
mod image_pipe;
pub(crate) mod preflight;
mod stream;

use super::checkpoint::{self, ChosenCheckpoint, claim_store};
use super::on_demand::OnDemandRam;
use super::recover::Outcome;
use super::{Request, RestoreError, require_same_processors};
use crate::recipe::permission::{AllowedDomain, Permission};
use crate::save_image::SaveImageError;
use client::{Libvirt, missing_files};
use rekindle_kernel::libvirt_client::DomainState;
use rekindle_libvirt::portable_xml::{self, Description, DiskFile};
use rekindle_life::attach::attach_locked;
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::foreign::without_overlays;
use rekindle_qemu::monitor::Monitor;
use rekindle_store::admin::Fenced;
use rekindle_vm::causes::with_causes;
use rekindle_vm::cleanup::clean_up;
use rekindle_vm::definition::Name;
use rekindle_vm::fault;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{End, JOURNAL_FILE, Journal, Kind, RestoredDomain, Step};
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::names::saved_path;
use rekindle_vm::overlays::RestoredOverlays;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::slot::IdleSlot;
use rekindle_vm::state::{Attached, State, format_of};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use stream::ImageToLoad;

/// How long libvirt may take to open a connection to the monitor.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(30);
/// Number of the only QEMU of a restored VM.
const GENERATION: u32 = 1;

/// A guest that libvirt runs from a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoredIntoLibvirt {
    /// The VM, which is attached.
    pub name: String,
    /// The domain.
    pub domain: String,
    pub checkpoint: u64,
    /// When the checkpoint was taken, in µs since 1970, by its host's clock.
    pub taken_us: u64,
    /// Time from the command to the guest's resume, in µs.
    #[serde(rename = "us")]
    pub resumed_after_us: u64,
    /// Pid of the QEMU.
    pub pid: u32,
    /// All of the guest's memory was loaded before the guest was resumed.
    pub filled: bool,
}

/// Restores the domain of a checkpoint into libvirt, and attaches it as VM `name`. `connect`: libvirt's connection URI;
/// without one, libvirt chooses. `progress` gets the bytes of RAM written and in total, if all of it is written first.
///
/// *Needs:* a checkpoint of a domain that was attached with `--libvirt`; libvirt does not run the domain; its networks,
/// bridges, disks and QEMU on this host.
/// *On success:* libvirt runs the domain and lists it. It defines it if it did not know it. The VM is attached, this host
/// owns the store, and a pager loads the rest of the memory.
/// *On failure:* libvirt is as before, and the checkpoint is unchanged. Exception: after the guest was resumed, nothing
/// is undone; `rekindle recover` finishes.
pub fn restore_into_libvirt(
    host: &Host,
    name: &Name,
    request: &Request,
    connect: Option<String>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<RestoredIntoLibvirt, RestoreError> {
    let started = Instant::now();
    let chosen = ChosenCheckpoint::open_unchecked(&Permission::of(host, name, request.choice()), request)?;
    let number = chosen.image.info().number;
    let xml = chosen.recipe.domain_xml().ok_or(SaveImageError::NoDomain { number })?;
    let description = portable_xml::describe(xml).map_err(|problem| RestoreError::DomainXml { problem })?;
    let libvirt = Libvirt::open(connect.clone(), description.name.clone())?;
    let chosen = chosen.allow_domain(&|uuid| libvirt.definition_of(uuid))?;
    let idle_slot = IdleSlot::lock(host, name.as_str(), "restore")?;
    if let Some((state, _)) = idle_slot.prepared() {
        state.refuse_prepared().map_err(rekindle_vm::error::LifeError::from)?;
    }
    let rundir = idle_slot.rundir.clone();
    let planned = plan(&libvirt, &description, &chosen, request);
    let Plan { overlays, xml } = match planned {
        Ok(planned) => planned,
        Err(e) => {
            idle_slot.release();
            return Err(e);
        }
    };
    let hardware = chosen.recipe.hardware();
    let starter = format!("by libvirt, which restores it ({})", description.name);
    let state = State {
        format: format_of(&hardware),
        definition: rekindle_vm::definition::Definition { name: name.clone(), ..chosen.recipe.definition().clone() },
        hardware,
        generation: GENERATION,
        vmm: None,
        version: None,
        previous: None,
        prepared: None,
        attached: Some(Attached { uid: 0, starter }),
    };
    state.write(&rundir).map_err(file_error(&rundir, "state.json"))?;
    let journal_failed = file_error(&rundir, JOURNAL_FILE);
    let mut journal = Journal::open(&rundir, Kind::LibvirtRestore, None, GENERATION).map_err(&journal_failed)?;
    let domain = RestoredDomain { uuid: description.uuid.clone(), connect };
    journal.operation.restored_domain = Some(domain.clone());
    journal.write().map_err(&journal_failed)?;
    fault::point("libvirt-restore.prepare.journalled", None, None);
    let image_path = saved_path(host, &rundir, &state.definition);
    let restore = Restore { host, name, rundir: &rundir, libvirt: &libvirt, domain: &domain, image_path: &image_path };
    let attached = restore.to_attached(request, chosen, overlays, &xml, progress).and_then(|attached| {
        journal.operation.to.clone_from(&attached.state.vmm);
        journal.advance(Step::Resume).map_err(&journal_failed)?;
        Ok(attached)
    });
    let AttachedDomain { state, checkpoint, taken_us, ram } = match attached {
        Ok(attached) => attached,
        Err(e) => {
            return Err(match undo(host, &rundir, &state, &libvirt, &domain) {
                Ok(()) => e,
                Err(not_undone) => {
                    tracing::error!(
                        "{name}: the restore failed: {}; to remove what it has made: rekindle recover {name}",
                        with_causes(&e)
                    );
                    not_undone
                }
            });
        }
    };
    let pid = state.vmm.map_or(0, |vmm| vmm.pid);
    let may_run = |source| RestoreError::MayRun { name: name.to_string(), pid, source: Box::new(source) };
    fault::point("libvirt-restore.resume.journalled", None, None);
    let resumed = libvirt.domain(&domain.uuid).and_then(|found| found.resume().map_err(|e| libvirt.failed(e)));
    resumed.map_err(&may_run)?;
    fault::point("libvirt-restore.resume.resumed", None, None);
    let resumed_after_us = started.elapsed().as_micros() as u64;
    let filled = ram.is_none();
    if let Some(mut ram) = ram {
        ram.hand_over_to_pager(&rundir);
    }
    fault::point("libvirt-restore.settle.handed-over", None, None);
    libvirt.define(&domain.uuid).map_err(&may_run)?;
    fault::point("libvirt-restore.settle.defined", None, None);
    journal.close(End::Done).map_err(|e| may_run(journal_failed(e)))?;
    let (name, domain) = (name.to_string(), description.name);
    Ok(RestoredIntoLibvirt { name, domain, checkpoint, taken_us, resumed_after_us, pid, filled })
}

/// Finishes a restore into libvirt if its guest may have run; otherwise undoes it.
///
/// # Errors
/// [`RestoreError`]: the recovery can be repeated.
pub fn recover(host: &Host, held: &LockedVm, journal: Journal) -> Result<Outcome, RestoreError> {
    let rundir = &held.rundir;
    let Some(domain) = journal.operation.restored_domain.clone() else {
        // It was interrupted before it did anything.
        clean_up(host, rundir, &held.state)?;
        return Ok(Outcome::Removed);
    };
    let libvirt = Libvirt::open(domain.connect.clone(), domain.uuid.clone())?;
    let state = match libvirt.find(&domain.uuid)? {
        Some(found) => found.state().map_err(|e| libvirt.failed(e))?,
        None => DomainState::ShutOff,
    };
    if journal.operation.step < Step::Resume || state == DomainState::ShutOff {
        undo(host, rundir, &held.state, &libvirt, &domain)?;
        return Ok(Outcome::Removed);
    }
    if state == DomainState::Paused {
        libvirt.domain(&domain.uuid)?.resume().map_err(|e| libvirt.failed(e))?;
    }
    libvirt.define(&domain.uuid)?;
    journal.close(End::Done).map_err(file_error(rundir, JOURNAL_FILE))?;
    Ok(Outcome::Finished)
}

/// Removes what a restore has made whose guest has not run, or has ended. Changes nothing if another program has resumed
/// the domain: its disks may be on the overlays of the restore.
fn undo(
    host: &Host,
    rundir: &RunDir,
    state: &State,
    libvirt: &Libvirt,
    domain: &RestoredDomain,
) -> Result<(), RestoreError> {
    if let Some(found) = libvirt.find(&domain.uuid)? {
        match found.state().map_err(|e| libvirt.failed(e))? {
            DomainState::ShutOff => {}
            DomainState::Paused => found.destroy().map_err(|e| libvirt.failed(e))?,
            DomainState::Running | DomainState::Other => {
                return Err(RestoreError::DomainRuns { domain: libvirt.domain.clone() });
            }
        }
    }
    Ok(clean_up(host, rundir, state)?)
}

/// What a restore needs, checked. Nothing has changed yet.
struct Plan {
    overlays: RestoredOverlays,
    /// The domain, its disks on fresh overlays.
    xml: String,
}

fn plan(
    libvirt: &Libvirt,
    description: &Description,
    chosen: &ChosenCheckpoint<AllowedDomain>,
    request: &Request,
) -> Result<Plan, RestoreError> {
    if libvirt.has_guest(&description.uuid)? {
        return Err(RestoreError::DomainRuns { domain: description.name.clone() });
    }
    let mut overlays = RestoredOverlays::open(&chosen.overlays, request.source_qemu())?;
    let files = overlays.give_to_libvirt(&description.disks)?;
    let mut missing = libvirt.missing(description)?;
    let other_disks = description.disks.iter().filter(|disk| !files.contains_key(&disk.target));
    missing.extend(missing_files(other_disks.filter_map(|disk| disk.files.first()).map(Path::new)));
    if !missing.is_empty() {
        return Err(RestoreError::Missing { domain: description.name.clone(), missing });
    }
    let files = files.into_iter().map(|(target, path)| (target, DiskFile::qcow2(path))).collect();
    let xml = portable_xml::with_disks_on(chosen.recipe.xml(), &files)
        .map_err(|problem| RestoreError::DomainXml { problem })?;
    Ok(Plan { overlays, xml })
}

/// A restore whose checks have passed.
struct Restore<'a> {
    host: &'a Host,
    name: &'a Name,
    rundir: &'a RunDir,
    libvirt: &'a Libvirt,
    domain: &'a RestoredDomain,
    /// Path of the save image.
    image_path: &'a Path,
}

/// A paused domain that is attached.
struct AttachedDomain {
    state: State,
    checkpoint: u64,
    taken_us: u64,
    /// `None`: all memory is loaded.
    ram: Option<OnDemandRam>,
}

impl Restore<'_> {
    /// Takes all steps before the guest is resumed.
    fn to_attached(
        &self,
        request: &Request,
        chosen: ChosenCheckpoint<AllowedDomain>,
        mut overlays: RestoredOverlays,
        xml: &str,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<AttachedDomain, RestoreError> {
        let hardware = chosen.recipe.hardware();
        overlays.create(self.rundir, &chosen.recipe.definition().qemu)?;
        fault::point("libvirt-restore.prepare.overlays", None, None);
        let info = chosen.image.info();
        let (checkpoint, taken_us) = (info.number, info.time_us);
        let Fenced { newest, known, .. } = claim_store(request, chosen.image.vm(), self.rundir)?;
        if request.at.is_none() {
            if newest != checkpoint {
                return Err(RestoreError::Newer { name: self.name.to_string(), newest });
            }
            chosen.require_footer_of(known, request, self.name.as_str())?;
        }
        fault::point("libvirt-restore.prepare.owned", None, None);
        let image = ImageToLoad {
            path: self.image_path,
            domain: &self.libvirt.domain,
            xml,
            machine: &hardware.machine,
            input: &Arc::new(checkpoint::read(chosen.image, hardware.ram_ids())?),
            eager: request.eager,
        };
        let mut ram = image.load(&self.libvirt.connection, progress)?;
        fault::point("libvirt-restore.renew.loaded", None, None);
        let RestoredDomain { uuid, connect } = self.domain.clone();
        let mut state = attach_locked(self.host, self.rundir, self.name, Monitor::Libvirt { domain: uuid, connect })?;
        if let Some(vmm) = &state.vmm {
            let mut qmp = vmm.connect(MONITOR_TIMEOUT)?;
            require_same_processors(&mut qmp, &hardware, checkpoint)?;
            if let Some(ram) = &mut ram {
                ram.verify(GuestRam::of(&mut qmp, vmm.process())?)?;
                ram.record_fill(self.rundir, vmm, &request.store, request.credentials.as_ref())?;
            }
            overlays.locate(&mut qmp, vmm)?;
            if let Some(move_claim) = &request.move_claim {
                // From here on the overlay of the source QEMU is discarded: the guest cannot continue there.
                move_claim.may_run.store(true, Ordering::SeqCst);
            }
            overlays.note_resume(self.rundir, vmm)?;
        }
        // The next checkpoints merge the overlays on which libvirt has started the domain.
        if let Some(machine) = &mut state.hardware.foreign {
            machine.arguments = without_overlays(&machine.arguments);
        }
        state.write(self.rundir).map_err(file_error(self.rundir, "state.json"))?;
        fault::point("libvirt-restore.renew.attached", None, None);
        Ok(AttachedDomain { state, checkpoint, taken_us, ram })
    }
}

fn path_error(path: &Path) -> impl Fn(io::Error) -> RestoreError + use<> {
    let path = path.to_owned();
    move |source| RestoreError::Journal { path: path.clone(), source }
}

fn file_error(rundir: &RunDir, name: &str) -> impl Fn(io::Error) -> RestoreError + use<> {
    path_error(&rundir.file(name))
}
