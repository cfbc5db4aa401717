//! A load beside the commit of what is loaded: the guest is stopped on another host, which tells what it has read of it before that counts.
//!
//! Before the guest is stopped, what a load needs of its newest checkpoint is read, and the place of the VM is taken. What comes then
//! is that checkpoint but for what has changed, so it can be given to QEMU at once. The guest goes on only if, when the other host has
//! said that its checkpoint counts, the store is ours, and the device state and each page that QEMU was given are those of the
//! checkpoint in the store. A page that is wanted before waits for the commit.

use super::checkpoint::{self, Ahead, Chosen, Contents, Late, Pages, Small};
use super::go::{self, Waiting};
use super::prepare::{Early, Ready};
use super::{Request, RestoreError, Restored, plan, without_epoch};
use crate::first::{self, Run, runs};
use crate::recipe::Recipe;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::stream;
use rekindle_store::remote::SpareConnections;
use rekindle_store::types::Vm;
use rekindle_vm::definition::Name;
use rekindle_vm::disks::{self, Epochs};
use rekindle_vm::fault;
use rekindle_vm::host::Host;
use rekindle_vm::life::LifeError;
use rekindle_vm::place::{Plan, Site};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::Prepared;
use rekindle_vm::timeline::Recorder;
use std::sync::OnceLock;
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::Instant;

/// What the other host tells of a checkpoint that it is committing.
pub(crate) struct Told {
    pub(crate) number: u64,
    pub(crate) devices: Vec<u8>,
    pub(crate) epochs: Epochs,
    /// Those of [`Looked::pages`] that are not as they were before.
    pub(crate) pages: first::Pages,
}

/// A QEMU that waits, and what it needs of the checkpoint before the one that comes. Nobody else works on the VM.
pub(crate) struct Looked<'a> {
    site: Site<'a>,
    plan: Plan,
    prepared: Prepared,
    ready: Ready,
    vm: Vm,
    recipe: Recipe,
    ahead: Ahead,
    /// What QEMU is going to have in the blocks that are not brought on demand.
    small: Contents,
    spare: SpareConnections,
}

/// Lines to the store that are needed when the checkpoint counts: to read it, and to become its owner.
const LINES: usize = 2;

impl<'a> Looked<'a> {
    /// Look at the newest checkpoint for the QEMU that waits, which is `early`.
    pub(crate) fn new(
        host: &'a Host,
        name: &Name,
        request: &Request,
        early: &mut Option<Early>,
    ) -> Result<Self, RestoreError> {
        let chosen = Chosen::open(request)?;
        let site = Site::take(host, name.as_str(), "restore")?;
        let of_no_use = |why: Option<String>| {
            let why = why.unwrap_or_else(|| "nothing waits".into());
            RestoreError::Life(LifeError::Unfit { name: name.to_string(), problems: vec![why] })
        };
        let found = plan(&site, name, request, &chosen).and_then(|(plan, unused)| match (unused, site.prepared()) {
            (None, Some((_, prepared))) => Ok((plan, prepared.clone())),
            (unused, _) => Err(of_no_use(unused.flatten())),
        });
        let (plan, prepared) = match found {
            Ok(found) => found,
            Err(e) => {
                site.leave();
                return Err(e);
            }
        };
        let ready = Ready::of(&prepared, &site.rundir, &plan.state.hardware, early.take());
        let ready = ready.map_err(|why| of_no_use(Some(why)))?;
        let (vm, recipe) = (chosen.image.vm().clone(), chosen.recipe.clone());
        let ahead = checkpoint::read(chosen)?;
        let mut small = ahead.there(&ready.ram)?;
        let pages = ahead.read_pages(|image| ahead.read_differing(image, &small))?;
        if let Small::Differing(differing) = &pages.small {
            small.extend(differing.iter().map(|(block, page, content)| ((*block, *page), content.clone())));
        }
        let ahead = Ahead { pages: Some(pages), ..ahead };
        let spare = SpareConnections::default();
        spare.make(&request.store, request.identity.as_ref(), LINES)?;
        Ok(Self { site, plan, prepared, ready, vm, recipe, ahead, small, spare })
    }

    /// The checkpoint.
    pub(crate) fn number(&self) -> u64 {
        self.ahead.number
    }

    /// The pages that are there.
    pub(crate) fn pages(&self) -> Vec<Run> {
        let small = self.ahead.small().map(|(index, block)| Run::new(index, 0..block.pages()));
        small.chain(runs(self.ahead.first().iter().map(|(block, page, _)| (*block, *page)))).collect()
    }

    /// Its device state.
    pub(crate) fn devices(&self) -> &[u8] {
        &self.ahead.devices
    }

    /// Lines to the store that are there already.
    pub(crate) fn spare(&self) -> SpareConnections {
        self.spare.clone()
    }

    /// Nothing comes of it.
    pub(crate) fn into_early(self) -> Early {
        Early::new(self.prepared.vmm, self.ready)
    }

