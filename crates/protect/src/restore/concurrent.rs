//! A load that runs concurrently with the commit of its checkpoint: the source host has stopped the guest and sends its
//! state before the commit.
//!
//! Before the guest is stopped, the destination host locks the VM, and reads the data of the newest checkpoint that a
//! load needs. The state that is sent later is that checkpoint with changes, so it can be loaded immediately. The guest
//! is resumed only if three conditions hold: the source host has reported the commit; after that, this host has become
//! the store's owner; and the device state and each page that QEMU was given equal those of the committed checkpoint.
//! Until then, access to any other page blocks.

use super::checkpoint::{self, ChosenCheckpoint, Contents, LoadInput, PendingImage, ReadPages, SmallBlockPages};
use super::load::{self, EmptyDestination};
use super::prepare::{PrimedQemu, WaitingQemu};
use super::{Request, RestoreError, Restored, handover_into, plan, without_epoch};
use crate::load_pages;
use crate::recipe::Recipe;
use rekindle_pages::{PageNo, PageRun};
use rekindle_qemu::command::Hardware;
use rekindle_qemu::stream;
use rekindle_store::remote::SpareConnections;
use rekindle_store::types::Vm;
use rekindle_vm::definition::Name;
use rekindle_vm::disks::{self, Epochs};
use rekindle_vm::error::LifeError;
use rekindle_vm::fault;
use rekindle_vm::host::Host;
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
    ready: WaitingQemu,
    vm: Vm,
    recipe: Recipe,
    input: LoadInput,
    /// The content of the blocks that are not loaded on demand.
    small: Contents,
    spare: SpareConnections,
}

/// Number of connections to the store that are needed after the commit: one to read the store, one to become its owner.
const LINES: usize = 2;

impl<'a> EarlyLoad<'a> {
    /// Reads the newest checkpoint for the waiting QEMU, which is `early`.
    pub(crate) fn new(
        host: &'a Host,
        name: &Name,
        request: &Request,
        early: &mut Option<PrimedQemu>,
    ) -> Result<Self, RestoreError> {
        let chosen = ChosenCheckpoint::open(request)?;
        let idle_slot = IdleSlot::lock(host, name.as_str(), "restore")?;
        let unusable = |why: Option<String>| {
            let why = why.unwrap_or_else(|| "no QEMU waits for it".into());
            RestoreError::Life(LifeError::Unfit { name: name.to_string(), problems: vec![why] })
        };
        let found =
            plan(&idle_slot, name, request, &chosen).and_then(|(plan, unused)| match (unused, idle_slot.prepared()) {
                (None, Some((_, prepared))) => Ok((plan, prepared.clone())),
                (unused, _) => Err(unusable(unused.flatten())),
            });
        let (plan, prepared) = match found {
            Ok(found) => found,
            Err(e) => {
                idle_slot.release();
                return Err(e);
            }
        };
        let ready = WaitingQemu::of(&prepared, &idle_slot.rundir, &plan.state.hardware, early.take());
        let ready = ready.map_err(|why| unusable(Some(why)))?;
        let (vm, recipe) = (chosen.image.vm().clone(), chosen.recipe.clone());
        let input = checkpoint::read(chosen)?;
        let mut small = input.own_copy(&ready.ram)?;
        let pages = input.read_pages(|image| input.read_differing(image, &small))?;
        if let SmallBlockPages::Differing(differing) = &pages.small {
            small.extend(differing.iter().map(|(block, page, content)| ((*block, *page), content.clone())));
        }
        let input = LoadInput { pages: Some(pages), ..input };
        let spare = SpareConnections::default();
        spare.make(&request.store, request.identity.as_ref(), LINES)?;
        Ok(Self { idle_slot, plan, prepared, ready, vm, recipe, input, small, spare })
    }

    pub(crate) fn number(&self) -> u64 {
        self.input.number
    }

    /// Returns the pages that were read.
    pub(crate) fn pages(&self) -> Vec<PageRun> {
        let small = self.input.small().map(|(index, block)| PageRun::new(index, PageNo(0)..PageNo(block.pages())));
        small.chain(PageRun::merged(self.input.first().iter().map(|(block, page, _)| (*block, *page)))).collect()
    }

    pub(crate) fn devices(&self) -> &[u8] {
        &self.input.devices
    }

    /// Returns the existing connections to the store.
    pub(crate) fn spare(&self) -> SpareConnections {
        self.spare.clone()
    }

    /// Releases the VM's lock and returns the QEMU.
    pub(crate) fn into_early(self) -> PrimedQemu {
        PrimedQemu::new(self.prepared.vmm, self.ready)
    }

