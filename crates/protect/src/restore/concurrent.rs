//! A load that runs concurrently with the commit of its checkpoint: the source host has stopped the guest and sends its
//! state before the commit.
//!
//! Before the guest is stopped, the destination host locks the VM, and reads the data of the newest checkpoint that a
//! load needs. The state that is sent later is that checkpoint with changes, so it can be loaded immediately. The guest
//! is resumed only if three conditions hold: the source host has reported the commit; after that, this host has become
//! the store's owner; and the device state and each page that QEMU was given equal those of the committed checkpoint.
//! Until then, access to any other page blocks.
//!
//! A load gives QEMU two kinds of pages. *Small blocks* are RAM blocks that are not loaded on demand (firmware, ACPI
//! tables, video memory). The waiting QEMU has a copy of its own of them, so it gets only the pages that *differ*.
//! *Pages for the load* are pages of the other blocks that QEMU itself reads while it loads the devices.

use super::checkpoint::{self, ChosenCheckpoint, Contents, LoadInput, PendingImage, ReadPages, SmallBlockPages};
use super::load::{self, EmptyDestination};
use super::prepare::{PrimedQemu, WaitingQemu};
use super::{
    PreparedUse, Request, RestoreError, RestorePlan, Restored, handover_into, plan_restore, reject_disks_without_epoch,
};
use crate::load_pages;
use crate::recipe::permission::{AllowedRecipe, Permission};
use rekindle_pages::{PageNo, PageRun};
use rekindle_qemu::command::Hardware;
use rekindle_qemu::stream;
use rekindle_store::types::Vm;
use rekindle_vm::definition::Name;
use rekindle_vm::disks::{self, Epochs};
use rekindle_vm::error::LifeError;
use rekindle_vm::fault;
use rekindle_vm::host::Host;
use rekindle_vm::overlays::{RestoredOverlays, SourceQemu};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::slot::{IdleSlot, Plan};
use rekindle_vm::state::Prepared;
use rekindle_vm::timeline::Recorder;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Instant;

/// The part of a checkpoint that the source host sends while it commits the checkpoint.
pub(crate) struct SentState {
    pub(crate) number: u64,
    pub(crate) devices: Vec<u8>,
    pub(crate) epochs: Epochs,
    /// The pages of [`EarlyLoad::pages`] that have changed.
    pub(crate) pages: load_pages::Pages,
}

/// A waiting QEMU, with the data that a load needs of the checkpoint before the last one. The VM is locked.
pub(crate) struct EarlyLoad<'a> {
    idle_slot: IdleSlot<'a>,
    plan: Plan,
    prepared: Prepared,
    waiting: WaitingQemu,
    vm: Vm,
    permission: Arc<Permission>,
    recipe: AllowedRecipe,
    input: LoadInput,
    /// The content of the small blocks in the checkpoint.
    small_blocks: Contents,
}

impl<'a> EarlyLoad<'a> {
    /// Reads the newest checkpoint for the waiting QEMU, which is `primed`.
    pub(crate) fn new(
        host: &'a Host,
        name: &Name,
        request: &Request,
        primed: &mut Option<PrimedQemu>,
    ) -> Result<Self, RestoreError> {
        let permission = Permission::of(host, name, request.choice());
        let chosen = ChosenCheckpoint::open(&permission, request)?;
        let idle_slot = IdleSlot::lock(host, name.as_str(), "restore")?;
        let unusable = |why: String| LifeError::Unfit { name: name.to_string(), problems: vec![why] };
        // A guest that moves has no overlays on its disks.
        let overlays = RestoredOverlays::open(&[], SourceQemu::Ended)?;
        let planned = plan_restore(&idle_slot, request, &chosen, &overlays).and_then(|planned| match planned {
            RestorePlan { plan, prepared: PreparedUse::Suitable(prepared) } => Ok((plan, *prepared)),
            RestorePlan { prepared: PreparedUse::Unsuitable(why), .. } => Err(unusable(why).into()),
            RestorePlan { prepared: PreparedUse::NotPrepared, .. } => {
                Err(unusable("no QEMU waits for it".into()).into())
            }
        });
        let (plan, prepared) = match planned {
            Ok(planned) => planned,
            Err(e) => {
                idle_slot.release();
                return Err(e);
            }
        };
        let waiting =
            WaitingQemu::of(&prepared, &idle_slot.rundir, &plan.state.hardware, primed.take()).map_err(unusable)?;
        let ChosenCheckpoint { image, recipe, .. } = chosen;
        let vm = image.vm().clone();
        let input = checkpoint::read(image, recipe.ram_ids())?;
        let own_copy = input.own_copy(&waiting.ram)?;
        let pages = input.read_pages(|image| input.read_differing(image, &own_copy))?;
        let mut small_blocks = own_copy;
        if let SmallBlockPages::Differing(differing) = &pages.small {
            small_blocks.extend(differing.iter().cloned());
        }
        let input = LoadInput { pages: Some(pages), ..input };
        Ok(Self { idle_slot, plan, prepared, waiting, vm, permission, recipe, input, small_blocks })
    }