    /// Load what was `told`, and let the guest go on once it is `committed`: that is sent something then, or closed.
    pub(crate) fn load(
        self,
        told: Told,
        committed: Receiver<()>,
        request: &Request,
        began: Instant,
    ) -> Result<Restored, RestoreError> {
        let Self { site, plan, prepared, ready, vm, recipe, ahead, small, spare: _ } = self;
        let mut recorder = Recorder::new(site.rundir.name(), "restore");
        plan.check_room()?;
        let (ahead, next) = Next::of(ahead, small, vm, recipe, told)?;
        let place = site.place_of(plan);
        let journal = place.claim(&prepared.vmm)?;
        fault::point("restore.prepare.journalled", None, Some(&prepared.vmm));
        let Ready { qmp, ram, registered } = ready;
        let waiting = Waiting { vmm: prepared.vmm.clone(), qmp, ram, journal, prepared: true, registered };
        recorder.step("claim its RAM");
        let why = OnceLock::new();
        let done = thread::scope(|scope| {
            let (ahead, place, why) = (&ahead, &place, &why);
            let counts = move || {
                // Who waits for a page of a checkpoint that does not count waits no more.
                let _never = Never(&ahead.image);
                let counts = next.counts(&committed, ahead, request, &place.rundir, &place.state.hardware);
                counts.map_err(|e| {
                    if let Err(e) = prepared.vmm.kill() {
                        tracing::warn!("what was loaded is of no use, and cannot be ended: {e}");
                    }
                    let _ = why.set(e);
                    RestoreError::NotCommitted { number: ahead.number }
                })
            };
            go::go_in(place, waiting, ahead, Some(scope.spawn(counts)), request, &mut recorder, began)
        });
        match done {
            Ok(restored) => {
                recorder.write(&place.rundir);
                Ok(restored)
            }
            // What follows from it says less.
            Err(e) => Err(super::undo(place, why.into_inner().unwrap_or(e))),
        }
    }
}

/// Says, when it goes, that there will be no checkpoint if there is none.
struct Never<'a>(&'a Late);

impl Drop for Never<'_> {
    fn drop(&mut self) {
        self.0.set(None);
    }
}

/// What a checkpoint has to be that was loaded already.
struct Next {
    vm: Vm,
    recipe: Recipe,
    epochs: Epochs,
    /// Pages of the blocks that are not brought on demand. Those that it does not name are zero.
    small: Contents,
}

impl Next {
    /// The checkpoint after `ahead`, as it was told; `small` is what QEMU has of the small blocks, but for what was told.
    fn of(
        ahead: Ahead,
        mut small: Contents,
        vm: Vm,
        recipe: Recipe,
        told: Told,
    ) -> Result<(Ahead, Self), RestoreError> {
        let Told { number, devices, epochs, pages: changed } = told;
        stream::check(&devices)?;
        let is_small: Vec<_> = ahead.small().map(|(index, _)| index).collect();
        let known = |pages: first::Pages| -> Contents {
            pages.into_iter().map(|(block, page, content)| ((block, page), content)).collect()
        };
        let (mut differing, mut first) = match ahead.pages {
            Some(Pages { small: Small::All(small) | Small::Differing(small), first }) => (known(small), known(first)),
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
        let listed = |contents: Contents| -> first::Pages {
            contents.into_iter().map(|((block, page), content)| (block, page, content)).collect()
        };
        let pages = Some(Pages { small: Small::Differing(listed(differing)), first: listed(first) });
        let ahead = Ahead { image: Late::default(), number, devices, pages, ..ahead };
        Ok((ahead, Self { vm, recipe, epochs, small }))
    }

    /// Wait until it is committed; become the store's owner, and see that it is what was loaded.
    fn counts(
        &self,
        committed: &Receiver<()>,
        ahead: &Ahead,
        request: &Request,
        rundir: &RunDir,
        hardware: &Hardware,
    ) -> Result<(), RestoreError> {
        committed.recv().map_err(|_| RestoreError::NotCommitted { number: ahead.number })?;
        without_epoch(hardware, &self.epochs)
            .map_err(|problems| LifeError::Unfit { name: rundir.name().into(), problems })?;
        disks::have(rundir, hardware, &self.epochs).map_err(LifeError::from)?;
        thread::scope(|scope| {
            let owned = scope.spawn(|| checkpoint::fence_beside(request, &self.vm, ahead.number, rundir));
            let same = self.is_same(ahead, request, rundir.name());
            owned.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            same
        })
    }

    fn is_same(&self, ahead: &Ahead, request: &Request, name: &str) -> Result<(), RestoreError> {
        let number = ahead.number;
        let same = |is: bool, what: &str| match is {
            true => Ok(()),
            false => Err(RestoreError::Otherwise { number, what: what.into() }),
        };
        let Chosen { image, recipe, epochs } = Chosen::open(request)?;
        match image.info().number {
            newest if newest != number => return Err(RestoreError::Newer { name: name.into(), newest }),
            _ if recipe != self.recipe => return Err(RestoreError::Changed { name: name.into(), number }),
            _ => {}
        }
        same(image.info().blocks == ahead.blocks, "its RAM blocks")?;
        same(epochs == self.epochs, "its disks")?;
        // Its pages can be had from here on.
        ahead.image.set(Some(image));
        let image = ahead.image()?;
        same(image.devices()? == ahead.devices, "its device state")?;
        let mut given = ahead.all_small(&self.small);
        let first = ahead.first();
        given.extend(first.iter().map(|(block, page, content)| ((*block, *page), &**content)));
        match image.unlike(&given)?.first() {
            None => Ok(()),
            Some((block, page)) => {
                let id = ahead.blocks.get(*block).map_or("", |block| &block.id);
                same(false, &format!("page {page} of {id}"))
            }
        }
    }
}