    /// Loads the state `sent`, and resumes the guest after the commit. `committed` receives a message after the commit,
    /// and is closed if there is no commit.
    pub(crate) fn load(
        self,
        sent: SentState,
        committed: Receiver<()>,
        request: &Request,
        began: Instant,
    ) -> Result<Restored, RestoreError> {
        let Self { idle_slot, plan, prepared, ready, vm, recipe, input, small, spare: _ } = self;
        let mut recorder = Recorder::new(idle_slot.rundir.name(), "restore");
        plan.check_room()?;
        let (input, next) = ExpectedCheckpoint::of(input, small, vm, recipe, sent)?;
        let place = idle_slot.into_slot_of_waiting(plan);
        let journal = place.claim_ram(&prepared.vmm)?;
        fault::point("restore.prepare.journalled", None, Some(&prepared.vmm));
        let WaitingQemu { qmp, ram, registered } = ready;
        recorder.step("claim its RAM");
        let waiting = EmptyDestination::waiting(prepared.vmm.clone(), qmp, ram, registered)?;
        let handover = handover_into(&place, journal, recorder);
        let input = Arc::new(input);
        let why = OnceLock::new();
        let restored = thread::scope(|scope| {
            let (input, place, why) = (&input, &place, &why);
            let confirm = move || {
                // If the checkpoint is never committed, access to its pages must fail and not block forever.
                let _never = NeverCommitted(&input.image);
                let confirm = next.confirm(&committed, input, request, &place.rundir, &place.state.hardware);
                confirm.map_err(|e| {
                    if let Err(e) = prepared.vmm.kill() {
                        tracing::warn!("cannot end the QEMU of a failed load: {e}");
                    }
                    let _ = why.set(e);
                    RestoreError::NotCommitted { number: input.number }
                })
            };
            load::load_and_resume(handover, waiting, input, Some(scope.spawn(confirm)), request, began)
        });
        // The first error has caused the other one.
        restored.map_err(|e| super::undo(place, why.into_inner().unwrap_or(e)))
    }
}

/// Records on drop that the checkpoint will never be committed, unless it is.
struct NeverCommitted<'a>(&'a PendingImage);

impl Drop for NeverCommitted<'_> {
    fn drop(&mut self) {
        self.0.set(None);
    }
}

/// The properties that the committed checkpoint must have to match the loaded state.
struct ExpectedCheckpoint {
    vm: Vm,
    recipe: Recipe,
    epochs: Epochs,
    /// Pages of the blocks that are not loaded on demand. Missing pages are zero.
    small: Contents,
}

impl ExpectedCheckpoint {
    /// Applies the changes `sent` to `input`. `small` is the content of the small blocks before these changes.
    fn of(
        input: LoadInput,
        mut small: Contents,
        vm: Vm,
        recipe: Recipe,
        sent: SentState,
    ) -> Result<(LoadInput, Self), RestoreError> {
        let SentState { number, devices, epochs, pages: changed } = sent;
        stream::check(&devices)?;
        let is_small: Vec<_> = input.small().map(|(index, _)| index).collect();
        let known = |pages: load_pages::Pages| -> Contents {
            pages.into_iter().map(|(block, page, content)| ((block, page), content)).collect()
        };
        let (mut differing, mut first) = match input.pages {
            Some(ReadPages { small: SmallBlockPages::All(small) | SmallBlockPages::Differing(small), first }) => {
                (known(small), known(first))
            }
            None => (Contents::new(), Contents::new()),
        };
        for (block, page, content) in changed {
            let id = (block, page);
            if is_small.contains(&block) {
                small.insert(id, content.clone());
                differing.insert(id, content);
            } else if let Some(known) = first.get_mut(&id) {
                *known = content;
            }
        }
        let listed = |contents: Contents| -> load_pages::Pages {
            contents.into_iter().map(|((block, page), content)| (block, page, content)).collect()
        };
        let pages = Some(ReadPages { small: SmallBlockPages::Differing(listed(differing)), first: listed(first) });
        let input = LoadInput { image: PendingImage::default(), number, devices, pages, ..input };
        Ok((input, Self { vm, recipe, epochs, small }))
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
        without_epoch(hardware, &self.epochs)
            .map_err(|problems| LifeError::Unfit { name: rundir.name().into(), problems })?;
        disks::serve_checkpoint(rundir, hardware, &self.epochs).map_err(LifeError::from)?;
        thread::scope(|scope| {
            let owned = scope.spawn(|| checkpoint::fence_during_load(request, &self.vm, input.number, rundir));
            let same = self.is_same(input, request, rundir.name());
            owned.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            same
        })
    }

    fn is_same(&self, input: &LoadInput, request: &Request, name: &str) -> Result<(), RestoreError> {
        let number = input.number;
        let same = |is: bool, what: &str| match is {
            true => Ok(()),
            false => Err(RestoreError::Otherwise { number, what: what.into() }),
        };
        let ChosenCheckpoint { image, recipe, epochs } = ChosenCheckpoint::open(request)?;
        match image.info().number {
            newest if newest != number => return Err(RestoreError::Newer { name: name.into(), newest }),
            _ if recipe != self.recipe => return Err(RestoreError::Changed { name: name.into(), number }),
            _ => {}
        }
        same(image.info().blocks == input.blocks, "its RAM blocks")?;
        same(epochs == self.epochs, "its disks")?;
        // From here on the checkpoint's pages can be read.
        input.image.set(Some(image));
        let image = input.image()?;
        same(image.devices()? == input.devices, "its device state")?;
        let mut given = input.all_small(&self.small);
        let first = input.first();
        given.extend(first.iter().map(|(block, page, content)| ((*block, *page), &**content)));
        match image.unlike(&given)?.first() {
            None => Ok(()),
            Some((block, page)) => {
                let id = input.blocks.get(block.0).map_or("", |block| &block.id);
                same(false, &format!("page {page} of {id}"))
            }
        }
    }
}