    pub(crate) fn number(&self) -> u64 {
        self.input.number
    }

    /// Returns the pages that were read: all pages of the small blocks, and the pages for the load.
    pub(crate) fn pages(&self) -> Vec<PageRun> {
        let small_blocks = self.input.small_blocks();
        let mut runs: Vec<_> =
            small_blocks.map(|(index, block)| PageRun::new(index, PageNo(0)..PageNo(block.pages()))).collect();
        let pages_for_load = self.input.pages_for_load();
        runs.extend(PageRun::merged(pages_for_load.iter().map(|(id, _)| *id)));
        runs
    }

    pub(crate) fn devices(&self) -> &[u8] {
        &self.input.devices
    }

    /// Releases the VM's lock and returns the QEMU.
    pub(crate) fn into_primed(self) -> PrimedQemu {
        PrimedQemu::new(self.prepared.vmm, self.waiting)
    }

    /// Loads the state `sent`, and resumes the guest after the commit. `committed` receives a message after the commit,
    /// and is closed if there is no commit.
    pub(crate) fn load(
        self,
        sent: SentState,
        committed: Receiver<()>,
        request: &Request,
        started: Instant,
    ) -> Result<Restored, RestoreError> {
        let Self { idle_slot, plan, prepared, waiting, vm, permission, recipe, input, small_blocks } = self;
        let mut recorder = Recorder::new(idle_slot.rundir.name(), "restore");
        plan.check_room()?;
        let (input, expected) = ExpectedCheckpoint::of(input, small_blocks, (vm, permission, recipe), sent)?;
        let slot = idle_slot.into_slot_of_waiting(plan);
        let journal = slot.claim_ram(&prepared.vmm)?;
        fault::point("restore.prepare.journalled", None, Some(&prepared.vmm));
        let WaitingQemu { qmp, ram, registered } = waiting;
        recorder.step("claim its RAM");
        let empty = EmptyDestination::waiting(prepared.vmm.clone(), qmp, ram, registered)?;
        let handover = handover_into(&slot, journal, recorder);
        let input = Arc::new(input);
        // Why the commit was not confirmed. QEMU is then killed, so the load fails too, with an error that hides this
        // one.
        let confirm_error = OnceLock::new();
        let restored = thread::scope(|scope| {
            let (input, slot, confirm_error) = (&input, &slot, &confirm_error);
            let confirm = move || {
                // If `confirm` fails or panics before it sets the image, access to the checkpoint's pages must fail and
                // not block forever.
                let _guard = NeverCommittedOnDrop(&input.image);
                let confirmed = expected.confirm(&committed, input, request, &slot.rundir, &slot.state.hardware);
                confirmed.map_err(|e| {
                    if let Err(e) = prepared.vmm.kill() {
                        tracing::warn!("cannot end the QEMU of a failed load: {e}");
                    }
                    let _ = confirm_error.set(e);
                    RestoreError::NotCommitted { number: input.number }
                })
            };
            load::load_and_resume(handover, empty, input, Some(scope.spawn(confirm)), &mut |_| Ok(()), request, started)
        });
        // An error of `confirm` has caused the error of the load.
        restored.map_err(|e| super::undo(slot, confirm_error.into_inner().unwrap_or(e)))
    }
}

/// Records on drop that the checkpoint will never be committed. Has no effect if the committed image is set, because an
/// image can be set only once.
struct NeverCommittedOnDrop<'a>(&'a PendingImage);

impl Drop for NeverCommittedOnDrop<'_> {
    fn drop(&mut self) {
        self.0.set(None);
    }
}

/// The properties that the committed checkpoint must have to match the loaded state.
struct ExpectedCheckpoint {
    vm: Vm,
    permission: Arc<Permission>,
    recipe: AllowedRecipe,
    epochs: Epochs,
    /// The content of the small blocks. Missing pages are zero.
    small_blocks: Contents,
}

impl ExpectedCheckpoint {
    /// Applies the changes `sent` to `input`, which has the previous checkpoint, and to `small_blocks`, the content of
    /// its small blocks. Changes of pages that the load does not need are ignored.
    fn of(
        input: LoadInput,
        mut small_blocks: Contents,
        (vm, permission, recipe): (Vm, Arc<Permission>, AllowedRecipe),
        sent: SentState,
    ) -> Result<(LoadInput, Self), RestoreError> {
        let SentState { number, devices, epochs, pages: changed } = sent;
        stream::check(&devices)?;
        let small_block_ids: Vec<_> = input.small_blocks().map(|(index, _)| index).collect();
        // `EarlyLoad::new` has read only `Differing` pages.
        let (mut differing, mut for_load): (Contents, Contents) = match input.pages {
            Some(ReadPages { small: SmallBlockPages::All(small) | SmallBlockPages::Differing(small), for_load }) => {
                (small.into_iter().collect(), for_load.into_iter().collect())
            }
            None => (Contents::new(), Contents::new()),
        };
        for (id, content) in changed {
            if small_block_ids.contains(&id.0) {
                small_blocks.insert(id, content.clone());
                differing.insert(id, content);
            } else if let Some(known_content) = for_load.get_mut(&id) {
                *known_content = content;
            }
        }
        let small = SmallBlockPages::Differing(differing.into_iter().collect());
        let pages = Some(ReadPages { small, for_load: for_load.into_iter().collect() });
        let input = LoadInput { image: PendingImage::default(), number, devices, pages, ..input };
        Ok((input, Self { vm, permission, recipe, epochs, small_blocks }))
    }

    /// Waits for the commit, makes this host the store's owner, and compares the checkpoint with the loaded state.
    fn confirm(
        &self,
        committed: &Receiver<()>,
        input: &LoadInput,
        request: &Request,
        rundir: &RunDir,
        hardware: &Hardware,
    ) -> Result<(), RestoreError> {
        committed.recv().map_err(|_| RestoreError::NotCommitted { number: input.number })?;
        reject_disks_without_epoch(hardware, &self.epochs)
            .map_err(|problems| LifeError::Unfit { name: rundir.name().into(), problems })?;
        disks::serve_checkpoint(rundir, hardware, &self.epochs).map_err(LifeError::from)?;
        thread::scope(|scope| {
            let claim = scope.spawn(|| checkpoint::claim_during_load(request, &self.vm, input.number, rundir));
            let compared = self.require_same(input, request, rundir.name());
            claim.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            compared
        })
    }

    /// Compares the committed checkpoint with the loaded state.
    fn require_same(&self, input: &LoadInput, request: &Request, name: &str) -> Result<(), RestoreError> {
        let number = input.number;
        let require = |is_same: bool, what: &str| match is_same {
            true => Ok(()),
            false => Err(RestoreError::DiffersFromAnnounced { number, what: what.into() }),
        };
        let ChosenCheckpoint { image, recipe, epochs, .. } = ChosenCheckpoint::open(&self.permission, request)?;
        match image.info().number {
            newest if newest != number => return Err(RestoreError::Newer { name: name.into(), newest }),
            _ if !recipe.has_same_machine(&self.recipe) => {
                return Err(RestoreError::Changed { name: name.into(), number });
            }
            _ => {}
        }
        require(image.info().blocks == input.blocks, "its RAM blocks")?;
        require(epochs == self.epochs, "its disks")?;
        // From here on the checkpoint's pages can be read.
        input.image.set(Some(image));
        let image = input.image()?;
        require(image.devices()? == input.devices, "its device state")?;
        // Of the small blocks all pages are compared, also those that QEMU had before the load.
        let mut loaded_pages = input.small_block_pages(&self.small_blocks);
        let pages_for_load = input.pages_for_load();
        loaded_pages.extend(pages_for_load.iter().map(|(id, content)| (*id, &**content)));
        match image.unlike(&loaded_pages)?.first() {
            None => Ok(()),
            Some((block, page)) => {
                let id = input.blocks.get(block.0).map_or("", |block| &block.id);
                require(false, &format!("page {page} of {id}"))
            }
        }
    }
}
